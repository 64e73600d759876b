"""Curves of a run of train_lm.py for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from lm_trainer import TrainConfig
from torch import nn
from torch.utils.tensorboard import SummaryWriter

# Dense bf16 FLOP/s of the tensor cores, from NVIDIA's data sheets. A run in fp32, or with GEMMs in
# FP8, has another peak, which --peak-tflops states.
PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


def peak_flops(config: TrainConfig) -> float | None:
    """FLOP/s that the device of a run reaches at most; None if that is not known."""
    if config.dtype != "bfloat16" or config.recipe != "none":
        return None
    if torch.device(config.device).type != "cuda":
        return None
    return PEAKS.get(torch.cuda.get_device_name(config.device))


def flops_per_token(model: nn.Module, config: TrainConfig) -> int:
    """FLOPs of forward and backward that the model needs for one token: 6 N + 12 L d T.

    N counts the weights of GEMMs, the head among them and the lookup of embeddings not; L layers
    of d features attend to T tokens. The count is that of PaLM (appendix B of arXiv:2204.02311): it
    takes attention as if nothing was masked, and leaves out what is computed again in backward.
    """
    c = config
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    if c.untied:
        weights -= c.model.vocab_size * c.dim
    return 6 * weights + 12 * c.layers * c.dim * c.sequence


TAGS = {
    "loss": "train/loss",
    "lr": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "validation_loss": "validation/loss",
    "tokens_per_second": "speed/tokens_per_second",
    "saved_bytes": "memory/saved_bytes",
}


class Board:
    """Writes what a trainer tells of its steps as the curves of ``TAGS``.

    Where ``peak`` is given, there is also ``speed/mfu``, the model FLOPs utilization
    ``tokens_per_second * flops_per_token / peak``.

    Args:
        folder: of the event files, which TensorBoard reads.
        step: steps that were made before. TensorBoard drops what the folder has of later ones: they
            are made again.
        flops_per_token: see the function of that name.
        peak: FLOP/s of the device.
    """

    def __init__(self, folder: Path, step: int, flops_per_token: int, peak: float | None) -> None:
        self.flops_per_token, self.peak = flops_per_token, peak
        self.writer = SummaryWriter(str(folder), purge_step=step + 1)

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.close()

    def add(self, values: Mapping[str, float]) -> None:
        """Adds a point to each curve that ``values`` has, at its ``step``."""
        step = int(values["step"])
        for key, tag in TAGS.items():
            if key in values:
                self.writer.add_scalar(tag, values[key], step)
        if self.peak is not None and "tokens_per_second" in values:
            mfu = values["tokens_per_second"] * self.flops_per_token / self.peak
            self.writer.add_scalar("speed/mfu", mfu, step)
