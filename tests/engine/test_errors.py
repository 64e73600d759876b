"""Calls, inputs and results that do not fit are errors, which name the operation and the remedy."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser import GELU, AddExtraInput, Identity, Linear, RMSNorm, Sequential
from opfuser.errors import (
    ArgumentTypeError,
    BackwardResultError,
    ExtraInputCountError,
    ExtraInputGradientCountError,
    ExtraOutputCountError,
    ForwardResultError,
    GradientShapeError,
    HiddenOutputError,
    InputError,
    OpKwargsError,
    OverwrittenError,
    ParameterGradientCountError,
    ParametersNotKeptError,
    SavedTensorsError,
)
from opfuser.op import BasicOperation, FusedOperation
from tests.engine.toys import Mixed, Power, Times, Twice, consumer, producer, randn

# Inputs.


@pytest.mark.parametrize(
    ("call", "counts", "asked"),
    [
        (Sequential(Identity(), Mixed(), Twice(), AddExtraInput()), (2, 1),
         "op 1 (Mixed), op 2 (AddExtraInput)"),
        (Sequential(Identity(), Mixed()).plan, (1, 0), "op 1 (Mixed)"),
        (Mixed(), (1, 3), "op 0 (Mixed)"),
    ],
)  # fmt: skip
def test_a_wrong_number_of_extra_inputs(call: Any, counts: tuple[int, int], asked: str) -> None:
    """Hazard 7."""
    expected, given = counts
    with pytest.raises(ExtraInputCountError) as error:
        call(*(randn(2, 3) for _ in range(given + 1)))
    inputs = "1 extra input" if expected == 1 else f"{expected} extra inputs"
    assert str(error.value) == (
        f"Expected {inputs} but got {given} (read by {asked}). "
        "Pass one tensor per extra input after the main input, in operation order."
    )
    with pytest.raises(ExtraInputCountError, match="no operation reads any"):
        Sequential(Twice())(randn(2), randn(2))


@pytest.mark.parametrize(("bad", "kind"), [(None, "NoneType"), (3, "int"), ([1.0], "list")])
def test_inputs_that_are_no_tensors(bad: Any, kind: str) -> None:
    with pytest.raises(ArgumentTypeError, match=rf"are tensors\. Received: Tensor, {kind}"):
        Sequential(AddExtraInput())(randn(2), bad)
    with pytest.raises(ArgumentTypeError, match=rf"are tensors\. Received: {kind}"):
        Sequential(Identity())(bad)


def test_an_input_error_names_the_place() -> None:
    seq = Sequential(GELU(), RMSNorm(3), RMSNorm(4))
    with pytest.raises(InputError, match=r"It was raised in op 2 \(RMSNorm\) of the sequence"):
        seq(torch.ones(2, 3))
    with pytest.raises(InputError) as error:
        seq[1](torch.ones(2, 4))
    assert "came to" not in str(error.value)


@pytest.mark.parametrize("index", ["0", 0.0, None])
def test_the_index_of_a_channel_is_an_int(index: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="The index of an extra input is an int"):
        AddExtraInput().set_extra_input_channel(index, "r")


# op_kwargs, for a sequence of Power, Sequential, a plain module and Linear.

OP_KWARGS: list[tuple[Any, type[Exception], str]] = [
    (lambda seq: [1], OpKwargsError, "is a mapping. Received: list"),
    (lambda seq: 3, OpKwargsError, "is a mapping. Received: int"),
    (lambda seq: {0: 3}, OpKwargsError, "Received: int for 0"),
    (lambda seq: {0: None}, OpKwargsError, "Received: NoneType for 0"),
    (lambda seq: {0: {"power": 2}, seq[0]: {"power": 3}}, OpKwargsError,
     "an operation that another key names too"),
    (lambda seq: {2: {"power": 2}}, OpKwargsError, "key 2, which is Twice"),
    (lambda seq: {1: {"power": 2}}, OpKwargsError, "key 1, which is Sequential"),
    (lambda seq: {3: {"power": 2}}, OpKwargsError, "key 3, which is Linear"),
    (lambda seq: {seq[2]: {}}, OpKwargsError, "a key of type Twice"),
    (lambda seq: {Linear(3, 3): {}}, OpKwargsError, "a key of type Linear"),
    (lambda seq: {"0": {}}, OpKwargsError, "a key of type str"),
    (lambda seq: {Power(): {}}, OpKwargsError, "keys that are not in this Sequential"),
    (lambda seq: {Power(): {"power": 1}}, OpKwargsError, "an operation of type Power"),
    (lambda seq: {0: {"pow": 2}}, OpKwargsError, "(Power). Received: pow"),
    (lambda seq: {4: {}}, IndexError, "Index 4 is out of range"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "kind", "text"), OP_KWARGS)
def test_wrong_op_kwargs(wrong: Any, kind: type[Exception], text: str) -> None:
    seq = Sequential(Power(), Sequential(Power()), Twice(), Linear(3, 3))
    with pytest.raises(kind) as error:
        seq(randn(2, 3), op_kwargs=wrong(seq))
    assert text in str(error.value)


def test_a_wrong_keyword_of_an_operation_alone() -> None:
    with pytest.raises(OpKwargsError, match=r"GELU\). Received: speed"):
        GELU()(randn(2), speed=3)


def test_keywords_of_an_operation_that_takes_none() -> None:
    op, x = AddExtraInput(), randn(2)
    calls = (
        lambda: op(x, x, scale=2),
        lambda: Sequential(op)(x, x, op_kwargs={0: {"scale": 2}}),
        lambda: opfuser.OperationFuser([op])(x, x, basic_op_kwargs=[{"scale": 2}]),
    )
    for call in calls:
        with pytest.raises(OpKwargsError, match=r"^AddExtraInput takes no keywords.*: scale"):
            call()


# What operations return.


class Broken(Mixed):
    """Gives back lists of the lengths that it is told."""

    outputs: Any = ((1,),)
    params: Any = ((),)
    extras: Any = ((None,),)

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **kwargs: Any) -> Any:
        return input_ * 1, [tuple(y and input_ for y in ys) for ys in self.outputs]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **kwargs: Any) -> Any:
        return grad_output, self.params, self.extras


@pytest.mark.parametrize(
    ("attributes", "kind", "text"),
    [
        ({"outputs": []}, ExtraOutputCountError,
         "Expected extra outputs for 1 basic operation, but got 0 (op 1 (Broken))"),
        ({"outputs": [()]}, ExtraOutputCountError,
         "Expected op 1 to generate 1 extra output, but got 0 (op 1 (Broken))"),
        ({"outputs": [(1, 1)]}, ExtraOutputCountError,
         "Expected op 1 to generate 1 extra output, but got 2"),
        ({"outputs": [(None,)]}, HiddenOutputError,
         "Extra output 0 of op 1 is public, but None was returned for it (op 1 (Broken))"),
        ({"params": []}, ParameterGradientCountError,
         "Expected gradients for 1 basic operation, but got 0 lists of param grads and 1 of"),
        ({"params": [(None,)]}, ParameterGradientCountError,
         "Expected op 1 to generate 0 param grads, but got 1 (op 1 (Broken))"),
        ({"extras": []}, ParameterGradientCountError, "1 list of param grads and 0 of extra-"),
        ({"extras": [()]}, ExtraInputGradientCountError,
         "Expected op 1 to generate grads for 1 extra input, but got 0 (op 1 (Broken))"),
    ],
)  # fmt: skip
def test_wrong_numbers_of_results(attributes: Any, kind: type[Exception], text: str) -> None:
    op = type("Broken", (Broken,), attributes)()
    x, e = randn(2, grad=True), randn(2, grad=True)
    with pytest.raises(kind) as error:
        Sequential(Identity(), op)(x, e)[0].sum().backward()
    assert text in str(error.value)


# What operations do with their contexts, and what shapes their gradients have. Each operation is
# the second one of a sequence, in front of another one.


class Doubled(BasicOperation):
    """Right, with a weight of the size of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Any:
        if ctx.requires_grad:
            ctx.save_for_backward(input_)
        return 2 * input_

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return 2 * grad_output, (None,)


