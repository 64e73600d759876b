"""How a program registers fusions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..core.fusion import ANYWHERE, Fusion, FusionFunction, PatternElement, Refusal, Requires, Stage
from ..core.op_base import FusedOperation
from .handles import FusionHandle, registry

F = TypeVar("F", bound=type[FusedOperation])


def fusion(
    *,
    stage: Stage,
    pattern: tuple[PatternElement, ...],
    name: str | None = None,
    refuses: Callable[..., Refusal | None] | None = None,
    requires: Requires = ANYWHERE,
    prepend: bool = False,
) -> Callable[[F], F]:
    """Class decorator: registers a FusedOperation subclass as the fusion of ``pattern``.

    The class is constructed with the matched operations as positional arguments, one per pattern
    element. Its registration handle becomes the class attribute ``handle``.

    Args:
        stage: ``"forward"``, ``"backward"``, or ``"joint"`` for both passes at once.
        pattern: operation classes in forward order, as of :class:`Fusion`.
        name: unique name; by default ``module:qualname`` of the class.
        refuses: as of :class:`Fusion`.
        requires: what the machine and the call must have.
        prepend: apply it before the fusions registered so far rather than after them.

    Raises:
        FusionError: the name is taken, or ``Fusion`` does not accept stage or pattern.
    """

    def register(cls: F) -> F:
        rule = Fusion(
            name=name or f"{cls.__module__}:{cls.__qualname__}",
            stage=stage,
            pattern=pattern,
            build=cls,
            refuses=refuses,
            requires=requires,
        )
        cls.handle = registry.add(rule, stage, prepend=prepend)
        return cls

    return register


def register_forward_fusion(
    func: FusionFunction, prepend: bool = False, *, name: str | None = None
) -> FusionHandle:
    """Registers a fusion of the forward pass.

    Args:
        func: a :class:`Fusion`, or ``func(ops, *, recipe) -> ops``; called with those of the
            keywords ``recipe`` and ``env`` that its signature accepts.
        prepend: apply it before the fusions registered so far rather than after them.
        name: unique name; by default that of the ``Fusion``, or ``module:qualname``.

    Returns:
        A handle with ``remove()`` and ``enabled``; as a context manager it removes the fusion at
        the end of the block.

    Raises:
        FusionError: the name is taken, or a ``Fusion`` declares another stage.
    """
    return registry.add(func, "forward", prepend=prepend, name=name)


def register_backward_fusion(
    func: FusionFunction, prepend: bool = False, *, name: str | None = None
) -> FusionHandle:
    """Registers a fusion of the backward pass; see :func:`register_forward_fusion`.

    Args:
        func: as there; lists are in forward order, here too.
        prepend: as there.
        name: as there.

    Raises:
        FusionError: as there.
    """
    return registry.add(func, "backward", prepend=prepend, name=name)


def register_forward_backward_fusion(
    func: FusionFunction, prepend: bool = False, *, name: str | None = None
) -> FusionHandle:
    """Registers a fusion of both passes at once; see :func:`register_forward_fusion`.

    Joint fusions are applied before the forward-only and backward-only ones.

    Args:
        func: as there.
        prepend: as there.
        name: as there.

    Raises:
        FusionError: as there.
    """
    return registry.add(func, "joint", prepend=prepend, name=name)
