"""assert_fused and assert_not_fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import opfuser
from opfuser import ConstantScale, Identity
from opfuser.core.fusion import Fusion
from opfuser.errors import ArgumentError
from opfuser.testing import assert_fused, assert_not_fused
from tests.checks.scales import PATTERN, scales
from tests.planning.toys import Fused

X = torch.ones(2)
pytestmark = pytest.mark.usefixtures("_fusions")


def test_plans_sequentials_and_models() -> None:
    seq = scales()
    x = X.clone().requires_grad_()
    assert_fused(seq, x, forward={"scales": 1}, backward={"back": 1})
    assert_fused(seq.plan(x), forward={"scales": 1}, backward={"back": 1})
    assert_fused(seq, X, forward={"scales": 1, "picky": 0})
    model = nn.Sequential(scales(), nn.ReLU(), nn.Sequential(scales(4)))
    model(X)
    assert_fused(model, forward={"scales": 3})


def test_plans_used_last_count() -> None:
    seq = scales()
    seq(X)
    with opfuser.disable("scales"):
        seq(X)
    assert_fused(seq, forward={"scales": 0})
    assert_not_fused(seq, "scales", code="DISABLED")


def test_what_plain_modules_and_hooks_split_counts() -> None:
    seq = opfuser.Sequential(*scales(), nn.ReLU(), *scales())
    seq(X)
    assert_fused(seq, forward={"scales": 2})
    assert_fused(seq, X, forward={"scales": 2})
    seq[0].register_forward_hook(lambda *_: None)
    seq(X)
    assert_fused(seq, forward={"scales": 1})


def test_joint_fusions() -> None:
    both = Fusion("both", "joint", PATTERN, Fused)
    with opfuser.register_forward_backward_fusion(both, prepend=True):
        x = X.clone().requires_grad_()
        assert_fused(scales(4), x, joint={"both": 2}, forward={"scales": 0})
        assert_fused(scales(4), X, joint={"both": 2})


def test_to_assert_nothing_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"that it is given\. Received: no fusion\. Name what"):
        assert_fused(scales(), X.clone().requires_grad_(), joint={})


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ({"forward": {"scales": 2}}, "Expected fusion 'scales' 2 times in stage forward, found 1."),
        ({"forward": {"scales": 0}}, "Expected fusion 'scales' 0 times in stage forward, found 1."),
        ({"backward": {"scales": 1}}, "'scales' 1 time in stage backward, found 0."),
        ({"joint": {"back": 1}}, "'back' 1 time in stage joint, found 0."),
        (
            {"forward": {"scale": 1}},
            "No fusion 'scale' was tried when the plan was made. Choose among: scales",
        ),
    ],
)
def test_texts_of_assert_fused(stages: Any, text: str) -> None:
    with pytest.raises(AssertionError) as error:
        assert_fused(scales(), X.clone().requires_grad_(), **stages)
    assert text in str(error.value)
    assert ("\nPlan for 2 basic operations" in str(error.value)) == text.endswith(".")


@pytest.mark.parametrize(
    ("second", "texts"),
    [
        (Identity(), ("[SUMMARY] matches=0 refused=1", "\n  op 0: DTYPE: only bf16\n")),
        (ConstantScale(2.0), ("\n  closest: 1 of 2 at op 0; LAYOUT: Identity is expected",)),
    ],
)
def test_the_text_gives_the_reasons(second: nn.Module, texts: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError) as error:
        assert_fused(opfuser.Sequential(Identity(), second), X, forward={"picky": 1})
    assert all(text in str(error.value) for text in texts)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("picky", "DTYPE"),
        ("scales", "LAYOUT"),
        ("cuda", "DEVICE"),
        ("missing", "MISSING_PACKAGE"),
        ("back", "NO_GRAD"),
    ],
)
def test_reasons_of_all_kinds(name: str, code: str) -> None:
    seq = opfuser.Sequential(Identity(), Identity(), ConstantScale(2.0), Identity())
    assert_not_fused(seq, name, X)
    assert_not_fused(seq, name, X, code=code)
    with pytest.raises(
        AssertionError, match=f"Expected fusion '{name}' to decline with SHAPE, got {code}"
    ):
        assert_not_fused(seq, name, X, code="SHAPE")


@pytest.mark.parametrize(
    ("ops", "name", "text"),
    [
        ([Identity()], "scales", "to decline with DTYPE, got no reason"),
        (scales(4), "scales", "Expected fusion 'scales' not to match, found 2"),
        (scales(), "scale", r"No fusion 'scale' was tried.*Choose among: scales\.$"),
    ],
)
def test_texts_of_assert_not_fused(ops: Any, name: str, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        assert_not_fused(opfuser.Sequential(*ops), name, X, code="DTYPE")


def test_inputs_of_a_model_are_an_error() -> None:
    text = r"Received: Sequential and 1 input\. Call the model first and pass no inputs; or"
    with pytest.raises(ArgumentError, match=text):
        assert_fused(nn.Sequential(scales()), X, forward={"scales": 1})
