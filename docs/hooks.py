"""Hooks of MkDocs: what the site shows of files outside ``docs``, and tables for narrow screens.

The overview begins as the README does, so that there is one text for both, and the measured figures
are pages of the site. Below its root, the site has the layout of the repository with the
files of ``docs`` moved up; links are rewritten accordingly.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"
PAGES = "README.md", "memory.md", "h200/README.md", "h200x2/README.md"
CHARTS = "overview_light.svg", "overview_dark.svg"

PLACE = "<!-- README.md up to its first model -->"
BEGINNING = re.compile(r"^# opfuser\n(.*?)^## A model of your own$", re.M | re.S)
PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="(?P<dark>[^"]+)">\s*'
    r'<img src="(?P<light>[^"]+)" alt="(?P<alt>[^"]+)">\s*</picture>'
)
INTO_DOCS = re.compile(r"(\]\((?:\.\./)*)docs/")

CELL = re.compile(r"<td( [^>]*)?>(.*?)</td>", re.S)
PROSE = 40  # characters of a cell from which on it is not squeezed to one word a line


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the figures and the charts."""
    for name in (*PAGES, *CHARTS):
        uri = f"{RESULTS}/{name}"
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / uri)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Puts the README's beginning where the overview wants it, and rewrites links to pages."""
    if PLACE in markdown:
        markdown = markdown.replace(PLACE, beginning())
    return INTO_DOCS.sub(r"\1", markdown)


def beginning() -> str:
    """What the README says before its first model; the chart follows the palette of the site.

    Raises:
        ValueError: the README has no such text, or no chart in it.
    """
    found = BEGINNING.search((ROOT / "README.md").read_text(encoding="utf-8"))
    text, charts = PICTURE.subn(_images, found[1] if found else "")
    if charts != 1:
        raise ValueError("README.md begins with '# opfuser', a <picture>, '## A model of your own'")
    return text.strip()


def _images(picture: re.Match[str]) -> str:
    shown = ((picture[theme], theme) for theme in ("light", "dark"))
    images = "".join(f"![{picture['alt']}]({path}#only-{theme})" for path, theme in shown)
    return f'<div class="chart" markdown>\n{images}\n</div>'


def on_page_content(html: str, **_: Any) -> str:
    """Gives cells of prose a class, and alternatives in a cell, ``A/B``, a place to break."""

    def cell(found: re.Match[str]) -> str:
        attributes, content = found[1] or "", found[2]
        content = re.sub(r"<code>[^<]*</code>", lambda m: _breakable(m[0]), content)
        if not attributes and len(re.sub(r"<[^>]+>", "", content)) > PROSE:
            attributes = ' class="prose"'
        return f"<td{attributes}>{content}</td>"

    return CELL.sub(cell, html)


def _breakable(code: str) -> str:
    return re.sub(r"(?<=\w)/(?=\w)", "/<wbr>", code)
