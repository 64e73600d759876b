"""Private names of torch, triton and flash-attn: in one module, and each with a stand-in."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import opfuser
from opfuser import torch_internals

PACKAGE = Path(opfuser.__file__).parent
ROOT = PACKAGE.parent
THE_MODULE = Path("torch_internals.py")
LIBRARIES = frozenset(("torch", "triton", "flash_attn"))
ASKING = frozenset(("getattr", "hasattr", "setattr", "delattr"))

# Private in spelling only; torch_internals.py says why.
ACCEPTED = frozenset(
    """_version _base TorchDispatchMode _python_dispatch _parameters _buffers _modules _apply
    _load_from_state_dict _save_to_state_dict _forward_hooks _forward_pre_hooks _backward_hooks
    _backward_pre_hooks _compiled_call_impl _optimizer_load_state_dict_pre_hooks
    _optimizer_load_state_dict_post_hooks""".split()
)
# Of Python itself, of libraries that are looked into where they have been loaded, and our own on
# objects of others.
OTHERS = frozenset(
    """_replace _asdict _fields _getframe _current_frames _lru_cache_wrapper _bootstrap
    _find_and_load _data _active_collector _local_mapping _global_mapping _from_config
    _parallelized _opfuser_applied _opfuser_placeholder""".split()
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(trees: dict[Path, ast.Module]) -> set[str]:
    """The names that the package gives to things of its own."""
    own = {path.stem for path in trees}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return own


def root_of(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Call)):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def is_operator(node: ast.Attribute, aten: set[str]) -> bool:
    of = ast.unparse(node.value)
    return of in aten or (of == "torch" and node.attr.startswith("_foreach_"))


def imported(tree: ast.Module, theirs: set[str]) -> Iterator[str]:
    """The private names that a file imports; ``theirs`` gets the names it has for libraries."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {a.name: a.asname or a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = {f"{node.module}.{a.name}": a.asname or a.name for a in node.names}
        else:
            continue
        for name, alias in names.items():
            parts = name.split(".")
            if parts[0] in LIBRARIES:
                theirs.add(alias)
                if any(map(is_private, parts)) and ACCEPTED.isdisjoint(parts):
                    yield name


def private_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """What a file uses of the libraries that has an underscored name."""
    theirs: set[str] = set()
    yield from imported(tree, theirs)
    aten = {"torch.ops.aten"} | {
        ast.unparse(n.targets[0])
        for n in ast.walk(tree)
        if isinstance(n, ast.Assign)
        and isinstance(n.value, ast.Attribute)
        and ast.unparse(n.value) == "torch.ops.aten"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            known = node.attr in own and root_of(node) not in theirs
            if not known and node.attr not in ACCEPTED | OTHERS and not is_operator(node, aten):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            given = node.args[1:2] if function in ASKING else node.args[:1]
            name = getattr(given[0], "value", None) if given else None
            if not isinstance(name, str):
                continue
            if function in ASKING and is_private(name) and name not in own | ACCEPTED | OTHERS:
                yield ast.unparse(node)
            parts = name.split(".")
            if function == "import_module" and parts[0] in LIBRARIES:
                yield from [name for part in parts if is_private(part)]


def test_one_module_alone_names_what_is_private() -> None:
    files = {p.relative_to(PACKAGE): p.read_text() for p in sorted(PACKAGE.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in files.items()}
    own = own_names({path: tree for path, tree in trees.items() if path != THE_MODULE})
    found = {
        f"{path}: {name}"
        for path, tree in trees.items()
        if path != THE_MODULE
        for name in private_names(tree, own)
    }
    assert not found
    assert len(set(private_names(trees[THE_MODULE], own))) > 3


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._inductor import config",
        "from torch.utils import _pytree",
        "from torch.utils._pallas import has_pallas",
        "torch._C._cuda_getDevice()",
        "torch.compiler._is_compiling_flag = True",
        "torch._fused_sdp_choice(q, k, v)",
        "storage._cdata",
        "hasattr(torch._C, 'x')",
        "getattr(t, '_use_count')",
        "forward_ad._current_level",
        "importlib.import_module('torch.distributed._symmetric_memory')",
        "library._flash_attn_backward(dy)",
    ],
)
def test_scan_finds(line: str) -> None:
    before = "import torch\nfrom torch.autograd import forward_ad\n"
    assert list(private_names(ast.parse(before + line), {"_current_level_of_own"}))


@pytest.mark.parametrize(
    "line",
    ["torch.ops.aten._fft_r2c(x)", "torch._foreach_add_(a, b)", "t._version", "self._own_thing"],
)
def test_scan_accepts(line: str) -> None:
    assert not list(private_names(ast.parse("import torch\n" + line), {"_own_thing"}))


