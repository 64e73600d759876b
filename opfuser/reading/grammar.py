"""Reads a dataflow from its output back to its input: every operation is explained, or it is kept.

Only what the output depends on is looked at, one operation after another, so that nothing between
two explained operations can be overlooked. An operation with an effect besides its results has to
be inside of a child that is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from .activations import ActivationFound, activations_in, clamped_pair, halves_of
from .attention import attention_of
from .dataflow import Call, Dataflow, Node, Value, values_in
from .kept import KeptError
from .norms import norm_of
from .operations import (
    Activation,
    Bias,
    Called,
    ColumnScale,
    Dropout,
    Embedding,
    Gated,
    Linear,
    MergedLinear,
    Norm,
    Normalised,
    Operation,
    Parallel,
    Projection,
    Reading,
    Residual,
    Scale,
)
from .products import product_of
from .projections import calls_returning, linear_of, only_tensor, vector_of
from .replay import is_layout, undisturbed
from .steps import Step
from .torch_attention import torch_attention_of
from .values import Values, computed, located

__all__ = ["read"]


@undisturbed()
def read(dataflow: Dataflow, autocast: torch.dtype | None = None) -> Reading:
    """The operations that compute the one tensor that a forward returns.

    Args:
        dataflow: of the forward.
        autocast: the dtype of autocast, if it was on.

    Raises:
        KeptError: an operation is not explained, or the result is not one tensor.
    """
    results = list(values_in(dataflow.result))
    if len(results) != 1:
        raise KeptError(f"returns {len(results)} tensors")
    (result,) = results
    whole = _Grammar(Values(dataflow, result.meta.dtype, autocast)).chain(result, None)
    rows, dtypes = whole.source.shape[:-1], {whole.source.meta.dtype, result.meta.dtype}
    if whole.operations and isinstance(whole.operations[0], Embedding):
        rows, dtypes = whole.source.shape, {result.meta.dtype}
    rounds = autocast is not None and whole.source.meta.is_floating_point()
    if rows != result.shape[:-1] or (len(dtypes) > 1 and not rounds):
        raise KeptError("returns another dtype or shape than its input has")
    if whole.tokens - {rows}:
        raise KeptError("attends to other rows than those of its input")
    if len(set(whole.once)) < len(whole.once):
        raise KeptError("reads the result of dropout, or of a child that is called, twice")
    spans = [(c.start, c.end) for c in whole.once if isinstance(c, Call)]
    for number, node in enumerate(dataflow.nodes):
        inside = any(start <= number < end for start, end in spans)
        explained = node in whole.once or node in whole.written
        if node.effect and not explained and not inside:
            raise KeptError(located(node.effect, node))
    return Reading(dataflow.inputs.index(whole.source), whole.operations)


_Rule = Callable[[Value, "Value | None"], "Step | None"]


class _Grammar:
    def __init__(self, values: Values) -> None:
        self.values = values
        self.known: dict[tuple[Value, Value | None, bool], Step | KeptError] = {}
        self.rounded: set[Value] = set()
        self.rules: tuple[_Rule, ...] = (
            self.linear,
            self.embedding,
            self.norm,
            self.dropout,
            self.product,
            self.sum,
            self.torch_attention,
            self.attention,
        )

    def chain(self, v: Value, base: Value | None, *, is_rounded: bool = False) -> Step:
        """What computes a value of ``base``, or without one, of an input.

        ``is_rounded`` says that the next operation rounds the value to the dtype of autocast.

        Raises:
            KeptError: an operation on the way is not explained.
        """
        key = v, base, is_rounded
        found = self.known.get(key)
        if found is None:
            try:
                found = self._chain(v, base, is_rounded)
            except KeptError as why:
                found = why
            self.known[key] = found
        if isinstance(found, KeptError):
            raise found
        return found

    def _chain(self, v: Value, base: Value | None, is_rounded: bool) -> Step:
        end = self.end_of(v)
        if end is base or (base is None and end.origin == "input"):
            return Step((), end, (end,))
        try:
            step = self.step(end, base)._replace(path=(end,))
            if step.operations:
                self.check_rounding(step.operations[-1], v, is_rounded)
                is_rounded = isinstance(step.operations[0], (Linear, MergedLinear, Normalised))
            return self.chain(step.source, base, is_rounded=is_rounded).followed_by(step)
        except KeptError as why:
            for called in self.calls_of(self.values.passed(v), why.reason):
                with suppress(KeptError):
                    return self.chain(called.source, base).followed_by(called)
            raise

    def check_rounding(self, operation: Operation, v: Value, is_rounded: bool) -> None:
        """Raises KeptError if an operation rounds under autocast where the module does not."""
        autocast = self.values.autocast
        if is_rounded or autocast is None or v.meta.dtype == autocast:
            return
        if isinstance(operation, (Norm, Activation, Gated, ColumnScale)):
            raise KeptError(computed(v, f"keeps {v.meta.dtype} under autocast after"))

    def end_of(self, v: Value) -> Value:
        """What a value equals, if that is rounded to the stream's dtype where operations meet."""
        passed = self.values.passed(v)
        end, dtypes = passed[-1], self.values.dtypes
        if end.origin == "input" and not end.meta.is_floating_point():
            return end  # of which an embedding may be read
        if all(p.meta.dtype not in dtypes for p in passed) and end not in self.rounded:
            raise KeptError(computed(end, f"has {end.meta.dtype} beside {dtypes[0]} from"))
        self.rounded.add(end)
        return end

    def calls_of(self, passed: tuple[Value, ...], reason: str) -> list[Step]:
        """The children that return one of these values of one tensor, the innermost first."""
        out = []
        for call in calls_returning(self.values.dataflow, passed):
            x = only_tensor(call)
            assert x is not None  # as such calls have it
            op = Called(call.path, x.shape[-1], passed[-1].shape[-1], reason)
            out.append(Step((op,), x, passed[-1:], once=(call,)))
        return out

    def step(self, v: Value, base: Value | None) -> Step:
        """The last operation, or the last few, that compute a value.

        Raises:
            KeptError: no rule explains it.
        """
        for rule in self.rules:
            found = rule(v, base)
            if found is not None:
                return found
        raise KeptError(computed(v))

    def linear(self, v: Value, base: Value | None) -> Step | None:
        found = linear_of(self.values, v)
        return None if found is None else Step((found.linear,), found.x)

    def embedding(self, v: Value, base: Value | None) -> Step | None:
        op, args = self.values.term(v)
        if op != "embedding":
            return None
        numbers, weight, padding, max_norm, _, by_frequency, sparse = args
        if max_norm is not None or by_frequency or sparse or weight.origin != "parameter":
            raise KeptError(computed(v, "has an unusual table in"))
        count, width = weight.shape
        return Step((Embedding(weight.name, count, width, padding),), numbers)

    def norm(self, v: Value, base: Value | None) -> Step | None:
        found = norm_of(self.values, v, base)
        if found is None:
            return None
        return Step((found.norm, *_scaled(found.factor)), found.x)

    def dropout(self, v: Value, base: Value | None) -> Step | None:
        op, args = self.values.term(v)
        if op != "dropout":
            return None
        return Step((Dropout(float(args[1])),), args[0], once=_drawn(v))

    def product(self, v: Value, base: Value | None) -> Step | None:
        """Activations, gated pairs, and multiplications by a constant."""
        product, reason = product_of(self.values, v, base), None
        for found in activations_in(self.values, product):
            if not found.rest.values:
                return Step((found.activation, *_scaled(found.rest.factor)), found.x)
            if len(found.rest.values) == 1:
                try:
                    return self.gated(found)
                except KeptError as why:
                    reason = reason or why
        if reason is not None:
            raise reason
        if product.inverse_roots or product.values == (v,):
            return None
        scales = [x for x in product.values if vector_of(self.values, x) is not None]
        streams = [x for x in product.values if x not in scales]
        if len(streams) != 1 or streams[0].shape[-1:] != v.shape[-1:]:
            return None
        columns = tuple(ColumnScale(scale.name) for scale in scales)
        return Step((*columns, *_scaled(product.factor)), streams[0])

    def gated(self, found: ActivationFound) -> Step:
        """An activation's result times something else."""
        gate, up = found.x, found.rest.values[0]
        operation = Gated(found.activation)
        clamped = clamped_pair(self.values, gate, up)
        if clamped is not None:
            gate, up, limit, offset = clamped
            operation = Gated(found.activation, limit, offset)
        after = (operation, *_scaled(found.rest.factor))
        whole = halves_of(self.values, gate, up)
        if whole is not None:
            return Step(after, whole)
        merged = self.merged((gate, up), "a gate or what it multiplies,")
        return merged.followed_by(Step(after, merged.source))

    def projection(self, v: Value) -> Step:
        """A linear function, or a child that is called in its place.

        Raises:
            KeptError: it is neither.
        """
        found = linear_of(self.values, v)
        if found is not None:
            return Step((found.linear,), found.x)
        norm = norm_of(self.values, v, None)
        if norm is not None and norm.factor == 1:
            found = linear_of(self.values, norm.x)
            if found is not None and norm.norm.shape == (found.linear.out_features,):
                return Step((Normalised(found.linear, norm.norm),), found.x)
        called = self.calls_of(self.values.passed(v), "is no linear function of parameters")
        if called:
            return called[0]
        raise KeptError(f"{computed(self.values.peel(v))}, where a projection is expected")

    def is_projection(self, v: Value) -> bool:
        if linear_of(self.values, v) is not None:
            return True
        norm = norm_of(self.values, v, None)
        return norm is not None and linear_of(self.values, norm.x) is not None

    def is_called(self, v: Value) -> bool:
        return self.is_projection(v) or bool(calls_returning(self.values.dataflow, [v]))

    def merged(self, outputs: Sequence[Value], what: str) -> Step:
        """Projections of one input, side by side."""
        steps = [self.projection(v) for v in outputs]
        first, *others = [self.values.peel(step.source) for step in steps]
        if any(x is not first for x in others):
            raise KeptError(f"{computed(self.values.peel(outputs[-1]))}, {what} of another input")
        once = tuple(thing for step in steps for thing in step.once)
        if not others:
            return steps[0]
        projections = tuple(
            op for step in steps for op in step.operations if isinstance(op, Projection)
        )
        return Step((MergedLinear(projections),), steps[0].source, once=once)

    def sum(self, v: Value, base: Value | None) -> Step | None:
        op, args = self.values.term(v)
        if op != "add" or not all(isinstance(a, Value) for a in args):
            return None
        for inner, bias in (args, args[::-1]):
            vector = vector_of(self.values, bias)
            if vector is not None and inner.shape == v.shape and vector.shape == v.shape[-1:]:
                return Step((Bias(vector.name, v.shape[-1]),), inner)
        return self.residual(v, args) or self.parallel(v, base)

    def residual(self, v: Value, args: tuple[Value, ...]) -> Step | None:
        """The sum of a value and of what is computed of it."""
        self.check_shapes(v, args)
        for first, block in (args, args[::-1]):
            stream = self.end_of(first)
            if self.values.is_ancestor(stream, block):
                branch = self.chain(block, stream)
                return branch.inside(Residual(branch.operations))
        return None

    def parallel(self, v: Value, base: Value | None) -> Step:
        """A sum of several branches, and perhaps of their input."""
        terms = self.terms(v, base)
        stream = base
        for term in terms:
            if all(self.values.is_ancestor(term, other) for other in terms):
                stream = term
        if stream is None:
            raise KeptError(computed(v, "sums branches by"))
        others = [term for term in terms if term is not stream]
        paths = [self.chain(term, stream).path for term in others]
        shared = next(v for v in paths[0] if all(v in path for path in paths))
        branches = [self.chain(term, shared) for term in others]
        parallel = Parallel(tuple(b.operations for b in branches))
        step = self.chain(shared, stream)
        whole = step.followed_by(*branches)
        operations = (*step.operations, parallel)
        if len(others) < len(terms):
            operations = (Residual(operations),)
        return whole._replace(operations=operations, path=())

    def terms(self, v: Value, base: Value | None) -> list[Value]:
        """What a sum of sums adds up."""
        v = self.end_of(v)
        op, args = self.values.term(v)
        if v is base or op != "add" or not all(isinstance(a, Value) for a in args):
            return [v]
        self.check_shapes(v, args)
        return [term for a in args for term in self.terms(a, base)]

    def check_shapes(self, v: Value, args: tuple[Value, ...]) -> None:
        if any(a.shape != v.shape for a in args):
            raise KeptError(computed(v, "broadcasts by"))

    def torch_attention(self, v: Value, base: Value | None) -> Step | None:
        found = torch_attention_of(self.values, v)
        if found is None:
            return None
        tokens = frozenset({found.tokens})
        return Step(
            found.operations, found.source, (), tokens, found.once, frozenset(found.written)
        )

    def attention(self, v: Value, base: Value | None) -> Step | None:
        if not is_layout(self.values, v):
            return None
        try:
            found = attention_of(self.values, v, self.is_projection)
        except KeptError:
            # A child that is called, such as a linear module with an adapter, may be a projection.
            found = attention_of(self.values, v, self.is_called)
        if found is None:
            return None
        step = self.merged(found.sources, "queries, keys or values")
        tokens = frozenset({found.tokens})
        return step.followed_by(Step(found.operations, step.source, (), tokens, found.once))


def _drawn(v: Value) -> tuple[Node, ...]:
    """The node of a value that depends on random numbers."""
    assert v.node is not None
    return (v.node,)


def _scaled(factor: float) -> tuple[Operation, ...]:
    return () if factor == 1 else (Scale(factor),)
