"""What holds for every built-in fusion, and for all of them together."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import (
    GELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    CrossEntropy,
    Dropout,
    Identity,
    LayerNorm,
    MakeExtraOutput,
    QKNorm,
    RMSNorm,
    RotaryEmbedding,
    Sequential,
    SiLU,
    SwiGLU,
)
from opfuser.core.fusion import Fusion, Optional
from opfuser.fused import FUSIONS
from opfuser.fused.parts.pipeline import Pipeline
from opfuser.kernels.launch import INTERPRETED
from opfuser.op import BasicOperation, FusedOperation
from opfuser.testing import assert_not_fused, check_fusion
from tests.fused.examples import (
    BF16,
    DTYPES,
    EXAMPLES,
    F32,
    F64,
    FP16,
    OF_CHAINS,
    UNQUANTIZED,
    asking,
    assert_same,
    built,
    call,
    error_text,
    extras,
    filled,
    leaf,
    only,
    results,
    with_subclass,
)

each_fusion = pytest.mark.parametrize("fusion", UNQUANTIZED, ids=lambda fusion: fusion.name)
forward_fusions = pytest.mark.parametrize(
    "fusion", [f for f in UNQUANTIZED if f.stage == "forward"], ids=lambda fusion: fusion.name
)


def test_every_fusion_has_an_example_and_is_registered_in_order() -> None:
    assert [fusion.name for fusion in UNQUANTIZED] == list(EXAMPLES)
    listed = [info for info in opfuser.fusions() if info.origin == "opfuser"]
    for stage in ("joint", "forward", "backward"):
        names = [fusion.name for fusion in FUSIONS if fusion.stage == stage]
        assert [info.name for info in listed if info.stage == stage] == names
    assert [info.name for info in listed if not info.enabled] == ["recompute_mlp"]


@each_fusion
def test_check_fusion(fusion: Fusion, device: torch.device) -> None:
    ops = [op.to(device) for op in filled(EXAMPLES[fusion.name][0]())]
    tensors = [t.to(device) for t in (torch.randn(3, 5, 6), *extras(fusion.name, 3, 5))]
    chain = fusion.name in OF_CHAINS
    if chain and device.type == "cpu" and not INTERPRETED:
        with only(fusion.name):
            assert_not_fused(Sequential(*ops), fusion.name, *tensors, code="DEVICE")
    else:
        # There are no kernels for float64, and so no chain of them.
        check_fusion(fusion.name, ops, *tensors, dtypes=DTYPES[chain:])


class Call(NamedTuple):
    """What :func:`check_fusion` makes no variant of: rows, dtypes, and whether it is autocast."""

    rows: tuple[int, ...] = (7,)
    input: torch.dtype = F32
    extra: torch.dtype = F32
    parameters: torch.dtype = F32
    autocast: bool = False


CALLS = {
    "vector": Call((), FP16, FP16, FP16),
    "many rows": Call((131,), BF16, BF16, BF16),
    "four dimensions": Call((2, 3, 2), BF16, BF16, BF16),
    "wide input": Call(input=F64),
    "narrow input": Call(input=BF16),
    "wide extra input": Call(extra=F64),
    "narrow extra input": Call(extra=BF16),
    "all but the extra input in bf16": Call(input=BF16, parameters=BF16),
    "autocast": Call(autocast=True),
    "bf16 input under autocast": Call(input=BF16, autocast=True),
    "narrow extra input under autocast": Call(extra=BF16, autocast=True),
}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        (name, call)
        for name in EXAMPLES
        for call in CALLS
        if name not in OF_CHAINS
        and ("extra" not in call or EXAMPLES[name][1])
        and ("four" not in call or "qk_norm" not in name)
        # Of one row, logits are smaller than the weight's gradient, which is saved in their place.
        and (name, call) != ("linear_cross_entropy", "vector")
    ],
)
def test_check_fusion_of_other_calls(name: str, call: str) -> None:
    """The rows of queries and keys are tokens of a batch."""
    rows, dtype, extra, parameters, autocast = CALLS[call]
    if "qk_norm" in name:
        rows = (2, *(rows or (1,)))[-2:]
    ops = [op.to(parameters) for op in filled(EXAMPLES[name][0]())]
    more = [t.to(extra) if t.is_floating_point() else t for t in extras(name, *rows)]
    with torch.autocast("cpu", BF16, enabled=autocast):
        check_fusion(name, ops, torch.randn(*rows, 6).to(dtype), *more)


@pytest.mark.parametrize("name", ["activation_linear_add", "activation_linear", "norm_linear"])
def test_check_fusion_of_small_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pipeline, "small", 1 << 16)
    ops = filled(EXAMPLES[name][0]())
    check_fusion(name, ops, torch.randn(3, 5, 6), *extras(name, 3, 5), dtypes=DTYPES)


@each_fusion
def test_a_subclass_is_not_matched(fusion: Fusion) -> None:
    """The record names it where all before it fits, unless something else may stand there."""
    name, device = fusion.name, "meta" if fusion.name in OF_CHAINS else "cpu"
    count = len(EXAMPLES[name][0]())
    for at in range(count):
        ops = [op.to(device) for op in with_subclass(EXAMPLES[name][0](), at)]
        tensors = [leaf(3, 5, 6), *extras(name, 3, 5)]
        with only(name):
            record = Sequential(*ops).plan(*(t.to(device) for t in tensors)).record(name)
        assert all(at not in match for match in record.matches)
        if name in OF_CHAINS or record.matches:
            continue
        miss = record.near_miss
        code = None if miss is None else miss.stopped_by.code
        optional = isinstance(fusion.pattern[at], Optional)
        assert code == (None if at == 0 else "LAYOUT" if optional else "SUBCLASS")


def by_hand(name: str, *, bare: bool = False) -> tuple[Sequential, Sequential, list[Tensor]]:
    """The fused operation alone, those that it covers, and inputs, in float64."""
    fusion = next(fusion for fusion in UNQUANTIZED if fusion.name == name)
    ops = filled(EXAMPLES[name][0]())
    for op in ops:
        if isinstance(op, Dropout):
            op.dropout_probability = 0.0
    fused = built(fusion, ops, bare=bare)
    assert isinstance(fused, FusedOperation)
    left = list(fused.basic_ops)
    assert left == (ops if not bare else [op for op in ops if op in left])
    assert fused._parameters == {}
    assert list(fused._modules) == ["basic_ops"]
    takes = any(op.num_extra_inputs for op in left)  # type: ignore[attr-defined]
    more = [t.double() if t.is_floating_point() else t for t in extras(name, 2, 3)] * takes
    inputs = [leaf(2, 3, 6, dtype=F64), *more]
    return Sequential(fused).double(), Sequential(*left), inputs


@pytest.mark.parametrize(
    ("wrt", "bare"),
    [
        ("all", False),
        ("all", True),
        ("input", True),
        ("parameters", False),
        ("first parameter", False),
        ("last parameter", True),
    ],
)
@each_fusion
def test_placed_by_hand(fusion: Fusion, wrt: str, bare: bool) -> None:
    fused, apart, inputs = by_hand(fusion.name, bare=bare)
    parameters = list(apart.parameters())
    inputs[0].requires_grad_(wrt in ("all", "input"))
    for p in parameters:
        p.requires_grad_(wrt in ("all", "parameters"))
    if wrt.endswith("t parameter"):
        parameters[0 if wrt == "first parameter" else -1].requires_grad_()
    with only():
        want = results(apart, parameters, *inputs)
    assert_same(results(fused, parameters, *inputs), want)


@each_fusion
def test_gradients_are_the_callers(fusion: Fusion) -> None:
    """No parameter's lies in the memory of another one, and none where one came from."""
    fused, _, inputs = by_hand(fusion.name)
    y = fused(*inputs)
    outputs = y if isinstance(y, tuple) else (y,)
    # One number for all elements, as a sum sends.
    douts = [leaf(dtype=F64).detach().expand(y.shape) for y in outputs]
    before = [dy.clone() for dy in douts]
    parameters = list(fused.parameters())
    wrt = [*(t for t in inputs if t.requires_grad), *parameters]
    grads = torch.autograd.grad(outputs, wrt, douts, retain_graph=True)
    twins = torch.autograd.grad(outputs, wrt, before)
    assert_same(grads, twins)
    places = [t.untyped_storage().data_ptr() for t in (*grads, *douts)]
    for p, grad in zip(wrt, grads):
        if any(p is parameter for parameter in parameters):
            assert places.count(grad.untyped_storage().data_ptr()) == 1
    assert all(map(torch.equal, douts, before))


