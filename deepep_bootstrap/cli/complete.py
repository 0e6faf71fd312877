"""What may come next on a command line, for the scripts in completions/: `deepep-bootstrap --complete WORDS…`, the last
word the one that is being typed. Nothing heavy is imported, no host is asked, and nothing is said of a fault.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from deepep_bootstrap.cli.verbs import KINDS, SHELLS, VERBS, Declaration, Parameter, declared, help_text
from deepep_bootstrap.inventory import seen

FIXED: Mapping[str, Sequence[str]] = {
    "kind": KINDS,
    "shell": SHELLS,
    "action": ("up", "down", "status"),
    "layer": ("lmod", "environment-modules"),
    "via": ("auto", "slurm", "ssh"),
    **dict.fromkeys(("facts.via", "doctor.via"), ("auto", "slurm", "ssh", "kubernetes")),
    "test.via": ("slurm", "ssh", "kubernetes"),
    "reboot": ("never", "ask", "rolling", "all"),
    "on_busy_host": ("leave", "use"),
}
BEFORE_A_VERB = {"--list": "the verbs", "--help": "help", "--version": "version, commit and pins"}
DESCRIBED = 70
"""Characters of a help text that stand behind a word."""

MOST_HOSTS = 2000
RANGE = re.compile(r"(.*?)\[([0-9,-]+)\](.*)")
PREFIX = re.compile(r"(?m)^[^#\n]*\bprefix=(\S+)")


def main(words: Sequence[str]) -> None:
    """Print the candidates for the last of `words`, one a line, a tab and a description behind each."""
    # A shell that has gone on typing does not read to the end.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for word, text in candidates(words or ("",)):
        sys.stdout.write(f"{word}\t{text[:DESCRIBED]}\n")


def candidates(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what the last of `words` may become, each with what it means."""
    before, current = words[:-1], words[-1]
    verb = next((word for word in before if not word.startswith("-")), "")
    if not verb:
        found = [(name, row.summary) for name, row in VERBS.items()]
        yield from starting([*found, *(BEFORE_A_VERB.items() if current.startswith("-") else ())], current)
    elif verb in VERBS:
        yield from starting(behind(declared(verb), words), current)


