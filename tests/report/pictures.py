"""Sequences whose plans are drawn, and pictures as data."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import NamedTuple
from xml.etree import ElementTree as ET

import torch
from torch import Tensor, nn

import opfuser
from opfuser.engine.plan import Plan
from opfuser.report.traffic import Traffic
from tests.cli import models
from tests.report.counted import traffic

C = 16
SVG = "{http://www.w3.org/2000/svg}"


def tokens() -> Tensor:
    return torch.zeros(2, 8, dtype=torch.int64, device="meta")


def rows() -> Tensor:
    return torch.empty(4, C, device="meta", requires_grad=True)


def two() -> tuple[opfuser.Sequential, list[Tensor]]:
    return opfuser.Sequential(opfuser.Linear(C, C), opfuser.GELU()).to("meta"), [rows()]


def decoder() -> tuple[opfuser.Sequential, list[Tensor]]:
    """Three equal layers, whose first fusion reaches into the layer before."""
    return models.layers(3).to("meta"), [tokens(), tokens()]


def skipped() -> tuple[opfuser.Sequential, list[Tensor]]:
    """A channel that the caller gets too, an extra input of the caller's, a plain module."""
    source, target = opfuser.MakeExtraOutput(), opfuser.AddExtraInput()
    source.set_extra_output_channel(0, "skip <over> & on")
    target.set_extra_input_channel(0, "skip <over> & on")
    ops = {
        "a<b&'\"": opfuser.Linear(C, C),
        "source": source,
        "plain": nn.Tanh(),
        "open": opfuser.AddExtraInput(),
        "target": target,
        "end": opfuser.RMSNorm(C),
    }
    return opfuser.Sequential(ops).to("meta"), [rows(), rows()]


def frozen() -> tuple[opfuser.Sequential, list[Tensor]]:
    """Its beginning needs no backward."""
    start = opfuser.RMSNorm(C).requires_grad_(False), opfuser.SiLU()
    model = opfuser.Sequential(*start, opfuser.Linear(C, C), opfuser.GELU(), opfuser.Linear(C, C))
    return model.to("meta"), [rows().detach()]


def many() -> tuple[opfuser.Sequential, list[Tensor]]:
    """300 operations in no order that repeats."""
    draw = random.Random(0)
    kinds: list[Callable[[], nn.Module]] = [
        lambda: opfuser.Linear(C, C),
        opfuser.GELU,
        opfuser.SiLU,
        nn.Tanh,
        lambda: opfuser.RMSNorm(C),
        lambda: opfuser.ConstantScale(2.0),
        lambda: opfuser.Residual(opfuser.LayerNorm(C), opfuser.Linear(C, C)),
    ]
    chosen = [draw.choice(kinds)() for _ in range(180)]
    return opfuser.Sequential(*chosen).to("meta"), [rows()]


PLANS = {f.__name__: f for f in (two, decoder, skipped, frozen, many)}


def planned(name: str) -> tuple[Plan, Traffic]:
    sequence, inputs = PLANS[name]()
    return sequence.plan(*inputs), traffic(sequence, *inputs)


class Shape(NamedTuple):
    """An element of a picture.

    Attributes:
        kind: its class.
        title: of the tooltip around it.
        x, y, right, bottom: its edges; of a path of its points.
        text: inside.
    """

    kind: str
    title: str
    x: float
    y: float
    right: float
    bottom: float
    text: str


def shapes(svg: str) -> list[Shape]:
    """All shapes of a picture but those of its legend, in the order in which they are drawn."""
    found: list[Shape] = []

    def read(element: ET.Element, title: str) -> None:
        if "transform" in element.attrib:
            return
        own = element.find(f"{SVG}title")
        title = title if own is None else own.text or ""
        tag, given = element.tag.removeprefix(SVG), element.attrib
        if "class" in given and tag in ("rect", "text") and "x" in given:
            x, y = float(given["x"]), float(given["y"])
            right, bottom = x + float(given.get("width", 0)), y + float(given.get("height", 0))
            found.append(Shape(given["class"], title, x, y, right, bottom, element.text or ""))
        elif "class" in given and tag in ("path", "polygon"):
            # Curves are relative, lines absolute.
            text = re.sub(r"q[^A-Z]*", " ", given.get("d", given.get("points", "")))
            xs = [float(n) for n in re.findall(r"[MLH](-?[\d.]+)", text)]
            ys = [float(n) for n in re.findall(r"(?:[ML]-?[\d.]+ |V)(-?[\d.]+)", text)]
            if tag == "polygon":
                xs, ys = [[float(p.split(",")[k]) for p in text.split()] for k in (0, 1)]
            edges = min(xs), min(ys), max(xs), max(ys)
            found.append(Shape(given["class"], title, *edges, text))
        for child in element:
            read(child, title)

    read(ET.fromstring(svg), "")
    return found


def of_kind(found: list[Shape], *kinds: str) -> list[Shape]:
    return [shape for shape in found if shape.kind.split(" ")[0] in kinds]
