"""What a host lost over a reboot, and that a later run reads it out of the node's reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepep_bootstrap.inventory import regressions
from deepep_bootstrap.inventory.facts import Port, Rdma
from deepep_bootstrap.slurm import nodes
from tests.support.plan import MARKER, READY, changed

UP, DOWN = (Port(1, state, "InfiniBand", 400.0) for state in ("ACTIVE", "DOWN"))
NICS = tuple(Rdma(f"mlx5_{number}", "mlx5_core", "", 0, "", (UP,), virtual=number > 7) for number in range(9))
BEFORE = changed(READY, {"rdma": NICS, "prepared.fabric_state": "Completed/Success"})


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, ()),
        ({"rdma": NICS[:8]}, ()),  # virtual ones are made by services later
        ({"prefix.id": MARKER, "prefix.problem": "slow"}, ()),
        ({"gpus": READY.gpus[:7]}, ("GPUs: found 7, wanted 8 as before",)),
        (
            {"rdma": NICS[:6]},
            ("RDMA devices: found 6, wanted 8 as before", "active ports: found 6, wanted 8 as before"),
        ),
        ({"rdma": (changed(NICS[0], {"ports": (DOWN,)}), *NICS[1:])}, ("active ports: found 7, wanted 8 as before",)),
        ({"prepared.fabric_state": "In Progress"}, ("NVSwitch fabric: found In Progress, wanted Completed",)),
        ({"prefix.id": ""}, (f"id of the prefix: found nothing there, wanted {MARKER} as before",)),
        ({"prefix.id": "", "prefix.problem": "hangs"}, (f"id of the prefix: found hangs, wanted {MARKER} as before",)),
        ({"prefix.id": "another"}, (f"id of the prefix: found another, wanted {MARKER} as before",)),
    ],
)
def test_what_a_host_lost_is_known_until_it_is_there_again(changes: Mapping[str, Any], found: tuple[str, ...]) -> None:
    now = changed(BEFORE, changes)
    assert regressions.since(BEFORE, now) == found
    reason = nodes.our_reason(
        f"came back without what was wanted: {'; '.join((*found, 'driver options: found 0, wanted 1'))}", "run-7"
    )
    assert regressions.still(reason, now) == found
    assert regressions.still(reason, BEFORE) == ()
    # A next reboot brings back what was there before the first one, or is not the last.
    assert regressions.since(now, now, reason) == found


def test_modules_of_the_driver_are_missed_within_one_boot() -> None:
    before = changed(BEFORE, {"boot_id": "a", "kernel_modules": ("ib_core", "nvidia", "nvidia_modeset", "nvidia_uvm")})
    now = changed(before, {"kernel_modules": ("nvidia", "gdrdrv")})
    lost = ("modules of the driver that are no longer loaded: nvidia_modeset, nvidia_uvm",)
    assert regressions.since(before, now) == lost
    assert regressions.since(before, changed(now, {"boot_id": "b"})) == ()


def test_everything_that_can_be_lost_fits_into_a_reason() -> None:
    now = changed(
        BEFORE, {"gpus": (), "rdma": (), "prepared.fabric_state": "In Progress, Completed/Timeout", "prefix.id": ""}
    )
    found = regressions.since(BEFORE, now)
    assert len(found) == 5
    reason = nodes.our_reason(
        f"came back without what was wanted: {'; '.join(found)}", "bootstrap-20261121-112102-4711"
    )
    assert regressions.still(reason, now) == found


def test_a_host_without_a_prefix_before_misses_none() -> None:
    assert regressions.since(changed(BEFORE, {"prefix.id": ""}), BEFORE) == ()


@given(st.text() | st.from_regex(r"(GPUs|RDMA devices|active ports): found \d+, wanted \d+"))
def test_any_reason_can_be_read(reason: str) -> None:
    regressions.still(reason, READY)
