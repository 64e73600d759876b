"""require_fusions and can_fuse: what programs ask of their plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import (
    AddExtraInput,
    BasicLinear,
    ConstantScale,
    Identity,
    Linear,
    MakeExtraOutput,
    Residual,
    RMSNorm,
    Sequential,
    can_fuse,
    require_fusions,
)
from opfuser.core.fusion import Fusion, Refusal, Requires
from opfuser.errors import ArgumentError, MissingFusionError, UnknownFusionError
from tests.planning.toys import Fused, FusedBackward, FusedForward

X = torch.ones(2)


class Scales(FusedForward):
    """Computes, so that models can be called."""

    def fuser_forward(self, ctxs: Any, input_: Tensor, **kwargs: Any) -> Any:
        return input_ * 4, [() for _ in ctxs]


PATTERN = (ConstantScale, ConstantScale)
FUSIONS = [
    Fusion("scales", "forward", PATTERN, Scales),
    Fusion(
        "picky", "forward", (Identity, Identity), Fused, lambda a, b, env: Refusal("SHAPE", "odd")
    ),
    Fusion("cuda", "forward", PATTERN, Fused, requires=Requires(device="cuda")),
    Fusion("missing", "forward", PATTERN, Fused, requires=Requires(package="no_such")),
]


@pytest.fixture
def _fusions() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(opfuser.disable(*(info.name for info in opfuser.fusions())))
        back = Fusion("back", "backward", PATTERN, FusedBackward)
        stack.enter_context(opfuser.register_backward_fusion(back))
        for fusion in FUSIONS:
            stack.enter_context(opfuser.register_forward_fusion(fusion))
        yield


def scales(count: int = 2) -> Sequential:
    return Sequential(*(ConstantScale(2.0) for _ in range(count)))


class Double(ConstantScale):
    def __init__(self) -> None:
        super().__init__(2.0)


# require_fusions


@pytest.mark.usefixtures("_fusions")
def test_enough_is_enough() -> None:
    model = nn.Sequential(scales(), nn.ReLU(), scales(4))
    model(X)
    require_fusions(model, forward={"scales": 3})
    require_fusions(model, forward={"scales": 1}, backward={"back": 0})
    with pytest.raises(MissingFusionError, match=r"required at least 4, found 3"):
        require_fusions(model, forward={"scales": 4})


@pytest.mark.usefixtures("_fusions")
def test_the_text_names_every_missing_fusion_where_and_why() -> None:
    model = nn.Sequential(
        *(Sequential(ConstantScale(2.0), second()) for second in [Identity] * 3 + [Double] * 2)
    )
    model(X)
    with pytest.raises(MissingFusionError) as error:
        require_fusions(model, forward={"scales": 2, "cuda": 1, "picky": 0}, backward={"back": 1})
    assert (
        str(error.value)
        == """\
Sequential lacks fusions.
scales (forward): required at least 2, found 0
  0-2:
    scales (forward): unmatched
      pattern: ConstantScale, ConstantScale
      1 operation fits from op 0 (0 ConstantScale), then LAYOUT: ConstantScale is
          expected where Identity stands
  3-4:
    scales (forward): unmatched
      pattern: ConstantScale, ConstantScale
      1 operation fits from op 0 (0 ConstantScale), then SUBCLASS: Double is a
          subclass of ConstantScale
cuda (forward): required at least 1, found 0
  0-4:
    cuda (forward): skipped (needs cuda, have cpu)
      pattern: ConstantScale, ConstantScale
