"""One driver version for all hosts of a run."""

from __future__ import annotations

import pytest

from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.plan.host_recipes import Check, Preparation, settle
from tests.support.plan import READY, changed

UBUNTU = "nvidia-headless-580-server-open nvidia-utils-580-server"
NEWEST = "nvidia-headless-580-server-open=580.159.03-1 nvidia-utils-580-server=580.159.03-1 "
OLDER = "nvidia-headless-580-server-open=580.126.20-1 nvidia-utils-580-server=580.126.20-1 "


def running(version: str, packaged: bool = True, flavor: str = "open") -> Facts:
    packages = (("nvidia-dkms-580-server-open", f"{version}-0ubuntu1"),) if packaged else ()
    seen: Facts = changed(
        READY, {"prepared.nvidia_version": version, "prepared.nvidia_flavor": flavor, "prepared.packages": packages}
    )
    return seen


@pytest.mark.parametrize(
    ("others", "packages", "given"),
    [
        ((), UBUNTU, NEWEST),
        (
            (running("580.95.05"),),
            UBUNTU,
            "nvidia-headless-580-server-open=580.95.05-* nvidia-utils-580-server=580.95.05-*",
        ),
        (
            (running("580.95.05"),),
            "@nvidia-driver:580-open nvidia-open",
            "@nvidia-driver:580-open nvidia-open=580.95.05-*",
        ),
        (
            (running("580.95.05"), running("580.126.20"), running("580.126.20")),
            "nvidia-open-580",
            "nvidia-open-580=580.126.20-*",
        ),
        ((running("570.211.01"),), UBUNTU, NEWEST),
        ((running("580.95.05", packaged=False),), UBUNTU, NEWEST),  # a runfile's, which no repository has
        ((running("580.95.05", flavor="proprietary"),), UBUNTU, NEWEST),
        ((running("580.95.05"),), "nvidia-open-580=580.65.06-1", "nvidia-open-580=580.65.06-1"),  # the lock's own word
    ],
)
def test_all_hosts_get_one_version(others: tuple[Facts, ...], packages: str, given: str) -> None:
    facts = {**{f"n00{number}": seen for number, seen in enumerate(others, 3)}, "n001": READY, "n002": READY}
    inputs = {name: {"nvidia-driver": {"PACKAGES": packages}, "limits": {}} for name in ("n001", "n002")}
    checks = {
        name: {"nvidia-driver": Check("nvidia-driver", "todo", "no driver", "the driver", candidate=candidate)}
        for name, candidate in (("n001", NEWEST), ("n002", OLDER))
    }
    settled = settle(Preparation(inputs, checks), facts).inputs
    assert [settled[name]["nvidia-driver"]["PACKAGES"] for name in ("n001", "n002")] == [given, given]
    assert settled["n001"]["limits"] == {}
