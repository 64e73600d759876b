"""Gradients of an activation and of the bias before it, in one walk over the rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..basic._main_grad import as_rows
from ..basic.activation import (
    GELU,
    QGELU,
    ReLU,
    Sigmoid,
    SiLU,
    Softplus,
    SReLU,
    Tanh,
    _Activation,
)
from ..basic.bias import Bias, bias_grad
from ..fusion import Fusion
from ..kernels.scalar import ScalarFunction
from ..op import FusedOperation, OperationContext

__all__ = ["FUSION", "BackwardActivationBias"]

# Elements per thread that a core's cache (1 to 2 MiB) holds along with the intermediate results.
# From eight such blocks on, one thread takes 4.4 instead of 21.6 ms for ReLU and bias of
# 4096 x 2048 in bf16, 7.9 instead of 24.4 ms for SiLU; below, blocks gain nothing.
_BLOCK = 2**18
_MIN_BLOCKS = 8


class BackwardActivationBias(FusedOperation):
    r"""Backward of Bias and an activation: :math:`dx = dy\, f'(x + b)`, :math:`db = \sum dx`.

    The sum is over all dimensions but the last. Reads what the activation saved, its input.
    Where the tensors outgrow a CPU's cache, both are computed block by block, so that dx is summed
    while it is there: A elements of traffic less for A elements of dx, none of the full-size
    intermediates of an activation that takes several passes, and no fp32 copy of dx for the sum.

    Kernel: ATen's backward of the activation and ``sum``; no ATen kernel does both.

    Args:
        bias: the bias, which comes first in forward.
        activation: the element-wise activation.
    """

    _parts: tuple[Bias, _Activation]

    def __init__(self, *, bias: Bias, activation: _Activation) -> None:
        super().__init__((bias, activation))
        self._parts = bias, activation

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Sequence[Tensor | None]],
    ) -> tuple[
        Tensor | None,
        Sequence[Sequence[Tensor | None] | None],
        Sequence[Sequence[Tensor | None] | None],
    ]:
        _, activation = self._parts
        needs = basic_op_ctxs[0].needs
        needs_db = bool(needs.parameters) and needs.parameters[0]
        (x,) = basic_op_ctxs[1].saved_tensors
        rows = _rows_per_block(x) if needs_db else 0
        dx: Tensor | None
        db: Tensor | None = None
        if rows:
            dx, db = _in_blocks(activation.function, grad_output, x, rows)
        else:
            dx, _ = activation.op_backward(basic_op_ctxs[1], grad_output)
            assert dx is not None
            if needs_db:
                db = bias_grad(dx)
        return dx if needs.input else None, [(db,) if needs.parameters else (), ()], [(), ()]


def _rows_per_block(x: Tensor) -> int:
    """Rows to work on at a time; 0 for all at once."""
    # While torch.compile traces, its size is not to be asked: the graph would hold for it alone.
    if torch.compiler.is_compiling() or x.numel() < _MIN_BLOCKS * _BLOCK:
        return 0
    block = _BLOCK * torch.get_num_threads()
    if x.device.type != "cpu" or x.dim() < 2 or x.numel() < _MIN_BLOCKS * block:
        return 0
    return max(1, block // x.shape[-1])


def _in_blocks(function: ScalarFunction, dy: Tensor, x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    x_rows, dy_rows = as_rows(x), as_rows(dy)
    dx = x.new_empty(x_rows.shape)
    wide = torch.promote_types(x.dtype, torch.float32)  # partial sums are not rounded
    sums = []
    for start in range(0, len(dx), rows):
        block = slice(start, start + rows)
        function.backward(dy_rows[block].to(x.dtype), x_rows[block], dx[block])
        sums.append(dx[block].sum(0, dtype=wide))
    return dx.view(dy.shape), torch.stack(sums).sum(0)


FUSION = Fusion(
    name="backward_activation_bias",
    stage="backward",
    pattern=(Bias, (GELU, QGELU, ReLU, SReLU, SiLU, Softplus, Tanh, Sigmoid)),
    build=lambda bias, activation: BackwardActivationBias(bias=bias, activation=activation),
)
