"""Every operation and fusion of the library goes through the public helpers, by enumeration.

A new one without an example fails here. In other dtypes, layouts and forms, the files of the
operations and fusions do so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import BasicLinear, Bias, GroupedLinear, Sequential, basic, can_fuse, require_fusions
from opfuser.errors import MissingFusionError
from opfuser.recipe import Float8CurrentScaling
from opfuser.testing import assert_fused, assert_not_fused, check_op
from tests.basic.test_all import made
from tests.fused.examples import EXAMPLES, OF_CHAINS, extras, filled, only
from tests.fused.test_grouped_mlp import on_channels, tokens

# A mean over no rows is nan; sizes of groups and maps of rows are those of all rows.
NEEDS_ROWS = {
    "CrossEntropy", "DropTokens", "GroupedLinear", "Reshape", "RestoreTokens", "Unpermute",
}  # fmt: skip

BUILT_IN = [info for info in opfuser.fusions() if info.origin == "opfuser"]

Example = tuple[Callable[[], list[nn.Module]], Callable[[], list[Tensor]]]

MORE: dict[str, Example] = {
    "grouped_mlp": (on_channels, lambda: tokens(7)),
    "quantized_linear": (
        lambda: [BasicLinear(32, 48), Bias(48)],
        lambda: [torch.randn(64, 32)],
    ),
    "quantized_grouped_linear": (
        lambda: [GroupedLinear(2, 32, 48)],
        lambda: [torch.randn(64, 32), torch.tensor([32, 32])],
    ),
}
"""Besides the examples of the tests of fusions, which check_fusion takes there."""


def example(name: str, device: str = "meta") -> tuple[list[nn.Module], list[Tensor]]:
    """Operations and inputs; the meta device plans like a GPU."""
    if name in MORE:
        ops, inputs = MORE[name][0](), MORE[name][1]()
    else:
        ops, inputs = EXAMPLES[name][0](), [torch.randn(3, 5, 6), *extras(name, 3, 5)]
    inputs = [t.to(device).requires_grad_(t.is_floating_point()) for t in inputs]
    return [op.to(device) for op in filled(ops)], inputs


@contextmanager
def in_region(name: str) -> Iterator[None]:
    """Inside, this fusion alone is on, and a recipe is active if it is one of quantized compute."""
    info = next(info for info in BUILT_IN if info.name == name)
    with ExitStack() as stack:
        stack.enter_context(only(name))
        if info.requires.recipe:
            recipe = Float8CurrentScaling(min_features=0)
            stack.enter_context(opfuser.autocast(recipe=recipe))
        yield


@pytest.mark.parametrize("name", basic.__all__)
def test_every_operation_passes_check_op(name: str, device: torch.device) -> None:
    op, inputs = made(name, device)
    check_op(op, *inputs, zero_rows=name not in NEEDS_ROWS)


@pytest.mark.parametrize("info", BUILT_IN, ids=lambda info: info.name)
def test_every_fusion_is_answered_for_and_asserted(info: Any) -> None:
    """And with it off, the answer says so."""
    name = info.name
    ops, inputs = example(name)
    with in_region(name):
        assert str(can_fuse(ops, name, *inputs)) == "fused"
        seq = Sequential(*ops)
        assert_fused(seq, *inputs, **{info.stage: {name: 1}})
        with opfuser.disable(name):
            assert can_fuse(seq, name, *inputs).code == "DISABLED"
            assert_not_fused(seq, name, *inputs, code="DISABLED")


@pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")
@pytest.mark.parametrize("info", BUILT_IN, ids=lambda info: info.name)
def test_every_fusion_can_be_required(info: Any) -> None:
    ops, inputs = example(info.name, "meta" if info.name in OF_CHAINS else "cpu")
    seq = Sequential(*ops)
    with in_region(info.name):
        seq(*inputs)
        require_fusions(seq, **{info.stage: {info.name: 1}})
        with pytest.raises(MissingFusionError, match="at least 2, found 1"):
            require_fusions(seq, **{info.stage: {info.name: 2}})
