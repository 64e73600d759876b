"""Launches, traffic and saved bytes of steps, against what the formulas say and what runs."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from benchmarks import memory
from opfuser.errors import TargetError
from opfuser.report.kernel_counts import Counts, counting
from opfuser.report.target import Target, load
from opfuser.report.traffic import StepTraffic, model_traffic
from tests.cli import models
from tests.report.counted import traffic

R, C, D = 6, 16, 64  # rows, columns of the input, and of what is inside
F32 = 4


def rows(width: int = C, *, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(R, width, dtype=dtype, device="meta", requires_grad=True)


def on_meta(*ops: nn.Module) -> opfuser.Sequential:
    return opfuser.Sequential(*ops).to("meta")


def test_a_product_reads_both_operands_and_writes_one() -> None:
    found = traffic(on_meta(opfuser.BasicLinear(C, D)), rows())
    x, w, y = R * C * F32, C * D * F32, R * D * F32
    (forward,), (backward,) = found.forward, found.backward
    assert forward == StepTraffic("forward", (0,), Counts(1, x + w, y), saved=x)
    assert backward == StepTraffic("backward", (0,), Counts(2, (y + w) + (y + x), x + w))


def test_a_kernel_touches_what_it_is_given_once() -> None:
    """GELU: forward reads x and writes y, backward reads x and dy and writes dx."""
    found = traffic(on_meta(opfuser.GELU()), rows())
    size = R * C * F32
    assert found.forward[0].counts == Counts(1, size, size)
    assert found.backward[0].counts == Counts(1, 2 * size, size)


def test_half_precision_is_half() -> None:
    ops = on_meta(opfuser.BasicLinear(C, D), opfuser.GELU())
    wide = traffic(ops, rows()).counts
    half = traffic(ops.to(torch.bfloat16), rows(dtype=torch.bfloat16)).counts
    assert half == Counts(wide.launches, wide.read // 2, wide.written // 2)


def test_without_gradients_there_is_no_backward() -> None:
    ops = on_meta(opfuser.GELU())
    with torch.no_grad():
        found = traffic(ops, rows())
    assert (found.backward, found.saved_bytes) == ((), 0)
    assert found.counts == found.forward[0].counts


def test_a_look_up_reads_what_it_returns() -> None:
    tokens = torch.zeros(R, dtype=torch.int64)
    (forward,) = traffic(opfuser.Sequential(opfuser.Embedding(1000, C)), tokens).forward
    assert forward.counts == Counts(1, R * C * F32 + R * 8, R * C * F32)


def test_what_changes_in_place_is_read_and_written() -> None:
    x = torch.empty(R, C, device="meta")
    with counting() as counter:
        x.add_(1)
        x.zero_()
        torch.add(x, x, out=torch.empty(R, C, device="meta"))
        x.view(-1).t().expand(2, R * C)
    size = R * C * F32
    assert counter.counts[None] == Counts(3, 2 * size, 3 * size)


def test_attention_is_one_launch_in_each_pass() -> None:
    """bf16: a kernel of torch takes it. Backward also concatenates the gradients of q, k and v."""
    batch, length, heads, size = 2, 32, 2, 8
    x = torch.empty(batch, length, 3 * heads * size, dtype=torch.bfloat16, device="meta")
    found = traffic(on_meta(opfuser.DotProductAttention(heads)), x.requires_grad_())
    qkv, y, sums = 3 * heads * size * batch * length * 2, batch * length * heads * size * 2, 4
    sums *= batch * heads * length
    assert found.forward[0].counts == Counts(1, qkv, y + sums)
    assert found.forward[0].saved == qkv + y + sums
    assert found.backward[0].counts == Counts(2, (y + qkv + y + sums) + qkv, 2 * qkv)


def test_attention_that_no_kernel_takes_is_computed_in_blocks() -> None:
    """Soft-capped: in half precision there is one, in fp32 there is none."""
    x = torch.empty(2, 32, 3 * 32, device="meta", requires_grad=True)
    op = on_meta(opfuser.DotProductAttention(2, softcap=2.0))
    half = traffic(op, x.detach().bfloat16().requires_grad_())
    assert half.forward[0].counts.launches == 1
    assert traffic(op, x).forward[0].counts.launches > 3


def test_a_fusion_takes_its_intermediate_away() -> None:
    """ReLU and Bias as one chain: what is between them is neither written nor read."""
    ops = on_meta(opfuser.Bias(C), opfuser.GELU())
    x = rows()
    fused = traffic(ops, x)
    with opfuser.disable("*"):
        plain = traffic(ops, x)
    size = R * C * F32
    assert len(fused.forward) == 1 < len(plain.forward)
    assert plain.forward[0].counts.plus(plain.forward[1].counts).bytes == (
        fused.forward[0].counts.bytes + 2 * size
    )


def test_steps_are_those_of_the_plan() -> None:
    found = traffic(models.layers(2).to("meta"), *[torch.zeros(2, 8, dtype=torch.int64)] * 2)
    for name in ("forward", "backward"):
        steps = getattr(found, name)
        assert [s.indices for s in steps] == [s.indices for s in getattr(found.plan, name)]
        assert all(s.stage == name for s in steps)
    silent = [s.indices for s in found.forward if not s.counts.launches]
    assert silent == []


BLOCKS = [(name, dtype) for name in memory.BLOCKS for dtype in memory.DTYPES]


@pytest.mark.parametrize(("name", "dtype"), BLOCKS)
def test_saved_bytes_are_those_that_run(name: str, dtype: str) -> None:
    size = memory.small(dtype, dim=512, length=64)
    block = memory.BLOCKS[name](size).ours
    x = torch.empty(size.batch, size.length, size.dim, **size.to).requires_grad_()
    measured = sum(item.bytes for item in memory.items(block, size, origins=False))
    assert traffic(block, x).saved_bytes == measured


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in memory.BLOCKS if "attention" not in name])
def test_saved_bytes_are_those_on_a_gpu(name: str) -> None:
    size = memory.Size("cuda", "bf16", 512, 1792, 8, 2, 2, 64)
    block = memory.BLOCKS[name](size).ours
    x = torch.empty(size.batch, size.length, size.dim, **size.to).requires_grad_()
    measured = sum(item.bytes for item in memory.items(block, size, origins=False))
    assert traffic(block, x).saved_bytes == measured


@pytest.mark.gpu
def test_launches_are_those_on_a_gpu() -> None:
    """Of operations without GEMMs, whose libraries may launch more than one kernel."""
    model = opfuser.Sequential(opfuser.RMSNorm(64), opfuser.GELU()).to("cuda", torch.bfloat16)
    x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    wanted = [x, *model.parameters()]

    def step() -> None:
        torch.autograd.grad(model(x), wanted, dy)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
        step()
        torch.cuda.synchronize()
    on_gpu = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in on_gpu if not name.lower().startswith(("memcpy", "memset"))]
    assert len(kernels) == traffic(model, x).counts.launches, kernels


def test_a_model_besides_its_sequences() -> None:
    """``Wrapped``: a linear of torch between two sequences, one of which is called twice."""
    target = load("tests.cli.models:wrapped")
    found = model_traffic(target)
    assert list(found.sequences) == ["first", "blocks.0"]
    first, block = found.sequences.values()
    assert block.counts == Counts(*(2 * n for n in first.counts))
    assert found.counts == first.counts.plus(block.counts).plus(found.elsewhere)
    # addmm in forward; dgrad, wgrad and the bias in backward; and for each of 5 parameters of the
    # block the sum of the gradients of both calls.
    parameters = len(list(target.model.blocks.parameters()))  # type: ignore[union-attr]
    assert found.elsewhere.launches == 4 + parameters
    # The outputs between are saved by who reads them: by the linear that of the first sequence.
    between = first.saved_bytes + block.saved_bytes + 2 * C * F32
    assert found.saved_bytes == between


def test_a_sequence_and_what_runs_besides_its_operations_by_hand() -> None:
    """``tied``: y = tanh(x W) W. The sum of gradients of W is a launch, and so is each tanh."""
    found = model_traffic(load("tests.cli.models:tied"))
    x, w = R * C * F32, C * C * F32
    product = Counts(1, x + w, x)
    gradients = Counts(2, (x + w) + (x + x), x + w)
    tanh = Counts(1, x, x).plus(Counts(1, 2 * x, x))  # backward reads dy and y
    assert found.elsewhere == tanh.plus(Counts(1, 2 * w, w))
    products = product.plus(product).plus(gradients).plus(gradients)
    assert found.counts == products.plus(found.elsewhere)
    assert found.totals == (*found.counts, 2 * x, found.elsewhere)  # saves x, and y of tanh


def programs(model: nn.Module, x: Tensor) -> set[CodeType]:
    """What is written for plans, and executed by a call."""
    found: set[CodeType] = set()
    sys.setprofile(lambda frame, event, arg: found.add(frame.f_code))
    try:
        model(x)
    finally:
        sys.setprofile(None)
    return {code for code in found if code.co_filename.startswith("<opfuser program")}


def test_nothing_of_the_model_changes() -> None:
    model, x = models.mlp(), torch.randn(3, 16, requires_grad=True)
    expected, *_ = (model(x) for _ in range(3))  # from the third call on, it executes the same
    before = programs(model, x)
    assert len(before) == 1
    found = traffic(model, x)
    assert found.saved_bytes
    assert torch.equal(model(x), expected)
    assert programs(model, x) == before
    assert all(p.grad is None for p in (x, *model.parameters()))
    with model.to("meta") and counting() as counter:
        pass
    assert counter.counts == {}


def test_tensors_of_other_devices_are_computed_as_ever() -> None:
    """Another thread may have some."""
    x = torch.randn(3, 16)
    op = opfuser.DotProductAttention(1, softcap=1.0)
    heads = torch.randn(1, 4, 12)
    expected = torch.nn.functional.gelu(x, approximate="tanh"), op(heads)
    with counting():
        assert torch.allclose(opfuser.GELU()(x), expected[0], atol=1e-6)
        assert torch.equal(op(heads), expected[1])


def test_steps_of_operations_that_are_called_and_of_nested_sequences() -> None:
    """A hook makes an operation a step of its own, and a nested sequence be called."""
    inner = opfuser.Sequential(opfuser.GELU(), opfuser.SiLU())
    inner.register_forward_hook(lambda *args: None)
    hooked = opfuser.ReLU()
    hooked.register_forward_hook(lambda *args: None)
    found = traffic(on_meta(opfuser.Tanh(), hooked, inner, opfuser.Sigmoid()), rows())
    counted = [(s.indices, s.counts.launches) for s in found.forward]
    assert counted == [((0,), 1), ((1,), 1), ((2, 3), 1), ((4,), 1)]
    assert [s.counts.launches for s in found.backward] == [1, 1, 1, 1]


def test_what_reads_values_says_so() -> None:
    model = models.ReadsValues()
    with pytest.raises(TargetError, match=r"The model has to run .*\(reads\)") as caught:
        model_traffic(Target("reads", model, (torch.zeros(2, 16),)))
    assert "counted without data, so that nothing may read values" in str(caught.value)


def test_experts_in_half_precision_read_no_sizes() -> None:
    """Their products are one launch for all experts, as torch's grouped GEMM is."""
    block = models.experts()
    found = traffic(block, torch.empty(2, 8, 16, dtype=torch.bfloat16, requires_grad=True))
    (experts,) = [s for s in found.forward if len(s.indices) > 1 and s.saved]
    assert found.plan.fused("forward") == {"grouped_mlp": 1}
    assert 3 <= experts.counts.launches < 20


def test_products_of_codes_are_those_of_a_gpu_that_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two linear operations in FP8 two forward and four backward, none of them emulated."""
    products = []
    scaled_mm = torch.nn.functional.scaled_mm

    def noted(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        products.append((a.dtype, b.dtype))
        return scaled_mm(a, b, *args, **kwargs)

    x = torch.empty(128, 256, dtype=torch.bfloat16, requires_grad=True)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", noted)
    model = models.fp8()
    traffic(model, x)
    assert len(products) == 2 + 6  # forward runs once before it is counted, to be planned
    assert {dtype.itemsize for pair in products for dtype in pair} == {1}
