"""Random calls of attention, and what they return by the definition, in float64.

The definition is that of the docstring of :class:`opfuser.DotProductAttention`, for heads (B, H, S,
D), and reads nothing of the library.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """A call, without its numbers.

    Attributes:
        packed: whether the operation splits one tensor.
        batch, queries, keys, heads, kv_heads, size, v_size: B, S, T, H, K, D and V.
        mask: which kind of mask; "" is none.
        ends: where sequences begin and end, if the row holds several.
        strided: whether the tensors are not contiguous.
        bias: which kind of bias, a tensor that is given besides; "" is none.
        arguments: others of the operation.
    """

    packed: bool
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    size: int
    v_size: int
    causal: bool
    scale: float | None
    window: int | None
    softcap: float | None
    alibi: bool
    sinks: bool
    mask: str
    ends: tuple[int, ...] | None
    strided: bool
    bias: str

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of the operation."""
        own: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("causal", "scale", "window", "softcap", "alibi", "sinks")
        }
        own |= {"num_heads": self.heads, "num_kv_heads": self.kv_heads}
        if self.bias:
            own["core_attention_bias"] = True
        if not self.packed:
            return {**own, "layout": "separate"}
        return own if self.v_size == self.size else {**own, "v_head_dim": self.v_size}

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """Those of the tensors: (batch, sequence, features)."""
        widths = self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.v_size
        if self.packed:
            return [(self.batch, self.keys, sum(widths))]
        lengths = self.queries, self.keys, self.keys
        return [(self.batch, n, width) for n, width in zip(lengths, widths)]


MASKS = (
    "", "", "", "", "padding", "padding", "padding of one", "additive padding", "pairs",
    "pairs of heads", "additive", "additive of heads", "additive without a dimension", "nothing",
)  # fmt: skip
BIASES = {
    "of heads": (1, 0, 0, 0), "whole": (0, 0, 0, 0), "of the batch": (0, 1, 0, 0),
    "pairs": (0, 0), "of heads alone": (0, 0, 0), "of keys": (1, 1, 1, 0), "of queries": (0, 1),
}  # fmt: skip
"""By kind, the size of each dimension of a bias; 0 is that of the scores."""


def case_of(seed: int) -> Case:
    """Case number ``seed``. Small sizes meet often, so that equal and empty ones do."""
    r = Random(seed)
    keys, queries = r.choice([0, 1, 1, 2, 3, 4, 7]), r.choice([0, 1, 1, 2, 3, 5, 7, 9])
    packed = r.random() < 0.35
    ends = None
    batch = r.choice([0, 1, 2, 2, 3])
    if r.random() < 0.2:
        inner = sorted(r.choice(range(8)) for _ in range(r.choice([0, 1, 2, 4])))
        ends = 0, *inner, 7
        batch, keys, queries = 1, 7, 7
    if packed:
        queries = keys
    kv_heads = r.choice([1, 2, 3])
    size = r.choice([1, 2, 3, 5])
    longest = max(queries, keys)
    return Case(
        packed, batch, queries, keys, kv_heads * r.choice([1, 1, 2, 3, 5]), kv_heads, size,
        r.choice([size, size, size, 1, 4]), r.random() < 0.5, r.choice([None, None, 0.7]),
        r.choice([None, None, 1, 2, 3, max(1, keys), max(1, longest), max(1, longest - 1), 20]),
        r.choice([None, None, 0.8]), r.random() < 0.25, r.random() < 0.3,
        r.choice(MASKS) if ends is None or r.random() < 0.3 else "", ends, r.random() < 0.3,
        r.choice([*BIASES]) if r.random() < 0.3 else "",
    )  # fmt: skip


def bias_of(case: Case) -> Tensor | None:
    """The bias, whose rows of a head may not lie side by side."""
    if not case.bias:
        return None
    sizes = BIASES[case.bias]
    full = (case.batch, case.heads, case.queries, case.keys)[-len(sizes) :]
    shape = [size or n for size, n in zip(sizes, full)]
    made = torch.randn(*shape[1:], shape[0], dtype=torch.float64).movedim(-1, 0)
    return made if case.strided else made.contiguous()


