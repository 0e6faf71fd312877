"""Changes that need a reboot: drain, wait until idle, change, reboot, look again, resume; K hosts at a time, stopped by the first failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from deepep_bootstrap.hosts import Host
from deepep_bootstrap.plan import Outcome, Step
