"""From the third call of a kind on, recorded functions run: results are those of any other call."""

from __future__ import annotations

import linecache
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import opfuser
from opfuser import GELU, Linear, Residual, RMSNorm, Sequential, SwiGLU
from opfuser.change_tracking import active_calls
from opfuser.engine.recorder import Recorder
from opfuser.engine.specialized import unrecorded
from opfuser.op import BasicOperation, OperationContext
from opfuser.recording import watching
from tests.engine.toys import without_collector

D = 16
ENOUGH = 4  # calls after which both passes are recorded


def block() -> Sequential:
    """A block of a decoder."""
    attention = opfuser.DotProductAttention(2, causal=True)
    return Sequential(
        Residual(opfuser.LayerNorm(D), Linear(D, 3 * D), attention, Linear(D, D)),
        Residual(RMSNorm(D), Linear(D, 4 * D), SwiGLU(), Linear(2 * D, D)),
    )


def mlp() -> Sequential:
    """Operations whose forward torch differentiates in forward mode, too."""
    return Sequential(Residual(RMSNorm(D), Linear(D, 2 * D), GELU(), Linear(2 * D, D)), RMSNorm(D))


def dropout() -> Sequential:
    """Draws random numbers."""
    return Sequential(Linear(D, D), opfuser.Dropout(0.5), Linear(D, D))


def image(*, grad: bool = True) -> Tensor:
    return torch.randn(2, 3, D, requires_grad=grad)


