"""check_op changes every public attribute between forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from opfuser.op import BasicOperation
from opfuser.testing import check_op


class Flagged(BasicOperation):
    """``y = k x`` for a factor k that attributes of all kinds decide; forward freezes it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.times, self.negative = 0.5, 3, False
        self.kind, self.more = "plain", None
        self.locked = 2.0

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "locked" and name in vars(self):
            raise AttributeError("locked is fixed")
        super().__setattr__(name, value)

    def factor(self) -> float:
        sign = -1 if self.negative else 1
        named = {"plain": 1}.get(self.kind, 7)
        return sign * named * self.scale * self.times * self.locked + (self.more or 0)

    def op_forward(self, ctx: Any, input_: Tensor, **kwargs: Any) -> Tensor:
        ctx.factor = self.factor()
        return input_ * ctx.factor

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return grad_output * ctx.factor, ()

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return input_ * self.factor()


def test_an_operation_that_freezes_its_attributes_passes() -> None:
    check_op(Flagged(), torch.randn(5, 3))


@pytest.mark.parametrize("name", ["scale", "times", "negative", "kind", "more"])
def test_an_attribute_read_in_backward_is_caught(name: str) -> None:
    """One attribute at a time is read late; the others are those of forward."""

    class Late(Flagged):
        def op_forward(self, ctx: Any, input_: Tensor, **kwargs: Any) -> Tensor:
            ctx.frozen = {**vars(self)}
            return super().op_forward(ctx, input_)

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            now = Flagged()
            for kept in ("scale", "times", "negative", "kind", "more"):
                setattr(now, kept, getattr(self, kept) if kept == name else ctx.frozen[kept])
            return grad_output * now.factor(), ()

    text = rf"The gradient of input is wrong.*\[5, 3\], {name} changed between forward and backward"
    with pytest.raises(AssertionError, match=f"(?s){text}"):
        check_op(Late(), torch.randn(5, 3))


def test_an_attribute_of_a_property_is_changed_too() -> None:
    class Late(Flagged):
        @property
        def strength(self) -> float:
            return self._strength

        @strength.setter
        def strength(self, value: float) -> None:
            self._strength = value

        def __init__(self) -> None:
            super().__init__()
            self._strength = 1.0

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return grad_output * ctx.factor * self.strength, ()

    with pytest.raises(AssertionError, match=r"wrong.*strength changed between"):
        check_op(Late(), torch.randn(5, 3))
