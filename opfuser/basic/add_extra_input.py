"""Sum of the main input and an extra input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..core.context import BackwardResult, Contexts, Extras, ForwardArguments, ForwardResult
from ..errors import InputError
from ..op import BasicOperation, Dtypes


class AddExtraInput(BasicOperation):
    """Adds one extra input of the same shape: ``y = x + extra``, as in a residual connection.

    Shapes: x, extra and y have the same shape, of any rank. The output has the dtype to which torch
    promotes the two. Both inputs have the gradient of the output.

    Args:
        in_place: accepted as in te.ops, where it permits writing the sum to the extra input. It has
            no effect: with or without it, only an extra input that nothing else refers to is
            overwritten, by a GEMM before the sum.

    Raises:
        InputError: in forward, if the two shapes differ. Nothing is broadcast.
        OpKwargsError: in forward, if keywords are passed.
    """

    num_extra_inputs: int = 1
    takes_keywords = False

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return torch.promote_types(dtypes.input, dtypes.extra_inputs[0])

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        extra = given["basic_op_extra_inputs"][0][0]
        assert extra is not None
        return self.reference(input_, extra), [()]

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        return grad_output, [()], [(grad_output,)]

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        (extra,) = extra_inputs
        if input_.shape != extra.shape:
            raise InputError.explained(
                "Input and extra input must have the same shape",
                where="AddExtraInput",
                received=f"input {tuple(input_.shape)}, extra input {tuple(extra.shape)}",
                remedy="Expand or reshape the extra input before the call",
            )
        return input_ + extra
