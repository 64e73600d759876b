"""``accumulate_into_grad``: the GEMM adds to ``weight.grad`` what autograd would add afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import opfuser as of
from opfuser.errors import ArgumentError, DoubleBackwardError
from opfuser.op import GradNeeds
from tests.contract.gradients import ADDS, handed_over, norm
from tests.contract.tensors import F64, as_exact, close, fill, leaf, outputs_of, rand

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Case(NamedTuple):
    """A sequence, the same in plain torch, the widths of its inputs, the fusion in its plan."""

    ops: Callable[[], list[nn.Module]]
    formula: Callable[..., Tensor]
    widths: tuple[int, ...] = (6,)
    fusion: str | None = None
    adds: bool = True


def silu_gated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


CASES = {
    "alone": Case(lambda: [of.BasicLinear(6, 4, **ADDS)], F.linear),
    "biased": Case(lambda: [of.Linear(6, 4, **ADDS)], F.linear),
    "scaled": Case(
        lambda: [of.BasicLinear(6, 4, **ADDS), of.ConstantScale(-0.3)],
        lambda x, w: -0.3 * F.linear(x, w),
        fusion="backward_linear_scale",
    ),
    "tapped": Case(
        lambda: [of.MakeExtraOutput(), of.BasicLinear(6, 4, **ADDS)],
        F.linear,
        fusion="backward_linear_add",
    ),
    "normed": Case(
        lambda: [of.RMSNorm(6), of.Linear(6, 4, **ADDS)],
        lambda x, g, w, b: F.linear(norm(x) * g, w, b),
        fusion="norm_linear",
    ),
    "activated": Case(
        lambda: [of.GELU(), of.Linear(6, 4, **ADDS)],
        lambda x, w, b: F.linear(F.gelu(x, approximate="tanh"), w, b),
        fusion="activation_linear",
    ),
    "gated, added": Case(
        lambda: [of.SwiGLU(), of.BasicLinear(6, 4, **ADDS), of.AddExtraInput()],
        lambda x, z, w: F.linear(silu_gated(x), w) + z,
        (12, 4),
        "activation_linear_add",
    ),
    "recomputed": Case(
        lambda: [
            of.RMSNorm(6), of.BasicLinear(6, 10, **ADDS), of.SwiGLU(), of.BasicLinear(5, 4, **ADDS),
        ],
        lambda x, g, v, w: F.linear(silu_gated(F.linear(norm(x) * g, v)), w),
        fusion="recompute_mlp",
    ),
    "loss": Case(
        lambda: [of.BasicLinear(6, 4, **ADDS), of.CrossEntropy()],
        lambda x, t, w: F.cross_entropy(F.linear(x, w), t),
        fusion="linear_cross_entropy",
        adds=False,
    ),
}  # fmt: skip
ROWS = 7
PAIRS = [(name, dtype) for n, name in enumerate(CASES) for dtype in (FP32, (BF16, FP16)[n % 2])]


@pytest.mark.parametrize(("name", "dtype"), [*PAIRS, ("alone", FP16), ("biased", BF16)], ids=str)
def test_three_micro_batches(name: str, dtype: torch.dtype, device: torch.device) -> None:
    case = CASES[name]
    seq = fill(of.Sequential(*case.ops())).to(device, dtype)
    plain, exact = (
        [p.detach().to(as_dtype).requires_grad_() for p in seq.parameters()]
        for as_dtype in (dtype, torch.float64)
    )
    weights = [p for p in seq.parameters() if p.dim() == 2]
    grads: list[Tensor] = []
    for step in range(3):
        tensors = [rand(ROWS, n, dtype=dtype).to(device).requires_grad_() for n in case.widths]
        if not case.adds:
            tensors.append(torch.randint(0, 4, (ROWS,), device=device))
        with ExitStack() as on:
            if case.fusion == "recompute_mlp":
                on.enter_context(of.enable(case.fusion))
            if case.fusion is not None:
                assert seq.plan(*tensors).fused("backward") == {case.fusion: 1}
            y = outputs_of(seq(*tensors))[0]
        dy = torch.randn_like(y)
        told = [handed_over(y, w) for w in weights]
        y.backward(dy)
        assert told == [[step == 0 or not case.adds]] * len(weights)
        grads = grads or [w.grad for w in weights]
        assert all(w.grad is grad for w, grad in zip(weights, grads)), "the same memory"
        for parameters in (plain, exact):
            as_dtype = parameters[0].dtype
            theirs = [t.detach().to(as_dtype) if t.is_floating_point() else t for t in tensors]
            case.formula(*theirs, *parameters).backward(dy.to(as_dtype))
    for ours, same, want in zip(seq.parameters(), plain, exact):
        as_exact(name, ours.grad, same.grad, want.grad)


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


class Largest(TorchDispatchMode):
    """The most elements of a tensor that is made meanwhile, but for views of those given."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in self.known:
            self.elements = max(self.elements, out.numel())
        return out


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
    weights = [p for p in model.parameters() if p.dim() == 2]
    y = model(x)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y.backward(dy)
        made = (torch.cuda.max_memory_allocated() - before) // x.itemsize
    else:
        with Largest(*weights, *(w.grad for w in weights)) as largest:
            y.backward(dy)
        made = largest.elements
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


