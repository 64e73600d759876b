"""The driver of joint fusions: pipelines declared here, with other edges than any fusion has."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from torch import nn

from opfuser import (
    GELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    LayerNorm,
    MakeExtraOutput,
    RMSNorm,
    Sequential,
    SwiGLU,
)
from opfuser.fused.parts.activation import ActivationPart
from opfuser.fused.parts.chain import ChainPart
from opfuser.fused.parts.linear import LinearPart
from opfuser.fused.parts.norm import NormPart
from opfuser.fused.parts.part import Part
from opfuser.fused.parts.pipeline import Edge, Pipeline
from opfuser.fused.recompute_mlp import RecomputeMLP
from tests.fused.examples import F64, assert_same, elements, filled, leaf, only, results, saved_by

SAVE, RECOMPUTE = Edge.SAVE, Edge.RECOMPUTE
ALL_EDGES = list(itertools.product(Edge, repeat=3))
each_edges = pytest.mark.parametrize(
    "edges", ALL_EDGES, ids=lambda edges: ", ".join(edge.value for edge in edges)
)
ROWS = 4, 5


def block(*, plain: bool = False) -> list[Part]:
    """Norm, linear, activation, linear: of width 6, 16 and 8, or 16 where the activation is plain.

    With all that may stand before and behind.
    """
    activation = GELU() if plain else SwiGLU()
    first, bias = BasicLinear(6, 16), Bias(16)
    return [
        NormPart(AddExtraInput(), MakeExtraOutput(), LayerNorm(6)),
        LinearPart(first, None if plain else bias, "here"),
        ActivationPart(bias if plain else None, activation, "here"),
        LinearPart(BasicLinear(16 if plain else 8, 4), Bias(4), "here", add=AddExtraInput()),
    ]


def pair(parts: list[Part], edges: Sequence[Edge]) -> tuple[Sequential, Sequential]:
    """The pipeline, and its operations in float64."""
    ops: list[nn.Module] = [op for part in parts for op in part.ops]
    filled(ops)
    return Sequential(Pipeline(parts, edges)).double(), Sequential(*ops).double()


def compare(fused: Sequential, apart: Sequential, widths: Sequence[int], grad: bool) -> None:
    inputs = [leaf(*ROWS, width, dtype=F64).requires_grad_(grad) for width in widths]
    with only():
        want = results(apart, apart.parameters(), *inputs)
    assert_same(results(fused, fused.parameters(), *inputs), want)


@each_edges
def test_a_linear_saves_its_input_for_its_weight_or_to_recompute(edges: Sequence[Edge]) -> None:
    parts = block()
    for n in (1, 3):
        parts[n].ops[0].requires_grad_(False)
    fused, apart = pair(parts, edges)
    saves, recomputes = edges[0] is SAVE, edges[1] is RECOMPUTE
    widths = 6 + 2 + 6 * (saves and recomputes) + 16 * (not recomputes)
    inputs = [leaf(*ROWS, width, dtype=F64) for width in (6, 6, 4)]
    assert elements(saved_by(fused, *inputs)) == 20 * widths
    compare(fused, apart, (6, 6, 4), grad=True)


@each_edges
def test_an_output_of_the_gradients_pass_is_not_recomputed_before(
    edges: Sequence[Edge], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, seen = block(), []
    for n, part in enumerate(parts):
        recompute = part.recompute
        monkeypatch.setattr(
            part, "recompute", lambda *args, n=n, of=recompute: seen.append(n) or of(*args)
        )
    fused, _ = pair(parts, edges)
    results(fused, fused.parameters(), *(leaf(*ROWS, width, dtype=F64) for width in (6, 6, 4)))
    # The activation reads its input before any gradient, and the first linear for that its own.
    assert seen == ([0] * (edges[0] is RECOMPUTE) + [1]) * (edges[1] is RECOMPUTE)


def test_parts_that_keep_their_input_or_recompute_nothing() -> None:
    edges = [SAVE, SAVE, RECOMPUTE]
    parts = [
        ChainPart([Bias(6), GELU()], "here"),
        LinearPart(BasicLinear(6, 5), None, "here"),
        NormPart(None, None, RMSNorm(5)),
        LinearPart(BasicLinear(5, 4), Bias(4), "here"),
    ]
    compare(*pair(parts, edges), (6,), grad=True)
    compare(*pair(parts[1:], edges[1:]), (6,), grad=True)


@pytest.mark.parametrize("edge", Edge)
def test_activations_one_after_the_other(edge: Edge) -> None:
    """The output of an activation is recomputed before the gradients of what reads it."""
    parts = [
        NormPart(None, None, RMSNorm(6)),
        ActivationPart(Bias(6), GELU(), "here"),
        ActivationPart(None, SwiGLU(), "here"),
        LinearPart(BasicLinear(3, 4), None, "here"),
    ]
    edges = [RECOMPUTE, edge, RECOMPUTE]
    fused, apart = pair(parts, edges)
    assert elements(saved_by(fused, leaf(*ROWS, 6, dtype=F64))) == 20 * (6 + 1 + 6 * (edge is SAVE))
    compare(fused, apart, (6,), grad=True)


def test_edges_that_do_not_fit() -> None:
    linear, chain = LinearPart(BasicLinear(6, 6), None, "here"), ChainPart([Bias(6)], "here")
    norm = NormPart(None, None, RMSNorm(6))
    for parts, edges, text in (
        ([norm, linear], [], "2 parts have 1 edges, not 0"),
        ([norm], [SAVE], "1 parts have 0 edges, not 1"),
        ([linear, norm], None, "between LinearPart and NormPart is saved, and cannot be"),
        ([linear, chain], None, "between LinearPart and ChainPart is saved, and cannot be"),
        ([chain, linear], [RECOMPUTE], "between ChainPart and LinearPart is saved, and cannot be"),
    ):
        with pytest.raises(ValueError, match=text):
            Pipeline(parts, edges)


# In fp64 the edges of the block have 20 rows of 6, 16 and 16 (or 8) numbers.
SMALL = [0, 20 * 6 * 8, 20 * 8 * 8, 1 << 16]


@pytest.mark.parametrize(
    ("plain", "frozen"),
    [(True, None), (False, None), (True, 1), *((False, frozen) for frozen in range(4))],
)
@pytest.mark.parametrize("small", SMALL)
@each_edges
def test_values_and_what_is_saved(
    edges: Sequence[Edge],
    small: int,
    plain: bool,
    frozen: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Besides the norm's input and its two statistics per row: what edges say, and what is small.

    With and without parameters that need no gradient.
    """
    monkeypatch.setattr(Pipeline, "small", small)
    parts = block(plain=plain)
    for op in () if frozen is None else parts[frozen].ops:
        op.requires_grad_(False)
    fused, apart = pair(parts, edges)
    if frozen is None:
        behind = (6, 16, 16 if plain else 8)
        kept = [w for w, e in zip(behind, edges) if e is SAVE or 20 * w * 8 <= small]
        inputs = [leaf(*ROWS, width, dtype=F64) for width in (6, 6, 4)]
        assert elements(saved_by(fused, *inputs)) == 20 * (6 + 2 + sum(kept))
    compare(fused, apart, (6, 6, 4), grad=True)


def test_a_small_edge_is_not_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pipeline, "small", 1 << 16)
    parts = block()
    for part in parts:
        monkeypatch.setattr(part, "recompute", None)
    fused, _ = pair(parts, [RECOMPUTE] * 3)
    results(fused, fused.parameters(), *(leaf(*ROWS, width, dtype=F64) for width in (6, 6, 4)))


def test_recompute_mlp_recomputes_what_is_small_too() -> None:
    assert RecomputeMLP.small == 0
