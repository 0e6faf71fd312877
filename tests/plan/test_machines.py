"""An x86_64 and an aarch64 cluster that share one prefix: who is planned for, what each leaves of the other's offer,
and what of Grace machines is not asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory.facts import Facts, Port, Python, Rdma, Toolkit
from deepep_bootstrap.plan import host_recipes
from deepep_bootstrap.plan.decisions import Decisions, make_decisions
from deepep_bootstrap.plan.steps import offer_sentence
from deepep_bootstrap.prefix import modulefiles
from deepep_bootstrap.prefix.offer import Offer, named_entries, of_machine
from tests.support.plan import PREFIX, READY, changed, request

X86 = changed(READY, {"toolkits": (Toolkit("/usr/local/cuda", "13.0.88", True, True),)})
GRACE = changed(X86, {"machine": "aarch64", "gpus": X86.gpus[:4], "slurm.gres": "gpu:4"})
TEXT = f"defaults prefix={PREFIX} profile=single-node\nx[1-2]\ntray[1-2]\nlogin1 role=login\n"
LOGIN = changed(X86, {"gpus": (), "slurm.node": ""})


def decided(
    machine: Facts, *names: str, offer: Offer | None = None, hosts: tuple[str, ...] = (), **more: Any
) -> Decisions:
    """Return what is decided for some hosts of one kind beside the login host, in a prefix with this offer."""
    manifest = manifest_of(offer, hosts) if offer else ""
    seen = {name: changed(machine, {"slurm.node": name}) for name in names} | {"login1": LOGIN}
    seen = {name: changed(each, {"prefix.manifest": manifest, "prefix.generation": 3}) for name, each in seen.items()}
    others = [name for name in ("x1", "x2", "tray1", "tray2") if name not in names]
    text = "\n".join(
        line
        for line in TEXT.replace("x[1-2]", "x1\nx2").replace("tray[1-2]", "tray1\ntray2").splitlines()
        if line not in others
    )
    return make_decisions(request(text, stack=more.pop("stack", "v2"), left_out=others, **more), seen)


def manifest_of(offer: Offer, hosts: tuple[str, ...]) -> str:
    return modulefiles.manifest(offer, generation=3, created="", by="", lock_digest="", hosts=hosts)


def test_what_is_made_for_one_kind_of_machine_leaves_the_others_offer() -> None:
    first = decided(X86, "x1", "x2")
    assert (first.record.machine, first.record.key, first.offer.default_stack) == ("", "v2", "v2")
    both = decided(GRACE, "tray1", "tray2", offer=first.offer, hosts=("x1", "x2", "login1"))
    assert (both.record.machine, both.record.key) == ("aarch64", "v2-aarch64")
    assert (both.record.hosts, both.record.gpus) == (("tray1", "tray2"), 4)
    assert both.target == "cp312-aarch64"
    assert both.build_host == "tray1"
    assert dict(both.offer.stacks) == {"v2": first.record, "v2-aarch64": both.record}
    assert both.record.module == first.record.module
    assert set(named_entries(both.offer)) == {*named_entries(first.offer), *(each.name for each in both.entries)}
    assert not {each.name for each in first.entries} & {each.name for each in both.entries}
    assert (both.absent, both.elsewhere) == ((), ("x1", "x2"))
    assert offer_sentence(both, first.offer) == (
        "publish modules: add deepep/2.1.0-dd758ca-v2 for aarch64 (default stays deepep/2.1.0-dd758ca-v2)"
    )


def test_hosts_of_the_other_kind_that_are_not_seen_keep_no_setting() -> None:
    first = decided(X86, "x1", "x2")
    both = decided(GRACE, "tray1", "tray2", offer=first.offer, hosts=("x1", "x2", "login1"))
    hosts = ("x1", "x2", "login1", "tray1", "tray2")
    again = decided(X86, "x1", "x2", offer=both.offer, hosts=hosts)
    assert again.offer == both.offer, "nothing is to be done"
    assert (again.absent, again.elsewhere) == ((), ("tray1", "tray2"))
    one = decided(GRACE, "tray1", offer=both.offer, hosts=hosts)
    assert (one.absent, one.elsewhere) == (("tray2",), ("x1", "x2"))
    assert one.record.hosts == ("tray1", "tray2"), "a host that is not seen now stays one of the offer's"


def test_the_default_of_the_others_stays_where_the_locks_own_is_not_offered() -> None:
    first = decided(X86, "x1", "x2")
    both = decided(GRACE, "tray1", "tray2", offer=first.offer, hosts=("x1", "x2"), stack="v1-cu13")
    assert both.offer.default_stack == "v2"
    assert list(of_machine(both.offer, "aarch64")) == ["v1-cu13"]
    alone = decided(GRACE, "tray1", "tray2")
    assert alone.offer.default_stack == "v2-aarch64"


@pytest.mark.parametrize(
    ("busy", "said"),
    [
        ({}, {"aarch64, built on tray1", "x86_64, built on x1"}),
        (
            {"tray1": {"slurm.jobs": ("7",)}, "tray2": {"slurm.jobs": ("8",)}},
            {"aarch64, no build host of this kind (every GPU host is busy)", "x86_64, built on x1"},
        ),
    ],
)
def test_a_plan_for_two_kinds_at_once_says_where_each_would_be_built(
    busy: Mapping[str, Mapping[str, Any]], said: set[str]
) -> None:
    seen = {name: changed(X86, {"slurm.node": name}) for name in ("x1", "x2")}
    seen |= {name: changed(GRACE, {"slurm.node": name, **busy.get(name, {})}) for name in ("tray1", "tray2")}
    with pytest.raises(Trouble) as caught:
        make_decisions(request(TEXT, stack="v2"), seen)
    assert {problem.found for problem in caught.value.problems} == said
    assert [problem.try_ for problem in caught.value.problems] == [
        "the same command with --limit=tray[1-2]",
        "the same command with --limit=x[1-2]",
    ]


def test_driver_options_of_x86_are_not_asked_for_on_grace() -> None:
    nic = Rdma("mlx5_0", "mlx5_core", "", 0, "28.43", (Port(1, "ACTIVE", "InfiniBand", 400.0),))
    wanted = request(TEXT.replace("single-node", "auto"), stack="v2")
    x86, grace = (host_recipes.meant_for(wanted, changed(seen, {"rdma": (nic,)}), "") for seen in (X86, GRACE))
    assert x86 - grace == {"driver-options"}


def test_a_stack_without_wheels_for_the_machine_is_refused_by_name() -> None:
    with pytest.raises(Trouble) as caught:
        decided(changed(GRACE, {"toolkits": READY.toolkits}), "tray1", stack="v1")
    assert "aarch64" in caught.value.problems[0].wanted
    assert replace(X86, machine="").machine == "", "an older recording, which is of x86_64"
    assert (
        decided(replace(X86, pythons=(Python("/usr/bin/python3.12", "3.12.3", header=True),)), "x1").record.machine
        == ""
    )
    assert json.loads(manifest_of(decided(X86, "x1").offer, ("x1",)))["offer"]["stacks"]["v2"]["machine"] == ""


@pytest.mark.parametrize(
    ("answering", "devices", "wanted"),
    [((4, 4), 4, 4), ((2, 2), 2, 2), ((8, 8), 8, 0), ((4, 8), 4, 0), ((7, 7), 8, 0), ((4, 3), 4, 4)],
)
def test_a_test_starts_as_many_processes_as_hosts_have_gpus(
    answering: tuple[int, int], devices: int, wanted: int
) -> None:
    """Upstream's tests start eight; hosts that differ, and one of whose GPUs one is silent, decide nothing."""
    names = ("x1", "x2")
    seen = {
        name: changed(X86, {"gpus": X86.gpus[:count], "prepared.gpu_devices": devices, "slurm.node": name})
        for name, count in zip(names, answering, strict=True)
    }
    made = make_decisions(request(f"defaults prefix={PREFIX} profile=single-node\nx1\nx2\n", stack="v1-cu13"), seen)
    assert made.record.gpus == wanted
    files = modulefiles.render_offer(made.offer, request().templates)
    sbatch = files["sbatch/v1-cu13/intranode-test.sbatch"].content.decode()
    assert (f'"$script" --num-processes {wanted} "$@"' in sbatch) == (wanted > 0)
