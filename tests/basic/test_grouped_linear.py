from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from opfuser import GroupedLinear, Sequential, gemm
from opfuser.basic._grouped_bias import grouped_bias_grad, scale_grad
from opfuser.errors import (
    ArgumentError,
    ExtraInputCountError,
    InputError,
    OpKwargsError,
    ReadOnlyAttributeError,
)
from opfuser.gemm.row_groups import groups_on_device
from opfuser.testing import check_op
from tests.contract.gradients import handed_over

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

SPLITS = {
    "even": [3, 3, 3],
    "uneven": [1, 6, 2],
    "empty groups": [0, 5, 0],
    "last only": [0, 0, 4],
    "all empty": [0, 0, 0],
}


def grouped(
    groups: int = 3, in_features: int = 5, out_features: int = 4, **kwargs: Any
) -> GroupedLinear:
    op = GroupedLinear(groups, in_features, out_features, **kwargs)
    for name, parameter in op.named_parameters():
        if name.startswith("bias"):
            nn.init.normal_(parameter)
    return op


def plain(
    x: Tensor, sizes: list[int], weights: list[Tensor], biases: list[Tensor], scales: Tensor | None
) -> Tensor:
    """The same with one F.linear per group."""
    rows = x.reshape(-1, x.shape[-1]).split(sizes)
    if scales is None:
        parts = [F.linear(r, w, b) for r, w, b in zip(rows, weights, biases)]
    else:
        parts = [
            F.linear(r, w) + s[:, None] * b
            for r, w, b, s in zip(rows, weights, biases, scales.split(sizes))
        ]
    return torch.cat(parts).view(*x.shape[:-1], weights[0].shape[0])


def assert_close_to_exact(ours: list[Tensor], same: list[Tensor], exact: list[Tensor]) -> None:
    """Our error is at most twice that of plain torch in the same dtype, plus one rounding."""
    for a, b, c in zip(ours, same, exact):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if c.numel():
            error, allowed = ((t.double() - c).abs().max() for t in (a, b))
            assert error <= 2 * allowed + torch.finfo(a.dtype).eps / 2 * c.abs().max()


