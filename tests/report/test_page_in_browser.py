"""The page in a real browser: widths, colors, the filter, the keyboard.

Where chromium is not installed these tests are skipped; ``apt-get install chromium`` installs it on
Debian.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from opfuser.report.kernel_counts import Counts
from opfuser.report.page import page
from opfuser.report.traffic import ModelTraffic
from tests.report.pictures import planned
from tests.report.test_picture import contrast

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # In a container there is neither a sandbox nor much shared memory.
        args = ["--no-sandbox", "--disable-dev-shm-usage"]
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    files = {}
    for name in ("two", "decoder", "skipped", "many"):
        plan, counted = planned(name)
        whole = ModelTraffic({"": counted}, Counts(), counted.saved_bytes)
        files[name] = folder / f"{name}.html"
        files[name].write_text(page({"": plan}, f"my.{name}", whole), encoding="utf-8")
    return files


class Opened:
    """A page, and what its console said and what it asked for."""

    def __init__(self, browser: Browser, file: Path, **options: Any) -> None:
        self.page: Page = browser.new_page(**options)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())


@pytest.fixture
def opened(browser: Browser, pages: dict[str, Path]) -> Iterator[Any]:
    made: list[Opened] = []

    def open_page(name: str, **options: Any) -> Page:
        made.append(Opened(browser, pages[name], **options))
        return made[-1].page

    yield open_page
    for one in made:
        assert one.said == []
        assert len(one.asked) == 1
        one.page.close()


WIDTHS = [(name, width) for name in ("two", "decoder", "skipped", "many") for width in (380, 1400)]


@pytest.mark.parametrize(("name", "width"), WIDTHS)
def test_nothing_is_wider_than_the_window(opened: Any, name: str, width: int) -> None:
    shown = opened(name, viewport={"width": width, "height": 900})
    assert shown.evaluate("document.documentElement.scrollWidth") == width
    # Whatever is not inside of a region that scrolls is seen in full.
    outside = shown.evaluate(
        """[...document.body.querySelectorAll("*")].filter((element) => {
             if (element.closest(".scroll, pre, .skip, details:not([open])")) return false;
             const box = element.getBoundingClientRect();
             return box.width && (box.right > innerWidth || box.left < 0);
           }).map((element) => element.className || element.tagName)
           .filter((name) => name !== "skip")"""
    )
    assert outside == []


@pytest.mark.parametrize("name", ["decoder", "skipped", "many"])
def test_texts_of_the_picture_are_inside_their_boxes(opened: Any, name: str) -> None:
    shown = opened(name, viewport={"width": 1400, "height": 900})
    beyond = shown.evaluate(
        """[...document.querySelectorAll("svg g")].flatMap((group) => {
             const box = [...group.children].find((child) => child.tagName === "rect");
             if (!box) return [];
             const around = box.getBBox();
             return [...group.children].filter((child) => child.tagName === "text")
               .filter((text) => {
                 const own = text.getBBox();
                 return own.x < around.x || own.x + own.width > around.x + around.width
                   || own.y < around.y || own.y + own.height > around.y + around.height;
               }).map((text) => text.textContent);
           })"""
    )
    assert beyond == []
    assert shown.locator("svg text.kind").count() > 5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors_follow_the_reader_and_can_be_read(opened: Any, scheme: str) -> None:
    shown = opened("decoder", color_scheme=scheme)
    shown.locator("#filter").fill("norm")
    pairs = shown.evaluate(
        """() => {
          const found = new Map();
          for (const element of document.querySelectorAll("body *:not(svg *, script, style)")) {
            const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
            if (!own || !element.getClientRects().length) continue;
            let ground = element;
            while (getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)")
              ground = ground.parentElement;
            const ink = getComputedStyle(element).color;
            const pair = [ink, getComputedStyle(ground).backgroundColor];
            found.set(pair.join(), [...pair, element.textContent.trim().slice(0, 30)]);
          }
          const [kind, paper] = ["kind", "paper"].map(
            (name) => getComputedStyle(document.querySelector(`svg .${name}`)).fill);
          found.set("svg", [kind, paper, "svg"]);
          return [...found.values()];
        }"""
    )
    assert len(pairs) > 6
    for ink, ground, what in pairs:
        assert contrast(*map(_in_hex, (ink, ground))) >= 4.5, (what, ink, ground)
    papers = {_in_hex(ground) for _, ground, what in pairs if what == "svg"}
    assert papers == {"#ffffff" if scheme == "light" else "#12161c"}


def _in_hex(rgb: str) -> str:
    assert rgb.startswith("rgb(")
    return "#" + "".join(f"{int(part):02x}" for part in rgb[4:-1].split(","))


def test_paper_is_light_for_those_who_prefer_dark(opened: Any) -> None:
    shown = opened("two", color_scheme="dark")
    shown.emulate_media(media="print", color_scheme="dark")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    assert shown.evaluate(ground) == "rgb(255, 255, 255)"
    paper = "getComputedStyle(document.querySelector('svg .paper')).fill"
    assert shown.evaluate(paper) == "rgb(255, 255, 255)"
    assert not shown.locator(".search").is_visible()


def test_the_filter_shows_what_holds_all_its_words(opened: Any) -> None:
    shown = opened("decoder")
    entries, search = shown.locator(".entry"), shown.locator("#filter")
    everything = entries.count()
    assert shown.locator("#shown").inner_text() == f"{everything} of {everything}"
    search.fill("CONFLICT swiglu")
    names = shown.locator(".entry:visible .name").all_inner_texts()
    assert "activation_linear_add" in names
    assert 0 < len(names) < everything
    for entry in shown.locator(".entry:visible").all():
        text = entry.inner_text().lower()
        assert "conflict" in text
        assert "swiglu" in text
    assert shown.locator("#shown").inner_text() == f"{len(names)} of {everything}"
    search.fill("no such thing")
    assert shown.locator(".entry:visible").count() == 0
    assert shown.locator(".group:visible").count() == 0
    search.fill("")
    assert shown.locator(".entry:visible").count() == everything
    assert shown.locator("details.entry[open]").count() < everything  # as before


def test_all_of_it_can_be_reached_with_the_keyboard(opened: Any) -> None:
    shown = opened("two")
    reached = []
    for _ in range(40):
        shown.keyboard.press("Tab")
        reached.append(
            shown.evaluate(
                "(document.activeElement.getAttribute('aria-label') || document.activeElement.id"
                " || document.activeElement.tagName)"
            )
        )
    assert reached[:4] == [
        "A",
        "Picture of The model",
        "Forward: steps of The model",
        "Backward, in the order in which it runs: steps of The model",
    ]
    assert reached[4] == "filter"
    assert "SUMMARY" in reached
    assert shown.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_without_its_script_all_of_it_is_there(browser: Browser, pages: dict[str, Path]) -> None:
    context = browser.new_context(java_script_enabled=False)
    shown = context.new_page()
    shown.goto(pages["decoder"].as_uri())
    assert not shown.locator("#filter").is_visible()
    assert shown.locator("svg.opfuser-plan").is_visible()
    assert shown.locator(".entry:visible").count() == shown.locator(".entry").count()
    context.close()
