"""gc: what nobody needs goes, out of its name by one rename first; what a generation or a running build needs stays."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from deepep_bootstrap.bootstrap import build
from deepep_bootstrap.cli.commands.gc import gc
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.prefix import generations, history
from deepep_bootstrap.prefix.contents import Generation, Holdings, StoreEntry, rollback_target
from deepep_bootstrap.prefix.gc import Garbage, choose_garbage
from deepep_bootstrap.prefix.generations import Content
from deepep_bootstrap.remote.fleet import ConnectionPool
from tests.support.build import (
    FAST,
    HERE,
    ROOT,
    UNHURRIED,
    kill_group,
    make_prefix,
    owner_text,
    run_bash,
    script,
    start_bash,
    until,
    values,
)
from tests.support.consent import terminal
from tests.support.store import Prefix, entry_name

pytest_plugins = ["tests.support.store"]

GC = script(*generations.GC)
QUESTION = "Remove all this?"
OLD, NEW, BASE, LOOSE = (
    entry_name("deepep", "1"),
    entry_name("deepep", "2"),
    entry_name("nvshmem", "1"),
    entry_name("gdrcopy", "0"),
)


def collect(prefix: Prefix, keep: int = 1) -> history.CollectedGarbage:
    holdings = prefix.look()
    return history.collect(prefix.transport, prefix.place, holdings, choose_garbage(holdings, keep))


def environment(prefix: Prefix, drop: str = "", entries: str = "", seen: str = "") -> dict[str, str]:
    holdings = prefix.look()
    seen = seen or f"{holdings.current}: {' '.join(map(str, holdings.numbers))}"
    return {
        "PREFIX": str(prefix.path),
        "TOKEN": "gc",
        "SEEN": seen,
        "DROP": drop,
        "ENTRIES": entries,
        "HEARTBEAT": FAST,
    }


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of `used`, for its copies."""
    fleet = ConnectionPool([HERE])
    prefix = Prefix(make_prefix(tmp_path_factory.mktemp("once")), fleet)
    for name, needs in ((BASE, ()), (OLD, (BASE,)), (NEW, (BASE,)), (LOOSE, ())):
        prefix.entry(name, needs)
    prefix.offer(OLD)
    prefix.offer(NEW)
    fleet.close()
    return prefix.path


@pytest.fixture
def used(prefix: Prefix, made_once: Path) -> Prefix:
    """Two generations that share an entry, and an entry that nobody needs."""
    shutil.rmtree(prefix.path)
    subprocess.run(["cp", "-a", made_once, prefix.path], check=True)
    return prefix


# What goes


def test_entries_that_no_kept_generation_needs_go_with_their_generation(used: Prefix) -> None:
    done = collect(used)
    assert (done.generations, set(done.entries), done.kept, done.stuck) == ((1,), {OLD, LOOSE}, (), ())
    assert used.names() == {NEW, BASE}, "what a kept entry needs stays, although no generation names it"
    assert used.numbers() == ["2"]
    assert os.readlink(used.path / "current") == "generations/2"


def test_the_current_generation_stays_however_old_it_is(used: Prefix) -> None:
    holdings = used.look()
    history.roll_back(used.transport, used.place, holdings, rollback_target(holdings, 1))
    used.entry(entry_name("deepep", "3"))
    done = collect(used)
    assert done.generations == ()
    assert used.names() == {OLD, NEW, BASE}
    assert os.readlink(used.path / "current") == "generations/1"


def test_what_is_not_ours_stays(used: Prefix) -> None:
    (used.path / "store/lost+found").mkdir()
    (used.path / "store/README").write_text("")
    (used.path / "generations/notes").mkdir()
    collect(used)
    assert {"lost+found", "README"} <= used.names()
    assert "notes" in used.numbers()


