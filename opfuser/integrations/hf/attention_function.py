"""Attention of opfuser as an ``attn_implementation`` of transformers."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from opfuser import DotProductAttention

from ...attention.masks import hides_queries
from ...errors import NotSupportedError
from ...reading.recording import is_tracing
from ...runtime.libraries import required
from ...torch_internals import constant_result

NAME = "opfuser"


def register_attention() -> None:
    """Registers opfuser's attention with transformers, as ``attn_implementation="opfuser"``.

    Models then take the name in ``from_pretrained``, ``from_config`` and
    ``set_attn_implementation``. Attention is computed by :class:`opfuser.DotProductAttention`, with
    what families pass: any number of key heads, dropout, soft-capping, sinks, masks that are bool
    or added, biases of positions with their gradients, several sequences in one row by
    ``position_ids`` or by ``cu_seq_lens_q`` and ``max_length_q``. Windows and chunks are in the
    masks, which are those of ``"sdpa"``. A later call changes nothing.

    Raises:
        MissingPackageError: there is no transformers, or one without these registers.
        NotSupportedError: in calls of a model, for weights of attention, for paged caches, and for
            masks without exact gradients.
    """
    functions, masks, mask = (
        required(f"transformers.{name}", "opfuser.hf.register_attention", "opfuser[hf]")
        for name in (
            "modeling_utils:AttentionInterface",
            "masking_utils:AttentionMaskInterface",
            "masking_utils:sdpa_mask",
        )
    )
    functions.register(NAME, attention_forward)
    masks.register(NAME, mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: ``softmax(c tanh(s q k / c) + mask) v``, and no weights.

    Args:
        module: that attends.
        query: (batch, heads, queries, size).
        key: (batch, key heads, keys, size).
        value: (batch, key heads, keys, value size).
        attention_mask: bool or added, of four dimensions; None: see ``is_causal``.
        dropout: probability of zeroing a weight.
        scaling: s; None is ``size ** -0.5``.
        is_causal: without a mask and with several queries, whether query i sees the keys up to i;
            None is what the module says of itself, else True.
        softcap: c; None or 0 is no cap.
        s_aux: (heads,), logits without a value.
        position_bias: added to scores; it gets a gradient.
        **kwargs: of which ``cu_seq_lens_q`` and ``max_length_q`` say where sequences begin in a
            row without a mask.

    Returns:
        (batch, queries, heads, value size), and None.

    Raises:
        NotSupportedError: as :func:`register_attention` says.
    """
    sinks = kwargs.get("sinks") if s_aux is None else s_aux
    traced = not torch.compiler.is_compiling() and is_tracing()
    if traced and not softcap and sinks is None:  # the reader knows torch's function
        sdpa: Any = importlib.import_module("transformers.integrations.sdpa_attention")
        given = {"is_causal": is_causal, "position_bias": position_bias, **kwargs}
        out: tuple[Tensor, None] = sdpa.sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **given
        )
        return out
    _check(attention_mask, kwargs)
    queries = query.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and queries > 1
    if causal and key.shape[2] > queries:  # the others are places of a cache that are not filled
        key, value = key[:, :, :queries], value[:, :, :queries]
        position_bias = None if position_bias is None else position_bias[..., :queries]
    batch = max(query.shape[0], key.shape[0])
    rows = [_rows(t, batch) for t in (query, key, value)]
    what: tuple[Any, ...] = (
        query.shape[1],
        key.shape[1],
        causal,
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        float(dropout),
        None if not softcap else float(softcap),
        sinks is not None,
        position_bias is not None,
    )
    if sinks is not None and not torch.compiler.is_compiling():
        what += (threading.get_ident(),)  # as sinks are exchanged for a call
    _prepare(what)
    op = _operations[what]
    if position_bias is not None:
        rows.append(position_bias)
    keywords: dict[str, Any] = {} if attention_mask is None else {"mask": attention_mask}
    starts = kwargs.get("cu_seq_lens_q")
    if starts is not None and attention_mask is None and batch == 1:
        keywords["cu_seqlens"] = starts.to(torch.int32)
        keywords["max_seqlen"] = int(kwargs["max_length_q"])
    if sinks is None:
        y = op(*rows, **keywords)
    else:
        y = functional_call(op, {"sinks": sinks}, tuple(rows), keywords)
    attended: Tensor = y.view(batch, queries, query.shape[1], -1)
    return attended, None


def _rows(heads: Tensor, batch: int) -> Tensor:
    """(batch, tokens, heads * size)."""
    return heads.transpose(1, 2).flatten(2).expand(batch, -1, -1)


# By what they are made with. torch.compile looks modules up, and makes none.
_operations: dict[tuple[Any, ...], DotProductAttention] = {}


@constant_result
def _prepare(what: tuple[Any, ...]) -> None:
    """Makes an operation with these numbers of heads, causality, scale and so on."""
    if what not in _operations:
        heads, kv_heads, causal, scale, dropout, softcap, sinks, bias = what[:8]
        _operations[what] = DotProductAttention(
            heads,
            kv_heads,
            causal,
            scale,
            layout="separate",
            dropout_p=dropout,
            softcap=softcap,
            sinks=sinks,
            core_attention_bias=bias,
            device="meta",
        )


def _check(mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Refuses what would be left out, or would have other gradients.

    Raises:
        NotSupportedError: it is asked for.
    """
    why = remedy = ""
    if kwargs.get("output_attentions"):
        why, remedy = "output_attentions=True", "Set attn_implementation='eager'"
    elif kwargs.get("cache") is not None:
        why, remedy = f"a {type(kwargs['cache']).__name__}", "Set attn_implementation='sdpa'"
    elif torch.is_grad_enabled():
        if mask is not None and mask.requires_grad:
            why, remedy = "a mask that needs a gradient", "Set attn_implementation='sdpa'"
        elif mask is not None and hides_queries(mask):
            why = "a mask that hides all keys of a query by large numbers, with gradients enabled"
            remedy = "Pass a bool mask, True where a key is seen, or hide keys by -inf"
    if why:
        raise NotSupportedError.explained(
            "Attention returns no weights, reads keys that it is given, and differentiates "
            "queries, keys, values, sinks and biases of positions alone",
            where=f"attn_implementation={NAME!r}",
            received=why,
            remedy=remedy,
        )
