"""Fusions of linear operations that are sharded in a way that leaves the fused GEMM alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from opfuser import BasicLinear, Sequential
from opfuser.fused import FUSIONS, _linear
from tests.fused.examples import EXAMPLES, call, extras, filled
from tests.fused.pairings import only
from tests.fused.sharded import sharded


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone, in which collectives change nothing."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("how", ["column", "column, sequence-parallel"])
@pytest.mark.parametrize(
    "name",
    ["forward_linear_scale_add", "forward_linear_bias_add", "forward_linear_bias_activation"],
)
def test_forward_of_a_column_parallel_linear(name: str, how: str) -> None:
    results = []
    for fused in (True, False):
        torch.manual_seed(1)
        ops = filled(EXAMPLES[name][0]())
        sharded(ops[0], how)
        x = torch.randn(3, 6, requires_grad=True)
        with only(forward=fused):
            seq = Sequential(*ops)
            assert name in seq.plan(x, *extras(name, 3)).fused("forward") or not fused
            y = seq(x, *extras(name, 3))
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *seq.parameters()])])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name.startswith("forward_linear")])
def test_sequence_parallel_input_is_gathered_and_saved_local(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fusion = next(fusion for fusion in FUSIONS if fusion.name == name)
    ops = filled(EXAMPLES[name][0]())
    x, more = torch.randn(3, 6), extras(name, 6)
    whole, _ = call(fusion.build(*ops), ops, more, x=torch.cat([x, x]))
    sharded(ops[0], "column, sequence-parallel")
    monkeypatch.setattr(_linear, "gather_first_dim", lambda x, group: torch.cat([x, x]))
    y, ctxs = call(fusion.build(*ops), ops, more, x=x)
    torch.testing.assert_close(y, whole)
    assert ctxs[0].to_save is not None
    assert torch.equal(ctxs[0].to_save[0], x)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["backward_linear_add", "backward_linear_scale"])
def test_backward_of_a_row_parallel_linear(name: str) -> None:
    results = []
    for fused in (True, False):
        torch.manual_seed(1)
        ops = filled(EXAMPLES[name][0]())
        sharded(next(op for op in ops if isinstance(op, BasicLinear)), "row")
        x = torch.randn(3, 6, requires_grad=True)
        with only(backward=fused):
            seq = Sequential(*ops)
            assert seq.plan(x).fused("backward") == ({name: 1} if fused else {})
            out = seq(x)
            loss = sum(o.square().sum() for o in (out if isinstance(out, tuple) else [out]))
            results.append(torch.autograd.grad(loss, [x, *seq.parameters()]))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)
