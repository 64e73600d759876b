"""check_op: an operation against its own reference."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.recorded.recordable import unrecorded
from ..errors import ArgumentTypeError
from ..op import BasicOperation, autocast_dtype
from ..registry import disable, fusions
from .calls import Subject, named_inputs
from .changes import SETTINGS, attributes
from .compare import Reference, Tolerance, cast, each_dtype, parameters_of
from .protocol import check_protocol
from .variants import Variant, leading_dims, modes, variants


@unrecorded()  # what operations do shows in calls of theirs
def check_op(
    op: BasicOperation,
    input: Tensor,
    *extra_inputs: Tensor,
    kwargs: Mapping[str, Any] | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    zero_rows: bool = True,
    factor: float = 2.0,
    floor: float | Mapping[torch.dtype, float] | None = None,
) -> None:
    """Compares an operation with its ``reference``: outputs and all gradients, in many calls.

    An error may be ``factor`` times the error of ``reference`` in plain torch and the same dtype,
    plus a floor; errors are differences to ``reference`` in float64. The calls have contiguous,
    strided and expanded tensors; no rows; incoming gradients of some outputs only; gradients
    wanted of some tensors only; each with a second backward over the same graph. Checked as well:
    inputs, parameters and incoming gradients are not written to; results are tuples and lists as
    documented; shapes, dtypes and devices, also of the gradients that backward returns; forward
    saves what ``Saved`` declares, and nothing without ``ctx.requires_grad``.

    In the first dtype also: a single row, if ``reference`` accepts one; ``no_grad``; eval mode,
    with gradients and in inference mode; and changes between forward and backward: all parameters
    are replaced, and each public attribute is set (a number, flag, string or None, unless setting
    it raises). The gradients must be those of what forward used.

    The operation is copied first. Random numbers are drawn from the same seed in every call. Inside
    ``torch.autocast`` the operation runs under it, and plain torch runs entirely in its dtype.

    Args:
        op: the operation; it implements ``reference``.
        input: its input, on the device to check on.
        *extra_inputs: its extra inputs.
        kwargs: keyword arguments of its forward and its reference.
        dtypes: cast parameters and floating-point inputs to each of these in turn; None leaves
            them as they are.
        zero_rows: also call it without rows, unless the input is a single vector. Each tensor whose
            first dimension is as long as the input's loses all entries. False where an extra input
            has no rows (the split sizes of ``GroupedLinear``), or the result is not defined (a
            mean).
        factor: multiple of plain torch's error that is allowed.
        floor: allowed besides, relative to the largest magnitude of the tensor (at least 1/16), in
            every dtype or in each; None is one unit in the last place of the coarsest dtype among
            the results.

    Raises:
        AssertionError: naming the call, the tensor, its error and the error allowed, and the
            element that deviates most: its place, its value and those that it is compared with.
        ArgumentError: ``dtypes`` is empty.
        ArgumentTypeError: ``op`` is no basic operation.
    """
    if not isinstance(op, BasicOperation):
        raise ArgumentTypeError.explained(
            "check_op checks basic operations",
            received=type(op).__name__,
            remedy="Check each part of a compound; check fused operations with check_fusion",
        )
    kwargs = dict(kwargs or {})
    has_rows = leading_dims(input) > 0
    for n, dtype in enumerate(each_dtype(dtypes)):
        ours = copy.deepcopy(op)
        inputs = {name: t.detach() for name, t in named_inputs(input, extra_inputs).items()}
        if dtype is not None:
            ours, inputs = ours.to(dtype), cast(inputs, dtype)
        names = [handle.name for handle in fusions()]
        tolerance = Tolerance(factor, _in_dtype(floor, dtype))
        with disable(*names):
            _check(ours, inputs, kwargs, zero_rows and has_rows, tolerance, once=n == 0)


def _in_dtype(
    floor: float | Mapping[torch.dtype, float] | None, dtype: torch.dtype | None
) -> float | None:
    if not isinstance(floor, Mapping):
        return floor
    return None if dtype is None else floor.get(dtype)


def _check(
    op: BasicOperation,
    inputs: dict[str, Tensor],
    kwargs: dict[str, Any],
    zero_rows: bool,
    tolerance: Tolerance,
    *,
    once: bool,
) -> None:
    where = _describe(op, inputs)
    check_protocol(op, inputs, kwargs, where)
    lower = autocast_dtype(inputs["input"].device)
    exact, plain = copy.deepcopy(op).to(torch.float64), copy.deepcopy(op)
    if lower is not None:
        plain = plain.to(lower)
    reference = Reference(
        Subject(lambda *ts: plain.reference(*ts, **kwargs), parameters_of(plain), plain),
        Subject(lambda *ts: exact.reference(*ts, **kwargs), parameters_of(exact), exact),
        inputs,
        tolerance,
        "plain torch",
        lower=lower,
    )
    ours = Subject(lambda *ts: op(*ts, **kwargs), parameters_of(op), op)
    ways = variants(
        parameters=len(ours.parameters),
        extra_inputs=any(t.is_floating_point() for t in list(inputs.values())[1:]),
        extra_outputs=bool(op.num_extra_outputs),
        zero_rows=zero_rows,
    )
    if once:
        ways += modes(len(ours.parameters))
        ways += [
            Variant(f"{name} changed between forward and backward", sets=name)
            for name in attributes(op, SETTINGS)
        ]
    for variant in ways:
        reference.check(ours, variant, where)


def _describe(op: nn.Module, inputs: Mapping[str, Tensor]) -> str:
    t = inputs["input"]
    dtype = str(t.dtype).removeprefix("torch.")
    return f"{type(op).__name__}({op.extra_repr()}), input {dtype} {list(t.shape)}"
