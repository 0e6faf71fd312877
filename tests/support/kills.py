"""Ending a bootstrap, and what it runs on hosts, at a point of it: how a test waits for the point, finds who is to die,
and sees what is left."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.e2e import Engine, wait_until

if TYPE_CHECKING:
    from tests.support.lab import LiveLab

Where = str | Callable[[Engine], object]
"""When somebody is killed: a pattern of a line of the bootstrap's output, or something that comes to hold."""


def builds(lab: LiveLab) -> list[str]:
    """Numbers of the allocations of builds that Slurm has not ended."""
    listed = "squeue --noheader --name=deepep-build --states=PENDING,RUNNING,CONFIGURING,SUSPENDED --format=%A"
    return lab.on_login(listed).split()


def scratches(lab: LiveLab, host: str = "n001") -> list[str]:
    return lab.nsenter(
        host, "ls -d /var/tmp/deepep-*/deepep-scratch-* /var/tmp/deepep-scratch-* 2>/dev/null"
    ).stdout.split()


def pids(lab: LiveLab, pattern: str, host: str = "n001") -> list[str]:
    """Pids, on the host, of processes whose command line matches."""
    lines = lab.nsenter(host, "ps -ww -eo pid=,args=").stdout.splitlines()
    found = (line.split(None, 1) for line in lines if " " in line.strip())
    return [pid for pid, args in found if re.search(pattern, args)]


def owner_of_scratch(lab: LiveLab) -> str:
    """Pid of the shell that holds the session."""
    return lab.nsenter("n001", "sed -n 's/^pid=//p' /var/tmp/deepep-0/deepep-scratch-*/.owner").stdout.strip()


def compiles(engine: Engine) -> list[str]:
    return engine.processes(r"nvcc.*\.cu")


def start_until(engine: Engine, point: Where) -> subprocess.Popen[str]:
    """Start a bootstrap and return when it said a line that `point` matches, or when `point` holds."""
    process = engine.start("bootstrap")
    if callable(point):
        wait_until(lambda: point(engine) or process.poll() is not None, "the point of the bootstrap")
        assert process.poll() is None, process.communicate()[0]
        return process
    said: list[str] = []
    assert process.stdout
    for line in process.stdout:
        said.append(line)
        if re.search(point, line):
            return process
    raise AssertionError(f"no line like {point} in {''.join(said)}")


