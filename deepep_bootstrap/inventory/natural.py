"""The order of names with numbers in them. Python's own library alone: images have a copy of this file."""

from __future__ import annotations

import re
from functools import lru_cache

KEPT = 4096
"""Names whose key is kept: those of devices come again with every host."""


@lru_cache(KEPT)
def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key that sorts mlx5_2 before mlx5_10."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]{1,9})", name))
