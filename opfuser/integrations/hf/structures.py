"""Sequences in place of the modules of a transformer: what they are made of, and in which order."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from torch import nn

from opfuser import (
    ConstantScale,
    DotProductAttention,
    Dropout,
    QKNorm,
    Residual,
    RMSNorm,
    RotaryEmbedding,
    Sequential,
)
from opfuser.errors import counted
from opfuser.models.moe import MoEConfig, experts

from . import leaves
from .leaves import ACTIVATIONS, GATED, Leaf, Leaves, sizes_of
from .reading import Reader, Refused

__all__ = ["KINDS", "Built", "Choice", "Formulas", "Rotary", "build", "choices"]

# The implementations of attention whose masks are what DotProductAttention takes.
_IMPLEMENTATIONS = "sdpa", "eager"
_ARRANGEMENTS = {
    # x + attention(norm(x)), then y + mlp(norm(y)): Llama, GPT-2, ViT
    "before": 2,
    # norm(x + attention(x)), then norm(y + mlp(y)): BERT
    "behind sums": 2,
    # x + norm(attention(x)), then y + norm(mlp(y)): OLMo 2
    "behind blocks": 2,
    # x + norm(attention(norm(x))), then the same: Gemma 2
    "both": 4,
}


class Rotary(NamedTuple):
    """The tables of cosine and sine that a model makes.

    Attributes:
        size: their last dimension: entries of a head that turn.
        side_by_side: whether an angle stands twice side by side; else the second half repeats the
            first.
        neighbours: whether pairs of neighbours turn; else entry i and entry ``i + size / 2``.
    """

    size: int
    side_by_side: bool
    neighbours: bool


class Choice(NamedTuple):
    """What the structure leaves open, and a comparison with the module decides.

    Attributes:
        arrangement: of a layer's norms.
        swapped: whether the gate is the second of two projections.
        rotary: or None.
        normalised: whether the weights of a token's experts are divided by their sum.
    """

    arrangement: str = ""
    swapped: bool = False
    rotary: Rotary | None = None
    normalised: bool = False


class Alias(NamedTuple):
    """A parameter of a module that an operation reads as its own.

    Attributes:
        parameters: of the operation.
        name: of the parameter there.
        source: parameters of the module.
        of: name of the parameter in the module.
    """

    parameters: dict[str, Any]
    name: str
    source: dict[str, Any]
    of: str = "weight"


class Formulas(Protocol):
    """Finds the formula that a norm or an activation computes, by its results."""

    def of_norm(self, module: nn.Module, eps: float) -> str:
        """One of ``leaves.NORMS``; raises Refused if it is none."""
        ...

    def of_activation(self, module: nn.Module) -> str:
        """One of ``leaves.ACTIVATIONS``; raises Refused if it is none."""
        ...


class Built(NamedTuple):
    """A sequence, and what its calls need.

    Attributes:
        sequence: of operations with the parameters of the module.
        read: what it was built from.
        features: of its input.
        aliases: of parameters that other modules hold under other names.
        modes: operations that differ in training, and the modules whose mode they follow.
        turns: operation and tables of rotary positions, or None.
        attend: or None.
        holder: the module with the projections of attention, or None.
        notes: what is called as it is, and why.
    """

    sequence: Sequential
    read: Reader
    features: int
    aliases: tuple[Alias, ...] = ()
    modes: tuple[tuple[nn.Module, nn.Module], ...] = ()
    turns: tuple[RotaryEmbedding, Rotary] | None = None
    attend: DotProductAttention | None = None
    holder: nn.Module | None = None
    notes: tuple[str, ...] = ()

    def follow(self) -> None:
        """Takes over the parameters and modes of now."""
        for parameters, name, source, of in self.aliases:
            parameters[name] = source[of]
        for op, module in self.modes:
            if op.training != module.training:
                op.training = module.training

    @property
    def sliced(self) -> bool:
        """Whether, without a mask, of a longer cache only the keys of the call count."""
        return self.attend is not None and self.attend.causal


KINDS = "norm", "mlp", "experts", "attention", "layer"


def choices(kind: str, module: nn.Module, tables: tuple[Rotary, ...]) -> Iterator[Choice]:
    """What a module of some kind may be, the usual first."""
    if kind == "norm":
        yield Choice()
        return
    if kind == "experts":
        yield Choice(normalised=True)
        yield Choice(normalised=False)
        return
    turns: tuple[Rotary | None, ...] = (None,)
    if kind in ("attention", "layer") and _takes_tables(module):
        turns = tables
        if not tables:
            raise Refused("turns by tables that no module is known to make")
    found = leaves.leaves_of(Reader(), module)
    arrangements = [""]
    if kind == "layer":
        holder = _attention_holder(found)
        count = len([leaf for leaf in found.norms if leaf.holder is not holder])
        arrangements = [name for name, norms in _ARRANGEMENTS.items() if norms == count]
        if not arrangements:
            raise Refused(f"has {counted(count, 'norm')}, for which no arrangement is known")
    for rotary in turns:
        for arrangement in arrangements:
            for swapped in (False, True):
                yield Choice(arrangement, swapped, rotary)


def _takes_tables(module: nn.Module) -> bool:
    return "position_embeddings" in inspect.signature(type(module).forward).parameters


def _attention_holder(found: Leaves) -> nn.Module | None:
    """The module with the projections of attention."""
    holder = found.linears[0].holder if found.linears else None
    return holder if hasattr(holder, "is_causal") else None


class _Projections(NamedTuple):
    """The linear modules of attention, and those behind it.

    Attributes:
        inputs: of queries, keys and values, or of all in one.
        output: one at most.
        others: of the feed-forward block.
    """

    inputs: list[Leaf]
    output: list[Leaf]
    others: list[Leaf]


def _projections(holder: nn.Module, linears: list[Leaf]) -> _Projections:
    """Those of a layer or of attention, of which BERT has the output's in a module beside."""
    own = [leaf for leaf in linears if leaf.holder is holder]
    if not 1 <= len(own) <= 4 or linears[: len(own)] != own:
        raise Refused("has no projections of queries, keys and values")
    if len(own) == 2:  # Phi-3 registers the output's first
        own.sort(key=lambda leaf: sizes_of(leaf.module)[1], reverse=True)
    inputs = own[:3] if len(own) > 2 else own[:1]
    rest = [leaf for leaf in linears if leaf not in inputs]
    initials = ["qkv".find(leaf.path.split(".")[-1][0]) for leaf in inputs]
    if sorted(initials) == [0, 1, 2]:  # CLIP registers the queries' last
        inputs = [leaf for _, leaf in sorted(zip(initials, inputs), key=lambda pair: pair[0])]
    return _Projections(inputs, rest[:1], rest[1:])


