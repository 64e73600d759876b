"""What functions of torch do with tensors, by their names and schemas, as far as recording asks."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ... import torch_internals as internals


class NotRecordableError(Exception):
    """Why a pass cannot be repeated by its calls alone."""


# What reads values on the host, or returns sizes that depend on them.
HOST = frozenset(
    "item tolist numpy __bool__ __int__ __float__ __index__ __complex__ __contains__ equal "
    "allclose is_nonzero nonzero masked_select unique unique_consecutive bincount argwhere "
    "histogram combinations _unique2 unique_dim unique_dim_consecutive _pack_padded_sequence "
    "__array__ __dlpack__ __format__ __repr__ cpu cuda set_ resize_ resize_as_ t_ "
    "transpose_ squeeze_ unsqueeze_ swapaxes_ requires_grad_ register_hook backward "
    "_local_scalar_dense".split()
)
EMPTY = frozenset(
    "empty empty_like new_empty empty_strided new_empty_strided empty_permuted".split()
)
# Change nothing, and what they return is another name for the same values.
VIEWS = frozenset(
    "view view_as view_as_real view_as_complex reshape flatten unflatten squeeze unsqueeze t "
    "transpose permute movedim swapaxes expand expand_as narrow select unbind split "
    "split_with_sizes chunk as_strided detach".split()
)
RESHAPING = frozenset("flatten unflatten reshape squeeze unsqueeze view_as".split())
# Return what they are given where nothing is to be done.
MAYBE_SAME = frozenset(
    "contiguous to type_as long float half bfloat16 double reshape flatten".split()
)
# Answered by what guards compare.
GUARDED = frozenset(
    "shape size stride dim ndim ndimension dtype device numel nelement is_contiguous is_cuda "
    "is_cpu is_meta is_floating_point is_complex requires_grad layout itemsize element_size nbytes "
    "get_device __len__ is_sparse is_inference is_conj is_neg".split()
)
# Compared with the answer by guards of calls in which they were asked for.
ASKED = frozenset("is_leaf grad_dtype".split())
PLACE = frozenset("data_ptr untyped_storage storage_offset".split())
_OUT = ("out", "grad_input")


def name_of_function(func: Any) -> str:
    """The name of a function or an overload."""
    if isinstance(func, internals.OpOverload):
        return str(internals.schema_of(func).name.partition("::")[2])
    return str(getattr(func, "__name__", type(func).__name__))


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What a function writes to, as far as its name and schema say."""
    name = name_of_function(func)
    outs = tensors_in([kwargs.get(key) for key in _OUT])
    if outs:
        return outs
    if isinstance(func, internals.OpOverload):
        arguments = internals.schema_of(func).arguments
        written = [a for a in arguments if a.alias_info and a.alias_info.is_write]
        given = dict(zip([a.name for a in arguments], args)) | kwargs
        return tensors_in([given.get(a.name) for a in written])
    return tensors_in(args[:1]) if is_in_place(name) or kwargs.get("inplace") else []


