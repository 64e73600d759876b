"""What recorded calls are told apart by, and the guards that compare it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, profiler
from torch.nn import functional as F

from ... import torch_internals as internals
from ...attention.cache import PendingCache
from ...core.change_tracking import Clock
from ...events import telling
from ...quantization.recorded import QuantizedCalls
from .functions import NotRecordableError, places
from .recorder import Recorder

PLAIN_TYPES = (Tensor, nn.Parameter)


def all_inputs(
    arguments: tuple[Tensor, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
) -> list[Tensor]:
    """The input, parameters, extra inputs, and what operations keep."""
    x, parameters, extra_inputs, kept = arguments
    return [x, *parameters, *extra_inputs, *kept]


def is_plain(t: Tensor) -> bool:
    """Whether a tensor has sizes, strides and memory, and means no more than that."""
    return type(t) in PLAIN_TYPES and t.layout is torch.strided and not t.is_nested


def kind_of(tensors: Sequence[Tensor]) -> Hashable:
    """What calls are counted by."""
    return tuple([(t.shape, t.stride()) for t in tensors])


class Keywords(NamedTuple):
    """The keywords of operations.

    Attributes:
        tensors: among them.
        caches: among them.
        facts: what they are besides; None without any.
    """

    tensors: tuple[Tensor, ...]
    caches: tuple[PendingCache, ...]
    facts: Hashable


_NO_KEYWORDS = Keywords((), (), None)


def keywords_of(kwargs: Sequence[dict[str, Any]] | None) -> Keywords | None:
    """The keywords of operations, taken apart.

    None: one is neither a tensor without a gradient nor a number, a text or a cache whose state
    returns, and not compared.
    """
    if kwargs is None:
        return _NO_KEYWORDS
    tensors: list[Tensor] = []
    caches: list[PendingCache] = []
    facts: list[Hashable] = []
    for n, own in enumerate(kwargs):
        if not own:
            continue
        for name, value in own.items():
            if isinstance(value, Tensor) and not value.requires_grad:
                tensors.append(value)
                facts.append((n, name))
            elif value is None or type(value) in _COMPARED:
                facts.append((n, name, type(value), repr(value)))
            elif type(value) is PendingCache and (state := value.state()) is not None:
                caches.append(value)
                facts.append((n, name, state))
            else:
                return None
    return Keywords(tuple(tensors), tuple(caches), tuple(facts))


_COMPARED = (bool, int, float, str)


def is_aligned(t: Tensor) -> bool:
    """Whether a tensor begins where prepared launches expect it."""
    return t.is_cpu or not t.data_ptr() & 15


def layout_of(t: Tensor | None) -> Hashable:
    """All that decides about a tensor, besides who has it."""
    if t is None or not is_plain(t):
        return None if t is None else "not plain"
    return type(t), t.shape, t.stride(), t.dtype, is_aligned(t)


def guard_of_call(
    recorder: Recorder,
    arguments: tuple[Tensor, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
    cached: dict[int, weakref.ref[Tensor]],
    unwritten: Sequence[Tensor],
    quantized: QuantizedCalls | None,
) -> Callable[..., bool]:
    """A function of the same arguments: whether a call decides everything as the recorded one did.

    The guard of the program has compared dtypes and modes of the input, extra inputs and
    parameters, and the shapes of parameters.

    Args:
        recorder: has watched the call.
        arguments: of it.
        unwritten: the first ones of what operations keep, without scales.
        quantized: of the program.
    """
    x, parameters, extra_inputs, kept = arguments
    names: dict[str, Any] = {
        "__builtins__": {},
        "len": len,
        "strided": torch.strided,
        "type": type,
        "map": map,
        "tuple": tuple,
        "Tensor": Tensor,
        "Parameter": nn.Parameter,
        "telling": telling._State,
        "Clock": Clock,
        "is_inference": torch.is_inference_mode_enabled,
        "default_dtype": torch.get_default_dtype,
        "deterministic": torch.are_deterministic_algorithms_enabled,
        "num_threads": torch.get_num_threads,
        "functorch": internals.transforms_active,
        "profiler": profiler,
        "forward_ad": forward_ad,
        "quantized": quantized,
        "F": F,
        "attention": F.scaled_dot_product_attention,
        **{f"read{n}": read for n, read in enumerate(recorder.assumed)},
    }
    numbers: dict[Hashable, str] = {}

    def constant(value: Hashable) -> str:
        name = numbers.setdefault(value, f"c{len(numbers)}")
        names[name] = value
        return name

    def is_like(name: str, t: Tensor, *, shape: bool) -> Iterator[str]:
        yield f"type({name}) is {type(t).__name__}"
        if shape:
            yield f"{name}.layout is strided"
            yield f"{name}.shape == {constant(t.shape)}"
        yield f"{name}.stride() == {constant(t.stride())}"

    _refuse_expanded(parameters)
    terms = [*is_like("x", x, shape=True)]
    for n, t in enumerate(extra_inputs):
        terms += is_like(f"extra_inputs[{n}]", t, shape=True)
        terms.append(f"extra_inputs[{n}].device == {constant(t.device)}")
    terms += ["not telling.subscriptions", f"Clock.states == {Clock.states}"]
    terms += [
        "not functorch()",
        "not profiler._is_profiler_enabled",
        "forward_ad._current_level < 0",
        f"default_dtype() is {constant(torch.get_default_dtype())}",
    ]
    terms.append("F.scaled_dot_product_attention is attention")  # context_parallel replaces it
    terms.append("is_inference()" if torch.is_inference_mode_enabled() else "not is_inference()")
    if x.is_cpu:
        terms.append(f"num_threads() == {torch.get_num_threads()}")
        terms.append(f"deterministic() is {torch.are_deterministic_algorithms_enabled()}")
    for n, t in enumerate(parameters):
        terms += is_like(f"parameters[{n}]", t, shape=False)
    terms.append(f"len(kept) == {len(kept)}" if kept else "not kept")
    if quantized is not None:
        terms.append(f"quantized.permit({constant(quantized.facts())})")
    for n, t in enumerate(unwritten):
        if n in cached:
            names[f"cached{n}"] = cached[n]
            terms.append(f"kept[{n}] is cached{n}()")
            continue
        terms += is_like(f"kept[{n}]", t, shape=True)
        terms.append(f"kept[{n}].dtype is {constant(t.dtype)}")
        terms.append(f"kept[{n}].device == {constant(t.device)}")
    terms += [f"{_read(a)} is {_read(b)}" for a, b in recorder.same]
    terms += [f"{_read(a)}.{name} == {constant(v)}" for (a, name), v in recorder.answers.items()]
    terms += [f"read{n}() == {constant(v)}" for n, v in enumerate(recorder.assumed.values())]
    if recorder.places:
        names["places"] = places
        listed = ", ".join(map(_read, recorder.places))
        terms.append(f"places([{listed}]) == {constant(recorder.places_of_given())}")
    if x.is_cuda:
        names |= {"current_device": internals.cuda_device, "modes": internals.attention_settings}
        terms.append(f"current_device() == {x.get_device()}")
        # The guard of the program compares no devices of parameters, and launches take addresses.
        terms += [
            f"parameters[{n}].get_device() == {t.get_device()}" for n, t in enumerate(parameters)
        ]
        terms.append(f"modes() == {constant(internals.attention_settings())}")
        terms.append(f"not ({_addresses((x, parameters, extra_inputs, unwritten))}) & 15")
    text = "lambda x, parameters, extra_inputs, kept: " + " and ".join(terms)
    guard: Callable[..., bool] = eval(text, names)
    return guard


def _addresses(
    arguments: tuple[Tensor, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
) -> str:
    """The text of the addresses of all tensors, joined bit by bit.

    Raises:
        NotRecordableError: one is not a multiple of 16 bytes.
    """
    if any(not is_aligned(t) for t in all_inputs(arguments)):
        raise NotRecordableError("a tensor begins at no multiple of 16 bytes")
    _, parameters, extra_inputs, kept = arguments
    given = ["x", *(f"extra_inputs[{n}]" for n in range(len(extra_inputs)))]
    given += [f"parameters[{n}]" for n in range(len(parameters))]
    given += [f"kept[{n}]" for n in range(len(kept))]
    return " | ".join(f"{name}.data_ptr()" for name in given)


def _refuse_expanded(parameters: Sequence[Tensor]) -> None:
    """Raises NotRecordableError for strides that may be those of a layout that is not strided."""
    if any(0 in t.stride() and t.numel() > 1 for t in parameters):
        raise NotRecordableError("a parameter is expanded")


def _read(name: str) -> str:
    """How a guard names what lines call by a short name."""
    if name == "x":
        return name
    rows = {"p": "parameters", "e": "extra_inputs", "k": "kept"}
    return f"{rows[name[0]]}[{name[1:]}]"
