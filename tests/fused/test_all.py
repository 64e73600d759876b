"""What holds for every built-in fusion, and for all of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import opfuser
from opfuser import AddExtraInput, BasicLinear, Bias, ConstantScale, MakeExtraOutput, Sequential
from opfuser.basic.activation import SiLU
from opfuser.basic.layer_norm import LayerNorm
from opfuser.basic.rms_norm import RMSNorm
from opfuser.fused import FUSIONS, _linear
from opfuser.fusion import Fusion
from opfuser.op import FusedOperation, FusibleOperation, GradNeeds, OperationContext
from opfuser.testing import check_fusion
from tests.fused.pairings import DTYPES, only, tensor
from tests.fused.sharded import sharded

EXAMPLES: dict[str, tuple[Callable[[], list[nn.Module]], int]] = {
    "forward_linear_scale_add": (
        lambda: [BasicLinear(6, 4), ConstantScale(0.3), AddExtraInput()],
        4,
    ),
    "forward_linear_bias_add": (lambda: [BasicLinear(6, 4), Bias(4), AddExtraInput()], 4),
    "forward_linear_bias_activation": (lambda: [BasicLinear(6, 4), Bias(4)], 0),
    "forward_add_rms_norm": (lambda: [AddExtraInput(), MakeExtraOutput(), RMSNorm(6)], 6),
    "forward_add_layer_norm": (lambda: [AddExtraInput(), MakeExtraOutput(), LayerNorm(6)], 6),
    "backward_add_rms_norm": (lambda: [MakeExtraOutput(), RMSNorm(6)], 0),
    "backward_add_layer_norm": (lambda: [MakeExtraOutput(), LayerNorm(6)], 0),
    "backward_linear_add": (lambda: [MakeExtraOutput(), BasicLinear(6, 4)], 0),
    "backward_linear_scale": (lambda: [BasicLinear(6, 4), ConstantScale(0.3)], 0),
    "backward_activation_bias": (lambda: [Bias(6), SiLU()], 0),
}
"""For each fusion what it covers, for inputs of width 6, and the width of the extra input."""


forward_fusions = pytest.mark.parametrize(
    "fusion", [f for f in FUSIONS if f.stage == "forward"], ids=lambda fusion: fusion.name
)


def filled(ops: list[nn.Module]) -> list[nn.Module]:
    with torch.no_grad():
        for op in ops:
            for p in op.parameters():
                p.copy_(torch.randn(p.shape))
    return ops


def extras(name: str, *rows: int) -> list[Tensor]:
    width = EXAMPLES[name][1]
    return [torch.randn(*rows, width)] if width else []


def test_every_fusion_has_an_example_and_is_registered_in_order() -> None:
    assert [fusion.name for fusion in FUSIONS] == list(EXAMPLES)
    listed = [info for info in opfuser.fusions() if info.origin == "opfuser"]
    for stage in ("joint", "forward", "backward"):
        names = [fusion.name for fusion in FUSIONS if fusion.stage == stage]
        assert [info.name for info in listed if info.stage == stage] == names
    assert all(info.enabled for info in listed)


@pytest.mark.parametrize("fusion", FUSIONS, ids=lambda fusion: fusion.name)
def test_check_fusion(fusion: Fusion) -> None:
    ops = filled(EXAMPLES[fusion.name][0]())
    rows = (3, 5)
    check_fusion(
        fusion.name,
        ops,
        torch.randn(*rows, 6),
        *extras(fusion.name, *rows),
        dtypes=DTYPES,
        zero_rows=True,
    )


@pytest.mark.parametrize("fusion", FUSIONS, ids=lambda fusion: fusion.name)
def test_a_fused_operation_covers_its_parts_in_order_and_owns_nothing(fusion: Fusion) -> None:
    ops = EXAMPLES[fusion.name][0]()
    fused = fusion.build(*ops)
    assert isinstance(fused, FusedOperation)
    assert list(fused.basic_ops) == ops
    assert fused._parameters == {}
    assert list(fused._modules) == ["basic_ops"]


def call(
    op: FusibleOperation,
    ops: Sequence[nn.Module],
    more: Sequence[Tensor],
    *,
    x: Tensor | None = None,
    requires_grad: bool = True,
) -> tuple[Tensor, list[OperationContext]]:
    """The output of ``op`` and the contexts of ``ops``, which it covers, after its forward."""
    ctxs = []
    for part in ops:
        ctx = OperationContext()
        ctx.requires_grad = requires_grad
        ctx.needs = GradNeeds(True, tuple(True for _ in part.parameters()), ())
        ctxs.append(ctx)
    with torch.no_grad():
        y, _ = op.fuser_forward(
            ctxs,
            torch.ones(3, 6) if x is None else x,
            basic_op_extra_inputs=[more if isinstance(o, AddExtraInput) else [] for o in ops],
            prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None,
            basic_op_kwargs=[{} for _ in ops],
        )
    return y, ctxs


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


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone, in which collectives change nothing."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("how", ["column", "column, sequence-parallel"])
@pytest.mark.parametrize(
    "name",
    ["forward_linear_scale_add", "forward_linear_bias_add", "forward_linear_bias_activation"],
)
def test_forward_of_a_column_parallel_linear(name: str, how: str) -> None:
    results = []
    for fused in (True, False):
        torch.manual_seed(1)
        ops = filled(EXAMPLES[name][0]())
        sharded(ops[0], how)
        x = torch.randn(3, 6, requires_grad=True)
        with only(forward=fused):
            seq = Sequential(*ops)
            assert name in seq.plan(x, *extras(name, 3)).fused("forward") or not fused
            y = seq(x, *extras(name, 3))
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *seq.parameters()])])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name.startswith("forward_linear")])
def test_sequence_parallel_input_is_gathered_and_saved_local(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fusion = next(fusion for fusion in FUSIONS if fusion.name == name)
    ops = filled(EXAMPLES[name][0]())
    x, more = torch.randn(3, 6), extras(name, 6)
    whole, _ = call(fusion.build(*ops), ops, more, x=torch.cat([x, x]))
    sharded(ops[0], "column, sequence-parallel")
    monkeypatch.setattr(_linear, "gather_first_dim", lambda x, group: torch.cat([x, x]))
    y, ctxs = call(fusion.build(*ops), ops, more, x=x)
    torch.testing.assert_close(y, whole)
    assert ctxs[0].to_save is not None
    assert torch.equal(ctxs[0].to_save[0], x)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["backward_linear_add", "backward_linear_scale"])
def test_backward_of_a_row_parallel_linear(name: str) -> None:
    results = []
    for fused in (True, False):
        torch.manual_seed(1)
        ops = filled(EXAMPLES[name][0]())
        sharded(next(op for op in ops if isinstance(op, BasicLinear)), "row")
        x = torch.randn(3, 6, requires_grad=True)
        with only(backward=fused):
            seq = Sequential(*ops)
            assert seq.plan(x).fused("backward") == ({name: 1} if fused else {})
            out = seq(x)
            loss = sum(o.square().sum() for o in (out if isinstance(out, tuple) else [out]))
            results.append(torch.autograd.grad(loss, [x, *seq.parameters()]))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)
