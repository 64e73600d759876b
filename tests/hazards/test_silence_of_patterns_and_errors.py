"""Hazards 21 and 22: patterns that can never match, and error texts that were never filled in."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import F64, close, rand


class LinearSiLU(of.FusedOperation):
    """The documented kind of joint fusion: saves its own state for its own backward."""

    calls = 0

    def __init__(self, linear: of.BasicLinear, bias: of.Bias | None, silu: of.SiLU) -> None:
        super().__init__([linear, silu] if bias is None else [linear, bias, silu])
        self.bias_op = bias

    def fuser_forward(
        self, basic_op_ctxs: list[of.OperationContext], input_: Tensor, **unused: Any
    ) -> tuple[Tensor, list[tuple[()]]]:
        LinearSiLU.calls += 1
        weight = self.basic_ops[0].weight
        bias = None if self.bias_op is None else self.bias_op.bias
        h = F.linear(input_, weight, bias)
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(input_, weight, h)
        return F.silu(h), [()] * len(self.basic_ops)

    def fuser_backward(
        self, basic_op_ctxs: list[of.OperationContext], grad_output: Tensor, **unused: Any
    ) -> tuple[Tensor, list[Any], list[tuple[()]]]:
        x, w, h = basic_op_ctxs[0].saved_tensors
        s = torch.sigmoid(h)
        dh = grad_output * s * (1 + h * (1 - s))
        middle = [] if self.bias_op is None else [(dh.sum(0),)]
        return dh @ w, [(dh.t() @ x,), *middle, ()], [()] * len(self.basic_ops)


@pytest.mark.parametrize("bias", [True, False])
def test_hazard_21_a_pattern_may_name_a_compound(bias: bool) -> None:
    joint = of.Fusion("linear-silu", "joint", (of.Linear, of.SiLU), LinearSiLU)
    LinearSiLU.calls = 0
    seq = of.Sequential(of.Linear(8, 4, bias=bias, **F64), of.SiLU())
    x = rand(3, 8, grad=True)
    with of.register_forward_backward_fusion(joint):
        plan = seq.plan(x)
        y = seq(x)
    assert plan.record("linear-silu").status == "matched"
    assert plan.fused("forward") == plan.fused("backward") == {"linear-silu": 1}
    assert LinearSiLU.calls == 1
    dy = rand(3, 4)
    y.backward(dy)
    leaves = [t.detach().clone().requires_grad_() for t in (x, *seq.parameters())]
    want = F.silu(F.linear(*leaves))
    want.backward(dy)
    close(y, want)
    for got, expected in zip((x, *seq.parameters()), leaves):
        close(got.grad, expected.grad)


def test_hazard_22_error_texts_name_the_class() -> None:
    class Bare(of.BasicOperation):
        num_extra_inputs = 1

    x = rand(3, 8)
    with pytest.raises(NotImplementedError) as error:
        Bare()(x, x)
    assert "Bare" in str(error.value)
    assert "{" not in str(error.value)


def test_hazard_22_no_text_of_an_error_has_unfilled_braces() -> None:
    root = Path(of.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Raise) or node.exc is None:
                continue
            filled = {
                id(part)
                for f in ast.walk(node)
                if isinstance(f, ast.JoinedStr)
                for part in f.values
            }
            for text in ast.walk(node):
                if (
                    isinstance(text, ast.Constant)
                    and isinstance(text.value, str)
                    and id(text) not in filled
                    and "{" in text.value
                ):
                    found.append(f"{path.relative_to(root)}:{text.lineno}: {text.value}")
    assert found == []