@pytest.mark.parametrize("wanted", ["weight", "input", "both"])
def test_gradients_that_autograd_captures_and_inputs_of_backward(wanted: str) -> None:
    op, x, dy, dw = started()
    targets = {"weight": [op.weight], "input": [x], "both": [op.weight, x]}[wanted]
    grads = torch.autograd.grad(op(x), targets, dy)
    for target, grad in zip(targets, grads):
        close(grad, dw if target is op.weight else dy @ op.weight.detach())
    assert x.grad is None
    assert torch.equal(op.weight.grad, three())
    y = op(x)
    told = handed_over(y, op.weight)
    y.backward(dy, inputs=targets)
    assert told == [wanted == "input"]
    close(op.weight.grad, 3 + dw * (wanted != "input"))
    assert (x.grad is None) == (wanted == "weight")


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("retain", [False, True])
def test_create_graph(retain: bool) -> None:
    op, x, dy, dw = started()
    start = op.weight.grad
    y = op(x)
    y.backward(dy.requires_grad_(), create_graph=True, retain_graph=retain)
    assert start is not None
    assert torch.equal(start, three()), "autograd adds out of place"
    close(op.weight.grad, 3 + dw)
    with pytest.raises(DoubleBackwardError):
        torch.autograd.grad(op.weight.grad.sum(), dy)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("graph", [False, True])
def test_in_an_autograd_function_of_the_user(graph: bool) -> None:
    op, x, dy, dw = started()
    start = op.weight.grad
    assert start is not None

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
    close(op.weight.grad, 3 + dw)
    close(start, 3 + dw * (not graph))  # else autograd adds out of place


def test_batched_gradients() -> None:
    op, x, dy, _ = started()
    dys = torch.stack([dy, 2 * dy])
    (dx,) = torch.autograd.grad(op(x), x, dys, is_grads_batched=True)
    close(dx, dys @ op.weight.detach())
    assert torch.equal(op.weight.grad, three())


def _retained(op: of.BasicLinear, x: Tensor, dy: Tensor) -> None:
    y = op(x)
    told = handed_over(y, op.weight)
    y.backward(dy, retain_graph=True)
    y.backward(dy)
    assert told == [False, False]


def _checkpointed(reentrant: bool) -> Callable[..., None]:
    def twice(op: of.BasicLinear, x: Tensor, dy: Tensor) -> None:
        for _ in range(2):
            checkpoint(op, x, use_reentrant=reentrant).backward(dy)

    return twice


