"""``te.TransformerLayer``: self-attention and a feed-forward block with their residuals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from opfuser import (
    DotProductAttention,
    Dropout,
    Linear,
    QKNorm,
    Residual,
    RotaryEmbedding,
    Sequential,
)
from opfuser.errors import NotSupportedError

from .linear_modules import (
    Device,
    Dtype,
    LayerNormLinearOptions,
    LayerNormMLPOptions,
    Split,
    linear_keywords,
    norm,
    projection,
    split_names,
    split_of,
)
from .options import Options, refuse_delay, refuse_option, refuse_others, values_of
from .packing import DeinterleaveHeads, SwapSequenceAndBatch

# Options of the layer and of its attention that have no counterpart but these values.
_LAYER: Mapping[str, Any] = {
    "layer_type": "encoder",
    "parallel_attention_mlp": False,
    "drop_path": None,
    "softmax_type": "vanilla",
    "tp_size": 1,
}
_CAUSAL = {"causal": True, "causal_bottom_right": True, "no_mask": False}
_LAYOUTS = ("sbhd", "bshd")
# Options by the module there that has them as attributes.
_OF_LAYER = (
    "hidden_dropout self_attn_mask_type window_size apply_residual_connection_post_layernorm "
    "output_layernorm attn_input_format"
).split()
_OF_ATTENTION = (
    "num_attention_heads num_gqa_groups rotary_pos_interleaved qkv_weight_interleaved "
    "qk_norm_before_rope"
).split()
_OF_MLP = (
    "hidden_size ffn_hidden_size bias normalization activation activation_params "
    "fuse_wgrad_accumulation zero_centered_gamma"
).split()


@dataclass(frozen=True, kw_only=True)
class TransformerLayerOptions(Options):
    """Options of ``te.TransformerLayer``: the sequence ``attention``, ``mlp`` and perhaps ``norm``.

    The layer's input and output have the layout ``attn_input_format``; sequence and batch are
    swapped only around attention. Interleaved heads (``qkv_weight_interleaved=True``) are reordered
    after the GEMM, which copies queries, keys and values once.

    Masks, windows and rotary angles, which te's calls pass, belong to operations in opfuser: use
    keywords of :class:`opfuser.DotProductAttention`, its ``window``, and ``rotary_base``.

    Attributes:
        rotary_base: not an argument of te: base of the angles that calls of the layer pass as
            ``rotary_pos_emb``; None if they pass none.

    Raises:
        NotSupportedError: an option has no counterpart, or not with this value.
    """

    te_name: ClassVar[str] = "TransformerLayer"

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    layernorm_epsilon: float = 1e-5
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    kv_channels: int | None = None
    self_attn_mask_type: str = "causal"
    window_size: tuple[int, int] | None = None
    softcap: float = 0.0
    fuse_wgrad_accumulation: bool = False
    apply_residual_connection_post_layernorm: bool = False
    output_layernorm: bool = False
    fuse_qkv_params: bool = False
    rotary_pos_interleaved: bool = False
    zero_centered_gamma: bool = False
    qkv_weight_interleaved: bool = True
    bias: bool = True
    activation: str = "gelu"
    activation_params: Mapping[str, float] | None = None
    normalization: str = "LayerNorm"
    attn_input_format: str = "sbhd"
    qk_norm_type: str | None = None
    qk_norm_eps: float = 1e-6
    qk_norm_before_rope: bool = False
    rotary_base: float | None = None

    def __post_init__(self) -> None:
        remedy = {
            "self_attn_mask_type": "Convert with 'no_mask' or 'causal', and pass mask= to "
            "DotProductAttention by op_kwargs",
            "qk_norm_type": "QKNorm, an RMSNorm of each head, is there",
        }
        before, behind = self._window
        refused = {
            "self_attn_mask_type": self.self_attn_mask_type not in _CAUSAL,
            "window_size": self.self_attn_mask_type == "no_mask" and before != behind,
            "attn_input_format": self.attn_input_format not in _LAYOUTS,
            "qk_norm_type": self.qk_norm_type not in (None, "RMSNorm"),
        }
        for option, wrong in refused.items():
            if wrong:
                value = getattr(self, option)
                refuse_option(type(self).__name__, option, value, remedy.get(option, ""))
        if not self.fuse_qkv_params:  # as there
            object.__setattr__(self, "qkv_weight_interleaved", False)

    @property
    def _key_heads(self) -> int:
        return self.num_gqa_groups or self.num_attention_heads

    @property
    def _head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def _window(self) -> tuple[int, int]:
        """Positions before and behind that are seen; -1: all."""
        before, behind = self.window_size or (-1, -1)
        return (-1, -1) if before < 0 and behind <= 0 else (before, behind)

    @property
    def _split(self) -> Split | None:
        if self.fuse_qkv_params:
            return None
        q, k = (n * self._head_dim for n in (self.num_attention_heads, self._key_heads))
        return ("query", q), ("key", k), ("value", k)

    @property
    def eps(self) -> float:
        """Same as ``layernorm_epsilon``."""
        return self.layernorm_epsilon

    def _mlp(self) -> LayerNormMLPOptions:
        own = {name: getattr(self, name) for name in _OF_MLP}
        return LayerNormMLPOptions(**own, eps=self.layernorm_epsilon)

    def parts(self, device: Device, dtype: Dtype) -> dict[str, nn.Module]:
        attention = self._attention(device, dtype)
        if self.output_layernorm:
            del attention["norm"]
        blocks: dict[str, nn.Module] = {
            "attention": self._residual(attention),
            "mlp": self._residual(self._mlp().parts(device, dtype)),
        }
        if self.output_layernorm:
            blocks["norm"] = norm(self, self.hidden_size, device, dtype)
        return blocks

    def _residual(self, block: dict[str, nn.Module]) -> Sequential:
        """``block`` with a dropout and the sum behind it."""
        split, add = Residual()
        parts: dict[str, nn.Module] = {}
        after_norm = self.apply_residual_connection_post_layernorm and "norm" in block
        if after_norm:
            parts["norm"] = block["norm"]
        parts["residual"] = split
        parts.update({name: op for name, op in block.items() if name not in parts})
        if self.hidden_dropout:
            parts["dropout"] = Dropout(self.hidden_dropout)
        parts["add"] = add
        return Sequential(parts)

    def _attention(self, device: Device, dtype: Dtype) -> dict[str, nn.Module]:
        heads, groups, size = self.num_attention_heads, self._key_heads, self._head_dim
        where: Any = {"device": device, "dtype": dtype}
        how = linear_keywords(self, device, dtype)
        qkv = projection(self.hidden_size, (heads + 2 * groups) * size, self._split, **how)
        parts: dict[str, nn.Module] = {
            "norm": norm(self, self.hidden_size, device, dtype),
            "qkv": qkv,
        }
        if self.attn_input_format == "sbhd":
            parts["batch_first"] = SwapSequenceAndBatch()
        if self.qkv_weight_interleaved:
            parts["heads"] = DeinterleaveHeads(heads, groups)
        parts.update(self._positions(where))
        before, _ = self._window
        parts["attention"] = DotProductAttention(
            heads,
            groups,
            causal=_CAUSAL[self.self_attn_mask_type],
            window=None if before < 0 else before + 1,
            dropout_p=self.attention_dropout,
            softcap=self.softcap or None,
        )
        if self.attn_input_format == "sbhd":
            parts["sequence_first"] = SwapSequenceAndBatch()
        parts["proj"] = Linear(heads * size, self.hidden_size, **how)
        return parts

    def _positions(self, where: Any) -> dict[str, nn.Module]:
        heads, groups, size = self.num_attention_heads, self._key_heads, self._head_dim
        parts: dict[str, nn.Module] = {}
        if self.qk_norm_type is not None:
            parts["qk_norm"] = QKNorm(
                heads, size, num_kv_heads=groups, eps=self.qk_norm_eps, **where
            )
        if self.rotary_base is not None:
            interleaved = self.rotary_pos_interleaved
            rotary = RotaryEmbedding(
                heads, size, num_kv_heads=groups, base=self.rotary_base, interleaved=interleaved
            )
            ordered = [*parts.items(), ("rotary", rotary)]
            parts = dict(ordered if self.qk_norm_before_rope else ordered[::-1])
        return parts

    @property
    def _qkv_name(self) -> str:
        return "self_attention.qkv" if self.output_layernorm else "self_attention.layernorm_qkv"

    def names(self) -> Mapping[str, str]:
        there = self._qkv_name
        own = {
            "attention.norm.weight": f"{there}.layer_norm_weight",
            "attention.norm.bias": f"{there}.layer_norm_bias",
            "attention.qk_norm.q_weight": "self_attention.q_norm.weight",
            "attention.qk_norm.k_weight": "self_attention.k_norm.weight",
            "attention.proj.weight": "self_attention.proj.weight",
            "attention.proj.bias": "self_attention.proj.bias",
            "norm.weight": "layernorm.weight",
            "norm.bias": "layernorm.bias",
        }
        qkv = split_names("attention.qkv", self._split)
        own.update({ours: f"{there}.{theirs}" for ours, theirs in qkv.items()})
        mlp = LayerNormMLPOptions.renamed.items()
        own.update({f"mlp.{ours}": f"layernorm_mlp.{theirs}" for ours, theirs in mlp})
        return own

    @property
    def states(self) -> tuple[str, ...]:
        found = [self._qkv_name, "self_attention.core_attention", "self_attention.proj"]
        if self.qk_norm_type is not None:
            found = ["self_attention.q_norm", "self_attention.k_norm", *found]
        last = ["layernorm"] if self.output_layernorm else []
        return (*found, "layernorm_mlp", *last)

    @classmethod
    def read(cls, module: Any, rotary_base: float | None = None) -> TransformerLayerOptions:
        refuse_others(module, _LAYER)
        mlp = LayerNormMLPOptions.read_inside(module.layernorm_mlp)
        attention = module.self_attention
        core = attention.core_attention
        if getattr(core, "cp_group", None) is not None:
            refuse_option("TransformerLayer", "context parallel group", core.cp_group)
        read = cls(
            **values_of(module, *_OF_LAYER),
            **values_of(attention, *_OF_ATTENTION),
            **{name: getattr(mlp, name) for name in _OF_MLP},
            layernorm_epsilon=mlp.eps,
            attention_dropout=core.attention_dropout,
            kv_channels=attention.hidden_size_per_attention_head,
            softcap=getattr(module, "softcap", 0.0),
            fuse_qkv_params=split_of(_qkv(module)) is None,
            qk_norm_type=_kind(attention.q_norm),
            qk_norm_eps=1e-6 if attention.q_norm is None else attention.q_norm.eps,
            rotary_base=rotary_base,
        )
        read._check_inside(module, mlp)
        return read

    def _check_inside(self, module: Any, mlp: LayerNormMLPOptions) -> None:
        """Refuses a layer in which a module was exchanged for one with other options."""
        attention, qkv = module.self_attention, _qkv(module)
        how = ("bias", "fuse_wgrad_accumulation")
        expected: list[tuple[str, Any, Any]] = [
            ("layernorm_mlp.return_layernorm_output", mlp.return_layernorm_output,
             self.apply_residual_connection_post_layernorm),
            ("layernorm_mlp.checkpoint", mlp.checkpoint, False),
            ("layernorm_mlp.hidden_size", module.layernorm_mlp.fc2_weight.shape[0],
             self.hidden_size),
        ]  # fmt: skip
        for name, linear in (("proj", attention.proj), ("qkv", qkv)):
            refuse_delay(linear)
            got = values_of(linear, *how)
            expected += [(f"{name}.{option}", got[option], getattr(self, option)) for option in how]
        if not self.output_layernorm:
            options = LayerNormLinearOptions._read(qkv)
            names = ("normalization", "eps", "zero_centered_gamma")
            expected += [(f"qkv.{o}", options[o], getattr(self, o)) for o in names]
        if self.qk_norm_type is not None:
            heads = (attention.q_norm, attention.k_norm)
            expected += [("qk_norm.eps", n.eps, self.qk_norm_eps) for n in heads]
            expected += [("qk_norm.zero_centered_gamma", n.zero_centered_gamma, False)
                         for n in heads]  # fmt: skip
        wrong = [f"{name}={got!r}, not {want!r}" for name, got, want in expected if got != want]
        if wrong:
            raise NotSupportedError.explained(
                "The modules of a layer must have the options that the layer was made with",
                where="TransformerLayer",
                received=", ".join(wrong),
                remedy="Convert its modules one by one",
            )

    def te_arguments(self) -> dict[str, Any]:
        if self.rotary_base is not None:
            raise NotSupportedError.explained(
                "A layer there has no rotary positions of its own: calls pass them",
                where=type(self).__name__,
                received=f"rotary_base={self.rotary_base!r}",
                remedy="Build the sequence without rotary_base, and pass rotary_pos_emb to the "
                "layer",
            )
        return {name: value for name, value in vars(self).items() if name != "rotary_base"}


def _qkv(module: Any) -> Any:
    """The projection to queries, keys and values in a layer there, with the norm or without."""
    attention = module.self_attention
    return attention.qkv if module.output_layernorm else attention.layernorm_qkv


def _kind(module: object) -> str | None:
    return None if module is None else type(module).__name__
