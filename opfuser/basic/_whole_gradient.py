"""The whole gradient of a parameter, of which parts lie in ``grad`` and in ``main_grad``."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from ..errors import MasterWeightError
from ._weight_grad import has_zeros_as_placeholder

_FLAG = "grad_added_to_main_grad"


class _State(NamedTuple):
    """A tensor at some time.

    Attributes:
        tensor: which it does not keep alive.
        version: of its values.
    """

    tensor: TensorWeakRef
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _State:
        """Reads the present state of a tensor."""
        return cls(TensorWeakRef(tensor), tensor._version)

    def is_that_of(self, tensor: Tensor | None) -> bool:
        """Whether it is this tensor, and nothing has changed since."""
        return tensor is not None and self.tensor() is tensor and self.version == tensor._version


class WholeGradient:
    """The gradient of one parameter, as the steps of an optimizer take it.

    ``main_grad`` is a part of it if ``grad_added_to_main_grad`` is set, which the step undoes: what
    a later step finds there was not added by the backward passes before that one. Steps that
    follow each other without any take the same gradient, as long as ``grad`` is left alone.
    """

    def __init__(self, param: nn.Parameter, name: str) -> None:
        self._param: Any = param
        self._name = name
        self._taken: _State | None = None
        """Of ``grad``, when the last step took ``main_grad`` too."""

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles keep: they have no ``grad`` that a step has taken."""
        return {**self.__dict__, "_taken": None}

    @property
    def is_in_main_grad(self) -> bool:
        """Whether a part of it was added to ``main_grad`` since the last step."""
        return bool(getattr(self._param, _FLAG, False))

    def take(self, like: Tensor) -> Tensor | None:
        """All of it, in the dtype and on the device of ``like``.

        Args:
            like: a master of the parameter, or the parameter: ``grad`` is returned as it is if
                that is all.

        Raises:
            MasterWeightError: it is said to be in ``main_grad``, which the parameter lacks.
        """
        grad: Tensor | None = self._param.grad
        if not (self.is_in_main_grad or (self._taken and self._taken.is_that_of(grad))):
            self._taken = None
            return grad if grad is None or like is self._param else grad.to(like)
        total: Tensor = self._main_grad().to(like)
        self._taken = None if grad is None else _State.of(grad)
        self._param.grad_added_to_main_grad = False
        if grad is None or not has_zeros_as_placeholder(self._param):
            return total
        return total + grad.to(like)

    def forget(self) -> None:
        """Leaves out what ``main_grad`` holds now, for it was set to zero or is to be."""
        self._taken = None
        if self.is_in_main_grad:
            self._param.grad_added_to_main_grad = False

    def _main_grad(self) -> Tensor:
        shape = self._param.shape
        main_grad = getattr(self._param, "main_grad", None)
        if isinstance(main_grad, Tensor) and main_grad.numel() == shape.numel():
            return main_grad.detach().view(shape)
        found = tuple(main_grad.shape) if isinstance(main_grad, Tensor) else main_grad
        raise MasterWeightError.explained(
            "A parameter with grad_added_to_main_grad has its gradient in main_grad",
            where="MasterWeights",
            received=f"main_grad: {found}; {self._name} of shape {tuple(shape)}",
            remedy="Keep main_grad until the step, or set grad_added_to_main_grad to False",
        )
