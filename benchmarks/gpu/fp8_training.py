"""Training a decoder of 100M parameters in bf16 and with every recipe, on real text, from one seed.

``python benchmarks/gpu/fp8_training.py --out runs/gpu``, the repository on the path. Writes
``fp8_training.json`` after every chunk of steps, so that an interrupted run keeps what it has. All
contestants have the same initial weights and see the same batches, bytes of the standard library's
sources. Parameters are in fp32 and products in bf16 (``torch.autocast``), the GEMMs of the layers
as the recipe says. One contestant is bf16 from weights that are nudged by a thousandth: how far two
runs drift apart in any case. ``--device cpu`` rehearses with tiny sizes: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import timing
from benchmarks.machine import machine
from examples.lm_data import load_corpus, training_batch, validation_batches
from examples.lm_recipes import RECIPES
from opfuser.models import DecoderConfig, decoder_lm

PART = "fp8_training"
REFERENCE, NUDGED = "bf16", "bf16, nudged"
CONTESTANTS = (REFERENCE, NUDGED, *RECIPES)
SMOOTHED = 10  # steps whose losses are one figure of the file
CHUNK = 50  # steps between two synchronizations, whose wall time is one sample
LAST = 100  # steps whose mean loss is compared
BUDGET = 400.0


@dataclass(frozen=True)
class Training:
    """What all contestants have in common; features are multiples of 128, as blocks need.

    Attributes:
        rate: peak of the learning rate, reached linearly in ``warm_up`` steps; cosine to a tenth
            follows.
        clip: largest norm of the gradient.
        evaluated: batches of held-out text at the end.
    """

    dim: int = 1024
    num_layers: int = 8
    num_heads: int = 8
    ffn_dim: int = 2816
    batch: int = 8
    sequence: int = 1024
    steps: int = 1000
    rate: float = 6e-4
    warm_up: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluated: int = 16
    seed: int = 0

    def learning_rate(self, step: int) -> float:
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / self.steps)
        return self.rate * min(1.0, (step + 1) / self.warm_up) * (0.1 + 0.9 * cosine)


TINY = Training(128, 1, 2, 128, batch=2, sequence=16, steps=60, warm_up=4, evaluated=2)


class Text:
    """All batches, on the device before anything is timed; the same for all contestants."""

    def __init__(self, training: Training, device: torch.device) -> None:
        corpus, t = load_corpus(), training
        self.train = torch.stack(
            [
                _bytes(*training_batch(corpus.train, t.batch, t.sequence, t.seed, step))
                for step in range(t.steps)
            ]
        ).to(device)
        batches = validation_batches(corpus.validation, t.batch, t.sequence, t.evaluated)
        self.validation = torch.stack([_bytes(*batch) for batch in batches]).to(device)


def _bytes(tokens: Tensor, targets: Tensor) -> Tensor:
    return torch.cat([tokens, targets[:, -1:]], 1).to(torch.uint8)


class Contestant:
    """A model and its optimizer."""

    def __init__(self, name: str, training: Training, device: torch.device, replay: str) -> None:
        self.training, self.device = training, device
        t = training
        config = DecoderConfig(
            vocab_size=256,
            dim=t.dim,
            num_layers=t.num_layers,
            num_heads=t.num_heads,
            ffn_dim=t.ffn_dim,
            device=device,
            recipe=RECIPES.get(name),
        )
        torch.manual_seed(t.seed)
        self.model = decoder_lm(config)
        self.model.replay = replay
        if name == NUDGED:
            with torch.no_grad():
                for p in self.model.parameters():
                    p.mul_(1 + 1e-3 * torch.randn_like(p))
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.model.parameters() if (p.dim() > 1) is decayed]}
            for decayed in (True, False)
        ]
        groups[1]["weight_decay"] = 0.0
        self.optimizer = torch.optim.AdamW(
            groups, betas=(0.9, 0.95), weight_decay=t.weight_decay, fused=True
        )

    def loss(self, windows: Tensor) -> Tensor:
        windows = windows.long()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss: Tensor = self.model(windows[:, :-1], windows[:, 1:])
        return loss

    def step(self, n: int, windows: Tensor) -> Tensor:
        """One step of the optimizer; nothing waits for the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.learning_rate(n)
        loss = self.loss(windows)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.training.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def facts(self) -> dict[str, Any]:
        plan = self.model.last_plan
        assert plan is not None
        facts: dict[str, Any] = {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "quantized_linears": len(plan.quantized),
            "replayed": [str(record) for record in plan.replays],
        }
        if self.device.type == "cuda":
            facts["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
        return facts


def train(
    name: str, training: Training, text: Text, replay: str, deadline: float
) -> Iterator[dict[str, Any]]:
    """The row of a contestant, after every chunk of steps and at the end."""
    device = text.train.device
    contestant = Contestant(name, training, device, replay)
    losses: list[float] = []
    times: list[float] = []
    for first in range(0, training.steps, CHUNK):
        if time.monotonic() > deadline:
            yield {**summary(training, losses, times), "failure": "not finished: no time was left"}
            return
        last = min(first + CHUNK, training.steps)
        timing.synchronize(device)
        began = time.perf_counter()
        chunk = [contestant.step(n, text.train[n]) for n in range(first, last)]
        timing.synchronize(device)
        times.append((time.perf_counter() - began) / (last - first))
        losses += torch.stack(chunk).tolist()
        yield summary(training, losses, times)
    with torch.no_grad():
        held_out = torch.stack([contestant.loss(windows) for windows in text.validation]).mean()
    final = {"validation_loss": held_out.item(), **contestant.facts()}
    yield {**summary(training, losses, times), **final}


def summary(training: Training, losses: list[float], times: list[float]) -> dict[str, Any]:
    """Losses, each a mean over a few steps, and the time of a step; the first chunk compiles."""
    if not losses:
        return {"steps": 0}
    chosen = timing.spread(times[1:] or times)
    parts = [losses[n : n + SMOOTHED] for n in range(0, len(losses), SMOOTHED)]
    last = losses[-LAST:]
    return {
        "steps": len(losses),
        "smoothed": SMOOTHED,
        "losses": [round(sum(part) / len(part), 6) for part in parts],
        "last_loss": sum(last) / len(last),
        "median_ms": chosen.median * 1e3,
        "quartiles_ms": [chosen.low * 1e3, chosen.high * 1e3],
        "tokens_per_s": training.batch * training.sequence / chosen.median,
    }


def compared(row: dict[str, Any], reference: dict[str, Any] | None) -> dict[str, Any]:
    """``row`` with what it differs from bf16, relative, if both went as far."""
    if reference is None or reference.get("steps") != row.get("steps") or not row["steps"]:
        return row
    more = {"speedup": reference["median_ms"] / row["median_ms"]}
    for key in ("last_loss", "validation_loss"):
        if key in row and key in reference:
            more[f"{key}_difference"] = row[key] / reference[key] - 1
    return {**row, **more}


def run(training: Training, args: argparse.Namespace) -> dict[str, Any]:
    """Trains all contestants one after another and keeps the file up to date."""
    device, deadline = torch.device(args.device), time.monotonic() + args.budget
    text = Text(training, device)
    document: dict[str, Any] = {
        "part": PART,
        "machine": machine(),
        "config": {**asdict(training), "replay": args.replay},
        "rows": [],
    }
    rows = document["rows"]
    for name in args.recipes:
        reference = next((row for row in rows if row["contestant"] == REFERENCE), None)
        rows.append({"contestant": name, "steps": 0})
        clear(device)
        updates = train(name, training, text, args.replay, deadline)
        while True:
            row, error = timing.attempt(partial(next, updates, None))
            if error is not None:
                row = {**rows[-1], "failure": error}
            elif row is None:
                break
            rows[-1] = compared({"contestant": name, **row}, reference)
            (args.out / f"{PART}.json").write_text(json.dumps(document, indent=1) + "\n")
        print(line(rows[-1]), flush=True)
    return document


def clear(device: torch.device) -> None:
    """Frees what the contestant before has left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def line(row: dict[str, Any]) -> str:
    start = f"{row['contestant']:<14}{row['steps']:>6} steps"
    if row["steps"]:
        low, high = row["quartiles_ms"]
        start += f"{row['median_ms']:>9.2f} ms ({low:.2f} - {high:.2f})"
        start += f"{row['tokens_per_s'] * 1e-3:>9.1f} k tokens/s  loss {row['last_loss']:.4f}"
    if "validation_loss" in row:
        start += f", held out {row['validation_loss']:.4f}"
    for key, label in (("last_loss", "loss"), ("validation_loss", "held out")):
        if f"{key}_difference" in row:
            start += f"  {label} {row[f'{key}_difference']:+.3%}"
    if "speedup" in row:
        start += f"  {row['speedup']:.2f} x {REFERENCE}"
    return start + (f"  {row['failure']}" if "failure" in row else "")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--recipes", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--steps", type=int, help=f"{Training.steps} by default")
    parser.add_argument("--batch", type=int, help=f"sequences, {Training.batch} by default")
    parser.add_argument("--sequence", type=int, help=f"bytes, {Training.sequence} by default")
    parser.add_argument("--seed", type=int, help="of weights and batches, 0 by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--replay", choices=("off", "on", "auto"), default="auto")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds, of all contestants")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("The training in FP8 was not run: there is no CUDA device.")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    names = ("steps", "batch", "sequence", "seed")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    training = replace(TINY if args.device == "cpu" else Training(), **given)
    print(", ".join(f"{key} {value}" for key, value in machine().items()), flush=True)
    print(", ".join(f"{key} {value}" for key, value in asdict(training).items()), flush=True)
    run(training, args)


if __name__ == "__main__":
    main()
