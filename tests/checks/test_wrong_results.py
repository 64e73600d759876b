"""What is wrong with an operation or a fusion is caught, with a text that says so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import AddExtraInput, BasicLinear, ConstantScale
from opfuser.core.fusion import Fusion, Refusal
from opfuser.op import BasicOperation, FusedOperation
from opfuser.testing import UnreadTensorWarning, check_fusion, check_op
from opfuser.testing.calls import Outcome
from opfuser.testing.compare import Comparison, Tolerance
from tests.checks.spoilt import (
    LinearScaleGain,
    Scaled,
    needed,
    operations,
    rule,
    spoilt,
    with_bias,
)
from tests.engine.toys import Mixed


class Fault:
    """A step that goes wrong, in what, and the text in which that is said.

    Args:
        of: ``op``, ``extras`` (an operation with extra tensors), or stages of a fusion.
        kept: the fused operation is built once, and used again for other plans.
    """

    def __init__(self, of: str, text: str, *, kept: bool = False, **methods: Any) -> None:
        self.of, self.text, self.kept, self.methods = of.split(), text, kept, methods


def writes(t: Tensor, result: Any) -> Any:
    t.add_(1)
    return result


def wrong_if(condition: Callable[[Any, Any, Tensor], bool]) -> Callable[..., Tensor]:
    """Computes something else where ``condition(op, ctx, x)`` holds."""
    return lambda op, ctx, x: op.right(x) * (1.1 if condition(op, ctx, x) else 1)


def with_dx(change: Callable[[Tensor], Any]) -> Callable[..., Any]:
    return lambda op, dx, dw, x, dy: (None if dx is None else change(dx), dw)


def with_dw(change: Callable[[Tensor], Any]) -> Callable[..., Any]:
    return lambda op, dx, dw, x, dy: (dx, None if dw is None else change(dw))


def keeps(**what: Callable[[Any, Any, Any], Any]) -> Callable[..., None]:
    """A constructor's step that keeps values of linear, scale and gain under these names."""

    def capture(self: Any, *ops: Any) -> None:
        self.__dict__.update({name: value(*ops) for name, value in what.items()})

    return capture


def saves(tensors: Callable[[Any, Tensor, Tensor], Any]) -> Callable[..., None]:
    def save(op: Any, ctx: Any, x: Tensor, w: Tensor) -> None:
        if ctx.requires_grad:
            ctx.save_for_backward(*tensors(ctx, x, w))

    return save


def as_if_contiguous(g: Tensor) -> Tensor:
    return g.as_strided(g.shape, (3, 1) if 0 not in g.stride() else g.stride())


def result(index: int, change: Callable[..., Any], method: str = "fuser_forward") -> Any:
    """The method with another result at this index."""

    def changed(op: Any, ctxs: Any, t: Tensor, **kwargs: Any) -> Any:
        out = list(getattr(super(type(op), op), method)(ctxs, t, **kwargs))
        out[index] = change(out[index], t, ctxs)
        return tuple(out)

    return {method: changed}


