"""The words of a command line held against the flags of our verbs, so that what is wrong is said in our own form. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from deepep_bootstrap.core.errors import Problem

# Invoke's own flags are also accepted behind a task's name, where `--dry` would look like --dry-run and bootstrap all the same.
CORE_FLAGS = frozenset(
    (
        *("--command-timeout", "--complete", "--config", "--debug", "--dry", "--echo", "--hide", "--list", "--list-depth", "--list-format"),
        *("--pty", "--print-completion-script", "--prompt-for-sudo-password", "--write-pyc", "--warn-only", "--collection", "--no-dedupe"),
        *("--search-root", "-T", "-f", "-d", "-R", "-e", "-l", "-D", "-F", "-p", "-w", "-c", "-r"),
    )
)
ASKS_FOR_HELP = frozenset(("--help", "-h"))
ASKS_INVOKE = ASKS_FOR_HELP | {"--list", "-l"}
"""Before a verb: what follows is nothing to be done."""

MAY_BE_EMPTY = frozenset(("--args",))
WANTED = {
    "--hosts": "a hosts file or a node set",
    "--limit": "a node set",
    "--lock": "a lock file",
    "--stack": "the name of a stack",
    "--prefix": "an absolute path",
}
NEVER_GUESSED = "--yes"
LIKE_ENOUGH = 0.75
"""How much alike a flag and one of ours have to be for a guess: --hots and --hosts are by 0.92, -e and --yes by 0.33."""


@dataclass(frozen=True)
class Verb:
    """What may stand behind a verb: arguments in their order (as the flags they are too), flags with a value, those of them that may
    come again (`many`) or go without one (`bare`), and flags that take none."""

    name: str
    arguments: tuple[str, ...] = ()
    valued: frozenset[str] = frozenset()
    many: frozenset[str] = frozenset()
    bare: frozenset[str] = frozenset()
    switches: frozenset[str] = frozenset()

    @property
    def flags(self) -> frozenset[str]:
        """All flags it knows."""
        return self.valued | self.switches


@dataclass(frozen=True)
class Word:
    """One word behind a verb: a flag with what stands behind its `=` or after it (None for nothing), or, without a flag, an argument."""

    flag: str
    value: str | None = None


def check(words: Sequence[str], verbs: Mapping[str, Verb]) -> tuple[Problem, ...]:
    """Return what is wrong with the words of a command line, without the program's name: of the first verb with a fault, all of it.

    Nothing is said of words that ask for help, nor of Invoke's own flags before a verb."""
    rest = list(words[: words.index("--")] if "--" in words else words)
    if rest and rest[0].startswith("-"):
        # Invoke's own flags, and their values, are before the first verb.
        first = next((index for index, word in enumerate(rest) if word in verbs), len(rest))
        rest = [] if ASKS_INVOKE.intersection(rest[:first]) else rest[first:]
    while rest:
        name = rest.pop(0)
        if name not in verbs:
            near = get_close_matches(name, verbs, n=1)
            return (Problem("invoke", "no such verb", ascii(name)[1:-1][:80], try_=f"invoke {near[0]}" if near else "invoke --list"),)
        read = list(_read(verbs[name], rest, verbs))
        if any(word.flag in ASKS_FOR_HELP or (not word.flag and word.value in ASKS_FOR_HELP) for word in read):
            return ()
        if problems := tuple(_problems(verbs[name], read)):
            return problems
    return ()


def _read(verb: Verb, rest: list[str], verbs: Mapping[str, Verb]) -> Iterator[Word]:
    """Take the words that belong to a verb from `rest`, as Invoke does: up to a word that is neither a flag, nor the value of one, nor an
    argument of this verb, and is a verb itself."""
    open_ = len(verb.arguments) - len({word.partition("=")[0] for word in rest} & set(verb.arguments))
    while rest:
        if not rest[0].startswith("-") or rest[0] == "-":
            if open_ <= 0 and rest[0] in verbs:
                return
            open_ -= 1
            yield Word("", rest.pop(0))
            continue
        flag, equals, value = rest.pop(0).partition("=")
        follows = bool(rest) and rest[0] not in verb.flags and not (flag in verb.bare and rest[0].startswith("-"))
        if equals:
            yield Word(flag, value)
        else:
            yield Word(flag, rest.pop(0) if flag in verb.valued and follows else None)


def _problems(verb: Verb, read: Sequence[Word]) -> Iterator[Problem]:
    """Yield what is wrong with the words behind a verb. A flag that is not known may have a value that looks like an argument: arguments
    are counted only where all flags are."""
    where, seen = f"invoke {verb.name}", set()
    known = True
    for word in read:
        if any("\ud800" <= letter <= "\udfff" for letter in f"{word.flag}{word.value}"):
            yield Problem(where, "an argument that is not UTF-8", ascii(f"{word.flag} {word.value}".strip())[:80])
        elif word.flag and word.flag not in verb.flags:
            known = False
            yield _unknown(verb, word.flag)
        elif word.flag in seen and word.flag in verb.valued - verb.many:
            yield Problem(word.flag, "is given twice", wanted="one value")
        elif word.flag in verb.switches and word.value is not None:
            yield Problem(word.flag, "takes no value", word.value[:80] or "=", word.flag)
        elif word.flag in verb.valued - verb.bare and word.value is None:
            yield Problem(word.flag, "has no value behind it", wanted=WANTED.get(word.flag, "one"))
        elif word.flag in verb.valued - MAY_BE_EMPTY and word.value == "":
            # Most often an unset variable of a shell, where `everything` would be taken for what was meant.
            yield Problem(word.flag, "is empty", wanted=WANTED.get(word.flag, "a value"))
        seen.add(word.flag)
    if known:
        yield from _miscounted(verb, [word.value or "" for word in read if not word.flag], seen)


def _unknown(verb: Verb, flag: str) -> Problem:
    """Return what to say of a flag that the verb does not know."""
    where = f"invoke {verb.name}"
    ours = sorted(verb.flags - {NEVER_GUESSED})
    longer = [each for each in ours if each.startswith(flag)]
    near = longer if len(longer) == 1 else get_close_matches(flag, ours, n=1, cutoff=LIKE_ENOUGH) if flag.startswith("--") else []
    remedy = f"did you mean {near[0]}?" if near else f"invoke {verb.name} --help"
    if flag in CORE_FLAGS:
        return Problem(where, f"{flag} is a flag of Invoke itself, not of this verb", try_=remedy)
    return Problem(where, "no such flag", ascii(flag)[1:-1][:80], try_=remedy)


def _miscounted(verb: Verb, words: Sequence[str], flags: set[str]) -> Iterator[Problem]:
    """Yield what is wrong with the number of arguments."""
    wanted = [each for each in verb.arguments if each not in flags]
    problem = Problem(f"invoke {verb.name}", "", try_=f"invoke {verb.name} --help")
    if len(words) < len(wanted):
        named = " ".join(each.removeprefix("--").upper().replace("-", "_") for each in wanted)
        yield replace(problem, what="an argument is missing", found=" ".join(words)[:80], wanted=named)
    for word in words[len(wanted) :]:
        yield replace(problem, what="a word that is no flag, no argument and no verb", found=ascii(word)[1:-1][:80])
