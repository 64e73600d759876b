"""Kernels of a GPU: their schemas and shapes without one, their numbers and choice on one."""

# ruff: noqa: PLR0917  # the signatures are torch's

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from opfuser import DotProductAttention, torch_internals
from opfuser.attention import cudnn_versions, sdpa
from opfuser.attention.call import Call, Heads, Request
from opfuser.attention.choice import KERNELS, choose_plain
from opfuser.basic import dot_product_attention as module
from opfuser.errors import NotSupportedError
from opfuser.testing.compare import precision
from tests.basic.test_attention_modes import formula
from tests.basic.values import DTYPES, FOUR_UNITS, check_values, fill

BF16, FP32 = torch.bfloat16, torch.float32
DIM = 64


class Mode(NamedTuple):
    """Arguments, lengths of queries and keys, keyword, what computes it in bf16 and in fp32.

    What comes first is chosen on an H100.
    """

    arguments: dict[str, Any]
    lengths: tuple[int, int]
    keyword: str
    kernels: tuple[str, ...]
    in_fp32: tuple[str, ...]


BIAS = {"core_attention_bias": True}
SEPARATE = {"layout": "separate"}
CROSS = {**SEPARATE, "causal": False}
PLAIN = "cudnn", "flash", "efficient"
MODES = {
    "causal": Mode({}, (70, 70), "", PLAIN, ("efficient",)),
    "cross": Mode(CROSS, (30, 70), "", PLAIN, ("efficient",)),
    "fewer queries": Mode(SEPARATE, (30, 70), "", PLAIN[1:], ("efficient",)),
    "window": Mode({"window": 17}, (70, 70), "", PLAIN[1:], ("efficient",)),
    "window, fewer queries": Mode(
        {**SEPARATE, "window": 17}, (30, 70), "", ("flash",), ("blockwise",)
    ),
    "window to both sides": Mode(
        {"window": 17, "causal": False}, (70, 70), "", ("flash",), ("blockwise",)
    ),
    "sinks": Mode({"sinks": True}, (70, 70), "", PLAIN, ("efficient",)),
    "sinks, window": Mode({"sinks": True, "window": 17}, (70, 70), "", PLAIN[1:], ("efficient",)),
    "padding": Mode({}, (70, 70), "padding", PLAIN[::2], ("efficient",)),
    "padding, sinks": Mode({"sinks": True}, (70, 70), "padding", PLAIN[::2], ("efficient",)),
    "padding, window": Mode({"window": 17}, (70, 70), "padding", ("efficient",), ("efficient",)),
    "mask": Mode(CROSS, (30, 70), "mask", ("efficient",), ("efficient",)),
    "bias": Mode(BIAS, (70, 70), "bias", ("efficient",), ("efficient",)),
    "bias, fewer queries": Mode(
        {**SEPARATE, **BIAS}, (30, 70), "bias", ("efficient",), ("efficient",)
    ),
    "bias, padding, window": Mode(
        {**BIAS, "window": 17}, (70, 70), "bias, padding", ("efficient",), ("efficient",)
    ),
    "sequences": Mode({}, (70, 70), "sequences", PLAIN[1:], ("efficient",)),
    "sequences, window": Mode({"window": 9}, (70, 70), "sequences", PLAIN[1:], ("efficient",)),
    "sequences, sinks": Mode({"sinks": True}, (70, 70), "sequences", ("flash",), ("blockwise",)),
}
CASES = [
    pytest.param(name, dtype, kernel, id=f"{name}-{dtype}-{kernel}")
    for name, mode in MODES.items()
    for dtype, kernels in ((BF16, mode.kernels), (FP32, mode.in_fp32))
    for kernel in kernels
    if kernel != "blockwise"
]


