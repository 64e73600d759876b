"""Whole models as programs of torch.export: values, gradients, other sizes, files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._sympy import functions as sympy_functions

from examples import lm_fusion
from opfuser import Sequential
from opfuser.models import EncoderConfig, attention_kwargs, text_encoder
from tests.models.zoo import batch, grads, make

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]

ROWS, LENGTH = Dim("rows", min=1, max=64), Dim("length", min=2, max=32)
# Those that Dynamo takes by different ways; and the others, some of which are compiled in
# test_compiled_models.py.
STRICT = ["Mixtral", "ViT"]
EXPORTED = ["the examples'", "Mistral", "Qwen2", "Gemma 3", "GPT-2", "Qwen2-MoE", "BERT", "ViT"]


class Root(nn.Module):
    """``model`` with positional inputs of any number, which dynamic shapes are stated of."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        y: Tensor = self.model(*inputs)
        return y


def export(model: nn.Module, inputs: tuple[Tensor, ...], strict: bool = False) -> ExportedProgram:
    """For any number of rows, and any length of sequences."""
    variable = [{0: ROWS, 1: LENGTH} if t.dim() == 2 else {0: ROWS} for t in inputs]
    shapes = (tuple(variable),)
    return torch.export.export(Root(model), inputs, strict=strict, dynamic_shapes=shapes)


@pytest.mark.parametrize(
    ("family", "strict"),
    [*[(family, False) for family in EXPORTED], *[(family, True) for family in STRICT]],
)
def test_values_and_gradients_for_all_sizes(family: str, strict: bool) -> None:
    model = make(family)
    program: Any = export(model, batch(family, 2, 9), strict).module()
    for rows, length in (2, 9), (1, 2), (5, 13):
        inputs = tuple(t.mT.contiguous().mT for t in batch(family, rows, length))  # of any layout
        got, wanted = grads(program(*inputs), program.model), grads(model(*inputs), model)
        assert all(value.norm() > 1e-9 for value in wanted.values())
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-11)


def targets(program: ExportedProgram) -> list[Any]:
    graph = program.graph
    return [n.target for n in graph.nodes if isinstance(n.target, type(torch.ops.aten.mm.default))]


def test_a_program_writes_to_nothing_and_leaves_the_kernel_of_attention_open() -> None:
    """So that it can be differentiated, and runs on other devices."""
    model, inputs = make("Mistral"), batch("Mistral", 2, 9)
    exported = export(model, inputs)
    program, wanted = exported.module(), grads(model(*inputs), model)
    with sdpa_kernel([SDPBackend.MATH]):  # whose output has another layout than that of the trace
        got = grads(program(*inputs), program.model)
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-11)
    found = targets(exported)
    assert not [op for op in found if op._schema.is_mutable]
    assert torch.ops.aten.scaled_dot_product_attention.default in found
    assert torch.ops.aten.detach.default not in found
    assert {op.namespace for op in found} == {"aten"}


@pytest.mark.parametrize("strict", [False, True])
def test_keywords_and_half_precision(strict: bool) -> None:
    config = EncoderConfig(17, 16, 1, 2, num_positions=32, dtype=torch.bfloat16)
    model = text_encoder(config).eval()

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = model

        def forward(self, tokens: Tensor, types: Tensor, mask: Tensor) -> Tensor:
            keywords = attention_kwargs(self.encoder, mask=mask)
            y: Tensor = self.encoder(tokens, types, op_kwargs=keywords)
            return y

    padded, sizes = Padded(), {0: ROWS, 1: LENGTH}
    inputs = *batch("BERT", 2, 9), torch.ones(2, 9, dtype=torch.bool)
    program: Any = torch.export.export(
        padded, inputs, dynamic_shapes=(sizes, sizes, sizes), strict=strict
    ).module()
    tokens, types = batch("BERT", 3, 12)
    mask = torch.arange(12) < torch.tensor([[12], [7], [1]])
    y, wanted = program(tokens, types, mask), padded(tokens, types, mask)
    exact = padded.double()(tokens, types, mask)
    assert y.dtype == torch.bfloat16
    assert (y.double() - exact).norm() <= 2 * (wanted.double() - exact).norm()


