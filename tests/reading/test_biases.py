"""Biases of attention: given, or made of sizes and parameters, and what hides keys beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from opfuser.reading.construction import build
from opfuser.reading.grammar import read
from opfuser.reading.kept import KeptError
from opfuser.reading.operations import Attention, Made, Mask
from opfuser.reading.tracer import trace

from .families import stream
from .recomputed import Example, assert_equal_steps, assert_recomputed, operation_in, read_of
from .tiny import BATCH, LENGTH

HEADS, SIZE = 4, 8
WIDTH = HEADS * SIZE
LOWEST = torch.finfo(torch.float64).min
GIVEN = torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64)
SEEN = torch.rand(BATCH, 1, 1, LENGTH) > 0.3
SEEN[..., 0] = True
NUMBERS = torch.randn(BATCH, 1, LENGTH, LENGTH, dtype=torch.float64)

Attend = Callable[..., Tensor]


class Biased(nn.Module):
    """Attention by ``attend``, with a table of positions and a lower triangle for it to use."""

    def __init__(self, attend: Attend, returned: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.returned = attend, returned
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(2 * LENGTH + 9, HEADS)
        self.register_buffer("numbers", torch.arange(4 * LENGTH))
        self.register_buffer("lower", torch.tril(torch.ones(2 * LENGTH, 2 * LENGTH))[None, None])
        self.double()

    def bias(self, x: Tensor, reach: int = LENGTH) -> Tensor:
        """By the distance of positions, clamped: written in place, as in T5."""
        at = torch.arange(x.shape[1], device=x.device)
        distance = at[None, :] - at[:, None]
        numbers = (distance > 0).to(torch.long) * (reach + 1)
        numbers += torch.min(distance.abs(), torch.full_like(distance, reach))
        return self.table(numbers).permute(2, 0, 1).unsqueeze(0)

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        y = self.attend(self, q, k, v, x, *others)
        y = self.out(y.transpose(1, 2).reshape(b, s, WIDTH))
        return y if self.returned is None else (y, self.returned(self, x, *others), None)


def by_sdpa(mask: Callable[..., Tensor]) -> Attend:
    def attend(m: Biased, q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask(m, *given), scale=1.0)

    return attend


def by_formula(*terms: Callable[..., Tensor]) -> Attend:
    def attend(m: Biased, q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        scores = q @ k.mT
        for term in terms:
            scores = scores + term(m, *given)
        return scores.softmax(-1) @ v

    return attend


def before(x: Tensor) -> Tensor:
    """Which keys are not behind a query."""
    length = x.shape[1]
    at, other = (torch.arange(length, device=x.device) for _ in range(2))
    return (at[:, None] >= other[None, :]).view(1, 1, length, length)


def zeros(x: Tensor) -> Tensor:
    return torch.zeros((1, HEADS, x.shape[1], x.shape[1]), device=x.device, dtype=x.dtype)


def trained(t: Tensor) -> Tensor:
    return t.clone().requires_grad_()


def example(attend: Attend, *others: Tensor, returned: Any = None) -> Example:
    return Example(Biased(attend, returned), (stream().requires_grad_(), *others))


READ: dict[str, tuple[Attend, tuple[Tensor, ...], dict[str, Any]]] = {
    "given": (by_sdpa(lambda m, x, bias: bias), (trained(GIVEN),), {"bias": 1}),
    "given, by the formula": (
        by_formula(lambda m, x, bias: bias),
        (trained(GIVEN),),
        {"bias": 1},
    ),
    "given, added after a mask": (
        by_formula(lambda m, x, bias, mask: mask, lambda m, x, bias, mask: bias),
        (trained(GIVEN), NUMBERS),
        {"bias": 1, "masks": (Mask(2, tuple(NUMBERS.shape)),)},
    ),
    "given, keys hidden": (
        by_sdpa(lambda m, x, bias, seen: torch.where(seen, bias, LOWEST).contiguous()),
        (trained(GIVEN), SEEN),
        {"bias": 1, "masks": (Mask(2, tuple(SEEN.shape), lowest=LOWEST),)},
    ),
    "given without gradients, keys hidden": (
        by_sdpa(lambda m, x, bias, seen: torch.where(seen, bias, LOWEST)),
        (GIVEN, SEEN),
        {"bias": 1, "masks": (Mask(2, tuple(SEEN.shape), lowest=LOWEST),)},
    ),
    "given, later keys hidden": (
        by_sdpa(lambda m, x, bias: torch.where(before(x), bias, LOWEST)),
        (trained(GIVEN),),
        {"bias": 1, "causal": True},
    ),
    "zeros, keys hidden": (
        by_sdpa(lambda m, x, seen: torch.where(seen, zeros(x), LOWEST)),
        (SEEN,),
        {"bias": None, "masks": (Mask(1, tuple(SEEN.shape), lowest=LOWEST),)},
    ),
    "zeros of sizes alone": (
        by_formula(lambda m, x: torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)),
        (),
        {"bias": None, "masks": ()},
    ),
}


@pytest.mark.parametrize("name", READ)
def test_biases_that_are_given(name: str) -> None:
    attend, others, expected = READ[name]
    found = operation_in(assert_recomputed(example(attend, *others)), Attention)
    assert {key: getattr(found, key) for key in expected} == expected


MADE: dict[str, tuple[Attend, tuple[Tensor, ...], bool]] = {
    "alone": (by_sdpa(lambda m, x: m.bias(x)), (), False),
    "by the formula": (by_formula(lambda m, x: m.bias(x)), (), False),
    "keys hidden": (
        by_sdpa(lambda m, x, seen: torch.where(seen, m.bias(x), LOWEST)),
        (SEEN,),
        False,
    ),
    "later keys hidden": (
        by_sdpa(lambda m, x: torch.where(before(x), m.bias(x), LOWEST)),
        (),
        True,
    ),
    "beside a mask of numbers": (by_sdpa(lambda m, x, mask: m.bias(x) + mask), (NUMBERS,), False),
}


@pytest.mark.parametrize("name", MADE)
def test_biases_that_are_made_of_sizes_and_a_table(name: str) -> None:
    """What is returned besides is the same tensor; for other lengths, it is made anew."""
    attend, others, causal = MADE[name]
    given = example(attend, *others, returned=lambda m, x, *others: m.bias(x))
    reading = assert_recomputed(given)
    found = operation_in(reading, Attention)
    assert isinstance(found.bias, Made)
    assert found.bias.parameters == ("table.weight",)
    assert reading.made == ((1, found.bias),)
    assert found.causal == causal
    with torch.no_grad():
        assert_recomputed(given)
    shorter = Example(
        given.module,
        (stream()[:, :5].clone().requires_grad_(), *(t[..., :5] for t in others)),
    )
    if others and others[0].shape[-2] != 1:
        shorter.args[1].data = NUMBERS[..., :5, :5].contiguous()
    assert_equal_steps(shorter, build(reading, given.module))


def test_a_bias_that_layers_share_is_made_once() -> None:
    class Counting(TorchFunctionMode):
        looked_up = 0

        def __torch_function__(
            self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.looked_up += function is F.embedding
            return function(*args, **(kwargs or {}))

    given = example(by_sdpa(lambda m, x: m.bias(x)), returned=lambda m, x: m.bias(x))
    built = build(read_of(given), given.module)
    for call, count in ((given.module, 2), (built, 1)):
        with Counting() as mode:
            call(*given.args) if call is given.module else call(given.inputs())
        assert mode.looked_up == count


KEPT: dict[str, tuple[Attend, tuple[Tensor, ...], str]] = {
    "two biases": (
        by_sdpa(lambda m, x, bias: m.bias(x) + bias),
        (trained(GIVEN),),
        "adds several biases",
    ),
    "of the input": (
        by_sdpa(lambda m, x: x[:, None, :, :1] + m.bias(x)),
        (),
        "rearranges its mask",
    ),
    "random": (
        by_sdpa(lambda m, x: m.bias(x) + torch.rand((x.shape[1], x.shape[1]), device=x.device)),
        (),
        "draws random numbers by rand",
    ),
    "of a buffer": (
        by_sdpa(lambda m, x: m.table(m.numbers[: x.shape[1]]).permute(1, 0)[None, :, None]),
        (),
        "computes embedding in 'table', in the mask",
    ),
    "rearranged": (by_sdpa(lambda m, x, bias: bias.mT), (trained(GIVEN),), "rearranges its mask"),
    "scaled": (by_sdpa(lambda m, x, bias: bias * 2), (trained(GIVEN),), "computes mul, in the"),
    "hidden twice": (
        by_sdpa(lambda m, x, bias, seen: torch.where(
            seen, torch.where(before(x), bias, LOWEST), LOWEST)),
        (trained(GIVEN), SEEN),
        "hides keys by large numbers several times",
    ),
    "hidden beside a mask": (
        by_sdpa(lambda m, x, bias, seen, mask: torch.where(seen, bias + mask, LOWEST)),
        (trained(GIVEN), SEEN, NUMBERS),
        "adds several biases",
    ),
    "earlier keys hidden": (
        by_sdpa(lambda m, x, bias: torch.where(before(x).mT, bias, LOWEST)),
        (trained(GIVEN),),
        "in the mask of attention",
    ),
    "earlier keys hidden, by a comparison": (
        by_sdpa(lambda m, x, bias: torch.where(
            torch.arange(x.shape[1]) >= torch.arange(x.shape[1])[:, None], bias, LOWEST)),
        (trained(GIVEN),),
        "in the mask of attention",
    ),
    "later keys hidden, counted from elsewhere": (
        by_sdpa(lambda m, x, bias: torch.where(
            torch.arange(1, x.shape[1] + 1)[:, None] >= torch.arange(x.shape[1]), bias, LOWEST)),
        (trained(GIVEN),),
        "in the mask of attention",
    ),
    "keys from the query on hidden": (
        by_sdpa(lambda m, x, bias: torch.where(
            torch.arange(x.shape[1])[:, None] > torch.arange(x.shape[1]), bias, LOWEST)),
        (trained(GIVEN),),
        "in the mask of attention",
    ),
    "hidden by another number": (
        by_sdpa(lambda m, x, bias, seen: torch.where(seen, bias, -100.0)),
        (trained(GIVEN), SEEN),
        "computes where, in the mask",
    ),
    "a bool mask that is added": (
        by_formula(lambda m, x, seen: seen), (SEEN,), "are not all numbers"
    ),
    "a bool mask added to zeros": (
        by_sdpa(lambda m, x, seen: zeros(x) + seen), (SEEN,), "are not all numbers"
    ),
    "a bool mask added to a bias": (
        by_sdpa(lambda m, x, seen: m.bias(x) + seen), (SEEN,), "are not all numbers"
    ),
    "large numbers made of sizes": (
        by_sdpa(lambda m, x: torch.where(before(x).mT, m.bias(x), -1e9)),
        (),
        "computes where with large negative numbers",
    ),
    "a bool mask of sizes": (by_sdpa(lambda m, x: before(x)), (), "in the mask of attention"),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_others_are_a_reason_to_keep_a_module(name: str) -> None:
    attend, others, reason = KEPT[name]
    with pytest.raises(KeptError) as kept:
        read_of(example(attend, *others))
    assert reason in kept.value.reason


def test_a_table_with_hooks_is_called() -> None:
    given = example(by_sdpa(lambda m, x: m.bias(x)))
    given.module.table.register_forward_hook(lambda module, args, y: y * 2)
    with pytest.raises(KeptError, match="calls 'table', which has hooks"):
        read_of(given)


def test_a_length_that_is_fixed_is_a_guard() -> None:
    """The number of a bias of as many entries is no size of the input by chance."""

    def attend(m: Biased, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        bias = torch.arange(LENGTH, device=x.device, dtype=x.dtype).view(1, 1, 1, LENGTH)
        return F.scaled_dot_product_attention(q, k, v, bias)

    given = example(attend)
    traced = trace(*given)
    assert isinstance(operation_in(read(traced.dataflow), Attention).bias, Made)
    assert f"s[1] == {LENGTH}" in traced.guards
