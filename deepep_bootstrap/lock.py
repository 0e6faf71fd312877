"""The lock: what is pinned, read from TOML into frozen values; every fault of the file reported at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Substitute:
    """One exact text replacement in a source after its hash was checked; `count` occurrences or it is an error."""

    file: str
    text: str
    replacement: str
    count: int


@dataclass(frozen=True)
class Source:
    """A git tree pinned by full commit `rev` and NAR `hash` (SRI); `ref` is what was asked for.

    `last_modified` is the commit's time (seconds since 1970), `version` the project's own version, `options` build options handed
    to its recipe, `checks` the health checks of the built entry.
    """

    name: str
    url: str
    ref: str
    rev: str
    hash: str
    last_modified: int
    version: str
    submodules: bool = False
    options: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    substitutes: tuple[Substitute, ...] = ()


@dataclass(frozen=True)
class Wheel:
    """One wheel file: distribution name and version, the index's *name*, file name, SRI hash of the file, size in bytes."""

    name: str
    version: str
    index: str
    file: str
    hash: str
    size: int


@dataclass(frozen=True)
class Stack:
    """A validated set. `deepep`, `nvshmem`, `gdrcopy` name sources; `cuda` is the CUDA major; wheels by target (`cp312-x86_64`)."""

    name: str
    deepep: str
    nvshmem: str
    gdrcopy: str
    cuda: str
    wheels: Mapping[str, tuple[Wheel, ...]]


@dataclass(frozen=True)
class System:
    """Distribution packages by purpose for the host recipes of one `[system.<id>]`, e.g. {"build-deps": ("gcc", …)}."""

    id: str
    manager: str
    packages: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Lock:
    """The whole lock file. `tools` are wheels of programs we run on hosts (uv), by name; `indexes` maps index names to addresses."""

    path: str
    version: int
    default_stack: str
    sources: Mapping[str, Source]
    stacks: Mapping[str, Stack]
    systems: Mapping[str, System]
    tools: Mapping[str, tuple[Wheel, ...]]
    indexes: Mapping[str, str]
