"""A norm as the first part of a joint fusion that makes its output again in backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..basic._norms import as_rows, as_vector
from ..basic.add_extra_input import AddExtraInput
from ..basic.layer_norm import LayerNorm
from ..basic.make_extra_output import MakeExtraOutput
from ..basic.rms_norm import RMSNorm
from ..kernels.norm import layer_norm_forward, rms_norm_forward
from ..kernels.pointwise import Normed
from ..op import FusedOperation, FusibleOperation, OperationContext, autocast_dtype
from ._add_norm import ForwardAddNorm
from ._chain_part import ChainCall, ChainPart

__all__ = ["NormGrads", "NormPart", "PointwiseNorm"]

Contexts = list[OperationContext]
Extras = Sequence[Sequence[Tensor | None]]
Gradients = tuple[Tensor | None, ...]


class NormGrads(NamedTuple):
    """Gradients of the operations of a NormPart, and the norm's output again if it was wanted."""

    input: Tensor | None
    parameters: list[Gradients]
    extra_inputs: list[Gradients]
    output: Tensor | None


class NormPart:
    """A norm, and before it the sum with a residual and the tap of that sum, where they are.

    In place of the sum, any run of element-wise operations may come first. Saves what the norm
    saves, the sum among it, and what the run saves, but not the norm's output. Methods take the
    contexts of these operations, in forward order.
    """

    def __init__(
        self,
        add: AddExtraInput | None,
        make_extra: MakeExtraOutput | None,
        norm: RMSNorm | LayerNorm,
        *,
        chain: ChainPart | None = None,
    ) -> None:
        first = () if chain is None else chain.ops
        self.ops = (*first, *(op for op in (add, make_extra, norm) if op is not None))
        self.norm = norm
        self._chain = chain
        self._tap = None if make_extra is None else len(self.ops) - 2
        self._after_sum = None if add is None else ForwardAddNorm(add, make_extra, norm)

    def forward(self, ctxs: Contexts, x: Tensor, extra_inputs: Extras) -> tuple[Tensor, Extras]:
        """The norm's output, and the extra outputs."""
        if self._chain is not None:
            return self._forward_of_chain(self._chain, ctxs, x, extra_inputs)
        if self._after_sum is not None:
            return self._after_sum.fuser_forward(
                ctxs,
                x,
                basic_op_extra_inputs=extra_inputs,
                prev_op_grad_output_quantizer=None,
                next_op_input_quantizer=None,
                basic_op_kwargs=[{}] * len(ctxs),
            )
        y = self.norm.op_forward(
            ctxs[-1], x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None
        )
        return y, [()] if self._tap is None else [(x,), ()]

    def _forward_of_chain(
        self, chain: ChainPart, ctxs: Contexts, x: Tensor, extra_inputs: Extras
    ) -> tuple[Tensor, Extras]:
        ctx, first = ctxs[-1], ctxs[: len(chain.ops)]
        call = chain.prepare(first, x, extra_inputs)
        total: Tensor | None
        done = self._in_one_kernel(ctx, call, x)
        if done is not None:
            y, total, mean, rstd, kept = done
            if ctx.requires_grad:
                ctx.save_for_backward(*(t for t in (total, mean, rstd) if t is not None))
        else:
            total, kept = call.chain.forward(x, call.operands, call.dtypes)
            y = self.norm.op_forward(
                ctx, total, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None
            )
        chain.save(first, call, x, kept)
        extra_outputs: list[tuple[Tensor | None, ...]] = [()] * len(self.ops)
        if self._tap is not None:
            extra_outputs[self._tap] = (total,)
        return y, extra_outputs

    def _in_one_kernel(self, ctx: OperationContext, call: ChainCall, x: Tensor) -> Normed | None:
        """None where the norm casts its input, or its rows are not those of the chain."""
        norm = self.norm
        if x.shape[-1:] != norm.normalized_shape:
            return None
        if autocast_dtype(x.device) not in (None, *call.dtypes[-1:]):
            return None
        with_mean = isinstance(norm, LayerNorm)
        return call.chain.forward_norm(
            x,
            call.operands,
            call.dtypes,
            norm.weight,
            norm.bias if with_mean else None,
            *norm.frozen_settings(ctx),
            with_mean=with_mean,
            want_total=ctx.requires_grad or self._tap is not None,
        )

    def again(self, ctxs: Contexts) -> Tensor:
        """In backward, the norm's output."""
        ctx, norm = ctxs[-1], self.norm
        x: Tensor = ctx.saved_tensors[0]
        weight, bias = _parameters(ctx)
        rows, settings = as_rows(x, norm._cols), norm.frozen_settings(ctx)
        if isinstance(norm, RMSNorm):
            y: Tensor = rms_norm_forward(rows, weight, *settings)[0]
        else:
            y = layer_norm_forward(rows, weight, bias, *settings)[0]
        return y if rows is x else y.view_as(x)

    def wants_grad(self, ctxs: Contexts) -> bool:
        """Whether the gradient of the output is read."""
        needs = ctxs[-1].needs
        return needs.input or True in needs.parameters

    def backward(
        self, ctxs: Contexts, dy: Tensor | None, grad_extra_outputs: Extras, *, want_y: bool
    ) -> NormGrads:
        """One pass for all gradients, that of the tap added, and if wanted for the output again.

        Args:
            ctxs: contexts.
            dy: gradient of the output, its dimensions but the last maybe flattened to one; None
                where :meth:`wants_grad` says that it is not read, and nothing is made.
            grad_extra_outputs: gradients of the extra outputs, of which the tap's is one.
            want_y: whether to make the output again, in the shape of dy.
        """
        dx = y = None
        own: Gradients = (None,) * len(ctxs[-1].needs.parameters)
        if dy is not None:
            g = None if self._tap is None else grad_extra_outputs[self._tap][0]
            dx, own, y = self.norm.gradients(ctxs[-1], dy, g, want_y)
            x = ctxs[-1].saved_tensors[0]
            if dx is not None and dx.shape != x.shape:
                dx = dx.view_as(x)
        before: list[Gradients] = [()] * (len(self.ops) - 1)
        if self._chain is not None:
            n = len(self._chain.ops)
            grads = self._chain.backward(ctxs[:n], dx)
            before = before[n:]
            extras = [*grads.extra_inputs, *before, ()]
            return NormGrads(grads.input, [*grads.parameters, *before, own], extras, y)
        extra_inputs = [() if self._after_sum is None else (dx,), *before]
        return NormGrads(dx, [*before, own], extra_inputs, y)


