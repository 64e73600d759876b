"""The heads of attention: which columns of a projection they are, and what is done to them.

Letters: b batch, h heads, s sequence, d entries of a head.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .dataflow import Value
from .kept import KeptError
from .norms import norm_of
from .operations import Norm, Rows
from .replay import evaluate, indices_like, leaves_of, origin_of, random_like, source_of
from .values import Values, computed

_CLOSE = 1e-10


class Turn(NamedTuple):
    """How heads turn: arguments of ``operations.Rotary``.

    Attributes:
        order: of the entries of each head, in which those that turn are the first; empty if they
            are.
    """

    size: int
    interleaved: bool
    tables: tuple[int | Rows, ...]
    repeated: str
    backwards: bool = False
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class HeadsFound:
    """The queries, keys or values of attention.

    Attributes:
        sources: the outputs of projections: side by side, a row of columns for each token.
        inputs: of the projections.
        tokens: b and s.
        columns: (h, d), the columns that are the entries of each head.
        steps: what is done to heads, first to last.
        scale: a factor of them all.
    """

    sources: tuple[Value, ...]
    inputs: frozenset[Value]
    tokens: tuple[int, int]
    columns: Tensor
    steps: tuple[Norm | Turn, ...]
    scale: float

    @property
    def order(self) -> tuple[int, ...]:
        """Order of the entries of each head, if it is another than the module's."""
        return next((step.order for step in self.steps if isinstance(step, Turn)), ())


def heads_of(
    values: Values,
    v: Value,
    projected: Callable[[Value], Value | None],
    *,
    transposed: bool = False,
    shares: bool = False,
    count: int = 0,
    sequence_first: bool = False,
    length: int | None = None,
) -> HeadsFound:
    """Where heads come from, and what was done to them.

    Args:
        values: of the dataflow.
        v: the heads (b, h, s, d), or (b, h, d, s) if they are ``transposed``.
        projected: the input of a projection, of what it returns; None for others.
        transposed: as products with keys read them.
        shares: whether they are (b, g, h, d), of one token each, h of them beside a head of keys.
        count: of heads, if these are (b h, s, d).
        sequence_first: whether rows are those of (s, b, columns).
        length: how many tokens the rows may be of, of which they are the first ones.

    Raises:
        KeptError: something happened to them besides norms, rotary positions and a factor.
    """
    places = indices_like(v).long()
    if count and len(v.shape) == 3:
        places = places.unflatten(0, (-1, count))
    if places.dim() != 4:
        raise KeptError(computed(v, "attends to heads without four dimensions, by"))
    places = places.mT if transposed else places
    places = places.flatten(1, 2).unsqueeze(2) if shares else places
    tokens = places.shape[0], places.shape[2]
    steps: list[Norm | Turn] = []
    scale = 1.0
    while True:
        piece = _piece_of(values, v, projected, places)
        sources, places = piece.sources, piece.places
        inputs = frozenset(x for x in map(projected, sources) if x is not None)
        found = None if inputs else norm_of(values, sources[0], None)
        factor = piece.factor if found is None else piece.factor * found.factor
        if factor != 1 and any(isinstance(step, Norm) for step in steps):
            raise KeptError(computed(v, "scales heads before their norm by"))
        scale *= factor
        steps += [piece.turn] if piece.turn else []
        if found is None:
            ordered = places.transpose(0, 2) if sequence_first else places
            columns = _columns(ordered, sources, length or ordered.shape[2])
            whole = HeadsFound(sources, inputs, tokens, columns, tuple(steps[::-1]), scale)
            if whole.order and len(steps) > 1:
                raise KeptError(computed(v, "normalizes heads, and turns their last entries by"))
            return replace(whole, columns=columns[:, list(whole.order)]) if whole.order else whole
        if not _are_rows(places, found.norm.shape):
            raise KeptError(computed(sources[0], "normalizes other than single heads by"))
        steps.append(found.norm)
        v = found.x


class _Piece(NamedTuple):
    """Heads as a rearrangement of rows, those of ``sources`` side by side, perhaps turned."""

    sources: tuple[Value, ...]
    places: Tensor
    factor: float
    turn: Turn | None


