"""Administrators, controllers and other runs that act while this program does: what could end a job or take a node is
asked again at the last moment, and what was begun is put back."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pexpect
import pytest
from msgspec.structs import replace

from deepep_bootstrap.bootstrap.reboot import rollout
from deepep_bootstrap.bootstrap.reboot.policy import HostReboot, HostState, Policy
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.lab.hosts import PREPARED
from deepep_bootstrap.plan.steps import Reason, Step
from deepep_bootstrap.remote.fleet import ConnectionPool, Options
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job
from tests.support import e2e
from tests.support.e2e import ROOT, Engine, wait_until

if TYPE_CHECKING:
    from tests.support.lab import LiveLab

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = pytest.mark.e2e

N1, N2, LOGIN = Host("n001"), Host("n002"), Host("login1")
OURS = "/etc/modprobe.d/zz-deepep.conf"
CHANGE = Step("host", "options", "write options", ("n001", "n002"), Reason("not set", "set"))
QUICK = Policy(drain_timeout=300, boot_timeout=120, settle=60, pause=0.2)


@pytest.fixture(scope="module")
def offered(lab: LiveLab, standin_sources: Path, built_entries: Path) -> Engine:
    """The program and a lab on which everything is built and offered, so that runs are about the nodes alone."""
    lab.reset()
    engine = Engine(lab, standin_sources, built=built_entries)
    engine.use_built()
    ended = engine.run("bootstrap")
    assert ended.code == 0, ended.text
    return engine


@pytest.fixture
def engine(offered: Engine) -> Iterator[Engine]:
    """The same, with nodes in use; whatever a test left of drains and jobs goes."""
    yield offered
    (offered.lab.shared / "go").touch()
    for host in ("n001", "n002"):
        offered.lab.nsenter(host, "mount -o remount,hidepid=0 /proc")
        wait_until(lambda host=host: "IDLE" in offered.lab.node(host).state, "jobs have ended")  # type: ignore[misc]
        if "DRAIN" in offered.lab.node(host).state:
            offered.lab.on_login(f"scontrol update nodename={host} state=resume")


def make_bare(lab: LiveLab, *hosts: str) -> None:
    """Let hosts wait for driver options, as before anybody prepared them."""
    for host in hosts:
        lab.nsenter(host, f"rm -rf {OURS} /var/lib/deepep-bootstrap")
    lab.bare(*hosts)


def make_ready(lab: LiveLab, host: str) -> None:
    """Let a host need nothing."""
    for file, text in PREPARED.items():
        lab.nsenter(host, f"printf %s {shlex.quote(text)} >/{file}")
    lab.reboot(host)


@contextmanager
def stopped(lab: LiveLab, host: str, pid_file: str) -> Iterator[None]:
    """A daemon of a host that is there and does not answer."""
    assert lab.nsenter(host, f"kill -STOP $(cat {pid_file})").returncode == 0
    try:
        yield
    finally:
        lab.nsenter(host, f"kill -CONT $(cat {pid_file})")


# A job whose node nobody knows


def test_a_job_is_not_ended_where_slurmd_is_hidden_and_slurmctld_does_not_answer(
    engine: Engine, tmp_path: Path
) -> None:
    lab = engine.lab
    make_bare(lab, "n001")
    job, boot = lab.start_job("n001"), lab.boot_id("n001")
    assert lab.nsenter("n001", "mount -o remount,hidepid=2 /proc").returncode == 0
    assert lab.ssh("n001", "runuser -u keeper -- pgrep slurmd").stdout == "", "a plain account does not see it"
    text, count = re.subn(
        r"^defaults .*$", r"\g<0> user=keeper build_user=root", lab.hosts_file.read_text(), flags=re.MULTILINE
    )
    assert count == 1
    (tmp_path / "hosts.txt").write_text(text)
    keeper = dataclasses.replace(engine, hosts=tmp_path / "hosts.txt")
    with stopped(lab, "login1", "/run/slurmctld.pid"):
        ended = keeper.run("bootstrap", "--limit=n001", "--reboot=rolling", "--yes")
    assert lab.boot_id("n001") == boot, ended.text
    assert lab.job_state(job) == "RUNNING"
    assert "Restarts=0" in lab.on_login(f"scontrol show job {job}")
    assert ended.code == 1
    assert "Slurm is installed there, but sinfo does not answer there" in ended.text, ended.text


@pytest.mark.sample
def test_a_host_without_a_node_is_not_rebooted_while_slurm_runs_anything_there(engine: Engine) -> None:
    lab = engine.lab
    job, boot = lab.start_job("n001"), lab.boot_id("n001")
    actions = Actions(lab)
    outcomes = rollout.roll(
        actions.transport,
        (),
        (HostReboot(N1, "", "driver options", boot, (CHANGE,)),),
        replace(QUICK, run="alone"),
        actions=actions,
        tell=actions.tell,
    )
    actions.transport.close()
    assert (lab.boot_id("n001"), lab.job_state(job)) == (boot, "RUNNING")
    assert re.fullmatch(
        r"left alone: slurmd \(\d+, root\), slurmstepd \(\d+, root\) runs there, but Slurm named no node for it: .*",
        outcomes[-1].detail,
    )
    assert [outcome.state for outcome in outcomes] == ["skipped"], "nothing is changed there"


# An administrator takes a node over


def test_nodes_that_are_taken_over_while_the_question_is_shown_are_left_alone(engine: Engine) -> None:
    lab = engine.lab
    make_ready(lab, "n001")
    make_bare(lab, "n002")
    lab.on_login("scontrol update nodename=n001 state=drain reason='deepep-bootstrap: driver options (run x)'")
    boots = {host: lab.boot_id(host) for host in ("n001", "n002")}
    argv = engine.argv("bootstrap", "--reboot=rolling")
    child = pexpect.spawn(
        argv[0],
        argv[1:],
        env={**engine.environment(), "TERM": "dumb"},
        cwd=str(ROOT),
        encoding="utf-8",
        timeout=e2e.PATIENCE,
        dimensions=(50, 200),
    )
    child.expect(r"Go on\? \[")
    plan = child.before
    assert "resume in Slurm" in plan
    assert "driver options and REBOOT" in plan
    lab.on_login("scontrol update nodename=n001 reason='disk swap, alice'")
    lab.on_login("scontrol update nodename=n002 state=drain reason='new fan, alice'")
    child.send("y\r")
    child.expect(pexpect.EOF)
    text = child.before
    child.close()
    found = {host: ("DRAIN" in lab.node(host).state, lab.reason(host)) for host in boots}
    assert found == {"n001": (True, "disk swap, alice"), "n002": (True, "new fan, alice")}, text
    assert {host: lab.boot_id(host) for host in boots} == boots
    assert lab.nsenter("n002", f"test -e {OURS}").returncode != 0, "nothing is changed on it either"
    assert "left alone: root keeps it out of use now: disk swap, alice" in text
    assert "left alone: root keeps it out of use now: new fan, alice" in text
    assert child.exitstatus == 1


# Other runs of this program


@dataclass
class Actions:
    """What a wave does on hosts, with a line of shell for a recipe; which nodes were out of use when it began to change
    each, and what it told."""

    lab: LiveLab
    on_line: Callable[[str, str], None] = lambda host, line: None
    changed: dict[str, list[str]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    transport: ConnectionPool = field(init=False)

    def __post_init__(self) -> None:
        self.transport = ConnectionPool((N1, N2, LOGIN), Options(ssh_config=str(self.lab.lab.ssh_config)))

    def apply(self, host: Host, step: Step) -> Outcome:
        # Asked of Slurm, not of clocks: a run has ended some time after it gave its node back.
        self.changed[host.name] = [name for name in ("n001", "n002") if "DRAIN" in self.lab.node(name).state]
        return Outcome(step.title, host.name, "done")

    def reload(self, host: Host) -> Outcome:
        raise AssertionError("nobody asked for it")

    def look(self, host: Host) -> HostState:
        return HostState(self.transport.run(host, Job("cat /proc/sys/kernel/random/boot_id")).out.strip())

    def tell(self, host: str, title: str, line: str) -> None:
        self.lines.append(line)
        self.on_line(host, line)

    def roll(self, host: Host, run: str) -> str:
        """Reboot one host in a run of its own. Return how that ended."""
        order = HostReboot(host, host.name, "driver options", self.lab.boot_id(host.name), (CHANGE,))
        policy = replace(QUICK, run=run)
        outcomes = rollout.roll(self.transport, (LOGIN,), (order,), policy, actions=self, tell=self.tell)
        return outcomes[-1].state


def test_two_runs_that_allow_one_node_each_have_one_out_of_use_together(engine: Engine) -> None:
    lab = engine.lab
    job = lab.start_job("n001")
    first, second = Actions(lab), Actions(lab)
    waits, told = threading.Event(), threading.Event()
    first.on_line = lambda host, line: waits.set() if f"waiting for job {job}" in line else None
    second.on_line = lambda host, line: told.set() if line.startswith("waits: ") else None
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first.roll, N1, "one")
        assert waits.wait(e2e.PATIENCE)
        two = pool.submit(second.roll, N2, "two")
        wait_until(
            lambda: told.is_set() or two.done() or "n002" in second.changed, "the second run has come to its node"
        )
        found = (lab.node("n002").state, sorted(second.changed))
        (lab.shared / "go").touch()
        ended = one.result(), two.result()
    for actions in (first, second):
        actions.transport.close()
    assert found == ("IDLE", []), "it waits as long as the first has a node out of use"
    assert ended == ("done", "done")
    assert lab.job_state(job) == "COMPLETED"
    assert second.changed == {"n002": ["n002"]}, "the second is changed when the first is back"
    assert second.lines[0] == (
        "waits: other runs have n001 out of use (n001: deepep-bootstrap: driver options (run one)), and no more than 1 "
        "at a time may be"
    )


def test_two_runs_that_drain_at_the_same_moment_go_one_after_the_other(engine: Engine) -> None:
    actions = Actions(engine.lab), Actions(engine.lab)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(each.roll, host, host.name) for each, host in zip(actions, (N1, N2), strict=True)]
        assert [run.result() for run in runs] == ["done", "done"]
    for each in actions:
        each.transport.close()
    assert [each.changed for each in actions] == [{"n001": ["n001"]}, {"n002": ["n002"]}]
    assert [engine.lab.reason(host) for host in ("n001", "n002")] == ["", ""]


# A reload of the driver that is cut off


def modules(lab: LiveLab, host: str = "n001") -> set[str]:
    return set(lab.nsenter(host, "cat /run/modules.loaded").stdout.split())


def slow_rmmod(lab: LiveLab, seconds: int) -> None:
    """Let rmmod take its time on n001, after each module."""
    script = f'#!/bin/bash\n/run/slow/rmmod "$@" && : >/run/slow/now && sleep {seconds}\n'
    done = lab.nsenter(
        "n001",
        "mkdir -p /run/slow && cp -P /usr/sbin/rmmod /run/slow/was && ln -sf /usr/share/lab/lab-kmod /run/slow/rmmod && "
        f"printf %s '{script}' >/run/slow/script && chmod 755 /run/slow/script && cp --remove-destination /run/slow/script "
        "/usr/sbin/rmmod",
    )
    assert done.returncode == 0, done.stderr


def quick_rmmod(lab: LiveLab) -> None:
    lab.nsenter("n001", "cp -P --remove-destination /run/slow/was /usr/sbin/rmmod")


def begin_reload(engine: Engine, seconds: int) -> tuple[subprocess.Popen[str], set[str]]:
    """Start a bootstrap that loads the driver of n001 anew. Return it when the first module is gone, with rmmod waiting
    for `seconds`, and all modules that were there."""
    make_bare(engine.lab, "n001")
    before = modules(engine.lab)
    slow_rmmod(engine.lab, seconds)
    process = engine.start("bootstrap", "--limit=n001", "--reboot=rolling", "--reload-driver", "--yes")
    begun = engine.lab.nsenter
    wait_until(
        lambda: begun("n001", "test -e /run/slow/now").returncode == 0 or process.poll() is not None,
        "a module is unloaded",
    )
    assert process.poll() is None, process.communicate()[0]
    return process, before


def test_a_reload_brings_the_modules_back_when_its_controller_is_killed(engine: Engine) -> None:
    process, before = begin_reload(engine, 5)
    process.kill()
    process.communicate()
    quick_rmmod(engine.lab)
    wait_until(lambda: before <= modules(engine.lab), "what was unloaded is loaded again")
    assert "DRAIN" in engine.lab.node("n001").state
    assert_given_back_whole(engine, before)


def test_a_reload_that_is_killed_on_its_host_is_put_right_by_the_next_run(engine: Engine) -> None:
    lab = engine.lab
    process, before = begin_reload(engine, 600)  # all are killed long before
    process.send_signal(signal.SIGSTOP)
    # First the scripts, then what they wait for: none of them comes to its traps.
    listing = lab.nsenter("n001", "ps -ww -eo pid,args").stdout.splitlines()
    pids = [line.split()[0] for line in listing if re.search(r"deepep-bootstrap\.\w+/script$|rmmod", line)]
    assert pids
    lab.nsenter("n001", f"kill -KILL {' '.join(pids)}")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    quick_rmmod(lab)
    assert before - modules(lab), "they stay away until somebody does something"
    assert "DRAIN" in lab.node("n001").state
    assert_given_back_whole(engine, before)


def assert_given_back_whole(engine: Engine, before: set[str]) -> None:
    """The next run ends well and without a reboot: the node is in use, with all modules that it had."""
    boot = engine.lab.boot_id("n001")
    ended = engine.run("bootstrap", "--limit=n001", "--reboot=rolling", "--reload-driver", "--yes")
    found = engine.lab.node("n001").state.partition("+")[0], before - modules(engine.lab)
    assert (ended.code, *found) == (0, "IDLE", set()), ended.text
    assert engine.lab.boot_id("n001") == boot, ended.text
    assert "EnableStreamMemOPs: 1" in engine.lab.nsenter("n001", "cat /proc/driver/nvidia/params").stdout
