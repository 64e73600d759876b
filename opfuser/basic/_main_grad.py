"""Weight gradients that go straight into ``param.main_grad`` (Megatron-LM's convention)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, explain

__all__ = ["accumulate_main_grad", "add_wgrad", "as_rows", "main_grad_buffer", "mark_added"]


def as_rows(x: Tensor) -> Tensor:
    """``x`` (..., D) as (rows, D). ``reshape(-1, D)`` is ambiguous where D is zero."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


def main_grad_buffer(param: nn.Parameter, where: str) -> tuple[Tensor, bool]:
    """The buffer for the gradient of ``param``, in its shape, and whether to add to what it holds.

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
    return buffer, not getattr(param, "overwrite_main_grad", False)


def mark_added(param: nn.Parameter) -> Tensor:
    """Notes on ``param`` that ``main_grad`` holds its gradient.

    Returns:
        Zeros to hand to autograd as the gradient, so that its hooks fire. A new tensor every time:
        autograd may keep it as ``param.grad``, and a hook may write to it.
    """
    param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.zeros_like(param, memory_format=torch.contiguous_format)


def add_wgrad(out: Tensor, dy: Tensor, x: Tensor, *, add: bool) -> None:
    """``out += dyᵀ x``, or ``out = dyᵀ x`` unless ``add``.

    Computes in the wider of the dtypes: a product of halves is not rounded on its way to fp32. On
    a GPU the GEMM itself takes halves and adds to fp32: 8 bytes of traffic per element of ``out``.

    Args:
        out: (out, in).
        dy: (rows, out).
        x: (rows, in), of dy's dtype.
        add: whether to keep what ``out`` holds.
    """
    wide = torch.promote_types(out.dtype, dy.dtype)
    if out.dtype == torch.float32 != dy.dtype and wide == out.dtype and out.is_cuda:
        if add:
            torch.ops.aten.addmm.dtype_out(out, dy.t(), x, wide, out=out)
        else:
            torch.ops.aten.mm.dtype_out(dy.t(), x, wide, out=out)
        return
    dy, x = dy.to(wide), x.to(wide)
    if out.dtype != wide:
        product = torch.mm(dy.t(), x)
        if add:
            out.add_(product)
        else:
            out.copy_(product)
    elif add:
        out.addmm_(dy.t(), x)
    else:
        torch.mm(dy.t(), x, out=out)


def accumulate_main_grad(param: nn.Parameter, dy: Tensor, x: Tensor, where: str) -> Tensor:
    """Adds ``dyᵀ x`` to ``param.main_grad``, or writes it with ``param.overwrite_main_grad``.

    Args:
        param: the weight, (out, in).
        dy: gradient of the output, (rows, out).
        x: input, (rows, in), of dy's dtype.
        where: names the operation in errors.

    Returns:
        The placeholder of :func:`mark_added`.

    Raises:
        ArgumentError: see :func:`main_grad_buffer`.
    """
    buffer, add = main_grad_buffer(param, where)
    add_wgrad(buffer, dy, x, add=add)
    return mark_added(param)
