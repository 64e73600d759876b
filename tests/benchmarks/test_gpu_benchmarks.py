"""The benchmarks for a GPU, rehearsed: their logic, not their figures."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from benchmarks import charts, timing
from benchmarks.gpu import first_steps, fp8_training, merge, replay, replay_modes, run, tables
from benchmarks.gpu.compiled import COMPILED
from benchmarks.gpu.contest import Rotation, contest, distance, solve
from benchmarks.gpu.problem import Case, Inputs, Options, Problem, Within
from benchmarks.gpu.small import with_share_of_time
from benchmarks.gpu.small_problems import ENTRIES, FIRST, GRAPHED
from benchmarks.gpu.torch_models import share
from examples.lm_recipes import RECIPES
from opfuser.report.bench import saved_bytes
from tests.replay.recorded import replayed_on_a_cpu

# Whichever test is the first of a process gets the warning.
pytestmark = pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")

FIRST_STEPS = first_steps.FIRST_STEPS
CPU = Options(torch.device("cpu"), torch.float32, seconds=0.0)
REHEARSAL = ["--device", "cpu", "--seconds", "0", "--no-compile"]


def documents(folder: Path) -> dict[str, Any]:
    return {part: json.loads((folder / f"{part}.json").read_text()) for part in run.PARTS}


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "WARM_UP", 1)
        patch.setattr(timing, "FEWEST_ROUNDS", 2)
        run.main([*REHEARSAL, "--out", str(folder)])
    return folder


def test_every_case_is_solved_by_us_and_by_torch(rehearsed: Path) -> None:
    for part, document in documents(rehearsed).items():
        rows = document["rows"]
        assert not [row for row in rows if not row.get("failure", "not run").startswith("not run")]
        assert document["copy_gb_per_s"] > 0
        assert document["machine"]["torch"] == torch.__version__
        for case in {row["case"] for row in rows}:
            own = [row for row in rows if row["case"] == case]
            who = {r["contestant"] for r in own if r.get("median_us", 0) > 0 or FIRST_STEPS in r}
            assert {"opfuser", "torch"} <= who, (part, case)


def test_rows_say_who_is_left_out_and_why(rehearsed: Path) -> None:
    texts = {row.get("failure") for row in documents(rehearsed)["host"]["rows"]}
    assert texts == {None, "not run: launches need a CUDA device"}
    rows = documents(rehearsed)["small"]["rows"]
    left_out = {row["contestant"]: row["failure"] for row in rows if "failure" in row}
    assert left_out.keys() == {GRAPHED, replay.REPLAYED}
    assert left_out[GRAPHED] == "not run: CUDA graphs need a CUDA device"
    assert left_out[replay.REPLAYED] == f"not run: {replay.missing(CPU.device)}"


def test_ten_first_steps(rehearsed: Path) -> None:
    rows = documents(rehearsed)["small"]["rows"]
    own = {row["contestant"]: row[FIRST_STEPS] for row in rows if FIRST_STEPS in row}
    assert own.keys() == {"opfuser", "torch"}
    assert all(len(times) == 10 and min(times) > 0 for times in own.values())


def test_tables(rehearsed: Path) -> None:
    lines = list(tables.tables(rehearsed))
    titles = {part: tables.TITLES[part] for part in run.PARTS}
    assert [line[3:].split("\n")[0] for line in lines if line.startswith("## ")] == [
        *titles.values()
    ]
    assert [line for line in lines if "first ten steps" in line and line.count(", ") >= 18]


def test_shares_follow_from_bytes_and_times(rehearsed: Path) -> None:
    document = documents(rehearsed)["kernels"]
    rows = [row for row in document["rows"] if (row["case"], row["pass"]) == ("SwiGLU", "backward")]
    assert rows
    for row in rows:
        nbytes = 5 * row["size"]["rows"] * row["size"]["cols"] * 2
        rate = nbytes / row["median_us"] * 1e-3
        assert row["gb_per_s"] == pytest.approx(rate)
        assert row["share_of_copy"] == pytest.approx(rate / document["copy_gb_per_s"])


def test_charts(rehearsed: Path) -> None:
    made = charts.make_charts(rehearsed)
    names = "kernels blocks memory model host quantized quantized_memory experts".split()
    assert [path.stem for path in made] == names
    assert all(path.read_bytes()[1:4] == b"PNG" for path in made)


def test_chart_of_recipes() -> None:
    """One size of each case, and of the contestants those that it is about."""
    file = Path(charts.__file__).parent / "results" / "h200" / "quantized.json"
    groups = charts.bars(json.loads(file.read_text())["rows"], charts.QUANTIZED)
    cases = [group.partition("\n")[0] for group in groups]
    assert len(set(cases)) == len(cases)
    assert cases[:3] == ["SwiGLU block", "GPT block", "decoder layer"]
    for group in groups.values():
        assert group["torch"] == 1.0
        assert set(group) < set(charts.QUANTIZED.contestants)
    assert {"te.ops, current", "opfuser, block"} < set(next(iter(groups.values())))


def trained(folder: Path, *args: str) -> list[dict[str, Any]]:
    fp8_training.main(["--device", "cpu", "--out", str(folder), *args])
    document = json.loads((folder / "fp8_training.json").read_text())
    assert document["machine"]["torch"] == torch.__version__
    assert document["config"]["dim"] == fp8_training.TINY.dim
    rows: list[dict[str, Any]] = document["rows"]
    return rows


def test_training_in_fp8_is_beside_bf16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_training, "CHUNK", 8)  # not a multiple of the steps of one figure
    rows = trained(tmp_path, "--steps", "25")
    assert [row["contestant"] for row in rows] == ["bf16", "bf16, nudged", *RECIPES]
    assert not [row for row in rows if "failure" in row]
    reference = rows[0]
    for row in rows:
        assert row["steps"] == 25
        assert len(row["losses"]) == 3
        assert row["quantized_linears"] == (4 if row["contestant"] in RECIPES else 0)
        assert row["losses"][-1] < row["losses"][0]
        if row is not reference:
            assert row["losses"] != reference["losses"]
            for key in ("last_loss", "validation_loss"):
                difference = row[key] / reference[key] - 1
                assert row[f"{key}_difference"] == pytest.approx(difference)
                assert 0 < abs(difference) < 0.01
            assert row["speedup"] == pytest.approx(reference["median_ms"] / row["median_ms"])
    printed = [line for line in capsys.readouterr().out.splitlines() if " 25 steps " in line]
    assert len(printed) == len(rows)
    assert [path.name for path in charts.make_charts(tmp_path)] == ["fp8_training.png"]
    assert (tmp_path / "fp8_training.png").read_bytes()[1:4] == b"PNG"


def test_training_that_fails_or_has_no_time_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ["--steps", "12", "--recipes", "bf16", "block", "delayed"]
    loss = fp8_training.Contestant.loss

    def fails(self: Any, windows: Tensor) -> Tensor:
        if self.model.recipe is RECIPES["block"]:
            raise MemoryError("no room")
        return loss(self, windows)

    with monkeypatch.context() as patch:
        patch.setattr(fp8_training.Contestant, "loss", fails)
        rows = trained(tmp_path, *short)
    assert [row.get("failure") for row in rows] == [None, "MemoryError: no room", None]
    assert "last_loss_difference" in rows[2]
    rows = trained(tmp_path, *short, "--budget", "0")
    assert {row["failure"] for row in rows} == {"not finished: no time was left"}
    assert not charts.make_charts(tmp_path)


@pytest.mark.gpu
def test_training_in_fp8_on_a_gpu(tmp_path: Path) -> None:
    few = ["--steps", "60", "--batch", "2", "--budget", "100", "--out", str(tmp_path)]
    fp8_training.main(few)
    rows = json.loads((tmp_path / "fp8_training.json").read_text())["rows"]
    assert not [row for row in rows if "failure" in row]
    # At this rate bf16 with other weights by a thousandth differs by up to 3 %.
    assert max(abs(row["last_loss_difference"]) for row in rows[1:]) < 0.05


def test_without_a_gpu_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run.main(["--out", str(tmp_path / "none")])
    assert "were not run: there is no CUDA device" in capsys.readouterr().out
    fp8_training.main(["--out", str(tmp_path / "none")])
    assert "was not run: there is no CUDA device" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    chosen = ["--quick", "--no-compile", "--seconds", "0", "--only", "kernels", "host"]
    run.main([*chosen, "--out", str(tmp_path)])
    for part in ("kernels", "host"):
        rows = json.loads((tmp_path / f"{part}.json").read_text())["rows"]
        own = [row for row in rows if row["contestant"] in ("opfuser", "torch", "")]
        assert not [row for row in own if "failure" in row]


@pytest.mark.gpu
@pytest.mark.slow
def test_a_small_model_on_a_gpu(tmp_path: Path) -> None:
    chosen = ["--no-compile", "--seconds", "0", "--only", "small", "--case", "GPT 6 x 384"]
    run.main([*chosen, "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "small.json").read_text())["rows"]
    own = [row for row in rows if row["contestant"] in ("opfuser", "torch")]
    assert not [row for row in own if "failure" in row]
    assert any("reserved_bytes" in row for row in own)
    assert sum(FIRST_STEPS in row for row in own) == 2


def double(functions: dict[str, Any], **options: Any) -> Problem:
    """Contestants for ``2 w x``."""
    w = nn.Parameter(torch.randn(4))
    functions = {name: (lambda x, f=f: f(x, w)) for name, f in functions.items()}
    functions["torch"] = lambda x: 2 * w * x
    draw = lambda: Inputs((torch.randn(3, 4),), (torch.randn(3, 4),))  # noqa: E731
    return Problem(draw, functions, {"step": 3 * 4 * 4}, (w,), **options)


def failing(x: Tensor, w: Tensor) -> Tensor:
    raise RuntimeError("out of something\nand more")


def test_wrong_and_failing_contestants_are_reported_and_left_out() -> None:
    problem = double(
        {
            "right": lambda x, w: (x + x) * w,
            "wrong value": lambda x, w: 2.1 * w * x,
            "wrong gradient": lambda x, w: w * x + (w * x).detach(),
            "no gradient": lambda x, w: 2 * w.detach() * x,
            "wrong shape": lambda x, w: (2 * w * x).t(),
            "nan": lambda x, w: 2 * w * x * math.nan,
            "failing": failing,
        }
    )
    rows = list(contest(problem, CPU, ()))
    failures = {row["contestant"]: row["failure"] for row in rows if "failure" in row}
    assert set(failures) == set(problem.functions) - {"right", "torch"}
    assert "off by 0.05" in failures["wrong value"]
    assert "off by 0.5" in failures["wrong gradient"]
    assert "a gradient is missing" in failures["no gradient"]
    assert "off by nan" in failures["nan"]
    assert failures["failing"] == "RuntimeError: out of something"
    timed = {row["contestant"] for row in rows if "median_us" in row}
    assert timed == {"right", "torch", "copy of as many bytes"}


def test_a_context_is_around_both_passes() -> None:
    inside: list[bool] = [False]
    seen: list[str] = []

    @contextmanager
    def context() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen.append(f"forward {inside[0]}")
            return 2 * x

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            seen.append(f"backward {inside[0]}")
            return 2 * dy

    problem = double({"two": lambda x, w: Twice.apply(w * x)})
    function = Within(problem.functions["two"], context, lambda: {"captured_bytes": 5})
    problem.functions["two"] = function  # type: ignore[index]
    for passed in ("step", "backward"):
        problem.traffic[passed] = None  # type: ignore[index]
    rows = list(contest(problem, CPU, ()))
    assert set(seen) == {"forward True", "backward True"}
    own = [row for row in rows if row["contestant"] == "two"]
    assert [row["captured_bytes"] for row in own] == [5, 5]


def test_contestants_that_are_left_out_are_rows() -> None:
    rows = list(contest(double({}, left_out={"other": "it is not there"}), CPU, ()))
    assert [row["failure"] for row in rows if row["contestant"] == "other"] == [
        "not run: it is not there"
    ]


def test_nothing_is_compiled_when_no_time_is_left() -> None:
    late = Options(CPU.device, CPU.dtype, seconds=0.0, deadline=0.0)
    problem = double({"opfuser": lambda x, w: 2 * w * x})
    rows = list(contest(problem, late, tuple(COMPILED)))
    failures = {row["contestant"]: row["failure"] for row in rows if "failure" in row}
    assert failures == dict.fromkeys(COMPILED.values(), "not run: no time was left")


class Slow(torch.autograd.Function):
    """Twice the argument; its backward takes a minute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        time.sleep(60)
        return 2 * dy


