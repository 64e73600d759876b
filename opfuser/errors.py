"""One class per mistake that a user of opfuser can make.

Each text states the invariant, where it broke, what was received and the remedy.
Every class also derives from the builtin exception that callers usually catch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from typing_extensions import Self


def explain(invariant: str, *, where: str = "", received: str = "", remedy: str = "") -> str:
    """Joins the parts of an error message; empty parts are omitted.

    Args:
        invariant: the rule that was violated.
        where: the operation or fusion, or the place in it.
        received: the actual value.
        remedy: what to do.
    """
    text = invariant.rstrip(".")
    if where:
        text += f" ({where})"
    text += "."
    if received:
        text += f" Received: {received}."
    if remedy:
        text += f" {remedy}" if remedy.endswith(("?", ".")) else f" {remedy}."
    return text


def counted(count: int, noun: str) -> str:
    """A number of things in the singular or the plural: ``"1 operation"``, ``"2 operations"``.

    Args:
        count: the number.
        noun: in the singular, with a plural in s.
    """
    return f"{count} {noun}" + "s" * (count != 1)


def choose_among(name: str, known: Iterable[str]) -> str:
    """A remedy that lists the known names close to a misspelled one, or all of them.

    Args:
        name: the misspelled name.
        known: all names.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3) or names
    return f"Choose among: {', '.join(close)}" if close else ""


class OpfuserError(Exception):
    """Base of all errors that opfuser raises."""

    @classmethod
    def explained(
        cls, invariant: str, *, where: str = "", received: str = "", remedy: str = ""
    ) -> Self:
        """Makes an error whose message comes from :func:`explain`."""
        return cls(explain(invariant, where=where, received=received, remedy=remedy))


class ArgumentError(OpfuserError, ValueError):
    """A constructor or call received a value outside its domain."""


class ArgumentTypeError(OpfuserError, TypeError):
    """A constructor or call received an object of the wrong type."""


class ReadOnlyAttributeError(OpfuserError, AttributeError):
    """An attribute was set that only the constructor may set."""


class InputError(OpfuserError, ValueError):
    """A tensor passed to an operation has a shape, dtype or layout that it does not accept."""


class CacheFullError(InputError, IndexError):
    """A call has more positions than a cache of keys and values has room for."""


class ExtraInputCountError(OpfuserError, ValueError):
    """A call passed more or fewer extra inputs than the operations read."""


class ExtraOutputCountError(OpfuserError, RuntimeError):
    """An operation returned more or fewer extra outputs than it declares."""


class ParameterGradientCountError(OpfuserError, RuntimeError):
    """A backward returned more or fewer parameter gradients than there are parameters."""


class ForwardResultError(ArgumentTypeError):
    """A forward returned something other than a tensor, or a tensor and extra outputs."""


class BackwardResultError(OpfuserError, TypeError):
    """A backward returned something other than the gradients in their order."""


class OverwrittenError(OpfuserError, RuntimeError):
    """An operation wrote to a tensor that it was given, and whose gradient that makes wrong."""


class GradientShapeError(OpfuserError, RuntimeError):
    """A gradient has another shape than its tensor."""


class ContextError(OpfuserError, RuntimeError):
    """An operation used its context in the wrong pass, or in the wrong way."""


class SavedTensorsError(ContextError):
    """Tensors were saved twice, or a non-tensor was saved, or nothing was saved to read."""


class ParametersNotKeptError(ContextError):
    """``ctx.parameters`` was read, but the parameters of the forward call are not kept."""


class ExtraInputGradientCountError(OpfuserError, RuntimeError):
    """A backward returned more or fewer extra-input gradients than there are extra inputs."""


class ChannelError(OpfuserError, ValueError):
    """A channel has no producer, a late producer, or several producers; or its name is invalid."""


class ChannelIndexError(OpfuserError, IndexError):
    """A channel was bound to an extra input or output that the operation does not have."""


class ChannelCapturedError(OpfuserError, RuntimeError):
    """A channel was rebound after a fuser or a Sequential captured the operation's routing."""


class HiddenOutputError(OpfuserError, RuntimeError):
    """A fused operation omitted an extra output that is read outside of it."""


class OpKwargsError(OpfuserError, ValueError):
    """``op_kwargs`` names no basic operation of the Sequential, or a keyword it does not accept."""


class QuantizedWeightError(OpfuserError, RuntimeError):
    """A weight changed while its quantized form was kept."""


class RecomputationError(OpfuserError, RuntimeError):
    """A recomputation in backward does not follow a known forward."""


class MasterWeightError(OpfuserError, RuntimeError):
    """A parameter was written to without updating its master weight."""


class PlanError(OpfuserError, RuntimeError):
    """A fusion returned operations that do not tile the basic operations exactly, in order."""


class FusionError(OpfuserError, ValueError):
    """A fusion was declared or registered wrongly."""


class UnknownFusionError(OpfuserError, KeyError):
    """No fusion of that name is registered."""

    def __str__(self) -> str:  # KeyError quotes its argument; the text is meant to be read.
        return str(self.args[0]) if self.args else ""


class MissingFusionError(OpfuserError, RuntimeError):
    """A fusion that the program requires did not occur in its last call."""


class ConfigError(OpfuserError, ValueError):
    """A configuration of fusions has an unknown key, name or value, or cannot be read."""


class TargetError(OpfuserError, ValueError):
    """A command was given a model, an input, a name or a file that it cannot use."""


class DoubleBackwardError(OpfuserError, RuntimeError):
    """The gradient of a sequence was differentiated a second time."""


class NotSupportedError(OpfuserError, NotImplementedError):
    """An argument or call is valid, but not implemented."""


class MissingImplementationError(OpfuserError, NotImplementedError):
    """An operation lacks the forward or backward that it has to run."""


class TorchVersionError(OpfuserError, ImportError):
    """The installed torch is too old, or lacks a private name that a feature needs."""


class MissingPackageError(OpfuserError, ImportError):
    """A feature needs a package that is not installed, or not in that version."""


class CompilerError(OpfuserError, RuntimeError):
    """Triton could not build the launcher of its kernels."""
