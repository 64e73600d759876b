"""Counts the launches of a computation and the bytes that they touch, on tensors without data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ..attention.call import Call, Grads, Heads, Kernel, Result, request_of
from ..attention.choice import KERNELS, expanded
from ..engine.recorded.functions import tensors_in
from ..kernels.launch import Recorded, recorded
from ..torch_internals import memory_of, schema_of, storage_address


class Counts(NamedTuple):
    """What a part of a computation launches.

    Attributes:
        launches: kernels.
        read, written: bytes.
    """

    launches: int = 0
    read: int = 0
    written: int = 0

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    def plus(self, other: Counts) -> Counts:
        """The sum of both."""
        return Counts(*(a + b for a, b in zip(self, other)))


def size_of(t: Tensor) -> int:
    """Bytes of the elements of ``t``; those of an expanded tensor count once."""
    return min(t.numel() * t.element_size(), t.untyped_storage().nbytes())


_aten = torch.ops.aten
# They return memory that nothing has written to.
_ALLOCATE = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted, _aten.new_empty,
    _aten.new_empty_strided,
}  # fmt: skip
# They launch nothing, and their schemas do not call them views.
_VIEW = {_aten._unsafe_view, _aten._reshape_alias, _aten.resize_, _aten.set_, _aten.lift}
# They overwrite their first argument without reading it.
_OVERWRITE = {
    _aten.copy_, _aten.fill_, _aten.zero_, _aten.normal_, _aten.uniform_, _aten.random_,
    _aten.bernoulli_, _aten.exponential_,
}  # fmt: skip
# Of their table they read as much as they return.
_GATHER = {_aten.embedding, _aten.index_select, _aten.gather, _aten.index}


class KernelCounter(TorchDispatchMode):
    """Adds up the kernels that run inside, under the name that ``part`` has at the time.

    Attributes:
        part: of the computation, as its caller names it.
        counts: by part.
    """

    def __init__(self, launches: list[Recorded]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part: Any = None
        self.counts: dict[Any, Counts] = {}
        self._launches = launches
        self._done = 0
        # Memory that was allocated and not yet written to. Weak references keep addresses from
        # being used twice, but not the memory alive: operations reuse what nothing else refers to.
        self._blank: dict[int, StorageWeakRef] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's question whether to import its compiler, which takes a second, for this mode."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.flush()
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        made = tensors_in(result)
        if packet in _ALLOCATE:
            for t in made:
                storage = t.untyped_storage()
                self._blank[storage_address(storage)] = StorageWeakRef(storage)
        elif not func.is_view and packet not in _VIEW:
            self._count(func, packet, args, kwargs or {}, made)
        return result

    def _count(
        self, func: Any, packet: Any, args: tuple[Any, ...], kwargs: Any, made: list[Tensor]
    ) -> None:
        given = list(zip(schema_of(func).arguments, args))
        given += [(a, kwargs[a.name]) for a in schema_of(func).arguments if a.name in kwargs]
        read: list[Tensor] = []
        changed: list[Tensor] = []
        for argument, value in given:
            tensors = tensors_in(value)
            if argument.alias_info is not None and argument.alias_info.is_write:
                changed += tensors
                if packet in _OVERWRITE or argument.is_out:
                    continue
            read += tensors
        sizes = _sizes(read)
        if packet in _GATHER and read and made:
            sizes[0] = min(sizes[0], size_of(made[0]))
        self.add(sum(sizes), sum(_sizes([*changed, *made])))
        self.fill([*changed, *made])

    def flush(self) -> None:
        """Counts the launches noted since the last time."""
        new, self._done = self._launches[self._done :], len(self._launches)
        for launch in new:
            read: list[Tensor] = []
            written: list[Tensor] = []
            seen: set[Any] = set()
            for t in launch.tensors:
                if t is not None:
                    # What is given a second time is changed in place.
                    blank = memory_of(t) in self._blank
                    (written if blank or _place(t) in seen else read).append(t)
                    seen.add(_place(t))
            self.add(sum(map(size_of, read)), sum(map(size_of, written)))
            self.fill(written)

    def add(self, read: int, written: int) -> None:
        """Counts one launch; one that touches nothing is none."""
        if read or written:
            before = self.counts.get(self.part, Counts())
            self.counts[self.part] = before.plus(Counts(1, read, written))

    def launch(self, read: Iterable[Tensor | None], written: Iterable[Tensor | None]) -> None:
        """Counts a kernel that is not called."""
        self.flush()
        out = [t for t in written if t is not None]
        self.add(sum(_sizes(t for t in read if t is not None)), sum(_sizes(out)))
        self.fill(out)

    def enter(self, part: Any) -> Any:
        """Counts under ``part`` from here on; returns under what it did before."""
        self.flush()
        before, self.part = self.part, part
        return before

    def fill(self, tensors: Iterable[Tensor]) -> None:
        """Notes that these have been written to."""
        for t in tensors:
            self._blank.pop(memory_of(t), None)


def _sizes(tensors: Iterable[Tensor]) -> list[int]:
    """Bytes of each tensor; of one that is given twice only the first time."""
    seen: set[Any] = set()
    sizes = []
    for t in tensors:
        sizes.append(0 if _place(t) in seen else size_of(t))
        seen.add(_place(t))
    return sizes


def _place(t: Tensor) -> Any:
    return memory_of(t), t.storage_offset(), t.shape


@contextmanager
def counting() -> Iterator[KernelCounter]:
    """Counts inside what computations on the meta device would launch on a GPU.

    Kernels of the library are noted, not run. A function of ATen that is no view is one launch.
    Attention is one in each pass where a kernel takes it. Tensors of other devices, which other
    threads may have, are computed as ever.
    """
    with recorded(only_meta=True) as launches:
        counter = KernelCounter(launches)
        plain = KERNELS["blockwise"]
        KERNELS["blockwise"] = _attention(plain, counter)
        try:
            with counter:
                yield counter
            counter.flush()
        finally:
            KERNELS["blockwise"] = plain


def _attention(plain: Kernel, counter: KernelCounter) -> Kernel:
    """``plain``, which on the meta device stands for the kernel that a GPU would take.

    Without data there is none, and what takes its place would launch one for every block.
    """

    def forward(x: Heads, call: Call) -> Result:
        kernel = _on_a_gpu(x, call)
        if kernel is None:
            return plain.forward(x, call)
        x = x if KERNELS[kernel].grouped else expanded(x)
        batch, heads, length, _ = x.q.shape
        output = x.q.new_empty(batch, length, heads, x.v.shape[-1]).transpose(1, 2)
        sums = x.q.new_empty(batch, heads, length, dtype=torch.float32)
        counter.launch([*x, call.mask, call.bias], [output, sums])
        return Result(output, sums)

    def backward(dy: Tensor, x: Heads, result: Result, call: Call) -> Any:
        kernel = _on_a_gpu(x, call)
        if kernel is None:
            return plain.backward(dy, x, result, call)
        given = x if KERNELS[kernel].grouped else expanded(x)
        # In memory (batch, sequence, heads, size), as torch's kernels return them.
        grads = [t.new_empty(t.transpose(1, 2).shape).transpose(1, 2) for t in given]
        sinks = None if call.sinks is None else torch.empty_like(call.sinks)
        bias = None if call.bias is None or not call.bias_grad else torch.empty_like(call.bias)
        read = dy, *given, result.output, result.logsumexp, call.mask, call.bias
        counter.launch(read, [*grads, sinks, bias])
        kv_heads = x.k.shape[1]
        if given is not x:
            grads[1:] = [grad.unflatten(1, (kv_heads, -1)).sum(2) for grad in grads[1:]]
        dq, dk, dv = grads
        return Grads(dq, dk, dv, sinks, bias)

    return plain._replace(forward=forward, backward=backward, reads_output=True)


def _on_a_gpu(x: Heads, call: Call) -> str | None:
    """The kernel that would compute attention of these tensors without data on a GPU, if any."""
    if not x.q.is_meta:
        return None
    request = request_of(x, call, differentiable=True)._replace(device=torch.device("cuda"))
    for name, kernel in KERNELS.items():
        if name != "blockwise" and kernel.refusal(request) is None:
            return name
    return None
