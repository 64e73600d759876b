"""What goes into a norm's kernel, and the same in plain torch; for kernels see kernels/numerics."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from opfuser import (
    GELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    Dropout,
    LayerNorm,
    MakeExtraOutput,
    RMSNorm,
    Sequential,
    SiLU,
    SwiGLU,
)
from opfuser.engine.plan import Plan
from opfuser.errors import InputError, NotSupportedError
from opfuser.fused import NormLinear, PointwiseNorm
from opfuser.fused.pointwise_norm import FUSION
from opfuser.kernels import launch
from tests.fused.chains import LAID_OUT, check_by_hand, plan_on
from tests.fused.examples import (
    F64,
    Cube,
    assert_same,
    elements,
    filled,
    leaf,
    only,
    results,
    saved_by,
)

pytest.importorskip("triton", reason="Triton exists for Linux only")
pytestmark = pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter's kernels run anywhere")
NAME = FUSION.name
NORMS: dict[str, Any] = {"rms": RMSNorm, "layer": LayerNorm}
each_norm = pytest.mark.parametrize("kind", NORMS)
TO_GEMM = "CONFLICT: left to the linear operation that may stand before it"


def steps(*ops: nn.Module, grad: bool = True) -> list[tuple[str, tuple[int, ...]]]:
    """The fused operations of both passes, and what they cover."""
    with torch.set_grad_enabled(grad):
        plan = plan_on("meta", *ops)
    joint = [(type(step.op).__name__, step.indices) for step in plan.forward if step.fusion]
    if grad:
        assert [step.indices for step in plan.backward if step.fusion] == [at for _, at in joint]
    return joint


def refusals(plan: Plan) -> list[tuple[int, str]]:
    assert plan.fused("forward").get(NAME) is None
    return [(at, str(why)) for at, why in plan.record(NAME).refusals]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "ops",
    [
        [Bias(6), Dropout(0.1), AddExtraInput(), MakeExtraOutput(), LayerNorm(6)],
        [Dropout(0.1), AddExtraInput(), RMSNorm(6)],
        [Bias(6), AddExtraInput(), MakeExtraOutput(), RMSNorm(6)],
        [AddExtraInput(), Dropout(0.1), RMSNorm(6)],
        [Dropout(0.1).eval(), AddExtraInput(), RMSNorm(6)],
        [Dropout(0.1), LayerNorm(6)],
        [SiLU(), MakeExtraOutput(), RMSNorm(6)],
        [Cube(), RMSNorm(6)],
        [ConstantScale(2.0), Bias(6), GELU(), Cube(), AddExtraInput(), Dropout(0.2), RMSNorm(6)],
    ],
    ids=lambda ops: "+".join(type(op).__name__ for op in ops),
)
def test_matches(ops: list[nn.Module], grad: bool) -> None:
    whole = tuple(range(len(ops)))
    assert steps(*ops, grad=grad) == [("PointwiseNorm", whole)]
    moved = tuple(i + 1 for i in whole)
    assert steps(BasicLinear(6, 6), *ops, SwiGLU(), grad=grad) == [("PointwiseNorm", moved)]


@pytest.mark.parametrize("tap", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_linear_operation_behind_the_norm_joins(bias: bool, tap: bool) -> None:
    run = [Bias(6), Dropout(0.1), AddExtraInput(), *[MakeExtraOutput()] * tap, LayerNorm(6)]
    ops = [*run, BasicLinear(6, 12), *[Bias(12)] * bias]
    assert steps(*ops, SwiGLU()) == [("NormLinear", tuple(range(len(ops))))]
    # Without a gradient there is nothing to save.
    joint = steps(*ops, SwiGLU(), grad=False)
    assert joint[0] == ("PointwiseNorm", tuple(range(len(run))))


def test_a_tap_before_the_run_stays_out() -> None:
    ops = [MakeExtraOutput(), SiLU(), RMSNorm(6), BasicLinear(6, 6)]
    assert steps(*ops) == [("NormLinear", (1, 2, 3))]
    record = plan_on("meta", *ops).record("norm_linear")
    assert [(at, str(why)) for at, why in record.refusals] == [
        (0, "LAYOUT: the run before the norm is not the first of the operations")
    ]


def test_a_tap_inside_the_run_ends_it() -> None:
    ops = [Dropout(0.1), SiLU(), MakeExtraOutput(), Bias(6), SiLU(), RMSNorm(6)]
    assert steps(*ops) == [("PointwiseChain", (0, 1)), ("PointwiseNorm", (3, 4, 5))]
    plan = plan_on("meta", Dropout(0.1), MakeExtraOutput(), SwiGLU(), RMSNorm(3))
    assert str(plan.record(NAME).near_miss) == (
        "closest: 2 of 3 at op 0; LAYOUT: RMSNorm|LayerNorm is expected where SwiGLU stands"
    )


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        ([Bias(6)], TO_GEMM),
        ([ConstantScale(2.0)], TO_GEMM),
        ([ConstantScale(2.0), AddExtraInput()], TO_GEMM),
        ([Dropout(0.0), Bias(6)], TO_GEMM),
        ([AddExtraInput()], "CONFLICT: left to the fusions of a sum and a norm"),
        ([Dropout(0.0)], "LAYOUT: none of the operations before the norm changes anything"),
        ([Bias(6)] * 8, "LAYOUT: kernels take 7 tensors besides x and y, not more"),
    ],
    ids=lambda ops: "+".join(type(op).__name__ for op in ops) if isinstance(ops, list) else "",
)
def test_refused_runs(ops: list[nn.Module], expected: str) -> None:
    plan = plan_on("meta", BasicLinear(6, 6), *ops, MakeExtraOutput(), LayerNorm(6))
    assert str(plan.record(NAME).refusals[0][1]) == expected


def test_what_is_left_of_a_run_that_is_too_long() -> None:
    ops = [SiLU(), *[Bias(6) for _ in range(8)], RMSNorm(6)]
    norm = "PointwiseNorm", tuple(range(2, 10))
    assert steps(*ops) == [("PointwiseChain", (0, 1)), norm]


def test_a_norm_over_several_dimensions() -> None:
    ops = [Bias(6), Dropout(0.1), AddExtraInput(), RMSNorm((3, 6))]
    plan = plan_on("meta", *ops)
    why = "LAYOUT: the norm is over several dimensions, the kernel over one"
    assert refusals(plan) == [(at, why) for at in range(3)]
    assert plan.fused("forward") == {"pointwise_chain": 1}


def test_refused_without_kernels() -> None:
    run = [Bias(6), SiLU(), RMSNorm(6)]
    cpu = "DEVICE: there is no kernel for cpu; the steps would be the same"
    assert refusals(plan_on("cpu", *run)) == [(0, cpu), (1, cpu)]
    fp64 = "DTYPE: there is no kernel for fp64; the steps would be the same"
    assert refusals(plan_on("meta", *run, dtype=torch.float64)) == [(0, fp64), (1, fp64)]


def test_skipped_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    record = plan_on("meta", SiLU(), RMSNorm(6)).record(NAME)
    assert (record.status, record.detail) == ("skipped", "needs the package triton")


def test_refused_where_only_its_end_needs_a_gradient() -> None:
    plan = plan_on("meta", SiLU(), RMSNorm(6), grad=False)
    assert [why for _, why in refusals(plan)] == [
        "NO_GRAD: the first operation that needs a gradient lies inside it"
    ]


# Placed by hand, where it runs in plain torch on a CPU.

RUNS: dict[str, list[nn.Module]] = {
    "everything": [Bias(6), SiLU(), ConstantScale(0.5), Cube(), AddExtraInput(), Bias(6)],
    "sums first": [AddExtraInput(), SiLU(), AddExtraInput(), Cube()],
    "a sum": [AddExtraInput()],
    "nothing": [Dropout(0.0)],
}


def by_hand(
    name: str, kind: str, form: str = "tl", shape: int | tuple[int, ...] = 6
) -> tuple[Sequential, list[nn.Module]]:
    """Fused, and the operations; t: with a tap, l: with a linear operation."""
    run = filled(copy.deepcopy(RUNS[name]))
    tap = MakeExtraOutput() if "t" in form else None
    norm, linear, bias = filled([NORMS[kind](shape), BasicLinear(6, 4), Bias(4)])
    fused: Any = PointwiseNorm(before=run, norm=norm, make_extra=tap)
    ops = [*run, *([] if tap is None else [tap]), norm]
    if "l" in form:
        fused = NormLinear(norm=fused, linear=linear, bias=bias)
        ops += [linear, bias]
    assert list(fused.basic_ops) == ops
    return Sequential(fused), ops


def inputs_of(seq: Sequential) -> list[torch.Tensor]:
    return [leaf(2, 3, 6) for _ in range(1 + seq.num_extra_inputs)]


@pytest.mark.parametrize(
    ("name", "kind", "form"),
    [
        (name, kind, ("", "t", "l", "tl")[(n + 2 * m) % 4])
        for n, name in enumerate(RUNS)
        for m, kind in enumerate(NORMS)
    ],
)
def test_in_plain_torch(name: str, kind: str, form: str) -> None:
    for shape in (6, (3, 6)):
        fused, ops = by_hand(name, kind, form, shape)
        check_by_hand(fused, ops, F64, "contiguous")


@pytest.mark.parametrize(("lies", "dtype"), LAID_OUT[1:])
@each_norm
def test_layouts_and_dtypes_in_plain_torch(lies: str, dtype: torch.dtype, kind: str) -> None:
    check_by_hand(*by_hand("sums first", kind), dtype, lies)


def test_autocast_in_plain_torch() -> None:
    fused, ops = by_hand("sums first", "rms", "t")
    tensors = inputs_of(fused)
    with torch.autocast("cpu", torch.bfloat16):
        got = fused(*tensors)
        with only():
            want = Sequential(*ops)(*tensors)
    for ours, theirs in zip(got, want):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
    grads = [torch.autograd.grad([t.sum() for t in y], tensors) for y in (got, want)]
    for ours, theirs in zip(*grads):
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.1)


def test_dropout_in_plain_torch() -> None:
    seq = Sequential(
        PointwiseNorm(before=[Dropout(0.25)], norm=RMSNorm(41), make_extra=MakeExtraOutput())
    )
    x = torch.ones(50, 41, requires_grad=True)
    y, total = seq(x)
    (dx,) = torch.autograd.grad(total, x, torch.ones_like(y), retain_graph=True)
    assert torch.equal(total, dx)
    assert torch.equal(y != 0, dx != 0)
    torch.testing.assert_close(total, (total != 0) / 0.75)
    assert 0.7 < (y != 0).double().mean().item() < 0.8
    assert torch.equal(seq.eval()(x)[1], x)


@each_norm
@pytest.mark.parametrize(
    ("name", "form", "saved"),
    [
        ("a sum", "t", 1),
        ("a sum", "tl", 1),
        ("everything", "", 2),
        ("everything", "l", 2),
        ("sums first", "tl", 3),
    ],
)
def test_saves_the_sum_and_what_the_run_saves(name: str, form: str, saved: int, kind: str) -> None:
    """Besides, statistics of six rows, and the bias that the activation's input contains."""
    fused, _ = by_hand(name, kind, form)
    statistics = 6 if kind == "rms" else 12
    assert elements(saved_by(fused, *inputs_of(fused))) == 36 * saved + statistics
    with torch.no_grad():
        assert saved_by(fused, *inputs_of(fused)) == []


