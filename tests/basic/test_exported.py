"""Every operation in a program of torch.export, which torch differentiates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import DotProductAttention, Sequential
from opfuser.attention.call import Call, Heads
from opfuser.attention.exported import EXPORTED
from opfuser.runtime.recording import watching
from tests.basic.attributes import CASES, make, results
from tests.basic.values import fill

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def check(model: nn.Module, inputs: list[Tensor]) -> None:
    program: Any = torch.export.export(model, tuple(inputs), strict=False)
    found, wanted = results(program.module(), inputs), results(model, inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-11)
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)  # of an operator
        assert schema is None or not schema.is_mutable, node


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    op = fill(make(name)).double().eval()
    inputs = [t.double() if t.is_floating_point() else t for t in CASES[name].inputs()]
    check(Sequential(op), inputs)


class Given(nn.Module):
    """Attention with keywords, whose tensors are buffers."""

    def __init__(self, keywords: dict[str, Any], **modes: Any) -> None:
        super().__init__()
        self.sequence = Sequential(fill(DotProductAttention(4, 2, **modes)).double())
        self.keywords = keywords
        for name, value in keywords.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)

    def forward(self, *inputs: Tensor) -> Any:
        keywords = {name: getattr(self, name, value) for name, value in self.keywords.items()}
        return self.sequence(*inputs, op_kwargs={0: keywords} if keywords else None)


ENDS = torch.tensor([0, 3, 7], dtype=torch.int32)


@pytest.mark.parametrize(
    ("modes", "keywords"),
    [
        ({"window": 3}, {}),
        ({"window": 2, "causal": False}, {}),
        ({"softcap": 1.5}, {}),
        ({"sinks": True, "window": 3}, {}),
        ({"alibi": True}, {}),
        ({"v_head_dim": 3}, {}),
        ({"kernel": "blockwise"}, {}),
        ({"layout": "separate"}, {}),
        ({}, {"mask": torch.rand(2, 7) < 0.7}),
        ({}, {"mask": torch.randn(2, 1, 7, 7)}),
        ({}, {"cu_seqlens": ENDS, "max_seqlen": 4}),
    ],
    ids=", ".join,
)
def test_modes_of_attention(modes: dict[str, Any], keywords: dict[str, Any]) -> None:
    batch, values = 1 if "cu_seqlens" in keywords else 2, modes.get("v_head_dim", 4)
    x = torch.randn(batch, 7, 6 * 4 + 2 * values, dtype=torch.float64)
    fewer_queries = [x[:, 4:, :16], x[..., 16:24], x[..., 24:]]
    check(Given(keywords, **modes), fewer_queries if "layout" in modes else [x])


def test_fused_chains_norms_and_dropout_in_training() -> None:
    """What is fused there is one formula; dropout draws anew at every call."""
    model = Sequential(
        opfuser.RMSNorm(6), opfuser.Linear(6, 12), opfuser.SwiGLU(), opfuser.Dropout(0.5)
    ).double()
    x = torch.randn(40, 6, dtype=torch.float64)
    program: Any = torch.export.export(model, (x,), strict=False).module()
    first, second = program(x), program(x)
    kept = first != 0
    assert 0.3 < kept.double().mean() < 0.7
    assert not torch.equal(kept, second != 0)
    wanted = model.eval()(x)
    torch.testing.assert_close(first[kept], 2 * wanted[kept], rtol=1e-8, atol=1e-11)


class InPlace(opfuser.BasicOperation):
    """``exp(x)²``, which overwrites what the derivative of exp is made of."""

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        ctx.save_for_backward(input_)
        return input_.exp().square_()

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor, tuple[()]]:
        (x,) = ctx.saved_tensors
        return 2 * grad_output * (2 * x).exp(), ()


def test_an_operation_of_the_user() -> None:
    check(
        Sequential(opfuser.Linear(3, 3), InPlace(), opfuser.GELU()).double(),
        [torch.randn(4, 3, dtype=torch.float64)],
    )


@pytest.mark.parametrize("transpose", [True, False])
def test_products_of_groups_differentiate(transpose: bool) -> None:
    """The operator that programs hold on a CPU."""
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    shape = (4, 3) if transpose else (3, 4)
    weights = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    sizes = torch.tensor([2, 0, 5])

    def product(x: Tensor, *weights: Tensor) -> Tensor:
        y: Tensor = torch.ops.opfuser.grouped_mm(x, list(weights), sizes, transpose)
        return y

    assert torch.autograd.gradcheck(product, (x, *weights))


def test_attention_of_programs_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch chooses kernels while it runs, and a recorded call would run beside that choice."""
    reasons: list[str] = []
    monkeypatch.setattr(watching, "watcher", SimpleNamespace(refuse=reasons.append))
    heads = Heads(*torch.randn(3, 1, 2, 4, 8))
    EXPORTED.forward(heads, Call(scale=0.5, causal=True))
    assert reasons == ["attention for exported programs limits the kernels of torch"]
