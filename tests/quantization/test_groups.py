"""GroupedLinear on operands of a recipe, against a quantized BasicLinear for each group."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import GroupedLinear
from opfuser.errors import ArgumentError, InputError, QuantizedWeightError
from opfuser.gemm.row_groups import groups_on_host
from opfuser.quantization import quantizers
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8PredictedScaling,
    Float8RowwiseScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from tests.basic.values import saved_by
from tests.contract.gradients import handed_over
from tests.quantization.test_values import (
    CURRENT,
    RECIPES,
    SMALL_BLOCKS,
    error,
    every_recipe,
)

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated:UserWarning")

# Gradients that are rounded stochastically differ from call to call.
REPEATABLE = (*RECIPES, MXFP8BlockScaling(), NVFP4BlockScaling(disable_stochastic_rounding=True))
each_repeatable = pytest.mark.parametrize("recipe", REPEATABLE, ids=lambda r: type(r).__name__)

STACKED = pytest.mark.parametrize("single", [False, True], ids=["separate", "stacked"])
GROUPS, IN, OUT = 3, 256, 128
SIZES = [5, 0, 130], [128, 256, 7], [0, 1, 0], [0, 0, 0], [33, 128, 17]


def grouped(device: torch.device, **how: Any) -> GroupedLinear:
    torch.manual_seed(1)
    op = GroupedLinear(GROUPS, IN, OUT, device=device, **how)
    with torch.no_grad():
        for matrix in matrices(op):
            matrix.uniform_(-1, 1)[0, 0] = 2.0
        for name, p in op.named_parameters():
            if name.startswith("bias"):
                nn.init.normal_(p)
    return op


def matrices(op: GroupedLinear) -> list[Tensor]:
    ws = [p for name, p in op.named_parameters() if name.startswith("weight")]
    return list(ws[0]) if op.single_grouped_weight else list(ws)


def alike(sizes: Sequence[int], features: int, op: GroupedLinear) -> Tensor:
    """Rows whose groups have one amax, as the weights of :func:`grouped` have: one scale fits."""
    x = torch.rand(sum(sizes), features).sub_(0.5).to(matrices(op)[0])
    for start, size in zip(itertools.accumulate([0, *sizes]), sizes):
        if size:
            x[start, 3] = 1.5
    return x


def run(op: Any, x: Tensor, sizes: Sequence[int], dy: Tensor, recipe: Recipe) -> list[Tensor]:
    """Output, and gradients of the input and of the parameters, of the second of two calls."""
    for _ in range(2):
        own = x.clone().requires_grad_()
        with opfuser.autocast(recipe=recipe):
            y = op(own, torch.tensor(sizes))
        grads = torch.autograd.grad(y, [own, *op.parameters()], dy)
    return [y.detach(), *grads]


def group_by_group(
    op: GroupedLinear, x: Tensor, sizes: Sequence[int], dy: Tensor, recipe: Recipe
) -> list[Tensor]:
    """The same from a BasicLinear for each group: output, dx, and dW of each."""
    found = []
    for w, xs, dys in zip(matrices(op), x.split(list(sizes)), dy.split(list(sizes))):
        linear = opfuser.BasicLinear(IN, OUT, device=x.device, dtype=x.dtype)
        linear.weight = nn.Parameter(w.detach().clone())
        for _ in range(2):
            own = xs.clone().requires_grad_()
            with opfuser.autocast(recipe=recipe):
                y = linear(own)
            grads = torch.autograd.grad(y, [own, linear.weight], dys)
        found.append([y.detach(), *grads])
    ys, dxs, dws = zip(*found)
    return [torch.cat(ys), torch.cat(dxs), *dws]


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        assert own.dtype == other.dtype
        eps = torch.finfo(own.dtype).eps
        scale = other.abs().max().item() if other.numel() else 1.0
        torch.testing.assert_close(own, other, rtol=0, atol=16 * eps * max(scale, 1.0))


@each_repeatable
@STACKED
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_group_is_a_linear_operation(
    sizes: list[int], single: bool, recipe: Recipe, device: torch.device
) -> None:
    dtype = torch.bfloat16 if single else torch.float32
    op = grouped(device, bias=False, single_grouped_weight=single, dtype=dtype)
    x, dy = alike(sizes, IN, op), alike(sizes, OUT, op)
    got = run(op, x, sizes, dy, recipe)
    if single:
        got[2:] = list(got[2])
    assert_same(got, group_by_group(op, x, sizes, dy, recipe))


@pytest.mark.parametrize("recipe", [CURRENT, *REPEATABLE[-2:]], ids=lambda r: type(r).__name__)
@STACKED
def test_each_weight_has_its_own_scale(single: bool, recipe: Recipe, device: torch.device) -> None:
    sizes = [33, 0, 130]
    op = grouped(device, bias=False, single_grouped_weight=single, dtype=torch.float32)
    with torch.no_grad():
        for n, matrix in enumerate(matrices(op)):
            matrix.mul_(3.0 ** (5 * n))
    x, dy = alike(sizes, IN, op), alike(sizes, OUT, op)
    got, want = run(op, x, sizes, dy, recipe), group_by_group(op, x, sizes, dy, recipe)
    for own, other in zip(got[:2], want):
        for of_group, alone in zip(own.split(sizes), other.split(sizes)):
            assert_same([of_group], [alone])


def group_errors(
    op: GroupedLinear, x: Tensor, sizes: Sequence[int], dy: Tensor, got: Sequence[Tensor]
) -> list[tuple[float, float, float]]:
    """Of the output, dx and dW of each group, against float64; without rows all are 0."""
    ys, dxs, xs, dys = (t.double().split(list(sizes)) for t in (got[0], got[1], x, dy))
    dws = got[2] if op.single_grouped_weight else got[2:]
    return [
        (error(ys[g], xs[g] @ w.t()), error(dxs[g], dys[g] @ w), error(dws[g], dys[g].t() @ xs[g]))
        for g, w in enumerate(m.detach().double() for m in matrices(op))
    ]


@pytest.mark.parametrize(
    "recipe",
    [
        *(RECIPES + SMALL_BLOCKS),
        Float8BlockScaling(wgrad_x_block_scaling_dim=1),
        MXFP8BlockScaling(fp8_format=Format.HYBRID),
        NVFP4BlockScaling(disable_rht=True, disable_2d_quantization=True),
        Float8RowwiseScaling(),
        Float8RowwiseScaling(fp8_format=Format.HYBRID),
    ],
    ids=str,
)
def test_each_group_is_as_close_as_its_format(recipe: Recipe, device: torch.device) -> None:
    """Groups are of sizes so different that the scales of another one show in a single group."""
    e4m3 = 0.25 if recipe.nvfp4() else 0.06
    of_gradients = 0.08 if recipe.dtype("grad_output") == torch.float8_e5m2 else e4m3
    features = (256, 128) if recipe.multiple == 128 else (96, 160)
    for sizes in ([1, 17, 0, 33, 128, 130, 0], [0, 130, 128, 33, 1], [17, 0, 0]):
        op = GroupedLinear(len(sizes), *features, bias=False, device=device)
        x, dy = (torch.randn(sum(sizes), n, device=device) for n in features)
        for g, at in enumerate(groups_on_host(torch.tensor(sizes), x).bounds or ()):
            x[slice(*at)] *= 2.0 ** (2 * (g % 3) - 2)
            dy[slice(*at)] *= 2.0 ** (2 - 2 * (g % 3))
        got = run(op, x, sizes, dy, recipe)
        for size, of_group in zip(sizes, group_errors(op, x, sizes, dy, got)):
            assert of_group[0] < e4m3, (sizes, size)
            assert max(of_group) < of_gradients, (sizes, size)


@every_recipe
@STACKED
def test_experts(recipe: Recipe, single: bool) -> None:
    """Two products in a row: what the first leaves in padding or in another group shows."""
    sizes, how = [17, 0, 130, 1], {"single_grouped_weight": single, "bias": not single}
    seq = opfuser.Sequential(
        GroupedLinear(4, 128, 256, **how), opfuser.ScaledSwiGLU(), GroupedLinear(4, 128, 128, **how)
    )
    exact, split = copy.deepcopy(seq).double(), torch.tensor(sizes)
    x, scales, dy = torch.randn(148, 128), torch.rand(148), torch.randn(148, 128)
    found = []
    for model, own in ((seq, recipe), (exact, None)):
        dtype = next(model.parameters()).dtype
        inputs = [t.to(dtype).requires_grad_() for t in (x, scales)]
        with opfuser.autocast(own is not None, recipe=own):
            y = model(inputs[0], split, inputs[1], split)
        grads = torch.autograd.grad(y, [*inputs, *model.parameters()], dy.to(dtype))
        of_rows = [part for t in (y, grads[0]) for part in t.split(sizes)]
        found.append([*of_rows, *grads[1:]])
    for got, true in zip(*found, strict=True):
        assert error(got, true) < (0.42 if recipe.nvfp4() else 0.125)


@pytest.mark.parametrize(
    "recipe", [*RECIPES, *SMALL_BLOCKS, Float8RowwiseScaling()], ids=lambda r: type(r).__name__
)
def test_bias_and_its_scales_are_those_of_high_precision(
    recipe: Recipe, device: torch.device
) -> None:
    sizes, results = torch.tensor([5, 0, 130]), []
    op = grouped(device, scale_bias=True, dtype=torch.float32)
    scales = torch.rand(135, device=device)
    x, dy = torch.randn(135, IN, device=device), torch.randn(135, OUT, device=device)
    with torch.no_grad():
        for w in matrices(op):
            w.zero_()
    for enabled in (True, False):
        own = scales.clone().requires_grad_()
        with opfuser.autocast(enabled, recipe=recipe):
            y = op(x, sizes, own)
        biases = [p for name, p in op.named_parameters() if name.startswith("bias")]
        results.append([y.detach(), *torch.autograd.grad(y, [own, *biases], dy)])
    assert_same(*results)


def test_the_plan_and_its_refusals() -> None:
    def plan(op: Any, x: Tensor, recipe: Recipe = CURRENT) -> opfuser.Plan:
        with opfuser.autocast(recipe=recipe):
            return opfuser.Sequential(op).plan(x, torch.tensor([2, 3]))

    op, x = GroupedLinear(2, 32, 16), torch.randn(5, 32)
    found = plan(op, x)
    assert (found.quantized, found.high_precision) == ((0,), ())
    assert found.fused("forward") == {"quantized_grouped_linear": 1}
    refused = plan(op, x, Float8BlockScaling())
    assert "not op 0: SHAPE: its features, (16, 32), are not multiples of 128" in str(refused)
    codes = [why.code for _, why in plan(GroupedLinear(2, 32, 20), x).high_precision]
    assert codes == ["SHAPE"]
    codes = [why.code for _, why in plan(copy.deepcopy(op).double(), x.double()).high_precision]
    assert codes == ["DTYPE"]
    op.recipe = None
    assert [why.code for _, why in plan(op, x).high_precision] == ["NO_RECIPE"]
    op.recipe = "inherit"
    with opfuser.disable("quantized_grouped_linear"):
        assert [why.code for _, why in plan(op, x).high_precision] == ["CONFLICT"]
    op.recipe = "fp8"
    with pytest.raises(ArgumentError, match="The recipe of an operation is 'inherit' or None"):
        op(x, torch.tensor([2, 3]))


def test_errors_are_those_of_the_operation() -> None:
    op, x = GroupedLinear(2, 32, 16), torch.randn(5, 32)
    with opfuser.autocast(recipe=CURRENT):
        with pytest.raises(InputError, match="must not be negative, and add up to the number of"):
            op(x, torch.tensor([2, 4]))
        op.weight1 = None
        with pytest.raises(ArgumentError, match="Every group needs its weight"):
            op(x, torch.tensor([2, 3]))


def test_kept_scales_are_one_for_all_groups() -> None:
    op = grouped(torch.device("cpu"), bias=False)
    with torch.no_grad():
        matrices(op)[1][0, 0] = 8.0  # neither the first nor the last
    sizes, x = torch.tensor([5, 0, 130]), torch.randn(135, IN)
    seq: Any = opfuser.Sequential(op)
    with opfuser.autocast(recipe=Float8PredictedScaling()):
        seq(x, sizes).sum().backward()
    # The first scales come from the tensors of the first call.
    assert op.quantization.scale.tolist() == pytest.approx(
        [448 / x.abs().max().item(), 448 / 8, 57344 / 1]
    )
    with opfuser.autocast(recipe=DelayedScaling(amax_history_len=4)):
        seq(x, sizes).sum().backward()
    with opfuser.autocast(recipe=DelayedScaling(amax_history_len=4)):
        assert op.quantization.scale[1].item() == 448 / 8
    keys = [key for key in seq.state_dict() if "quantization" in key]
    assert keys == [f"0.quantization.{key}" for key in ("scale", "amax_history", "amax")]
    fresh = opfuser.Sequential(GroupedLinear(GROUPS, IN, OUT, bias=False))
    fresh.load_state_dict(seq.state_dict())
    again = []
    for own in (seq, fresh):
        with opfuser.autocast(recipe=DelayedScaling(amax_history_len=4)):
            again.append(own(x, sizes))
    torch.testing.assert_close(*again, rtol=0, atol=0)


def noted_roles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of all that is quantized from now on."""
    roles: list[str] = []
    for name in ("quantize", "quantize_groups"):
        original = getattr(quantizers.OperandQuantizer, name)

        def noted(self: Any, role: str, *args: Any, by: Any = original, **how: Any) -> Any:
            roles.append(role)
            return by(self, role, *args, **how)

        monkeypatch.setattr(quantizers.OperandQuantizer, name, noted)
    return roles


