"""Layer normalization."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from .norm import Norm


class LayerNorm(Norm):
    r"""Layer normalization over the last dimensions.

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} w + b

    Shapes: x and y ``(*rows, *normalized_shape)``, w and b ``normalized_shape``. Statistics and
    arithmetic are in fp32 (fp64 for an fp64 input), whatever the dtype of the parameters; the
    output has the compute dtype (autocast's, else the input's). Saved: the input, and mean and ``1
    / sqrt(var + eps)`` of shape ``rows``. A bias of None is omitted.

    For A elements, forward moves 2A and backward 3A on a GPU, including the gradients of the
    parameters, up to 8192 columns. Kernels: opfuser's own, because ATen's ``native_layer_norm``
    takes no residual, needs parameters in the dtype of x, and computes their gradients in a second
    pass; on a CPU, ATen's.

    Source: Ba et al., "Layer Normalization", 2016, arXiv 1607.06450.

    Args:
        normalized_shape: size of the last dimension, or of several.
        eps: added to the variance.
        device: of the parameters; None is torch's default.
        dtype: of the parameters; None is torch's default.
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

    with_mean = with_bias = True

    class Saved(NamedTuple):
        input: Tensor
        mean: Tensor
        rstd: Tensor

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        bias = None if self.bias is None else self.bias.to(input_.dtype)
        return F.layer_norm(input_, self.normalized_shape, weight.to(input_.dtype), bias, self.eps)
