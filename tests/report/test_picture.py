"""Pictures of plans: what is in them, where it is, and that it can be read by XML parsers."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
import torch

import opfuser
from opfuser.explain.plan_view import PlanView
from opfuser.report import shapes as drawn
from opfuser.report.layout import Layout
from opfuser.report.picture import picture
from tests.report import pictures
from tests.report.pictures import PLANS, Shape, of_kind, planned, shapes


def boxes(found: list[Shape]) -> list[Shape]:
    return of_kind(found, "op", "module")


@pytest.mark.parametrize("name", PLANS)
def test_every_step_of_both_passes_is_there_in_order(name: str) -> None:
    plan, _ = planned(name)
    arranged = Layout(PlanView(plan))
    drawn_columns = {c for s in arranged.sections for c in range(s.start, s.stop)}
    found = shapes(picture(plan))
    lines = sorted({box.y for box in boxes(found)})
    fused: list[str] = []
    for stage, spans in enumerate(arranged.passes):
        own = [box for box in boxes(found) if lines.index(box.y) % 2 == stage]
        shown = [span for span in spans if span.start in drawn_columns]
        covered = [arranged.columns[c] for span in shown for c in range(span.start, span.stop)]
        assert [box.title.split(",")[0] for box in own] == [*map(str, covered)]
        for one, other in pairwise(own):  # from left to right, none on another
            assert (one.y, one.right) < (other.y, other.x)
        fused += [span.step.fusion for span in shown if span.step.fusion]
    assert sorted(s.text for s in of_kind(found, "fusion")) == sorted(fused)


@pytest.mark.parametrize("name", PLANS)
def test_nothing_is_outside(name: str) -> None:
    plan, counted = planned(name)
    svg = picture(plan, counted)
    width, height = (float(svg.split(f'{size}="')[1].split('"')[0]) for size in ("width", "height"))
    for shape in shapes(svg):
        assert min(shape.x, shape.y) >= 0
        assert shape.right <= width
        assert shape.bottom <= height
    assert width <= 1300


def test_frames_hold_the_boxes_of_their_step() -> None:
    plan, _ = planned("two")
    found = shapes(picture(plan))
    frames = of_kind(found, "frame")
    assert [frame.title for frame in frames] == ["pointwise_chain: Triton pointwise"] * 2
    for frame in frames:
        inside = [
            box.title.split(" ")[1]
            for box in boxes(found)
            if frame.x < box.x
            and box.right < frame.right
            and frame.y < box.y
            and box.bottom < frame.bottom
        ]
        assert inside == ["Bias", "GELU"]


def test_a_fusion_of_one_pass_is_framed_there_alone() -> None:
    plan, _ = planned("decoder")
    frames = of_kind(shapes(picture(plan)), "frame")
    assert [f.title.split(":")[0] for f in frames].count("forward_add_rms_norm") == 1


def test_backward_points_to_the_left() -> None:
    plan, _ = planned("two")
    found = shapes(picture(plan))
    top = boxes(found)[0]
    heads = of_kind(found, "flow-head")
    # The first point is the tip.
    tips = [float(head.text.split(",")[0]) for head in heads]
    for head, tip in zip(heads, tips):
        assert tip == (head.right if head.y < top.bottom else head.x)
    assert len(heads) == 6  # into, between, and out of two steps


def test_no_gradient_is_handed_to_what_needs_none() -> None:
    plan, _ = planned("frozen")
    found = shapes(picture(plan))
    below = max(box.y for box in boxes(found))
    idle = [box for box in boxes(found) if box.kind == "op idle"]
    assert [box.title for box in idle] == [
        "0 RMSNorm, no gradient is needed",
        "1 SiLU, no gradient is needed",
    ]
    first = next(box for box in boxes(found) if box.y == below and box.kind == "op")
    arrows = [flow for flow in of_kind(found, "flow") if flow.y > below]
    assert min(flow.x for flow in arrows) > first.x


def test_without_gradients_there_is_one_row() -> None:
    sequence, inputs = pictures.two()
    with torch.no_grad():
        found = shapes(picture(sequence.plan(*inputs)))
    assert len({box.y for box in boxes(found)}) == 1
    assert [s.text for s in of_kind(found, "row")] == ["forward"]
    assert of_kind(found, "saved") == []


def box_of(found: list[Shape], place: str) -> Shape:
    """The forward box of an operation."""
    return next(box for box in boxes(found) if f"{box.title}, ".startswith(place))


def test_saved_bytes_stand_at_vertical_arrows() -> None:
    plan, counted = planned("two")
    found = shapes(picture(plan, counted))
    arrows = of_kind(found, "saved")
    assert counted.saved == {0: 4 * 16 * 4, 1: 4 * 16 * 4}
    assert [s.text for s in of_kind(found, "bytes")] == ["256 B", "256 B"]
    assert len(arrows) == 2
    for arrow, (i, size) in zip(arrows, counted.saved.items()):
        kind = type(plan.basic_ops[i]).__name__
        assert arrow.title == f"{plan.names[i]} {kind} saves {size:,} bytes for backward"
        box = box_of(found, f"{plan.names[i]} {kind}")
        assert box.x < arrow.x == arrow.right < box.right
        assert arrow.y > box.y


def test_without_traffic_arrows_stand_where_something_is_declared() -> None:
    plan, _ = planned("skipped")
    found = shapes(picture(plan))
    assert of_kind(found, "bytes") == []
    assert [arrow.title for arrow in of_kind(found, "saved")] == [
        "a<b&'\" BasicLinear saves something for backward",
        "end RMSNorm saves something for backward",
    ]


def test_a_channel_goes_from_its_source_to_its_target() -> None:
    plan, _ = planned("skipped")
    found = shapes(picture(plan))
    (arc,) = of_kind(found, "channel")
    assert arc.title == "channel skip <over> & on, op 2 MakeExtraOutput to op 4 AddExtraInput"
    source, target = box_of(found, "source"), box_of(found, "target")
    assert source.x < arc.x < source.right
    assert target.x - 6 < arc.right < target.right
    assert arc.y < min(source.y, target.y)
    assert [s.text for s in of_kind(found, "channel-name")] == ["skip <over> & on"]
    callers = [s.title for s in of_kind(found, "caller")]
    assert callers == [
        "extra output 0 of op 2, to the caller",
        "extra input 0 of op 3, from the caller",
    ]


def test_private_channels_are_those_of_their_sequence() -> None:
    inner = opfuser.Residual(opfuser.GELU())
    outer = opfuser.Sequential(opfuser.Residual(inner, opfuser.SiLU()), opfuser.Residual(inner))
    plan = outer.to("meta").plan(pictures.rows())
    kinds = [type(op).__name__ for op in plan.basic_ops]
    assert kinds.count("MakeExtraOutput") == 4
    assert [c[1:] for c in PlanView(plan).channels] == [(1, 3), (0, 5), (7, 9), (6, 10)]


def test_arcs_of_one_height_do_not_meet() -> None:
    plan, _ = planned("many")
    by_height: dict[float, list[Shape]] = {}
    for arc in of_kind(shapes(picture(plan)), "channel"):
        by_height.setdefault(arc.y, []).append(arc)
    assert sum(map(len, by_height.values())) > 20
    for arcs in by_height.values():
        arcs.sort(key=lambda arc: arc.x)
        assert all(a.right < b.x for a, b in pairwise(arcs))


def test_equal_layers_are_drawn_once() -> None:
    plan, counted = planned("decoder")
    found = shapes(picture(plan, counted))
    headings = [s.text for s in of_kind(found, "heading")]
    assert headings[0] == "layers.0-2, 3 times; drawn: layers.1"
    shown = {box.title.split(" ")[0] for box in boxes(found)}
    # The layer before ends in the first fusion of the one that is drawn.
    assert {name for name in shown if name.startswith("layers.0")} == {"layers.0.mlp.5"}
    assert {name for name in shown if name.startswith("layers.2")} == {"layers.2.mlp.5"}
    assert len([name for name in shown if name.startswith("layers.1")]) == 12
    (section, *_) = of_kind(found, "section")
    assert section.title == (
        "The first of them has nothing in the place of layers.0.mlp.5 AddExtraInput"
    )


def test_channels_between_repetitions_leave_and_arrive() -> None:
    """The sum of each layer is added in the next one: an arc leaves on the right, one arrives."""
    plan, _ = planned("decoder")
    (first, *_) = Layout(PlanView(plan)).sections[1].repetitions
    assert Layout(PlanView(plan)).sections[1].shown == 1
    assert first == (1, 13)
    arcs = [
        (arc.title, "V" in arc.text.split("H")[0], "V" in arc.text.split("H")[1])
        for arc in of_kind(shapes(picture(plan)), "channel")
    ]
    around = "channel, op 21 MakeExtraOutput to op 13 AddExtraInput of the next repetition"
    within = "channel, op 14 MakeExtraOutput to op 20 AddExtraInput"
    assert sorted(arcs) == [
        (within, False, True),  # its second line
        (within, True, False),
        (around, False, True),
        (around, True, False),
        ("channel, op 21 MakeExtraOutput to op 39 AddExtraInput", True, True),
    ]


@pytest.mark.parametrize("name", PLANS)
def test_columns_are_divided_without_rest(name: str) -> None:
    plan, _ = planned(name)
    found = Layout(PlanView(plan))
    covered = [
        c
        for section in found.sections
        for start, stop in section.repetitions
        for c in range(start, stop)
    ]
    assert covered == list(range(len(found.columns)))
    for section in found.sections:
        borders = {start for start, _ in section.stretches}
        assert min(borders) == section.start
        for span in chain(*found.passes):
            assert not borders & set(range(span.start + 1, span.stop))


def test_layers_that_differ_in_backward_alone_are_not_one() -> None:
    layers = [opfuser.Sequential(opfuser.RMSNorm(16), opfuser.Identity()) for _ in range(8)]
    odd = layers[3][0]
    rule = opfuser.Fusion(
        "odd_one", "backward", (opfuser.RMSNorm,), build=_Alone,
        refuses=lambda op, *, env: None if op is odd else opfuser.Refusal("SHAPE", "not this one"),
    )  # fmt: skip
    sequence = opfuser.Sequential(*layers).to("meta")
    with opfuser.register_backward_fusion(rule):
        plan = sequence.plan(pictures.rows())
    assert [s.heading for s in Layout(PlanView(plan)).sections if s.heading] == [
        "0-2, 3 times; drawn: 0",
        "4-7, 4 times; drawn: 4",
    ]
    assert [s.text for s in of_kind(shapes(picture(plan)), "fusion")] == ["odd_one"]


class _Alone(opfuser.FusedOperation):
    def __init__(self, op: opfuser.BasicOperation) -> None:
        super().__init__([op])


def test_names_are_escaped() -> None:
    plan, _ = planned("skipped")
    svg = picture(plan)
    assert "a<b" not in svg
    found = shapes(svg)  # parsed
    assert "a<b&'\"" in [s.text for s in of_kind(found, "small")]


class ASteadilyGrowingNameOfAnOperationThatIsTooLongForAnyBox(opfuser.GELU):
    pass


class _snake_case_name(opfuser.GELU):  # noqa: N801 - such names occur
    pass


def test_long_names_are_cut_and_told_in_full() -> None:
    sequence = opfuser.Sequential(
        ASteadilyGrowingNameOfAnOperationThatIsTooLongForAnyBox(), _snake_case_name()
    )
    found = shapes(picture(sequence.plan(pictures.rows())))
    long, snake = boxes(found)[:2]
    assert long.title == "0 ASteadilyGrowingNameOfAnOperationThatIsTooLongForAnyBox"
    texts = [s.text for s in of_kind(found, "kind") if s.y < long.bottom]
    assert texts[:3] == ["ASteadily", "GrowingNameOf", "AnOperation…"]
    assert "".join(texts[3:]) == "_snake_case_name"
    widest = max(map(len, texts)) * drawn.KIND * drawn.CHARACTER
    assert widest < max(long.right - long.x, snake.right - snake.x)


def test_tensors_that_go_as_codes_are_marked() -> None:
    sequence = opfuser.Sequential(
        opfuser.RMSNorm(512), opfuser.Linear(512, 512), opfuser.GELU(), opfuser.Linear(512, 512)
    ).to("meta", torch.bfloat16)
    x = torch.empty(256, 512, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with opfuser.autocast(recipe=opfuser.recipe.Float8CurrentScaling()):
        plan = sequence.plan(x)
    at = Layout(PlanView(plan)).of_ops
    expected = {
        str(edge)
        for edge in plan.edges
        if edge.stage != "joint" and abs(at[edge.source] - at[edge.target]) == 1
    }
    marked = {s.title for s in of_kind(shapes(picture(plan)), "flow") if s.kind == "flow codes"}
    assert marked == expected
    assert len(expected) == 3


def test_notebooks_show_the_picture() -> None:
    plan, _ = planned("skipped")
    assert plan._repr_svg_() == picture(plan)
    shown = plan._repr_html_()
    assert picture(plan) in shown
    assert "Plan for 6 basic operations" in shown
    assert "<script" not in shown
    assert "a<b" not in shown


def contrast(one: str, other: str) -> float:
    """Contrast of two colors, as WCAG 2.2 defines it."""

    def luminance(color: str) -> float:
        digits = color[1:] if len(color) == 7 else "".join(2 * d for d in color[1:])
        values = [int(digits[k : k + 2], 16) / 255 for k in (0, 2, 4)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted(map(luminance, (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


INKS = {
    "ink": ("paper", "box", "section", "inside"),
    "faint": ("paper", "box", "section"),
    "frame": ("paper", "inside"),
    "saved": ("paper", "section"),
    "channel": ("paper", "section"),
}


@pytest.mark.parametrize("palette", [drawn.LIGHT, drawn.DARK], ids=["light", "dark"])
def test_texts_can_be_read_on_what_is_below_them(palette: str) -> None:
    colors = dict(entry.removeprefix("--").split(":") for entry in palette.split(";"))
    for ink, grounds in INKS.items():
        for ground in grounds:
            assert contrast(colors[ink], colors[ground]) >= 4.5, (ink, ground)


def test_a_plan_without_names_is_drawn_too() -> None:
    fuser = opfuser.OperationFuser([opfuser.GELU(), opfuser.SiLU()])
    fuser(torch.ones(2, 3, requires_grad=True))
    assert fuser.last_plan is not None
    found = shapes(picture(fuser.last_plan))
    assert [box.title.split(",")[0] for box in boxes(found)] == ["GELU", "SiLU"] * 2
