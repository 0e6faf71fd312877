"""The time of day at which reboots may begin: `--reboot-window`. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import time

from deepep_bootstrap.core.errors import Problem, Trouble


@dataclass(frozen=True)
class Window:
    """A time of day, from `start` (in it) to `end` (not in it), local time; across midnight where the end comes first."""

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
        raise Trouble(Problem("--reboot-window", "not a time of day", value[:40], "HH:MM-HH:MM, local time, such as 22:00-06:00"))
    start_hour, start_minute, end_hour, end_minute = (int(text) for text in match.groups())
    return Window(time(start_hour, start_minute), time(end_hour, end_minute))
