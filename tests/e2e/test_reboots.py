"""Hosts prepared by the whole program: packages from a signed repository, driver options, drains and reboots under a
real Slurm."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.e2e import Engine, wait_until
from tests.support.repos import Package, Repository, make_apt_repository

if TYPE_CHECKING:
    from tests.support.lab import LiveLab

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = pytest.mark.e2e

ROW = """doca-ofed = ["doca-ofed=3.2.1*"]
hold = ["doca-*"]

[system.{2}.repository.doca]
url = "{0.url}"
suite = "./"
key_url = "{0.key_url}"
key_fingerprint = "{1}"
purposes = ["doca-ofed"]
"""
OURS = "/etc/modprobe.d/zz-deepep.conf"
HOLD_LOCK = """
import fcntl, pathlib, sys, time
held = open("/var/lib/dpkg/lock-frontend", "w")
fcntl.lockf(held, fcntl.LOCK_EX)
pathlib.Path("/run/held").touch()
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def bare_engine(private_engine: Engine) -> Iterator[Engine]:
    """A cluster as it comes: RDMA devices with the kernel's own driver, no driver options; a lock with a repository
    for DOCA-OFED."""
    lab = private_engine.lab
    made = make_apt_repository(lab.shared / "apt", [Package("doca-ofed", "3.2.1-044000")], seen_as="/shared/apt")
    add_row(private_engine, made, made.fingerprint)
    for host in ("n001", "n002"):
        lab.fake(host, "rdma_inbox", "1")
    lab.bare("n001", "n002")
    private_engine.use_built()
    yield private_engine
    lab.on_login("scontrol update nodename=n[001-002] state=resume || true")  # refused for nodes that are in use
    for host in ("n001", "n002"):
        for name in ("rdma_inbox", "forget_options", "no_return"):
            lab.fake(host, name, None)


def add_row(engine: Engine, made: Repository, fingerprint: str) -> None:
    """Give this machine's distribution, which lab hosts have too, a repository for DOCA-OFED."""
    text = engine.lock.read_text()
    name = next(name for name in re.findall(r"^\[system\.([\w-]+)\]$", text, re.MULTILINE) if name in own_names())
    head = f'[system.{name}]\nmanager = "apt"\n'
    before, after = text.split(head)
    line, rest = after.split("\n", 1)
    engine.lock.write_text(f"{before}{head}{line}\n{ROW.format(made, fingerprint, name)}{rest}")


def own_names() -> set[str]:
    """What the lock may call this machine's distribution."""
    release = platform.freedesktop_os_release()
    return {
        f"{release['ID']}-{release['VERSION_ID'].replace('.', '_')}",
        f"{release['ID']}-{release['VERSION_ID'].split('.')[0]}",
    }


def wait_while_running(process: subprocess.Popen[str], condition: Callable[[], object], what: str) -> None:
    """Wait for a condition while a command runs; say what it printed when that ends first or nothing comes of it."""
    try:
        wait_until(lambda: condition() or process.poll() is not None, what)
        assert process.poll() is None, "ended"
    except AssertionError as error:
        process.kill()
        raise AssertionError(f"{error}: {process.communicate()[0]}") from None


def hold_package_lock(lab: LiveLab, host: str, seconds: int) -> subprocess.Popen[str]:
    """Hold the package database of a host as another apt would."""
    argv = ["ssh", "-F", str(lab.lab.ssh_config), host, "python3", "-", str(seconds)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, text=True)
    assert process.stdin
    process.stdin.write(HOLD_LOCK)
    process.stdin.close()
    wait_until(lambda: lab.nsenter(host, "test -e /run/held").returncode == 0, "the package lock is held")
    return process


