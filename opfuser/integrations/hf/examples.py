"""Arguments of calls of models of transformers, made from their configurations."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...applying import foreign_forward
from ...reading.captured_outputs import is_idle
from ...reading.reads import is_hooked

_ROWS, _TOKENS = 2, 8
# An example of a larger model takes seconds on a CPU.
_PARAMETERS_ON_CPU = 2 * 10**9


def input_shape(model: nn.Module, rows: int, tokens: int) -> tuple[str, tuple[int, ...]] | None:
    """The name and the shape of the one input that a model needs; None if it needs another.

    Args:
        tokens: in a row, at most.
    """
    config: Any = model.config
    name = getattr(model, "main_input_name", None)
    names = [n for n in inspect.signature(type(model).forward).parameters if n != "self"]
    if not names or name != names[0]:
        return None
    if name == "input_ids":
        most = getattr(config, "max_position_embeddings", None)
        return name, (rows, min(tokens, most) if isinstance(most, int) else tokens)
    size = _setting(config, "image_size")
    if name != "pixel_values" or size is None:
        return None
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return name, (rows, _setting(config, "num_channels") or 3, height, width)


def examples(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Small calls of a model, that with labels first; none if a call could be noticed or is long.

    It could where modules have hooks or forwards of their own, as those of sharded and offloaded
    models.
    """
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    adapted: Any = getattr(sys.modules.get("peft"), "PeftModel", ())
    # PEFT's own model passes its arguments on.
    inner: Any = model.get_base_model() if isinstance(model, adapted) else model
    parameters = list(model.parameters())
    if not isinstance(inner, kind) or not parameters:
        return
    device = parameters[0].device
    if not all(type(p) is nn.Parameter and p.device == device for p in parameters):
        return
    if any(is_hooked(m, is_idle) or foreign_forward(m) for m in model.modules()):
        return
    if device.type == "cpu" and sum(map(Tensor.numel, parameters)) > _PARAMETERS_ON_CPU:
        return
    found = input_shape(inner, _ROWS, _TOKENS)
    if found is None:
        return
    name, shape = found
    if name != "input_ids":
        dtype = next(p.dtype for p in parameters if p.is_floating_point())
        yield {name: torch.zeros(shape, dtype=dtype, device=device)}
        return
    words: int = inner.get_input_embeddings().num_embeddings
    tokens = torch.arange(1, 1 + shape[0] * shape[1], device=device).view(shape) % words
    if model.training and "labels" in inspect.signature(type(inner).forward).parameters:
        yield {name: tokens, "labels": tokens}
    yield {name: tokens}


def _setting(config: Any, name: str) -> Any:
    """A setting of a configuration, or of that of its images."""
    return getattr(config, name, getattr(getattr(config, "vision_config", None), name, None))
