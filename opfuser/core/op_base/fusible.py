"""What every operation has, basic or fused: its part in plans."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, ClassVar

from torch import Tensor

from ...errors import MissingImplementationError, ReadOnlyAttributeError
from ..change_tracking import DERIVED, Tracked, has_hooks, signature
from ..context import GradNeeds, OperationContext
from ..traced_calls import TracedCalls


class FusibleOperation(TracedCalls, Tracked):
    """An operation that can take part in fusion: a basic operation or a fused one.

    Numbers of any type that are set as attributes become Python's int or float.

    Class attributes:
        read_only: names of attributes that cannot be set again, because something derived from
            them, such as the shape of a parameter, would not follow.
        replayable: promises that both passes only launch kernels on tensors that are arguments,
            parameters, buffers, :meth:`BasicOperation.cached_tensors` or temporary: the host reads
            no value, and nothing else changes. Launches can then be recorded and replayed. It is
            not inherited: a class outside of the library must set it itself.
        recordable: promises that both passes compute with torch functions only, including custom
            operators of ``torch.library``, and that which functions they call depends only on
            shapes, dtypes, attributes and torch's modes. Changes inside a list or dict are not
            seen: set the attribute anew. Equal calls can then be repeated without the operation,
            see ``docs/what-runs.md``. Any other kernel call would not be recorded,
            and would be missing. Not inherited; always true for the library's own operations.
        kernels: the kernels of the operation, for the text of plans: ``("my_package.my_norm",)``.
            Not inherited by classes outside of the library. The library's own operations name
            families of Triton kernels, which plain torch replaces where they do not run, and
            ``"GEMM"``; its fused operations have those of their basic operations by default.
        emits_quantized: whether forward returns its output quantized by
            ``next_op_input_quantizer``, if there is one.
        emits_groups: whether forward gathers the rows of groups as ``next_op_input_quantizer``
            says, if that is a ``GroupQuantizer``.
        emits_quantized_grad: whether backward returns the gradient of its input quantized by
            ``grad_input_quantizer`` of its first context, if that is not None.
        frees_output_grad: whether backward receives the only reference to the gradient of its
            output, if the engine has no other, and drops it before its GEMMs.
    """

    read_only: ClassVar[frozenset[str]] = frozenset()
    replayable: bool = True
    recordable: ClassVar[bool] = False
    kernels: ClassVar[tuple[str, ...]] = ()
    emits_quantized: ClassVar[bool] = False
    emits_groups: ClassVar[bool] = False
    emits_quantized_grad: ClassVar[bool] = False
    frees_output_grad: ClassVar[bool] = False

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, (int, float, Tensor)) and isinstance(value, Real):
            # Fractions and NumPy's scalars, which torch does not accept.
            value = int(value) if isinstance(value, Integral) else float(value)
        if name in self.read_only and self.__dict__.get(name, value) != value:
            raise ReadOnlyAttributeError.explained(
                f"{name} is fixed when the operation is made",
                where=type(self).__name__,
                received=f"{name}={value!r} in place of {self.__dict__[name]!r}",
                remedy="Make a new operation",
            )
        super().__setattr__(name, value)

    @property
    def is_fused_op(self) -> bool:
        """Whether this operation replaces basic operations."""
        raise NotImplementedError

    @property
    def quantized_ops(self) -> Sequence[FusibleOperation]:
        """The operations among those that it covers whose GEMMs take quantized operands."""
        return ()

    def takes_quantized(self, env: Any, needs: Sequence[GradNeeds | None]) -> Any | None:
        """The ``Quantizer`` of the input that forward takes; None means that it takes a tensor.

        An operation that returns one must accept tensors too. Called once per plan.

        Args:
            env: the ``Env`` of the call.
            needs: for each basic operation the gradients that will be read.
        """
        return None

    def takes_groups(
        self, env: Any, needs: Sequence[GradNeeds | None], gathers: FusibleOperation
    ) -> Any | None:
        """The ``GroupQuantizer`` of the rows that ``gathers`` gathers for it, likewise.

        Args:
            env, needs: see :meth:`takes_quantized`.
            gathers: the preceding operation.
        """
        return None

    def takes_quantized_grad(self, env: Any, needs: Sequence[GradNeeds | None]) -> Any | None:
        """The ``Quantizer`` of the output's gradient that backward takes; None means a tensor."""
        return None

    def quantized_edges(self, env: Any, needs: Sequence[GradNeeds | None]) -> Sequence[Any]:
        """A ``QuantizedEdge`` for each internal tensor that kernels exchange as codes.

        Operations are numbered from the first one that this one covers.
        """
        return ()

    def pre_first_fuser_forward(self) -> None:
        """Called once, before the first forward that includes this operation."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Called before every forward. Override only if needed: it costs host time."""

    def own_forward(self) -> str:
        """Why calls may do something other than the passes, as a predicate; empty if they do not.

        Called after changes, for operations whose class has its own ``forward``.
        """
        return "has a forward of its own"

    def get_input_quantizer(self) -> Any | None:
        """How the input is quantized in the current region; None if it is not."""
        return None

    def get_grad_output_quantizer(self) -> Any | None:
        """How the gradient of the output is quantized in the current region; None if it is not."""
        return None

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
        """Computes the forward of all basic operations that this operation covers.

        Every list has one entry per basic operation, in forward order.

        Returns:
            The output, and for each basic operation the sequence of its extra outputs.
        """
        raise MissingImplementationError.explained(
            "A fused operation in the forward plan must implement fuser_forward",
            where=type(self).__name__,
            remedy="Implement it, or register the fusion for the backward pass only",
        )

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
        """Computes the backward of all basic operations that this operation covers.

        Every list has one entry per basic operation, in FORWARD order.

        Returns:
            The gradient of the input (None if ``basic_op_ctxs[0].needs.input`` is false); for each
            basic operation the gradients of its parameters; for each the gradients of its extra
            inputs. ``grad_output`` must not be written to.
        """
        raise MissingImplementationError.explained(
            "A fused operation in the backward plan must implement fuser_backward",
            where=type(self).__name__,
            remedy="Implement it, or register the fusion for the forward pass only",
        )

    def _describe(self) -> str:
        return repr((id(type(self)), has_hooks(self), signature(self)))

    _alone: Any = None  # the fuser of calls of it alone, with its plans
    _plain_forward: ClassVar[Any] = None  # which runs it alone

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for derived in (*DERIVED, "_alone", "_settings"):
            state.pop(derived, None)
        return state
