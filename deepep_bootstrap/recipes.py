"""Recipe texts put together into one script, and the last lines of what they said. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from deepep_bootstrap.errors import Problem, Trouble

SHOWN_LINES = 12


def compose(texts: Mapping[str, str], *names: str) -> str:
    """Return the recipe texts called `names`, put together as one script; Trouble names one that is missing."""
    missing = [name for name in names if name not in texts]
    if missing:
        raise Trouble(*(Problem(f"recipes/{name}", "this recipe is missing", try_="a fresh checkout") for name in missing))
    return "\n".join(texts[name] for name in names)


def last_lines(text: str) -> str:
    """Return the last lines of a program's output, for a message."""
    return "\n".join(text.strip().splitlines()[-SHOWN_LINES:])
