"""Without torch.distributed, collectives are identities."""

from __future__ import annotations

import pytest
import torch

from opfuser import (
    AllGather,
    AllReduce,
    BasicOperation,
    Combine,
    Dispatch,
    ReduceScatter,
    Sequential,
)
from opfuser.errors import ArgumentError, InputError, NotSupportedError, OpKwargsError
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


def test_rows_stay_where_they_are() -> None:
    """Beside the values, which the tests of all operations compare."""
    rows, sizes, weights = torch.randn(3, 2), torch.tensor([1, 2]), torch.rand(3)
    y, row_map, rank_sizes, own_sizes, own_weights = Dispatch(2)(rows, sizes, weights)
    assert y.data_ptr() == rows.data_ptr()
    assert (row_map.tolist(), rank_sizes.tolist()) == ([0, 1, 2], [[3], [3]])
    assert (own_sizes.tolist(), own_weights.tolist()) == ([1, 2], weights.tolist())
    assert torch.equal(Combine()(y, row_map, rank_sizes), rows)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ([torch.ones(2, 3, 4), torch.ones(2).long()], r"\(R, D\).*input \(2, 3, 4\)"),
        ([torch.ones(3, 4), torch.ones(3).long()], r"\(2,\) integers.*split sizes \(3,\)"),
        ([torch.ones(3, 4), torch.ones(2)], r"\(2,\) integers.*torch.float32"),
        ([torch.ones(3, 4), torch.tensor([1, 2]), torch.ones(2)], r"each row.*weights \(2,\)"),
    ],
)
def test_what_dispatch_cannot_take(inputs: list[torch.Tensor], text: str) -> None:
    with pytest.raises(InputError, match=text):
        Dispatch(2, weighted=len(inputs) > 2)(*inputs)


def test_what_combine_cannot_take() -> None:
    rows, row_map, sizes = torch.ones(3, 4), torch.arange(3), torch.full((2, 1), 3)
    for wrong in (
        (rows[0], row_map, sizes),
        (rows, row_map[:2], sizes),
        (rows, row_map, sizes.expand(2, 2)),
        (rows, row_map.int(), sizes),
    ):
        with pytest.raises(InputError, match=r"two tensors that Dispatch returns.* Received"):
            Combine()(*wrong)


def test_experts_and_keywords_of_dispatch() -> None:
    with pytest.raises(ArgumentError, match=r"positive multiple of the ranks.*num_experts=0"):
        Dispatch(0)
    for op, inputs in (
        (Dispatch(1, weighted=False), [torch.ones(3, 4), torch.tensor([3])]),
        (Combine(), [torch.ones(3, 4), torch.arange(3), torch.full((2, 1), 3)]),
    ):
        with pytest.raises(OpKwargsError, match="takes no keywords"):
            Sequential(op)(*inputs, op_kwargs={op: {"rows": 1}})
