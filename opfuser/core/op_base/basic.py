"""What a plan runs of one tensor operation, and the parameters that the operation owns."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Concatenate, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...errors import (
    ArgumentError,
    ArgumentTypeError,
    ChannelCapturedError,
    ChannelError,
    ChannelIndexError,
    MissingImplementationError,
    OpKwargsError,
    counted,
)
from ...gemm_providers import GemmChoice
from ...torch_internals import constant_result
from ..context import Dtypes, OperationContext
from .fusible import FusibleOperation
from .results import parameter_grads

Returned = TypeVar("Returned")


def _with_any_keywords(
    method: Callable[..., Returned],
) -> Callable[Concatenate[Any, OperationContext, Tensor, ...], Returned]:
    """``method``, which may be overridden by one with other keywords, as type checkers see it."""
    return method


@functools.lru_cache(256)
def _keywords_of(op_forward: Callable[..., Any]) -> tuple[str, ...] | None:
    parameters = inspect.signature(op_forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return tuple(name for name in parameters if name != "self")


class BasicOperation(FusibleOperation):
    """What plans and programs know of :class:`opfuser.BasicOperation`."""

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    backward_reads_parameters: ClassVar[bool] = False
    communicates: bool = False
    stores_last: ClassVar[bool] = False
    takes_keywords: ClassVar[bool] = True
    takes_part_in_recipes: ClassVar[bool] = False
    Saved: ClassVar[type[tuple[Any, ...]] | None] = None

    _extra_input_channels: list[str | None]
    _extra_output_channels: list[str | None]
    _extra_output_to_caller: list[bool]
    _owner: FusibleOperation | None = None
    _parameter_names: list[str]
    _routing_captured: bool
    _settings: Any = None  # what the property has computed; see there

    def __init__(self) -> None:
        self.__dict__["_parameter_names"] = []
        super().__init__()
        self._extra_input_channels = [None] * self.num_extra_inputs
        self._extra_output_channels = [None] * self.num_extra_outputs
        self._extra_output_to_caller = [True] * self.num_extra_outputs
        self._routing_captured = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_routing_captured": False}

    @property
    def is_fused_op(self) -> bool:
        return False

    def make_settings(self) -> Any:
        """What both passes compute with besides tensors, as a non-empty NamedTuple or the like.

        Called after a public attribute was set, so that derived values follow it. Forward freezes
        the result into the context, where backward reads it: an attribute set in between does not
        reach the gradient.

        Returns:
            An immutable value, or None for an operation without any.

        Raises:
            ArgumentError: an attribute is outside its domain.
        """
        return None

    @property
    def settings(self) -> Any:
        """The current settings; see :meth:`make_settings`. Those of a call are in its context."""
        settings = self.__dict__.get("_settings")
        if settings is None:
            settings = self.make_settings()
            if settings is not None:
                self.__dict__["_settings"] = settings
        return settings

    @constant_result
    def _accepted_keywords(self) -> tuple[str, ...] | None:
        """The keywords that :meth:`op_forward` takes; None: any."""
        # A signature takes longer to read than some operations.
        return _keywords_of(getattr(self.op_forward, "__func__", self.op_forward))

    def check_keywords(self, kwargs: Mapping[str, Any]) -> None:
        """Looks at the keywords of a call.

        Raises:
            OpKwargsError: the forward does not accept one of them.
        """
        if kwargs and not self.takes_keywords:
            raise OpKwargsError.explained(
                f"{type(self).__name__} takes no keywords", received=", ".join(kwargs)
            )
        if type(self).fuser_forward is not BasicOperation.fuser_forward:
            return  # it receives the dict and checks the keywords itself
        accepted = self._accepted_keywords()
        unknown = [] if accepted is None else sorted(set(kwargs).difference(accepted))
        if unknown:
            raise OpKwargsError.explained(
                "op_kwargs may only hold keywords that the operation's forward takes",
                where=type(self).__name__,
                received=", ".join(unknown),
            )

    def quantized_refusal(self, env: Any) -> Any | None:
        """Why an operation with GEMMs is not computed as the recipe of ``env`` says, or None.

        Asked where ``takes_part_in_recipes`` is set.
        """
        return None

    def gemm_choices(self, env: Any) -> Iterable[GemmChoice]:
        """Libraries for its quantised products, if the recipe of ``env`` names other than torch."""
        return ()

    def holds_data(self, n: int) -> bool:
        """Whether ``ctx.parameters[n]`` keeps its data where ``parameter.data`` is set afterwards.

        Backward of torch's functions reads the new data of a parameter that they took themselves,
        and the old data of its views and casts.
        """
        return False

    def num_quantizers(self, mode: str) -> int:
        """How many tensors the pass ``mode``, ``"forward"`` or ``"backward"``, may quantise."""
        return 0

    def get_quantizer(self, mode: str, index: int) -> Any | None:
        """How a tensor is quantised in the region that the caller is in; None: it is not.

        Args:
            mode: ``"forward"`` or ``"backward"``.
            index: of linear operations 0 is the input and 1 the weight in forward, 0 the gradient
                of the output in backward.

        Raises:
            ArgumentError: the operation has no such tensor.
        """
        if mode in ("forward", "backward") and 0 <= index < self.num_quantizers(mode):
            return self._quantizer(mode, index)
        raise ArgumentError.explained(
            "A quantizer is one of 'forward' or 'backward', by index",
            where=type(self).__name__,
            received=f"get_quantizer({mode!r}, {index!r})",
            remedy="num_quantizers(mode) says how many there are",
        )

    def _quantizer(self, mode: str, index: int) -> Any | None:
        return None

    def get_input_quantizer(self) -> Any | None:
        return self.get_quantizer("forward", 0) if self.num_quantizers("forward") else None

    def get_grad_output_quantizer(self) -> Any | None:
        return self.get_quantizer("backward", 0) if self.num_quantizers("backward") else None

    def cached_tensors(self) -> Sequence[Tensor]:
        """Tensors besides parameters and buffers that the operation keeps from call to call."""
        return ()

    def frozen_settings(self, ctx: OperationContext) -> Any:
        """The settings of the call that ``ctx`` belongs to.

        The engine freezes them before the operation's forward runs, fused or not; for a context
        constructed by hand, this method does.
        """
        if ctx.settings is None:
            ctx.settings = self.settings
        return ctx.settings

    def output_dtype(self, dtypes: Dtypes) -> torch.dtype:
        """The dtype of the output, which plans of the operations behind it depend on.

        By default the input's, or the first parameter's where the input holds integers.
        """
        return dtypes.input if dtypes.input.is_floating_point else dtypes.first_parameter

    def plan_note(self, env: Any) -> str | None:
        """What the text of a plan says about the operation besides its name; None: nothing.

        Args:
            env: the ``Env`` of the call; where its input holds integers, with the dtype of the
                first parameters before the operation.
        """
        return None

    def extra_output_dtypes(self, dtypes: Dtypes) -> Sequence[torch.dtype]:
        """Dtypes of the extra outputs; by default the input's."""
        return (dtypes.input,) * self.num_extra_outputs

    @_with_any_keywords
    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
        **kwargs: Any,
    ) -> Tensor:
        """The output. Saves what :meth:`op_backward` reads, if ``ctx.requires_grad``."""
        raise MissingImplementationError.explained(
            "A basic operation must implement op_forward",
            where=type(self).__name__,
            remedy="Implement it, or fuser_forward if it has extra inputs or outputs",
        )

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, Iterable[Tensor | None]]:
        """The gradients of the input and of the parameters.

        Returns:
            The gradient of the input (None if not ``ctx.needs.input``), and one gradient or None
            per parameter, in registration order. ``grad_output`` must not be written to.
        """
        raise MissingImplementationError.explained(
            "A basic operation must implement op_backward",
            where=type(self).__name__,
            remedy="Implement it, or fuser_backward if it has extra inputs or outputs",
        )

    def reference(self, input_: Tensor, *extra_inputs: Any, **kwargs: Any) -> Any:
        """The operation in plain differentiable torch, with which its kernels are compared.

        Returns the output, or the tuple of output and extra outputs.

        Raises:
            MissingImplementationError: the operation has none.
            NotSupportedError: the operation spans several ranks; a reference runs on one.
        """
        raise MissingImplementationError.explained(
            "check_op compares with the operation's reference",
            where=type(self).__name__,
            remedy="Implement reference() with plain differentiable torch code",
        )

    def _check_no_extras(self, method: str) -> None:
        if self.num_extra_inputs or self.num_extra_outputs:
            raise MissingImplementationError.explained(
                "An operation with extra inputs or outputs must implement "
                "fuser_forward and fuser_backward itself",
                where=type(self).__name__,
                received=f"{counted(self.num_extra_inputs, 'extra input')}, "
                f"{counted(self.num_extra_outputs, 'extra output')}",
                remedy=f"Override {method}",
            )

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor | None]],
        prev_op_grad_output_quantizer: Any | None,
        next_op_input_quantizer: Any | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[Tensor, Sequence[Sequence[Tensor | None]]]:
        self._check_no_extras("fuser_forward")
        output = self.op_forward(
            basic_op_ctxs[0],
            input_,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
            **basic_op_kwargs[0],
        )
        return output, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Sequence[Tensor | None]],
    ) -> tuple[
        Tensor | None,
        Sequence[Sequence[Tensor | None] | None],
        Sequence[Sequence[Tensor | None] | None],
    ]:
        self._check_no_extras("fuser_backward")
        result = self.op_backward(basic_op_ctxs[0], grad_output)
        grad_input, grad_params = parameter_grads(type(self).__name__, result)
        return grad_input, [grad_params], [()]

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        parameters = own.get("_parameters")
        if parameters is not None and name in parameters:
            return parameters[name]
        owner = own.get("_owner")
        if owner is not None and name in own["_parameter_names"]:
            return getattr(owner, name)  # parametrised on the compound
        return super().__getattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if name not in self._parameter_names:
            self._parameter_names.append(name)

    def parameter_slots(self) -> list[tuple[nn.Module, str]]:
        """The modules and names that hold this operation's parameters, in registration order.

        A parametrised parameter counts under its own name: its value is computed at every read.

        Raises:
            ArgumentError: a basic operation of a compound is parametrised, not the compound.
        """
        slots: list[tuple[nn.Module, str]] = []
        owner = self._owner or self
        parametrized = parametrize.is_parametrized(owner)
        if self._owner is not None and parametrize.is_parametrized(self):
            raise ArgumentError.explained(
                "The parameters of a compound are parametrised on the compound",
                where=type(self._owner).__name__,
                received="a parametrisation of one of its basic_ops",
                remedy="Register it on the compound itself",
            )
        replaced: list[str] = []
        for name in self._parameter_names:
            if isinstance(owner.__dict__.get(name), Tensor):
                # A pre-hook computes it, as that of torch.nn.utils.prune does from weight_orig.
                replaced.append(name + "_")
                slots.append((owner, name))
            elif name.startswith(tuple(replaced)):
                continue
            elif owner._parameters.get(name) is not None or (
                parametrized and parametrize.is_parametrized(owner, name)
            ):
                slots.append((owner, name))
        for child_name, child in self._modules.items():
            if child is None or child_name == "parametrizations":
                continue
            for module in child.modules():
                slots += [(module, n) for n, p in module._parameters.items() if p is not None]
        return slots

    def set_extra_input_channel(self, index: int, channel: str | None) -> BasicOperation:
        """Connects extra input ``index`` to the named channel; None makes it the caller's again.

        Raises:
            ChannelIndexError: the operation has no extra input of that index.
            ChannelError: the name is neither a non-empty string nor None.
            ChannelCapturedError: a fuser or Sequential has captured the routing.
            ArgumentTypeError: the index is no int.
        """
        self._check_channel("input", index, self.num_extra_inputs, channel)
        self._extra_input_channels[index] = channel
        self._touch()
        return self

    def set_extra_output_channel(
        self, index: int, channel: str | None, *, output_to_caller: bool = True
    ) -> BasicOperation:
        """Publishes extra output ``index`` on the named channel, and by default to the caller.

        Raises:
            ChannelIndexError: the operation has no extra output of that index.
            ChannelError: the name is neither a non-empty string nor None.
            ChannelCapturedError: a fuser or Sequential has captured the routing.
            ArgumentTypeError: the index is no int, or ``output_to_caller`` no bool.
        """
        self._check_channel("output", index, self.num_extra_outputs, channel)
        if not isinstance(output_to_caller, bool):
            raise ArgumentTypeError.explained(
                "output_to_caller must be a bool",
                where=type(self).__name__,
                received=repr(output_to_caller),
            )
        self._extra_output_channels[index] = channel
        self._extra_output_to_caller[index] = output_to_caller or channel is None
        self._touch()
        return self

    def _check_channel(self, kind: str, index: int, count: int, channel: str | None) -> None:
        where = type(self).__name__
        if not isinstance(index, int):
            raise ArgumentTypeError.explained(
                f"The index of an extra {kind} is an int", where=where, received=repr(index)
            )
        if not 0 <= index < count:
            raise ChannelIndexError.explained(
                f"Extra {kind} index {index} is out of range",
                where=where,
                received=f"an operation with {counted(count, f'extra {kind}')}",
            )
        if channel is not None and (not isinstance(channel, str) or not channel):
            raise ChannelError.explained(
                f"The channel of an extra {kind} must be a non-empty string or None",
                where=where,
                received=repr(channel),
            )
        if self._routing_captured:
            raise ChannelCapturedError.explained(
                "Channels of an operation cannot change, because a fuser or Sequential has "
                "already captured its channel routing",
                where=where,
                remedy="Bind channels before the first call, on newly made operations",
            )
