"""The phase of a bootstrap in which hosts are rebooted, and what is said of those that wait for it."""

from __future__ import annotations

from collections.abc import Iterator

from deepep_bootstrap.errors import Problem
from deepep_bootstrap.hosts import fold
from deepep_bootstrap.phases import Work
from deepep_bootstrap.plan import Outcome
from deepep_bootstrap.prepare import STUCK, TITLES, Check


def reboot_hosts(work: Work) -> tuple[Outcome, ...]:
    """Do what works only after a reboot, on as many hosts at a time as was allowed."""
    return ()


def unfinished(work: Work) -> Iterator[Problem]:
    """Yield what is still not as wanted because a reboot is missing, or although there was one; equal problems folded over hosts."""
    preparation = work.plan.preparation
    for pairs, what, remedy in (
        (preparation.with_reboot, "waits for a reboot", "invoke bootstrap --reboot=rolling"),
        (preparation.of(STUCK), "was rebooted since, and is still not as wanted", "invoke doctor, and dmesg on the host"),
    ):
        groups: dict[Check, list[str]] = {}
        for host, check in pairs:
            groups.setdefault(check, []).append(host)
        for check, hosts in groups.items():
            yield Problem(fold(hosts), f"{TITLES[check.recipe]}: {what}", check.found, check.wanted, remedy)
