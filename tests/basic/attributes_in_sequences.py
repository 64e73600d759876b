"""Sequences of the operations with attributes, one or more for every fusion that reads some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import opfuser
from opfuser import Sequential
from opfuser.fused import PointwiseChain, PointwiseNorm
from opfuser.op import BasicOperation
from tests.basic.attributes import CASES, Change, Inputs, f32, make, results, rows, same


class Run(NamedTuple):
    """A sequence of operations of the table.

    Attributes:
        ops: names and, where they are others than those of the table, arguments.
        inputs: of the sequence.
        fusions: that its plan contains on every device.
        gather: puts the operations into a sequence.
        enabled: a fusion that is off by default.
    """

    ops: tuple[tuple[str, dict[str, Any]], ...]
    inputs: Inputs
    fusions: tuple[str, ...] = ()
    gather: Callable[[list[BasicOperation]], list[nn.Module]] = list  # type: ignore[assignment]
    enabled: str | None = None

    def make(self, changed: int | None = None, **arguments: Any) -> Sequential:
        """The sequence, with some arguments of one of the operations changed."""
        parts = [
            make(name, **{**own, **(arguments if n == changed else {})})
            for n, (name, own) in enumerate(self.ops)
        ]
        return Sequential(*self.gather(parts))

    def switched(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.enabled is None else opfuser.enable(self.enabled)

    def attributes(self) -> Iterator[tuple[int, str, Change]]:
        """Those that can be set without that inputs of another shape are needed."""
        for n, (name, _) in enumerate(self.ops):
            for attribute, how in CASES[name].attributes.items():
                if isinstance(how, Change) and how.inputs is None and not how.neutral:
                    yield n, attribute, how


def _chain(ops: list[BasicOperation]) -> list[nn.Module]:
    return [PointwiseChain(ops)]


def _chain_and_norm(ops: list[BasicOperation]) -> list[nn.Module]:
    return [PointwiseNorm(before=ops[:-1], norm=ops[-1])]  # type: ignore[arg-type]


LINEAR = ("BasicLinear", {"in_features": 8, "out_features": 8})
NARROW = ("BasicLinear", {"in_features": 4, "out_features": 8})
HALF = ("Dropout", {"p": 0.5})
TWICE = ("ConstantScale", {"scale": 2.0})
CHAIN = (TWICE, HALF, ("Softplus", {}), ("GELU", {}), ("AddExtraInput", {}))

SEQUENCES: dict[str, Run] = {
    "norm and linear": Run((("RMSNorm", {}), LINEAR), rows(), ("norm_linear",)),
    "layer norm and linear": Run((("LayerNorm", {}), LINEAR), rows(), ("norm_linear",)),
    "activation and linear": Run((("GELU", {}), LINEAR), rows(), ("activation_linear",)),
    "bias, activation and linear": Run(
        (("Bias", {}), ("Softplus", {}), LINEAR), rows(), ("activation_linear",)
    ),
    "gated and linear": Run((("ClampedSwiGLU", {}), NARROW), rows(), ("activation_linear",)),
    "feed-forward": Run(
        (("RMSNorm", {}), LINEAR, ("SiTUGLU", {}), NARROW),
        rows(),
        ("recompute_mlp",),
        enabled="recompute_mlp",
    ),
    "linear, bias and activation": Run((LINEAR, ("Bias", {}), ("GELU", {})), rows()),
    "sum and norm": Run(
        (("AddExtraInput", {}), ("MakeExtraOutput", {}), ("LayerNorm", {})), f32((3, 8), (3, 8))
    ),
    "queries and keys": Run(
        (("QKNorm", {}), ("RotaryEmbedding", {})),
        f32((2, 5, 16)),
        ("forward_qk_norm_rotary", "backward_qk_norm_rotary"),
    ),
    "loss": Run(
        (("BasicLinear", {"in_features": 8, "out_features": 7}), ("CrossEntropy", {})),
        lambda: [torch.randn(5, 8), torch.tensor([0, 1, 2, 5, 3])],
        ("linear_cross_entropy",),
    ),
    "linear, scale and sum": Run(
        (LINEAR, TWICE, ("AddExtraInput", {})), f32((3, 8), (3, 8)), ("forward_linear_scale_add",)
    ),
    "linear, bias and sum": Run(
        (LINEAR, ("Bias", {}), ("AddExtraInput", {})),
        f32((3, 8), (3, 8)),
        ("forward_linear_bias_add",),
    ),
    "tap and linear": Run((("MakeExtraOutput", {}), LINEAR), rows(), ("backward_linear_add",)),
    "linear and scale": Run((LINEAR, TWICE), rows(), ("backward_linear_scale",)),
    "chain": Run(CHAIN, f32((3, 8), (3, 8))),
    "chain placed by hand": Run(CHAIN, f32((3, 8), (3, 8)), gather=_chain),
    "chain and norm": Run((*CHAIN, ("RMSNorm", {}), LINEAR), f32((3, 8), (3, 8))),
    "chain and norm placed by hand": Run(
        (*CHAIN, ("LayerNorm", {})), f32((3, 8), (3, 8)), gather=_chain_and_norm
    ),
}


class Sets(BasicOperation):
    """y = x; its forward sets an attribute of another operation to one value after the other."""

    def __init__(self, op: BasicOperation, attribute: str, *values: Any) -> None:
        super().__init__()
        self._hidden = [op]  # not a part of this one
        self.sets, self._values = attribute, list(values)

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        setattr(self._hidden[0], self.sets, self._values.pop(0))
        return input_

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor, tuple[()]]:
        return grad_output, ()


CHANGES = [(name, *change) for name, run in SEQUENCES.items() for change in run.attributes()]


def check_change(name: str, n: int, attribute: str, how: Change, device: torch.device) -> None:
    """Fails unless backward computes with what forward found, and a value set later counts."""
    run = SEQUENCES[name]
    seq, inputs = run.make().to(device), [t.to(device) for t in run.inputs()]
    other = run.make(n, **{how.argument or attribute: how.value}).to(device)
    other.load_state_dict(seq.state_dict())
    with run.switched():
        before, after = results(seq, inputs), results(other, inputs)
        assert not same(after, before)
        op = parts(seq)[n]
        assert same(results(seq, inputs, lambda: setattr(op, attribute, how.value)), before)
        assert same(results(seq, inputs), after)


def parts(seq: Sequential) -> list[BasicOperation]:
    return [m for m in seq.modules() if isinstance(m, BasicOperation)]
