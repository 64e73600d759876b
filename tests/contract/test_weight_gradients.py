"""Weight gradients that the GEMM adds to ``grad`` or ``main_grad``, in every fusion that makes one.

Beside them stands the same sequence without the flags and without fusions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import opfuser as of
from tests.contract.gradients import handed_over
from tests.contract.tensors import as_exact, fill, outputs_of, rand

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Case(NamedTuple):
    """Operations, the widths of the inputs, the fusion in the plan, whether it adds to ``grad``."""

    ops: Callable[..., list[nn.Module]]
    widths: tuple[int, ...] = (6,)
    fusion: str | None = None
    adds: bool = True


CASES = {
    "alone": Case(lambda **kw: [of.BasicLinear(6, 4, **kw)]),
    "biased": Case(lambda **kw: [of.Linear(6, 4, **kw)]),
    "scaled": Case(
        lambda **kw: [of.BasicLinear(6, 4, **kw), of.ConstantScale(-0.3)],
        fusion="backward_linear_scale",
    ),
    "tapped": Case(
        lambda **kw: [of.MakeExtraOutput(), of.BasicLinear(6, 4, **kw)],
        fusion="backward_linear_add",
    ),
    "normed": Case(lambda **kw: [of.RMSNorm(6), of.Linear(6, 4, **kw)], fusion="norm_linear"),
    "activated": Case(
        lambda **kw: [of.GELU(), of.Linear(6, 4, **kw)], fusion="activation_linear"
    ),
    "gated, added": Case(
        lambda **kw: [of.SwiGLU(), of.BasicLinear(6, 4, **kw), of.AddExtraInput()],
        (12, 4),
        "activation_linear_add",
    ),
    "recomputed": Case(
        lambda **kw: [
            of.RMSNorm(6), of.BasicLinear(6, 10, **kw), of.SwiGLU(), of.BasicLinear(5, 4, **kw),
        ],
        fusion="recompute_mlp",
    ),
    "loss": Case(
        lambda **kw: [of.BasicLinear(6, 4, **kw), of.CrossEntropy()],
        fusion="linear_cross_entropy",
        adds=False,
    ),
}  # fmt: skip
FLAGS = {
    "grad": "accumulate_into_grad",
    "main_grad": "accumulate_into_main_grad",
    "main_grad, written over": "accumulate_into_main_grad",
}
EACH = [
    (name, into, FP32 if (n + m) % 2 else (BF16, FP16)[n % 2])
    for n, name in enumerate(CASES)
    for m, into in enumerate(FLAGS)
]


def without_flags(seq: of.Sequential, dtype: torch.dtype) -> of.Sequential:
    twin = copy.deepcopy(seq).to(dtype)
    for op in twin.modules():
        for flag in set(FLAGS.values()):
            if getattr(op, flag, False):
                setattr(op, flag, False)
    return twin


def grads_of(seq: of.Sequential, tensors: list[Tensor], dy: Tensor) -> list[Tensor]:
    """Gradients of the input and of all parameters, unfused and by autograd."""
    dtype = next(seq.parameters()).dtype
    own = [t.detach().to(dtype) if t.is_floating_point() else t for t in tensors]
    own[0].requires_grad_()
    with of.disable("*"):
        y = outputs_of(seq(*own))[0]
    return list(torch.autograd.grad(y, [own[0], *seq.parameters()], dy.to(dtype)))


@pytest.mark.parametrize(
    ("name", "into", "dtype"), [*EACH, ("alone", "grad", FP16), ("alone", "grad", FP32)], ids=str
)
def test_three_micro_batches(
    name: str, into: str, dtype: torch.dtype, device: torch.device
) -> None:
    case, written_over = CASES[name], into.endswith("over")
    seq = fill(of.Sequential(*case.ops(**{FLAGS[into]: True}))).to(device, dtype)
    twins = [without_flags(seq, as_dtype) for as_dtype in (dtype, torch.float64)]
    parameters = list(seq.parameters())
    weights = [p for p in parameters if p.dim() == 2]
    buffers = [] if into == "grad" else _buffers(weights, written_over)
    sums: list[list[Any]] = [[0] * len(parameters) for _ in twins]
    for step in range(3):
        tensors = [rand(7, n, dtype=dtype).to(device).requires_grad_() for n in case.widths]
        if case.fusion == "linear_cross_entropy":
            tensors.append(torch.randint(0, 4, (7,), device=device))
        with ExitStack() as on:
            if case.fusion == "recompute_mlp":
                on.enter_context(of.enable(case.fusion))
            if case.fusion is not None:
                assert seq.plan(*tensors).fused("backward") == {case.fusion: 1}
            y = outputs_of(seq(*tensors))[0]
        dy = torch.randn_like(y)
        plain, exact = (grads_of(twin, tensors, dy) for twin in twins)
        for total, new in zip(sums, (plain, exact)):
            total[:] = [old + g.double() for old, g in zip(total, new[1:])]

        check_captured(y, tensors[0], parameters, dy, plain, exact, into)
        told = [handed_over(y, w) for w in weights]
        y.backward(dy)
        if into == "grad":
            assert told == [[step == 0 or not case.adds]] * len(weights)
            buffers = buffers if step else [w.grad for w in weights]
        else:
            assert all(w.grad_added_to_main_grad is True for w in weights)
            _check_placeholders(weights)
        assert all(t is b for t, b in zip(_places(weights, into), buffers)), "the same memory"
        for p, theirs, want in zip(parameters, *((plain[1:], exact[1:]) if written_over else sums)):
            if into == "grad":
                as_exact(name, p.grad, theirs.to(dtype), want)
            elif p.dim() == 2:
                start = 0.0 if written_over else 3.0
                as_exact(name, p.main_grad, theirs + start, want + start)


def check_captured(
    y: Tensor, x: Tensor, parameters: list[Any], dy: Tensor, plain: Any, exact: Any, into: str
) -> None:
    """Gradients that autograd captures are right and accumulated nowhere."""
    weights = [p for p in parameters if p.dim() == 2]
    for w in weights:
        w.grad_added_to_main_grad = False
    kept = [None if t is None else t.clone() for t in _places(weights, into)]
    captured = torch.autograd.grad(y, [x, *parameters], dy, retain_graph=True)
    for got, theirs, want in zip(captured, plain, exact):
        as_exact("captured", got, theirs, want)
    for t, before in zip(_places(weights, into), kept):
        assert t is before or t.equal(before) or before.isnan().all()
    assert not any(w.grad_added_to_main_grad for w in weights)


def _buffers(weights: list[Any], written_over: bool) -> list[Tensor | None]:
    for w in weights:
        w.main_grad = torch.full_like(w, float("nan") if written_over else 3.0, dtype=FP32)
        w.overwrite_main_grad = written_over
    return [w.main_grad for w in weights]


def _places(weights: list[Any], into: str) -> list[Tensor | None]:
    return [w.grad if into == "grad" else w.main_grad for w in weights]


def _check_placeholders(weights: list[Any]) -> None:
    """Hazard 8: what autograd gets is not the buffer; a wrapper may do with it what it likes."""
    for w in weights:
        if w.grad is not None:
            before = w.main_grad.clone()
            w.grad.fill_(7.0)
            assert torch.equal(w.main_grad, before)
            w.grad = None
