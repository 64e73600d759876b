"""What became of fusions, as text: in a whole plan, and of one fusion at one place."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ..errors import UnknownFusionError, choose_among, counted, explain
from ..fused import FUSIONS
from ..fusion import Fusion, NearMiss, Refusal
from ..registry import registry
from .folding import joined_names, joined_numbers, like, place_in_layer
from .plan import FusionRecord, Plan

__all__ = [
    "everywhere",
    "fusion_lines",
    "named",
    "outcome",
    "places",
    "span",
    "switched_off",
    "why",
    "wrapped",
]

WIDTH = 80
_BUILT_IN = frozenset(rule.name for rule in FUSIONS)
_MOST_PLACES = 6


def wrapped(text: str, indent: int = 0, hang: int = 4) -> list[str]:
    """Lines of at most 80 columns; those behind the first are indented by ``hang`` more."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hang),
        break_on_hyphens=False,
    )


def span(indices: Sequence[int]) -> str:
    """Consecutive operations: ``3-5``."""
    if not indices:
        return "-"
    return str(indices[0]) if len(indices) == 1 else f"{indices[0]}-{indices[-1]}"


def named(plan: Plan, at: int) -> str:
    """An operation by name and kind: ``layers.3.norm RMSNorm``."""
    kind = type(plan.basic_ops[at]).__name__
    return f"{plan.names[at]} {kind}".strip() if plan.names else kind


def places(plan: Plan, indices: Iterable[int]) -> str:
    """Operations, those of equal layers together: ``layers.0-26.norm RMSNorm``.

    A single one with its index: ``op 3 (1.0 GELU)``. Without names they are listed by index.
    """
    found = list(dict.fromkeys(indices))
    if len(found) == 1:
        name = named(plan, found[0])
        return f"op {found[0]} ({name})"
    if not plan.names:
        return f"ops {joined_numbers(found)}"
    groups: dict[tuple[str, str], list[str]] = {}
    for at in found:
        kind = type(plan.basic_ops[at]).__name__
        groups.setdefault((place_in_layer(plan.names[at]), kind), []).append(plan.names[at])
    texts = [f"{joined_names(names)} {kind}".strip() for (_, kind), names in groups.items()]
    if len(texts) > _MOST_PLACES:
        texts[_MOST_PLACES - 1 :] = [f"{len(texts) - _MOST_PLACES + 1} more kinds of places"]
    return ", ".join(texts)


def fusion_lines(plan: Plan) -> list[str]:
    """The section of a plan's text about fusions: what matched, and where the rest did not."""
    lines: list[str] = []
    idle: dict[str, list[str]] = {}
    for record in plan.history:
        told = [*_refusal_lines(plan, record), *_odd_lines(plan, record)]
        off = switched_off(record)
        if off:
            idle.setdefault(off, []).append(record.name)
        elif record.status == "unmatched" and not told:
            idle.setdefault("not found", []).append(record.name)
        else:
            lines += wrapped(f"{record.name} ({record.stage}): {outcome(record)}", 2)
            lines += told
    for status, names in idle.items():
        lines += wrapped(f"{status}: {', '.join(names)}", 2)
    return ["fusions:", *lines] if lines else ["fusions: none is registered"]


def switched_off(record: FusionRecord) -> str:
    """What switched a fusion off, or kept it from being tried; empty if nothing did."""
    if record.status in ("skipped", "disabled"):
        return f"{record.status} ({record.detail})"
    # A place that a boundary splits would be refused like the others.
    own = {no for _, no in record.refusals if no.code != "GROUP_SPLIT"}
    if record.status == "refused" and {no.code for no in own} == {"DISABLED"}:
        return f"disabled ({', '.join(sorted(no.detail for no in own))})"
    return ""


def outcome(record: FusionRecord) -> str:
    """How often a fusion matched, and at how many places it was refused."""
    matches, refused = len(record.matches), len({at for at, _ in record.refusals})
    found = "1 match" if matches == 1 else f"{matches} matches" if matches else ""
    declined = f"refused at {refused} place{'s' * (refused > 1)}" if refused else ""
    return ", ".join(filter(None, (found, declined))) or "not found"


def _refusal_lines(plan: Plan, record: FusionRecord) -> list[str]:
    lines: list[str] = []
    for no, at in _reasons(record).items():
        lines += wrapped(f"{places(plan, at)}: {no}{_modules(plan, no, at)}", 4)
    return lines


def _reasons(record: FusionRecord) -> dict[Refusal, list[int]]:
    """The places of each refusal."""
    reasons: dict[Refusal, list[int]] = {}
    for at, no in record.refusals:
        reasons.setdefault(no, []).append(at)
    return reasons


def _modules(plan: Plan, no: Refusal, indices: Sequence[int]) -> str:
    """The paths of the plain modules that a refusal is about, in brackets."""
    if no.code != "GROUP_SPLIT":
        return ""
    paths: dict[str, None] = {}
    for at in indices:
        n = next(n for n, step in enumerate(plan.forward) if at in step.indices)
        near = [*plan.forward[n:], *reversed(plan.forward[:n])]
        paths.update(
            (step.path, None)
            for step in [s for s in near if s.path and type(s.op).__name__ in no.detail][:1]
        )
    alike = {like(path) for path in paths}
    if not paths:
        return ""
    return f" ({joined_names(list(paths)) if len(alike) == 1 else ', '.join(paths)})"


