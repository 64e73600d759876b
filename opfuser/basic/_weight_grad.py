"""Gradients of weights, and where they go: autograd, ``grad``, or Megatron-LM's ``main_grad``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from .. import gemm
from .. import torch_internals as internals
from ..core.context import OperationContext
from ..errors import ArgumentError, NotSupportedError
from ..gemm.scaled import Accumulation, scaled_wgrad
from ..kernels.quantize import Codes
from ..kernels.scalar import cast
from ..quantization.weights import is_fp8
from ..runtime.recording import assume, callers_stream, is_recording, refuse_watching, repeat
from ._autograd_state import (
    Destination,
    backward_pass,
    current_node,
    destination,
    is_first_write,
    note_forward,
)


class Product(NamedTuple):
    """The gradient ``s dyᵀ x`` of a weight (N, K), for the GEMM that computes it where it goes.

    Attributes:
        dy: gradient of the output, (..., N).
        x: input, (..., K).
        scale: s; None is one.
    """

    dy: gemm.Operand
    x: gemm.Operand
    scale: float | None

    def value(self) -> Tensor:
        """The gradient, in x's dtype."""
        return gemm.wgrad(self.dy, self.x, scale=self.scale)

    def write(self, out: Tensor, *, accumulate: bool) -> None:
        """Adds it to ``out``, or writes it there."""
        gemm.wgrad_into(out, self.dy, self.x, accumulate=accumulate, scale=self.scale)

    def transposed(self) -> Product:
        """The product for a weight that is stored as its transpose: ``s xᵀ dy``, in x's dtype."""
        return Product(self.x, cast(self.dy, self.x.dtype), self.scale)


class Computed(NamedTuple):
    """The gradient of a weight, where it exists before it is known where it goes."""

    dw: Tensor

    def value(self) -> Tensor:
        """The gradient."""
        return self.dw

    def write(self, out: Tensor, *, accumulate: bool) -> None:
        """Adds it to ``out``, or writes it there."""
        out.add_(self.dw) if accumulate else out.copy_(self.dw)

    def transposed(self) -> Computed:
        """The product for a weight that is stored as its transpose."""
        return Computed(self.dw.t())


class ScaledProduct(NamedTuple):
    """The gradient ``dyᵀ x`` of a weight (N, K), from fp8 codes.

    No GEMM of torch 2.11 to 2.13 adds a product of fp8 codes to a matrix, so that it never exists
    but in memory of its own.

    Attributes:
        dy: gradient of the output, (rows, N), by columns.
        x: input, (rows, K), by columns.
        how: how it is computed; the dtype is that of the gradient for autograd.
    """

    dy: Codes
    x: Codes
    how: Accumulation

    def value(self) -> Tensor:
        """The gradient."""
        return scaled_wgrad(self.dy, self.x, self.how)

    def write(self, out: Tensor, *, accumulate: bool) -> None:
        """Adds it to ``out``, or writes it there, rounded once."""
        how = self.how._replace(dtype=torch.float32)
        Computed(scaled_wgrad(self.dy, self.x, how)).write(out, accumulate=accumulate)

    def transposed(self) -> Computed:
        """The product for a weight that is stored as its transpose."""
        return Computed(self.value().t())


WeightGradient: TypeAlias = Product | Computed | ScaledProduct


def refuse_both(accumulate_into_main_grad: bool, accumulate_into_grad: bool, where: str) -> None:
    """Raises ArgumentError if both are true."""
    if accumulate_into_main_grad and accumulate_into_grad:
        raise ArgumentError.explained(
            "A weight's gradient is accumulated in one place",
            where=where,
            received="accumulate_into_main_grad=True, accumulate_into_grad=True",
            remedy="Leave one of them False",
        )


def keep_weights(ctx: OperationContext, weights: Sequence[Tensor]) -> None:
    """In forward, keeps the objects whose ``main_grad`` or ``grad`` take the gradients.

    They are not saved: unpacking a saved tensor may give another object, without the attribute.
    """
    if ctx.traced:
        return
    refuse_watching("gradients go to where the weights of the call keep them")
    repeat(note_forward)
    if ctx.requires_grad:
        ctx.grad_weights = weights


def kept_weights(ctx: OperationContext | None) -> Sequence[nn.Parameter]:
    """In backward, the weights of :func:`keep_weights`; none where they are not known.

    So it is without a context, where a forward fusion of the user's filled it in, and in calls that
    were traced.
    """
    weights: Sequence[nn.Parameter] = getattr(ctx, "grad_weights", ())
    return weights


def main_grad_buffer(
    param: nn.Parameter, where: str, number: int | None = None
) -> tuple[Tensor, bool]:
    """The buffer for the gradient of ``param``, in its shape, and whether to add to what it holds.

    That is written over, with ``param.overwrite_main_grad``, by the first gradient of a backward
    pass alone: those of other uses of ``param`` add to it. To be called right before writing.

    Args:
        number: the backward pass that the gradient belongs to; None is the one under way.

    Raises:
        ArgumentError: ``param.main_grad`` is missing or cannot be seen in the shape of ``param``.
    """
    changing = hasattr(param, "__fsdp_param__") or getattr(param, "overwrite_main_grad", False)
    if changing and is_recording():
        raise NotSupportedError.explained(
            "A main_grad that is handed out on request or overwritten is not recorded", where=where
        )
    if hasattr(param, "__fsdp_param__"):  # Megatron-FSDP hands out the buffer on request
        param.main_grad = param.get_main_grad()  # type: ignore[attr-defined]
    buffer = getattr(param, "main_grad", None)
    if not isinstance(buffer, Tensor) or buffer.numel() != param.numel():
        found = f"shape {tuple(buffer.shape)}" if isinstance(buffer, Tensor) else repr(buffer)
        raise ArgumentError.explained(
            "accumulate_into_main_grad=True needs a main_grad of the parameter's shape",
            where=where,
            received=f"main_grad: {found}; parameter: shape {tuple(param.shape)}",
            remedy="Set param.main_grad before backward",
        )
    buffer = buffer.detach()
    if buffer.shape != param.shape:
        buffer = buffer.view(param.shape)
    if not getattr(param, "overwrite_main_grad", False):
        return buffer, True
    return buffer, not is_first_write(param, buffer, backward_pass() if number is None else number)


