"""What the documentation shows: its code runs, its outputs are those of the code.

After a change, ``python docs/snippets/NAME.py > docs/snippets/NAME.txt 2>&1`` renews an output.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import opfuser

ROOT = Path(__file__).parents[2]
SNIPPETS = ROOT / "docs" / "snippets"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILES = sorted(SNIPPETS.glob("*.py"))
OUTPUTS = sorted(SNIPPETS.glob("*.txt"))


def comparable(output: str) -> str:
    """An output without the durations, which differ from run to run."""
    return re.sub(r"time=\d+\.\dms", "time=0.1ms", output)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the output and the exit status of every snippet."""
    folder = tmp_path_factory.mktemp("snippets")
    runner = Path(__file__).with_name("run_snippets.py")
    subprocess.run(
        [sys.executable, "-W", "error", runner, folder, *FILES],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    return folder


@pytest.mark.parametrize("snippet", FILES, ids=lambda path: path.stem)
def test_snippet_runs_and_prints_what_is_shown(snippet: Path, outputs: Path) -> None:
    printed = (outputs / f"{snippet.stem}.txt").read_text("utf-8")
    assert (outputs / f"{snippet.stem}.status").read_text("utf-8") == "0", printed
    shown = snippet.with_suffix(".txt")
    if shown in OUTPUTS:
        assert comparable(printed) == comparable(shown.read_text("utf-8"))


def test_annotations_are_types() -> None:
    """Also of names that are functions, such as Residual, which nothing would notice at runtime."""
    wrong = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for field in ("returns", "annotation"):
                for part in ast.walk(getattr(node, field, None) or ast.Pass()):
                    named = getattr(opfuser, part.id, None) if isinstance(part, ast.Name) else None
                    if named is not None and not isinstance(named, type):
                        wrong.append(f"{path.name}: {ast.unparse(part)}")
    assert wrong == []


def sections(source: str) -> list[str]:
    found = re.finditer(
        r"^# --8<-- \[start:(\w+)\]\n(.*?)^# --8<-- \[end:\1\]$", source, re.M | re.S
    )
    return [match[2] for match in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_example_is_taken_from_a_snippet(page: Path) -> None:
    """Pages include their code and outputs; the README, which cannot, repeats them exactly."""
    shown = {
        "python": {s for path in FILES for s in sections(path.read_text("utf-8"))},
        "text": {path.read_text("utf-8") for path in OUTPUTS},
    }
    text = page.read_text(encoding="utf-8")
    # Pages write {.python}: a formatter would take the line that includes a snippet for code.
    for fence in re.finditer(r"^( *)```(?:\{\.)?(\w*)\}?\n(.*?)^\1```$", text, re.M | re.S):
        kind, body = fence[2], textwrap.dedent(fence[3])
        if page.name == "README.md" and kind in shown:
            assert body in shown[kind]
        elif kind in shown:
            assert re.fullmatch(r'--8<-- "[\w.]+(:\w+)?"\n', body), body
        else:
            assert kind == "bash", f"a fence of kind {kind!r}"
