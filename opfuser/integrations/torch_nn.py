"""Operations and sequences as modules of ``torch.nn``, with the same parameters."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any, NamedTuple, TypeVar

from torch import nn

from ..basic import Reshape
from ..basic.basic_linear import BasicLinear
from ..core.change_tracking import replaces_forward
from ..counterparts import LAYERS
from ..errors import ArgumentTypeError, NotSupportedError
from ..op import FusedOperation, FusibleOperation
from ..sequential import Sequential

# Of each operation with a counterpart in torch: that.
_COUNTERPARTS: dict[type[nn.Module], type[nn.Module]] = {
    **{layer.operation: torch for torch, layer in LAYERS.items()},
    BasicLinear: nn.Linear,
    Reshape: nn.Flatten,
}
_ATTRIBUTES = {"p": "dropout_probability"}  # of arguments that are called differently
_SPECIAL = frozenset({"bias", "device", "dtype"})

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
_M = TypeVar("_M", bound=nn.Module)


def to_torch(module: nn.Module) -> nn.Module:
    """A copy of a module in which ``torch.nn`` modules replace operations and sequences.

    It has the same ``Parameter`` and buffer objects under the same names, and the same training
    flags, hooks and attributes.

    Args:
        module: a :class:`opfuser.Sequential`, a single operation, or a module that holds some.

    Raises:
        ArgumentTypeError: it is not a module.
        NotSupportedError: it holds operations, or options of them, that ``torch.nn`` does not have.
            The message names all of them.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError.explained(
            "Modules are converted", where="to_torch", received=type(module).__name__
        )
    writer = _Writer([], {})
    out = writer.write(module, "")
    if writer.lacking:
        raise NotSupportedError.explained(
            "to_torch needs a module of torch.nn for every operation",
            received="; ".join(writer.lacking),
            remedy="Convert the parts of the sequence that have one",
        )
    return out


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
            new = _counterpart(module)
            return self._lacks(module, path, new) if isinstance(new, str) else new
        children: dict[str, Any] = dict(module._modules)
        for name, child in children.items():
            if child is not None:  # which was taken away
                children[name] = self.write(child, f"{path}.{name}" if path else name)
        if isinstance(module, Sequential):
            own = [*_own_names(module), *(["recipe"] if module.recipe is not None else [])]
            if own:
                self._lacks(module, path, f"it has {', '.join(own)} of its own")
            new = nn.Sequential()
            new._modules.update(children)
            return _carry_over(module, new, {**_BARE, **vars(Sequential())})
        return _twin(module, children)

    def _lacks(self, module: nn.Module, path: str, why: str) -> nn.Module:
        self.lacking.append(f"{type(module).__name__} at {path!r}: {why}")
        return module


# What a class statement leaves in a class that defines nothing.
_BARE_CLASS = frozenset(vars(type("_Bare", (nn.Module,), {"__init__": None}))) | {
    "__annotations__", "__firstlineno__", "__static_attributes__", "__orig_bases__",
    "__parameters__", "__constants__", "__abstractmethods__", "_abc_impl", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__conditional_annotations__", "__slots__",
}  # fmt: skip


def _own_names(module: nn.Module) -> list[str]:
    """What a sequence has that torch's would lose: definitions, parameters and buffers."""
    names: list[str] = []
    for cls in type(module).__mro__:
        if cls is Sequential:
            break
        names += [name for name in vars(cls) if name not in _BARE_CLASS]
    return [*names, *module._parameters, *module._buffers]


def _twin(module: _M, children: dict[str, nn.Module]) -> _M:
    """Another module with the same parameters, buffers, hooks and attributes, and ``children``."""
    twin = object.__new__(type(module))
    own = twin.__dict__
    own.update(module.__dict__)
    own.update({name: copy.copy(own[name]) for name in _BARE if name in own})
    for name in _BOUND:
        own.pop(name, None)
    own["_modules"] = children
    return twin


def _counterpart(module: nn.Module) -> nn.Module | str:
    """What computes the same with the same parameters, or why there is none."""
    if type(module) not in _COUNTERPARTS:
        return "it has no counterpart"
    new, plain = _as_plain(module)
    kept = _options(plain)
    lost = [
        f"{name}={value!r}"
        for name, value in _options(module).items()
        if name in kept and name not in _WITHOUT_EFFECT and kept[name] != value
    ]
    if lost:
        return f"{', '.join(lost)} has no counterpart"
    for name in list(new._parameters):
        setattr(new, name, module._parameters.get(name))
    return _carry_over(module, new, vars(plain))


def _as_plain(op: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The counterpart in torch, and an operation as it came from it.

    Options that only one of their constructors takes are no risk: an operation that has others
    than the second is refused.
    """
    there, here = _COUNTERPARTS[type(op)], type(op)
    if here is Reshape:
        return nn.Flatten(0, -1), Reshape(-1)
    ours, theirs = ({*signature(kind).parameters} for kind in (here, there))
    given = {n: getattr(op, _ATTRIBUTES.get(n, n)) for n in ours & theirs - _SPECIAL}
    if "device" in ours:
        given["device"] = "meta"
    bias = getattr(op, "bias", None) is not None
    made = [
        kind(**given, **({"bias": bias} if "bias" in known else {}))
        for kind, known in ((there, theirs), (here, ours))
    ]
    return made[0], made[1]


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
