"""The norm of what a chain makes, in one kernel, and sequences that run it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import opfuser
from opfuser import (
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    Dropout,
    LayerNorm,
    MakeExtraOutput,
    RMSNorm,
    Sequential,
    Sigmoid,
    SiLU,
)
from opfuser.fused import PointwiseNorm, norm_linear, pointwise_norm
from opfuser.fused.norm_linear import NormLinear
from opfuser.fusion import Optional
from opfuser.kernels import functions, norm_launch
from opfuser.kernels import pointwise_plain as plain
from opfuser.kernels.launch import recorded
from opfuser.kernels.pointwise import (
    ADD,
    BIAS,
    DROPOUT,
    FUNCTION,
    KEEP,
    Chain,
    Link,
    Normed,
    draw_seed,
    dropout,
)
from opfuser.kernels.scalar import ScalarFunction
from opfuser.testing import check_fusion
from tests.kernels.norms import EPS, Case, compare, truth

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NORMS: dict[str, Any] = {"rms": RMSNorm, "layer": LayerNorm}
each_norm = pytest.mark.parametrize("kind", NORMS)

# One row per program, several, and many; odd sizes, fewer columns than random numbers come at a
# time, and the longest rows in half precision, which are the last but one.
SHAPES = [(7, 33), (1, 5), (3, 1), (65, 64), (5, 257), (4, 2048), (2, 3, 12), (1, 16383), (9,)]


def link_of(function: ScalarFunction) -> Link:
    return Link(FUNCTION, f"@scalar:{function.name}", function.parameters, function, linear=False)


# A sigmoid is not zero where its argument is, as it is beyond the end of a row.
SILU, SIGMOID = link_of(functions.Swish()), link_of(functions.Sigmoid())
HALF = Link(FUNCTION, "@scalar:scale", (0.5,), functions.Scale(0.5))
BIASED, ADDED, KEPT = Link(BIAS), Link(ADD), Link(KEEP)
DROPPED = Link(DROPOUT, parameters=(0.3,))

CHAINS: dict[str, list[Link]] = {
    "function": [SIGMOID],
    "dropout": [DROPPED],
    "sum": [ADDED],
    "feed-forward's end": [BIASED, DROPPED, ADDED],
    "all": [BIASED, SILU, HALF, DROPPED, ADDED],
    "sum in between": [SILU, ADDED, KEPT, SIGMOID, DROPPED, ADDED],
    "as many operands as there may be": [ADDED, BIASED, DROPPED, ADDED, KEPT, SILU, ADDED, BIASED],
}


class Call(NamedTuple):
    links: list[Link]
    x: Tensor
    operands: list[Tensor | None]
    weight: Tensor
    bias: Tensor | None
    dtypes: tuple[torch.dtype, ...]
    centred: bool = False

    def try_to_run(self, want_total: bool = True) -> Normed | None:
        return Chain(self.links).forward_norm(
            self.x, self.operands, self.dtypes, self.weight, self.bias, EPS, self.centred,
            with_mean=self.bias is not None, want_total=want_total,
        )  # fmt: skip

    def run(self, want_total: bool = True) -> Normed:
        done = self.try_to_run(want_total)
        assert done is not None
        return done


def call(
    links: list[Link],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    layer: bool = True,
    parameters: torch.dtype | None = None,
    centred: bool = False,
) -> Call:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape).to(device, dtype)

    made: dict[int, Callable[[], Tensor]] = {
        BIAS: lambda: random(shape[-1]),
        ADD: lambda: random(*shape),
        DROPOUT: lambda: draw_seed(torch.empty(0)).to(device),
    }
    operands = [made[link.kind]() if link.kind in made else None for link in links]
    weight, bias = torch.randn(2, shape[-1]).to(device, parameters or dtype)
    dtypes = (dtype,) * len(links)
    return Call(links, random(*shape), operands, weight, bias if layer else None, dtypes, centred)


def total_in(call: Call, dtype: torch.dtype) -> Tensor:
    """What the links make in plain torch and that dtype."""
    operands = [
        t if t is None or link.kind == DROPOUT else t.to(dtype)
        for link, t in zip(call.links, call.operands)
    ]
    y, _ = plain.forward(call.links, call.x.to(dtype), operands, (dtype,) * len(call.links))
    return y


def check(call: Call) -> None:
    """The sum against the links one by one, and the norm of the sum as it was rounded."""
    with recorded() as launches:
        call.run()
    assert [noted.launch.name for noted in launches] == ["norm:chain_norm_forward"]
    y, total, mean, rstd, kept = call.run()
    dtype = call.dtypes[-1]
    assert total is not None
    assert (y.shape, y.dtype, y.is_contiguous()) == (call.x.shape, dtype, True)
    assert (rstd.shape, rstd.dtype) == (call.x.shape[:-1], torch.float32)
    compare("total", total, total_in(call, dtype), total_in(call, torch.float64))
    assert [keep is not None for keep in kept] == [link.kind == KEEP for link in call.links]
    cols = call.x.shape[-1]
    rows = total.reshape(-1, cols)
    case = Case(call.bias is not None, call.centred, rows, None, call.weight, call.bias, rows, None)
    exact, single = truth(case.to(torch.float64)), truth(case.to(torch.float32), torchs=True)
    got = {"y": y.reshape(-1, cols), "rstd": rstd.reshape(-1)}
    if mean is not None:
        got["mean"] = mean.reshape(-1)
    assert (mean is not None) == (call.bias is not None)
    for name, result in got.items():
        compare(name, result, single[name].to(result.dtype), exact[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_norm
@pytest.mark.parametrize("name", CHAINS)
def test_chain(name: str, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    check(call(CHAINS[name], (5, 37), dtype, device, layer=kind == "layer"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_norm
@pytest.mark.parametrize("name", ["function", "feed-forward's end", "sum in between"])
def test_shapes(name: str, kind: str, shape: tuple[int, ...], device: torch.device) -> None:
    check(call(CHAINS[name], shape, torch.bfloat16, device, layer=kind == "layer"))


@pytest.mark.parametrize("shape", [(0, 33), (2, 0, 6)], ids=str)
def test_no_rows(shape: tuple[int, ...], device: torch.device) -> None:
    y, total, mean, rstd, kept = call(CHAINS["sum in between"], shape, torch.float32, device).run()
    assert total is not None
    assert mean is not None
    assert y.shape == total.shape == kept[2].shape == shape
    assert rstd.shape == mean.shape == shape[:-1]


@pytest.mark.parametrize("lies", ["strided", "transposed", "expanded"])
def test_layouts(lies: str, device: torch.device) -> None:
    made = call(CHAINS["all"], (6, 5), torch.float32, device)
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "strided": lambda t: torch.stack([t, t], -1)[..., 0],
        "transposed": lambda t: t.t().contiguous().t() if t.dim() == 2 else t,
        "expanded": lambda t: t[:1].expand(t.shape),
    }
    lay = layouts[lies]
    operands = [t if t is None or t.dtype == torch.int64 else lay(t) for t in made.operands]
    check(made._replace(x=lay(made.x), operands=operands, weight=lay(made.weight)))


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_parameters_of_another_dtype(parameters: torch.dtype, device: torch.device) -> None:
    links = CHAINS["feed-forward's end"]
    check(call(links, (5, 40), torch.float16, device, parameters=parameters, centred=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sum_in_another_dtype(dtype: torch.dtype, device: torch.device) -> None:
    made = call([DROPPED, ADDED, KEPT, SILU], (5, 40), dtype, device)
    made.operands[1] = torch.randn(5, 40, device=device)
    made = made._replace(dtypes=(dtype, *[torch.float32] * 3))
    check(made)
    assert {t.dtype for t in (made.run().y, made.run().kept[2])} == {torch.float32}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_norm
def test_a_sum_that_is_not_wanted(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """What is not written is rounded all the same."""
    made = call(CHAINS["all"], (5, 40), dtype, device, layer=kind == "layer")
    with recorded() as noted:
        assert made.run(want_total=False).total is None
    assert noted[0].tensors[4] is None
    for ours, theirs in zip(made.run(want_total=False), made.run()):
        if isinstance(ours, Tensor):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(70, 530), (5, 7), (3, 2), (2, 8192)], ids=str)
def test_the_mask_is_that_of_the_chain_alone_and_of_backward(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    made = call([DROPPED, HALF], shape, dtype, device)
    made = made._replace(x=torch.ones_like(made.x))
    seed = made.operands[0]
    assert seed is not None
    mask = dropout(made.x, seed, 0.3) != 0
    assert 0.5 < mask.double().mean().item() <= 1 or mask.numel() < 100
    total = made.run().total
    assert total is not None
    assert torch.equal(total != 0, mask)
    wants = (False, False, True)
    dx, _ = Chain(made.links).backward(made.x, None, made.operands, wants, made.dtypes)
    assert dx is not None
    assert torch.equal(dx != 0, mask)


@pytest.mark.parametrize("want_total", [True, False])
def test_where_there_is_no_such_kernel(want_total: bool, device: torch.device) -> None:
    """Long rows, other dtypes, a bias that was cleared, and nothing to do."""
    half = norm_launch.MAX_CHAIN_ROW // 2
    fine = call([ADDED], (1, half), torch.float16, device)
    made = [
        call([ADDED], (1, half + 1), torch.float16, device),
        call([ADDED], (1, half // 2 + 1), torch.float32, device),
        call([ADDED], (2, 0), torch.float32, device),
        call([ADDED], (2, 6), torch.float64, device),
        call([], (2, 6), torch.float32, device),
        call([BIASED, SILU], (2, 6), torch.float32, device)._replace(operands=[None, None]),
        fine._replace(dtypes=(torch.float32,)),
        fine._replace(operands=[torch.zeros_like(fine.x, dtype=torch.float64)]),
    ]
    fine.run(want_total)
    for refused in made:
        with recorded() as launches:
            assert refused.try_to_run(want_total) is None
        assert not launches


# Sequences.

EXAMPLES: dict[str, tuple[Callable[[], list[nn.Module]], int]] = {
    "end of a feed-forward": (lambda: [Bias(6), Dropout(0.3), AddExtraInput()], 1),
    "bias and sum": (lambda: [Bias(6), AddExtraInput()], 1),
    "everything": (
        lambda: [Bias(6), SiLU(), ConstantScale(0.5), Dropout(0.2), AddExtraInput(), Bias(6)],
        1,
    ),
    "sums before functions": (lambda: [AddExtraInput(), SiLU(), AddExtraInput(), Sigmoid()], 2),
    "one function": (lambda: [Sigmoid()], 0),
    "dropout alone": (lambda: [Dropout(0.4)], 0),
}


def filled(ops: list[nn.Module], device: torch.device) -> list[nn.Module]:
    for op in ops:
        for parameter in op.parameters():
            nn.init.normal_(parameter)
    return [op.to(device) for op in ops]


def inputs(name: str, device: torch.device, *shape: int) -> list[Tensor]:
    shape = shape or (5, 6)
    return [torch.randn(shape).to(device) for _ in range(1 + EXAMPLES[name][1])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_norm
@pytest.mark.parametrize("name", EXAMPLES)
def test_against_separate_operations(
    name: str, kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    ops = [*EXAMPLES[name][0](), MakeExtraOutput(), NORMS[kind](6)]
    tensors = inputs(name, device)
    check_fusion("pointwise_norm", filled(ops, device), *tensors, dtypes=[dtype])


@each_norm
@pytest.mark.parametrize("name", ["end of a feed-forward", "sums before functions"])
def test_without_a_tap(name: str, kind: str, device: torch.device) -> None:
    ops = filled([*EXAMPLES[name][0](), NORMS[kind](6)], device)
    check_fusion("pointwise_norm", ops, *inputs(name, device), zero_rows=True)


@pytest.mark.parametrize("shape", [(6,), (1, 6), (2, 3, 6)], ids=str)
@each_norm
def test_shapes_of_sequences(kind: str, shape: tuple[int, ...], device: torch.device) -> None:
    ops = [*EXAMPLES["everything"][0](), MakeExtraOutput(), NORMS[kind](6)]
    tensors = inputs("everything", device, *shape)
    check_fusion("pointwise_norm", filled(ops, device), *tensors)


@each_norm
@pytest.mark.parametrize("name", ["end of a feed-forward", "everything"])
def test_autocast(name: str, kind: str, device: torch.device) -> None:
    """The norm casts to the lower dtype, but where the run already has: two kernels or one."""
    ops = filled([*EXAMPLES[name][0](), MakeExtraOutput(), NORMS[kind](6)], device)
    with torch.autocast(device.type, torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            tensors = [t.to(dtype) for t in inputs(name, device)]
            # The reference runs in bf16 throughout.
            check_fusion("pointwise_norm", ops, *tensors, floor=2**-6)


# With the run as a part of the pattern, so that one fusion is all that has to be switched on.
WITH_LINEAR = replace(
    norm_linear.FUSION,
    name="run_norm_linear",
    pattern=(*pointwise_norm.FUSION.pattern, BasicLinear, Optional(Bias)),
    refuses=None,
    build=lambda before, make_extra, norm, linear, bias: NormLinear(
        norm=PointwiseNorm(before=before, norm=norm, make_extra=make_extra),
        linear=linear,
        bias=bias,
    ),
)


@each_norm
@pytest.mark.parametrize("name", ["end of a feed-forward", "everything", "one function"])
def test_with_the_linear_operation_behind_it(name: str, kind: str, device: torch.device) -> None:
    rest = [NORMS[kind](6), BasicLinear(6, 4)]
    tensors = inputs(name, device, 2, 3, 6)
    for more in ([MakeExtraOutput(), *rest, Bias(4)], rest):
        ops = filled([*EXAMPLES[name][0](), *more], device)
        check_fusion(WITH_LINEAR, ops, *tensors, zero_rows=True)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_with_the_linear_operation_in_half_precision(
    dtype: torch.dtype, device: torch.device
) -> None:
    ops = [*EXAMPLES["everything"][0](), MakeExtraOutput(), LayerNorm(6), BasicLinear(6, 4)]
    check_fusion(WITH_LINEAR, filled(ops, device), *inputs("everything", device), dtypes=[dtype])


def block(kind: str, device: torch.device) -> Sequential:
    ops = [Bias(6), Dropout(0.3), AddExtraInput(), MakeExtraOutput(), NORMS[kind](6)]
    return Sequential(*filled([*ops, BasicLinear(6, 6)], device))


def results(model: Any, seq: Sequential, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Outputs and gradients."""
    torch.manual_seed(3)
    leaves = [t.detach().requires_grad_() for t in tensors]
    y, total = model(*leaves)
    grads = torch.autograd.grad(
        [y, total], [*leaves, *seq.parameters()], [torch.cos(y.detach()), torch.sin(total.detach())]
    )
    return [y.detach(), total.detach(), *grads]


