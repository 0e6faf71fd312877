"""A prefix on a network file system whose hosts remember names and attributes (tests/support/network_fs.py), and which
says ESTALE or EIO in the middle: nothing under a final name is incomplete, two who work at once make one entry, and what
ended with a message is finished by a later run, also on another host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.build import BUILD_SMALL, PUBLISH, environment, make_prefix, run_bash, script, until, values
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("programs")

REMEMBERED = 2.0
"""Seconds for which a host answers from memory; on NFS up to 60 (acdirmax)."""
HEARTBEAT = "0.5"
"""Seconds; three intervals of it are less than REMEMBERED, as 30 s are less than 60."""
ENTRY = "e-small-1"

PUBLISHING = script(*PUBLISH, extra=BUILD_SMALL)
OFFERING = script(
    "lib.sh", *(f"prefix/lib/{name}.sh" for name in ("owner", "lock", "share", "trust", "current")), "prefix/offer.sh"
)
SWITCHING = OFFERING.replace(script("prefix/offer.sh"), script("prefix/rollback.sh"))
COLLECTING = script(
    "lib.sh",
    *(f"prefix/lib/{name}.sh" for name in ("owner", "lock", "share", "trust", "current", "living")),
    "prefix/gc.sh",
)

HOST = """
set -eu
echo "$1" >/proc/sys/kernel/hostname
shift
exec "$@"
"""


@dataclass
class Member:
    """A host that has the prefix mounted, at the same path as all hosts."""

    name: str
    prefix: Path
    faults: Path
    pid: int
    scratch: Path

    @property
    def within(self) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-m", "-u", "-p"]

    def run(self, text: str, env: dict[str, str], data: bytes = b"") -> subprocess.CompletedProcess[str]:
        """Run a recipe here to its end."""
        return run_bash(text, env, data=data, within=self.within)

    def start(self, text: str, env: dict[str, str]) -> subprocess.Popen[str]:
        """Start a recipe here."""
        inputs = {"PATH": os.environ["PATH"], "HOME": "/tmp", **env}
        return subprocess.Popen(
            [*self.within, "bash", "-c", text], env=inputs, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def inputs(self, token: str, **more: str) -> dict[str, str]:
        """Return the inputs of publish.sh."""
        return environment(self.prefix, self.scratch, token, HEARTBEAT=HEARTBEAT, **more)

    def see(self, path: str) -> bool:
        """Look whether a path of the prefix is there: the answer is remembered."""
        return self.run(f'[[ -e "$PREFIX/{path}" ]]', {"PREFIX": str(self.prefix)}).returncode == 0

    def fail(self, operation: str, error: str, pattern: str) -> None:
        """Let an operation fail here from now on."""
        (self.faults / "fault").write_text(f"{operation} {error} {pattern}\n", encoding="utf-8")

    def mend(self) -> str:
        """Let nothing fail any more; return what failed."""
        (self.faults / "fault").unlink()
        given = self.faults / ".given"
        return given.read_text(encoding="utf-8") if given.exists() else ""


@dataclass
class Site:
    """Two hosts and the folder that they have mounted."""

    served: Path
    one: Member
    two: Member

    def names(self, folder: str = "store") -> set[str]:
        return {path.name for path in (self.served / folder).iterdir()}

    def hold(self) -> None:
        """Hold what is always true: an entry that has its name is complete, and the current generation too."""
        entry = self.served / "store" / ENTRY
        if entry.exists():
            check = ["sha256sum", "--quiet", "-c", "files.sha256"]
            subprocess.run(check, cwd=entry, check=True, capture_output=True)
            assert (entry / "lib/content").read_text(encoding="utf-8").startswith("made by ")
            assert (entry / "manifest.json").stat().st_size > 0
        current = self.served / "current"
        if current.is_symlink():
            assert (self.served / os.readlink(current) / "manifest.json").stat().st_size > 0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    served = make_prefix(tmp_path).rename(tmp_path / "served")
    prefix = tmp_path / "prefix"
    prefix.mkdir()
    holders: list[subprocess.Popen[str]] = []
    members = []
    try:
        for name in ("one", "two"):
            faults = tmp_path / f"faults-{name}"
            faults.mkdir()
            command = [sys.executable, "-m", "tests.support.network_fs", str(served), str(prefix), str(REMEMBERED)]
            inside = [
                "setpriv",
                "--pdeathsig",
                "KILL",
                "unshare",
                "-m",
                "-u",
                "-p",
                "-f",
                "--mount-proc",
                "--kill-child",
                "bash",
                "-c",
                HOST,
                "bash",
            ]
            holder = subprocess.Popen(
                [*inside, name, *command, str(faults)], cwd=ROOT,
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            holders.append(holder)
            assert holder.stdout
            assert holder.stdout.readline() == "ready\n"
            child = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text(encoding="utf-8").split()[0]
            members.append(Member(name, prefix, faults, int(child), tmp_path / f"scratch-{name}"))
        yield Site(served, *members)
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return code, output and words of a recipe that was started."""
    out, err = process.communicate()
    return process.returncode, out, err


