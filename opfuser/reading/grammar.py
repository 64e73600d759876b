"""Reads a dataflow from its output back to its input: every operation is explained, or it is kept.

Only what the output depends on is looked at, one operation after another, so that nothing between
two explained operations can be overlooked. An operation with an effect besides its results has to
be inside of a child that is called as it is.
"""

# Longer than 500 lines: nearly all is one class, which tries its rules in an order that matters.

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from .activations import ActivationFound, activations_in, gate_of, halves_of
from .attention import AttentionFound, attention_of
from .dataflow import Call, Dataflow, Node, Value, form_of, values_in
from .experts import experts_of
from .heads import Turn, heads_of
from .in_place import settle_writes
from .kept import KeptError
from .latents import LatentsFound
from .made import made_of
from .norms import norm_of
from .operations import (
    Activation,
    Beside,
    Bias,
    Cached,
    Called,
    ColumnScale,
    CrossAttention,
    Dropout,
    Embedding,
    ForkedAttention,
    Gated,
    Heads,
    Linear,
    LoRALinear,
    MergedLinear,
    Norm,
    Operation,
    Parallel,
    Projection,
    Reading,
    Residual,
    Rotary,
    Scale,
    Times,
    Transpose,
)
from .packing import gathered
from .products import product_of
from .projections import calls_returning, linear_of, vector_of
from .replay import columns_of, indices_like, is_layout, origin_of, undisturbed
from .steps import Step, attends, exchanges
from .values import Values, computed, located


@undisturbed()
def read(dataflow: Dataflow, autocast: torch.dtype | None = None) -> Reading:
    """The operations that compute the first tensor that a forward returns besides its inputs.

    The others have to come about on the way: a child that is called as it is has returned them, or
    they are the weights of attention.

    Raises:
        KeptError: an operation is not explained, or the result is not a tensor.
    """
    outputs = dataflow.outputs
    if not outputs:
        raise KeptError("returns 0 tensors")
    result = outputs[0]
    settle_writes(dataflow)
    whole = _with_outputs(Values(dataflow, result.meta.dtype, autocast), frozenset())
    rows, dtypes = whole.source.shape[:-1], {whole.source.meta.dtype, result.meta.dtype}
    if whole.operations and isinstance(whole.operations[0], Embedding):
        rows, dtypes = whole.source.shape, {result.meta.dtype}
    if autocast is not None and torch.float64 in dtypes:
        raise KeptError("is in torch.float64, which autocast leaves as it is")
    rounds = autocast is not None and whole.source.meta.is_floating_point()
    if rows != result.shape[:-1] or (len(dtypes) > 1 and not rounds):
        raise KeptError("returns another dtype or shape than its input has")
    if whole.tokens - {rows}:
        raise KeptError("attends to, or calls a child with, other rows than those of its input")
    if exchanges(whole.operations):
        raise KeptError("exchanges batch and sequence, and not back")
    if len(set(whole.once)) < len(whole.once):
        raise KeptError("reads the result of dropout, or of a child that is called, twice")
    spans = [(c.start, c.end) for c in whole.once if isinstance(c, Call)]
    for number, node in enumerate(dataflow.nodes):
        inside = any(start <= number < end for start, end in spans)
        explained = node in whole.once or node in whole.written
        if node.effect and not explained and not inside:
            raise KeptError(located(node.effect, node))
    found = ((n, made_of(dataflow, v)) for n, v in enumerate(outputs) if v not in whole.returned)
    made = tuple((n, how) for n, how in found if n and how is not None)
    return Reading(dataflow.inputs.index(whole.source), whole.operations, len(outputs), made)


def _with_outputs(values: Values, kept: frozenset[Call]) -> Step:
    """What computes the first output and hands out the others; ``kept`` are called as they are.

    Raises:
        KeptError: an operation is not explained, or an output does not come about on the way.
    """
    result, *others = values.dataflow.outputs
    step = _Grammar(values, kept).chain(result, None)
    missing = next(
        (v for v in others if v not in step.returned and not made_of(values.dataflow, v)), None
    )
    if missing is None:
        return step
    for call in reversed(values.dataflow.calls):
        if call not in kept and missing in values_in(call.result):
            with suppress(KeptError):
                return _with_outputs(values, kept | {call})
    reason = f"returns {1 + len(others)} tensors, one made by"
    raise KeptError(computed(missing, reason))


_Rule = Callable[[Value, "Value | None"], "Step | None"]


