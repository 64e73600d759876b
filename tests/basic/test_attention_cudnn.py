"""Masks by cuDNN: what it is given, when it is chosen, and queries that see no key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from opfuser import DotProductAttention, torch_internals
from opfuser.attention import choice
from opfuser.attention.call import Call, Heads, request_of
from opfuser.attention.sdpa import CUDNN
from opfuser.basic import dot_product_attention as module
from opfuser.errors import NotSupportedError
from tests.basic import attention_cudnn
from tests.basic.attention_cases import Case, as_exact, split

BF16, FP16 = torch.bfloat16, torch.float16


def heads(queries: int, keys: int, **on: Any) -> Heads:
    """Of two rows, of four heads of queries and two of keys."""
    sizes = (4, queries, 64), (2, keys, 64), (2, keys, 64)
    return Heads(*(torch.zeros(2, *size, **on) for size in sizes))


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 1, 1, 7), (7, 7, 0, 1)),
        ((1, 1, 1, 7), (0, 7, 0, 1)),
        ((1, 1, 5, 7), (0, 35, 7, 1)),
        ((2, 4, 5, 7), (140, 35, 7, 1)),
        ((2, 1, 5, 1), (35, 35, 7, 1)),
    ],
    ids=str,
)
def test_what_a_mask_adds(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Of each row, query and key, without a copy for rows or queries that have one in common."""
    mask = torch.rand(shape) < 0.5
    with attention_cudnn.stand_in() as added:
        for given in (mask, mask.mT.contiguous().mT):
            CUDNN.forward(heads(5, 7, dtype=dtype), Call(False, 1.0, mask=given))
    for bias in added:
        assert bias is not None
        assert (bias.dtype, bias.shape) == (dtype, (2, shape[1], 5, 7))
        assert bias.stride() == strides
        want = torch.where(mask, 0.0, torch.tensor(-65504.0).to(dtype))
        assert torch.equal(bias, want.to(dtype).expand_as(bias))


