"""The front door: an Invoke task made of each verb, with our guard, help and no short flags; and the check of the
words of a command line.

A verb is declared by its function in cli/commands and its row in cli/verbs; its module is imported when it runs.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import io
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

from invoke.collection import Collection as Namespace
from invoke.exceptions import Exit
from invoke.tasks import Task, task
from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.cli import usage
from deepep_bootstrap.cli.verbs import (
    FURTHER,
    HELP,
    ITERABLE,
    OPTIONAL,
    VERBS,
    Declaration,
    Parameter,
    as_flag,
    declared,
    module_of,
)
from deepep_bootstrap.core import program
from deepep_bootstrap.core.errors import OK, Problem, Trouble
from deepep_bootstrap.core.guard import READ_ONLY, guarded

OURS = frozenset(("invoke", "inv"))
"""Names of the program that reads a command line for us; a test runner that imports tasks.py has words of its own."""

LIST = frozenset(("--list", "-l"))
COMPLETES = "--complete"
"""Invoke's own completion: every verb may be meant."""


def namespace() -> Namespace:
    """Return the verbs as a collection of Invoke's tasks, as the words of this command line need them."""
    made = Namespace()
    for name in verbs_of(sys.argv):
        made.add_task(task_of(declared(name), sys.argv[1:]), name=name)
    return made


def verbs_of(argv: Sequence[str]) -> Collection[str]:
    """Return the verbs that a command line can be about: those among its words, all where there is none, and all for
    Invoke's own completion. Reading the file of every verb takes longer than many a verb."""
    named = [name for name in VERBS if name in argv[1:]]
    return VERBS if not named or not argv or not is_ours(argv[0]) or COMPLETES in argv else named


def is_ours(called: str) -> bool:
    """Return whether the words of the command line are for us: the program is our own, or Invoke's."""
    return program.called_as() == program.NAME or not OURS.isdisjoint(Path(called).parts[-2:])


def task_of(verb: Declaration, argv: Sequence[str]) -> Any:
    """Return a verb as an Invoke task with our guard and without short flags; `argv` are the words behind the
    program's name."""
    name = verb.verb.name
    parameters = as_written(verb, argv)

    def task_body(c: Any, *args: Any, **given: Any) -> None:
        values = {**dict(zip((each.name for each in parameters), args, strict=False)), **given}
        as_json = bool(values.get("json", False))
        end_cleanly_on_signals(tells_stop=not as_json and name not in READ_ONLY)
        dry = bool(c and c.config.run.dry)
        body = partial(refuse, [no_dry(verb)]) if dry else partial(run, verb, gathered(values))
        code = guarded(name, body, as_json=as_json)
        if code:
            raise Exit(code=code)

    # Invoke reads names, defaults and help off the function that it is given.
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = [inspect.Parameter("c", kind)]
    for each in parameters:
        default = inspect.Parameter.empty if each.is_argument else each.default
        signature.append(inspect.Parameter(each.name, kind, default=default))
    task_body.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    task_body.__name__, task_body.__doc__ = name, verb.doc
    names = [each.name for each in verb.parameters]
    return task(
        task_body,
        name=name,
        auto_shortflags=False,
        iterable=[each for each in names if each in ITERABLE],
        optional=[each for each in names if each in OPTIONAL],
        help={each.name: HELP[each.name if each.name in names else "log"] for each in parameters},
    )


def no_dry(verb: Declaration) -> Problem:
    """Return that Invoke's own --dry, or what its configuration says of it, is nothing that a verb heeds."""
    own = any(parameter.name == "dry_run" for parameter in verb.parameters)
    remedy = f"invoke {verb.verb.name}{' --dry-run' if own else ' without it'}"
    return Problem("invoke", "--dry is Invoke's own and does nothing here, so nothing was done", try_=remedy)


def run(verb: Declaration, given: Mapping[str, Any]) -> int:
    """Run a verb with the values of its flags, given or set elsewhere; return its exit code."""
    function = load(verb.verb.name)
    collect_less_often()
    if not verb.takes_flags:
        return function(**given)
    # Not at the top: help, lists and what is wrong with the words need no hosts file and no TOML.
    from deepep_bootstrap.cli import settings
    from deepep_bootstrap.inventory.flags import Flags

    root = program.data_root()
    settled = settings.settle(given, root, os.environ)
    if not given.get("json"):
        for note in settled.notes:
            print(note, file=sys.stderr)
    own = {each.name: given[each.name] for each in verb.own}
    return function(Flags.of(root, settled.values), **own)


COLLECTIONS = (20_000, 20, 50)
"""Thresholds of Python's collector of cycles. With its own (700, 10, 10) it walks through the records of a thousand
hosts again and again, a tenth of the CPU of `plan`, and finds nothing there; with these they take a tenth more
memory."""


