"""The model that a command is about: found by name, built on a device, with inputs for a call."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..engine.plan import Plan
from ..errors import OpfuserError, TargetError, explain
from ..hf import apply
from ..registry import fusions
from . import hf_models
from .inputs import did_you_mean, examples, said, tensor
from .kernel_counts import counting
from .observing import SequenceCall, observed


class Target(NamedTuple):
    """A model and the inputs of one call of it.

    Attributes:
        name: as it was asked for.
        model: on the device asked for.
        inputs: positional arguments of the call, on the same device.
        untouched: what a model of transformers was before :func:`opfuser.hf.apply`, with the same
            tensors; None for others, and without data.
    """

    name: str
    model: nn.Module
    inputs: tuple[Tensor, ...]
    untouched: nn.Module | None = None


def load(
    spec: str,
    inputs: Sequence[str] = (),
    device: str = "meta",
    dtype: torch.dtype | None = None,
    *,
    with_data: bool = False,
    config: Path | None = None,
    applied: bool = True,
) -> Target:
    """The model that ``spec`` names, and inputs for it.

    Args:
        spec: ``package.module:name``; the name, which may have dots, is that of a function without
            arguments that returns a ``torch.nn.Module``, or of such a module. The function runs
            with ``device`` as torch's default. A module that is elsewhere is copied to the device;
            what the name stands for does not change. Or ``hf:NAME``: a model of transformers, see
            :func:`opfuser.report.hf_models.build`.
        inputs: texts such as ``8x2048x4096:bf16`` or ``2x128:int64``, one per positional argument;
            the dtype defaults to the first floating-point parameter's. Floating-point inputs are
            random and require grad; integers are random indices into the smallest table of the
            model; on the meta device there are no values. Without any,
            ``example_inputs`` is read from the function, the model or the Python module, in this
            order: a tensor, a text as above, a sequence of these, or a function that returns one
            of them. For ``hf:`` there are defaults, and inputs do not require grad.
        device: where the model and its inputs are.
        dtype: which floating-point parameters, buffers and inputs are converted to; None leaves
            them as they are.
        with_data: whether the meta device is of no use to the caller.
        config: with ``hf:``, a JSON file with settings.
        applied: whether models that ``hf:`` names are computed by operations: see
            :func:`opfuser.hf.apply`.

    Raises:
        TargetError: there is no such module or name, it does not build a module, a text is no
            shape, there are no inputs, or there is no such device.
        ConfigError: the file of ``OPFUSER_CONFIG`` cannot be used.
    """
    where = _device(device, with_data)
    if spec.startswith(hf_models.PREFIX):
        return _of_transformers(
            spec, inputs, where, dtype, config, with_data=with_data, applied=applied
        )
    if config is not None:
        raise TargetError.explained(
            "--config is a configuration of a model of transformers",
            received=f"--config {config} for {spec}",
            remedy="Name the model as hf:LlamaForCausalLM, say",
        )
    found, home = _find(spec)
    model = _built(spec, found, where)
    model = moved(model, where, dtype)
    _prepare()
    if inputs:
        given: tuple[Any, ...] = tuple(inputs)
    else:
        given = examples(spec, (found, model, home), where)
    made = tuple(tensor(item, spec, model, where, dtype) for item in given)
    return Target(spec, model, made)


def _of_transformers(
    spec: str,
    inputs: Sequence[str],
    device: torch.device,
    dtype: torch.dtype | None,
    config: Path | None,
    *,
    with_data: bool,
    applied: bool,
) -> Target:
    with _Unfilled():
        model = hf_models.build(spec, config, device, dtype)
    _prepare()
    name = spec if config is None else f"{spec} --config {config}"
    given = tuple(inputs) or hf_models.call_inputs(spec, model)
    made = tuple(tensor(item, spec, model, device, None).detach() for item in given)
    if not applied:
        return Target(name, model, made)
    untouched = None
    if with_data:
        untouched = copy.deepcopy(
            model, {id(t): t for t in (*model.parameters(), *model.buffers())}
        )
    with hf_models.quiet_and_offline():
        report = apply(model)
    if not report.computed:
        raise TargetError.explained(
            "opfuser.hf.apply replaces nothing in this model",
            where=name,
            received="; ".join(f"{k.path or 'the model'} {k.reason}" for k in report.kept[:2]),
            remedy="opfuser audit says what would fuse",
        )
    return Target(name, model, made, untouched)


def _prepare() -> None:
    """What precedes a call of any model: mistakes of a configuration are none of the call."""
    fusions()  # reads the file of OPFUSER_CONFIG, which may name fusions that the model brings
    hf_models.decide_without_values()


def plans(target: Target) -> dict[str, Plan]:
    """The plan of each Sequential's call, by the path of the Sequential in the model.

    The plan of a Sequential covers those that it holds, so they have no entry of their own unless a
    plain module between them calls them. The model is called once, on the device where it is: a
    plan alone does not say whether its inputs are possible.

    Raises:
        TargetError: the call fails.
    """
    return {call.path: call.plan for call in calls(target)}


def calls(target: Target) -> list[SequenceCall]:
    """Runs the model's forward once, and returns the call of each Sequential in it, in order.

    Calls that are part of another Sequential's plan are left out; of a Sequential that is called
    several times there is the first call.

    Raises:
        TargetError: the call fails.
    """
    on_meta = any(t.is_meta for t in target.inputs)
    # On the meta device kernels are noted: what stands for them in plain torch takes longer.
    with counting() if on_meta else nullcontext(), observed(target.model) as found:
        try:
            target.model(*target.inputs)
        except Exception as error:  # the user's code may raise anything
            raise TargetError(failed(target, error)) from error
    return found


def failed(target: Target, error: Exception, remedy: str = "") -> str:
    """The text about a model that does not run."""
    shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in target.inputs)
    # Errors of opfuser have remedies of their own.
    values = not isinstance(error, OpfuserError) and any(t.is_meta for t in target.inputs)
    if not remedy and values:
        remedy = "Pass other inputs, or --device cpu if it reads values"
    return explain(
        f"The model has to run with inputs {shapes}",
        where=target.name,
        received=said(error),
        remedy=remedy,
    )


def _device(device: str, with_data: bool) -> torch.device:
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise TargetError.explained(
            "A device is one of torch's",
            received=repr(device),
            remedy="Use cpu or cuda" if with_data else "Use meta, cpu or cuda",
        ) from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise TargetError.explained(
            "This machine has no CUDA device",
            received=repr(device),
            remedy="Use --device cpu" if with_data else "Use --device meta, which plans like a GPU",
        )
    return where


def _find(spec: str) -> tuple[Any, Any]:
    """What a spec names, and the Python module that it is in."""
    path, colon, name = spec.partition(":")
    if not (path and colon and name):
        raise TargetError.explained(
            "A model is named as package.module:name",
            received=repr(spec),
            remedy="The name is that of a function that builds it, or of the model",
        )
    try:
        home = importlib.import_module(path)
    except Exception as error:
        raise TargetError.explained(
            f"The Python module {path!r} cannot be imported", received=said(error)
        ) from error
    found: Any = home
    for part in name.split("."):
        if not hasattr(found, part):
            known = [n for n in vars(found) if not n.startswith("_")] if found is home else []
            raise TargetError.explained(
                f"{path!r} has no attribute {name!r}", remedy=did_you_mean(part, known)
            )
        found = getattr(found, part)
    return found, home


class _Unfilled(TorchFunctionMode):
    """Inside, initial values are not drawn for tensors without data: torch imports much for it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        t = args[0] if args else kwargs.get("tensor")
        fills = func in _FILL or getattr(func, "__module__", "") == "torch.nn.init"
        if fills and isinstance(t, Tensor) and t.is_meta:
            return t
        return func(*args, **kwargs)


