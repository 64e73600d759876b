"""Plans as one HTML page that needs nothing else: pictures, steps with bytes, and reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from .. import __version__
from ..engine.plan import FusionRecord, Plan, together
from ..errors import counted
from ..explain.folding import joined_names, joined_numbers
from ..explain.plan_layers import Layer, StepRow, layers
from ..explain.plan_view import PlanView
from ..explain.reasons import everywhere, outcome, places, switched_off
from .picture import picture
from .plan_json import equal_plans
from .shapes import DARK, FONT, LIGHT
from .sizes import in_bytes
from .traffic import ModelTraffic, StepTraffic, Traffic

_TEMPLATE = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")


def page(
    plans: Mapping[str, Plan], title: str, traffic: ModelTraffic | None = None, missing: str = ""
) -> str:
    """One self-contained HTML page about the plans of a model.

    It loads nothing: styles and the script of its filter are inside. Without the script all of it
    can be read. It follows the reader's choice of light or dark, and can be printed.

    Args:
        plans: by the path of the Sequential; equal ones are shown together.
        traffic: of the same plans; without it the page has no bytes.
        missing: why there is no traffic.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    steps = [
        (len(plan.basic_ops), len(plan.forward), len(plan.backward)) for plan in plans.values()
    ]
    what = "basic operations", "forward steps", "backward steps"
    figures = [(str(sum(numbers)), name) for numbers, name in zip(zip(*steps), what)]
    return environment.from_string(_TEMPLATE).render(
        title=title,
        figures=figures if traffic is None else [*figures, *traffic.totals.figures],
        outside="" if traffic is None else traffic.totals.outside,
        sections=[_section(paths, plans, traffic) for paths in equal_plans(dict(plans))],
        missing=missing,
        light=Markup(LIGHT),
        dark=Markup(DARK),
        font=Markup(FONT),
        versions=f"opfuser {__version__}, torch {torch.__version__}",
    )


def _section(
    paths: Sequence[str], plans: Mapping[str, Plan], traffic: ModelTraffic | None
) -> dict[str, Any]:
    """What the page says about equal Sequentials; bytes of all of them if there are others."""
    plan = plans[paths[0]]
    env, view = plan.env, PlanView(plan)
    recipe = "" if env.recipe is None else f", recipe {type(env.recipe).__name__}"
    each = "" if len(paths) == 1 else f"; {len(paths)} equal Sequentials, of which this is one"
    autocast = "off" if env.autocast_dtype is None else _name(env.autocast_dtype)
    alone = traffic.only(*paths).totals if traffic is not None and len(plans) > 1 else None
    own = None if traffic is None else traffic.sequences.get(paths[0])
    entries = [_entry(view, record) for record in plan.history]
    entries.sort(key=lambda entry: not entry["is_open"])  # what happened is above what did not
    return {
        "path": joined_names(paths) or "The model",
        "facts": f"{counted(len(plan.basic_ops), 'basic operation')}, {_name(env.dtype)} on "
        f"{env.device}, autocast {autocast}, gradients {'on' if env.grad_enabled else 'off'}"
        f"{recipe}{each}",
        "counted": ", ".join(map(" ".join, alone.figures)) if alone else "",
        "svg": Markup(picture(plan, own)),
        "tables": list(_tables(view, own)),
        "entries": [*_quantized(view), *entries],
        "text": str(plan),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tables(view: PlanView, traffic: Traffic | None) -> Iterator[dict[str, Any]]:
    """The steps of both passes, in the order in which they run."""
    ops, sums = ("Ops", "Operations"), ("Launches", "Read", "Written", "Saved")
    counts = None if traffic is None else traffic.forward
    yield {
        "title": "Forward",
        "columns": ops if traffic is None else ops + sums,
        "rows": _rows(layers(view, "forward"), counts),
        "note": "",
    }
    if not view.plan.backward:
        yield {"title": "Backward", "rows": (), "note": "No gradient is needed."}
        return
    counts = None if traffic is None else traffic.backward
    yield {
        "title": "Backward, in the order in which it runs",
        "columns": ops if traffic is None else ops + sums[:3],
        "rows": _rows(layers(view, "backward", view.runs_backward), counts),
        "note": f"No gradient is needed of {places(view, view.idle)}." if view.idle else "",
    }


def _rows(
    found: Sequence[Layer], counts: Sequence[StepTraffic] | None
) -> list[tuple[str, StepRow | None, list[tuple[str, int]]]]:
    """Rows with the heading above them, the step if they are none, and numbers with their share."""
    rows: list[tuple[str, StepRow | None, list[tuple[str, int]]]] = []
    for heading, _, steps in found:
        if heading:
            rows.append(
                (heading, None, _cells(counts, [[n] for step in steps for n in step.steps]))
            )
        for step in steps:
            cells = _cells(counts, [step.steps])
            if step.place == "-":  # kernels of plain modules are not told apart
                cells = [("–", 0)] * len(cells)
            rows.append((heading, step, cells))
    return rows


def _cells(
    counts: Sequence[StepTraffic] | None, columns: Sequence[Sequence[int]]
) -> list[tuple[str, int]]:
    """The sum over columns, where repetitions differ from the least to the most.

    Each as text, and its share of the whole pass in percent.

    Args:
        counts: of the steps of a pass; None: no numbers.
        columns: for each step that is added up, its repetitions.
    """
    numbers = [(*c.counts, c.saved)[: 4 if c.stage == "forward" else 3] for c in counts or ()]
    cells = []
    for n, each in enumerate(zip(*numbers)):
        values = [[each[k] for k in column] for column in columns]
        low, high = sum(map(min, values)), sum(map(max, values))
        show = in_bytes if n else str
        text = show(low) if low == high else f"{show(low)} – {show(high)}"
        share = round(100 * sum(map(sum, values)) / sum(each)) if n and any(each) else 0
        cells.append((text, share))
    return cells


def _entry(view: PlanView, record: FusionRecord) -> dict[str, Any]:
    """What became of a fusion; open is what tells more than that it did not occur."""
    off = switched_off(record)
    return {
        "name": record.name,
        "stage": record.stage,
        "status": off.partition(" ")[0] or record.status,
        "outcome": off.partition(" (")[2].removesuffix(")") if off else outcome(record),
        "lines": () if off else list(everywhere(view, record)),
        "is_open": not off and bool(record.matches or record.refusals),
    }


def _quantized(view: PlanView) -> Iterator[dict[str, Any]]:
    """One entry about quantized compute, if a recipe is active."""
    plan = view.plan
    if plan.env.recipe is None:
        return
    declined = together((no, at) for at, no in plan.high_precision)
    yield {
        "name": "quantized compute",
        "stage": "both passes",
        "status": "matched" if plan.quantized else "refused",
        "outcome": f"operations {joined_numbers(plan.quantized)}"
        if plan.quantized
        else "no operation",
        "lines": [
            *(f"{places(view, at)}: {no}" for no, at in declined.items()),
            *map(str, plan.edges),
            *map(str, plan.gemms),
        ],
        "is_open": True,
    }
