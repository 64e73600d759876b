"""The smallest modules of a model, and the operations that compute with their parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from opfuser import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    BasicOperation,
    LayerNorm,
    Linear,
    MergedLinear,
    ReGLU,
    ReLU,
    RMSNorm,
    Sigmoid,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
    Tanh,
)

from .reading import Reader, Refused, foreign_forward, foreign_hooks

__all__ = [
    "ACTIVATIONS",
    "GATED",
    "NORMS",
    "Experts",
    "Leaf",
    "Leaves",
    "eps_of",
    "experts_of",
    "is_norm",
    "is_transposed",
    "leaves_of",
    "linear",
    "merged",
    "norm",
    "refuse_distributed",
    "share",
    "sizes_of",
]

# Formulas that a norm or an activation is compared with, in this order.
NORMS: dict[str, Any] = {
    "rms": lambda size, eps: RMSNorm(size, eps=eps, device="meta"),
    "rms of 1 + weight": lambda size, eps: RMSNorm(
        size, eps=eps, device="meta", zero_centered_gamma=True
    ),
    "layer": lambda size, eps: LayerNorm(size, eps=eps, device="meta"),
}
ACTIVATIONS: dict[str, Any] = {
    "silu": SiLU,
    "gelu": lambda: GELU("none"),
    "gelu by tanh": GELU,
    "relu": ReLU,
    "quick gelu": QGELU,
    "squared relu": SReLU,
    "tanh": Tanh,
    "sigmoid": Sigmoid,
}
GATED: dict[str, Any] = {
    "silu": SwiGLU,
    "gelu by tanh": GEGLU,
    "relu": ReGLU,
    "quick gelu": QGEGLU,
    "squared relu": SReGLU,
    "sigmoid": GLU,
}
_EPS = "eps", "variance_epsilon", "epsilon"


class Leaf(NamedTuple):
    """A module without modules that matter here, and the one that holds it."""

    path: str
    holder: nn.Module
    module: nn.Module


class Leaves(NamedTuple):
    """Those of a module by kind, each in the order in which they were registered.

    Attributes:
        unknown: children of the module that hold parameters of other kinds.
    """

    linears: list[Leaf]
    norms: list[Leaf]
    activations: list[Leaf]
    dropouts: list[Leaf]
    unknown: list[Leaf]


class Experts(NamedTuple):
    """The parts of a mixture of experts with D features, F of them inside of each of E experts.

    Attributes:
        router: with a weight (E, D).
        experts: with the weights of all.
        gate_up: name of their weight (E, 2 F, D).
        down: name of their weight (E, D, F).
        sizes: D, F and E.
    """

    router: nn.Module
    experts: nn.Module
    gate_up: str
    down: str
    sizes: tuple[int, int, int]


def experts_of(module: nn.Module) -> Experts | None:
    """The parts of what looks like a mixture of experts and nothing else."""
    children = [child for child in module._modules.values() if child is not None]
    if len(children) != 2 or module._parameters or module._buffers:
        return None
    for router, experts in (children, children[::-1]):
        weight, (gate_up, down) = router._parameters.get("weight"), _two_names(experts)
        if weight is None or len(router._parameters) > 1 or router._modules or router._buffers:
            continue
        if weight.dim() != 2 or not down or experts._buffers:
            continue
        count, features = weight.shape
        shapes = [tuple(experts.get_parameter(name).shape) for name in (gate_up, down)]
        inside = shapes[1][-1] if shapes[1] else 0
        if shapes == [(count, 2 * inside, features), (count, features, inside)]:
            return Experts(router, experts, gate_up, down, (features, inside, count))
    return None


def _two_names(module: nn.Module) -> tuple[str, str]:
    names = [name for name, p in module._parameters.items() if p is not None]
    return (names[0], names[1]) if len(names) == 2 else ("", "")


def leaves_of(read: Reader, root: nn.Module) -> Leaves:
    """The leaves of a module.

    Raises:
        Refused: it has parameters or buffers of its own, or what is inside must be called.
    """
    if root._parameters or root._buffers:
        raise Refused("has parameters of its own")
    out = Leaves([], [], [], [], [])
    for name, child in read.children(root).items():
        found, trial = Leaves([], [], [], [], []), Reader()
        if _collect(trial, Leaf(name, root, child), found):
            read.include(trial)
            for kind, new in zip(out, found):
                kind.extend(new)
        else:
            read.inner(child)
            out.unknown.append(Leaf(name, root, child))
    return out


def _collect(read: Reader, leaf: Leaf, out: Leaves) -> bool:
    """Adds what is in a module; False if it has parameters that no kind accounts for."""
    module = leaf.module
    read.inner(module)
    if is_linear(module):
        out.linears.append(leaf)
    elif is_norm(module):
        out.norms.append(leaf)
    elif isinstance(module, nn.Dropout):
        out.dropouts.append(leaf)
    elif isinstance(module, nn.Identity):
        pass
    elif not module._modules and not module._parameters and not module._buffers:
        out.activations.append(leaf)
    elif module._parameters or module._buffers or isinstance(module, nn.ModuleList):
        return False
    else:
        called = why_called(module)
        if called:
            raise Refused(f"{leaf.path} {called}")
        return all(
            _collect(read, Leaf(f"{leaf.path}.{name}", module, child), out)
            for name, child in read.children(module).items()
        )
    return True


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear module, or a wrapper such as PEFT's that stands for one."""
    sizes = [getattr(module, name, None) for name in ("in_features", "out_features")]
    return (
        isinstance(module, nn.Linear)
        or is_transposed(module)
        or (all(isinstance(size, int) for size in sizes) and hasattr(module, "base_layer"))
    )


