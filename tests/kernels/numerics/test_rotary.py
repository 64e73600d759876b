"""Rotary embedding and QK-norm against fp64, held to the errors of naive torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from opfuser import QKNorm, RotaryEmbedding, Sequential
from opfuser.kernels import rotary as family
from opfuser.kernels.launch import recorded
from opfuser.kernels.rotary import qk_norm, qk_norm_backward, rotary
from opfuser.kernels.rotary_plain import Rotation
from tests.kernels.accuracy import assert_accurate, cut_off
from tests.kernels.blocks import small_blocks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6


class Heads(NamedTuple):
    queries: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool = False

    @property
    def features(self) -> int:
        return (self.queries + 2 * self.kv_heads) * self.head_dim

    @property
    def active(self) -> int:
        return self.queries + self.kv_heads


CASES = {
    "halves": Heads(4, 2, 8, 8),
    "neighbors": Heads(4, 2, 8, 8, True),
    "partial halves": Heads(3, 1, 10, 6),
    "partial neighbors": Heads(2, 2, 12, 4, True),
    "odd size": Heads(5, 1, 7, 4),
    "one pair": Heads(1, 1, 2, 2),
    "several tiles": Heads(70, 3, 48, 48),
    "wide heads": Heads(9, 2, 256, 64, True),
}
# Each with one dtype, and those that differ most with two.
PAIRS = [
    *zip(CASES, itertools.cycle(DTYPES)),
    ("halves", torch.float16),
    ("partial neighbors", torch.bfloat16),
]
each_pair = pytest.mark.parametrize(("name", "dtype"), PAIRS, ids=str)


class Given(NamedTuple):
    """Arguments, and the two forms in which naive torch takes them."""

    x: Tensor
    dy: Tensor
    cos: Tensor
    sin: Tensor
    q_weight: Tensor
    k_weight: Tensor
    period: int

    def rotation(self, heads: Heads) -> Rotation:
        return Rotation(self.cos, self.sin, self.period, heads.interleaved)

    @property
    def wide(self) -> Given:
        return Given(*[t.double() for t in self[:-1]], self.period)

    @property
    def like_x(self) -> Given:
        return Given(*[t.to(self.x.dtype) for t in self[:-1]], self.period)


def given(
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, int] = (2, 2),
    weight_dtype: torch.dtype | None = None,
    spare: int = 0,
) -> Given:
    """Random arguments, with ``spare`` rows at the end of the tables that no token uses."""
    rows = (*shape, heads.features)
    angles = torch.rand(shape[1] + spare, heads.rotary_dim // 2) * 50
    weights = torch.randn(2, heads.head_dim).to(weight_dtype or dtype)
    tensors = [
        3 * torch.randn(rows).to(dtype), torch.randn(rows).to(dtype),
        angles.cos(), angles.sin(), *weights,
    ]  # fmt: skip
    return Given(*[t.to(device) for t in tensors], shape[1])


def turned(t: Tensor, g: Given, heads: Heads, back: bool = False) -> Tensor:
    """Heads (..., rows, H, D) times exp(±i angle), pair by pair."""
    size = heads.rotary_dim
    times = t.shape[0] * t.shape[1] // max(1, g.period)
    cos, sin = (
        table[: g.period].repeat(times, 1).view(*t.shape[:2], 1, table.shape[1])
        for table in (g.cos, g.sin)
    )
    if back:
        sin = -sin
    if heads.interleaved:
        a, b = t[..., 0:size:2], t[..., 1:size:2]
        pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = t[..., : size // 2], t[..., size // 2 : size]
        pairs = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([pairs, t[..., size:]], -1)


def naive_rotary(g: Given, heads: Heads, back: bool) -> Tensor:
    t = g.x.unflatten(-1, (-1, heads.head_dim))
    qk, v = t.tensor_split([heads.active], 2)
    return torch.cat([turned(qk, g, heads, back), v], 2).flatten(2)


class Result(NamedTuple):
    y: Tensor
    rstd: Tensor
    dx: Tensor
    dq: Tensor
    dk: Tensor


def naive_norm(g: Given, heads: Heads, turn: bool, zero_centered: bool) -> Result:
    """QK-norm (and rotation) with gradients by autograd; statistics in fp32 or wider."""
    x, q_weight, k_weight = (t.clone().requires_grad_() for t in (g.x, g.q_weight, g.k_weight))
    t = x.unflatten(-1, (-1, heads.head_dim))
    qk, v = t.tensor_split([heads.active], 2)
    scale = torch.cat(
        [q_weight.expand(heads.queries, -1), k_weight.expand(heads.kv_heads, -1)]
    ) + int(zero_centered)
    wide = qk.to(torch.promote_types(qk.dtype, torch.float32))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    qk = (wide * rstd).to(qk.dtype) * scale
    if turn:
        qk = turned(qk, g, heads)
    y = torch.cat([qk, v], 2).flatten(2)
    return Result(y, rstd.squeeze(-1), *torch.autograd.grad(y, (x, q_weight, k_weight), g.dy))


def ours(g: Given, heads: Heads, turn: bool, zero_centered: bool) -> Result:
    rotation = g.rotation(heads) if turn else None
    weights = (g.q_weight, g.k_weight)
    y, rstd = qk_norm(g.x, *weights, rotation, heads.kv_heads, EPS, zero_centered)
    grads = qk_norm_backward(g.dy, g.x, *weights, rstd, rotation, zero_centered, True, True)
    return Result(y, rstd, *grads)


def assert_as_good_as(what: str, got: Tensor, plain: Tensor, truth: Tensor) -> None:
    assert got.is_contiguous(), what
    # A whole unit where digits are cut off, instead of half of one.
    assert_accurate(what, got, plain, truth, units=3 if cut_off(got) else 2)


def check_rotary(g: Given, heads: Heads) -> None:
    for back in (False, True):
        got = rotary(g.x, g.rotation(heads), heads.kv_heads, heads.head_dim, back)
        assert got.dtype == g.x.dtype
        truth = naive_rotary(g.wide, heads, back)
        what = "turned back" if back else "turned"
        assert_as_good_as(what, got, naive_rotary(g.like_x, heads, back), truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_that_all_turn(dtype: torch.dtype, device: torch.device) -> None:
    """Queries alone, or keys alone: there are no values behind them."""
    for heads in (Heads(5, 0, 10, 6), Heads(3, 0, 8, 8, True)):
        check_rotary(given(heads, dtype, device), heads)


@pytest.mark.parametrize("norm", [False, True])
def test_tables_of_positions_however_these_lie(norm: bool, device: torch.device) -> None:
    op = RotaryEmbedding(2, 12, num_kv_heads=1, sections=(3, 2, 1))
    model = Sequential(QKNorm(2, 12, num_kv_heads=1), op) if norm else Sequential(op)
    x = torch.randn(2, 5, 48, device=device)
    rows = torch.randint(40, (3, 2, 5), device=device)
    for positions in (rows, rows[0], rows[:, :1], rows.mT.contiguous().mT, rows[0, 0]):
        for lie in (positions, torch.stack([positions, positions], -1)[..., 0]):
            y = model.to(device)(x, op_kwargs={op: {"positions": lie}})
            wanted = op.reference(model[0].reference(x) if norm else x, positions=lie)
            torch.testing.assert_close(y, wanted)


def check_norm(g: Given, heads: Heads, turn: bool, zero_centered: bool = False) -> None:
    got = ours(g, heads, turn, zero_centered)
    truth = naive_norm(g.wide, heads, turn, zero_centered)
    plain = naive_norm(g.like_x, heads, turn, zero_centered)
    for name, mine, naive, exact in zip(Result._fields, got, plain, truth):
        assert_as_good_as(name, mine, naive, exact)
    expected = [g.x.dtype, torch.float32, g.x.dtype, g.q_weight.dtype, g.k_weight.dtype]
    assert [t.dtype for t in got] == expected


@each_pair
def test_rotary(name: str, dtype: torch.dtype, device: torch.device) -> None:
    heads = CASES[name]
    check_rotary(given(heads, dtype, device), heads)


@each_pair
def test_norm(name: str, dtype: torch.dtype, device: torch.device) -> None:
    heads = CASES[name]
    check_norm(given(heads, dtype, device, (1, 2)), heads, turn=True)
    check_norm(given(heads, dtype, device, (1, 2)), heads, turn=False, zero_centered=True)
    check_norm(given(heads, dtype, device, (1, 1)), heads, turn=True, zero_centered=True)
    for other in DTYPES if name == "halves" else ():
        check_norm(given(heads, dtype, device, weight_dtype=other), heads, turn=True)


@pytest.mark.parametrize("shape", [(3, 0), (0, 5)], ids=str)
def test_no_rows(shape: tuple[int, int], device: torch.device) -> None:
    heads = CASES["partial halves"]
    g = given(heads, torch.bfloat16, device, shape)
    check_rotary(g, heads)
    for turn in (True, False):
        got = ours(g, heads, turn, False)
        assert got.y.shape == got.dx.shape == g.x.shape
        assert got.rstd.shape == (*shape, heads.active)
        for dw in (got.dq, got.dk):
            assert torch.equal(dw, torch.zeros_like(g.q_weight))


def test_head_of_one_entry(device: torch.device) -> None:
    """Its norm is its sign: gradients are small differences, with hardly a digit in any dtype."""
    heads = Heads(3, 2, 1, 0)
    g = given(heads, torch.float32, device)
    got, truth = ours(g, heads, False, False), naive_norm(g.wide, heads, False, False)
    for mine, exact in zip(got, truth):
        torch.testing.assert_close(mine.double(), exact.double(), rtol=1e-5, atol=1e-5)


def with_weights_apart(g: Given) -> Given:
    apart = torch.stack([g.q_weight, g.k_weight], -1)
    return g._replace(q_weight=apart[:, 0], k_weight=apart[:, 1])


def laid_out(lay: Callable[[Tensor], Tensor]) -> Callable[[Given], Given]:
    return lambda g: g._replace(x=lay(g.x), dy=lay(g.dy))


MEMORY: dict[str, Callable[[Given], Given]] = {
    "rows apart": laid_out(lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]]),
    "sequence first": laid_out(lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)),
    "entries apart": laid_out(lambda t: torch.stack([t, t], -1)[..., 0]),
    "transposed": laid_out(lambda t: t.permute(2, 1, 0).contiguous().permute(2, 1, 0)),
    "expanded": laid_out(lambda t: t[:1, :1].expand(t.shape)),
    "entries of weights apart": with_weights_apart,
    "tables longer than what is used": lambda g: g,
    # With positions for each batch the angles don't repeat.
    "angles of every token": lambda g: g._replace(x=g.x.view(2, 2, -1), dy=g.dy.view(2, 2, -1)),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory(name: str, device: torch.device) -> None:
    heads = CASES["partial neighbors"]
    shape = (1, 4) if name == "angles of every token" else (2, 2)
    spare = 4 if name == "tables longer than what is used" else 0
    g = MEMORY[name](given(heads, torch.float32, device, shape, spare=spare))
    check_rotary(g, heads)
    check_norm(g, heads, turn=True)


# As the interpreter's numpy says.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_values_pass_whatever_they_are(device: torch.device) -> None:
    heads = CASES["partial halves"]
    g = given(heads, torch.float32, device)
    values = heads.active * heads.head_dim
    for t in (g.x, g.dy):
        t[..., values:] = torch.tensor(float("inf"))
        t[..., -1] = float("nan")
    got = ours(g, heads, True, False)
    rest = (g.rotation(heads), heads.kv_heads, heads.head_dim, False)
    for out, source in (
        (got.y, g.x),
        (got.dx, g.dy),
        (rotary(g.x, *rest), g.x),
    ):
        assert out[..., :values].isfinite().all()
        torch.testing.assert_close(
            out[..., values:], source[..., values:], rtol=0, atol=0, equal_nan=True
        )
    assert got.dq.isfinite().all()
    assert got.dk.isfinite().all()


def test_rows_in_turns(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few programs each takes several rows, as a block of plain torch does."""
    monkeypatch.setattr(family, "multiprocessors", lambda _: 1)
    heads = CASES["partial halves"]
    small_blocks(monkeypatch, 2 * 3 * heads.features)
    for dtype in (torch.float32, torch.float16):
        check_norm(given(heads, dtype, device, (3, 3)), heads, turn=True)