def forward(name: str, result: Callable[[Any, Any, Tensor], Any], **more: Any) -> type[Doubled]:
    """An operation that returns ``result(op, ctx, input)`` from forward."""

    def op_forward(self: Any, ctx: Any, input_: Tensor, **unused: Any) -> Any:
        return result(self, ctx, input_)

    return type(name, (Doubled,), {"op_forward": op_forward, **more})


def backward(
    name: str, result: Callable[[Tensor], Any], reads: Callable[[Any], Any] = id
) -> type[Doubled]:
    """An operation that returns ``result(grad_output)`` from backward, and reads its context."""

    def op_backward(self: Any, ctx: Any, grad_output: Tensor) -> Any:
        reads(ctx)
        return result(grad_output)

    return type(name, (Doubled,), {"op_backward": op_backward})


def _saving(*numbers: Any) -> Callable[[Any, Any, Tensor], Any]:
    """Saves the input with each of these besides, in a call each."""

    def result(op: Any, ctx: Any, x: Tensor) -> Tensor:
        for more in numbers:
            ctx.save_for_backward(x, *more)
        return x

    return result


READS_SAVED = forward(
    "ReadsSavedInForward", lambda op, ctx, x: ctx.save_for_backward(x) or ctx.saved_tensors[0]
)
READS_PARAMETERS = forward(
    "ReadsParametersInForward",
    lambda op, ctx, x: x * ctx.parameters[0],
    backward_reads_parameters=True,
)
WRITES_TO_INPUT = forward("WritesToInput", lambda op, ctx, x: x.mul_(2))
READS_WHAT_WAS_NOT_SAVED = type(
    "ReadsWhatWasNotSaved",
    (forward("", lambda op, ctx, x: 2 * x), backward("", torch.neg, lambda c: c.saved_tensors[0])),
    {},
)
RETURNS = "The backward of an operation returns gradients in their order (op 1 (Wrong)). Received: "
SHAPE = "A gradient has the shape of what it is the gradient of (op 1 (Wrong)). Received: shape "
WRONG_FORWARDS: list[tuple[type[Doubled], type[Exception], str]] = [
    (READS_SAVED, SavedTensorsError,
     ("ctx.saved_tensors is what forward saved, read in backward. Received: nothing that was "
     "saved. Call ctx.save_for_backward in forward if ctx.requires_grad; in forward, use the "
     "tensors themselves. It happened in the forward of op 1 (ReadsSavedInForward).")),
    (forward("SavesTwice", _saving((), (None,))), SavedTensorsError,
     ("An operation calls ctx.save_for_backward once. Received: 2 tensors after 1. Save all of "
     "them in one call. It happened in the forward of op 1 (SavesTwice).")),
    (forward("SavesNumber", _saving((3,))), SavedTensorsError,
     ("ctx.save_for_backward takes tensors and None (op 1 (SavesNumber)). Received: int. Set "
     "anything else as an attribute of ctx.")),
    (READS_PARAMETERS, ParametersNotKeptError,
     ("ctx.parameters is the parameters of the forward call, kept for backward. Received: none "
     "that were kept. Set backward_reads_parameters = True in the operation's class; in forward, "
     "read parameters from self. It happened in the forward of op 1 (ReadsParametersInForward).")),
    (forward("ReturnsNothing", lambda op, ctx, x: None), ArgumentTypeError,
     ("op_forward returns a tensor, fuser_forward a pair (op 1 (ReturnsNothing)). Received: "
     "NoneType. Return the output from op_forward, and the pair of the output and the list of each "
     "basic operation's extra outputs from fuser_forward.")),
    (forward("ReturnsPair", lambda op, ctx, x: (x, [()])), ForwardResultError,
     "fuser_forward a pair (op 1 (ReturnsPair)). Received: a tuple of Tensor, list. Return"),
    (WRITES_TO_INPUT, OverwrittenError,
     ("An operation does not write to what it is given (op 1 (WritesToInput)). Received: an input "
     "that requires grad, written to. Return another tensor; clone what is computed in place.")),
]  # fmt: skip
WRONG_BACKWARDS: list[tuple[type[Doubled], type[Exception], str]] = [
    (READS_WHAT_WAS_NOT_SAVED, SavedTensorsError,
     "It happened in the backward of op 1 (ReadsWhatWasNotSaved)."),
    (backward("ReadsParametersWithoutFlag", torch.neg, lambda ctx: ctx.parameters[0]),
     ParametersNotKeptError,
     "It happened in the backward of op 1 (ReadsParametersWithoutFlag)."),
    (backward("Wrong", lambda dy: dy), BackwardResultError,
     RETURNS + "Tensor. Return grad_input and a tuple of the parameters' "
     "gradients from op_backward, and from fuser_backward also the extra inputs', a tuple for each "
     "basic operation."),
    (backward("Wrong", lambda dy: (dy, ())), ParameterGradientCountError,
     "Expected op 1 to generate 1 param grads, but got 0 (op 1 (Wrong))"),
    (backward("Wrong", lambda dy: dy.T), BackwardResultError, RETURNS + "Tensor. Return"),
    (backward("Wrong", lambda dy: None), BackwardResultError, RETURNS + "NoneType. Return"),
    (backward("Wrong", lambda dy: (dy, (), ())), BackwardResultError,
     RETURNS + "a tuple of Tensor, tuple, tuple. Return"),
    (backward("Wrong", lambda dy: (dy, dy.sum(0))), BackwardResultError,
     RETURNS + "a tuple of Tensor, Tensor. Return"),
    (backward("Wrong", lambda dy: (dy, 3)), BackwardResultError,
     RETURNS + "a tuple of Tensor, int. Return"),
    (backward("Wrong", lambda dy: (3, (None,))), BackwardResultError,
     ("A gradient is a tensor or None (op 1 (Wrong)). Received: int as the gradient of the input. "
     "Return None for a gradient of zero.")),
    (backward("Wrong", lambda dy: (dy, [1.0])), BackwardResultError,
     "(op 1 (Wrong)). Received: float as the gradient of gamma."),
    (backward("Wrong", lambda dy: (dy[0], (None,))), GradientShapeError,
     SHAPE + "(3,) for the input of shape (2, 3). Sum it over the dimensions that forward "
     "broadcast, or reshape it, in backward."),
    (backward("Wrong", lambda dy: (dy.flatten(), (None,))), GradientShapeError,
     SHAPE + "(6,) for the input of shape (2, 3)."),
    (backward("Wrong", lambda dy: (dy, (dy.sum(1),))), GradientShapeError,
     SHAPE + "(2,) for gamma of shape (3,)."),
    (backward("Wrong", lambda dy: (dy.mul_(2), (None,))), OverwrittenError,
     ("An operation does not write to what it is given (op 1 (Wrong)). Received: the gradient of "
     "the output, written to.")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    WRONG_FORWARDS,
    ids=[wrong.__name__ for wrong, *_ in WRONG_FORWARDS],
)
@pytest.mark.parametrize("behind", [Identity, Twice])
def test_a_wrong_forward(wrong: Any, kind: type[Exception], text: str, behind: Any) -> None:
    """Named also where the operation behind it is who fails, or where none does."""
    with pytest.raises(kind) as error:
        Sequential(Identity(), wrong(), behind())(randn(2, 3, grad=True))
    assert text in str(error.value)


def test_what_is_no_wrong_write() -> None:
    """To what has no gradient, to what an operation has made itself, and where none is recorded."""
    x, times = randn(2, 3), Times()
    doubled = 2 * x
    assert torch.equal(Sequential(WRITES_TO_INPUT())(x), doubled)  # its parameter needs a gradient
    y = Sequential(times, WRITES_TO_INPUT())(x.requires_grad_())
    assert torch.equal(y, 2 * doubled * times.w)
    with torch.no_grad():
        Sequential(WRITES_TO_INPUT())(x)
    assert torch.equal(x.detach(), 2 * doubled)


@pytest.mark.parametrize(("wrong", "kind", "text"), WRONG_BACKWARDS)
def test_a_wrong_backward(wrong: Any, kind: type[Exception], text: str) -> None:
    y = Sequential(Identity(), wrong(), Identity())(randn(2, 3, grad=True))
    with pytest.raises(kind) as error:
        y.backward(randn(2, 3))
    assert text in str(error.value)


@pytest.mark.parametrize("shape", [(2, 3), (2, 2), (3, 2)])
def test_a_wrong_result_of_a_fused_operation(shape: tuple[int, int]) -> None:
    """Also a tensor of as many rows as there are results, and columns as there are operations."""

    class Pair(FusedOperation):
        result: Any = None
        grads: Any = None

        def fuser_forward(self, ctxs: Any, input_: Tensor, **unused: Any) -> Any:
            return input_ * 1 if self.result is None else self.result

        def fuser_backward(self, ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
            return grad_output if self.grads is None else self.grads

    pair = Pair([Identity(), Identity()])
    x, dy = randn(*shape, grad=True), randn(*shape)
    with pytest.raises(ForwardResultError, match=r"\(op 1-2 \(Pair\)\)\. Received: Tensor\."):
        Sequential(Identity(), pair)(x)
    pair.result = x.detach() * 1, [(), ()]
    y = Sequential(Identity(), pair)(x)
    with pytest.raises(BackwardResultError, match=r"\(op 1-2 \(Pair\)\)\. Received: Tensor\."):
        y.backward(dy)
    pair.grads = dy, [(), ()], []
    with pytest.raises(ParameterGradientCountError, match="empty for one without"):
        Sequential(Identity(), pair)(x).backward(dy)


def test_a_wrong_shape_of_the_gradient_of_an_extra_input() -> None:
    class Wrong(Mixed):
        def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
            return grad_output, [()], [(grad_output[0],)]

    x, e = randn(2, 3, grad=True), randn(2, 3, grad=True)
    text = r"\(op 1 \(Wrong\)\). Received: shape \(3,\) for extra input 0 of shape \(2, 3\)"
    with pytest.raises(GradientShapeError, match=text):
        Sequential(Identity(), Wrong())(x, e)[0].sum().backward()


def test_what_autograd_sums_is_right() -> None:
    """A gradient with the dimensions that forward broadcast, of a parameter or at the front."""
    whole = backward("Whole", lambda dy: (2 * dy, (dy,)))()
    x = randn(3, grad=True)
    dy = randn(2, 3)

    class Repeats(Doubled):
        def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Any:
            return input_.expand(2, 3)

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return grad_output, (None,)

    Sequential(Repeats(), whole)(x).backward(dy)
    torch.testing.assert_close(x.grad, 2 * dy.sum(0))
    torch.testing.assert_close(whole.gamma.grad, dy.sum(0))


def test_gradients_that_nobody_needs_may_be_anything() -> None:
    wrong = backward("Wrong", lambda dy: (dy.flatten(), (dy.sum(1),)))()
    wrong.gamma.requires_grad_(False)
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    class Weighted(Doubled):
        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return "nothing", (grad_output.sum(0),)

    first = Weighted()
    first.gamma = weight
    Sequential(first)(randn(2, 3)).sum().backward()
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 2))
    with pytest.raises(GradientShapeError, match="for the input"):
        Sequential(first, wrong)(randn(2, 3)).sum().backward()
    with pytest.raises(GradientShapeError, match="for the input"):
        wrong(randn(2, 3, grad=True)).sum().backward()