@each_fusion
def test_gradients_that_accumulate_leave_what_arrived_alone(fusion: Fusion) -> None:
    fused, _, inputs = by_hand(fusion.name)
    douts: list[Tensor] = []
    for _ in range(2):
        y = fused(*inputs)
        outputs = y if isinstance(y, tuple) else (y,)
        douts = douts or [torch.randn_like(y) for y in outputs]
        kept = [dy.clone() for dy in douts]
        torch.autograd.backward(outputs, douts)
    for t in (*inputs, *fused.parameters()):
        if t.grad is not None:
            t.grad.zero_()
    assert all(map(torch.equal, douts, kept))


WRONG: dict[str, Callable[[Tensor, list[Tensor]], list[Tensor]]] = {
    "width": lambda x, more: [x[..., :-1], *more],
    "number": lambda x, more: [x[0, 0, 0], *more],
    "integers": lambda x, more: [x.long(), *(z.long() for z in more)],
    "width of the extra input": lambda x, more: [x, *(z[..., :-1] for z in more)],
    "broadcast extra input": lambda x, more: [x, *(z[:1] for z in more)],
    "row as extra input": lambda x, more: [x, *(z[0] for z in more)],
}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        (name, wrong)
        for name in EXAMPLES
        for wrong in WRONG
        if "extra" not in wrong or extras(name, 1)
    ],
)
def test_errors_are_those_of_the_operations(name: str, wrong: str) -> None:
    fused, apart, (x, *more) = by_hand(name)
    inputs = WRONG[wrong](x, more)
    with only():
        assert error_text(fused, *inputs) == error_text(apart, *inputs)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))])
