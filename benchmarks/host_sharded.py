"""Host time that FSDP2 adds to a training step: opfuser against torch.nn with the same parameters.

The model is six layers of a GPT, so narrow that nearly all of the time is host overhead. It is
sharded with a unit per layer, or one per block with its residual sum, in fp32 or with the usual
policy of bf16; the only rank shares with nobody, so that gloo moves next to nothing. A step is the
forward and the backward pass, after those in which passes are recorded. What a unit costs is the
difference to the same model unsharded (which is in bf16, where the policy is).

All models run in one process, alternating; medians are compared. A sample is CPU time of the
calling thread, without garbage collection. Counted as well, in one step: calls of Python functions
of opfuser for each unit, beyond those of the unsharded model. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpu import gpt_layers, torch_models
from machine import machine
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import opfuser

DIM, HEADS, TOKENS, LAYERS = 32, 2, 4, 6
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PACKAGE = str(Path(opfuser.__file__).parent)


class Case(NamedTuple):
    """How the models are sharded: a unit per "layer" or "block"; with the policy, or in fp32."""

    unit: str
    bf16: bool

    @property
    def units(self) -> int:
        return LAYERS * (1 if self.unit == "layer" else 2)


CASES = tuple(Case(unit, bf16) for bf16 in (False, True) for unit in ("layer", "block"))


def models() -> tuple[nn.Module, nn.Module]:
    """The models of opfuser and of torch, with the same parameters."""
    ours = opfuser.Sequential(
        *(opfuser.Sequential(*gpt_layers.our_layer(DIM, HEADS, {})) for _ in range(LAYERS))
    )
    layers = (
        nn.Sequential(*gpt_layers.torch_layer(DIM, HEADS, lambda: nn.LayerNorm(DIM), {}))
        for _ in range(LAYERS)
    )
    return ours, torch_models.share(nn.Sequential(*layers), ours)


def sharded(model: Any, case: Case) -> nn.Module:
    how: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if case.bf16:
        how["mp_policy"] = POLICY
    for layer in model:
        for unit in [layer] if case.unit == "layer" else layer:
            fully_shard(unit, **how)
    return fully_shard(model, **how)


def step_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
    x = torch.ones(1, TOKENS, DIM, dtype=dtype, requires_grad=True)
    grad = torch.ones(1, TOKENS, DIM, dtype=dtype)
    leaves = [x, *model.parameters()]

    def step() -> Tensor:
        y: Tensor = model(x)
        y.backward(grad.to(y.dtype))
        for leaf in leaves:
            leaf.grad = None
        return y

    return step


def steps_of(case: Case) -> dict[str, Callable[[], Tensor]]:
    """A step of each contestant: the unsharded and the sharded model of opfuser and of torch."""
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    torch.manual_seed(0)
    ours, theirs = models()
    steps = {}
    for name, model in (("opfuser", ours), ("torch", theirs)):
        steps[f"{name} sharded"] = step_of(sharded(model, case))
    torch.manual_seed(0)
    for name, model in zip(("opfuser", "torch"), models()):
        steps[name] = step_of(model.to(dtype), dtype)
    return steps


def python_calls(step: Callable[[], object]) -> int:
    count = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    step()  # after another model's
    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


@contextmanager
def without_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(steps: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Median seconds per step of each contestant, alternating between them."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        with without_collection():
            for name, step in steps.items():
                step()  # after another model's
                began = time.thread_time()
                step()
                step()
                times[name].append((time.thread_time() - began) / 2)
    return {name: statistics.median(own) for name, own in times.items()}


def row(case: Case, rounds: int) -> dict[str, str | float]:
    steps = steps_of(case)
    for step in steps.values():
        for _ in range(4):  # plans, and is recorded
            step()
    calls = {name: python_calls(step) for name, step in steps.items()}
    seconds = measure(steps, rounds)
    found: dict[str, str | float] = {
        "unit": case.unit,
        "policy": "bf16" if case.bf16 else "none",
        "units": case.units,
    }
    for name, taken in seconds.items():
        found[f"{name.replace(' ', '_')}_step_us"] = taken * 1e6
    for name in ("opfuser", "torch"):
        added = seconds[f"{name} sharded"] - seconds[name]
        found[f"{name}_us_per_unit"] = added / case.units * 1e6
    found["step_ratio"] = seconds["opfuser sharded"] / seconds["torch sharded"]
    found["ratio"] = float(found["opfuser_us_per_unit"]) / float(found["torch_us_per_unit"])
    added_calls = calls["opfuser sharded"] - calls["opfuser"]
    found["opfuser_python_calls_per_unit"] = added_calls / case.units
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    heading = f"{'unit':<8}{'policy':<8}{'step ratio':>12}{'ours us/unit':>14}{'torch':>8}"
    print(f"{heading}{'ratio':>8}{'calls/unit':>12}")
    for case in CASES:
        found = row(case, args.rounds)
        rows.append(found)
        print(
            f"{found['unit']:<8}{found['policy']:<8}{found['step_ratio']:>12.2f}"
            f"{found['opfuser_us_per_unit']:>14.0f}"
            f"{found['torch_us_per_unit']:>8.0f}{found['ratio']:>8.2f}"
            f"{found['opfuser_python_calls_per_unit']:>12.1f}"
        )
    dist.destroy_process_group()
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
