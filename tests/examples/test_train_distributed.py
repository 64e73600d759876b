"""The training example on two processes over gloo, against the same run on one."""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.distributed.ranks import Check, Outcomes, assert_passed, outcomes_of

pytestmark = pytest.mark.distributed

RANKS = 2
EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = (
    "--steps=12 --batch=4 --sequence=24 --dim=32 --layers=2 --heads=2 --ffn=48 --warmup=4 "
    "--eval-every=5 --eval-batches=1 --sample=0 --device=cpu --dtype=float64"
).split()
# What float64 keeps over 12 steps, if the parts of a batch are added up in another order.
TOLERANCE = 1e-11
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@functools.cache
def example(name: str) -> ModuleType:
    """A script as a module; its helpers are found beside it, as when it is run as a script."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        module: Any = importlib.import_module(name)
        module.load_corpus = functools.cache(module.load_corpus)
    finally:
        sys.path.remove(str(EXAMPLES))
    return module


def runs() -> Path:
    """The folder of all runs, the same one in each process."""
    return Path(os.environ["DISTRIBUTED_RUNS"])


def train(*args: str) -> int:
    module: Any = example("train_distributed")
    return module.train(*module.parse_args([f"--runs={runs()}", *args]))


def rows(folder: Path, key: str = "loss") -> dict[int, float]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [(row["step"], row[key]) for row in found if key in row]
    assert len(dict(kept)) == len(kept), "a step was told twice"
    return dict(kept)


def assert_same(ours: Path, theirs: Path, tolerance: float) -> None:
    """The same metrics at every step, and the same checkpoint."""
    for key in ("loss", "grad_norm", "validation_loss"):
        a, b = rows(ours, key), rows(theirs, key)
        assert a.keys() == b.keys()
        assert a == pytest.approx(b, rel=tolerance, abs=0)
    stored, wanted = (load_file(f / "checkpoint.safetensors") for f in (ours, theirs))
    assert stored.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(stored[name], value, rtol=0, atol=100 * tolerance, msg=name)


def once(function: Any) -> None:
    """By the first process, while the others wait."""
    if dist.get_rank() == 0:
        function()
    dist.barrier()


@check
def losses_are_those_of_one_process(rank: int, ranks: int) -> None:
    once(lambda: example("train_lm").main([f"--runs={runs()}", "--name=one", *SMALL]))
    for parallel in ("ddp", "fsdp"):
        assert train(f"--parallel={parallel}", f"--name={parallel}", *SMALL) == 0
        once(lambda name=parallel: assert_same(runs() / name, runs() / "one", TOLERANCE))


@check
def one_process_writes_what_one_has_seen(rank: int, ranks: int) -> None:
    """Besides the metrics: sums over all processes, and half of what one process saves."""
    ours, one = (json.loads((runs() / n / "results.json").read_text()) for n in ("fsdp", "one"))
    assert ours["parameters"] == one["parameters"]
    ddp = json.loads((runs() / "ddp" / "results.json").read_text())
    assert ours["saved_bytes"] == ddp["saved_bytes"]
    assert 0.4 < ours["saved_bytes"] / one["saved_bytes"] < 0.7
    assert "norm_linear" in (runs() / "fsdp" / "plan.txt").read_text()


def interrupt_after(step: int, args: list[str]) -> None:
    """Ctrl-C reaches the last process alone; both stop after the same step."""
    module: Any = example("train_distributed")
    update = module.DistributedTrainer.update

    def update_then_interrupt(self: Any, first: bool) -> dict[str, float]:
        metrics = update(self, first)
        if self.step == step and dist.get_rank() == RANKS - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.DistributedTrainer, "update", update_then_interrupt)
        assert train(*args) == 130


@check
def interrupted_run_continues_on_as_many_processes(rank: int, ranks: int) -> None:
    for first, then in (("fsdp", "fsdp"), ("fsdp", "ddp"), ("ddp", "fsdp")):
        name = f"--name={first} then {then}"
        interrupt_after(7, [f"--parallel={first}", name, *SMALL])
        assert train(f"--parallel={then}", name, "--resume") == 0
        tolerance = 0.0 if first == then else TOLERANCE
        folder = runs() / f"{first} then {then}"
        once(lambda folder=folder, t=tolerance: assert_same(folder, runs() / "fsdp", t))


@check
def interrupted_run_continues_on_one_process(rank: int, ranks: int) -> None:
    interrupt_after(3, ["--name=to one", *SMALL])
    once(lambda: example("train_lm").main([f"--runs={runs()}", "--name=to one", "--resume"]))
    once(lambda: assert_same(runs() / "to one", runs() / "one", TOLERANCE))


@check
def run_of_one_process_continues_on_several(rank: int, ranks: int) -> None:
    def on_one() -> None:
        main = example("train_lm").main
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(example("train_lm").Trainer, "stops", lambda self, _: self.step == 4)
            assert main([f"--runs={runs()}", "--name=to several", *SMALL]) == 130

    once(on_one)
    assert train("--name=to several", "--resume") == 0
    once(lambda: assert_same(runs() / "to several", runs() / "one", TOLERANCE))


@check
def scales_of_a_recipe_are_agreed_on_and_resumed(rank: int, ranks: int) -> None:
    """Bit for bit on as many processes, near on another number of them."""
    warnings.filterwarnings("ignore", "FP8 is emulated")
    fp8 = [*SMALL, "--dtype=float32", "--recipe=delayed"]
    once(lambda: example("train_lm").main([f"--runs={runs()}", "--name=one fp8", *fp8]))
    near = pytest.approx(rows(runs() / "one fp8"), rel=1e-3, abs=0)
    for parallel in ("ddp", "fsdp"):
        assert train(f"--parallel={parallel}", f"--name={parallel} fp8", *fp8) == 0
        assert rows(runs() / f"{parallel} fp8") == near
    interrupt_after(7, ["--name=fp8 again", *fp8])
    once(lambda: shutil.copytree(runs() / "fp8 again", runs() / "fp8 to one"))
    assert train("--name=fp8 again", "--resume") == 0
    once(lambda: assert_same(runs() / "fp8 again", runs() / "fsdp fp8", 0.0))
    stored = load_file(runs() / "fsdp fp8" / "checkpoint.safetensors")
    assert sum("amax_history" in name for name in stored) == 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def outcomes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTRIBUTED_RUNS", str(folder))
        return outcomes_of(__name__, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_two_processes(outcomes: Outcomes, name: str) -> None:
    assert_passed(outcomes, name)


@pytest.mark.slow
def test_scales_of_a_recipe_go_on_in_one_process(outcomes: Outcomes, folder: Path) -> None:
    """That of the tests: a rank would wait for the others whenever a region opens."""
    assert_passed(outcomes, "scales_of_a_recipe_are_agreed_on_and_resumed")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FP8 is emulated")
        example("train_lm").main([f"--runs={folder}", "--name=fp8 to one", "--resume"])
    near = pytest.approx(rows(folder / "one fp8"), rel=1e-3, abs=0)
    assert rows(folder / "fp8 to one") == near


KILLED = """
import os, signal, sys

