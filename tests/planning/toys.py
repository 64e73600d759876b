"""Operations and fusions that only exist to be planned: no tensor is computed with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import opfuser
from opfuser.core.fusion import Env, Fusion, Optional, Refusal, Repeated, Stage
from opfuser.engine.plan import Plan
from opfuser.engine.planning import make_plan
from opfuser.op import BasicOperation, FusedOperation, FusibleOperation, GradNeeds
from opfuser.registry import FusionHandle, registry

CPU = torch.device("cpu")


class A(BasicOperation):
    pass


class B(BasicOperation):
    pass


class C(BasicOperation):
    pass


class SubA(A):
    pass


class Compound(FusedOperation):
    """Stands for its parts."""

    @staticmethod
    def pattern_parts() -> tuple[Any, ...]:
        return (A, Optional(B))


class _Fused(FusedOperation):
    def __init__(self, *parts: FusibleOperation | tuple[FusibleOperation, ...] | None) -> None:
        elements = [part if isinstance(part, tuple) else (part,) for part in parts]
        super().__init__([op for found in elements for op in found if op is not None])


class Fused(_Fused):
    """Has kernels for both passes."""

    def fuser_forward(self, *args: Any, **kwargs: Any) -> Any: ...

    def fuser_backward(self, *args: Any, **kwargs: Any) -> Any: ...


class FusedForward(_Fused):
    def fuser_forward(self, *args: Any, **kwargs: Any) -> Any: ...


class FusedBackward(_Fused):
    def fuser_backward(self, *args: Any, **kwargs: Any) -> Any: ...


KINDS: dict[str, type[BasicOperation]] = {"A": A, "B": B, "C": C, "S": SubA}
BUILD: dict[str, Callable[..., FusedOperation]] = {
    "forward": FusedForward,
    "backward": FusedBackward,
    "joint": Fused,
}


def ops(letters: str) -> list[FusibleOperation]:
    """``"AB"`` is an A followed by a B; S is a subclass of A."""
    return [KINDS[letter]() for letter in letters]


def pattern(text: str) -> tuple[Any, ...]:
    """``"A B? C|A B* A++"``: A, perhaps B, C or A, any number of B, two A or more."""
    return tuple(map(_element, text.split()))


def _element(word: str) -> Any:
    name = word.rstrip("?*+")
    kinds = tuple(KINDS[k] for k in name.split("|"))
    mark = word[len(name) :]
    if mark == "?":
        return Optional(*kinds)
    if mark:
        return Repeated(name, lambda op: type(op) in kinds, at_least=mark.count("+"))
    return kinds if kinds[1:] else kinds[0]


def rule(
    text: str,
    stage: Stage = "forward",
    *,
    name: str = "rule",
    refuses: Callable[..., Refusal | None] | None = None,
    **kwargs: Any,
) -> Fusion:
    build = kwargs.pop("build", BUILD[stage])
    return Fusion(name, stage, pattern(text), build, refuses, **kwargs)


def handles(*functions: Any, stage: Stage = "forward") -> list[FusionHandle]:
    """Handles that are not in the registry: of rules, and of functions under their names."""
    return [
        FusionHandle(f.name, f.stage, f, "user")
        if isinstance(f, Fusion)
        else FusionHandle(f.__name__, stage, f, "user")
        for f in functions
    ]


def env(count: int = 0) -> Env:
    return Env(CPU, torch.float32, needs_backward=(True,) * count, grad_enabled=True)


NEEDED = GradNeeds(True, (), ())


def plan(
    made_of: str | Sequence[FusibleOperation],
    *functions: Any,
    stage: Stage = "forward",
    needs: Iterable[bool] | None = None,
    registered: Iterable[FusionHandle] | None = None,
) -> Plan:
    """A plan over toys, with these fusions and functions, or with registered ones.

    Args:
        needs: whose backward runs (that of all).
    """
    units = ops(made_of) if isinstance(made_of, str) else list(made_of)
    count = sum(len(u.basic_ops) if isinstance(u, FusedOperation) else 1 for u in units)
    owed = (True,) * count if needs is None else tuple(needs)
    tried = handles(*functions, stage=stage) if registered is None else registered
    return make_plan(units, env(count), tuple(NEEDED if n else None for n in owed), tried)


def planned(letters: str = "AB") -> Plan:
    """With what is registered."""
    return plan(letters, registered=registry)


REGISTER: dict[str, Callable[..., FusionHandle]] = {
    "forward": opfuser.register_forward_fusion,
    "backward": opfuser.register_backward_fusion,
    "joint": opfuser.register_forward_backward_fusion,
}


def spans(steps: Iterable[Any]) -> list[tuple[int, ...]]:
    return [step.indices for step in steps]


class NothingComputed(TorchDispatchMode):
    """No tensor is computed inside this block."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.promote_types.default:  # of dtypes, no tensor takes part
            return func(*args)
        raise AssertionError(f"{func} ran while a plan was made")