back (backward): required at least 1, found 0
  0-4:
    back (backward): skipped (no gradient is needed)
      pattern: ConstantScale, ConstantScale"""
    )


@pytest.mark.usefixtures("_fusions")
def test_of_many_different_sequences_four_are_told() -> None:
    model = nn.Sequential(*(Sequential(*[Double()] * n, Identity()) for n in range(6)))
    model(X)
    with pytest.raises(MissingFusionError) as error:
        require_fusions(model, forward={"picky": 1})
    lines = str(error.value).splitlines()
    shown = [line for line in lines if line.startswith("  ") and line[2] != " "]
    assert shown == ["  0:", "  1:", "  2:", "  3:", "  and 2 more Sequentials"]


@pytest.mark.usefixtures("_fusions")
def test_the_last_call_counts() -> None:
    seq = scales()
    seq(X)
    with opfuser.disable("scales"):
        seq(X)
    with pytest.raises(MissingFusionError, match=r"scales \(forward\): disabled \(opfuser\.disabl"):
        require_fusions(seq, forward={"scales": 1})
    seq(X)
    late = Fusion("late", "forward", PATTERN, Scales)
    with opfuser.register_forward_fusion(late):
        require_fusions(seq, forward={"scales": 1})
        with pytest.raises(MissingFusionError, match="not registered when the plan was made"):
            require_fusions(seq, forward={"late": 1})


@pytest.mark.usefixtures("_fusions")
def test_a_sequence_and_what_it_holds_count_once() -> None:
    inner = scales()
    inner(X)
    seq = Sequential(Identity(), inner)
    seq(X)
    with pytest.raises(MissingFusionError, match="required at least 2, found 1"):
        require_fusions(seq, forward={"scales": 2})


def test_joint_fusions_of_a_model() -> None:
    model = Residual(RMSNorm(4), Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    model(x)
    require_fusions(model, joint={"norm_linear": 1}, backward={})
    with pytest.raises(
        MissingFusionError, match=r"\nnorm_linear \(joint\): required at least 2, found 1"
    ):
        require_fusions(model, joint={"norm_linear": 2})


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.Linear(2, 2), "Received: Linear, which holds none. Convert it with opfuser.from_torch"),
        (
            nn.Sequential(scales()),
            "Received: Sequential, of which no call has been made. Call the model first.",
        ),
    ],
)
def test_a_model_without_a_call_is_an_error(model: nn.Module, text: str) -> None:
    with pytest.raises(ArgumentError) as error:
        require_fusions(model, forward={"norm_linear": 1})
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("required", "text"),
    [
        ({}, "Received: no fusion."),
        ({"joint": {"norm_linear": 0}}, "Received: {'norm_linear': 0}."),
    ],
)
def test_to_require_nothing_is_an_error(required: Any, text: str) -> None:
    seq = scales()
    seq(X)
    with pytest.raises(ArgumentError, match="requires at least one step of a fusion") as error:
        require_fusions(seq, **required)
    assert f"{text} Name what must occur, as joint=" in str(error.value)


def test_unknown_names_are_errors() -> None:
    seq = scales()
    seq(X)
    text = r"Received: 'norm_liner'\. Choose among: norm_linear"
    with pytest.raises(UnknownFusionError, match=text):
        require_fusions(seq, joint={"norm_liner": 1})
    with pytest.raises(UnknownFusionError, match=text):
        can_fuse(seq, "norm_liner", X)


# can_fuse


def test_an_answer_is_true_or_says_why() -> None:
    ops = [RMSNorm(4), BasicLinear(4, 4)]
    x = torch.randn(3, 4)
    yes = can_fuse(ops, "norm_linear", x)
    assert (bool(yes), str(yes), yes.code) == (True, "fused", "")
    no = can_fuse([RMSNorm(4), Identity()], "norm_linear", x)
    assert not no
    assert no.code == "LAYOUT"
    assert str(no).startswith(
        "LAYOUT: BasicLinear|BasicMergedLinear|LoRALinear is expected where Identity"
    )


@pytest.mark.usefixtures("_fusions")
@pytest.mark.parametrize(
    ("ops", "name", "answer"),
    [
        (scales(), "scales", (True, "", "")),
        ([Identity(), Identity()], "picky", (False, "SHAPE", "odd")),
        (scales(), "cuda", (False, "DEVICE", "needs cuda, have cpu")),
        (scales(), "missing", (False, "MISSING_PACKAGE", "needs the package no_such")),
        (scales(), "back", (False, "NO_GRAD", "no gradient is needed")),
        (
            scales(),
            "norm_linear",
            (False, "DISABLED", "it is switched off (opfuser.disable)"),
        ),
        (Identity(), "scales", (False, "LAYOUT", "no operation begins its pattern")),
        ([Identity(), nn.ReLU(), Identity(), Identity()], "picky", (False, "SHAPE", "odd")),
        (
            [ConstantScale(2.0), nn.ReLU(), ConstantScale(2.0)],
            "scales",
            (False, "GROUP_SPLIT", "ReLU stands between"),
        ),
    ],
)
def test_reasons_of_all_kinds(ops: Any, name: str, answer: tuple[Any, ...]) -> None:
    assert can_fuse(ops, name, X) == answer


@pytest.mark.usefixtures("_fusions")
def test_an_earlier_fusion_that_takes_the_operations_is_the_reason() -> None:
    later = Fusion("later", "forward", PATTERN, Fused)
    with opfuser.register_forward_fusion(later):
        taken = (False, "CONFLICT", "scales has fused its operations")
        assert can_fuse(scales(), "later", X) == can_fuse(scales(3), "later", X) == taken
        seq = scales()
        seq(X)
        with pytest.raises(MissingFusionError, match=r"(?m)^      CONFLICT: scales has fused it"):
            require_fusions(nn.Sequential(Identity(), seq), forward={"later": 1})
        with opfuser.disable("scales"):
            assert can_fuse(scales(), "later", X)


def test_the_call_decides() -> None:
    ops = [MakeExtraOutput(), BasicLinear(4, 4)]
    x = torch.randn(3, 4)
    assert can_fuse(ops, "backward_linear_add", x.requires_grad_())
    with torch.no_grad():
        assert can_fuse(ops, "backward_linear_add", x).code == "NO_GRAD"
    on_gpu = [BasicLinear(4, 4, device="meta"), AddExtraInput()]
    y = torch.empty(3, 4, device="meta")
    assert can_fuse(on_gpu, "forward_linear_bias_add", y, y)
    assert can_fuse(Residual(Linear(4, 4)), "forward_linear_bias_add", torch.randn(3, 4))


def test_the_operations_stay_as_they_were() -> None:
    """Neither are they called, nor are their channels fixed, nor is memory of weights taken."""
    linear, add = BasicLinear(4, 4), AddExtraInput()
    x = torch.randn(3, 4)
    before = {name: (id(p), p._version) for name, p in linear.named_parameters()}
    assert can_fuse([linear, add], "forward_linear_bias_add", x, x)
    assert {name: (id(p), p._version) for name, p in linear.named_parameters()} == before
    add.set_extra_input_channel(0, "still open")


def test_an_answer_is_for_a_call() -> None:
    with pytest.raises(ArgumentError, match=r"answers for a call \(fusion 'norm_linear'\)\. Rece"):
        can_fuse([RMSNorm(4)], "norm_linear")
