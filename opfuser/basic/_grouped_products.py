"""The three products of a call of GroupedLinear, and what its forward saves for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import gemm
from ._grouped_weight_grad import GroupedProduct, ScaledGroupedProduct


def matrices(weights: Sequence[Tensor], dtype: Any) -> Tensor | list[Tensor]:
    """The weights in ``dtype``, as one tensor where they are stored as one."""
    if weights[0].dim() == 3:
        return weights[0].to(dtype)
    return [w.to(dtype) for w in weights]


class GroupedProducts:
    """Products of tensors in the dtype that the operation computes in. Others derive from it."""

    def reads_sizes(self, x: Tensor, out_features: int) -> bool:
        """Whether the host must know the sizes of the groups of ``x``."""
        return not gemm.has_grouped_gemm(x, out_features)

    def forward(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        groups: gemm.RowGroups,
        *,
        out: Tensor | None,
        save: bool,
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """The output without bias, and what to save.

        Args:
            x: (T, K) in the dtype to compute in.
            weights: as they are stored.
            groups: of the rows.
            out: memory for the output, or None.
            save: whether :meth:`wgrad` will be called.
        """
        y = gemm.grouped_forward(x, matrices(weights, x.dtype), groups, out=out)
        return y, (x if save else None,)

    def output_grad(self, dy: Tensor, saved: Sequence[Tensor | None]) -> Tensor:
        """``dy`` in the dtype that the next two take."""
        (x,) = saved
        return dy if x is None else dy.to(x.dtype)

    def dgrad(
        self,
        dy: Tensor,
        weights: Sequence[Tensor],
        groups: gemm.RowGroups,
        *,
        out: Tensor | None,
    ) -> Tensor:
        """The gradient of the input, (T, K)."""
        return gemm.grouped_dgrad(dy, matrices(weights, dy.dtype), groups, out=out)

    def wgrad(
        self,
        dy: Tensor,
        saved: Sequence[Tensor | None],
        weights: Sequence[Tensor],
        groups: gemm.RowGroups,
    ) -> GroupedProduct | ScaledGroupedProduct:
        """The gradients of the weights, not computed yet."""
        (x,) = saved
        assert x is not None
        return GroupedProduct(dy, x, groups)


PLAIN = GroupedProducts()
