"""Models that commands are called with, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import opfuser
from opfuser.models import DecoderConfig, MoEConfig, decoder_lm, moe_block

WIDTH = 16


def mlp() -> opfuser.Sequential:
    """Norm and linear fuse; so does the residual."""
    return opfuser.Residual(
        opfuser.RMSNorm(WIDTH), opfuser.Linear(WIDTH, 4 * WIDTH), opfuser.GELU(),
        opfuser.Linear(4 * WIDTH, WIDTH),
    )  # fmt: skip


mlp.example_inputs = f"2x3x{WIDTH}"  # type: ignore[attr-defined]


def norm_and_linear() -> opfuser.Sequential:
    return opfuser.Sequential(opfuser.RMSNorm(WIDTH), opfuser.Linear(WIDTH, WIDTH))


def layers(count: int = 23) -> opfuser.Sequential:
    """A decoder of 300 operations."""
    return decoder_lm(
        DecoderConfig(
            vocab_size=32, dim=WIDTH, num_layers=count, num_heads=2, num_kv_heads=1, ffn_dim=32
        )
    )


layers.example_inputs = ["2x8:int64", "2x8:int64"]  # type: ignore[attr-defined]


class Wrapped(nn.Module):
    """Two Sequentials between modules of torch; one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = mlp()
        self.between = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([mlp()])
        self.never_called = mlp()

    def forward(self, x: Tensor) -> Any:
        x = self.between(self.first(x))
        return {"hidden": self.blocks[0](self.blocks[0](x)), "count": 1}


def wrapped() -> Wrapped:
    return Wrapped()


wrapped.example_inputs = lambda: torch.zeros(2, WIDTH, requires_grad=True)  # type: ignore[attr-defined]


class ReadsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum().item() > -1e9 else x


ready = mlp()  # an object, on the CPU
example_inputs = (f"4x{WIDTH}:fp32",)  # what the module says, where nothing else does


def plain() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


plain.example_inputs = f"2x{WIDTH}"  # type: ignore[attr-defined]


def feed_forward() -> nn.Module:
    """Modules that ``from_torch`` puts into a Sequential."""
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))


feed_forward.example_inputs = f"2x{WIDTH}"  # type: ignore[attr-defined]


class Block(nn.Module):
    """The same, in a forward of the user, and behind it what no operation computes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def own_forward() -> nn.Module:
    return Block()


own_forward.example_inputs = f"2x{WIDTH}"  # type: ignore[attr-defined]


def number() -> int:
    return 3


def broken() -> nn.Module:
    raise RuntimeError("no weights\nhere")


def without_values() -> nn.Module:
    return opfuser.Linear(WIDTH, WIDTH, device="meta")


def tabular() -> nn.Module:
    return nn.Embedding(500, WIDTH)


def on_meta() -> opfuser.Sequential:
    return mlp()


on_meta.example_inputs = torch.empty(2, WIDTH, device="meta")  # type: ignore[attr-defined]


def no_operations() -> opfuser.Sequential:
    return opfuser.Sequential(nn.Conv1d(3, 3, 1))


no_operations.example_inputs = "2x3x8"  # type: ignore[attr-defined]


class Bad(nn.Module):
    example_inputs = (3,)


bad_examples = Bad()


def longer() -> opfuser.Sequential:
    return mlp().append(opfuser.SiLU())


longer.example_inputs = mlp.example_inputs  # type: ignore[attr-defined]


def reads_values() -> ReadsValues:
    return ReadsValues()


class Many(nn.Module):
    """Equal layers of a module of the user, and one that is another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp() for _ in range(4))
        self.layers[2].append(opfuser.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def many() -> Many:
    return Many()


many.example_inputs = wrapped.example_inputs  # type: ignore[attr-defined]


def experts() -> opfuser.Sequential:
    config = MoEConfig(dim=WIDTH, ffn_dim=32, num_experts=4, top_k=2, dtype=torch.bfloat16)
    return moe_block(config)


experts.example_inputs = f"2x8x{WIDTH}:bf16"  # type: ignore[attr-defined]


def tied() -> opfuser.Sequential:
    """One Sequential, and what runs besides its operations: a plain module, a sum of gradients."""
    first, last = (opfuser.BasicLinear(WIDTH, WIDTH) for _ in range(2))
    last.weight = first.weight
    return opfuser.Sequential(first, nn.Tanh(), last)


tied.example_inputs = f"6x{WIDTH}"  # type: ignore[attr-defined]


def fp8() -> opfuser.Sequential:
    ops = [opfuser.Linear(256, 256, bias=False, dtype=torch.bfloat16) for _ in range(2)]
    return opfuser.Sequential(*ops, recipe=opfuser.recipe.Float8BlockScaling())


class NotCopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> NotCopied:
        raise NotImplementedError("there is one alone")


not_copied = NotCopied(2, 2)
