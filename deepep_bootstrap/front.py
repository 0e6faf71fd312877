"""The front door: the one decorator that turns a function into an Invoke task of ours."""

from __future__ import annotations

import functools
import inspect
import signal
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from types import FrameType
from typing import Any

from invoke.exceptions import Exit
from invoke.tasks import task

from deepep_bootstrap.errors import Problem, Trouble, guarded

# Flags that mean the same in every verb; a task that takes one of these parameters gets this help text.
HELP = {
    "hosts": "a hosts file (hosts/b200.txt) or a node set (b200-[001-016])",
    "limit": "only these hosts of it, as a node set",
    "lock": "the lock file",
    "stack": "the stack of the lock to offer (default: the lock's default_stack)",
    "prefix": "the shared directory everything is installed under (default: the hosts file's)",
    "mirror": "PREFIX=REPLACEMENT, index:NAME=DIR_OR_URL or DIR; may be given more than once",
    "python": "path of an existing interpreter with torch on the hosts, instead of the locked wheels",
    "dry_run": "print the plan and change nothing",
    "yes": "do not ask before changing something",
    "json": "one JSON document on stdout and nothing else",
    "check": "exit 2 when anything is to be done",
    "accept_new_host_keys": "trust hosts seen for the first time: print their key's fingerprint and record it",
    "sudo_password_prompt": "ask once for the password of sudo",
    "on_busy_host": "leave (default) or use a host whose GPUs are in use",
    "forks": "how many hosts to talk to at the same time",
}

# Invoke's own flags are also accepted behind a task's name, where `--dry` would look like --dry-run and bootstrap all the same.
CORE_FLAGS = frozenset(
    (
        *("--command-timeout", "--complete", "--config", "--debug", "--dry", "--echo", "--hide", "--list", "--list-depth", "--list-format"),
        *("--pty", "--print-completion-script", "--prompt-for-sudo-password", "--write-pyc", "--warn-only", "--collection", "--no-dedupe"),
        *("--search-root", "-T", "-f", "-d", "-R", "-e", "-l", "-D", "-F", "-p", "-w", "-c", "-r"),
    )
)


def verb(function: Callable[..., int]) -> Any:
    """Make `function(c, …flags) -> exit code` an Invoke task with our guard, our help texts and no short flags."""
    parameters = list(inspect.signature(function).parameters)[1:]
    name = function.__name__.strip("_").replace("_", "-")

    @functools.wraps(function)
    def guarded_body(c: Any, *args: Any, **flags: Any) -> None:
        def body() -> int:
            refuse_core_flags(name, parameters, sys.argv[1:])
            return function(c, *args, **flags)

        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, _interrupt)
        code = guarded(name, body, as_json=bool(flags.get("json", False)))
        if code:
            raise Exit(code=code)

    return task(
        guarded_body,
        name=name,
        auto_shortflags=False,
        iterable=[parameter for parameter in parameters if parameter in {"mirror", "log"}],
        help={parameter: HELP[parameter] for parameter in parameters if parameter in HELP},
    )


def refuse_core_flags(name: str, parameters: Sequence[str], argv: Sequence[str]) -> None:
    """Raise Trouble when one of Invoke's own flags stands behind the verb in `argv`."""
    behind = argv[argv.index(name) + 1 :] if name in argv else []
    ours = [f"--{parameter.replace('_', '-')}" for parameter in parameters]
    problems = []
    for word in behind:
        flag = word.split("=", 1)[0]
        if flag in CORE_FLAGS and flag not in ours:
            guess = get_close_matches(flag, ours, n=1, cutoff=0.5)
            remedy = f"did you mean {guess[0]}?" if guess else f"invoke {name} --help"
            problems.append(Problem(f"invoke {name}", f"{flag} is a flag of Invoke itself, not of this verb", try_=remedy))
    if problems:
        raise Trouble(*problems)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """End like ^C, so that a lost terminal or a `kill` cleans up as well."""
    raise KeyboardInterrupt
