"""The prefix as one host sees it: values and the parser of recipes/facts.sh's lines about it. Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass

from deepep_bootstrap.core.records import Records, number


@dataclass(frozen=True)
class Prefix:
    """The prefix as this host sees it: `fs` its filesystem type, `free_mib` free space (of the nearest existing parent), `id` the
    content of PREFIX/.id, `entries` the names in PREFIX/store, `generation` the number `current` points at (0: none), `manifest`
    the JSON text of that generation's manifest, `source` what is mounted there, `problem` why nothing more is known, `unproved` the
    stacks that were not seen to work since they were last built or offered."""

    path: str = ""
    exists: bool = False
    writable: bool = False
    fs: str = ""
    free_mib: int = 0
    id: str = ""
    entries: tuple[str, ...] = ()
    generation: int = 0
    manifest: str = ""
    source: str = ""
    problem: str = ""
    unproved: tuple[str, ...] = ()


PREFIX_SINGLE: Mapping[str, int] = {
    "prefix_path": 1, "prefix_problem": 1, "prefix_exists": 1, "prefix_writable": 1, "prefix_fs": 3, "prefix_id": 1,
    "prefix_generation": 1, "prefix_manifest": 1,
}  # fmt: skip
PREFIX_MANY: Mapping[str, int] = {"prefix_entry": 1, "prefix_unproved": 1}
"""Lines of recipes/facts.sh about the prefix with the number of their fields."""


def parse(records: Records) -> Prefix:
    """Return what the fact script says of the prefix."""
    fs, free, source = next(iter(records.rows("prefix_fs")), ("", "", ""))
    return Prefix(
        path=records.text("prefix_path"),
        exists=records.truth("prefix_exists"),
        writable=records.truth("prefix_writable"),
        fs=fs,
        free_mib=number(free),
        id=records.text("prefix_id"),
        entries=tuple(sorted(records.words("prefix_entry"))),
        generation=records.number("prefix_generation"),
        manifest=base64.b64decode(records.text("prefix_manifest"), validate=True).decode(),
        source=source,
        problem=records.text("prefix_problem"),
        unproved=tuple(sorted(records.words("prefix_unproved"))),
    )
