"""The modules of Transformer Engine that are a linear transformation with what is around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from opfuser import (
    ClampedSwiGLU,
    GroupedLinear,
    LayerNorm,
    Linear,
    MakeExtraOutput,
    MergedLinear,
    RMSNorm,
)
from opfuser.basic.gated_activation import GATED_ACTIVATIONS
from opfuser.counterparts import ACTIVATIONS, NORMS
from opfuser.errors import ArgumentError

from .options import Options, refuse_delay, refuse_option, refuse_others, values_of

Device = torch.device | str | None
Dtype = torch.dtype | None
Split = tuple[tuple[str, int], ...]
_Known = TypeVar("_Known")

_ACTIVATIONS = {row.te: row for row in ACTIVATIONS.values() if row.te is not None}
_NORMS = {kind.__name__: kind for kind in reversed([*NORMS.values()])}
_OF_NORM = ("eps", "normalization", "zero_centered_gamma", "return_layernorm_output")
_NORM_NAMES = {"norm.weight": "layer_norm_weight", "norm.bias": "layer_norm_bias"}


def _named(options: Any, field: str, known: Mapping[str, _Known]) -> _Known:
    """What a field of ``options`` names.

    Raises:
        ArgumentError: it names nothing that is known.
    """
    name = getattr(options, field)
    found = known.get(name)
    if found is None:
        raise ArgumentError.explained(
            f"{field} is one of {', '.join(known)}",
            where=type(options).__name__,
            received=repr(name),
        )
    return found


def norm(options: Any, features: int, device: Device, dtype: Dtype) -> LayerNorm | RMSNorm:
    """The norm that ``options`` with fields ``normalization``, ``eps`` and so on ask for."""
    found = _named(options, "normalization", _NORMS)
    centered = options.zero_centered_gamma
    where: Any = {"device": device, "dtype": dtype}
    return found(features, eps=options.eps, zero_centered_gamma=centered, **where)


def _norms(options: Any, features: int, device: Device, dtype: Dtype) -> dict[str, nn.Module]:
    """The norm in front, and the extra output of what it makes if ``options`` ask for that."""
    first: dict[str, nn.Module] = {"norm": norm(options, features, device, dtype)}
    if options.return_layernorm_output:
        first["normalized"] = MakeExtraOutput()
    return first


def linear_keywords(options: Any, device: Device, dtype: Dtype) -> dict[str, Any]:
    """Keywords of linear operations, from the fields ``bias`` and ``fuse_wgrad_accumulation``."""
    return {
        "bias": options.bias,
        "device": device,
        "dtype": dtype,
        "accumulate_into_main_grad": options.fuse_wgrad_accumulation,
    }


def split_of(module: Any) -> Split | None:
    """Names and rows of the parameters that make up the weight of a module there; None: one."""
    names = module.weight_names
    if names == ["weight"]:
        return None
    return tuple(
        (n.removesuffix("_weight"), k) for n, k in zip(names, module.parameter_split_sizes)
    )


def split_names(linear: str, split: Split | None) -> dict[str, str]:
    """The names of the parameters of a linear at the path ``linear``, and theirs."""
    names: dict[str, str] = {}
    for kind in ("weight", "bias"):
        if split is None:
            names[f"{linear}.{kind}"] = kind
            continue
        for name, _ in split:
            names[f"{linear}.{name}.{kind}"] = f"{name}_{kind}"
    return names


def projection(
    in_features: int, out_features: int, split: Split | None, **how: Any
) -> Linear | MergedLinear:
    """A linear transformation, of one parameter or of several."""
    if split is None:
        return Linear(in_features, out_features, **how)
    return MergedLinear(in_features, dict(split), **how)


@dataclass(frozen=True, kw_only=True)
class LinearOptions(Options):
    """Options of ``te.Linear``: the sequence ``linear``, :math:`y = x W^T + b`.

    With ``parameters_split``, a tuple of names (without a trailing ``_``, which te's parameter
    names lack too) and rows, it is a :class:`opfuser.MergedLinear`.
    """

    te_name: ClassVar[str] = "Linear"

    in_features: int
    out_features: int
    bias: bool = True
    fuse_wgrad_accumulation: bool = False
    parameters_split: Split | None = None

    def parts(self, device: Device, dtype: Dtype) -> dict[str, nn.Module]:
        linear = projection(
            self.in_features,
            self.out_features,
            self.parameters_split,
            **linear_keywords(self, device, dtype),
        )
        return {"linear": linear}

    def names(self) -> Mapping[str, str]:
        return {**self.renamed, **split_names("linear", self.parameters_split)}

    @classmethod
    def _read(cls, module: Any) -> dict[str, Any]:
        refuse_others(module)
        refuse_delay(module)
        own = values_of(module, "in_features", "out_features", "bias", "fuse_wgrad_accumulation")
        return {**own, "parameters_split": split_of(module)}

    @classmethod
    def read(cls, module: nn.Module) -> LinearOptions:
        return cls(**cls._read(module))

    def te_arguments(self) -> dict[str, Any]:
        split = self.parameters_split
        return {**vars(self), "parameters_split": None if split is None else dict(split)}


@dataclass(frozen=True, kw_only=True)
class LayerNormLinearOptions(LinearOptions):
    """Options of ``te.LayerNormLinear``: the sequence ``norm``, ``linear``.

    With ``return_layernorm_output``, the output of the norm is an extra output after y.
    """

    te_name: ClassVar[str] = "LayerNormLinear"
    renamed: ClassVar[Mapping[str, str]] = _NORM_NAMES

    eps: float = 1e-5
    normalization: str = "LayerNorm"
    zero_centered_gamma: bool = False
    return_layernorm_output: bool = False

    def parts(self, device: Device, dtype: Dtype) -> dict[str, nn.Module]:
        first = _norms(self, self.in_features, device, dtype)
        return {**first, **super().parts(device, dtype)}

    @classmethod
    def _read(cls, module: Any) -> dict[str, Any]:
        return {**super()._read(module), **values_of(module, *_OF_NORM)}


@dataclass(frozen=True, kw_only=True)
class LayerNormMLPOptions(Options):
    """Options of ``te.LayerNormMLP``: the sequence ``norm``, ``fc1``, ``activation``, ``fc2``.

    With ``return_layernorm_output``, the output of the norm is an extra output after y. With
    ``checkpoint``, a fused block saves only its input, as with ``recompute_mlp`` of the activation.
    """

    te_name: ClassVar[str] = "LayerNormMLP"
    renamed: ClassVar[Mapping[str, str]] = {
        **_NORM_NAMES,
        "fc1.weight": "fc1_weight",
        "fc1.bias": "fc1_bias",
        "fc2.weight": "fc2_weight",
        "fc2.bias": "fc2_bias",
    }

    hidden_size: int
    ffn_hidden_size: int
    eps: float = 1e-5
    bias: bool = True
    normalization: str = "LayerNorm"
    activation: str = "gelu"
    activation_params: Mapping[str, float] | None = None
    fuse_wgrad_accumulation: bool = False
    return_layernorm_output: bool = False
    zero_centered_gamma: bool = False
    checkpoint: bool = False

    def parts(self, device: Device, dtype: Dtype) -> dict[str, nn.Module]:
        activation = self._activation()
        gated = 2 if isinstance(activation, GATED_ACTIVATIONS) else 1
        how = linear_keywords(self, device, dtype)
        return {
            **_norms(self, self.hidden_size, device, dtype),
            "fc1": Linear(self.hidden_size, gated * self.ffn_hidden_size, **how),
            "activation": activation,
            "fc2": Linear(self.ffn_hidden_size, self.hidden_size, **how),
        }

    def _activation(self) -> Any:
        row = _named(self, "activation", _ACTIVATIONS)
        params = dict(self.activation_params or {})
        if set(params) - {"limit", "alpha", "glu_linear_offset"} or (
            params and row.operation is not ClampedSwiGLU
        ):
            refuse_option(type(self).__name__, "activation_params", params)
        activation: Any = row.operation(*row.arguments, **params)
        if self.checkpoint:
            activation.recompute_mlp = True
        return activation

    @classmethod
    def read(cls, module: nn.Module) -> LayerNormMLPOptions:
        refuse_others(module)
        return cls.read_inside(module)

    @classmethod
    def read_inside(cls, module: Any) -> LayerNormMLPOptions:
        """The options of a module inside another one, which may add the bias of ``fc2`` itself."""
        refuse_delay(module)
        return cls(
            hidden_size=module.fc1_weight.shape[1],
            ffn_hidden_size=module.fc2_weight.shape[1],
            activation_params=getattr(module, "activation_params", None),
            checkpoint=getattr(module, "checkpoint", False),
            **values_of(module, "bias", "activation", "fuse_wgrad_accumulation", *_OF_NORM),
        )


@dataclass(frozen=True, kw_only=True)
class GroupedLinearOptions(Options):
    """Options of ``te.GroupedLinear``: the sequence ``linear``, called with x and the split sizes.

    The extra input is the split sizes (te's ``m_splits``), a tensor of integers.
    """

    te_name: ClassVar[str] = "GroupedLinear"

    num_gemms: int
    in_features: int
    out_features: int
    bias: bool = True
    fuse_wgrad_accumulation: bool = False
    delay_wgrad_compute: bool = False

    def parts(self, device: Device, dtype: Dtype) -> dict[str, nn.Module]:
        linear = GroupedLinear(
            self.num_gemms,
            self.in_features,
            self.out_features,
            delay_wgrad_compute=self.delay_wgrad_compute,
            **linear_keywords(self, device, dtype),
        )
        return {"linear": linear}

    def names(self) -> Mapping[str, str]:
        names = [f"{kind}{n}" for n in range(self.num_gemms) for kind in ("weight", "bias")]
        return {f"linear.{name}": name for name in names}

    @classmethod
    def read(cls, module: Any) -> GroupedLinearOptions:
        refuse_others(module)
        own = "num_gemms in_features out_features bias fuse_wgrad_accumulation".split()
        delays = module.wgrad_store.delay_wgrad_compute()
        return cls(**values_of(module, *own), delay_wgrad_compute=delays)
