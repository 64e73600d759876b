"""What becomes a chain, and chains in plain torch; their kernels are tested in kernels/numerics."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence

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
    Dropout,
    Linear,
    MakeExtraOutput,
    ReLU,
    Sequential,
    SiLU,
    Softplus,
    SwiGLU,
    Tanh,
)
from opfuser.engine.plan import Plan
from opfuser.errors import InputError, NotSupportedError
from opfuser.fused.pointwise_chain import FUSION, PointwiseChain
from opfuser.kernels import launch
from tests.fused.chains import Cube, plan_on
from tests.fused.pairings import tensor, with_subclass

pytest.importorskip("triton", reason="Triton exists for Linux only")
pytestmark = pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter's kernels run anywhere")
NAME = FUSION.name


def runs(*ops: nn.Module, grad: bool = True) -> list[tuple[int, ...]]:
    """The runs of operations that become chains."""
    with torch.set_grad_enabled(grad):
        plan = plan_on("meta", *ops)
    found = [step.indices for step in plan.forward if step.fusion == NAME]
    if grad:
        assert found == [step.indices for step in plan.backward if step.fusion == NAME]
    return found


def refusal(plan: Plan) -> tuple[str, str]:
    assert plan.fused("forward").get(NAME) is None
    return plan.record(NAME).refusals[0][1]


@pytest.mark.parametrize(
    "ops",
    [
        [Bias(6), GELU()],
        [SiLU(), Bias(6)],
        [Dropout(0.1), AddExtraInput()],
        [ConstantScale(2.0), Cube()],
        [Bias(6), Bias(6)],
        [AddExtraInput(), ReLU(), AddExtraInput(), Softplus(), Dropout(0.2), Tanh()],
    ],
    ids=lambda ops: "+".join(type(op).__name__ for op in ops),
)
def test_matches(ops: list[nn.Module]) -> None:
    whole = tuple(range(len(ops)))
    assert runs(*ops) == [whole]
    assert runs(*ops, grad=False) == [whole]
    moved = tuple(i + 1 for i in whole)
    assert runs(BasicLinear(6, 6), *ops, MakeExtraOutput()) == [moved]


def test_runs_end_at_other_operations() -> None:
    ops = [Bias(12), SwiGLU(), Bias(6), SiLU(), MakeExtraOutput(), Dropout(0.1), Cube()]
    assert runs(BasicLinear(6, 12), *ops) == [(3, 4), (6, 7)]


def test_a_users_operation_between_linear_and_dropout() -> None:
    assert runs(Linear(6, 6), Cube(), Dropout(0.1), Linear(6, 6)) == [(1, 2, 3)]


@pytest.mark.parametrize("at", range(6))
def test_a_subclass_is_not_taken_for_its_parent(at: int) -> None:
    ops = [Bias(6), SiLU(), ConstantScale(2.0), Dropout(0.1), AddExtraInput(), GELU()]
    expected = {0: [(1, 2, 3, 4, 5)], 1: [(2, 3, 4, 5)], 2: [(0, 1), (3, 4, 5)]}
    expected |= {3: [(0, 1, 2), (4, 5)], 4: [(0, 1, 2, 3)], 5: [(0, 1, 2, 3, 4)]}
    assert runs(*with_subclass(ops, at)) == expected[at]


class OwnForward(Cube):
    def op_forward(self, ctx, input_, **kwargs):
        return super().op_forward(ctx, input_, **kwargs)


class OwnBackward(Cube):
    def op_backward(self, ctx, grad_output):
        return super().op_backward(ctx, grad_output)


class OwnFuserForward(Cube):
    def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
        return super().fuser_forward(basic_op_ctxs, input_, **kwargs)


class OwnFuserBackward(Cube):
    def fuser_backward(self, basic_op_ctxs, grad_output, **kwargs):
        return super().fuser_backward(basic_op_ctxs, grad_output, **kwargs)


class WithoutDeviceFunction(Cube):
    device_function = None


class WithParameter(Cube):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    "kind",
    [
        OwnForward,
        OwnBackward,
        OwnFuserForward,
        OwnFuserBackward,
        WithoutDeviceFunction,
        WithParameter,
    ],
)
def test_a_users_operation_that_a_kernel_would_get_wrong(kind: type[Cube]) -> None:
    assert runs(kind(), SiLU(), Bias(6)) == [(1, 2)]


def test_a_users_operation_may_be_derived_further() -> None:
    class Deeper(Cube):
        def value(self, x: Tensor) -> Tensor:
            return x * x * x

    assert runs(Deeper(), SiLU()) == [(0, 1)]


def test_left_to_the_gemm_before_them() -> None:
    for before in (Bias(6), ConstantScale(2.0)):
        plan = plan_on("meta", BasicLinear(6, 6), before, AddExtraInput())
        assert refusal(plan).code == "CONFLICT"
        assert len(plan.forward) == 1
    assert runs(BasicLinear(6, 6), Bias(6), ConstantScale(2.0), AddExtraInput()) == [(1, 2, 3)]


def test_refused_where_too_little_is_computed() -> None:
    for idle in (Dropout(0.0), Dropout(0.3).eval()):
        assert refusal(plan_on("meta", Bias(6), idle)).code == "LAYOUT"
        assert runs(Bias(6), idle, SiLU()) == [(0, 1, 2)]


def test_refused_without_kernels() -> None:
    assert refusal(plan_on("cpu", Bias(6), SiLU())) == (
        "DEVICE",
        "there is no kernel for cpu; the steps would be the same",
    )
    plan = plan_on("meta", Bias(6), SiLU(), dtype=torch.float64)
    assert refusal(plan) == ("DTYPE", "there is no kernel for fp64; the steps would be the same")


def test_skipped_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    record = plan_on("meta", Bias(6), SiLU()).record(NAME)
    assert (record.status, record.detail) == ("skipped", "needs the package triton")


def test_as_many_tensors_as_kernels_take() -> None:
    plan = plan_on("meta", *[Bias(6) for _ in range(8)])
    assert refusal_of_first(plan) == "kernels take 7 tensors besides x and y, not more"
    assert runs(*[Bias(6) for _ in range(7)]) == [tuple(range(7))]
    assert runs(SiLU(), *[AddExtraInput() for _ in range(4)]) == [(2, 3, 4)]


def refusal_of_first(plan: Plan) -> str:
    return plan.record(NAME).refusals[0][1].detail


def test_refused_where_only_its_end_needs_a_gradient() -> None:
    plan = plan_on("meta", SiLU(), Bias(6), grad=False)
    assert refusal(plan).code == "NO_GRAD"


def test_switched_off() -> None:
    with opfuser.disable(NAME):
        assert runs(Bias(6), SiLU()) == []


# Chains placed by hand, which run in plain torch on a CPU.


def filled(ops: Sequence[nn.Module]) -> list[nn.Module]:
    for op in ops:
        for parameter in op.parameters():
            nn.init.normal_(parameter)
    return list(ops)


CHAINS: dict[str, list[nn.Module]] = {
    "everything": [Bias(6), SiLU(), ConstantScale(0.5), Cube(), AddExtraInput(), Bias(6)],
    "sums first": [AddExtraInput(), ReLU(), AddExtraInput(), Tanh()],
    "nothing nonlinear": [ConstantScale(2.0), AddExtraInput(), Bias(6), Dropout(0.0)],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lies", ["contiguous", "strided", "transposed", "expanded"])
@pytest.mark.parametrize("name", CHAINS)
def test_in_plain_torch(name: str, lies: str, dtype: torch.dtype) -> None:
    ops = copy.deepcopy(filled(CHAINS[name]))
    apart, fused = Sequential(*ops).to(dtype), Sequential(PointwiseChain(copy.deepcopy(ops)))
    fused.to(dtype)
    shape = (4, 6)
    tensors = [tensor(shape, dtype, lies) for _ in range(1 + apart.num_extra_inputs)]
    dy = tensor(shape, dtype, lies)
    results = []
    for seq in (fused, apart):
        leaves = [t.detach().requires_grad_() for t in tensors]
        y = seq(*leaves)
        results.append((y, *torch.autograd.grad(y, [*leaves, *seq.parameters()], dy)))
    assert results[0][0].is_contiguous()
    tolerance = 40 * torch.finfo(dtype).eps
    for ours, theirs in zip(*results):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_autocast_in_plain_torch() -> None:
    ops = filled(CHAINS["everything"])
    x, z = torch.randn(2, 4, 6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, want = Sequential(PointwiseChain(ops))(x, z), Sequential(*ops)(x, z)
    assert y.dtype == want.dtype
    torch.testing.assert_close(y, want, rtol=0.02, atol=0.02)
    got = torch.autograd.grad(y.sum(), [x, z])
    for ours, theirs in zip(got, torch.autograd.grad(want.sum(), [x, z])):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


def test_dropout_in_plain_torch() -> None:
    seq = Sequential(PointwiseChain([Dropout(0.25), ConstantScale(3.0)]))
    x = torch.ones(50, 41, requires_grad=True)
    y = seq(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(y, dx)
    torch.testing.assert_close(y, 4.0 * (y != 0))
    assert 0.7 < (y != 0).double().mean().item() < 0.8
    assert torch.equal(seq.eval()(x), torch.full_like(x, 3.0))


def test_covers_its_parts_and_can_be_copied() -> None:
    ops = filled(CHAINS["everything"])
    fused = PointwiseChain(ops)
    assert list(fused.basic_ops) == ops
    x, z = torch.randn(2, 4, 6)
    want = fused(x, z)
    for twin in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert torch.equal(twin(x, z), want)
        twin.basic_ops[2].scale = 0.0
        assert not torch.equal(twin(x, z), want)
    assert torch.equal(fused(x, z), want)


def test_refuses_what_is_no_element_wise_operation() -> None:
    with pytest.raises(
        NotSupportedError, match=r"^SwiGLU is not an element-wise operation with a kernel "
    ):
        PointwiseChain([Bias(6), SwiGLU()])
    with pytest.raises(NotSupportedError, match=r"^kernels take 7 tensors besides x and y"):
        PointwiseChain([Bias(6) for _ in range(8)])


def test_inputs_of_another_shape_or_dtype() -> None:
    seq = Sequential(PointwiseChain([Bias(6), SiLU(), AddExtraInput()]))
    with pytest.raises(InputError, match="must be the size of the bias"):
        seq(torch.ones(2, 5), torch.ones(2, 5))
    with pytest.raises(InputError, match="must be the size of the bias"):
        seq(torch.ones(()), torch.ones(()))
    with pytest.raises(InputError, match="Input and extra input must have the same shape"):
        seq(torch.ones(2, 6), torch.ones(6))
    with pytest.raises(InputError, match=r"must be fp16, bf16, fp32 or fp64 \(Bias\)"):
        seq(torch.ones(2, 6, dtype=torch.int64), torch.ones(2, 6))


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_whole() -> None:
    torch.compiler.reset()  # its limit of recompilations counts those of all tests
    ops = filled([Bias(6), SiLU(), Dropout(0.3), AddExtraInput()])
    seq = Sequential(PointwiseChain(ops))
    compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
    x, z = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
    results = []
    for run in (compiled, seq):
        torch.manual_seed(1)
        y = run(x, z)
        results.append((y, *torch.autograd.grad(y.sum(), [x, z, *seq.parameters()])))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)