@each_norm
def test_one_launch_forward_and_two_backward(kind: str, device: torch.device) -> None:
    seq = block(kind, device)
    x, z = torch.randn(2, 300, 6, device=device).requires_grad_()
    assert seq.plan(x, z).fused("forward") == {"norm_linear": 1}
    with recorded() as forward:
        y, total = seq(x, z)
    with recorded() as backward:
        (y.sum() + total.sum()).backward()
    assert [noted.launch.name for noted in forward] == ["norm:chain_norm_forward"]
    names = [noted.launch.name for noted in backward]
    # The parameters' gradients are added up from partial sums, the norm's together.
    assert [name for name in names if name != "column_sums:column_sums"] == [
        "norm:norm_backward",
        "pointwise:chain_backward",
    ]
    assert len(names) == 4


def test_without_gradients_the_sum_is_not_written(device: torch.device) -> None:
    ops = [Bias(6), Dropout(0.3), AddExtraInput(), RMSNorm(6)]
    seq = Sequential(*ops).to(device)
    x, z = torch.randn(2, 300, 6, device=device)
    with recorded() as noted, torch.no_grad():
        seq(x, z)
    (forward,) = noted
    statistics = 300 * 4
    parameters = 2 * 6 * 4 + 8
    assert forward.traffic == 3 * x.numel() * 4 + statistics + parameters


