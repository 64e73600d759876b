"""Layers of ``torch.nn`` that compute through sequences of operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..basic import AddExtraInput, Dropout, LayerNorm
from ..basic.activation import GELU, ReLU, SiLU
from ..change_tracking import has_hooks, replaces_forward
from ..context import autocast_dtype
from ..linear import Linear
from ..op import BasicOperation
from ..quantization.region import active_recipe
from ..sequential import Residual, Sequential

__all__ = ["EncoderLayer", "encoder_refusal"]

_ACTIVATIONS: dict[Any, Callable[[], BasicOperation]] = {
    F.relu: ReLU,
    F.gelu: lambda: GELU("none"),
    F.silu: SiLU,
}
_LINEAR = type(nn.MultiheadAttention(1, 1, device="meta").out_proj)  # a private subclass
_PARTS: tuple[tuple[str, type[nn.Module]], ...] = (
    ("self_attn", nn.MultiheadAttention),
    ("linear1", nn.Linear),
    ("linear2", nn.Linear),
    ("norm1", nn.LayerNorm),
    ("norm2", nn.LayerNorm),
    ("dropout", nn.Dropout),
    ("dropout1", nn.Dropout),
    ("dropout2", nn.Dropout),
)


class _Options(NamedTuple):
    """What the sequences of a layer are made with."""

    activation: Any
    norm_first: bool
    num_heads: int
    eps: tuple[float, float]
    dropout: tuple[float, float, float]
    sizes: tuple[int, ...]
    without_bias: tuple[bool, ...]
    training: bool


class _Fused(NamedTuple):
    """The sequences before and behind the attention, and the operations that hold parameters."""

    options: _Options
    head: Sequential
    tail: Sequential
    linears: tuple[Linear, ...]
    norms: tuple[LayerNorm, ...]


def encoder_refusal(layer: nn.TransformerEncoderLayer) -> str:
    """Why a layer stays as it is, or an empty string."""
    if _activation(layer.activation) is None:
        return f"its activation {_name(layer.activation)} is no operation"
    return _unusual(layer)


def _name(function: Any) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


def _activation(function: Any) -> BasicOperation | None:
    if type(function) is nn.GELU:
        return GELU(function.approximate)
    if type(function) in (nn.ReLU, nn.SiLU):
        return ReLU() if type(function) is nn.ReLU else SiLU()
    make = None if isinstance(function, nn.Module) else _ACTIVATIONS.get(function)
    return None if make is None else make()


def _unusual(layer: nn.TransformerEncoderLayer) -> str:
    """What of a layer its own forward has to call; empty if its parameters are all that it is."""
    modules = layer._modules
    for name, kind in _PARTS:
        why = _unlike(modules.get(name), kind, layer.training)
        if why:
            return f"{name} {why}"
    attention: Any = modules["self_attn"]
    why = _unlike(attention._modules.get("out_proj"), _LINEAR, layer.training)
    if why:
        return f"self_attn.out_proj {why}"
    if attention._parameters.get("in_proj_weight") is None:
        return "self_attn has separate projections"
    if attention.bias_k is not None or attention.bias_v is not None or attention.add_zero_attn:
        return "self_attn appends keys"
    activation = modules.get("activation")
    return "" if activation is None or not has_hooks(activation) else "activation carries hooks"


def _unlike(module: nn.Module | None, kind: type[nn.Module], training: bool) -> str:
    if type(module) is not kind:
        return f"is a {type(module).__name__}"
    if has_hooks(module) or replaces_forward(module):
        return "carries hooks or a forward of its own"
    return "" if module.training is training else "is in another mode than the layer"


class EncoderLayer(nn.TransformerEncoderLayer):
    """``torch.nn.TransformerEncoderLayer``, computed by two sequences of operations.

    One ends in the projection of queries, keys and values, the other begins behind the attention,
    which is torch's, with masks and dropout as there. The modules inside only hold the parameters.
    :func:`opfuser.from_torch` makes it of torch's layer; what that accepts, this does. torch's own
    forward runs where it has one kernel for the whole layer, without grad, and under autocast where
    norms come last, which here would round the residual stream; but not if a recipe of quantised
    compute is active. It also runs for nested and unbatched inputs, under ``torch.compile``, and
    where a module inside was replaced, parametrised, hooked or switched to another mode since.
    """

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """The output, of the shape of ``src``; arguments as in torch.

        Args:
            src: (batch, sequence, features), or (sequence, batch, features) without
                ``batch_first``.
            src_mask: (sequence, sequence), or one for each head of the batch: True where a query
                may not attend, or what to add to the scores.
            src_key_padding_mask: (batch, sequence), likewise, of the keys.
            is_causal: that ``src_mask`` is the causal mask.
        """
        without_mask = is_causal and src_mask is None  # torch refuses that
        left = without_mask or self._is_left_to_torch(src)
        fused = None if left else self._with_parameters_of_now()
        if fused is None:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        causal = is_causal and src_key_padding_mask is None
        mask = None
        if not causal and (src_mask is not None or src_key_padding_mask is not None):
            mask = self._mask(src, src_mask, src_key_padding_mask)
        return fused.tail(self._attend(fused.head(src), mask, causal), src)  # type: ignore[no-any-return]

    def _is_left_to_torch(self, src: Tensor) -> bool:
        if torch.compiler.is_compiling() or src.dim() != 3 or src.is_nested:
            return True
        if active_recipe() is None:
            if not torch.is_grad_enabled():
                return True  # it has one kernel for the whole layer
            if not self.norm_first and autocast_dtype(src.device) is not None:
                return True  # where norms round the residual stream here, but not there
        return bool(_unusual(self))

    def _attend(self, qkv: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """The values that each position attends to, side by side for all heads."""
        attention = self.self_attn
        heads = qkv.unflatten(-1, (3, attention.num_heads, -1))
        first = attention.batch_first
        q, k, v = heads.permute(2, 0, 3, 1, 4) if first else heads.permute(2, 1, 3, 0, 4)
        p = attention.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, p, causal)
        return (y.transpose(1, 2) if first else y.permute(2, 0, 1, 3)).flatten(2)

    def _mask(self, src: Tensor, mask: Tensor | None, padding: Tensor | None) -> Tensor:
        """What is added to the scores, broadcastable to (batch, heads, queries, keys)."""
        batch = src.shape[0 if self.self_attn.batch_first else 1]
        total = None
        if mask is not None:
            total = _additive(mask, src.dtype)
            if mask.dim() == 3:
                total = total.view(-1, self.self_attn.num_heads, *mask.shape[1:])
        if padding is not None:
            keys = _additive(padding, src.dtype).view(batch, 1, 1, -1)
            total = keys if total is None else total + keys
        assert total is not None
        return total

    def _with_parameters_of_now(self) -> _Fused | None:
        modules: dict[str, Any] = self._modules  # without nn.Module.__getattr__, 10 us in all
        attention, norms = modules["self_attn"], (modules["norm1"], modules["norm2"])
        linears = attention._modules["out_proj"], modules["linear1"], modules["linear2"]
        packed = attention._parameters
        activation = modules.get("activation") or self.activation
        options = _Options(
            (activation, getattr(activation, "approximate", None)),
            self.norm_first,
            attention.num_heads,
            (norms[0].eps, norms[1].eps),
            (modules["dropout"].p, modules["dropout1"].p, modules["dropout2"].p),
            tuple(linears[1]._parameters["weight"].shape),
            (packed["in_proj_bias"] is None, *[m._parameters["bias"] is None for m in linears]),
            self.training,
        )
        fused: _Fused | None = self.__dict__.get("_fused")
        if fused is None or fused.options != options:
            fused = self.__dict__["_fused"] = self._make(options)
            if fused is None:
                return None
        # Written past __setattr__, which would count as a change of the operations.
        into = fused.linears[0]._parameters
        into["weight"], into["bias"] = packed["in_proj_weight"], packed["in_proj_bias"]
        for ours, theirs in zip((*fused.linears[1:], *fused.norms), (*linears, *norms)):
            ours._parameters.update(theirs._parameters)
        return fused

    def _make(self, options: _Options) -> _Fused | None:
        hidden, width = options.sizes
        sizes = [(width, 3 * width), (width, width), (width, hidden), (hidden, width)]
        made = zip(sizes, options.without_bias)
        linears = [Linear(*size, bias=not bare, device="meta") for size, bare in made]
        norms = [LayerNorm(width, eps=eps, device="meta") for eps in options.eps]
        inner, first, second = [
            [Dropout(p)] if p and options.training else [] for p in options.dropout
        ]
        activation = _activation(options.activation[0])
        if activation is None:  # it was replaced
            return None
        feed = [linears[2], activation, *inner, linears[3], *second]
        head: list[nn.Module] = [linears[0]]
        tail: list[nn.Module] = [linears[1], *first, AddExtraInput()]
        if options.norm_first:
            head.insert(0, norms[0])
            tail.append(Residual(norms[1], *feed))
        else:
            tail += [norms[0], Residual(*feed), norms[1]]
        return _Fused(options, Sequential(*head), Sequential(*tail), tuple(linears), tuple(norms))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_fused"}


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to the scores; True is where nothing is attended to."""
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
