"""Having sequences of operations compute the modules of a model, and taking that back."""

from __future__ import annotations

import inspect
import sys
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentTypeError
from ..quantization.operation_state import forget_state_of_parameters
from ..quantization.region import autocast
from .decisions import Application
from .descriptions import children_called, described
from .forwards import RootState, State, install, is_applied, state_of, uninstall
from .reports import Computed, Inside, Kept, Report, in_order

_NOT_CALLED = "has not been called since apply"
_NOT_THERE = "was not there when apply was called"


def apply(
    model: nn.Module,
    *,
    example: Mapping[str, Any] | Sequence[Any] | Tensor | None = None,
    dry_run: bool = False,
    fused_loss: bool = False,
    merge_storages: bool = False,
) -> Report:
    """Replaces modules of a model by fused sequences of operations where it can, and reports which.

    From then on, each module that has parameters, directly or in children, is examined when it is
    called, the outermost first. The first call of a kind is traced: the forward of the module's
    class runs once on the meta device. If opfuser understands every operation in it, a
    :class:`opfuser.Sequential` with the module's own parameters computes this call and similar
    ones. Otherwise the module's own forward runs, and its children are examined. A later call is
    similar to a traced one if its arguments have the same structure, types and relations between
    sizes, the modes are the same, and all attributes, functions and settings that the forward has
    read are unchanged. If not, it is traced again.

    The model keeps its modules, parameters, hooks and ``state_dict``. Results are those of the
    model up to rounding; dropout draws other masks. Gradients do not flow into keys and values that
    a cache returns. Under ``torch.compile``, a sequence is one function of the graph, which is
    traced again when that of the plain model would be, and each trace counts as a call.
    ``torch.export`` exports the classes' own forwards.

    Args:
        model: any module.
        example: arguments of one call, with shapes and dtypes that the model accepts: a mapping of
            keywords, a tuple of positional arguments, or one tensor. The model is called with them
            once, in its current modes, and gradients are discarded; its buffers and the random
            number generators are restored afterwards. Without an example, most modules are reported
            as not called yet; call :func:`report` after the first real calls.
        dry_run: whether to report only, and change nothing.
        fused_loss: whether, in training, a cross entropy inside the model is computed from the
            hidden states, some tokens at a time, if a linear module returned its logits and nothing
            else uses them. In fp32, logits are often the largest tensor of a step. In the model's
            output, they are None.
        merge_storages: whether to move weights that multiply the same input, such as those of
            queries, keys and values, into one storage, so that one GEMM computes them all. They are
            moved when the first call is traced, and stay the same objects. Of weights in one
            storage, accelerate's ``save_state`` and ``save_model`` write only the first, unless
            ``safe_serialization=False``.

    Returns:
        The report: what computes the modules of the model, and why the others are kept.

    Raises:
        ArgumentTypeError: ``model`` is not a ``torch.nn.Module``, or ``example`` does not fit its
            forward. An error that the model itself raises for an example is passed on, and nothing
            is applied.
    """
    _check(model)
    call = None if example is None else bound_example(model, example, "opfuser.apply", "model")
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        for module in model.modules():  # scales stay
            uninstall(module)
        _install(model, Application(fused_loss, merge_storages and not dry_run))
        if call is not None:
            with _as_before(model), autocast(enabled=False), _noted(call):
                model(*call.args, **call.kwargs)
        made = report(model)
    except BaseException:
        _put_back(before)
        raise
    if dry_run:
        _put_back(before)
    return made


def revert(model: nn.Module) -> None:
    """Undoes :func:`apply`: all modules of a model get their own forwards back.

    Wrappers that were put around a forward since then stay, and call the forward of the module's
    class. Scales of quantized compute are discarded: ``state_dict()`` is that of the model alone.

    Args:
        model: a model to which :func:`apply` was applied; any other is left unchanged.

    Raises:
        ArgumentTypeError: ``model`` is not a ``torch.nn.Module``.
    """
    _check(model)
    for module in model.modules():
        uninstall(module)
        forget_state_of_parameters(module)


def report(model: nn.Module) -> Report:
    """Reports what computes each module of a model, from its calls since :func:`apply`.

    Args:
        model: to which :func:`apply` was applied.

    Raises:
        ArgumentTypeError: ``model`` is not a ``torch.nn.Module``.
    """
    _check(model)
    computed: list[Computed] = []
    inside: list[Inside] = []
    kept: list[Kept] = []
    for path, module in model.named_modules():
        if not _owns_parameters(module):
            continue
        entry = _entry(path, module)
        if isinstance(entry, Computed):
            computed.append(entry)
            continue
        around = [outer.path for outer in computed if outer.covers(path)]
        if around and entry.reason in (_NOT_CALLED, _NOT_THERE):
            inside.append(Inside(path, around[-1]))
        else:
            kept.append(entry)
    return Report(tuple(computed), tuple(inside), tuple(kept))


