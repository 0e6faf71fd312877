"""The manual page."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from deepep_bootstrap.cli.manual import escaped, manual
from deepep_bootstrap.cli.verbs import VERBS, declared


def test_every_verb_and_flag_is_in_the_page() -> None:
    page = manual("1.2.3")
    for name in VERBS:
        assert f"\n.SS {name}" in page
        part = page.split(f"\n.SS {name}")[1].partition("\n.S")[0]
        for each in declared(name).parameters:
            assert each.is_argument or escaped(each.flag) in part, (name, each.flag)
    assert '"deepep-bootstrap 1.2.3"' in page


def test_no_line_is_taken_for_a_request() -> None:
    assert [escaped(text) for text in (".TH", "'x", "a\\b", "--x")] == ["\\&.TH", "\\&'x", "a\\eb", "\\-\\-x"]


@pytest.mark.skipif(not shutil.which("groff"), reason="no groff here; `make test` installs it")
@pytest.mark.usefixtures("programs")
def test_roff_finds_nothing_wrong_with_it() -> None:
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-z"], input=manual("1").encode(), capture_output=True, check=True
    )
    assert done.stderr == b""
