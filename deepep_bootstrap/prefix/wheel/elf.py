"""Libraries of store entries as a wheel needs them: what they ask of a system, and their RUNPATH exchanged.

The reading and the change are those of recipes/build/relocate.py, which made the entries relocatable on their host.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.prefix.entries import RELOCATOR

DT_NEEDED, DT_SONAME = 1, 14
VERSION = re.compile(r"(GLIBC|GLIBCXX|CXXABI)_(\d+(?:\.\d+)*)")
"""A symbol version of the system's libraries; symbols themselves have no such names."""

OLDEST = (2, 17)
"""The oldest glibc that a tag names: that of manylinux2014, below which torch has no wheels."""
SINCE = (
    ("GLIBCXX", (3, 4, 19), (2, 17)),
    ("GLIBCXX", (3, 4, 22), (2, 24)),
    ("GLIBCXX", (3, 4, 24), (2, 27)),
    ("GLIBCXX", (3, 4, 28), (2, 31)),
    ("GLIBCXX", (3, 4, 29), (2, 34)),
    ("GLIBCXX", (3, 4, 30), (2, 35)),
    ("GLIBCXX", (3, 4, 33), (2, 39)),
    ("CXXABI", (1, 3, 7), (2, 17)),
    ("CXXABI", (1, 3, 10), (2, 24)),
    ("CXXABI", (1, 3, 11), (2, 27)),
    ("CXXABI", (1, 3, 12), (2, 31)),
    ("CXXABI", (1, 3, 13), (2, 34)),
    ("CXXABI", (1, 3, 15), (2, 39)),
)
"""The newest symbol version of libstdc++ that systems with a glibc have, from the manylinux policies of auditwheel
6.8: compilers newer than these give a wheel without a promise."""


class Relocator:
    """The program that hosts run, as a module of this process. `root` is the folder that holds recipes/."""

    def __init__(self, root: Path) -> None:
        spec = importlib.util.spec_from_file_location("deepep_relocate", root / "recipes" / RELOCATOR)
        if spec is None or spec.loader is None:
            raise Trouble(Problem(f"recipes/{RELOCATOR}", "this recipe is missing", try_="a fresh checkout"))
        self._module: ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._module)

    def soname(self, data: bytes) -> str:
        """Return the name under which a library is known to the loader, "" for none."""
        elf = self._module.Elf(data)
        return next((elf.string(index).decode() for index in elf.values(DT_SONAME)), "")

    def needed(self, data: bytes) -> tuple[str, ...]:
        """Return the names of the libraries that a library is linked with."""
        elf = self._module.Elf(data)
        return tuple(elf.string(index).decode() for index in elf.values(DT_NEEDED))

    def with_run_path(self, data: bytes, path: str, where: str) -> bytes:
        """Return the library with this RUNPATH in place of what it has; Trouble where it does not take it."""
        try:
            changed: bytes = self._module.with_run_path(data, lambda _: path)
            found = set(self._module.run_paths(changed))
        except ValueError as error:
            raise Trouble(Problem(where, "its RUNPATH cannot be changed", str(error), path or "none")) from None
        if found - {path} or (path and not found):
            raise Trouble(
                Problem(where, "it is not linked as our recipes do it", ":".join(found) or "no RUNPATH", path or "none")
            )
        return changed

    def versions(self, data: bytes) -> frozenset[tuple[str, tuple[int, ...]]]:
        """Return the symbol versions of glibc and libstdc++ that a library asks for, such as ("GLIBC", (2, 34))."""
        elf = self._module.Elf(data)
        names = (VERSION.fullmatch(elf.string(index).decode("utf-8", "replace")) for index in elf.names())
        return frozenset((name[1], tuple(map(int, name[2].split(".")))) for name in names if name)


def platform_tag(versions: Iterable[tuple[str, tuple[int, ...]]], machine: str) -> str:
    """Return the platform of libraries that ask for these symbol versions: `manylinux_2_34_x86_64` where every Linux
    with that glibc has them, `linux_x86_64` where that is not known."""
    floor = OLDEST
    for kind, version in versions:
        if kind == "GLIBC":
            floor = max(floor, (version[0], version[1]))
            continue
        since = next((glibc for name, newest, glibc in SINCE if name == kind and version <= newest), None)
        if since is None:
            return f"linux_{machine}"
        floor = max(floor, since)
    return f"manylinux_{floor[0]}_{floor[1]}_{machine}"
