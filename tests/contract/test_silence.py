"""Hazards 19 and 22: registrations that are ignored, and texts of errors never filled in.

The other hazards of silence (18, 20, 21) stand in tests/planning.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import F64, close, rand


class ScaledLinear(of.FusedOperation):
    """Linear and scale as one GEMM, forward only; counts its calls."""

    calls = 0

    def __init__(self, *ops: Any) -> None:
        super().__init__(ops)

    def fuser_forward(
        self, basic_op_ctxs: list[of.OperationContext], input_: Tensor, **unused: Any
    ) -> tuple[Tensor, list[tuple[()]]]:
        ScaledLinear.calls += 1
        linear, scale = self.basic_ops
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(input_, linear.weight)
        return F.linear(input_, linear.weight * scale.scale), [(), ()]


RULE = of.Fusion("scaled-linear", "forward", (of.BasicLinear, of.ConstantScale), ScaledLinear)


def test_hazard_19_registering_and_removing_take_effect_at_the_next_call() -> None:
    ops = [[of.BasicLinear(8, 8, **F64), of.ConstantScale(0.5)] for _ in range(3)]
    sequences, x = [of.Sequential(*pair) for pair in ops], rand(3, 8, grad=True)
    ScaledLinear.calls = 0
    want = [seq(x) for seq in sequences]
    handle = of.register_forward_fusion(RULE)
    try:
        for seq, y in zip(sequences, want):
            close(seq(x), y)
        assert ScaledLinear.calls == 3, "the fusion registered after the first call is ignored"
        (step,) = sequences[0].plan(x).forward
        assert step.fusion == "scaled-linear"
    finally:
        handle.remove()
    for seq, y in zip(sequences, want):
        close(seq(x), y)
    assert ScaledLinear.calls == 3, "the fusion is still used after it was removed"
    handle.remove()  # a second time does nothing


def test_hazard_22_error_texts_name_the_class() -> None:
    class Bare(of.BasicOperation):
        num_extra_inputs = 1

    x = rand(3, 8)
    with pytest.raises(NotImplementedError, match=r"^[^{]*Bare[^{]*$"):
        Bare()(x, x)


def test_hazard_22_no_text_of_an_error_has_unfilled_braces() -> None:
    root = Path(of.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Raise) or node.exc is None:
                continue
            filled = {
                id(part)
                for f in ast.walk(node)
                if isinstance(f, ast.JoinedStr)
                for part in f.values
            }
            found += [
                f"{path.relative_to(root)}:{text.lineno}: {text.value}"
                for text in ast.walk(node)
                if isinstance(text, ast.Constant)
                and isinstance(text.value, str)
                and id(text) not in filled
                and "{" in text.value
            ]
    assert found == []
