"""Norms in the sizes of real models, and the bytes that they may move.

A is the size of x. Beyond 8192 columns the weight gradient is a pass of its own, and reads x and dy
a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from opfuser.kernels import functions, norm
from opfuser.kernels.pointwise import ADD, BIAS, DROPOUT, FUNCTION, KEEP, Chain, Link

BF16, FP32 = torch.bfloat16, torch.float32
ELEMENTS = 2**27
EPS = 1e-5


def tensor(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def tensors(count: int, cols: int, dtype: torch.dtype) -> list[Tensor]:
    """One for each argument: on a GPU, a tensor given twice would come from the cache."""
    return [tensor(ELEMENTS // cols, cols, dtype=dtype) for _ in range(count)]


def rms_forward(cols: int, dtype: torch.dtype, *, add: bool, centred: bool = False) -> object:
    x, residual = tensors(2, cols, dtype)
    weight = tensor(cols, dtype=dtype)
    return norm.norm_forward(x, residual if add else None, weight, None, EPS, centred, False)


def rms_backward(
    cols: int, dtype: torch.dtype, *, weight: torch.dtype | None = None, dw=True, y=False
) -> object:
    dy, x, residual = tensors(3, cols, dtype)
    scale = tensor(cols, dtype=weight or dtype)
    rstd = tensor(len(x))
    return norm.norm_backward(dy, x, scale, None, None, rstd, residual, EPS, False, True, dw, y)


def layer_forward(cols: int, dtype: torch.dtype, *, add: bool) -> object:
    x, residual = tensors(2, cols, dtype)
    weight = tensor(cols, dtype=dtype)
    return norm.norm_forward(x, residual if add else None, weight, weight, EPS, False, True)


def layer_backward(cols: int, dtype: torch.dtype, *, y: bool) -> object:
    dy, x, residual = tensors(3, cols, dtype)
    weight, rows = tensor(cols, dtype=dtype), tensor(len(x))
    return norm.norm_backward(
        dy, x, weight, weight, rows, rows, residual, EPS, False, True, True, y
    )


SILU = functions.Swish()
BIASED, ADDED, KEPT = Link(BIAS), Link(ADD), Link(KEEP)
DROPPED = Link(DROPOUT, parameters=(0.1,))
ACTIVATED = Link(FUNCTION, f"@scalar:{SILU.name}", SILU.parameters, SILU, linear=False)
RESIDUAL = [BIASED, DROPPED, ADDED]


def chain_forward(
    cols: int, dtype: torch.dtype, links: list[Link], *, layer: bool, total: bool = True
) -> object:
    made: dict[int, Callable[[], Tensor]] = {
        BIAS: lambda: tensor(cols, dtype=dtype),
        ADD: lambda: tensors(1, cols, dtype)[0],
        DROPOUT: lambda: tensor(1, dtype=torch.int64),
    }
    operands = [made[link.kind]() if link.kind in made else None for link in links]
    (x,) = tensors(1, cols, dtype)
    weight, bias = tensor(cols, dtype=dtype), tensor(cols, dtype=dtype) if layer else None
    dtypes = (dtype,) * len(links)
    return Chain(links).forward_norm(
        x, operands, dtypes, weight, bias, EPS, False, with_mean=layer, want_total=total
    )


def l2_forward(cols: int) -> object:
    x = tensor(ELEMENTS // cols, cols, dtype=BF16)
    return norm.norm_forward(x, None, None, None, 1e-6, False, False)


def l2_backward(cols: int) -> object:
    dy, x = tensors(2, cols, BF16)
    rnorm = tensor(len(x))
    return norm.norm_backward(dy, x, None, None, None, rnorm, None, 1e-6, False, True, False, False)


LAUNCHES: dict[str, Callable[[], object]] = {}
TRAFFIC: dict[str, int] = {}


def add(name: str, call: Callable[[], object], passes: int, dtype: torch.dtype) -> None:
    LAUNCHES[name] = call
    TRAFFIC[name] = passes * ELEMENTS * dtype.itemsize


for dtype in (BF16, FP32):
    for cols in (1024, 4096, 8192, 16384, 65536) if dtype == BF16 else (8192, 16384):
        size = f"{cols} {dtype}"
        again = 2 if cols > 8192 else 0
        add(f"add + rms {size}", partial(rms_forward, cols, dtype, add=True), 4, dtype)
        add(f"rms backward {size}", partial(rms_backward, cols, dtype), 4 + again, dtype)
    for cols in (8192, 65536):
        size = f"{cols} {dtype}"
        again = 2 if cols > 8192 else 0
        add(f"add + layer {size}", partial(layer_forward, cols, dtype, add=True), 4, dtype)
        add(f"layer, y {size}", partial(layer_backward, cols, dtype, y=True), 5 + again, dtype)
    for cols in (1024, 4096, 8192, 16384) if dtype == BF16 else (1024, 8192):
        for kind in ("rms", "layer"):
            call = partial(chain_forward, cols, dtype, RESIDUAL, layer=kind == "layer")
            add(f"bias, dropout, add + {kind} {cols} {dtype}", call, 4, dtype)
    for name, links, passes in (
        ("dropout", [DROPPED], 3),
        ("silu", [ACTIVATED], 3),
        ("bias, silu, dropout, add", [BIASED, ACTIVATED, DROPPED, ADDED], 4),
        ("silu, add, silu, dropout, add", [ACTIVATED, ADDED, KEPT, ACTIVATED, DROPPED, ADDED], 6),
    ):
        call = partial(chain_forward, 4096, dtype, links, layer=True)
        add(f"{name} + layer {dtype}", call, passes, dtype)
    call = partial(chain_forward, 4096, dtype, RESIDUAL, layer=False, total=False)
    add(f"bias, dropout, add + rms, sum not wanted {dtype}", call, 3, dtype)
for cols in (4096, 16384):
    add(f"rms {cols}", partial(rms_forward, cols, BF16, add=False), 2, BF16)
    add(f"layer {cols}", partial(layer_forward, cols, BF16, add=False), 2, BF16)
add("rms centred", partial(rms_forward, 4096, BF16, add=False, centred=True), 2, BF16)
add("layer backward", partial(layer_backward, 4096, BF16, y=False), 4, BF16)
add("rms, y", partial(rms_backward, 4096, BF16, y=True), 5, BF16)
add("rms, frozen weight", partial(rms_backward, 4096, BF16, dw=False), 4, BF16)
add("rms, fp32 weight", partial(rms_backward, 8192, BF16, weight=FP32), 4, BF16)
add("l2", partial(l2_forward, 128), 2, BF16)
add("l2 backward", partial(l2_backward, 128), 3, BF16)
