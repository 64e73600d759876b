"""The tables of operations and fusions say what the code says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import opfuser
from opfuser import basic
from opfuser.core.fusion import REFUSAL_CODES
from opfuser.fused import FUSIONS
from opfuser.fused.backward_activation_bias import FUSION as WITH_PLAIN_ACTIVATION
from opfuser.fused.norm_linear import FUSION as OF_NORM_AND_LINEAR
from opfuser.fused.parts.activation import ACTIVATIONS

DOCS = Path(__file__).parents[2] / "docs"
README = DOCS.parent / "README.md"

# How to construct what needs arguments, for an input of 8 features.
MAKE: dict[str, Callable[[], opfuser.BasicOperation]] = {
    "AddEmbedding": lambda: opfuser.AddEmbedding(9, 8),
    "BasicLinear": lambda: opfuser.BasicLinear(8, 6),
    "Bias": lambda: opfuser.Bias(8),
    "ConstantScale": lambda: opfuser.ConstantScale(0.7),
    "Dispatch": lambda: opfuser.Dispatch(3),
    "DotProductAttention": lambda: opfuser.DotProductAttention(2),
    "DropTokens": lambda: opfuser.DropTokens(3, 1.0),
    "Dropout": lambda: opfuser.Dropout(0.1),
    "Embedding": lambda: opfuser.Embedding(9, 4),
    "GroupedLinear": lambda: opfuser.GroupedLinear(2, 8, 6),
    "Jitter": lambda: opfuser.Jitter(0.1),
    "LayerNorm": lambda: opfuser.LayerNorm(8),
    "LoRALinear": lambda: opfuser.LoRALinear(8, 6, [opfuser.LoRAAdapter(rank=2, scale=0.7)]),
    "LoadBalancingLoss": lambda: opfuser.LoadBalancingLoss(1, 0.1),
    "Permute": lambda: opfuser.Permute(3),
    "PositionEmbedding": lambda: opfuser.PositionEmbedding(9, 8),
    "QKNorm": lambda: opfuser.QKNorm(2, 2, num_kv_heads=1),
    "RMSNorm": lambda: opfuser.RMSNorm(8),
    "Reshape": lambda: opfuser.Reshape((2, -1)),
    "RotaryEmbedding": lambda: opfuser.RotaryEmbedding(2, 4),
    "ScaledTanhSReLU": lambda: opfuser.ScaledTanhSReLU(tanh_clamp_scale=1.5),
    "TopKRouter": lambda: opfuser.TopKRouter(8, 2),
}


class Row(NamedTuple):
    name: str
    formula: str
    parameters: list[str]
    extra_inputs: list[str]
    saved: list[str]


def table_rows(text: str) -> list[list[str]]:
    """The cells of every row of every table, without the head lines."""
    lines = text.splitlines()
    rows = [line for line in lines if line.startswith("|")]
    heads = {lines[n - 1] for n, line in enumerate(lines) if re.fullmatch(r"\|[-| :]+\|", line)}
    body = [r for r in rows if r not in heads and not re.fullmatch(r"\|[-| :]+\|", r)]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in body]


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def operation_rows() -> list[Row]:
    text = (DOCS / "reference" / "operations.md").read_text(encoding="utf-8")
    out = []
    for name, formula, *cells in table_rows(text):
        out.append(Row(codes(name)[0], formula, *map(codes, cells)))
    return out


OPERATIONS = {row.name: row for row in operation_rows()}


def make(name: str) -> opfuser.BasicOperation:
    return MAKE.get(name, getattr(opfuser, name))()


def test_every_operation_has_a_row() -> None:
    names = [row.name for row in operation_rows()]
    assert sorted(names) == sorted(basic.__all__)


def test_rows_name_what_operations_declare() -> None:
    for row in OPERATIONS.values():
        assert_declared(row)


def assert_declared(row: Row) -> None:
    op = make(row.name)
    declared = {} if op.Saved is None else op.Saved.__annotations__
    saved = [f"({n})" if "None" in str(kind) else n for n, kind in declared.items()]
    assert row.saved == saved
    assert len(row.extra_inputs) == op.num_extra_inputs
    parameters = [name for name, _ in op.named_parameters()]
    if row.name == "GroupedLinear":
        parameters = [name for name in parameters if name.endswith("0")]
    assert row.parameters == parameters


def formula_of(row: Row) -> str | None:
    """The expression for y, if the row gives one."""
    for code in codes(row.formula)[:1]:
        if code.startswith("y = "):
            return code.removeprefix("y = ")
    return None


EVALUATED = {name: e for name, row in OPERATIONS.items() if (e := formula_of(row)) is not None}


def evaluate(expression: str, op: opfuser.BasicOperation, x: Tensor, extras: list[Tensor]) -> Any:
    names: dict[str, Any] = {n: getattr(torch, n) for n in ("sigmoid", "tanh", "relu", "clamp")}
    names |= {n: getattr(torch, n) for n in ("sqrt", "exp", "log")}
    names |= {
        "gelu": F.gelu,
        "mean": lambda t: t.mean(-1, keepdim=True),
        "sum": lambda t: t.sum(-1, keepdim=True),
        "var": lambda t: t.var(-1, correction=0, keepdim=True),
        "x": x,
    }
    if x.is_floating_point():
        names["a"], names["b"] = x.chunk(2, -1)
    attributes = ("eps", "scale", "shape", "tanh_clamp_scale")
    names |= {n: getattr(op, n) for n in attributes if hasattr(op, n)}
    if isinstance(op, opfuser.LoRALinear):
        names["scale"] = op.adapters[0].scale
    names |= dict(op.named_parameters())
    names |= dict(zip(OPERATIONS[type(op).__name__].extra_inputs, extras))
    return eval(expression, {"__builtins__": {}}, names)


@pytest.mark.parametrize("name", EVALUATED)
def test_formula_is_what_the_operation_computes(name: str) -> None:
    op = make(name).double()
    for parameter in op.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, 8, dtype=torch.float64) * 5
    if name == "Embedding":
        x = torch.randint(9, (5, 8))
    scaled = name.startswith("Scaled")
    extras = [torch.randn(5 if scaled else (5, 8), dtype=torch.float64)] * op.num_extra_inputs
    if name == "AddEmbedding":
        extras = [torch.randint(9, (5,))]
    y = op(x, *extras)
    y = y[0] if isinstance(y, tuple) else y
    expected = evaluate(EVALUATED[name], op, x, extras)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)


def test_readme_names_every_operation() -> None:
    text = README.read_text(encoding="utf-8")
    (section,) = re.findall(r"^## Operations\n(.*?)^## ", text, re.M | re.S)
    named = [code for row in table_rows(section) for code in codes(row[1])]
    others = ["Linear", "Residual"]
    assert sorted(named) == sorted([*basic.__all__, *others])


# What the tables of fusions call by one name.
_, plain_activations = WITH_PLAIN_ACTIVATION.elements
*_, linears, biases = OF_NORM_AND_LINEAR.elements
KINDS = {
    "activation": tuple(kind.__name__ for kind in ACTIVATIONS),
    "plain activation": tuple(kind.__name__ for kind in plain_activations.types),
    "BasicLinear": tuple(kind.__name__ for kind in linears.types),
    "Bias": tuple(kind.__name__ for kind in biases.types),
}


def test_kinds_of_activations_are_those_of_the_tables() -> None:
    text = (DOCS / "reference" / "operations.md").read_text(encoding="utf-8")
    named = {
        title: tuple(codes(row[0])[0] for row in table_rows(body))
        for title, body in re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", text, re.M)
    }
    assert sorted(KINDS["plain activation"]) == sorted(named["Activations"])
    both = (*named["Activations"], *named["Gated activations"])
    assert sorted(KINDS["activation"]) == sorted(both)


def in_words(element: Any) -> str:
    """An element of a pattern as the tables write it."""
    if element.repeated is not None:
        return f"{element.name} …"
    names = tuple(kind.__name__ for kind in element.types)
    kinds = {members: kind for kind, members in KINDS.items()}
    name = kinds.get(names, "/".join(names))  # a bar would end the cell
    return f"[{name}]" if element.optional else name


def built_in_fusions() -> list[tuple[str, str, str]]:
    """Name, stage and pattern, in the order in which they run."""
    rules = {rule.name: rule for rule in FUSIONS}
    out = []
    for info in opfuser.fusions():
        if info.origin == "opfuser":
            pattern = ", ".join(map(in_words, rules[info.name].elements))
            out.append((info.name, info.stage, pattern))
    return out


def test_fusions_are_listed_in_their_order() -> None:
    text = (DOCS / "reference" / "fusions.md").read_text(encoding="utf-8")
    rows = [tuple(cell.strip("`") for cell in row[:3]) for row in table_rows(text)]
    assert rows == built_in_fusions()


def test_memory_is_as_measured() -> None:
    shown = (DOCS / "kernels.md").read_text(encoding="utf-8")
    measured = DOCS.parent / "benchmarks" / "results" / "memory.md"
    rows = [row for row in table_rows(shown) if len(row) == 6]
    assert len(rows) == 5
    lines = measured.read_text(encoding="utf-8").splitlines()
    for row in rows:
        assert f"| {' | '.join(row)} |" in lines


def test_refusal_codes_are_explained() -> None:
    text = (DOCS / "why-not.md").read_text(encoding="utf-8")
    rows = [codes(row[0]) for row in table_rows(text)]
    named = [code for row in rows for code in row if code.isupper()]
    assert sorted(named) == sorted(REFUSAL_CODES)
