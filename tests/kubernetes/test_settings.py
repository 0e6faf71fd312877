"""The settings file of manifests: the example, and what is said of faults, with their lines."""

from __future__ import annotations

import re

import pytest

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.kubernetes.platforms import PLATFORMS
from deepep_bootstrap.kubernetes.settings import parse_settings, read_settings
from tests.support.paths import ROOT

A4, GENERIC = PLATFORMS["gke-a4"], PLATFORMS["generic"]
NETWORK = '[rdma]\nvpc = "x"\nsubnets = ["a", "b", "c", "d", "e", "f", "g", "h"]\n'


def refusal(text: str, platform=A4) -> list[str]:
    with pytest.raises(Trouble) as caught:
        parse_settings(text, "mine.toml", platform)
    return [str(problem) for problem in caught.value.problems]


def test_the_example_is_read_and_lacks_only_its_image() -> None:
    found = read_settings(str(ROOT / "hosts" / "gke-a4.toml"), "gke-a4")
    assert found.image == ""
    assert found.pool.cluster == "my-cluster"
    assert len(found.rdma.subnets) == found.rdma.count == 8
    text = (ROOT / "hosts" / "gke-a4.toml").read_text(encoding="utf-8")
    # What the example has as comments is right, too.
    parse_settings(re.sub(r"(?m)^# (?=[\[a-z_\"-][^ ]* ?= |\[)", "", text), "example", A4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nods = 3\n" + NETWORK, "mine.toml:1: nods: unknown key, did you mean nodes?"),
        (NETWORK + "vcp = 1\n", "mine.toml:4: rdma.vcp: unknown key, did you mean vpc?"),
        ("# a comment\n\nnodes = 1\n" + NETWORK, "mine.toml:3: nodes: is too small — found 1, wanted 2 or more"),
        ('namespace = "Big"\n' + NETWORK, "mine.toml:1: namespace: is not what belongs here — found Big"),
        ('networks = "sriov"\n' + NETWORK, "mine.toml:1: networks: is not what belongs here — found sriov"),
        ('[rdma]\nvpc = "x"\nsubnets = ["a"]\n', "mine.toml:3: rdma.subnets: has 1 names — wanted one for each of 8"),
        (NETWORK + '[pool]\ncluster = "c"\n', "mine.toml:4: pool: names a cluster, but not where it is"),
        ('[selector]\n"a b" = "c"\n' + NETWORK, "mine.toml:1: selector.'a b': is no key of a label"),
        (NETWORK + '[selector]\n"a.b/c" = 1\n', "mine.toml:4: selector.'a.b/c': is of the wrong type"),
        ("nodes = \n", "mine.toml:1: is not TOML"),
        ("spot = 1\n" + NETWORK, "mine.toml:1: spot: is of the wrong type — found 1, wanted true or false"),
    ],
)
def test_a_fault_is_told_with_its_line(text: str, message: str) -> None:
    assert [line for line in refusal(text) if line.startswith(message)], refusal(text)


def test_all_faults_are_told_at_once() -> None:
    assert len(refusal('nods = 3\nspot = 1\n[pool]\nzome = "x"\n' + NETWORK)) == 3


def test_a_generic_cluster_says_what_it_lacks() -> None:
    lacking = refusal("", GENERIC)
    assert [line.split(":")[1].strip() for line in lacking] == ["archs", "profile", "selector", "rdma.resource"]
    told = refusal('archs = ["9.0"]\nprofile = "roce"\nnetworks = "dranet"\n[selector]\ngpu = "x"\n', GENERIC)
    assert told == ["mine.toml:3: networks: dranet is of Google's clusters — wanted device-plugin or host"]


def test_a_cluster_and_a_file_that_are_not_there() -> None:
    with pytest.raises(Trouble, match="--for: no such kind of cluster — found eks, wanted gke-a4, gke-a3, generic"):
        read_settings("x.toml", "eks")
    with pytest.raises(Trouble, match=r"absent\.toml: the settings cannot be read: No such file"):
        read_settings("absent.toml", "gke-a4")
