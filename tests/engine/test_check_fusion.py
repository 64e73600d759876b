"""check_fusion passes what is right, and catches each kind of wrong with a text that says so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import AddExtraInput, BasicLinear, Bias, ConstantScale, MakeExtraOutput
from opfuser.errors import ArgumentError, UnknownFusionError
from opfuser.fusion import Fusion, Refusal, Stage
from opfuser.gemm import dgrad, wgrad
from opfuser.op import FusedOperation
from opfuser.testing import check_fusion

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def needed(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What the gradients of a linear operation read, as BasicLinear saves it."""
    return x if ctx.needs.parameters[0] else None, w if ctx.needs.input else None


class LinearScale(FusedOperation):
    """``y = s x Wᵀ``, both passes; with steps that are open to being spoilt."""

    def __init__(self, linear: BasicLinear, scale: ConstantScale) -> None:
        super().__init__((linear, scale))

    def compute(self, x: Tensor, w: Tensor, scale: float) -> Tensor:
        return nn.functional.linear(x, w) * scale

    def save(self, ctxs: Any, x: Tensor, w: Tensor) -> None:
        if ctxs[0].requires_grad:
            ctxs[0].save_for_backward(*needed(ctxs[0], x, w))

    def fuser_forward(self, ctxs: Any, x: Tensor, **kwargs: Any) -> Any:
        linear, scale = self.basic_ops
        w = linear.weight
        self.save(ctxs, x, w)
        return self.compute(x, w, scale.scale), [(), ()]


class ScaleGrad(FusedOperation):
    """The backward of the same."""

    def __init__(self, linear: BasicLinear, scale: ConstantScale) -> None:
        super().__init__((linear, scale))

    def fuser_backward(self, ctxs: Any, dy: Tensor, **kwargs: Any) -> Any:
        x, w = ctxs[0].saved_tensors
        needs = ctxs[0].needs
        dy = dy * self.basic_ops[1].scale
        dx = dgrad(dy, w) if needs.input else None
        dw = wgrad(dy, x) if needs.parameters[0] else None
        return dx, [(dw,), ()], [(), ()]


class Joint(LinearScale):
    """Both passes, with something else saved."""

    def save(self, ctxs: Any, x: Tensor, w: Tensor) -> None:
        if ctxs[1].requires_grad:
            ctxs[1].save_for_backward(*needed(ctxs[0], x, w)[::-1])

    def fuser_backward(self, ctxs: Any, dy: Tensor, **kwargs: Any) -> Any:
        ctxs[0].saved_tensors = ctxs[1].saved_tensors[::-1]
        return ScaleGrad.fuser_backward(self, ctxs, dy)  # type: ignore[arg-type]


BUILD: dict[Stage, type[FusedOperation]] = {
    "forward": LinearScale,
    "backward": ScaleGrad,
    "joint": Joint,
}


def rule(stage: Stage = "forward", name: str = "mine", **kwargs: Any) -> Fusion:
    build = kwargs.pop("build", BUILD[stage])
    return Fusion(name, stage, (BasicLinear, ConstantScale), build, **kwargs)


def operations() -> list[nn.Module]:
    return [Bias(4), BasicLinear(4, 3), ConstantScale(0.5), Bias(3)]


@pytest.mark.parametrize("stage", BUILD)
def test_a_right_fusion_passes(stage: Stage) -> None:
    check_fusion(rule(stage), operations(), torch.randn(5, 4), dtypes=DTYPES, zero_rows=True)
    assert [info for info in opfuser.fusions() if info.name == "mine"] == []


def test_on_every_device(device: torch.device) -> None:
    ops = [op.to(device) for op in operations()]
    check_fusion(rule(), ops, torch.randn(5, 4, device=device), dtypes=DTYPES)


def test_all_pairings_are_tried() -> None:
    """Each pairing by the pair of operations that ran."""
    pairs: list[list[str]] = []

    class Forward(LinearScale):
        def fuser_forward(self, ctxs: Any, x: Tensor, **kwargs: Any) -> Any:
            ctxs[0].fused = True
            return super().fuser_forward(ctxs, x, **kwargs)

    class Backward(ScaleGrad):
        def fuser_backward(self, ctxs: Any, dy: Tensor, **kwargs: Any) -> Any:
            pairs.append(["backward", "forward"][: 1 + hasattr(ctxs[0], "fused")])
            return super().fuser_backward(ctxs, dy, **kwargs)

    with opfuser.register_backward_fusion(rule("backward", "other", build=Backward), prepend=True):
        check_fusion(rule(build=Forward), operations(), torch.randn(5, 4))
    assert ["backward"] in pairs
    assert ["backward", "forward"] in pairs


