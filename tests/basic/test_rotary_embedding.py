from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from opfuser import RopeScaling, RotaryEmbedding, Sequential
from opfuser.errors import ArgumentError, InputError
from tests.basic.attributes import results, same
from tests.basic.values import ONE_UNIT, check_values, held_to

LLAMA3 = RopeScaling(
    rope_type="llama3", factor=8.0, original_max_position_embeddings=64, low_freq_factor=1.0,
    high_freq_factor=4.0,
)  # fmt: skip
LONGROPE = RopeScaling(
    rope_type="longrope", factor=4.0, original_max_position_embeddings=6,
    short_factor=(1.0, 1.1, 1.2), long_factor=(1.5, 3.0, 9.0),
)  # fmt: skip
DYNAMIC = RopeScaling(rope_type="dynamic", factor=3.0, original_max_position_embeddings=6)
VARIANTS: dict[str, dict[str, Any]] = {
    "half-split": {},
    "interleaved": {"interleaved": True},
    "grouped": {"num_kv_heads": 2},
    "partial": {"rotary_dim": 4, "base": 500.0},
    "partial interleaved": {"rotary_dim": 2, "interleaved": True, "num_kv_heads": 1},
    "queries alone": {"num_kv_heads": 0, "rotary_dim": 4},
    "scaled": {"scaling": LLAMA3, "num_kv_heads": 2},
    "attention factor": {"scaling": LONGROPE, "interleaved": True},
    "by length": {"scaling": DYNAMIC},
    "sections": {"sections": (2, 1), "num_kv_heads": 1},
    "sections interleaved": {"sections": [1, 1, 1], "interleave_sections": True},
}
ROUNDING = {**ONE_UNIT, torch.float32: 5e-7}


def make(variant: str, **kwargs: Any) -> RotaryEmbedding:
    return RotaryEmbedding(4, 6, **{**VARIANTS[variant], **kwargs})


def features(op: RotaryEmbedding) -> int:
    return (op.num_heads + 2 * op.num_kv_heads) * op.head_dim


def turned(
    op: RotaryEmbedding, x: Tensor, positions: Tensor | None = None, length: int | None = None
) -> Tensor:
    """The formula with complex numbers, in fp64: each pair is multiplied by c exp(i φ)."""
    batch, tokens, _ = x.shape
    heads = x.double().unflatten(2, (-1, op.head_dim))
    size = op.rotary_dim
    if positions is None:
        positions = torch.arange(tokens)
    frequencies = op.inverse_frequencies(length or tokens, dtype=torch.float64)
    places = (
        torch.arange(size).view(-1, 2) if op.interleaved else torch.arange(size).view(2, -1).t()
    )
    out = heads.clone()
    rotated = op.num_heads + op.num_kv_heads
    for i, (first, second) in enumerate(places.tolist()):
        row = positions[row_of_pair(op, i)] if positions.dim() == 3 else positions
        angles = row.cpu().expand(batch, tokens) * frequencies[i]
        turn = torch.polar(torch.full_like(angles, op.attention_scaling), angles).to(x.device)
        z = torch.complex(heads[:, :, :rotated, first], heads[:, :, :rotated, second])
        z = z * turn[..., None]
        out[:, :, :rotated, first], out[:, :, :rotated, second] = z.real, z.imag
    return out.reshape(x.shape).to(x.dtype)


def row_of_pair(op: RotaryEmbedding, i: int) -> int:
    """Of the positions that pair i turns by."""
    sizes = list(op.sections or ())
    if op.interleave_sections:
        row = i % len(sizes)
        return row if i < len(sizes) * sizes[row] else 0
    return next(row for row in range(len(sizes)) if i < sum(sizes[: row + 1]))


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
        ("attention factor", "one of the batch"),
        ("queries alone", "batch"),
        ("sections", "of several rows"),
        ("sections", "batch"),
        ("sections interleaved", "rows of the batch"),
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
            "one of the batch": torch.tensor([[4, 3, 2, 1]]),
            "of several rows": torch.tensor([[[4, 3, 2, 1]], [[0, 7, 7, 50]]]),
            "rows of the batch": torch.arange(24).view(3, 2, 4) % 11,
        }[kind].to(device)
    }
    x = torch.randn(2, 4, features(op), device=device)
    check_values(op, x, kwargs=kwargs, floors=ROUNDING, zero_rows=False)
    assert torch.equal(Sequential(op)(x, op_kwargs={0: kwargs}), op(x, **kwargs))