def run_plain(
    op: GroupedLinear,
    x: Tensor,
    sizes: list[int],
    scales: Tensor | None,
    dy: Tensor,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Output, and gradients of the input, the scales and the parameters."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in op.parameters()]
    x = x.detach().to(dtype).requires_grad_()
    scales = None if scales is None else scales.detach().to(dtype).requires_grad_()
    count = 1 if op.single_grouped_weight else op.num_groups
    weights, biases = leaves[:count], leaves[count:]
    weights = list(weights[0].unbind(0)) if op.single_grouped_weight else weights
    biases = list(biases[0].unbind(0)) if biases and op.single_grouped_bias else biases
    y = plain(x, sizes, weights, biases or [None] * op.num_groups, scales)  # type: ignore[list-item]
    inputs = [x, *([] if scales is None else [scales]), *leaves]
    grads = torch.autograd.grad(y, inputs, dy.to(dtype), allow_unused=True)
    return [y.detach(), *[torch.zeros_like(t) if g is None else g for g, t in zip(grads, inputs)]]


def run_ours(
    op: GroupedLinear, x: Tensor, sizes: Tensor, scales: Tensor | None, dy: Tensor
) -> list[Tensor]:
    x = x.detach().requires_grad_()
    scales = None if scales is None else scales.detach().requires_grad_()
    extras = [] if scales is None else [scales]
    y = op(x, sizes, *extras)
    return [y.detach(), *torch.autograd.grad(y, [x, *extras, *op.parameters()], dy)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("mode", ["bias", "no bias", "scaled bias"])
@pytest.mark.parametrize("single", [False, True], ids=["separate", "stacked"])
def test_matches_a_linear_per_group(
    single: bool, mode: str, sizes: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    op = grouped(
        bias=mode != "no bias",
        scale_bias=mode == "scaled bias",
        single_grouped_weight=single,
        single_grouped_bias=single,
        dtype=dtype,
        device=device,
    )
    rows = sum(sizes)
    x, dy = torch.randn(rows, 5).to(device, dtype), torch.randn(rows, 4).to(device, dtype)
    scales = torch.rand(rows).to(device, dtype) if mode == "scaled bias" else None
    ours = run_ours(op, x, torch.tensor(sizes, device=device), scales, dy)
    same = run_plain(op, x, sizes, scales, dy, dtype)
    assert_close_to_exact(ours, same, run_plain(op, x, sizes, scales, dy, torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[16, 8, 24], [1, 6, 2], [0, 5, 0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("single", [False, True], ids=["separate", "stacked"])
def test_grouped_gemm_of_the_device(
    single: bool, scaled: bool, sizes: list[int], no_waiting: Any
) -> None:
    op = grouped(
        in_features=32,
        out_features=16,
        scale_bias=scaled,
        single_grouped_weight=single,
        single_grouped_bias=single,
        dtype=torch.bfloat16,
        device="cuda",
    )
    rows = sum(sizes)
    x = torch.randn(rows, 32, device="cuda").bfloat16()
    dy = torch.randn(16, rows, device="cuda").bfloat16().t()
    scales = torch.rand(rows, device="cuda") if scaled else None
    where = torch.tensor(sizes, device="cuda", dtype=torch.int32)
    with no_waiting() if rows else contextlib.nullcontext():
        ours = run_ours(op, x, where, scales, dy)
    exact = run_plain(op, x, sizes, scales, dy, torch.float64)
    for a, c in zip(ours, exact):
        if c.numel():
            eps = torch.finfo(torch.bfloat16).eps
            assert (a.double() - c).abs().max() <= 1.5 * eps * c.abs().max()


@pytest.mark.parametrize("sizes", [[10, 0, 14], [24, 0, 0], [1, 2, 21]], ids=str)
def test_sizes_known_to_the_device_alone_give_the_same(sizes: list[int]) -> None:
    x, dy = torch.randn(24, 32).bfloat16(), torch.randn(16, 24).bfloat16().t()
    weights = [torch.randn(16, 32).bfloat16() for _ in sizes]
    lengths, scales, table = (
        torch.tensor(sizes, dtype=torch.int32),
        torch.rand(24),
        torch.randn(3, 16),
    )
    host, device = gemm.row_groups(lengths, x, ""), groups_on_device(lengths)
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
            grouped_bias_grad(dy, scales, groups),
            scale_grad(dy, table, scales, groups),
            *[buffer[0] for buffer in buffers if buffer is not None],
        ]

    expected = results(host, weights)
    for given in (weights, torch.stack(weights)):
        torch.testing.assert_close(results(device, given), expected, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("single", [False, True], ids=["separate", "stacked"])
def test_grouped_gemm_of_the_device_into_main_grad(single: bool, overwrite: bool) -> None:
    op = grouped(
        in_features=32,
        out_features=16,
        bias=False,
        single_grouped_weight=single,
        accumulate_into_main_grad=True,
        dtype=torch.bfloat16,
        device="cuda",
    )
    for weight in op.parameters():
        weight.main_grad = torch.ones(weight.shape, device="cuda")  # type: ignore[attr-defined]
        weight.overwrite_main_grad = overwrite  # type: ignore[attr-defined]
    x, dy = torch.randn(9, 32).bfloat16().cuda(), torch.randn(9, 16).bfloat16().cuda()
    op(x, torch.tensor([4, 0, 5], device="cuda")).backward(dy)
    dws = run_plain(op, x, [4, 0, 5], None, dy, torch.float64)[2:]
    for weight, dw in zip(op.parameters(), dws):
        expected = dw + (not overwrite)
        torch.testing.assert_close(weight.main_grad.double(), expected, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("where", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_split_sizes_of_any_integer_dtype(where: torch.dtype) -> None:
    op = grouped()
    x, sizes = torch.randn(9, 5), torch.tensor([2, 3, 4])
    torch.testing.assert_close(op(x, sizes.to(where)), op.reference(x, sizes))


@pytest.mark.parametrize("shape", ["batched", "transposed", "expanded"])
def test_takes_rows_of_any_layout_and_leaves_them_alone(shape: str) -> None:
    op = grouped(dtype=torch.float64)
    x = {
        "batched": torch.randn(3, 3, 5),
        "transposed": torch.randn(5, 9).t(),
        "expanded": torch.randn(1, 5).expand(9, 5),
    }[shape].double()
    dy = torch.randn(4, dtype=torch.float64).expand(*x.shape[:-1], 4)
    before = x.clone(), dy.clone()
    ours = run_ours(op, x, torch.tensor([2, 3, 4]), None, dy)
    torch.testing.assert_close(ours, run_plain(op, x, [2, 3, 4], None, dy, torch.float64))
    assert torch.equal(x, before[0])
    assert torch.equal(dy, before[1])


@pytest.mark.parametrize("single", [False, True], ids=["separate", "stacked"])
@pytest.mark.parametrize("scaled", [False, True])
def test_reference_has_the_same_value_and_gradients(scaled: bool, single: bool) -> None:
    op = grouped(
        scale_bias=scaled,
        single_grouped_weight=single,
        single_grouped_bias=single,
        dtype=torch.float64,
    )
    x, dy = torch.randn(9, 5).double(), torch.randn(9, 4).double()
    sizes = torch.tensor([4, 0, 5])
    extras = [torch.rand(9).double().requires_grad_()] if scaled else []
    x.requires_grad_()
    leaves = [x, *extras, *op.parameters()]
    ours, theirs = op(x, sizes, *extras), op.reference(x, sizes, *extras)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours, leaves, dy), torch.autograd.grad(theirs, leaves, dy)
    )


@pytest.mark.parametrize("single", [False, True], ids=["separate", "stacked"])
@pytest.mark.parametrize("scaled", [False, True])
def test_check_op(scaled: bool, single: bool, device: torch.device) -> None:
    op = grouped(
        scale_bias=scaled, single_grouped_weight=single, single_grouped_bias=single, device=device
    )
    scales = [torch.rand(9, device=device)] if scaled else []
    sizes = torch.tensor([4, 0, 5], device=device)
    x = torch.randn(9, 5, device=device)
    # The split sizes are values, which would no longer add up to the number of rows.
    check_op(op, x, sizes, *scales, dtypes=DTYPES, zero_rows=False)


def test_autocast_decides_the_dtype_of_compute_but_not_of_gradients() -> None:
    op = grouped()
    x, dy, sizes = torch.randn(9, 5), torch.randn(9, 4), torch.tensor([4, 0, 5])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = run_ours(op, x, sizes, None, dy.bfloat16())
    exact = run_plain(op, x, [4, 0, 5], None, dy, torch.float64)
    assert [t.dtype for t in ours] == [torch.bfloat16] + [torch.float32] * 7
    for a, c in zip(ours, exact):
        torch.testing.assert_close(a.double(), c, rtol=0.03, atol=0.05)


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


def test_groups_may_be_frozen_one_by_one() -> None:
    op = grouped()
    op.weight1.requires_grad_(False)
    op.bias2.requires_grad_(False)
    op(torch.randn(9, 5), torch.tensor([2, 3, 4])).sum().backward()
    with_grad = {name for name, p in op.named_parameters() if p.grad is not None}
    assert with_grad == {"weight0", "weight2", "bias0", "bias1"}


def test_frozen_weights_save_no_input() -> None:
    op = grouped()
    for n in range(3):
        getattr(op, f"weight{n}").requires_grad_(False)
    x = torch.randn(9, 5, requires_grad=True)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = op(x, torch.tensor([2, 3, 4]))
    assert all(t.shape != x.shape for t in saved)
    (dx,) = torch.autograd.grad(y, [x], torch.ones(9, 4))
    expected = [
        getattr(op, f"weight{n}").sum(0).expand(size, 5) for n, size in enumerate([2, 3, 4])
    ]
    torch.testing.assert_close(dx, torch.cat(expected))


def test_in_a_sequential_with_split_sizes_from_a_channel_or_the_caller() -> None:
    first, second = grouped(3, 5, 4), grouped(3, 4, 2)
    x, sizes = torch.randn(9, 5), torch.tensor([2, 3, 4])
    y = Sequential(first, second)(x, sizes, sizes)
    torch.testing.assert_close(y, second.reference(first.reference(x, sizes), sizes))


def test_gradients_belong_to_the_weights_that_forward_read() -> None:
    op = grouped(bias=False)
    old, others = op.weight0, [op.weight1, op.weight2]
    x = torch.randn(9, 5, requires_grad=True)
    y = op(x, torch.tensor([9, 0, 0]))
    op.weight0 = nn.Parameter(torch.zeros(4, 5))
    y.sum().backward()
    assert op.weight0.grad is None
    assert old.grad is not None
    torch.testing.assert_close(x.grad, old.detach().sum(0).expand(9, 5))
    for weight in others:
        assert torch.equal(weight.grad, torch.zeros(4, 5))


def test_functional_call_uses_and_differentiates_what_it_is_given() -> None:
    op = grouped(bias=False)
    w = torch.randn(4, 5, requires_grad=True)
    x, sizes = torch.randn(9, 5), torch.tensor([0, 9, 0])
    y = functional_call(op, {"weight1": w}, (x, sizes))
    torch.testing.assert_close(y, x @ w.t())
    y.sum().backward()
    torch.testing.assert_close(w.grad, x.sum(0).expand(4, 5))


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
    torch.testing.assert_close(y, op.reference(x, sizes, scales))
    y.sum().backward()
    assert scales.grad is None or not scales.grad.any()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("single", [False, True], ids=["separate", "stacked"])
def test_main_grad(single: bool, delay: bool, overwrite: bool) -> None:
    op = grouped(
        bias=False,
        single_grouped_weight=single,
        accumulate_into_main_grad=True,
        delay_wgrad_compute=delay,
        dtype=torch.bfloat16,
    )
    for weight in op.parameters():
        weight.main_grad = torch.ones(weight.shape)  # type: ignore[attr-defined]
        weight.overwrite_main_grad = overwrite  # type: ignore[attr-defined]
    x, dy = torch.randn(9, 5).bfloat16(), torch.randn(9, 4).bfloat16()
    op(x, torch.tensor([4, 0, 5])).backward(dy)
    assert all(w.grad_added_to_main_grad for w in op.parameters())  # type: ignore[attr-defined]
    assert all(not w.grad.any() for w in op.parameters())
    if delay:
        assert all(w.main_grad.eq(1).all() for w in op.parameters())  # type: ignore[union-attr]
        op.backward_dw()
    exact = run_plain(op, x, [4, 0, 5], None, dy, torch.float64)[2:]
    for weight, dw in zip(op.parameters(), exact):
        expected = dw + (not overwrite)
        torch.testing.assert_close(weight.main_grad.double(), expected, rtol=1e-5, atol=1e-5)


def with_main_grad(weight: nn.Parameter, value: float = 0.0) -> nn.Parameter:
    weight.main_grad = torch.full_like(weight, value)  # type: ignore[attr-defined]
    return weight


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("single", [False, True], ids=["separate", "stacked"])
@pytest.mark.parametrize("how", ["functional_call", "replaced", "cleared"])
def test_main_grad_belongs_to_the_weights_that_forward_used(
    how: str, single: bool, delay: bool
) -> None:
    op = grouped(
        bias=False,
        single_grouped_weight=single,
        accumulate_into_main_grad=True,
        delay_wgrad_compute=delay,
    )
    used = [with_main_grad(w) for w in op.parameters()]
    names = [name for name, _ in op.named_parameters()]
    others = [with_main_grad(nn.Parameter(torch.randn_like(w)), 7.0) for w in used]
    x, sizes = torch.ones(9, 5), torch.tensor([2, 3, 4])
    if how == "functional_call":
        used, others = others, used
        y = functional_call(op, dict(zip(names, used)), (x, sizes))
    else:
        y = op(x, sizes)
        for name, other in zip(names, others):
            setattr(op, name, other if how == "replaced" else None)
    before = [w.main_grad.clone() for w in (*used, *others)]
    y.sum().backward()
    if delay:
        op.backward_dw()
    expected = [torch.full((4, 5), n) for n in (2.0, 3.0, 4.0)]
    expected = [torch.stack(expected)] if single else expected
    added = [w.main_grad - b for w, b in zip((*used, *others), before)]
    torch.testing.assert_close(added, [*expected, *[torch.zeros_like(w) for w in others]])
    assert all(w.grad_added_to_main_grad for w in used)  # type: ignore[attr-defined]
    assert not any(hasattr(w, "grad_added_to_main_grad") for w in others)


def test_delayed_gradients_belong_to_the_weights_that_forward_used() -> None:
    op = grouped(bias=False, delay_wgrad_compute=True)
    old = op.weight1
    y = op(torch.ones(9, 5), torch.tensor([2, 3, 4]))
    op.weight1 = nn.Parameter(torch.zeros(4, 5))
    y.sum().backward()
    op.backward_dw()
    assert op.weight1.grad is None
    torch.testing.assert_close(old.grad, torch.full((4, 5), 3.0))


def compiled(op: GroupedLinear) -> Any:
    """Traced, also in backward, but not lowered: code generation is not ours."""
    torch._dynamo.reset()
    return torch.compile(op, fullgraph=True, backend="aot_eager")


def traced(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that compiles. Dynamo's own use of torch and Python warns in some versions."""
    ignored = ("ignore::DeprecationWarning", "ignore::FutureWarning")
    return pytest.mark.slow(pytest.mark.filterwarnings(*ignored)(test))


@traced
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("single", [False, True], ids=["separate", "stacked"])
def test_compiles_whole_for_any_sizes(single: bool, scaled: bool, dtype: torch.dtype) -> None:
    op = grouped(
        single_grouped_weight=single, single_grouped_bias=single, scale_bias=scaled, dtype=dtype
    )
    run = compiled(op)
    for sizes in ([1, 6, 2], [9, 0, 0], [0, 5, 0], [3, 3, 3], [0, 0, 0]):
        x = torch.randn(sum(sizes), 5, dtype=dtype, requires_grad=True)
        extras = [torch.rand(sum(sizes), dtype=dtype, requires_grad=True)] if scaled else []
        leaves = [x, *extras, *op.parameters()]
        ours, expected = [f(x, torch.tensor(sizes), *extras) for f in (run, op)]
        torch.testing.assert_close(ours, expected)
        dy = torch.randn_like(ours)
        torch.testing.assert_close(
            torch.autograd.grad(ours, leaves, dy), torch.autograd.grad(expected, leaves, dy)
        )


@traced
def test_compiled_it_checks_the_split_sizes_too() -> None:
    run = compiled(grouped())
    run(torch.randn(9, 5), torch.tensor([2, 3, 4]))
    with pytest.raises(InputError, match=r"add up to the number of rows \(GroupedLinear\).*9 rows"):
        run(torch.randn(9, 5), torch.tensor([2, 3, 5]))


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


def test_missing_main_grad_is_an_error() -> None:
    y = grouped(accumulate_into_main_grad=True)(torch.randn(9, 5), torch.tensor([2, 3, 4]))
    with pytest.raises(ArgumentError, match=r"parameter's shape \(GroupedLinear\)"):
        y.sum().backward()


@pytest.mark.parametrize("single", [False, True], ids=["separate", "stacked"])
def test_delayed_weight_gradients(single: bool) -> None:
    op = grouped(single_grouped_weight=single, delay_wgrad_compute=True)
    direct = copy.deepcopy(op)
    direct.delay_wgrad_compute = False
    assert op.need_backward_dw()
    assert not direct.need_backward_dw()
    weights = [p for name, p in op.named_parameters() if name.startswith("weight")]
    assert all(w.skip_backward_post_hook for w in weights)  # type: ignore[attr-defined]
    calls: list[bool] = []
    op.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append(True))
    sizes = torch.tensor([4, 0, 5])
    inputs = [torch.randn(9, 5, requires_grad=True) for _ in range(2)]
    for x in inputs:
        op(x, sizes).square().sum().backward()
        direct(x.detach(), sizes).square().sum().backward()
    assert all(x.grad is not None for x in inputs)
    assert all(w.grad is None for w in weights)
    assert all(p.grad is not None for name, p in op.named_parameters() if name.startswith("bias"))
    for _ in inputs:
        op.backward_dw()
    assert calls == [True, True]
    for ours, theirs in zip(op.parameters(), direct.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)
    op.backward_dw()
    direct.backward_dw()
    assert calls == [True, True]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("delay", [False, True])
def test_backward_uses_main_grad_if_forward_was_to(delay: bool, late: bool) -> None:
    op = grouped(bias=False, accumulate_into_main_grad=not late, delay_wgrad_compute=delay)
    weights = [with_main_grad(w) for w in op.parameters()]
    x, sizes = torch.ones(9, 5), torch.tensor([2, 3, 4])
    y = op(x, sizes)
    op.accumulate_into_main_grad = late
    y.sum().backward()
    op.accumulate_into_main_grad = not late
    if delay:
        op.accumulate_into_main_grad = late  # before backward_dw, which is no forward either
        op.backward_dw()
    for w, n in zip(weights, (2.0, 3.0, 4.0)):
        want = torch.full((4, 5), n)
        assert torch.equal(w.grad if late else w.main_grad, want)  # type: ignore[arg-type]
        assert not (w.main_grad if late else w.grad).any()  # type: ignore[union-attr]


@pytest.mark.parametrize("delay", [False, True])
def test_backward_adds_to_grad_if_forward_was_to(delay: bool) -> None:
    op = grouped(bias=False, accumulate_into_grad=True, delay_wgrad_compute=delay)
    weights = list(op.parameters())
    starts = [torch.ones(4, 5) for _ in weights]
    for w, start in zip(weights, starts):
        w.grad = start
    y = op(torch.ones(9, 5), torch.tensor([2, 3, 4]))
    op.accumulate_into_grad = False
    told = [handed_over(y, w) for w in weights]
    y.sum().backward()
    op.backward_dw()
    assert told == [[False]] * 3
    for w, start, n in zip(weights, starts, (2.0, 3.0, 4.0)):
        assert w.grad is start, "the same memory"
        assert torch.equal(start, torch.full((4, 5), 1 + n))


@pytest.mark.parametrize("late", [False, True])
def test_backward_delays_gradients_if_forward_was_to(late: bool) -> None:
    op = grouped(bias=False, delay_wgrad_compute=not late)
    y = op(torch.ones(9, 5), torch.tensor([2, 3, 4]))
    op.delay_wgrad_compute = late
    y.sum().backward()
    assert (op.weight0.grad is None) is not late
    assert op.need_backward_dw()  # set, or something waits
    op.backward_dw()
    assert op.need_backward_dw() is late
    torch.testing.assert_close(op.weight0.grad, torch.full((4, 5), 2.0))


@pytest.mark.parametrize("single", [False, True], ids=["separate", "stacked"])
def test_wrappers_are_told_when_delay_is_set_later(single: bool) -> None:
    op = grouped(single_grouped_weight=single)
    weights = [p for name, p in op.named_parameters() if name.startswith("weight")]
    assert not any(hasattr(w, "skip_backward_post_hook") for w in weights)
    for value in (True, False):
        op.delay_wgrad_compute = value
        assert op.delay_wgrad_compute is value
        assert all(w.skip_backward_post_hook is value for w in weights)  # type: ignore[attr-defined]
    if not single:
        op.weight0 = None
        op.delay_wgrad_compute = True
        op.weight0 = nn.Parameter(torch.zeros(4, 5))
        assert op.weight0.skip_backward_post_hook is True  # type: ignore[attr-defined]


def test_gradients_in_two_places_are_an_error_of_the_next_call() -> None:
    op = grouped(accumulate_into_main_grad=True)
    x, sizes = torch.ones(9, 5), torch.tensor([2, 3, 4])
    op(x, sizes)
    op.accumulate_into_grad = True
    with pytest.raises(ArgumentError, match=r"accumulated in one place \(GroupedLinear\)"):
        op(x, sizes)


@pytest.mark.parametrize(
    "name",
    [
        "num_groups", "in_features", "out_features", "use_bias", "scale_bias",
        "single_grouped_weight", "single_grouped_bias", "num_extra_inputs",
    ],
)  # fmt: skip
def test_what_the_parameters_were_made_from_is_fixed(name: str) -> None:
    op = grouped(scale_bias=True)
    value = getattr(op, name)
    with pytest.raises(ReadOnlyAttributeError, match=rf"{name} is fixed.*\(GroupedLinear\)"):
        setattr(op, name, not value if isinstance(value, bool) else value + 1)
    setattr(op, name, value)


def test_a_waiting_gradient_does_not_change_the_plan_and_is_not_copied() -> None:
    op = grouped(delay_wgrad_compute=True)
    x, sizes = torch.randn(9, 5), torch.tensor([4, 0, 5])
    plans = set()
    for _ in range(2):
        op(x, sizes).sum().backward()
        op.train()
        plans.add(id(op.__dict__["_alone"].last_plan))
    assert len(plans) == 1
    twin = copy.deepcopy(op)
    twin.backward_dw()
    assert twin.weight0.grad is None
    op.backward_dw()
    assert op.weight0.grad is not None


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


@pytest.mark.parametrize("single", [False, True], ids=["separate", "stacked"])
def test_starts_as_torch_linears_do(single: bool) -> None:
    torch.manual_seed(3)
    op = GroupedLinear(2, 5, 4, single_grouped_weight=single, single_grouped_bias=single)
    weights = op.weight if single else torch.stack([op.weight0, op.weight1])
    torch.manual_seed(3)
    expected = [nn.Linear(5, 4, bias=False).weight for _ in range(2)]
    assert torch.equal(weights, torch.stack(expected))
    assert all(not p.any() for name, p in op.named_parameters() if name.startswith("bias"))


def test_hazard_11_meta_construction_then_materialisation_then_backward() -> None:
    op = GroupedLinear(2, 5, 4, device="meta")
    op.to_empty(device="cpu")
    op.reset_parameters()
    op(torch.ones(6, 5), torch.tensor([2, 4])).sum().backward()
    torch.testing.assert_close(op.weight1.grad, torch.full((4, 5), 4.0))
    assert torch.equal(op.bias0, torch.zeros(4))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))])
def test_copies_work_on_their_own(copied: Callable[[GroupedLinear], GroupedLinear]) -> None:
    op = grouped(scale_bias=True)
    x, sizes, scales = torch.randn(9, 5), torch.tensor([4, 0, 5]), torch.rand(9)
    y = op(x, sizes, scales)
    assert torch.equal(copied(op)(x, sizes, scales), y)


def test_repr() -> None:
    expected = "GroupedLinear(num_groups=2, in_features=5, out_features=4, bias=True)"
    assert repr(grouped(2)) == expected


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


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
)
def test_input_of_a_dtype_that_a_cast_would_change_is_an_error(
    dtype: torch.dtype, autocast: bool
) -> None:
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
        pytest.raises(InputError, match=rf"\(GroupedLinear\).*{dtype}.*Convert the input"),
    ):
        grouped()(torch.ones(9, 5).to(dtype), torch.tensor([2, 3, 4]))