def is_computed(module: nn.Module) -> bool:
    """Whether a sequence has been found for calls of a module to which :func:`apply` was applied.

    Args:
        module: any, of which the others inside do not count.
    """
    state = state_of(module)
    return state is not None and any(d.built is not None for d in state.decisions)


def _check(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError.explained(
            "A model is a torch.nn.Module",
            where="opfuser.apply",
            received=type(model).__name__,
            remedy="Build or load it first",
        )


def bound_example(
    module: nn.Module, example: Any, where: str, called: str = "module"
) -> inspect.BoundArguments:
    """The arguments of an example: a tensor, or positional ones, or keywords.

    Args:
        module: of which it is a call.
        example: as users give it.
        where, called: the function that takes it, and the module in its errors.

    Raises:
        ArgumentTypeError: the forward takes no such arguments.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example, Mapping):
        kwargs = dict(example)
    else:
        args = (example,) if isinstance(example, Tensor) else tuple(example)
    signature = inspect.signature(module.forward)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentTypeError.explained(
            f"An example has the arguments of one call of the {called}",
            where=where,
            received=f"{', '.join([*(type(a).__name__ for a in args), *kwargs])}: {error}",
            remedy=f"The forward takes {signature}",
        ) from None


@contextmanager
def _noted(call: inspect.BoundArguments) -> Iterator[None]:
    """What the model raises says which call it was."""
    try:
        yield
    except Exception as error:
        if sys.version_info >= (3, 11):
            given = ", ".join(f"{n}={_shown(a)}" for n, a in call.arguments.items())
            error.add_note(f"opfuser.apply called the model with its example: {given}")
        raise


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {value.dtype} on {value.device}"
    return type(value).__name__


def _install(model: nn.Module, application: Application) -> None:
    for module in model.modules():
        own = module.__dict__.get("forward")
        if _owns_parameters(module) and _has_forward(module) and not foreign_forward(module):
            within = application.fused_loss and module is model
            install(module, (RootState if within else State)(application, own))


def _put_back(before: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    for module, own in before:
        module.__dict__.clear()
        module.__dict__.update(own)


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None and (
        _has_forward(module) or bool(module._parameters)
    )


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def foreign_forward(module: nn.Module) -> str:
    """Names what else has set a forward of the module's own; empty if nothing has."""
    own = module.__dict__.get("forward")
    if (
        own is None
        or is_applied(own)
        or (
            isinstance(own, types.MethodType)
            and own.__self__ is module
            and own.__func__ is type(module).forward
        )
    ):
        return ""
    function = getattr(own, "__func__", own)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"has a forward of its own, {getattr(function, '__module__', '?')}.{name}"


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Afterwards, buffers and random numbers are as they were."""
    holders = [(m._buffers, dict(m._buffers)) for m in model.modules() if m._buffers]
    values = [(b, b._version, b.clone()) for b in model.buffers() if not b.is_inference()]
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            for now, held in holders:
                now.clear()
                now.update(held)
            with torch.no_grad():
                for buffer, version, value in values:
                    # torch counts no version where a batch norm writes to its statistics.
                    plain = type(buffer) is Tensor and not buffer.is_meta
                    if buffer._version != version or (plain and not torch.equal(buffer, value)):
                        buffer.copy_(value)


def _entry(path: str, module: nn.Module) -> Computed | Kept:
    state = state_of(module)
    if state is None:
        if not _has_forward(module):
            return Kept(path, "has no forward")
        return Kept(path, foreign_forward(module) or _NOT_THERE)
    reasons = Counter(state.passed)
    for decision in state.decisions:
        if decision.reading is None and decision.count():
            reasons[decision.reason] += decision.count()
    fell_back = in_order(reasons)
    calls = sum(d.count() for d in state.decisions if d.reading is not None)
    heads = [d.head for d in state.decisions if d.head is not None and d.head.is_of_use]
    done = [d.reading for d in state.decisions if d.built and d.count() and d.reading is not None]
    if heads or done:
        reading = heads[-1].reading if heads else done[-1]
        operations = described(reading) + (", CrossEntropy" if heads else "")
        calls += sum(head.losses for head in heads)
        return Computed(path, operations, calls, fell_back, tuple(children_called(reading)))
    if why := foreign_forward(module):
        return Kept(path, why, fell_back)
    return Kept(path, fell_back[0][0] if fell_back else _NOT_CALLED, fell_back)
