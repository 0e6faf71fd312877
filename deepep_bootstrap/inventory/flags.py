"""The common flags of all verbs, read and checked, and the consent they or a person give. Verbs that ask no host import
this and nothing of SSH.

Consent is the one rule by which every verb asks before it changes what others use. A question is due where packages,
the module hook, reboots, deletion or what users load is concerned. It is asked on a terminal, on stderr so that `| tee`
shows it, and anything but yes is No. Where nobody can be asked (no terminal, or --json, whose output is one document)
the flag that says yes must be given; without it nothing is changed and the verb exits 1 with its plan shown.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.inventory import hostsfile

OWN_NCCL = "own"
"""What --nccl calls the lock's NCCL, in place of the one that the torch of --python brings."""


class Flags(Struct, frozen=True):
    """The common flags of a verb, as given. `root` is the folder of tasks.py with recipes/, env/ and the lock."""

    root: Path
    hosts: str = ""
    limit: str = ""
    lock: str = ""
    stack: str = ""
    prefix: str = ""
    mirror: tuple[str, ...] = ()
    python: str = ""
    nccl: str = ""
    dry_run: bool = False
    yes: bool = False
    json: bool = False
    accept_new_host_keys: bool = False
    sudo_password_prompt: bool = False
    on_busy_host: str = "leave"
    forks: int = 64
    via: str = "auto"
    ssh_limit: int = 512
    tree: str = ""

    @classmethod
    def of(cls, root: Path, given: Mapping[str, Any]) -> Flags:
        """Return the common flags among all that a verb was given; Trouble with every one that has a bad value.

        Of flags that a verb has no use for, only those are checked that need no file: `--lock` on `status` is accepted
        and not read.
        """
        known = {name: value for name, value in given.items() if name in cls.__struct_fields__}
        known["mirror"] = tuple(known.get("mirror") or ())
        known["lock"] = os.path.expanduser(known.get("lock", ""))
        known["forks"] = number("--forks", known.get("forks", 64))
        known["ssh_limit"] = number("--ssh-limit", known.get("ssh_limit", 512))
        flags = cls(root=root, **known)
        if flags.on_busy_host not in {"leave", "use"}:
            raise Trouble(
                Problem("--on-busy-host", "unknown value", found=flags.on_busy_host or "nothing", wanted="leave or use")
            )
        if flags.nccl not in {"", OWN_NCCL}:
            raise Trouble(Problem("--nccl", "unknown value", flags.nccl, f"{OWN_NCCL}, or no --nccl: that of torch"))
        if flags.tree and flags.via not in {"", "auto", "ssh"}:
            what = "hosts are asked either through gateways or in another way"
            raise Trouble(Problem("--tree", what, f"--via={flags.via}", try_="one of the two flags"))
        if flags.prefix:
            hostsfile.check_prefix(flags.prefix, "--prefix")
            flags = replace(flags, prefix=hostsfile.normal_prefix(flags.prefix))
        return flags


def number(flag: str, value: str | int) -> int:
    """Return the whole number above 0 that a flag was given."""
    text = str(value)
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text) > 0):
        raise Trouble(Problem(flag, "not a number it can be", found=text or "nothing", wanted="a whole number from 1"))
    return int(text)


YES = frozenset(("y", "yes"))
UNCHANGED = "not confirmed, nothing was changed"


def consent(flags: Flags, verb: str, question: str) -> Problem | None:
    """Return None where --yes says so or a person does; else why `verb` changes nothing."""
    if flags.yes:
        return None
    if not can_ask(flags):
        return Problem(verb, UNCHANGED, why_not_asked(flags), "--yes", "the same command with --yes")
    return None if said_yes(question) else Problem(verb, UNCHANGED)


def can_ask(flags: Flags) -> bool:
    """Whether there is a person to ask."""
    return not flags.json and sys.stdin.isatty() and sys.stderr.isatty()


def why_not_asked(flags: Flags) -> str:
    """Return why nobody can be asked, for a message."""
    return "--json, which asks nothing" if flags.json else "no terminal to ask on"


def said_yes(question: str) -> bool:
    """Ask on the terminal and return whether the answer is yes; the end of the input is none."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in YES