@STACKED
@each_repeatable
def test_kept_weights(recipe: Recipe, single: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is quantized once for all micro-batches, in both layouts."""
    op = grouped(torch.device("cpu"), bias=False, single_grouped_weight=single)
    sizes, x, dy = [5, 0, 130], torch.randn(135, IN), torch.randn(135, OUT)
    wanted = run(copy.deepcopy(op), x, sizes, dy, recipe)
    roles = noted_roles(monkeypatch)
    with opfuser.keep_quantized_weights():
        got = run(op, x, sizes, dy, recipe)
        assert roles.count("weight") == 1
        with torch.no_grad():
            next(op.parameters()).mul_(2)
        with opfuser.autocast(recipe=recipe), pytest.raises(QuantizedWeightError):
            op(x, torch.tensor(sizes))
    if not isinstance(recipe, (DelayedScaling, Float8PredictedScaling)):
        assert_same(got, wanted)  # their scales are those of the call that quantized them


@pytest.mark.parametrize(
    ("recipe", "single", "delay"),
    [
        (CURRENT, False, True), (CURRENT, True, False), (REPEATABLE[-2], False, False),
        (REPEATABLE[-2], True, True), (REPEATABLE[-1], True, True), (REPEATABLE[-1], False, False),
    ],
)  # fmt: skip
def test_fp32_main_grad_of_bf16_weights(recipe: Recipe, single: bool, delay: bool) -> None:
    """Not rounded to bf16 on the way; overwritten by the first of a pass, if asked for."""
    how: Any = {"bias": False, "single_grouped_weight": single}
    op = grouped(
        torch.device("cpu"),
        dtype=torch.bfloat16,
        accumulate_into_main_grad=True,
        delay_wgrad_compute=delay,
        **how,
    )
    wide = grouped(torch.device("cpu"), **how)
    sizes = [5, 0, 130]
    x, dy = torch.randn(135, IN).bfloat16(), torch.randn(135, OUT).bfloat16()
    with torch.no_grad():
        for p, q in zip(wide.parameters(), op.parameters()):
            p.copy_(q)
    _, _, *dws = run(wide, x.float(), sizes, dy.float(), recipe)
    for overwrite in (False, True):
        for p in op.parameters():
            p.main_grad = torch.ones(p.shape)
            p.overwrite_main_grad = overwrite
        with opfuser.autocast(recipe=recipe):
            y = op(x, torch.tensor(sizes))
        y.backward(dy)
        if delay:
            assert all(p.main_grad.eq(1).all() for p in op.parameters())
            op.backward_dw()
        for p, dw in zip(op.parameters(), dws):
            want = dw if overwrite else 1 + dw
            torch.testing.assert_close(p.main_grad, want, rtol=1e-5, atol=1e-4)
            assert p.grad_added_to_main_grad


@STACKED
@pytest.mark.parametrize("delay", [False, True])
def test_grad_accumulates_over_micro_batches(single: bool, delay: bool) -> None:
    """By autograd, also where GEMMs of other operands would add to it: none of codes does."""
    how: Any = {"bias": False, "single_grouped_weight": single}
    device = torch.device("cpu")
    op = grouped(device, accumulate_into_grad=True, delay_wgrad_compute=delay, **how)
    exact = [torch.ones_like(p) for p in op.parameters()]
    for p in op.parameters():
        p.grad = torch.ones_like(p)
    for sizes in ([5, 0, 130], [0, 7, 1]):
        x, dy = torch.randn(sum(sizes), IN), torch.randn(sum(sizes), OUT)
        _, _, *dws = run(grouped(device, **how), x, sizes, dy, CURRENT)
        exact = [total + dw for total, dw in zip(exact, dws)]
        with opfuser.autocast(recipe=CURRENT):
            y = op(x, torch.tensor(sizes))
        told = handed_over(y, next(op.parameters()))
        y.backward(dy)
        assert told == [not delay]
        op.backward_dw()
    assert_same([p.grad for p in op.parameters() if p.grad is not None], exact)


def test_results_in_memory_of_the_caller() -> None:
    op, sizes = grouped(torch.device("cpu")), torch.tensor([5, 0, 130])
    x, dy = torch.randn(135, IN), torch.randn(135, OUT)
    found = []
    for buffers in (False, True):
        own = x.clone().requires_grad_()
        how = {"output": torch.empty(135, OUT), "grad_input": torch.empty(135, IN)}
        with opfuser.autocast(recipe=CURRENT):
            y = op(own, sizes, **(how if buffers else {}))
        dx, dw = torch.autograd.grad(y, [own, op.weight2], dy)
        found.append([y.detach(), dx, dw])
        if buffers:
            assert y.data_ptr() == how["output"].data_ptr()
            torch.testing.assert_close(how["grad_input"], dx, rtol=0, atol=0)
    assert_same(*found)


def test_saves_one_byte_for_each_input_with_padding() -> None:
    op, sizes = grouped(torch.device("cpu"), bias=False), torch.tensor([5, 0, 130])
    with opfuser.autocast(recipe=CURRENT):
        saved = saved_by(lambda: op(torch.randn(135, IN), sizes))
    weights = {p.data_ptr() for p in op.parameters()}
    kept = sum(t.nbytes for t in saved if t.data_ptr() not in weights)
    # The host does not know the sizes: a group may have a block that is not full.
    codes, scales = (135 // 128 + GROUPS) * 128 * IN, GROUPS * IN * 4
    ends = 2 * GROUPS * 4
    assert kept == codes + scales + ends + sizes.nbytes


@pytest.mark.gpu
@each_repeatable
def test_split_sizes_on_a_gpu(recipe: Recipe, device: torch.device) -> None:
    x = torch.randn(135, IN, dtype=torch.bfloat16, device=device)
    sizes, found = torch.tensor([5, 0, 130]), []
    for at in ("cpu", device):
        op, own = grouped(device, dtype=torch.bfloat16), x.clone().requires_grad_()
        with opfuser.autocast(recipe=recipe):
            y = op(own, sizes.to(at))
        found.append([y.detach(), *torch.autograd.grad(y.sum(), [own, *op.parameters()])])
    assert_same(*found)
