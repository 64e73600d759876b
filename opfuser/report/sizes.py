"""Numbers of bytes, and tables, as text."""

from __future__ import annotations

from collections.abc import Sequence


def in_bytes(count: int) -> str:
    """A number of bytes for people, such as ``1.5 GiB``."""
    size, units = float(count), ["TiB", "GiB", "MiB", "KiB"]
    if count < 1024:
        return f"{count} B"
    while size >= 1024 and units:
        size, unit = size / 1024, units.pop()
    return f"{size:.1f} {unit}"


def table(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """The lines of a table; ``sides`` has ``<`` or ``>`` for each column."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(f"{cell:{side}{n}}" for cell, side, n in zip(row, sides, widths)).rstrip()
        for row in rows
    ]
