"""Functions of torch as ``__torch_function__`` is told of them: names, and what they ask or do."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .dataflow import Node, map_leaves

OF_DEVICE = frozenset("device get_device is_cpu is_cuda is_meta is_mps is_xpu".split())
OF_STRIDES = frozenset("is_contiguous storage_offset stride".split())
# What may be asked of a tensor whose answer is no tensor and does not depend on its entries.
QUESTIONS = OF_DEVICE | OF_STRIDES
QUESTIONS |= frozenset(
    """__len__ dim dtype element_size grad_fn is_complex is_floating_point is_leaf is_nested
    is_quantized is_sparse itemsize layout ndim ndimension nelement numel requires_grad shape
    size""".split()
)
DRAWS = frozenset(
    """bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal normal_
    poisson rand rand_like randint randint_like randn randn_like random_ randperm
    uniform_""".split()
)
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_OF_TORCH = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)


def keeps_gradients(op: str) -> bool:
    """Whether results of a function may require gradients where its arguments do."""
    return not (op in ("data", "detach") or op.endswith("_like") or op.startswith("new_"))


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


def opened(function: Any) -> Callable[..., Any]:
    """A function of torch that tells modes of what it calls, and not of itself."""
    space = {**function.__globals__, "has_torch_function": lambda operands: False}
    return types.FunctionType(function.__code__, space, None, function.__defaults__)


def chosen_by_entries(node: Node) -> bool:
    """Whether a function returns the places of entries, of which there are as many as there are."""
    return node.op in ("nonzero", "where") and len(node.args) == 1 and not node.kwargs


def computed(node: Node, args: Any, kwargs: Any) -> Any:
    """What the function of a node returns for stand-ins."""
    op, function = node.op, node.function
    if chosen_by_entries(node):  # the stand-ins are for those of all entries
        places = args[0].new_empty((args[0].dim(), args[0].numel()), dtype=torch.int64)
        return places.mT if op == "nonzero" else places.unbind()
    if op == "__getitem__":  # where a number in a tensor selects, any number does
        return function(args[0], map_leaves(_number, args[1]))
    if not op.endswith("grouped_mm"):
        return function(*args, **kwargs)
    # On meta it takes bf16 alone, where a CPU takes fp32 as well.
    dtype = args[0].dtype
    args, kwargs = map_leaves(_bf16, (args, kwargs))
    return function(*args, **kwargs).to(dtype)


def _number(leaf: Any) -> Any:
    selects = isinstance(leaf, Tensor) and not leaf.dim() and leaf.dtype in _INTEGERS
    return 0 if selects else leaf


def _bf16(leaf: Any) -> Any:
    floating = isinstance(leaf, Tensor) and leaf.dtype.is_floating_point
    return leaf.bfloat16() if floating else leaf


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for a device."""
    kind = device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def device_answer(op: str, device: torch.device) -> Any:
    """The answer to a question about the device of a tensor."""
    if op == "device":
        return device
    if op == "get_device":
        return -1 if device.index is None else device.index
    return op == f"is_{device.type}"


def with_devices(node: Node) -> tuple[Any, Any]:
    """The arguments of a node, in which a device that is named by a string is one."""
    args, kwargs = node.args, node.kwargs
    if node.op == "to":
        args = tuple(map(_device, args))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": _device(kwargs["device"])}
    return args, kwargs


def _device(leaf: Any) -> Any:
    return torch.device(leaf) if isinstance(leaf, str) else leaf


def described(error: Exception) -> str:
    """The type of an error and the beginning of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:80]}" if text else type(error).__name__