def _piece_of(
    values: Values, v: Value, projected: Callable[[Value], Value | None], places: Tensor
) -> _Piece:
    """Follows heads, whose entries are at ``places`` of a value, to the last thing computed."""

    def is_leaf(at: Value) -> bool:
        return projected(at) is not None or norm_of(values, at, None) is not None

    leaves = leaves_of(values, v, lambda at: is_leaf(at) or rows_of(values, at) is not None)
    tables = [leaf for leaf in leaves if _is_table(values, leaf)]
    sources = tuple(leaf for leaf in leaves if leaf not in tables)
    alone = len(sources) == 1
    others = [s for s in sources if not (is_leaf(s) if alone else projected(s) is not None)]
    if not sources or others:
        raise KeptError(f"{computed(others[0] if others else v)}, which attention reads")
    widths = [s.shape[-1] for s in sources]
    rows = sources[0].meta.numel() // widths[0]
    if any(s.meta.numel() != rows * width for s, width in zip(sources, widths)):
        raise KeptError(computed(v, "joins heads of several inputs by"))

    def filled(whole: Tensor) -> dict[Value, Tensor]:
        parts = whole.view(rows, -1).split(widths, -1)
        return {s: part.reshape(s.shape) for s, part in zip(sources, parts)}

    generator = torch.Generator().manual_seed(0)
    y = random_like((rows, sum(widths)), generator)
    for order, form in itertools.product(itertools.permutations(tables), _forms(tables)):
        still = _tables_at_rest(order, form)
        ones = {**filled(torch.ones_like(y)), **still}
        factor = float(evaluate(v, ones).flatten()[places.flatten()[0]])
        if not factor:
            continue
        numbers = torch.arange(y.numel(), dtype=y.dtype, device="cpu")
        moved = evaluate(v, {**filled(numbers), **still}) / factor
        at = moved.round().long().flatten()[places]
        if not 0 <= int(at.min()) <= int(at.max()) < y.numel():
            continue
        factor = 1.0 if math.isclose(factor, 1.0, rel_tol=1e-12) else factor
        heads = factor * y.flatten()[at]

        def computed_with(given: dict[Value, Tensor]) -> Tensor:
            return evaluate(v, {**filled(y), **given}).flatten()[places]

        if not order:
            if _equal(computed_with({}), heads):
                return _Piece(sources, at, factor, None)
            continue
        turn = _turn_of(values, (order, form), heads, computed_with, generator)
        if turn:
            return _Piece(sources, at, factor, _in_order(turn, at[0, 0, 0].tolist()))
    raise KeptError(computed(v, "rearranges or turns heads in an unknown way by"))


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=_CLOSE, atol=_CLOSE)


def _is_table(values: Values, v: Value) -> bool:
    return v.origin == "input" or rows_of(values, v) is not None


def _forms(tables: list[Value]) -> tuple[str, ...]:
    """How one table may hold cosines and sines; empty text for others."""
    both = len(tables) == 1 and not tables[0].meta.is_complex()
    return ("cosines first", "sines first") if both else ("",)


def _tables_at_rest(tables: tuple[Value, ...], form: str) -> dict[Value, Tensor]:
    """Tables of angles that are 0: cosines of 1, sines of 0."""
    if not tables:
        return {}
    shape, is_complex = tables[0].shape, tables[0].meta.is_complex()
    width = shape[-1] // 2 if form else shape[-1]
    angles = torch.zeros((*shape[:-1], width), dtype=torch.float64, device="cpu")
    return dict(zip(tables, _tables_of(angles, form or "once", is_complex)))


def _turn_of(
    values: Values,
    formed: tuple[tuple[Value, ...], str],
    heads: Tensor,
    computed_with: Callable[[dict[Value, Tensor]], Tensor],
    generator: torch.Generator,
) -> Turn | None:
    """How heads (b, h, s, d) turn by tables of cosine and sine, or by complex numbers."""
    tables, form = formed
    if any(table.requires_grad for table in tables):
        raise KeptError("turns heads by tables that need a gradient")
    is_complex = tables[0].meta.is_complex()
    if len(tables) != (1 if is_complex or form else 2) or len({t.shape for t in tables}) > 1:
        return None
    for pairs, repeated in _repetitions(tables[0], form):
        if 2 * pairs > heads.shape[-1]:
            continue
        angles = random_like((*tables[0].shape[:-1], pairs), generator)
        of_tokens = _angles_of_tokens(angles, heads)
        if of_tokens is None:
            continue
        got = computed_with(dict(zip(tables, _tables_of(angles, repeated, is_complex))))
        entries = tuple(range(heads.shape[-1]))
        last = entries[-2 * pairs :] + entries[: -2 * pairs]
        for order, interleaved, backwards in itertools.product(
            (entries, last), (False, True), (False, True)
        ):
            angle = -of_tokens if backwards else of_tokens
            if _equal(got[..., order], _turned(heads[..., order], angle, interleaved)):
                found = tuple(_table(values, t) for t in tables)
                return Turn(2 * pairs, interleaved, found, repeated, backwards, order)
    return None


