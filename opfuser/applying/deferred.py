"""Logits that are computed when something asks for them, which their cross entropy does not.

With ``fused_loss=True`` the linear module that makes logits returns a :class:`Deferred` tensor in
training. The model's own code does with it what it does with logits. Casts, views and slices of
rows give another such tensor; ``cross_entropy`` is computed of the hidden states, for some tokens
at a time. Any other function is given the logits, computed as the module would have.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .. import torch_internals as internals
from ..basic import CrossEntropy
from ..core.context import autocast_dtype
from ..errors import NotSupportedError, OpfuserError
from ..reading.built import Built
from ..reading.call_key import is_plain
from ..reading.construction import build
from ..reading.dataflow import map_leaves
from ..reading.operations import Linear, Reading
from ..sequential import Sequential


@dataclasses.dataclass(eq=False)
class Head:
    """A module that ends in a linear operation, whose results are deferred.

    Attributes:
        reading: of the module.
        linear: the operation, with the module's parameters.
        body: what comes before; None if nothing does.
        wanted: whether the logits of a call were asked for: then it is of no use to defer others.
        losses: how many were computed without logits.
        calls: how many results were computed after all.
    """

    reading: Reading
    linear: Built
    body: Built | None = None
    wanted: bool = False
    losses: int = 0
    calls: int = 0
    _sequences: dict[tuple[Any, ...], Sequential] = dataclasses.field(default_factory=dict)

    @property
    def is_of_use(self) -> bool:
        """Whether losses were computed without logits, and still are."""
        return self.losses > 0 and not self.wanted

    @classmethod
    def of(cls, reading: Reading, module: nn.Module) -> Head | None:
        """Returns the head of a module; None if it does not end in a linear operation."""
        *before, last = reading.operations
        if not isinstance(last, Linear) or last.transposed:
            return None
        linear = build(Reading(0, (last,)), module)
        if not all(map(is_plain, linear.sequence.parameters())):
            return None
        body = None
        if before:
            body = build(Reading(reading.input, tuple(before)), module).leave_scales()
            if body.fills:  # what is deferred may be computed twice, or never
                return None
        return cls(reading, linear, body)

    def follow(self) -> None:
        """Takes over the parameters that the module has now."""
        self.linear.follow()
        if self.body is not None:
            self.body.follow()

    def deferred(self, inputs: tuple[Tensor, ...]) -> Tensor | None:
        """The module's result, which is not computed yet; None if it is to be."""
        if self.wanted:
            return None
        try:
            x = inputs[0] if self.body is None else self.body(inputs)
        except OpfuserError:
            self.wanted = True
            return None
        (linear,) = self.linear.sequence
        call = _Call(self, x, (linear._parameters["weight"], linear._parameters["bias"]))
        made: Tensor = call.tensor(x, call.dtype)
        return made

    def loss(self, x: Tensor, targets: Tensor, options: tuple[Any, ...]) -> Tensor:
        """The cross entropy of the logits of ``x`` (rows, D)."""
        if options not in self._sequences:
            ignored, reduction, smoothing = options
            last = CrossEntropy(ignored, reduction=reduction, label_smoothing=smoothing)
            self._sequences[options] = Sequential(*self.linear.sequence, last)
        y: Tensor = self._sequences[options](x, targets)
        self.losses += 1
        return y