def build(
    kind: str, module: nn.Module, choice: Choice, formulas: Formulas, *, causal: bool | None
) -> Built:
    """The sequence for a module.

    Args:
        kind: one of ``KINDS``.
        module: with the parameters.
        choice: what it is.
        formulas: of norms and activations.
        causal: whether attention is; False for calls with a mask, which says what causality hides.
            None is as the module says.

    Raises:
        Refused: the module has not the structure of this kind.
    """
    read = Reader()
    maker = _Maker(read, formulas, choice, causal)
    if kind == "norm":
        read.inner(module)
        ops = [maker.norm(Leaf("", module, module), own=True)]
        return maker.built(ops, module.get_parameter("weight").shape[0])
    if kind == "experts":
        ops, features = maker.experts(module)
        return maker.built(ops, features)
    found = leaves.leaves_of(read, module)
    if kind == "mlp":
        if found.norms or found.unknown:
            what = "; ".join(f"{leaf.path} is a {_name(leaf.module)}" for leaf in found.unknown)
            raise Refused(what or "has norms inside")
        ops = maker.mlp(found.linears, found.activations, found.dropouts)
        return maker.built(ops, sizes_of(found.linears[0].module)[0])
    holder = _attention_holder(found)
    if holder is None or (found.unknown and kind == "attention"):
        what = "; ".join(f"{leaf.path} is a {_name(leaf.module)}" for leaf in found.unknown)
        raise Refused(what or "has no projections of queries, keys and values")
    if kind == "attention":
        if found.activations or holder is not module:
            raise Refused("has more than attention")
        ops = maker.attention(holder, found)
    else:
        ops = maker.layer(module, holder, found)
    return maker.built(ops, sizes_of(_projections(holder, found.linears).inputs[0].module)[0])


