"""A host that floods is the trouble of that host alone; numbers that are no dates, sizes or counts are faults; what is
long costs in proportion."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepep_bootstrap.core import text
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.core.records import FAULTS, RecordForm, read_records
from deepep_bootstrap.lock.model import parse_lock
from deepep_bootstrap.prefix.diff import pin_facts
from deepep_bootstrap.remote import fleet, script
from deepep_bootstrap.remote.fleet import ConnectionPool
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Reply
from deepep_bootstrap.remote.script import Lines
from deepep_bootstrap.report import html, load
from deepep_bootstrap.testing import run_folder
from tests.support.paths import ROOT, TESTS
from tests.support.sshd import Lab, wait_until
from tests.support.verbs import run_verb

pytest_plugins = ["tests.support.sshd"]
pytestmark = [pytest.mark.usefixtures("programs"), pytest.mark.sample]

FLOODS, WELL = "127.0.0.4", "127.0.0.5"
FLOOD = "tr '\\0' A </dev/zero"
MARKED = 'echo $$ >"$1"; '
SHIPPED = (ROOT / "deepep.lock.toml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def hosts(ssh_lab: Lab) -> list[Host]:
    return [*(ssh_lab.host(ssh_lab.start(address)) for address in (FLOODS, WELL)), Host("here", connection="local")]


@pytest.fixture
def pool(ssh_lab: Lab, hosts: list[Host]) -> Iterator[ConnectionPool]:
    pool = ConnectionPool(hosts, ssh_lab.options())
    yield pool
    pool.close()


def ended(file: Path) -> bool:
    """Return whether the process whose number is in a file has ended."""
    return file.exists() and not Path(f"/proc/{file.read_text().strip()}").exists()


@pytest.mark.parametrize("stream", ["", " >&2"], ids=["stdout", "stderr"])
@pytest.mark.parametrize("watched", [True, False])
def test_a_host_that_floods_is_ended_and_the_others_answer(
    stream: str, watched: bool, pool: ConnectionPool, hosts: list[Host], tmp_path: Path
) -> None:
    def job(host: Host) -> Job:
        body = f"exec {FLOOD}{stream}" if host.name != WELL else "echo well"
        return Job(MARKED + body, args=(str(tmp_path / host.name),), watched=watched, timeout=None)

    replies = pool.run_all(hosts, job)
    well = replies[WELL]
    assert isinstance(well, Reply)
    assert well.out == "well\n"
    for name in (FLOODS, "here"):
        trouble = replies[name]
        assert isinstance(trouble, Trouble)
        (problem,) = trouble.problems
        assert problem.where == name
        assert problem.found == f"more than 8 MiB on std{'err' if stream else 'out'}"
        assert problem.wanted == "8 MiB at most"
        wait_until(lambda name=name: ended(tmp_path / name), "the script that floods has ended")


def test_start_up_files_that_flood_are_told(monkeypatch: pytest.MonkeyPatch, pool: ConnectionPool) -> None:
    # What an account prints before the loader's mark, here by a shell that never comes to it.
    monkeypatch.setattr(fleet, "COMMAND", f"exec {FLOOD}")
    with pytest.raises(Trouble) as caught:
        pool.run(Host("here", connection="local"), Job("true", timeout=None))
    assert (
        caught.value.problems[0].found == "more than 1 MiB from start-up files of the account, before the script began"
    )


def test_the_mark_is_looked_for_in_the_tail_alone() -> None:
    def seconds(size: int) -> float:
        lines = Lines(b"@m@\n", None)
        begin = time.process_time()
        for _ in range(size // 16):
            lines.feed(b"0123456789abcde\n")
        return time.process_time() - begin

    seconds(1000)
    small, large = min(seconds(100_000) for _ in range(3)), min(seconds(800_000) for _ in range(3))
    assert large < 8 * 4 * small, "eight times as much took more than thirty-two times as long"


def test_a_line_without_an_end_is_given_out_in_pieces() -> None:
    said: list[str] = []
    lines = Lines(b"", said.append)
    for _ in range(300):
        lines.feed(b"x" * 1000)
    assert max(map(len, said)) <= script.LONGEST_LINE + 1000
    lines.feed(b"\nend\n")
    lines.end()
    assert "".join(said) == "x" * 300_000 + "end"


def test_a_log_without_an_end_is_cut_with_a_word_and_its_host_goes_on(
    ssh_lab: Lab, hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "LOG_LIMIT", 1024**2)
    told: list[str] = []
    pool = ConnectionPool(hosts, ssh_lab.options(tell=told.append))
    said: dict[str, list[str]] = {FLOODS: [], "here": []}
    body = "head -c 20000000 /dev/zero | tr '\\0' A | fold -w 999 >&2; echo; echo the last line >&2; echo state=done"
    chosen = [host for host in hosts if host.name in said]
    replies = pool.run_all(
        chosen, lambda _: Job(body, watched=True, timeout=None, log=True), lambda host, line: said[host].append(line)
    )
    pool.close()
    for name, lines in said.items():
        reply = replies[name]
        assert isinstance(reply, Reply)
        assert reply.out == "\nstate=done\n"
        assert reply.err.endswith("the last line\n")
        assert len(reply.err) <= 3 * script.TAIL
        assert sum(map(len, lines)) < 1.1 * 1024**2
        assert lines[-1] == "[prints more than 1 MiB: the log has no more than that]"
    assert sorted(told) == [f"{name}: prints more than 1 MiB: the log has no more than that" for name in sorted(said)]


def test_a_held_script_keeps_the_values_that_are_waited_for_and_no_others(pool: ConnectionPool) -> None:
    body = "for i in $(seq 20000); do echo k$i=$i; done; echo ready=yes; sleep 600"
    hold = pool.hold(Host("here", connection="local"), Job(body, timeout=None), keys=("ready",))
    assert hold.wait_for("ready") == "yes"
    with pytest.raises(ValueError, match="none of the keys"):
        hold.wait_for("k1")
    hold.close()


def test_five_faults_of_data_lines_are_told_and_then_their_number() -> None:
    with pytest.raises(Trouble) as caught:
        read_records("junk\n" * 200_000, RecordForm({"state": 1}), "n001", "facts.sh")
    found = [problem.found for problem in caught.value.problems]
    assert found == ["the line 'junk'"] * FAULTS + ["199995 more such lines"]
    with pytest.raises(Trouble) as caught:
        read_records("junk\n" * FAULTS, RecordForm({"state": 1}), "n001", "facts.sh")
    assert len(caught.value.problems) == FAULTS


# Numbers that are none.

TIMES = st.one_of(
    st.integers(),
    st.sampled_from(
        (2**63 - 1, 2**63, 2**40, 300_000_000_000, text.LAST_SECOND, text.LAST_SECOND + 1, -(2**63), 10**5000)
    ),
)


@given(st.one_of(TIMES, st.floats()))
def test_every_number_has_a_day(number: float) -> None:
    try:
        known = float(number)
    except OverflowError:
        known = float("inf")
    assert len(text.day(known)) == len("1970-01-01")
    assert html.when(known).endswith(" UTC")
    assert html.day(known)


@given(TIMES)
def test_a_time_of_a_run_is_a_date_or_none(number: int) -> None:
    said = hex(number) if abs(number) >= 10**4000 else str(number)
    values = {"started": said, "nodes": "n001", "kind": "internode", "stack": "v1", "code": "0"}
    line = load.last_test("run", load.RunRecord(values)).line
    assert (" UTC" in line) == (0 < number <= text.LAST_SECOND)


@given(TIMES)
def test_a_time_of_a_lock_is_a_date_or_a_fault(number: int) -> None:
    written = hex(number) if abs(number) >= 10**4000 else str(number)
    first = SHIPPED.index("last_modified = ")
    changed = f"{SHIPPED[:first]}last_modified = {written}{SHIPPED[SHIPPED.index(chr(10), first) :]}"
    if not 0 <= number <= text.LAST_SECOND:
        with pytest.raises(Trouble):
            parse_lock(changed, "lock")
        return
    lock = parse_lock(changed, "lock")
    for name, source in lock.sources.items():
        assert pin_facts(name, source)


@given(st.text(st.sampled_from("0123456789.e-+naif"), max_size=8), st.integers(1, 6000))
def test_counters_of_a_run_are_numbers_or_faults(word: str, digits: int) -> None:
    for value in (word, "9" * digits):
        for line in (
            f"time={value}",
            f"nic=mlx5_0 {value} InfiniBand {value} {value} 1 a:{value}",
            f"gpu={value} a:{value}",
        ):
            try:
                counters = run_folder.parse_counters(line, "file")
            except Trouble:
                continue
            json.dumps([counters.time, *(each.gbits for each in counters.nics.values())], allow_nan=False)


@given(st.integers(1, 6000), st.integers(1, 6000))
def test_sizes_in_what_a_run_sends_back_are_numbers_or_faults(first: int, second: int) -> None:
    with pytest.raises(Trouble):
        run_folder.parse_collected(b"file a %s %s\nx" % (b"9" * first, b"8" * second), "n001")


def a_run(folder: Path, **values: str) -> Path:
    """Return a copy of a recorded run with other values in its run.env."""
    run = folder / "run"
    shutil.copytree(TESTS / "cases" / "report" / "runs" / "failed", run)
    kept = [line for line in (run / "run.env").read_text().splitlines() if line.partition("=")[0] not in values]
    (run / "run.env").write_text("\n".join([*kept, *(f"{key}={value}" for key, value in values.items()), ""]))
    return run


@pytest.mark.parametrize("started", ["300000000000", str(2**40), str(2**63 - 1), "1e300", "nan", "-5"])
def test_a_report_of_a_run_at_no_time(started: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = ["report", f"--run={a_run(tmp_path, started=started, ended=started)}", f"--html={page}"]
    said = run_verb(words, tmp_path)
    assert said.code in (0, 4), said
    assert page.exists()
    assert b"Traceback" not in said.err


@pytest.mark.parametrize("number", [2**63 - 1, 2**40, 253402300800])
def test_a_lock_of_no_time_is_a_fault_of_its_file(number: int, tmp_path: Path) -> None:
    lock = tmp_path / "a.toml"
    first = SHIPPED.index("last_modified = ")
    lock.write_text(f"{SHIPPED[:first]}last_modified = {number}{SHIPPED[SHIPPED.index(chr(10), first) :]}")
    for words in (["lock", f"--lock={lock}"], ["diff", str(lock), str(ROOT / "deepep.lock.toml")]):
        said = run_verb(words, tmp_path)
        assert said.code == 1, said
        assert b"last_modified is too large" in said.err.replace(b": ", b" ")


def test_a_hosts_file_of_one_endless_line_is_a_fault(tmp_path: Path) -> None:
    for number, line in enumerate(("a" * 1_000_000, "a," * 500_000, "a " * 500_000, "a=b " * 250_000, "n[" * 500_000)):
        file = tmp_path / f"{number}.txt"
        file.write_text(f"{line}\n")
        said = run_verb(["facts", f"--hosts={file}"], tmp_path)
        assert said.code == 1, (line[:10], said.code, said.err[:500])
        assert len(said.err) < 10_000, line[:10]


def test_a_report_of_a_hundred_thousand_nodes(tmp_path: Path) -> None:
    nodes = ",".join(f"n{number:06}" for number in range(100_000))
    said = run_verb(["report", f"--run={a_run(tmp_path, nodes=nodes)}"], tmp_path)
    assert said.code in (0, 4), said.err[:500]
    assert b"100000" in said.out