def collect_less_often() -> None:
    """Let Python's collector run seldom, and not look at what was imported at all."""
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)


def load(name: str) -> Callable[..., int]:
    """Return the function of a verb. Trouble for the lab outside the source tree."""
    if name == "lab" and importlib.util.find_spec("deepep_bootstrap.lab") is None:
        found, wanted = "an installed program", "a clone of the source tree"
        raise Trouble(
            Problem("lab", "the embedded cluster comes with the source tree", found, wanted, "make demo there")
        )
    module = module_of(name)
    function: Callable[..., int] = getattr(importlib.import_module(f"deepep_bootstrap.cli.commands.{module}"), module)
    return function


def as_written(verb: Declaration, argv: Sequence[str]) -> list[Parameter]:
    """Return the parameters of a verb as `argv` needs them: the one that may stand without its flag as an argument, if
    there is a word for it; behind a first one of FURTHER an argument more for each log that follows, as a shell
    makes of a glob without quotation marks.

    Whatever does not look like a log is left to Invoke: it may be the next verb."""
    found = list(verb.parameters)
    words = bare_words(verb, argv)
    for index, parameter in enumerate(found):
        if parameter.name == verb.verb.natural and words and words[0] not in VERBS:
            found.insert(0, replace(found.pop(index), is_argument=True))
    if found and found[0].name in FURTHER:
        given_by_flag = any(word.split("=", 1)[0] == found[0].flag for word in argv)
        more = takewhile(looks_like_log, words[0 if given_by_flag else 1 :])
        found[1:1] = [replace(found[0], name=f"{found[0].name}_{number}") for number, _ in enumerate(more, 2)]
    return found


def bare_words(verb: Declaration, argv: Sequence[str]) -> list[str]:
    """Return the words behind a verb that are neither flags nor values of flags."""
    takes_value = {each.flag for each in verb.parameters if not each.is_switch}
    name = verb.verb.name
    behind = list(argv[argv.index(name) + 1 :]) if name in argv else []
    is_value = [False, *(word in takes_value for word in behind)]
    return [word for word, value in zip(behind, is_value, strict=False) if not word.startswith("-") and not value]


def looks_like_log(word: str) -> bool:
    """Return whether a word is a file or a folder, or can be no verb."""
    return os.path.exists(word) or not set("./*?[").isdisjoint(word)


