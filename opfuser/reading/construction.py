"""opfuser's operations for what was read, with the parameters of the module itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeGuard

from torch import nn

from .. import basic
from ..basic.lora_linear import LoRAAdapter
from ..counterparts import ACTIVATIONS, GATED
from ..engine.routing import PrivateChannel
from ..linear import Linear
from ..merged_linear import MergedLinear
from ..sequential import Residual, Sequential
from . import dataflow
from . import operations as read
from .activations import FORMULAS
from .built import Added, Alias, Argument, Built, Memory, mask_of, tables_of
from .call_key import is_dtensor, is_plain
from .kept import KeptError
from .made import Maker
from .plain_modules import (
    Beside,
    CachedRows,
    Child,
    ColumnScale,
    HeadLayerNorm,
    Multiply,
    Reorder,
    Routed,
    Transpose,
)
from .reads import is_hooked

# In the sigmoid of activations x σ(k x).
_FACTORS = {name: by_power[1] for name, by_power, _ in FORMULAS["sigmoid"]}


class _Construction(Built):
    """A sequence that is being made for what was read.

    Args:
        reading: what was read.
        module: whose parameters and children it has.
        checks: see :func:`build`.
    """

    def __init__(self, reading: read.Reading, module: nn.Module, *, checks: bool) -> None:
        super().__init__(reading, module)
        self._checks = checks
        self._numbers = itertools.count()  # of branches, whose channels have names of their own
        self._of_numbers = isinstance(next(iter(reading.operations), None), read.Embedding)
        self.sequence = Sequential(*self._all(reading.operations))
        self._made = tuple((number, self._made_by(made)) for number, made in reading.made)
        if self._weighted and self.sequence.num_extra_outputs != len(self._weighted):
            raise KeptError("returns weights of attention that is computed beside something else")
        self.follow()

    def _all(self, operations: Sequence[read.Operation]) -> list[nn.Module]:
        return [module for op in operations for module in self._modules(op)]

    def _modules(self, op: read.Operation) -> list[nn.Module]:
        return _MAKERS[type(op)](self, op)

    # Parameters

    def aliased(self, op: nn.Module, **paths: str | None) -> list[nn.Module]:
        """An operation that reads the parameters at paths of the module as its own."""
        for name, path in paths.items():
            if path is None:
                op._parameters[name] = None
            else:
                holder, _, own = path.rpartition(".")
                source = self._module.get_submodule(holder)._parameters
                self.aliases.append(Alias(op._parameters, name, source, own))
        return [op]

    def normed(self, op: nn.Module, **paths: str | None) -> list[nn.Module]:
        """A norm whose weights are those of the module, or ones where it has none."""
        self.ones += [(op, name) for name, path in paths.items() if path is None]
        return self.aliased(op, **{n: path for n, path in paths.items() if path is not None})

    def _made_by(self, made: read.Made) -> read.Made:
        """The same, which each call makes from now on."""
        if made not in self._makers:
            maker = self._makers[made] = Maker(made, list(map(self._buffer, made.buffers)))
            self.aliased(maker, **{f"p{n}": path for n, path in enumerate(made.parameters)})
        return made

    # Operations

    def linear(self, op: read.Linear) -> list[nn.Module]:
        made = Linear(
            op.in_features,
            op.out_features,
            bias=op.bias is not None,
            weight_transposed=op.transposed,
            device="meta",
        )
        self._weights.append((made, op.weight))
        return self.aliased(made, weight=op.weight, bias=op.bias)

    def lora(self, *projections: read.Linear | read.LoRALinear) -> list[nn.Module]:
        """One operation for projections of one input."""
        adapters = [
            (adapter, n)
            for n, p in enumerate(projections)
            for adapter in (p.adapters if isinstance(p, read.LoRALinear) else ())
        ]
        linears = [_without_adapters(p) for p in projections]
        made = basic.LoRALinear(
            linears[0].in_features,
            [p.out_features for p in linears],
            [
                LoRAAdapter(f"adapter{i}", a.rank, a.scale, a.dropout_p, n)
                for i, (a, n) in enumerate(adapters)
            ],
            bias=[p.bias is not None for p in linears],
            weight_transposed=linears[0].transposed,
            device="meta",
        )
        for n, p in enumerate(linears):
            self.aliased(made, **{f"weight{n}": p.weight, f"bias{n}": p.bias})
        for i, (a, _) in enumerate(adapters):
            self.aliased(made, **{f"lora_A_adapter{i}": a.a, f"lora_B_adapter{i}": a.b})
        return [made]

    def embedding(self, op: read.Embedding) -> list[nn.Module]:
        made = basic.Embedding(
            op.num_embeddings, op.embedding_dim, padding_idx=op.padding_idx, device="meta"
        )
        return self.aliased(made, weight=op.weight)

    def called(self, op: read.Called) -> list[nn.Module]:
        child = self._module.get_submodule(op.path)
        if op.arguments is not None:
            self.fills |= bool(dataflow.leaves_in(op.arguments, read.GivenCache))
        self._tells |= op.arguments is not None or bool(op.returned)
        plain = all(is_plain(p) or is_dtensor(p) for p in child.parameters())
        plain = plain and not is_hooked(child) and not isinstance(child, nn.Linear)
        if op.item is None and op.arguments is None and (plain or not self._checks):
            return [child]
        return [Child(child, op, self._around)]

    def merged(self, op: read.MergedLinear) -> list[nn.Module]:
        if _has_adapters(op.projections):
            return self.lora(*op.projections)
        named = {f"projection{n}": p for n, p in enumerate(op.projections)}
        made = MergedLinear(
            op.projections[0].in_features,
            {name: p.out_features for name, p in named.items()},
            bias=[n for n, p in named.items() if isinstance(p, read.Linear) and p.bias],
            device="meta",
        )
        for name, p in named.items():
            if not isinstance(p, read.Linear) or p.transposed:
                ops = self._modules(p)
                setattr(made, name, ops[0] if len(ops) == 1 else Sequential(*ops))
            else:
                self.aliased(made.get_submodule(name), weight=p.weight, bias=p.bias)
        first = op.projections[0]
        if isinstance(first, read.Linear):
            self._weights.append((made, first.weight))
        return [made]

    def norm(self, op: read.Norm) -> list[nn.Module]:
        kind: type[basic.LayerNorm | basic.RMSNorm]
        kind = basic.LayerNorm if op.centered else basic.RMSNorm
        zero_centered = op.zero_centered_weight
        made = kind(op.shape, eps=op.eps, zero_centered_gamma=zero_centered, device="meta")
        made.weight_is_cast = op.weight_is_cast
        if op.centered:
            self.aliased(made, bias=op.bias)
        return self.normed(made, weight=op.weight)

    def gated(self, op: read.Gated) -> list[nn.Module]:
        name = op.activation.name
        blocks: dict[str, Any] = {"glu_interleave_size": 1} if op.interleaved else {}
        if op.limit is not None and name in _FACTORS:
            return [basic.ClampedSwiGLU(**blocks, **_clamps(op))]
        plain = not op.activation.constants and op.limit is None
        if not plain or name not in GATED or (blocks and name != "silu"):
            raise KeptError(f"opfuser has no operation that gates by {name}")
        made: Any = ACTIVATIONS[GATED[name]].operation
        return [made(**blocks)]

    def experts(self, op: read.Experts) -> list[nn.Module]:
        """Weights scale what the last linear function takes, and its bias, where they can."""
        scaled = _scaled(op.activation) if isinstance(op.activation, read.Gated) else None
        scales = scaled is not None
        up, down = self.experts_linear(op.up), self.experts_linear(op.down, scaled=scales)
        permute = basic.Permute(op.up.count, weighted=scaled is not None)
        unpermute = basic.Unpermute(weighted=scaled is None)
        row_map, sizes, weights = map(PrivateChannel, ("row_map", "sizes", "weights"))
        for slot, channel in enumerate((row_map, sizes, weights)[: permute.num_extra_outputs]):
            permute.set_extra_output_channel(slot, channel, output_to_caller=False)
        for linear in (up, down):
            linear.set_extra_input_channel(0, sizes)
        unpermute.set_extra_input_channel(0, row_map)
        if scaled is not None:
            scaled.set_extra_input_channel(0, weights)
            if down.scale_bias:
                down.set_extra_input_channel(1, weights)
        activation = self._modules(op.activation) if scaled is None else [scaled]
        rows = Sequential(permute, up, *activation, down, unpermute)
        router = self._module.get_submodule(op.router.path)
        return [Routed(router, rows, op.weights, op.indices, op.flat)]

    def experts_linear(
        self, op: read.ExpertsLinear, *, scaled: bool = False
    ) -> basic.GroupedLinear:
        made = basic.GroupedLinear(
            op.count,
            op.in_features,
            op.out_features,
            bias=op.bias is not None,
            scale_bias=scaled,
            device="meta",
            single_grouped_weight=True,
            single_grouped_bias=True,
            weight_transposed=op.transposed,
        )
        # Else the gradient of the scales, which is of forward's data, comes by that of the input.
        made.multiplies_whole = op.multiplies_whole and not scaled
        self._weights.append((made, op.weight))
        self.aliased(made, weight=op.weight, bias=op.bias)
        return made

    def head_norm(self, op: read.HeadNorm) -> list[nn.Module]:
        heads, zero_centered = op.heads, op.zero_centered_weight
        if op.centered:
            weights = {"q_weight": op.q_weight, "k_weight": op.k_weight}
            return self.aliased(HeadLayerNorm(op), **weights, q_bias=op.q_bias, k_bias=op.k_bias)
        made = basic.QKNorm(
            heads.queries,
            heads.size,
            num_kv_heads=heads.keys,
            eps=op.eps,
            zero_centered_gamma=zero_centered,
            device="meta",
        )
        made.weight_is_cast = op.weight_is_cast
        return self.normed(made, q_weight=op.q_weight, k_weight=op.k_weight)

    def rotary(self, op: read.Rotary) -> list[nn.Module]:
        heads = op.heads
        made = basic.RotaryEmbedding(
            heads.queries,
            heads.size,
            num_kv_heads=heads.keys,
            rotary_dim=op.size,
            interleaved=op.interleaved,
        )
        buffers = tuple(self._buffer(t.buffer) for t in op.tables if isinstance(t, read.Rows))
        value = partial(tables_of, op, buffers)
        self.arguments.append(Argument(made, "tables", value, bool(buffers)))
        return [made]

    def _buffer(self, path: str) -> tuple[dict[str, Any], str]:
        """Where the module holds a buffer."""
        holder, _, name = path.rpartition(".")
        return self._module.get_submodule(holder)._buffers, name

    def attention(self, op: read.Attention, layout: str = "packed") -> list[nn.Module]:
        heads = op.heads
        other_values = layout == "packed" and heads.value_size != heads.size
        made = basic.DotProductAttention(
            heads.queries,
            heads.keys,
            op.causal,
            op.scale,
            dropout_p=op.dropout_p,
            softcap=op.softcap,
            layout=layout,
            sinks=op.sinks is not None,
            core_attention_bias=op.bias is not None,
            v_head_dim=heads.value_size if other_values else None,
            device="meta",
        )
        self.aliased(made, sinks=op.sinks)
        if op.bias is not None:
            self.extras.append(Added(op.bias))
            if isinstance(op.bias, read.Made):
                self._made_by(op.bias)
        if op.masks:
            if self._of_numbers:  # which have not the dtype that masks are made in
                raise KeptError("masks attention, and is given numbers of rows of a table")
            self.arguments.append(Argument(made, "mask", partial(mask_of, op.masks, self.input)))
        if op.conditions:
            self.conditions.append((made, op.conditions))
            for how, _ in op.conditions:
                self._made_by(how)
        if op.cache is not None:
            self.cached.append((made, op.cache))
            self.fills = True
        if op.weights is None:
            return [made]
        self._weighted.append((made, op))
        self._tells = True
        return [basic.MakeExtraOutput(), made]

    def cross_attention(self, op: read.CrossAttention) -> list[nn.Module]:
        heads = op.attention.heads
        sizes = heads.keys * heads.size, heads.keys * heads.value_size
        self.extras.append(Memory(Sequential(*self._all(op.memory)), op.input, sizes))
        return self.attention(op.attention, "separate")

    def parallel(
        self,
        op: read.Parallel | read.Times | read.Cached,
        join: Callable[[], nn.Module] = basic.AddExtraInput,
    ) -> list[nn.Module]:
        ops, asides = self._aside(map(self._all, op.branches[:-1]))
        joins = []
        for aside in asides:
            joined: Any = join()
            joined.set_extra_input_channel(0, aside)
            joins.append(joined)
        return [Sequential(*ops, *self._all(op.branches[-1]), *joins)]

    def _aside(
        self, branches: Iterable[list[nn.Module]]
    ) -> tuple[list[nn.Module], list[PrivateChannel]]:
        """What sets the results of branches aside, and ends with their input; where these are."""
        ops: list[nn.Module] = []
        asides = []
        for branch in branches:
            number = next(self._numbers)
            start, aside = PrivateChannel(f"input {number}"), PrivateChannel(f"branch {number}")
            make, swap = basic.MakeExtraOutput(), basic.SwapExtra()
            make.set_extra_output_channel(0, start, output_to_caller=False)
            swap.set_extra_input_channel(0, start)
            swap.set_extra_output_channel(0, aside, output_to_caller=False)
            ops += [make, *branch, swap]
            asides.append(aside)
        return ops, asides

    def forked_attention(self, op: read.ForkedAttention) -> list[nn.Module]:
        inner, keys = self._aside([self._all(op.keys)])
        memory = [*self._all(op.memory), *inner, *self._all(op.values)]
        ops, values = self._aside([memory])
        attend: Any
        (attend,) = self.attention(op.attention, "separate")
        for slot, aside in enumerate(keys + values):
            attend.set_extra_input_channel(slot, aside)
        return [Sequential(*ops, *self._all(op.queries), attend)]

    def kept(self, op: read.Cached) -> list[nn.Module]:
        made = CachedRows(op.causal)
        self.cached.append((made, op.layer))
        self.fills = True
        return self.parallel(op, lambda: made)


_MAKERS: dict[type, Callable[[_Construction, Any], list[nn.Module]]] = {
    read.Activation: lambda _, op: [ACTIVATIONS[op.name].make(*op.constants)],
    read.Attention: _Construction.attention,
    read.Beside: lambda built, op: [Beside(*(Sequential(*built._all(ops)) for ops in op.branches))],
    read.Bias: lambda built, op: built.aliased(basic.Bias(op.size, device="meta"), bias=op.bias),
    read.Cached: _Construction.kept,
    read.Called: _Construction.called,
    read.ColumnScale: lambda built, op: built.aliased(ColumnScale(), weight=op.weight),
    read.CrossAttention: _Construction.cross_attention,
    read.Dropout: lambda _, op: [basic.Dropout(op.p)],
    read.Embedding: _Construction.embedding,
    read.Experts: _Construction.experts,
    read.ForkedAttention: _Construction.forked_attention,
    read.Gated: _Construction.gated,
    read.HeadNorm: _Construction.head_norm,
    read.Linear: _Construction.linear,
    read.LoRALinear: _Construction.lora,
    read.MergedLinear: _Construction.merged,
    read.Norm: _Construction.norm,
    read.Parallel: _Construction.parallel,
    read.Reorder: lambda _, op: [Reorder(op.blocks, op.size, op.count)],
    read.Residual: lambda built, op: [Residual(*built._all(op.branch))],
    read.Rotary: _Construction.rotary,
    read.Scale: lambda _, op: [basic.ConstantScale(op.factor)],
    read.Times: lambda built, op: built.parallel(op, Multiply),
    read.Transpose: lambda _, op: [Transpose()],
}


def build(reading: read.Reading, module: nn.Module, *, checks: bool = True) -> Built:
    """The sequence for what was read of a module.

    Args:
        reading: what was read.
        module: whose parameters and children it has.
        checks: whether children that are called are asked for what they returned in the trace,
            also where hooks or subclasses of tensors may make something else of it.

    Raises:
        KeptError: opfuser has no operation for a part of it.
    """
    return _Construction(reading, module, checks=checks)


def _clamps(op: read.Gated) -> dict[str, Any]:
    alpha = _FACTORS[op.activation.name]
    return {"limit": op.limit, "alpha": alpha, "glu_linear_offset": op.offset}


def _scaled(op: read.Gated) -> Any | None:
    """The operation that gates and scales rows, if there is one."""
    blocks = 1 if op.interleaved else None
    if op.limit is not None and op.activation.name in _FACTORS:
        return basic.ScaledClampedQGeGLU(blocks, **_clamps(op))
    plain = op.limit is None and op.activation == read.Activation("silu")
    return basic.ScaledSwiGLU(blocks) if plain else None


def _without_adapters(p: Any) -> Any:
    return p.linear if isinstance(p, read.LoRALinear) else p


def _has_adapters(
    projections: tuple[read.Projection, ...],
) -> TypeGuard[tuple[read.Linear | read.LoRALinear, ...]]:
    """Whether some have, and all are parameters of one layout alone."""
    linears = [_without_adapters(p) for p in projections]
    return (
        any(isinstance(p, read.LoRALinear) for p in projections)
        and all(isinstance(p, read.Linear) for p in linears)
        and len({getattr(p, "transposed", None) for p in linears}) == 1
    )