@each_fusion
def test_copies_have_parameters_of_their_own(
    fusion: Fusion, how: Callable[[Sequential], Sequential]
) -> None:
    fused, _, inputs = by_hand(fusion.name)
    want = results(fused, fused.parameters(), *inputs)
    twin = how(fused)
    assert_same(results(twin, twin.parameters(), *inputs), want)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert not torch.equal(results(twin, (), *inputs)[0], want[0])
    assert_same(results(fused, fused.parameters(), *inputs), want)


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


def lin() -> BasicLinear:
    return BasicLinear(6, 6)


def residual_norm() -> list[nn.Module]:
    return [AddExtraInput(), MakeExtraOutput(), RMSNorm(6)]


PRECEDENCE: dict[str, tuple[str, list[nn.Module], list[str]]] = {
    "the head goes with the loss, not the norm": (
        "cpu", [RMSNorm(6), lin(), CrossEntropy()], ["linear_cross_entropy"],
    ),
    "a block that asks is recomputed": (
        "cpu", [RMSNorm(6), lin(), asking(SiLU()), lin()], ["recompute_mlp_where_asked"],
    ),
    "another one saves the activation's input": (
        "cpu", [RMSNorm(6), lin(), SiLU(), lin()], ["norm_linear", "activation_linear"],
    ),
    "an activation goes with the linear operation, not the bias and dropout": (
        "meta", [Dropout(0.1), Bias(6), SiLU(), lin()], ["activation_linear"],
    ),
    "dropout and sum go into the norm": (
        "meta", [Dropout(0.1), *residual_norm(), SwiGLU()], ["pointwise_norm"],
    ),
    "dropout and sum go into the norm, and both with the linear operation": (
        "meta", [lin(), Bias(6), Dropout(0.1), *residual_norm(), lin()], ["norm_linear"],
    ),
    "the bias after that linear operation may begin another run": (
        "meta", [SiLU(), RMSNorm(6), lin(), Bias(6), SiLU(), Dropout(0.1)],
        ["norm_linear", "pointwise_chain"],
    ),
    "that with a norm too": (
        "meta", [SiLU(), RMSNorm(6), lin(), Bias(6), Dropout(0.1), *residual_norm()],
        ["norm_linear", "pointwise_norm"],
    ),
    "a run that no norm follows is a chain": (
        "meta", [Bias(6), Dropout(0.1), AddExtraInput(), MakeExtraOutput(), Bias(6), SiLU()],
        ["pointwise_chain", "pointwise_chain"],
    ),
    "on a CPU only the norm goes with the linear operation": (
        "cpu", [Dropout(0.1), AddExtraInput(), RMSNorm(6), lin()], ["norm_linear"],
    ),
    "on a GPU a sum goes into the norm, not the GEMM": (
        "meta", [SiLU(), lin(), AddExtraInput(), RMSNorm(6), lin()],
        ["activation_linear", "norm_linear"],
    ),
    "on a CPU a sum goes into the GEMM, not the norm": (
        "cpu", [SiLU(), lin(), AddExtraInput(), RMSNorm(6), lin()],
        ["activation_linear_add", "norm_linear"],
    ),
    "a sum goes into the GEMM on a CPU": (
        "cpu", [lin(), Bias(6), *residual_norm()],
        ["forward_linear_bias_add", "backward_add_rms_norm"],
    ),
    "a sum goes into the norm elsewhere": (
        "meta", [lin(), Bias(6), *residual_norm()], ["pointwise_norm"],
    ),
    "also without a bias": (
        "meta", [lin(), *residual_norm()], ["forward_add_rms_norm", "backward_add_rms_norm"],
    ),
    "a bias goes into the GEMM, not the norm": (
        "meta", [lin(), Bias(6), RMSNorm(6)], ["forward_linear_bias_activation"],
    ),
    "factor and sum go into the GEMM on a CPU": (
        "cpu", [lin(), ConstantScale(2.0), AddExtraInput(), LayerNorm(6)],
        ["forward_linear_scale_add", "backward_linear_scale"],
    ),
    "and elsewhere": (
        "meta", [lin(), ConstantScale(2.0), AddExtraInput(), LayerNorm(6)],
        ["forward_linear_scale_add", "backward_linear_scale"],
    ),
    "the residual gradient goes into the GEMM, not the factor": (
        "cpu", [MakeExtraOutput(), lin(), ConstantScale(2.0)], ["backward_linear_add"],
    ),
    "a bias serves both passes": (
        "cpu", [lin(), Bias(6), SiLU()],
        ["forward_linear_bias_activation", "backward_activation_bias"],
    ),
}  # fmt: skip
"""Device, operations, and the fusions that match, in either pass."""


