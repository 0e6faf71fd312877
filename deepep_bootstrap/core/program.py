"""This program: how it was called, where its data lies, and its version."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.core.process import run_program

NAME = "deepep-bootstrap"
INVOKE = "invoke"
PACKAGE = Path(__file__).resolve().parent.parent
COMMIT = "commit"
"""The file of the wheel's data with the commit that it was built from."""

VERBS = (
    *(
        "plan",
        "doctor",
        "facts",
        "env",
        "status",
        "generations",
        "diff",
        "version",
        "bootstrap",
        "rollback",
        "gc",
        "remove",
        "nodes",
    ),
    *("verify", "test", "report", "results", "diagnose"),
    *("lock", "mirror", "export", "import", "wheel", "image", "manifests", "completion", "lab"),
    "VERB",
)
OUR_COMMAND = re.compile(rf"\b{INVOKE} (?=(?:--list|{'|'.join(VERBS)})\b)")
"""A command of ours as messages have it: as typed in the source tree."""


def called_as() -> str:
    """Return the name under which a person calls this program: `invoke` in the source tree, else its own."""
    return NAME if os.path.basename(sys.argv[0] if sys.argv else "") == NAME else INVOKE


def as_called(text: str) -> str:
    """Return a text with its commands as this person types them."""
    return text if called_as() == INVOKE else OUR_COMMAND.sub(f"{NAME} ", text)


def is_source_tree() -> bool:
    """Return whether this package lies in the source tree, and was not installed from a wheel."""
    return (PACKAGE.parent / "tasks.py").is_file() and (PACKAGE.parent / "recipes").is_dir()


def data_root() -> Path:
    """Return the folder with recipes/, env/, hosts/ and the lock: the source tree that this package lies in, else
    what the wheel brought along."""
    return PACKAGE.parent if is_source_tree() else PACKAGE / "data"


def version() -> str:
    """Return the version of this program."""
    if is_source_tree():
        found = re.search(r'(?m)^version = "([^"]+)"', (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))
        return found[1] if found else "unknown"
    from importlib import metadata  # slow to import, and not for the source tree

    return metadata.version(NAME)


def commit() -> str:
    """Return the commit of the source tree, with -dirty where files differ from it, or that the wheel was built from;
    "" where nobody knows."""
    if not is_source_tree():
        file = PACKAGE / "data" / COMMIT
        return file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    try:
        done = run_program(
            ("git", "-C", PACKAGE.parent, "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"), timeout=20
        )
    except Trouble:
        return ""
    return done.out.strip() if done.code == 0 else ""
