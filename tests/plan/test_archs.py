"""Builds for GPUs that no host has: `--archs=9.0,10.0`, for images, build farms and login nodes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.plan import decisions, host_recipes
from deepep_bootstrap.plan.decisions import Decisions, PlanRequest
from tests.support.plan import PREFIX, changed, cluster, request

FARM = f"defaults prefix={PREFIX}\nlogin1 role=login\n"
MACHINE = {"toolkits": cluster()["n001"].toolkits, "tools": cluster()["n001"].tools}


def farm(**changes: object) -> dict[str, Facts]:
    """Return the facts of a machine without a GPU that has what a build needs."""
    return {"login1": changed(cluster(login1=MACHINE)["login1"], changes)}


def asked(text: str, archs: str) -> PlanRequest:
    wanted = request(text)
    return replace(wanted, inventory=wanted.inventory.built_for(archs))


def decided(text: str, archs: str, facts: Mapping[str, Facts]) -> Decisions:
    return decisions.make_decisions(asked(text, archs), facts)


def test_a_machine_without_a_gpu_builds_for_what_it_is_told() -> None:
    made = decided(FARM, "10.0,9.0", farm())
    assert (made.build_host, made.record.archs) == ("login1", ("9.0", "10.0"))
    assert {entry.env["ARCHS"] for entry in made.entries} == {"9.0 10.0"}
    assert "built for 9.0 and 10.0 too, of which no GPU was seen: archs names them" in made.notes


def test_the_hosts_file_may_say_so_and_the_flag_stands_over_it() -> None:
    text = f"defaults prefix={PREFIX} archs=9.0\nlogin1 role=login\n"
    assert decided(text, "", farm()).record.archs == ("9.0",)
    assert decided(text, "10.0", farm()).record.archs == ("10.0",)


def test_without_them_a_machine_without_a_gpu_builds_nothing() -> None:
    with pytest.raises(Trouble, match=r"no GPU host answered .*archs=9\.0 to build where no GPU is"):
        decided(FARM, "", farm())


def test_gpus_that_are_there_are_built_for_besides() -> None:
    text = f"defaults prefix={PREFIX}\nn[001-002]\nlogin1 role=login\n"
    made = decided(text, "10.0", cluster())
    assert (made.build_host, made.record.archs) == ("n001", ("9.0", "10.0"))
    assert decided(text, "9.0", cluster()).notes == decided(text, "", cluster()).notes


def test_a_machine_without_a_gpu_gets_a_toolkit_and_no_driver() -> None:
    wanted = host_recipes.wanted(asked(FARM, "9.0"), farm(toolkits=()))
    assert set(wanted["login1"]) == {"cuda-toolkit"}


def test_only_hosts_without_a_gpu_are_spared_the_import_and_only_where_archs_are_named() -> None:
    facts = cluster(n002={"gpus": ()})
    assert decisions.without_gpu(asked(f"defaults prefix={PREFIX}\nn[001-002]\n", "9.0").inventory, facts) == {"n002"}
    assert not decisions.without_gpu(request().inventory, facts)


@pytest.mark.parametrize("value", ["9", "sm_90", "9.0,", "9.0 10.0", "90", "9.0a", "0.9", "9.0;10.0", "九.0"])
def test_what_is_no_list_of_compute_capabilities_is_refused(value: str) -> None:
    with pytest.raises(Trouble, match=r"--archs: no list of compute capabilities .*9\.0,10\.0"):
        request().inventory.built_for(value)


def test_nothing_is_built_for_a_gpu_that_no_host_has() -> None:
    """Neither for what the lock, torch or an earlier offer knows besides: the compilers get the hosts' own alone."""
    facts = cluster()
    one = decisions.make_decisions(request(), facts)
    assert {entry.env["ARCHS"] for entry in one.entries} == {"9.0"}
    assert {tuple(entry.inputs["archs"]) for entry in one.entries if "archs" in entry.inputs} == {("9.0",)}  # type: ignore[arg-type]
    newer = tuple(replace(gpu, capability="10.0") for gpu in facts["n002"].gpus)
    both = decisions.make_decisions(request(), cluster(n002={"gpus": newer}))
    assert {entry.env["ARCHS"] for entry in both.entries} == {"9.0 10.0"}
