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

    Shapes: x, extra and y alike, any. The output has the dtype to which torch promotes the two.
    Both gradients are that of the output.

    Args:
        in_place: write the sum over an extra input that the caller passes, and return that tensor.
            Done where nothing is recorded for backward, no other tensor of the call shares its
            memory, and it has the dtype of the sum; else, and for a channel, the sum is a tensor of
            its own, as it always is by default.

    Raises:
        InputError: in forward, if the two shapes differ. Nothing is broadcast.
        OpKwargsError: in forward, if it is given keywords.
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
        if basic_op_ctxs[0].may_overwrite and self._fits(input_, extra):
            return extra.add_(input_), [()]
        return self.reference(input_, extra), [()]

    def _fits(self, input_: Tensor, extra: Tensor) -> bool:
        """Whether the sum has the shape and dtype of the extra input."""
        dtype = torch.promote_types(input_.dtype, extra.dtype)
        return extra.dtype == dtype and extra.shape == input_.shape

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
