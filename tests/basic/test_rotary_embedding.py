from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from opfuser import RotaryEmbedding, Sequential
from opfuser.errors import ArgumentError, InputError, OpKwargsError
from opfuser.kernels import rotary_plain
from opfuser.testing import check_op

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

VARIANTS: dict[str, dict[str, Any]] = {
    "half-split": {},
    "interleaved": {"interleaved": True},
    "grouped": {"num_kv_heads": 2},
    "partial": {"rotary_dim": 4, "base": 500.0},
    "partial interleaved": {"rotary_dim": 2, "interleaved": True, "num_kv_heads": 1},
}


def make(variant: str, **kwargs: Any) -> RotaryEmbedding:
    return RotaryEmbedding(4, 6, **{**VARIANTS[variant], **kwargs})


def features(op: RotaryEmbedding) -> int:
    return (op.num_heads + 2 * op.num_kv_heads) * op.head_dim


def exact(op: RotaryEmbedding, x: Tensor, positions: Tensor | None = None) -> Tensor:
    """The formula with complex numbers, in fp64: each pair is multiplied by exp(i φ)."""
    batch, length, _ = x.shape
    heads = x.double().unflatten(2, (-1, op.head_dim))
    size = op.rotary_dim
    if positions is None:
        positions = torch.arange(length)
    positions = positions.cpu().expand(batch, length)
    pairs = torch.arange(size // 2, dtype=torch.float64)
    angles = positions[..., None, None] * op.base ** (-2 * pairs / size)
    turn = torch.polar(torch.ones_like(angles), angles).to(x.device)
    places = (
        torch.arange(size).view(-1, 2) if op.interleaved else torch.arange(size).view(2, -1).t()
    )
    out = heads.clone()
    rotated = op.num_heads + op.num_kv_heads
    for i, (first, second) in enumerate(places.tolist()):
        a, b = heads[:, :, :rotated, first], heads[:, :, :rotated, second]
        z = torch.complex(a, b) * turn[..., i]
        out[:, :, :rotated, first], out[:, :, :rotated, second] = z.real, z.imag
    return out.reshape(x.shape)


def grad_of(y: Tensor, x: Tensor, dy: Tensor) -> Tensor:
    (dx,) = torch.autograd.grad(y, x, dy)
    return dx


def assert_as_good_as(ours: Tensor, plain: Tensor, truth: Tensor) -> None:
    assert ours.dtype == plain.dtype
    assert ours.shape == truth.shape
    if not truth.numel():
        return
    error, allowed = (ours - truth).abs().max(), (plain - truth).abs().max()
    assert error <= 2 * allowed + 4 * torch.finfo(ours.dtype).eps * truth.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("batch", "length"), [(2, 13), (1, 1), (3, 0), (0, 5)])
def test_against_complex_numbers(
    variant: str, batch: int, length: int, dtype: torch.dtype, device: torch.device
) -> None:
    op = make(variant)
    x = torch.randn(batch, length, features(op), dtype=dtype, device=device).requires_grad_()
    dy = torch.randn_like(x)
    x64 = x.detach().double().requires_grad_()
    truth, plain, y = exact(op, x64), op.reference(x), op(x)
    assert_as_good_as(y.detach(), plain.detach(), truth.detach())
    dtruth = grad_of(truth, x64, dy.double())
    assert_as_good_as(grad_of(y, x, dy), grad_of(plain, x, dy), dtruth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_long_sequences_are_walked_in_blocks(
    variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotary_plain, "_BLOCK", 200)
    op = make(variant)
    x = torch.randn(2, 41, features(op), dtype=dtype)
    assert len(rotary_plain._blocks(x.view(2, 41, -1, op.head_dim))) > 3
    assert_as_good_as(op(x), op.reference(x), exact(op, x))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["sequence", "batch", "int32", "first of the batch"])
