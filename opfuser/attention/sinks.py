"""A sink: an extra logit per head that takes part in the softmax, and has no value.

With z the logit, L the log-sum-exp of a query's scores and y its output without a sink, the output
is ``σ(L - z) y`` and the log-sum-exp ``log(exp L + exp z)``. Backward of a kernel that is given
these two is that of attention with the sink: its weights are ``exp(s - L)``, and it subtracts
``dy · y`` from the gradient of each. So every kernel that returns its log-sum-exp has sinks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.scalar import cast, wide_dtype
from .call import Result


def _beside(sinks: Tensor, logsumexp: Tensor) -> Tensor:
    """One sink per head, where heads are in the kernel's layout: (H, tokens), or (B, H, S, …)."""
    behind = logsumexp.dim() - (1 if logsumexp.dim() == 2 else 2)
    return cast(sinks, logsumexp.dtype).view(-1, *[1] * behind)


def _of_queries(values: Tensor, queries: int) -> Tensor:
    """(B, H, S, 1) from the layout of a kernel; one that pads lengths has more than S."""
    if values.dim() == 2:
        return values[None, :, :, None]
    return values if values.dim() == 4 else values[:, :, :queries, None]


def with_sinks(result: Result, sinks: Tensor) -> Result:
    """The result of attention with sinks, from that without."""
    logsumexp, y = result.logsumexp, result.output
    assert logsumexp is not None
    logits = _beside(sinks, logsumexp)
    share = _of_queries(torch.sigmoid(logsumexp - logits), y.shape[2])
    total = torch.logaddexp(logsumexp, logits.expand_as(logsumexp))
    return result._replace(output=cast(y * share, y.dtype), logsumexp=total)


def sinks_grad(dy: Tensor, result: Result, sinks: Tensor) -> Tensor:
    """The gradient of the sinks: that of a weight whose value is 0."""
    total, y = result.logsumexp, result.output
    assert total is not None
    weight = torch.exp(_beside(sinks, total) - total)
    dtype = wide_dtype(dy.dtype)
    delta = (cast(dy, dtype) * cast(y, dtype)).sum(-1, keepdim=True)
    return cast(-(_of_queries(weight, y.shape[2]) * delta).sum((0, 2, 3)), sinks.dtype)
