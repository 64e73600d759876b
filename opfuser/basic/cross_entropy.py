"""Cross entropy of logits with class indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ArgumentError, InputError, OpKwargsError, explain
from ..op import BasicOperation, OperationContext

__all__ = ["CrossEntropy"]

# Logits widened to fp32 at a time: half of an L2 cache on a CPU, 256 MiB on a GPU.
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 26}


def _row_chunks(logits: Tensor) -> list[slice]:
    """Blocks of rows whose fp32 copy is small; all rows at once for a tracer, which fuses them."""
    rows, classes = logits.shape
    limit = _CHUNK.get(logits.device.type)
    if limit is None or torch.compiler.is_compiling():
        return [slice(0, rows)]
    size = max(1, limit // max(1, classes))
    return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]


class CrossEntropy(BasicOperation):
    r"""Negative log likelihood of classes under the softmax of logits.

    With label smoothing ε and V classes, the loss of one row x with target t is
    ``lse(x) - (1 - ε) x[t] - ε / V * Σ x``, where ``lse(x) = log Σ exp(x)``; rows whose target is
    ``ignore_index`` have loss 0. The gradient is ``softmax(x) - (1 - ε) [i = t] - ε / V``, times
    that of the row's loss, and 0 for ignored rows.

    Shapes: logits ``(..., V)``; targets, the extra input, ``(...)`` of int32 or int64; loss
    ``(...)`` for ``reduction="none"``, else ``()``. The loss is in fp32 (fp64 for fp64 logits), as
    is all arithmetic; the gradient has the logits' dtype. "mean" divides by the number of rows that
    are not ignored: without any, the loss is nan and the gradient 0, as in torch.

    Saved: the logits, the targets, per row the largest logit m and ``Σ exp(x - m)``, and for "mean"
    the number of rows that count (0-d): the only tensor of V entries per row is the input. Nothing
    waits for the device.

    Sources: the formulas are those of ``torch.nn.functional.cross_entropy``; label smoothing:
    Szegedy et al., "Rethinking the Inception Architecture", 2016.

    Args:
        ignore_index: the target of rows that do not count.
        label_smoothing: ε, from 0 to 1.
        reduction: "mean", "sum" or "none".

    Raises:
        ArgumentError: if an argument is outside its domain.
        InputError: in forward, if shapes or dtypes are not as above. A target that is neither a
            class nor ``ignore_index`` fails inside torch, on a GPU by a device-side assertion.
    """

    num_extra_inputs: int = 1

    class Saved(NamedTuple):
        logits: Tensor
        targets: Tensor
        row_max: Tensor
        sum_exp: Tensor
        num_valid: Tensor | None

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ArgumentError(
                explain(
                    'reduction must be "mean", "sum" or "none"',
                    where="CrossEntropy",
                    received=repr(reduction),
                )
            )
        if not 0.0 <= label_smoothing <= 1.0:
            raise ArgumentError(
                explain(
                    "label_smoothing must be between 0 and 1",
                    where="CrossEntropy",
                    received=f"label_smoothing={label_smoothing}",
                )
            )
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.reduction = reduction

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor | None]],
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[Tensor, Sequence[Sequence[Tensor | None]]]:
        if basic_op_kwargs[0]:
            raise OpKwargsError(
                explain("CrossEntropy takes no keywords", received=", ".join(basic_op_kwargs[0]))
            )
        ctx, targets = basic_op_ctxs[0], basic_op_extra_inputs[0][0]
        assert targets is not None
        self._check_inputs(input_, targets)
        logits = input_.reshape(-1, input_.shape[-1]) if input_.numel() else input_.new_empty(0, 1)
        valid, index = self._classes(targets)
        row_max, sum_exp, loss = self._rows(logits, index)
        loss = torch.where(valid, loss, 0.0).view(targets.shape)
        count = valid.sum() if self.reduction == "mean" else None
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(input_, targets, row_max, sum_exp, count))
        if self.reduction != "none":
            loss = loss.sum()
        return loss if count is None else loss / count, [()]

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
        ctx = basic_op_ctxs[0]
        if not ctx.needs.input:
            return None, [()], [(None,)]
        input_, targets, row_max, sum_exp, count = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        if not input_.numel():
            return torch.zeros_like(input_), [()], [(None,)]
        valid, index = self._classes(targets)
        grad = grad_output if self.reduction != "mean" else grad_output / count
        scale = torch.where(valid, grad.reshape(-1), 0.0).unsqueeze(1)
        logits = input_.reshape(-1, input_.shape[-1])
        dlogits = self._grad_rows(logits, index, row_max, scale, scale / sum_exp)
        return dlogits.view(input_.shape), [()], [(None,)]

    def _rows(self, logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Largest logit and ``Σ exp(x - max)`` of every row, each (rows, 1), and its loss."""
        eps, classes = self.label_smoothing, logits.shape[1]
        dtype = torch.promote_types(logits.dtype, torch.float32)
        maxima, sums, losses = [], [], []
        for rows in _row_chunks(logits):
            maxima.append(logits[rows].amax(1, keepdim=True).to(dtype))
            # Differences to the maximum, not to the log-sum-exp: the rounding of that one would be
            # a relative error of every probability.
            z = logits[rows] - maxima[-1]
            loss = (eps - 1) * z.gather(1, index[rows])
            if eps:
                loss -= eps / classes * z.sum(1, keepdim=True)
            sums.append(z.exp_().sum(1, keepdim=True))
            losses.append(loss.add_(sums[-1].log()))
        if not losses:
            empty = logits.new_empty(0, 1, dtype=dtype)
            return empty, empty, empty.view(0)
        return torch.cat(maxima), torch.cat(sums), torch.cat(losses).squeeze(1)

    def _grad_rows(
        self, logits: Tensor, index: Tensor, row_max: Tensor, scale: Tensor, p_scale: Tensor
    ) -> Tensor:
        eps, classes = self.label_smoothing, logits.shape[1]
        dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for rows in _row_chunks(logits):
            dx = (logits[rows] - row_max[rows]).exp_().mul_(p_scale[rows])
            if eps:
                dx.sub_(eps / classes * scale[rows])
            dx.scatter_add_(1, index[rows], (eps - 1) * scale[rows])
            dlogits[rows] = dx
        return dlogits

    def _classes(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows count, and a valid class for every row (0 for those that do not)."""
        flat = targets.reshape(-1)
        valid = flat != self.ignore_index
        return valid, torch.where(valid, flat, 0).long().unsqueeze(1)

    def _check_inputs(self, logits: Tensor, targets: Tensor) -> None:
        invariant = ""
        if logits.dim() < 1 or not logits.is_floating_point() or not logits.shape[-1]:
            invariant = "Logits must be floating point, (..., classes)"
        elif targets.shape != logits.shape[:-1]:
            invariant = "Targets must have the shape of the logits without the last dimension"
        elif targets.dtype not in (torch.int32, torch.int64):
            invariant = "Targets must be class indices of int32 or int64"
        if invariant:
            received = (
                f"logits {tuple(logits.shape)} of {logits.dtype}, "
                f"targets {tuple(targets.shape)} of {targets.dtype}"
            )
            raise InputError(explain(invariant, where="CrossEntropy", received=received))

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        (targets,) = extra_inputs
        self._check_inputs(input_, targets)
        dtype = torch.promote_types(input_.dtype, torch.float32)
        loss = F.cross_entropy(
            input_.reshape(-1, input_.shape[-1]).to(dtype),
            targets.reshape(-1).long(),
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
        )
        return loss.view(targets.shape) if self.reduction == "none" else loss

    def extra_repr(self) -> str:
        return (
            f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, "
            f"reduction={self.reduction!r}"
        )
