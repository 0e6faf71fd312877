"""What the NICs carried during a run, out of their counters before and after: the share of each, and errors that are new. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from deepep_bootstrap.refbook import Book
from deepep_bootstrap.testruns import WORD_BYTES, TestRun
from deepep_bootstrap.verdicts import Verdict

FAIR = 0.5
"""Least share of a NIC, as a fraction of an equal share of all. The tests load all GPUs alike, and a map of GPUs to NICs gives no NIC
more than one GPU more than another: with x GPUs for each NIC on average the least loaded has floor(x), which is more than x / 2."""

IDLE = 0.01
"""Below this fraction of an equal share a NIC carried nothing of the test: what is left is other traffic."""

SATURATED = (2**32 - 1) * WORD_BYTES
"""Where a 32-bit counter of words ends: InfiniBand's stay there (PortXmitData of the specification), wider ones never stop there."""


@dataclass(frozen=True)
class NicTraffic:
    """What one port of a NIC carried during a run: bytes, and its share of all RDMA traffic of its host in each direction (0…1).
    `expected`: it should carry the traffic of GPUs. `problem` says why nothing is known ("" otherwise); `errors` are new ones by name."""

    host: str
    device: str
    gbits: float
    sent: int = 0
    received: int = 0
    share_sent: float = 0.0
    share_received: float = 0.0
    expected: bool = True
    problem: str = ""
    errors: Mapping[str, int] = field(default_factory=dict)


def nic_traffic(run: TestRun, expected_nics: Mapping[str, Collection[str]] | None = None) -> tuple[NicTraffic, ...]:
    """Return what each NIC of each host carried, hosts in the run's order. See `judge_traffic` for `expected_nics`."""
    raise NotImplementedError


def judge_traffic(
    run: TestRun, *, expected_nics: Mapping[str, Collection[str]] | None = None, book: Book | None = None
) -> tuple[Verdict, ...]:
    """Return verdicts on the NICs of a run's hosts and on new errors of NICs and GPUs.

    `expected_nics` are the devices that carry GPU traffic by host ("mlx5_3", or with its port "mlx5_3:1"); a host that is not in it, or
    None, means the NICs of its prevailing link layer that are at least half as fast as the fastest. On one node no NIC carries
    anything, so there only errors are judged. `book` says what error counters mean.
    """
    raise NotImplementedError
