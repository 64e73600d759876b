"""Plans as one HTML page that needs nothing else: pictures, steps with bytes, and reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import NamedTuple

import torch
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from .. import __version__
from ..engine.folding import joined_names, joined_numbers
from ..engine.plan import FusionRecord, Plan, together
from ..engine.plan_view import PlanView, Stage, StepRow
from ..engine.reasons import everywhere, outcome, places, switched_off
from ..errors import counted
from .picture import picture
from .plan_json import equal_plans
from .shapes import DARK, FONT, LIGHT
from .sizes import in_bytes
from .traffic import ModelTraffic, StepTraffic, Totals, Traffic, total

__all__ = ["page"]

_TEMPLATE = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")


def page(
    plans: Mapping[str, Plan],
    title: str,
    traffic: ModelTraffic | None = None,
    missing: str = "",
) -> str:
    """One self-contained HTML page about the plans of a model.

    It loads nothing: styles and the script of its filter are inside. Without the script all of it
    can be read. It follows the reader's choice of light or dark, and can be printed.

    Args:
        plans: by the path of the Sequential; equal ones are shown together.
        title: the name of the model.
        traffic: of the same plans; without it the page has no bytes.
        missing: why there is no traffic.
    """
    counted = {} if traffic is None else traffic.sequences
    sections = [
        _section(n, paths, plans[paths[0]], counted.get(paths[0]), _share(paths, plans, traffic))
        for n, paths in enumerate(equal_plans(dict(plans)))
    ]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_TEMPLATE).render(
        title=title,
        figures=_figures(plans, traffic),
        outside="" if traffic is None else traffic.totals.outside,
        sections=sections,
        missing=missing,
        light=Markup(LIGHT),
        dark=Markup(DARK),
        font=Markup(FONT),
        versions=f"opfuser {__version__}, torch {torch.__version__}",
    )


class _Cell(NamedTuple):
    """A number in a table: as text, and its share of the whole pass in percent."""

    text: str
    share: int = 0


class _Row(NamedTuple):
    """A row of a table of steps.

    Attributes:
        step: what the row says; of a heading only ``ops``, which is about all repetitions.
        is_heading: whether it is one.
        inside: whether a heading is above it.
        cells: launches, bytes read, written and saved; none if they are not known.
    """

    step: StepRow
    is_heading: bool
    inside: bool
    cells: tuple[_Cell, ...]


class _Table(NamedTuple):
    """The steps of a pass, in the order in which they run."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[_Row, ...]
    note: str


class _Entry(NamedTuple):
    """What became of a fusion; or of quantised compute.

    Attributes:
        name, stage, status, outcome: as texts.
        lines: sentences.
        is_open: whether the sentences are shown before anyone asks for them.
    """

    name: str
    stage: str
    status: str
    outcome: str
    lines: tuple[str, ...]
    is_open: bool


class _Section(NamedTuple):
    """What the page says about one plan.

    Attributes:
        anchor: in the page.
        path: of the Sequentials.
        facts: about the call.
        counted: launches and bytes of these Sequentials together; empty if there are no others.
        svg: the picture.
        tables: of both passes.
        entries: of all fusions.
        text: of the plan.
    """

    anchor: str
    path: str
    facts: str
    counted: str
    svg: Markup
    tables: tuple[_Table, ...]
    entries: tuple[_Entry, ...]
    text: str


def _share(
    paths: Sequence[str], plans: Mapping[str, Plan], traffic: ModelTraffic | None
) -> Totals | None:
    """What equal Sequentials do together; None if it is not known, or if there are no others."""
    return None if traffic is None or len(plans) == 1 else traffic.only(*paths).totals


