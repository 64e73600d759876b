"""Channels: routing, gradients, what a fused operation may leave out, and the texts of errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import F64, close, fill, leaf, rand


def tap(name: str | None, public: bool = False) -> of.MakeExtraOutput:
    return of.MakeExtraOutput().set_extra_output_channel(0, name, output_to_caller=public)


def add(name: str) -> of.AddExtraInput:
    return of.AddExtraInput().set_extra_input_channel(0, name)


def run(ops: list[nn.Module], how: str) -> Any:
    """The error may come from construction or from the first call, as a user meets it."""
    if how == "fuser":
        return of.OperationFuser(ops)(rand(3, 8))
    return of.Sequential(*ops)(rand(3, 8))


@pytest.mark.parametrize("how", ["sequential", "fuser"])
@pytest.mark.parametrize(
    ("ops", "text", "where"),
    [
        (lambda: [tap("a"), add("b")], "has no producer", ["'b'", "op 1 (AddExtraInput)"]),
        (
            lambda: [of.Identity(), add("a"), tap("a")],
            "has no earlier producer",
            ["'a'", "op 1 (AddExtraInput)", "op 2 (MakeExtraOutput)"],
        ),
        (
            lambda: [tap("a"), of.Identity(), tap("a"), add("a")],
            "multiple producers",
            ["'a'", "op 0 (MakeExtraOutput)", "op 2 (MakeExtraOutput)"],
        ),
    ],
)
def test_errors_of_routing(ops: Any, text: str, where: list[str], how: str) -> None:
    with pytest.raises(ValueError, match=text) as error:
        run(ops(), how)
    for part in where:
        assert part in str(error.value)


def test_errors_of_routing_across_a_plain_module() -> None:
    with pytest.raises(ValueError, match="has no earlier producer"):
        run([add("a"), nn.Identity(), tap("a")], "sequential")
    with pytest.raises(ValueError, match="multiple producers"):
        run([tap("a"), nn.Identity(), tap("a")], "sequential")
    with pytest.raises(ValueError, match="has no producer"):
        run([tap("b"), nn.Identity(), add("a")], "sequential")


@pytest.mark.parametrize("index", [-1, 1, 5])
def test_errors_of_indices(index: int) -> None:
    with pytest.raises(IndexError, match="out of range") as error:
        of.AddExtraInput().set_extra_input_channel(index, "a")
    assert "AddExtraInput" in str(error.value)
    with pytest.raises(IndexError, match="out of range"):
        of.MakeExtraOutput().set_extra_output_channel(index, "a")


def test_an_operation_without_extra_tensors_has_no_slot() -> None:
    with pytest.raises(IndexError, match="out of range"):
        of.Identity().set_extra_input_channel(0, "a")
    with pytest.raises(IndexError, match="out of range"):
        of.Identity().set_extra_output_channel(0, "a")


@pytest.mark.parametrize("name", ["", 3, b"a", ("a",)])
def test_errors_of_names(name: Any) -> None:
    with pytest.raises(ValueError, match="non-empty string"):
        of.AddExtraInput().set_extra_input_channel(0, name)
    with pytest.raises(ValueError, match="non-empty string"):
        of.MakeExtraOutput().set_extra_output_channel(0, name)


@pytest.mark.parametrize("value", [None, 1, 0, "no"])
def test_output_to_caller_must_be_a_bool(value: Any) -> None:
    with pytest.raises(TypeError, match="output_to_caller must be a bool"):
        of.MakeExtraOutput().set_extra_output_channel(0, "a", output_to_caller=value)


@pytest.mark.parametrize("how", ["sequential", "fuser"])
def test_rebinding_after_capture(how: str) -> None:
    ops = [tap("a"), add("a")]
    run(list(ops), how)
    for rebind in (
        lambda: ops[0].set_extra_output_channel(0, "b"),
        lambda: ops[0].set_extra_output_channel(0, None),
        lambda: ops[1].set_extra_input_channel(0, "b"),
        lambda: ops[1].set_extra_input_channel(0, None),
    ):
        with pytest.raises(RuntimeError, match="already captured its channel routing"):
            rebind()
    x = rand(3, 8)
    close(of.Sequential(*ops)(x), 2 * x)


def test_constructing_a_fuser_captures() -> None:
    ops = [tap("a"), add("a")]
    of.OperationFuser(ops)
    with pytest.raises(RuntimeError, match="already captured its channel routing"):
        ops[1].set_extra_input_channel(0, "b")


def test_binding_returns_the_operation_and_none_unbinds() -> None:
    op = of.AddExtraInput()
    assert op.set_extra_input_channel(0, "a") is op
    op.set_extra_input_channel(0, None)
    make = of.MakeExtraOutput()
    assert make.set_extra_output_channel(0, "a", output_to_caller=False) is make
    make.set_extra_output_channel(0, None, output_to_caller=False)
    x, h = rand(3, 8), rand(3, 8)
    y, extra = of.Sequential(make, op)(x, h)  # unbound: public again, both of them
    close(y, x + h)
    close(extra, x)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("consumers", [0, 1, 3])
def test_one_producer_and_any_number_of_consumers(
    consumers: int, public: bool, split: bool
) -> None:
    linear = fill(of.Linear(8, 8, **F64))
    plain: list[nn.Module] = [nn.Tanh()] if split else []
    ops = [of.SiLU(), tap("a", public), linear, *plain]
    for _ in range(consumers):
        ops += [of.GELU(), add("a")]
    model = of.Sequential(*ops)
    x = rand(3, 8, grad=True)
    got = model(x)
    got = got if isinstance(got, tuple) else (got,)
    x64, w, b = map(leaf, (x, linear.weight, linear.bias))
    h = F.silu(x64)
    y = F.linear(h, w, b)
    y = torch.tanh(y) if split else y
    for _ in range(consumers):
        y = F.gelu(y, approximate="tanh") + h
    want = (y, h * 1) if public else (y,)
    assert len(got) == len(want)
    grads = [rand(3, 8) for _ in want]
    kept = [g.clone() for g in grads]
    torch.autograd.backward(got, grads)
    torch.autograd.backward(want, grads)
    for a, c in [*zip(got, want), (x.grad, x64.grad), (linear.weight.grad, w.grad)]:
        close(a, c)
    for g, k in zip(grads, kept):
        assert torch.equal(g, k), "gradients of public outputs are summed out of place"


def test_unused_public_output_of_a_channel() -> None:
    model = of.Sequential(tap("a", public=True), of.SiLU(), add("a"))
    x, dy = rand(3, 8, grad=True), rand(3, 8)
    y, _ = model(x)
    y.backward(dy)
    x64 = leaf(x)
    (F.silu(x64) + x64).backward(dy)
    close(x.grad, x64.grad)


def test_only_the_public_output_of_a_channel_is_used() -> None:
    model = of.Sequential(of.SiLU(), tap("a", public=True), of.GELU(), add("a"))
    x, dy = rand(3, 8, grad=True), rand(3, 8)
    _, extra = model(x)
    extra.backward(dy)
    x64 = leaf(x)
    F.silu(x64).backward(dy)
    close(x.grad, x64.grad)


def test_nested_sequentials_share_the_channels_of_their_parent() -> None:
    inner = of.Sequential(of.SiLU(), add("a"))
    model = of.Sequential(tap("a"), inner)
    x = rand(3, 8)
    close(model(x), F.silu(x) + x)


@pytest.mark.parametrize("between", [False, True])
def test_a_residual_may_occur_twice(between: bool) -> None:
    """As any module may: its skip connection is its own each time."""
    linear = fill(of.Linear(8, 8, **F64))
    block = of.Residual(linear, of.SiLU())
    plain: list[nn.Module] = [nn.Identity()] if between else []
    model = of.Sequential(block, of.GELU(), *plain, block)
    x, dy = rand(3, 8, grad=True), rand(3, 8)
    y = model(x)
    y.backward(dy)
    x64, w, b = map(leaf, (x, linear.weight, linear.bias))
    h = F.gelu(x64 + F.silu(F.linear(x64, w, b)), approximate="tanh")
    want = h + F.silu(F.linear(h, w, b))
    want.backward(dy)
    close(y, want)
    for got, expected in zip((x, linear.weight, linear.bias), (x64, w, b)):
        close(got.grad, expected.grad)


class WholeResidual(of.FusedOperation):
    """Holds both ends of a channel and routes it itself; counts what it was given."""

    def __init__(self, *ops: of.BasicOperation, omit: tuple[int, ...] = (0,)) -> None:
        super().__init__(ops)
        self.omit = omit
        self.seen: list[Any] = []

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
    ) -> Any:
        self.seen.append([list(extras) for extras in basic_op_extra_inputs])
        if basic_op_ctxs[1].requires_grad:
            basic_op_ctxs[1].save_for_backward(input_)
        hidden = None if 0 in self.omit else input_
        return F.silu(input_) + input_, [(hidden,), (), ()]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        (x,) = basic_op_ctxs[1].saved_tensors
        s = torch.sigmoid(x)
        dx = grad_output * (s * (1 + x * (1 - s)) + 1)
        extra = basic_op_grad_extra_outputs[0][0]
        return dx if extra is None else dx + extra, [(), (), ()], [(), (), (None,)]


def test_a_fused_operation_with_both_ends_routes_the_channel_itself() -> None:
    fused = WholeResidual(tap("a"), of.SiLU(), add("a"))
    model = of.Sequential(of.ConstantScale(2.0), fused)
    x, dy = rand(3, 8, grad=True), rand(3, 8)
    y = model(x)
    y.backward(dy)
    assert fused.seen == [[[], [], [None]]], "its consumer slot is None"
    x64 = leaf(x)
    want = F.silu(2 * x64) + 2 * x64
    want.backward(dy)
    close(y, want)
    close(x.grad, x64.grad)


@pytest.mark.parametrize(
    ("public", "outside", "text"),
    [(False, True, "outside its forward fusion"), (True, False, "is public")],
)
def test_an_output_that_is_needed_may_not_be_omitted(
    public: bool, outside: bool, text: str
) -> None:
    fused = WholeResidual(tap("a", public), of.SiLU(), add("a"))
    model = of.Sequential(fused, *([add("a")] if outside else []))
    with pytest.raises(RuntimeError, match=text) as error:
        model(rand(3, 8))
    assert "WholeResidual" in str(error.value)


def test_an_output_that_is_needed_outside_and_given() -> None:
    fused = WholeResidual(tap("a"), of.SiLU(), add("a"), omit=())
    model = of.Sequential(fused, of.GELU(), add("a"))
    x, dy = rand(3, 8, grad=True), rand(3, 8)
    y = model(x)
    y.backward(dy)
    x64 = leaf(x)
    want = F.gelu(F.silu(x64) + x64, approximate="tanh") + x64
    want.backward(dy)
    close(y, want)
    close(x.grad, x64.grad)