class _Grammar:
    def __init__(self, values: Values, kept: frozenset[Call]) -> None:
        self.values, self.kept = values, kept
        others = values.dataflow.outputs[1:]
        self.outputs = {v: number for number, v in enumerate(others, 1)}
        self.known: dict[tuple[Value, Value | None, bool], Step | KeptError] = {}
        self.rounded: set[Value] = set()
        self.cached: set[Value] = set()
        self.rules: tuple[_Rule, ...] = (
            self.turned,
            self.linear,
            self.embedding,
            self.norm,
            self.dropout,
            self.product,
            self.sum,
            self.experts,
            self.attention,
            self.transpose,
            self.columns,
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
        passed = self.values.passed(v)
        for called in self.calls_of(passed, "returns other tensors, too") if self.kept else ():
            if not self.kept.isdisjoint(called.once):
                return self.chain(called.source, base).followed_by(called)
        try:
            step = self.step(end, base)._replace(path=(end,))
            if step.operations:
                self.check_rounding(step.operations[-1], v, is_rounded)
                if step.operations[0] != Transpose():
                    is_rounded = _rounds(step.operations[0])
            return self.chain(step.source, base, is_rounded=is_rounded).followed_by(step)
        except KeptError as why:
            for called in self.calls_of(passed, why.reason):
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
        """The children that return one of these values of one stream, the innermost first."""
        out = []
        for call, x, result, arguments in calls_returning(self.values, passed):
            results = values_in(call.result)
            returned = {v: (n, self.outputs[v]) for n, v in enumerate(results) if v in self.outputs}
            of_rows = x.shape[:-1] == result.shape[:-1]
            alone = call.result is result and of_rows and not returned
            op = Called(
                call.path,
                x.shape[-1],
                passed[-1].shape[-1],
                reason.removeprefix(f"calls '{call.path}', which "),
                None if alone else results.index(result),
                arguments,
                tuple(returned.values()),
                "" if alone else form_of(call.result),
            )
            rows = frozenset({x.shape[:-1]})
            step = Step((op,), x, passed[-1:], rows, (call,))
            out.append(step._replace(returned=frozenset(returned)))
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
        return None if found is None else Step((found.linear,), found.x, once=found.once)

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
            if len(found.rest.values) == 1 and found.x.shape == found.rest.values[0].shape:
                try:
                    return self.gated(found, base)
                except KeptError as why:
                    reason = reason or why
        streams = [x for x in product.values if vector_of(self.values, x) is None]
        of_rows = all(x.shape[:-1] == v.shape[:-1] for x in streams)
        if len(streams) == len(product.values) == 2 and of_rows and not product.inverse_roots:
            streams.sort(key=lambda x: x.shape == v.shape)  # one column first, which scales rows
            with suppress(KeptError):
                step = self.branches(streams, base, Times)
                return step.followed_by(Step(_scaled(product.factor), v))
        if reason is not None:
            raise reason
        if product.inverse_roots or product.values == (v,) or len(streams) != 1:
            return None
        if streams[0].shape[-1:] != v.shape[-1:]:
            return None
        made = [ColumnScale(x.name) for x in product.values if x is not streams[0]]
        return Step((*made, *_scaled(product.factor)), streams[0])

    def gated(self, found: ActivationFound, base: Value | None) -> Step:
        """An activation's result times something else."""
        operation, gate, up = gate_of(self.values, found)
        after = (operation, *_scaled(found.rest.factor))
        halves = halves_of(self.values, gate, up)
        if halves is not None:
            whole, order = halves
            return Step((*gathered(order, whole.shape[-1]), *after), whole)
        merged = self.merged((gate, up), base)
        if not isinstance(merged.operations[0], MergedLinear):
            raise KeptError(computed(up, "gates or multiplies no linear function by"))
        return merged.followed_by(Step(after, merged.source))

    def projected(self, v: Value) -> Value | None:
        """The input of a projection, of what it returns; None for other values."""
        found = linear_of(self.values, v)
        if found is None:
            norm = norm_of(self.values, v, None)
            found = None if norm is None else linear_of(self.values, norm.x)
        return None if found is None else self.values.peel(found.x)

    def called(self, v: Value) -> Value | None:
        """The input of a projection or of a child that may stand for one; None for other values."""
        x, found = self.projected(v), next(calls_returning(self.values, [v]), None)
        return x if x is not None or found is None else self.values.peel(found.x)

    def merged(self, outputs: Sequence[Value], base: Value | None) -> Step:
        """Values that are computed of one, side by side."""
        if len(outputs) == 1:
            return Step((), outputs[0])
        if len(set(outputs)) < len(outputs):
            raise KeptError(computed(outputs[-1], "joins twice what it makes by"))
        # Of sums with adapters it is asked whether they are rounded.
        linear = [self.values.peel(v) for v in outputs if linear_of(self.values, v) is not None]
        self.rounded.update(linear)
        chains = [self.chain(v, base, is_rounded=True) for v in outputs]
        shared = self.shared(chains, outputs)

        def after_shared(pair: tuple[Value, Step]) -> Value:
            v, chain = pair
            place = chain.path.index(shared)
            return chain.path[place - 1] if place else v

        steps = []
        for _, group in itertools.groupby(zip(outputs, chains), after_shared):
            inner = self.merged([v for v, _ in group], shared)
            steps.append(self.chain(inner.source, shared, is_rounded=True).followed_by(inner))
        whole = Step((), shared).followed_by(*steps)
        projections = tuple(op for op in whole.operations if isinstance(op, Projection))
        joined: Operation = Beside(tuple(step.operations for step in steps))
        if all(len(step.operations) == 1 for step in steps) and len(projections) == len(steps):
            joined = MergedLinear(projections)
        return whole._replace(operations=(joined,), path=())

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
                return branch._replace(operations=(Residual(branch.operations),), path=())
        return None

    def parallel(self, v: Value, base: Value | None) -> Step:
        """A sum of several branches, and perhaps of their input."""
        terms = self.terms(v, base)
        stream = base
        for term in terms:
            if all(self.values.is_ancestor(term, other) for other in terms):
                stream = term
        if stream not in terms:
            return self.branches(terms, stream, Parallel)
        terms.remove(stream)  # once: what is added twice is a branch without operations, too
        whole = self.branches(terms, stream, Parallel)
        return whole._replace(operations=(Residual(whole.operations),))

    def branches(
        self,
        ends: Sequence[Value],
        base: Value | None,
        joined: Callable[[tuple[tuple[Operation, ...], ...]], Operation],
    ) -> Step:
        """Values that are computed of one, joined by an operation."""
        shared = self.shared([self.chain(end, base) for end in ends], ends)
        branches = [self.chain(end, shared) for end in ends]
        step = self.chain(shared, base)
        operations = (*step.operations, joined(tuple(b.operations for b in branches)))
        return step.followed_by(*branches)._replace(operations=operations, path=())

    def shared(self, chains: Sequence[Step], ends: Sequence[Value]) -> Value:
        """The last value that all of these are computed of.

        Raises:
            KeptError: there is none.
        """
        paths = [chain.path for chain in chains]
        for v in paths[0]:
            if all(v in path for path in paths):
                return v
        raise KeptError(computed(ends[-1], "joins branches of several inputs, one made by"))

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

    def experts(self, v: Value, base: Value | None) -> Step | None:
        return experts_of(self.values, v)

    def attention(self, v: Value, base: Value | None) -> Step | None:
        if not is_layout(self.values, v):
            return None
        try:
            found = attention_of(self.values, v, self.projected)
        except KeptError as why:
            # A child that is called, such as a linear module with an adapter, may be a projection.
            with suppress(KeptError):
                return self.attended(attention_of(self.values, v, self.called), base)
            raise why from None
        return self.attended(found, base)

    def transpose(self, v: Value, base: Value | None) -> Step | None:
        """Rows whose first two dimensions are exchanged."""
        op, args = self.values.term(v)
        if op not in ("transpose", "permute") or not args or len(v.shape) != 3:
            return None
        (x, *_), rows = args, frozenset({args[0].shape[:-1]})
        exchanged = origin_of(v, x).equal(indices_like(x).long().transpose(0, 1))
        return Step((Transpose(),), x, tokens=rows) if exchanged else None

    def columns(self, v: Value, base: Value | None) -> Step | None:
        """Some of the columns of rows, or those of several side by side."""
        op, args = self.values.term(v)
        if op == "cat" and args[1] in (-1, len(v.shape) - 1):
            return self.merged(args[0], base)
        found = columns_of(self.values, v)
        if found is None or found[0].shape[:-1] != v.shape[:-1]:
            return None
        source, columns = found
        return Step(gathered(columns, source.shape[-1]), source)

    def attended(self, found: AttentionFound | None, base: Value | None) -> Step | None:
        """Attention, after the projections of what it attends to."""
        if found is None:
            return None
        if found.branches and found.memory:
            return self.forked(found, base)
        step = self.merged(found.sources, base)
        attend: Operation = found.attention
        if found.branches:
            queries, *others = found.branches
            attend = ForkedAttention(found.attention, queries, (), *others)
        once: tuple[Node | Call, ...] = found.once
        if found.memory:
            memory = self.memory(found, base)
            number = self.values.dataflow.inputs.index(memory.source)
            attend = CrossAttention(found.attention, number, memory.operations)
            once = once + memory.once
        turn = (Transpose(),) if found.sequence_first else ()
        operations = *turn, *found.steps, attend, *turn
        whole = Step(operations, step.source, (), frozenset({found.tokens}), once)
        return step.followed_by(whole._replace(returned=found.returned))

    def forked(self, found: AttentionFound, base: Value | None) -> Step:
        """Attention whose keys and values are made of something of their own."""
        queries, latents = self.merged(found.sources, base), found.latents
        ends: tuple[Value, ...]
        if latents is None:
            memory = self.merged(found.memory, base)
            ends = queries.source, memory.source
        else:
            ends = queries.source, *latents.update.args
            for given in latents.update.args:
                self.cached.update(self.values.passed(given))
        shared = self.shared([self.chain(end, base) for end in ends], ends)
        if latents is None:
            memory = self.chain(memory.source, shared, is_rounded=True).followed_by(memory)
        else:
            memory = self.kept_by_cache(latents, shared, causal=found.attention.causal)
        queries = self.chain(queries.source, shared, is_rounded=True).followed_by(queries)
        first, keys, values = found.branches
        own = *queries.operations, *first
        fork = ForkedAttention(found.attention, own, memory.operations, keys, values)
        step = self.chain(shared, base)
        here = Step((), shared, (), frozenset({found.tokens}), found.once)
        whole = step.followed_by(queries, memory, here)
        return whole._replace(operations=(*step.operations, fork), path=())

    def kept_by_cache(self, latents: LatentsFound, shared: Value, *, causal: bool) -> Step:
        """What a cache returns for what is made of a value, and what is made of that."""
        update = latents.update
        cached = self.branches(
            update.args, shared, lambda both: Cached(both, update.kwargs["layer"], causal)
        )
        made = [self.made_of_kept(latents, *each) for each in zip(latents.sources, latents.taken)]
        beside = Beside(tuple(step.operations for step in made))
        whole = cached.followed_by(*made)
        return whole._replace(operations=(*cached.operations, beside))

    def made_of_kept(
        self, latents: LatentsFound, source: Value, taken: tuple[Operation, ...]
    ) -> Step:
        """Columns of a projection of one of the two tensors, side by side, that a cache returns."""
        results = latents.update.results
        kept = next(result for result in results if self.values.is_ancestor(result, source))
        widths = [result.shape[-1] for result in results]
        columns = torch.arange(sum(widths)).split(widths)[results.index(kept)]
        made = self.chain(source, kept, is_rounded=True)
        return Step(gathered(columns, sum(widths)), kept).followed_by(made, Step(taken, source))

    def turned(self, v: Value, base: Value | None) -> Step | None:
        """Rotary positions of what a cache keeps as one head."""
        if v not in self.cached or len(v.shape) != 4 or v.shape[1] != 1:
            return None
        found = None
        with suppress(KeptError):  # another rule may explain it
            found = heads_of(self.values, v, self.called)
        turn = found.steps[0] if found is not None and len(found.steps) == 1 else None
        if found is None or not isinstance(turn, Turn):
            return None
        size = v.shape[-1]
        step = self.merged(found.sources, base)
        order = gathered(found.columns[0], sum(s.shape[-1] for s in found.sources))
        rotary = Rotary(Heads(1, 0, size, size), *turn[:-1])
        back = gathered(torch.tensor(turn.order).argsort(), size) if turn.order else ()
        operations = *order, rotary, *back, *_scaled(found.scale)
        return step.followed_by(Step(operations, step.source, tokens=frozenset({found.tokens})))

    def memory(self, found: AttentionFound, base: Value | None) -> Step:
        """What makes keys and values of another input.

        Raises:
            KeptError: they are made of the stream too, or something is not explained.
        """
        merged = self.merged(found.memory, None)
        if base is not None and self.values.is_ancestor(base, merged.source):
            raise KeptError(computed(self.values.peel(merged.source), "attends to keys of"))
        before = self.chain(merged.source, None, is_rounded=True)
        step = before.followed_by(merged, Step(found.memory_steps, merged.source))
        if found.sequence_first:
            step = step.followed_by(Step((Transpose(),), merged.source))
        rows, batch = step.source.shape[:-1], found.tokens[found.sequence_first]
        if exchanges(step.operations) and (len(rows) != 2 or rows[1] != batch):
            raise KeptError(computed(merged.source, "exchanges other rows than those of"))
        if attends(step.operations) or step.written or step.tokens - {rows}:
            raise KeptError(computed(merged.source, "attends to what attends itself, made by"))
        return step


def _drawn(v: Value) -> tuple[Node, ...]:
    """The node of a value that depends on random numbers."""
    assert v.node is not None
    return (v.node,)


def _rounds(operation: Operation) -> bool:
    """Whether it rounds its input to the dtype of autocast."""
    if isinstance(operation, Beside):
        return all(branch and _rounds(branch[0]) for branch in operation.branches)
    return isinstance(operation, (Linear, LoRALinear, MergedLinear))


def _scaled(factor: float) -> tuple[Operation, ...]:
    return () if factor == 1 else (Scale(factor),)
