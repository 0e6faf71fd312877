"""The plan as a person reads it: whole screens in golden files, at 80 columns, wider, and in a pipe."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from deepep_bootstrap.bootstrap.planning import keep_durations, kept_at, present_plan, read_earlier
from deepep_bootstrap.core.console import PlainConsole, Screen
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.plan.decisions import make_decisions
from deepep_bootstrap.plan.screen import PlanView, expected_seconds, show_plan
from deepep_bootstrap.plan.steps import Plan, Reason, Step, make_plan
from deepep_bootstrap.prefix import modulefiles
from tests.plan.test_steps import built
from tests.support.paths import TESTS
from tests.support.plan import changed, cluster, request

ROCE = "defaults prefix=/shared/deepep profile=roce"
GOLDEN = TESTS / "golden" / "report"
FRESH = {"modules.hook": "", "prefix.id": "", "prefix.writable": True}
REBOOT = Step(
    "reboot",
    "driver-options",
    "driver options and reboot",
    ("n001", "n002"),
    Reason("EnableStreamMemOPs 0", "EnableStreamMemOPs=1, PeerMappingOverride=1"),
)


def shown(plan: Plan, columns: int, view: PlanView | None = None, *, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a plan as it is shown on a terminal of some columns; 0 for a pipe."""
    screen = Screen("plan")
    out = io.StringIO()
    console = PlainConsole(width=columns or None, force_terminal=bool(columns), color_system=None, soft_wrap=True)
    console.file = out
    monkeypatch.setattr(screen, "_console", console)
    show_plan(screen, plan, view or PlanView())
    text = "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
    return re.sub(r"\b[0-9a-z]{7}…", "0123456…", text)


def fresh() -> Plan:
    made = make_plan(request(), cluster(n001=FRESH, n002=FRESH, login1=FRESH))
    return replace(made, steps=(*made.steps, REBOOT))


def joined() -> dict[str, Facts]:
    """Return a cluster whose generation was made before n002 joined, for another partition."""
    first = {name: seen for name, seen in built(cluster()).items() if name != "n002"}
    alone = request(f"{ROCE} partition=batch\nn001\nlogin1 role=login\n")
    offer = make_decisions(alone, first).offer
    record = offer.stacks["v1"]
    offer = replace(offer, stacks={"v1": replace(record, environment={})})
    manifest = modulefiles.manifest(
        offer, generation=3, created="2026-01-01T00:00:00Z", by="root", lock_digest="0", hosts=tuple(first)
    )
    changes = {"prefix.manifest": manifest, "prefix.generation": 3}
    return {name: changed(seen, changes) for name, seen in built(cluster()).items()}


@pytest.mark.parametrize("columns", [0, 80, 160])
def test_a_first_plan(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(fresh(), columns, monkeypatch=monkeypatch)
    assert text == (GOLDEN / f"plan-first-{columns or 'pipe'}.txt").read_text(encoding="utf-8")
    assert not columns or max(map(len, text.splitlines())) <= columns


@pytest.mark.parametrize("columns", [0, 80])
def test_a_plan_that_changes_what_is_offered(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(
        make_plan(request(f"{ROCE}\nn[001-002]\nlogin1 role=login\n"), joined()), columns, monkeypatch=monkeypatch
    )
    assert text == (GOLDEN / f"plan-changes-{columns or 'pipe'}.txt").read_text(encoding="utf-8")


def test_a_note_is_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    kept, plan = kept_at("hosts.txt", "/shared/deepep"), fresh()

    def said(plan: Plan, *, verbose: bool = False, as_json: bool = False) -> str:
        present_plan(Screen("plan", as_json=as_json), plan, kept, PlanView(urgent=("n001: left",), verbose=verbose))
        return capsys.readouterr().out

    assert said(plan, as_json=True) == ""
    first = said(plan)
    assert all(f"note: {note}\n" in first for note in ("n001: left", *plan.notes))
    again = said(replace(plan, notes=(*plan.notes, "news")))
    assert [line for line in again.splitlines() if line.startswith("note: ")] == ["note: n001: left", "note: news"]
    assert f"{len(plan.notes)} note" in again
    assert "as before (--verbose shows" in again
    assert f"note: {plan.notes[0]}\n" in said(plan, verbose=True)
    assert said(replace(plan, notes=())).count("note: ") == 1
    assert f"note: {plan.notes[0]}\n" in said(plan), "what was gone and is there again is news"
    other = kept_at("hosts.txt", "/shared/other")
    assert other != kept
    kept.write_text("{no JSON")
    assert f"note: {plan.notes[0]}\n" in said(plan)


def test_a_home_that_cannot_be_written_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    present_plan(Screen("plan"), fresh(), kept_at("hosts.txt", "/x"), PlanView())
    assert capsys.readouterr().out.endswith(".\n")


def test_the_expected_time_is_that_of_earlier_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    plan = make_plan(request(), cluster(n001=FRESH, n002=FRESH, login1=FRESH))
    kept = kept_at("hosts.txt", "/shared/deepep")
    assert "waiting" not in shown(plan, 0, monkeypatch=monkeypatch)
    took = {"gdrcopy": 10, "nvshmem": 200, "Python with torch": 60, "deepep": 100}
    keep_durations(
        kept,
        [
            Outcome(step.title, host, "done", seconds=next((s for name, s in took.items() if name in step.title), 1.0))
            for step in plan.steps
            for host in step.hosts[:1]
        ],
    )
    keep_durations(kept, [Outcome("prefix", "n001", "failed", seconds=1e6)])
    seconds = read_earlier(kept).seconds
    others = len([step for step in plan.steps if step.kind != "build"])
    assert expected_seconds(plan, seconds) == 10 + 200 + 60 + 100 + others, (
        "Python links against NVSHMEM, DeepEP waits for both"
    )
    assert ", about 6 min 14 s without waiting." in shown(plan, 0, PlanView(seconds=seconds), monkeypatch=monkeypatch)
