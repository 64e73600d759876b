from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from opfuser import (
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    MakeExtraOutput,
    OperationContext,
    Sequential,
    quantized_model_init,
)
from opfuser.errors import ArgumentError, InputError, NotSupportedError
from opfuser.op import GradNeeds
from opfuser.recipe import Float8CurrentScaling
from tests.basic.values import HALF, after_forward, check_values, held_to
from tests.contract.gradients import handed_over

# Of the shapes and layouts that check_op does not make of a matrix.
INPUTS: dict[str, Callable[[], Tensor]] = {
    "matrix": lambda: torch.randn(5, 7),
    # Of more rows with an odd number of features torch's product in bf16 reads what stands between
    # the rows, on processors with AMX.
    "odd and long": lambda: torch.randn(129, 6),
    "vector": lambda: torch.randn(7),
    "batched": lambda: torch.randn(2, 3, 4, 7),
    "zero rows, batched": lambda: torch.randn(2, 0, 7),
    "expanded": lambda: torch.randn(1, 7).expand(4, 7),
}


def linear(op: BasicLinear, x: Tensor) -> Tensor:
    return F.linear(x, op.weight)


@pytest.mark.parametrize("shape", INPUTS)
def test_as_exact_as_torch(shape: str, device: torch.device) -> None:
    x = INPUTS[shape]().to(device)
    op = held_to(BasicLinear(x.shape[-1], 11, device=device), linear)
    check_values(op, x, autocast=HALF)


def test_features_may_be_zero() -> None:
    x = torch.randn(3, 2, 4, requires_grad=True)
    y = Sequential(BasicLinear(4, 0), BasicLinear(0, 5))(x)
    assert torch.equal(y, torch.zeros(3, 2, 5))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.zeros_like(x))


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=str)
def test_saves_only_what_a_needed_gradient_reads(needs: tuple[bool, bool]) -> None:
    op, x = BasicLinear(4, 3), torch.randn(2, 4)
    made = after_forward(op, x, input=needs[0], parameters=needs[1]).saved_tensors
    for saved, tensor, needed in zip(made, (x, op.weight), reversed(needs), strict=True):
        assert saved is (tensor if needed else None)


def with_main_grad(dtype: torch.dtype = torch.float32) -> BasicLinear:
    op = BasicLinear(3, 2, accumulate_into_main_grad=True)
    op.weight.main_grad = torch.ones(2, 3, dtype=dtype)  # type: ignore[attr-defined]
    return op


def run_twice(op: BasicLinear) -> Tensor:
    """Two backward passes; returns the gradient of one."""
    x, dy = torch.randn(5, 3), torch.randn(5, 2)
    for _ in range(2):
        op(x).backward(dy)
    return dy.double().t() @ x.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_main_grad_of_another_dtype(dtype: torch.dtype) -> None:
    op = with_main_grad(dtype)
    buffer, dw = op.weight.main_grad, run_twice(op)
    rounding = 0.05 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(buffer.double(), 1 + 2 * dw, rtol=rounding, atol=rounding)
    assert op.weight.main_grad is buffer


def test_placeholder_of_main_grad_is_for_hooks_to_write_to() -> None:
    op = with_main_grad()
    seen: list[Tensor] = []

    def hook(weight: Tensor) -> None:
        assert weight.grad is not None
        seen.append(weight.grad.clone())
        weight.grad.add_(1)  # must reach neither main_grad nor a later placeholder
        weight.grad = None

    op.weight.register_post_accumulate_grad_hook(hook)
    dw = run_twice(op)
    torch.testing.assert_close(seen, [torch.zeros(2, 3)] * 2, rtol=0, atol=0)
    torch.testing.assert_close(op.weight.main_grad.double(), 1 + 2 * dw, rtol=1e-5, atol=1e-5)


def test_main_grad_may_be_flat() -> None:
    op = with_main_grad()
    op.weight.main_grad = torch.zeros(6)
    op(torch.ones(1, 3)).sum().backward()
    assert torch.equal(op.weight.main_grad, torch.ones(6))


def test_main_grad_where_the_forward_left_no_weight() -> None:
    op, dy, x = with_main_grad(), torch.ones(4, 2), torch.ones(4, 3)
    ctx = OperationContext()
    ctx.needs = GradNeeds(True, (True,), ())
    assert not op.weight_grad(dy, x, ctx).any()
    assert not op.weight_grad(dy, x).any()
    assert torch.equal(op.weight.main_grad, torch.full((2, 3), 9.0))


