"""All formats show the same launches and bytes of one model and input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import unescape
from typing import Any, NamedTuple

import pytest

from opfuser.report.sizes import in_bytes

MODELS = "tests.cli.models"
Command = Callable[..., Any]


class Shown(NamedTuple):
    """What a format says of a model, as texts; None where it leaves that out."""

    launches: str
    read: str
    written: str
    saved: str
    elsewhere: tuple[str, str, str] | None


_SIZE = r"([\d.]+ [KMGT]?i?B)"
_FIGURES = re.compile(
    rf"(\d+) launch(?:es)?,? {_SIZE} read, {_SIZE} written,? {_SIZE} saved for backward"
)
_ELSEWHERE = re.compile(
    rf"of these outside of operations: (\d+) launch(?:es)?, {_SIZE} read, {_SIZE} written"
)


def elsewhere(text: str) -> tuple[str, str, str] | None:
    found = _ELSEWHERE.search(text)
    return found and found.groups()  # type: ignore[return-value]


def of_json(text: str) -> Shown:
    told = json.loads(text)["traffic"]
    outside = told.pop("elsewhere")
    launches, *sizes = told.values()
    rest = str(outside["launches"]), in_bytes(outside["read"]), in_bytes(outside["written"])
    return Shown(
        str(launches), *map(in_bytes, sizes), rest if outside["launches"] else None
    )  # fmt: skip


def of_text(text: str) -> Shown:
    """The last of the figures are those of the whole model."""
    words = " ".join(text[text.rindex("on a GPU, ") :].split())
    (figures,) = _FIGURES.findall(words)
    return Shown(*figures, elsewhere(words))


def of_html(text: str) -> Shown:
    figures = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))
    names = "launches", "read", "written", "saved for backward"
    return Shown(*(figures[name] for name in names), elsewhere(unescape(text)))


def of_svg(text: str) -> Shown:
    words = " ".join(re.findall(r'<text class="legend"[^>]*>(.*?)</text>', text))
    (figures,) = _FIGURES.findall(words[words.index("On a GPU, ") :])
    return Shown(*figures, elsewhere(words))


def of_diff(text: str) -> tuple[str, ...]:
    figures = {row["name"]: row["after"] for row in json.loads(text)["figures"]}
    sizes = (figures[f"bytes {name}"] for name in ("read", "written", "saved for backward"))
    return str(figures["launches"]), *map(in_bytes, sizes)


READERS = {"json": of_json, "text": of_text, "html": of_html, "svg": of_svg}


@pytest.mark.parametrize(
    ("model", "besides"),
    [
        (f"{MODELS}:mlp", False),  # one Sequential
        (f"{MODELS}:layers", True),  # and the sum of the gradients of its tied table
        (f"{MODELS}:tied", True),  # and a plain module
        (f"{MODELS}:experts", False),
        (f"{MODELS}:many", False),  # Sequentials in a module of the user
        (f"{MODELS}:wrapped", True),  # between modules of torch
        ("tests.cli.hugging_face:applied", True),
    ],
)
def test_formats_agree(opfuser_command: Command, model: str, besides: bool) -> None:
    if "hugging_face" in model:
        pytest.importorskip("transformers", reason="transformers is not installed")
    document = opfuser_command("explain", model, "--format", "json").out
    whole = of_json(document)
    assert (whole.elsewhere is not None) == besides
    paths = list(json.loads(document)["sequences"])
    formats = ("text", "html") if len(paths) > 1 else ("text", "html", "svg")
    for name in formats:
        assert READERS[name](opfuser_command("explain", model, "--format", name).out) == whole
    difference = opfuser_command("diff", model, "--fusion", "norm_linear", "--format", "json").out
    assert of_diff(difference) == whole[:4]


def test_formats_agree_on_one_of_several_sequences(opfuser_command: Command) -> None:
    argv = "explain", f"{MODELS}:wrapped", "--sequence", "blocks.0", "--format"
    shown = {READERS[name](opfuser_command(*argv, name).out) for name in READERS}
    (own,) = shown
    assert own.elsewhere is None
    found = json.loads(opfuser_command(*argv, "json").out)
    (plan,) = found["sequences"].values()
    for name in ("launches", "read", "written"):
        steps = sum(step[name] for step in (*plan["forward"], *plan["backward"]))
        assert found["traffic"][name] == steps


def test_formats_agree_on_equal_sequences(opfuser_command: Command) -> None:
    argv = "explain", f"{MODELS}:many", "--format"
    text, page = (" ".join(opfuser_command(*argv, name).out.split()) for name in ("text", "html"))
    together, alone, _ = _FIGURES.findall(text)
    assert [together, alone] == _FIGURES.findall(page)


def test_plain_modules_have_no_counts_of_their_own(opfuser_command: Command) -> None:
    argv = "explain", f"{MODELS}:tied", "--format"
    (plan,) = json.loads(opfuser_command(*argv, "json").out)["sequences"].values()
    assert [step["launches"] for step in plan["forward"]] == [1, None, 1]
    assert [step["saved_bytes"] for step in plan["backward"]] == [0, None, 0]
    rows = re.findall(r"<td class=\"number\"[^>]*>(.*?)</td>", opfuser_command(*argv, "html").out)
    assert rows.count("–") == 4 + 3  # of the forward, and of the backward, which saves nothing
