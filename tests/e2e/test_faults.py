"""What goes wrong on real clusters, made to go wrong: each ends in one clear message, the right exit code and a
valid store."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.e2e import Engine, interrupt, wait_until

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = pytest.mark.e2e


def edit(path: Path, pattern: str, replacement: str) -> None:
    text = path.read_text()
    changed, count = re.subn(pattern, replacement, text, count=1, flags=re.MULTILINE | re.DOTALL)
    assert count == 1
    path.write_text(changed)


def published(engine: Engine) -> list[str]:
    return [name for name in engine.store() if not name.startswith(".")]


def assert_recovers(engine: Engine) -> None:
    """A clean run afterwards succeeds, leaves no leftovers and nothing to do."""
    ended = engine.run("bootstrap")
    assert ended.code == 0, ended.text
    assert [name for name in engine.store() if name.startswith(".")] == []
    assert len(published(engine)) == 4
    assert engine.run("plan", "--check").code == 0


# Sources and lock


def test_a_tampered_source(private_engine: Engine, tmp_path: Path) -> None:
    """Somebody who controls the mirror and can talk us into another commit cannot talk us out of the hash."""
    bare = private_engine.sources / "git" / "standin" / "deepep.git"
    work = tmp_path / "work"
    subprocess.run(["git", "clone", "-q", bare, work], check=True)
    with (work / "setup.py").open("a") as file:
        file.write("\n# one line more\n")
    git = ["git", "-C", work, "-c", "user.name=x", "-c", "user.email=x@example.invalid"]
    subprocess.run([*git, "commit", "-qam", "x"], check=True)
    subprocess.run([*git, "push", "-q", "origin", "HEAD:refs/heads/main"], check=True)
    rev = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    edit(private_engine.lock, r'(\[source\.deepep[^\]]*\].*?rev = ")[0-9a-f]{40}', rf"\g<1>{rev}")
    ended = private_engine.run("bootstrap")
    assert ended.code == 1
    assert re.search(r"source deepep\S*: .*not the locked one — found sha256-\S+, wanted sha256-", ended.err), ended.err
    assert published(private_engine) == []
    cached = tmp_path / "cache" / "deepep-bootstrap" / "sources"
    assert not list(cached.rglob("setup.py")), "nothing of a refused source is kept"


def test_a_wrong_hash_in_the_lock(private_engine: Engine) -> None:
    edit(private_engine.lock, r'(\[source\.nvshmem\].*?hash = "sha256-)....', r"\g<1>AAAA")
    ended = private_engine.run("bootstrap")
    assert ended.code == 1
    assert "source nvshmem" in ended.err
    assert "wanted sha256-AAAA" in ended.err
    assert published(private_engine) == []


def test_a_typo_in_the_lock(private_engine: Engine) -> None:
    edit(private_engine.lock, r"^submodules = ", "submodule = ")
    ended = private_engine.run("bootstrap")
    assert ended.code == 1
    assert "submodule" in ended.err
    assert "submodules" in ended.err, "the nearest known key is named"
    assert str(private_engine.lock) in ended.err
    assert not private_engine.on_disk.exists()


# Hosts


@contextmanager
def silent_listener(address: str) -> Iterator[int]:
    """Accept connections and never say a word."""
    with socket.create_server((address, 0)) as server:
        kept: list[socket.socket] = []
        stop = threading.Event()

        def accept() -> None:
            server.settimeout(0.2)
            while not stop.is_set():
                try:
                    kept.append(server.accept()[0])
                except TimeoutError:
                    continue

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            stop.set()
            thread.join()
            for connection in kept:
                connection.close()


@pytest.fixture
def ssh_config(engine: Engine, tmp_path: Path) -> Path:
    """A copy of the lab's ssh_config that the test may change."""
    path = tmp_path / "ssh_config"
    shutil.copy(engine.lab.env["DEEPEP_SSH_CONFIG"], path)
    engine.env["DEEPEP_SSH_CONFIG"] = str(path)
    return path


