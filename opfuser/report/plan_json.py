"""Plans as plain data, for other programs: what ``opfuser explain --format json`` writes.

A document has the schema ``opfuser.explain/1``::

    schema, opfuser, torch: the schema's name, versions
    model: name, device, inputs [{shape, dtype, requires_grad}]
    sequences: {path: plan}
    traffic: {launches, read, written, saved_bytes, elsewhere: {launches, read, written}}, or null
    traffic_missing: why traffic is null, else null

and a plan the schema ``opfuser.plan/1``::

    schema: its name
    call: {dtype, device, autocast, grad, recipe}
    operations: [{name, type, note, quantized, high_precision}]; others name them by position
    forward, backward: [{indices, operation, path, fusion, launches, read, written, saved_bytes}],
        both in forward order; counts are null where traffic is, and of plain modules, whose
        kernels are counted elsewhere
    saved: [{operation, bytes}], or null
    fusions: [{name, stage, status, detail, matches, refusals [{at, code, detail}],
        near_misses [{at, matched, of, code, detail}]}], in the order in which they were tried
    edges, gemms, assumed: texts
    program: the code that runs, if it was asked for

Bytes are integers, dtypes and devices the names that torch gives them without ``torch.``; nothing
varies between equal calls. Fields may be added to a version of a schema; none is taken away.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import __version__
from ..engine.plan import FusionRecord, Plan, Step, together
from ..errors import TargetError
from ..explain.folding import like
from ..explain.plan_view import PlanView
from .target import Target, plans
from .traffic import ModelTraffic, StepTraffic, Traffic, model_traffic

EXPLAIN, PLAN = "opfuser.explain/1", "opfuser.plan/1"


class Explained(NamedTuple):
    """The plans of a model, and what they do in one call.

    Attributes:
        target: the model and its inputs.
        plans: by the path of the Sequential.
        traffic: of the same plans, or None.
        missing: why there is none; empty if there is, or if nobody asked.
    """

    target: Target
    plans: dict[str, Plan]
    traffic: ModelTraffic | None
    missing: str = ""

    def only(self, path: str) -> Explained:
        """The plan of one Sequential, and what its steps do.

        Args:
            path: a key of ``plans``. Of a model with one plan, what runs besides its steps stays.
        """
        if len(self.plans) == 1:
            return self
        traffic = None if self.traffic is None else self.traffic.only(path)
        return self._replace(plans={path: self.plans[path]}, traffic=traffic)


def explained(target: Target, *, count: bool = True) -> Explained:
    """The plans of a model with their traffic.

    Raises:
        TargetError: as :func:`opfuser.report.target.plans`.
    """
    found = plans(target)
    if not count:
        return Explained(target, found, None)
    try:
        traffic = model_traffic(target)
    except TargetError as error:
        return Explained(target, found, None, str(error))
    others = [
        path
        for path, plan in found.items()
        if path not in traffic.sequences or _cut(plan) != _cut(traffic.sequences[path].plan)
    ]
    if others:
        where = "" if len(found) == 1 else f" in {others[0]!r}"
        here = target.inputs[0].device.type
        why = f"They are counted for a GPU, which runs other steps{where} than {here} does."
        return Explained(target, found, None, why)
    return Explained(target, found, traffic)


def equal_plans(plans: dict[str, Plan]) -> list[list[str]]:
    """The paths of plans that are equal and differ in numbers of their paths alone, together."""
    return list(together(((like(path), plan), path) for path, plan in plans.items()).values())


def document(found: Explained, *, programs: bool = False) -> dict[str, Any]:
    """Plans and traffic as plain data, of the schema ``opfuser.explain/1``."""
    target, traffic = found.target, found.traffic
    sequences = {} if traffic is None else traffic.sequences
    return {
        "schema": EXPLAIN,
        "opfuser": __version__,
        "torch": torch.__version__,
        "model": {
            "name": target.name,
            "device": target.inputs[0].device.type if target.inputs else None,
            "inputs": [_tensor(t) for t in target.inputs],
        },
        "sequences": {
            path: plan_data(plan, sequences.get(path))
            | ({"program": plan.program} if programs else {})
            for path, plan in found.plans.items()
        },
        "traffic": None
        if traffic is None
        else {**traffic.totals._asdict(), "elsewhere": traffic.elsewhere._asdict()},
        "traffic_missing": found.missing or None,
    }


def plan_data(plan: Plan, traffic: Traffic | None = None) -> dict[str, Any]:
    """A plan as plain data, of the schema ``opfuser.plan/1``."""
    env, recipe = plan.env, plan.env.recipe
    return {
        "schema": PLAN,
        "call": {
            "dtype": _name(env.dtype),
            "device": env.device.type,
            "autocast": None if env.autocast_dtype is None else _name(env.autocast_dtype),
            "grad": env.grad_enabled,
            "recipe": None if recipe is None else type(recipe).__name__,
        },
        "operations": _operations(plan),
        "forward": _steps(plan.forward, None if traffic is None else traffic.forward),
        "backward": _steps(plan.backward, None if traffic is None else traffic.backward),
        "saved": None
        if traffic is None
        else [{"operation": i, "bytes": n} for i, n in sorted(traffic.saved.items())],
        "fusions": [_record(record) for record in plan.history],
        "edges": list(map(str, plan.edges)),
        "gemms": list(map(str, plan.gemms)),
        "assumed": list(plan.assumed),
    }


def read(file: Path) -> dict[str, Any]:
    """A document of the schema ``opfuser.explain/1`` from a file.

    Raises:
        TargetError: the file cannot be read, or holds something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TargetError.explained(
            "The file cannot be read", received=f"{file}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise TargetError.explained(
            "The file has to be JSON", received=f"{file}: {error}"
        ) from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != EXPLAIN:
        raise TargetError.explained(
            f"The file has to be of the schema {EXPLAIN}",
            received=f"{file}: {schema or 'no schema'}",
            remedy="Write it with opfuser explain --format json -o FILE",
        )
    return dict(found)