@contextmanager
def passes() -> Iterator[list[str]]:
    """The recorded functions that run within it, on this thread."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and " specialized " in code.co_filename and code.co_name != "<module>":
            names.append(code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(before)


def both(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """The outputs of a call, and the gradients of inputs and parameters."""
    outputs = module(*inputs)
    rows = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum(((n + 1) * y.double().square().sum() for n, y in enumerate(rows)), torch.zeros(()))
    wanted = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    return [*rows, *torch.autograd.grad(total, wanted)]


def output(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """The output of a call without gradients."""
    with torch.no_grad():
        return [module(*inputs)]


def record(module: nn.Module, *inputs: Tensor, call: Callable[..., Any] = both) -> None:
    """Calls a module until its passes are recorded."""
    for _ in range(ENOUGH):
        call(module, *inputs)
    with passes() as names:
        call(module, *inputs)
    assert names, "nothing was recorded"


def twin(make: Callable[[], nn.Module], module: nn.Module) -> nn.Module:
    """Another module with the same values."""
    other = make()
    other.load_state_dict(module.state_dict())
    return other


def bits(t: Tensor) -> Tensor:
    return t.detach().flatten().contiguous().view(torch.uint8)


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Equal bit for bit."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("make", [block, mlp, dropout])
def test_recorded_functions_return_the_same(make: Callable[[], Sequential]) -> None:
    module = make()
    record(module, image())
    with unrecorded():
        other = twin(make, module)
        for seed in range(3):
            torch.manual_seed(seed)
            x = image()
            theirs = both(other, x)
            torch.manual_seed(seed)
            x = image()
            with passes() as names:
                ours = both(module, x)
            assert names == ["forward", "backward"]
            assert_same(ours, theirs)


# What changes between a call that was recorded and one that follows.


def _linears(module: nn.Module) -> list[Any]:
    return [m for m in module.modules() if isinstance(m, Linear)]


def _transpose_weights(module: nn.Module) -> None:
    for layer in _linears(module):
        layer.weight.data = layer.weight.data.t().contiguous().t()


def _replace_weights(module: nn.Module) -> None:
    for layer in _linears(module):
        layer.weight = nn.Parameter(layer.weight.detach() + 1)


def _tie_biases(module: nn.Module) -> None:
    first, *others = _linears(module)
    for other in others:
        if other.bias.shape == first.bias.shape:
            other.bias = first.bias


def _set_eps(module: nn.Module) -> None:
    next(m for m in module.modules() if isinstance(m, RMSNorm)).eps = 0.5


def _double_values(module: nn.Module) -> None:
    for p in module.parameters():
        p.data.mul_(2)


def _move(module: nn.Module) -> None:
    for p in module.parameters():
        p.data = p.data.clone()


def _freeze(module: nn.Module) -> None:
    for p in list(module.parameters())[::2]:
        p.requires_grad_(False)


CHANGES = [_transpose_weights, _replace_weights, _tie_biases, _set_eps, _double_values, _move]
CHANGES += [_freeze, nn.Module.double, nn.Module.eval, nn.Module.requires_grad_]


@pytest.mark.parametrize("make", [block, mlp])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_changes_of_a_module_take_effect(
    change: Callable[[nn.Module], Any], make: Callable[[], Sequential]
) -> None:
    module = make()
    x = image()
    record(module, x)
    other = twin(make, module)
    change(module)
    change(other)
    x = x.detach().to(next(module.parameters()).dtype).requires_grad_()
    with unrecorded():
        theirs = both(other, x)
    for _ in range(ENOUGH):
        assert_same(both(module, x), theirs)


def _expanded() -> Tensor:
    return torch.randn(3, D).expand(2, 3, D)


def _strided() -> Tensor:
    return torch.randn(2, 3, 2 * D)[..., ::2]


def _other_rows() -> Tensor:
    return torch.randn(5, 1, D)


def _two_dimensions() -> Tensor:
    return torch.randn(6, D)


def _empty() -> Tensor:
    return torch.randn(0, 3, D)


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.randn(2, 3, D)


def _double() -> Tensor:
    return torch.randn(2, 3, D, dtype=torch.float64)


@pytest.mark.parametrize("call", [both, output])
@pytest.mark.parametrize(
    "other_input",
    [_expanded, _strided, _other_rows, _two_dimensions, _empty, _inference, _double],
    ids=lambda make: make.__name__.strip("_"),
)
def test_inputs_of_other_kinds(
    other_input: Callable[[], Tensor], call: Callable[..., list[Tensor]]
) -> None:
    module = mlp()
    record(module, image(), call=call)
    x = other_input()
    if x.dtype == torch.float64:
        module.double()
    if x.is_inference():
        module.requires_grad_(False)
        call = output
    with unrecorded():
        theirs = call(twin(mlp, module).to(x.dtype), x)
    for _ in range(ENOUGH):
        assert_same(call(module, x), theirs)


class _Wrapped(Tensor):
    """A subclass, which may mean anything."""


def _sparse() -> Tensor:
    return torch.eye(3, D).to_sparse()


def _csr() -> Tensor:
    return torch.eye(3, D).to_sparse_csr()


def _nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(D), torch.ones(2 * D)])


def _jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(3, D)], layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor")
@pytest.mark.parametrize("layout", [_sparse, _csr, _nested, _jagged])
def test_inputs_of_other_layouts(layout: Callable[[], Tensor]) -> None:
    """Also where they claim the sizes and strides of the tensor that was recorded."""
    x = layout()
    module = opfuser.ReLU()
    record(module, torch.zeros(()).expand(3, D), call=output)
    with unrecorded():
        theirs = opfuser.ReLU()(x)
    for _ in range(ENOUGH):
        with passes() as names:
            (ours,) = output(module, x)
        assert not names
        assert (type(ours), ours.layout) == (type(theirs), theirs.layout)
        if x.layout is not torch.jagged and not x.is_nested:
            assert torch.equal(ours.to_dense(), theirs.to_dense())


def test_a_subclass_of_tensor_runs_the_program() -> None:
    module = mlp()
    x = torch.randn(2, 3, D)
    record(module, x, call=output)
    with passes() as names:
        output(module, x.as_subclass(_Wrapped))
    assert not names


# Modes.


@contextmanager
def _threads() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(count + 1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


@contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "more threads": _threads,
    "default dtype": _default_dtype,
    "default device": partial(torch.device, "meta"),
    "profiler": torch.profiler.profile,
    "anomalies": partial(torch.autograd.detect_anomaly, check_nan=False),
    "events": opfuser.events.record_events,
    "FLOP counter": partial(FlopCounterMode, display=False),
    "hooks": partial(
        torch.autograd.graph.saved_tensors_hooks, lambda t: t.clone(), lambda t: t
    ),
}  # fmt: skip


def split(module: nn.Module, x: Tensor, forward: str, backward: str) -> list[Tensor]:
    """As :func:`both`, each pass in a mode."""
    with MODES[forward]() if forward else nullcontext():
        y = module(x)
    dy = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
    with MODES[backward]() if backward else nullcontext():
        return [y, *torch.autograd.grad(y, [x, *module.parameters()], dy)]


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:.*[pP]rofiler")
@pytest.mark.parametrize("recorded_in", ["", "autocast"])
@pytest.mark.parametrize("which", ["forward", "backward", "both"])
@pytest.mark.parametrize("mode", MODES)
def test_modes_of_later_calls(mode: str, which: str, recorded_in: str) -> None:
    module, x = block(), image()
    record(module, x, call=partial(split, forward=recorded_in, backward=""))
    passed = mode if which != "backward" else "", mode if which != "forward" else ""
    with unrecorded():
        theirs = split(twin(block, module), x, *passed)
    for _ in range(ENOUGH):
        assert_same(split(module, x, *passed), theirs)


@contextmanager
def _other_attention() -> Iterator[None]:
    """As torch's ``context_parallel`` replaces it."""
    own = functional.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", partial(own))
        yield


