"""Lock files: how often each fusion matches in a model, to be told when one is lost.

A file has the schema ``opfuser.lock/1``, in YAML::

    schema: its name
    models:
      pkg.mod:build:
        call: {device, inputs}, inputs as texts such as 8x128:bfloat16, requires_grad
        versions: {opfuser, torch, triton}, that wrote the entry
        sequences: {path: {stage: {fusion: steps}}}, without zeros

The path is that of the Sequential in the model, "" for the model itself; the stages are ``joint``,
``forward`` and ``backward``. A comparison with an entry has the schema ``opfuser.check/1``::

    schema, name: the schema's name, that of the model
    matches, locked: steps that fusions built in the whole model now, and that are locked
    lost, gained: fusions that occur less or more often, in Sequentials of which the same is to be
        said: [{fusion, stage, paths, before, now (steps in each of them), why (lines)}]
    versions: [texts of those that differ from the ones that wrote the entry]
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..core.fusion import STAGES
from ..engine.plan import Plan, together
from ..errors import TargetError, counted
from ..explain.expectations import occurrences, reasons_by_place
from ..explain.folding import joined_paths
from ..registry import fusions
from ..runtime.libraries import version
from .conversion import no_sequences
from .inputs import as_text
from .target import Target

LOCK, CHECK = "opfuser.lock/1", "opfuser.check/1"
ALLOW_NONE = "or pass --allow-none if there is nothing to check"

Counts = dict[str, dict[str, dict[str, int]]]


def entry_of(target: Target, plans: Mapping[str, Plan]) -> dict[str, Any]:
    """The entry of a model in a lock file."""
    devices = [t.device.type for t in target.inputs]
    return {
        "call": {
            "device": devices[0] if devices else None,
            "inputs": [_input(t) for t in target.inputs],
        },
        "versions": _versions(),
        "sequences": _counts(plans),
    }


def read(file: Path) -> dict[str, Any]:
    """The entries of a lock file, by model.

    Raises:
        TargetError: the file cannot be read, or is no lock file of this schema.
    """
    yaml = _yaml()
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TargetError.explained(
            "There is no lock file yet",
            received=str(file),
            remedy="opfuser check with --update writes it",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise TargetError.explained(
            "The lock file cannot be read", received=f"{file}: {why}"
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f":{mark.line + 1}"
        raise TargetError.explained("A lock file is YAML", where=f"{file}{line}") from error
    if not isinstance(document, dict) or document.get("schema") != LOCK:
        schema = document.get("schema") if isinstance(document, dict) else None
        raise TargetError.explained(
            f"A lock file has the schema {LOCK}",
            where=str(file),
            received=f"schema {schema!r}" if schema else "none",
        )
    models = document.get("models")
    wrong = _wrong(models)
    if wrong:
        raise TargetError.explained(
            "A lock file is written by opfuser check --update",
            where=str(file),
            received=wrong,
            remedy="Restore it, or delete it and write it again",
        )
    return dict(models)  # type: ignore[arg-type]  # _wrong looked


def compared(
    entries: Mapping[str, Any], target: Target, plans: Mapping[str, Plan], file: Path
) -> dict[str, Any]:
    """What a model has lost and gained since its entry was written, as ``opfuser.check/1``.

    Raises:
        TargetError: the file has no entry of the model, or one of another call.
    """
    if target.name not in entries:
        raise TargetError.explained(
            "The lock file has no entry of this model",
            where=str(file),
            received=target.name,
            remedy=f"There are {', '.join(entries) or 'none'}; --update adds one",
        )
    entry, now = entries[target.name], entry_of(target, plans)
    if entry["call"] != now["call"]:
        raise TargetError.explained(
            f"The entry is of a call with {_call(entry['call'])}",
            where=f"{file}: {target.name}",
            received=_call(now["call"]),
            remedy="Pass the same --input, --device and --dtype, or write it again with --update",
        )
    changes = list(_changes(entry["sequences"], now["sequences"], plans))
    return {
        "schema": CHECK,
        "name": target.name,
        "matches": sum(_total(now["sequences"])),
        "locked": sum(_total(entry["sequences"])),
        "lost": [change for change in changes if change["now"] < change["before"]],
        "gained": [change for change in changes if change["now"] > change["before"]],
        "versions": [
            f"{name} {entry['versions'].get(name)} -> {version}"
            for name, version in now["versions"].items()
            if entry["versions"].get(name) != version
        ],
    }


def refuse_nothing(target: Target, plans: Mapping[str, Plan]) -> None:
    """Raises TargetError if there is no fusion in a model that could be lost."""
    if not plans:
        raise no_sequences(target, f", {ALLOW_NONE}")
    if not sum(_total(_counts(plans))):
        raise TargetError.explained(
            "There is nothing to check in a model without fusions",
            where=target.name,
            received=f"{counted(len(plans), 'Sequential')}, in which nothing is fused",
            remedy=f"opfuser explain says why; convert the model, {ALLOW_NONE}",
        )


def text(found: Mapping[str, Any]) -> str:
    """What :func:`compared` found, for people."""
    lost, gained = found["lost"], found["gained"]
    said = "fusions are lost" if lost else f"no fusion is lost; fused steps: {found['matches']}"
    lines = [f"{found['name']}: {said}"]
    if found["versions"] and (lost or gained):
        lines.append(f"since the lock: {', '.join(found['versions'])}")
    for change in lost:
        lines += [f"lost: {_change(change)}", *change["why"]]
    lines += [f"gained: {_change(change)}" for change in gained]
    if lost or gained:
        lines.append("--update locks what there is now.")
    return "\n".join(lines)


def _change(change: Mapping[str, Any]) -> str:
    where = joined_paths(change["paths"])
    place = f" in {where}" if where else ""
    each = " each" if len(change["paths"]) > 1 else ""
    numbers = f"{change['before']} -> {change['now']}"
    return f"{change['fusion']} ({change['stage']}){place}: {numbers}{each}"


def updated(entries: Mapping[str, Any], target: Target, plans: Mapping[str, Plan]) -> str:
    """The text of a lock file in which the model's entry is that of now; others stay."""
    models = {**entries, target.name: entry_of(target, plans)}
    document = {"schema": LOCK, "models": {name: models[name] for name in sorted(models)}}
    dumped: str = _yaml().safe_dump(
        document, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True
    )
    return f"# How often each fusion matches. opfuser check MODEL --lock FILE compares.\n{dumped}"


