"""The document: its schema, its order, what it quotes, and what it knows of kernels."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import opfuser
from opfuser.core.fusion import REFUSAL_CODES
from opfuser.errors import NotSupportedError
from opfuser.report.audit import audit
from opfuser.report.audit.kernels import KNOWN, advice, look_up
from opfuser.report.audit.tracing import trace

from . import ground_truth
from .ground_truth import TRUTHS, D

NAMES = [name for name, truth in TRUTHS.items() if truth.missed]
SOURCE = Path(ground_truth.__file__).read_text(encoding="utf-8")


def document(name: str) -> dict[str, Any]:
    model, inputs = TRUTHS[name].build()
    todo = audit(model, inputs, name)
    read: dict[str, Any] = yaml.safe_load(todo.as_yaml())
    assert read == todo.as_data()
    return read


def test_schema() -> None:
    read = document("norms")
    assert list(read) == ["schema", "input", "missed_fusions"]
    assert read["schema"] == "opfuser.fusion_todo/1"
    assert list(read["input"]) == ["model", "env"]
    env = read["input"]["env"]
    assert read["input"]["model"] == "norms"
    assert (env["device"], env["inputs"]) == ("meta", [f"2x8x{D}:float32"])
    assert (env["parameters"], env["training"]) == ("float32", True)
    assert (env["opfuser"], env["torch"]) == (opfuser.__version__, str(torch.__version__))
    for missed in read["missed_fusions"]:
        assert list(missed) == [
            "fused_op", "source", "stage", "component_ops", "existing_kernel", "recommendation",
            "blocked_by", "numeric_risk", "estimate", "instances",
        ]  # fmt: skip
        assert list(missed["existing_kernel"]) == ["lookup", "evidence"]
        assert list(missed["estimate"]) == [
            "launches_saved", "bytes_saved_per_call", "calls_per_step",
            "bytes_moved_change", "bytes_kept_change", "measured",
        ]  # fmt: skip
        assert missed["estimate"]["measured"] is None
        for site in missed["instances"]:
            assert list(site) == ["op_loc", "module_segment", "plan_segment", "notes"]


@pytest.mark.parametrize("name", NAMES)
def test_fields_are_of_their_kinds_and_the_order_is_by_bytes(name: str) -> None:
    weights = []
    for missed in document(name)["missed_fusions"]:
        assert missed["source"] in ("opfuser", "plugin", "torch", "triton", "cuda")
        assert missed["stage"] in ("forward", "backward", "joint")
        assert missed["existing_kernel"]["lookup"] in ("found", "not_found")
        assert missed["existing_kernel"]["evidence"]
        assert missed["recommendation"] in ("use_existing_kernel", "needs_triton", "defer")
        blocked = missed["blocked_by"]
        assert blocked is None or blocked["code"] in REFUSAL_CODES
        assert missed["numeric_risk"].split(":")[0] in ("none", "low", "high")
        estimate = missed["estimate"]
        assert estimate["calls_per_step"] >= len(missed["instances"]) > 0
        weights.append(estimate["calls_per_step"] * estimate["bytes_saved_per_call"])
    assert weights == sorted(weights, reverse=True)


@pytest.mark.parametrize("name", NAMES)
def test_segments_are_verbatim(name: str) -> None:
    model, inputs = TRUTHS[name].build()
    nodes = {str(node.format_node()) for node in trace(model, inputs).graph.nodes}
    quoted = set()
    for missed in document(name)["missed_fusions"]:
        for site in missed["instances"]:
            for part in site["module_segment"].split("\n\n"):
                assert part + "\n" in SOURCE
            lines = site["plan_segment"].splitlines()
            assert set(lines) <= nodes
            assert not quoted & {(missed["stage"], line) for line in lines}
            quoted |= {(missed["stage"], line) for line in lines}
            file, number = site["op_loc"].rstrip(")").split(", ")[1].split(":")
            assert file.endswith("ground_truth.py")
            assert SOURCE.splitlines()[int(number) - 1].strip() in site["module_segment"]


def test_a_helper_says_where_it_is_called() -> None:
    (missed,) = (m for m in document("norms")["missed_fusions"] if m["fused_op"] == "rms_norm")
    at = next(n for n, text in enumerate(SOURCE.splitlines(), 1) if "self.rms(torch" in text)
    assert len(missed["instances"]) == 2
    assert all(f"ground_truth.py:{at};" in site["notes"] for site in missed["instances"])


def test_statements_of_several_lines_are_whole() -> None:
    class Long(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.pow(2).mean(
                -1,
                keepdim=True,
            )
            return torch.sin(
                x * torch.rsqrt(y + 1e-6)
            )  # fmt: skip

    (missed,) = audit(Long(), [torch.randn(2, 8)]).missed_fusions
    assert missed.instances[0].module_segment + "\n" in inspect.getsource(Long)
    assert missed.instances[0].module_segment.startswith("            y = x.pow(2).mean(\n")


def test_kernels_of_torch_and_opfuser_can_be_imported() -> None:
    for kernels in KNOWN.values():
        for kernel in kernels:
            if kernel.source in ("torch", "opfuser"):
                assert kernel.importable(), kernel.symbol
            else:
                here = importlib.util.find_spec(kernel.package) is not None
                assert kernel.importable() is here


def test_evidence_names_the_symbol_and_the_place() -> None:
    lookup, (first, *_) = look_up("rms_norm")
    assert lookup == "found"
    assert first.startswith("torch.nn.functional.rms_norm (https://docs.pytorch.org/")
    assert "importable here" in first


def test_a_new_kernel_is_asked_for_only_after_a_look_up() -> None:
    assert advice("rms_norm", gradient=True) == ("torch", "use_existing_kernel")
    assert advice("adaptive_rms_norm", gradient=True) == ("triton", "use_existing_kernel")
    # What was found has no backward.
    assert look_up("embedding_norm").lookup == "found"
    assert advice("embedding_norm", gradient=True) == ("triton", "needs_triton")
    assert advice("embedding_norm", gradient=False) == ("cuda", "use_existing_kernel")
    lookup, evidence = look_up("adaptive_layer_norm")
    assert (lookup, len(evidence)) == ("not_found", 3)
    assert advice("adaptive_layer_norm", gradient=False) == ("triton", "needs_triton")


def test_without_pyyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = TRUTHS["norms"].build()
    todo = audit(model, inputs)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(NotSupportedError, match=r"written by PyYAML.*opfuser\[tools\]"):
        todo.as_yaml()


def test_the_model_is_as_it_was() -> None:
    model, inputs = TRUTHS["attention"].build("cpu")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    hooks: Callable[[], int] = lambda: sum(  # noqa: E731
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()
    )
    audit(model, inputs)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert hooks() == 0
    assert all(info.enabled for info in opfuser.fusions() if info.name != "recompute_mlp")
