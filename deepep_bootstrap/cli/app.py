"""The decorator that makes an Invoke task of a function: guard, help texts, no short flags; and the check of
the words of a command line.
"""

from __future__ import annotations

import inspect
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from inspect import Parameter
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

from invoke.exceptions import Exit
from invoke.tasks import Task, task
from msgspec import Struct
from msgspec.structs import fields, replace

from deepep_bootstrap.cli.verbs import FURTHER, HELP, ITERABLE, MAY_BE_BARE, OPTIONAL
from deepep_bootstrap.core.errors import OK, Problem, Trouble
from deepep_bootstrap.core.guard import READ_ONLY, guarded
from deepep_bootstrap.inventory.survey import Flags

OURS = frozenset(("invoke", "inv"))
"""Names of the program that reads a command line for us; a test runner that imports tasks.py has words of its own."""


def verb(function: Callable[..., int], *, root: Path | None = None) -> Any:
    """Make a function an Invoke task with our guard, our help texts and no short flags.

    `function(flags, …own flags) -> exit code` gets the common flags of `Flags` from the command line; one that does not
    begin with a parameter called `flags` has only its own. `root` is the folder of the repository, that of the
    function's file where it is not said. The first paragraph of the function's docstring is the verb's help.
    """
    declared = Declared.of(function, root or Path(inspect.getfile(function)).resolve().parent)
    parameters = as_written(declared.name, declared.parameters, sys.argv[1:])

    def task_body(c: Any, *args: Any, **given: Any) -> None:
        values = {**dict(zip((each.name for each in parameters), args, strict=False)), **given}
        as_json = bool(values.get("json", False))
        end_cleanly_on_signals(tells_stop=not as_json and declared.name not in READ_ONLY)
        code = guarded(declared.name, lambda: declared.run(values, parameters), as_json=as_json)
        if code:
            raise Exit(code=code)

    # Invoke reads names, defaults and help off the function that it is given.
    context = Parameter("c", Parameter.POSITIONAL_OR_KEYWORD)
    task_body.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
    task_body.__name__, task_body.__doc__ = function.__name__, declared.doc
    names = [parameter.name for parameter in declared.parameters]
    return task(
        task_body,
        name=declared.name,
        auto_shortflags=False,
        iterable=[name for name in names if name in ITERABLE],
        optional=[name for name in names if name in OPTIONAL],
        help={each.name: HELP[each.name if each.name in names else "log"] for each in parameters},
    )


class Declared(Struct, frozen=True):
    """A verb as its function declares it: `parameters` are all its flags, `own` the names of those that are not common
    to all verbs; `flags` says whether it takes the common ones."""

    name: str
    doc: str
    function: Callable[..., int]
    root: Path
    parameters: tuple[Parameter, ...]
    own: tuple[str, ...]
    flags: bool

    @classmethod
    def of(cls, function: Callable[..., int], root: Path) -> Declared:
        """Return the verb that a function declares."""
        own = [
            parameter.replace(kind=Parameter.POSITIONAL_OR_KEYWORD, annotation=Parameter.empty)
            for parameter in inspect.signature(function).parameters.values()
        ]
        flags = bool(own) and own[0].name == "flags"
        if flags:
            own = own[1:]
        return cls(
            name=function.__name__.strip("_").replace("_", "-"),
            doc=inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0],
            function=function,
            root=root,
            parameters=(*own, *(common_parameters() if flags else ())),
            own=tuple(parameter.name for parameter in own),
            flags=flags,
        )

    def run(self, given: Mapping[str, Any], parameters: Sequence[Parameter]) -> int:
        """Run the verb with the values that Invoke found for `parameters`; return its exit code."""
        positional = [parameter.name for parameter in parameters if parameter.default is Parameter.empty]
        if ASKS_FOR_HELP.intersection(str(given[name]) for name in positional):
            # Invoke takes what stands behind a verb for its first argument, whatever it looks like.
            print(usage(self.name, self.doc, parameters))
            return OK
        if not self.flags:
            return self.function(**gathered(given))
        return self.function(Flags.of(self.root, given), **{name: given[name] for name in self.own})


def as_written(name: str, parameters: Sequence[Parameter], argv: Sequence[str]) -> list[Parameter]:
    """Return the parameters of a verb as `argv` needs them: one of MAY_BE_BARE without its default, and so an argument,
    if there is a word for it; behind a first one of FURTHER an argument more for each log that follows, as a shell
    makes of a glob without quotation marks.

    Whatever does not look like a log is left to Invoke: it may be the next verb."""
    found = list(parameters)
    words = bare_words(name, parameters, argv)
    for index, parameter in enumerate(parameters):
        if parameter.name in MAY_BE_BARE and words:
            found[index] = parameter.replace(default=Parameter.empty)
    if parameters and parameters[0].name in FURTHER:
        flag = as_flag(parameters[0].name)
        given_by_flag = any(word.split("=", 1)[0] == flag for word in argv)
        more = takewhile(looks_like_log, words[0 if given_by_flag else 1 :])
        found[1:1] = [parameters[0].replace(name=f"{parameters[0].name}_{number}") for number, _ in enumerate(more, 2)]
    return found


