"""Variables that a forward reads outside of its module: of a sibling, and those that change."""

from __future__ import annotations

import bisect
import collections
import copy
import fractions
import functools
import gc
import itertools
import math
import numbers
import os
import sys
import threading
import types
from collections.abc import Callable
from datetime import datetime
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DataParallel
from torch.overrides import TorchFunctionMode

import opfuser
from opfuser.applying import report
from opfuser.errors import NotSupportedError

from .models import assert_equal_steps, nano_gpt, paths
from .models import step as step_of_model

Change = Callable[[Any], object]
X = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Block(nn.Module):
    """What stands between its linear modules is set from outside."""

    def __init__(self, act: Any = torch.relu) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.__dict__["act"] = act

    def own(self, h: Tensor) -> Tensor:
        return torch.relu(self.up(h))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def blocks(act: Any = torch.relu, kind: type[Block] = Block) -> Any:
    torch.manual_seed(0)
    return nn.ModuleList(kind(act) for _ in range(3)).double()


def step(layers: Any) -> list[Tensor]:
    layers.zero_grad()
    x = X.clone().requires_grad_()
    for layer in layers:
        x = layer(x)
    (x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)).sum().backward()
    return [
        x.detach(),
        *(torch.zeros(()) if p.grad is None else p.grad for p in layers.parameters()),
    ]


# What siblings share is of the first of them


def to_bound_method(layers: Any) -> None:
    for layer in layers:
        layer.__dict__["act"] = layers[0].own


def to_forward(layers: Any) -> None:
    for layer in layers[1:]:
        layer.up.forward = layers[0].up.forward


def to_wrapped_forward(layers: Any) -> None:
    old = layers[0].up.forward
    for layer in layers:
        layer.up.forward = lambda x: 2 * old(x)


def to_closure(layers: Any) -> None:
    first = layers[0]
    for layer in layers:
        layer.__dict__["act"] = lambda h: torch.relu(first.up(h))


def to_default(layers: Any) -> None:
    def act(h: Tensor, linear: Any = layers[0].up) -> Tensor:
        return torch.relu(linear(h))

    for layer in layers:
        layer.__dict__["act"] = act


def to_partial(layers: Any) -> None:
    for layer in layers:
        layer.__dict__["act"] = functools.partial(Block.own, layers[0])


def to_attribute_of_class(layers: Any) -> None:
    kind = type("Sharing", (Block,), {"act": layers[0].up})
    for layer in layers:
        del layer.__dict__["act"]
        layer.__class__ = kind


@pytest.mark.parametrize(
    "share",
    [
        to_bound_method, to_forward, to_wrapped_forward, to_closure, to_default, to_partial,
        to_attribute_of_class,
    ],
)  # fmt: skip
def test_what_siblings_share_may_be_a_part_of_one_of_them(share: Change) -> None:
    for later in (False, True):
        model, plain = blocks(), blocks()
        if later:
            opfuser.apply(model)
            step(model)
        for layers in (model, plain):
            share(layers)
        if not later:
            opfuser.apply(model)
        assert_equal_steps(step(model), step(plain), 1e-10)
        assert_equal_steps(step(model), step(plain), 1e-10)


# Variables that change


class Plain:
    scale = 1.0


class Acting:
    """What acts is an object, whose class has the factor and the method."""

    factor = 1.0

    def __call__(self, h: Tensor) -> Tensor:
        return torch.relu(h) * self.factor


class ActingOtherwise(Acting):
    """Has another method."""

    def __call__(self, h: Tensor) -> Tensor:
        return torch.tanh(h)


class Listed(list[float]):
    """A list with an attribute."""

    factor: float


