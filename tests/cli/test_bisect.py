"""``opfuser bisect``: which fusion makes a command fail, and what it says when none does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import opfuser
from opfuser.cli import main
from opfuser.errors import TargetError
from opfuser.fused import FUSIONS
from opfuser.report.bisect import Command, Found, Outcome, candidates, find, minimal

NAMES = [f"f{n}" for n in range(20)]
FAILS, PASSES = Outcome(1), Outcome(0)
ROOT = Path(__file__).parents[2]


class Runs:
    """A command that fails if one of these sets of fusions is on, and notes its runs.

    Args:
        causes: the sets.
        known: the fusions that there are.
        always: of those that only ``"*"`` switches off.
    """

    def __init__(
        self, *causes: str, known: Sequence[str] = NAMES, always: Sequence[str] = ()
    ) -> None:
        self.causes = [set(cause.split()) for cause in causes]
        self.known, self.always = list(known), list(always)
        self.count = 0

    def __call__(self, off: Sequence[str]) -> Outcome:
        self.count += 1
        on = {name for name in self.known if name not in off}
        on |= set(self.always) if "*" not in off else set()
        return FAILS if any(cause <= on for cause in self.causes) else PASSES


# The search.


@pytest.mark.parametrize("name", NAMES)
def test_one_fusion_is_found_in_few_runs(name: str) -> None:
    run = Runs(name)
    assert find(NAMES, run) == Found(True, causes=((name,),), remedy_passes=True)
    assert run.count <= 3 + 2 * 5


@pytest.mark.parametrize("cause", ["f0 f1", "f0 f19", "f4 f10", "f3 f9 f17"])
def test_fusions_that_fail_together_are_found(cause: str) -> None:
    found = find(NAMES, Runs(cause))
    assert found == Found(True, causes=(tuple(cause.split()),), remedy_passes=True)


def test_every_cause_is_found() -> None:
    found = find(NAMES, Runs("f2", "f7", "f11 f13"))
    assert {frozenset(cause) for cause in found.causes} == {
        frozenset({"f2"}),
        frozenset({"f7"}),
        frozenset({"f11", "f13"}),
    }
    assert found.remedy_passes


def test_a_set_is_smallest_and_no_set_is_tried_twice() -> None:
    tried: list[frozenset[str]] = []

    def fails_with(on: Sequence[str]) -> bool:
        tried.append(frozenset(on))
        return len({"a", "d", "e"} & set(on)) >= 2

    assert minimal("abcdef", fails_with) in (("d", "e"), ("a", "d"), ("a", "e"))
    assert len(set(tried)) == len(tried)


@pytest.mark.parametrize("other", [Outcome(2), Outcome(-11), Outcome(1, matches=False)])
def test_other_failures_do_not_count(other: Outcome) -> None:
    """f5 fails, but with f4 off there is another failure."""

    def run(off: Sequence[str]) -> Outcome:
        if "f5" in off:
            return PASSES
        return other if "f4" in off else FAILS

    found = find(NAMES, run)
    assert found.causes == (("f4", "f5"),)
    assert found.others > 0


def test_a_first_failure_that_is_not_meant() -> None:
    with pytest.raises(TargetError, match=r"--match says\. Received: fails otherwise \(exit statu"):
        find(NAMES, lambda off: Outcome(1, matches=False, last_line="ImportError"))


def test_progress() -> None:
    lines: list[str] = []
    find(["a", "b", "c", "d"], Runs("c", known="abcd"), lines.append)
    assert lines == [
        "run 1: all 4 fusions as they are: fails (exit status 1)",
        "run 2: without a, b, c, d: passes",
        "run 3: only a, b: passes",
        "run 4: only c, d: fails (exit status 1)",
        "run 5: only c: fails (exit status 1)",
        "run 6: all but c: passes",
    ]


def test_progress_names_the_fusions_of_every_run() -> None:
    lines: list[str] = []
    find(NAMES, Runs("f2 f9", known=NAMES), lines.append)
    assert lines[1] == f"run 2: without {', '.join(NAMES)}: passes"
    assert lines[2:4] == [
        "run 3: only f0 to f9: fails (exit status 1)",
        "run 4: only f0 to f4: passes",
    ]
    assert any(line.endswith(": only f2, f3, f7 to f9: fails (exit status 1)") for line in lines)
    lines.clear()
    find(["a"], lambda off: FAILS, lines.append)
    assert lines == [
        "run 1: 1 fusion as it is: fails (exit status 1)",
        "run 2: without a: fails (exit status 1)",
        "run 3: without any, those that the command registers too: fails (exit status 1)",
    ]


# Commands.


def test_candidates_are_the_fusions_that_are_on() -> None:
    everything = [rule.name for rule in FUSIONS]
    off = {"recompute_mlp"}
    assert candidates() == [name for name in everything if name not in off]
    somewhere = {"overrides": {"a.*": {"recompute_mlp": {"enabled": True}}}}
    with opfuser.disable("norm_linear"), opfuser.fusion_config(somewhere):
        assert set(everything) - set(candidates()) == {"norm_linear"}


def test_switches_of_the_environment_stay() -> None:
    before = {"OPFUSER_DISABLE": "a, b", "OPFUSER_ENABLE": "c,d", "HOME": "/"}
    command = Command(["true"], environ=before)
    assert command.environment([]) == {
        "OPFUSER_DISABLE": "a,b",
        "OPFUSER_ENABLE": "c,d",
        "HOME": "/",
    }
    some = command.environment(["d", "e"])
    assert (some["OPFUSER_DISABLE"], some["OPFUSER_ENABLE"]) == ("a,b,d,e", "c")
    none = command.environment(["*"])
    assert (none["OPFUSER_DISABLE"], none["OPFUSER_ENABLE"]) == ("a,b,*", "")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("pass", "passes"),
        ("raise SystemExit(7)", "fails (exit status 7)"),
        ("import os; os.kill(os.getpid(), 11)", "fails (SIGSEGV)"),
    ],
)
def test_how_a_run_ended(code: str, text: str) -> None:
    assert str(Command([sys.executable, "-c", code]).run([])) == text


def test_output_decides_which_failure_it_is() -> None:
    code = "import sys; print('one'); print('two  ', file=sys.stderr); print(); sys.exit(3)"
    words = [sys.executable, "-c", code]
    assert Command(words, "^one").run([]) == Outcome(3, True, "two")
    assert str(Command(words, "three").run([])) == "fails otherwise (exit status 3)"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["no-such-program", "-x"], "Received: no-such-program -x: FileNotFoundError: "),
        (["sh", "-c", "no-such-program"], "-c no-such-program: exit status 127, sh"),
    ],
)
def test_a_command_that_cannot_be_started(words: list[str], text: str) -> None:
    with pytest.raises(TargetError, match="The command cannot be started") as error:
        Command(words).run([])
    assert text in str(error.value)


Run = Callable[..., tuple[int, list[str]]]

SCRIPT = """
import os, sys
off = os.environ["OPFUSER_DISABLE"].split(",")
on = [name for name in {names!r} if name not in off and "*" not in off]
{rest}
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Bisects a script, which has ``on``: status, and the lines behind those about runs."""

    def run(rest: str, *options: str) -> tuple[int, list[str]]:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(names=candidates(), rest=rest), "utf-8")
        status = main(["bisect", *options, "--", sys.executable, "-SE", str(script)])
        printed = capsys.readouterr()
        lines = (printed.out + printed.err).splitlines()
        return status, [line for line in lines if not line.startswith("run ")]

    return run


TOGETHER = (
    "No single fusion causes the failure; pointwise_chain, backward_linear_add do together: "
    "without one of them the others pass."
)
UNKNOWN = (
    "The cause is a fusion that the command registers itself: name those that it has with --fusion."
)
OTHERWISE = (
    "opfuser: Without fusions the command has to pass, or to fail as it does with them. Received: "
    "it fails (exit status 4), last line ''. Say with --match which failures are meant, or mend "
    "that one first."
)


@pytest.mark.parametrize(
    ("rest", "options", "status", "lines"),
    [
        (
            "assert 'norm_linear' not in on",
            (),
            3,
            [
                "norm_linear causes the failure: the command fails with it alone.",
                "It passes with OPFUSER_DISABLE=norm_linear",
            ],
        ),
        (
            "assert not {'pointwise_chain', 'backward_linear_add'} <= set(on)",
            (),
            3,
            [
                TOGETHER,
                "It passes with OPFUSER_DISABLE=pointwise_chain,backward_linear_add",
            ],
        ),
        ("pass", (), 0, ["The command passes: there is no failure to look for."]),
        (
            "sys.exit(5)",
            (),
            0,
            ["The command fails in the same way without any fusion: no fusion is the cause."],
        ),
        (
            "assert '*' in off",
            (),
            3,
            [
                UNKNOWN,
            ],
        ),
        (
            "assert 'mine' in off or '*' in off",
            ("--fusion", "mine"),
            3,
            [
                "mine causes the failure: the command fails with it alone.",
                "It passes with OPFUSER_DISABLE=mine",
            ],
        ),
        (
            "assert 'norm_linear' not in on, 'too far off'",
            ("--match", "AssertionError: too far"),
            3,
            [
                "norm_linear causes the failure: the command fails with it alone.",
                "It passes with OPFUSER_DISABLE=norm_linear",
            ],
        ),
        (
            "sys.exit(4 if 'norm_linear' in off else 'norm_linear' in on)",
            (),
            1,
            [
                OTHERWISE,
            ],
        ),
    ],
)
def test_verdicts(
    run: Run, rest: str, options: tuple[str, ...], status: int, lines: list[str]
) -> None:
    assert run(rest, *options) == (status, lines)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), "The command goes after two dashes. Write opfuser bisect -- python my_test.py."),
        (("--match", "(", "--", "true"), "--match takes a regular expression. Received: '(': "),
        (("--", "no-such-program"), "The command cannot be started. Received: no-such-program: "),
    ],
)
def test_errors(args: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", *args]) == 1
    said = capsys.readouterr().err
    assert text in said
    assert len(said.splitlines()) == 1


@pytest.mark.slow
def test_a_program_that_imports_opfuser(tmp_path: Path) -> None:
    """The switches reach plans: one of the two fusions that are on is found."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, opfuser\n"
        "block = opfuser.Residual(opfuser.RMSNorm(4), opfuser.Linear(4, 4))\n"
        "plan = block.plan(torch.ones(2, 4, requires_grad=True))\n"
        "assert 'norm_linear' not in plan.fused('forward'), 'fused'\n",
        "utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", "opfuser", "bisect", "--", sys.executable, str(script)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OPFUSER_DISABLE": "*",
            "OPFUSER_ENABLE": "norm_linear,backward_linear_add",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.splitlines()[0].endswith("(exit status 1): AssertionError: fused")
    assert "norm_linear causes the failure" in done.stdout
    assert "It passes with OPFUSER_DISABLE='*,norm_linear' OPFUSER_ENABLE=backward" in done.stdout
