"""Values and leaves, and sequences that are held to a formula."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opfuser.testing.compare import error_of, magnitude, precision

F64: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}

Module = TypeVar("Module", bound=nn.Module)


def rand(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    """Random values; the same ones, rounded, whatever the dtype."""
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_(grad)


def leaf(t: Tensor) -> Tensor:
    """A copy in float64 with a gradient of its own, for a reference."""
    return t.detach().double().clone().requires_grad_()


def fill(model: Module) -> Module:
    """Random parameters: norms and biases start at ones and zeros, which hide mistakes."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, dtype=torch.float64))
    return model


def close(got: Tensor | None, want: Tensor | None, tolerance: float = 1e-12) -> None:
    """Equal up to rounding in float64, or up to ``tolerance``; a missing gradient is a failure."""
    assert got is not None
    assert want is not None
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def as_exact(name: str, got: Tensor, plain: Tensor, exact: Tensor) -> None:
    """The error is at most twice that of plain torch, plus one unit in the last place."""
    assert got.shape == exact.shape, name
    error, theirs = error_of(got, exact), error_of(plain, exact)
    allowed = 2 * theirs + precision([got.dtype]) * max(1.0, magnitude(exact))
    assert error <= allowed, f"{name}: error {error:.2g}, allowed {allowed:.2g}"


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def against(
    model: Callable[..., Any],
    formula: Callable[..., Any],
    *inputs: Tensor,
    parameters: Iterable[tuple[str, Tensor]] | None = None,
    dys: list[Tensor] | None = None,
    used: int | None = None,
) -> tuple[Tensor, ...]:
    """Holds outputs and gradients of a sequence to ``formula(parameters, *inputs)``.

    Gradients arrive for the first ``used`` outputs: ``dys``, or random ones. Neither they nor the
    inputs may be written to; what requires no gradient gets none. Returns the outputs.
    """
    if parameters is None:
        assert isinstance(model, nn.Module)
        parameters = model.named_parameters()
    named = {**dict(parameters), **{f"input {n}": t for n, t in enumerate(inputs)}}
    for t in named.values():
        t.grad = None
    ys = outputs_of(model(*inputs))
    dys = dys or [rand(*y.shape, dtype=y.dtype).to(y.device) for y in ys[:used]]
    kept = [t.detach().clone() for t in (*inputs, *dys)]
    exact = _evaluate(formula, named, len(inputs), dys, torch.float64)
    plain = _evaluate(formula, named, len(inputs), dys, None)
    if any(y.requires_grad for y in ys):
        torch.autograd.backward(ys[: len(dys)], dys)
    for t, before in zip((*inputs, *dys), kept):
        assert torch.equal(t, before), "a tensor of the caller was written to"
    got = {f"output {n}": y for n, y in enumerate(ys)}
    got |= {f"gradient of {name}": t.grad for name, t in named.items()}
    assert got.keys() == exact.keys()
    for name, want in exact.items():
        if want is None:
            assert got[name] is None or not got[name].any(), name
        else:
            assert got[name] is not None, name
            as_exact(name, got[name], plain[name], want)
    for name, t in named.items():
        assert t.grad is None or (t.requires_grad and t.grad.dtype == t.dtype), name
    return ys


def _evaluate(
    formula: Callable[..., Any],
    named: Mapping[str, Tensor],
    inputs: int,
    dys: list[Tensor],
    dtype: torch.dtype | None,
) -> dict[str, Any]:
    """Outputs and gradients by plain autograd."""
    copies = {
        name: t.detach().to(dtype or t.dtype).clone().requires_grad_(t.requires_grad)
        if t.is_floating_point()
        else t
        for name, t in named.items()
    }
    xs = list(copies.values())[len(copies) - inputs :]
    ys = outputs_of(formula(copies, *xs))
    pairs = [(y, dy.to(y.dtype)) for y, dy in zip(ys, dys) if y.requires_grad]
    if pairs:
        torch.autograd.backward(*zip(*pairs))
    found: dict[str, Any] = {f"output {n}": y.detach() for n, y in enumerate(ys)}
    return found | {f"gradient of {name}": t.grad for name, t in copies.items()}


_GEMMS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "linear", "matmul", "_grouped_mm"}


class Live(TorchDispatchMode):
    """Bytes of the memory that was allocated inside and is still there.

    Attributes:
        peak: the most bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        given = {t.untyped_storage()._cdata for t in leaves if isinstance(t, Tensor)}
        for t in tree_leaves(made):
            if isinstance(t, Tensor) and (storage := t.untyped_storage())._cdata not in given:
                self._sizes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._sizes = {at: kept for at, kept in self._sizes.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._sizes.values()))
        return made


class Gemms(TorchDispatchMode):
    """The shapes of all products of matrices that are computed meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _GEMMS:
            self.shapes.append(tuple(out.shape))
        return out
