"""Linear, a compound of two operations that has their parameters.

Aliases and checkpoints: tests/contract/test_checkpoints.py.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from opfuser import BasicLinear, Bias, Linear, Sequential
from opfuser.errors import ArgumentError, InputError, ReadOnlyAttributeError
from opfuser.recipe import Float8CurrentScaling
from tests.basic.values import DTYPES, fill
from tests.contract.tensors import against, rand


def linear(in_features: int = 3, out_features: int = 2, *, bias: bool = True) -> Linear:
    return fill(Linear(in_features, out_features, bias=bias))


def assert_parts_agree(op: Linear) -> None:
    """Compound and parts hold the same parameter objects, and the parts compute with them."""
    assert [type(part) for part in op.basic_ops] == [BasicLinear, Bias][: len(op.basic_ops)]
    for part, name in zip(op.basic_ops, ("weight", "bias")):
        assert getattr(part, name) is getattr(op, name)
    x = torch.randn(3, op.in_features, dtype=op.weight.dtype)
    torch.testing.assert_close(op(x), F.linear(x, op.weight, op.bias))
    (dw,) = torch.autograd.grad(op(x).sum(), op.weight)
    torch.testing.assert_close(dw, x.sum(0).expand(op.weight.shape))


def test_recipe_is_that_of_the_linear_operation_in_it() -> None:
    op = Linear(16, 32)
    seq, x = Sequential(op, recipe=Float8CurrentScaling()), torch.randn(2, 16)
    for value, quantized in ((None, ()), ("inherit", (0,))):
        op.recipe = value
        assert op.recipe == op.basic_ops[0].recipe == value
        assert seq.plan(x).quantized == quantized
    op.recipe = "fp8"
    with pytest.raises(ArgumentError, match="The recipe of an operation is 'inherit' or None"):
        seq(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_exact_as_torch(dtype: torch.dtype, device: torch.device) -> None:
    """Without a bias, its only part is held to torch in test_basic_linear.py."""
    op = linear(7, 11).to(device, dtype)
    for shape in [(5, 7), (7,), (2, 3, 4, 7), (0, 7)]:
        x = rand(*shape, dtype=dtype).to(device).requires_grad_()
        against(op, lambda p, x: F.linear(x, p["weight"], p["bias"]), x)


@pytest.mark.parametrize("bias", [True, False])
def test_hazard_28_parts_and_state_are_those_of_a_plain_module(bias: bool) -> None:
    op, names = linear(bias=bias), ["weight", "bias"][: 1 + bias]
    assert list(op.state_dict()) == [name for name, _ in op.named_parameters()] == names
    assert list(op.children()) == []
    assert (op.in_features, op.out_features) == (3, 2)
    assert (op.bias is None) is not bias
    assert repr(op) == f"Linear(in_features=3, out_features=2, bias={bias})"
    for one in (op, copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert_parts_agree(one)


def test_casting_and_moving() -> None:
    op = linear()
    op(torch.randn(1, 3))
    op.to(torch.float64)
    assert op.basic_ops[0].weight.dtype == torch.float64
    assert_parts_agree(op)
    op.half().float()
    assert_parts_agree(op)


class Double(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * value


def test_parametrized_bias() -> None:
    """Weights: tests/engine/test_other_parameters.py."""
    op, x = linear(), torch.randn(4, 3)
    op(x)
    parametrize.register_parametrization(op, "bias", Double())
    bias = op.parametrizations.bias.original
    y = op(x)
    torch.testing.assert_close(y, F.linear(x, op.weight, 2 * bias))
    (db,) = torch.autograd.grad(y.sum(), bias)
    torch.testing.assert_close(db, torch.full((2,), 8.0))
    parametrize.remove_parametrizations(op, "bias")
    assert_parts_agree(op)
    torch.testing.assert_close(op(x), y)


def test_training_flag_reaches_the_parts() -> None:
    model = Sequential(linear())
    for mode in (False, True):
        model.train(mode)
        assert [part.training for part in model[0].basic_ops] == [mode, mode]


def test_a_plain_key_wins_over_that_of_te_ops() -> None:
    """Both kinds load; as parts of a sequence, see tests/contract/test_checkpoints.py."""
    op, of_te = (
        Linear(3, 2),
        {"basic_ops.0.weight": torch.ones(2, 3), "basic_ops.1.bias": 3 * torch.ones(2)},
    )
    op.load_state_dict({**of_te, "weight": torch.zeros(2, 3)})
    assert torch.equal(op.weight, torch.zeros(2, 3))
    assert torch.equal(op.bias, of_te["basic_ops.1.bias"])
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"basic_ops\.1\.bias"'):
        Linear(3, 2, bias=False).load_state_dict(of_te)


@pytest.mark.parametrize("flag", ["accumulate_into_main_grad", "accumulate_into_grad"])
def test_flags_are_those_of_the_linear_part(flag: str) -> None:
    """What they do: tests/contract/test_weight_gradients.py."""
    op = Linear(3, 2)
    for value in (True, False):
        setattr(op, flag, value)
        assert getattr(op, flag) is getattr(op.basic_ops[0], flag) is value
    assert flag not in vars(op)
    assert getattr(Linear(3, 2, **{flag: True}).basic_ops[0], flag) is True


def test_gradients_in_two_places_are_an_error_of_the_next_call() -> None:
    op = Linear(3, 2, accumulate_into_grad=True)
    op(torch.ones(4, 3))
    op.accumulate_into_main_grad = True
    with pytest.raises(ArgumentError, match="accumulated in one place"):
        op(torch.ones(4, 3))


@pytest.mark.parametrize("name", ["in_features", "out_features", "basic_ops"])
def test_what_the_parts_were_made_from_is_fixed(name: str) -> None:
    op = Linear(3, 2)
    with pytest.raises(ReadOnlyAttributeError, match=rf"{name} is fixed.*\(Linear\)"):
        setattr(op, name, () if name == "basic_ops" else 4)
    setattr(op, name, getattr(op, name))
    assert op(torch.ones(1, 3)).shape == (1, 2)


def test_errors() -> None:
    op = Linear(3, 2, bias=False)
    with pytest.raises(ArgumentError, match=r"made with bias=False.*\(2,\).*with bias=True"):
        op.bias = nn.Parameter(torch.zeros(2))
    with pytest.raises(InputError, match=r"Received: shape \(2, 4\). Pass a tensor of shape"):
        op(torch.randn(2, 4))
    with pytest.raises(ArgumentError, match=r"'row' or 'vocabulary' \(Linear\)"):
        Linear(3, 2, tensor_parallel_mode="both")
