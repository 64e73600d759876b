"""Products of groups of consecutive rows whose operands are codes with scales.

Symbols as in :mod:`.grouped`. Groups are found on the device, with codes as ``kernels.groups`` lays
them out. Those of MXFP8 and NVFP4 are multiplied as values in bf16, in which they are exact, as no
grouped GEMM of these formats could be tested; scales of tensors in fp32 are applied to the sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.grouped_products import columns_by_columns, rows_by_matrices
from ..kernels.microscaling import decode
from ..kernels.microscaling_plain import E8M0, FP4, tensor_scale
from ..kernels.quantize import BLOCK, Codes
from .scaled import Accumulation


def grouped_scaled_forward(
    x: Codes, w: Codes, ends: Tensor, how: Accumulation, out: Tensor | None = None
) -> Tensor:
    """``y[rows of g] = x[rows of g] W[g]ᵀ``, (T, N), from codes by rows.

    Args:
        x: (T, K).
        w: of all groups, (G N, K), without padding.
        ends: of ``kernels.groups.group_ends``.
        how: see there.
        out: where to write the result.
    """
    groups = ends.shape[1]
    (rows, row_scale), (matrices, scale) = _by_rows(x), _by_rows(w)
    scale = scale.unflatten(0, (groups, -1))
    if scale.dim() == 3:
        scale = scale[..., : matrices.shape[1] // BLOCK]
    return _written((rows, matrices.unflatten(0, (groups, -1)), row_scale, scale, ends), how, out)


def grouped_scaled_dgrad(
    dy: Codes, w: Codes, ends: Tensor, how: Accumulation, out: Tensor | None = None
) -> Tensor:
    """``dx[rows of g] = dy[rows of g] W[g]``, (T, K), from codes of dy by rows, W by columns.

    Args as in :func:`grouped_scaled_forward`, but for dy (T, N).
    """
    groups = ends.shape[1]
    (rows, row_scale), (matrices, scale) = _by_rows(dy), _by_cols(w, groups)
    features = rows.shape[1]
    matrices = matrices.unflatten(1, (groups, -1))[..., :features].transpose(0, 1)
    if scale.dim() == 1:
        scale = scale.unflatten(0, (groups, -1))
    else:
        blocks = features // BLOCK
        scale = scale[:, : groups * blocks].unflatten(1, (groups, blocks)).transpose(0, 1)
    return _written((rows, matrices, row_scale, scale, ends), how, out)


def grouped_scaled_wgrad(dy: Codes, x: Codes, ends: Tensor, how: Accumulation) -> Tensor:
    """``dW[g] = dy[rows of g]ᵀ x[rows of g]``, (G, N, K), from codes by columns.

    Args:
        dy: (T, N).
        x: (T, K).
        ends: as in :func:`grouped_scaled_forward`.
        how: see there.
    """
    (left, left_scale), (right, right_scale) = (_by_cols(c, ends.shape[1]) for c in (dy, x))
    given = left, right, left_scale, right_scale, ends
    return columns_by_columns(*given, how.dtype, split=how.split)


def _by_rows(codes: Codes) -> tuple[Tensor, Tensor]:
    assert codes.rows is not None
    assert codes.row_scale is not None
    return _multiplied(codes.rows, codes.row_scale, len(codes.rows))


def _by_cols(codes: Codes, groups: int) -> tuple[Tensor, Tensor]:
    assert codes.cols is not None
    assert codes.col_scale is not None
    return _multiplied(codes.cols, codes.col_scale, groups * len(codes.cols))


def _multiplied(codes: Tensor, scale: Tensor, vectors: int) -> tuple[Tensor, Tensor]:
    """FP8 codes and their scales; of others values in bf16, and one scale for each of the vectors.

    These are rows, or the columns of all groups.
    """
    if scale.dtype == E8M0:
        return decode(codes, scale), scale.new_ones(vectors, dtype=torch.float32)
    if codes.dtype == FP4:
        of_tensors = tensor_scale(codes, scale)
        each = of_tensors.repeat_interleave(vectors // of_tensors.numel())
        return decode(codes, scale), each
    return codes, scale


def _written(
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], how: Accumulation, out: Tensor | None
) -> Tensor:
    """The product of rows by matrices in ``how.dtype``, and from there in ``out``."""
    same = out is not None and out.dtype == how.dtype
    y = rows_by_matrices(*given, how.dtype, split=how.split, out=out if same else None)
    return y if same or out is None else out.copy_(y)
