"""Attention by flash-attn: what it is given, held to a stand-in with its signatures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from opfuser import DotProductAttention, Sequential
from opfuser.attention import choice, cudnn_versions, flex_kernel
from opfuser.attention.call import Call, Heads
from opfuser.attention.choice import KERNELS
from opfuser.basic import dot_product_attention as module
from opfuser.errors import ArgumentError, NotSupportedError
from opfuser.runtime import libraries
from tests.basic.attention_packages import MODULE, forget, install
from tests.basic.test_attention_kernels import HOPPER, outcome
from tests.basic.test_attention_modes import formula
from tests.basic.values import fill


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The package can be imported; yields it."""
    package = install(monkeypatch)
    yield package
    forget()


class Mode(NamedTuple):
    """Arguments, queries and keys, whether the row holds several sequences."""

    arguments: dict[str, Any]
    lengths: tuple[int, int] = (70, 70)
    sequences: bool = False


SEPARATE = {"layout": "separate"}
MODES = {
    "causal": Mode({"scale": 0.3}),
    "both directions": Mode({"causal": False}),
    "fewer queries": Mode(SEPARATE, (30, 70)),
    "cross": Mode({**SEPARATE, "causal": False}, (30, 70)),
    "window": Mode({"window": 17}),
    "window, fewer queries": Mode({**SEPARATE, "window": 17}, (30, 70)),
    "window to both sides": Mode({"window": 17, "causal": False}),
    "soft-capping": Mode({"softcap": 2.0}),
    "soft-capping, sinks": Mode({"softcap": 2.0, "sinks": True}),
    "ALiBi": Mode({"alibi": True}),
    "ALiBi, fewer queries": Mode({**SEPARATE, "alibi": True}, (30, 70)),
    "sequences": Mode({}, sequences=True),
    "sequences, both directions": Mode({"causal": False}, sequences=True),
    "sequences, window": Mode({"window": 9}, sequences=True),
    "sequences, soft-capping, ALiBi": Mode({"softcap": 2.0, "alibi": True}, sequences=True),
    "sequences, sinks": Mode({"softcap": 2.0, "sinks": True}, sequences=True),
}  # fmt: skip


def made(mode: Mode, **more: Any) -> tuple[DotProductAttention, list[Tensor], dict[str, Any]]:
    op = fill(DotProductAttention(4, 2, **mode.arguments, **more))
    batch, (queries, keys) = 1 if mode.sequences else 2, mode.lengths
    xs = [torch.randn(batch, keys, 8 * 16)]
    if op.layout == "separate":
        xs = [torch.randn(batch, n, h * 16) for n, h in ((queries, 4), (keys, 2), (keys, 2))]
    ends = torch.tensor([0, 20, 21, 70], dtype=torch.int32)
    return op, xs, {"cu_seqlens": ends, "max_seqlen": 49} if mode.sequences else {}


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", MODES)
def test_arguments_layouts_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "choose", lambda *_: "flash_attn")
    monkeypatch.setattr(module, "choose_plain", lambda *_: "flash_attn")
    op, xs, words = made(MODES[name])
    op, xs = op.double(), [t.double() for t in xs]
    dy = torch.randn(xs[0].shape[0], MODES[name].lengths[0], 4 * 16, dtype=torch.float64)
    got = outcome(op, op, xs, words, dy)
    want = outcome(lambda *ts, **kw: formula(op, *ts, **kw), op, xs, words, dy)
    torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("kernel", "change", "reason"),
    [
        ("flash_attn", {}, None),
        ("flash_attn", {"softcap": True, "sinks": True, "varlen": True, "window": True}, None),
        ("flash_attn", {"alibi": True, "keys": 128}, None),
        ("flash_attn", {"alibi": True, "sinks": True}, "with ALiBi its log-sum-exp is that of"),
        ("flash_attn", {"device": torch.device("cpu")}, "it runs on a GPU, not on cpu"),
        (
            "flash_attn",
            {"dtype": torch.float32},
            "it computes in fp16 and bf16, not in torch.float",
        ),
        ("flash_attn", {"mask": True}, "it takes no mask"),
        ("flash_attn", {"dropout": True}, "it is asked for no dropout"),
        ("flash_attn", {"v_head_dim": 128}, "it has one size for heads of keys and of values"),
        ("flash_attn", {"head_dim": 264, "v_head_dim": 264}, "heads have more than 256 entries"),
        ("flash_attn", {"head_dim": 60, "v_head_dim": 60}, "head sizes must be multiples of 8"),
        ("flash_attn", {"empty": True}, "there is no element"),
        ("flash_attn", {"traced": True}, "it is not asked where torch.compile traces"),
        ("flex", {"softcap": True, "mask": True, "alibi": True, "varlen": True}, None),
        ("flex", {"dtype": torch.float32}, "it is taken for fp16 and bf16, not for torch.float32"),
        ("flex", {"dropout": True}, "it has no dropout"),
        ("flex", {"head_dim": 8}, "heads have less than 16 entries"),
        ("flex", {"v_head_dim": 264}, "heads have more than 256 entries"),
        ("flex", {"empty": True}, "there is no element"),
        ("flex", {"device": torch.device("cpu")}, "it runs on a GPU, not on cpu"),
    ],
)
def test_reasons(kernel: str, change: dict[str, Any], reason: str | None) -> None:
    found = KERNELS[kernel].refusal(HOPPER._replace(**change))
    assert found == reason or (found and reason and found.startswith(reason))


