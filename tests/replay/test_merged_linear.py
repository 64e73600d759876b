"""Replayed calls of projections: in one storage, apart, and moved or replaced in between."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import opfuser
from tests.replay.models import DIM, assert_equal, assert_same_grads, count, draw

pytestmark = pytest.mark.usefixtures("replaying")


@pytest.mark.parametrize("apart", [False, True], ids=["one storage", "apart"])
def test_steps(apart: bool, device: torch.device) -> None:
    merged = opfuser.MergedLinear(DIM, {"gate": DIM, "up": DIM}, device=device)
    model = opfuser.Sequential(opfuser.RMSNorm(DIM, device=device), merged, opfuser.SwiGLU())
    other = copy.deepcopy(model)
    other.replay = "off"
    for projections in (model[1], other[1]):
        if not apart:
            projections.merge_storages()
        for p in projections.parameters():
            p.data = p.data.clone() if apart else p.data

    def steps(number: int) -> None:
        for _ in range(number):
            x, dy = draw(device), draw(device)
            for m in (model, other):
                m.zero_grad()
                m(x).backward(dy)
            assert_equal(model(x), other(x))
            assert_same_grads(model, other)

    steps(4)
    assert count(model) >= 4
    before = count(model)
    for m in (model, other):
        m[1].merge_storages()
        m[1].up.weight = nn.Parameter(torch.ones(DIM, DIM, device=device))
    steps(4)
    assert count(model) > before