sys.path.insert(0, sys.argv.pop(1))
import train_distributed as example

update = example.DistributedTrainer.update


def update_or_die(self, first):
    first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"  # of this agent
    if self.step == 8 and os.environ["RANK"] == "1" and first_start:
        os.kill(os.getpid(), signal.SIGKILL)
    return update(self, first)


example.DistributedTrainer.update = update_or_die
example.leave(example.main())
"""


def launch(script: Path, *args: str) -> str:
    """What a script writes that torchrun starts on two processes."""
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=1".split()
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *torchrun, str(script), *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("localhost", 0))
        port: int = own.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def agents(outcomes: Outcomes, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two of torchrun, one of which dies with its worker; the other one waits for it a while."""
    assert_passed(outcomes, "losses_are_those_of_one_process")
    script = folder / "lost.py"
    script.write_text(
        KILLED.replace("os.kill(os.getpid()", "os.kill(os.getppid(), 9), os.kill(os.getpid()")
    )
    end = f"--rdzv-backend=c10d --rdzv-endpoint=localhost:{free_port()} --rdzv-id=lost".split()
    torchrun = "-m torch.distributed.run --nnodes=1:2 --nproc-per-node=1 --max-restarts=3".split()
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    started = []
    for host in ("true", "false"):
        conf = f"--rdzv-conf=is_host={host},last_call_timeout=2"
        of_run = [str(script), str(EXAMPLES), f"--runs={folder}", "--name=lost", *SMALL]
        command = [sys.executable, *torchrun, *end, conf, *of_run]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    yield started
    for agent in started:
        agent.kill()


@pytest.mark.slow
@pytest.mark.usefixtures("agents")  # which wait meanwhile
def test_run_continues_after_a_worker_was_killed(outcomes: Outcomes, folder: Path) -> None:
    """As one that nothing happened to: from the last checkpoint, with the same batches."""
    script = folder / "killed.py"
    script.write_text(KILLED)
    told = launch(script, str(EXAMPLES), f"--runs={folder}", "--name=killed", *SMALL)
    assert told.count("continues after step 5") == 1
    assert told.count("results: 25,760 parameters, 12 steps") == 1
    assert_same(folder / "killed", folder / "fsdp", 0.0)


@pytest.mark.slow
def test_run_continues_on_fewer_processes_after_a_node_was_lost(
    agents: list[subprocess.Popen[str]], folder: Path
) -> None:
    told = "".join(agent.communicate(timeout=240)[0] for agent in agents)
    assert sorted(agent.returncode for agent in agents) == [-signal.SIGKILL, 0]
    assert told.count("2 processes") == told.count("1 processes") == 1
    assert told.count("continues after step 5") == 1
    assert_same(folder / "lost", folder / "fsdp", TOLERANCE)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_gpus(tmp_path: Path, parallel: str) -> None:
    """Over NCCL, with kernels; to what --twin of train_lm.py allows in fp32."""
    if torch.cuda.device_count() < RANKS:
        pytest.skip("needs two CUDA devices")
    args = [f"--runs={tmp_path}", *SMALL, "--device=cuda", "--dtype=float32"]
    launch(EXAMPLES / "train_distributed.py", *args, f"--parallel={parallel}", "--name=two")
    command = [sys.executable, str(EXAMPLES / "train_lm.py"), *args, "--name=one"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}, check=True)
    for key in ("loss", "validation_loss"):
        expected = rows(tmp_path / "one", key)
        assert rows(tmp_path / "two", key) == pytest.approx(expected, rel=1e-4, abs=0)


def test_options_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    for args, text in (
        (["--batch=4"], "--batch: 4 sequences are no equal parts for 3 processes"),
        (["--batch=3", "--device=cuda:0"], "--device: cuda:0 would be that of all processes"),
        (["--batch=3", "--register", "--twin"], "--register, --twin: only train_lm.py has that"),
    ):
        with pytest.raises(SystemExit):
            example("train_distributed").parse_args([f"--runs={tmp_path}", *args])
        assert text in capsys.readouterr().err
