"""Projections: the plain linear modules whose parameters merged operations compute with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from torch import nn
from torch.nn.utils import parametrize

from ..core.change_tracking import Tracked, has_hooks
from ..errors import ArgumentError
from ..op import BasicOperation, FusibleOperation

# What others may put into its place computes something else.
_FORWARD = nn.Linear.forward


class Projection(Tracked, nn.Linear):
    """A ``torch.nn.Linear`` that counts its changes, so that calls need not look for them.

    The weight starts as in ``torch.nn.Linear``, the bias at zero.
    """

    forward = _FORWARD

    def reset_parameters(self) -> None:
        """Initialises the parameters again."""
        if self.weight.numel():
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        bias: nn.Parameter | None = self.bias
        if bias is not None:
            nn.init.zeros_(bias)

    @classmethod
    def of(cls, module: nn.Module, where: str) -> Projection:
        """One with the very parameters of ``module``.

        Raises:
            ArgumentError: ``module`` may compute something else than a ``torch.nn.Linear``.
        """
        why = "" if type(module) in (nn.Linear, cls) else "is none"
        if isinstance(module, nn.Linear) and not why:
            if module._parameters.get("weight") is not None:
                why = refusal(module, has_bias=module.bias is not None)
            else:
                why = "has no weight of its own"
        if why or not isinstance(module, nn.Linear):
            kind = type(module)
            raise ArgumentError.explained(
                "Projections are taken from torch.nn.Linear modules",
                where=where,
                received=f"a {kind.__module__}.{kind.__qualname__}, which {why}",
                remedy="Remove wrappers, hooks and parametrisations, or leave it as it is",
            )
        new = cls(module.in_features, module.out_features, bias=False, device="meta")
        new.weight = module.weight
        if module.bias is not None:
            new.bias = module.bias
        return new.train(module.training)

    def _describe(self) -> str:
        present = [name for name, p in self._parameters.items() if p is not None]
        return repr((id(type(self)), has_hooks(self), "forward" in self.__dict__, present))


def refusal(module: nn.Module, *, has_bias: bool) -> str:
    """Why ``module`` has to be called, as a predicate; empty if its parameters say all.

    Args:
        module: a projection, or what has taken its place.
        has_bias: whether it had a bias when the operation was made.
    """
    kind = type(module)
    if not isinstance(module, nn.Linear):
        return f"is a {kind.__module__}.{kind.__qualname__}"
    own = kind.forward is not _FORWARD or kind.__call__ is not nn.Module.__call__
    given = module.__dict__.get("forward")
    # Who takes a forward back, as accelerate does, may leave that of the class.
    if own or (given is not None and getattr(given, "__func__", None) is not _FORWARD):
        return "has a forward of its own"
    if has_hooks(module):
        return "carries hooks"
    bias = module._parameters.get("bias") is not None
    if (bias or parametrize.is_parametrized(module, "bias")) != has_bias:
        return "has lost its bias" if has_bias else "has got a bias"
    return ""


class OfProjections(BasicOperation):
    """Abstract. An operation on the concatenated outputs of projections, its submodules.

    Class attributes:
        parameter: the name of those that it computes with.
    """

    parameter: ClassVar[str]
    read_only: ClassVar[frozenset[str]] = frozenset({"names", "sizes", "owners"})

    def __init__(self, projections: Mapping[str, Projection]) -> None:
        super().__init__()
        self.names = tuple(projections)
        self.sizes = tuple([p.out_features for p in projections.values()])
        present = [p._parameters.get(self.parameter) is not None for p in projections.values()]
        self.owners = tuple([name for name, there in zip(self.names, present) if there])
        for name, projection in projections.items():
            self.add_module(name, projection)

    def share_parameters_with(self, owner: FusibleOperation) -> None:
        """Makes the projections submodules of a compound: a replaced one is replaced for both."""
        super().share_parameters_with(owner)
        owner._modules.update(self._modules)
        self.__dict__["_modules"] = owner._modules

    def parameter_slots(self) -> list[tuple[nn.Module, str]]:
        modules = [self.get_submodule(name) for name in self.owners]
        return [
            (module, self.parameter)
            for module in modules
            if module._parameters.get(self.parameter) is not None
            or parametrize.is_parametrized(module, self.parameter)
        ]

    def columns(self) -> list[slice]:
        """Columns of the output that belong to each projection."""
        stop, found = 0, []
        for size in self.sizes:
            found.append(slice(stop, stop + size))
            stop += size
        return found

    def parameter_not_registered(self, name: str) -> nn.Parameter:
        """A projection's parameter where it is parametrised; raises ArgumentError otherwise."""
        module = self._modules[name]
        value = getattr(module, self.parameter, None) if isinstance(module, nn.Linear) else None
        if value is not None:
            return value  # type: ignore[no-any-return]
        raise ArgumentError.explained(
            f"A projection needs its {self.parameter}",
            where=f"{type(self).__name__}({self.extra_repr()})",
            received=f"{name} = {type(module).__name__}, {self.parameter} = None",
            remedy="Assign a parameter before the call, or call the MergedLinear that has it",
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes))
