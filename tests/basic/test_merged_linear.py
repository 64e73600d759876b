"""MergedLinear: linear transformations of one input with separate weights, as one operation.

Fusions: tests/fused/test_merged_linear.py. FP8: tests/quantization/test_merged_linear.py. Replaced
projections: tests/engine/test_replaced_projections.py.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrize

from opfuser import MergedLinear, Sequential
from opfuser.basic.merged_linear import BasicMergedLinear, MergedBias
from opfuser.errors import ArgumentError, InputError, ReadOnlyAttributeError
from opfuser.testing import check_op
from tests.basic.values import DTYPES, fill, saved_by
from tests.contract.tensors import Gemms, against, rand

SIZES = {"q_proj": 8, "k_proj": 3, "v_proj": 5}
F64 = torch.float64


def merged(*, apart: bool = False, bias: Any = True, **how: Any) -> MergedLinear:
    op = fill(MergedLinear(6, SIZES, bias=bias, **how))
    return take_apart(op) if apart else op


def take_apart(op: MergedLinear) -> MergedLinear:
    """The operation, every parameter of which has a storage of its own."""
    for p in op.parameters():
        p.data = p.data.clone()
    return op


def projected(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """What it stands for: linear transformations with parameters of these names."""
    parts = [F.linear(x, p[f"{n}.weight"], p.get(f"{n}.bias")) for n in SIZES]
    return torch.cat(parts, -1)


def plain(op: MergedLinear, x: Tensor) -> Tensor:
    return projected(dict(op.named_parameters()), x)


apart_or_not = pytest.mark.parametrize("apart", [False, True], ids=["one storage", "apart"])


def products(call: Callable[[], Any]) -> int:
    """How many matrix products a call makes."""
    with Gemms() as made:
        call()
    return len(made.shapes)


@apart_or_not
@pytest.mark.parametrize("bias", [True, False, ("q_proj", "v_proj")], ids=["all", "none", "some"])
def test_three_linear_modules(apart: bool, bias: Any, device: torch.device) -> None:
    for dtype in DTYPES:
        op = merged(apart=apart, bias=bias, dtype=dtype).to(device)
        for shape in [(4, 6), (6,), (2, 3, 6), (0, 6), (2, 0, 6)]:
            x = rand(*shape, dtype=dtype).to(device).requires_grad_()
            for call in (op, Sequential(op)):
                against(call, projected, x, parameters=op.named_parameters())


@apart_or_not
def test_weights_as_operation(apart: bool, device: torch.device) -> None:
    op = merged(apart=apart, bias=False).basic_ops[0].to(device)
    check_op(op, torch.randn(3, 5, 6, device=device), dtypes=DTYPES)  # copies are apart
    assert isinstance(op, BasicMergedLinear)


@pytest.mark.parametrize("bias", [True, ("k_proj",)], ids=["all", "some"])
def test_biases_as_operation(bias: Any, device: torch.device) -> None:
    op = merged(bias=bias).basic_ops[1].to(device)

    assert isinstance(op, MergedBias)
    for name in op.names:  # of which check_op expects gradients otherwise
        getattr(op, name).weight = None
    check_op(op, torch.randn(3, 5, 16, device=device), dtypes=DTYPES)


def test_products() -> None:
    """One of each kind in one storage; apart one per projection, but for the weights' gradients."""
    dy = torch.randn(4, 16)
    for apart, counts in ((False, (1, 2)), (True, (3, 4))):
        op, x = merged(apart=apart), torch.randn(4, 6, requires_grad=True)
        with Gemms() as forward:
            y = op(x)
        assert (len(forward.shapes), products(partial(y.backward, dy))) == counts
        op.q_proj.requires_grad_(False)
        y, trained = op(x.detach()), [p for p in op.parameters() if p.requires_grad]
        assert products(partial(torch.autograd.grad, y, trained, dy)) == 2


@apart_or_not
@pytest.mark.parametrize("frozen", [("q_proj",), ("k_proj", "v_proj"), tuple(SIZES)], ids=str)
def test_frozen_projections(apart: bool, frozen: Sequence[str]) -> None:
    op, x = merged(apart=apart, dtype=F64), rand(4, 6, grad=True)
    for name in frozen:
        op.get_submodule(name).requires_grad_(False)
    against(op, projected, x)
    x = x.detach()
    saved = saved_by(lambda: op(x))  # for whose gradients no weight is read
    assert [t.shape for t in saved] == ([(4, 6)] if len(frozen) < 3 else [])