@pytest.mark.parametrize("kernel", ["flash_attn", "flex"])
def test_older_gpus(kernel: str, packages: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    where = "flex_kernel" if kernel == "flex" else kernel
    own = sys.modules[f"opfuser.attention.{where}"]
    monkeypatch.setattr(own, "capability", lambda _: (7, 5))
    reason = "it needs compute capability 8.0, have 7.5"
    assert KERNELS[kernel].refusal(HOPPER) == reason


def test_small_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_kernel, "capability", lambda _: (8, 9))
    assert KERNELS["flex"].refusal(HOPPER._replace(head_dim=128)) is None
    reason = KERNELS["flex"].refusal(HOPPER._replace(v_head_dim=192))
    assert reason == "heads have more than 128 entries: this GPU has little shared memory"


def prepared() -> str | None:
    """Why flash_attn cannot be called, which the first call finds out."""
    forget()
    prepare = KERNELS["flash_attn"].prepare
    assert prepare is not None
    x = torch.zeros(1, 1, 8, 8)
    return prepare(Heads(x, x, x), Call(True, 1.0), False)


def test_versions(packages: ModuleType) -> None:
    packages.__version__ = "2.6.3"  # type: ignore[attr-defined]
    assert prepared() == "flash_attn 2.6.3 is older than 2.7"
    packages.__version__ = "2.10.0.post1"  # type: ignore[attr-defined]
    assert prepared() is None


@pytest.mark.usefixtures("packages")
def test_packages_that_are_not_there_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """None among the modules is one that cannot be imported."""
    monkeypatch.setitem(sys.modules, MODULE, None)
    forget()
    assert KERNELS["flash_attn"].refusal(HOPPER) is None, "a plan imports nothing"
    assert " cannot be imported: " in (prepared() or "")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    forget()
    assert KERNELS["flash_attn"].refusal(HOPPER) == "flash_attn is not installed"


