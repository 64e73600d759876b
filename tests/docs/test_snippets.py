"""What the documentation shows: its code runs, its outputs are those of the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SNIPPETS = ROOT / "docs" / "snippets"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OUTPUTS = sorted(SNIPPETS.glob("*.txt"))


def comparable(output: str) -> str:
    """An output without the durations, which differ from run to run."""
    return re.sub(r"time=\d+\.\dms", "time=0.1ms", output)


@pytest.mark.parametrize("expected", OUTPUTS, ids=lambda path: path.stem)
def test_shown_output_is_that_of_the_snippet(expected: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(expected.with_suffix(".py"))],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert comparable(done.stdout) == comparable(expected.read_text(encoding="utf-8"))
    assert done.returncode == 0


def sections(source: str) -> list[str]:
    found = re.finditer(
        r"^# --8<-- \[start:(\w+)\]\n(.*?)^# --8<-- \[end:\1\]$", source, re.M | re.S
    )
    return [match[2] for match in found]


def without_suppressions(code: str) -> str:
    return re.sub(r"  # noqa\b.*", "", code)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_example_is_taken_from_a_snippet(page: Path) -> None:
    """Pages include their code and outputs; the README, which cannot, repeats them exactly."""
    shown = {
        "python": {s for path in SNIPPETS.glob("*.py") for s in sections(path.read_text("utf-8"))},
        "text": {path.read_text("utf-8") for path in OUTPUTS},
    }
    text = page.read_text(encoding="utf-8")
    for fence in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.M | re.S):
        kind, body = fence[2], textwrap.dedent(fence[3])
        if page.name == "README.md" and kind in shown:
            assert body in shown[kind]
        elif kind in shown:
            assert re.fullmatch(r'--8<-- "[\w.]+(:\w+)?"\n', body), body
        else:
            assert kind == "bash", f"a fence of kind {kind!r}"
