"""Calls in several ways, with a check that the caller's tensors are not written to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import BackwardResultError, ForwardResultError, explain
from .changes import changed
from .variants import Variant, incoming, lay_out


class Subject(NamedTuple):
    """What is called: ``function(input, *extra_inputs)``, and what it reads."""

    function: Callable[..., Any]
    parameters: Mapping[str, Tensor]
    module: nn.Module
    """Holds the parameters and the modes."""
    fusions: frozenset[str] | None = None
    """Those that are on in a call, if ``module`` is a Sequential that is called with inputs."""


@dataclass
class Outcome:
    """What one call returned and, per name of a tensor, the gradients that it computed."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    grad_outputs: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor | None] = field(default_factory=dict)


# What a call may raise without failing the check, where it is only tried.
ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    Warning,
)


def fail(invariant: str, where: str, received: str = "", remedy: str = "") -> None:
    """Raises an AssertionError with a text of the usual form."""
    raise AssertionError(explain(invariant, where=where, received=received, remedy=remedy))


@contextmanager
def checked_results(where: str) -> Iterator[None]:
    """Inside, what is wrong with the structure of a result fails the check."""
    try:
        yield
    except (BackwardResultError, ForwardResultError) as error:
        raise AssertionError(f"{error} It happened in {where}.") from error


class Untouched:
    """Copies of tensors, compared later to detect writes."""

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
    """The results of a call by name."""
    results = result if isinstance(result, tuple) else (result,)
    return dict(zip(["output", *extra_names("output", len(results) - 1)], results))


def ask_for_gradients(
    inputs: Mapping[str, Tensor], parameters: Mapping[str, Tensor], variant: Variant
) -> dict[str, Tensor]:
    """The tensors that the variant wants gradients of, which now alone require grad."""
    names = {
        "input": ["input"],
        "extra inputs": [name for name in inputs if name != "input"],
        "parameters": list(parameters),
        "last parameter": list(parameters)[-1:],
        "all": [*inputs, *parameters],
    }
    asked = set(names[variant.wrt])
    wrt: dict[str, Tensor] = {}
    for name, t in (*inputs.items(), *parameters.items()):
        if t.is_floating_point():
            t.requires_grad_(name in asked)
            if t.requires_grad:
                wrt[name] = t
    return wrt


@contextmanager
def seeded(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, random numbers on the devices of these tensors are the same every time."""
    cuda = {t.device for t in tensors if t.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(cuda)):
        torch.default_generator.manual_seed(0)  # torch.manual_seed takes milliseconds
        for device in cuda:
            torch.cuda.default_generators[device.index or 0].manual_seed(0)
        yield


@contextmanager
def in_mode(module: nn.Module, variant: Variant) -> Iterator[None]:
    """Inside, module and grad mode are in the modes of the variant."""
    switches: dict[str, AbstractContextManager[Any]] = {
        "on": nullcontext(),
        "no_grad": torch.no_grad(),
        "inference_mode": torch.inference_mode(),
    }
    modes = [(inner, inner.training) for inner in module.modules()]
    if variant.evaluates:
        module.eval()
    try:
        with switches[variant.grad]:
            yield
    finally:
        if variant.evaluates:
            for inner, training in modes:
                inner.training = training


def call(
    subject: Subject,
    inputs: Mapping[str, Tensor],
    variant: Variant,
    *,
    grad_outputs: Mapping[str, Tensor] | None = None,
    where: str | None = None,
) -> Outcome:
    """The outcome of one call and its differentiation.

    Args:
        grad_outputs: incoming gradients; random ones if None.
        where: names the call in messages. If given, the caller's tensors must not be written to,
            and a second backward must give the same gradients.
    """
    tensors = {name: lay_out(name, t, variant) for name, t in inputs.items()}
    wrt = ask_for_gradients(tensors, subject.parameters, variant)
    watched = Untouched({**tensors, **subject.parameters})
    with seeded(tensors.values()), in_mode(subject.module, variant):
        result = named_outputs(subject.function(*tensors.values()))
    out = Outcome(outputs=result)
    for name, y in result.items():
        chosen = variant.outputs == "all" or (variant.outputs == "main") == (name == "output")
        differentiable = isinstance(y, Tensor) and y.requires_grad and variant.grad == "on"
        if not (chosen and differentiable):
            continue
        if grad_outputs is None:
            out.grad_outputs[name] = incoming(name, y.detach(), variant)
        elif name in grad_outputs:
            out.grad_outputs[name] = grad_outputs[name].to(y.dtype)
    if where is not None:
        watched.check(where)
    if wrt and out.grad_outputs:
        with changed(subject.module, replaces=variant.replaces, sets=variant.sets):
            grads = _backward(out, wrt)
            if where is not None:
                _check_again(out, wrt, grads, where)
        out.grads = dict(zip(wrt, grads))
    else:
        out.grads = dict.fromkeys(wrt)
    if where is not None:
        watched.check(where)
    return out


def _backward(
    out: Outcome, wrt: Mapping[str, Tensor], *, retain_graph: bool = True
) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(
        [out.outputs[name] for name in out.grad_outputs],
        list(wrt.values()),
        list(out.grad_outputs.values()),
        retain_graph=retain_graph,
        allow_unused=True,
    )


def _check_again(
    out: Outcome, wrt: Mapping[str, Tensor], first: Sequence[Tensor | None], where: str
) -> None:
    arrived = Untouched({f"gradient of the {name}": g for name, g in out.grad_outputs.items()})
    kept = [None if g is None else g.clone() for g in first]
    # The last one may take the memory of what nobody else refers to.
    second = _backward(out, wrt, retain_graph=False)
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
