from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opfuser import GroupedLinear, gemm
from opfuser.errors import (
    ArgumentError,
    ExtraInputCountError,
    InputError,
    ReadOnlyAttributeError,
)
from opfuser.gemm.row_groups import groups_on_device
from opfuser.testing import check_op
from tests.basic.groups import STACKED, grouped
from tests.basic.values import check_values


@pytest.mark.parametrize(
    ("sizes", "single", "mode"),
    [
        ([3, 3, 3], False, "bias"),
        ([3, 3, 3], True, "scaled bias"),
        ([3, 3, 3], False, "scaled bias, transposed"),
        ([1, 6, 2], True, "bias, transposed"),
        ([0, 5, 0], True, "no bias, transposed"),
        ([1, 6, 2], False, "scaled bias"),
        ([1, 6, 2], True, "no bias"),
        ([0, 5, 0], True, "bias"),
        ([0, 5, 0], False, "no bias"),
        ([0, 0, 4], False, "scaled bias"),
        ([0, 0, 0], False, "bias"),
        ([0, 0, 0], True, "scaled bias"),
    ],
    ids=str,
)
def test_as_exact_as_torch(sizes: list[int], single: bool, mode: str, device: torch.device) -> None:
    op = grouped(
        # Of few numbers plain torch may round all well by chance.
        out_features=37,
        bias="no bias" not in mode,
        scale_bias="scaled bias" in mode,
        single_grouped_weight=single,
        single_grouped_bias=single,
        weight_transposed="transposed" in mode,
        device=device,
    )
    x = torch.randn(sum(sizes), 5, device=device)
    extras = [torch.tensor(sizes, device=device)]
    if op.scale_bias:
        extras.append(torch.rand(sum(sizes), device=device))
    # The split sizes are values, which would no longer add up to the number of rows.
    check_values(op, x, *extras, zero_rows=False)
    with torch.autocast(device.type, torch.bfloat16):
        check_op(op, x, *extras, zero_rows=False)


def test_rows_of_any_shape() -> None:
    x, sizes = torch.randn(3, 3, 5), torch.tensor([2, 3, 4])
    check_values(grouped(), x, sizes, dtypes=[torch.float64], zero_rows=False)
    check_values(grouped(), x[:1, :1].expand(3, 3, 5), sizes, zero_rows=False)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8], ids=str)