class Scaled(Block):
    """Its parent's forward is found by ``super()``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def scaled(h: Tensor, factor: Any = 1.0) -> Tensor:
    return torch.relu(h) * factor


def scaled_by_keyword(h: Tensor, *, factor: float = 1.0) -> Tensor:
    return torch.relu(h) * factor


def scaled_by_its_attribute(h: Tensor) -> Tensor:
    return torch.relu(h) * scaled_by_its_attribute.scale  # type: ignore[attr-defined]


scaled_by_its_attribute.scale = 1.0  # type: ignore[attr-defined]
settings = types.ModuleType("settings_of_a_user")
settings.scale = 1.0  # type: ignore[attr-defined]
sys.modules[settings.__name__] = settings


def of_a_module_in_a_default(h: Tensor, held: Any = settings) -> Tensor:
    return torch.relu(h) * held.scale


def of_a_module_in_a_variable(held: Any) -> Callable[[Tensor], Tensor]:
    return lambda h: torch.relu(h) * held.scale


def of_a_module_that_it_imports(h: Tensor) -> Tensor:
    import settings_of_a_user  # noqa: PLC0415

    return torch.relu(h) * settings_of_a_user.scale


def of_what_it_imports(h: Tensor) -> Tensor:
    from settings_of_a_user import scale  # noqa: PLC0415

    return torch.relu(h) * scale


KEYS = {"name": "".join(("sc", "ale"))}  # which no code has as a constant


TABLE = {"scale": 1.0, "zero": 0.0}
ACTING, LISTED = Acting(), Listed()
LISTED.factor = 1.0


def unused() -> None:
    """Has an attribute."""


unused.factor = 1.0  # type: ignore[attr-defined]


def variable() -> tuple[Callable[[Tensor], Tensor], Change]:
    """A function inside of which another one reads a variable, and what sets it."""
    scale = 1.0

    def outer(h: Tensor) -> Tensor:
        def inner() -> Tensor:
            return torch.relu(h) * scale

        return inner()

    def change(patch: Any) -> None:
        assert outer.__closure__ is not None
        patch.setattr(outer.__closure__[0], "cell_contents", 3.0)

    return outer, change


VARIABLES: dict[str, tuple[Any, Change]] = {
    "closure": variable(),
    "defaults": (scaled, lambda patch: patch.setattr(scaled, "__defaults__", (3.0,))),
    "defaults of keywords": (
        scaled_by_keyword,
        lambda patch: patch.setattr(scaled_by_keyword, "__kwdefaults__", {"factor": 3.0}),
    ),
    "code": (
        scaled,
        lambda patch: patch.setattr(scaled, "__code__", (lambda h, factor: 3 * h).__code__),
    ),
    "attribute of a function": (
        scaled_by_its_attribute,
        lambda patch: patch.setattr(scaled_by_its_attribute, "scale", 3.0),
    ),
    "attribute of a class": (
        lambda h: torch.relu(h) * Plain.scale,
        lambda patch: patch.setattr(Plain, "scale", 3.0),
    ),
    "class": (
        lambda h: torch.relu(h) * Plain.scale,
        lambda patch: patch.setitem(globals(), "Plain", type("Other", (), {"scale": 3.0})),
    ),
    "attribute of a class whose name is held elsewhere": (
        lambda h: torch.relu(h) * getattr(Plain, KEYS["name"]),
        lambda patch: patch.setattr(Plain, "scale", 3.0),
    ),
    "attribute of a module whose name is held elsewhere": (
        lambda h: torch.relu(h) * vars(settings)[KEYS["name"]],
        lambda patch: patch.setattr(settings, "scale", 3.0),
    ),
    "attribute of a module": (
        lambda h: torch.relu(h) * settings.scale,  # type: ignore[attr-defined]
        lambda patch: patch.setattr(settings, "scale", 3.0),
    ),
    **{
        act.__name__: (act, lambda patch: patch.setattr(settings, "scale", 3.0))
        for act in (
            of_a_module_in_a_default,
            of_a_module_in_a_variable(settings),
            of_a_module_that_it_imports,
            of_what_it_imports,
        )
    },
    "entry of a global dict": (
        lambda h: torch.relu(h) * TABLE["scale"],
        lambda patch: patch.setitem(TABLE, "scale", 3.0),
    ),
    "attribute of an object's class": (
        ACTING,
        lambda patch: patch.setattr(Acting, "factor", 3.0),
    ),
    "method of an object's class": (
        ACTING,
        lambda patch: patch.setattr(Acting, "__call__", lambda self, h: torch.tanh(h)),
    ),
    "class of an object": (
        ACTING,
        lambda patch: patch.setattr(ACTING, "__class__", ActingOtherwise),
    ),
    "function of torch, by that of another name": (
        lambda h: 2 * functional.relu(h),
        lambda patch: patch.setattr(functional, "relu", torch.tanh),
    ),
    "method of tensors": (
        lambda h: h.relu(),
        lambda patch: patch.setattr(Tensor, "relu", Tensor.tanh),
    ),
    "number in a module of Python": (
        lambda h: torch.relu(h) * math.tau,
        lambda patch: patch.setattr(math, "tau", 3.0),
    ),
    "attribute of a list": (
        lambda h: torch.relu(h) * LISTED.factor,
        lambda patch: patch.setattr(LISTED, "factor", 3.0),
    ),
    "attribute of a function that is not called": (
        lambda h: torch.relu(h) * unused.factor,  # type: ignore[attr-defined]
        lambda patch: patch.setattr(unused, "factor", 3.0),
    ),
    "type of a number": (
        lambda h: torch.relu(h) if type(TABLE["scale"]) is float else torch.tanh(h),
        lambda patch: patch.setitem(TABLE, "scale", 1),
    ),
    "type of a truth value": (
        lambda h: torch.relu(h) if type(settings.scale) is float else torch.tanh(h),
        lambda patch: patch.setattr(settings, "scale", True),
    ),
    "sign of zero": (
        lambda h: torch.relu(h) * math.copysign(2.0, TABLE["zero"]),
        lambda patch: patch.setitem(TABLE, "zero", -0.0),
    ),
    "environment": (
        lambda h: 3 * torch.relu(h) if os.environ.get("OPFUSER_OF_A_TEST") else torch.relu(h),
        lambda patch: patch.setenv("OPFUSER_OF_A_TEST", "1"),
    ),
    "environment as a whole": (
        lambda h: torch.relu(h) * float(dict(os.environ).get("OPFUSER_OF_A_TEST", "3")),
        lambda patch: patch.setenv("OPFUSER_OF_A_TEST", "1"),
    ),
}


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    act, change = VARIABLES[name]
    model, plain = blocks(act), blocks(act)
    opfuser.apply(model)
    before = step(plain)
    assert_equal_steps(step(model), before, 1e-10)
    assert "0" in paths(report(model))
    with monkeypatch.context() as patch:
        change(patch)
        want = step(plain)
        assert_equal_steps(step(model), want, 1e-10)
    assert_equal_steps(step(model), before, 1e-10)
    with pytest.raises(AssertionError):
        assert_equal_steps(before, want)


ORDERED = collections.OrderedDict(a=1.0, b=3.0)


def in_a_process_group(h: Tensor) -> Tensor:
    return torch.relu(h) * (3.0 if dist.is_initialized() else 1.0)


def start() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


# Functions that read what no monkeypatch sets, what changes that, and what changes it back.
STATES: dict[str, tuple[Any, Callable[[], object], Callable[[], object]]] = {
    "order of a dict": (
        lambda h: torch.relu(h) * next(iter(ORDERED.values())),
        lambda: ORDERED.move_to_end("a"),
        lambda: ORDERED.move_to_end("b"),
    ),
    "process group": (in_a_process_group, start, dist.destroy_process_group),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_changes(name: str) -> None:
    act, change, change_back = STATES[name]
    model, plain = blocks(act), blocks(act)
    opfuser.apply(model)
    before = step(plain)
    assert_equal_steps(step(model), before, 1e-10)
    assert "0" in paths(report(model))
    change()
    try:
        want = step(plain)
        assert_equal_steps(step(model), want, 1e-10)
    finally:
        change_back()
    assert_equal_steps(step(model), before, 1e-10)
    with pytest.raises(AssertionError):
        assert_equal_steps(before, want)


class Marked(Block):
    """Reads attributes of a parameter and, by its type, of its class."""

    factor = 2.0

    def __init__(self, act: Any = torch.relu) -> None:
        super().__init__(act)
        self.up.weight.factor = 3.0  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.act(self.up(self.norm(x))))
        return x + y * self.up.weight.factor * type(self).factor


def of_a_parameter(layers: Any) -> None:
    layers[0].up.weight.factor = 5.0


def of_another_parameter(layers: Any) -> None:
    layers[0].up.weight = nn.Parameter(layers[0].up.weight.detach().clone())
    layers[0].up.weight.factor = 7.0


def of_a_sibling(layers: Any) -> None:
    layers[2].up.weight.factor = 0.5


class Collector:
    """An object that keeps what it is given."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def append(self, h: Tensor) -> None:
        self.kept.append(h)


