"""Calling something in several ways, and seeing that it leaves the caller's tensors alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import explain

Wrt = Literal["all", "input", "parameters", "last parameter", "extra inputs"]


@dataclass(frozen=True)
class Variant:
    """One way of calling: memory layouts, the gradients that arrive, the gradients asked for.

    Attributes:
        name: for messages; empty for the plain call.
        strided: the input has gaps between its elements, other tensors are transposed.
        expanded: the input is part of a wider tensor, incoming gradients repeat one row.
        outputs: which outputs a gradient arrives for.
        wrt: which tensors require grad.
        zero_rows: leave no row of the tensors.
    """

    name: str = ""
    strided: bool = False
    expanded: bool = False
    outputs: Literal["all", "main", "extra"] = "all"
    wrt: Wrt = "all"
    zero_rows: bool = False


def variants(
    *, parameters: int, extra_inputs: bool, extra_outputs: bool, zero_rows: bool
) -> list[Variant]:
    """The ways of calling that make a difference for something with these tensors.

    Args:
        parameters: their number.
    """
    out = [
        Variant(),
        Variant("strided tensors", strided=True),
        Variant("row-strided input, expanded gradient", expanded=True),
    ]
    if extra_outputs:
        out.append(Variant("no gradient of the extra outputs", outputs="main"))
        out.append(Variant("no gradient of the main output", outputs="extra"))
    if parameters or extra_inputs:
        out.append(Variant("only the input requires grad", wrt="input"))
    if parameters:
        out.append(Variant("only parameters require grad", wrt="parameters"))
    if parameters > 1:
        out.append(Variant("only the last parameter requires grad", wrt="last parameter"))
    if extra_inputs:
        out.append(Variant("only extra inputs require grad", wrt="extra inputs"))
    if zero_rows:
        out.append(Variant("zero rows", zero_rows=True))
    return out


class Subject(NamedTuple):
    """Something to call: ``function(input, *extra_inputs)``, and the parameters that it reads."""

    function: Callable[..., Any]
    parameters: Mapping[str, Tensor]


@dataclass
class Outcome:
    """What one call returned and, per name of a tensor, the gradients that it gave."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    grad_outputs: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor | None] = field(default_factory=dict)


def fail(invariant: str, where: str, received: str = "", remedy: str = "") -> None:
    """Raises an AssertionError with a text of the usual form."""
    raise AssertionError(explain(invariant, where=where, received=received, remedy=remedy))


class Untouched:
    """Remembers tensors, to see later that nobody wrote to them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._kept = [(name, t, t.detach().clone(), t._version) for name, t in tensors.items()]

    def check(self, where: str) -> None:
        for name, tensor, before, version in self._kept:
            same = torch.equal(tensor.detach().nan_to_num(), before.nan_to_num())
            if tensor._version != version or not same:
                fail(
                    f"The {name} belongs to the caller and may not be written to",
                    where,
                    remedy="Compute into a tensor of your own",
                )


def extra_names(kind: str, count: int) -> list[str]:
    """Names of extra inputs or outputs, for messages and as keys."""
    return [f"extra {kind} {n}" for n in range(count)]


def named_inputs(input_: Tensor, extra_inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """All inputs of a call by name."""
    names = ["input", *extra_names("input", len(extra_inputs))]
    return dict(zip(names, (input_, *extra_inputs)))


def named_outputs(result: Any) -> dict[str, Tensor]:
    """What a call returned, by name."""
    results = result if isinstance(result, tuple) else (result,)
    return dict(zip(["output", *extra_names("output", len(results) - 1)], results))


def _wide(t: Tensor) -> Tensor:
    """The values of ``t`` as part of a wider tensor, which holds NaN elsewhere."""
    buffer = t.new_full((*t.shape[:-1], t.shape[-1] + 3), _filler(t))
    view = buffer[..., 1 : 1 + t.shape[-1]]
    view.copy_(t)
    return view


def _gapped(t: Tensor) -> Tensor:
    buffer = t.new_full((*t.shape, 2), _filler(t))
    view = buffer[..., 0]
    view.copy_(t)
    return view


def _filler(t: Tensor) -> float:
    return float("nan") if t.is_floating_point() else 0


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else _gapped(t)


def lay_out(name: str, t: Tensor, variant: Variant) -> Tensor:
    """A copy of ``t`` in the memory layout of the variant."""
    t = t.detach().clone()
    if not t.dim():
        return t
    if variant.strided:
        return _gapped(t) if name == "input" else _transposed(t)
    if variant.expanded and name == "input":
        return _wide(t)
    return t


def without_rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without rows, as far as they have one per row of the input."""
    rows = tensors["input"].shape[:1]
    return {name: t[:0] if t.shape[:1] == rows else t for name, t in tensors.items()}


