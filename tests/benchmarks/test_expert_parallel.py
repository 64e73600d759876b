"""The benchmark of experts on several GPUs, rehearsed on a CPU: its logic, not its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import charts
from benchmarks.gpu import expert_parallel, merge, tables
from benchmarks.gpu.expert_parallel_layers import TINY_SIZE, Layer, entries, problem
from benchmarks.gpu.problem import OURS, REFERENCE, Options
from benchmarks.gpu.ranks import Ranks
from tests.distributed.ranks import Check, Outcomes, assert_passed, outcomes_of

pytestmark = pytest.mark.distributed

RANKS = 2
ROOT = Path(__file__).parents[2]
FOLDER = "BENCHMARK_OF_A_TEST"  # set where the results of the first rank are to be
CONTESTANTS = {
    REFERENCE,
    f"{REFERENCE}, one GPU",
    f"{OURS}, shared expert in turn",
    *(
        f"{name}{how}"
        for name in (OURS, f"{OURS}, delayed")
        for how in ("", ", capacity 1.25", ", one GPU")
    ),
}
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@check
def the_whole_run(rank: int, ranks: int) -> None:
    args = expert_parallel.parse(["--device", "cpu", "--seconds", "0"])
    args.out = Path(os.environ[FOLDER])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FP8 is emulated")
        expert_parallel.run(args, Ranks("cpu"))


@check
def what_is_wrong_is_found(rank: int, ranks: int) -> None:
    """Gradients that are not those of all tokens, or an output of other experts; on one rank."""
    options, together = Options(torch.device("cpu")), Ranks("cpu")
    made = Layer(TINY_SIZE, options, together)
    made.fullest = max(together.gathered(made.fullest))
    mesh = init_device_mesh("cpu", (ranks,))
    found = entries(made.source, TINY_SIZE, options, mesh)
    for name in (REFERENCE, OURS, f"{OURS}, capacity 1.25", f"{OURS}, one GPU"):
        right = found[name]()

        def error(**change: object) -> str | None:
            entry = replace(right, **change)  # noqa: B023
            return expert_parallel.begin(made, entry, problem(entry, TINY_SIZE, options), together)[
                1
            ]

        assert error() is None, name
        wrong = error(gradients=right.gradients + (rank == 1))
        assert wrong is not None, name
        assert wrong.startswith("rank 1: AssertionError: the result is off by"), name
        scaled = right.function if rank else lambda x, f=right.function: 1.1 * f(x)
        assert str(error(function=scaled)).startswith("rank 0: AssertionError: the result is"), name
        assert "AssertionError: a result is (" in str(error(alone=not right.alone)), name
        assert "tokens are dropped" in str(error(capacity=made.fullest - 0.01)), name


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def outcomes(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(results))
        return outcomes_of(__name__, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)


def test_every_contestant_has_figures(outcomes: Outcomes, results: Path) -> None:
    document = json.loads((results / "expert_parallel.json").read_text())
    assert document["machine"]["ranks"] == RANKS
    rows = {(row["pass"], row["contestant"]): row for row in document["rows"]}
    assert len(rows) == len(document["rows"])
    for passed in ("forward", "step"):
        names = {name for key, name in rows if key == passed}
        assert names == CONTESTANTS | {"exchange alone"}
        for name in names:
            row = rows[passed, name]
            assert min(row["median_us"], row["device_us"], row["host_us"]) > 0, row
            assert row["size"] == {"gpus": RANKS, **TINY_SIZE}
            assert ("tflops" in row) == ("error" in row) == (name != "exchange alone")
            shared = "one GPU" not in name and name != "exchange alone"
            assert ("efficiency" in row) == ("speedup" in row) == shared
            if shared:
                plain = name.partition(", capacity")[0].removesuffix(", shared expert in turn")
                alone = f"{plain}, one GPU"
                ratio = rows[passed, alone]["median_us"] / row["median_us"]
                assert row["efficiency"] == pytest.approx(ratio)


def test_tables_charts_and_merged_runs(outcomes: Outcomes, results: Path, tmp_path: Path) -> None:
    document = json.loads((results / "expert_parallel.json").read_text())
    both = merge.merged(document, document)
    assert {row["run"] for row in both["rows"]} == {1}
    assert len(both["rows"]) == len(document["rows"])
    (tmp_path / "expert_parallel.json").write_text(json.dumps(both))
    title, run, head, _, *lines = list(tables.tables(tmp_path))[:-1]
    assert title.startswith("## Experts on several GPUs")
    assert all("ranks 2" in text for text in (title, run))
    assert {name.strip() for name in head.split("|")} >= CONTESTANTS
    assert len(lines) == 2
    assert all(line.count("of one GPU") == 6 for line in lines)
    made = charts.make_charts(tmp_path)
    assert [path.stem for path in made] == ["expert_parallel"]


def test_without_a_gpu_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    expert_parallel.main(["--out", str(tmp_path / "none")])
    assert "was not run: there is no CUDA device" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


@pytest.mark.gpu
@pytest.mark.slow
def test_on_two_gpus(tmp_path: Path) -> None:
    """All contestants agree with float64; with a capacity the host never waits."""
    if torch.cuda.device_count() < RANKS:
        pytest.skip("needs two CUDA devices")
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    chosen = ["--size", "count=128", "tokens=8192", "--seconds", "0"]
    subprocess.run(
        [*launched, "benchmarks/gpu/expert_parallel.py", *chosen, "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=300,
    )
    rows = json.loads((tmp_path / "expert_parallel.json").read_text())["rows"]
    assert not [row["failure"] for row in rows if "failure" in row]
    assert {row["contestant"] for row in rows} == CONTESTANTS | {"exchange alone"}
    for row in rows:
        name = row["contestant"]
        if name != "exchange alone":
            exchanged = "one GPU" not in name and "capacity" not in name
            assert row["host_waits"] == exchanged, row