def kill(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@contextmanager
def stopped(lab: LiveLab, pattern: str, host: str) -> Iterator[None]:
    """Let the processes of a host whose command line matches stand still for a while."""
    found = pids(lab, pattern, host)
    assert found, f"no {pattern} on {host}"
    lab.nsenter(host, f"kill -STOP {' '.join(found)}")
    try:
        yield
    finally:
        lab.nsenter(host, f"kill -CONT {' '.join(found)}")


@contextmanager
def silent_slurm(lab: LiveLab) -> Iterator[None]:
    """Stop Slurm's controller for a while."""
    with stopped(lab, r"^\S*slurmctld", lab.lab.controller.name):
        yield


# A matrix of kills


@dataclass(frozen=True)
class Point:
    """Where in a bootstrap somebody is killed, and what makes the bootstrap come there: `missing` is the pattern of the
    entries that are to be built, `hook` whether hosts lost their MODULEPATH hook, `slow` the seconds of a compile."""

    where: Where
    missing: str = "gdrcopy"
    hook: bool = False
    slow: float | None = None


def allocated(engine: Engine) -> object:
    return builds(engine.lab)


def logged_in(engine: Engine) -> object:
    return sessions(engine.lab)


def is_copying(engine: Engine) -> object:
    return any(name.startswith(".tmp-") for name in engine.store())


POINTS: dict[str, Point] = {
    "hosts are looked at": Point(logged_in),
    "the plan is told": Point(r" is not in the store$"),
    "the prefix is tried": Point(r"^\[\d+/\d+\] n001: prefix "),
    "the prefix is there": Point(r"^done prefix "),
    "sources are fetched": Point(r"^\[\d+/\d+\] this machine: fetch "),
    "sources are there": Point(r"^done fetch "),
    "Slurm gave the node": Point(allocated),
    "the build of GDRCopy begins": Point(r"^\[\d+/\d+\] n001: build gdrcopy "),
    "an entry is filled": Point(is_copying),
    "GDRCopy is published": Point(r"^done build gdrcopy ", missing="gdrcopy|deepep"),
    "the build of DeepEP begins": Point(r"^\[\d+/\d+\] n001: build deepep ", missing="deepep"),
    "nvcc runs": Point(compiles, missing="deepep", slow=2),
    "DeepEP is published": Point(r"^done build deepep ", missing="deepep"),
    "modules are offered": Point(r"^\[\d+/\d+\] n001: publish modules "),
    "modules are there": Point(r"^done publish modules "),
    "the hook is written": Point(r"MODULEPATH hook …$", missing="nothing", hook=True),
    "the hook is there": Point(r"^done MODULEPATH hook ", missing="nothing", hook=True),
    "hosts are verified": Point(r": verify …$", missing="nothing"),
    "a host is verified": Point(r"^done verify ", missing="nothing"),
}
"""Every step of a bootstrap as it begins and as it is done, and moments in between, in the order in which they come."""


def sessions(lab: LiveLab, host: str = "n001") -> list[str]:
    """Pids of the sshd of every connection to a host; the one that listens is not among them."""
    return pids(lab, r"^sshd(-session)?: (?!.*\[listener\])", host)


def come_to(engine: Engine, point: Point) -> subprocess.Popen[str]:
    """Start a bootstrap that has something to do at a point, on a prefix that has entries and nothing else, and return
    when it is there."""
    shutil.rmtree(engine.on_disk)
    engine.use_built(without=point.missing)
    if point.hook:
        for host in engine.lab.hosts:
            engine.lab.nsenter(host, "rm -f /etc/profile.d/zz-deepep.*")
    engine.slow_nvcc(point.slow)
    return start_until(engine, point.where)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of a bootstrap. Return its exit code and what it said after the point."""
    assert process.stdout
    out = process.stdout.read()  # not communicate: lines that were read ahead would be lost
    process.wait()
    assert "Traceback" not in out, out
    assert "internal error" not in out, out
    return process.returncode, out


def traces(engine: Engine) -> set[str]:
    """What builds have left now: numbers of allocations, folders of n001, names in the store, as `status` writes
    them."""
    owners = {name for name in engine.store() if name.startswith(".own-")}
    return {*builds(engine.lab), *scratches(engine.lab), *owners}


def unnamed(engine: Engine) -> set[str]:
    """What builds have left that `status` does not name, though it was there before and after that was asked."""
    before = traces(engine)
    if not before:
        return before
    named = {each["name"] for each in engine.json("status")["orphans"]}
    return (before & traces(engine)) - named


def assert_recovers(engine: Engine) -> None:
    """What is left is gone or named by `status`, the next bootstrap finishes and takes it away, and every file of the
    store is as it was published."""
    engine.slow_nvcc(None)
    wait_until(lambda: not unnamed(engine), "what is left is gone, or named")
    ended = engine.run("bootstrap")
    assert ended.code == 0, ended.text
    wait_until(lambda: not traces(engine), "nothing is left")
    assert [name for name in engine.store() if name.startswith(".")] == []
    assert {name.split("-")[1] for name in engine.store()} == {"gdrcopy", "nvshmem", "python", "deepep"}
    verified = engine.run("verify", "--store")
    assert verified.code == 0, verified.text


def make_ready(lab: LiveLab, sources: Path, built: Path) -> Engine:
    """Return the program on a lab with an empty prefix, which each kill fills anew."""
    engine = Engine(lab, sources, built=built)
    engine.on_disk.mkdir()
    return engine


# What a bootstrap may change on hosts

OURS = (
    r"etc/profile\.d/zz-deepep\.c?sh",
    r"etc/security/limits\.d/deepep\.conf",
    r"var/lib/deepep-bootstrap/.*",  # what is written on the host, and what was there before
    r"var/tmp/deepep-0",  # scratch of root, empty
)
SLURMS = (r"var/log/(slurm|munge)/.*", r"var/spool/slurm(d|ctld)/.*")


def disks(lab: LiveLab) -> dict[str, str]:
    """What hosts wrote on their disks, and what lies in /shared outside the prefix: a path's form, mode, owner and
    contents. Folders count where they hold nothing."""
    found = {}
    for host in lab.hosts:
        found |= {f"{host}:{path}": state for path, state in _leaves(lab.disk(host))}
    found |= {f"shared:{path}": state for path, state in _leaves(lab.shared) if not path.startswith("deepep/")}
    return found


def _leaves(top: Path) -> Iterator[tuple[str, str]]:
    for folder, folders, files in os.walk(top):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in [*files, *links, *([] if folders or files or folder == str(top) else [""])]:
            path = os.path.join(folder, name) if name else folder
            status = os.lstat(path)
            said = f"{stat.filemode(status.st_mode)} {status.st_uid}:{status.st_gid}"
            if stat.S_ISREG(status.st_mode):
                said += " " + hashlib.sha256(Path(path).read_bytes()).hexdigest()
            elif stat.S_ISLNK(status.st_mode):
                said += " " + os.readlink(path)
            yield os.path.relpath(path, top), said


def assert_only_ours_changed(before: dict[str, str], after: dict[str, str], *allowed: str) -> None:
    """Compare two states of `disks`; `allowed` are patterns of more paths that may differ."""
    changed = [path for path in sorted({*before, *after}) if before.get(path) != after.get(path)]
    may = re.compile(
        "|".join(f"(?:{pattern})" for pattern in (*(f"[^:]*:{each}" for each in (*OURS, *SLURMS)), *allowed))
    )
    assert [path for path in changed if not may.fullmatch(path)] == []
