"""check_fusion passes what is right, however it is named and called."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import AddExtraInput, BasicLinear, Bias, MakeExtraOutput
from opfuser.core.fusion import Refusal
from opfuser.errors import ArgumentError, UnknownFusionError
from opfuser.testing import check_fusion
from tests.checks.spoilt import LinearScaleGain, needed, operations, rule, spoilt, with_bias

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("stage", ["forward", "backward", "joint"])
@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4)])
def test_a_right_fusion_passes(device: torch.device, stage: Any, shape: tuple[int, ...]) -> None:
    ops = [op.to(device) for op in with_bias()]
    check_fusion(rule(stage), ops, torch.randn(shape, device=device), dtypes=DTYPES)
    assert [info for info in opfuser.fusions() if info.name == "mine"] == []


def test_all_pairings_are_tried() -> None:
    """Each pairing by the pair of operations that ran."""
    pairs: set[tuple[str, ...]] = set()

    def forward(self: Any, ctxs: Any, x: Tensor, **kwargs: Any) -> Any:
        ctxs[0].fused = True
        return LinearScaleGain.fuser_forward(self, ctxs, x, **kwargs)

    def backward(self: Any, ctxs: Any, dy: Tensor, **kwargs: Any) -> Any:
        pairs.add(("backward", "forward")[: 1 + hasattr(ctxs[0], "fused")])
        return LinearScaleGain.fuser_backward(self, ctxs, dy, **kwargs)

    other = rule("backward", spoilt(LinearScaleGain, fuser_backward=backward), "other")
    with opfuser.register_backward_fusion(other, prepend=True):
        mine = spoilt(LinearScaleGain, fuser_forward=forward)
        check_fusion(rule(build=mine), with_bias(), torch.randn(5, 4))
    assert pairs == {("backward",), ("backward", "forward")}


@pytest.mark.parametrize("how", ["name", "handle", "fusion", "function", "unregistered function"])
def test_ways_of_naming_a_fusion(how: str) -> None:
    def fuse(ops: Any, *, recipe: Any) -> Any:
        return rule()(ops)

    ops, x = with_bias(), torch.randn(5, 4)
    if how == "unregistered function":
        check_fusion(fuse, ops, x, stage="forward")
        return
    target = fuse if how == "function" else rule()
    with opfuser.register_forward_fusion(target, name="mine") as handle:
        check_fusion({"name": "mine", "handle": handle}.get(how, target), ops, x)
        assert handle.enabled


def test_a_removed_handle_is_registered_for_the_time_being() -> None:
    for function in (rule(), functools.partial(rule())):
        handle = opfuser.register_forward_fusion(function)
        handle.remove()
        check_fusion(handle, with_bias(), torch.randn(5, 4))
    assert "mine" not in [info.name for info in opfuser.fusions()]


def test_the_operations_given_are_left_alone() -> None:
    add = AddExtraInput()
    ops, x = [*with_bias(), add], torch.randn(5, 4, requires_grad=True)
    check_fusion(rule(), ops, x, torch.randn(5, 3), dtypes=(torch.float64,))
    assert all(p.dtype is torch.float32 and p.grad is None for op in ops for p in op.parameters())
    assert x.grad is None
    add.set_extra_input_channel(0, "still open")


def test_fusions_of_the_library_pass() -> None:
    """Compounds, nested Sequentials, channels and extra inputs on the way."""
    x = torch.randn(5, 4)
    residual = opfuser.Residual(opfuser.Linear(4, 4))
    check_fusion("forward_linear_bias_add", [residual], x, dtypes=DTYPES, zero_rows=True)
    check_fusion("backward_linear_add", [residual], x, dtypes=DTYPES)
    ops = [opfuser.Linear(4, 4), AddExtraInput(), MakeExtraOutput(), BasicLinear(4, 4)]
    check_fusion("forward_linear_bias_add", ops, x, torch.randn(5, 4), dtypes=DTYPES)
    with torch.autocast("cpu", torch.bfloat16):
        check_fusion("forward_linear_bias_add", [residual], x)


def test_a_fusion_that_only_matches_some_dtypes() -> None:
    def refuses(*ops: Any, env: Any) -> Refusal | None:
        return Refusal("DTYPE", "no float64") if env.dtype is torch.float64 else None

    check_fusion(rule(refuses=refuses), with_bias(), torch.randn(5, 4))
    with pytest.raises(AssertionError, match=r"(?s)must match.*DTYPE: no float64"):
        check_fusion(rule(refuses=refuses), with_bias(), torch.randn(5, 4), dtypes=DTYPES)


def test_a_fusion_may_fail_for_mixed_dtypes() -> None:
    """This one does not cast its input; where the dtypes agree, it must not fail."""

    def compute(self: Any, ctx: Any, x: Tensor) -> Tensor:
        return self.right(self.given)

    def fuser_forward(self: Any, ctxs: Any, x: Tensor, **kwargs: Any) -> Any:
        self.given = x
        return LinearScaleGain.fuser_forward(self, ctxs, x)

    cls = spoilt(LinearScaleGain, compute=compute, fuser_forward=fuser_forward)
    check_fusion(rule("joint", cls), operations(), torch.randn(5, 4))


def test_a_fusion_may_say_that_it_saves_more() -> None:
    """This one saves its input twice, and reads both."""

    def save(self: Any, ctx: Any, x: Tensor, w: Tensor) -> None:
        if ctx.requires_grad:
            x, w = needed(ctx, x, w)  # type: ignore[assignment]
            ctx.save_for_backward(x, w, *([] if x is None else [x.clone()]))

    def saved(self: Any, ctx: Any) -> Any:
        x, w, *again = ctx.saved_tensors
        return (x + again[0]) / 2 if again else x, w

    cls = spoilt(LinearScaleGain, save=save, saved=saved)
    with pytest.raises(
        AssertionError, match=r"may save 84 bytes.*: 164 bytes\..*saves_more = True"
    ):
        check_fusion(rule("joint", cls), operations(), torch.randn(5, 4))
    cls.saves_more = True
    check_fusion(rule("joint", cls), operations(), torch.randn(5, 4))


def test_errors() -> None:
    x = torch.randn(5, 4)
    with pytest.raises(UnknownFusionError, match=r"'norm_liner'\. Choose among: norm_linear\.$"):
        check_fusion("norm_liner", with_bias(), x)
    for name in ("nobody", "*"):
        with pytest.raises(
            UnknownFusionError, match=r"Received: '.*Choose among: .*forward_linear"
        ):
            check_fusion(name, with_bias(), x)
    with pytest.raises(
        ArgumentError, match=r"at least one dtype\. Received: dtypes=\(\)\. Pass some"
    ):
        check_fusion("forward_linear_bias_add", with_bias(), x, dtypes=())
    with pytest.raises(ArgumentError, match=r"stage .* must be given.*Pass stage=\"forward\""):
        check_fusion(lambda ops: ops, with_bias(), x)
    with pytest.raises(ArgumentError, match=r"one run\. Received: .*OperationFuser, ReLU, Oper"):
        check_fusion(rule(), [*with_bias(), nn.ReLU(), Bias(3)], x)
