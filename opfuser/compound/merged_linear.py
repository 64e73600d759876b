"""MergedLinear: linear transformations of one input with separate weights as one module."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import gemm
from ..basic._projections import Projection, refusal
from ..basic.merged_linear import BasicMergedLinear, MergedBias
from ..core.context import COMPUTE_DTYPES
from ..core.fusion import Optional
from ..distributed.collectives import LinearSharding, shard_linear
from ..errors import ArgumentError, NotSupportedError
from ..torch_internals import memory_of
from .base import LinearCompound


class MergedLinear(LinearCompound):
    r"""Linear transformations of one input, concatenated: :math:`y = [x W_i^T + b_i]_i`.

    As the projections of attention to queries, keys and values, or gate and up projection of a
    gated feed-forward block: parameters have names of their own, those of a module that holds
    ``torch.nn.Linear`` modules (``q_proj.weight``), and fusions take all of it for one ``Linear``.

    Shapes: x ``(..., in_features)``, W_i ``(out_features[i], in_features)``, b_i
    ``(out_features[i],)``, y ``(..., Σ out_features)`` in the order of the names. Dtypes as in
    ``BasicLinear``; the weights are of one dtype. Weights start as in ``torch.nn.Linear``, biases
    at zero.

    Where the weights lie one behind another in one storage, as the constructor and
    :meth:`merge_storages` place them, each pass is one GEMM; that is looked up at every call.
    Elsewhere there is a GEMM for each weight, writing its columns of y, or adding to dx. Gradients
    of all weights are one GEMM if all are needed, and autograd gets views of its result. With
    ``accumulate_into_main_grad``, ``accumulate_into_grad``, or if some weights are frozen, it is
    one GEMM for each that is not. Moves and casts keep merged storages merged; copies do not.

    In a region of quantised compute (:class:`opfuser.autocast`) the weights are quantised as the
    one matrix [W_i] (Σ out_features, in_features), with a common scale or common blocks, in one
    GEMM. Where they do not lie one behind another, they are copied together at every call. Within
    :func:`opfuser.keep_quantized_weights` they are quantised at every call all the same, and
    :func:`opfuser.quantized_model_init` leaves them in high precision.

    With ``tensor_parallel`` every rank has a slice of the rows of each weight, and so of each
    projection's output, as in mode ``"column"`` of ``BasicLinear``: heads of queries and the key
    and value heads that they read stay together.

    A projection may be replaced, by a LoRA layer of PEFT, say, or get hooks or a ``forward``: then
    each module is called by itself, and their outputs are concatenated. The records of the plan
    say why.

    Args:
        in_features: last dimension of x.
        out_features: by name, the columns of y that each projection makes.
        bias: whether projections have a bias; or the names of those that do.
        device: of the parameters; None is torch's default.
        dtype: of the parameters; None is torch's default.
        accumulate_into_main_grad: see ``BasicLinear``, for each weight.
        accumulate_into_grad: likewise.
        tensor_parallel: distribute the outputs of each projection over the ranks of the group;
            ``out_features`` are those of all ranks.
        tensor_parallel_group: None is all ranks.
        sequence_parallel: with it, x is a slice along ``sequence_dim``, and gathered.
        sequence_dim: see ``BasicLinear``.

    Raises:
        ArgumentError: no projections, sizes that are negative or no multiple of the ranks, names
            that modules cannot have, other dtypes; in a call, weights of different dtypes.
        InputError: x has the wrong last dimension or dtype, as in ``BasicLinear``.
        NotSupportedError: in a call, ``accumulate_into_main_grad`` where modules are called.
    """

    read_only: ClassVar[frozenset[str]] = frozenset({"in_features", "out_features", "basic_ops"})

    def __init__(
        self,
        in_features: int,
        out_features: Mapping[str, int],
        *,
        bias: bool | Collection[str] = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        accumulate_into_main_grad: bool = False,
        accumulate_into_grad: bool = False,
        tensor_parallel: bool = False,
        tensor_parallel_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
    ) -> None:
        where = type(self).__name__
        dtype = dtype or torch.get_default_dtype()
        with_bias = set(out_features if bias is True else bias or ())
        if min(in_features, *out_features.values(), 0) < 0 or with_bias - set(out_features):
            raise ArgumentError.explained(
                "Sizes must not be negative, and biases are those of projections",
                where=where,
                received=f"in_features={in_features}, out_features={dict(out_features)}, "
                f"bias={bias!r}",
            )
        if dtype not in COMPUTE_DTYPES:
            raise ArgumentError.explained(
                "A linear operation computes in float16, bfloat16, float32 or float64",
                where=where,
                received=str(dtype),
            )

        def shard(size: int) -> LinearSharding:
            return shard_linear(
                in_features,
                size,
                mode="column" if tensor_parallel else None,
                group=tensor_parallel_group,
                sequence_parallel=sequence_parallel,
                sequence_dim=sequence_dim,
                where=where,
            )

        made = {
            name: Projection(
                in_features, shard(size).local_out_features, name in with_bias, device, dtype
            )
            for name, size in out_features.items()
        }
        sharding = shard(sum(out_features.values()))
        self._hold(made, accumulate_into_main_grad, accumulate_into_grad, sharding)
        if all(type(p) is nn.Parameter for p in self.parameters()):  # not of a FakeTensorMode
            self.merge_storages()

    @classmethod
    def of(
        cls,
        modules: Mapping[str, nn.Linear],
        *,
        accumulate_into_main_grad: bool = False,
        accumulate_into_grad: bool = False,
    ) -> MergedLinear:
        """One with the very parameters of existing modules, which stay where they are.

        Args:
            modules: by name; of one ``in_features``.
            accumulate_into_main_grad: as of the constructor.
            accumulate_into_grad: likewise.

        Raises:
            ArgumentError: no modules, other modules than ``torch.nn.Linear``, modules with hooks or
                parametrisations, different sizes of the input, different dtypes.
        """
        made = {name: Projection.of(module, cls.__name__) for name, module in modules.items()}
        kinds = {(p.in_features, p.weight.dtype, p.weight.device) for p in made.values()}
        if len(kinds) > 1 or any(dtype not in COMPUTE_DTYPES for _, dtype, _ in kinds):
            raise ArgumentError.explained(
                "Projections that are merged have one in_features, and weights of one dtype "
                "that linear operations compute in, on one device",
                where=cls.__name__,
                received=", ".join(
                    f"{name}: {p.in_features}, {p.weight.dtype}, {p.weight.device}"
                    for name, p in made.items()
                ),
            )
        self = cls.__new__(cls)
        self._hold(made, accumulate_into_main_grad, accumulate_into_grad)
        return self.train(all(p.training for p in made.values()))

    def _hold(
        self,
        projections: dict[str, Projection],
        accumulate_into_main_grad: bool,
        accumulate_into_grad: bool,
        sharding: LinearSharding | None = None,
    ) -> None:
        holders = type(self), BasicMergedLinear, MergedBias
        taken = [n for n in projections if n in _TAKEN or any(hasattr(h, n) for h in holders)]
        if not projections or taken or any(n[:1] in ("", "_") or "." in n for n in projections):
            raise ArgumentError.explained(
                "Projections have names, without dots, that are no attributes of the module",
                where=type(self).__name__,
                received=repr(list(projections)),
            )
        weights = BasicMergedLinear(
            projections,
            accumulate_into_main_grad=accumulate_into_main_grad,
            accumulate_into_grad=accumulate_into_grad,
            sharding=sharding,
        )
        biases = MergedBias(projections)
        LinearCompound.__init__(self, [weights, biases] if biases.owners else [weights])
        self.in_features = weights.in_features
        self.out_features = weights.out_features

    @classmethod
    def pattern_parts(cls) -> tuple[Any, ...]:
        """The pattern elements that MergedLinear stands for."""
        return (BasicMergedLinear, Optional(MergedBias))

    @property
    def _linear(self) -> BasicMergedLinear:
        weights = self.basic_ops[0]
        assert isinstance(weights, BasicMergedLinear)
        return weights

    def projections(self) -> dict[str, nn.Module]:
        """The modules by name, with what has taken the place of some."""
        return {name: self.get_submodule(name) for name in self._linear.names}

    @torch.no_grad()
    def merge_storages(self) -> None:
        """Moves the weights, and the biases, into one storage each, unless they are there.

        Parameters stay the same objects, with their gradients. Takes the memory of a copy while it
        runs. Files of safetensors hold them as separate tensors, those of ``torch.save`` hold the
        storage once; ``pickle`` alone writes it for each of them. Tensors that shared memory with a
        parameter, ``weight.data`` that was kept, say, do so no longer.

        Raises:
            ArgumentError: the parameters differ in dtype or device, or a projection was replaced.
        """
        for name in ("weight", "bias"):
            found = [getattr(p, "_parameters", {}).get(name) for p in self.projections().values()]
            tensors = [t for t in found if t is not None]
            if name == "bias" and len(tensors) < len(found):
                continue
            plain = all(type(t) is nn.Parameter for t in found)
            if not plain or len({(t.dtype, t.device) for t in tensors}) > 1:
                raise ArgumentError.explained(
                    "Parameters in one storage are plain ones, of one dtype and device",
                    where=f"{type(self).__name__}({self.extra_repr()})",
                    received=", ".join(
                        f"{type(t).__name__} {'' if t is None else t.dtype}" for t in found
                    ),
                )
            if gemm.one_behind_another(tensors) is None:
                whole = torch.cat([t.detach() for t in tensors])
                for t, piece in zip(tensors, whole.split([len(t) for t in tensors])):
                    t.data = piece

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        merged = self.own_forward() == "" and self._is_merged()
        out = super()._apply(fn, recurse)
        if merged:
            self.merge_storages()
        return out

    def _is_merged(self) -> bool:
        first, *others = [p._parameters.get("weight") for p in self.projections().values()]
        if type(first) is not nn.Parameter:
            return False
        storage = memory_of(first)  # also on the meta device
        return all(type(t) is nn.Parameter and memory_of(t) == storage for t in others)

    def own_forward(self) -> str:
        """Why the modules are called one by one, as a predicate; empty if they are not."""
        weights, biases = self._linear, self.basic_ops[-1]
        owners = biases.owners if isinstance(biases, MergedBias) else ()
        for name in weights.names:
            module = self._modules[name]
            if not isinstance(module, Projection):
                kind = type(module)
                return f"calls its modules: {name} is a {kind.__module__}.{kind.__qualname__}"
            why = refusal(module, has_bias=name in owners)
            if why:
                return f"calls its modules: {name} {why}"
        return ""

    def forward(
        self,
        input: Tensor,
        *extra_inputs: Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Any:
        """The concatenated outputs of the projections."""
        why = self.own_forward()
        if not why:
            return super().forward(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)
        if self._linear.sharding.mode is not None:
            raise NotSupportedError.explained(
                "Modules that are called know nothing of other ranks",
                where=f"{type(self).__name__}({self.extra_repr()})",
                received=f"tensor_parallel=True, where it {why}",
                remedy="Put the plain projections back",
            )
        if self.accumulate_into_main_grad:
            raise NotSupportedError.explained(
                "Modules that are called give gradients to autograd, not to main_grad",
                where=f"{type(self).__name__}({self.extra_repr()})",
                received=f"accumulate_into_main_grad=True, where it {why}",
                remedy="Set it to False, or put the plain projections back",
            )
        return torch.cat([module(input) for module in self.projections().values()], -1)

    def reset_parameters(self) -> None:
        """Initialises weights and biases again, e.g. after ``to_empty``."""
        for module in self.projections().values():
            module.reset_parameters()  # type: ignore[operator]

    def extra_repr(self) -> str:
        return self._linear.extra_repr()


# What the modules have besides.
_TAKEN = frozenset(
    "basic_ops in_features names out_features owners quantization sharding sizes training".split()
)
