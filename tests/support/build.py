"""What the tests of the store share: a transport to this machine, recipe texts, the stand-in sources built once, small
made-up entries."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from deepep_bootstrap.inventory.survey import read_tree
from deepep_bootstrap.prefix import entries
from deepep_bootstrap.remote.fleet import ConnectionPool
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job
from tests.support.paths import ROOT

RECIPES: Mapping[str, str] = read_tree(ROOT / "recipes")
HERE = Host("here", connection="local")
PUBLISH = entries.COMMON_RECIPES
FAST = "0.2"
"""Heartbeat of the tests, seconds: three intervals without one and a lock counts as stale."""

UNHURRIED = "3"
"""Seconds of a heartbeat that no load of this machine makes look dead (nine of silence would). For whole builds, too:
who waits for a lock looks ten times in one, and each look starts some twenty processes."""

CHECK_MAIN = 'main() { STORE="${PREFIX}/store"; check_entry >&2; data state ok; }'
"""In place of publish.sh: the health checks alone, of an entry that is where it belongs."""

BUILD_SMALL = """
build_entry() {
    ${HOOK_BUILD:-true}
    mkdir -p -- "${OUT}/lib"
    printf 'made by %s\\n' "${TOKEN}" >"${OUT}/lib/content"
}
check_entry() {
    ${HOOK_CHECK:-true}
    [[ -s "${OUT}/lib/content" ]]
}
main "$@"
"""


def script(*names: str, extra: str = "") -> str:
    """Return recipes composed as the engine does it."""
    return "\n".join([*(RECIPES[name] for name in names), extra])


def owner_text(**changes: str) -> str:
    """Return the description of an owner on this host that never was."""
    lines = {
        "host": os.uname().nodename,
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pidns": os.readlink("/proc/self/ns/pid"),
        "pid": "4194304",
        "start": "1",
        "token": "gone",
        "since": "2026-01-01T00:00:00Z",
        "beat": "0000000001",
    } | changes
    return "".join(f"{key}={value}\n" for key, value in lines.items())


def make_prefix(folder: Path) -> Path:
    """Return a prefix made by init.sh."""
    prefix = folder / "prefix"
    done = run_bash(
        script("lib.sh", "prefix/lib/share.sh", "prefix/lib/trust.sh", "prefix/init.sh"),
        {"PREFIX": str(prefix), "TOKEN": "init"},
    )
    assert done.returncode == 0, done.stderr
    return prefix


def environment(prefix: Path, scratch: Path, token: str, **more: str) -> dict[str, str]:
    """Return the inputs of publish.sh for the small entry `e-small-1`."""
    (scratch / "bin").mkdir(parents=True, exist_ok=True)
    (scratch / "bin/relocate.py").write_text(RECIPES["build/relocate.py"])
    places = {"PREFIX": str(prefix), "SCRATCH": str(scratch), "ENTRY": "e-small-1", "TOKEN": token}
    return places | {"PYTHON": "/usr/bin/python3", "MANIFEST": "{}", "HEARTBEAT": FAST, "JOBS": "1", **more}


def start_bash(
    text: str, env: Mapping[str, str], *, user: str = "", stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[str]:
    """Start a composed script in a process group of its own, as the engine's watcher does."""
    inputs = {"PATH": os.environ["PATH"], "HOME": "/tmp", **env}
    words = ["runuser", "-u", user, "--"] if user else []
    return subprocess.Popen(
        [*words, "bash", "-c", text],
        env=inputs,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_bash(
    text: str, env: Mapping[str, str], *args: str, user: str = "", data: bytes = b"", within: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a composed script to its end, as `user`, under the command prefix `within` (which may be what knows the
    user)."""
    inputs = {"PATH": os.environ["PATH"], "HOME": "/tmp", **env}
    words = [*within, *(["runuser", "-u", user, "--"] if user else [])]
    done = subprocess.run(
        [*words, "bash", "-c", text, "script", *args], env=inputs, input=data, capture_output=True, check=False
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def values(out: str) -> dict[str, str]:
    """Return the data lines of a script's output, the last of each key."""
    return dict(line.split("=", 1) for line in out.splitlines())


def until(condition, what: str) -> None:
    """Wait until `condition()` holds; the guard against waiting for ever is generous and says what was waited for."""
    for _ in range(15000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"never came: {what}")


def kill_group(process: subprocess.Popen[str], signum: int = signal.SIGKILL) -> None:
    """Kill a script and everything it started, and reap it. A signal may be lost between fork and exec of a shell's
    child: it is sent until the script has ended, as a person presses ^C again; the engine's watcher sends SIGKILL."""
    while process.poll() is None:
        os.killpg(process.pid, signum)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2)


def store_names(prefix: Path) -> set[str]:
    """Return every name in the store, hidden ones too."""
    return {path.name for path in (prefix / "store").iterdir()}


def walk(folder: Path) -> Iterator[Path]:
    """Yield everything below `folder`."""
    yield from sorted(folder.rglob("*"))


def health(prefix: Path, entry: entries.Entry, folder: Path) -> None:
    """Run an entry's own health checks where it lies now."""
    folder.mkdir(exist_ok=True)
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/relocate.py").write_text(RECIPES["build/relocate.py"])
    common = [name for name in entry.recipes if name != "prefix/publish.sh"]
    text = script(*common[:4]) + f"\n{CHECK_MAIN}\n" + script(*common[4:])
    env = {
        **entry.env,
        "PREFIX": str(prefix),
        "OUT": f"{prefix}/store/{entry.name}",
        "SCRATCH": str(folder),
        "ENTRY": entry.name,
        "TOKEN": "t",
    }
    transport = ConnectionPool([HERE])
    reply = transport.run(HERE, Job(text, env=env, timeout=None))
    transport.close()
    assert reply.out == "state=ok\n", reply.err
