"""One driver version for all hosts of a run."""

from __future__ import annotations

import pytest
import tomlkit

from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.plan.host_recipes import Check, Preparation, settle
from deepep_bootstrap.plan.steps import preparation_steps
from tests.support.paths import ROOT
from tests.support.plan import READY, changed

UBUNTU = "nvidia-headless-580-server-open nvidia-utils-580-server"
NEWEST = "nvidia-headless-580-server-open=580.159.03-1 nvidia-utils-580-server=580.159.03-1"
CASES = tomlkit.parse((ROOT / "tests/cases/hostile/candidates.toml").read_text(encoding="utf-8")).unwrap()["case"]


def running(version: str, packaged: bool = True, flavor: str = "open") -> Facts:
    packages = (("nvidia-dkms-580-server-open", f"{version}-0ubuntu1"),) if packaged else ()
    seen: Facts = changed(
        READY, {"prepared.nvidia_version": version, "prepared.nvidia_flavor": flavor, "prepared.packages": packages}
    )
    return seen


def waiting(candidate: str) -> Check:
    return Check("nvidia-driver", "todo", "no driver", "the driver", needs_reboot=True, candidate=candidate)


def versioned(package: str, version: str) -> str:
    return package if package.startswith("@") or "=" in package else f"{package}={version}"


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
        name: {"nvidia-driver": waiting(" ".join(versioned(word, version) for word in packages.split()))}
        for name, version in (("n001", "580.159.03-1"), ("n002", "580.126.20-1"))
    }
    settled = settle(Preparation(inputs, checks), facts).inputs
    assert [settled[name]["nvidia-driver"]["PACKAGES"] for name in ("n001", "n002")] == [given, given]
    assert settled["n001"]["limits"] == {}


@pytest.mark.parametrize("case", CASES, ids=[case["said"][:60] for case in CASES])
def test_a_hosts_candidate_is_the_locks_names_with_versions_or_nothing_of_it_counts(case: dict[str, object]) -> None:
    packages, said = str(case["packages"]), str(case["said"])
    inputs = {name: {"nvidia-driver": {"PACKAGES": packages}} for name in ("n001", "n002")}
    checks = {"n001": {"nvidia-driver": waiting(said)}, "n002": {"nvidia-driver": waiting("")}}
    settled = settle(Preparation(inputs, checks), {"n001": READY, "n002": READY})
    given = [settled.inputs[name]["nvidia-driver"]["PACKAGES"] for name in ("n001", "n002")]
    check = settled.checks["n001"]["nvidia-driver"]
    if case["taken"]:
        assert (given, check.state) == ([said.strip(), said.strip()], "todo")
    else:
        assert (given, check.state, settled.checks["n002"]["nvidia-driver"].state) == (
            [packages] * 2,
            "blocked",
            "todo",
        )
        assert packages in str(check.wanted)


def test_one_host_does_not_choose_the_version_against_the_others() -> None:
    names = ("n001", "n002", "n003")
    inputs = {name: {"nvidia-driver": {"PACKAGES": "nvidia-open-580"}} for name in names}
    versions = {"n001": "580.65.06-1", "n002": "580.95.05-1", "n003": "580.95.05-1"}
    checks = {name: {"nvidia-driver": waiting(f"nvidia-open-580={versions[name]}")} for name in names}
    settled = settle(Preparation(inputs, checks), dict.fromkeys(names, READY))
    assert {settled.inputs[name]["nvidia-driver"]["PACKAGES"] for name in names} == {"nvidia-open-580=580.95.05-1"}


def test_the_plan_shows_the_version_that_is_to_be_installed() -> None:
    inputs = {"n001": {"nvidia-driver": {"PACKAGES": "nvidia-open-580"}}}
    checks = {"n001": {"nvidia-driver": waiting("nvidia-open-580=580.95.05-1")}}
    (step,) = preparation_steps(settle(Preparation(inputs, checks), {"n001": READY}))
    assert step.reason.wanted == "the driver: nvidia-open-580=580.95.05-1"
