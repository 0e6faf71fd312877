"""The report as one page: nothing from elsewhere, every word of a log escaped, every chart beside its numbers."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from deepep_bootstrap.analysis.results.model import Verdict
from deepep_bootstrap.report import html
from deepep_bootstrap.report.html import Dot, Scale
from deepep_bootstrap.report.model import Past
from tests.support.report import files_of, page_of, report_of

VOID = {"meta", "br", "img", "link", "input", "hr"}
HOSTILE = "<script>pwned=1</script>\"'><img src=x onerror=pwned=1>&amp;{{7*7}}\u202e"


class Reader(HTMLParser):
    """Reads a page: elements with their attributes, texts by the element they are in, and what is not closed as it
    was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    def count(self, tag: str, kind: str = "") -> int:
        return sum(
            name == tag and kind in [*attributes.get("class", "").split(), ""] for name, attributes in self.elements
        )

    @property
    def text(self) -> str:
        return " ".join(text for where, text in self.texts if where not in {"style", "title"})


@pytest.mark.parametrize("name", ["healthy", "nic-frozen", "failed"])
def test_a_page_is_whole_and_loads_nothing(name: str) -> None:
    page = page_of(report_of(name))
    read = Reader(page)
    assert (read.wrong, read.open) == ([], [])
    assert not {"script", "link", "img", "iframe", "object", "form"} & {tag for tag, _ in read.elements}
    loading = {"src", "srcset", "style", "xlink:href", "action", "background"}
    for tag, attributes in read.elements:
        assert not loading & set(attributes), (tag, attributes)
        assert attributes.get("href", "#").startswith("#"), (tag, attributes)
        assert not any(key.startswith("on") for key in attributes), (tag, attributes)
    assert not re.search(r"url\(|@import|@font-face", html.read_text(html.STYLE))
    ids = Counter(attributes["id"] for _, attributes in read.elements if "id" in attributes)
    assert set(ids.values()) == {1}
    targets = {attributes["href"].removeprefix("#") for _, attributes in read.elements if "href" in attributes}
    assert targets <= set(ids)


