"""Exchange of the main tensor with an extra one: the other branch goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..core.context import BackwardResult, Contexts, Extras, ForwardArguments, ForwardResult
from ..op import BasicOperation, Dtypes


class SwapExtra(BasicOperation):
    """Returns its extra input as output, and its input as extra output. Nothing is copied.

    With channels, a sequence goes on with another branch: ``MakeExtraOutput`` publishes a tensor,
    operations compute one branch from it, and ``SwapExtra`` sets the result aside and goes on with
    the published tensor. Shapes and dtypes are any; gradients are exchanged likewise.

    Raises:
        OpKwargsError: in forward, if it is given keywords.
    """

    num_extra_inputs: int = 1
    num_extra_outputs: int = 1
    takes_keywords = False

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return dtypes.extra_inputs[0]

    def fuser_forward(
        self, basic_op_ctxs: Contexts, input_: Tensor, **given: Unpack[ForwardArguments]
    ) -> ForwardResult:
        (extra,) = given["basic_op_extra_inputs"][0]
        assert extra is not None
        return extra, [(input_,)]

    def fuser_backward(
        self, basic_op_ctxs: Contexts, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> BackwardResult:
        (grad_extra,) = basic_op_grad_extra_outputs[0] or (None,)
        needs = basic_op_ctxs[0].needs
        dx = grad_extra if needs.input else None
        return dx, [()], [(grad_output if needs.extra_inputs[0] else None,)]

    def reference(
        self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return extra_inputs[0].clone(), input_.clone()
