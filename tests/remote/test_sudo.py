"""Becoming root where the account is not: real sudo, real passwords, accounts that exist only in a mount namespace
of the sshd."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.hostsfile import Inventory, Settings
from deepep_bootstrap.inventory.survey import gather
from deepep_bootstrap.remote.channel import Secret
from deepep_bootstrap.remote.fleet import ConnectionPool
from deepep_bootstrap.remote.host import THIS_MACHINE, Host
from deepep_bootstrap.remote.jobs import Job
from tests.support.paths import ROOT
from tests.support.sshd import SAFETY, Lab, Sshd, alive, wait_until, with_accounts

pytest_plugins = ["tests.support.sshd"]
pytestmark = pytest.mark.usefixtures("programs")

PASSWORD = "correct horse 'battery' \\ $staple"
# Numbers of this process alone, so that what another one leaves for a moment is not taken for ours.
USERS = {name: 100_000 + 3 * os.getpid() + place for place, name in enumerate(("asks", "free", "barred"))}
SUDOERS = """\
Defaults use_pty, timestamp_timeout=0, lecture=always
Defaults secure_path="/sbin:/bin:/usr/sbin:/usr/bin"
root ALL=(ALL:ALL) ALL
asks ALL=(ALL:ALL) ALL
free ALL=(ALL:ALL) NOPASSWD: ALL
"""


def in_namespace(folder: Path) -> list[str]:
    """Return a command prefix that gives sshd three more accounts, and sudo its rules, without touching the
    machine's own."""
    made = subprocess.run(
        ["openssl", "passwd", "-6", "-stdin"], input=PASSWORD, check=True, capture_output=True, text=True
    )
    passwd, shadow = [], Path("/etc/shadow").read_text()
    for name, number in USERS.items():
        home = folder / name
        home.mkdir(exist_ok=True)
        os.chown(home, number, number)
        passwd.append(f"{name}:x:{number}:{number}::{home}:/bin/bash")
        shadow += f"{name}:{made.stdout.strip()}:19000::::::\n"
    return with_accounts(folder, passwd, {"shadow": shadow, "sudoers": SUDOERS})


@pytest.fixture(scope="module")
def server(open_ssh_lab: Lab) -> Sshd:
    if not shutil.which("sudo"):
        pytest.fail("sudo is not installed: apt-get install sudo (tests/setup.sh does)")
    return open_ssh_lab.start("127.0.3.1", prefix=in_namespace(open_ssh_lab.folder))


@pytest.fixture
def transport(open_ssh_lab: Lab, server: Sshd) -> Iterator[Callable[..., ConnectionPool]]:
    fleets: list[ConnectionPool] = []

    def make(password: str = "") -> ConnectionPool:
        fleets.append(ConnectionPool([], open_ssh_lab.options(sudo_password=Secret(password) if password else None)))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


def ways(transport: Callable[..., ConnectionPool]) -> list[tuple[str, ConnectionPool]]:
    return [("asks", transport(PASSWORD)), ("free", transport()), ("free", transport(PASSWORD))]


def leftovers() -> list[Path]:
    found = []
    for path in Path("/tmp").glob("deepep-bootstrap.*"):
        with contextlib.suppress(FileNotFoundError):  # other runs make and remove theirs meanwhile
            found += [path] if path.stat().st_uid in USERS.values() else []
    return found


def test_root_by_sudo_with_and_without_a_password(
    open_ssh_lab: Lab, server: Sshd, transport: Callable[..., ConnectionPool]
) -> None:
    for user, fleet in ways(transport):
        script = 'id -un; echo "$1 $A $HOME"; wc -c; echo talk >&2; exit 5'
        reply = fleet.run(
            open_ssh_lab.host(server, user=user), Job(script, args=("a b",), env={"A": "c  d"}, user="root")
        )
        assert (reply.code, reply.out, reply.err) == (5, "root\na b c  d /root\n0\n", "talk\n")
    assert not leftovers()


def test_another_user_and_oneself(open_ssh_lab: Lab, server: Sshd, transport: Callable[..., ConnectionPool]) -> None:
    host = open_ssh_lab.host(server, user="asks")
    assert (
        transport(PASSWORD).run(host, Job("id -un; echo $HOME", user="free")).out
        == f"free\n{open_ssh_lab.folder}/free\n"
    )
    assert transport().run(host, Job("id -un", user="asks")).out == "asks\n"
    as_root = transport().run(open_ssh_lab.host(server, user="root"), Job("id -un; echo $HOME; pwd", user="asks"))
    assert as_root.out.split() == ["asks", f"{open_ssh_lab.folder}/asks", f"{open_ssh_lab.folder}/asks"]
    assert transport().run(open_ssh_lab.host(server, user="root"), Job("id -un", user="root")).out == "root\n"


def test_the_password_is_nowhere_to_be_seen(
    open_ssh_lab: Lab, server: Sshd, transport: Callable[..., ConnectionPool], tmp_path: Path
) -> None:
    look = (
        "for file in /proc/[0-9]*/{cmdline,environ}; do grep -aqF 'correct horse' $file && echo $file; done "
        "2>/dev/null; export"
    )
    fleet = transport(PASSWORD)
    for watched in (False, True):
        reply = fleet.run(open_ssh_lab.host(server, user="asks"), Job(look, user="root", watched=watched))
        assert "SUDO_USER" in reply.out
        assert "/proc/" not in reply.out
        assert "horse" not in reply.out + reply.err
    assert "horse" not in server.log()


