"""Waves on the embedded cluster: a real slurmctld, real jobs, real sshd, hosts that really go away and come back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from datetime import time as clock
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from deepep_bootstrap.bootstrap.reboot import control, rollout
from deepep_bootstrap.bootstrap.reboot.control import Cluster, NotRebootedError
from deepep_bootstrap.bootstrap.reboot.policy import NEVER, HostReboot, HostState, Policy, Window, parse_window
from deepep_bootstrap.bootstrap.reboot.slurm_drain import NodeDrain
from deepep_bootstrap.core.errors import TROUBLE, LostError, Problem, Trouble
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.kube import client as kube
from deepep_bootstrap.kube.nodes import NODES as KUBE_NODES
from deepep_bootstrap.kube.nodes import read as read_node
from deepep_bootstrap.plan.steps import Reason, Step
from deepep_bootstrap.remote.fleet import ConnectionPool, Options
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Reply
from deepep_bootstrap.remote.script import OnLine
from deepep_bootstrap.remote.ssh import Timeouts
from deepep_bootstrap.slurm import nodes
from tests.support.kube_api import live_api, make_node, make_pod

if TYPE_CHECKING:
    from tests.support.lab import LiveLab

pytest_plugins = ["tests.support.lab"]

N1, N2, LOGIN = Host("n001"), Host("n002"), Host("login1")
NODES = (N1, N2)
WRITE = Step("host", "options", "write options", ("n001", "n002"), Reason("not set", "set"))
WROTE = "echo options nvidia NVreg_EnableStreamMemOPs=1 >/etc/modprobe.d/wave.conf"
QUICK = Policy(run="test-7", drain_timeout=90, boot_timeout=90, settle=60, pause=0.1)


@dataclass
class HostActions:
    """Actions whose recipe is one line of shell, and what was seen and told meanwhile."""

    lab: LiveLab
    transport: ConnectionPool
    lines: list[tuple[float, str, str]] = field(default_factory=list)
    states: list[tuple[str, str]] = field(default_factory=list)
    on_line: Callable[[str, str], None] = lambda host, line: None

    def apply(self, host: Host, step: Step) -> Outcome:
        reply = self.transport.run(host, Job(WROTE, user="root"))
        return Outcome(step.title, host.name, "failed" if reply.code else "done", reply.err)

    def reload(self, host: Host) -> Outcome:
        reply = self.transport.run(
            host, Job("modprobe -r nvidia_uvm && modprobe -r nvidia_modeset && modprobe nvidia_uvm", user="root")
        )
        return Outcome("reload", host.name, "failed" if reply.code else "done", reply.err.strip())

    def look(self, host: Host) -> HostState:
        asked = (
            "cat /proc/sys/kernel/random/boot_id; grep EnableStream /proc/driver/nvidia/params; cat "
            "/run/lab/fake/compute_apps 2>/dev/null"
        )
        words = self.transport.run(host, Job(f"{asked} || true")).out.splitlines()
        self.states.append((host.name, self.lab.node(host.name).state))
        unmet = () if words[1].endswith(" 1") else ("EnableStreamMemOPs is 0",)
        return HostState(words[0], unmet, f"process {words[2]}" if len(words) > 2 else "")

    def tell(self, host: str, title: str, line: str) -> None:
        assert title == "reboot"
        self.lines.append((time.monotonic(), host, line))
        self.on_line(host, line)

    def order(self, host: Host, *, node: str = "", reload: bool = False) -> HostReboot:
        boot = self.lab.boot_id(host.name)
        found = self.lab.node(node) if node in self.lab.hosts else None
        out_of_use = nodes.reason_out_of_use(found.state, found.reason) if found else ""
        return HostReboot(host, node, "driver options", boot, (WRITE,), reload, out_of_use=out_of_use)

    def roll(
        self,
        *orders: HostReboot,
        policy: Policy = QUICK,
        slurm_at: tuple[Host, ...] = (LOGIN,),
        kubernetes: kube.Cluster | None = None,
    ) -> dict[str, Outcome]:
        """Carry out orders and return the last outcome of each host."""
        outcomes = rollout.roll(
            self.transport, slurm_at, orders, policy, actions=self, tell=self.tell, kubernetes=kubernetes
        )
        return {outcome.host: outcome for outcome in outcomes}

    def order_both(self) -> tuple[HostReboot, HostReboot]:
        return self.order(N1, node="n001"), self.order(N2, node="n002")


def without_slurm(lab: LiveLab, *hosts: str) -> None:
    """Make hosts such as Slurm runs nothing on, until they boot."""
    for host in hosts:
        lab.nsenter(host, 'pid=$(cat /run/slurmd.pid) && kill "$pid" && while [ -e "/proc/$pid" ]; do sleep 0.05; done')


def wait_for(condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def bare_lab(lab: LiveLab) -> Iterator[LiveLab]:
    """The run's lab with nodes without driver options; as at first again afterwards."""
    lab.reset()
    lab.bare("n001", "n002")
    yield lab
    lab.reset()


