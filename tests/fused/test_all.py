"""What holds for every built-in fusion, and for all of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import (
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    CrossEntropy,
    Dropout,
    Identity,
    MakeExtraOutput,
    QKNorm,
    RotaryEmbedding,
    Sequential,
    SwiGLU,
)
from opfuser.basic.activation import GELU, SiLU
from opfuser.basic.layer_norm import LayerNorm
from opfuser.basic.rms_norm import RMSNorm
from opfuser.fused import FUSIONS
from opfuser.fusion import Fusion
from opfuser.kernels.launch import INTERPRETED
from opfuser.op import BasicOperation, FusedOperation
from opfuser.testing import assert_not_fused, check_fusion
from tests.fused.examples import (
    EXAMPLES,
    OF_CHAINS,
    ONLY_ON,
    asking,
    built,
    call,
    extras,
    filled,
)
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
    assert [info.name for info in listed if not info.enabled] == ["recompute_mlp"]


def runs_on(fusion: Fusion, device: torch.device) -> bool:
    kind = "cuda" if INTERPRETED and fusion.name in OF_CHAINS else device.type
    return ONLY_ON.get(fusion.name, kind) == kind


@pytest.mark.parametrize("fusion", FUSIONS, ids=lambda fusion: fusion.name)
def test_check_fusion(fusion: Fusion, device: torch.device) -> None:
    ops = [op.to(device) for op in filled(EXAMPLES[fusion.name][0]())]
    tensors = [t.to(device) for t in (torch.randn(3, 5, 6), *extras(fusion.name, 3, 5))]
    if runs_on(fusion, device):
        # There are no kernels for float64, and so no chain of them.
        dtypes = DTYPES[fusion.name in OF_CHAINS :]
        check_fusion(fusion.name, ops, *tensors, dtypes=dtypes, zero_rows=True)
    else:
        with opfuser.disable("*"), opfuser.enable(fusion.name):
            assert_not_fused(Sequential(*ops), fusion.name, *tensors, code="DEVICE")


@pytest.mark.parametrize("fusion", FUSIONS, ids=lambda fusion: fusion.name)
def test_a_fused_operation_covers_its_parts_in_order_and_owns_nothing(fusion: Fusion) -> None:
    ops = EXAMPLES[fusion.name][0]()
    fused = built(fusion, ops)
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
    more = extras(fusion.name, 1, 3)
    _, ctxs = call(built(fusion, ops), ops, more, requires_grad=requires_grad)
    for op, ctx in zip(ops, ctxs):
        assert isinstance(op, BasicOperation)
        assert (ctx.to_save is not None) == (requires_grad and op.Saved is not None)


@forward_fusions
def test_a_forward_saves_in_the_dtype_of_autocast(fusion: Fusion) -> None:
    ops = filled(EXAMPLES[fusion.name][0]())
    with torch.autocast("cpu", torch.bfloat16):
        _, ctxs = call(built(fusion, ops), ops, extras(fusion.name, 1, 3))
        for op, ctx in zip(ops, ctxs):
            assert isinstance(op, BasicOperation)
            if op.Saved is not None:
                _, (alone,) = call(op, [op], [])
                assert ctx.to_save is not None
                assert alone.to_save is not None
                saved = [None if t is None else t.dtype for t in ctx.to_save]
                assert saved == [None if t is None else t.dtype for t in alone.to_save]


PRECEDENCE: dict[str, tuple[str, list[nn.Module], Counter[str]]] = {
    "the head goes with the loss, not the norm": (
        "cpu",
        [RMSNorm(6), BasicLinear(6, 6), CrossEntropy()],
        Counter(["linear_cross_entropy"]),
    ),
    "a block that asks is computed again": (
        "cpu",
        [RMSNorm(6), BasicLinear(6, 6), asking(SiLU()), BasicLinear(6, 6)],
        Counter(["recompute_mlp_where_asked"]),
    ),
    "another one saves the activation's input": (
        "cpu",
        [RMSNorm(6), BasicLinear(6, 6), SiLU(), BasicLinear(6, 6)],
        Counter(["norm_linear", "activation_linear"]),
    ),
    "an activation goes with the linear operation, not the bias and dropout": (
        "meta",
        [Dropout(0.1), Bias(6), SiLU(), BasicLinear(6, 6)],
        Counter(["activation_linear"]),
    ),
    "dropout and sum go into the norm": (
        "meta",
        [Dropout(0.1), AddExtraInput(), MakeExtraOutput(), RMSNorm(6), SwiGLU()],
        Counter(["pointwise_norm"]),
    ),
    "dropout and sum go into the norm, and both with the linear operation": (
        "meta",
        [BasicLinear(6, 6), Bias(6), Dropout(0.1), AddExtraInput(), RMSNorm(6), BasicLinear(6, 6)],
        Counter(["norm_linear"]),
    ),
    "the bias after that linear operation may begin another run": (
        "meta",
        [SiLU(), RMSNorm(6), BasicLinear(6, 6), Bias(6), SiLU(), Dropout(0.1)],
        Counter(["norm_linear", "pointwise_chain"]),
    ),
    "a run that no norm follows is a chain": (
        "meta",
        [Bias(6), Dropout(0.1), AddExtraInput(), MakeExtraOutput(), Bias(6), SiLU()],
        Counter({"pointwise_chain": 2}),
    ),
    "on a CPU only the norm goes with the linear operation": (
        "cpu",
        [Dropout(0.1), AddExtraInput(), RMSNorm(6), BasicLinear(6, 6)],
        Counter(["norm_linear"]),
    ),
    "on a GPU a sum goes into the norm, not the GEMM": (
        "meta",
        [SiLU(), BasicLinear(6, 6), AddExtraInput(), RMSNorm(6), BasicLinear(6, 6)],
        Counter(["activation_linear", "norm_linear"]),
    ),
    "on a CPU a sum goes into the GEMM, not the norm": (
        "cpu",
        [SiLU(), BasicLinear(6, 6), AddExtraInput(), RMSNorm(6), BasicLinear(6, 6)],
        Counter(["activation_linear_add", "norm_linear"]),
    ),
    "a sum goes into the GEMM on a CPU": (
        "cpu",
        [BasicLinear(6, 6), Bias(6), AddExtraInput(), MakeExtraOutput(), RMSNorm(6)],
        Counter(["forward_linear_bias_add", "backward_add_rms_norm"]),
    ),
    "a sum goes into the norm elsewhere": (
        "meta",
        [BasicLinear(6, 6), Bias(6), AddExtraInput(), MakeExtraOutput(), RMSNorm(6)],
        Counter(["pointwise_norm"]),
    ),
    "also without a bias": (
        "meta",
        [BasicLinear(6, 6), AddExtraInput(), MakeExtraOutput(), RMSNorm(6)],
        Counter(["forward_add_rms_norm", "backward_add_rms_norm"]),
    ),
    "a bias goes into the GEMM, not the norm": (
        "meta",
        [BasicLinear(6, 6), Bias(6), RMSNorm(6)],
        Counter(["forward_linear_bias_activation"]),
    ),
    "factor and sum go into the GEMM": (
        "cpu",
        [BasicLinear(6, 6), ConstantScale(2.0), AddExtraInput(), LayerNorm(6)],
        Counter(["forward_linear_scale_add", "backward_linear_scale"]),
    ),
    "the residual gradient goes into the GEMM, not the factor": (
        "cpu",
        [MakeExtraOutput(), BasicLinear(6, 6), ConstantScale(2.0)],
        Counter(["backward_linear_add"]),
    ),
    "a bias serves both passes": (
        "cpu",
        [BasicLinear(6, 6), Bias(6), SiLU()],
        Counter(["forward_linear_bias_activation", "backward_activation_bias"]),
    ),
}
"""Device, operations, and how often fusions match in either pass."""


@pytest.mark.parametrize("case", PRECEDENCE)
def test_precedence(case: str) -> None:
    device, ops, expected = PRECEDENCE[case]
    seq = Sequential(*ops).to(device)
    x = torch.randn(3, 6, device=device, requires_grad=True)
    more = [x] * sum(isinstance(op, AddExtraInput) for op in ops)
    if isinstance(ops[-1], CrossEntropy):
        more.append(torch.zeros(3, dtype=torch.long))
    plan = seq.plan(x, *more)
    assert plan.fused("forward") | plan.fused("backward") == expected


def everything() -> Sequential:
    return Sequential(
        QKNorm(1, 2),
        RotaryEmbedding(1, 2),
        MakeExtraOutput(),
        BasicLinear(6, 4),
        ConstantScale(0.5),
        AddExtraInput(),
        BasicLinear(4, 5),
        Bias(5),
        SiLU(),
        BasicLinear(5, 4),
        Bias(4),
        AddExtraInput(),
        BasicLinear(4, 4),
        ConstantScale(2.0),
        Identity(),
        AddExtraInput(),
        MakeExtraOutput(),
        LayerNorm(4),
        BasicLinear(4, 4),
        GELU(),
        BasicLinear(4, 4),
        ConstantScale(3.0),
        Identity(),
        AddExtraInput(),
        MakeExtraOutput(),
        RMSNorm(4),
        BasicLinear(4, 6),
        Bias(6),
        asking(SwiGLU()),
        BasicLinear(3, 4),
        Bias(4),
        BasicLinear(4, 5),
        CrossEntropy(reduction="sum"),
    )


WIDTHS = [4, 4, 4, 4]


def inputs(rows: int) -> list[Tensor]:
    """Input, terms of the sums, and class indices."""
    torch.manual_seed(1)
    tensors = [tensor((2, rows, n), torch.float64).requires_grad_() for n in [6, *WIDTHS]]
    return [*tensors, torch.randint(5, (2, rows))]


def gradients(
    model: Callable[..., tuple[Tensor, ...]], seq: Sequential, rows: int
) -> tuple[list[Tensor], list[Tensor]]:
    *tensors, targets = inputs(rows)
    outs = model(*tensors, targets)
    douts = [torch.randn_like(o) for o in outs]
    grads = torch.autograd.grad(outs, [*tensors, *seq.parameters()], douts)
    return [o.detach() for o in outs], list(grads)


SWITCHED: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "as they are": nullcontext,
    "blocks computed again": lambda: opfuser.enable("recompute_mlp"),
    "none of both passes": only,
}


def test_all_fusions_in_one_sequence() -> None:
    seq = everything().double()
    filled(list(seq))
    found: set[str] = set()
    for switch in SWITCHED.values():
        with switch():
            plan = seq.plan(*inputs(3))
            found |= {*plan.fused("forward"), *plan.fused("backward")}
        for rows in (0, 1, 3):
            with switch():
                got = gradients(seq, seq, rows)
            with only(forward=False, backward=False):
                want = gradients(seq, seq, rows)
            for a, b in zip((*got[0], *got[1]), (*want[0], *want[1])):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert found == {f.name for f in FUSIONS} - OF_CHAINS


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("switch", SWITCHED)
def test_all_fusions_compile_into_one_graph(switch: str) -> None:
    torch.compiler.reset()  # its limit of recompilations counts those of all tests
    seq = everything().double()
    filled(list(seq))
    with SWITCHED[switch]():
        compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
        # The tracer of torch 2.11 fails where the rows before a fused loss vary (docs/limits.md).
        for rows in (3, 5) if torch.__version__ >= (2, 12) else (3,):
            got, want = gradients(compiled, seq, rows), gradients(seq, seq, rows)
            for a, b in zip((*got[0], *got[1]), (*want[0], *want[1])):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
