"""Choices and plans: facts in, steps with reasons out. Cases are data; the cluster they change is in
plan_support.py."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from msgspec.structs import replace

from deepep_bootstrap.bootstrap.planning import with_prefix
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.inventory.facts import Facts, Python, Slurm, TorchLibrary
from deepep_bootstrap.inventory.hostsfile import parse_hosts_file
from deepep_bootstrap.inventory.machine import Machine
from deepep_bootstrap.inventory.survey import Survey
from deepep_bootstrap.plan import decisions, steps
from deepep_bootstrap.plan.decisions import PlanRequest, absences
from deepep_bootstrap.prefix import modulefiles
from deepep_bootstrap.remote.host import THIS_MACHINE
from tests.support.paths import TESTS
from tests.support.plan import PREFIX, READY, changed, cluster, request

CASES = TESTS / "cases" / "plan"


def load(name: str) -> list[dict[str, Any]]:
    cases = json.loads((CASES / f"{name}.json").read_text())
    for case in cases:
        for changes in case.get("changes", {}).values():
            for key, value in changes.items():
                if isinstance(value, list):
                    changes[key] = tuple(tuple(item) if isinstance(item, list) else item for item in value)
    return cases


def built(facts: dict[str, Facts]) -> dict[str, Facts]:
    """Return facts of the same cluster after a bootstrap: entries in the store, the generation's manifest readable."""
    choice = decisions.make_decisions(request(), facts)
    manifest = modulefiles.manifest(
        choice.offer, generation=1, created="2026-01-01T00:00:00Z", by="root", lock_digest="0", hosts=tuple(facts)
    )
    entries = tuple(entry.name for entry in choice.entries)
    done = {"prefix.entries": entries, "prefix.generation": 1, "prefix.manifest": manifest}
    return {name: changed(seen, done) for name, seen in facts.items()}


def named(step: steps.Step) -> str:
    kind = step.name.split("-")[1] if step.kind == "build" else step.name
    return f"{kind} on {fold(step.hosts).rsplit(' (', 1)[0]}"


@pytest.mark.parametrize("case", load("steps"), ids=lambda case: case["name"])
def test_steps(case: dict[str, Any]) -> None:
    facts = built(cluster()) if case.get("built") else cluster()
    facts = {name: changed(seen, case["changes"].get(name, {})) for name, seen in facts.items()}
    made = steps.make_plan(request(), facts)
    assert [named(step) for step in made.steps] == case["steps"]
    assert all(step.reason.found and step.reason.wanted for step in made.steps)
    assert case.get("note", "") in "\n".join(made.notes)


def test_what_was_built_again_and_not_offered_since_is_offered() -> None:
    facts = built(cluster())
    entry = decisions.make_decisions(request(), facts).entries[0].name
    again = {name: changed(seen, {"prefix.unproved": (entry,)}) for name, seen in facts.items()}
    made = steps.make_plan(request(), again)
    assert [step.kind for step in made.steps] == ["prefix", "offer", "verify"]
    assert made.of_kind("offer")[0].reason.wanted == "a generation with the records of what was built since"
    other = {name: changed(seen, {"prefix.unproved": (f"0{entry[1:]}",)}) for name, seen in facts.items()}
    assert steps.make_plan(request(), other).steps == (), "an entry of another offer is no reason"


def test_without_the_hook_users_are_told_what_to_type() -> None:
    made = steps.make_plan(request(skip=("module-hook",)), cluster(n001={"modules.hook": ""}))
    assert steps.HOOK not in [step.kind for step in made.steps]
    assert f"no MODULEPATH hook: `module use {PREFIX}/modulefiles` before `module load`" in made.notes


