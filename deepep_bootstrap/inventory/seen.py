"""Names that a prefix was seen to hold, generations and runs of tests, kept on this machine for completion alone: a
shell cannot wait for a host at every press of a key.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from deepep_bootstrap.core.filetree import whole_file

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
MOST = 200
"""Names that are kept of one kind."""

GENERATIONS, RUNS = "generations", "runs"


def place(kind: str, prefix: str) -> Path:
    """Return the file with the names of one kind in a prefix (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "deepep-bootstrap", "seen", kind, quote(os.path.normpath(prefix), safe=""))


def keep(kind: str, prefix: str, names: Iterable[str], *, add: bool = False) -> None:
    """Keep the names that a prefix holds now, or with `add` some of them beside those of before; that they cannot be
    kept is nobody's trouble."""
    file = place(kind, prefix)
    known = dict.fromkeys([*filter(NAME.fullmatch, names), *(recall(kind, prefix) if add else ())])
    text = "".join(f"{name}\n" for name in [*known][:MOST])
    with contextlib.suppress(OSError):
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(file) as stream:
                stream.write(text.encode())


def recall(kind: str, prefix: str) -> list[str]:
    """Return the names of one kind that a prefix was last seen to hold."""
    try:
        text = place(kind, prefix).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    return [name for name in text.split() if NAME.fullmatch(name)]
