"""``opfuser explain``: plans as text and JSON, reasons, and how much it computes for that."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

import opfuser
from opfuser import fuser
from tests.cli import models

MODELS = "tests.cli.models"
Command = Callable[..., Any]


def test_text_is_the_plan_and_what_it_launches(opfuser_command: Command) -> None:
    done = opfuser_command("explain", f"{MODELS}:mlp", "--input", "2x3x16:bf16", "--dtype", "bf16")
    x = torch.empty(2, 3, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    plan, _, counts = done.out.partition("on a GPU, ")
    assert (done.status, done.err) == (0, "")
    assert plan.rstrip() == str(models.mlp().to("meta", torch.bfloat16).plan(x)).rstrip()
    assert "launches" in counts
    assert "saved for backward" in counts


def test_programs_stand_below_their_plans(opfuser_command: Command) -> None:
    plain = opfuser_command("explain", f"{MODELS}:mlp").out
    done = opfuser_command("explain", f"{MODELS}:mlp", "--program")
    with torch.device("meta"):
        program = models.mlp().plan(torch.empty(2, 3, 16, requires_grad=True)).program
    assert (done.status, done.err) == (0, "")
    assert done.out == f"{plain}\n{program}\n"
    found = json.loads(opfuser_command("explain", f"{MODELS}:mlp", "--format", "json").out)
    assert "program" not in found["sequences"][""]
    argv = "explain", f"{MODELS}:mlp", "--program", "--format", "json"
    assert json.loads(opfuser_command(*argv).out)["sequences"][""]["program"] == program


@pytest.mark.parametrize("more", [("--why", "norm_linear"), ("--format", "svg")])
def test_programs_are_text(opfuser_command: Command, more: tuple[str, str]) -> None:
    done = opfuser_command("explain", f"{MODELS}:mlp", "--program", *more)
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("opfuser: --program goes with plans as text or JSON. Received: ")


def test_every_sequence_has_its_path(opfuser_command: Command) -> None:
    out = opfuser_command("explain", f"{MODELS}:wrapped").out
    titles = [line for line in out.splitlines() if line in ("first", "blocks.0", "never_called")]
    assert titles == ["first", "blocks.0"]
    assert "whole model, on a GPU, " in out
    one = opfuser_command("explain", f"{MODELS}:wrapped", "--sequence", "blocks.0").out
    assert "first" not in one.splitlines()


@pytest.mark.parametrize("more", [(), ("--why", "norm_linear")])
def test_equal_sequences_are_told_together(opfuser_command: Command, more: tuple[str, ...]) -> None:
    lines = opfuser_command("explain", f"{MODELS}:many", *more).out.splitlines()
    titles = [line for line in lines if line.startswith("layers.")]
    assert titles == ["layers.[0-1, 3]", "layers.2"]
    together = [line for line in lines if line.endswith("3 of them:")]
    assert len(together) == (0 if more else 1)


def test_why(opfuser_command: Command) -> None:
    out = opfuser_command("explain", f"{MODELS}:mlp", "--why", "norm_linear").out
    with torch.device("meta"):
        plan = models.mlp().plan(torch.empty(2, 3, 16, requires_grad=True))
    assert out == plan.why("norm_linear") + "\n"
    out = opfuser_command("explain", f"{MODELS}:mlp", "--why", "norm_linear", "--at", "1").out
    assert out == plan.why("norm_linear", 1) + "\n"


def test_why_knows_the_fusions_that_the_model_brings(
    opfuser_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, handles = models.mlp, []

    def bringing() -> Any:
        rule = opfuser.Fusion("of_the_model", "joint", (opfuser.Softplus,), build=_Alone)
        handles.append(opfuser.register_forward_backward_fusion(rule))
        return build()

    monkeypatch.setattr(models, "mlp", bringing)
    done = opfuser_command("explain", f"{MODELS}:mlp", "--input", "2x3x16", "--why", "of_the_model")
    handles[0].remove()
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("of_the_model (joint): unmatched")


@pytest.mark.parametrize(
    ("model", "call", "count"),
    [
        (f"{MODELS}:feed_forward", "opfuser.from_torch(model)", 1),
        ("tests.cli.hugging_face:plain", "opfuser.hf.apply(model)", 3),
    ],
)
def test_a_model_that_a_call_converts_is_told_of_it(
    opfuser_command: Command, monkeypatch: pytest.MonkeyPatch, model: str, call: str, count: int
) -> None:
    """Where the call is made, the model is explained."""
    if "hugging_face" in model:
        pytest.importorskip("transformers", reason="transformers is not installed")
    refused = opfuser_command("explain", model)
    several = "Sequential" if count == 1 else "Sequentials"
    assert (refused.status, refused.out) == (1, "")
    assert refused.err == (
        f"opfuser: The model holds no opfuser.Sequential that it calls ({model}). Convert it where "
        f"it is built: with {call} it calls {count} {several}.\n"
    )
    module, name = model.split(":")
    home = importlib.import_module(module)
    build = getattr(home, name)

    def converted() -> Any:
        model = build()
        made = eval(call, {"opfuser": opfuser, "model": model})
        return made if isinstance(made, torch.nn.Module) else model

    converted.example_inputs = build.example_inputs  # type: ignore[attr-defined]
    monkeypatch.setattr(home, name, converted)
    done = opfuser_command("explain", model, "--format", "json")
    assert len(json.loads(done.out)["sequences"]) == count


@pytest.mark.parametrize("model", ["own_forward", "plain"])
def test_a_model_that_no_call_converts_is_told_to_write_a_sequence(
    opfuser_command: Command, model: str
) -> None:
    refused = opfuser_command("explain", f"{MODELS}:{model}")
    assert refused.status == 1
    assert refused.err == (
        f"opfuser: The model holds no opfuser.Sequential that it calls ({MODELS}:{model}). "
        "Neither opfuser.from_torch nor opfuser.hf.apply makes it call one. Write operations of "
        "its forward as an opfuser.Sequential: opfuser audit names those that would fuse.\n"
    )


def test_the_audit_names_the_sequence_that_explain_asks_for(
    opfuser_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = yaml.safe_load(opfuser_command("audit", f"{MODELS}:own_forward").out)
    told = {site["notes"] for m in document["missed_fusions"] for site in m["instances"]}
    (code,) = {text.removeprefix("write it as ").partition("; ")[0] for text in told}

    def rewritten() -> Any:
        return eval(code, {"opfuser": opfuser})

    rewritten.example_inputs = models.own_forward.example_inputs  # type: ignore[attr-defined]
    monkeypatch.setattr(models, "own_forward", rewritten)
    out = opfuser_command("explain", f"{MODELS}:own_forward").out
    for missed in document["missed_fusions"]:
        assert f"-> {missed['fused_op']}" in out
    assert opfuser_command("audit", f"{MODELS}:own_forward") == (0, "", "")


def test_json_goes_to_a_file(opfuser_command: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = opfuser_command("explain", f"{MODELS}:mlp", "--format", "json", "-o", str(file))
    assert (done.status, done.out) == (0, "")
    found = json.loads(file.read_text())
    assert found["schema"] == "opfuser.explain/1"
    assert list(found["sequences"]) == [""]


def test_counts_of_other_steps_are_left_out(opfuser_command: Command) -> None:
    """Those of a GPU, where a fusion is for the CPU alone."""
    rule = opfuser.Fusion(
        "here_alone", "joint", (opfuser.GELU,), build=_Alone,
        requires=opfuser.Requires(device="cpu"),
    )  # fmt: skip
    argv = "explain", f"{MODELS}:mlp", "--device", "cpu"
    with opfuser.register_forward_backward_fusion(rule, prepend=True):
        out = opfuser_command(*argv).out
        found = json.loads(opfuser_command(*argv, "--format", "json").out)
        many = opfuser_command("explain", f"{MODELS}:many", *argv[2:]).out
    says = "No launches and bytes: They are counted for a GPU, which runs other steps"
    assert " ".join(out.split()).endswith(f"{says} than cpu does.")
    assert " ".join(many.split()).endswith(f"{says} in 'layers.0' than cpu does.")
    assert found["traffic"] is None
    assert found["sequences"][""]["forward"][0]["launches"] is None
    assert "launches" in opfuser_command(*argv).out


@pytest.mark.gpu
def test_a_gpu_follows_the_plan_that_is_counted(opfuser_command: Command) -> None:
    argv = "explain", f"{MODELS}:mlp", "--dtype", "bf16", "--format", "json"
    here = json.loads(opfuser_command(*argv, "--device", "cuda").out)
    meta = json.loads(opfuser_command(*argv).out)
    assert here["model"]["device"] == "cuda"
    assert here["traffic"] == meta["traffic"] is not None


class _Alone(opfuser.FusedOperation):
    def __init__(self, op: opfuser.BasicOperation) -> None:
        super().__init__([op])


class Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_model_of_300_operations_is_planned_once_and_run_twice(
    opfuser_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    make_plan = fuser.make_plan
    monkeypatch.setattr(fuser, "make_plan", lambda *args: made.append(1) or make_plan(*args))
    with Counter() as counter:
        done = opfuser_command("explain", f"{MODELS}:layers")
    assert "Plan for 303 basic operations" in done.out
    assert len(made) == 1
    assert counter.count < 303 * 25


def test_a_picture_and_a_page_show_what_is_counted(
    opfuser_command: Command, tmp_path: Path
) -> None:
    argv = "explain", f"{MODELS}:wrapped"
    svg = opfuser_command(*argv, "--format", "svg", "--sequence", "first").out
    assert svg.startswith("<svg ")
    assert " bytes for backward" in svg
    file = tmp_path / "plan.html"
    assert opfuser_command(*argv, "--format", "html", "-o", str(file)).status == 0
    html = file.read_text(encoding="utf-8")
    assert html.count("<svg ") == 2
    assert f"<h1>{MODELS}:wrapped</h1>" in html
    assert "saved for backward</dt>" in html
