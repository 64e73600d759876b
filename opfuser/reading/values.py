"""The values of a dataflow, seen past what does not change them."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache

import torch

from .arguments import CASTS, Term, term_of
from .dataflow import Dataflow, Node, Value, values_in
from .kept import KeptError


class Values:
    """Looks at the values of one dataflow whose stream is of one dtype.

    Casts to fp32, and to what holds every number of the stream's dtype, are passed: norms and
    softmax are computed in fp32 where the stream is in half precision, as they are in opfuser's
    operations, which compute in fp64 where it is in fp64.

    Args:
        dataflow: whose values they are.
        dtype: of the stream.
        autocast: the dtype of linear functions under autocast, to which the stream may be rounded
            anywhere then; None is no autocast.

    Attributes:
        dtypes: that values may have where operations meet.
        default_eps: the eps of a norm that is called with None.
    """

    def __init__(
        self, dataflow: Dataflow, dtype: torch.dtype, autocast: torch.dtype | None = None
    ) -> None:
        self.dataflow = dataflow
        self.dtypes = (dtype,) if autocast is None else (dtype, autocast)
        self.autocast = autocast
        self._narrowest = self.dtypes[-1]
        wide = torch.promote_types(dtype, torch.float32)
        self.default_eps = torch.finfo(wide).eps
        self._nodes = [(values_in((n.args, n.kwargs)), n.results) for n in dataflow.nodes]
        self._descendants = lru_cache(None)(self._find_descendants)
        self.term = lru_cache(None)(self._term)

    def passed(self, v: Value) -> tuple[Value, ...]:
        """The value, and those that it equals, up to the first that something is computed by."""
        out = [v]
        while (inner := self._same(out[-1])) is not None:
            out.append(inner)
        return tuple(out)

    def peel(self, v: Value) -> Value:
        """The last of :meth:`passed`.

        Raises:
            KeptError: numbers were rounded to a dtype that is narrower than the stream's.
        """
        while (inner := self._same(v)) is not None:
            v = inner
        return v

    def is_cast(self, x: Value) -> bool:
        """Whether a cast or a view of a value is read in its place somewhere."""
        made = (v for _, results in self._nodes for v in results if self.equals(v, x))
        return any(
            v.node is not None and (v.node.op not in CASTS or v.meta.dtype != x.meta.dtype)
            for v in made
        )

    def equals(self, v: Value, other: Value) -> bool:
        """Whether ``other`` is among :meth:`passed` of ``v``."""
        with suppress(KeptError):
            return other in self.passed(v)
        return False

    def _same(self, v: Value) -> Value | None:
        """What the node of a value did not change; None if it computed something."""
        if v.node is None:
            return None
        op, args = term_of(v.node)
        x = args[0] if args else None
        if not isinstance(x, Value):
            return None
        if op == "cast":
            if not v.meta.is_floating_point() or not x.meta.is_floating_point():
                return None
            if not self.holds_stream(v.meta.dtype):
                raise KeptError(computed(v, f"rounds to {_name(v.meta.dtype)} by"))
            return x
        if op == "dropout":
            return x if not args[2] or args[1] == 0 else None
        if op == "copy":
            return x
        # What is explained are operations on rows, whose order this leaves as it is.
        rows = op in ("reshape", "flatten", "unflatten", "squeeze", "unsqueeze")
        return x if rows and v.meta.dtype == x.meta.dtype and _keeps_rows(v, x) else None

    def _term(self, v: Value) -> Term:
        """The term of a value's node, past what changes nothing."""
        v = self.peel(v)
        if v.node is None or v.node.effect:
            return Term("", ())
        if v.meta.is_floating_point() and not self.holds_stream(v.meta.dtype):
            raise KeptError(computed(v, f"rounds to {_name(v.meta.dtype)} by"))
        return term_of(v.node)

    def holds_stream(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32 or torch.promote_types(dtype, self._narrowest) == dtype

    def is_ancestor(self, of: Value, v: Value) -> bool:
        """Whether ``v`` was computed from ``of``, or is it."""
        return v in self._descendants(of)

    def _find_descendants(self, of: Value) -> set[Value]:
        """What was computed from a value, and itself."""
        found = {of}
        for operands, results in self._nodes:
            if not found.isdisjoint(operands):
                found.update(results)
        return found


def _keeps_rows(v: Value, x: Value) -> bool:
    return bool(v.shape) and bool(x.shape) and v.shape[-1] == x.shape[-1]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def computed(v: Value, verb: str = "computes") -> str:
    """The reason that a value's operation is not explained."""
    if v.node is None:
        return f"reads {v.origin} {v.name}" if v.origin != "input" else f"reads its input {v.name}"
    if v.node.op == "call_module":
        return f"calls '{v.node.place}', which has hooks"
    return located(v.node.effect or f"{verb} {v.node.op}", v.node)


def located(text: str, node: Node) -> str:
    """A text about a node, with its place."""
    return f"{text} in '{node.place}'" if node.place else text
