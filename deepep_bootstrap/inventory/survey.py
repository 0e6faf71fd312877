"""The common beginning of all commands: flags and files read, connections opened, facts gathered from all
hosts at the same time.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from deepep_bootstrap.core import nodeset
from deepep_bootstrap.core.console import asking
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.inventory import hostsfile
from deepep_bootstrap.inventory.facts import Facts, facts_script, parse_facts
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.flags import number as number
from deepep_bootstrap.inventory.hostsfile import Inventory
from deepep_bootstrap.remote.channel import Secret
from deepep_bootstrap.remote.host import THIS_MACHINE, Host
from deepep_bootstrap.remote.jobs import Job, Reply, Transport

if TYPE_CHECKING:
    from deepep_bootstrap.remote.fleet import ConnectionPool

FACTS_TIMEOUT = 90.0
"""Seconds for the fact script; each slow tool in it has its own, shorter limit."""

OWN_NAME = "\0"
"""Stands for a host's own name while messages of several hosts are compared."""


class Survey(Struct, frozen=True):
    """The hosts of a command and what is known of them. Hosts that could not be asked are in `problems`, not in
    `facts`."""

    inventory: Inventory
    prefix: str
    facts: Mapping[str, Facts]
    problems: tuple[Problem, ...] = field(default=())

    def host(self, name: str) -> Host:
        """Return the host called `name`."""
        return next(host for host in self.inventory.hosts if host.name == name)

    @property
    def reached(self) -> tuple[Host, ...]:
        """The hosts that answered, in the file's order."""
        return tuple(host for host in self.inventory.hosts if host.name in self.facts)

    def without(self, gone: Collection[str], *problems: Problem) -> Survey:
        """Return what is known of the other hosts, where `gone` are of no use although they answered, and `problems`
        say why."""
        facts = {name: facts for name, facts in self.facts.items() if name not in gone}
        return replace(self, facts=facts, problems=(*self.problems, *problems))


def read_tree(folder: Path) -> dict[str, str]:
    """Return the text files below `folder` by their path relative to it: recipes, templates, profiles."""
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def read_inventory(flags: Flags, *, apart: bool = False) -> tuple[Inventory, str]:
    """Return the hosts a command names and the prefix. Trouble for several hosts without one, unless they are looked at
    `apart`."""
    if not flags.hosts:
        raise Trouble(
            Problem("--hosts", "no hosts named", wanted="a hosts file or a node set", try_="--hosts=hosts/local.txt")
        )
    inventory = hostsfile.read_hosts(flags.hosts, flags.limit)
    if apart and not inventory.settings.prefix:
        return inventory, flags.prefix or hostsfile.DEFAULT_PREFIX
    return inventory, flags.prefix or hostsfile.prefix_of(inventory)


@contextmanager
def open_connections(flags: Flags, inventory: Inventory) -> Iterator[ConnectionPool]:
    """Yield the connections to the hosts; every connection is closed on the way out, whatever happened."""
    # Not at the top: the libraries of SSH take a quarter of a second, and verbs that read files need none.
    from deepep_bootstrap.remote.fleet import ConnectionPool, Options, watch_nothing

    password = None
    if flags.sudo_password_prompt:
        if not sys.stdin.isatty():
            raise Trouble(
                Problem(
                    "--sudo-password-prompt", "there is no terminal to ask on", try_="sudo without a password, or root"
                )
            )
        password = Secret(getpass.getpass("sudo password on the hosts: "))
    options = Options(
        forks=flags.forks,
        accept_new_host_keys=flags.accept_new_host_keys,
        sudo_password=password,
        ssh_config=os.environ.get("DEEPEP_SSH_CONFIG"),
        tell=lambda text: print(text, file=sys.stderr),
        watch=watch_nothing if flags.json else asking,
    )
    fleet = ConnectionPool(inventory.hosts, options)
    try:
        yield fleet
    finally:
        fleet.close()


def gather(flags: Flags, transport: ConnectionPool, inventory: Inventory, prefix: str) -> Survey:
    """Ask every host for its facts at the same time; trouble when none of them answers. From then on every script
    finds Slurm's clients where the account's PATH, or that of sudo, lacks them."""
    job = _fact_job(flags, prefix)
    replies = transport.run_all(inventory.hosts, lambda host: job)
    facts: dict[str, Facts] = {}
    problems: list[Problem] = []
    for name, reply in replies.items():
        try:
            facts[name] = _facts_in(reply)
        except Trouble as trouble:
            problems.extend(trouble.problems)
    places = {name: (seen.slurm.path, seen.slurm.conf) for name, seen in facts.items()}
    places[THIS_MACHINE.name] = (os.path.dirname(shutil.which("sinfo") or ""), os.environ.get("SLURM_CONF", ""))
    for name, (folder, conf) in places.items():
        if folder:
            transport.equip(name, folder, {"SLURM_CONF": conf} if conf else {})
    if not facts:
        raise Trouble(*fold_problems(problems, inventory))
    return Survey(inventory, prefix, facts, fold_problems(problems, inventory))


def gather_one(flags: Flags, transport: Transport, host: Host, prefix: str) -> Facts:
    """Return the facts of one host now; Trouble when it does not answer."""
    return _facts_in(transport.run(host, _fact_job(flags, prefix)))


def _fact_job(flags: Flags, prefix: str) -> Job:
    script = facts_script(read_tree(flags.root / "recipes"))
    return Job(script, args=(prefix, flags.python), timeout=FACTS_TIMEOUT, anywhere=True, look=True, interpreter="sh")


def _facts_in(reply: Reply | Trouble) -> Facts:
    if isinstance(reply, Trouble):
        raise reply
    if reply.code:
        raise Trouble(Problem(reply.host, "the fact script failed", found=reply.said[-400:]))
    return parse_facts(reply.out, reply.host)


def fold_problems(problems: Iterable[Problem], inventory: Inventory) -> tuple[Problem, ...]:
    """Say equal problems of several hosts once, with the folded set of hosts as their place; a problem elsewhere
    stands alone. Remedies name a host or its address: that of the first one stands for all."""
    names = {host.name for host in inventory.hosts}
    groups: dict[Problem, list[Problem]] = {}
    for problem in problems:
        same = problem
        if problem.where in names:
            # A message may name its own host once more, such as `the name n003 is not known`.
            what = re.sub(rf"(?<!\S){re.escape(problem.where)}(?!\S)", OWN_NAME, problem.what)
            same = replace(problem, where="", what=what, try_="")
        groups.setdefault(same, []).append(problem)
    return tuple(
        alike[0]
        if len(alike) == 1
        else replace(
            alike[0], where=nodeset.fold(each.where for each in alike), what=same.what.replace(OWN_NAME, "of the host")
        )
        for same, alike in groups.items()
    )