def test_another_number_of_dimensions_is_verified_too() -> None:
    seq = Sequential(
        Identity(), backward("Wrong", lambda dy: (dy, (dy.sum((0, -1)[: dy.dim() - 1]),)))()
    )
    for _ in range(2):
        seq(randn(2, 3, grad=True)).sum().backward()
    with pytest.raises(GradientShapeError, match=r"shape \(2,\) for gamma of shape \(3,\)"):
        seq(randn(4, 2, 3, grad=True)).sum().backward()


def test_a_hidden_output_that_is_needed_outside_its_fusion() -> None:
    class Hides(FusedOperation):
        def fuser_forward(self, ctxs: Any, input_: Tensor, **kwargs: Any) -> Any:
            return input_, [(), (None,)]

    def fuse(ops: Any, **unused: Any) -> Any:
        return [Hides(ops[:2]), *ops[2:]]

    seq = Sequential(Identity(), producer(output_to_caller=False), consumer())
    with (
        opfuser.register_forward_fusion(fuse, prepend=True),
        pytest.raises(HiddenOutputError) as error,
    ):
        seq(randn(2))
    text = str(error.value)
    assert "Extra output 0 of op 1 is read by an operation outside its forward fusion" in text
    assert "op 0-1 (Hides)" in text


def test_hazard_22_no_text_of_an_error_has_unfilled_braces() -> None:
    root = Path(opfuser.__file__).parent
    # Strings with braces that are no f-strings: few files have any, and are worth parsing.
    plain = re.compile(r"""(?<![\w"'])(?:"[^"\n]*\{|'[^'\n]*\{)""")
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py"))}
    found = []
    for path, source in texts.items():
        if not plain.search(source):
            continue
        for node in ast.walk(ast.parse(source)):
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


