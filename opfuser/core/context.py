"""What an operation reads of a call, and what its forward hands to its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, TypedDict

import torch
from torch import Tensor, nn

from ..errors import InputError, ParametersNotKeptError, SavedTensorsError, counted
from ..torch_internals import any_autocast

__all__ = [
    "COMPUTE_DTYPES",
    "BackwardResult",
    "Contexts",
    "Dtypes",
    "Extras",
    "ForwardArguments",
    "ForwardResult",
    "GradNeeds",
    "OperationContext",
    "OperationGrads",
    "TensorFacts",
    "any_autocast",
    "autocast_dtype",
    "compute_dtype",
    "held",
    "in_compute_dtype",
    "new_context",
    "refuse_dtype",
]

COMPUTE_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


class TensorFacts(NamedTuple):
    """What planning reads of a tensor. A tensor has the same attributes and can take its place."""

    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


class Dtypes(NamedTuple):
    """The dtypes in a call of an operation that its output's dtype may depend on.

    Attributes:
        input: of the main input.
        extra_inputs: of each extra input.
        parameters: of each parameter, in registration order.
        autocast: that of the autocast region active for the device, or None.
    """

    input: torch.dtype
    extra_inputs: tuple[torch.dtype, ...] = ()
    parameters: tuple[torch.dtype, ...] = ()
    autocast: torch.dtype | None = None

    @property
    def first_parameter(self) -> torch.dtype:
        """The first parameter's, or the input's if there is none."""
        return self.parameters[0] if self.parameters else self.input

    @property
    def compute(self) -> torch.dtype:
        """The autocast dtype if active, otherwise the input's, as :func:`compute_dtype`."""
        return self.autocast or self.input


class GradNeeds(NamedTuple):
    """Which gradients of one basic operation will be read.

    Attributes:
        input: that of the input.
        parameters: those of the parameters, in registration order.
        extra_inputs: those of the extra inputs.
    """

    input: bool
    parameters: tuple[bool, ...]
    extra_inputs: tuple[bool, ...]


class _NothingSaved(tuple[Any, ...]):
    """An empty tuple that says so when it is unpacked."""

    def _refuse(self, *args: Any) -> NoReturn:
        raise SavedTensorsError.explained(
            "ctx.saved_tensors is what forward saved, read in backward",
            received="nothing that was saved",
            remedy="Call ctx.save_for_backward in forward if ctx.requires_grad; in forward, "
            "use the tensors themselves",
        )

    __iter__ = __getitem__ = _refuse


class _NotKept(tuple[Any, ...]):
    """An empty tuple that refuses to be unpacked: parameters were not kept."""

    def _refuse(self, *args: Any) -> NoReturn:
        raise ParametersNotKeptError.explained(
            "ctx.parameters is the parameters of the forward call, kept for backward",
            received="none that were kept",
            remedy="Set backward_reads_parameters = True in the operation's class; in forward, "
            "read parameters from self",
        )

    __iter__ = __getitem__ = _refuse