@pytest.mark.parametrize("single", [False, True], ids=["separate", "stacked"])
def test_call_without_a_weight_is_an_error(single: bool) -> None:
    op = grouped(single_grouped_weight=single)
    name = "weight" if single else "weight1"
    setattr(op, name, None)
    with pytest.raises(
        ArgumentError, match=rf"needs its weight \(GroupedLinear\).*None for {name}. Assign a par"
    ):
        op(torch.randn(9, 5), torch.tensor([2, 3, 4]))


def test_arguments_are_checked() -> None:
    with pytest.raises(ArgumentError, match=r"at least one group and feature.*num_groups=0"):
        GroupedLinear(0, 5, 4)
    with pytest.raises(ArgumentError, match=r"float32 or float64.*dtype=torch.int32"):
        GroupedLinear(2, 5, 4, dtype=torch.int32)


def test_other_keywords_are_refused() -> None:
    model = Sequential(grouped())
    x, sizes = torch.randn(9, 5), torch.tensor([2, 3, 4])
    with pytest.raises(OpKwargsError, match=r"keywords output and grad_input.*m_splits, n"):
        model(x, sizes, op_kwargs={0: {"m_splits": [2, 3, 4], "n": 1}})


@pytest.mark.parametrize("which", ["input", "gradient"])
def test_what_a_delayed_gradient_is_made_of_must_stay(which: str) -> None:
    op = grouped(delay_wgrad_compute=True)
    x, dy, sizes = torch.randn(9, 5), torch.randn(9, 4), torch.tensor([2, 3, 4])
    for late in (False, True):
        op(x, sizes).backward(dy)
        if late:
            (x if which == "input" else dy).zero_()
            with pytest.raises(InputError, match=r"until backward_dw \(GroupedLinear\).*in place"):
                op.backward_dw()
        else:
            op.backward_dw()
    assert not op._delayed.pending
