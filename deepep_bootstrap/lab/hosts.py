"""Hosts of a lab made of namespaces: their disks, their boot, and a way to run something in them. Needs
root.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from deepep_bootstrap.core import process
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.lab import cluster_lab, image, slurm
from deepep_bootstrap.lab.cluster_lab import Lab, LabHost

BOOT_LIMIT = 60.0
BOOTS = 8
"""Hosts that boot at the same time: all of 64 on two cores would take longer than one may."""
FOLDERS = (
    "proc",
    "sys",
    "dev",
    "run",
    "tmp",
    "root",
    "home",
    "opt",
    "srv",
    "mnt",
    "media",
    "boot",
    "shared",
    "usr",
    "etc",
    "var",
)
USERS = {"builder": 7001, "keeper": 7002}
"""Plain users of every host; the second may use sudo. image.sh makes their accounts."""


MODULE_TOOLS = ("modprobe", "rmmod", "insmod", "lsmod", "depmod", "update-initramfs")
PREPARED = {
    "etc/modprobe.d/nvidia.conf": "options nvidia NVreg_EnableStreamMemOPs=1 "
    'NVreg_RegistryDwords="PeerMappingOverride=1;"\n',
    "etc/modules-load.d/nvidia-peermem.conf": "nvidia_peermem\n",
}
"""What makes a GPU node of the lab need no preparation; a test that wants a bare one deletes the files and reboots
it."""


def possible() -> bool:
    """Say whether this process may make namespaces with networks of their own."""
    probe = ["unshare", "-n", "-m", "-u", "-p", "-i", "-f", "-T", "true"]
    return os.geteuid() == 0 and process.run_program(probe, env=cluster_lab.CLEAN_ENV).code == 0


def make_bridge(the_lab: Lab) -> None:
    """Make the bridge that all hosts are plugged into."""
    cluster_lab.must(["ip", "link", "add", the_lab.bridge, "type", "bridge"])
    # By the alias a later `down` knows whose bridge this is, should the lab's own record be lost.
    cluster_lab.must(["ip", "link", "set", the_lab.bridge, "alias", f"{cluster_lab.MARK}={the_lab.dir}"])
    cluster_lab.must(["ip", "addr", "add", f"{the_lab.subnet}.1/24", "dev", the_lab.bridge])
    cluster_lab.must(["ip", "link", "set", the_lab.bridge, "up"])


def prepare(the_lab: Lab) -> None:
    """Write everything outside the hosts' disks: the scripts, the keys, the Slurm configuration."""
    shutil.copytree(cluster_lab.data_folder() / "lab", the_lab.path / "bin", dirs_exist_ok=True)
    for script in (the_lab.path / "bin").iterdir():
        script.chmod(0o755)
    the_lab.shared.mkdir(exist_ok=True)
    the_lab.shared.chmod(0o1777)
    cluster_lab.write_user_files(the_lab, "root")
    make_homes(the_lab)
    if not the_lab.light:
        _write_slurm_config(the_lab)


def _write_slurm_config(the_lab: Lab) -> None:
    nodes = ",".join(host.name for host in the_lab.hosts if host.role == "gpu")
    values = {
        "controller": the_lab.controller.name,
        "user": "slurm",
        "state": "/var",
        "run": "/run",
        "each": "",
        "nodes": nodes,
        "extra": f"RebootProgram=/usr/sbin/lab-reboot\nNodeName={nodes} {slurm.NODE}",
    }
    slurm.write_config(the_lab.path / "slurm", values, image.slurm_version(Path(the_lab.image)), "/dev/nvidia[0-7]")


def make_disk(the_lab: Lab, host: LabHost) -> None:
    """Give a host a fresh disk: the folders of a root, and the files in which it differs from the image."""
    home = the_lab.home(host.name)
    disk = home / "disk"
    for folder in (*FOLDERS, "etc/ssh", "etc/slurm", "usr/sbin", "usr/bin"):
        (disk / folder).mkdir(parents=True)
    (disk / "tmp").chmod(0o1777)
    for link in Path("/").iterdir():
        if link.is_symlink() and re.fullmatch(r"bin|sbin|lib\w*", link.name):
            (disk / link.name).symlink_to(os.readlink(link))
    # The machine's own host keys and client settings must not show.
    os.setxattr(disk / "etc" / "ssh", "trusted.overlay.opaque", b"y")
    _write_etc(the_lab, host, disk / "etc")
    _add_programs(the_lab, host, disk)
    _make_home(the_lab, disk / "root", 0)
    for folder in ("root", "work", "dpkg", "lab/fake"):
        (home / folder).mkdir(parents=True)
    if host.role == "gpu":
        (home / "lab" / "gpu").touch()
    if the_lab.light:
        (home / "lab" / "light").touch()
        # The image's own clients of Slurm must not show: to an overlay such a device is a file that was deleted.
        os.mknod(disk / "usr" / "bin" / "sinfo", stat.S_IFCHR, os.makedev(0, 0))


def _write_etc(the_lab: Lab, host: LabHost, etc: Path) -> None:
    names = "".join(f"{other.address} {other.name}\n" for other in the_lab.hosts)
    (etc / "hostname").write_text(f"{host.name}\n", encoding="ascii")
    (etc / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}", encoding="ascii")
    # No name server: the hosts have no way out, and a lookup should fail at once.
    (etc / "resolv.conf").write_text("", encoding="ascii")
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n", encoding="ascii")
    shutil.copy(the_lab.path / "bin" / "sshd_config", etc / "ssh" / "sshd_config")
    shutil.copy(the_lab.identity.parent / host.name, etc / "ssh" / "ssh_host_ed25519_key")
    os.chown(etc / "ssh" / "ssh_host_ed25519_key", 0, 0)
    if not the_lab.light:
        shutil.copytree(the_lab.path / "slurm", etc / "slurm", dirs_exist_ok=True)


