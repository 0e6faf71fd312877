"""Which node a host is, by the Slurm host's answer."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory.facts import Facts, Slurm
from deepep_bootstrap.inventory.hostsfile import Inventory, Settings
from deepep_bootstrap.inventory.survey import Survey
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Reply
from deepep_bootstrap.slurm import identity
from deepep_bootstrap.slurm.commands import SlurmNode
from deepep_bootstrap.slurm.identity import NodeRecords, owners, with_nodes

N001 = "NodeName=n001 NodeAddr=10.0.0.1 NodeHostName=n001 State=IDLE Gres=gpu:8 Partitions=batch"
N002 = "NodeName=n002 NodeAddr=10.0.0.2 NodeHostName=n002 State=MIXED Gres=gpu:8 Partitions=batch"
ODD = "NodeName=rack7-1 NodeAddr=10.0.0.7 NodeHostName=b200-007 State=IDLE Gres=gpu:8 Partitions=batch"


class Asked:
    """The Slurm host's answers, and what it and nobody else was asked."""

    def __init__(self, records: str, jobs: str = "", addresses: str = "", code: int = 0) -> None:
        self.records = f"@nodes\n{records}\n@jobs\n{jobs}\n@end\n"
        self.addresses, self.code = f"@addresses\n{addresses}\n@end\n", code
        self.jobs: list[tuple[str, Job]] = []

    def run(self, host: Host, job: Job, on_line: object = None) -> Reply:
        self.jobs.append((host.name, job))
        answer = self.addresses if "@addresses" in job.script else self.records
        return Reply(host.name, self.code, answer, "slurm_load_node: Unable to contact slurm controller", 0.1)


def seen(node: str, **more: object) -> Facts:
    return replace(Facts(), slurm=Slurm(works=True, sbatch=True, node=node, state="IDLE", **more))  # type: ignore[arg-type]


def survey(nodes: Mapping[str, str], **settings: str) -> Survey:
    """Hosts by the node that each says it is, and a login host that is none."""
    hosts = (*(Host(name) for name in nodes), Host("login1", role="login"))
    facts = {**{name: seen(node) for name, node in nodes.items()}, "login1": seen("")}
    return Survey(Inventory("hosts.txt", hosts, Settings(**settings)), "/shared/deepep", facts)  # type: ignore[arg-type]


def test_the_record_of_a_node_is_that_of_the_slurm_host_whatever_the_node_says() -> None:
    before = survey({"n001": "n001"})
    lying = replace(before.facts["n001"], slurm=replace(before.facts["n001"].slurm, state="DOWN", jobs=()))
    asked = Asked(f"{N001} Reason=disk swap [root@2026]", jobs="17|n001")
    found = with_nodes(asked, replace(before, facts={**before.facts, "n001": lying}))  # type: ignore[arg-type]
    node = found.facts["n001"]
    assert (node.slurm.node, node.slurm.state, node.slurm.jobs, node.slurm.gres) == ("n001", "IDLE", ("17",), "gpu:8")
    assert node.prepared.slurm_reason == "disk swap [root@2026]"
    assert found.problems == ()
    assert {host for host, _ in asked.jobs} == {"login1"}


def test_a_host_that_names_another_ones_node_is_left_out_and_named() -> None:
    found = with_nodes(Asked("\n".join([N001, N002])), survey({"n001": "n002"}))  # type: ignore[arg-type]
    assert set(found.facts) == {"login1"}
    (problem,) = found.problems
    assert problem.where == "n001"
    assert "says that it is Slurm's node n002, which is another host as login1 says" in problem.what
    assert (problem.found, problem.wanted) == (
        "NodeHostName=n002 NodeAddr=10.0.0.2",
        "NodeHostName or NodeAddr of n001",
    )


def test_of_two_hosts_with_one_node_the_one_that_is_not_it_goes() -> None:
    found = with_nodes(Asked("\n".join([N001, N002])), survey({"n001": "n002", "n002": "n002"}))  # type: ignore[arg-type]
    assert set(found.facts) == {"n002", "login1"}
    assert found.facts["n002"].slurm.node == "n002"


