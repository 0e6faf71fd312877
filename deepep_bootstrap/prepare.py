"""Which host recipes a host gets and what their checks said. Pure."""

from __future__ import annotations

from dataclasses import dataclass

OK, TODO, REBOOT, STUCK, BLOCKED = "ok", "todo", "reboot", "stuck", "blocked"


@dataclass(frozen=True)
class Check:
    """What a host recipe found on one host. `state` is "ok", "todo" (applying changes something), "reboot" (written, works after a
    reboot), "stuck" (rebooted since it was written, and still not so) or "blocked" (nothing this program can do; `note` says what
    to do by hand). With `needs_reboot`, applying it ends in a reboot."""

    recipe: str
    state: str
    found: str
    wanted: str
    note: str = ""
    needs_reboot: bool = False
