"""The same attention as in models of Hugging Face: their eager functions, and their masks."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from opfuser import DotProductAttention
from tests.basic.values import fill


def eager(family: str) -> Any:
    pytest.importorskip("transformers", reason="transformers is not installed")
    name = f"transformers.models.{family}.modeling_{family}"
    return importlib.import_module(name).eager_attention_forward


def seen(padding: Tensor, length: int, window: int | None) -> Tensor:
    """The additive mask that their decoders make, in (batch, 1, queries, keys)."""
    i, j = torch.arange(length)[:, None], torch.arange(length)
    keep = (j <= i) & ((j > i - window) if window else torch.ones_like(j <= i))
    keep = keep & padding[:, None, None]
    return torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)


@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        ("gemma2", {"softcap": 2.0, "scale": 0.3}),
        ("gemma2", {"softcap": 2.0, "window": 4}),
        ("gpt_oss", {"sinks": True, "window": 4}),
        ("llama", {}),
        ("mistral", {"window": 3}),
    ],
)
def test_same_as_eager_attention(family: str, arguments: dict[str, Any]) -> None:
    forward = eager(family)
    op = fill(DotProductAttention(4, 2, layout="separate", **arguments))
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[1, 7:] = False  # each query still sees a key; where none is, theirs is the mean
    leaves = [torch.randn(2, 9, n * 8, requires_grad=True) for n in (4, 2, 2)]
    heads = [t.unflatten(2, (-1, 8)).transpose(1, 2) for t in leaves]
    module = SimpleNamespace(num_key_value_groups=2, training=False, sinks=op.sinks, head_dim=8)
    given: dict[str, Any] = {"scaling": arguments.get("scale", 8**-0.5), "dropout": 0.0}
    if "softcap" in arguments:
        given["softcap"] = arguments["softcap"]
    mask = seen(padding, 9, arguments.get("window"))
    want = forward(module, *heads, mask, **given)[0].flatten(2)
    got = op(*leaves, mask=padding)
    torch.testing.assert_close(got, want)
    every = [*leaves, *op.parameters()]
    dy = torch.randn_like(want)
    torch.testing.assert_close(
        torch.autograd.grad(got, every, dy), torch.autograd.grad(want, every, dy)
    )