def mask_of(case: Case, dtype: torch.dtype = torch.float64) -> Tensor | None:
    """The mask, of which a query may see nothing."""
    batch, heads, queries, keys = case.batch, case.heads, case.queries, case.keys
    seen = torch.rand(batch, heads, queries, keys) < 0.6
    added = torch.randn(batch, heads, queries, keys).to(dtype).masked_fill(~seen, -torch.inf)
    return {
        "": None,
        "padding": seen[:, :1, :1].amax((1, 2)) if queries else seen.new_ones(batch, keys),
        "padding of one": seen.new_ones(1, keys).logical_and(torch.rand(1, keys) < 0.6),
        "additive padding": added.new_zeros(batch, keys).masked_fill(
            torch.rand(batch, keys) < 0.4, -torch.inf
        ),
        "pairs": seen[:, :1],
        "pairs of heads": seen[:1] if batch else seen,
        "additive": added[:1, :1] if batch else added[:, :1],
        "additive of heads": added,
        "additive without a dimension": added[0] if batch else added[:, :1],
        "nothing": seen.new_zeros(batch, keys),
    }[case.mask]


def split(case: Case, tensors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, H, S, D), keys (B, K, T, D) and values (B, K, T, V)."""
    h, k, d, v = case.heads, case.kv_heads, case.size, case.v_size
    q, keys, values = tensors if not case.packed else tensors[0].split([h * d, k * d, k * v], 2)
    heads = [(q, h, d), (keys, k, d), (values, k, v)]
    return tuple(t.unflatten(2, (n, size)).transpose(1, 2) for t, n, size in heads)  # type: ignore[return-value]


def slope(head: int, heads: int) -> float:
    """As in the paper's code: of the next power of two every second, for heads beyond one."""
    whole = 1
    while 2 * whole <= heads:
        whole *= 2
    if head < whole:
        return float(2 ** (-8 * (head + 1) / whole))
    return float(2 ** (-4 * (2 * (head - whole) + 1) / whole))


def attended(
    case: Case,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The output, (batch, queries, heads * size of values)."""
    scale = case.size**-0.5 if case.scale is None else case.scale
    position = torch.arange(case.queries, device=q.device)[:, None] + case.keys - case.queries
    key = torch.arange(case.keys, device=q.device)
    seen = q.new_ones(case.batch, case.heads, case.queries, case.keys, dtype=torch.bool)
    if case.causal:
        seen &= key <= position
    if case.window is not None:
        seen &= (position - key).abs() < case.window
    if case.ends is not None:
        own = torch.zeros(case.keys, dtype=torch.int64, device=q.device)
        for number, (start, stop) in enumerate(zip(case.ends, case.ends[1:])):
            own[start:stop] = number
        seen &= own[:, None] == own
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None]
    outputs = []
    for head in range(case.heads):
        of_keys = head // (case.heads // case.kv_heads)
        s = scale * q[:, head] @ k[:, of_keys].transpose(1, 2)
        if case.softcap is not None:
            s = case.softcap * torch.tanh(s / case.softcap)
        if case.alibi:
            s = s - slope(head, case.heads) * (position - key).abs().to(s)
        if bias is not None:
            s = s + bias.expand(seen.shape)[:, head]
        shown = seen[:, head]
        if mask is not None:
            own_mask = mask.expand(seen.shape)[:, head]
            shown = shown & (own_mask if mask.dtype == torch.bool else own_mask > -torch.inf)
            s = s if mask.dtype == torch.bool else s + own_mask.masked_fill(~shown, 0.0)
        p = torch.where(shown, s, 0.0).exp() * shown  # of scores that are not large
        total = p.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks[head].exp()
        outputs.append(p / torch.where(total > 0, total, 1.0) @ v[:, of_keys])
    return torch.stack(outputs, 2).flatten(2)


def grads_of(y: Tensor, dy: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """The output and its gradients; zeros where there is no path."""
    found = torch.autograd.grad(y, leaves, dy, allow_unused=True)
    return [y.detach(), *(torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found))]


def as_exact(
    case: Case, y: Tensor, dy: Tensor, leaves: list[Tensor], mask: Tensor | None
) -> list[Tensor]:
    """The output of a call and its gradients, as exact as plain torch in their dtype.

    They are allowed twice its error, and a unit in the last place.

    Args:
        leaves: the tensors of the case, its bias and its sinks, as far as it has them.
    """
    count, dtype = len(case.shapes), leaves[0].dtype
    biased = count + bool(case.bias)
    found = [grads_of(y, dy, leaves)]
    for wide in (dtype, torch.float64):
        own = [t.detach().to(wide).requires_grad_() for t in leaves]
        added = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype).to(wide)
        sinks = own[biased] if len(own) > biased else None
        z = attended(case, *split(case, own[:count]), added, sinks, *own[count:biased])
        found.append(grads_of(z, dy.to(wide), own))
    for got, plain, want in zip(*found):
        if want.numel():
            bound = 2 * (plain - want).abs().max() + torch.finfo(dtype).eps * want.abs().max()
            assert (got - want).abs().max() <= bound, case
    return found[0]
