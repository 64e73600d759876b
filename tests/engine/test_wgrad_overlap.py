"""Gradients of weights that are computed on another stream: right whenever they are computed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import opfuser
from opfuser import wgrad_overlap
from opfuser.errors import ArgumentError
from opfuser.recipe import DelayedScaling, Float8BlockScaling, Recipe
from opfuser.wgrad_overlap import CudaSide, WgradOverlap

pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")


class LateSide:
    """Stands in for a stream: work is done when the pass waits for it, and no sooner.

    What a pass overwrites or reads too early gives wrong values, and what it never waits for NaN.

    Args:
        buffers: all that work may write to.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self.buffers = buffers
        self.started = self.done = 0

    def run(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self.started += 1
        before = [b.clone() for b in self.buffers]
        result = work()
        for buffer, value in zip(self.buffers, before):
            buffer.copy_(value)
        results = result if isinstance(result, (list, tuple)) else [result]
        for t in results:
            if t is not None:
                t.fill_(torch.nan)

        def finish() -> None:
            self.done += 1
            again = work()
            for t, value in zip(results, again if isinstance(again, (list, tuple)) else [again]):
                if t is not None:
                    t.copy_(value)

        return result, finish

    def wait(self, event: Callable[[], None]) -> None:
        event()


class Sides:
    """In place of the streams of all passes."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.made: list[LateSide] = []

    def side(self) -> LateSide:
        self.made.append(LateSide(self.buffers))
        return self.made[-1]

    def count(self) -> int:
        assert all(side.started == side.done for side in self.made), "work nobody waited for"
        return sum(side.done for side in self.made)


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sides]:
    sides = Sides()
    monkeypatch.setattr(WgradOverlap, "side", lambda *_: sides.side())
    yield sides
    assert wgrad_overlap._under_way.overlap is None


def block(**how: Any) -> opfuser.Sequential:
    torch.manual_seed(0)
    return opfuser.Sequential(
        opfuser.Residual(
            opfuser.RMSNorm(32),
            opfuser.Linear(32, 96, **how),
            opfuser.SwiGLU(),
            opfuser.Linear(48, 32, bias=False, **how),
        ),
        opfuser.Residual(opfuser.Linear(32, 32, **how), opfuser.ConstantScale(0.5)),
        opfuser.Linear(32, 16, **how),
    )


def merged() -> opfuser.Sequential:
    torch.manual_seed(0)
    return opfuser.Sequential(
        opfuser.LayerNorm(32),
        opfuser.MergedLinear(32, {"gate": 64, "up": 64}),
        opfuser.GEGLU(),
        opfuser.Linear(64, 16),
    )


def gradients(
    model: nn.Module, call: Callable[[Tensor], Tensor], recipe: Recipe | None = None
) -> list[Tensor]:
    """Of the input and all parameters, after two steps."""
    x = torch.linspace(-1.0, 1.0, 7 * 32).view(7, 32).requires_grad_()
    for _ in range(2):
        with opfuser.autocast(enabled=recipe is not None, recipe=recipe):
            y = call(x)
        (y * torch.linspace(-1.0, 2.0, y.numel()).view_as(y)).sum().backward()
    return [x.grad, *[p.grad for p in model.parameters()]]  # type: ignore[list-item]


def assert_same(made: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "recipe", "products"),
    [
        (block, None, 8),
        (merged, None, 4),
        (block, DelayedScaling(), 8),
    ],
)
def test_gradients_are_those_of_one_stream(
    make: Callable[[], nn.Module], recipe: Recipe | None, products: int, sides: Sides
) -> None:
    wanted_of, model = make(), make()
    wanted = gradients(wanted_of, wanted_of, recipe)
    assert sides.count() == 0
    opfuser.overlap_wgrad(model)
    assert_same(gradients(model, model, recipe), wanted)
    assert sides.count() == products


def test_blocks_in_fp8(sides: Sides) -> None:
    def make() -> opfuser.Sequential:
        torch.manual_seed(0)
        return opfuser.Sequential(
            opfuser.Linear(32, 128),
            opfuser.GELU(),
            opfuser.Linear(128, 128),
            opfuser.Linear(128, 8),
        )

    wanted_of, model = make(), make()
    wanted = gradients(wanted_of, wanted_of, Float8BlockScaling())
    opfuser.overlap_wgrad(model)
    assert_same(gradients(model, model, Float8BlockScaling()), wanted)
    assert sides.count() == 6


def test_groups(sides: Sides) -> None:
    def make() -> opfuser.Sequential:
        torch.manual_seed(0)
        linears = [opfuser.GroupedLinear(3, 32, 32, bias=False) for _ in range(2)]
        return opfuser.Sequential(linears[0], opfuser.SiLU(), linears[1])

    sizes = torch.tensor([3, 0, 4])
    wanted_of, model = make(), make()
    wanted = gradients(wanted_of, lambda x: wanted_of(x, sizes, sizes))
    opfuser.overlap_wgrad(model)
    assert_same(gradients(model, lambda x: model(x, sizes, sizes)), wanted)
    assert sides.count() == 4


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(use_reentrant: bool, sides: Sides) -> None:
    wanted_of, model = block(), block()
    opfuser.overlap_wgrad(model)

    def call(x: Tensor) -> Any:
        return checkpoint(model, x, use_reentrant=use_reentrant)

    assert_same(gradients(model, call), gradients(wanted_of, wanted_of))
    assert sides.count() == 8


def test_gradients_that_are_added_to(sides: Sides) -> None:
    """From the second step on, the GEMMs add to ``grad``."""
    wanted_of, model = block(accumulate_into_grad=True), block(accumulate_into_grad=True)
    wanted = gradients(wanted_of, wanted_of)
    opfuser.overlap_wgrad(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
        sides.buffers.append(p.grad)
    assert_same(gradients(model, model), wanted)
    assert sides.count() == 8


def test_main_grads(sides: Sides) -> None:
    def run(overlapped: bool) -> list[Tensor]:
        model = block(accumulate_into_main_grad=True)
        for p in model.parameters():
            p.main_grad = torch.ones(p.shape)  # type: ignore[attr-defined]
            sides.buffers.append(p.main_grad)  # type: ignore[attr-defined]
        if overlapped:
            opfuser.overlap_wgrad(model)
        gradients(model, model)
        return [p.main_grad for p in model.parameters()]  # type: ignore[attr-defined]

    assert_same(run(True), run(False))
    assert sides.count() == 8


def test_hooks_see_gradients(sides: Sides) -> None:
    wanted_of, model = block(), block()
    opfuser.overlap_wgrad(model)
    seen: list[tuple[Tensor, Tensor]] = []
    for run, count in ((wanted_of, 0), (model, 1)):
        for n, p in enumerate(run.parameters()):
            if not count:
                seen.append((torch.empty_like(p), torch.empty_like(p)))

            def hook(p: nn.Parameter, n: int = n, count: int = count) -> None:
                assert p.grad is not None
                seen[n][count].copy_(p.grad)

            p.register_post_accumulate_grad_hook(hook)
        gradients(run, run)
    for one, other in seen:
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_an_operation_that_fails_leaves_nothing_under_way(sides: Sides) -> None:
    class Fails(opfuser.BasicOperation):
        def op_forward(self, ctx: Any, input_: Tensor, **kwargs: Any) -> Tensor:
            return input_ + 0

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            raise ValueError("no")

    model = opfuser.Sequential(Fails(), opfuser.Linear(32, 32))
    opfuser.overlap_wgrad(model)
    with pytest.raises(ValueError, match="no"):
        model(torch.ones(2, 32, requires_grad=True)).sum().backward()
    assert sides.count() == 1


def test_a_backward_pass_inside_of_another(sides: Sides) -> None:
    """Whoever asked for it reads its gradients before the outer pass ends."""

    def gradients_of_inner(overlapped: bool) -> list[Tensor]:
        inner = block(accumulate_into_main_grad=True)
        for p in inner.parameters():
            p.main_grad = torch.zeros(p.shape)  # type: ignore[attr-defined]
            sides.buffers.append(p.main_grad)  # type: ignore[attr-defined]

        class Recomputes(opfuser.BasicOperation):
            def op_forward(self, ctx: Any, input_: Tensor, **kwargs: Any) -> Tensor:
                ctx.save_for_backward(input_)
                return inner(input_)

            def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
                x = ctx.saved_tensors[0].detach().requires_grad_()
                with torch.enable_grad():
                    y = inner(x)
                y.backward(grad_output)
                read.extend(p.main_grad.clone() for p in inner.parameters())
                return x.grad, ()

        read: list[Tensor] = []
        model = opfuser.Sequential(Recomputes(), opfuser.Linear(16, 8))
        if overlapped:
            opfuser.overlap_wgrad(model)
        torch.nn.init.ones_(model[1].weight)
        model(torch.linspace(-1, 1, 96).view(3, 32).requires_grad_()).sum().backward()
        return read

    assert_same(gradients_of_inner(True), gradients_of_inner(False))
    assert sides.count() == 1


def test_switching_it_on_and_off(sides: Sides) -> None:
    model, x = block(), torch.ones(2, 32)
    with opfuser.overlap_wgrad(model):
        model(x).sum().backward()
        assert sides.count() == 4
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            copied(x).sum().backward()
        with torch.no_grad():
            model(x)
        assert sides.count() == 4
    model(x).sum().backward()
    assert sides.count() == 4
    later, earlier = opfuser.overlap_wgrad(model), opfuser.overlap_wgrad(nn.ModuleList([model[2]]))
    later.remove()  # of what is its own
    model(x).sum().backward()
    assert sides.count() == 5
    earlier.remove()
    model(x).sum().backward()
    assert sides.count() == 5


def test_at_most_two_are_under_way(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    run = LateSide.run

    def noted(self: LateSide, work: Callable[[], Any]) -> Any:
        found.append(self.started - self.done)
        return run(self, work)

    monkeypatch.setattr(LateSide, "run", noted)
    model = block()
    opfuser.overlap_wgrad(model)
    model(torch.ones(2, 32)).sum().backward()
    assert found == [0, 1, 1, 1]


def test_a_cpu_has_one_stream() -> None:
    wanted_of, model = block(), block()
    overlap = opfuser.overlap_wgrad(model)
    assert overlap.side(torch.device("cpu")) is None
    assert_same(gradients(model, model), gradients(wanted_of, wanted_of))


def test_compiled(sides: Sides) -> None:
    wanted_of, model = block(), block()
    opfuser.overlap_wgrad(model)
    torch.compiler.reset()  # Dynamo counts what other tests compiled
    calls = [torch.compile(m, fullgraph=True, backend="aot_eager") for m in (wanted_of, model)]
    assert_same(gradients(model, calls[1]), gradients(wanted_of, calls[0]))
    assert sides.count() == 0


def test_modules_without_weights_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"needs linear operations(.|\n)*a GELU without any"):
        opfuser.overlap_wgrad(opfuser.GELU())


class SlowSide(CudaSide):
    """Reaches its work later than the pass would reach what must not come before."""

    def run(self, work: Callable[[], Any]) -> tuple[Any, torch.cuda.Event]:
        def slowly() -> Any:
            torch.cuda._sleep(3_000_000)
            return work()

        return super().run(slowly)


@pytest.mark.gpu
@pytest.mark.parametrize("replay", ["off", "on"])
@pytest.mark.parametrize("recipe", [None, DelayedScaling()])
def test_on_a_gpu(replay: str, recipe: Recipe | None, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)

    def make() -> opfuser.Sequential:
        torch.manual_seed(0)
        linears = [opfuser.Linear(256, 256, device=cuda, dtype=torch.bfloat16) for _ in range(6)]
        mixed = [m for linear in linears for m in (linear, opfuser.SiLU())]
        return opfuser.Sequential(opfuser.Residual(*mixed), replay=replay)

    def steps(model: nn.Module) -> list[Tensor]:
        out = []
        for step in range(4):
            x = torch.full((64, 256), 0.01 * step, device=cuda, dtype=torch.bfloat16)
            x.requires_grad_()
            with opfuser.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(x)
            y.float().square().sum().backward()
            for p in (x, *model.parameters()):
                assert p.grad is not None
                out.append(p.grad.clone())
                p.grad = None
        return out

    wanted = steps(make())
    monkeypatch.setattr(
        WgradOverlap, "side", lambda self, device: SlowSide(self._streams.setdefault(device, other))
    )
    other = torch.cuda.Stream(cuda)
    model = make()
    opfuser.overlap_wgrad(model)
    assert_same(steps(model), wanted)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_the_stream_that_was_passed_has_the_work() -> None:
    """The GEMM runs after what the stream held before, and before what follows the pass.

    A capture knows order and no time: it fails if nothing waits for the stream in the end. Within
    the graph the stream is held, so that a GEMM elsewhere comes too early and is overwritten.
    """
    cuda = torch.device("cuda", 0)
    stream = torch.cuda.Stream(cuda)
    how: Any = {"bias": False, "device": cuda, "accumulate_into_main_grad": True}
    model = opfuser.Sequential(opfuser.Linear(512, 512, **how))
    opfuser.overlap_wgrad(model, stream)
    weight: Any = next(model.parameters())
    weight.main_grad = torch.zeros_like(weight)
    x = torch.ones(64, 512, device=cuda)

    def step() -> Tensor:
        weight.grad = None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            weight.main_grad.fill_(1.0)
        model(x).sum().backward()
        return weight.main_grad.clone()

    side = torch.cuda.Stream(cuda)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    assert (found == 1.0 + 64).all(), "the 64 rows of x are added to what the stream wrote"
