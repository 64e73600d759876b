from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from opfuser import CrossEntropy
from opfuser.errors import InputError
from opfuser.kernels.launch import runs
from opfuser.testing import check_op
from tests.basic.values import DTYPES, held_to


def torchs(op: CrossEntropy, x: Tensor, targets: Tensor) -> Tensor:
    """torch's own loss and a z-loss, over rows; in fp32 at least, as the loss is."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    rows, flat = x.reshape(-1, x.shape[-1]), targets.reshape(-1).long()
    loss = F.cross_entropy(
        rows,
        flat,
        ignore_index=op.ignore_index,
        label_smoothing=op.label_smoothing,
        reduction=op.reduction,
    )
    if op.z_loss:
        counts = flat != op.ignore_index
        z = torch.where(counts, op.z_loss * rows.logsumexp(1).square(), 0.0)
        if op.reduction != "none":
            z = z.sum() / (counts.sum() if op.reduction == "mean" else 1)
        loss = loss + z
    return loss.view(targets.shape) if op.reduction == "none" else loss


def grad_of(y: Tensor, x: Tensor, dy: Tensor) -> Tensor:
    (dx,) = torch.autograd.grad(y, x, dy)
    return dx


def some_targets(shape: tuple[int, ...], classes: int, device: torch.device) -> Tensor:
    targets = torch.randint(0, classes, shape, device=device)
    if targets.dim():
        targets.view(-1)[::3] = -100
    return targets


@pytest.mark.parametrize(
    ("shape", "classes", "smoothing", "z_loss", "reduction"),
    [
        ((13,), 7, 0.0, 0.0, "mean"),
        ((13,), 7, 0.0, 0.0, "sum"),
        ((13,), 7, 1.0, 1e-2, "none"),
        ((2, 5), 33, 0.1, 0.0, "mean"),
        ((2, 5), 33, 0.1, 0.0, "none"),
        ((2, 5), 33, 0.0, 1e-2, "mean"),
        ((2, 5), 33, 0.0, 1e-2, "sum"),
        ((2,), 1, 0.1, 0.0, "mean"),
        ((2,), 1, 0.1, 0.0, "sum"),
        ((), 9, 0.0, 0.0, "none"),
        ((), 9, 0.0, 0.0, "mean"),
        ((70,), 2003, 0.1, 1e-3, "mean"),  # on a CPU, in blocks of rows
        ((70,), 2003, 0.1, 1e-3, "none"),
    ],
    ids=str,
)
def test_as_exact_as_torch(
    shape: tuple[int, ...],
    classes: int,
    smoothing: float,
    z_loss: float,
    reduction: Any,
    device: torch.device,
) -> None:
    op = held_to(CrossEntropy(-100, smoothing, reduction, z_loss), torchs)
    x = 3 * torch.randn(*shape, classes, device=device)
    targets = some_targets(shape, classes, device)
    assert op(x.bfloat16(), targets).dtype == torch.float32
    # Without rows the mean is nan.
    zero_rows = reduction != "mean" and bool(shape)
    check_op(op, x, targets, dtypes=DTYPES, zero_rows=zero_rows)


@pytest.mark.parametrize(
    ("rows", "smoothing", "reduction"),
    [(0, 0.0, "mean"), (3, 0.2, "mean"), (0, 0.2, "sum"), (3, 0.0, "sum"), (3, 0.0, "none")],
)
def test_nothing_counts(rows: int, smoothing: float, reduction: Any, device: torch.device) -> None:
    op = CrossEntropy(label_smoothing=smoothing, reduction=reduction)
    x = torch.randn(rows, 5, device=device, requires_grad=True)
    targets = torch.full((rows,), -100, device=device)
    y = op(x, targets)
    torch.testing.assert_close(y, torchs(op, x, targets), equal_nan=True)
    assert torch.isnan(y).any() == (reduction == "mean")
    assert torch.equal(grad_of(y, x, torch.ones_like(y)), torch.zeros_like(x))


def test_ignored_rows_may_hold_anything() -> None:
    x = torch.tensor([[0.0, 1.0], [float("inf"), 2.0]], requires_grad=True)
    y = CrossEntropy()(x, torch.tensor([1, -100]))
    torch.testing.assert_close(y, F.cross_entropy(x[:1], torch.tensor([1])))


@pytest.mark.gpu
def test_nothing_waits_for_the_device(no_waiting: Any) -> None:
    x = torch.randn(8, 50, device="cuda", requires_grad=True)
    targets = torch.randint(0, 50, (8,), device="cuda")
    CrossEntropy()(x, targets).backward()
    with no_waiting():
        CrossEntropy()(x, targets).backward()


@pytest.mark.parametrize(
    ("x", "targets", "text"),
    [
        (torch.ones(3, 4), torch.ones(4).long(), "Targets must have the shape"),
        (torch.ones(3, 4), torch.ones(3, 4).long(), "Targets must have the shape"),
        (torch.ones(3, 4), torch.ones(3), "class indices of int32 or int64 .*torch.float32"),
        (torch.ones(3, 4).long(), torch.ones(3).long(), "Logits must be floating point"),
        (torch.ones(3, 0), torch.ones(3).long(), "Logits must be floating point"),
        (torch.ones(()), torch.ones(()).long(), "Logits must be floating point"),
    ],
)
def test_refuses_inputs(x: Tensor, targets: Tensor, text: str) -> None:
    with pytest.raises(InputError, match=text):
        CrossEntropy()(x, targets)


@pytest.mark.parametrize("target", [5, -1])
def test_a_target_that_is_no_class_fails(target: int, device: torch.device) -> None:
    x = torch.ones(2, 5, device=device, requires_grad=True)
    targets = torch.tensor([target, 1], device=device)
    if not runs(x):
        with pytest.raises((IndexError, RuntimeError)):
            CrossEntropy()(x, targets)
        return
    # Kernels could only end the process.
    loss = CrossEntropy(reduction="none")(x, targets)
    assert loss.isnan().tolist() == [True, False]
    assert grad_of(loss.sum(), x, loss.new_ones(())).isnan().all(1).tolist() == [True, False]
