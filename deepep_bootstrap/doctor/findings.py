"""Records of the doctor: the case and the host that are looked at, and the finding that comes out."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct, field

from deepep_bootstrap.doctor.user_view import UserView
from deepep_bootstrap.inventory import nics
from deepep_bootstrap.inventory.facts import Facts, Rdma
from deepep_bootstrap.inventory.nics import Nic
from deepep_bootstrap.lock.model import Stack
from deepep_bootstrap.prefix.defects import Defect

BLOCKING, WARNING, NOTE = "blocking", "warning", "note"
SEVERITIES = (BLOCKING, WARNING, NOTE)
"""Blocking: build, `module load` or a test of the profile cannot work. Warning: they work worse or by luck. Note:
good to know."""


class Finding(Struct, frozen=True):
    """One thing that is not as it should be, on the hosts where it is the same. `why` is one sentence, `fix` a
    command or an action, "" where nothing needs to be done, `stacks` are those that it concerns."""

    check: str
    severity: str
    hosts: tuple[str, ...]
    found: str
    wanted: str
    why: str
    fix: str
    stacks: tuple[str, ...] = ()


class Fault(Struct, frozen=True):
    """What one check says of one host."""

    severity: str
    found: str
    wanted: str
    fix: str


TAKES = {"test": ("--hosts=", "--limit=", "--prefix=", "--stack=")}
"""The flags of a verb that does not take all of those that `bootstrap` was given: what is tested has been built."""


class Case(Struct, frozen=True):
    """What the hosts are looked at for. `link` is the link layer of the profile ("" for a single node), `handler`
    who rings the NICs' doorbells, `offered` whether the prefix offers the stack already, `bootstrap` the command
    that prepares these hosts, `need_mib` what the stack still needs on the prefix, `alone` whether it is about one
    GPU host only, `reservation` that of Slurm which jobs name."""

    stack: Stack
    prefix: str
    profile: str = "single-node"
    link: str = ""
    handler: str = ""
    build_host: str = ""
    bootstrap: str = "invoke bootstrap"
    external_python: str = ""
    own_nccl: bool = False
    """Whether the lock's NCCL stands in for that of the external Python's torch (DeepEP V2)."""
    offered: bool = False
    alone: bool = False
    gres: str = "auto"
    reservation: str = ""
    need_mib: int = 0
    as_another: bool = False
    """Whether a view of another user than the connection's own was asked for."""
    other_stacks: Mapping[str, str] = field(default_factory=dict)
    defects: tuple[Defect, ...] = ()
    """Known defects of the stack as the prefix offers it."""

    def command(self, verb: str) -> str:
        """Return the command that calls another verb for the same hosts, with the flags of `bootstrap` that it
        takes."""
        command = self.bootstrap.replace("invoke bootstrap", f"invoke {verb}", 1)
        if verb not in TAKES:
            return command
        words = shlex.split(command)
        return shlex.join(word for word in words if not word.startswith("--") or word.startswith(TAKES[verb]))

    def with_stack(self, stack: str) -> str:
        """Return the command that prepares the same hosts for another stack."""
        words = [word for word in shlex.split(self.bootstrap) if not word.startswith("--stack=")]
        return shlex.join([*words, f"--stack={stack}"])


class HostView(Struct, frozen=True):
    """One host as the checks see it: its facts, what the user of a job finds there (None where nobody could look),
    `for_reboot`: the host recipes whose own check reports already that they wait for a reboot, and `well`: those whose
    own check finds nothing to do."""

    name: str
    role: str
    facts: Facts
    view: UserView | None
    case: Case
    for_reboot: frozenset[str] = frozenset()
    well: frozenset[str] = frozenset()

    @property
    def devices(self) -> tuple[Rdma, ...]:
        """The RDMA devices that IBGDA can drive."""
        return tuple(device for device in self.facts.rdma if device.driver == nics.DRIVER)

    @property
    def networked(self) -> bool:
        """Whether what RDMA needs is to be asked of this host: the profile is for several nodes, and it has such a
        device."""
        return bool(self.case.link and self.devices)

    @property
    def nics(self) -> tuple[Nic, ...]:
        """The active ports that carry the GPUs' traffic."""
        return nics.sort_out(self.facts, self.case.link).used if self.case.link else ()

    @property
    def builds(self) -> bool:
        """Whether this host has something to build."""
        return self.name == self.case.build_host and not self.case.offered


Look = Callable[[HostView], Iterable[Fault]]


class Row(Struct, frozen=True):
    """One check. `recipe` names the host recipe that knows better where its own check was run; with `always` what is
    seen here is reported although the recipe is content. `roles` are the hosts it is for."""

    check: str
    why: str
    look: Look
    recipe: str = ""
    always: bool = False
    roles: tuple[str, ...] = ("gpu",)


EVERYWHERE = ("gpu", "login")


def few(words: Iterable[str], shown: int = 4) -> str:
    """Return some words for a message, the rest as a number."""
    every = list(dict.fromkeys(words))
    return ", ".join(every[:shown]) + (f" and {len(every) - shown} more" if len(every) > shown else "")


GIB_KIB = 1024**2


def memlock_severity(limit: str) -> str:
    """Return how bad a limit in KiB is: below 1 GiB the first buffers of a test do not register."""
    return BLOCKING if limit.isdigit() and int(limit) < GIB_KIB else WARNING
