"""Masters in fp32 that a test keeps by hand, and an optimizer of torch on them."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import opfuser
from opfuser.optim import MasterWeights
from opfuser.quantization.weights import encode_weight
from opfuser.recipe import Float8CurrentScaling

BF16, RECIPE = torch.bfloat16, Float8CurrentScaling()
Make = Callable[..., torch.optim.Optimizer]


def model(fp8: bool, seed: int = 0, preserve: bool = False) -> opfuser.Sequential:
    """Parameters in fp32 and bf16, and two weights that are in FP8 if ``fp8`` is set."""
    torch.manual_seed(seed)
    with opfuser.quantized_model_init(fp8, RECIPE, preserve):
        return opfuser.Sequential(
            opfuser.RMSNorm(16),
            opfuser.Linear(16, 32, dtype=BF16),
            opfuser.SiLU(),
            opfuser.BasicLinear(32, 16, dtype=BF16),
        )


def values(seq: nn.Module) -> list[Tensor]:
    """Of parameters, in fp32."""
    linears = {
        m.weight: m for m in seq.modules() if isinstance(m, (opfuser.Linear, opfuser.BasicLinear))
    }
    with torch.no_grad():
        return [
            linears[p].read_weight(torch.float32) if p in linears else p.clone().float()
            for p in seq.parameters()
        ]


def give_gradients(params: Iterable[Tensor], seed: int, without: Sequence[int] = ()) -> None:
    """Drawn ones, in bf16 where parameters are in less; None for the numbers ``without``."""
    torch.manual_seed(seed)
    for n, p in enumerate(params):
        grad = torch.randn(
            p.shape, dtype=torch.promote_types(p.dtype, BF16) if p.itemsize > 1 else BF16
        )
        p.grad = None if n in without else grad


def assert_stored(seq: nn.Module, masters: Iterable[Tensor]) -> None:
    """Bit for bit, the parameters are masters rounded once."""
    scales = {
        m.weight: m.weight_scale
        for m in seq.modules()
        if isinstance(m, (opfuser.Linear, opfuser.BasicLinear)) and m.weight_format
    }
    for p, master in zip(seq.parameters(), masters, strict=True):
        if p in scales:
            codes, scale = encode_weight(master.detach(), RECIPE)
            assert torch.equal(p.view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(scales[p], scale)
        else:
            assert torch.equal(p, master.to(p.dtype))


def saved(thing: Any, *, weights_only: bool = True) -> Any:
    """What is read of a file with it."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


class ByHand:
    """The optimizer on masters, and the parameters that they are rounded to, by hand.

    Args:
        seq: has the parameters, which are only read.
        make: of the optimizer.
        groups: numbers of the parameters, each with options; None is all in one.
    """

    def __init__(
        self,
        seq: nn.Module,
        make: Make,
        groups: Sequence[tuple[Sequence[int], dict[str, Any]]] | None = None,
    ) -> None:
        self.seq = seq
        self.masters = [nn.Parameter(v) for v in values(seq)]
        groups = [(range(len(self.masters)), {})] if groups is None else groups
        self.optimizer = make(
            [{"params": [self.masters[n] for n in ns], **options} for ns, options in groups]
        )

    def take_gradients(self) -> None:
        for p, master in zip(self.seq.parameters(), self.masters):
            master.grad = None if p.grad is None else p.grad.to(master.dtype)

    def step(self) -> None:
        self.take_gradients()
        self.optimizer.step()

    def check(self, seq: nn.Module | None = None) -> None:
        assert_stored(self.seq if seq is None else seq, self.masters)

    def check_state(self, optimizer: MasterWeights, updated: set[Tensor]) -> None:
        """That of the optimizer, by the parameters in its groups; with masters in it."""
        groups = zip(optimizer.param_groups, self.optimizer.param_groups, strict=True)
        for ours, theirs in groups:
            for p, master in zip(ours["params"], theirs["params"], strict=True):
                state = dict(optimizer.state.get(p, {}))
                kept = state.pop("master_param", None)
                assert (kept is not None) == (p.dtype != torch.float32 and p in updated)
                if kept is not None:
                    assert torch.equal(kept, master)
                assert_same(state, self.optimizer.state.get(master, {}))


def assert_same(one: Any, other: Any) -> None:
    """Nested states are equal bit for bit."""
    if isinstance(other, Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(*(t.view(torch.uint8) if t.itemsize == 1 else t for t in (one, other)))
    elif isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in other:
            assert_same(one[key], other[key])
    elif isinstance(other, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other):
            assert_same(a, b)
    else:
        assert one == other