def test_given_positions(variant: str, kind: str, device: torch.device) -> None:
    op = make(variant)
    positions = {
        "sequence": torch.tensor([5, 5, 0, 71]),
        "batch": torch.tensor([[0, 1, 2, 3], [90, 2, 2, 1]]),
        "int32": torch.arange(3, 7, dtype=torch.int32),
        "first of the batch": torch.tensor([[4, 3, 2, 1]]).expand(2, 4),
    }[kind].to(device)
    x = torch.randn(2, 4, features(op), dtype=torch.float64, device=device).requires_grad_()
    dy = torch.randn_like(x)
    y = Sequential(op)(x, op_kwargs={0: {"positions": positions}})
    truth = exact(op, x, positions)
    torch.testing.assert_close(y, truth)
    torch.testing.assert_close(grad_of(y, x, dy), grad_of(truth, x, dy))
    torch.testing.assert_close(op.reference(x, positions=positions), truth)
    torch.testing.assert_close(op(x, positions=positions), truth)


def test_values_and_what_is_beyond_rotary_dim_pass_unchanged() -> None:
    op = make("partial", num_kv_heads=2)
    x = torch.randn(2, 9, features(op))
    y, heads = op(x).view(2, 9, -1, 6), x.view(2, 9, -1, 6)
    torch.testing.assert_close(y[:, :, 6:], heads[:, :, 6:], rtol=0, atol=0)
    torch.testing.assert_close(y[..., 4:], heads[..., 4:], rtol=0, atol=0)
    torch.testing.assert_close(y[:, 0], heads[:, 0], rtol=0, atol=0)


def test_scores_depend_on_distances_only() -> None:
    op = RotaryEmbedding(1, 8)
    x = torch.randn(1, 1, 24, dtype=torch.float64).expand(1, 6, 24)
    for shift in (0, 31):
        q, k, _ = op(x, positions=torch.arange(6) + shift).split(8, dim=-1)
        scores = q[0] @ k[0].t()
        if not shift:
            expected = scores
        torch.testing.assert_close(scores, expected)
    torch.testing.assert_close(expected.diagonal(1), expected[0, 1].expand(5))


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_layouts_of_input_and_gradient(variant: str) -> None:
    op = make(variant)
    width = features(op)
    inputs = [
        torch.randn(width, 3, 2, dtype=torch.float64).permute(2, 1, 0),
        torch.randn(2, 3, 2 * width, dtype=torch.float64)[..., ::2],
        torch.randn(2, 3, width + 1, dtype=torch.float64)[..., 1:],
        torch.randn(1, 3, width, dtype=torch.float64).expand(2, 3, width),
    ]
    for value in inputs:
        x = value.detach().requires_grad_()
        for dy in [*inputs, torch.ones((), dtype=torch.float64).expand(2, 3, width)]:
            y, truth = op(x), exact(op, x)
            torch.testing.assert_close(y, truth)
            kept = dy.clone()
            torch.testing.assert_close(grad_of(y, x, dy), grad_of(truth, x, dy))
            torch.testing.assert_close(dy, kept, rtol=0, atol=0)


def test_dtype_under_autocast(device: torch.device) -> None:
    op = make("half-split")
    x = torch.randn(1, 3, features(op), device=device)
    with torch.autocast(device.type, torch.bfloat16):
        y = op(x)
    torch.testing.assert_close(y, op(x), rtol=0, atol=0)


def test_one_table_per_dtype_however_many_lengths() -> None:
    op = make("half-split")
    for length in (3, 8, 5, 8, 1):
        x = torch.randn(1, length, features(op))
        torch.testing.assert_close(op(x).double(), exact(op, x), rtol=1e-5, atol=1e-5)
        op(x.bfloat16())
        op(x.double())
    assert len(op._kept.tables) == 2
    assert {table.shape[0] for pair in op._kept.tables.values() for table in pair} == {8}