@each_norm
def test_checkpointing_draws_the_masks_again(kind: str, device: torch.device) -> None:
    seq = block(kind, device)
    tensors = list(torch.randn(2, 40, 6, device=device))
    want = results(seq, seq, tensors)

    def checkpointed(*leaves: Tensor) -> Any:
        return checkpoint(seq, *leaves, use_reentrant=False)

    for ours, theirs in zip(results(checkpointed, seq, tensors), want):
        assert torch.equal(ours, theirs)


@each_norm
def test_masks_are_those_of_separate_operations(kind: str, device: torch.device) -> None:
    seq = Sequential(Dropout(0.3), ConstantScale(2.0), Dropout(0.6), MakeExtraOutput())
    seq.append(NORMS[kind](33).to(device))
    x = torch.ones(40, 33, device=device)
    fused = results(seq, seq, [x])
    with opfuser.disable("*"):
        apart = results(seq, seq, [x])
    assert torch.equal(fused[1], apart[1])
    assert torch.equal(fused[2] != 0, apart[2] != 0)
    for ours, theirs in zip(fused, apart):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", ["run", "norm"])
@pytest.mark.parametrize("input_grad", [True, False])
def test_gradients_that_nobody_needs(frozen: str, input_grad: bool, device: torch.device) -> None:
    seq = block("layer", device)
    x, z = torch.randn(2, 5, 6, device=device)
    want = dict(zip(["0.bias", "4.weight", "4.bias", "5.weight"], results(seq, seq, [x, z])[4:]))
    names = {"run": ["0.bias"], "norm": ["4.weight", "4.bias"]}[frozen]
    for name in names:
        seq.get_parameter(name).requires_grad_(False)
    torch.manual_seed(3)
    y, total = seq(x.requires_grad_(input_grad), z)
    douts = [torch.cos(y.detach()), torch.sin(total.detach())]
    owed = [(t, dt) for t, dt in zip((y, total), douts) if t.requires_grad]
    torch.autograd.backward(*map(list, zip(*owed)))
    for name, parameter in seq.named_parameters():
        assert (parameter.grad is None) == (name in names)
        if name not in names:
            torch.testing.assert_close(parameter.grad, want[name])
    assert (x.grad is None) != input_grad
    assert z.grad is None