def test_split_sizes_of_any_integer_dtype(dtype: torch.dtype) -> None:
    op, x, sizes = grouped(), torch.randn(9, 5), torch.tensor([2, 3, 4])
    assert torch.equal(op(x, sizes.to(dtype)), op(x, sizes))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "scaled", "single", "transposed"),
    [
        ([16, 8, 24], False, False, False),
        ([16, 8, 24], True, True, True),
        ([1, 6, 2], True, False, True),
        ([1, 6, 2], False, True, False),
        ([0, 5, 0], False, False, True),
        ([0, 5, 0], True, True, False),
        ([0, 0, 0], True, False, False),
    ],
    ids=str,
)
def test_grouped_gemm_of_the_device(
    single: bool, scaled: bool, transposed: bool, sizes: list[int], no_waiting: Any
) -> None:
    op = grouped(
        in_features=32,
        out_features=16,
        scale_bias=scaled,
        single_grouped_weight=single,
        single_grouped_bias=single,
        weight_transposed=transposed,
        dtype=torch.bfloat16,
        device="cuda",
    )
    rows, exact = sum(sizes), copy.deepcopy(op).double()
    x = torch.randn(rows, 32, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(16, rows, device="cuda").bfloat16().t()
    scales = [torch.rand(rows, device="cuda", requires_grad=True)] if scaled else []
    where = torch.tensor(sizes, device="cuda", dtype=torch.int32)
    results = []
    with no_waiting() if rows else contextlib.nullcontext():
        y = op(x, where, *scales)
        results.append([y.detach(), *torch.autograd.grad(y, [x, *scales, *op.parameters()], dy)])
    leaves = [t.detach().double().requires_grad_() for t in (x, *scales)]
    y = exact.reference(leaves[0], where, *leaves[1:])
    leaves += exact.parameters()
    results.append([y.detach(), *torch.autograd.grad(y, leaves, dy.double())])
    for a, c in zip(*results):
        if c.numel():
            eps = torch.finfo(torch.bfloat16).eps
            assert (a.double() - c).abs().max() <= 1.5 * eps * c.abs().max()


@pytest.mark.parametrize("sizes", [[10, 0, 14], [24, 0, 0], [1, 2, 21]], ids=str)
def test_sizes_known_to_the_device_alone_give_the_same(sizes: list[int]) -> None:
    x, dy = torch.randn(24, 32).bfloat16(), torch.randn(16, 24).bfloat16().t()
    weights = [torch.randn(16, 32).bfloat16() for _ in sizes]
    lengths, table = torch.tensor(sizes, dtype=torch.int32), torch.randn(3, 16)
    host, device = gemm.row_groups(lengths, x, ""), groups_on_device(lengths, 24)
    assert host.bounds is not None
    assert device.bounds is None

    def results(groups: gemm.RowGroups, weights: Tensor | list[Tensor]) -> list[Tensor]:
        buffers = [(torch.ones(16, 32), True), None, (torch.ones(16, 32), False)]
        gemm.grouped_wgrad_into(buffers, dy, x, groups)
        return [
            gemm.grouped_forward(x, weights, groups),
            gemm.grouped_dgrad(dy, weights, groups),
            *gemm.grouped_wgrad(dy, x, groups, stacked=False),
            *gemm.grouped_wgrad(dy, x, groups, stacked=True),
            groups.sum(dy.float()),
            groups.spread(table, 24),
            *[buffer[0] for buffer in buffers if buffer is not None],
        ]

    expected = results(host, weights)
    for given in (weights, torch.stack(weights)):
        torch.testing.assert_close(results(device, given), expected, rtol=0.02, atol=0.02)


def test_extra_inputs_follow_scale_bias() -> None:
    assert grouped().num_extra_inputs == 1
    assert grouped(scale_bias=True).num_extra_inputs == 2
    assert grouped(scale_bias=True, bias=False).num_extra_inputs == 1
    with pytest.raises(ExtraInputCountError):
        grouped(scale_bias=True)(torch.randn(9, 5), torch.tensor([4, 0, 5]))


def test_scales_keep_their_shape_and_dtype_in_the_gradient() -> None:
    op = grouped(scale_bias=True, dtype=torch.bfloat16)
    scales = torch.rand(9, 1, requires_grad=True)
    op(torch.randn(9, 5).bfloat16(), torch.tensor([4, 0, 5]), scales).sum().backward()
    assert scales.grad is not None
    assert (scales.grad.shape, scales.grad.dtype) == ((9, 1), torch.float32)
    assert op.bias0 is not None
    torch.testing.assert_close(scales.grad[0], op.bias0.detach().float().sum(0, keepdim=True))


def test_cleared_biases_add_nothing() -> None:
    op = grouped(scale_bias=True)
    x, sizes = torch.randn(9, 5), torch.tensor([2, 3, 4])
    scales = torch.rand(9, requires_grad=True)
    op.bias0 = op.bias1 = None
    with pytest.raises(
        ArgumentError, match=r"Either all groups have a bias.*None for bias0, bias1"
    ):
        op(x, sizes, scales)
    op.bias2 = None
    y = op(x, sizes, scales)
    torch.testing.assert_close(y, GroupedLinear.reference(op, x, sizes, scales))
    y.sum().backward()
    assert scales.grad is None or not scales.grad.any()


def traced(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that compiles. Dynamo's own use of torch and Python warns in some versions."""
    ignored = ("ignore::DeprecationWarning", "ignore::FutureWarning")
    return pytest.mark.slow(pytest.mark.filterwarnings(*ignored)(test))


@traced
@pytest.mark.parametrize(
    ("single", "scaled", "dtype"),
    [(True, False, torch.bfloat16), (False, True, torch.float64)],
)
def test_compiles_whole_for_any_sizes(single: bool, scaled: bool, dtype: torch.dtype) -> None:
    op = GroupedLinear(
        3, 5, 4,
        single_grouped_weight=single, single_grouped_bias=single, scale_bias=scaled, dtype=dtype,
    )  # fmt: skip
    torch.compiler.reset()
    run = torch.compile(op, fullgraph=True, backend="aot_eager")
    for sizes in ([1, 6, 2], [0, 0, 0] if scaled else [9, 0, 0]):
        x = torch.randn(sum(sizes), 5, dtype=dtype, requires_grad=True)
        extras = [torch.rand(sum(sizes), dtype=dtype, requires_grad=True)] if scaled else []
        leaves = [x, *extras, *op.parameters()]
        ours, expected = [f(x, torch.tensor(sizes), *extras) for f in (run, op)]
        torch.testing.assert_close(ours, expected)
        dy = torch.randn_like(ours)
        torch.testing.assert_close(
            torch.autograd.grad(ours, leaves, dy), torch.autograd.grad(expected, leaves, dy)
        )
    extras = [torch.rand(9, dtype=dtype)] if scaled else []
    with pytest.raises(InputError, match=r"add up to the number of rows \(GroupedLinear\).*9 rows"):
        run(torch.randn(9, 5, dtype=dtype), torch.tensor([2, 3, 5]), *extras)


def test_operators_of_traced_calls_declare_the_right_shapes() -> None:
    x, dy, weights = torch.randn(9, 5), torch.randn(9, 4), [torch.randn(4, 5) for _ in range(3)]
    sizes = torch.tensor([4, 0, 5])
    ops = torch.ops.opfuser
    for operator, arguments in (
        (ops.grouped_mm, (x, weights, sizes, True)),
        (ops.grouped_mm, (dy, weights, sizes, False)),
        (ops.grouped_wgrad, (dy, x, sizes)),
        (ops.grouped_sum, (dy, sizes)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_num_extra_inputs_is_fixed() -> None:
    op = grouped(scale_bias=True)
    with pytest.raises(
        ReadOnlyAttributeError, match=r"num_extra_inputs is fixed.*\(GroupedLinear\)"
    ):
        op.num_extra_inputs = 1


def test_names_and_shapes_of_parameters() -> None:
    separate = {name: tuple(p.shape) for name, p in grouped(2).named_parameters()}
    assert separate == {"weight0": (4, 5), "weight1": (4, 5), "bias0": (4,), "bias1": (4,)}
    op = grouped(2, single_grouped_weight=True, single_grouped_bias=True)
    assert {name: tuple(p.shape) for name, p in op.named_parameters()} == {
        "weight": (2, 4, 5),
        "bias": (2, 4),
    }
    assert list(grouped(2, bias=False).state_dict()) == ["weight0", "weight1"]
    assert grouped(2, bias=False).bias1 is None


@STACKED
def test_starts_as_torch_linears_do(single: bool) -> None:
    torch.manual_seed(3)
    op = GroupedLinear(2, 5, 4, single_grouped_weight=single, single_grouped_bias=single)
    weights = op.weight if single else torch.stack([op.weight0, op.weight1])
    torch.manual_seed(3)
    expected = [nn.Linear(5, 4, bias=False).weight for _ in range(2)]
    assert torch.equal(weights, torch.stack(expected))
    assert all(not p.any() for name, p in op.named_parameters() if name.startswith("bias"))


@pytest.mark.parametrize("sizes", [[2, 3, 5], [9, 1, -1], [0, 0, 0]], ids=str)
def test_split_sizes_must_add_up(sizes: list[int]) -> None:
    with pytest.raises(InputError, match=r"add up to the number of rows \(GroupedLinear\).*9 rows"):
        grouped()(torch.randn(9, 5), torch.tensor(sizes))


@pytest.mark.parametrize(
    ("x", "sizes", "scales", "text"),
    [
        ((9, 4), torch.tensor([2, 3, 4]), (9,), r"input of shape \(9, 4\)"),
        ((), torch.tensor([2, 3, 4]), (9,), r"input of shape \(\)"),
        ((9, 5), torch.tensor([5, 4]), (9,), r"split sizes of shape \(2,\) and dtype torch.int64"),
        ((9, 5), torch.tensor([2.0, 3, 4]), (9,), r"dtype torch.float32, expected \(3,\) integers"),
        ((9, 5), torch.tensor([2, 3, 4]), (8,), r"scales of shape \(8,\), expected \(9,\)"),
    ],
    ids=["last dimension", "no dimension", "number of groups", "dtype", "scales"],
)
def test_wrong_tensors_are_input_errors(
    x: tuple[int, ...], sizes: Tensor, scales: tuple[int, ...], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        grouped(scale_bias=True)(torch.randn(x), sizes, torch.rand(scales))


@pytest.mark.parametrize("name", ["weight1", "weight"])
def test_call_without_a_weight_is_an_error(name: str) -> None:
    op = grouped(single_grouped_weight=name == "weight")
    setattr(op, name, None)
    text = rf"needs its weight \(GroupedLinear\).*None for {name}. Assign a par"
    with pytest.raises(ArgumentError, match=text):
        op(torch.randn(9, 5), torch.tensor([2, 3, 4]))


def test_arguments_are_checked() -> None:
    with pytest.raises(ArgumentError, match=r"at least one group and feature.*num_groups=0"):
        GroupedLinear(0, 5, 4)
    with pytest.raises(ArgumentError, match=r"float32 or float64.*dtype=torch.int32"):
        GroupedLinear(2, 5, 4, dtype=torch.int32)
