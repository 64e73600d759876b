from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from opfuser import Linear, PointwiseOperation, Sequential
from opfuser.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingImplementationError,
)
from opfuser.testing import check_op
from tests.basic.values import DTYPES, HALF

# The tracer of torch.compile makes an instance of Function, against torch's own advice.
TRACED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class Swish(PointwiseOperation):
    """With a derivative of its own."""

    def value(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.constants[0] * x)

    def derivative(self, x: Tensor) -> Tensor:
        s = torch.sigmoid(self.constants[0] * x)
        return s + self.constants[0] * x * s * (1 - s)


class Mish(PointwiseOperation):
    """With that of autograd."""

    def value(self, x: Tensor) -> Tensor:
        return x * torch.tanh(F.softplus(x))


@pytest.fixture(params=["given", "by autograd"])
def op(request: pytest.FixtureRequest) -> PointwiseOperation:
    return Swish(1.3) if request.param == "given" else Mish()


def test_as_exact_as_torch(op: PointwiseOperation) -> None:
    for shape in ((5, 7), (2, 3, 4), (6,)):
        check_op(op, torch.randn(shape), dtypes=DTYPES)
    with torch.autocast("cpu", torch.bfloat16):
        assert op(torch.ones(2)).dtype == torch.bfloat16
        check_op(op, torch.randn(5, 7))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rounds_once(op: PointwiseOperation, dtype: torch.dtype) -> None:
    x = (3 * torch.randn(4000)).to(dtype).requires_grad_()
    y = op(x)
    assert torch.equal(y, op.value(x.float()).to(dtype))
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx, op.derivative(x.float()).to(dtype))


def test_derivative_leaves_the_input_alone(op: PointwiseOperation) -> None:
    x = torch.randn(5)
    slope = op.derivative(x)
    assert not slope.requires_grad
    assert not x.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(op.derivative(x), slope)


def test_no_work_for_a_gradient_that_nobody_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mish, "derivative", lambda self, x: pytest.fail("derivative"))
    linear = Linear(3, 3)
    Sequential(linear, linear)(torch.ones(2, 3))
    y = Sequential(Mish(), Linear(4, 3))(torch.ones(2, 4))
    y.sum().backward()


def leaves_autograd(x: Tensor) -> Tensor:
    return torch.from_numpy(np.tanh(x.detach().cpu().numpy()))


# To autograd the first three, whose derivative is zero, look like the others, whose is not.
NOT_FOLLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "a constant": lambda x: torch.full_like(x, 2.0),
    "a comparison": lambda x: (x > 0).to(x.dtype),
    "heaviside": lambda x: torch.heaviside(x, torch.full_like(x, 0.5)),
    "detached": lambda x: x.detach() * 2,
    "without grad": torch.no_grad()(lambda x: x * x),
    "elsewhere": leaves_autograd,
    "other leaves": lambda x: torch.ones_like(x).requires_grad_() * 2,
}


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_no_derivative_is_guessed(name: str) -> None:
    kind = type("Mine", (PointwiseOperation,), {"value": lambda _, x: NOT_FOLLOWED[name](x)})
    linear = Linear(3, 3)
    y = Sequential(linear, kind())(torch.ones(2, 3))
    with pytest.raises(
        MissingImplementationError,
        match=r"(?m)^A pointwise operation gives the derivative that autograd does not find "
        r"\(Mine\)\. Received: a value that autograd cannot follow back to x\. Implement "
        r"derivative\(x\), for a constant or a step by torch\.zeros_like\(x\); or write value\(x\) "
        r"in differentiable torch\.$",
    ):
        y.sum().backward()
    with torch.no_grad():
        Sequential(linear, kind())(torch.ones(2, 3))


@TRACED
@pytest.mark.parametrize("name", ["a comparison", "detached"])
def test_no_derivative_is_guessed_by_the_compiler(name: str) -> None:
    torch.compiler.reset()
    kind = type("Mine", (PointwiseOperation,), {"value": lambda _, x: NOT_FOLLOWED[name](x)})
    compiled = torch.compile(Sequential(kind()), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"derivative that autograd does not find \(Mine\)"):
        compiled(torch.randn(5, 7, requires_grad=True))


def test_another_error_of_autograd_stays() -> None:
    class Spoilt(PointwiseOperation):
        def value(self, x: Tensor) -> Tensor:
            y = x.exp()
            return y * y.add_(1)

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Sequential(Spoilt())(x).sum().backward()


class Step(PointwiseOperation):
    def value(self, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    def derivative(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class Sign(PointwiseOperation):
    """Of which autograd knows that the derivative is zero."""

    def value(self, x: Tensor) -> Tensor:
        return torch.sign(x)


@pytest.mark.parametrize("kind", [Step, Sign])
def test_steps(kind: type[PointwiseOperation]) -> None:
    check_op(kind(), torch.randn(5, 7), dtypes=DTYPES, zero_rows=True)
    x = torch.randn(5, 7, requires_grad=True)
    Sequential(kind(), Linear(7, 3))(x).sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


@TRACED
@pytest.mark.parametrize("op", [Swish(1.3), Mish(), Sign()], ids=repr)
def test_compiled_whole(op: PointwiseOperation) -> None:
    torch.compiler.reset()
    seq = Sequential(op)
    compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 7, requires_grad=True)
    results = [(y := run(x), *torch.autograd.grad(y.sum(), x)) for run in (compiled, seq)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("number", [Fraction(1, 2), np.float32(0.5)], ids=repr)
def test_constants_become_floats(number: Any) -> None:
    op = Swish(number, 2, True)
    assert list(map(type, op.constants)) == [float] * 3
    assert repr(op) == "Swish(0.5, 2.0, 1.0)"
    assert repr(Mish()) == "Mish()"
    check_op(op, torch.randn(5, 7))


def test_constants_are_numbers() -> None:
    with pytest.raises(
        ArgumentTypeError,
        match=r"^A constant of a pointwise operation must be a real Python number \(Swish\)\. "
        r"Received: a tensor\. Compute anything else outside of the operation\.$",
    ):
        Swish(torch.ones(()))
    with pytest.raises(ArgumentTypeError, match=r"Received: 'two'\."):
        Swish("two")


@pytest.mark.parametrize("place", ["mish", "module:", ":mish", "module.mish", ""])
def test_place_of_a_device_function(place: str) -> None:
    kind = type("Mine", (Mish,), {"device_function": place})
    with pytest.raises(
        ArgumentError,
        match=r"^The place of a device function is written as 'module:name' \(Mine\)\. "
        rf"Received: '{place}'\.$",
    ):
        kind()


def test_the_function_has_to_be_given() -> None:
    with pytest.raises(
        MissingImplementationError,
        match=r"^A pointwise operation gives its function in torch \(PointwiseOperation\)\. "
        r"Implement value\(x\)\.$",
    ):
        PointwiseOperation()(torch.ones(2))


def test_may_keep_something_on_itself() -> None:
    class Counts(PointwiseOperation):
        calls = 0

        def value(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x.sin()

        def derivative(self, x: Tensor) -> Tensor:
            return x.cos()

    op, x = Counts(), torch.randn(3, 8, requires_grad=True)
    for n in range(1, 4):
        y = op(x)
        assert op.calls == n
        torch.testing.assert_close((y, *torch.autograd.grad(y.sum(), x)), (x.sin(), x.cos()))