def test_nodes_are_installed_drained_rebooted_one_by_one_and_given_back(bare_engine: Engine) -> None:
    lab, boots = bare_engine.lab, {host: bare_engine.lab.boot_id(host) for host in ("n001", "n002")}
    lab.nsenter(
        "n001",
        "echo 'options nvidia NVreg_RegistryDwords=\"RMForce=0x7;PeerMappingOverride=0\"' >/etc/modprobe.d/site.conf",
    )

    # Without a terminal nothing is rebooted; what only files are needed for is written, and what waits is named.
    ended = bare_engine.run("bootstrap")
    assert ended.code == 1
    assert "DOCA-OFED: waits for a reboot — found rocep" in ended.err
    assert "driver options: waits for a reboot — found EnableStreamMemOPs: 0" in ended.err
    assert "Try: invoke bootstrap --reboot=rolling" in ended.err
    assert {host: lab.boot_id(host) for host in boots} == boots
    assert lab.node("n001").state.startswith("IDLE")
    assert 'RMForce=0x7;PeerMappingOverride=1;"' in lab.nsenter("n001", f"cat {OURS}").stdout
    assert lab.nsenter("n001", "dpkg-query -W doca-ofed").returncode != 0

    # One node is drained by the administrator, on the other a job runs and something else is installing packages.
    lab.on_login("scontrol update nodename=n001 state=drain reason='disk swap'")
    job = lab.start_job("n002")
    holder = hold_package_lock(lab, "n002", 6)
    process = bare_engine.start("bootstrap", "--reboot=rolling", "--boot-timeout=60s")
    wait_while_running(process, lambda: lab.boot_id("n001") not in ("", boots["n001"]), "n001 was rebooted")
    assert (lab.job_state(job), lab.boot_id("n002")) == ("RUNNING", boots["n002"])
    wait_while_running(process, lambda: lab.reason("n002").startswith("deepep-bootstrap: "), "n002 is drained by us")
    # The job goes on until the wave has seen it: the look at its pods comes between the drain and that.
    assert process.stdout
    out = ""
    while line := process.stdout.readline():
        out += line
        if "n002: drained, waiting for" in line:
            break
    (lab.shared / "go").touch()
    out += process.stdout.read()
    process.wait()
    holder.wait()
    assert process.returncode == 0, out
    told = re.search(r"^\d\d:\d\d:\d\d n002: drained, waiting for (?:a )?job", out, re.MULTILINE)
    assert told, f"a wave that lasts hours says when: {out}"
    assert re.search(r"^done DOCA-OFED and reboot on .* — active since the reboot at \d\d:\d\d", out, re.MULTILINE), out
    assert lab.job_state(job) == "COMPLETED"
    assert lab.boot_id("n002") not in ("", boots["n002"])
    assert "disk swap" in lab.reason("n001")
    assert lab.node("n002").state.startswith("IDLE"), lab.node("n002")
    for host in ("n001", "n002"):
        assert "mlx5_0" in lab.nsenter(host, "ls /sys/class/infiniband").stdout
        assert "doca-ofed" in lab.nsenter(host, "apt-mark showhold").stdout
    assert "RMForce=0x7" in lab.nsenter("n001", "cat /proc/driver/nvidia/params").stdout
    again = bare_engine.run("bootstrap")
    assert again.code == 0
    assert "Nothing to do" in again.out
    assert bare_engine.run("status").code == 0

    # What was written goes again, what stood there before is back; packages stay.
    # From one host alone: what is offered is everybody's.
    removed = bare_engine.run("remove", "--limit=n002", "--yes")
    assert (removed.code, "stay, and so does the offer" in removed.out) == (0, True), removed.text
    assert bare_engine.run("verify", "--limit=n001").code == 0
    assert lab.nsenter("n001", f"test -e {OURS}").returncode == 0
    assert lab.nsenter("n002", f"test -e {OURS} || test -e /etc/profile.d/zz-deepep.sh").returncode != 0
    assert lab.nsenter("n002", "apt-mark showhold").stdout == ""
    removed = bare_engine.run("remove", "--yes")
    assert removed.code == 0, removed.text
    assert "n001: no longer hold doca-ofed (doca-ofed)" in removed.out
    assert lab.nsenter("n001", "apt-mark showhold").stdout == ""
    assert lab.nsenter("n001", f"test -e {OURS} || test -e /etc/profile.d/zz-deepep.sh").returncode != 0
    assert "RMForce" in lab.nsenter("n001", "cat /etc/modprobe.d/site.conf").stdout
    assert lab.nsenter("n001", "dpkg-query -W doca-ofed").returncode == 0
    assert "nothing is offered" in bare_engine.run("verify").err


