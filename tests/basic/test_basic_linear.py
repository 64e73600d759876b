from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from opfuser import (
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    MakeExtraOutput,
    OperationContext,
    Sequential,
)
from opfuser.errors import (
    ArgumentError,
    InputError,
    NotSupportedError,
    ReadOnlyAttributeError,
)
from opfuser.op import GradNeeds
from opfuser.testing import check_op
from tests.contract.gradients import handed_over

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FLOOR = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 2e-4}

INPUTS: dict[str, Callable[[], Tensor]] = {
    "matrix": lambda: torch.randn(5, 7),
    "odd and long": lambda: torch.randn(129, 7),
    "one row": lambda: torch.randn(1, 7),
    "vector": lambda: torch.randn(7),
    "batched": lambda: torch.randn(2, 3, 4, 7),
    "zero rows": lambda: torch.randn(0, 7),
    "zero rows, batched": lambda: torch.randn(2, 0, 7),
    "transposed": lambda: torch.randn(7, 3, 2).transpose(0, 2),
    "strided": lambda: torch.randn(6, 14)[::2, ::2],
    "expanded": lambda: torch.randn(1, 7).expand(4, 7),
}


def differentiate(
    function: Callable[..., Tensor], x: Tensor, parameters: list[Tensor], dy: Tensor
) -> list[Tensor]:
    """Output, gradient of x, gradients of the parameters."""
    x = x.detach().requires_grad_()
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters], dy.to(y.dtype))]


def assert_as_exact_as_torch(ours: list[Tensor], plain: list[Tensor], exact: list[Tensor]) -> None:
    """Our error is at most twice that of plain torch in the same dtype, plus a floor."""
    for a, b, c in zip(ours, plain, exact):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if not c.numel():
            continue
        scale = c.abs().max().item() or 1.0
        error, allowed = ((t.double() - c).abs().max().item() for t in (a, b))
        assert error <= 2 * allowed + FLOOR[a.dtype] * scale


def context(*, input_: bool = True, weight: bool = True) -> OperationContext:
    ctx = OperationContext()
    ctx.needs = GradNeeds(input_, (weight,), ())
    return ctx


def forward(op: BasicLinear, ctx: OperationContext, x: Tensor) -> Tensor:
    with torch.no_grad():
        return op.op_forward(
            ctx, x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", INPUTS)
def test_matches_torch_in_value_and_gradients(
    shape: str, dtype: torch.dtype, device: torch.device
) -> None:
    op = BasicLinear(7, 11, dtype=dtype, device=device)
    x = INPUTS[shape]().to(device, dtype)
    dy = torch.randn(*x.shape[:-1], 11).to(device, dtype)
    w = op.weight.detach().requires_grad_()
    ours = differentiate(op, x, [op.weight], dy)
    plain = differentiate(lambda x: F.linear(x, w), x, [w], dy)
    w64 = w.detach().double().requires_grad_()
    exact = differentiate(lambda x: F.linear(x, w64), x.double(), [w64], dy.double())
    assert_as_exact_as_torch(ours, plain, exact)


@pytest.mark.parametrize("kind", ["expanded", "transposed", "strided"])
def test_takes_gradients_of_any_layout_and_leaves_them_alone(kind: str) -> None:
    op = BasicLinear(4, 6, dtype=torch.float64)
    x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    dy = {
        "expanded": torch.randn(1, 1, 6, dtype=torch.float64).expand(3, 5, 6),
        "transposed": torch.randn(6, 5, 3, dtype=torch.float64).transpose(0, 2),
        "strided": torch.randn(3, 10, 12, dtype=torch.float64)[:, ::2, ::2],
    }[kind]
    before = dy.clone()
    dx, dw = torch.autograd.grad(op(x), [x, op.weight], dy)
    torch.testing.assert_close(dx, before @ op.weight.detach())
    torch.testing.assert_close(dw, torch.einsum("abo,abi->oi", before, x.detach()))
    torch.testing.assert_close(dy, before, rtol=0, atol=0)


def test_reference_has_the_same_value_and_gradients() -> None:
    op = BasicLinear(4, 6, dtype=torch.float64)
    x, dy = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    ours = differentiate(op, x, [op.weight], dy)
    torch.testing.assert_close(ours, differentiate(op.reference, x, [op.weight], dy))


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7), (7,)], ids=str)
def test_check_op(shape: tuple[int, ...], device: torch.device) -> None:
    op = BasicLinear(7, 11, device=device)
    check_op(op, torch.randn(shape, device=device), dtypes=DTYPES, zero_rows=len(shape) > 1)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        check_op(op, torch.randn(shape, device=device))


