"""Inputs of a model: texts that stand for tensors, and examples that are kept beside a model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TargetError

DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
"""Names in texts of inputs; those of torch, such as ``bfloat16``, are read too."""

_TORCH_DTYPES = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
_INPUT = re.compile(r"(\d+(?:x\d+)*)?(?::(\w+))?")


def examples(spec: str, owners: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """What the first of ``owners`` that has ``example_inputs`` gives: tensors or texts.

    Raises:
        TargetError: none has, or a function that is to return them failed.
    """
    for owner in owners:
        given = getattr(owner, "example_inputs", None)
        if given is None:
            continue
        if callable(given) and not isinstance(given, Tensor):
            try:
                with device:
                    given = given()
            except Exception as error:
                raise TargetError.explained(
                    f"example_inputs of {spec} failed", received=said(error)
                ) from error
        return tuple(given) if isinstance(given, (tuple, list)) else (given,)
    raise TargetError.explained(
        f"{spec} says nothing about its inputs",
        remedy="Pass --input 8x128:bf16 for each, or set example_inputs beside the function "
        "or on the model",
    )


def tensor(
    item: Any, spec: str, model: nn.Module, device: torch.device, dtype: torch.dtype | None
) -> Tensor:
    """The tensor that an example or a text stands for.

    Raises:
        TargetError: it stands for none.
    """
    if not isinstance(item, (str, Tensor)):
        raise TargetError.explained(
            f"example_inputs of {spec} are tensors, or texts such as '8x128:bf16'",
            received=type(item).__name__,
        )
    try:
        if isinstance(item, str):
            return _from_text(item, model, device, dtype)
        to = dtype if item.is_floating_point() and dtype is not None else item.dtype
        return item.detach().to(device, to).requires_grad_(item.requires_grad)
    except RuntimeError as error:  # such as memory, or a dtype without random numbers
        raise TargetError.explained(
            f"An input has to exist on {device}",
            where=item if isinstance(item, str) else f"{tuple(item.shape)} {item.dtype}",
            received=said(error),
            remedy="Pass another shape or dtype, or --device meta",
        ) from error


def _from_text(
    text: str, model: nn.Module, device: torch.device, dtype: torch.dtype | None
) -> Tensor:
    read = _INPUT.fullmatch(text.strip())
    if read is None or not (read[1] or read[2]):
        raise TargetError.explained(
            "An input is a shape and a dtype, such as 8x2048x4096:bf16", received=repr(text)
        )
    shape = [int(size) for size in read[1].split("x")] if read[1] else []
    of_model = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    to = named_dtype(read[2]) if read[2] else dtype or of_model or torch.get_default_dtype()
    if to.is_floating_point:
        if dtype is not None:
            to = dtype
        x = torch.empty(shape, dtype=to, device=device)
        return (x if x.is_meta else x.normal_()).requires_grad_()
    if to == torch.bool:
        return torch.ones(shape, dtype=to, device=device)
    tables = [getattr(m, "num_embeddings", None) for m in model.modules()]
    sizes = [n for n in tables if isinstance(n, int)]
    return torch.randint(min(sizes, default=1), shape, dtype=to, device=device)


def as_text(t: Tensor) -> str:
    """A tensor as ``--input`` names it: ``8x128:bfloat16``."""
    return f"{'x'.join(map(str, t.shape))}:{str(t.dtype).removeprefix('torch.')}"


def named_dtype(name: str) -> torch.dtype:
    """The dtype of a name such as ``bf16``, ``bfloat16`` or ``int64``.

    Raises:
        TargetError: there is none of that name.
    """
    found = DTYPES.get(name) or getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TargetError.explained(
            f"A dtype is one of {', '.join(DTYPES)}, or a dtype of torch such as bfloat16",
            received=repr(name),
            remedy=did_you_mean(name, (*DTYPES, *_TORCH_DTYPES)),
        )
    return found


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A remedy that names what ``name`` may stand for; empty if nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=3)
    return f"Did you mean {' or '.join(near)}?" if near else ""


def said(error: BaseException) -> str:
    """An error in one line, as part of a sentence."""
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
