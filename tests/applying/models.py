"""Small models, their steps, and what is compared of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opfuser.applying import Report

from ..reading.families import NanoGPTBlock
from ..reading.tiny import LENGTH, WIDTH, model_of, randomized

IDS = torch.tensor([[3, 5, 9, 11, 4, 7, 8], [21, 3, 3, 40, 12, 6, 2]])


class NanoGPT(nn.Module):
    """A language model of blocks as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(NanoGPTBlock() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def nano_gpt() -> nn.Module:
    torch.manual_seed(0)
    return randomized(NanoGPT())


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, 0.0, batch_first=True, norm_first=True)
    return randomized(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def llama(attention: str = "sdpa", **others: Any) -> nn.Module:
    """Three layers, in training."""
    return model_of("llama", attention, num_hidden_layers=3, **others).train()


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    """A call of a model."""
    parameter = next(model.parameters())
    if isinstance(model, nn.TransformerEncoder):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
        return {"src": x.to(parameter.dtype).requires_grad_()}
    if isinstance(model, NanoGPT):
        return {"ids": IDS}
    config: Any = model.config
    if hasattr(config, "image_size"):
        generator = torch.Generator().manual_seed(1)
        shape = 2, 3, config.image_size, config.image_size
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return {"pixel_values": x.to(parameter.dtype)}
    return {"input_ids": IDS}


def step(model: nn.Module, call: Callable[..., Any] | None = None, **others: Any) -> list[Tensor]:
    """Output and gradients of a training step, those of the parameters in order."""
    model.zero_grad()
    out = (model if call is None else call)(**{**inputs_of(model), **others})
    y: Tensor = out if isinstance(out, Tensor) else out[0]
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).cos().view(y.shape)
    (y * weights).sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [y.detach(), *(g.clone() for g in grads)]


def assert_equal_steps(got: list[Tensor], want: list[Tensor], rtol: float = 1e-6) -> None:
    """Asserts that two steps are equal up to rounding; norms of Llama round to fp32."""
    assert len(got) == len(want)
    for ours, theirs in zip(got, want):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert (ours - theirs).abs().max() <= rtol * theirs.abs().max().clamp(min=1e-3)


def assert_as_exact(
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    exact: Sequence[Tensor],
    times: float = 2.0,
    floor: float = 1e-3,
) -> None:
    """Asserts that errors are so many times those of torch at most, in norm, tensor by tensor.

    Args:
        ours, theirs, exact: what both compute, in the same dtypes, and what is right.
        times: of torch's errors that are allowed.
        floor: what is allowed in any case, relative to what is right.
    """
    for a, b, right in zip(ours, theirs, exact, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        error, allowed = ((t.double() - right).norm() for t in (a, b))
        assert error <= times * allowed + floor * right.norm()


def paths(report: Report) -> list[str]:
    """The paths of what is computed; nothing is kept because the reader has a mistake."""
    assert "could not be read" not in str(report)
    return [entry.path for entry in report.computed]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": llama,
    "Qwen3": lambda: model_of("qwen3").train(),
    "GPT-2": lambda: model_of("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).train(),
    "BART": lambda: model_of("bart").train(),
    "BERT": lambda: model_of("bert").eval(),
    "ViT": lambda: model_of("vit").train(),
    "nanoGPT": nano_gpt,
    "TransformerEncoder": encoder,
}
WHOLE = {
    "Llama": ["layers.0", "layers.1", "layers.2", "norm"],
    "Qwen3": ["layers.0", "layers.1", "norm"],
    "GPT-2": ["h.0", "h.1", "ln_f"],
    "BART": [
        *(f"encoder.{name}" for name in ("layers.0", "layers.1", "layernorm_embedding")),
        *(f"decoder.{name}" for name in ("layers.0", "layers.1", "layernorm_embedding")),
    ],
    "BERT": ["embeddings.LayerNorm", "encoder.layer.0", "encoder.layer.1"],
    "ViT": ["layers.0", "layers.1", "layernorm"],
    "nanoGPT": ["blocks.0", "blocks.1", "norm"],
    "TransformerEncoder": [""],
}
