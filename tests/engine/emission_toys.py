"""Operations for the tests of programs, and what reads their programs."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from opfuser.op import BasicOperation


class Settings(NamedTuple):
    factor: float


class Scaled(BasicOperation):
    """``y = factor x`` with settings."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def make_settings(self) -> Settings:
        return Settings(self.factor)

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        return input_ * ctx.settings.factor

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return grad_output * ctx.settings.factor, ()


class ScaledTap(Scaled):
    """Besides, its output as an extra output, so that its step follows the general protocol."""

    num_extra_outputs = 1

    def fuser_forward(self, ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        y = self.op_forward(ctxs[0], input_)
        return y, [(y,)]

    def fuser_backward(self, ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        return self.op_backward(ctxs[0], grad_output)[0], [()], [()]


class KeywordTap(BasicOperation):
    """``y = x + add``, and the extra output ``x``."""

    num_extra_outputs = 1

    def fuser_forward(
        self, ctxs: Any, input_: Tensor, *, basic_op_kwargs: Any, **unused: Any
    ) -> Any:
        return input_ + basic_op_kwargs[0].get("add", 0), [(input_,)]

    def fuser_backward(
        self, ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        ((more,),) = basic_op_grad_extra_outputs
        return grad_output if more is None else grad_output + more, [()], [()]


KEYWORDS = {0: {"power": 2}, 1: {"add": 1}, 3: {"power": 3}}


def with_keywords(x: Tensor) -> tuple[Tensor, Tensor]:
    return ((x**2 + 1) * 2) ** 3, x**2
