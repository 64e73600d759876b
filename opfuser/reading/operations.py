"""What a forward computes, as data: operations with their constants and the paths of parameters."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Activation",
    "Attention",
    "Bias",
    "Called",
    "ColumnScale",
    "Dropout",
    "Embedding",
    "Gated",
    "HeadNorm",
    "Heads",
    "Linear",
    "Mask",
    "MergedLinear",
    "Norm",
    "Normalised",
    "Operation",
    "Parallel",
    "Projection",
    "Reading",
    "Reorder",
    "Residual",
    "Rotary",
    "Scale",
    "Transpose",
]


@dataclass(frozen=True)
class Linear:
    """``y = x W^T + b``; with ``transposed``, ``y = x W + b``."""

    weight: str
    bias: str | None
    in_features: int
    out_features: int
    transposed: bool = False


@dataclass(frozen=True)
class Embedding:
    """Rows of a table by their numbers, which the input holds; one may get no gradient."""

    weight: str
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None


@dataclass(frozen=True)
class Called:
    """A child that is called as it is, with one tensor, because it was not explained.

    Attributes:
        path: of the child.
        in_features, out_features: the last dimensions of its argument and of its result.
        reason: why it was not explained.
    """

    path: str
    in_features: int
    out_features: int
    reason: str


@dataclass(frozen=True)
class Norm:
    """``y = (x - m) / sqrt(mean((x - m)^2) + eps) w + b``, m the mean of x if ``centred``, else 0.

    With ``zero_centred_weight``, ``1 + w`` stands in place of w; without a weight, 1.
    """

    centred: bool
    shape: tuple[int, ...]
    eps: float
    weight: str | None = None
    bias: str | None = None
    zero_centred_weight: bool = False


@dataclass(frozen=True)
class Normalised:
    """A linear function, and a norm of all that it returns."""

    linear: Linear
    norm: Norm

    @property
    def in_features(self) -> int:
        """The last dimension of the input."""
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        """The last dimension of the output."""
        return self.linear.out_features


Projection = Linear | Called | Normalised


@dataclass(frozen=True)
class MergedLinear:
    """The outputs of projections of one input, concatenated."""

    projections: tuple[Projection, ...]


@dataclass(frozen=True)
class Bias:
    """``y = x + b``."""

    bias: str
    size: int


@dataclass(frozen=True)
class Activation:
    """A function of each entry: a name of ``construction.ACTIVATIONS``, and its constants."""

    name: str
    constants: tuple[float, ...] = ()


@dataclass(frozen=True)
class Gated:
    """``y = f(a) (b + offset)`` of the halves [a, b] of the last dimension, f an activation.

    With a limit, a is clamped from above, and b on both sides.
    """

    activation: Activation
    limit: float | None = None
    offset: float = 0.0


@dataclass(frozen=True)
class Dropout:
    """Zeroes entries with a probability, and scales the others."""

    p: float


@dataclass(frozen=True)
class Scale:
    """``y = factor x``."""

    factor: float


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values packed in the last dimension, in this order, head by head."""

    queries: int
    keys: int
    size: int
    value_size: int


@dataclass(frozen=True)
class ColumnScale:
    """``y = w x``, w a number for each column."""

    weight: str


@dataclass(frozen=True)
class Reorder:
    """The last dimension in blocks of ``size``, of which block i was number ``blocks[i]``."""

    blocks: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Transpose:
    """The first two dimensions exchanged."""


@dataclass(frozen=True)
class HeadNorm:
    """The root-mean-square norm of each query and each key head."""

    heads: Heads
    eps: float
    q_weight: str
    k_weight: str
    zero_centred_weight: bool = False


@dataclass(frozen=True)
class Rotary:
    """Rotary positions of query and key heads, by tables that are inputs.

    Attributes:
        heads: of the packed input.
        size: entries of a head that turn, from its start.
        interleaved: whether pairs of neighbours turn, else entry i and entry ``i + size / 2``.
        tables: the numbers of the inputs that hold cosine and sine; of one if it is complex.
        repeated: how a table holds an angle twice: ``"halves"`` (the second half repeats the
            first), ``"neighbours"`` (side by side), or ``"once"``. For the first two the reader
            relies on the caller that the repeated entries are equal.
    """

    heads: Heads
    size: int
    interleaved: bool
    tables: tuple[int, ...]
    repeated: str


@dataclass(frozen=True)
class Mask:
    """A mask that is an input.

    Attributes:
        input: its number.
        shape: its shape in the trace.
        hides: whether True hides a key; else a bool mask is True where a key is seen, and any other
            is added to the scores.
        of_keys: whether it is (batch, keys); else it broadcasts to (batch, heads, queries, keys).
    """

    input: int
    shape: tuple[int, ...]
    hides: bool = False
    of_keys: bool = False


@dataclass(frozen=True)
class Attention:
    """Scaled dot-product attention of packed heads.

    Attributes:
        heads: of the packed input.
        scale: factor of the scores.
        causal: whether query i sees the keys up to i alone, counted from the first of each.
        dropout_p: of the weights.
        softcap: c of ``c tanh(s / c)``, or None.
        masks: which all hide keys.
        cache: the number of the layer in a cache that extends keys and values, or None.
    """

    heads: Heads
    scale: float
    causal: bool
    dropout_p: float = 0.0
    softcap: float | None = None
    masks: tuple[Mask, ...] = ()
    cache: int | None = None


@dataclass(frozen=True)
class Residual:
    """``y = x + f(x)``, f the operations of the branch."""

    branch: tuple[Operation, ...]


@dataclass(frozen=True)
class Parallel:
    """``y = f(x) + g(x) + ...``."""

    branches: tuple[tuple[Operation, ...], ...]


Operation = (
    Linear
    | Embedding
    | Called
    | MergedLinear
    | Bias
    | Norm
    | Activation
    | Gated
    | Dropout
    | Scale
    | ColumnScale
    | Reorder
    | Transpose
    | Normalised
    | HeadNorm
    | Rotary
    | Attention
    | Residual
    | Parallel
)


@dataclass(frozen=True)
class Reading:
    """What a forward computes of one of its inputs.

    Attributes:
        input: its number.
        operations: first to last.
    """

    input: int
    operations: tuple[Operation, ...]