@pytest.mark.parametrize("variant", ["grouped", "partial interleaved", "attention factor"])
def test_given_tables(variant: str, device: torch.device) -> None:
    """Of one sequence, or of each; what the operation would compute does not matter."""
    op, other = make(variant), make(variant, base=7.0, scaling=None)
    x = torch.randn(2, 4, features(op), device=device)
    for positions in (torch.tensor([5, 5, 0, 71]), torch.tensor([[0, 1, 2, 3], [90, 2, 2, 1]])):
        angles = positions.reshape(-1, 1) * op.inverse_frequencies(dtype=torch.float64)
        tables = (torch.stack([angles.cos(), angles.sin()]) * op.attention_scaling).to(device)
        expected = op(x.double(), positions=positions.to(device))
        y = other(x.double(), tables=tables)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        check_values(other, x, kwargs={"tables": tables}, zero_rows=False)


@pytest.mark.parametrize("scaling", [LONGROPE, DYNAMIC], ids=lambda scaling: scaling.rope_type)
def test_each_length_has_tables_of_its_own(scaling: RopeScaling) -> None:
    """No table of another length is taken, whatever the order; backward takes that of forward."""
    op = held_to(make("half-split", scaling=scaling), turned)
    for tokens, length in ((9, None), (5, None), (12, None), (5, 9), (5, None), (9, 5), (9, None)):
        x = torch.randn(2, tokens, features(op))
        kwargs = {} if length is None else {"length": length}
        check_values(op, x, dtypes=[torch.float64], kwargs=kwargs, zero_rows=False)
    step = {"positions": torch.tensor([8]), "length": 9}
    x = torch.randn(2, 9, features(op))
    torch.testing.assert_close(op(x[:, 8:], **step), op(x)[:, 8:])
    assert not torch.allclose(op(x[:, 8:], positions=torch.tensor([8])), op(x)[:, 8:])


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
    tables = [t for t in op.cached_tensors() if t.dim() == 2]
    assert [t.dtype for t in tables] == 2 * [torch.float32] + 2 * [torch.float64]
    assert {len(t) for t in tables} == {8}
    assert not op.state_dict()
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert not twin.cached_tensors()
        torch.testing.assert_close(twin(x), op(x), rtol=0, atol=0)