def behind(verb: Declaration, words: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Return what may stand behind a verb in place of the last of `words`: the value of a flag, a flag, or a word
    without one."""
    before, current = words[:-1], words[-1]
    flags = {each.flag: each for each in verb.parameters}
    flag, equals, _ = current.partition("=")
    if equals and flag in flags:
        return with_nothing(f"{flag}={value}" for value in values(flags[flag], words))
    if before[-1] in flags and not flags[before[-1]].is_switch:
        return with_nothing(values(flags[before[-1]], words))
    if current.startswith("-"):
        return flags_left(verb, before)
    natural = natural_of(verb)
    return with_nothing(values(natural, words)) if natural else ()


def with_nothing(found: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield values, of which there is nothing to say."""
    return ((value, "") for value in found)


def flags_left(verb: Declaration, before: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the flags of a verb that were not given yet."""
    given = {word.partition("=")[0] for word in before}
    for each in verb.parameters:
        if each.flag not in given:
            yield named(each), help_text(verb.verb.name, each.name)
    yield "--help", "help"


def starting(found: Iterable[tuple[str, str]], begin: str) -> Iterator[tuple[str, str]]:
    """Yield what begins with what was typed."""
    return (each for each in found if each[0].startswith(begin))


def named(parameter: Parameter) -> str:
    """Return a flag as it is typed: with a `=` where a value follows."""
    return parameter.flag if parameter.is_switch else f"{parameter.flag}="


def natural_of(declaration: Declaration) -> Parameter | None:
    """Return the parameter that a word without a flag is for."""
    wanted = declaration.verb.natural
    return next((each for each in declaration.parameters if each.is_argument or each.name == wanted), None)


def values(parameter: Parameter, words: Sequence[str]) -> Iterable[str]:
    """Return the values that are known of a flag; none where a shell's own files are what is wanted."""
    verb = next((word for word in words if word in VERBS), "")
    if fixed := FIXED.get(f"{verb}.{parameter.name}", FIXED.get(parameter.name, ())):
        return fixed
    known = KNOWN.get(parameter.name)
    return known(words) if known else ()


def given(words: Sequence[str], name: str) -> str:
    """Return the value of a flag in the words, else that of the environment."""
    flag = f"--{name}"
    for index, word in enumerate(words):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
        if word == flag and index + 2 < len(words):
            return words[index + 1]
    return os.environ.get(f"DEEPEP_{name.upper()}", "")


def text_of(path: str) -> str:
    """Return the text of a file, "" where it cannot be read."""
    try:
        return Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def hosts_text(words: Sequence[str]) -> str:
    """Return the text of the hosts file that the words name, with a flag, alone, or in the environment."""
    alone = [word for word in words[1:-1] if word.endswith(".txt") and not word.startswith("-")]
    return text_of(given(words, "hosts") or next(iter(alone), ""))


def host_names(words: Sequence[str]) -> Iterable[str]:
    """Return the names of the hosts of the hosts file."""
    lines = [line.split("#")[0].split() for line in hosts_text(words).splitlines()]
    names = [name for line in lines if line and line[0] != "defaults" for name in expanded(line[0])]
    return names[:MOST_HOSTS]


def expanded(nodes: str) -> Iterator[str]:
    """Yield the names of a node set with one range, such as b200-[001-016,020]; of another one its own text."""
    match = RANGE.fullmatch(nodes)
    if not match or "[" in match[3]:
        yield nodes
        return
    for part in match[2].split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            continue
        for number in range(int(first), min(int(last or first), int(first) + MOST_HOSTS) + 1):
            yield f"{match[1]}{number:0{len(first)}d}{match[3]}"


def prefix_of(words: Sequence[str]) -> str:
    """Return the prefix that the words mean."""
    stated = PREFIX.search(hosts_text(words))
    return given(words, "prefix") or (stated[1] if stated else "/opt/deepep")


def listed(folder: str, kind: str, prefix: str) -> list[str]:
    """Return the names in a folder of the prefix where this machine sees it, else those seen last."""
    try:
        return os.listdir(os.path.join(prefix, folder))
    except OSError:
        return seen.recall(kind, prefix)


def generations(words: Sequence[str]) -> Iterable[str]:
    """Return the generations of the prefix, the newest first."""
    names = listed("generations", seen.GENERATIONS, prefix_of(words))
    return sorted(filter(str.isdigit, names), key=int, reverse=True)


def runs(words: Sequence[str]) -> Iterable[str]:
    """Return the runs of tests that lie in the prefix, the newest first."""
    return sorted(filter(seen.NAME.fullmatch, listed("logs/tests", seen.RUNS, prefix_of(words))), reverse=True)


def lock_names(kind: str) -> Callable[[Sequence[str]], Iterable[str]]:
    """Return what finds the names of one kind of table in the lock."""

    def find(words: Sequence[str]) -> Iterable[str]:
        here = Path(__file__).resolve().parents[2]
        own = (here if (here / "tasks.py").is_file() else here / "deepep_bootstrap" / "data") / "deepep.lock.toml"
        text = text_of(given(words, "lock")) or text_of("deepep.lock.toml") or text_of(str(own))
        return dict.fromkeys(re.findall(rf"(?m)^\[{kind}\.([A-Za-z0-9._-]+)\]", text))

    return find


KNOWN: Mapping[str, Callable[[Sequence[str]], Iterable[str]]] = {
    "limit": host_names,
    "to": generations,
    "generation": generations,
    "old": generations,
    "new": generations,
    "run": runs,
    "stack": lock_names("stack"),
    "nccl": lambda _words: ("own",),
    "update": lambda words: (*lock_names("source")(words), "python", "all"),
}
