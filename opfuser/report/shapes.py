"""Shapes of SVG as text, and the style of the pictures of plans."""

from __future__ import annotations

from html import escape

KIND, SMALL = 11.5, 9.5  # sizes of fonts in pixels
CHARACTER = 0.61  # width of one of a monospaced font, in em
LIGHT = (
    "--paper:#fff;--ink:#1a2029;--faint:#57606a;--box:#f4f6f9;--edge:#8b95a5;--frame:#0b5fc0;"
    "--inside:#e6f0fd;--saved:#8a4b00;--channel:#12693a;--section:#f7f8fa;--rim:#c9d0d9"
)
DARK = (
    "--paper:#12161c;--ink:#e8ecf1;--faint:#a3afbd;--box:#1f2630;--edge:#66748a;--frame:#7ab7ff;"
    "--inside:#14273f;--saved:#f2b95c;--channel:#6bd197;--section:#181d25;--rim:#394352"
)
_RULES = {
    "text": "fill:var(--ink)",
    ".paper": "fill:var(--paper)",
    ".section": "fill:var(--section);stroke:var(--rim)",
    ".op,.module": "fill:var(--box);stroke:var(--edge)",
    ".module": "stroke-dasharray:5 3",
    "rect.idle": "fill:none;stroke-dasharray:2 3",
    ".frame": "fill:var(--inside);stroke:var(--frame);stroke-width:1.6",
    ".kind,.heading": f"font-size:{KIND}px",
    ".heading,.fusion": "font-weight:600",
    ".small,.bytes,.fusion,.channel-name,.legend": f"font-size:{SMALL}px",
    ".row": "font-size:11px",
    ".small,.row,.legend,text.idle": "fill:var(--faint)",
    ".fusion": "fill:var(--frame)",
    ".flow,.saved,.channel,.caller": "fill:none;stroke-width:1.3",
    ".flow,.caller": "stroke:var(--faint)",
    ".flow-head,.caller-head": "fill:var(--faint)",
    ".codes": "stroke-width:3",
    ".saved": "stroke:var(--saved)",
    ".saved-head,.bytes": "fill:var(--saved)",
    ".channel": "stroke:var(--channel)",
    ".channel-head,.channel-name": "fill:var(--channel)",
}
FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
STYLE = (
    f".opfuser-plan{{{LIGHT};font-family:{FONT}}}"
    f"@media (prefers-color-scheme:dark){{.opfuser-plan{{{DARK}}}}}"
    f"@media print{{.opfuser-plan{{{LIGHT}}}}}"
) + "".join(
    ",".join(f".opfuser-plan {part}" for part in selector.split(",")) + f"{{{rule}}}"
    for selector, rule in _RULES.items()
)


def rect(kind: str, x: float, y: float, width: float, height: float, r: float) -> str:
    """A rectangle with round corners."""
    size = f'width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" {size} rx="{r}"/>'


def text(x: float, y: float, content: str, kind: str) -> str:
    """A text that begins at ``(x, y)``."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(content)}</text>'


def path(kind: str, d: str) -> str:
    """A path."""
    return f'<path class="{kind}" d="{d}"/>'


def head(kind: str, x: float, y: float, dx: int, dy: int) -> str:
    """The head of an arrow that points to ``(x, y)``."""
    ax, ay = x - 7 * dx, y - 7 * dy
    points = f"{x:.1f},{y:.1f} {ax - 3.5 * dy:.1f},{ay - 3.5 * dx:.1f} "
    points += f"{ax + 3.5 * dy:.1f},{ay + 3.5 * dx:.1f}"
    return f'<polygon class="{kind}" points="{points}"/>'


def titled(shapes: str, title: str) -> str:
    """Shapes with a tooltip."""
    return f"<g><title>{escape(title)}</title>{shapes}</g>"


def arrow(
    kind: str,
    start: tuple[float, float],
    stop: tuple[float, float],
    title: str = "",
    *,
    pointed: bool = True,
) -> str:
    """A line along an axis, with a head at its end if it is pointed, and a tooltip."""
    (x1, y1), (x2, y2) = start, stop
    dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    back = 6 if pointed else 0
    shape = path(kind, f"M{x1:.1f} {y1:.1f}L{x2 - back * dx:.1f} {y2 - back * dy:.1f}")
    if pointed:
        shape += head(f"{kind.partition(' ')[0]}-head", x2, y2, dx, dy)
    return titled(shape, title) if title else shape


def cut(content: str, width: float, size: float) -> str:
    """The end of a text, as much as there is room for in a font of this size."""
    count = int(width / (size * CHARACTER))
    return content if len(content) <= count else f"…{content[len(content) - count + 1 :]}"