def _odd_lines(plan: Plan, record: FusionRecord) -> list[str]:
    """Near misses worth telling: where most like places matched, or of a fusion of the user.

    Others are too many: most patterns begin somewhere in every layer.
    """
    if record.status == "unmatched":
        near = record.near_miss
        theirs = record.name not in _BUILT_IN
        shown = near is not None and (theirs or near.stopped_by.code == "SUBCLASS")
        return wrapped(str(near), 4) if shown else []
    matched = Counter(
        _kind(plan, i) for match in record.matches for i in match if _in_layer(plan, i)
    )
    missed = Counter(_last_kind(plan, near) for near in record.near_misses)
    refused = {at for at, _ in record.refusals}
    groups: dict[tuple[int, Refusal], list[int]] = {}
    for near in record.near_misses:
        kind = _last_kind(plan, near)
        told = refused.isdisjoint(range(near.start, near.start + near.matched))
        if told and missed[kind] < matched[kind]:
            groups.setdefault((near.matched, near.stopped_by), []).append(near.start)
    lines: list[str] = []
    for (_, no), at in groups.items():
        lines += wrapped(f"not from {places(plan, at)}: {no}", 4)
    return lines


def _kind(plan: Plan, at: int) -> tuple[str, type]:
    return place_in_layer(plan.names[at]) if plan.names else "", type(plan.basic_ops[at])


def _last_kind(plan: Plan, near: NearMiss) -> tuple[str, type]:
    """Name and type of the last operation that fitted."""
    return _kind(plan, near.start + near.matched - 1)


def _in_layer(plan: Plan, at: int) -> bool:
    """Whether something follows the number in the name: like places are in other layers."""
    return bool(plan.names) and "*" in like(plan.names[at]).split(".")[:-1]


def why(plan: Plan, name: str, at: int | None = None) -> str:
    """What became of a fusion; see :meth:`Plan.why`."""
    records = [record for record in plan.history if record.name == name]
    if not records:
        raise UnknownFusionError(
            explain(
                "A plan knows the fusions that were registered when it was made",
                received=repr(name),
                remedy=choose_among(name, (r.name for r in plan.history)) or "None was",
            )
        )
    if at is not None and not 0 <= at < len(plan.basic_ops):
        raise IndexError(
            explain(
                "An operation of a plan is named by its index",
                received=f"at={at!r} for {counted(len(plan.basic_ops), 'operation')}",
            )
        )
    lines: list[str] = []
    for record in records:
        told = everywhere(plan, record) if at is None else _at(plan, record, at)
        lines += wrapped(f"{name} ({record.stage}): {switched_off(record) or record.status}")
        lines += _pattern(record)
        for text in told:
            lines += wrapped(text, 2)
    return "\n".join(lines)


def _pattern(record: FusionRecord) -> list[str]:
    """The pattern, if the fusion is still registered and has one."""
    for handle in registry:
        if (handle.name, handle.stage) == (record.name, record.stage):
            rule = handle.function
            if isinstance(rule, Fusion):
                texts = [e.name + "?" * e.optional for e in rule.elements]
                return wrapped(f"pattern: {', '.join(texts)}", 2)
    return []


def everywhere(plan: Plan, record: FusionRecord) -> Iterator[str]:
    """What became of a fusion at all places, equal ones together."""
    for length in sorted({len(match) for match in record.matches}):
        starts = [match[0] for match in record.matches if len(match) == length]
        yield f"matched {counted(length, 'operation')} from {places(plan, starts)}"
    for no, starts in _reasons(record).items():
        yield f"refused at {places(plan, starts)}: {no}{_modules(plan, no, starts)}"
    refused = {at for at, _ in record.refusals}
    stops: dict[str, list[int]] = {}
    for near in record.near_misses:
        if near.start not in refused:
            stops.setdefault(_stopped(near), []).append(near.start)
    for text, starts in stops.items():
        yield text.format(places(plan, starts))
    if record.status == "unmatched" and not record.near_misses:
        yield "no operation begins the pattern"


def _stopped(near: NearMiss) -> str:
    count = "1 operation fits" if near.matched == 1 else f"{near.matched} operations fit"
    detail = str(near.stopped_by).replace("{", "{{").replace("}", "}}")
    return f"{count} from {{}}, then {detail}"


def _at(plan: Plan, record: FusionRecord, at: int) -> Iterator[str]:
    if record.detail:
        return
    here = f"op {at} ({named(plan, at)})"
    for match in record.matches:
        if at in match:
            yield f"matched ops {span(match)}, which include {here}"
            return
    refusals = dict(record.refusals)
    near = {n.start: n for n in record.near_misses if n.start <= at <= n.start + n.matched}
    for start in sorted({*near, *([at] if at in refusals else [])}):
        place = places(plan, [start])
        if start in refusals:
            no = refusals[start]
            yield f"refused at {place}: {no}{_modules(plan, no, [start])}"
        else:
            yield _stopped(near[start]).format(place)
    if not near and at not in refusals:
        yield f"its pattern does not begin at {here}, nor reach it"
    steps = plan.backward if record.stage == "backward" else plan.forward
    for step in steps:
        if at in step.indices and step.fusion is not None:
            yield f"{step.fusion} has fused ops {span(step.indices)}, which include {here}"
