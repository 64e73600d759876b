"""Several inputs, parameters or gradients at once: torch.vmap, is_grads_batched."""

from __future__ import annotations

import re
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
from tests.basic.attributes import CASES, EACH_KIND, Inputs, f32, make
from tests.basic.values import HALF, fill

# torch says so of operators that it calls once per entry.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

BATCH = 3


class Example(NamedTuple):
    """How a module is made, and one of its inputs."""

    make: Callable[[], nn.Module]
    inputs: Inputs


rows, qkv = f32((5, 8)), f32((2, 5, 24))
# Groups of rows are cut by numbers, of which there is then more than one set; docs/limits.md.
OPERATIONS = {
    name: Example(lambda name=name: make(name), CASES[name].inputs)  # type: ignore[misc]
    for name in EACH_KIND
    if name not in ("Dropout", "GroupedLinear", "Jitter")
}
BLOCKS: dict[str, Example] = {
    "dropout in evaluation": Example(lambda: Dropout(0.5).eval(), rows),
    "zero-centered norms": Example(
        lambda: Sequential(LayerNorm(8, zero_centered_gamma=True), RMSNorm(8)), rows
    ),
    "interleaved, part of a head": Example(
        lambda: Sequential(QKNorm(2, 4), RotaryEmbedding(2, 4, interleaved=True, rotary_dim=2)),
        qkv,
    ),
    "pre-norm": Example(
        lambda: Sequential(
            Residual(LayerNorm(8), Linear(8, 16), GELU(), Linear(16, 8)),
            Residual(RMSNorm(8), Linear(8, 16), SwiGLU(), Linear(8, 8)),
            LayerNorm(8),
        ),
        rows,
    ),
    "post-norm": Example(
        lambda: Sequential(
            Residual(Linear(8, 8)), LayerNorm(8), Residual(Linear(8, 8)), RMSNorm(8)
        ),
        rows,
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
        rows,
    ),
    "loss": Example(
        lambda: Sequential(Linear(8, 7), CrossEntropy()),
        lambda: [torch.randn(5, 8), torch.randint(7, (5,))],
    ),
    "plain modules": Example(
        lambda: Sequential(Linear(8, 8), nn.Tanh(), Residual(Linear(8, 8))), rows
    ),
}  # fmt: skip
EXAMPLES = {**OPERATIONS, **BLOCKS}


def made(name: str, device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A module, and its inputs with the batch in front."""
    example = EXAMPLES[name]
    module = fill(example.make()).to(device)
    inputs = zip(*(example.inputs() for _ in range(BATCH)))
    return module, tuple(torch.stack(ts).to(device) for ts in inputs)


def outputs(y: Any) -> tuple[Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)


def stacked(results: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(map(torch.stack, zip(*results)))


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
    for which in range(len(inputs) if len(inputs) > 1 else 0):
        check_several_of_one_input(module, inputs, which)


def check_several_of_one_input(module: nn.Module, inputs: tuple[Tensor, ...], which: int) -> None:
    first = [t[0] for t in inputs]

    def call(t: Tensor) -> tuple[Tensor, ...]:
        return outputs(module(*first[:which], t, *first[which + 1 :]))

    expected = stacked([call(t) for t in inputs[which]])
    torch.testing.assert_close(torch.vmap(call)(inputs[which]), expected)


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


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("QKNorm", HALF[0]), ("QKNorm", torch.float64), ("RotaryEmbedding", HALF[1])],
)
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
    x, positions = torch.randn(BATCH, 2, 5, 24, device=device), torch.randint(20, (BATCH, 5))
    positions = positions.to(device)

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


ONE_AT_A_TIME = (
    r"^A sequence is differentiated for one gradient of its output at a time\. Received: several "
    r"at once \(is_grads_batched=True, vectorize=True or torch\.vmap\), for which an operation has "
    r"no backward\. Call torch\.autograd\.grad for each of them, with retain_graph=True\.$"
)


def gradients(name: str, device: torch.device, batched: bool) -> Sequence[Any]:
    torch.manual_seed(0)
    module, inputs = made(name, device)
    leaves = [t[0].clone().requires_grad_(t.is_floating_point()) for t in inputs]
    ys = [y for y in outputs(module(*leaves)) if y.is_floating_point()]
    wanted = [t for t in [*leaves, *module.parameters()] if t.requires_grad]
    dys = [torch.randn(BATCH, *y.shape, device=device) for y in ys]
    if batched:
        return torch.autograd.grad(ys, wanted, dys, is_grads_batched=True)
    each = [torch.autograd.grad(ys, wanted, dy, retain_graph=True) for dy in zip(*dys)]
    return stacked(each)


# What consists of torch's own operations on a CPU; what else is right depends on the device.
BATCHED = ("AddExtraInput", "BasicLinear", "Bias", "GELU")


@pytest.mark.parametrize("name", EXAMPLES)
def test_several_gradients_are_right_or_refused(name: str, device: torch.device) -> None:
    try:
        got = gradients(name, device, True)
    except NotSupportedError as error:
        refused = str(error)
    else:
        refused = ""
        torch.testing.assert_close(tuple(got), gradients(name, device, False))
    assert not refused or re.search(ONE_AT_A_TIME, refused)
    assert not (refused and name in BATCHED and device.type == "cpu")


@pytest.mark.parametrize("name", ["SwiGLU", "pre-norm"])
def test_several_gradients_refused(name: str, device: torch.device) -> None:
    with pytest.raises(NotSupportedError, match=ONE_AT_A_TIME):
        gradients(name, device, True)
    module, (x,) = made(name, device)
    leaf = x[0].requires_grad_()
    y = module(leaf)
    with pytest.raises(NotSupportedError, match=ONE_AT_A_TIME):
        torch.vmap(lambda dy: torch.autograd.grad(y, leaf, dy, retain_graph=True))(
            torch.stack([y, y])
        )


def test_other_errors_of_a_backward_stay() -> None:
    class Spoilt(opfuser.Identity):
        def op_backward(self, *_: Any) -> Any:
            raise RuntimeError("spoilt")

    with pytest.raises(RuntimeError, match=r"(?m)^spoilt$"):
        Sequential(Spoilt())(torch.ones(2, requires_grad=True)).sum().backward()
