"""What code asks that a tracer may run of sizes that it treats as variable.

A loop over such a size would fix it: the graph would hold for this size alone, and every other one
would be traced anew. So what is done piece by piece is done in as many pieces as the traced call
needs, whose sizes follow those of each call.
"""

from __future__ import annotations

import sys

import torch

from ..runtime.tracing import exporting


def hint(size: int) -> int:
    """The size in the traced call, without fixing it; a size that is fixed as it is."""
    if not isinstance(size, torch.SymInt):
        return size
    shapes = sys.modules["torch.fx.experimental.symbolic_shapes"]  # heavy, and there by now
    # The first name is that of later versions than torch 2.11.
    known = getattr(shapes, "optimization_hint", None) or shapes.size_hint
    return int(known(size, fallback=1))


def pieces(size: int, count: int, multiple: int = 1) -> list[slice]:
    """``count`` pieces of a variable size; all but the last one are equally long.

    Args:
        size: what is cut.
        count: of the pieces. While torch.export traces there is one: its graph is to hold for all
            sizes, which could not be shown of the bounds of several.
        multiple: of which the lengths of all but the last one are multiples.
    """
    if count == 1 or exporting():
        return [slice(0, size)]
    length = size // (count * multiple) * multiple
    inner = [slice(n * length, (n + 1) * length) for n in range(count - 1)]
    return [*inner, slice((count - 1) * length, size)]
