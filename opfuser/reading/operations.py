"""What a forward computes, as data: operations with their constants and the paths of parameters."""

# Longer than 500 lines: the fields of some forty operations, one beside the other, and no rules.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Operation:
    """What is computed of a stream of rows."""


@dataclass(frozen=True)
class Linear(Operation):
    """``y = x W^T + b``; with ``transposed``, ``y = x W + b``."""

    weight: str
    bias: str | None
    in_features: int
    out_features: int
    transposed: bool = False


@dataclass(frozen=True)
class Adapter:
    """``s d(x) A^T B^T``, d dropout."""

    a: str
    b: str
    rank: int
    scale: float
    dropout_p: float = 0.0


@dataclass(frozen=True)
class LoRALinear(Operation):
    """A linear function plus adapters of the same input."""

    linear: Linear
    adapters: tuple[Adapter, ...]

    @property
    def in_features(self) -> int:
        """The last dimension of the input."""
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        """The last dimension of the output."""
        return self.linear.out_features


@dataclass(frozen=True)
class Embedding(Operation):
    """Rows of a table by their numbers, which the input holds; one may get no gradient."""

    weight: str
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None


@dataclass(frozen=True)
class Taken:
    """Stands for a tensor by its number: parameters, buffers, inputs, then results."""

    number: int


@dataclass(frozen=True)
class SizeOf:
    """Stands for a size: an expression of sizes ``s``, each a dimension of an input."""

    text: str
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Constant:
    """Stands for a number or the like; 1, 1.0 and True are equal, and not the same."""

    kind: type
    text: str
    value: Any


@dataclass(frozen=True)
class Range:
    """Stands for a slice."""

    start: Any
    stop: Any
    step: Any


@dataclass(frozen=True)
class Made:
    """A tensor that functions of torch make of parameters, buffers, inputs, and sizes of inputs.

    Attributes:
        parameters: their paths.
        calls: of functions, in order, with arguments and pairs of keywords and arguments, in which
            :class:`Taken`, :class:`SizeOf`, :class:`Constant` and :class:`Range` stand for others.
        number: of the tensor among all.
        buffers: their paths.
        inputs: their numbers.
    """

    parameters: tuple[str, ...]
    calls: tuple[tuple[Callable[..., Any], tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]
    number: int
    buffers: tuple[str, ...] = ()
    inputs: tuple[int, ...] = ()

    @property
    def least_constant(self) -> float:
        """The least number among the arguments; 0 if there is none below."""
        return min((0.0, *_numbers_in(call[1:] for call in self.calls)))


def _numbers_in(tree: Any) -> Iterator[float]:
    if isinstance(tree, Constant):
        if isinstance(tree.value, (int, float)):
            yield float(tree.value)
    elif not isinstance(tree, str) and isinstance(tree, Iterable):
        for part in tree:
            yield from _numbers_in(part)


@dataclass(frozen=True)
class Input:
    """Stands for an input of a call of the module, by its number."""

    number: int


@dataclass(frozen=True)
class GivenCache:
    """Stands for the cache of a call of the module."""


@dataclass(frozen=True)
class Called(Operation):
    """A child that is called as it is, because it was not explained.

    Attributes:
        path: of the child.
        in_features, out_features: the last dimensions of its argument and of its result.
        reason: why it was not explained.
        item: the place of the result among the tensors that it returns; None if it
            is alone, and in rows as those of the argument.
        arguments: positional ones, and pairs of keywords and arguments, in which ``...`` stands for
            the stream, :class:`Input` for another tensor and :class:`GivenCache` for the cache;
            None is the stream alone.
        returned: pairs of the place of another tensor that it returns, and the number of the
            module's output that it is.
        form: of what it returns, as of ``dataflow.form_of``; empty if it is the result alone.
    """

    path: str
    in_features: int
    out_features: int
    reason: str
    item: int | None = None
    arguments: tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]] | None = None
    returned: tuple[tuple[int, int], ...] = ()
    form: str = ""


@dataclass(frozen=True)
class Norm(Operation):
    """``y = (x - m) / sqrt(mean((x - m)^2) + eps) w + b``, m the mean of x if ``centered``, else 0.

    With ``zero_centered_weight``, ``1 + w`` stands in place of w; without a weight, 1. With
    ``weight_is_cast``, what is multiplied is a cast or a view of w.
    """

    centered: bool
    shape: tuple[int, ...]
    eps: float
    weight: str | None = None
    bias: str | None = None
    zero_centered_weight: bool = False
    weight_is_cast: bool = False