FAULTS: dict[str, Fault] = {
    # Outputs.
    "wrong output": Fault(
        "op forward joint", r"The output is wrong: error .*, allowed .*plain torch|unfused.*floor",
        compute=lambda op, ctx, x: op.right(x) + 0.01,
    ),
    "NaN": Fault(
        "op joint", "The output is wrong: error nan",
        compute=lambda op, ctx, x: torch.where(op.right(x) > 0, op.right(x), torch.nan),
    ),
    "unneeded loss of accuracy": Fault(
        "op forward", "The output is wrong",
        compute=lambda op, ctx, x: op.right(x).bfloat16().to(x.dtype),
    ),
    "wrong shape": Fault(
        "op", r"Expected shape \(5, 3\) .*: output\)\. Received: shape \(5, 2\)",
        compute=lambda op, ctx, x: op.right(x)[..., :2],
    ),
    "wrong dtype": Fault(
        "op forward", r"Expected torch\.float32 .*: output\)\. Received: torch\.float64",
        compute=lambda op, ctx, x: op.right(x).double(),
    ),
    "wrong device": Fault(
        "op", r"Expected device cpu .*: output\)\. Received: device meta",
        compute=lambda op, ctx, x: op.right(x).to("meta"),
    ),
    "no tensor": Fault(
        "op", r"Outputs are tensors .*: output\)\. Received: list", compute=lambda op, ctx, x: [x]
    ),
    "takes memory for contiguous": Fault(
        "op", "strided tensors",
        compute=lambda op, ctx, x: op.right(x.as_strided(x.shape, (x.shape[-1], 1))),
    ),
    # What may not be written to. A write that torch counts is an error of the call itself.
    "writes to the input": Fault(
        "op forward joint", "The input belongs to the caller and may not be written to",
        compute=lambda op, ctx, x: writes(x.data, op.right(x)),
    ),
    "writes to a parameter": Fault(
        "op forward joint", r"The parameter (w|0\.weight) belongs to the caller",
        compute=lambda op, ctx, x: writes(op.weight().data, op.right(x)),
    ),
    "writes to the incoming gradient": Fault(
        "op", "The gradient of the output belongs to the caller and may not be written to",
        grads=lambda op, dx, dw, x, dy: writes(dy, (dx, dw)),
    ),
    "a gradient computed in place": Fault(
        "op backward", "The gradient of the output belongs to the caller|is wrong",
        grads=lambda op, dx, dw, x, dy: (
            (writes(dy.data, dx), dw) if dy.is_contiguous() else (dx, dw)
        ),
    ),
    "writes to what was saved": Fault(
        "op joint", r"second backward \(retain_graph=True\) must give the same gradients",
        save=saves(lambda ctx, x, w: (x.clone(), w)),
        grads=lambda op, dx, dw, x, dy: writes(x.data, (dx, dw)),
    ),
    # Gradients.
    "wrong input gradient": Fault(
        "op backward joint", "The gradient of (input|parameter 0.bias) is wrong: error",
        grads=with_dx(lambda dx: dx * 1.01),
    ),
    "wrong parameter gradient": Fault(
        "op backward joint", r"The gradient of parameter (w|1\.weight) is wrong: error",
        grads=with_dw(lambda dw: dw * 1.01),
    ),
    "missing gradient": Fault(
        "op backward", "The gradient of (input|parameter 0.bias) is wrong: error",
        grads=with_dx(lambda dx: None),
    ),
    "gradient of another shape": Fault(
        "op", r"Expected shape \(5, 3\) .*gradient of input\)\. Received: shape \(1, 3\)",
        grads=with_dx(lambda dx: dx[:1]),
    ),
    "gradient on another device": Fault(
        "op", "Expected device cpu .*gradient of input.*Received: device meta",
        grads=with_dx(lambda dx: dx.to("meta")),
    ),
    "gradient of integers": Fault(
        "op", "floating-point tensor or None .*gradient of parameter w.*Received: torch.int32",
        grads=with_dw(lambda dw: dw.int()),
    ),
    "gradient that is no tensor": Fault(
        "op", "floating-point tensor or None .*gradient of input.*Received: float",
        grads=with_dx(lambda dx: 1.0),
    ),
    "too few parameter gradients": Fault(
        "op", "Backward must return 1 parameter gradient .*Received: 0",
        op_backward=lambda op, ctx, dy: (Scaled.op_backward(op, ctx, dy)[0], ()),
    ),
    "the input gradient alone": Fault(
        "op", r"gradients in their order \(Scaled\)\. Received: Tensor\. Return grad_input and a",
        op_backward=lambda op, ctx, dy: Scaled.op_backward(op, ctx, dy)[0],
    ),
    "no gradients": Fault(
        "op", r"gradients in their order \(Scaled\)\. Received: NoneType\.",
        op_backward=lambda op, ctx, dy: None,
    ),
    "parameter gradients that are a tensor": Fault(
        "op", r"gradients in their order \(Scaled\)\. Received: a tuple of Tensor, Tensor\.",
        op_backward=lambda op, ctx, dy: (
            dy, None if (dw := Scaled.op_backward(op, ctx, dy)[1][0]) is None else dw[None],
        ),
    ),
    "an input gradient of another dtype": Fault(
        "op backward joint",
        r"Expected torch\.float32 .*gradient of (the )?input\)\. Received: torch\.float64.*Cast it",
        grads=with_dx(lambda dx: dx.double()),
    ),
    "a parameter gradient of another dtype": Fault(
        "op backward joint",
        r"Expected torch\.float32 .*gradient of (parameter w|weight of op 1 \(BasicLinear\))\)\. "
        r"Received: torch\.float64",
        grads=with_dw(lambda dw: dw.double()),
    ),
    "a parameter gradient in fp32 whatever the parameter": Fault(
        "joint",
        r"Expected torch\.bfloat16 .*weight of op 1 \(BasicLinear\)\)\. Received: torch\.float32",
        grads=with_dw(lambda dw: dw.float()),
    ),
    "takes the gradient for contiguous": Fault(
        "op", "The gradient of parameter w is wrong.*strided tensors",
        grads=lambda op, dx, dw, x, dy: (dx, (as_if_contiguous(dy) * x * x).sum(0)),
    ),
    "skips work that is needed": Fault(
        "op joint", "gradient of parameter .* is wrong.*only (the last parameter|parameters)",
        grads=lambda op, dx, dw, x, dy: (dx, None if dx is None else dw),
    ),
    # What is saved.
    "saves too little": Fault(
        "op", r"Forward must save what Saved declares: \(x, w\).*Received: 1 saved tensor\.",
        save=saves(lambda ctx, x, w: (x,)),
    ),
    "saves less than the operation": Fault(
        "forward",
        r"Expected 2 tensors, as its op_forward saves .*op 1 \(BasicLinear\)\)\. Received: 1",
        save=saves(lambda ctx, x, w: (x,)),
    ),
    "saves nothing": Fault(
        "op forward", r"(\(x, w\)|2 tensors, as its op_forward saves).*Received: 0",
        save=lambda op, ctx, x, w: None,
    ),
    "saves None": Fault(
        "op forward",
        "Saved declares w: .*Received: NoneType|Expected weight to be a tensor .*Received: None",
        save=saves(lambda ctx, x, w: (x, None)),
    ),
    "saves no tensor": Fault(
        "op", "Saved declares w: .*Received: int", save=saves(lambda ctx, x, w: (x, 3))
    ),
    "saves without a declaration": Fault(
        "op",
        "declares no Saved, so it must save nothing .*2 saved tensors.*Declare a NamedTuple",
        Saved=None,
    ),
    "saves although nobody needs it": Fault(
        "op forward joint", r"Nothing may be saved without ctx\.requires_grad .*2 tensors",
        save=lambda op, ctx, x, w: ctx.save_for_backward(x, w),
    ),
    "saves in another order": Fault(
        "forward",
        r"Expected shape \(5, 4\) .*saved for op 1 \(BasicLinear\): input.*shape \(3, 4\)",
        save=saves(lambda ctx, x, w: needed(ctx, x, w)[::-1]),
    ),
    "saves in another dtype": Fault(
        "forward", "Expected torch.float32 .*BasicLinear.: input.*Received: torch.bfloat16",
        save=saves(lambda ctx, x, w: (x.bfloat16(), w)),
    ),
    "saves other values": Fault(
        "forward", r"The input is wrong: error .*saved for op 1 \(BasicLinear\)",
        save=saves(lambda ctx, x, w: (x * 2, w)),
    ),
    "saves for another operation": Fault(
        "forward", r"Expected 0 tensors.*op 2 \(ConstantScale\)",
        **result(0, lambda y, x, ctxs: (ctxs[1].save_for_backward(x), y)[1]),
    ),
    "saves the input of a frozen weight": Fault(
        "joint", "A fusion may save 4 bytes, .*only the input requires grad.*Received: 84 bytes",
        save=saves(lambda ctx, x, w: (x, needed(ctx, x, w)[1])),
    ),
    "saves the output besides": Fault(
        "joint", "A fusion may save 84 bytes, as the unfused.*Received: 144 bytes",
        save=saves(lambda ctx, x, w: (*needed(ctx, x, w), x @ w.t())),
        saved=lambda op, ctx: ctx.saved_tensors[:2],
    ),
    "keeps the output on the context": Fault(
        "joint", "A fusion may save .* bytes, as the unfused",
        **result(0, lambda y, x, ctxs: (setattr(ctxs[1], "kept", [{"y": y}]), y)[1]),
    ),
    # Ways of calling.
    "wrong for one row": Fault(
        "op joint", r"The output is wrong.*, one row",
        compute=wrong_if(lambda op, ctx, x: x.numel() == x.shape[-1]),
    ),
    "fails without rows": Fault(
        "op joint", r"The call failed .*zero rows\)\. Received: max",
        compute=lambda op, ctx, x: op.right(x) + 0 * x.max(),
    ),
    "wrong without rows": Fault(
        "op joint", r"The gradient of parameter (w|1\.weight) is wrong: error nan.*zero rows",
        grads=lambda op, dx, dw, x, dy: (
            dx, None if dw is None else dw * torch.ones_like(dy).mean(),
        ),
    ),
    "wrong without gradients": Fault(
        "op joint", "The output is wrong.*, under no_grad",
        compute=wrong_if(lambda op, ctx, x: not ctx.requires_grad),
    ),
    "wrong in eval mode": Fault(
        "op joint", "The output is wrong.*, in eval mode",
        compute=wrong_if(lambda op, ctx, x: not op.trains()),
    ),
    "wrong in inference": Fault(
        "op joint", "The output is wrong.*in eval and inference mode",
        compute=wrong_if(lambda op, ctx, x: torch.is_inference_mode_enabled()),
    ),
    "a parameter read in backward": Fault(
        "op joint", "The gradient .* is wrong.*parameters replaced between forward and backward",
        saved=lambda op, ctx: (ctx.saved_tensors[0], op.weight()),
    ),
    "needs what only the first operation saves": Fault(
        "joint", "joint fused, only the",
        save=lambda op, ctx, x, w: (
            ctx.save_for_backward(x, w) if ctx.needs.parameters[0] else None
        ),
        fuser_backward=lambda op, ctxs, dy, **kwargs: (
            LinearScaleGain.fuser_backward(op, ctxs, dy)
            if ctxs[0].saved_tensors
            else (dy[:, :1], [(None,), (), ()], [(), (), ()])
        ),
    ),
    "the dtype of the input": Fault(
        "joint",
        r"Expected torch\.float32 .*input in torch\.bfloat16 and parameters not.*: torch\.bfloat16",
        **result(0, lambda y, x, ctxs: y.to(x.dtype)),
    ),
    # State that changes later.
    "a parameter captured": Fault(
        "joint", "is wrong.*parameters replaced between two calls",
        capture=keeps(w=lambda linear, scale, gain: linear.weight), weight=lambda op: op.w,
    ),
    "values of a parameter captured": Fault(
        "joint", "is wrong.*parameters changed in place between two calls",
        capture=keeps(w=lambda linear, scale, gain: linear.weight.detach().clone()),
        right=lambda op, x: torch.nn.functional.linear(x, op.w) * op.scale() * op.gain(x),
    ),
    "a buffer captured": Fault(
        "joint", "is wrong.*parameters changed in place between two calls",
        capture=keeps(g=lambda linear, scale, gain: float(gain.gain)),
        gain=lambda op, x: x.new_tensor(-op.g if op.basic_ops[2].negative else op.g),
    ),
    "a scale captured": Fault(
        "joint", r"is wrong.*during forward .*2\.scale = 0\.5",
        capture=keeps(s=lambda linear, scale, gain: scale.scale), scale=lambda op, ctx=None: op.s,
    ),
    "a scale captured for good": Fault(
        "joint", r"is wrong.*between two calls .*2\.scale = 0\.25", kept=True,
        capture=keeps(s=lambda linear, scale, gain: scale.scale), scale=lambda op, ctx=None: op.s,
    ),
    "a flag captured for good": Fault(
        "joint", r"is wrong.*between two calls 3\.negative = True", kept=True,
        capture=keeps(n=lambda linear, scale, gain: gain.negative),
        gain=lambda op, x: op.basic_ops[2].gain.to(x.dtype) * (-1 if op.n else 1),
    ),
    "fails where a flag is set": Fault(
        "joint", r"The call failed .*3\.negative = True",
        compute=lambda op, ctx, x: op.right(x).view(7 if op.basic_ops[2].negative else (-1, 3)),
    ),
    "the default dtype captured": Fault(
        "joint",
        r"Expected torch\.bfloat16 .*all in torch\.bfloat16 between two calls.*: torch\.float32",
        capture=keeps(dtype=lambda linear, scale, gain: torch.get_default_dtype()),
        compute=lambda op, ctx, x: op.right(x).to(op.dtype),
    ),
    "a dtype captured for good": Fault(
        "joint",
        r"Expected torch\.bfloat16 .*all in torch\.bfloat16 between two calls.*: torch\.float32",
        kept=True, capture=keeps(dtype=lambda linear, scale, gain: linear.weight.dtype),
        compute=lambda op, ctx, x: op.right(x).to(op.dtype),
    ),
    # Extra tensors.
    "ignores the gradient of the extra output": Fault(
        "extras", "gradient of input is wrong",
        fuser_backward=lambda op, ctxs, g, **kwargs: (
            Mixed.fuser_backward(op, ctxs, g, basic_op_grad_extra_outputs=[[None]])
        ),
    ),
    "cannot do without the gradient of the extra output": Fault(
        "extras", "gradient of input is wrong.*no gradient of the extra outputs",
        fuser_backward=lambda op, ctxs, g, *, basic_op_grad_extra_outputs: Mixed.fuser_backward(
            op, ctxs, g, basic_op_grad_extra_outputs=[
                [torch.ones_like(g) if e is None else e for e in es]
                for es in basic_op_grad_extra_outputs
            ],
        ),
    ),
    "wrong gradient of the extra input": Fault(
        "extras", "gradient of extra input 0 is wrong",
        **result(2, lambda extras, g, ctxs: [(2 * extras[0][0],)], "fuser_backward"),
    ),
    "no gradient of the extra input": Fault(
        "extras", "Backward must return 1 extra-input gradient .*Received: 0",
        **result(2, lambda extras, g, ctxs: [()], "fuser_backward"),
    ),
    "lists of the wrong length": Fault(
        "extras", "fuser_backward of a basic operation returns lists of one entry",
        **result(2, lambda extras, g, ctxs: [], "fuser_backward"),
    ),
    "gradients of the extra inputs that are a tensor": Fault(
        "extras", r"lists of gradients for each basic operation \(Mixed\)\. Received: Tensor as a",
        **result(2, lambda extras, g, ctxs: [extras[0][0]], "fuser_backward"),
    ),
    "lists that are a tensor": Fault(
        "extras", r"in their order \(Mixed\)\. Received: a tuple of Tensor, list, Tensor\.",
        **result(2, lambda extras, g, ctxs: extras[0][0], "fuser_backward"),
    ),
    "two results of a backward": Fault(
        "extras", r"in their order \(Mixed\)\. Received: a tuple of Tensor, list\.",
        fuser_backward=lambda op, ctxs, g, **kwargs: (
            Mixed.fuser_backward(op, ctxs, g, **kwargs)[:2]
        ),
    ),
    "the output alone": Fault(
        "extras", r"fuser_forward a pair \(Mixed\)\. Received: Tensor\.",
        fuser_forward=lambda op, ctxs, x, **kwargs: Mixed.fuser_forward(op, ctxs, x, **kwargs)[0],
    ),
    "extra outputs that are a tensor": Fault(
        "extras", r"a list of extra outputs for each basic operation \(Mixed\)\. Received: Tensor",
        **result(1, lambda extras, x, ctxs: [extras[0][0]]),
    ),
    "the output alone, of a fused operation": Fault(
        "forward joint",
        r"fuser_forward a pair \(op 1-3 \(Linear.*\)\)\. Received: Tensor",
        fuser_forward=lambda op, ctxs, x, **kw: LinearScaleGain.fuser_forward(op, ctxs, x)[0],
    ),
    "the input gradient alone, of a fused operation": Fault(
        "backward joint",
        r"in their order \(op 1-3 \(Linear.*\)\)\. Received: Tensor\.",
        fuser_backward=lambda op, ctxs, g, **kw: LinearScaleGain.fuser_backward(op, ctxs, g)[0],
    ),
    "wrong extra output": Fault(
        "extras", "The extra output 0 is wrong: error 0.1",
        **result(1, lambda extras, x, ctxs: [(extras[0][0] + 0.1,)]),
    ),
    "no extra output": Fault(
        "extras", r"fuser_forward must return one list of 1 extra output .*Received: \[0\]",
        **result(1, lambda extras, x, ctxs: [()]),
    ),
    "an extra output that is None": Fault(
        "extras", "Outputs are tensors .*extra output 0.*Received: NoneType",
        **result(1, lambda extras, x, ctxs: [(None,)]),
    ),
    "writes to the extra input": Fault(
        "extras", "The extra input 0 belongs to the caller",
        fuser_forward=lambda op, ctxs, x, *, basic_op_extra_inputs, **kwargs: writes(
            basic_op_extra_inputs[0][0].data,
            Mixed.fuser_forward(
                op, ctxs, x, basic_op_extra_inputs=basic_op_extra_inputs, **kwargs
            ),
        ),
    ),
    "a reference with fewer outputs": Fault(
        "extras", "The reference gives 1 output .*Received: 2",
        reference=lambda op, x, extra: x * extra,
    ),
}  # fmt: skip