def _add_programs(the_lab: Lab, host: LabHost, disk: Path) -> None:
    for script in ("lab-rc", "lab-reboot"):
        shutil.copy(the_lab.path / "bin" / script, disk / "usr" / "sbin" / script)
    for link in ("reboot", "shutdown"):
        (disk / "usr" / "sbin" / link).symlink_to("lab-reboot")
    if host.role != "gpu":
        return
    shutil.copy(the_lab.path / "bin" / "nvidia-smi", disk / "usr" / "bin" / "nvidia-smi")
    (disk / "usr" / "share" / "lab").mkdir(parents=True)
    shutil.copy(the_lab.path / "bin" / "kernel.sh", disk / "usr" / "share" / "lab" / "kernel.sh")
    shutil.copy(the_lab.path / "bin" / "lab-kmod", disk / "usr" / "share" / "lab" / "lab-kmod")
    for name in MODULE_TOOLS:
        (disk / "usr" / "sbin" / name).symlink_to("../share/lab/lab-kmod")
    for file, text in PREPARED.items():
        (disk / file).parent.mkdir(parents=True, exist_ok=True)
        (disk / file).write_text(text, encoding="ascii")
    toolkit = cluster_lab.data_folder() / "fakes" / "cuda"
    if toolkit.is_dir():
        shutil.copytree(toolkit, disk / "usr" / "local" / "cuda", symlinks=True)


def make_homes(the_lab: Lab) -> None:
    """Make the folder that all hosts share as /home, with the plain users' homes: what a job writes where it was
    submitted is there on every host."""
    the_lab.homes.mkdir(exist_ok=True)
    for user, number in USERS.items():
        _make_home(the_lab, the_lab.homes / user, number)


def _make_home(the_lab: Lab, home: Path, number: int) -> None:
    keys = home / ".ssh"
    keys.mkdir(parents=True)
    shutil.copy(the_lab.identity.with_suffix(".pub"), keys / "authorized_keys")
    for name in (".bashrc", ".profile"):
        shutil.copy(Path("/etc/skel") / name, home / name)
    for path in (home, keys, *keys.iterdir(), *home.glob(".*")):
        os.chown(path, number, number)
    home.chmod(0o700)
    keys.chmod(0o700)


def boot(the_lab: Lab, *hosts: LabHost) -> None:
    """Start the supervisors of `hosts` (a disk is made where there is none) and wait until their sshd runs."""
    for begin in range(0, len(hosts), BOOTS):
        _boot_together(the_lab, hosts[begin : begin + BOOTS])


def _boot_together(the_lab: Lab, hosts: Sequence[LabHost]) -> None:
    for host in hosts:
        home = the_lab.home(host.name)
        if not (home / "disk").exists():
            make_disk(the_lab, host)
        (home / "ready").unlink(missing_ok=True)
        cable = f"lab{the_lab.index}-{host.name}"
        variables = {cluster_lab.MARK: the_lab.dir, f"{cluster_lab.MARK}_HOST": str(home)}
        words = [the_lab.dir, host.name, the_lab.image, f"{host.address}/24", the_lab.bridge, cable]
        process.run_program(
            ["setsid", "--fork", the_lab.path / "bin" / "supervisor.sh", *words], env=cluster_lab.CLEAN_ENV | variables
        )
    deadline = time.monotonic() + BOOT_LIMIT
    for host in hosts:
        while not (the_lab.home(host.name) / "ready").exists():
            if time.monotonic() > deadline:
                console = (the_lab.home(host.name) / "console").read_text(encoding="utf-8", errors="replace")
                raise Trouble(
                    Problem(host.name, f"did not start in {BOOT_LIMIT:g} s", found="\n".join(console.splitlines()[-8:]))
                )
            time.sleep(0.01)


def enter(the_lab: Lab, name: str) -> tuple[str, ...]:
    """Return the command prefix that runs something in a host without SSH; Trouble when the host is off."""
    pid = cluster_lab.alive(the_lab, name)
    if pid == 0:
        raise Trouble(Problem(name, "this lab host is off", try_="invoke lab up"))
    return ("nsenter", "-t", str(pid), "-n", "-m", "-u", "-p", "-i", "-T", "-r", "-w", "--")


def boot_id(the_lab: Lab, name: str) -> str:
    """Return the boot id of a running host, empty when it is off."""
    pid = cluster_lab.alive(the_lab, name)
    try:
        return Path(f"/proc/{pid}/root/run/boot_id").read_text(encoding="ascii").strip() if pid else ""
    except (FileNotFoundError, ProcessLookupError):
        # It went off since it was seen running, or is not that far in its boot.
        return ""


def logs(the_lab: Lab) -> list[Path]:
    """Return the files that explain a Slurm that does not start."""
    if the_lab.light:
        return []
    controller = the_lab.home(the_lab.controller.name)
    nodes = [the_lab.home(host.name) / "disk/var/log/slurm/slurmd.log" for host in the_lab.hosts if host.role == "gpu"]
    return [
        controller / "disk/var/log/slurm/slurmctld.log",
        *nodes,
        *(the_lab.home(host.name) / "console" for host in the_lab.hosts),
    ]
