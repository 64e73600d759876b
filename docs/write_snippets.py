"""Writes the code and the outputs of ``docs/snippets`` into the pages that show them.

A page names what it shows in a comment, and this script writes the fence below it:

    <!-- snippet: planning.py:plan -->       the section ``plan`` of ``planning.py``
    <!-- snippet: planning.txt -->           the whole output

A section stands between ``# --8<-- [start:plan]`` and ``# --8<-- [end:plan]``. A fence with only
the line ``--8<-- "planning.py:plan"``, the include of MkDocs, becomes such a comment.

``python docs/write_snippets.py`` writes the pages, and with ``--check`` only says which differ.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path

DOCS = Path(__file__).parent
SNIPPETS = DOCS / "snippets"
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]

LANGUAGES = {".py": "python", ".txt": "text", ".yaml": "yaml", ".toml": "toml"}
INCLUDE = re.compile(r'^( *)```.*\n *--8<-- "([\w.:]+)"\n *```$', re.M)
# A comment, and the fence below it if it has been written before.
SHOWN = re.compile(r"^( *)<!-- snippet: ([\w.:]+) -->\n(?: *```\w+\n(?:.*\n)*?\1```\n)?", re.M)
SECTION = r"^ *# --8<-- \[start:{0}\]\n(.*?)^ *# --8<-- \[end:{0}\]$"


def snippet(name: str) -> tuple[str, str]:
    """The language and the text of ``file.txt`` or of ``file.py:section``."""
    file, _, section = name.partition(":")
    path = SNIPPETS / file
    text = path.read_text(encoding="utf-8")
    if section:
        found = re.search(SECTION.format(section), text, re.M | re.S)
        if found is None:
            raise SystemExit(f"{path} has no section {section!r}")
        text = found[1]
    return LANGUAGES[path.suffix], textwrap.dedent(text)


def written(page: str) -> str:
    """The text of a page with the snippets that it names."""

    def fence(comment: re.Match[str]) -> str:
        indent, name = comment.groups()
        language, text = snippet(name)
        lines = f"<!-- snippet: {name} -->\n```{language}\n{text.rstrip()}\n```\n"
        return textwrap.indent(lines, indent)

    return SHOWN.sub(fence, INCLUDE.sub(r"\1<!-- snippet: \2 -->", page))


def main(args: list[str] | None = None) -> None:
    """Writes or checks every page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if a page differs")
    check = parser.parse_args(args).check
    differing = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            differing[page] = new
            print(page.relative_to(DOCS.parent))
    if not check:
        for page, new in differing.items():
            page.write_text(new, encoding="utf-8")
    elif differing:
        sys.exit("These pages do not show their snippets: run python docs/write_snippets.py")


if __name__ == "__main__":
    main()
