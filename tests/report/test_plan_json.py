"""Plans as plain data: the fields that other programs read, and what they hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import opfuser
from opfuser.report.plan_json import document, explained, plan_data
from opfuser.report.target import load
from tests.cli import models

STEP = ["indices", "operation", "path", "fusion", "launches", "read", "written", "saved_bytes"]
# Promises: schema opfuser.explain/1 and opfuser.plan/1.
FIELDS: dict[str, list[str]] = {
    "explain": ["schema", "opfuser", "torch", "model", "sequences", "traffic", "traffic_missing"],
    "model": ["name", "device", "inputs"],
    "inputs": ["shape", "dtype", "requires_grad"],
    "traffic": ["launches", "read", "written", "saved_bytes", "elsewhere"],
    "plan": ["schema", "call", "operations", "forward", "backward", "saved", "fusions", "edges",
             "gemms", "assumed"],
    "call": ["dtype", "device", "autocast", "grad", "recipe"],
    "operation": ["name", "type", "note", "quantized", "high_precision"],
    "forward": STEP,
    "backward": STEP,
    "saved": ["operation", "bytes"],
    "fusion": ["name", "stage", "status", "detail", "matches", "refusals", "near_misses"],
    "refusal": ["at", "code", "detail"],
    "near_miss": ["at", "matched", "of", "code", "detail"],
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    with opfuser.disable("pointwise_chain"):
        return document(explained(load("tests.cli.models:layers")))


def test_fields(found: dict[str, Any]) -> None:
    plan = found["sequences"][""]
    fusions = plan["fusions"]
    held = {
        "explain": found,
        "model": found["model"],
        "inputs": found["model"]["inputs"][0],
        "traffic": found["traffic"],
        "plan": plan,
        "call": plan["call"],
        "operation": plan["operations"][0],
        "forward": plan["forward"][0],
        "backward": plan["backward"][0],
        "saved": plan["saved"][0],
        "fusion": fusions[0],
        "refusal": next(r for fusion in fusions for r in fusion["refusals"]),
        "near_miss": next(n for fusion in fusions for n in fusion["near_misses"]),
    }
    assert {name: list(data) for name, data in held.items()} == FIELDS
    assert (found["schema"], plan["schema"]) == ("opfuser.explain/1", "opfuser.plan/1")


def test_it_is_json_and_the_same_each_time(found: dict[str, Any]) -> None:
    with opfuser.disable("pointwise_chain"):
        again = document(explained(load("tests.cli.models:layers")))
    assert json.dumps(found) == json.dumps(again)
    assert json.loads(json.dumps(found)) == found


def test_data_are_those_of_the_plan(found: dict[str, Any]) -> None:
    data = found["sequences"][""]
    with torch.device("meta"), opfuser.disable("pointwise_chain"):
        plan = models.layers().plan(*[torch.empty(2, 8, dtype=torch.int64)] * 2)
    for name, steps in (("forward", plan.forward), ("backward", plan.backward)):
        rows = [(tuple(s["indices"]), s["operation"], s["fusion"]) for s in data[name]]
        assert rows == [(s.indices, type(s.op).__name__, s.fusion) for s in steps]
    assert tuple(op["name"] for op in data["operations"]) == plan.names
    for row, record in zip(data["fusions"], plan.history):
        assert [row[name] for name in ("name", "stage", "status")] == [
            record.name, record.stage, record.status
        ]  # fmt: skip
        assert row["matches"] == [list(match) for match in record.matches]
        assert [(r["at"], r["code"]) for r in row["refusals"]] == [
            (at, why.code) for at, why in record.refusals
        ]
    (off,) = [row for row in data["fusions"] if row["name"] == "pointwise_chain"]
    assert (off["status"], off["detail"]) == ("disabled", "opfuser.disable")


def test_totals_are_sums_of_steps(found: dict[str, Any]) -> None:
    plan = found["sequences"][""]
    steps = [*plan["forward"], *plan["backward"]]
    for name in ("launches", "read", "written"):
        own = sum(step[name] for step in steps)
        assert found["traffic"][name] == own + found["traffic"]["elsewhere"][name]
    saved = sum(row["bytes"] for row in plan["saved"])
    assert found["traffic"]["saved_bytes"] == saved == sum(s["saved_bytes"] for s in steps)


def test_a_plain_module_has_its_path_and_no_counts() -> None:
    seq = opfuser.Sequential(opfuser.GELU(), torch.nn.Linear(4, 4), opfuser.GELU())
    data = plan_data(seq.plan(torch.empty(2, 4, requires_grad=True)))
    assert data["forward"][1] == {**dict.fromkeys(STEP), "indices": [], "operation": "Linear",
                                  "path": "1"}  # fmt: skip
    assert data["saved"] is None


def test_quantized_compute() -> None:
    (plan,) = document(explained(load("tests.cli.models:fp8", ["128x256"])))["sequences"].values()
    assert plan["call"]["recipe"] == "Float8BlockScaling"
    assert [op["quantized"] for op in plan["operations"]] == [True, True]
