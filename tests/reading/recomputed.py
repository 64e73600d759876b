"""Modules, what was read of them, and both computed in fp64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from opfuser.reading.built import Built
from opfuser.reading.construction import build
from opfuser.reading.dataflow import map_leaves
from opfuser.reading.grammar import read
from opfuser.reading.operations import Called, Operation, Reading
from opfuser.reading.stand_ins import is_cache
from opfuser.reading.tracer import trace

# What may differ, of the largest entry: everything in fp64, or in part in fp32 as it is written.
_RTOL, _RTOL_AS_IT_IS = 1e-10, 1e-5
_Operation = TypeVar("_Operation", bound=Operation)


class InDouble(TorchFunctionMode):
    """Computes in fp64 what is written to be computed in fp32, and makes fp64 tensors by default.

    Many families compute norms and softmax in fp32, whatever the dtype of the model. Their noise
    would hide differences, and is all that there is of gradients that are 0 but for rounding.
    """

    def __enter__(self) -> InDouble:
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self.default)

    def __torch_function__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def double(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        if function is Tensor.float:
            function = Tensor.double
        return function(*map(double, args), **{k: double(v) for k, v in (kwargs or {}).items()})


class Example(NamedTuple):
    """A module, and a call of it."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - nothing writes to it

    def detached(self) -> Example:
        """The same call with random leaves in place of inputs that were computed of parameters."""
        made: dict[int, Tensor] = {}

        def leaf(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.requires_grad:
                return x
            return made.setdefault(id(x), torch.randn_like(x).requires_grad_())

        return Example(self.module, *map_leaves(leaf, (self.args, self.kwargs)))

    def again(self) -> Example:
        """The same call with copies of its caches, as they are now."""

        def copied(x: Any) -> Any:
            if not is_cache(x):
                return x
            return copy.deepcopy(x, {id(t): t.detach().clone() for t in kept_in(x)})

        return Example(self.module, *map_leaves(copied, self[1:]))

    def cache(self) -> Any | None:
        """The cache that it extends, if it has one."""
        found: list[Any] = []
        map_leaves(lambda x: found.append(x) if is_cache(x) else None, self[1:])
        return found[0] if found else None

    def inputs(self) -> list[Tensor]:
        """The tensors of the call, each once."""
        return _tensors_in((self.args, self.kwargs))


def read_of(example: Example) -> Reading:
    return read(trace(*example).dataflow)


def operations_in(operations: Any) -> Iterator[Operation]:
    """All operations, those inside of others too."""
    for op in operations:
        if isinstance(op, tuple):
            yield from operations_in(op)
        elif is_dataclass(op):
            yield op
            yield from operations_in([getattr(op, f.name) for f in fields(op)])


def operation_in(reading: Reading, kind: type[_Operation]) -> _Operation:
    """The only operation of a kind, which may be inside of another."""
    (found,) = (op for op in operations_in(reading.operations) if isinstance(op, kind))
    return found


def called_in(reading: Reading) -> list[str]:
    return [op.path for op in operations_in(reading.operations) if isinstance(op, Called)]


def assert_recomputed(example: Example, *, whole: bool = True) -> Reading:
    """Asserts that what is read of a call computes the same values and gradients as the module.

    Args:
        example: in fp64.
        whole: whether everything is explained, so that no child is called.
    """
    reading = read_of(example)
    if whole:
        assert called_in(reading) == []
    assert_equal_steps(example, build(reading, example.module))
    return reading


def assert_equal_steps(example: Example, built: Built) -> None:
    """Asserts that a module and what was built of it compute the same values and gradients.

    As they are, results have the same dtypes, and values that differ by rounding in fp32 at most;
    with everything in fp64, values and gradients are the same. Caches hold the same, too, and those
    of the example are left as they are. Without gradients enabled, there are none.
    """
    _computed_alike(example, built, _RTOL_AS_IT_IS)
    with InDouble():
        for number, (ours, theirs) in enumerate(_computed_alike(example, built, _RTOL)):
            assert ours.requires_grad == theirs.requires_grad, f"of output {number}"
            if theirs.requires_grad:
                leaves = [*example.inputs(), *example.module.parameters()]
                leaves = [leaf for leaf in leaves if leaf.requires_grad]
                _assert_close_gradients(f"output {number}", ours, theirs, leaves)


def _computed_alike(example: Example, built: Built, rtol: float) -> list[tuple[Tensor, Tensor]]:
    """The results of what was built and of the module, in pairs that agree."""
    inputs = example.inputs()
    theirs, cache = example.again(), example.again().cache()
    torch.manual_seed(0)  # for children that are called, and draw numbers
    found = _tensors_in(example.module(*theirs.args, **theirs.kwargs))
    want = [t for t in found if all(t is not x for x in inputs)] or found
    torch.manual_seed(0)
    got = built(inputs, cache)
    got = [*got] if len(want) > 1 else [got]
    assert len(got) == len(want), f"{len(got)} results, not {len(want)}"
    for n, (ours, kept) in enumerate(zip(kept_in(cache), kept_in(theirs.cache()), strict=True)):
        _assert_close(f"what the cache keeps at {n}", ours, kept, rtol)
    for number, pair in enumerate(zip(got, want)):
        _assert_close(f"output {number}", *pair, rtol)
    return [*zip(got, want)]


def _assert_close_gradients(what: str, got: Tensor, want: Tensor, leaves: list[Tensor]) -> None:
    weights = torch.arange(want.numel(), dtype=want.dtype).cos().view(want.shape)
    grads = [
        torch.autograd.grad((y * weights).sum(), leaves, allow_unused=True, retain_graph=True)
        for y in (got, want)
    ]
    for n, pair in enumerate(zip(*grads)):
        ours, theirs = (torch.zeros_like(leaves[n]) if dx is None else dx for dx in pair)
        _assert_close(f"gradient {n} of {what}", ours, theirs, _RTOL)


def kept_in(cache: Any) -> list[Tensor]:
    """The keys and values of all layers of a cache, or of None."""
    names = "self_attention_cache", "cross_attention_cache"
    parts = [getattr(cache, n) for n in names if hasattr(cache, n)] or [cache]
    layers = [layer for part in parts for layer in getattr(part, "layers", ())]
    found = [getattr(layer, n, None) for layer in layers for n in ("keys", "values")]
    return [t for t in found if isinstance(t, Tensor)]


def _tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the leaves, in order, each once."""
    found: dict[int, Tensor] = {}
    map_leaves(lambda x: found.update({id(x): x} if isinstance(x, Tensor) else {}), tree)
    return list(found.values())


def _assert_close(what: str, got: Tensor, want: Tensor, rtol: float) -> None:
    form, wanted = (got.shape, got.dtype), (want.shape, want.dtype)
    assert form == wanted, f"{what} has {form}, not {wanted}"
    got, want = got.detach(), want.detach()
    if want.isnan().any():  # as of Longformer itself, in float64
        assert torch.equal(got.isnan(), want.isnan()), what
        got, want = got.nan_to_num(), want.nan_to_num()
    if want.numel():  # some caches keep empty tensors, and some norms get no rows
        assert (got - want).abs().max() <= rtol * want.abs().max().clamp(min=1e-3), what
