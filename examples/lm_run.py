"""The files of a run: configuration, metrics, checkpoint, picture; and how two runs compare."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

TWIN_STEPS, TWIN_TOLERANCE = 50, 1e-4


def tied_names(model: nn.Module) -> set[str]:
    """Further names of parameters that have one already."""
    every = dict(model.named_parameters(remove_duplicate=False))
    return every.keys() - dict(model.named_parameters()).keys()


class RunFolder:
    """The folder ``runs/<name>``.

    ``checkpoint.safetensors`` holds parameters, and the scales of a recipe, as ``model.<name>``,
    the state of AdamW as ``optimizer.<name>.<key>``, torch's random states as ``rng.<device>``, and
    counters as metadata. A tied parameter is stored once.

    Where several processes train one model, all call the same methods, and one of them writes.
    """

    def __init__(self, path: Path, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self.checkpoint = path / "checkpoint.safetensors"
        self.metrics = path / "metrics.jsonl"
        path.mkdir(parents=True, exist_ok=True)

    def gathered(self, value: Tensor) -> Tensor:
        """``value`` as a checkpoint stores it."""
        return value.contiguous()

    def placed(self, value: Tensor, parameter: Tensor) -> Tensor:
        """``value`` of a checkpoint as it belongs to ``parameter``."""
        return value.to(parameter.device)

    def write(self, name: str, text: str) -> None:
        """Writes a file whole or not at all."""
        if not self.writes:
            return
        new = self.path / f"{name}.new"
        new.write_text(text)
        os.replace(new, self.path / name)

    def append(self, **values: Any) -> None:
        """Adds one line to the metrics."""
        if not self.writes:
            return
        with self.metrics.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All lines of the metrics, oldest first."""
        if not self.metrics.exists():
            return []
        return [json.loads(line) for line in self.metrics.read_text().splitlines()]

    def curve(self, key: str) -> dict[int, float]:
        """One metric by step."""
        return {row["step"]: row[key] for row in self.read_metrics() if key in row}

    def start_over(self) -> None:
        """Deletes an earlier run of this name."""
        for path in (self.checkpoint, self.metrics) if self.writes else ():
            path.unlink(missing_ok=True)

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, **counters: float) -> None:
        """Writes a checkpoint; the previous one stays until the new one is whole."""
        tensors: dict[str, Tensor] = {"rng.cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            tensors["rng.cuda"] = torch.cuda.get_rng_state()
        for name, value in model.state_dict().items():
            if name not in tied_names(model):
                tensors[f"model.{name}"] = self.gathered(value)
        for name, p in model.named_parameters():
            for key, value in optimizer.state[p].items():
                tensors[f"optimizer.{name}.{key}"] = self.gathered(value)
        if not self.writes:
            return
        new = self.checkpoint.with_suffix(".new")
        save_file(tensors, new, {key: repr(value) for key, value in counters.items()})
        os.replace(new, self.checkpoint)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Restores what :meth:`save` wrote, drops metrics of later steps, returns the counters."""
        with safe_open(self.checkpoint, framework="pt") as file:
            counters = {key: json.loads(value) for key, value in file.metadata().items()}
            names = list(file.keys())
            own = [key for key in names if key.startswith("model.")]
            stored = {key[len("model.") :]: file.get_tensor(key) for key in own}
            for name, p in model.state_dict().items():
                if name in stored:
                    stored[name] = self.placed(stored[name], p)
            missing, unknown = model.load_state_dict(stored, strict=False)
            if unknown or set(missing) - tied_names(model):
                raise ValueError(f"{self.checkpoint} is not of this model: {unknown}, {missing}")
            for name, p in model.named_parameters():
                prefix = f"optimizer.{name}."
                optimizer.state[p] = {
                    key[len(prefix) :]: self.placed(file.get_tensor(key), p)
                    for key in names
                    if key.startswith(prefix)
                }
            torch.set_rng_state(file.get_tensor("rng.cpu"))
            if "rng.cuda" in names and torch.cuda.is_available():
                torch.cuda.set_rng_state(file.get_tensor("rng.cuda"))
        rows = [row for row in self.read_metrics() if row["step"] <= counters["step"]]
        self.write(self.metrics.name, "".join(json.dumps(row) + "\n" for row in rows))
        return counters

    def plot(self, curves: dict[str, dict[int, float]]) -> None:
        """Draws ``loss.png``: one line per curve, of loss by step."""
        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot(xlabel="step", ylabel="nats per byte")
        for (label, curve), style in zip(curves.items(), ("-", "o-", ":", "s:")):
            axes.plot(list(curve), list(curve.values()), style, label=label, linewidth=1)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self.path / "loss.png", dpi=120)


def report_twin(folder: RunFolder, twin: RunFolder, exact: bool) -> bool:
    """Prints both curves; False if they differ in the first steps of a run that is ``exact``."""
    ours, theirs = folder.curve("loss"), twin.curve("loss")
    print(f"{'step':>6}{'opfuser':>12}{'twin':>12}{'difference':>12}")
    marks = {1, 2, 3, 5, 10, 20, 30, 40, 50, *range(100, len(ours), max(100, len(ours) // 10))}
    for step in sorted((marks | {len(ours)}) & ours.keys() & theirs.keys()):
        a, b = ours[step], theirs[step]
        print(f"{step:>6}{a:>12.6f}{b:>12.6f}{abs(a - b) / b:>12.1e}")
    first = [step for step in ours if step <= TWIN_STEPS]
    worst = max(abs(ours[step] - theirs[step]) / theirs[step] for step in first)
    agree = worst <= TWIN_TOLERANCE
    print(f"--twin: largest relative difference over the first {len(first)} steps {worst:.1e}")
    if exact and not agree:
        print(f"--twin: that is more than {TWIN_TOLERANCE:.0e}", file=sys.stderr)
    return agree or not exact


class Progress:
    """Progress of training on stderr: a bar on a terminal, elsewhere a line for every 5 %."""

    def __init__(self, label: str, step: int, steps: int, shown: bool = True) -> None:
        self.label, self.step, self.steps, self.shown = label, step, steps, shown
        off = None if shown else True
        self.bar = tqdm(total=steps, initial=step, desc=label, unit="step", disable=off)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def update(self, about: str) -> None:
        """Counts one more step."""
        before, self.step = self.step, self.step + 1
        if not self.bar.disable:
            self.bar.update()
            self.bar.set_postfix_str(about, refresh=False)
        elif self.shown and 20 * self.step // self.steps > 20 * before // self.steps:
            line = f"{self.label}: {self.step} of {self.steps} steps, {about}"
            print(line, file=sys.stderr, flush=True)


class Interrupt:
    """Turns the first Ctrl-C into a request to stop after the current step."""

    def __init__(self) -> None:
        self.requested = False

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self._before)

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)


class SavedBytes:
    """Bytes that autograd saves for backward: each storage once, parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self.total = model, 0

    @contextmanager
    def count(self) -> Iterator[None]:
        """Counts what is saved inside the block."""
        # Referring to the storages keeps their addresses unique.
        seen: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        # Sharded parameters are gathered for the call, and given back or registered by now.
        plain = [p for p in self._model.parameters() if type(p) is nn.Parameter]
        own = {p.untyped_storage().data_ptr() for p in plain}
        self.total = sum(storage.nbytes() for at, storage in seen.items() if at not in own)