class OperationContext:
    """State that the forward of one basic operation passes to its backward.

    Tensors go through :meth:`save_for_backward`; small Python values may be set as attributes.

    Attributes:
        requires_grad: whether the backward of this operation will run.
        needs: which gradients will be read (set by the engine, not by operations).
        saved_tensors: in backward, what forward saved, in the same order.
        parameters: in backward, the operation's parameters as forward saw them, in registration
            order; empty unless the operation sets ``backward_reads_parameters = True``.
        settings: the operation's ``settings`` as they were when its forward began, in both passes;
            None for an operation that has none.
        grad_input_quantizer: in backward, the quantizer of the gradient of the input; None if a
            plain tensor is expected.
        traced: whether torch.compile or torch.export traces the call, which then neither reads nor
            fills any cache.
    """

    requires_grad: bool = True
    needs: GradNeeds = GradNeeds(True, (), ())
    saved_tensors: tuple[Any, ...] = _NothingSaved()
    to_save: tuple[Tensor | None, ...] | None = None
    settings: Any = None
    traced: bool = False
    grad_input_quantizer: Any | None = None

    # For the engine: position of this context's tensors among all saved ones, and the shape, dtype
    # and device of what its operation returned.
    _span: tuple[int, int] | None = None
    _output_like: tuple[torch.Size, torch.dtype, torch.device] | None = None
    parameters: tuple[Any, ...] = _NotKept()

    if TYPE_CHECKING:  # operations may set attributes of their own

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Saves tensors of any shapes and dtypes for backward, at most once per operation.

        A fused operation that calls an operation's forward and saves less sets ``to_save`` to the
        tuple of the remaining tensors.

        Raises:
            SavedTensorsError: the operation has already saved tensors.
        """
        if self.to_save is not None:
            raise SavedTensorsError.explained(
                "An operation calls ctx.save_for_backward once",
                received=f"{counted(len(tensors), 'tensor')} after {len(self.to_save)}",
                remedy="Save all of them in one call",
            )
        self.to_save = tensors


# Types of te.ops' fuser_forward and fuser_backward. Lists have one entry per basic operation.
Contexts: TypeAlias = list[OperationContext]
Extras: TypeAlias = Sequence[Sequence[Tensor | None]]
ForwardResult: TypeAlias = tuple[Tensor, Extras]
"""Output, extra outputs."""
BackwardResult: TypeAlias = tuple[
    Tensor | None,
    Sequence[Sequence[Tensor | None] | None],
    Sequence[Sequence[Tensor | None] | None],
]
"""Gradients of the input, of parameters, of extra inputs."""
OperationGrads: TypeAlias = tuple[Tensor | None, tuple[Tensor | None, ...]]
"""What ``op_backward`` returns: gradients of the input, and of the parameters."""


class ForwardArguments(TypedDict):
    """The keywords of ``fuser_forward``, which are always given."""

    basic_op_extra_inputs: Extras
    prev_op_grad_output_quantizer: Any | None
    next_op_input_quantizer: Any | None
    basic_op_kwargs: list[dict[str, Any]]


def new_context(needs: GradNeeds | None, settings: Any = None) -> OperationContext:
    """A context for a call with these needs; None means that its backward does not run."""
    ctx = OperationContext()
    if settings is not None:
        ctx.settings = settings
    if needs is None:
        ctx.requires_grad = False
    else:
        ctx.needs = needs
    return ctx


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of the autocast region that is active for ``device``, or None outside of one."""
    if not any_autocast():
        return None
    kind = device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def compute_dtype(input_: Tensor, op: object = None) -> torch.dtype:
    """The dtype in which an operation computes: that of autocast if active, else the input's.

    Args:
        input_: the operation's input, of any shape.
        op: the operation, for the error message.

    Raises:
        InputError: the input is neither fp16, bf16, fp32 nor fp64.
    """
    dtype = input_.dtype
    if dtype not in COMPUTE_DTYPES:
        refuse_dtype(input_, op)
    return autocast_dtype(input_.device) or dtype


def in_compute_dtype(x: Tensor, op: object = None) -> Tensor:
    """``x`` in its :func:`compute_dtype`; ``x`` itself if it already has it.

    Args:
        x: the operation's input.
        op: the operation, for the error message.

    Raises:
        InputError: as :func:`compute_dtype`.
    """
    if x.dtype in COMPUTE_DTYPES and not any_autocast():
        return x
    return x.to(compute_dtype(x, op))


def refuse_dtype(input_: Tensor, op: object = None) -> NoReturn:
    """Raises InputError for an input of a dtype that no operation computes in."""
    raise InputError.explained(
        "The input must be fp16, bf16, fp32 or fp64",
        where="" if op is None else type(op).__name__,
        received=f"a tensor of {input_.dtype}",
        remedy="Convert the input to one of them",
    )


def held(t: Tensor | None) -> Any:
    """What an operation saves, as ``parameter.data = other`` does not change it afterwards.

    A view with the version of the parameter, as torch's linear functions save of their weights.
    """
    return t.detach() if type(t) is nn.Parameter else t
