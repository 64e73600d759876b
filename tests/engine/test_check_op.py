"""check_op passes what is right, and catches each kind of wrong with a text that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.errors import ArgumentTypeError
from opfuser.op import BasicOperation, OperationContext
from opfuser.testing import check_op
from opfuser.testing.calls import Outcome
from opfuser.testing.compare import Comparison, Tolerance

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Scaled(BasicOperation):
    """``y = w x²``, with one step after the other open to being spoilt."""

    class Saved(NamedTuple):
        x: Tensor
        w: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, 2.0, -1.0]))

    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        if ctx.requires_grad:
            self.save(ctx, input_)
        return self.compute(input_)

    def save(self, ctx: OperationContext, x: Tensor) -> None:
        ctx.save_for_backward(x, self.w)

    def compute(self, x: Tensor) -> Tensor:
        return x * x * self.w

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx = 2 * grad_output * x * w if ctx.needs.input else None
        dw = None
        if ctx.needs.parameters[0]:
            dw = (grad_output * x * x).reshape(-1, 3).sum(0)
        return dx, (dw,)

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return self.w * input_.square()


class Mixed(BasicOperation):
    """``y = x e`` for the extra input e, and ``x + e`` as extra output."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    class Saved(NamedTuple):
        x: Tensor
        extra: Tensor

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **kwargs: Any
    ) -> Any:
        ((extra,),) = basic_op_extra_inputs
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(input_, extra)
        return input_ * extra, [(input_ + extra,)]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        x, extra = basic_op_ctxs[0].saved_tensors
        ((more,),) = basic_op_grad_extra_outputs
        dx, dextra = grad_output * extra, grad_output * x
        if more is not None:
            dx, dextra = dx + more, dextra + more
        return dx, [()], [(dextra,)]

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        (extra,) = extra_inputs
        return input_ * extra, input_ + extra


@pytest.mark.parametrize("shape", [(5, 3), (2, 4, 3), (1, 3), (3,)])
def test_a_right_operation_passes(shape: tuple[int, ...]) -> None:
    check_op(Scaled(), torch.randn(shape), dtypes=DTYPES, zero_rows=len(shape) > 1)
    check_op(Mixed(), torch.randn(shape), torch.randn(shape), dtypes=DTYPES, zero_rows=True)


def test_basic_operations_pass() -> None:
    x = torch.randn(4, 6)
    for op in (opfuser.Bias(6), opfuser.BasicLinear(6, 5), opfuser.Dropout(0.3)):
        check_op(op, x, dtypes=DTYPES, zero_rows=True)
    check_op(opfuser.MakeExtraOutput(), x, dtypes=DTYPES)
    check_op(opfuser.AddExtraInput(), x, torch.randn(4, 6), dtypes=DTYPES)


def test_the_operation_given_is_left_alone() -> None:
    op, x = Scaled(), torch.randn(4, 3, requires_grad=True)
    op.w.requires_grad_(False)
    check_op(op, x, dtypes=(torch.float64,))
    assert op.w.dtype is torch.float32
    assert op.w.grad is None
    assert x.grad is None
    assert not op._routing_captured


def test_dtypes_default_to_those_given() -> None:
    seen = []

    class Watched(Scaled):
        def compute(self, x: Tensor) -> Tensor:
            seen.append((x.dtype, self.w.dtype))
            return super().compute(x)

    check_op(Watched().bfloat16(), torch.randn(4, 3).bfloat16())
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}


def test_keywords_reach_forward_and_reference() -> None:
    class Times(opfuser.Identity):
        def op_forward(self, ctx: Any, input_: Tensor, *, times: float, **kwargs: Any) -> Tensor:
            ctx.times = times
            return input_ * times

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return grad_output * ctx.times, ()

        def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
            return input_ * kwargs["times"]

    check_op(Times(), torch.randn(4, 3), kwargs={"times": 3.0})
    with pytest.raises(TypeError, match="times"):
        check_op(Times(), torch.randn(4, 3))


def test_registered_fusions_do_not_interfere() -> None:
    class Wrong(opfuser.FusedOperation):
        def fuser_forward(self, ctxs: Any, input_: Tensor, **kwargs: Any) -> Any:
            return input_ * 3, [()]

    def fuse(ops: Any) -> Any:
        return [Wrong(ops)]

    with opfuser.register_forward_fusion(fuse):
        check_op(opfuser.Identity(), torch.randn(4, 3))


def test_integer_inputs_have_no_gradient() -> None:
    class Lookup(BasicOperation):
        class Saved(NamedTuple):
            index: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(7, 3))

        def op_forward(self, ctx: Any, input_: Tensor, **kwargs: Any) -> Tensor:
            if ctx.requires_grad:
                ctx.save_for_backward(input_)
            return self.table[input_]

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            (index,) = ctx.saved_tensors
            dtable = grad_output.new_zeros(7, 3)
            return None, (dtable.index_put((index,), grad_output, accumulate=True),)

        def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
            return nn.functional.embedding(input_, self.table)

    check_op(Lookup(), torch.tensor([1, 5, 1, 0]), zero_rows=True)


def test_under_autocast() -> None:
    x = torch.randn(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        check_op(opfuser.BasicLinear(6, 4), x, zero_rows=True)
        check_op(opfuser.Bias(6), x)
        with pytest.raises(AssertionError, match="The output is wrong"):
            check_op(spoilt(compute=lambda op, x: (x * 1.05) ** 2 * op.w), torch.randn(5, 3))


# ---------------------------------------------------------------------- what is caught


def spoilt(**methods: Callable[..., Any]) -> Scaled:
    """The operation with some of its methods replaced."""
    return type("Scaled", (Scaled,), methods)()


def backward_of(change: Callable[[Tensor, Tensor, Tensor, Tensor], Any]) -> Callable[..., Any]:
    """An op_backward from ``change(dx, dw, x, grad_output)``."""

    def op_backward(self: Scaled, ctx: Any, grad_output: Tensor) -> Any:
        dx, (dw,) = Scaled.op_backward(self, ctx, grad_output)
        return change(dx, dw, ctx.saved_tensors[0], grad_output)

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


def test_factor_and_floor() -> None:
    op = spoilt(compute=lambda op, x: x * x * op.w * (1 + 1e-4))
    x = torch.randn(5, 3)
    with pytest.raises(AssertionError, match=r"allowed is 2 x"):
        check_op(op, x)
    check_op(op, x, floor=1e-3)
    with pytest.raises(AssertionError, match=r"allowed is 7 x"):
        check_op(op, x, factor=7)
    check_op(op, x, factor=1e9)


def test_an_operation_without_reference() -> None:
    class Silent(opfuser.Identity):
        reference = BasicOperation.reference

    with pytest.raises(NotImplementedError, match=r"check_op compares.*\(Silent\)"):
        check_op(Silent(), torch.randn(5, 3))


def test_only_basic_operations() -> None:
    with pytest.raises(
        ArgumentTypeError, match=r"basic operations\. Received: Linear.*check_fusion"
    ):
        check_op(opfuser.Linear(3, 3), torch.randn(5, 3))  # type: ignore[arg-type]
