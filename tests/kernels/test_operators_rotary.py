"""Rotary embedding and QK-norm as registered operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opfuser.kernels.rotary import Rotation, qk_norm, qk_norm_backward, rotary

OPS = torch.ops.opfuser
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "sequence first": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "transposed": lambda t: t.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "no rows": lambda t: t[:, :0],
}


def arguments(
    layout: str, dtype: torch.dtype, turn: bool, device: torch.device
) -> dict[str, tuple[Any, ...]]:
    """Arguments of each operator, for two query heads and a key and a value head of 6 entries."""
    x, dy = (LAYOUTS[layout](torch.randn(2, 5, 24, device=device).to(dtype)) for _ in range(2))
    weights = tuple(torch.randn(2, 6, device=device).to(dtype))
    wide = torch.promote_types(dtype, torch.float32)
    rstd = torch.rand(*x.shape[:-1], 3, dtype=wide, device=device) + 0.5
    cos, sin = torch.randn(2, x.shape[1], 2, dtype=wide, device=device)
    rotation = Rotation(cos, sin, x.shape[1], False) if turn else None
    return {
        "rotary": (x, Rotation(cos, sin, x.shape[1], True), 1, 6, True),
        "qk_norm": (x, *weights, rotation, 1, 1e-6, True),
        "qk_norm_backward": (dy, x, *weights, rstd, rotation, True, True, True),
    }


def flat(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """As the operator takes them."""
    at = next(i for i, arg in enumerate(args) if arg is None or isinstance(arg, Rotation))
    return (*args[:at], *(args[at] or (None, None, 0, False)), *args[at + 1 :])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "turn", "layout", "dtype"),
    [
        ("rotary", True, "contiguous", torch.bfloat16),
        ("rotary", True, "transposed", torch.float32),
        ("rotary", True, "no rows", torch.float32),
        ("qk_norm", True, "contiguous", torch.float32),
        ("qk_norm", False, "transposed", torch.bfloat16),
        ("qk_norm", True, "no rows", torch.float32),
        ("qk_norm_backward", True, "contiguous", torch.bfloat16),
        ("qk_norm_backward", False, "sequence first", torch.float32),
        ("qk_norm_backward", True, "transposed", torch.float32),
        ("qk_norm_backward", True, "no rows", torch.float32),
    ],
    ids=str,
)
def test_operators_keep_their_promises(
    name: str, turn: bool, layout: str, dtype: torch.dtype, device: torch.device
) -> None:
    args = arguments(layout, dtype, turn, device)[name]
    torch.library.opcheck(getattr(OPS, name).default, flat(args))


@pytest.mark.parametrize("call", [rotary, qk_norm, qk_norm_backward], ids=lambda f: f.__name__)
def test_what_eager_code_calls_is_the_operator(
    call: Callable[..., Any], device: torch.device
) -> None:
    for layout in LAYOUTS:
        args = arguments(layout, torch.float32, True, device)[call.__name__]
        got, want = call(*args), getattr(OPS, call.__name__)(*flat(args))
        if isinstance(got, tuple):
            got, want = tuple(got), tuple(want)
        torch.testing.assert_close(got, want, rtol=0, atol=0, msg=layout)
