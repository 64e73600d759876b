"""Masks and biases of attention: the inputs that they are, or how they are made."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from .arguments import is_number
from .dataflow import Value
from .kept import KeptError
from .made import made_of
from .operations import Made, Mask
from .replay import indices_like, origin_of, source_of
from .scores import Core
from .values import Values, computed

# Numbers below may hide all keys of a query, of which kernels have no exact gradients.
_LEAST = -128.0


@dataclass
class _Added:
    """What is added to scores, and what chooses between that and a number.

    Attributes:
        masks: that are inputs.
        made: of sizes and parameters.
        count: how many tensors there are.
        causal: whether keys after the query are hidden by a number.
    """

    masks: list[Mask]
    made: list[Made]
    count: int = 0
    causal: bool = False


def masks_of(
    values: Values, core: Core, heads: int
) -> tuple[tuple[Mask, ...], int | Made | None, bool]:
    """The masks, of numbers that are added or the one that is bool, the bias, and causality.

    A bias is what needs a gradient, or is not given; and, where masks hide keys by numbers, all
    that is added besides: kernels have no exact gradients of rows all of whose keys are hidden so.

    Raises:
        KeptError: something else is added, or it is joined in another way.
    """
    added = _Added([], [])
    for v, factor in core.masks:
        # Of a larger number it would not be seen that it hides keys.
        if factor != 1 and not (0 < factor < 1 and v.meta.is_floating_point()):
            raise KeptError(computed(v, "scales a mask of attention, made by"))
        _add_parts(values, v, factor, heads, added)
    inputs = values.dataflow.inputs
    hiding = [m for m in added.masks if m.lowest is not None]
    numbers = [m for m in added.masks if m.lowest is None]
    of_numbers = [m.hides or inputs[m.input].meta.dtype != torch.bool for m in numbers]
    if any(m.factor != 1 for m in hiding):
        raise KeptError("scales a mask of attention that hides keys by numbers")
    if (added.count > 1 or core.transposed) and not all(of_numbers):
        raise KeptError("adds masks of attention that are not all numbers")
    trained = [m for m in numbers if inputs[m.input].requires_grad]
    differentiated = core.q.requires_grad or trained
    if not (added.causal or added.made or trained or (hiding and differentiated)):
        return tuple(added.masks), None, core.causal
    biases = numbers if hiding or added.causal else trained
    if len(biases) + len(added.made) > 1:
        raise KeptError("adds several biases to the scores of attention")
    if len(hiding) + added.causal > 1:
        raise KeptError("hides keys by large numbers several times")
    rearranged = any(m.hides or m.of_keys or m.folded for m in biases)
    if len(core.q.shape) == 3 or rearranged or any(m.factor != 1 for m in added.masks):
        raise KeptError("adds a bias to scores that are scaled, or of batch and heads in one")
    bias = added.made[0] if added.made else biases[0].input if biases else None
    masks = tuple(m for m in added.masks if m not in biases)
    return masks, bias, core.causal or added.causal


def conditions_of(values: Values, core: Core) -> tuple[tuple[Made, bool], ...]:
    """The conditions on which keys are hidden: how they are made, and whether True is seen.

    Raises:
        KeptError: one is made of something else than masks, or stands beside masks.
    """
    found = []
    for condition, seen in core.conditions:
        made = made_of(values.dataflow, condition, ("parameter", "buffer", "input"))
        if made is None:
            raise KeptError(f"{computed(condition)}, in a condition that hides keys of attention")
        if len(core.q.shape) == 3 and len(condition.shape) > 2:
            raise KeptError("hides keys of scores that are of batch and heads in one")
        found.append((made, seen))
    if found and core.masks:
        raise KeptError("hides keys by -inf, and adds masks of attention")
    return tuple(found)


def _add_parts(values: Values, v: Value, factor: float, heads: int, added: _Added) -> None:
    """Notes the parts that a mask is the sum of, or that choose between another and a number."""
    op, args = values.term(v)
    if op == "add" and isinstance(args[1], Value):
        for part in args:
            _add_parts(values, part, factor, heads, added)
        return
    if op == "where" and len(args) == 3 and args[0].meta.dtype == torch.bool:
        # Under autocast that of the keys' dtype, in a mask of another.
        dtypes = {v.meta.dtype, *values.dtypes}
        lowest = args[2] if args[2] in [torch.finfo(dtype).min for dtype in dtypes] else None
        if isinstance(args[1], Value) and is_number(lowest):
            _add_parts(values, args[1], factor, heads, added)
            added.count += 1
            if _is_causal(values, args[0]):
                added.causal = True
            else:
                hiding = _input_of(values, args[0], heads, factor)
                added.masks.append(replace(hiding, lowest=lowest))
            return
    added.count += 1
    made = made_of(values.dataflow, v) if v.meta.is_floating_point() else None
    if made is not None and made.least_constant < _LEAST:
        raise KeptError(f"{computed(v)} with large negative numbers, in the mask of attention")
    if made is not None and values.term(v).op == "zeros":
        return
    if made is None:
        added.masks.append(_input_of(values, v, heads, factor))
    else:
        added.made.append(made)


def _is_causal(values: Values, seen: Value) -> bool:
    """Whether a mask says that a position is not before another, for as many queries as keys."""
    op, args = values.term(seen)
    if op not in ("ge", "__ge__") or len(seen.shape) < 2 or seen.shape[-1] != seen.shape[-2]:
        return False
    positions = [source_of(values, v) if isinstance(v, Value) else None for v in args]
    for v in positions:
        node = None if v is None else v.node
        if v is None or node is None or node.op != "arange" or v.shape != seen.shape[-1:]:
            return False
        if len(node.args) != 1 or set(node.kwargs) - {"device"}:
            return False
    at, other = (origin_of(v, p) for v, p in zip(args, positions) if p is not None)
    expected = torch.ones(seen.shape[-2:], dtype=torch.bool, device="cpu").tril()
    return bool((at >= other).expand(seen.shape).eq(expected).all())


def _input_of(values: Values, v: Value, heads: int, factor: float) -> Mask:
    """The input that a mask is, broadcast to (b, h, s, s) or (b h, s, s)."""
    source = source_of(values, v)
    mask = source if source is None else _hiding(values, source)
    if source is None or mask is None or mask.origin != "input":
        raise KeptError(f"{computed(v if source is None else source)}, in the mask of attention")
    number, hides = values.dataflow.inputs.index(mask), mask is not source
    places, got = indices_like(source).long(), origin_of(v, source)
    if got.dim() == 3 and not len(got) % heads:
        got = got.unflatten(0, (-1, heads))
    if places.dim() == 3 and got.dim() == 4 and len(places) == got.shape[0] * got.shape[1]:
        count = got.shape[1]
        if torch.equal(got, places.unflatten(0, (-1, count))):
            return Mask(number, mask.shape, hides, folded=count, factor=factor)
    for of_keys in (False, True)[: places.dim()]:
        want = places[:, None, None] if of_keys else places
        with suppress(RuntimeError):  # of shapes that do not broadcast
            if torch.equal(got, want.expand(got.shape)):
                return Mask(number, mask.shape, hides, of_keys, factor=factor)
    raise KeptError(computed(v, "rearranges its mask by"))


def _hiding(values: Values, v: Value) -> Value:
    """The bool mask where a value is -inf, which is 0 elsewhere; or itself."""
    op, args = values.term(v)
    if op != "masked_fill" or args[2:] != (-math.inf,) or args[1].shape != v.shape:
        return v
    return args[1] if values.term(args[0]).op == "zeros_like" else v
