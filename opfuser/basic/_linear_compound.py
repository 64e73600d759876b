"""What ``Linear`` and ``MergedLinear`` have in common: both stand for several operations."""

from __future__ import annotations

from typing import Any

from typing_extensions import Self

from ..op import BasicOperation, FusedOperation


class LinearCompound(FusedOperation):
    """Abstract. A compound whose first basic operation is linear; owns the parameters of all."""

    basic_ops: tuple[BasicOperation, ...]

    def _set_parts(self, parts: list[BasicOperation]) -> None:
        self.basic_ops = tuple(parts)
        for part in parts:
            part.share_parameters_with(self)

    @property
    def _linear(self) -> Any:
        return self.basic_ops[0]

    @property
    def accumulate_into_main_grad(self) -> bool:
        """The argument of this name. Setting it takes effect at the next forward."""
        return self._linear.accumulate_into_main_grad  # type: ignore[no-any-return]

    @accumulate_into_main_grad.setter
    def accumulate_into_main_grad(self, value: bool) -> None:
        self._linear.accumulate_into_main_grad = value

    @property
    def accumulate_into_grad(self) -> bool:
        """The argument of this name. Setting it takes effect at the next forward."""
        return self._linear.accumulate_into_grad  # type: ignore[no-any-return]

    @accumulate_into_grad.setter
    def accumulate_into_grad(self, value: bool) -> None:
        self._linear.accumulate_into_grad = value

    @property
    def recipe(self) -> str | None:
        """``"inherit"``, or None where recipes of quantized compute leave it out."""
        return self._linear.recipe  # type: ignore[no-any-return]

    @recipe.setter
    def recipe(self, value: str | None) -> None:
        self._linear.recipe = value

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for part in self.basic_ops:  # not submodules, so nn.Module does not reach them
            part.training = mode
        return self
