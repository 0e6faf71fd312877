"""The program as a person runs it, on the embedded cluster: `python -m invoke …` in a process of its own, with the
stand-in sources."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.paths import ROOT

if TYPE_CHECKING:
    from tests.support.lab import LiveLab

LOCK = ROOT / "tests" / "upstreams" / "demo.lock.toml"
PREFIX = "/shared/deepep"
ASKING = frozenset(("bootstrap", "rollback"))
"""Verbs that change something in almost every test; in others a test says --yes itself."""
PATIENCE = 300.0
"""Seconds after which a wait is given up; a safety net, not an expectation."""


@dataclass(frozen=True)
class Ended:
    """What one command left."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


@dataclass
class Engine:
    """The command line, pointed at one lab. `built` is where this run of the tests keeps the store entries that
    were built once, `mirror` a mirror's directory in place of the stand-in's repositories and wheels, `inside` a
    command prefix, for example into another network; without `smoke` a bootstrap runs no test of its own, with `consents` --yes is given where a person would be asked."""

    lab: LiveLab
    sources: Path
    lock: Path = LOCK
    built: Path | None = None
    hosts: Path | None = None
    prefix: str = PREFIX
    wheels_from_folder: bool = True
    mirror: Path | None = None
    inside: tuple[str, ...] = ()
    smoke: bool = False
    consents: bool = True
    env: dict[str, str] = field(default_factory=dict)

    def argv(self, verb: str, *more: str) -> list[str]:
        flags = [f"--hosts={self.hosts or self.lab.hosts_file}", f"--prefix={self.prefix}"]
        if verb in {"bootstrap", "plan", "doctor"}:
            flags += (
                [f"--lock={self.lock}", f"--mirror={self.mirror}"]
                if self.mirror
                else [f"--lock={self.lock}", *self.standin_mirrors()]
            )
        if verb == "bootstrap" and not self.smoke:
            flags.append("--skip=smoke")
        return [*self.inside, sys.executable, "-m", "invoke", verb, *flags, *more]

    def standin_mirrors(self) -> list[str]:
        """The flags that say where the stand-in's repositories and wheels are."""
        flags = [f"--mirror=https://example.invalid/standin/={self.sources}/git/standin/"]
        return [*flags, f"--mirror=index:standin={self.sources}/wheels"] if self.wheels_from_folder else flags

    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.lab.env, **self.env}

    def agreed(self, verb: str, *more: str) -> list[str]:
        """The command line of a script: with --yes, where a person would be asked."""
        return self.argv(verb, *more, *(["--yes"] if self.consents and verb in ASKING and "--yes" not in more else []))

    def run(self, verb: str, *more: str) -> Ended:
        done = subprocess.run(
            self.agreed(verb, *more),
            cwd=ROOT,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        # One of our own begins its line; that of a rank stands indented, as what its log says.
        assert re.search(r"^Traceback", done.stdout + done.stderr, re.MULTILINE) is None, done.stdout + done.stderr
        return Ended(done.returncode, done.stdout, done.stderr)

    def json(self, verb: str, *more: str) -> dict[str, Any]:
        ended = self.run(verb, "--json", *more)
        document: dict[str, Any] = json.loads(ended.out)
        assert document["exit"] == ended.code
        return document

    def start(self, verb: str, *more: str) -> subprocess.Popen[str]:
        """Start a command that the test will interrupt; a process group of its own, like a shell's job."""
        return subprocess.Popen(
            self.agreed(verb, *more),
            cwd=ROOT,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def use_built(self, *, without: str = "nothing") -> None:
        """Put the entries that were built once into the prefix, for a test of something else; `without` is the pattern
        of those that this test builds itself."""
        assert self.built
        for entry in self.built.iterdir():
            if not re.search(rf"^[^-]*-({without})-", entry.name):
                shutil.copytree(entry, self.on_disk / "store" / entry.name, symlinks=True)

    def store(self) -> list[str]:
        """Names in the store, whatever they are."""
        folder = self.on_disk / "store"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    @property
    def on_disk(self) -> Path:
        """The prefix as seen from outside the hosts."""
        return self.lab.shared / Path(self.prefix).relative_to("/shared")

    def slow_nvcc(self, seconds: float | None, host: str = "n001") -> None:
        """Make every call of the fake nvcc on a host take longer."""
        self._knob("FAKE_NVCC_SLEEP", None if seconds is None else str(seconds), host)

    def failing_nvcc(self, fail: bool, host: str = "n001") -> None:
        self._knob("FAKE_NVCC_FAIL", "1" if fail else None, host)

    def _knob(self, name: str, value: str | None, host: str) -> None:
        path = f"/usr/local/cuda/bin/{name}"
        done = self.lab.nsenter(host, f"rm -f {path}" if value is None else f"echo {value} >{path}")
        assert done.returncode == 0, done.stderr

    def processes(self, pattern: str) -> list[str]:
        """Command lines on the build host that match, read from outside."""
        listing = self.lab.nsenter("n001", "ps -ww -eo args").stdout
        return [line for line in listing.splitlines() if re.search(pattern, line)]


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition, however slow the machine is today."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.05)


def interrupt(process: subprocess.Popen[str], signum: int) -> tuple[int, str]:
    """Send a signal to a running command and return its exit code and output."""
    os.killpg(process.pid, signum) if signum == signal.SIGINT else process.send_signal(signum)
    out, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, out


def make_sources(folder: Path) -> Path:
    """Make the stand-in repositories and wheels in `folder`."""
    subprocess.run([sys.executable, ROOT / "tests" / "upstreams" / "make.py", folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def standin_sources(programs: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Repositories and wheels that tests must not change."""
    return make_sources(tmp_path_factory.mktemp("standin"))


@pytest.fixture(scope="session")
def built_entries(lab: LiveLab, standin_sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store entries of one bootstrap, built once for all workers: by the first that asks, while others wait."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "built-entries"
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            lab.reset()
            first = Engine(lab, standin_sources)
            ended = first.run("bootstrap")
            assert ended.code == 0, ended.text
            for entry in (first.on_disk / "store").glob("[!.]*"):
                shutil.copytree(entry, place / entry.name, symlinks=True)
    return place


@pytest.fixture
def engine(fresh_lab: LiveLab, standin_sources: Path, built_entries: Path) -> Engine:
    """The program and a lab on which nothing was done yet."""
    return Engine(fresh_lab, standin_sources, built=built_entries)


@pytest.fixture
def private_engine(fresh_lab: LiveLab, tmp_path: Path, standin_sources: Path, built_entries: Path) -> Engine:
    """Like `engine`, with sources and lock of its own that the test may change, and no cache of downloads."""
    sources = tmp_path / "standin"
    shutil.copytree(standin_sources, sources)
    lock = tmp_path / "demo.lock.toml"
    shutil.copy(LOCK, lock)
    return Engine(fresh_lab, sources, lock, built_entries, env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
