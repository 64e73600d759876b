"""Extra inputs, extra outputs, channels and op_kwargs, with numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import AddExtraInput, ConstantScale, MakeExtraOutput
from opfuser.errors import ChannelError
from tests.engine.toys import (
    Mixed,
    Power,
    RowSum,
    Square,
    Stop,
    Times,
    Twice,
    consumer,
    grads,
    producer,
    randn,
    same,
)


def mixed(x: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    return x * e, x + e


class Block(opfuser.Sequential):
    """Called as a module, as every subclass."""


@pytest.mark.parametrize(
    ("between", "kind"),
    [([], opfuser.Sequential), ([Twice()], Block), ([opfuser.Sequential(Twice())], Block)],
    ids=["one group", "two groups", "nested"],
)
def test_extra_tensors_come_and_go_in_operation_order(
    between: list[nn.Module], kind: type[opfuser.Sequential]
) -> None:
    inner = kind(Mixed(), Square(), Mixed())
    seq = opfuser.Sequential(Mixed(), ConstantScale(2.0), *between, inner, Mixed())
    factor = 2 if between else 1
    tensors = [randn(2, 3, grad=True) for _ in range(5)]
    y, *extras = seq(*tensors)
    x, first = mixed(tensors[0], tensors[1])
    x, second = mixed(2 * x * factor, tensors[2])
    x, third = mixed(x * x, tensors[3])
    x, fourth = mixed(x, tensors[4])
    expected = (x, first, second, third, fourth)
    same((y, *extras), expected)
    same(grads((y, *extras), tensors), grads(expected, tensors))
    assert (seq.num_extra_inputs, seq.num_extra_outputs) == (4, 4)


# Gradients.


def test_extra_outputs_in_front_of_the_first_gradient_need_none() -> None:
    seq, x = opfuser.Sequential(MakeExtraOutput(), RowSum(), Times()), randn(2, 3)
    y, tap, sums = seq(x)
    assert [t.requires_grad for t in (y, tap, sums, x)] == [True, False, False, False]
    same([y, tap, sums], [2 * x * seq[2].w, x, x.sum(-1, keepdim=True)])
    same(grads(y, [seq[2].w]), grads(2 * x * seq[2].w, [seq[2].w]))


def test_outputs_that_are_one_tensor_have_gradients_of_their_own() -> None:
    seq = opfuser.Sequential(Times(), MakeExtraOutput(), MakeExtraOutput())
    x = randn(2, 3, grad=True)
    expected = x * seq[0].w
    same(grads(seq(x), [x]), grads((expected, expected, expected), [x]))


# Channels.


def test_residuals() -> None:
    """Inside each other, copies of each other, twice the same; around a plain module."""
    inner = opfuser.Residual(Times(), opfuser.Residual(Square()))
    twin = copy.deepcopy(inner)
    seq = opfuser.Sequential(inner, twin, opfuser.Residual(Twice()), inner, inner)
    x = randn(2, 3, grad=True) / 8
    expected = x
    for n, residual in enumerate((inner, twin, inner, inner)):
        branch = expected * residual[1].w
        expected = expected + branch + branch**2
        expected = 3 * expected if n == 1 else expected
    same(seq(x), expected)
    wrt = [x, *seq.parameters()]
    same(grads(seq(x), wrt), grads(expected, wrt))
    assert seq.num_extra_inputs == seq.num_extra_outputs == 0


def test_a_channel_error_leaves_the_sequential_usable() -> None:
    seq = opfuser.Sequential(consumer())
    for _ in range(2):
        with pytest.raises(ChannelError, match="has no producer"):
            seq(randn(2))
    seq.insert(0, producer(output_to_caller=False))
    same(seq(torch.ones(2)), torch.full((2,), 2.0))


def test_channels_do_not_apply_to_an_operation_called_alone() -> None:
    """Hazard 14; nor are they frozen by such a call."""
    tap, add, x = MakeExtraOutput(), AddExtraInput(), randn(2, 3, grad=True)

    def alone() -> None:
        y, extra = tap(x)
        same([y, extra, add(x, 2 * x)], [x, x, 3 * x])

    alone()
    tap.set_extra_output_channel(0, "skip", output_to_caller=False)
    add.set_extra_input_channel(0, "skip")
    seq = opfuser.Sequential(tap, ConstantScale(3.0), add)
    for _ in range(2):
        alone()
        same(seq(x), 4 * x)
        same(grads(seq(x), [x]), grads(4 * x, [x]))


# Keywords for the forward of one operation.


def powers() -> opfuser.Sequential:
    return opfuser.Sequential(Power(), opfuser.Sequential(Power()), Twice(), Power())


def test_op_kwargs_name_an_operation_or_its_index() -> None:
    seq, x = powers(), randn(2, 3, grad=True)
    expected = (2 * x**2) ** 3
    for key in (seq[3], 3, -1):
        y = seq(x, op_kwargs={key: {"power": 3}, seq[1][0]: {"power": 2}})
        same(y, expected)
        same(grads(y, [x]), grads(expected, [x], retain_graph=True))
    for nothing in (None, {}, {0: {}}):
        same(seq(x, op_kwargs=nothing), 2 * x)


def test_op_kwargs_with_extra_tensors_alone_and_twice() -> None:
    power, x, e = Power(), randn(2, 3), randn(2, 3)
    seq = opfuser.Sequential(Mixed(), power)
    same(seq(x, e, op_kwargs={1: {"power": 2}}), ((x * e) ** 2, x + e))
    same(power(x, power=3), x**3)
    same(opfuser.Sequential(power, power)(x, op_kwargs={power: {"power": 2}}), x**4)


# What operations of users may count on where extra outputs are concerned.


class MakesScale(opfuser.BasicOperation):
    """``y = x`` and the extra output ``w * mean(x)`` per row, fresh."""

    num_extra_outputs = 1

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))

    def fuser_forward(self, ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        mean = input_.mean(-1)
        ctxs[0].save_for_backward(mean, self.w.detach())
        ctxs[0].columns = input_.shape[-1]
        return input_, [(mean * self.w.detach(),)]

    def fuser_backward(
        self, ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        ((g,),) = basic_op_grad_extra_outputs
        mean, w = ctxs[0].saved_tensors
        if g is None:
            return grad_output, [(None,)], [()]
        dx = grad_output + (g * w / ctxs[0].columns).unsqueeze(-1)
        return dx, [((g * mean).sum().reshape(1),)], [()]


class TakesScale(opfuser.BasicOperation):
    """``y = x * scale``; decides by ``scale.requires_grad``, as operations of te.ops do."""

    num_extra_inputs = 1

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bool] = []

    def fuser_forward(
        self, ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
    ) -> Any:
        ((scale,),) = basic_op_extra_inputs
        self.asked.append(scale.requires_grad)
        ctxs[0].wanted = scale.requires_grad
        ctxs[0].save_for_backward(scale.detach(), input_ if scale.requires_grad else None)
        return input_ * scale.detach().unsqueeze(-1), [()]

    def fuser_backward(self, ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        scale, x = ctxs[0].saved_tensors
        dscale = (grad_output * x).sum(-1) if ctxs[0].wanted else None
        return grad_output * scale.unsqueeze(-1), [()], [(dscale,)]


def scaled(*between: nn.Module) -> opfuser.Sequential:
    make = MakesScale().set_extra_output_channel(0, "scale", output_to_caller=False)
    return opfuser.Sequential(make, *between, TakesScale().set_extra_input_channel(0, "scale"))


@pytest.mark.parametrize(
    ("between", "wrt"),
    [([], "x"), ([], "w"), ([ConstantScale(3.0)], "w"), ([nn.Identity()], "x")],
    ids=str,
)
def test_a_fresh_extra_output_asks_for_its_gradient(between: list[nn.Module], wrt: str) -> None:
    seq, x = scaled(*between), randn(4, 3, grad=wrt == "x")
    seq[0].w.requires_grad_(wrt == "w")
    factor = 3 if any(isinstance(m, ConstantScale) for m in between) else 1
    for _ in range(2):
        expected = x * factor * (x.mean(-1, keepdim=True) * seq[0].w)
        same(seq(x), expected)
        tensor = [x if wrt == "x" else seq[0].w]
        same(grads(seq(x), tensor), grads(expected, tensor))


def test_an_extra_output_asks_for_nothing_where_no_gradient_is_wanted() -> None:
    seq, x = scaled(), randn(4, 3)
    with torch.no_grad():
        seq(x)
    seq.requires_grad_(False)
    seq(x)
    assert seq[1].asked == [False, False]
    seq(x.requires_grad_())
    assert seq[1].asked[2]


# An operation in the middle of a forward fusion, behind which no gradient may come back.


class Tap(opfuser.BasicOperation):
    """``y = 2 x`` of ``(…, n)``, and the extra output ``3 x[..., 0]``: of another shape."""

    num_extra_outputs = 1

    def fuser_forward(self, ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        return 2 * input_, [(3 * input_[..., 0],)]

    def fuser_backward(
        self, ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        ((g,),) = basic_op_grad_extra_outputs
        dx = 2 * grad_output
        if g is not None:
            dx[..., 0] += 3 * g
        return dx, [()], [()]


class TapAnd(opfuser.FusedOperation):
    """Tap and one of Stop and ConstantScale(2)."""

    def fuser_forward(self, ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        stops = type(self.basic_ops[1]) is Stop
        y = torch.ones_like(input_) if stops else 4 * input_
        return y, [(3 * input_[..., 0],), ()]


def fuse(ops: Any) -> list[Any]:
    """As a function, which declares nothing."""
    return [TapAnd(ops[:2]), *ops[2:]] if type(ops[0]) is Tap else list(ops)


TAP_STOP = opfuser.Fusion("tap_stop", "forward", (Tap, Stop), lambda *ops: TapAnd(ops))
TAP_SCALE = opfuser.Fusion("tap_scale", "forward", (Tap, ConstantScale), lambda *ops: TapAnd(ops))


@pytest.mark.parametrize(("fusion", "behind"), [(fuse, ()), (TAP_STOP, ()), (TAP_STOP, (Times,))])
def test_zeros_have_the_shape_of_the_output(fusion: Any, behind: tuple[Any, ...]) -> None:
    size = {"size": 5} if behind else {}
    seq, x = opfuser.Sequential(Tap(), Stop(), *(kind(**size) for kind in behind)), randn(2, 5)
    with opfuser.register_forward_fusion(fusion, name="tap_stop"):
        _, extra = seq(x.requires_grad_())
        same(grads(extra, [x]), grads(3 * x[:, 0], [x]))
        record = seq.plan(x).record("tap_stop")
    (at, why), *_ = record.refusals
    assert (record.status, at) == ("refused", 0)
    assert str(why) == (
        f"EXTRA_OUTPUT_USED: Tap has an extra output, and {type(seq[-1]).__name__} after it may "
        "return no gradient: zeros have the shape of an output hidden here"
    )


def test_a_forward_fusion_stays_where_its_shapes_are_known() -> None:
    """No gradient is wanted; or what stands behind is the library's own."""
    x = randn(2, 5)
    with (
        opfuser.register_forward_fusion(TAP_STOP),
        opfuser.register_forward_fusion(TAP_SCALE),
    ):
        assert opfuser.Sequential(Tap(), Stop()).plan(x).fused("forward") == {"tap_stop": 1}
        seq = opfuser.Sequential(Tap(), ConstantScale(2.0))
        x.requires_grad_()
        assert seq.plan(x).fused("forward") == {"tap_scale": 1}
        same(grads(seq(x)[1], [x]), grads(3 * x[:, 0], [x]))
        stops = opfuser.Sequential(*seq, Stop())
        same(grads(stops(x)[1], [x]), grads(3 * x[:, 0], [x]))
