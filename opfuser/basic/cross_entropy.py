"""Cross entropy of logits with class indices."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from ..core.context import BackwardResult, Contexts, Extras, ForwardArguments, ForwardResult
from ..distributed.collectives import VocabularySlice, gather, refuse_reference, slice_vocabulary
from ..errors import ArgumentError, InputError
from ..kernels.cross_entropy import (
    by_aten,
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_mean,
)
from ..kernels.cross_entropy_plain import RowLosses, Terms, aten_gradient, aten_loss
from ..kernels.vocabulary_slices import Classes, merged_losses, slice_gradient, slice_statistics
from ..op import BasicOperation, Dtypes


def classes_of(own: VocabularySlice) -> Classes:
    """Which classes this rank's logits are of, as kernels take it."""
    return Classes(own.start, own.classes)


def losses_of_slices(
    logits: Tensor, targets: Tensor, terms: Terms, own: VocabularySlice
) -> RowLosses:
    """Losses and statistics of rows over all ranks, for one gather of 4 numbers a row.

    Args:
        logits: of this rank, (rows, classes).
        targets: (rows,), of all classes.
        terms: of the loss.
        own: which classes this rank has.
    """
    mine = slice_statistics(logits, targets, terms, classes_of(own))
    parts = gather(mine.unsqueeze(0), own.group)
    return merged_losses(parts, targets, terms, own.classes)