@pytest.mark.parametrize(
    ("of_torch", "dtype", "kernel"),
    [
        ("cudnn", torch.bool, "cudnn"),
        ("efficient", torch.bool, "efficient"),
        ("blockwise", torch.bool, "efficient"),
        ("cudnn", torch.float32, "efficient"),
    ],
)
def test_choice_with_a_mask(
    of_torch: str, dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own function decides between cuDNN and another kernel, and is told of the mask."""
    asked = []

    def choose(x: Heads, call: Call, differentiable: bool) -> str:
        asked.append(call.mask)
        return of_torch

    monkeypatch.setattr(choice, "choose_plain", choose)
    with FakeTensorMode():
        x = heads(5, 7, device="cuda", dtype=BF16)
        mask = torch.ones(2, 1, 1, 7, device="cuda", dtype=dtype)
        call = Call(False, 1.0, mask=mask)
        request = request_of(x, call, True)
        assert choice.choose(x, call, request, None) == kernel
    assert request.additive == dtype.is_floating_point
    assert [given is mask for given in asked] == [True] * (not request.additive)
    choice_of = choice.explained(request, kernel)
    assert choice_of.kernel == kernel
    why = dict(choice_of.passed_over).get("cudnn", "")
    if kernel == "efficient":
        assert why == "torch prefers efficient" or "it takes bool masks" in why


def test_torch_is_asked_with_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def choose(_q: Any, _k: Any, _v: Any, attn_mask: Tensor, **_: Any) -> int:
        asked.append(attn_mask)
        return 3

    monkeypatch.setattr(torch_internals, "sdp_choice", choose)
    x, mask = heads(5, 7, dtype=BF16), torch.ones(2, 1, 1, 7, dtype=torch.bool)
    call = Call(False, 1.0, mask=mask)
    request = request_of(x, call, True)
    # What both choices, of real tensors and of those that stand for them, come down to. Which of a
    # call's tensors torch is asked about, a GPU alone would tell.
    for given in ((x, call), choice.like(request)):
        assert choice._choice_of_torch(*given, True) == "cudnn"
    real, meaningless = asked
    assert real is mask
    shape = 1, 1, request.queries, request.keys
    assert (meaningless.dtype, meaningless.shape) == (torch.bool, shape)


class Masked(NamedTuple):
    """A call with a mask.

    Attributes:
        mask: which one, of ``MASKS``.
        v_size: of heads of values; 0 is ``size``.
        packed: whether queries, keys and values are parts of one tensor.
    """

    mask: str
    queries: int = 70
    keys: int = 77
    size: int = 64
    v_size: int = 0
    kv_heads: int = 2
    dtype: torch.dtype = BF16
    causal: bool = False
    sinks: bool = False
    packed: bool = False

    @property
    def case(self) -> Case:
        return Case(
            self.packed, 2, self.queries, self.keys, 4, self.kv_heads, self.size,
            self.v_size or self.size, self.causal, None, None, None, False, self.sinks, "", None,
            strided=not self.packed, bias="",
        )  # fmt: skip


def padding(m: Masked) -> Tensor:
    """Hides the first keys of one row, to which causality leaves nothing else, or the last ones."""
    seen = torch.ones(2, m.keys, dtype=torch.bool)
    seen[0, : m.keys // 4], seen[1, m.keys // 2 :] = False, False
    return seen


def pairs(m: Masked, *shape: int) -> Tensor:
    """Some of all, and nothing for two queries: one of all rows and heads, one of some."""
    seen = torch.rand(*shape, m.queries, m.keys) < 0.6
    seen[..., 1:2, :] = False
    seen[0, -1, -1] = False
    return seen


def queries(m: Masked) -> Tensor:
    return (torch.rand(2, 1, m.queries, 1) < 0.6).index_fill(2, torch.tensor([0]), False)


MASKS: dict[str, Callable[[Masked], Tensor]] = {
    "padding": padding,
    "padding of all": lambda m: padding(m)[:1],
    "pairs": lambda m: pairs(m, 1, 1),
    "pairs of rows": lambda m: pairs(m, 2, 1),
    "pairs of heads": lambda m: pairs(m, 2, 4),
    "turned": lambda m: pairs(m, 1, 1).mT.contiguous().mT,
    "queries": queries,
    "nothing": lambda m: torch.zeros(2, m.keys, dtype=torch.bool),
    "everything": lambda m: torch.ones(2, 1, m.queries, m.keys, dtype=torch.bool),
    "numbers": lambda m: torch.randn(2, 4, m.queries, m.keys).masked_fill(
        ~pairs(m, 2, 4), -torch.inf
    ),
}
CAUSAL: Any = {"queries": 77, "causal": True}
CASES = [
    *(Masked(name) for name in MASKS),
    *(Masked(name, **CAUSAL) for name in ("padding", "pairs", "pairs of heads", "queries")),
    *(Masked("pairs", size=size, dtype=FP16) for size in (64, 80, 96, 128)),
    *(Masked("padding", size=size, **CAUSAL) for size in (80, 96, 128)),
    *(Masked("pairs of rows", *lengths) for lengths in ((64, 128), (1, 33), (129, 257), (5, 3))),
    Masked("padding", kv_heads=4, packed=True, **CAUSAL),
    Masked("pairs", queries=77, packed=True),
    Masked("pairs", kv_heads=4, dtype=FP16),
    Masked("padding", v_size=128),
    Masked("padding", sinks=True, **CAUSAL),
    Masked("pairs of heads", sinks=True),
]


def blind_of(m: Masked, mask: Tensor) -> Tensor:
    """Which queries see no key, and which keys are seen by none: (2, 4, queries), (2, 2, keys)."""
    seen = mask if mask.dtype == torch.bool else mask > -torch.inf
    seen = seen[:, None, None] if seen.dim() == 2 else seen
    seen = seen.expand(2, 4, m.queries, m.keys)
    seen = seen.tril() if m.causal else seen
    return ~seen.any(3), ~seen.unflatten(1, (m.kv_heads, -1)).any(3).any(2)


def tensors_of(m: Masked, blind: Tensor, unseen: Tensor) -> tuple[list[Tensor], Tensor]:
    """Inputs and the gradient of the output; large where neither may matter."""
    q, k, v, dy = (
        torch.randn(2, n, length, size)
        for n, length, size in (
            (4, m.queries, m.size), (m.kv_heads, m.keys, m.size),
            (m.kv_heads, m.keys, m.v_size or m.size), (4, m.queries, m.v_size or m.size),
        )
    )  # fmt: skip
    v[unseen] *= 1000
    dy[blind] *= 1000
    q, k, v, dy = (t.transpose(1, 2).flatten(2) for t in (q, k, v, dy))
    return ([torch.cat([q, k, v], 2)] if m.packed else [q, k, v]), dy


def check(m: Masked, call: Callable[..., Tensor], op: Any, on: str = "cuda") -> None:
    """Asserts values and gradients of a call in ``m.dtype``."""
    mask = MASKS[m.mask](m)
    blind, unseen = blind_of(m, mask)
    assert blind.any() == (m.mask not in ("padding", "padding of all", "everything") or m.causal)
    xs, dy = tensors_of(m, blind, unseen)
    case, mask = m.case, mask.to(on)
    xs, dy = [t.to(on, m.dtype) for t in xs], dy.to(on, m.dtype)
    if case.strided:
        xs = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in xs]
    leaves = [*(t.detach().requires_grad_() for t in xs), *op.parameters()]
    y = call(*leaves[: len(xs)], mask=mask)
    y, *grads = as_exact(case, y, dy, leaves, mask)
    assert not y.unflatten(2, (4, -1)).transpose(1, 2)[blind.to(on)].any()
    dq, dk, dv = split(case, grads[: len(xs)])
    assert not dq[blind.to(on)].any()
    assert not dk[unseen.to(on)].any()
    assert not dv[unseen.to(on)].any()


def made(m: Masked, kernel: str | None, on: str = "cuda") -> DotProductAttention:
    op = DotProductAttention(**m.case.arguments, kernel=kernel).to(on, m.dtype)
    for p in op.parameters():
        p.data.normal_()
    return op


@pytest.mark.parametrize("m", CASES, ids=str)
def test_values_and_gradients_where_cudnn_is_stood_in_for(
    m: Masked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what fails on a GPU alone is the kernel."""
    kernel = "blockwise" if m.mask == "numbers" else "cudnn"
    monkeypatch.setattr(module, "choose", lambda *_: kernel)
    op = made(m, None, "cpu")
    with attention_cudnn.stand_in():
        check(m, op, op, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("m", CASES, ids=str)
def test_values_and_gradients_on_a_gpu(m: Masked) -> None:
    kernel = "efficient" if m.mask == "numbers" else "cudnn"
    op = made(m, None if m.mask == "numbers" else kernel)
    try:
        check(m, op, op)
    except NotSupportedError as error:
        pytest.skip(f"this GPU or this torch: {error}")
    assert op.last_choice is not None
    assert op.last_choice.kernel == kernel


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")  # the compilers' own
@pytest.mark.parametrize("m", [Masked("padding", **CAUSAL), Masked("pairs of rows")], ids=str)
@pytest.mark.parametrize(("backend", "dynamic"), [("aot_eager", True), ("inductor", False)])
def test_compiled_on_a_gpu(m: Masked, backend: str, dynamic: bool) -> None:
    torch.compiler.reset()
    op = made(m, None)
    how: Any = {"backend": backend, "dynamic": dynamic, "fullgraph": True}
    check(m, torch.compile(lambda *xs, mask: op(*xs, mask=mask), **how), op)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_dropout_beside_a_mask(causal: bool) -> None:
    """With the unit matrix as values, the output is the weights, and their gradient another one."""
    p, n = 0.3, 64
    m = Masked("pairs of heads", n, n, n, kv_heads=4, causal=causal)
    op = DotProductAttention(4, layout="separate", causal=causal, dropout_p=p, kernel="cudnn")
    mask = MASKS[m.mask](m)
    blind, _ = blind_of(m, mask)
    xs, dy = tensors_of(m, torch.zeros_like(blind), torch.zeros(2, 4, n, dtype=torch.bool))
    q, k, dy = (t.to("cuda", BF16) for t in (*xs[:2], dy))
    v = torch.eye(n).repeat(2, 1, 4).to(q).requires_grad_()
    mask = mask.cuda()
    y = op(q, k, v, mask=mask)
    (dv,) = torch.autograd.grad(y, v, dy)
    without = made(m, "cudnn")(q, k, v, mask=mask)
    dropped = y == 0
    torch.testing.assert_close(y, (without / (1 - p)).masked_fill(dropped, 0.0), rtol=0.02, atol=0)
    weights = without != 0
    share = (dropped & weights).sum() / weights.sum()
    assert abs(share - p) < 0.03  # of some ten thousand
    of_heads = [t.detach().double().unflatten(2, (4, n)).transpose(1, 2) for t in (y, dy)]
    want = (of_heads[0].mT @ of_heads[1]).transpose(1, 2).flatten(2)
    torch.testing.assert_close(dv.double(), want, rtol=0.02, atol=0.02)
