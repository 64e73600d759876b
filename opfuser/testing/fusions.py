"""check_fusion: a fusion against the operations that it replaces."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.fusion import Fusion, FusionFunction, Stage
from ..engine.plan import Plan
from ..engine.recorded.recordable import unrecorded
from ..errors import ArgumentError, UnknownFusionError, choose_among
from ..fuser import OperationFuser
from ..registry import FusionHandle, registry
from ..sequential import Sequential
from .calls import Subject, named_inputs
from .compare import Reference, Tolerance, cast, each_dtype, parameters_of
from .contexts import check_saved_by, only
from .plans import record_text
from .saving import Unread, check_saving
from .state import Again
from .steps import first_deviation
from .variants import Variant, leading_dims, modes, variants, wanting


@unrecorded()  # what operations do shows in calls of theirs
def check_fusion(
    fusion: str | FusionHandle | Fusion | FusionFunction,
    ops: Sequence[nn.Module],
    input: Tensor,
    *extra_inputs: Tensor,
    stage: Stage | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    zero_rows: bool = True,
    factor: float = 2.0,
    floor: float | None = None,
) -> None:
    """Compares a fusion with the operations that it replaces.

    - It matches ``ops``.
    - Outputs and all gradients are right in every pairing of passes: this fusion on and off, all
      registered fusions of the other pass on and off. A joint fusion is one pairing. The reference
      is an unfused call in float64; the error may be ``factor`` times that of an unfused call in
      the same dtype, plus a floor.
    - A forward fusion saves what the unfused operations save: their backward reads it.
    - The caller's tensors are not written to; outputs have the same shapes, dtypes and devices, and
      the gradients that ``fuser_backward`` returns have those of their tensors.
    - A fused forward saves nothing without ``ctx.requires_grad``, and no more bytes than the
      unfused operations, not counting parameters, whichever gradients are needed; unless its class
      sets ``saves_more = True``, or under autocast.
    - Some gradient in ``ctx.needs`` reads each tensor that a joint fusion saves: a warning names
      the others if everything else is correct.

    Each pairing is called as :func:`check_op` calls an operation. The operations are copied first.
    In the first dtype, with this fusion alone:

    - A single row; ``no_grad``; eval and inference mode; parameters replaced between forward and
      backward.
    - A second call after changes agrees with the unfused operations after the same changes:
      parameters and buffers changed in place; parameters replaced; all numbers among the public
      attributes of the operations, set between the calls and by an operation during forward; each
      flag. Values with which the unfused operations fail are skipped.
    - An input of another dtype, and everything in another dtype. Such a call may fail, but must not
      be wrong.

    Args:
        fusion: a registered name or handle, a ``Fusion``, or a fusion function.
        ops: operations, compounds and Sequentials that form one group. Channels may be bound.
        input: the input, on the device to check on.
        *extra_inputs: extra inputs, in operation order.
        stage: of a fusion function that is not registered.
        dtypes: cast parameters and floating-point inputs to each of these in turn.
        zero_rows, factor, floor: as for :func:`check_op`.

    Raises:
        AssertionError: see :func:`check_op`, naming the pairing too, and the first step of the
            plan whose results deviate when the steps are run one after the other.
        ArgumentError: ``ops`` do not form one group, the stage is missing, or ``dtypes`` is empty.
        UnknownFusionError: no fusion of that name is registered.

    Warns:
        UnreadTensorWarning: the fusion is correct, and saves a tensor that no needed gradient
            reads; names the tensor and its bytes.
    """
    unread = Unread()
    with _registered(fusion, stage) as handle:
        for n, dtype in enumerate(each_dtype(dtypes)):
            seq = Sequential(*copy.deepcopy(list(ops)))
            inputs = named_inputs(input.detach(), [t.detach() for t in extra_inputs])
            if dtype is not None:
                seq, inputs = seq.to(dtype), cast(inputs, dtype)
            rows = zero_rows and leading_dims(input) > 0
            tolerance = Tolerance(factor, floor)
            _check(handle, seq, inputs, rows, tolerance, unread, once=n == 0)
    unread.warn(stacklevel=3)  # beyond the frame of unrecorded()


@contextmanager
def _registered(
    fusion: str | FusionHandle | Fusion | FusionFunction, stage: Stage | None
) -> Iterator[FusionHandle]:
    """The handle of a fusion, which is registered inside the block if it is not yet."""
    for handle in registry:
        if fusion in (handle.name, handle, handle.function):
            yield handle
            return
    if isinstance(fusion, str):
        raise UnknownFusionError.explained(
            "check_fusion checks a fusion by its registered name",
            received=repr(fusion),
            remedy=choose_among(fusion, (handle.name for handle in registry)),
        )
    if isinstance(fusion, FusionHandle):
        stage = fusion.stage
        fusion = fusion.function
    elif isinstance(fusion, Fusion):
        stage = fusion.stage
    if stage is None:
        raise ArgumentError.explained(
            "The stage of a fusion function that is not registered must be given",
            received=repr(fusion),
            remedy='Pass stage="forward", "backward" or "joint"',
        )
    with registry.add(fusion, stage) as handle:
        yield handle


class _Pairing(NamedTuple):
    name: str
    fusions: frozenset[str]


def _pairings(handle: FusionHandle, seq: Sequential, inputs: Sequence[Tensor]) -> list[_Pairing]:
    """The pairings of fused and unfused passes whose plans differ, the unfused one first."""
    other: dict[Stage, Stage] = {"forward": "backward", "backward": "forward"}
    partner = other.get(handle.stage)
    partners = frozenset(h.name for h in registry if h.stage == partner and not h.disabled_by())
    mine = frozenset({handle.name})
    out = [_Pairing("unfused", frozenset()), _Pairing(f"{handle.stage} fused", mine)]
    if partners:
        out += [
            _Pairing(f"{partner} fused", partners),
            _Pairing("forward and backward fused", mine | partners),
        ]
    seen: list[Any] = []
    distinct = []
    for pairing in out:
        with only(pairing.fusions):
            plan = seq.plan(*inputs)
        steps = [[(s.indices, s.fusion) for s in pass_] for pass_ in (plan.forward, plan.backward)]
        if steps not in seen:
            seen.append(steps)
            distinct.append(pairing)
    return distinct


def _check(
    handle: FusionHandle,
    seq: Sequential,
    inputs: dict[str, Tensor],
    zero_rows: bool,
    tolerance: Tolerance,
    unread: Unread,
    *,
    once: bool,
) -> None:
    dtype = str(inputs["input"].dtype).removeprefix("torch.")
    where = f"fusion {handle.name!r}, input {dtype} {list(inputs['input'].shape)}"
    wanting_grad = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs.values()]
    with only([handle.name]):
        _check_matches(handle, seq.plan(*wanting_grad))
    _check_is_one_run(seq)
    if handle.stage == "forward":
        check_saved_by(handle.name, seq, inputs, tolerance, where)
    plain = _subject(copy.deepcopy(seq), frozenset())
    exact = _subject(copy.deepcopy(seq).to(torch.float64), frozenset())
    reference = Reference(plain, exact, inputs, tolerance, "unfused", locate=first_deviation)
    parameters = parameters_of(seq)
    extra_inputs = any(t.is_floating_point() for t in list(inputs.values())[1:])
    ways = variants(
        parameters=len(parameters),
        extra_inputs=extra_inputs,
        extra_outputs=bool(seq.num_extra_outputs),
        zero_rows=zero_rows,
    )
    pairings = _pairings(handle, seq, wanting_grad)[1:]
    for pairing in pairings:
        ours = _subject(seq, pairing.fusions)._replace(parameters=parameters)
        more = modes(len(parameters)) if once and pairing is pairings[0] else []
        for variant in ways + more:
            reference.check(ours, variant, f"{where}, {pairing.name}")
    asking = wanting(parameters=len(parameters), extra_inputs=extra_inputs)
    check_saving(handle, seq, inputs, parameters, asking if once else asking[:1], where, unread)
    if once:
        _check_again(handle, seq, inputs, tolerance, where, pairings[0], unread)


def _check_again(
    handle: FusionHandle,
    seq: Sequential,
    inputs: dict[str, Tensor],
    tolerance: Tolerance,
    where: str,
    pairing: _Pairing,
    unread: Unread,
) -> None:
    """Calls ``seq`` after changes, which are not undone."""

    def check(changed: Sequential, inputs: Mapping[str, Tensor], where: str) -> None:
        check_saving(handle, changed, inputs, parameters_of(changed), [Variant()], where, unread)

    again = Again(
        (seq, copy.deepcopy(seq)),
        lambda one: _subject(one, pairing.fusions),
        lambda one: _subject(one, frozenset()),
        inputs,
        tolerance.floor,
    )
    again.check(f"{where}, {pairing.name}")
    again.check_dtypes(f"{where}, {pairing.name}", check)


def _subject(seq: Sequential, fusions: frozenset[str]) -> Subject:
    def function(*tensors: Tensor) -> Any:
        with only(fusions):
            return seq(*tensors)

    return Subject(function, parameters_of(seq), seq, fusions)


def _check_matches(handle: FusionHandle, plan: Plan) -> None:
    record = plan.record(handle.name)
    if not record.matches:
        raise AssertionError(record_text("The fusion must match", [plan], handle.name))


def _check_is_one_run(seq: Sequential) -> None:
    groups = seq._module_groups or []
    if len(groups) != 1 or not isinstance(groups[0], OperationFuser):
        names = ", ".join(type(group).__name__ for group in groups)
        raise ArgumentError.explained(
            "check_fusion takes operations that make up one run",
            received=f"runs and modules: {names}",
            remedy="Leave out plain modules, subclasses of Sequential, and hooks",
        )
