"""When flash-attn and flex_attention are taken; for values tests/basic/test_attention_random.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from opfuser import DotProductAttention, Sequential
from opfuser.attention import choice, cudnn_versions, flex_kernel
from opfuser.attention.call import Call, Heads
from opfuser.attention.choice import KERNELS
from opfuser.errors import ArgumentError, NotSupportedError
from opfuser.runtime import libraries
from tests.basic.attention_packages import MODULE, forget, install
from tests.basic.test_attention_kernels import HOPPER


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The package can be imported; yields it."""
    package = install(monkeypatch)
    yield package
    forget()


CPU, LARGE = torch.device("cpu"), "heads have more than 256 entries"
REASONS: dict[str, list[tuple[dict[str, Any], str | None]]] = {
    "flash_attn": [
        ({}, None),
        ({"softcap": True, "sinks": True, "varlen": True, "window": True}, None),
        ({"alibi": True, "keys": 128}, None),
        ({"alibi": True, "sinks": True}, "with ALiBi its log-sum-exp is that of other scores"),
        ({"device": CPU}, "it runs on a GPU, not on cpu"),
        ({"dtype": torch.float32}, "it computes in fp16 and bf16, not in torch.float32"),
        ({"mask": True}, "it takes no mask"),
        ({"dropout": True}, "it is asked for no dropout"),
        ({"v_head_dim": 128}, "it has one size for heads of keys and of values"),
        ({"head_dim": 264, "v_head_dim": 264}, LARGE),
        ({"head_dim": 60, "v_head_dim": 60}, "head sizes must be multiples of 8"),
        ({"empty": True}, "there is no element"),
        ({"traced": True}, "it is not asked where torch.compile traces"),
    ],
    "flex": [
        ({"softcap": True, "mask": True, "alibi": True, "varlen": True}, None),
        ({"dtype": torch.float32}, "it is taken for fp16 and bf16, not for torch.float32"),
        ({"dropout": True}, "it has no dropout"),
        ({"head_dim": 8}, "heads have less than 16 entries"),
        ({"v_head_dim": 264}, LARGE),
        ({"empty": True}, "there is no element"),
        ({"device": CPU}, "it runs on a GPU, not on cpu"),
    ],
}


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("kernel", REASONS)
def test_reasons(kernel: str) -> None:
    for change, reason in REASONS[kernel]:
        assert KERNELS[kernel].refusal(HOPPER._replace(**change)) == reason


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
