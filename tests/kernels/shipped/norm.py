"""Norms in the sizes of real models, and the bytes that they may move.

Beyond 8192 columns the weight gradient is a pass of its own, and reads x and dy a second time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opfuser.kernels import functions, norm
from opfuser.kernels.pointwise import Chain
from opfuser.kernels.pointwise_plain import ADD, BIAS, DROPOUT, FUNCTION, KEEP, Link
from tests.kernels.shipping import Family, empty, operands

BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-5


def rows(cols: int, dtype: torch.dtype = BF16) -> Tensor:
    """Of 2²⁷ elements."""
    return empty(2**27 // cols, cols, dtype=dtype)


def of_rows(x: Tensor) -> Tensor:
    return empty(len(x), dtype=FP32)


def forward(x: Tensor, *, layer: bool = False, add: bool = False, centered: bool = False) -> object:
    weight, residual = torch.empty_like(x[0]), torch.empty_like(x) if add else None
    return norm.norm_forward(x, residual, weight, weight if layer else None, EPS, centered, layer)


def backward(
    x: Tensor,
    *,
    layer: bool = False,
    weight_dtype: torch.dtype | None = None,
    want_dw: bool = True,
    want_y: bool = False,
) -> object:
    dy, dresidual = torch.empty_like(x), torch.empty_like(x)
    weight = torch.empty_like(x[0], dtype=weight_dtype)
    bias, mean = (weight, of_rows(x)) if layer else (None, None)
    wants = True, want_dw, want_y
    return norm.norm_backward(dy, x, weight, bias, mean, of_rows(x), dresidual, EPS, False, *wants)


def l2_forward(x: Tensor) -> object:
    return norm.norm_forward(x, None, None, None, EPS, False, False)


def l2_backward(x: Tensor) -> object:
    rest = None, None, None, of_rows(x), None, EPS, False, True, False, False
    return norm.norm_backward(torch.empty_like(x), x, *rest)


SILU = functions.Swish()
BIASED, ADDED, KEPT = Link(BIAS), Link(ADD), Link(KEEP)
DROPPED = Link(DROPOUT, parameters=(0.1,))
ACTIVATED = Link(FUNCTION, f"@scalar:{SILU.name}", SILU.parameters, SILU, linear=False)
RESIDUAL = [BIASED, DROPPED, ADDED]


def chain_forward(x: Tensor, *, links: list[Link], layer: bool, want_total: bool = True) -> object:
    weight, bias = torch.empty_like(x[0]), torch.empty_like(x[0]) if layer else None
    dtypes = (x.dtype,) * len(links)
    given = x, operands(links, x), dtypes, weight, bias, EPS, False
    return Chain(links).forward_norm(*given, with_mean=layer, want_total=want_total)


SHIPPED = Family()
for dtype in (BF16, FP32):
    for cols in (1024, 4096, 8192, 16384, 65536) if dtype == BF16 else (8192, 16384):
        size, x, again = f"{cols} {dtype}", rows(cols, dtype), 2 if cols > 8192 else 0
        SHIPPED.ship(f"add + rms {size}", 4, forward, x, add=True)
        SHIPPED.ship(f"rms backward {size}", 4 + again, backward, x)
    for cols in (8192, 65536):
        size, x, again = f"{cols} {dtype}", rows(cols, dtype), 2 if cols > 8192 else 0
        SHIPPED.ship(f"add + layer {size}", 4, forward, x, layer=True, add=True)
        SHIPPED.ship(f"layer, y {size}", 5 + again, backward, x, layer=True, want_y=True)
    for cols in (1024, 4096, 8192, 16384) if dtype == BF16 else (1024, 8192):
        for kind in ("rms", "layer"):
            name, how = f"bias, dropout, add + {kind} {cols} {dtype}", {"layer": kind == "layer"}
            SHIPPED.ship(name, 4, chain_forward, rows(cols, dtype), links=RESIDUAL, **how)
    x = rows(4096, dtype)
    for name, links, passes in (
        ("dropout", [DROPPED], 3),
        ("silu", [ACTIVATED], 3),
        ("bias, silu, dropout, add", [BIASED, ACTIVATED, DROPPED, ADDED], 4),
        ("silu, add, silu, dropout, add", [ACTIVATED, ADDED, KEPT, ACTIVATED, DROPPED, ADDED], 6),
    ):
        SHIPPED.ship(f"{name} + layer {dtype}", passes, chain_forward, x, links=links, layer=True)
    name, how = f"bias, dropout, add + rms, sum not wanted {dtype}", {"want_total": False}
    SHIPPED.ship(name, 3, chain_forward, x, links=RESIDUAL, layer=False, **how)
for cols in (4096, 16384):
    SHIPPED.ship(f"rms {cols}", 2, forward, rows(cols))
    SHIPPED.ship(f"layer {cols}", 2, forward, rows(cols), layer=True)
SHIPPED.ship("rms centered", 2, forward, rows(4096), centered=True)
SHIPPED.ship("layer backward", 4, backward, rows(4096), layer=True)
SHIPPED.ship("rms, y", 5, backward, rows(4096), want_y=True)
SHIPPED.ship("rms, frozen weight", 4, backward, rows(4096), want_dw=False)
SHIPPED.ship("rms, fp32 weight", 4, backward, rows(8192), weight_dtype=FP32)
SHIPPED.ship("l2", 2, l2_forward, rows(128))
SHIPPED.ship("l2 backward", 3, l2_backward, rows(128))
