"""Recorded calls where shapes are equal, and tensors are others or lie elsewhere."""

from __future__ import annotations

import pytest
import torch

import opfuser
from opfuser import GELU, Linear, RMSNorm, Sequential
from opfuser.engine.recorded.recordable import unrecorded
from tests.engine.recorded_toys import ENOUGH, D, assert_same, both, image, output, record, twin


def test_tables_of_other_angles() -> None:
    """As many tables of the same shapes may be kept, while others have taken their positions."""
    module = opfuser.RotaryEmbedding(2, 8)
    x = torch.randn(2, 5, 3 * D)
    bases = [2.0 + n for n in range(8)]  # as many as are kept
    for base in [*bases, *[bases[-1]] * ENOUGH, *[100.0 + n for n in range(7)], bases[-1]]:
        module.base = base
        ours = output(module, x)
        with unrecorded():
            assert_same(ours, output(opfuser.RotaryEmbedding(2, 8, base=base), x))


def test_weights_that_no_longer_lie_side_by_side() -> None:
    """Where they do, one product multiplies by all of them."""

    def make() -> opfuser.MergedLinear:
        return opfuser.MergedLinear(D, {"q": 8, "k": 3, "v": 5})

    module, x = make(), image()
    record(module, x)
    for p in module.parameters():
        p.data = torch.cat([p.data, p.data])[: len(p)]
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(2)
    with unrecorded():
        theirs = both(twin(make, module), x)
    torch.testing.assert_close(both(module, x), theirs)


def test_slices_of_one_tensor() -> None:
    module, rows = opfuser.DotProductAttention(2), torch.randn(6, 2, 3, 3 * D)
    for x in rows:
        ours = output(module, x)
        with unrecorded():
            assert_same(ours, output(opfuser.DotProductAttention(2), x))


def test_tensors_that_are_one() -> None:
    def make() -> Sequential:
        return Sequential(Linear(D, D), opfuser.AddExtraInput(), Linear(D, D))

    x, other = image(), image()
    for first, second in (((x, x), (x, other)), ((x, other), (x, x))):
        module = make()
        record(module, *first, call=lambda m, *inputs: m(*inputs).sum().backward())
        with unrecorded():
            theirs = twin(make, module)(*second)
        assert_same([module(*second)], [theirs])


@pytest.mark.gpu
def test_parameters_that_were_moved_behind_our_back() -> None:
    """A launch that was prepared would take an address of the host."""
    module = Sequential(RMSNorm(D), GELU()).cuda()
    x = image().cuda().detach().requires_grad_()
    record(module, x)
    kept = module[0].weight.data
    module[0].weight.data = kept.cpu()
    with pytest.raises((RuntimeError, ValueError)):
        module(x)
    module[0].weight.data = kept
    assert_same(
        both(module, x), both(twin(lambda: Sequential(RMSNorm(D), GELU()).cuda(), module), x)
    )
