"""Experts in bf16 on a GPU, whose sizes the host never reads, and others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import opfuser
from opfuser import gemm
from opfuser.basic import grouped_linear
from opfuser.fused.quantized_grouped_linear import QuantizedGroupedLinear
from opfuser.gemm.row_groups import groups_on_device
from opfuser.models import MoEConfig, moe_block
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from tests.replay.models import assert_equal, code, count, twin

pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated:UserWarning")

BF16 = torch.bfloat16
RECIPES = (
    Float8RowwiseScaling(),
    Float8CurrentScaling(),
    DelayedScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(disable_stochastic_rounding=True),
)


@pytest.fixture
def on_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Sizes stay on the device, also where that is a CPU."""
    if device.type == "cpu":
        monkeypatch.setattr(gemm, "has_grouped_gemm", lambda x, features: True)

        def located(sizes: torch.Tensor, x: torch.Tensor, where: str) -> gemm.RowGroups:
            # Backward is given what forward located.
            once = sizes.dim() == 2
            return gemm.RowGroups(None, sizes) if once else groups_on_device(sizes, len(x))

        monkeypatch.setattr(grouped_linear, "row_groups", located)
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


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_other_groups_of_codes_at_every_call(
    recipe: Recipe, on_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them empty ones; nothing of a call is kept but what its recipe keeps."""
    if on_device.type == "cpu":
        monkeypatch.setattr(opfuser.GroupedLinear, "only_launches", True)
    torch.manual_seed(0)
    linear = opfuser.GroupedLinear(3, 128, 128, bias=False, device=on_device, dtype=BF16)
    model = opfuser.Sequential(linear)
    other = twin(model)
    for sizes in ([5, 0, 43], [0, 48, 0], [16, 16, 16], [47, 0, 1], [1, 1, 46], [0, 0, 48]):
        x = torch.randn(48, 128, device=on_device, dtype=BF16)
        split, results = torch.tensor(sizes, device=on_device), []
        for m in (model, other):
            own = x.clone().requires_grad_()
            with opfuser.autocast(recipe=recipe):
                y = m(own, split)
            loss = y.float().square().sum()
            results.append([y, *torch.autograd.grad(loss, [own, *m.parameters()])])
        for a, b in zip(*results):
            assert_equal(a, b)
    assert code(model) == ""
    assert count(model) > 2


@pytest.mark.parametrize(
    ("recipe", "change", "expected"),
    [
        (Float8RowwiseScaling(), {}, True),
        (Float8RowwiseScaling(), {"dtype": torch.float32}, True),
        (Float8RowwiseScaling(), {"accumulate_into_main_grad": True}, False),
        (Float8RowwiseScaling(), {"device": "cpu"}, False),
        (Float8RowwiseScaling(wgrad="bf16"), {}, True),
        (Float8RowwiseScaling(wgrad="bf16"), {"dtype": torch.float32}, False),
        (MXFP8BlockScaling(), {}, True),
        (NVFP4BlockScaling(), {}, True),
    ],
    ids=str,
)
def test_which_quantized_experts_only_launch_kernels(
    recipe: Recipe, change: dict[str, Any], expected: bool
) -> None:
    how: Any = {"device": "meta", "dtype": BF16, **change}
    linear = opfuser.GroupedLinear(2, 32, 64, **how)
    assert QuantizedGroupedLinear(linear=linear, recipe=recipe).replayable == expected
