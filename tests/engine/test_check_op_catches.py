"""What is wrong with an operation is caught by check_op, with a text that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opfuser
from opfuser.testing import check_op
from opfuser.testing.calls import Outcome
from opfuser.testing.compare import Comparison, Tolerance
from tests.engine.spoilt import Scaled, spoilt
from tests.engine.toys import Mixed


def backward_of(change: Callable[[Tensor, Tensor, Tensor, Tensor], Any]) -> Callable[..., Any]:
    """An op_backward from ``change(dx, dw, x, grad_output)``."""

    def op_backward(self: Scaled, ctx: Any, grad_output: Tensor) -> Any:
        dx, (dw,) = Scaled.op_backward(self, ctx, grad_output)
        return change(dx, dw, ctx.saved_tensors[0], grad_output)

    return op_backward


def backward_of_op(change: Callable[..., Any]) -> Callable[..., Any]:
    """The same with the operation as first argument."""

    def op_backward(self: Scaled, ctx: Any, grad_output: Tensor) -> Any:
        dx, (dw,) = Scaled.op_backward(self, ctx, grad_output)
        return change(self, dx, dw, ctx.saved_tensors[0], grad_output)

    return op_backward


def _writes(t: Tensor, result: Any) -> Any:
    t.add_(1)
    return result


def _times_mean_of_ones(dw: Tensor | None, x: Tensor) -> Tensor | None:
    return None if dw is None else dw * torch.ones_like(x).mean()


CAUGHT: dict[str, tuple[dict[str, Callable[..., Any]], str]] = {
    "wrong output": (
        {"compute": lambda op, x: x * x * op.w + 0.01},
        r"The output is wrong: error 0\.01, allowed .*float32, shape \(5, 3\).*plain torch.*floor",
    ),
    "NaN": (
        {"compute": lambda op, x: torch.where(x > 0, x * x * op.w, torch.nan)},
        "The output is wrong: error nan",
    ),
    "unneeded loss of accuracy": (
        {"compute": lambda op, x: (x.bfloat16() * x * op.w).float()},
        "The output is wrong",
    ),
    "wrong shape": (
        {"compute": lambda op, x: (x * x * op.w)[..., :2]},
        r"Expected shape \(5, 3\) .*: output\)\. Received: shape \(5, 2\)",
    ),
    "wrong dtype": (
        {"compute": lambda op, x: (x * x * op.w).double()},
        r"Expected torch\.float32 .*: output\)\. Received: torch\.float64",
    ),
    "wrong device": (
        {"compute": lambda op, x: (x * x * op.w).to("meta")},
        r"Expected device cpu .*: output\)\. Received: device meta",
    ),
    "no tensor": (
        {"compute": lambda op, x: [x]},
        r"Outputs are tensors .*: output\)\. Received: list",
    ),
    "writes to the input": (
        {"compute": lambda op, x: _writes(x.detach(), x * x * op.w)},
        "The input belongs to the caller and may not be written to",
    ),
    "writes to a parameter": (
        {"compute": lambda op, x: _writes(op.w.data, x * x * op.w)},
        "The parameter w belongs to the caller",
    ),
    "wrong input gradient": (
        {"op_backward": backward_of(lambda dx, dw, x, g: (dx * 1.01, (dw,)))},
        "The gradient of input is wrong: error",
    ),
    "wrong parameter gradient": (
        {"op_backward": backward_of(lambda dx, dw, x, g: (dx, (dw * 1.01,)))},
        "The gradient of parameter w is wrong: error",
    ),
    "missing gradient": (
        {"op_backward": backward_of(lambda dx, dw, x, g: (None, (dw,)))},
        "The gradient of input is wrong: error",
    ),
    "gradient of another shape": (
        {"op_backward": backward_of(lambda dx, dw, x, g: (dx[:1], (dw,)))},
        r"Expected shape \(5, 3\) .*gradient of input\)\. Received: shape \(1, 3\)",
    ),
    "gradient on another device": (
        {"op_backward": backward_of(lambda dx, dw, x, g: (dx.to("meta"), (dw,)))},
        "Expected device cpu .*gradient of input.*Received: device meta",
    ),
    "gradient of integers": (
        {"op_backward": backward_of(lambda dx, dw, x, g: (dx, (dw.int(),)))},
        "floating-point tensor or None .*gradient of parameter w.*Received: torch.int32",
    ),
    "gradient that is no tensor": (
        {"op_backward": backward_of(lambda dx, dw, x, g: (1.0, (dw,)))},
        "floating-point tensor or None .*gradient of input.*Received: float",
    ),
    "too few parameter gradients": (
        {"op_backward": backward_of(lambda dx, dw, x, g: (dx, ()))},
        "Backward must return 1 parameter gradients .*Received: 0",
    ),
    "writes to the incoming gradient": (
        {"op_backward": backward_of(lambda dx, dw, x, g: _writes(g, (dx, (dw,))))},
        "The gradient of the output belongs to the caller and may not be written to",
    ),
    "writes to what was saved": (
        {
            "save": lambda op, ctx, x: ctx.save_for_backward(x.clone(), op.w),
            "op_backward": backward_of(lambda dx, dw, x, g: _writes(x.data, (dx, (dw,)))),
        },
        r"second backward \(retain_graph=True\) must give the same gradients",
    ),
    "a gradient computed in place": (
        {
            "op_backward": backward_of(
                lambda dx, dw, x, g: (_writes(g, g) if g.is_contiguous() else dx, (dw,))
            )
        },
        "The gradient of the output belongs to the caller",
    ),
    "takes memory for contiguous": (
        {"compute": lambda op, x: torch.as_strided(x, x.shape, (x.shape[-1], 1)) ** 2 * op.w},
        "strided tensors",
    ),
    "takes the gradient for contiguous": (
        {
            "op_backward": backward_of(
                lambda dx, dw, x, g: (
                    dx,
                    (
                        (
                            g.as_strided(g.shape, (3, 1) if 0 not in g.stride() else g.stride())
                            * x
                            * x
                        ).sum(0),
                    ),
                )
            )
        },
        "The gradient of parameter w is wrong.*strided tensors",
    ),
    "saves too little": (
        {"save": lambda op, ctx, x: ctx.save_for_backward(x)},
        r"Forward must save what Saved declares: \(x, w\).*Received: 1 saved tensors",
    ),
    "saves nothing": (
        {"save": lambda op, ctx, x: None},
        r"Forward must save what Saved declares: \(x, w\).*Received: 0 saved tensors",
    ),
    "saves None": (
        {"save": lambda op, ctx, x: ctx.save_for_backward(x, None)},
        "Saved declares w: .*Received: NoneType",
    ),
    "saves no tensor": (
        {"save": lambda op, ctx, x: ctx.save_for_backward(x, 3)},
        "Saved declares w: .*Received: int",
    ),
    "saves without a declaration": (
        {"Saved": None},  # type: ignore[dict-item]
        "declares no Saved, so it must save nothing .*2 saved tensors.*Declare a NamedTuple",
    ),
    "saves although nobody needs it": (
        {
            "op_forward": lambda op, ctx, input_, **kwargs: (
                op.save(ctx, input_),
                op.compute(input_),
            )[1]
        },
        "Nothing may be saved without ctx.requires_grad .*2 tensors",
    ),
    "wrong without rows": (
        {"op_backward": backward_of(lambda dx, dw, x, g: (dx, (_times_mean_of_ones(dw, x),)))},
        "The gradient of parameter w is wrong: error nan.*zero rows",
    ),
    "fails without rows": (
        {"compute": lambda op, x: x.view(len(x), 3) * x.max(0).values * 0 + x * x * op.w},
        r"The call failed .*zero rows\)\. Received: max\(\)",
    ),
    "wrong for one row": (
        {"compute": lambda op, x: x * x * op.w * (1.1 if x.numel() == x.shape[-1] else 1)},
        r"The output is wrong.*\[5, 3\], one row",
    ),
    "wrong without gradients": (
        {
            "op_forward": lambda op, ctx, input_, **kwargs: (
                Scaled.op_forward(op, ctx, input_) * (1 if ctx.requires_grad else 1.1)
            )
        },
        r"The output is wrong.*\[5, 3\], under no_grad",
    ),
    "wrong in eval mode": (
        {"compute": lambda op, x: x * x * op.w * (1 if op.training else 1.1)},
        r"The output is wrong.*\[5, 3\], in eval mode",
    ),
    "wrong in inference": (
        {"compute": lambda op, x: x * x * op.w * (1.1 if torch.is_inference_mode_enabled() else 1)},
        "The output is wrong.*in eval and inference mode",
    ),
    "an input gradient of another dtype": (
        {"op_backward": backward_of(lambda dx, dw, x, g: (dx.double(), (dw,)))},
        r"Expected torch\.float32 .*gradient of input\)\. Received: torch\.float64.*Cast it",
    ),
    "a parameter gradient of another dtype": (
        {"op_backward": backward_of(lambda dx, dw, x, g: (dx, (dw.double(),)))},
        r"Expected torch\.float32 .*gradient of parameter w\)\. Received: torch\.float64",
    ),
    "a parameter read in backward": (
        {
            "op_backward": backward_of_op(
                lambda op, dx, dw, x, g: (None if dx is None else 2 * g * x * op.w, (dw,))
            )
        },
        "The gradient of input is wrong.*parameters replaced between forward and backward",
    ),
    "skips work that is needed": (
        {
            "op_backward": lambda op, ctx, g: (
                (r := Scaled.op_backward(op, ctx, g))[0],
                r[1] if ctx.needs.input else (None,),
            )
        },
        "gradient of parameter w is wrong.*only parameters require grad",
    ),
}


@pytest.mark.parametrize("case", CAUGHT)
def test_what_is_wrong_is_caught(case: str) -> None:
    methods, text = CAUGHT[case]
    with pytest.raises(AssertionError, match=f"(?s){text}") as error:
        check_op(spoilt(**methods), torch.randn(5, 3), zero_rows=True)
    assert "Scaled(), input float32 [5, 3]" in str(error.value)


def test_rows_are_left_out_unless_told_not_to() -> None:
    methods, text = CAUGHT["wrong without rows"]
    with pytest.raises(AssertionError, match=text):
        check_op(spoilt(**methods), torch.randn(5, 3))
    check_op(spoilt(**methods), torch.randn(5, 3), zero_rows=False)
    check_op(Scaled(), torch.randn(3))  # a vector is one row


def test_a_single_row_that_the_reference_does_not_take_is_left_out() -> None:
    class Pairs(Scaled):
        """Takes an even number of rows."""

        def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
            return super().reference(input_.unflatten(0, (-1, 2))).flatten(0, 1)

        def compute(self, x: Tensor) -> Tensor:
            return super().compute(x.unflatten(0, (-1, 2))).flatten(0, 1)

    check_op(Pairs(), torch.randn(4, 3), zero_rows=False)


MIXED: dict[str, tuple[dict[str, Callable[..., Any]], str]] = {
    "ignores the gradient of the extra output": (
        {
            "fuser_backward": lambda op, ctxs, g, *, basic_op_grad_extra_outputs: (
                Mixed.fuser_backward(op, ctxs, g, basic_op_grad_extra_outputs=[[None]])
            )
        },
        "gradient of input is wrong",
    ),
    "cannot do without the gradient of the extra output": (
        {
            "fuser_backward": lambda op, ctxs, g, *, basic_op_grad_extra_outputs: (
                Mixed.fuser_backward(
                    op,
                    ctxs,
                    g,
                    basic_op_grad_extra_outputs=[
                        [torch.ones_like(g) if e is None else e for e in es]
                        for es in basic_op_grad_extra_outputs
                    ],
                )
            )
        },
        "gradient of input is wrong.*no gradient of the extra outputs",
    ),
    "wrong gradient of the extra input": (
        {
            "fuser_backward": lambda op, ctxs, g, **kwargs: (
                *(r := Mixed.fuser_backward(op, ctxs, g, **kwargs))[:2],
                [(2 * r[2][0][0],)],
            )
        },
        "gradient of extra input 0 is wrong",
    ),
    "no gradient of the extra input": (
        {
            "fuser_backward": lambda op, ctxs, g, **kwargs: (
                *Mixed.fuser_backward(op, ctxs, g, **kwargs)[:2],
                [()],
            )
        },
        "Backward must return 1 extra-input gradients .*Received: 0",
    ),
    "lists of the wrong length": (
        {
            "fuser_backward": lambda op, ctxs, g, **kwargs: (
                *Mixed.fuser_backward(op, ctxs, g, **kwargs)[:2],
                [],
            )
        },
        "fuser_backward of a basic operation returns lists of one entry",
    ),
    "wrong extra output": (
        {
            "fuser_forward": lambda op, ctxs, x, **kwargs: (
                (r := Mixed.fuser_forward(op, ctxs, x, **kwargs))[0],
                [(r[1][0][0] + 0.1,)],
            )
        },
        "The extra output 0 is wrong: error 0.1",
    ),
    "no extra output": (
        {
            "fuser_forward": lambda op, ctxs, x, **kwargs: (
                Mixed.fuser_forward(op, ctxs, x, **kwargs)[0],
                [()],
            )
        },
        r"fuser_forward must return one list of 1 extra outputs .*Received: \[0\]",
    ),
    "an extra output that is None": (
        {
            "fuser_forward": lambda op, ctxs, x, **kwargs: (
                Mixed.fuser_forward(op, ctxs, x, **kwargs)[0],
                [(None,)],
            )
        },
        "Outputs are tensors .*extra output 0.*Received: NoneType",
    ),
    "writes to the extra input": (
        {
            "fuser_forward": lambda op, ctxs, x, *, basic_op_extra_inputs, **kwargs: _writes(
                basic_op_extra_inputs[0][0].detach(),
                Mixed.fuser_forward(
                    op, ctxs, x, basic_op_extra_inputs=basic_op_extra_inputs, **kwargs
                ),
            )
        },
        "The extra input 0 belongs to the caller",
    ),
    "a reference with fewer outputs": (
        {"reference": lambda op, x, extra: x * extra},
        "The reference gives 1 outputs .*Received: 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MIXED)
def test_what_is_wrong_with_extra_tensors_is_caught(case: str) -> None:
    methods, text = MIXED[case]
    with pytest.raises(AssertionError, match=f"(?s){text}"):
        check_op(type("Mixed", (Mixed,), methods)(), torch.randn(5, 3), torch.randn(5, 3))


def test_an_output_without_history_is_caught() -> None:
    """No gradient arrives there, so that the gradients of both sides agree."""
    y = torch.ones(2)
    exact = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with pytest.raises(AssertionError, match=r"The output must require grad \(here\)"):
        Comparison(
            "here", Outcome({"output": y}), Outcome({"output": y}), Outcome({"output": exact}),
            Tolerance(), "plain torch",
        ).check()  # fmt: skip


def test_an_output_of_another_dtype_than_declared_is_caught() -> None:
    class Doubles(opfuser.BasicOperation):
        def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
            return input_.double()

        def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor, tuple[()]]:
            return grad_output.float(), ()

        def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
            return input_.double() * 1

    with pytest.raises(AssertionError) as error:
        check_op(Doubles(), torch.randn(5, 3))
    assert str(error.value) == (
        "Plans take the output to be torch.float32 (Doubles(), input float32 [5, 3]). "
        "Received: torch.float64. Override output_dtype."
    )
    Doubles.output_dtype = lambda self, dtypes: torch.float64
    check_op(Doubles(), torch.randn(5, 3))