def _name(module: nn.Module) -> str:
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}"


class _Maker:
    """Makes the operations of one sequence, and collects what goes with them."""

    def __init__(
        self, read: Reader, formulas: Formulas, choice: Choice, causal: bool | None
    ) -> None:
        self.read = read
        self.formulas = formulas
        self.choice = choice
        self.causal = causal
        self.aliases: list[Alias] = []
        self.modes: list[tuple[nn.Module, nn.Module]] = []
        self.notes: list[str] = []
        self.attend: DotProductAttention | None = None
        self.turns: tuple[RotaryEmbedding, Rotary] | None = None
        self.holder: nn.Module | None = None

    def built(self, ops: list[nn.Module], features: int) -> Built:
        return Built(
            Sequential(*ops),
            self.read,
            features,
            tuple(self.aliases),
            tuple(self.modes),
            self.turns,
            self.attend,
            self.holder,
            tuple(self.notes),
        )

    def note(self, leaf: Leaf, op: nn.Module) -> nn.Module:
        if op is leaf.module:
            why = leaves.why_called(op) or f"is a {_name(op)}"
            self.notes.append(f"{leaf.path} is called: it {why}")
        return op

    def linear(self, leaf: Leaf) -> nn.Module:
        return self.note(leaf, leaves.linear(leaf.module))

    def joined(self, names: str | list[str], inputs: list[Leaf]) -> nn.Module:
        """The operation of several linear modules with one input, or of one."""
        if len(inputs) == 1:
            return self.linear(inputs[0])
        given = dict(zip(names, inputs))
        op = leaves.merged({name: leaf.module for name, leaf in given.items()})
        for name, leaf in given.items():
            self.note(leaf, op.get_submodule(name))
        return op

    def norm(self, leaf: Leaf, *, own: bool = False) -> nn.Module:
        """Its operation; ``own`` if it is the very module that is replaced."""
        kind = self.formulas.of_norm(leaf.module, leaves.eps_of(self.read, leaf.module))
        op = leaves.norm(self.read, leaf.module, kind, own=own)
        return self.note(leaf, op)

    def dropout(self, leaf: Leaf) -> list[nn.Module]:
        p = self.read.value(leaf.module, "p")
        if not p:
            return []
        op = Dropout(p)
        self.modes.append((op, leaf.module))
        return [op]

    def attention(self, holder: nn.Module, found: Leaves) -> list[nn.Module]:
        """Projections, norm and rotation of heads, attention, and the output's projection."""
        value = self.read.value
        projections = _projections(holder, found.linears)
        size = value(holder, "head_dim") or value(holder, "attention_head_size")
        heads = _heads(projections, size)
        config = value(holder, "config")
        how = "sdpa" if config is None else value(config, "_attn_implementation", "sdpa")
        if how not in _IMPLEMENTATIONS:
            raise Refused(f"computes attention by {how}, not by {' or '.join(_IMPLEMENTATIONS)}")
        causal = value(holder, "is_causal", True) if self.causal is None else self.causal
        dropout_p, behind = self.attention_dropout(holder, found)
        ops = [self.joined("qkv", projections.inputs)]
        norms = [leaf for leaf in found.norms if leaf.holder is holder]
        if norms:
            ops.append(self.qk_norm(norms, size, heads))
        tables = self.choice.rotary
        if tables is not None:
            pairs: dict[str, Any] = {"rotary_dim": tables.size, "interleaved": tables.neighbours}
            rotary = RotaryEmbedding(head_dim=size, **pairs, **heads)
            self.turns = rotary, tables
            ops.append(rotary)
        self.attend = DotProductAttention(
            **heads,
            causal=bool(causal) and how == "sdpa",
            scale=value(holder, "scaling"),
            dropout_p=dropout_p,
            softcap=value(holder, "attn_logit_softcapping"),
        )
        self.holder = holder
        self.modes.append((self.attend, holder))
        ops.append(self.attend)
        ops += [self.linear(leaf) for leaf in projections.output]
        for leaf in behind:
            ops += self.dropout(leaf)
        return ops

    def attention_dropout(self, holder: nn.Module, found: Leaves) -> tuple[float, list[Leaf]]:
        """The probability for attention's weights, and the dropout behind the output, if any."""
        named = [self.read.value(holder, name) for name in ("attention_dropout", "attn_dropout")]
        p = next((value for value in named if isinstance(value, float)), None)
        behind = [leaf for leaf in found.dropouts if leaf.holder is holder]
        if p is None:
            p = self.read.value(behind.pop(0).module, "p") if behind else 0.0
        if len(behind) > 1:
            raise Refused("has several kinds of dropout in its attention")
        return p, behind

    def qk_norm(self, norms: list[Leaf], size: int, heads: dict[str, Any]) -> nn.Module:
        """The norm of each query and key head."""
        pair = [self.norm(leaf) for leaf in norms]
        if any(op is leaf.module for op, leaf in zip(pair, norms)):
            raise Refused(f"{norms[0].path} has to be called")
        q, k = (*pair, None, None)[:2]
        same = isinstance(q, RMSNorm) and isinstance(k, RMSNorm) and len(pair) == 2
        if not same or q.settings != k.settings or q.normalized_shape != (size,):  # type: ignore[union-attr]
            raise Refused("normalises heads in a way that is not known")
        assert isinstance(q, RMSNorm)
        centred = q.zero_centered_gamma
        op = QKNorm(head_dim=size, eps=q.eps, zero_centered_gamma=centred, device="meta", **heads)
        for name, leaf in zip(("q_weight", "k_weight"), norms):
            self.aliases.append(Alias(op._parameters, name, leaf.module._parameters))
        return op

    def mlp(
        self, linears: list[Leaf], activations: list[Leaf], dropouts: list[Leaf]
    ) -> list[nn.Module]:
        """Of three linear modules, a gated block; of two, one with an activation between."""
        if len(activations) != 1 or len(linears) not in (2, 3):
            raise Refused("has no feed-forward block of two or three linear modules")
        formula = self.formulas.of_activation(activations[0].module)
        if leaves.why_called(activations[0].module):
            raise Refused(f"{activations[0].path} {leaves.why_called(activations[0].module)}")
        *up, down = linears
        up = up[::-1] if self.choice.swapped else up
        ops = [self.joined(["gate", "up"], up)]
        width = sum(sizes_of(leaf.module)[1] for leaf in up)
        table = ACTIVATIONS if width == sizes_of(down.module)[0] else GATED
        if formula not in table:
            raise Refused(f"gates by {formula}, for which there is no operation")
        ops += [table[formula](), self.linear(down)]
        for leaf in dropouts:
            ops += self.dropout(leaf)
        return ops

    def experts(self, module: nn.Module) -> tuple[list[nn.Module], int]:
        """A router, and gated blocks of which each token passes some; and a token's features."""
        read, found = self.read, leaves.experts_of(module)
        parts = read.children(module)
        if found is None:
            raise Refused("has no router and experts with their weights in two tensors")
        for path, part in parts.items():
            read.inner(part)
            leaves.refuse_distributed(part)
            if leaves.why_called(part):
                raise Refused(f"{path} {leaves.why_called(part)}")
        if read.value(module, "jitter_noise") or read.value(found.experts, "_is_expert_parallel"):
            raise Refused("adds noise to its input, or has its experts on several devices")
        activations = list(read.children(found.experts).values())
        if len(activations) != 1 or self.formulas.of_activation(activations[0]) != "silu":
            raise Refused("has experts with another activation than SiLU")
        read.inner(activations[0])
        top_k = read.value(found.router, "top_k")
        dim, inside, count = found.sizes
        if not isinstance(top_k, int) or not 0 < top_k <= count:
            raise Refused("has a router that does not say how many experts a token has")
        normalised = self.choice.normalised
        config = MoEConfig(dim, inside, count, top_k, norm_topk_prob=normalised, device="meta")
        op = experts(config)
        holder = found.experts._parameters
        for name, source, of in (
            ("router", found.router._parameters, "weight"),
            ("gate_up", holder, found.gate_up),
            ("down", holder, found.down),
        ):
            parameters = op.get_submodule(name)._parameters
            self.aliases.append(Alias(parameters, "weight", source, of))
        return list(op), dim

    def layer(self, module: nn.Module, holder: nn.Module, found: Leaves) -> list[nn.Module]:
        """An attention block and a feed-forward block, each with its residual connection."""
        norms = [self.norm(leaf) for leaf in found.norms if leaf.holder is not holder]
        dropouts = [leaf for leaf in found.dropouts if leaf.holder is not holder]
        if len(dropouts) > 2:
            raise Refused("has more than two kinds of dropout")
        drop = [self.dropout(dropouts[0]), self.dropout(dropouts[-1])] if dropouts else [[], []]
        if len(dropouts) == 1 and dropouts[0].holder is not module:  # of the feed-forward block
            drop[0] = []
        attend = [*self.attention(holder, found), *drop[0]]
        linears = _projections(holder, found.linears).others
        if found.unknown:
            (leaf, *others) = found.unknown
            if others or linears or found.activations:
                raise Refused(f"{leaf.path} is a {_name(leaf.module)}")
            self.note(leaf, leaf.module)
            mlp = [leaf.module, *drop[1]]
        else:
            mlp = [*self.mlp(linears, found.activations, []), *drop[1]]
        scale = self.read.value(module, "residual_multiplier")
        if isinstance(scale, float) and scale != 1:
            attend.append(ConstantScale(scale))
            mlp.append(ConstantScale(scale))
        return _arranged(self.choice.arrangement, norms, attend, mlp)


