"""Which host gets which recipe, and the one script that asks all of them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from deepep_bootstrap.core import errors
from deepep_bootstrap.inventory.facts import Facts, Python, Rdma, Toolkit
from deepep_bootstrap.inventory.machine import Machine
from deepep_bootstrap.plan import host_recipes, steps
from deepep_bootstrap.plan.host_recipes import Check, Preparation
from tests.support.plan import READY, changed, cluster, request

NICS = {"prepared": Machine(mellanox_devices=8)}
MLX5 = {"rdma": tuple(Rdma(f"mlx5_{index}", "mlx5_core", "", 0, "") for index in range(8)), **NICS}
INBOX = {"rdma": tuple(Rdma(f"rocep{index}s0", "mlx5_core", "", 0, "") for index in range(8)), **NICS}
ALWAYS = ["driver-options", "peer-memory", "rdma-userspace", "limits"]

CASES: dict[str, tuple[Mapping[str, Any], list[str]]] = {
    "GPUs and no NIC: nothing": ({}, []),
    "everything there": (MLX5, ALWAYS),
    "names of the kernel's own driver": (INBOX, ["doca-ofed", *ALWAYS]),
    "NICs without RDMA devices": (NICS, ["doca-ofed", *ALWAYS]),
    "GPUs without a driver": ({"gpus": (), "prepared": Machine(gpu_devices=8)}, ["nvidia-driver"]),
    "NVSwitches": ({"prepared": Machine(gpu_devices=8, nvswitches=4)}, ["fabric-manager"]),
    "NVSwitches elsewhere, and GPUs that wait for them": (
        {"prepared": Machine(gpu_devices=8, fabric_state="In Progress")},
        ["fabric-manager"],
    ),
    "NVSwitches elsewhere, joined": ({"prepared": Machine(gpu_devices=8, fabric_state="Completed/Success")}, []),
    "NVSwitches and no driver": ({"gpus": (), "prepared": Machine(gpu_devices=8, nvswitches=4)}, ["nvidia-driver"]),
    "no toolkit of the stack's CUDA": (
        {"toolkits": (Toolkit("/usr/local/cuda", "13.0.88", True, True),)},
        ["cuda-toolkit"],
    ),
    "no Python with wheels": ({"pythons": (Python("/usr/bin/python3.9", "3.9.18"),)}, ["python"]),
}


@pytest.mark.parametrize(("changes", "recipes"), CASES.values(), ids=CASES)
def test_a_host_gets_the_recipes_that_are_meant_for_it(changes: Mapping[str, Any], recipes: list[str]) -> None:
    facts = {name: changed(seen, changes) for name, seen in cluster().items() if name != "login1"} | {"login1": READY}
    found = host_recipes.wanted(request(), facts)
    assert {host: list(by_recipe) for host, by_recipe in found.items()} == {"n001": recipes, "n002": recipes}


@pytest.mark.parametrize(
    ("system", "package", "driver"),
    [
        (("ubuntu", "24.04"), "nvidia-fabricmanager-580", "nvidia-headless-580-server-open nvidia-utils-580-server"),
        (("debian", "12"), "nvidia-fabricmanager", "nvidia-open-580"),
        (("rocky", "9.4"), "nvidia-fabricmanager", "@nvidia-driver:580-open nvidia-open"),
        (("other", "1"), "", ""),
    ],
)
def test_the_fabric_manager_is_told_which_driver_is_ours(system: tuple[str, str], package: str, driver: str) -> None:
    changes = {"prepared": Machine(nvswitches=4), "os_id": system[0], "os_version": system[1]}
    env = host_recipes.wanted(request(), cluster(n001=changes))["n001"]["fabric-manager"]
    assert (env.get("PACKAGES", ""), env["DRIVER_PACKAGES"], env["NVSWITCHES"]) == (package, driver, "4")
    if system[0] in {"debian", "rocky"}:
        assert env["REPOSITORIES"].startswith("cuda https://developer.download.nvidia.com/")


def test_what_deepep_v2_asks_for_the_speed_of_a_nic_is_installed_for_it() -> None:
    v1, v2 = (
        host_recipes.wanted(request(stack=name), cluster(n001=MLX5))["n001"]["rdma-userspace"] for name in ("v1", "v2")
    )
    assert ("TOOLS" in v1, v2["TOOLS"]) == (False, "ibstat")
    for name, system in request().lock.systems.items():
        assert "infiniband-diags" in system.packages["rdma-userspace"], name


@pytest.mark.parametrize(("mib", "wanted"), [(64, "1024"), (1024, None), (1 << 19, None), (0, None)])
def test_small_shared_memory_is_to_grow(mib: int, wanted: str | None) -> None:
    facts = cluster(n001={**MLX5, "prepared": Machine(mellanox_devices=8, shm_mib=mib)})
    assert host_recipes.wanted(request(), facts)["n001"]["limits"].get("SHM_MIB") == wanted


def test_a_host_that_builds_gets_a_toolkit_as_new_as_the_rules_ask() -> None:
    gpus = tuple(changed(gpu, {"capability": "10.0"}) for gpu in READY.gpus)
    old = changed(READY.toolkits[0], {"version": "12.6.85"})
    newer = changed(old, {"path": "/usr/local/cuda-12.8", "version": "12.8.93"})
    facts = cluster(n001={"gpus": gpus, "toolkits": (old,)}, n002={"gpus": gpus, "toolkits": (old,)})
    found = host_recipes.wanted(request(), facts)
    assert list(found["n001"]) == ["cuda-toolkit"]
    assert found["n001"]["cuda-toolkit"]["CUDA_FLOOR"] == "12.8"
    assert found["n002"] == {}, "V1 compiles nothing where it is not built"
    elsewhere = request("defaults prefix=/shared/deepep build_host=n002\nn[001-002]\n")
    assert {host: list(recipes) for host, recipes in host_recipes.wanted(elsewhere, facts).items()} == {
        "n001": [],
        "n002": ["cuda-toolkit"],
    }
    facts["n001"] = changed(facts["n001"], {"toolkits": (old, newer)})
    assert host_recipes.wanted(request(), facts) == {"n001": {}, "n002": {}}
    assert "CUDA_FLOOR" not in host_recipes.wanted(request(stack="v2"), facts)["n001"]["cuda-toolkit"], (
        "CUDA 13 is newer than any rule asks"
    )


def test_every_node_of_v25_gets_a_toolkit_that_compiles_its_kernels() -> None:
    asked = request(stack="v2")
    sources = {**asked.lock.sources, "deepep-v2": replace(asked.lock.sources["deepep-v2"], version="2.5.0")}
    stack = replace(asked.stack, needs={"gcc": "13", "nvcc": "13.1"}, toolkit="")
    asked = replace(asked, lock=replace(asked.lock, sources=sources), stack=stack)
    old = changed(READY.toolkits[0], {"version": "13.0.88"})
    facts = cluster(n001={"toolkits": (old,)}, n002={"toolkits": (old,)})
    for host, recipes in host_recipes.wanted(asked, facts).items():
        assert recipes["cuda-toolkit"]["CUDA_FLOOR"] == "13.1", host
        assert recipes["cuda-toolkit"]["PACKAGES"] == "cuda-toolkit-13-2=13.2.*", host
    newer = changed(old, {"path": "/usr/local/cuda-13.2", "version": "13.2.86"})
    facts = cluster(n001={"toolkits": (old, newer)}, n002={"toolkits": (old, newer)})
    assert host_recipes.wanted(asked, facts) == {"n001": {}, "n002": {}}
    along = replace(asked, stack=replace(stack, needs={"gcc": "13"}, toolkit="cuda-13_2"))
    facts = cluster(n001={"toolkits": (old,)}, n002={"toolkits": (old,)})
    assert host_recipes.wanted(along, facts) == {"n001": {}, "n002": {}}, "the compiler that comes along is new enough"


def test_a_profile_for_one_node_asks_for_nothing_of_rdma() -> None:
    facts = cluster(n001=MLX5, n002=MLX5)
    text = "defaults prefix=/shared/deepep profile=single-node\nn[001-002]\n"
    assert host_recipes.wanted(request(text), facts) == {"n001": {}, "n002": {}}


def test_the_cpu_handler_asks_for_the_kernel_module() -> None:
    wanted = request("defaults prefix=/shared/deepep profile=by-cpu\nn001\n")
    profile = 'title = "x"\nlink_layer = "Ethernet"\nhandler = "cpu"\n'
    wanted = changed(wanted, {"templates": {**wanted.templates, "profiles/by-cpu.toml": profile}})
    found = host_recipes.wanted(wanted, {"n001": changed(READY, MLX5)})["n001"]
    assert found["gdrdrv"]["GDRCOPY_VERSION"] == wanted.lock.sources["gdrcopy"].version


def test_skipped_recipes_are_not_even_asked() -> None:
    facts = cluster(n001=MLX5, n002=MLX5)
    assert list(host_recipes.wanted(request(skip=("limits", "driver-options")), facts)["n001"]) == [
        "peer-memory",
        "rdma-userspace",
    ]
    assert host_recipes.wanted(request(skip=("all",)), facts) == {}


RECIPES = {
    "host/lib/files.sh": "greet() { printf 'hello %s' \"$1\"; }",
    "host/lib/packages.sh": "",
    "host/lib/repositories.sh": "",
    "host/lib/keys.sh": "",
    "host/lib/kernel-modules.sh": "",
    "host/lib/hook.sh": "",
    "host/limits.sh": """
