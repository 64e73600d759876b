"""Layers that torch.compile takes one by one: those that are alike are traced once."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

import opfuser
from opfuser.engine.compiled import in_graph
from opfuser.models import DecoderConfig, MoEConfig, decoder_lm
from opfuser.op import FusedOperation
from opfuser.recipe import Float8CurrentScaling
from tests.engine.toys import Square, grads

pytestmark = [
    pytest.mark.slow,
    # Dynamo's own use of torch and of Python warns in some versions.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

LAYERS = 10  # more than Dynamo compiles of one function


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def counter() -> Any:
    """A backend, which counts what it is given."""
    return torch._dynamo.testing.CompileCounterWithBackend("aot_eager")


def layer(width: int = 4, eps: float = 1e-5) -> opfuser.Sequential:
    return opfuser.Sequential(
        opfuser.Residual(opfuser.RMSNorm(width, eps=eps), opfuser.Linear(width, width)),
        opfuser.Residual(opfuser.Linear(width, 2 * width), opfuser.SwiGLU()),
    ).double()


def compiled(layers: list[Any], backend: Any) -> nn.Sequential:
    return nn.Sequential(*(torch.compile(one, fullgraph=True, backend=backend) for one in layers))


def check(model: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor], wrt: Any) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    wrt = [x, *wrt]
    ours, theirs = model(x), plain(x)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(grads(ours.sin(), wrt), grads(theirs.sin(), wrt))


def check_layers(layers: list[Any], backend: Any) -> None:
    plain = nn.Sequential(*layers)
    check(compiled(layers, backend), plain, plain.parameters())


def test_layers_that_are_alike_are_traced_once() -> None:
    layers, backend = [layer() for _ in range(LAYERS)], counter()
    check_layers(layers, backend)
    assert backend.frame_count == 1


def test_a_layer_that_differs_is_traced_by_itself() -> None:
    layers, backend = [layer(), layer(eps=0.5), layer(), layer(eps=0.5)], counter()
    check_layers(layers, backend)
    assert backend.frame_count == 2


def test_a_layer_that_changes_later() -> None:
    """An attribute, a module in place of another, a parameter, one that is frozen."""
    layers, backend = [layer() for _ in range(3)], counter()
    check_layers(layers, backend)
    layers[1][0][1].eps = 0.5
    check_layers(layers, backend)
    assert backend.frame_count == 2
    layers[2][0] = opfuser.Residual(opfuser.RMSNorm(4), opfuser.Linear(4, 4)).double()
    check_layers(layers, backend)
    layers[0][0][2].weight = nn.Parameter(torch.randn(4, 4).double())
    layers[0].register_forward_hook(lambda module, args, y: 2 * y)
    check_layers(layers, backend)
    layers[2][1][1].weight.requires_grad_(False)
    plain = nn.Sequential(*layers)
    trained = [p for p in plain.parameters() if p.requires_grad]
    check(compiled(layers, backend), plain, trained)


def test_operations_inside_of_modules_that_are_alike() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = opfuser.RMSNorm(4).double(), opfuser.Linear(4, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.linear(self.norm(x))
            return y

    blocks, backend = [Block() for _ in range(LAYERS)], counter()
    check_layers(blocks, backend)
    assert backend.frame_count == 1


class Doubled(opfuser.Sequential):
    def forward(self, input: Any, *extra_inputs: Tensor, op_kwargs: Any = None) -> Any:
        return 2 * super().forward(input, *extra_inputs, op_kwargs=op_kwargs)


@pytest.mark.parametrize(
    "around", [Doubled, lambda *modules: nn.Sequential(opfuser.Sequential(*modules))]
)
def test_sequences_that_layers_call(around: Callable[..., nn.Module]) -> None:
    """One with a forward of its own, and one inside of a plain module."""
    layers = [
        opfuser.Sequential(opfuser.GELU(), around(opfuser.Linear(4, 4), opfuser.RMSNorm(4)))
        for _ in range(3)
    ]
    backend = counter()
    check_layers([one.double() for one in layers], backend)
    assert backend.frame_count == 1


def test_modules_that_are_not_whole_do_not_matter() -> None:
    """As those whose constructor has failed, which a traceback still holds."""
    halves = [cls.__new__(cls) for cls in (opfuser.Sequential, opfuser.RMSNorm)]
    backend = counter()
    check_layers([opfuser.Sequential(opfuser.RMSNorm(4)).double() for _ in range(3)], backend)
    assert backend.frame_count == 1
    assert len(halves) == 2  # kept until here


class Factor(opfuser.BasicOperation):
    """A product with a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.randn(4).double()

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        return input_ * self.factor

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor, tuple[()]]:
        return grad_output * self.factor, ()


class Product(FusedOperation):
    """Two of them, made when the plan is."""

    def __init__(self, ops: Sequence[Factor]) -> None:
        super().__init__(ops)
        self.factor = ops[0].factor * ops[1].factor

    def fuser_forward(self, ctxs: Any, input_: Tensor, **kwargs: Any) -> Any:
        return input_ * self.factor, [(), ()]

    def fuser_backward(self, ctxs: Any, grad_output: Tensor, **kwargs: Any) -> Any:
        return grad_output * self.factor, [(), ()], [(), ()]


def test_an_operation_of_the_user_in_place_of_another_one() -> None:
    """What a plan was made of is no longer that of the model."""
    rule = opfuser.Fusion("product", "joint", (Factor, Factor), lambda *ops: Product(ops))
    model = opfuser.Sequential(Factor(), Factor())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with opfuser.register_forward_backward_fusion(rule):
        check(compiled, model, [])
        model[0] = Factor()
        check(compiled, model, [])


