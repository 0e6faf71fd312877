"""What a pod sees of its hardware: the same of the same machine as recipes/facts.sh, and the map that hosts get."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepep_bootstrap.inventory import nics
from deepep_bootstrap.inventory.facts import Facts, parse_facts
from deepep_bootstrap.kubernetes import image, in_pod, pod_facts
from tests.inventory.test_facts import plain
from tests.support.facts import CASES, Machine, read_tree_file, run_script
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("programs")
TREES = sorted(path.stem for path in (CASES / "trees").glob("*.toml"))
ROUTES = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"


def on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> pod_facts.Seen:
    """What a pod sees that has this machine's /sys and /proc."""
    monkeypatch.setenv("PATH", machine.env["PATH"])
    return pod_facts.look(str(machine.root))


@pytest.mark.parametrize("tree", TREES)
def test_the_same_facts_as_on_the_host(tree: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, read_tree_file(tree))
    on_host = plain(parse_facts(run_script("dash", "/nowhere", "", env=machine.env), "host"))
    seen = on(machine, monkeypatch)
    text = "\n".join([*pod_facts.lines(seen, "gpu-1", str(machine.root)), ""])
    in_pod_facts = plain(parse_facts(text, "gpu-1"))
    # Processes of other pods are not seen.
    own_gpus = [{**gpu, "processes": 0} for gpu in on_host["gpus"]]
    assert in_pod_facts["gpus"] == own_gpus
    for key in ("rdma", "nvidia_params"):
        assert in_pod_facts[key] == on_host[key], key
    assert in_pod_facts["hostname"] == "gpu-1"


@pytest.mark.parametrize("tree", TREES)
def test_the_map_is_that_of_the_host(tree: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, read_tree_file(tree))
    seen = on(machine, monkeypatch)
    facts: Facts = parse_facts(run_script("dash", "/nowhere", "", env=machine.env), "host")
    for link in ("Ethernet", "InfiniBand"):
        wanted = nics.assign_nics(facts.gpus, nics.sort_out(facts, link).used)
        found = pod_facts.settings(seen, link, str(machine.root))
        assert found.get(pod_facts.MAP, "") == ",".join(f"{gpu}:{nic}" for gpu, nic in wanted.items())
        assert found.get(pod_facts.NIC, "") == next((nic.name for nic in wanted.values()), "")
        index = nics.gid_index(wanted.values()) if wanted and link == "Ethernet" else None
        assert found.get("NVSHMEM_IB_GID_INDEX", "") == ("" if index is None else str(index))


def test_some_tree_has_a_map_of_eight() -> None:
    """So that the test above compares more than nothing."""
    assert any(len(read_tree_file(tree).get("gpus", [])) == 8 and read_tree_file(tree).get("nics") for tree in TREES)


@pytest.mark.parametrize(
    ("interfaces", "ways", "wanted"),
    [
        (("lo", "eth0"), ("eth0",), ""),
        (("lo", "eth0", "eth2", "eth3"), ("eth0",), "eth0"),
        (("lo", "eth0", "eth2"), (), ""),
        (("lo", "eth0", "eth2"), ("eth0", "eth2"), ""),
    ],
)
def test_ranks_meet_over_the_pods_own_network(
    interfaces: tuple[str, ...], ways: tuple[str, ...], wanted: str, tmp_path: Path
) -> None:
    for name in interfaces:
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
    rows = [f"{way}\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n" for way in ways]
    rows += ["eth0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"]
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/route").write_text(ROUTES + "".join(rows))
    assert pod_facts.interface(str(tmp_path)) == wanted


def test_gpus_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(pod_facts, "DRIVER_FOLDER", str(tmp_path))
    for bus, name in (("0000:9a:00.0", "NVIDIA B200"), ("0000:18:00.0", "NVIDIA B200")):
        folder = tmp_path / "proc/driver/nvidia/gpus" / bus
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 1\nBus Location: \t {bus}\n")
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module  580.95.05  x\n")
    seen = pod_facts.look(str(tmp_path))
    assert [(gpu.index, gpu.pci, gpu.name, gpu.driver) for gpu in seen.gpus] == [
        (0, "0000:18:00.0", "NVIDIA B200", "580.95.05"),
        (1, "0000:9a:00.0", "NVIDIA B200", "580.95.05"),
    ]
    parse_facts("\n".join(pod_facts.lines(seen, "a", str(tmp_path))), "a")


def test_counters_are_those_of_the_nodes_program() -> None:
    """Names of errors stand in both places: a shell script cannot be had in every image."""
    script = (ROOT / "env/programs/node.sh").read_text()
    listed = re.search(r"^readonly FAULTS=\((.*?)^\)", script, re.DOTALL | re.MULTILINE)
    assert listed is not None
    assert sorted(listed[1].split()) == sorted(name for names in pod_facts.COUNTED.values() for name in names)


def test_counters_have_the_form_of_a_run(tmp_path: Path) -> None:
    from deepep_bootstrap.testing.run_folder import parse_counters

    tree = next(tree for tree in TREES if read_tree_file(tree).get("nics"))
    machine = Machine(tmp_path, read_tree_file(tree))
    port = next((machine.root / "sys/class/infiniband").iterdir()).resolve() / "ports/1"
    for path, value in (
        ("counters/port_xmit_data", 10),
        ("counters/port_rcv_data", 20),
        ("hw_counters/packet_seq_err", 3),
    ):
        (port / path).parent.mkdir(exist_ok=True)
        (port / path).write_text(f"{value}\n")
    found = parse_counters("".join(f"{line}\n" for line in pod_facts.counters(5.0, str(machine.root))), "x")
    (counter,) = found.nics.values()
    assert (found.time, counter.sent, counter.received, counter.errors) == (5.0, 40, 80, {"packet_seq_err": 3})


ADOPT = """\
import json, sys
sys.path.insert(0, sys.argv[1])
import in_pod
module = in_pod.pod_facts()
seen = module.look(sys.argv[2])
print(json.dumps(module.settings(seen, "Ethernet", sys.argv[2])))
"""


def test_the_image_has_all_that_it_imports(tmp_path: Path) -> None:
    """With Python's own library alone, as in an image."""
    files = {image.PROGRAM: Path(in_pod.__file__).read_bytes(), **image.own_modules()}
    for path, data in files.items():
        (tmp_path / "image" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "image" / path).write_bytes(data)
    words = [sys.executable, "-I", "-S", "-c", ADOPT, str(tmp_path / "image"), str(tmp_path / "empty")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}


def test_what_a_pod_sets_wins_over_what_it_sees(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tree = next(
        tree for tree in TREES if len(read_tree_file(tree).get("gpus", [])) == 8 and read_tree_file(tree).get("nics")
    )
    machine = Machine(tmp_path, read_tree_file(tree))
    seen = on(machine, monkeypatch)
    monkeypatch.setattr(pod_facts, "look", lambda: seen)
    link = "InfiniBand" if "InfiniBand" in machine.data["nic"]["link_layer"] else "Ethernet"
    found = {"DEEPEP_LINK": link, pod_facts.MAP: "0:mine:1"}
    in_pod.adopt_network(found)
    assert found[pod_facts.MAP] == "0:mine:1"
    assert found[pod_facts.NIC]
    untouched = {"A": "1"}
    in_pod.adopt_network(untouched)
    assert untouched == {"A": "1"}
