"""A machine for the fact script: trees of /sys, /proc and /etc and programs on PATH, built from a small data file."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit

from deepep_bootstrap.inventory import facts
from tests.support.paths import ROOT

RECIPES = ROOT / "recipes"
CASES = ROOT / "tests" / "cases" / "inventory" / "facts"
# By full path: a machine's own `bash` may be a stand-in.
SHELLS = {"dash": ["/usr/bin/dash"], "bash": ["/usr/bin/bash"], "busybox": ["/usr/bin/busybox", "sh"]}


def recipes() -> dict[str, str]:
    """Return all recipe texts by their path below recipes/."""
    return {str(path.relative_to(RECIPES)): path.read_text(encoding="utf-8") for path in RECIPES.rglob("*.sh")}


def read_tree_file(name: str) -> dict[str, Any]:
    """Return the data of tests/cases/inventory/facts/trees/<name>.toml."""
    return tomlkit.parse((CASES / "trees" / f"{name}.toml").read_text(encoding="utf-8")).unwrap()


def run_script(shell: str, *arguments: str, env: Mapping[str, str] | None = None, user: int = 0) -> str:
    """Run the whole fact script as the engine sends it and return what it prints; it must end with 0 and say nothing
    on stderr."""
    command = [*SHELLS[shell], "-s", "--", *arguments]
    if user:
        command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command]
    clean = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/"}
    done = subprocess.run(
        command,
        input=facts.facts_script(recipes()),
        env={**clean, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done
    assert done.stderr == ""
    return done.stdout


FOREIGN = ("ip", "getent", "ldconfig", "dpkg-query", "rpm", "systemctl", "ofed_info", "ibv_devices", "dcb", "mlxreg")
"""Programs that would answer for the machine that runs the test: a constructed machine has them only where its data
say so."""


class Machine:
    """A constructed machine below `root`: `env` makes the fact script see it."""

    def __init__(self, root: Path, data: Mapping[str, Any]) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir(parents=True)
        self.data = data
        for path, text in data.get("files", {}).items():
            self.write(path, text)
        for name in FOREIGN:
            self.program(f"bin/{name}", "exit 127\n")
        for path, text in data.get("programs", {}).items():
            self.program(path, text)
        for path, target in data.get("links", {}).items():
            self.link(path, target)
        self._gpus()
        for row in data.get("nics", []):
            self._nic(*row)
        for row in data.get("pci", []):
            self._function(**row)

    @property
    def env(self) -> dict[str, str]:
        """The environment of a run on this machine: its tree, its programs first on PATH, no other tools of the test
        machine."""
        return {"FACTS_ROOT": str(self.root), "PATH": f"{self.bin}:/usr/bin:/bin"}

    def write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    def program(self, path: str, text: str) -> None:
        self.write(path, f"#!/bin/sh\n{text}").chmod(0o755)

    def link(self, path: str, target: str) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)

    def _pci(self, path: str, numa: int, driver: str) -> Path:
        """Make a PCI device with its entry under /sys/bus, as sysfs has it."""
        device = self.write(f"sys/devices/{path}/numa_node", f"{numa}\n").parent
        address = path.rsplit("/", 1)[-1]
        self.link(f"sys/bus/pci/devices/{address}", os.path.relpath(device, self.root / "sys/bus/pci/devices"))
        if driver:
            (self.root / "sys/bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
            (device / "driver").symlink_to(os.path.relpath(self.root / "sys/bus/pci/drivers" / driver, device))
        return device

    def _function(self, path: str, vendor: str, kind: str, **links: str) -> None:
        """Make a PCI function of a vendor and class; `iommu` is the type of its IOMMU group, `physfn` the function
        that lends it."""
        device = self._pci(path, -1, "")
        self.write(f"sys/devices/{path}/vendor", f"{vendor}\n")
        self.write(f"sys/devices/{path}/class", f"{kind}\n")
        if "iommu" in links:
            group = f"sys/kernel/iommu_groups/{len(list((self.root / 'sys/kernel').glob('iommu_groups/*')))}"
            self.write(f"{group}/type", f"{links['iommu']}\n")
            (device / "iommu_group").symlink_to(self.root / group)
        if "physfn" in links:
            (device / "physfn").symlink_to(f"../{links['physfn']}")

    def _gpus(self) -> None:
        """Make the PCI devices and an nvidia-smi that lists them the way the real one prints them."""
        if "gpu" not in self.data:
            return
        kind, rows = self.data["gpu"], self.data.get("gpus", [])
        lines, users = [], []
        for index, (path, numa, processes) in enumerate(rows):
            domain, rest = path.rsplit("/", 1)[-1].split(":", 1)
            address = f"0000{domain}:{rest}".upper()
            self._pci(path, numa, "nvidia")
            lines.append(
                f"{index}, {kind['name']}, {kind['memory']}, {kind['capability']}, {kind['driver']}, {address}"
            )
            users += [f"{address}, {4000 + index * 10 + number}" for number in range(processes)]
        listing, apps = "\n".join(lines), "\n".join(users)
        self.program(
            "bin/nvidia-smi", f"case $1 in --query-gpu=*) echo '{listing}' ;; *) printf '%s' '{apps}' ;; esac\n"
        )

    def _nic(self, name: str, path: str, numa: int, address: str) -> None:
        """Make an RDMA device with one port; `address` is the last part of its GIDs."""
        kind = {**self.data["nic"], **self.data.get("other_nics", {}).get(name, {})}
        device = self._pci(path, numa, kind["driver"])
        folder = f"sys/devices/{path}/infiniband/{name}"
        self.write(f"{folder}/fw_ver", f"{kind['firmware']}\n")
        (self.root / folder / "device").symlink_to("../..")
        port = f"{folder}/ports/1"
        for key in ("state", "link_layer", "rate"):
            self.write(f"{port}/{key}", f"{kind[key]}\n")
        for index in range(16):
            self.write(f"{port}/gids/{index}", "0000:0000:0000:0000:0000:0000:0000:0000\n")
        for index, gid, gid_kind in kind["gids"]:
            self.write(f"{port}/gids/{index}", f"{gid.replace('ADDRESS', address)}\n")
            self.write(f"{port}/gid_attrs/types/{index}", f"{gid_kind}\n")
            self.write(
                f"{port}/gid_attrs/ndevs/{index}",
                f"{kind.get('netdev', '')}{name[-3:] if kind.get('netdev') else ''}\n",
            )
        self.link(
            f"sys/class/infiniband/{name}",
            os.path.relpath(device / "infiniband" / name, self.root / "sys/class/infiniband"),
        )
