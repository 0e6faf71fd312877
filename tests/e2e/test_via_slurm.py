"""--via=slurm with a real srun: the same answers by another way, nodes that are not free over SSH, and a node that dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.e2e import Engine, interrupt, wait_until
from tests.support.lab import LiveLab

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]

PASSING = ("memory_free_mib", "scratch_free_mib", "uptime_s", "memlock")
"""Facts that differ from one look to the next, and the one that a job has of its own."""


def settled(document: dict[str, Any]) -> dict[str, Any]:
    """A document without what passes, and without the way."""
    hosts = {}
    for name, facts in document["hosts"].items():
        kept = {**facts, **facts["prepared"], "prefix": {**facts["prefix"], "free_mib": 0}}
        hosts[name] = {key: value for key, value in kept.items() if key not in (*PASSING, "prepared")}
    return {**document, "hosts": hosts, "via": {}}


def slow_down(engine: Engine, host: str) -> None:
    """Let nvidia-smi of a host sleep, so that its facts take long enough to be cut off."""
    script = "#!/bin/sh\\nsleep 25\\n"
    done = engine.lab.nsenter(host, f"printf '{script}' >/usr/bin/nvidia-smi")
    assert done.returncode == 0, done.stderr


def looks(engine: Engine) -> int:
    """How many jobs of ours Slurm remembers; it forgets them five minutes after their end."""
    return engine.lab.on_login("squeue -h --states=all -o %j").count("deepep-look-")


def idle(engine: Engine) -> None:
    wait_until(lambda: {engine.lab.node(host).state for host in ("n001", "n002")} == {"IDLE"}, "both nodes are idle")


def test_many_hosts_through_one_srun(engine: Engine) -> None:
    lab = engine.lab
    over_ssh = engine.json("facts")
    over_slurm = engine.json("facts", "--via=slurm")
    assert over_ssh["via"] == {"n001": "ssh", "n002": "ssh", "login1": "ssh"}
    assert over_slurm["via"] == {"n001": "slurm", "n002": "slurm", "login1": "ssh"}
    assert settled(over_slurm) == settled(over_ssh)

    # Facts and checks, the prefix, facts and checks again once the limits are set, the hook, the proof.
    engine.use_built()
    before = looks(engine)
    made = engine.run("bootstrap", "--via=slurm")
    assert made.code == 0, made.text
    assert [line for line in made.err.splitlines() if "over SSH" in line] == ["over SSH: login1 (no node of Slurm)"]
    assert looks(engine) - before == 7, made.text
    for verb in ("plan", "doctor", "verify"):
        left, right = engine.json(verb), engine.json(verb, "--via=slurm")
        for document in (left, right):
            document["outcomes"] = [{**each, "seconds": 0} for each in document.get("outcomes", [])]
        assert left == right

    # A node with a job, and a drained one.
    job = lab.start_job("n001")
    lab.on_login("scontrol update nodename=n002 state=drain reason=disk")
    over_slurm = engine.json("facts", "--via=slurm")
    assert set(over_slurm["via"].values()) == {"ssh"}
    assert over_slurm["hosts"]["n001"]["slurm"]["jobs"] == [job]
    assert settled(over_slurm) == settled(engine.json("facts"))
    (lab.shared / "go").touch()
    lab.on_login("scontrol update nodename=n002 state=resume")
    idle(engine)

    # ^C ends the job.
    slow_down(engine, "n002")
    running = engine.start("facts", "--via=slurm")
    wait_until(lambda: "sleep 25" in lab.nsenter("n002", "ps -eo args").stdout, "the node is asked")
    code, said = interrupt(running, signal.SIGINT)
    assert code == 130, said
    idle(engine)
    assert "sleep 25" not in lab.nsenter("n002", "ps -eo args").stdout

    # A node that dies in the middle is named, the other is done, and no job of ours runs on.
    running = engine.start("facts", "--via=slurm", "--json")
    wait_until(lambda: "sleep 25" in lab.nsenter("n002", "ps -eo args").stdout, "the node is asked")
    lab.power_cut("n002")
    text, _ = running.communicate(timeout=600)
    document = json.loads(text[text.index("{") :])
    assert (running.returncode, list(document["hosts"])) == (1, ["n001", "login1"])
    assert [problem["where"] for problem in document["errors"]] == ["n002"]
    assert document["via"]["n001"] == "slurm"
    assert lab.on_login("squeue -h --states=running -o %j") == ""
    lab.reset()


DEVICES = Path("/sys/fs/cgroup/devices/devices.allow")

CONSTRAIN = """
mount -t tmpfs tmpfs /sys/fs/cgroup
for name in devices freezer; do mkdir /sys/fs/cgroup/$name; mount -t cgroup -o $name cgroup /sys/fs/cgroup/$name; done
for number in 0 1 2 3 4 5 6 7; do
    while umount /dev/nvidia$number 2>/dev/null; do :; done
    rm -f /dev/nvidia$number && mknod -m 666 /dev/nvidia$number c 195 $number