@pytest.mark.parametrize("how", ["name", "handle", "fusion", "function", "unregistered function"])
def test_ways_of_naming_a_fusion(how: str) -> None:
    def fuse(ops: Any, *, recipe: Any) -> Any:
        return rule()(ops)

    ops, x = operations(), torch.randn(5, 4)
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
        check_fusion(handle, operations(), torch.randn(5, 4))
    assert "mine" not in [info.name for info in opfuser.fusions()]


def test_the_operations_given_are_left_alone() -> None:
    ops, x = operations(), torch.randn(5, 4, requires_grad=True)
    check_fusion(rule(), ops, x, dtypes=(torch.float64,))
    assert all(p.dtype is torch.float32 and p.grad is None for op in ops for p in op.parameters())
    assert x.grad is None
    assert not any(op._routing_captured for op in ops)


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


# ---------------------------------------------------------------------- what is caught


def spoilt(stage: Stage = "forward", **methods: Callable[..., Any]) -> Fusion:
    base = BUILD[stage]
    return rule(stage, build=type(base.__name__, (base,), methods))


def _grads(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def fuser_backward(self: Any, ctxs: Any, dy: Tensor, **kwargs: Any) -> Any:
        dx, ((dw,), _), _ = ScaleGrad.fuser_backward(self, ctxs, dy)
        dx, dw = change(dx, dw)
        return dx, [(dw,), ()], [(), ()]

    return fuser_backward


def _twice(t: Tensor | None) -> Tensor | None:
    return None if t is None else t * 2


def _writes(t: Tensor, result: Any) -> Any:
    t.mul_(2)
    return result


CAUGHT: dict[str, tuple[Fusion, str]] = {
    "wrong output": (
        spoilt(compute=lambda op, x, w, s: nn.functional.linear(x, w) * s * 1.01),
        "The output is wrong: error .*forward fused.*unfused",
    ),
    "wrong dtype": (
        spoilt(compute=lambda op, x, w, s: (nn.functional.linear(x, w) * s).double()),
        "forward fused",
    ),
    "writes to the input": (
        spoilt(compute=lambda op, x, w, s: _writes(x, nn.functional.linear(x, w) * s)),
        "The input belongs to the caller",
    ),
    "writes to a parameter": (
        spoilt(compute=lambda op, x, w, s: _writes(w.data, nn.functional.linear(x, w) * s)),
        r"The parameter 1\.weight belongs to the caller",
    ),
    "saves in another order": (
        spoilt(save=lambda op, ctxs, x, w: ctxs[0].save_for_backward(w, x)),
        r"Expected shape \(5, 4\) .*saved for op 1 \(BasicLinear\): input.*shape \(3, 4\)",
    ),
    "saves in another dtype": (
        spoilt(save=lambda op, ctxs, x, w: ctxs[0].save_for_backward(x.bfloat16(), w)),
        "Expected torch.float32 .*BasicLinear.: input.*Received: torch.bfloat16",
    ),
    "saves other values": (
        spoilt(save=lambda op, ctxs, x, w: ctxs[0].save_for_backward(x * 2, w)),
        r"The input is wrong: error .*saved for op 1 \(BasicLinear\)",
    ),
    "saves too little": (
        spoilt(save=lambda op, ctxs, x, w: ctxs[0].save_for_backward(x)),
        r"Expected 2 tensors, as its op_forward saves .*op 1 \(BasicLinear\)\)\. Received: 1",
    ),
    "saves nothing": (
        spoilt(save=lambda op, ctxs, x, w: None),
        "Expected 2 tensors, as its op_forward saves .*Received: 0",
    ),
    "saves None": (
        spoilt(save=lambda op, ctxs, x, w: ctxs[0].save_for_backward(x, None)),
        "Expected weight to be a tensor .*Received: None",
    ),
    "saves for another operation": (
        spoilt(
            save=lambda op, ctxs, x, w: (
                ctxs[0].save_for_backward(x, w),
                ctxs[1].save_for_backward(x),
            )
        ),
        r"Expected 0 tensors.*op 2 \(ConstantScale\)",
    ),
    "wrong input gradient": (
        spoilt("backward", fuser_backward=_grads(lambda dx, dw: (_twice(dx), dw))),
        "The gradient of parameter 0.bias is wrong.*backward fused|The gradient of input is wrong",
    ),
    "wrong parameter gradient": (
        spoilt("backward", fuser_backward=_grads(lambda dx, dw: (dx, _twice(dw)))),
        r"The gradient of parameter 1\.weight is wrong.*backward fused",
    ),
    "writes to what was saved": (
        spoilt(
            "backward",
            fuser_backward=lambda op, ctxs, dy, **kwargs: (
                _writes(ctxs[0].saved_tensors[1].data, ScaleGrad.fuser_backward(op, ctxs, dy))
            ),
        ),
        r"parameter 1\.weight belongs to the caller|must give the same gradients",
    ),
    "a joint fusion with a wrong gradient": (
        spoilt("joint", fuser_backward=lambda op, ctxs, dy, **kwargs: (
            Joint.fuser_backward(op, ctxs, dy * 1.1)
        )),
        "gradient of .* is wrong.*joint fused",
    ),
    "needs what only the first operation saves": (
        spoilt(
            "joint",
            save=lambda op, ctxs, x, w: (
                ctxs[1].save_for_backward(w, x) if ctxs[0].needs.parameters[0] else None
            ),
            fuser_backward=lambda op, ctxs, dy, **kwargs: (
                Joint.fuser_backward(op, ctxs, dy)
                if ctxs[1].saved_tensors
                else (dy[:, :1], [(None,), ()], [(), ()])
            ),
        ),
        "joint fused, only the",
    ),
    "refuses": (
        rule(refuses=lambda linear, scale, env: Refusal("SHAPE", "too narrow")),
        r"The fusion must match.*refused=1.*op 1: SHAPE: too narrow.*Plan for 4",
    ),
    "does not match": (
        Fusion("mine", "forward", (BasicLinear, AddExtraInput), LinearScale),
        "The fusion must match.*closest: 1 of 2 at op 1; LAYOUT: AddExtraInput is expected",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CAUGHT)
def test_what_is_wrong_is_caught(case: str) -> None:
    fusion, text = CAUGHT[case]
    ops = operations()
    if case == "writes to the input":
        del ops[0]  # so that what the fusion writes to is the caller's
    with pytest.raises(AssertionError, match=f"(?s){text}") as error:
        check_fusion(fusion, ops, torch.randn(5, 4), zero_rows=True)
    assert "mine" in str(error.value)
    assert "mine" not in [info.name for info in opfuser.fusions()]


def test_a_missing_attribute_of_a_context_is_caught() -> None:
    class Scale(ConstantScale):
        def op_forward(self, ctx: Any, input_: Tensor, **kwargs: Any) -> Tensor:
            ctx.shift = 1
            return super().op_forward(ctx, input_, **kwargs)

    fusion = Fusion("mine", "forward", (BasicLinear, Scale), LinearScale)
    with pytest.raises(
        AssertionError, match=r"must have the attributes \['shift'\].*op 1 \(Scale\)"
    ):
        check_fusion(fusion, [BasicLinear(4, 3), Scale(0.5)], torch.randn(5, 4))


def test_a_fusion_that_only_matches_some_dtypes() -> None:
    def refuses(linear: BasicLinear, scale: Any, *, env: Any) -> Refusal | None:
        return Refusal("DTYPE", "no float64") if env.dtype is torch.float64 else None

    fusion = rule(refuses=refuses)
    check_fusion(fusion, operations(), torch.randn(5, 4))
    with pytest.raises(AssertionError, match=r"(?s)must match.*DTYPE: no float64"):
        check_fusion(fusion, operations(), torch.randn(5, 4), dtypes=DTYPES)


def test_errors() -> None:
    x = torch.randn(5, 4)
    for name in ("nobody", "*"):
        with pytest.raises(
            UnknownFusionError, match=r"Received: '.*Choose among: .*forward_linear"
        ):
            check_fusion(name, operations(), x)
    with pytest.raises(ArgumentError, match=r"stage .* must be given.*Pass stage=\"forward\""):
        check_fusion(lambda ops: ops, operations(), x)
    with pytest.raises(ArgumentError, match=r"one run\. Received: .*OperationFuser, ReLU, Oper"):
        check_fusion(rule(), [*operations(), nn.ReLU(), Bias(3)], x)