@pytest.fixture
def actions(bare_lab: LiveLab) -> Iterator[HostActions]:
    """Actions on hosts that lack the options, with both nodes idle; whatever the test before left is put right first."""
    for host in NODES:
        for fake in ("no_return", "forget_options", "compute_apps"):
            bare_lab.fake(host.name, fake, None)
        if not bare_lab.boot_id(host.name):
            bare_lab.boot(host.name)
        if bare_lab.nsenter(host.name, "rm /etc/modprobe.d/wave.conf").returncode == 0:
            # Loaded with the options that are gone now, as after a boot.
            bare_lab.nsenter(
                host.name,
                "modprobe -r nvidia_uvm; modprobe -r nvidia_modeset; modprobe nvidia_uvm; modprobe nvidia_modeset",
            )
        if bare_lab.node(host.name).state != "IDLE":
            wait_for(lambda name=host.name: "REBOOT" not in bare_lab.node(name).state)  # type: ignore[misc]
            bare_lab.on_login(f"scancel --nodelist={host.name}")
            bare_lab.ssh("login1", f"scontrol update nodename={host.name} state=resume")
    wait_for(lambda: all(bare_lab.node(host.name).state == "IDLE" for host in NODES))
    fleet = ConnectionPool(
        (*NODES, LOGIN), Options(ssh_config=str(bare_lab.lab.ssh_config), timeouts=Timeouts(connect=2))
    )
    yield HostActions(bare_lab, fleet)
    fleet.close()


def test_a_node_of_kubernetes_is_drained_and_given_back(actions: HostActions, tmp_path: Path) -> None:
    """The host is a node of Slurm too, and runs what root there takes for a kubelet."""
    pods = "/api/v1/namespaces/moe/pods"
    alone = replace(actions.order(N1), node="")
    without_slurm(actions.lab, "n001")
    actions.lab.nsenter("n001", "cp /bin/sleep /run/kubelet; setsid /run/kubelet 3600 >/dev/null 2>&1 </dev/null &")
    left = actions.roll(alone, slurm_at=())["n001"]
    assert (left.state, "kubelet (" in left.detail, "no node of Kubernetes is known" in left.detail) == (
        "skipped",
        True,
        True,
    )
    with pytest.raises(NotRebootedError, match="although nobody drained its node in Kubernetes"):
        control.reboot(actions.transport, N1, alone.boot_id, "")
    with live_api(tmp_path, "moe") as (api, file):
        cluster = kube.connect(kubeconfig=str(file))
        cluster.create(KUBE_NODES, make_node("gpu-a", alone.boot_id))
        cluster.create(pods, make_pod("test", "gpu-a", "Job"))
        cluster.create(pods, make_pod("web", "gpu-a", "ReplicaSet"))
        cluster.create(pods, make_pod("sleeper", "gpu-a", ""))
        order = replace(alone, kube_node="gpu-a")
        kept = actions.roll(order, slurm_at=(), kubernetes=cluster)["n001"]
        assert kept.detail.startswith("left alone: pod moe/sleeper is controlled by nothing")
        assert not read_node(cluster, "gpu-a").cordoned
        cluster.delete(f"{pods}/sleeper")

        def watch(host: str, line: str) -> None:
            if "waiting for pod" in line:
                assert read_node(cluster, "gpu-a").cordoned
                cluster.delete(f"{pods}/test")
            if line == "back":  # what its kubelet does
                cluster.patch(f"{KUBE_NODES}/gpu-a", make_node("gpu-a", actions.lab.boot_id("n001")))

        actions.on_line = watch
        outcome = actions.roll(order, slurm_at=(), kubernetes=cluster)["n001"]
        assert (outcome.state, outcome.detail, api.objects("pods")) == ("done", "driver options", [])
        node = read_node(cluster, "gpu-a")
        assert (node.cordoned, node.reason, node.boot_id not in ("", alone.boot_id)) == (False, "", True)
        assert [line for _, _, line in actions.lines][-5:] == [
            "drained, waiting for pod moe/test, moe/web",
            "write options",
            "rebooting over SSH (no node of Slurm)",
            "back",
            "done: driver options; back in use",
        ]
        cluster.close()


