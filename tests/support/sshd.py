"""Real sshds on loopback addresses for tests: each with a host key, a port and a log of its own, and servers that
misbehave.

A test module gets the fixtures by `pytest_plugins = ["tests.support.sshd"]`: `ssh_lab`, and `open_ssh_lab` which other
accounts may enter.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deepep_bootstrap.remote.fleet import Options
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.ssh import Timeouts
from tests.support.paths import ROOT

SAFETY = 300.0
"""A test that takes this long has failed; no test measures speed."""


UNPACKED = ROOT / ".venv" / "debian"
"""Where tests/setup.sh unpacks the Debian package, without installing it."""


def find_sshd() -> tuple[str, dict[str, str]]:
    """Return the path of sshd, which wants to be started by an absolute one, and the environment it needs."""
    found = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if found:
        return found, dict(os.environ)
    unpacked = UNPACKED / "usr" / "sbin" / "sshd"
    if not unpacked.exists():
        pytest.fail("there is no sshd: tests/setup.sh test unpacks one, apt-get install openssh-server installs one")
    libraries = ":".join(str(path.parent) for path in UNPACKED.rglob("libwrap.so.0"))
    return str(unpacked), {**os.environ, "LD_LIBRARY_PATH": libraries}


def with_accounts(folder: Path, accounts: Sequence[str] = (), files: Mapping[str, str] | None = None) -> list[str]:
    """Return a command prefix for sshd or anything else: a mount namespace in which /etc/passwd has more lines and
    /etc/NAME other texts.

    Without arguments it is needed for an sshd that was only unpacked, whose own account is missing. For root. Tests
    never change the machine's own accounts: replacing /etc/passwd would also take the file out of every such namespace.
    """
    lines = Path("/etc/passwd").read_text()
    own = () if "\nsshd:" in lines else ("sshd:x:60999:65534::/run/sshd:/usr/sbin/nologin",)
    texts = {"passwd": lines + "".join(f"{line}\n" for line in (*own, *accounts)), **(files or {})}
    binds = []
    for name, text in texts.items():
        file = folder / f"{name}.etc"
        file.write_text(text)
        file.chmod(0o644 if name in ("passwd", "group") else 0o440)
        binds.append(f"mount --bind {file} /etc/{name}")
    return ["unshare", "-m", "sh", "-ec", "\n".join(["mount --make-rprivate /", *binds, 'exec "$@"']), "sh"]


def free_port(address: str) -> int:
    """Return a port of `address` that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> str:
    """Make a key pair at `path` and return the public half."""
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "test", "-f", path], check=True)
    return path.with_suffix(".pub").read_text()


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait until calling `condition` is true."""
    end = time.monotonic() + SAFETY
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"still not so: {what}")
        time.sleep(0.02)


@dataclass
class Sshd:
    """One running sshd."""

    folder: Path
    address: str
    port: int
    process: subprocess.Popen[bytes]
    host_key: str

    def known(self, name: str = "") -> str:
        """Return this server's line for known_hosts."""
        kind, text = self.host_key.split()[:2]
        return f"{name or f'[{self.address}]:{self.port}'} {kind} {text}\n"

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