def check(of: Any, fault: Fault, ops: list[nn.Module]) -> None:
    if of == "op":
        check_op(spoilt(Scaled, **fault.methods)(), torch.randn(5, 3))
    elif of == "extras":
        check_op(spoilt(Mixed, **fault.methods)(), torch.randn(5, 3), torch.randn(5, 3))
    else:
        build = spoilt(LinearScaleGain, **fault.methods)
        fusion = rule(of, functools.cache(build) if fault.kept else build)
        check_fusion(fusion, ops, torch.randn(5, 4))


@pytest.mark.parametrize(
    ("of", "name"), [(of, name) for name, fault in FAULTS.items() for of in fault.of]
)
def test_a_fault_is_found(of: str, name: str) -> None:
    # What a fusion writes to is the caller's if nothing stands in front of it.
    ops = operations() if "writes" in name else with_bias()
    with pytest.raises(AssertionError, match=f"(?s){FAULTS[name].text}") as error:
        check(of, FAULTS[name], ops)
    subject = {"op": "Scaled(), input float32 [5, 3]", "extras": "Mixed(), input float32 [5, 3]"}
    assert subject.get(of, "fusion 'mine'") in str(error.value)
    assert "mine" not in [info.name for info in opfuser.fusions()]


@pytest.mark.parametrize("rows", [2, 5])
def test_a_gradient_is_not_unpacked_into_its_rows(rows: int) -> None:
    """One of two rows would pass for the gradients of input and parameters."""
    op = spoilt(Scaled, op_backward=lambda op, ctx, dy: 2 * dy)()
    with pytest.raises(AssertionError) as error:
        check_op(op, torch.randn(rows, 3))
    assert str(error.value) == (
        "The backward of an operation returns gradients in their order (Scaled). Received: Tensor. "
        "Return grad_input and a tuple of the parameters' gradients from op_backward, and from "
        "fuser_backward also the extra inputs', a tuple for each basic operation. It happened in "
        f"Scaled(), input float32 [{rows}, 3]."
    )


