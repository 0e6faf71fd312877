"""--via=slurm with a real srun: the same answers by another way, nodes that are not free over SSH, and a node that dies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.e2e import Engine, wait_until

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]

PASSING = ("memory_free_mib", "scratch_free_mib", "uptime_s", "memlock")
"""Facts that differ from one look to the next, and the one that a job has of its own."""


def settled(document: dict[str, Any]) -> dict[str, Any]:
    """A document without what passes, and without the way."""
    hosts = {
        name: {key: value for key, value in {**facts, **facts["prepared"]}.items() if key not in (*PASSING, "prepared")}
        for name, facts in document["hosts"].items()
    }
    return {**document, "hosts": hosts, "via": {}}


def slow_down(engine: Engine, host: str) -> None:
    """Let nvidia-smi of a host sleep, so that its facts take long enough to be cut off."""
    script = "#!/bin/sh\\nsleep 25\\n"
    done = engine.lab.nsenter(host, f"printf '{script}' >/usr/bin/nvidia-smi")
    assert done.returncode == 0, done.stderr


def test_many_hosts_through_one_srun(engine: Engine) -> None:
    lab = engine.lab
    over_ssh = engine.json("facts")
    over_slurm = engine.json("facts", "--via=slurm")
    assert over_ssh["via"] == {"n001": "ssh", "n002": "ssh", "login1": "ssh"}
    assert over_slurm["via"] == {"n001": "slurm", "n002": "slurm", "login1": "ssh"}
    assert settled(over_slurm) == settled(over_ssh)
    assert {facts["slurm"]["state"] for facts in over_slurm["hosts"].values()} == {"IDLE", ""}

    # A node full of another user's job, and a drained one.
    job = lab.start_job("n001")
    lab.on_login("scontrol update nodename=n002 state=drain reason=disk")
    over_slurm = engine.json("facts", "--via=slurm")
    assert set(over_slurm["via"].values()) == {"ssh"}
    assert over_slurm["hosts"]["n001"]["slurm"]["jobs"] == [job]
    assert settled(over_slurm) == settled(engine.json("facts"))
    (lab.shared / "go").touch()
    lab.on_login("scontrol update nodename=n002 state=resume")
    wait_until(lambda: [lab.node(host).state for host in ("n001", "n002")] == ["IDLE", "IDLE"], "both nodes are idle")

    # A node that dies in the middle is named, the other is done, and no job of ours is left.
    slow_down(engine, "n002")
    running = engine.start("facts", "--via=slurm", "--json")
    wait_until(lambda: "sleep 25" in lab.nsenter("n002", "ps -eo args").stdout, "the node is asked")
    lab.power_cut("n002")
    text, _ = running.communicate(timeout=600)
    document = json.loads(text[text.index("{") :])
    assert (running.returncode, list(document["hosts"])) == (1, ["n001", "login1"])
    assert [problem["where"] for problem in document["errors"]] == ["n002"]
    assert document["via"]["n001"] == "slurm"
    assert lab.on_login("squeue -h -o %j") == ""
    lab.reboot("n002")
