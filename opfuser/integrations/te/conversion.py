"""Conversion of sequences and modules, with the parameters that they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from opfuser import FusibleOperation, Sequential
from opfuser.core.change_tracking import has_hooks
from opfuser.engine.routing import PrivateChannel
from opfuser.errors import ArgumentTypeError, NotSupportedError
from opfuser.runtime.libraries import required

from .linear_modules import (
    GroupedLinearOptions,
    LayerNormLinearOptions,
    LayerNormMLPOptions,
    LinearOptions,
)
from .operations import OPERATIONS, from_te_operation, to_te_operation
from .options import Options, attribute, kind_of, refuse_hooks, refuse_parameters
from .transformer_layer import TransformerLayerOptions

MODULES: Mapping[str, type[Options]] = {
    options.te_name: options
    for options in (
        LinearOptions,
        LayerNormLinearOptions,
        LayerNormMLPOptions,
        GroupedLinearOptions,
        TransformerLayerOptions,
    )
}
_SEQUENCES = ("ops.Sequential",)


def options_of(sequence: nn.Module) -> Options | None:
    """What a sequence stands for as a module of Transformer Engine; None: for its operations."""
    return getattr(sequence, "te_options", None) if type(sequence) is Sequential else None


def from_te(module: nn.Module, *, rotary_base: float | None = None) -> Sequential:
    """The sequence that computes what ``module`` does, with the very same parameters.

    Takes ``te.ops.Sequential`` and all operations that opfuser has too, ``te.Linear``,
    ``te.LayerNormLinear``, ``te.LayerNormMLP``, ``te.LayerNorm``, ``te.RMSNorm``,
    ``te.GroupedLinear`` and ``te.TransformerLayer``; also a ``torch.nn.Sequential`` of these, in
    which modules of torch stay what they are. Module and sequence share their parameters from now
    on, and the training flag is copied. What it computes in other regions than
    :class:`opfuser.autocast` is not carried over: neither a region of Transformer Engine nor the
    scales that its modules hold.

    Args:
        module: left as it is.
        rotary_base: base of the rotary angles that calls of a ``te.TransformerLayer`` pass as
            ``rotary_pos_emb``: a sequence has the operation that computes them. None: none.

    Raises:
        NotSupportedError: an option, a hook or a class has no counterpart; the message names it.
            Classes that derive from those of Transformer Engine compute what they like, and have
            none.
    """
    kind = kind_of(module)
    refuse_hooks(module)
    if kind in _SEQUENCES or type(module) is nn.Sequential:
        children = {
            name: child if _stays(child) else _inner(child, rotary_base)
            for name, child in module.named_children()
        }
        return Sequential(children).train(module.training)
    refuse_parameters(module)
    if kind.startswith("ops."):
        return Sequential(from_te_operation(module))
    found = MODULES.get(kind)
    if found is None:
        names = sorted({*MODULES, *OPERATIONS, "Sequential"})
        raise NotSupportedError.explained(
            f"from_te converts {', '.join(names)} of Transformer Engine",
            received=f"{type(module).__module__}.{type(module).__qualname__}",
            remedy="Convert its modules one by one",
        )
    options = (
        TransformerLayerOptions.read(module, rotary_base)
        if found is TransformerLayerOptions
        else found.read(module)
    )
    dtype = next(module.parameters()).dtype
    sequence = options.build("meta", dtype)
    for ours, theirs in _present(options, sequence).items():
        _set(sequence, ours, module.get_parameter(theirs))
    return sequence.train(module.training)


def _stays(module: nn.Module) -> bool:
    """Whether a module inside of a sequence is a plain one, not Transformer Engine's or derived."""
    bases = {base.__module__.partition(".")[0] for base in type(module).__mro__}
    return "transformer_engine" not in bases and type(module) is not nn.Sequential


def _inner(module: nn.Module, rotary_base: float | None) -> nn.Module:
    """What takes the place of ``module`` in a sequence: an operation is not wrapped."""
    made = from_te(module, rotary_base=rotary_base)
    single = kind_of(module).startswith("ops.") and kind_of(module) not in _SEQUENCES
    return made[0] if single else made


def _present(options: Options, sequence: nn.Module) -> dict[str, str]:
    """The names of the parameters that ``sequence`` has, and theirs."""
    names = options.names()
    return {name: names[name] for name, _ in sequence.named_parameters()}


