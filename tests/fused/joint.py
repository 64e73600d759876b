"""What tests of joint fusions share: what is saved, which GEMMs run, gradients with and without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import opfuser


@contextmanager
def only(*names: str) -> Iterator[None]:
    """Switches these fusions on, and all others off."""
    with ExitStack() as stack:
        stack.enter_context(opfuser.disable("*"))
        if names:
            stack.enter_context(opfuser.enable(*names))
        yield


def saved_by(seq: opfuser.Sequential, *inputs: Tensor) -> list[Tensor]:
    """What a call keeps for backward: one tensor per storage, parameters left out."""
    known = {p.untyped_storage().data_ptr() for p in seq.parameters()}
    seen: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        place = t.untyped_storage().data_ptr()
        if place not in known:
            seen.setdefault(place, t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outputs = seq(*inputs)
    del outputs
    return list(seen.values())


def elements(tensors: Sequence[Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() // t.itemsize for t in tensors)


class Counting(TorchDispatchMode):
    """Counts ATen's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def gemms(self) -> int:
        """Matrix products."""
        return sum(self.calls[name] for name in ("mm", "addmm", "addmm_", "bmm"))


def gradients(
    model: Any, seq: opfuser.Sequential, inputs: Sequence[Tensor], **kwargs: Any
) -> list[Tensor | None]:
    """Gradients of inputs and parameters for fixed gradients of all outputs.

    Args:
        model: what to call: ``seq``, or ``seq`` compiled.
    """
    outputs = model(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(7)
    douts = [
        torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outputs
    ]
    wrt = [t for t in (*inputs, *seq.parameters()) if t.requires_grad]
    chosen = [(y, dy) for y, dy in zip(outputs, douts) if y.requires_grad]
    return list(
        torch.autograd.grad(
            [y for y, _ in chosen], wrt, [dy for _, dy in chosen], allow_unused=True, **kwargs
        )
    )


def assert_same(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> None:
    """float64 results, equal but for the order of sums."""
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
