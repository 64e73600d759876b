"""The HTML page of plans: it needs nothing else, says what the plan says, and escapes names."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

import pytest
import torch

import opfuser
from opfuser.report.page import page
from opfuser.report.plan_json import explained
from opfuser.report.sizes import in_bytes
from opfuser.report.target import load
from opfuser.report.traffic import ModelTraffic
from tests.report import pictures
from tests.report.pictures import PLANS, planned

VOID = {"meta", "input", "link", "br", "img", "rect", "path", "polygon"}


class Reader(HTMLParser):
    """The tags of a page, and the texts inside of those with a class or of some kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            kind = dict(attrs).get("class") or tag
            self.open.append(kind)
            self.texts.setdefault(kind, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        for kind in set(self.open):
            self.texts[kind][-1] += data

    def all(self, kind: str) -> list[str]:
        return [" ".join(text.split()) for text in self.texts.get(kind, [])]


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []  # every tag is closed
    return reader


def shown(name: str) -> str:
    plan, counted = planned(name)
    whole = ModelTraffic({"": counted}, opfuser.report.traffic.Counts(), counted.saved_bytes)
    return page({"": plan}, f"my.{name}", whole)


@pytest.mark.parametrize("name", PLANS)
def test_it_loads_nothing(name: str) -> None:
    html = shown(name)
    reader = read(html)
    for tag, given in reader.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert "src" not in given
        assert (given.get("href") or "#").startswith("#")
    # The name of SVG's namespace is no address that is asked for.
    assert "http" not in html.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"@import|url\(|fetch\(|XMLHttp|import\(", html)
    anchors = [given["href"] for tag, given in reader.tags if tag == "a"]
    ids = {f"#{given['id']}" for _, given in reader.tags if "id" in given}
    assert set(anchors) <= ids


def test_names_are_escaped() -> None:
    plan, _ = planned("skipped")
    html = page({"<b>x": plan}, "<i>my & own")
    assert "<b>x" not in html
    assert "<i>" not in html
    assert "a<b" not in html
    assert "<over>" not in html
    assert read(html).all("h1") == ["<i>my & own"]


def test_tables_say_what_the_steps_do() -> None:
    plan, counted = planned("two")
    reader = read(shown("two"))
    numbers = reader.all("number")
    heads = ["Launches", "Read", "Written", "Saved"], ["Launches", "Read", "Written"]
    cells = []
    for n, steps in enumerate((counted.forward, counted.backward[::-1])):
        cells += heads[n]
        for step in steps:
            cells.append(str(step.counts.launches))
            cells += [in_bytes(step.counts.read), in_bytes(step.counts.written)]
            cells += [in_bytes(step.saved)] if n == 0 else []
    assert numbers == cells
    assert reader.all("ops") == [
        "0 BasicLinear cuBLAS",
        "0-1 Bias + GELU → pointwise_chain Triton pointwise",
        "0-1 Bias + GELU → pointwise_chain Triton pointwise",
        "0 BasicLinear cuBLAS",
    ]
    figures = dict(zip(reader.all("dt"), reader.all("dd")))
    assert figures["launches"] == str(counted.counts.launches)
    assert figures["saved for backward"] == in_bytes(counted.saved_bytes)
    assert figures["basic operations"] == str(len(plan.basic_ops))


def rows(html: str) -> list[list[str]]:
    """The cells of all rows of tables."""
    found = re.findall(r"<tr.*?</tr>", html, re.DOTALL)
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in found]
    clean = [[unescape(re.sub(r"<[^>]*>", " ", cell)) for cell in row] for row in cells]
    return [[" ".join(cell.split()) for cell in row] for row in clean]


def test_equal_layers_are_one_with_their_sum() -> None:
    _, counted = planned("decoder")
    found = rows(shown("decoder"))
    headings = [row for row in found if row[0].endswith("all together")]
    assert [row[0] for row in headings] == ["layers.0-2, 3 times, ops 1-38; all together"] * 2
    inside = [s for s in counted.forward if s.indices and 1 <= s.indices[0] <= 38]
    assert headings[0][1:] == [
        str(sum(s.counts.launches for s in inside)),
        in_bytes(sum(s.counts.read for s in inside)),
        in_bytes(sum(s.counts.written for s in inside)),
        in_bytes(sum(s.saved for s in inside)),
    ]
    (first,) = (row for row in found[:12] if row[0] == "1-3")
    starts = [s for s in counted.forward if s.indices[0] in (1, 13, 26)]
    least, most = (f([s.counts.read for s in starts]) for f in (min, max))
    assert least < most  # the first layer adds nothing up
    assert first[3] == f"{in_bytes(least)} – {in_bytes(most)}"


def test_what_needs_no_gradient_is_told() -> None:
    assert "No gradient is needed of 0 RMSNorm, 1 SiLU." in shown("frozen")
    sequence, inputs = pictures.two()
    with torch.no_grad():
        html = page({"": sequence.plan(*inputs)}, "x")
    assert "No gradient is needed." in html


def test_every_fusion_has_its_reasons() -> None:
    plan, _ = planned("decoder")
    reader = read(shown("decoder"))
    happened = ["linear_cross_entropy", "activation_linear_add", "activation_linear"]
    assert reader.all("name mono")[:3] == happened
    assert sorted(reader.all("name mono")) == sorted(record.name for record in plan.history)
    lines, alone = reader.all("li"), reader.all("alone")
    refused = {no for record in plan.history for _, no in record.refusals}
    assert {no.code for no in refused} == {"CONFLICT", "DISABLED"}
    for no in refused:
        told = [no.detail in text for text in alone] if no.code == "DISABLED" else []
        assert any(told) or any(str(no) in line for line in lines)
    off = [r for r in plan.history if r.status in ("disabled", "skipped")]
    assert off
    assert all(r.detail in " ".join(alone) for r in off)


def test_quantized_compute_is_an_entry() -> None:
    sequence = opfuser.Sequential(opfuser.Linear(512, 512), opfuser.Linear(512, 8)).to("meta")
    x = torch.empty(256, 512, device="meta", requires_grad=True)
    with opfuser.autocast(recipe=opfuser.recipe.Float8CurrentScaling()):
        plan = sequence.plan(x)
    reader = read(page({"": plan}, "x"))
    assert reader.all("name mono")[0] == "quantized compute"
    assert plan.high_precision
    assert any(str(plan.high_precision[0][1]) in line for line in reader.all("li"))


def test_equal_sequentials_are_shown_once() -> None:
    plan, _ = planned("two")
    reader = read(page({"layers.0.mlp": plan, "layers.1.mlp": plan, "head": plan}, "x"))
    assert reader.all("h2")[:2] == ["layers.0-1.mlp", "head"]
    assert "2 equal Sequentials" in " ".join(reader.all("quiet"))


def test_without_counts_it_says_why() -> None:
    plan, _ = planned("two")
    reader = read(page({"": plan}, "x", None, "it reads values."))
    assert "No launches and bytes: it reads values." in reader.all("quiet")
    assert reader.all("number") == []
    assert "launches" not in reader.all("dt")


def test_it_is_the_same_every_time() -> None:
    found = explained(load("tests.cli.models:mlp"))
    args = found.plans, found.target.name, found.traffic, found.missing
    assert page(*args) == page(*args)