def test_saves_the_input_and_the_weights_alone() -> None:
    for apart in (False, True):
        op, x = merged(apart=apart), torch.randn(4, 6, requires_grad=True)
        own = {p.data_ptr() for p in op.parameters()}
        saved = saved_by(lambda op=op, x=x: op(x))  # type: ignore[misc]
        assert {t.data_ptr() for t in saved} - own == {x.data_ptr()}


@pytest.mark.parametrize("into", ["main_grad", "grad"])
@apart_or_not
def test_gradients_accumulate(apart: bool, into: str) -> None:
    op = merged(apart=apart, dtype=F64)
    setattr(op, f"accumulate_into_{into}", True)
    op.v_proj.requires_grad_(False)
    x, dy = torch.randn(4, 6, dtype=F64), torch.randn(4, 16, dtype=F64)
    weights = [op.q_proj.weight, op.k_proj.weight]
    wanted = torch.autograd.grad(plain(op, x), weights, dy)
    buffers = [torch.ones_like(weight) for weight in weights]
    for weight, buffer in zip(weights, buffers):
        setattr(weight, into, buffer)
    op(x).backward(dy)
    for weight, buffer, dw in zip(weights, buffers, wanted):
        assert getattr(weight, into) is buffer
        torch.testing.assert_close(buffer - 1, dw)
    assert op.v_proj.weight.grad is None
    if into == "main_grad":
        assert op.q_proj.weight.grad_added_to_main_grad
        assert not op.q_proj.weight.grad.any()


def test_gradients_are_distinct_memory() -> None:
    op = merged()
    op(torch.randn(4, 6)).sum().backward()
    before = {name: p.grad.clone() for name, p in op.named_parameters()}
    op.q_proj.weight.grad.zero_()
    op.q_proj.bias.grad.zero_()
    for name, p in op.named_parameters():
        assert torch.equal(p.grad, before[name]) == (not name.startswith("q_proj"))


def test_a_weight_changed_in_between_is_noticed() -> None:
    """Also one that is not the first of its storage."""
    op, x = merged(), torch.randn(4, 6, requires_grad=True)
    y = op(x)
    with torch.no_grad():
        op.v_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_of_takes_the_very_parameters() -> None:
    attention = nn.ModuleDict(
        {n: nn.Linear(6, size, bias=n != "k_proj") for n, size in SIZES.items()}
    )
    modules: Any = dict(attention.items())
    op = MergedLinear.of(modules).eval()
    assert [id(p) for p in op.parameters()] == [id(p) for p in attention.parameters()]
    assert list(op.state_dict()) == list(attention.state_dict())
    x = torch.randn(4, 6)
    wanted = torch.cat([module(x) for module in modules.values()], -1)
    torch.testing.assert_close(op(x), wanted)
    op.merge_storages()
    assert [id(p) for p in op.parameters()] == [id(p) for p in attention.parameters()]
    torch.testing.assert_close(op(x), wanted)
    with torch.no_grad():
        attention["k_proj"].weight.zero_()
    assert not op(x)[:, 8:11].any()


def test_storages_merge_once_and_stay_merged() -> None:
    op, x = merged(apart=True), torch.randn(4, 6)
    op.q_proj.weight.grad = torch.ones(8, 6)
    before, wanted = list(op.parameters()), op(x)
    assert products(lambda: op(x)) == 3
    op.merge_storages()
    assert products(lambda: op(x)) == 1
    places = [p.data_ptr() for p in op.parameters()]
    op.merge_storages()
    assert places == [p.data_ptr() for p in op.parameters()]
    assert list(map(id, before)) == list(map(id, op.parameters()))
    assert op.q_proj.weight.grad is not None
    torch.testing.assert_close(op(x), wanted)
    assert products(lambda: op.double()(x)) == 1
    op = MergedLinear(6, SIZES, device="meta").to_empty(device="cpu")
    op.reset_parameters()
    assert products(lambda: op(x)) == 1
    assert products(lambda: copy.deepcopy(op)(x)) == 3


def test_neighbors_in_memory_of_different_storages_are_no_one_storage() -> None:
    whole = bytearray(4 * 6 * 16)
    pieces, start = [], 0
    for size in SIZES.values():
        count = size * 6
        pieces.append(torch.frombuffer(whole, dtype=torch.float32, count=count, offset=4 * start))
        start += count
    op = merged(bias=False)
    for p, piece in zip(op.parameters(), pieces):
        piece.copy_(p.detach().flatten())
        p.data = piece.view(p.shape)
    x = torch.randn(4, 6)
    torch.testing.assert_close(op(x), plain(op, x))