class _Call:
    """One call of a head, whose result there may be several tensors of.

    Attributes:
        dtype: of the result.
        logits: the result, if something has asked for it.
        lossy: whether a loss was computed without it.
    """

    def __init__(self, head: Head, x: Tensor, parameters: tuple[Any, Any]) -> None:
        self.head, self.x, self.parameters = head, x, parameters
        autocast = autocast_dtype(x.device)
        self._autocast, self.dtype = autocast is not None, autocast or x.dtype
        self.logits: Tensor | None = None
        self.lossy = False
        self._derived: list[weakref.ref[Deferred]] = []
        self._versions = self._current()

    def _current(self) -> list[int]:
        return [t._version for t in (self.x, *self.parameters) if t is not None]

    def tensor(self, x: Tensor, dtype: torch.dtype) -> Any:
        apply: Any = _Unknown.apply
        made = apply(self, x, dtype, *self.parameters)
        made.call, made.x = self, x
        return made

    def derived(self, of: Deferred, x: Tensor, dtype: torch.dtype, function: Any) -> Any:
        """What a function of some logits returns, whose hidden states are ``x``."""
        made = self.tensor(x, dtype)
        made.parent, made.function = of, function
        self._derived.append(weakref.ref(made))
        return made

    def modes(self) -> AbstractContextManager[Any]:
        """The autocast of the call."""
        if self.x.is_meta:  # which has none
            return nullcontext()
        return torch.autocast(self.x.device.type, self.dtype, enabled=self._autocast)

    def check(self) -> None:
        """Raises NotSupportedError if something was written to that logits are computed of."""
        if self._current() != self._versions:
            raise NotSupportedError.explained(
                "Logits that are computed after the call of their module need its input and "
                "its parameters as they were",
                where="a model to which opfuser.apply(fused_loss=True) was applied",
                received="an input or a parameter that was written to since",
                remedy="Write to a copy, or apply with fused_loss=False",
            )

    def compute(self) -> None:
        """Computes the logits, and what was derived of them."""
        if self.logits is not None:
            return
        self.check()
        self.head.calls += 1
        with torch.enable_grad(), self.modes():
            self.logits = functional.linear(self.x, *self.parameters)
            for reference in self._derived:
                found = reference()
                if found is not None:
                    found.computed = found.value_of_parent()
        self.parameters, self._derived = (None, None), []