def test_two_nodes_one_by_one_with_a_job_on_one_and_the_drain_of_somebody_else_on_the_other(
    actions: HostActions,
) -> None:
    said = "fan = loud : ask the vendor [ticket@7]"
    actions.lab.on_login(f"scontrol update nodename=n002 state=drain reason='{said}'")
    job = actions.lab.start_job("n001")
    before = {host.name: actions.lab.boot_id(host.name) for host in NODES}
    ended: list[str] = []

    def watch(host: str, line: str) -> None:
        if "waiting for job" in line:
            (actions.lab.shared / "go").touch()
        if host == "n001" and line.startswith("rebooting"):
            ended.append(actions.lab.job_state(job))

    actions.on_line = watch
    outcomes = actions.roll(*actions.order_both())
    assert ended == ["COMPLETED"]
    kept = f"driver options; stays idle+drain: {said}"
    assert {host: (one.state, one.detail, one.code) for host, one in outcomes.items()} == {
        "n001": ("done", "driver options", 0),
        "n002": ("done", kept, 0),
    }
    assert [f"{host} {line}" for _, host, line in actions.lines] == [
        *(
            f"n002 idle+drain before, and stays so: {said}",
            "n002 write options",
            "n002 rebooting through Slurm",
            "n002 back",
            f"n002 done: {kept}",
        ),
        *(
            f"n001 drained, waiting for job {job}",
            "n001 write options",
            "n001 rebooting through Slurm",
            "n001 back",
            "n001 done: driver options; back in use",
        ),
    ]  # the idle node first: a long job keeps no other waiting
    assert all(actions.lab.boot_id(name) not in ("", boot) for name, boot in before.items())
    assert (actions.lab.node("n001").state, actions.lab.reason("n001")) == ("IDLE", "")
    assert (actions.lab.node("n002").state, actions.lab.reason("n002")) == ("IDLE+DRAIN", said)
    assert all("DRAIN" in state for _, state in actions.states), "a node was in use before it was looked at"


def test_a_node_whose_slurmd_ends_when_slurm_was_asked_to_reboot_it_is_rebooted_over_ssh(actions: HostActions) -> None:
    # slurmctld takes SlurmdTimeout to notice, and accepts the reboot until then.
    before = actions.lab.boot_id("n001")

    def end_slurmd(host: str, line: str) -> None:
        if line == "write options":
            without_slurm(actions.lab, host)

    actions.on_line = end_slurmd
    outcome = actions.roll(actions.order_both()[0], policy=replace(QUICK, boot_timeout=60))["n001"]
    assert (outcome.state, outcome.detail) == ("done", "driver options")
    assert [line for _, _, line in actions.lines] == [
        "write options",
        "rebooting through Slurm",
        "rebooting over SSH (slurmd ended there before it heard of the reboot)",
        "back",
        "done: driver options; back in use",
    ]
    assert actions.lab.boot_id("n001") not in ("", before)
    assert (actions.lab.node("n001").state, actions.lab.reason("n001")) == ("IDLE", "")
    assert all("DRAIN" in state for _, state in actions.states), "a node was in use before it was looked at"


def test_a_node_that_never_returns_stops_the_wave_and_the_next_run_goes_on(actions: HostActions) -> None:
    actions.lab.fake("n001", "no_return", "")
    before = actions.lab.boot_id("n002")
    outcomes = actions.roll(*actions.order_both(), policy=replace(QUICK, boot_timeout=2.5))
    assert (outcomes["n001"].state, outcomes["n001"].code) == ("failed", TROUBLE)
    assert outcomes["n001"].detail.startswith("did not come back within 2.5 s after its reboot: ")
    assert (outcomes["n002"].state, outcomes["n002"].code) == ("skipped", TROUBLE)
    assert outcomes["n002"].detail.startswith("not started: n001 did not come back within 2.5 s")
    assert (actions.lab.boot_id("n002"), actions.lab.node("n002").state) == (before, "IDLE")
    assert "DRAIN" in actions.lab.node("n001").state
    assert actions.lab.reason("n001").startswith("deepep-bootstrap: did not come back within 2.5 s")
    assert actions.lab.reason("n001").endswith("(run test-7)")
    # Somebody switches it on: it has what was wanted, and the next run gives it back without another reboot.
    actions.lab.fake("n001", "no_return", None)
    wait_for(lambda: not actions.lab.boot_id("n001"))
    actions.lab.boot("n001")
    order = replace(actions.order(N1, node="n001"), boot_id="the one before")
    came = actions.lab.boot_id("n001")
    assert actions.roll(order)["n001"].state == "unchanged"
    assert (actions.lab.boot_id("n001"), actions.lab.node("n001").state) == (came, "IDLE")


