"""Keywords for the forward of one operation of a Sequential."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.errors import (
    OpKwargsError,
)
from tests.engine.toys import Mixed, Power, grads, randn, same


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def powers() -> opfuser.Sequential:
    return opfuser.Sequential(Power(), opfuser.Sequential(Power()), Twice(), Power())


@pytest.mark.parametrize("key", ["operation", "index", "negative index"])
def test_op_kwargs(key: str) -> None:
    seq, x = powers(), randn(2, 3, grad=True)
    k: Any = {"operation": seq[3], "index": 3, "negative index": -1}[key]
    y = seq(x, op_kwargs={k: {"power": 3}, seq[1][0]: {"power": 2}})
    expected = (2 * x**2) ** 3
    same(y, expected)
    same(grads(y, [x]), grads(expected, [x]))
    same(seq(x), 2 * x)
    same(seq(x, op_kwargs={}), 2 * x)
    same(seq(x, op_kwargs={0: {}}), 2 * x)


def test_op_kwargs_with_extra_tensors_and_alone() -> None:
    seq, x, e = opfuser.Sequential(Mixed(), Power()), randn(2, 3), randn(2, 3)
    same(seq(x, e, op_kwargs={1: {"power": 2}}), ((x * e) ** 2, x + e))
    same(seq[1](x, power=3), x**3)


def test_op_kwargs_reach_an_operation_with_hooks() -> None:
    seq, x = powers(), randn(2, 3)
    seq[0].register_forward_hook(lambda *_: None)
    same(seq(x, op_kwargs={0: {"power": 2}}), 2 * x**2)


def test_op_kwargs_of_an_operation_that_occurs_twice() -> None:
    power = Power()
    x = randn(2, 3)
    same(opfuser.Sequential(power, power)(x, op_kwargs={power: {"power": 2}}), x**4)


@pytest.mark.parametrize(
    ("key", "kwargs", "kind", "text"),
    [
        (lambda seq: 2, {"power": 2}, OpKwargsError, "key 2, which is Twice"),
        (lambda seq: 1, {"power": 2}, OpKwargsError, "key 1, which is Sequential"),
        (lambda seq: seq[2], {}, OpKwargsError, "a key of type Twice"),
        (lambda seq: opfuser.Linear(3, 3), {}, OpKwargsError, "a key of type Linear"),
        (lambda seq: "0", {}, OpKwargsError, "a key of type str"),
        (lambda seq: Power(), {}, OpKwargsError, "keys that are not in this Sequential"),
        (lambda seq: Power(), {"power": 1}, OpKwargsError, "keys that are not in this Sequential"),
        (lambda seq: powers()[0], {"power": 1}, OpKwargsError, "an operation of type Power"),
        (lambda seq: 0, {"pow": 2}, OpKwargsError, "(Power). Received: pow"),
        (lambda seq: 4, {}, IndexError, "Index 4 is out of range"),
    ],
)
def test_wrong_op_kwargs(key: Any, kwargs: Any, kind: type[Exception], text: str) -> None:
    seq = powers()
    with pytest.raises(kind) as error:
        seq(randn(2, 3), op_kwargs={key(seq): kwargs})
    assert text in str(error.value)


def test_op_kwargs_of_a_part_of_linear() -> None:
    seq = opfuser.Sequential(opfuser.Linear(3, 3), Power())
    with pytest.raises(OpKwargsError):
        seq(torch.randn(2, 3), op_kwargs={0: {"power": 2}})