def _section(
    n: int, paths: Sequence[str], plan: Plan, traffic: Traffic | None, totals: Totals | None
) -> _Section:
    env, view = plan.env, PlanView(plan)
    recipe = "" if env.recipe is None else f", recipe {type(env.recipe).__name__}"
    each = "" if len(paths) == 1 else f"; {len(paths)} equal Sequentials, of which this is one"
    autocast = "off" if env.autocast_dtype is None else _name(env.autocast_dtype)
    facts = (
        f"{counted(len(plan.basic_ops), 'basic operation')}, {_name(env.dtype)} on {env.device}, "
        f"autocast {autocast}, gradients {'on' if env.grad_enabled else 'off'}{recipe}{each}"
    )
    entries = [_entry(view, record) for record in plan.history]
    entries.sort(key=lambda entry: not entry.is_open)  # what happened is above what did not
    return _Section(
        f"plan-{n}",
        joined_names(paths) or "The model",
        facts,
        "" if totals is None else ", ".join(map(" ".join, totals.figures)),
        Markup(picture(plan, traffic)),
        tuple(_tables(view, traffic)),
        (*_quantised(view), *entries),
        str(plan),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _figures(plans: Mapping[str, Plan], traffic: ModelTraffic | None) -> list[tuple[str, str]]:
    """Numbers about the whole model, with what they count."""
    found = [
        (str(sum(len(plan.basic_ops) for plan in plans.values())), "basic operations"),
        (str(sum(len(plan.forward) for plan in plans.values())), "forward steps"),
        (str(sum(len(plan.backward) for plan in plans.values())), "backward steps"),
    ]
    return found if traffic is None else [*found, *traffic.totals.figures]


# Tables.


def _tables(view: PlanView, traffic: Traffic | None) -> Iterator[_Table]:
    forward, backward = (None, None) if traffic is None else (traffic.forward, traffic.backward)
    yield _Table("Forward", *_body(view, "forward", forward), "")
    if not view.plan.backward:
        yield _Table("Backward", (), (), "No gradient is needed.")
        return
    note = f"No gradient is needed of {places(view, view.idle)}." if view.idle else ""
    title = "Backward, in the order in which it runs"
    yield _Table(title, *_body(view, "backward", backward), note)


def _body(
    view: PlanView, stage: Stage, counts: Sequence[StepTraffic] | None
) -> tuple[tuple[str, ...], tuple[_Row, ...]]:
    """The titles of the columns, and the rows."""

    def row(step: StepRow, inside: bool, *columns: Sequence[int]) -> _Row:
        cells = _cells(stage, counts, columns) if counts is not None else ()
        if step.place == "-":  # kernels of plain modules are not told apart
            cells = (_Cell("–"),) * len(cells)
        return _Row(step, not step.steps, inside, cells)

    rows = []
    told = view.runs_backward if stage == "backward" else lambda _: True
    for heading, _, steps in view.layers(stage, told):
        if heading:
            everything = [[n] for step in steps for n in step.steps]
            rows.append(row(StepRow("", heading, "", "", ()), False, *everything))
        rows += [row(step, bool(heading), step.steps) for step in steps]
    titles = ("Ops", "Operations")
    counted = ("Launches", "Read", "Written", "Saved")[: 4 if stage == "forward" else 3]
    return titles + counted * (counts is not None), tuple(rows)


def _cells(
    stage: str, counts: Sequence[StepTraffic], columns: Sequence[Sequence[int]]
) -> tuple[_Cell, ...]:
    """The sum over columns, where repetitions differ from the least to the most.

    Args:
        stage: the pass.
        counts: of its steps.
        columns: for each step that is added up, its repetitions.
    """
    whole = [*total(c.counts for c in counts), sum(c.saved for c in counts)]
    cells = []
    for n, most in enumerate(whole if stage == "forward" else whole[:3]):
        values = [[(*counts[k].counts, counts[k].saved)[n] for k in column] for column in columns]
        low, high = sum(map(min, values)), sum(map(max, values))
        every = sum(map(sum, values))
        show = str if n == 0 else in_bytes
        text = show(low) if low == high else f"{show(low)} – {show(high)}"
        share = round(100 * every / most) if most and n else 0
        cells.append(_Cell(text, share))
    return tuple(cells)


# Reasons.


def _entry(view: PlanView, record: FusionRecord) -> _Entry:
    off = switched_off(record)
    lines = () if off else tuple(everywhere(view, record))
    status = off.partition(" ")[0] or record.status
    said = off.partition(" (")[2].removesuffix(")") if off else outcome(record)
    is_open = not off and bool(record.matches or record.refusals)
    return _Entry(record.name, record.stage, status, said, lines, is_open)


def _quantised(view: PlanView) -> Iterator[_Entry]:
    """One entry about quantised compute, if a recipe is active."""
    plan = view.plan
    if plan.env.recipe is None:
        return
    declined = together((no, at) for at, no in plan.high_precision)
    lines = [f"{places(view, at)}: {no}" for no, at in declined.items()]
    lines += [str(edge) for edge in plan.edges]
    lines += [str(choice) for choice in plan.gemms]
    count = f"operations {joined_numbers(plan.quantized)}" if plan.quantized else "no operation"
    status = "matched" if plan.quantized else "refused"
    yield _Entry("quantised compute", "both passes", status, count, tuple(lines), True)
