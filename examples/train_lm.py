"""Trains a byte-level language model on the source files of Python's standard library.

The whole network, loss included, is one ``opfuser.Sequential`` from ``opfuser.models``. A run
writes ``runs/<name>/``: config.json, metrics.jsonl, checkpoint.safetensors, plan.txt, loss.png,
results.json. Ctrl-C writes a checkpoint; ``--resume`` continues from it with the losses of an
uninterrupted run. ``--tensorboard`` writes curves of every step for TensorBoard.
``pip install ".[examples]"`` installs what it needs; ``make train`` does that by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import lm_fusion
import torch
from lm_board import Board, flops_per_token, peak_flops
from lm_data import load_corpus
from lm_run import RunFolder, report_twin
from lm_trainer import TrainConfig, Trainer
from lm_twin import Twin

import opfuser
from opfuser.models import decoder_lm

INTERRUPTED = 130


class Options(NamedTuple):
    """What a command line asks for.

    Attributes:
        config: of the run.
        folder: of the run.
        resume: whether to continue the run in the folder.
        tensorboard: where curves are written for TensorBoard, in a folder of the run's name.
        peak: FLOP/s of the device, if they were stated.
    """

    config: TrainConfig
    folder: RunFolder
    resume: bool
    tensorboard: Path | None
    peak: float | None


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return value


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds those of the run, and every field of the configuration."""
    parser.add_argument("--name", default="lm", help="the run is kept in runs/NAME (default lm)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept")
    parser.add_argument("--resume", action="store_true", help="continue the run of that name")
    for f in fields(TrainConfig):
        name, text = "--" + f.name.replace("_", "-"), f.metadata["help"]
        if isinstance(f.default, bool):
            parser.add_argument(name, action="store_true", default=argparse.SUPPRESS, help=text)
        else:
            parser.add_argument(
                name,
                type=type(f.default),
                choices=f.metadata["choices"],
                default=argparse.SUPPRESS,
                help=f"{text} (default {f.default})",
            )


def configured(
    parser: argparse.ArgumentParser, given: dict[str, Any]
) -> tuple[TrainConfig, Path, bool]:
    """The configuration, the folder, and whether to continue the run in it."""
    path, resume = given.pop("runs") / given.pop("name"), given.pop("resume")
    if not resume:
        return TrainConfig(**TrainConfig(**given).resolved()), path, False
    if not (path / "checkpoint.safetensors").exists():
        parser.error(f"--resume: there is no checkpoint in {path}")
    config = TrainConfig(**json.loads((path / "config.json").read_text()))
    stored = asdict(config)
    other = [f"--{key.replace('_', '-')}" for key in given if given[key] != stored[key]]
    if other:
        parser.error(f"--resume: {', '.join(other)} differs from what the run was started with")
    return config, path, True