Projection = Linear | LoRALinear | Called


@dataclass(frozen=True)
class MergedLinear(Operation):
    """The outputs of projections of one input, concatenated."""

    projections: tuple[Projection, ...]


@dataclass(frozen=True)
class Bias(Operation):
    """``y = x + b``."""

    bias: str
    size: int


@dataclass(frozen=True)
class Activation(Operation):
    """A function of each entry: a name of ``counterparts.ACTIVATIONS``, and its constants."""

    name: str
    constants: tuple[float, ...] = ()


@dataclass(frozen=True)
class Gated(Operation):
    """``y = f(a) (b + offset)`` of the halves [a, b] of the last dimension, f an activation.

    With a limit, a is clamped from above, and b on both sides. ``interleaved`` columns alternate.
    """

    activation: Activation
    limit: float | None = None
    offset: float = 0.0
    interleaved: bool = False


@dataclass(frozen=True)
class ExpertsLinear:
    """``y = x W_e^T + b_e`` for rows of expert e; biases (count, out).

    Weights are (count, out, in), or with ``transposed`` (count, in, out). With ``multiplies_whole``
    a function of torch takes the parameter itself.
    """

    weight: str
    bias: str | None
    count: int
    in_features: int
    out_features: int
    transposed: bool = False
    multiplies_whole: bool = False


@dataclass(frozen=True)
class Experts(Operation):
    """``y = Σ_j w_j down_e(f(up_e(x)))``, e the j-th of the experts that a router has chosen.

    Attributes:
        router: a child that is called with the input, and returns w and e.
        weights, indices: their places among the tensors that it returns.
        flat: whether it is called with a matrix of rows.
        up, activation, down: of the experts.
    """

    router: Called
    weights: int
    indices: int
    flat: bool
    up: ExpertsLinear
    activation: Activation | Gated
    down: ExpertsLinear


@dataclass(frozen=True)
class Dropout(Operation):
    """Zeroes entries with a probability, and scales the others."""

    p: float


@dataclass(frozen=True)
class Scale(Operation):
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
class ColumnScale(Operation):
    """``y = w x``, w a number for each column."""

    weight: str


@dataclass(frozen=True)
class Reorder(Operation):
    """Blocks of the last dimension, each of ``size``: block i was number ``blocks[i]`` of so many.

    Some may be left out, and some be there several times.
    """

    blocks: tuple[int, ...]
    size: int
    count: int


@dataclass(frozen=True)
class Transpose(Operation):
    """The first two dimensions exchanged."""


@dataclass(frozen=True)
class HeadNorm(Operation):
    """The norm of each query and each key head, with weights or without.

    It is the root-mean-square norm, or if ``centered``, LayerNorm.
    """

    heads: Heads
    eps: float
    q_weight: str | None
    k_weight: str | None
    zero_centered_weight: bool = False
    weight_is_cast: bool = False
    centered: bool = False
    q_bias: str | None = None
    k_bias: str | None = None


@dataclass(frozen=True)
class Rows:
    """The rows of a buffer by the numbers that an input holds."""

    buffer: str
    numbers: int


@dataclass(frozen=True)
class Rotary(Operation):
    """Rotary positions of query and key heads, by tables.

    Attributes:
        heads: of the packed input.
        size: entries of a head that turn, from its start.
        interleaved: whether pairs of neighbors turn, else entry i and entry ``i + size / 2``.
        tables: the numbers of the inputs that hold cosine and sine, or rows of buffers that do; one
            if it is complex or holds both.
        repeated: how a table holds an angle twice: ``"halves"`` (the second half repeats the
            first), ``"neighbors"`` (side by side), or ``"once"``. For the first two the reader
            relies on the caller that the repeated entries are equal. Of one table that holds both,
            ``"cosines first"`` or ``"sines first"``.
        backwards: whether heads turn by the negative angles.
    """

    heads: Heads
    size: int
    interleaved: bool
    tables: tuple[int | Rows, ...]
    repeated: str
    backwards: bool = False


