"""Host recipes for peer memory, the fabric manager, GDRCopy's module, limits and the RDMA user space, on made-up
machines."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from deepep_bootstrap.doctor import gpu
from tests.support.host import Host

pytestmark = pytest.mark.usefixtures("programs")

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05\n"
DRIVER = "/proc/driver/nvidia/version"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    made = Host(tmp_path / "root")
    made.module_tools()
    return made


def kernel(host: Host, release: str = "6.8.0-51-generic") -> None:
    host.tool("uname", f"echo {release}")


def changes(host: Host) -> list[str]:
    return [
        call for call in host.calls() if not call.startswith(("uname", "systemctl show", "systemctl is-active", "df"))
    ]


# --- peer-memory -----------------------------------------------------------------------------------------------------------------------

LIST, BAN = "/etc/modules-load.d/deepep.conf", "/etc/modprobe.d/deepep-peer-memory.conf"


def gpu_node(host: Host, driver: str, release: str = "6.8.0-51-generic") -> None:
    kernel(host, release)
    host.load("nvidia")
    host.write(DRIVER, driver)


@pytest.mark.parametrize(
    ("driver", "release", "dmabuf"),
    [
        (OPEN, "6.8.0-51-generic", True),
        (OPEN, "5.12.0", True),
        (OPEN, "5.4.0-200-generic", False),
        (OPEN, "5.11.22", False),
        (CLOSED, "6.8.0-51-generic", False),
    ],
)
def test_peer_memory_is_dmabuf_where_driver_and_kernel_have_it(
    host: Host, driver: str, release: str, dmabuf: bool
) -> None:
    gpu_node(host, driver, release)
    before = host.files()
    said = host.recipe("peer-memory", "check")
    assert said.state == ("ok" if dmabuf else "todo"), said
    assert host.files() == before
    assert host.recipe("peer-memory", "apply").state == "ok"
    assert changes(host) == ([] if dmabuf else ["modprobe nvidia_peermem"])
    assert host.has(LIST) == (not dmabuf)
    after = host.files()
    assert host.recipe("peer-memory", "apply").state == "ok"
    assert (host.files(), changes(host)) == (after, [])
    host.recipe("peer-memory", "remove")
    assert host.files() == before


def test_peermem_in_a_list_of_the_site_needs_none_of_ours(host: Host) -> None:
    gpu_node(host, CLOSED)
    host.write("/etc/modules", "# of the site\n nvidia-peermem\n")
    assert host.recipe("peer-memory", "apply").state == "ok"
    assert not host.has(LIST)


@pytest.mark.parametrize("where", ["/etc/modules", "/usr/lib/modules-load.d/peer.conf", "/etc/init.d/nv_peer_mem"])
def test_nv_peer_mem_beside_nvidia_peermem_goes_and_stays_away(host: Host, where: str) -> None:
    gpu_node(host, CLOSED)
    host.load("nv_peer_mem", "nvidia_peermem")
    host.write(where, "nv_peer_mem\n")
    said = host.recipe("peer-memory", "check")
    assert (said.state, "needs" in said.data) == ("todo", False)
    assert "the old nv_peer_mem is loaded" in said.data["found"]
    assert "set to load at boot" in said.data["found"]
    assert host.recipe("peer-memory", "apply").state == "ok"
    assert host.loaded() == {"nvidia", "nvidia_peermem"}
    assert changes(host) == ["rmmod nv_peer_mem", "modprobe nvidia_peermem"]
    assert host.read(where) == "nv_peer_mem\n", "the site's own file is not touched"
    # The real modprobe refuses it from now on, whoever asks.
    command = ["/usr/sbin/modprobe", "-C", str(host.root / "etc/modprobe.d"), "-n", "-v", "nv_peer_mem"]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout.split() == [
        "install",
        "/bin/false",
    ]


@pytest.mark.parametrize("driver", [OPEN, CLOSED])
def test_nv_peer_mem_in_use_waits_for_a_reboot(host: Host, driver: str) -> None:
    gpu_node(host, driver)
    host.load("nv_peer_mem")
    host.write("/sys/module/nv_peer_mem/refcnt", "3\n")
    host.write("/busy-nv_peer_mem")
    said = host.recipe("peer-memory", "check")
    assert (said.state, said.data["needs"]) == ("todo", "reboot")
    said = host.recipe("peer-memory", "apply")
    assert (said.code, said.state) == (0, "reboot"), said
    assert "modprobe nvidia_peermem" not in changes(host), "never beside it"
    assert host.has(LIST) == (driver == CLOSED)
    assert host.recipe("peer-memory", "apply").state == "reboot"
    host.boot("second-boot")
    assert host.recipe("peer-memory", "check").state == "stuck"
    host.unload("nv_peer_mem")
    host.load("nvidia_peermem")
    assert host.recipe("peer-memory", "check").state == "ok"


def test_peermem_that_does_not_load_says_what_it_needs(host: Host) -> None:
    gpu_node(host, CLOSED)
    host.write("/broken-nvidia_peermem")
    said = host.recipe("peer-memory", "apply")
    assert (said.code, said.data, "it needs DOCA-OFED" in said.talk) == (1, {}, True)
    assert not host.has(LIST)


def test_peer_memory_without_a_driver_says_what_comes_first(host: Host) -> None:
    kernel(host)
    said = host.recipe("peer-memory", "check")
    assert (said.state, said.data["note"]) == ("blocked", "the NVIDIA driver must be loaded first")


# --- gdrdrv ----------------------------------------------------------------------------------------------------------------------------

RELEASE = "6.8.0-51-generic"
BUILT = f"/lib/modules/{RELEASE}/extra/gdrdrv.ko"
WANTED = {"GDRDRV_WANTED": "yes", "GDRCOPY_VERSION": "2.5.1"}
NODE = "dev/gdrdrv"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make device nodes (make test uses sudo)")


@pytest.fixture
def gdr(host: Host) -> Host:
    gpu_node(host, CLOSED, RELEASE)
    host.write("/sys/module/nvidia/version", "580.95.05\n")
    host.write("/usr/src/nvidia-535.1.2/nvidia/nv-p2p.c", "of a driver that is gone")
    host.write("/usr/src/nvidia-srv-580.95.05/nvidia/nv-p2p.c", "of the driver that is loaded")
    host.write(f"/lib/modules/{RELEASE}/build/Makefile")
    host.write("/proc/devices", "Character devices:\n  1 mem\n")
    host.write("/dev/.keep")
    host.write("/after-gdrdrv", f'echo "511 gdrdrv" >>"{host.root}/proc/devices"\n')
    host.tool("depmod")
    host.tool("make", 'mkdir -p "$2/src/gdrdrv"; echo module >"$2/src/gdrdrv/gdrdrv.ko"')
    host.tool("gcc")
    updates = f"{host.root}/lib/modules/{RELEASE}/updates"
    host.tool(
        "dkms",
        f'''case "$1" in
status) cat "{host.root}/dkms" 2>/dev/null ;;
add) echo "$2, added" >"{host.root}/dkms" ;;
install) mkdir -p "{updates}/dkms" && echo x >"{updates}/dkms/gdrdrv.ko" ;;
remove) rm -r "{host.root}/dkms" "{updates}" ;;
esac''',
    )
    return host


def source(host: Host) -> dict[str, str]:
    host.write("/source/src/gdrdrv/gdrdrv.c", "int x;\n")
    host.write("/source/scripts/test_gdrdrv.sh", "#!/bin/sh\n", 0o755)
    host.write("/source/Makefile", "driver:\n")
    return {**WANTED, "SRC": str(host.root / "source")}


def major_of(host: Host) -> int:
    status = (host.root / NODE).stat()
    assert stat.S_ISCHR(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o666
    return os.major(status.st_rdev)


def test_gdrdrv_is_only_there_for_who_wants_it(gdr: Host) -> None:
    said = gdr.recipe("gdrdrv", "check")
    assert (said.state, said.data["found"]) == ("ok", "not needed")
    assert gdr.recipe("gdrdrv", "apply").state == "ok"
    assert changes(gdr) == []


@as_root
@pytest.mark.parametrize("dkms", [True, False])
def test_gdrdrv_is_built_loaded_and_taken_back(gdr: Host, dkms: bool) -> None:
    env = source(gdr)
    if not dkms:
        (gdr.tools / "dkms").unlink()
    before = gdr.files()
    said = gdr.recipe("gdrdrv", "check", **WANTED)
    assert (said.state, "no module for this kernel" in said.data["found"]) == ("todo", True)
    assert gdr.recipe("gdrdrv", "apply", **env).state == "ok"
    calls = changes(gdr)
    if dkms:
        assert [call for call in calls if call.startswith("dkms") and "status" not in call] == [
            "dkms add gdrdrv/2.5.1",
            f"dkms build gdrdrv/2.5.1 -k {RELEASE}",
            f"dkms install gdrdrv/2.5.1 -k {RELEASE}",
        ]
        assert os.access(gdr.root / "usr/src/gdrdrv-2.5.1/scripts/test_gdrdrv.sh", os.X_OK)
        assert 'PACKAGE_VERSION="2.5.1"' in gdr.read("/usr/src/gdrdrv-2.5.1/dkms.conf")
    else:
        assert gdr.read(BUILT) == "module\n"
        [made] = [call for call in calls if call.startswith("make ")]
        assert made.endswith(f" NVIDIA_SRC_DIR={gdr.root}/usr/src/nvidia-srv-580.95.05/nvidia")
        assert f"depmod {RELEASE}" in calls
    assert major_of(gdr) == 511
    after = gdr.files()
    assert gdr.recipe("gdrdrv", "apply", **env).state == "ok"
    assert (gdr.files(), [call for call in changes(gdr) if "status" not in call]) == (after, [])
    assert gdr.recipe("gdrdrv", "remove").code == 0
    assert ("dkms remove gdrdrv/2.5.1 --all" in gdr.calls()) == dkms
    (gdr.root / NODE).unlink()
    gdr.write("/proc/devices", "Character devices:\n  1 mem\n")
    assert {name: text for name, (text, _, _) in gdr.files().items()} == {
        name: text for name, (text, _, _) in before.items()
    }


@as_root
@pytest.mark.parametrize("sources", [True, False])
def test_dkms_builds_with_the_sources_of_the_driver_of_that_day(gdr: Host, sources: bool) -> None:
    gdr.recipe("gdrdrv", "apply", **source(gdr))
    if not sources:
        (gdr.root / "usr/src/nvidia-srv-580.95.05/nvidia/nv-p2p.c").unlink()
    conf = gdr.read("/usr/src/gdrdrv-2.5.1/dkms.conf")
    for place in ("/usr/src/", "/sys/module/"):
        conf = conf.replace(place, f"{gdr.root}{place}")
    shown = subprocess.run(
        ["bash", "-c", f'kernelver=6.9.0\n{conf}\necho "${{MAKE[0]}}"'], capture_output=True, text=True, check=True
    ).stdout.strip()
    wanted = f" NVIDIA_SRC_DIR={gdr.root}/usr/src/nvidia-srv-580.95.05/nvidia" if sources else ""
    assert shown == f"cd src/gdrdrv && make KVER=6.9.0{wanted}"


def test_without_the_source_the_missing_input_is_named(gdr: Host) -> None:
    said = gdr.recipe("gdrdrv", "apply", **WANTED)
    assert (said.code, said.data, "missing input: SRC" in said.talk) == (1, {}, True)


@as_root
@pytest.mark.parametrize(("major", "mode"), [(240, 0o666), (511, 0o600), (0, 0)])
def test_a_node_with_another_major_closed_or_missing_is_made_anew(gdr: Host, major: int, mode: int) -> None:
    gdr.write(BUILT, "module\n")
    gdr.recipe("gdrdrv", "apply", **WANTED)
    gdr.calls()
    (gdr.root / NODE).unlink()
    if major:
        os.mknod(gdr.root / NODE, stat.S_IFCHR | mode, os.makedev(major, 0))
        (gdr.root / NODE).chmod(mode)
    said = gdr.recipe("gdrdrv", "check", **WANTED)
    assert (said.state, said.data["found"]) == ("todo", "/dev/gdrdrv is missing or closed or has another major")
    assert gdr.recipe("gdrdrv", "apply", **WANTED).state == "ok"
    assert major_of(gdr) == 511
    assert changes(gdr) == [], "the module stays as it is"


@as_root
def test_modprobe_makes_the_node_at_every_boot(gdr: Host) -> None:
    gdr.write(BUILT, "module\n")
    gdr.recipe("gdrdrv", "apply", **WANTED)
    assert gdr.read("/etc/modules-load.d/deepep-gdrdrv.conf").splitlines()[-1] == "gdrdrv"
    # What the real modprobe would run, on this machine's root and with the load left out: another boot gives another
    # major.
    command = ["/usr/sbin/modprobe", "-C", str(gdr.root / "etc/modprobe.d"), "-n", "-v", "gdrdrv"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    load, _, make_node = shown.removeprefix("install ").strip().partition(" && ")
    assert load.split() == ["/sbin/modprobe", "--ignore-install", "gdrdrv", "$CMDLINE_OPTS"]
    gdr.write("/proc/devices", "Character devices:\n  1 mem\n236 gdrdrv\n")
    local = make_node.replace("/dev/", f"{gdr.root}/dev/").replace("/proc/", f"{gdr.root}/proc/")
    subprocess.run(["sh", "-c", local], check=True)
    assert major_of(gdr) == 236
    assert gdr.recipe("gdrdrv", "check", **WANTED).state == "ok"


@pytest.mark.parametrize(
    ("lacking", "note"),
    [
        ("build", "install the headers of the kernel"),
        ("nvidia", "the NVIDIA driver must be loaded"),
        (
            "sources",
            "install the sources of the loaded NVIDIA driver first: no nv-p2p.c below /usr/src/nvidia-*580.95.05 ",
        ),
    ],
)
def test_what_gdrdrv_needs_first_is_said(gdr: Host, lacking: str, note: str) -> None:
    if lacking == "build":
        (gdr.root / f"lib/modules/{RELEASE}/build/Makefile").unlink()
    elif lacking == "sources":
        (gdr.root / "usr/src/nvidia-srv-580.95.05/nvidia/nv-p2p.c").unlink()
    else:
        (gdr.root / "sys/module/nvidia/version").unlink()
        gdr.unload("nvidia")
    said = gdr.recipe("gdrdrv", "check", **WANTED)
    assert (said.state, said.data["note"].startswith(note)) == ("blocked", True)


def test_a_module_that_does_not_load_is_an_error(gdr: Host) -> None:
    gdr.write(BUILT, "module\n")
    gdr.write("/broken-gdrdrv")
    said = gdr.recipe("gdrdrv", "apply", **WANTED)
    assert (said.code, "gdrdrv does not load (with Secure Boot it must be signed)" in said.talk) == (1, True)


# --- limits ----------------------------------------------------------------------------------------------------------------------------

LOGINS, DROP_IN = "/etc/security/limits.d/deepep.conf", "/etc/systemd/system/slurmd.service.d/deepep.conf"
LIMITED = "Max locked memory         8388608              8388608              bytes     \n"
UNLIMITED = "Max locked memory         unlimited            unlimited            bytes     \n"


@pytest.fixture
def limited(host: Host) -> Host:
    host.write("/proc/meminfo", "MemTotal:       4194304 kB\n")
    host.write("/etc/security/limits.conf", "# nothing\n")
    host.write("/etc/ssh/sshd_config", "UsePAM yes\n")
    host.write("/dev/shm/.keep")
    shared(host, 2048)
    host.tool("mount", f'[ "$1" = -o ] && echo "${{2#*=}}" | tr -d m >"{host.root}/shm-mib"')
    return host


def shared(host: Host, mib: int) -> None:
    host.write("/shm-mib", f"{mib}\n")
    host.tool("df", f'echo head; echo "tmpfs $(($(cat "{host.root}/shm-mib") * 1024)) 0 0 0% /dev/shm"')


def systemd(host: Host, limit: str = "8388608") -> None:
    """A machine whose systemd runs slurmd: with our drop-in its unit is unlimited, and so is what it starts then."""
    host.write("/run/systemd/system/.keep")
    host.write("/unit-limit", limit)
    host.write("/proc/500/comm", "slurmd\n")
    host.write("/proc/500/limits", LIMITED if limit != "infinity" else UNLIMITED)
    host.tool(
        "systemctl",
        f'''case "$*" in
*LoadState*) echo loaded ;;
*LimitMEMLOCK*) if [ -e "{host.root}{DROP_IN}" ]; then echo infinity; else cat "{host.root}/unit-limit"; fi ;;
restart*) printf '{UNLIMITED.strip()} \\n' >"{host.root}/proc/500/limits" ;;
esac''',
    )


def test_limits_of_logins(limited: Host) -> None:
    before = limited.files()
    said = limited.recipe("limits", "check")
    assert (said.state, said.data["found"], "note" in said.data) == ("todo", "memlock of logins is limited", False), (
        said
    )
    assert limited.recipe("limits", "apply").state == "ok"
    assert "* hard memlock unlimited" in limited.read(LOGINS)
    after = limited.files()
    assert limited.recipe("limits", "apply").state == "ok"
    assert limited.files() == after
    limited.recipe("limits", "remove")
    assert limited.files() == before


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("* - memlock unlimited\nroot - memlock unlimited\n", "ok"),
        ("* soft memlock -1\n* hard memlock infinity\nroot - memlock unlimited\n", "ok"),
        ("* - memlock unlimited\n", "todo"),
        ("* soft memlock unlimited\nroot - memlock unlimited\n", "todo"),
        ("#* - memlock unlimited\n", "todo"),
    ],
)
def test_limits_that_a_site_has_set_itself(limited: Host, text: str, state: str) -> None:
    limited.write("/etc/security/limits.conf", text)
    assert limited.recipe("limits", "check").state == state


def test_a_limit_of_another_file_that_wins_is_named(limited: Host) -> None:
    limited.write("/etc/security/limits.d/zz-site.conf", "* hard memlock 64\n@students - memlock 64\n")
    said = limited.recipe("limits", "apply")
    assert (said.code, "state=blocked" in said.talk) == (1, True)
    note = limited.recipe("limits", "check").data["note"]
    assert note.startswith("other lines below /etc/security limit memlock of ")
    assert {"*", "@students"} <= set(note.split())


@pytest.mark.parametrize("text", ["UsePAM no\n", "Port 22\n", "#UsePAM yes\n"])
def test_what_pam_does_not_reach_is_said(limited: Host, text: str) -> None:
    limited.write("/etc/ssh/sshd_config", text)
    assert limited.recipe("limits", "apply").data["note"] == "sshd has no UsePAM yes: it ignores these limits"


def test_slurmd_gets_its_limit_and_starts_anew_where_no_job_runs(limited: Host) -> None:
    systemd(limited)
    said = limited.recipe("limits", "check")
    assert (said.state, "the unit of slurmd limits memlock" in said.data["found"]) == ("todo", True)
    assert limited.recipe("limits", "apply").state == "ok"
    assert limited.read(DROP_IN).splitlines()[1:] == ["[Service]", "LimitMEMLOCK=infinity"]
    assert changes(limited) == ["systemctl daemon-reload", "systemctl restart slurmd.service"]
    assert limited.recipe("limits", "apply").state == "ok"
    assert changes(limited) == []


def test_slurmd_with_a_job_is_never_started_anew(limited: Host) -> None:
    systemd(limited)
    limited.write("/proc/600/comm", "slurmstepd\n")
    said = limited.recipe("limits", "apply")
    assert (said.state, said.data["note"]) == ("ok", "slurmd gets its limit when it starts next")
    assert changes(limited) == ["systemctl daemon-reload"]
    assert limited.has(DROP_IN)
    (limited.root / "proc/600/comm").unlink()
    assert limited.recipe("limits", "check").data["found"] == "slurmd runs with a limit on memlock"
    assert limited.recipe("limits", "apply").state == "ok"
    assert "systemctl restart slurmd.service" in changes(limited)


def test_the_process_that_keeps_the_cgroup_of_steps_is_no_job(limited: Host) -> None:
    systemd(limited)
    limited.write("/proc/600/comm", "slurmstepd\n")
    limited.write("/proc/600/cmdline", "/usr/sbin/slurmstepd\0infinity\0")
    limited.recipe("limits", "apply")
    assert changes(limited) == ["systemctl daemon-reload", "systemctl restart slurmd.service"]


@pytest.mark.parametrize(
    ("step", "found"), [("17", "slurmd runs with a limit on memlock"), ("1", "as wanted"), ("", "as wanted")]
)
def test_a_check_that_comes_as_a_job_of_our_own_is_no_job_in_the_way(limited: Host, step: str, found: str) -> None:
    """Slurm brought it through this very slurmstepd (recipes/slurm/step.sh)."""
    systemd(limited)
    limited.write("/proc/600/comm", "slurmstepd\n")
    limited.write("/proc/600/cmdline", "slurmstepd: [17.0]\0")
    limited.recipe("limits", "apply")
    assert limited.recipe("limits", "check", DEEPEP_STEP=step).data["found"] == found


def test_a_unit_that_is_unlimited_already_is_left_alone(limited: Host) -> None:
    systemd(limited, "infinity")
    limited.recipe("limits", "apply")
    assert not limited.has(DROP_IN)
    assert "systemctl restart slurmd.service" not in changes(limited)


def test_shared_memory_grows_now_and_at_boot(limited: Host) -> None:
    systemd(limited, "infinity")
    before = limited.files()
    assert "/dev/shm has 2048 MiB" in limited.recipe("limits", "check", SHM_MIB="3000").data["found"]
    assert limited.recipe("limits", "apply", SHM_MIB="3000").state == "ok"
    assert limited.read("/shm-mib") == "3000\n"
    assert "ExecStart=/bin/mount -o remount,size=3000m /dev/shm" in limited.read(
        "/etc/systemd/system/deepep-shm.service"
    )
    assert "Wants=deepep-shm.service" in limited.read("/etc/systemd/system/sysinit.target.d/deepep-shm.conf")
    limited.recipe("limits", "remove")
    assert set(limited.files()) == set(before)


def test_shared_memory_of_a_container_is_not_ours(limited: Host) -> None:
    assert limited.recipe("limits", "apply", SHM_MIB="3000").state == "ok"
    assert limited.read("/shm-mib") == "2048\n"


@pytest.mark.parametrize(("mib", "said"), [(2048, False), (64, True), (4000, False)])
def test_without_a_wish_small_shared_memory_is_only_told(limited: Host, mib: int, said: bool) -> None:
    shared(limited, mib)
    after = limited.recipe("limits", "apply")
    assert ("less than half of the memory" in after.data.get("note", "")) == said
    assert limited.read("/shm-mib") == f"{mib}\n"


# --- fabric-manager --------------------------------------------------------------------------------------------------------------------

UBUNTU = {
    "MANAGER": "apt",
    "PACKAGES": "nvidia-fabricmanager-580",
    "DRIVER_PACKAGES": "nvidia-headless-580-server-open",
    "FABRIC_WAIT": "2",
    "NVSWITCHES": "4",
}
OURS = {"nvidia-headless-580-server-open": "580.95.05-0ubuntu0.24.04.2"}


def hgx(host: Host, unit: str, fabric: str, packages: dict[str, str], version: str = "580.95.05") -> None:
    """A machine with NVSwitches: what systemd says of the fabric manager ("" without a unit), and what the GPUs say
    of the fabric."""
    host.write("/run/systemd/system/.keep")
    host.write("/sys/module/nvidia/version", f"{version}\n")
    for name, text in (
        ("unit", unit),
        ("fabric", fabric),
        ("packages", "".join(f"{name} {package}\n" for name, package in packages.items())),
    ):
        host.write(f"/{name}", text)
    host.tool("nvidia-smi", f'cat "{host.root}/fabric"; cat "{host.root}/fabric"; ! grep -q Field "{host.root}/fabric"')
    host.tool("dpkg-query", f"sed -n \"s/^$5 /installed /p\" '{host.root}/packages'")
    host.tool(
        "apt-get",
        f"""for last; do :; done