SAVES_WEIGHT = saves(lambda ctx, x, w: (needed(ctx, x, w)[0], w))


def test_a_tensor_that_no_gradient_reads_is_a_waste_and_no_fault() -> None:
    """The text names it once, though several gradients are wanted in turn."""
    fusion = rule("joint", spoilt(LinearScaleGain, save=SAVES_WEIGHT))
    with pytest.warns(UnreadTensorWarning) as caught:
        check_fusion(fusion, with_bias(), torch.randn(5, 4))
    (warning,) = caught
    assert warning.filename == __file__
    assert str(warning.message) == (
        "A fusion saves what a gradient in ctx.needs reads, and nothing else (fusion 'mine', input "
        "float32 [5, 4], only the last parameter requires grad: saved for op 1 (BasicLinear)). "
        "Received: tensor 1, torch.float32, shape (3, 4), 48 bytes, which none reads. Ask "
        "ctx.needs before saving; keep dtypes and shapes on the context."
    )


def test_what_is_wrong_goes_before_what_is_wasted() -> None:
    wrong = spoilt(LinearScaleGain, save=SAVES_WEIGHT, grads=with_dx(lambda dx: dx * 1.01))
    with pytest.raises(AssertionError, match=r"The gradient of .* is wrong"):
        check_fusion(rule("joint", wrong), with_bias(), torch.randn(5, 4))