@contextmanager
def _a_number_set_in_a_forward_pass() -> Iterator[None]:
    active_calls.depth += 1
    try:
        norm = RMSNorm(D)
        norm.eps = 0.5
    finally:
        active_calls.depth -= 1
    yield


REFUSING = [_threads, _other_attention, opfuser.events.record_events, torch.profiler.profile]
REFUSING += [torch.inference_mode, _a_number_set_in_a_forward_pass]


@pytest.mark.filterwarnings("ignore:.*[pP]rofiler")
@pytest.mark.parametrize("mode", REFUSING, ids=lambda mode: mode.__name__.strip("_"))
def test_calls_in_other_modes_run_the_program(mode: Callable[[], Any]) -> None:
    module, x = block(), torch.randn(2, 3, D)
    record(module, x, call=output)
    with mode(), passes() as names:
        output(module, x)
    assert not names


@pytest.mark.parametrize(
    "mode", [_threads, partial(torch.autocast, "cpu", torch.bfloat16)], ids=["threads", "autocast"]
)
def test_backward_in_other_modes_runs_the_program(mode: Callable[[], Any]) -> None:
    module, x = block(), image()
    record(module, x, call=lambda m, x: m(x).sum().backward())
    y = module(x)
    with mode(), passes() as names:
        y.sum().backward()
    assert not names