done
"""
"""A script for a node of the lab: cgroups, and GPUs that differ from each other, as a cgroup tells devices apart."""

SETTINGS = """
sed -i s,^TaskPlugin=.*,TaskPlugin=task/cgroup, /etc/slurm/slurm.conf
printf 'CgroupPlugin=cgroup/v1\\nConstrainDevices=yes\\n' >/etc/slurm/cgroup.conf
for name in slurmctld slurmd; do
    pid=$(pgrep -ox $name) || continue
    kill $pid
    while kill -0 $pid 2>/dev/null; do sleep 0.1; done
    $name
done
"""


def remove_cgroups() -> None:
    """Remove what slurmd of such nodes leaves in the machine's own hierarchy; what another lab uses cannot be removed."""
    for top in [*DEVICES.parent.glob("slurm_n00*"), *DEVICES.parents[1].glob("freezer/slurm_n00*")]:
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


@pytest.mark.skipif(not os.access(DEVICES, os.W_OK), reason="needs root and the device cgroup of version 1")
def test_devices_that_a_job_may_not_use(fresh_lab: LiveLab, standin_sources: Path, tmp_path: Path) -> None:
    """With ConstrainDevices a job that gets all GPUs sees what a session sees. One that gets none is not believed, nor
    is a node asked that is full of another user's job."""
    engine = Engine(fresh_lab, standin_sources)
    for host, scripts in {"login1": SETTINGS, "n001": CONSTRAIN + SETTINGS, "n002": CONSTRAIN + SETTINGS}.items():
        done = fresh_lab.nsenter(host, f"set -e\n{scripts}")
        assert done.returncode == 0, done.stderr
    idle(engine)
    seen = "for i in /dev/nvidia[0-7]; do [ ! -r $i ] || echo $i; done"
    assert fresh_lab.on_login(f"srun -w n001 --gres=gpu:2 bash -c '{seen}'").count("/dev/nvidia") == 2
    idle(engine)

    over_ssh, over_slurm = engine.json("facts"), engine.json("facts", "--via=slurm")
    assert over_slurm["via"] == {"n001": "slurm", "n002": "slurm", "login1": "ssh"}
    assert settled(over_slurm) == settled(over_ssh)

    place = "cd /shared && sbatch --parsable --uid=builder -w n001 --exclusive --gres=gpu:8"
    job = fresh_lab.on_login(f"{place} --output=/dev/null --wrap 'sleep 600'").strip()
    wait_until(lambda: fresh_lab.job_state(job) == "RUNNING", "the job runs")
    over_ssh, over_slurm = engine.json("facts"), engine.json("facts", "--via=slurm")
    assert over_slurm["via"] == {"n001": "ssh", "n002": "slurm", "login1": "ssh"}
    assert over_slurm["hosts"]["n001"]["slurm"]["jobs"] == [job]
    assert settled(over_slurm) == settled(over_ssh)
    fresh_lab.on_login(f"scancel {job}")
    idle(engine)

    engine.hosts = tmp_path / "hosts.txt"
    engine.hosts.write_text(fresh_lab.hosts_file.read_text().replace("defaults ", "defaults gres=none ", 1))
    assert "over SSH: n[001-002] (2) (a job hides its devices)" in engine.run("facts", "--via=slurm").err
    fresh_lab.reset()
    remove_cgroups()
