"""Groups whose sizes only the device knows: nothing reads them, and nothing is done for each."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import opfuser
from opfuser import GroupedLinear
from opfuser.basic import scaled_activation
from opfuser.gemm import scaled_groups
from opfuser.kernels import grouped_products
from opfuser.kernels.groups import Grouped, group_ends
from opfuser.kernels.launch import recorded
from opfuser.models.moe import MoEConfig, experts
from opfuser.quantization.quantizers import OperandQuantizer
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8PredictedScaling,
    Float8RowwiseScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated:UserWarning")

RECIPES: tuple[Recipe, ...] = (
    Float8RowwiseScaling(),
    Float8RowwiseScaling(fp8_format=Format.HYBRID),
    Float8CurrentScaling(),
    DelayedScaling(),
    Float8PredictedScaling(),
    Float8BlockScaling(),
    Float8BlockScaling(wgrad_x_block_scaling_dim=1),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(disable_stochastic_rounding=True),
)
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
STACKED = pytest.mark.parametrize("single", [False, True], ids=["separate", "stacked"])
META, BF16 = torch.device("meta"), torch.bfloat16


class Operators(TorchDispatchMode):
    """Notes what torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def a_step(
    op: GroupedLinear, recipe: Recipe | None, groups: int, rows: int = 256
) -> tuple[list[str], list[str]]:
    """Launches and operators of the second of two steps without data, in which nothing is read."""
    x = torch.empty(rows, 128, device=META, dtype=BF16, requires_grad=True)
    sizes = torch.empty(groups, device=META, dtype=torch.int64)
    for _ in range(2):
        # Entered first: a region may update the scales of operations of other tests.
        region, operators = opfuser.autocast(recipe is not None, recipe=recipe), Operators()
        with region, recorded(only_meta=True) as launches, operators:
            y = op(x, sizes)
            torch.autograd.grad(y, [x, *op.parameters()], torch.empty_like(y))
    assert y.shape == (rows, 256)
    return [launch.launch.name for launch in launches], operators.names


@each_recipe
@STACKED
def test_no_size_is_read_and_no_launch_is_that_of_a_group(recipe: Recipe, single: bool) -> None:
    """Tensors without data raise an error where the host reads one."""
    found = []
    for groups in (2, 62):  # of blocks so many that none needs scales of padding
        op = GroupedLinear(
            groups, 128, 256, bias=False, device=META, dtype=BF16, single_grouped_weight=single
        )
        launches, operators = a_step(op, recipe, groups)
        views = {"aten.unbind.int", "aten.detach.default", "aten.alias.default"}
        found.append((launches, [name for name in operators if name not in views]))
    assert found[0] == found[1]
    launches, operators = found[0]
    assert "aten._local_scalar_dense.default" not in operators
    assert "aten.cumsum.default" not in operators
    products = [name for name in launches if name.startswith("grouped_products")]
    assert products == [
        "grouped_products:rows_by_matrices",
        "grouped_products:rows_by_matrices",
        "grouped_products:columns_by_columns",
    ]
    assert launches.count("groups:ends") == 1


def test_groups_are_located_once_for_both_passes() -> None:
    op = GroupedLinear(4, 128, 256, bias=False, device=META, dtype=BF16)
    launches, operators = a_step(op, None, 4)
    assert launches == ["groups:ends"]
    assert operators.count("aten._grouped_mm.default") == 3
    assert "aten.cumsum.default" not in operators


