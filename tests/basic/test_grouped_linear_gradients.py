"""Gradients of the weights of GroupedLinear: where they are added to, and when."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from opfuser import GroupedLinear, Sequential
from opfuser.errors import ArgumentError, InputError
from opfuser.events import PlanCreated, record_events
from tests.basic.groups import STACKED, grouped
from tests.basic.values import check_values, saved_by
from tests.contract.gradients import handed_over


def gradients(op: GroupedLinear, x: Tensor, sizes: Tensor, dy: Tensor) -> list[Tensor]:
    """Of the weights, by torch in fp64."""
    exact = copy.deepcopy(op).double()
    for flag in ("accumulate_into_main_grad", "accumulate_into_grad", "delay_wgrad_compute"):
        setattr(exact, flag, False)
    y = exact.reference(x.double(), sizes)
    return list(torch.autograd.grad(y, list(exact.parameters()), dy.double()))


def test_frozen_weights_save_no_input() -> None:
    op = grouped()
    for n in range(3):
        getattr(op, f"weight{n}").requires_grad_(False)
    x, sizes = torch.randn(9, 5, requires_grad=True), torch.tensor([2, 3, 4])
    assert all(t.shape != x.shape for t in saved_by(lambda: op(x, sizes)))
    check_values(op, x.detach(), sizes, dtypes=[torch.float64], zero_rows=False)


def with_main_grad(weight: nn.Parameter, value: float = 0.0) -> nn.Parameter:
    weight.main_grad = torch.full_like(weight, value, dtype=torch.float32)  # type: ignore[attr-defined]
    return weight


@STACKED
def test_fp32_main_grad_of_bf16_weights(single: bool) -> None:
    """Delayed; and if not, in which dtypes else: tests/contract/test_gradients_of_groups.py."""
    op = grouped(
        bias=False,
        single_grouped_weight=single,
        accumulate_into_main_grad=True,
        delay_wgrad_compute=True,
        dtype=torch.bfloat16,
    )
    weights: list[Any] = [with_main_grad(weight, 1.0) for weight in op.parameters()]
    x, dy = torch.randn(9, 5).bfloat16(), torch.randn(9, 4).bfloat16()
    sizes = torch.tensor([4, 0, 5])
    op(x, sizes).backward(dy)
    for weight in weights:
        assert weight.grad_added_to_main_grad
        assert not weight.grad.any()
        assert weight.main_grad.eq(1).all()
    op.backward_dw()
    for weight, dw in zip(weights, gradients(op, x, sizes, dy)):
        torch.testing.assert_close(weight.main_grad.double(), 1 + dw, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("how", "single", "delay", "transposed"),
    [
        ("functional_call", False, True, True),
        ("functional_call", True, False, False),
        ("replaced", True, True, True),
        ("cleared", False, False, False),
    ],
)
def test_main_grad_belongs_to_the_weights_that_forward_used(
    how: str, single: bool, delay: bool, transposed: bool
) -> None:
    op = grouped(
        bias=False,
        single_grouped_weight=single,
        weight_transposed=transposed,
        accumulate_into_main_grad=True,
        delay_wgrad_compute=delay,
    )
    used = [with_main_grad(w) for w in op.parameters()]
    names = [name for name, _ in op.named_parameters()]
    others = [with_main_grad(nn.Parameter(torch.randn_like(w)), 7.0) for w in used]
    x, sizes = torch.ones(9, 5), torch.tensor([2, 3, 4])
    if how == "functional_call":
        used, others = others, used
        y = functional_call(op, dict(zip(names, used)), (x, sizes))
    else:
        y = op(x, sizes)
        for name, other in zip(names, others):
            setattr(op, name, other if how == "replaced" else None)
    before = [w.main_grad.clone() for w in (*used, *others)]
    y.sum().backward()
    if delay:
        op.backward_dw()
    expected = [torch.full((5, 4) if transposed else (4, 5), n) for n in (2.0, 3.0, 4.0)]
    expected = [torch.stack(expected)] if single else expected
    added = [w.main_grad - b for w, b in zip((*used, *others), before)]
    torch.testing.assert_close(added, [*expected, *[torch.zeros_like(w) for w in others]])
    assert all(w.grad_added_to_main_grad for w in used)  # type: ignore[attr-defined]
    assert not any(hasattr(w, "grad_added_to_main_grad") for w in others)


@pytest.mark.gpu
@pytest.mark.parametrize("overwrite", [False, True])
@STACKED
def test_grouped_gemm_of_the_device_into_main_grad(single: bool, overwrite: bool) -> None:
    op = grouped(
        in_features=32,
        out_features=16,
        bias=False,
        single_grouped_weight=single,
        accumulate_into_main_grad=True,
        dtype=torch.bfloat16,
        device="cuda",
    )
    for weight in op.parameters():
        with_main_grad(weight, 1.0)
        weight.overwrite_main_grad = overwrite  # type: ignore[attr-defined]
    x, dy = torch.randn(9, 32).bfloat16().cuda(), torch.randn(9, 16).bfloat16().cuda()
    sizes = torch.tensor([4, 0, 5], device="cuda")
    op(x, sizes).backward(dy)
    for weight, dw in zip(op.parameters(), gradients(op, x, sizes, dy)):
        expected = dw + (not overwrite)
        torch.testing.assert_close(weight.main_grad.double(), expected, rtol=0.02, atol=0.1)


@STACKED
def test_delayed_weight_gradients(single: bool) -> None:
    op = grouped(single_grouped_weight=single, delay_wgrad_compute=True)
    direct = copy.deepcopy(op)
    direct.delay_wgrad_compute = False
    assert op.need_backward_dw()
    assert not direct.need_backward_dw()
    weights = [p for name, p in op.named_parameters() if name.startswith("weight")]
    assert all(w.skip_backward_post_hook for w in weights)  # type: ignore[attr-defined]
    calls: list[bool] = []
    op.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append(True))
    sizes = torch.tensor([4, 0, 5])
    inputs = [torch.randn(9, 5, requires_grad=True) for _ in range(2)]
    for x in inputs:
        op(x, sizes).square().sum().backward()
        direct(x.detach(), sizes).square().sum().backward()
    assert all(x.grad is not None for x in inputs)
    assert all(w.grad is None for w in weights)
    assert all(p.grad is not None for name, p in op.named_parameters() if name.startswith("bias"))
    for _ in inputs:
        op.backward_dw()
    assert calls == [True, True]
    for ours, theirs in zip(op.parameters(), direct.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)
    op.backward_dw()
    direct.backward_dw()
    assert calls == [True, True]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("place", ["main_grad", "grad"])
def test_delayed_gradients_go_where_forward_was_told(place: str, late: bool) -> None:
    """Those that are not delayed: test_attributes.py."""
    flag = f"accumulate_into_{place}"
    op = grouped(bias=False, delay_wgrad_compute=True, **{flag: not late})
    weights: list[Any] = [with_main_grad(w) for w in op.parameters()]
    starts = [torch.ones(4, 5) for _ in weights]
    for w, start in zip(weights, starts):
        w.grad = start
    y = op(torch.ones(9, 5), torch.tensor([2, 3, 4]))
    setattr(op, flag, late)
    told = [handed_over(y, w) for w in weights]
    y.sum().backward()
    op.backward_dw()
    into_main_grad = place == "main_grad" and not late
    assert into_main_grad or told == [[False]] * 3
    for w, start, n in zip(weights, starts, (2, 3, 4)):
        assert w.main_grad.eq(n if into_main_grad else 0).all()
        assert w.grad.eq(1 if into_main_grad else 1 + n).all()
        assert late or w.grad is start, "the same memory"


@pytest.mark.parametrize("late", [False, True])
def test_backward_delays_gradients_if_forward_was_to(late: bool) -> None:
    op = grouped(bias=False, delay_wgrad_compute=not late)
    y = op(torch.ones(9, 5), torch.tensor([2, 3, 4]))
    op.delay_wgrad_compute = late
    y.sum().backward()
    assert (op.weight0.grad is None) is not late
    assert op.need_backward_dw()  # set, or something waits
    op.backward_dw()
    assert op.need_backward_dw() is late
    torch.testing.assert_close(op.weight0.grad, torch.full((4, 5), 2.0))


@STACKED
def test_wrappers_are_told_when_delay_is_set_later(single: bool) -> None:
    op = grouped(single_grouped_weight=single)
    weights = [p for name, p in op.named_parameters() if name.startswith("weight")]
    assert not any(hasattr(w, "skip_backward_post_hook") for w in weights)
    for value in (True, False):
        op.delay_wgrad_compute = value
        assert op.delay_wgrad_compute is value
        assert all(w.skip_backward_post_hook is value for w in weights)  # type: ignore[attr-defined]
    if not single:
        op.weight0 = None
        op.delay_wgrad_compute = True
        op.weight0 = nn.Parameter(torch.zeros(4, 5))
        assert op.weight0.skip_backward_post_hook is True  # type: ignore[attr-defined]


def test_a_waiting_gradient_does_not_change_the_plan_and_is_not_copied() -> None:
    op = grouped(delay_wgrad_compute=True)
    x, sizes = torch.randn(9, 5), torch.tensor([4, 0, 5])
    seq = Sequential(op)
    with record_events(only=PlanCreated) as plans:
        for _ in range(2):
            seq(x, sizes).sum().backward()
            seq.train()
    assert len(plans) == 1
    twin = copy.deepcopy(op)
    twin.backward_dw()
    assert twin.weight0.grad is None
    op.backward_dw()
    assert op.weight0.grad is not None


def test_gradients_that_have_no_place() -> None:
    x, sizes = torch.ones(9, 5), torch.tensor([2, 3, 4])
    op = grouped(accumulate_into_main_grad=True)
    with pytest.raises(ArgumentError, match=r"parameter's shape \(GroupedLinear\)"):
        op(x, sizes).sum().backward()
    op.accumulate_into_grad = True
    with pytest.raises(ArgumentError, match=r"accumulated in one place \(GroupedLinear\)"):
        op(x, sizes)


@pytest.mark.parametrize("which", ["input", "gradient"])
def test_what_a_delayed_gradient_is_made_of_must_stay(which: str) -> None:
    op = grouped(delay_wgrad_compute=True)
    x, dy, sizes = torch.randn(9, 5), torch.randn(9, 4), torch.tensor([2, 3, 4])
    for late in (False, True):
        op(x, sizes).backward(dy)
        if late:
            (x if which == "input" else dy).zero_()
            with pytest.raises(InputError, match=r"until backward_dw \(GroupedLinear\).*in place"):
                op.backward_dw()
        else:
            op.backward_dw()
    op.delay_wgrad_compute = False
    assert not op.need_backward_dw(), "nothing waits"
