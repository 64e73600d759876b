"""Hazards 6 to 10: gradients that are overwritten, shared, misrouted or lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import F64, close, fill, leaf, rand

TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 5e-2}


@pytest.fixture(params=["fused", "unfused"])
def fusing(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the fusions of the library, and without: their kernels differ."""
    with of.disable(*["*"] * (request.param == "unfused")):
        yield


@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("after", ["Identity", "BasicLinear", "RMSNorm", "nothing"])
@pytest.mark.parametrize("in_place", [False, True])
def test_hazard_06_make_extra_output_leaves_the_incoming_gradient_alone(
    after: str, in_place: bool, dtype: torch.dtype
) -> None:
    ops: dict[str, list[of.BasicOperation]] = {
        "Identity": [of.Identity()],
        "BasicLinear": [of.BasicLinear(8, 8, dtype=dtype, device="cpu")],
        "RMSNorm": [of.RMSNorm(8, dtype=dtype, device="cpu")],
        "nothing": [],
    }
    model = fill(of.Sequential(of.MakeExtraOutput(in_place=in_place), *ops[after]))
    x = rand(5, 8, dtype=dtype, grad=True)
    dy, dextra = rand(5, 8, dtype=dtype), rand(5, 8, dtype=dtype)
    kept = dy.clone(), dextra.clone()
    y, extra = model(x)
    torch.autograd.backward([y, extra], [dy, dextra])
    assert torch.equal(dy, kept[0])
    assert torch.equal(dextra, kept[1])

    x64 = leaf(x)
    weight = leaf(model[1].weight) if after in ("BasicLinear", "RMSNorm") else None
    y64 = (
        F.linear(x64, weight) if after == "BasicLinear"
        else F.rms_norm(x64, (8,), weight, 1e-5) if after == "RMSNorm"
        else x64 * 1
    )  # fmt: skip
    torch.autograd.backward([y64, x64 * 1], [dy.double(), dextra.double()])
    close(x.grad, x64.grad, TOLERANCE[dtype])
    if weight is not None:
        close(model[1].weight.grad, weight.grad, TOLERANCE[dtype])


def test_hazard_06_operations_leave_grad_output_alone() -> None:
    """All operations in one sequence: an expanded gradient would raise if it were written to."""
    model = fill(
        of.Sequential(
            of.Linear(8, 16, **F64),
            of.SwiGLU(),
            of.LayerNorm(8, **F64),
            of.GELU(),
            of.RMSNorm(8, **F64),
            of.Dropout(0.0),
            of.Bias(8, **F64),
        )
    )
    for n in range(len(model)):
        tail = model[n:]
        x = rand(3, 8 if n != 1 else 16, grad=True)
        y = tail(x)
        dy = torch.randn(8, dtype=torch.float64).expand_as(y)
        kept = dy.clone()
        y.backward(dy)
        assert torch.equal(dy, kept)


@pytest.mark.parametrize("count", [0, 1, 3, 4])
@pytest.mark.parametrize("how", ["one group", "two groups"])
def test_hazard_07_a_wrong_number_of_extra_inputs_is_an_error(count: int, how: str) -> None:
    between = [nn.Identity()] if how == "two groups" else []
    model = of.Sequential(of.AddExtraInput(), *between, of.ConstantScale(2.0), of.AddExtraInput())
    x = rand(3, 8)
    with pytest.raises(ValueError, match=f"Expected 2 extra inputs but got {count}") as error:
        model(x, *[x] * count)
    text = str(error.value)
    assert "op 0 (AddExtraInput)" in text
    assert "op 2 (AddExtraInput)" in text
    assert "ConstantScale" not in text, "only operations that ask for one are named"


def test_hazard_07_extra_inputs_that_nobody_asks_for() -> None:
    x = rand(3, 8)
    for call in (of.Sequential(of.Identity()), of.OperationFuser([of.Identity()]), of.Identity()):
        with pytest.raises(ValueError, match="Expected 0 extra inputs but got 1"):
            call(x, x)
    with pytest.raises(ValueError, match="Expected 0 extra inputs but got 1"):
        of.Sequential(nn.Identity())(x, x)
    with pytest.raises(ValueError, match="Expected 1 extra inputs but got 2"):
        of.AddExtraInput()(x, x, x)


@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_hazard_08_main_grad_is_not_returned_as_the_gradient(
    overwrite: bool, scale: float | None
) -> None:
    linear = fill(of.BasicLinear(6, 4, accumulate_into_main_grad=True, **F64))
    weight = linear.weight
    weight.main_grad = torch.full((4, 6), 3.0, dtype=torch.float64)
    weight.overwrite_main_grad = overwrite
    weight.grad_added_to_main_grad = False
    main_memory = weight.main_grad.untyped_storage().data_ptr()
    returned: list[Tensor] = []
    weight.register_hook(returned.append)
    model = of.Sequential(linear, *([] if scale is None else [of.ConstantScale(scale)]))
    x, dy = rand(5, 6, grad=True), rand(5, 4)
    for step in (1, 2):
        model(x).backward(dy)
        dw = (scale or 1.0) * dy.t() @ x.detach()
        close(weight.main_grad, dw if overwrite else step * dw + 3.0)
        assert weight.grad_added_to_main_grad is True
        assert len(returned) == step, "hooks on the gradient must fire"
        assert returned[-1].shape == weight.shape
        assert returned[-1].untyped_storage().data_ptr() != main_memory
        # Were .grad not to be ignored, an optimizer would count the gradient twice.
        assert weight.grad is None or not weight.grad.any()


