"""Operations with known math, their twins in plain torch, and ways of comparing."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import opfuser
from opfuser.op import BasicOperation, OperationContext

F64 = torch.float64


@contextmanager
def without_collector() -> Iterator[None]:
    """Within it, what is in a cycle stays. Planning itself leaves some, which are freed before."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Times(BasicOperation):
    """``y = w x`` with a weight per column."""

    class Saved(NamedTuple):
        x: Tensor
        w: Tensor

    def __init__(self, size: int = 3, dtype: torch.dtype = F64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.5, 2.0, size, dtype=dtype))

    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        if ctx.requires_grad:
            ctx.save_for_backward(input_, self.w)
        return input_ * self.w

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx = grad_output * w if ctx.needs.input else None
        dw = None
        if ctx.needs.parameters[0]:
            dw = (grad_output * x).reshape(-1, x.shape[-1]).sum(0)
        return dx, (dw,)

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return input_ * self.w


class Square(BasicOperation):
    """``y = x²``."""

    class Saved(NamedTuple):
        x: Tensor

    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        if ctx.requires_grad:
            ctx.save_for_backward(input_)
        return input_ * input_

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * grad_output * x, ()

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return input_.square()


class Sigmoid(BasicOperation):
    """Saves its output."""

    class Saved(NamedTuple):
        y: Tensor

    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        y = input_.sigmoid()
        if ctx.requires_grad:
            ctx.save_for_backward(y)
        return y

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return grad_output * y * (1 - y), ()


class Power(BasicOperation):
    """``y = x ** power`` with a keyword; an operation in the signatures of te.ops."""

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
        power: int = 1,
    ) -> Tensor:
        assert prev_op_grad_output_quantizer is None
        assert next_op_input_quantizer is None
        if ctx.requires_grad:
            ctx.save_for_backward(input_)
            ctx.power = power
        return input_**power

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad_output * ctx.power * x ** (ctx.power - 1), []


class Mixed(BasicOperation):
    """``y = x e`` for the extra input e, and ``x + e`` as extra output."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    class Saved(NamedTuple):
        x: Tensor
        extra: Tensor

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **kwargs: Any
    ) -> Any:
        ((extra,),) = basic_op_extra_inputs
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(input_, extra)
        return input_ * extra, [(input_ + extra,)]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        x, extra = basic_op_ctxs[0].saved_tensors
        ((more,),) = basic_op_grad_extra_outputs
        dx, dextra = grad_output * extra, grad_output * x
        if more is not None:
            dx, dextra = dx + more, dextra + more
        return dx, [()], [(dextra,)]

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        (extra,) = extra_inputs
        return input_ * extra, input_ + extra


class RowSum(BasicOperation):
    """``y = 2 x``, and the sum of each row as extra output, which has another shape."""

    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **kwargs: Any) -> Any:
        basic_op_ctxs[0].shape = input_.shape
        return 2 * input_, [(input_.sum(-1, keepdim=True),)]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        ((more,),) = basic_op_grad_extra_outputs
        assert grad_output.shape == basic_op_ctxs[0].shape
        return 2 * grad_output + (0 if more is None else more), [()], [()]


class Stop(BasicOperation):
    """``y = 1``: passes no gradient back."""

    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        return torch.ones_like(input_)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        return None, ()


class TimesModule(nn.Module):
    """The twin of Times."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.5, 2.0, size, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


class SquareModule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Twice(nn.Module):
    """A plain module."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def producer(channel: str = "skip", **kwargs: Any) -> opfuser.MakeExtraOutput:
    return opfuser.MakeExtraOutput().set_extra_output_channel(0, channel, **kwargs)


def consumer(channel: str = "skip") -> opfuser.AddExtraInput:
    return opfuser.AddExtraInput().set_extra_input_channel(0, channel)


def randn(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=F64, requires_grad=grad)


def same(ours: Any, theirs: Any) -> None:
    """Equal up to rounding in float64; also lists and None."""
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def grads(y: Any, wrt: Sequence[Tensor], **kwargs: Any) -> list[Tensor | None]:
    """Gradients of ``y * (1, 2, 3 …)``, so that no two entries count the same."""
    ys = y if isinstance(y, tuple) else (y,)
    total = sum(
        (t * torch.arange(1, t.numel() + 1, dtype=t.dtype).view(t.shape)).sum() * (n + 1)
        for n, t in enumerate(ys)
    )
    return list(torch.autograd.grad(total, list(wrt), allow_unused=True, **kwargs))


def model() -> opfuser.Sequential:
    """Compounds, a channel, a plain module and an operation of a user's."""
    return opfuser.Sequential(
        opfuser.Linear(3, 4, dtype=F64),
        opfuser.Residual(Square(), opfuser.Linear(4, 4, dtype=F64)),
        nn.Tanh(),
        opfuser.BasicLinear(4, 3, dtype=F64),
        Times(),
    )


def sigmoids() -> opfuser.Sequential:
    """Operations that save their input, their output, a weight."""
    return opfuser.Sequential(Times(), Square(), Times(), Sigmoid())


def plain_sigmoids(seq: opfuser.Sequential, x: Tensor) -> Tensor:
    return torch.sigmoid((x * seq[0].w) ** 2 * seq[2].w)


def run(seq: nn.Module, x: Tensor) -> list[Any]:
    """Output and gradients, also of all parameters."""
    y = seq(x)
    return [y.detach(), *grads(y, [x, *seq.parameters()])]


def ignore(*_: Any) -> None:
    """A hook that only looks on."""
