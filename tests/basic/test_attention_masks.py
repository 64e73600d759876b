"""Additive masks beside which the scores of a query are lost."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opfuser.attention.masks import hides_queries

FINITE = torch.finfo(torch.float32).min


def mask(*values: float) -> torch.Tensor:
    """Of as many queries, each of which sees two keys so."""
    return torch.tensor(values)[:, None].expand(-1, 2)[None, None].clone()


@pytest.mark.parametrize("lowest", [FINITE, -1e9, -1e4, -math.inf])
def test_a_query_that_sees_no_key(lowest: float) -> None:
    assert hides_queries(mask(0.0, lowest))
    one = mask(0.0, lowest)
    one[..., 0] = -3.0
    assert not hides_queries(one), "the second key is hidden alone"


def test_masks_that_hide_no_query() -> None:
    assert not hides_queries(mask(0.0, -20.0)), "a bias of positions"
    assert not hides_queries(torch.zeros(1, 1, 2, 2, dtype=torch.bool))
    assert not hides_queries(torch.zeros(0, 1, 2, 2))
    assert not hides_queries(torch.full((1, 1, 2, 2), FINITE, device="meta"))


class Reads(TorchDispatchMode):
    """Counts the numbers that the host reads."""

    count = 0

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The second is what inference mode shows of a read.
        self.count += f.overloadpacket.__name__ in ("_local_scalar_dense", "is_nonzero")
        return f(*args, **(kwargs or {}))


def test_a_mask_is_read_once_and_again_after_it_was_written_to() -> None:
    given = mask(0.0, 0.0)
    with Reads() as reads:
        assert [hides_queries(given) for _ in range(3)] == [False] * 3
        assert reads.count == 1
        given[0, 0, 1] = FINITE
        assert [hides_queries(given) for _ in range(3)] == [True] * 3
        assert reads.count == 2
        with torch.inference_mode():
            other = mask(0.0, FINITE)
            assert [hides_queries(other) for _ in range(2)] == [True] * 2
        assert reads.count == 4, "it has no version"


def test_many_masks_are_forgotten_and_none_is_kept_alive() -> None:
    first = mask(0.0, 0.0)
    hides_queries(first)
    others = [mask(0.0, 0.0) for _ in range(100)]
    assert not any(map(hides_queries, others))
    with Reads() as reads:
        hides_queries(first)
    assert reads.count == 1
    alive = [weakref.ref(other) for other in others]
    others.clear()
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_strictly_bool_masks_and_single_numbers_count() -> None:
    """What stands for a number beside others, and what is added to it; each is asked for apart."""
    seen = torch.ones(2, 1, 3, 3, dtype=torch.bool)
    assert not hides_queries(seen, strictly=True)
    seen[1, 0, 2] = False
    assert hides_queries(seen, strictly=True)
    assert not hides_queries(seen)
    one = mask(0.0, 0.0)
    one[..., 0, 0] = FINITE
    assert not hides_queries(one)
    assert hides_queries(one, strictly=True)
    assert not hides_queries(one)
    assert not hides_queries(torch.ones(1, 1, 2, 2, dtype=torch.int64), strictly=True)
