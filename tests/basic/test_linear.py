from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrize

from opfuser import BasicLinear, Bias, Linear, OperationFuser, Sequential
from opfuser.errors import ArgumentError, InputError, ReadOnlyAttributeError
from tests.contract.gradients import handed_over

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

INPUTS: dict[str, Callable[[], Tensor]] = {
    "matrix": lambda: torch.randn(5, 7),
    "one row": lambda: torch.randn(1, 7),
    "vector": lambda: torch.randn(7),
    "batched": lambda: torch.randn(2, 3, 4, 7),
    "zero rows": lambda: torch.randn(0, 7),
    "transposed": lambda: torch.randn(7, 3, 2).transpose(0, 2),
    "expanded": lambda: torch.randn(1, 7).expand(4, 7),
}


def linear(
    in_features: int = 7,
    out_features: int = 11,
    *,
    bias: bool = True,
    dtype: torch.dtype | None = None,
) -> Linear:
    op = Linear(in_features, out_features, bias=bias, dtype=dtype)
    if op.bias is not None:
        nn.init.normal_(op.bias)
    return op


def assert_parts_agree(op: Linear) -> None:
    """Compound and parts hold the same parameter objects, and the parts compute with them."""
    for part in op.basic_ops:
        for name in ("weight", "bias"):
            if name in part._parameter_names:
                assert getattr(part, name) is getattr(op, name)
    x = torch.randn(3, op.in_features, dtype=op.weight.dtype)
    torch.testing.assert_close(op(x), F.linear(x, op.weight, op.bias))
    op.zero_grad()
    op(x).sum().backward()
    torch.testing.assert_close(op.weight.grad, x.sum(0).expand(op.weight.shape))
    op.zero_grad()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", INPUTS)
def test_matches_torch_in_value_and_gradients(
    shape: str, dtype: torch.dtype, bias: bool, device: torch.device
) -> None:
    op = linear(bias=bias, dtype=dtype).to(device)
    x = INPUTS[shape]().to(device, dtype)
    dy = torch.randn(*x.shape[:-1], 11).to(device, dtype)

    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, *op.parameters())]
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    leaves = [x.detach().requires_grad_(), *op.parameters()]
    y = op(leaves[0])
    ours = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    for a, b, c in zip(ours, run(F.linear, dtype), run(F.linear, torch.float64)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if c.numel():
            error, allowed = ((t.double() - c).abs().max() for t in (a, b))
            # The floor is one rounding: unfused, the sum is rounded before the bias and after.
            assert error <= 2 * allowed + torch.finfo(dtype).eps / 2 * c.abs().max()


def test_parts_and_state_are_those_of_a_plain_module() -> None:
    op = linear()
    assert [type(part) for part in op.basic_ops] == [BasicLinear, Bias]
    assert list(op.state_dict()) == ["weight", "bias"]
    assert [name for name, _ in op.named_parameters()] == ["weight", "bias"]
    assert list(op.children()) == []
    assert (op.in_features, op.out_features) == (7, 11)
    assert_parts_agree(op)


def test_without_bias() -> None:
    op = linear(bias=False)
    assert [type(part) for part in op.basic_ops] == [BasicLinear]
    assert list(op.state_dict()) == ["weight"]
    assert op.bias is None
    assert_parts_agree(op)


def test_hazard_28_keys_in_a_sequential_are_those_of_torch() -> None:
    ours = Sequential(Linear(3, 4), Linear(4, 2, bias=False))
    theirs = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert list(ours.state_dict()) == [name for name, _ in ours.named_parameters()]


def test_setting_a_parameter_on_either_side_sets_it_on_both() -> None:
    op = linear(3, 2)
    assert_parts_agree(op)
    weight, bias = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2))
    op.weight = weight
    assert op.basic_ops[0].weight is weight
    op.basic_ops[1].bias = bias
    assert op.bias is bias
    assert_parts_agree(op)
    other = nn.Parameter(torch.randn(2, 3))
    op.basic_ops[0].weight = other
    assert op.weight is other
    assert_parts_agree(op)


def test_aliasing_shares_the_object() -> None:
    first, second = linear(3, 3), linear(3, 3)
    second.weight = first.weight
    x = torch.randn(2, 3)
    Sequential(first, second)(x).sum().backward()
    w = first.weight.detach().requires_grad_()
    F.linear(F.linear(x, w, first.bias.detach()), w, second.bias.detach()).sum().backward()
    torch.testing.assert_close(first.weight.grad, w.grad)


