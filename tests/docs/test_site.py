"""The site builds without a warning, shows every public name, and fits on a phone.

Where chromium is not installed, what needs a browser is skipped; ``apt-get install chromium``
installs it on Debian.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from docs import hooks
from docs.docstrings import formula
from docs.internal_names import INTERNAL
from tests.docs.test_docstrings import PUBLIC
from tests.report.test_page_in_browser import CHROMIUM

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout
    return folder


def page(site: Path, name: str) -> str:
    return (site / name / "index.html").read_text(encoding="utf-8")


def test_pages_show_outputs_and_no_marker(site: Path) -> None:
    text = page(site, "planning")
    assert "backward_linear_add" in text
    assert "--8&lt;--" not in text


@pytest.fixture(scope="module")
def entries(site: Path) -> set[str]:
    """The names that have an entry, from the inventory that other sites read."""
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}


def test_every_public_name_has_an_entry(entries: set[str]) -> None:
    assert {public.path for public in PUBLIC} - entries == set()


def test_internal_members_exist_and_have_no_entry(entries: set[str]) -> None:
    ends = {tuple(entry.split(".")[-2:]) for entry in entries}
    for path, names in INTERNAL.items():
        module, _, owner = path.rpartition(".")
        defined = vars(getattr(importlib.import_module(module), owner))
        assert [name for name in names.split() if name not in defined] == []
        assert [name for name in names.split() if (owner, name) in ends] == []


def test_no_name_has_two_entries(site: Path) -> None:
    text = "".join(p.read_text("utf-8") for p in (site / "reference/api").rglob("*.html"))
    anchors = re.findall(r'<h\d id="(opfuser[^"]*)"', text)
    assert len(anchors) > len(PUBLIC)
    assert [name for name, count in Counter(anchors).items() if count > 1] == []


def test_entry_shows_arguments_types_errors_and_source(site: Path) -> None:
    text = page(site, "reference/api/operations")
    entry = text[text.index('id="opfuser.basic.DotProductAttention"') :]
    entry = re.sub(r"<[^>]+>", "", entry[: entry.index('id="opfuser.basic.Dropout"')])
    for shown in "num_kv_heads", "int | None", "InputError", "opfuser/basic/dot_product_attention":
        assert shown in entry


def test_docstrings_are_shown_without_roles_and_with_links(site: Path) -> None:
    pages = {path: path.read_text("utf-8") for path in (site / "reference/api").rglob("*.html")}
    # The code of an entry is shown as it is.
    texts = {p: re.sub(r'<details class="mkdocstrings-source">.*?</details>', "", t, flags=re.S)
             for p, t in pages.items()}  # fmt: skip
    assert [p for p, t in texts.items() if re.search(r":(math|class|func|meth|attr):|::", t)] == []
    sequences = texts[site / "reference/api/sequences/index.html"]
    assert re.search(r'<a [^>]*href="#opfuser.replay"[^>]*><code>replay</code></a>', sequences)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with sync_playwright() as playwright:
        # In a container there is neither a sandbox nor much shared memory.
        args = ["--no-sandbox", "--disable-dev-shm-usage"]
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        yield started
        started.close()


# What is wider than the screen, unless something around it scrolls; names that tables break.
FAULTS = """() => {
  const width = document.documentElement.clientWidth;
  const clips = e => getComputedStyle(e).overflowX != 'visible';
  const scrolls = e => e && (clips(e) || scrolls(e.parentElement));
  const out = [...document.querySelectorAll('.md-content *')].filter(
    e => e.getBoundingClientRect().right > width + 1 && !scrolls(e));
  const broken = [...document.querySelectorAll('.md-content td code')].filter(
    e => !/[\\s/]/.test(e.textContent) && e.getClientRects().length > 1);
  const wide = document.documentElement.scrollWidth > width ? [document.body] : [];
  return [...wide, ...out, ...broken].map(e => `${e.tagName}: ${e.textContent.slice(0, 60)}`);
}"""


def test_pages_fit_on_a_phone_and_tables_keep_names_whole(site: Path, browser: Browser) -> None:
    shown = browser.new_page(viewport={"width": 390, "height": 850})
    faults = {}
    for path in sorted(site.rglob("index.html")):
        shown.goto(path.as_uri())
        if found := shown.evaluate(FAULTS):
            faults[path.parent.relative_to(site).as_posix()] = found
    shown.close()
    assert faults == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_first_page_shows_the_chart_in_its_colors(
    site: Path, browser: Browser, scheme: str
) -> None:
    shown = browser.new_page(color_scheme=scheme)
    shown.goto((site / "index.html").as_uri())
    seen = "all => all.filter(e => e.checkVisibility() && e.naturalWidth).map(e => e.src)"
    charts = shown.eval_on_selector_all(".chart img", seen)
    shown.close()
    assert [re.sub(r".*/|#.*", "", chart) for chart in charts] == [f"overview_{scheme}.svg"]


def test_first_page_begins_as_the_readme(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "index.html").read_text("utf-8"))
    readme = (ROOT / "README.md").read_text("utf-8").partition("## A model of your own")[0]
    plain = [p for p in readme.split("\n\n") if re.match(r"\w", p) and not re.search(r"[\[`|]", p)]
    assert plain[0].startswith("opfuser ")
    assert [paragraph for paragraph in plain if paragraph not in text] == []
    assert "kept for backward, GiB" in text
    assert "](" not in text


@pytest.mark.parametrize("readme", ["# other\n", "# opfuser\n\nText\n\n## A model of your own\n"])
def test_readme_that_begins_otherwise_stops_the_build(
    readme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.md").write_text(readme)
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="<picture>"):
        hooks.beginning()


@pytest.mark.parametrize(
    ("latex", "html"),
    [
        (r"y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} w",
         "y = (x / √(<span>mean</span>(x<sup>2</sup>) + ε)) w"),
        (r"e^{-x} \max(a_1, b), \quad x < 1",
         "e<sup>-x</sup> max(a<sub>1</sub>, b), \N{EM SPACE} x &lt; 1"),
        (r"\frac{a + b}{2}", "((a + b) / 2)"),
    ],
)  # fmt: skip
def test_formulas_are_html(latex: str, html: str) -> None:
    assert formula(latex) == f'<span class="formula">{html}</span>'


@pytest.mark.parametrize(("latex", "says"), [(r"\unheard x", r"\unheard"), ("x^{2", "'}'")])
def test_formula_that_is_not_understood_stops_the_build(latex: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        formula(latex)
