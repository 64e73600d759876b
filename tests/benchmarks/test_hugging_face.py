"""The benchmark of a Llama of transformers, rehearsed with every contestant."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.gpu import hugging_face, peers
from benchmarks.gpu.compiled import COMPILED
from benchmarks.gpu.contest import checker, distance
from benchmarks.gpu.passes import ready
from benchmarks.gpu.problem import OURS, REFERENCE, STEP, Options

llama = pytest.importorskip(
    "transformers.models.llama.modeling_llama", reason="transformers is not installed"
)

CPU = Options(torch.device("cpu"), torch.float32, seconds=0.0, modes=("default",))


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> list[torch.nn.Module | None]:
    """In place of Liger-Kernel, which needs a GPU: what it sets, and the names of whom it sees.

    As there, the function of rotary embeddings is replaced for all Llamas, and not traceable.
    """
    rotary = llama.apply_rotary_pos_emb
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", rotary)  # put back in any case
    within: list[torch.nn.Module | None] = [None]
    seen: list[torch.nn.Module | None] = []

    @torch.compiler.disable
    def patched(*args: Any, **kwargs: Any) -> Any:
        seen.append(within[0])
        return rotary(*args, **kwargs)

    def apply(model: torch.nn.Module) -> None:
        def forward(*args: Any, **kwargs: Any) -> Any:
            within[0] = model
            try:
                return type(model).forward(model, *args, **kwargs)
            finally:
                within[0] = None

        llama.apply_rotary_pos_emb = patched
        model.forward = forward

    package = types.ModuleType("liger_kernel.transformers")
    package.apply_liger_kernel_to_llama = apply  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    monkeypatch.setattr(peers, "installed", lambda name: name == peers.LIGER)
    return seen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_contestant_runs_as_itself(
    liger: list[torch.nn.Module | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's compiler too, and nobody but Liger-Kernel by what Liger-Kernel sets."""
    rotary = llama.apply_rotary_pos_emb
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    rows = list(hugging_face.rows(CPU))
    assert [row for row in rows if "failure" in row] == []
    assert {row["contestant"] for row in rows} == {
        "torch",
        "opfuser",
        "opfuser, fused loss",
        "opfuser, fused loss, merged weights",
        peers.LIGER,
        COMPILED["default"],
    }
    assert liger
    assert None not in liger
    assert llama.apply_rotary_pos_emb is rotary


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_in_bf16_are_compared_with_fp32() -> None:
    pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)
    problem = hugging_face.lora_step(CPU, layers=2, length=16)
    inputs = problem.draw()
    assert problem.exact is not None
    step = ready(problem, problem.functions[REFERENCE], STEP, inputs)
    assert distance([t.detach() for t in step()], problem.exact(inputs)) < 1e-4

    options = Options(CPU.device, torch.bfloat16)
    problem = hugging_face.lora_step(options, layers=2, length=16)

    def wrong(tokens: Tensor) -> Tensor:
        """The loss, with gradients that are half as large again."""
        y: Tensor = problem.functions[REFERENCE](tokens)
        return y + (y - y.detach()) / 2

    check = checker(problem, problem.functions[REFERENCE], options)
    functions = {**problem.functions, "wrong": wrong}
    failures = {name: timing.attempt(lambda f=f: check(f))[1] for name, f in functions.items()}
    agree = {name for name, failure in failures.items() if failure is None}
    assert agree == {REFERENCE, OURS, "opfuser, fused loss"}
    assert "the result is off by" in failures["wrong"]
