"""Rotary position embedding of packed queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError, InputError, explain
from ..kernels.rotary import Rotation, rotary
from ..kernels.scalar import wide_dtype
from ..op import BasicOperation, OperationContext

__all__ = ["RotaryEmbedding"]

# Kept of each kind, for different devices, dtypes and attributes: a base that changes at every step
# must not pile tables up.
_MAX_TABLES = 8


class RotaryEmbedding(BasicOperation):
    r"""Rotates pairs of entries of queries and keys by angles that grow with the position.

    The pair (a, b) number i of every query and key head at position t becomes
    ``(a cos φ - b sin φ, b cos φ + a sin φ)`` with ``φ = t * base ** (-2i / rotary_dim)``. The
    values pass unchanged. The gradient is rotated by the opposite angles. Cosine, sine and the
    products are in fp32 (fp64 for an fp64 input), the output in the input's dtype.

    Shapes: input and output ``(batch, sequence, (num_heads + 2 * num_kv_heads) * head_dim)``: the
    heads of the queries, then of the keys, then of the values. Saved: the positions, if given.

    One kernel turns queries and keys and copies the values, 2A of traffic for A elements; backward
    is the same with the opposite angles. ATen has no such kernel, and in plain torch each step of
    the formula is a pass of its own. Tables of cosine and sine are kept from call to call; those of
    given positions are made anew.

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

    class Settings(NamedTuple):
        num_heads: int
        num_kv_heads: int
        head_dim: int
        base: float
        rotary_dim: int
        interleaved: bool
        max_positions: int | None

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
        self._kept = _Kept()
        self.make_settings()

    def cached_tensors(self) -> Sequence[Tensor]:
        tables = [t for table in self._kept.tables.values() for t in table]
        return [*tables, *self._kept.frequencies.values()]

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key heads (and as many value heads), entries per head."""
        return self.num_heads, self.num_kv_heads, self.head_dim

    def make_settings(self) -> RotaryEmbedding.Settings:
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
        return self.Settings(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.base,
            self.rotary_dim,
            self.interleaved,
            self.max_positions,
        )

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        settings = ctx.settings or self.frozen_settings(ctx)
        self.check_input(input_, positions, settings)
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(positions))
        return self._turn(input_, positions, settings, back=False)

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, tuple[()]]:
        if not ctx.needs.input:
            return None, ()
        settings = ctx.settings or self.frozen_settings(ctx)
        return self._turn(grad_output, ctx.saved_tensors[0], settings, back=True), ()

    def _turn(
        self, x: Tensor, positions: Tensor | None, settings: RotaryEmbedding.Settings, *, back: bool
    ) -> Tensor:
        rotation = self.rotation(x, positions, settings)
        y: Tensor = rotary(x, rotation, settings.num_kv_heads, settings.head_dim, back)
        return y

    def rotation(
        self, x: Tensor, positions: Tensor | None, settings: RotaryEmbedding.Settings
    ) -> Rotation:
        """The rotation of tokens x (batch, sequence, features), counted through.

        Its tables hold as many positions as there are tokens before these repeat, or more.
        """
        length, device, interleaved = x.shape[1], x.device, settings.interleaved
        dtype = wide_dtype(x.dtype)
        # A tensor made while tracing, or a subclass such as a fake tensor, must not outlive it.
        lasting = not torch.compiler.is_compiling() and type(x) is Tensor
        if positions is not None:
            frequencies = self._frequencies(device, dtype, settings, lasting)
            tables = _turns(positions.to(device).reshape(-1), frequencies)
            return Rotation(*tables, positions.numel(), interleaved)
        key = device, dtype, settings.base, settings.rotary_dim
        table = self._kept.tables.get(key) if lasting else None
        if table is None or table[0].shape[0] < length:
            count = settings.max_positions or length
            frequencies = self._frequencies(device, dtype, settings, lasting)
            table = _turns(torch.arange(count, device=device), frequencies)
            if lasting and type(table[0]) is Tensor:
                _keep(self._kept.tables, key, table)
        return Rotation(*table, length, interleaved)

    def _frequencies(
        self,
        device: torch.device,
        dtype: torch.dtype,
        settings: RotaryEmbedding.Settings,
        lasting: bool,
    ) -> Tensor:
        """Angle between neighbouring positions, for each pair."""
        base, size = settings.base, settings.rotary_dim
        key = device, dtype, base, size
        kept = self._kept.frequencies.get(key) if lasting else None
        if kept is None:
            exponents = torch.arange(0, size, 2, device=device, dtype=dtype)
            kept = 1.0 / (base ** (exponents / size))
            if lasting and type(kept) is Tensor:
                _keep(self._kept.frequencies, key, kept)
        return kept

    def check_input(
        self, input_: Tensor, positions: Tensor | None, settings: RotaryEmbedding.Settings
    ) -> None:
        features = (settings.num_heads + 2 * settings.num_kv_heads) * settings.head_dim
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
        elif settings.max_positions is not None and input_.shape[1] > settings.max_positions:
            invariant = "The sequence must not be longer than max_positions"
            received += f", max_positions={settings.max_positions}"
        if invariant:
            raise InputError(explain(invariant, where="RotaryEmbedding", received=received))

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        positions = kwargs.get("positions")
        settings = self.make_settings()
        self.check_input(input_, positions, settings)
        if positions is None:
            positions = torch.arange(input_.shape[1], device=input_.device)
        frequencies = self._frequencies(input_.device, wide_dtype(input_.dtype), settings, False)
        cos, sin = (
            table.to(input_.dtype).unflatten(0, positions.shape).unsqueeze(-2)
            for table in _turns(positions.reshape(-1), frequencies)
        )
        heads, size = input_.unflatten(2, (-1, self.head_dim)), self.rotary_dim
        qk, v = heads.tensor_split([self.num_heads + self.num_kv_heads], dim=2)
        if self.interleaved:
            a, b = qk[..., 0:size:2], qk[..., 1:size:2]
        else:
            a, b = qk[..., : size // 2], qk[..., size // 2 : size]
        pair = (a * cos - b * sin, b * cos + a * sin)
        turned = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat([torch.cat([turned, qk[..., size:]], -1), v], 2).flatten(2)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kept": _Kept()}

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"num_kv_heads={self.num_kv_heads}, base={self.base}, "
            f"interleaved={self.interleaved}, rotary_dim={self.rotary_dim}"
        )


class _Kept:
    """Angles by device, dtype, base and rotary_dim; an object that no plan depends on.

    Attributes:
        tables: cosine and sine, for as many positions as the longest sequence had.
        frequencies: angles between neighbouring positions.
    """

    def __init__(self) -> None:
        self.tables: dict[Any, tuple[Tensor, Tensor]] = {}
        self.frequencies: dict[Any, Tensor] = {}


def _keep(tables: dict[Any, Any], key: Any, table: Any) -> None:
    """Keeps it, and forgets the one that was first made if there are too many."""
    if key not in tables and len(tables) >= _MAX_TABLES:
        tables.pop(next(iter(tables)), None)
    tables[key] = table


def _turns(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions[:, None].to(frequencies.dtype) * frequencies
    return angles.cos(), angles.sin()