def test_a_waste_is_an_error_where_warnings_are() -> None:
    """As in the tests of the library: those of its own fusions save nothing without need."""
    fusion = rule("joint", spoilt(LinearScaleGain, save=SAVES_WEIGHT))
    with pytest.raises(UnreadTensorWarning, match="which none reads"):
        check_fusion(fusion, with_bias(), torch.randn(5, 4))


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


def test_a_missing_attribute_of_a_context_is_caught() -> None:
    def forgets(self: Any, ctxs: Any, x: Tensor, **kwargs: Any) -> Any:
        made = LinearScaleGain.fuser_forward(self, ctxs, x)
        del ctxs[2].factor
        return made

    fusion = rule("forward", spoilt(LinearScaleGain, fuser_forward=forgets))
    with pytest.raises(
        AssertionError, match=r"must have the attributes \['factor'\].*op 3 \(Gain\)"
    ):
        check_fusion(fusion, with_bias(), torch.randn(5, 4))


@pytest.mark.parametrize(
    ("pattern", "refuses", "text"),
    [
        ((BasicLinear, ConstantScale), lambda linear, scale, env: Refusal("SHAPE", "too narrow"),
         r"The fusion must match.*refused=1.*op 1: SHAPE: too narrow.*Plan for 4"),
        ((BasicLinear, AddExtraInput), None,
         "The fusion must match.*closest: 1 of 2 at op 1; LAYOUT: AddExtraInput is expected"),
    ],
)  # fmt: skip
def test_a_fusion_that_does_not_match_is_caught(pattern: Any, refuses: Any, text: str) -> None:
    fusion = Fusion("mine", "forward", pattern, FusedOperation, refuses)
    with pytest.raises(AssertionError, match=f"(?s){text}"):
        check_fusion(fusion, with_bias(), torch.randn(5, 4))


