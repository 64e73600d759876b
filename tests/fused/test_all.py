"""What holds for every built-in fusion, and for all of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import AddExtraInput, BasicLinear, Bias, ConstantScale, MakeExtraOutput, Sequential
from opfuser.basic.activation import SiLU
from opfuser.basic.layer_norm import LayerNorm
from opfuser.basic.rms_norm import RMSNorm
from opfuser.fused import FUSIONS
from opfuser.fusion import Fusion
from opfuser.op import FusedOperation
from opfuser.testing import check_fusion
from tests.fused.examples import EXAMPLES, call, extras, filled
from tests.fused.pairings import DTYPES, only, tensor

forward_fusions = pytest.mark.parametrize(
    "fusion", [f for f in FUSIONS if f.stage == "forward"], ids=lambda fusion: fusion.name
)


def test_every_fusion_has_an_example_and_is_registered_in_order() -> None:
    assert [fusion.name for fusion in FUSIONS] == list(EXAMPLES)
    listed = [info for info in opfuser.fusions() if info.origin == "opfuser"]
    for stage in ("joint", "forward", "backward"):
        names = [fusion.name for fusion in FUSIONS if fusion.stage == stage]
        assert [info.name for info in listed if info.stage == stage] == names
    assert all(info.enabled for info in listed)


@pytest.mark.parametrize("fusion", FUSIONS, ids=lambda fusion: fusion.name)
def test_check_fusion(fusion: Fusion, device: torch.device) -> None:
    ops = [op.to(device) for op in filled(EXAMPLES[fusion.name][0]())]
    tensors = [t.to(device) for t in (torch.randn(3, 5, 6), *extras(fusion.name, 3, 5))]
    check_fusion(fusion.name, ops, *tensors, dtypes=DTYPES, zero_rows=True)


@pytest.mark.parametrize("fusion", FUSIONS, ids=lambda fusion: fusion.name)
def test_a_fused_operation_covers_its_parts_in_order_and_owns_nothing(fusion: Fusion) -> None:
    ops = EXAMPLES[fusion.name][0]()
    fused = fusion.build(*ops)
    assert isinstance(fused, FusedOperation)
    assert list(fused.basic_ops) == ops
    assert fused._parameters == {}
    assert list(fused._modules) == ["basic_ops"]


@forward_fusions
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_forward_saves_only_for_contexts_that_require_grad(
    fusion: Fusion, requires_grad: bool
) -> None:
    ops = filled(EXAMPLES[fusion.name][0]())
    more = extras(fusion.name, 3)
    _, ctxs = call(fusion.build(*ops), ops, more, requires_grad=requires_grad)
    for op, ctx in zip(ops, ctxs):
        saves = requires_grad and isinstance(op, (BasicLinear, RMSNorm, LayerNorm))
        assert (ctx.to_save is not None) == saves


@forward_fusions
def test_a_forward_saves_in_the_dtype_of_autocast(fusion: Fusion) -> None:
    ops = filled(EXAMPLES[fusion.name][0]())
    with torch.autocast("cpu", torch.bfloat16):
        _, ctxs = call(fusion.build(*ops), ops, extras(fusion.name, 3))
        for op, ctx in zip(ops, ctxs):
            if isinstance(op, (BasicLinear, RMSNorm, LayerNorm)):
                _, (alone,) = call(op, [op], [])
                assert ctx.to_save is not None
                assert alone.to_save is not None
                assert [t.dtype for t in ctx.to_save] == [t.dtype for t in alone.to_save]


PRECEDENCE: dict[str, tuple[list[nn.Module], Counter[str]]] = {
    "the sum goes into the GEMM, not the norm": (
        [BasicLinear(6, 6), Bias(6), AddExtraInput(), MakeExtraOutput(), RMSNorm(6)],
        Counter(["forward_linear_bias_add", "backward_add_rms_norm"]),
    ),
    "the sum goes into the scaled GEMM, not the norm": (
        [BasicLinear(6, 6), ConstantScale(2.0), AddExtraInput(), LayerNorm(6)],
        Counter(["forward_linear_scale_add", "backward_linear_scale"]),
    ),
    "a bias without a sum goes into the GEMM": (
        [BasicLinear(6, 6), Bias(6), ConstantScale(2.0), AddExtraInput(), LayerNorm(6)],
        Counter(["forward_linear_bias_activation", "forward_add_layer_norm"]),
    ),
    "the residual gradient goes into the GEMM, not the factor": (
        [MakeExtraOutput(), BasicLinear(6, 6), ConstantScale(2.0)],
        Counter(["backward_linear_add"]),
    ),
    "a bias serves both passes": (
        [BasicLinear(6, 6), Bias(6), SiLU()],
        Counter(["forward_linear_bias_activation", "backward_activation_bias"]),
    ),
}


@pytest.mark.parametrize("case", PRECEDENCE)
def test_precedence(case: str) -> None:
    ops, expected = PRECEDENCE[case]
    seq = Sequential(*ops)
    x = torch.randn(3, 6, requires_grad=True)
    plan = seq.plan(x, *[x] * sum(isinstance(op, AddExtraInput) for op in ops))
    assert plan.fused("forward") | plan.fused("backward") == expected


def everything() -> Sequential:
    return Sequential(
        MakeExtraOutput(),
        BasicLinear(6, 4),
        ConstantScale(0.5),
        AddExtraInput(),
        MakeExtraOutput(),
        LayerNorm(4),
        BasicLinear(4, 5),
        Bias(5),
        SiLU(),
        BasicLinear(5, 4),
        Bias(4),
        AddExtraInput(),
        MakeExtraOutput(),
        RMSNorm(4),
        BasicLinear(4, 4),
        ConstantScale(2.0),
        AddExtraInput(),
        RMSNorm(4),
        AddExtraInput(),
        LayerNorm(4),
        ConstantScale(3.0),
        AddExtraInput(),
        RMSNorm(4),
    )


WIDTHS = [4, 4, 4, 4, 4]


def gradients(
    model: Callable[..., tuple[Tensor, ...]], seq: Sequential, rows: int
) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(1)
    x, *more = (tensor((rows, n), torch.float64).requires_grad_() for n in [6, *WIDTHS])
    outs = model(x, *more)
    douts = [torch.randn_like(o) for o in outs]
    grads = torch.autograd.grad(outs, [x, *more, *seq.parameters()], douts)
    return [o.detach() for o in outs], list(grads)


def test_all_fusions_in_one_sequence() -> None:
    seq = everything().double()
    filled(list(seq))
    plan = seq.plan(
        torch.randn(3, 6, dtype=torch.float64, requires_grad=True),
        *[torch.randn(3, n, dtype=torch.float64) for n in WIDTHS],
    )
    assert {*plan.fused("forward"), *plan.fused("backward")} == {f.name for f in FUSIONS}
    for rows in (0, 1, 3):
        got = gradients(seq, seq, rows)
        with only(forward=False, backward=False):
            want = gradients(seq, seq, rows)
        for a, b in zip((*got[0], *got[1]), (*want[0], *want[1])):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_all_fusions_compile_into_one_graph() -> None:
    torch.compiler.reset()  # its limit of recompilations counts those of all tests
    seq = everything().double()
    filled(list(seq))
    compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
    for rows in (3, 5):
        got, want = gradients(compiled, seq, rows), gradients(seq, seq, rows)
        for a, b in zip((*got[0], *got[1]), (*want[0], *want[1])):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
