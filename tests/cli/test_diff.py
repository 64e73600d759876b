"""``opfuser diff``: a model without and with a fusion, and two explanations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import opfuser

MODELS = "tests.cli.models"
Command = Callable[..., Any]

# 6 rows of 16 numbers in fp32 are 384 bytes: the output of the norm, which is not saved but
# computed and written a second time.
NORM_LINEAR = """\
                                     without      with
matches
  norm_linear (joint)                      0         1               +1
  backward_add_rms_norm (backward)         1         0      -1 (-100 %)
whole model
  steps in forward                         4         2       -2 (-50 %)
  steps in backward                        3         2       -1 (-33 %)
  launches                                13        13
  bytes read                        31.4 KiB  31.4 KiB
  bytes written                     17.8 KiB  18.2 KiB  +384 B (+2.1 %)
  bytes read and written            49.2 KiB  49.6 KiB  +384 B (+0.8 %)
  bytes saved for backward           2.3 KiB   1.9 KiB   -384 B (-16 %)

forward: 0 to 2
  - MakeExtraOutput
  - RMSNorm
  - BasicLinear
  + MakeExtraOutput + RMSNorm + BasicLinear -> norm_linear

backward: 0 to 2
  - MakeExtraOutput + RMSNorm -> backward_add_rms_norm
  - BasicLinear
  + MakeExtraOutput + RMSNorm + BasicLinear -> norm_linear
