"""An audit finds what is known to be missed: every site once, and nothing else."""

from __future__ import annotations

import pytest

from opfuser.report.audit import Todo, audit

from .ground_truth import TRUTHS


def counted(todo: Todo) -> dict[str, tuple[int, int]]:
    """Sites and calls of each fused operation."""
    out: dict[str, tuple[int, int]] = {}
    for missed in todo.missed_fusions:
        sites, calls = out.get(missed.fused_op, (0, 0))
        calls += missed.estimate.calls_per_step
        out[missed.fused_op] = sites + len(missed.instances), calls
    return out


@pytest.mark.parametrize("name", TRUTHS)
def test_finds_every_site_once(name: str) -> None:
    model, inputs = TRUTHS[name].build()
    assert counted(audit(model, inputs)) == TRUTHS[name].missed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["attention", "bias, dropout, residual", "nothing, of opfuser"])
def test_finds_the_same_where_there_are_values(name: str, device: str) -> None:
    model, inputs = TRUTHS[name].build(device)
    assert counted(audit(model, inputs)) == TRUTHS[name].missed


def test_without_gradients_only_forward_counts() -> None:
    model, inputs = TRUTHS["attention"].build()
    trained = audit(model, inputs).missed_fusions[0]
    model.requires_grad_(False)
    (missed,) = audit(model, [t.detach() for t in inputs]).missed_fusions
    assert (missed.stage, trained.stage) == ("forward", "joint")
    assert 0 < missed.estimate.launches_saved < trained.estimate.launches_saved
    assert 0 < missed.estimate.bytes_saved_per_call < trained.estimate.bytes_saved_per_call
