"""Element-wise operations whose mathematics a user gives."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError, MissingImplementationError
from ..kernels.pointwise import Chain, has_kernels
from ..kernels.pointwise_plain import FUNCTION, Link
from ..kernels.scalar import ScalarFunction, cast, wide_dtype
from ..op import BasicOperation, Dtypes, OperationContext, OperationGrads, in_compute_dtype
from ..runtime.tracing import stands_in
from ..torch_internals import constant_result
from ._numbers import real_number


class PointwiseOperation(BasicOperation):
    """Applies a function f of one number to each element: ``y = f(x)``, ``dx = dy f'(x)``.

    A subclass gives f in two forms. :meth:`value` is that in torch, and serves every device. The
    Triton function :attr:`device_function` is that for a GPU, and lets a run of operations become
    one kernel. Neither pass of the operation may be overridden in a class that shall fuse.

    Any shape; the output has the compute dtype (autocast's, else the input's). Both forms work in
    fp32, or in fp64 for fp64. Saved: the input.

    Where autograd finds no way from the value back to x, as in a constant, a comparison, or after
    ``x.detach()``, no gradient is guessed: to autograd a step, whose derivative is zero, looks like
    a function that was computed elsewhere. :meth:`derivative` then has to be given.

    Attributes may be set at any time. Backward runs the torch form on a shallow copy of the
    operation as it was when forward began; what that writes to ``self`` is lost.

    Args:
        *constants: numbers that f depends on. They are compiled into kernels.

    Class attributes:
        device_function: ``f(x, P)``, which returns the pair (value, derivative) for a tile x in
            fp32 and the tuple P of the constants. Either the Triton function itself, or its place
            as ``"module:name"``, so that Triton need not be there before the first kernel. Without
            one the torch form runs on a GPU too, and nothing is fused.

    Raises:
        ArgumentError: ``device_function`` is a string without a module or a name.
        ArgumentTypeError: a constant is no real Python number.
        MissingImplementationError: in forward, if the subclass has no :meth:`value`; in backward,
            if it has no :meth:`derivative` and autograd finds none.
        InputError: in forward, if x is not fp16, bf16, fp32 or fp64.
    """

    kernels = ("Triton pointwise",)

    class Saved(NamedTuple):
        input: Tensor

    class Settings(NamedTuple):
        form: _TorchForm
        constants: tuple[float, ...]
        link: Link | None

    device_function: ClassVar[Any] = None

    def __init__(self, *constants: float) -> None:
        super().__init__()
        device = type(self).device_function
        if isinstance(device, str) and not all(device.partition(":")):
            raise ArgumentError.explained(
                "The place of a device function is written as 'module:name'",
                where=type(self).__name__,
                received=repr(device),
            )
        self.constants: tuple[float, ...] = constants
        self.constants = self.make_settings().constants

    def make_settings(self) -> PointwiseOperation.Settings:
        where, remedy = type(self).__name__, "Compute anything else outside of the operation"
        constants = tuple(
            [
                float(real_number(constant, "A constant of a pointwise operation", where, remedy))
                for constant in self.constants
            ]
        )
        frozen = self
        if not torch.compiler.is_compiling():  # which traces both passes at once
            # What value() and derivative() read; parameters and buffers stay those of self.
            frozen = object.__new__(type(self))
            frozen.__dict__.update(self.__dict__)
        form, device = _TorchForm(frozen), type(self).device_function
        link = None if device is None else Link(FUNCTION, device, constants, form, linear=False)
        return self.Settings(form, constants, link)

    def value(self, x: Tensor) -> Tensor:
        """``f(x)`` in differentiable torch. May not write to x."""
        raise MissingImplementationError.explained(
            "A pointwise operation gives its function in torch",
            where=type(self).__name__,
            remedy="Implement value(x)",
        )

    def derivative(self, x: Tensor) -> Tensor:
        """``f'(x)`` in torch. By default autograd finds it, at the cost of another forward."""
        if not stands_in(x):
            return self._found_by_autograd(x)
        # What is traced holds no autograd.grad, and a vjp of no use of x is zero without a word.
        self._try_autograd(str(x.device), x.dtype)
        pulled: Any = torch.func.vjp(self.value, x)
        slope: Tensor = pulled[1](torch.ones_like(pulled[0]))[0]
        return slope

    def _found_by_autograd(self, x: Tensor) -> Tensor:
        slope = None
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = self.value(leaf)
        try:
            if y.requires_grad:
                (slope,) = torch.autograd.grad(y, leaf, torch.ones_like(y), allow_unused=True)
        except RuntimeError as error:
            if "is not implemented" not in str(error):
                raise
            raise _no_derivative(self) from error
        if slope is None:
            raise _no_derivative(self)
        return slope

    @constant_result
    def _try_autograd(self, device: str, dtype: torch.dtype) -> bool:
        self._found_by_autograd(torch.ones(1, device=device, dtype=dtype))
        return True

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return dtypes.compute

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        x = in_compute_dtype(input_, self)
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(x))
        _, constants, _ = self.frozen_settings(ctx)
        if not self._has_kernel(x):
            return _TorchForm(self).value(x)  # so that value() may keep something on self
        return _chain(type(self).device_function, constants).forward(x, (None,), (x.dtype,)).y

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        if not ctx.needs.input:
            return None, ()
        (x,) = ctx.saved_tensors
        form, constants, _ = self.frozen_settings(ctx)
        if not self._has_kernel(x):
            return form.backward(grad_output, x), ()
        chain = _chain(type(self).device_function, constants)
        return chain.backward(grad_output, x, (None,), (False, True), (x.dtype,)).dx, ()

    def _has_kernel(self, x: Tensor) -> bool:
        return type(self).device_function is not None and has_kernels(x)

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return self.value(input_)

    def extra_repr(self) -> str:
        return ", ".join(map(repr, self.constants))


def _no_derivative(op: PointwiseOperation) -> MissingImplementationError:
    return MissingImplementationError.explained(
        "A pointwise operation gives the derivative that autograd does not find",
        where=type(op).__name__,
        received="a value that autograd cannot follow back to x",
        remedy="Implement derivative(x), for a constant or a step by torch.zeros_like(x); or "
        "write value(x) in differentiable torch",
    )


@functools.lru_cache(None)
def _chain(device: Any, constants: tuple[float, ...]) -> Chain:
    """The kernels of one such operation."""
    return Chain([Link(FUNCTION, device, constants, None, linear=False)])


class _TorchForm(ScalarFunction):
    """The torch form of an operation; rounds fp16 and bf16 at the end only, as kernels do."""

    def __init__(self, op: PointwiseOperation) -> None:
        self.op = op

    def value(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return cast(self.op.value(cast(x, wide_dtype(x.dtype))), x.dtype)

    def backward(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        wide = wide_dtype(x.dtype)
        return cast(self.op.derivative(cast(x, wide)) * cast(dy, wide), x.dtype)

    def reference(self, x: Tensor) -> Tensor:
        return self.op.value(x)