# What surrounds it decides which forward runs, and which backward makes its weight gradient.
AROUND: dict[str, Callable[[BasicLinear], Sequential]] = {
    "alone": Sequential,
    "biased": lambda op: Sequential(op, Bias(2)),
    "added": lambda op: Sequential(op, Bias(2), AddExtraInput()),
    "tapped": lambda op: Sequential(MakeExtraOutput(), op),
    "scaled": lambda op: Sequential(op, ConstantScale(1.0)),
}
SURROUNDED = pytest.mark.parametrize("kind", AROUND)
FOUR = torch.full((2, 3), 4.0)


def run_around(kind: str, op: BasicLinear, weight: Tensor | None = None) -> Tensor:
    """Output for ones; ``weight`` takes the place of the one of ``op`` in this call alone."""
    model = AROUND[kind](op)
    inputs = [torch.ones(4, 3), *([torch.ones(4, 2)] if kind == "added" else [])]
    key = "1.weight" if kind == "tapped" else "0.weight"
    y = model(*inputs) if weight is None else functional_call(model, {key: weight}, tuple(inputs))
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((kind, "functional_call") for kind in AROUND),
        ("alone", "replaced"),
        ("alone", "cleared"),
        ("biased", "cleared"),
        ("tapped", "replaced"),
        ("scaled", "cleared"),
    ],
)
def test_main_grad_belongs_to_the_weight_that_forward_used(kind: str, how: str) -> None:
    op, other = with_main_grad(), nn.Parameter(torch.randn(2, 3))
    other.main_grad = torch.ones(2, 3)  # type: ignore[attr-defined]
    used = other if how == "functional_call" else op.weight
    y = run_around(kind, op, other if how == "functional_call" else None)
    unused = op.weight if how == "functional_call" else other
    if how != "functional_call":
        op.weight = other if how == "replaced" else None
    y.sum().backward()
    assert torch.equal(used.main_grad, 1 + FOUR)  # type: ignore[arg-type]
    assert used.grad_added_to_main_grad is True
    assert torch.equal(unused.main_grad, torch.ones(2, 3))  # type: ignore[arg-type]
    assert not hasattr(unused, "grad_added_to_main_grad")


@pytest.mark.parametrize(
    ("kind", "late"),
    [("alone", True), ("biased", True), ("added", False), ("tapped", False), ("scaled", True)],
)
def test_backward_adds_to_grad_if_forward_was_to(kind: str, late: bool) -> None:
    op = BasicLinear(3, 2, accumulate_into_grad=not late)
    op.weight.grad = torch.ones(2, 3)
    for now in (late, not late):
        y = run_around(kind, op)
        told = handed_over(y, op.weight)
        op.accumulate_into_grad = late
        y.sum().backward()
        assert told == [now]
    assert torch.equal(op.weight.grad, torch.full((2, 3), 9.0))


@SURROUNDED
def test_errors_of_the_next_call(kind: str) -> None:
    op = with_main_grad()
    run_around(kind, op)
    op.accumulate_into_grad = True
    with pytest.raises(ArgumentError, match=r"accumulated in one place \(BasicLinear\)"):
        run_around(kind, op)
    op.accumulate_into_main_grad = False
    run_around(kind, op).sum().backward()
    assert torch.equal(op.weight.main_grad, torch.ones(2, 3))
    op.weight = None
    with pytest.raises(
        ArgumentError,
        match=r"needs its weight \(BasicLinear\(in_features=3, out.*weight = None. Assign a param",
    ):
        run_around(kind, op)


@pytest.mark.parametrize("kind", ["biased", "added"])
def test_input_of_a_dtype_that_a_cast_would_change_is_an_error(kind: str) -> None:
    """Also where another operation is computed with it; alone, see test_all.py."""
    extra = [torch.ones(2, 2)] if kind == "added" else []
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn):
        for autocast in (False, True):
            with (
                torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
                pytest.raises(InputError, match=rf"fp64 \(BasicLinear\).*{dtype}.*Convert the inp"),
            ):
                AROUND[kind](BasicLinear(3, 2))(torch.ones(2, 3).to(dtype), *extra)


def test_transposed_weight_as_exact_as_torch(device: torch.device) -> None:
    op = held_to(
        BasicLinear(7, 11, device=device, weight_transposed=True),
        lambda op, x: F.linear(x, op.weight.t()),
    )
    for shape in ("matrix", "batched"):
        check_values(op, INPUTS[shape]().to(device), autocast=HALF)


