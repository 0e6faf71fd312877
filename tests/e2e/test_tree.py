"""--tree with gateways that have ClusterShell: the same answers by another way, and over SSH for whoever did not answer so."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.e2e import Engine, interrupt, wait_until
from tests.support.lab import LiveLab, new_folder, open_lab
from tests.support.paths import ROOT

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]

GATEWAYS = ("n001", "n002")
BEHIND = ("n003", "n004", "n005", "n006", "n007", "n008")
SILENT, UNKNOWN = "n005", "n006"
CLUSTERSHELL = ROOT / ".venv" / "clustershell" / "usr" / "lib" / "python3" / "dist-packages" / "ClusterShell"
"""Debian's package, as tests/setup.sh unpacks it."""

PACKAGES = "/usr/lib/python3/dist-packages"
KNOW = "cp /shared/known_hosts /root/.ssh/known_hosts"

PASSING = ("memory_free_mib", "scratch_free_mib", "free_mib", "uptime_s")
"""Facts that differ from one look to the next."""


@pytest.fixture(scope="module")
def behind(namespaces: None) -> Iterator[LiveLab]:
    """Eight light hosts, of which two are gateways: with ClusterShell, a key, and known hosts of their own."""
    for live in open_lab(new_folder("tree"), light=len(GATEWAYS) + len(BEHIND)):
        shutil.copytree(CLUSTERSHELL, live.shared / "ClusterShell")
        for file in (live.lab.identity, live.lab.path / "known_hosts"):
            shutil.copy(file, live.shared)
        for gateway in GATEWAYS:
            must(live, gateway, f"cp -r /shared/ClusterShell {PACKAGES}/ && cp /shared/id /root/.ssh/id_ed25519")
            must(live, gateway, KNOW)
        yield live


def differences(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """What two documents of `facts` say differently, but for what passes and for the way."""
    found = {key: (left[key], right[key]) for key in left if key not in ("hosts", "via") and left[key] != right[key]}
    for name in {*left["hosts"], *right["hosts"]}:
        seen = [doc["hosts"][name] for doc in (left, right)]
        one, other = ({**each, **each["prepared"], **each["prefix"]} for each in seen)
        for key in {*one, *other} - {*PASSING, "prepared", "prefix"}:
            if one[key] != other[key]:
                found[f"{name} {key}"] = (one[key], other[key])
    return found


def must(lab: LiveLab, host: str, command: str) -> str:
    done = lab.nsenter(host, command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def of_tree(lab: LiveLab, host: str) -> str:
    """The processes on a host that a tree needs."""
    found = must(lab, host, "ps -ww -eo args").splitlines()
    return "\n".join(line for line in found if "ClusterShell" in line or line.startswith("ssh "))


def hold_up(lab: LiveLab, host: str) -> None:
    """Let nvidia-smi of a host wait for /shared/go, so that its facts take long enough to be cut off."""
    script = "#!/bin/sh\\nuntil [ -e /shared/go ]; do sleep 0.1; done\\n"
    must(lab, host, f"printf '{script}' >/usr/bin/nvidia-smi")


def held_up(lab: LiveLab, host: str) -> bool:
    return "/bin/sh /usr/bin/nvidia-smi" in must(lab, host, "ps -ww -eo args")


def told(err: str) -> list[str]:
    return [line for line in err.splitlines() if "over SSH" in line or "gateway" in line]


def test_hosts_behind_gateways(behind: LiveLab, standin_sources: Path) -> None:
    engine = Engine(behind, standin_sources)
    # What start-up files print is nobody's answer.
    must(behind, "n003", "sed -i '1i echo code=0; echo out=x; echo n004: lies >&2' /root/.bashrc")

    over_ssh = engine.json("facts")
    through = engine.run("facts", "--json", "--tree=n001,n002")
    assert through.code == 0, through.text
    document = json.loads(through.out)
    assert document["via"] == {**dict.fromkeys(GATEWAYS, "ssh"), **dict.fromkeys(BEHIND, "tree")}
    assert differences(document, over_ssh) == {}
    assert told(through.err) == ["over SSH: n[001-002] (2) (a gateway)"]
    assert [of_tree(behind, gateway) for gateway in GATEWAYS] == ["", ""]
    left = [line for host in GATEWAYS for line in must(behind, host, "ls -A /tmp").split()]
    assert left == []

    # A bootstrap's looks go through gateways; what it changes does not, nor does its proof.
    plan, by_tree = engine.json("plan"), engine.json("plan", "--tree=n[001-002]")
    assert plan == by_tree

    # A host that is silent, one whose key a gateway does not know, and a gateway that is down.
    behind.power_cut(SILENT)
    must(behind, "n001", f"ssh-keygen -R {UNKNOWN} -f /root/.ssh/known_hosts")
    must(behind, "n002", 'kill "$(cat /run/sshd.pid)"')
    through = engine.run("facts", "--json", "--tree=n001,n002")
    document = json.loads(through.out)
    assert [problem["where"] for problem in document["errors"]] == ["n002", SILENT]
    assert document["via"] == {"n001": "ssh", UNKNOWN: "ssh", **dict.fromkeys(set(BEHIND) - {SILENT, UNKNOWN}, "tree")}
    said = told(through.err)
    assert said[0] == "gateway n002 is left out: refuses connections on port 22"
    assert f"over SSH: {UNKNOWN} (gateway n001: Host key verification failed.)" in said
    assert any(line.startswith(f"over SSH: {SILENT} (gateway n001: ssh: connect to host {SILENT}") for line in said)
    behind.boot("n002", SILENT)
    must(behind, "n001", KNOW)

    # ^C leaves nothing on the gateways.
    hold_up(behind, "n007")
    running = engine.start("facts", "--tree=n001,n002")
    wait_until(lambda: held_up(behind, "n007"), "the host is asked")
    code, text = interrupt(running, signal.SIGINT)
    assert code == 130, text
    wait_until(lambda: not any(of_tree(behind, gateway) for gateway in GATEWAYS), "nothing of it is left")

    # A gateway that dies in the middle is named, and its hosts are asked over SSH in the same run.
    for host in BEHIND:
        hold_up(behind, host)
    running = engine.start("facts", "--tree=n001,n002")
    wait_until(lambda: all(held_up(behind, host) for host in BEHIND), "they are asked")
    wait_until(lambda: of_tree(behind, "n002").count("\nssh ") == 3, "half of them by each gateway")
    must(behind, "n002", "kill -KILL $(pgrep -f [C]lusterShell.Gateway)")
    (behind.shared / "go").touch()
    text, _ = running.communicate()
    assert running.returncode == 0, text
    assert [line for line in told(text) if "gateway n002: the connection was lost" in line], text

    # What is no gateway is refused.
    must(behind, "n002", f"rm -r {PACKAGES}/ClusterShell")
    refused = engine.run("facts", "--tree=n001,n002")
    assert refused.code == 1
    assert "n002: no gateway for --tree: it has no ClusterShell — found none, wanted ssh, ClusterShell" in refused.text
    refused = engine.run("facts", "--tree=elsewhere")
    assert refused.code == 1
    assert "--tree: gateway elsewhere: the name elsewhere is not known" in refused.text