readonly X=1
main() {
    data state todo
    data found "$(greet "$NAME")"
    data wanted "$1"
    data needs reboot
}
main "$@"
""",
    "host/python.sh": "readonly X=2\nmain() { data state ok; data found 3.12; data wanted 3.12; data note 'a note'; "
    '}\nmain "$@"',
    "host/gdrdrv.sh": "main() { data state ok; die 'no such luck'; }\nmain \"$@\"",
    "host/peer-memory.sh": 'main() { false; data state ok; }\nmain "$@"',
    "host/doca-ofed.sh": "main() { echo 'talk where data belongs'; data state ok; }\nmain \"$@\"",
    "host/cuda-toolkit.sh": 'main() { data state perhaps; }\nmain "$@"',
}


def ask(*names: str) -> dict[str, Check]:
    texts = {**RECIPES, "lib.sh": request().recipes["lib.sh"]}
    inputs = {name: {"NAME": 'it\'s "$HOME"'} for name in names}
    done = subprocess.run(
        ["bash", "-c", host_recipes.check_script(texts, inputs)], capture_output=True, text=True, check=True
    )
    return host_recipes.parse_checks(done.stdout, done.stderr, names, "n001")


@pytest.mark.usefixtures("programs")
def test_one_script_asks_all_recipes_and_none_meets_another() -> None:
    said = ask("limits", "gdrdrv", "peer-memory", "doca-ofed", "cuda-toolkit", "python")
    assert said["limits"] == Check("limits", "todo", 'hello it\'s "$HOME"', "check", needs_reboot=True)
    assert said["python"] == Check("python", "ok", "3.12", "3.12", "a note")
    assert said["gdrdrv"] == Check("gdrdrv", "blocked", "its check failed", "an answer", "no such luck")
    assert (said["peer-memory"].state, said["peer-memory"].found) == ("blocked", "its check failed")
    assert "false" in said["peer-memory"].note
    assert (said["doca-ofed"].state, said["doca-ofed"].found) == ("blocked", "its check cannot be read")
    assert (said["cuda-toolkit"].state, said["cuda-toolkit"].found) == ("blocked", "its check cannot be read")
    assert "found 'perhaps', wanted ok or todo or reboot or stuck or blocked" in str(said["cuda-toolkit"].note)


def test_an_answer_that_was_cut_off_says_nothing() -> None:
    assert host_recipes.parse_checks("recipe=limits\nstate=ok\n", "", ["limits", "python"], "n001") == {
        name: Check(name, "blocked", "its check failed", "an answer", "the answer is cut off")
        for name in ("limits", "python")
    }


def prepared(facts: Mapping[str, Facts], **checks: Check) -> Preparation:
    return Preparation(
        {host: {check.recipe: {"A": "1"}} for host, check in checks.items()},
        {host: {c.recipe: c} for host, c in checks.items()},
    )


def test_steps_fold_over_hosts_and_what_needs_a_reboot_stands_apart() -> None:
    facts = cluster()
    todo = Check("limits", "todo", "8192 KiB", "unlimited")
    made = steps.make_plan(request(), facts, prepared(facts, n001=todo, n002=todo))
    assert [(step.kind, step.name, step.hosts) for step in made.steps][:2] == [
        ("prefix", "prefix", ("n001", "n002", "login1")),
        ("host", "limits", ("n001", "n002")),
    ]
    reboot = Check("driver-options", "todo", "0", "1", needs_reboot=True)
    written = Check("driver-options", "reboot", "0", "1")
    made = steps.make_plan(request(), facts, prepared(facts, n001=reboot, n002=written))
    assert [(step.kind, step.hosts) for step in made.of_kind("reboot")] == [("reboot", ("n001", "n002"))]


def test_what_cannot_be_decided_before_the_hosts_are_prepared_ends_with_their_preparation() -> None:
    facts = {name: changed(seen, {"toolkits": ()}) for name, seen in cluster().items()}
    todo = Check("cuda-toolkit", "todo", "none", "12.9")
    made = steps.make_plan(request(), facts, prepared(facts, n001=todo))
    assert [step.name for step in made.steps] == ["cuda-toolkit"]
    assert "no CUDA toolkit fits the stack" in made.undecided[0].what
    with pytest.raises(errors.Trouble, match="no CUDA toolkit"):
        _ = made.choice
    with pytest.raises(errors.Trouble, match="no CUDA toolkit"):
        steps.make_plan(request(), facts)


@pytest.mark.parametrize(
    ("state", "reason", "check", "resumed"),
    [
        ("IDLE+DRAIN", "deepep-bootstrap: x (run 7) [root@2026-11-21T03:48:17]", "ok", True),
        ("IDLE+DRAIN", "deepep-bootstrap: x (run 7) [root@2026-11-21T03:48:17]", "stuck", False),
        ("IDLE+DRAIN", "deepep-bootstrap: x (run 7) [root@2026-11-21T03:48:17]", "blocked", False),
        ("IDLE+DRAIN", "see deepep-bootstrap: x [joe@2026-11-21T03:48:17]", "ok", False),
        ("IDLE", "deepep-bootstrap: x [root@2026-11-21T03:48:17]", "ok", False),
    ],
)
def test_only_what_we_drained_and_what_needs_nothing_is_resumed(
    state: str, reason: str, check: str, *, resumed: bool
) -> None:
    facts = cluster(n001={"slurm.state": state, "prepared.slurm_reason": reason})
    made = steps.make_plan(request(), facts, prepared(facts, n001=Check("driver-options", check, "", "")))
    assert [step.hosts for step in made.of_kind(steps.RESUME)] == ([("n001",)] if resumed else [])


@pytest.mark.parametrize(
    ("reason", "skip", "resumed"),
    [
        ("came back without what was wanted: GPUs: found 7, wanted 9 as before", (), False),
        ("came back without what was wanted: GPUs: found 7, wanted 8 as before", (), True),
        ("came back without what was wanted: driver options: found 0, wanted 1", ("driver-options",), False),
        ("came back without what was wanted: driver options: found 0, wanted 1", ("python", "smoke"), True),
        ("came back without what was wanted: driver options: found 0, wanted 1", ("all",), False),
        ("did not come back within 30 min after its reboot", ("all",), False),
        ("did not come back within 30 min after its reboot", ("python",), False),  # it may have been for that
        ("did not come back within 30 min after its reboot", ("smoke",), True),
    ],
)
def test_a_node_is_resumed_when_what_it_was_drained_for_is_asked_and_mended(
    reason: str, skip: tuple[str, ...], *, resumed: bool
) -> None:
    facts = cluster(n001={"slurm.state": "IDLE+DRAIN", "prepared.slurm_reason": f"deepep-bootstrap: {reason} (run 7)"})
    checks = [] if skip else [Check("driver-options", "ok", "", "")]
    made = steps.make_plan(request(skip=skip), facts, prepared(facts, **({"n001": checks[0]} if checks else {})))
    assert [step.hosts for step in made.of_kind(steps.RESUME)] == ([("n001",)] if resumed else [])


def test_what_nobody_here_can_do_is_a_note_once_for_all_hosts() -> None:
    facts = cluster()
    blocked = Check("rdma-userspace", "blocked", "two libibverbs", "one", "remove one of them")
    made = steps.make_plan(request(), facts, prepared(facts, n001=blocked, n002=blocked))
    assert "n[001-002] (2): RDMA user space: found two libibverbs, wanted one. remove one of them" in made.notes