def test_frequencies_are_computed_once_however_often_positions_are_given() -> None:
    op = make("partial")
    x = torch.randn(1, 3, features(op))
    first = op(x, positions=torch.arange(3))
    (kept,) = op.cached_tensors()
    assert kept.shape == (op.rotary_dim // 2,)
    torch.testing.assert_close(op(x, positions=torch.arange(3)), first, rtol=0, atol=0)
    assert op.cached_tensors()[0] is kept


def test_angles_of_many_bases_are_not_all_kept() -> None:
    op = make("half-split")
    x = torch.randn(2, 5, features(op))
    for base in range(2, 40):
        op.base = base
        assert same([op(x)], [make("half-split", base=base)(x)])
        op(x, positions=torch.arange(5))
    assert len(op.cached_tensors()) <= 8 * 2 + 8


def test_max_positions_fixes_the_table_and_the_length() -> None:
    op = make("half-split", max_positions=10)
    op(torch.randn(1, 3, features(op)))
    assert {len(t) for t in op.cached_tensors() if t.dim() == 2} == {10}
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
    assert not op.cached_tensors()
    x = torch.randn(2, 5, features(op))
    torch.testing.assert_close(op(x), turned(op, x), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@torch.no_grad()
def test_tables_made_in_a_graph_serve_no_other_call() -> None:
    op, x = make("attention factor"), torch.randn(2, 9, 72, device="cuda")
    make("attention factor")(x)  # compiles the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x)
    torch.testing.assert_close(op(x), turned(op, x), rtol=1e-5, atol=1e-5)
    graph.replay()
    assert torch.equal(y, op(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo, of its own doing
@pytest.mark.parametrize("scaling", [LONGROPE, DYNAMIC], ids=lambda scaling: scaling.rope_type)
def test_compiles_for_several_lengths(scaling: RopeScaling) -> None:
    torch.compiler.reset()
    model = Sequential(make("half-split", scaling=scaling))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for tokens in (5, 4, 8, 3):
        x = torch.randn(2, tokens, 72, dtype=torch.float64).requires_grad_()
        ys, dy = [run(x) for run in (compiled, model)], torch.randn_like(x)
        torch.testing.assert_close(*ys)
        torch.testing.assert_close(*[torch.autograd.grad(y, x, dy) for y in ys])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("scaling", [LONGROPE, DYNAMIC], ids=lambda scaling: scaling.rope_type)
def test_a_compiled_decoding_step_is_not_compiled_for_every_token(scaling: RopeScaling) -> None:
    """Once for a length as it is, once for any, and once for any beyond those of training."""
    torch.compiler.reset()
    model = Sequential(make("half-split", scaling=scaling))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    x = torch.randn(2, 1, 72)
    for length in range(4, 10):
        kwargs = {0: {"positions": torch.tensor([length - 1]), "length": length}}
        torch.testing.assert_close(compiled(x, op_kwargs=kwargs), model(x, op_kwargs=kwargs))
    assert counter.frame_count <= 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("variant", ["partial", "sections", "attention factor"])
def test_compiles_with_positions(variant: str) -> None:
    torch.compiler.reset()
    op = make(variant)
    model = Sequential(op)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 7, features(op), dtype=torch.float64).requires_grad_()
    positions = torch.arange(7) * 3
    if variant == "sections":
        positions = torch.stack([positions, positions % 5])[:, None]
    kwargs, dy = {0: {"positions": positions, "length": 7}}, torch.randn_like(x)
    ys = [run(x, op_kwargs=kwargs) for run in (compiled, model)]
    torch.testing.assert_close(*ys)
    torch.testing.assert_close(*[torch.autograd.grad(y, x, dy) for y in ys])


X = torch.ones(2, 3, 72)
INPUT = r"\(batch, sequence, 72\) \(RotaryEmbedding\)"
POSITIONS = r"positions must be integer.*positions \("
LENGTH = r"length must be a positive int .*Received: (length=0|a t)"
REFUSED: list[tuple[str, Tensor, dict[str, Any], str]] = [
    ("half-split", torch.ones(2, 3, 71), {}, INPUT),
    ("half-split", torch.ones(3, 72), {}, INPUT),
    ("half-split", X.long(), {}, INPUT),
    ("half-split", X, {"positions": torch.arange(3.0)}, POSITIONS),
    ("half-split", X, {"positions": torch.arange(4)}, POSITIONS),
    ("half-split", X, {"positions": torch.ones(3, 3).long()}, POSITIONS),
    ("half-split", X, {"positions": torch.ones(2).long()}, POSITIONS),
    (
        "sections", torch.ones(2, 4, 36), {"positions": torch.ones(3, 2, 4).long()},
        r"integer, \(sequence,\) or \(batch, sequence\), or \(2, batch, sequence\).*\(3, 2, 4\)",
    ),
    (
        "half-split", X, {"tables": torch.ones(2, 4, 6)},
        r"tables must be \(2, sequence, 3\) or \(2, batch \* ",
    ),
    ("half-split", X, {"tables": torch.ones(2, 3, 6).long()}, "Tables hold cosine and sine in"),
    (
        "half-split", X, {"tables": torch.ones(2, 3, 6), "positions": torch.arange(3)},
        r"in place of positions .*Received: positions \(3,\) of torch.int64, tables \(2, 3, 6",
    ),
    ("by length", X, {"length": 0}, LENGTH),
    ("by length", X, {"length": torch.tensor(9)}, LENGTH),
]  # fmt: skip


@pytest.mark.parametrize(("variant", "x", "given", "text"), REFUSED)
def test_refuses_inputs_and_keywords(
    variant: str, x: Tensor, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        make(variant)(x, **given)


def test_refuses_heads_of_odd_size() -> None:
    with pytest.raises(ArgumentError, match=r"even and at most head_dim .*rotary_dim=5"):
        RotaryEmbedding(2, 5)


OTHER_PAIRS: list[tuple[dict[str, Any], str]] = [
    (
        {"scaling": RopeScaling(rope_type="custom", frequencies=[1.0, 0.5])},
        r"frequencies must have a number for each pair .*2 numbers, rotary_dim=6",
    ),
    ({"scaling": LONGROPE, "rotary_dim": 4}, r"short_factor must have .*3 numbers, rotary_dim=4"),
    ({"scaling": DYNAMIC, "rotary_dim": 2}, r"dynamic scaling needs two pairs .*rotary_dim=2"),
    ({"scaling": RopeScaling(rope_type="axial")}, r"axial scaling needs sections \(Rotary"),
    ({"sections": (1, 1)}, r"add up to rotary_dim / 2 .*sections=\(1, 1\), rotary_dim=6"),
    (
        {"sections": (1, 2), "interleave_sections": True},
        r"Pairs of interleaved sections must be among .*sections=\(1, 2\), rotary_dim=6",
    ),
]


@pytest.mark.parametrize(("arguments", "text"), OTHER_PAIRS)
def test_refuses_scalings_and_sections_of_other_pairs(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        RotaryEmbedding(4, 6, **arguments)


def test_says_what_it_is() -> None:
    assert repr(make("half-split")) == (
        "RotaryEmbedding(num_heads=4, head_dim=6, num_kv_heads=4, base=10000.0, interleaved=False, "
        "rotary_dim=6)"
    )
    assert repr(make("by length", sections=(1, 2))).endswith(
        "scaling=RopeScaling(rope_type='dynamic', factor=3.0, original_max_position_embeddings=6), "
        "sections=(1, 2), interleave_sections=False)"
    )
