"""What the flags of bootstrap allow when a change needs a reboot. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deepep_bootstrap.bootstrap.reboot.policy import Policy
from deepep_bootstrap.bootstrap.reboot.windows import Window, parse_window
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.text import parse_time

NEVER, ASK, ROLLING, ALL = "never", "ask", "rolling", "all"


@dataclass(frozen=True)
class Reboots:
    """`mode` is "never", "ask", "rolling" or "all"; `at_once` how many hosts a wave works on at a time (0: all); times in seconds;
    with `reload` the driver is loaded anew where that saves the reboot; `reservation` names the one of Slurm whose nodes are ours."""

    mode: str = NEVER
    at_once: int = 1
    drain_timeout: float = Policy.drain_timeout
    boot_timeout: float = Policy.boot_timeout
    window: Window | None = None
    reload: bool = False
    reservation: str = ""

    def policy(self, run: str) -> Policy:
        """Return how the waves of a run roll."""
        return Policy(
            at_once=self.at_once,
            drain_timeout=self.drain_timeout,
            boot_timeout=self.boot_timeout,
            run=run,
            window=self.window,
            reservation=self.reservation,
            settle=min(Policy.settle, self.boot_timeout),
            reboot=self.mode != NEVER,
        )


def read(reboot: str, window: str, times: tuple[str, str], *, reload: bool, reservation: str) -> Reboots:
    """Return what --reboot, --reboot-window, --drain-timeout and --boot-timeout (`times`), --reload-driver and --reservation allow;
    Trouble for a value that cannot be."""
    mode, at_once = parse_mode(reboot)
    drain, boot = parse_time("--drain-timeout", times[0]), parse_time("--boot-timeout", times[1])
    return Reboots(mode, at_once, drain, boot, parse_window(window), reload, reservation)


def parse_mode(text: str) -> tuple[str, int]:
    """Return mode and how many hosts at once of `never`, `ask`, `rolling`, `rolling:4` or `all` (0: as many as there are)."""
    match = re.fullmatch(r"(never|ask|all|rolling)(?::([1-9][0-9]{0,4}))?", text, re.ASCII)
    if not match or (match.group(2) and match.group(1) != ROLLING):
        raise Trouble(Problem("--reboot", "unknown value", text[:40] or "nothing", "never, ask, rolling, rolling:K or all"))
    return match.group(1), 0 if match.group(1) == ALL else int(match.group(2) or 1)
