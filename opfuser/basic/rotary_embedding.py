"""Rotary position embedding of packed queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..attention.context_parallel import refuse_counted_positions
from ..attention.rope import Frequencies, RopeScaling
from ..attention.rope_configuration import field_of, read_configuration
from ..errors import ArgumentError, ArgumentTypeError, InputError
from ..kernels.rotary import rotary
from ..kernels.rotary_plain import Rotation
from ..kernels.scalar import wide_dtype
from ..op import BasicOperation, OperationContext, OperationGrads
from ._numbers import is_one_of
from ._rotary_tables import RotaryTables, pairs_of_rows


class RotaryEmbedding(BasicOperation):
    r"""Rotates pairs of entries of queries and keys by angles that grow with the position.

    Pair i, (a, b), of every query and key head at position t becomes ``c (a cos φ - b sin φ, b cos
    φ + a sin φ)`` with ``φ = t ω``, where ``ω = base ** (-2i / rotary_dim)`` and c = 1, unless
    ``scaling`` changes them. The values pass unchanged. The gradient is rotated by the opposite
    angles. Cosine, sine and the products are in fp32 (fp64 for an fp64 input), the output in the
    input's dtype.

    Shapes: input and output ``(batch, sequence, (num_heads + 2 * num_kv_heads) * head_dim)``: the
    heads of the queries, then of the keys, then of the values. Saved: the positions, if given.

    One kernel rotates queries and keys and copies the values: 2A of traffic for A elements.
    Backward is the same with the opposite angles. ATen has no such kernel; in plain torch, each
    step of the formula is a separate pass. Tables of cosine and sine are cached between calls;
    those of explicit ``positions`` are computed at each call.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
    arXiv 2104.09864, which pairs neighbors (``interleaved=True``, as in GPT-J). Llama and
    GPT-NeoX pair entry i with entry ``i + rotary_dim / 2`` instead. Sections: Wang et al.,
    "Qwen2-VL", 2024, arXiv 2409.12191.

    Args:
        num_heads: query heads.
        head_dim: entries per head.
        num_kv_heads: key heads, and as many value heads; None is ``num_heads``. With 0, all heads
            are rotated and there are no values: queries alone, or keys alone.
        base: base of the frequencies.
        interleaved: whether a pair consists of neighbors.
        rotary_dim: entries of a head that are rotated, from its start; None is all of them.
        max_positions: compute angles for this many positions at the first call and refuse longer
            sequences; None grows with the longest sequence so far.
        scaling: an :class:`opfuser.RopeScaling`, or None.
        sections: if a token has several positions, such as time, height and width, the number of
            pairs for each; their sum is ``rotary_dim / 2``.
        interleave_sections: pair i uses position row ``i % len(sections)`` until that section is
            used up, then row 0, as in Qwen3-VL, instead of consecutive sections.

    Keywords of a call (through ``op_kwargs``), constants without gradients:
        positions: an integer tensor ``(sequence,)``, ``(batch, sequence)`` or ``(1, sequence)``;
            with sections, the latter two may have another dimension of ``len(sections)`` in front;
            without it, all sections use the same positions. None means 0, 1, 2, … The values are
            not checked against ``max_positions``, because reading them would wait for the device.
        tables: instead of positions, cosine and sine of the angles of each token and pair, with any
            factor included: floating point, (2, sequence, rotary_dim / 2), or (2, batch * sequence,
            …). Base, scaling and sections are ignored then. For models that compute their own.
        length: of the whole sequence, an int, if a scaling depends on it ("dynamic" and "longrope")
            and it differs from that of the input: in a decoding step, or with several sequences in
            one row.

    Raises:
        ArgumentError: if a size is not positive, ``rotary_dim`` is odd or above ``head_dim``,
            sections do not add up, or ``scaling`` is for another number of pairs.
        ArgumentTypeError: if ``scaling`` is neither a RopeScaling nor None.
        InputError: in forward, if a shape or dtype is not as above, or the sequence is too long.
        NotSupportedError: in forward, within torch's ``context_parallel``, without positions.
    """

    kernels = ("Triton rotary",)

    class Saved(NamedTuple):
        positions: Tensor | None
        """Or the tables, if these were given."""

    class Settings(NamedTuple):
        num_heads: int
        num_kv_heads: int
        head_dim: int
        angles: Frequencies
        interleaved: bool
        max_positions: int | None
        interleave_sections: bool
        length: int | None = None
        """Of the call, where the caller has said so."""

    def __init__(  # noqa: PLR0913 - by keyword
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        base: float = 10000.0,
        interleaved: bool = False,
        rotary_dim: int | None = None,
        max_positions: int | None = None,
        scaling: RopeScaling | None = None,
        sections: Sequence[int] | None = None,
        interleave_sections: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.base = base
        self.interleaved = interleaved
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.max_positions = max_positions
        self.scaling = scaling
        self.sections = None if sections is None else tuple(sections)
        self.interleave_sections = interleave_sections
        self._kept = RotaryTables()
        self.make_settings()

    @classmethod
    def from_hf(
        cls, config: Any, *, layer_type: str | None = None, **others: Any
    ) -> RotaryEmbedding:
        """The embedding of a Hugging Face model: heads, base, scaling, part of a head, sections.

        Configurations do not say whether neighbors are paired; pass ``interleaved=True`` for GPT-J,
        Cohere and the like.

        Args:
            config: a configuration of transformers 4 or 5, or its dict. It is not changed.
            layer_type: such as "full_attention", if types of layers differ.
            others: arguments of the constructor, which take precedence.

        Raises:
            ArgumentError: no usual field has the number of heads or their size, or as for
                :meth:`opfuser.RopeScaling.from_hf`.
        """
        # What the caller says is not looked up: some configurations refuse to be asked.
        heads = others.get("num_heads") or field_of(config, "num_attention_heads")
        size = others.get("head_dim") or field_of(config, "head_dim")
        features = None if size else field_of(config, "hidden_size")
        if not heads or not (size or features):
            raise ArgumentError.explained(
                "A configuration must have num_attention_heads, and head_dim or hidden_size",
                where="RotaryEmbedding.from_hf",
                received=type(config).__name__,
                remedy="Pass num_heads and head_dim too",
            )
        size = size or features // heads
        rope = read_configuration(config, layer_type)
        if "num_kv_heads" not in others:
            others["num_kv_heads"] = field_of(config, "num_key_value_heads")
        arguments = {
            "num_heads": heads,
            "head_dim": size,
            "base": rope.base,
            "rotary_dim": rope.rotary_dim or int(size * rope.partial),
            "scaling": RopeScaling.from_hf(config, layer_type=layer_type),
            "sections": rope.sections,
            "interleave_sections": rope.interleave_sections,
        }
        if arguments["scaling"] == RopeScaling():
            arguments["scaling"] = None
        return cls(**{**arguments, **others})

    def cached_tensors(self) -> Sequence[Tensor]:
        return self._kept.tensors

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key heads (and as many value heads), entries per head."""
        return self.num_heads, self.num_kv_heads, self.head_dim

    @property
    def attention_scaling(self) -> float:
        """The factor of cosine and sine."""
        return self.make_settings().angles.attention_scaling

    def inverse_frequencies(
        self,
        length: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """The angle between neighboring positions in radians, for each pair: (rotary_dim / 2,).

        Args:
            length: of the sequence, if the scaling depends on it; None means a length that the
                model was trained for.
            device: of the result; None is torch's default.
            dtype: of the arithmetic, which runs on the CPU, and of the result.
        """
        device = torch.get_default_device() if device is None else torch.device(device)
        angles = self.make_settings().angles.of_length(length or 0)
        return angles.tensor(torch.device("cpu"), dtype).to(device)

    def make_settings(self) -> RotaryEmbedding.Settings:
        sizes = {
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "base": self.base,
            "rotary_dim": self.rotary_dim,
            "max_positions": 1 if self.max_positions is None else self.max_positions,
        }
        for name, size in sizes.items():
            if size <= 0:
                _refuse(f"{name} must be positive", f"{name}={size}")
        if self.num_kv_heads < 0:
            _refuse("num_kv_heads must not be negative", f"num_kv_heads={self.num_kv_heads}")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            _refuse(
                "rotary_dim must be even and at most head_dim",
                f"rotary_dim={self.rotary_dim}, head_dim={self.head_dim}",
            )
        pairs = self.rotary_dim // 2
        sections = None if self.sections is None else tuple(self.sections)
        if sections is not None:
            _check_sections(sections, pairs, self.interleave_sections)
        if self.scaling is not None:
            if not isinstance(self.scaling, RopeScaling):
                raise ArgumentTypeError.explained(
                    "scaling must be a RopeScaling or None",
                    where="RotaryEmbedding",
                    received=repr(self.scaling),
                    remedy="RopeScaling.from_hf makes one of a configuration or a dict",
                )
            self.scaling.check_pairs(pairs, sections, "RotaryEmbedding")
        return self.Settings(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            Frequencies(self.base, self.rotary_dim, sections, self.scaling),
            self.interleaved,
            self.max_positions,
            self.interleave_sections,
        )

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
        positions: Tensor | None = None,
        length: int | None = None,
        tables: Tensor | None = None,
    ) -> Tensor:
        settings = self.settings_of_call(ctx, length)
        positions = self.given(positions, tables)
        self.check_input(input_, positions, settings)
        if ctx.requires_grad:
            ctx.save_for_backward(*self.Saved(positions))
        return self._turn(input_, positions, settings, back=False)

    def given(self, positions: Tensor | None, tables: Tensor | None) -> Tensor | None:
        """What a call was given of the two.

        Raises:
            InputError: both, or one of them has the other's dtype.
            NotSupportedError: neither, within torch's ``context_parallel``.
        """
        invariant = ""
        if tables is None:
            if positions is None:
                refuse_counted_positions("RotaryEmbedding")
            if positions is None or not positions.is_floating_point():
                return positions
            invariant = "positions must be integer"
        elif positions is None and tables.is_floating_point():
            return tables
        raise InputError.explained(
            invariant or "Tables hold cosine and sine in floating point, in place of positions",
            where="RotaryEmbedding",
            received=", ".join(
                f"{name} {tuple(t.shape)} of {t.dtype}"
                for name, t in (("positions", positions), ("tables", tables))
                if t is not None
            ),
        )

    def settings_of_call(self, ctx: OperationContext, length: int | None) -> Settings:
        """The frozen settings, with the length of the call if it is given."""
        settings: RotaryEmbedding.Settings = self.frozen_settings(ctx)
        if length is not None:
            settings = ctx.settings = settings._replace(length=length)
        return settings

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OperationGrads:
        if not ctx.needs.input:
            return None, ()
        settings = self.frozen_settings(ctx)
        return self._turn(grad_output, ctx.saved_tensors[0], settings, back=True), ()

    def _turn(
        self, x: Tensor, positions: Tensor | None, settings: RotaryEmbedding.Settings, *, back: bool
    ) -> Tensor:
        rotation = self.rotation(x, positions, settings)
        return rotary(x, rotation, settings.num_kv_heads, settings.head_dim, back)

    def rotation(
        self, x: Tensor, positions: Tensor | None, settings: RotaryEmbedding.Settings
    ) -> Rotation:
        """The rotation of tokens x (batch, sequence, features), counted through.

        Its tables hold as many positions as there are tokens before these repeat, or more.
        """
        length, kept = x.shape[1], self._kept
        if positions is not None and positions.is_floating_point():
            cos, sin = positions.to(x.device, wide_dtype(x.dtype)).contiguous().unbind()
            return Rotation(cos, sin, cos.shape[0], settings.interleaved)
        angles = settings.angles.of_length(settings.length or length)
        if positions is None:
            tables = kept.of_sequence(x, angles, settings.max_positions)
            return Rotation(*tables, length, settings.interleaved)
        tables = kept.of_positions(x, positions, angles, settings.interleave_sections)
        return Rotation(*tables, tables.cos.shape[0], settings.interleaved)

    def check_input(
        self, input_: Tensor, positions: Tensor | None, settings: RotaryEmbedding.Settings
    ) -> None:
        """Refuses an input, or positions, of another shape or dtype.

        Raises:
            InputError: they are.
        """
        features = (settings.num_heads + 2 * settings.num_kv_heads) * settings.head_dim
        invariant = ""
        received = f"input {tuple(input_.shape)} of {input_.dtype}"
        if input_.dim() != 3 or input_.shape[2] != features or not input_.is_floating_point():
            invariant = f"The input must be floating point, (batch, sequence, {features})"
        elif positions is not None and positions.is_floating_point():
            pairs = settings.angles.size // 2
            if not _are_tables(positions.shape, input_.shape, pairs):
                invariant = (
                    f"tables must be (2, sequence, {pairs}) or (2, batch * sequence, {pairs})"
                )
                received += f", tables {tuple(positions.shape)}"
        elif positions is not None:
            sections = settings.angles.sections
            if not _fits(positions.shape, input_.shape, sections):
                several = sections and f", or ({len(sections)}, batch, sequence)"
                invariant = "positions must be integer, (sequence,) or (batch, sequence)"
                invariant += several or ""
                received += f", positions {tuple(positions.shape)} of {positions.dtype}"
        elif settings.max_positions is not None and input_.shape[1] > settings.max_positions:
            invariant = "The sequence must not be longer than max_positions"
            received += f", max_positions={settings.max_positions}"
        if settings.length is not None and not invariant:
            length = settings.length
            if isinstance(length, Tensor) or length < 1:
                invariant = "length must be a positive int"
                received = "a tensor" if isinstance(length, Tensor) else f"length={length!r}"
        if invariant:
            raise InputError.explained(invariant, where="RotaryEmbedding", received=received)

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        positions = self.given(kwargs.get("positions"), kwargs.get("tables"))
        settings = self.make_settings()._replace(length=kwargs.get("length"))
        self.check_input(input_, positions, settings)
        if positions is not None and positions.is_floating_point():
            tables = positions.unflatten(1, (-1, input_.shape[1])).unbind()
        else:
            tables = self._reference_tables(input_, positions, settings)
        cos, sin = (table.to(input_.dtype).unsqueeze(-2) for table in tables)
        heads, size = input_.unflatten(2, (-1, self.head_dim)), self.rotary_dim
        qk, v = heads.tensor_split([self.num_heads + self.num_kv_heads], dim=2)
        if self.interleaved:
            a, b = qk[..., 0:size:2], qk[..., 1:size:2]
        else:
            a, b = qk[..., : size // 2], qk[..., size // 2 : size]
        pair = (a * cos - b * sin, b * cos + a * sin)
        turned = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat([torch.cat([turned, qk[..., size:]], -1), v], 2).flatten(2)

    def _reference_tables(
        self, input_: Tensor, positions: Tensor | None, settings: RotaryEmbedding.Settings
    ) -> tuple[Tensor, Tensor]:
        length, device = input_.shape[1], input_.device
        turns = settings.angles.of_length(settings.length or length)
        if positions is None:
            positions = torch.arange(length, device=device)
        angles = positions[..., None] * turns.tensor(device, wide_dtype(input_.dtype))
        if positions.dim() == 3:
            rows = pairs_of_rows(turns.sections or (), settings.interleave_sections)
            mixed = angles[0].clone()
            for row, pairs in enumerate(rows):
                for i in pairs:
                    mixed[..., i] = angles[row, ..., i]
            angles = mixed
        factor = turns.attention_scaling
        return angles.cos() * factor, angles.sin() * factor

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kept": RotaryTables()}

    def extra_repr(self) -> str:
        parts = ["num_heads", "head_dim", "num_kv_heads", "base", "interleaved", "rotary_dim"]
        parts += ["scaling"] * (self.scaling is not None)
        parts += ["sections", "interleave_sections"] * (self.sections is not None)
        return ", ".join(f"{name}={getattr(self, name)}" for name in parts)


def _check_sections(sections: tuple[int, ...], pairs: int, interleave: bool) -> None:
    wrong = any(type(size) is not int or size < 1 for size in sections)
    if wrong or sum(sections) != pairs:
        _refuse(
            "sections must be positive integers that add up to rotary_dim / 2",
            f"sections={sections}, rotary_dim={2 * pairs}",
        )
    rows = pairs_of_rows(sections, interleave)
    if any(pair >= pairs for row in rows for pair in row):
        _refuse(
            "Pairs of interleaved sections must be among the rotary_dim / 2 pairs",
            f"sections={sections}, rotary_dim={2 * pairs}",
        )


def _fits(positions: Sequence[int], x: Sequence[int], sections: tuple[int, ...] | None) -> bool:
    """Whether there is a position for each token."""
    if len(positions) == 3:
        if sections is None or positions[0] != len(sections):
            return False
        positions = positions[1:]
    if len(positions) == 2 and is_one_of(positions[0], 1, x[0]):
        positions = positions[1:]
    return len(positions) == 1 and positions[0] == x[1]


def _are_tables(tables: Sequence[int], x: Sequence[int], pairs: int) -> bool:
    """Whether there are cosines and sines for each position, or each token."""
    if len(tables) != 3 or tables[0] != 2 or tables[2] != pairs:
        return False
    return is_one_of(tables[1], x[1], x[0] * x[1])


def _refuse(invariant: str, received: str) -> NoReturn:
    raise ArgumentError.explained(invariant, where="RotaryEmbedding", received=received)