def test_clearing_the_bias_after_a_call_and_setting_it_again() -> None:
    op = linear(3, 2)
    model = Sequential(op)
    x = torch.randn(4, 3, requires_grad=True)
    model(x)
    bias, op.bias = op.bias, None
    y = model(x)
    torch.testing.assert_close(y, F.linear(x, op.weight))
    y.sum().backward()
    torch.testing.assert_close(op.weight.grad, x.detach().sum(0).expand(2, 3))
    assert list(op.state_dict()) == ["weight"]
    op.bias = bias
    torch.testing.assert_close(model(x), F.linear(x, op.weight, bias))


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))])
def test_copies_are_consistent_and_independent(
    copied: Callable[[Linear], Linear], called_before: bool
) -> None:
    op = linear(3, 2)
    x = torch.randn(4, 3)
    if called_before:
        op(x)
    twin = copied(op)
    assert_parts_agree(twin)
    assert torch.equal(twin(x), op(x))
    assert twin.weight is not op.weight
    assert all(part not in op.basic_ops for part in twin.basic_ops)
    with torch.no_grad():
        twin.weight.zero_()
    assert not torch.equal(twin(x), op(x))
    assert_parts_agree(op)


def test_casting_and_moving() -> None:
    op = linear(3, 2)
    op(torch.randn(1, 3))
    op.to(torch.float64)
    assert op.basic_ops[0].weight.dtype == torch.float64
    assert_parts_agree(op)
    op.half().float()
    assert_parts_agree(op)


def test_hazard_11_meta_construction_then_materialisation_then_backward() -> None:
    op = Linear(3, 2, device="meta")
    op.to_empty(device="cpu")
    torch.manual_seed(5)
    op.reset_parameters()
    assert_parts_agree(op)
    torch.manual_seed(5)
    assert torch.equal(op.weight, nn.Linear(3, 2).weight)
    assert torch.equal(op.bias, torch.zeros(2))


def test_hazard_11_meta_construction_then_aliasing() -> None:
    op = Linear(3, 2, device="meta")
    op.weight, op.bias = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2))
    assert_parts_agree(op)


def test_functional_call_uses_and_differentiates_what_it_is_given() -> None:
    op = linear(3, 2)
    x = torch.randn(4, 3)
    op(x)
    given = {
        "weight": torch.randn(2, 3, requires_grad=True),
        "bias": torch.randn(2, requires_grad=True),
    }
    y = functional_call(op, given, (x,))
    torch.testing.assert_close(y, F.linear(x, given["weight"], given["bias"]))
    y.sum().backward()
    torch.testing.assert_close(given["weight"].grad, x.sum(0).expand(2, 3))
    torch.testing.assert_close(given["bias"].grad, torch.full((2,), 4.0))
    assert op.weight.grad is None
    assert_parts_agree(op)


class Double(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * value


@pytest.mark.parametrize("in_sequential", [False, True])
def test_parametrised_weight_and_bias(in_sequential: bool) -> None:
    op = linear(3, 2)
    model = Sequential(op) if in_sequential else op
    x = torch.randn(4, 3)
    model(x)
    for name in ("weight", "bias"):
        parametrize.register_parametrization(op, name, Double())
    weight = op.parametrizations.weight.original
    bias = op.parametrizations.bias.original
    y = model(x)
    torch.testing.assert_close(y, F.linear(x, 2 * weight, 2 * bias))
    y.sum().backward()
    torch.testing.assert_close(weight.grad, 2 * x.sum(0).expand(2, 3))
    torch.testing.assert_close(bias.grad, torch.full((2,), 8.0))
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(x), y)
    for name in ("weight", "bias"):
        parametrize.remove_parametrizations(op, name)
    assert_parts_agree(op)
    torch.testing.assert_close(model(x), y)


def test_weight_norm_of_torch_trains() -> None:
    op = nn.utils.parametrizations.weight_norm(linear(3, 2))
    x = torch.randn(4, 3)
    op(x).square().sum().backward()
    scale = op.parametrizations.weight.original0.grad
    theirs = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    theirs.load_state_dict(op.state_dict())
    theirs(x).square().sum().backward()
    torch.testing.assert_close(scale, theirs.parametrizations.weight.original0.grad)


def test_training_flag_reaches_the_parts() -> None:
    model = Sequential(linear(3, 2))
    model.eval()
    assert not any(part.training for part in model[0].basic_ops)
    model.train()
    assert all(part.training for part in model[0].basic_ops)


def test_in_a_fuser_it_stands_for_its_parts() -> None:
    op = linear(3, 2)
    assert OperationFuser([op])._basic_ops == list(op.basic_ops)


