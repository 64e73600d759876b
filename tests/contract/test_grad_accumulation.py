"""``accumulate_into_grad``: the GEMM adds to ``weight.grad`` what autograd would add afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import opfuser as of
from opfuser.errors import DoubleBackwardError
from opfuser.op import GradNeeds
from tests.contract.gradients import ADDS, handed_over
from tests.contract.tensors import F64, Live, close, fill, leaf, rand

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(("rows", "lies"), [(0, ""), (1, ""), (5, "transposed"), (5, "expanded")])
@pytest.mark.parametrize("scale", [[], [lambda: of.ConstantScale(0.5)]], ids=["alone", "scaled"])
def test_rows_of_any_number_and_layout(rows: int, lies: str, scale: list[Any]) -> None:
    op = fill(of.BasicLinear(6, 4, **ADDS, **F64))
    op.weight.grad = start = rand(4, 6)
    before = start.clone()
    x, dy = rand(rows, 6), rand(rows, 4)
    if lies == "transposed":
        x, dy = x.t().contiguous().t(), dy.t().contiguous().t()
    elif lies == "expanded":
        x, dy = x[:1].expand(rows, 6), dy[:1, :1].expand(rows, 4)
    y = of.Sequential(op, *(make() for make in scale))(x)
    told = handed_over(y, op.weight)
    y.backward(dy)
    assert told == [False]
    assert op.weight.grad is start
    close(start, before + (0.5 if scale else 1.0) * dy.t() @ x)


@pytest.mark.parametrize("adds", [False, True])
def test_no_memory_for_the_gradient_after_the_first_micro_batch(
    adds: bool, device: torch.device
) -> None:
    model = of.Sequential(
        of.RMSNorm(256), of.Linear(256, 512, accumulate_into_grad=adds), of.SwiGLU(),
        of.Linear(256, 256, accumulate_into_grad=adds), of.ConstantScale(2.0),
        of.BasicLinear(256, 256, accumulate_into_grad=adds), of.ConstantScale(2.0),
    ).to(device)  # fmt: skip
    x, dy = torch.randn(3, 256, device=device), torch.randn(3, 256, device=device)
    for _ in range(2):  # on a GPU, libraries allocate their workspaces too
        model(x).backward(dy)
    y = model(x)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y.backward(dy)
        made = (torch.cuda.max_memory_allocated() - before) // x.itemsize
    else:
        with Live() as live:
            y.backward(dy)
        made = live.peak // x.itemsize
    assert (made < 256 * 256) == adds


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_fp32_grad_under_autocast(dtype: torch.dtype, device: torch.device) -> None:
    """One GEMM on a GPU; on a CPU there is none that adds a half-precision product to fp32."""
    op = fill(of.BasicLinear(6, 4, **ADDS)).to(device)
    op.weight.grad = torch.full((4, 6), 256.0, device=device)
    x, dy = rand(5, 6, dtype=dtype).to(device), rand(5, 4, dtype=dtype).to(device)
    with torch.autocast(device.type, dtype):
        y = of.Sequential(op)(x)
    told = handed_over(y, op.weight)
    y.backward(dy)
    assert told == [device.type == "cpu"]
    assert op.weight.grad.dtype == torch.float32
    want = 256 + dy.double().t() @ x.double()
    tolerance = 1e-6 if device.type == "cuda" else torch.finfo(dtype).eps
    close(op.weight.grad.cpu(), want.cpu(), tolerance)


@pytest.mark.gpu
def test_in_another_stream_than_the_default_one_autograd_adds() -> None:
    op = fill(of.BasicLinear(6, 4, **ADDS)).cuda()
    x = torch.ones(5, 6, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for step in range(3):
        with torch.cuda.stream(side):
            y = of.Sequential(op)(x)
        told = handed_over(y, op.weight)
        y.sum().backward()
        assert told == [True], step
    assert torch.equal(op.weight.grad.cpu(), torch.full((4, 6), 15.0))


# What follows starts from a weight whose gradient is 3 everywhere.


class Tagged(Tensor):
    pass


class TaggedParameter(nn.Parameter):
    pass


def three(*shape: int) -> Tensor:
    return torch.full(shape or (4, 6), 3.0, dtype=torch.float64)


def started() -> tuple[of.BasicLinear, Tensor, Tensor, Tensor]:
    """An operation, its input, a gradient of its output, and what that is for the weight."""
    op = fill(of.BasicLinear(6, 4, **ADDS, **F64))
    op.weight.grad = three()
    x, dy = rand(5, 6, grad=True), rand(5, 4)
    return op, x, dy, dy.t() @ x.detach()


def _grad(grad: Callable[[], Tensor]) -> Callable[[Any], None]:
    def set_grad(op: of.BasicLinear) -> None:
        op.weight.grad = grad()

    return set_grad


def _tagged_weight(op: of.BasicLinear) -> None:
    op.weight = TaggedParameter(op.weight.detach())
    op.weight.grad = three()


def _without_the_flag(op: of.BasicLinear) -> None:
    op.accumulate_into_grad = False


AUTOGRAD_ADDS: dict[str, Callable[[of.BasicLinear], Any]] = {
    "a transposed grad": _grad(lambda: three(6, 4).t()),
    "a sparse grad": _grad(lambda: three().to_sparse()),
    "a grad of a subclass": _grad(lambda: three().as_subclass(Tagged)),
    "a grad that requires grad": _grad(lambda: three().requires_grad_()),
    "a weight of a subclass": _tagged_weight,
    "without the flag": _without_the_flag,
}


@pytest.mark.filterwarnings("ignore:grad and param do not obey")  # of torch; for "transposed"
@pytest.mark.parametrize("kind", AUTOGRAD_ADDS)
def test_where_autograd_must_get_the_gradient(kind: str) -> None:
    op, x, dy, dw = started()
    AUTOGRAD_ADDS[kind](op)
    y = op(x)
    told = handed_over(y, op.weight)
    y.backward(dy)
    assert told == [True]
    close(op.weight.grad.to_dense().as_subclass(Tensor), 3 + dw)


@pytest.mark.parametrize("kind", ["hook", "post accumulate"])
def test_hooks_of_the_weight_see_the_gradient(kind: str) -> None:
    op, x, dy, dw = started()
    seen: list[Tensor] = []

    def double(grad: Tensor) -> Tensor:
        seen.append(grad)
        return 2 * grad

    def take(weight: Tensor) -> None:
        assert weight.grad is not None
        seen.append(weight.grad - 3)

    if kind == "hook":
        handle = op.weight.register_hook(double)
    else:
        handle = op.weight.register_post_accumulate_grad_hook(take)
    y = op(x)
    told = handed_over(y, op.weight)
    y.backward(dy)
    assert told == [True]
    close(seen[0], dw)
    close(op.weight.grad, 3 + (2 if kind == "hook" else 1) * dw)
    handle.remove()
    y = op(x)
    told = handed_over(y, op.weight)
    y.backward(dy)
    assert (told, len(seen)) == ([False], 1), "once the hook is gone, the GEMM adds"


class Double(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


def _inputs(*wanted: str) -> Callable[..., None]:
    def backward(op: of.BasicLinear, x: Tensor, dy: Tensor) -> None:
        targets = {"weight": op.weight, "input": x}
        y = op(x)
        told = handed_over(y, op.weight)
        y.backward(dy, inputs=[targets[name] for name in wanted])
        assert told == ["weight" not in wanted]
        assert (x.grad is None) == ("input" not in wanted)

    return backward


def _captured(op: of.BasicLinear, x: Tensor, dy: Tensor) -> None:
    dx, dw = torch.autograd.grad(op(x), [x, op.weight], dy)
    close(dx, dy @ op.weight.detach())
    close(dw, dy.t() @ x.detach())
    assert x.grad is None


def _batched(op: of.BasicLinear, x: Tensor, dy: Tensor) -> None:
    dys = torch.stack([dy, 2 * dy])
    (dx,) = torch.autograd.grad(op(x), x, dys, is_grads_batched=True)
    close(dx, dys @ op.weight.detach())


def _outside(op: of.BasicLinear, x: Tensor, dy: Tensor) -> None:
    ctx = of.OperationContext()
    ctx.grad_weight = op.weight
    with torch.no_grad():
        close(op.weight_grad(dy, x.detach(), ctx), dy.t() @ x.detach())


def _frozen_since(op: of.BasicLinear, x: Tensor, dy: Tensor) -> None:
    y = op(x)
    op.weight.requires_grad_(False)
    y.backward(dy)
    close(x.grad, dy @ op.weight)


def _replaced_since(op: of.BasicLinear, x: Tensor, dy: Tensor) -> None:
    y = op(x)
    op.weight = nn.Parameter(torch.zeros_like(op.weight))
    y.backward(dy)
    assert op.weight.grad is None


def _create_graph(retain: bool) -> Callable[..., None]:
    def backward(op: of.BasicLinear, x: Tensor, dy: Tensor) -> None:
        op(x).backward(dy.requires_grad_(), create_graph=True, retain_graph=retain)
        with pytest.raises(DoubleBackwardError):
            torch.autograd.grad(op.weight.grad.sum(), dy)

    return backward


def _own_function(graph: bool) -> Callable[..., None]:
    """In an autograd function of the user."""

    def backward(op: of.BasicLinear, x: Tensor, dy: Tensor) -> None:
        class Own(torch.autograd.Function):
            @staticmethod
            def forward(func_ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
                func_ctx.inner = ctx = of.OperationContext()
                ctx.needs = GradNeeds(True, (True,), ())
                return op.op_forward(
                    ctx, x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None
                )

            @staticmethod
            def backward(func_ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
                ctx = func_ctx.inner
                ctx.saved_tensors = ctx.to_save
                dx, (dw,) = op.op_backward(ctx, dy)
                return dx, dw

        Own.apply(x, op.weight).backward(dy, create_graph=graph)

    return backward


def _parametrized(op: of.BasicLinear, x: Tensor, dy: Tensor) -> None:
    parametrize.register_parametrization(op, "weight", Double())
    op(x).backward(dy)


def _computed(op: of.BasicLinear, x: Tensor, dy: Tensor) -> None:
    functional_call(op, {"weight": 2 * op.weight}, (x,)).backward(dy)


def _passed(op: of.BasicLinear, x: Tensor, dy: Tensor) -> None:
    """The weight that functional_call passed is the one whose gradient is added to."""
    w = leaf(op.weight)
    w.grad = torch.full((4, 6), 7.0, dtype=torch.float64)
    y = functional_call(op, {"weight": w}, (x,))
    told = handed_over(y, w)
    y.backward(dy)
    assert told == [False]
    close(w.grad, 7 + dy.t() @ x.detach())


def _retained(op: of.BasicLinear, x: Tensor, dy: Tensor) -> None:
    y = op(x)
    told = handed_over(y, op.weight)
    y.backward(dy, retain_graph=True)
    y.backward(dy)
    assert told == [False, False]


def _checkpointed(reentrant: bool) -> Callable[..., None]:
    def backward(op: of.BasicLinear, x: Tensor, dy: Tensor) -> None:
        for _ in range(2):
            checkpoint(op, x, use_reentrant=reentrant).backward(dy)

    return backward


def _compiled(op: of.BasicLinear, x: Tensor, dy: Tensor) -> None:
    torch.compiler.reset()  # Dynamo counts what other tests compiled
    compiled = torch.compile(of.Sequential(op), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        compiled(x).backward(dy)


def _compiled_autograd(op: of.BasicLinear, x: Tensor, dy: Tensor) -> None:
    for _ in range(2):
        y = op(x)
        with compiled_autograd._enable(lambda graph: graph):
            y.backward(dy)


# What a backward pass is, how often it adds the product to the weight's gradient, and whether in
# place; out of place where autograd has to.
WAYS: dict[str, tuple[Callable[[of.BasicLinear, Tensor, Tensor], None], int, bool]] = {
    "into the weight": (_inputs("weight"), 1, True),
    "into the input": (_inputs("input"), 0, True),
    "into both": (_inputs("weight", "input"), 1, True),
    "captured": (_captured, 0, True),
    "batched": (_batched, 0, True),
    "outside of a pass": (_outside, 0, True),
    "frozen since": (_frozen_since, 0, True),
    "replaced since": (_replaced_since, 1, True),
    "create_graph": (_create_graph(False), 1, False),
    "create_graph, retained": (_create_graph(True), 1, False),
    "a function of the user": (_own_function(False), 1, True),
    "a function of the user, create_graph": (_own_function(True), 1, False),
    "a parametrized weight": (_parametrized, 2, True),
    "a computed weight": (_computed, 2, True),
    "a weight passed by functional_call": (_passed, 0, True),
    "a retained graph": (_retained, 2, True),
    "checkpoints": (_checkpointed(False), 2, True),
    "reentrant checkpoints": (_checkpointed(True), 2, True),
    "torch.compile": (_compiled, 2, True),
    "compiled autograd": (_compiled_autograd, 2, True),
}


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of Dynamo
# What torch 2.11 imports for compiled autograd is deprecated by torch itself.
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("how", WAYS)
def test_ways_of_differentiating(how: str) -> None:
    backward, times, in_place = WAYS[how]
    op, x, dy, dw = started()
    weight = op.weight
    start = weight.grad
    backward(op, x, dy)
    close(weight.grad, 3 + times * dw)
    close(start, 3 + times * dw * in_place)
