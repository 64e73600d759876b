"""The variants of a call, and their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Wrt = Literal["all", "input", "parameters", "last parameter", "extra inputs"]


@dataclass(frozen=True)
class Variant:
    """One way of calling: memory layouts, modes, incoming and wanted gradients.

    Attributes:
        name: for messages; empty for the plain call.
        strided: the input has gaps between its elements, other tensors are transposed.
        expanded: the input is a slice of a wider tensor, incoming gradients repeat one row.
        outputs: the outputs that receive a gradient.
        wrt: the tensors that require grad.
        rows: how many rows of the tensors are left.
        grad: whether gradients are computed, and else what switches them off.
        evaluates: in evaluation mode.
        replaces: every parameter is replaced before backward.
        sets: path of an attribute that is set to another value before backward.
    """

    name: str = ""
    strided: bool = False
    expanded: bool = False
    outputs: Literal["all", "main", "extra"] = "all"
    wrt: Wrt = "all"
    rows: Literal["all", "one", "none"] = "all"
    grad: Literal["on", "no_grad", "inference_mode"] = "on"
    evaluates: bool = False
    replaces: bool = False
    sets: str = ""


def wanting(*, parameters: int, extra_inputs: bool) -> list[Variant]:
    """The variants of wanted gradients that make a difference."""
    out = [Variant()]
    if parameters or extra_inputs:
        out.append(Variant("only the input requires grad", wrt="input"))
    if parameters:
        out.append(Variant("only parameters require grad", wrt="parameters"))
    if parameters > 1:
        out.append(Variant("only the last parameter requires grad", wrt="last parameter"))
    if extra_inputs:
        out.append(Variant("only extra inputs require grad", wrt="extra inputs"))
    return out


def variants(
    *, parameters: int, extra_inputs: bool, extra_outputs: bool, zero_rows: bool
) -> list[Variant]:
    """The variants that make a difference for a subject with these tensors."""
    plain, *asking = wanting(parameters=parameters, extra_inputs=extra_inputs)
    out = [
        plain,
        Variant("strided tensors", strided=True),
        Variant("row-strided input, expanded gradient", expanded=True),
    ]
    if extra_outputs:
        out.append(Variant("no gradient of the extra outputs", outputs="main"))
        out.append(Variant("no gradient of the main output", outputs="extra"))
    out += asking
    if zero_rows:
        out.append(Variant("zero rows", rows="none"))
    return out


def modes(parameters: int) -> list[Variant]:
    """The variants that are checked in one dtype only, since their faults show in every dtype."""
    out = [
        Variant("one row", rows="one"),
        Variant("under no_grad", grad="no_grad"),
        Variant("in eval mode", evaluates=True),
        Variant("in eval and inference mode", evaluates=True, grad="inference_mode"),
    ]
    if parameters:
        out.append(Variant("parameters replaced between forward and backward", replaces=True))
    return out


def _wide(t: Tensor) -> Tensor:
    """The values of ``t`` as a slice of a wider tensor, which holds NaN elsewhere."""
    buffer = t.new_full((*t.shape[:-1], t.shape[-1] + 3), _filler(t))
    view = buffer[..., 1 : 1 + t.shape[-1]]
    view.copy_(t)
    return view


def _gapped(t: Tensor) -> Tensor:
    buffer = t.new_full((*t.shape, 2), _filler(t))
    view = buffer[..., 0]
    view.copy_(t)
    return view


def _filler(t: Tensor) -> float:
    return float("nan") if t.is_floating_point() else 0


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else _gapped(t)


def lay_out(name: str, t: Tensor, variant: Variant) -> Tensor:
    """A copy of ``t`` in the memory layout of the variant."""
    t = t.detach().clone()
    if not t.dim():
        return t
    if variant.strided:
        return _gapped(t) if name == "input" else _transposed(t)
    if variant.expanded and name == "input":
        return _wide(t)
    return t


def incoming(name: str, like: Tensor, variant: Variant) -> Tensor:
    """A random gradient for the output of this name, the same in every call."""
    # One generator per name, on the CPU: the same numbers in any order and on every device.
    generator = torch.Generator().manual_seed(sum(name.encode()))
    grad = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    grad = grad.to(like.device, like.dtype)
    if variant.strided and grad.dim():
        return _transposed(grad)
    if variant.expanded and grad.numel():
        if grad.dim() > 1:
            return grad[:1].expand(grad.shape)
        return grad.reshape(-1)[0].expand(grad.shape)
    return grad


def leading_dims(input_: Tensor) -> int:
    """Number of dimensions of the input that count rows: all of indices, else all but the last."""
    return input_.dim() - input_.is_floating_point()


def without_rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without rows; those without one entry per row of the input stay."""
    rows = tensors["input"].shape[:1]
    return {name: t[:0] if t.shape[:1] == rows else t for name, t in tensors.items()}


def one_row(tensors: Mapping[str, Tensor], dims: int) -> dict[str, Tensor]:
    """The first row of the tensors, as far as their first dimensions are the input's.

    Args:
        dims: number of dimensions that shrink to one entry.
    """
    rows = tensors["input"].shape[:dims]
    out = {}
    for name, t in tensors.items():
        alike = 0
        while alike < min(dims, t.dim()) and t.shape[alike] == rows[alike]:
            alike += 1
        out[name] = t[(slice(0, 1),) * alike] if alike else t
    return out