def test_frequencies_are_computed_once_however_often_positions_are_given() -> None:
    op = make("partial")
    x = torch.randn(1, 3, features(op))
    first = op(x, positions=torch.arange(3))
    (kept,) = op._kept.frequencies.values()
    assert kept.shape == (op.rotary_dim // 2,)
    torch.testing.assert_close(op(x, positions=torch.arange(3)), first, rtol=0, atol=0)
    assert next(iter(op._kept.frequencies.values())) is kept


def test_max_positions_fixes_the_table_and_the_length() -> None:
    op = make("half-split", max_positions=10)
    op(torch.randn(1, 3, features(op)))
    assert {table.shape[0] for pair in op._kept.tables.values() for table in pair} == {10}
    with pytest.raises(InputError, match=r"longer than max_positions .*11.*max_positions=10"):
        op(torch.randn(1, 11, features(op)))


def test_tables_are_no_state() -> None:
    op = make("interleaved", num_kv_heads=2)
    x = torch.randn(2, 5, features(op))
    expected = op(x)
    assert not op.state_dict()
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert not twin._kept.tables
        assert not twin._kept.frequencies
        torch.testing.assert_close(twin(x), expected, rtol=0, atol=0)
        assert repr(twin) == repr(op)
    assert op._kept.tables


def test_a_table_made_in_inference_mode_serves_training() -> None:
    op = make("half-split")
    x = torch.randn(2, 5, features(op))
    with torch.inference_mode():
        expected = op(x)
    leaf = x.clone().requires_grad_()
    y = op(leaf)
    torch.testing.assert_close(y.detach(), expected.clone(), rtol=0, atol=0)
    y.sum().backward()


def test_fake_tensors_leave_no_table_behind() -> None:
    op = make("half-split")
    with FakeTensorMode():
        x = torch.randn(2, 5, features(op), requires_grad=True)
        y = op(x)
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
    assert not op._kept.tables
    assert not op._kept.frequencies
    x = torch.randn(2, 5, features(op))
    torch.testing.assert_close(op(x).double(), exact(op, x), rtol=1e-5, atol=1e-5)


def test_meta_device() -> None:
    op = make("partial")
    y = op(torch.randn(2, 5, features(op), device="meta"))
    assert y.shape == (2, 5, features(op))
    assert y.device.type == "meta"


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("given", [False, True])
def test_compiled_whole(given: bool) -> None:
    torch.compiler.reset()  # its limit of recompilations counts those of all tests
    op = make("partial", num_kv_heads=2)
    model = Sequential(op)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 7, features(op), dtype=torch.float64).requires_grad_()
    kwargs = {0: {"positions": torch.arange(7) * 3}} if given else None
    dy = torch.randn_like(x)
    y, expected = compiled(x, op_kwargs=kwargs), model(x, op_kwargs=kwargs)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(grad_of(y, x, dy), grad_of(expected, x, dy))


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"num_heads": 0, "head_dim": 4}, "num_heads must be positive .*num_heads=0"),
        ({"num_heads": 2, "head_dim": -4}, "head_dim must be positive"),
        ({"num_heads": 2, "head_dim": 4, "num_kv_heads": 0}, "num_kv_heads must be positive"),
        ({"num_heads": 2, "head_dim": 4, "base": 0.0}, "base must be positive"),
        ({"num_heads": 2, "head_dim": 4, "max_positions": 0}, "max_positions must be positive"),
        ({"num_heads": 2, "head_dim": 5}, "even and at most head_dim .*rotary_dim=5"),
        ({"num_heads": 2, "head_dim": 4, "rotary_dim": 6}, "even and at most head_dim"),
    ],
)
def test_refuses_arguments(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        RotaryEmbedding(**kwargs)


@pytest.mark.parametrize(
    "x", [torch.ones(2, 3, 71), torch.ones(3, 72), torch.ones(2, 3, 72, dtype=torch.int64)]
)
def test_refuses_inputs(x: Tensor) -> None:
    with pytest.raises(InputError, match=r"\(batch, sequence, 72\) \(RotaryEmbedding\)"):
        make("half-split")(x)


@pytest.mark.parametrize(
    "positions", [torch.arange(3.0), torch.arange(4), torch.ones(3, 3).long(), torch.ones(2).long()]
)
def test_refuses_positions(positions: Tensor) -> None:
    with pytest.raises(InputError, match=r"positions must be integer.*positions \("):
        make("half-split")(torch.ones(2, 3, 72), positions=positions)


def test_refuses_other_keywords() -> None:
    with pytest.raises(OpKwargsError, match="offset"):
        Sequential(make("half-split"))(torch.ones(2, 3, 72), op_kwargs={0: {"offset": 1}})


@pytest.mark.parametrize("variant", VARIANTS)
def test_checked_like_a_users_operation(variant: str, device: torch.device) -> None:
    op = make(variant)
    x = torch.randn(2, 5, features(op), device=device)
    check_op(op, x, dtypes=DTYPES, zero_rows=True)
    positions = torch.tensor([3, 1, 2, 9, 70], device=device)
    check_op(op, x, kwargs={"positions": positions}, zero_rows=True)