def test_bulk_through_sudo(open_ssh_lab: Lab, server: Sshd, transport: Callable[..., ConnectionPool]) -> None:
    data = bytes(range(256)) * 400
    for user, fleet in ways(transport):
        reply = fleet.send(
            open_ssh_lab.host(server, user=user),
            Job("head -c 256 | od -An -tu1 | head -1; wc -c", user="root"),
            [data] * 20,
        )
        assert reply.out.split() == [*map(str, range(16)), str(20 * len(data) - 256)]


def test_a_watched_script_of_root_ends_with_its_controller(
    open_ssh_lab: Lab, server: Sshd, transport: Callable[..., ConnectionPool], tmp_path: Path
) -> None:
    for number, (user, fleet) in enumerate(ways(transport)):
        pid_file = tmp_path / str(number)
        job = Job(f"sleep 600 & echo $! >{pid_file}; echo ready=1; wait", user="root", timeout=None)
        hold = fleet.hold(open_ssh_lab.host(server, user=user), job, keys=("ready",))
        hold.wait_for("ready", SAFETY)
        pid = int(pid_file.read_text())
        assert alive(pid)
        fleet.close() if number else hold.close()
        wait_until(lambda pid=pid: not alive(pid), "the sleep of root has ended")
    wait_until(lambda: not leftovers(), "nothing is left")


@pytest.mark.parametrize(
    ("user", "password", "message"),
    [
        ("asks", "", r"asks for a password .*Try: --sudo-password-prompt"),
        ("asks", "wrong", r"does not take the password"),
        ("barred", PASSWORD, r"cannot become root there"),
        ("barred", "", r"asks for a password"),
    ],
)
def test_what_sudo_refuses(
    open_ssh_lab: Lab, server: Sshd, transport: Callable[..., ConnectionPool], user: str, password: str, message: str
) -> None:
    host = open_ssh_lab.host(server, user=user)
    for job in (Job("echo ran", user="root"), Job("echo ran", user="root", watched=True)):
        with pytest.raises(Trouble, match=message) as caught:
            transport(password).run(host, job)
        assert caught.value.problems[0].where == host.name
        assert "horse" not in str(caught.value)
        assert "wrong" not in str(caught.value)
    assert not leftovers()


def test_slurms_clients_on_the_accounts_own_path_are_found_through_sudo_too(
    open_ssh_lab: Lab, transport: Callable[..., ConnectionPool]
) -> None:
    """As in /usr/local/bin, which sshd's PATH has and the secure_path of RHEL's sudo has not; SLURM_CONF stays
    behind as well."""
    clients = open_ssh_lab.folder / "clients"
    clients.mkdir()
    (clients / "sinfo").write_text("#!/bin/sh\necho slurm 24.05.3\n", encoding="ascii")
    (clients / "sinfo").chmod(0o755)
    lines = f"SetEnv PATH={clients}:/usr/bin:/bin SLURM_CONF=/shared/slurm.conf"
    host = open_ssh_lab.host(
        open_ssh_lab.start("127.0.3.3", prefix=in_namespace(open_ssh_lab.folder), lines=lines), user="free"
    )
    fleet = transport()
    seen = gather(Flags(ROOT), fleet, Inventory("hosts.txt", (host,), Settings()), "/none").facts[host.name].slurm
    assert (seen.works, seen.path, seen.conf) == (True, str(clients), "/shared/slurm.conf")
    for user in ("root", "asks", ""):
        assert (
            fleet.run(host, Job("command -v sinfo; echo $SLURM_CONF", user=user)).out
            == f"{clients}/sinfo\n/shared/slurm.conf\n"
        )


def test_slurms_clients_of_this_machine_are_found_through_sudo_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho slurm 24.05.3\n", encoding="ascii")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", "/shared/slurm.conf")
    fleet, host = ConnectionPool([]), Host("n001", connection="local")
    gather(Flags(ROOT), fleet, Inventory("hosts.txt", (host,), Settings()), "/none")
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.delenv(name)  # as sudo's env_reset does
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    reply = fleet.run(THIS_MACHINE, Job("command -v sinfo; echo $SLURM_CONF"))
    assert reply.out == f"{tmp_path}/sinfo\n/shared/slurm.conf\n"


def test_no_sudo_at_all(open_ssh_lab: Lab, transport: Callable[..., ConnectionPool]) -> None:
    programs = open_ssh_lab.folder / "bin"
    programs.mkdir()
    for name in ("sh", "bash", "id", "head", "mktemp", "rm", "wc", "cat"):
        (programs / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    server = open_ssh_lab.start("127.0.3.2", prefix=in_namespace(open_ssh_lab.folder), lines=f"SetEnv PATH={programs}")
    with pytest.raises(Trouble, match="not root, and no sudo there"):
        transport(PASSWORD).run(open_ssh_lab.host(server, user="asks"), Job("true", user="root"))
