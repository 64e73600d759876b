"""Operations of a Sequential for which opfuser has no fusion, but others have a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ...basic import AddEmbedding, Dropout, Embedding, LayerNorm, PositionEmbedding, RMSNorm
from ...engine.plan import Plan
from ...fusion import Fusion, Match, Refusal, Repeated
from ...op import BasicOperation
from ..observing import SequenceCall
from .estimates import Cost, of_operations, segment

__all__ = ["Elsewhere", "elsewhere"]


def _never(*ops: Any) -> Any:
    raise NotImplementedError


_TABLES = (Embedding, AddEmbedding, PositionEmbedding)
# Named as in ``kernels.KNOWN``. They are matched as fusions are, and build nothing.
PATTERNS = (
    Fusion(
        name="embedding_norm",
        stage="joint",
        pattern=(
            Embedding,
            Repeated(
                "embedding",
                lambda op: type(op) in (AddEmbedding, PositionEmbedding, Dropout),
                at_least=0,
            ),
            (LayerNorm, RMSNorm),
        ),
        build=_never,
    ),
)


class Elsewhere(NamedTuple):
    """A place in a Sequential where a pattern fits.

    Attributes:
        kind: the name of the pattern.
        call: of the Sequential.
        ops, paths: the basic operations, and where they are in the Sequential.
    """

    kind: str
    call: SequenceCall
    ops: tuple[BasicOperation, ...]
    paths: tuple[str, ...]

    def cost(self) -> Cost | None:
        """What one kernel would save; None if that cannot be counted."""
        indices = torch.empty_like(self.call.inputs[0], device="meta")
        weight = next(self.ops[0].parameters())
        shape = (*indices.shape, weight.shape[-1])
        output = torch.empty(shape, dtype=weight.dtype, device="meta")
        inputs = [indices] * (1 + sum(op.num_extra_inputs for op in self.ops))
        tables = sum(isinstance(op, _TABLES) for op in self.ops)
        with torch.set_grad_enabled(self.call.plan.env.grad_enabled):
            return of_operations(segment(self.ops), inputs, tables, output)


def elsewhere(call: SequenceCall) -> Iterator[Elsewhere]:
    """The places in one Sequential where a known pattern fits.

    Args:
        call: as the model made it.
    """
    plan = call.plan
    for pattern in PATTERNS:
        for match in _matches(pattern, plan):
            at = range(match.start, match.stop)
            ops, paths = [plan.basic_ops[i] for i in at], [plan.names[i] for i in at]
            yield Elsewhere(pattern.name, call, tuple(ops), tuple(paths))


def _matches(pattern: Fusion, plan: Plan) -> list[Match]:
    found: list[Match] = []

    def note(match: Match) -> Refusal:
        found.append(match)
        return Refusal("GROUP_SPLIT", "not built here")

    pattern.scan(plan.basic_ops, plan.env, note)
    return found
