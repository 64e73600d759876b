"""Expert parallelism of the models: each rank has some of the experts, and gets their tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.tensor import Shard

from opfuser import (
    AddExtraInput,
    Combine,
    Dispatch,
    DropTokens,
    GroupedLinear,
    Linear,
    MakeExtraOutput,
    Permute,
    PrivateChannel,
    RestoreTokens,
    Sequential,
    StartCombine,
    SwapExtra,
    TopKRouter,
    Unpermute,
)
from opfuser.basic import scaled_activation
from opfuser.basic.activation import ACTIVATIONS
from opfuser.basic.gated_activation import GATED_ACTIVATIONS
from opfuser.distributed.local_parameters import LocalPart, use_locally
from opfuser.errors import ArgumentError
from opfuser.op import BasicOperation

from ._distribution import Over, check_linear, keep_recipe, refuse, replicate

Change = Callable[[], Any]

_SCALED = tuple(getattr(scaled_activation, name) for name in scaled_activation.__all__)
_ENDS = RestoreTokens, Unpermute
_ROW_WISE = (*ACTIVATIONS, *GATED_ACTIVATIONS, *_SCALED, AddExtraInput, MakeExtraOutput, SwapExtra)
_REMEDY = "Use the experts of opfuser.models, or Dispatch and Combine by hand"


def has_experts(block: Sequential) -> bool:
    """Whether a Sequential itself holds the operations of experts."""
    return any(type(op) is Permute for op in block._modules.values())


def check_agreement(model: Sequential, group: dist.ProcessGroup) -> None:
    """Raises ArgumentError on every rank if the ranks of a group have different models."""
    own = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    for rank, other in enumerate(found):
        if other == found[0]:
            continue
        differing = {*found[0]} ^ {*other}
        first = next((one for one in found[0] + other if one in differing), ("their order",))
        raise ArgumentError.explained(
            "All ranks must have the same model",
            where="parallelize",
            received=f"ranks 0 and {rank} of the group, which differ in {first[0]}",
        )


def distribute_experts(block: Sequential, over: Over, how: LocalPart) -> Iterator[Change]:
    """What is to be done with the experts of a Sequential; raises for what it cannot be done with.

    Args:
        block: that :func:`has_experts`.
        over: the ranks that share the experts.
        how: gradients of their parameters are computed.
    """
    items = list(block._modules.items())
    places = {type(op): n for n, (_, op) in enumerate(items)}
    kinds = [type(op) for _, op in items if type(op) in (Permute, DropTokens, *_ENDS)]
    if kinds not in ([Permute, Unpermute], [Permute, DropTokens, RestoreTokens, Unpermute]):
        refuse(block, f"with {', '.join(kind.__name__ for kind in kinds)}", _REMEDY)
    first, last = (places[kinds[len(kinds) // 2 - n]] for n in (1, 0))  # the two in the middle
    for name, op in items[first + 1 : last]:
        if type(op) is GroupedLinear:
            _check_grouped(op, over)
            yield partial(_divide_groups, block, name, op, over, how)
        elif not isinstance(op, _SCALED):
            assert op is not None
            refuse(op, "between Permute and Unpermute", _REMEDY)
    source = cast("Permute | DropTokens", items[first][1])
    if None in source._extra_output_channels or any(source._extra_output_to_caller):
        refuse(source, "whose extra outputs are the caller's", _REMEDY)
    yield partial(_insert_exchange, block, first, last, over)


def share_all_else(block: Sequential, over: Over) -> Iterator[Change]:
    """What is to be done with the rest of that Sequential, if each rank has a part of the tokens.

    Parameters are replicated, of router and shared expert: gradients are summed over the ranks.
    """
    if not over.sequence:
        refuse(block, "with tensor parallelism of ranks that have the same tokens", "Pass "
               "sequence_parallel=True")  # fmt: skip
    within = False
    for op in block._modules.values():
        within = type(op) is Permute or (within and type(op) is not Unpermute)
        if isinstance(op, TopKRouter):
            if op.num_extra_outputs > 2:
                refuse(op, "whose losses are those of a part of the tokens", "Leave them out")
        elif type(op) is Linear:
            check_linear(op)
            yield partial(replicate, op, over, LocalPart(sums=True))
        elif not within and type(op) is not Unpermute and not isinstance(op, _ROW_WISE):
            assert op is not None
            refuse(op, "beside experts", _REMEDY)


def _check_grouped(op: GroupedLinear, over: Over) -> None:
    if op.num_groups % over.ranks:
        raise ArgumentError.explained(
            "The experts must be a multiple of the ranks",
            where="parallelize: GroupedLinear",
            received=f"num_groups={op.num_groups}, {over.ranks} ranks",
            remedy="Use a mesh whose size divides them",
        )
    if not op.single_grouped_weight or (op.use_bias and not op.single_grouped_bias):
        refuse(op, "with a parameter for each expert", "Pass single_grouped_weight=True")
    if op.accumulate_into_main_grad or op.accumulate_into_grad or op.delay_wgrad_compute:
        refuse(op, "that adds gradients to the parameter itself", "Leave that to autograd")


def _divide_groups(
    block: Sequential, name: str, op: GroupedLinear, over: Over, how: LocalPart
) -> None:
    new = GroupedLinear(
        op.num_groups // over.ranks,
        op.in_features,
        op.out_features,
        bias=op.use_bias,
        device="meta",
        dtype=op.weight.dtype,
        single_grouped_weight=True,
        single_grouped_bias=op.single_grouped_bias,
        scale_bias=op.scale_bias,
        weight_transposed=op.weight_transposed,
    ).train(op.training)
    found = {key: p for key, p in op._parameters.items() if p is not None}
    for key, p in found.items():
        new.register_parameter(key, over.distributed(p, Shard(0)))
    use_locally(new, **dict.fromkeys(found, how))
    keep_recipe(new, op)
    _bind(new, op._extra_input_channels)
    setattr(block, name, new)


def _insert_exchange(block: Sequential, first: int, last: int, over: Over) -> None:
    """Inserts Dispatch, whose outputs have the names that those of its source had, and Combine."""
    items = list(block._modules.items())
    name = items[first][0]
    source = copy.deepcopy(cast("Permute | DropTokens", items[first][1]))  # to be connected anew
    padded = type(source) is DropTokens
    dispatch = Dispatch(source.num_experts, over.group, weighted=source.weighted, padded=padded)
    combine = Combine(over.group)
    for op in (dispatch, combine):
        op.train(source.training)
    own, *given = source._extra_output_channels
    sent = [PrivateChannel(f"sent_{what}") for what in ("sizes", "weights")[: len(given)]]
    route = [PrivateChannel("received"), PrivateChannel("exchanged")]
    _bind(source, outputs=[own, *sent])
    _bind(dispatch, sent, [*route, *given])
    _bind(combine, route)
    items[last:last] = [("combine", combine)]
    items[first : first + 1] = [(name, source), ("dispatch", dispatch)]
    if over.overlap_shared:
        _overlap_shared_expert(items, route, over)
    block._rearrange(items)


def _overlap_shared_expert(items: list[tuple[str, Any]], route: Sequence[str], over: Over) -> None:
    """Moves the operations of a shared expert to where rows of the others are on their way back.

    These are the operations after Unpermute from a SwapExtra, which keeps the routed result, to the
    AddExtraInput that adds it; without these two, or another use of it, nothing is moved.
    """
    kinds = [type(op) for _, op in items]
    combine, sums = kinds.index(Combine), kinds.index(Unpermute)
    if kinds[sums + 1 : sums + 2] != [SwapExtra]:
        return
    swap = items[sums + 1][1]
    (routed,) = swap._extra_output_channels
    readers = [
        n for n, (_, op) in enumerate(items) if routed in getattr(op, "_extra_input_channels", ())
    ]
    if any(swap._extra_output_to_caller) or [kinds[n] for n in readers] != [AddExtraInput]:
        return
    (at,), shared = readers, PrivateChannel("shared")
    name, add = items[at][0], copy.deepcopy(items[at][1])  # to be connected anew
    start, back = (op.train(swap.training) for op in (StartCombine(over.group), SwapExtra()))
    _bind(start, route)
    _bind(back, [routed], [shared])
    _bind(add, [shared])
    ending, beside = items[combine : sums + 1], items[sums + 1 : at]
    items[combine : at + 1] = [
        ("start_combine", start), *beside, ("to_routed", back), *ending, (name, add)
    ]  # fmt: skip


def _bind(
    op: BasicOperation, inputs: Sequence[str | None] = (), outputs: Sequence[str | None] = ()
) -> None:
    """Connects the extra inputs and outputs, in order."""
    for n, channel in enumerate(inputs):
        if channel is not None:
            op.set_extra_input_channel(n, channel)
    for n, channel in enumerate(outputs):
        assert channel is not None
        op.set_extra_output_channel(n, channel, output_to_caller=False)
