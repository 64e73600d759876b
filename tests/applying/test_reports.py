"""A report has every module that owns parameters in exactly one list, with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.applying import Report, report

from .models import MODELS, WHOLE, inputs_of, llama, nano_gpt, paths, step


def owners(model: nn.Module) -> list[str]:
    """The modules that own parameters, itself or below, and can be called."""
    return [
        path
        for path, m in model.named_modules()
        if any(True for _ in m.parameters()) and not isinstance(m, nn.ModuleList)
    ]


def listed(found: Report) -> list[str]:
    return [entry.path for entries in found for entry in entries]


@pytest.mark.parametrize("name", MODELS)
def test_every_module_is_in_one_list_and_an_example_tells_which(name: str) -> None:
    model = MODELS[name]()
    reports = [opfuser.apply(model), opfuser.apply(model, example=inputs_of(model))]
    step(model)
    step(model)
    reports.append(report(model))
    for found in reports[1:]:
        assert paths(found) == WHOLE[name]
        assert {entry.path for entry in found.kept} == {entry.path for entry in reports[1].kept}
    opfuser.revert(model)
    for found in (*reports, report(model)):
        assert sorted(listed(found)) == sorted(owners(model))


class Odd(nn.Module):
    """Of four linear modules one is followed by what nothing explains, one by control flow."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
        self.spare = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).erf())


class Deciding(Odd):
    """Its control flow depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("kind", "reason"), [(Odd, "computes erf"), (Deciding, "computes __bool__ in ''")]
)
def test_reasons_name_operation_and_place(kind: Any, reason: str) -> None:
    model = nn.Sequential(kind(), nn.ReLU())
    found = opfuser.apply(model, example=torch.ones(4, 16))
    kept = {entry.path: entry for entry in found.kept}
    assert kept["0"].reason.startswith(reason)
    assert kept["0.up"].reason == "has nothing to fuse, so torch computes it"
    assert kept["0.spare"].reason == "has not been called since apply"
    assert [entry.path for entry in found.computed] == ["0.norm"]
    model(torch.ones(4, 16))
    assert dict(report(model).kept[1].fell_back) == {kept["0"].reason: 2}


def test_calls_are_counted_by_who_computed_them() -> None:
    model = nano_gpt()
    opfuser.apply(model)
    step(model)
    step(model)
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, y: None)
    step(model)
    handle.remove()
    entry = report(model).computed[0]
    assert (entry.path, entry.calls) == ("blocks.0", 2)
    assert entry.fell_back == (("hooks are registered for all modules", 1),)


TEXT = """\
computed by opfuser:
  layers.0 … layers.2 (3): 2 calls each
    x + (Norm, MergedLinear x3, Rotary, Attention, Linear), \
x + (Norm, MergedLinear x2, Gated, Linear)
  norm: 2 calls each
    Norm
  and 33 modules inside of these
kept as they are:
  the model itself, embed_tokens: has no floating-point input of two or more dimensions"""


def test_a_report_reads_well() -> None:
    model = llama()
    opfuser.apply(model)
    step(model)
    step(model)
    assert str(report(model)) == TEXT


def test_a_report_of_a_model_without_apply() -> None:
    text = str(report(nano_gpt()))
    assert text.startswith(
        "nothing is computed by opfuser\nkept as they are:\n  the model itself … head"
    )
    assert "was not there when apply was called" in text
