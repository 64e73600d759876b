"""For each built-in fusion an example, and what the tests of fusions share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opfuser import (
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    CrossEntropy,
    Dropout,
    LayerNorm,
    MakeExtraOutput,
    PointwiseOperation,
    QKNorm,
    RMSNorm,
    RotaryEmbedding,
    Sequential,
    SiLU,
    SwiGLU,
)
from opfuser.core.fusion import Fusion, Optional, Repeated
from opfuser.engine.plan import Plan
from opfuser.errors import InputError
from opfuser.fused import FUSIONS
from opfuser.op import FusedOperation, FusibleOperation, GradNeeds, OperationContext
from opfuser.testing import check_fusion, contexts
from tests.contract.tensors import Gemms

F64, F32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = (F64, F32, BF16, FP16)


def asking(op: nn.Module) -> nn.Module:
    """The operation with the flag that asks for its block to be recomputed in backward."""
    op.recompute_mlp = True  # type: ignore[assignment]  # any attribute may be one
    return op


def residual_mlp(activation: nn.Module) -> list[nn.Module]:
    norm = [AddExtraInput(), MakeExtraOutput(), RMSNorm(6)]
    return [*norm, BasicLinear(6, 10), Bias(10), activation, BasicLinear(5, 4), Bias(4)]


# Those for quantized compute have other numbers on purpose: tests/quantization. The extra inputs of
# grouped_mlp go together: tests/fused/test_grouped_mlp.py.
UNQUANTIZED = tuple(
    fusion
    for fusion in FUSIONS
    if not fusion.name.startswith("quantized_") and fusion.name != "grouped_mlp"
)

EXAMPLES: dict[str, tuple[Callable[[], list[nn.Module]], int]] = {
    "linear_cross_entropy": (lambda: [BasicLinear(6, 9), CrossEntropy(reduction="sum")], 0),
    "recompute_mlp": (lambda: residual_mlp(SwiGLU()), 6),
    "recompute_mlp_where_asked": (lambda: residual_mlp(asking(SwiGLU())), 6),
    "activation_linear_add": (
        lambda: [Bias(6), SiLU(), BasicLinear(6, 4), Bias(4), AddExtraInput()],
        4,
    ),
    "activation_linear": (lambda: [Bias(6), SiLU(), BasicLinear(6, 4), Bias(4)], 0),
    "pointwise_norm": (
        lambda: [Bias(6), Dropout(0.3), AddExtraInput(), MakeExtraOutput(), LayerNorm(6)],
        6,
    ),
    "pointwise_chain": (lambda: [Bias(6), SiLU(), Dropout(0.3), AddExtraInput()], 6),
    "norm_linear": (
        lambda: [AddExtraInput(), MakeExtraOutput(), LayerNorm(6), BasicLinear(6, 4), Bias(4)],
        6,
    ),
    "forward_qk_norm_rotary": (lambda: [QKNorm(1, 2), RotaryEmbedding(1, 2)], 0),
    "forward_linear_scale_add": (
        lambda: [BasicLinear(6, 4), ConstantScale(0.3), AddExtraInput()],
        4,
    ),
    "forward_linear_bias_add": (lambda: [BasicLinear(6, 4), Bias(4), AddExtraInput()], 4),
    "forward_add_rms_norm": (lambda: [AddExtraInput(), MakeExtraOutput(), RMSNorm(6)], 6),
    "forward_add_layer_norm": (lambda: [AddExtraInput(), MakeExtraOutput(), LayerNorm(6)], 6),
    "forward_linear_bias_activation": (lambda: [BasicLinear(6, 4), Bias(4)], 0),
    "backward_qk_norm_rotary": (lambda: [QKNorm(1, 2), RotaryEmbedding(1, 2)], 0),
    "backward_add_rms_norm": (lambda: [MakeExtraOutput(), RMSNorm(6)], 0),
    "backward_add_layer_norm": (lambda: [MakeExtraOutput(), LayerNorm(6)], 0),
    "backward_linear_add": (lambda: [MakeExtraOutput(), BasicLinear(6, 4)], 0),
    "backward_linear_scale": (lambda: [BasicLinear(6, 4), ConstantScale(0.3)], 0),
    "backward_activation_bias": (lambda: [Bias(6), SiLU()], 0),
}
"""What each fusion covers, for inputs of width 6, and the width of the term that it adds or 0."""

OF_CHAINS = {"pointwise_chain", "pointwise_norm"}
"""Fusions that only kernels make sense of: not on a CPU, but in the interpreter; not in float64."""


class Cube(PointwiseOperation):
    device_function = "somewhere:cube"

    def value(self, x: Tensor) -> Tensor:
        return x**3


# Operations and tensors.


def filled(ops: list[nn.Module]) -> list[nn.Module]:
    """The operations with random parameters: ones and zeros hide mistakes."""
    with torch.no_grad():
        for op in ops:
            for p in op.parameters():
                p.copy_(torch.randn(p.shape))
    return ops


def extras(name: str, *rows: int) -> list[Tensor]:
    """The extra inputs of an example."""
    if name == "linear_cross_entropy":
        return [torch.randint(9, rows)]
    width = EXAMPLES[name][1]
    return [torch.randn(*rows, width)] if width else []


def with_subclass(ops: list[Any], at: int) -> list[nn.Module]:
    """The operations with that one of a subclass, which a fusion must leave alone."""
    ops[at].__class__ = type("Mine", (type(ops[at]),), {})
    return ops


def without_bias(op: Any) -> nn.Module:
    op.bias = None
    return op


SHARDINGS = [(mode, sequence) for mode in ("column", "row") for sequence in (False, True)]


def sharded(linear: BasicLinear, mode: str, sequence_parallel: bool = False) -> BasicLinear:
    """The operation, which now says that it is sharded, without other ranks."""
    sharding = linear.sharding._replace(mode=mode, sequence_parallel=sequence_parallel)
    vars(linear)["sharding"] = sharding  # read-only
    return linear


def built(fusion: Fusion, ops: Sequence[nn.Module], *, bare: bool = False) -> FusedOperation:
    """The fused operation in place of ``ops``, one for each element of the fusion's pattern.

    Args:
        bare: leave out those that may be absent.
    """
    pattern, first = fusion.pattern, []
    if isinstance(pattern[0], Repeated):
        n = len(ops) - len(pattern) + 1
        first, ops, pattern = [tuple(ops[:n])], ops[n:], pattern[1:]
    rest = [None if bare and isinstance(e, Optional) else op for e, op in zip(pattern, ops)]
    return fusion.build(*first, *rest)


def call(
    op: FusibleOperation,
    ops: Sequence[nn.Module],
    more: Sequence[Tensor],
    *,
    x: Tensor | None = None,
    requires_grad: bool = True,
) -> tuple[Tensor, list[OperationContext]]:
    """The output of ``op`` and the contexts of ``ops``, which it covers, after its forward."""
    ctxs = []
    for part in ops:
        ctx = OperationContext()
        ctx.requires_grad = requires_grad
        ctx.needs = GradNeeds(True, tuple(True for _ in part.parameters()), ())
        ctxs.append(ctx)
    with torch.no_grad():
        y, _ = op.fuser_forward(
            ctxs,
            torch.ones(1, 3, 6) if x is None else x,
            basic_op_extra_inputs=[list(more) if isinstance(o, AddExtraInput) else [] for o in ops],
            prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None,
            basic_op_kwargs=[{} for _ in ops],
        )
    return y, ctxs


# Which fusions there are, and where they match.


def plan_on(device: str, *ops: nn.Module, dtype: torch.dtype = F32, grad: bool = True) -> Plan:
    """A plan needs no data: one for tensors of meta tells what becomes of those of a GPU."""
    seq = Sequential(*ops).to(device, dtype)
    x = torch.empty(2, 3, 6, device=device, dtype=dtype, requires_grad=grad)
    return seq.plan(x, *[x] * seq.num_extra_inputs)


def only(*names: str) -> AbstractContextManager[None]:
    """Switches these fusions on, and all others off."""
    return contexts.only(names)


def fusion_of(name: str) -> Fusion:
    return next(fusion for fusion in FUSIONS if fusion.name == name)


def refused(seq: Sequential, name: str, *inputs: Tensor) -> list[tuple[int, str]]:
    """Where a fusion is refused, and why."""
    return [(at, str(why)) for at, why in seq.plan(*inputs).record(name).refusals]


def leaf(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    """Random values that require grad."""
    return torch.randn(shape, dtype=F64).to(dtype).requires_grad_()


# Values.


@dataclass(frozen=True)
class Case:
    """What :func:`check` calls check_fusion with.

    Attributes:
        ops: makes the operations.
        shape: of the input.
        extras: widths of the extra inputs, whose other dimensions are those of the input.
        dtypes: of everything, one after the other; None is fp32.
        autocast: to bf16.
        times: how often the fusion matches.
    """

    ops: Callable[[], list[nn.Module]]
    shape: tuple[int, ...] = (2, 3, 6)
    extras: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] | None = None
    autocast: bool = False
    times: int = 1


def check(fusion: str | Fusion, case: Case, device: torch.device | str = "cpu") -> None:
    """Holds a fusion to its operations with check_fusion, and sees how often it matches."""
    name = fusion if isinstance(fusion, str) else fusion.name
    ops = [op.to(device) for op in filled(case.ops())]
    x, *more = (
        torch.randn(*case.shape[:-1], width, device=device)
        for width in (case.shape[-1], *case.extras)
    )
    with torch.autocast("cpu", BF16, enabled=case.autocast):
        with only(name):
            matches = Sequential(*ops).plan(x.clone().requires_grad_(), *more).record(name).matches
        assert len(matches) == case.times
        check_fusion(name, ops, x, *more, dtypes=case.dtypes)


def results(model: Any, parameters: Iterable[Tensor], *inputs: Tensor, **kwargs: Any) -> list[Any]:
    """Outputs, and the gradients of inputs and parameters for fixed gradients of all outputs."""
    outputs = model(*inputs, **kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(7)
    douts = [torch.randn(y.shape, generator=generator, dtype=F64).to(y.dtype) for y in outputs]
    wrt = [t for t in (*inputs, *parameters) if t.requires_grad]
    chosen = [(y, dy) for y, dy in zip(outputs, douts) if y.requires_grad]
    grads = torch.autograd.grad(
        [y for y, _ in chosen], wrt, [dy for _, dy in chosen], allow_unused=True
    )
    return [*(y.detach() for y in outputs), *grads]


def assert_same(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> None:
    """float64 results, equal but for the order of sums; a gradient that is missing is zero."""
    assert len(got) == len(want)
    for a, b in zip(got, want):
        if a is None or b is None:
            assert all(t is None or not t.any() for t in (a, b))
        else:
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def error_text(model: Sequential, *inputs: Tensor, **kwargs: Any) -> str:
    """The text of an InputError without the step that it came to, another one when fused."""
    with pytest.raises(InputError) as error:
        model(*inputs, **kwargs)
    text, place = str(error.value).split(" It was raised in op ")
    assert place.endswith(" of the sequence.")
    return text


# Memory and work.


def saved_by(seq: Sequential, *inputs: Tensor) -> list[Tensor]:
    """What a call saves for backward: one tensor per storage, parameters left out."""
    known = {p.untyped_storage().data_ptr() for p in seq.parameters()}
    seen: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        place = t.untyped_storage().data_ptr()
        if place not in known:
            seen.setdefault(place, t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outputs = seq(*inputs)
    del outputs
    return list(seen.values())


def gemms_of_backward(seq: Sequential, *inputs: Tensor) -> int:
    """How many matrix products backward makes, after which all gradients are where they belong."""
    outputs = seq(*inputs)
    with Gemms() as made:
        sum(y.sum() for y in (outputs if isinstance(outputs, tuple) else [outputs])).backward()
    for p in seq.parameters():
        assert (p.grad is not None) == p.requires_grad
    return len(made.shapes)


def elements(tensors: Sequence[Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() // t.itemsize for t in tensors)