def incoming(name: str, like: Tensor, variant: Variant) -> Tensor:
    """A random gradient for the output of this name, the same in every call."""
    # A generator per name, on the CPU: the same numbers whatever else ran, and on every device.
    generator = torch.Generator().manual_seed(sum(name.encode()))
    grad = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    grad = grad.to(like.device, like.dtype)
    if variant.strided and grad.dim():
        return _transposed(grad)
    if variant.expanded and grad.numel():
        if grad.dim() > 1:
            return grad[:1].expand(grad.shape)
        return grad.reshape(-1)[0].expand(grad.shape)
    return grad


def _asked_for(subject: Subject, inputs: Mapping[str, Tensor], variant: Variant) -> set[str]:
    names = {
        "input": ["input"],
        "extra inputs": [name for name in inputs if name != "input"],
        "parameters": list(subject.parameters),
        "last parameter": list(subject.parameters)[-1:],
        "all": [*inputs, *subject.parameters],
    }
    return set(names[variant.wrt])


def call(
    subject: Subject,
    inputs: Mapping[str, Tensor],
    variant: Variant,
    *,
    grad_outputs: Mapping[str, Tensor] | None = None,
    where: str | None = None,
) -> Outcome:
    """Calls and differentiates once.

    Args:
        grad_outputs: incoming gradients; made afresh if None.
        where: if given, check that nothing of the caller's is written to and that a second
            backward gives the same gradients; the text names the call in messages.
    """
    tensors = {name: lay_out(name, t, variant) for name, t in inputs.items()}
    asked = _asked_for(subject, inputs, variant)
    wrt: dict[str, Tensor] = {}
    for name, t in (*tensors.items(), *subject.parameters.items()):
        if t.is_floating_point():
            t.requires_grad_(name in asked)
            if t.requires_grad:
                wrt[name] = t
    watched = Untouched({**tensors, **subject.parameters})
    cuda = {t.device for t in tensors.values() if t.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(cuda)):
        torch.manual_seed(0)
        result = named_outputs(subject.function(*tensors.values()))
    out = Outcome(outputs=result)
    for name, y in result.items():
        chosen = variant.outputs == "all" or (variant.outputs == "main") == (name == "output")
        if not (chosen and isinstance(y, Tensor) and y.requires_grad):
            continue
        if grad_outputs is None:
            out.grad_outputs[name] = incoming(name, y.detach(), variant)
        elif name in grad_outputs:
            out.grad_outputs[name] = grad_outputs[name].to(y.dtype)
    if where is not None:
        watched.check(where)
    if wrt and out.grad_outputs:
        grads = _backward(out, wrt)
        if where is not None:
            _check_again(out, wrt, grads, where)
        out.grads = dict(zip(wrt, grads))
    else:
        out.grads = dict.fromkeys(wrt)
    if where is not None:
        watched.check(where)
    return out


def _backward(out: Outcome, wrt: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(
        [out.outputs[name] for name in out.grad_outputs],
        list(wrt.values()),
        list(out.grad_outputs.values()),
        retain_graph=True,
        allow_unused=True,
    )


def _check_again(
    out: Outcome, wrt: Mapping[str, Tensor], first: Sequence[Tensor | None], where: str
) -> None:
    arrived = Untouched({f"gradient of the {name}": g for name, g in out.grad_outputs.items()})
    kept = [None if g is None else g.clone() for g in first]
    second = _backward(out, wrt)
    arrived.check(where)
    for name, one, two in zip(wrt, kept, second):
        if one is None or two is None:
            continue
        if not torch.equal(one.nan_to_num(), two.nan_to_num()):
            fail(
                "A second backward (retain_graph=True) must give the same gradients",
                f"{where}: gradient of {name}",
                remedy="Backward may not write to what forward saved",
            )