def test_installed_torch_has_every_name() -> None:
    assert torch_internals.lacking == []


def test_versions_are_those_of_the_constraints() -> None:
    texts = {path.stem: path.read_text() for path in ROOT.glob("constraints/torch-*.txt")}
    for name, tested in torch_internals.TESTED.items():
        pins = {
            kind: re.findall(rf"^{name}==(\d+\.\d+)", text, re.M) for kind, text in texts.items()
        }
        numbers = sorted(tuple(map(int, pin.split("."))) for (pin,) in pins.values())
        assert tested == " to ".join(".".join(map(str, numbers[end])) for end in (0, -1))
        assert name != "torch" or all(kind == f"torch-{pin}" for kind, (pin,) in pins.items())


# As a torch without them: what looks names up finds none that is private.
WITHOUT_NAMES = """
import operator, sys, warnings
import torch
real = operator.attrgetter

def attrgetter(path):
    private = any(p.startswith("_") and not p.startswith("__") for p in path.split("."))
    if sys._getframe(1).f_globals.get("__name__") == "opfuser.torch_internals" and private:
        raise AttributeError(path)
    return real(path)

operator.attrgetter = attrgetter
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import opfuser
operator.attrgetter = real
"""

TRAINS = """
from opfuser import torch_internals
[warning] = [w for w in told if "opfuser" in str(w.message)]
text = str(warning.message)
assert text.startswith("opfuser is tested with torch 2.11 to ") and " lacks torch._C." in text
assert "torch._C._are_functorch_transforms_active" in text
assert len(torch_internals.lacking) > 40

from torch import nn
from torch.nn import functional as F

def model():
    torch.manual_seed(0)
    ops = [opfuser.RMSNorm(8), opfuser.Linear(8, 12), opfuser.GELU(), opfuser.Linear(12, 8),
           opfuser.Dropout(0.0), opfuser.Bias(8), opfuser.SiLU(), nn.Linear(8, 8)]
    return opfuser.Sequential(*ops).double()

def plain(seq, x):
    p = dict(seq.named_parameters())
    y = F.rms_norm(x, (8,), p["0.weight"], seq[0].eps)
    y = F.gelu(F.linear(y, p["1.weight"], p["1.bias"]), approximate="tanh")
    y = F.linear(y, p["3.weight"], p["3.bias"])
    return F.linear(F.silu(y + p["5.bias"]), p["7.weight"], p["7.bias"])

seq = model()
for step in range(12):  # the first calls are not recorded
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(5, 8, dtype=torch.float64)
    y = seq(x)
    grads = torch.autograd.grad(y, [x, *seq.parameters()], dy)
    expected = torch.autograd.grad(plain(seq, x), [x, *seq.parameters()], dy)
    torch.testing.assert_close(y, plain(seq, x))
    torch.testing.assert_close(grads, expected)
    with torch.no_grad():
        torch.testing.assert_close(seq(x), plain(seq, x))
    again = torch.utils.checkpoint.checkpoint(seq, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again, [x, *seq.parameters()], dy), expected)
assert seq.last_plan is not None
"""

REFUSES = """
from opfuser import torch_internals
from opfuser.errors import TorchVersionError

try:
    torch_internals.make_wrapper_subclass(torch.Tensor, (1,))
except TorchVersionError as error:
    assert str(error).startswith(
        "Logits that are not computed needs torch.Tensor._make_wrapper_subclass. Received: torch "
    ), error
    assert "Install a torch from 2.11 to" in str(error)
else:
    raise AssertionError

from opfuser.core.buffer_reuse import only_reference
assert not any(only_reference([torch.empty(2)]) for _ in range(100))
holder = torch_internals.use_count(torch.empty(1)), torch_internals.storage_use_count(1)
assert min(holder) > 1 << 30

linear = opfuser.Linear(4, 4, accumulate_into_grad=True)
try:
    linear(torch.randn(3, 4))
except TorchVersionError as error:
    assert "Accumulating gradients needs torch._C._current_graph_task_id." in str(error), error
else:
    raise AssertionError

del torch.nn.Module._call_impl
for context, says in (
    (torch_internals.compiling(), "torch.compile needs torch.compiler._is_compiling_flag."),
    (torch_internals.modules_called_by(lambda call: call),
     "Observing the calls of modules needs torch.nn.Module._call_impl."),
):
    try:
        with context:
            raise AssertionError
    except TorchVersionError as error:
        assert str(error).startswith(says), error
"""


def run(code: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NAMES + code],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_without_private_names_it_says_so_once_and_trains() -> None:
    run(TRAINS)


def test_what_needs_a_private_name_says_which() -> None:
    run(REFUSES)


def test_stand_in_for_use_counts_is_never_one() -> None:
    assert torch_internals.use_count(torch.empty(1)) < 1 << 30
