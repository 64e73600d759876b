"""``torch.nn.functional.multi_head_attention_forward``, which is one node of a dataflow."""

from __future__ import annotations

import inspect
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .dataflow import Node, Value
from .kept import KeptError
from .operations import Attention, Heads, Linear, Mask, Operation, Transpose
from .replay import indices_like, origin_of, source_of
from .values import Values, computed

__all__ = ["TorchAttentionFound", "torch_attention_of"]

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_UNUSUAL = "bias_k bias_v add_zero_attn use_separate_proj_weight static_k static_v"


class TorchAttentionFound(NamedTuple):
    """Projections and attention in one.

    Attributes:
        operations: first to last.
        source: what queries, keys and values are projections of.
        tokens: batch and sequence of the source.
        once: the node, if it draws random numbers.
        written: the nodes by which masks were made of inputs.
    """

    operations: tuple[Operation, ...]
    source: Value
    tokens: tuple[int, int]
    once: tuple[Node, ...]
    written: tuple[Node, ...]


def torch_attention_of(values: Values, v: Value) -> TorchAttentionFound | None:
    """The self-attention by torch's function that a value is the result of; None if it is none.

    Raises:
        KeptError: it is called with what opfuser's attention does not take.
    """
    result = source_of(values, v)
    node = None if result is None else result.node
    if result is None or node is None or node.op != "multi_head_attention_forward":
        return None
    if result is not node.results[0]:
        raise KeptError(computed(result, "reads the weights of attention by"))
    given = _SIGNATURE.bind(*node.args, **node.kwargs)
    given.apply_defaults()
    args = given.arguments
    for name in _UNUSUAL.split():
        if args[name] is not None and args[name] is not False:
            raise KeptError(computed(result, f"passes {name} to"))
    operands = [args[name] for name in ("query", "key", "value")]
    source, *others = [source_of(values, operand) for operand in operands]
    if source is None or any(other is not source for other in others):
        raise KeptError(computed(result, "attends to another input by"))
    orders = {_order_of(operand, source) for operand in operands} | {_order_of(v, result)}
    if len(orders) > 1:
        raise KeptError(computed(result, "rearranges what it passes to"))
    (batch_first,) = orders
    p = float(args["dropout_p"]) if args["training"] else 0.0
    width, heads = source.shape[-1], int(args["num_heads"])
    size = width // heads
    masks, written, causal = _masks_of(values, args)
    attend = Attention(Heads(heads, heads, size, size), size**-0.5, causal, p, None, masks)
    packed = _linear(values, args["in_proj_weight"], args["in_proj_bias"])
    out = _linear(values, args["out_proj_weight"], args["out_proj_bias"])
    operations: tuple[Operation, ...] = (packed, attend, out)
    if not batch_first:
        operations = (Transpose(), *operations, Transpose())
    tokens = source.shape[0], source.shape[1]
    return TorchAttentionFound(operations, source, tokens, (node,) if p else (), written)


def _order_of(v: Value, source: Value) -> bool:
    """Whether a value has the first two dimensions of its source exchanged."""
    places = indices_like(source).long()
    found: Tensor = origin_of(v, source) if v is not source else places
    if len(v.shape) == 3 and torch.equal(found, places.transpose(0, 1)):
        return True
    if len(v.shape) == 3 and torch.equal(found, places):
        return False
    raise KeptError(computed(v, "rearranges the input of attention by"))


def _masks_of(
    values: Values, args: dict[str, Any]
) -> tuple[tuple[Mask, ...], tuple[Node, ...], bool]:
    """The masks, the nodes by which they were made of inputs, and whether causality is one."""
    mask, padding = args["attn_mask"], args["key_padding_mask"]
    causal = bool(args["is_causal"]) and padding is None and not args["need_weights"]
    given = [] if mask is None else [(mask, False)]
    given += [] if padding is None else [(padding, True)]
    masks, written = [], []
    for made, of_keys in given:
        v, hides = made, made.meta.dtype == torch.bool
        if made.node is not None and made.node.op == "masked_fill_":
            zeros, v, number = made.node.args
            hides = zeros.node is not None and zeros.node.op == "zeros_like" and number == -math.inf
            if not hides or zeros.node.args[:1] != (v,) or v.meta.dtype != torch.bool:
                raise KeptError(computed(made, "makes a mask of attention by"))
            written.append(made.node)
        if causal:  # then it is said to be what the mask hides
            continue
        if v.origin != "input" or len(v.shape) != 2 or v.requires_grad:
            raise KeptError(computed(v, "has a mask of attention that"))
        masks.append(Mask(values.dataflow.inputs.index(v), v.shape, hides, of_keys))
    return tuple(masks), tuple(written), causal


def _linear(values: Values, weight: Value, bias: Value | None) -> Linear:
    if weight.origin != "parameter" or (bias is not None and bias.origin != "parameter"):
        raise KeptError(computed(weight, "projects by a weight that is no parameter:"))
    out_features, in_features = weight.shape
    return Linear(weight.name, None if bias is None else bias.name, in_features, out_features)
