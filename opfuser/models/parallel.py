"""Tensor, sequence and vocabulary parallelism of the models.

torch's ``parallelize_module`` does not take them: its styles shard ``torch.nn.Linear`` and
``torch.nn.Embedding`` alone, and have the module compute on DTensors, which are no operands of a
kernel. And one weight here holds queries, keys and values, or gate and up projection: cut in equal
pieces, a rank would get queries alone. So modules are replaced by sharded operations, which
exchange data by process groups. Parameters are DTensors all the same, for optimizers, checkpoints,
norms of gradients and ``fully_shard``; operations compute with this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from opfuser import (
    AddExtraInput,
    ConstantScale,
    CrossEntropy,
    DotProductAttention,
    Dropout,
    Embedding,
    Identity,
    LayerNorm,
    Linear,
    MakeExtraOutput,
    MergedLinear,
    PositionEmbedding,
    QKNorm,
    RMSNorm,
    RotaryEmbedding,
    Sequential,
    Tanh,
)
from opfuser.basic.activation import ACTIVATIONS
from opfuser.basic.gated_activation import GATED_ACTIVATIONS
from opfuser.distributed.collectives import slice_vocabulary
from opfuser.distributed.local_parameters import LocalPart, use_locally
from opfuser.errors import ArgumentError, counted

from ._distribution import Over, check_linear, keep_recipe, refuse, replicate
from ._expert_parallel import check_agreement, distribute_experts, has_experts, share_all_else
from .embedding_scale import EmbeddingScale

__all__ = ["parallelize"]

Model = TypeVar("Model", bound=Sequential)
Change = Callable[[], Any]

_ACTIVATIONS = (*ACTIVATIONS, *GATED_ACTIVATIONS)
_ROW_WISE = (ConstantScale, EmbeddingScale, Tanh, Identity, MakeExtraOutput, AddExtraInput)


def parallelize(
    model: Model,
    mesh: DeviceMesh | None = None,
    *,
    sequence_parallel: bool = True,
    expert_parallel: DeviceMesh | None = None,
    overlap_shared: bool = True,
) -> Model:
    """Distributes the layers of ``model`` over the ranks of ``mesh``, which have the same batch.

    Every rank has a slice of the attention heads, of the features inside feed-forward blocks, and
    of the vocabulary in embedding, head and loss (Shoeybi et al., Megatron-LM, arXiv:1909.08053).
    With sequence parallelism (Korthikanti et al., arXiv:2205.05198), norms and residual sums
    between the blocks compute a slice of the sequence, whose length must then be a multiple of the
    number of ranks. Modules of ``model`` are replaced, and it is returned. Call this before
    ``fully_shard``, and before you construct an optimizer.

    With ``expert_parallel``, the experts of every layer are distributed over the ranks of another
    mesh, or of the same one: :class:`opfuser.Dispatch` sends tokens to the ranks of their experts,
    :class:`opfuser.Combine` sends the results back. If it is another mesh, or the only one, its
    ranks have different batches, as in data parallelism: gradients of experts are those of the mean
    of the ranks' losses, and everything else is unchanged, for ``fully_shard`` over all these
    ranks. If it is ``mesh``, each rank routes its slice of the sequence; routers and shared experts
    are replicated.

    Parameters are DTensors over ``mesh`` with the values of ``model`` (none on the meta device),
    which must be the same on every rank. The packed projections to queries, keys and values become
    a :class:`opfuser.MergedLinear` with the names ``q``, ``k`` and ``v``, those of gated
    activations one with ``gate`` and ``up``. Each rank sees only some of the rows, so gradients of
    norms are summed over ``mesh`` in backward, in one collective per group of operations. Experts
    keep their names.

    Args:
        model: from :func:`opfuser.models.decoder_lm`, or its layers, one layer or one block. With
            sequence parallelism, the latter take and return slices of the sequence.
        mesh: a mesh of one dimension, such as ``mesh["tp"]`` of a larger one, whose other dimension
            can then be used for ``fully_shard`` or :func:`opfuser.models.sharding.shard_layers`.
            None changes only experts.
        sequence_parallel: whether to slice the sequence too.
        expert_parallel: a mesh of one dimension over which experts are distributed; None: they are
            not.
        overlap_shared: whether a shared expert computes while the results of the others are sent
            back, and in backward while their gradients are sent; see
            :class:`opfuser.StartCombine`.

    Returns:
        ``model``. If it has a loss, every rank computes the same one; otherwise each rank's logits
        are those of its slice of the vocabulary, cut as by ``torch.chunk``. Router losses are those
        of this rank's tokens.

    Raises:
        ArgumentError: ``mesh`` has several dimensions; heads, key heads, features or experts are
            not a multiple of the number of ranks; a rank would have no slice of the vocabulary; a
            module was already parallelized; there is no mesh at all, or both are given and differ;
            or, with ``expert_parallel``, ranks have different models, which each of them reports.
        NotSupportedError: an unknown operation, for instance experts without ``expert_parallel``;
            dropout, whose masks would have to agree between ranks in some places and differ in
            others; weights stored as codes; ``accumulate_into_main_grad``; learned positions with
            sequence parallelism; experts over ``mesh`` without sequence parallelism, or with router
            losses.
    """
    meshes = [m for m in (mesh, expert_parallel) if m is not None]
    for given in meshes:
        _check_mesh(given)
    if not meshes or len({*meshes}) > 1:
        raise ArgumentError.explained(
            "A model is parallelized over mesh, its experts over the same or alone",
            where="parallelize",
            received=f"mesh={mesh}, expert_parallel={expert_parallel}",
            remedy="Pass one mesh, as either argument or as both",
        )
    placed = next((n for n, p in model.named_parameters() if isinstance(p, DTensor)), None)
    if placed is not None:
        raise ArgumentError.explained(
            "A model is parallelized once, and before it is sharded",
            where="parallelize",
            received=f"{placed}, which is a DTensor",
        )
    (used, *_), experts = meshes, expert_parallel is not None
    over = Over(used, used.get_group(), used.size(), sequence_parallel, {}, experts, overlap_shared)
    if experts:
        check_agreement(model, over.group)
    changes = _changes(model, over) if mesh is not None else _changes_of_experts(model, over)
    for change in list(changes):  # all are known before the first one is made
        change()
    return model


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise ArgumentError.explained(
            "A model is parallelized over a mesh of one dimension",
            where="parallelize",
            received=counted(mesh.ndim, "dimension"),
            remedy='Pass one of them, such as mesh["tp"]',
        )


def _changes_of_experts(model: Sequential, over: Over) -> Iterator[Change]:
    """What is to be done where ranks have batches of their own, whose mean loss is meant."""
    blocks = [m for m in model.modules() if isinstance(m, Sequential) and has_experts(m)]
    if not blocks:
        raise ArgumentError.explained(
            "expert_parallel needs experts", where="parallelize", received="none in model"
        )
    for block in blocks:
        yield from distribute_experts(block, over, LocalPart(averages=True))


def _changes(block: Sequential, over: Over) -> Iterator[Change]:
    """What is to be done in a Sequential; raises for what it cannot be done with."""
    if over.experts and has_experts(block):
        yield from distribute_experts(block, over, LocalPart())
        yield from share_all_else(block, over)
        return
    children: list[tuple[str, Any]] = [
        (name, op) for name, op in block._modules.items() if op is not None
    ]
    linears = [n for n, (_, op) in enumerate(children) if type(op) is Linear]
    if len(linears) > 2:
        refuse(block, f"with {len(linears)} linear operations")
    first, last = linears if len(linears) == 2 else (len(children), len(children))
    inside = [op for _, op in children[first + 1 : last]]
    for n, (name, op) in enumerate(children):
        if isinstance(op, Sequential):
            yield from _changes(op, over)
        elif type(op) is Linear:
            check_linear(op)
            make = _first(op, inside, over) if n == first else _row if n == last else _head
            if make is _head:
                slice_vocabulary(op.out_features, over.group, "parallelize")
            yield partial(_replace, block, name, op, make, over)
        elif type(op) is Embedding:
            slice_vocabulary(op.num_embeddings, over.group, "parallelize")
            yield partial(_replace, block, name, op, _embedding, over)
        elif type(op) is CrossEntropy:
            if len(linears) != 1 or linears[0] > n:
                refuse(op, "without a head in the same sequence")
            classes = children[linears[0]][1].out_features
            yield partial(_replace, block, name, op, partial(_loss, classes), over)
        else:
            yield from _changes_in_place(op, first < n < last, over)


def _changes_in_place(op: nn.Module, inside: bool, over: Over) -> Iterator[Change]:
    """Changes of an operation that stays, inside a block or between blocks."""
    if type(op) in (RMSNorm, LayerNorm) and not inside:
        yield partial(replicate, op, over, LocalPart(sums=over.sequence))
    elif type(op) is PositionEmbedding and not over.sequence:
        yield partial(replicate, op, over, LocalPart())
    elif inside and type(op) in (QKNorm, RotaryEmbedding, DotProductAttention):
        if type(op) is DotProductAttention:
            _check_attention(op)
        _check_divides(op, "num_heads", over)
        _check_divides(op, "num_kv_heads", over)
        yield partial(_divide_heads, op, over)
        if type(op) is QKNorm:
            yield partial(replicate, op, over, LocalPart(sums=True))
    elif type(op) is Dropout:
        if op.dropout_probability:
            refuse(op, "whose masks would have to agree where ranks have the same rows")
    elif type(op) is PositionEmbedding:
        refuse(op, "with sequence parallelism")
    elif not isinstance(op, _ROW_WISE) and not (inside and type(op) in _ACTIVATIONS):
        refuse(op)


def _check_attention(op: DotProductAttention) -> None:
    if op.layout != "packed" or op.v_head_dim is not None:
        refuse(op, "of another layout than packed heads of one size")
    if op.alibi or op.core_attention_bias or list(op.parameters()):
        refuse(op, "with slopes, sinks or a bias of each head")
    if op.dropout_p:
        refuse(op, "with dropout")


def _check_divides(op: Any, name: str, over: Over) -> None:
    if getattr(op, name) % over.ranks:
        raise ArgumentError.explained(
            f"{name} must be a multiple of the ranks",
            where=f"parallelize: {type(op).__name__}",
            received=f"{name}={getattr(op, name)}, {over.ranks} ranks",
        )


def _replace(block: Sequential, name: str, op: Any, make: Any, over: Over) -> None:
    new = make(op, over).train(op.training)
    if isinstance(op, Linear):
        keep_recipe(new, op)
        new.accumulate_into_grad = op.accumulate_into_grad
    setattr(block, name, new)


def _divide_heads(op: Any, over: Over) -> None:
    op.num_heads, op.num_kv_heads = op.num_heads // over.ranks, op.num_kv_heads // over.ranks


def _first(op: Linear, inside: Sequence[nn.Module], over: Over) -> Any:
    """What makes the first linear operation of a block, by what stands behind it."""
    attention = [other for other in inside if type(other) is DotProductAttention]
    if attention:
        heads, kv_heads = attention[0].num_heads, attention[0].num_kv_heads
        size = op.out_features // (heads + 2 * kv_heads)
        rows = {"q": heads * size, "k": kv_heads * size, "v": kv_heads * size}
        return partial(_merged, rows)
    if len(inside) != 1 or type(inside[0]) not in _ACTIVATIONS:
        refuse(op, f"in front of {', '.join(type(other).__name__ for other in inside)}")
    make: Any
    if not isinstance(inside[0], GATED_ACTIVATIONS):
        features, make = op.out_features, _column
    elif inside[0].glu_interleave_size is None:
        features = op.out_features // 2
        make = partial(_merged, {"gate": features, "up": features})
    else:
        refuse(inside[0], "with interleaved halves")
    if features % over.ranks:
        raise ArgumentError.explained(
            "Features inside a feed-forward block must be a multiple of the ranks",
            where="parallelize",
            received=f"{features} features, {over.ranks} ranks",
        )
    return make


def _linear(op: Linear, over: Over, mode: str, placement: Shard, bias: Placement) -> Linear:
    new = Linear(
        op.in_features,
        op.out_features,
        bias=op.bias is not None,
        device="meta",
        dtype=op.weight.dtype,
        tensor_parallel_mode=mode,
        **over.slices,
    )
    new.weight = over.distributed(op.weight, placement)
    if op.bias is not None:
        new.bias = over.distributed(op.bias, bias)
    # In row mode the biases of the ranks are summed with what they belong to.
    use_locally(new, weight=LocalPart(), bias=LocalPart(first_alone=mode == "row"))
    return new


def _column(op: Linear, over: Over) -> Linear:
    return _linear(op, over, "column", Shard(0), Shard(0))


def _head(op: Linear, over: Over) -> Linear:
    return _linear(op, over, "vocabulary", Shard(0), Shard(0))


def _row(op: Linear, over: Over) -> Linear:
    return _linear(op, over, "row", Shard(1), Replicate())


def _merged(rows: Mapping[str, int], op: Linear, over: Over) -> MergedLinear:
    """One with a projection for each of the parts that the rows of the weight consist of."""
    new = MergedLinear(
        op.in_features,
        rows,
        bias=op.bias is not None,
        device="meta",
        dtype=op.weight.dtype,
        tensor_parallel=True,
        **over.slices,
    )
    for kind, p in op.named_parameters():
        pieces = p.detach().split(list(rows.values()))
        for name, piece in zip(rows, pieces):
            projection = new.get_submodule(name)
            # In memory of its own, not one behind another: torch cannot copy a DTensor over a part
            # of a storage (copy.deepcopy of a model, or of its state dict).
            made = over.of_part(over.own(piece, 0).clone(), p, piece.shape, Shard(0))
            projection.register_parameter(kind, made)
            use_locally(projection, weight=LocalPart(), bias=LocalPart())
    return new


def _embedding(op: Embedding, over: Over) -> Embedding:
    new = Embedding(
        op.num_embeddings,
        op.embedding_dim,
        padding_idx=op.padding_idx,
        device="meta",
        dtype=op.weight.dtype,
        tensor_parallel=True,
        **over.slices,
    )
    new.weight = over.distributed(op.weight, Shard(0))
    use_locally(new, weight=LocalPart())
    return new


def _loss(classes: int, op: CrossEntropy, over: Over) -> CrossEntropy:
    return CrossEntropy(
        op.ignore_index,
        op.label_smoothing,
        op.reduction,
        op.z_loss,
        tensor_parallel=True,
        tensor_parallel_group=over.group,
        num_classes=classes,
    )
