"""Real Lmod and real Environment Modules for tests, each unpacked beside the machine's system and never installed on
it.

Debian's packages of the two exclude each other, so each has a folder of its own, laid over /usr and /etc in a private
mount namespace while a script runs. Works as root, and without root where the kernel allows user namespaces.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

REPOSITORY = ROOT
PACKAGES = {
    "lmod": (
        "lmod",
        "lua5.3",
        "lua-posix",
        "lua-filesystem",
        "lua-term",
        "lua-json",
        "lua-lpeg",
        "tcl8.6",
        "libtcl8.6",
    ),
    "environment-modules": ("environment-modules", "tcl8.6", "libtcl8.6"),
}

# Arguments: layer ("" for none), driver (yes or no), host name ("" to keep), then the command.
# /proc/driver/nvidia is what tells a node with a driver.
ENTER = r"""
set -eu
layer=$1 driver=$2 host=$3; shift 3
if [ -n "$layer" ]; then
    mount -t overlay overlay -o "lowerdir=$layer/usr:/usr" /usr
    mount -t overlay overlay -o "lowerdir=$layer/etc:/etc" /etc
fi
mount -t tmpfs tmpfs /proc/driver
if [ "$driver" = yes ]; then mkdir /proc/driver/nvidia; fi
if [ -n "$host" ]; then hostname "$host"; fi
exec "$@"
"""

BOOKKEEPING = re.compile(
    r"(_|SHLVL|PWD|OLDPWD|LOADEDMODULES|_LMFILES_|MODULEPATH|__LMOD_.*|_ModuleTable.*|LMOD_.*|__MODULES_.*|MODULES_.*"
    r"|BASH_FUNC_.*|MANPATH)"
)
"""Variables that belong to the shell or to the module system itself."""


NFS = "6969"  # NFS_SUPER_MAGIC, as `stat -f -c %t` prints it


def on_network_fs(folder: Path, home: str) -> str:
    """Return a line of shell after which `stat -f` says of `home` what it says of NFS, and of the rest the truth: no
    network filesystem can be had here. `folder` takes the program."""
    (folder / "nfs").mkdir(exist_ok=True)
    program = folder / "nfs" / "stat"
    program.write_text(f'#!/bin/sh\ncase "$*" in *" {home}/") echo {NFS}; exit ;; esac\nexec /usr/bin/stat "$@"\n')
    program.chmod(0o755)
    return f"export PATH={folder}/nfs:$PATH HOME={home}\n"


def on_machine(folder: Path, machine: str) -> str:
    """Return a line of shell after which `uname -m` says that this is another kind of machine: none is to be had here.
    `folder` takes the program."""
    place = folder / f"machine-{machine}"
    place.mkdir(exist_ok=True)
    program = place / "uname"
    program.write_text(f'#!/bin/sh\ncase "$*" in -m) echo {machine} ;; *) exec /usr/bin/uname "$@" ;; esac\n')
    program.chmod(0o755)
    return f'PATH={place}:$(printf %s "$PATH" | sed "s|^{folder}/machine-[^:]*:||"); hash -r\n'


@dataclass(frozen=True)
class Session:
    """What a script left: exit code, both streams, and the environments it saved with `snapshot NAME`."""

    code: int
    out: str
    err: str
    environments: Mapping[str, Mapping[str, str]]


def unpack(system: str) -> Path:
    """Return the folder with the unpacked packages of a module system, filling it first where needed."""
    base = (
        REPOSITORY / ".venv"
        if (REPOSITORY / ".venv").is_dir()
        else Path(tempfile.gettempdir()) / f"deepep-bootstrap-tests-{os.getuid()}"
    )
    base.mkdir(mode=0o700, exist_ok=True)
    folder = base / f"layer-{system}"
    with (base / f"{system}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            aside = Path(tempfile.mkdtemp(dir=base))
            (aside / "debs").mkdir()
            fetch = ["apt-get", "-q", "download", *PACKAGES[system]]
            done = subprocess.run(fetch, cwd=aside / "debs", capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{' '.join(fetch)} (run `apt-get update` first?): {done.stderr}"
            for package in sorted((aside / "debs").glob("*.deb")):
                subprocess.run(["dpkg-deb", "-x", package, aside / "root"], check=True)
            (aside / "root").rename(folder)
            shutil.rmtree(aside)
    return folder


def run(
    script: str,
    folder: Path,
    *,
    system: str = "",
    login: bool = True,
    driver: bool = False,
    host: str = "",
    env: Mapping[str, str] | None = None,
) -> Session:
    """Run bash text with a module system ("" for none) in an environment of `env` alone; `login` makes it a login
    shell.

    It runs on a machine called `host`, where that is given, and may rename it: the name is the script's own.
    `folder` takes the script and what it saves; the text may call `snapshot NAME`.
    """
    file = folder / "script.sh"
    file.write_text(f"snapshot() {{ env -0 >'{folder}'/\"$1\".env; }}\n{script}\n")
    layer = str(unpack(system)) if system else ""
    clean = {"HOME": str(folder), "PATH": "/usr/local/bin:/usr/bin:/bin", "USER": "tester", **(env or {})}
    words = [f"{name}={value}" for name, value in clean.items()]
    namespace = ["unshare", "-mu"] if os.getuid() == 0 else ["unshare", "-Urmu"]
    shell = ["bash", "-l", file] if login else ["bash", file]
    yes = "yes" if driver else "no"
    command = [*namespace, "bash", "-c", ENTER, "enter", layer, yes, host, "env", "-i", *words, *shell]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=folder, check=False)
    saved = {path.stem: read_environment(path) for path in folder.glob("*.env")}
    return Session(done.returncode, done.stdout, done.stderr, saved)


def read_environment(path: Path) -> dict[str, str]:
    """Return a saved environment without the variables of shell and module system."""
    text = path.read_bytes().decode(errors="surrogateescape")
    pairs = (item.partition("=") for item in text.split("\0") if item)
    return {name: value for name, _, value in pairs if not BOOKKEEPING.fullmatch(name)}
