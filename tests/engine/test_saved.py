"""What forward saves, for how long, and what checkpointing and autocast make of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuser
from opfuser.fused import RecomputeMLP
from tests.basic.values import saved_by
from tests.engine.toys import Sigmoid, Square, Times, grads, plain_sigmoids, randn, same, sigmoids


def test_nothing_is_saved_before_the_first_gradient() -> None:
    seq, x = opfuser.Sequential(Square(), Square(), Square(), Times(), Square()), randn(2, 3)
    saved = saved_by(lambda: seq(x))
    assert len(saved) == 3
    same(saved[0], x**8)
    x.requires_grad_()
    assert len(saved_by(lambda: seq(x))) == 6


def test_a_dropped_output_frees_everything() -> None:
    """Hazard 25: also where an operation saves its own output."""
    seq = opfuser.Sequential(Times(), Square(), Sigmoid(), Times(), Sigmoid())
    x = randn(2, 3, grad=True)
    y = seq(x)
    saved = [t for t in y.grad_fn.saved_tensors if t is not x]
    kept = [*map(weakref.ref, saved)]
    assert len(kept) == 6
    del y, saved
    assert [ref() for ref in kept] == [None] * 6


def test_saved_tensors_may_be_packed() -> None:
    """Offloading: what is unpacked is another tensor."""
    seq, x = sigmoids(), randn(2, 3, grad=True)
    wrt = [x, *seq.parameters()]
    with torch.autograd.graph.save_on_cpu():
        y = seq(x)
    same(grads(y, wrt), grads(plain_sigmoids(seq, x), wrt))


# ``parameter.data = other`` between the passes.


class Exchange(NamedTuple):
    """Operations, and what computes the same by functions of torch and the same parameters."""

    ops: Callable[[], list[Any]]
    plain: Callable[..., Tensor]
    width: int = 3


def _scaled_root(x: Tensor, w: Tensor) -> Tensor:
    """As Llama writes its norm, and with ``1 + w`` Gemma."""
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def _normed_heads(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    heads = x.unflatten(-1, (3, 4))
    q, k = _scaled_root(heads[..., :1, :], q), _scaled_root(heads[..., 1:2, :], k)
    return torch.cat([q, k, heads[..., 2:, :]], -2).flatten(-2)


def _adapted(x: Tensor, w: Tensor, b: Tensor, a1: Tensor, b1: Tensor) -> Tensor:
    return F.linear(x, w, b) + F.linear(F.linear(x, a1), b1)


def _adapted_transposed(x: Tensor, w: Tensor, b: Tensor, a1: Tensor, b1: Tensor) -> Tensor:
    return torch.addmm(b, x, w) + F.linear(F.linear(x, a1), b1)


def _mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


def _mlp_transposed(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return torch.addmm(b2, F.gelu(torch.addmm(b1, x, w1)), w2)


def _merged(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return torch.cat([F.linear(x, w1, b1), F.linear(x, w2, b2)], -1)


def _mlp_of(**kwargs: Any) -> list[Any]:
    gelu = opfuser.GELU("none")
    return [opfuser.Linear(3, 5, **kwargs), gelu, opfuser.Linear(5, 3, **kwargs)]


def _cast(op: Any) -> list[Any]:
    op.weight_is_cast = True
    return [op]


TRANSPOSED = {"weight_transposed": True}
ADAPTERS = {"adapters": [opfuser.LoRAAdapter(rank=2)]}
EXCHANGES = {
    "linear": Exchange(lambda: [opfuser.Linear(3, 3)], F.linear),
    "transposed": Exchange(
        lambda: [opfuser.Linear(3, 3, **TRANSPOSED)], lambda x, w, b: torch.addmm(b, x, w)
    ),
    "MLP": Exchange(_mlp_of, _mlp),
    "transposed MLP": Exchange(lambda: _mlp_of(**TRANSPOSED), _mlp_transposed),
    "scaled": Exchange(
        lambda: [opfuser.Linear(3, 3, bias=False, **TRANSPOSED), opfuser.ConstantScale(0.5)],
        lambda x, w: x @ w * 0.5,
    ),
    "merged": Exchange(lambda: [opfuser.MergedLinear(3, {"a": 2, "b": 4})], _merged),
    "adapted": Exchange(lambda: [opfuser.LoRALinear(3, 3, **ADAPTERS)], _adapted),
    "adapted, transposed": Exchange(
        lambda: [opfuser.LoRALinear(3, 3, **ADAPTERS, **TRANSPOSED)], _adapted_transposed
    ),
    "LayerNorm": Exchange(
        lambda: [opfuser.LayerNorm(3)], lambda x, w, b: F.layer_norm(x, (3,), w, b)
    ),
    "RMSNorm": Exchange(lambda: [opfuser.RMSNorm(3)], _scaled_root),
    "centered LayerNorm": Exchange(
        lambda: [opfuser.LayerNorm(3, zero_centered_gamma=True)],
        lambda x, w, b: F.layer_norm(x, (3,), w + 1, b),
    ),
    "centered RMSNorm": Exchange(
        lambda: [opfuser.RMSNorm(3, zero_centered_gamma=True)],
        lambda x, w: _scaled_root(x, 1 + w),
    ),
    "cast RMSNorm": Exchange(
        lambda: _cast(opfuser.RMSNorm(3)), lambda x, w: _scaled_root(x, w.clone())
    ),
    "QKNorm": Exchange(lambda: [opfuser.QKNorm(1, 4, eps=1e-5)], _normed_heads, 12),
    "centered QKNorm": Exchange(
        lambda: [opfuser.QKNorm(1, 4, eps=1e-5, zero_centered_gamma=True)],
        lambda x, q, k: _normed_heads(x, 1 + q, 1 + k),
        12,
    ),
    "cast QKNorm": Exchange(
        lambda: _cast(opfuser.QKNorm(1, 4, eps=1e-5)),
        lambda x, q, k: _normed_heads(x, q.clone(), k.clone()),
        12,
    ),
    "bias and activation": Exchange(
        lambda: [opfuser.Bias(3), opfuser.GELU("none")], lambda x, b: F.gelu(x + b)
    ),
    "embeddings of positions": Exchange(
        lambda: [opfuser.PositionEmbedding(2, 3)], lambda x, w: x + w
    ),
}


def exchanged_grads(
    call: Callable[[Tensor], Tensor], x: Tensor, parameters: list[nn.Parameter]
) -> list[Tensor]:
    """Gradients where the parameters get other data between the passes."""
    before = [p.data for p in parameters]
    y = call(x)
    for p in parameters:
        p.data = p.data * 3 + 1
    out = grads(y, [x, *(p for p in parameters if p.requires_grad)])
    for p, data in zip(parameters, before):
        p.data = data
    return out


@pytest.mark.parametrize("name", EXCHANGES)
def test_data_of_parameters_are_exchanged_between_the_passes(name: str) -> None:
    """Backward reads the data that torch's functions read then: those of forward, or the new."""
    ops, plain, width = EXCHANGES[name]
    seq = opfuser.Sequential(*ops()).double()
    parameters = [*seq.parameters()]
    x = randn(2, width, grad=True)
    with torch.no_grad():
        for p in parameters:
            p.normal_()
    want = exchanged_grads(lambda x: plain(x, *parameters), x, parameters)
    for _ in range(4):  # recorded in the end
        same(exchanged_grads(seq, x, parameters), want)


