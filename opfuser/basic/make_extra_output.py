"""A copy-free tap: the input is also an extra output."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..core.buffer_reuse import only_reference
from ..core.context import BackwardResult, Contexts, Extras, ForwardArguments, ForwardResult
from ..op import BasicOperation


class MakeExtraOutput(BasicOperation):
    """Returns its input twice, as output and as extra output: the start of a residual branch.

    Any shape and dtype, which both outputs have. ``dx = dy + dextra``; a gradient that does not
    arrive counts as zero.

    Args:
        in_place: add into the incoming gradient of the extra output, where nobody else holds that
            tensor or shares its memory. The result is the same either way.

    Raises:
        OpKwargsError: a call passed keywords to this operation.
    """

    num_extra_outputs: int = 1
    takes_keywords = False

    class Settings(NamedTuple):
        in_place: bool

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def make_settings(self) -> MakeExtraOutput.Settings:
        return self.Settings(self.in_place)

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        return input_, [(input_,)]

    def fuser_backward(
        self,
        basic_op_ctxs: Contexts,
        grad_output: Tensor | None,
        *,
        basic_op_grad_extra_outputs: Extras,
    ) -> BackwardResult:
        (in_place,) = self.frozen_settings(basic_op_ctxs[0])
        ours = in_place and only_reference(basic_op_grad_extra_outputs[0])
        grad_extra = basic_op_grad_extra_outputs[0][0]
        if grad_output is None or grad_extra is None:
            return grad_extra if grad_output is None else grad_output, [()], [()]
        if ours and grad_extra.dtype == torch.promote_types(grad_extra.dtype, grad_output.dtype):
            return grad_extra.add_(grad_output), [()], [()]
        return grad_output + grad_extra, [()], [()]

    def reference(
        self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return input_.clone(), input_.clone()
