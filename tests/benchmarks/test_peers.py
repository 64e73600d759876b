"""Contestants from other libraries: what is called of them, and what rows say without them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu import blocks, gemm_problems, kernels, loss_problems, peers, tables
from benchmarks.gpu.contest import contest
from benchmarks.gpu.problem import Options, Problem

CPU = Options(torch.device("cpu"), torch.float32, seconds=0.0)


# quack 0.6.4: its signatures, in plain torch.
def rmsnorm(
    x: Tensor, weight: Any = None, bias: Any = None, residual: Any = None, out_dtype: Any = None,
    residual_dtype: Any = None, eps: float = 1e-6, prenorm: bool = False,
) -> Any:  # fmt: skip
    x = x if residual is None else x + residual
    y = F.rms_norm(x, x.shape[-1:], weight, eps)
    return (y, x) if prenorm else y


def linear_func(
    x: Tensor, weight: Tensor, bias: Any = None, fuse_grad_accum: bool = False, tuned: bool = True
) -> Tensor:
    return F.linear(x, weight, bias)


def mlp_func(  # noqa: PLR0917
    x: Tensor, weight1: Tensor, weight2: Tensor, activation: str, bias1: Any = None,
    bias2: Any = None, fuse_grad_accum: bool = False, tuned: bool = True, recompute: bool = False,
    concat_layout: bool = False,
) -> Tensor:  # fmt: skip
    h = F.linear(x, weight1, bias1)
    if activation == "gelu_tanh_approx":
        return F.linear(F.gelu(h, approximate="tanh"), weight2, bias2)
    assert activation == "swiglu"
    gate, up = h.chunk(2, -1) if concat_layout else (h[..., ::2], h[..., 1::2])
    return F.linear(F.silu(gate) * up, weight2, bias2)


def gemm_gated(
    A: Tensor, B: Tensor, C: Any = None, bias: Any = None, activation: Any = None, *,
    store_preact: bool = True, tuned: bool = True, concat_layout: Any = None,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    assert (activation, C, bias) == ("swiglu", None, None)
    h = A @ B
    gate, up = h.chunk(2, -1) if concat_layout == ("B",) else (h[..., ::2], h[..., 1::2])
    return h if store_preact else None, F.silu(gate) * up


def chunked_linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, chunk_size: int = 4096, ignore_index: int = -100,
    reduction: str = "mean", tuned: bool = True, use_scaled_exp: Any = None,
) -> Tensor:  # fmt: skip
    return F.cross_entropy(x @ weight.T, target, reduction=reduction)


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False
) -> Tensor:
    assert not interleaved
    assert not inplace
    assert cos.shape == (x.shape[1], x.shape[3] // 2)
    (a, b), cos, sin = x.chunk(2, -1), cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


STAND_INS = {
    "quack.rmsnorm": [rmsnorm],
    "quack.linear": [linear_func],
    "quack.mlp": [mlp_func],
    "quack.gemm_interface": [gemm_gated],
    "quack.linear_cross_entropy": [chunked_linear_cross_entropy],
    "quack.rotary": [apply_rotary_emb],
}


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Libraries are looked for as where there is a GPU, and quack is stood in for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    for name, functions in STAND_INS.items():
        module: Any = ModuleType(name)
        for function in functions:
            setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)
    tuner: Any = ModuleType("quack.autotuner")
    tuner._bench_cuda_graph_l2_rotate = lambda **how: how
    monkeypatch.setitem(sys.modules, "quack.autotuner", tuner)
    for name in (peers.LIGER, peers.TE, peers.QUACK_IN_TORCH):
        found = peers.PEERS[name].found.partition(".")[0]
        monkeypatch.setitem(sys.modules, found if found != "torch" else "torch._vendor", None)
    caches = peers.lacking, peers.attribute, peers.quack_tunes_quickly
    for cache in caches:
        cache.cache_clear()
    yield monkeypatch
    for cache in caches:
        cache.cache_clear()


PROBLEMS: dict[str, Any] = {
    "norm + GEMM": lambda: gemm_problems.norm_linear(CPU, **kernels.TINY_GEMM),
    "GEMM + gate": lambda: gemm_problems.linear_swiglu(CPU, **kernels.TINY_GEMM),
    "loss": lambda: loss_problems.linear_cross_entropy(CPU, tokens=6, dim=16, classes=65),
    "SwiGLU block": lambda: blocks.swiglu(CPU, dim=64, tokens=8),
    "attention": lambda: blocks.attention_swiglu(CPU, dim=64, tokens=8),
    "GPT block": lambda: blocks.gpt(CPU, dim=64, tokens=8),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_quack_computes_what_torch_does_in_float64(name: str, on_a_gpu: pytest.MonkeyPatch) -> None:
    problem: Problem = PROBLEMS[name]()
    assert problem.exact is not None
    on_a_gpu.setattr(torch.cuda, "is_available", lambda: False)  # as the harness runs on a CPU
    found = list(contest(problem, CPU, ()))
    rows = [row for row in found if row["contestant"] in (peers.QUACK, peers.QUACK_AS_IS)]
    assert {row["contestant"] for row in rows} == {
        peers.QUACK,
        *([peers.QUACK_AS_IS] if name != "loss" else []),
    }
    for row in rows:
        assert row.get("error", 1.0) < 1e-5, row
    others = {row["contestant"]: row["failure"] for row in found if "failure" in row}
    assert peers.LIGER in others
    assert peers.TE in others or name in ("GEMM + gate", "loss")
    for who in (peers.LIGER, peers.TE):
        reason = others.get(who, f"not installed: needs {peers.PEERS[who].needs} (")
        assert reason.startswith(f"not installed: needs {peers.PEERS[who].needs} (")


def test_quack_tunes_with_fewer_samples_of_each_kernel(on_a_gpu: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        peers.quack_tunes_quickly()
    tuner: Any = peers.attribute("quack.autotuner")
    how = tuner._bench_cuda_graph_l2_rotate()
    assert how == {"warmup_target_ms": 20.0, "n_timed_calls": 20}


def test_a_row_in_the_table_says_not_installed() -> None:
    row = {"case": "", "contestant": peers.QUACK, "failure": "not installed: needs it"}
    assert tables.cell(row, "blocks") == "not installed"
    assert tables.cell({**row, "failure": "ValueError: no"}, "blocks") == "failed"
    assert not tables.cell({"contestant": ""}, "blocks")


def test_without_a_gpu_nobody_else_takes_part() -> None:
    peers.lacking.cache_clear()
    if not torch.cuda.is_available():
        assert not peers.swiglu()
        assert peers.lacking(peers.QUACK) == "there is no CUDA device"


def test_arguments_are_those_of_the_stand_ins() -> None:
    """Which were read in the wheel; where quack is installed, its own are compared."""
    quack = pytest.importorskip("quack", reason="needs quack-kernels", exc_type=ImportError)
    for name, functions in STAND_INS.items():
        for function in functions:
            own = inspect.signature(peers.attribute(f"{name}:{function.__name__}")).parameters
            given = inspect.signature(function).parameters
            assert set(given) <= set(own), (quack.__version__, name)
    tuner = peers.attribute("quack.autotuner")
    own = inspect.signature(tuner._bench_cuda_graph_l2_rotate).parameters
    assert {"warmup_target_ms", "n_timed_calls"} <= set(own)


def test_cudnn_of_torch_is_loaded_before_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which loads another one else, and torch's attention is slow with two."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "pytorch.py").write_text("from benchmarks.gpu import peers\npeers.told.append(1)\n")
    told: list[int] = []
    monkeypatch.setattr(peers, "told", told, raising=False)
    monkeypatch.setattr(peers, "_load_cudnn_of_torch", lambda: told.append(0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(peers, "lacking", peers.lacking.__wrapped__)
    monkeypatch.setattr(peers, "attribute", peers.attribute.__wrapped__)
    peers.load_cudnn()
    assert told == [0, 1]
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        del sys.modules[name]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    peers.load_cudnn()
    assert told == [0, 1]
