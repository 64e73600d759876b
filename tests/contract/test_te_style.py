"""Operations and fusions written for te.ops run with only the import changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as te_ops
from opfuser import BasicOperation, FusedOperation
from tests.contract import te_style
from tests.contract.te_style import GatedTap, LearnableScale, Windowed
from tests.contract.tensors import F64, against, fill, rand


@pytest.fixture(autouse=True)
def _only_these_fusions() -> Iterator[None]:
    """No fusion of the library may come first, and the other pass must be unfused."""
    te_style.ForwardLinearBiasSiLU.enabled = True
    for cls in Windowed.__subclasses__():
        cls.calls, cls.flatten = 0, True
    with te_ops.disable(*(info.name for info in te_ops.fusions())):
        yield


# ------------------------------------------------------------------------------ operations


def test_an_operation_with_a_parameter() -> None:
    model = fill(te_ops.Sequential(te_ops.Linear(8, 8, **F64), LearnableScale(8, **F64)))

    def formula(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return F.linear(x, p["0.weight"], p["0.bias"]) * p["1.scale"]

    against(model, formula, rand(2, 3, 8, grad=True))
    model[1].requires_grad_(False)
    against(model, formula, rand(3, 8, grad=True))
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.scale"]


def test_preparation_before_forward() -> None:
    op = LearnableScale(8, **F64)
    model, x = te_ops.Sequential(op, te_ops.GELU()), rand(3, 8)
    model(x)
    with torch.no_grad():
        model(x)
    op.requires_grad_(False)
    model(x)
    model(x.clone().requires_grad_())
    assert op.first_calls == 1
    assert op.calls == [True, False, False, True]


@pytest.mark.parametrize(("power", "used"), [(1, 2), (3, 2), (3, 1)])
def test_an_operation_with_extra_tensors(power: int, used: int) -> None:
    tap = GatedTap()
    model = te_ops.Sequential(te_ops.ConstantScale(0.5), tap, te_ops.SiLU())
    against(
        lambda x, gate: model(x, gate, op_kwargs={tap: {"power": power}}),
        lambda p, x, gate: (F.silu(0.5 * x * gate**power), 0.5 * x + gate),
        rand(3, 8, grad=True),
        rand(3, 8, grad=True),
        parameters=(),
        used=used,
    )


# ------------------------------------------------------------------------------ fusions


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (16,), w, 1e-5)


class Case(NamedTuple):
    """A fusion, its stage, operations for an input of 16 columns, the formula, what it covers."""

    fusion: type[Windowed]
    stage: str
    ops: Callable[..., list[nn.Module]]
    formula: Callable[..., Any]
    indices: list[int]


CASES = {
    "norm, linear": Case(
        te_style.ForwardRMSNormLinear,
        "forward",
        lambda **kw: [te_ops.RMSNorm(16, **kw), te_ops.Linear(16, 8, bias=False, **kw)],
        lambda p, x: F.linear(rms_norm(x, p["0.weight"]), p["1.weight"]),
        [0, 1],
    ),
    "linear, bias, silu": Case(
        te_style.ForwardLinearBiasSiLU,
        "forward",
        lambda **kw: [te_ops.Linear(16, 8, **kw), te_ops.SiLU()],
        lambda p, x: F.silu(F.linear(x, p["0.weight"], p["0.bias"])),
        [0, 1, 2],
    ),
    "tap, linear": Case(
        te_style.ForwardMakeLinear,
        "forward",
        lambda **kw: [
            te_ops.SiLU(), te_ops.MakeExtraOutput(), te_ops.Linear(16, 8, bias=False, **kw)
        ],
        lambda p, x: (F.linear(F.silu(x), p["2.weight"]), F.silu(x)),
        [1, 2],
    ),
    "linear, scale": Case(
        te_style.BackwardLinearScale,
        "backward",
        lambda **kw: [te_ops.Linear(16, 8, bias=False, **kw), te_ops.ConstantScale(0.3)],
        lambda p, x: 0.3 * F.linear(x, p["0.weight"]),
        [0, 1],
    ),
    "tap, norm": Case(
        te_style.BackwardAddRMSNorm,
        "backward",
        lambda **kw: [te_ops.MakeExtraOutput(), te_ops.RMSNorm(16, **kw)],
        lambda p, x: (rms_norm(x, p["1.weight"]), x * 1),
        [0, 1],
    ),
    "layer norm": Case(
        te_style.BackwardLayerNorm,
        "backward",
        lambda **kw: [te_ops.LayerNorm(16, **kw), te_ops.SiLU()],
        lambda p, x: F.silu(F.layer_norm(x, (16,), p["0.weight"], p["0.bias"], 1e-5)),
        [0],
    ),
    "scale, relu": Case(
        te_style.JointScaleReLU,
        "joint",
        lambda **kw: [
            te_ops.Linear(16, 8, bias=False, **kw), te_ops.ConstantScale(-0.3), te_ops.ReLU()
        ],
        lambda p, x: F.relu(-0.3 * F.linear(x, p["0.weight"])),
        [1, 2],
    ),
}  # fmt: skip
REGISTER = {
    "forward": te_ops.register_forward_fusion,
    "backward": te_ops.register_backward_fusion,
    "joint": te_ops.register_forward_backward_fusion,
}


def build(name: str, dtype: torch.dtype = torch.float32) -> te_ops.Sequential:
    return fill(te_ops.Sequential(*CASES[name].ops(dtype=dtype, device="cpu")))


def steps(model: te_ops.Sequential, kind: type) -> tuple[list[Any], list[Any]]:
    """What operations of a kind cover in each pass, read where code for te.ops reads it."""
    fuser = model._module_groups[0]
    forward, backward = (
        [indices for op, indices in made if isinstance(op, kind)]
        for made in (fuser._forward_ops, fuser._backward_ops)
    )
    return forward, backward


@pytest.mark.parametrize(
    ("dtype", "rows", "flatten", "used"),
    [
        (torch.float32, (5,), True, None),
        (torch.bfloat16, (2, 3), True, 1),
        (torch.float32, (2, 3), False, None),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_fusions(
    name: str, dtype: torch.dtype, rows: tuple[int, ...], flatten: bool, used: int | None
) -> None:
    case, model = CASES[name], build(name, dtype)
    case.fusion.flatten = flatten
    with REGISTER[case.stage](case.fusion.fuse_ops, prepend=flatten):
        x = rand(*rows, 16, dtype=dtype, grad=True)
        against(model, case.formula, x, used=used)
        assert steps(model, FusedOperation) == (
            [case.indices] * (case.stage != "backward"),
            [case.indices] * (case.stage != "forward"),
        )
    assert case.fusion.calls == 1


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("name", ["linear, bias, silu", "linear, scale"])
def test_the_plan_decides_which_gradients_are_made(name: str, needs: tuple[bool, bool]) -> None:
    """The one claims ``input_requires_grad`` whatever is needed, the other one reads it."""
    case, model = CASES[name], build(name)
    model.requires_grad_(needs[1])
    with REGISTER[case.stage](case.fusion.fuse_ops):
        x = rand(5, 16, dtype=torch.float32, grad=needs[0])
        (y,) = against(model, case.formula, x)
    assert y.requires_grad == any(needs)
    assert case.fusion.calls == (any(needs) or case.stage == "forward")


@pytest.mark.parametrize("name", ["norm, linear", "tap, norm"])
def test_a_step_may_span_the_first_operation_that_needs_a_gradient(name: str) -> None:
    case, model = CASES[name], build(name)
    if name == "norm, linear":
        model[0].requires_grad_(False)
    with REGISTER[case.stage](case.fusion.fuse_ops):
        against(model, case.formula, rand(5, 16, dtype=torch.float32), used=1)
    assert case.fusion.calls == 1


def test_a_one_shot_fusion_stays_in_the_plan_that_it_was_made_for() -> None:
    name = "linear, bias, silu"
    case, model, other = CASES[name], build(name), build(name)
    x = rand(5, 16, dtype=torch.float32, grad=True)
    with te_ops.register_forward_fusion(te_style.ForwardLinearBiasSiLU.fuse_once):
        for _ in range(3):
            against(model, case.formula, x)
        # The flag is still down, as no further plan was asked for: nothing is fused.
        against(other, case.formula, x)
    assert case.fusion.calls == 3
    assert steps(other, FusedOperation) == ([], [])


def test_a_backward_fusion_reads_what_a_forward_fusion_filled() -> None:
    """Both written for te.ops."""
    model = fill(te_ops.Sequential(te_ops.MakeExtraOutput(), *CASES["norm, linear"].ops()))
    fills, reads = te_style.ForwardRMSNormLinear, te_style.BackwardAddRMSNorm
    with (
        te_ops.register_forward_fusion(fills.fuse_ops),
        te_ops.register_backward_fusion(reads.fuse_ops),
    ):
        against(
            model,
            lambda p, x: (F.linear(rms_norm(x, p["1.weight"]), p["2.weight"]), x * 1),
            rand(5, 16, dtype=torch.float32, grad=True),
        )
    assert (fills.calls, reads.calls) == (1, 1)


def test_a_joint_fusion_comes_before_the_others() -> None:
    case, model = CASES["scale, relu"], build("scale, relu")
    other = te_style.BackwardLinearScale
    with (
        te_ops.register_backward_fusion(other.fuse_ops, prepend=True),
        te_ops.register_forward_backward_fusion(case.fusion.fuse_ops),
    ):
        against(model, case.formula, rand(5, 16, dtype=torch.float32, grad=True))
    assert (case.fusion.calls, other.calls) == (1, 0)
    fuser = model._module_groups[0]
    assert fuser._forward_ops[1][0] is fuser._backward_ops[1][0]


@pytest.mark.parametrize(
    ("name", "backward"),
    [
        ("norm, linear", "BackwardAddRMSNorm"),
        ("linear, bias, silu", "BackwardActivationBias"),
        ("tap, linear", "BackwardLinearAdd"),
    ],
)
@pytest.mark.parametrize("flatten", [True, False])
def test_backward_fusions_read_what_these_filled(name: str, backward: str, flatten: bool) -> None:
    """Those of the library."""
    case, ops = CASES[name], CASES[name].ops(dtype=torch.float32)
    case.fusion.flatten = flatten
    formula = case.formula
    if name == "norm, linear":
        ops.insert(0, te_ops.MakeExtraOutput())
        formula = lambda p, x: (  # noqa: E731
            F.linear(rms_norm(x, p["1.weight"]), p["2.weight"]), x * 1,
        )  # fmt: skip
    model = fill(te_ops.Sequential(*ops))
    names = [info.name for info in te_ops.fusions() if info.stage == "backward"]
    with te_ops.register_forward_fusion(case.fusion.fuse_ops), te_ops.enable(*names):
        against(model, formula, rand(2, 3, 16, dtype=torch.float32, grad=True))
        fuser = model._module_groups[0]
        assert case.fusion in [type(op) for op, _ in fuser._forward_ops]
        assert backward in [type(op).__name__ for op, _ in fuser._backward_ops]


# ---------------------------------------------------------------- placed by the user, or broken


class OwnKernels(FusedOperation):
    """Linear and scale with kernels of its own in both passes, which count their calls."""

    def __init__(self, linear: te_ops.BasicLinear, scale: te_ops.ConstantScale) -> None:
        super().__init__([linear, scale])
        self.forwards = self.backwards = 0

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        self.forwards += 1
        linear, scale = self.basic_ops
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(input_, linear.weight)
        return F.linear(input_, scale.scale * linear.weight), [(), ()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        self.backwards += 1
        x, w = basic_op_ctxs[0].saved_tensors
        dy = grad_output * self.basic_ops[1].scale
        return dy @ w, [(dy.t() @ x,), ()], [(), ()]


class ForwardOnly(OwnKernels):
    fuser_backward = FusedOperation.fuser_backward


class BackwardOnly(OwnKernels):
    fuser_forward = FusedOperation.fuser_forward


class Neither(ForwardOnly):
    fuser_forward = FusedOperation.fuser_forward


@pytest.mark.parametrize(
    ("cls", "counts", "alone"),
    [
        (OwnKernels, (1, 1), False),
        (OwnKernels, (1, 1), True),
        (ForwardOnly, (1, 0), False),
        (BackwardOnly, (0, 1), True),
        (Neither, (0, 0), False),
    ],
)
def test_hazard_17_a_fused_operation_placed_by_the_user_runs_its_own_kernels(
    cls: type[OwnKernels], counts: tuple[int, int], alone: bool
) -> None:
    """What is missing is the parts' work."""
    fused = fill(cls(te_ops.BasicLinear(8, 4, **F64), te_ops.ConstantScale(0.5)))
    model = fused if alone else te_ops.Sequential(te_ops.GELU(), fused, te_ops.Identity())
    prefix = "" if alone else "1."

    def formula(p: dict[str, Tensor], x: Tensor) -> Tensor:
        x = x if alone else F.gelu(x, approximate="tanh")
        return 0.5 * F.linear(x, p[f"{prefix}basic_ops.0.weight"])

    against(model, formula, rand(3, 8, grad=True))
    assert (fused.forwards, fused.backwards) == counts