def slow(x: Tensor, w: Tensor) -> Tensor:
    """As a library that takes what fails for a variant that does not compile."""
    with suppress(Exception):
        time.sleep(60)
    return 2 * w * x


def test_one_that_takes_too_long_costs_its_own_rows_alone() -> None:
    def slow_later(x: Tensor, w: Tensor) -> Tensor:
        time.sleep(0.3)
        return 2 * w * x

    functions = {
        "slow": slow,
        "slow in backward": lambda x, w: Slow.apply(w * x),
        "slow in each call": slow_later,
        "quick": lambda x, w: 2 * w * x,
    }
    limited = dataclasses.replace(CPU, limit=1.5)
    handler, began = signal.getsignal(signal.SIGALRM), time.monotonic()
    rows = list(contest(double(functions), limited, ()))
    assert time.monotonic() - began < 30
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    failed = {row["contestant"]: row["failure"] for row in rows if "failure" in row}
    assert failed == dict.fromkeys(list(functions)[:3], "took longer than 1.5 s")
    timed = {row["contestant"] for row in rows if "median_us" in row}
    assert timed == {"quick", "torch", "copy of as many bytes"}


def test_an_interruption_that_is_dropped_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "AGAIN", 0.3)

    def call() -> None:
        with suppress(BaseException):  # as Python does around a finalizer
            time.sleep(60)
        time.sleep(60)

    began = time.monotonic()
    assert timing.TimeLeft(0.3).attempt(call) == (None, "took longer than 0.3 s")
    assert time.monotonic() - began < 30
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_who_took_too_long_is_not_tried_with_the_next_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = tuple({"n": n} for n in (1, 2))
    case = Case("case", lambda options, n: double({"slow": slow}), sizes, {}, ())
    monkeypatch.setattr(Options, "tiny", False)  # in a rehearsal there is one size
    limited = dataclasses.replace(CPU, limit=0.3)
    rows = [row for row in solve(case, limited, ()) if row["contestant"] == "slow"]
    assert [row["failure"] for row in rows] == [
        "took longer than 0.3 s",
        "not run: took longer than 0.3 s with another size",
    ]


