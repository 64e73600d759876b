"""One training of the soak: a small GPT, its optimizer, and what a checkpoint has of both."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import opfuser
from examples.lm_data import Batch, Corpus, training_batch, validation_batches
from opfuser.models import DecoderConfig, decoder_lm
from opfuser.optim import MasterWeights
from opfuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8PredictedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

__all__ = ["CASES", "RECIPES", "Case", "Training"]

# Features are blocks of 128; a micro-batch has a sequence for each of four ranks.
MODEL = DecoderConfig(
    vocab_size=256, dim=128, num_layers=2, num_heads=2, ffn_dim=128, dtype=torch.bfloat16
)
SEQUENCES, LENGTH, MICROBATCHES, SEED = 16, 32, 4, 0
# Ranks add up in another order, and larger steps move their losses further apart.
LEARNING_RATE, DECAY = 1e-4, 0.99

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=16),
    "predicted": Float8PredictedScaling(),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}


class Case(NamedTuple):
    """One way to train.

    Attributes:
        recipe: its name in :data:`RECIPES`.
        recompute: ``"reentrant"`` and ``"not reentrant"`` are torch's checkpoints of layers,
            ``"mlp"`` is the library's.
        parallel: how ranks share the work; ``"by hand"`` sums gradients, and that is all.
        weights: ``"fp8"`` stores those of linear operations as codes, which torch's own ways
            refuse.
    """

    recipe: str
    recompute: Literal["reentrant", "not reentrant", "mlp"]
    parallel: Literal["ddp", "fsdp", "by hand"]
    weights: Literal["bf16", "fp8"] = "bf16"

    def __str__(self) -> str:
        return ", ".join(self)


CASES = (
    Case("delayed", "reentrant", "fsdp"),
    Case("delayed", "not reentrant", "ddp"),
    Case("delayed", "mlp", "by hand", "fp8"),
    Case("predicted", "not reentrant", "fsdp"),
    Case("predicted", "mlp", "ddp"),
    Case("current", "not reentrant", "ddp"),
    Case("block", "mlp", "fsdp"),
    Case("block", "not reentrant", "by hand", "fp8"),
    Case("mxfp8", "reentrant", "fsdp"),
    Case("nvfp4", "mlp", "ddp"),
)


class Training:
    """A new model and its optimizer, of which this rank has a part."""

    def __init__(self, case: Case, corpus: Corpus) -> None:
        self.case, self.corpus, self.step = case, corpus, 0
        torch.manual_seed(SEED)
        config = replace(MODEL, recompute="mlp" if case.recompute == "mlp" else None)
        with self.region(), self._stored():
            model = decoder_lm(config)
        self.model = _parallel(_checkpointed(model, case.recompute), case.parallel)
        self.optimizer = MasterWeights(self.model, torch.optim.AdamW, lr=LEARNING_RATE)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, DECAY)

    def region(self) -> AbstractContextManager[Any]:
        """Where the model is called; ranks agree on its scales."""
        recipe = RECIPES[self.case.recipe]
        return opfuser.autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD)

    def _stored(self) -> AbstractContextManager[Any]:
        if self.case.weights == "bf16":
            return nullcontext()
        recipe = RECIPES[self.case.recipe]
        return opfuser.quantized_model_init(recipe=recipe)

    def loss(self, batch: Batch) -> Tensor:
        """Of this rank's part of a micro-batch."""
        tokens, targets = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch)
        with self.region():
            return self.model(tokens, targets)

    def train(self) -> float:
        """One step of the optimizer over four micro-batches; the mean loss of all ranks."""
        batch = training_batch(self.corpus.train, SEQUENCES, LENGTH, SEED, self.step)
        total = torch.zeros(())
        for n, parts in enumerate(zip(*(t.chunk(MICROBATCHES) for t in batch))):
            with self._sums_over_ranks(n == MICROBATCHES - 1):
                loss = self.loss(Batch(*parts)) / MICROBATCHES
                loss.backward()
            total += loss.detach()
        if self.case.parallel == "by hand":
            for p in self.model.parameters():
                assert p.grad is not None
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1
        return _mean(total)

    def _sums_over_ranks(self, last: bool) -> AbstractContextManager[Any]:
        """In which gradients are summed over ranks with the last micro-batch alone."""
        if self.case.parallel == "by hand":
            return nullcontext()
        if isinstance(self.model, DistributedDataParallel):
            return nullcontext() if last else self.model.no_sync()
        self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss of a batch that was held out."""
        self.model.eval()
        (batch,) = validation_batches(self.corpus.validation, 4, LENGTH, 1)
        loss = self.loss(batch)
        self.model.train()
        return _mean(loss)

    def save(self, folder: Path) -> None:
        """Writes what a run needs to go on; its batches follow from the number of the step."""
        with self.region():
            pass  # ranks agree on what they have seen since the last one
        dcp.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Goes on from what was written by any number of ranks."""
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])
        self.step = state["step"]

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
            # NVFP4 rounds gradients at random. Ranks began with one seed, and draw as much.
            "rng": torch.get_rng_state(),
            "step": self.step,
        }


def _checkpointed(model: Any, recompute: str) -> Any:
    if recompute != "mlp":
        reentrant = recompute == "reentrant"
        kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        for n, layer in enumerate(model.layers):
            model.layers[n] = checkpoint_wrapper(layer, checkpoint_impl=kind)
    return model


def _parallel(model: Any, kind: str) -> nn.Module:
    if kind == "by hand":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _mean(loss: Tensor) -> float:
    """Over ranks, whose parts are as large."""
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