def _counts(plans: Mapping[str, Plan]) -> Counts:
    out: Counts = {}
    for path, plan in plans.items():
        out[path] = {}
        for stage in STAGES:
            names = [record.name for record in plan.history if record.stage == stage]
            counts = {name: occurrences(plan, stage, name) for name in names}
            counts = {name: count for name, count in sorted(counts.items()) if count}
            if counts:
                out[path][stage] = counts
    return out


def _total(counts: Counts) -> Iterator[int]:
    for stages in counts.values():
        for names in stages.values():
            yield from names.values()


def _changes(before: Counts, now: Counts, plans: Mapping[str, Plan]) -> Iterator[dict[str, Any]]:
    """The changes of each fusion, those of Sequentials of which the same is to be said together."""
    registered = {info.name for info in fusions()}
    found = []
    for path in dict.fromkeys((*before, *now)):
        for stage in STAGES:
            old, new = (side.get(path, {}).get(stage, {}) for side in (before, now))
            for name in dict.fromkeys((*old, *new)):
                locked, there = old.get(name, 0), new.get(name, 0)
                lost = there < locked
                why = _why(plans.get(path), name, name in registered) if lost else ()
                if there != locked:
                    found.append(((name, stage, locked, there, why), path))
    for (name, stage, *counts, why), paths in together(found).items():
        where = {"fusion": name, "stage": stage, "paths": paths}
        yield {**where, "before": counts[0], "now": counts[1], "why": list(why)}


def _why(plan: Plan | None, name: str, registered: bool) -> tuple[str, ...]:
    if not registered:
        return (f"  no fusion named {name} is registered any more",)
    if plan is None:
        return ("  the model calls no Sequential with this path any more",)
    return tuple(reasons_by_place({"": plan}, name))


def _input(t: Tensor) -> str:
    return as_text(t) + (", requires_grad" if t.requires_grad else "")


def _call(call: Mapping[str, Any]) -> str:
    return f"{' and '.join(call['inputs']) or 'no input'} on {call['device']}"


def _versions() -> dict[str, str]:
    triton = version("triton") or "none"  # torch runs without
    return {"opfuser": __version__, "torch": str(torch.__version__), "triton": triton}


def _wrong(models: Any) -> str:
    """What in the entries is not of the schema; empty if nothing is."""
    if not isinstance(models, dict):
        return f"models: {models!r}"
    for name, entry in models.items():
        if not isinstance(entry, dict):
            return f"{name}: {entry!r}"
        for key in ("call", "versions", "sequences"):
            if not isinstance(entry.get(key), dict):
                return f"{name}: {key}: {entry.get(key)!r}"
        call = entry["call"]
        if not isinstance(call.get("inputs"), list) or "device" not in call:
            return f"{name}: call: {call!r}"
        for path, stages in entry["sequences"].items():
            counts = stages.values() if isinstance(stages, dict) else [None]
            for stage in counts:
                values = stage.values() if isinstance(stage, dict) else [None]
                if not all(type(value) is int for value in values):
                    return f"{name}: sequences: {path!r}: {stages!r}"
    return ""


def _yaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ImportError as error:
        raise TargetError.explained(
            "A lock file is read and written with PyYAML, which is not installed",
            remedy="Run pip install opfuser[tools]",
        ) from error