def test_a_number_that_another_operation_sets() -> None:
    """No plan depends on it, since it is set during a forward pass; the next operation reads it."""
    norm = RMSNorm(D)
    norm.eps = 1e-5
    x = image(grad=False)
    record(norm, x, call=output)
    for eps in (0.5, 2.0, 0.5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(active_calls, "depth", 1)
            norm.eps = eps
        with unrecorded():
            other = RMSNorm(D, eps=eps)
            assert_same(output(norm, x), output(other, x))


def test_events_are_told_of_recorded_calls() -> None:
    module, x = block(), image()
    record(module, x)
    told = []
    for made in (module, twin(block, module)):
        with opfuser.events.record_events() as log, unrecorded():
            both(made, x)
        told.append([type(event).__name__ for event in log if "Plan" not in type(event).__name__])
    assert "BytesSaved" in told[0]
    assert set(told[0]) <= set(told[1])


def test_a_flop_counter_sees_recorded_functions() -> None:
    module, x = block(), image()
    record(module, x)
    counted = []
    for made in (module, twin(block, module)):
        with FlopCounterMode(display=False) as counter, unrecorded():
            made(x).sum().backward()
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_tangents_of_forward_mode() -> None:
    module, x = mlp(), torch.randn(2, 3, D)
    direction = torch.randn_like(x)

    def tangents(made: nn.Module) -> list[Tensor]:
        with torch.no_grad(), forward_ad.dual_level():
            y = made(forward_ad.make_dual(x, direction))
            return list(forward_ad.unpack_dual(y))

    with unrecorded():
        theirs = tangents(twin(mlp, module))
    for _ in range(ENOUGH):  # also of a call that is recorded with them
        assert_same(tangents(module), theirs)
    other = twin(mlp, module)
    record(other, x, call=output)
    assert_same(tangents(other), theirs)


def test_parameters_of_functional_call() -> None:
    module, x = block(), image()
    record(module, x)
    own = {name: torch.randn_like(p) for name, p in module.named_parameters()}
    y = torch.func.functional_call(module, own, (x,))
    with unrecorded():
        theirs = torch.func.functional_call(twin(block, module), own, (x,))
    assert_same([y], [theirs])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool) -> None:
    module, x = dropout(), image()
    record(module, x)

    def step(made: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        y = checkpoint(made, x, use_reentrant=reentrant)
        return [y, *torch.autograd.grad(y.sum(), [x])] if not reentrant else _leaf_grads(y, x)

    with unrecorded():
        theirs = step(twin(dropout, module))
    for _ in range(ENOUGH):
        assert_same(step(module), theirs)


def _leaf_grads(y: Tensor, x: Tensor) -> list[Tensor]:
    x.grad = None
    y.sum().backward()
    assert x.grad is not None
    return [y, x.grad]


def test_compiled_without_gradients() -> None:
    module, x = mlp(), torch.randn(2, 3, D)
    record(module, x, call=output)
    with torch.no_grad():
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), module(x))


# What no shape tells.


def test_tables_of_other_angles() -> None:
    """As many tables of the same shapes may be kept, while others have taken their positions."""
    module = opfuser.RotaryEmbedding(2, 8)
    x = torch.randn(2, 5, 3 * D)
    bases = [2.0 + n for n in range(8)]  # as many as are kept
    for base in [*bases, *[bases[-1]] * ENOUGH, *[100.0 + n for n in range(7)], bases[-1]]:
        module.base = base
        ours = output(module, x)
        with unrecorded():
            assert_same(ours, output(opfuser.RotaryEmbedding(2, 8, base=base), x))


def test_tables_of_other_angles_in_backward() -> None:
    module = opfuser.RotaryEmbedding(2, 8)
    x = torch.randn(2, 5, 3 * D, requires_grad=True)
    bases = [2.0 + n for n in range(8)]
    for base in [*bases, *[bases[-1]] * ENOUGH]:
        module.base = base
        both(module, x)
    y = module(x)
    for base in [100.0 + n for n in range(7)]:
        module.base = base
        output(module, x)
    with unrecorded():
        other = opfuser.RotaryEmbedding(2, 8, base=bases[-1])
        (theirs,) = torch.autograd.grad(other(x).square().sum(), x)
    assert_same([*torch.autograd.grad(y.square().sum(), x)], [theirs])


def test_weights_that_no_longer_lie_side_by_side() -> None:
    """Where they do, one product multiplies by all of them."""

    def make() -> opfuser.MergedLinear:
        return opfuser.MergedLinear(D, {"q": 8, "k": 3, "v": 5})

    module, x = make(), image()
    record(module, x)
    for p in module.parameters():
        p.data = torch.cat([p.data, p.data])[: len(p)]
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(2)
    with unrecorded():
        theirs = both(twin(make, module), x)
    torch.testing.assert_close(both(module, x), theirs)


def test_slices_of_one_tensor() -> None:
    module, rows = opfuser.DotProductAttention(2), torch.randn(6, 2, 3, 3 * D)
    for x in rows:
        ours = output(module, x)
        with unrecorded():
            assert_same(ours, output(opfuser.DotProductAttention(2), x))