def test_sums_are_the_same_every_time(device: torch.device) -> None:
    heads = CASES["halves"]
    g = given(heads, torch.float32, device, (2, 8))
    first, second = ours(g, heads, True, False), ours(g, heads, True, False)
    for a, b in zip(first, second):
        assert torch.equal(a, b)


def test_only_what_is_wanted(device: torch.device) -> None:
    heads = CASES["several tiles"]
    g = given(heads, torch.float32, device, (1, 2))
    whole = ours(g, heads, True, False)
    args = (g.q_weight, g.k_weight, whole.rstd, g.rotation(heads), False)
    for want_dx, want_dw in itertools.product((True, False), repeat=2):
        got = qk_norm_backward(g.dy, g.x, *args, want_dx, want_dw)
        assert tuple(grad is not None for grad in got) == (want_dx, want_dw, want_dw)
        for grad, want in zip(got, (whole.dx, whole.dq, whole.dk)):
            if grad is not None:
                torch.testing.assert_close(grad, want)


def test_heads_that_no_kernel_takes(device: torch.device) -> None:
    heads = Heads(1, 1, 4098, 8)
    g = given(heads, torch.float32, device, (1, 2))
    with recorded() as launches:
        check_rotary(g, heads)
        check_norm(g, heads, turn=True)
    assert not launches
