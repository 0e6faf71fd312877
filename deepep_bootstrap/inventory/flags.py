"""The common flags of all verbs, read and checked. Verbs that ask no host import this and nothing of SSH."""

from __future__ import annotations

import os
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