echo "${{last%%=*}} ${{last#*=}}0ubuntu1" | tr -d '*' >>'{host.root}/packages'; echo inactive >'{host.root}/unit'""",
    )
    host.tool(
        "systemctl",
        f"""case "$*" in
*LoadState*) if [ -s '{host.root}/unit' ]; then echo loaded; else echo not-found; fi ;;
*ActiveState*) cat '{host.root}/unit' ;;
restart*) echo active >'{host.root}/unit'; echo 'Completed, Success' >'{host.root}/fabric' ;;
esac""",
    )
    if os.geteuid() != 0:
        host.inside = ("unshare", "-r")


def test_the_fabric_manager_of_the_drivers_version_is_installed_and_started(host: Host) -> None:
    hgx(host, "", "In Progress, N/A\n", OURS)
    check = host.recipe("fabric-manager", "check", **UBUNTU)
    assert (check.state, check.data["found"], "needs" in check.data) == (
        "todo",
        "fabric manager absent, fabric In Progress",
        False,
    ), check
    host.calls()
    said = host.recipe("fabric-manager", "apply", **UBUNTU)
    assert (said.state, said.data["found"]) == ("ok", "fabric manager active, fabric Completed/Success"), said
    acts = [call for call in changes(host) if call.startswith(("apt-get", "systemctl"))]
    done = [call.rpartition(" ")[2] if call.startswith("apt-get") else call for call in acts]
    unit = "nvidia-fabricmanager.service"
    assert done == ["nvidia-fabricmanager-580=580.95.05-*", f"systemctl enable {unit}", f"systemctl restart {unit}"]
    assert host.recipe("fabric-manager", "apply", **UBUNTU).state == "ok"
    assert not [call for call in changes(host) if call.startswith(("apt-get", "systemctl"))]
    assert host.recipe("fabric-manager", "remove", **UBUNTU).state == "ok"


def test_a_manager_that_is_down_while_programs_use_its_fabric_starts_with_the_next_boot(host: Host) -> None:
    hgx(host, "failed\n", "Completed, Success\n", OURS)
    said = host.recipe("fabric-manager", "check", **UBUNTU)
    assert (said.state, said.data["needs"], "multicast" in said.data["note"]) == ("todo", "reboot", True), said
    host.calls()
    assert host.recipe("fabric-manager", "apply", **UBUNTU).state == "reboot"
    acts = [call for call in changes(host) if call.startswith(("apt-get", "systemctl"))]
    assert acts == ["systemctl enable nvidia-fabricmanager.service"]  # no start, no other version
    assert host.recipe("fabric-manager", "check", **UBUNTU).state == "reboot"
    host.boot("second-boot")
    host.write("/unit", "active\n")
    assert host.recipe("fabric-manager", "check", **UBUNTU).state == "ok"
    host.write("/unit", "failed\n")  # months later
    assert host.recipe("fabric-manager", "check", **UBUNTU).state == "todo"


UNTRAINED = "it runs, but the fabric is not completed: journalctl -u nvidia-fabricmanager, and nvidia-smi -q, say why"
NO_ROW = (
    "the lock has no packages for this distribution: install NVIDIA's fabric manager "
    "(nvidia-fabricmanager=580.95.05-*) by hand"
)
START, DRAIN = (
    "systemctl enable --now nvidia-fabricmanager",
    "systemctl enable nvidia-fabricmanager, a drain and a reboot",
)
BY_HAND = "the driver did not come from the lock's packages: install {} by hand, then {}"
NEWER, OLDER = "nvidia-fabricmanager=580.95.05-*", "nvidia-fabricmanager-580=580.95.05-*"
SERVER = {"libnvidia-compute-580-server": "580.95.05-0ubuntu0.24.04.2"}
NVLSM = gpu.NVLSM.format  # the doctor says the same
PROGRESS, BOTH = "In Progress, N/A\n", "Completed, Success\nIn Progress, [N/A]\n"
OLD = 'Field "fabric.state" is not a valid field to query.\n'
NO_SWITCHES = {"NVSWITCHES": "0"}


@pytest.mark.parametrize(
    ("unit", "fabric", "packages", "env", "state", "note"),
    [
        ("active\n", "Completed, Success\n", OURS, {}, "ok", None),
        ("active\n", "[N/A], [N/A]\n", OURS, {}, "ok", None),  # a driver that does not say
        ("active\n", OLD, OURS, {}, "ok", None),
        ("activating\n", "Completed, Success\n", OURS, {}, "ok", None),
        ("", "Completed, Success\n", {}, {}, "ok", None),  # the host of a virtual machine does it
        ("", "Completed\n", {}, {}, "ok", None),
        ("failed\n", PROGRESS, OURS, {}, "todo", None),
        ("", OLD, OURS, {}, "todo", None),
        ("failed\n", "Completed, Success\n", OURS, {}, "needs", "multicast"),
        ("inactive\n", OLD, OURS, {}, "needs", "multicast"),  # nobody knows whether programs use it
        ("failed\n", BOTH, OURS, {}, "needs", "multicast"),
        ("active\n", PROGRESS, OURS, {}, "blocked", UNTRAINED),
        ("", PROGRESS, {}, {}, "blocked", BY_HAND.format(NEWER, START)),
        ("failed\n", "Completed, Success\n", {}, {}, "blocked", BY_HAND.format(NEWER, DRAIN)),
        ("", PROGRESS, SERVER, {}, "blocked", BY_HAND.format(OLDER, START)),
        ("", PROGRESS, SERVER, {"PACKAGES": "nvidia-fabricmanager"}, "blocked", BY_HAND.format(OLDER, START)),
        ("", PROGRESS, {}, {"PACKAGES": "nvidia-fabricmanager-570"}, "blocked", BY_HAND.format(NEWER, START)),
        ("", PROGRESS, {}, {"PACKAGES": "", "MANAGER": ""}, "blocked", BY_HAND.format(NEWER, START)),
        ("", PROGRESS, OURS, {"PACKAGES": ""}, "blocked", NO_ROW),
        ("", PROGRESS, OURS, NO_SWITCHES, "blocked", NVLSM(branch="580", start=START)),
        ("failed\n", BOTH, {}, NO_SWITCHES, "blocked", NVLSM(branch="580", start=DRAIN)),
        ("active\n", PROGRESS, {}, NO_SWITCHES, "blocked", UNTRAINED),
    ],
)
def test_what_is_said_of_the_fabric(
    host: Host, unit: str, fabric: str, packages: dict[str, str], env: dict[str, str], state: str, note: str | None
) -> None:
    hgx(host, unit, fabric, packages)
    said = host.recipe("fabric-manager", "check", **{**UBUNTU, **env})
    found = said.data.get("note")
    if state == "needs":
        assert (said.state, said.data.get("needs"), str(note) in str(found)) == ("todo", "reboot", True), said
    else:
        assert (said.state, found, "needs" in said.data) == (state, note, False), said


def test_before_branch_580_nvidias_own_package_has_the_branch_in_its_name(host: Host) -> None:
    hgx(host, "", PROGRESS, {"nvidia-open-570": "570.148.08-1"}, "570.148.08")
    said = host.recipe("fabric-manager", "check", **UBUNTU)
    assert said.data["note"] == BY_HAND.format("nvidia-fabricmanager-570=570.148.08-*", START)


# --- rdma-userspace --------------------------------------------------------------------------------------------------------------------

SYSTEM = "/usr/lib/x86_64-linux-gnu"
VENDOR = "/usr/local/nvidia/lib64"


def verbs(host: Host, folder: str, version: str, abi: int) -> None:
    host.write(f"{folder}/libibverbs.so.{version}", f"ELF\0IBVERBS_1.1\0IBVERBS_PRIVATE_{abi}\0")
    (host.root / folder.lstrip("/") / "libibverbs.so.1").symlink_to(f"libibverbs.so.{version}")
    host.write(f"{folder}/libibverbs/libmlx5-rdmav{abi}.so", "ELF")


@pytest.fixture
def rdma(host: Host) -> Host:
    verbs(host, SYSTEM, "1.14.50.0", 34)
    host.write("/usr/lib/udev/rules.d/60-rdma-persistent-naming.rules")
    return host


def test_rdma_user_space_of_one_origin(rdma: Host) -> None:
    said = rdma.recipe("rdma-userspace", "check")
    assert (said.state, said.data["found"]) == ("ok", f"{SYSTEM}/libibverbs.so.1.14.50.0 (rdmav34)"), said


def test_mixed_libibverbs_is_named_with_both_files_and_versions(rdma: Host) -> None:
    verbs(rdma, VENDOR, "1.14.56.0", 57)
    before = rdma.files()
    said = rdma.recipe("rdma-userspace", "check")
    assert said.state == "blocked"
    assert f"{SYSTEM}/libibverbs.so.1.14.50.0 (rdmav34) beside" in said.data["found"]
    assert f"{VENDOR}/libibverbs.so.1.14.56.0 (rdmav57)" in said.data["found"]
    assert "LD_LIBRARY_PATH" in said.data["note"]
    assert rdma.recipe("rdma-userspace", "apply").code == 1
    assert rdma.files() == before, "nobody's libraries are touched"


def test_a_provider_copied_among_the_system_s_own_is_named(rdma: Host) -> None:
    rdma.write(f"{SYSTEM}/libibverbs/libmlx5-rdmav57.so", "ELF")
    said = rdma.recipe("rdma-userspace", "check")
    assert (said.state, "libmlx5-rdmav57.so (rdmav57)" in said.data["found"]) == ("blocked", True)


def test_a_second_copy_of_the_same_abi_does_no_harm(rdma: Host) -> None:
    verbs(rdma, VENDOR, "1.14.51.0", 34)
    assert rdma.recipe("rdma-userspace", "check").state == "ok"


def test_what_lacks_is_named_and_what_cannot_be_installed_said(host: Host) -> None:
    said = host.recipe("rdma-userspace", "check", MANAGER="apt", PACKAGES="rdma-core libibverbs1")
    assert (said.state, said.data["found"]) == ("todo", "no libibverbs, the mlx5 provider, rdma-core")
    said = host.recipe("rdma-userspace", "check", MANAGER="", PACKAGES="")
    assert (said.state, "by hand" in said.data["note"]) == ("blocked", True)


def test_programs_that_the_stack_runs_belong_to_it(rdma: Host) -> None:
    env = {"MANAGER": "apt", "PACKAGES": "rdma-core infiniband-diags"}
    assert rdma.recipe("rdma-userspace", "check", **env).state == "ok", "no other stack asks for it"
    rdma.write("/usr/sbin/ibstat", "#!/bin/sh\n")
    said = rdma.recipe("rdma-userspace", "check", TOOLS="ibstat", **env)
    assert (said.state, said.data["found"]) == ("todo", "no ibstat"), "a file that cannot be run"
    assert said.data["wanted"].endswith("of one origin; ibstat")
    for folder in ("/usr/sbin", "/usr/bin"):
        file = rdma.write(f"{folder}/ibstat", "#!/bin/sh\n", 0o755)
        assert rdma.recipe("rdma-userspace", "check", TOOLS="ibstat", **env).state == "ok"
        file.unlink()


@pytest.mark.parametrize("recipe", ["peer-memory", "gdrdrv", "limits", "rdma-userspace"])
def test_an_unknown_argument_is_refused(host: Host, recipe: str) -> None:
    said = host.recipe(recipe, "destroy")
    assert (said.code, said.data, "unknown argument destroy" in said.talk) == (1, {}, True)
