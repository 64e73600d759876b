"""What the tests of gradients that a GEMM adds itself share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["ADDS", "handed_over"]

ADDS: dict[str, Any] = {"accumulate_into_grad": True}


def handed_over(y: Tensor, weight: Tensor) -> list[bool]:
    """Gains an entry in each backward of the run that ends in ``y``: whether it gave a gradient."""
    told: list[bool] = []
    node = y.grad_fn
    assert node is not None
    targets = [n for n, (at, _) in enumerate(node.next_functions) if _leads_to(at, weight)]
    assert targets

    def look(grads: tuple[Tensor | None, ...], _: Any) -> None:
        told.extend(grads[n] is not None for n in targets)

    node.register_hook(look)
    return told


def _leads_to(node: Any, weight: Tensor) -> bool:
    return getattr(node, "variable", None) is weight