def _in_order(turn: Turn, columns: list[int]) -> Turn:
    """The turn with the entries that do as neighbors, if they are neighbors in memory.

    Args:
        turn: with all entries of a head in order, those that turn first.
        columns: of the entries of one head.
    """
    half, order = turn.size // 2, turn.order
    pairs = zip(order[:half], order[half : turn.size])
    neighbors = tuple(entry for pair in pairs for entry in pair)
    steps = {columns[b] - columns[a] for a, b in itertools.pairwise(neighbors)}
    if not turn.interleaved and half > 1 and steps == {1}:
        turn, order = turn._replace(interleaved=True), neighbors + order[turn.size :]
    return turn._replace(order=() if order == tuple(range(len(order))) else order)


def _table(values: Values, v: Value) -> int | Rows:
    return rows_of(values, v) or values.dataflow.inputs.index(v)


def rows_of(values: Values, v: Value) -> Rows | None:
    """The rows of a buffer (rows, columns) that a value (batch, tokens, columns) holds."""
    op = "" if v.node is None else v.node.op
    if op not in ("gather", "__getitem__") or len(v.shape) != 3:
        return None
    op, args = values.term(v)
    buffer, numbers = source_of(values, args[0]), args[-1]
    if type(numbers) is tuple and len(numbers) == 1:
        (numbers,) = numbers
    chosen = source_of(values, numbers) if isinstance(numbers, Value) else None
    if buffer is None or chosen is None or len(buffer.shape) != 2 or len(chosen.shape) != 2:
        return None
    if (buffer.origin, chosen.origin) != ("buffer", "input") or chosen.meta.is_floating_point():
        return None
    if op == "gather":  # of whole rows, by the number of each as often as it has columns
        whole, each = indices_like(buffer).long(), indices_like(chosen).long()
        of_rows = origin_of(args[0], buffer).equal(whole.expand(args[0].shape))
        of_each = origin_of(numbers, chosen).equal(each.unsqueeze(-1).expand(numbers.shape))
        if args[1] != 1 or not of_rows or not of_each or v.shape[-1] != buffer.shape[-1]:
            return None
    elif args[0] is not buffer or numbers is not chosen:
        return None
    return Rows(buffer.name, values.dataflow.inputs.index(chosen))


def _repetitions(table: Value, form: str) -> Iterator[tuple[int, str]]:
    """The numbers of pairs that turn, and how a table may hold an angle twice."""
    size = table.shape[-1] if table.shape else 0
    if form:
        if size % 2 == 0:
            yield size // 2, form
        return
    if not table.meta.is_complex() and size % 2 == 0:
        yield size // 2, "halves"
        yield size // 2, "neighbors"
    yield size, "once"


def _tables_of(angles: Tensor, repeated: str, is_complex: bool) -> list[Tensor]:
    if is_complex:
        return [torch.polar(torch.ones_like(angles), angles)]
    if repeated == "cosines first":
        return [torch.cat([angles.cos(), angles.sin()], -1)]
    if repeated == "sines first":
        return [torch.cat([angles.sin(), angles.cos()], -1)]
    if repeated == "halves":
        angles = torch.cat([angles, angles], -1)
    elif repeated == "neighbors":
        angles = angles.repeat_interleave(2, -1)
    return [angles.cos(), angles.sin()]


def _angles_of_tokens(angles: Tensor, heads: Tensor) -> Tensor | None:
    """Angles as (b or 1, 1, s, pairs), if their leading dimensions are those of tokens."""
    batch, _, sequence, _ = heads.shape
    leading = [n for n in angles.shape[:-1] if n != 1]
    if leading == [n for n in (batch, sequence) if n != 1]:
        return angles.reshape(batch, 1, sequence, -1)
    if leading == [sequence] or not leading:
        return angles.reshape(1, 1, -1, angles.shape[-1])
    return None


def _turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """The first entries of heads, turned in pairs (a, b): (a cos - b sin, b cos + a sin)."""
    cos, sin, size = angles.cos(), angles.sin(), 2 * angles.shape[-1]
    turning, rest = x[..., :size], x[..., size:]
    a, b = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    out = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([out, rest], -1)


def _are_rows(places: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether each head is one row of what a norm returns."""
    size = places.shape[-1]
    first = places[..., :1]
    rows = torch.equal(places, first + torch.arange(size)) and not bool((first % size).any())
    return shape == (size,) and rows


def _columns(places: Tensor, sources: tuple[Value, ...], length: int) -> Tensor:
    batch, _, sequence, _ = places.shape
    width = sum(source.shape[-1] for source in sources)
    tokens = torch.arange(batch * length).view(batch, 1, length, 1)[:, :, :sequence]
    columns = places[:1, :, :1] - tokens[:1, :, :1] * width
    whole = sum(source.meta.numel() for source in sources) == batch * length * width
    if not whole or not torch.equal(places, tokens * width + columns):
        raise KeptError(computed(sources[0], "attends to other rows than those of tokens, made by"))
    return columns[0, :, 0]
