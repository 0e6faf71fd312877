"""A whole bootstrap of 64 hosts of which six are bad, each in its own way: the others are done, each bad one is named with its
reason, and nobody waits for one of them while there is something to do on another."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.e2e import Engine, wait_until
from tests.support.lab import LiveLab, new_folder, open_lab

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]

COUNT, AT_A_TIME = 64, 8
SILENT, REFUSING, CHANGED, FULL, NO_SUDO, DYING = BAD = [f"n{number:03}" for number in (3, 9, 20, 31, 42, 53)]

REASONS = {
    SILENT: "says nothing within",
    REFUSING: "refuses connections",
    CHANGED: "its host key has changed",
    FULL: "No space left on device",
    NO_SUDO: "sudo asks for a password",
    DYING: "the connection was lost",
}

SESSIONS = "date +%s.%N >>/run/lab/sessions"
"""First line of root's .bashrc, which Debian's bash reads when sshd starts a command: when each script began."""

PROVING = "[ ! -e /etc/profile.d/zz-deepep.sh ] || { : >/run/lab/proving; %s; }"
"""A start-up file of login shells: the hook comes right before the proof, whose login shell leaves a mark."""

NEW_KEY = """cd /etc/ssh && rm ssh_host_ed25519_key && ssh-keygen -q -t ed25519 -N '' -f ssh_host_ed25519_key
kill -HUP "$(cat /run/sshd.pid)"
"""
FULL_DISK = """mount -t tmpfs -o size=8m full /mnt && cp -a /etc/. /mnt/ && mount --move /mnt /etc
cat /dev/zero >/etc/filler
"""


@dataclass
class SilentHost:
    """Accepts connections and never says a word; `waits` are begin and end of each, in seconds since the epoch."""

    port: int = 0
    waits: list[tuple[float, float]] = field(default_factory=list)

    def serve(self, server: socket.socket) -> None:
        while True:
            try:
                connection = server.accept()[0]
            except OSError:
                return
            begin = time.time()
            with connection:
                while connection.recv(4096):
                    """What a client says is read and not answered."""
            self.waits.append((begin, time.time()))


@contextmanager
def silent_host() -> Iterator[SilentHost]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host = SilentHost(server.getsockname()[1])
        thread = threading.Thread(target=host.serve, args=(server,))
        thread.start()
        try:
            yield host
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.fixture(scope="module")
def many(namespaces: None) -> Iterator[LiveLab]:
    yield from open_lab(new_folder("many"), light=COUNT)


def must(lab: LiveLab, host: str, command: str) -> None:
    done = lab.nsenter(host, command)
    assert done.returncode == 0, done.stderr


def marks(lab: LiveLab, name: str) -> dict[str, Path]:
    """The hosts that have left a mark of this name."""
    found = {host: lab.lab.home(host) / "lab" / name for host in lab.hosts}
    return {host: path for host, path in found.items() if path.exists()}


def test_six_bad_hosts_of_sixty_four_hold_up_nobody(many: LiveLab, standin_sources: Path, tmp_path: Path) -> None:
    for host in many.hosts:
        must(many, host, f"sed -i '1i {SESSIONS}' /root/.bashrc; echo '{PROVING % ':'}' >/etc/profile.d/aa-proving.sh")
    must(many, REFUSING, 'kill "$(cat /run/sshd.pid)"')
    must(many, CHANGED, NEW_KEY)
    many.nsenter(FULL, FULL_DISK)
    must(many, DYING, f"echo '{PROVING % 'exec sleep 100000'}' >/etc/profile.d/aa-proving.sh")
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(many.hosts_file.read_text().replace(f"{NO_SUDO} ", f"{NO_SUDO} user=builder "))
    with silent_host() as silent:
        ssh_config = tmp_path / "ssh_config"
        ssh_config.write_text(f"Host {SILENT}\n    HostName 127.0.0.1\n    Port {silent.port}\n")
        with ssh_config.open("a") as file:
            file.write(many.lab.ssh_config.read_text())
        engine = Engine(many, standin_sources, hosts=hosts, env={"DEEPEP_SSH_CONFIG": str(ssh_config)})
        process = engine.start("bootstrap", "--json", f"--forks={AT_A_TIME}")
        try:
            # The dying host's shell hangs in its proof. That holds nobody up: all others come to theirs.
            proving = {*many.hosts} - {SILENT, REFUSING, CHANGED, FULL, NO_SUDO}
            wait_until(lambda: process.poll() is not None or proving == {*marks(many, "proving")}, "all prove")
            many.power_cut(DYING)
            out, _ = process.communicate()
        finally:
            process.kill()
    document = json.loads(out)
    assert document["exit"] == 1
    said = {problem["where"]: problem["what"] for problem in document["errors"]}
    for outcome in document["outcomes"]:
        if outcome["state"] == "failed":
            said.setdefault(outcome["host"], outcome["detail"])
    assert {host: words for host, words in REASONS.items() if words not in said.get(host, "")} == {}, said
    assert {*said} == {*BAD}, said
    proved = [each["host"] for each in document["outcomes"] if (each["step"], each["state"]) == ("verify", "done")]
    assert sorted(proved) == sorted({*many.hosts} - {*BAD})
    # It was waited for once, while others were talked to.
    assert len(silent.waits) == 1
    begin, end = silent.waits[0]
    assert any(
        begin < at < end for path in marks(many, "sessions").values() for at in map(float, path.read_text().split())
    )