def test_two_names_of_one_machine_are_both_refused() -> None:
    nodes = {"n001": "n001", "n001.cluster.example": "n001"}
    found = with_nodes(Asked(N001), survey(nodes))  # type: ignore[arg-type]
    assert set(found.facts) == {"login1"}
    assert [problem.where for problem in found.problems] == ["n001", "n001.cluster.example"]
    assert "is Slurm's node n001, and so is n001.cluster.example" in found.problems[0].what


def test_a_node_is_known_although_its_host_keeps_silent_about_it() -> None:
    found = with_nodes(Asked(N001), survey({"n001": ""}))  # type: ignore[arg-type]
    assert found.facts["n001"].slurm.node == "n001"


def test_a_host_of_another_name_is_its_node_by_an_address_of_the_slurm_host() -> None:
    asked = Asked(ODD, addresses="10.0.0.7|10.0.0.7\ngpu7|10.0.0.7")
    found = with_nodes(asked, survey({"gpu7": "rack7-1"}))  # type: ignore[arg-type]
    assert (found.facts["gpu7"].slurm.node, found.problems) == ("rack7-1", ())
    asked = Asked(ODD, addresses="10.0.0.7|10.0.0.7\ngpu7|10.0.0.8")
    found = with_nodes(asked, survey({"gpu7": "rack7-1"}))  # type: ignore[arg-type]
    assert "gpu7" not in found.facts
    assert "with its address in ~/.ssh/config" in found.problems[0].try_


@pytest.mark.parametrize("address", ["127.0.1.1", "::1", "fe80::1"])
def test_an_address_that_every_host_has_says_nothing(address: str) -> None:
    asked = Asked(ODD, addresses=f"b200-007|{address}\ngpu7|{address}")
    assert "gpu7" not in with_nodes(asked, survey({"gpu7": "rack7-1"})).facts  # type: ignore[arg-type]


def test_without_an_answer_of_the_slurm_host_no_host_has_a_node() -> None:
    found = with_nodes(Asked("", code=1), survey({"n001": "n001"}))  # type: ignore[arg-type]
    assert found.facts["n001"].slurm.node == ""
    assert found.problems[0].where == "login1"
    assert "so none is taken for one" in found.problems[0].what


def test_a_slurm_host_that_did_not_answer_is_told_and_nobody_else_is_asked() -> None:
    asked = Asked(N001)
    found = with_nodes(asked, survey({"n001": "n001"}, slurm_host="ctl"))  # type: ignore[arg-type]
    assert (asked.jobs, found.facts["n001"].slurm.node) == ([], "")
    assert found.problems[0].where == "hosts.txt: slurm_host"


def test_without_slurm_nobody_is_asked() -> None:
    asked, plain = Asked(N001), survey({"n001": ""})
    bare = replace(plain, facts=dict.fromkeys(plain.facts, Facts()))
    assert with_nodes(asked, bare) == bare  # type: ignore[arg-type]
    assert asked.jobs == []


@pytest.mark.parametrize(
    ("name", "host", "address", "same"),
    [
        ("n001", "n001", "n001", True),
        ("N001", "n001", "", True),
        ("n001.cluster.example", "n001", "n001", True),
        ("n001", "n001.cluster.example", "10.0.0.1", True),
        ("n001", "rack-1", "n001.cluster.example", True),
        ("10.0.0.1", "n001", "10.0.0.1", True),
        ("10.0.0.1", "n001", "10.0.0.2", False),
        ("n001", "n0011", "n0011", False),
        ("n001", "n002", "10.0.0.2", False),
        ("n001", "", "", False),
    ],
)
def test_whose_node_it_is_by_name(name: str, host: str, address: str, same: bool) -> None:
    node = SlurmNode("n001", host, "IDLE", "", (), "", address=address)
    assert owners([Host(name)], NodeRecords({"n001": node}, {}, {})) == {name: ("n001",) if same else ()}


def test_a_node_list_that_cannot_be_read_is_trouble() -> None:
    with pytest.raises(Trouble):
        identity.ask(Asked("", jobs="x"), Host("login1"), survey({"n001": "n001"}))  # type: ignore[arg-type]