def test_a_node_that_returns_without_what_was_wanted_until_a_reload(actions: HostActions) -> None:
    actions.lab.fake("n001", "forget_options", "")
    outcomes = actions.roll(*actions.order_both(), policy=replace(QUICK, settle=0))
    assert (outcomes["n001"].state, outcomes["n001"].detail) == (
        "failed",
        "came back without what was wanted: EnableStreamMemOPs is 0",
    )
    assert outcomes["n002"].state == "skipped"
    kept = "deepep-bootstrap: came back without what was wanted: EnableStreamMemOPs is 0 (run test-7)"
    assert ("DRAIN" in actions.lab.node("n001").state, actions.lab.reason("n001")) == (True, kept)
    # A next run that does not come to it leaves it drained, with the reason that counts.
    assert actions.roll(actions.order_both()[0], policy=replace(QUICK, window=closed()))["n001"].state == "skipped"
    assert actions.lab.reason("n001") == kept
    actions.lab.fake("n001", "forget_options", None)
    reloaded = actions.roll(actions.order(N1, node="n001", reload=True))["n001"]
    assert (reloaded.state, reloaded.detail) == ("unchanged", "not needed: the driver was loaded anew")
    assert (actions.lab.node("n001").state, actions.lab.reason("n001")) == ("IDLE", "")


def test_over_ssh_where_slurm_takes_rebooted_nodes_down_and_jobs_of_others_are_hidden(actions: HostActions) -> None:
    """Slurm's own defaults: no RebootProgram, and a node that was rebooted stays down until somebody resumes it."""
    conf = "/etc/slurm/slurm.conf"
    actions.lab.on_login(
        f"cp {conf} {conf}.was; sed -i '/^RebootProgram/d; s/^ReturnToService=2/ReturnToService=0/' {conf}"
    )
    actions.lab.on_login(f"echo PrivateData=jobs >>{conf}; scontrol reconfigure")
    job = actions.lab.start_job("n001")
    before = actions.lab.boot_id("n001")

    def let_go(host: str, line: str) -> None:
        if "waiting for" in line:
            assert actions.lab.boot_id("n001") == before
            (actions.lab.shared / "go").touch()

    actions.on_line = let_go
    try:
        outcome = actions.roll(actions.order_both()[0], slurm_at=(replace(LOGIN, user="keeper"),))["n001"]
        assert (outcome.state, outcome.detail) == ("done", "driver options")
        lines = [line for _, _, line in actions.lines]
        assert "drained, waiting for a job that Slurm does not show to this account" in lines
        assert "rebooting over SSH (Slurm has no RebootProgram)" in lines
        assert (actions.lab.job_state(job), actions.lab.boot_id("n001") not in ("", before)) == ("COMPLETED", True)
        time.sleep(3)  # a slurmd that registers only now would take the node down again
        assert (actions.lab.node("n001").state, actions.lab.reason("n001")) == ("IDLE", "")
    finally:
        actions.lab.on_login(f"mv {conf}.was {conf}; scontrol reconfigure")


def closed() -> Window:
    now = datetime.now().astimezone()
    return Window(clock((now.hour + 2) % 24), clock((now.hour + 3) % 24))


