"""Linear transformation with a frozen weight and trained products of low rank beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import gemm
from ..core.context import COMPUTE_DTYPES, any_autocast, autocast_dtype
from ..core.fusion import Env, Refusal
from ..distributed.collectives import LinearSharding
from ..errors import ArgumentError
from ..kernels.dropout_masks import draw_mask
from ..op import OperationContext
from ._linear_operation import LinearOperation
from ._numbers import real_number
from .bias import bias_grad


class LoRAAdapter(NamedTuple):
    """An adapter ``s B A`` of a :class:`LoRALinear`, A (rank, in), B (out, rank).

    Attributes:
        name: part of the names of its parameters.
        rank: rows of A.
        scale: s; ``alpha / rank`` in LoRA, ``alpha / sqrt(rank)`` in rsLoRA.
        dropout: probability with which entries of its input are zeroed during training.
        output: number of the output that it is added to, where there are several.
        active: whether it is added.
    """

    name: str = "default"
    rank: int = 8
    scale: float = 1.0
    dropout: float = 0.0
    output: int = 0
    active: bool = True


class LoRALinear(LinearOperation):
    r"""Linear transformation with low-rank adapters (LoRA) next to a frozen weight.

    .. math:: y = x W^T + b + \sum_i s_i\, d_i(x) A_i^T B_i^T

    d_i is dropout.

    With several ``out_features`` it is one such function for each, side by side in the last
    dimension of y, with ``weight0``, ``bias0``, ``weight1`` ...; adapters say which they belong to.

    W and b are frozen when they are made: nothing is saved for their gradients, which are computed
    where ``requires_grad`` of W or b is set. Saved are x, and of dropout its masks, one for each
    adapter: a seed of 8 bytes where kernels run, else a byte per entry of x. The A of all adapters
    without dropout are one matrix in their products with x and with gradients. Products of low rank
    are added to y and dx inside the GEMMs, without a tensor of that size of their own, unless the
    adapters are of a wider dtype than W: then both are rounded once more.

    Shapes: x ``(..., in_features)``, W ``(out_features, in_features)``, b ``(out_features,)``, A_i
    ``(rank, in_features)``, B_i ``(out_features, rank)``, y ``(..., out_features)``, fp16, bf16,
    fp32 or fp64. Under autocast everything is computed in its dtype; otherwise x W^T in that of W,
    which y has, and adapters in the wider one of theirs and that of W. Regions of quantised compute
    leave the operation out.

    The ``state_dict`` has ``weight``, ``bias``, ``lora_A_<name>`` and ``lora_B_<name>``. One of a
    ``lora.Linear`` of PEFT loads too: ``base_layer.weight``, ``lora_A.<name>.weight`` and the like.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685.

    Attributes:
        adapters: a tuple. Replace it to activate, scale or drop out otherwise, such as
            ``op.adapters = tuple(a._replace(scale=2.0) for a in op.adapters)``.

    Args:
        in_features: last dimension of x.
        out_features: last dimension of y, or of each part of it.
        adapters: one or several.
        bias: whether to add a bias.
        device: of the parameters; None is torch's default.
        dtype: of W and b; None is torch's default.
        adapter_dtype: of the adapters; None is ``dtype``.
        weight_transposed: make the weight :math:`W^T` (in_features, out_features).

    Raises:
        ArgumentError: sizes, dtypes, names, ranks or probabilities outside their domain; other
            names or ranks set later; in a call, weights that were cleared or differ in dtype.
        ArgumentTypeError: a scale or a dropout is no real number.
        InputError: the last dimension of x is not ``in_features``, or x is of another dtype.
    """

    kernels = ("GEMM",)
    read_only: ClassVar[frozenset[str]] = frozenset(
        {"in_features", "out_features", "sharding", "sizes", "weight_transposed"}
    )

    class Settings(NamedTuple):
        active: tuple[tuple[int, LoRAAdapter], ...]
        """Those that are added, with their numbers; dropout is 0 in evaluation."""

    adapters: tuple[LoRAAdapter, ...]

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        adapters: Sequence[LoRAAdapter] = (LoRAAdapter(),),
        *,
        bias: bool | Sequence[bool] = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        adapter_dtype: torch.dtype | None = None,
        weight_transposed: bool = False,
    ) -> None:
        super().__init__()
        several = not isinstance(out_features, int)
        sizes = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        self.in_features, self.sizes = in_features, sizes
        self.out_features = sum(sizes)
        self.sharding = LinearSharding(None, None, 1, False, in_features, self.out_features)
        self.weight_transposed = weight_transposed
        dtype = dtype or torch.get_default_dtype()
        adapter_dtype = adapter_dtype or dtype
        if {dtype, adapter_dtype} - COMPUTE_DTYPES or min(in_features, *sizes, 0) < 0 or not sizes:
            raise ArgumentError.explained(
                "A linear operation has sizes that are not negative, and computes in float16, "
                "bfloat16, float32 or float64",
                where=type(self).__name__,
                received=f"{in_features}, {out_features}, {dtype}, {adapter_dtype}",
            )
        numbers = [str(n) for n in range(len(sizes))] if several else [""]
        self._weights = tuple([f"weight{n}" for n in numbers])
        self._biases = tuple([f"bias{n}" for n in numbers])

        def make(name: str, dtype: torch.dtype, *shape: int, frozen: bool = True) -> None:
            empty = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=not frozen))

        for name, size in zip(self._weights, sizes):
            shape = (in_features, size) if weight_transposed else (size, in_features)
            make(name, dtype, *shape)
        present = [bias] * len(sizes) if isinstance(bias, bool) else bias
        for name, size, there in zip(self._biases, sizes, present):
            if there:
                make(name, dtype, size)
            else:
                self.register_parameter(name, None)
        self.adapters = tuple(adapters)
        self._made = tuple([a[:2] for a in self.adapters])
        self.make_settings()  # checks them
        for adapter in self.adapters:
            a, b = names_of(adapter)
            make(a, adapter_dtype, adapter.rank, in_features, frozen=False)
            make(b, adapter_dtype, sizes[adapter.output], adapter.rank, frozen=False)
        self.reset_parameters()

    def make_settings(self) -> LoRALinear.Settings:
        where = type(self).__name__
        for a in self.adapters:
            real_number(a.scale, "scale", where)
            p = real_number(a.dropout, "dropout", where)
            if not (
                a.rank > 0
                and math.isfinite(a.scale)
                and 0 <= p <= 1
                and 0 <= a.output < len(self.sizes)
                and a.name.isidentifier()
            ):
                raise ArgumentError.explained(
                    "An adapter has a name, a positive rank, a finite scale, a probability of "
                    "dropout, and the number of an output",
                    where=where,
                    received=repr(a),
                )
        made = tuple([a[:2] for a in self.adapters])
        if made != self._made or len(dict(made)) < len(made):
            raise ArgumentError.explained(
                "Adapters keep the names and ranks that they were made with, and each has a "
                "name of its own",
                where=where,
                received=", ".join(f"{a.name}: {a.rank}" for a in self.adapters),
                remedy="Make a new operation, and assign the parameters of this one to it",
            )
        active = [(n, a) for n, a in enumerate(self.adapters) if a.active]
        if not self.training:
            active = [(n, a._replace(dropout=0.0)) for n, a in active]
        return self.Settings(tuple(active))

    @property
    def Saved(self) -> type[tuple[Any, ...]]:  # type: ignore[override]  # noqa: N802
        """The input, weights, and of the active adapters A, B and masks; None: nothing reads it."""
        names = [a.name for _, a in self.settings.active]
        kinds = [f"{kind}_{name}" for kind in ("a", "b", "mask") for name in names]
        fields = [(n, Tensor | None) for n in ("input", *self._weights, "bias", *kinds)]
        return NamedTuple("Saved", fields)  # type: ignore[return-value]

    def reset_parameters(self) -> None:
        """W and A as in ``torch.nn.Linear``, b and B zero, so that adapters add nothing yet."""
        lora = [names_of(a) for a in self.adapters]
        for name in (*self._weights, *[a for a, _ in lora]):
            p = getattr(self, name)
            if p.numel():
                transposed = self.weight_transposed and name in self._weights
                nn.init.kaiming_uniform_(p.t() if transposed else p, a=math.sqrt(5))
        for name in (*self._biases, *[b for _, b in lora]):
            if getattr(self, name) is not None:
                nn.init.zeros_(getattr(self, name))

    def quantized_refusal(self, env: Env) -> Refusal | None:
        """What regions of quantised compute leave out, and why."""
        return Refusal("LAYOUT", "its weight has products of low rank beside it")

    def operands(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        save: bool = True,
        gather: bool = True,
        codes: bool = False,
    ) -> tuple[gemm.Operand, gemm.LowRank]:
        weights = self._checked_weights()
        x = self.input_operand(input_, weights[0].dtype)
        autocast = autocast_dtype(x.device) if any_autocast() else None
        (active,) = self.frozen_settings(ctx)
        if self.weight_transposed:
            weights = [w.t() for w in weights]
        base = gemm.weight_of([w.to(x.dtype) for w in weights])
        w = gemm.LowRank(base, self._bias(x.dtype), self._adapters(active, x, autocast))
        if save and ctx.requires_grad:
            own = gemm.tensors_of(w)
            unread = () if ctx.needs.input else (None,) * len(weights)
            reads_input = True in ctx.needs.parameters
            ctx.save_for_backward(x if reads_input else None, *unread, *own[len(unread) :])
        return x, w

    def _checked_weights(self) -> list[Tensor]:
        weights: list[Tensor | None] = [getattr(self, name) for name in self._weights]
        found = [w for w in weights if w is not None]
        if len(found) < len(weights) or len({w.dtype for w in found}) > 1:
            raise ArgumentError.explained(
                "A LoRALinear needs its weights, of one dtype",
                where=self._where(),
                received=", ".join(
                    f"{n} = {None if w is None else w.dtype}"
                    for n, w in zip(self._weights, weights)
                ),
                remedy="Assign parameters of one dtype before the call",
            )
        return found

    def _bias(self, dtype: torch.dtype) -> Tensor | None:
        biases: list[Tensor | None] = [getattr(self, name) for name in self._biases]
        if all(b is None for b in biases):
            return None
        like = next(b for b in biases if b is not None)
        parts = [
            like.new_zeros(size, dtype=dtype) if b is None else b.to(dtype)
            for size, b in zip(self.sizes, biases)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _adapters(
        self, active: Any, x: Tensor, autocast: torch.dtype | None
    ) -> tuple[gemm.Adapter, ...]:
        pairs = [(getattr(self, a), getattr(self, b)) for a, b in (names_of(a) for _, a in active)]
        dtype = x.dtype
        for pair in pairs if autocast is None else ():
            for t in pair:
                dtype = torch.promote_types(dtype, t.dtype)
        starts = self._starts()
        return tuple(
            gemm.Adapter(
                a.to(dtype),
                b.to(dtype),
                float(adapter.scale),
                starts[adapter.output],
                draw_mask(x, adapter.dropout) if adapter.dropout else None,
                adapter.dropout,
            )
            for (_, adapter), (a, b) in zip(active, pairs)
        )

    def _starts(self) -> list[int]:
        return [sum(self.sizes[:n]) for n in range(len(self.sizes))]

    def saved_weight(self, ctx: OperationContext, *, again: bool = False) -> gemm.LowRank:
        count, (active,) = len(self._weights), self.frozen_settings(ctx)
        base, (bias, *lora) = ctx.saved_tensors[1 : 1 + count], ctx.saved_tensors[1 + count :]
        starts, n = self._starts(), len(active)
        adapters = [
            gemm.Adapter(a, b, float(of.scale), starts[of.output], mask, of.dropout)
            for (_, of), a, b, mask in zip(active, lora[:n], lora[n : 2 * n], lora[2 * n :])
        ]
        weight = None
        if base[0] is not None:
            weight = gemm.weight_of(self.read_weights(ctx, base, again))
        return gemm.LowRank(weight, bias, tuple(adapters))

    def weight_grads(
        self, dy: Tensor, x: Tensor, ctx: OperationContext, scale: float | None = None
    ) -> tuple[Tensor | None, ...]:
        needed, slots = ctx.needs.parameters, [name for _, name in self.parameter_slots()]
        if True not in needed:
            return (None,) * len(needed)
        wanted = dict(zip(slots, needed))
        grads: dict[str, Tensor | None] = {}
        for name, bias, start, size in zip(self._weights, self._biases, self._starts(), self.sizes):
            columns = dy[..., start : start + size]
            if wanted.get(name):
                dw = gemm.wgrad(columns, x, scale=scale)
                grads[name] = dw.t() if self.weight_transposed else dw
            if wanted.get(bias):
                db = bias_grad(columns)
                grads[bias] = db if scale is None else db * scale
        w, (active,) = self.saved_weight(ctx), self.frozen_settings(ctx)
        names = [names_of(a) for _, a in active]
        pairs = [(wanted.get(a, False), wanted.get(b, False)) for a, b in names]
        for pair, found in zip(names, gemm.low_rank_wgrad(dy, x, w, pairs, scale)):
            grads.update(zip(pair, found))
        return tuple([grads.get(name) for name in slots])

    def reference(self, input_: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Tensor:
        (active,) = self.make_settings()
        parts = []
        for n, (name, bias) in enumerate(zip(self._weights, self._biases)):
            w, b = getattr(self, name), getattr(self, bias)
            x = input_.to(w.dtype)
            y = x @ (w if self.weight_transposed else w.t())
            out = y = y if b is None else y + b
            for adapter in (a for _, a in active if a.output == n):
                a, b = (getattr(self, each) for each in names_of(adapter))
                wide = torch.promote_types(torch.promote_types(x.dtype, a.dtype), b.dtype)
                u = F.dropout(x.to(wide), adapter.dropout)
                out = out + u @ a.to(wide).t() @ b.to(wide).t() * adapter.scale
            parts.append(out.to(y.dtype))
        return torch.cat(parts, -1)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # PEFT keeps the parameters in modules.
        names = {f"base_layer.{n}": n for n in ("weight", "bias")}
        for adapter in self.adapters:
            for kind, own in zip("AB", names_of(adapter)):
                names[f"lora_{kind}.{adapter.name}.weight"] = own
        for old, new in names.items():
            if prefix + old in state_dict:
                state_dict.setdefault(prefix + new, state_dict.pop(prefix + old))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        (first, *others) = self.sizes
        out = list(self.sizes) if others else first
        lora = ", ".join(f"{a.name}: rank {a.rank}, scale {a.scale:g}" for a in self.adapters)
        return f"in_features={self.in_features}, out_features={out}, {lora}"


def names_of(adapter: LoRAAdapter) -> tuple[str, str]:
    """Names of the parameters A and B."""
    return f"lora_A_{adapter.name}", f"lora_B_{adapter.name}"
