"""Device memory that steps take from the device, the pools of CUDA graphs included.

What a captured graph allocates is reserved for it, though no tensor refers to it between replays.
"""

from __future__ import annotations

import gc

import torch

from benchmarks import timing

STEPS_TO_CAPTURE = 3  # torch.compile warms up, records, and replays


def reserved(device: torch.device) -> int:
    """Bytes that are reserved when nothing is cached for reuse; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def peak_reserved(step: timing.Call, device: torch.device) -> int | None:
    """The most bytes that are reserved while the step runs; None on a CPU."""
    if device.type != "cuda":
        return None
    for _ in range(STEPS_TO_CAPTURE):
        step()
    reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device)