def _heads(projections: _Projections, size: Any) -> dict[str, Any]:
    """The numbers of heads of this size that projections make."""
    widths = [sizes_of(leaf.module)[1] for leaf in projections.inputs]
    if len(widths) == 1 and projections.output:
        queries = sizes_of(projections.output[0].module)[0]
        rest = widths[0] - queries
        widths = [queries, rest // 2, rest - rest // 2]
    fits = isinstance(size, int) and len(widths) == 3 and min(widths) > 0
    if not fits or any(width % size for width in widths) or widths[1] != widths[2]:
        raise Refused("has heads of a size that is not known")
    return {"num_heads": widths[0] // size, "num_kv_heads": widths[1] // size}


def _arranged(
    arrangement: str, norms: list[nn.Module], attend: list[nn.Module], mlp: list[nn.Module]
) -> list[nn.Module]:
    if arrangement == "before":
        return [Residual(norms[0], *attend), Residual(norms[1], *mlp)]
    if arrangement == "behind sums":
        return [Residual(*attend), norms[0], Residual(*mlp), norms[1]]
    if arrangement == "behind blocks":
        return [Residual(*attend, norms[0]), Residual(*mlp, norms[1])]
    return [Residual(norms[0], *attend, norms[1]), Residual(norms[2], *mlp, norms[3])]