def _parameters(ctx: OperationContext) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a norm as forward saw them, in one dimension."""
    parameters = ctx.parameters
    bias = as_vector(parameters[1]) if len(parameters) > 1 else None
    return as_vector(parameters[0]), bias


class PointwiseNorm(FusedOperation):
    r"""A run of element-wise operations, MakeExtraOutput, and RMSNorm or LayerNorm.

    .. math:: s = f(x), \quad y = \mathrm{norm}(s)

    f is what :class:`PointwiseChain` takes, such as bias, dropout and the sum with a residual; its
    output s may be published. Forward is one kernel: it moves 3A, and A per extra input of the run,
    for A elements, and A less where s is neither published nor saved. Backward is two, that of the
    norm, which adds the gradient of the published s, and that of the run.

    Saves s and the norm's statistics, one or two per row, and what PointwiseChain saves.

    Where the norm is over several dimensions, casts under autocast, or has rows of more than
    32 KiB, the run and the norm are kernels of their own, as they are without one on a CPU.

    Kernel: opfuser's own. ATen has none that does anything before a norm.

    Args:
        before: the run, in forward order.
        norm: the norm.
        make_extra: what publishes s, or None.

    Raises:
        NotSupportedError: an operation of the run is not element-wise, or there are too many that
            have a tensor.
        InputError: in forward, as in the operations that it replaces.

    Attributes:
        part: what runs.
        planned: whether a plan put it there, and not the user by hand.
    """

    planned: bool = False

    def __init__(
        self,
        *,
        before: Sequence[FusibleOperation],
        norm: RMSNorm | LayerNorm,
        make_extra: MakeExtraOutput | None = None,
    ) -> None:
        chain = ChainPart(before, type(self).__name__)
        part = NormPart(None, make_extra, norm, chain=chain)
        super().__init__(part.ops)
        self.part = part

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor | None]],
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[Tensor, Sequence[Sequence[Tensor | None]]]:
        return self.part.forward(basic_op_ctxs, input_, basic_op_extra_inputs)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Sequence[Tensor | None]],
    ) -> tuple[
        Tensor | None,
        Sequence[Sequence[Tensor | None] | None],
        Sequence[Sequence[Tensor | None] | None],
    ]:
        dy = grad_output if self.part.wants_grad(basic_op_ctxs) else None
        grads = self.part.backward(basic_op_ctxs, dy, basic_op_grad_extra_outputs, want_y=False)
        return grads.input, grads.parameters, grads.extra_inputs
