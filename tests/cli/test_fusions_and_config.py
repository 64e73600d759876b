"""``opfuser fusions`` and ``opfuser config``: what they print, and their exit statuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import opfuser
from opfuser import Fusion, FusionHandle, Linear, ReLU, Sequential
from opfuser.cli import main
from opfuser.fused import FUSIONS
from opfuser.registry import registry
from opfuser.registry.entry_points import PluginInfo
from tests.planning.toys import REGISTER, rule

pytest.importorskip("yaml", reason="configurations are YAML")


Run = Callable[..., tuple[int, list[str]]]


def build() -> Sequential:
    return Sequential(Linear(8, 8), ReLU(), Sequential(Linear(8, 8)))


BUILD = f"{__name__}:build"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The exit status of a command, and the lines that it printed."""

    def run(*args: str) -> tuple[int, list[str]]:
        status = main(args)
        printed = capsys.readouterr()
        assert (printed.err != "") == (status == 1)
        return status, (printed.out + printed.err).splitlines()

    return run


def write(folder: Path, text: str) -> str:
    file = folder / "fusions.yaml"
    file.write_text(f"schema: opfuser.fusions/1\n{text}", encoding="utf-8")
    return str(file)


def test_list_is_in_the_order_in_which_fusions_run(run: Run) -> None:
    off = {"overrides": {"a.*": {"norm_linear": {"enabled": False}}}}
    with opfuser.disable("pointwise_chain"), opfuser.fusion_config(off):
        status, (head, *lines) = run("fusions", "list")
    assert (status, head.split()) == (0, ["fusion", "stage", "origin", "state"])
    assert [line.split()[:2] for line in lines] == [[rule.name, rule.stage] for rule in FUSIONS]
    said = {line.split()[0]: line.split(None, 3)[3] for line in lines}
    assert said["grouped_mlp"] == "on"
    assert said["recompute_mlp"] == "off (default)"
    assert said["pointwise_chain"] == "off (opfuser.disable)"
    assert said["norm_linear"] == "on, with overrides"
    assert max(map(len, lines)) <= 80


def test_list_names_plug_ins_that_failed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = PluginInfo("entry", "pkg.mod:F", "some-package", "1.0", (), "ImportError: no such")
    fine = broken._replace(error="", fusions=("f",))
    list(registry)
    monkeypatch.setattr(registry, "plugins", (fine, broken))
    status, lines = run("fusions", "list")
    assert (status, lines[-1]) == (
        0,
        "plug-in entry of some-package (pkg.mod:F) failed to load: ImportError: no such",
    )
    document = json.loads("\n".join(run("fusions", "list", "--format", "json")[1]))
    assert document["schema"] == "opfuser.fusion_list/1"
    assert [f["name"] for f in document["fusions"]] == [i.name for i in opfuser.fusions()]
    assert document["fusions"][1] == {
        "name": "recompute_mlp",
        "stage": "joint",
        "origin": "opfuser",
        "requires": "",
        "enabled": False,
        "disabled_by": "default",
    }
    assert document["plugins"][1]["error"] == "ImportError: no such"


def test_show_says_what_a_fusion_replaces_and_which_settings_hold(run: Run, tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "joint:\n  norm_linear: {min_numel: 9}\n"
        "overrides:\n  '*.2': {norm_linear: {dtypes: [bfloat16, float16]}}",
    )
    with opfuser.fusion_config(file):
        status, lines = run("fusions", "show", "norm_linear")
    assert status == 0
    assert lines[0] == "norm_linear: joint fusion, origin opfuser"
    assert lines[2].startswith("Norm and linear operation in both passes")
    start = next(n for n, line in enumerate(lines) if line.startswith("replaces"))
    shown = [line[10:] for line in lines[start:]]
    assert shown[:9] == [
        "[AddExtraInput]",
        "[MakeExtraOutput]",
        "RMSNorm | LayerNorm | PointwiseNorm",
        "BasicLinear | BasicMergedLinear | LoRALinear",
        "[Bias | MergedBias]",
        "opfuser.fused.norm_linear",
        "nothing",
        "8 of 11 joint fusions, after pointwise_chain, before quantized_linear",
        "enabled true (default)",
    ]
    assert " ".join(shown[9:]) == (  # in one line each, or two where the path is long
        f"min_numel 9 ({file}:3) *.2: dtypes bfloat16, float16 ({file}:5)"
    )


@pytest.fixture
def function() -> Iterator[FusionHandle]:
    def merges(ops: Any, *, recipe: Any) -> Any:
        """Merges what it finds.

        Nobody knows what that is.
        """
        return ops

    with opfuser.register_backward_fusion(merges, name="merges") as handle:
        yield handle


@pytest.mark.usefixtures("function")
def test_show_of_a_function(run: Run) -> None:
    status, lines = run("fusions", "show", "merges")
    assert status == 0
    assert lines[:3] == ["merges: backward fusion, origin user", "", "Merges what it finds."]
    assert "replaces  what the function decides" in lines
    assert any(line.startswith("is in") and "merges" in line for line in lines)
    assert lines[-2] == "runs      7 of 7 backward fusions, after backward_activation_bias"