def test_cases_and_sizes_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = tuple({"n": n, "m": m} for n in (1, 2) for m in (3, 4))
    case = Case("double", lambda options, n, m: double({}), sizes, {})
    monkeypatch.setattr(Options, "tiny", False)  # in a rehearsal there is one size
    for size, found in ({"n": 2}, [2, 3]), ({"n": 2, "m": 3}, [2]), ({"k": 1}, []):
        chosen = dataclasses.replace(CPU, size=size)
        assert case.chosen(chosen) == [(sizes[i], i in case.compiled) for i in found]
    for names, runs in (("dou", "other"), True), (("other",), False):
        chosen = dataclasses.replace(CPU, only=names)
        assert chosen.runs(case.name) is runs
        assert bool(list(solve(case, chosen, ()))) is runs
    args = run.parse(["--size", "n=2", "m=3", "--case", "dou", "other"])
    assert (dict(args.size), tuple(args.case)) == ({"n": 2, "m": 3}, ("dou", "other"))


def row_of(case: str, size: int, contestant: str, time: float | None) -> dict[str, Any]:
    own = {"case": case, "size": {"n": size}, "dtype": "bfloat16", "pass": "step"}
    figure = {"failure": "ValueError"} if time is None else {"median_us": time}
    return {**own, "contestant": contestant, **figure}


