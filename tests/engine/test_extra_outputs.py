"""What operations of users may count on where extra outputs are concerned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser as of
from tests.engine.toys import F64, grads, randn, same


class MakesScale(of.BasicOperation):
    """``y = x`` and the extra output ``w * mean(x)`` per row, fresh."""

    num_extra_outputs = 1

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0], dtype=F64))

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


class TakesScale(of.BasicOperation):
    """``y = x * scale``; decides by ``scale.requires_grad``, as operations of te.ops do."""

    num_extra_inputs = 1

    def fuser_forward(
        self, ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
    ) -> Any:
        ((scale,),) = basic_op_extra_inputs
        ctxs[0].wanted = scale.requires_grad
        ctxs[0].save_for_backward(scale.detach(), input_ if scale.requires_grad else None)
        return input_ * scale.detach().unsqueeze(-1), [()]

    def fuser_backward(self, ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        scale, x = ctxs[0].saved_tensors
        dscale = (grad_output * x).sum(-1) if ctxs[0].wanted else None
        return grad_output * scale.unsqueeze(-1), [()], [(dscale,)]


def scaled(between: list[nn.Module]) -> of.Sequential:
    make, take = MakesScale(), TakesScale()
    make.set_extra_output_channel(0, "scale", output_to_caller=False)
    take.set_extra_input_channel(0, "scale")
    return of.Sequential(make, *between, take)


@pytest.mark.parametrize("between", [[], [of.ConstantScale(3.0)], [nn.Identity()]])
@pytest.mark.parametrize("wrt", ["x", "w"])
def test_a_fresh_extra_output_asks_for_its_gradient(between: list[nn.Module], wrt: str) -> None:
    seq, x = scaled(between), randn(4, 3, grad=wrt == "x")
    seq[0].w.requires_grad_(wrt == "w")
    for _ in range(2):
        factor = 3 if any(isinstance(m, of.ConstantScale) for m in between) else 1
        expected = x * factor * (x.mean(-1, keepdim=True) * seq[0].w)
        same(seq(x), expected)
        tensor = [x if wrt == "x" else seq[0].w]
        same(grads(seq(x), tensor), grads(expected, tensor))


def test_an_extra_output_asks_for_nothing_where_no_gradient_is_wanted() -> None:
    seq, x = scaled([]), randn(4, 3)
    asked: list[bool] = []
    plain = TakesScale.fuser_forward

    class Notes(TakesScale):
        def fuser_forward(self, ctxs: Any, input_: Tensor, **kwargs: Any) -> Any:
            asked.append(kwargs["basic_op_extra_inputs"][0][0].requires_grad)
            return plain(self, ctxs, input_, **kwargs)

    notes = Notes()
    notes.set_extra_input_channel(0, "scale")
    seq = of.Sequential(seq[0], notes)
    with torch.no_grad():
        seq(x)
    seq.requires_grad_(False)
    seq(x)
    assert asked == [False, False]
    seq(x.requires_grad_())
    assert asked[2]


class Tap(of.BasicOperation):
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


class Stops(of.BasicOperation):
    """``y = x + 1``, which passes no gradient back."""

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        return input_ + 1

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return None, ()


class TapAndStop(of.FusedOperation):
    def fuser_forward(self, ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        return 2 * input_ + 1, [(3 * input_[..., 0],), ()]


class TapAndScale(of.FusedOperation):
    def fuser_forward(self, ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        return 4 * input_, [(3 * input_[..., 0],), ()]


def fuse(ops: Sequence[of.FusibleOperation]) -> list[of.FusibleOperation]:
    out: list[of.FusibleOperation] = []
    for op in ops:
        if out and isinstance(op, Stops) and isinstance(out[-1], Tap):
            out[-1] = TapAndStop((out[-1], op))
        else:
            out.append(op)
    return out


class Scales(of.BasicOperation):
    """``y = x w``, which always has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=F64))

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        ctx.save_for_backward(input_)
        return input_ * self.w.detach()

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return grad_output, ((grad_output * ctx.saved_tensors[0]).sum(),)


def test_no_gradient_passes_through_the_library_s_own_operations() -> None:
    fusion = of.Fusion("tap_scale", "forward", (Tap, of.ConstantScale), lambda *o: TapAndScale(o))
    seq, x = of.Sequential(Tap(), of.ConstantScale(2.0), Stops()), randn(2, 5, grad=True)
    with of.register_forward_fusion(fusion):
        same(grads(seq(x)[1], [x]), grads(3 * x[:, 0], [x]))


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("where", [(), (Scales,)])
def test_zeros_have_the_shape_of_the_output(where: tuple[Any, ...], declared: bool) -> None:
    """Of an operation in the middle of a forward fusion, no gradient of whose output arrives."""
    seq, x = of.Sequential(Tap(), Stops(), *(kind() for kind in where)), randn(2, 5, grad=True)
    behind = type(seq[-1]).__name__
    fusion: Any = fuse
    if declared:
        fusion = of.Fusion("tap_stop", "forward", (Tap, Stops), lambda *ops: TapAndStop(ops))
    with of.register_forward_fusion(fusion, name="tap_stop"):
        _, extra = seq(x)
        (dx,) = grads(extra, [x])
        plan = seq.last_plan
        assert plan is not None
        (at, why), *_ = plan.record("tap_stop").refusals
    same(dx, grads(3 * x[:, 0], [x])[0])
    assert at == 0
    assert str(why) == (
        f"EXTRA_OUTPUT_USED: Tap has an extra output, and {behind} behind it may return no "
        "gradient: zeros have the shape of an output hidden here"
    )
    assert plan.record("tap_stop").status == "refused"


def test_a_forward_fusion_stays_where_its_shapes_are_known() -> None:
    """No gradient is wanted; or what stands behind is the library's own."""
    fusions = [
        of.Fusion("tap_stop", "forward", (Tap, Stops), lambda *ops: TapAndStop(ops)),
        of.Fusion("tap_scale", "forward", (Tap, of.ConstantScale), lambda *ops: TapAndScale(ops)),
    ]
    x = randn(2, 5)
    with of.register_forward_fusion(fusions[0]), of.register_forward_fusion(fusions[1]):
        assert of.Sequential(Tap(), Stops()).plan(x).fused("forward") == {"tap_stop": 1}
        seq = of.Sequential(Tap(), of.ConstantScale(2.0))
        x.requires_grad_()
        assert seq.plan(x).fused("forward") == {"tap_scale": 1}
        same(grads(seq(x)[1], [x]), grads(3 * x[:, 0], [x]))
