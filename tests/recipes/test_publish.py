"""The publishing protocol with real processes: races, kills, stale locks, full disks. A small made-up entry stands
for all kinds."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.build import (
    BUILD_SMALL,
    FAST,
    PUBLISH,
    RECIPES,
    environment,
    kill_group,
    make_prefix,
    owner_text,
    run_bash,
    script,
    start_bash,
    store_names,
    until,
    values,
    walk,
)

pytestmark = pytest.mark.usefixtures("programs")

SMALL = script(*PUBLISH, extra=BUILD_SMALL)
ENTRY = "e-small-1"
MY_START = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]
PHASES = ("build", "relocate", "check", "publish")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can reach (pytest's own is private)."""
    folder = Path(tempfile.mkdtemp(prefix="publish-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def prefix(place: Path) -> Path:
    return make_prefix(place)


def stop_in(folder: Path, phase: str) -> dict[str, str]:
    """Return settings that make publish.sh stand still in one phase until the file `go` is in `folder`."""
    folder.mkdir(exist_ok=True)
    wait = folder / "wait"
    wait.write_text(f"#!/bin/sh\n: >{folder}/begun\nuntil [ -e {folder}/go ]; do sleep 0.02; done\n")
    wait.chmod(0o755)
    if phase == "build":
        return {"HOOK_BUILD": str(wait)}
    if phase == "check":
        return {"HOOK_CHECK": str(wait)}
    if phase == "relocate":
        slow = folder / "python"
        slow.write_text(f'#!/bin/sh\n{wait}\nexec /usr/bin/python3 "$@"\n')
        slow.chmod(0o755)
        return {"PYTHON": str(slow)}
    sync = folder / "sync"
    sync.write_text(f"#!/bin/sh\n{wait}\n")
    sync.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def reach(process: subprocess.Popen[str], phase: str) -> None:
    """Read a script's output until it says that `phase` begins."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == f"phase={phase}":
            return
    raise AssertionError(f"ended before {phase}: {process.stderr.read() if process.stderr else ''}")


def test_publishes_once_and_finds_it_the_next_time(prefix: Path, place: Path) -> None:
    first = run_bash(SMALL, environment(prefix, place / "s", "one"))
    second = run_bash(SMALL, environment(prefix, place / "s", "two"))
    assert values(first.stdout)["state"] == "published", first.stderr
    assert second.stdout == "state=present\n"
    assert store_names(prefix) == {ENTRY}
    assert (prefix / "store" / ENTRY / "lib/content").read_text() == "made by one\n"


def test_published_files_are_read_only_and_for_everybody(prefix: Path, place: Path) -> None:
    run_bash(SMALL, environment(prefix, place / "s", "one", HOOK_BUILD="umask 077"))
    for path in walk(prefix / "store"):
        mode = path.stat().st_mode
        assert mode & 0o222 == 0 or path.is_dir()
        assert mode & 0o044 == 0o044, path


@pytest.mark.parametrize("phase", PHASES)
def test_a_kill_in_any_phase_leaves_a_valid_store_and_the_next_run_finishes(
    prefix: Path, place: Path, phase: str
) -> None:
    stops = stop_in(place / "stop", phase)
    first = start_bash(SMALL, environment(prefix, place / "s", "one", **stops))
    reach(first, phase)
    kill_group(first)
    assert ENTRY not in store_names(prefix)
    assert f".tmp-{ENTRY}-one" in store_names(prefix)
    second = run_bash(SMALL, environment(prefix, place / "s", "two"))
    assert values(second.stdout)["state"] == "published", second.stderr
    assert "its process is gone" in second.stderr
    assert store_names(prefix) == {ENTRY}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_removes_what_is_not_published(prefix: Path, place: Path, signum: int) -> None:
    first = start_bash(SMALL, environment(prefix, place / "s", "one", **stop_in(place / "stop", "build")))
    reach(first, "build")
    until((place / "stop/begun").exists, "the build's own process")
    kill_group(first, signum)
    assert first.returncode == 128 + signum
    assert store_names(prefix) == set()


def test_a_failing_build_leaves_the_store_as_it_was(prefix: Path, place: Path) -> None:
    done = run_bash(SMALL, environment(prefix, place / "s", "one", HOOK_BUILD="false"))
    assert done.returncode != 0
    assert store_names(prefix) == set()
    checked = run_bash(SMALL, environment(prefix, place / "s", "one", HOOK_CHECK="false"))
    assert checked.returncode != 0
    assert "state" not in values(checked.stdout)
    assert store_names(prefix) == set()


def test_of_two_builders_one_builds_and_both_have_the_entry(prefix: Path, place: Path) -> None:
    runs = [
        start_bash(SMALL, environment(prefix, place / name, name, HOOK_BUILD="sleep 0.3")) for name in ("one", "two")
    ]
    states = sorted(values(run.communicate()[0])["state"] for run in runs)
    assert states == ["present", "published"]
    assert store_names(prefix) == {ENTRY}


def test_a_waiter_says_for_whom_it_waits_and_uses_the_others_entry(prefix: Path, place: Path) -> None:
    first = start_bash(SMALL, environment(prefix, place / "a", "one", **stop_in(place / "stop", "build")))
    reach(first, "build")
    second = start_bash(SMALL, environment(prefix, place / "b", "two"))
    assert second.stdout is not None
    waiting = second.stdout.readline()
    assert waiting.startswith(f"waiting={os.uname().nodename} pid {first.pid} since 20")
    (place / "stop/go").touch()
    out, err = second.communicate()
    assert values(out) == {"state": "present"}
    assert err.count(f"waiting for {ENTRY}: held by") == 1
    assert values(first.communicate()[0])["state"] == "published"
    assert store_names(prefix) == {ENTRY}


def test_the_rename_decides_when_the_lock_has_failed(prefix: Path, place: Path) -> None:
    first = start_bash(SMALL, environment(prefix, place / "a", "one", **stop_in(place / "stop", "publish")))
    reach(first, "publish")
    (prefix / "store" / f".lock-{ENTRY}").unlink()
    second = run_bash(SMALL, environment(prefix, place / "b", "two"))
    assert values(second.stdout)["state"] == "published"
    (place / "stop/go").touch()
    out, err = first.communicate()
    assert first.returncode == 0, err
    assert values(out)["state"] == "present"
    assert "published e-small-1 first" in err
    assert (prefix / "store" / ENTRY / "lib/content").read_text() == "made by two\n"
    assert store_names(prefix) == {ENTRY}


def test_a_builder_whose_folder_was_taken_away_cannot_publish_the_rest(prefix: Path, place: Path) -> None:
    """A builder that only seemed dead: its folder is renamed before it is emptied, so its own rename finds nothing."""
    first = start_bash(SMALL, environment(prefix, place / "a", "one", **stop_in(place / "stop", "publish")))
    reach(first, "publish")
    os.killpg(first.pid, signal.SIGSTOP)
    lock = prefix / "store" / f".lock-{ENTRY}"
    elsewhere(prefix, lock.read_text())
    second = run_bash(SMALL, environment(prefix, place / "b", "two"))
    assert values(second.stdout)["state"] == "published", second.stderr
    assert "no heartbeat over three intervals" in second.stderr
    (place / "stop/go").touch()
    os.killpg(first.pid, signal.SIGCONT)
    first.communicate()
    assert (prefix / "store" / ENTRY / "lib/content").read_text() == "made by two\n"
    assert store_names(prefix) == {ENTRY}


def elsewhere(prefix: Path, owner: str, beat: int = 0, **changes: str) -> None:
    """Make the lock look as if another host held it; the file stays the same one, as the owner's own name for it."""
    lines = dict(line.split("=", 1) for line in owner.splitlines())
    lines |= {**(changes or {"host": "elsewhere"}), "beat": f"{beat:010d}"}
    with (prefix / "store" / f".lock-{ENTRY}").open("r+") as file:
        file.write("".join(f"{key}={value}\n" for key, value in lines.items()))
        file.truncate()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "its process is gone"),
        ({"boot": "another-boot", "pid": "1"}, "no heartbeat over three intervals"),
        ({"pid": str(os.getpid()), "start": "1"}, "its process is gone"),
        ({"host": "elsewhere", "pid": "1"}, "no heartbeat over three intervals"),
        ({"pidns": "pid:[1]", "pid": "1"}, "no heartbeat over three intervals"),
    ],
    ids=["no-such-process", "silent-other-boot", "other-start-time", "silent-other-host", "silent-other-namespace"],
)
def test_stale_locks_are_taken_over_with_what_their_owner_left(
    prefix: Path, place: Path, changes: dict[str, str], reason: str
) -> None:
    store = prefix / "store"
    (store / f".lock-{ENTRY}").write_text(owner_text(**changes))
    os.link(store / f".lock-{ENTRY}", store / f".own-{ENTRY}-gone")
    (store / f".tmp-{ENTRY}-gone" / "lib").mkdir(parents=True)
    done = run_bash(SMALL, environment(prefix, place / "s", "new"))
    assert values(done.stdout)["state"] == "published", done.stderr
    assert reason in done.stderr
    assert store_names(prefix) == {ENTRY}


