"""One table says what operations are called elsewhere, and whoever needs it reads that one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser
from opfuser import from_torch, to_torch
from opfuser.basic.activation import ACTIVATIONS as PLAIN
from opfuser.basic.gated_activation import GATED_ACTIVATIONS
from opfuser.counterparts import ACTIVATIONS, LAYERS, NORMS
from opfuser.integrations.te.operations import OPERATIONS
from opfuser.models import DecoderConfig, mlp_block
from opfuser.sequence.plain_modules import replacement
from tests.integrations import te_layers
from tests.integrations.results import close, results

SOURCES = Path(opfuser.__file__).parent
# Operations themselves, the table, kernels; formulas as models write them out, also in the audit.
APART = ("__init__.py", "basic/", "counterparts.py", "kernels/")
# How each is recognized, and which packages have a kernel for it.
APART += ("reading/activations.py", "report/audit/kernels.py")
NAMES = {
    *ACTIVATIONS,
    *(name for row in ACTIVATIONS.values() for name in row.hf),
    *(row.operation.__name__ for row in ACTIVATIONS.values()),
}


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return (3 * torch.randn(5, 14, dtype=torch.float64)).requires_grad_()


def test_every_activation_has_a_row() -> None:
    assert {row.operation for row in ACTIVATIONS.values()} == {*PLAIN, *GATED_ACTIVATIONS}


@pytest.mark.parametrize("name", [n for n, row in ACTIVATIONS.items() if row.torch is not None])
def test_modules_of_torch_are_the_same_function(name: str, x: Tensor) -> None:
    row = ACTIVATIONS[name]
    assert row.torch is not None
    theirs = row.torch()
    close(results(row.make(), x), results(theirs, x))
    torch.testing.assert_close(getattr(F, name)(x), theirs(x))
    found = replacement(theirs)
    assert found is not None
    assert [type(op) for op in found.operations] == [row.operation]
    assert type(to_torch(row.make())) is row.torch
    assert type(from_torch(nn.Sequential(nn.Linear(2, 2), theirs))[1]) is row.operation


@pytest.mark.parametrize("name", [n for n, row in ACTIVATIONS.items() if row.gate is not None])
def test_gated_ones_are_products_with_the_function_that_gates(name: str, x: Tensor) -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            y: Tensor = ACTIVATIONS[ACTIVATIONS[name].gate or ""].make()(a) * b
            return y

    close(results(ACTIVATIONS[name].make(), x), results(Product(), x))
    assert ACTIVATIONS[name].gated


def test_names_of_transformers_are_the_same_functions(x: Tensor) -> None:
    theirs = pytest.importorskip("transformers.activations").ACT2FN
    for row in ACTIVATIONS.values():
        for name in row.hf:
            close(results(row.make(), x), results(theirs[name], x))


def test_names_of_transformer_engine_are_those_of_its_layers(x: Tensor) -> None:
    rows = {row.te: row for row in ACTIVATIONS.values() if row.te is not None}
    assert set(rows) == set(te_layers.ACTIVATIONS)
    for name, function in te_layers.ACTIVATIONS.items():
        torch.testing.assert_close(rows[name].make()(x), function(x), rtol=1e-12, atol=1e-12)
        assert rows[name].operation.__name__ in OPERATIONS


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_models_take_every_activation(name: str) -> None:
    torch.manual_seed(0)
    config = DecoderConfig(
        11, 12, 1, 2, ffn_dim=7, norm_eps=1e-3, activation=name, dtype=torch.float64
    )
    block, x = mlp_block(config), torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
    y = block(x)
    norm, up, down = (p for _, p in block.named_parameters())
    inside = ACTIVATIONS[name].make().reference(F.linear(F.rms_norm(x, (12,), norm, 1e-3), up))
    wanted = x + F.linear(inside, down)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    inputs = (x, norm, up, down)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), inputs) for out in (y, wanted))):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_norms_are_named_after_torch() -> None:
    assert {LAYERS[getattr(nn, kind.__name__)].operation for kind in NORMS.values()} == {
        *NORMS.values()
    }


def tables(source: str) -> Iterator[tuple[int, list[str]]]:
    """Lines with a table of activations: a literal that names three of them or more."""
    if sum(name in source for name in NAMES) < 3:  # which most files can be told by
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict | ast.List | ast.Set | ast.Tuple):
            inside = [*ast.walk(node)]
            found = {n.value for n in inside if isinstance(n, ast.Constant)}
            found |= {n.id for n in inside if isinstance(n, ast.Name)}
            found |= {n.attr for n in inside if isinstance(n, ast.Attribute)}
            if len(found & NAMES) > 2:
                yield node.lineno, sorted(found & NAMES)


@pytest.mark.parametrize(
    "text", ["X = {'relu': 1, 'silu': 2, 'tanh': 3}", "X = [(GELU, a), (b, basic.ReLU), (Tanh,)]"]
)
def test_a_second_table_is_seen(text: str) -> None:
    assert [line for line, _ in tables(text)][:1] == [1]


def test_there_is_no_second_table() -> None:
    files = [path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.py")]
    searched = [name for name in files if not name.startswith(APART)]
    assert "models/hf_config.py" in searched
    found = [
        f"{name}:{line} names {names}"
        for name in searched
        for line, names in tables((SOURCES / name).read_text("utf-8"))
    ]
    assert found == []
