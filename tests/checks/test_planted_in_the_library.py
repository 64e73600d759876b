"""check_op and check_fusion find faults that are planted into operations and fusions of ours.

Those of ``tests/planted_faults.toml`` that change numbers, gradients or what is saved. The code of
the functions is exchanged in this process, where ``python -m tests.planted_faults`` copies the
project. The helpers do not look at what the other faults need: hooks, ranks, kernels of a GPU, the
engine that runs both sides alike, and masks of attention that the reference shares.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opfuser import (
    CrossEntropy,
    DotProductAttention,
    Embedding,
    GroupedLinear,
    MakeExtraOutput,
    MergedLinear,
    RMSNorm,
)
from opfuser.testing import check_fusion, check_op
from tests.basic.test_all import made
from tests.fused.examples import EXAMPLES, extras, filled
from tests.fused.test_grouped_mlp import NAME as GROUPED_MLP
from tests.fused.test_grouped_mlp import on_channels, tokens
from tests.planted_faults import ROOT, Fault, faults

FAULTS = {fault.name: fault for fault in faults()}
X = (3, 5, 6)


def op(name: str) -> Callable[[], None]:
    """Checks the operation of the table of operations."""

    def check() -> None:
        subject, inputs = made(name)
        check_op(subject, *inputs, zero_rows=name != "Unpermute")

    return check


def as_built(build: Callable[[], Any], *inputs: Callable[[], Tensor]) -> Callable[[], None]:
    """Checks an operation with these inputs."""
    return lambda: check_op(filled([build()])[0], *(t() for t in inputs))  # type: ignore[arg-type]


def fusion(name: str) -> Callable[[], None]:
    """Checks a fusion on its example."""
    return lambda: check_fusion(
        name, filled(EXAMPLES[name][0]()), torch.randn(X), *extras(name, *X[:-1])
    )


def of_ops(name: str, *build: Callable[[], nn.Module]) -> Callable[[], None]:
    return lambda: check_fusion(name, filled([b() for b in build]), torch.randn(X))


def attention(**how: Any) -> Callable[[], None]:
    """In blocks, with two heads of queries for each of keys."""

    def check() -> None:
        subject = DotProductAttention(4, 2, kernel="blockwise", **how)
        check_op(subject, torch.randn(2, 5, 32), dtypes=[torch.float64])

    return check


def targets() -> Tensor:
    return torch.tensor([0, 1, -100, 5, 3])


CHECKS: dict[str, Callable[[], None]] = {
    "norm: half of the residual gradient": fusion("backward_add_rms_norm"),
    "norm: zero-centered scale ignored": as_built(
        lambda: RMSNorm(6, zero_centered_gamma=True), lambda: torch.randn(5, 6)
    ),
    "linear: factor missing from the weight gradient": fusion("backward_linear_scale"),
    "linear + scale: factor missing from dx": fusion("backward_linear_scale"),
    "linear + add: residual gradient overwritten": fusion("backward_linear_add"),
    "norm + linear: gradient of the tap dropped": fusion("norm_linear"),
    "linear + loss: gradient scaled twice": fusion("linear_cross_entropy"),
    "activation: bias missing from the recomputed output": fusion("activation_linear"),
    "grouped mlp: one gradient of several for the weights of rows": lambda: check_fusion(
        GROUPED_MLP, filled(on_channels(scale_bias=True)), *tokens(2, 5), zero_rows=False
    ),
    "projections: terms of dx not added up": lambda: check_op(
        filled([MergedLinear(6, {"a": 4, "b": 2}).basic_ops[0]])[0],  # type: ignore[arg-type]
        torch.randn(5, 6),
    ),
    "dropout: survivors not scaled in backward": op("Dropout"),
    "extra output: gradient overwritten that others hold": as_built(
        lambda: MakeExtraOutput(in_place=True), lambda: torch.randn(5, 6)
    ),
    "cross entropy: ignored rows counted by the mean": lambda: check_op(
        CrossEntropy(label_smoothing=0.1), torch.randn(5, 7), targets(), zero_rows=False
    ),
    "embedding: gradient of the padding row": as_built(
        lambda: Embedding(7, 4, padding_idx=1), lambda: torch.tensor([0, 1, 6, 1])
    ),
    "rotary: gradient turned forwards": op("RotaryEmbedding"),
    "attention: causality read late": op("DotProductAttention"),
    "attention: queries of one key head in another's order": attention(),
    "attention: gradient of the cap left out": attention(softcap=0.3),
    "attention: dropout drawn again in backward": attention(dropout_p=0.5),
    "groups: bias not scaled": lambda: check_op(
        filled([GroupedLinear(2, 8, 6, scale_bias=True)])[0],
        torch.randn(5, 8), torch.tensor([2, 3]), torch.rand(5), zero_rows=False,
    ),
    "load-balancing loss: gradient not shared among the routers": op("LoadBalancingLoss"),
    "permute: gradients of weights in the order of rows": op("Permute"),
    "learned positions: gradient of the unused rows left out": op("PositionEmbedding"),
    "added embedding: gradient of a frozen table's input lost": op("AddEmbedding"),
}  # fmt: skip


def codes(code: CodeType) -> dict[str, CodeType]:
    return {c.co_name: c for c in code.co_consts if isinstance(c, CodeType)}


def functions(holder: ModuleType | type) -> Iterator[tuple[str, FunctionType]]:
    """The functions that a module or class defines, under the names that the source gives them."""
    for member in vars(holder).values():
        method = getattr(member, "__func__", getattr(member, "fget", member))
        function = getattr(method, "__wrapped__", method)
        if isinstance(function, FunctionType):
            yield function.__code__.co_name, function


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Inside, the functions of the fault's file have the code of its changed source."""
    file = ROOT / "opfuser" / fault.file
    name = "opfuser." + fault.file.removesuffix(".py").replace("/", ".")
    module = importlib.import_module(name)
    source = file.read_text(encoding="utf-8")
    changed = compile(source.replace(fault.old, fault.new), str(file), "exec", dont_inherit=True)
    before: list[tuple[FunctionType, CodeType]] = []

    def exchange(holder: ModuleType | type, new: dict[str, CodeType]) -> None:
        for function_name, function in functions(holder):
            code, own = new.get(function_name), function.__code__
            if code is None or own.co_filename != str(file):
                continue
            if (code.co_code, code.co_consts) != (own.co_code, own.co_consts):
                before.append((function, function.__code__))
                function.__code__ = code

    top = codes(changed)
    exchange(module, top)
    for kind in [v for v in vars(module).values() if isinstance(v, type)]:
        if kind.__module__ == name and kind.__name__ in top:
            exchange(kind, codes(top[kind.__name__]))
    assert before, f"{fault.name}: no function has changed"
    try:
        yield
    finally:
        for function, code in before:
            function.__code__ = code


@pytest.mark.parametrize("name", CHECKS)
def test_a_fault_is_found(name: str) -> None:
    CHECKS[name]()
    with planted(FAULTS[name]), pytest.raises(AssertionError):
        CHECKS[name]()
    torch.manual_seed(0)
    CHECKS[name]()
