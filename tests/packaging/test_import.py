"""``import opfuser`` brings in nothing heavy, and needs neither a GPU, a compiler nor triton."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import opfuser

ROOT = Path(__file__).parents[2]

NEW_MODULES = """
import json, sys
import torch
before = set(sys.modules)
import opfuser
print(json.dumps(sorted(set(sys.modules) - before)))
"""

LOADED = """
import json, sys
import opfuser
print(json.dumps(sorted(name for name in sys.modules if name.startswith("opfuser."))))
"""

# What a sequence that runs does not need.
NOT_LOADED = (
    "applying",
    "attention.choice",
    "attention.flex",
    "attention.flex_compiled",
    "basic.dot_product_attention",
    "cli",
    "explain.folding",
    "explain.plan_layers",
    "explain.plan_text",
    "explain.plan_view",
    "explain.reasons",
    "engine.replay",
    "expectations",
    "hf",
    "integrations",
    "models",
    "optim",
    "reading",
    "report",
    "testing",
)
MOST_MODULES = 226

USED_LATER = """
import sys
import torch
import opfuser
assert "opfuser.report" not in sys.modules
seq = opfuser.Sequential(opfuser.Linear(4, 2), opfuser.GELU())
plan = seq.plan(torch.ones(3, 4))
assert "<svg" in plan._repr_svg_() and "<" in plan._repr_html_()
assert str(plan) and plan.program
assert type(seq.to_torch()).__module__.startswith("torch.nn")
seq(torch.ones(3, 4)).sum().backward()
assert not seq.last_plan.replays
assert "opfuser.engine.replay" not in sys.modules
with opfuser.replay("on"):
    seq(torch.ones(3, 4)).sum().backward()
[replay] = seq.last_plan.replays
assert replay.refusal.code == "DEVICE"
assert "opfuser.reading" not in sys.modules
"""

RUN_WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch
import opfuser
x = torch.ones(3, 4, requires_grad=True)
class Cube(opfuser.PointwiseOperation):
    device_function = "not_there:cube"
    def value(self, x):
        return x**3
ops = opfuser.Linear(4, 2), opfuser.GELU(), Cube(), opfuser.SiLU(), opfuser.Dropout(0.1)
opfuser.Sequential(*ops)(x).sum().backward()
assert x.grad is not None and x.grad.isfinite().all()
"""


def run_bare(code: str) -> str:
    """Runs ``code`` in a new interpreter that sees no GPU and no program, warnings as errors."""
    env = {**os.environ, "PATH": "", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_adds_only_torch_modules_that_are_light() -> None:
    new = json.loads(run_bare(NEW_MODULES))
    packages = {name.partition(".")[0] for name in new}
    assert packages <= {"opfuser", "torch", "typing_extensions"} | sys.stdlib_module_names
    heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.onnx")
    assert [name for name in new if name.startswith(heavy)] == []


def test_import_loads_what_a_sequence_needs() -> None:
    loaded = json.loads(run_bare(LOADED))
    late = tuple(f"opfuser.{name}" for name in NOT_LOADED)
    assert [n for n in loaded if n in late or n.startswith(tuple(f"{m}." for m in late))] == []
    assert len(loaded) <= MOST_MODULES


def test_methods_load_what_they_use() -> None:
    run_bare(USED_LATER)


def read_by_type_checkers(package: ModuleType) -> dict[str, str]:
    """Names and modules of what a package imports for type checkers alone."""
    assert package.__file__ is not None
    tree = ast.parse(Path(package.__file__).read_text())
    [block] = [
        n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
    ]
    read = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        read |= {a.name: statement.module or a.name for a in statement.names if a.name != "*"}
    return read


def test_names_that_load_later_are_those_that_type_checkers_read() -> None:
    read = read_by_type_checkers(opfuser)
    modules = {name: name for name in opfuser._LATER_MODULES if name in read}
    assert read == opfuser._LATER | modules
    assert read_by_type_checkers(opfuser.basic) == opfuser.basic._LATER
    packages = {module.name for module in pkgutil.iter_modules(opfuser.__path__)}
    assert set(opfuser._LATER_MODULES) <= packages
    # Loading a module binds its name, which would hide another thing of that name.
    assert not (opfuser._LATER.keys() | set(opfuser.basic.__all__)) & packages
    basic = {module.name for module in pkgutil.iter_modules(opfuser.basic.__path__)}
    assert not opfuser.basic._LATER.keys() & basic


def test_operations_that_load_later_are_not_loaded_by_others() -> None:
    """One that another module needs would be late in vain."""
    loaded = json.loads(run_bare(LOADED))
    late = {f"opfuser.basic.{module}" for module in opfuser.basic._LATER.values()}
    assert late.isdisjoint(loaded)


PLACES = {
    **opfuser._LATER,
    **{name: name for name in opfuser._LATER_MODULES},
    **{name: f"basic.{module}" for name, module in opfuser.basic._LATER.items()},
}


@pytest.mark.parametrize("name", PLACES)
def test_a_name_loads_when_it_is_used(name: str) -> None:
    assert name in dir(opfuser)
    module = import_module(f"opfuser.{PLACES[name]}")
    expected = module if PLACES[name] == name else getattr(module, name)
    assert getattr(opfuser, name) is expected


def test_no_package_has_other_names() -> None:
    for package in (opfuser, opfuser.basic):
        with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute"):
            _ = package.NotThere


def test_every_public_name_is_there_and_no_other() -> None:
    assert [name for name in opfuser.__all__ if not hasattr(opfuser, name)] == []
    assert set(opfuser.__all__) <= set(dir(opfuser))
    with pytest.raises(AttributeError, match="module 'opfuser' has no attribute 'not_there'"):
        _ = opfuser.not_there


def test_runs_without_triton_gpu_and_compiler() -> None:
    run_bare(RUN_WITHOUT_TRITON)