_FILL = {Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.bernoulli_}


def _built(spec: str, found: Any, device: torch.device) -> nn.Module:
    model = found
    if not isinstance(found, nn.Module) and callable(found):
        try:
            with device, _Unfilled():
                model = found()
        except Exception as error:
            raise TargetError.explained(
                f"{spec} has to build a model when it is called without arguments",
                received=said(error),
            ) from error
    if not isinstance(model, nn.Module):
        raise TargetError.explained(
            f"{spec} has to be a torch.nn.Module, or a function that returns one",
            received=type(model).__name__,
        )
    return model


def moved(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """The model with its tensors on ``device`` and in ``dtype``: itself if they are, else a copy.

    Tensors that are there already, or that go to the meta device, are not copied.
    """
    replaced: dict[int, Any] = {}
    for t in (*model.parameters(), *model.buffers()):
        to = dtype if t.is_floating_point() and dtype is not None else t.dtype
        here = t.device.type == device.type and device.index in (None, t.device.index)
        if here and t.dtype == to:
            continue
        if t.is_meta and device.type != "meta":
            raise TargetError.explained(
                "A model without values stays on the meta device",
                received=f"--device {device}",
                remedy="Leave the device to the function that builds it",
            )
        other = t.detach().to(device, to)
        if isinstance(t, nn.Parameter):
            other = nn.Parameter(other, t.requires_grad)
        replaced[id(t)] = other
    if not replaced:
        return model
    kept = {id(t): t for t in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, {**kept, **replaced})
    except Exception as error:
        raise TargetError.explained(
            f"A model that is not on {device}, in the dtype asked for, is copied",
            where=type(model).__name__,
            received=said(error),
            remedy="Let a function build it, which runs with that device as torch's default",
        ) from error
