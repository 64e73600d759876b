"""Operations that return the wrong number of something."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import opfuser
from opfuser import AddExtraInput, Identity, MakeExtraOutput
from opfuser.errors import (
    ExtraInputGradientCountError,
    ExtraOutputCountError,
    HiddenOutputError,
    ParameterGradientCountError,
)
from opfuser.op import BasicOperation, FusedOperation
from tests.engine.toys import Mixed, Times, randn


def producer(channel: str = "skip", **kwargs: Any) -> MakeExtraOutput:
    op = MakeExtraOutput()
    op.set_extra_output_channel(0, channel, **kwargs)
    return op


def consumer(channel: str = "skip") -> AddExtraInput:
    op = AddExtraInput()
    op.set_extra_input_channel(0, channel)
    return op


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
        opfuser.Sequential(Identity(), op)(x, e)[0].sum().backward()
    assert text in str(error.value)


@pytest.mark.parametrize("grads_", [(), (None, None)])
def test_wrong_number_of_parameter_gradients(grads_: Any) -> None:
    class Wrong(Times):
        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return grad_output, grads_

    with pytest.raises(ParameterGradientCountError) as error:
        opfuser.Sequential(Identity(), Wrong())(randn(2, 3)).sum().backward()
    text = f"Expected op 1 to generate 1 param grads, but got {len(grads_)} (op 1 (Wrong))"
    assert text in str(error.value)


def test_a_hidden_output_that_is_needed_outside_its_fusion() -> None:
    class Hides(FusedOperation):
        def fuser_forward(self, ctxs: Any, input_: Tensor, **kwargs: Any) -> Any:
            return input_, [(), (None,)]

    def fuse(ops: Any, **unused: Any) -> Any:
        return [Hides(ops[:2]), *ops[2:]]

    seq = opfuser.Sequential(Identity(), producer(output_to_caller=False), consumer())
    with (
        opfuser.register_forward_fusion(fuse, prepend=True),
        pytest.raises(HiddenOutputError) as error,
    ):
        seq(randn(2))
    assert "Extra output 0 of op 1 is read by an operation outside its forward fusion" in str(
        error.value
    )
    assert "op 0-1 (Hides)" in str(error.value)


def test_extra_tensors_without_fuser_methods() -> None:
    class Lazy(BasicOperation):
        num_extra_inputs = 2

    with pytest.raises(NotImplementedError) as error:
        Lazy()(randn(2), randn(2), randn(2))
    assert "must implement fuser_forward and fuser_backward itself (Lazy)" in str(error.value)
    assert "Received: 2 extra inputs, 0 extra outputs" in str(error.value)
