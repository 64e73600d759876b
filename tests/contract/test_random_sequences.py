"""Random sequences of operations and modules, called several times while they change.

Fused, unfused and by ``reference`` of each operation: outputs, extra outputs and all gradients are
the same in float64, and nothing that the caller passes is written to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import opfuser as of
from opfuser.op import BasicOperation, FusedOperation

F64 = torch.float64
WIDTH = 4
BRANCHES = count()


def _linear(r: Random) -> nn.Module:
    return of.Linear(WIDTH, WIDTH, bias=r.random() < 0.7)


def _wide(r: Random) -> nn.Module:
    gated = r.choice([of.SwiGLU, of.GEGLU, of.ClampedSwiGLU])()
    return of.Sequential(of.Linear(WIDTH, 2 * WIDTH), gated)


def _heads(r: Random) -> nn.Module:
    parts = [of.QKNorm(1, WIDTH), of.RotaryEmbedding(1, WIDTH, interleaved=r.random() < 0.5)]
    core = of.DotProductAttention(1, causal=r.random() < 0.5)
    return of.Sequential(_linear_to(3 * WIDTH), *parts[r.randint(0, 2) :], core)


def _linear_to(width: int) -> nn.Module:
    return of.Linear(WIDTH, width)


def _branch(r: Random) -> nn.Module:
    branch = of.Residual(*_modules(r, r.randint(1, 3)))
    branch[0].channels = branch[-1].channels = f"branch {next(BRANCHES)}", False
    return branch


def _channel(r: Random) -> nn.Module:
    """A tap that the caller may get too, read in place or exchanged, over anything."""
    name = f"channel {r.random()}"
    tap, public = of.MakeExtraOutput(in_place=r.random() < 0.5), r.random() < 0.5
    tap.set_extra_output_channel(0, name, output_to_caller=public)
    reader = of.SwapExtra() if r.random() < 0.3 else of.AddExtraInput(in_place=r.random() < 0.5)
    tap.channels, reader.channels = (name, public), (name, True)
    return of.Sequential(
        tap, *_modules(r, r.randint(1, 3)), reader.set_extra_input_channel(0, name)
    )


def _hooked(r: Random) -> nn.Module:
    module = of.Sequential(*_modules(r, 2))
    module.register_forward_hook(lambda *_: None)
    return module


def _shared(r: Random) -> nn.Module:
    op = r.choice([_linear(r), of.RMSNorm(WIDTH), of.Bias(WIDTH)])
    return of.Sequential(op, of.SiLU(), op)


KINDS: list[Callable[[Random], nn.Module]] = [
    _linear, _linear, _wide, _heads, _branch, _channel, _channel, _channel, _hooked, _shared,
    lambda r: r.choice([of.GELU, of.SReLU, of.SiLU, of.Tanh])(),
    lambda r: of.RMSNorm(WIDTH, zero_centered_gamma=r.random() < 0.5),
    lambda r: of.LayerNorm(WIDTH, eps=r.choice([1e-5, 0.1])),
    lambda r: of.Bias(WIDTH),
    lambda r: of.ConstantScale(r.choice([0.5, -2.0])),
    lambda r: of.AddExtraInput(in_place=r.random() < 0.5),
    lambda r: of.MakeExtraOutput(in_place=r.random() < 0.5),
    lambda r: of.SwapExtra(),
    lambda r: of.ScaledSReLU(),
    lambda r: r.choice([nn.Linear(WIDTH, WIDTH), of.Identity()]),
    lambda r: nn.Tanh(),
    lambda r: nn.Tanh(),
]  # fmt: skip


def _modules(r: Random, number: int) -> list[nn.Module]:
    return [r.choice(KINDS)(r) for _ in range(number)]


def _flat(modules: Any) -> Iterator[nn.Module]:
    for module in modules:
        if isinstance(module, of.Sequential):
            yield from _flat(module)
        elif isinstance(module, FusedOperation):
            yield from module.basic_ops
        else:
            yield module


def _by_references(
    seq: of.Sequential, x: Tensor, extra_input: Callable[[nn.Module, Tensor], Tensor]
) -> tuple[Tensor, ...]:
    """Output and extra outputs; ``extra_input`` is what the caller passes to an operation."""
    stored: dict[str, Tensor] = {}
    outputs: list[Tensor] = []
    for op in _flat(seq):
        if not isinstance(op, BasicOperation):
            x = op(x)
            continue
        # Of the single extra input or the first extra output; SwapExtra has one of either.
        channel, public = getattr(op, "channels", ("", True))
        reads = channel if op.num_extra_inputs else ""
        extras = [
            stored[reads] if reads else extra_input(op, x) for _ in range(op.num_extra_inputs)
        ]
        result = op.reference(x, *extras)
        x, *made = result if op.num_extra_outputs else (result,)
        for y in made:
            if channel and not reads:
                stored[channel] = y
            outputs += [y] if public else []
    return (x, *outputs)


class Call(NamedTuple):
    """What all ways to compute are given."""

    tensors: list[Tensor]
    grads: list[Tensor | None]
    grad: bool


def _run(function: Callable[..., Any], seq: nn.Module, call: Call) -> list[Tensor | None]:
    """Outputs and gradients; the caller's tensors stay as they are."""
    tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in call.tensors]
    seq.zero_grad()
    with nullcontext() if call.grad else torch.no_grad():
        outputs = function(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    pairs = [(y, g) for y, g in zip(outputs, call.grads) if y.grad_fn is not None and g is not None]
    if pairs:
        torch.autograd.backward(*zip(*pairs))
    if pairs or not any(isinstance(m, of.AddExtraInput) and m.in_place for m in seq.modules()):
        for mine, given in zip(tensors, call.tensors):
            assert torch.equal(mine, given)
    return [y.detach() for y in outputs] + [t.grad for t in (*tensors, *seq.parameters())]


def _change(seq: of.Sequential, r: Random) -> None:
    for module in seq.modules():
        if isinstance(module, of.ConstantScale):
            module.scale = r.choice([0.5, 3.0])
        elif isinstance(module, (of.AddExtraInput, of.MakeExtraOutput)):
            module.in_place = not module.in_place
        elif isinstance(module, of.RMSNorm):
            module.eps = r.choice([1e-5, 0.3])
    for p in seq.parameters():
        if r.random() < 0.3:
            p.requires_grad_(not p.requires_grad)


def _call(seq: of.Sequential, r: Random) -> Call:
    x = torch.randn(r.choice([0, 1, 2]), 3, WIDTH, dtype=F64)
    extras: list[Tensor] = []

    def made(op: nn.Module, x: Tensor) -> Tensor:
        extras.append(
            torch.randn(x.shape[:-1] if isinstance(op, of.ScaledSReLU) else x.shape).double()
        )
        return extras[-1]

    with torch.no_grad():
        outputs = _by_references(seq, x, made)
    grads = [
        torch.randn(y.shape).double() if r.random() < 0.5 or not n else None
        for n, y in enumerate(outputs)
    ]
    return Call([t.requires_grad_(r.random() < 0.6) for t in (x, *extras)], grads, r.random() < 0.6)


@pytest.mark.parametrize("seed", range(80))
def test_random_sequences(seed: int) -> None:
    r = Random(seed)
    torch.manual_seed(seed)
    seq = of.Sequential(*_modules(r, r.randint(2, 6))).double()
    with torch.no_grad():
        for p in seq.parameters():
            p.normal_(std=0.5)
    reentrant = r.choice([None, None, None, False, True])

    def by_call(*tensors: Tensor) -> Any:
        if reentrant is None or not torch.is_grad_enabled():
            return seq(*tensors)
        return checkpoint(seq, *tensors, use_reentrant=reentrant)

    for step in range(4):
        if step == 2:
            _change(seq, r)
        twin, call = copy.deepcopy(seq), _call(seq, r)
        if reentrant:  # a checkpoint with re-entry has gradients if its input has one
            call.tensors[0].requires_grad_()

        def by_references(x: Tensor, *extras: Tensor, twin: of.Sequential = twin) -> Any:
            left = iter(extras)
            return _by_references(twin, x, lambda *_: next(left))

        expected = _run(by_references, twin, call)
        off: AbstractContextManager[Any]
        for off in (nullcontext(), of.disable("*")):
            with off:
                found = _run(by_call, seq, call)
            assert len(found) == len(expected)
            for ours, theirs in zip(found, expected):
                known = ours if theirs is None else theirs
                zero = None if known is None else torch.zeros_like(known)
                torch.testing.assert_close(
                    zero if ours is None else ours,
                    zero if theirs is None else theirs,
                    rtol=1e-9,
                    atol=1e-9,
                )
