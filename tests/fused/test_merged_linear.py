"""Fusions take MergedLinear, wherever its weights lie, and LoRALinear for linear operations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from opfuser import (
    AddExtraInput,
    Bias,
    ConstantScale,
    CrossEntropy,
    Linear,
    LoRAAdapter,
    LoRALinear,
    MakeExtraOutput,
    MergedLinear,
    RMSNorm,
    Sequential,
    SiLU,
    SwiGLU,
)
from opfuser.testing import check_fusion
from tests.fused.examples import (
    DTYPES,
    F64,
    asking,
    assert_same,
    filled,
    leaf,
    only,
    results,
    saved_by,
)


def merged(*, bias: bool = True, **sizes: int) -> list[nn.Module]:
    return [MergedLinear(6, sizes or {"q": 3, "k": 1, "v": 2}, bias=bias)]


ADAPTERS = (
    LoRAAdapter("one", 2, 0.5),
    LoRAAdapter("two", 3, -2.0),
    LoRAAdapter("dropped", 2, dropout=0.5),
)


def lora(*, bias: bool = True, **sizes: int) -> list[nn.Module]:
    """With a bias of its own, too; all of it is trained, and one adapter has dropout."""
    op = LoRALinear(6, (sum(sizes.values()) or 6,), ADAPTERS).requires_grad_()
    return [op, *[Bias(op.out_features)] * bias]


EXAMPLES: dict[str, tuple[Callable[[Any], list[nn.Module]], tuple[int, ...]]] = {
    "recompute_mlp_where_asked": (
        lambda linear: [RMSNorm(6), *linear(gate=5, up=5), asking(SwiGLU()), Linear(5, 4)],
        (),
    ),
    "activation_linear_add": (lambda linear: [SiLU(), *linear(), AddExtraInput()], (6,)),
    "activation_linear": (lambda linear: [SiLU(), *linear()], ()),
    "norm_linear": (lambda linear: [RMSNorm(6), *linear()], ()),
    "forward_linear_scale_add": (
        lambda linear: [*linear(bias=False), ConstantScale(0.3), AddExtraInput()],
        (6,),
    ),
    "forward_linear_bias_add": (lambda linear: [*linear(), AddExtraInput()], (6,)),
    "forward_linear_bias_activation": (lambda linear: linear(), ()),
    "backward_linear_add": (lambda linear: [MakeExtraOutput(), *linear(bias=False)], ()),
    "backward_linear_scale": (lambda linear: [*linear(bias=False), ConstantScale(0.3)], ()),
}
each = pytest.mark.parametrize("name", EXAMPLES)


# With its adapters it keeps its own bias, which is a parameter and takes no memory.
@pytest.mark.filterwarnings("ignore:A fusion saves what .*LoRALinear")
@pytest.mark.parametrize("linear", [merged, lora])
@each
def test_check_fusion(name: str, linear: Any, device: torch.device) -> None:
    """Copies, with which it works, have storages of their own: those of projections are apart."""
    make, widths = EXAMPLES[name]
    ops = [op.to(device) for op in filled(make(linear))]
    extras = [torch.randn(3, 5, width, device=device) for width in widths]
    check_fusion(name, ops, torch.randn(3, 5, 6, device=device), *extras, dtypes=DTYPES)


@each
@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
def test_in_one_storage(name: str, frozen: str | None) -> None:
    make, widths = EXAMPLES[name]
    seq = Sequential(*filled(make(merged))).to(F64)
    for key, p in seq.named_parameters():
        p.requires_grad_(frozen is None or not key.endswith((f"k.{frozen}", f"up.{frozen}")))
    inputs = [leaf(3, 5, width, dtype=F64) for width in (6, *widths)]
    parameters = list(seq.parameters())
    with only(name):
        assert seq.plan(*inputs).record(name).matches
        ours = results(seq, parameters, *inputs)
    apart = copy.deepcopy(seq)
    with only():
        assert_same(ours, results(apart, list(apart.parameters()), *inputs))


@pytest.mark.parametrize("apart", [False, True], ids=["one storage", "apart"])
def test_saves_what_is_saved_behind_one_linear_operation(apart: bool) -> None:
    """The input of the norm and a number per row; and that of SwiGLU."""

    def block(first: nn.Module) -> Any:
        return Sequential(RMSNorm(64), first, SwiGLU(), Linear(64, 64))

    one = block(Linear(64, 128, bias=False))
    ours = block(MergedLinear(64, {"gate_proj": 64, "up_proj": 64}, bias=False))
    ours = copy.deepcopy(ours) if apart else ours
    x = torch.randn(300, 64, requires_grad=True)
    expected, saved = saved_by(one, x), saved_by(ours, x)
    assert sorted(t.nbytes for t in saved) == sorted(t.nbytes for t in expected)


def test_the_loss_fusion_leaves_it_alone() -> None:
    """Logits of several heads are not those of one."""
    seq, x = Sequential(*merged(), CrossEntropy()), torch.randn(3, 6)
    record = seq.plan(x, torch.zeros(3, dtype=torch.int64)).record("linear_cross_entropy")
    assert not record.matches


def test_main_grad_behind_a_norm() -> None:
    op = MergedLinear(6, {"q": 4, "k": 2}, bias=False, accumulate_into_main_grad=True).double()
    seq, x = Sequential(RMSNorm(6).double(), op), torch.randn(5, 6, dtype=F64)
    for p in op.parameters():
        p.main_grad = torch.zeros_like(p)
    seq(x).sum().backward()
    twin = copy.deepcopy(seq)
    twin[1].accumulate_into_main_grad = False
    for p in twin.parameters():
        p.grad = None
    twin(x).sum().backward()
    for p, other in zip(op.parameters(), twin[1].parameters()):
        torch.testing.assert_close(p.main_grad, other.grad)


@pytest.mark.parametrize("backward", [False, True])
def test_compiled(backward: bool) -> None:
    seq = Sequential(RMSNorm(6), *merged(gate=5, up=5), SwiGLU(), Linear(5, 6))
    filled(list(seq))
    torch.compiler.reset()  # Dynamo counts what other tests compiled
    compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 6, requires_grad=backward)
    for _ in range(2):
        ours, wanted = compiled(x), seq(x)
        torch.testing.assert_close(ours, wanted)
        if backward:
            wrt = [x, *seq.parameters()]
            for a, b in zip(*(torch.autograd.grad(y.sum(), wrt) for y in (ours, wanted))):
                torch.testing.assert_close(a, b)
        seq[1].gate.weight = nn.Parameter(torch.randn(5, 6))
    seq[1].gate.register_forward_hook(lambda module, args, y: 0 * y)
    torch.testing.assert_close(compiled(x), seq[3].bias.expand(4, -1))
