"""Memory of the caller's that results are written to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .. import torch_internals as internals
from ..errors import InputError, NotSupportedError, OpKwargsError


def buffers_of_call(
    where: str,
    /,
    *,
    output: Tensor | None = None,
    grad_input: Tensor | None = None,
    output_buffer: Tensor | None = None,
    grad_input_buffer: Tensor | None = None,
    **others: object,
) -> tuple[Tensor | None, Tensor | None]:
    """The buffers among the keywords of a forward: for the output, for the input's gradient.

    Args:
        output, output_buffer: two names of one.
        grad_input, grad_input_buffer: likewise.

    Raises:
        OpKwargsError: there is another keyword, or a buffer under either name.
        NotSupportedError: there is a buffer while torch.compile traces.
    """
    if others:
        raise OpKwargsError.explained(
            f"The forward of {where} takes the keywords output and grad_input",
            received=", ".join(others),
        )
    for name, one, other in (
        ("output", output, output_buffer),
        ("grad_input", grad_input, grad_input_buffer),
    ):
        if one is not None and other is not None:
            raise OpKwargsError.explained(
                "A buffer is given once",
                where=where,
                received=f"{name} and {name}_buffer, which mean the same",
                remedy=f"Leave out {name}_buffer",
            )
    output = output_buffer if output is None else output
    grad_input = grad_input_buffer if grad_input is None else grad_input
    if torch.compiler.is_compiling() and not (output is None and grad_input is None):
        raise NotSupportedError.explained(
            f"{where} does not write to buffers of the caller while torch.compile traces",
            received="output or grad_input",
            remedy="Leave it out of torch.compile, or copy the results",
        )
    return output, grad_input


def check_buffers(
    buffers: Sequence[Tensor | None],
    like: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    device: torch.device,
    others: Sequence[Tensor | None],
    where: str,
) -> None:
    """Checks that results can be written to ``buffers``.

    Args:
        buffers: what the caller passed; None for none.
        like: names of the buffers, with shape and dtype of what is to be written.
        others: tensors that have to keep their values.

    Raises:
        InputError: one of them cannot take its result.
    """
    taken = list(others)
    for buffer, (name, (shape, dtype)) in zip(buffers, like.items()):
        if buffer is None:
            continue
        wrong = _unfit(buffer, shape, dtype, device, taken)
        if wrong:
            raise InputError.explained(
                f"{name} must be a contiguous tensor like the result, in memory of its own",
                where=where,
                received=f"{name} {wrong}",
            )
        taken.append(buffer)


def _unfit(
    buffer: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    taken: Sequence[Tensor | None],
) -> str:
    if not isinstance(buffer, Tensor):
        return f"of type {type(buffer).__name__}, expected a tensor"
    if buffer.shape != shape:
        return f"of shape {tuple(buffer.shape)}, expected {tuple(shape)}"
    if buffer.dtype != dtype or buffer.device != device:
        return f"of {buffer.dtype} on {buffer.device}, expected {dtype} on {device}"
    if not buffer.is_contiguous():
        return f"with strides {buffer.stride()}, expected a contiguous tensor"
    if buffer.requires_grad:
        return "that requires grad, expected one that does not"
    if any(t is not None and overlap(buffer, t) for t in taken):
        return "that shares memory with another tensor of the call"
    return ""


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether a byte lies between the first and last ones of both. By address, whoever owns it."""
    if a.device != b.device or not a.data_ptr() or not b.data_ptr():  # zero: without data
        return False
    return a.data_ptr() < _end(b) and b.data_ptr() < _end(a)


def _end(t: Tensor) -> int:
    if not t.numel():
        return t.data_ptr()
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(t.shape, t.stride()))
    return t.data_ptr() + (last + 1) * t.itemsize


def may_become_grad(dx: Tensor) -> bool:
    """Whether autograd may keep ``dx`` itself as the ``grad`` of a leaf: there, it adds to it.

    Asked in backward. Which input of the present node ``dx`` reaches is not known, so that a leaf
    of as many elements counts.
    """
    node = internals.current_node()
    if node is None:
        return True
    leaves = [getattr(to, "variable", None) for to, _ in node.next_functions]
    return any(leaf is not None and leaf.numel() == dx.numel() for leaf in leaves)