@pytest.mark.parametrize("case", PRECEDENCE)
def test_precedence(case: str) -> None:
    device, ops, expected = PRECEDENCE[case]
    seq = Sequential(*ops).to(device)
    x = torch.randn(3, 6, device=device, requires_grad=True)
    more = [x] * sum(isinstance(op, AddExtraInput) for op in ops)
    if isinstance(ops[-1], CrossEntropy):
        more.append(torch.zeros(3, dtype=torch.long))
    plan = seq.plan(x, *more)
    assert plan.fused("forward") | plan.fused("backward") == Counter(expected)


def everything() -> Sequential:
    parts = [
        [QKNorm(1, 2), RotaryEmbedding(1, 2)],
        [MakeExtraOutput(), BasicLinear(6, 4), ConstantScale(0.5), AddExtraInput()],
        [BasicLinear(4, 5), Bias(5), SiLU(), BasicLinear(5, 4), Bias(4), AddExtraInput()],
        [BasicLinear(4, 4), ConstantScale(2.0), Identity()],
        [AddExtraInput(), MakeExtraOutput(), LayerNorm(4), BasicLinear(4, 4)],
        [GELU(), BasicLinear(4, 4), ConstantScale(3.0), Identity()],
        [AddExtraInput(), MakeExtraOutput(), RMSNorm(4), BasicLinear(4, 6), Bias(6)],
        [asking(SwiGLU()), BasicLinear(3, 4), Bias(4)],
        [BasicLinear(4, 5), CrossEntropy(reduction="sum")],
    ]
    return Sequential(*filled([op for part in parts for op in part])).double()


def inputs_of_everything(rows: int) -> list[Tensor]:
    """Input, terms of the sums, and class indices."""
    torch.manual_seed(1)
    return [*(leaf(2, rows, n, dtype=F64) for n in (6, 4, 4, 4, 4)), torch.randint(5, (2, rows))]


FORWARD, BACKWARD, JOINT = (
    [f.name for f in UNQUANTIZED if f.stage == stage] for stage in ("forward", "backward", "joint")
)
SWITCHED: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "as they are": nullcontext,
    "blocks recomputed": lambda: opfuser.enable("recompute_mlp"),
    "none of both passes": lambda: opfuser.disable(*JOINT),
}


def test_all_fusions_in_one_sequence() -> None:
    seq = everything()
    found: set[str] = set()
    switches = [*SWITCHED.values(), lambda: only(*FORWARD), lambda: only(*BACKWARD)]
    for switch in switches:
        with switch():
            plan = seq.plan(*inputs_of_everything(3))
            found |= {*plan.fused("forward"), *plan.fused("backward")}
        for rows in (0, 1, 3):
            inputs = inputs_of_everything(rows)
            with switch():
                got = results(seq, seq.parameters(), *inputs)
            with only():
                assert_same(got, results(seq, seq.parameters(), *inputs))
    assert found == {f.name for f in UNQUANTIZED} - OF_CHAINS


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("switch", SWITCHED)
def test_all_fusions_compile_into_one_graph(switch: str) -> None:
    torch.compiler.reset()  # its limit of recompilations counts those of all tests
    seq = everything()
    with SWITCHED[switch]():
        compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
        # The tracer of torch 2.11 fails where the rows before a fused loss vary (docs/limits.md).
        for rows in (3, 5) if torch.__version__ >= (2, 12) else (3,):
            inputs = inputs_of_everything(rows)
            want = results(seq, seq.parameters(), *inputs)
            assert_same(results(compiled, seq.parameters(), *inputs), want)
