"""Models of Hugging Face's transformers, computed by fused operations.

``opfuser.hf.apply(model)`` is :func:`opfuser.apply` with an example that is made from the model's
configuration. :func:`revert` puts back what was, and :func:`report` says what computes what.
:func:`register_attention` and :func:`kernel_mapping` give our attention and our layers to
transformers and to the ``kernels`` library by their own doors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from . import applying
from .applying import Computed, Inside, Kept, Report, report, revert
from .integrations.hf.attention_function import register_attention
from .integrations.hf.examples import examples
from .integrations.hf.kernel_layers import kernel_mapping

__all__ = [
    "Computed",
    "Inside",
    "Kept",
    "Report",
    "apply",
    "kernel_mapping",
    "register_attention",
    "report",
    "revert",
]


def apply(
    model: nn.Module,
    *,
    example: Mapping[str, Any] | Sequence[Any] | Tensor | None = None,
    dry_run: bool = False,
    fused_loss: bool = False,
    merge_storages: bool = False,
) -> Report:
    """Replaces what it can of a transformers model by fused sequences of operations.

    As :func:`opfuser.apply`, with an example where none is given: a small batch of the tokens or
    images that the configuration describes, on the model's device. There is none, and the report
    says of modules that they were not called yet, if a call of the model could be noticed or take
    long: where modules have hooks, where parameters are sharded, quantized or on several devices,
    and for more than two billion of them on a CPU; nor if the model refuses it.

    Args:
        model: a ``PreTrainedModel``, or any module.
        example: see :func:`opfuser.apply`.
        dry_run: likewise.
        fused_loss: likewise.
        merge_storages: likewise.

    Returns:
        What computes the modules of the model, and why the others are kept.

    Raises:
        ArgumentTypeError: as :func:`opfuser.apply`.
    """
    options: dict[str, Any] = {
        "dry_run": dry_run,
        "fused_loss": fused_loss,
        "merge_storages": merge_storages,
    }
    if example is None and isinstance(model, nn.Module):
        for made in examples(model):
            with suppress(Exception):  # whatever a model of somebody else raises
                return applying.apply(model, example=made, **options)
    return applying.apply(model, example=example, **options)
