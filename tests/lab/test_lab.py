"""The embedded cluster itself: real hosts, real Slurm, both module systems, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deepep_bootstrap.cli.commands import lab as verb
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.lab import clean, cluster, hosts, slurm
from deepep_bootstrap.lab import cluster_lab as labs
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from tests.support.lab import LiveLab

pytest_plugins = ["tests.support.lab"]

PATIENCE = 300.0
TWO_NODES = """#!/bin/bash -l
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --output=/shared/job.out
type -t module
echo "gpus $CUDA_VISIBLE_DEVICES"
srun --ntasks-per-node=1 hostname
echo end
"""


@pytest.fixture(scope="module")
def lab(lab: LiveLab) -> LiveLab:
    """The run's lab as it is at first: files that came before this one left their own accounts and files in it."""
    lab.reset()
    return lab


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE:g} s: {what}"
        time.sleep(0.05)


def traces(folder: str) -> list[str]:
    """Everything a lab in `folder` can leave on the machine, as text."""
    mark = f"{labs.MARK}={folder}".encode()
    found = [f"mount {point}" for point, _ in clean.mounts(folder)]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(f"process {process.name}")
    links = subprocess.run(["ip", "-j", "link"], capture_output=True, text=True, check=True).stdout
    found += [f"link {link['ifname']}" for link in json.loads(links) if folder in link.get("ifalias", "")]
    return found + [f"folder {folder}"] * Path(folder).exists()


def bridges() -> set[str]:
    """The names of the machine's bridges."""
    shown = subprocess.run(["ip", "-j", "link", "show", "type", "bridge"], capture_output=True, text=True, check=True)
    return {link["ifname"] for link in json.loads(shown.stdout or "[]")}


@pytest.fixture
def folder(namespaces: None) -> Iterator[str]:
    """A lab folder for one test, taken down whatever happens."""
    name = f"/run/deepep-lab-test-{os.getpid()}-own"
    yield name
    cluster.down(name)


def test_every_host_answers_as_itself(lab: LiveLab) -> None:
    for name, address in lab.hosts.items():
        done = lab.ssh(name, "hostname; hostname -I; id -un; cat /proc/sys/kernel/random/boot_id")
        assert done.stdout.split() == [name, address, "root", lab.boot_id(name)], done.stderr


def test_hosts_do_not_show_the_machine(lab: LiveLab, tmp_path: Path) -> None:
    (tmp_path / "private").touch()
    secret = Path("/root/.deepep-lab-test")
    secret.touch()
    try:
        shown = lab.ssh(
            "n001", f"ls -A /root /home /opt /usr/local/bin; ls -d {tmp_path} {ROOT} {lab.dir}; which -a python3"
        ).stdout
    finally:
        secret.unlink()
    folders = ["/home:", "builder", "keeper", "/opt:", "/root:", ".bashrc", ".profile", ".ssh", "/usr/local/bin:"]
    assert shown.split() == [*folders, "/usr/bin/python3", "/bin/python3"]


def test_a_host_writes_to_its_own_disk_only(lab: LiveLab) -> None:
    lab.ssh("n001", "echo options nvidia x=1 >/etc/modprobe.d/lab-test.conf; rm /usr/bin/file")
    assert (lab.disk("n001") / "etc/modprobe.d/lab-test.conf").read_text() == "options nvidia x=1\n"
    assert not Path("/etc/modprobe.d/lab-test.conf").exists()
    assert lab.ssh("n002", "test -e /usr/bin/file && test ! -e /etc/modprobe.d/lab-test.conf").returncode == 0
    lab.ssh("n001", "touch /shared/seen")
    assert lab.ssh("login1", "ls /shared/seen").returncode == 0


def test_plain_users_can_log_in_and_one_may_use_sudo(lab: LiveLab) -> None:
    for user, code in (("builder", 1), ("keeper", 0)):
        argv = ["ssh", "-F", str(lab.lab.ssh_config), "-l", user, "n001", "sudo -n id -u"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.strip()) == (code, "0" if code == 0 else ""), done.stderr


def test_what_a_users_job_prints_is_where_it_was_submitted(lab: LiveLab) -> None:
    def as_builder(host: str, command: str) -> str:
        argv = ["ssh", "-F", str(lab.lab.ssh_config), "-l", "builder", host, command]
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout

    as_builder("login1", "sbatch --wait --output=job.out --wrap 'hostname; id -un; ulimit -l'")
    seen = as_builder("login1", "cat ~/job.out").split()
    assert (seen[:2], as_builder("n002", "cat job.out").split()) == (["n001", "builder"], seen)


