"""What steps of blocks launch on a GPU besides GEMMs, as tensors without values tell."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opfuser import autocast
from opfuser.kernels.launch import recorded
from opfuser.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from tests.quantization.test_edges import BLOCKS

# Of a norm, an activation and two linear operations; each weight is quantized in both passes.
GIVEN = {
    "norm_quantized:forward": 1,
    "gated_quantized:forward": 1,
    "gated_quantized:backward": 1,
    "norm_quantized:columns": 1,
    "norm:norm_backward": 1,
    "quantize:by_tensor": 5,
}
# What is quantized is read once more: but not the norm by columns, nor a weight in backward.
MEASURED = {
    "norm_quantized:forward": 1,
    "gated_quantized:forward": 1,
    "gated_quantized:backward": 1,
    "quantize:amax": 3,
}
# For the gradients of the norm's parameters, and of biases.
SUMS = {"gated": {"column_sums:column_sums": 1}, "plain": {"column_sums:column_sums": 3}}


class Fills(TorchDispatchMode):
    """Collects what fills memory or computes in single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        launches = not func.is_view and "empty" not in func.__name__
        ours = isinstance(result, torch.Tensor) and result.is_meta  # the CPU may have others
        if launches and ours and result.numel() == 1:
            self.names.append(func.__name__)
        return result


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize(
    ("recipe", "measured"),
    [(DelayedScaling(), {}), (Float8CurrentScaling(), MEASURED)],
    ids=["delayed", "current"],
)
def test_no_launch_is_for_a_single_number(
    recipe: Recipe, measured: dict[str, int], name: str
) -> None:
    block = BLOCKS[name]().to("meta", torch.bfloat16)
    x = torch.empty(256, 128, device="meta", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):  # the first one of delayed scaling looks at the values
        with recorded(only_meta=True) as noted, Fills() as fills:
            with autocast(recipe=recipe):
                y = block(x)
            y.backward(torch.empty_like(y))
    assert not fills.names
    launched = Counter(one.launch.name for one in noted)
    launched.pop("scales:update", None)  # of all operations that are alive
    assert launched == Counter(GIVEN) + Counter(measured) + Counter(SUMS[name])