def test_a_host_is_left_alone_where_it_must_be(
    actions: HostActions, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    before = {host.name: actions.lab.boot_id(host.name) for host in NODES}
    first, second = actions.order_both()
    assert "waits for the window" in actions.roll(first, policy=replace(QUICK, window=closed()))["n001"].detail
    reserve = (
        "scontrol create reservation reservationname=maint starttime=now+20seconds duration=9 users=root "
        "nodes=n002 flags=maint"
    )
    actions.lab.on_login(reserve)
    try:
        held = actions.roll(second)["n002"]
        assert (held.state, held.code) == ("skipped", TROUBLE)
        assert held.detail.startswith("in reservation maint (")
    finally:
        actions.lab.on_login("scontrol delete reservationname=maint")
    job = actions.lab.start_job("n001")
    late = actions.roll(first, policy=replace(QUICK, drain_timeout=0.3))["n001"]
    assert (late.state, late.detail, late.code) == ("failed", f"still in use after 0.3 s: job {job}", TROUBLE)
    assert (actions.lab.job_state(job), "DRAIN" in actions.lab.node("n001").state) == ("RUNNING", False)
    actions.lab.on_login(f"scancel {job}")
    monkeypatch.setattr(
        "deepep_bootstrap.bootstrap.reboot.host_reboot.OWN_BOOT_ID", actions.lab.lab.home("n002") / "own"
    )
    (actions.lab.lab.home("n002") / "own").write_text(before["n002"] + "\n")
    assert actions.roll(second)["n002"].detail.startswith("this program runs there")
    assert {host.name: actions.lab.boot_id(host.name) for host in NODES} == before
    assert actions.lab.node("n002").state == "IDLE"


def test_a_node_that_somebody_takes_over_meanwhile_is_theirs(actions: HostActions) -> None:
    before = {host.name: actions.lab.boot_id(host.name) for host in NODES}
    job = actions.lab.start_job("n001")
    theirs = {"n001": "state=drain reason='disk swap'; touch /shared/go", "n002": "state=resume"}

    def take_over(host: str, line: str) -> None:
        if line == ("drained, waiting for job " + job if host == "n001" else WRITE.title):
            actions.lab.on_login(f"scontrol update nodename={host} {theirs[host]}")

    actions.on_line = take_over
    outcomes = actions.roll(*actions.order_both())
    assert outcomes["n001"].detail == "not rebooted: root keeps it out of use now: disk swap"
    assert actions.lab.nsenter("n001", "test -e /etc/modprobe.d/wave.conf").returncode != 0, "it is not changed either"
    assert outcomes["n002"].detail == "not rebooted: somebody brought it back into use"
    # Slurm may not have heard from the node since somebody brought it back.
    assert (actions.lab.reason("n001"), actions.lab.node("n002").state.removesuffix("+NOT_RESPONDING")) == (
        "disk swap",
        "IDLE",
    )
    assert {host.name: actions.lab.boot_id(host.name) for host in NODES} == before

    # Another run of this program, later than this one: it reboots and gives back.
    actions.lab.on_login("scontrol update nodename=n001 state=resume")
    mine, other = (NodeDrain(Cluster(actions.transport, (LOGIN,)), "n001", run) for run in ("test-7", "test-8"))
    mine.take_out("x", mine.look())
    other.take_out("x", other.look())
    assert (mine.bring_back(), other.lost()) == ("root keeps it out of use now: deepep-bootstrap: x (run test-8)", "")
    mine.leave("too late")
    assert (other.bring_back(), actions.lab.node("n001").state) == ("", "IDLE")

    # It came when the reboot was about to be asked for: one reboot, and the first run gives back.
    mine.take_out("x", mine.look())
    other.take_out("x", other.look())
    assert mine.reboot() == ""
    assert other.lost().startswith("Slurm reboots it already")
    other.put_back()
    assert actions.lab.reason("n001") == "deepep-bootstrap: x (run test-7)"
    wait_for(lambda: actions.lab.boot_id("n001") not in ("", before["n001"]) and mine.hold("x") == "")
    assert (mine.bring_back(), actions.lab.node("n001").state) == ("", "IDLE")


def test_without_slurm_over_ssh_and_busy_gpus_are_left_alone(actions: HostActions) -> None:
    actions.lab.fake("n002", "compute_apps", "0, 4711, python3, 1024")
    without_slurm(actions.lab, "n001", "n002")
    before = {host.name: actions.lab.boot_id(host.name) for host in NODES}
    outcomes = actions.roll(actions.order(N1), actions.order(N2), policy=replace(QUICK, at_once=0), slurm_at=())
    assert (outcomes["n001"].state, outcomes["n002"].state) == ("done", "skipped")
    assert outcomes["n002"].detail == "in use, left alone: process 0, 4711, python3, 1024"
    assert actions.lab.boot_id("n001") not in ("", before["n001"])
    assert actions.lab.boot_id("n002") == before["n002"]
    actions.lab.nsenter("n002", "slurmd")
    assert ("reboot", "rebooting over SSH (no node of Slurm)") in [
        ("reboot", line) for _, host, line in actions.lines if host == "n001"
    ]


def test_control_c_leaves_the_node_drained_and_a_later_run_brings_it_back(actions: HostActions) -> None:
    job = actions.lab.start_job("n001")
    pressed: list[str] = []

    def interrupt(host: str, line: str) -> None:
        # Once: the line comes again every second, and a second signal would meet the test runner itself.
        if "waiting for job" in line and not pressed:
            pressed.append(line)
            os.kill(os.getpid(), signal.SIGINT)

    actions.on_line = interrupt
    with pytest.raises(KeyboardInterrupt):
        actions.roll(actions.order_both()[0])
    assert [line for _, host, line in actions.lines][-1].startswith(
        "stays drained (deepep-bootstrap: driver options (run test-7))"
    )
    assert actions.lab.job_state(job) == "RUNNING"
    actions.lab.on_login(f"scancel {job}")
    assert actions.lab.reason("n001") == "deepep-bootstrap: driver options (run test-7)"
    fleet = ConnectionPool((LOGIN,), Options(ssh_config=str(actions.lab.lab.ssh_config)))
    told: list[str] = []
    left = {"n001": "deepep-bootstrap: driver options (run test-7)"}

    def bring_back(drained: dict[str, str]) -> list[tuple[str, str]]:
        done = rollout.bring_back(fleet, (LOGIN,), drained, lambda host, title, line: told.append(f"{host} {line}"))
        return [(one.state, one.detail) for one in done]

    # Somebody has made something else of it since its reason was read.
    theirs = {
        "reason='disk swap'": "root keeps it out of use now: disk swap",
        "state=fail reason='deepep-bootstrap: driver options (run test-7)'": "its state is IDLE+FAIL now",
        "state=resume": "somebody brought it back into use",
    }
    for command, said in theirs.items():
        actions.lab.on_login(f"scontrol update nodename=n001 {command}")
        assert bring_back(left) == [("skipped", f"left alone: {said}")]
    for command in ("state=undrain", "state=resume", f"state=drain reason='{left['n001']}'"):
        actions.lab.nsenter("login1", f"scontrol update nodename=n001 {command}")
    told.clear()
    assert bring_back(left) == [("done", "drained by an earlier run, nothing is left to do")]
    fleet.close()
    assert told == ["n001 back in use: nothing is left to do"]
    assert "DRAIN" not in actions.lab.node("n001").state


def test_a_reload_that_fails_is_no_failure_where_a_reboot_follows(
    actions: HostActions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        actions,
        "reload",
        lambda host: Outcome("reload", host.name, "failed", "in use by nv-hostengine (7)", code=TROUBLE),
    )
    order = actions.order(N1, node="n001", reload=True)
    outcomes = rollout.roll(actions.transport, (LOGIN,), (order,), QUICK, actions=actions, tell=actions.tell)
    assert [(one.step, one.state, one.code) for one in outcomes[1:]] == [
        ("reload", "skipped", 0),
        ("reboot", "done", 0),
    ]


def test_a_reload_that_takes_the_driver_away_leaves_the_node_drained_and_the_others_go_on(
    actions: HostActions, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, look, reload = "GPUs: found 0, wanted 8 as before", actions.look, actions.reload
    failed = Outcome("reload", "n001", "failed", "do not load again: nvidia", code=TROUBLE)
    monkeypatch.setattr(actions, "reload", lambda host: failed if host == N1 else reload(host))
    monkeypatch.setattr(
        actions, "look", lambda host: replace(look(host), unmet=(gone,), lost=(gone,)) if host == N1 else look(host)
    )
    orders = [actions.order(host, node=host.name, reload=True) for host in NODES]
    outcomes = actions.roll(*orders, policy=replace(QUICK, mode=NEVER, settle=0))
    assert (outcomes["n001"].state, outcomes["n001"].code) == ("failed", TROUBLE)
    assert actions.lab.reason("n001") == f"deepep-bootstrap: not as before its driver was reloaded: {gone} (run test-7)"
    assert "DRAIN" in actions.lab.node("n001").state
    assert (outcomes["n002"].state, actions.lab.reason("n002")) == ("unchanged", "")


def test_a_node_that_loses_its_drain_while_it_boots_is_drained_again(actions: HostActions) -> None:
    """As Slurm does when ResumeTimeout is over: DOWN, the reason kept with its own words behind it, and in use when
    slurmd registers."""
    mine = NodeDrain(Cluster(actions.transport, (LOGIN,)), "n001", "test-7")
    mine.take_out("x", mine.look())
    for state in ("resume", "down reason='deepep-bootstrap: x (run test-7) : reboot issued : reboot timed out'"):
        actions.lab.on_login(f"scontrol update nodename=n001 state={state}")
    assert "DRAIN" not in actions.lab.node("n001").state
    mine.keep_out("x")
    assert ("DRAIN" in actions.lab.node("n001").state, actions.lab.reason("n001")) == (
        True,
        "deepep-bootstrap: x (run test-7)",
    )
    assert (mine.bring_back(), actions.lab.reason("n001")) == ("", "")

    actions.lab.on_login("scontrol update nodename=n002 state=drain reason='disk swap'")
    theirs = NodeDrain(Cluster(actions.transport, (LOGIN,)), "n002", "test-7")
    theirs.take_out("x", theirs.look())
    for state in ("resume", "down reason='disk swap : reboot timed out'"):
        actions.lab.on_login(f"scontrol update nodename=n002 state={state}")
    theirs.keep_out("x")
    assert ("DRAIN" in actions.lab.node("n002").state, actions.lab.reason("n002")) == (True, "disk swap")


def test_trouble_before_anything_was_changed_is_that_of_its_host_alone(
    actions: HostActions, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, hiccups = actions.look, iter(range(2))

    def answer(host: Host) -> HostState:
        if host == N1 or next(hiccups, None) is not None:
            raise Trouble(Problem(host.name, "no answer"))
        return look(host)

    monkeypatch.setattr(actions, "look", answer)
    orders = [
        replace(actions.order(N1, node="n009"), host=Host("n009")),
        *(actions.order(host, node=host.name, reload=True) for host in NODES),
    ]
    outcomes = actions.roll(*orders, policy=replace(QUICK, mode=NEVER, settle=1))
    assert {host: (one.state, one.detail) for host, one in outcomes.items()} == {
        "n009": ("failed", "Slurm refuses: Node n009 not found"),
        "n001": ("failed", "no answer"),
        "n002": ("unchanged", "not needed: the driver was loaded anew"),
    }
    assert [actions.lab.reason(host.name) for host in NODES] == ["", ""]


def test_changes_that_fail_on_two_hosts_stop_the_wave_before_the_next_reboot(
    actions: HostActions, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, before, apply = threading.Barrier(3), actions.lab.boot_id("n001"), actions.apply

    def change(host: Host, step: Step) -> Outcome:
        begun.wait(60)
        if host == N2:
            return Outcome(step.title, host.name, "failed", "no repository", code=TROUBLE)
        wait_for(lambda: sum("not rebooted" in line for _, _, line in actions.lines) == 2)
        return apply(host, step)

    monkeypatch.setattr(actions, "apply", change)
    without_slurm(actions.lab, "n002")
    orders = (actions.order(N1, node="n001"), actions.order(N2), actions.order(N2))
    outcomes = actions.roll(*orders, policy=replace(QUICK, at_once=0))
    assert (outcomes["n001"].state, outcomes["n001"].code) == ("skipped", TROUBLE)
    assert outcomes["n001"].detail.startswith(
        "changed, waits for a reboot: not started: 2 hosts could not be changed, the last one n002: "
    )
    assert (actions.lab.boot_id("n001"), "DRAIN" in actions.lab.node("n001").state) == (before, True)
    assert actions.lab.reason("n001") == "deepep-bootstrap: changed, waits for a reboot: driver options (run test-7)"
    actions.lab.nsenter("n002", "slurmd")


def test_a_host_in_another_boot_than_was_looked_at_is_not_rebooted(actions: HostActions) -> None:
    before = control.boot_id(actions.transport, N1)
    with pytest.raises(Trouble, match="somebody rebooted it just now"):
        control.reboot(actions.transport, N1, "the boot before", "n001")
    assert control.boot_id(actions.transport, N1) == before


@pytest.mark.parametrize("begins", ["at once", "while it still answers", "never"])
def test_a_session_that_the_reboot_ends_before_its_word_is_here_says_nothing(
    actions: HostActions, monkeypatch: pytest.MonkeyPatch, begins: str
) -> None:
    """As where a busy sshd is killed before it passes on what the script said. A host that shuts down takes new
    sessions for a moment."""
    before, run = control.boot_id(actions.transport, N1), actions.transport.run
    lost: list[Job] = []

    def begin() -> None:
        with contextlib.suppress(Trouble):
            run(N1, lost.pop())

    def run_and_hear_nothing(host: Host, job: Job, on_line: OnLine | None = None) -> Reply:
        if job.script != control.REBOOT:
            reply = run(host, job, on_line)
            if lost and begins == "while it still answers":
                begin()
            return reply
        lost.append(job)
        if begins == "at once":
            begin()
        raise LostError(Problem(host.name, "the connection was lost while a script ran"), may_pass=True)

    monkeypatch.setattr(actions.transport, "run", run_and_hear_nothing)
    if begins == "never":
        with pytest.raises(LostError, match="the connection was lost"):
            control.reboot(actions.transport, N1, before, "n001", patience=0)
        assert actions.lab.boot_id("n001") == before
        return
    control.reboot(actions.transport, N1, before, "n001")
    wait_for(lambda: actions.lab.boot_id("n001") not in ("", before))
    wait_for(lambda: actions.lab.ssh("n001", "true").returncode == 0)
    wait_for(lambda: actions.lab.node("n001").state == "IDLE")


def test_a_host_on_which_slurm_runs_something_that_nobody_knows_of_is_not_rebooted(actions: HostActions) -> None:
    """The processes of the host itself decide, as root sees them: a node of another host may be idle."""
    before = control.boot_id(actions.transport, N1)
    job = actions.lab.start_job("n001")
    for node, found in (("", r"slurmd \(\d+, root\), slurmstepd"), ("n002", "slurmstepd")):
        with pytest.raises(NotRebootedError, match=rf"not rebooted — found {found} \(\d+, root\) runs there, although"):
            control.reboot(actions.transport, N1, before, node)
    assert (control.boot_id(actions.transport, N1), actions.lab.job_state(job)) == (before, "RUNNING")
    actions.lab.on_login(f"scancel {job}")
    wait_for(lambda: control.slurm_processes(actions.transport, N1).count("slurm") == 1)


def test_a_session_to_a_host_that_lost_power_is_not_used_again(actions: HostActions) -> None:
    before = control.boot_id(actions.transport, N1)
    actions.lab.power_cut("n001")
    actions.lab.boot("n001")
    # Under load its sshd takes longer than these connections wait for one.
    wait_for(lambda: actions.lab.ssh("n001", "true").returncode == 0)
    actions.transport.forget(N1)
    # On the session of before nobody would answer, and none would come of it.
    assert control.boot_id(actions.transport, N1) not in ("", before)


def test_slurm_is_asked_where_it_answers_and_as_root_where_it_must_be(actions: HostActions) -> None:
    gone, plain = Host("n009"), replace(LOGIN, user="keeper")
    fleet = ConnectionPool((gone, plain), Options(ssh_config=str(actions.lab.lab.ssh_config)))
    cluster = Cluster(fleet, (plain,))
    cluster.tell(nodes.drain("n002", nodes.our_reason("a test", "")))
    assert actions.lab.reason("n002") == "deepep-bootstrap: a test"
    cluster.tell(nodes.resume("n002"))
    begin = threading.Event()
    nobody = Cluster(fleet, (replace(LOGIN, user="builder"),), sleep=lambda seconds: begin.set())
    with pytest.raises(Trouble, match="sudo"):
        nobody.tell(nodes.drain("n002", "x"))
    with pytest.raises(Trouble, match="Slurm refuses — found slurm_update error: Invalid node name"):
        cluster.tell(nodes.resume("n009"))
    assert not begin.is_set()
    look = cluster.look("n001", "n002")
    assert (sorted(look.nodes), look.reboot_program) == (["n001", "n002"], "/usr/sbin/lab-reboot")
    assert [node.name for node in cluster.known("elsewhere", "n001", "n002", "n002.a.example")] == ["n001", "n002"]
    assert cluster.known("elsewhere") == ()
    assert abs(look.now.astimezone() - datetime.now().astimezone()) < timedelta(minutes=1)
    fleet.close()


@pytest.mark.parametrize(
    ("window", "inside", "outside"),
    [
        ("22:00-06:00", ["22:00", "23:59", "00:00", "05:59"], ["06:00", "12:00", "21:59"]),
        ("09:30-10:00", ["09:30"], ["09:29", "10:00"]),
    ],
)
def test_windows(window: str, inside: list[str], outside: list[str]) -> None:
    read = parse_window(window)
    assert read is not None
    assert str(read) == window
    assert [read.holds(clock.fromisoformat(text)) for text in (*inside, *outside)] == [True] * len(inside) + [
        False
    ] * len(outside)
    assert parse_window("") is None


@pytest.mark.parametrize("text", ["22-6", "24:00-06:00", "22:00-22:00", "22:00", "2200-0600", " 22:00-06:00"])
def test_no_window(text: str) -> None:
    with pytest.raises(Trouble, match="--reboot-window: not a time of day"):
        parse_window(text)
