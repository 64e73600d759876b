"""Rotary position embedding of packed queries and keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError, InputError, explain
from ..op import BasicOperation, OperationContext

__all__ = ["RotaryEmbedding"]


class RotaryEmbedding(BasicOperation):
    r"""Rotates pairs of entries of queries and keys by angles that grow with the position.

    The pair (a, b) number i of every query and key head at position t becomes
    ``(a cos φ - b sin φ, b cos φ + a sin φ)`` with ``φ = t * base ** (-2i / rotary_dim)``. The
    values pass unchanged. The gradient is rotated by the opposite angles. Cosine, sine and the
    products are in fp32 (fp64 for an fp64 input), the output in the input's dtype.

    Shapes: input and output ``(batch, sequence, (num_heads + 2 * num_kv_heads) * head_dim)``: the
    heads of the queries, then of the keys, then of the values.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
    arXiv 2104.09864, which pairs neighbours (``interleaved=True``, as in GPT-J). Llama and
    GPT-NeoX pair entry i with entry ``i + rotary_dim / 2`` instead.

    Args:
        num_heads: query heads.
        head_dim: entries per head.
        num_kv_heads: key heads, and as many value heads; None is ``num_heads``.
        base: base of the frequencies.
        interleaved: whether a pair consists of neighbours.
        rotary_dim: entries of a head that are rotated, from its start; None is all of them.
        max_positions: compute angles for this many positions at the first call and refuse longer
            sequences; None follows the longest sequence seen.

    Keyword of a call (through ``op_kwargs``): ``positions``, an integer tensor ``(sequence,)`` or
    ``(batch, sequence)``; None is 0, 1, 2, … Its values are not held to ``max_positions``, since
    reading them would wait for the device.

    Raises:
        ArgumentError: if a size is not positive, or ``rotary_dim`` is odd or above ``head_dim``.
        InputError: in forward, if a shape or dtype is not as above, or the sequence is too long.
    """

    class Saved(NamedTuple):
        positions: Tensor | None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        base: float = 10000.0,
        interleaved: bool = False,
        rotary_dim: int | None = None,
        max_positions: int | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.base = base
        self.interleaved = interleaved
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.max_positions = max_positions
        # One table per device and dtype: it grows with the longest sequence, nothing else.
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._check_arguments()

    def _check_arguments(self) -> None:
        sizes = {
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "num_kv_heads": self.num_kv_heads,
            "base": self.base,
            "rotary_dim": self.rotary_dim,
            "max_positions": 1 if self.max_positions is None else self.max_positions,
        }
        for name, size in sizes.items():
            if size <= 0:
                raise ArgumentError(
                    explain(
                        f"{name} must be positive",
                        where="RotaryEmbedding",
                        received=f"{name}={size}",
                    )
                )
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ArgumentError(
                explain(
                    "rotary_dim must be even and at most head_dim",
                    where="RotaryEmbedding",
                    received=f"rotary_dim={self.rotary_dim}, head_dim={self.head_dim}",
                )
            )

    def op_forward(  # type: ignore[override]  # takes one keyword of its own
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        self._check_input(input_, positions)
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(positions))
        cos, sin = self._angles(input_, positions)
        return self._rotate(input_, cos, sin, sign=1)

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, tuple[()]]:
        if not ctx.needs.input:
            return None, ()
        assert ctx.saved_tensors is not None
        cos, sin = self._angles(grad_output, ctx.saved_tensors[0])
        return self._rotate(grad_output, cos, sin, sign=-1), ()

    def _rotate(self, input_: Tensor, cos: Tensor, sin: Tensor, *, sign: int) -> Tensor:
        """Rotates by ``sign`` times the angles; ``cos`` and ``sin`` are (…, sequence, 1, pairs)."""
        output = torch.empty_like(input_, memory_format=torch.contiguous_format)
        src, dst = self._heads(input_), self._heads(output)
        rotated = self.num_heads + self.num_kv_heads
        dst[:, :, rotated:].copy_(src[:, :, rotated:])
        if self.rotary_dim < self.head_dim:
            tail = slice(self.rotary_dim, None)
            dst[:, :, :rotated, tail].copy_(src[:, :, :rotated, tail])
        a, b = self._pairs(src[:, :, :rotated])
        a_out, b_out = self._pairs(dst[:, :, :rotated])
        a_out.copy_((a * cos).addcmul_(b, sin, value=-sign))
        b_out.copy_((b * cos).addcmul_(a, sin, value=sign))
        return output

    def _heads(self, packed: Tensor) -> Tensor:
        heads = self.num_heads + 2 * self.num_kv_heads
        return packed.view(*packed.shape[:2], heads, self.head_dim)

    def _pairs(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        size = self.rotary_dim
        if self.interleaved:
            return heads[..., 0:size:2], heads[..., 1:size:2]
        return heads[..., : size // 2], heads[..., size // 2 : size]

    def _angles(self, input_: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosine and sine, broadcastable over the heads of the packed tensor."""
        length, device = input_.shape[1], input_.device
        dtype = torch.float64 if input_.dtype == torch.float64 else torch.float32
        if positions is not None:
            return self._compute(positions.to(device), dtype)
        # A tensor made while tracing, or a subclass such as a fake tensor, must not outlive it.
        if torch.compiler.is_compiling() or type(input_) is not Tensor:
            return self._compute(torch.arange(length, device=device), dtype)
        cos, sin = self._tables.get((device, dtype), (None, None))
        if cos is None or sin is None or cos.shape[0] < length:
            count = self.max_positions or length
            cos, sin = self._compute(torch.arange(count, device=device), dtype)
            if type(cos) is Tensor:
                self._tables[device, dtype] = cos, sin
        return cos[:length], sin[:length]

    def _compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, self.rotary_dim, 2, device=positions.device, dtype=dtype)
        frequencies = 1.0 / (self.base ** (exponents / self.rotary_dim))
        angles = positions[..., None, None].to(dtype) * frequencies
        return angles.cos(), angles.sin()

    def _check_input(self, input_: Tensor, positions: Tensor | None) -> None:
        features = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        invariant = ""
        received = f"input {tuple(input_.shape)} of {input_.dtype}"
        if input_.dim() != 3 or input_.shape[2] != features or not input_.is_floating_point():
            invariant = f"The input must be floating point, (batch, sequence, {features})"
        elif positions is not None:
            if positions.is_floating_point() or positions.shape not in (
                input_.shape[1:2],
                input_.shape[:2],
            ):
                invariant = "positions must be integer, (sequence,) or (batch, sequence)"
                received += f", positions {tuple(positions.shape)} of {positions.dtype}"
        elif self.max_positions is not None and input_.shape[1] > self.max_positions:
            invariant = "The sequence must not be longer than max_positions"
            received += f", max_positions={self.max_positions}"
        if invariant:
            raise InputError(explain(invariant, where="RotaryEmbedding", received=received))

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        positions = kwargs.get("positions")
        self._check_input(input_, positions)
        if positions is None:
            positions = torch.arange(input_.shape[1], device=input_.device)
        dtype = torch.float64 if input_.dtype == torch.float64 else torch.float32
        cos, sin = (table.to(input_.dtype) for table in self._compute(positions, dtype))
        heads, size = self._heads(input_), self.rotary_dim
        qk, v = heads.tensor_split([self.num_heads + self.num_kv_heads], dim=2)
        a, b = self._pairs(qk)
        pair = (a * cos - b * sin, b * cos + a * sin)
        turned = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat([torch.cat([turned, qk[..., size:]], -1), v], 2).flatten(2)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_tables": {}}

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"num_kv_heads={self.num_kv_heads}, base={self.base}, "
            f"interleaved={self.interleaved}, rotary_dim={self.rotary_dim}"
        )
