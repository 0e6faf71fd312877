"""Differences for the worse over a reboot, as lines for people and for a Slurm node's reason, and read back
from there.

A node stays drained for what it lost, and its reason is all that a later run knows of the time before: so
the numbers stand in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from deepep_bootstrap.inventory import nics
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.machine import FABRIC_WELL

GPUS, DEVICES, PORTS, SWITCHES, PREFIX = "GPUs", "RDMA devices", "active ports", "NVSwitch fabric", "id of the prefix"
COMPLETED = "Completed"
SHOWN = 8
"""Characters of the prefix's id that are shown."""

COUNTED = re.compile(rf"({GPUS}|{DEVICES}|{PORTS}): found [0-9]+, wanted ([0-9]{{1,4}})")
OTHERS = re.compile(rf"({SWITCHES}|{PREFIX}): found .*?, wanted (\w+)")


DRIVER_MODULES = frozenset(
    ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm", "nvidia_fs", "nvidia_peermem", "gdrdrv")
)
"""What a reload of the driver unloads and loads (recipes/host/driver-options.sh)."""


def since(before: Facts, now: Facts, reason: str = "") -> tuple[str, ...]:
    """Return what a host has no more that it had `before`, or that it had before it was drained with `reason`, a
    line each. Virtual RDMA devices do not count, services make them later. The NVSwitch fabric must be well, however
    it was before. Modules of the driver count within one boot only: after another, some are loaded when they are
    first used."""
    lost = _lost_modules(before, now) if before.boot_id == now.boot_id else ()
    return (*_missing({**_had(before), **named(reason)}, now), *lost)


def _lost_modules(before: Facts, now: Facts) -> Iterator[str]:
    gone = DRIVER_MODULES.intersection(before.kernel_modules).difference(now.kernel_modules)
    if gone:
        yield f"modules of the driver that are no longer loaded: {', '.join(sorted(gone))}"


def still(reason: str, now: Facts) -> tuple[str, ...]:
    """Return what a node's reason says it has lost, and is not there again, a line each."""
    return tuple(_missing(named(reason), now))


def named(reason: str) -> dict[str, str]:
    """Return what a node's reason says is wanted, by what it says is lost."""
    return dict([*COUNTED.findall(reason), *OTHERS.findall(reason)])


def _had(facts: Facts) -> dict[str, str]:
    return {
        **{what: str(count) for what, count in _counts(facts).items()},
        SWITCHES: COMPLETED,
        PREFIX: facts.prefix.id[:SHOWN],
    }


def _counts(facts: Facts) -> dict[str, int]:
    real = [device for device in facts.rdma if not nics.is_virtual(facts, device.name)]
    ports = [port for device in real for port in device.ports if port.state == "ACTIVE"]
    return {GPUS: len(facts.gpus), DEVICES: len(real), PORTS: len(ports)}


def _missing(wanted: Mapping[str, str], now: Facts) -> Iterator[str]:
    for what, count in _counts(now).items():
        if what in wanted and count < int(wanted[what]):
            yield f"{what}: found {count}, wanted {wanted[what]} as before"
    state = now.prepared.fabric_state
    if SWITCHES in wanted and state.lower() not in FABRIC_WELL:
        yield f"{SWITCHES}: found {state}, wanted {COMPLETED}"
    if not now.prefix.id.startswith(wanted.get(PREFIX, "")):
        found = now.prefix.id[:SHOWN] or now.prefix.problem or "nothing there"
        yield f"{PREFIX}: found {found}, wanted {wanted[PREFIX]} as before"
