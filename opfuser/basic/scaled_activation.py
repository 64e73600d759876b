"""Activations whose output rows are scaled by an extra input, as in mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import InputError, NotSupportedError, OpKwargsError, explain
from ..kernels import scalar
from ..kernels.gated import Glu, GluArguments, gated_backward, gated_forward
from ..kernels.launch import runs
from ..op import BasicOperation, OperationContext, compute_dtype
from . import _gated_math as gated

__all__ = ["ScaledClampedQGeGLU", "ScaledSReLU", "ScaledSiTUGLU", "ScaledSwiGLU"]


class _ScaledActivation(BasicOperation):
    """``y = f(x) * scales[..., None]``: f element-wise, or a gated product.

    Input and scales are saved; the backward evaluates f again.
    """

    num_extra_inputs: int = 1

    class Saved(NamedTuple):
        input: Tensor
        scales: Tensor

    def __init__(
        self, function: scalar.ScalarFunction | Glu, activation_recompute_in_mlp: bool
    ) -> None:
        super().__init__()
        if activation_recompute_in_mlp:
            raise NotSupportedError(
                explain(
                    "There is no choice of recomputing: the output is never saved, and always "
                    "computed again in backward",
                    where=type(self).__name__,
                    received="activation_recompute_in_mlp=True",
                    remedy="Leave activation_recompute_in_mlp out",
                )
            )
        self.function = function
        self._arguments: GluArguments = (
            function.arguments if isinstance(function, Glu) else (*function.arguments, "", (), 0)
        )

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
        where = type(self).__name__
        if basic_op_kwargs[0]:
            raise OpKwargsError(
                explain(f"{where} takes no keywords", received=", ".join(basic_op_kwargs[0]))
            )
        scales = basic_op_extra_inputs[0][0]
        assert scales is not None
        self._check(input_, scales)
        dtype = compute_dtype(input_, self)
        x, scales = scalar.cast(input_, dtype), scalar.cast(scales, dtype)
        ctx = basic_op_ctxs[0]
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(x, scales))
        if runs(x):
            return gated_forward(x, *self._arguments, scales), [()]
        return self.function.value(x).mul_(scales.unsqueeze(-1)), [()]

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
        ctx = basic_op_ctxs[0]
        assert ctx.saved_tensors is not None
        x, scales = ctx.saved_tensors
        assert x is not None
        assert scales is not None
        needs_dx, needs_dscales = ctx.needs.input, ctx.needs.extra_inputs[0]
        dx = dscales = None
        if runs(x):
            if needs_dx or needs_dscales:
                grads = gated_backward(
                    grad_output, x, *self._arguments, scales, needs_dx, False, needs_dscales
                )
                dx, dscales = grads[0] if needs_dx else None, grads[-1] if needs_dscales else None
            return dx, [()], [(dscales,)]
        dy = scalar.cast(grad_output, x.dtype)
        if needs_dscales:
            h = scalar.cast(self.function.value(x), scalar.wide_dtype(x.dtype))
            dscales = h.mul_(dy).sum(-1)
        if needs_dx:
            dx = self.function.backward(dy * scales.unsqueeze(-1), x)
        return dx, [()], [(dscales,)]

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        (scales,) = extra_inputs
        return self.function.reference(input_) * scales.to(input_.dtype).unsqueeze(-1)

    def _check(self, input_: Tensor, scales: Tensor) -> None:
        where = type(self).__name__
        if isinstance(self.function, Glu):
            gated.check_glu_input(self.function, input_, where)
        if not input_.dim() or scales.shape != input_.shape[:-1]:
            raise InputError(
                explain(
                    "The scales must have the input's shape without its last dimension",
                    where=where,
                    received=f"input {tuple(input_.shape)}, scales {tuple(scales.shape)}",
                    remedy="Pass one scale per row",
                )
            )


class ScaledSwiGLU(_ScaledActivation):
    r"""Scaled SwiGLU: :math:`y_t = s_t \, a_t \sigma(a_t) b_t`, row :math:`x_t` split into [a, b].

    Extra input: the scales s, with a gradient of their own. Shapes: x ``(…, 2F)``, s ``(…)``,
    y ``(…, F)``. Input and scales are cast to the compute dtype (autocast's, else the input's),
    which is the output's.

    Args:
        glu_interleave_size: columns per block of gates or linear units, see :class:`SwiGLU`.
        activation_recompute_in_mlp: not supported.

    Raises:
        ArgumentError: if ``glu_interleave_size`` is not positive.
        InputError: in forward, if the last dimension does not divide into gates and linear units,
            the scales are not one per row, or the input is not fp16, bf16, fp32 or fp64.
        NotSupportedError: if ``activation_recompute_in_mlp`` is set.
        OpKwargsError: in forward, if it is given keywords.
    """

    def __init__(
        self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False
    ) -> None:
        super().__init__(
            gated.make_glu(scalar.Swish(), None, glu_interleave_size), activation_recompute_in_mlp
        )
        self.glu_interleave_size = glu_interleave_size


class ScaledSiTUGLU(_ScaledActivation):
    r"""Scaled SiTUGLU: its output rows times the extra input, one scale per row.

    The formula is that of :class:`SiTUGLU`; shapes, dtypes and errors are those of
    :class:`ScaledSwiGLU`.

    Args:
        glu_interleave_size: columns per block of gates or linear units, see :class:`SwiGLU`.
        activation_recompute_in_mlp: not supported.
        beta1: cap of the gate's linear factor, finite and positive.
        beta2: cap of the linear units, finite and positive.

    Raises:
        ArgumentError: if a cap is not finite and positive.
    """

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        beta1: float = 4.0,
        beta2: float = 25.0,
    ) -> None:
        super().__init__(
            gated.make_glu(*gated.situ(beta1, beta2), glu_interleave_size),
            activation_recompute_in_mlp,
        )
        self.glu_interleave_size = glu_interleave_size
        self.beta1 = beta1
        self.beta2 = beta2


class ScaledClampedQGeGLU(_ScaledActivation):
    r"""Scaled ClampedSwiGLU: its output rows times the extra input, one scale per row.

    The formula is that of :class:`ClampedSwiGLU`; shapes, dtypes and errors are those of
    :class:`ScaledSwiGLU`.

    Args:
        glu_interleave_size: columns per block of gates or linear units, see :class:`SwiGLU`.
        activation_recompute_in_mlp: not supported.
        limit: bound of the gates from above, and of the linear units on both sides.
        alpha: factor inside the sigmoid.
        glu_linear_offset: added to the clamped linear units.

    Raises:
        ArgumentError: if ``limit`` is not positive.
    """

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        functions = gated.clamped_swish(limit, alpha, glu_linear_offset)
        super().__init__(
            gated.make_glu(*functions, glu_interleave_size), activation_recompute_in_mlp
        )
        self.glu_interleave_size = glu_interleave_size
        self.limit = limit
        self.alpha = alpha
        self.glu_linear_offset = glu_linear_offset


class ScaledSReLU(_ScaledActivation):
    r"""Scaled squared ReLU: :math:`y_t = s_t \max(x_t, 0)^2`.

    Extra input: the scales s, with a gradient of their own. Shapes: x and y ``(…, F)``, s ``(…)``.
    Dtypes and errors as in :class:`ScaledSwiGLU`.

    Args:
        activation_recompute_in_mlp: not supported.
    """

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(scalar.SquaredRelu(), activation_recompute_in_mlp)