def test_features_may_be_zero() -> None:
    x = torch.randn(3, 2, 4, requires_grad=True)
    y = Sequential(BasicLinear(4, 0), BasicLinear(0, 5))(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(3, 2, 5))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_decides_the_dtype_of_compute_but_not_of_gradients(dtype: torch.dtype) -> None:
    op = BasicLinear(7, 11)
    w = op.weight.detach().requires_grad_()
    x, dy = torch.randn(5, 7), torch.randn(5, 11)
    with torch.autocast("cpu", dtype=dtype):
        ours = differentiate(op, x, [op.weight], dy)
        plain = differentiate(lambda x: F.linear(x, w), x, [w], dy)
    w64 = w.detach().double().requires_grad_()
    exact = differentiate(lambda x: F.linear(x, w64), x.double(), [w64], dy.double())
    assert [t.dtype for t in ours] == [dtype, torch.float32, torch.float32]
    assert_as_exact_as_torch(ours, plain, exact)


def test_input_of_another_dtype_is_cast_to_that_of_the_weight() -> None:
    op = BasicLinear(4, 3, dtype=torch.bfloat16)
    x = torch.randn(2, 4, requires_grad=True)
    y = op(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(
        x.grad, op.weight.detach().float().sum(0).expand(2, 4), rtol=0.01, atol=0.01
    )


def test_saves_only_what_a_needed_gradient_reads() -> None:
    op, x = BasicLinear(4, 3), torch.randn(2, 4)
    both = context()
    forward(op, both, x)
    assert both.to_save is not None
    assert both.to_save[0] is x
    assert both.to_save[1] is op.weight
    frozen = context(weight=False)
    forward(op, frozen, x)
    assert frozen.to_save is not None
    assert frozen.to_save[0] is None
    assert frozen.to_save[1] is op.weight
    first = context(input_=False)
    forward(op, first, x)
    assert first.to_save is not None
    assert first.to_save[0] is x
    assert first.to_save[1] is None
    idle = context()
    idle.requires_grad = False
    forward(op, idle, x)
    assert idle.to_save is None


class CountMatrixProducts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.aten.bmm,
            torch.ops.aten.addmm_,
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("input_", "weight", "products"), [(True, True, 2), (True, False, 1), (False, True, 1)]
)
def test_hazard_23_no_product_for_a_gradient_nobody_reads(
    input_: bool, weight: bool, products: int
) -> None:
    op = BasicLinear(4, 3)
    op.weight.requires_grad_(weight)
    y = op(torch.randn(2, 4, requires_grad=input_))
    with CountMatrixProducts() as counter:
        y.sum().backward()
    assert counter.count == products


def test_gradients_belong_to_the_weight_that_forward_read() -> None:
    op = BasicLinear(2, 2)
    old = op.weight
    x = torch.randn(3, 2, requires_grad=True)
    y = op(x)
    op.weight = nn.Parameter(torch.zeros(2, 2))
    y.sum().backward()
    assert old.grad is not None
    assert op.weight.grad is None
    torch.testing.assert_close(x.grad, old.detach().sum(0).expand(3, 2))


def test_backward_twice_with_retain_graph_adds_up() -> None:
    op = BasicLinear(3, 2)
    x = torch.randn(4, 3)
    loss = op(x).square().sum()
    loss.backward(retain_graph=True)
    assert op.weight.grad is not None
    once = op.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(op.weight.grad, 2 * once)


def test_hazard_15_a_shared_weight_collects_the_gradients_of_all_its_uses() -> None:
    first, second = BasicLinear(3, 3, dtype=torch.float64), BasicLinear(3, 3, dtype=torch.float64)
    second.weight = first.weight
    x = torch.randn(2, 3, dtype=torch.float64)
    y = Sequential(first, second, first)(x)
    (grad,) = torch.autograd.grad(y.square().sum(), [first.weight])
    w = first.weight.detach().requires_grad_()
    (expected,) = torch.autograd.grad((x @ w.t() @ w.t() @ w.t()).square().sum(), [w])
    torch.testing.assert_close(grad, expected)