def test_hazard_29_a_checkpoint_of_torch_modules_loads() -> None:
    theirs = nn.Linear(3, 2)
    op = Linear(3, 2)
    assert str(op.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    assert_parts_agree(op)
    assert torch.equal(op.weight, theirs.weight)


def te_checkpoint(prefix: str = "") -> OrderedDict[str, Tensor | None]:
    return OrderedDict(
        {
            f"{prefix}_extra_state": torch.zeros(3),
            f"{prefix}basic_ops.0.weight": torch.full((2, 3), 2.0),
            f"{prefix}basic_ops.0._extra_state": torch.zeros(3),
            f"{prefix}basic_ops.1.bias": torch.full((2,), 3.0),
            f"{prefix}basic_ops.1._extra_state": None,
        }
    )


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_of_te_ops_loads_strictly(assign: bool) -> None:
    op = Linear(3, 2)
    checkpoint = te_checkpoint()
    assert str(op.load_state_dict(checkpoint, assign=assign)) == "<All keys matched successfully>"
    assert list(checkpoint) == list(te_checkpoint())
    assert torch.equal(op.weight, torch.full((2, 3), 2.0))
    assert torch.equal(op.bias, torch.full((2,), 3.0))
    assert_parts_agree(op)


def test_a_checkpoint_of_te_ops_loads_into_a_model() -> None:
    model = nn.ModuleDict({"mlp": Sequential(Linear(3, 2))})
    model.load_state_dict(te_checkpoint("mlp.0."))
    assert torch.equal(model["mlp"][0].bias, torch.full((2,), 3.0))


def test_a_plain_key_wins_over_that_of_te_ops() -> None:
    op = Linear(3, 2)
    op.load_state_dict({**te_checkpoint(), "weight": torch.zeros(2, 3)})
    assert torch.equal(op.weight, torch.zeros(2, 3))
    assert torch.equal(op.bias, torch.full((2,), 3.0))


def test_missing_and_unexpected_keys_are_still_reported() -> None:
    with pytest.raises(RuntimeError, match=r'Missing key.*"bias"'):
        Linear(3, 2).load_state_dict({"weight": torch.zeros(2, 3)})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"basic_ops\.1\.bias"'):
        Linear(3, 2, bias=False).load_state_dict(te_checkpoint())


def test_gradients_go_to_main_grad() -> None:
    op = Linear(3, 2, accumulate_into_main_grad=True)
    op.weight.main_grad = torch.zeros(2, 3)  # type: ignore[attr-defined]
    x = torch.randn(4, 3)
    Sequential(op)(x).sum().backward()
    torch.testing.assert_close(op.weight.main_grad, x.sum(0).expand(2, 3))
    assert op.weight.grad_added_to_main_grad is True
    assert op.bias is not None
    torch.testing.assert_close(op.bias.grad, torch.full((2,), 4.0))


@pytest.mark.parametrize("flag", ["accumulate_into_main_grad", "accumulate_into_grad"])
def test_flags_are_those_of_the_linear_part(flag: str) -> None:
    op = Linear(3, 2)
    part = op.basic_ops[0]
    x, ones = torch.ones(4, 3), torch.ones(2, 3)
    for n, value in enumerate([True, False, True]):
        setattr(op, flag, value)
        assert getattr(op, flag) is getattr(part, flag) is value
        op.weight.main_grad, op.weight.grad = n * ones, n * ones  # type: ignore[attr-defined]
        y = op(x)
        told = handed_over(y, op.weight)
        setattr(op, flag, not value)  # backward uses what forward did
        y.sum().backward()
        into_main_grad = value and flag == "accumulate_into_main_grad"
        wants = (n + 4, n) if into_main_grad else (n, n + 4)
        torch.testing.assert_close(
            (op.weight.main_grad, op.weight.grad), (wants[0] * ones, wants[1] * ones)
        )
        assert told == [not value or into_main_grad]
    assert flag not in vars(op)


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


def test_repr() -> None:
    assert repr(Linear(3, 2)) == "Linear(in_features=3, out_features=2, bias=True)"


def test_errors() -> None:
    op = Linear(3, 2, bias=False)
    with pytest.raises(ArgumentError, match=r"made with bias=False.*\(2,\).*with bias=True"):
        op.bias = nn.Parameter(torch.zeros(2))
    op.bias = None
    with pytest.raises(InputError, match=r"Received: shape \(2, 4\). Pass a tensor of shape"):
        op(torch.randn(2, 4))
    with pytest.raises(ArgumentError, match=r"'column' or 'row' \(Linear\)"):
        Linear(3, 2, tensor_parallel_mode="both")