def test_packages_whose_module_says_nothing(
    packages: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs put an empty module there for others' imports; a failed one may give no reason."""
    monkeypatch.setattr(packages, "__spec__", None)
    monkeypatch.delattr(packages, "__version__")
    assert KERNELS["flash_attn"].refusal(HOPPER) is None
    assert prepared() == "flash_attn 0 is older than 2.7"

    def fails(name: str) -> ModuleType:
        raise ImportError

    monkeypatch.setattr(libraries.importlib, "import_module", fails)
    forget()
    assert prepared() == "flash_attn cannot be imported: ImportError"


@pytest.fixture
def no_choices() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.mark.usefixtures("no_choices")
def test_what_could_not_be_prepared_once_may_be_asked_for_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As while a CUDA graph is captured: the reason is that of one call."""
    reasons = iter(["a graph is captured", None])
    own = KERNELS["flex"]._replace(refusal=lambda _: None, prepare=lambda *_: next(reasons))
    monkeypatch.setitem(KERNELS, "flex", own)
    x = torch.randn(2, 9, 8 * 16)
    op = DotProductAttention(4, 2, softcap=2.0)
    y = op(x)
    assert op.last_choice is not None
    assert op.last_choice.kernel == "blockwise"
    assert op.last_choice.passed_over[-1] == ("flex", "a graph is captured")
    torch.testing.assert_close(DotProductAttention(4, 2, softcap=2.0, kernel="flex")(x), y)


@pytest.mark.usefixtures("packages", "no_choices")
def test_after_a_broken_package_comes_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    forget()
    for name in ("flash_attn", "flex"):
        own = KERNELS[name]._replace(refusal=lambda _: None)
        monkeypatch.setitem(KERNELS, name, own)
    op = DotProductAttention(4, 2, softcap=2.0)
    x = torch.randn(2, 9, 8 * 16)
    torch.testing.assert_close(op(x), DotProductAttention(4, 2, softcap=2.0, kernel="blockwise")(x))
    assert op.last_choice is not None
    assert op.last_choice.kernel == "flex"
    name, reason = op.last_choice.passed_over[-1]
    assert name == "flash_attn"
    assert " cannot be imported: " in reason
    with pytest.raises(NotSupportedError, match=r"'flash_attn' does not take .* be imported: "):
        DotProductAttention(4, 2, softcap=2.0, kernel="flash_attn")(x)


@pytest.mark.usefixtures("packages", "no_choices")
def test_the_order_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package is taken where torch has nothing as good."""
    monkeypatch.setattr(cudnn_versions, "trouble", lambda: None)
    monkeypatch.setattr(choice, "choose_plain", lambda *_: "cudnn")  # which torch would take
    x = Heads(*torch.zeros(3, 1, 1, 1, 8))
    for change, kernel in (
        ({"window": True}, "flash"),
        ({"mask": True}, "cudnn"),
        ({"mask": True, "additive": True}, "efficient"),
        ({"softcap": True}, "flash_attn"),
        ({"alibi": True, "varlen": True}, "flash_attn"),
        ({"softcap": True, "mask": True}, "flex"),
        ({"alibi": True, "sinks": True}, "flex"),
        ({"softcap": True, "traced": True}, "flex"),
        ({"softcap": True, "dropout": True}, "blockwise"),
        ({"softcap": True, "dtype": torch.float32}, "blockwise"),
    ):
        request = HOPPER._replace(**change)  # type: ignore[arg-type]
        assert choice.choose(x, Call(True, 1.0), request, None) == kernel
    reasons = dict(choice.explained(HOPPER._replace(softcap=True), "flash_attn").passed_over)
    assert reasons["flash"] == "it has no soft-capping"
    note = choice.foreseen(HOPPER._replace(softcap=True), None)
    assert note.startswith("attention by flash_attn or flex or blockwise, as sizes and keywords")


def test_names() -> None:
    text = "kernel must be one of cudnn, flash, efficient, cpu, flash_attn, flex, blockwise"
    with pytest.raises(ArgumentError, match=f"{text}.*kernel='flash3'"):
        DotProductAttention(4, kernel="flash3")
    for kernel in ("flash_attn", "flex"):
        op = DotProductAttention(4, kernel=kernel)
        with pytest.raises(NotSupportedError, match=f"{kernel!r} does not take .*runs on a GPU"):
            op(torch.ones(2, 9, 12))
        note = f"by {kernel}, which is required by name but refuses: it runs on a GPU, not on cpu"
        ((_, text),) = Sequential(op).plan(torch.ones(2, 9, 12)).notes
        assert text == f"attention {note}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODES)
def test_numbers_on_a_gpu(name: str) -> None:
    pytest.importorskip("flash_attn", reason="needs flash_attn", exc_type=ImportError)
    op, xs, words = made(MODES[name], kernel="flash_attn")
    dtype = torch.bfloat16
    op, xs = op.to("cuda", dtype), [t.to("cuda", dtype) for t in xs]
    words = {k: t.cuda() if isinstance(t, Tensor) else t for k, t in words.items()}
    dy = torch.randn(xs[0].shape[0], MODES[name].lengths[0], 4 * 16, device="cuda")
    got = outcome(op, op, xs, words, dy)
    assert op.last_choice is not None
    assert op.last_choice.kernel == "flash_attn"
    plain = outcome(lambda *ts, **kw: formula(op, *ts, **kw), op, xs, words, dy)
    exact_op = made(MODES[name])[0].to("cuda", torch.float64)
    exact_op.load_state_dict(op.state_dict())
    exact = outcome(
        lambda *ts, **kw: formula(exact_op, *ts, **kw),
        exact_op,
        [t.double() for t in xs],
        words,
        dy.to(dtype).double(),
    )
    unit = torch.finfo(dtype).eps
    for ours, theirs, want in zip(got, plain, exact):
        error, allowed = ((t.double() - want).abs().max() for t in (ours, theirs))
        assert error <= 2 * allowed + unit * want.abs().max()
