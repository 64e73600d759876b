"""Which calls ``flex_attention`` takes; its code is loaded for the first of them.

From torch 2.14 on, importing it brings in sympy, which takes longer than opfuser itself.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .call import Call, Heads, Kernel, Request, Result
from .sdpa import HALF, capability, first, has_little_shared_memory

_LARGEST = 256  # entries of a head for which torch has sizes of blocks, on every GPU
# Of 192 and 256 entries, torch 2.13 gives kernels for capability 8.9 that ask for 133 to 148 KiB of
# shared memory, and there are 99.
_LARGEST_OF_SMALL = 128


@cache
def _code() -> Any:
    return import_module("opfuser.attention.flex_compiled")


def _prepare(x: Heads, call: Call, differentiable: bool) -> str | None:
    if torch.compiler.is_dynamo_compiling():
        # Its variable for the operator takes no captured tensors.
        return "Dynamo does not trace it"
    reason: str | None = _code().prepare(x, call, differentiable)
    return reason


def _forward(x: Heads, call: Call) -> Result:
    result: Result = _code().forward(x, call)
    return result


def _backward(dy: Tensor, x: Heads, r: Result, call: Call) -> Any:
    return _code().backward(dy, x, r, call)


def _refusal(r: Request) -> str | None:
    reason = first(
        (r.device.type != "cuda", f"it runs on a GPU, not on {r.device.type}"),
        (r.empty, "there is no element"),
        # In fp32, torch gives its backward blocks of 16 x 16, and no tensor cores.
        (r.dtype not in HALF, f"it is taken for fp16 and bf16, not for {r.dtype}"),
        (r.dropout > 0, "it has no dropout"),
        (r.bias, "it is given no bias"),
        (min(r.head_dim, r.v_head_dim) < 16, "heads have less than 16 entries"),
        (max(r.head_dim, r.v_head_dim) > _LARGEST, f"heads have more than {_LARGEST} entries"),
    )
    if reason is not None:
        return reason
    major, minor = capability(r.device)
    small = has_little_shared_memory(major, minor)
    return first(
        (major < 8, f"it needs compute capability 8.0, have {major}.{minor}"),
        (
            small and max(r.head_dim, r.v_head_dim) > _LARGEST_OF_SMALL,
            f"heads have more than {_LARGEST_OF_SMALL} entries: this GPU has little shared memory",
        ),
    )


FLEX = Kernel(_refusal, _forward, _backward, prepare=_prepare)