def test_a_run_replaces_what_it_measured(tmp_path: Path) -> None:
    gpu = {"device": "GPU", "quack": 1}
    before = {
        "part": "blocks",
        "machine": gpu,
        "rows": [
            row_of("a", 1, "opfuser", 1.0), row_of("a", 1, "other", 2.0),
            row_of("a", 2, "opfuser", 3.0), row_of("b", 1, "opfuser", 4.0),
        ],
    }  # fmt: skip
    later = {
        "part": "blocks",
        "machine": {**gpu, "quack": 2},
        "seconds": 0.5,
        "rows": [
            row_of("a", 1, "opfuser", 5.0), row_of("a", 1, "quack", None),
            row_of("a", 2, "opfuser", None), row_of("c", 1, "opfuser", 6.0),
        ],
    }  # fmt: skip
    result = merge.merged(before, later)
    assert result["machine"] == gpu
    assert result["runs"] == [{"machine": later["machine"], "seconds": 0.5}]
    assert result["rows"] == [
        *before["rows"][2:],
        *({**row, "run": 1} for row in (*later["rows"][:2], later["rows"][3])),
    ]
    again = merge.merged(result, {**later, "rows": later["rows"][3:]})
    assert [row.get("run") for row in again["rows"]] == [None, None, 1, 1, 2]
    (tmp_path / "blocks.json").write_text(json.dumps(again))
    lines = list(tables.tables(tmp_path))
    assert [line for line in lines if line.startswith("Run ")] == [
        "Run 1: device GPU, quack 2.\n",
        "Run 2: device GPU, quack 2.\n",
    ]
    assert [line.split(" | ")[0] for line in lines if " | n=" in line] == [
        "| a", "| b", "| a (run 1)", "| c (run 2)",
    ]  # fmt: skip