def test_a_recomputed_output_is_that_of_forward() -> None:
    """Also where the gradient of the input reads other data."""
    ops = [opfuser.RMSNorm(3, eps=1e-5), *_mlp_of(**TRANSPOSED)]
    ops[2].recompute_mlp = True
    seq, x = opfuser.Sequential(*ops).double(), randn(2, 3, grad=True)
    norm, *parameters = seq.parameters()
    want = exchanged_grads(
        lambda x: _mlp_transposed(_scaled_root(x, norm), *parameters), x, parameters
    )
    for _ in range(4):
        same(exchanged_grads(seq, x, parameters), want)
    plan = seq.last_plan
    assert plan is not None
    assert [type(step.op) for step in plan.backward] == [RecomputeMLP]


@pytest.mark.parametrize("whole", [False, True])
def test_data_of_experts_are_exchanged_between_the_passes(whole: bool) -> None:
    """Functions of torch take slices of a weight, or with bmm the parameter itself."""
    op = opfuser.GroupedLinear(
        2, 3, 4, single_grouped_weight=True, single_grouped_bias=True, **TRANSPOSED
    ).double()
    op.multiplies_whole = whole
    seq, x, sizes = opfuser.Sequential(op), randn(4, 3, grad=True), torch.tensor([2, 2])

    def plain(x: Tensor) -> Tensor:
        if whole:
            return (torch.bmm(x.view(2, 2, 3), op.weight) + op.bias[:, None]).view(4, 4)
        rows = zip(x.view(2, 2, 3), op.weight, op.bias)
        return torch.cat([torch.addmm(b, x, w) for x, w, b in rows])

    parameters = [*seq.parameters()]
    want = exchanged_grads(plain, x, parameters)
    for _ in range(4):
        same(exchanged_grads(lambda x: seq(x, sizes), x, parameters), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_data_of_weights_in_other_dtypes(dtype: torch.dtype) -> None:
    """Under autocast the weights that are read are casts, also of a W^T."""
    for transposed in (False, True):
        seq = opfuser.Sequential(opfuser.Linear(3, 3, weight_transposed=transposed, bias=False))
        weight, x = seq[0].weight, torch.randn(2, 3, requires_grad=True)
        for _ in range(4):
            got = []
            for call in (seq, lambda x: x @ (weight if transposed else weight.t())):  # noqa: B023
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
                    got.append(exchanged_grads(call, x, [weight]))
            assert all(map(torch.equal, *got))


@pytest.mark.parametrize("which", ["input", "weight"])
def test_writes_between_the_passes_are_seen(which: str) -> None:
    seq, x = opfuser.Sequential(opfuser.Linear(3, 3), opfuser.GELU()), torch.randn(2, 3)
    for _ in range(4):  # recorded in the end
        y = seq(x.requires_grad_()).sum()
        with torch.no_grad():
            (x if which == "input" else seq[0].weight).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


# Checkpointing and autocast.


def test_backward_under_autocast_runs_in_the_dtype_of_forward() -> None:
    seq, x = opfuser.Sequential(Times(), Square()), randn(2, 3, grad=True)
    expected = grads((x * seq[0].w) ** 2, [x, seq[0].w])
    y = seq(x)
    with torch.autocast("cpu", torch.bfloat16):
        same(grads(y, [x, seq[0].w]), expected)


class KeepsNumbers(opfuser.BasicOperation):
    """Sets attributes of its context, under names that others may have thought of, too."""

    names = ("span", "kept", "output_like", "saved", "x")

    def op_forward(self, ctx: Any, input_: Tensor, **kwargs: Any) -> Tensor:
        for number, name in enumerate(self.names, 2):
            setattr(ctx, name, number)
        ctx.save_for_backward(input_)
        return input_.square()

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        factors = [getattr(ctx, name) for name in self.names]
        assert factors == [2, 3, 4, 5, 6]
        return 2 * x * grad_output, ()


def test_an_operation_may_set_any_attribute_of_its_context() -> None:
    seq, x = opfuser.Sequential(KeepsNumbers(), KeepsNumbers()), randn(2, 3, grad=True)
    for _ in range(3):
        (dx,) = torch.autograd.grad(seq(x).sum(), x)
        same(dx, 4 * x**3)