def test_operations_of_the_user_are_traced_in_each_layer() -> None:
    """They may read what nothing here knows of."""
    kinds = Square, partial(opfuser.RMSNorm, 4), partial(opfuser.Linear, 4, 4), opfuser.GELU
    layers = [opfuser.Sequential(*(kind() for kind in kinds)).double() for _ in range(2)]
    backend = counter()
    check_layers(layers, backend)
    assert backend.frame_count == 2


@pytest.mark.parametrize("experts", [False, True])
def test_layers_of_a_model_that_are_compiled_in_place(experts: bool) -> None:
    """``compile()`` of a layer is not passed over, though layers without are run as one."""
    moe = MoEConfig(dim=8, ffn_dim=16, num_experts=3, top_k=2) if experts else None
    model = decoder_lm(
        DecoderConfig(vocab_size=8, dim=8, num_layers=LAYERS, num_heads=2, moe=moe)
    ).double()
    plain, backend = copy.deepcopy(model), counter()
    for one in model.layers:
        one.compile(fullgraph=True, backend=backend)
    tokens = torch.randint(8, (2, 2, 5))
    with torch.random.fork_rng():
        ours, theirs = model(*tokens), plain(*tokens)
    torch.testing.assert_close(ours, theirs)
    got, want = grads(ours, list(model.parameters())), grads(theirs, list(plain.parameters()))
    torch.testing.assert_close(got, want)
    assert backend.frame_count == 1
    assert "is compiled by its own" in str(model.plan(*tokens))


def test_an_operation_that_is_compiled_by_itself() -> None:
    backend = counter()
    model = opfuser.Sequential(opfuser.RMSNorm(4), opfuser.Linear(4, 4))
    plain = copy.deepcopy(model)
    plain.load_state_dict(model.state_dict())
    model[1].compile(backend=backend)
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), plain(x))
    assert backend.frame_count == 1
    assert "is compiled by its own compile()" in str(model.plan(x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("make", [layer, lambda: opfuser.Linear(4, 4)])
def test_copies_do_not_compute_with_what_they_are_copied_from(
    make: Callable[[], nn.Module], duplicate: Callable[[Any], Any]
) -> None:
    model = make().double()
    x = torch.randn(3, 4, dtype=torch.float64)
    model.compile(backend="aot_eager")
    model(x)
    other = duplicate(model)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert not torch.equal(other(x), model(x))


def test_nothing_keeps_a_model_that_is_gone() -> None:
    """Its function in graphs goes too, once no other sequence was traced with it."""
    gc.collect()
    before = set(vars(in_graph.functions))
    first, second = layer(), layer()
    seen = weakref.ref(first[0][1])
    check_layers([first], "aot_eager")
    del first
    torch.compiler.reset()
    gc.collect()
    assert seen() is None
    assert set(vars(in_graph.functions)) == before
    check_layers([second], "aot_eager")


def test_a_model_outlives_the_one_that_was_traced_first() -> None:
    first, second, backend = layer(), layer(), counter()
    check_layers([first, second], backend)
    del first
    gc.collect()
    check_layers([second], backend)
    check_layers([second, layer()], backend)


def test_delayed_gradients_are_refused() -> None:
    op = opfuser.GroupedLinear(2, 4, 4, delay_wgrad_compute=True)
    x, splits = torch.randn(3, 4, requires_grad=True), torch.tensor([1, 2])
    with pytest.raises(Exception, match=r"wait for backward_dw\(\) are not traced"):
        torch.compile(op, fullgraph=True, backend="aot_eager")(x, splits)
    with torch.no_grad():
        y = torch.compile(op, fullgraph=True, backend="aot_eager")(x, splits)
        torch.testing.assert_close(y, op(x, splits))


@pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")
@pytest.mark.parametrize("traced_before", [True, False])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_region_around_a_compiled_part(traced_before: bool, fullgraph: bool) -> None:
    """Refused, also where code that was traced outside of a region is there."""
    part = opfuser.Sequential(opfuser.RMSNorm(16), opfuser.Linear(16, 16))
    compiled = torch.compile(part, backend="aot_eager", fullgraph=fullgraph)
    whole = opfuser.Sequential(opfuser.Linear(16, 16), compiled, opfuser.Linear(16, 16))
    x = torch.randn(16, 16)
    if traced_before:
        whole(x.requires_grad_()).sum().backward()
        compiled(x)
    for call in (compiled, whole):
        with (
            pytest.raises(Exception, match=r"Quantized compute is not traced by torch\.compile"),
            opfuser.autocast(recipe=Float8CurrentScaling()),
        ):
            call(x)
    torch.testing.assert_close(whole(x), whole[2](part(whole[0](x))))


@pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")
def test_regions_without_a_recipe_around_a_compiled_part() -> None:
    """What is traced in them is not taken for what a region with one computes."""
    part = opfuser.Sequential(opfuser.RMSNorm(16), opfuser.Linear(16, 16))
    compiled, x = torch.compile(part, backend="aot_eager"), torch.randn(16, 16)
    wanted, recipe = part(x), Float8CurrentScaling()
    refused = partial(pytest.raises, Exception, match="Quantized compute is not traced by torch")
    with opfuser.autocast(enabled=False):
        torch.testing.assert_close(compiled(x), wanted)
    with refused(), opfuser.autocast(recipe=recipe):
        compiled(x)
    for _ in range(2):
        with opfuser.autocast(recipe=recipe):
            with opfuser.autocast(enabled=False):
                torch.testing.assert_close(compiled(x), wanted)
            with refused():
                compiled(x)
            with refused(), opfuser.autocast(recipe=recipe):
                compiled(x)
    torch.testing.assert_close(compiled(x), wanted)
