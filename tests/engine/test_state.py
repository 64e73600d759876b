"""Copies, pickles, state dicts, and parameters that are not where they were."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

import opfuser
from tests.engine.toys import F64, Mixed, Square, Times, grads, randn, same


def model() -> opfuser.Sequential:
    return opfuser.Sequential(
        opfuser.Linear(3, 4, dtype=F64),
        opfuser.Residual(Square(), opfuser.Linear(4, 4, dtype=F64)),
        nn.Tanh(),
        opfuser.BasicLinear(4, 3, dtype=F64),
        Times(),
    )


def run(seq: nn.Module, x: Tensor) -> list[Any]:
    y = seq(x)
    return [y.detach(), *grads(y, [x, *seq.parameters()])]


# ---------------------------------------------------------------------- copies


def by_pickle(seq: Any) -> Any:
    return pickle.loads(pickle.dumps(seq))


def by_torch_save(seq: Any) -> Any:
    file = io.BytesIO()
    torch.save(seq, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", [copy.deepcopy, by_pickle, by_torch_save])
@pytest.mark.parametrize("called", [False, True])
def test_copies_stand_on_their_own(how: Callable[[Any], Any], called: bool) -> None:
    seq, x = model(), randn(2, 3, grad=True)
    expected = run(seq, x)
    if not called:
        fresh = model()
        fresh.load_state_dict(seq.state_dict())
        seq = fresh
    twin = how(seq)
    same(run(twin, x), expected)
    assert {id(p) for p in seq.parameters()} & {id(p) for p in twin.parameters()} == set()
    assert list(twin.state_dict()) == list(seq.state_dict())
    linear = twin[0]
    assert linear.basic_ops[0].weight is linear.weight
    with torch.no_grad():
        twin[0].bias.add_(1)
    same(run(seq, x), expected)
    assert not torch.equal(run(twin, x)[0], expected[0])
    twin.append(Times())
    same(run(seq, x), expected)


def test_a_copy_in_training_keeps_no_plans() -> None:
    seq, x = model(), randn(2, 3)
    run(seq, x.requires_grad_())
    assert len(pickle.dumps(seq)) < 2 * len(pickle.dumps(model()))


def test_a_shallow_copy_shares_its_modules() -> None:
    seq, x = model(), randn(2, 3, grad=True)
    expected = run(seq, x)
    twin = copy.copy(seq)
    same(run(twin, x), expected)
    assert twin[0] is seq[0]


def test_copies_of_operations_alone() -> None:
    op, x = Times(), randn(2, 3)
    op(x)
    for twin in (copy.deepcopy(op), by_pickle(op)):
        assert twin.w is not op.w
        same(twin(x), op(x))
    linear = opfuser.Linear(3, 3)
    twin = copy.deepcopy(linear)
    twin.bias = None
    assert linear.bias is not None
    assert twin.basic_ops[1].bias is None


def test_shared_parameters_stay_shared_in_copies() -> None:
    one, two = opfuser.Linear(3, 3), opfuser.Linear(3, 3)
    two.weight = one.weight
    seq = opfuser.Sequential(one, two)
    for twin in (copy.deepcopy(seq), by_pickle(seq)):
        assert twin[0].weight is twin[1].weight is twin[1].basic_ops[0].weight


# ---------------------------------------------------------------------- other parameters


def test_functional_call() -> None:
    """Values of, and gradients to, the tensors that are substituted; the module is as before."""
    seq, x = model(), randn(2, 3, grad=True)
    expected = run(seq, x)
    others = {n: randn(*p.shape, grad=True) for n, p in seq.named_parameters()}
    for _ in range(2):
        y = functional_call(seq, others, x)
        twin = copy.deepcopy(seq)
        twin.load_state_dict(others)
        wrt = [x, *twin.parameters()]
        same(y, twin(x))
        same(grads(y, [x, *others.values()]), grads(twin(x), wrt))
        same(run(seq, x), expected)
    seq.zero_grad()
    functional_call(seq, others, x).sum().backward()
    assert all(p.grad is None for p in seq.parameters())


def test_functional_call_with_tensors_made_by_other_operations() -> None:
    seq, x = opfuser.Sequential(Times(), Square()), randn(2, 3)
    scale = torch.tensor(2.0, dtype=F64, requires_grad=True)
    y = functional_call(seq, {"0.w": scale * seq[0].w}, x)
    expected = (x * scale * seq[0].w) ** 2
    same(y, expected)
    same(grads(y, [scale, seq[0].w]), grads(expected, [scale, seq[0].w]))


def test_functional_call_without_gradients() -> None:
    seq, x = opfuser.Sequential(Times(), Square()).requires_grad_(False), randn(2, 3)
    w = randn(3, grad=True)
    assert not seq(x).requires_grad
    y = functional_call(seq, {"0.w": w}, x)
    same(grads(y, [w]), grads((x * w) ** 2, [w]))
    assert not seq(x).requires_grad


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["custom", "weight_norm", "spectral_norm"])
@pytest.mark.parametrize("where", ["Linear", "BasicLinear", "Bias"])
def test_parametrize(when: str, kind: str, where: str) -> None:
    """Gradients reach the originals."""
    if where == "Bias" and kind == "spectral_norm":
        return  # is for matrices
    torch.manual_seed(0)
    ours: nn.Module = {
        "Linear": lambda: opfuser.Linear(3, 3, dtype=F64),
        "BasicLinear": lambda: opfuser.BasicLinear(3, 3, dtype=F64),
        "Bias": lambda: opfuser.Bias(3, dtype=F64),
    }[where]()
    name = "bias" if where == "Bias" else "weight"
    with torch.no_grad():
        getattr(ours, name).copy_(randn(*getattr(ours, name).shape))
    seq, x = opfuser.Sequential(Times(), ours, Square()), randn(2, 3, grad=True)
    if when == "after":
        seq(x)
    change = {
        "custom": lambda m: parametrize.register_parametrization(m, name, nn.Softplus()),
        "weight_norm": lambda m: parametrizations.weight_norm(m, name),
        "spectral_norm": lambda m: parametrizations.spectral_norm(m, name),
    }[kind]
    change(ours)
    seq.eval()  # spectral_norm iterates at every call in training
    for _ in range(2):
        y = seq(x)
        value = getattr(ours, name)
        base = x * seq[0].w
        bias = 0 if where == "BasicLinear" else ours.bias
        expected = (base + value if where == "Bias" else base @ value.t() + bias) ** 2
        same(y, expected)
        wrt = [x, *seq.parameters()]
        assert len(wrt) >= 3
        same(grads(y, wrt), grads(expected, wrt))
    parametrize.remove_parametrizations(ours, name)
    same(seq(x), expected)


def test_parametrised_operation_in_copies_and_state_dicts() -> None:
    seq, x = opfuser.Sequential(opfuser.Linear(3, 3, dtype=F64), Square()), randn(2, 3)
    parametrizations.weight_norm(seq[0])
    assert sorted(seq.state_dict()) == [
        "0.bias", "0.parametrizations.weight.original0", "0.parametrizations.weight.original1",
    ]  # fmt: skip
    twin = copy.deepcopy(seq)
    same(twin(x), seq(x))
    twin.load_state_dict(seq.state_dict())
    same(twin(x), seq(x))


def test_replaced_parameters_count_at_the_next_call() -> None:
    seq, x = opfuser.Sequential(opfuser.Linear(3, 3, dtype=F64), Times()), randn(2, 3, grad=True)
    run(seq, x)
    seq[0].weight = nn.Parameter(randn(3, 3))
    seq[0].basic_ops[1].bias = nn.Parameter(randn(3))
    seq[1].w = nn.Parameter(randn(3))
    wrt = [x, seq[0].weight, seq[0].bias, seq[1].w]
    assert [id(p) for p in seq.parameters()] == [id(p) for p in wrt[1:]]
    expected = (x @ seq[0].weight.t() + seq[0].bias) * seq[1].w
    same(seq(x), expected)
    same(grads(seq(x), wrt), grads(expected, wrt))


def test_a_parameter_replaced_between_forward_and_backward() -> None:
    seq, x = opfuser.Sequential(opfuser.Linear(3, 3, dtype=F64), Times()), randn(2, 3, grad=True)
    old = [seq[0].weight, seq[0].bias, seq[1].w]
    expected = (x @ old[0].t() + old[1]) * old[2]
    y = seq(x)
    seq[0].weight = nn.Parameter(randn(3, 3))
    seq[0].bias = None
    seq[1].w = nn.Parameter(randn(3))
    same(grads(y, [x, *old]), grads(expected, [x, *old]))


def test_a_cleared_bias() -> None:
    linear, x = opfuser.Linear(3, 3, dtype=F64), randn(2, 3)
    seq = opfuser.Sequential(linear, Square())
    seq(x)
    linear.bias = None
    same(seq(x), (x @ linear.weight.t()) ** 2)
    assert [n for n, _ in seq.named_parameters()] == ["0.weight"]


# ---------------------------------------------------------------------- meta device


def real_values(seq: nn.Module) -> None:
    for p in seq.parameters():
        assert p.device.type == "cpu"
        assert torch.isfinite(p).all()


@pytest.mark.parametrize("touched", [False, True])
def test_from_the_meta_device(touched: bool) -> None:
    with torch.device("meta"):
        seq = opfuser.Sequential(
            opfuser.Linear(3, 4), nn.Tanh(), opfuser.Residual(opfuser.BasicLinear(4, 4))
        )
    assert {p.device.type for p in seq.parameters()} == {"meta"}
    if touched:
        assert seq(torch.empty(2, 3, device="meta")).device.type == "meta"
    seq.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in seq.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    real_values(seq)
    twin = opfuser.Sequential(
        opfuser.Linear(3, 4), nn.Tanh(), opfuser.Residual(opfuser.BasicLinear(4, 4))
    )
    twin.load_state_dict(seq.state_dict())
    x = torch.randn(2, 3, requires_grad=True)
    torch.testing.assert_close(run(seq, x), run(twin, x))
    optimizer = torch.optim.SGD(seq.parameters(), lr=0.1)
    before = seq(x).square().sum()
    before.backward()
    optimizer.step()
    assert seq(x).square().sum() < before


@pytest.mark.parametrize("assign", [False, True])
def test_from_the_meta_device_by_loading(assign: bool) -> None:
    seq, x = model(), randn(2, 3, grad=True)
    with torch.device("meta"):
        twin = model()
    if not assign:
        twin.to_empty(device="cpu")
    twin.load_state_dict(seq.state_dict(), assign=assign)
    same(run(twin, x), run(seq, x))


# ---------------------------------------------------------------------- state dicts


def with_torch() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU()), nn.Linear(4, 3))  # fmt: skip


def with_ours() -> opfuser.Sequential:
    return opfuser.Sequential(
        opfuser.Linear(3, 4),
        opfuser.ReLU(),
        opfuser.Sequential(opfuser.BasicLinear(4, 4), nn.ReLU()),
        opfuser.Linear(4, 3),
    )


def test_state_dicts_go_both_ways() -> None:
    theirs, ours, x = with_torch(), with_ours(), torch.randn(2, 3, requires_grad=True)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    torch.testing.assert_close(run(ours, x), run(theirs, x))
    again = with_torch()
    again.load_state_dict(ours.state_dict())
    torch.testing.assert_close(run(again, x), run(theirs, x))


def te_keys(state: dict[str, Any], *, extra: bool) -> dict[str, Any]:
    """As te.ops names them: parameters under the basic operations, and extra state everywhere."""
    out: dict[str, Any] = {}
    for key, value in state.items():
        prefix, name = key.rsplit(".", 1)
        index = {"weight": 0, "bias": 1}[name]
        linear = prefix != "2.0"
        place = f"{prefix}.basic_ops.{index}." if linear else f"{prefix}."
        out[place + name] = value
        if extra:
            out[place + "_extra_state"] = torch.empty(0, dtype=torch.uint8)
    if extra:
        for prefix in ("0.", "1.", "3."):
            out[prefix + "_extra_state"] = torch.empty(0, dtype=torch.uint8)
    return out


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_checkpoints_of_te_ops_load(extra: bool, assign: bool) -> None:
    source, target = with_torch(), with_ours()
    state = te_keys(source.state_dict(), extra=extra)
    kept = dict(state)
    result = target.load_state_dict(state, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert state.keys() == kept.keys(), "the caller's dict is as it was"
    torch.testing.assert_close(dict(target.state_dict()), dict(source.state_dict()))


def test_what_does_not_fit_is_reported() -> None:
    state = with_ours().state_dict()
    state["1.weight"] = state.pop("0.weight")
    with pytest.raises(
        RuntimeError, match=r'(?s)Missing key.*"0.weight".*Unexpected key.*"1.weight"'
    ):
        with_ours().load_state_dict(state)
    state = with_ours().state_dict()
    state["0.bias"] = torch.zeros(7)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.bias"):
        with_ours().load_state_dict(state)


def test_loading_casts_and_keeps_the_parameters() -> None:
    seq = with_ours().bfloat16()
    parameters = list(seq.parameters())
    seq.load_state_dict(with_torch().state_dict())
    assert all(a is b for a, b in zip(parameters, seq.parameters()))
    assert {p.dtype for p in seq.parameters()} == {torch.bfloat16}
    assert seq[0].basic_ops[0].weight is seq[0].weight


def test_casting_reaches_operations_with_extra_tensors() -> None:
    seq = opfuser.Sequential(Mixed(), opfuser.Linear(3, 3), Times(dtype=torch.float32))
    x = torch.randn(2, 3, dtype=torch.bfloat16)
    y, extra = seq.bfloat16()(x, x)
    assert {y.dtype, extra.dtype} == {torch.bfloat16}
