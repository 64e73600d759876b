"""A linear operation whose GEMMs take FP8 operands, in both passes."""

from __future__ import annotations

from collections.abc import Sequence

from ..basic.cross_entropy import CrossEntropy
from ..core.fusion import Env, Fusion, Optional, Refusal, Requires
from ..op import FusibleOperation
from ..recipe import Recipe
from ._linear import BIASES, LINEARS, AnyBias, AnyLinear
from .parts.pipeline import Pipeline
from .parts.quantized_linear import QuantizedLinearPart


class QuantizedLinear(Pipeline):
    r"""BasicLinear and Bias in the format of a recipe of quantized compute.

    .. math:: y = x\, W^T + b

    x, W and the gradient of y are rounded to FP8 with scales; the products are those of the
    rounded tensors. Saves the codes of x by columns, one byte each, and W.

    Kernels: ``torch.nn.functional.scaled_mm``; opfuser's quantisation of both layouts in one pass.

    Args:
        linear: the linear operation.
        bias: the bias after it, or None.
        recipe: of :mod:`opfuser.recipe`.

    Raises:
        InputError: in forward, as in the operations that it replaces.
    """

    def __init__(self, *, linear: AnyLinear, recipe: Recipe, bias: AnyBias | None = None) -> None:
        super().__init__([QuantizedLinearPart(linear, bias, type(self).__name__, recipe=recipe)])


def _refuses(
    linear: AnyLinear, bias: AnyBias | None, *, env: Env, behind: Sequence[FusibleOperation]
) -> Refusal | None:
    if behind and isinstance(behind[0], CrossEntropy):
        return Refusal("NO_RECIPE", "a loss takes its logits in high precision")
    return linear.quantized_refusal(env)


FUSION = Fusion(
    name="quantized_linear",
    stage="joint",
    pattern=(LINEARS, Optional(*BIASES)),
    refuses=_refuses,
    build=lambda linear, bias, env: QuantizedLinear(linear=linear, bias=bias, recipe=env.recipe),
    requires=Requires(recipe=True),
)
