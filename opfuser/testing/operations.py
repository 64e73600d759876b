"""check_op: an operation against its own reference."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentTypeError, explain
from ..fusion import disable, fusions
from ..op import BasicOperation, GradNeeds, OperationContext, autocast_dtype
from .compare import (
    Comparison,
    Subject,
    Tolerance,
    Untouched,
    Variant,
    call,
    fail,
    named_inputs,
    named_outputs,
    variants,
    without_rows,
)

__all__ = ["check_op"]


def check_op(
    op: BasicOperation,
    input: Tensor,
    *extra_inputs: Tensor,
    kwargs: Mapping[str, Any] | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    zero_rows: bool = False,
    factor: float = 2.0,
    floor: float | None = None,
) -> None:
    """Holds an operation to its ``reference``: outputs and all gradients, called in many ways.

    An error may be ``factor`` times the error that ``reference`` makes when plain torch runs it in
    the same dtype, plus a floor. The truth is ``reference`` in float64. Called are: contiguous,
    strided and expanded tensors; with gradients arriving for some outputs only; with gradients
    asked for of some tensors only; each with a second backward over the same graph. Checked as
    well: inputs, parameters and incoming gradients are not written to; shapes, dtypes, devices;
    what forward saves is what ``Saved`` declares, and is nothing without ``ctx.requires_grad``.

    The operation is copied first. Random numbers are drawn from the same seed in every call. Inside
    ``torch.autocast`` the operation runs under it, and plain torch runs in its dtype throughout.

    Args:
        op: the operation; it implements ``reference``.
        input: its input, on the device to check on.
        *extra_inputs: its extra inputs.
        kwargs: keyword arguments of its forward and its reference.
        dtypes: cast parameters and floating-point inputs to each of these in turn; None leaves
            them as they are.
        zero_rows: also call it without rows. Every tensor loses its first dimension's entries if
            it has as many as the input.
        factor: multiple of plain torch's error that is allowed.
        floor: allowed besides, relative to the largest magnitude of the tensor (at least 1/16);
            None is one unit in the last place of the coarsest dtype that comes out.

    Raises:
        AssertionError: naming the call, the tensor, its error and the error allowed.
        ArgumentTypeError: ``op`` is no basic operation.
    """
    if not isinstance(op, BasicOperation):
        raise ArgumentTypeError(
            explain(
                "check_op checks basic operations",
                received=type(op).__name__,
                remedy="Check each part of a compound; check fused operations with check_fusion",
            )
        )
    kwargs = dict(kwargs or {})
    for dtype in (None,) if dtypes is None else tuple(dtypes):
        ours = copy.deepcopy(op) if dtype is None else copy.deepcopy(op).to(dtype)
        inputs = {
            name: t.detach() if dtype is None or not t.is_floating_point() else t.detach().to(dtype)
            for name, t in named_inputs(input, extra_inputs).items()
        }
        names = [handle.name for handle in fusions()]
        with disable(*names):
            _check(ours, inputs, kwargs, zero_rows, Tolerance(factor, floor))


def _check(
    op: BasicOperation,
    inputs: dict[str, Tensor],
    kwargs: dict[str, Any],
    zero_rows: bool,
    tolerance: Tolerance,
) -> None:
    where = describe(op, inputs)
    _check_protocol(op, inputs, kwargs, where)
    lower = autocast_dtype(inputs["input"].device)
    exact, plain = copy.deepcopy(op).to(torch.float64), copy.deepcopy(op)
    if lower is not None:
        plain = plain.to(lower)
    subjects = [
        Subject(lambda *ts: op(*ts, **kwargs), _parameters(op)),
        Subject(lambda *ts: plain.reference(*ts, **kwargs), _parameters(plain)),
        Subject(lambda *ts: exact.reference(*ts, **kwargs), _parameters(exact)),
    ]
    for variant in variants(
        parameters=bool(subjects[0].parameters),
        extra_inputs=any(t.is_floating_point() for t in list(inputs.values())[1:]),
        extra_outputs=bool(op.num_extra_outputs),
        zero_rows=zero_rows,
    ):
        compare_with_exact(subjects, inputs, variant, tolerance, where, "plain torch", lower=lower)


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


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return {f"parameter {name}": p for name, p in module.named_parameters() if p.requires_grad}


def describe(op: nn.Module, inputs: Mapping[str, Tensor]) -> str:
    t = inputs["input"]
    dtype = str(t.dtype).removeprefix("torch.")
    return f"{type(op).__name__}({op.extra_repr()}), input {dtype} {list(t.shape)}"


def _check_protocol(
    op: BasicOperation, inputs: dict[str, Tensor], kwargs: dict[str, Any], where: str
) -> None:
    """Runs the operation with contexts of our own and looks at what it does with them."""
    given = {name: t.detach().clone() for name, t in inputs.items()}
    ctx, y = _forward(op, given, kwargs, where, requires_grad=True)
    for name, output in y.items():
        if not isinstance(output, Tensor):
            fail(f"The {name} must be a tensor", where, type(output).__name__)
    saved = () if ctx.to_save is None else ctx.to_save
    check_saved(op, saved, where)
    idle, _ = _forward(op, given, kwargs, where, requires_grad=False)
    if idle.to_save:
        fail(
            "Nothing may be saved without ctx.requires_grad",
            where,
            f"{len(idle.to_save)} tensors",
            "Call ctx.save_for_backward only if ctx.requires_grad",
        )
    ctx.saved_tensors, ctx.to_save = tuple(saved), None
    slots = op.parameter_slots()
    ctx.parameters = tuple(getattr(module, name) for module, name in slots)
    if not y["output"].is_floating_point():
        return
    grads = {name: torch.ones_like(t) for name, t in y.items()}
    watched = Untouched({f"gradient of the {name}": g for name, g in grads.items()})
    with torch.no_grad():
        dx, dparams, dextras = op.fuser_backward(
            [ctx],
            grads.pop("output"),
            basic_op_grad_extra_outputs=[list(grads.values())],
        )
    watched.check(where)
    if len(dparams) != 1 or len(dextras) != 1:
        fail("fuser_backward of a basic operation returns lists of one entry", where)
    inner_params, inner_extras = tuple(dparams[0] or ()), tuple(dextras[0] or ())
    if len(inner_params) != len(slots):
        fail(
            f"Backward must return {len(slots)} parameter gradients", where, str(len(inner_params))
        )
    if len(inner_extras) != op.num_extra_inputs:
        fail(
            f"Backward must return {op.num_extra_inputs} extra-input gradients",
            where,
            str(len(inner_extras)),
        )
    names = [name for _, name in slots]
    owners = [*inputs.items(), *((f"parameter {n}", p) for n, p in zip(names, ctx.parameters))]
    made = (dx, *inner_extras, *inner_params)
    for (name, owner), grad in zip(owners, made):
        _check_grad(name, owner, grad, where)


def _forward(
    op: BasicOperation,
    inputs: dict[str, Tensor],
    kwargs: dict[str, Any],
    where: str,
    *,
    requires_grad: bool,
) -> tuple[OperationContext, dict[str, Any]]:
    x, *extras = inputs.values()
    ctx = OperationContext()
    ctx.requires_grad = requires_grad
    ctx.needs = GradNeeds(
        requires_grad and x.is_floating_point(),
        tuple(requires_grad and _reads(slot) for slot in op.parameter_slots()),
        tuple(requires_grad and t.is_floating_point() for t in extras),
    )
    with torch.no_grad():
        op.pre_fuser_forward(requires_grad=requires_grad)
        y, extra_outputs = op.fuser_forward(
            [ctx],
            x,
            basic_op_extra_inputs=[extras],
            prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None,
            basic_op_kwargs=[kwargs],
        )
    if len(extra_outputs) != 1 or len(extra_outputs[0]) != op.num_extra_outputs:
        fail(
            f"fuser_forward must return one list of {op.num_extra_outputs} extra outputs",
            where,
            str([len(ys) for ys in extra_outputs]),
        )
    return ctx, named_outputs((y, *extra_outputs[0]))


def _reads(slot: tuple[nn.Module, str]) -> bool:
    return bool(getattr(slot[0], slot[1]).requires_grad)


def check_saved(op: BasicOperation, saved: Sequence[Any], where: str) -> None:
    """``saved`` is what ``op.Saved`` declares: as many entries, tensors, None only where allowed."""
    declared = op.Saved
    if declared is None:
        if saved:
            fail(
                f"{type(op).__name__} declares no Saved, so it must save nothing",
                where,
                f"{len(saved)} saved tensors",
                "Declare a NamedTuple called Saved in the class: fused forwards must fill the same",
            )
        return
    fields: dict[str, Any] = declared.__annotations__
    if len(saved) != len(fields):
        fail(
            f"Forward must save what Saved declares: ({', '.join(fields)})",
            where,
            f"{len(saved)} saved tensors",
        )
    for (name, kind), tensor in zip(fields.items(), saved):
        may_be_none = "None" in str(kind) or "Optional" in str(kind)
        if tensor is None and may_be_none:
            continue
        if not isinstance(tensor, Tensor):
            fail(
                f"Saved declares {name}: {getattr(kind, '__forward_arg__', kind)}",
                where,
                type(tensor).__name__,
            )


def _check_grad(name: str, owner: Tensor, grad: Any, where: str) -> None:
    where = f"{where}: gradient of {name}"
    if grad is None:
        return  # zero; the comparison with the reference decides
    if not isinstance(grad, Tensor) or not grad.is_floating_point():
        fail("A gradient is a floating-point tensor or None", where, _kind(grad))
    if grad.shape != owner.shape:
        fail(f"Expected shape {tuple(owner.shape)}", where, f"shape {tuple(grad.shape)}")
    if grad.device != owner.device:
        fail(f"Expected device {owner.device}", where, f"device {grad.device}")


def _kind(value: Any) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