def test_a_silent_owner_is_given_three_intervals(prefix: Path, place: Path) -> None:
    (prefix / "store" / f".lock-{ENTRY}").write_text(owner_text(host="elsewhere"))
    waiter = start_bash(SMALL, environment(prefix, place / "s", "new", HEARTBEAT="100"))
    assert waiter.stdout is not None
    assert waiter.stdout.readline().startswith("waiting=elsewhere pid 4194304")
    assert waiter.poll() is None
    kill_group(waiter)
    assert f".lock-{ENTRY}" in store_names(prefix)


@pytest.mark.parametrize("changes", [{"host": "elsewhere"}, {"boot": "another-boot"}], ids=["host", "host-of-our-name"])
def test_a_beating_owner_on_another_host_is_waited_for(prefix: Path, place: Path, changes: dict[str, str]) -> None:
    """Another boot id under our own name is another host of that name as well as this one before it booted."""
    lock = prefix / "store" / f".lock-{ENTRY}"
    lock.write_text(owner_text(**changes))
    stop = threading.Event()
    beats: list[int] = []

    def keep_beating() -> None:
        while not stop.wait(float(FAST) / 2):
            beats.append(len(beats))
            elsewhere(prefix, owner_text(), len(beats), **changes)

    heart = threading.Thread(target=keep_beating)
    heart.start()
    try:
        waiter = start_bash(SMALL, environment(prefix, place / "s", "new"))
        until(lambda: len(beats) > 15 or waiter.poll() is not None, "five of the waiter's intervals")
        assert waiter.poll() is None
    finally:
        stop.set()
        heart.join()
    lock.unlink()
    out, err = waiter.communicate()
    assert values(out)["state"] == "published"
    assert "stale" not in err


