"""The forward of a module that was replaced: what a call is given, and who computes it."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opfuser import Plan
from opfuser.attention.cache import (
    Extended,
    StoresLast,
    extended_copy,
    is_of_transformers,
    is_replacing,
    state_of_layer,
)
from opfuser.attention.masks import hides_queries

from . import structures
from .reading import Reader, Refused, ReplacedForward
from .structures import Built, Rotary
from .verification import Verified, run, tables_of

__all__ = ["Fallback", "Forward", "Refusal", "Shared"]

_logger = logging.getLogger(__name__)

# Arguments that attention by torch's function does not read, or that others say better.
_NOT_READ = frozenset(
    "position_ids use_cache cache_position num_items_in_batch output_hidden_states return_dict "
    "output_router_logits".split()
)

# Names that layers have for the cache of all of them.
_CACHES = "past_key_values", "layer_past"


class Fallback(Exception):  # noqa: N818 - an answer, not a mistake
    """Raised with the reason why the untouched forward takes a call."""


class Given(NamedTuple):
    """The arguments of a call of a module with attention."""

    x: Tensor
    mask: Tensor | None = None
    is_causal: bool | None = None
    tables: tuple[Tensor, Tensor] | None = None
    cache: Any | None = None


class Refusal(NamedTuple):
    """In place of a sequence.

    Attributes:
        why: the module cannot be replaced.
        read: as of :class:`structures.Built`.
    """

    why: str
    read: Reader


@dataclass(frozen=True, eq=False)
class LayerCache(StoresLast):
    """What attention sees of a cache of transformers: the keys and values of one layer.

    Attributes:
        cache: of all layers.
        layer: its number.
        first: whether, without a mask, the cache was empty, and what it has besides the keys of
            this call is room for later ones.
    """

    cache: Any
    layer: int
    first: bool

    def extended(self, k: Tensor, v: Tensor) -> Extended:
        """Returns all keys and values, and what appends those of the call.

        A static layer writes to its tensors, and an offloaded one moves them: these append at once,
        as they do in transformers.
        """
        layer, length = self._replacing, k.shape[2]
        if layer is not None:
            more = extended_copy(layer, k, v)
        else:
            keys, values = self.cache.update(k, v, self.layer)
            more = Extended(keys, values, None)
        if self.first and length > 1 and more.keys.shape[2] > length:
            keys, values = more.keys[:, :, :length], more.values[:, :, :length]
            more = more._replace(keys=keys, values=values)
        return more

    def state(self) -> Hashable:
        layer = self._replacing
        state = None if layer is None else state_of_layer(layer)
        return None if state is None else (state, self.first)

    @functools.cached_property
    def _replacing(self) -> Any | None:
        """Returns the layer if its ``update`` replaces its tensors and is all that happens."""
        cache, number = self.cache, self.layer
        layers = getattr(cache, "layers", None)
        if layers is None or not is_of_transformers(cache) or getattr(cache, "offloading", False):
            return None
        missing = getattr(cache, "layer_class_to_replicate", None)
        while missing is not None and len(layers) <= number:  # as its update does, with empty ones
            layers.append(missing())
        if len(layers) <= number or not is_replacing(layers[number]):
            return None
        return layers[number]


class Shared:
    """What the replaced forwards of a model have in common.

    Attributes:
        verified: what its modules compute.
    """

    def __init__(self, verified: Verified) -> None:
        self.verified = verified
        self._tables: tuple[Any, Any, Rotary, Tensor] | None = None

    def tables(self, given: tuple[Tensor, Tensor], rotary: Rotary) -> Tensor:
        """Tables for RotaryEmbedding, made once for all layers that are given the same ones."""
        cos, sin = given
        last = self._tables
        if last is not None and last[0]() is cos and last[1]() is sin and last[2] == rotary:
            return last[3]
        made = tables_of(cos, sin, rotary)
        self._tables = weakref.ref(cos), weakref.ref(sin), rotary, made
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": None}


class Forward(ReplacedForward):
    """Stands in a module as its ``forward``, and runs a sequence with the module's parameters.

    The sequence is built at the first call, and again when the module has changed. The untouched
    forward takes what the sequence cannot do.

    Attributes:
        module: in which it stands.
        kind: one of ``structures.KINDS``.
        fallbacks: how many calls the untouched forward took, by the reason.
    """

    def __init__(self, module: nn.Module, kind: str, shared: Shared) -> None:
        self.module = module
        self.kind = kind
        self.shared = shared
        self.fallbacks: Counter[str] = Counter()
        self._forget()

    def _forget(self) -> None:
        self._built: dict[bool | None, Built | Refusal] = {}
        self._names: tuple[str, ...] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {n: v for n, v in self.__dict__.items() if n not in ("_built", "_names")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def __signature__(self) -> inspect.Signature:
        whole = inspect.signature(type(self.module).forward)
        return whole.replace(parameters=list(whole.parameters.values())[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], nn.Module):  # made a method by what has unwrapped it
            return self._of(args[0])(*args[1:], **kwargs)
        if self.reverted or torch.compiler.is_compiling():
            return self.untouched(*args, **kwargs)
        try:
            return self._replaced(args, kwargs)
        except Fallback as fallback:
            self.fallbacks[str(fallback)] += 1
        return self.untouched(*args, **kwargs)

    def _of(self, module: nn.Module) -> Forward:
        if module is not self.module:  # a copy
            module.__dict__["forward"] = own = type(self)(module, self.kind, self.shared)
            return own
        return self

    def _replaced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the sequence returns.

        Raises:
            Fallback: it does not take this call.
        """
        given = self._given(args, kwargs)
        built = self.built(False if given.mask is not None else given.is_causal)
        self._check(given, built)
        return self._computed(given, built)

    @property
    def counts(self) -> tuple[tuple[str, int], ...]:
        """The fallbacks, in order of the reasons."""
        return tuple(sorted(self.fallbacks.items()))

    def untouched(self, *args: Any, **kwargs: Any) -> Any:
        """What the class's forward returns."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def built(self, causal: bool | None = None) -> Built:
        """The sequence for calls whose attention is causal, or not, or as the module says.

        Raises:
            Fallback: the module, as it is now, cannot be replaced.
        """
        built = self._built.get(causal)
        if built is None or not built.read.is_current():
            built = self._built[causal] = self._build(causal)
        if isinstance(built, Refusal):
            raise Fallback(built.why)
        return built

    def _build(self, causal: bool | None) -> Built | Refusal:
        verified = self.shared.verified
        try:
            choice = verified.choice(self.kind, self.module)
            return structures.build(self.kind, self.module, choice, verified, causal=causal)
        except Refused as refused:
            return Refusal(str(refused), Reader.of_all(self.module))

    def plan(self) -> Plan:
        """That of a training step, in the dtype of the parameters."""
        built = self.built()
        built.follow()
        first = next(built.sequence.parameters())
        like: Any = {"dtype": first.dtype, "device": first.device}
        with torch.enable_grad():
            x = torch.empty(1, 2, built.features, requires_grad=True, **like)
            return built.sequence.plan(x)

    def refusal(self) -> str:
        """Why the module, as it is now, cannot be replaced; empty if it can."""
        try:
            self.built()
        except Fallback as fallback:
            return str(fallback)
        return ""

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        names = self._names
        if names is None:
            names = self._names = tuple(self.__signature__.parameters)
        if len(args) > len(names):
            raise Fallback("is called with more arguments than its forward names")
        given = dict(zip(names, args))
        given.update(kwargs)
        x = given.pop(names[0], None)
        if not isinstance(x, Tensor):
            raise Fallback(f"is called without the tensor {names[0]}")
        found = Given(x)
        if self.kind in ("attention", "layer"):
            mask = given.pop("attention_mask", None)
            tables = given.pop("position_embeddings", None)
            cache = None
            for name in _CACHES:
                passed = given.pop(name, None)
                cache = passed if cache is None else cache
            found = Given(x, mask, given.pop("is_causal", None), tables, cache)
        for name, value in given.items():
            if name not in _NOT_READ and value is not None and value is not False:
                raise Fallback(f"{name} is given")
        return found

    def _check(self, given: Given, built: Built) -> None:
        """Raises Fallback where the sequence cannot do what the module would."""
        x, mask, _, tables, cache = given
        # Attention itself is asked for its weights, others may have modules inside that are.
        if (built.read.captures or self.kind == "attention") and _collects_inside():
            raise Fallback("outputs of modules inside are collected")
        if built.attend is None:
            return
        if x.dim() != 3:
            raise Fallback("its input has not the dimensions batch, sequence, features")
        if mask is not None and not _fits(mask):
            raise Fallback("its mask is no constant tensor of four dimensions")
        if mask is not None and torch.is_grad_enabled() and hides_queries(mask):
            raise Fallback("its mask hides all keys of a query by large numbers, not by False")
        if (built.turns is None) != (tables is None):
            raise Fallback(
                "position_embeddings are given" if tables else "has no tables to turn by"
            )
        if built.turns is not None and not _are_tables(tables, built.turns[1].size):
            raise Fallback("its tables of cosine and sine are of another shape")
        if cache is not None:
            self._check_cache(cache, built)

    def _check_cache(self, cache: Any, built: Built) -> None:
        layer = getattr(built.holder, "layer_idx", None)
        if layer is None or hasattr(cache, "self_attention_cache"):
            raise Fallback("its cache is not one of this layer alone")
        if torch.is_grad_enabled() and (
            cache.get_seq_length(layer) or getattr(cache, "is_compileable", False)
        ):
            raise Fallback("gradients may be needed, and a cache has keys of other calls")

    def _computed(self, given: Given, built: Built) -> Any:
        module = self.module
        if self.kind != "layer" or not (
            module.training and getattr(module, "gradient_checkpointing", False)
        ):
            y = self._run(given.x, given, built)
            return (y, None) if self.kind == "attention" else y
        if given.cache is not None and not getattr(module, "_can_checkpoint_with_cache", False):
            _logger.debug("%s is recomputed in backward, and fills no cache", type(module).__name__)
            given = given._replace(cache=None)
        checkpoint: Any = module._gradient_checkpointing_func
        return checkpoint(functools.partial(self._run, given=given, built=built), given.x)

    def _run(self, x: Tensor, given: Given, built: Built) -> Tensor:
        built.follow()
        tables, cache = None, None
        if built.turns is not None:
            assert given.tables is not None
            tables = self.shared.tables(given.tables, built.turns[1])
        if given.cache is not None:
            layer: Any = getattr(built.holder, "layer_idx")  # noqa: B009
            cache = LayerCache(given.cache, layer, first=given.mask is None and built.sliced)
        return run(built, x, given.mask, tables, cache)


def _fits(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.dim() == 4 and not mask.requires_grad


def _are_tables(tables: Any, size: int) -> bool:
    if not isinstance(tables, tuple) or len(tables) != 2:
        return False
    for t in tables:
        if not isinstance(t, Tensor) or t.dim() != 3 or t.shape[-1] != size or t.requires_grad:
            return False
    return True


def _collects_inside() -> bool:
    """Whether transformers collects outputs of modules inside of layers in this call."""
    found = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(found, "_active_collector", None)
    collected = None if collector is None else collector.get()
    names: list[str] = list(collected or ())
    return any(name != "hidden_states" and not name.startswith("_") for name in names)
