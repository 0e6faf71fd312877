"""How far a host is prepared: the fact script on constructed machines, the parser on odd and damaged lines."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory import facts, machine, survey
from deepep_bootstrap.inventory.facts import parse_facts
from deepep_bootstrap.inventory.forms import FACTS
from tests.support.facts import ROOT, SHELLS, Machine, recipes, run_script

CASES = ROOT / "tests" / "cases" / "inventory" / "machine"
TREES = sorted((CASES / "trees").glob("*.toml"))


def prepared(*lines: str) -> machine.Machine:
    """Return what the parser makes of an answer with these lines."""
    return parse_facts("\n".join(["facts=1", *lines, "end=1", ""]), "h").prepared


def seen_on(folder: Path, data: dict[str, Any], shell: str = "dash") -> machine.Machine:
    """Return what the fact script says of a constructed machine."""
    made = Machine(folder, data)
    return parse_facts(
        run_script(shell, "/nowhere/deepep", env={**made.env, "OUTPUTS": str(CASES / "outputs")}), "test"
    ).prepared


def read_tree(path: Path) -> dict[str, Any]:
    return tomlkit.parse(path.read_text(encoding="utf-8")).unwrap()


# --- the script on constructed machines ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("path", "shell"),
    [
        (path, shell)
        for path in TREES
        for shell in (SHELLS if path.stem in ("proprietary", "mixed-verbs") else ["dash"])
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else value,
)
def test_constructed_machine(path: Path, shell: str, tmp_path: Path) -> None:
    got = json.loads(json.dumps(msgspec.to_builtins(seen_on(tmp_path / "machine", read_tree(path), shell))))
    assert got.pop("memlock") == session_memlock(shell)
    own = {"page_kib": os.sysconf("SC_PAGE_SIZE") // 1024}
    assert got == own | json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("shell", SHELLS)
def test_a_driver_that_hangs_is_asked_once_and_told(shell: str, tmp_path: Path) -> None:
    # What waits for a hung driver outlives KILL and keeps its output open: here, a process that does so for a while.
    stuck = 'echo "$*" >>"$CALLS"\nsetsid sh -c "sleep 6; : >$CALLS.end" &\nexec sleep 6\n'
    hasty = 'seconds=$3; shift 3; exec /usr/bin/timeout -k 0.05 "0.$seconds" "$@"\n'
    made = Machine(tmp_path / "machine", {"programs": {"bin/nvidia-smi": stuck, "bin/timeout": hasty}})
    calls = tmp_path / "calls"
    seen = parse_facts(run_script(shell, "/nowhere/deepep", env={**made.env, "CALLS": str(calls)}), "test")
    assert str(seen.gpu_problem).startswith("nvidia-smi ends with code 124")
    assert not calls.with_suffix(".end").exists(), "the script waited for what nobody can end"
    assert sorted(line.partition("=")[0] for line in calls.read_text().splitlines()) == [
        "--query-compute-apps",
        *["--query-gpu"] * 2,
        "topo -m",
    ]


def test_the_limits_of_questions_in_a_row_are_less_than_the_engine_waits() -> None:
    texts = "\n".join(text for name, text in recipes().items() if name.startswith("facts"))
    bodies = dict(re.findall(r"^(\w+)\(\) \{(.*?)^\}", texts, re.MULTILINE | re.DOTALL))

    def seconds(name: str) -> int:
        own = [int(number) + 1 for number in re.findall(r"\blimit (\d+)", bodies[name])]
        asked = [int(number) + 3 for number in re.findall(r"\bask_gpus (\d+)", bodies[name])]
        return sum(own + asked)

    assert (seconds("probe_nvswitch"), seconds("probe_prefix")) == (41, 12), (
        "nothing was read, or the limits are others"
    )
    assert (
        max(seconds(name) for name in bodies if "gpu" in name or "nv" in name) + seconds("probe_prefix")
        < survey.FACTS_TIMEOUT
    )


def session_memlock(shell: str) -> str:
    return subprocess.run(
        [*SHELLS[shell], "-c", "ulimit -l"], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("shell", SHELLS)
def test_the_limit_of_the_session_is_in_kib(shell: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["prlimit", "--memlock=65536:65536", *SHELLS[shell], "-s", "/nowhere/deepep"],
        input=facts.facts_script(recipes()),
        env=Machine(tmp_path / "m", {}).env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert parse_facts(done.stdout, "h").prepared.memlock == "64"


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("files", "ofed"),
    [
        ({}, ""),
        ({"version": "25.10-1.7.1", "taint": "OE"}, "25.10-1.7.1"),
        ({"taint": "O"}, "23.10-3.2.2.0"),  # the module says nothing, ofed_info does
        ({"version": "5.0-0", "taint": ""}, ""),  # a kernel of 2020 with a version for its own driver
        ({"version": "6.0-0", "taint": "E"}, ""),  # unsigned, but built with the kernel
        ({"version": "5.0-0"}, ""),
        ({"version": "24.10-2.1.8"}, "24.10-2.1.8"),
    ],
)
def test_which_mlx5_core_is_loaded(files: dict[str, str], ofed: str, tmp_path: Path) -> None:
    data = {
        "files": {f"sys/module/mlx5_core/{name}": f"{text}\n" for name, text in files.items()},
        "programs": {"bin/ofed_info": "echo MLNX_OFED_LINUX-23.10-3.2.2.0:\n"},
    }
    assert seen_on(tmp_path, data).ofed == ofed


@pytest.mark.usefixtures("programs")
def test_this_machine() -> None:
    """What can be asked in another way on whichever machine runs the test agrees."""
    seen = parse_facts(run_script("dash", "/nowhere/deepep"), "here").prepared
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    assert 0 <= uptime - seen.uptime_s < 30
    room = os.statvfs("/dev/shm")
    assert seen.shm_mib == room.f_blocks * room.f_frsize // 2**20
    for library in seen.verbs:
        assert f"IBVERBS_PRIVATE_{library.abi}".encode() in Path(library.path).read_bytes()
        owner = subprocess.run(["dpkg-query", "-S", library.path], capture_output=True, text=True, check=False).stdout
        assert owner.partition(":")[0] == library.package


NETWORK = """
ip link set lo up && ip link add port1 type veth peer name port2 && ip link set port1 up && ip link set port2 up &&
    ip addr add 10.1.2.3/24 dev port1 && ip addr add 10.200.0.9/16 dev port2 && ip addr add 172.20.0.9/32 dev port1 &&
    ip -6 addr add 2001:db8::9/64 dev port1 nodad && ip route add default via 10.1.2.1 metric 50