def _apart(*tensors: Tensor | None) -> None:
    places = [t.untyped_storage().data_ptr() for t in tensors if t is not None]
    assert len(places) == len(tensors)
    assert len(set(places)) == len(places), "two gradients share memory"


@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("with_linear", [False, True])
def test_hazard_09_both_sides_of_an_addition(dtype: torch.dtype, with_linear: bool) -> None:
    head = [of.Linear(8, 8, dtype=dtype, device="cpu")] if with_linear else []
    model = of.Sequential(*head, of.AddExtraInput())
    x, h = rand(8, dtype=dtype, grad=True), rand(8, dtype=dtype, grad=True)
    dy = rand(8, dtype=dtype)
    kept = dy.clone()
    model(x, h).backward(dy)
    biases = [head[0].bias] if with_linear else []
    _apart(dy, x.grad, h.grad, *[b.grad for b in biases])
    want = x.grad.clone(), h.grad.clone()  # type: ignore[union-attr]
    # Autograd accumulates in place from the second time on.
    model(x, h).backward(dy)
    close(x.grad, 2 * want[0])
    close(h.grad, 2 * want[1])
    for b in biases:
        close(b.grad, 2 * kept.double())
    h.grad.zero_()  # type: ignore[union-attr]
    close(x.grad, 2 * want[0])
    assert torch.equal(dy, kept)


@pytest.mark.parametrize("op", ["Bias", "Linear"])
def test_hazard_09_bias_gradient_of_a_single_vector(op: str) -> None:
    """Nothing is summed for an input without rows, so that db equals dy: but it may not be dy."""
    layer = of.Bias(8, **F64) if op == "Bias" else of.Linear(8, 8, **F64)
    model = of.Sequential(of.ConstantScale(1.0), layer, of.Identity())
    x, dy = rand(8, grad=True), rand(8)
    kept = dy.clone()
    model(x).backward(dy)
    _apart(dy, x.grad, layer.bias.grad)
    layer.bias.grad.add_(1.0)
    close(x.grad, kept if op == "Bias" else kept @ layer.weight)
    assert torch.equal(dy, kept)


def test_hazard_09_views_of_the_received_gradient() -> None:
    model = of.Sequential(of.Reshape((8,)), of.Bias(8, **F64), of.Identity(), of.Reshape((2, 4)))
    x, dy = rand(2, 4, grad=True), rand(2, 4)
    kept = dy.clone()
    model(x).backward(dy)
    _apart(dy, x.grad, model[1].bias.grad)
    model(x).backward(dy)
    close(x.grad, 2 * kept)
    close(model[1].bias.grad, 2 * kept.view(8))
    assert torch.equal(dy, kept)


def test_hazard_09_one_input_used_twice_and_elsewhere() -> None:
    """A gradient that autograd adds up with others on the way to a tensor that is no leaf."""
    model = of.Sequential(of.Bias(8, **F64), of.AddExtraInput())
    root = rand(3, 8, grad=True)
    h = root * 2
    dy = rand(3, 8)
    (model(h, h) + h).backward(dy)
    close(root.grad, 6 * dy)
    close(model[0].bias.grad, dy.sum(0))


class AsksTheTensor(of.BasicOperation):
    """Records what ``requires_grad`` says of the input, which inside a Function means nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 2.0, dtype=torch.float64))
        self.seen: list[bool] = []

    def op_forward(self, ctx: of.OperationContext, input_: Tensor, **unused: Any) -> Tensor:
        if ctx.requires_grad:
            ctx.save_for_backward(input_, self.weight)
        return input_ * self.weight

    def op_backward(self, ctx: of.OperationContext, grad_output: Tensor) -> Any:
        x, w = ctx.saved_tensors
        self.seen.append(x.requires_grad)
        return grad_output * w, ((grad_output * x).sum(0),)


@pytest.mark.parametrize("input_grad", [False, True])
@pytest.mark.parametrize("weight_grad", [False, True])
@pytest.mark.parametrize("leading", [0, 1, 2])
def test_hazard_10_gradients_follow_the_plan_not_saved_tensors(
    input_grad: bool, weight_grad: bool, leading: int
) -> None:
    if not input_grad and not weight_grad:
        return
    head: list[nn.Module] = [of.ConstantScale(0.5), of.SiLU()][:leading]
    linear = fill(of.BasicLinear(8, 8, **F64))
    linear.weight.requires_grad_(weight_grad)
    own = AsksTheTensor()
    own.weight.requires_grad_(weight_grad)
    model = of.Sequential(*head, linear, of.SiLU(), own)
    x = rand(3, 8, grad=input_grad)
    root = x * 1.5  # no leaf
    dy = rand(3, 8)
    y = model(root)
    assert y.requires_grad
    y.backward(dy)
    x64, w, v = leaf(x), leaf(linear.weight), leaf(own.weight)
    a = x64 * 1.5
    for op in head:
        a = a * 0.5 if isinstance(op, of.ConstantScale) else F.silu(a)
    (F.silu(F.linear(a, w)) * v).backward(dy)
    if input_grad:
        close(x.grad, x64.grad)
    else:
        assert x.grad is None
    for got, want in ((linear.weight.grad, w.grad), (own.weight.grad, v.grad)):
        if weight_grad:
            close(got, want)
        else:
            assert got is None