def test_slurmd_may_lock_all_memory_or_shows_so(lab: LiveLab) -> None:
    asked = "cat /proc/$(pgrep -x slurmd)/limits | grep 'Max locked memory'"
    assert lab.ssh("n001", asked).stdout.split()[3:5] == ["unlimited", "unlimited"]


def test_a_file_to_source_gives_hosts_lock_and_mirrors(
    lab: LiveLab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb.lab("up", dir=str(lab.dir)) == 0
    said = capsys.readouterr().err
    assert f"    . {lab.dir}/try.sh; invoke plan\n" in said
    names = ("DEEPEP_SSH_CONFIG", "DEEPEP_HOSTS", "DEEPEP_LOCK", "DEEPEP_MIRRORS")
    shell = f". {lab.dir}/try.sh; " + "; ".join(f'printf "%s\\0" "${name}"' for name in names)
    read = subprocess.run(["dash", "-euc", shell], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    ssh_config, hosts_file, lock, mirrors, _ = read.split("\0")
    assert (ssh_config, hosts_file) == (str(lab.lab.ssh_config), str(lab.hosts_file))
    assert Path(lock).read_text() == (ROOT / "tests/upstreams/demo.lock.toml").read_text()
    assert mirrors.split() == [
        f"https://example.invalid/standin/={lab.dir}/standin/git/standin/",
        f"index:standin={lab.dir}/standin/wheels",
    ]
    argv = ["dash", "-euc", f'. {lab.dir}/try.sh; exec "$@"', "dash", sys.executable, "-m", "invoke", "plan"]
    planned = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (planned.returncode, "build deepep 1.2.1" in planned.stdout) == (0, True), planned.stdout + planned.stderr


def test_gpu_nodes_look_like_gpu_nodes(lab: LiveLab) -> None:
    query = (
        "nvidia-smi --query-gpu=index,name,memory.total,compute_cap,driver_version,pci.bus_id,uuid "
        "--format=csv,noheader,nounits"
    )
    lines = lab.ssh("n001", query).stdout.splitlines()
    assert len(lines) == 8
    assert (
        lines[7]
        == "7, NVIDIA H100 80GB HBM3, 81559, 9.0, 580.95.05, 00000000:83:00.0, GPU-00000000-0000-4000-8000-000000000007"
    )
    assert (
        'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"'
        in lab.ssh("n001", "cat /proc/driver/nvidia/params").stdout
    )
    rdma = """cd /sys/class/infiniband; for d in mlx5_*; do
        echo $d $(basename $(readlink $d/device/driver)) $(cat $d/device/numa_node $d/ports/1/link_layer $d/ports/1/state); done"""
    lines = lab.ssh("n001", rdma).stdout.splitlines()
    assert lines == [f"mlx5_{index} mlx5_core {index // 4} InfiniBand 4: ACTIVE" for index in range(8)]
    assert lab.ssh("login1", "ls /dev/nvidia0 /sys/class/infiniband; which nvidia-smi").stdout == ""


def test_a_test_can_change_a_fake(lab: LiveLab) -> None:
    lab.fake("n002", "capability", "10.0")
    lab.fake("n002", "compute_apps", "0, 4711, python3, 1024")
    try:
        asked = (
            "for q in gpu=compute_cap compute-apps=pid,used_memory; do nvidia-smi --query-$q "
            "--format=csv,noheader; done"
        )
        assert lab.ssh("n002", asked).stdout.splitlines() == ["10.0"] * 8 + ["4711, 1024 MiB"]
        assert lab.ssh("n001", asked).stdout.splitlines() == ["9.0"] * 8
    finally:
        lab.fake("n002", "capability", None)
        lab.fake("n002", "compute_apps", None)


def submit(lab: LiveLab) -> str:
    (lab.shared / "job.sh").write_text(TWO_NODES)
    assert lab.ssh("login1", "cd /shared; sbatch job.sh").returncode == 0
    output = lab.shared / "job.out"
    wait_for("the job's end", lambda: output.exists() and output.read_text().endswith("end\n"))
    return output.read_text()


def test_a_job_runs_on_two_nodes_with_their_gpus(lab: LiveLab) -> None:
    lines = submit(lab).splitlines()
    assert lines[:2] == ["function", "gpus 0,1,2,3,4,5,6,7"]
    assert sorted(lines[2:4]) == ["n001", "n002"]


def test_modules_work_in_login_shells_with_lmod(lab: LiveLab) -> None:
    for name in lab.hosts:
        assert "Modules based on Lua" in lab.ssh(name, "bash -lc 'module --version' 2>&1").stdout


def test_modules_work_in_login_shells_with_environment_modules(modules_lab: LiveLab, lab: LiveLab) -> None:
    assert modules_lab.hosts["n001"] != lab.hosts["n001"]  # two labs run side by side
    for name in modules_lab.hosts:
        assert "Modules Release" in modules_lab.ssh(name, "bash -lc 'module --version' 2>&1").stdout
    assert submit(modules_lab).splitlines()[0] == "function"


def test_reboot_gives_a_new_boot_id_and_keeps_the_disk(lab: LiveLab) -> None:
    before = lab.boot_id("n001")
    lab.ssh("n001", "touch /root/kept /tmp/lost")
    # An orderly shutdown may end the session before ssh hears how the command ended (255) or after it (0).
    assert lab.ssh("n001", "reboot").returncode in (0, 255)
    wait_for("the reboot", lambda: lab.boot_id("n001") not in ("", before))
    assert lab.ssh("n001", "ls /root/kept; ls /tmp").stdout == "/root/kept\n"
    assert float(lab.ssh("n001", "cut -d' ' -f1 /proc/uptime").stdout) < PATIENCE


def test_slurm_reboots_a_node(lab: LiveLab) -> None:
    before = lab.boot_id("n002")
    assert lab.ssh("login1", "scontrol reboot ASAP nextstate=resume reason=test n002").returncode == 0
    wait_for("the reboot", lambda: lab.boot_id("n002") not in ("", before))
    slurm.wait_idle(lab.lab, hosts.enter(lab.lab, "login1"), hosts.logs(lab.lab))


PARAMS = "head -n 2 /proc/driver/nvidia/params"


def test_what_the_driver_shows_follows_from_the_disk(fresh_lab: LiveLab) -> None:
    fresh_lab.bare("n001")
    assert fresh_lab.ssh("n001", PARAMS).stdout == 'EnableStreamMemOPs: 0\nRegistryDwords: ""\n'
    options = 'options nvidia NVreg_EnableStreamMemOPs=1 \\\n NVreg_RegistryDwords="Site=7; PeerMappingOverride=1"\n'
    write = f"printf %s '{options}' >/etc/modprobe.d/site.conf; update-initramfs -u; {PARAMS}"
    assert "EnableStreamMemOPs: 0" in fresh_lab.ssh("n001", write).stdout
    fresh_lab.fake("n001", "forget_options", "")
    fresh_lab.reboot("n001")
    assert "EnableStreamMemOPs: 0" in fresh_lab.ssh("n001", PARAMS).stdout
    fresh_lab.fake("n001", "forget_options", None)
    reload = (
        f"modprobe -r nvidia_uvm && modprobe -r nvidia_modeset; lsmod | grep -c nvidia; nvidia-smi -L; modprobe "
        f"nvidia_uvm; {PARAMS}"
    )
    shown = fresh_lab.ssh("n001", reload).stdout.splitlines()
    assert (shown[0], shown[1][:22]) == ("0", "NVIDIA-SMI has failed ")
    assert shown[2:] == ["EnableStreamMemOPs: 1", 'RegistryDwords: "Site=7; PeerMappingOverride=1"']
    assert fresh_lab.tools_log("n001").splitlines()[0] == "update-initramfs -u"
    fresh_lab.fake("n001", "compute_apps", "0, 4711, python3, 1024")
    refused = fresh_lab.ssh("n001", "rmmod nvidia; rmmod nvidia_uvm; modprobe nothing_of_the_kind").stderr
    for said in (
        "nvidia is in use by: nvidia_uvm",
        "nvidia_uvm is in use",
        "nothing_of_the_kind not found in directory /lib/modules",
    ):
        assert said in refused


def test_drivers_that_wait_for_a_package_and_a_host_that_does_not_return(fresh_lab: LiveLab) -> None:
    for name in ("rdma_inbox", "no_driver", "no_return"):
        fresh_lab.fake("n002", name, "")
    look = (
        "ls /sys/class/infiniband | head -n 1; ls /proc/driver; nvidia-smi >/dev/null; echo $?; cat "
        "/sys/bus/pci/devices/0000:13:00.0/class"
    )
    fresh_lab.power_cut("n002")
    fresh_lab.boot("n002")
    wait_for("sshd of n002", lambda: fresh_lab.ssh("n002", "true").returncode == 0)
    assert fresh_lab.ssh("n002", look).stdout.split() == ["rocep114s0", "9", "0x030200"]
    fresh_lab.ssh(
        "n002",
        "mkdir /usr/share/doca-ofed /usr/share/nvidia-driver; touch /usr/share/doca-ofed/installed "
        "/usr/share/nvidia-driver/installed",
    )
    fresh_lab.ssh("n002", "reboot")
    wait_for("the end of n002", lambda: not (fresh_lab.boot_id("n002") or processes_of(fresh_lab, "n002")))
    fresh_lab.fake("n002", "no_return", None)
    fresh_lab.boot("n002")
    wait_for("sshd of n002", lambda: fresh_lab.ssh("n002", "true").returncode == 0)
    assert fresh_lab.ssh("n002", look).stdout.split() == ["mlx5_0", "nvidia", "0", "0x030200"]


def processes_of(lab: LiveLab, name: str) -> list[str]:
    """Return the processes of one host, its supervisor included."""
    mark = f"{labs.MARK}_HOST={lab.lab.home(name)}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(process.name)
    return found


def test_after_a_power_cut_up_boots_the_host_again(lab: LiveLab) -> None:
    before = {name: lab.boot_id(name) for name in lab.hosts}
    lab.power_cut("n001")
    assert cluster.state(str(lab.dir))["state"] == "broken"
    with pytest.raises(Trouble, match="this lab host is off"):
        lab.nsenter("n001", "true")
    cluster.up(str(lab.dir), "lmod", print)
    assert lab.boot_id("n001") not in ("", before["n001"])
    assert {name: lab.boot_id(name) for name in ("n002", "login1")} == {
        name: before[name] for name in ("n002", "login1")
    }


def test_reset_gives_fresh_disks(lab: LiveLab) -> None:
    lab.ssh("n001", "touch /root/old /shared/old; rm /etc/debian_version")
    lab.fake("n001", "gpus", "4")
    lab.reset()
    shown = lab.ssh("n001", "ls /root /shared; test -e /etc/debian_version && nvidia-smi -L | wc -l").stdout
    assert shown.split() == ["/root:", "/shared:", "8"]


def test_up_again_changes_nothing(lab: LiveLab) -> None:
    before = cluster.state(str(lab.dir))
    cluster.up(str(lab.dir), "lmod", print)
    assert cluster.state(str(lab.dir)) == before


def test_up_with_another_layer_is_refused(lab: LiveLab) -> None:
    with pytest.raises(Trouble, match="has another module system — found lmod, wanted environment-modules"):
        cluster.up(str(lab.dir), "environment-modules", print)


def test_up_with_other_hosts_is_refused(lab: LiveLab) -> None:
    with pytest.raises(Trouble, match="has other hosts — found three with Slurm, wanted 64 without Slurm"):
        cluster.up(str(lab.dir), "lmod", print, light=64)


def test_status_as_json(lab: LiveLab, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.lab("status", dir=str(lab.dir), json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["verb"], document["exit"], document["state"]) == (1, "lab", 0, "up")
    assert [host["name"] for host in document["hosts"]] == ["n001", "n002", "login1"]
    assert all(re.fullmatch(r"[0-9a-f-]{36}", host["boot_id"]) for host in document["hosts"])


def test_the_demo_file_names_the_labs_hosts(lab: LiveLab) -> None:
    lines = [
        line for line in (ROOT / "hosts" / "demo.txt").read_text().splitlines() if line and not line.startswith("#")
    ]
    assert lines == ["defaults prefix=/shared/deepep", "n[001-002]", "login1 role=login"]
    written = lab.hosts_file.read_text().splitlines()
    assert written == ["defaults prefix=/shared/deepep", "n001 role=gpu", "n002 role=gpu", "login1 role=login"]


def test_killed_supervisors_leave_a_lab_that_down_removes(folder: str) -> None:
    made = cluster.up(folder, "lmod", print)
    assert len(traces(folder)) > 5
    for name in labs.ROLES:
        supervisor = int(Path(f"/proc/{labs.alive(made, name)}/status").read_text().split("PPid:")[1].split()[0])
        os.kill(int(Path(f"/proc/{supervisor}/status").read_text().split("PPid:")[1].split()[0]), signal.SIGKILL)
    cluster.down(folder)
    assert traces(folder) == []


@pytest.mark.parametrize("stage", ["mount", "link", "process"])
def test_an_up_killed_at_any_stage_can_be_repeated_or_removed(folder: str, stage: str) -> None:
    body = f"from deepep_bootstrap.lab import cluster; cluster.up({folder!r}, 'lmod', print)"
    process = subprocess.Popen([sys.executable, "-c", body], cwd=ROOT)
    while not any(trace.startswith(stage) for trace in traces(folder)):
        assert process.poll() is None, f"it ended before there was a {stage}"
    process.kill()
    process.wait()
    cluster.up(folder, "lmod", print)
    assert cluster.state(folder)["state"] == "up"
    cluster.down(folder)
    assert traces(folder) == []


def test_a_bridge_whose_lab_is_gone_is_found_by_its_alias(folder: str) -> None:
    cluster.up(folder, "lmod", print)
    clean.end_processes(folder)
    wait_for(
        "the unmount", lambda: subprocess.run(["umount", folder], check=False, capture_output=True).returncode == 0
    )
    cluster.down(folder)
    assert traces(folder) == []


def test_a_network_that_another_lab_just_takes_is_left_to_it(folder: str) -> None:
    """As one whose `up` has made its bridge and not yet given it an address."""
    wanted = labs.new_lab(folder, labs.NAMESPACES, "lmod").bridge
    subprocess.run(["ip", "link", "add", wanted, "type", "bridge"], check=True)
    try:
        made = cluster.up(folder, "lmod", print, light=1)
        assert made.bridge != wanted
        cluster.down(folder)
        assert wanted in bridges()
    finally:
        subprocess.run(["ip", "link", "del", wanted], check=True)


def test_two_labs_that_want_the_same_network_at_once_get_two(folder: str) -> None:
    other = next(
        name
        for name in (f"{folder}-{number}" for number in range(100_000))
        if labs.network_of(name) == labs.network_of(folder)
    )
    body = (
        "import sys; from deepep_bootstrap.lab import cluster; print(cluster.up(sys.argv[1], 'lmod', print, 1).bridge)"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", body, name], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for name in (folder, other)
    ]
    try:
        printed = [process.communicate()[0] for process in started]
        assert [process.returncode for process in started] == [0, 0]
        assert len({text.split()[-1] for text in printed}) == 2
    finally:
        cluster.down(other)


def test_a_process_that_becomes_the_labs_while_it_goes_down_is_ended(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that `up` was about to start when it was killed: it holds the folder and bears no mark yet."""
    Path(folder).mkdir()
    subprocess.run(["mount", "-t", "tmpfs", clean.MOUNT_SOURCE, folder], check=True)
    late = f"exec 8>{folder}/console; echo open; read -r _; exec env {labs.MARK}={folder} sleep 600"
    process = subprocess.Popen(["bash", "-c", late], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "open\n"
    end = clean.end_processes

    def ended(*given: str) -> None:
        end(*given)
        if process.stdin and not process.stdin.closed:
            process.stdin.write("go\n")
            process.stdin.close()

    monkeypatch.setattr(clean, "end_processes", ended)
    cluster.down(folder)
    assert (process.wait(), os.path.exists(folder)) == (-signal.SIGKILL, False)


def test_down_waits_for_nobody_and_names_who_holds_the_folder(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.up(folder, "lmod", print)
    clean.end_processes(folder)  # with its own limit: on a busy machine that takes its time
    monkeypatch.setattr(clean, "END_LIMIT", 0.5)
    holder = subprocess.Popen(["sleep", "600"], cwd=folder)
    try:
        with pytest.raises(Trouble, match=rf"cannot be unmounted — found in use by process {holder.pid}"):
            cluster.down(folder)
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "start"}, "no such action — found start, wanted up, down or status"),
        ({"action": "up", "layer": "tcl"}, "no such module system — found tcl"),
        ({"action": "up", "light": 300}, "so many hosts cannot be — found 300, wanted 1 to 240"),
        ({"action": "up", "dir": "/run/a:b"}, "this folder cannot hold a lab"),
        ({"action": "down", "dir": "/"}, "this folder cannot hold a lab"),
    ],
)
def test_wrong_words_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(Trouble, match=re.escape(message)):
        verb.lab(arguments.pop("action"), **arguments)


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(Trouble, match="holds something else"):
        cluster.up(str(tmp_path), "lmod", print)
    cluster.down(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_status_without_a_lab(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.lab("status", dir=str(tmp_path / "none")) == 0
    assert capsys.readouterr().out == f"lab in {tmp_path}/none: down\n"


AS_PLAIN_USER = """
import json, subprocess, sys
from deepep_bootstrap.cli.commands import lab
from deepep_bootstrap.lab import cluster
folder = sys.argv[1]
made = cluster.up(folder, "lmod", lambda text: print(text, file=sys.stderr))
def ssh(host, words):
    done = subprocess.run(["ssh", "-F", made.ssh_config, host, words], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return (done.stdout + done.stderr).split()
probe = "echo $LAB_HOST $HOME; nvidia-smi -L 2>/dev/null | wc -l"
seen = {host.name: ssh(host.name, probe) for host in made.hosts}
seen["job"] = ssh("login1", "cd; srun -N2 --gpus-per-node=8 sh -c 'echo $SLURMD_NODENAME:$CUDA_VISIBLE_DEVICES'")
seen["state"] = cluster.state(folder)
cluster.up(folder, "lmod", print)
lab.lab("status", dir=folder)
cluster.down(folder)
print(json.dumps(seen))
"""


@pytest.fixture
def plain_user(namespaces: None) -> Iterator[tuple[Path, list[str]]]:
    """A home and a command prefix that runs something as a user whom only a mount namespace of its own knows."""
    with tempfile.TemporaryDirectory(prefix="deepep-lab-user-", dir="/var/tmp") as name:
        home = Path(name)
        for part in ("deepep_bootstrap", "tests/lab", "tests/fakes"):
            shutil.copytree(ROOT / part, home / part, ignore=shutil.ignore_patterns("__pycache__"))
        for file, line in (("passwd", f"labuser:x:7100:7100::{home}:/bin/bash"), ("group", "labuser:x:7100:")):
            (home / file).write_text(Path("/etc", file).read_text() + line + "\n")
        subprocess.run(["chown", "-R", "7100:7100", home], check=True)
        home.chmod(0o755)
        (home / file).chmod(0o644)
        binds = f"mount --bind {home}/passwd /etc/passwd; mount --bind {home}/group /etc/group"
        version = subprocess.run(
            ["/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
        of_the_system = ["--only-binary=:all:", "--python-version", version, "--target", home / "site", "msgspec"]
        subprocess.run([*pip, *of_the_system], check=True)
        become = "exec setpriv --reuid 7100 --regid 7100 --clear-groups --inh-caps=-all env -i"
        script = f'set -e; {binds}; cd {home}; {become} HOME={home} PYTHONPATH={home}/site PATH=/usr/bin:/bin "$@"'
        yield home, ["unshare", "-m", "bash", "-c", script, "bash"]


def test_a_plain_user_gets_a_lab_without_namespaces(plain_user: tuple[Path, list[str]]) -> None:
    home, prefix = plain_user
    folder = f"{home}/the-lab"
    done = subprocess.run(
        [*prefix, "/usr/bin/python3", "-c", AS_PLAIN_USER, folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "without root: hosts are sshd processes of this user" in done.stdout
    seen = json.loads(done.stdout.splitlines()[-1])
    assert [seen[name] for name in labs.ROLES] == [
        ["n001", f"{folder}/hosts/n001/home", "8"],
        ["n002", f"{folder}/hosts/n002/home", "8"],
        ["login1", f"{folder}/hosts/login1/home", "0"],
    ]
    assert sorted(line.partition(":")[0] for line in seen["job"]) == ["n001", "n002"]
    assert (seen["state"]["state"], seen["state"]["kind"]) == ("up", "loopback")
    left = [process for process in Path("/proc").glob("[0-9]*") if is_users(process, 7100)]
    assert (left, traces(folder)) == ([], [])


def is_users(process: Path, number: int) -> bool:
    """Say whether a process that still runs (no zombie) is a user's."""
    try:
        status = (process / "status").read_text()
    except OSError:
        return False
    return f"Uid:\t{number}\t" in status and "State:\tZ" not in status