class CrossEntropy(BasicOperation):
    r"""Negative log likelihood of classes under the softmax of logits.

    With label smoothing ε, z-loss ζ and V classes, the loss of one row x with target t is
    ``lse - (1 - ε) x[t] - ε / V Σ x + ζ lse²``, where ``lse = log Σ exp(x)``; rows whose target is
    ``ignore_index`` have loss 0. The gradient is
    ``(1 + 2 ζ lse) softmax(x) - (1 - ε) [i = t] - ε / V``, times that of the row's loss, and 0 for
    ignored rows.

    Shapes: logits ``(..., V)``; targets, the extra input, ``(...)`` of int32 or int64; loss
    ``(...)`` for ``reduction="none"``, else ``()``. The loss is in fp32 (fp64 for fp64 logits), as
    is all arithmetic; the gradient has the logits' dtype. "mean" divides by the number of rows that
    are not ignored: without any, the loss is nan and the gradient 0, as in torch.

    Saved: the logits, the targets, per row the largest logit m and ``Σ exp(x - m)``, and for "mean"
    the number of rows that count (0-d): the only tensor of V entries per row is the input. Few
    logits on a CPU are ATen's (log_softmax, nll_loss), without the statistics of rows. Nothing
    waits for the device.

    Kernels: on a GPU opfuser's own, which read the logits once forward, and once more backward to
    write their gradient: 6 bytes per logit in fp16 or bf16. ATen's log_softmax and nll_loss want an
    fp32 copy of such logits, and move 26.

    With ``tensor_parallel`` every rank has the logits of a slice of the classes, cut as by
    ``torch.chunk``: those of a linear operation in mode "vocabulary" or "column" (Shoeybi et al.,
    Megatron-LM, arXiv:1909.08053). All ranks are given the same targets, and return the same loss,
    whose gradient is taken to be the same on all. They exchange 4 numbers per row, in forward. A
    target that is neither a class nor ``ignore_index`` makes loss and gradient of its row nan on
    every device.

    Sources: the formulas are those of ``torch.nn.functional.cross_entropy``; label smoothing:
    Szegedy et al., "Rethinking the Inception Architecture", 2016; z-loss: Chowdhery et al., "PaLM",
    arXiv:2204.02311, section 5, with ζ = 1e-4.

    Args:
        ignore_index: the target of rows that do not count.
        label_smoothing: ε, from 0 to 1.
        reduction: "mean", "sum" or "none".
        z_loss: ζ, not negative; keeps the softmax's normaliser near 1.
        tensor_parallel: distribute the classes over the ranks of the group.
        tensor_parallel_group: None is all ranks.
        num_classes: V, over all ranks; needed with ``tensor_parallel``, and only there.

    Raises:
        ArgumentError: if an argument is outside its domain, or a rank would have no class.
        InputError: in forward, if shapes or dtypes are not as above. A target that is neither a
            class nor ``ignore_index`` fails inside torch on a CPU; the kernels make loss and
            gradient of its row nan.
        OpKwargsError: in forward, if it is given keywords.
    """

    kernels = ("Triton cross_entropy",)
    num_extra_inputs: int = 1
    takes_keywords = False
    read_only: ClassVar[frozenset[str]] = frozenset({"vocabulary"})

    class Saved(NamedTuple):
        logits: Tensor
        targets: Tensor
        row_max: Tensor | None
        sum_exp: Tensor | None
        num_valid: Tensor | None

    class Settings(NamedTuple):
        terms: Terms
        reduction: str

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Literal["mean", "sum", "none"] = "mean",
        z_loss: float = 0.0,
        *,
        tensor_parallel: bool = False,
        tensor_parallel_group: dist.ProcessGroup | None = None,
        num_classes: int | None = None,
    ) -> None:
        super().__init__()
        if tensor_parallel != (num_classes is not None):
            raise ArgumentError.explained(
                "num_classes is the number of classes of all ranks under tensor parallelism",
                where="CrossEntropy",
                received=f"tensor_parallel={tensor_parallel}, num_classes={num_classes}",
            )
        own = None
        if num_classes is not None:
            own = slice_vocabulary(num_classes, tensor_parallel_group, "CrossEntropy")
        self.vocabulary: VocabularySlice | None = own
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.z_loss = z_loss
        self.make_settings()

    @property
    def communicates(self) -> bool:  # type: ignore[override]
        return self.vocabulary is not None

    @property
    def replayable(self) -> bool:  # type: ignore[override]
        return self.vocabulary is None

    def make_settings(self) -> CrossEntropy.Settings:
        label_smoothing, reduction, z_loss = self.label_smoothing, self.reduction, self.z_loss
        if reduction not in ("mean", "sum", "none"):
            raise ArgumentError.explained(
                'reduction must be "mean", "sum" or "none"',
                where="CrossEntropy",
                received=repr(reduction),
            )
        if not 0.0 <= label_smoothing <= 1.0:
            raise ArgumentError.explained(
                "label_smoothing must be between 0 and 1",
                where="CrossEntropy",
                received=f"label_smoothing={label_smoothing}",
            )
        if not 0.0 <= z_loss < math.inf:
            raise ArgumentError.explained(
                "z_loss must be a finite number, and not negative",
                where="CrossEntropy",
                received=f"z_loss={z_loss}",
            )
        return self.Settings(Terms(self.ignore_index, label_smoothing, z_loss), reduction)

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return torch.promote_types(dtypes.input, torch.float32)

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        ctx, targets = basic_op_ctxs[0], given["basic_op_extra_inputs"][0][0]
        terms, reduction = self.frozen_settings(ctx)
        assert targets is not None
        self.check_inputs(input_.shape, input_.dtype, targets)
        logits, flat = _matrix(input_), targets.reshape(-1)
        own, count = self.vocabulary, None
        if own is None and by_aten(logits, terms):
            row_max = sum_exp = None
            loss, count = aten_loss(logits, flat, terms.ignore_index, reduction)
        else:
            if own is None:
                loss, row_max, sum_exp = cross_entropy_forward(logits, flat, terms)
            else:
                loss, row_max, sum_exp = losses_of_slices(logits, flat, terms, own)
            if reduction == "mean":
                loss, count = cross_entropy_mean(loss, flat, terms.ignore_index)
            elif reduction == "sum":
                loss = loss.sum()
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(input_, targets, row_max, sum_exp, count))
        return loss.view_as(targets) if reduction == "none" else loss, [()]

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        ctx = basic_op_ctxs[0]
        if not ctx.needs.input:
            return None, [()], [(None,)]
        input_, targets, row_max, sum_exp, count = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        terms, reduction = self.frozen_settings(ctx)
        dloss = grad_output.reshape(-1) if reduction == "none" else grad_output
        logits, flat, own = _matrix(input_), targets.reshape(-1), self.vocabulary
        if row_max is None:
            dx = aten_gradient(logits, flat, dloss, count, terms.ignore_index, reduction)
        elif own is None:
            dx = cross_entropy_backward(logits, flat, row_max, sum_exp, dloss, count, terms)
        else:
            rows, classes = RowLosses(dloss, row_max, sum_exp), classes_of(own)
            dx = slice_gradient(logits, flat, rows, dloss, count, terms, classes, False)
        return dx.view_as(input_), [()], [(None,)]

    def check_inputs(self, shape: torch.Size, dtype: torch.dtype, targets: Tensor) -> None:
        """Raises InputError unless logits of that shape and dtype go with ``targets``."""
        invariant = ""
        if not shape or not dtype.is_floating_point or not shape[-1]:
            invariant = "Logits must be floating point, (..., classes)"
        elif targets.shape != shape[:-1]:
            invariant = "Targets must have the shape of the logits without the last dimension"
        elif targets.dtype not in (torch.int32, torch.int64):
            invariant = "Targets must be class indices of int32 or int64"
        elif self.vocabulary is not None and shape[-1] != self.vocabulary.rows:
            own = self.vocabulary
            invariant = f"Logits must be those of this rank's {own.rows} of {own.classes} classes"
        if invariant:
            received = (
                f"logits {tuple(shape)} of {dtype}, "
                f"targets {tuple(targets.shape)} of {targets.dtype}"
            )
            raise InputError.explained(invariant, where="CrossEntropy", received=received)

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        (targets,) = extra_inputs
        if self.vocabulary is not None:
            refuse_reference(self.vocabulary.group, "CrossEntropy")
        self.check_inputs(input_.shape, input_.dtype, targets)
        logits = input_.reshape(-1, input_.shape[-1])
        logits = logits.to(torch.promote_types(input_.dtype, torch.float32))
        flat = targets.reshape(-1).long()
        counts = flat != self.ignore_index
        loss = F.cross_entropy(
            logits,
            flat,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="none",
        )
        if self.z_loss:
            loss = loss + torch.where(counts, self.z_loss * logits.logsumexp(1).square(), 0.0)
        if self.reduction == "none":
            return loss.view(targets.shape)
        return loss.sum() / counts.sum() if self.reduction == "mean" else loss.sum()

    def extra_repr(self) -> str:
        text = (
            f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, "
            f"reduction={self.reduction!r}"
        )
        if self.z_loss:
            text += f", z_loss={self.z_loss}"
        own = self.vocabulary
        if own is None:
            return text
        return f"{text}, classes {own.start} to {own.start + own.rows - 1} of {own.classes}"


def _matrix(x: Tensor) -> Tensor:
    """Logits as (rows, classes)."""
    return x.reshape(-1, x.shape[-1])