def tensors(mode: Mode) -> list[Tensor]:
    queries, keys = mode.lengths
    batch = 1 if mode.keyword == "sequences" else 2
    bias = [torch.randn(1, 4, queries, keys)] if "bias" in mode.keyword else []
    if mode.arguments.get("layout") != "separate":
        return [torch.randn(batch, keys, 8 * DIM), *bias]
    sizes = (queries, 4), (keys, 2), (keys, 2)
    return [*(torch.randn(batch, n, heads * DIM) for n, heads in sizes), *bias]


def keywords(mode: Mode) -> dict[str, Any]:
    queries, keys = mode.lengths
    if mode.keyword.endswith("padding"):
        seen = torch.ones(2, keys, dtype=torch.bool)
        seen[0, :9], seen[1, 50:] = False, False  # the first 9 queries of one see nothing
        return {"mask": seen}
    if mode.keyword == "mask":
        return {"mask": torch.randn(2, 4, queries, keys)}
    if mode.keyword == "sequences":
        return {"cu_seqlens": torch.tensor([0, 20, 21, 70], dtype=torch.int32), "max_seqlen": 49}
    return {}


def make(mode: Mode, kernel: str | None) -> DotProductAttention:
    return fill(DotProductAttention(4, 2, kernel=kernel, **mode.arguments))


class WithoutMeta(TorchDispatchMode):
    """Answers for an operator whose meta function takes other arguments than its schema names."""

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if f is torch.ops.aten._efficient_attention_backward.default:
            return (*map(torch.empty_like, args[1:4]), torch.empty(()))
        return f(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "dtype", "kernel"), CASES)
