"""Comparison of the results of calls with a float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, InputError, explain
from ..op import autocast_dtype
from .calls import ERRORS, Outcome, Subject, call, fail
from .variants import Variant, leading_dims, one_row, without_rows


class Tolerance(NamedTuple):
    """An error may be ``factor`` times that of plain torch, plus ``floor`` times the magnitude."""

    factor: float = 2.0
    floor: float | None = None


class Deviation(NamedTuple):
    """The largest deviation of a tensor from float64, and what is allowed.

    Attributes:
        error: absolute; NaN if a value is NaN or infinite where the other is not.
        allowed: error that is allowed.
        at: index of the element; None in an empty tensor.
        value, plain, expected: this element, that of plain torch, and that of float64.
        wrong: how many elements deviate by more than is allowed.
    """

    error: float
    allowed: float
    at: tuple[int, ...] | None
    value: float = 0.0
    plain: float = 0.0
    expected: float = 0.0
    wrong: int = 0

    @property
    def is_wrong(self) -> bool:
        return not self.error <= self.allowed


def _differences(ours: Tensor, exact: Tensor) -> Tensor:
    ours = ours.detach().to(torch.float64)
    exact = exact.detach().to(torch.float64)
    # Infinities of one sign (masked logits, say) agree, though their difference is NaN.
    return torch.where(ours == exact, 0.0, (ours - exact).abs())


def error_of(ours: Tensor, exact: Tensor) -> float:
    """The largest absolute difference; NaN if one is NaN or infinite where the other is not."""
    return float(_differences(ours, exact).max()) if exact.numel() else 0.0


def deviation(ours: Tensor, plain: Tensor, exact: Tensor, factor: float, floor: float) -> Deviation:
    """How far a tensor is from float64.

    Args:
        plain: the same by plain torch, whose error is allowed ``factor`` times.
        floor: of :class:`Tolerance`; integers have to be equal.
    """
    if not exact.numel():
        return Deviation(0.0, 0.0, None)
    errors = _differences(ours, exact)
    at = int(errors.argmax())  # the first NaN, if there is one
    allowed = 0.0
    if exact.is_floating_point():
        allowed = factor * error_of(plain, exact) + floor * magnitude(exact)
    index = tuple(int(n) for n in torch.unravel_index(torch.tensor(at), exact.shape))
    value, other, right = (float(t.detach()[index]) for t in (ours, plain, exact))
    wrong = int((~(errors <= allowed)).sum())
    return Deviation(float(errors.flatten()[at]), allowed, index, value, other, right, wrong)


def magnitude(exact: Tensor) -> float:
    """The magnitude that the floor is relative to."""
    finite = exact.detach().to(torch.float64).nan_to_num(0.0, 0.0, 0.0)
    # Cancellation makes gradients much smaller than the terms that they are summed from.
    return max(float(finite.abs().max()) if exact.numel() else 0.0, 1 / 16)


def precision(dtypes: Sequence[torch.dtype]) -> float:
    """The default floor: one unit in the last place of the coarsest dtype.

    It is four in fp32, in which sums are rounded after every term: those of plain torch may by
    chance have next to no error. It is larger in float64, where plain torch is the reference itself
    and has an error of zero.
    """
    floating = [d for d in dtypes if d.is_floating_point]
    eps = max((torch.finfo(d).eps for d in floating), default=0.0)
    units = {torch.finfo(torch.float64).eps: 256, torch.finfo(torch.float32).eps: 4}
    return eps * units.get(eps, 1)


def loosely(floor: float | None, tensors: Sequence[Tensor | None]) -> Tolerance:
    """A tolerance that allows for rounding, where accuracy is not what is checked."""
    some = [t for t in tensors if t is not None]
    lower = {autocast_dtype(t.device) for t in some}
    dtypes = [*(t.dtype for t in some), *(dtype for dtype in lower if dtype is not None)]
    return Tolerance(2.0, max(floor or 0.0, 1e-3, 8 * precision(dtypes)))


def check_kind(where: str, y: Any, like: Tensor, *, any_dtype: bool) -> None:
    """Requires ``y`` to be a tensor of the shape, device and dtype of ``like``.

    Args:
        any_dtype: allows another dtype: under autocast, an operation may compute in the autocast
            dtype or keep that of its input.
    """
    if not isinstance(y, Tensor):
        fail("Outputs are tensors", where, type(y).__name__)
    if y.shape != like.shape:
        fail(f"Expected shape {tuple(like.shape)}", where, f"shape {tuple(y.shape)}")
    if y.device != like.device:
        fail(f"Expected device {like.device}", where, f"device {y.device}")
    if y.dtype != like.dtype and not any_dtype:
        fail(f"Expected {like.dtype}", where, str(y.dtype))


class Comparison(NamedTuple):
    """The three computations that are compared, and the tolerance."""

    where: str
    ours: Outcome
    plain: Outcome
    exact: Outcome
    tolerance: Tolerance
    peer: str
    """What ``plain`` is, for messages."""
    autocast: bool = False
    step: Callable[[], str] = str
    """Says which step of a plan deviates, for messages."""

    def check(self) -> None:
        ours, plain = self.ours.outputs, self.plain.outputs
        for name, y in ours.items():
            check_kind(f"{self.where}: {name}", y, plain[name], any_dtype=self.autocast)
        floor = self.tolerance.floor
        if floor is None:
            made = (*ours.values(), *self.ours.grads.values())
            floor = precision([t.dtype for t in made if t is not None])
        for name, y in ours.items():
            exact = self.exact.outputs[name]
            self._check_value(name, y, plain[name], exact, floor)
            if exact.requires_grad and not y.requires_grad:
                fail(f"The {name} must require grad", self.where)
        for name, mine in self.ours.grads.items():
            grads = [mine, self.plain.grads.get(name), self.exact.grads.get(name)]
            like = next((g for g in grads if g is not None), None)
            if like is not None:
                zero = torch.zeros_like(like)
                own, theirs, truth = (zero if g is None else g for g in grads)
                value = "no gradient" if mine is None else ""
                self._check_value(f"gradient of {name}", own, theirs, truth, floor, value)

    def _check_value(
        self, name: str, ours: Tensor, plain: Tensor, exact: Tensor, floor: float, value: str = ""
    ) -> None:
        found = deviation(ours, plain, exact, self.tolerance.factor, floor)
        if not found.is_wrong:
            return
        size = magnitude(exact)
        slack = floor * size if exact.is_floating_point() else 0.0
        at = f" at {list(found.at)}" if found.at else ""
        value = value or f"{found.value:.9g}"
        values = f"{value}{at} where {found.expected:.9g} is expected and {self.peer} "
        fail(
            f"The {name} is wrong: error {found.error:.3g}, allowed {found.allowed:.3g}",
            self.where,
            f"{values}has {found.plain:.9g}; {found.wrong} of {exact.numel()} elements deviate "
            f"({ours.dtype}, shape {tuple(ours.shape)}, magnitude {size:.3g}); allowed is "
            f"{self.tolerance.factor:g} x {_share(found.allowed - slack, self.tolerance):.3g} "
            f"({self.peer}) + {slack:.3g} (floor)",
            self.step(),
        )


def _share(allowed: float, tolerance: Tolerance) -> float:
    """The error of plain torch in what is allowed besides the floor."""
    return max(allowed, 0.0) / tolerance.factor if tolerance.factor else 0.0


def failed(where: str, error: Exception) -> str:
    """The message about a call that raised."""
    return explain("The call failed", where=where, received=str(error))


Locate = Callable[
    [
        Subject, Subject, Subject, Sequence[Mapping[str, Tensor]], Variant, Tolerance,
        Mapping[str, Tensor],
    ],
    str,
]  # fmt: skip


@dataclass
class Reference:
    """What results are compared with: plain torch in the same dtype, and float64.

    Attributes:
        plain, exact: the two, with parameters of their own.
        inputs: of the call, by name, in its dtype.
        peer: what ``plain`` is, for messages.
        lower: the autocast dtype; ``plain`` then runs without autocast, entirely in that dtype.
        locate: says which step of the subject makes what deviates, given the subject, ``plain``,
            ``exact``, the inputs of each, the variant, the tolerance and the incoming gradients.
    """

    plain: Subject
    exact: Subject
    inputs: Mapping[str, Tensor]
    tolerance: Tolerance
    peer: str
    lower: torch.dtype | None = None
    locate: Locate | None = None
    _known: dict[Variant, tuple[Outcome, Outcome]] = field(default_factory=dict, init=False)

    def check(self, ours_is: Subject, variant: Variant, where: str) -> None:
        """Calls ``ours_is`` as ``variant`` says and compares the results."""
        if variant.name:
            where = f"{where}, {variant.name}"
        for inputs in self._inputs_of(variant):
            ours = self._called(ours_is, inputs, variant, where)
            if ours is not None:
                self._compare(ours_is, ours, inputs, variant, where)
                return

    def _called(
        self, ours_is: Subject, inputs: Mapping[str, Tensor], variant: Variant, where: str
    ) -> Outcome | None:
        """The outcome of the call; None if the subject refuses a single row of this shape."""
        try:
            return call(ours_is, inputs, variant, where=where)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            if isinstance(error, InputError) and variant.rows == "one":
                return None
            raise AssertionError(failed(where, error)) from error

    def _compare(
        self,
        ours_is: Subject,
        ours: Outcome,
        inputs: Mapping[str, Tensor],
        variant: Variant,
        where: str,
    ) -> None:
        # The reference is called without changes after forward.
        unchanged = replace(variant, name="", replaces=False, sets="")
        if unchanged not in self._known:
            self._known[unchanged] = self._call(inputs, unchanged, ours.grad_outputs)
        plain, exact = self._known[unchanged]
        autocast = torch.is_autocast_enabled(inputs["input"].device.type)
        tolerance = self.tolerance
        if variant.rows == "one":  # so few numbers that plain torch may be exact by chance
            tolerance = loosely(tolerance.floor, list(inputs.values()))

        def step() -> str:
            if self.locate is None:
                return ""
            subjects = ours_is, self.plain, self.exact
            calls = inputs, inputs, cast(inputs, torch.float64)
            return self.locate(*subjects, calls, variant, tolerance, ours.grad_outputs)

        Comparison(where, ours, plain, exact, tolerance, self.peer, autocast, step).check()

    def _inputs_of(self, variant: Variant) -> Iterator[Mapping[str, Tensor]]:
        """Candidates of inputs with the variant's number of rows; the first accepted one is used.

        A single row is one entry of all leading dimensions, or else one entry of the first.
        """
        if variant.rows == "all":
            yield self.inputs
        elif variant.rows == "none":
            yield without_rows(self.inputs)
        else:
            most = leading_dims(self.inputs["input"])
            for dims in dict.fromkeys((most, min(1, most))):
                inputs = one_row(self.inputs, dims)
                if dims and self._takes(inputs):
                    yield inputs

    def _takes(self, inputs: Mapping[str, Tensor]) -> bool:
        """Whether ``plain`` accepts these inputs and returns no NaN."""
        with torch.autocast(inputs["input"].device.type, enabled=self._runs_autocast()):
            try:
                outcome = call(self.plain, self._in_plain_dtype(inputs), Variant())
            except ERRORS:
                return False
        return not any(y.isnan().any() for y in outcome.outputs.values())

    def _runs_autocast(self) -> bool:
        kind = self.inputs["input"].device.type
        return self.lower is None and torch.is_autocast_enabled(kind)

    def _in_plain_dtype(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return inputs if self.lower is None else cast(inputs, self.lower)

    def _call(
        self, inputs: Mapping[str, Tensor], variant: Variant, grad_outputs: Mapping[str, Tensor]
    ) -> tuple[Outcome, Outcome]:
        kind = inputs["input"].device.type
        with torch.autocast(kind, enabled=self._runs_autocast()):
            low = self._in_plain_dtype(inputs)
            plain = call(self.plain, low, variant, grad_outputs=grad_outputs)
        with torch.autocast(kind, enabled=False):
            double = cast(inputs, torch.float64)
            exact = call(self.exact, double, variant, grad_outputs=grad_outputs)
        return plain, exact


def cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors, floating-point ones in ``dtype``."""
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def each_dtype(dtypes: Iterable[torch.dtype] | None) -> tuple[torch.dtype | None, ...]:
    """The dtypes to check in, None for those that tensors have.

    Raises:
        ArgumentError: there are none, so that nothing would be checked.
    """
    if dtypes is None:
        return (None,)
    found = tuple(dtypes)
    if not found:
        raise ArgumentError.explained(
            "A check is made in at least one dtype",
            received=f"dtypes={dtypes!r}",
            remedy="Pass some, or None for those of the tensors",
        )
    return found


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a module that require grad, by name."""
    return {f"parameter {name}": p for name, p in module.named_parameters() if p.requires_grad}
