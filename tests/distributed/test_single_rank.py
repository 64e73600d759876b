"""Without torch.distributed, collectives are identities."""

from __future__ import annotations

import pytest
import torch

from opfuser import AllGather, AllReduce, BasicOperation, ReduceScatter, Sequential
from opfuser.errors import NotSupportedError
from opfuser.testing import check_op


@pytest.mark.parametrize("op", [AllReduce(), AllGather(), ReduceScatter()], ids=repr)
def test_identity_without_ranks(op: BasicOperation) -> None:
    x = torch.randn(3, 2, requires_grad=True)
    before = x.detach().clone()
    y = Sequential(op)(x)
    torch.testing.assert_close(y, x, rtol=0, atol=0)
    dy = torch.randn(3, 2)
    y.backward(dy)
    torch.testing.assert_close(x.grad, dy, rtol=0, atol=0)
    torch.testing.assert_close(op.reference(x), x, rtol=0, atol=0)
    torch.testing.assert_close(x.detach(), before, rtol=0, atol=0)


@pytest.mark.parametrize("op", [AllReduce(), AllGather(), ReduceScatter()], ids=repr)
def test_check_op(op: BasicOperation) -> None:
    check_op(op, torch.randn(3, 2), zero_rows=True)


@pytest.mark.parametrize("op", [AllReduce(), AllGather(), ReduceScatter()], ids=repr)
def test_the_group_is_fixed(op: BasicOperation) -> None:
    with pytest.raises(AttributeError, match="process_group"):
        op.process_group = None


def test_all_reduce_has_no_other_backward() -> None:
    AllReduce(None, True)
    with pytest.raises(NotSupportedError, match=r"reduce_in_backward must be True.*False"):
        AllReduce(reduce_in_backward=False)
