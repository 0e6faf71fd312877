"""What a build host is sent: sources, wheels and uv, fetched and verified on the control machine, as one tar stream."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepep_bootstrap.errors import Problem, Trouble
from deepep_bootstrap.fetch import fetch_source
from deepep_bootstrap.lock import Lock, Wheel
from deepep_bootstrap.mirrors import Mirrors
from deepep_bootstrap.store import Entry
from deepep_bootstrap.tarstream import tar_tree
from deepep_bootstrap.wheels import fetch_wheels


@dataclass(frozen=True)
class Supply:
    """Files by the name they get below the build host's scratch folder; everything in it was compared with the lock."""

    files: tuple[tuple[str, Path], ...]

    def chunks(self) -> Iterator[bytes]:
        """Yield the tar stream."""
        return tar_tree(self.files)


def cache_dir() -> Path:
    """Return the folder that keeps verified downloads on the control machine (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "deepep-bootstrap"


def fetch_sources(lock: Lock, entries: Iterable[Entry], mirrors: Mirrors, on_line: Callable[[str], None]) -> Supply:
    """Fetch and verify the sources of `entries`; Trouble names every one that is not what the lock says."""
    files: list[tuple[str, Path]] = []
    problems: list[Problem] = []
    for name in dict.fromkeys(entry.source for entry in entries if entry.source):
        try:
            files.append((f"src/{name}", fetch_source(lock.sources[name], mirrors, cache_dir())))
            on_line(f"source {name} {lock.sources[name].rev[:12]}: hash as locked")
        except Trouble as trouble:
            problems.extend(trouble.problems)
    if problems:
        raise Trouble(*problems)
    return Supply(tuple(files))


def fetch_environment(wheels: Sequence[Wheel], tool: Wheel, mirrors: Mirrors, on_line: Callable[[str], None]) -> Supply:
    """Fetch and verify the wheels of a Python environment and uv, which installs them."""
    found = fetch_wheels(wheels, mirrors, cache_dir(), on_line)
    program = fetch_wheels([tool], mirrors, cache_dir(), on_line)[tool.name]
    return Supply((*((f"wheels/{path.name}", path) for path in found.values()), ("bin/uv", unpack_program(program, "uv"))))


def tool_wheel(lock: Lock, name: str, machine: str) -> Wheel:
    """Return the locked wheel of a program for hosts of `machine` (x86_64, aarch64)."""
    for wheel in lock.tools.get(name, ()):
        if wheel.file.removesuffix(".whl").endswith(machine):
            return wheel
    raise Trouble(Problem(f"{lock.path}: tool.{name}", "no wheel of this program for the hosts", wanted=f"one for {machine}"))


def unpack_program(wheel: Path, name: str) -> Path:
    """Return the executable `name` out of a wheel, unpacked beside it; the wheel was verified, its copy is made anew each time."""
    target = wheel.with_name(name)
    aside = wheel.with_name(f".{name}-{os.getpid()}")
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if member.endswith(f".data/scripts/{name}")]
        if len(members) != 1:
            raise Trouble(Problem(str(wheel), f"this wheel holds no program {name}"))
        aside.write_bytes(archive.read(members[0]))
    aside.chmod(stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    aside.replace(target)
    return target


def join(*supplies: Supply) -> Supply:
    """Return one supply with the files of all."""
    return Supply(tuple(file for supply in supplies for file in supply.files))
