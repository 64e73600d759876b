"""Channels: routing, gradients, what a fused operation may leave out, and the texts of errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from opfuser import AddExtraInput as AddExtra
from opfuser import MakeExtraOutput as MakeExtra
from tests.contract.tensors import F64, against, close, fill, rand


def tap(name: str | None, public: bool = False) -> of.MakeExtraOutput:
    return MakeExtra().set_extra_output_channel(0, name, output_to_caller=public)


def add(name: str) -> of.AddExtraInput:
    return AddExtra().set_extra_input_channel(0, name)


# Operations, and what the text of the error says, in the words of te.ops and with the places.
ROUTING: list[tuple[Any, list[str]]] = [
    (lambda: [tap("a"), add("b")], ["has no producer", "'b'", "op 1 (AddExtraInput)"]),
    (
        lambda: [of.Identity(), add("a"), tap("a")],
        ["has no earlier producer", "'a'", "op 1 (AddExtraInput)", "op 2 (MakeExtraOutput)"],
    ),
    (
        lambda: [tap("a"), of.Identity(), tap("a"), add("a")],
        ["multiple producers", "'a'", "op 0 (MakeExtraOutput)", "op 2 (MakeExtraOutput)"],
    ),
    (lambda: [add("a"), nn.Identity(), tap("a")], ["has no earlier producer"]),
    (lambda: [tap("a"), nn.Identity(), tap("a")], ["multiple producers"]),
    (lambda: [tap("b"), nn.Identity(), add("a")], ["has no producer"]),
]


@pytest.mark.parametrize(("make", "text"), ROUTING)
def test_errors_of_routing(make: Any, text: list[str]) -> None:
    """They may come from construction or from the first call, as a user meets them."""
    calls = [lambda: of.Sequential(*make())(rand(3, 8))]
    if not any(type(op) is nn.Identity for op in make()):  # a fuser takes operations only
        calls.append(lambda: of.OperationFuser(make())(rand(3, 8)))
    for call in calls:
        with pytest.raises(ValueError, match=text[0]) as error:
            call()
        assert all(part in str(error.value) for part in text)


RANGE = r"Extra (in|out)put index {} is out of range \({}\)\. Received: an operation with {} extra"
BINDING: list[tuple[Any, type[Exception], str]] = [
    (lambda: AddExtra().set_extra_input_channel(-1, "a"), IndexError, RANGE.format(-1, "Add.*", 1)),
    (lambda: AddExtra().set_extra_input_channel(5, "a"), IndexError, RANGE.format(5, "Add.*", 1)),
    (lambda: MakeExtra().set_extra_output_channel(1, "a"), IndexError, RANGE.format(1, "Mak.*", 1)),
    (lambda: of.Identity().set_extra_input_channel(0, "a"), IndexError, RANGE.format(0, "Id.*", 0)),
    (lambda: of.Identity().set_extra_output_channel(0, "a"), IndexError, RANGE.format(0, "I.*", 0)),
    (lambda: add(""), ValueError, "non-empty string"),
    (lambda: add(b"a"), ValueError, "non-empty string"),
    (lambda: tap(3), ValueError, r"non-empty string or None \(MakeExtraOutput\)\. Received: 3"),
    (lambda: tap("a", None), TypeError, "output_to_caller must be a bool"),
    (lambda: tap("a", 1), TypeError, r"must be a bool \(MakeExtraOutput\)\. Received: 1"),
]  # fmt: skip


def test_errors_of_binding() -> None:
    for bind, kind, text in BINDING:
        with pytest.raises(kind, match=text):
            bind()


@pytest.mark.parametrize(
    "capture", [of.OperationFuser, lambda ops: of.Sequential(*ops)(rand(3, 8))]
)
def test_rebinding_after_capture(capture: Any) -> None:
    ops = [tap("a"), add("a")]
    capture(list(ops))
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


def test_binding_returns_the_operation_and_none_unbinds() -> None:
    op, make = AddExtra(), MakeExtra()
    assert op.set_extra_input_channel(0, "a") is op
    op.set_extra_input_channel(0, None)
    assert make.set_extra_output_channel(0, "a", output_to_caller=False) is make
    make.set_extra_output_channel(0, None, output_to_caller=False)
    # Unbound: public again, both of them.
    against(of.Sequential(make, op), lambda p, x, h: (x + h, x * 1), rand(3, 8), rand(3, 8))


@pytest.mark.parametrize(
    ("consumers", "public", "split"),
    [(0, True, False), (1, False, False), (1, True, True), (3, False, True), (3, True, False)],
)
def test_one_producer_and_any_number_of_consumers(
    consumers: int, public: bool, split: bool
) -> None:
    plain: list[nn.Module] = [nn.Tanh()] if split else []
    ops = [of.SiLU(), tap("a", public), of.Linear(8, 8, **F64), *plain]
    for _ in range(consumers):
        ops += [of.GELU(), add("a")]

    def formula(p: dict[str, Tensor], x: Tensor) -> Any:
        h = F.silu(x)
        y = F.linear(h, p["2.weight"], p["2.bias"])
        y = torch.tanh(y) if split else y
        for _ in range(consumers):
            y = F.gelu(y, approximate="tanh") + h
        return (y, h * 1) if public else y

    model = fill(of.Sequential(*ops))
    against(model, formula, rand(3, 8, grad=True))
    against(model, formula, rand(3, 8, grad=True), used=1)  # the public output is not


class WholeResidual(of.FusedOperation):
    """Holds both ends of a channel and routes it itself; notes what it was given."""

    def __init__(self, *ops: of.BasicOperation, omits: bool = True) -> None:
        super().__init__(ops)
        self.omits = omits
        self.seen: list[Any] = []

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
    ) -> Any:
        self.seen.append([list(extras) for extras in basic_op_extra_inputs])
        if basic_op_ctxs[1].requires_grad:
            basic_op_ctxs[1].save_for_backward(input_)
        hidden = None if self.omits else input_
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
    against(model, lambda p, x: F.silu(2 * x) + 2 * x, rand(3, 8, grad=True))
    assert fused.seen == [[[], [], [None]]], "its consumer slot is None"


def test_an_output_that_is_needed_outside_and_given() -> None:
    fused = WholeResidual(tap("a"), of.SiLU(), add("a"), omits=False)
    against(
        of.Sequential(fused, of.GELU(), add("a")),
        lambda p, x: F.gelu(F.silu(x) + x, approximate="tanh") + x,
        rand(3, 8, grad=True),
    )
