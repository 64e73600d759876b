"""What models are distributed with: a dimension of a mesh, and parameters that become DTensors."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from opfuser import Linear
from opfuser.distributed.local_parameters import LocalPart, use_locally
from opfuser.errors import NotSupportedError
from opfuser.op import BasicOperation

_SEQUENCE = 1  # of (batch, sequence, features)


class Over(NamedTuple):
    """What a model is distributed over; and the parameters that are, by identity.

    Attributes:
        sequence: whether each rank has a slice of the sequence between blocks.
        experts: whether experts are distributed.
        overlap_shared: whether a shared expert computes during the exchange of rows.
    """

    mesh: DeviceMesh
    group: dist.ProcessGroup
    ranks: int
    sequence: bool
    made: dict[int, tuple[nn.Parameter, nn.Parameter]]
    experts: bool = False
    overlap_shared: bool = True

    @property
    def slices(self) -> dict[str, Any]:
        """Arguments of sharded operations."""
        return {
            "tensor_parallel_group": self.group,
            "sequence_parallel": self.sequence,
            "sequence_dim": _SEQUENCE,
        }

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's slice."""
        return whole.chunk(self.ranks, dim)[self.mesh.get_local_rank()]

    def distributed(self, p: nn.Parameter, placement: Placement) -> nn.Parameter:
        """The DTensor in the place of a parameter: one for all places of a tied one."""
        if id(p) not in self.made:
            part = p.detach()
            if isinstance(placement, Shard):
                part = self.own(part, placement.dim).clone(memory_format=torch.contiguous_format)
            self.made[id(p)] = p, self.of_part(part, p, p.shape, placement)
        return self.made[id(p)][1]

    def of_part(
        self, part: Tensor, p: nn.Parameter, shape: torch.Size, placement: Placement
    ) -> nn.Parameter:
        """A parameter of which this rank has ``part``, that gets gradients if ``p`` does."""
        stride = torch.empty(shape, device="meta").stride()
        made = DTensor.from_local(
            part, self.mesh, (placement,), run_check=False, shape=shape, stride=stride
        )
        return nn.Parameter(made, requires_grad=p.requires_grad)


def refuse(
    op: nn.Module,
    how: str = "",
    remedy: str = "Shard such a model by its layers: opfuser.models.sharding",
) -> NoReturn:
    raise NotSupportedError.explained(
        "Models are parallelized that consist of what decoder_lm makes, experts only with "
        "expert_parallel",
        where="parallelize",
        received=f"{type(op).__name__} {how}".strip(),
        remedy=remedy,
    )


def check_linear(op: Linear) -> None:
    if op.weight_format is not None:
        remedy = "Construct the model outside of opfuser.quantized_model_init"
        refuse(op, "whose weight is stored as codes", remedy)
    if op.weight_transposed:
        refuse(op, "whose weight is transposed")
    if op.accumulate_into_main_grad:
        refuse(op, "with accumulate_into_main_grad")
    if any(part.communicates for part in op.basic_ops):
        refuse(op, "that is distributed already")


def keep_recipe(new: BasicOperation | Linear, op: BasicOperation | Linear) -> None:
    """Gives an operation the recipe, and the scales, of the one that it takes the place of."""
    new.recipe = op.recipe
    state = op._modules.get("quantization")
    if state is not None:
        new.add_module("quantization", state)


def replicate(op: nn.Module, over: Over, how: LocalPart) -> None:
    found = {name: p for name, p in op._parameters.items() if p is not None}
    for name, p in found.items():
        op.register_parameter(name, over.distributed(p, Replicate()))
    use_locally(op, **dict.fromkeys(found, how))
