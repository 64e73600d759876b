"""The operations that te.ops has as well: how the arguments of each are read on either side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any, NamedTuple

from torch import nn

import opfuser
from opfuser import BasicOperation, FusibleOperation, Linear, Sequential
from opfuser.basic.gated_activation import GATED_ACTIVATIONS
from opfuser.counterparts import ACTIVATIONS
from opfuser.errors import NotSupportedError

from .options import attribute, kind_of, refuse_option


class Argument(NamedTuple):
    """Where the operations keep an argument of their constructors.

    Attributes:
        name: the argument.
        there, here: paths to the attribute; ``there`` is None for an option that te.ops lacks, and
            ``here`` for one that opfuser lacks.
        only: the value without effect, of an option that one side lacks.
    """

    name: str
    there: str | None
    here: str | None
    only: Any = None


def _same(*names: str) -> tuple[Argument, ...]:
    return tuple(Argument(name, name, name) for name in names)


def _private(*names: str) -> tuple[Argument, ...]:
    """Arguments that te.ops keeps under the name with an underscore."""
    return tuple(Argument(name, f"_{name}", name) for name in names)


_CACHED = _same("cache_quantized_input")
_SCALED = _same("glu_interleave_size", "activation_recompute_in_mlp")
_CAPS = _same("beta1", "beta2")
_CLAMPS = _same("limit", "alpha", "glu_linear_offset")
_SHARDING = _same("tensor_parallel_mode", "tensor_parallel_group", "sequence_parallel")
_TRACKER = "rng_state_tracker_function"
_RNG = Argument(_TRACKER, f"_{_TRACKER}", f"_{_TRACKER}")
(_MAIN_GRAD,) = _private("accumulate_into_main_grad")
_RECIPE = Argument("recipe", None, "recipe", "inherit")
_STORED = Argument("weight_format", None, "weight_format")
_TRANSPOSED = Argument("weight_transposed", None, "weight_transposed", False)
_GROUP = _same("process_group")
_SEQUENCE_DIM = Argument("sequence_dim", None, "sharding.sequence_dim", 0)
_DIM = Argument("dim", None, "dim", 0)
_IN_PLACE = _private("in_place")
_NORM = (
    Argument("normalized_shape", "weight.shape", "normalized_shape"),
    *_same("eps", "zero_centered_gamma"),
)

# By class. Parameters have the same names on both sides.
OPERATIONS: Mapping[str, tuple[Argument, ...]] = {
    **{
        kind.__name__: _same(*signature(kind).parameters)
        for kind in (*GATED_ACTIVATIONS, *(row.operation for row in ACTIVATIONS.values() if row.te))
    },
    "AddExtraInput": _IN_PLACE,
    "AllGather": (*_GROUP, _DIM),
    "AllReduce": (*_GROUP, Argument("reduce_in_backward", "_reduce_in_backward", None, True)),
    "BasicLinear": (
        *_same("in_features", "out_features"),
        *_SHARDING,
        _RNG,
        _MAIN_GRAD,
        _RECIPE,
        _STORED,
        _TRANSPOSED,
        _SEQUENCE_DIM,
        Argument("userbuffers_options", "_userbuffers_options", None),
    ),
    "Bias": (*_private("size"), *_same("tensor_parallel", "tensor_parallel_group")),
    "ConstantScale": _same("scale"),
    "Dropout": (Argument("p", "dropout_probability", "dropout_probability"),),
    "GELU": (*_CACHED, Argument("approximate", None, "approximate", "tanh")),
    "GroupedLinear": (
        *_same("num_groups", "in_features", "out_features"),
        Argument("bias", "use_bias", "use_bias"),
        *_private("scale_bias"),
        Argument("delay_wgrad_compute", "need_backward_dw", "delay_wgrad_compute"),
        _RNG,
        _MAIN_GRAD,
        _RECIPE,
        Argument("single_grouped_weight", None, "single_grouped_weight", False),
        Argument("single_grouped_bias", None, "single_grouped_bias", False),
    ),
    "Identity": (),
    "L2Normalization": _same("eps"),
    "LayerNorm": _NORM,
    "Linear": (
        *(a._replace(there=f"basic_ops.0.{a.there}") for a in _same("in_features", "out_features")),
        _MAIN_GRAD._replace(there=f"basic_ops.0.{_MAIN_GRAD.there}"),
        Argument(_TRACKER, f"basic_ops.0._{_TRACKER}", f"basic_ops.0._{_TRACKER}"),
        _RECIPE,
        _STORED,
        _TRANSPOSED,
    ),
    "MakeExtraOutput": _IN_PLACE,
    "Quantize": (
        Argument("forward", "_quantize_forward", "quantize_forward"),
        Argument("backward", "_quantize_backward", "quantize_backward"),
    ),
    "RMSNorm": _NORM,
    "ReduceScatter": (*_GROUP, _DIM),
    "Reshape": _private("shape"),
    "ScaledClampedQGeGLU": (*(a._replace(there=f"_clamped.{a.name}") for a in _CLAMPS), *_SCALED),
    "ScaledSReLU": _same("activation_recompute_in_mlp"),
    "ScaledSiTUGLU": (*_CAPS, *_SCALED),
    "ScaledSwiGLU": _SCALED,
    "ScaledTanhSReLU": _same("tanh_clamp_scale", "activation_recompute_in_mlp"),
}
_WITH_PARAMETERS = frozenset("BasicLinear Bias GroupedLinear LayerNorm Linear RMSNorm".split())


def _arguments(op: Any, name: str, side: str) -> dict[str, Any]:
    """Arguments for the constructor of the other side."""
    given: dict[str, Any] = {}
    for argument in OPERATIONS[name]:
        path = getattr(argument, side)
        if path is None:
            continue
        value = attribute(op, path)
        if argument.there is not None and argument.here is not None:
            given[argument.name] = value
        elif value != argument.only:
            refuse_option(name, argument.name, value)
    if name == "Linear":
        given["bias"] = op.bias is not None
    return given


def _share(op: nn.Module, made: Any) -> Any:
    for name, parameter in op.named_parameters(recurse=False):
        setattr(made, name, parameter)
    return made.train(op.training)


def from_te_operation(op: Any) -> nn.Module:
    """Ours in place of an operation of te.ops, with its parameters and channels.

    Raises:
        NotSupportedError: there is none of its kind, or an option has no counterpart.
    """
    name = kind_of(op).removeprefix("ops.")
    if name == "Linear" and len(op.basic_ops) > 1 + (op.bias is not None):
        # With a reduction: which of its parts is sharded is theirs to say.
        return Sequential(*(from_te_operation(part) for part in op.basic_ops))
    if name not in OPERATIONS:
        raise NotSupportedError.explained(
            "te.ops has an operation that opfuser lacks",
            received=name or type(op).__qualname__,
            remedy="Leave it a plain module, or write it as an operation",
        )
    if name == "Linear" and op.basic_ops[0].tensor_parallel_mode is not None:
        return Sequential(*(from_te_operation(part) for part in op.basic_ops))
    given = _arguments(op, name, "there")
    if name in _WITH_PARAMETERS:
        first = next(op.parameters())
        given.update(device="meta", dtype=first.dtype)
    made: FusibleOperation = _share(op, getattr(opfuser, name)(**given))
    if isinstance(made, BasicOperation):
        _bind(op, made, str)
    return made


def to_te_operation(op: FusibleOperation, classes: Any, channel: Callable[[str], str]) -> Any:
    """Makes the operation of te.ops for one of opfuser, with its parameters and channels.

    Raises:
        NotSupportedError: there is none of its kind, or an option has no counterpart.
    """
    name = type(op).__name__
    known = name in OPERATIONS and type(op) is getattr(opfuser, name)
    if not known or not hasattr(classes, name):  # te.ops has some only from a version on
        raise NotSupportedError.explained(
            "te.ops has no such operation",
            received=type(op).__qualname__,
            remedy="Convert the operations before and after it",
        )
    if isinstance(op, Linear) and any(part.communicates for part in op.basic_ops):
        parts = (to_te_operation(part, classes, channel) for part in op.basic_ops)
        return classes.Sequential(*parts)
    given = _arguments(op, name, "here")
    if name in _WITH_PARAMETERS:
        first = next(op.parameters())
        given.update(device=first.device, dtype=first.dtype)
    made = _share(op, getattr(classes, name)(**given))
    if isinstance(op, BasicOperation):
        _bind(op, made, channel)
    return made


def _bind(op: Any, made: Any, channel: Callable[[str], str]) -> None:
    for n, name in enumerate(op._extra_input_channels):
        if name is not None:
            made.set_extra_input_channel(n, channel(name))
    outputs: Iterable[Any] = zip(op._extra_output_channels, op._extra_output_to_caller)
    for n, (name, public) in enumerate(outputs):
        if name is not None:
            made.set_extra_output_channel(n, channel(name), output_to_caller=public)
