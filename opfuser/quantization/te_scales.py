"""Scales in checkpoints of Transformer Engine: entries ``_extra_state``, read without running them.

They are pickles: of a recipe, and of tensors of delayed scaling in fp32. For L calls and n tensors
those are ``scale`` (n,) and ``amax_history`` (L, n), of forward and of backward. In the history the
first row is of the call under way, the second the oldest one, the last the call before. Tensors of
te.ops.BasicLinear are input and weight, and the gradient of the output; of each GEMM of a module
input, weight and output, and the gradients of output and input.

Transformer Engine, transformer_engine/pytorch/ops/op.py, module/base.py, quantization.py (2.20).
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import torch_internals as internals
from ..errors import explain
from ..recipe import Format


class _UnreadableError(Exception):
    """Says what an entry is, of which nothing can be kept."""


class _Opaque:
    """Stands for an object of a class that is not imported."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    args: tuple[Any, ...]


def _storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _member(owner: Any, name: str) -> _Opaque:
    if not (isinstance(owner, type) and issubclass(owner, _Opaque)):
        raise pickle.UnpicklingError(f"an attribute of {owner!r}")
    made: _Opaque = owner(name)
    return made


_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("builtins", "getattr"): _member,  # by which Python pickles members of an enumeration
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): internals.rebuild_tensor,
    ("torch.storage", "_load_from_bytes"): _storage,
}


class _Unpickler(pickle.Unpickler):
    """Makes tensors and plain values alone; recipes are stood for by what was pickled of them."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("transformer_engine."):
            return type(name, (_Opaque,), {})
        known = _KNOWN.get((module, name))
        if known is not None:  # within a function made here, whose attributes may be written to

            def call(*args: Any) -> Any:
                return known(*args)

            return call
        raise pickle.UnpicklingError(f"{module}.{name}")


def _unpickled(extra: Any) -> Any:
    if isinstance(extra, Tensor):
        data = extra.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    elif isinstance(extra, io.BytesIO):
        data = extra.getvalue()
    else:
        raise _UnreadableError(f"a {type(extra).__name__}")
    if not data:
        return None
    try:
        if not isinstance(extra, Tensor):  # as of versions before 1.6
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # whatever such bytes lead to
        raise _UnreadableError(f"{len(data)} bytes that are not unpickled: {error}") from error


class _Half(NamedTuple):
    """One pass, forward or backward: scale (n,), history (L, n), and how scales come from it."""

    scale: Tensor
    history: Tensor
    largest: float
    margin: int


def _read(extra: Any) -> list[dict[str, Tensor]]:
    """For each GEMM the buffers of a ``QuantizationState``; none where an entry has no scales.

    The next call has the scales that it would have had there.

    Args:
        extra: value of an entry ``_extra_state``: bytes as a tensor, or a file in memory.

    Raises:
        _UnreadableError: it is something else.
    """
    found = _unpickled(extra)
    if not found:
        return []
    if not isinstance(found, dict):
        raise _UnreadableError(f"a pickled {type(found).__name__}")
    of_module = found.keys().isdisjoint(("forward", "backward"))
    parts = [found, found] if of_module else [found.get("forward"), found.get("backward")]
    forward, backward = map(_half, parts, ("fwd", "bwd"))
    if forward is None and backward is None:
        return []
    if forward is None or backward is None:
        raise _UnreadableError("scales of one pass alone")
    widths = len(forward.scale), len(backward.scale)
    each = (3, 2) if of_module else (2, 1)
    count = widths[0] // each[0]
    if widths != (count * each[0], count * each[1]) or len(forward.history) != len(
        backward.history
    ):
        raise _UnreadableError(f"scales of {widths[0]} and {widths[1]} tensors")
    return [_buffers(forward, backward, n * each[0], n * each[1]) for n in range(count)]


def _half(part: Any, name: str) -> _Half | None:
    if not isinstance(part, dict) or f"scale_{name}" not in part:
        return None
    scale, history = part[f"scale_{name}"], part.get(f"amax_history_{name}")
    if (
        not isinstance(scale, Tensor)
        or not isinstance(history, Tensor)
        or scale.dim() != 1
        or history.dim() != 2
        or history.shape[1:] != scale.shape
        or not len(history)
    ):
        raise _UnreadableError("no scales of delayed scaling")
    own = getattr(part.get("recipe"), "__dict__", {})
    largest = _largest(own.get("fp8_format"))[name == "bwd"]
    margin = own.get("margin", 0)
    margin = int(margin) if isinstance(margin, (int, float)) else 0
    return _Half(scale.detach().float(), history.detach().float(), largest, margin)


def _largest(stated: Any) -> tuple[float, float]:
    """Largest values of forward and backward; the default is HYBRID, as in te."""
    args: tuple[Any, ...] = getattr(stated, "args", ())
    if args and isinstance(args[0], str) and args[0] in Format.__members__:
        return Format[args[0]].value.max_fwd, Format[args[0]].value.max_bwd
    values: tuple[Any, ...] = getattr(args[0], "args", ()) if args else ()
    if len(values) == 2 and all(isinstance(v, (int, float)) for v in values):
        return float(values[0]), float(values[1])
    return Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd


def _buffers(forward: _Half, backward: _Half, first: int, grad: int) -> dict[str, Tensor]:
    columns = [_column(forward, first), _column(forward, first + 1), _column(backward, grad)]
    scale, history, amax = (torch.stack(own, -1) for own in zip(*columns))
    return {"scale": scale, "amax_history": history, "amax": amax}


def _column(half: _Half, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The scale, the history with the last call first, and the amax since, of one tensor."""
    scale, rows = half.scale[n], half.history[:, n]
    history = torch.cat([rows[1:].flip(0), rows.new_zeros(1)])
    # The oldest row is gone there, though the scale may come from it; here it leaves next time.
    if scale != 1 and _scale_for(history.max(), half) != scale:
        oldest = half.largest / 2.0**half.margin / scale
        near = [oldest, *[torch.nextafter(oldest, torch.tensor(end)) for end in (0.0, torch.inf)]]
        history[-1] = next((v for v in near if _scale_for(v, half) == scale), oldest)
    return scale, history, rows[0]


def _scale_for(amax: Tensor, half: _Half) -> Tensor:
    top = torch.tensor(half.largest)
    return (top / amax).clamp(max=torch.finfo(torch.float32).max) * 2.0**-half.margin


def te_scales(key: str, extra: Any, prefixes: Sequence[str]) -> dict[str, Tensor]:
    """Entries of a state dict for what an entry of Transformer Engine has; warns if nothing fits.

    Args:
        key: of the entry there.
        extra: its value.
        prefixes: of the states of its linear operations here, in the order of its GEMMs.
    """
    try:
        found = _read(extra)
        if len(found) not in (0, len(prefixes)):
            raise _UnreadableError(f"those of {len(found)} GEMMs for {len(prefixes)} operations")
    except _UnreadableError as error:
        warnings.warn(
            explain(
                "Scales of Transformer Engine are kept where each linear operation has those of "
                "one GEMM",
                where=key,
                received=str(error),
                remedy="Leave the entry out of the state dict: first calls take scales from their "
                "values then, as they do now",
            ),
            stacklevel=2,
        )
        return {}
    return {
        prefix + name: value for prefix, own in zip(prefixes, found) for name, value in own.items()
    }
