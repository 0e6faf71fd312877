"""Texts of programs without what is only for people. Pure."""

from __future__ import annotations

import hashlib


def text_digest(text: str) -> str:
    """Return the SHA-256 in hex of a text without comments, by which the inputs of store entries know their recipes."""
    return hashlib.sha256(strip_comments(text).encode()).hexdigest()


def strip_comments(text: str) -> str:
    """Return a bash or Python text without comments, blank lines and trailing blanks: what its meaning depends on.

    `#!` is kept: it may be the first line of a program that the recipe writes.
    """
    kept: list[str] = []
    quote = ""
    skip_to = -1
    for position, char in enumerate(text):
        if position < skip_to:
            continue
        before = text[position - 1] if position else "\n"
        if char == "#" and not quote and before.isspace() and text[position + 1 : position + 2] != "!":
            end = text.find("\n", position)
            skip_to = end if end >= 0 else len(text)
            continue
        if char == "\\" and quote != "'":
            kept.append(text[position : position + 2])
            skip_to = position + 2
            continue
        if char in "'\"" and quote in {"", char}:
            quote = "" if quote else char
        kept.append(char)
    lines = (line.rstrip() for line in "".join(kept).splitlines())
    return "\n".join(line for line in lines if line)