"""


def test_text_of_one_fusion(opfuser_command: Command) -> None:
    done = opfuser_command("diff", f"{MODELS}:mlp", "--fusion", "norm_linear")
    assert (done.status, done.err) == (0, "")
    assert done.out == NORM_LINEAR
    assert all(info.enabled for info in opfuser.fusions() if info.name == "norm_linear")


def changed_lines(text: str) -> list[str]:
    """Comments of programs that one side has, each with its sign."""
    found = [line for line in text.splitlines() if line[1:].lstrip().startswith("# ")]
    return [line[0] + line[1:].strip() for line in found if line[0] in "+-"]


def test_programs(opfuser_command: Command) -> None:
    argv = "diff", f"{MODELS}:mlp", "--fusion", "norm_linear", "--program"
    done = opfuser_command(*argv)
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith(NORM_LINEAR + "\n--- without\n+++ with\n@@ ")
    assert changed_lines(done.out) == [
        "-# 0 MakeExtraOutput: 0", "+# 0-2 norm_linear: 0-2",
        "-# 1 RMSNorm: 1", "-# 2 BasicLinear: 2",
        "-# 2 BasicLinear: 2", "-# 0-1 backward_add_rms_norm: 0-1", "+# 0-2 norm_linear: 0-2",
    ]  # fmt: skip
    found = json.loads(opfuser_command(*argv, "--format", "json").out)
    assert [row["paths"] for row in found["programs"]] == [[""]]
    assert done.out.endswith(found["programs"][0]["diff"] + "\n")


def test_programs_of_equal_sequences_are_compared_once(opfuser_command: Command) -> None:
    argv = "diff", f"{MODELS}:many", "--fusion", "norm_linear", "--program"
    lines = opfuser_command(*argv).out.splitlines()
    assert [line for line in lines if line.startswith(("--- ", "+++ "))] == [
        "--- without layers.[0-1, 3]", "+++ with layers.[0-1, 3]",
        "--- without layers.2", "+++ with layers.2",
    ]  # fmt: skip


def test_programs_of_two_files(opfuser_command: Command, tmp_path: Path) -> None:
    after = explained(opfuser_command, tmp_path / "after", "mlp", "--program")
    with opfuser.disable("norm_linear"):
        before = explained(opfuser_command, tmp_path / "before", "mlp", "--program")
        bare = explained(opfuser_command, tmp_path / "bare", "mlp")
    done = opfuser_command("diff", before, after, "--program")
    assert done.status == 3
    assert f"\n--- {before}\n+++ {after}\n" in done.out
    assert "\n--- " not in opfuser_command("diff", before, after).out
    done = opfuser_command("diff", before, bare, "--program")
    assert (done.status, done.out) == (1, "")
    assert done.err == (
        f"opfuser: The file has no programs. Received: {bare}. "
        "Write it with opfuser explain --program --format json -o FILE.\n"
    )


def test_programs_alone_may_differ(opfuser_command: Command, tmp_path: Path) -> None:
    """As of before and after an upgrade that writes them otherwise."""
    before = explained(opfuser_command, tmp_path / "before", "mlp", "--program")
    told = json.loads(Path(before).read_text())
    told["sequences"][""]["program"] += "\n# more"
    after = tmp_path / "after"
    after.write_text(json.dumps(told))
    assert opfuser_command("diff", before, str(after)).status == 0
    done = opfuser_command("diff", before, str(after), "--program")
    assert done.status == 3
    assert changed_lines(done.out) == ["+# more"]


def test_equal_layers_are_told_together(opfuser_command: Command) -> None:
    out = opfuser_command("diff", f"{MODELS}:layers", "--fusion", "recompute_mlp").out
    place = "layers.0-22.attention.6 to layers.0-22.mlp.4"
    assert out.count("recompute_mlp (joint)") == 1
    assert out.count("\nboth passes, 23 times: ") == 1
    assert place in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_all_fusions_together(opfuser_command: Command) -> None:
    argv = "diff", f"{MODELS}:mlp", "--fusion", "*", "--format", "json"
    found = json.loads(opfuser_command(*argv).out)
    assert found["schema"] == "opfuser.diff/1"
    assert {row["before"] for row in found["matches"]} == {0}
    assert {row["name"] for row in found["matches"]} >= {"norm_linear (joint)"}


def test_a_fusion_that_matches_nowhere_is_a_finding(opfuser_command: Command) -> None:
    done = opfuser_command("diff", f"{MODELS}:mlp", "--fusion", "pointwise_chain")
    assert done.status == 3
    assert done.out == "without and with do not differ.\n"
    assert done.err == (
        f"pointwise_chain matches nowhere: opfuser explain {MODELS}:mlp --why pointwise_chain says "
        "why.\n"
    )
    with opfuser.disable(*(info.name for info in opfuser.fusions() if info.enabled)):
        done = opfuser_command("diff", f"{MODELS}:mlp", "--fusion", "*")
    says = f"Nothing is fused: opfuser explain {MODELS}:mlp says why.\n"
    assert (done.status, done.err) == (3, says)


def test_the_command_that_says_why_is_whole(opfuser_command: Command) -> None:
    """It explains the same call, with the fusion on where it is off by default."""
    call = f"{MODELS}:norm_and_linear", "--input", "2x16:bf16", "--device", "cpu", "--dtype", "bf16"
    said = opfuser_command("diff", *call, "--fusion", "recompute_mlp").err
    head, _, tail = said.partition("recompute_mlp matches nowhere: OPFUSER_ENABLE=recompute_mlp ")
    assert (head, tail.endswith(" says why.\n")) == ("", True)
    words = tail.removesuffix(" says why.\n").split()
    assert words == ["opfuser", "explain", *call, "--why", "recompute_mlp"]
    with opfuser.enable("recompute_mlp"):
        done = opfuser_command(*words[1:])
    assert done.status == 0
    assert done.out.startswith("recompute_mlp (joint): unmatched")


def explained(command: Command, file: Path, model: str, *argv: str) -> str:
    explain = "explain", f"{MODELS}:{model}", "--format", "json", "-o", str(file)
    assert command(*explain, *argv).status == 0
    return str(file)


def test_two_files(opfuser_command: Command, tmp_path: Path) -> None:
    after = explained(opfuser_command, tmp_path / "after", "mlp")
    with opfuser.disable("norm_linear"):
        before = explained(opfuser_command, tmp_path / "before", "mlp")
    same = opfuser_command("diff", before, before)
    assert (same.status, same.out) == (0, f"{before} and {before} do not differ.\n")
    other = opfuser_command("diff", before, after)
    assert other.status == 3
    assert other.out.partition("\n\n")[2] == NORM_LINEAR.partition("\n\n")[2]


def test_two_files_of_other_models(opfuser_command: Command, tmp_path: Path) -> None:
    """Other sequences, and a sequence of other operations."""
    whole = explained(opfuser_command, tmp_path / "whole", "mlp")
    parts = explained(opfuser_command, tmp_path / "parts", "wrapped")
    lines = opfuser_command("diff", whole, parts).out.splitlines()
    assert f"Only {whole} has the model itself" in lines
    assert f"Only {parts} has blocks.0" in lines
    longer = explained(opfuser_command, tmp_path / "longer", "longer")
    lines = opfuser_command("diff", whole, longer).out.splitlines()
    assert lines[lines.index("both passes: other operations") + 1] == "  + SiLU"


def test_where_bytes_are_not_known(opfuser_command: Command, tmp_path: Path) -> None:
    file = explained(opfuser_command, tmp_path / "a", "reads_values", "--device", "cpu")
    with opfuser.disable("norm_linear"):
        other = explained(opfuser_command, tmp_path / "b", "reads_values", "--device", "cpu")
    out = opfuser_command("diff", file, other).out
    (row,) = [line for line in out.splitlines() if line.startswith("  launches")]
    assert row.split(maxsplit=1)[1].split() == ["not", "known"] * 2
    assert "No launches and bytes: The model has to run" in out
