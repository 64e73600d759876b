"""Several inputs, parameters or gradients at once: torch.vmap, is_grads_batched.

Every operation has an example here, or a reason for having none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import opfuser
from opfuser import (
    GELU,
    CrossEntropy,
    DotProductAttention,
    Dropout,
    GroupedLinear,
    LayerNorm,
    Linear,
    QKNorm,
    Residual,
    RMSNorm,
    RotaryEmbedding,
    Sequential,
    SwiGLU,
)
from opfuser.errors import NotSupportedError

# torch says so of operators that it calls once per entry.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

BATCH = 3


class Swish(opfuser.PointwiseOperation):
    def value(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class Example(NamedTuple):
    """How a module is made, and its inputs with the batch in front."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]


def rows(*more: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(BATCH, 5, 8), *(make() for make in more))


def qkv() -> tuple[Tensor, ...]:
    return (torch.randn(BATCH, 2, 5, 24),)


def same_rows() -> Tensor:
    return torch.randn(BATCH, 5, 8)


def scales() -> Tensor:
    return torch.randn(BATCH, 5)


def targets() -> Tensor:
    return torch.randint(8, (BATCH, 5))


UNARY = (
    "GEGLU GELU GLU QGEGLU QGELU AllGather AllReduce ClampedSwiGLU Identity L2Normalization "
    "MakeExtraOutput Quantize ReGLU ReLU ReduceScatter SReGLU SReLU SiLU SiTUGLU Sigmoid Softplus "
    "SwiGLU Tanh"
).split()
OPERATIONS: dict[str, Example] = {
    **{name: Example(getattr(opfuser, name), rows()) for name in UNARY},
    **{
        name: Example(getattr(opfuser, name), rows(scales))
        for name in "ScaledClampedQGeGLU ScaledSReLU ScaledSiTUGLU ScaledSwiGLU".split()
    },
    "AddExtraInput": Example(opfuser.AddExtraInput, rows(same_rows)),
    "BasicLinear": Example(lambda: opfuser.BasicLinear(8, 4), rows()),
    "Bias": Example(lambda: opfuser.Bias(8), rows()),
    "ConstantScale": Example(lambda: opfuser.ConstantScale(2.0), rows()),
    "CrossEntropy": Example(CrossEntropy, rows(targets)),
    "DotProductAttention": Example(lambda: DotProductAttention(2), qkv),
    "Dropout": Example(lambda: Dropout(0.5).eval(), rows()),
    "Embedding": Example(lambda: opfuser.Embedding(7, 4), lambda: (torch.randint(7, (BATCH, 5)),)),
    "LayerNorm": Example(lambda: LayerNorm(8), rows()),
    "PointwiseOperation": Example(Swish, rows()),
    "QKNorm": Example(lambda: QKNorm(2, 4), qkv),
    "RMSNorm": Example(lambda: RMSNorm(8), rows()),
    "Reshape": Example(lambda: opfuser.Reshape((8, 5)), rows()),
    "RotaryEmbedding": Example(lambda: RotaryEmbedding(2, 4), qkv),
}
# As docs/limits.md says. The message comes from the operation.
CANNOT = {
    "GroupedLinear": "groups of rows are cut by numbers, of which there is then more than one set"
}

BLOCKS: dict[str, Example] = {
    "zero-centred norms": Example(
        lambda: Sequential(LayerNorm(8, zero_centered_gamma=True), RMSNorm(8)), rows()
    ),
    "interleaved, part of a head": Example(
        lambda: Sequential(QKNorm(2, 4), RotaryEmbedding(2, 4, interleaved=True, rotary_dim=2)),
        qkv,
    ),
    "grouped queries": Example(lambda: RotaryEmbedding(4, 4, num_kv_heads=1), qkv),
    "residual": Example(lambda: Sequential(Residual(Linear(8, 8))), rows()),
    "pre-norm": Example(
        lambda: Sequential(
            Residual(LayerNorm(8), Linear(8, 16), GELU(), Linear(16, 8)),
            Residual(RMSNorm(8), Linear(8, 16), SwiGLU(), Linear(8, 8)),
            LayerNorm(8),
        ),
        rows(),
    ),
    "post-norm": Example(
        lambda: Sequential(
            Residual(Linear(8, 8)), LayerNorm(8), Residual(Linear(8, 8)), RMSNorm(8)
        ),
        rows(),
    ),
    "attention": Example(
        lambda: Sequential(
            RMSNorm(24), Linear(24, 24), QKNorm(2, 4), RotaryEmbedding(2, 4),
            DotProductAttention(2), Linear(8, 24),
        ),
        qkv,
    ),
    "chain": Example(
        lambda: Sequential(Linear(8, 8), opfuser.Tanh(), opfuser.ConstantScale(2.0), Dropout(0.0)),
        rows(),
    ),
    "loss": Example(lambda: Sequential(Linear(8, 8), CrossEntropy()), rows(targets)),
    "plain modules": Example(
        lambda: Sequential(Linear(8, 8), nn.Tanh(), Residual(Linear(8, 8))), rows()
    ),
}  # fmt: skip
EXAMPLES = {**OPERATIONS, **BLOCKS}


