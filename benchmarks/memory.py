"""Bytes that a block keeps for backward: opfuser, torch.nn and torch.compile.

What autograd saves is counted with its saved-tensor hooks: every storage once, parameters and
buffers left out, the input of the block counted in. The unit is T·d elements of the dtype of the
activations: one tensor of the size of the block's input. Nothing is timed.

The CPU rows are from blocks that run. The rows of the size of an 8B model are from tensors without
data, on the meta device; torch.compile's partitioner decides there what to save, and no code is
generated. Attention is left out there: without data torch has no kernel for it, and would save the
matrix of weights. After the table of all come bf16 blocks item by item.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import opfuser
from benchmarks.gpu import torch_models
from benchmarks.gpu.torch_models import Parts
from benchmarks.machine import machine
from opfuser.models import DecoderConfig, decoder_layer, swiglu_block

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EPS = 1e-5
OURS, TORCH, COMPILED = "opfuser", "torch.nn", "torch.compile"
RECOMPUTED = 'opfuser, recompute="mlp"'
CONTESTANTS = (OURS, RECOMPUTED, TORCH, COMPILED)


@dataclass(frozen=True)
class Size:
    """A block's dimensions, and where and in which dtype it is built."""

    device: str
    dtype: str
    dim: int
    ffn_dim: int
    heads: int
    kv_heads: int
    batch: int
    length: int

    @property
    def unit(self) -> int:
        """Bytes of one tensor of T·d elements."""
        return self.batch * self.length * self.dim * DTYPES[self.dtype].itemsize

    @property
    def to(self) -> dict[str, Any]:
        return {"device": self.device, "dtype": DTYPES[self.dtype]}

    def config(self) -> DecoderConfig:
        return DecoderConfig(
            vocab_size=1,
            dim=self.dim,
            num_layers=1,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            ffn_dim=self.ffn_dim,
            norm_eps=EPS,
            **self.to,
        )

    def __str__(self) -> str:
        return f"{self.device}, {self.dtype}, d={self.dim}"