def is_transposed(module: nn.Module) -> bool:
    """Whether it is a linear module whose weight is (in, out): transformers' Conv1D."""
    kind = type(module)
    return (kind.__module__, kind.__qualname__) == ("transformers.pytorch_utils", "Conv1D")


def is_norm(module: nn.Module) -> bool:
    """Whether it may be a norm over the last dimension with a weight."""
    there = {name: p for name, p in module._parameters.items() if p is not None}
    return (
        bool(there)
        and set(there) <= {"weight", "bias"}
        and not (module._modules or module._buffers)
        and "weight" in there
        and there["weight"].dim() == 1
        and any(isinstance(getattr(module, name, None), float) for name in _EPS)
    )


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """Features that a linear module takes, and that it returns."""
    if is_transposed(module):
        weight: Any = module.weight
        taken, returned = weight.shape
        return taken, returned
    features: Any = module.in_features, module.out_features
    taken, returned = features
    return taken, returned


def eps_of(read: Reader, module: nn.Module) -> float:
    """What a norm adds to the variance."""
    for name in _EPS:
        if isinstance(read.value(module, name), float):
            return float(getattr(module, name))
    raise Refused("has no eps")


def why_called(module: nn.Module) -> str:
    """Why a module has to be called, as a predicate; empty if its parameters say all."""
    if foreign_hooks(module):
        return "carries hooks"
    return "has a forward of its own" if foreign_forward(module) else ""


def _is_plain(module: nn.Module) -> bool:
    return (type(module) is nn.Linear or is_transposed(module)) and not why_called(module)


def refuse_distributed(source: nn.Module) -> None:
    """Raises Refused if parameters are DTensors."""
    if any(hasattr(p, "device_mesh") for p in source._parameters.values()):
        raise Refused("has parameters that are distributed tensors: apply before they are")


def share(op: nn.Module, source: nn.Module) -> None:
    """Makes an operation read the parameters of ``source``, whatever is set there later."""
    refuse_distributed(source)
    op.__dict__["_parameters"] = source._parameters
    for part in getattr(op, "basic_ops", ()):
        part.__dict__["_parameters"] = source._parameters


def linear(module: nn.Module) -> nn.Module:
    """The operation of a linear module, or itself where it has to be called."""
    if not _is_plain(module):
        return module
    how: Any = {"bias": module.bias is not None, "weight_transposed": is_transposed(module)}
    op = Linear(*sizes_of(module), **how, device="meta")
    share(op, module)
    return op


def merged(modules: dict[str, nn.Module]) -> MergedLinear:
    """The operation of several linear modules, which calls those that have to be called."""
    sizes = {name: sizes_of(module)[1] for name, module in modules.items()}
    in_features = {sizes_of(module)[0] for module in modules.values()}
    if len(in_features) > 1:
        raise Refused("has projections of different inputs")
    plain = {n: m for n, m in modules.items() if _is_plain(m) and not is_transposed(m)}
    with_bias = [name for name, module in plain.items() if module.bias is not None]
    op = MergedLinear(in_features.pop(), sizes, bias=with_bias, device="meta")
    for name, module in modules.items():
        if name in plain:
            share(op.get_submodule(name), module)
        else:
            setattr(op, name, module)
    return op


def norm(read: Reader, module: nn.Module, kind: str, *, own: bool) -> nn.Module:
    """The operation of a norm of this kind, or itself where it has to be called.

    ``own`` says that the caller has been called already.
    """
    if not own and why_called(module):
        return module
    weight: Any = module.weight
    op: BasicOperation = NORMS[kind](weight.shape[0], eps_of(read, module))
    share(op, module)
    return op