@pytest.mark.parametrize("frozen", ["run", "norm", "linear", "all"])
@pytest.mark.parametrize("input_grad", [True, False])
def test_gradients_that_nobody_needs(input_grad: bool, frozen: str) -> None:
    fused, ops = by_hand("everything", "layer")
    fused.double()
    x, z = (leaf(2, 3, 6, dtype=F64).requires_grad_(False) for _ in range(2))
    x.requires_grad_(input_grad)
    parameters = list(Sequential(*ops).parameters())
    parts = {"run": slice(0, 2), "norm": slice(2, 4), "linear": slice(4, 6), "all": slice(0, 5)}
    for parameter in parameters[parts[frozen]]:
        parameter.requires_grad_(False)
    got = results(fused, parameters, x, z)
    with only():
        assert_same(got, results(Sequential(*ops), parameters, x, z))


def test_placed_by_hand_it_runs_on_its_own() -> None:
    fused, _ = by_hand("a sum", "rms", "")
    seq = Sequential(fused[0], BasicLinear(6, 4)).to("meta")
    x = torch.empty(3, 6, device="meta", requires_grad=True)
    plan = seq.plan(x, x)
    assert plan.forward[0].op is fused[0]
    assert [(at, str(why)) for at, why in plan.record("norm_linear").refusals] == [
        (0, "LAYOUT: PointwiseNorm was placed by hand, and runs on its own")
    ]