def made(name: str, device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
    example = EXAMPLES[name]
    module = example.make().to(device)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return module, tuple(t.to(device) for t in example.inputs())


def outputs(y: Any) -> tuple[Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)


def stacked(results: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(map(torch.stack, zip(*results)))


def test_every_operation_has_an_example() -> None:
    assert sorted([*OPERATIONS, *CANNOT]) == sorted(opfuser.basic.__all__)


@pytest.mark.parametrize("name", EXAMPLES)
@torch.no_grad()
def test_several_inputs(name: str, device: torch.device) -> None:
    module, inputs = made(name, device)
    expected = stacked([outputs(module(*(t[n] for t in inputs))) for n in range(BATCH)])
    got = outputs(torch.vmap(module)(*inputs))
    torch.testing.assert_close(got, expected)
    second = tuple(t.movedim(0, 1).contiguous() for t in inputs)
    torch.testing.assert_close(outputs(torch.vmap(module, in_dims=1)(*second)), expected)
    twice = tuple(torch.stack([t, t]) for t in inputs)
    for both, once in zip(outputs(torch.vmap(torch.vmap(module))(*twice)), expected):
        torch.testing.assert_close(both, torch.stack([once, once]))


@pytest.mark.parametrize(
    "name", [name for name in EXAMPLES if list(EXAMPLES[name].make().parameters())]
)
@torch.no_grad()
def test_several_models(name: str, device: torch.device) -> None:
    module, inputs = made(name, device)
    inputs = tuple(t[0] for t in inputs)
    models = {
        k: torch.stack([p + n / 8 for n in range(BATCH)]) for k, p in module.named_parameters()
    }

    def call(parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return outputs(functional_call(module, parameters, inputs))

    expected = stacked([call({k: p[n] for k, p in models.items()}) for n in range(BATCH)])
    torch.testing.assert_close(torch.vmap(call)(models), expected)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", [n for n in EXAMPLES if len(EXAMPLES[n].inputs()) == 2])
@torch.no_grad()
def test_several_of_one_input(name: str, which: int, device: torch.device) -> None:
    module, inputs = made(name, device)
    first = [t[0] for t in inputs]

    def call(t: Tensor) -> tuple[Tensor, ...]:
        return outputs(module(*first[:which], t, *first[which + 1 :]))

    expected = stacked([call(t) for t in inputs[which]])
    torch.testing.assert_close(torch.vmap(call)(inputs[which]), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["QKNorm", "RotaryEmbedding", "interleaved, part of a head"])
@torch.no_grad()
def test_dtypes_of_heads(name: str, dtype: torch.dtype, device: torch.device) -> None:
    module, (x,) = made(name, device)
    module, x = module.to(dtype), x.to(dtype)
    got = torch.vmap(module)(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got, torch.stack([module(t) for t in x]))


@pytest.mark.parametrize("norm", [False, True])
@torch.no_grad()
def test_several_positions(norm: bool, device: torch.device) -> None:
    rotary = RotaryEmbedding(2, 4)
    model = Sequential(QKNorm(2, 4), rotary).to(device) if norm else Sequential(rotary)
    (x,), positions = qkv(), torch.randint(20, (BATCH, 5), device=device)
    x = x.to(device)

    def call(x: Tensor, positions: Tensor) -> Any:
        return model(x, op_kwargs={rotary: {"positions": positions}})

    expected = torch.stack([call(t, at) for t, at in zip(x, positions)])
    torch.testing.assert_close(torch.vmap(call)(x, positions), expected)
    expected = torch.stack([call(x[0], at) for at in positions])
    torch.testing.assert_close(torch.vmap(call, in_dims=(None, 0))(x[0], positions), expected)
    torch.testing.assert_close(model(x[0]), call(x[0], torch.arange(5, device=device)))


@torch.no_grad()
def test_dropout_in_training_draws_as_vmap_is_told(device: torch.device) -> None:
    model, x = Sequential(Dropout(0.5), Dropout(0.0)), torch.ones(BATCH, 4000, device=device)
    y = torch.vmap(model, randomness="different")(x)
    assert set(y.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(y[0], y[1])
    same = torch.vmap(model, randomness="same")(x)
    assert torch.equal(same[0], same[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(model)(x)


@torch.no_grad()
def test_grouped_linear_says_that_it_cannot(device: torch.device) -> None:
    op = GroupedLinear(2, 8, 4, device=device)
    x, sizes = torch.randn(BATCH, 5, 8, device=device), torch.tensor([2, 3], device=device)
    with pytest.raises(
        NotSupportedError,
        match=r"^Groups of rows are multiplied for one input at a time \(GroupedLinear\)\. "
        r"Received: inputs of torch\.vmap\. Call it for one after the other\.$",
    ):
        torch.vmap(op, in_dims=(0, None))(x, sizes)


# ---------------------------------------------------------------------- gradients

ONE_AT_A_TIME = (
    r"^A sequence is differentiated for one gradient of its output at a time\. Received: several "
    r"at once \(is_grads_batched=True, vectorize=True or torch\.vmap\), for which an operation has "
    r"no backward\. Call torch\.autograd\.grad for each of them, with retain_graph=True\.$"
)


def gradients(name: str, device: torch.device, batched: bool) -> Sequence[Any]:
    torch.manual_seed(0)
    module, inputs = made(name, device)
    leaves = [t[0].clone().requires_grad_(t.is_floating_point()) for t in inputs]
    ys = outputs(module(*leaves))
    wanted = [t for t in [*leaves, *module.parameters()] if t.requires_grad]
    dys = [torch.randn(BATCH, *y.shape, device=device) for y in ys]
    if batched:
        return torch.autograd.grad(ys, wanted, dys, is_grads_batched=True)
    each = [torch.autograd.grad(ys, wanted, dy, retain_graph=True) for dy in zip(*dys)]
    return stacked(each)


@pytest.mark.parametrize("name", EXAMPLES)
def test_several_gradients_are_right_or_refused(name: str, device: torch.device) -> None:
    try:
        got = gradients(name, device, True)
    except NotSupportedError:
        with pytest.raises(NotSupportedError, match=ONE_AT_A_TIME):
            gradients(name, device, True)
    else:
        torch.testing.assert_close(tuple(got), gradients(name, device, False))


@pytest.mark.parametrize("name", ["BasicLinear", "Bias", "GELU", "AddExtraInput", "residual"])
def test_several_gradients_on_a_cpu(name: str) -> None:
    device = torch.device("cpu")
    got = gradients(name, device, True)
    torch.testing.assert_close(tuple(got), gradients(name, device, False))


@pytest.mark.parametrize("name", ["SwiGLU", "RMSNorm", "QKNorm", "pre-norm"])
def test_several_gradients_refused(name: str, device: torch.device) -> None:
    with pytest.raises(NotSupportedError, match=ONE_AT_A_TIME):
        gradients(name, device, True)
    x = made(name, device)[1][0][0].requires_grad_()
    y = made(name, device)[0](x)
    with pytest.raises(NotSupportedError, match=ONE_AT_A_TIME):
        torch.vmap(lambda dy: torch.autograd.grad(y, x, dy, retain_graph=True))(torch.stack([y, y]))


def test_other_errors_of_a_backward_stay() -> None:
    class Spoilt(opfuser.Identity):
        def op_backward(self, *_: Any) -> Any:
            raise RuntimeError("spoilt")

    with pytest.raises(RuntimeError, match=r"^spoilt$"):
        Sequential(Spoilt())(torch.ones(2, requires_grad=True)).sum().backward()
