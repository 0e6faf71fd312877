"""Recipe texts: joined to one script, stripped of comments, and their digests, on which the names of store
entries rest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

from deepep_bootstrap.core.errors import Problem, Trouble

SHOWN_LINES = 12


def compose(texts: Mapping[str, str], *names: str) -> str:
    """Return the recipe texts called `names`, put together as one script; Trouble names one that is missing."""
    missing = [name for name in names if name not in texts]
    if missing:
        raise Trouble(
            *(Problem(f"recipes/{name}", "this recipe is missing", try_="a fresh checkout") for name in missing)
        )
    return "\n".join(texts[name] for name in names)


def last_lines(text: str) -> str:
    """Return the last lines of a program's output, for a message."""
    return "\n".join(text.strip().splitlines()[-SHOWN_LINES:])


NIX_BASE32 = "0123456789abcdfghijklmnpqrsvwxyz"
DIGEST_BYTES = 20


def digest(inputs: Mapping[str, object]) -> str:
    """Return the 32 characters (Nix base-32, 160 bits of SHA-256) that stand for `inputs`, independent of key order."""
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    folded = bytearray(DIGEST_BYTES)
    for position, byte in enumerate(hashlib.sha256(text.encode()).digest()):
        folded[position % DIGEST_BYTES] ^= byte
    number = int.from_bytes(folded, "little")
    return "".join(NIX_BASE32[number >> 5 * place & 31] for place in reversed(range(DIGEST_BYTES * 8 // 5)))


def text_digest(text: str) -> str:
    """Return the SHA-256 in hex of a text without comments, by which the inputs of store entries know their recipes."""
    return hashlib.sha256(strip_comments(text).encode()).hexdigest()


TOKEN = re.compile(
    r"""
      (?P<quoted> \'[^\']*(?:\'|\Z) | "(?:\\.|[^"\\])*(?:"|\\?\Z) )
    | (?P<escaped> \\.? )
    | (?P<comment> (?:(?<=\s)|\A) \#(?!!)[^\n]* )
    | (?P<plain> [^'"\\\#]+ | . )
    """,
    re.VERBOSE | re.DOTALL,
)
"""What a bash or Python text is made of, as far as comments go: a quoted text, which may never end, an escaped
character, a comment, other characters up to the next that may begin one of these. In single quotes a backslash is a
character like any other."""


def strip_comments(text: str) -> str:
    """Return a bash or Python text without comments, blank lines and trailing blanks: what its meaning depends on.

    `#!` is kept: it may be the first line of a program that the recipe writes. Names of store entries rest on this
    text: whoever changes what it returns has every user build anew.
    """
    kept = "".join(token.group() for token in TOKEN.finditer(text) if token.lastgroup != "comment")
    lines = (line.rstrip() for line in kept.splitlines())
    return "\n".join(line for line in lines if line)
