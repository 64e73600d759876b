"""New scales of an operation from the largest values that it has seen, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .quantize_plain import scale_for


class KeptScales(NamedTuple):
    """What an operation keeps of its three kinds of tensors, and how it changes.

    Tensors are in fp32 and contiguous. Where one gets other memory, all of this is made anew.

    Attributes:
        scale: (3,).
        history: (length, 3): the largest values of earlier calls, the last first.
        amax: (3,): the largest values since the last update.
        dtypes: the three formats.
        margin: headroom for values to grow, in powers of two.
        most_recent: whether the history's first row alone counts.
    """

    scale: Tensor
    history: Tensor
    amax: Tensor
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    margin: int
    most_recent: bool


def update_plain(operations: Sequence[KeptScales]) -> None:
    """As ``scales.update_scales``, of operations on one device; those that are alike together."""
    alike: dict[tuple[Any, ...], list[KeptScales]] = {}
    for kept in operations:
        alike.setdefault((len(kept.history), *kept[3:]), []).append(kept)
    for (length, dtypes, margin, most_recent), own in alike.items():
        scales, histories = [kept.scale for kept in own], [kept.history for kept in own]
        maxima = [kept.amax for kept in own]
        scale, history, amax = torch.stack(scales), torch.stack(histories), torch.stack(maxima)
        # What overflowed says nothing of the calls to come.
        usable = torch.where(amax.isfinite(), amax, 0.0).unsqueeze(1)
        if length > 1:
            seen = usable.any(2, keepdim=True)
            history = torch.where(seen, torch.cat([usable, history[:, :-1]], 1), history)
        else:  # what was not seen keeps its entry: one of the passes may not have run
            history = torch.where(usable > 0, usable, history)
        most = history[:, 0] if most_recent else history.amax(1)
        new = [scale_for(most[:, n], dtype, margin=margin) for n, dtype in enumerate(dtypes)]
        scale = torch.where(most > 0, torch.stack(new, 1), scale)
        torch._foreach_copy_(scales, list(scale))
        torch._foreach_copy_(histories, list(history))
        torch._foreach_zero_(maxima)
