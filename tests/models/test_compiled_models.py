"""Whole models under torch.compile: the same losses and gradients, traced once."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.profiler import profile

import opfuser
from opfuser.models import MoEConfig, moe_block
from tests.basic.attention_packages import few_queries
from tests.fused.losses import chunked
from tests.models.zoo import batch, grads, make

pytestmark = [
    pytest.mark.slow,
    # The compilers' own use of torch and of Python warns in some versions.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def check(compiled: Any, model: nn.Module, inputs: tuple[Tensor, ...], **tolerances: float) -> None:
    got, wanted = grads(compiled(*inputs), model), grads(model(*inputs), model)
    assert all(value.norm() > 1e-9 for value in wanted.values())
    torch.testing.assert_close(got, wanted, **tolerances)


EXACT = {"rtol": 1e-8, "atol": 1e-11}


def step(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.01)


def counting(model: nn.Module, **kwargs: Any) -> tuple[Any, Any]:
    """The model compiled, and a counter of the times that it was traced."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    return torch.compile(model, fullgraph=True, backend=counter, **kwargs), counter


# The others are exported in test_exported_models.py, which traces them by the same functions.
@pytest.mark.parametrize(
    "family", ["Llama", "Mistral", "Qwen3", "Gemma 2", "GPT-2", "Mixtral", "BERT", "ViT"]
)
def test_traced_once_and_once_more_for_all_other_sizes(family: str) -> None:
    model = make(family)
    compiled, counter = counting(model)
    counts = []
    for rows, length in (2, 9), (2, 9), (3, 7), (4, 12):
        check(compiled, model, batch(family, rows, length), **EXACT)
        counts.append(counter.frame_count)
        step(model)
    assert counts == [1, 1, 2, 2]


@pytest.mark.skipif(shutil.which("g++") is None, reason="generating code needs a C++ compiler")
@pytest.mark.parametrize("family", ["Llama", "BERT"])
def test_code_is_generated_once(family: str) -> None:
    model = make(family, torch.float32)
    compiled: Any = torch.compile(model, fullgraph=True)
    check(compiled, model, batch(family, 2, 9), rtol=1e-3, atol=1e-5)
    step(model)
    with torch.compiler.set_stance("fail_on_recompile"):
        check(compiled, model, batch(family, 2, 9), rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Online softmax:UserWarning")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.filterwarnings("ignore:Please use the new API settings:UserWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("family", ["Llama", "GPT-2", "BERT", "ViT"])
def test_in_cuda_graphs(family: str) -> None:
    """The mode reduce-overhead: recorded in the first steps, replayed in the later ones."""
    model = make(family, torch.float32, "cuda")
    compiled: Any = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for number in range(5):
        inputs = batch(family, 2, 9, torch.float32, "cuda")
        torch.compiler.cudagraph_mark_step_begin()
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            # The next step may overwrite results.
            found = grads(compiled(*inputs), model)
            got = {name: t.clone() for name, t in found.items()}
        torch.testing.assert_close(got, grads(model(*inputs), model), rtol=1e-3, atol=1e-4)
        step(model)


def test_what_is_done_in_pieces_is_so_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a fused loss, and blocks of queries; in as many as the traced sizes need."""
    chunked(monkeypatch, 4)
    few_queries(monkeypatch, 2 * 4 * 16 * 6)
    model = make("Mistral")
    compiled, counter = counting(model, dynamic=True)
    for rows, length in (2, 16), (3, 20), (2, 18), (4, 13):
        check(compiled, model, batch("Mistral", rows, length), **EXACT)
    assert counter.frame_count == 1
    with profile() as profiler:
        compiled(*batch("Mistral", 2, 16))
    ran = Counter(event.name for event in profiler.events())
    # Once for each chunk of logits, and for each block of queries.
    assert min(ran["aten::gather"], ran["aten::masked_fill"]) > 1


def test_a_sequence_twice_in_one_graph() -> None:
    """Of different plans: only the second call has an input that requires grad."""
    model = opfuser.Sequential(opfuser.Linear(3, 3), opfuser.GELU())

    def twice(x: Tensor) -> Tensor:
        y: Tensor = model(model(x)).square().mean()
        return y

    compiled: Any = torch.compile(twice, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 3)
    torch.testing.assert_close(grads(compiled(x), model), grads(twice(x), model))


def test_a_buffer_that_comes_later_counts() -> None:
    """Operations without one are one function of the graph, whose arguments no buffer is among."""
    block = moe_block(MoEConfig(6, 4, num_experts=4, top_k=1, init_std=1.0))
    (router,) = [op for op in block.modules() if isinstance(op, opfuser.TopKRouter)]
    compiled: Any = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(9, 6)
    before = block(x)
    torch.testing.assert_close(compiled(x), before)
    for expert in 0, 3:
        router.score_correction_bias = torch.zeros(4).index_fill_(0, torch.tensor(expert), 9.0)
        torch.testing.assert_close(compiled(x), block(x))
        assert not torch.allclose(block(x), before)