def parse_args(argv: list[str] | None) -> Options:
    """What a command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tensorboard", type=Path, metavar="DIR", help="write curves for TensorBoard to DIR/NAME"
    )
    parser.add_argument(
        "--peak-tflops",
        type=positive,
        metavar="N",
        help="peak of the device, for MFU (built in: bfloat16 on some NVIDIA GPUs)",
    )
    add_options(parser)
    given = vars(parser.parse_args(argv))
    tensorboard, tflops = given.pop("tensorboard"), given.pop("peak_tflops")
    config, path, resume = configured(parser, given)
    peak = None if tflops is None else tflops * 1e12
    return Options(config, RunFolder(path), resume, tensorboard, peak)


def make_exact(device: str) -> None:
    """Makes results of a GPU bitwise reproducible, as those of a CPU are; resuming needs it."""
    if not device.startswith("cuda"):
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def build_model(config: TrainConfig) -> opfuser.Sequential:
    """The network with the initial weights of the seed."""
    torch.manual_seed(config.seed)
    model = decoder_lm(config.model)
    model.replay = "auto"  # a GPU would wait for the host
    return model


def training_plan(trainer: Trainer, model: opfuser.Sequential) -> opfuser.Plan:
    with trainer.autocast():
        return model.plan(*trainer.batch(trainer.step))


def describe_plan(trainer: Trainer, model: opfuser.Sequential) -> str:
    """Writes the plan of a training step to plan.txt; returns a summary of one line."""
    plan = training_plan(trainer, model)
    trainer.folder.write("plan.txt", f"{plan}\n")
    parts = []
    for stage in ("forward", "backward"):
        counts = ", ".join(f"{name} x{n}" for name, n in sorted(plan.fused(stage).items()))
        parts.append(f"{stage}: {counts or 'nothing fused'}")
    if trainer.config.recipe != "none":
        parts.append(f"{len(plan.quantized)} linear operations in FP8, {trainer.config.recipe}")
    return f"{len(plan.basic_ops)} operations; {'; '.join(parts)}"


def compare_fusion(trainer: Trainer, model: opfuser.Sequential) -> str:
    """Number of matches of the user's fusion, and its effect on loss, gradients and memory."""
    matches = len(training_plan(trainer, model).record(lm_fusion.NAME).matches)
    on = trainer.probe()
    with opfuser.disable(lm_fusion.NAME):
        off = trainer.probe()
    worst = max(
        ((a - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in zip(on.grads, off.grads)
    )
    return (
        f"--register: {lm_fusion.NAME} matched {matches} times; step {trainer.step + 1} with and "
        f"without it: loss {on.loss:.6f} and {off.loss:.6f}, gradients within {worst:.1e}, "
        f"saved {on.saved / 2**20:.1f} and {off.saved / 2**20:.1f} MiB"
    )


@torch.no_grad()
def generate(model: opfuser.Sequential, trainer: Trainer, prompt: str) -> str:
    """``prompt`` continued byte by byte at temperature 0.8, from at most ``sequence`` bytes."""
    config = trainer.config
    logits_of = model[:-1]
    random = torch.Generator().manual_seed(config.seed)
    text = list(prompt.encode())
    for _ in range(config.sample):
        window = torch.tensor([text[-config.sequence :]], device=config.device)
        with trainer.autocast():
            logits = logits_of(window)[0, -1]
        odds = (logits.float().cpu() / 0.8).softmax(-1)
        text.append(int(torch.multinomial(odds, 1, generator=random)))
    return bytes(text).decode(errors="replace")


def results_line(label: str, trainer: Trainer) -> str:
    r = trainer.results()
    trainer.folder.write("results.json", json.dumps(r, indent=1) + "\n")
    return (
        f"{label}: {r['parameters']:,} parameters, {r['steps']} steps, "
        f"{r['tokens_per_second']:,.0f} tokens/s, loss {r['train_loss']:.3f} train "
        f"{r['validation_loss']:.3f} validation, "
        f"{r['saved_bytes'] / 2**20:.1f} MiB saved activations, {r['seconds']:.0f} s"
    )


def stopped(trainer: Trainer) -> int:
    print(f"stopped after step {trainer.step}; --resume continues from there")
    return INTERRUPTED


@contextmanager
def on_board(trainer: Trainer, options: Options, label: str) -> Iterator[None]:
    """Within it, steps of a trainer are written for TensorBoard, if that was asked for."""
    if options.tensorboard is None:
        yield
        return
    config = options.config
    peak = options.peak or peak_flops(config)
    flops = flops_per_token(trainer.model, config)
    folder = options.tensorboard / options.folder.path.name / label
    with Board(folder, trainer.step, flops, peak) as board:
        trainer.listeners.append(board.add)
        try:
            yield
        finally:
            trainer.listeners.remove(board.add)


def train_twin(trainer: Trainer, options: Options) -> Trainer:
    """The same run in plain torch.nn, in the folder ``twin`` of the run."""
    config = trainer.config
    model = Twin(config.model)
    # The parameters alone: with a recipe, the state dict has scales of FP8 too.
    parameters = build_model(config).named_parameters(remove_duplicate=False)
    model.load_state_dict(dict(parameters))
    twin = Trainer(model, config, RunFolder(trainer.folder.path / "twin"), trainer.corpus)
    if options.resume and twin.folder.checkpoint.exists():
        twin.load()
    else:
        twin.folder.start_over()
    with on_board(twin, options, "torch.nn"):
        twin.train("torch.nn")
    return twin


def run(trainer: Trainer, model: opfuser.Sequential, options: Options) -> int:
    """Trains, compares and reports; returns the exit status."""
    config, folder = trainer.config, trainer.folder
    print(describe_plan(trainer, model))
    if config.register:
        print(compare_fusion(trainer, model))
    with on_board(trainer, options, "opfuser"):
        finished = trainer.train("opfuser")
    if not finished:
        return stopped(trainer)
    curves = {"opfuser": folder.curve("loss"), "validation": folder.curve("validation_loss")}
    status = 0
    if config.twin:
        twin = train_twin(trainer, options)
        if twin.step < config.steps:
            return stopped(twin)
        exact = config.dtype != "bfloat16" and config.recipe == "none"
        if not report_twin(folder, twin.folder, exact):
            status = 1
        curves["torch.nn"] = twin.folder.curve("loss")
    folder.plot(curves)
    if config.sample:
        print(f"--- sample\n{generate(model, trainer, 'def ')}\n---")
    if config.twin:
        print(results_line("torch.nn", twin))
    print(results_line("results", trainer))
    return status


def main(argv: list[str] | None = None) -> int:
    options = parse_args(argv)
    config, folder, resume = options.config, options.folder, options.resume
    make_exact(config.device)
    if not resume:
        folder.start_over()
        folder.write("config.json", json.dumps(asdict(config), indent=1) + "\n")
    corpus = load_corpus()
    print(
        f"{folder.path}: {config.device}, {config.dtype}, "
        f"{len(corpus.train):,} bytes to train on, {len(corpus.validation):,} held out"
    )
    with lm_fusion.register() if config.register else nullcontext():
        model = build_model(config)
        trainer = Trainer(model, config, folder, corpus)
        if resume:
            trainer.load()
            print(f"continues after step {trainer.step}")
        return run(trainer, model, options)


if __name__ == "__main__":
    sys.exit(main())
