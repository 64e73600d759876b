"""What became of fusions, as text: in a whole plan, and of one fusion at one place."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ..core.fusion import Fusion, Refusal
from ..engine.plan import FusionRecord, Plan, span, together
from ..errors import UnknownFusionError, choose_among, counted, explain
from ..fused import FUSIONS
from ..registry import registry
from .folding import joined_names, joined_numbers, like, place_in_layer
from .plan_view import PlanView

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


def places(view: PlanView, indices: Iterable[int]) -> str:
    """Operations, those of equal layers together: ``layers.0-26.norm RMSNorm``.

    A single one with its index: ``op 3 (1.0 GELU)``. Without names they are listed by index.
    """
    found = list(dict.fromkeys(indices))
    if len(found) == 1:
        return f"op {found[0]} ({view.named(found[0])})"
    if not view.plan.names:
        return f"ops {joined_numbers(found)}"
    groups = together((_kind(view, at), view.names[at]) for at in found)
    texts = [f"{joined_names(names)} {kind}".strip() for (_, kind), names in groups.items()]
    if len(texts) > _MOST_PLACES:
        texts[_MOST_PLACES - 1 :] = [f"{len(texts) - _MOST_PLACES + 1} more kinds of places"]
    return ", ".join(texts)


def fusion_lines(view: PlanView) -> list[str]:
    """The section of a plan's text about fusions: what matched, and where the rest did not."""
    lines: list[str] = []
    idle: dict[str, list[str]] = {}
    for record in view.plan.history:
        told = [line for text in _refusals(view, record) for line in wrapped(text, 4)]
        told += _odd_lines(view, record)
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


def _refusals(view: PlanView, record: FusionRecord) -> Iterator[str]:
    for no, at in record.reasons.items():
        yield f"{places(view, at)}: {no}{_modules(view, no, at)}"


def _modules(view: PlanView, no: Refusal, indices: Sequence[int]) -> str:
    """The paths of the plain modules that a refusal is about, in brackets."""
    if no.code != "GROUP_SPLIT":
        return ""
    forward = view.plan.forward
    paths: list[str] = []
    for at in indices:
        n = next(n for n, step in enumerate(forward) if at in step.indices)
        near = (*forward[n:], *reversed(forward[:n]))
        paths += [s.path for s in near if s.path and type(s.op).__name__ in no.detail][:1]
    paths = list(dict.fromkeys(paths))
    if not paths:
        return ""
    alike = len(set(map(like, paths))) == 1
    return f" ({joined_names(paths) if alike else ', '.join(paths)})"


def _odd_lines(view: PlanView, record: FusionRecord) -> list[str]:
    """Near misses worth telling: where most like places matched, or of a fusion of the user.

    Others are too many: most patterns begin somewhere in every layer.
    """
    if record.status == "unmatched":
        near = record.near_miss
        theirs = record.name not in _BUILT_IN
        shown = near is not None and (theirs or near.stopped_by.code == "SUBCLASS")
        return wrapped(str(near), 4) if shown else []
    matched = Counter(
        _kind(view, i) for match in record.matches for i in match if _in_layer(view, i)
    )
    # Each by the last operation that fitted.
    kinds = [_kind(view, near.start + near.matched - 1) for near in record.near_misses]
    missed = Counter(kinds)
    refused = {at for at, _ in record.refusals}
    groups = together(
        ((near.matched, near.stopped_by), near.start)
        for near, kind in zip(record.near_misses, kinds)
        if missed[kind] < matched[kind]
        and refused.isdisjoint(range(near.start, near.start + near.matched))
    )
    return [
        line
        for (_, no), at in groups.items()
        for line in wrapped(f"not from {places(view, at)}: {no}", 4)
    ]


def _kind(view: PlanView, at: int) -> tuple[str, str]:
    return place_in_layer(view.names[at]), view.kinds[at]


def _in_layer(view: PlanView, at: int) -> bool:
    """Whether something follows the number in the name: like places are in other layers."""
    return "*" in like(view.names[at]).split(".")[:-1]


def why(plan: Plan, name: str, at: int | None = None) -> str:
    """What became of a fusion; see :meth:`Plan.why`."""
    records = [record for record in plan.history if record.name == name]
    if not records:
        raise UnknownFusionError.explained(
            "A plan knows the fusions that were registered when it was made",
            received=repr(name),
            remedy=choose_among(name, (r.name for r in plan.history)) or "None was",
        )
    if at is not None and not 0 <= at < len(plan.basic_ops):
        raise IndexError(
            explain(
                "An operation of a plan is named by its index",
                received=f"at={at!r} for {counted(len(plan.basic_ops), 'operation')}",
            )
        )
    view = PlanView(plan)
    lines: list[str] = []
    for record in records:
        told = everywhere(view, record) if at is None else _at(view, record, at)
        lines += wrapped(f"{name} ({record.stage}): {switched_off(record) or record.status}")
        for rule in rules_of(record):
            texts = [element.name + "?" * element.optional for element in rule.elements]
            lines += wrapped(f"pattern: {', '.join(texts)}", 2)
        for text in told:
            lines += wrapped(text, 2)
    return "\n".join(lines)


def rules_of(record: FusionRecord) -> list[Fusion]:
    """The fusion of a record, if it is still registered and has a pattern."""
    named = (h.function for h in registry if (h.name, h.stage) == (record.name, record.stage))
    return [rule for rule in named if isinstance(rule, Fusion)]


def everywhere(view: PlanView, record: FusionRecord) -> Iterator[str]:
    """What became of a fusion at all places, equal ones together."""
    matches = together((len(match), match[0]) for match in record.matches)
    for length, starts in sorted(matches.items()):
        yield f"matched {counted(length, 'operation')} from {places(view, starts)}"
    for text in _refusals(view, record):
        yield f"refused at {text}"
    refused = {at for at, _ in record.refusals}
    near = (n for n in record.near_misses if n.start not in refused)
    for (matched, no), starts in together(
        ((n.matched, n.stopped_by), n.start) for n in near
    ).items():
        yield _stopped(view, matched, no, starts)
    if record.status == "unmatched" and not record.near_misses:
        yield "no operation begins the pattern"


def _stopped(view: PlanView, matched: int, no: Refusal, starts: Sequence[int]) -> str:
    fit = "fits" if matched == 1 else "fit"
    return f"{counted(matched, 'operation')} {fit} from {places(view, starts)}, then {no}"


def _at(view: PlanView, record: FusionRecord, at: int) -> Iterator[str]:
    if record.detail:
        return
    here = f"op {at} ({view.named(at)})"
    for match in record.matches:
        if at in match:
            yield f"matched ops {span(match)}, which include {here}"
            return
    refusals = dict(record.refusals)
    near = {n.start: n for n in record.near_misses if n.start <= at <= n.start + n.matched}
    for start in sorted({*near, *([at] if at in refusals else [])}):
        if start in refusals:
            no = refusals[start]
            yield f"refused at {places(view, [start])}: {no}{_modules(view, no, [start])}"
        else:
            yield _stopped(view, near[start].matched, near[start].stopped_by, [start])
    if not near and at not in refusals:
        yield f"its pattern does not begin at {here}, nor reach it"
    for step in view.steps(record.stage):
        if at in step.indices and step.fusion is not None:
            yield f"{step.fusion} has fused ops {span(step.indices)}, which include {here}"