@pytest.mark.parametrize("target", ["autograd", "main_grad", "grad"])
@SURROUNDED
def test_gradient_of_a_transposed_weight(kind: str, target: str) -> None:
    """It has the layout of the weight before autograd gets it, which then takes it as it is."""
    op = BasicLinear(
        3,
        2,
        accumulate_into_main_grad=target == "main_grad",
        accumulate_into_grad=target == "grad",
        weight_transposed=True,
    )
    op.weight.main_grad = torch.zeros(3, 2)  # type: ignore[attr-defined]
    op.weight.grad = torch.zeros(3, 2) if target == "grad" else None
    got: list[Tensor] = []
    if target == "autograd":
        op.weight.register_hook(got.append)
    before, weight = op.weight.detach().clone(), op.weight
    y = run_around(kind, op)
    y.backward(torch.tensor([1.0, 2.0]).expand(4, 2))
    if target == "autograd":
        assert got[0].is_contiguous()
    dw = weight.main_grad if target == "main_grad" else weight.grad  # type: ignore[attr-defined]
    assert torch.equal(dw, torch.tensor([4.0, 8.0]).expand(3, 2))
    torch.testing.assert_close(y, torch.ones(4, 3) @ before + (kind == "added"))


def test_transposed_weight_is_not_stored_as_codes() -> None:
    with quantized_model_init(recipe=Float8CurrentScaling()):
        op = BasicLinear(16, 32, weight_transposed=True)
    assert op.weight_format is None
    assert op.weight.dtype == torch.float32


def test_transposed_weight_starts_as_the_other_one() -> None:
    made = []
    for how in (True, False):
        torch.manual_seed(0)
        made.append(BasicLinear(3, 5000, weight_transposed=how))
    ours, other = made
    assert ours.weight.shape == (3, 5000)
    bound = 3**-0.5
    assert 0.99 * bound < float(ours.weight.detach().abs().max()) <= bound
    torch.testing.assert_close(ours.weight.std(), other.weight.std(), rtol=0.05, atol=0)


def test_starts_as_torch_linear_does() -> None:
    torch.manual_seed(3)
    op = BasicLinear(5, 4)
    torch.manual_seed(3)
    assert torch.equal(op.weight, nn.Linear(5, 4, bias=False).weight)


def test_rng_tracker_is_forked_for_initialization() -> None:
    class Tracker:
        @contextlib.contextmanager
        def fork(self) -> Iterator[None]:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(11)
                yield

    torch.manual_seed(0)
    op = BasicLinear(5, 4, rng_state_tracker_function=Tracker)
    after = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(3))
    torch.manual_seed(11)
    assert torch.equal(op.weight, BasicLinear(5, 4).weight)


@pytest.mark.parametrize("shape", [(2, 4), (2, 1), ()], ids=str)
def test_wrong_last_dimension_is_an_input_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        InputError, match=r"last dimension of the input must be in_features \(BasicLinear\(in_fe"
    ):
        BasicLinear(3, 2)(torch.randn(shape))


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        (
            {"tensor_parallel_mode": "rows"},
            ArgumentError,
            r"mode must be None, 'column', 'row' or 'vocabulary'.*'rows'",
        ),
        ({"sequence_parallel": True}, ArgumentError, "sequence_parallel needs a tensor_parallel_m"),
        ({"in_features": -3}, ArgumentError, r"must not be negative.*in_features=-3"),
        ({"dtype": torch.int64}, ArgumentError, r"float16, bfloat16, float32 or float64.*int64"),
        (
            {"userbuffers_options": {"fprop": True}},
            NotSupportedError,
            r"userbuffers_options must be None.*\{'fprop'",
        ),
    ],
)
def test_arguments_are_checked(kwargs: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        BasicLinear(**{"in_features": 3, "out_features": 2, **kwargs})


def test_without_ranks_parallelism_changes_nothing() -> None:
    op = BasicLinear(3, 2, tensor_parallel_mode="column", sequence_parallel=True)
    assert (op.tensor_parallel_mode, op.tensor_parallel_group) == (None, None)
    assert (op.tensor_parallel_size, op.sequence_parallel) == (1, False)
    assert (op.local_in_features, op.local_out_features) == (3, 2)
    x = torch.randn(4, 3)
    assert torch.equal(op(x), F.linear(x, op.weight))
