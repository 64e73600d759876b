from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from opfuser import CrossEntropy, Linear, Sequential
from opfuser.errors import ArgumentError, InputError, OpKwargsError
from opfuser.kernels import cross_entropy_plain
from opfuser.kernels.launch import runs
from opfuser.testing import check_op

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
REDUCTIONS = ["mean", "sum", "none"]


@pytest.fixture(params=["one chunk", "row by row"], autouse=True)
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "row by row":
        monkeypatch.setattr(cross_entropy_plain, "_BLOCK", {"cpu": 1, "cuda": 1})


def torchs(op: CrossEntropy, x: Tensor, targets: Tensor) -> Tensor:
    """torch's own loss and a z-loss, over rows, with the reduction of ``op``."""
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


def assert_as_good_as(ours: Tensor, theirs: Tensor, truth: Tensor, size: Tensor) -> None:
    """The floor is relative to ``size``, the largest of the terms that are added up."""
    assert ours.shape == truth.shape
    error, allowed = (ours - truth).abs().max(), (theirs - truth).abs().max()
    assert error <= 2 * allowed + 4 * torch.finfo(ours.dtype).eps * size


def some_targets(shape: tuple[int, ...], classes: int, device: torch.device) -> Tensor:
    targets = torch.randint(0, classes, shape, device=device)
    if targets.dim():
        targets.view(-1)[::3] = -100
    return targets


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("shape", "classes"), [((13,), 7), ((2, 5), 33), ((2,), 1), ((), 9)])
def test_against_torch_in_float64(
    shape: tuple[int, ...],
    classes: int,
    smoothing: float,
    reduction: Any,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    check(
        CrossEntropy(label_smoothing=smoothing, reduction=reduction), shape, classes, dtype, device
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_z_loss(smoothing: float, reduction: Any, dtype: torch.dtype, device: torch.device) -> None:
    op = CrossEntropy(label_smoothing=smoothing, reduction=reduction, z_loss=1e-2)
    check(op, (2, 5), 33, dtype, device)


def check(
    op: CrossEntropy,
    shape: tuple[int, ...],
    classes: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    x = (3 * torch.randn(*shape, classes, device=device)).to(dtype).requires_grad_()
    targets = some_targets(shape, classes, device)
    x64 = x.detach().double().requires_grad_()
    y, theirs, truth = op(x, targets), torchs(op, x, targets), torchs(op, x64, targets)
    assert y.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    size = torch.maximum(truth.detach().abs().max(), x64.detach().abs().max())
    assert_as_good_as(y.detach(), theirs.detach(), truth.detach(), size)
    torch.testing.assert_close(op.reference(x64, targets), truth)

    dy = torch.rand_like(y) + 0.5
    dx = grad_of(y, x, dy)
    assert dx.dtype == dtype
    dtheirs = grad_of(theirs, x, dy.to(theirs.dtype))
    assert_as_good_as(dx, dtheirs, grad_of(truth, x64, dy.double()), dy.abs().max())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("case", ["no rows", "all ignored"])
def test_nothing_counts(case: str, smoothing: float, reduction: Any, device: torch.device) -> None:
    op = CrossEntropy(label_smoothing=smoothing, reduction=reduction)
    rows = 0 if case == "no rows" else 3
    x = torch.randn(rows, 5, device=device, requires_grad=True)
    targets = torch.full((rows,), -100, device=device)
    y, theirs = op(x, targets), torchs(op, x, targets)
    torch.testing.assert_close(y, theirs, equal_nan=True)
    assert torch.isnan(y).any() == (reduction == "mean")
    dx = grad_of(y, x, torch.ones_like(y))
    torch.testing.assert_close(dx, torch.zeros_like(x), rtol=0, atol=0)


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ignore_index(ignore_index: int, dtype: torch.dtype, device: torch.device) -> None:
    op = CrossEntropy(ignore_index=ignore_index)
    x = torch.randn(8, 4, dtype=torch.float64, device=device, requires_grad=True)
    targets = torch.tensor([0, 1, 2, 3, 3, ignore_index, 1, 0], dtype=dtype, device=device)
    y, truth = op(x, targets), torchs(op, x, targets)
    torch.testing.assert_close(y, truth)
    torch.testing.assert_close(grad_of(y, x, y), grad_of(truth, x, y))


def test_ignored_rows_may_hold_anything() -> None:
    x = torch.tensor([[0.0, 1.0], [float("inf"), 2.0]], requires_grad=True)
    y = CrossEntropy()(x, torch.tensor([1, -100]))
    torch.testing.assert_close(y, F.cross_entropy(x[:1], torch.tensor([1])))


def test_masked_classes_have_no_gradient() -> None:
    x = torch.randn(4, 6)
    x[:, 4:] = -torch.inf
    x.requires_grad_()
    targets = torch.tensor([0, 1, 2, 3])
    y, truth = CrossEntropy()(x, targets), F.cross_entropy(x, targets)
    torch.testing.assert_close(y, truth)
    torch.testing.assert_close(grad_of(y, x, y), grad_of(truth, x, y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_large_logits(dtype: torch.dtype) -> None:
    x = torch.tensor([[6e4, -6e4, 0.0], [6e4, 6e4, 6e4]], dtype=dtype, requires_grad=True)
    targets = torch.tensor([1, 0])
    y = CrossEntropy(reduction="none")(x, targets)
    torch.testing.assert_close(y, torch.tensor([2.0 * x[0, 0].item(), math.log(3)]))
    dx = grad_of(y, x, torch.ones_like(y))
    expected = torch.tensor([[1.0, -1.0, 0.0], [1 / 3 - 1, 1 / 3, 1 / 3]]).to(dtype)
    torch.testing.assert_close(dx, expected)


def test_other_layouts() -> None:
    op = CrossEntropy(label_smoothing=0.1, reduction="none")
    targets = torch.randint(0, 6, (4, 3)).t()
    inputs = [
        torch.randn(6, 4, 3, dtype=torch.float64).permute(2, 1, 0),
        torch.randn(3, 4, 12, dtype=torch.float64)[..., ::2],
        torch.randn(1, 1, 6, dtype=torch.float64).expand(3, 4, 6),
    ]
    for value in inputs:
        x = value.detach().requires_grad_()
        for dy in (torch.randn(4, 3).t().double(), torch.ones(()).double().expand(3, 4)):
            y, truth, kept = op(x, targets), torchs(op, x, targets), dy.clone()
            torch.testing.assert_close(y, truth)
            torch.testing.assert_close(grad_of(y, x, dy), grad_of(truth, x, dy))
            torch.testing.assert_close(dy, kept, rtol=0, atol=0)


def test_logits_are_left_alone_and_saved_once() -> None:
    x = torch.randn(32, 50, requires_grad=True)
    before, targets = x.detach().clone(), torch.randint(0, 50, (32,))
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = CrossEntropy()(x, targets)
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    assert sum(sizes.values()) == 4 * 32 * 50 + 8 * 32 + 2 * 4 * 32 + 8
    y.backward()
    torch.testing.assert_close(x.detach(), before, rtol=0, atol=0)


@pytest.mark.gpu
def test_nothing_waits_for_the_device(no_waiting: Any) -> None:
    x = torch.randn(8, 50, device="cuda", requires_grad=True)
    targets = torch.randint(0, 50, (8,), device="cuda")
    CrossEntropy()(x, targets).backward()
    with no_waiting():
        CrossEntropy()(x, targets).backward()


def test_after_a_linear_layer_under_autocast(device: torch.device) -> None:
    model = Sequential(Linear(6, 11, device=device), CrossEntropy(label_smoothing=0.1))
    x = torch.randn(9, 6, device=device)
    targets = some_targets((9,), 11, device)
    with torch.autocast(device.type, torch.bfloat16):
        loss = model(x, targets)
        truth = torchs(model[1], F.linear(x, model[0].weight, model[0].bias), targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, truth, rtol=1e-2, atol=1e-2)
    weight = model[0].weight
    ours, theirs = (torch.autograd.grad(y, weight)[0] for y in (loss, truth))
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_two_backwards_agree() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    y = CrossEntropy()(x, torch.tensor([0, 1, 2, 3]))
    first = torch.autograd.grad(y, x, retain_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(y, x), rtol=0, atol=0)


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiled_whole(reduction: Any) -> None:
    torch.compiler.reset()  # its limit of recompilations counts those of all tests
    op = CrossEntropy(label_smoothing=0.1, reduction=reduction)
    compiled = torch.compile(Sequential(op), backend="aot_eager", fullgraph=True)
    x = torch.randn(7, 5, requires_grad=True)
    targets = some_targets((7,), 5, torch.device("cpu"))
    y, expected = compiled(x, targets), op(x, targets)
    torch.testing.assert_close(y, expected)
    dy = torch.ones_like(y)
    torch.testing.assert_close(grad_of(y, x, dy), grad_of(expected, x, dy))


def test_copies() -> None:
    op = CrossEntropy(3, 0.5, "sum")
    x, targets = torch.randn(4, 5), torch.tensor([0, 1, 2, 3])
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert repr(twin) == "CrossEntropy(ignore_index=3, label_smoothing=0.5, reduction='sum')"
        torch.testing.assert_close(twin(x, targets), op(x, targets), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"reduction": "max"}, "reduction must be .*'max'"),
        ({"label_smoothing": -0.1}, "label_smoothing must be between 0 and 1 .*=-0.1"),
        ({"label_smoothing": 1.1}, "label_smoothing must be between 0 and 1"),
        ({"z_loss": -1.0}, r"z_loss must be a finite number, and not negative .*z_loss=-1\.0"),
        ({"z_loss": math.inf}, "z_loss must be a finite number.*=inf"),
        ({"z_loss": math.nan}, "z_loss must be a finite number.*=nan"),
    ],
)
def test_refuses_arguments(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        CrossEntropy(**kwargs)


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


def test_refuses_keywords() -> None:
    with pytest.raises(OpKwargsError, match=r"takes no keywords\. Received: weight"):
        Sequential(CrossEntropy())(
            torch.ones(2, 3), torch.tensor([0, 1]), op_kwargs={0: {"weight": 1}}
        )


def test_z_loss_shows() -> None:
    op = CrossEntropy(z_loss=1e-4)
    text = "CrossEntropy(ignore_index=-100, label_smoothing=0.0, reduction='mean', z_loss=0.0001)"
    assert repr(op) == text


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_checked_like_a_users_operation(
    reduction: Any, z_loss: float, device: torch.device
) -> None:
    op = CrossEntropy(label_smoothing=0.1, reduction=reduction, z_loss=z_loss)
    x = torch.randn(6, 5, device=device)
    targets = some_targets((6,), 5, device)
    # Without rows the mean is nan.
    check_op(op, x, targets, dtypes=DTYPES, zero_rows=reduction != "mean")
