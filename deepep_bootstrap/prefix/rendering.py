"""Templates and the words of the languages they are in: shell, Lua, Tcl. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

import jinja2


def environment(templates: Mapping[str, str]) -> jinja2.Environment:
    """Return what renders `templates` (texts by name), with a filter for the words of each language: sh, lua, tcl."""
    made = jinja2.Environment(  # noqa: S701 - no HTML here; every value goes through the filter of its language
        loader=jinja2.DictLoader(dict(templates)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{%#",  # bash writes ${#array[@]}
        comment_end_string="#%}",
    )
    made.filters |= {"sh": shell_word, "lua": lua_string, "tcl": tcl_word}
    return made


def shell_word(text: str) -> str:
    """Return `text` as one word of a POSIX shell; a leading `=` is quoted too, for those who read `NAME==value`."""
    quoted = shlex.quote(text)
    return f"'{text}'" if quoted.startswith("=") else quoted


def lua_string(text: str) -> str:
    """Return `text` as a Lua string literal."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def tcl_word(text: str) -> str:
    """Return `text` as one Tcl word in which nothing is substituted."""
    escaped = re.sub(r'([\\"$\[\]{}])', r"\\\1", text).replace("\n", "\\n")
    return f'"{escaped}"'
