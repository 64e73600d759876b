"""A run of element-wise operations in one kernel forward and one backward."""

from __future__ import annotations

from collections.abc import Sequence

from ..fusion import Env, Fusion, Refusal, Repeated, Requires
from ..op import FusibleOperation
from ._residual_sum import CHAIN
from .parts.chain import ChainPart, accepts, active, refuse
from .parts.pipeline import Pipeline

__all__ = ["FUSION", "PointwiseChain"]


class PointwiseChain(Pipeline):
    r"""Forward and backward of a run of element-wise operations, each as one kernel.

    They are Bias, activations, ConstantScale, Dropout, AddExtraInput, and operations of users that
    derive from PointwiseOperation and override neither pass. All arithmetic between the run's input
    and output is fp32. The output is contiguous, and has the dtype that the operations lead to.

    Backward makes the values that it needs again, and the masks of dropout from their seeds; it
    sums the gradients of biases, in fp32, while it walks down the rows. Saved are the seeds, the
    input if a function of it has a derivative that varies, and for the same reason each sum of an
    AddExtraInput, made in the kernel: never more than the operations save apart, but under autocast
    in the dtype of the input, where an activation apart saves its cast. With n operations on A
    elements that is 2A + A per extra input of traffic forward instead of 2nA and as much.

    Kernel: opfuser's own. ATen has kernels for each of the operations and for none of their pairs.

    Args:
        ops: the operations, in forward order.

    Raises:
        NotSupportedError: an operation is none of those, or there are too many that have a tensor.
        InputError: in forward, as in the operations that it replaces.
    """

    def __init__(self, ops: Sequence[FusibleOperation]) -> None:
        super().__init__([ChainPart(ops, type(self).__name__)])


def _refuses(ops: tuple[FusibleOperation, ...], *, env: Env) -> Refusal | None:
    no = refuse(ops, env)
    if no is not None:
        return no
    if len(active(ops)) < 2:
        return Refusal("LAYOUT", "fewer than two of the operations change anything")
    return CHAIN.refuses(ops, env, changing=[type(op) for op in ops])


FUSION = Fusion(
    name="pointwise_chain",
    stage="joint",
    pattern=(Repeated("pointwise operation", accepts, at_least=2),),
    refuses=_refuses,
    build=PointwiseChain,
    requires=Requires(package="triton"),
)
