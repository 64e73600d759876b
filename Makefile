# Every target runs in .venv, made on first use and refreshed when a requirement changes.
# PYTHON chooses the interpreter of a new .venv; ARGS goes to the command: make test ARGS=tests/basic

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help train test check lint format types imports docs bench

help:
	@echo "make train   train the example model      ARGS='...' for its options"
	@echo "make test    run all tests                ARGS='...' for pytest's options"
	@echo "make check   lint, format, types, layers of imports"
	@echo "make docs    build the site into site/"
	@echo "make bench   run the benchmarks            ARGS='...' for those on a GPU"

train: $(READY)
	$(BIN)/python examples/train_lm.py $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

check: lint format types imports

lint: $(READY)
	$(BIN)/ruff check

format: $(READY)
	$(BIN)/ruff format --check

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports --no-logo

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY)
	$(BIN)/python benchmarks/host_overhead.py
	$(BIN)/python benchmarks/block_cpu.py
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.gpu.run $(ARGS)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "opfuser needs Python 3.10 or later. Name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "$(PYTHON) cannot create virtual environments, as it lacks venv or ensurepip." >&2; \
	  echo "Install them (on Debian and Ubuntu: apt-get install python3-venv)," >&2; \
	  echo "or name another interpreter: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[dev]'
	@touch $@
