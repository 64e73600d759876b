"""Hazards 16 and 18 to 22: fusions that do nothing and say nothing, and texts never filled in."""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import F64, against, close, fill, rand


class ScaledLinear(of.FusedOperation):
    """Linear and scale as one GEMM, forward only; counts its calls."""

    calls = 0

    def __init__(self, *ops: Any) -> None:
        super().__init__(ops)

    def fuser_forward(
        self, basic_op_ctxs: list[of.OperationContext], input_: Tensor, **unused: Any
    ) -> tuple[Tensor, list[tuple[()]]]:
        ScaledLinear.calls += 1
        linear, scale = self.basic_ops
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(input_, linear.weight)
        return F.linear(input_, linear.weight * scale.scale), [(), ()]


def rule(name: str = "scaled-linear", **kwargs: Any) -> of.Fusion:
    return of.Fusion(name, "forward", (of.BasicLinear, of.ConstantScale), ScaledLinear, **kwargs)


def model(*between: nn.Module) -> of.Sequential:
    return of.Sequential(of.BasicLinear(8, 8, **F64), *between, of.ConstantScale(0.5))


@pytest.fixture(autouse=True)
def _count_anew() -> None:
    ScaledLinear.calls = 0


def hooked() -> of.Sequential:
    seq = model()
    seq[1].register_forward_hook(lambda *args: None)
    return seq


def declines(linear: of.BasicLinear, scale: of.ConstantScale, *, env: Any) -> of.Refusal:
    return of.Refusal("DTYPE", f"weight is {linear.weight.dtype}; the kernel takes bf16")


def changes_nothing(ops: list[Any], **unused: Any) -> list[Any]:
    return ops


# A fusion, a sequence, the status of its record, what it says, and the codes of its refusals.
REASONS: dict[str, tuple[Any, Callable[[], of.Sequential], str, str, list[tuple[int, str]]]] = {
    "matched nothing": (
        rule(), lambda: model(of.Identity()), "unmatched",
        "ConstantScale is expected where Identity stands", [],
    ),
    "declined": (
        rule(refuses=declines), lambda: of.Sequential(of.Identity(), *model()), "refused",
        "weight is torch.float64; the kernel takes bf16", [(1, "DTYPE")],
    ),
    "cannot run here": (
        rule(requires=of.Requires(package="no_such_package")), model, "skipped",
        "no_such_package", [],
    ),
    "a plain module between": (
        rule(), lambda: model(nn.Identity()), "refused", "Identity", [(0, "GROUP_SPLIT")],
    ),
    "hazard 16: a hook": (rule(), hooked, "refused", "ConstantScale", [(0, "HOOK")]),
    "a function that changed nothing": (changes_nothing, model, "unmatched", "", []),
}  # fmt: skip


