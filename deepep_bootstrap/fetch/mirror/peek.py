"""Package repositories of mirrors behind a web server, as the mirrors' indexes list them: hosts are sent
only where something is.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.fetch.files import copy_from
from deepep_bootstrap.fetch.locations import INDEX, PACKAGES, Level, Mirrors, is_address
from deepep_bootstrap.fetch.mirror.index import LONGEST_INDEX, parse_mirror_index


def look_for_packages(mirrors: Mirrors) -> Mirrors:
    """Return the mirrors with what those that `invoke mirror` wrote and a web server serves have of package
    repositories.

    One that does not answer here is believed to have what is looked for: hosts may well reach what this machine does
    not.
    """
    return Mirrors(tuple(_known(level) if is_address(level.written) else level for level in mirrors.levels))


def _known(level: Level) -> Level:
    where = f"mirror {level.written}"
    with tempfile.TemporaryDirectory(prefix="deepep-bootstrap-") as scratch:
        file = Path(scratch, INDEX)
        try:
            copy_from(f"{level.written}/{INDEX}", file, where, LONGEST_INDEX)
            index = parse_mirror_index(file.read_bytes(), where)
        except Trouble:
            return level
    return replace(level, packages=frozenset(path for path in index.files if path.startswith(f"{PACKAGES}/")))