def offered(site: Site, member: Member, base: int, **more: str) -> tuple[int, dict[str, str], str]:
    """Offer a generation from a host; return code, results and words."""
    folder = site.served.parent / f"offer-{member.name}"
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(f'{{"generation": 0, "by": "{member.name}"}}\n', encoding="utf-8")
    stream = subprocess.run(["tar", "-c", "-C", folder, "manifest.json"], check=True, capture_output=True).stdout
    env = {"PREFIX": str(member.prefix), "TOKEN": f"{member.name}-{base}", "HEARTBEAT": HEARTBEAT, "BASE": str(base)}
    done = member.run(OFFERING, {**env, **more}, stream)
    return done.returncode, values(done.stdout), done.stderr


def switched(member: Member, base: int, to: int, **more: str) -> tuple[int, dict[str, str], str]:
    """Roll back from a host."""
    env = {"PREFIX": str(member.prefix), "TOKEN": f"{member.name}-back", "HEARTBEAT": HEARTBEAT, "BASE": str(base)}
    done = member.run(SWITCHING, {**env, "TO": str(to), **more})
    return done.returncode, values(done.stdout), done.stderr


def collected(member: Member, seen: str, **more: str) -> tuple[int, dict[str, str], str]:
    """Collect garbage from a host."""
    env = {"PREFIX": str(member.prefix), "TOKEN": f"{member.name}-gc", "HEARTBEAT": HEARTBEAT, "SEEN": seen}
    done = member.run(COLLECTING, {**env, **more})
    return done.returncode, values(done.stdout), done.stderr


def published(member: Member, token: str, **more: str) -> tuple[int, dict[str, str], str]:
    """Publish the entry from a host."""
    done = member.run(PUBLISHING, member.inputs(token, **more))
    return done.returncode, values(done.stdout), done.stderr


def test_the_mounts_remember_what_is_no_longer_true(site: Site) -> None:
    """Of this file system itself: without it, the others of this file would show nothing."""
    ask = '[[ ! -e "$P/new" ]]; [[ -e "$P/old" ]]; touch "$S/new"; rm "$S/old"; '
    stale = '[[ ! -e "$P/new" && -e "$P/old" ]] || exit 3; '
    fresh = ': >"$P/.mine"; [[ -e "$P/new" && ! -e "$P/old" ]] || exit 4; '
    silly = 'exec 3>"$P/open"; rm "$P/open"; rmdir "$P" 2>/dev/null && exit 5; ls -a "$P" | grep -q "^.nfs" || exit 6'
    (site.served / "store/old").touch()
    env = {"P": f"{site.one.prefix}/store", "S": str(site.served / "store")}
    done = site.one.run(ask + stale + fresh + silly, env)
    assert done.returncode == 0, done
    until(lambda: site.names() == {"new", ".mine"}, "the end of the open file")


def test_two_builders_make_one_entry(site: Site) -> None:
    """Each has seen that the entry is not there, and remembers it."""
    for member in (site.one, site.two):
        assert not member.see(f"store/{ENTRY}")
    runs = [
        member.start(PUBLISHING, member.inputs(member.name, HOOK_BUILD=f"sleep {REMEMBERED + 1}"))
        for member in (site.one, site.two)
    ]
    ends = [finish(run) for run in runs]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert sorted(values(out)["state"] for _, out, _ in ends) == ["present", "published"], ends
    assert not [err for _, _, err in ends if "taken over" in err]
    assert site.names() == {ENTRY}
    site.hold()


