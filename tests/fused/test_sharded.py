"""Fusions of linear operations that are sharded: which are refused, and what the others do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from opfuser import BasicLinear, Sequential
from opfuser.distributed import collectives
from opfuser.errors import NotSupportedError
from tests.fused.examples import (
    EXAMPLES,
    F64,
    SHARDINGS,
    assert_same,
    built,
    call,
    extras,
    filled,
    fusion_of,
    leaf,
    only,
    refused,
    results,
    sharded,
)

AFTER_FORWARD = "right after its forward GEMM"
AFTER_GRAD = "right after its input-gradient GEMM"
BEFORE_GRADS = "before its gradient GEMMs"
IN_FORWARD = {"row": AFTER_FORWARD, "row, sequence": AFTER_FORWARD}
IN_BACKWARD = {"column": AFTER_GRAD, "column, sequence": AFTER_GRAD, "row, sequence": BEFORE_GRADS}
IN_BOTH = IN_BACKWARD | IN_FORWARD

REFUSED = {
    "linear_cross_entropy": IN_BOTH,
    "recompute_mlp": IN_BOTH,
    "activation_linear_add": IN_BOTH,
    "activation_linear": IN_BOTH,
    "norm_linear": IN_BOTH,
    "forward_linear_scale_add": IN_FORWARD,
    "forward_linear_bias_add": IN_FORWARD,
    "forward_linear_bias_activation": IN_FORWARD,
    "backward_linear_add": IN_BACKWARD,
    "backward_linear_scale": IN_BACKWARD,
}
"""When a linear operation communicates, and why that is in the way of a fusion."""


@pytest.mark.parametrize(("mode", "sequence"), SHARDINGS)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_where_the_gemm_is_not_all(name: str, mode: str, sequence: bool) -> None:
    """In plans, and with the same text by the constructors; whichever linear it is."""
    when = REFUSED[name].get(mode + ", sequence" * sequence)
    kind = "sequence" if sequence else "tensor"
    text = f"{kind}-parallel BasicLinear in {mode} mode communicates {when}"
    count = sum(isinstance(op, BasicLinear) for op in EXAMPLES[name][0]())
    for n in range(count):
        ops = EXAMPLES[name][0]()
        sharded([op for op in ops if isinstance(op, BasicLinear)][n], mode, sequence)
        with only(name):
            seq, inputs = Sequential(*ops), [leaf(3, 6), *extras(name, 3)]
            matches, reasons = seq.plan(*inputs).record(name).matches, refused(seq, name, *inputs)
        fusion = fusion_of(name)
        if when is None:
            assert (len(matches), reasons) == (1, [])
            built(fusion, ops)
            continue
        assert not matches
        # Where a sum comes first, a CPU refuses that and then the rest.
        assert reasons[-1][1] == f"COMMUNICATION: {text}"
        with pytest.raises(NotSupportedError) as error:
            built(fusion, ops)
        place = type(built(fusion, EXAMPLES[name][0]())).__name__
        remedy = "Leave the operations separate, and they fuse where that is possible."
        assert str(error.value) == f"{text} ({place}). {remedy}"


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone, in which collectives change nothing."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("name", "mode", "sequence"),
    [
        (name, mode, sequence)
        for name, when in REFUSED.items()
        for mode, sequence in SHARDINGS
        if mode + ", sequence" * sequence not in when
    ],
)
def test_values_where_it_is_not_refused(name: str, mode: str, sequence: bool) -> None:
    ops = [op.double() for op in filled(EXAMPLES[name][0]())]
    sharded(next(op for op in ops if isinstance(op, BasicLinear)), mode, sequence)
    seq = Sequential(*ops)
    inputs = [leaf(3, 6, dtype=F64), *(t.double() for t in extras(name, 3))]
    with only(name):
        plan = seq.plan(*inputs)
        assert plan.fused("forward") | plan.fused("backward") == {name: 1}
        got = results(seq, seq.parameters(), *inputs)
    with only():
        assert_same(got, results(seq, seq.parameters(), *inputs))


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name.startswith("forward_linear")])
def test_sequence_parallel_input_is_gathered_and_saved_local(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fusion, ops = fusion_of(name), filled(EXAMPLES[name][0]())
    x, more = torch.randn(3, 6), extras(name, 6)
    whole, _ = call(fusion.build(*ops), ops, more, x=torch.cat([x, x]))
    sharded(ops[0], "column", True)
    monkeypatch.setattr(collectives, "gather", lambda x, group, dim: torch.cat([x, x]))
    y, ctxs = call(fusion.build(*ops), ops, more, x=x)
    torch.testing.assert_close(y, whole)
    assert ctxs[0].to_save is not None
    assert torch.equal(ctxs[0].to_save[0], x)
