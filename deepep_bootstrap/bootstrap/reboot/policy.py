"""What waves are asked to do and how: values, and what they need of whoever asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from deepep_bootstrap.bootstrap.reboot.windows import Window
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.plan.steps import Step
from deepep_bootstrap.remote.host import Host

Tell = Callable[[str, str, str], None]
"""Where a wave tells what it does: host, title, line. Called by one thread at a time."""


@dataclass(frozen=True)
class Order:
    """One host to be changed and rebooted: `node` is its name in Slurm ("" without), `why` what it is for, `boot_id` that of the facts,
    `steps` the host recipes to apply before; with `reload` the driver is loaded anew, and the reboot saved where that is enough;
    `refused` says why it must be left alone whatever it needs, "" where it need not."""

    host: Host
    node: str
    why: str
    boot_id: str
    steps: tuple[Step, ...] = ()
    reload: bool = False
    refused: str = ""


@dataclass(frozen=True)
class Policy:
    """How waves roll. `at_once` hosts are out of use at a time (0: all); times in seconds; `run` names the run in drain reasons.

    `boot_timeout` is for a host to be back, and then once more for what it had before to be there again, as an NVSwitch fabric that trains
    for minutes; `settle` for what recipes wrote to show after that, and for a host that does not answer to do so again. `pause` lies
    between two looks. `reservation` names the one of Slurm whose nodes are ours. Without `reboot` hosts are changed and reloaded only.
    """

    at_once: int = 1
    drain_timeout: float = 4 * 3600.0
    boot_timeout: float = 1800.0
    run: str = ""
    window: Window | None = None
    reservation: str = ""
    settle: float = 120.0
    pause: float = 3.0
    reboot: bool = True


@dataclass(frozen=True)
class Seen:
    """A look at a host: its boot id, what is still not as wanted (a reason each), who uses its GPUs ("" for nobody), and which of
    `unmet` it had before and has `lost`."""

    boot_id: str
    unmet: tuple[str, ...] = ()
    busy: str = ""
    lost: tuple[str, ...] = ()


class Hands(Protocol):
    """What a wave needs done on a host; it knows nothing of recipes and facts itself."""

    def apply(self, host: Host, step: Step) -> Outcome:
        """Run a host recipe."""

    def reload(self, host: Host) -> Outcome:
        """Load the GPU driver anew, with the options that are written now."""

    def look(self, host: Host) -> Seen:
        """Look at a host with fresh facts. Raises Trouble when it does not answer."""