class _Unknown(torch.autograd.Function):
    """Gives a tensor without contents its place in the graph of gradients.

    Functions of torch are called with real logits in its stead. A backward pass comes here from
    what torch does not tell of its arguments: autograd functions of others.
    """

    @staticmethod
    def forward(
        ctx: Any, call: _Call, x: Tensor, dtype: torch.dtype, weight: Tensor, bias: Tensor | None
    ) -> Any:
        ctx.save_for_backward(x, weight, bias)
        ctx.dtype, ctx.modes = dtype, call.modes
        shape = *x.shape[:-1], weight.shape[0]
        return internals.make_wrapper_subclass(Deferred, shape, dtype=dtype, device=x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        leaves: list[Any] = [None if t is None else t.detach() for t in ctx.saved_tensors]
        needed = [n for n, index in enumerate((1, 3, 4)) if ctx.needs_input_grad[index]]
        for n in needed:
            leaves[n].requires_grad_()
        with torch.enable_grad(), ctx.modes():
            y = functional.linear(*leaves).to(ctx.dtype)
        grads: list[Any] = [None, None, None]
        for n, grad in zip(needed, torch.autograd.grad(y, [leaves[n] for n in needed], dy)):
            grads[n] = grad
        return None, grads[0], None, grads[1], grads[2]


class Deferred(Tensor):
    """Logits that are not computed.

    Attributes:
        call: of the module that makes them.
        x: hidden states, whose rows are those of the logits.
        parent, function: what they are computed of, and how, unless they are the call's result.
        computed: they themselves, if something has asked for logits of the call.
    """

    call: _Call
    x: Tensor
    parent: Deferred
    function: Callable[[Tensor], Tensor] | None = None
    computed: Tensor | None = None

    def value(self) -> Tensor:
        """The logits."""
        self.call.compute()
        made = self.call.logits if self.function is None else self.computed
        assert made is not None
        return made

    def value_of_parent(self) -> Tensor:
        """What they are of the logits that they are computed of."""
        assert self.function is not None
        return self.function(self.parent.value())

    @classmethod
    def __torch_function__(
        cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _QUESTIONS:
            with internals.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        rule = _RULES.get(function)
        first = args[0] if args else None
        known = not kwargs or rule is _loss
        if rule and known and type(first) is Deferred and torch.is_grad_enabled():
            made = rule(*args, **kwargs) if first.call.logits is None else None
            if made is not None:
                return made
        return function(*map_leaves(_known, args), **map_leaves(_known, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*map_leaves(_known, args), **map_leaves(_known, kwargs or {}))


def _known(leaf: Any) -> Any:
    """A leaf of arguments; logits, if it is deferred ones."""
    if type(leaf) is not Deferred:
        return leaf
    leaf.call.head.wanted = True
    return leaf.value()


def without_deferred(result: Any) -> Any:
    """What a model returns, with None for logits of which a loss was computed; others are there."""

    def known(leaf: Any) -> Any:
        if type(leaf) is not Deferred:
            return leaf
        return None if leaf.call.lossy and leaf.call.logits is None else leaf.value()

    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        given = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
        changed = {n: known(v) for n, v in given.items() if type(v) is Deferred}
        return dataclasses.replace(result, **changed) if changed else result
    found: list[Any] = []
    map_leaves(lambda leaf: found.append(leaf) if type(leaf) is Deferred else None, result)
    return map_leaves(known, result) if found else result


# Rules: what functions of torch return for deferred logits; None if they are to be computed.


def _cast(logits: Deferred, dtype: Any = None, *others: Any) -> Tensor | None:
    if others:
        return None
    if dtype is None or dtype in (logits.dtype, logits.device):
        return logits if dtype is not None else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    return _derived(logits, logits.x, dtype, lambda y: y.to(dtype))


def _rows(logits: Deferred, *sizes: Any) -> Tensor | None:
    """The same last dimension behind others."""
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    if len(sizes) < 2 or sizes[-1] != logits.shape[-1] or sizes.count(-1) > 1:
        return None
    if not all(type(n) is int for n in sizes):
        return None
    rows = logits.x.shape[:-1].numel()
    known = torch.Size([n for n in sizes[:-1] if n != -1]).numel()
    if (rows % known if -1 in sizes and known else rows != known) or not known:
        return None
    x = logits.x.reshape(*sizes[:-1], logits.x.shape[-1])
    return _derived(logits, x, logits.dtype, lambda y: y.reshape(sizes))


def _sliced(logits: Deferred, index: Any) -> Tensor | None:
    """Slices of rows, as of all tokens but the last."""
    if not isinstance(index, tuple) or index[-1:] != (slice(None),):
        return None
    whole = len(index) == logits.dim() or index[0] is Ellipsis
    if not whole or not all(type(part) is slice for part in index[index[0] is Ellipsis :]):
        return None
    return _derived(logits, logits.x[index], logits.dtype, lambda y: y[index])


def _loss(
    logits: Deferred,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    if weight is not None or size_average is not None or reduce is not None:
        return None
    if type(target) is not Tensor or target.dtype != torch.int64 or target.dim() != 1:
        return None
    if logits.dim() != 2 or len(target) != len(logits) or reduction not in ("mean", "sum"):
        return None
    call = logits.call
    call.check()
    try:
        with call.modes():
            options = ignore_index, reduction, label_smoothing
            loss = call.head.loss(logits.x, target, options)
    except OpfuserError:
        return None
    call.lossy = True
    return loss.to(logits.dtype)


def _derived(logits: Deferred, x: Tensor, dtype: torch.dtype, function: Any) -> Tensor:
    made: Tensor = logits.call.derived(logits, x, dtype, function)
    return made


_RULES: dict[Any, Callable[..., Tensor | None]] = {
    Tensor.float: lambda logits, *layout: _cast(logits, torch.float32, *layout),
    Tensor.to: _cast,
    Tensor.contiguous: lambda logits, *layout: None if layout else logits,
    Tensor.view: _rows,
    Tensor.reshape: _rows,
    Tensor.__getitem__: _sliced,
    functional.cross_entropy: _loss,
}
# What a tensor without contents knows.
_QUESTIONS = frozenset(
    (
        Tensor.dim,
        Tensor.is_floating_point,
        Tensor.numel,
        Tensor.size,
        Tensor.__len__,
        *(
            getattr(Tensor, name).__get__
            for name in "device dtype grad_fn is_cpu is_cuda is_leaf is_meta ndim "
            "requires_grad shape".split()
        ),
    )
)
