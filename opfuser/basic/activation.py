"""Element-wise activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ArgumentError
from ..kernels import functions
from ..kernels.activation import activation_dx, activation_forward
from ..kernels.scalar import FunctionSpec, ScalarFunction, grad_input, reuse, rounded_once
from ..op import BasicOperation, Dtypes, OperationContext, OperationGrads, in_compute_dtype

_aten = torch.ops.aten


class _Activation(BasicOperation):
    """Applies ``function`` to each element.

    Only the input is saved: the backward evaluates the function again.

    Attributes:
        cache_quantized_input: whether forward saves the input as codes, see :class:`GELU`.
        recompute_mlp: set it to ask the fusion of that name for the feed-forward block around it.
    """

    kernels = ("Triton activation",)
    recompute_mlp: bool = False

    class Saved(NamedTuple):
        input: Tensor

    class Settings(NamedTuple):
        function: FunctionSpec

    _function: ClassVar[ScalarFunction]

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input

    def make_function(self) -> ScalarFunction:
        """The function that is applied, with the attributes of now as its constants."""
        return self._function

    def make_settings(self) -> _Activation.Settings:
        return self.Settings(self.make_function().spec)

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
        x = in_compute_dtype(input_, self)
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(x))
        (function,) = self.frozen_settings(ctx)
        return activation_forward(x, function, None)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        if not ctx.needs.input:
            return None, ()
        (x,) = ctx.saved_tensors
        (function,) = self.frozen_settings(ctx)
        return activation_dx(grad_output, x, function), ()

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return self.make_function().reference(input_)


class GELU(_Activation):
    r"""Gaussian error linear unit: :math:`y = x \Phi(x)`, or its approximation by tanh.

    The approximation, which is the default, is
    :math:`y = \frac{x}{2} (1 + \tanh(\sqrt{2 / \pi} (x + 0.044715 x^3)))`. Any shape; the output
    has the compute dtype (autocast's, else the input's).

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", 2016, arXiv 1606.08415.

    Args:
        approximate: ``"tanh"``, or ``"none"`` for the exact function.
        cache_quantized_input: in a region, save x for backward as FP8 codes if this operation is
            fused with a quantized linear operation after it, as ``save_activations="fp8"`` of a
            recipe does; backward computes from the codes' values, forward from x. C must be a
            multiple of 128, because 128 columns of a row share a scale. The plan lists what is
            saved this way; otherwise there is no effect.

    Raises:
        ArgumentError: if ``approximate`` is neither.
        InputError: in forward, if x is not fp16, bf16, fp32 or fp64.
    """

    def __init__(self, approximate: str = "tanh", *, cache_quantized_input: bool = False) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.approximate = approximate
        self.make_settings()

    def make_function(self) -> ScalarFunction:
        approximate = self.approximate
        if approximate not in ("tanh", "none"):
            raise ArgumentError.explained(
                "approximate must be 'tanh' or 'none'", where="GELU", received=repr(approximate)
            )
        return functions.GeluTanh() if approximate == "tanh" else functions.GeluErf()

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class QGELU(_Activation):
    r"""Quick GELU: :math:`y = x \sigma(1.702 x)`.

    Any shape; the output has the compute dtype (autocast's, else the input's). Errors are
    those of :class:`GELU`.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", 2016, arXiv 1606.08415.

    Args:
        cache_quantized_input: see :class:`GELU`.
    """

    _function = functions.Swish(1.702)


class ReLU(_Activation):
    r"""Rectified linear unit: :math:`y = \max(x, 0)`, with derivative 0 at 0.

    Any shape; the output has the compute dtype (autocast's, else the input's). Errors are
    those of :class:`GELU`.

    Args:
        cache_quantized_input: see :class:`GELU`.
    """

    _function = functions.Relu()


class SReLU(_Activation):
    r"""Squared rectified linear unit: :math:`y = \max(x, 0)^2`.

    Any shape; the output has the compute dtype (autocast's, else the input's). Errors are
    those of :class:`GELU`.

    Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021,
    arXiv 2109.08668.

    Args:
        cache_quantized_input: see :class:`GELU`.
    """

    _function = functions.SquaredRelu()


class SiLU(_Activation):
    r"""Sigmoid linear unit, also called swish: :math:`y = x \sigma(x)`.

    Any shape; the output has the compute dtype (autocast's, else the input's). Errors are
    those of :class:`GELU`.

    Source: Elfwing et al., "Sigmoid-Weighted Linear Units for Neural Network Function
    Approximation in Reinforcement Learning", 2017, arXiv 1702.03118.

    Args:
        cache_quantized_input: see :class:`GELU`.
    """

    _function = functions.Swish()


@dataclass(frozen=True)
class _SoftplusFunction(ScalarFunction):
    """``log(1 + e^(βx)) / β``, and x where ``βx > threshold``."""

    name = "softplus"

    beta: float = 1.0
    threshold: float = 20.0

    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is None:
            return F.softplus(x, self.beta, self.threshold)
        y: Tensor = _aten.softplus.out(x, self.beta, self.threshold, out=out)
        return y

    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return grad_input(_aten.softplus_backward, dy, x, self.beta, self.threshold, out=out)

    def reference(self, x: Tensor) -> Tensor:
        z = self.beta * x
        return torch.where(z > self.threshold, x, torch.logaddexp(z, z.new_zeros(())) / self.beta)


class Softplus(_Activation):
    r"""Smooth ReLU: :math:`y = \log(1 + e^{\beta x}) / \beta`, or x above a threshold.

    y is x where ``beta * x > threshold``. Any shape; the output has the compute dtype (autocast's,
    else the input's). Errors are those of :class:`GELU`.

    Args:
        beta: sharpness.
        threshold: value of ``beta * x`` beyond which y is x.
        cache_quantized_input: see :class:`GELU`.

    Raises:
        ArgumentError: if ``beta`` is zero.
    """

    def __init__(
        self, beta: float = 1.0, threshold: float = 20.0, *, cache_quantized_input: bool = False
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.beta = beta
        self.threshold = threshold
        self.make_settings()

    def make_function(self) -> ScalarFunction:
        if self.beta == 0:
            raise ArgumentError.explained(
                "beta must not be zero", where="Softplus", received=f"beta={self.beta}"
            )
        return _SoftplusFunction(self.beta, self.threshold)

    def extra_repr(self) -> str:
        return f"beta={self.beta}, threshold={self.threshold}"


class _TanhFunction(ScalarFunction):
    """``tanh(x)``."""

    name = "tanh"

    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.tanh(x, out=out)

    @rounded_once
    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        t = torch.tanh(x)
        return grad_input(_aten.tanh_backward, dy, t, out=reuse(t) if out is None else out)

    def reference(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Tanh(_Activation):
    r"""Hyperbolic tangent: :math:`y = \tanh(x)`.

    Any shape; the output has the compute dtype (autocast's, else the input's). Errors are
    those of :class:`GELU`.

    Args:
        cache_quantized_input: see :class:`GELU`.
    """

    _function = _TanhFunction()


class Sigmoid(_Activation):
    r"""Logistic function: :math:`y = \sigma(x) = 1 / (1 + e^{-x})`.

    Any shape; the output has the compute dtype (autocast's, else the input's). Errors are
    those of :class:`GELU`.

    Args:
        cache_quantized_input: see :class:`GELU`.
    """

    _function = functions.Sigmoid()


ACTIVATIONS = tuple(_Activation.__subclasses__())
"""The operations of this module: what fusions of activations take, but no subclass of a user."""