def test_read_only_folders_go_too_and_links_lead_nowhere(used: Prefix, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("")
    entry = used.path / "store" / LOOSE
    (entry / "lib/away").symlink_to(outside)
    (entry / "lib").chmod(0o555)
    assert LOOSE in collect(used).entries
    assert (outside / "file").exists()


@pytest.mark.parametrize("name", ["../generations", "a/b", ".own-x", "", "-rf"])
def test_a_bad_name_is_refused(used: Prefix, name: str) -> None:
    before = used.names()
    done = run_bash(GC, environment(used, entries=name or "'"))
    assert done.returncode == 1
    assert "is no name of an entry" in done.stderr
    assert used.names() == before


@pytest.mark.parametrize("number", ["2", "../1", "01", "x"])
def test_a_generation_that_must_stay_is_refused(used: Prefix, number: str) -> None:
    done = run_bash(GC, environment(used, drop=number))
    assert done.returncode == 1
    assert f"generation '{number}' cannot be removed" in done.stderr
    assert used.numbers() == ["1", "2"]


# Who is there at the same time


def start_session(prefix: Prefix, tmp_path: Path, *names: str) -> subprocess.Popen[str]:
    """Start the session of a build that uses these entries, and return when it is known."""
    env = {
        "PREFIX": str(prefix.path),
        "TOKEN": "s",
        "TMPDIR": str(tmp_path),
        "ENTRIES": "\n".join(names),
        "HEARTBEAT": FAST,
    }
    session = start_bash(script(*build.SESSION), env, stdin=subprocess.PIPE)
    assert session.stdout is not None
    assert session.stdout.readline().startswith("scratch=")
    return session


def test_what_a_running_build_uses_stays_with_all_it_needs(used: Prefix, tmp_path: Path) -> None:
    session = start_session(used, tmp_path, OLD)
    holdings = used.look()
    assert holdings.used.keys() == {OLD}
    assert f"pid {session.pid} " in holdings.used[OLD]
    garbage = choose_garbage(holdings, 1)
    assert ([entry.name for entry in garbage.entries], [entry.name for entry in garbage.busy]) == ([LOOSE], [OLD])
    session.communicate("")
    assert used.look().used == {}
    assert OLD in collect(used).entries


def test_a_build_that_began_after_the_look_is_seen_under_the_lock(used: Prefix, tmp_path: Path) -> None:
    holdings = used.look()
    session = start_session(used, tmp_path, OLD)
    done = history.collect(used.transport, used.place, holdings, choose_garbage(holdings, 1))
    assert [name for name, _ in done.kept] == [OLD]
    assert done.entries == (LOOSE,)
    session.communicate("")


def test_a_build_that_begins_in_the_middle_gets_its_entry_back(used: Prefix, tmp_path: Path) -> None:
    """The session announces itself after gc has chosen and before gc looks again."""
    folder = tmp_path / "bin"
    folder.mkdir()
    # The second `find_used` runs after everything was moved aside; a session is announced just before.
    slow = GC.replace(
        "    set_aside\n",
        f"    set_aside\n    : >{folder}/moved\n    until [[ -e {folder}/go ]]; do sleep 0.02; done\n",
    )
    assert slow != GC
    gc = start_bash(slow, environment(used, entries=f"{OLD}\n{LOOSE}", drop="1"))
    until((folder / "moved").exists, "the renames")
    assert used.names() >= {f".gone-{OLD}-gc", f".gone-{LOOSE}-gc"}
    session = start_session(used, tmp_path, OLD)
    (folder / "go").touch()
    out, err = gc.communicate()
    assert gc.returncode == 0, err
    assert f"kept={OLD}\t" in out
    assert f"removed={LOOSE}" in out
    assert {name for name in used.names() if not name.startswith(".")} == {NEW, BASE, OLD}
    session.communicate("")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_an_end_in_the_middle_leaves_a_valid_store(used: Prefix, tmp_path: Path, signum: int) -> None:
    slow = GC.replace(
        "    set_aside\n",
        f"    set_aside\n    : >{tmp_path}/moved\n    until [[ -e {tmp_path}/go ]]; do sleep 0.02; done\n",
    )
    gc = start_bash(slow, environment(used, entries=f"{OLD}\n{LOOSE}", drop="1"))
    until((tmp_path / "moved").exists, "the renames")
    kill_group(gc, signum)
    until(lambda: gc.poll() is not None, "its end")
    assert os.readlink(used.path / "current") == "generations/2"
    assert {NEW, BASE} <= used.names()
    if signum == signal.SIGTERM:
        assert {OLD, LOOSE} <= used.names(), "what was moved has its name again"
        assert used.numbers() == ["1", "2"]
    done = collect(used)
    assert used.names() == {NEW, BASE}
    assert used.numbers() == ["2"]
    if signum == signal.SIGKILL:
        assert set(done.leftovers) == {f".gone-{OLD}-gc", f".gone-{LOOSE}-gc"}


def test_generations_that_came_meanwhile_stop_it(used: Prefix) -> None:
    holdings = used.look()
    used.offer(OLD)
    before = used.names()
    with pytest.raises(Trouble, match="another run changed the generations meanwhile"):
        history.collect(used.transport, used.place, holdings, choose_garbage(holdings, 1))
    assert used.names() == before


def test_an_offer_of_an_entry_that_was_removed_is_refused(used: Prefix) -> None:
    """The hard case: another run found the entry in the store, planned no build of it, and publishes after gc."""
    collect(used)
    with pytest.raises(Trouble, match=f"was removed meanwhile — found {OLD}. Try: the same command again"):
        used.offer(OLD)
    assert os.readlink(used.path / "current") == "generations/2"
    assert used.numbers() == ["2"]


def test_offers_and_gc_at_the_same_time_never_offer_what_is_gone(prefix: Prefix) -> None:
    names = [entry_name("deepep", str(number)) for number in range(4)]
    for name in names:
        prefix.entry(name)
    prefix.offer(names[0])
    offers = []
    for number, name in enumerate(names):
        text = json.dumps({"generation": 0, "offer": {"stacks": {"v1": {"deepep": name}}}}, indent=2).encode()
        data = b"".join(generations.tar_files([Content("manifest.json", text)]))
        env = {"PREFIX": str(prefix.path), "TOKEN": f"o{number}", "BASE": "1", "ENTRIES": name, "HEARTBEAT": UNHURRIED}
        process = start_bash(script(*generations.OFFER), env, stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.buffer.write(data)
        process.stdin.buffer.flush()
        offers.append(process)
    gc = start_bash(GC, environment(prefix, entries="\n".join(names[1:]), seen="1: 1") | {"HEARTBEAT": UNHURRIED})
    for process in [*offers, gc]:
        _, err = process.communicate()
        assert process.returncode == 0, err
    holdings = prefix.look()
    assert all(holdings.missing(generation) == () for generation in holdings.generations)


# Who uses what would go


def flags(prefix: Prefix, **more: object) -> Flags:
    return Flags(root=ROOT, prefix=str(prefix.path), **more)


@contextmanager
def running(file: str = "/dev/null", **env: str) -> Iterator[int]:
    """Run a program that maps a file, which is told it in a way that nobody sees, until the end of the block."""
    program = (
        "import mmap, sys; kept = open(input()); kept = kept.name == '/dev/null' or mmap.mmap(kept.fileno(), "
        "0, prot=mmap.PROT_READ)"
    )
    words = [sys.executable, "-c", f"{program}; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        print(file, file=process.stdin, flush=True)
        assert process.stdout.readline() == "\n"
        yield process.pid
        process.communicate("")


def test_what_a_process_has_mapped_or_names_stays(used: Prefix, capsys: pytest.CaptureFixture[str]) -> None:
    content = f"{used.path}/store/{LOOSE}/lib/content"
    with running(content) as pid, running(PROGRAMS=f"{used.path}/generations/1/programs"):
        assert gc(flags(used, yes=True, json=True), keep="1") == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["generations"], document["entries"]) == ([], [])
        by = {each["name"]: each["by"] for each in document["in_use"]}
        assert by.keys() == {"generations/1", LOOSE}
        assert by[LOOSE].endswith(f"pid {pid} on localhost")
        assert used.names() == {OLD, NEW, BASE, LOOSE}
    # A shell that loaded the module of generation 1 keeps what it loaded; nobody needs the offer for that.
    with running(LD_LIBRARY_PATH=f"/usr/lib:{used.path}/store/{OLD}/lib"):
        assert gc(flags(used, yes=True), keep="1") == 0
        said = capsys.readouterr().out
        assert "in use by python" in said
        assert "Jobs that were submitted or started with what goes lose its files" in said
    assert (used.names(), used.numbers()) == ({OLD, NEW, BASE}, ["2"])


def test_gc_removes_nothing_that_nobody_confirmed(
    used: Prefix, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gc(flags(used, dry_run=True), keep="1") == 0
    assert capsys.readouterr().out.endswith("would free 10 bytes\n")
    assert gc(flags(used), keep="1") == 1
    plan, refused = capsys.readouterr()
    assert plan == golden("refused.txt", used, plan)
    assert refused == (
        "gc: not confirmed, nothing was changed — found no terminal to ask on, wanted --yes. Try: the same command "
        "with --yes\n"
    )
    assert gc(flags(used, json=True), keep="1") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["generations"], document["bytes"]) == ([], 0)
    assert document["errors"][0]["found"] == "--json, which asks nothing"
    with terminal(monkeypatch, "\n", QUESTION):
        assert gc(flags(used), keep="1") == 1
    assert (used.names(), used.numbers()) == ({OLD, NEW, BASE, LOOSE}, ["1", "2"])
    with terminal(monkeypatch, "y\n", QUESTION):
        assert gc(flags(used), keep="1") == 0
    assert (used.names(), used.numbers()) == ({NEW, BASE}, ["2"])


def golden(name: str, prefix: Prefix, said: str) -> str:
    """Return the expected screen with this prefix's path; written anew where `said` is to become it."""
    path = ROOT / "tests/golden/consent" / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(said.replace(str(prefix.path), "PREFIX"), encoding="utf-8")
    return path.read_text(encoding="utf-8").replace("PREFIX", str(prefix.path))


def test_gc_removes_nothing_while_a_host_is_unseen(
    used: Prefix, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        hosts = tmp_path / "hosts.txt"
        port = taken.getsockname()[1]
        hosts.write_text(
            f"defaults prefix={used.path} prefix_host=here\nhere connection=local\n127.0.0.1 port={port}\n"
        )
        there = Flags(root=ROOT, hosts=str(hosts), yes=True)
        assert gc(there, keep="1") == 1
        said, refused = capsys.readouterr()
        assert "freed" not in said
        assert (
            "127.0.0.1: nobody can see what runs there, and it may use what goes, so nothing was removed. Try: the "
            "same command with --limit=here, or --ignore-unreachable\n"
        ) in refused
        assert (used.names(), used.numbers()) == ({OLD, NEW, BASE, LOOSE}, ["1", "2"])
        assert gc(replace(there, dry_run=True), keep="1") == 1, "what would go is shown, and who was not seen"
        assert "would free 10 bytes" in capsys.readouterr().out
        assert gc(there, keep="1", ignore_unreachable=True) == 0
    assert "127.0.0.1: its processes could not be looked at" in capsys.readouterr().out
    assert (used.names(), used.numbers()) == ({NEW, BASE}, ["2"])


# What dead builds left


def leave(prefix: Prefix, name: str, token: str, **changes: str) -> None:
    """Leave what a builder of `name` that was killed leaves."""
    store = prefix.path / "store"
    (store / f".own-{name}-{token}").write_text(owner_text(token=token, **changes))
    (store / f".tmp-{name}-{token}/lib").mkdir(parents=True)
    (store / f".tmp-{name}-{token}/lib/part").write_text("12345")


def test_leftovers_of_dead_builds_go_and_those_of_living_ones_stay(used: Prefix) -> None:
    store = used.path / "store"
    leave(used, OLD, "gone")
    os.link(store / f".own-{OLD}-gone", store / f".lock-{OLD}")
    me = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]
    leave(used, NEW, "living", pid=str(os.getpid()), start=me)
    (store / f".tmp-{BASE}-nobody").mkdir()
    assert dict(used.look().leftovers) == {f".tmp-{OLD}-gone": 5, f".tmp-{BASE}-nobody": 0}
    done = collect(used, keep=5)
    assert set(done.leftovers) == {f".tmp-{OLD}-gone", f".tmp-{BASE}-nobody"}
    assert used.names() == {NEW, BASE, OLD, f".own-{NEW}-living", f".tmp-{NEW}-living"}


def test_another_hosts_build_counts_as_gone_after_three_intervals_of_silence(used: Prefix) -> None:
    leave(used, OLD, "far", host="elsewhere")
    (used.path / "store/.own-session-far").write_text(owner_text(host="elsewhere") + f"entry={LOOSE}\n")
    assert used.look().used == {LOOSE: "elsewhere pid 4194304 since 2026-01-01T00:00:00Z"}, "a look does not wait"
    done = run_bash(GC, environment(used, entries=LOOSE))
    assert done.returncode == 0, done.stderr
    assert f"removed={LOOSE}" in done.stdout
    assert used.names() == {OLD, NEW, BASE}


def test_another_hosts_build_that_beats_stays(used: Prefix) -> None:
    path = used.path / "store/.own-session-far"
    path.write_text(owner_text(host="elsewhere") + f"entry={LOOSE}\n")
    gc = start_bash(GC, environment(used, entries=LOOSE))
    beat = 1
    while gc.poll() is None:
        beat += 1
        with path.open("r+") as file:
            file.write(owner_text(host="elsewhere", beat=f"{beat:010d}"))
    out, err = gc.communicate()
    assert f"kept={LOOSE}\telsewhere pid 4194304" in out, err
    assert {LOOSE, ".own-session-far"} <= used.names()


def test_what_cannot_be_removed_is_said_and_out_of_the_way(used: Prefix) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs chattr, which is root's")
    file = used.path / "store" / LOOSE / "lib/content"
    if subprocess.run(["chattr", "+i", file], capture_output=True, check=False).returncode:
        mount = used.path / "store" / LOOSE / "lib"
        subprocess.run(["mount", "-t", "tmpfs", "none", mount], check=True)
        undo = ["umount", str(used.path / "store" / f".gone-{LOOSE}-gc/lib")]
    else:
        undo = ["chattr", "-i", str(used.path / "store" / f".gone-{LOOSE}-gc/lib/content")]
    done = run_bash(GC, environment(used, entries=LOOSE))
    subprocess.run(undo, check=True)
    assert values(done.stdout)["stuck"] == f"{used.path}/store/.gone-{LOOSE}-gc"
    assert values(done.stdout)["state"] == "collected"
    assert collect(used, keep=5).leftovers == (f".gone-{LOOSE}-gc",)


# The choice, with strings alone


def holdings_of(offers: dict[int, list[str]], needs: dict[str, list[str]], current: int) -> Holdings:
    entries = {name: StoreEntry(name, 1, {"needs": needs[name]}) for name in needs}
    made = tuple(
        Generation(number, {"offer": {"stacks": {"s": dict(enumerate(names))}}})
        for number, names in sorted(offers.items())
    )
    return Holdings(current, made, entries)


NAMES = [entry_name("x", str(number)) for number in range(6)]


@given(
    offers=st.dictionaries(st.integers(1, 9), st.lists(st.sampled_from(NAMES), max_size=3), min_size=1, max_size=6),
    needs=st.fixed_dictionaries({name: st.lists(st.sampled_from(NAMES), max_size=2) for name in NAMES}),
    keep=st.integers(1, 7),
    data=st.data(),
)
def test_nothing_that_a_kept_generation_needs_is_ever_chosen(
    offers: dict[int, list[str]], needs: dict[str, list[str]], keep: int, data: st.DataObject
) -> None:
    current = data.draw(st.sampled_from(sorted(offers)))
    holdings = holdings_of(offers, needs, current)
    garbage = choose_garbage(holdings, keep)
    kept = [number for number in holdings.numbers if number not in garbage.generations]
    assert current in kept
    assert kept[-keep:] == list(holdings.numbers[-keep:]) or len(kept) <= keep + 1
    left = set(holdings.entries) - {entry.name for entry in garbage.entries}
    for number in kept:
        generation = holdings.get(number)
        assert generation is not None
        assert holdings.closure(generation.names) <= left
    for name in left:
        assert any(name in holdings.closure(offers[number]) for number in kept), f"{name} stays for no reason"


def test_a_kept_generation_that_cannot_be_read_stops_everything() -> None:
    holdings = Holdings(2, (Generation(1, {}), Generation(2, {"offer": {"stacks": {}}})), {})
    assert choose_garbage(holdings, 1) == Garbage((1,), ())
    with pytest.raises(Trouble, match="generation 1: its manifest cannot be read, so nobody knows what it needs"):
        choose_garbage(holdings, 2)


def test_the_door_of_another_user_is_told_who_may(used: Prefix) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs a second user")
    folder = Path(shutil.copytree(used.path, f"/tmp/gc-{os.getpid()}", symlinks=True))
    try:
        env = environment(used, entries=LOOSE) | {"PREFIX": str(folder)}
        done = run_bash(GC, env, user="nobody")
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 1
    assert f"nobody may not write in {folder}/generations (owner root, mode 755)" in done.stderr
