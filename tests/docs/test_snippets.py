"""What the documentation shows: its code runs, its outputs are those of the code.

After a change, ``python docs/snippets/NAME.py > docs/snippets/NAME.txt 2>&1`` renews an output, and
``python docs/write_snippets.py`` the pages.
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
import torch

import opfuser
from docs import write_snippets

ROOT = Path(__file__).parents[2]
SNIPPETS = write_snippets.SNIPPETS
FILES = sorted(SNIPPETS.glob("*.py"))
OUTPUTS = sorted(SNIPPETS.glob("*.txt"))
BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


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
    if snippet.stem == "pipeline" and "Pair is not connected" in printed and BEFORE_2_13:
        pytest.skip("torch's schedules send to their own rank, which gloo refuses there")
    assert (outputs / f"{snippet.stem}.status").read_text("utf-8") == "0", printed
    shown = snippet.with_suffix(".txt")
    if shown in OUTPUTS:
        assert printed == shown.read_text("utf-8")


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


# The fences of a page, with the comment that names what one shows.
FENCE = re.compile(r"^(?: *<!-- snippet: (\S+) -->\n)?( *)```(\w*)\n.*?^\2```$", re.M | re.S)


def test_every_example_is_taken_from_a_snippet() -> None:
    for page in write_snippets.PAGES:
        text = page.read_text(encoding="utf-8")
        assert write_snippets.written(text) == text, f"{page}: run python docs/write_snippets.py"
        # The picture of a call runs nothing.
        unnamed = {"bash", "text"} if page.stem == "architecture" else {"bash"}
        for named, _, language in FENCE.findall(text):
            shown = set(write_snippets.LANGUAGES.values()) if named else unnamed
            assert language in shown, (page, named, language)


def test_every_output_is_shown() -> None:
    pages = "".join(page.read_text("utf-8") for page in write_snippets.PAGES)
    assert [p.name for p in OUTPUTS if f"<!-- snippet: {p.name} -->" not in pages] == []


@pytest.mark.parametrize(
    "page",
    [
        "<!-- snippet: where.txt -->\nText",
        "<!-- snippet: where.txt -->\n```text\nolder\n\n```\nText",
        '```{.python}\n--8<-- "where.txt"\n```\nText',
    ],
    ids=["named", "older", "include"],
)
def test_snippets_are_written_into_a_page(page: str) -> None:
    shown = (SNIPPETS / "where.txt").read_text("utf-8")
    expected = f"- Before\n\n<!-- snippet: where.txt -->\n```text\n{shown}```\nText"
    assert write_snippets.written(f"- Before\n\n{page}") == expected
    nested = textwrap.indent(page, "  ")
    assert write_snippets.written(nested) == textwrap.indent(expected[10:], "  ")


def test_snippet_that_does_not_exist_is_named() -> None:
    with pytest.raises(SystemExit, match=r"where.py has no section 'nowhere'"):
        write_snippets.written("<!-- snippet: where.py:nowhere -->\n")


def test_script_names_the_pages_that_differ_and_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- snippet: where.txt -->\n")
    monkeypatch.setattr(write_snippets, "PAGES", [page])
    monkeypatch.setattr(write_snippets, "DOCS", tmp_path / "docs")
    with pytest.raises(SystemExit, match=r"run python docs/write_snippets.py"):
        write_snippets.main(["--check"])
    assert page.read_text() == "<!-- snippet: where.txt -->\n"
    write_snippets.main([])
    assert "```text\n" in page.read_text()
    assert capsys.readouterr().out == "page.md\n" * 2
    write_snippets.main(["--check"])