def small(dtype: str, dim: int = 512, length: int = 512) -> Size:
    return Size("cpu", dtype, dim, dim * 7 // 2, 8, 2, 2, length)


LARGE = Size("meta", "bf16", 4096, 14336, 32, 8, 1, 8192)


class Pair(NamedTuple):
    """A block of opfuser, and the same in torch.nn."""

    ours: nn.Module
    theirs: nn.Module


def swiglu(size: Size) -> Pair:
    config = size.config()
    return Pair(swiglu_block(config), torch_models.swiglu_block(config, Parts()))


def attention_swiglu(size: Size) -> Pair:
    config = size.config()
    twin = torch_models.decoder_layer(config, Parts(), size.length)
    return Pair(decoder_layer(config), twin)


def gpt(size: Size) -> Pair:
    hidden = 4 * size.dim
    ours = opfuser.Residual(
        opfuser.LayerNorm(size.dim, eps=EPS, **size.to),
        opfuser.Linear(size.dim, hidden, **size.to),
        opfuser.GELU(),
        opfuser.Linear(hidden, size.dim, **size.to),
    )
    return Pair(ours, torch_models.gpt_block(size.dim, hidden, 0.0, EPS, size.to))


BLOCKS: dict[str, Callable[[Size], Pair]] = {
    "SwiGLU block, f = 3.5 d": swiglu,
    "attention + SwiGLU block, f = 3.5 d": attention_swiglu,
    "GPT block, f = 4 d": gpt,
}


class Item(NamedTuple):
    """One saved storage, described by the tensor that was saved first."""

    made_by: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class Origins(TorchDispatchMode):
    """Records which ATen operation allocated a storage."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, str] = {}
        self.alive: list[torch.UntypedStorage] = []  # keeps addresses unique

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in self.made:
                    self.alive.append(storage)
                    self.made[storage._cdata] = func.overloadpacket.__name__.strip("_")
        return result


@contextmanager
def saved(leave_out: list[Tensor]) -> Iterator[dict[int, tuple[torch.UntypedStorage, Tensor]]]:
    """Collects in a dict what autograd saves inside, by storage."""
    known = {t.untyped_storage()._cdata for t in leave_out}
    seen: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in known:
            seen.setdefault(storage._cdata, (storage, t.detach()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield seen


def items(block: nn.Module, size: Size, *, origins: bool = True) -> list[Item]:
    """What one call of the block saves, in order."""
    x = torch.randn(size.batch, size.length, size.dim, **size.to).requires_grad_()
    noted = Origins() if origins else None
    held = [*block.parameters(), *block.buffers()]
    with saved(held) as seen, noted or nullcontext():
        y = block(x)
    made = {} if noted is None else noted.made
    made[x.untyped_storage()._cdata] = "input"
    found = [
        Item(
            made.get(at, ""), tuple(t.shape), str(t.dtype).removeprefix("torch."), storage.nbytes()
        )
        for at, (storage, t) in seen.items()
    ]
    del y
    return found


def compiled(block: nn.Module, size: Size) -> nn.Module:
    torch.compiler.reset()
    backend = "aot_eager_decomp_partition" if size.device == "meta" else "inductor"
    return torch.compile(block, backend=backend)


def contest(block: str, size: Size, compile_too: bool) -> dict[str, list[Item]]:
    """The saved items of each contestant."""
    torch.manual_seed(0)
    pair = BLOCKS[block](size)
    out = {OURS: items(pair.ours, size)}
    with opfuser.enable("recompute_mlp"):
        out[RECOMPUTED] = items(pair.ours, size)
    out[TORCH] = items(pair.theirs, size)
    if compile_too:
        out[COMPILED] = items(compiled(pair.theirs, size), size, origins=False)
    return out


def units(found: list[Item], size: Size) -> float:
    return sum(item.bytes for item in found) / size.unit


class Result(NamedTuple):
    block: str
    size: Size
    saved: dict[str, list[Item]]


def measure(sizes: list[Size], compile_too: bool) -> Iterator[Result]:
    for size in sizes:
        for block in BLOCKS:
            if size.device != "meta" or "attention" not in block:
                yield Result(block, size, contest(block, size, compile_too))


def summary(results: list[Result]) -> Iterator[str]:
    """A Markdown table of units."""
    yield f"| block | | {' | '.join(CONTESTANTS)} |"
    yield "|---|---|" + "---|" * len(CONTESTANTS)
    for block, size, found in results:
        cells = [f"{units(found[name], size):.2f}" if name in found else "" for name in CONTESTANTS]
        yield f"| {block} | {size} | {' | '.join(cells)} |"


def by_item(result: Result, name: str) -> Iterator[str]:
    """A Markdown table of one contestant's saved items."""
    yield "| made by | shape | dtype | units |"
    yield "|---|---|---|---|"
    for item in result.saved[name]:
        shape = " x ".join(map(str, item.shape))
        yield f"| {item.made_by} | {shape} | {item.dtype} | {item.bytes / result.size.unit:.3f} |"
    yield f"| sum | | | {units(result.saved[name], result.size):.3f} |"


def document(results: list[Result]) -> dict[str, Any]:
    return {
        "machine": machine(),
        "rows": [
            {
                "block": block,
                **asdict(size),
                "unit_bytes": size.unit,
                "units": {name: units(own, size) for name, own in found.items()},
                "saved": {name: [item._asdict() for item in own] for name, own in found.items()},
            }
            for block, size, found in results
        ],
    }


def page(results: list[Result]) -> Iterator[str]:
    """The results as Markdown."""
    title, _, text = __doc__.partition(".\n")
    yield f"# {title}\n{text}"
    yield f"Written by `python benchmarks/memory.py`, torch {torch.__version__}.\n"
    yield from summary(results)
    for result in results:
        for name in (OURS, TORCH):
            if (result.size.device, result.size.dtype) == ("cpu", "bf16"):
                yield f"\n## {result.block}: {name}\n"
                yield from by_item(result, name)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=512, help="of the blocks on the CPU")
    parser.add_argument("--length", type=int, default=512, help="of their sequences")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--markdown", type=Path, default=None)
    args = parser.parse_args(argv)
    compile_too = not args.no_compile
    if compile_too and shutil.which(os.environ.get("CXX", "g++")) is None:
        print("torch.compile is left out: there is no C++ compiler")
        compile_too = False
    sizes = [small(dtype, args.dim, args.length) for dtype in DTYPES]
    results = list(measure([*sizes, LARGE], compile_too))
    text = "\n".join(page(results)) + "\n"
    print(text, end="")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document(results), indent=1) + "\n")
    if args.markdown is not None:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(text)


if __name__ == "__main__":
    main()