@pytest.mark.parametrize("case", REASONS)
def test_hazard_18_a_fusion_that_did_not_run_says_why(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    fusion, make, status, text, refusals = REASONS[case]
    name = f"quiet-{list(REASONS).index(case)}"
    with (
        of.register_forward_fusion(fusion, name=name),
        caplog.at_level(logging.INFO, logger="opfuser"),
    ):
        seq = make()
        plan = seq.plan(rand(3, 8))
        seq(rand(3, 8))
    record = plan.record(name)
    assert (record.status, record.matches) == (status, ())
    assert [(at, why.code) for at, why in record.refusals] == refusals
    assert text in str(plan)
    if case == "matched nothing":
        near = record.near_miss
        assert near is not None, "how near it came must be said"
        assert (near.start, near.matched, near.of) == (0, 1, 2)
        assert text in near.stopped_by.detail
    lines = [r.getMessage() for r in caplog.records if f"fusion={name}" in r.getMessage()]
    assert len(lines) == 1, "every fusion is logged, once per plan, also without a match"
    assert ("skipped (needs" if status == "skipped" else "matches=0") in lines[0]
    assert ScaledLinear.calls == 0


def test_hazard_19_registering_and_removing_take_effect_at_the_next_call() -> None:
    sequences, x = [model() for _ in range(3)], rand(3, 8, grad=True)
    want = [seq(x) for seq in sequences]
    handle = of.register_forward_fusion(rule())
    try:
        for seq, y in zip(sequences, want):
            close(seq(x), y)
        assert ScaledLinear.calls == 3, "the fusion registered after the first call is ignored"
        (step,) = sequences[0].plan(x).forward
        assert step.fusion == "scaled-linear"
    finally:
        handle.remove()
    for seq, y in zip(sequences, want):
        close(seq(x), y)
    assert ScaledLinear.calls == 3, "the fusion is still used after it was removed"
    handle.remove()  # a second time does nothing


def test_hazard_20_fusions_are_listed_switched_off_and_removed() -> None:
    seq, x = model(), rand(3, 8)
    before = of.fusions()
    assert [info.name for info in before if info.origin == "opfuser"]
    handle = of.register_forward_fusion(rule())
    try:
        (info,) = [i for i in of.fusions() if i not in before]
        assert (info.name, info.stage, info.enabled) == ("scaled-linear", "forward", True)
        seq(x)
        assert ScaledLinear.calls == 1
        with of.disable("scaled-linear"):
            assert [i.enabled for i in of.fusions() if i.name == "scaled-linear"] == [False]
            seq(x)
            record = seq.plan(x).record("scaled-linear")
            assert (record.status, record.detail) == ("disabled", "opfuser.disable")
        assert ScaledLinear.calls == 1
        with of.disable("*"):
            seq(x)
            assert not any(info.enabled for info in of.fusions())
            with of.enable("scaled-linear"):
                seq(x)
        assert ScaledLinear.calls == 2
        for enabled in (False, True):
            handle.enabled = enabled
            seq(x)
            assert ScaledLinear.calls == 2 + enabled
    finally:
        handle.remove()
    assert of.fusions() == before


def test_hazard_20_a_fusion_of_the_library_can_be_switched_off_by_name() -> None:
    seq = of.Sequential(of.Linear(8, 8, **F64), of.AddExtraInput())
    x, h = rand(3, 8), rand(3, 8)
    (step,) = seq.plan(x, h).forward
    assert step.fusion == "forward_linear_bias_add"
    with of.disable("forward_linear_bias_add"):
        assert "forward_linear_bias_add" not in seq.plan(x, h).fused("forward")
    with pytest.raises(KeyError, match="forward_linear_bias_add"):
        of.disable("forward_linear_bias_ad")  # the text offers the names that exist


def test_hazard_20_the_order_in_which_fusions_run_is_visible_and_open() -> None:
    first = rule("first")
    with of.register_forward_fusion(rule("last")), of.register_forward_fusion(first, prepend=True):
        names = [info.name for info in of.fusions() if info.stage == "forward"]
        assert names[0] == "first"
        assert names[-1] == "last"
        (step,) = model().plan(rand(3, 8)).forward
        assert step.fusion == "first"


class LinearSiLU(of.FusedOperation):
    """The documented kind of joint fusion: saves its own state for its own backward."""

    calls = 0

    def __init__(self, linear: of.BasicLinear, bias: of.Bias | None, silu: of.SiLU) -> None:
        super().__init__([linear, silu] if bias is None else [linear, bias, silu])
        self.bias_op = bias

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        LinearSiLU.calls += 1
        weight = self.basic_ops[0].weight
        h = F.linear(input_, weight, None if self.bias_op is None else self.bias_op.bias)
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(input_, weight, h)
        return F.silu(h), [()] * len(self.basic_ops)

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        x, w, h = basic_op_ctxs[0].saved_tensors
        s = torch.sigmoid(h)
        dh = grad_output * s * (1 + h * (1 - s))
        middle = [] if self.bias_op is None else [(dh.sum(0),)]
        return dh @ w, [(dh.t() @ x,), *middle, ()], [()] * len(self.basic_ops)


@pytest.mark.parametrize("bias", [True, False])
def test_hazard_21_a_pattern_may_name_a_compound(bias: bool) -> None:
    joint = of.Fusion("linear-silu", "joint", (of.Linear, of.SiLU), LinearSiLU)
    LinearSiLU.calls = 0
    seq, x = (
        fill(of.Sequential(of.Linear(8, 4, bias=bias, **F64), of.SiLU())),
        rand(3, 8, grad=True),
    )
    with of.register_forward_backward_fusion(joint):
        plan = seq.plan(x)
        against(seq, lambda p, x: F.silu(F.linear(x, p["0.weight"], p.get("0.bias"))), x)
    assert plan.fused("forward") == plan.fused("backward") == {"linear-silu": 1}
    assert LinearSiLU.calls == 1


def test_hazard_22_error_texts_name_the_class() -> None:
    class Bare(of.BasicOperation):
        num_extra_inputs = 1

    x = rand(3, 8)
    with pytest.raises(NotImplementedError, match=r"^[^{]*Bare[^{]*$"):
        Bare()(x, x)


def test_hazard_22_no_text_of_an_error_has_unfilled_braces() -> None:
    root = Path(of.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Raise) or node.exc is None:
                continue
            filled = {
                id(part)
                for f in ast.walk(node)
                if isinstance(f, ast.JoinedStr)
                for part in f.values
            }
            found += [
                f"{path.relative_to(root)}:{text.lineno}: {text.value}"
                for text in ast.walk(node)
                if isinstance(text, ast.Constant)
                and isinstance(text.value, str)
                and id(text) not in filled
                and "{" in text.value
            ]
    assert found == []


HOOKS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "forward pre-hook": nn.Module.register_forward_pre_hook,
    "forward hook": nn.Module.register_forward_hook,
    "full backward pre-hook": nn.Module.register_full_backward_pre_hook,
    "full backward hook": nn.Module.register_full_backward_hook,
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hazard_16_hooks_on_inner_operations_fire(kind: str) -> None:
    """Of operations that were fused before, parts of a compound included."""
    seq = fill(of.Sequential(of.RMSNorm(8, **F64), of.Linear(8, 8, **F64), of.GELU()))

    def formula(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = F.rms_norm(x, (8,), p["0.weight"], 1e-5)
        return F.gelu(F.linear(h, p["1.weight"], p["1.bias"]), approximate="tanh")

    x = rand(3, 8, grad=True)
    against(seq, formula, x)
    for module in (*seq, *seq[1].basic_ops):
        if module in seq[1].basic_ops and "backward" in kind:
            continue
        calls: list[nn.Module] = []
        handle = HOOKS[kind](module, lambda module, *args, calls=calls: calls.append(module))
        against(seq, formula, x)
        assert calls == [module]
        handle.remove()
        against(seq, formula, x)
        assert len(calls) == 1


def test_hazard_16_hooks_see_and_may_replace_the_tensors_of_their_operation() -> None:
    seq = fill(of.Sequential(of.RMSNorm(8, **F64), of.Linear(8, 8, **F64), of.GELU()))
    seen: dict[str, Tensor] = {}

    def forward(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        seen["input"], seen["output"] = args[0].detach(), output.detach()
        return output * 2

    def backward(module: nn.Module, grad_in: tuple[Tensor], grad_out: tuple[Tensor]) -> Any:
        seen["dx"], seen["dy"] = grad_in[0].detach(), grad_out[0].detach()

    seq[1].register_forward_hook(forward)
    seq[1].register_full_backward_hook(backward)
    x, dy = rand(3, 8, grad=True), rand(3, 8)
    seq(x).backward(dy)
    p = dict(seq.named_parameters())
    h = F.rms_norm(x, (8,), p["0.weight"], 1e-5)
    a = F.linear(h, p["1.weight"], p["1.bias"])
    doubled = 2 * a
    grads = torch.autograd.grad(F.gelu(doubled, approximate="tanh"), [h, doubled, x], dy)
    for got, want in zip(
        (seen["input"], seen["output"], seen["dx"], seen["dy"], x.grad), (h, a, *grads)
    ):
        close(got, want)
