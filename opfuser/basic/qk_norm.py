"""Root-mean-square normalization of every query and key head."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, InputError
from ..kernels.rotary import qk_norm, qk_norm_backward
from ..kernels.rotary_plain import Rotation
from ..kernels.scalar import wide_dtype
from ..op import BasicOperation, Dtypes, OperationContext, OperationGrads, in_compute_dtype
from ._dtypes import check_parameter_dtype
from ._norms import check_eps


class QKNorm(BasicOperation):
    r"""Root-mean-square normalization of each query and key head of packed q, k and v.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} w

    for the ``head_dim`` entries x of each head, with one weight w for all query heads and one for
    all key heads. The values pass unchanged. Statistics and arithmetic are in fp32 (fp64 for an
    fp64 input), whatever the dtype of the parameters; the output has the compute dtype (autocast's,
    else the input's).

    Shapes: input and output ``(..., (num_heads + 2 * num_kv_heads) * head_dim)``: the heads of the
    queries, then of the keys, then of the values. Saved: the input, and
    ``1 / sqrt(mean(x²) + eps)``, ``(..., num_heads + num_kv_heads)``.

    One kernel in forward; in backward one, and a second that sums the weight gradients. Norms of
    other libraries need contiguous rows and one weight, and so copies of the queries and the keys.

    Sources: Henry et al., "Query-Key Normalization for Transformers", 2020, arXiv 2010.04245, and
    Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters", 2023, arXiv 2302.05442.
    With RMSNorm, as here, in Qwen3, OLMo 2 and Gemma 3.

    Args:
        num_heads: query heads.
        head_dim: entries per head.
        num_kv_heads: key heads, and as many value heads; None is ``num_heads``.
        eps: added to the mean square.
        device: of the weights; None is torch's default.
        dtype: of the weights; None is torch's default.
        zero_centered_gamma: scale by ``1 + weight``; the weights are then initialized to zero.

    Raises:
        ArgumentError: if a size is not positive, ``eps`` is negative or not finite, or ``dtype`` is
            not fp16, bf16, fp32 or fp64.
        ArgumentTypeError: if ``eps`` is not a number.
        InputError: in forward, if a shape or dtype is not as above.
    """

    kernels = ("Triton rotary",)
    backward_reads_parameters = True
    weight_is_cast: bool = False  # as of a norm
    read_only: ClassVar[frozenset[str]] = frozenset({"head_dim"})

    class Saved(NamedTuple):
        input: Tensor
        rstd: Tensor

    class Settings(NamedTuple):
        num_heads: int
        num_kv_heads: int
        eps: float
        zero_centered_gamma: bool

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_parameter_dtype(dtype, "QKNorm")
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.make_settings()
        self.q_weight = nn.Parameter(torch.empty(head_dim, device=device, dtype=dtype))
        self.k_weight = nn.Parameter(torch.empty(head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def make_settings(self) -> QKNorm.Settings:
        sizes = ("num_heads", self.num_heads), ("head_dim", self.head_dim)
        for name, size in (*sizes, ("num_kv_heads", self.num_kv_heads)):
            if size < 1:
                raise ArgumentError.explained(
                    f"{name} must be positive", where="QKNorm", received=f"{name}={size}"
                )
        check_eps(self.eps, "QKNorm")
        flag = self.zero_centered_gamma
        return self.Settings(self.num_heads, self.num_kv_heads, self.eps, flag)

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key heads (and as many value heads), entries per head."""
        return self.num_heads, self.num_kv_heads, self.head_dim

    def reset_parameters(self) -> None:
        """Sets the scales to one."""
        for weight in (self.q_weight, self.k_weight):
            nn.init.constant_(weight, 0.0 if self.zero_centered_gamma else 1.0)

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        return dtypes.compute

    def holds_data(self, n: int) -> bool:
        return self.zero_centered_gamma or self.weight_is_cast

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
    ) -> Tensor:
        self.check_input(input_, self.frozen_settings(ctx))
        x = in_compute_dtype(input_, self)
        return self.normalize(ctx, x, None)

    def normalize(self, ctx: OperationContext, x: Tensor, rotation: Rotation | None) -> Tensor:
        """The output for x in the compute dtype, rotated by a RotaryEmbedding's angles if given.

        Saves the tensors that :meth:`op_backward` reads.
        """
        _, kv_heads, eps, zero_centered = self.frozen_settings(ctx)
        weights = self.q_weight, self.k_weight
        y, rstd = qk_norm(x, *weights, rotation, kv_heads, eps, zero_centered)
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(x, rstd))
        return y

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        return self.gradients(ctx, grad_output, None)

    def gradients(
        self, ctx: OperationContext, grad_output: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor | None, tuple[Tensor | None, Tensor | None]]:
        """The result of :meth:`op_backward` for a gradient of rotated queries and keys."""
        x, rstd = ctx.saved_tensors
        need_dx, (need_dq, need_dk), _ = ctx.needs
        *_, zero_centered = self.frozen_settings(ctx)
        wants = need_dx, need_dq or need_dk
        dx, dq, dk = qk_norm_backward(
            grad_output, x, *ctx.parameters, rstd, rotation, zero_centered, *wants
        )
        if dx is not None and dx.dim() != grad_output.dim():  # saved as rows
            dx = dx.view_as(grad_output)
        return dx, (dq if need_dq else None, dk if need_dk else None)

    def check_input(self, input_: Tensor, settings: QKNorm.Settings) -> None:
        """Raises InputError unless the last dimension of ``input_`` holds all heads."""
        features = (settings.num_heads + 2 * settings.num_kv_heads) * self.head_dim
        if not input_.dim() or input_.shape[-1] != features:
            raise InputError.explained(
                f"The input must be (..., {features})",
                where=f"QKNorm({self.extra_repr()})",
                received=f"shape {tuple(input_.shape)}",
                remedy="Pass queries, keys and values packed in the last dimension",
            )

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        self.check_input(input_, self.make_settings())
        wide = input_.to(wide_dtype(input_.dtype)).unflatten(-1, (-1, self.head_dim))
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        *qk, values = wide.split(sizes, dim=-2)
        parts = []
        for heads, weight in zip(qk, (self.q_weight, self.k_weight)):
            scale = weight.to(wide.dtype) + int(self.zero_centered_gamma)
            mean_square = heads.square().mean(-1, keepdim=True)
            parts.append(heads * torch.rsqrt(mean_square + self.eps) * scale)
        return torch.cat([*parts, values], -2).flatten(-2).to(input_.dtype)

    def extra_repr(self) -> str:
        centered = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"num_kv_heads={self.num_kv_heads}, eps={self.eps}{centered}"
        )
