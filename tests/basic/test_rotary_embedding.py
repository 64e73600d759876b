from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from opfuser import RotaryEmbedding, Sequential
from opfuser.errors import ArgumentError, InputError
from tests.basic.attributes import results, same
from tests.basic.values import ONE_UNIT, check_values, held_to

VARIANTS: dict[str, dict[str, Any]] = {
    "half-split": {},
    "interleaved": {"interleaved": True},
    "grouped": {"num_kv_heads": 2},
    "partial": {"rotary_dim": 4, "base": 500.0},
    "partial interleaved": {"rotary_dim": 2, "interleaved": True, "num_kv_heads": 1},
}
ROUNDING = {**ONE_UNIT, torch.float32: 5e-7}


def make(variant: str, **kwargs: Any) -> RotaryEmbedding:
    return RotaryEmbedding(4, 6, **{**VARIANTS[variant], **kwargs})


def features(op: RotaryEmbedding) -> int:
    return (op.num_heads + 2 * op.num_kv_heads) * op.head_dim


def turned(op: RotaryEmbedding, x: Tensor, positions: Tensor | None = None) -> Tensor:
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
        z = torch.complex(heads[:, :, :rotated, first], heads[:, :, :rotated, second])
        z = z * turn[..., i]
        out[:, :, :rotated, first], out[:, :, :rotated, second] = z.real, z.imag
    return out.reshape(x.shape).to(x.dtype)


@pytest.mark.parametrize("variant", VARIANTS)
def test_against_complex_numbers(variant: str, device: torch.device) -> None:
    """Which are rounded once, to the dtype: plain torch is less exact."""
    for shape in ((2, 13), (1, 1), (3, 0)):
        op = held_to(make(variant), turned)
        x = torch.randn(*shape, features(op), device=device)
        check_values(op, x, floors=ROUNDING)


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("half-split", "sequence"),
        ("half-split", "first of the batch"),
        ("grouped", "int32"),
        ("partial interleaved", "batch"),
    ],
)
def test_given_positions(variant: str, kind: str, device: torch.device) -> None:
    op = held_to(make(variant), turned)
    kwargs = {
        "positions": {
            "sequence": torch.tensor([5, 5, 0, 71]),
            "batch": torch.tensor([[0, 1, 2, 3], [90, 2, 2, 1]]),
            "int32": torch.arange(3, 7, dtype=torch.int32),
            "first of the batch": torch.tensor([[4, 3, 2, 1]]).expand(2, 4),
        }[kind].to(device)
    }
    x = torch.randn(2, 4, features(op), device=device)
    check_values(op, x, kwargs=kwargs, floors=ROUNDING, zero_rows=False)
    assert torch.equal(Sequential(op)(x, op_kwargs={0: kwargs}), op(x, **kwargs))


def test_values_and_what_is_beyond_rotary_dim_pass_unchanged() -> None:
    op = make("partial", num_kv_heads=2)
    x = torch.randn(2, 9, features(op))
    y, heads = op(x).view(2, 9, -1, 6), x.view(2, 9, -1, 6)
    assert torch.equal(y[:, :, 6:], heads[:, :, 6:])
    assert torch.equal(y[..., 4:], heads[..., 4:])
    assert torch.equal(y[:, 0], heads[:, 0])


def test_dtype_under_autocast(device: torch.device) -> None:
    op = make("half-split")
    x = torch.randn(1, 3, features(op), device=device)
    with torch.autocast(device.type, torch.bfloat16):
        y = op(x)
    torch.testing.assert_close(y, op(x), rtol=0, atol=0)


def test_tables_are_kept_for_the_longest_sequence_and_no_state() -> None:
    op = make("half-split")
    for length in (3, 8, 5, 8, 1):
        x = torch.randn(1, length, features(op))
        torch.testing.assert_close(op(x), turned(op, x), rtol=1e-5, atol=1e-5)
        op(x.bfloat16())
        op(x.double())
    assert len(op._kept.tables) == 2, "fp32 and fp64"
    assert {table.shape[0] for pair in op._kept.tables.values() for table in pair} == {8}
    assert not op.state_dict()
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert not twin._kept.tables
        assert not twin._kept.frequencies
        torch.testing.assert_close(twin(x), op(x), rtol=0, atol=0)


def test_frequencies_are_computed_once_however_often_positions_are_given() -> None:
    op = make("partial")
    x = torch.randn(1, 3, features(op))
    first = op(x, positions=torch.arange(3))
    (kept,) = op._kept.frequencies.values()
    assert kept.shape == (op.rotary_dim // 2,)
    torch.testing.assert_close(op(x, positions=torch.arange(3)), first, rtol=0, atol=0)
    assert next(iter(op._kept.frequencies.values())) is kept


def test_angles_of_many_bases_are_not_all_kept() -> None:
    op = make("half-split")
    x = torch.randn(2, 5, features(op))
    for base in range(2, 40):
        op.base = base
        assert same([op(x)], [make("half-split", base=base)(x)])
        op(x, positions=torch.arange(5))
    assert len(op._kept.tables) <= 8
    assert len(op._kept.frequencies) <= 8


def test_max_positions_fixes_the_table_and_the_length() -> None:
    op = make("half-split", max_positions=10)
    op(torch.randn(1, 3, features(op)))
    assert {table.shape[0] for pair in op._kept.tables.values() for table in pair} == {10}
    with pytest.raises(InputError, match=r"longer than max_positions .*11.*max_positions=10"):
        op(torch.randn(1, 11, features(op)))


def test_a_table_made_in_inference_mode_serves_training() -> None:
    op = make("half-split")
    x = torch.randn(2, 5, features(op))
    with torch.inference_mode():
        op(x)
    assert same(results(op, [x]), results(make("half-split"), [x]))


def test_fake_tensors_leave_no_table_behind() -> None:
    op = make("half-split")
    with FakeTensorMode():
        op(torch.randn(2, 5, features(op), requires_grad=True)).sum().backward()
    assert not op._kept.tables
    assert not op._kept.frequencies
    x = torch.randn(2, 5, features(op))
    torch.testing.assert_close(op(x), turned(op, x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo, of its own doing
def test_compiles_with_positions() -> None:
    torch.compiler.reset()
    op = make("partial", num_kv_heads=2)
    model = Sequential(op)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 7, features(op), dtype=torch.float64).requires_grad_()
    kwargs, dy = {0: {"positions": torch.arange(7) * 3}}, torch.randn_like(x)
    ys = [run(x, op_kwargs=kwargs) for run in (compiled, model)]
    torch.testing.assert_close(*ys)
    torch.testing.assert_close(*[torch.autograd.grad(y, x, dy) for y in ys])


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


def test_refuses_heads_of_odd_size() -> None:
    with pytest.raises(ArgumentError, match=r"even and at most head_dim .*rotary_dim=5"):
        RotaryEmbedding(2, 5)
