"""Linear: BasicLinear and Bias as one module, with a collective where it is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .basic._linear_compound import LinearCompound
from .basic.all_reduce import AllReduce
from .basic.basic_linear import BasicLinear
from .basic.bias import Bias
from .basic.reduce_scatter import ReduceScatter
from .core.fusion import Optional
from .distributed.collectives import shard_linear
from .errors import ArgumentError
from .op import BasicOperation
from .quantization.weights import WeightFormat, stored_in


class Linear(LinearCompound):
    r"""Linear transformation with bias, :math:`y = x W^T + b`: a drop-in for ``torch.nn.Linear``.

    A compound: it consists of the basic operations in ``basic_ops``, and owns their parameters
    ``weight`` and ``bias``. Setting a parameter on it or on one of them sets it for both. The
    weight is initialized as in ``torch.nn.Linear``, the bias to zero. Checkpoints of
    ``torch.nn.Linear`` and of te.ops load.

    Shapes: x ``(..., in_features)``, W ``(out_features, in_features)``, b ``(out_features,)``, y
    ``(..., out_features)``. Dtypes and parallelism as in ``BasicLinear``. In mode ``"row"``, each
    rank adds its bias before the reduction: the bias of the layer is their sum.

    Args:
        in_features: last dimension of x, over all ranks.
        out_features: last dimension of y, over all ranks.
        bias: whether to add a bias.
        device: of the parameters; None is torch's default.
        dtype: of the parameters; None is torch's default.
        tensor_parallel_mode: see ``BasicLinear``.
        tensor_parallel_group: None is all ranks.
        sequence_parallel: also shard along ``sequence_dim`` the side that is not sharded along the
            last dimension.
        rng_state_tracker_function: see ``BasicLinear``.
        accumulate_into_main_grad: see ``BasicLinear``.
        accumulate_into_grad: see ``BasicLinear``; for the weight.
        weight_transposed: see ``BasicLinear``.
        sequence_dim: see ``BasicLinear``.

    Raises:
        ArgumentError: arguments outside their domain; a bias set on a Linear that was constructed
            without one.
        InputError: x has the wrong last dimension or dtype, as in ``BasicLinear``.
    """

    read_only: ClassVar[frozenset[str]] = frozenset({"in_features", "out_features", "basic_ops"})

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        accumulate_into_grad: bool = False,
        weight_transposed: bool = False,
        sequence_dim: int = 0,
    ) -> None:
        sharding = shard_linear(
            in_features,
            out_features,
            mode=tensor_parallel_mode,
            group=tensor_parallel_group,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            where=type(self).__name__,
        )
        row, sharded = sharding.mode == "row", sharding.mode is not None
        # In row mode the reduction comes after the bias, as an operation of its own.
        parts: list[BasicOperation] = [
            BasicLinear(
                sharding.local_in_features if row else in_features,
                out_features,
                device=device,
                dtype=dtype,
                tensor_parallel_mode=tensor_parallel_mode if sharded and not row else None,
                tensor_parallel_group=None if row else sharding.group,
                sequence_parallel=sharding.sequence_parallel and not row,
                rng_state_tracker_function=rng_state_tracker_function,
                accumulate_into_main_grad=accumulate_into_main_grad,
                accumulate_into_grad=accumulate_into_grad,
                weight_transposed=weight_transposed,
                sequence_dim=sequence_dim,
            )
        ]
        if bias:
            parts.append(
                Bias(
                    sharding.local_out_features * sharding.ranks,
                    device=device,
                    dtype=dtype,
                    tensor_parallel=sharded,
                    tensor_parallel_group=sharding.group,
                )
            )
        if row:
            if sharding.sequence_parallel:
                parts.append(ReduceScatter(sharding.group, dim=sharding.sequence_dim))
            else:
                parts.append(AllReduce(sharding.group))
        super().__init__(parts)
        self.in_features = in_features
        self.out_features = out_features
        if not bias:
            self.register_parameter("bias", None)

    @property
    def weight_transposed(self) -> bool:
        """Whether ``weight`` is (in_features, out_features). See ``BasicLinear``."""
        return self._linear.weight_transposed

    @property
    def _linear(self) -> BasicLinear:
        linear = self.basic_ops[0]
        assert isinstance(linear, BasicLinear)
        return linear

    @classmethod
    def pattern_parts(cls) -> tuple[Any, ...]:
        """The pattern elements that Linear stands for."""
        return (BasicLinear, Optional(Bias))

    @property
    def weight_format(self) -> WeightFormat | None:
        """How the weight is stored; None: in high precision. See ``BasicLinear``."""
        return self._linear.weight_format

    def read_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """See ``BasicLinear``."""
        return self._linear.read_weight(dtype)

    def write_weight(self, values: Tensor) -> None:
        """See ``BasicLinear``."""
        self._linear.write_weight(values)

    def initialize_weight(self, fill: Callable[[Tensor], Any]) -> None:
        """See ``BasicLinear``."""
        self._linear.initialize_weight(fill)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_parameters" in vars(self._linear):  # else it is being copied, and calls this itself
            self._linear.set_grad_dtype()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return self._linear.moved_by(super()._apply, fn, recurse)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name == "bias" and param is not None and not self._has_bias_part():
            raise ArgumentError.explained(
                "A Linear that was made with bias=False cannot be given a bias",
                where=f"Linear({self.extra_repr()})",
                received=f"a parameter of shape {tuple(param.shape)}",
                remedy="Construct it with bias=True",
            )
        if name == "weight":
            self._linear.refuse_codes_of_others(param)
        super().register_parameter(name, param)
        if name == "weight":
            self._linear.weight_was_set()

    def _has_bias_part(self) -> bool:
        return any(isinstance(part, Bias) for part in self.basic_ops)

    def reset_parameters(self) -> None:
        """Initializes weight and bias, for example after ``to_empty``."""
        for part in self.basic_ops:
            if isinstance(part, (BasicLinear, Bias)):
                part.reset_parameters()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # te.ops keeps the parameters under its basic operations.
        for index, part in enumerate(self.basic_ops):
            old = f"{prefix}basic_ops.{index}."
            part._adopt_extra_state(state_dict, old + "_extra_state", prefix)
            for name in part._parameter_names:
                if old + name in state_dict:
                    value = state_dict.pop(old + name)
                    state_dict.setdefault(prefix + name, value)
        self._linear.load_weight(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}"
        text += f", bias={self._has_bias_part()}"
        return text + stored_in(self.weight_format)
