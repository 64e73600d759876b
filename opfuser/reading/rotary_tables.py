"""Tables of cosine and sine: how they hold each angle twice, which rotations rely on."""

from __future__ import annotations

from .dataflow import Dataflow, Value, values_in
from .kept import KeptError
from .products import product_of
from .replay import origin_of, source_of, undisturbed
from .values import Values, computed

__all__ = ["repetition_of"]


@undisturbed()
def repetition_of(dataflow: Dataflow) -> str:
    """How the tables that a forward returns hold an angle twice: "halves" or "neighbours".

    Args:
        dataflow: of a module that makes tables of cosine and sine, (..., entries of a head).

    Raises:
        KeptError: they are not made of angles, each of which they hold twice in the same way.
    """
    found = {_repetition(dataflow, table) for table in values_in(dataflow.result)}
    if len(found) != 1:
        raise KeptError("returns tables that hold angles in different ways")
    return found.pop()


def _repetition(dataflow: Dataflow, table: Value) -> str:
    values = Values(dataflow, table.meta.dtype)
    product = product_of(values, table, None)
    if len(product.values) != 1 or product.inverse_roots:
        raise KeptError(computed(table, "makes a table by"))
    op, args = values.term(product.values[0])
    if op not in ("cos", "sin"):
        raise KeptError(computed(product.values[0], "makes a table by"))
    angles = values.peel(args[0])
    source = source_of(values, angles)
    if source is not None and source is not angles:
        places = origin_of(angles, source)
        half = places.shape[-1] // 2
        if places[..., :half].equal(places[..., half:]):
            return "halves"
        if places[..., ::2].equal(places[..., 1::2]):
            return "neighbours"
    raise KeptError(f"{computed(angles)}, in place of angles that are there twice")