def test_a_run_that_sees_a_part_of_the_hosts_changes_nothing_for_the_others() -> None:
    newer = tuple(replace(gpu, capability="10.0") for gpu in READY.gpus)
    older = (Python("/usr/bin/python3.10", "3.10.12", header=True),)
    four = {"gpus": READY.gpus[:4], "pythons": (*READY.pythons, *older)}
    facts = built(cluster(n001=four, n002={"gpus": newer, "pythons": older}))
    whole = decisions.make_decisions(request(), facts)
    assert (whole.record.archs, whole.record.python_version, whole.absent) == (("9.0", "10.0"), "3.10", ())
    assert whole.record.gpus == 0, "hosts differ"
    part = {name: seen for name, seen in facts.items() if name != "n002"}
    for wanted in (request(), request(f"defaults prefix={PREFIX}\nn001\nlogin1 role=login\n", left_out=("n002",))):
        made = steps.make_plan(wanted, part)
        assert (made.steps, made.choice.record) == ((), whole.record)
        assert made.choice.absent == ("n002",)
        assert "n002: not seen by this run, so the settings of all hosts stay as they are offered now" in made.notes
    # A host that is no longer in the file has no say any more; a profile that somebody names has one.
    gone = steps.make_plan(request(f"defaults prefix={PREFIX}\nn001\nlogin1 role=login\n"), part)
    assert (gone.choice.record.archs, gone.choice.record.python_version, gone.choice.absent) == (("9.0",), "3.12", ())
    assert gone.choice.record.gpus == 4
    named = steps.make_plan(request(f"defaults prefix={PREFIX} profile=roce\nn[001-002]\nlogin1 role=login\n"), part)
    assert (named.choice.record.profile, whole.record.profile) == ("roce", "single-node")
    # A new one adds what is particular to it.
    more = {
        **part,
        "n003": changed(
            facts["n002"], {"hostname": "n003", "gpus": tuple(replace(gpu, capability="12.0") for gpu in newer)}
        ),
    }
    grown = steps.make_plan(request(f"defaults prefix={PREFIX}\nn[001-003]\nlogin1 role=login\n"), more)
    assert grown.choice.record.archs == ("9.0", "10.0", "12.0")


@pytest.mark.parametrize("case", load("sharing"), ids=lambda case: case["name"])
def test_a_few_hosts_without_the_prefix_are_left_out(case: dict[str, Any]) -> None:
    facts = cluster(**case["changes"])
    left = with_prefix(Survey(request().inventory, PREFIX, facts))
    assert sorted(set(facts) - set(left.facts)) == case["gone"]
    assert case["problem"] in "\n".join(map(str, left.problems))
    assert bool(left.problems) == bool(case["gone"])


@pytest.mark.parametrize("case", load("trouble"), ids=lambda case: case["name"])
def test_trouble(case: dict[str, Any]) -> None:
    with pytest.raises(Trouble) as caught:
        steps.make_plan(request(), cluster(**case["changes"]))
    assert case["message"] in str(caught.value)


def test_a_build_host_without_ninja_gets_it() -> None:
    """NVSHMEM is built with nothing else."""
    tools = tuple(tool for tool in READY.tools if tool[0] != "ninja")
    made = steps.make_plan(request(), cluster(n001={"tools": tools}))
    (step,) = (step for step in made.steps if step.name == "build-deps")
    assert step.hosts == ("n001",)
    assert step.reason.found == "no ninja"
    assert "ninja-build" in step.env["PACKAGES"].split()


def test_prefix_is_not_in_the_digests() -> None:
    here = decisions.make_decisions(request(), cluster())
    text = "defaults prefix=/elsewhere\nn[001-002]\nlogin1 role=login\n"
    there = decisions.make_decisions(request(text), cluster())
    assert [entry.name for entry in here.entries] == [entry.name for entry in there.entries]
    assert here.record.prefix == PREFIX
    assert there.record.prefix == "/elsewhere"


def test_architectures_of_all_hosts_are_built() -> None:
    blackwell = tuple(changed(gpu, {"capability": "10.0"}) for gpu in READY.gpus)
    choice = decisions.make_decisions(request(), cluster(n002={"gpus": blackwell}))
    assert choice.record.archs == ("9.0", "10.0")


