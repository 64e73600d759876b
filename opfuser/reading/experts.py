"""Mixtures of experts, and the routers that choose them."""

from __future__ import annotations

from .dataflow import Call, Value, values_in
from .expert_loops import experts_by_loop
from .expert_parts import Mixed, stripped
from .expert_rows import experts_by_rows
from .kept import KeptError
from .operations import Called, Experts
from .steps import Step
from .values import Values, computed


def experts_of(values: Values, v: Value) -> Step | None:
    """The mixture of experts that a value is the result of.

    Raises:
        KeptError: it is one that opfuser has no operation for, or whose router is no child.
    """
    if values.autocast is not None:
        return None
    found = experts_by_rows(values, v) or experts_by_loop(values, v)
    if found is None:
        return None
    mixed, written = found
    router, returned = _router_of(values, mixed, v)
    weights, indices = map(returned.index, (mixed.weights, mixed.indices))
    (given,) = router.args
    reason = "chooses experts"
    called = Called(router.path, given.shape[-1], mixed.top_k, reason)
    flat = len(given.shape) == 2
    experts = Experts(called, weights, indices, flat, mixed.up, mixed.activation, mixed.down)
    return Step((experts,), mixed.x, once=(router,), written=frozenset(written))


def _router_of(values: Values, mixed: Mixed, v: Value) -> tuple[Call, list[Value]]:
    """The call of a child, with the rows alone, that returns weights and experts; all of these."""
    for call in reversed(values.dataflow.calls):
        returned = [stripped(values, r) for r in values_in(call.result)]
        if mixed.weights not in returned or mixed.indices not in returned:
            continue
        given = list(values_in((call.args, call.kwargs)))
        if len(call.args) == 1 and not call.kwargs and isinstance(call.args[0], Value):
            same = values.peel(given[0]) is values.peel(mixed.x)
            if same and given[0].meta.dtype == mixed.x.meta.dtype:
                return call, returned
    raise KeptError(computed(v, "has experts that no child chooses, summed"))