@dataclass(frozen=True)
class Mask:
    """A mask that is an input.

    Attributes:
        input: its number.
        shape: its shape in the trace.
        hides: whether True hides a key; else a bool mask is True where a key is seen, and any other
            is added to the scores.
        of_keys: whether it is (batch, keys); else it broadcasts to (batch, heads, queries, keys).
        lowest: of a bool mask, the number that stands in the sum of others where it hides; alone,
            which it is beside a bias or gradients, it must not hide all keys of a query.
        folded: how many heads its first dimension holds besides the batch, or 0: then it broadcasts
            to (batch * heads, queries, keys).
        factor: of numbers that are added to the scores.
    """

    input: int
    shape: tuple[int, ...]
    hides: bool = False
    of_keys: bool = False
    lowest: float | None = None
    folded: int = 0
    factor: float = 1.0


@dataclass(frozen=True)
class Weights:
    """The weights of attention (batch, heads, queries, keys) as an output of the module.

    Attributes:
        output: its number.
        dtype: of these.
    """

    output: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Attention(Operation):
    """Scaled dot-product attention of packed heads.

    Attributes:
        heads: of the packed input.
        scale: factor of the scores.
        causal: whether query i sees the keys up to i alone, counted from the first of each.
        dropout_p: of the weights.
        softcap: c of ``c tanh(s / c)``, or None.
        masks: what hides keys, or is added to the scores.
        cache: the number of the layer in a cache that extends keys and values, or None.
        sinks: the parameter that is a logit per head in the softmax, without a value, or None.
        bias: what is added to the scores and may need a gradient: an input, by its number, without
            large negative numbers, or how it is made; or None.
        weights: where the module returns them, before dropout; None if it does not.
        conditions: bool tensors, and whether a key is seen where one is True, or is hidden there.
    """

    heads: Heads
    scale: float
    causal: bool
    dropout_p: float = 0.0
    softcap: float | None = None
    masks: tuple[Mask, ...] = ()
    cache: int | None = None
    sinks: str | None = None
    bias: int | Made | None = None
    weights: Weights | None = None
    conditions: tuple[tuple[Made, bool], ...] = ()


@dataclass(frozen=True)
class Cached(Operation):
    """``[f(x), g(x)]`` side by side, of a call and of those before: all that a cache returns.

    Attributes:
        branches: f and g, which make the keys and the values of a layer as the cache keeps them.
        layer: its number in the cache.
        causal: whether those of the call alone are seen where the cache begins with it.
    """

    branches: tuple[tuple[Operation, ...], ...]
    layer: int
    causal: bool


@dataclass(frozen=True)
class ForkedAttention(Operation):
    """Attention of queries, keys and values that are made of one input apart from each other.

    Attributes:
        attention: of all of them.
        queries: what makes queries of the input.
        memory: what makes something of the input for both of the others.
        keys, values: what makes them of that.
    """

    attention: Attention
    queries: tuple[Operation, ...]
    memory: tuple[Operation, ...]
    keys: tuple[Operation, ...]
    values: tuple[Operation, ...]


@dataclass(frozen=True)
class CrossAttention(Operation):
    """Attention of queries, which it is given, to keys and values of another input.

    Attributes:
        attention: whose packed heads are the queries, and what the memory makes.
        input: the number of the other input.
        memory: operations that make keys and values of it, packed in this order.
    """

    attention: Attention
    input: int
    memory: tuple[Operation, ...]


@dataclass(frozen=True)
class Residual(Operation):
    """``y = x + f(x)``, f the operations of the branch."""

    branch: tuple[Operation, ...]


@dataclass(frozen=True)
class Parallel(Operation):
    """``y = f(x) + g(x) + ...``."""

    branches: tuple[tuple[Operation, ...], ...]


@dataclass(frozen=True)
class Beside(Operation):
    """``y = [f(x), g(x), ...]``, side by side in the last dimension."""

    branches: tuple[tuple[Operation, ...], ...]


@dataclass(frozen=True)
class Times(Operation):
    """``y = f(x) g(x)``; all but the last may have one column."""

    branches: tuple[tuple[Operation, ...], ...]


@dataclass(frozen=True)
class Reading:
    """What a forward computes of one of its inputs.

    Attributes:
        input: its number.
        operations: first to last.
        outputs: how many tensors it returns that are no inputs; the operations name those after the
            first, but for those that are
        made: of sizes and parameters, by their numbers.
    """

    input: int
    operations: tuple[Operation, ...]
    outputs: int = 1
    made: tuple[tuple[int, Made], ...] = ()
