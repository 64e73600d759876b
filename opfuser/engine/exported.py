"""The forward pass as torch.export records it: nothing in place, for torch to differentiate.

An exported program holds ATen operations of the forward pass alone, and torch differentiates them
when the program runs. So nothing may be detached, as an autograd.Function does, and no result may
be overwritten, as plain torch does here to save memory: its gradient may have to be computed of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..torch_internals import FunctionalTensorMode, dispatch_functionalize
from .passes import Kwargs, traced_forward
from .program import Program


def execute_exported(
    program: Program, input_: Tensor, extra_inputs: Sequence[Tensor], kwargs: Kwargs
) -> Any:
    """The output of a program, or a tuple of it and the extra outputs, while torch.export traces.

    What operations write in place becomes operations that return their results.

    Args:
        program: one that needs no backward.
        input_: of the sequence.
        extra_inputs: of the sequence.
        kwargs: of its operations.
    """

    def forward(x: Tensor, *extras: Tensor, kwargs: Kwargs) -> Any:
        output, outputs = traced_forward(program, kwargs, x, extras, None)
        return (output, *outputs) if outputs else output

    # Views are recorded for the strides that are traced; those of later inputs may be others.
    inputs = [t.clone(memory_format=torch.contiguous_format) for t in (input_, *extra_inputs)]
    mode = FunctionalTensorMode(pre_dispatch=True, export=True)
    return dispatch_functionalize(forward, mode)(*inputs, kwargs=kwargs)
