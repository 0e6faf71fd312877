"""Package layers of a lab: made once by the distribution's own package manager, kept in a cache, never part
of the machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepep_bootstrap.core import process
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.lab import clean, cluster_lab

PACKAGES = (
    *(
        "openssh-server",
        "slurmctld",
        "slurmd",
        "slurm-client",
        "munge",
        "procps",
        "sudo",
        "kmod",
        "rsync",
        "iproute2",
        "openssl",
    ),
    *("rdma-core", "ibverbs-providers", "gpg"),
    *("gcc", "g++", "make", "cmake", "ninja-build", "git", "patch", "file", "pkg-config", "ca-certificates"),
    *("libibverbs-dev", "python3", "python3-dev", "python3-venv"),
)
BUILD_LIMIT = 1200.0
"""Seconds for an installation, with a slow package mirror in mind."""


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock `name` of the cache folder; a second process waits. The kernel frees it when its holder dies."""
    folder = cluster_lab.cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w", encoding="ascii") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def words_for(layer: str) -> list[str]:
    """Return the arguments for `apt-get install`: all packages, the wanted module system, and the unwanted ones to
    go."""
    unwanted = [f"{package}-" for name, package in cluster_lab.LAYERS.items() if name != layer]
    return [*PACKAGES, cluster_lab.LAYERS[layer], *unwanted]


def key_of(layer: str) -> str:
    """Return the cache name of a layer: what is installed, how, and over which release of which distribution."""
    script = (cluster_lab.data_folder() / "lab" / "image.sh").read_bytes()
    try:
        system = platform.freedesktop_os_release()
    except OSError:
        system = {}
    release = f"{system.get('ID', '')}-{system.get('VERSION_ID', '')}"
    text = "\n".join([release, *words_for(layer)]).encode() + script
    return f"{release}-{layer}-{hashlib.sha256(text).hexdigest()[:16]}"


def ensure_image(the_lab: cluster_lab.Lab, say: cluster_lab.Say) -> Path:
    """Return the folder of the lab's package layer, installing it first where the cache has none.

    Where the cache lies on an overlay itself (this machine is a container), the kernel takes no layer from it: then the
    layer is made in the lab's own folder, on a tmpfs, anew for every lab.
    """
    _check_system()
    cache = cluster_lab.cache_dir()
    with locked("image"):
        if _filesystem(cache) == "overlayfs":
            say(
                f"{cache} lies on an overlay filesystem, so packages cannot be kept between labs: installing them "
                f"into the lab"
            )
            return _build(the_lab.path / "image", the_lab.layer)
        image = cache / key_of(the_lab.layer)
        if not image.exists():
            for rest in cache.glob(".tmp-*"):
                clean.end_processes(str(rest))
                shutil.rmtree(rest)
            say(f"installing the lab's packages into {image} (once; this machine's own system stays as it is)")
            _build(cache / f".tmp-{image.name}", the_lab.layer).rename(image)
        return image


def slurm_version(image: Path) -> tuple[int, int]:
    """Return year and month of the Slurm in a layer, from its package database."""
    status = (image / "var/lib/dpkg/status").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^Package: slurmd\n(?:.+\n)*?Version: (?:\d+:)?(\d+)\.(\d+)", status, re.MULTILINE)
    if not found:
        raise Trouble(
            Problem(str(image), "no slurmd in the lab's package layer", try_=f"rm -rf {image}, then invoke lab up")
        )
    return int(found[1]), int(found[2])


def _check_system() -> None:
    problems = []
    if not Path("/usr/bin/apt-get").exists():
        problems.append(Problem("lab", "this machine has no apt-get", wanted="Debian 12 or Ubuntu 24.04"))
    if not Path("/bin").is_symlink():
        problems.append(
            Problem("lab", "/bin is a folder of its own here", wanted="a link to usr/bin, as since Debian 12")
        )
    problems += [
        Problem("lab", f"{tool} is missing", try_="apt-get install iproute2 util-linux openssh-client")
        for tool in ("ip", "unshare", "nsenter", "ssh-keygen")
        if not shutil.which(tool, path=cluster_lab.CLEAN_ENV["PATH"])
    ]
    if problems:
        raise Trouble(*problems)


def _filesystem(folder: Path) -> str:
    return cluster_lab.must(["stat", "-f", "-c", "%T", folder]).strip()


def _build(folder: Path, layer: str) -> Path:
    script = cluster_lab.data_folder() / "lab" / "image.sh"
    folder.mkdir(parents=True)
    # Whoever kills us ends the installation too: --kill-child ends everything below unshare, --pdeathsig unshare
    # itself.
    argv: list[str | Path] = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        "unshare",
        "-m",
        "-p",
        "-f",
        "--kill-child",
        "bash",
        script,
        folder,
    ]
    proxies = {
        name: value for name, value in os.environ.items() if name.lower() in ("http_proxy", "https_proxy", "no_proxy")
    }
    environment = cluster_lab.CLEAN_ENV | proxies | {cluster_lab.MARK: str(folder)}
    done = process.run_program([*argv, *words_for(layer)], env=environment, timeout=BUILD_LIMIT)
    if done.code != 0:
        shutil.rmtree(folder)
        raise Trouble(
            Problem(
                "lab",
                "installing the lab's packages failed",
                found=done.tail,
                try_="apt-get update, then invoke lab up",
            )
        )
    # The machine's own software in /usr/local must not show: the layer's (empty) folder hides it.
    os.setxattr(folder / "usr" / "local", "trusted.overlay.opaque", b"y")
    return folder
