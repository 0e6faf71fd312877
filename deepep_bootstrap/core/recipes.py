"""Recipe texts put together into one script, and the last lines of what they said. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from deepep_bootstrap.core.errors import Problem, Trouble

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
