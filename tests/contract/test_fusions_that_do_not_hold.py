"""Hazard 5: a user's subclass with its own maths is never fused away as its parent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import F64, against, fill, rand


def _loud(cls: Any) -> Any:
    """A user's subclass with its own maths in both passes: its output times 7."""

    class Loud(cls):  # type: ignore[misc]
        def fuser_forward(self, ctxs: Any, input_: Tensor, **kwargs: Any) -> Any:
            y, extra = super().fuser_forward(ctxs, input_, **kwargs)
            return y * 7, extra

        def fuser_backward(self, ctxs: Any, grad_output: Tensor, **kwargs: Any) -> Any:
            return super().fuser_backward(ctxs, grad_output * 7, **kwargs)

    class LoudOp(cls):  # type: ignore[misc]
        def op_forward(self, ctx: Any, input_: Tensor, **kwargs: Any) -> Tensor:
            return super().op_forward(ctx, input_, **kwargs) * 7

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return super().op_backward(ctx, grad_output * 7)

    own = Loud if cls in (of.AddExtraInput, of.MakeExtraOutput) else LoudOp
    own.__name__ = f"Loud{cls.__name__}"
    return own


FORWARD = ("BasicLinear", "Bias", "GELU", "ConstantScale", "AddExtraInput")
BACKWARD = ("MakeExtraOutput", "RMSNorm", "BasicLinear")
ARGUMENTS: dict[str, Callable[..., tuple[Any, dict[str, Any]]]] = {
    "BasicLinear": lambda **kw: ((8, 8), kw),
    "Bias": lambda **kw: ((8,), kw),
    "RMSNorm": lambda **kw: ((8,), kw),
    "ConstantScale": lambda **kw: ((0.5,), {}),
}


def forward_formula(k: Callable[[str], float], p: dict[str, Tensor], x: Tensor, h: Tensor) -> Any:
    a = (F.linear(x, p["0.weight"]) * k("BasicLinear") + p["1.bias"]) * k("Bias")
    a = F.gelu(a, approximate="tanh") * k("GELU")
    a = F.linear(a, p["3.weight"]) * k("BasicLinear")
    return (a * 0.5 * k("ConstantScale") + h) * k("AddExtraInput")


def backward_formula(k: Callable[[str], float], p: dict[str, Tensor], x: Tensor) -> Any:
    h = F.rms_norm(x * k("MakeExtraOutput"), (8,), p["1.weight"], 1e-5) * k("RMSNorm")
    return F.linear(h * k("MakeExtraOutput"), p["3.weight"]) * k("BasicLinear"), x * 1, h


@pytest.mark.parametrize(
    ("pass_", "loud"),
    [("forward", name) for name in FORWARD] + [("backward", name) for name in BACKWARD],
)
def test_hazard_05_a_subclass_is_not_fused_away(pass_: str, loud: str) -> None:
    names, formula, extras = {
        "forward": ([*FORWARD[:3], "BasicLinear", *FORWARD[3:]], forward_formula, 1),
        "backward": ([*BACKWARD[:2], "MakeExtraOutput", "BasicLinear"], backward_formula, 0),
    }[pass_]

    def make(name: str) -> nn.Module:
        cls = getattr(of, name)
        args, kwargs = ARGUMENTS.get(name, lambda **kw: ((), {}))(**F64)
        return (_loud(cls) if name == loud else cls)(*args, **kwargs)

    against(
        fill(of.Sequential(*map(make, names))),
        lambda p, *xs: formula(lambda name: 7.0 if name == loud else 1.0, p, *xs),
        *(rand(4, 8, grad=True) for _ in range(1 + extras)),
    )