def test_one_weight_for_two_projections() -> None:
    module = nn.Linear(6, 4, dtype=F64)
    op, x = MergedLinear.of({"a": module, "b": module}), torch.randn(5, 6, dtype=F64)
    module.weight.data = torch.cat([module.weight.data, torch.zeros(4, 6, dtype=F64)])[:4]
    y = op(x)
    torch.testing.assert_close(y, torch.cat([module(x)] * 2, -1))
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), module.weight),
        torch.autograd.grad(2 * module(x).sum(), module.weight),
    )


@apart_or_not
def test_files(apart: bool, tmp_path: Any) -> None:
    op, other = merged(apart=apart), merged()
    save_file(op.state_dict(), tmp_path / "weights.safetensors")
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    x = torch.randn(4, 6)
    torch.testing.assert_close(other(x), op(x))
    file = io.BytesIO()
    torch.save(op, file)
    assert len(file.getvalue()) < 20_000
    file.seek(0)
    for twin in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(op))):
        torch.testing.assert_close(twin(x), op(x))
        twin.k_proj.weight.data.zero_()
        assert twin(x)[:, 8:11].allclose(twin.k_proj.bias.expand(4, -1))


@apart_or_not
def test_save_pretrained(apart: bool, tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    class Config(transformers.PretrainedConfig):  # type: ignore[misc,name-defined]
        model_type = "projections"

    class Model(transformers.PreTrainedModel):  # type: ignore[misc,name-defined]
        config_class = Config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.qkv = merged()
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None: ...

        def forward(self, x: Tensor) -> Any:
            return self.qkv(x)

    model, x = Model(Config()), torch.randn(4, 6)
    if apart:
        take_apart(model.qkv)
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    torch.testing.assert_close(Model.from_pretrained(tmp_path)(x), model(x))


def test_parameters_that_are_replaced() -> None:
    op = merged(dtype=F64)
    seq, x = Sequential(op), rand(4, 6, grad=True)
    seq(x)
    op.k_proj.weight = nn.Parameter(torch.randn(3, 6, dtype=F64))
    op.k_proj._parameters["bias"] = nn.Parameter(torch.randn(3, dtype=F64))  # as FSDP does
    against(seq, projected, x, parameters=op.named_parameters())
    new = {name: torch.randn_like(p).requires_grad_() for name, p in op.named_parameters()}
    against(lambda x: functional_call(op, new, (x,)), projected, x, parameters=new.items())


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


def test_a_parametrized_projection() -> None:
    op = merged(dtype=F64)
    seq, x = Sequential(op), rand(4, 6, grad=True)
    seq(x)
    for name in ("weight", "bias"):
        parametrize.register_parametrization(op.k_proj, name, Doubled())

    def formula(p: dict[str, Tensor], x: Tensor) -> Tensor:
        own = "k_proj.parametrizations.{}.original"
        doubled = {f"k_proj.{name}": 2 * p[own.format(name)] for name in ("weight", "bias")}
        return projected({**p, **doubled}, x)

    against(seq, formula, x, parameters=op.named_parameters())
    assert seq.plan(x).forward[0].indices == (0, 1)  # fused as before


@apart_or_not
def test_autocast(apart: bool) -> None:
    op, x = merged(apart=apart), torch.randn(4, 6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, wanted = op(x), plain(op, x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, wanted)
    y.sum().backward()
    assert {p.grad.dtype for p in op.parameters()} == {torch.float32}


@apart_or_not
def test_vmap_and_batched_gradients(apart: bool) -> None:
    op = merged(apart=apart, dtype=F64)
    x = torch.randn(4, 6, dtype=F64, requires_grad=True)
    with torch.no_grad():
        batch = torch.randn(2, 4, 6, dtype=F64)
        torch.testing.assert_close(vmap(op)(batch), op(batch))
    y, dy = op(x), torch.randn(3, 4, 16, dtype=F64)
    parameters = [x, *op.parameters()]
    batch = torch.autograd.grad(y, parameters, dy, is_grads_batched=True, retain_graph=True)
    for n in range(3):
        for a, b in zip(torch.autograd.grad(y, parameters, dy[n], retain_graph=True), batch):
            torch.testing.assert_close(a, b[n])


def test_tensors_without_memory() -> None:
    with FakeTensorMode():
        op, x = MergedLinear(6, SIZES), torch.randn(4, 6)
        assert op(x).shape == (4, 16)
    seq = Sequential(MergedLinear(6, SIZES, device="meta"))
    y = seq(torch.empty(4, 6, device="meta"))
    y.sum().backward()
    assert (y.shape, seq[0].k_proj.weight.grad.shape) == ((4, 16), (3, 6))


def test_attributes() -> None:
    op = MergedLinear(6, SIZES, bias=["q_proj"], accumulate_into_grad=True, dtype=torch.bfloat16)
    assert (op.in_features, op.out_features) == (6, 16)
    assert op.k_proj.bias is None
    assert not op.q_proj.bias.any()
    assert op.accumulate_into_grad
    assert op.recipe == "inherit"
    bound = 6**-0.5
    assert 0.5 * bound < op.q_proj.weight.abs().max() <= bound
    assert not op.eval().basic_ops[0].training
    assert repr(op).startswith("MergedLinear(\n  in_features=6, q_proj=8, k_proj=3, v_proj=5\n")
    with pytest.raises(ReadOnlyAttributeError, match="in_features is fixed"):
        op.in_features = 7
    op.accumulate_into_main_grad = True
    with pytest.raises(ArgumentError, match="A weight's gradient is accumulated in one place"):
        op(torch.randn(2, 6))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((6, {}), "Projections have names"),
        ((6, {"forward": 4}), "Projections have names, without dots, that are no attributes"),
        ((6, {"a.b": 4}), r"received: \['a.b'\]|\['a.b'\]"),
        ((6, {"sizes": 4}), "Projections have names"),
        ((-1, {"a": 4}), "Sizes must not be negative"),
        ((6, {"a": -4}), "Sizes must not be negative"),
    ],
)
def test_arguments(arguments: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        MergedLinear(*arguments)


def test_other_arguments() -> None:
    with pytest.raises(ArgumentError, match=r"biases are those of projections.*bias=.'b'"):
        MergedLinear(6, {"a": 4}, bias=["b"])
    with pytest.raises(ArgumentError, match=r"computes in float16.*torch.int32"):
        MergedLinear(6, {"a": 4}, dtype=torch.int32)


def hooked() -> nn.Linear:
    module = nn.Linear(6, 4)
    module.register_forward_hook(lambda *unused: None)
    return module


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.Conv1d(6, 4, 1), "a torch.nn.modules.conv.Conv1d, which is none"),
        (hooked, "which carries hooks"),
        (
            lambda: parametrize.register_parametrization(nn.Linear(6, 4), "weight", Doubled()),
            "none",
        ),
        (lambda: nn.Linear(5, 4), "one in_features, and weights of one dtype"),
        (lambda: nn.Linear(6, 4, dtype=F64), "a: 6, torch.float32, cpu, b: 6, torch.float64"),
        (lambda: nn.Linear(6, 4, device="meta"), "on one device.*meta"),
    ],
)
def test_modules_that_are_not_merged(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        MergedLinear.of({"a": nn.Linear(6, 4), "b": make()})


def test_inputs_and_weights_that_do_not_fit() -> None:
    op = merged()
    text = "last dimension of the input must be in_features.*in_features=6, q_proj=8.*Pass a tensor"
    for shape in ((4, 5), ()):
        with pytest.raises(InputError, match=text):
            op(torch.randn(shape))
    with pytest.raises(InputError, match="fp16, bf16, fp32 or fp64"):
        op(torch.zeros(4, 6, dtype=torch.int64))
    with pytest.raises(InputError, match=r"sum of the sizes of the biases.*\(4, 15\).*\(..., 16\)"):
        op.basic_ops[1](torch.randn(4, 15))
    op.k_proj.double()
    text = (
        "weights of one dtype.*" + re.escape("k_proj (3, 6) torch.float64") + ".*Cast all of them"
    )
    with pytest.raises(ArgumentError, match=text):
        op(torch.randn(4, 6))
    with pytest.raises(ArgumentError, match="Parameters in one storage are plain ones, of one"):
        op.merge_storages()
    op.float().v_proj.weight = None
    with pytest.raises(ArgumentError, match=r"A projection needs its weight.*v_proj = Projection"):
        op(torch.randn(4, 6))
