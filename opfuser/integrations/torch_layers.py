"""Layers of ``torch.nn`` that compute through sequences of operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..basic import AddExtraInput, Dropout, LayerNorm, MakeExtraOutput
from ..basic.activation import GELU, ReLU, SiLU
from ..change_tracking import has_hooks, replaces_forward
from ..context import autocast_dtype
from ..linear import Linear
from ..op import BasicOperation
from ..quantization.region import active_recipe
from ..sequential import Residual, Sequential

__all__ = ["LAYERS", "DecoderLayer", "EncoderLayer", "layer_refusal", "patched_methods"]

_ACTIVATIONS: list[tuple[Any, Callable[[], BasicOperation]]] = [
    (F.relu, ReLU),
    (F.gelu, lambda: GELU("none")),
    (F.silu, SiLU),
]


class _Options(NamedTuple):
    """What the sequences of a layer are made with."""

    activation: Any
    norm_first: bool
    num_heads: int
    eps: tuple[float, ...]
    dropout: tuple[float, ...]
    sizes: tuple[int, ...]
    without_bias: tuple[bool, ...]
    training: bool


class _Pieces(NamedTuple):
    """What the sequences of a layer are made of."""

    packed: Linear
    out: Linear
    norms: tuple[LayerNorm, ...]
    dropouts: tuple[list[nn.Module], ...]
    """Behind each sublayer; empty where nothing is dropped."""
    feed: list[nn.Module]


class _Fused(NamedTuple):
    """The sequences around the attentions, in order, and the operations that hold parameters."""

    options: _Options
    sequences: tuple[Sequential, ...]
    linears: tuple[Linear, ...]
    norms: tuple[LayerNorm, ...]


class _Layer(nn.Module):
    """Abstract. A layer with self-attention, whose parameters sequences of operations read.

    Class attributes:
        of_torch: the class that it extends.
        sublayers: how many sums the residual stream goes through.
        one_kernel: whether torch has a kernel for the whole layer where no gradient is needed.
    """

    of_torch: ClassVar[type[nn.Module]]
    sublayers: ClassVar[int]
    one_kernel: ClassVar[bool]

    self_attn: nn.MultiheadAttention
    norm_first: bool
    activation: Any

    @classmethod
    def build(cls, pieces: _Pieces, norm_first: bool) -> tuple[list[nn.Module], ...]:
        """The operations of each sequence."""
        raise NotImplementedError

    def _sequences(self, x: Tensor, mask: Tensor | None, is_causal: bool) -> tuple[Any, ...] | None:
        """Those of the call, or None if torch's own forward is to run."""
        if torch.compiler.is_compiling() or x.dim() != 3 or x.is_nested:
            return None
        if is_causal and mask is None:  # torch refuses that
            return None
        if active_recipe() is None:
            if self.one_kernel and not self._needs_grad(x):
                return None
            if not self.norm_first and autocast_dtype(x.device) is not None:
                return None  # as norms round the residual stream here, and not there
        if _unusual(self, type(self)):
            return None
        fused = self._with_parameters_of_now()
        return None if fused is None else fused.sequences

    def _needs_grad(self, x: Tensor) -> bool:
        """Whether torch would not take its kernel for the whole layer, whatever else it asks."""
        if not torch.is_grad_enabled():
            return False
        return self.training or x.requires_grad or any(p.requires_grad for p in self.parameters())

    def _attend(
        self, qkv: Tensor, mask: Tensor | None, padding: Tensor | None, is_causal: bool
    ) -> Tensor:
        """The values that each position attends to, side by side for all heads."""
        attention = self.self_attn
        heads = qkv.unflatten(-1, (3, attention.num_heads, -1))
        first = attention.batch_first
        q, k, v = heads.permute(2, 0, 3, 1, 4) if first else heads.permute(2, 1, 3, 0, 4)
        is_causal = is_causal and padding is None
        added = None if is_causal else _added(mask, padding, q)
        p = attention.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, added, p, is_causal)
        return (y.transpose(1, 2) if first else y.permute(2, 0, 1, 3)).flatten(2)

    def _with_parameters_of_now(self) -> _Fused | None:
        modules: dict[str, Any] = self._modules  # without nn.Module.__getattr__, 10 us in all
        attention = modules["self_attn"]
        linears = attention._modules["out_proj"], modules["linear1"], modules["linear2"]
        norms = [modules[f"norm{n + 1}"] for n in range(self.sublayers)]
        packed = attention._parameters
        activation = self.activation  # torch's copies of a decoder layer have one before the module
        options = _Options(
            (activation, getattr(activation, "approximate", None)),
            self.norm_first,
            attention.num_heads,
            tuple([norm.eps for norm in norms]),
            (modules["dropout"].p, *[modules[f"dropout{n + 1}"].p for n in range(self.sublayers)]),
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
        activation = _activation(options.activation[0])
        if activation is None:  # it was replaced
            return None
        hidden, width = options.sizes
        sizes = [(width, 3 * width), (width, width), (width, hidden), (hidden, width)]
        made = zip(sizes, options.without_bias)
        linears = tuple([Linear(*size, bias=not bare, device="meta") for size, bare in made])
        norms = tuple([LayerNorm(width, eps=eps, device="meta") for eps in options.eps])
        dropouts: list[list[nn.Module]] = [
            [Dropout(p)] if p and options.training else [] for p in options.dropout
        ]
        feed = [linears[2], activation, *dropouts[0], linears[3], *dropouts[-1]]
        pieces = _Pieces(linears[0], linears[1], norms, tuple(dropouts[1:-1]), feed)
        sequences = tuple([Sequential(*ops) for ops in self.build(pieces, options.norm_first)])
        return _Fused(options, sequences, linears, norms)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_fused"}


class EncoderLayer(_Layer, nn.TransformerEncoderLayer):
    """``torch.nn.TransformerEncoderLayer``, computed by two sequences of operations.

    One ends in the projection of queries, keys and values, the other begins behind the attention,
    which is torch's, with masks and dropout as there. The modules inside only hold the parameters.
    :func:`opfuser.from_torch` makes it of torch's layer; what that accepts, this does. torch's own
    forward runs where it may take its kernel for the whole layer, without grad or in evaluation
    where nothing requires grad, and under autocast where norms come last, which here would round
    the residual stream; but not if a recipe of quantised compute is active. It also runs for nested
    and unbatched inputs, under ``torch.compile``, and where a module, a method or a parameter
    inside was replaced, or a module parametrised, hooked or switched to another mode since.
    """

    of_torch = nn.TransformerEncoderLayer
    sublayers = 2
    one_kernel = True

    @classmethod
    def build(cls, pieces: _Pieces, norm_first: bool) -> tuple[list[nn.Module], ...]:
        packed, out, (norm1, norm2), (dropout1,), feed = pieces
        added = [out, *dropout1, AddExtraInput()]
        if norm_first:
            return [norm1, packed], [*added, Residual(norm2, *feed)]
        return [packed], [*added, norm1, Residual(*feed), norm2]

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
        sequences = self._sequences(src, src_mask, is_causal)
        if sequences is None:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        head, tail = sequences
        y: Tensor = tail(self._attend(head(src), src_mask, src_key_padding_mask, is_causal), src)
        return y


class DecoderLayer(_Layer, nn.TransformerDecoderLayer):
    """``torch.nn.TransformerDecoderLayer``, computed by three sequences of operations.

    As :class:`EncoderLayer`. The cross-attention stays torch's module with its projections, which
    are slices of one parameter; sequences end before and begin behind it.
    """

    of_torch = nn.TransformerDecoderLayer
    sublayers = 3
    one_kernel = False

    @classmethod
    def build(cls, pieces: _Pieces, norm_first: bool) -> tuple[list[nn.Module], ...]:
        packed, out, (norm1, norm2, norm3), (dropout1, dropout2), feed = pieces
        added, crossed = [out, *dropout1, AddExtraInput()], [*dropout2, AddExtraInput()]
        if norm_first:
            middle = [*added, MakeExtraOutput(), norm2]
            return [norm1, packed], middle, [*crossed, Residual(norm3, *feed)]
        middle = [*added, norm1, MakeExtraOutput()]
        return [packed], middle, [*crossed, norm2, Residual(*feed), norm3]

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """The output, of the shape of ``tgt``; arguments as in torch.

        Args:
            tgt: (batch, sequence, features), or (sequence, batch, features) without
                ``batch_first``.
            memory: what cross-attention attends to, likewise.
            tgt_mask: of self-attention, (sequence, sequence), or one for each head of the batch:
                True where a query may not attend, or what to add to the scores.
            memory_mask: of cross-attention, likewise.
            tgt_key_padding_mask: (batch, sequence), likewise, of the keys of self-attention.
            memory_key_padding_mask: of those of cross-attention.
            tgt_is_causal: that ``tgt_mask`` is the causal mask.
            memory_is_causal: that ``memory_mask`` is.
        """
        sequences = self._sequences(tgt, tgt_mask, tgt_is_causal)
        if sequences is None:
            masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
            return super().forward(tgt, memory, *masks, tgt_is_causal, memory_is_causal)
        head, middle, tail = sequences
        y = self._attend(head(tgt), tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        query, x = middle(y, tgt)
        crossed, _ = self.multihead_attn(
            query,
            memory,
            memory,
            attn_mask=memory_mask,
            key_padding_mask=memory_key_padding_mask,
            is_causal=memory_is_causal,
            need_weights=False,
        )
        out: Tensor = tail(crossed, x)
        return out


LAYERS: dict[type[nn.Module], type[_Layer]] = {
    cls.of_torch: cls for cls in (EncoderLayer, DecoderLayer)
}


def layer_refusal(layer: Any) -> str:
    """Why a layer of torch stays as it is, or an empty string."""
    if _activation(layer.activation) is None:
        name = getattr(layer.activation, "__name__", None) or type(layer.activation).__name__
        return f"its activation {name} is no operation"
    cls = type(layer)
    for kind in (cls, nn.MultiheadAttention, *dict(_PARTS[LAYERS[cls].sublayers]).values()):
        patched = patched_methods(kind)
        if patched:
            return f"{patched[0]} of torch.nn.{kind.__name__} was replaced"
    return _unusual(layer, LAYERS[cls])


def patched_methods(cls: type[nn.Module]) -> list[str]:
    """What of a class of torch computes, but is a function of somebody else."""
    names = ("forward", "_sa_block", "_mha_block", "_ff_block")
    functions = {name: getattr(cls, name) for name in names if hasattr(cls, name)}
    homes = {n: getattr(f, "__globals__", {}).get("__name__", "") for n, f in functions.items()}
    return [name for name, home in homes.items() if not str(home).startswith("torch.nn.modules.")]


def _activation(function: Any) -> BasicOperation | None:
    if type(function) is nn.GELU:
        return GELU(function.approximate)
    if type(function) in (nn.ReLU, nn.SiLU):
        return ReLU() if type(function) is nn.ReLU else SiLU()
    # By identity, as what is called need not be hashable.
    make = next((make for known, make in _ACTIVATIONS if known is function), None)
    return None if make is None else make()


def _unusual(layer: Any, cls: type[_Layer]) -> str:
    """What of a layer its own forward has to call; empty if its parameters are all that it is."""
    modules: dict[str, Any] = layer._modules
    if not layer.__dict__.keys().isdisjoint(_READ[cls.of_torch]):
        return _in_front("it", layer, cls.of_torch)
    attention = modules.get("self_attn")
    if type(attention) is not nn.MultiheadAttention:
        return f"self_attn is a {type(attention).__name__}"
    parts: list[tuple[str, Any, type[nn.Module]]] = [
        ("self_attn", attention, nn.MultiheadAttention),
        ("self_attn.out_proj", attention._modules.get("out_proj"), NonDynamicallyQuantizableLinear),
    ]
    parts += [(name, modules.get(name), kind) for name, kind in _PARTS[cls.sublayers]]
    for name, module, kind in parts:
        if type(module) is not kind:
            return f"{name} is a {type(module).__name__}"
        if has_hooks(module) or replaces_forward(module):
            return f"{name} carries hooks or a forward of its own"
        if not module.__dict__.keys().isdisjoint(_READ[kind]):
            return _in_front(name, module, kind)
        if module.training is not layer.training:
            return f"{name} is in another mode than the layer"
        if kind in _WEIGHTED and module._parameters.get("weight") is None:
            return f"{name} has no parameter weight"
        if kind is nn.LayerNorm and len(module.normalized_shape) != 1:  # type: ignore[arg-type]
            return f"{name} normalises more than the last dimension"
    return _unusual_attention(attention) or _unusual_activation(layer.activation)


def _unusual_attention(attention: Any) -> str:
    packed = attention._qkv_same_embed_dim
    if not packed or attention._parameters.get("in_proj_weight") is None:
        return "self_attn has separate projections"
    if attention.bias_k is not None or attention.bias_v is not None or attention.add_zero_attn:
        return "self_attn appends keys"
    return ""


def _unusual_activation(activation: Any) -> str:
    if not isinstance(activation, nn.Module):
        return ""
    if has_hooks(activation) or replaces_forward(activation):
        return "activation carries hooks or a forward of its own"
    own = "_call_impl" in activation.__dict__
    return _in_front("activation", activation, nn.Dropout) if own else ""


def _in_front(name: str, module: nn.Module, kind: type[nn.Module]) -> str:
    own = [attribute for attribute in module.__dict__ if attribute in _READ[kind]]
    return f"{name} has {own[0]} as an attribute of its own"


def _parts(sublayers: int) -> list[tuple[str, type[nn.Module]]]:
    parts: list[tuple[str, type[nn.Module]]] = [
        ("linear1", nn.Linear), ("linear2", nn.Linear), ("dropout", nn.Dropout)
    ]  # fmt: skip
    for n in range(1, sublayers + 1):
        parts += [(f"norm{n}", nn.LayerNorm), (f"dropout{n}", nn.Dropout)]
    return parts


_WEIGHTS = frozenset({"_call_impl", "bias", "weight"})
_OF_LAYER = {"_call_impl", "_ff_block", "_mha_block", "_sa_block", "multihead_attn", "self_attn"}
# Parameters, modules and methods by which modules compute. An attribute of the instance of such a
# name would stand in front of them.
_READ: dict[type[nn.Module], frozenset[str]] = {
    nn.Dropout: frozenset({"_call_impl"}),
    nn.LayerNorm: _WEIGHTS,
    nn.Linear: _WEIGHTS,
    NonDynamicallyQuantizableLinear: _WEIGHTS,
    nn.MultiheadAttention: frozenset({"_call_impl", "in_proj_bias", "in_proj_weight", "out_proj"}),
}
_READ.update(
    {t: frozenset(_OF_LAYER | {n for n, _ in _parts(c.sublayers)}) for t, c in LAYERS.items()}
)
_PARTS = {cls.sublayers: _parts(cls.sublayers) for cls in LAYERS.values()}
_WEIGHTED = frozenset({nn.Linear, NonDynamicallyQuantizableLinear, nn.LayerNorm})


def _added(mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
    """What is added to scores, broadcastable to (batch, heads, queries, keys).

    Args:
        mask: (queries, keys), or (batch * heads, queries, keys).
        padding: of keys, (batch, keys).
        q: queries (batch, heads, queries, features).
    """
    total = None
    if mask is not None:
        total = _additive(mask, q.dtype)
        total = total.view(-1, q.shape[1], *mask.shape[1:]) if mask.dim() == 3 else total
    if padding is not None:
        keys = _additive(padding, q.dtype).view(q.shape[0], 1, 1, -1)
        total = keys if total is None else total + keys
    return total


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to the scores; True is where nothing is attended to."""
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
