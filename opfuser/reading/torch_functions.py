"""Names of functions of torch, as ``__torch_function__`` is told of them, and what they ask or do."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

__all__ = ["DRAWS", "OF_DEVICE", "OF_GRAPH", "OF_STRIDES", "QUESTIONS", "name_of"]

OF_DEVICE = frozenset("device get_device is_cpu is_cuda is_meta is_mps is_xpu".split())
OF_STRIDES = frozenset("is_contiguous storage_offset stride".split())
OF_GRAPH = frozenset("grad_fn is_leaf requires_grad".split())
# What may be asked of a tensor whose answer is no tensor and does not depend on its entries.
QUESTIONS = OF_DEVICE | OF_STRIDES | OF_GRAPH
QUESTIONS |= frozenset(
    """__len__ dim dtype element_size is_complex is_floating_point is_nested is_quantized is_sparse
    itemsize layout ndim ndimension nelement numel shape size""".split()
)
DRAWS = frozenset(
    """bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal normal_
    poisson rand rand_like randint randint_like randn randn_like random_ randperm uniform_""".split()
)
_OF_TORCH = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)


def name_of(function: Callable[..., Any]) -> str:
    """A function's name; of a property, the property's.

    Functions that are not of torch's own namespaces, such as operators that an extension has
    registered, have a name with ``::``, which none of torch's has.
    """
    name = getattr(function, "__name__", str(function))
    if isinstance(function, types.MethodWrapperType) and name in ("__get__", "__set__"):
        attribute = getattr(function.__self__, "__name__", "?")
        return str(attribute) if name == "__get__" else f"{attribute}.__set__"
    if isinstance(function, _OF_TORCH):
        return name
    module = getattr(function, "__module__", None) or ""
    if isinstance(function, types.FunctionType) and module.partition(".")[0] == "torch":
        return name
    return f"{module}::{name}"
