"""Attention within torch's ``context_parallel``, where a process has a part of the sequence.

Within it torch replaces ``torch.nn.functional.scaled_dot_product_attention`` by a function whose
forward and backward exchange keys and values with the other processes. Kernels that are called
below that function would see the keys of one process, and say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import torch_internals as internals
from ..errors import NotSupportedError
from .call import Call, Heads, Request

NAME = "context_parallel"
_WHERE = "DotProductAttention within torch's context_parallel"


def is_active() -> bool:
    """Whether torch's ``context_parallel`` has replaced its function for attention."""
    function = F.scaled_dot_product_attention
    if function is internals.scaled_dot_product_attention:
        return False
    module = getattr(function, "__module__", None) or ""
    return module.startswith("torch.distributed.tensor.experimental.")


def refuse_counted_positions(where: str) -> None:
    """Raises NotSupportedError within ``context_parallel``, where a sequence begins elsewhere.

    Args:
        where: the operation that would count positions from 0.
    """
    if is_active():
        raise NotSupportedError.explained(
            "Positions in a part of a sequence do not begin at 0",
            where=f"{where} within torch's context_parallel",
            received="no positions",
            remedy="Pass positions through op_kwargs, and have context_parallel cut them as it "
            "cuts the tokens",
        )


class Attended(NamedTuple):
    """Attention that autograd has recorded.

    Attributes:
        output: (B, H, S, V), which has the graph.
        heads: that the graph begins with.
    """

    output: Tensor
    heads: Heads

    def gradients(self, dy: Tensor) -> Iterable[Tensor]:
        """Returns the gradients of the heads, given that of the output.

        Raises:
            NotSupportedError: backward runs outside of ``context_parallel``.
        """
        if not is_active():
            raise NotSupportedError.explained(
                "Backward exchanges keys and values as forward did",
                where=_WHERE,
                received="a backward pass outside of it",
                remedy="Call backward within context_parallel",
            )
        return torch.autograd.grad(self.output, self.heads, dy, retain_graph=True)


def refuse(request: Request, sinks: Tensor | None, forced: str | None) -> None:
    """Raises NotSupportedError for what torch's ring attention does not compute."""
    modes = {
        "a window": request.window,
        "soft-capping": request.softcap,
        "a bias": request.bias,
        "a mask": request.mask and not request.bias,
        "ALiBi": request.alibi,
        "cu_seqlens": request.varlen,
        "dropout": request.dropout > 0,
        "sinks": sinks is not None,
        f"kernel={forced!r}": forced is not None,
        "other keys than the queries'": request.queries != request.keys,
        "torch.compile": request.traced,
    }
    found = [name for name, there in modes.items() if there]
    if found:
        raise _refused(found)


def refuse_cache() -> None:
    """Raises NotSupportedError within ``context_parallel``: a cache has the keys of one process."""
    if is_active():
        raise _refused(["a cache"])


def _refused(found: Iterable[str]) -> NotSupportedError:
    return NotSupportedError.explained(
        "Attention across processes has causality and a scale, and nothing else",
        where=_WHERE,
        received=", ".join(found),
        remedy="Leave it out, or run without context_parallel",
    )


def attend(x: Heads, call: Call, differentiable: bool) -> Attended:
    """Attention of this process' queries to the keys of all, by torch's function."""
    with torch.set_grad_enabled(differentiable):
        heads = Heads(*[t.detach().requires_grad_(differentiable) for t in x])
        group = x.q.shape[1] // x.k.shape[1]
        # Repeated for the queries of a group: not all that torch exchanges takes fewer key heads.
        k, v = [t.repeat_interleave(group, 1) if group > 1 else t for t in heads[1:]]
        y = F.scaled_dot_product_attention(heads.q, k, v, is_causal=call.causal, scale=call.scale)
        return Attended(y, heads)
