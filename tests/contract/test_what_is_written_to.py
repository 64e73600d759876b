"""Hazards 1, 2, 6 and 9: nothing of the caller's is written to, and no two gradients share memory.

In-place flags are permissions, and saved tensors stay what they were.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser as of
from tests.contract.tensors import F64, against, fill, rand
from tests.engine.toys import Sigmoid

P = dict[str, Tensor]


def tap(**kw: Any) -> of.MakeExtraOutput:
    return of.MakeExtraOutput().set_extra_output_channel(0, "skip", output_to_caller=False)


def add(**kw: Any) -> of.AddExtraInput:
    return of.AddExtraInput(in_place=True).set_extra_input_channel(0, "skip")


def linear(p: P, x: Tensor, n: int = 0) -> Tensor:
    return F.linear(x, p[f"{n}.weight"], p.get(f"{n}.bias"))


def twice(model: nn.Module, x: Tensor) -> Any:
    return model(x, x)


def twice_and_elsewhere(model: nn.Module, x: Tensor) -> Any:
    h = x * 2
    return model(h, h) + h


MAKE_EXTRA = [(False, "Identity"), (True, "BasicLinear"), (False, "RMSNorm"), (True, "RMSNorm")]
MAKE_EXTRA += [(in_place, "nothing") for in_place in (False, True)]
AFTER: dict[str, tuple[Callable[..., list[nn.Module]], Callable[..., Tensor]]] = {
    "Identity": (lambda **kw: [of.Identity()], lambda p, x: x * 1),
    "BasicLinear": (lambda **kw: [of.BasicLinear(8, 8, **kw)], lambda p, x: linear(p, x, 1)),
    "RMSNorm": (
        lambda **kw: [of.RMSNorm(8, **kw)], lambda p, x: F.rms_norm(x, (8,), p["1.weight"], 1e-5)
    ),
    "nothing": (lambda **kw: [], lambda p, x: x * 1),
}  # fmt: skip
FOLLOWERS: dict[str, tuple[Callable[..., nn.Module], Callable[[P, Tensor], Tensor]]] = {
    "BasicLinear": (lambda **kw: of.BasicLinear(8, 8, **kw), lambda p, x: linear(p, x, 2)),
    "GELU": (lambda **kw: of.GELU(), lambda p, x: F.gelu(x, approximate="tanh")),
    "RMSNorm": (
        lambda **kw: of.RMSNorm(8, **kw), lambda p, x: F.rms_norm(x, (8,), p["2.weight"], 1e-5)
    ),
}  # fmt: skip

# Operations, the formula, shapes of the inputs, and how the sequence is called.
CASES: dict[str, tuple[Callable[..., list[Any]], Callable[..., Any], list[Any], Any]] = {
    **{
        f"hazard 1: residual after a linear, bias {bias}": (
            lambda bias=bias, **kw: [tap(), of.Linear(8, 8, bias=bias, **kw), add()],
            lambda p, x: x + linear(p, x, 1), [(5, 8)], None,
        ) for bias in (False, True)
    },
    "hazard 1: the input itself": (
        lambda **kw: [of.Linear(8, 8, bias=False, **kw), of.AddExtraInput(in_place=True)],
        lambda p, x: linear(p, x) + x, [(5, 8)], twice,
    ),
    "hazard 1: the input itself, scaled": (
        lambda **kw: [
            of.BasicLinear(8, 8, **kw), of.ConstantScale(0.5), of.AddExtraInput(in_place=True)
        ],
        lambda p, x: 0.5 * linear(p, x) + x, [(5, 8)], twice,
    ),
    # The sigmoid's output reaches the caller too: it must survive there as well.
    **{
        f"hazard 2: saved by the sigmoid before {name}": (
            lambda make=make, **kw: [Sigmoid(), of.MakeExtraOutput(), make(**kw)],
            lambda p, x, f=f: (f(p, torch.sigmoid(x)), torch.sigmoid(x)), [(5, 8)], None,
        ) for name, (make, f) in FOLLOWERS.items()
    },
    **{
        f"hazard 6: a tap before {name}, in place {in_place}": (
            lambda in_place=in_place, make=AFTER[name][0], **kw: [
                of.MakeExtraOutput(in_place=in_place), *make(**kw)
            ],
            lambda p, x, f=AFTER[name][1]: (f(p, x), x * 1), [(5, 8)], None,
        ) for in_place, name in MAKE_EXTRA
    },
    "hazard 9: both sides of an addition": (
        lambda **kw: [of.AddExtraInput()], lambda p, x, h: x + h, [(8,), (8,)], None,
    ),
    "hazard 9: both sides of an addition behind a linear": (
        lambda **kw: [of.Linear(8, 8, **kw), of.AddExtraInput()],
        lambda p, x, h: linear(p, x) + h, [(8,), (8,)], None,
    ),
    # Nothing is summed for an input without rows, so that db equals dy: but it may not be dy.
    "hazard 9: bias of a single vector": (
        lambda **kw: [of.ConstantScale(1.0), of.Bias(8, **kw), of.Identity()],
        lambda p, x: x + p["1.bias"], [(8,)], None,
    ),
    "hazard 9: linear of a single vector": (
        lambda **kw: [of.ConstantScale(1.0), of.Linear(8, 8, **kw), of.Identity()],
        lambda p, x: linear(p, x, 1), [(8,)], None,
    ),
    "hazard 9: views of the received gradient": (
        lambda **kw: [of.Reshape((8,)), of.Bias(8, **kw), of.Identity(), of.Reshape((2, 4))],
        lambda p, x: x + p["1.bias"].view(2, 4), [(2, 4)], None,
    ),
    # A gradient that autograd adds up with others on the way to a tensor that is no leaf.
    "hazard 9: one input used twice and elsewhere": (
        lambda **kw: [of.Bias(8, **kw), of.AddExtraInput()],
        lambda p, x: 6 * x + p["0.bias"], [(3, 8)], twice_and_elsewhere,
    ),
}  # fmt: skip


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_nothing_but_what_is_ours(name: str, fused: bool) -> None:
    """With the fusions of the library, and without: their kernels differ."""
    make, formula, shapes, call = CASES[name]
    seq = fill(of.Sequential(*make(**F64)))
    inputs = [rand(*shape, grad=True) for shape in shapes]
    named = list(seq.named_parameters())

    def model(*xs: Tensor) -> Any:
        with of.disable(*["*"] * (not fused)):
            return seq(*xs) if call is None else call(seq, *xs)

    ys = against(model, formula, *inputs, parameters=named)
    dys = [rand(*y.shape) for y in ys]
    kept = [dy.clone() for dy in dys]
    owners = [*inputs, *(p for _, p in named)]
    for t in owners:
        t.grad = None
    outs = model(*inputs)
    torch.autograd.backward(outs, dys)
    first = [t.grad for t in owners]
    memory = [t.untyped_storage().data_ptr() for t in (*dys, *first)]
    assert len(set(memory)) == len(memory), "two gradients share memory"
    want = [2 * g for g in first]
    torch.autograd.backward(model(*inputs), dys)  # autograd accumulates in place from now on
    for t, expected in zip(owners, want):
        assert torch.equal(t.grad, expected)
    assert all(torch.equal(dy, before) for dy, before in zip(dys, kept))


MEMORY_OF_OTHERS: dict[str, Callable[[], of.Sequential]] = {
    "gated activation": lambda: of.Sequential(of.Linear(8, 16), of.SwiGLU(), of.Linear(8, 8)),
    "gated activation first": lambda: of.Sequential(of.SwiGLU(), of.Linear(4, 8)),
    "norm, residual": lambda: of.Sequential(
        of.Residual(of.RMSNorm(8), of.Linear(8, 16), of.SwiGLU(), of.Linear(8, 8)), of.RMSNorm(8)
    ),
    "head and loss": lambda: of.Sequential(
        of.RMSNorm(8), of.Linear(8, 16, bias=False), of.CrossEntropy()
    ),
    "a sum in place": lambda: of.Sequential(
        of.Linear(8, 8), tap(), of.GELU(), of.ConstantScale(0.5), add(), of.LayerNorm(8)
    ),
    "attention": lambda: of.Sequential(of.Linear(8, 24), of.DotProductAttention(2)),
}


def mapped(t: Tensor, folder: Path) -> Tensor:
    """A copy in a file, as a tensor."""
    file = folder / str(len(list(folder.iterdir())))
    file.write_bytes(t.detach().numpy().tobytes())
    how: Any = {"shared": True, "size": t.numel(), "dtype": t.dtype}
    return torch.from_file(str(file), **how).view(t.shape)


# From a tensor to what is packed, and from that to a tensor.
KEEPERS: dict[str, tuple[Callable[[Tensor, Path], Any], Callable[[Any], Tensor]]] = {
    "numpy": (lambda t, _: t.detach().numpy().copy(), torch.from_numpy),
    "dlpack": (lambda t, _: t.detach().numpy().copy(), torch.from_dlpack),
    "file": (mapped, lambda t: t.view_as(t)),
    "one tensor": (lambda t, _: t.detach().clone(), lambda t: t),
}


@pytest.mark.parametrize("keeper", KEEPERS)
@pytest.mark.parametrize("model", MEMORY_OF_OTHERS)
def test_what_hooks_return_is_theirs(model: str, keeper: str, tmp_path: Path) -> None:
    """A hook may hold memory by other means than a tensor: torch counts no references to it."""
    seq, (keep, find) = MEMORY_OF_OTHERS[model](), KEEPERS[keeper]
    attends = any(isinstance(op, of.DotProductAttention) for op in seq)
    x = rand(*([2] * attends), 6, 8).float().requires_grad_()
    extra = (torch.arange(6),) if isinstance(seq[-1], of.CrossEntropy) else ()
    kept: list[Any] = []

    def pack(t: Tensor) -> Any:
        if isinstance(t, nn.Parameter) or not t.numel():
            return t
        kept.append((keep(t, tmp_path), t.detach().clone()))
        return kept[-1]

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else find(packed[0])

    def grads(y: Tensor, retain: bool) -> Any:
        return torch.autograd.grad(y.sum(), [x, *seq.parameters()], retain_graph=retain)

    expected = grads(seq(x, *extra), False)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = seq(x, *extra)
    for retain in (True, True, False):
        for got, want in zip(grads(y, retain), expected):
            assert torch.equal(got, want)
    assert kept
    for memory, before in kept:
        assert torch.equal(torch.as_tensor(memory), before)


def test_an_array_that_an_input_was_made_of_is_not_ours() -> None:
    seq, factor = of.Sequential(of.SwiGLU(), of.Linear(4, 8)), nn.Parameter(torch.tensor(2.0))
    array = rand(6, 8).float().numpy()
    y = seq(torch.from_numpy(array).mul_(factor))
    before = array.copy()
    y.sum().backward()
    assert factor.grad is not None
    assert (array == before).all()