def test_a_lock_is_judged_by_the_beat_in_it_and_not_by_times(site: Site) -> None:
    """The times of the lock's file are a day back, and the attributes that the other host remembers older than three
    intervals of the heartbeat: its text is what speaks."""
    first = site.one.start(PUBLISHING, site.one.inputs("one", HOOK_BUILD="sleep 6"))
    lock = site.served / "store" / f".lock-{ENTRY}"
    until(lock.exists, "the lock")
    second = site.two.start(PUBLISHING, site.two.inputs("two"))
    while first.poll() is None:
        if lock.exists():
            with suppress(FileNotFoundError):
                os.utime(lock, (0, 0))
        time.sleep(0.05)
    ends = [finish(first), finish(second)]
    assert [values(out)["state"] for _, out, _ in ends] == ["published", "present"], ends
    assert "waiting for e-small-1: held by one pid" in ends[1][2]
    assert "taken over" not in ends[1][2]
    assert site.names() == {ENTRY}
    site.hold()


def test_a_host_that_stands_still_loses_its_lock_and_cannot_publish_half(site: Site) -> None:
    """It goes on after another host has taken the lock, removed what it had made and published."""
    first = site.one.start(PUBLISHING, site.one.inputs("one", HOOK_BUILD="sleep 2"))
    until((site.served / "store" / f".tmp-{ENTRY}-one").exists, "the build")
    os.killpg(first.pid, signal.SIGSTOP)
    try:
        code, said, err = published(site.two, "two")
        assert (code, said["state"]) == (0, "published"), err
        assert "no heartbeat over three intervals" in err
    finally:
        while first.poll() is None:  # nsenter stops itself once more when it hears that its child was stopped
            os.killpg(first.pid, signal.SIGCONT)
            time.sleep(0.1)
    code, out, err = finish(first)
    assert code != 0 or values(out)["state"] == "present", (out, err)
    assert "Traceback" not in err
    assert (site.served / "store" / ENTRY / "lib/content").read_text(encoding="utf-8") == "made by two\n"
    site.hold()
    assert published(site.one, "again")[1] == {"state": "present"}


BROKEN_PUBLISH = [
    ("create", f"store/.own-{ENTRY}-*"),
    ("link", f"store/.lock-{ENTRY}"),
    ("mkdir", f"store/.tmp-{ENTRY}-*"),
    ("create", f"store/.tmp-{ENTRY}-*/lib/*"),
    ("write", f"store/.tmp-{ENTRY}-*/lib/*"),
    ("close", f"store/.tmp-{ENTRY}-*/lib/*"),
    ("write", f"store/.tmp-{ENTRY}-*/files.sha256"),
    ("read", f"store/.tmp-{ENTRY}-*/lib/content"),
    ("readdir", f"store/.tmp-{ENTRY}-*"),
    ("setattr", f"store/.tmp-{ENTRY}-*"),
    ("rename", f"store/{ENTRY}"),
    ("unlink", f"store/.*-{ENTRY}*"),
]


@pytest.mark.parametrize("error", ["ESTALE", "EIO"])
@pytest.mark.parametrize(("operation", "pattern"), BROKEN_PUBLISH)
def test_publishing_on_a_file_system_that_fails(site: Site, operation: str, pattern: str, error: str) -> None:
    """What one host could not finish, the other one does."""
    site.one.fail(operation, error, pattern)
    code, said, err = published(site.one, "one")
    assert site.one.mend(), "the fault was never met"
    site.hold()
    if code == 0:
        assert said["state"] == "published"
        assert operation == "unlink"  # the entry was there by then
    else:
        assert [line for line in err.splitlines() if line.startswith("error: ")], err
        assert not (site.served / "store" / ENTRY).exists() or operation == "unlink"
    code, said, err = published(site.two, "two")
    assert code == 0, err
    assert said["state"] == ("present" if operation == "unlink" else "published"), err
    site.hold()


