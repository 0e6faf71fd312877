"""One lab from beginning to end: up, down, state, reset; for its command and the tests' fixtures."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.lab import clean, cluster_lab, hosts, image, loopback, slurm
from deepep_bootstrap.lab.cluster_lab import Lab, LabHost, Say


class Maker(Protocol):
    """What both ways of making hosts offer: the modules lab.hosts and lab.loopback."""

    def prepare(self, the_lab: Lab, /) -> None:
        """Write what the hosts need outside their disks."""

    def boot(self, the_lab: Lab, /, *hosts: LabHost) -> None:
        """Start hosts that are off."""

    def enter(self, the_lab: Lab, name: str, /) -> Sequence[str]:
        """Return a command prefix that runs something in a host."""

    def boot_id(self, the_lab: Lab, name: str, /) -> str:
        """Return the boot id of a host, empty when it is off."""

    def logs(self, the_lab: Lab, /) -> Sequence[Path]:
        """Return Slurm's logs."""


def maker(kind: str) -> Maker:
    """Return the module that makes hosts of `kind`."""
    return hosts if kind == cluster_lab.NAMESPACES else loopback


def up(folder: str, layer: str, say: Say, light: int = 0) -> Lab:
    """Bring up the lab in `folder` and return it; what already runs is left alone, a host that is off is booted again.
    `light` is how many hosts without Slurm it has in place of the three (0: those three).

    Remains of a lab that was killed while starting are removed first. Trouble when the lab there has another layer or
    other hosts.
    """
    if layer not in cluster_lab.LAYERS:
        raise Trouble(Problem("--layer", "no such module system", found=layer, wanted=" or ".join(cluster_lab.LAYERS)))
    if not 0 <= light <= cluster_lab.LIGHT_MOST:
        raise Trouble(Problem("--light", "so many hosts cannot be", str(light), f"1 to {cluster_lab.LIGHT_MOST}"))
    with image.locked(_lock_name(folder)):
        found = cluster_lab.load(folder)
        if found is None or not _worth_keeping(found):
            _check_free(folder)
            clean.sweep(folder)
            found = _create(folder, layer, light, say)
        elif found.layer != layer:
            what = f"the lab in {folder} has another module system"
            raise Trouble(
                Problem("--layer", what, found=found.layer, wanted=layer, try_=f"invoke lab down --dir={folder}")
            )
        elif found.light != light:
            what = f"the lab in {folder} has other hosts"
            have, want = (f"{count} without Slurm" if count else "three with Slurm" for count in (found.light, light))
            raise Trouble(Problem("--light", what, have, want, f"invoke lab down --dir={folder}"))
        _start(found)
        (found.path / "complete").touch()
        return found


def down(folder: str) -> None:
    """Take the lab in `folder` away: processes, mounts, network devices, folder. Only the cached packages stay."""
    with image.locked(_lock_name(folder)):
        clean.sweep(folder)


def reset(the_lab: Lab) -> None:
    """Give every host a fresh disk, empty the shared folder and make fresh homes; addresses and keys stay. All hosts
    boot anew. Trouble for a lab without root: its hosts have no disks."""
    if the_lab.kind != cluster_lab.NAMESPACES:
        raise Trouble(
            Problem(the_lab.dir, "a lab without root has no disks to reset", try_="invoke lab down, then invoke lab up")
        )
    with image.locked(_lock_name(the_lab.dir)):
        clean.end_processes(the_lab.dir)
        for host in the_lab.hosts:
            shutil.rmtree(the_lab.home(host.name))
        for path in the_lab.shared.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        shutil.rmtree(the_lab.homes)
        hosts.make_homes(the_lab)
        _start(the_lab)


def state(folder: str) -> dict[str, object]:
    """Return the state: whether a lab is there, and of each host address, role, boot id and Slurm state."""
    found = cluster_lab.load(folder)
    if found is None:
        return {"dir": folder, "state": "down", "hosts": []}
    nodes = {}
    made_by = maker(found.kind)
    if not found.light and cluster_lab.alive(found, found.controller.name):
        nodes = slurm.node_states(made_by.enter(found, found.controller.name))
    hosts = [
        {
            "name": host.name,
            "address": host.address,
            "port": host.port,
            "role": host.role,
            "boot_id": made_by.boot_id(found, host.name),
            "slurm": nodes.get(host.name, ""),
        }
        for host in found.hosts
    ]
    whole = all(host["boot_id"] for host in hosts) and (found.path / "complete").exists()
    return {
        "dir": folder,
        "state": "up" if whole else "broken",
        "kind": found.kind,
        "layer": found.layer,
        "hosts": hosts,
    }


def _create(folder: str, layer: str, light: int, say: Say) -> Lab:
    kind = cluster_lab.NAMESPACES if hosts.possible() else cluster_lab.LOOPBACK
    if kind == cluster_lab.LOOPBACK and os.geteuid() == 0:
        raise Trouble(
            Problem(
                "lab", "root may not make namespaces here", try_="invoke lab up as a plain user, for a lab without them"
            )
        )
    if light and kind == cluster_lab.LOOPBACK:
        raise Trouble(Problem("--light", "a lab without root has its three hosts", try_="sudo"))
    Path(folder).mkdir(parents=True, exist_ok=True)
    if kind == cluster_lab.NAMESPACES:
        cluster_lab.must(["mount", "-t", "tmpfs", "-o", "mode=755", clean.MOUNT_SOURCE, folder])
    with image.locked("networks"):
        # A lab that starts beside this one must see its bridge before it chooses a network of its own.
        new = cluster_lab.new_lab(folder, kind, layer, light)
        cluster_lab.save(new)
        if kind == cluster_lab.NAMESPACES:
            hosts.make_bridge(new)
    packages = image.ensure_image(new, say) if kind == cluster_lab.NAMESPACES else loopback.ensure_image(say)
    new = replace(new, image=str(packages))
    cluster_lab.save(new)
    maker(kind).prepare(new)
    return new


def _start(the_lab: Lab) -> None:
    made_by = maker(the_lab.kind)
    made_by.boot(the_lab, *(host for host in the_lab.hosts if not cluster_lab.alive(the_lab, host.name)))
    if the_lab.light:
        return
    enter = made_by.enter(the_lab, the_lab.controller.name)
    slurm.wait_idle(the_lab, enter, made_by.logs(the_lab))


def _worth_keeping(found: Lab) -> bool:
    """Say whether booting what is off makes `found` whole: not when it never was, nor when only files of it survived
    a reboot."""
    running = found.kind == cluster_lab.NAMESPACES or any(cluster_lab.alive(found, host.name) for host in found.hosts)
    return running and (found.path / "complete").exists()


def _check_free(folder: str) -> None:
    path = Path(folder)
    ours = (folder, clean.MOUNT_SOURCE) in clean.mounts(folder) or (path / "lab.json").exists()
    if path.exists() and not ours and (not path.is_dir() or any(path.iterdir())):
        raise Trouble(Problem("--dir", f"{folder} holds something else", wanted="a folder that is empty or not there"))


def _lock_name(folder: str) -> str:
    # A few locks shared by all folders: one per folder would fill the cache with files of labs long gone.
    return f"lab-{zlib.crc32(folder.encode()) % 16:x}"
