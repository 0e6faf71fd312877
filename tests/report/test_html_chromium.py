"""The report in a real Chromium: wide and narrow, light and dark, on paper; silent, without requests, all of it
legible."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.report import html, load
from tests.report.test_html import hostile
from tests.support.chromium import Browser, Page, chromium
from tests.support.cluster import cluster_page, looked
from tests.support.paths import ROOT
from tests.support.report import TEXTS, make_history, page_of, report_of

pytestmark = pytest.mark.usefixtures("programs")

WIDTHS = (1280, 390)

# Every element with a text of its own: the contrast of its colour with what is behind it (WCAG 2.2, 1.4.3), and whether
# it is cut off.
LOOK = """
(() => {
  const canvas = document.createElement('canvas'); canvas.width = canvas.height = 1;
  const paint = canvas.getContext('2d', {willReadFrequently: true});
  const known = {};
  const rgba = colour => known[colour] ??= (paint.clearRect(0, 0, 1, 1), paint.fillStyle = colour, paint.fillRect(0, 0, 1, 1),
    [...paint.getImageData(0, 0, 1, 1).data]);
  const light = ([r, g, b]) => [r, g, b].map(c => (c /= 255) <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const behind = element => { for (let e = element; e; e = e.parentElement) {
    const colour = rgba(getComputedStyle(e).backgroundColor); if (colour[3] > 250) return colour; } return [255, 255, 255, 255]; };
  const seen = [...document.querySelectorAll('body *')].filter(e => e.checkVisibility() && !e.closest('svg') &&
    [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
  const poor = [], cut = [];
  for (const e of seen) {
    const ink = light(rgba(getComputedStyle(e).color)), ground = light(behind(e));
    const contrast = (Math.max(ink, ground) + .05) / (Math.min(ink, ground) + .05);
    if (contrast < 4.5) poor.push([e.tagName, e.className, e.textContent.slice(0, 30), contrast]);
    const box = e.getBoundingClientRect();
    const hidden = e.closest('.scroll, thead');
    if (!hidden && (box.right > innerWidth + 1 || box.left < -1)) cut.push([e.tagName, e.textContent.slice(0, 30), box.right]);
  }
  const root = document.documentElement;
  return {poor, cut, texts: seen.length, wide: root.scrollWidth, inner: innerWidth, ground: rgba(getComputedStyle(root).backgroundColor)};
})()
"""
BOXES = """
[...document.querySelectorAll('svg.barchart, svg.strip, svg.trend, table.heat')].filter(e => e.checkVisibility()).map(e => {
  const box = e.getBoundingClientRect();
  return {kind: e.getAttribute('class').split(' ').pop(), x: box.x, y: box.y + scrollY, width: box.width, height: box.height};
})
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # The browser still writes its profile while it ends.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, chromium(Path(folder)) as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Page:
    return browser.page()


def written(folder: Path, text: str) -> str:
    path = folder / "report.html"
    path.write_text(text, encoding="utf-8")
    return path.as_uri()


def first_of_each(boxes: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for box in boxes:
        found.setdefault(box["kind"], box)
    return found


@pytest.mark.parametrize("name", ["healthy", "failed"])
def test_a_report_is_whole_and_legible(name: str, page: Page, tmp_path: Path) -> None:
    folder = make_history(tmp_path, name, (0.97, 1.02, 0.8, 1.01))
    report, _ = load.read_run(Flags(ROOT), str(folder), TEXTS)
    assert len(report.past) == 4
    address = written(tmp_path, page_of(report))
    grounds, drawn = {}, {}
    for width in WIDTHS:
        for dark in (False, True):
            page.show(address, width, dark=dark)
            page.ask("document.querySelectorAll('details').forEach(each => each.open = true)")
            look = page.ask(LOOK)
            assert (look["poor"], look["cut"]) == ([], [])
            assert look["wide"] == look["inner"] == width
            assert look["texts"] > 100
            grounds[dark] = look["ground"]
            for kind, box in first_of_each(page.ask(BOXES)).items():
                part = box | {"width": min(box["width"], 240), "height": min(box["height"], 60)}
                drawn[width, dark, kind] = page.screenshot(clip=part).colours()
    assert sum(grounds[False][:3]) > 600
    assert sum(grounds[True][:3]) < 150
    kinds = {kind for _, _, kind in drawn}
    assert kinds == {"barchart", "strip", "trend"} | ({"heat"} if name == "healthy" else set())
    assert all(len(colours) > 3 for colours in drawn.values()), "a chart is blank"
    assert all(drawn[width, True, kind] != drawn[width, False, kind] for width in WIDTHS for kind in kinds)
    assert page.requests == [address] * 4, "it asks for nothing but itself"
    assert page.complaints == []


@pytest.mark.parametrize("width", [1280, 375])
@pytest.mark.parametrize("dark", [False, True])
def test_the_report_of_a_cluster_is_whole_and_legible(width: int, dark: bool, page: Page, tmp_path: Path) -> None:
    folder = make_history(tmp_path, "healthy", (0.97, 1.02, 0.8, 1.01))
    run, _ = load.read_run(Flags(ROOT), str(folder), TEXTS)
    address = written(tmp_path, cluster_page(looked(runs=(report_of("failed"), run))))
    page.show(address, width, dark=dark)
    page.ask("document.querySelectorAll('details').forEach(each => each.open = true)")
    look = page.ask(LOOK)
    assert (look["poor"], look["cut"]) == ([], [])
    assert look["wide"] == look["inner"] == width
    assert look["texts"] > 100
    assert (sum(look["ground"][:3]) < 150) == dark
    assert page.ask("document.querySelectorAll('svg.trend').length") == 4
    assert page.requests == [address], "it asks for nothing but itself"
    assert page.complaints == []


def test_no_word_of_a_log_becomes_a_program(page: Page, tmp_path: Path) -> None:
    address = written(tmp_path, page_of(report_of("failed", edit=hostile)))
    page.show(address, 390)
    assert page.ask("typeof pwned + document.scripts.length + document.images.length") == "undefined00"
    look = page.ask(LOOK)
    assert (look["cut"], look["wide"]) == ([], 390)
    assert page.requests == [address]
    assert page.complaints == []


def test_the_policy_holds(page: Page, tmp_path: Path) -> None:
    # A page that somebody else put a script and a picture into: neither runs nor is asked for, and the engine says so.
    text = page_of(report_of("healthy")).replace(
        "</main>", "<script>pwned = 1</script><img src='https://example.invalid/x.png'></main>"
    )
    address = written(tmp_path, text)
    page.show(address, 1280)
    assert page.ask("typeof pwned") == "undefined"
    assert (page.requests, page.refused) == ([address, "https://example.invalid/x.png"], ["csp"])
    assert len(page.complaints) == 2
    assert all("Content Security Policy" in each for each in page.complaints)


def test_on_paper_it_is_light_and_without_logs(page: Page, tmp_path: Path) -> None:
    page.show(written(tmp_path, page_of(report_of("healthy"))), 800, dark=True, media="print")
    look = page.ask(LOOK)
    assert look["ground"] == [255, 255, 255, 255]
    assert look["poor"] == []
    assert page.ask("document.querySelector('#logs').checkVisibility()") is False
    assert page.ask("document.querySelector('#figures').checkVisibility()") is True


def test_a_heat_map_gets_lighter_or_darker_with_its_values(page: Page, tmp_path: Path) -> None:
    page.show(written(tmp_path, page_of(report_of("healthy"))), 1280)
    for dark in (False, True):
        page.show(page.requests[0], 1280, dark=dark)
        greys = []
        for step in range(html.STEPS):
            place = page.ask(
                f"(() => {{ const box = document.querySelector('td.h{step}').getBoundingClientRect();"
                " return {x: box.x + 2, y: box.y + scrollY + 2, width: 3, height: 3}; })()"
            )
            red, green, blue = page.screenshot(clip=place).pixel(1, 1)
            greys.append(0.21 * red + 0.72 * green + 0.07 * blue)
        assert greys == sorted(greys, reverse=not dark)
        assert len(set(greys)) == html.STEPS