@pytest.mark.sample
def test_offers_of_two_hosts_do_not_overwrite_each_other(site: Site) -> None:
    """The second host has seen that there is no current generation, and remembers it."""
    assert not site.two.see("current")
    assert not site.two.see("generations/1")
    assert offered(site, site.one, 0)[1] == {"state": "published", "generation": "1"}
    assert offered(site, site.two, 0)[1] == {"state": "stale", "generation": "1"}
    assert offered(site, site.two, 1)[1] == {"state": "published", "generation": "2"}
    assert offered(site, site.one, 1)[1] == {"state": "stale", "generation": "2"}
    assert switched(site.one, 1, 2)[1] == {"state": "stale", "generation": "2"}
    assert switched(site.one, 2, 1)[1] == {"state": "switched", "generation": "1"}
    assert switched(site.two, 2, 1)[1] == {"state": "stale", "generation": "1"}
    assert collected(site.two, "2: 1 2", DROP="1")[1] == {"state": "stale"}
    assert collected(site.two, "1: 1 2", DROP="2")[1]["state"] == "collected"
    assert switched(site.one, 1, 2)[1] == {"state": "absent", "generation": "1"}
    site.hold()
    assert site.names("generations") == {"1"}
    assert site.names("store") == set()


def test_an_entry_that_was_removed_elsewhere_is_not_offered(site: Site) -> None:
    """The offering host remembers that the entry is there."""
    assert published(site.one, "one")[0] == 0
    assert offered(site, site.one, 0)[1]["state"] == "published"
    assert site.two.see(f"store/{ENTRY}")
    assert collected(site.one, "1: 1", ENTRIES=ENTRY)[1] == {"removed": ENTRY, "state": "collected"}
    said = offered(site, site.two, 1, ENTRIES=ENTRY)[1]
    assert said == {"state": "missing", "generation": "1", "missing": ENTRY}
    assert switched(site.two, 1, 1, ENTRIES=ENTRY)[1]["state"] == "missing"
    site.hold()


BROKEN_OFFER = [
    ("create", "generations/.own-offer-*"),
    ("link", "generations/.lock-offer"),
    ("mkdir", "generations/.tmp-offer-*"),
    ("write", "generations/.tmp-offer-*/manifest.json"),
    ("rename", "generations/2"),
    ("symlink", ".link-*"),
    ("rename", "current"),
    ("readlink", "current"),
    ("opendir", "generations"),
]


@pytest.mark.parametrize("error", ["ESTALE", "EIO"])
@pytest.mark.parametrize(("operation", "pattern"), BROKEN_OFFER)
def test_offering_on_a_file_system_that_fails(site: Site, operation: str, pattern: str, error: str) -> None:
    """The generation before stays the current one, and the next offer, of another host, is made."""
    assert offered(site, site.one, 0)[1]["generation"] == "1"
    site.one.fail(operation, error, pattern)
    code, said, err = offered(site, site.one, 1)
    assert site.one.mend(), "the fault was never met"
    assert (code != 0, said) == (True, {}), (said, err)
    assert [line for line in err.splitlines() if line.startswith("error: ")], err
    assert os.readlink(site.served / "current") == "generations/1"
    site.hold()
    code, said, err = offered(site, site.two, 1)
    assert (code, said["state"]) == (0, "published"), err
    assert os.readlink(site.served / "current") == f"generations/{said['generation']}"
    site.hold()


BROKEN_GC = [
    ("rename", f"store/{ENTRY}"),
    ("rename", "generations/1"),
    ("unlink", f"store/.gone-{ENTRY}-*"),
    ("rmdir", "generations/.trash-offer-1-*"),
    ("link", "generations/.lock-offer"),
    ("readlink", "current"),
]


@pytest.mark.parametrize("error", ["ESTALE", "EIO"])
@pytest.mark.parametrize(("operation", "pattern"), BROKEN_GC)
def test_collecting_on_a_file_system_that_fails(site: Site, operation: str, pattern: str, error: str) -> None:
    """What has its name is whole, and the next run, of another host, takes the rest away."""
    assert published(site.one, "one")[0] == 0
    assert offered(site, site.one, 0)[0] == 0
    assert offered(site, site.one, 1)[0] == 0
    site.one.fail(operation, error, pattern)
    code, said, err = collected(site.one, "2: 1 2", DROP="1", ENTRIES=ENTRY)
    assert site.one.mend(), "the fault was never met"
    assert "stuck" in said or (code != 0 and "error: " in err), (code, said, err)
    site.hold()
    left = "1 2" if "1" in site.names("generations") else "2"
    code, said, err = collected(site.two, f"2: {left}", DROP="1" if "1" in left else "", ENTRIES=ENTRY)
    assert (code, said["state"]) == (0, "collected"), err
    assert not [name for name in site.names("store") | site.names("generations") if name != "2"], err
    site.hold()
