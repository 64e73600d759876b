"""Sharding of the models by their layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from opfuser import GroupedLinear, Sequential
from opfuser.errors import ArgumentError, NotSupportedError
from opfuser.quantization.weights import is_fp8
from opfuser.sequence.tied_parameters import tied_places

__all__ = ["shard_layers"]

Model = TypeVar("Model", bound=Sequential)


def shard_layers(model: Model, *, expert_mesh: DeviceMesh | None = None, **arguments: Any) -> Model:
    """Shards the parameters of ``model`` by ``fully_shard``, with each layer as a unit.

    Applies torch's ``fully_shard`` to each module of ``model.layers``, then to ``model``, and
    returns it. A layer, an attention block and a feed-forward block, is planned and fused as
    before. Between two layers nothing is fused, since torch gathers the parameters of each there:
    plans say so with the code ``COMMUNICATION``. Channels reach into layers and out of them. What
    lies in front of the layers and behind them, a tied head too, stays in one group each, with a
    fused head and loss.

    Experts that :func:`opfuser.models.parallel.parallelize` has distributed over ranks with batches
    of their own are units apart: those of a layer are sharded over ``expert_mesh``, and all else
    over all ranks. Where they are distributed over all ranks they stay as they are.

    Args:
        model: of :func:`opfuser.models.decoder_lm`, ``text_encoder`` or ``image_encoder``, or any
            other Sequential with a Sequential of units named ``layers``. It may be on the meta
            device: ``to_empty`` and the initial values follow then, as torch describes.
        expert_mesh: the ranks that have the same experts, another dimension of the mesh that these
            are distributed over; None: one rank has each.
        **arguments: of ``fully_shard``, the same for all units: ``mesh``, ``mp_policy``,
            ``reshard_after_forward`` and so on. Without a mesh all processes share each parameter.
            ``mp_policy.output_dtype`` is that of the model's output: layers hand on what they
            compute, which the next one would cast back.

    Raises:
        ArgumentError: there is no Sequential named ``layers`` in ``model``, or a layer has a
            parameter that is somewhere else, too: torch would make two parameters of it; or the
            ranks of experts and those of ``expert_mesh`` do not make up those of ``mesh``.
        NotSupportedError: a weight is stored in FP8, by :func:`opfuser.quantized_model_init`.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models", 2019, arXiv 1910.02054.
    """
    layers = getattr(model, "layers", None)
    if not isinstance(layers, Sequential):
        raise ArgumentError.explained(
            "The layers of a model must be a Sequential named layers",
            where="shard_layers",
            received=f"{type(model).__name__} with {type(layers).__name__}",
            remedy="Call torch's fully_shard for each unit, then for the model",
        )
    _refuse_codes(model)
    _refuse_ties(model, layers)
    policy: MixedPrecisionPolicy | None = arguments.get("mp_policy")
    inside = {} if policy is None else {"mp_policy": replace(policy, output_dtype=None)}
    experts = _experts_of(model)
    if experts or expert_mesh is not None:
        _check_ranks(experts, expert_mesh, arguments.get("mesh"))
    if expert_mesh is None and experts:
        left = {p for op in experts for p in op.parameters()}
        arguments["ignored_params"] = left | {*(arguments.get("ignored_params") or ())}
    for layer in layers:
        apart = _experts_of(layer)
        if expert_mesh is not None and apart:
            fully_shard(cast(Any, apart), **{**arguments, **inside, "mesh": expert_mesh})
        fully_shard(layer, **{**arguments, **inside})
    fully_shard(model, **arguments)
    return model


def _experts_of(module: nn.Module) -> list[GroupedLinear]:
    """Experts that are distributed over ranks with batches of their own."""
    return [
        op
        for op in module.modules()
        if isinstance(op, GroupedLinear)
        and any(how.averages for how in op.__dict__.get("local_parts", {}).values())
    ]


def _check_ranks(
    experts: list[GroupedLinear], expert_mesh: DeviceMesh | None, mesh: DeviceMesh | None
) -> None:
    """Raises ArgumentError if some ranks would have experts whose gradients are those of others."""
    weights = [p for op in experts[:1] for p in op.parameters() if isinstance(p, DTensor)]
    each = weights[0].device_mesh.size() if weights else 1
    copies = 1 if expert_mesh is None else expert_mesh.size()
    ranks = dist.get_world_size() if mesh is None else mesh.size()
    if not weights or each * copies != ranks:
        raise ArgumentError.explained(
            "The ranks of experts, times those of expert_mesh, are those of the mesh",
            where="shard_layers",
            received=f"experts over {each if weights else 'no'} ranks, expert_mesh of "
            f"{copies}, mesh of {ranks}",
            remedy="parallelize the experts over one dimension of a mesh, and pass the other",
        )


def _refuse_codes(model: Sequential) -> None:
    """Raises NotSupportedError if a weight is stored in FP8."""
    for path, param in model.named_parameters():
        if is_fp8(param.dtype):
            raise NotSupportedError.explained(
                "Sharded parameters are stored in high precision, as torch gathers and reduces "
                "those of a unit in one dtype",
                where="shard_layers",
                received=f"{path} of {param.dtype}",
                remedy="Construct the model outside of opfuser.quantized_model_init; a region "
                "of a recipe still computes in FP8",
            )


def _refuse_ties(model: Sequential, layers: Sequential) -> None:
    """Raises ArgumentError if a parameter would be in two units."""
    unit_of = {module: n for n, layer in enumerate(layers) for module in layer.modules()}
    for places in tied_places(model):
        if len({unit_of.get(place.module) for place in places}) > 1:
            raise ArgumentError.explained(
                "A parameter lies in one unit",
                where="shard_layers",
                received=" and ".join(place.path for place in places) + ", which are one",
                remedy="Untie them, or call torch's fully_shard with a list of what is to be "
                "one unit",
            )