def gathered(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a verb with those of further arguments in the parameter that FURTHER says."""
    values = dict(given)
    for first, flag in FURTHER.items():
        if more := [values.pop(key) for key in given if key.startswith(f"{first}_")]:
            values[flag] = [*more, *(values.get(flag) or ())]
    return values


def look_at_words(tasks: Namespace) -> None:
    """Answer what needs no verb to run (help, the list, the version), and end the run with our own message, or
    document, where the words of the command line do not fit the verbs: Invoke would say it in words of its own, and
    only on stderr. To be called before Invoke reads them."""
    words = sys.argv[1:]
    own = program.called_as() == program.NAME
    if not is_ours(sys.argv[0]):
        return
    # Until a verb runs, help and lists are printed: `invoke plan --help | head` is to end like any other program.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    verbs = {name: verb_of(each) for name, each in tasks.tasks.items()}
    escape_what_cannot_be_shown()
    if (answer := answer_to(words, verbs, own=own)) is not None:
        raise Exit(code=guarded("help", lambda: tell(answer)))
    if problems := (*stray_flags(words, own=own), *check(words, verbs)):
        end_cleanly_on_signals()
        name = next((word for word in words if word in verbs), words[0])
        as_json = any(word.partition("=")[0] == "--json" for word in words)
        raise Exit(code=guarded(ascii(name)[1:-1], lambda: refuse(problems), as_json=as_json))


def answer_to(words: Sequence[str], verbs: Mapping[str, Verb], *, own: bool) -> str | None:
    """Return the text that the words ask for: the list of verbs, the help of one, or the version; None where they ask
    for none. `own`: the program is ours, and not Invoke's."""
    if not words or LIST.issuperset(words) or (own and len(words) == 1 and words[0] in ASKS_FOR_HELP):
        return usage.listing(usage.columns())
    if len(words) == 2 and words[0] in ASKS_FOR_HELP and words[1] in verbs:
        return usage.usage(declared(words[1]), usage.columns())
    for name, read in read_words(words, verbs):
        if any(word.asks_for_help for word in read):
            return usage.usage(declared(name), usage.columns())
    return None


def tell(text: str) -> int:
    """Print a text."""
    print(text)
    return OK


def stray_flags(words: Sequence[str], *, own: bool) -> Iterator[Problem]:
    """Yield what is wrong with a flag before the verb: our own program has none there but those that `answer_to`
    knows."""
    if own and words and words[0].startswith("-"):
        wanted = "a verb first, or one of --list, --help, --version"
        yield Problem(program.NAME, "no such flag", ascii(words[0])[1:-1][:80], wanted, f"{program.NAME} --list")


def refuse(problems: Sequence[Problem]) -> int:
    """Raise Trouble with `problems`."""
    raise Trouble(*problems)


def verb_of(made: Task[Any]) -> Verb:
    """Return what may stand behind a verb, from the task that was made of it."""
    parameters = list(inspect.signature(made.body).parameters.values())[1:]
    switches = {each.name for each in parameters if isinstance(each.default, bool)}
    names = {each.name for each in parameters}

    def flags(wanted: Iterable[str]) -> frozenset[str]:
        return frozenset(as_flag(name) for name in wanted)

    arguments = tuple(as_flag(each.name) for each in parameters if each.default is inspect.Parameter.empty)
    return Verb(
        made.name, arguments, flags(names - switches), flags(names & ITERABLE), flags(names & OPTIONAL), flags(switches)
    )


def end_cleanly_on_signals(*, tells_stop: bool = False) -> None:
    """Let a lost terminal and `kill` end us like ^C, so that they clean up as well; under nohup a lost terminal stays
    ignored. With `tells_stop` ^C is answered at once, since cleaning up may take a while."""
    # A connection or a pipe that breaks is an error to report, not our end.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _interrupt)
    if tells_stop and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    escape_what_cannot_be_shown()


def escape_what_cannot_be_shown() -> None:
    """Make characters that the terminal's encoding lacks escapes instead of an error, and a closed stdout a silent
    one."""
    if sys.stdout is None:
        # Started with stdout closed (`>&-`).
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - stays open as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


SAID_WITHIN = 0.5
"""Seconds that ^C waits for the words that answer it."""


def _stop(signum: int, frame: FrameType | None) -> None:
    """Say that ^C was heard, once, and interrupt. A thread says it: here the main thread may hold what printing
    needs, and then it is said a moment later."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    said = threading.Thread(target=_say_stopping, daemon=True)
    said.start()
    said.join(SAID_WITHIN)
    raise KeyboardInterrupt


def _say_stopping() -> None:
    with suppress(OSError, ValueError):  # the terminal is gone
        print("\nstopping …" if sys.stderr.isatty() else "stopping …", file=sys.stderr, flush=True)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# Invoke's own flags are also accepted behind a task's name, where `--dry` would look like --dry-run and bootstrap all
# the same.
CORE_FLAGS = frozenset(
    (
        *(
            "--command-timeout",
            "--complete",
            "--config",
            "--debug",
            "--dry",
            "--echo",
            "--hide",
            "--list",
            "--list-depth",
            "--list-format",
        ),
        *(
            "--pty",
            "--print-completion-script",
            "--prompt-for-sudo-password",
            "--write-pyc",
            "--warn-only",
            "--collection",
            "--no-dedupe",
        ),
        *("--search-root", "-T", "-f", "-d", "-R", "-e", "-l", "-D", "-F", "-p", "-w", "-c", "-r"),
    )
)
KNOWN_FLAGS = frozenset(as_flag(name) for name in HELP)
"""The flags of all verbs."""

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
"""How much alike a flag and one of ours have to be for a guess: --hots and --hosts are by 0.92, -e and --yes by
0.33."""


class Verb(Struct, frozen=True):
    """What may stand behind a verb: arguments in their order (as the flags they are too), flags with a value, those
    of them that may come again (`many`) or go without one (`bare`), and flags that take none."""

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


class Word(Struct, frozen=True):
    """One word behind a verb: a flag with what stands behind its `=` or after it (None for nothing), or, without a
    flag, an argument."""

    flag: str
    value: str | None = None

    @property
    def asks_for_help(self) -> bool:
        """Whether it is a flag of help, also where an argument stands."""
        return (self.flag or self.value) in ASKS_FOR_HELP

    @property
    def is_text(self) -> bool:
        """Whether it is UTF-8: what is not comes as lone surrogates."""
        return not any("\ud800" <= letter <= "\udfff" for letter in f"{self.flag}{self.value}")


def check(words: Sequence[str], verbs: Mapping[str, Verb]) -> tuple[Problem, ...]:
    """Return what is wrong with the words of a command line, without the program's name: of the first verb with a
    fault, all of it.

    Nothing is said of words that ask for help, nor of Invoke's own flags before a verb."""
    for name, read in read_words(words, verbs):
        if name not in verbs:
            near = get_close_matches(name, {**VERBS, **verbs}, n=1)
            remedy = f"invoke {near[0]}" if near else "invoke --list"
            return (Problem("invoke", "no such verb", ascii(name)[1:-1][:80], try_=remedy),)
        if any(word.asks_for_help for word in read):
            return ()
        if problems := tuple(_problems(verbs[name], read)):
            return problems
    return ()


def read_words(words: Sequence[str], verbs: Mapping[str, Verb]) -> Iterator[tuple[str, list[Word]]]:
    """Yield each verb of a command line with the words behind it; a name that is no verb is the last one."""
    rest = _from_first_verb(words, verbs)
    while rest:
        name = rest.pop(0)
        if name not in verbs:
            yield name, []
            return
        yield name, list(_read(verbs[name], rest, verbs))


def _from_first_verb(words: Sequence[str], verbs: Mapping[str, Verb]) -> list[str]:
    """Return the words from the first verb on, none where Invoke is asked to list or to help. Its own flags, and
    their values, are before the first verb."""
    rest = list(words[: words.index("--")] if "--" in words else words)
    if not rest or not rest[0].startswith("-"):
        return rest
    first = next((index for index, word in enumerate(rest) if word in verbs), len(rest))
    return [] if ASKS_INVOKE.intersection(rest[:first]) else rest[first:]


def _read(verb: Verb, rest: list[str], verbs: Mapping[str, Verb]) -> Iterator[Word]:
    """Take the words that belong to a verb from `rest`, as Invoke does: up to a word that is neither a flag, nor the
    value of one, nor an argument of this verb, and is a verb itself."""
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
    """Yield what is wrong with the words behind a verb. A flag that is not known may have a value that looks like an
    argument: arguments are counted only where all flags are."""
    seen: set[str] = set()
    for word in read:
        if problem := _fault(verb, word, seen):
            yield problem
        seen.add(word.flag)
    if all(word.flag in verb.flags or not word.flag or not word.is_text for word in read):
        yield from _miscounted(verb, [word.value or "" for word in read if not word.flag], seen)


def _fault(verb: Verb, word: Word, seen: Collection[str]) -> Problem | None:
    """Return what is wrong with one word, where the flags `seen` stand before it; None for nothing."""
    flag, value = word.flag, word.value
    if not word.is_text:
        found = ascii(f"{flag} {value}".strip())[:80]
        return Problem(f"invoke {verb.name}", "an argument that is not UTF-8", found)
    if flag and flag not in verb.flags:
        return _unknown(verb, flag)
    if flag in seen and flag in verb.valued - verb.many:
        return Problem(flag, "is given twice", wanted="one value")
    if flag in verb.switches and value is not None:
        return Problem(flag, "takes no value", value[:80] or "=", flag)
    if flag in verb.valued - verb.bare and value is None:
        return Problem(flag, "has no value behind it", wanted=WANTED.get(flag, "one"))
    if flag in verb.valued - MAY_BE_EMPTY and value == "":
        # Most often an unset variable of a shell, where `everything` would be taken for what was meant.
        return Problem(flag, "is empty", wanted=WANTED.get(flag, "a value"))
    return None


def _unknown(verb: Verb, flag: str) -> Problem:
    """Return what to say of a flag that the verb does not know."""
    where = f"invoke {verb.name}"
    ours = sorted(verb.flags - {NEVER_GUESSED})
    longer = [each for each in ours if each.startswith(flag)]
    near = (
        longer
        if len(longer) == 1
        else get_close_matches(flag, ours, n=1, cutoff=LIKE_ENOUGH)
        if flag.startswith("--")
        else []
    )
    remedy = f"did you mean {near[0]}?" if near else f"invoke {verb.name} --help"
    if flag in CORE_FLAGS:
        return Problem(where, f"{flag} is a flag of Invoke itself, not of this verb", try_=remedy)
    if flag in KNOWN_FLAGS:
        return Problem(where, f"{flag} means nothing to this verb", try_=remedy)
    return Problem(where, "no such flag", ascii(flag)[1:-1][:80], try_=remedy)


def _miscounted(verb: Verb, words: Sequence[str], flags: set[str]) -> Iterator[Problem]:
    """Yield what is wrong with the number of arguments."""
    wanted = [each for each in verb.arguments if each not in flags]
    problem = Problem(f"invoke {verb.name}", "", try_=f"invoke {verb.name} --help")
    if len(words) < len(wanted):
        named = " ".join(each.removeprefix("--").upper().replace("-", "_") for each in wanted)
        yield replace(problem, what="an argument is missing", found=" ".join(words)[:80], wanted=named)
    for word in words[len(wanted) :]:
        found = ascii(word)[1:-1][:80]
        what, remedy = "a word that is no flag, no argument and no verb", problem.try_
        if verb.name in VERBS and (meant := VERBS[verb.name].meant):
            remedy = shlex.join(["invoke", verb.name, f"{as_flag(meant)}={found}"])
        yield replace(problem, what=what, found=found, try_=remedy)