@each_norm
def test_a_cleared_bias_and_long_rows_take_two_kernels(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    seq = block(kind, device)
    tensors = list(torch.randn(2, 5, 6, device=device))
    want = results(seq, seq, tensors)
    monkeypatch.setattr("opfuser.kernels.pointwise.MAX_CHAIN_ROW", 20)
    with recorded() as noted:
        seq(*tensors)
    names = [launch.launch.name for launch in noted]
    assert names == ["pointwise:chain_forward", "norm:norm_forward"]
    for ours, theirs in zip(results(seq, seq, tensors), want):
        torch.testing.assert_close(ours, theirs)
    seq[0].bias = None
    got = results(seq, seq, tensors)
    with opfuser.disable("*"):
        want = results(seq, seq, tensors)
    for ours, theirs in zip(got, want):
        torch.testing.assert_close(ours, theirs)


# The tracer of torch.compile makes an instance of Function, against torch's own advice.
# What it imports warns of itself in torch 2.11.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@each_norm
def test_compiled_whole(kind: str, device: torch.device) -> None:
    torch.compiler.reset()  # its limit of recompilations counts those of all tests
    seq = block(kind, device)
    tensors = list(torch.randn(2, 5, 6, device=device))
    compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(results(compiled, seq, tensors), results(seq, seq, tensors)):
        torch.testing.assert_close(ours, theirs)


def test_all_modes_of_a_run(device: torch.device) -> None:
    """What does nothing in evaluation is left out, and comes back."""
    seq = Sequential(Dropout(0.4), AddExtraInput(), RMSNorm(33)).to(device)
    x, z = torch.ones(30, 33, device=device), torch.zeros(30, 33, device=device)
    for training, p in itertools.product((True, False), (0.4, 0.9)):
        seq.train(training)[0].dropout_probability = p
        shares = (seq(x, z) != 0).double().mean().item()
        assert shares == 1 if not training else abs(shares - (1 - p)) < 0.1