class InSlots:
    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


# What makes a collection, and what in it is appended to.
COLLECTIONS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (list, lambda kept: kept),
    "list of a subclass": (Listed, lambda kept: kept),
    "deque": (collections.deque, lambda kept: kept),
    "defaultdict": (lambda: collections.defaultdict(list), lambda kept: kept["all"]),
    "object": (Collector, lambda kept: kept),
    "attribute of an object": (Collector, lambda kept: kept.kept),
    "object with slots": (InSlots, lambda kept: kept.kept),
    "object in a list": (lambda: [Collector()], lambda kept: kept[0]),
}


@pytest.mark.parametrize("held", ["by a variable", "by a default", "by a method"])
@pytest.mark.parametrize("name", COLLECTIONS)
def test_what_a_function_collects(name: str, held: str) -> None:
    make, part = COLLECTIONS[name]

    def collecting(kept: Any) -> Callable[[Tensor], Tensor]:
        append = part(kept).append

        def by_variable(h: Tensor) -> Tensor:
            part(kept).append(h)
            return torch.relu(h)

        def by_default(h: Tensor, kept: Any = kept) -> Tensor:
            part(kept).append(h)
            return torch.relu(h)

        def by_method(h: Tensor) -> Tensor:
            append(h)
            return torch.relu(h)

        return {"variable": by_variable, "default": by_default, "method": by_method}[
            held.rpartition(" ")[2]
        ]

    both = make(), make()
    model, plain = (blocks(collecting(kept)) for kept in both)
    opfuser.apply(model)
    for count in (3, 6):
        assert_equal_steps(step(model), step(plain), 1e-10)
        ours, theirs = (getattr(part(kept), "kept", part(kept)) for kept in both)
        assert len(ours) == count
        torch.testing.assert_close([*ours], [*theirs])


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("change", [of_a_parameter, of_another_parameter, of_a_sibling])
def test_attributes_of_parameters_and_classes(
    change: Change, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = (blocks(kind=Marked) for _ in range(2))
    opfuser.apply(model)
    if later:
        assert_equal_steps(step(model), step(plain), 1e-10)
        assert paths(report(model)) == ["0", "1", "2"]
    for layers in (model, plain):
        change(layers)
    assert_equal_steps(step(model), step(plain), 1e-10)
    monkeypatch.setattr(Marked, "factor", 0.5)
    assert_equal_steps(step(model), step(plain), 1e-10)


def given(weight: Tensor) -> float:
    try:
        return weight.factor  # type: ignore[attr-defined,no-any-return]
    except AttributeError:
        return 1.0


@pytest.mark.parametrize(
    "ask",
    [
        given,
        lambda weight: getattr(weight, "factor", 1.0),
        lambda weight: 3.0 if any(hasattr(weight, name) for name in ("other", "factor")) else 1.0,
        lambda weight: vars(weight).get("factor", 1.0),
        lambda weight: weight.__dict__.get("factor", 1.0),
    ],
)
def test_attributes_that_parameters_are_given_later(ask: Callable[[Any], float]) -> None:
    class Asking(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.act(self.up(self.norm(x)))) * ask(self.up.weight)

    model, plain = (blocks(kind=Asking) for _ in range(2))
    opfuser.apply(model)
    assert_equal_steps(step(model), step(plain), 1e-10)
    assert paths(report(model)) == ["0", "1", "2"]
    for layers in (model, plain):
        layers[1].up.weight.factor = 3.0
    assert_equal_steps(step(model), step(plain), 1e-10)


# Arguments that are nearly equal, one after another, and what is computed of them.
ARGUMENTS: dict[str, tuple[Callable[[Tensor, Any], Any], tuple[Any, ...]]] = {
    "nan": (lambda h, given: 2.0 if math.isnan(given) else 1.0, (math.nan, 1.0, -math.nan)),
    "zero": (lambda h, given: math.copysign(2.0, given), (0.0, -0.0, 0)),
    "one": (lambda h, given: 2.0 if given is True else 1.0, (1, True, 1.0)),
    "class": (lambda h, given: 2.0 if isinstance(h, nn.Parameter) else 1.0, (0, 1)),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_are_nearly_equal(name: str) -> None:
    factor, arguments = ARGUMENTS[name]

    class Given(Block):
        def forward(self, x: Tensor, given: Any = 0) -> Tensor:
            return x + self.down(self.act(self.up(self.norm(x)))) * factor(x, given)

    model, plain = (blocks(kind=Given)[0] for _ in range(2))
    opfuser.apply(model)
    for given in arguments * 2:
        for x in (X, nn.Parameter(X, requires_grad=False)):
            torch.testing.assert_close(model(x, given), plain(x, given))
    assert paths(report(model))[0] == ""


class Slotted:
    __slots__ = ("factor",)


class SlottedWithAttributes(Slotted):
    """Has ``__dict__`` beside a slot."""


class Queue(collections.deque[float]):
    """Has ``__dict__`` beside what it holds."""


@pytest.mark.parametrize("kind", [SlottedWithAttributes, Queue])
def test_objects_that_hold_more_than_attributes_are_named(kind: Any) -> None:
    class Holding(Block):
        def forward(self, x: Tensor) -> Tensor:
            held: Any = self.held
            factor = held[0] if isinstance(held, Queue) else held.factor
            return x + factor * self.down(self.act(self.up(self.norm(x))))

    model, plain = blocks(kind=Holding), blocks(kind=Holding)
    opfuser.apply(model)
    for factor in (1.0, 3.0):
        for layers in (model, plain):
            for layer in layers:
                layer.held = kind([factor]) if kind is Queue else kind()
                layer.held.factor = factor
        before = step(plain)
        assert_equal_steps(step(model), before, 1e-10)
        for layers in (model, plain):
            for layer in layers:
                if kind is Queue:
                    layer.held[0] = 5.0
                else:
                    layer.held.factor = 5.0
        assert_equal_steps(step(model), step(plain), 1e-10)
    assert f"reads 'held', a {kind.__name__}" in str(report(model))


class OfASize(Block):
    """Scales by a size of a buffer."""

    def __init__(self, act: Any = torch.relu) -> None:
        super().__init__(act)
        self.register_buffer("table", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table.shape[0] * self.down(self.act(self.up(self.norm(x))))


def test_a_buffer_that_gets_another_shape_in_place() -> None:
    model, plain = blocks(kind=OfASize), blocks(kind=OfASize)
    opfuser.apply(model)
    assert_equal_steps(step(model), step(plain), 1e-10)
    for layers in (model, plain):
        layers[1].table.data = torch.zeros(5)
        layers[2].table.resize_(7)
    assert_equal_steps(step(model), step(plain), 1e-10)
    assert paths(report(model)) == ["0", "1", "2"]


def test_a_forward_that_prints_prints_in_every_call(capsys: pytest.CaptureFixture[str]) -> None:
    class Printing(Block):
        def forward(self, x: Tensor) -> Tensor:
            print("called with", x.shape[0])  # noqa: T201
            return super().forward(x)

    model = blocks(kind=Printing)
    opfuser.apply(model)
    step(model)
    step(model)
    assert capsys.readouterr().out == "called with 2\n" * 6
    assert "kept as they are" in str(report(model))
    assert "prints" in str(report(model))


def test_an_object_that_raises_whatever_it_is_asked() -> None:
    class Raising:
        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    model, plain = blocks(), blocks()
    for layers in (model, plain):
        layers[0].other = Raising()
    opfuser.apply(model)
    assert_equal_steps(step(model), step(plain), 1e-10)


def test_a_forward_of_a_parent_class_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = blocks(kind=Scaled), blocks(kind=Scaled)
    opfuser.apply(model)
    step(model)
    monkeypatch.setattr(Block, "forward", lambda self, x: x - self.down(torch.relu(self.up(x))))
    assert_equal_steps(step(model), step(plain), 1e-10)


@pytest.mark.parametrize(
    ("asks", "mode"),
    [
        (torch.is_inference_mode_enabled, torch.inference_mode),
        (torch.are_deterministic_algorithms_enabled, None),
        (torch.is_anomaly_enabled, functools.partial(torch.autograd.set_detect_anomaly, True)),
        (lambda: torch._C._len_torch_function_stack() > 0, torch.no_grad),
        (lambda: sys.getrecursionlimit() < 0, torch.no_grad),
        (lambda: gc.isenabled() and False, torch.no_grad),
        (lambda: threading.current_thread().name == "other", torch.no_grad),
        (lambda: "factor" in dir(ACTING) and False, torch.no_grad),
        (lambda: datetime.now().year < 0, torch.no_grad),
    ],
)
def test_what_a_forward_asks_of_the_process(asks: Any, mode: Any) -> None:
    def act(h: Tensor) -> Tensor:
        return 3 * torch.relu(h) if asks() else torch.relu(h)

    (block, plain), outputs = (blocks(act)[0] for _ in range(2)), []
    opfuser.apply(block)
    with torch.no_grad():
        block(X)
        if mode is None:
            torch.use_deterministic_algorithms(True)
        try:
            with mode() if mode else torch.no_grad():
                outputs = [m(X).clone() for m in (block, plain)]
        finally:
            torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(*outputs)
    assert "asks for" in str(report(block))


def by_singledispatch(n: int) -> float:
    kind = functools.singledispatch(lambda n: 3.0)
    kind.register(int)(lambda n: 2.0 if n > 20 else 1.0)
    return kind(n)


def by_pattern(n: int) -> float:
    match n:
        case 33:
            return 2.0
        case int():
            return 1.0
    return 3.0


def by_a_local_type(n: int) -> float:
    kind = int
    return 1.0 if type(n) is kind else 2.0


# Some are the same for the first lengths, and others for a later one.
LENGTHS: dict[str, Callable[[int], float]] = {
    "reciprocal": lambda n: 1.0 / n,
    "factor": lambda n: 0.5 * n,
    "comparison": lambda n, limit=7.5: 2.0 if limit < n else 1.0,
    "logarithm": math.log,
    "root": math.isqrt,
    "bits": lambda n: n.bit_length(),
    "entry": lambda n: [*range(50)][n],
    "slice": lambda n: sum([*range(20)][:n]),
    "text": lambda n: float("%d" % n),  # noqa: UP031
    "later comparison": lambda n, limit=20.0: 2.0 if limit < n else 1.0,
    "later slice": lambda n: float(len([*range(20)][: n // 16])),
    "slice of an iterator": lambda n: float(sum(itertools.islice([0] * 20 + [1] * 20, n))),
    "bisection": lambda n: 1.0 + bisect.bisect([20, 50], n),
    "copy": lambda n: 2.0 if copy.deepcopy([n])[0] > 20 else 1.0,
    "fraction": lambda n: 2.0 if fractions.Fraction(41, 2) < n else 1.0,
    "array": lambda n: 2.0 if np.zeros(n).size > 20 else 1.0,
    "number of numpy": lambda n: 2.0 if np.float32(20.5) < n else 1.0,
    "power": lambda n: 2.0 if 2.0**n > 2**20 else 1.0,
    "bytes": lambda n: 2.0 if len(bytes(n)) > 20 else 1.0,
    "sum": lambda n: 2.0 if sum([n, 0.5]) > 20 else 1.0,
    "count": lambda n: 2.0 if [33].count(n) else 1.0,
    "shape": lambda n: 2.0 if torch.Size([n, 1]).numel() > 20 else 1.0,
    "instance": lambda n: 1.0 if isinstance(n, int) else 2.0,
    "number": lambda n: 1.0 if isinstance(n, numbers.Integral) else 2.0,
    "equal type": lambda n: 1.0 if type(n) == int else 2.0,  # noqa: E721
    "type": lambda n: 1.0 if type(n) is int else 2.0,
    "type of a variable": by_a_local_type,
    "subclass": lambda n: 1.0 if issubclass(type(n), int) else 2.0,
    "symbol": lambda n: 2.0 if isinstance(n, torch.SymInt) else 1.0,
    "method of int": lambda n: 2.0 if int.__lt__(20, n) is True else 1.0,
    "singledispatch": by_singledispatch,
    "pattern": by_pattern,
}


@pytest.mark.parametrize("name", LENGTHS)
def test_what_the_interpreter_computes_of_a_size(name: str) -> None:
    factor = LENGTHS[name]

    def act(h: Tensor) -> Tensor:
        return torch.relu(h) * factor(h.shape[1])

    model, plain = blocks(act), blocks(act)
    opfuser.apply(model)
    for length in (7, 8, 5, 12, 7, 8, 9, 33, 9, 40):
        got, want = X[:, :1].repeat(1, length, 1), X[:, :1].repeat(1, length, 1)
        for ours, theirs in zip(model, plain):
            got, want = ours(got), theirs(want)
        torch.testing.assert_close(got, want)


class Doubling(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        y = function(*args, **(kwargs or {}))
        return y * 2 if function is functional.linear else y


def test_a_mode_of_functions_sees_all_of_them() -> None:
    model, plain = nano_gpt(), nano_gpt()
    opfuser.apply(model)
    with torch.device("cpu"):  # a mode too, which changes nothing
        step_of_model(model)
    with Doubling():
        assert_equal_steps(step_of_model(model), step_of_model(plain))
    computed = report(model).computed[0]
    assert (computed.calls, computed.fell_back) == (1, (("a TorchFunctionMode is on", 1),))


def test_wrappers_of_devices_are_not_traced() -> None:
    model, plain = (nn.Sequential(DataParallel(blocks()[0]), nn.ReLU()) for _ in range(2))
    opfuser.apply(model)
    torch.testing.assert_close(model(X), plain(X))
    kept = {entry.path: entry.reason for entry in report(model).kept}
    assert (
        kept[""] == kept["0"] == "runs torch.nn.parallel.data_parallel, which coordinates devices"
    )
    assert paths(report(model)) == ["0.module"]


def test_a_hook_that_returns_another_shape_in_a_later_call() -> None:
    block, parts = blocks()[0], False
    block.up.register_forward_hook(lambda m, args, y: y[:1] if parts else y)
    opfuser.apply(block)
    torch.testing.assert_close(block(X), blocks()[0](X))
    assert paths(report(block)) == [""]
    parts = True
    received = r"Received: Tensor of \(1, 7, 32\) for an input of \(2, 7, 32\)"
    with pytest.raises(NotSupportedError, match=rf"A child with hooks or tensors.*{received}"):
        block(X)


def test_parameters_without_entries_are_named() -> None:
    block = blocks()[0]
    weight = block.up.weight.data
    block.up.register_forward_pre_hook(lambda m, args: setattr(m.weight, "data", weight))
    block.up.weight.data = weight.new_empty(0)
    opfuser.apply(block)
    torch.testing.assert_close(block(X), blocks()[0](X))
    reason = "has parameters without entries, which hooks of its children may fetch"
    assert report(block).kept[0].reason == reason
