"""What people read: plans, progress and outcomes as whole texts, on a terminal and without one, for few hosts and
for many."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import time

import pexpect
import pytest
from rich.console import Console

from deepep_bootstrap.bootstrap import hosts
from deepep_bootstrap.cli.commands.facts import folded as folded_facts
from deepep_bootstrap.core import console
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.core.text import duration, plain, shortened, size
from deepep_bootstrap.plan.steps import Reason, Step
from deepep_bootstrap.remote import channel
from tests.support.paths import ROOT, TESTS

GOLDEN = TESTS / "golden" / "report"
ENTRY = "rphb44wma7mcibyvgqxx9pzhc9wy5g4z-nvshmem-3.4.5"
HOSTS = tuple(f"b200-{number:03}" for number in range(1, 65))
STEPS = (
    Step(
        "prefix",
        "prefix",
        "prefix",
        HOSTS,
        Reason("nothing there", "/shared/deepep writable and one directory for all hosts"),
    ),
    Step("module-hook", "module-hook", "MODULEPATH hook", HOSTS[:62], Reason("no hook", "/shared/deepep/modulefiles")),
    Step(
        "module-hook",
        "module-hook",
        "MODULEPATH hook",
        HOSTS[62:],
        Reason("/opt/[old]/modulefiles", "/shared/deepep/modulefiles"),
    ),
    Step("build", ENTRY, "build nvshmem 3.4.5", HOSTS[:1], Reason("not in the store", ENTRY)),
)
FAILED = "[3/9] Compiling\nerror: no room for [this]\nninja: build stopped"
OUTCOMES = (
    Outcome(
        "build nvshmem 3.4.5", "b200-001", "failed", FAILED, 754.2, 1, "/state/logs/run/b200-001/build-nvshmem.log"
    ),
    Outcome("prefix", "b200-001", "done", "/shared/deepep, id 5f3a9c1e", 0.42),
    *(
        Outcome("MODULEPATH hook", host, "done", "", 0.1 + index / 100, 0, f"/state/{host}.log")
        for index, host in enumerate(HOSTS[:62])
    ),
    *(
        Outcome("MODULEPATH hook", host, "failed", "permission denied", 0.2, 1, f"/state/{host}.log")
        for host in HOSTS[62:]
    ),
    Outcome("build deepep 1.2.1", "b200-001", "skipped", f"needs {ENTRY}"),
)


def compare(name: str, text: str) -> None:
    assert text == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_recipes_that_cannot_become_root_keep_their_remedy_and_hosts_that_differ_in_an_address_are_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = channel.explain_no_start(1, "sudo: a password is required")
    gone = [Problem(host, "no answer", try_=f"ssh root@10.0.0.{number}") for number, host in enumerate(("n1", "n2"))]
    troubles = {"login": Problem("login", *lines), **{problem.where: problem for problem in gone}}
    Screen("bootstrap").outcomes(
        hosts.judge(STEPS[1], host, Trouble(problem), 0.1)[0] for host, problem in troubles.items()
    )
    said = capsys.readouterr().out
    found = "sudo asks for a password — found sudo: a password is required"
    assert f"login\n    {found}. Try: --sudo-password-prompt, or user=root in the hosts file\n" in said
    assert "n[1-2] (2)\n    no answer. Try: ssh root@10.0.0.0\n" in said
    assert "10.0.0.1" not in said


def test_progress_and_outcomes_of_64_hosts_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen("bootstrap")
    with screen.progress():
        screen.started("MODULEPATH hook", HOSTS)
        screen.line("b200-001", "MODULEPATH hook", "for the live table only")
        screen.waiting("b200-001", "build nvshmem 3.4.5", f"another bootstrap, which builds {ENTRY}")
        screen.ended(*OUTCOMES)
    screen.say()
    screen.outcomes(OUTCOMES)
    screen.next_commands(["module load deepep"])
    out, err = capsys.readouterr()
    compare("progress-and-outcomes", out)
    assert err == ""
    assert "\x1b" not in out


def test_no_outcomes_are_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    Screen("bootstrap").outcomes([])
    assert capsys.readouterr().out == ""


def test_with_json_there_is_nothing_beside_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen("bootstrap", as_json=True)
    with screen.progress():
        screen.say("x")
        screen.started("prefix", ["n001"])
        screen.waiting("n001", "prefix", "x")
        screen.ended(*OUTCOMES)
    screen.outcomes(OUTCOMES)
    screen.next_commands(["x"])
    assert capsys.readouterr() == ("", "")


def rendered(progress: console._Progress, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(progress)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_live_table_has_one_row_a_step_and_fits_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = console._Progress()
    progress.start("MODULEPATH hook", HOSTS)
    progress.start("build nvshmem 3.4.5", ["b200-001"])
    progress.line("build nvshmem 3.4.5", "b200-001", "\x1b[31m[14/18]\x1b[0m Compiling\ttransfer_device.o\r\n")
    progress.line("MODULEPATH hook", "b200-007", "writing")
    now[0] = 112.0
    for width in (60, 80, 140):
        rows = rendered(progress, width)
        assert len(rows) == 2, rows
        assert all(len(row) <= width for row in rows)
        assert re.search(r"b200-\[001-064\] \(64\) MODULEPATH hook +0:12", rows[0]), rows
        assert re.search(r"b200-001 +build nvshmem 3\.4\.5 +0:12", rows[1]), rows
    assert "14/18  Compiling" in rows[1]
    assert "b200-007: writing" in rows[0]
    for host in HOSTS[:-1]:
        progress.end("MODULEPATH hook", host)
    assert "b200-064 " in rendered(progress, 140)[0]
    progress.end("MODULEPATH hook", HOSTS[-1])
    progress.end("build nvshmem 3.4.5", "b200-001")
    progress.end("build nvshmem 3.4.5", "b200-001")
    progress.line("build nvshmem 3.4.5", "b200-001", "a step that ended has no row any more")
    assert [row[2:] for row in rendered(progress, 80)] == ["between two steps"]


def test_a_row_says_which_step_of_how_many_its_counter_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = console._Progress()
    progress.expect(["prefix", "fetch", "build nvshmem", "build deepep"], {"build nvshmem": 800.0})
    assert progress.start("build nvshmem", ["n001"]) == "[3/4] "
    assert progress.start("build deepep", ["n001"]) == "[4/4] "
    assert progress.start("smoke test", ["n001"]) == "[5/5] ", "what nobody expected is one more"
    progress.end("smoke test", "n001")
    progress.line("build deepep", "n001", "waiting for nvshmem", waits=True)
    now[0] += 370
    progress.line("build nvshmem", "n001", "[412/903] nvcc x.cu")
    first, second = (row[2:] for row in rendered(progress, 120))
    assert first == "[3/5] n001 build nvshmem 6:10 412/903, about 7 min left  nvcc x.cu"
    assert second == "[4/5] n001 build deepep  6:10 waiting for nvshmem"
    progress.line("build deepep", "n001", "[1/11] nvcc y.cu")
    now[0] += 60
    progress.line("build deepep", "n001", "[5/11] nvcc z.cu")
    first, second = (row[2:] for row in rendered(progress, 120))
    assert second == "[4/5] n001 build deepep  1:00 5/11, about 2 min left  nvcc z.cu", "waiting is no work"
    assert progress.lines(60) == [
        "[3/5] n001: build nvshmem: 7 min 10 s, 412/903, about 6 min left",
        "[4/5] n001: build deepep: 1 min, 5/11, about 2 min left",
    ]
    now[0] += 900
    assert "left" not in progress.lines(60)[0], "what takes longer than ever before has no estimate of that"


def test_a_row_says_how_many_hosts_have_ended_and_which_have_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = console._Progress()
    names = [f"n{number:04}" for number in range(1, 1001)]
    progress.start("memory limits", names)
    now[0] += 60
    assert progress.lines(60) == ["n[0001-1000] (1000): memory limits: 1 min"]
    for name in names:
        if name not in ("n0007", "n0800"):
            progress.end("memory limits", name)
    assert progress.lines(60) == ["n[0007,0800] (2): memory limits: 1 min, 998 of 1000 hosts ended"]
    (row,) = rendered(progress, 120)
    assert "n[0007,0800] (2) memory limits 1:00 998 of 1000 hosts ended" in row


def test_without_a_terminal_a_long_step_says_so_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen("bootstrap")
    screen.log_every = 0.05
    screen.expect(["build nvshmem"], {})
    with screen.progress():
        screen.started("build nvshmem", ["n001"])
        screen.line("n001", "build nvshmem", "[2/9] nvcc x.cu")
        said = ""
        while "2/9" not in said:
            said += capsys.readouterr().out
        screen.ended(Outcome("build nvshmem", "n001", "done", "installed into the store", 17, waited=14))
    assert said.startswith("[1/1] n001: build nvshmem …\n")
    assert re.search(r"^\[1/1\] n001: build nvshmem: 0\.\d s, 2/9$", said, re.MULTILINE)
    ended = "done build nvshmem on n001 (3 s, waited 14 s) — installed into the store\n"
    assert capsys.readouterr().out.endswith(ended)


def run_on_terminal(body: str, *, term: str = "xterm") -> str:
    """Run Python code whose stderr alone is a terminal of 70 columns, and return what that got."""
    child = pexpect.spawn(
        sys.executable, ["-c", body], env={**os.environ, "TERM": term}, encoding="utf-8", dimensions=(24, 70), cwd=ROOT
    )
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0, child.before
    return child.before


ASKING = """
import sys, time
from deepep_bootstrap.core import console
console.ASK_EVERY = console.LOG_EVERY = 0.05
with console.asking(["n001", "n002", "n003"]) as answered:
    answered("n001"); answered("n003")
    time.sleep({seconds})
