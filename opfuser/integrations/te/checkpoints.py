"""Checkpoints of Transformer Engine, read and written without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opfuser import (
    BasicLinear,
    BasicOperation,
    FusedOperation,
    FusibleOperation,
    Linear,
    Sequential,
)
from opfuser.errors import NotSupportedError
from opfuser.quantization.state import CHILD
from opfuser.quantization.te_scales import te_scales

from .conversion import options_of

_STATE = "_extra_state"
# Operations there that hold another one, with a state of its own.
_INSIDE = {"ScaledClampedQGeGLU": "_clamped."}


class _Key(NamedTuple):
    """An entry of a state dict.

    Attributes:
        ours: None for one that only theirs has.
        theirs: the key there.
        linear: paths of the linear operations here whose scales it has, in the order of GEMMs.
    """

    ours: str | None
    theirs: str
    linear: tuple[str, ...] = ()


def te_state_dict(sequence: Sequential) -> dict[str, Tensor]:
    """The state dict of the same model in Transformer Engine.

    Sequences of :func:`.from_te` and ``Options.build`` have the keys of the module that they
    replace; other operations those of te.ops. Entries ``_extra_state``, where te keeps scales, are
    empty, as without quantized compute. Tensors are those of ``sequence.state_dict()``: nothing is
    copied.

    Raises:
        NotSupportedError: a weight is stored as codes, which te stores differently.
    """
    state = sequence.state_dict()
    return {
        key.theirs: torch.empty(0, dtype=torch.uint8) if key.ours is None else state[key.ours]
        for key in _keys(sequence)
    }


def load_te_state_dict(
    sequence: Sequential, state: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> Any:
    """Loads a state dict of Transformer Engine, and returns the result of ``load_state_dict``.

    Entries ``_extra_state`` are read as data, not unpickled: scales of delayed scaling become those
    of the linear operations, so the next calls use the scales that they would have had in te. An
    entry that does not fit, such as one of grouped operations, or cannot be read causes a warning,
    and leaves scales unchanged. Keys that are not te's names are kept, so those of ``state_dict()``
    load too, and unknown ones are reported.

    Args:
        sequence: as for :func:`te_state_dict`.
        state: the state dict, which is not changed.
        strict: whether missing and unknown keys are errors.
        assign: whether to replace the parameters of the sequence, instead of copying values.

    Raises:
        RuntimeError: as ``load_state_dict``, with the names of the sequence.
        NotSupportedError: a weight is stored as codes, which te stores differently.
    """
    keys = {key.theirs: key for key in _keys(sequence)}
    mapped = {name: value for name, value in sequence.state_dict().items() if _is_scale(name)}
    for name, value in state.items():
        key = keys.get(name)
        if name.rpartition(".")[2] == _STATE:
            paths = () if key is None else key.linear
            mapped.update(te_scales(name, value, [f"{path}{CHILD}." for path in paths]))
        else:
            mapped[key.ours if key is not None and key.ours is not None else name] = value
    return sequence.load_state_dict(mapped, strict=strict, assign=assign)


def _is_scale(name: str) -> bool:
    """Whether an entry is of what an operation keeps of quantized compute."""
    return CHILD in name.split(".")


def _refuse_codes(module: nn.Module, path: str) -> None:
    if isinstance(module, (BasicLinear, Linear)) and module.weight_format is not None:
        raise NotSupportedError.explained(
            "A weight that is stored as codes has another form in Transformer Engine",
            where=path.removesuffix("."),
            remedy="Take read_weight() of it",
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
            linear = tuple(_linear_of_module(module, names, path, ours))
            yield _Key(None, f"{theirs}{path}.{_STATE}" if path else theirs + _STATE, linear)
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
            linear = (ours,) if isinstance(module, BasicOperation) and _multiplies(module) else ()
            yield _Key(None, theirs + _STATE, linear)
            inside = _INSIDE.get(type(module).__name__)
            if inside is not None:
                yield _Key(None, theirs + inside + _STATE)


def _keys_of_linear(linear: Linear, ours: str, theirs: str) -> Iterator[_Key]:
    """Its parts keep the parameters there."""
    for n, part in enumerate(linear.basic_ops):
        for name in part._parameter_names:
            if getattr(part, name) is not None:
                yield _Key(ours + name, f"{theirs}basic_ops.{n}.{name}")
        linear_op = (ours,) if _multiplies(part) else ()
        yield _Key(None, f"{theirs}basic_ops.{n}.{_STATE}", linear_op)


def _multiplies(op: BasicOperation) -> bool:
    return op.takes_part_in_recipes


def _linear_of_module(
    module: nn.Module, names: Mapping[str, str], path: str, ours: str
) -> Iterator[str]:
    """The paths of the linear operations whose parameters a module there has at ``path``."""
    for inside, op in module.named_modules():
        for part in getattr(op, "basic_ops", (op,)):
            if isinstance(part, BasicOperation) and _multiplies(part):
                own = [n for n, _ in op.named_parameters(prefix=inside)]
                if own and names[own[0]].rpartition(".")[0] == path:
                    yield f"{ours}{inside}."
