"""Numbers of bytes as text."""

from __future__ import annotations


def in_bytes(count: int) -> str:
    """A number of bytes for people, such as ``1.5 GiB``."""
    size, units = float(count), ["TiB", "GiB", "MiB", "KiB"]
    if count < 1024:
        return f"{count} B"
    while size >= 1024 and units:
        size, unit = size / 1024, units.pop()
    return f"{size:.1f} {unit}"
