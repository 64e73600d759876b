"""Holding what calls return to a float64 reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .calls import Outcome, Subject, Variant, call, fail, without_rows


class Tolerance(NamedTuple):
    """An error may be ``factor`` times that of plain torch, plus ``floor`` times the magnitude."""

    factor: float = 2.0
    floor: float | None = None


def error_of(ours: Tensor, exact: Tensor) -> float:
    """The largest absolute difference; NaN if one is NaN or infinite where the other is not."""
    if not exact.numel():
        return 0.0
    ours = ours.detach().to(torch.float64)
    exact = exact.detach().to(torch.float64)
    difference = (ours - exact).abs()
    # Infinities of one sign (masked logits, say) agree, though their difference is NaN.
    return float(torch.where(ours == exact, 0.0, difference).max())


def magnitude(exact: Tensor) -> float:
    """What the floor is relative to."""
    finite = exact.detach().to(torch.float64).nan_to_num(0.0, 0.0, 0.0)
    # Cancellation makes gradients much smaller than the numbers that they are made from.
    return max(float(finite.abs().max()) if exact.numel() else 0.0, 1 / 16)


def precision(dtypes: Sequence[torch.dtype]) -> float:
    """The default floor: one unit in the last place of the coarsest dtype.

    More in float64, where plain torch is the reference itself, so that its error counts as zero.
    """
    floating = [d for d in dtypes if d.is_floating_point]
    eps = max((torch.finfo(d).eps for d in floating), default=0.0)
    return eps * 256 if eps == torch.finfo(torch.float64).eps else eps


class Comparison(NamedTuple):
    """The three computations that are compared, and how exactly they must agree."""

    where: str
    ours: Outcome
    plain: Outcome
    exact: Outcome
    tolerance: Tolerance
    peer: str
    """What ``plain`` is, for messages."""
    autocast: bool = False

    def check(self) -> None:
        ours, plain = self.ours.outputs, self.plain.outputs
        if len(ours) != len(plain):
            fail(f"Expected {len(plain)} outputs", self.where, str(len(ours)))
        for name, y in ours.items():
            self._check_kind(name, y, plain[name])
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
                self._check_value(f"gradient of {name}", own, theirs, truth, floor)

    def _check_kind(self, name: str, y: Any, plain: Tensor) -> None:
        where = f"{self.where}: {name}"
        if not isinstance(y, Tensor):
            fail("Outputs are tensors", where, type(y).__name__)
        if y.shape != plain.shape:
            fail(f"Expected shape {tuple(plain.shape)}", where, f"shape {tuple(y.shape)}")
        if y.device != plain.device:
            fail(f"Expected device {plain.device}", where, f"device {y.device}")
        # Under autocast an operation may compute in its dtype, or leave dtypes as they are.
        if y.dtype != plain.dtype and not self.autocast:
            fail(f"Expected {plain.dtype}", where, str(y.dtype))

    def _check_value(
        self, name: str, ours: Tensor, plain: Tensor, exact: Tensor, floor: float
    ) -> None:
        if ours.shape != exact.shape:
            fail(f"The {name} must have shape {tuple(exact.shape)}", self.where, f"{ours.shape}")
        error, theirs = error_of(ours, exact), error_of(plain, exact)
        if not exact.is_floating_point():
            theirs = floor = 0.0
        slack = floor * magnitude(exact)
        allowed = self.tolerance.factor * theirs + slack
        if not error <= allowed:
            fail(
                f"The {name} is wrong: error {error:.3g}, allowed {allowed:.3g}",
                self.where,
                f"{ours.dtype}, shape {tuple(ours.shape)}, magnitude {magnitude(exact):.3g}; "
                f"allowed is {self.tolerance.factor:g} x {theirs:.3g} ({self.peer}) "
                f"+ {slack:.3g} (floor)",
            )


def compare_with_exact(
    subjects: Sequence[Subject],
    inputs: Mapping[str, Tensor],
    variant: Variant,
    tolerance: Tolerance,
    where: str,
    peer: str,
    *,
    lower: torch.dtype | None = None,
) -> None:
    """Calls ours, plain and exact in the way of ``variant`` and compares.

    Args:
        lower: the autocast dtype; plain then runs without autocast, all in that dtype.
    """
    ours_is, plain_is, exact_is = subjects
    if variant.name:
        where = f"{where}, {variant.name}"
    if variant.zero_rows:
        inputs = without_rows(inputs)
    kind = inputs["input"].device.type
    ours = call(ours_is, inputs, variant, where=where)
    with torch.autocast(kind, enabled=lower is None and torch.is_autocast_enabled(kind)):
        cast = inputs if lower is None else _cast(inputs, lower)
        plain = call(plain_is, cast, variant, grad_outputs=ours.grad_outputs)
    with torch.autocast(kind, enabled=False):
        double = _cast(inputs, torch.float64)
        exact = call(exact_is, double, variant, grad_outputs=ours.grad_outputs)
    Comparison(where, ours, plain, exact, tolerance, peer, torch.is_autocast_enabled(kind)).check()


def _cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a module that require grad, by name."""
    return {f"parameter {name}": p for name, p in module.named_parameters() if p.requires_grad}