# Rows of a tensor that stands where a list is expected do not pass for the list's entries.
AS_LISTS: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "all extra outputs": (
        lambda y, extras: (y, extras[0][0]), ForwardResultError,
        "fuser_forward a pair (op 0 (Rows)). Received: a tuple of Tensor, Tensor. Return the",
    ),
    "extra outputs": (
        lambda y, extras: (y, [extras[0][0]]), ForwardResultError,
        ("fuser_forward returns a list of extra outputs for each basic operation (op 0 (Rows)). "
        "Received: Tensor as the list of op 0. Return (extra,) for a single one, and () for none."),
    ),
    "all parameter gradients": (
        lambda dx, grads, extras: (dx, dx, extras), BackwardResultError,
        "in their order (op 0 (Rows)). Received: a tuple of Tensor, Tensor, list. Return grad_in",
    ),
    "all extra-input gradients": (
        lambda dx, grads, extras: (dx, grads, extras[0][0]), BackwardResultError,
        "in their order (op 0 (Rows)). Received: a tuple of Tensor, list, Tensor. Return grad_in",
    ),
    "extra-input gradients": (
        lambda dx, grads, extras: (dx, grads, [extras[0][0]]), BackwardResultError,
        ("fuser_backward returns lists of gradients for each basic operation (op 0 (Rows)). "
        "Received: Tensor as a list of op 0. Return (grad,) for a single one, and () for none."),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AS_LISTS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 2)])
def test_a_tensor_where_a_list_is_expected(name: str, shape: tuple[int, int]) -> None:
    result, kind, text = AS_LISTS[name]
    method = "fuser_forward" if kind is ForwardResultError else "fuser_backward"

    class Rows(Mixed):
        pass

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        return result(*getattr(Mixed, method)(self, *args, **kwargs))

    setattr(Rows, method, wrong)

    def step() -> None:
        y, more = Sequential(Rows())(randn(*shape, grad=True), randn(*shape, grad=True))
        (y.sum() + more.sum()).backward()

    with pytest.raises(kind) as error:
        step()
    assert text in str(error.value)
