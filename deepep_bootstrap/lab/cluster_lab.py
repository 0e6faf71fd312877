"""The embedded cluster as values: its hosts, its folder, and the files it writes for its users."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from deepep_bootstrap.core import process
from deepep_bootstrap.core.errors import Problem, Trouble

NAMESPACES = "namespaces"
LOOPBACK = "loopback"
LAYERS = {"lmod": "lmod", "environment-modules": "environment-modules"}
"""The module systems a lab can have, by the name users give, with the package that brings each; they exclude each
other."""

MARK = "DEEPEP_LAB_PROCESS_OF"
"""Environment variable of every process of a lab: its value, the lab's folder, is how they are found again. Nothing
reads it as a setting, so nobody has a reason to set it."""

DAEMON = re.compile(r"(sshd|munged|slurmd|slurmctld|slurmstepd|slurmscriptd)\b")
CLEAN_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LC_ALL": "C.UTF-8",
}
ROLES = {"n001": "gpu", "n002": "gpu", "login1": "login"}
LAST_NUMBERS = {"n001": 11, "n002": 12, "login1": 21}
LIGHT_MOST = 240
"""Hosts of a light lab at most: their addresses begin with 11 and are those of one network of 254."""
Say = Callable[[str], None]
"""Takes the progress messages of a lab."""

DATA = Path(__file__).resolve().parent.parent.parent / "tests"
"""The lab's scripts stand in the repository's tests; an installed package has none and so no lab."""


class LabHost(Struct, frozen=True):
    """One host of the lab: `role` "gpu" (slurmd, eight GPUs) or "login" (slurmctld), `address` and `port` of its
    sshd."""

    name: str
    role: str
    address: str
    port: int


class Lab(Struct, frozen=True):
    """One embedded cluster. `dir` is its folder, `kind` how its hosts are made (NAMESPACES or LOOPBACK), `layer` its
    module system, `index` the number in its addresses, `image` the folder of installed packages below its hosts. A
    `light` lab has so many GPU hosts, n001 and on, and no Slurm."""

    dir: str
    kind: str
    layer: str
    index: int
    image: str = ""
    light: int = 0

    @property
    def path(self) -> Path:
        """The lab's folder."""
        return Path(self.dir)

    @property
    def bridge(self) -> str:
        """The name of the bridge all hosts are plugged into."""
        return f"labbr{self.index}"

    @property
    def subnet(self) -> str:
        """The first three numbers of every address."""
        return f"10.77.{self.index}" if self.kind == NAMESPACES else f"127.77.{self.index}"

    @property
    def hosts(self) -> tuple[LabHost, ...]:
        """The hosts, GPU nodes first."""
        port = 22 if self.kind == NAMESPACES else 2222
        if self.light:
            numbers = range(1, self.light + 1)
            return tuple(LabHost(f"n{number:03}", "gpu", f"{self.subnet}.{10 + number}", port) for number in numbers)
        return tuple(LabHost(name, role, f"{self.subnet}.{LAST_NUMBERS[name]}", port) for name, role in ROLES.items())

    @property
    def controller(self) -> LabHost:
        """The host that runs slurmctld; a light lab has none."""
        return next(host for host in self.hosts if host.role == "login")

    @property
    def ssh_config(self) -> Path:
        """An ssh_config that reaches every host by its name: what DEEPEP_SSH_CONFIG is set to."""
        return self.path / "ssh_config"

    @property
    def hosts_file(self) -> Path:
        """A hosts file for `--hosts`."""
        return self.path / "hosts.txt"

    @property
    def try_file(self) -> Path:
        """A file for a shell to source: hosts, lock and mirrors for every verb (see first_steps)."""
        return self.path / "try.sh"

    @property
    def identity(self) -> Path:
        """The private key that opens every host."""
        return self.path / "keys" / "id"

    @property
    def shared(self) -> Path:
        """The folder that every host sees as its shared filesystem (namespaces: mounted on /shared)."""
        return self.path / "shared"

    @property
    def homes(self) -> Path:
        """The folder that every host sees as /home (namespaces)."""
        return self.path / "home"

    @property
    def prefix(self) -> str:
        """The prefix as the hosts name it."""
        return "/shared/deepep" if self.kind == NAMESPACES else str(self.shared / "deepep")

    def home(self, name: str) -> Path:
        """The folder of one host: disk, console, pid, and lab/ (its fakes), outside the host."""
        return self.path / "hosts" / name


