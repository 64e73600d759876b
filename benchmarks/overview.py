"""The chart of the README, as SVG: ``python -m benchmarks.overview``.

Reads ``results/h200/*.json``, and writes ``results/overview_light.svg`` and ``overview_dark.svg``:
time and memory of a training step. The contestants of a group were timed in one run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

RESULTS = Path(__file__).parent / "results"
OURS = "opfuser"
PEERS = "torch", "torch.compile", "Liger-Kernel"


class Group(NamedTuple):
    """One case of one file, and who takes part in it."""

    title: str
    file: str
    case: str
    size: dict[str, int]
    contestants: tuple[str, ...]


GROUPS = (
    Group(
        "Llama 1B, 8192 tokens",
        "model",
        "Llama 1B",
        {"layers": 16, "batch": 2, "length": 4096, "adamw": 0},
        (*PEERS, OURS),
    ),
    Group(
        "GPT-2 124M with AdamW, 8192 tokens",
        "small",
        "GPT-2 124M, batch 8",
        {"layers": 12, "dim": 768, "classes": 50257, "batch": 8, "length": 1024},
        (*PEERS, "Transformer Engine", OURS, f"{OURS}, replayed"),
    ),
    Group(
        "SwiGLU block, 4096 features, 8192 tokens",
        "quantized",
        "SwiGLU block",
        {"dim": 4096, "tokens": 8192},
        ("torch", "te.ops", OURS),
    ),
)


class Bar(NamedTuple):
    """Time and memory of one contestant."""

    name: str
    milliseconds: float
    gibibytes: float


def bars(group: Group, folder: Path) -> list[Bar]:
    """The figures of a group.

    Raises:
        KeyError: a contestant was not timed.
    """
    rows = json.loads((folder / f"{group.file}.json").read_text("utf-8"))["rows"]
    found: dict[str, dict[str, Any]] = {
        row["contestant"]: row
        for row in rows
        if (row["case"], row["size"], row["pass"]) == (group.case, group.size, "step")
    }
    return [
        Bar(name, found[name]["median_us"] / 1e3, found[name]["saved_bytes"] / 2**30)
        for name in group.contestants
    ]


class Theme(NamedTuple):
    """Colors on a light or a dark page; the background is the page's."""

    text: str
    faint: str
    bar: str
    ours: str


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#afb8c1", "#c8102e"),
    "dark": Theme("#f0f6fc", "#9198a1", "#545d68", "#ff6b7a"),
}

# In pixels: a row, the room above a group, the names, one of two columns, its longest bar.
ROW, ABOVE, NAMES, COLUMN, BAR = 22, 34, 150, 300, 215
WIDTH = NAMES + 2 * COLUMN


def _text(x: float, y: float, text: str, color: str, attributes: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{color}"{attributes}>{escape(text)}</text>'


def _rows(group: Group, drawn: list[Bar], top: int, theme: Theme) -> Iterator[str]:
    """The bars of a group; the longest of a column has its whole width."""
    for n, bar in enumerate(drawn):
        ours = bar.name.startswith(OURS)
        y = top + n * ROW
        weight = ' font-weight="600"' if ours else ""
        anchor = f' text-anchor="end"{weight}'
        yield _text(NAMES - 10, y + 15, bar.name, theme.text, anchor)
        columns = ("ms", ".1f", bar.milliseconds), ("GiB", ".2f", bar.gibibytes)
        for column, (unit, digits, value) in enumerate(columns):
            x = NAMES + column * COLUMN
            length = BAR * value / max(other[1 + column] for other in drawn)
            label = f"{value:{digits}} {unit}"
            fill = theme.ours if ours else theme.bar
            said = escape(f"{group.title}, {bar.name}: {label}")
            place = f'x="{x}" y="{y + 3}" width="{length:.2f}" height="{ROW - 6}"'
            yield f'<rect {place} rx="2" fill="{fill}"><title>{said}</title></rect>'
            yield _text(x + length + 6, y + 15, label, theme.text, weight)


def svg(groups: list[tuple[Group, list[Bar]]], theme: Theme) -> str:
    """The chart, a column for time and one for memory."""
    out = []
    for column, title in enumerate(("Time of a training step", "Memory kept for backward")):
        out.append(_text(NAMES + column * COLUMN, 16, title, theme.text, ' font-weight="600"'))
    top = 20
    for group, drawn in groups:
        out.append(_text(NAMES, top + ABOVE - 11, group.title, theme.faint))
        out += _rows(group, drawn, top + ABOVE, theme)
        top += ABOVE + ROW * len(drawn)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 8}" width="{WIDTH}"'
        ' font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13"'
        ' role="img">\n<title>Time and memory of a training step, bf16, NVIDIA H200</title>'
    )
    return "\n".join([head, *out, "</svg>\n"])


def charts() -> dict[Path, str]:
    """The content of each file."""
    groups = [(group, bars(group, RESULTS / "h200")) for group in GROUPS]
    return {RESULTS / f"overview_{n}.svg": svg(groups, theme) for n, theme in THEMES.items()}


if __name__ == "__main__":
    for path, content in charts().items():
        path.write_text(content, encoding="utf-8")
