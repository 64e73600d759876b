"""Modules for what is no operation of opfuser."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..context import BackwardResult, Contexts, ExtraTensors, ForwardArguments, ForwardResult
from ..op import BasicOperation, Dtypes

__all__ = ["ColumnScale", "Multiply", "Reorder", "Transpose"]


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
        """Of the table of blocks whose columns stand one behind another in the output."""

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
    """The product with an extra input of the same shape; both are saved."""

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
        dx, dextra = grad_output * extra, grad_output * x
        return dx.to(x.dtype), [()], [(dextra.to(extra.dtype),)]

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return input_ * extra_inputs[0]


class Transpose(nn.Module):
    """The first two dimensions exchanged."""

    def forward(self, x: Tensor) -> Tensor:
        """The input, in another order."""
        return x.transpose(0, 1).contiguous()