"""


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("with_ip", [True, False])
def test_a_network_as_ip_and_as_the_kernel_show_it(with_ip: bool, tmp_path: Path) -> None:
    (tmp_path / "facts").write_text(facts.facts_script(recipes()), encoding="utf-8")
    without = tmp_path / "bin"
    without.mkdir()
    (without / "ip").write_text("#!/bin/sh\nexit 127\n", encoding="ascii")
    (without / "ip").chmod(0o755)
    hidden = "" if with_ip else f"PATH={without}:$PATH; "
    command = f"{NETWORK.strip()} && {{ {hidden} exec dash {tmp_path}/facts /nowhere/deepep; }}"
    done = subprocess.run(["unshare", "-rn", "sh", "-c", command], capture_output=True, text=True, check=True)
    seen = parse_facts(done.stdout, "here").prepared
    found = {
        ("port1", "10.1.2.3/24"),
        ("port2", "10.200.0.9/16"),
        ("port1", "172.20.0.9/32"),
        ("port1", "2001:db8::9/64"),
    }
    assert {(a.interface, a.cidr) for a in seen.addresses} == found
    assert {(r.destination, r.interface, r.metric) for r in seen.routes if ":" not in r.destination} == {
        ("0.0.0.0/0", "port1", 50),
        ("10.1.2.0/24", "port1", 0),
        ("10.200.0.0/16", "port2", 0),
    }


# --- the parser ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "memlock=lots",
        "slurmd_memlock=64 KiB",
        "uptime=soon",
        "shm_mib=1.5",
        "mtu=eth0\tbig",
        "gdrdrv_major=0x1f",
        "gdrdrv_node=xyz",
        "reached=1\t0\tNV18",
        "reached=0\t0\tX",
        "reached=-1\t0\tNV18",
        "reached=a\tb\tNV18",
        "device=gpu\t0000:18:00.0",
        "resolved=nowhere",
        "address=eth0\t300.1.1.1/24",
        "address=eth0\t10.0.0.1/33",
        "route=4\tnonsense dev eth0",
        "route=4\tdefault dev eth0 metric high",
        "local_address=10.1",
        "kernel_address=eth0\tzz\t40",
        "kernel_address=eth0\tfd00\tff",
        "kernel_route=eth0\t0\t00000000\t0",
        "kernel_route=eth0\t0000000000\t00000000\t0",
        "kernel_route=eth0\t00000000\tFF00FF00\t0",
    ],
)
def test_what_the_script_does_not_print_is_trouble(line: str) -> None:
    with pytest.raises(Trouble) as caught:
        prepared(line)
    assert str(caught.value).startswith("h: ")


@pytest.mark.parametrize(
    ("module", "flavor", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)  ",
            "open",
            "580.159.04",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.4.0  Release Build", "open", "540.4.0"),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82  Thu Oct 19 18:56:32 UTC 2023",
            "proprietary",
            "470.82",
        ),
        ("", "", ""),
        ("something else", "", ""),
    ],
)
def test_flavor_of_the_driver(module: str, flavor: str, version: str) -> None:
    seen = prepared(f"nvidia_module={module}")
    assert (seen.nvidia_flavor, seen.nvidia_version) == (flavor, version)


@pytest.mark.parametrize(
    ("flavor", "kernel", "dmabuf"),
    [
        ("Open", "5.12.0", True),
        ("Open", "6.8.0-1033-gke", True),
        ("Open", "5.11.22-9-pve", False),
        ("Open", "4.18.0-553.el8.x86_64", False),
        ("Open", "", False),
        ("x86_64", "6.8.0", False),
    ],
)
def test_dma_bufs_need_the_open_driver_and_a_kernel_that_registers_them(flavor: str, kernel: str, dmabuf: bool) -> None:
    module = f"NVRM version: NVIDIA UNIX {flavor} Kernel Module  580.1.2"
    assert prepared(f"kernel={kernel}", f"nvidia_module={module}").dmabuf is dmabuf


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], ""),
        (["Completed\tSuccess"] * 8, "Completed/Success"),
        (["Completed\tSuccess", "Completed\tFailure"], "Completed/Failure, Completed/Success"),
        (["In Progress\tN/A"], "In Progress"),
        (["N/A\tN/A", "[N/A]\t[N/A]", "\t"], ""),
    ],
)
def test_what_gpus_say_of_their_fabric(rows: list[str], said: str) -> None:
    assert prepared(*(f"fabric_state={row}" for row in rows)).fabric_state == said


NETWORKS = st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 32)).map(
    lambda pair: ipaddress.IPv4Network(pair, strict=False)
)


@given(st.lists(st.tuples(NETWORKS, st.sampled_from(["eth0", "ib0", "ib1"])), max_size=6))
def test_routes_of_the_kernel_table_are_those_of_ip(pairs: list[tuple[ipaddress.IPv4Network, str]]) -> None:
    def number(address: ipaddress.IPv4Address) -> str:
        return address.packed[::-1].hex().upper()

    table = [f"kernel_route={name}\t{number(net.network_address)}\t{number(net.netmask)}\t7" for net, name in pairs]
    by_ip = [f"route=4\t{net} dev {name} proto static metric 7 " for net, name in pairs]
    assert prepared(*table).routes == prepared(*by_ip).routes


@given(st.lists(NETWORKS, min_size=1, max_size=6, unique=True), st.data())
def test_an_address_stands_on_the_interface_of_the_narrowest_network_around_it(
    networks: list[ipaddress.IPv4Network], data: st.DataObject
) -> None:
    chosen = data.draw(st.sampled_from(networks))
    address = chosen[data.draw(st.integers(0, chosen.num_addresses - 1))]
    lines = [f"route=4\t{net} dev port{at} " for at, net in enumerate(networks)]
    seen = prepared(*lines, f"local_address={address}").addresses
    if address.is_loopback or address.is_link_local:
        assert seen == ()
    else:
        around = [(net.prefixlen, f"port{at}") for at, net in enumerate(networks) if address in net]
        assert [(a.interface, a.cidr) for a in seen] == [(max(around)[1], f"{address}/{max(around)[0]}")]


LINES = st.sampled_from([*FACTS.single.items(), *FACTS.many.items()]).flatmap(
    lambda form: st.lists(
        st.sampled_from(["", "0", "7", "ff", "eth0", "10.0.0.1/8", "::1", "default dev x", "unlimited"])
        | st.text(max_size=8),
        min_size=len(form[1]),
        max_size=len(form[1]),
    ).map(lambda fields: f"{form[0]}={chr(9).join(fields)}")
)


@given(st.lists(LINES, max_size=8))
def test_any_lines_are_facts_or_trouble(lines: list[str]) -> None:
    with contextlib.suppress(Trouble):
        seen = prepared(*lines)
        assert all(pair.gpu < pair.other for pair in seen.nvlinks)