def _set(module: nn.Module, path: str, parameter: nn.Parameter) -> None:
    owner, _, name = path.rpartition(".")
    setattr(module.get_submodule(owner), name, parameter)


def to_te(sequence: nn.Module) -> Any:
    """Converts a sequence to Transformer Engine, with the very same parameters.

    A sequence of :func:`from_te`, or of ``Options.build``, becomes the module that it stands for;
    any other a ``te.ops.Sequential`` of its operations, in which plain modules stay. Fusions that
    opfuser knows, recipes and what is set on the sequence itself have no counterpart there.

    Args:
        sequence: left as it is.

    Raises:
        MissingPackageError: Transformer Engine cannot be imported.
        ArgumentTypeError: ``sequence`` is no Sequential.
        NotSupportedError: an operation, an option, a recipe or a hook has no counterpart; or the
            sequence of a module has been changed since.
    """
    if not isinstance(sequence, Sequential):
        raise ArgumentTypeError.explained(
            "to_te converts a Sequential",
            received=type(sequence).__name__,
            remedy="Wrap an operation: to_te(Sequential(operation))",
        )
    engine, classes = (
        required(f"transformer_engine.pytorch{name}", "to_te", "opfuser[te]")
        for name in ("", ".ops")
    )
    return _sequence_to_te(sequence, engine, classes, ())


def _sequence_to_te(sequence: Sequential, engine: Any, classes: Any, path: tuple[int, ...]) -> Any:
    where = "to_te"
    refused = {"recipe": sequence.recipe is not None, "hooks": has_hooks(sequence)}
    for name, wrong in {**refused, "subclass": type(sequence) is not Sequential}.items():
        if wrong:
            raise NotSupportedError.explained(
                f"A sequence of te.ops has no counterpart of a {name.removesuffix('s')}",
                where=where,
                received=f"a {type(sequence).__name__} with {name}",
            )
    options = options_of(sequence)
    if options is not None:
        return _module_to_te(sequence, options, engine)

    def channel(name: str) -> str:
        # Private ones there would meet those of neighbours.
        inside = ".".join(map(str, path))
        return f"{name} of {inside}" if isinstance(name, PrivateChannel) else str(name)

    children: dict[str, nn.Module] = {}
    for n, (name, child) in enumerate(sequence.named_children()):
        if isinstance(child, Sequential):
            children[name] = _sequence_to_te(child, engine, classes, (*path, n))
        elif isinstance(child, FusibleOperation):
            refuse_parameters(child)
            children[name] = to_te_operation(child, classes, channel)
        else:
            children[name] = child
    return classes.Sequential(children).train(sequence.training)


def _module_to_te(sequence: Sequential, options: Options, engine: Any) -> Any:
    refuse_parameters(sequence)
    parameter = next(sequence.parameters())
    fresh = options.build("meta", parameter.dtype)
    made, found = _shape(fresh), _shape(sequence)
    if made != found:
        names = [f"{name} ({kind})" for name, kind, _ in found if (name, kind, _) not in made]
        raise NotSupportedError.explained(
            "A sequence that stands for a module must have the operations it was made with",
            where=options.te_name,
            received=", ".join(names) or "fewer",
            remedy="to_te(Sequential(*sequence)) converts them one by one",
        )
    where: Any = {"device": parameter.device, "params_dtype": parameter.dtype}
    arguments = options.te_arguments()
    module = getattr(engine, options.te_name)(**arguments, **where)
    for ours, theirs in _present(options, sequence).items():
        _set(module, theirs, sequence.get_parameter(ours))
    return module.train(sequence.training)


def _shape(sequence: nn.Module) -> list[tuple[str, str, Any]]:
    """Names, classes and flags of the operations, without what says nothing of the result."""
    return [
        (name, type(module).__name__, _flags(module))
        for name, module in sequence.named_modules()
        if isinstance(module, (FusibleOperation, Sequential))
    ]


def _flags(module: nn.Module) -> Any:
    if not isinstance(module, FusibleOperation):
        return None
    arguments = OPERATIONS.get(type(module).__name__, ())
    known = {a.name: attribute(module, a.here) for a in arguments if a.here is not None}
    public = {name: value for name, value in vars(module).items() if name[0] != "_"}
    simple = {n: v for n, v in public.items() if isinstance(v, (int, float, str, type(None)))}
    return {**simple, **known, "training": None}
