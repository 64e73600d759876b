"""Base classes of operations, and what a call hands to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .core import op_base
from .core.context import (
    Dtypes,
    GradNeeds,
    OperationContext,
    OperationGrads,
    autocast_dtype,
    compute_dtype,
    in_compute_dtype,
    new_context,
)
from .core.op_base import FusibleOperation
from .core.op_base.kinds import has_called_parts
from .engine.autograd import Kwargs
from .engine.plan import expand
from .engine.routing import describe, public_routing, wrong_count
from .fuser import OperationFuser, call_traced
from .quantization.operation_state import has_no_scales, restore_state
from .quantization.recipe_state import adopt_te_scales, init_recipe_state
from .quantization.state import CHILD

__all__ = [
    "BasicOperation",
    "Dtypes",
    "FusedOperation",
    "FusibleOperation",
    "GradNeeds",
    "OperationContext",
    "OperationGrads",
    "autocast_dtype",
    "compute_dtype",
    "in_compute_dtype",
    "new_context",
]


def _run_parts(
    parts: Sequence[op_base.BasicOperation], x: Any, extra_inputs: Sequence[Tensor], kwargs: Kwargs
) -> Any:
    """Calls operations as modules, one by one, with their hooks and their own forward."""
    asked = [
        describe(i, part) for i, part in enumerate(parts) for _ in range(part.num_extra_inputs)
    ]
    if len(extra_inputs) != len(asked):
        raise wrong_count(asked, len(extra_inputs))
    left, extra_outputs = list(extra_inputs), []
    for i, part in enumerate(parts):
        own, left = left[: part.num_extra_inputs], left[part.num_extra_inputs :]
        x = part(x, *own, **(kwargs[i] if kwargs else {}))
        if part.num_extra_outputs:
            x, *ys = x
            extra_outputs += ys
    return (x, *extra_outputs) if extra_outputs else x


def fuser_alone(op: FusibleOperation) -> OperationFuser:
    """The fuser of one operation called alone: no channel applies, none is captured."""
    if op._alone is None:
        op.__dict__["_alone"] = OperationFuser([op], routing=public_routing(expand(op)))
    fuser: OperationFuser = op._alone
    return fuser


def run_alone(
    op: FusibleOperation, input_: Tensor, extra_inputs: tuple[Tensor, ...], kwargs: Kwargs
) -> Any:
    """What an operation returns that is called by itself, as a module.

    Args:
        op: the operation.
        input_: of it.
        extra_inputs: of all its basic operations, in their order.
        kwargs: of each basic operation, or None.
    """
    if has_called_parts(op):
        return _run_parts(expand(op), input_, extra_inputs, kwargs)
    if kwargs is not None:
        for part, own in zip(expand(op), kwargs):
            part.check_keywords(own)
    if torch.compiler.is_compiling():
        return call_traced(op, op._guard_trace(), 0, input_, extra_inputs, kwargs)
    fuser = op._alone or fuser_alone(op)
    return fuser(input_, *extra_inputs, basic_op_kwargs=kwargs)


class CalledOperation(FusibleOperation):
    """Abstract. An operation as a module: its fuser where it is called alone, and its scales."""

    def _prepare_tracing(self) -> None:
        fuser_alone(self)

    def _fuser_of(self, group: int) -> Any:
        return self._alone

    def _adopt_extra_state(self, state_dict: dict[str, Any], key: str, prefix: str) -> None:
        """Takes what te.ops pickles of every operation, under ``key``, out of a state dict."""
        if key in state_dict:
            adopt_te_scales(self, state_dict, key, f"{prefix}{CHILD}.")

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self._adopt_extra_state(state_dict, prefix + "_extra_state", prefix)
        if CHILD not in self._modules:
            restore_state(self, state_dict, f"{prefix}{CHILD}.")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class BasicOperation(CalledOperation, op_base.BasicOperation):
    """One tensor operation: owns its parameters and implements forward and backward.

    A subclass without extra inputs and outputs implements :meth:`op_forward` and
    :meth:`op_backward`; one with them sets ``num_extra_inputs`` / ``num_extra_outputs`` and
    implements :meth:`fuser_forward` and :meth:`fuser_backward`.

    Class attributes:
        num_extra_inputs, num_extra_outputs: tensors besides the main input and output.
        backward_reads_parameters: asks the engine to keep the parameters of the forward call in
            ``ctx.parameters``, so that backward never reads a parameter that was replaced since.
        communicates: whether ranks may exchange data in its passes.
        stores_last: whether all that it does with its keyword ``cache`` is to ask
            ``attention.cache.extended``; a sequence can then have the cache store after all else.
        takes_keywords: whether a forward may be given keywords at all; without, they are refused
            before it runs.
        takes_part_in_recipes: whether it has GEMMs that a recipe of quantised compute is about.
        Saved: a ``NamedTuple`` that names what forward passes to ``ctx.save_for_backward``. It is
            the contract between every forward (fused or not) and every backward of this operation.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # Recipes leave it out from now on. Scales stay, as it may be taken back in.
        if name == "recipe" and value is None and has_no_scales(self._modules.get(CHILD)):
            self.reset_recipe_state()

    def reset_recipe_state(self, *, recipe: Any | None = None) -> None:
        """Forgets the scales of quantised compute: they begin anew at the next call.

        Args:
            recipe: of calls to come, whose state is made at once; see
                :func:`opfuser.init_recipe_state`. None leaves that to the first call. Either way
                calls follow the recipe of their region.

        Raises:
            ArgumentError: ``recipe`` is neither None nor a recipe.
        """
        for module in (self, self._owner):
            if module is not None and module._modules.get(CHILD) is not None:
                del module._modules[CHILD]
                module._touch()
        if recipe is not None:
            init_recipe_state(self, recipe)

    def forward(self, input: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """Runs this operation alone. Channels do not apply: every extra input is an argument."""
        if kwargs or torch.compiler.is_compiling() or self._alone is None:
            keywords = [kwargs] if kwargs else None
            return run_alone(self, input, extra_inputs, keywords)
        return self._alone(input, *extra_inputs)

    _plain_forward = forward

    def share_parameters_with(self, owner: FusibleOperation) -> None:
        """Hands the parameters of this operation over to a compound.

        Both use one dictionary from now on: an assignment through either is visible in both, and
        the state dict has the compound's plain names.
        """
        owner._parameters.update(self._parameters)
        if CHILD in self._modules:
            owner.add_module(CHILD, self._modules[CHILD])
        self.__dict__["_parameters"] = owner._parameters
        self.__dict__["_owner"] = owner


class FusedOperation(CalledOperation, op_base.FusedOperation):
    """Consecutive basic operations executed as one.

    One that overrides neither ``fuser_forward`` nor ``fuser_backward`` is a compound, such as
    ``Linear``: a Sequential replaces it by its basic operations. Any other owns no parameters; its
    basic operations do.

    Args:
        basic_ops: the basic operations it replaces, in forward order.

    Raises:
        ArgumentError: there are none.
        ArgumentTypeError: one is no operation.

    Class attributes:
        saves_more: declares that its forward saves more bytes than the operations that it replaces;
            :func:`opfuser.testing.check_fusion` fails for others that do.
        handle: the ``FusionHandle`` of a class that :func:`opfuser.fusion` registered.
    """

    basic_ops: Sequence[BasicOperation]

    def forward(
        self,
        input: Tensor,
        *extra_inputs: Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Any:
        """Runs this operation alone."""
        return run_alone(self, input, extra_inputs, basic_op_kwargs)

    _plain_forward = forward