def test_the_policy_allows_the_page_its_own_style_and_nothing_else() -> None:
    page = page_of(report_of("healthy"))
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    policy = next(
        attributes["content"]
        for tag, attributes in Reader(page).elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def hostile(files: dict[str, str]) -> None:
    """Put markup wherever a host, a user or a log can put a word."""
    env = dict(line.partition("=")[::2] for line in files["run.env"].splitlines())
    for key in ("kind", "module", "args", "script", "job", "stack", "deepep"):
        env[key] = HOSTILE
    files["run.env"] = "".join(f"{key}={value}\n" for key, value in env.items())
    files["facts.json"] = (
        files["facts.json"].replace("Ubuntu 24.04.3 LTS", HOSTILE.replace('"', '\\"')).replace("filer:", "<b>:")
    )
    for name in [name for name in files if name.endswith(".log")]:
        files[name] += f"RuntimeError: DeepEP error: {HOSTILE}\n\x1b[31m{HOSTILE}\x1b[0m\x07\n"
    files[f"node-7-{HOSTILE.replace('/', '')}.log"] = f"{HOSTILE}\n"
    files["counters/<u>x</u>.before".replace("</u>", "")] = "time=1\nnic=<u>mlx5_0 1 InfiniBand 400 5 5 <i>:1\n"
    files["counters/<u>x</u>.after".replace("</u>", "")] = (
        "time=2\nnic=<u>mlx5_0 1 InfiniBand 400 50000000 50000000 <i>:9\n"
    )


@pytest.mark.parametrize("name", ["healthy", "failed"])
def test_words_of_hosts_and_logs_stay_words(name: str) -> None:
    past = (Past(HOSTILE, 1.0, failed=True, figures={"internode best.combine.rdma_gbs": 3.0}),)
    page = page_of(report_of(name, edit=hostile, past=past))
    read, plain = Reader(page), Reader(page_of(report_of(name)))
    assert (read.wrong, read.open) == ([], [])
    assert {tag for tag, _ in read.elements} <= {tag for tag, _ in plain.elements} | {
        "br",
        "article",
        "strong",
        "code",
        "ol",
        "path",
    }
    assert (
        read.count("script")
        == read.count("img")
        == read.count("u")
        == read.count("b")
        == read.count("i") - plain.count("i")
        == 0
    )
    assert "<script>pwned=1</script>" in read.text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", page)
    assert "{{7*7}}" in read.text


def test_what_a_reader_needs_is_there() -> None:
    read = Reader(page_of(report_of("nic-frozen")))
    for words in (
        "Below reference",
        "mlx5_5/1 sent nothing of the test",
        "0f3c9d2b7a6e41c58d1f",
        "symbol_error 1832",
        "b200-[001-002] (2)",
    ):
        assert words in read.text, words
    headings = [text for where, text in read.texts if where == "h2"]
    assert headings == [
        "Figures",
        "Traffic of each NIC",
        "Spread of the ranks",
        "Tuning sweep",
        "Against earlier runs",
        "Run and hosts",
        "Ends of the logs",
    ]
    assert "b200-001, b200-002" in read.text
    assert "8 × NVIDIA B200, compute 10.0, 179 GiB, driver 580.95.05" in read.text


def test_a_cause_comes_first_with_its_lines() -> None:
    report = report_of("failed")
    read = Reader(page_of(report))
    assert next(text for where, text in read.texts if where == "h2") == "Why it failed"
    first = report.diagnosis.findings[0]
    assert first.cause == "rdma-qp-connect-gid"
    assert f"{first.evidence[0].log}, line {first.evidence[0].line}" in read.text
    assert any(tag == "details" and "open" in attributes for tag, attributes in read.elements), (
        "the log that shows it is open"
    )
    assert "rank 5 of low-latency: dispatch 160.97 us" in read.text


def test_what_a_first_error_says_by_itself_is_no_known_cause() -> None:
    report = report_of("failed")
    assert "No cause is known" not in page_of(report)
    (first, *others) = report.diagnosis.findings
    findings = (replace(first, general=True), *others)
    read = Reader(page_of(replace(report, diagnosis=replace(report.diagnosis, findings=findings))))
    assert "No cause is known. This is what kind of failure" in read.text
    assert (read.wrong, read.open) == ([], [])


def test_every_chart_stands_beside_its_numbers() -> None:
    page = page_of(report_of("failed"))
    charts_shown = [
        attributes
        for tag, attributes in Reader(page).elements
        if tag == "svg" and "chart" in attributes.get("class", "").split()
    ]
    assert len(charts_shown) > 20
    assert all(attributes["aria-hidden"] == "true" for attributes in charts_shown)
    for row in re.findall(r"<tr.*?</tr>", page, re.DOTALL):
        if 'class="chart' in row:
            assert re.search(r'class="n[ "].*?\d', row, re.DOTALL), row


def test_a_run_with_nothing_in_it_is_a_page_too() -> None:
    def bare(files: dict[str, str]) -> None:
        for name in list(files):
            if name != "run.env":
                del files[name]
        files["run.env"] = "kind=smoke\n"

    read = Reader(page_of(report_of("healthy", edit=bare)))
    assert (read.wrong, read.open) == ([], [])
    assert "Not ended" in read.text
    assert "No figure is in the logs" in read.text


def test_many_hosts_are_one_table_and_only_bad_ones_have_their_own() -> None:
    def many(files: dict[str, str]) -> None:
        for number in range(3, 13):
            for when in ("before", "after"):
                files[f"counters/b200-{number:03}.{when}"] = files[f"counters/b200-001.{when}"]

    report = report_of("nic-frozen", edit=many)
    read = Reader(page_of(report))
    assert len(report.hosts) == 12
    assert read.count("table", "wide") == 1
    captions = [text for where, text in read.texts if where == "strong"]
    assert "b200-002" in captions
    assert "b200-007" not in captions
    assert read.count("td", "bad") == 1
    assert "0.0 ✗" in read.text


def test_the_heat_map_grows_evenly_lighter() -> None:
    # OKLCH is perceptually uniform: equal steps of its lightness look equal.
    for scheme in re.split("@media screen", html.read_text(html.STYLE))[:2]:
        steps = [float(value) for value in re.findall(r"--h\d: oklch\(([\d.]+)%", scheme)]
        assert len(steps) == html.STEPS
        differences = [after - before for before, after in pairwise(steps)]
        assert max(differences) - min(differences) < 0.2, differences
    cells = re.findall(r'<td class="(h\d)( best)?">([\d.]+)</td>', page_of(report_of("healthy")))
    best = [cell for cell in cells if cell[1]]
    assert [(step, value) for step, _, value in best] == [("h8", "71.4"), ("h8", "81.9"), ("h8", "75.3")]
    assert {step for step, _, _ in cells} == {f"h{n}" for n in range(html.STEPS)}


def test_numbers_and_times() -> None:
    assert [html.amount(value) for value in (None, 0.04, 324.57, 6.5)] == ["–", "0.0400", "325", "6.50"]
    assert html.when(1795200000.0) == "2026-11-20 18:40 UTC"
    assert str(html.marked("run `a<b` & c")) == "run <code>a&lt;b</code> &amp; c"


def test_a_bar_that_cannot_be_compared_is_none() -> None:
    assert html.bar(Verdict("figure", "us", "none", "", value=3.0)) == ""
    limited = html.bar(Verdict("figure", "x", "none", "", value=25.0, limit=50.0))
    assert 'width="50.00%"' in limited
    over = html.bar(Verdict("figure", "x", "none", "", value=99.0, limit=50.0))
    assert 'width="100.00%"' not in over


# --- charts ----------------------------------------------------------------------------------------------------------------------------

NUMBERS = st.floats(min_value=0, max_value=1e12, allow_nan=False)
DOTS = st.lists(st.builds(Dot, NUMBERS, st.just("r"), st.sampled_from(["ok", "slow", "failed"])), max_size=40)
PLACES = re.compile(r'\b(?:x|x1|x2|width)="(-?[\d.]+)%"')


@given(DOTS)
def test_strips_and_trends_stay_inside_and_lose_no_value(dots: list[Dot]) -> None:
    for drawn in (html.chart_strip(dots), html.chart_trend(dots)):
        assert all(0 <= float(place) <= 100 for place in PLACES.findall(drawn))
        assert len(re.findall('<circle|<path class="mark', drawn)) == len(dots)
        assert drawn == "" or (drawn.startswith("<svg") and drawn.endswith("</svg>"))


@given(NUMBERS, NUMBERS, st.tuples(NUMBERS, NUMBERS).map(sorted), NUMBERS)
def test_bars_stay_inside(value: float, top: float, band: list[float], tick: float) -> None:
    drawn = html.chart_bar(value, top, band=(band[0], band[1]), tick=tick)
    assert all(0 <= float(place) <= 100 for place in PLACES.findall(drawn))


@given(st.lists(NUMBERS, min_size=1), NUMBERS)
def test_a_scale_holds_its_values(values: list[float], other: float) -> None:
    scale = Scale.around(values)
    assert scale.low < scale.high
    assert 0 <= scale.share(other) <= 1


def test_steps_of_a_range() -> None:
    assert [html.step_of(value, 0, 9, 9) for value in (0, 0.99, 1, 8.99, 9)] == [0, 0, 1, 8, 8]
    assert html.step_of(3, 3, 3, 9) == 8


def test_labels_of_marks_are_escaped() -> None:
    assert "<b>" not in html.chart_strip([Dot(1, "<b>"), Dot(2, "<b>", "slow")])


def test_sample_runs_are_read_as_they_are_named() -> None:
    states = {name: report_of(name).verdict.value for name in ("healthy", "nic-frozen", "failed")}
    assert states == {"healthy": "passed", "nic-frozen": "below reference", "failed": "failed"}
    assert "run.env" in files_of("healthy")
