"""Modules for what is no operation of opfuser."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..context import BackwardResult, Contexts, ExtraTensors, ForwardArguments, ForwardResult
from ..errors import NotSupportedError, explain
from ..op import BasicOperation, Dtypes
from .dataflow import tensors_in

__all__ = ["Child", "ColumnScale", "Multiply", "Reorder", "Routed", "Transpose"]


class Reorder(nn.Module):
    """Blocks of the last dimension in another order."""

    def __init__(self, blocks: tuple[int, ...], size: int) -> None:
        super().__init__()
        self.size = size
        self.blocks = list(blocks)
        rows = blocks.index(1) if 1 in blocks else len(blocks)
        numbers = torch.arange(len(blocks))
        regular = len(blocks) % rows == 0 and numbers.view(rows, -1).T.flatten().tolist()
        self.rows = rows if regular == self.blocks else 0
        """The rows of a table of blocks whose columns follow one another in the output; or 0."""

    def forward(self, x: Tensor) -> Tensor:
        """The input, copied in order."""
        if self.rows:
            table: Tensor = x.unflatten(-1, (self.rows, -1, self.size))
            return table.transpose(-3, -2).flatten(-3)
        whole: Tensor = x.unflatten(-1, (-1, self.size))
        return whole[..., self.blocks, :].flatten(-2)


class ColumnScale(nn.Module):
    """The product with a parameter that has a number for each column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: nn.Parameter
        self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        """The input, scaled."""
        return x * self.weight.to(x.dtype)


class Multiply(BasicOperation):
    """The product with an extra input of the same shape or one column; both are saved."""

    num_extra_inputs: int = 1

    class Saved(NamedTuple):
        input: Tensor
        extra: Tensor

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return torch.promote_types(dtypes.input, dtypes.extra_inputs[0])

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        extra, ctx = given["basic_op_extra_inputs"][0][0], basic_op_ctxs[0]
        assert extra is not None
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(input_, extra))
        return input_ * extra, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: Contexts,
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: ExtraTensors,
    ) -> BackwardResult:
        x, extra = basic_op_ctxs[0].saved_tensors
        dx, dextra = grad_output * extra, (grad_output * x).sum_to_size(extra.shape)
        return dx.to(x.dtype), [()], [(dextra.to(extra.dtype),)]

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return input_ * extra_inputs[0]


class Transpose(nn.Module):
    """The first two dimensions exchanged."""

    def forward(self, x: Tensor) -> Tensor:
        """The input, in another order."""
        return x.transpose(0, 1).contiguous()


class Routed(nn.Module):
    """Experts, and the router that chooses them.

    Args:
        router: returns weights and experts of rows, among other tensors.
        experts: a sequence that takes rows, the experts of each, and their weights.
        weights, indices: their places among the tensors that the router returns.
        flat: whether the router takes a matrix of rows.
    """

    def __init__(
        self, router: nn.Module, experts: nn.Module, weights: int, indices: int, flat: bool
    ) -> None:
        super().__init__()
        self.router, self.experts = router, experts
        self.weights, self.indices, self.flat = weights, indices, flat

    def forward(self, x: Tensor) -> Tensor:
        """What the experts of each row compute, weighted and summed."""
        rows = x.reshape(-1, x.shape[-1])
        found = tensors_in(self.router(rows if self.flat else x))
        weights, indices = (found[n].reshape(len(rows), -1) for n in (self.weights, self.indices))
        y: Tensor = self.experts(rows, indices, weights)
        return y.view(x.shape)


class Child(nn.Module):
    """A child that is called as it is, and returns rows as its forward has in the trace.

    Args:
        child: which.
        features: the columns of its rows.
        number: the place of the rows among the tensors that it returns, which may have lost the
            shape of the input; None if they are all that it returns.

    Raises:
        NotSupportedError: hooks, or subclasses of tensors, make something else of that.
    """

    def __init__(self, child: nn.Module, features: int, number: int | None = None) -> None:
        super().__init__()
        self.child, self.features, self.number = child, features, number

    def forward(self, x: Tensor) -> Tensor:
        """What the child returns."""
        y, shape = self.child(x), (*x.shape[:-1], self.features)
        if self.number is not None:
            y = [*tensors_in(y), *[None] * self.number][self.number]
            y = y.reshape(shape) if y is not None and y.numel() == math.prod(shape) else y
        if type(y) is not Tensor or y.shape != shape:
            got = type(y).__name__ + (f" of {tuple(y.shape)}" if isinstance(y, Tensor) else "")
            raise NotSupportedError(
                explain(
                    "A child with hooks or tensors of its own returns what its forward would",
                    where=f"a {type(self.child).__name__}, in a model after opfuser.apply",
                    received=f"{got} for an input of {tuple(x.shape)}",
                    remedy="Apply after hooks are registered, or call opfuser.revert(model)",
                )
            )
        return y