def test_tensors_that_are_one() -> None:
    def make() -> Sequential:
        return Sequential(Linear(D, D), opfuser.AddExtraInput(), Linear(D, D))

    x, other = image(), image()
    for first, second in (((x, x), (x, other)), ((x, other), (x, x))):
        module = make()
        record(module, *first, call=lambda m, *inputs: m(*inputs).sum().backward())
        with unrecorded():
            theirs = twin(make, module)(*second)
        assert_same([module(*second)], [theirs])


@pytest.mark.parametrize(
    "dy",
    [
        torch.randn(2, D).expand(3, 2, D).transpose(0, 1),
        torch.randn(D, 3, 2).permute(2, 1, 0),
        torch.randn(2, 3, 2 * D)[..., ::2],
    ],
    ids=["expanded", "transposed", "strided"],
)
def test_gradients_with_other_strides(dy: Tensor) -> None:
    def grads(made: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(made(x), [x, *made.parameters()], dy))

    module, x = block(), image()
    record(module, x, torch.randn(2, 3, D), call=grads)
    y = module(x)
    with passes() as names:
        ours = torch.autograd.grad(y, [x, *module.parameters()], dy)
    assert not names
    with unrecorded():
        assert_same(ours, grads(twin(block, module), x, dy))


def test_gradients_that_are_one() -> None:
    def make() -> Sequential:
        return Sequential(Linear(D, D), opfuser.MakeExtraOutput(), GELU())

    def grads(made: nn.Module, x: Tensor, dy: Tensor, dz: Tensor) -> list[Tensor]:
        y, z = made(x)
        return list(torch.autograd.grad([y, z], [x, *made.parameters()], [dy, dz]))

    x, dy, dz = image(), torch.randn(2, 3, D), torch.randn(2, 3, D)
    for first, second in (((dy, dy), (dy, dz)), ((dy, dz), (dy, dy))):
        module = make()
        record(module, x, *first, call=grads)
        with unrecorded():
            theirs = grads(twin(make, module), x, *second)
        for _ in range(ENOUGH):
            assert_same(grads(module, x, *second), theirs)


def test_gradients_of_some_outputs() -> None:
    def make() -> Sequential:
        return Sequential(Linear(D, D), opfuser.MakeExtraOutput(), GELU())

    def grads_of(made: nn.Module, x: Tensor, *rows: Tensor | None) -> list[Tensor]:
        outputs, given = zip(*[pair for pair in zip(made(x), rows) if pair[1] is not None])
        return list(torch.autograd.grad(outputs, [x, *made.parameters()], given))

    module, x, dy, dz = make(), image(), torch.randn(2, 3, D), torch.randn(2, 3, D)
    record(module, x, dy, dz, call=grads_of)
    strided = torch.randn(3, 2, D).transpose(0, 1)
    for rows in ((dy, None), (None, dz), (dy, strided), (dy, dz)):
        with unrecorded():
            theirs = grads_of(twin(make, module), x, *rows)
        for _ in range(ENOUGH):
            assert_same(grads_of(module, x, *rows), theirs)


def test_saved_tensors_that_a_caller_holds_are_not_written_to() -> None:
    module = Sequential(Linear(D, 2 * D), SwiGLU(), Linear(D, D))
    x = torch.randn(6, D, requires_grad=True)
    record(module, x, call=lambda m, x: m(x).sum().backward())
    for _ in range(ENOUGH):
        y = module(x)
        held = [t for t in y.grad_fn.saved_tensors if t is not None]
        before = [t.clone() for t in held]
        y.sum().backward()
        assert_same(held, before)


def test_a_graph_is_kept_for_another_pass() -> None:
    module, x = block(), image()
    record(module, x)
    y = module(x)
    first = torch.autograd.grad(y.sum(), [x, *module.parameters()], retain_graph=True)
    assert_same(torch.autograd.grad(y.sum(), [x, *module.parameters()], retain_graph=True), first)
    assert_same(torch.autograd.grad(y.sum(), [x, *module.parameters()]), first)


