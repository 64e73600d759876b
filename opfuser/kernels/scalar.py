"""What scalar functions have in common: their interface, dtypes, how launchers take them.

A function has two forms. That in plain torch is a subclass of :class:`ScalarFunction`, in
``functions`` or, if one operation alone applies it, beside that operation. That for kernels is the
Triton function in ``device.scalar`` under the same :attr:`ScalarFunction.name`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ..runtime.tracing import stands_in
from .cpu_blocks import at_once, block_size


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, ten times cheaper where nothing is to be done."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for statistics and sums: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def grad_input(op: Any, *args: Any, out: Tensor | None, **kwargs: Any) -> Tensor:
    """What an ATen operator ``…_backward`` returns, in ``out`` if that is given."""
    dx: Tensor
    if out is None:
        dx = op.default(*args, **kwargs)
    else:
        dx = op.grad_input(*args, **kwargs, grad_input=out)
    return dx


def reuse(tensor: Tensor) -> Tensor | None:
    """``tensor`` as an ``out`` argument; None, for new memory, while torch.compile traces.

    Dynamo breaks the graph at an ``out`` that is not contiguous, and needs no help to reuse memory.
    """
    return None if stands_in(tensor) else tensor


def rounded_once(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A method of several steps that computes fp16 and bf16 in fp32, and rounds its result alone.

    Large tensors on a CPU are converted and computed block by block.
    """

    @functools.wraps(method)
    def wide_method(self: ScalarFunction, *inputs: Tensor, out: Tensor | None = None) -> Tensor:
        x = inputs[-1]
        wide = wide_dtype(x.dtype)
        if x.dtype == wide:
            return method(self, *inputs, out=out)
        if at_once(x):
            y = method(self, *[cast(t, wide) for t in inputs])
            return cast(y, x.dtype) if out is None else out.copy_(y)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        blocks = zip(*[t.reshape(-1).split(block_size()) for t in (y, *inputs)])
        for y_part, *parts in blocks:
            y_part.copy_(method(self, *[cast(t, wide) for t in parts]))
        return y if out is None else out.copy_(y)

    return wide_method


class Backward(Protocol):
    """From dy to ``dy f'(x)`` of one x, which the last step writes to ``out``."""

    def __call__(self, dy: Tensor, *, out: Tensor | None = None) -> Tensor: ...


class FunctionSpec(NamedTuple):
    """A function as launchers and plain torch take it: the latter calls it, the others name it.

    Attributes:
        function: the function.
        name: of the device function.
        parameters: its constants.
    """

    function: ScalarFunction
    name: str
    parameters: tuple[float, ...]


class ScalarFunction:
    """A function f of one number, applied to each element.

    Results have the dtype of ``x`` and are rounded once. No input is written to, unless it is
    ``out``, where the last step of a backward writes.

    Class attributes:
        name: of the device function.
    """

    name: ClassVar[str]

    @property
    def parameters(self) -> tuple[float, ...]:
        """Its constants, in the order that constructor and device function share."""
        # Not by vars(): the tracer of torch 2.11 does not know it.
        names = getattr(type(self), "__dataclass_fields__", ())
        return tuple([float(getattr(self, name)) for name in names])

    @property
    def spec(self) -> FunctionSpec:
        """How launchers and plain torch take it. Worth keeping: it is built at every access."""
        return FunctionSpec(self, self.name, self.parameters)

    def value(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``f(x)``, in memory of its own unless ``out``, of the dtype of x, is given."""
        raise NotImplementedError

    def backward(self, dy: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``dy f'(x)``, in memory of its own unless ``out`` is given."""
        raise NotImplementedError

    def vjp(self, x: Tensor) -> tuple[Tensor, Backward]:
        """``f(x)`` of x in fp32 or fp64, and the function from dy to ``dy f'(x)``.

        Overridden where they have work in common. The function is called once, if at all, and
        before anything is written to ``f(x)``, or to x other than by itself.
        """
        return self.value(x), lambda dy, *, out=None: self.backward(dy, x, out=out)

    def reference(self, x: Tensor) -> Tensor:
        """``f(x)`` in plain differentiable torch."""
        raise NotImplementedError