def test_with_the_fusion_of_the_example() -> None:
    """A user's, whose forward calls an operation."""
    model, inputs = make("Qwen2"), batch("Qwen2", 2, 9)
    wanted = grads(model(*inputs), model)
    with lm_fusion.register():
        program: Any = export(model, inputs).module()
        assert isinstance(model, Sequential)
        assert model.plan(*inputs).fused("forward")[lm_fusion.NAME] == 1
    torch.testing.assert_close(
        grads(program(*inputs), program.model), wanted, rtol=1e-8, atol=1e-11
    )


IN_ANOTHER_PROCESS = """
import sys
import torch
program = torch.export.load(sys.argv[1])
tokens, targets, loss = torch.load(sys.argv[2])
model = program.module()
found = model(tokens, targets)
torch.testing.assert_close(found, loss, rtol=1e-8, atol=1e-11)
found.backward()
assert all(p.grad.norm() > 0 for p in model.parameters())
assert "opfuser" not in sys.modules
"""


def test_a_file_needs_no_opfuser(tmp_path: Path) -> None:
    model = make("Llama")
    torch.export.save(export(model, batch("Llama", 2, 9)), tmp_path / "model.pt2")
    inputs = batch("Llama", 3, 7)
    torch.save((*inputs, model(*inputs).detach()), tmp_path / "data.pt")
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, tmp_path / "model.pt2", tmp_path / "data.pt"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_file_with_experts(tmp_path: Path) -> None:
    """Their products are operators of opfuser, where no kernel of torch reads sizes on a device."""
    model = make("Mixtral")
    torch.export.save(export(model, batch("Mixtral", 2, 9)), tmp_path / "model.pt2")
    program: Any = torch.export.load(tmp_path / "model.pt2").module()
    inputs = batch("Mixtral", 3, 7)
    got, wanted = grads(program(*inputs), program.model), grads(model(*inputs), model)
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-11)


@pytest.mark.skipif(shutil.which("g++") is None, reason="generating code needs a C++ compiler")
def test_compiled_ahead_of_time(tmp_path: Path) -> None:
    """Into a library, for inference."""
    model = make("BERT", torch.float32)
    inputs = batch("BERT", 2, 9)
    with torch.no_grad():
        program = export(model, inputs)
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2")
        )
        compiled = torch._inductor.aoti_load_package(path)
        for sizes in (2, 9), (3, 14):
            inputs = batch("BERT", *sizes)
            torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["Llama", "Gemma 2"])  # torch's call, and the formula
def test_groups_of_queries_without_a_kernel_for_them(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU in fp32. The formula would repeat keys so that torch 2.11 fixes the length."""
    # Of two multiples of a length, torch 2.11 does not know the smaller one.
    name, unknown = "_collapse_known_multiplicative_terms", classmethod(lambda cls, values: None)
    monkeypatch.setattr(sympy_functions.MinMaxBase, name, unknown, raising=False)
    model = make(family)
    with sdpa_kernel([SDPBackend.MATH]):
        exported = export(model, batch(family, 2, 9))
    program, inputs = exported.module(), batch(family, 3, 13)
    got, wanted = grads(program(*inputs), program.model), grads(model(*inputs), model)
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-11)
    # Kernels that take no groups can be taken where the program runs.
    assert not any(node.kwargs.get("enable_gqa") for node in exported.graph.nodes)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("where", "family"), [("cpu", "Llama"), ("cuda", "Llama"), ("cuda", "Mistral")]
)
def test_on_a_gpu(where: str, family: str) -> None:
    """Exported there, or on a CPU and then moved: no kernel of one device is in a program."""
    program = export(make(family, torch.float32, where), batch(family, 2, 9, device=where))
    if where == "cpu":
        program = move_to_device_pass(program, "cuda")
    moved: Any = program.module()
    model = make(family, torch.float32, "cuda")
    model.load_state_dict(moved.model.state_dict())
    inputs = batch(family, 3, 12, device="cuda")
    got, wanted = grads(moved(*inputs), moved.model), grads(model(*inputs), model)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-5)