def _cut(plan: Plan) -> Any:
    # What has to be equal for counts of one plan to be those of another.
    return [(s.indices, s.fusion) for steps in (plan.forward, plan.backward) for s in steps]


def _name(value: torch.dtype) -> str:
    return str(value).removeprefix("torch.")


def _tensor(t: Tensor) -> dict[str, Any]:
    return {"shape": list(t.shape), "dtype": _name(t.dtype), "requires_grad": t.requires_grad}


def _operations(plan: Plan) -> list[dict[str, Any]]:
    view, declined = PlanView(plan), dict(plan.high_precision)
    return [
        {
            "name": name,
            "type": kind,
            "note": view.notes.get(i),
            "quantized": i in plan.quantized,
            "high_precision": str(declined[i]) if i in declined else None,
        }
        for i, (name, kind) in enumerate(zip(view.names, view.kinds))
    ]


def _steps(
    steps: tuple[Step, ...], traffic: tuple[StepTraffic, ...] | None
) -> list[dict[str, Any]]:
    out = []
    for n, step in enumerate(steps):
        # Kernels of plain modules are not told apart: they are counted elsewhere.
        own = None if traffic is None or not step.indices else traffic[n]
        out.append(
            {
                "indices": list(step.indices),
                "operation": type(step.op).__name__,
                "path": step.path or None,
                "fusion": step.fusion,
                "launches": None if own is None else own.counts.launches,
                "read": None if own is None else own.counts.read,
                "written": None if own is None else own.counts.written,
                "saved_bytes": None if own is None else own.saved,
            }
        )
    return out


def _record(record: FusionRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "stage": record.stage,
        "status": record.status,
        "detail": record.detail,
        "matches": [list(match) for match in record.matches],
        "refusals": [{"at": at, **why._asdict()} for at, why in record.refusals],
        "near_misses": [
            {"at": n.start, "matched": n.matched, "of": n.of, **n.stopped_by._asdict()}
            for n in record.near_misses
        ],
    }
