# Every target runs in .venv, made on first use and refreshed when a requirement changes; those that
# test other versions have one for each.
# PYTHON chooses the interpreter of a new .venv; ARGS goes to the command: make test ARGS=tests/basic

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# A file each says what is not as in constraints.txt.
VERSIONS := $(patsubst constraints/torch-%.txt,%,$(wildcard constraints/torch-*.txt))
TEST_VERSIONS := $(VERSIONS:%=test-%)

.PHONY: help train train-distributed soak test quick test-gpu test-versions $(TEST_VERSIONS) sweep check lint format types imports docs dist bench

help:
	@echo "make train   train the example model      ARGS='...' for its options"
	@echo "make train-distributed"
	@echo "             train it on two processes         PROCESSES=n, ARGS='...'"
	@echo "make test    run all tests, on all cores  ARGS='...' for pytest's options"
	@echo "make quick   run planning's tests and some of each other kind, in a minute or so, while writing"
	@echo "make test-versions"
	@echo "             run all tests with every torch that is supported, one after the other"
	@echo "             ($(TEST_VERSIONS)): downloads gigabytes"
	@echo "make test-gpu"
	@echo "             run the tests that a GPU changes, with PYTHON's torch: names of those that fail at"
	@echo "             once, and in runs/gpu/failed.txt  ARGS='--seconds 500 --failed FILE'"
	@echo "make soak    train in FP8 with each recipe, break off and resume on 1, 2 and 4 processes:"
	@echo "             an hour or more           ARGS='--recipes delayed --ranks 1 2 --steps 100'"
	@echo "make sweep   read every family that transformers can make tiny, in fp64 and with mutations, and"
	@echo "             compare the table of families: an hour or more, of which mutations take nearly all"
	@echo "             ARGS='llama bart --no-mutants' or '--part=0/8', with an eighth of the mutations"
	@echo "make check   lint, format, types, layers of imports"
	@echo "make docs    check what pages show, build the site into site/"
	@echo "make dist    build the sdist and the wheel into dist/, and check what an index would show"
	@echo "make bench   run the benchmarks            ARGS='...' for those on a GPU"

train: $(READY)
	$(BIN)/python examples/train_lm.py $(ARGS)

PROCESSES ?= 2
# A minute or two on a CPU; a run that goes on has its number of steps.
STEPS := $(if $(findstring --resume,$(ARGS)),,--steps 200)

train-distributed: $(READY)
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(PROCESSES) --max-restarts 3 \
	  examples/train_distributed.py --name distributed $(STEPS) $(ARGS)

soak: $(READY)
	$(BIN)/python -m tests.soak $(ARGS)

# Two cores take little more than half the time of one; ARGS='-n 0' runs all in one process.
PYTEST := pytest --numprocesses auto --dist worksteal --durations 20

test: $(READY)
	$(BIN)/python -m $(PYTEST) $(ARGS)

# A file or two for each kind of promise, without what starts processes or compiles.
QUICK := planning contract/test_channels.py contract/test_checkpoints.py contract/test_dtypes.py \
  contract/test_weight_gradients.py basic/test_all.py checks/test_every_operation.py \
  fused/test_linear_gradients.py fused/test_norm_linear.py engine/test_errors.py \
  engine/test_programs.py engine/test_recorder.py replay/test_values.py quantization/test_values.py \
  quantization/test_region.py applying/test_models.py reading/test_families.py \
  integrations/test_torch_nn.py models/test_decoder.py packaging/test_import.py \
  checks/test_planted_faults.py

quick: $(READY)
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -q -m "not slow" \
	  $(QUICK:%=tests/%) $(ARGS)

# With the torch of a machine that has a GPU, and not that of .venv. Each process is handed runs of
# tests in their order, as neighbors share kernels that it compiles.
test-gpu:
	$(PYTHON) -m pytest -p tests.gpu_run -p no:benchmark -m gpu --numprocesses 15 --dist load -q \
	  --tb short --durations 20 $(ARGS) tests

# A table is of all families; a sweep of some leaves it alone.
sweep: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.reading.sweep $(ARGS)
	$(if $(ARGS),,$(BIN)/python docs/write_families.py --check)

test-versions: $(TEST_VERSIONS)

$(TEST_VERSIONS): test-%: .venv-%/.ready
	@.venv-$*/bin/python -c "import numpy, sys, torch, triton; print('Python', sys.version.split()[0], \
	  *(f'{m.__name__} {m.__version__}' for m in (torch, triton, numpy)), sep=', ')"
	.venv-$*/bin/python -m $(PYTEST) $(ARGS)

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
	$(BIN)/python docs/write_snippets.py --check
	$(BIN)/python docs/write_commands.py --check
	$(BIN)/python docs/write_compatibility.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: .venv-dist/.ready
	rm -rf dist
	.venv-dist/bin/python -m build --outdir dist
	.venv-dist/bin/twine check --strict dist/*

bench: $(READY)
	$(BIN)/python benchmarks/host_overhead.py
	$(BIN)/python benchmarks/host_recipes.py
	$(BIN)/python benchmarks/host_sharded.py
	$(BIN)/python benchmarks/applied.py
	$(BIN)/python benchmarks/block_cpu.py
	$(BIN)/python benchmarks/compiled_cpu.py
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.gpu.run $(ARGS)

define environment
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
  echo "opfuser needs Python 3.10 or later. Name one: make PYTHON=python3.12 ..." >&2; exit 1; }
@$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -c 'import ensurepip, venv' || { \
  echo "$(PYTHON) cannot create virtual environments, as it lacks venv or ensurepip." >&2; \
  echo "Install them (on Debian and Ubuntu: apt-get install python3-venv)," >&2; \
  echo "or name another interpreter: make PYTHON=python3.12 ..." >&2; exit 1; }
$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)
endef
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check

$(READY): pyproject.toml constraints.txt
	$(call environment,$(VENV))
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

.venv-dist/.ready:
	$(call environment,.venv-dist)
	.venv-dist/bin/python $(PIP_INSTALL) build twine
	@touch $@

# triton last, and by itself: torch asks for one that need not be it.
$(VERSIONS:%=.venv-%/.ready): .venv-%/.ready: pyproject.toml constraints.txt constraints/torch-%.txt
	$(call environment,.venv-$*)
	grep -vE "^($$(sed -n 's/==.*//p' constraints/torch-$*.txt | paste -sd '|'))==" constraints.txt \
	  | cat - constraints/torch-$*.txt | grep -v '^triton' > .venv-$*/constraints.txt
	.venv-$*/bin/python $(PIP_INSTALL) -c .venv-$*/constraints.txt -e '.[dev]'
	.venv-$*/bin/python $(PIP_INSTALL) --no-deps -r constraints/torch-$*.txt
	@touch $@
