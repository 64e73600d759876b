"""What is common to all modules of Transformer Engine that become a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from opfuser import Sequential
from opfuser.core.change_tracking import has_hooks
from opfuser.errors import NotSupportedError

# Attributes of modules whose values here are the only ones that have a counterpart.
_WHOLE: Mapping[str, Any] = {"tp_size": 1, "return_bias": False}
_REMEDY: Mapping[str, str] = {
    "tp_size": "Shard the operations of opfuser instead: Linear has tensor_parallel_mode",
    "return_bias": "Construct the module without it; an operation adds its own bias",
}
_ATTRIBUTES: Mapping[str, str] = {"bias": "use_bias"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Abstract. The options of a module of Transformer Engine that change what it computes.

    Fields have the names, meanings and defaults of the arguments of its constructor.

    Class attributes:
        te_name: name of the class in ``transformer_engine.pytorch``.
        renamed: parameters of the sequence that :meth:`build` makes, and their names there. It may
            list some that a sequence lacks.
        stateful: paths of the modules there that have an ``_extra_state``.
    """

    te_name: ClassVar[str]
    renamed: ClassVar[Mapping[str, str]] = {}
    stateful: ClassVar[tuple[str, ...]] = ("",)

    def build(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Sequential:
        """A new sequence that computes what the module does, with parameters initialised anew.

        It has these options as ``te_options``, by which :func:`.to_te` and the functions for
        checkpoints know what it stands for. A copy of its parts, ``Sequential(*sequence)``, does
        not.
        """
        sequence = Sequential(self.parts(device, dtype))
        sequence.te_options = self
        return sequence

    def parts(
        self, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> dict[str, nn.Module]:
        """The operations of :meth:`build`, by name."""
        raise NotImplementedError

    def names(self) -> Mapping[str, str]:
        """As ``renamed``, for these options."""
        return self.renamed

    @property
    def states(self) -> tuple[str, ...]:
        """As ``stateful``, for these options."""
        return self.stateful

    @classmethod
    def read(cls, module: nn.Module) -> Options:
        """The options of a module there.

        Raises:
            NotSupportedError: one of them has no counterpart here.
        """
        raise NotImplementedError

    def te_arguments(self) -> dict[str, Any]:
        """Arguments of the constructor there."""
        return dict(vars(self))


def is_of_te(value: object) -> bool:
    """Whether the class of ``value`` is Transformer Engine's; one that derives from it is not."""
    return type(value).__module__.partition(".")[0] == "transformer_engine"


def kind_of(module: nn.Module) -> str:
    """Where Transformer Engine defines the class of ``module``: ``"ops.Linear"``, or "".

    Its operations and its modules have classes of the same names.
    """
    if not is_of_te(module):
        return ""
    place = type(module).__module__.split(".")
    name = type(module).__name__
    return f"ops.{name}" if "ops" in place or name in ("LayerNorm", "RMSNorm") else name


def attribute(value: Any, path: str) -> Any:
    """The attribute at a dotted path, where numbers are indices; of a method, what it returns."""
    for part in path.split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    return value() if callable(value) and getattr(value, "__self__", None) is not None else value


def values_of(module: nn.Module, *options: str) -> dict[str, Any]:
    """The options of a module there that it keeps as attributes, by the names of arguments."""
    return {option: getattr(module, _ATTRIBUTES.get(option, option)) for option in options}


def refuse_option(where: str, option: str, value: object, remedy: str = "") -> None:
    """Raises NotSupportedError for an option without counterpart."""
    raise NotSupportedError.explained(
        f"No operation does what {option} asks for",
        where=where,
        received=f"{option}={value!r}",
        remedy=remedy,
    )


def refuse_others(module: nn.Module, only: Mapping[str, Any] = _WHOLE) -> None:
    """Raises NotSupportedError where an option of ``module`` has another value than the only one.

    An option that this version of Transformer Engine does not have has no value.
    """
    for option, value in only.items():
        got = getattr(module, option, value)
        if got != value:
            refuse_option(type(module).__name__, option, got, _REMEDY.get(option, ""))


def refuse_delay(module: Any) -> None:
    """Raises NotSupportedError where gradients of weights are left to ``backward_dw``."""
    if module.wgrad_store.delay_wgrad_compute():
        refuse_option(
            type(module).__name__,
            "delay_wgrad_compute",
            True,
            "Of the linear operations GroupedLinear alone has it",
        )


def refuse_hooks(module: nn.Module, path: str = "") -> None:
    """Raises NotSupportedError for hooks of ``module``, which a sequence would not run."""
    if has_hooks(module):
        raise NotSupportedError.explained(
            "Hooks of a module are not carried over",
            where=f"{type(module).__name__}, {path}" if path else type(module).__name__,
            remedy="Remove them, convert, and register them on what came out",
        )


def refuse_parameters(module: nn.Module) -> None:
    """Raises NotSupportedError for what cannot be shared: hooks inside, weights stored in FP8."""
    for path, inner in module.named_modules():
        refuse_hooks(inner, path)
        for name, parameter in inner.named_parameters(recurse=False):
            if is_of_te(parameter):
                raise NotSupportedError.explained(
                    "Parameters are shared with the sequence, and must be plain tensors",
                    where=f"{type(module).__name__}, {path}" if path else type(module).__name__,
                    received=f"{name}, a {type(parameter).__name__}",
                    remedy="Make the module outside of quantized_model_init; "
                    "opfuser.quantized_model_init has weights in FP8",
                )
