"""The benchmark on several GPUs, rehearsed on a CPU: its logic, not its figures."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from benchmarks import charts
from benchmarks.gpu import distributed, distributed_contest, tables
from benchmarks.gpu import ranks as ranks_module
from benchmarks.gpu.distributed_models import ON_ONE
from benchmarks.gpu.distributed_setting import COMPILED_BY_UNIT, Contest, Entry, Training
from benchmarks.gpu.ranks import FEWEST_ROUNDS, Ranks
from tests.distributed.ranks import Check, Outcomes, assert_passed, outcomes_of

pytestmark = pytest.mark.distributed

RANKS = 2
ROOT = Path(__file__).parents[2]
FOLDER = "BENCHMARK_OF_A_TEST"  # set where the results of the first rank are to be
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@check
def every_case(rank: int, ranks: int) -> None:
    args = distributed.parse(["--device", "cpu", "--seconds", "0", "--no-compile"])
    args.out = Path(os.environ[FOLDER])
    with warnings.catch_warnings(), mock.patch.object(ranks_module, "FEWEST_ROUNDS", 2):
        warnings.filterwarnings("ignore", "FP8 is emulated")
        distributed.run(args, Ranks("cpu"))


def training(rank: int, weight: nn.Parameter, factor: Callable[[int], float]) -> Training:
    """Of one weight, with another gradient on each rank; ``factor`` is told which call it is."""
    calls = itertools.count()

    def loss() -> Tensor:
        return factor(next(calls)) * (weight * (rank + 1)).square().sum()

    return Training(loss, (weight,), 4, (weight,))


def full(at: int) -> Callable[[int], float]:
    def factor(call: int) -> float:
        if call == at:
            raise MemoryError("no room\nat all")
        return 1.0

    return factor


@check
def agreement(rank: int, ranks: int) -> None:
    """A contestant that fails on one rank, at any time, fails on all; the others go on."""
    weights: list[weakref.ref[nn.Parameter]] = []

    def entry(name: str, factor: Callable[[int], float] = lambda call: 1.0) -> Entry:
        def build() -> Training:
            weight = nn.Parameter(torch.ones(1))
            weights.append(weakref.ref(weight))
            return training(rank, weight, factor)

        return Entry(name, build)

    def absent() -> Training:
        raise ImportError("of a library")

    entries = (
        entry("torch"),
        entry("opfuser"),
        entry("wrong", lambda call: 4.0),
        entry("nan later", lambda call: math.nan if call == 2 else 1.0),
        Entry("absent on one", absent) if rank == 1 else entry("absent on one"),
        entry("full on both", full(1)),
        entry("full later", full(12)),
        entry(COMPILED_BY_UNIT),
    )
    contest = Contest("weights", {"batch": 3}, ranks, 30, entries)
    deadline = time.monotonic() + distributed_contest.LEFT_TO_COMPILE / 2
    *_, found = distributed.rows_so_far(contest, Ranks("cpu"), 0.0, deadline)
    failures = {row["contestant"]: row["failure"] for row in found if "failure" in row}
    assert "losses are off by 3 and the norm of the gradients by 3;" in failures.pop("wrong")
    assert "losses are off by nan" in failures.pop("nan later")
    assert failures == {
        "absent on one": "rank 1: ImportError: of a library",
        "full on both": "rank 0: MemoryError: no room",
        "full later": "rank 0: MemoryError: no room",
        COMPILED_BY_UNIT: "not run: no time was left",
    }
    timed = {row["contestant"]: row for row in found if "failure" not in row}
    assert timed.keys() == {"torch", "opfuser"}
    own, other = timed["opfuser"], timed["torch"]
    assert own["size"] == {"gpus": 2, "batch": 3}
    # Means over ranks of w and of 4 w, before and after AdamW's steps; gradients 2 and 8, summed.
    assert own["losses"][0] == 2.5
    assert own["losses"][1] == pytest.approx(2.5 * (1 - distributed_contest.RATE) ** 2, rel=1e-4)
    assert own["gradient_norm"] == pytest.approx(10 * math.sqrt(2))
    assert own["samples"] == FEWEST_ROUNDS
    assert own["speedup"] == pytest.approx(other["median_us"] / own["median_us"])
    assert own["tokens_per_s"] == pytest.approx(30 / own["median_us"] * 1e6)
    gc.collect()
    assert [weight() for weight in weights] == [None] * (7 if rank == 0 else 6)
    assert own["host_us_per_unit"] == pytest.approx(own["host_us"] / 4)


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


def test_every_case_has_figures(outcomes: Outcomes, results: Path) -> None:
    document = json.loads((results / "distributed.json").read_text())
    assert document["machine"]["ranks"] == RANKS
    found: dict[tuple[str, int, str], set[str]] = {}
    for row in document["rows"]:
        assert row["median_us"] > 0, row
        assert row["device_us"] > 0
        size = row["size"]
        key = row["case"], size["gpus"], size.get("unit", "")
        found.setdefault(key, set()).add(row["contestant"])
    both = {"torch", "opfuser"}
    in_fp8 = {"opfuser, delayed", "opfuser, predicted"}
    assert found == {
        ("GPT, FSDP2", 2, "layer"): both,
        ("GPT, FSDP2", 2, "block"): both,
        ("Llama 1B, FSDP2", 2, "layer"): both | in_fp8,
        ("Llama layers, TP + SP", 2, ""): both,
        ("Llama 1B, FSDP2", 1, "layer"): both | in_fp8,
    }


def test_tables_and_charts(outcomes: Outcomes, results: Path, tmp_path: Path) -> None:
    document = json.loads((results / "distributed.json").read_text())
    for row in document["rows"]:
        row["peak_bytes"] = 3 << 30  # a CPU has none
    (tmp_path / "distributed.json").write_text(json.dumps(document))
    lines = list(tables.tables(tmp_path))
    assert lines[0].startswith("## Several GPUs")
    assert [line.split("|")[1:3] for line in lines[3:-1]] == [
        [f" {row['case']} ", f" {' '.join(f'{k}={v}' for k, v in row['size'].items())} "]
        for row in document["rows"]
        if row["contestant"] == "torch"
    ]
    assert all(line.count("us a unit, 3.0 GiB at the peak)") >= 2 for line in lines[3:-1])
    made = charts.make_charts(tmp_path)
    assert [path.stem for path in made] == ["distributed", "distributed_memory"]
    assert all(path.read_bytes()[1:4] == b"PNG" for path in made)


@pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")
def test_one_process_has_the_model_on_one_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    distributed.main(["--device", "cpu", "--seconds", "0", "--out", str(tmp_path)])
    document = json.loads((tmp_path / "distributed.json").read_text())
    assert {(row["case"], row["size"]["gpus"]) for row in document["rows"]} == {
        ("Llama 1B, FSDP2", 1)
    }
    assert not [row for row in document["rows"] if "failure" in row]
    assert f"\n{ON_ONE}: " in capsys.readouterr().out


def test_one_process_compares_units_of_each_size(tmp_path: Path) -> None:
    """All that ``--only gpt`` needs is one GPU; each size of units has torch to compare with."""
    how = ["--device", "cpu", "--only", "gpt", "--no-compile", "--seconds", "0"]
    subprocess.run(  # with process groups, and modules of torch, of its own
        [sys.executable, "benchmarks/gpu/distributed.py", *how, "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=300,
    )
    rows = json.loads((tmp_path / "distributed.json").read_text())["rows"]
    assert {(row["size"]["unit"], row["contestant"]) for row in rows} == set(
        itertools.product(("layer", "block"), ("torch", "opfuser"))
    )
    medians = {(row["size"]["unit"], row["contestant"]): row["median_us"] for row in rows}
    for row in rows:
        unit, contestant = row["size"]["unit"], row["contestant"]
        ratio = medians[unit, "torch"] / medians[unit, contestant]
        assert row["speedup"] == pytest.approx(ratio, rel=1e-9)


def test_without_a_gpu_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    distributed.main(["--out", str(tmp_path / "none")])
    assert "was not run: there is no CUDA device" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


@pytest.mark.gpu
@pytest.mark.slow
def test_on_two_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < RANKS:
        pytest.skip("needs two CUDA devices")
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    chosen = ["--only", "gpt", "tensor_parallel", "--no-compile", "--seconds", "0"]
    subprocess.run(
        [*launched, "benchmarks/gpu/distributed.py", *chosen, "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=300,
    )
    rows = json.loads((tmp_path / "distributed.json").read_text())["rows"]
    own = [row for row in rows if row["contestant"] in ("opfuser", "torch")]
    assert len(own) == 6
    for row in own:
        assert "failure" not in row
        assert min(row["peak_bytes_of_ranks"]) > 0
