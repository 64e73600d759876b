"""What attention is given: arguments, layouts, keywords, and how they become a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..attention.alibi import alibi_slopes
from ..attention.blockwise import hidden_keys
from ..attention.cache import extended
from ..attention.call import Call, Heads, Request, enabled_kernels, hiding
from ..attention.context_parallel import refuse_cache
from ..errors import ArgumentError, InputError, NotSupportedError
from ..kernels.scalar import wide_dtype
from ..runtime.tracing import columns, exporting, functional
from ._numbers import is_one_of, real_number

_WHERE = "DotProductAttention"
_SOME = 64
_LAYOUTS = ("packed", "separate")

Inputs = tuple[Tensor, Tensor | None, Tensor | None]


class AttentionSettings(NamedTuple):
    """The arguments; ``dropout_p`` is 0 in evaluation.

    Attributes:
        is_plain: whether only packed heads, causality and scale are used.
    """

    num_heads: int
    num_kv_heads: int
    causal: bool
    scale: float | None
    v_head_dim: int | None
    window: int | None
    dropout_p: float
    softcap: float | None
    has_sinks: bool
    alibi: bool
    has_bias: bool
    kernel: str | None
    is_plain: bool


class Keywords(NamedTuple):
    """Keywords of a call."""

    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    cache: Any | None = None


class Prepared(NamedTuple):
    """What attention is computed of.

    Attributes:
        heads: with the keys and values of a cache.
        call: what is computed besides products.
        keep: stores the keys and values of the call in its cache, if it has one.
    """

    heads: Heads
    call: Call
    keep: Callable[[], None] | None


class Additions(NamedTuple):
    """What a call is given besides queries, keys and values, as :class:`Call` has it."""

    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    sinks: Tensor | None = None
    max_seqlen: int = 0
    bias: Tensor | None = None
    bias_grad: bool = False


def settings_of(op: Any, kernels: Sequence[str]) -> AttentionSettings:
    """The settings of an operation with the attributes of :class:`DotProductAttention`."""
    num_heads, num_kv_heads = op.num_heads, op.num_kv_heads
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        _refuse(
            "num_heads must be a positive multiple of num_kv_heads",
            f"num_heads={num_heads}, num_kv_heads={num_kv_heads}",
        )
    if op.layout not in _LAYOUTS:
        _refuse("layout must be 'packed' or 'separate'", f"layout={op.layout!r}")
    for name in ("window", "softcap", "v_head_dim"):
        value = getattr(op, name)
        if value is not None and not real_number(value, name, _WHERE) > 0:
            _refuse(f"{name} must be positive", f"{name}={value}")
    for name in ("window", "v_head_dim"):
        value = getattr(op, name)
        if value is not None and value != int(value):
            _refuse(f"{name} must be an integer", f"{name}={value}")
    if op.scale is not None:
        real_number(op.scale, "scale", _WHERE)
    p = real_number(op.dropout_p, "dropout_p", _WHERE)
    if not 0.0 <= p <= 1.0:
        _refuse("dropout_p must be between 0 and 1", f"dropout_p={p}")
    if op.kernel is not None and op.kernel not in kernels:
        _refuse(f"kernel must be one of {', '.join(kernels)}", f"kernel={op.kernel!r}")
    if op.v_head_dim is not None and op.layout == "separate":
        _refuse(
            "v_head_dim describes a packed input; a separate one has the shape of the values",
            f"v_head_dim={op.v_head_dim}, layout='separate'",
        )
    p = p if op.training else 0.0
    modes = op.v_head_dim, op.window, p or None, op.softcap, op._has_sinks or None
    others = op.alibi or None, op.core_attention_bias or None, op.kernel
    is_plain = op.layout == "packed" and all(mode is None for mode in (*modes, *others))
    return AttentionSettings(
        num_heads,
        num_kv_heads,
        op.causal,
        op.scale,
        op.v_head_dim,
        op.window,
        p,
        op.softcap,
        op._has_sinks,
        op.alibi,
        bool(op.core_attention_bias),
        op.kernel,
        is_plain,
    )


def _refuse(invariant: str, received: str) -> NoReturn:
    raise ArgumentError.explained(invariant, where=_WHERE, received=received)


def _refuse_input(invariant: str, received: str, remedy: str = "") -> NoReturn:
    raise InputError.explained(invariant, where=_WHERE, received=received, remedy=remedy)


def _features(t: Tensor) -> str:
    return f"{tuple(t.shape)} of {t.dtype}"


def check_packed(input_: Tensor, settings: AttentionSettings) -> None:
    """Raises InputError for an input without a head size."""
    shape = input_.shape
    if settings.v_head_dim is None:
        heads = settings.num_heads + 2 * settings.num_kv_heads
        if len(shape) != 3 or not shape[2] or shape[2] % heads or not input_.is_floating_point():
            _refuse_input(
                f"The input must be floating point, (batch, sequence, {heads} * head_dim)",
                _features(input_),
            )
        return
    heads = settings.num_heads + settings.num_kv_heads
    values = settings.num_kv_heads * settings.v_head_dim
    rest = shape[2] - values if len(shape) == 3 else 0
    if rest <= 0 or rest % heads or not input_.is_floating_point():
        _refuse_input(
            "The input must be floating point, "
            f"(batch, sequence, {heads} * head_dim + {values} of values)",
            _features(input_),
        )


def check_separate(q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings) -> None:
    """Raises InputError for tensors that are no queries, keys and values of one attention."""
    h, g = settings.num_heads, settings.num_kv_heads
    shapes = q.shape, k.shape, v.shape
    fits = all(len(shape) == 3 and shape[2] for shape in shapes)
    fits = fits and all(t.is_floating_point() for t in (q, k, v))
    fits = fits and not (q.shape[2] % h or k.shape[2] % g or v.shape[2] % g)
    fits = fits and q.shape[2] // h == k.shape[2] // g and k.shape[:2] == v.shape[:2]
    if not fits or q.shape[0] != k.shape[0]:
        _refuse_input(
            f"Queries must be floating point, (batch, queries, {h} * head_dim), "
            f"keys (batch, keys, {g} * head_dim), values (batch, keys, {g} * v_head_dim)",
            ", ".join(map(_features, (q, k, v))),
        )


def split(qkv: Tensor, settings: AttentionSettings) -> Heads:
    """The heads of a packed input, as views."""
    h, g = settings.num_heads, settings.num_kv_heads
    batch, length, width = qkv.shape
    if settings.v_head_dim is None and not functional():
        heads = qkv.view(batch, length, h + 2 * g, width // (h + 2 * g)).transpose(1, 2)
        # Not by Tensor.split, which takes as long in Python as here.
        return Heads(*heads.split_with_sizes([h, g, g], 1))
    size = settings.v_head_dim or width // (h + 2 * g)
    key_size = (width - g * size) // (h + g)
    q, k, v = columns(qkv, [h * key_size, g * key_size, g * size])
    return heads_of(q, k, v, settings)


def heads_of(q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings) -> Heads:
    """The heads of separate inputs, as views."""
    h, g = settings.num_heads, settings.num_kv_heads
    sizes = zip((q, k, v), (h, g, g))
    return Heads(*[t.view(*t.shape[:2], n, t.shape[2] // n).transpose(1, 2) for t, n in sizes])


def prepare(
    x: Heads,
    settings: AttentionSettings,
    keywords: Keywords,
    given: Additions,
    scale: float,
    differentiable: bool,
) -> Prepared:
    """Heads and call with what the keywords add to what else is given, such as a bias.

    Nothing is stored in a cache yet, so that a call which is refused leaves it as it was.

    Raises:
        InputError: a keyword has the wrong shape or dtype.
        NotSupportedError: a gradient is asked for that there is not.
    """
    mask, cu_seqlens, max_seqlen, cache = keywords
    start, keep = None, None
    if (cu_seqlens is None) != (max_seqlen is None):
        _refuse_input(
            "cu_seqlens and max_seqlen come together",
            f"cu_seqlens={cu_seqlens if cu_seqlens is None else 'a tensor'}, "
            f"max_seqlen={max_seqlen}",
        )
    if cu_seqlens is not None:
        _check_sequences(x, cu_seqlens, max_seqlen, cache)
    if mask is not None:
        _check_constant(mask)
    if cache is not None:
        x, start, keep = cached_heads(x, cache, differentiable)
    if mask is not None:
        mask = _four_dimensional(mask, x)
    if given.bias is not None:
        given = given._replace(bias=_bias_of_scores(given.bias, x))
    given = given._replace(mask=mask, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen or 0)
    call = call_of(x, settings, scale, given)
    if start is not None:
        hides = call._replace(start=start, causal=settings.causal, window=settings.window)
        rows, keys = slice(0, x.q.shape[2]), slice(0, x.k.shape[2])
        hidden = hidden_keys(x, hides, rows, keys)
        assert hidden is not None
        call = call._replace(start=start, causal=False, window=None, mask=hiding(mask, hidden))
    return Prepared(x, call, keep)


def call_of(x: Heads, settings: AttentionSettings, scale: float, given: Additions) -> Call:
    """The call, less what hides nothing: causality from one query, which is the last position."""
    window, causal = settings.window, settings.causal
    queries, keys = x.q.shape[2], x.k.shape[2]
    # An exported program is for other lengths too. Queries before the first key, which there are
    # where these are fewer, lie up to ``queries - 1`` positions before a key.
    if window is not None and not exporting() and window >= keys:
        window = None if causal or window >= queries else window
    if causal and window is None and given.cu_seqlens is None and queries == 1:
        causal = False
    return Call(
        causal,
        scale,
        window,
        settings.softcap,
        settings.dropout_p,
        given.mask,
        _slopes(x.q, settings) if settings.alibi else None,
        given.cu_seqlens,
        given.max_seqlen,
        sinks=given.sinks,
        bias=given.bias,
        bias_grad=given.bias_grad,
    )


def _slopes(q: Tensor, settings: AttentionSettings) -> Tensor:
    """Slopes of ALiBi, as wide as the scores."""
    return alibi_slopes(settings.num_heads, q.device, wide_dtype(q.dtype))


def request_before(settings: AttentionSettings, env: Any) -> Request:
    """The request of a call of which no size is known, and no keyword: what every kernel takes.

    The meta device plans like a GPU.
    """
    device = torch.device("cuda") if env.device.type == "meta" else env.device
    return Request(
        device,
        env.compute_dtype,
        _SOME,
        _SOME,
        settings.num_heads,
        settings.num_kv_heads,
        _SOME,
        _SOME,
        settings.causal,
        env.grad_enabled,
        settings.window is not None,
        settings.softcap is not None,
        mask=settings.has_bias,
        additive=settings.has_bias,
        alibi=settings.alibi,
        dropout=settings.dropout_p > 0,
        sinks=settings.has_sinks,
        bias=settings.has_bias,
        enabled=enabled_kernels(device),
    )


def cached_heads(
    x: Heads, cache: Any, differentiable: bool
) -> tuple[Heads, Tensor | None, Callable[[], None]]:
    """The heads with all keys and values, the position of the first query, what stores the call's.

    The position is None where queries are the last positions. Where gradients are needed, nothing
    may have been kept before: keys and values are those of the call, and take its gradients.
    """
    refuse_cache()
    k, v, start, keep = extended(cache, x.k.detach(), x.v.detach())
    if not differentiable:
        if start is not None and x.q.shape[2] != x.k.shape[2]:  # the last ones are aligned
            start = start + (x.k.shape[2] - x.q.shape[2])
        return Heads(x.q, k.to(x.q.dtype), v.to(x.q.dtype)), start, keep
    if k.shape[2] != x.k.shape[2]:
        raise NotSupportedError.explained(
            "Keys and values of earlier calls have no gradients",
            where=_WHERE,
            received=f"{x.k.shape[2]} keys of this call, {k.shape[2]} in the cache",
            remedy="Call under torch.no_grad(), or without a cache",
        )
    return x, None, keep


def _check_sequences(x: Heads, cu_seqlens: Tensor, max_seqlen: Any, cache: Any) -> None:
    queries, keys = x.q.shape[2], x.k.shape[2]
    if x.q.shape[0] != 1 or queries != keys or cache is not None:
        _refuse_input(
            "With cu_seqlens the batch is 1, keys are those of the queries, and there is no cache",
            f"batch {x.q.shape[0]}, {queries} queries, {keys} keys"
            + (", a cache" if cache is not None else ""),
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or type(max_seqlen) is not int:
        _refuse_input(
            "cu_seqlens must be int32, (number of sequences + 1,), and max_seqlen an int",
            f"{_features(cu_seqlens)}, max_seqlen={max_seqlen!r}",
        )


def _check_constant(mask: Tensor) -> None:
    """Raises NotSupportedError for a mask that requires grad."""
    if mask.requires_grad:
        raise NotSupportedError.explained(
            "A mask is a constant: it gets no gradient",
            where=_WHERE,
            received="a mask that requires grad",
            remedy="Pass mask.detach(); core_attention_bias=True is for a bias that is trained",
        )


def _bias_of_scores(bias: Tensor, x: Heads) -> Tensor:
    """The bias with four dimensions."""
    full = *x.q.shape[:3], x.k.shape[2]
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if not _broadcasts(shape, full) or not bias.is_floating_point():
        _refuse_input(
            f"The bias must be floating point, of a shape that broadcasts to {full}",
            _features(bias),
            "Its dimensions are batch, heads, queries and keys; leading ones may be left out",
        )
    return bias.view(shape)


def _broadcasts(shape: Sequence[int], full: Sequence[int]) -> bool:
    return len(shape) == 4 and all(is_one_of(n, 1, size) for n, size in zip(shape, full))


def _four_dimensional(mask: Tensor, x: Heads) -> Tensor:
    batch, heads, queries, _ = x.q.shape
    full = batch, heads, queries, x.k.shape[2]
    given = mask
    if mask.dim() == 2 and is_one_of(mask.shape, (batch, full[3]), (1, full[3])):
        mask = mask[:, None, None]
    elif mask.dim() == 3:
        mask = mask[None]
    if not _broadcasts(mask.shape, full) or not (
        mask.dtype == torch.bool or mask.is_floating_point()
    ):
        _refuse_input(
            f"The mask must be bool or floating point, {(batch, full[3])} or of a shape that "
            f"broadcasts to {full}",
            _features(given),
            "Convert integers by .bool(); a mask of queries and keys is mask[None, None]",
        )
    return mask
