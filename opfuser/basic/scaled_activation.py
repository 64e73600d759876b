"""Activations whose output rows are scaled by an extra input, as in mixtures of experts."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..core.buffer_reuse import only_reference
from ..core.context import BackwardResult, Contexts, Extras, ForwardArguments, ForwardResult
from ..errors import ArgumentError, InputError
from ..kernels import functions
from ..kernels.capped_functions import SoftCappedSquaredRelu
from ..kernels.gated import gated_backward, gated_backward_, gated_forward
from ..kernels.gated_plain import GatedGrads, Glu, ProductSpec, product_spec
from ..kernels.scalar import ScalarFunction, cast
from ..op import BasicOperation, Dtypes, OperationContext, compute_dtype
from . import _gated_math as gated
from ._numbers import is_one_of

__all__ = [
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "ScaledTanhSReLU",
]


class _ScaledActivation(BasicOperation):
    """``y = f(x) * scales[..., None]``: f element-wise, or a gated product.

    Input and scales are saved, never the output: the backward evaluates f again, whatever
    ``activation_recompute_in_mlp`` says.
    """

    kernels = ("Triton gated",)
    num_extra_inputs: int = 1
    takes_keywords = False

    class Saved(NamedTuple):
        input: Tensor
        scales: Tensor

    class Settings(NamedTuple):
        product: ProductSpec

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        self.activation_recompute_in_mlp = activation_recompute_in_mlp

    def make_function(self) -> ScalarFunction | Glu:
        """The function f, with the attributes of now as its constants."""
        raise NotImplementedError

    def make_settings(self) -> _ScaledActivation.Settings:
        return self.Settings(product_spec(self.make_function()))

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return dtypes.compute

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        scales = given["basic_op_extra_inputs"][0][0]
        assert scales is not None
        ctx = basic_op_ctxs[0]
        (product,) = self.frozen_settings(ctx)
        self._check(product.function, input_, scales)
        dtype = compute_dtype(input_, self)
        if ctx.requires_grad:
            ctx.scales_like = scales.shape, scales.dtype
        x, scales = cast(input_, dtype), cast(scales.reshape(input_.shape[:-1]), dtype)
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(x, scales))
        return gated_forward(x, product, scales), [()]

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        ctx = basic_op_ctxs[0]
        if not (ctx.needs.input or ctx.needs.extra_inputs[0]):
            return None, [()], [(None,)]
        over_input = only_reference(ctx.saved_tensors)
        grads = self.gradients(ctx, grad_output, over_input=over_input)
        return grads.dx, [()], [(grads.dscales,)]

    def gradients(
        self,
        ctx: OperationContext,
        dy: Tensor,
        *,
        want_output: bool = False,
        over_input: bool = False,
    ) -> GatedGrads:
        """The gradients as far as they are needed, and the output if it is wanted.

        Args:
            want_output: whether to recompute the output along with the gradients.
            over_input: whether dx may overwrite the input that was saved.
        """
        (product,) = self.frozen_settings(ctx)
        x, scales = ctx.saved_tensors
        if scales is None:  # their own gradient does not depend on them
            scales = x.new_ones(x.shape[:-1])
        needs_dx, (needs_ds,) = ctx.needs.input, ctx.needs.extra_inputs
        if over_input and needs_dx:
            grads = gated_backward_(dy, x, product, scales, want_output, needs_ds)
        else:
            grads = gated_backward(dy, x, product, scales, needs_dx, want_output, needs_ds)
        if grads.dscales is None:
            return grads
        shape, dtype = ctx.scales_like
        return grads._replace(dscales=cast(grads.dscales, dtype).view(shape))

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        (scales,) = extra_inputs
        scales = scales.to(input_.dtype).reshape(*input_.shape[:-1], 1)
        return self.make_function().reference(input_) * scales

    def _check(self, function: ScalarFunction | Glu, input_: Tensor, scales: Tensor) -> None:
        where = type(self).__name__
        if isinstance(function, Glu):
            gated.check_glu_input(function, input_, where)
        leading = input_.shape[:-1]
        if not input_.dim() or not is_one_of(scales.shape, leading, (*leading, 1)):
            raise InputError.explained(
                "The scales must have the input's shape without its last dimension, or with "
                "1 in its place",
                where=where,
                received=f"input {tuple(input_.shape)}, scales {tuple(scales.shape)}",
                remedy="Pass one scale per row",
            )


class ScaledSwiGLU(_ScaledActivation):
    r"""Scaled SwiGLU: :math:`y_t = s_t \, a_t \sigma(a_t) b_t`, row :math:`x_t` split into [a, b].

    Extra input: the scales s, which have a gradient. Shapes: x ``(…, 2F)``, s ``(…)`` or ``(…,
    1)``, y ``(…, F)``. Input and scales are cast to the compute dtype (autocast's, else the
    input's), which is the output's.

    Args:
        glu_interleave_size: columns per block of gates or linear units, see :class:`SwiGLU`.
        activation_recompute_in_mlp: has no effect. In te.ops, it recomputes the output in the
            backward of a fused MLP instead of saving it; opfuser always does so.

    Raises:
        ArgumentError: if ``glu_interleave_size`` is not positive.
        InputError: in forward, if the last dimension does not divide into gates and linear units,
            the scales are not one per row, or the input is not fp16, bf16, fp32 or fp64.
        OpKwargsError: in forward, if keywords are passed.
    """

    def __init__(
        self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False
    ) -> None:
        super().__init__(activation_recompute_in_mlp=activation_recompute_in_mlp)
        self.glu_interleave_size = glu_interleave_size
        self.make_settings()

    def make_function(self) -> Glu:
        return gated.make_glu((functions.Swish(), None), self.glu_interleave_size)


class ScaledSiTUGLU(_ScaledActivation):
    r"""SiTUGLU with scaled rows: the extra input has one scale per output row.

    The formula is that of :class:`SiTUGLU`; shapes, dtypes and errors are those of
    :class:`ScaledSwiGLU`.

    Args:
        glu_interleave_size: columns per block of gates or linear units, see :class:`SwiGLU`.
        activation_recompute_in_mlp: see :class:`ScaledSwiGLU`.
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
        super().__init__(activation_recompute_in_mlp=activation_recompute_in_mlp)
        self.glu_interleave_size = glu_interleave_size
        self.beta1 = beta1
        self.beta2 = beta2
        self.make_settings()

    def make_function(self) -> Glu:
        return gated.make_glu(gated.situ(self.beta1, self.beta2), self.glu_interleave_size)


class ScaledClampedQGeGLU(_ScaledActivation):
    r"""ClampedSwiGLU with scaled rows: the extra input has one scale per output row.

    The formula is that of :class:`ClampedSwiGLU`; shapes, dtypes and errors are those of
    :class:`ScaledSwiGLU`.

    Args:
        glu_interleave_size: columns per block of gates or linear units, see :class:`SwiGLU`.
        activation_recompute_in_mlp: see :class:`ScaledSwiGLU`.
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
        super().__init__(activation_recompute_in_mlp=activation_recompute_in_mlp)
        self.glu_interleave_size = glu_interleave_size
        self.limit = limit
        self.alpha = alpha
        self.glu_linear_offset = glu_linear_offset
        self.make_settings()

    def make_function(self) -> Glu:
        functions = gated.clamped_swish(self.limit, self.alpha, self.glu_linear_offset)
        return gated.make_glu(functions, self.glu_interleave_size)


class ScaledSReLU(_ScaledActivation):
    r"""Scaled squared ReLU: :math:`y_t = s_t \max(x_t, 0)^2`.

    Extra input: the scales s, which have a gradient. Shapes: x and y ``(…, F)``, s ``(…)``. Dtypes
    and errors as in :class:`ScaledSwiGLU`.

    Args:
        activation_recompute_in_mlp: see :class:`ScaledSwiGLU`.
    """

    def make_function(self) -> ScalarFunction:
        return functions.SquaredRelu()


class ScaledTanhSReLU(_ScaledActivation):
    r"""Scaled squared ReLU with a soft cap: :math:`y_t = s_t (c \tanh(\max(x_t, 0) / c))^2`.

    Without the scales, y is about :math:`x^2` for small positive x, and stays below :math:`c^2`.
    Extra input, shapes, dtypes and errors are those of :class:`ScaledSReLU`.

    Args:
        tanh_clamp_scale: the cap c, finite and positive.
        activation_recompute_in_mlp: see :class:`ScaledSwiGLU`.

    Raises:
        ArgumentError: if ``tanh_clamp_scale`` is not finite and positive.
    """

    def __init__(
        self, *, tanh_clamp_scale: float, activation_recompute_in_mlp: bool = False
    ) -> None:
        super().__init__(activation_recompute_in_mlp=activation_recompute_in_mlp)
        self.tanh_clamp_scale = tanh_clamp_scale
        self.make_settings()

    def make_function(self) -> ScalarFunction:
        cap = self.tanh_clamp_scale
        if not 0 < cap < math.inf:
            raise ArgumentError.explained(
                "tanh_clamp_scale must be finite and positive",
                where=type(self).__name__,
                received=f"tanh_clamp_scale={cap}",
                remedy="Use ScaledSReLU for no cap",
            )
        return SoftCappedSquaredRelu(cap)