def external(**fields: str) -> Python:
    return Python(
        "/opt/venv/bin/python",
        "3.12.3",
        "cpython-312-x86_64-linux-gnu",
        "2.11.0+cu130",
        "70d99e9",
        "13.0",
        "1",
        **fields,
    )


def with_external(setuptools: str = "81.0.0", numpy: str = "2.4.6") -> dict[str, Any]:
    packages = (("numpy", numpy), ("setuptools", setuptools))
    return {"external_python": external(), "external_packages": tuple(pair for pair in packages if pair[1])}


@pytest.mark.parametrize(
    ("packages", "said"),
    [
        ({"setuptools": ""}, "needs setuptools, which .* found setuptools none, wanted setuptools > 0. Try: "),
        (
            {"setuptools": "82.0.1"},
            "setuptools before 82 only .* found setuptools 82.0.1, torch 2.11.0.*, wanted setuptools < 82. Try: ",
        ),
        ({"numpy": ""}, "DeepEP's tests import numpy — found no numpy, wanted numpy. Try: "),
    ],
)
def test_what_an_external_python_lacks_is_named_with_the_command_that_brings_it(
    packages: dict[str, str], said: str
) -> None:
    toolkit = changed(READY.toolkits[0], {"version": "13.0.88"})
    facts = cluster(n001={**with_external(**packages), "toolkits": (toolkit,)}, n002=with_external())
    with pytest.raises(Trouble) as caught:
        decisions.make_decisions(request(stack="v1-cu13", external_python="/opt/venv/bin/python"), facts)
    assert len(caught.value.problems) == 1
    assert re.search(f"{said}/opt/venv/bin/python -m pip install 'setuptools<82' numpy", str(caught.value))


CUDA13 = (changed(READY.toolkits[0], {"version": "13.0.88"}),)
NVIDIA = "/opt/venv/lib/python3.12/site-packages/nvidia"


def with_torch(nccl: str = "2.30.7", nvshmem: str = "3.4.5", folder: str = NVIDIA) -> dict[str, Any]:
    """Return the changes of a host whose external Python has a torch that brings these ("" for none)."""
    libraries = tuple(
        TorchLibrary(kind, f"nvidia-{kind}-cu13", version, f"{folder}/{kind}")
        for kind, version in (("nccl", nccl), ("nvshmem", nvshmem))
        if version
    )
    return {**with_external("80.10.2"), "external_libraries": libraries, "toolkits": CUDA13}


def v2_request(**more: Any) -> PlanRequest:
    return request(stack="v2-vllm", external_python="/opt/venv/bin/python", **more)


def test_v2_joins_an_external_python_whose_torch_brings_a_new_nccl() -> None:
    choice = decisions.make_decisions(v2_request(), cluster(n001=with_torch(), n002=with_torch()))
    record = choice.record
    assert [entry.kind for entry in choice.entries] == ["toolkit", "deepep"]
    assert record.toolkit == choice.entries[0].name
    assert (record.nccl, record.torch_nccl, record.own_nccl) == ("2.30.7", f"{NVIDIA}/nccl", "")
    assert (record.nvshmem, record.torch_nvshmem, record.nvshmem_version) == ("", f"{NVIDIA}/nvshmem", "3.4.5")
    assert not [note for note in choice.notes if "--nccl" in note]


def test_an_nccl_of_ours_beside_an_external_torch_is_an_entry_with_a_warning() -> None:
    facts = cluster(n001=with_torch("2.28.9"), n002=with_torch("2.28.9"))
    choice = decisions.make_decisions(v2_request(own_nccl=True), facts)
    nccl, _, deepep = choice.entries
    assert deepep.needs == (nccl.name,)
    record = choice.record
    assert (record.nccl, record.torch_nccl, record.own_nccl) == ("2.30.7", "", nccl.name)
    (note,) = [note for note in choice.notes if note.startswith("--nccl=own: ")]
    assert "has NCCL 2.30.7 in place of the 2.28.9 that its torch was made with" in note


