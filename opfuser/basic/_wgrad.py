"""Weight gradients that a GEMM adds to ``main_grad`` (Megatron-LM's convention) or to ``grad``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, explain
from ._backward_pass import Destination, backward_pass, destination, is_first_write

__all__ = [
    "accumulate_main_grad",
    "add_wgrad",
    "as_rows",
    "fitting_grad",
    "grad_buffer",
    "main_grad_buffer",
    "mark_added",
    "refuse_both",
]


def refuse_both(accumulate_into_main_grad: bool, accumulate_into_grad: bool, where: str) -> None:
    """Raises ArgumentError if both are true."""
    if accumulate_into_main_grad and accumulate_into_grad:
        raise ArgumentError(
            explain(
                "A weight's gradient is accumulated in one place",
                where=where,
                received="accumulate_into_main_grad=True, accumulate_into_grad=True",
                remedy="Leave one of them False",
            )
        )


def as_rows(x: Tensor) -> Tensor:
    """``x`` (..., D) as (rows, D). ``reshape(-1, D)`` is ambiguous where D is zero."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


def main_grad_buffer(
    param: nn.Parameter, where: str, number: int | None = None
) -> tuple[Tensor, bool]:
    """The buffer for the gradient of ``param``, in its shape, and whether to add to what it holds.

    That is written over, with ``param.overwrite_main_grad``, by the first gradient of a backward
    pass alone: those of other uses of ``param`` add to it. To be called right before writing.

    Args:
        param: the weight.
        where: names the operation in errors.
        number: the backward pass that the gradient belongs to; None is the one under way.

    Raises:
        ArgumentError: ``param.main_grad`` is missing or cannot be seen in the shape of ``param``.
    """
    if hasattr(param, "__fsdp_param__"):  # Megatron-FSDP hands out the buffer on request
        param.main_grad = param.get_main_grad()  # type: ignore[attr-defined]
    buffer = getattr(param, "main_grad", None)
    if not isinstance(buffer, Tensor) or buffer.numel() != param.numel():
        found = f"shape {tuple(buffer.shape)}" if isinstance(buffer, Tensor) else repr(buffer)
        raise ArgumentError(
            explain(
                "accumulate_into_main_grad=True needs a main_grad of the parameter's shape",
                where=where,
                received=f"main_grad: {found}; parameter: shape {tuple(param.shape)}",
                remedy="Set param.main_grad before backward",
            )
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
    param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.zeros_like(param, memory_format=torch.contiguous_format)


def fitting_grad(weight: Tensor, x: Tensor) -> Tensor | None:
    """``weight.grad``, if one GEMM with the input ``x`` can add to it as it is.

    On a CPU no GEMM of halves adds to fp32.
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
    if torch.compiler.is_compiling():
        return None
    grad = fitting_grad(weight, x)
    if grad is None or weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    run = torch._C._current_autograd_node()  # None in compiled autograd too
    if run is None or getattr(run, "create_graph", False) or torch.is_grad_enabled():
        return None
    # Autograd has its node for the weight, and the caller, wait for the stream of a GPU in which a
    # gradient was made, but not where it gets none. In the default stream they are there too.
    if grad.is_cuda and torch._C._cuda_getCurrentRawStream(grad.get_device()):
        return None
    return grad if destination(weight) is Destination.ACCUMULATED else None


def add_wgrad(out: Tensor, dy: Tensor, x: Tensor, *, add: bool, scale: float = 1.0) -> None:
    """``out += s dyᵀ x``, or ``out = s dyᵀ x`` unless ``add``.

    Computes in the wider of the dtypes: a product of halves is not rounded on its way to fp32. On
    a GPU the GEMM itself takes halves and adds to fp32: 8 bytes of traffic per element of ``out``.

    Args:
        out: (out, in).
        dy: (rows, out).
        x: (rows, in), of dy's dtype.
        add: whether to keep what ``out`` holds.
        scale: s.
    """
    plain = not add and scale == 1  # what a GEMM without terms does
    if out.dtype != dy.dtype:
        wide = torch.promote_types(out.dtype, dy.dtype)
        if out.is_cuda and wide == out.dtype == torch.float32:
            if plain:
                torch.ops.aten.mm.dtype_out(dy.t(), x, wide, out=out)
            else:
                addmm = torch.ops.aten.addmm.dtype_out
                addmm(out, dy.t(), x, wide, beta=int(add), alpha=scale, out=out)
            return
        dy, x = dy.to(wide), x.to(wide)
        if out.dtype != wide:
            product = torch.mm(dy.t(), x)
            if add:
                out.add_(product, alpha=scale)
            else:
                torch.mul(product, scale, out=out)
            return
    if plain:
        torch.mm(dy.t(), x, out=out)
    else:
        out.addmm_(dy.t(), x, beta=int(add), alpha=scale)


def accumulate_main_grad(
    param: nn.Parameter, dy: Tensor, x: Tensor, where: str, scale: float = 1.0
) -> Tensor:
    """Adds ``s dyᵀ x`` to ``param.main_grad``, or writes it with ``param.overwrite_main_grad``.

    Args:
        param: the weight, (out, in).
        dy: gradient of the output, (rows, out).
        x: input, (rows, in), of dy's dtype.
        where: names the operation in errors.
        scale: s.

    Returns:
        The placeholder of :func:`mark_added`.

    Raises:
        ArgumentError: see :func:`main_grad_buffer`.
    """
    buffer, add = main_grad_buffer(param, where)
    add_wgrad(buffer, dy, x, add=add, scale=scale)
    return mark_added(param)
