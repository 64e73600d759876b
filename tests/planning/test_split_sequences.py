"""Plans of sequences that plain modules or hooks split: from declarations, with nothing run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import opfuser as of
from opfuser.testing import assert_fused, assert_not_fused
from tests.planning.toys import FusedForward, NothingComputed


def hooked() -> of.Sequential:
    linear = of.Linear(4, 4)
    linear.register_forward_hook(lambda *unused: pytest.fail("a hook ran"))
    return of.Sequential(of.RMSNorm(4), linear, of.Linear(4, 8), of.SwiGLU(), linear)


def spectral() -> of.Sequential:
    seq = of.Sequential(of.Linear(4, 4), nn.Tanh(), of.Linear(4, 4))
    parametrizations.spectral_norm(seq[0])  # iterates whenever it is evaluated in training
    return seq


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


SPLIT: dict[str, Callable[[], of.Sequential]] = {
    "an operation twice": lambda: of.Sequential(linear := of.Linear(4, 4), nn.Tanh(), linear),
    "everything twice": lambda: of.Sequential(of.Linear(4, 4), nn.Dropout(0.5)) * 2,
    "residuals": lambda: of.Sequential(
        of.Residual(of.RMSNorm(4), nn.BatchNorm1d(4), of.Linear(4, 4))
    ) * 2,
    "hooked": hooked,
    "spectral": spectral,
    "counting": lambda: of.Sequential(of.Linear(4, 4), Counts(), of.GELU()),
}  # fmt: skip


def everything(seq: nn.Module) -> list[Any]:
    """All that running a network may change."""
    tensors = [*seq.named_parameters(remove_duplicate=False), *seq.named_buffers()]
    calls = [m.calls for m in seq.modules() if isinstance(m, Counts)]
    return [[(name, id(t), t._version, type(t)) for name, t in tensors], calls]


@pytest.mark.parametrize("made", SPLIT)
def test_planning_runs_and_changes_nothing(made: str) -> None:
    seq, x = SPLIT[made](), torch.randn(2, 4, requires_grad=True)
    before, values = everything(seq), copy.deepcopy(seq.state_dict())
    state = torch.get_rng_state()
    with NothingComputed() if made != "spectral" else nullcontext():
        seq.plan(x)
    assert_fused(seq, x, forward={"forward_add_layer_norm": 0})
    assert everything(seq) == before
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(seq.state_dict(), values, rtol=0, atol=0)
    assert seq.last_plan is None
    for module in seq.modules():
        module._forward_hooks.clear()
    seq(x).sum().backward()
    assert all(p.grad is not None for p in seq.parameters())


def mixture() -> of.Sequential:
    """A bit of everything that changes a dtype or needs a gradient."""
    norm = of.RMSNorm(8)
    norm.register_forward_hook(lambda *unused: None)
    pair = of.Sequential(of.Bias(8), of.GELU())
    pair[0].register_forward_hook(lambda *unused: None)
    plain = nn.Sequential(nn.Tanh(), nn.Linear(16, 16))
    inner = of.Sequential(of.Linear(8, 8), nn.Dropout(0.0), of.GELU())
    inner.register_forward_hook(lambda *unused: None)
    return of.Sequential(
        of.Embedding(5, 8),
        nn.Identity(),
        of.Residual(norm, of.Linear(8, 16), plain, of.SwiGLU()),
        nn.LayerNorm(8),
        pair,
        nn.Linear(8, 8),
        of.Linear(8, 8, dtype=torch.bfloat16).requires_grad_(False),
        nn.ReLU(),
        of.Softplus(),
        inner,
        of.RMSNorm(8),
    )


@pytest.mark.parametrize(
    ("trained", "grad", "autocast"),
    [("all", True, False), ("last", True, True), ("none", True, False), ("all", False, True)],
)
def test_a_plan_is_that_of_the_call(trained: str, grad: bool, autocast: bool) -> None:
    seq = mixture().requires_grad_(trained == "all")
    seq[-1].requires_grad_(trained != "none")
    x = torch.tensor([[0, 3], [4, 1]])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.set_grad_enabled(grad):
        if not autocast:
            seq[9][0].to(torch.bfloat16)
        planned = seq.plan(x)
        seq(x)
        assert planned == seq.last_plan
    assert planned.assumed == ()


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def test_what_is_taken_for_granted_of_a_module_is_said() -> None:
    seq, x = of.Sequential(of.GELU(), Product(), of.GELU()), torch.randn(2, 4)
    assert seq.plan(x).assumed == ("Product returns torch.float32",)
    assert "\nassumed: Product returns torch.float32\n" in str(seq.plan(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert seq.plan(x).assumed == ("Product returns torch.bfloat16",)
    assert seq.plan(x).needs[1] is not None  # its parameter requires grad
    seq(x)
    assert seq.last_plan is not None
    assert seq.last_plan.assumed == ()


def test_an_operation_declares_the_dtype_of_its_output() -> None:
    seen: list[torch.dtype] = []

    def refuses(*ops: Any, env: of.Env) -> of.Refusal:
        seen.append(env.dtype)
        return of.Refusal("DTYPE", "only looks")

    class ToDouble(of.BasicOperation):
        def output_dtype(self, dtypes: Any) -> torch.dtype:
            return torch.float64

        def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
            return input_.double()

        def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor, tuple[()]]:
            return grad_output.float(), ()

    fusion = of.Fusion("doubles", "forward", (of.GELU, of.Identity), FusedForward, refuses)
    seq, x = of.Sequential(ToDouble(), nn.Tanh(), of.GELU(), of.Identity()), torch.randn(2)
    with of.register_forward_fusion(fusion):
        planned = seq.plan(x)
        seq(x)
    assert planned == seq.last_plan
    assert seen == [torch.float64]


def test_the_record_says_that_a_module_stands_between() -> None:
    """Hazard 18."""
    pair = of.Fusion("pair", "forward", (of.Identity, of.Identity), FusedForward)
    seq, x = of.Sequential(of.Identity(), nn.Tanh(), of.Identity()), torch.randn(2, 3)
    with of.register_forward_fusion(pair):
        plan = seq.plan(x)
        assert_not_fused(seq, "pair", x, code="GROUP_SPLIT")
    ((at, why),) = plan.record("pair").refusals
    assert (at, str(why)) == (0, "GROUP_SPLIT: Tanh stands between")
    assert [type(s.op).__name__ for s in plan.forward if not s.indices] == ["Tanh"]
    assert "Tanh (plain module)" in str(plan)


def test_planning_starts_no_operation() -> None:
    class Starts(of.Identity):
        started = 0

        def pre_first_fuser_forward(self) -> None:
            Starts.started += 1

    seq, x = of.Sequential(Starts(), of.GELU()), torch.randn(2)
    seq.plan(x)
    assert Starts.started == 0
    seq(x)
    seq.plan(x)
    seq(x)
    assert Starts.started == 1


def test_plans_are_made_for_tensors() -> None:
    with pytest.raises(TypeError) as error:
        of.Sequential(nn.Identity(), of.GELU()).plan([torch.ones(2)])
    assert str(error.value) == "A plan is made for tensors. Received: list."


def test_a_cleared_weight_can_be_planned_for() -> None:
    linear = of.BasicLinear(4, 4)
    linear.weight = None
    x = torch.randn(2, 4)
    assert len(of.Sequential(linear, of.GELU()).plan(x).forward) == 2
    assert len(of.Sequential(linear, nn.Tanh(), of.GELU()).plan(x).forward) == 3
