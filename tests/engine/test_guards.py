"""Guards: which calls find a plan without a key, and that each finds its own."""

from __future__ import annotations

import ast
import itertools
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

import opfuser
from opfuser import fuser as fuser_module
from opfuser.core.context import TensorFacts
from opfuser.engine.guards import MAX_RECENT, expression, guard_of
from opfuser.engine.plan_key import CallFacts, PlanKey, call_facts
from opfuser.fuser import OperationFuser
from opfuser.recipe import DelayedScaling, Float8CurrentScaling, Recipe

Context = Callable[[], AbstractContextManager[Any]]


def autocast(dtype: torch.dtype) -> Context:
    return lambda: torch.autocast("cpu", dtype)


class Call(NamedTuple):
    """The arguments of a guard, and the modes in which it is asked."""

    x: Tensor | TensorFacts
    parameters: Sequence[Tensor]
    extras: Sequence[Tensor | TensorFacts]
    recipe: Recipe | None = None
    contexts: tuple[Context, ...] = ()

    def facts(self) -> tuple[Any, ...]:
        with self.modes():
            return call_facts(*self[:4])

    def passes(self, facts: tuple[Any, ...]) -> bool:
        with self.modes():
            return guard_of(CallFacts.frozen(facts))(*self[:4])

    def modes(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        for context in self.contexts:
            stack.enter_context(context())
        return stack


class Tagged(Tensor):
    """A subclass whose attributes go through ``__torch_function__``."""


DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def some_tensor(rng: random.Random) -> Tensor:
    shape = rng.choice([(3,), (4,), (3, 4), (4, 3), ()])
    t = torch.zeros(shape, dtype=rng.choice(DTYPES), device=rng.choice(["cpu", "cpu", "meta"]))
    t = rng.choice([t, t.as_subclass(Tagged), nn.Parameter(t)])
    return t.requires_grad_(rng.random() < 0.5)


def some_input(rng: random.Random) -> Tensor | TensorFacts:
    t = some_tensor(rng)
    return t if rng.random() < 0.7 else TensorFacts(t.dtype, t.device, t.requires_grad)


def changed(call: Call, rng: random.Random) -> Call:
    """``call`` with one thing that is drawn anew; it may be what it was."""
    what = rng.choice(["x", "parameters", "parameters", "extras", "recipe", "contexts"])
    if what == "x":
        return call._replace(x=some_input(rng))
    if what == "recipe":
        # Two of them are equal.
        recipes = [None, DelayedScaling(), DelayedScaling(), DelayedScaling(margin=1)]
        return call._replace(recipe=rng.choice([*recipes, Float8CurrentScaling()]))
    if what == "contexts":
        grad = [torch.no_grad] * rng.randrange(2)
        dtype = rng.choice([None, torch.bfloat16, torch.float16])
        return call._replace(contexts=(*grad, *([] if dtype is None else [autocast(dtype)])))
    tensors: list[Any] = list(getattr(call, what))
    draw: Callable[[random.Random], Any] = some_tensor if what == "parameters" else some_input
    how = rng.choice(["more", "fewer", "other", "other", "other"])
    if how == "more" or not tensors:
        tensors.insert(rng.randint(0, len(tensors)), draw(rng))
    elif how == "fewer":
        del tensors[rng.randrange(len(tensors))]
    else:
        tensors[rng.randrange(len(tensors))] = draw(rng)
    return call._replace(**{what: tensors})


def test_a_guard_is_true_where_the_facts_are_equal_and_nowhere_else() -> None:
    rng = random.Random(0)
    answers = {True: 0, False: 0}
    for _ in range(60):
        calls = [Call(some_input(rng), [some_tensor(rng) for _ in range(3)], [some_input(rng)])]
        for _ in range(10):
            calls.append(changed(calls[rng.randrange(len(calls))], rng))
        facts = [call.facts() for call in calls]
        for mine, (call, theirs) in itertools.product(facts, zip(calls, facts)):
            assert call.passes(mine) is (mine == theirs)
            answers[mine == theirs] += 1
    assert min(answers.values()) > 500


X, W, E = torch.zeros(2, 3), torch.zeros(3), torch.zeros(2)
BASE = Call(X, [torch.zeros(2), W], [torch.zeros(2), E])


def test_what_is_no_fact_is_the_same_call() -> None:
    """Rows and dimensions of inputs; who requires grad without grad mode; autocast elsewhere."""
    trained = Call(torch.zeros(5).requires_grad_(), BASE.parameters, [E.clone().requires_grad_()])
    assert BASE._replace(x=torch.zeros(7)).passes(BASE.facts())
    assert BASE._replace(extras=[E, torch.zeros(4, 4)]).passes(BASE.facts())
    without = BASE._replace(extras=[E], contexts=(torch.no_grad,))
    assert trained._replace(contexts=(torch.no_grad,)).passes(without.facts())
    on_meta = BASE._replace(x=X.to("meta"))
    assert on_meta._replace(contexts=(autocast(torch.bfloat16),)).passes(on_meta.facts())
    equal = BASE._replace(recipe=DelayedScaling(margin=2))
    assert equal._replace(recipe=DelayedScaling(margin=2)).passes(equal.facts())


def test_fake_tensors() -> None:
    with FakeTensorMode():
        fake = BASE._replace(x=torch.zeros(2, 3), parameters=[torch.zeros(2), torch.zeros(3)])
        assert fake.passes(BASE.facts())
        assert not fake._replace(x=torch.zeros(2, 3).double()).passes(BASE.facts())


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_dtensors(mesh: DeviceMesh) -> None:
    """Their facts are those of the whole tensor, as of a plain one."""

    def replicated(t: Tensor) -> Tensor:
        return distribute_tensor(t, mesh, [Replicate()])

    call = BASE._replace(x=replicated(X), parameters=[BASE.parameters[0], replicated(W)])
    assert call.passes(BASE.facts())
    assert BASE.passes(call.facts())
    for other in (torch.zeros(4), W.double(), W.clone().requires_grad_()):
        assert not call._replace(parameters=[BASE.parameters[0], replicated(other)]).passes(
            call.facts()
        )


def test_thousands_of_parameters() -> None:
    many = BASE._replace(parameters=[W] * 3000)
    assert many.passes(many.facts())
    assert not many._replace(parameters=[W] * 2999 + [torch.zeros(4)]).passes(many.facts())


HOSTILE = "x or __import__('os')\n#"


def test_nothing_of_a_users_becomes_code() -> None:
    kind = type(HOSTILE, (DelayedScaling,), {"__repr__": lambda self: HOSTILE})
    recipe = kind(margin=1)
    context = autocast(torch.bfloat16)
    call = BASE._replace(x=X.clone().requires_grad_(), recipe=recipe, contexts=(context,))
    text, names = expression(CallFacts.frozen(call.facts()))
    assert recipe in names.values()
    assert call.passes(call.facts())
    fixed = {"x", "parameters", "extra_inputs", "recipe", "len", "is_grad_enabled"}
    fixed |= {"any_autocast", "autocast_dtype"}
    for node in ast.walk(ast.parse(text, mode="eval")):
        if isinstance(node, ast.Name):
            assert node.id in fixed or (node.id[0] == "c" and node.id[1:].isdecimal())
        elif isinstance(node, ast.Attribute):
            assert node.attr in ("dtype", "device", "requires_grad", "shape")
        elif isinstance(node, ast.Constant):
            assert type(node.value) is int


# Of the calls of a fuser.


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[PlanKey]:
    """All that are made, in order."""
    made: list[PlanKey] = []

    def make(*fields: Any) -> PlanKey:
        made.append(PlanKey(*fields))
        return made[-1]

    monkeypatch.setattr(fuser_module, "PlanKey", make)
    return made


def modes(count: int) -> list[tuple[Context, Tensor]]:
    """Some that alternate: training, evaluation, another dtype, and with autocast."""
    x = torch.ones(2, 4)
    alone: list[tuple[Context, Tensor]] = [
        (nullcontext, x),
        (torch.no_grad, x),
        (torch.no_grad, x.double()),
        (autocast(torch.bfloat16), x),
        (autocast(torch.float16), x),
    ]
    return alone[:count]


def test_calls_that_alternate_make_no_keys(keys: list[PlanKey]) -> None:
    seq = opfuser.Sequential(opfuser.LayerNorm(4), opfuser.GELU())
    for _ in range(3):
        for context, x in modes(MAX_RECENT):
            with context():
                seq(x)
    assert len(keys) == len({key.call for key in keys}) == MAX_RECENT


def test_the_calls_of_longest_ago_are_forgotten(keys: list[PlanKey]) -> None:
    fuser = OperationFuser([opfuser.GELU()])

    def keys_of_call(n: int) -> int:
        context, x = modes(MAX_RECENT + 1)[n]
        before = len(keys)
        with context():
            fuser(x)
        return len(keys) - before

    assert [keys_of_call(n) for n in range(MAX_RECENT)] == [1] * MAX_RECENT
    assert keys_of_call(0) == 0  # which is no longer the one of longest ago
    assert keys_of_call(MAX_RECENT) == 1
    assert [keys_of_call(n) for n in (0, 2, 3, MAX_RECENT)] == [0] * 4
    assert keys_of_call(1) == 1


def test_what_a_call_finds_while_operations_change_is_not_found_again() -> None:
    """As where another thread changes them; here a fusion does, while a plan is made."""
    gelu, x = opfuser.GELU(), torch.ones(2)
    fuser, inner = OperationFuser([gelu]), []

    def changes_the_activation(ops: Sequence[Any]) -> Sequence[Any]:
        if gelu.approximate == "tanh":
            gelu.approximate = "none"
            inner.append(fuser.plan(x))
        return ops

    with opfuser.register_forward_fusion(changes_the_activation):
        assert fuser.plan(x) is not inner[0]
        assert fuser.plan(x) is inner[0]


def test_a_guard_keeps_no_parameters() -> None:
    linear = opfuser.Linear(4, 4)
    with torch.no_grad():
        linear(torch.ones(2, 4))
    old = weakref.ref(linear.bias)
    linear.bias = nn.Parameter(torch.ones(4))
    assert old() is None