def _compiled(op: of.BasicLinear, x: Tensor, dy: Tensor) -> None:
    compiled = torch.compile(of.Sequential(op), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        compiled(x).backward(dy)


def _compiled_autograd(op: of.BasicLinear, x: Tensor, dy: Tensor) -> None:
    for _ in range(2):
        y = op(x)
        with compiled_autograd._enable(torch.compile(backend="eager")):
            y.backward(dy)


TWICE: dict[str, Callable[[of.BasicLinear, Tensor, Tensor], None]] = {
    "a retained graph": _retained,
    "checkpoints": _checkpointed(False),
    "reentrant checkpoints": _checkpointed(True),
    "torch.compile": _compiled,
    "compiled autograd": _compiled_autograd,
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of Dynamo
# What torch 2.11 imports for compiled autograd is deprecated by torch itself.
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("how", TWICE)
def test_two_backward_passes(how: str) -> None:
    op, x, dy, dw = started()
    TWICE[how](op, x, dy)
    close(op.weight.grad, 3 + 2 * dw)


@pytest.mark.parametrize("kind", ["parametrised", "computed"])
def test_a_weight_that_is_no_leaf(kind: str) -> None:
    class Double(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2 * w

    op, x, dy, dw = started()
    source = op.weight
    if kind == "parametrised":
        parametrize.register_parametrization(op, "weight", Double())
        op(x).backward(dy)
    else:
        functional_call(op, {"weight": 2 * source}, (x,)).backward(dy)
    close(source.grad, 3 + 2 * dw)


def test_the_weight_that_functional_call_passed() -> None:
    op, x, dy, dw = started()
    w = leaf(op.weight)
    w.grad = torch.full((4, 6), 7.0, dtype=torch.float64)
    y = functional_call(op, {"weight": w}, (x,))
    told = handed_over(y, w)
    y.backward(dy)
    assert told == [False]
    close(w.grad, 7 + dw)
    assert torch.equal(op.weight.grad, three())


@pytest.mark.parametrize("change", ["replaced", "cleared", "frozen"])
def test_changes_between_forward_and_backward(change: str) -> None:
    op, x, dy, dw = started()
    y, used = op(x), op.weight
    if change == "frozen":
        used.requires_grad_(False)
    else:
        op.weight = nn.Parameter(torch.zeros_like(used)) if change == "replaced" else None
        if change == "replaced":
            op.weight.grad = torch.full_like(used, 7.0)
    y.backward(dy)
    plain = leaf(used)
    plain.grad = three()
    z = F.linear(x.detach(), plain)
    plain.requires_grad_(change != "frozen")
    z.backward(dy)
    close(used.grad, plain.grad)
    if change == "replaced":
        assert torch.equal(op.weight.grad, torch.full_like(dw, 7.0))


def test_a_forward_that_left_no_weight() -> None:
    """The weight set now may be another one, even if it takes part in the same backward."""
    op, x, dy, dw = started()
    used = op.weight
    op.accumulate_into_grad = False
    y = op(x)
    op.accumulate_into_grad = True
    op.weight = nn.Parameter(used.detach().clone())
    op.weight.grad = torch.full_like(dw, 7.0)
    (y + F.linear(x.detach(), op.weight)).backward(dy)
    close(used.grad, 3 + dw)
    close(op.weight.grad, 7 + dw)


def test_outside_of_a_backward_pass() -> None:
    op, x, dy, dw = started()
    ctx = of.OperationContext()
    ctx.grad_weights = [op.weight]
    with torch.no_grad():
        close(op.weight_grad(dy, x.detach(), ctx), dw)
    assert torch.equal(op.weight.grad, three())


def test_a_training_loop() -> None:
    """Gradients set to None, or to zeros, between steps; parameters as with autograd's sums."""
    ours = fill(of.Sequential(of.Linear(6, 8, **ADDS, **F64), of.GELU(), of.Linear(8, 2, **F64)))
    theirs = copy.deepcopy(ours)
    theirs[0].accumulate_into_grad = False
    assert [m[0].accumulate_into_grad for m in (ours, theirs)] == [True, False]
    batches = [rand(5, 6) for _ in range(4)]
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for to_none in (True, False, True):
            optimizer.zero_grad(set_to_none=to_none)
            for x in batches:
                model(x).square().mean().backward()
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        close(p, q, 1e-9)


def test_one_place_only() -> None:
    flags = {"accumulate_into_main_grad": True, "accumulate_into_grad": True}
    for make in (of.BasicLinear, of.Linear, lambda *a, **kw: of.GroupedLinear(2, *a, **kw)):
        with pytest.raises(ArgumentError) as error:
            make(6, 4, **flags)
        for part in (
            "accumulated in one place",
            "Linear",
            "accumulate_into_main_grad=True, accumulate_into_grad=True",
            "Leave one of them False",
        ):
            assert part in str(error.value)