def default_dir() -> str:
    """Return the folder of the lab nobody named: root's is gone after a reboot, a plain user's is told apart by
    number."""
    return "/run/deepep-lab" if os.geteuid() == 0 else f"/var/tmp/deepep-lab-{os.geteuid()}"  # noqa: S108 - never reused unless it holds our record


def cache_dir() -> Path:
    """Return the folder that keeps package layers between labs; the one thing `down` leaves."""
    if os.geteuid() == 0:
        return Path("/var/cache/deepep-lab")
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "deepep-lab"


def folder_of(wanted: str) -> str:
    """Return the absolute folder for `--dir` (empty: the default); Trouble when mount options could not carry its
    name."""
    folder = os.path.realpath(wanted or default_dir())
    if not all(character.isalnum() or character in "/._-" for character in folder) or folder.count("/") < 2:
        wanted = "a folder two levels deep of letters, digits, dot, dash and underscore"
        raise Trouble(Problem("--dir", "this folder cannot hold a lab", found=folder, wanted=wanted))
    return folder


def network_of(folder: str) -> int:
    """Return the number of the network that a lab in `folder` takes unless it is in use."""
    return 0 if folder == default_dir() else 1 + zlib.crc32(folder.encode()) % 250


def new_lab(folder: str, kind: str, layer: str, light: int = 0) -> Lab:
    """Return a lab with a bridge and addresses that this machine has not yet. They are free until somebody takes them:
    hold the lock "networks" from here until the bridge is there."""
    names, addresses = _networks_in_use() if kind == NAMESPACES else (set(), [])
    for index in (network_of(folder), *range(1, 251)):
        candidate = Lab(folder, kind, layer, index, light=light)
        if kind == NAMESPACES:
            used = any(address.startswith(f"{candidate.subnet}.") for address in addresses)
            free = candidate.bridge not in names and not used
        else:
            free = _can_listen(candidate.hosts[0])
        if free:
            return candidate
    raise Trouble(Problem("lab", "no free addresses", found="every network of labs in use", try_="invoke lab down"))


def _networks_in_use() -> tuple[set[str], list[str]]:
    """Return the names of this machine's network devices and their addresses."""
    links = json.loads(must(["ip", "-j", "addr", "show"]) or "[]")
    names = {link["ifname"] for link in links}
    addresses = [entry["local"] for link in links for entry in link["addr_info"] if "local" in entry]
    return names, addresses


def _can_listen(host: LabHost) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.address, host.port))
        except OSError:
            return False
    return True


def save(lab: Lab) -> None:
    """Write what a later `down` or `status` must know; the first file of a lab and the sign that its folder is one."""
    (lab.path / "lab.json").write_text(json.dumps(to_builtins(lab)) + "\n", encoding="utf-8")


def load(folder: str) -> Lab | None:
    """Return the lab recorded in `folder`; None when there is none, or only the beginning of one."""
    try:
        fields = json.loads((Path(folder) / "lab.json").read_text(encoding="utf-8"))
        return replace(Lab(**fields), dir=folder)
    except (OSError, ValueError, TypeError):
        return None


def data_folder() -> Path:
    """Return the folder of the lab's scripts; Trouble where this is an installed package without them."""
    if not (DATA / "lab" / "hostinit.sh").is_file():
        raise Trouble(
            Problem(
                str(DATA / "lab"), "the lab's scripts are not here", try_="invoke lab from a clone of the repository"
            )
        )
    return DATA