def test_functional_call_uses_and_differentiates_the_given_weight() -> None:
    op = BasicLinear(3, 2)
    w = torch.randn(2, 3, requires_grad=True)
    x = torch.randn(4, 3)
    y = functional_call(op, {"weight": w}, (x,))
    torch.testing.assert_close(y, x @ w.t())
    y.sum().backward()
    torch.testing.assert_close(w.grad, x.sum(0).expand(2, 3))
    assert op.weight.grad is None


def with_main_grad(
    dtype: torch.dtype = torch.float32, weight: torch.dtype | None = None
) -> BasicLinear:
    op = BasicLinear(3, 2, dtype=weight, accumulate_into_main_grad=True)
    op.weight.main_grad = torch.ones(2, 3, dtype=dtype)  # type: ignore[attr-defined]
    return op


def run_twice(op: BasicLinear) -> Tensor:
    """Two backward passes; returns the gradient of one."""
    x = torch.randn(5, 3, dtype=op.weight.dtype)
    dy = torch.randn(5, 2, dtype=op.weight.dtype)
    for _ in range(2):
        op(x).backward(dy)
    return dy.double().t() @ x.double()


def test_main_grad_accumulates_in_its_own_dtype() -> None:
    op = with_main_grad(torch.float32, weight=torch.bfloat16)
    buffer = op.weight.main_grad
    dw = run_twice(op)
    assert op.weight.main_grad is buffer
    assert op.weight.grad_added_to_main_grad is True
    torch.testing.assert_close(buffer.double(), 1 + 2 * dw, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_main_grad_may_be_narrower_or_wider_than_the_weight(dtype: torch.dtype) -> None:
    op = with_main_grad(dtype)
    dw = run_twice(op)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        op.weight.main_grad.double(), 1 + 2 * dw, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_hazard_8_overwrite_main_grad_writes_and_returns_a_placeholder(dtype: torch.dtype) -> None:
    op = with_main_grad(dtype)
    op.weight.overwrite_main_grad = True  # type: ignore[attr-defined]
    op.weight.main_grad.fill_(float("nan"))
    dw = run_twice(op)
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(op.weight.main_grad.double(), dw, rtol=tolerance, atol=tolerance)
    assert op.weight.grad is not None
    assert torch.equal(op.weight.grad, torch.zeros(2, 3))
    assert op.weight.grad_added_to_main_grad is True


def test_placeholder_fires_hooks_and_is_theirs_to_write() -> None:
    op = with_main_grad()
    seen: list[Tensor] = []

    def hook(weight: Tensor) -> None:
        assert weight.grad is not None
        seen.append(weight.grad.clone())
        weight.grad.add_(1)  # must reach neither main_grad nor a later placeholder
        weight.grad = None

    op.weight.register_post_accumulate_grad_hook(hook)
    dw = run_twice(op)
    assert len(seen) == 2
    assert all(torch.equal(grad, torch.zeros(2, 3)) for grad in seen)
    torch.testing.assert_close(op.weight.main_grad.double(), 1 + 2 * dw, rtol=1e-5, atol=1e-5)


def test_main_grad_may_be_flat_and_takes_zero_rows() -> None:
    op = with_main_grad()
    op.weight.main_grad = torch.zeros(6)
    op(torch.randn(0, 3)).sum().backward()
    assert torch.equal(op.weight.main_grad, torch.zeros(6))
    op(torch.ones(1, 3)).sum().backward()
    assert torch.equal(op.weight.main_grad, torch.ones(6))


def test_main_grad_is_left_alone_if_the_weight_is_frozen() -> None:
    op = with_main_grad()
    op.weight.requires_grad_(False)
    op(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert torch.equal(op.weight.main_grad, torch.ones(2, 3))
    assert not hasattr(op.weight, "grad_added_to_main_grad")


@pytest.mark.parametrize("buffer", [None, torch.zeros(5)], ids=["none", "wrong size"])
def test_main_grad_that_cannot_take_the_gradient_is_an_error(buffer: Tensor | None) -> None:
    op = with_main_grad()
    op.weight.main_grad = buffer
    y = op(torch.randn(2, 3))
    with pytest.raises(ArgumentError, match=r"main_grad of the parameter's shape \(BasicLinear\)"):
        y.sum().backward()


AROUND: dict[str, Callable[[BasicLinear], Sequential]] = {
    "alone": Sequential,
    "biased": lambda op: Sequential(op, Bias(2)),
    "added": lambda op: Sequential(op, Bias(2), AddExtraInput()),
    "tapped": lambda op: Sequential(MakeExtraOutput(), op),
    "scaled": lambda op: Sequential(op, ConstantScale(1.0)),
}


def run_around(kind: str, op: BasicLinear, weight: Tensor | None = None) -> Tensor:
    """Output for ones; ``weight`` takes the place of the one of ``op`` in this call alone."""
    model = AROUND[kind](op)
    inputs = [torch.ones(4, 3), *([torch.ones(4, 2)] if kind == "added" else [])]
    key = "1.weight" if kind == "tapped" else "0.weight"
    y = model(*inputs) if weight is None else functional_call(model, {key: weight}, tuple(inputs))
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("kind", AROUND)
def test_main_grad_of_the_weight_that_functional_call_passed(kind: str) -> None:
    op = with_main_grad()
    w = nn.Parameter(torch.randn(2, 3))
    w.main_grad = torch.zeros(2, 3)  # type: ignore[attr-defined]
    y = run_around(kind, op, w)
    y.sum().backward()
    assert torch.equal(w.main_grad, torch.full((2, 3), 4.0))
    assert w.grad_added_to_main_grad is True
    assert torch.equal(op.weight.main_grad, torch.ones(2, 3))
    assert not hasattr(op.weight, "grad_added_to_main_grad")


@pytest.mark.parametrize("new", [None, "parameter"])
@pytest.mark.parametrize("kind", AROUND)
def test_main_grad_of_the_weight_that_forward_read(kind: str, new: str | None) -> None:
    op = with_main_grad()
    old = op.weight
    y = run_around(kind, op)
    op.weight = None if new is None else nn.Parameter(torch.zeros(2, 3))
    y.sum().backward()
    assert torch.equal(old.main_grad, torch.full((2, 3), 5.0))
    assert old.grad_added_to_main_grad is True
    assert not hasattr(op.weight, "grad_added_to_main_grad")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", AROUND)
def test_backward_uses_main_grad_if_forward_was_to(kind: str, late: bool) -> None:
    op = with_main_grad()
    op.accumulate_into_main_grad = not late
    y = run_around(kind, op)
    op.accumulate_into_main_grad = late
    y.sum().backward()
    assert op.weight.grad is not None
    added, given = op.weight.main_grad - 1, op.weight.grad
    four = torch.full((2, 3), 4.0)
    torch.testing.assert_close((added, given), (0 * four, four) if late else (four, 0 * four))
    run_around(kind, op).sum().backward()  # what was set counts in the next call
    torch.testing.assert_close(op.weight.main_grad, 1 + four)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", AROUND)
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


@pytest.mark.parametrize("kind", AROUND)
def test_gradients_in_two_places_are_an_error_of_the_next_call(kind: str) -> None:
    op = with_main_grad()
    run_around(kind, op)
    op.accumulate_into_grad = True
    with pytest.raises(ArgumentError, match=r"accumulated in one place \(BasicLinear\)"):
        run_around(kind, op)
    op.accumulate_into_main_grad = False
    run_around(kind, op).sum().backward()
    assert torch.equal(op.weight.main_grad, torch.ones(2, 3))


@pytest.mark.parametrize("name", ["in_features", "out_features", "sharding"])
def test_what_the_weight_was_made_from_is_fixed(name: str) -> None:
    op = BasicLinear(3, 2)
    value = op.sharding._replace(ranks=2) if name == "sharding" else 4
    with pytest.raises(ReadOnlyAttributeError, match=rf"{name} is fixed.*\(BasicLinear\)"):
        setattr(op, name, value)
    setattr(op, name, getattr(op, name))
    assert op(torch.ones(1, 3)).shape == (1, 2)


def test_main_grad_under_checkpointing() -> None:
    op = with_main_grad()
    x = torch.ones(4, 3, requires_grad=True)
    for reentrant in (False, True):
        checkpoint(op, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(op.weight.main_grad, torch.full((2, 3), 9.0))


def test_main_grad_where_the_forward_left_no_weight() -> None:
    op = with_main_grad()
    dy, x = torch.ones(4, 2), torch.ones(4, 3)
    assert not op.weight_grad(dy, x, context()).any()
    assert not op.weight_grad(dy, x).any()
    assert torch.equal(op.weight.main_grad, torch.full((2, 3), 9.0))


def test_starts_as_torch_linear_does() -> None:
    torch.manual_seed(3)
    op = BasicLinear(5, 4)
    torch.manual_seed(3)
    assert torch.equal(op.weight, nn.Linear(5, 4, bias=False).weight)


def test_rng_tracker_is_forked_for_initialisation() -> None:
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


def test_hazard_11_meta_construction_then_materialisation_then_backward() -> None:
    op = BasicLinear(3, 2, device="meta")
    assert op.weight.is_meta
    op.to_empty(device="cpu")
    torch.manual_seed(5)
    op.reset_parameters()
    torch.manual_seed(5)
    assert torch.equal(op.weight, BasicLinear(3, 2).weight)
    op(torch.ones(4, 3)).sum().backward()
    torch.testing.assert_close(op.weight.grad, torch.full((2, 3), 4.0))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))])
