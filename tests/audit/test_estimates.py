"""Estimates are what the traffic model and the memory benchmark count."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import opfuser
from benchmarks.memory import Size, items
from opfuser.report.audit import MissedFusion, audit
from opfuser.report.audit.estimates import unfused
from opfuser.report.target import Target
from opfuser.report.traffic import model_traffic
from tests.report.counted import traffic

from .ground_truth import TRUTHS, D
from .test_advice import feed_forward

A = 2 * 8 * D * 4  # bytes of an activation
ROWS = 2 * 8 * 4  # bytes of one number per row


def missed(name: str) -> Sequence[MissedFusion]:
    model, inputs = TRUTHS[name].build()
    return audit(model, inputs).missed_fusions


def test_a_residual_sum_and_a_norm_by_hand() -> None:
    """Forward reads the sum once less; backward neither writes nor reads the norm's gradient."""
    estimates = {m.fused_op: m.estimate for m in missed("residual and norm")}
    assert estimates["forward_add_layer_norm"][:3] == (1, A, 2)
    assert estimates["backward_add_layer_norm"][:3] == (1, 2 * A, 3)


def test_a_bias_outside_of_the_gemm_by_hand() -> None:
    """The GEMM's output is neither written nor read; backward is the same."""
    sizes = sorted(m.estimate.bytes_saved_per_call for m in missed("matmul and bias"))
    assert sizes == [2 * 2 * 8 * 16 * 4, 2 * 2 * 8 * 48 * 4]


def test_bias_dropout_and_residual_agree_with_the_traffic_model() -> None:
    (found,) = missed("bias, dropout, residual")
    with torch.device("meta"):
        chain = opfuser.Sequential(opfuser.Bias(D), opfuser.Dropout(0.1), opfuser.AddExtraInput())
        inputs = [torch.randn(2, 8, D).requires_grad_() for _ in range(2)]
        together = traffic(chain, *inputs).counts
        with unfused():
            apart = traffic(chain, *inputs).counts
    assert found.estimate.launches_saved == apart.launches - together.launches > 0
    assert found.estimate.bytes_saved_per_call == apart.bytes - together.bytes > 0


def kept(m: MissedFusion) -> int:
    (text,) = (part for part in m.instances[0].notes.split("; ") if "kept less" in part)
    return int(text.split(", ")[1].split()[0])


def test_what_is_kept_agrees_with_the_memory_benchmark() -> None:
    size = Size("meta", "fp32", D, 64, 4, 2, 2, 8)
    with torch.device("meta"):
        x = torch.randn(2, 8, D).requires_grad_()
        found = audit(feed_forward(), [x]).missed_fusions
        norm, up, down = opfuser.LayerNorm(D), opfuser.Linear(D, 64), opfuser.Linear(64, D)
        block = opfuser.Sequential(norm, up, opfuser.GELU(), down)
        together = sum(item.bytes for item in items(block, size))
        with unfused():
            apart = sum(item.bytes for item in items(block, size))
    assert {m.fused_op for m in found} == {"norm_linear", "activation_linear"}
    assert sum(map(kept, found)) == apart - together > 0


def test_a_norm_that_is_written_out_keeps_what_autograd_saves_less_its_input() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight

    size = Size("meta", "fp32", D, 64, 4, 2, 2, 8)
    with torch.device("meta"):
        (found,) = audit(Norm(), [torch.randn(2, 8, D).requires_grad_()]).missed_fusions
        saved = [sum(i.bytes for i in items(m, size)) for m in (Norm(), opfuser.RMSNorm(D))]
    assert saved[1] == A + ROWS
    assert kept(found) == saved[0] - saved[1] > 0


def moved(m: MissedFusion) -> int:
    (text,) = (part for part in m.instances[0].notes.split("; ") if "moved less" in part)
    return int(text.split()[0])


def test_one_kernel_in_each_pass_by_hand() -> None:
    class Modulated(nn.Module):
        def forward(
            self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
        ) -> torch.Tensor:
            return nn.functional.layer_norm(x, (D,)) * (1 + scale) + shift

    with torch.device("meta"):
        x = torch.randn(2, 8, D).requires_grad_()
        per_sample = [torch.randn(2, 1, D).requires_grad_() for _ in range(2)]
        (found,) = audit(Modulated(), [x, *per_sample]).missed_fusions
        apart = model_traffic(Target("", Modulated(), (x, *per_sample))).counts
    s = 2 * D * 4  # bytes of scale, and of shift
    forward = (A + 2 * s) + A
    backward = (A + A + 2 * s) + (A + 2 * s)  # reads dy, x, scale, shift; writes the gradients
    assert moved(found) == apart.bytes - forward - backward > 0
    assert found.estimate.launches_saved == apart.launches - 2


@pytest.mark.parametrize("name", ["attention", "adaptive norms", "embedding and norm"])
def test_kernels_that_opfuser_lacks_are_counted_as_one_in_each_pass(name: str) -> None:
    for found in missed(name):
        backward = 2 * len(found.component_ops) - 2
        assert found.estimate.launches_saved >= backward
        assert found.estimate.bytes_saved_per_call > 0