def write_user_files(lab: Lab, user: str) -> None:
    """Make the keys, and write ssh_config, known_hosts and hosts.txt: all that a user of the lab needs to reach it."""
    keys = lab.identity.parent
    keys.mkdir(mode=0o700, exist_ok=True)
    for name in ("id", *(host.name for host in lab.hosts)):
        if not (keys / name).exists():
            must(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"lab-{name}", "-f", keys / name])
    known = []
    blocks = []
    for host in lab.hosts:
        public = " ".join((keys / f"{host.name}.pub").read_text(encoding="ascii").split()[:2])
        address = host.address if host.port == 22 else f"[{host.address}]:{host.port}"
        known.append(f"{host.name},{address} {public}\n")
        blocks.append(f"Host {host.name}\n    HostName {host.address}\n    Port {host.port}\n")
    (lab.path / "known_hosts").write_text("".join(known), encoding="ascii")
    common = f"""Host {" ".join(host.name for host in lab.hosts)}
    User {user}
    IdentityFile {lab.identity}
    IdentitiesOnly yes
    UserKnownHostsFile {lab.path / "known_hosts"}
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
"""
    lab.ssh_config.write_text("".join(blocks) + common, encoding="utf-8")
    lines = [f"{host.name} role={host.role}\n" for host in lab.hosts]
    lab.hosts_file.write_text(f"defaults prefix={lab.prefix}\n" + "".join(lines), encoding="utf-8")
    _give_to_sudo_user(lab)


def _give_to_sudo_user(lab: Lab) -> None:
    # Under sudo the person who asked must be able to use the key; ssh wants it private to that person.
    owner = os.environ.get("SUDO_UID", "")
    if os.geteuid() == 0 and owner.isdigit():
        os.chown(lab.identity.parent, int(owner), -1)
        os.chown(lab.identity, int(owner), -1)


def alive(the_lab: Lab, name: str) -> int:
    """Return the number, as this machine counts, of a host's first process (PID 1, or its sshd), 0 when the host is
    off."""
    try:
        pid = int((the_lab.home(name) / "pid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
    ready = (the_lab.home(name) / "ready").exists()
    return pid if ready and belongs(pid, the_lab.dir) else 0


def belongs(pid: int, folder: str, home: str = "") -> bool:
    """Say whether a process is part of the lab in `folder`; with `home`, a host's folder, of that host.

    A process of a lab carries its mark. sshd, munged and Slurm's daemons write their titles over their environment or
    hide it: they are known by program and by an argument or an open file in the lab's folder, both together.
    """
    process = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        variables = (process / "environ").read_bytes().split(b"\0")
        if f"{MARK}={folder}".encode() in variables:
            return not home or f"{MARK}_HOST={home}".encode() in variables
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
    if home or not DAEMON.match(os.path.basename(re.split("[ :\0]", words, maxsplit=1)[0])):
        return False
    return f"{folder}/" in words or any(path.startswith(f"{folder}/") for path in open_files(pid))


def open_files(pid: int) -> list[str]:
    """Return the names of a process's open files, its folder and its root; empty when they may not be seen or it is
    gone."""
    process = Path(f"/proc/{pid}")
    links = [process / "cwd", process / "root"]
    names = []
    with contextlib.suppress(OSError):
        links += (process / "fd").iterdir()
    for link in links:
        with contextlib.suppress(OSError):
            names.append(os.readlink(link))
    return names


def must(argv: list[str | Path], *, env: Mapping[str, str] = CLEAN_ENV, timeout: float | None = None) -> str:
    """Run a command that has no reason to fail, in a clean environment unless `env` says another, and return its
    stdout; Trouble with its last lines when it does fail."""
    done = process.run_program(argv, env=env, timeout=timeout)
    if done.code != 0:
        raise Trouble(Problem(" ".join(done.argv[:4]), f"failed with code {done.code}", found=done.tail))
    return done.out