def bare_words(name: str, parameters: Sequence[Parameter], argv: Sequence[str]) -> list[str]:
    """Return the words behind a verb that are neither flags nor values of flags."""
    takes_value = {as_flag(parameter.name) for parameter in parameters if not isinstance(parameter.default, bool)}
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


def common_parameters() -> list[Parameter]:
    """Return the flags of `Flags` as parameters of a task; Invoke makes options of them and takes their kind from the
    default.

    Numbers are strings here: `Flags.of` reads them and says what is wrong with one, where Invoke would end in a
    traceback.
    """
    return [
        Parameter(each.name, Parameter.POSITIONAL_OR_KEYWORD, default=default_of(each.default))
        for each in fields(Flags)
        if each.name != "root"
    ]


def default_of(value: Any) -> Any:
    """Return a flag's default as Invoke wants it: no tuples, no numbers."""
    if isinstance(value, tuple):
        return None
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def usage(name: str, doc: str, parameters: Sequence[Parameter]) -> str:
    """Return the help of a verb with a positional argument, laid out like Invoke's."""
    first = [parameter.name for parameter in parameters if parameter.default is Parameter.empty]
    rows = [
        (parameter.name if parameter.name in first else as_flag(parameter.name), HELP[parameter.name])
        for parameter in parameters
    ]
    width = max(len(left) for left, _ in rows) + 3
    options = "\n".join(f"  {left:<{width}}{text}" for left, text in rows)
    doc = doc.replace("\n", "\n    ")
    return f"Usage: invoke {name} {' '.join(first).upper()} [--options]\n\nDocstring:\n  {doc}\n\nOptions:\n{options}\n"


def as_flag(parameter: str) -> str:
    """Return `--dry-run` for dry_run, and `--as` for as_, which Python keeps for itself without the line."""
    return f"--{parameter.strip('_').replace('_', '-')}"


def refuse_bad_words(module: Mapping[str, Any]) -> None:
    """End the run with our own message, or document, where the words of the command line do not fit the verbs of
    `module`, the names of tasks.py: Invoke would say it in words of its own, and only on stderr. To be called while
    Invoke loads that file."""
    words = sys.argv[1:]
    if OURS.isdisjoint(Path(sys.argv[0]).parts[-2:]):
        return
    # Until a verb runs, Invoke prints help and lists: `invoke plan --help | head` is to end like any other program.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    verbs = {each.name: verb_of(each) for each in module.values() if isinstance(each, Task)}
    if problems := check(words, verbs):
        end_cleanly_on_signals()
        name = next((word for word in words if word in verbs), words[0])
        as_json = any(word.partition("=")[0] == "--json" for word in words)
        raise Exit(code=guarded(ascii(name)[1:-1], lambda: refuse(problems), as_json=as_json))


def refuse(problems: Sequence[Problem]) -> int:
    """Raise Trouble with `problems`."""
    raise Trouble(*problems)


def verb_of(made: Any) -> Verb:
    """Return what may stand behind a verb, from the task that was made of it."""
    parameters = list(inspect.signature(made.body).parameters.values())[1:]
    switches = {each.name for each in parameters if isinstance(each.default, bool)}
    names = {each.name for each in parameters}

    def flags(wanted: Iterable[str]) -> frozenset[str]:
        return frozenset(as_flag(name) for name in wanted)

    arguments = tuple(as_flag(each.name) for each in parameters if each.default is Parameter.empty)
    return Verb(
        made.name, arguments, flags(names - switches), flags(names & ITERABLE), flags(names & OPTIONAL), flags(switches)
    )


def end_cleanly_on_signals(*, tells_stop: bool = False) -> None:
    """Let a lost terminal and `kill` end us like ^C, so that they clean up as well; under nohup a lost terminal stays
    ignored. With `tells_stop` ^C is answered at once, since cleaning up may take a while.

    What the terminal's encoding cannot show is escaped instead of being an error.
    """
    # A connection or a pipe that breaks is an error to report, not our end.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _interrupt)
    if tells_stop and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    if sys.stdout is None:
        # Started with stdout closed (`>&-`).
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - stays open as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _stop(signum: int, frame: FrameType | None) -> None:
    """Say that ^C was heard, once, and interrupt. A thread says it: here the main thread may hold what printing
    needs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_say_stopping, daemon=True).start()
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
    rest = _from_first_verb(words, verbs)
    while rest:
        name = rest.pop(0)
        if name not in verbs:
            near = get_close_matches(name, verbs, n=1)
            remedy = f"invoke {near[0]}" if near else "invoke --list"
            return (Problem("invoke", "no such verb", ascii(name)[1:-1][:80], try_=remedy),)
        read = list(_read(verbs[name], rest, verbs))
        if any(word.asks_for_help for word in read):
            return ()
        if problems := tuple(_problems(verbs[name], read)):
            return problems
    return ()


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
