"""The frame of the commands: help, errors in one line, exit statuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import opfuser
from opfuser.cli import COMMANDS

ROOT = Path(__file__).parents[2]
MODELS = "tests.cli.models"
NAMES = [command.__name__.rpartition(".")[2] for command in COMMANDS]
Command = Callable[..., Any]


OF_OTHERS = "config show", "config check", "fusions list", "fusions show"


@pytest.mark.parametrize("name", [*NAMES, *OF_OTHERS])
def test_help_shows_an_example(opfuser_command: Command, name: str) -> None:
    done = opfuser_command(*name.split(), "--help")
    assert done.status == 0
    examples = done.out.split("example")[-1].replace("OPFUSER_DISABLE=norm_linear ", "")
    assert f"  opfuser {name}" in examples


def test_help_lists_all_commands(opfuser_command: Command) -> None:
    out = opfuser_command("--help").out
    assert all(f"    {name} " in out for name in NAMES)
    assert "Exit status: 0 fine, 1 error, 3 findings." in out


def test_version(opfuser_command: Command) -> None:
    assert opfuser_command("--version").out == f"opfuser {opfuser.__version__}\n"


DEVICES = "cpu or cuda" if torch.cuda.is_available() else "cpu"
BENCH_ON_META = f"Received: tensors of the meta device. Use --device {DEVICES}."
NO_SEQUENTIAL = (
    "holds no opfuser.Sequential that it calls (tests.cli.models:plain). Neither "
    "opfuser.from_torch nor opfuser.hf.apply makes it call one. Write operations of its forward as "
    "an opfuser.Sequential: opfuser audit names those that would fuse."
)

# What is asked for, and what the error says.
MISTAKES: dict[str, tuple[list[str], str]] = {
    "command": (["explian"], "invalid choice: 'explian'"),
    "no command": ([], "the following arguments are required: command"),
    "argument": (["explain", f"{MODELS}:mlp", "--frobnicate"], "--frobnicate"),
    "no colon": (["explain", MODELS], "A model is named as package.module:name"),
    "module": (["explain", "no_such.module:build"], "'no_such.module' cannot be imported"),
    "attribute": (["explain", f"{MODELS}:mpl"], "Did you mean mlp?"),
    "not a model": (["explain", f"{MODELS}:number"], "Received: int"),
    "fails": (["explain", f"{MODELS}:broken"], "RuntimeError: no weights here"),
    "shape": (["explain", f"{MODELS}:mlp", "--input", "2,3"], "Received: '2,3'"),
    "no shape": (["explain", f"{MODELS}:mlp", "--input", ""], "An input is a shape and a dtype"),
    "dtype": (["explain", f"{MODELS}:mlp", "--input", "2x16:bf61"], "Did you mean bf16"),
    "no memory": (
        ["explain", f"{MODELS}:mlp", "--input", f"{10**15}x16", "--device", "cpu"],
        f"An input has to exist on cpu ({10**15}x16). Received: ",
    ),
    "no numbers of that dtype": (
        ["explain", f"{MODELS}:mlp", "--input", "2x16:float8_e4m3fn", "--device", "cpu"],
        "NotImplementedError",
    ),
    "a table too large for the dtype": (
        ["explain", f"{MODELS}:tabular", "--input", "2:int8", "--device", "cpu"], "out of bounds"
    ),
    "example without values": (["explain", f"{MODELS}:on_meta", "--device", "cpu"], "on cpu"),
    "odd dtype": (["explain", f"{MODELS}:mlp", "--dtype", "q"], "A dtype is one of fp64, fp32"),
    "near dtype": (["explain", f"{MODELS}:mlp", "--dtype", "bfloat61"], "Did you mean bfloat16 or"),
    "integers": (
        ["explain", f"{MODELS}:mlp", "--dtype", "int8"],
        "to a floating-point dtype. Received: int8. Use fp64, fp32, bf16 or fp16.",
    ),
    "examples": (["explain", f"{MODELS}:bad_examples"], "are tensors, or texts"),
    "no examples": (["explain", "torch.nn:Identity"], "says nothing about its inputs"),
    "device": (["explain", f"{MODELS}:mlp", "--device", "gpu"], "A device is one of torch's"),
    "values": (["explain", f"{MODELS}:without_values", "--device", "cpu"], "stays on the meta"),
    "no copy": (["explain", f"{MODELS}:not_copied"], "NotImplementedError: there is one alone"),
    "wrong input": (["explain", f"{MODELS}:wrapped", "--input", "2x9"], "The model has to run"),
    "too many inputs": (
        ["explain", f"{MODELS}:mlp", "--input", "2x16", "--input", "2x16"],
        "Expected 0 extra inputs but got 1",
    ),
    "all fusions": (["fusions", "show", "*"], "No fusion has that name. Received: '*'"),
    "why of all": (["explain", f"{MODELS}:mlp", "--why", "*"], "No fusion has that name"),
    "no operations": (["explain", f"{MODELS}:no_operations"], "holds no opfuser.Sequential"),
    "no sequence": (["explain", f"{MODELS}:plain"], "holds no opfuser.Sequential"),
    "sequence": (["explain", f"{MODELS}:mlp", "--sequence", "x"], 'There are ""'),
    "fusion": (["explain", f"{MODELS}:mlp", "--why", "norm_liner"], "Did you mean norm_linear"),
    "odd fusion": (["explain", f"{MODELS}:mlp", "--why", "q"], "There are "),
    "at alone": (["explain", f"{MODELS}:mlp", "--at", "1"], "--at goes with --why"),
    "at": (["explain", f"{MODELS}:mlp", "--why", "norm_linear", "--at", "99"], "operations 0 to "),
    "why of a picture": (
        ["explain", f"{MODELS}:mlp", "--why", "norm_linear", "--format", "svg"], "with text"
    ),
    "several": (["explain", f"{MODELS}:wrapped", "--format", "svg"], "first, blocks.0"),
    "output": (["explain", f"{MODELS}:mlp", "-o", "/no/such/folder/x"], "cannot be written"),
    "diff of a fusion": (["diff", f"{MODELS}:mlp", "--fusion", "norm_liner"], "Did you mean norm"),
    "diff of one": (["diff", f"{MODELS}:mlp"], "Without --fusion two files are compared"),
    "diff of two": (["diff", "a", "b", "--fusion", "x"], "one model is compared with itself"),
    "no file": (["diff", "/no/a.json", "/no/b.json"], "cannot be read"),
    "no JSON": (["diff", __file__, __file__], "has to be JSON"),
    "bench on meta": (["bench", f"{MODELS}:mlp", "--device", "meta"], BENCH_ON_META),
    "bench of torch.nn": (
        ["bench", f"{MODELS}:plain", "--input", "2x16", "--device", "cpu"],
        NO_SEQUENTIAL,
    ),
    "bench on no device": (
        ["bench", f"{MODELS}:mlp", "--device", "gpu"], "Received: 'gpu'. Use cpu or cuda."
    ),
    "diff of torch.nn": (
        ["diff", f"{MODELS}:plain", "--input", "2x16", "--fusion", "norm_linear"],
        NO_SEQUENTIAL,
    ),
    "bench of nothing": (["bench", f"{MODELS}:mlp", "--steps", "0"], "At least one sample"),
    "bench fails": (["bench", f"{MODELS}:mlp", "--input", "2x9"], "The model has to run"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_status_1(opfuser_command: Command, mistake: str) -> None:
    argv, says = MISTAKES[mistake]
    done = opfuser_command(*argv)
    assert (done.status, done.out) == (1, "")
    assert done.err.count("\n") == 1
    assert done.err.startswith("opfuser")
    assert says in done.err
    assert ".." not in done.err


@pytest.mark.parametrize("wrong", ["2x3x15", "2x3x16:int64"])
@pytest.mark.parametrize("model", ["mlp", "wrapped"])
def test_impossible_inputs_fail_in_every_command(
    opfuser_command: Command, tmp_path: Path, model: str, wrong: str
) -> None:
    settings, lock = tmp_path / "fusions.yaml", tmp_path / "fusions.lock.yaml"
    settings.write_text("schema: opfuser.fusions/1")
    for command, *more in (
        ("explain",),
        ("explain", "--why", "norm_linear"),
        ("explain", "--format", "json"),
        ("diff", "--fusion", "norm_linear"),
        ("audit",),
        ("check", "--lock", str(lock), "--update"),
        ("bench", "--device", "cpu"),
        ("config", "check", str(settings)),
    ):
        words = [command, *more] if command == "config" else [command]
        rest = [] if command == "config" else more
        done = opfuser_command(*words, f"{MODELS}:{model}", "--input", wrong, *rest)
        assert done.status == 1, command
        assert done.err.count("\n") == 1
        assert done.err.startswith(
            f"opfuser: The model has to run with inputs (2, 3, {wrong[4:6]}) "
        )
        assert "Error: " in done.err
        assert "norm_linear" not in done.out
    assert not lock.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_a_command_names_one_that_it_takes(opfuser_command: Command) -> None:
    argv = f"{MODELS}:mlp", "--device", "cuda"
    missing = "opfuser: This machine has no CUDA device. Received: 'cuda'. Use --device"
    assert opfuser_command("bench", *argv).err == f"{missing} cpu.\n"
    assert opfuser_command("explain", *argv).err == f"{missing} meta, which plans like a GPU.\n"


ONE_AFTER_THE_OTHER = """
import contextlib, io, json, sys
from opfuser.cli import main
done = []
for argv in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(argv)
    done.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(done))
