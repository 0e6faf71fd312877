"""Removal of a lab, whatever state it is in: its processes, mounts, network devices and folder, and nothing
else.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

from deepep_bootstrap.core import process
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.lab import cluster_lab

MOUNT_SOURCE = "deepep-lab"
"""What the lab's tmpfs is called in the mount table: a mount of another name is not ours."""

END_LIMIT = 15.0


def sweep(folder: str) -> None:
    """Remove every trace of the lab in `folder`. What is not there is fine; Trouble when something cannot be
    removed."""
    end_processes(folder)
    _delete_links(folder)
    _unmount(folder)
    path = Path(folder)
    if (path / "lab.json").exists():
        shutil.rmtree(path)
    elif path.is_dir() and not any(path.iterdir()):
        path.rmdir()


def end_processes(folder: str, home: str = "") -> None:
    """Kill every process of the lab in `folder` and wait until none is left; with `home`, a host's folder, that
    host's only: a power cut."""
    deadline = time.monotonic() + END_LIMIT
    while left := [pid for pid in _numbers() if _kill_if_ours(pid, folder, home)]:
        if time.monotonic() > deadline:
            raise Trouble(Problem(folder, "processes of the lab do not end", found=" ".join(map(str, left))))
        time.sleep(0.02)


def _numbers() -> list[int]:
    own = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own]


def _kill_if_ours(pid: int, folder: str, home: str) -> bool:
    """Kill one process if it is the lab's. A pidfd holds on to the process that was looked at: a number that goes to
    another process in between does no harm."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not cluster_lab.belongs(pid, folder, home):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def _delete_links(folder: str) -> None:
    shown = process.run_program(["ip", "-j", "link", "show"], env=cluster_lab.CLEAN_ENV)
    links = json.loads(shown.out) if shown.code == 0 and shown.out.strip() else []
    bridges = {link["ifname"] for link in links if link.get("ifalias") == f"{cluster_lab.MARK}={folder}"}
    recorded = cluster_lab.load(folder)
    if recorded is not None and recorded.kind == cluster_lab.NAMESPACES:
        # Killed between making the bridge and giving it its alias.
        bridges |= {link["ifname"] for link in links if link["ifname"] == recorded.bridge and not link.get("ifalias")}
    for name in [link["ifname"] for link in links if link.get("master") in bridges] + sorted(bridges):
        # A cable disappears on its own when its host's network namespace does.
        process.run_program(["ip", "link", "del", name], env=cluster_lab.CLEAN_ENV)


def mounts(folder: str) -> list[tuple[str, str]]:
    """Return (mount point, source) of every mount at or below `folder`, in the order they were made."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        fields, _, rest = line.partition(" - ")
        point = fields.split()[4].encode().decode("unicode_escape")
        if point == folder or point.startswith(f"{folder}/"):
            found.append((point, rest.split()[1]))
    return found


def _unmount(folder: str) -> None:
    if (folder, MOUNT_SOURCE) not in mounts(folder):
        return
    deadline = time.monotonic() + END_LIMIT
    while points := [point for point, _ in mounts(folder)]:
        # Mount namespaces of dead hosts go some moments after their processes: until then the folder is busy.
        done = process.run_program(["umount", points[-1]], env=cluster_lab.CLEAN_ENV)
        if done.code != 0 and time.monotonic() > deadline:
            users = ", ".join(_users(folder)) or "nobody that can be seen"
            raise Trouble(
                Problem(
                    points[-1],
                    "cannot be unmounted",
                    found=f"in use by {users}",
                    try_="ending them, then invoke lab down",
                )
            )
        if done.code != 0:
            # A process that a killed `up` was just about to start bears the lab's mark only now.
            end_processes(folder)
            time.sleep(0.05)


def _users(folder: str) -> list[str]:
    held = {
        pid: [name for name in cluster_lab.open_files(pid) if name == folder or name.startswith(f"{folder}/")]
        for pid in _numbers()
    }
    return [f"process {pid} ({names[0]})" for pid, names in held.items() if names]
