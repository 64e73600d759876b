"""Compiled for inputs of any size, with other tensors of one: Dynamo sees variables and numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from opfuser import DotProductAttention, PositionEmbedding, RotaryEmbedding, Sequential
from opfuser.op import BasicOperation

ROWS, LENGTH = 4, 10
NUMBERS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
TABLES = torch.randn(2, LENGTH, 2)
KEYWORDS: dict[str, tuple[BasicOperation, dict[str, Tensor]]] = {
    "tables": (RotaryEmbedding(2, 4), {"tables": TABLES}),
    "tables of all": (RotaryEmbedding(2, 4), {"tables": TABLES.repeat(1, ROWS, 1)}),
    "rotary": (RotaryEmbedding(2, 4), {"positions": NUMBERS}),
    "rotary, alike": (RotaryEmbedding(2, 4), {"positions": NUMBERS[:1]}),
    "mask": (DotProductAttention(2), {"mask": NUMBERS % 3 > 0}),
    "mask, alike": (DotProductAttention(2), {"mask": NUMBERS[:1] % 3 > 0}),
    "mask of queries": (
        DotProductAttention(2),
        {"mask": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()},
    ),
    "learned": (PositionEmbedding(50, 24), {"positions": NUMBERS}),
    "learned, alike": (PositionEmbedding(50, 24), {"positions": NUMBERS[0]}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", KEYWORDS)
def test_keywords(case: str) -> None:
    torch.compiler.reset()
    op, keywords = KEYWORDS[case]
    model = Sequential(op)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for rows, length in ((3, 7), (2, 5), (ROWS, LENGTH)):
        x = torch.randn(rows, length, 24)
        torch.testing.assert_close(compiled(x), model(x))
    kwargs: Any = {0: keywords}
    torch.testing.assert_close(compiled(x, op_kwargs=kwargs), model(x, op_kwargs=kwargs))
