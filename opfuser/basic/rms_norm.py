"""Root-mean-square normalization."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.scalar import wide_dtype
from .norm import Norm


class RMSNorm(Norm):
    r"""Root-mean-square normalization over the last dimensions.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} w

    Shapes: x and y ``(*rows, *normalized_shape)``, w ``normalized_shape``. Statistics and
    arithmetic are in fp32 (fp64 for an fp64 input), whatever the dtype of the parameters; the
    output has the compute dtype (autocast's, else the input's). Saved: the input, and
    ``1 / sqrt(mean(x²) + eps)`` of shape ``rows``.

    For A elements, forward moves 2A and backward 3A on a GPU, including the weight gradient, up to
    8192 columns. Kernels: ours, as ATen's ``_fused_rms_norm`` takes no residual and, for the weight
    gradient, a second pass; on a CPU ATen's, where ``rms_norm`` is decomposed and slow.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv 1910.07467.

    Args:
        normalized_shape: size of the last dimension, or of several.
        eps: added to the mean square.
        device: of the weight; None is torch's default.
        dtype: of the weight; None is torch's default.
        zero_centered_gamma: scale by ``1 + weight``; the weight is then initialized to zero.
        sm_margin: must be 0, or a dict of zeros.

    Raises:
        ArgumentError: if ``normalized_shape`` is empty or has a size that is not positive, ``eps``
            is negative or not finite, or ``dtype`` is not fp16, bf16, fp32 or fp64.
        ArgumentTypeError: if ``eps`` is not a number.
        InputError: in forward, if the last dimensions of x are not ``normalized_shape``, or x is
            not fp16, bf16, fp32 or fp64.
        NotSupportedError: if ``sm_margin`` reserves multiprocessors.
    """

    with_mean = with_bias = False

    class Saved(NamedTuple):
        input: Tensor
        rstd: Tensor

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        wide = input_.to(wide_dtype(input_.dtype))
        dims = tuple(range(-len(self.normalized_shape), 0))
        rstd = torch.rsqrt(wide.square().mean(dims, keepdim=True) + self.eps)
        scale = self.weight.to(wide.dtype)
        return (wide * rstd * (scale + 1 if self.zero_centered_gamma else scale)).to(input_.dtype)
