"""What a decoder language model is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from opfuser import RopeScaling
from opfuser.counterparts import ACTIVATIONS, NORMS
from opfuser.errors import ArgumentError
from opfuser.quantization.region import check_recipe
from opfuser.recipe import Recipe

from .hf_config import decoder_arguments
from .moe import MoEConfig

_SIZES = "vocab_size dim num_layers num_heads num_kv_heads ffn_dim head_dim learned_positions"
_OF_EXPERTS = ["moe", "moe_layers", "router_aux_loss_coef"]
_PROBABILITIES = "embedding_dropout residual_dropout attention_dropout"


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder, what its blocks consist of, and where its parameters live.

    The defaults describe a model of the Llama family. :meth:`from_hf` converts a configuration of
    Hugging Face transformers.

    Attributes:
        vocab_size: rows of the token table, and classes of the head.
        dim: features of a token between the blocks.
        num_layers: pairs of an attention block and a feed-forward block.
        num_heads: query heads.
        num_kv_heads: key heads, and as many value heads; None is ``num_heads``.
        ffn_dim: features inside the feed-forward block; None is 8/3 ``dim``, rounded up to a
            multiple of 64 (Shazeer, "GLU Variants Improve Transformer", 2020).
        rope_base: base of the rotary frequencies.
        norm_eps: added to the mean square, or the variance, in every norm.
        tied_head: whether the head's weight is the token table: the same parameter, also after
            moving off the meta device.
        init_std: standard deviation of the initial weights; divided by ``sqrt(2 num_layers)`` where
            a block adds to the residual stream (Radford et al., GPT-2, 2019).
        device: of the parameters; None is torch's default.
        dtype: of the parameters; None is torch's default.
        recompute: None; or ``"mlp"``: feed-forward blocks without experts save only their input,
            and recompute their first linear operation in backward, which adds two ninths to their
            GEMM work.
        recipe: of :mod:`opfuser.recipe`, for the layers' linear operations, regardless of the
            region. It becomes the recipe of the model's Sequential, so a call opens one region.
            None follows :class:`opfuser.autocast`. Operations whose features do not fit the
            recipe's blocks stay in high precision, as the plan says: choose multiples of 128. The
            head stays in high precision with every recipe.
        head_dim: features of a head, an even number with rotary positions; None is
            ``dim / num_heads``.
        qkv_bias, out_bias, mlp_bias: whether the first linear of attention, its last one, and both
            of the feed-forward block have a bias.
        qk_norm: whether every query and key head is normalized before it is rotated.
        norm: ``"rms"`` or ``"layer"``; layer norms have a bias.
        zero_centered_gamma: whether norms scale by ``1 + weight``.
        causal: whether a position attends only to itself and to earlier ones.
        norm_first: whether blocks normalize their input. Otherwise they normalize the residual sum
            (Vaswani et al., 2017), and there is no norm before the head.
        post_norms: whether there is also a norm after each block, before its residual sum.
        activation: of the feed-forward block: ``"swiglu"``, ``"geglu"`` (gated, two weights wide),
            ``"gelu"`` (exact), ``"gelu_tanh"``, ``"relu"``, ``"silu"``, or another name in
            ``ACTIVATIONS`` of ``opfuser.counterparts``.
        learned_positions: rows of a table of positions that is added to the tokens, instead of
            rotary positions; None means rotary positions.
        embedding_scale: factor of the rows of the token table, rounded to their dtype as in Gemma;
            None means 1.
        padding_idx: a row of the token table that gets no gradient as an embedding; None means
            none.
        rope_scaling: of the rotary frequencies; None means no scaling.
        local_rope_base: base in layers with a window, which then have no scaling; None means
            ``rope_base``, with scaling.
        window: a position attends to this many positions, itself and those before it; None means
            all. A sequence has one for each layer.
        attention_scale: of the scores; None is ``head_dim ** -0.5``.
        attention_softcap: c of ``c tanh(scores / c)``; None is no cap.
        logit_softcap: c of ``c tanh(logits / c)``; None is no cap.
        embedding_dropout: probability of dropout after the embedding.
        residual_dropout: probability of dropout before every residual sum.
        attention_dropout: probability of dropping a weight of attention.
        moe: of the feed-forward blocks with experts; None means no experts. Its ``dim`` is that of
            the model; ``init_std``, ``device``, ``dtype``, ``recipe`` and the norm before the
            experts are those of the model. Its extra outputs are returned in the order of the
            layers, except for ``aux_loss``: :func:`decoder_lm` returns one last extra output, the
            load-balancing loss of all layers together.
        moe_layers: numbers of the layers with experts; None means all.
        router_aux_loss_coef: factor of the load-balancing loss of all layers together, which
            :func:`decoder_lm` adds to its loss; see :class:`opfuser.LoadBalancingLoss`. Its
            channels reach into layers that have hooks, such as after ``fully_shard``, but not into
            other modules around layers, such as ``checkpoint_wrapper``.

    Raises:
        ArgumentError: a size is not positive, numbers of heads or features do not divide as needed,
            a name is not one of the above, a probability is outside of [0, 1], layers or losses of
            experts do not match the other fields, or ``recipe`` is neither None nor a recipe.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    ffn_dim: int | None = None
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    tied_head: bool = True
    init_std: float = 0.02
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    recompute: str | None = None
    recipe: Recipe | None = None
    _: KW_ONLY
    head_dim: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm: str = "rms"
    zero_centered_gamma: bool = False
    causal: bool = True
    norm_first: bool = True
    post_norms: bool = False
    activation: str = "swiglu"
    learned_positions: int | None = None
    embedding_scale: float | None = None
    padding_idx: int | None = None
    rope_scaling: RopeScaling | None = None
    local_rope_base: float | None = None
    window: int | Sequence[int | None] | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0
    moe: MoEConfig | None = None
    moe_layers: Sequence[int] | None = None
    router_aux_loss_coef: float = 0.0

    def __post_init__(self) -> None:
        wrong = self._wrong()
        if wrong is not None:
            invariant, names = wrong
            received = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
            raise ArgumentError.explained(invariant, where="DecoderConfig", received=received)
        if self.recipe is not None:
            check_recipe(self.recipe, "DecoderConfig")

    def _wrong(self) -> tuple[str, list[str]] | None:
        """The first invariant that does not hold, and the attributes that break it."""
        sizes = {name: getattr(self, name) for name in _SIZES.split()}
        wrong = [name for name, size in sizes.items() if size is not None and size < 1]
        if wrong:
            return "Sizes must be positive", wrong
        rotary = self.learned_positions is None
        if self.head_dim is not None and rotary and self.head_dim % 2:
            return "head_dim must be even for rotary positions", ["head_dim"]
        if self.head_dim is None and self.dim % (self.num_heads * (2 if rotary else 1)):
            even = ", and even for each head" if rotary else ""
            return f"dim must be a multiple of num_heads{even}", ["dim", "num_heads"]
        if self.num_heads % self.key_heads:
            return "num_heads must be a multiple of num_kv_heads", ["num_heads", "num_kv_heads"]
        if self.post_norms and not self.norm_first:
            return "post_norms is for blocks with norm_first", ["post_norms", "norm_first"]
        if len(self.windows) != self.num_layers:
            return "There is one window, or one for each layer", ["window", "num_layers"]
        if any(window is not None and window < 1 for window in self.windows):
            return "Windows must be positive", ["window"]
        caps = [n for n in ("attention_softcap", "logit_softcap") if (getattr(self, n) or 1) <= 0]
        if caps:
            return "Caps must be positive", caps
        choices = {
            "recompute": (None, "mlp"),
            "norm": tuple(NORMS),
            "activation": tuple(ACTIVATIONS),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                return f"{name} must be {' or '.join(map(repr, allowed))}", [name]
        wrong = [name for name in _PROBABILITIES.split() if not 0 <= getattr(self, name) <= 1]
        if wrong:
            return "Probabilities must lie in [0, 1]", wrong
        return self._wrong_of_experts()

    def _wrong_of_experts(self) -> tuple[str, list[str]] | None:
        if self.moe is None and (self.moe_layers is not None or self.router_aux_loss_coef):
            return "Fields about experts need moe", _OF_EXPERTS
        if self.moe is not None and self.moe.dim != self.dim:
            return "moe.dim must be dim", ["moe", "dim"]
        if not {*(self.moe_layers or ())} <= {*range(self.num_layers)}:
            return "moe_layers must be numbers of layers", ["moe_layers", "num_layers"]
        return None

    @classmethod
    def from_hf(cls, config: Any, **changes: Any) -> DecoderConfig:
        """Converts a configuration of Hugging Face transformers.

        ``opfuser.models.load_hf`` then loads its weights. transformers need not be installed: only
        attributes are read.

        Args:
            config: a ``PreTrainedConfig``, or an object with its attributes; of ``model_type``
                gemma, gemma2, gemma3_text, gpt2, llama, mistral, mixtral, qwen2, qwen2_moe, qwen3
                or qwen3_moe.
            **changes: attributes of the result, such as ``dtype``, which is not read from the
                configuration. ``router_aux_loss_coef`` is read only if the configuration has
                ``output_router_logits``, because transformers only then adds the loss.

        Raises:
            NotSupportedError: a model of another type, or with a feature that this class has no
                attribute for.
        """
        return cls(**{**decoder_arguments(config), **changes})

    @property
    def head_features(self) -> int:
        """Features of one head."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def key_heads(self) -> int:
        """Number of key heads, and of value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        if isinstance(self.window, Sequence):
            return tuple(self.window)
        return (self.window,) * self.num_layers

    @property
    def expert_layers(self) -> frozenset[int]:
        """The numbers of the layers with experts."""
        if self.moe is None:
            return frozenset()
        return frozenset(range(self.num_layers) if self.moe_layers is None else self.moe_layers)

    @property
    def ffn_features(self) -> int:
        """Features inside the feed-forward block."""
        return -(-8 * self.dim // 192) * 64 if self.ffn_dim is None else self.ffn_dim


# What an encoder's configuration and that of its blocks have under the same name.
_OF_BLOCKS = (
    "dim num_layers num_heads activation norm_eps attention_dropout init_std device dtype recipe"
).split()


def encoder_blocks(config: Any, **others: Any) -> DecoderConfig:
    """The configuration of an encoder's blocks: LayerNorms, biases, attention to all positions."""
    return DecoderConfig(
        **{name: getattr(config, name) for name in _OF_BLOCKS},
        ffn_dim=4 * config.dim if config.ffn_dim is None else config.ffn_dim,
        out_bias=True,
        mlp_bias=True,
        norm="layer",
        causal=False,
        residual_dropout=config.dropout,
        **others,
    )