def test_copies_work_on_their_own(copied: Callable[[BasicLinear], BasicLinear]) -> None:
    op = BasicLinear(3, 2)
    x = torch.randn(4, 3)
    y = op(x)
    twin = copied(op)
    assert torch.equal(twin(x), y)
    twin(x).sum().backward()
    assert twin.weight.grad is not None
    assert op.weight.grad is None


def test_state_dict_is_that_of_torch_linear_and_te_state_is_dropped() -> None:
    op = BasicLinear(3, 2)
    assert list(op.state_dict()) == ["weight"]
    op.load_state_dict({"weight": torch.ones(2, 3), "_extra_state": torch.zeros(4)})
    assert torch.equal(op.weight, torch.ones(2, 3))


def test_repr() -> None:
    assert repr(BasicLinear(3, 2)) == "BasicLinear(in_features=3, out_features=2)"


@pytest.mark.parametrize("shape", [(2, 4), (2, 1), ()])
def test_wrong_last_dimension_is_an_input_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        InputError, match=r"last dimension of the input must be in_features \(BasicLinear\(in_fe"
    ):
        BasicLinear(3, 2)(torch.randn(shape))


REFUSED = [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["alone", "biased", "added"])
@pytest.mark.parametrize("dtype", REFUSED, ids=str)
def test_input_of_a_dtype_that_a_cast_would_change_is_an_error(
    dtype: torch.dtype, kind: str, autocast: bool
) -> None:
    extra = [torch.ones(2, 2)] if kind == "added" else []
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
        pytest.raises(InputError, match=rf"fp64 \(BasicLinear\).*{dtype}.*Convert the input"),
    ):
        AROUND[kind](BasicLinear(3, 2))(torch.ones(2, 3).to(dtype), *extra)