# Attributes: one at a time is read in backward; the others are those of forward.


class Flagged(BasicOperation):
    """``y = k x`` for a factor k that attributes of all kinds decide; forward freezes them."""

    late = ""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.times, self.negative, self.kind, self.more = 0.5, 3, False, "plain", None
        self.locked = 2.0

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "locked" and name in vars(self):
            raise AttributeError("locked is fixed")
        super().__setattr__(name, value)

    @property
    def strength(self) -> float:
        return self.__dict__.get("_strength", 1.0)

    @strength.setter
    def strength(self, value: float) -> None:
        self._strength = value

    def values(self) -> dict[str, Any]:
        names = ("scale", "times", "negative", "kind", "more", "locked", "strength")
        return {name: getattr(self, name) for name in names}

    @staticmethod
    def factor(v: dict[str, Any]) -> float:
        sign = (-1 if v["negative"] else 1) * {"plain": 1}.get(v["kind"], 7) * v["strength"]
        return sign * v["scale"] * v["times"] * v["locked"] + (v["more"] or 0)

    def op_forward(self, ctx: Any, input_: Tensor, **kwargs: Any) -> Tensor:
        ctx.frozen = self.values()
        return input_ * self.factor(ctx.frozen)

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        late = {name: v for name, v in self.values().items() if name == self.late}
        return grad_output * self.factor({**ctx.frozen, **late}), ()

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        return input_ * self.factor(self.values())


@pytest.mark.parametrize("name", ["scale", "times", "negative", "kind", "more", "strength"])
def test_an_attribute_read_in_backward_is_caught(name: str) -> None:
    check_op(Flagged(), torch.randn(5, 3))
    text = rf"The gradient of input is wrong.*\[5, 3\], {name} changed between forward and backward"
    with pytest.raises(AssertionError, match=f"(?s){text}"):
        check_op(spoilt(Flagged, late=name)(), torch.randn(5, 3))
