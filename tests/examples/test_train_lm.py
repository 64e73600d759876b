"""The training example end to end, at sizes that take seconds."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import opfuser
from examples.lm_data import is_held_out, load_corpus, source_files, training_batch
from examples.lm_recipes import RECIPES
from examples.lm_run import Progress, RunFolder, SavedBytes

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = (
    "--steps=12 --batch=2 --sequence=24 --dim=32 --layers=2 --heads=2 --ffn=48 --warmup=4 "
    "--eval-every=5 --eval-batches=1 --sample=8 --device=cpu"
).split()


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """train_lm.py as a module; its helpers are found beside it, as when it is run as a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import train_lm  # noqa: PLC0415 - found only once the path is set

        patch.setattr(train_lm, "load_corpus", functools.cache(load_corpus))
        yield train_lm


@pytest.fixture(scope="module")
def whole(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""
    runs = tmp_path_factory.mktemp("runs")
    assert example.main([*SMALL, f"--runs={runs}", "--name=whole", "--twin"]) == 0
    return runs / "whole"


def losses(folder: Path, key: str = "loss") -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[key] for row in rows if key in row}


def test_script_writes_everything_and_compares_with_its_twin(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train_lm.py"), *SMALL, "--twin", "--register"]
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "lm"
    for name in "config.json metrics.jsonl checkpoint.safetensors plan.txt loss.png".split():
        assert (folder / name).stat().st_size > 0, name
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "forward:" in (folder / "plan.txt").read_text()
    assert json.loads((folder / "config.json").read_text())["steps"] == 12
    assert list(losses(folder)) == list(range(1, 13))
    assert list(losses(folder, "validation_loss")) == [5, 10, 12]

    assert "recompute_attention matched 2 times" in done.stdout
    ours, theirs = losses(folder), losses(folder / "twin")
    for step, loss in theirs.items():
        assert ours[step] == pytest.approx(loss, rel=1e-4)
    assert "largest relative difference over the first 12 steps" in done.stdout
    assert "--- sample\ndef " in done.stdout
    progress = done.stderr.splitlines()
    assert "\r" not in done.stderr
    for label in ("opfuser", "torch.nn"):
        lines = [line.partition(", loss ") for line in progress if line.startswith(label)]
        assert [line[0] for line in lines] == [f"{label}: {n} of 12 steps" for n in range(1, 13)]
        assert all(re.match(r"[\d.]+, [\d,]+ tokens/s, saved ", line[2]) for line in lines)
    last = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(
        r"results: [\d,]+ parameters, 12 steps, [\d,]+ tokens/s, loss [\d.]+ train "
        r"[\d.]+ validation, [\d.]+ MiB saved activations, \d+ s",
        last,
    )


def test_registered_fusion_changes_memory_and_nothing_else(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, more in (("with", ["--register"]), ("without", [])):
        args = [*SMALL, "--dtype=float64", f"--runs={tmp_path}", f"--name={name}", *more]
        assert example.main(args) == 0
    assert "matched 2 times" in capsys.readouterr().out
    ours, plain = (losses(tmp_path / name) for name in ("with", "without"))
    for step, loss in plain.items():
        assert ours[step] == pytest.approx(loss, rel=1e-9)
    saved = [
        json.loads((tmp_path / name / "results.json").read_text())["saved_bytes"]
        for name in ("with", "without")
    ]
    assert saved[0] < saved[1]
    assert "recompute_attention" not in {info.name for info in opfuser.fusions()}


@pytest.mark.parametrize("stop_after", [1, 5, 7])
def test_interrupted_run_continues_exactly(
    example: ModuleType,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop_after: int,
) -> None:
    update = example.Trainer.update

    def update_then_interrupt(self: Any, first: bool) -> dict[str, float]:
        metrics = update(self, first)
        if self.step == stop_after:
            os.kill(os.getpid(), signal.SIGINT)
        return metrics

    with monkeypatch.context() as patch:
        patch.setattr(example.Trainer, "update", update_then_interrupt)
        args = [*SMALL, f"--runs={tmp_path}", "--name=broken"]
        assert example.main(args) == example.INTERRUPTED
    broken = tmp_path / "broken"
    assert list(losses(broken)) == list(range(1, stop_after + 1))
    assert not (broken / "results.json").exists()
    assert example.main([f"--runs={tmp_path}", "--name=broken", "--resume"]) == 0

    for key in ("loss", "grad_norm", "validation_loss"):
        assert losses(broken, key) == losses(whole, key)
    ours, wanted = (load_file(path / "checkpoint.safetensors") for path in (broken, whole))
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)


def die_at_8(example: ModuleType, args: Sequence[str]) -> None:
    """A run that ends with an error behind its eighth step."""
    update = example.Trainer.update

    def update_or_die(self: Any, first: bool) -> dict[str, float]:
        if self.step == 8:
            raise MemoryError
        return update(self, first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example.Trainer, "update", update_or_die)
        with pytest.raises(MemoryError):
            example.main(args)


def test_twin_is_resumed_too(
    example: ModuleType, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = example.Trainer.update

    def interrupt_the_twin(self: Any, first: bool) -> dict[str, float]:
        metrics = update(self, first)
        if self.step == 4 and not isinstance(self.model, opfuser.Sequential):
            os.kill(os.getpid(), signal.SIGINT)
        return metrics

    with monkeypatch.context() as patch:
        patch.setattr(example.Trainer, "update", interrupt_the_twin)
        args = [*SMALL, f"--runs={tmp_path}", "--name=broken", "--twin"]
        assert example.main(args) == example.INTERRUPTED
    assert example.main([f"--runs={tmp_path}", "--name=broken", "--resume"]) == 0
    for part in (".", "twin"):
        ours, wanted = (path / part / "metrics.jsonl" for path in (tmp_path / "broken", whole))
        assert ours.read_text() == wanted.read_text()


def test_resume_refuses_what_it_cannot_continue(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        example.main([f"--runs={tmp_path}", "--name=none", "--resume"])
    assert "--resume: there is no checkpoint in" in capsys.readouterr().err
    assert example.main([*SMALL, f"--runs={tmp_path}"]) == 0
    with pytest.raises(SystemExit):
        example.main([f"--runs={tmp_path}", "--resume", "--lr=1", "--steps=12", "--eval-every=2"])
    assert "--resume: --lr, --eval-every differs" in capsys.readouterr().err


def curves(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows of a folder: the value of each curve by step."""
    read = EventAccumulator(str(folder)).Reload()
    return {tag: {e.step: e.value for e in read.Scalars(tag)} for tag in read.Tags()["scalars"]}


def test_tensorboard_has_every_step(example: ModuleType, tmp_path: Path) -> None:
    board, peak = tmp_path / "board", 0.002
    args = [*SMALL, "--twin", f"--runs={tmp_path}", "--name=run", f"--tensorboard={board}"]
    assert example.main([*args, f"--peak-tflops={peak}"]) == 0
    # The head and, of two layers, 4 projections of attention and 3 of the feed-forward block.
    weights = 256 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 48)
    flops = 6 * weights + 12 * 2 * 32 * 24
    for label, folder in (("opfuser", tmp_path / "run"), ("torch.nn", tmp_path / "run" / "twin")):
        found = curves(board / "run" / label)
        for tag, key in (
            ("train/loss", "loss"),
            ("train/learning_rate", "lr"),
            ("train/grad_norm", "grad_norm"),
            ("validation/loss", "validation_loss"),
        ):
            assert found.pop(tag) == pytest.approx(losses(folder, key))
        speed = found.pop("speed/tokens_per_second")
        assert list(speed) == list(range(1, 13))
        wanted = {step: value * flops / (peak * 1e12) for step, value in speed.items()}
        assert found.pop("speed/mfu") == pytest.approx(wanted)
        saved = json.loads((folder / "results.json").read_text())["saved_bytes"]
        assert found.pop("memory/saved_bytes") == dict.fromkeys(speed, saved)
        assert not found


def test_untied_lookup_of_embeddings_counts_no_flops(example: ModuleType) -> None:
    flops = []
    for more in ([], ["--untied"]):
        config = example.parse_args([*SMALL, *more]).config
        flops.append(example.flops_per_token(example.build_model(config), config))
    assert flops[0] == flops[1]


def test_killed_run_continues_from_its_last_checkpoint(
    example: ModuleType, whole: Path, tmp_path: Path
) -> None:
    """TensorBoard shows steps that were made again once."""
    args = [f"--runs={tmp_path}", "--name=killed", f"--tensorboard={tmp_path / 'board'}"]
    for seed in (1, 0):  # the second run replaces the first
        die_at_8(example, [*SMALL, f"--seed={seed}", *args])
    folder = tmp_path / "board" / "killed" / "opfuser"
    assert list(losses(tmp_path / "killed")) == list(range(1, 9))
    assert list(curves(folder)["train/loss"]) == list(range(1, 9))
    assert example.main([*args, "--resume"]) == 0
    assert losses(tmp_path / "killed") == losses(whole)
    found = EventAccumulator(str(folder)).Reload().Scalars("train/loss")
    assert [e.step for e in found] == list(range(1, 13))
    assert {e.step: e.value for e in found} == pytest.approx(losses(whole))
    assert "speed/mfu" not in curves(folder)  # of a CPU no peak is known


@pytest.mark.parametrize(
    ("name", "more", "peak"),
    [
        ("NVIDIA H200", [], 989e12),
        ("NVIDIA H200", ["--dtype=float32"], None),
        ("NVIDIA H200", ["--recipe=current"], None),
        ("NVIDIA T4", [], None),
    ],
)
def test_peak_is_known_of_some_devices_in_bf16(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, more: list[str], peak: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert example.peak_flops(example.parse_args(["--device=cuda", *more]).config) == peak


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_peak_that_is_none_is_refused(
    example: ModuleType, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    with pytest.raises(SystemExit):
        example.parse_args([f"--peak-tflops={value}"])
    assert f"--peak-tflops: expected a positive number, got {value}" in capsys.readouterr().err


# Multiples of 128, as blocks need.
FITTING = [*SMALL, "--dim=128", "--ffn=128", "--steps=8"]


@pytest.mark.filterwarnings("ignore:FP8 is emulated:UserWarning")
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_is_followed_and_resumed(
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
) -> None:
    args = [*FITTING, f"--recipe={recipe}", f"--runs={tmp_path}"]
    assert example.main([*args, "--name=whole", "--register", "--twin"]) == 0
    out = capsys.readouterr().out
    assert f"6 linear operations in FP8, {recipe}" in out  # the user's fusion has the other two
    ours, twin = (losses(tmp_path / "whole" / part) for part in (".", "twin"))
    for step, loss in twin.items():
        assert ours[step] != loss
        assert ours[step] == pytest.approx(loss, rel=0.01)

    update = example.Trainer.update

    def update_or_die(self: Any, first: bool) -> dict[str, float]:
        if self.step == 7:
            raise MemoryError
        return update(self, first)

    with monkeypatch.context() as patch:
        patch.setattr(example.Trainer, "update", update_or_die)
        with pytest.raises(MemoryError):
            example.main([*args, "--name=killed", "--register"])
    assert example.main([f"--runs={tmp_path}", "--name=killed", "--resume", "--register"]) == 0
    assert losses(tmp_path / "killed") == ours
    stored, whole = (
        load_file(tmp_path / name / "checkpoint.safetensors") for name in ("killed", "whole")
    )
    assert stored.keys() == whole.keys()
    assert all(torch.equal(stored[name], whole[name]) for name in whole)
    scales = [name for name in stored if name.endswith("quantization.scale")]
    # All eight linear operations have scales since the model was made with a recipe.
    assert len(scales) == (8 if recipe in ("delayed", "predicted") else 0)


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for layer in (nn.Linear(2, 3), nn.Linear(2, 3, bias=False)):
        optimizer = torch.optim.AdamW(layer.parameters())
        if layer.bias is not None:
            folder.save(layer, optimizer, step=1)
    with pytest.raises(ValueError, match=r"is not of this model: \['bias'\], \[\]"):
        folder.load(layer, optimizer)


def test_seed_decides_batches_and_weights(example: ModuleType, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        args = [*SMALL, "--steps=2", f"--seed={seed}", f"--runs={tmp_path}", f"--name={name}"]
        assert example.main(args) == 0
    a, b, c = (losses(tmp_path / name) for name in "abc")
    assert a == b
    assert a != c


def test_batches_are_a_function_of_seed_and_step() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    batches = {
        (seed, step): training_batch(text, 4, 16, seed, step)
        for seed in (0, 1, -3)
        for step in (0, 1, 2)
    }
    torch.manual_seed(7)
    for (seed, step), batch in batches.items():
        again = training_batch(text, 4, 16, seed, step)
        assert torch.equal(batch.tokens, again.tokens)
        assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
        assert batch.tokens.shape == batch.targets.shape == (4, 16)
    distinct = {tuple(batch.tokens.flatten().tolist()) for batch in batches.values()}
    assert len(distinct) == len(batches)


def test_files_are_either_for_training_or_for_validation() -> None:
    names = source_files()
    held_out = [name for name in names if is_held_out(name)]
    assert 0.02 < len(held_out) / len(names) < 0.15
    corpus = load_corpus()
    assert len(corpus.validation) == sum(names[n].stat().st_size + 1 for n in held_out)
    assert len(corpus.train) + len(corpus.validation) == sum(
        path.stat().st_size + 1 for path in names.values()
    )
    assert not any("site-packages" in name for name in names)


def test_saved_bytes_counts_storages_once_without_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    saved = SavedBytes(model)
    x = torch.randn(3, 4)
    with saved.count():
        y = model(x)
    # The input, and the output of ReLU, which ReLU and the second linear both keep.
    assert saved.total == (3 * 4 + 3 * 8) * 4
    y.sum().backward()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("begun", "lines"), [(0, 20), (401, 12), (999, 1), (1000, 0)])
def test_progress_is_a_line_for_every_5_percent(
    monkeypatch: pytest.MonkeyPatch, begun: int, lines: int
) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with Progress("model", begun, 1000) as progress:
        for step in range(begun, 1000):
            progress.update(f"loss {step + 1}")
    written = sys.stderr.getvalue()  # type: ignore[attr-defined]
    expected = range(1000 - 50 * (lines - 1), 1001, 50)
    assert written.splitlines() == [
        f"model: {step} of 1000 steps, loss {step}" for step in expected if lines
    ]


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    with Progress("model", 0, 1000) as progress:
        for _ in range(1000):
            progress.update("loss 1")
    written = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "100%" in written
    assert written.count("\n") == 1
    assert written.count("\r") > 1
