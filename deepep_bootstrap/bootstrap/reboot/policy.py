"""The request for a rolling reboot: hosts, policy, time window, and the actions that the caller provides on
a host.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import time
from typing import Protocol

from msgspec import Struct

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.core.text import parse_time
from deepep_bootstrap.plan.steps import Step
from deepep_bootstrap.remote.host import Host

Tell = Callable[[str, str, str], None]
"""Where a wave tells what it does: host, title, line. Called by one thread at a time."""


class HostReboot(Struct, frozen=True):
    """One host to be changed and rebooted: `node` is its name in Slurm ("" without), `out_of_use` the reason for which
    that node was drained or down when the plan was made ("": it was in use), `why` what the reboot is for, `boot_id`
    that of the facts, `steps` the host recipes to apply before; with `reload` the driver is loaded anew, and the
    reboot saved where that is enough; `refused` says why it must be left alone whatever it needs, "" where it need
    not; `kube_node` is its name in Kubernetes ("" without)."""

    host: Host
    node: str
    why: str
    boot_id: str
    steps: tuple[Step, ...] = ()
    reload: bool = False
    refused: str = ""
    out_of_use: str = ""
    kube_node: str = ""


ACTIVE_LATER = "active after a reboot"
"""What is said of a change that a host needs a reboot for, until it had one."""

NEVER, ASK, ROLLING, ALL = "never", "ask", "rolling", "all"
SETTLE = 120.0
"""Seconds after a boot in which what recipes wrote must show; at most the time that a boot may take."""


class Policy(Struct, frozen=True):
    """What reboots are allowed, and how waves roll. `mode` is "never" (hosts are changed and reloaded only), "ask",
    "rolling" or "all"; `at_once` hosts are out of use at a time (0: all); times in seconds; `run` names the run in
    drain reasons.

    `boot_timeout` is for a host to be back, and then once more for what it had before to be there again, as an NVSwitch
    fabric that trains for minutes; `settle` for what recipes wrote to show after that, and for a host that does not
    answer to do so again. `pause` lies between two looks. `reservation` names the one of Slurm whose nodes are ours.
    With `reload` the driver is loaded anew where that saves the reboot.
    """

    mode: str = ROLLING
    at_once: int = 1
    drain_timeout: float = 4 * 3600.0
    boot_timeout: float = 1800.0
    run: str = ""
    window: Window | None = None
    reload: bool = False
    reservation: str = ""
    settle: float = SETTLE
    pause: float = 3.0

    @property
    def reboot(self) -> bool:
        """Whether hosts may be rebooted."""
        return self.mode != NEVER

    @property
    def plainly(self) -> str:
        """How hosts are rebooted, for the plan."""
        if self.mode == NEVER:
            return "not in this run: --reboot=never"
        many = {0: "all at the same time", 1: "one at a time"}.get(self.at_once, f"{self.at_once} at a time")
        return f"{many}, asked apart" if self.mode == ASK else many


class HostState(Struct, frozen=True):
    """A look at a host: its boot id, what is still not as wanted (a reason each), who uses its GPUs ("" for nobody),
    and which of `unmet` it had before and has `lost`."""

    boot_id: str
    unmet: tuple[str, ...] = ()
    busy: str = ""
    lost: tuple[str, ...] = ()


class RebootActions(Protocol):
    """What a wave needs done on a host; it knows nothing of recipes and facts itself."""

    def apply(self, host: Host, step: Step) -> Outcome:
        """Run a host recipe."""

    def reload(self, host: Host) -> Outcome:
        """Load the GPU driver anew, with the options that are written now."""

    def look(self, host: Host) -> HostState:
        """Look at a host with fresh facts. Raises Trouble when it does not answer."""


def read_policy(
    reboot: str, window: str, *, drain_timeout: str, boot_timeout: str, reload: bool, reservation: str
) -> Policy:
    """Return what --reboot, --reboot-window, --drain-timeout, --boot-timeout, --reload-driver and --reservation allow;
    Trouble for a value that cannot be."""
    mode, at_once = parse_mode(reboot)
    drain, boot = parse_time("--drain-timeout", drain_timeout), parse_time("--boot-timeout", boot_timeout)
    return Policy(
        mode=mode,
        at_once=at_once,
        drain_timeout=drain,
        boot_timeout=boot,
        window=parse_window(window),
        reload=reload,
        reservation=reservation,
        settle=min(SETTLE, boot),
    )


def parse_mode(text: str) -> tuple[str, int]:
    """Return mode and how many hosts at once of `never`, `ask`, `rolling`, `rolling:4` or `all` (0: as many as there
    are)."""
    match = re.fullmatch(r"(never|ask|all|rolling)(?::([1-9][0-9]{0,4}))?", text, re.ASCII)
    if not match or (match.group(2) and match.group(1) != ROLLING):
        raise Trouble(
            Problem("--reboot", "unknown value", text[:40] or "nothing", "never, ask, rolling, rolling:K or all")
        )
    return match.group(1), 0 if match.group(1) == ALL else int(match.group(2) or 1)


class Window(Struct, frozen=True):
    """A time of day, from `start` (in it) to `end` (not in it), local time; across midnight where the end comes
    first."""

    start: time
    end: time

    def holds(self, now: time) -> bool:
        """Return whether `now` is in the window."""
        if self.start <= self.end:
            return self.start <= now < self.end
        return now >= self.start or now < self.end

    def __str__(self) -> str:
        return f"{self.start:%H:%M}-{self.end:%H:%M}"


def parse_window(value: str) -> Window | None:
    """Return the window of `--reboot-window=HH:MM-HH:MM`, None for an empty value. Raises Trouble."""
    if not value:
        return None
    match = re.fullmatch(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])", value, re.ASCII)
    if not match or value[:5] == value[6:]:
        raise Trouble(
            Problem("--reboot-window", "not a time of day", value[:40], "HH:MM-HH:MM, local time, such as 22:00-06:00")
        )
    start_hour, start_minute, end_hour, end_minute = (int(text) for text in match.groups())
    return Window(time(start_hour, start_minute), time(end_hour, end_minute))
