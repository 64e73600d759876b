"""What ``opfuser.hf.apply`` costs the host: once for a model, and in each call of a layer.

A call of a layer first compares what its trace has read; that comparison is timed by itself.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from machine import machine
from torch import nn

import opfuser.hf
from opfuser.applying.forwards import state_of

WIDTH, HEADS, TOKENS, CLASSES = 64, 4, 16, 128
CALLS = 2000  # of a comparison, that are timed together


class Family(NamedTuple):
    """Tiny models of one type.

    Attributes:
        model: class of the models.
        sizes: of the configuration, by the names that it has for them; ``layers`` is one of them.
        layers: name of the number of layers.
        inputs: keyword arguments of a call.
    """

    model: str
    sizes: dict[str, int]
    layers: str
    inputs: Callable[[], dict[str, Any]]

    def make(self, layers: int) -> Any:
        made = getattr(transformers, self.model)
        return made(made.config_class(**self.sizes, **{self.layers: layers}))


def _tokens() -> dict[str, Any]:
    tokens = torch.randint(CLASSES, (1, TOKENS))
    return {"input_ids": tokens, "labels": tokens}


def _image() -> dict[str, Any]:
    return {"pixel_values": torch.randn(1, 3, 32, 32)}


_WIDE = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 2 * WIDTH}
_GPT = {"n_embd": WIDTH, "n_head": HEADS, "n_positions": TOKENS}
_WORDS = {"vocab_size": CLASSES, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "Llama": Family("LlamaForCausalLM", _WORDS | _WIDE, "num_hidden_layers", _tokens),
    "GPT-2": Family("GPT2LMHeadModel", _WORDS | _GPT, "n_layer", _tokens),
    "ViT": Family("ViTForImageClassification", _WIDE | {"image_size": 32, "patch_size": 8},
                  "num_hidden_layers", _image),
}  # fmt: skip


def checks_of(model: nn.Module) -> list[Callable[[], bool]]:
    """The comparison that the last call of each layer began with."""
    layers = [layer for m in model.modules() if isinstance(m, nn.ModuleList) for layer in m]
    decisions = [decision for layer in layers for decision in state_of(layer).decisions[-1:]]
    checks = [d.reads.current for d in decisions if d.built is not None]
    assert len(checks) == len(layers), "some layers are not computed by opfuser"
    assert all(check() for check in checks)
    return checks


def row(name: str, layers: int, repeats: int) -> dict[str, str | int | float]:
    """Seconds that ``apply`` takes, and microseconds that a layer's comparison takes."""
    family, seconds = FAMILIES[name], []
    for _ in range(repeats):
        model = family.make(layers)
        seconds.append(timeit.timeit(functools.partial(opfuser.hf.apply, model), number=1))
    model(**family.inputs())
    best = [min(timeit.repeat(c, number=CALLS, repeat=repeats)) / CALLS for c in checks_of(model)]
    micro = statistics.median(best) * 1e6
    return {"model": name, "layers": layers, "apply_s": min(seconds), "check_us": micro}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(f"{'model':<10}{'layers':>8}{'apply s':>10}{'check us':>10}")
    rows = []
    for name in FAMILIES:
        rows.append(found := row(name, args.layers, args.repeats))
        print(f"{name:<10}{args.layers:>8}{found['apply_s']:>10.2f}{found['check_us']:>10.2f}")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
