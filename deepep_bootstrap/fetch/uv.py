"""The locked uv for this machine or a host, else this machine's own, and the cache folder of downloads."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from deepep_bootstrap.core import process
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.filetree import whole_file
from deepep_bootstrap.fetch.index import is_offered
from deepep_bootstrap.fetch.locations import Mirrors
from deepep_bootstrap.fetch.wheels import fetch_wheels
from deepep_bootstrap.lock.model import Lock, Wheel


class Program(Struct, frozen=True):
    """A program to run; `remark` says why it is not the locked one, "" where it is."""

    path: Path
    remark: str = ""


def cache_dir() -> Path:
    """Return the folder that keeps verified downloads on the control machine (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "deepep-bootstrap"


def find_uv(machine: str, lock: Lock, mirrors: Mirrors, on_line: Callable[[str], None]) -> Program:
    """Return a uv for machines such as `machine` (x86_64, aarch64): the locked one; where its index is out of reach or
    has none, this machine's own if it is of the same kind.

    Raises Trouble where neither can be had, and where the index has a file of that name but does not give the locked
    one: what was tampered with must be seen, not stepped around.
    """
    try:
        tool = tool_wheel(lock, "uv", machine)
    except Trouble as trouble:
        return own_uv(machine, "the lock has no uv for this kind of machine", trouble)
    try:
        return Program(unpack_program(fetch_wheels([tool], mirrors, cache_dir(), on_line)[tool.name], "uv"))
    except Trouble as trouble:
        if is_offered(tool, mirrors):
            raise
        return own_uv(machine, f"the locked uv {tool.version} cannot be fetched", trouble)


def own_uv(machine: str, why: str, trouble: Trouble) -> Program:
    """Return this machine's own uv with a remark that begins with `why`; raise `trouble` where it has none for
    `machine`."""
    own = shutil.which("uv", path=os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", ""))))
    if own is None or (platform.system(), platform.machine()) != ("Linux", machine):
        raise trouble
    version = process.run_program((own, "--version")).out.strip() or "of unknown version"
    return Program(
        Path(own),
        f"{why}: {own} ({version}) works in its place, which no hash of the lock covers; wheels' hashes still count",
    )


def tool_wheel(lock: Lock, name: str, machine: str) -> Wheel:
    """Return the locked wheel of a program for hosts of `machine` (x86_64, aarch64)."""
    for wheel in lock.tools.get(name, ()):
        if wheel.file.removesuffix(".whl").endswith(machine):
            return wheel
    raise Trouble(
        Problem(f"{lock.path}: tool.{name}", "no wheel of this program for the hosts", wanted=f"one for {machine}")
    )


def unpack_program(wheel: Path, name: str) -> Path:
    """Return the executable `name` out of a wheel, unpacked beside it; the wheel was verified, its copy is made anew
    each time."""
    target = wheel.with_name(name)
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if member.endswith(f".data/scripts/{name}")]
        if len(members) != 1:
            raise Trouble(Problem(str(wheel), f"this wheel holds no program {name}"))
        with whole_file(target, mode=0o755) as program:
            program.write(archive.read(members[0]))
            os.fchmod(program.fileno(), 0o755)
    return target
