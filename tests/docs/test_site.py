"""The documentation as a site: it builds without a warning, a broken link ends it, and its pages load nothing from
elsewhere. And the pictures of terminals in it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.terminal_picture import picture, steady

pytestmark = pytest.mark.usefixtures("programs")

LOADING = {"src", "href", "srcset", "data"}


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    words = ["-W", "--keep-going", "-q", "-c", str(ROOT / "docs"), str(source), str(out)]
    return subprocess.run([sys.executable, "-m", "sphinx", *words], capture_output=True, text=True, check=False)


class Loaded(HTMLParser):
    """Collects what a page loads by itself; links for people are not among it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "a":
            self.found += [value or "" for name, value in attrs if name in LOADING]


@pytest.fixture(scope="module")
def site(programs: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert (done.returncode, done.stderr) == (0, "")
    return out


def test_every_text_is_a_page_that_loads_nothing_from_elsewhere(site: Path) -> None:
    texts = {path.relative_to(ROOT).with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    texts |= {Path(f"{name}.html") for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")}
    assert {text for text in texts if not (site / text).is_file()} == set()
    for page in site.rglob("*.html"):
        elsewhere = [each for each in Loaded(page.read_text(encoding="utf-8")).found if re.match(r"(https?:)?//", each)]
        assert elsewhere == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\(\s*['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ("[x](nowhere.md)", "nowhere.md"),
        ("[x](other.md#no-such-heading)", "no-such-heading"),
        ("![x](screens/none.svg)", "none.svg"),
    ],
)
def test_a_broken_link_ends_the_build(broken: str, named: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "docs").mkdir(parents=True)
    (source / "docs" / "index.md").write_text(f"# Index\n\n```{{toctree}}\nother\n```\n\n{broken}\n")
    (source / "docs" / "other.md").write_text("# Other\n\n## A heading\n")
    done = build(source, tmp_path / "out")
    assert done.returncode == 1
    assert re.search(rf"docs/index\.md:\d*:?.*{re.escape(named)}", done.stderr), done.stderr
    text = (source / "docs" / "index.md").read_text()
    (source / "docs" / "index.md").write_text(text.replace(broken, "[x](other.md#a-heading)"))
    shutil.rmtree(tmp_path / "out")
    assert build(source, tmp_path / "out").returncode == 0


# --- pictures --------------------------------------------------------------------------------------------------------------------------


def test_a_screen_as_a_picture() -> None:
    drawn = "\x1b[1;32mdone\x1b[0m  <b> & \x1b[2mquiet\x1b[0m\n\n\x1b[7m inverse \x1b[0m\x1b[31mred\x1b[39m   "
    made = picture(drawn, 40, 4, 'a "title"')
    root = ElementTree.fromstring(made)
    texts = [(each.attrib["class"], each.text) for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == [("f2 bold", "done"), ("f0", "<b> &"), ("f7", "quiet"), ("inverse", "inverse"), ("f1", "red")]
    assert "prefers-color-scheme:dark" in made
    assert not re.search(r"url\(|@import|href|<script|@font-face", made)


def test_what_differs_from_run_to_run_does_not_change_a_picture() -> None:
    one = "done  build deepep  17 s\nfinished 2026-11-23 04:38:12, run 20261123T043812Z-internode-9c12aa (0.4 s), id b307c360"
    two = "done  build deepep  41 s\nfinished 2027-01-03 22:01:59, run 20270103T220159Z-internode-01ffe2 (3.9 s), id 0000ffff"
    assert steady(one) == steady(two)
    assert list(map(len, steady(one).splitlines())) == list(map(len, one.splitlines()))


def test_the_pictures_of_the_documentation_stand_alone() -> None:
    pictures = sorted((ROOT / "docs" / "screens").glob("*.svg"))
    named = set(re.findall(r"screens/([\w-]+\.svg)", (ROOT / "docs" / "screens.md").read_text(encoding="utf-8")))
    assert {path.name for path in pictures} == named
    for path in pictures:
        text = path.read_text(encoding="utf-8")
        ElementTree.fromstring(text)
        assert not re.search(r"url\(|@import|href|<script|@font-face|/tmp/|/root\b|/work\b", text), path
