"""One run of a test as it lies in its folder: what was run, where, how it ended, its logs, and the counters of NICs and GPUs. Values, pure.

<run>/run.env                     data lines: what was run and how it ended (RUN_KEYS)
<run>/job.log                     what the job itself printed
<run>/node-<index>-<host>.log     what one node's test printed
<run>/rank-<number>.log           what one rank printed, where the test starts its ranks through torch
<run>/counters/<host>.before      data lines (Counter, GpuCounter), and <host>.after
<run>/facts.json                  `invoke facts` of the nodes, where `invoke test` ran it
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from deepep_bootstrap.core.errors import Problem, Trouble

RUN_KEYS = (
    *("kind", "stack", "module", "prefix", "deepep", "generation", "lock_digest", "via", "job", "nodes"),
    *("started", "ended", "code", "args", "script", "time_limit"),
)
"""`nodes` are host names in the order of their index, joined by commas; `started` and `ended` are seconds since 1970, `code` is the
exit code ("" while it runs, or if nobody was left to say it), `args` the words for the script as a shell would read them."""

WORD_BYTES = 4
"""`port_xmit_data` and `port_rcv_data` count words of four bytes (kernel documentation, sysfs-class-infiniband)."""


@dataclass(frozen=True)
class Counter:
    """One port of a NIC at one moment: bytes sent and received since the driver was loaded, its rate in Gb/s, its link layer
    (InfiniBand or Ethernet), and its error counters by sysfs name."""

    device: str
    port: int
    link_layer: str
    gbits: float
    sent: int
    received: int
    errors: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuCounter:
    """One GPU at one moment: errors by name (`ecc`: uncorrected, volatile; `nvlink`: of all links together)."""

    index: int
    errors: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Counters:
    """All counters of one host at one moment (seconds since 1970)."""

    time: float
    nics: Mapping[str, Counter]
    gpus: Mapping[int, GpuCounter]


@dataclass(frozen=True)
class TestRun:
    """A run: its name (the folder's), the values of run.env, logs by file name, counters before and after by host, facts as JSON text."""

    name: str
    values: Mapping[str, str]
    logs: Mapping[str, str]
    counters: Mapping[str, tuple[Counters | None, Counters | None]] = field(default_factory=dict)
    facts: str = ""

    @property
    def kind(self) -> str:
        """Return the kind of the test."""
        return self.values.get("kind", "")

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the hosts in the order of their index."""
        return tuple(filter(None, self.values.get("nodes", "").split(",")))

    @property
    def args(self) -> tuple[str, ...]:
        """Return the words given to the script."""
        try:
            return tuple(shlex.split(self.values.get("args", "")))
        except ValueError:
            return (self.values.get("args", ""),)

    @property
    def code(self) -> int | None:
        """Return the exit code, None where nobody said it."""
        code = self.values.get("code", "")
        return int(code) if re.fullmatch(r"\d{1,3}", code) else None


def parse_values(text: str, where: str) -> dict[str, str]:
    """Return the values of a run.env; Trouble for a line that is none of RUN_KEYS, later lines replace earlier ones."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        key, equal, value = line.partition("=")
        if not equal or key not in RUN_KEYS:
            raise Trouble(Problem(f"{where}:{number}", "no line of a run", line[:80], wanted=f"one of {', '.join(RUN_KEYS)}"))
        found[key] = value
    return found


def parse_counters(text: str, where: str) -> Counters:
    """Return the counters of one file.

    Its lines are `time=SECONDS`, `nic=DEVICE PORT LINK_LAYER GBITS XMIT_WORDS RCV_WORDS [NAME:COUNT…]` (words as the kernel counts
    them, see WORD_BYTES) and `gpu=INDEX [NAME:COUNT…]`. Trouble for any other line.
    """
    time, nics, gpus = 0.0, {}, {}
    for number, line in enumerate(text.splitlines(), 1):
        key, _, value = line.partition("=")
        try:
            if key == "time":
                time = float(value)
            elif key == "nic":
                device, port, layer, gbits, sent, received, *errors = value.split()
                sizes = int(sent) * WORD_BYTES, int(received) * WORD_BYTES
                nics[f"{device}/{port}"] = Counter(device, int(port), layer, float(gbits), *sizes, dict(_counts(errors)))
            elif key == "gpu":
                index, *errors = value.split()
                gpus[int(index)] = GpuCounter(int(index), dict(_counts(errors)))
            else:
                raise ValueError(key)
        except ValueError:
            raise Trouble(Problem(f"{where}:{number}", "no line of counters", line[:80], "time=, nic= or gpu=")) from None
    return Counters(time, nics, gpus)


def _counts(words: list[str]) -> Iterator[tuple[str, int]]:
    for word in words:
        name, _, count = word.partition(":")
        yield name, int(count)
