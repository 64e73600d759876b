"""Trees of ``torch.nn`` modules as sequences of operations, and back, with the same parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import nn

from ..basic import CrossEntropy, Dropout, Embedding, Identity, LayerNorm, Reshape, RMSNorm
from ..basic.activation import GELU, ReLU, Sigmoid, SiLU, Softplus, Tanh
from ..basic.basic_linear import BasicLinear
from ..change_tracking import replaces_forward
from ..context import COMPUTE_DTYPES
from ..errors import ArgumentTypeError, NotSupportedError, explain
from ..linear import Linear
from ..op import FusedOperation, FusibleOperation
from ..sequential import Exports, Sequential
from .torch_layers import LAYERS, layer_refusal, patched_methods

__all__ = ["ConversionReport", "ConvertedModule", "conversion_report", "from_torch", "to_torch"]


class ConvertedModule(NamedTuple):
    """What became of one module of a tree.

    Attributes:
        path: its name in the tree; empty for the root.
        kind: the name of its class.
        result: the name of the class of what replaces it; None where a copy of it stays.
        note: why it stays, or how what replaces it may differ.
    """

    path: str
    kind: str
    result: str | None
    note: str = ""


class ConversionReport(NamedTuple):
    """What :func:`from_torch` makes of a tree; ``print`` it.

    Attributes:
        modules: in the order of the tree. Modules that only hold others are left out.
    """

    modules: tuple[ConvertedModule, ...]

    @property
    def replaced(self) -> tuple[ConvertedModule, ...]:
        """Those that operations replace."""
        return tuple(m for m in self.modules if m.result is not None)

    @property
    def kept(self) -> tuple[ConvertedModule, ...]:
        """Those that stay as they are."""
        return tuple(m for m in self.modules if m.result is None)

    def __str__(self) -> str:
        lines = []
        for path, kind, result, note in self.modules:
            line = f"{path or '(root)'}: {kind} " + ("stays" if result is None else f"-> {result}")
            lines.append(f"{line}: {note}" if note else line)
        return "\n".join(lines)


_Make = Callable[[Any], nn.Module]


def _rms_norm(m: nn.RMSNorm) -> RMSNorm:
    eps = m.eps
    if eps is None:
        wide = m.weight is not None and m.weight.dtype == torch.float64
        eps = torch.finfo(torch.float64 if wide else torch.float32).eps
    return RMSNorm(m.normalized_shape, eps=eps, device="meta")


# What makes a counterpart with the options of a module, on the meta device. Options that it does
# not look at are no risk: a counterpart that does not lead back to them is not taken.
_TO_OPERATION: dict[type[nn.Module], _Make] = {
    nn.CrossEntropyLoss: lambda m: CrossEntropy(m.ignore_index, m.label_smoothing, m.reduction),
    nn.Dropout: lambda m: Dropout(m.p),
    nn.Embedding: lambda m: Embedding(
        m.num_embeddings, m.embedding_dim, padding_idx=m.padding_idx, device="meta"
    ),
    nn.Flatten: lambda m: Reshape(-1),
    nn.GELU: lambda m: GELU(m.approximate),
    nn.Identity: lambda m: Identity(),
    nn.LayerNorm: lambda m: LayerNorm(m.normalized_shape, eps=m.eps, device="meta"),
    nn.Linear: lambda m: Linear(
        m.in_features, m.out_features, bias=m.bias is not None, device="meta"
    ),
    nn.RMSNorm: _rms_norm,
    nn.ReLU: lambda m: ReLU(),
    nn.SiLU: lambda m: SiLU(),
    nn.Sigmoid: lambda m: Sigmoid(),
    nn.Softplus: lambda m: Softplus(m.beta, m.threshold),
    nn.Tanh: lambda m: Tanh(),
}
_TO_TORCH: dict[type[nn.Module], _Make] = {
    BasicLinear: lambda op: nn.Linear(op.in_features, op.out_features, bias=False, device="meta"),
    CrossEntropy: lambda op: nn.CrossEntropyLoss(
        ignore_index=op.ignore_index, label_smoothing=op.label_smoothing, reduction=op.reduction
    ),
    Dropout: lambda op: nn.Dropout(op.dropout_probability),
    Embedding: lambda op: nn.Embedding(
        op.num_embeddings, op.embedding_dim, op.padding_idx, device="meta"
    ),
    GELU: lambda op: nn.GELU(op.approximate),
    Identity: lambda op: nn.Identity(),
    LayerNorm: lambda op: nn.LayerNorm(op.normalized_shape, op.eps, device="meta"),
    Linear: lambda op: nn.Linear(
        op.in_features, op.out_features, bias=op.bias is not None, device="meta"
    ),
    RMSNorm: lambda op: nn.RMSNorm(op.normalized_shape, op.eps, device="meta"),
    ReLU: lambda op: nn.ReLU(),
    Reshape: lambda op: nn.Flatten(0, -1),
    SiLU: lambda op: nn.SiLU(),
    Sigmoid: lambda op: nn.Sigmoid(),
    Softplus: lambda op: nn.Softplus(op.beta, op.threshold),
    Tanh: lambda op: nn.Tanh(),
}
_CONTAINERS = (
    nn.ModuleDict, nn.ModuleList, nn.Sequential,
    nn.Transformer, nn.TransformerDecoder, nn.TransformerEncoder,
)  # fmt: skip
_STAYS: dict[type[nn.Module], str] = {
    nn.GLU: "its gate is the second half of the input, that of opfuser's operations the first",
    nn.MultiheadAttention: "it takes three tensors and returns two",
}

# Options that change where results are written, what is saved or how a weight's gradient gets to
# `grad`, but no result.
_WITHOUT_EFFECT = frozenset(
    {"accumulate_into_grad", "cache_quantized_input", "inplace", "recipe", "training"}
)
_BARE = vars(nn.Module())
_HOOKS = tuple(name for name in _BARE if "hook" in name)
# A forward that was put back, and one that was compiled, are the original's.
_BOUND = frozenset({"_compiled_call_impl", "forward"})
_DERIVED = frozenset({"_alone", "_settings", "_stamp", "_serial", "_state_names"}) | _BOUND
_Place = Literal["sequence", "alone", "copy"]
_M = TypeVar("_M", bound=nn.Module)


def from_torch(module: nn.Module) -> nn.Module:
    """A copy of a tree of ``torch.nn`` modules in which operations compute what they can.

    The copy holds the same ``Parameter`` and buffer objects under the same names, so that an
    optimiser, a checkpoint or a tied weight of either serves both. A ``torch.nn.Sequential``
    becomes an :class:`opfuser.Sequential` with operations in it; encoder and decoder layers of a
    transformer compute through sequences, with masks and dropout as they had. In modules of other
    classes, which stay, only layers with parameters are replaced, one by one. What no operation
    computes stays a plain module; one whose forward was replaced stays the very object. Training
    flags, hooks, attributes of instances and devices, meta included, are those of the original;
    nothing of the original changes.

    Values and gradients are those of the original up to rounding. Dropout draws other numbers.

    Args:
        module: the tree, or a single layer. A ``CrossEntropyLoss`` is converted on its own alone:
            opfuser's has the classes in the last dimension.

    Raises:
        ArgumentTypeError: it is no module.
    """
    return _Reader([], {}).read(_checked(module, "from_torch"), "", "sequence")


def conversion_report(module: nn.Module) -> ConversionReport:
    """What :func:`from_torch` makes of each module of a tree, and why others stay.

    Args:
        module: the tree.

    Raises:
        ArgumentTypeError: it is no module.
    """
    reader = _Reader([], {})
    reader.read(_checked(module, "conversion_report"), "", "sequence")
    return ConversionReport(tuple(reader.entries))


def to_torch(module: nn.Module) -> nn.Module:
    """A copy of a tree in which modules of ``torch.nn`` replace operations and sequences.

    The inverse of :func:`from_torch`: with the same ``Parameter`` and buffer objects under the same
    names, training flags, hooks and attributes.

    Args:
        module: the tree, a :class:`opfuser.Sequential` or a single operation.

    Raises:
        ArgumentTypeError: it is no module.
        NotSupportedError: it holds operations, or options of them, that ``torch.nn`` does not have.
            The text names all of them.
    """
    writer = _Writer([], {})
    out = writer.write(_checked(module, "to_torch"), "")
    if writer.lacking:
        raise NotSupportedError(
            explain(
                "to_torch needs a module of torch.nn for every operation",
                received="; ".join(writer.lacking),
                remedy="Convert the parts of the sequence that have one",
            )
        )
    return out


Exports.to_torch = staticmethod(to_torch)


def _checked(module: object, where: str) -> nn.Module:
    if isinstance(module, nn.Module):
        return module
    raise ArgumentTypeError(
        explain("Modules are converted", where=where, received=type(module).__name__)
    )


class _Reader(NamedTuple):
    """One call of :func:`from_torch`: the report so far, and what was made of each module."""

    entries: list[ConvertedModule]
    made: dict[tuple[int, _Place], nn.Module]

    def read(self, module: nn.Module, path: str, place: _Place) -> nn.Module:
        if isinstance(module, (FusibleOperation, Sequential, *LAYERS.values())):
            return module
        known = self.made.get((id(module), place))
        if known is None:
            known = self.made[id(module), place] = self._read(module, path, place)
        return known

    def _read(self, module: nn.Module, path: str, place: _Place) -> nn.Module:
        cls = type(module)
        replaced = _own_computation(module)
        if replaced:
            return self._stays(module, path, f"its {replaced} was replaced", module)
        if place == "copy":
            return self._twin(module, path, "copy")
        if cls.__module__.startswith("torch.") and not _of_torch_nn(cls):
            return self._stays(module, path, f"a class of {cls.__module__}", module)
        if isinstance(module, nn.Sequential):
            own = _own_names(module)
            if not own:
                self._note(module, path, "Sequential", "")
                new = Sequential(self._children(module, path, "sequence"))
                return _carry_over(module, new, _BARE)
            self._note(module, path, None, f"it has {', '.join(own)} of its own")
        elif cls in LAYERS:
            why = layer_refusal(module)
            if why:
                return self._stays(module, path, why)
            layer = self._twin(module, path, "copy")
            layer.__class__ = LAYERS[cls]
            return self._replaced(module, path, layer)
        elif cls in _TO_OPERATION:
            return self._leaf(module, path, place)
        elif _of_torch_nn(cls) and cls not in _CONTAINERS:
            return self._stays(module, path, _STAYS.get(cls, "no operation computes it"))
        elif not module._modules:
            return self._stays(module, path, "no operation computes it")
        return self._twin(module, path, "alone")

    def _leaf(self, module: nn.Module, path: str, place: _Place) -> nn.Module:
        if type(module) is nn.CrossEntropyLoss and path:
            why = "its classes are in dimension 1, those of opfuser's in the last"
            return self._stays(module, path, why)
        if place == "alone" and not module._parameters:
            return self._stays(module, path, "outside of a Sequential nothing is fused with it")
        op = _counterpart(module, _TO_OPERATION, _TO_TORCH)
        if isinstance(op, str):
            return self._stays(module, path, op)
        note = "writes to no input" if getattr(module, "inplace", False) else ""
        if isinstance(op, RMSNorm) and cast(nn.RMSNorm, module).eps is None:
            note = f"eps is {op.eps:.3g}, whatever dtype follows"
        return self._replaced(module, path, op, note)

    def _twin(self, module: _M, path: str, place: _Place) -> _M:
        return _twin(module, self._children(module, path, place))

    def _children(self, module: nn.Module, path: str, place: _Place) -> dict[str, nn.Module]:
        return _of_children(module, path, lambda child, at: self.read(child, at, place))

    def _note(self, module: nn.Module, path: str, result: str | None, note: str) -> None:
        self.entries.append(ConvertedModule(path, type(module).__name__, result, note))

    def _replaced(self, old: nn.Module, path: str, new: nn.Module, note: str = "") -> nn.Module:
        self._note(old, path, type(new).__name__, note)
        return new

    def _stays(
        self, module: nn.Module, path: str, why: str, itself: nn.Module | None = None
    ) -> nn.Module:
        self._note(module, path, None, why)
        return self._twin(module, path, "copy") if itself is None else itself


class _Writer(NamedTuple):
    """One call of :func:`to_torch`: what has no counterpart, and what was made of each module."""

    lacking: list[str]
    made: dict[int, nn.Module]

    def write(self, module: nn.Module, path: str) -> nn.Module:
        known = self.made.get(id(module))
        if known is None:
            known = self.made[id(module)] = self._write(module, path)
        return known

    def _write(self, module: nn.Module, path: str) -> nn.Module:
        if replaces_forward(module):
            ours = isinstance(module, (FusibleOperation, Sequential))
            return self._lacks(module, path, "its forward was replaced") if ours else module
        if isinstance(module, FusibleOperation):
            new = _counterpart(module, _TO_TORCH, _TO_OPERATION)
            return self._lacks(module, path, new) if isinstance(new, str) else new
        children = _of_children(module, path, self.write)
        if isinstance(module, Sequential):
            own = [*_own_names(module), *(["recipe"] if module.recipe is not None else [])]
            if own:
                self._lacks(module, path, f"it has {', '.join(own)} of its own")
            new = nn.Sequential()
            new._modules.update(children)
            return _carry_over(module, new, {**_BARE, **vars(Sequential())})
        twin = _twin(module, children)
        for theirs, cls in LAYERS.items():
            if type(twin) is cls:
                twin.__class__ = theirs  # type: ignore[assignment]  # the type that mypy narrowed
        return twin

    def _lacks(self, module: nn.Module, path: str, why: str) -> nn.Module:
        self.lacking.append(f"{type(module).__name__} at {path!r}: {why}")
        return module


def _own_computation(module: nn.Module) -> str:
    """The name of an attribute that the instance computes with in place of what its class says.

    It is bound to the object. Of classes of the user, for which no operation stands in, the rest is
    copied as it is.
    """
    own, inside = vars(module), ("_parameters", "_modules", "_buffers")
    names = set().union(*(own[kind] for kind in inside), _methods(type(module))) & own.keys()
    if not replaces_forward(module):
        names.discard("forward")
    if not _of_torch_nn(type(module)):
        kept = {"forward", "_call_impl"}
        names = {n for n in names if n in kept or getattr(own[n], "__self__", None) is module}
    # A copy that torch made of a decoder layer has an activation of its own.
    return min(names - {"activation"}, default="")


def _methods(cls: type[nn.Module]) -> set[str]:
    functions = (item for base in cls.__mro__ for item in vars(base).items())
    return {name for name, value in functions if isinstance(value, FunctionType)}


def _of_torch_nn(cls: type[nn.Module]) -> bool:
    return cls.__module__.startswith("torch.nn.modules.")


def _of_children(
    module: nn.Module, path: str, convert: Callable[[nn.Module, str], nn.Module]
) -> dict[str, nn.Module]:
    """The children by name, converted; None stays, where a child was taken away."""
    found: dict[str, Any] = dict(module._modules)
    for name, child in found.items():
        if child is not None:
            found[name] = convert(child, f"{path}.{name}" if path else name)
    return found


# What a class statement leaves in a class that defines nothing.
_BARE_CLASS = frozenset(vars(type("_Bare", (nn.Module,), {"__init__": None}))) | {
    "__annotations__", "__firstlineno__", "__static_attributes__", "__orig_bases__",
    "__parameters__", "__constants__", "__abstractmethods__", "_abc_impl", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__conditional_annotations__", "__slots__",
}  # fmt: skip


_NAMES = frozenset(dir(Sequential())) - frozenset(dir(nn.Sequential()))


def _own_names(module: nn.Module) -> list[str]:
    """What a sequence has that the other kind would lose.

    Those are definitions of a subclass, parameters, buffers, and modules under names of attributes.
    """
    names: list[str] = []
    for cls in type(module).__mro__:
        if cls in (nn.Sequential, Sequential):
            break
        names += [name for name in vars(cls) if name not in _BARE_CLASS]
    clashes = [name for name in module._modules if name in _NAMES]
    return [*names, *module._parameters, *module._buffers, *clashes]


def _twin(module: _M, children: dict[str, nn.Module]) -> _M:
    """Another module with the same parameters, buffers, hooks and attributes, and ``children``."""
    twin = object.__new__(type(module))
    own = twin.__dict__
    own.update(module.__dict__)
    own.update({name: copy.copy(own[name]) for name in _BARE if name in own})
    for name in _BOUND:
        own.pop(name, None)
    if isinstance(twin, tuple(LAYERS.values())):
        own.pop("_fused", None)  # a copy makes its own
    own["_modules"] = children
    return twin


def _counterpart(
    module: nn.Module,
    there: dict[type[nn.Module], _Make],
    back: dict[type[nn.Module], _Make],
) -> nn.Module | str:
    """What computes the same with the same parameters, or why there is none.

    The counterpart of the counterpart has to have the same options, so that none is lost: neither
    one that ``there`` forgets nor one that a later version of torch adds.
    """
    make = there.get(type(module))
    if make is None:
        return "it has no counterpart"
    new = make(module)
    for name, parameter in module._parameters.items():
        why = _parameter_refusal(name, parameter, new)
        if why:
            return why
    if there is _TO_OPERATION:
        missing = [name for name in new._parameters if name not in module._parameters]
        if missing:
            return f"it has no parameter {missing[0]}"
        if patched_methods(type(module)):
            return f"the forward of torch.nn.{type(module).__name__} was replaced"
    again = back[type(new)](new)
    lost = [f"{name}={value!r}" for name, value in _lost(module, again)]
    if lost:
        return f"{', '.join(lost)} has no counterpart"
    buffers = [name for name, buffer in module._buffers.items() if buffer is not None]
    if buffers:
        return f"{', '.join(buffers)} has no counterpart"
    for name in list(new._parameters):
        setattr(new, name, module._parameters.get(name))
    return _carry_over(module, new, vars(again))


def _parameter_refusal(name: str, parameter: nn.Parameter | None, new: nn.Module) -> str:
    if parameter is None:
        return ""
    expected = new._parameters.get(name)
    if expected is None:
        return f"{name} has no counterpart"
    if type(parameter) is not nn.Parameter or parameter.dtype not in COMPUTE_DTYPES:
        return f"{name} is a {type(parameter).__name__} of {parameter.dtype}"
    if parameter.shape != expected.shape:
        return f"{name} has shape {tuple(parameter.shape)}, not {tuple(expected.shape)}"
    return ""


def _lost(module: nn.Module, again: nn.Module) -> Iterable[tuple[str, Any]]:
    kept = _options(again)
    for name, value in _options(module).items():
        resolved = name == "eps" and value is None
        if resolved or name in _WITHOUT_EFFECT or name not in kept:
            continue
        if isinstance(value, torch.Tensor) or kept[name] != value:
            yield name, value


def _options(module: nn.Module) -> dict[str, Any]:
    """The public attributes of a layer, of a compound those of its operations too."""
    parts = module.basic_ops if isinstance(module, FusedOperation) else ()
    options: dict[str, Any] = {"basic_ops": [type(part).__name__ for part in parts]}
    for holder in (*parts, module):
        for name, value in vars(holder).items():
            if not name.startswith("_") and name != "basic_ops":
                options[name] = value
    return options if parts else {n: v for n, v in options.items() if n != "basic_ops"}


def _carry_over(old: nn.Module, new: _M, expected: dict[str, Any]) -> _M:
    """Gives ``new`` the training flag, the hooks, and attributes of ``old`` beyond the expected."""
    new.training = old.training
    for part in new.basic_ops if isinstance(new, FusedOperation) else ():
        part.training = old.training
    for name in _HOOKS:
        theirs = getattr(old, name)
        if isinstance(theirs, dict):
            getattr(new, name).update(theirs)
        elif theirs is not None:
            setattr(new, name, theirs)
    for name, value in vars(old).items():
        if name not in expected and name not in _DERIVED:
            new.__dict__[name] = value
    return new