def test_several_gradients_at_once() -> None:
    def make() -> Sequential:
        return Sequential(Linear(D, D), opfuser.MakeExtraOutput(), Linear(D, D))

    module, x = make(), torch.randn(3, D, requires_grad=True)
    record(module, call=lambda m: torch.autograd.grad(m(x)[1].sum(), x))
    several = torch.randn(5, 3, D)
    found = torch.autograd.grad(module(x)[1], x, several, is_grads_batched=True)
    with unrecorded():
        z = twin(make, module)(x)[1]
    torch.testing.assert_close(found, torch.autograd.grad(z, x, several, is_grads_batched=True))


def test_the_kernel_of_the_last_call() -> None:
    attention = opfuser.DotProductAttention(2, causal=True)
    short, long = torch.randn(1, 4, 3 * D), torch.randn(1, 7, 3 * D)
    record(attention, short, call=output)
    record(attention, long, call=output)
    output(attention, short)
    ours = attention._last.call
    with unrecorded():
        other = opfuser.DotProductAttention(2, causal=True)
        output(other, short)
    assert ours == other._last.call


def test_in_place_writes_are_seen_in_saved_tensors() -> None:
    module, x = block(), image()
    record(module, x)
    leaf = torch.randn(2, 3, D)
    y = module(leaf)
    leaf.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# Names, threads, exceptions, memory.


@pytest.mark.parametrize(
    "name", ["(" + "x, " * 99, "[" + "x" * 90 + ", raise SystemExit, " + "x" * 90, "'", "#\n", "\\"]
)
def test_names_of_a_user_stand_in_comments_alone(name: str) -> None:
    module = Sequential(RMSNorm(D))
    nn.Module.add_module(module, name, opfuser.BasicLinear(D, D))
    record(module, image())