def test_rows_of_other_devices_and_parts_keep_files_of_their_own() -> None:
    one = {"part": "blocks", "machine": {"device": "A"}, "rows": []}
    for other, found in (
        ({**one, "machine": {"device": "B"}}, "different devices .* it has A, the run B"),
        ({**one, "part": "kernels"}, "different parts .* it has blocks, the run kernels"),
    ):
        with pytest.raises(ValueError, match=found):
            merge.merged(one, other)


def test_time_is_noticed_afterwards_where_nothing_interrupts() -> None:
    """As in another thread, where no signal arrives."""
    left, told = timing.TimeLeft(0.05), []
    thread = threading.Thread(target=lambda: told.append(left.attempt(lambda: time.sleep(0.1))))
    thread.start()
    thread.join()
    assert told == [(None, "took longer than 0.05 s")]
    assert left.attempt(lambda: 1) == (None, "took longer than 0.05 s")
    assert timing.TimeLeft().attempt(lambda: 1) == (1, None)


def test_rows_come_as_they_are_measured() -> None:
    seen: list[str] = []

    def noted(x: Tensor, w: Tensor) -> Tensor:
        seen.append("call")
        return 2 * w * x

    problem = double({"opfuser": noted})
    problem.traffic["forward"] = None  # type: ignore[index]
    rows = contest(problem, CPU, ())
    first = next(rows)
    assert (first["pass"], "median_us" in first) == ("step", True)
    calls = len(seen)
    assert {row["pass"] for row in rows} == {"step", "forward"}
    assert len(seen) > calls