def mark_added(param: nn.Parameter) -> Tensor:
    """Notes on ``param`` that ``main_grad`` holds its gradient.

    Returns:
        Zeros to hand to autograd as the gradient, so that its hooks fire. A new tensor every time:
        autograd may keep it as ``param.grad``, and a hook may write to it.
    """
    repeat(lambda: _set_flags(param))
    # Codes have gradients of another dtype, which None leaves open.
    dtype = (param.grad_dtype or torch.bfloat16) if is_fp8(param.dtype) else None
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format)


def _set_flags(param: nn.Parameter) -> None:
    param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    param._opfuser_placeholder = True  # type: ignore[attr-defined]


def has_zeros_as_placeholder(param: nn.Parameter) -> bool:
    """Whether autograd gets zeros for what is added to ``param.main_grad``.

    Modules of Transformer Engine return memory that was never written instead, unless the
    parameter's ``zero_out_wgrad`` is set.
    """
    return hasattr(param, "_opfuser_placeholder") or getattr(param, "zero_out_wgrad", False)


def fitting_grad(weight: Tensor, x: Tensor) -> Tensor | None:
    """``weight.grad``, if one GEMM with the input ``x`` can add to it as it is.

    On a CPU no GEMM of half precision adds to fp32.
    """
    grad = weight.grad if weight.is_leaf else None  # torch warns of reading that of others
    if (
        grad is None
        or type(grad) is not Tensor
        or type(weight) not in (nn.Parameter, Tensor)
        or grad.requires_grad
        or not grad.is_contiguous()  # nor are sparse ones
    ):
        return None
    wide = grad.is_cuda and grad.dtype == torch.float32 and x.itemsize == 2
    return grad if wide or grad.dtype == x.dtype else None


def grad_buffer(weight: Tensor, x: Tensor) -> Tensor | None:
    """In backward, :func:`fitting_grad` if adding to it is all that autograd would do.

    None if ``.grad`` does not fit; if hooks are to see the gradient; if autograd captures it,
    drops it, or records how it is made (``create_graph``); while torch.compile traces. Then
    autograd must get the gradient itself.

    What other nodes of the graph contribute to the same ``.grad``, autograd adds as always.
    """
    node = current_node()
    if node is None or getattr(node, "create_graph", False) or torch.is_grad_enabled():
        return None
    grad = fitting_grad(weight, x)
    if grad is None or internals.has_grad_hooks(weight):
        return None
    # Autograd has its node for the weight, and the caller, wait for the stream of a GPU in which a
    # gradient was made, but not where it gets none. In the default stream they are there too.
    if grad.is_cuda and callers_stream(grad.get_device()):
        return None
    return grad if destination(weight) is Destination.ACCUMULATED else None


def into_grad(gradient: Product, weight: nn.Parameter | None) -> Tensor | None:
    """What autograd gets with ``accumulate_into_grad``: None once ``weight.grad`` has it.

    Args:
        weight: that forward used, or None if it is not known.
    """
    if weight is None:
        return gradient.value()
    grad = grad_buffer(weight, gradient.x)
    if is_recording():
        like = gradient.x.new_empty(0)
        assume(lambda: _address(grad_buffer(weight, like)))
    if grad is None:
        return gradient.value()
    gradient.write(grad, accumulate=True)
    return None


def handed_over(
    gradient: WeightGradient,
    weight: nn.Parameter | None,
    current: Callable[[], nn.Parameter],
    where: str,
    *,
    main_grad: bool,
    grad: bool,
) -> Tensor | None:
    """What autograd gets for a weight, as an operation's settings say.

    To ``grad`` goes only a gradient whose GEMM can add to it. For others autograd moves no more
    bytes.

    Args:
        weight: that forward used. None: no context, a forward fusion of the user's filled it in, or
            it was traced.
        current: returns the weight of now.
    """
    if main_grad:
        into = current() if weight is None else weight
        return into_main_grad(gradient, into, where, of_forward=weight is not None)
    if grad and isinstance(gradient, Product):
        return into_grad(gradient, weight)
    return gradient.value()


def _address(buffer: Tensor | None) -> int | None:
    return None if buffer is None else buffer.data_ptr()


def into_main_grad(
    gradient: WeightGradient, weight: nn.Parameter, where: str, *, of_forward: bool
) -> Tensor | None:
    """What autograd gets with ``accumulate_into_main_grad``.

    Args:
        of_forward: whether forward used this weight for certain.

    Returns:
        Zeros once ``weight.main_grad`` has the gradient, see :func:`mark_added`. Where autograd
        would not accumulate it: None if nobody wants it, else the gradient.

    Raises:
        ArgumentError: see :func:`main_grad_buffer`.
    """
    goes = destination(weight)
    assume(lambda: (destination(weight), _address(getattr(weight, "main_grad", None))))
    if goes is Destination.NOWHERE and of_forward:
        return None
    if goes is not Destination.ACCUMULATED:  # or the weight of now is not that of forward
        return gradient.value()
    buffer, accumulate = main_grad_buffer(weight, where)
    gradient.write(buffer, accumulate=accumulate)
    return mark_added(weight)