@dataclass
class Lab:
    """A folder with a client's key and known_hosts, and the servers started from it."""

    folder: Path
    servers: list[Sshd] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.public = make_key(self.folder / "id")
        (self.folder / "known_hosts").touch()
        (self.folder / "config").write_text(
            f"Host *\n  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile none\n"
        )

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def start(
        self,
        address: str = "127.0.0.2",
        *,
        known: bool = True,
        lines: str = "",
        prefix: Sequence[str] = (),
        port: int = 0,
        key_of: Sshd | None = None,
    ) -> Sshd:
        """Start an sshd; with `known` its key is written into known_hosts. `lines` go into its configuration,
        `prefix` is a command that starts it, `key_of` another server whose host key it has too."""
        folder = self.folder / f"sshd{len(self.servers)}"
        folder.mkdir()
        host_key = make_key(folder / "hk")
        if key_of:
            host_key = key_of.host_key
            shutil.copy(key_of.folder / "hk", folder / "hk")
        (folder / "authorized_keys").write_text(self.public)
        port = port or free_port(address)
        config = f"""\
{lines}
ListenAddress {address}:{port}
HostKey {folder}/hk
PidFile {folder}/pid
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
UsePAM no
# Like a shell inside of another one: bash then reads no ~/.bashrc, which is that of whoever runs the tests.
SetEnv SHLVL=1
UseDNS no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 200
KexAlgorithms curve25519-sha256
"""
        (folder / "config").write_text(config)
        sshd, environment = find_sshd()
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
            prefix = prefix or with_accounts(folder)
        words = [*prefix, sshd, "-D", "-f", str(folder / "config"), "-E", str(folder / "log")]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, env=environment)
        server = Sshd(folder, address, port, process, host_key)
        self.servers.append(server)
        wait_until(lambda: process.poll() is not None or _listens(address, port), f"sshd on {address}:{port} listens")
        if process.poll() is not None:
            pytest.fail(f"sshd did not start: {server.log()}")
        if known:
            with self.known_hosts.open("a") as file:
                file.write(server.known())
        return server

    def host(self, server: Sshd | None = None, name: str = "", **fields: object) -> Host:
        """Return how the hosts file would name `server`."""
        place = {"port": server.port} if server else {}
        address = server.address if server else ""
        return Host(**{"name": name or address, "identity": str(self.folder / "id"), **place, **fields})  # type: ignore[arg-type]

    def options(self, **fields: object) -> Options:
        """Return options with short timeouts that read nothing of the person's own SSH files."""
        return Options(
            **{"ssh_config": str(self.folder / "config"), "timeouts": Timeouts(connect=3, banner=3, auth=3), **fields}
        )  # type: ignore[arg-type]

    def stop(self) -> None:
        for server in self.servers:
            server.stop()


@pytest.fixture(scope="module")
def ssh_lab(programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A folder for the sshds of one file of tests; they end with it."""
    lab = Lab(tmp_path_factory.mktemp("ssh"))
    yield lab
    lab.stop()


@pytest.fixture(scope="module")
def open_ssh_lab(programs: None) -> Iterator[Lab]:
    """The same in a folder that other accounts may enter, unlike those of pytest: for root, who can have such."""
    if os.geteuid() != 0:
        pytest.skip("needs root: accounts of tests cannot be made otherwise (make test uses sudo)")
    folder = Path(tempfile.mkdtemp(prefix="sshd-test-"))
    folder.chmod(0o755)
    lab = Lab(folder)
    yield lab
    lab.stop()
    shutil.rmtree(folder)


def _listens(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


@contextlib.contextmanager
def silent_listener(address: str = "127.0.0.3") -> Iterator[int]:
    """Listen, take connections and never say a word; yields the port."""
    with socket.socket() as server:
        server.bind((address, 0))
        server.listen()
        yield int(server.getsockname()[1])


@contextlib.contextmanager
def cutting_relay(target: Sshd, after: int, address: str = "127.0.0.3") -> Iterator[int]:
    """Relay to `target` and cut each connection once `after` bytes came from the client (0: at once); yields the
    port."""
    with socket.socket() as server:
        server.bind((address, 0))
        server.listen()
        threading.Thread(target=_relay, args=(server, target, after), daemon=True).start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)


def _relay(server: socket.socket, target: Sshd, after: int) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = server.accept()
            upstream = socket.create_connection((target.address, target.port))
            threading.Thread(target=_copy, args=(upstream, client, None), daemon=True).start()
            threading.Thread(target=_copy, args=(client, upstream, after), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket, limit: int | None) -> None:
    """Copy until the end, or until `limit` bytes went through; then close both."""
    seen = 0
    with contextlib.suppress(OSError):
        while (limit is None or seen < limit) and (data := source.recv(65536)):
            seen += len(data)
            if limit is None or seen < limit:
                sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


def alive(pid: int) -> bool:
    """Return whether a process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
