"""Norm and rotary embedding of queries and keys, in forward and in backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opfuser import BasicLinear, Identity, QKNorm, RopeScaling, RotaryEmbedding, Sequential
from opfuser.errors import NotSupportedError
from opfuser.fused.backward_qk_norm_rotary import BackwardQKNormRotary
from opfuser.fused.forward_qk_norm_rotary import ForwardQKNormRotary
from opfuser.testing import assert_not_fused
from tests.fused.examples import (
    BF16,
    DTYPES,
    F64,
    Case,
    assert_same,
    check,
    error_text,
    filled,
    leaf,
    only,
    refused,
    results,
)

FORWARD, BACKWARD = NAMES = ["forward_qk_norm_rotary", "backward_qk_norm_rotary"]


LONGROPE = RopeScaling(
    rope_type="longrope", factor=4.0, original_max_position_embeddings=4,
    short_factor=(1.0, 1.1, 1.2), long_factor=(1.5, 3.0, 9.0),
)  # fmt: skip


def pair(norm: dict[str, Any] | None = None, **rotary: Any) -> list[nn.Module]:
    heads: dict[str, Any] = {"num_kv_heads": 2}
    return [QKNorm(4, 6, **heads, **(norm or {})), RotaryEmbedding(4, 6, **heads, **rotary)]


def neighbors() -> list[nn.Module]:
    return pair({"eps": 0.1}, interleaved=True)


def partial() -> list[nn.Module]:
    return pair({"zero_centered_gamma": True}, rotary_dim=4, base=500.0)


def scaled() -> list[nn.Module]:
    return pair(scaling=LONGROPE, sections=(1, 1, 1), interleave_sections=True)


def several() -> list[nn.Module]:
    return [BasicLinear(8, 48), *pair(), BasicLinear(48, 48), *neighbors(), Identity()]


SHAPE = 2, 3, 48
CASES = {
    "halves": Case(pair, (2, 5, 48), dtypes=DTYPES),
    "neighbors": Case(neighbors, (2, 5, 48), dtypes=DTYPES),
    "partial": Case(partial, (2, 5, 48), dtypes=DTYPES),
    "scaled": Case(scaled, (2, 5, 48), dtypes=DTYPES),
    "several": Case(several, (2, 11, 8), dtypes=(F64, BF16), times=2),
}


@pytest.mark.parametrize(
    ("case", "name"),
    [*zip(CASES, itertools.cycle(NAMES)), *zip([*CASES][1:5], itertools.cycle(NAMES))],
)
def test_values(case: str, name: str, device: torch.device) -> None:
    if device.type == "cpu" or CASES[case].dtypes == DTYPES:
        check(name, CASES[case], device)


GIVEN: list[tuple[Any, dict[str, Any]]] = [
    (partial, {"positions": torch.tensor([3, 0, 90, 1])}),
    (partial, {"positions": torch.tensor([[0, 1, 2, 3], [7, 7, 0, 1]])}),
    (partial, {"tables": torch.rand(2, 8, 2)}),
    (scaled, {"positions": torch.arange(24).view(3, 2, 4)}),
    (scaled, {"positions": torch.arange(12).view(3, 1, 4), "length": 5}),
    (scaled, {"length": 5}),
]


@pytest.mark.parametrize(("make", "given"), GIVEN)
def test_given_positions_and_lengths(make: Any, given: dict[str, Any]) -> None:
    norm, rotary = filled(make())
    seq, x = Sequential(norm, rotary).double(), leaf(2, 4, 48, dtype=F64)

    def reference(x: Tensor) -> Tensor:
        return rotary.reference(norm.reference(x), **given)

    want = results(reference, seq.parameters(), x)
    for on in ([], [FORWARD], [BACKWARD], NAMES):
        with only(*on):
            kwargs = {"op_kwargs": {rotary: given}}
            assert_same(results(seq, seq.parameters(), x, **kwargs), want)


OTHER_HEADS = {
    "number": RotaryEmbedding(2, 12, num_kv_heads=1),
    "size": RotaryEmbedding(4, 2, num_kv_heads=10),
    "queries alone": RotaryEmbedding(8, 6, num_kv_heads=0),
}


@pytest.mark.parametrize("rotary", OTHER_HEADS.values(), ids=OTHER_HEADS)
def test_refuses_other_heads(rotary: RotaryEmbedding) -> None:
    norm, x = QKNorm(4, 6, num_kv_heads=2), leaf(*SHAPE)
    seq = Sequential(norm, rotary)
    text = f"QKNorm has heads (4, 2, 6), RotaryEmbedding {rotary.heads}"
    for name in NAMES:
        assert refused(seq, name, x) == [(0, f"SHAPE: {text}")]
    torch.testing.assert_close(seq(x), rotary.reference(norm.reference(x)))
    for cls in (ForwardQKNormRotary, BackwardQKNormRotary):
        with pytest.raises(NotSupportedError) as error:
            cls(qk_norm=norm, rotary=rotary)
        assert str(error.value).startswith(f"{text} ({cls.__name__}). Leave the operations sep")


def test_leaves_other_neighbors_alone() -> None:
    norm, rotary = pair()
    for ops in ([rotary, norm], [norm, Identity(), rotary]):
        for name in NAMES:
            assert_not_fused(Sequential(*ops), name, leaf(*SHAPE))


def test_without_gradients_only_forward_is_fused() -> None:
    plan = Sequential(*pair()).requires_grad_(False).plan(torch.randn(*SHAPE))
    assert plan.fused("forward") == {FORWARD: 1}
    assert not plan.backward


def test_an_error_about_positions_is_that_of_the_operation() -> None:
    x, kwargs, texts = torch.ones(2, 3, 48), {"positions": torch.arange(4)}, []
    for on in (NAMES, []):
        with only(*on):
            texts.append(error_text(Sequential(*pair()), x, op_kwargs={1: kwargs}))
    assert texts[0] == texts[1]
