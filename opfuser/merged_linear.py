"""MergedLinear: linear transformations of one input with separate weights as one module."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import gemm
from .basic._linear_compound import LinearCompound
from .basic._projections import Projection, refusal
from .basic.merged_linear import BasicMergedLinear, MergedBias
from .core.context import COMPUTE_DTYPES
from .core.fusion import Optional
from .distributed.collectives import LinearSharding, shard_linear
from .errors import ArgumentError, NotSupportedError
from .torch_internals import memory_of


class MergedLinear(LinearCompound):
    r"""Linear transformations of the same input, concatenated: :math:`y = [x W_i^T + b_i]_i`.

    Examples are the projections of attention to queries, keys and values, and the gate and up
    projections of a feed-forward block. Parameters have the names of a module that holds
    ``torch.nn.Linear`` modules (``q_proj.weight``), and fusions treat the whole as one ``Linear``.

    Shapes: x ``(..., in_features)``, W_i ``(out_features[i], in_features)``, b_i
    ``(out_features[i],)``, y ``(..., Σ out_features)`` in the order of the names. Dtypes as in
    ``BasicLinear``; all weights have the same dtype. Weights are initialized as in
    ``torch.nn.Linear``, biases to zero.

    If the weights are adjacent in one storage, as the constructor and :meth:`merge_storages` place
    them, each pass is one GEMM; every call checks this. Otherwise there is one GEMM per weight,
    which writes its columns of y or adds to dx. One GEMM computes the gradients of all weights if
    all are needed, and autograd gets views of its result. With ``accumulate_into_main_grad``,
    ``accumulate_into_grad``, or some frozen weights, there is one GEMM for each weight that is not
    frozen. Moves and casts keep merged storages merged; copies do not.

    In a region of quantized compute (:class:`opfuser.autocast`), the weights are quantized as one
    matrix [W_i] (Σ out_features, in_features), with a common scale or common blocks, for one GEMM.
    If they are not adjacent, every call concatenates them. Even within
    :func:`opfuser.keep_quantized_weights`, every call quantizes them, and
    :func:`opfuser.quantized_model_init` leaves them in high precision.

    With ``tensor_parallel``, every rank has a slice of the rows of each weight, and so of each
    projection's output, as in mode ``"column"`` of ``BasicLinear``: query heads stay on the same
    rank as the key and value heads that they read.

    A projection may be replaced, for example by a LoRA layer of PEFT, or get hooks or its own
    ``forward``. Then each module is called on its own, and the outputs are concatenated. The
    records of the plan say why.

    Args:
        in_features: last dimension of x.
        out_features: for each projection, by name, its number of columns of y.
        bias: whether the projections have a bias, or the names of those that do.
        device: of the parameters; None is torch's default.
        dtype: of the parameters; None is torch's default.
        accumulate_into_main_grad: see ``BasicLinear``, for each weight.
        accumulate_into_grad: likewise.
        tensor_parallel: distribute the outputs of each projection over the ranks of the group;
            ``out_features`` are those of all ranks.
        tensor_parallel_group: None is all ranks.
        sequence_parallel: with ``tensor_parallel``, x is a slice along ``sequence_dim``, which is
            gathered.
        sequence_dim: see ``BasicLinear``.

    Raises:
        ArgumentError: no projections, sizes that are negative or not a multiple of the number of
            ranks, names that modules cannot have, other dtypes; in a call, weights of different
            dtypes.
        InputError: x has the wrong last dimension or dtype, as in ``BasicLinear``.
        NotSupportedError: in a call, ``accumulate_into_main_grad`` if modules are called on their
            own.
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
        """A MergedLinear with the parameters of existing modules, which stay in their storage.

        Args:
            modules: by name, all with the same ``in_features``.
            accumulate_into_main_grad: as in the constructor.
            accumulate_into_grad: likewise.

        Raises:
            ArgumentError: no modules, modules other than ``torch.nn.Linear``, modules with hooks or
                parametrizations, different input sizes or dtypes.
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
        """The modules by name, including those that replaced a projection."""
        return {name: self.get_submodule(name) for name in self._linear.names}

    @torch.no_grad()
    def merge_storages(self) -> None:
        """Moves the weights into one storage, and the biases into another, unless they already are.

        Parameters stay the same objects, with their gradients. Needs memory for a copy while it
        runs. ``safetensors.torch.save_file`` writes them as separate tensors, ``torch.save`` writes
        the storage once, and ``pickle`` alone once for each; accelerate writes only the first of
        them, unless ``safe_serialization=False``. Tensors that shared memory with a parameter, such
        as an old reference to ``weight.data``, no longer do.

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
        """Initializes weights and biases, for example after ``to_empty``."""
        for module in self.projections().values():
            module.reset_parameters()  # type: ignore[operator]

    def extra_repr(self) -> str:
        return self._linear.extra_repr()


# What the modules have besides.
_TAKEN = frozenset(
    "basic_ops in_features names out_features owners quantization sharding sizes training".split()
)
