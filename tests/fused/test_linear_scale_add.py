from __future__ import annotations

import pytest
import torch

from opfuser import AddExtraInput, BasicLinear, ConstantScale, Sequential
from opfuser.errors import InputError
from opfuser.fused import ForwardLinearScaleAdd
from tests.fused.pairings import (
    DTYPES,
    LAYOUTS,
    Case,
    build,
    check_pairings,
    only,
    plan_of,
    stopped_by,
    with_subclass,
)
from tests.fused.sharded import hand_built, refusals_when_sharded

NAME = "forward_linear_scale_add"
BACKWARD = "backward_linear_scale"


def lora(scale: float, in_place: bool = False) -> Case:
    return Case(
        lambda: [BasicLinear(6, 4), ConstantScale(scale), AddExtraInput(in_place=in_place)],
        6,
        (4,),
        {NAME: 1},
        {BACKWARD: 1},
    )


SEVERAL = Case(
    lambda: [
        BasicLinear(6, 4),
        BasicLinear(4, 5),
        ConstantScale(-2),
        AddExtraInput(),
        BasicLinear(5, 3),
        ConstantScale(0.3),
        AddExtraInput(),
        ConstantScale(1.5),
    ],
    6,
    (5, 3),
    {NAME: 2},
    {BACKWARD: 2},
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pairings(dtype: torch.dtype, layout: str) -> None:
    check_pairings(lora(0.3), dtype, LAYOUTS[layout])


@pytest.mark.parametrize("scale", [0.0, 1, -2.5, 1e-3])
@pytest.mark.parametrize("in_place", [False, True])
def test_scales_and_permissions(scale: float, in_place: bool) -> None:
    check_pairings(lora(scale, in_place), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_again_and_inside_longer_sequences(dtype: torch.dtype) -> None:
    check_pairings(SEVERAL, dtype)


@pytest.mark.parametrize("frozen", [[], ["0.weight"]], ids=str)
@pytest.mark.parametrize("input_grad", [True, False])
def test_gradients_that_nobody_needs(frozen: list[str], input_grad: bool) -> None:
    case = lora(0.3)
    if frozen and not input_grad:  # then only the residual needs one
        case = case._replace(backward={})
    check_pairings(case, torch.float32, frozen=frozen, input_grad=input_grad)


@pytest.mark.parametrize("extra_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(extra_dtype: torch.dtype) -> None:
    check_pairings(SEVERAL, torch.float32, autocast=torch.bfloat16, extra_dtype=extra_dtype)


@pytest.mark.parametrize("extra_dtype", DTYPES, ids=str)
def test_residual_of_another_dtype(extra_dtype: torch.dtype) -> None:
    check_pairings(lora(0.3), torch.bfloat16, extra_dtype=extra_dtype)


def test_the_scale_is_part_of_the_plan() -> None:
    seq = build(lora(0.5), torch.float32)
    x, z = torch.randn(3, 6), torch.randn(3, 4)
    seq(x, z)
    seq[1].scale = 2.0
    torch.testing.assert_close(seq(x, z), z + 2 * (x @ seq[0].weight.t()))


@pytest.mark.parametrize(("at", "code"), [(0, None), (1, "SUBCLASS"), (2, "SUBCLASS")])
def test_a_subclass_is_not_matched(at: int, code: str | None) -> None:
    ops = with_subclass([BasicLinear(6, 4), ConstantScale(2.0), AddExtraInput()], at)
    plan = plan_of(*ops, extras=[4])
    assert NAME not in plan.fused("forward")
    assert stopped_by(plan, NAME) == code


def test_sharding_is_refused_only_where_the_output_is_reduced() -> None:
    assert refusals_when_sharded(
        NAME, lambda linear: [linear, ConstantScale(2.0), AddExtraInput()], 4
    ) == {
        "column": None,
        "column, sequence-parallel": None,
        "row": "tensor-parallel BasicLinear in row mode communicates right after its forward GEMM",
        "row, sequence-parallel": "sequence-parallel BasicLinear in row mode communicates right "
        "after its forward GEMM",
    }


def test_placed_by_hand() -> None:
    linear, scale, add = BasicLinear(6, 4), ConstantScale(0.5), AddExtraInput()
    fused = ForwardLinearScaleAdd(linear=linear, scale=scale, add=add)
    assert list(fused.basic_ops) == [linear, scale, add]
    x, z = torch.randn(3, 6), torch.randn(3, 4)
    y = Sequential(fused)(x, z)
    torch.testing.assert_close(y, z + 0.5 * (x @ linear.weight.t()))


def test_a_residual_of_another_shape_is_an_error() -> None:
    seq = build(lora(0.3), torch.float32)
    for z in (torch.randn(4), torch.randn(1, 4), torch.randn(3, 5)):
        with pytest.raises(InputError, match="must have the same shape") as fused:
            seq(torch.randn(3, 6), z)
        with only(forward=False), pytest.raises(InputError) as separate:
            seq(torch.randn(3, 6), z)
        text, place = str(fused.value).split(" It came to ")
        assert place == "op 0-2 (ForwardLinearScaleAdd) of the sequence."
        assert str(separate.value) == f"{text} It came to op 2 (AddExtraInput) of the sequence."


def test_sharding_is_refused_by_the_constructor_too() -> None:
    raised = hand_built(
        lambda linear: ForwardLinearScaleAdd(
            linear=linear, scale=ConstantScale(2.0), add=AddExtraInput()
        )
    )
    assert [name for name, text in raised.items() if text] == ["row", "row, sequence-parallel"]
    assert "(ForwardLinearScaleAdd). Leave the operations separate" in raised["row"]