def test_contestants_are_left_out_by_parts_of_their_names() -> None:
    functions = {name: (lambda x, w: 2 * w * x) for name in ("opfuser", "opfuser, block", "Liger")}
    chosen = dataclasses.replace(CPU, without=("block", "Lig", "torch"))
    rows = contest(double(functions), chosen, ())
    names = {row["contestant"] for row in rows}
    assert names == {"opfuser", "torch", "copy of as many bytes"}


def test_results_are_compared_with_higher_precision_where_a_problem_has_it() -> None:
    def exact(inputs: Inputs) -> list[Tensor]:
        (x,), (dy,) = inputs
        w = next(iter(problem.parameters)).detach()
        return [2.1 * w * x, 2.1 * w * dy, (2.1 * x * dy).sum(0)]

    off = {f"{factor}": (lambda x, w, f=factor: f * w * x) for factor in (2.1, 1.95, 1.89)}
    problem = double(off, exact=exact)
    rows = list(contest(problem, CPU, ()))
    failed = {row["contestant"] for row in rows if "failure" in row}
    assert failed == {"1.89"}  # torch is off by 0.1 of 2.1, the others by 0, 0.15 and 0.21


def test_replayed_plans_take_part_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    model = opfuser.Sequential(opfuser.SwiGLU())
    assert replay.left_out(cpu) == {replay.REPLAYED: "replaying needs a CUDA device"}
    assert not replay.replayed(model, cpu)
    assert not replay.left_out(gpu)
    replay.replayed(model, gpu)[replay.REPLAYED](torch.randn(2, 4))
    (record,) = model.last_plan.replays  # type: ignore[union-attr]
    assert record.refusal is not None
    assert replay.captured(nn.Sequential(model)) == {
        "captured_bytes": 0,
        "not_replayed": [str(record.refusal)],
    }


def test_small_models_name_modes_of_torch_compile() -> None:
    assert all(set(entry.modes) <= COMPILED.keys() for entry in ENTRIES)
    assert FIRST in [entry.case for entry in ENTRIES]


def test_time_is_shared_by_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 10.0)
    assert with_share_of_time(Options(CPU.device, deadline=50.0), 4).deadline == 20.0
    assert with_share_of_time(CPU, 4).deadline == float("inf")


def test_first_steps_in_a_process_of_their_own() -> None:
    child = first_steps.start(FIRST, "torch", CPU, 2, {"OMP_NUM_THREADS": "1"})
    output, errors = first_steps.communicate(child, 60.0)
    assert child.returncode == 0, errors
    assert len(json.loads(output.splitlines()[-1])) == 2


def test_nan_is_not_hidden_by_a_later_result() -> None:
    ones = torch.ones(2)
    assert math.isnan(distance([ones * math.nan, ones], [ones, ones]))
    assert distance([ones, 1.5 * ones], [ones, ones]) == pytest.approx(0.5)


def test_contestant_that_fails_while_timed() -> None:
    turns = iter(range(1000))

    def failing_later() -> float:
        if next(turns) > 4:
            raise RuntimeError("later")
        return 1.0

    times, failures = timing.alternate({"a": failing_later, "b": lambda: 2.0}, 0.0)
    assert failures == {"a": "RuntimeError: later"}
    assert times == {"b": [2.0] * timing.FEWEST_ROUNDS}


def test_who_has_failed_is_told_where_nothing_runs_afterwards() -> None:
    """As after an illegal memory access of a GPU."""
    broken = False

    def breaking(x: Tensor, w: Tensor) -> Tensor:
        nonlocal broken
        broken = True
        raise RuntimeError("an illegal memory access")

    problem = double({"breaking": breaking})

    def draw() -> Inputs:
        if broken:
            raise RuntimeError("the device is lost")
        return problem.draw()

    rows = list(contest(dataclasses.replace(problem, draw=draw), CPU, ()))
    assert {row["contestant"]: row["failure"] for row in rows} == {
        "breaking": "RuntimeError: an illegal memory access",
        "torch": "RuntimeError: the device is lost",
    }


