"""Calls, inputs and results that do not fit are errors, which name the operation and the remedy."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opfuser
from opfuser import GELU, AddExtraInput, Identity, Linear, RMSNorm, Sequential
from opfuser.errors import (
    ArgumentTypeError,
    ExtraInputCountError,
    ExtraInputGradientCountError,
    ExtraOutputCountError,
    HiddenOutputError,
    InputError,
    OpKwargsError,
    ParameterGradientCountError,
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
    assert str(error.value) == (
        f"Expected {expected} extra inputs but got {given} (asked for by {asked}). "
        "Pass one tensor per extra input after the main input, in operation order."
    )
    with pytest.raises(ExtraInputCountError, match="no operation asks for any"):
        Sequential(Twice())(randn(2), randn(2))


@pytest.mark.parametrize(("bad", "kind"), [(None, "NoneType"), (3, "int"), ([1.0], "list")])
def test_inputs_that_are_no_tensors(bad: Any, kind: str) -> None:
    with pytest.raises(ArgumentTypeError, match=rf"are tensors\. Received: Tensor, {kind}"):
        Sequential(AddExtraInput())(randn(2), bad)
    with pytest.raises(ArgumentTypeError, match=rf"are tensors\. Received: {kind}"):
        Sequential(Identity())(bad)


def test_an_input_error_names_the_place() -> None:
    seq = Sequential(GELU(), RMSNorm(3), RMSNorm(4))
    with pytest.raises(InputError, match=r"It came to op 2 \(RMSNorm\) of the sequence"):
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
         "Expected extra outputs for 1 basic operations, but got 0 (op 1 (Broken))"),
        ({"outputs": [()]}, ExtraOutputCountError,
         "Expected op 1 to generate 1 extra outputs, but got 0 (op 1 (Broken))"),
        ({"outputs": [(1, 1)]}, ExtraOutputCountError,
         "Expected op 1 to generate 1 extra outputs, but got 2"),
        ({"outputs": [(None,)]}, HiddenOutputError,
         "Extra output 0 of op 1 is public, but None was returned for it (op 1 (Broken))"),
        ({"params": []}, ParameterGradientCountError,
         "Expected gradients for 1 basic operations, but got 0 lists of param grads and 1 of"),
        ({"params": [(None,)]}, ParameterGradientCountError,
         "Expected op 1 to generate 0 param grads, but got 1 (op 1 (Broken))"),
        ({"extras": []}, ParameterGradientCountError, "1 lists of param grads and 0 of extra-"),
        ({"extras": [()]}, ExtraInputGradientCountError,
         "Expected op 1 to generate grads for 1 extra inputs, but got 0 (op 1 (Broken))"),
    ],
)  # fmt: skip
def test_wrong_numbers_of_results(attributes: Any, kind: type[Exception], text: str) -> None:
    op = type("Broken", (Broken,), attributes)()
    x, e = randn(2, grad=True), randn(2, grad=True)
    with pytest.raises(kind) as error:
        Sequential(Identity(), op)(x, e)[0].sum().backward()
    assert text in str(error.value)


@pytest.mark.parametrize("grads_", [(), (None, None)])
def test_wrong_number_of_parameter_gradients(grads_: Any) -> None:
    class Wrong(Times):
        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return grad_output, grads_

    with pytest.raises(ParameterGradientCountError) as error:
        Sequential(Identity(), Wrong())(randn(2, 3)).sum().backward()
    text = f"Expected op 1 to generate 1 param grads, but got {len(grads_)} (op 1 (Wrong))"
    assert text in str(error.value)


@pytest.mark.parametrize("grad", [False, True])
def test_a_forward_that_returns_nothing(grad: bool) -> None:
    class Forgets(BasicOperation):
        def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Any:
            return None

    with pytest.raises(ArgumentTypeError) as error:
        Sequential(Identity(), Forgets())(randn(2, grad=grad))
    assert str(error.value) == (
        "The forward of an operation returns a tensor (op 1 (Forgets)). Received: NoneType."
    )


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


def test_extra_tensors_without_fuser_methods() -> None:
    class Lazy(BasicOperation):
        num_extra_inputs = 2

    with pytest.raises(NotImplementedError) as error:
        Lazy()(randn(2), randn(2), randn(2))
    assert "must implement fuser_forward and fuser_backward itself (Lazy)" in str(error.value)
    assert "Received: 2 extra inputs, 0 extra outputs" in str(error.value)


def test_hazard_22_no_text_of_an_error_has_unfilled_braces() -> None:
    root = Path(opfuser.__file__).parent
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
