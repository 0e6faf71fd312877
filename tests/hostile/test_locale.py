"""Programs whose words are read speak one language, here and on hosts, whatever the locale of a person or an account
is."""

from __future__ import annotations

import pytest

from deepep_bootstrap.core.process import run_program
from deepep_bootstrap.remote.fleet import ConnectionPool
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job

pytestmark = [pytest.mark.usefixtures("programs"), pytest.mark.sample]

LOCALES = ("de_DE.UTF-8", "tr_TR.UTF-8", "ja_JP.eucJP")


@pytest.fixture(params=LOCALES, autouse=True)
def foreign(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LANG", "LC_ALL", "LC_MESSAGES", "LANGUAGE"):
        monkeypatch.setenv(name, request.param)


def test_programs_of_this_machine_are_asked_in_one_language() -> None:
    assert run_program(["sh", "-c", 'printf %s "$LC_ALL"']).out == "C"
    assert run_program(["sh", "-c", 'printf %s "$LC_ALL$A"'], env={"PATH": "/usr/bin:/bin", "A": "b"}).out == "Cb"


@pytest.mark.parametrize("watched", [True, False])
def test_scripts_on_hosts_are_asked_in_one_language(watched: bool) -> None:
    pool = ConnectionPool([])
    reply = pool.run(Host("here", connection="local"), Job('printf %s "$LC_ALL"', watched=watched))
    pool.close()
    assert reply.out == "C"
