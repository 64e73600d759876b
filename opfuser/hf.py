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
    """Replaces modules of a transformers model by fused sequences of operations where it can.

    Like :func:`opfuser.apply`, with a default example: a small batch of the tokens or images that
    the configuration describes, on the model's device. There is no default, and the report lists
    modules as not called yet, if a call of the model could have side effects or take long (modules
    have hooks; parameters are sharded, quantized or on several devices; there are more than two
    billion of them on a CPU), or if the model rejects the batch.

    Args:
        model: a ``PreTrainedModel``, or any module.
        example: as in :func:`opfuser.apply`.
        dry_run: likewise.
        fused_loss: likewise.
        merge_storages: likewise.

    Returns:
        The report: what computes the modules of the model, and why the others are kept.

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
