"""What one operation does with its contexts: what it saves, and what its backward returns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.op_base.results import backward_parts, forward_parts, row_of_grads, row_of_outputs
from ..errors import counted
from ..op import BasicOperation, Dtypes, GradNeeds, OperationContext, autocast_dtype
from .calls import Untouched, checked_results, fail, named_outputs
from .compare import check_kind


def check_protocol(
    op: BasicOperation, inputs: dict[str, Tensor], kwargs: dict[str, Any], where: str
) -> None:
    """Runs the operation with given contexts and checks what it saves and returns."""
    given = {name: t.detach().clone() for name, t in inputs.items()}
    ctx, y = _forward(op, given, kwargs, where, requires_grad=True)
    with torch.no_grad():
        expected = named_outputs(op.reference(*given.values(), **kwargs))
    if len(expected) != len(y):
        fail(f"The reference gives {counted(len(expected), 'output')}", where, str(len(y)))
    autocast = torch.is_autocast_enabled(given["input"].device.type)
    for name, output in y.items():
        check_kind(f"{where}: {name}", output, expected[name], any_dtype=autocast)
    _check_declared_dtypes(op, given, y, where)
    saved = () if ctx.to_save is None else ctx.to_save
    check_saved(op, saved, where)
    idle, _ = _forward(op, given, kwargs, where, requires_grad=False)
    if idle.to_save:
        fail(
            "Nothing may be saved without ctx.requires_grad",
            where,
            counted(len(idle.to_save), "tensor"),
            "Call ctx.save_for_backward only if ctx.requires_grad",
        )
    ctx.saved_tensors, ctx.to_save = tuple(saved), None
    slots = op.parameter_slots()
    parameters: list[Tensor] = [getattr(module, name) for module, name in slots]
    ctx.parameters = tuple(parameters)
    if not y["output"].is_floating_point():
        return
    grads = {name: torch.ones_like(t) for name, t in y.items()}
    watched = Untouched({f"gradient of the {name}": g for name, g in grads.items()})
    kind = type(op).__name__
    with torch.no_grad(), checked_results(where):
        result = op.fuser_backward(
            [ctx], grads.pop("output"), basic_op_grad_extra_outputs=[list(grads.values())]
        )
        dx, dparams, dextras = backward_parts(kind, result)
    watched.check(where)
    if len(dparams) != 1 or len(dextras) != 1:
        fail("fuser_backward of a basic operation returns lists of one entry", where)
    with checked_results(where):
        of_params, of_extras = (row_of_grads(kind, kind, grads[0]) for grads in (dparams, dextras))
    if len(of_params) != len(slots):
        fail(
            f"Backward must return {counted(len(slots), 'parameter gradient')}",
            where,
            str(len(of_params)),
        )
    if len(of_extras) != op.num_extra_inputs:
        fail(
            f"Backward must return {counted(op.num_extra_inputs, 'extra-input gradient')}",
            where,
            str(len(of_extras)),
        )
    names = [name for _, name in slots]
    owners = [*inputs.items(), *((f"parameter {n}", p) for n, p in zip(names, parameters))]
    made = (dx, *of_extras, *of_params)
    dtypes = mixed_dtypes([owner for _, owner in owners])
    for (name, owner), grad in zip(owners, made):
        check_grad(name, owner, grad, where, dtypes)


def _check_declared_dtypes(
    op: BasicOperation, inputs: dict[str, Tensor], outputs: dict[str, Any], where: str
) -> None:
    input_, *extras = inputs.values()
    dtypes = Dtypes(
        input_.dtype,
        tuple(t.dtype for t in extras),
        tuple(getattr(module, name).dtype for module, name in op.parameter_slots()),
        autocast_dtype(input_.device),
    )
    declares = op.output_dtype(dtypes), *op.extra_output_dtypes(dtypes)
    for (name, output), declared in zip(outputs.items(), declares):
        if output.dtype != declared:
            fail(
                f"Plans take the {name} to be {declared}",
                where,
                str(output.dtype),
                f"Override {'output_dtype' if name == 'output' else 'extra_output_dtypes'}",
            )


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
    kind = type(op).__name__
    with torch.no_grad(), checked_results(where):
        op.pre_fuser_forward(requires_grad=requires_grad)
        result = op.fuser_forward(
            [ctx],
            x,
            basic_op_extra_inputs=[extras],
            prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None,
            basic_op_kwargs=[kwargs],
        )
        y, extra_outputs = forward_parts(kind, result)
        rows = [row_of_outputs(kind, kind, row) for row in extra_outputs]
    wanted = counted(op.num_extra_outputs, "extra output")
    if [len(row) for row in rows] != [op.num_extra_outputs]:
        fail(
            f"fuser_forward must return one list of {wanted}",
            where,
            str([len(row) for row in rows]),
        )
    return ctx, named_outputs((y, *rows[0]))


def _reads(slot: tuple[nn.Module, str]) -> bool:
    return bool(getattr(slot[0], slot[1]).requires_grad)


def check_saved(op: BasicOperation, saved: Sequence[Any], where: str) -> None:
    """Requires ``saved`` to be what ``op.Saved`` declares, with None only where it is declared."""
    declared = op.Saved
    if declared is None:
        if saved:
            fail(
                f"{type(op).__name__} declares no Saved, so it must save nothing",
                where,
                counted(len(saved), "saved tensor"),
                "Declare a NamedTuple called Saved in the class: fused forwards must fill the same",
            )
        return
    fields: dict[str, Any] = declared.__annotations__
    if len(saved) != len(fields):
        fail(
            f"Forward must save what Saved declares: ({', '.join(fields)})",
            where,
            counted(len(saved), "saved tensor"),
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


def check_grad(
    name: str, owner: Tensor, grad: Any, where: str, dtypes: Collection[torch.dtype] = ()
) -> None:
    """Requires a gradient that a backward returned to have its owner's shape, device and dtype.

    Args:
        dtypes: allowed besides the owner's dtype.
    """
    where = f"{where}: gradient of {name}"
    if grad is None:
        return  # zero; the comparison with the reference decides
    if not isinstance(grad, Tensor) or not grad.is_floating_point():
        fail("A gradient is a floating-point tensor or None", where, _kind(grad))
    if grad.shape != owner.shape:
        fail(f"Expected shape {tuple(owner.shape)}", where, f"shape {tuple(grad.shape)}")
    if grad.device != owner.device:
        fail(f"Expected device {owner.device}", where, f"device {grad.device}")
    if owner.is_floating_point() and grad.dtype not in (owner.dtype, *dtypes):
        # Autograd casts it silently, after it was computed and stored.
        fail(f"Expected {owner.dtype}", where, str(grad.dtype), "Cast it before it is returned")


def mixed_dtypes(tensors: Iterable[Tensor]) -> set[torch.dtype]:
    """The dtypes in which an operation may compute with these tensors, if there are several.

    A gradient may then be returned in the dtype of its computation, for autograd to cast.
    """
    tensors = list(tensors)
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    lower = {autocast_dtype(t.device) for t in tensors}
    dtypes |= {dtype for dtype in lower if dtype is not None}
    return dtypes if len(dtypes) > 1 else set()


def _kind(value: Any) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