@pytest.mark.parametrize(
    ("first", "second", "more", "said"),
    [
        (
            with_torch("2.28.9"),
            with_torch("2.28.9"),
            {},
            "NCCL 2.28.9 of the external Python.* a torch of 2.14 or newer",
        ),
        (
            with_torch(""),
            with_torch(""),
            {},
            (
                "headers and library — found no wheel of NCCL beside torch, wanted nvidia-nccl-cu13. Try: a torch from "
                "PyPI, which brings nvidia-nccl-cu13, or --nccl=own, the NCCL 2.30.7 of the lock"
            ),
        ),
        (with_torch("", nvshmem=""), with_torch(), {"own_nccl": True}, "found no wheel of NVSHMEM beside torch"),
        (
            with_torch(),
            with_torch("2.31.2"),
            {},
            "n002: the NCCL of the external Python differs between hosts — found 2.31.2 in",
        ),
        (with_torch(), with_torch(folder="/srv/nvidia"), {}, "NVSHMEM of the external Python differs between hosts"),
    ],
)
def test_what_keeps_v2_from_an_external_python(
    first: dict[str, Any], second: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(Trouble) as caught:
        decisions.make_decisions(v2_request(**more), cluster(n001=first, n002=second))
    assert re.search(said, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("stack", "python", "said"),
    [
        ("v1-cu13", "/opt/venv/bin/python", "--nccl=own: is for stacks of DeepEP V2 — found stack v1-cu13"),
        ("v2", "", "--nccl=own: is for --python: the stack's own Python has the lock's NCCL anyway"),
    ],
)
def test_an_nccl_of_ours_is_refused_where_it_means_nothing(stack: str, python: str, said: str) -> None:
    facts = cluster(n001=with_torch(), n002=with_torch())
    with pytest.raises(Trouble, match=said):
        decisions.make_decisions(request(stack=stack, external_python=python, own_nccl=True), facts)


def test_external_python_needs_no_wheels_and_names_misfits() -> None:
    toolkit = changed(READY.toolkits[0], {"version": "13.0.88"})
    facts = cluster(n001={**with_external(), "toolkits": (toolkit,)}, n002=with_external())
    wanted = request(stack="v1-cu13", external_python="/opt/venv/bin/python")
    choice = decisions.make_decisions(wanted, facts)
    assert choice.wheels == ()
    assert [entry.kind for entry in choice.entries] == ["gdrcopy", "nvshmem", "deepep"]
    assert choice.record.external_python == "/opt/venv/bin/python"
    with pytest.raises(Trouble, match="torch's CUDA major does not fit the stack"):
        decisions.make_decisions(request(external_python="/opt/venv/bin/python"), facts)
    facts["n002"] = changed(facts["n002"], {"external_python": external(problem="no torch in it")})
    with pytest.raises(Trouble, match="n002: --python=/opt/venv/bin/python cannot be used — found no torch in it"):
        decisions.make_decisions(wanted, facts)


@pytest.mark.parametrize(
    ("changes", "local", "said"),
    [
        ({"default_route": True}, " connection=local", ["no sshd on n001: not needed with connection=local"]),
        ({"default_route": True, "tools": (("sshd", ""),)}, " connection=local", []),
        ({"default_route": True}, "", []),
        (
            {},
            "",
            ["no way out of the local network on n001: sources and wheels come from --mirror or through this machine"],
        ),
        (
            {"modules.kind": "none", "slurm": Slurm()},
            " connection=local",
            [
                "no Slurm: tests run with `bash` on one node, `sbatch` is not checked",
                "no module system on n001: load with `. /p/current/env-v1.sh` there",
                "no way out of the local network on n001: sources and wheels come from --mirror",
                "no sshd on n001: not needed with connection=local",
            ],
        ),
    ],
)
def test_what_is_not_there_and_not_needed_is_said_once(changes: dict[str, Any], local: str, said: list[str]) -> None:
    inventory = request(f"defaults prefix=/p{local}\nn001\n").inventory
    assert list(absences("/p/current/env-v1.sh", "n001", inventory, {"n001": changed(READY, changes)})) == said


RESERVED = f"defaults prefix={PREFIX} sbatch_args='--requeue --reservation=acceptance'\nn[001-002]\nlogin1 role=login\n"
DRAINED = {"slurm.state": "IDLE+DRAIN", "prepared": Machine(slurm_reason="fans [root@2026-11-20T10:00:00]")}


def test_nodes_in_the_reservation_that_jobs_name_are_built_on() -> None:
    facts = cluster(n001={"slurm.state": "IDLE+DRAIN+RESERVED"}, n002={"slurm.state": "IDLE+MAINTENANCE+RESERVED"})
    assert decisions.make_decisions(request(RESERVED), facts).build_host == "n002"
    with pytest.raises(Trouble) as caught:
        decisions.make_decisions(
            request(), cluster(n001={"slurm.state": "IDLE+RESERVED"}, n002={"slurm.state": "IDLE+RESERVED"})
        )
    assert "Try: sbatch_args=--reservation=NAME on a defaults line" in str(caught.value)


def test_a_node_that_slurm_starts_nothing_on_is_not_waited_for() -> None:
    for flag in ("leave", "use"):
        with pytest.raises(Trouble) as caught:
            decisions.make_decisions(request(on_busy_host=flag), cluster(n001=DRAINED, n002=DRAINED))
        found = "n[001-002] (2): Slurm starts no jobs there, so nothing can be built — found idle+drain in Slurm: fans"
        assert str(caught.value).startswith(found)
        assert "Try: scontrol update nodename=n[001-002] state=resume" in str(caught.value)
        assert "--on-busy-host" not in str(caught.value)
    assert (
        decisions.make_decisions(
            request(on_busy_host="use"), cluster(n001=DRAINED, n002={"slurm.jobs": ("7",)})
        ).build_host
        == "n002"
    )
    named = request(f"defaults prefix={PREFIX} build_host=n001\nn[001-002]\nlogin1 role=login\n")
    with pytest.raises(Trouble, match="nothing can be built on this build_host"):
        steps.make_plan(named, cluster(n001=DRAINED))
    assert steps.make_plan(named, built(cluster(n001=DRAINED))).steps == (), (
        "where nothing is to be built, its state is nothing to us"
    )


def test_another_stack_is_added_beside_the_first() -> None:
    facts = built(cluster(n001=with_external(), n002=with_external()))
    toolkit = changed(READY.toolkits[0], {"version": "13.0.88"})
    facts = {name: changed(seen, {"toolkits": (toolkit,)}) for name, seen in facts.items()}
    offer = decisions.make_decisions(request(stack="v1-cu13", external_python="/opt/venv/bin/python"), facts).offer
    assert set(offer.stacks) == {"v1", "v1-cu13"}
    assert offer.default_stack == "v1"


def test_a_change_of_deepeps_pin_builds_deepep_alone() -> None:
    """In every stack; what other stacks have of it stays as it is."""
    facts = built(cluster())
    wanted = request()
    name = wanted.stack.deepep
    source = replace(wanted.lock.sources[name], rev="1" * 40, hash=f"sha256-{'A' * 43}=")
    moved = replace(wanted, lock=replace(wanted.lock, sources={**wanted.lock.sources, name: source}))
    made = steps.make_plan(moved, facts)
    assert [named(step).split()[0] for step in made.of_kind("build")] == ["deepep"]
    assert made.download_bytes == 0
    before = decisions.make_decisions(wanted, facts).entries
    assert [one.name == other.name for one, other in zip(before, made.choice.entries, strict=True)] == [
        entry.kind != "deepep" for entry in before
    ]


def test_what_two_stacks_have_in_common_is_built_once() -> None:
    facts = built(cluster())
    made = steps.make_plan(request(stack="v1-wheel"), facts)
    first = {entry.name for entry in decisions.make_decisions(request(), facts).entries}
    common = first & {entry.name for entry in made.choice.entries}
    assert {name.split("-")[1] for name in common} == {"gdrcopy"}
    assert sorted(step.name for step in made.of_kind("build")) == sorted(
        entry.name for entry in made.choice.entries if entry.name not in common
    )


def with_toolkits(kits: dict[str, str]) -> dict[str, Any]:
    return {
        "toolkits": tuple(
            changed(READY.toolkits[0], {"path": f"/usr/local/{name}", "version": kits[name]}) for name in kits
        )
    }


@pytest.mark.parametrize("case", load("toolkits"), ids=lambda case: case["name"])
def test_toolkits(case: dict[str, Any]) -> None:
    facts = cluster() | {"n003": changed(READY, {"slurm.node": "n003"})}
    kits = {"n003": case["kits"].get("n001", {"cuda": "12.9.86"})} | case["kits"]
    facts = {name: changed(seen, with_toolkits(kits[name]) if name in kits else {}) for name, seen in facts.items()}
    wanted = request(f"defaults prefix={PREFIX}\nn[001-003]\nlogin1 role=login\n", stack=case["stack"])
    if "message" in case and wanted.stack.toolkit:
        check_own_compiler(decisions.make_decisions(wanted, facts))
    wanted = replace(wanted, stack=replace(wanted.stack, toolkit=""))
    if "message" in case:
        with pytest.raises(Trouble) as caught:
            decisions.make_decisions(wanted, facts)
        assert case["message"] in str(caught.value)
        assert len(caught.value.problems) == 1
        return
    choice = decisions.make_decisions(wanted, facts)
    assert (choice.toolkit.path, choice.record.cuda_home) == (case["chosen"], case["chosen"])
    assert case.get("note", "") in "\n".join(choice.notes)


def check_own_compiler(choice: decisions.Decisions) -> None:
    """Nodes get the compiler that came along where they would be refused without it: the entry is their CUDA_HOME."""
    record = choice.record
    assert (record.cuda_home, record.cuda) == ("", "13.2.86")
    assert dict(modulefiles.variables(record))["CUDA_HOME"] == f"{PREFIX}/store/{record.toolkit}"
    assert choice.toolkit.version == "13.0.88", "DeepEP itself is built with the build host's"
    (note,) = [note for note in choice.notes if note.startswith("CUDA 13.2.86, which comes along, compiles kernels")]
    assert "DeepEP V2 compiles kernels on every node, and this toolkit is not there" in note


def v25_request(**changes: Any) -> PlanRequest:
    """Return what is asked of a stack of V2.5, in place of V2."""
    asked = request(stack="v2")
    sources = {**asked.lock.sources, "deepep-v2": replace(asked.lock.sources["deepep-v2"], version="2.5.0")}
    name = asked.stack.nccl_wheel
    wheels = {
        target: tuple(replace(wheel, version="2.32.3") if wheel.name == name else wheel for wheel in closure)
        for target, closure in asked.stack.wheels.items()
    }
    return replace(
        asked, lock=replace(asked.lock, sources=sources), stack=replace(asked.stack, wheels=wheels, **changes)
    )


def test_v25_takes_the_compiler_that_comes_along_where_the_hosts_is_too_old() -> None:
    facts = cluster(n001={"toolkits": CUDA13}, n002={"toolkits": CUDA13})
    choice = decisions.make_decisions(v25_request(), facts)
    assert (choice.record.cuda_home, choice.record.cuda) == ("", "13.2.86")
    assert choice.entries[-1].env["KERNEL_NVCC"] == "13.2.86"
    assert "with nvcc 13.1 or newer" in "\n".join(choice.notes)
    with pytest.raises(
        Trouble, match=r"DeepEP V2\.5 compiles all of its kernels on the nodes, with nvcc 13\.1 or newer"
    ):
        decisions.make_decisions(v25_request(toolkit=""), facts)
    newer = (changed(CUDA13[0], {"version": "13.2.51"}),)
    facts = cluster(n001={"toolkits": newer}, n002={"toolkits": newer})
    assert decisions.make_decisions(v25_request(), facts).record.cuda_home == "/usr/local/cuda"


def test_each_generation_of_deepep_gets_the_variables_that_it_reads() -> None:
    names = ("NVSHMEM_IBGDA_NIC_HANDLER", "EP_OVERRIDE_RDMA_SL", "EP_DEFAULT_RDMA_SL")
    inventory = parse_hosts_file(f"defaults prefix={PREFIX} profile=infiniband\nn[001-002]\n", "hosts.txt")

    def told(wanted: PlanRequest) -> list[str]:
        wanted = replace(wanted, inventory=inventory)
        environment = decisions.choose_network(wanted, cluster(), decisions.PreviousOffer()).environment
        return [name for name in names if name in environment]

    assert told(request()) == ["NVSHMEM_IBGDA_NIC_HANDLER"]
    assert told(request(stack="v2")) == ["NVSHMEM_IBGDA_NIC_HANDLER", "EP_OVERRIDE_RDMA_SL"]
    assert told(v25_request()) == ["EP_DEFAULT_RDMA_SL"]


def test_a_run_that_sees_a_part_of_the_hosts_keeps_the_path_that_all_compile_with() -> None:
    both, other = (
        with_toolkits({"cuda": "13.0.88", "cuda-13.0": "13.0.88"}),
        with_toolkits({"cuda": "12.9.86", "cuda-13.0": "13.0.88"}),
    )
    facts, wanted = cluster(n001=both, n002=other), request(stack="v2")
    wanted = replace(wanted, stack=replace(wanted.stack, toolkit=""))
    offer = decisions.make_decisions(wanted, facts).offer
    manifest = modulefiles.manifest(
        offer, generation=1, created="2026-01-01T00:00:00Z", by="root", lock_digest="0", hosts=tuple(facts)
    )
    part = {name: changed(facts[name], {"prefix.manifest": manifest}) for name in ("n001", "login1")}
    assert decisions.make_decisions(wanted, part).toolkit.path == "/usr/local/cuda-13.0"
    part["n001"] = changed(part["n001"], with_toolkits({"cuda": "13.0.88"}))
    with pytest.raises(
        Trouble, match=r"wanted CUDA 13 in /usr/local/cuda-13\.0, as the hosts have it that this run does not see"
    ):
        decisions.make_decisions(wanted, part)


def test_slurm_host_is_the_login_host_where_it_has_a_client() -> None:
    assert decisions.make_decisions(request(), cluster()).slurm_host == "login1"
    assert decisions.make_decisions(request(control_has_slurm=True), cluster()).slurm_host == THIS_MACHINE.name
    named_host = request(f"defaults prefix={PREFIX} slurm_host=n002\nn[001-002]\nlogin1 role=login\n")
    assert decisions.make_decisions(named_host, cluster()).slurm_host == "n002"


def test_a_node_of_a_slurm_that_does_not_answer_is_not_built_on() -> None:
    made = steps.make_plan(
        request(), cluster(n001={"slurm": Slurm(version="22.05.8"), "prepared": Machine(slurmd_memlock="unlimited")})
    )
    assert made.choice.build_host == "n002"
    assert (
        "n001 is busy (slurmd runs there, but Slurm does not answer, so its jobs cannot be seen) and is left alone"
        in made.notes
    )


@pytest.mark.parametrize(
    ("slurm", "why"),
    [
        (Slurm(slurmd=True), "slurmd runs there, but Slurm's clients are not found, so its jobs cannot be seen"),
        (
            Slurm(version="24.05.3", slurmd=True),
            "slurmd runs there, but Slurm does not answer, so its jobs cannot be seen",
        ),
        (
            Slurm(True, "24.05.3", slurmd=True),
            "slurmd runs there, but Slurm knows no node of that name, so its jobs cannot be seen",
        ),
        (Slurm(True, "24.05.3", node="n001", state="IDLE", slurmd=True), ""),
        (Slurm(), ""),
    ],
)
def test_a_host_of_slurm_is_free_by_slurms_word_alone(slurm: Slurm, why: str) -> None:
    assert decisions.busy_with(changed(READY, {"slurm": slurm})) == why
