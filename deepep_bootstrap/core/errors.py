"""Expected trouble as values, and exit codes.

A problem has where, what, found and wanted, and what to try; anything else that escapes a command is a
bug. Exit codes and their order of severity are those of the README.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

OK = 0
TROUBLE = 1
CHANGES = 2
BUG = 3
VERDICT = 4
INTERRUPTED = 130
REMEDY = ". Try: "
"""What stands before the remedy in a message."""
WORST_FIRST = (BUG, INTERRUPTED, TROUBLE, VERDICT, CHANGES, OK)


class Problem(Struct, frozen=True):
    """One thing that is wrong, said in the form every message of this program has.

    `where` is a file and key or a folded host set, `what` the fact, `found` and `wanted` the difference, `try_` a
    command or an action that helps. Empty parts are left out of the sentence.
    """

    where: str
    what: str
    found: str = ""
    wanted: str = ""
    try_: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"

    @property
    def message(self) -> str:
        """The message without its place, for a line that names the host itself."""
        parts = [
            part for part in (self.found and f"found {self.found}", self.wanted and f"wanted {self.wanted}") if part
        ]
        difference = f" — {', '.join(parts)}" if parts else ""
        remedy = f"{REMEDY}{self.try_}" if self.try_ else ""
        return f"{self.what}{difference}{remedy}"

    def as_json(self) -> dict[str, str]:
        """Return the five keys of `errors` in every JSON document."""
        return {"where": self.where, "what": self.what, "found": self.found, "wanted": self.wanted, "try": self.try_}


FAULTS_SHOWN = 10
"""Faults of one file that a person sees; a JSON document has all of them."""


class Trouble(Exception):
    """Expected trouble: one or more problems, shown one a line, never as a traceback. `may_pass`: a host or a service
    does not answer now, and may do so again soon, as one that reboots. `file`: all problems are faults of this one;
    `guess` says what it may be instead."""

    def __init__(
        self, *problems: Problem, code: int = TROUBLE, may_pass: bool = False, file: str = "", guess: str = ""
    ) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems
        self.code = code
        self.may_pass = may_pass
        self.file = file
        self.guess = guess

    @property
    def lines(self) -> tuple[str, ...]:
        """Return what a person sees: of a file the first faults, how many more there are, and what it looks like."""
        lines = tuple(map(str, self.problems))
        more = len(lines) - FAULTS_SHOWN
        if not self.file or (more <= 0 and not self.guess):
            return lines
        last = [f"and {more:,} more".replace(",", " ")] if more > 0 else []
        return (*lines[:FAULTS_SHOWN], f"{self.file}: {': '.join([*last, *filter(None, [self.guess])])}")


class LostError(Trouble):
    """The connection to a host went while a script ran there: nobody knows how far it came."""


class ToldInterrupt(KeyboardInterrupt):
    """^C, of which a person was told already how far the run came."""


def worst(codes: Iterable[int]) -> int:
    """Return the most severe of `codes`; 0 when there are none. An unknown code counts as expected trouble."""
    known = [code if code in WORST_FIRST else TROUBLE for code in codes]
    return min(known, key=WORST_FIRST.index, default=OK)
