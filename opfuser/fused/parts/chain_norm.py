"""A chain of element-wise operations and the norm behind it as a part of a joint fusion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from ...basic.make_extra_output import MakeExtraOutput
from ...basic.norm import Norm
from ...core.context import Contexts, Extras
from ...kernels.pointwise import Normed
from ...op import FusibleOperation, OperationContext, autocast_dtype
from ...quantization.quantizers import Quantizer
from .chain import ChainCall, ChainPart
from .norm import NormPart
from .part import PLAIN, Part, PartGrads, Wanted, no_gradients


class ChainNormPart(Part):
    """A chain of element-wise operations, an optional MakeExtraOutput of its result, and a norm.

    Forward is one kernel if chain and norm have the same rows. Saves what chain and norm save, but
    not the norm's output.

    Args:
        make_extra: what publishes the result of the chain, or None.

    Raises:
        NotSupportedError: as :class:`ChainPart`.
    """

    keeps_input: ClassVar[bool] = True

    def __init__(
        self,
        before: Sequence[FusibleOperation],
        make_extra: MakeExtraOutput | None,
        norm: Norm,
        where: str,
    ) -> None:
        self._chain = ChainPart(before, where)
        self._norm = NormPart(None, make_extra, norm)
        self._count = len(self._chain.ops)
        self.ops = (*self._chain.ops, *self._norm.ops)
        self.emits_quantized = self._norm.emits_quantized

    def forward(
        self, ctxs: Contexts, x: Any, extras: Extras, save_input: bool, quantizer: Quantizer | None
    ) -> tuple[Tensor, Extras]:
        first, ctx, norm = ctxs[: self._count], ctxs[-1], self._norm.norm
        call = self._chain.prepare(first, x, extras)
        total: Tensor | None
        # The kernel of both makes no codes; the norm's own, from the sum, moves less than a tensor
        # in between.
        done = None if quantizer is not None else self._in_one_kernel(ctx, call, x)
        if done is not None:
            y, total, mean, rstd, kept = done
            if ctx.requires_grad:
                assert total is not None
                norm.save(ctx, total, mean, rstd)
        else:
            total, kept = call.chain.forward(x, call.operands, call.dtypes)
            y = norm.op_forward(
                ctx, total, prev_op_grad_output_quantizer=None, next_op_input_quantizer=quantizer
            )
            norm.save_amax(ctx, y)
        self._chain.save(first, call, x, kept)
        return y, [*[()] * self._count, *self._norm.extra_outputs(total)]

    def _in_one_kernel(self, ctx: OperationContext, call: ChainCall, x: Tensor) -> Normed | None:
        """The results of chain and norm; None if the norm casts its input or has other rows."""
        norm = self._norm.norm
        if x.shape[-1:] != norm.normalized_shape:
            return None
        if autocast_dtype(x.device) not in (None, *call.dtypes[-1:]):
            return None
        return call.chain.forward_norm(
            x,
            call.operands,
            call.dtypes,
            *norm.weight_and_bias(),
            *norm.frozen_settings(ctx),
            with_mean=norm.with_mean,
            want_total=ctx.requires_grad or self._norm.tap is not None,
        )

    def hold(self, ctxs: Contexts) -> None:
        self._norm.hold(ctxs[self._count :])

    def recompute(self, ctxs: Contexts, x: Tensor | None) -> Tensor:
        return self._norm.recompute(ctxs[self._count :], None)

    def backward(
        self, ctxs: Contexts, dy: Tensor, x: Tensor | None, grad_extras: Extras, wanted: Wanted
    ) -> PartGrads:
        n = self._count
        norm = self._norm.backward(ctxs[n:], dy, None, grad_extras[n:], wanted)
        if norm.input is None:
            chain = no_gradients(ctxs[:n])
        else:
            assert isinstance(norm.input, Tensor)
            given = grad_extras[:n]
            chain = self._chain.backward(ctxs[:n], norm.input, None, given, PLAIN)
        return PartGrads(
            chain.input,
            [*chain.parameters, *norm.parameters],
            [*chain.extra_inputs, *norm.extra_inputs],
            norm.output,
        )