def test_a_size_that_fails_and_one_without_time_are_rows() -> None:
    def make(options: Options, n: int) -> Problem:
        raise MemoryError("no room")

    case = Case("case", make, (), {"n": 1})
    (row,) = solve(case, CPU, ())
    assert (row["case"], row["size"], row["failure"]) == ("case", {"n": 1}, "MemoryError: no room")
    late = Options(torch.device("cpu"), deadline=0.0)
    (row,) = solve(case, late, ())
    assert row["failure"] == "not run: no time was left"


def test_arguments_that_are_written_over_are_fresh_each_time() -> None:
    seen: list[Tensor] = []

    def spoils(x: Tensor, w: Tensor) -> Tensor:
        y = 2 * w * x
        seen.append(x.detach().clone())
        x.detach().zero_()
        return y

    list(contest(double({"spoils": spoils}, fresh=True), CPU, ()))
    assert seen
    assert all(x.any() for x in seen)


def test_inputs_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 100)
    # x, dy and w are 112 bytes: 4 times 100 are in 4 sets.
    rotation = Rotation(double({}), CPU)
    assert len(rotation.sets) == 4
    assert [rotation.next() for _ in range(6)] == [0, 1, 2, 3, 0, 1]


def test_step_may_end_with_an_optimizer() -> None:
    ends: list[int] = []
    problem = double({}, after=lambda gradients: ends.append(len(gradients)))
    rows = list(contest(problem, CPU, ()))
    assert not [row for row in rows if "failure" in row]
    assert len(ends) >= timing.FEWEST_ROUNDS
    assert set(ends) == {1}


def test_saved_bytes_counts_storages_once_and_no_parameters() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), nn.Parameter(torch.randn(4))
    with saved_bytes([w]) as saved:
        y = (x * w) * x  # saves x twice and the product
    assert saved() == 2 * 3 * 4 * 4
    y.sum().backward()


def test_spread() -> None:
    assert timing.spread([3.0, 1.0, 2.0, 5.0, 4.0]) == timing.Spread(3.0, 2.0, 4.0, 5)
    assert timing.spread([1.0]) == timing.Spread(1.0, 1.0, 1.0, 1)


def test_share_keeps_ties_and_refuses_other_models() -> None:
    def tied(size: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False))
        model[1].weight = model[0].weight
        return model

    source, model = tied(2), tied(2)
    share(model, source)
    assert model[0].weight is model[1].weight is source[0].weight
    with pytest.raises(ValueError, match="do not have the same parameters"):
        share(model, tied(3))


def test_modes_of_replay_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "missing", lambda device: None)
    case = replay_modes.in_modes(FIRST)
    with replayed_on_a_cpu():
        rows = replay_modes.over_off(list(solve(case, CPU, ())))
    own = {row["contestant"]: row for row in rows}
    assert own.keys() == {"opfuser", "torch", replay_modes.AUTO, replay.REPLAYED, GRAPHED}
    assert "failure" in own.pop(GRAPHED), "that needs a CUDA device"
    for name, row in own.items():
        assert row["over_off"] == pytest.approx(row["median_us"] / own["opfuser"]["median_us"])
        assert ("captured_bytes" in row) == (name in (replay_modes.AUTO, replay.REPLAYED))
    assert own[replay.REPLAYED]["captured_bytes"] > 0
    # The imagined device takes longer than this host.
    (text,) = own[replay_modes.AUTO]["not_replayed"]
    assert text.startswith(("BUSY", "SLOWER", "SAVED_TENSOR_HOOKS"))