# With 2048 rows of a group on average torch's kernel computes the gradients, too.
@pytest.mark.parametrize("rows", [4 * 2048 - 1, 4 * 2048], ids=["few rows", "many rows"])
@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Float8RowwiseScaling(), 3),
        (DelayedScaling(fp8_format=Format.E4M3), 3),
        (Float8CurrentScaling(fp8_format=Format.E4M3), 3),
        (DelayedScaling(), 1),  # no gradients in E5M2
        (Float8BlockScaling(), 0),
    ],
    ids=str,
)
def test_what_the_grouped_gemm_of_torch_is_given(
    recipe: Recipe, expected: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its meta function checks dtypes, layouts, strides and numbers of scales."""
    calls: list[dict[str, Any]] = []
    multiply = torch._scaled_grouped_mm

    def noted(*args: Tensor, **how: Any) -> Tensor:
        calls.append(how)
        return multiply(*args, **how)

    def takes(device: torch.device, *dtypes: torch.dtype) -> bool:
        return dtypes == (torch.float8_e4m3fn, torch.float8_e4m3fn, BF16)

    monkeypatch.setattr(grouped_products.internals, "scaled_grouped_mm", noted)
    monkeypatch.setattr(grouped_products, "takes_scaled_grouped_mm", takes)
    op = GroupedLinear(4, 128, 256, bias=False, device=META, dtype=BF16)
    a_step(op, recipe, 4, rows)
    expected = 1 if expected == 3 and rows < 4 * 2048 else expected
    assert len(calls) == 2 * expected
    # Only forward leaves the rounding of sums to the GPU.
    assert [how["use_fast_accum"] for how in calls[:expected]] == [True, False, False][:expected]
    assert all(how["offs"].shape == (4,) and how["offs"].is_contiguous() for how in calls)


def test_which_gpus_have_the_grouped_gemm_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    takes = grouped_products.takes_scaled_grouped_mm.__wrapped__
    e4m3, e5m2, cuda = torch.float8_e4m3fn, torch.float8_e5m2, torch.device("cuda", 0)
    for capability, expected in (((9, 0), True), ((8, 9), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)  # noqa: B023
        assert takes(cuda, e4m3, e4m3, BF16) is expected
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not takes(cuda, e5m2, e4m3, BF16)
    assert not takes(cuda, e4m3, e4m3, torch.float32)
    assert not takes(META, e4m3, e4m3, BF16)
    monkeypatch.setattr(grouped_products.internals, "scaled_grouped_mm", None)
    assert not takes(cuda, e4m3, e4m3, BF16)


def test_other_linear_operations_compute_without_it() -> None:
    seq = opfuser.Sequential(opfuser.Linear(32, 32), GroupedLinear(2, 32, 32))
    x, sizes = torch.randn(5, 32), torch.tensor([2, 3])
    with opfuser.autocast(recipe=Float8RowwiseScaling()):
        plan = seq.plan(x, sizes)
    assert plan.quantized == (2,)
    assert "NO_RECIPE: Float8RowwiseScaling is for groups of rows" in str(plan)
    linear = opfuser.Sequential(opfuser.Linear(32, 32))
    with opfuser.autocast(recipe=Float8RowwiseScaling()):
        y = linear(x)
    torch.testing.assert_close(y, linear(x), rtol=0, atol=0)


def test_rows_behind_the_last_group_have_no_part_in_scales() -> None:
    """They are nobody's: as a buffer of fixed capacity has them, their values may be anything."""
    x = torch.randn(200, 64)
    x[150:] = float("nan")
    ends = group_ends(torch.tensor([50, 100]), 200)
    quantizer = OperandQuantizer(GroupedLinear(2, 64, 64), Float8CurrentScaling())
    codes = quantizer.quantize_groups("input", x, Grouped(2, ends), rows=True, cols=True)
    alone = quantizer.quantize_groups("input", x[:150], Grouped(2, ends), rows=True, cols=True)
    assert torch.equal(codes.rows[:150].view(torch.uint8), alone.rows.view(torch.uint8))
    assert torch.equal(codes.cols[:, :256].view(torch.uint8), alone.cols[:, :256].view(torch.uint8))


@each_recipe
def test_rows_are_quantized_as_they_are_gathered(recipe: Recipe) -> None:
    """Output and all gradients are those of rows that are copied first, bit for bit."""
    found = []
    for copied in (False, True):
        torch.manual_seed(0)
        config = MoEConfig(dim=128, ffn_dim=128, num_experts=4, top_k=2, init_std=0.3)
        model = experts(config)
        x = torch.randn(50, 128, requires_grad=True)
        with opfuser.autocast(recipe=recipe):
            plan = model.plan(x)
            # What is watched is handed on as tensors.
            with opfuser.watch_quantization() if copied else contextlib.nullcontext():
                y = model(x)
        found.append([y.detach(), *torch.autograd.grad(y.sin().sum(), [x, *model.parameters()])])
        edges = [edge for edge in plan.edges if edge.stage == "forward"]
        assert [(edge.source, edge.target) for edge in edges] == [(4, 5)]
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("recipe", "sizes", "expected"),
    [
        (Float8RowwiseScaling(), "sizes", True),
        (Float8RowwiseScaling(), "others", False),
        (Float8RowwiseScaling(fprop="bf16"), "sizes", False),
        (Float8RowwiseScaling(wgrad="bf16"), "sizes", False),
        (MXFP8BlockScaling(), "sizes", True),
    ],
    ids=str,
)
def test_which_rows_are_handed_on_as_codes(recipe: Recipe, sizes: str, expected: bool) -> None:
    """Only those of the groups that Permute makes: by other sizes they lie elsewhere."""
    permute, linear = opfuser.Permute(2, weighted=False), GroupedLinear(2, 128, 128)
    permute.set_extra_output_channel(1, "sizes", output_to_caller=False)
    x, indices = torch.randn(6, 128), torch.tensor([[0], [1], [1], [0], [1], [1]])
    given, split = [indices], torch.tensor([2, 4])
    if sizes == "sizes":
        linear.set_extra_input_channel(0, "sizes")
    else:
        split = torch.tensor([3, 3])
        given.append(split)
    seq = opfuser.Sequential(permute, linear)
    with opfuser.autocast(recipe=recipe):
        plan = seq.plan(x, *given)
        y = seq(x, *given)
        rows = x[indices.flatten().argsort(stable=True)]
        alone = GroupedLinear(2, 128, 128)
        alone.load_state_dict(linear.state_dict())
        want = alone(rows, split)
    assert bool([edge for edge in plan.edges if edge.stage == "forward"]) == expected
    torch.testing.assert_close(y[0], want, rtol=0, atol=0)


def test_backward_keeps_nothing_that_is_read_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensors of a step: gradients of pre-activations, and their codes by rows.

    The first lie where what forward saved did, and are gone with their codes by rows when the
    gradients of weights are computed.
    """
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def noted(module: Any, name: str, what: Callable[[Any, Any], Tensor]) -> None:
        function = getattr(module, name)

        def call(*args: Any, **how: Any) -> Any:
            result = function(*args, **how)
            made.append(weakref.ref(what(args, result)))
            return result

        monkeypatch.setattr(module, name, call)

    noted(scaled_activation, "gated_backward_", lambda _, grads: grads.dx)
    noted(scaled_groups, "rows_by_matrices", lambda args, _: args[0])
    columns = scaled_groups.columns_by_columns

    def count(*args: Any, **how: Any) -> Tensor:
        alive.append(sum(ref() is not None for ref in made))
        return columns(*args, **how)

    monkeypatch.setattr(scaled_groups, "columns_by_columns", count)
    model = experts(MoEConfig(128, 64, 4, 2, recipe=Float8RowwiseScaling()))
    x = torch.randn(9, 128, requires_grad=True)
    for _ in range(2):
        made.clear()
        model(x).sum().backward()
        assert len(made) == 5  # four products, and the gradient of the pre-activations
    assert alive == [0] * 4
