"""The fusion around a kernel of another library, with that kernel and with a stand-in for it."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import opfuser
from opfuser import AddExtraInput, Linear, MakeExtraOutput, Requires, Residual, RMSNorm, Sequential
from opfuser.core.fusion import Env
from opfuser.errors import InputError
from opfuser.testing import assert_fused, check_fusion

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "foreign-kernels.md").read_text("utf-8")
NAME = "liger_add_rms_norm"
DIM = 6
ANYWHERE = Requires()


class Results(NamedTuple):
    """What fused_add_rms_norm_forward of Liger-Kernel 0.8.5 returns."""

    y: Tensor
    total: Tensor
    rstd: Tensor
    block_size: int
    num_warps: int
    num_stages: int
    casting_mode: int


class StandIn:
    """Computes, and takes for granted, what the kernel does; knows whether it was called."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.calls = factor, 0

    def __call__(
        self, X: Tensor, R: Tensor, W: Tensor, eps: float, offset: float, casting_mode: str
    ) -> Results:
        assert casting_mode == "gemma"
        assert X.shape == R.shape
        assert W.shape == X.shape[-1:]
        assert X.dtype == R.dtype
        assert X.dtype != torch.float64  # the kernel would round it to fp32
        # Of strides the kernel knows those of rows alone.
        assert all(t.is_contiguous() for t in (X, R, W))
        self.calls += 1
        total = (X + R).view(-1, X.shape[-1])
        wide = total.float()
        rstd = torch.rsqrt(wide.square().mean(-1) + eps) * self.factor
        y = (wide * rstd[:, None] * (offset + W.float())).to(X.dtype)
        return Results(y.view_as(X), total.view_as(X), rstd, 8, 4, 2, 1)


@pytest.fixture
def snippet(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module that the page shows; its fusion is registered."""
    monkeypatch.syspath_prepend(str(DOCS / "snippets"))
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    module = importlib.import_module(NAME)
    yield module
    module.handle.remove()


@pytest.fixture
def kernel(snippet: ModuleType, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The stand-in in place of the kernel: the fusion needs neither package nor GPU."""
    kernel = StandIn()
    monkeypatch.setattr(snippet, "fused_add_rms_norm_forward", kernel, raising=False)
    snippet.handle.remove()
    rule = dataclasses.replace(snippet.FUSION, requires=ANYWHERE)
    snippet.handle = opfuser.register_forward_fusion(rule, prepend=True)
    return kernel


def operations(dim: int | tuple[int, ...] = DIM, **norm: Any) -> list[opfuser.BasicOperation]:
    return [AddExtraInput(), MakeExtraOutput(), RMSNorm(dim, **norm)]


@pytest.mark.parametrize("zero_centered", [False, True])
def test_fusion_is_right(kernel: StandIn, zero_centered: bool) -> None:
    ops = operations(zero_centered_gamma=zero_centered)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    check_fusion(NAME, ops, torch.randn(5, DIM), torch.randn(5, DIM), dtypes=dtypes)
    assert kernel.calls > 0


def test_kernel_that_is_wrong_is_found(kernel: StandIn) -> None:
    kernel.factor = 1.01
    with pytest.raises(AssertionError, match=NAME):
        check_fusion(NAME, operations(), torch.randn(5, DIM), torch.randn(5, DIM))


def test_sum_of_two_dtypes_is_that_of_the_operations(kernel: StandIn) -> None:
    x, z = torch.randn(5, DIM), torch.randn(5, DIM, dtype=torch.bfloat16)
    seq = Sequential(*operations())
    assert_fused(seq, x, z, forward={NAME: 1})
    fused = seq(x, z)
    with opfuser.disable(NAME):
        expected = seq(x, z)
    assert all(map(torch.equal, fused, expected))
    assert kernel.calls == 0


@pytest.mark.parametrize(("x", "z"), [((5, 4), (5, 4)), ((5, DIM), (1, DIM))], ids=["x", "z"])
def test_wrong_shape_is_an_error(kernel: StandIn, x: tuple[int], z: tuple[int]) -> None:
    with pytest.raises(InputError):
        Sequential(*operations())(torch.randn(x), torch.randn(z))
    assert kernel.calls == 0


def reason(seq: Sequential, *inputs: Tensor) -> str:
    ((_, refusal),) = seq.plan(*inputs).record(NAME).refusals
    return str(refusal)


def test_page_says_what_the_plan_says(
    snippet: ModuleType, kernel: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, wide = torch.randn(5, 2, 3), torch.randn(5, DIM, dtype=torch.float64)
    said = [
        reason(Sequential(*operations()).double(), wide, wide),
        reason(Sequential(*operations((2, 3))), x, x),
    ]
    with torch.autocast("cpu"):
        said.append(reason(Sequential(*operations()), x, x))
    requires = snippet.FUSION.requires
    cpu, cuda = (Env(torch.device(name), torch.float32) for name in ("cpu", "cuda"))
    said.append(str(requires.missing(cpu)))
    module = importlib.import_module("opfuser.core.fusion")
    monkeypatch.setattr(module, "installed", lambda package: package != "liger_kernel")
    said.append(str(requires.missing(cuda)))
    assert [text for text in said if f"| `{text}` |" not in PAGE] == []
    codes = "DTYPE SHAPE AUTOCAST DEVICE MISSING_PACKAGE".split()
    assert [text.partition(":")[0] for text in said] == codes


def model(bias: bool = False) -> Sequential:
    blocks = (Residual(RMSNorm(DIM), Linear(DIM, DIM, bias=bias)) for _ in range(2))
    return Sequential(*blocks).to("meta")


def test_it_comes_before_the_fusion_of_this_library(kernel: StandIn) -> None:
    x = torch.randn(5, DIM, device="meta")
    with torch.no_grad():
        assert_fused(model(), x, forward={NAME: 1, "forward_add_rms_norm": 0})


@pytest.mark.parametrize(("bias", "joint"), [(False, "norm_linear"), (True, "pointwise_norm")])
def test_joint_fusions_come_before_it(kernel: StandIn, bias: bool, joint: str) -> None:
    """As the page says, with what it says to do about them."""
    x = torch.randn(5, DIM, device="meta")
    with opfuser.disable(*{"norm_linear", "pointwise_norm", "pointwise_chain"} - {joint}):
        assert_fused(model(bias), x, forward={NAME: 0}, joint={joint: 1 + (not bias)})
    with opfuser.disable("norm_linear", "pointwise_norm", "pointwise_chain"):
        assert_fused(model(bias), x, forward={NAME: 1}, backward={"backward_add_rms_norm": 1})


@pytest.mark.gpu
@pytest.mark.parametrize("zero_centered", [False, True])
def test_fusion_is_right_with_the_kernel(snippet: ModuleType, zero_centered: bool) -> None:
    pytest.importorskip("liger_kernel.ops", reason="needs Liger-Kernel")
    ops = operations(256, zero_centered_gamma=zero_centered, device="cuda")
    x, z = torch.randn(2, 48, 256, device="cuda")
    assert_fused(Sequential(*ops), x, z, forward={NAME: 1})
    check_fusion(NAME, ops, x, z, dtypes=(torch.float32, torch.bfloat16, torch.float16))
