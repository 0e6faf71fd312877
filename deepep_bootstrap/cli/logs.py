"""The logs that words of a command line mean: files, folders, globs in quotation marks, and standard input."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from deepep_bootstrap.core.errors import Problem, Trouble

STDIN = "-"


class Sought(Struct, frozen=True):
    """Which files of a folder are logs, as patterns below it, first ones first; what they are called and what to try
    in messages."""

    patterns: tuple[str, ...]
    called: str
    remedy: str


def names(words: Sequence[str], sought: Sought) -> Iterator[tuple[str, str]]:
    """Yield the file itself (links followed) and the name of every log that `words` mean, one file under each of its
    names.

    Trouble for a word that means none.
    """
    for word in words:
        found = list(_names_of(word, sought.patterns))
        if not found:
            raise Trouble(
                Problem(
                    word or "LOG",
                    "no log there",
                    f"neither a file nor a folder with {sought.called}",
                    try_=sought.remedy,
                )
            )
        yield from ((os.path.realpath(name), name) for name in found)


def _names_of(word: str, patterns: Sequence[str]) -> Iterator[str]:
    # os.path has an answer for names that are too long and for users that are not there, where pathlib has an error.
    path = Path(os.path.expanduser(word))
    if word == STDIN:
        yield word
    elif os.path.isdir(path):
        yield from (str(each) for pattern in patterns for each in sorted(path.glob(pattern)) if each.is_file())
    elif os.path.exists(path):
        yield str(path)
    else:
        yield from (name for name in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(name))


def read_log(name: str, remedy: str) -> str:
    """Return the text of a log, whatever bytes are in it. Trouble for one that cannot be read."""
    try:
        data = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except OSError as error:
        raise Trouble(Problem(name, f"cannot be read: {error.strerror}", try_=remedy)) from None
    return data.decode("utf-8", "replace")
