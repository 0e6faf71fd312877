"""Whole verbs on a thousand hosts that are recorded: what a person gets to see of them. `tests/bench/bench_crowd.py` has what it costs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from deepep_bootstrap.cli.commands.bootstrap import bootstrap
from deepep_bootstrap.cli.commands.doctor import doctor
from deepep_bootstrap.cli.commands.facts import facts
from deepep_bootstrap.cli.commands.plan import plan
from deepep_bootstrap.cli.commands.report import report
from deepep_bootstrap.core.console import alike_shortened, more
from deepep_bootstrap.core.nodeset import fold, fold_short
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.remote import fleet
from tests.support import crowd
from tests.support.paths import ROOT

MOST_LINES, MOST_CHARACTERS = 100, 500


def cluster(flags: Flags) -> int:
    return report(flags, cluster=True)


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flags:
    monkeypatch.setattr(fleet, "ConnectionPool", crowd.Crowd)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return Flags(root=ROOT, hosts=str(crowd.hosts_file(tmp_path)))


@pytest.mark.parametrize(
    ("verb", "told"),
    [
        (facts, ["… not reached: and 5 hosts more: --json has them"]),
        (
            plan,
            [
                "memory limits: … and 45 hosts more: --json has them",
                "notes more: --json has them; --verbose shows all",
                "… not reached: and 5 hosts more: --json has them",
                "50 hosts change files",
            ],
        ),
        (
            doctor,
            ["blocking: memlock on n0005", "Also memlock 101 KiB on n0037; ", "; … and 34 hosts more: --json has them"],
        ),
        (cluster, ["no answer from n[0011,", "… and 23 problems more: --json has them"]),
    ],
)
def test_a_thousand_hosts_fit_on_a_few_screens(
    verb: Callable[[Flags], int], told: list[str], flags: Flags, capsys: pytest.CaptureFixture[str]
) -> None:
    verb(flags)
    said = capsys.readouterr()
    lines = (said.out + said.err).splitlines()
    assert len(lines) < MOST_LINES
    assert max(map(len, lines)) <= MOST_CHARACTERS
    for text in told:
        assert text in said.out + said.err


@pytest.mark.parametrize("verb", [facts, plan, doctor, cluster])
@pytest.mark.usefixtures("flags")
def test_the_document_has_every_host(
    verb: Callable[[Flags], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a fifth of the thousand: more than a screen shows of anything."""
    verb(Flags(root=ROOT, hosts=str(crowd.hosts_file(tmp_path, 200)), json=True))
    said = capsys.readouterr()
    document = json.loads(said.out)
    text = said.out
    assert "… and" not in text
    if verb is not cluster:
        assert len(document["errors"]) == 7
    if verb is facts:
        assert len(document["hosts"]) == 193
    if verb is plan:
        assert sum(step["name"] == "limits" for step in document["steps"]) == 10
    if verb is doctor:
        assert len({name for each in document["findings"] for name in each["hosts"] if each["check"] == "memlock"}) == 8


def test_hosts_that_are_alike_are_asked_with_one_script_and_read_once(
    flags: Flags, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepep_bootstrap.plan import host_recipes

    composed, read = [], []
    script, parse = host_recipes.check_script, host_recipes.parse_checks
    monkeypatch.setattr(host_recipes, "check_script", lambda *given: composed.append(1) or script(*given))
    monkeypatch.setattr(host_recipes, "parse_checks", lambda *given: read.append(1) or parse(*given))
    plan(flags)
    assert len(composed) == 1
    # 50 and 34 of those that answer have answers of their own.
    assert len(read) == 85


def test_a_bootstrap_with_nothing_to_do_asks_each_host_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    flags = Flags(root=ROOT, hosts=str(crowd.hosts_file(tmp_path, 12)))
    hosts = crowd.SoundCrowd.of(flags, 12)
    monkeypatch.setattr(fleet, "ConnectionPool", lambda *_: hosts)
    code = bootstrap(flags)
    said = capsys.readouterr().out
    assert (code, "Nothing to do: everything wanted is there." in said) == (0, True), said
    # For facts and for checks; the host of the prefix also says who else may change that.
    assert Counter(hosts.asked) == {"n0001": 3, **{f"n{number:04}": 2 for number in range(2, 13)}}


def test_who_agrees_to_a_plan_knows_whom_it_leaves_out(flags: Flags, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the ten silent hosts the first are named, once, before anybody is asked."""
    assert bootstrap(flags) == 1
    said = capsys.readouterr().err
    assert said.count("n0011: not reached") == 1
    assert said.index("n0011: not reached") < said.index("bootstrap: not confirmed, nothing was changed")
    assert said.count("and 5 hosts more: --json has them") == 1
    assert len(said.splitlines()) < MOST_LINES


def test_a_kind_of_line_is_told_a_few_times() -> None:
    lines = [("port", f"n{number}: port down") for number in range(9)] + [("disk", "n1: disk full")]
    told = alike_shortened(lines, 3)
    assert told == [
        "n0: port down",
        "n1: port down",
        "n2: port down",
        "… port: and 6 hosts more: --json has them",
        "n1: disk full",
    ]
    assert alike_shortened(lines, 9) == [line for _, line in lines]
    assert more(1) == "and 1 host more: --json has it"


def test_a_set_with_many_gaps_is_cut_on_a_screen() -> None:
    odd = [f"n{number:04}" for number in range(1, 400, 2)]
    assert fold_short(odd[:5]) == fold(odd[:5]) == "n[0001,0003,0005,0007,0009] (5)"
    short = fold_short(odd)
    assert short.startswith("n[0001,0003,")
    assert short.endswith(",…] (200)")
    assert len(short) < 140