def test_the_heart_beats_and_stops_with_its_builder(prefix: Path, place: Path) -> None:
    builder = start_bash(
        SMALL, environment(prefix, place / "s", "one", HEARTBEAT="0.05", **stop_in(place / "stop", "build"))
    )
    reach(builder, "build")
    lock = prefix / "store" / f".lock-{ENTRY}"
    first = lock.read_text()
    until(lambda: lock.read_text() != first, "a heartbeat")
    assert len(lock.read_text()) == len(first)
    os.kill(builder.pid, signal.SIGKILL)
    builder.wait()

    def left_over() -> str:
        return subprocess.run(
            ["ps", "-o", "pid=", "--sid", str(builder.pid)], capture_output=True, text=True, check=False
        ).stdout.strip()

    last = lock.read_text()
    (place / "stop/go").touch()
    until(lambda: not left_over(), "the end of the heart and of the build without its builder")
    after = lock.read_text()
    assert int(after[-11:-1]) - int(last[-11:-1]) <= 1


def test_leftovers_without_a_lock_are_swept_when_their_owner_is_gone(prefix: Path, place: Path) -> None:
    store = prefix / "store"
    for name in (f".tmp-{ENTRY}-nameless", f".tmp-{ENTRY}-gone", f".trash-{ENTRY}-gone-old"):
        (store / name / "lib").mkdir(parents=True)
    (store / f".own-{ENTRY}-gone").write_text(owner_text())
    (store / f".own-{ENTRY}-waiter").write_text(owner_text(token="waiter"))
    done = run_bash(SMALL, environment(prefix, place / "s", "new"))
    assert values(done.stdout)["state"] == "published", done.stderr
    assert store_names(prefix) == {ENTRY}


