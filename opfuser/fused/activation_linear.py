"""Activation and linear operation in both passes; the activation's output is recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..basic.add_extra_input import AddExtraInput
from ..basic.bias import Bias
from ..core.fusion import Env, Fusion, Optional, Refusal
from ..op import FusibleOperation
from ._linear import BIASES, LINEARS, AnyBias, AnyLinear
from ._residual_sum import left_to_norm
from .parts.activation import ACTIVATIONS, Activation, ActivationPart, bias_refusal
from .parts.linear import refuse
from .parts.pipeline import Pipeline
from .parts.quantized_linear import QuantizedLinearPart, linear_part


class ActivationLinear(Pipeline):
    r"""Bias, a plain or gated activation, BasicLinear, Bias and AddExtraInput.

    .. math:: y = f(x + b)\, W^T + c + z

    Biases and sum are optional; before a gated activation there is no bias. z is the extra input,
    of the shape of y; it is overwritten if nothing else refers to it. Saves x, but not :math:`h =
    f(x + b)`: H elements less for H elements of h. x is saved as FP8 codes by rows if
    ``save_activations`` of the recipe or ``cache_quantized_input`` of the activation is set, the
    linear operation is quantized, and blocks of 128 columns lie within gates or linear units.

    Backward first computes :math:`dh = dy\, W`. The kernel that computes dx and db from dh and x
    also recomputes h, with H elements of traffic, as many as reading a saved h would take.
    :math:`dW = dy^T h` comes last. The gradient of a gated x overwrites x if nothing else refers to
    it.

    Kernel: ATen's GEMMs, and the activation kernels of opfuser; ATen has no activation backward
    that returns the output, reads a packed x or sums the bias's gradient.

    Args:
        activation: the activation.
        linear: the linear operation.
        bias: the bias before the activation, or None.
        linear_bias: the bias after the linear operation, or None.
        add: the sum with the extra input, which comes last, or None.
        env: of the call, whose recipe the linear operation follows; None means no recipe.

    Raises:
        NotSupportedError: a bias before a gated activation, or ``linear`` exchanges data between
            ranks.
        InputError: in forward, as in the operations that it replaces.
    """

    def __init__(
        self,
        *,
        activation: Activation,
        linear: AnyLinear,
        bias: Bias | None = None,
        linear_bias: AnyBias | None = None,
        add: AddExtraInput | None = None,
        env: Env | None = None,
    ) -> None:
        where = type(self).__name__
        behind = linear_part(linear, linear_bias, where, add=add, env=env)
        quantized = behind if isinstance(behind, QuantizedLinearPart) else None
        super().__init__([ActivationPart(bias, activation, where, behind=quantized), behind])


def _refuses(
    bias: Bias | None, activation: Activation, linear: AnyLinear, *rest: Any, env: Env
) -> Refusal | None:
    return bias_refusal(bias, activation) or refuse([linear], env)


FUSION = Fusion(
    name="activation_linear",
    stage="joint",
    pattern=(Optional(Bias), ACTIVATIONS, LINEARS, Optional(*BIASES)),
    refuses=_refuses,
    build=lambda bias, activation, linear, linear_bias, add=None, *, env=None: ActivationLinear(
        activation=activation, linear=linear, bias=bias, linear_bias=linear_bias, add=add, env=env
    ),
)


def _refuses_sum(*ops: Any, env: Env, behind: Sequence[FusibleOperation]) -> Refusal | None:
    linear = ops[2]
    no = _refuses(*ops, env=env)
    if no is None and env.recipe is not None and linear.quantized_refusal(env) is None:
        # Left to the norm behind it, the sum takes two passes over memory less.
        return Refusal("CONFLICT", "no GEMM of fp8 codes adds its result to a tensor")
    return no or left_to_norm(env, behind)


FUSION_WITH_SUM = Fusion(
    name="activation_linear_add",
    stage="joint",
    pattern=(*FUSION.pattern, AddExtraInput),
    refuses=_refuses_sum,
    build=FUSION.build,
)
