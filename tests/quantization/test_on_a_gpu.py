"""Blocks in bf16 on a GPU: close to float64 as their format is, and equal to the emulation."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext
from typing import Literal

import pytest
import torch
from torch import nn

import opfuser
from opfuser.engine.recorded.recordable import unrecorded
from opfuser.recipe import Recipe
from tests.quantization.test_edges import BLOCKS, FUSED
from tests.quantization.test_values import each_recipe, error, results

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")]


@pytest.mark.parametrize("rows", [1, 127, 129, 256])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("saves", [None, "fp8"])
@each_recipe
def test_blocks(recipe: Recipe, saves: Literal["fp8"] | None, name: str, rows: int) -> None:
    torch.manual_seed(0)
    recipe = dataclasses.replace(recipe, save_activations=saves)
    block = BLOCKS[name]()
    for parameter in block.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.1)
    x, dy = torch.randn(rows, 4, 128), torch.randn(rows, 4, 256 if "two" in name else 128)
    double = copy.deepcopy(block).double()
    exact = results(double, x.double().requires_grad_(), list(double.parameters()), dy.double())
    found = {}
    for device, off in (("cuda", ()), ("cuda", FUSED), ("cpu", ())):
        model = copy.deepcopy(block).to(device, torch.bfloat16)
        inputs = x.to(device, torch.bfloat16).requires_grad_(), dy.to(device, torch.bfloat16)
        with opfuser.disable(*off):
            for _ in range(2):  # the second call has the scales of the first
                with opfuser.autocast(recipe=recipe):
                    got = results(model, inputs[0], list(model.parameters()), inputs[1])
        found[device, off] = [t.cpu() for t in got]
        plan = model.last_plan
        assert bool(plan.edges) == (not off and "two" not in name)
        saved = any(edge.stage == "joint" for edge in plan.edges)
        assert saved == (saves is not None and not off and name in ("gated", "plain"))
    for fused, apart, emulated, true in zip(*found.values(), exact, strict=True):
        # Values that are rounded to bf16 in between, or summed in another order, have other codes.
        others = max(error(apart, true), error(emulated, true))
        assert error(fused, true) < min(0.125, 1.25 * others + 0.005)


@pytest.mark.parametrize("count", [1, 2])
@each_recipe
def test_recorded_steps(recipe: Recipe, count: int) -> None:
    """Those of the program, bit for bit, on one stream and where two take turns."""
    torch.manual_seed(0)
    model = BLOCKS["gated"]().to("cuda", torch.bfloat16)
    other = copy.deepcopy(model)
    x = torch.randn(256, 4, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    streams = [torch.cuda.Stream() for _ in range(count)]
    found = []
    for block in (model, other):
        rows = []
        with unrecorded() if block is other else nullcontext():
            for step in range(8):
                torch.manual_seed(step)
                stream = streams[step % count]
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream), opfuser.autocast(recipe=recipe):
                    rows += results(block, x, list(block.parameters()), dy)
                torch.cuda.current_stream().wait_stream(stream)
        found.append(rows)
    assert "def backward" in model.last_plan.recorded
    assert "def backward" not in other.last_plan.recorded
    torch.testing.assert_close(*found, rtol=0, atol=0)
