"""Hazards 18 to 20: fusions that do nothing and say nothing, and cannot be steered."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import F64, close, rand


class ScaledLinear(of.FusedOperation):
    """Linear and scale as one GEMM, forward only; counts its calls."""

    calls = 0

    def fuser_forward(
        self, basic_op_ctxs: list[of.OperationContext], input_: Tensor, **unused: Any
    ) -> tuple[Tensor, list[tuple[()]]]:
        ScaledLinear.calls += 1
        linear, scale = self.basic_ops
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(input_, linear.weight)
        return F.linear(input_, linear.weight * scale.scale), [(), ()]


def build(*ops: of.FusibleOperation) -> ScaledLinear:
    return ScaledLinear(ops)


def rule(name: str = "scaled-linear", **kwargs: Any) -> of.Fusion:
    return of.Fusion(name, "forward", (of.BasicLinear, of.ConstantScale), build, **kwargs)


def model() -> of.Sequential:
    return of.Sequential(of.BasicLinear(8, 8, **F64), of.ConstantScale(0.5))


@pytest.fixture(autouse=True)
def _count_anew() -> None:
    ScaledLinear.calls = 0


def test_hazard_18_a_fusion_that_matched_nothing_is_on_record() -> None:
    seq = of.Sequential(of.BasicLinear(8, 8, **F64), of.Identity(), of.ConstantScale(0.5))
    with of.register_forward_fusion(rule()):
        plan = seq.plan(rand(3, 8))
    record = plan.record("scaled-linear")
    assert (record.status, record.matches, record.refusals) == ("unmatched", (), ())
    near = record.near_miss
    assert near is not None, "how near it came must be said"
    assert (near.start, near.matched, near.of) == (0, 1, 2)
    assert "ConstantScale is expected where Identity stands" in near.stopped_by.detail
    text = str(plan)
    assert "fusion=scaled-linear" in text
    assert "matches=0" in text
    assert near.stopped_by.detail in text


def test_hazard_18_a_fusion_that_declined_gives_its_reason() -> None:
    def refuses(linear: of.BasicLinear, scale: of.ConstantScale, *, env: Any) -> of.Refusal:
        return of.Refusal("DTYPE", f"weight is {linear.weight.dtype}; the kernel takes bf16")

    with of.register_forward_fusion(rule(refuses=refuses)):
        plan = of.Sequential(of.Identity(), *model()).plan(rand(3, 8))
    record = plan.record("scaled-linear")
    reason = "weight is torch.float64; the kernel takes bf16"
    assert (record.status, record.matches) == ("refused", ())
    assert record.refusals == ((1, of.Refusal("DTYPE", reason)),)
    assert reason in str(plan)
    assert ScaledLinear.calls == 0


def test_hazard_18_a_fusion_that_the_machine_cannot_run_says_what_is_missing() -> None:
    with of.register_forward_fusion(rule(requires=of.Requires(package="no_such_package"))):
        plan = model().plan(rand(3, 8))
    record = plan.record("scaled-linear")
    assert record.status == "skipped"
    assert "no_such_package" in record.detail
    assert "no_such_package" in str(plan)


def test_hazard_18_a_hand_written_function_that_changed_nothing_is_on_record() -> None:
    def does_nothing(ops: list[Any], **unused: Any) -> list[Any]:
        return ops

    with of.register_backward_fusion(does_nothing, name="idle"):
        record = model().plan(rand(3, 8, grad=True)).record("idle")
    assert (record.stage, record.status) == ("backward", "unmatched")


def test_hazard_18_every_fusion_is_logged_also_without_a_match(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seq = of.Sequential(of.Identity(), of.Bias(3, **F64))
    with (
        caplog.at_level(logging.INFO, logger="opfuser"),
        of.register_forward_fusion(rule("a-quiet-one")),
    ):
        seq(rand(2, 3))
    lines = [r.getMessage() for r in caplog.records if "fusion=a-quiet-one" in r.getMessage()]
    assert len(lines) == 1
    assert "matches=0 refused=0" in lines[0]


def test_hazard_18_boundaries_between_operations_are_reasons_too() -> None:
    seq = of.Sequential(of.BasicLinear(8, 8, **F64), nn.Identity(), of.ConstantScale(0.5))
    with of.register_forward_fusion(rule()):
        record = seq.plan(rand(3, 8)).record("scaled-linear")
    assert record.status == "refused"
    assert [(at, why.code) for at, why in record.refusals] == [(0, "GROUP_SPLIT")]


def test_hazard_19_registering_and_removing_take_effect_at_the_next_call() -> None:
    seq, x = model(), rand(3, 8, grad=True)
    want = 0.5 * F.linear(x, seq[0].weight)
    close(seq(x), want)
    handle = of.register_forward_fusion(rule())
    try:
        close(seq(x), want)
        assert ScaledLinear.calls == 1, "the fusion registered after the first call is ignored"
        (step,) = seq.plan(x).forward
        assert step.fusion == "scaled-linear"
    finally:
        handle.remove()
    close(seq(x), want)
    assert ScaledLinear.calls == 1, "the fusion is still used after it was removed"
    handle.remove()  # a second time does nothing


def test_hazard_19_every_sequence_notices() -> None:
    sequences, x = [model() for _ in range(3)], rand(3, 8)
    for seq in sequences:
        seq(x)
    with of.register_forward_fusion(rule()):
        for seq in sequences:
            seq(x)
        assert ScaledLinear.calls == 3
    for seq in sequences:
        seq(x)
    assert ScaledLinear.calls == 3


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
            assert not [i for i in of.fusions() if i.name == "scaled-linear"][0].enabled  # noqa: RUF015
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
        handle.enabled = False
        seq(x)
        assert ScaledLinear.calls == 2
        handle.enabled = True
        seq(x)
        assert ScaledLinear.calls == 3
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
