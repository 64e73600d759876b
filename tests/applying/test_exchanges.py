"""Data of parameters that are exchanged, by ``parameter.data = other``, between the passes.

Backward of torch's functions reads the new data of a parameter that a function took itself, and the
old data of its views and casts. Layers that opfuser computes read what those of the model read.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opfuser
from opfuser.applying import report

from ..reading.tiny import model_of
from .models import IDS, MODELS, assert_equal_steps, inputs_of


def _family(name: str) -> nn.Module:
    return model_of(name, dropout=0.0).train()


def _experts(name: str, implementation: str) -> nn.Module:
    model: Any = _family(name).float()  # the dtypes of grouped_mm
    model.set_experts_implementation(implementation)
    return model


def _adapted(name: str, **kwargs: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT reads what transformers has renamed
        model: nn.Module = peft.get_peft_model(MODELS[name](), peft.LoraConfig(r=4, **kwargs))
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.requires_grad:
            p.data = torch.randn(p.shape, generator=generator) * 0.2
        p.requires_grad_(True)
    return model


EXCHANGED: dict[str, Callable[[], nn.Module]] = {
    **{name: MODELS[name] for name in ("Llama", "GPT-2", "ViT", "TransformerEncoder")},
    # Norms with 1 + w, by a formula and by F.layer_norm; with a weight that is cast; of heads.
    **{name: lambda name=name: _family(name) for name in ("gemma", "nemotron", "cohere", "qwen3")},
    "mixtral": lambda: _family("mixtral"),
    "gpt-oss": lambda: _family("gpt_oss"),
    "mixtral by grouped_mm": lambda: _experts("mixtral", "grouped_mm"),
    "LoRA": lambda: _adapted("Llama", target_modules=["q_proj", "down_proj"]),
    "LoRA of GPT-2": lambda: _adapted(
        "GPT-2", target_modules=["c_attn", "c_fc"], fan_in_fan_out=True
    ),
}


def _step(model: nn.Module, inputs: dict[str, Any], exchanged: Callable[[str], bool]) -> Any:
    """Output and gradients of a step within which parameters get other data."""
    model.zero_grad()
    out: Any = model(**inputs)
    y = out if isinstance(out, Tensor) else out[0]
    before = {p: p.data for name, p in model.named_parameters() if exchanged(name)}
    for p, data in before.items():
        p.data = data * 1.25 + 0.1
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).cos().view(y.shape)).sum().backward()
    for p, data in before.items():
        p.data = data
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [y.detach(), *grads]


def assert_exchanges_alike(
    model: nn.Module, exchanged: Callable[[str], bool] = lambda name: True
) -> None:
    """Asserts that gradients are those of the untouched model, also of recorded calls."""
    inputs = {"input_ids": IDS} if hasattr(model, "peft_config") else inputs_of(model)
    rtol = 1e-5 if next(model.parameters()).dtype == torch.float64 else 1e-4
    own, other = copy.deepcopy(model), copy.deepcopy(model)
    want = _step(other, inputs, exchanged)
    opfuser.apply(own)
    for _ in range(4):
        assert_equal_steps(_step(own, inputs, exchanged), want, rtol)
    assert report(own).computed


@pytest.mark.parametrize("name", EXCHANGED)
def test_layers_read_the_data_that_those_of_the_model_read(name: str) -> None:
    assert_exchanges_alike(EXCHANGED[name]())


def test_experts_multiplied_at_once() -> None:
    """By grouped_mm of W^T itself. Weights of the last product are held; docs/limits.md says it."""
    model = _experts("gpt_oss", "grouped_mm")
    assert_exchanges_alike(model, lambda name: "down_proj" not in name)