def test_leftovers_of_another_host_stay_until_its_lock_is_broken(prefix: Path, place: Path) -> None:
    store = prefix / "store"
    (store / f".own-{ENTRY}-far").write_text(owner_text(host="elsewhere", token="far"))
    (store / f".tmp-{ENTRY}-far").mkdir()
    done = run_bash(SMALL, environment(prefix, place / "s", "new"))
    assert values(done.stdout)["state"] == "published", done.stderr
    assert store_names(prefix) == {ENTRY, f".own-{ENTRY}-far", f".tmp-{ENTRY}-far"}


def test_another_entrys_build_is_left_alone(prefix: Path, place: Path) -> None:
    (prefix / "store/.tmp-e-other-1-gone").mkdir()
    run_bash(SMALL, environment(prefix, place / "s", "new"))
    assert store_names(prefix) == {ENTRY, ".tmp-e-other-1-gone"}


def test_an_unprivileged_user_publishes(place: Path) -> None:
    user = "nobody" if os.geteuid() == 0 else ""
    for name in ("prefix", "s"):
        (place / name).mkdir(mode=0o755)
    env = environment(place / "prefix", place / "s", "one", OWNER=user)
    if user:
        for path in (place / "prefix", place / "s"):
            shutil.chown(path, user)
    ready = run_bash(script("lib.sh", "prefix/lib/share.sh", "prefix/lib/trust.sh", "prefix/init.sh"), env, user=user)
    assert ready.returncode == 0, ready.stderr
    done = run_bash(SMALL, env, user=user)
    assert values(done.stdout)["state"] == "published", done.stderr
    assert (place / "prefix/store" / ENTRY).owner() == (user or os.environ.get("USER", Path(place).owner()))
    again = run_bash(SMALL, env | {"TOKEN": "two"}, user=user)
    assert again.stdout == "state=present\n"


def test_a_store_we_may_not_write_in_is_named(prefix: Path, place: Path) -> None:
    shutil.rmtree(prefix / "store")
    done = run_bash(SMALL, environment(prefix, place / "s", "one"))
    assert done.returncode == 1
    assert f"{prefix}/store is not a directory we may write in" in done.stderr


def test_a_full_disk_is_said_and_leaves_nothing(place: Path) -> None:
    """In a mount namespace of its own: a prefix with one megabyte of room, then with more."""
    (place / "prefix").mkdir()
    (place / "publish").write_text(SMALL)
    (place / "init").write_text(script("lib.sh", "prefix/lib/share.sh", "prefix/lib/trust.sh", "prefix/init.sh"))
    env = environment(
        place / "prefix",
        place / "s",
        "one",
        HOOK_BUILD="dd if=/dev/zero bs=1M count=3 status=none of=$OUT/big",
        FOLDER=str(place),
    )
    steps = """
    mount -t tmpfs -o size=1m,mode=755 none "$PREFIX" && bash "$FOLDER/init" >&2 || exit 9
    export HOOK_BUILD="$FOLDER/fill"
    BIG="$PREFIX/store/.tmp-$ENTRY-$TOKEN/big"
    printf '#!/bin/sh\nexec dd if=/dev/zero bs=1M count=3 status=none of="%s"\n' "$BIG" >"$HOOK_BUILD"
    chmod 755 "$HOOK_BUILD"
    bash "$FOLDER/publish" >&2
    echo "first=$?"
    echo "left=$(ls -A "$PREFIX/store" | wc -l)"
    mount -o remount,size=8m "$PREFIX"
    bash "$FOLDER/publish"
    echo "kept=$(ls -A "$PREFIX/store")"
    """
    words = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    done = subprocess.run(
        [*words, "bash", "-c", steps], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    found = values(done.stdout)
    assert found["first"] not in {"0", "9"}, done.stderr
    assert f"no space left on the filesystem of {place}/prefix/store" in done.stderr
    assert (found["left"], found["state"], found["kept"]) == ("0", "published", ENTRY)


def test_own_recipes_never_use_flock() -> None:
    assert not [name for name, text in RECIPES.items() if name.startswith("prefix/") and "flock -" in text]