def test_kernels_are_called_as_declared(
    name: str, dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schemas and shapes are checked by tensors without memory; numbers are not."""
    monkeypatch.setattr(module, "choose", lambda *_: kernel)
    monkeypatch.setattr(module, "choose_plain", lambda *_: kernel)
    mode, on = MODES[name], {"device": "meta", "dtype": dtype}
    op = DotProductAttention(4, 2, **mode.arguments, **on)
    leaves = [torch.empty(t.shape, **on, requires_grad=True) for t in tensors(mode)]
    words = {k: t.to("meta") if isinstance(t, Tensor) else t for k, t in keywords(mode).items()}
    with WithoutMeta():
        y = op(*leaves, **words)
        y.backward(torch.empty_like(y))
    batch, queries, _ = leaves[0].shape
    assert (y.shape, y.dtype) == ((batch, queries, 4 * DIM), dtype)
    for leaf in (*leaves, *op.parameters()):
        assert leaf.grad is not None
        assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, dtype)


def outcome(call: Any, op: Any, xs: list[Tensor], words: dict[str, Any], dy: Tensor) -> list[Any]:
    leaves = [t.detach().requires_grad_() for t in xs]
    parameters = list(op.parameters())
    y = call(*leaves, **words)
    return [y, *torch.autograd.grad(y, [*leaves, *parameters], dy.to(y.dtype))]


def check_numbers(op: Any, xs: list[Tensor], words: dict[str, Any], dy: Tensor) -> None:
    """Errors are twice those of the formula in the same dtype, and a unit in the last place."""
    dtype, exact_op = xs[0].dtype, copy.deepcopy(op).double()
    got = outcome(op, op, xs, words, dy)
    plain = outcome(lambda *ts, **kw: formula(op, *ts, **kw), op, xs, words, dy)
    wide = [t.double() for t in xs], words, dy.to(dtype).double()
    exact = outcome(lambda *ts, **kw: formula(exact_op, *ts, **kw), exact_op, *wide)
    for ours, theirs, want in zip(got, plain, exact):
        error, allowed = ((t.double() - want).abs().max() for t in (ours, theirs))
        assert error <= 2 * allowed + precision([dtype]) * want.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype", "kernel"), CASES)
def test_numbers(name: str, dtype: torch.dtype, kernel: str) -> None:
    mode = MODES[name]
    op = make(mode, kernel).to("cuda", dtype)
    xs = [t.to("cuda", dtype) for t in tensors(mode)]
    words = {k: t.cuda() if isinstance(t, Tensor) else t for k, t in keywords(mode).items()}
    dy = torch.randn(xs[0].shape[0], mode.lengths[0], 4 * DIM, device="cuda")
    try:
        check_numbers(op, xs, words, dy)
    except NotSupportedError as error:
        pytest.skip(f"this GPU or this torch: {error}")
    assert op.last_choice is not None
    assert op.last_choice.kernel == kernel


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn", None])
@pytest.mark.parametrize(("causal", "heads"), [(False, (4, 2)), (True, (4, 4)), (True, (4, 2))])
def test_layouts_and_modes_of_calls(
    kernel: str | None, causal: bool, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each kernel, and in every dtype by the one that is chosen.

    Where nothing is forced, empty tensors go to plain torch, and a single key not to cuDNN.
    """

    def choose(x: Any, *_: Any) -> str | None:
        takes_it = x.q.numel() and (kernel != "cudnn" or x.q.shape[2] > 1)
        return kernel if takes_it else "blockwise"

    if kernel is not None:
        monkeypatch.setattr(module, "choose_plain", choose)
    op = DotProductAttention(*heads, causal=causal)
    x = torch.randn(2, 70, (heads[0] + 2 * heads[1]) * DIM, device="cuda")
    check_values(op, x, dtypes=[BF16] if kernel else DTYPES, floors=FOUR_UNITS)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head_dim", [5, 64, 256, 264])
def test_tracers_get_the_kernel_of_eager_calls(kv_heads: int, head_dim: int, masked: bool) -> None:
    mask = torch.ones(2, 1, 1, 70, device="cuda", dtype=torch.bool) if masked else None
    call = Call(not masked, 0.5, mask=mask)
    for dtype in DTYPES:
        numbers = 4, kv_heads, kv_heads
        x = torch.randn(2, sum(numbers), 70, head_dim, device="cuda", dtype=dtype)
        want = choose_plain(Heads(*x.split(numbers, 1)), call, True)
        with FakeTensorMode() as mode:
            traced = Heads(*mode.from_tensor(x).split(numbers, 1))
            assert choose_plain(traced, call, True) == want


HOPPER = Request(
    torch.device("cuda"), BF16, 64, 64, 4, 2, DIM, DIM, causal=True, differentiable=True
)


@pytest.mark.parametrize(
    ("kernel", "change", "reason"),
    [
        ("flash", {}, None),
        ("flash", {"dtype": FP32}, "it computes in fp16 and bf16, not in torch.float32"),
        ("flash", {"mask": True}, "it takes no mask"),
        ("flash", {"v_head_dim": 128}, "it has one size for heads of keys and of values"),
        ("flash", {"head_dim": 264, "v_head_dim": 264}, "heads have more than 256 entries"),
        ("flash", {"head_dim": 60}, "head sizes must be multiples of 8"),
        ("flash", {"softcap": True}, "it has no soft-capping"),
        ("flash", {"alibi": True}, "it has no ALiBi bias"),
        ("flash", {"empty": True}, "there is no element"),
        ("flash", {"enabled": (False, True, True)}, "torch.backends.cuda.enable_flash_sdp(False)"),
        ("flash", {"window": True, "keys": 128}, None),
        ("efficient", {"mask": True, "keys": 128}, None),
        ("efficient", {"mask": True, "window": True}, None),
        ("efficient", {"keys": 128, "window": True}, "its window is another one where queries are"),
        ("efficient", {"dtype": torch.float64}, "it does not compute in fp64"),
        ("efficient", {"window": True, "causal": False}, "its window is causal"),
        ("efficient", {"queries": 128}, "there are more queries than keys"),
        ("efficient", {"varlen": True, "mask": True}, "it takes no mask beside cu_seqlens"),
        ("efficient", {"varlen": True, "sinks": True}, "with cu_seqlens its log-sum-exp is padded"),
        ("efficient", {"window": True, "traced": True}, "torch cannot trace its backward with"),
        ("efficient", {"window": True, "traced": True, "differentiable": False}, None),
        ("efficient", {"enabled": (True, False, True)}, "torch.backends.cuda.enable_mem_efficient"),
        ("cudnn", {"sinks": True, "dropout": True}, None),
        ("cudnn", {"mask": True}, None),
        ("cudnn", {"mask": True, "additive": True}, "it takes bool masks: rows that large numbers"),
        ("cudnn", {"window": True}, "torch offers it without a window"),
        ("cudnn", {"varlen": True}, "torch offers it without cu_seqlens"),
        ("cudnn", {"keys": 128}, "torch counts its causality from the first key"),
        ("cudnn", {"dtype": FP32}, "it computes in fp16 and bf16, not in torch.float32"),
        ("cudnn", {"enabled": (True, True, False)}, "torch.backends.cuda.enable_cudnn_sdp(False)"),
        ("cpu", {}, "it runs on a CPU, not on cuda"),
        ("blockwise", {"mask": True, "varlen": True, "softcap": True, "alibi": True}, None),
    ],
)
def test_reasons(
    kernel: str, change: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "capability", lambda _: (9, 0))
    found = KERNELS[kernel].refusal(HOPPER._replace(**change))
    assert found == reason or (found and reason and found.startswith(reason))


def test_reasons_of_older_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    large = HOPPER._replace(head_dim=208, v_head_dim=208)
    for capability, request, reason in (
        ((7, 5), HOPPER, "it needs compute capability 8.0, have 7.5"),
        ((8, 9), large, None),
        ((8, 9), large._replace(dropout=True), "its backward has no heads of more than 192"),
        ((8, 9), large._replace(dropout=True, differentiable=False), None),
        ((8, 0), large._replace(dropout=True), None),
    ):
        monkeypatch.setattr(sdpa, "capability", lambda _, found=capability: found)
        found = KERNELS["flash"].refusal(request)
        assert (found or "").startswith(reason or "")
        assert (found is None) == (reason is None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", MODES)
def test_choice_on_hopper(name: str, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs have other kernels")
    mode = MODES[name]
    op = make(mode, None).to("cuda", dtype)
    words = {k: t.cuda() if isinstance(t, Tensor) else t for k, t in keywords(mode).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of another cuDNN
        op(*[t.to("cuda", dtype) for t in tensors(mode)], **words)
    choice = op.last_choice
    assert choice is not None
    names = list(KERNELS)
    before = names[: names.index(choice.kernel)]
    assert [name for name, _ in choice.passed_over] == before
    wanted = (mode.kernels if dtype == BF16 else mode.in_fp32)[0]
    if cudnn_versions.trouble() is None:
        assert choice.kernel == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_dropout_of_a_kernel_is_that_of_its_backward(kernel: str) -> None:
    """With values as the variable, the output is linear: its gradient gives the output back."""
    op = DotProductAttention(2, layout="separate", dropout_p=0.3, kernel=kernel, causal=False)
    q, k, v, dy = torch.randn(4, 2, 64, 2 * DIM, device="cuda", dtype=BF16)
    v.requires_grad_()
    torch.manual_seed(1)
    y = op(q, k, v)
    (dv,) = torch.autograd.grad(y, v, dy)
    left, right = y.double() * dy, dv.double() * v
    assert (left.sum() - right.sum()).abs() < 0.05 * left.norm()  # roundings, of random signs
    torch.manual_seed(1)
    assert torch.equal(op(q, k, v), y)
    assert not torch.equal(op(q, k, v), y)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's maps of memory")
def test_libraries_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them, or another version than that of the build, are told of."""
    one, two = "/opt/a/libcudnn.so.9", "/usr/lib/libcudnn.so.9.8.0"
    loaded = one, one, two, "/opt/a/libcudnn_graph.so.9"
    maps = "".join(f"7f00-7f01 r-xp 00000000 08:01 42 {path}\n" for path in loaded)
    assert cudnn_versions.libraries(maps) == [one, two]
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch_internals, "cudnn_built", lambda: (9, 10, 2))
    several = f"Several libraries of cuDNN are loaded: {one}, {two}"
    other = "cuDNN 9.8.5 is loaded, and torch was built with 9.10.2"
    for version, found, text in (
        ((9, 10, 2), [one, two], several),
        ((9, 8, 5), [one, two], other),
        ((9, 10, 2), [one], None),
    ):
        monkeypatch.setattr(torch_internals, "cudnn_loaded", lambda version=version: version)
        monkeypatch.setattr(cudnn_versions, "libraries", lambda _, found=found: found)
        trouble = cudnn_versions.trouble.__wrapped__()
        assert trouble is None if text is None else trouble.startswith(text)


@pytest.mark.parametrize(("capability", "warns"), [((9, 0), True), ((8, 0), False)])
def test_another_cudnn_is_warned_of_where_it_would_be_faster(
    capability: tuple[int, int], warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_versions, "trouble", lambda: "Two are loaded")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    cudnn_versions.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            cudnn_versions.warn_once(torch.device("cuda", 0))
    cudnn_versions.warn_once.cache_clear()
    assert len(told) == warns
    if warns:
        assert "Attention runs without cuDNN, which would be faster. Two are" in str(
            told[0].message
        )


def weights_of(
    q: Tensor, k: Tensor, bias: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Weights and scores, for the two stand-ins of torch's operators of the efficient kernel."""
    assert q.shape[:2] == k.shape[:2]
    assert bias.shape == (*q.shape[:3], k.shape[2])
    assert (bias.dtype, bias.stride(3), bias.stride(2) % 16) == (q.dtype, 1, 0)
    s = q @ k.mT * scale + bias
    s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf) if causal else s
    blind = (s == -torch.inf).all(-1, keepdim=True)
    return s.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0), s


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sums: bool, p: float = 0.0,
    causal: bool = False, *, scale: float,
) -> Any:  # fmt: skip
    assert sums
    p, s = weights_of(q, k, bias, causal, scale)
    return p @ v, s.logsumexp(-1), torch.zeros(()), torch.zeros(())


def efficient_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, y: Tensor, sums: Tensor,
    seed: Tensor, offset: Tensor, p: float, wanted: list[bool], causal: bool = False, *,
    scale: float,
) -> Any:  # fmt: skip
    """It does not write the gradient of a bias for pairs that causality skips."""
    p, dp = weights_of(q, k, bias, causal, scale)[0], dy @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    hidden = torch.ones_like(bias, dtype=torch.bool).triu(1)
    dbias = ds.masked_fill(hidden, torch.nan) if causal else ds
    return scale * ds @ k, scale * ds.mT @ q, p.mT @ dy, dbias if wanted[3] else None


@pytest.mark.parametrize("name", [name for name in MODES if "bias" in name])
def test_gradients_of_a_bias_where_the_kernel_is_stood_in_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "choose", lambda *_: "efficient")
    mode, op = MODES[name], make(MODES[name], None).double()
    xs, words = [t.double() for t in tensors(mode)], keywords(mode)
    dy = torch.randn(2, mode.lengths[0], 4 * DIM, dtype=torch.float64)
    with torch.library._scoped_library("aten", "IMPL") as library:
        operator = "_scaled_dot_product_efficient_attention"
        library.impl(operator, efficient, "CPU")
        library.impl(f"{operator}_backward", efficient_backward, "CPU")
        got = outcome(op, op, xs, words, dy)
    want = outcome(lambda *ts, **kw: formula(op, *ts, **kw), op, xs, words, dy)
    torch.testing.assert_close(got, want)
