"""What is offered is what the prefix's host says, checked, and what all hosts see."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory.facts import Facts, Prefix
from deepep_bootstrap.inventory.forms import GIB
from deepep_bootstrap.inventory.hostsfile import Inventory, Settings
from deepep_bootstrap.inventory.survey import Survey
from deepep_bootstrap.prefix import modulefiles
from deepep_bootstrap.prefix.offer import current_offer, find_offer, read_offer
from deepep_bootstrap.remote.host import Host
from tests.support.modules import offer, record

PREFIX = "/shared/deepep"


def manifest(**changes: object) -> str:
    made = offer(PREFIX, record(PREFIX))
    text = modulefiles.manifest(made, generation=1, created="", by="", lock_digest="", hosts=("n001",))
    found = json.loads(text)
    found["offer"]["stacks"]["v1"] |= changes
    return json.dumps(found)


def survey(texts: Mapping[str, str], **settings: str) -> Survey:
    hosts = tuple(Host(name, role="login" if name.startswith("login") else "gpu") for name in texts)
    facts = {name: replace(Facts(), prefix=Prefix(PREFIX, manifest=text)) for name, text in texts.items()}
    return Survey(Inventory("hosts.txt", hosts, Settings(**settings)), PREFIX, facts)  # type: ignore[arg-type]


def problem_of(seen: Survey) -> str:
    with pytest.raises(Trouble) as caught:
        current_offer(seen)
    (problem,) = caught.value.problems
    return str(problem)


def test_hosts_that_see_one_manifest_have_one_offer() -> None:
    good = manifest()
    assert list(current_offer(survey(dict.fromkeys(("n001", "n002", "login1"), good))).stacks) == ["v1"]


def test_hosts_that_see_different_manifests_stop_the_run_and_both_sets_are_named() -> None:
    texts = {"n001": manifest(external_python="/var/tmp/evil", python=""), "n002": manifest(), "login1": manifest()}
    said = problem_of(survey(texts))
    assert said.startswith(
        "login1,n002 (2) /shared/deepep/current/manifest.json: the manifest of what is offered differs"
    )
    assert "as on n001" in said
    # Whoever of them is believed otherwise: the same.
    said = problem_of(survey(texts, prefix_host="n002"))
    assert said.startswith("n001 /shared/deepep/current/manifest.json: ")
    assert "as on login1,n002 (2)" in said


def test_a_host_that_sees_nothing_decides_nothing_and_stops_nothing() -> None:
    assert find_offer(survey({"n001": manifest(), "n002": ""})) is not None


def test_where_the_prefixs_host_sees_nothing_no_other_one_is_believed() -> None:
    said = problem_of(survey({"n001": "", "n002": manifest()}))
    assert said.startswith("n002 ")
    assert "wanted nothing as on n001" in said


def test_only_the_named_host_of_the_prefix_is_believed() -> None:
    seen = survey({"n001": manifest()}, prefix_host="n009")
    with pytest.raises(Trouble, match="prefix_host: this host did not answer"):
        find_offer(seen)


def test_an_offer_of_another_prefix_is_refused() -> None:
    said = problem_of(survey({"n001": manifest(prefix="/shared/home-mallory")}))
    assert "n001 /shared/deepep/current/manifest.json: what is offered is of another prefix" in said
    assert "found /shared/home-mallory, wanted /shared/deepep" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"external_python": "/tmp/x $(id)", "python": ""}, "the path of python"),
        ({"module": "deepep/x; id"}, "not a module name"),
        ({"deepep": "../../tmp/evil"}, "not the name of a store entry"),
        ({"gib": "/home/mallory/gib/scripts/x.sh"}, "another place than Google's"),
        ({"environment": {"LD_PRELOAD": "/tmp/evil.so"}}, "LD_PRELOAD is set by the module itself"),
        ({"stack": "v2"}, "the record is of another stack"),
        ({"nccl": "2.30.7", "python": "", "external_python": "/opt/v/bin/python"}, "needs the NCCL and NVSHMEM of its"),
        ({"torch_nccl": "/opt/v/$(id)"}, "the path of torch's NCCL cannot be written"),
        ({"torch_nvshmem": "/opt/a:/opt/b"}, "the path of torch's NVSHMEM cannot be written"),
        ({"own_nccl": "../../tmp/evil"}, "not the name of a store entry"),
    ],
)
def test_an_offer_is_checked_whenever_it_is_read(changes: dict[str, object], said: str) -> None:
    with pytest.raises(Trouble) as caught:
        read_offer(manifest(**changes))
    assert any(said in str(problem) for problem in caught.value.problems)
    assert all(problem.where.startswith("manifest.json: ") for problem in caught.value.problems)


def test_googles_place_of_gib_may_be_offered() -> None:
    assert read_offer(manifest(gib=GIB)) is not None