@pytest.mark.long
def test_a_node_that_comes_back_without_the_option_and_one_that_does_not_stay_drained(bare_engine: Engine) -> None:
    lab = bare_engine.lab
    lab.fake("n001", "forget_options", "1")
    lab.fake("n002", "no_return", "1")
    # Both at a time: each is found out after as long as a boot may take here.
    ended = bare_engine.run("bootstrap", "--reboot=all", "--boot-timeout=20s")
    assert ended.code == 1
    assert "came back without what was wanted: driver options: found EnableStreamMemOPs: 0" in ended.text
    assert "did not come back within 20 s after its reboot" in ended.text
    assert lab.reason("n001").startswith("deepep-bootstrap: came back without what was wanted")
    assert lab.reason("n002").startswith("deepep-bootstrap: did not come back")
    assert "DRAIN" in lab.node("n001").state
    drained = bare_engine.json("status")["drained"]
    assert set(drained) == {"n001", "n002"}  # n002 is off: Slurm still knows

    # Somebody switches n002 on: the next run gives it back, and does not try the same again with n001: that reboot did
    # not help.
    lab.fake("n002", "no_return", None)
    boot_drained(lab, "n002")
    first = lab.boot_id("n001")
    ended = bare_engine.run("bootstrap", "--reboot=rolling")
    assert (ended.code, "resume in Slurm" in ended.out) == (1, True), ended.text
    assert "driver options: was rebooted since it was written, and is still not as wanted" in ended.err
    assert (lab.boot_id("n001"), lab.reason("n002")) == (first, "")
    assert lab.reason("n001").startswith("deepep-bootstrap: came back without what was wanted")

    # Somebody mends n001; to give it back is all there is to do.
    lab.fake("n001", "forget_options", None)
    boot_drained(lab, "n001")
    ended = bare_engine.run("bootstrap")
    assert (ended.code, lab.reason("n001")) == (0, ""), ended.text
    assert "resume in Slurm" in ended.out
    assert "deep_ep imported" in ended.out
    assert {lab.node(host).state for host in ("n001", "n002")} <= {"IDLE", "IDLE+PLANNED"}


def boot_drained(lab: LiveLab, host: str) -> None:
    """Switch a drained node off and on again, and wait for its slurmd."""
    lab.boot(host)
    wait_until(lambda: "DRAIN" in lab.node(host).state and "*" not in lab.node(host).state, "slurmd answers")


def test_a_repository_with_another_key_is_refused_before_anything_of_it_is_written(private_engine: Engine) -> None:
    lab = private_engine.lab
    made = make_apt_repository(lab.shared / "apt", [Package("doca-ofed", "3.2.1-044000")], seen_as="/shared/apt")
    add_row(private_engine, made, "0" * 40)
    lab.fake("n001", "rdma_inbox", "1")
    lab.reboot("n001")
    boot = lab.boot_id("n001")
    try:
        ended = private_engine.run("bootstrap", "--reboot=rolling", "--limit=n001,login1")
    finally:
        lab.fake("n001", "rdma_inbox", None)
    assert ended.code == 1
    assert f"not the key in the lock — found {made.fingerprint}, wanted {'0' * 40}" in ended.text
    assert lab.boot_id("n001") == boot
    written = lab.nsenter("n001", "ls /etc/apt/sources.list.d /etc/apt/keyrings /etc/apt/preferences.d").stdout
    assert "deepep" not in written
