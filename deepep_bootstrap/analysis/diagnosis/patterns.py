"""Regular expressions for long logs: each knows words that its matches contain, so that most of a log is never looked at. Pure.

What cannot be searched in time linear in the length of a log is refused: a repeated group, a reference to a group, nothing to look for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SHORTEST = 3
"""Letters a word must have to be worth looking for."""

WIDE = re.compile(r"(?:\.|\[\^[^\]]*\])(?:[*+]|\{\d*,(?:\d{2,})?\})")
"""Something in a pattern that goes over anything for long: `.*`, `.{0,80}`, `[^)]*`. Such a pattern is not tried over the end of a line."""

REPEATED_GROUP = re.compile(r"(?<!\\)\)(?:[*+]|\{\d+,\})")
REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\\[1-9]")
QUANTIFIER = re.compile(r"[*+?]\??|\{(\d*),?\d*\}\??")
OPTIONS = re.compile(r"\((?:\?(?:<?[=!]|:|P<\w+>|[aiLmsux-]+:))?")


@dataclass(frozen=True)
class Pattern:
    """A compiled pattern, without regard to case unless it begins with `(?-i:`; every match contains one of `words` (small letters).
    `tight`: it may be tried over the end of a line, where a message was wrapped or cut."""

    regex: re.Pattern[str]
    words: tuple[str, ...]
    tight: bool


def make(source: str, *, everywhere: bool = True) -> Pattern:
    """Return the pattern; ValueError saying what is wrong with it. One that is not looked for `everywhere` needs no word."""
    if REPEATED_GROUP.search(source):
        raise ValueError("a repeated group can take for ever on a long line")
    if REFERENCE.search(source):
        raise ValueError("a reference to a group can take for ever on a long line")
    try:
        regex = re.compile(source, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from None
    if regex.search("") is not None:
        raise ValueError("it matches nothing at all, and so every line")
    words, _ = _Scanner(source).alternatives(0)
    if everywhere and min(map(len, words), default=0) < SHORTEST:
        raise ValueError(f"no word of {SHORTEST} letters that every match contains, by which it could be found quickly")
    return Pattern(regex, tuple(dict.fromkeys(words)), WIDE.search(source) is None)


class _Scanner:
    """Finds in the text of a regular expression what every match must contain. Knows as much of the syntax as the rules use."""

    def __init__(self, source: str) -> None:
        self.source = source

    def alternatives(self, at: int) -> tuple[list[str], int]:
        """Return for each alternative from `at` on the words of which one must occur, all in one list, and where the group ends.
        An alternative without a word gives ""."""
        found: list[str] = []
        while True:
            words, at = self.sequence(at)
            found.extend(words)
            if at >= len(self.source) or self.source[at] == ")":
                return found, at
            at += 1

    def sequence(self, at: int) -> tuple[list[str], int]:
        """Return the best words of one alternative and where it ends."""
        best: list[str] = [""]
        run = ""
        while at < len(self.source) and self.source[at] not in "|)":
            literal, words, at = self.item(at)
            quantifier = QUANTIFIER.match(self.source, at)
            optional = quantifier is not None and (quantifier[0][0] in "*?" or quantifier[1] in {"", "0"})
            at = quantifier.end() if quantifier else at
            if literal and not quantifier:
                run += literal
            else:
                best, run = _better(best, [run + literal if literal and not optional else run]), ""
            if words and not optional:
                best = _better(best, words)
        return _better(best, [run]), at

    def item(self, at: int) -> tuple[str, list[str], int]:
        """Return one item: its text where it stands for itself, the words of a group, and where the next item begins."""
        letter = self.source[at]
        if letter == "\\":
            escaped = self.source[at + 1 : at + 2]
            return ("" if escaped.isalnum() else escaped.lower()), [], at + 2
        if letter == "[":
            end = self.source.index("]", at + (3 if self.source.startswith("[^", at) else 2))
            while self.source[end - 1] == "\\":
                end = self.source.index("]", end + 1)
            return "", [], end + 1
        if letter == "(":
            opening = OPTIONS.match(self.source, at)
            start = opening.end() if opening else at + 1
            words, end = self.alternatives(start)
            looks = opening is not None and re.match(r"\(\?<?[=!]", opening[0]) is not None
            return "", [] if looks else words, end + 1
        return ("" if letter in ".^$" else letter.lower()), [], at + 1


def _better(one: list[str], other: list[str]) -> list[str]:
    """Return the list whose shortest word is longer: it is found less often by chance."""
    return other if min(map(len, other)) > min(map(len, one)) else one