def test_threads_share_what_is_recorded() -> None:
    module = block()
    inputs = [torch.randn(2, 3, D, requires_grad=True) for _ in range(4)]
    with unrecorded():
        other = twin(block, module)
        expected = [both(other, x) for x in inputs]
    failures: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for _ in range(20):
                assert_same(both(module, inputs[n]), expected[n])
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError])
def test_exceptions_while_a_pass_is_recorded(
    stage: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is recorded afterwards, nor kept of what was."""
    module, x = mlp(), image()
    with unrecorded():
        theirs = both(twin(mlp, module), x)
    both(module, x)
    if stage == "backward":
        both(module, x)  # whose forward is recorded
    calls: list[Any] = []

    def fail(self: Recorder, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls.append(func)
        if len(calls) % 5 == 0:
            raise error
        return func(*args, **(kwargs or {}))

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "__torch_function__", fail)
        for _ in range(3):
            with pytest.raises(error):
                both(module, x)
            assert watching.watcher is None
            assert not torch._C._len_torch_function_stack()
    assert len(calls) == 15
    assert_same(both(module, x), theirs)
    record(module, x)
    assert_same(both(module, x), theirs)


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_no_tensor_outlives_the_call(stage: str) -> None:
    """Neither one that is recorded, nor one that follows."""
    module = block()
    made: list[weakref.ref[Tensor]] = []
    for _ in range(ENOUGH + 1):
        x = torch.randn(2, 3, D, requires_grad=True)
        y = module(x)
        saved = [t for t in y.grad_fn.saved_tensors if t is not None]
        own = {id(p) for p in module.parameters()}
        made += [weakref.ref(t) for t in (x, y, *saved) if id(t) not in own]
        del saved
        if stage == "backward":
            (dx,) = torch.autograd.grad(y.sum(), x)
            made.append(weakref.ref(dx))
            del dx
        del x, y
        assert not [ref() for ref in made if ref() is not None]


def test_recordings_are_freed_with_their_module() -> None:
    """Without the garbage collector."""

    def texts() -> int:
        return sum(" specialized " in name for name in linecache.cache)

    before, module = texts(), Sequential(RMSNorm(D), opfuser.BasicLinear(D, D), GELU())
    record(module, image())
    assert texts() > before
    kept = [weakref.ref(t) for t in (*module.modules(), *module.parameters())]
    with without_collector():
        del module
        assert [ref() for ref in kept if ref() is not None] == []
        assert texts() <= before  # those of other tests may have been in cycles


def test_little_is_kept_of_many_kinds_of_calls() -> None:
    module = mlp()
    for rows in range(1, 100):
        for _ in range(ENOUGH - 1):
            both(module, torch.randn(rows, D, requires_grad=True))
    kept = module._single._used.specializations
    assert len(kept.found) <= 8
    assert len(kept._kinds) <= 64


class Halved(BasicOperation):
    """Of a user's, which does not say that it may be left out of calls."""

    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        ctx.save_for_backward(input_)
        return input_.square() / 2

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad_output * x, ()


class Recordable(Halved):
    recordable = True


class Inherits(Recordable):
    pass


@pytest.mark.parametrize(("kind", "recorded"), [(Halved, 0), (Recordable, 2), (Inherits, 0)])
def test_operations_of_users(kind: type[BasicOperation], recorded: int) -> None:
    """They are recorded only where their own class promises what that takes for granted."""
    module, x = Sequential(Linear(D, D), kind()), image()
    with passes() as names:
        for _ in range(ENOUGH + 1):
            result = both(module, x)
    assert_same(result, both(twin(lambda: Sequential(Linear(D, D), kind()), module), x))
    assert bool(names) == bool(recorded)
    plan = module.last_plan
    assert plan is not None
    (recording,) = plan.recordings
    assert len(recording.texts) == recorded
    if recorded:
        assert recording.refusal is None
        assert "square" in plan.recorded
    else:
        assert recording.refusal == (
            f"op 2 ({kind.__name__}) is not opfuser's own, nor recordable by its class"
        )
        assert plan.recorded == f"# operations 0 to 2: {recording.refusal}"


class InOneMemory(BasicOperation):
    """Adds a parameter, whose gradient is a view of that of the input."""

    recordable = True

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("bias", nn.Parameter(torch.zeros(D * D)))

    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        return 2 * (input_ + self.bias.view(D, D))

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        dx = 2 * grad_output
        return dx, (dx.view(D * D),)


def test_gradients_of_a_recorded_pass_share_no_memory() -> None:
    module, x = Sequential(InOneMemory()), torch.randn(D, D, requires_grad=True)
    record(module, x)
    _, dx, dw = both(module, x)
    assert dx.untyped_storage().data_ptr() != dw.untyped_storage().data_ptr()


def test_what_was_recorded_can_be_read() -> None:
    """Of the last plan, group by group; a plan that was only made has nothing recorded."""
    module = Sequential({"norm": RMSNorm(D), "plain": nn.Tanh(), "up": Linear(D, 2 * D)})
    x = image()
    record(module, x)
    plan = module.last_plan
    assert plan is not None
    assert [(r.indices, len(r.texts), r.refusal) for r in plan.recordings] == [
        ((0,), 2, None),
        ((1, 2), 2, None),
    ]
    assert "# 0 RMSNorm: norm" in plan.recorded
    assert "# up.weight" in plan.recorded
    assert plan.recorded.count("def forward(") == plan.recorded.count("def backward(") == 2
    assert module.plan(x).recorded == ""
    assert module.plan(x) == plan


def test_what_a_steady_call_of_a_model_costs() -> None:
    """Frames of Python between ``Sequential.forward`` and the first call of torch; and calls."""
    layers = [
        part
        for _ in range(4)
        for part in (
            Residual(
                opfuser.LayerNorm(D),
                Linear(D, 3 * D),
                opfuser.DotProductAttention(2, causal=True),
                Linear(D, D),
            ),
            Residual(opfuser.LayerNorm(D), Linear(D, 4 * D), GELU(), Linear(4 * D, D)),
        )
    ]
    head = opfuser.LayerNorm(D), Linear(D, 50, bias=False), opfuser.CrossEntropy()
    model = Sequential(opfuser.Embedding(50, D), *layers, *head)
    tokens, targets = torch.randint(50, (2, 2, 8))
    for _ in range(ENOUGH):
        model(tokens, targets).backward()
    depths, calls = [], 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"
        if event == "c_call" and getattr(arg, "__name__", "") == "embedding":
            depth, above = 0, frame
            while above.f_code is not Sequential.forward.__code__:
                assert above.f_back is not None
                depth, above = depth + 1, above.f_back
            depths.append(depth)

    sys.setprofile(profile)
    try:
        model(tokens, targets).backward()
    finally:
        sys.setprofile(None)
    assert depths == [5]
    assert calls <= 100  # 1,978 where operations are called


def masked(module: Sequential, x: Tensor, mask: Tensor, **keywords: Any) -> list[Tensor]:
    """The output of attention with a mask, and gradients."""
    own = {"mask": mask, **keywords}
    y = module(x, op_kwargs={1: own})
    return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


def with_mask() -> Sequential:
    attention = opfuser.DotProductAttention(2)
    return Sequential(opfuser.BasicLinear(D, 3 * D), attention, opfuser.BasicLinear(D, D))


def test_keywords_of_operations() -> None:
    """Tensors among them are arguments of what was recorded, all else tells calls apart."""
    module, x = with_mask(), image()
    masks = [torch.rand(2, 1, 3, 3) > 0.3 for _ in range(6)]
    for mask in masks:
        mask[..., 0] = True
    wanted = []
    with unrecorded():
        other = twin(with_mask, module)
        wanted = [masked(other, x, mask) for mask in masks]
    with passes() as names:
        for mask, own in zip(masks, wanted):
            assert_same(masked(module, x, mask), own)
    assert names.count("forward") >= 4
    names.clear()
    with passes() as names:
        assert_same(masked(module, x, masks[0][:, :, :1].expand(2, 1, 3, 3)), masked(
            other, x, masks[0][:, :, :1].expand(2, 1, 3, 3)))  # fmt: skip
        module(x)
    assert not names, "other strides, and a call without keywords, are other kinds"


class Times(BasicOperation):
    """Multiplies by a keyword."""

    recordable = True

    def op_forward(
        self, ctx: OperationContext, input_: Tensor, *, factor: Any = 1, **kwargs: Any
    ) -> Tensor:
        ctx.factor = float(factor.scale if isinstance(factor, Factor) else factor)
        return input_ * ctx.factor

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        return grad_output * ctx.factor, ()


class Factor:
    """What no guard compares."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


def test_keywords_that_are_numbers() -> None:
    module, x = Sequential(Times()), image()
    for factor in (2, 2.0, True, 2, 3, 2.0, True, 2, 3, 2.0, True, 1, 3, 3, Factor(5.0)):
        for _ in range(2):
            y = module(x, op_kwargs={0: {"factor": factor}})
            number = float(factor.scale if isinstance(factor, Factor) else factor)
            assert torch.equal(y, x * number)
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full_like(x, number))
    with passes() as names:
        module(x, op_kwargs={0: {"factor": 3}})
    assert names == ["forward"]
    with passes() as names:
        for _ in range(ENOUGH):
            module(x, op_kwargs={0: {"factor": Factor(5.0)}})
    assert not names


@pytest.mark.gpu
def test_parameters_that_were_moved_behind_our_back() -> None:
    """A launch that was prepared would take an address of the host."""
    module = Sequential(RMSNorm(D), GELU()).cuda()
    x = image().cuda().detach().requires_grad_()
    record(module, x)
    kept = module[0].weight.data
    module[0].weight.data = kept.cpu()
    with pytest.raises((RuntimeError, ValueError)):
        module(x)
    module[0].weight.data = kept
    assert_same(
        both(module, x), both(twin(lambda: Sequential(RMSNorm(D), GELU()).cuda(), module), x)
    )