def test_show_names_what_is_required(run: Run) -> None:
    needs = opfuser.Requires(device="cuda", min_capability=90, package="triton", recipe=True)
    rule = Fusion("needy", "forward", (ReLU, ReLU), opfuser.FusedOperation, requires=needs)
    with opfuser.register_forward_fusion(rule):
        lines = run("fusions", "show", "needy")[1]
    expected = "device cuda, sm_90, package triton, a recipe of quantized compute"
    assert f"requires  {expected}" in lines


def test_unknown_name_has_a_suggestion(run: Run) -> None:
    status, (line,) = run("fusions", "show", "norm_liner")
    assert status == 1
    assert line.startswith("opfuser: No fusion has that name. Received: 'norm_liner'.")
    assert " Did you mean norm_linear" in line


def test_shown_defaults_are_a_configuration_that_changes_nothing(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "fusions.yaml"
    with opfuser.disable("norm_linear"), opfuser.fusion_config({"joint": {"grouped_mlp": {}}}):
        assert run("config", "show", "-o", str(file)) == (0, [])
    assert "  recompute_mlp: {enabled: false}" in file.read_text().splitlines()
    before = opfuser.fusions()
    with opfuser.fusion_config(file):
        after = opfuser.fusions()
        assert [i[:5] for i in after] == [i[:5] for i in before]
        assert all(not i.disabled_by or i.disabled_by.startswith(f"{file}:") for i in after)


def test_effective_values_say_what_states_them(run: Run, tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "order: listed\njoint:\n  norm_linear: {min_numel: 9}\n  grouped_mlp: {}\n"
        "  pointwise_norm: {enabled: false}\noverrides:\n  '2': {norm_linear: {min_numel: 3}}",
    )
    with opfuser.fusion_config(file), opfuser.disable("grouped_mlp"):
        names = [i.name for i in opfuser.fusions()]
        status, lines = run("config", "show", "--effective")
        text = "\n".join(lines)
        assert status == 0
        assert lines[1] == f"order: listed  # {file}"
        assert "  grouped_mlp: {enabled: false}  # opfuser.disable" in lines
        assert "  linear_cross_entropy: {enabled: true}  # default" in lines
        assert f"  pointwise_norm: {{enabled: false}}  # {file}:6" in lines
        assert f"    min_numel: 9  # {file}:4" in lines
        assert lines[-2:] == ['  "2":', f"    norm_linear: {{min_numel: 3}}  # {file}:8"]
    again = tmp_path / "again.yaml"
    again.write_text(text)
    with opfuser.fusion_config(again):
        assert [i.name for i in opfuser.fusions()] == names


def test_check_of_a_file(run: Run, tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "order: listed\njoint:\n  norm_linear: {min_numel: 9, dtypes: any}\n  pointwise_norm: {}\n"
        "overrides:\n  '2': {norm_linear: {min_numel: 3}}\n  '7.*': {norm_linear: {min_numel: 3}}",
    )
    assert run("config", "check", file) == (
        0,
        [
            f"{file}: 4 settings of 1 fusion, 2 overrides",
            "  order: joint fusions run as norm_linear, pointwise_norm",
        ],
    )
    status, lines = run("config", "check", file, BUILD, "--input", "2x8:fp32", "--device", "cpu")
    assert (status, lines[2:]) == (
        3,
        [f"  override '2': 2 operations of {BUILD}", f"  override '7.*': 0 operations of {BUILD}"],
    )
    assert registry.configs == ()
    file = write(tmp_path, "overrides:\n  '2': {norm_linear: {min_numel: 3}}")
    status, lines = run("config", "check", file, BUILD, "--input", "2x8:fp32", "--device", "cpu")
    assert (status, len(lines)) == (0, 2)


def test_a_file_may_name_fusions_that_the_model_brings(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = []

    def bringing() -> Sequential:
        added.append(REGISTER["joint"](rule("A B", "joint", name="of_the_model")))
        return Sequential(Linear(8, 8))

    monkeypatch.setattr(f"{__name__}.build", bringing)
    file = write(tmp_path, "joint:\n  of_the_model: {enabled: false}")
    try:
        status, lines = run("config", "check", file, BUILD, "--input", "2x8")
    finally:
        for handle in added:
            handle.remove()
    assert (status, lines) == (0, [f"{file}: 1 setting of 1 fusion, 0 overrides"])


@pytest.mark.parametrize(
    ("text", "args", "expected"),
    [
        ("joint:\n  norm_liner: {}", (), "(FILE:3, joint). Received: 'norm_liner'. Did you"),
        ("joint: {", (), "A configuration file is YAML (FILE:2)"),
        ("", ("--input", "2x8"), "Inputs are those of a model. Received: --input without a model."),
        ("", ("not_there:build",), "not_there"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    run: Run, tmp_path: Path, text: str, args: tuple[str, ...], expected: str
) -> None:
    file = write(tmp_path, text)
    status, lines = run("config", "check", file, *args)
    assert status == 1
    assert expected.replace("FILE", file) in lines[-1]
