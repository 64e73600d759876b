"""Gated linear units: one half of the last dimension gates the other."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..kernels import functions
from ..kernels.gated import gated_backward, gated_forward
from ..kernels.gated_plain import ProductSpec, product_spec
from ..op import BasicOperation, Dtypes, OperationContext, OperationGrads, in_compute_dtype
from . import _gated_math as gated


class _GatedActivation(BasicOperation):
    """Applies a gated product to the two parts of the last dimension.

    Only the input is saved: the backward evaluates the functions again.

    Attributes:
        cache_quantized_input: whether forward saves the input as codes, see :class:`GLU`.
        recompute_mlp: set it to ask the fusion of that name for the feed-forward block around it.
        glu_interleave_size: columns per block of gates or linear units; None for the layout in
            halves, the only one of those whose constructor does not take it.
    """

    kernels = ("Triton gated",)
    read_only: ClassVar[frozenset[str]] = frozenset({"glu_interleave_size"})
    recompute_mlp: bool = False
    _functions: ClassVar[gated.Functions]

    class Saved(NamedTuple):
        input: Tensor

    class Settings(NamedTuple):
        product: ProductSpec

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input
        self.glu_interleave_size: int | None = None

    def make_functions(self) -> gated.Functions:
        """Functions of gates and linear units, with the present attributes as their constants."""
        return self._functions

    def make_settings(self) -> _GatedActivation.Settings:
        product = gated.make_glu(self.make_functions(), self.glu_interleave_size)
        return self.Settings(product_spec(product))

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return dtypes.compute

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        (product,) = self.frozen_settings(ctx)
        gated.check_glu_input(product.function, input_, type(self).__name__)
        x = in_compute_dtype(input_, self)
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(x))
        return gated_forward(x, product, None)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        if not ctx.needs.input:
            return None, ()
        (x,) = ctx.saved_tensors
        (product,) = self.frozen_settings(ctx)
        return gated_backward(grad_output, x, product, None, True, False).dx, ()

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return self.make_settings().product.function.reference(input_)


class GLU(_GatedActivation):
    r"""Gated linear unit: :math:`y = \sigma(a) b`, x split into [a, b] along the last dimension.

    The gate is the first half (``torch.nn.GLU`` gates by the second). Shapes: x ``(…, 2F)``,
    y ``(…, F)``; the output has the compute dtype (autocast's, else the input's).

    Source: Dauphin et al., "Language Modeling with Gated Convolutional Networks", 2016,
    arXiv 1612.08083.

    Args:
        cache_quantized_input: in a region, save x for backward as FP8 codes if this operation is
            fused with a quantized linear operation after it, as ``save_activations="fp8"`` of a
            recipe does; backward computes from the codes' values, forward from x. F must be a
            multiple of 128, and so must an interleave size, because 128 columns of a row share a
            scale. The plan lists what is saved this way; otherwise there is no effect.

    Raises:
        InputError: in forward, if the last dimension is odd.
    """

    _functions = functions.Sigmoid(), None


class GEGLU(_GatedActivation):
    r"""GELU-gated linear unit: :math:`y = \mathrm{GELU}(a) b`, with GELU approximated by tanh.

    Shapes, layout and dtypes as in :class:`GLU`.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, arXiv 2002.05202.

    Args:
        cache_quantized_input: see :class:`GLU`.

    Raises:
        InputError: in forward, if the last dimension is odd.
    """

    _functions = functions.GeluTanh(), None


class QGEGLU(_GatedActivation):
    r"""Gated linear unit with quick GELU: :math:`y = a \sigma(1.702 a) b`.

    Shapes, layout and dtypes as in :class:`GLU`.

    Args:
        cache_quantized_input: see :class:`GLU`.

    Raises:
        InputError: in forward, if the last dimension is odd.
    """

    _functions = functions.Swish(1.702), None


class ReGLU(_GatedActivation):
    r"""ReLU-gated linear unit: :math:`y = \max(a, 0) b`.

    Shapes, layout and dtypes as in :class:`GLU`.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, arXiv 2002.05202.

    Args:
        cache_quantized_input: see :class:`GLU`.

    Raises:
        InputError: in forward, if the last dimension is odd.
    """

    _functions = functions.Relu(), None


class SReGLU(_GatedActivation):
    r"""Gated linear unit with squared ReLU: :math:`y = \max(a, 0)^2 b`.

    Shapes, layout and dtypes as in :class:`GLU`.

    Args:
        cache_quantized_input: see :class:`GLU`.

    Raises:
        InputError: in forward, if the last dimension is odd.
    """

    _functions = functions.SquaredRelu(), None


class SwiGLU(_GatedActivation):
    r"""SiLU-gated linear unit: :math:`y = a \sigma(a) b`, x split into [a, b].

    The gate is the first half. With ``glu_interleave_size=n``, gates and linear units alternate
    in blocks of n columns instead: for n = 2, ``[a1, a2, b1, b2, a3, a4, b3, b4]``. Shapes and
    dtypes as in :class:`GLU`.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, arXiv 2002.05202.

    Args:
        cache_quantized_input: see :class:`GLU`.
        glu_interleave_size: columns per block; None means two halves.

    Raises:
        ArgumentError: if ``glu_interleave_size`` is not positive.
        InputError: in forward, if the last dimension does not divide into gates and linear units.
    """

    read_only: ClassVar[frozenset[str]] = frozenset()
    _functions = functions.Swish(), None

    def __init__(
        self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.glu_interleave_size = glu_interleave_size
        self.make_settings()


class SiTUGLU(_GatedActivation):
    r"""SwiGLU with soft caps: :math:`y = c_1(a) \sigma(a) c_2(b)`.

    The caps are :math:`c_i(x) = \beta_i \tanh(x / \beta_i)`. Shapes, layouts and dtypes as in
    :class:`SwiGLU`.

    Source: Moonshot AI, "Kimi K3" technical report.

    Args:
        beta1: cap of the gate's linear factor, finite and positive.
        beta2: cap of the linear units, finite and positive.
        cache_quantized_input: see :class:`GLU`.
        glu_interleave_size: columns per block; None means two halves.

    Raises:
        ArgumentError: if a cap is not finite and positive, or ``glu_interleave_size`` not positive.
        InputError: in forward, if the last dimension does not divide into gates and linear units.
    """

    read_only: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.glu_interleave_size = glu_interleave_size
        self.beta1 = beta1
        self.beta2 = beta2
        self.make_settings()

    def make_functions(self) -> gated.Functions:
        return gated.situ(self.beta1, self.beta2)


class ClampedSwiGLU(_GatedActivation):
    r"""SwiGLU with clamped inputs: :math:`y = a' \sigma(\alpha a') (b' + \mathrm{offset})`.

    Here :math:`a' = \min(a, \mathrm{limit})` and b' is b clamped to ±limit. The gradient is zero
    beyond the limits; at the limits it is that of ``torch.clamp``: 1 up to torch 2.13, 0 from 2.14
    on. Shapes, layouts and dtypes as in :class:`SwiGLU`.

    Source: OpenAI, gpt-oss, ``gpt_oss/torch/model.py``, which interleaves gates and linear units.

    Args:
        limit: bound of the gates from above, and of the linear units on both sides.
        alpha: factor inside the sigmoid.
        glu_linear_offset: added to the clamped linear units.
        cache_quantized_input: see :class:`GLU`.
        glu_interleave_size: columns per block; None means two halves.

    Raises:
        ArgumentError: if ``limit`` or ``glu_interleave_size`` is not positive.
        InputError: in forward, if the last dimension does not divide into gates and linear units.
    """

    read_only: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.glu_interleave_size = glu_interleave_size
        self.limit = limit
        self.alpha = alpha
        self.glu_linear_offset = glu_linear_offset
        self.make_settings()

    def make_functions(self) -> gated.Functions:
        return gated.clamped_swish(self.limit, self.alpha, self.glu_linear_offset)


GATED_ACTIVATIONS = tuple(_GatedActivation.__subclasses__())
"""The operations of this module: what fusions of activations take, but no subclass of a user."""
