"""Checkpoints of Transformer Engine, read and written without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opfuser import BasicLinear, FusedOperation, FusibleOperation, Linear, Sequential
from opfuser.errors import NotSupportedError, explain
from opfuser.op.fusible import RESTORED_CHILDREN

from .conversion import options_of

__all__ = ["load_te_state_dict", "te_state_dict"]

_STATE = "_extra_state"
# Operations there that hold another one, with a state of its own.
_INSIDE = {"ScaledClampedQGeGLU": "_clamped."}


class _Key(NamedTuple):
    """A tensor of a state dict. ``ours`` is None for one that only theirs has."""

    ours: str | None
    theirs: str


def te_state_dict(sequence: Sequential) -> dict[str, Tensor]:
    """The state dict that Transformer Engine has for the same model.

    Sequences of :func:`.from_te` and ``Options.build`` have the keys of the module that they stand
    for; other operations those of te.ops. Where a module there keeps the scales of quantised
    compute the entry ``_extra_state`` is empty, as without quantised compute. Tensors are those of
    ``sequence.state_dict()``: nothing is copied.

    Raises:
        NotSupportedError: a weight is stored as codes, which have another form there.
    """
    state = sequence.state_dict()
    return {
        key.theirs: torch.empty(0, dtype=torch.uint8) if key.ours is None else state[key.ours]
        for key in _keys(sequence)
    }


def load_te_state_dict(
    sequence: Sequential, state: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> Any:
    """Loads a state dict of Transformer Engine; what ``load_state_dict`` returns.

    Entries ``_extra_state`` are left out unread: scales of quantised compute stay what they are.
    Keys that no tensor of the sequence has there stay as they are, so that those of
    ``state_dict()`` load too, and unknown ones are reported.

    Args:
        sequence: what :func:`te_state_dict` describes.
        state: not changed.
        strict: whether missing and unknown keys are errors.
        assign: whether parameters take the place of those of the sequence, instead of their values.

    Raises:
        RuntimeError: as ``load_state_dict``, with the names of the sequence.
        NotSupportedError: a weight is stored as codes, which have another form there.
    """
    renamed = {key.theirs: key.ours for key in _keys(sequence)}
    mapped = {name: value for name, value in sequence.state_dict().items() if _is_scale(name)}
    for key, value in state.items():
        if key.rpartition(".")[2] != _STATE:
            mapped[renamed.get(key) or key] = value
    return sequence.load_state_dict(mapped, strict=strict, assign=assign)


def _is_scale(name: str) -> bool:
    """Whether an entry is of what an operation keeps of quantised compute."""
    return not RESTORED_CHILDREN.keys().isdisjoint(name.split("."))


def _refuse_codes(module: nn.Module, path: str) -> None:
    if isinstance(module, (BasicLinear, Linear)) and module.weight_format is not None:
        raise NotSupportedError(
            explain(
                "A weight that is stored as codes has another form in Transformer Engine",
                where=path.removesuffix("."),
                remedy="Take read_weight() of it",
            )
        )


def _keys(module: nn.Module, ours: str = "", theirs: str = "") -> Iterator[_Key]:
    """The tensors of ``module``, whose names begin with ``ours`` here and ``theirs`` there."""
    for path, inner in module.named_modules():
        _refuse_codes(inner, ours + path)
    options = options_of(module)
    if options is not None:
        names = options.names()
        for name, _ in module.named_parameters():
            yield _Key(ours + name, theirs + names[name])
        for path in options.states:
            yield _Key(None, f"{theirs}{path}.{_STATE}" if path else theirs + _STATE)
    elif isinstance(module, Sequential):
        for name, child in module.named_children():
            yield from _keys(child, f"{ours}{name}.", f"{theirs}{name}.")
    elif isinstance(module, Linear):
        yield from _keys_of_linear(module, ours, theirs)
    else:
        for name in module.state_dict():
            if not _is_scale(name):
                yield _Key(ours + name, theirs + name)
        if isinstance(module, FusibleOperation) and not isinstance(module, FusedOperation):
            yield _Key(None, theirs + _STATE)
            inside = _INSIDE.get(type(module).__name__)
            if inside is not None:
                yield _Key(None, theirs + inside + _STATE)


def _keys_of_linear(linear: Linear, ours: str, theirs: str) -> Iterator[_Key]:
    """Its parts keep the parameters there."""
    for n, part in enumerate(linear.basic_ops):
        for name in part._parameter_names:
            if getattr(part, name) is not None:
                yield _Key(ours + name, f"{theirs}basic_ops.{n}.{name}")
        yield _Key(None, f"{theirs}basic_ops.{n}.{_STATE}")
