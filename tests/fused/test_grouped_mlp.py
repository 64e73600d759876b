"""Experts whose copies of tokens and activations are recomputed: values, memory, refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import (
    GroupedLinear,
    Identity,
    Permute,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    ScaledTanhSReLU,
    Sequential,
    Unpermute,
)
from opfuser.fused import GroupedMLP
from opfuser.recipe import Float8CurrentScaling
from opfuser.testing import assert_fused, assert_not_fused, check_fusion
from tests.contract.tensors import Gemms, Live
from tests.fused.examples import (
    BF16,
    DTYPES,
    F64,
    assert_same,
    elements,
    filled,
    only,
    results,
    saved_by,
    with_subclass,
)

NAME = "grouped_mlp"
E, K, D, F = 3, 2, 6, 4


def on_channels(
    activation: nn.Module | None = None,
    *,
    inner: int = 2 * F,
    scale_bias: bool = False,
    sizes: tuple[int, int, int] = (E, D, F),
    **how: Any,
) -> list[Any]:
    """Permute, the experts and Unpermute; extra inputs are indices and weights."""
    activation = activation or ScaledSwiGLU()
    experts, outside, inside = sizes
    ops: list[Any] = [
        Permute(experts),
        GroupedLinear(experts, outside, inner, **how),
        activation,
        GroupedLinear(experts, inside, outside, scale_bias=scale_bias, **how),
        Unpermute(),
    ]
    for n, name in enumerate(("row map", "sizes", "weights")):
        ops[0].set_extra_output_channel(n, name, output_to_caller=False)
    for op, n, name in (
        (ops[1], 0, "sizes"),
        (ops[2], 0, "weights"),
        (ops[3], 0, "sizes"),
        (ops[4], 0, "row map"),
    ):
        op.set_extra_input_channel(n, name)
    if ops[3].num_extra_inputs == 2:
        ops[3].set_extra_input_channel(1, "weights")
    return ops


def of_rows() -> list[Any]:
    """Without Permute: the rows of experts come from elsewhere."""
    return [GroupedLinear(E, D, 2 * F), ScaledSwiGLU(2), GroupedLinear(E, F, D)]


def tokens(*leading: int) -> list[Tensor]:
    """Input, indices of different experts and weights."""
    indices = torch.rand(*leading, E).topk(K).indices
    return [torch.randn(*leading, D), indices, torch.rand(*leading, K)]


def rows(*sizes: int) -> list[Tensor]:
    split = torch.tensor(sizes)
    return [torch.randn(sum(sizes), D), split, torch.rand(sum(sizes)), split]


FORMS: dict[str, tuple[Callable[[], list[Any]], Callable[[], list[Tensor]]]] = {
    "tokens": (lambda: on_channels(scale_bias=True), lambda: tokens(2, 5)),
    "weights in one": (
        lambda: on_channels(ScaledSiTUGLU(), single_grouped_weight=True, bias=False),
        lambda: tokens(7),
    ),
    "clamped": (lambda: on_channels(ScaledClampedQGeGLU()), lambda: tokens(7)),
    "not gated": (lambda: on_channels(ScaledSReLU(), inner=F), lambda: tokens(7)),
    "capped, not gated": (
        lambda: on_channels(ScaledTanhSReLU(tanh_clamp_scale=0.5), inner=F),
        lambda: tokens(7),
    ),
    "rows": (of_rows, lambda: rows(2, 0, 7)),
    "one row": (of_rows, lambda: rows(0, 1, 0)),
    "no rows": (of_rows, lambda: rows(0, 0, 0)),
}


@pytest.mark.parametrize("form", FORMS)
def test_values(form: str, device: torch.device) -> None:
    make, inputs = FORMS[form]
    ops = [op.to(device) for op in filled(make())]
    tensors = [t.to(device) for t in inputs()]
    dtypes = DTYPES if form in ("tokens", "rows") else (F64,)
    check_fusion(NAME, ops, *tensors, dtypes=dtypes, zero_rows=False)


def test_values_under_autocast() -> None:
    with torch.autocast("cpu", BF16):
        check_fusion(NAME, filled(on_channels()), *tokens(2, 5), zero_rows=False)


def test_every_extra_tensor_may_be_the_callers() -> None:
    """A Permute whose outputs are all public, and experts that take theirs from the caller."""
    ops = [Permute(E), *of_rows()]
    x, indices, weights = tokens(9)
    sizes = torch.bincount(indices.flatten(), minlength=E)
    more = [sizes, torch.rand(9 * K), sizes]
    check_fusion(NAME, filled(ops), x, indices, weights, *more, dtypes=[F64], zero_rows=False)


def test_weights_that_are_read_outside_too() -> None:
    """Their gradients from both sides are added."""
    ops = on_channels(scale_bias=True)
    ops[0].set_extra_output_channel(2, "weights")
    seq = Sequential(*filled(ops)).double()
    inputs = [t.double().requires_grad_() if t.is_floating_point() else t for t in tokens(5)]
    with only():
        want = results(seq, seq.parameters(), *inputs)
    with only(NAME):
        assert_fused(seq, *inputs, joint={NAME: 1})
        assert_same(results(seq, seq.parameters(), *inputs), want)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))])
def test_placed_by_hand_and_copied(how: Callable[[Any], Any]) -> None:
    ops = filled(of_rows())
    apart = Sequential(*ops).double()
    fused = how(
        Sequential(GroupedMLP(linear1=ops[0], activation=ops[1], linear2=ops[2]))  # type: ignore[arg-type]
    )
    inputs = [t.double().requires_grad_() if t.is_floating_point() else t for t in rows(3, 0, 4)]
    with only():
        want = results(apart, apart.parameters(), *inputs)
        assert_same(results(fused, fused.parameters(), *inputs), want)


def test_saves_tokens_and_the_input_of_the_activation_alone() -> None:
    seq = Sequential(*filled(on_channels(bias=False)))
    x, indices, weights = (t.requires_grad_(t.is_floating_point()) for t in tokens(11))
    small = 11 * K + E + 11 * K  # row map, sizes, weights of rows
    with only(NAME):
        fused = elements(saved_by(seq, x, indices, weights))
    assert fused == x.numel() + 11 * K * 2 * F + small
    with only():
        apart = elements(saved_by(seq, x, indices, weights))
    assert apart == fused - x.numel() + 11 * K * (D + F)


def test_backward_holds_no_more_than_it_must() -> None:
    """At its peak, when the last product runs: gradients of weights and tokens, rows and their own.

    The gradient of the activation's input has that input's memory.
    """
    experts, number, k, size, inner = 64, 512, 4, 192, 24
    how: dict[str, Any] = {"inner": 2 * inner, "bias": False, "single_grouped_weight": True}
    seq = Sequential(*on_channels(sizes=(experts, size, inner), **how))
    indices, weights = torch.rand(number, experts).topk(k).indices, torch.rand(number, k)
    x, dy = torch.randn(number, size), torch.randn(number, size)
    with only(NAME):
        y = seq(x.requires_grad_(), indices, weights.requires_grad_())
        with Live() as live:
            y.backward(dy)
    of_weights, of_rows = sum(p.numel() for p in seq.parameters()), number * k * size
    assert live.peak <= 1.02 * 4 * (of_weights + 2 * of_rows + x.numel())


def test_no_product_runs_twice_and_none_that_nobody_needs() -> None:
    seq = Sequential(*filled(on_channels(bias=False)))
    x, indices, weights = tokens(11)

    def gemms(*wrt: Tensor) -> int:
        for t in (x, weights, *seq.parameters()):
            t.requires_grad_(any(t is w for w in wrt))
        with only(NAME):
            y = seq(x, indices, weights)
            with Gemms() as found:
                torch.autograd.grad(y.sum(), wrt)
        return len(found.shapes)

    one = gemms(x) // 2
    assert one > 0
    parameters = list(seq.parameters())
    assert gemms(x, weights, *parameters) == 4 * one
    assert gemms(*parameters[E:]) == one
    assert gemms(weights) == one


@pytest.mark.parametrize("at", range(4))
def test_a_subclass_is_not_matched(at: int) -> None:
    ops = with_subclass(on_channels(), at)
    seq, inputs = Sequential(*ops), tokens(5)
    matches = seq.plan(inputs[0].requires_grad_(), *inputs[1:]).record(NAME).matches
    assert matches == (((1, 2, 3),) if at == 0 else ())


def test_refusals() -> None:
    seq, inputs = Sequential(*on_channels()), tokens(5)
    with torch.no_grad():
        assert_not_fused(seq, NAME, *inputs, code="NO_GRAD")
    for p in seq.parameters():
        p.requires_grad_(False)
    assert_not_fused(seq, NAME, *inputs, code="NO_GRAD")
    between = on_channels()
    between.insert(3, Identity())
    assert_not_fused(Sequential(*between), NAME, *inputs, code="LAYOUT")


def test_quantized_linear_operations_save_codes_instead() -> None:
    ops = [GroupedLinear(E, 128, 256), ScaledSwiGLU(), GroupedLinear(E, 128, 128)]
    seq, sizes = Sequential(*ops), torch.tensor([3, 0, 4])
    inputs = [torch.randn(7, 128, requires_grad=True), sizes, torch.rand(7), sizes]
    with opfuser.autocast(recipe=Float8CurrentScaling()):
        assert_not_fused(seq, NAME, *inputs, code="CONFLICT")
        assert seq.plan(*inputs).fused("forward") == {"quantized_grouped_linear": 2}
    ops[0].recipe = ops[2].recipe = None
    with opfuser.autocast(recipe=Float8CurrentScaling()):
        assert_fused(seq, *inputs, joint={NAME: 1})


@pytest.mark.parametrize("delayed", [False, True])
def test_gradients_of_weights_go_where_they_are_asked_to(delayed: bool) -> None:
    ops = filled(on_channels(accumulate_into_main_grad=True, delay_wgrad_compute=delayed))
    seq = Sequential(*ops).double()
    inputs = [t.double() if t.is_floating_point() else t for t in tokens(7)]
    grads = []
    for names in ((), (NAME,)):
        weights = [p for op in (ops[1], ops[3]) for n, p in op.named_parameters() if "weight" in n]
        for p in weights:
            p.main_grad = torch.ones_like(p)  # type: ignore[attr-defined]
        with only(*names):
            seq(*inputs).square().sum().backward()
        for op in (ops[1], ops[3]):
            op.backward_dw()  # type: ignore[operator]
        grads.append([p.main_grad for p in weights])  # type: ignore[attr-defined]
    assert_same(*grads)
    assert all(bool(grad.ne(1).any()) for grad in grads[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.slow
def test_compiles_whole() -> None:
    torch.compiler.reset()
    seq = Sequential(*filled(on_channels())).double()
    inputs = [t.double().requires_grad_() if t.is_floating_point() else t for t in tokens(7)]
    want = results(seq, seq.parameters(), *inputs)
    compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
    assert_same(results(compiled, seq.parameters(), *inputs), want)
