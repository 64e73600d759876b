"""What of opfuser computes the same as an operation that was found in a graph."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from ... import basic
from ...counterparts import ACTIVATIONS
from ...linear import Linear
from ...merged_linear import MergedLinear
from ..target import moved
from .finding import Found
from .tracing import facts_of

GATED = {name: row.operation for name, row in ACTIVATIONS.items() if row.gate is not None}
_PLAIN: dict[str, Callable[[], nn.Module]] = {
    "add": basic.AddExtraInput,
    **{name: row.make for name, row in ACTIVATIONS.items() if not row.gated},
    **GATED,
}


def operation(f: Found) -> nn.Module | None:
    """The operation that computes the same, without values; None if there is none.

    Its parameters require grad if those of the model do.
    """
    if "module" in f.values:
        # A copy: being in a Sequential leaves traces in an operation.
        return copy.deepcopy(moved(f.values["module"], torch.device("meta"), None))
    made = _operation(f)
    of_model = [facts_of(f.values.get(name)) for name in ("weight", "bias")]
    known = [facts.requires_grad for facts in of_model if facts is not None]
    if made is not None and known and not any(known):
        made.requires_grad_(False)
    return made


def _operation(f: Found) -> nn.Module | None:
    source, result, values = facts_of(f.inputs[0]), facts_of(f.output), f.values
    if source is None or result is None or not result.dtype.is_floating_point:
        return None
    size, how = source.shape[-1:], {"device": "meta", "dtype": result.dtype}
    if f.kind in _PLAIN:
        return _PLAIN[f.kind]()
    if f.kind == "linear":
        bias = values.get("bias") is not None
        return Linear(size[0], result.shape[-1], bias=bias, **how)  # type: ignore[arg-type]
    if f.kind == "bias":
        return basic.Bias(size[0], **how) if source.shape == result.shape else None  # type: ignore[arg-type]
    if f.kind == "merged_linear":
        parts: list[Found] = values["parts"]
        widths = {str(n): _width(part) for n, part in enumerate(parts)}
        biased = [str(n) for n, part in enumerate(parts) if part.values.get("bias") is not None]
        return MergedLinear(size[0], widths, bias=biased, **how)  # type: ignore[arg-type]
    if f.kind == "dropout":
        return basic.Dropout(values["p"])
    if f.kind == "cross_entropy":
        return basic.CrossEntropy(reduction=values["reduction"])
    weight = facts_of(values.get("weight"))
    if weight is None or weight.shape != size or f.kind not in ("layer_norm", "rms_norm"):
        return None
    eps = values["eps"]
    if f.kind == "rms_norm":
        centered = bool(values.get("zero_centered_gamma"))
        return basic.RMSNorm(size, eps=eps, zero_centered_gamma=centered, **how)  # type: ignore[arg-type]
    if values.get("bias") is None:
        return None
    return basic.LayerNorm(size, eps=eps, **how)  # type: ignore[arg-type]


def _width(f: Found) -> int:
    facts = facts_of(f.output)
    assert facts is not None
    return facts.shape[-1]