@pytest.mark.parametrize("kind", AROUND)
def test_call_without_a_weight_is_an_error(kind: str) -> None:
    op = BasicLinear(3, 2)
    op.weight = None
    with pytest.raises(
        ArgumentError,
        match=r"needs its weight \(BasicLinear\(in_features=3, out.*weight = None. Assign a param",
    ):
        run_around(kind, op)


def test_arguments_are_checked() -> None:
    with pytest.raises(ArgumentError, match=r"mode must be None, 'column' or 'row'.*'rows'"):
        BasicLinear(3, 2, tensor_parallel_mode="rows")
    with pytest.raises(ArgumentError, match="sequence_parallel needs a tensor_parallel_mode"):
        BasicLinear(3, 2, sequence_parallel=True)
    with pytest.raises(ArgumentError, match=r"must not be negative.*in_features=-3"):
        BasicLinear(-3, 2)
    with pytest.raises(ArgumentError, match=r"float16, bfloat16, float32 or float64.*int64"):
        BasicLinear(3, 2, dtype=torch.int64)
    with pytest.raises(NotSupportedError, match=r"userbuffers_options must be None.*\{'fprop'"):
        BasicLinear(3, 2, userbuffers_options={"fprop": True})
    with pytest.raises(NotImplementedError):
        BasicLinear(3, 2, userbuffers_options={})


def test_without_ranks_parallelism_changes_nothing() -> None:
    op = BasicLinear(3, 2, tensor_parallel_mode="column", sequence_parallel=True)
    assert op.tensor_parallel_mode is None
    assert op.tensor_parallel_group is None
    assert op.tensor_parallel_size == 1
    assert not op.sequence_parallel
    assert (op.local_in_features, op.local_out_features) == (3, 2)
    x = torch.randn(4, 3)
    assert torch.equal(op(x), F.linear(x, op.weight))
