"""Experts in bf16 on a GPU, whose sizes the host never reads, and others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import opfuser
from opfuser import gemm
from opfuser.basic import grouped_linear
from opfuser.gemm.row_groups import groups_on_device
from opfuser.models import MoEConfig, moe_block
from tests.replay.models import assert_equal, code, count, twin

BF16 = torch.bfloat16


@pytest.fixture
def on_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Sizes stay on the device, also where that is a CPU."""
    if device.type == "cpu":
        monkeypatch.setattr(gemm, "has_grouped_gemm", lambda x, features: True)
        monkeypatch.setattr(grouped_linear, "row_groups", lambda s, x, where: groups_on_device(s))
        monkeypatch.setattr(opfuser.GroupedLinear, "replayable", True)
    return device


@pytest.mark.usefixtures("replaying")
def test_other_experts_at_every_call(on_device: torch.device) -> None:
    torch.manual_seed(0)
    config = MoEConfig(
        dim=32, ffn_dim=16, num_experts=4, top_k=2, aux_loss=True, init_std=0.5,
        device=on_device, dtype=BF16,
    )  # fmt: skip
    model = moe_block(config)
    other = twin(model)
    seen = set()
    for _ in range(6):
        x = torch.randn(3, 10, 32, device=on_device, dtype=BF16)
        results = []
        for m in (model, other):
            own = x.clone().requires_grad_()
            y, aux = m(own)
            loss = y.float().square().sum() + aux
            results.append([y, aux, *torch.autograd.grad(loss, [own, *m.parameters()])])
        for a, b in zip(*results):
            assert_equal(a, b)
        seen.add(tuple(results[0][0].argmax(-1).flatten().tolist()))
    assert len(seen) == 6
    assert code(model) == ""
    assert count(model) == 5


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"dtype": torch.float16}, False),
        ({"in_features": 12}, False),
        ({"out_features": 12}, False),
        ({"device": "cpu"}, False),
        ({"accumulate_into_main_grad": True}, False),
        ({"accumulate_into_grad": True}, True),
        ({"delay_wgrad_compute": True}, False),
        ({"single_grouped_weight": True}, True),
    ],
    ids=str,
)
def test_which_experts_only_launch_kernels(change: dict[str, Any], expected: bool) -> None:
    sizes = {"num_groups": 2, "in_features": 8, "out_features": 16}
    op = opfuser.GroupedLinear(**{**sizes, "device": "meta", "dtype": BF16, **change})
    assert op.replayable == expected


def test_experts_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    op = opfuser.GroupedLinear(2, 8, 16, device="meta")
    assert not op.replayable
    monkeypatch.setattr(grouped_linear, "autocast_dtype", lambda device: BF16)
    assert op.replayable
    op.weight0 = nn.Parameter(op.weight0.bfloat16())
    monkeypatch.setattr(grouped_linear, "autocast_dtype", lambda device: torch.float16)
    assert not op.replayable
