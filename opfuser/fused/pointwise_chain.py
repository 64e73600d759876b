"""A chain of element-wise operations in one forward kernel and one backward kernel."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.fusion import Env, Fusion, Refusal, Repeated, Requires
from ..op import FusibleOperation
from ._residual_sum import chain_refusal
from .parts.chain import ChainPart, accepts, active, refuse
from .parts.pipeline import Pipeline


class PointwiseChain(Pipeline):
    r"""Forward and backward of a chain of element-wise operations, each as one kernel.

    The operations are Bias, plain activations, ConstantScale, Dropout, AddExtraInput, and a user's
    subclasses of PointwiseOperation that override neither pass. All arithmetic between the chain's
    input and output is fp32. The output is contiguous and has the dtype that the operations lead
    to.

    Backward recomputes the values that it needs, and the masks of dropout from their seeds. It sums
    the gradients of biases over the rows in the same kernel, in fp32. Saves the seeds, the input if
    a function of it has a derivative that is not constant, and for the same reason each sum of an
    AddExtraInput, which the forward kernel writes. That is never more than the separate operations
    save; but under autocast it has the dtype of the input, while a separate activation saves its
    cast. For n operations on A elements, forward moves 2A instead of 2nA, plus A per extra input.

    Kernel: opfuser's own. ATen has kernels for single operations only.

    Args:
        ops: the operations, in forward order.

    Raises:
        NotSupportedError: an operation is not element-wise, or too many have a tensor.
        InputError: in forward, as in the operations that it replaces.
    """

    kernels = ("Triton pointwise",)

    def __init__(self, ops: Sequence[FusibleOperation]) -> None:
        super().__init__([ChainPart(ops, type(self).__name__)])


def _refuses(ops: tuple[FusibleOperation, ...], *, env: Env) -> Refusal | None:
    no = refuse(ops, env)
    if no is not None:
        return no
    if len(active(ops)) < 2:
        return Refusal("LAYOUT", "fewer than two of the operations change anything")
    return chain_refusal([type(op) for op in ops])


FUSION = Fusion(
    name="pointwise_chain",
    stage="joint",
    pattern=(Repeated("pointwise operation", accepts, at_least=2),),
    refuses=_refuses,
    build=PointwiseChain,
    requires=Requires(package="triton"),
)