def test_hosts_that_refuse_and_hosts_that_never_answer_delay_nobody_and_are_named(
    engine: Engine, ssh_config: Path, tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(engine.lab.hosts_file.read_text() + "refuses\nsilent\n")
    engine.hosts = hosts
    engine.use_built()
    with silent_listener("127.0.0.1") as port:
        extra = (
            f"Host refuses\n    HostName 127.0.0.1\n    Port 9\nHost silent\n    HostName 127.0.0.1\n    Port {port}\n"
        )
        ssh_config.write_text(extra + ssh_config.read_text())
        ended = engine.run("bootstrap")
    assert ended.code == 1, "hosts are missing, so the run is not a success"
    assert re.search(r"^refuses: refuses connections", ended.err, re.MULTILINE), ended.err
    assert re.search(r"^silent: ", ended.err, re.MULTILINE), ended.err
    assert "SSHException" not in ended.text
    assert len(published(engine)) == 4, "the run went on for the others"
    assert engine.lab.ssh("n002", "bash -lc \"module load deepep && python -c 'import deep_ep'\"").returncode == 0


def test_a_changed_host_key(engine: Engine, ssh_config: Path, tmp_path: Path) -> None:
    known = Path(re.search(r"UserKnownHostsFile (\S+)", ssh_config.read_text()).group(1))
    changed = tmp_path / "known_hosts"
    lines = known.read_text().splitlines()
    keys = {line.split()[0].split(",")[0]: line.split()[2] for line in lines}
    changed.write_text("\n".join(line.replace(keys["n002"], keys["n001"]) for line in lines) + "\n")
    ssh_config.write_text(ssh_config.read_text().replace(str(known), str(changed)))
    ended = engine.run("plan")
    assert "n002" in ended.err
    assert "key" in ended.err
    assert str(changed) in ended.err, "the file that holds the old key is named"
    assert engine.run("bootstrap", "--limit=n002").code == 1


def test_an_unknown_host_is_not_trusted_silently(engine: Engine, ssh_config: Path, tmp_path: Path) -> None:
    known = re.search(r"UserKnownHostsFile (\S+)", ssh_config.read_text()).group(1)
    empty = tmp_path / "known_hosts"
    empty.write_text("")
    ssh_config.write_text(ssh_config.read_text().replace(known, str(empty)))
    ended = engine.run("facts")
    assert ended.code == 1
    assert "--accept-new-host-keys" in ended.err
    assert empty.read_text() == ""
    accepted = engine.run("facts", "--accept-new-host-keys")
    assert accepted.code == 0, accepted.text
    assert "SHA256:" in accepted.err
    assert engine.run("facts").code == 0


# Interruptions


@pytest.mark.parametrize(
    "signum",
    [
        pytest.param(signal.SIGINT, id="ctrl-c"),
        pytest.param(signal.SIGKILL, id="kill -9", marks=pytest.mark.long),  # tests/hostile has a sample of these
    ],
)
def test_interrupted_in_the_middle_of_a_build(engine: Engine, signum: int) -> None:
    engine.use_built(without="gdrcopy|nvshmem|deepep")
    engine.slow_nvcc(30)
    process = engine.start("bootstrap")
    wait_until(lambda: engine.processes(r"nvcc.*\.cu"), "nvcc runs")
    code, out = interrupt(process, signum)
    if signum == signal.SIGINT:
        assert code == 130, out
        assert "Traceback" not in out
        end = out.rpartition("Interrupted after")[2]
        assert re.search(r": gdrcopy \S+ is built, 2 builds stopped\. The same command goes on\.$", end.strip()), out
        assert re.search(r"^stopped build nvshmem", out, re.MULTILINE), out
        assert not re.search(r"^failed", out, re.MULTILINE), out
    ours = r"nvcc|cmake|ninja|deepep-scratch|salloc|publish"
    wait_until(lambda: not engine.processes(ours), "nothing of the run is left on the host")
    wait_until(
        lambda: not engine.lab.ssh("n001", "ls -d /var/tmp/deepep-*/deepep-scratch-* 2>/dev/null; squeue -h").stdout,
        "scratch and allocation are gone",
    )
    assert not any("-nvshmem-" in name for name in published(engine))
    engine.slow_nvcc(None)
    assert_recovers(engine)


@pytest.mark.long
def test_a_second_bootstrap_at_the_same_time_waits_and_uses_the_first_ones_result(engine: Engine) -> None:
    engine.use_built(without="deepep")
    engine.slow_nvcc(3)
    first = engine.start("bootstrap")
    wait_until(lambda: engine.processes(r"nvcc.*\.cu"), "the first one builds")
    second = engine.start("bootstrap")
    outs = [process.communicate(timeout=300)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outs
    assert "wait" in outs[1], outs[1]
    assert len(published(engine)) == 4
    assert [name for name in engine.store() if name.startswith(".")] == []
    engine.slow_nvcc(None)
    assert engine.run("plan", "--check").code == 0


# The prefix


def test_a_full_disk(engine: Engine) -> None:
    engine.prefix = "/mnt/small"
    mounted = engine.lab.nsenter("n001", "mkdir -p /mnt/small && mount -t tmpfs -o size=60m,mode=755 tmpfs /mnt/small")
    assert mounted.returncode == 0, mounted.stderr
    ended = engine.run("bootstrap", "--limit=n001")
    assert ended.code == 1
    assert "space" in ended.text.lower()
    assert re.search(r"full log: \S+", ended.out), "the log of the failed build is named"
    left = engine.lab.ssh("n001", "ls -A /mnt/small/store").stdout.split()
    assert not [name for name in left if name.startswith(".tmp-")], "nothing half built is left"
    engine.lab.nsenter("n001", "mount -o remount,size=1g /mnt/small")
    again = engine.run("bootstrap", "--limit=n001")
    assert again.code == 0, again.text


def test_a_prefix_that_the_hosts_do_not_share(engine: Engine) -> None:
    engine.prefix = "/var/lib/deepep"
    ended = engine.run("bootstrap")
    assert ended.code == 1
    assert "shared" in ended.err
    assert "n002" in ended.err
    assert engine.lab.ssh("n001", "ls -A /var/lib/deepep/store").stdout == "", (
        "nothing is built where nobody else sees it"
    )
    again = engine.run("bootstrap")
    assert again.code == 1
    assert "not the same directory everywhere" in again.err


def test_a_prefix_nobody_may_write(engine: Engine) -> None:
    engine.prefix = "/proc/deepep"
    ended = engine.run("bootstrap", "--limit=n001")
    assert ended.code == 1
    assert "/proc" in ended.err


# Builds


def test_a_build_that_fails(engine: Engine) -> None:
    engine.use_built(without="nvshmem|deepep")
    engine.failing_nvcc(True)
    ended = engine.run("bootstrap")
    assert ended.code == 1
    assert "fake_failure" in ended.out, "the last lines of the build are shown"
    log = re.search(r"full log: (\S+)", ended.out)
    assert log
    assert Path(log.group(1)).is_file()
    assert not any("-nvshmem-" in name or "-deepep-" in name for name in published(engine))
    assert not (engine.on_disk / "current").exists(), "nothing half done is offered"
    engine.failing_nvcc(False)
    assert_recovers(engine)


# Misuse


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dry"], r"--dry is a flag of Invoke itself.*did you mean --dry-run"),
        (["--stack=v9"], r"--stack: no such stack in the lock — found v9, wanted v1 or v1-cu13"),
        (["--limit=n009"], r"n009"),
        (["--on-busy-host=maybe"], r"--on-busy-host: unknown value — found maybe, wanted leave or use"),
        (["--python=/usr/bin/python3"], r"--python=/usr/bin/python3 cannot be used — found .*torch"),
    ],
)
def test_misuse_is_one_clear_message_and_changes_nothing(engine: Engine, flags: list[str], message: str) -> None:
    ended = engine.run("bootstrap", *flags)
    assert ended.code == 1, ended.text
    assert re.search(message, ended.err), ended.err
    assert not engine.on_disk.exists()


def test_json_is_one_document_also_on_failure(engine: Engine) -> None:
    document = engine.json("plan", "--stack=v9")
    assert document["schema"] == 1
    assert document["errors"][0]["where"] == "--stack"
    engine.use_built()
    done = engine.json("bootstrap")
    assert done["exit"] == 0
    assert {outcome["state"] for outcome in done["outcomes"]} == {"done"}