print("end", file=sys.stderr)
"""


@pytest.mark.usefixtures("programs")
def test_whom_a_verb_waits_for_is_said_and_goes_again() -> None:
    said = run_on_terminal(ASKING.format(seconds=1))
    line = "asking 3 hosts … 2 answered, waiting for n002 (0 s)"
    assert f"\r\x1b[K{line}" in said
    assert said.endswith("\r\x1b[Kend\r\n"), "nothing of it stays"
    dumb = run_on_terminal(ASKING.format(seconds=0.3), term="dumb")
    assert "\x1b" not in dumb
    assert f"{line}\r\n" in dumb
    assert run_on_terminal(ASKING.format(seconds=0).replace("0.05", "30")) == "end\r\n", (
        "who answers at once is no news"
    )


def test_a_step_that_measures_itself_has_a_bar_and_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = console._Progress()
    progress.start("fetch wheels", ["this machine"])
    progress.line("fetch wheels", "this machine", "torch.whl")
    progress.measure("fetch wheels", "this machine", 0.5, "3/6 files, 10 MiB/s, 4 min left")
    progress.measure("another", "this machine", 0.5, "of a step that does not run")
    now[0] = 112.0
    assert progress.lines(10) == ["this machine: fetch wheels: 12 s, 3/6 files, 10 MiB/s, 4 min left"]
    (row,) = rendered(progress, 120)
    assert re.search(r"0:12 ━{6}.{6} 3/6 files, 10 MiB/s, 4 min left  torch\.whl$", row), row
    assert all(len(row) <= 60 for row in rendered(progress, 60))


def test_the_live_table_is_safe_from_many_threads() -> None:
    progress = console._Progress()

    def work(host: str) -> None:
        for number in range(50):
            progress.start(f"step {number % 3}", [host])
            progress.line(f"step {number % 3}", host, "x")
            progress.end(f"step {number % 3}", host)

    threads = [threading.Thread(target=work, args=(host,)) for host in HOSTS[:8]]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        rendered(progress, 80)
    assert len(rendered(progress, 80)) == 1


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0.0, "0 s"), (0.14, "0.1 s"), (9.94, "9.9 s"), (2.5, "2.5 s"), (9.96, "10 s"), (59.4, "59 s")),
        *((59.6, "1 min"), (90, "1 min 30 s"), (754.2, "12 min 34 s"), (1800, "30 min"), (3599.7, "1 h")),
        *((7199, "2 h"), (7384, "2 h 03 min"), (14400, "4 h")),
    ],
)
def test_durations(count: float, text: str) -> None:
    assert duration(count) == text


def test_sizes() -> None:
    assert (size(17 * 1024**2), size(int(3.9 * 1024**3))) == ("17 MiB", "3.9 GiB")
    assert (size(0), size(1023), size(12 * 1024)) == ("0 bytes", "1023 bytes", "12 KiB")


def test_hashes_are_cut_and_nothing_else() -> None:
    assert shortened(f"store/{ENTRY}/lib and {ENTRY}") == "store/rphb44w…-nvshmem-3.4.5/lib and rphb44w…-nvshmem-3.4.5"
    others = (
        "rphb44wma7mcibyvgqxx9pzhc9wy5g4z /usr/lib/python3-dist-packages-of-some-length "
        "8a07e7e7ed57cfc63005f670d64d410cb30b061b"
    )
    assert shortened(others) == others


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07x\x1b]8;;http://a\x1b\\y", "xy"),
        ("\x1b[2K\x1b[1Aup", "up"),
        ("bell\x07 cr\r", "bell cr"),
        ("a\tb\nc × …", "a\tb\nc × …"),
    ],
)
def test_what_programs_print_for_their_own_terminal_goes(text: str, left: str) -> None:
    assert plain(text) == left


def test_facts_of_many_hosts_are_a_line_a_difference() -> None:
    common = [("system", "Ubuntu 24.04"), ("GPUs", "8 × B200")]
    lines_of = dict.fromkeys(HOSTS, common) | {"b200-007": [("system", "Ubuntu 24.04"), ("GPUs", "7 × B200")]}
    assert folded_facts(lines_of) == [
        "  system   Ubuntu 24.04",
        "  GPUs     8 × B200  [b200-[001-006,008-064] (63)]",
        "           7 × B200  [b200-007]",
    ]