def test_methods_that_are_missing() -> None:
    compound = Neither(te_ops.BasicLinear(8, 4), te_ops.ConstantScale(0.5))
    x, base = rand(2), te_ops.FusibleOperation
    with pytest.raises(NotImplementedError, match=r"must implement fuser_forward \(Neither\)"):
        base.fuser_forward(
            compound, [], x, basic_op_extra_inputs=[], prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None, basic_op_kwargs=[],
        )  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"must implement fuser_backward \(Neither\)"):
        base.fuser_backward(compound, [], x, basic_op_grad_extra_outputs=[])
    with pytest.raises(NotImplementedError) as error:
        type("Lazy", (BasicOperation,), {"num_extra_inputs": 2})()(x, x, x)
    assert "must implement fuser_forward and fuser_backward itself (Lazy)" in str(error.value)
    assert "Received: 2 extra inputs, 0 extra outputs" in str(error.value)
    half = type("Half", (BasicOperation,), {})
    with pytest.raises(NotImplementedError, match=r"must implement op_forward \(Half\)"):
        half()(x)
    half.op_forward = lambda self, ctx, input_, **unused: input_ * 1  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match=r"must implement op_backward \(Half\)"):
        half()(x.requires_grad_()).sum().backward()


def test_fused_operations_of_nothing_or_of_modules() -> None:
    with pytest.raises(ValueError, match=r"at least one basic operation \(BackwardLinearScale\)"):
        te_style.BackwardLinearScale([])
    with pytest.raises(TypeError, match=r"consists of operations\. Received: Tanh"):
        te_style.BackwardLinearScale([nn.Tanh()])