def test_refuses_what_is_no_element_wise_operation() -> None:
    odd = r" is not an element-wise operation with a kernel \(PointwiseNorm\)"
    with pytest.raises(NotSupportedError, match="^SwiGLU" + odd):
        PointwiseNorm(before=[Bias(6), SwiGLU()], norm=RMSNorm(3))
    with pytest.raises(NotSupportedError, match="^MakeExtraOutput" + odd):
        PointwiseNorm(before=[MakeExtraOutput(), Dropout(0.1)], norm=RMSNorm(6))
    with pytest.raises(NotSupportedError, match=r"^kernels take 7 tensors besides x and y"):
        PointwiseNorm(before=[Bias(6) for _ in range(8)], norm=RMSNorm(6))


@pytest.mark.parametrize("before", [{"add": AddExtraInput()}, {"make_extra": MakeExtraOutput()}])
def test_a_linear_operation_takes_nothing_before_the_run(before: dict[str, Any]) -> None:
    norm = PointwiseNorm(before=[Dropout(0.1)], norm=RMSNorm(6))
    text = r"^the run before the norm is not the first of the operations \(NormLinear\)"
    with pytest.raises(NotSupportedError, match=text):
        NormLinear(norm=norm, linear=BasicLinear(6, 4), **before)


def test_refuses_inputs() -> None:
    norm = Sequential(PointwiseNorm(before=[SiLU()], norm=RMSNorm(6)))
    for x, text in (
        (torch.ones(2, 5), r"last dimensions of the input must be normalized_shape \(RMSNorm"),
        (torch.ones(2, 6, dtype=torch.int64), r"must be fp16, bf16, fp32 or fp64 \(SiLU\)"),
    ):
        with pytest.raises(InputError, match=text):
            norm(x)
