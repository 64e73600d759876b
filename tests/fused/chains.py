"""What the tests of fusions of element-wise operations share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from opfuser import Sequential
from opfuser.engine.plan import Plan
from tests.contract.tensors import against

LAID_OUT = [
    ("contiguous", torch.float64),
    ("strided", torch.float32),
    ("transposed", torch.bfloat16),
    ("expanded", torch.float32),
    ("contiguous", torch.bfloat16),
]
"""Memory layouts, and dtypes that go with them."""


def plan_on(
    device: str, *ops: nn.Module, dtype: torch.dtype = torch.float32, grad: bool = True
) -> Plan:
    """A plan needs no data: one for tensors of meta tells what becomes of those of a GPU."""
    seq = Sequential(*ops).to(device, dtype)
    x = torch.empty(2, 3, 6, device=device, dtype=dtype, requires_grad=grad)
    return seq.plan(x, *[x] * seq.num_extra_inputs)


def tensor(shape: Sequence[int], dtype: torch.dtype, lies: str = "contiguous") -> Tensor:
    """Random values of that shape, in that memory layout."""
    shape = tuple(shape)
    if lies == "strided":
        wide = torch.randn([2 * n for n in shape]).to(dtype)
        return wide[tuple(slice(None, None, 2) for _ in shape)]
    if lies == "transposed":
        return torch.randn(shape[::-1]).to(dtype).permute(*range(len(shape))[::-1])
    if lies == "expanded":
        return torch.randn(1, *shape[1:]).to(dtype).expand(shape)
    return torch.randn(shape).to(dtype)


class References(nn.Module):
    """The references of operations, one after the other."""

    def __init__(self, ops: Sequence[nn.Module]) -> None:
        super().__init__()
        self.ops = nn.ModuleList(ops)

    def forward(self, x: Tensor, *extras: Tensor) -> Any:
        left, outputs = iter(extras), []
        for op in self.ops:
            y = op.reference(x, *(next(left) for _ in range(op.num_extra_inputs)))
            x, *more = y if isinstance(y, tuple) else (y,)
            outputs += more
        return (x, *outputs) if outputs else x


def check_by_hand(
    fused: Sequential, ops: Sequence[nn.Module], dtype: torch.dtype, lies: str
) -> tuple[Tensor, ...]:
    """Holds a fused operation placed by hand to the references of the operations."""
    fused.to(dtype)
    references = References(ops)
    named = dict(references.named_parameters())
    inputs = [tensor((8, 3, 6), dtype, lies) for _ in range(1 + fused.num_extra_inputs)]
    inputs = [t.detach().requires_grad_() for t in inputs]
    with torch.no_grad():
        outputs = references(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return against(
        fused,
        lambda p, *xs: functional_call(references, {name: p[name] for name in named}, xs),
        *inputs,
        parameters=named.items(),
        dys=[tensor(y.shape, dtype, lies) for y in outputs],
    )
