"""A sequence of operations that computes a module, and what each call of it is given."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import basic
from ..quantization.operation_state import keep_state_in
from ..sequential import Sequential
from .layer_cache import LayerCache
from .made import Maker
from .operations import Attention, Made, Mask, Reading, Rotary, Rows
from .plain_modules import Around, CachedRows, weights_of


class Alias(NamedTuple):
    """A parameter of the module that an operation reads as its own.

    Attributes:
        parameters, name: where the operation looks.
        source, source_name: where the module holds it.
    """

    parameters: dict[str, Any]
    name: str
    source: dict[str, Any]
    source_name: str


class Argument(NamedTuple):
    """A keyword of an operation, and what makes it of the inputs of a call.

    ``reads_buffers`` says that it is also made of buffers of the module.
    """

    op: nn.Module
    keyword: str
    value: Callable[[Sequence[Any]], Any]
    reads_buffers: bool = False


class Memory(NamedTuple):
    """What makes keys and values, side by side, of another input of a call.

    Attributes:
        sequence: that does.
        input: the number of the input.
        sizes: how many columns are keys, and how many values.
    """

    sequence: Sequential
    input: int
    sizes: tuple[int, int]


class Added(NamedTuple):
    """A bias of attention: an input by its number, or how it is made."""

    bias: int | Made


class Built:
    """A sequence that computes what was read.

    Attributes:
        sequence: of operations, and of children of the module that are called.
        input: the number of the input that it is called with.
        aliases: parameters of the module that its operations read.
        arguments: what else its operations are given.
        conditions: operations of attention, and the conditions on which they see keys.
        cached: operations that extend a cache, and the numbers of their layers there.
        extras: what makes the extra inputs of the sequence, in their order.
        outputs: how many tensors it returns, in a tuple if there are several.
        fills: whether a call extends a cache.
        ones: norms that have no weight, and the names of those of their own.
    """

    def __init__(self, reading: Reading, module: nn.Module) -> None:
        self.input, self.outputs = reading.input, reading.outputs
        self.sequence = Sequential()
        self.aliases: list[Alias] = []
        self.arguments: list[Argument] = []
        self.conditions: list[tuple[basic.DotProductAttention, tuple[tuple[Made, bool], ...]]] = []
        self.cached: list[tuple[basic.DotProductAttention | CachedRows, int]] = []
        self.extras: list[Memory | Added] = []
        self.ones: list[tuple[nn.Module, str]] = []
        self.fills = False
        self._module: Any = module
        self._around, self._tells = Around(), False
        self._weighted: list[tuple[basic.DotProductAttention, Attention]] = []
        self._weights: list[tuple[nn.Module, str]] = []
        self._makers: dict[Made, Maker] = {}
        self._made: tuple[tuple[int, Made], ...] = ()

    @property
    def reads_buffers(self) -> bool:
        """Whether calls are given what is made of buffers of the module."""
        made = any(how.buffers for how in self._makers)
        return made or any(argument.reads_buffers for argument in self.arguments)

    def follow(self) -> None:
        """Takes over the parameters that the module has now."""
        for parameters, name, source, source_name in self.aliases:
            parameters[name] = source[source_name]
        for op, name in self.ones:
            self._set_ones(op, name)

    def forget_module(self) -> None:
        """Leaves stand-ins in the places of parameters, for sequences that are given them."""
        for parameters, name, *_ in self.aliases:
            own = parameters[name]
            stand_in = torch.empty_like(own, device="meta")
            parameters[name] = nn.Parameter(stand_in, requires_grad=own.requires_grad)
        self.aliases, self._module = [], None

    def __call__(self, inputs: Sequence[Any], cache: Any | None = None) -> Any:
        """The output of a call.

        Args:
            inputs: its tensors, in order of arguments and keywords.
            cache: of keys and values of all layers, if it was called with one.
        """
        made = {how: make(inputs) for how, make in self._makers.items()}
        if self.outputs == 1 and not self._tells:
            return self._computed(inputs, cache, made)
        around = self._around
        before = dict(around.__dict__)
        around.inputs, around.cache = inputs, getattr(cache, "cache", cache)
        around.returned = {number: made[how] for number, how in self._made}
        try:
            y = self._computed(inputs, cache, made)
            others = [around.returned[number] for number in range(1, self.outputs)]
        finally:
            around.__dict__.clear()
            around.__dict__.update(before)
        return (y, *others) if others else y

    def _computed(self, inputs: Sequence[Any], cache: Any | None, made: dict[Made, Tensor]) -> Any:
        kwargs: dict[Any, dict[str, Any]] = {}
        for argument in self.arguments:
            kwargs.setdefault(argument.op, {})[argument.keyword] = argument.value(inputs)
        for attend, conditions in self.conditions:
            kwargs.setdefault(attend, {})["mask"] = seen_by(conditions, made)
        for op, layer in self.cached:
            kwargs.setdefault(op, {})["cache"] = LayerCache(cache, layer, op.causal)
        extra: list[Tensor] = []
        for e in self.extras:
            if isinstance(e, Memory):
                extra += e.sequence(inputs[e.input]).split(e.sizes, dim=-1)
            else:
                extra.append(inputs[e.bias] if isinstance(e.bias, int) else made[e.bias])
        y = self.sequence(inputs[self.input], *extra, op_kwargs=kwargs)
        if not self._weighted:
            return y
        y, *packed = y
        for (attend, attention), heads in zip(self._weighted, packed):
            mask = kwargs.get(attend, {}).get("mask")
            self._around.returned.update(weights_of(attention, heads, mask))
        return y

    def leave_scales(self) -> Built:
        """Has the module keep the scales of operations, beside the weights that they read."""
        for op, path in self._weights:
            holder, _, own = path.rpartition(".")
            keep_state_in(op, self._module.get_submodule(holder), own)
        return self

    def _set_ones(self, op: nn.Module, name: str) -> None:
        """Gives a norm that has no weight one that changes nothing."""
        like = next(self._module.parameters(), torch.empty(0))
        weight: Any = op._parameters[name]
        if weight.device != like.device or weight.dtype != like.dtype:
            ones = torch.ones(weight.shape, dtype=like.dtype, device=like.device)
            op._parameters[name] = nn.Parameter(ones, requires_grad=False)


def tables_of(
    op: Rotary, buffers: tuple[tuple[dict[str, Any], str], ...], inputs: Sequence[Any]
) -> Tensor:
    """Tables as RotaryEmbedding takes them, (2, tokens, pairs)."""
    held = iter(buffers)
    given: list[Tensor] = []
    for table in op.tables:
        if isinstance(table, Rows):
            holder, name = next(held)
            given.append(holder[name][inputs[table.numbers]])
        else:
            given.append(inputs[table])
    if op.repeated in ("cosines first", "sines first"):
        given = [*given[0].chunk(2, -1)][:: 1 if op.repeated == "cosines first" else -1]
    elif len(given) == 1:
        given = [given[0].real, given[0].imag]
    if op.repeated == "halves":
        given = [t[..., : t.shape[-1] // 2] for t in given]
    elif op.repeated == "neighbors":
        given = [t[..., ::2] for t in given]
    if op.backwards:
        given[1] = -given[1]
    both = torch.stack(given).flatten(1, -2)
    return both.to(torch.promote_types(both.dtype, torch.float32))


def seen_by(conditions: Sequence[tuple[Made, bool]], made: dict[Made, Tensor]) -> Tensor:
    """One mask of four dimensions, in which True is where a key is seen."""
    each = [made[how] if seen else ~made[how] for how, seen in conditions]
    wide = [t[(None,) * (4 - t.dim())] for t in each]
    return functools.reduce(torch.logical_and, wide)


def mask_of(masks: tuple[Mask, ...], stream: int, inputs: Sequence[Any]) -> Tensor:
    """One mask of four dimensions, in which True is where a key is seen, or which is added."""
    out = None
    for mask in masks:
        given: Tensor = inputs[mask.input]
        if mask.folded:
            given = given.unflatten(0, (-1, mask.folded))
        if mask.factor != 1:
            given = given * mask.factor
        if mask.hides:
            zeros = torch.zeros_like(given, dtype=inputs[stream].dtype)
            given = zeros.masked_fill_(given, -math.inf)
        leading = (slice(None), None, None) if mask.of_keys else (None,) * (4 - given.dim())
        given = given[leading]
        if out is None:
            out = given
        else:
            out = out + given if mask.lowest is None else torch.where(given, out, mask.lowest)
    assert out is not None
    return out
