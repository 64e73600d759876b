"""The training loop of train_lm.py, for any model whose call returns a loss."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from lm_data import Batch, Corpus, training_batch, validation_batches
from lm_recipes import RECIPES
from lm_run import Interrupt, Progress, RunFolder, SavedBytes
from torch import Tensor, nn

from opfuser.models import DecoderConfig


def option(default: Any, text: str, choices: Sequence[str] | None = None) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class TrainConfig:
    """All that determines a run; every field is an option of the command line."""

    steps: int = option(800, "optimizer steps")
    batch: int = option(8, "sequences per step")
    sequence: int = option(256, "bytes per sequence")
    dim: int = option(128, "features of a token")
    layers: int = option(4, "decoder layers")
    heads: int = option(4, "query heads")
    kv_heads: int = option(0, "key and value heads; 0 is as many as query heads")
    ffn: int = option(0, "features inside the feed-forward block; 0 is 8/3 dim, rounded up")
    untied: bool = option(False, "do not tie the head to the token table")
    lr: float = option(3e-3, "peak learning rate")
    warmup: int = option(50, "steps of linear warmup; then cosine decay to a tenth")
    weight_decay: float = option(0.1, "weight decay of matrices")
    clip: float = option(1.0, "largest norm of the gradient")
    seed: int = option(0, "seed of initial weights, batches and the sample")
    eval_every: int = option(200, "steps between validations, which also write a checkpoint")
    eval_batches: int = option(8, "validation batches; four times as many at the end")
    sample: int = option(300, "bytes of text to generate at the end")
    device: str = option("auto", "auto is cuda if available, otherwise cpu")
    dtype: str = option("auto", "float32, bfloat16 (autocast), float64; auto is bfloat16 on cuda")
    recipe: str = option(
        "none", "FP8 recipe of the layers' GEMMs; emulated on GPUs without FP8", ("none", *RECIPES)
    )
    register: bool = option(False, "register the user-defined fusion of lm_fusion.py")
    twin: bool = option(False, "train the same network in plain torch.nn and compare the losses")

    def resolved(self) -> dict[str, Any]:
        """All options, with ``auto`` resolved for this machine."""
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = self.dtype
        if dtype == "auto":
            dtype = "bfloat16" if device.startswith("cuda") else "float32"
        return {**asdict(self), "device": device, "dtype": dtype}

    @property
    def model(self) -> DecoderConfig:
        return DecoderConfig(
            vocab_size=256,
            dim=self.dim,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads or None,
            ffn_dim=self.ffn or None,
            tied_head=not self.untied,
            device=self.device,
            dtype=torch.float64 if self.dtype == "float64" else torch.float32,
            recipe=RECIPES.get(self.recipe),
        )

    def learning_rate(self, step: int) -> float:
        warm = min(1.0, (step + 1) / max(1, self.warmup))
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / self.steps)
        return self.lr * warm * (0.1 + 0.9 * cosine)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


class Probe(NamedTuple):
    """Loss, gradients and saved bytes of one batch."""

    loss: float
    grads: tuple[Tensor, ...]
    saved: int


class Trainer:
    """One model, its optimizer and its folder; the same for opfuser and for the twin.

    Attributes:
        listeners: are told of each step: its metrics, ``tokens_per_second`` and ``saved_bytes``;
            and of each validation.
    """

    def __init__(
        self, model: nn.Module, config: TrainConfig, folder: RunFolder, corpus: Corpus
    ) -> None:
        self.model, self.config, self.folder, self.corpus = model, config, folder, corpus
        self.optimizer = make_optimizer(model, config)
        self.step = 0
        self.seconds = self.training_seconds = 0.0
        self.saved = SavedBytes(model)
        self.validated, self.validation_loss = 0, math.nan  # after which step, and what it was
        self.listeners: list[Callable[[Mapping[str, float]], None]] = []

    def tell(self, **values: float) -> None:
        """Tells the listeners of one step, or of one validation."""
        for listener in self.listeners:
            listener(values)

    def record_validation(self, count: int) -> None:
        """Validates, and records the loss."""
        self.validated, self.validation_loss = self.step, self.validate(count)
        values = {"step": self.step, "validation_loss": self.validation_loss}
        self.folder.append(**values)
        self.tell(**values)

    def batch(self, step: int) -> Batch:
        c = self.config
        batch = training_batch(self.corpus.train, c.batch, c.sequence, c.seed, step)
        return self.to_device(batch)

    def to_device(self, batch: Batch) -> Batch:
        return Batch(*(t.to(self.config.device, non_blocking=True) for t in batch))

    def autocast(self) -> AbstractContextManager[Any]:
        """The region in which the model is called."""
        if self.config.dtype != "bfloat16":
            return nullcontext()
        return torch.autocast(torch.device(self.config.device).type, torch.bfloat16)

    def loss(self, batch: Batch) -> Tensor:
        with self.autocast():
            return self.model(*batch)

    def probe(self) -> Probe:
        """Loss and gradients of the next step, by a copy: a recipe's scales follow each call."""
        model = copy.deepcopy(self.model)
        saved = SavedBytes(model)
        with saved.count(), self.autocast():
            loss = model(*self.batch(self.step))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        return Probe(loss.item(), grads, saved.total)

    def mean(self, loss: Tensor) -> float:
        """The loss of a whole batch, of which ``loss`` is this process's."""
        return loss.item()

    def clip(self) -> float:
        """Clips the gradient; returns its norm before."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip).item()

    def stops(self, requested: bool) -> bool:
        """Whether training stops after this step, as Ctrl-C requested."""
        return requested

    def update(self, first: bool) -> dict[str, float]:
        """Runs one step of the optimizer; returns its metrics."""
        lr = self.config.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self.saved.count() if first else nullcontext():
            loss = self.loss(self.batch(self.step))
        loss.backward()
        norm = self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return {"step": self.step, "loss": self.mean(loss), "lr": lr, "grad_norm": norm}

    @torch.no_grad()
    def validate(self, count: int) -> float:
        c = self.config
        batches = validation_batches(self.corpus.validation, c.batch, c.sequence, count)
        return sum(self.mean(self.loss(self.to_device(batch))) for batch in batches) / count

    @property
    def tokens_per_second(self) -> float:
        tokens = self.step * self.config.batch * self.config.sequence
        return tokens / self.training_seconds if self.training_seconds else 0.0

    def save(self) -> None:
        counters = {"step": self.step, "seconds": self.seconds, "saved": self.saved.total}
        counters["training_seconds"] = self.training_seconds
        self.folder.save(self.model, self.optimizer, **counters)

    def load(self) -> None:
        counters = self.folder.load(self.model, self.optimizer)
        self.step, self.saved.total = counters["step"], counters["saved"]
        self.seconds, self.training_seconds = counters["seconds"], counters["training_seconds"]
        told = self.folder.curve("validation_loss").items()
        kept = [(step, loss) for step, loss in told if step <= self.step]
        self.validated, self.validation_loss = [(0, math.nan), *kept][-1]

    def train(self, label: str) -> bool:
        """Trains to the last step; False if Ctrl-C came first. A checkpoint is left either way."""
        c, began = self.config, time.perf_counter() - self.seconds
        shown = self.folder.writes
        with Interrupt() as interrupt, Progress(label, self.step, c.steps, shown) as progress:
            first = True
            while self.step < c.steps and not self.stops(interrupt.requested):
                started = time.perf_counter()
                metrics = self.update(first)
                first = False
                seconds = time.perf_counter() - started
                self.training_seconds += seconds
                self.folder.append(**metrics)
                speed = c.batch * c.sequence / seconds
                self.tell(**metrics, tokens_per_second=speed, saved_bytes=self.saved.total)
                if self.step % c.eval_every == 0 and self.step < c.steps:
                    self.record_validation(c.eval_batches)
                    self.seconds = time.perf_counter() - began
                    self.save()
                progress.update(
                    f"loss {metrics['loss']:.3f}, {self.tokens_per_second:,.0f} tokens/s, "
                    f"saved {self.saved.total / 2**20:.1f} MiB"
                )
            if self.step == c.steps and self.validated < c.steps:
                self.record_validation(4 * c.eval_batches)
            self.seconds = time.perf_counter() - began
            self.save()
        return self.step == c.steps

    def results(self) -> dict[str, Any]:
        losses = list(self.folder.curve("loss").values())[-50:]
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "steps": self.step,
            "tokens_per_second": self.tokens_per_second,
            "train_loss": sum(losses) / max(1, len(losses)),
            "validation_loss": self.validation_loss,
            "saved_bytes": self.saved.total,
            "seconds": self.seconds,
        }