"""


def test_a_configuration_that_cannot_be_used_is_said_as_it_is(tmp_path: Path) -> None:
    """By every command that needs it; it can be checked all the same, and defaults be shown."""
    file = tmp_path / "fusions.yaml"
    file.write_text("schema: opfuser.fusions/1\njoint: {norm_liner: {enabled: false}}\n")
    says = (
        "This is not the name of a fusion (fusions.yaml:2, joint). Received: 'norm_liner'. Did you "
        "mean 'norm_linear'?"
    )
    refusing = ["explain", f"{MODELS}:wrapped"], ["fusions", "list"], ["config", "check", file.name]
    commands = json.dumps([*refusing, ["config", "show"], ["doctor"]])
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_THE_OTHER, commands],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPFUSER_CONFIG": file.name},
        stdout=subprocess.PIPE,
        check=True,
    )
    *refused, shown, (status, printed, _) = json.loads(done.stdout)
    assert refused == [[1, "", f"opfuser: {says}\n"]] * len(refusing)
    assert shown[0] == 0
    problem = " ".join(printed.rpartition("\n\n")[2].split())
    assert f"! The file of OPFUSER_CONFIG cannot be used: {says}" in problem
    assert status == 3


def test_a_file_of_another_schema(opfuser_command: Command, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"schema": "opfuser.diff/1"}')
    done = opfuser_command("diff", str(file), str(file))
    assert done.status == 1
    assert "has to be of the schema opfuser.explain/1" in done.err
    assert "Received: " in done.err
    assert "opfuser.diff/1" in done.err


def test_a_format_that_needs_a_package_says_which(
    opfuser_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opfuser.report.page", None)
    done = opfuser_command("explain", f"{MODELS}:mlp", "--format", "html")
    assert done.status == 1
    assert "pip install opfuser[tools]" in done.err


def in_a_process(*argv: str, cwd: Path, reader: str = "") -> subprocess.CompletedProcess[str]:
    command = f'"{sys.executable}" -m opfuser {" ".join(argv)} {reader}; exit ${{PIPESTATUS[0]}}'
    return subprocess.run(
        ["bash", "-c", command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_model_of_the_current_folder_and_a_reader_that_leaves(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import opfuser\n"
        "def build():\n"
        "    return opfuser.Sequential(*(opfuser.Linear(4, 4) for _ in range(2000)))\n"
    )
    argv = "explain", "mine:build", "--input", "2x4", "--format", "json"
    done = in_a_process(*argv, cwd=tmp_path, reader="| head -c 20")
    assert (done.returncode, done.stdout, done.stderr) == (0, '{\n "schema": "opfuse', "")