def refuse_values(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises NotRecordableError for a call whose sizes depend on values of tensors."""
    if _is_sized_by_values(name, args, kwargs):
        raise NotRecordableError("the size of a result depends on values")
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    keys = [key for key, value in given if any(not t.dim() for t in tensors_in(value))]
    if not keys or name.startswith("__"):
        return
    operator = getattr(torch.ops.aten, name, None)
    overloads = [] if operator is None else [getattr(operator, n) for n in operator.overloads()]
    schemas = [internals.schema_of(overload).arguments for overload in overloads]
    if any(_is_number(key, schemas) for key in keys):
        raise NotRecordableError(f"{name} reads a number from a tensor")


def _is_sized_by_values(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    alone, others = len(args) + len(kwargs) == 1, tensors_in((args[1:], kwargs))
    if name == "where":
        return alone
    if name == "one_hot":
        classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
        return not isinstance(classes, int) or classes < 0
    if name == "index":
        return any(t.dtype in (torch.bool, torch.uint8) for t in others)
    return name in ("repeat_interleave", "tensor_split") and (alone or bool(others))


def _is_number(key: int | str, schemas: Sequence[Sequence[Any]]) -> bool:
    """Whether an argument, by position or keyword, is a tensor by no schema that has it."""
    types = []
    for arguments in schemas:
        by_position = [a for a in arguments if not a.kwarg_only]
        if isinstance(key, int):  # the last one may be a list, whose parts are given one by one
            types += [a.type for a in by_position[: key + 1][-1:]]
        else:
            types += [a.type for a in arguments if a.name == key]
    return bool(types) and not any("Tensor" in str(kind) for kind in types)


def is_in_place(name: str) -> bool:
    """Whether a function of this name writes to its first argument."""
    if not name.endswith("__"):
        return name.endswith("_")
    return name.startswith(("__i", "__setitem")) and name not in ("__invert__", "__index__")


def is_reshaped(x: Tensor, result: Tensor) -> bool:
    """Whether ``x.view(result.shape)`` is just the view that ``result`` is."""
    with internals.DisableTorchFunction():
        try:
            view = x.view(result.shape)
        except RuntimeError:  # strides do not allow for it: it is another view, or a copy
            return False
        return result.data_ptr() == view.data_ptr() and result.stride() == view.stride()


def is_plain_memory(result: Any) -> bool:
    """Whether ``torch.empty_strided`` returns the like of ``result``, which was just allocated."""
    with internals.DisableTorchFunction():
        return (
            type(result) is Tensor
            and result.layout is torch.strided
            and not result.requires_grad
            and not (result.is_cpu and torch.cuda.is_available() and result.is_pinned())
        )


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [t for part in value for t in tensors_in(part)]
    return []


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """What changes once somebody writes to a tensor."""
    return [0 if t.is_inference() else t._version for t in tensors]


def memory_of_all(tensors: Iterable[Tensor | None]) -> set[int]:
    """The addresses of the memory of tensors.

    Raises:
        NotRecordableError: one has none of its own.
    """
    present = [t for t in tensors if t is not None]
    if any(t.layout is not torch.strided for t in present):
        raise NotRecordableError("a tensor has no memory of its own")
    return {internals.memory_of(t) for t in present}


def place_of_each(tensors: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Where memory begins, where each tensor begins in it, and how much it is."""
    found = []
    for t in tensors:
        storage = t.untyped_storage()
        start = storage.data_ptr()
        found.append((start, t.data_ptr() - start, storage.nbytes()))
    return found


def relative(found: Sequence[tuple[int, int, int]]) -> Hashable:
    """The same without addresses."""
    starts = [start for start, _, _ in found]
    return tuple([(starts.index(start), offset, size) for start, offset, size in found])


def places(tensors: Sequence[Tensor]) -> Hashable:
    """Which tensors share memory, and where each begins in its own."""
    return relative(place_of_each(tensors))


def asked_by(watcher: str) -> tuple[str, str]:
    """The module and function whose code called the function that the module ``watcher`` notes."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        if name not in (__name__, watcher) and not name.startswith(("torch", "contextlib")):
            return name, frame.f_code.co_name
        frame = frame.f_back
    return "", ""


class Surroundings:
    """By what functions of torch do their work, besides arguments: modes, and random generators.

    Nothing but these functions may change it between two looks.

    Args:
        given: tensors, on whose devices they work; None: it is known that nothing else does.
    """

    def __init__(self, given: Iterable[Tensor] | None) -> None:
        numbers = sorted({t.get_device() for t in given or () if t.is_cuda})
        others = [torch.cuda.default_generators[number] for number in numbers]
        self._generators = None if given is None else [torch.default_generator, *others]
        self._seen: Hashable = None
        self._changed = False

    def look(self) -> None:
        """Remembers it, after a call."""
        self._seen = self._now()

    def compare(self) -> None:
        """Notes whether it has changed since, before the next call."""
        self._changed |= self._now() != self._seen

    def refuse_changes(self) -> None:
        """Raises NotRecordableError if it has."""
        if self._changed:
            raise NotRecordableError("autocast, the default dtype or a random generator is set")

    def _now(self) -> Hashable:
        if self._generators is None:
            return None
        states = [generator.get_state().numpy().tobytes() for generator in self._generators]
        autocast = [
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
            for kind in ("cpu", "cuda")
        ]
        return torch.get_default_dtype(), *autocast, *states
