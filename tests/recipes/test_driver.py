"""recipes/host/driver-options.sh: options merged by the rules of modprobe, which is the real one here; reloading on
a made-up machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from tests.support.host import LIBRARIES, REAL_TOOLS, RECIPES, Host, Said
from tests.support.paths import TESTS
from tests.support.sshd import wait_until

pytestmark = pytest.mark.usefixtures("programs")

CASES = sorted((TESTS / "cases" / "recipes" / "driver-options").glob("*.toml"))
OURS = "/etc/modprobe.d/zz-deepep.conf"
PARAMS = "/proc/driver/nvidia/params"
INACTIVE = 'EnableStreamMemOPs: 0\nRegistryDwords: ""\n'
ACTIVE = 'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n'
KEYS = "options nvidia NVreg_RegistryDwords="


@pytest.fixture
def host(tmp_path: Path) -> Host:
    made = Host(tmp_path / "root")
    made.module_tools()
    made.tool("update-initramfs")
    return made


def options(host: Host, verb: str) -> Said:
    return host.recipe("driver-options", verb)


def with_driver(host: Host, params: str = INACTIVE) -> None:
    host.write(PARAMS, params)
    host.load("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")


def line_of(host: Host) -> str:
    return host.read(OURS).splitlines()[-1] if host.has(OURS) else ""


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(host: Host, path: Path) -> None:
    case: dict[str, Any] = tomlkit.parse(path.read_text(encoding="utf-8")).unwrap()
    expected = case["expected"]
    for name, text in case.get("files", {}).items():
        host.write(name, text)
    if "params" in case:
        with_driver(host, case["params"])
    if "cmdline" in case:
        host.command_line(case["cmdline"])
    before = host.files()
    said = options(host, "check")
    assert (said.code, said.state, said.data.get("needs")) == (0, expected["state"], expected.get("needs")), said
    assert expected.get("found", "") in said.data["found"]
    assert expected.get("note", "") in said.data.get("note", "")
    assert host.files() == before, "check writes nothing"
    done = options(host, "apply")
    if said.state == "blocked":
        assert (done.code, done.data) == (1, {}), done
        assert expected["note"] in done.talk
        assert host.files() == before
        return
    assert (done.code, done.state) == (0, expected.get("after", "ok")), done
    assert line_of(host) == expected["line"]
    assert host.calls() == (["update-initramfs -u -k all"] if said.state == "todo" else [])
    after = host.files()
    assert options(host, "apply").data == done.data
    assert (host.files(), host.calls()) == (after, []), "a second run changes nothing"
    assert options(host, "remove").code == 0
    assert host.files() == before, "what stood there is there again, byte for byte"


def test_modprobe_itself_hands_our_text_to_the_module_last(host: Host, tmp_path: Path) -> None:
    host.write("/etc/modprobe.d/a.conf", f'{KEYS}"A=1" NVreg_Other=2\n')
    host.write("/usr/lib/modprobe.d/zy.conf", f'{KEYS}"B=2"\n')
    options(host, "apply")
    modules = tmp_path / "lib/modules/1.0"
    modules.mkdir(parents=True)
    subprocess.run(["gcc", "-xc", "-c", "-", "-o", modules / "nvidia.ko"], input=b"int x;", check=True)
    subprocess.run(["/usr/sbin/depmod", "-b", tmp_path, "1.0"], capture_output=True, check=True)
    folders = [part for name in ("etc", "run", "usr/lib") for part in ("-C", str(host.root / name / "modprobe.d"))]
    command = ["/usr/sbin/modprobe", "-n", "-v", "-d", str(tmp_path), "-S", "1.0", *folders, "nvidia"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.findall(r'NVreg_RegistryDwords=("[^"]*")', said) == ['"A=1"', '"B=2"', '"B=2;PeerMappingOverride=1;"'], (
        said
    )
    assert "NVreg_Other=2" in said


def test_keys_that_the_site_changes_later_are_followed(host: Host) -> None:
    site = host.write("/etc/modprobe.d/site.conf", f'{KEYS}"A=1"\n')
    with_driver(host, ACTIVE)
    assert options(host, "apply").state == "ok"
    site.write_text(f'{KEYS}"A=2;New=1"\n', encoding="utf-8")
    assert options(host, "check").state == "todo"
    assert options(host, "apply").state == "ok"
    assert line_of(host).endswith('"A=2;New=1;PeerMappingOverride=1;"')


def test_after_a_reboot_it_is_ok_or_stuck(host: Host) -> None:
    with_driver(host)
    assert options(host, "apply").state == "reboot"
    host.boot("second-boot")
    said = options(host, "check")
    assert (said.state, "what loads the driver" in said.data["note"]) == ("stuck", True)
    assert options(host, "apply").code == 1
    host.write(PARAMS, ACTIVE)
    assert options(host, "check").state == "ok"


def test_an_initramfs_that_cannot_be_made_is_tried_again(host: Host) -> None:
    with_driver(host)
    host.tool("update-initramfs", "exit 1")
    said = options(host, "apply")
    assert (said.code != 0, said.data) == (True, {})
    assert (options(host, "check").state, options(host, "check").data["needs"]) == ("todo", "reboot")
    host.tool("update-initramfs")
    assert options(host, "apply").state == "reboot"


def test_a_file_changed_after_us_is_left_alone_and_named(host: Host) -> None:
    options(host, "apply")
    host.write(OURS, host.read(OURS) + "# mine\n")
    said = options(host, "remove")
    assert said.data["note"] == f"changed by somebody else since, left alone: {OURS}"
    assert host.read(OURS).endswith("# mine\n")


def test_without_a_tool_for_the_initramfs_it_is_said(host: Host) -> None:
    (host.tools / "update-initramfs").unlink()
    with_driver(host)
    said = options(host, "apply")
    assert said.state == "reboot"
    assert "no initramfs to refresh" in said.talk


def test_dracut_where_the_distribution_has_it(host: Host) -> None:
    (host.tools / "update-initramfs").unlink()
    host.tool("dracut")
    options(host, "apply")
    assert host.calls() == ["dracut --force --regenerate-all"]


# --- reload ----------------------------------------------------------------------------------------------------------------------------


def ready_to_reload(host: Host) -> None:
    with_driver(host)
    assert options(host, "apply").state == "reboot"
    host.write(
        "/after-nvidia",
        f"""printf 'EnableStreamMemOPs: 1\\nRegistryDwords: "PeerMappingOverride=1;"\\n' >"{host.root}{PARAMS}"\n""",
    )
    host.calls()


def test_reload_unloads_and_loads_in_order(host: Host) -> None:
    ready_to_reload(host)
    before = host.loaded()
    said = options(host, "reload")
    assert (said.code, said.state) == (0, "ok"), said
    assert host.loaded() == before
    assert host.calls() == [
        "rmmod nvidia_uvm",
        "rmmod nvidia_drm",
        "rmmod nvidia_modeset",
        "rmmod nvidia",
        "modprobe nvidia",
        "modprobe nvidia_modeset",
        "modprobe nvidia_drm",
        "modprobe nvidia_uvm",
    ]
    assert options(host, "reload").state == "ok"
    assert host.calls() == [], "what is active is not reloaded"


def test_daemons_of_the_driver_stop_meanwhile(host: Host) -> None:
    ready_to_reload(host)
    services(host, "nvidia-persistenced")
    open_file(host, 70, "nvidia-persiste", "/dev/nvidia0")
    assert options(host, "reload").state == "ok"
    calls = [call for call in host.calls() if "is-active" not in call]
    assert (calls[0], calls[-1]) == ("systemctl stop nvidia-persistenced", "systemctl start nvidia-persistenced")
    assert "rmmod nvidia" in calls


def services(host: Host, *running: str) -> None:
    """A systemd whose units are files of a folder, there while they run."""
    for name in running:
        host.write(f"/running/{name}")
    (host.root / "run/systemd/system").mkdir(parents=True, exist_ok=True)
    folder = host.root / "running"
    body = f'''for name; do :; done
case $1 in is-active) [ -e "{folder}/$name" ] || exit 3 ;; stop) rm "{folder}/$name" ;; start) : >"{folder}/$name" ;; esac'''
    host.tool("systemctl", body)


def open_file(host: Host, pid: int, name: str, target: str) -> None:
    host.write(f"/proc/{pid}/comm", f"{name}\n")
    (host.root / f"proc/{pid}/fd").mkdir()
    (host.root / f"proc/{pid}/fd/7").symlink_to(target)


def test_a_gpu_in_use_is_not_touched(host: Host) -> None:
    ready_to_reload(host)
    open_file(host, 81, "python3", "/dev/nvidia3")
    open_file(host, 82, "bash", "/dev/null")
    said = options(host, "reload")
    assert (said.code, said.data) == (1, {})
    assert "error: the GPUs are in use by python3 (81): the driver stays as it is\n" in said.talk
    assert host.calls() == []


def test_gpudirect_storage_goes_and_comes_with_the_driver(host: Host) -> None:
    ready_to_reload(host)
    host.load("nvidia_fs")
    for holder in ("nvidia_uvm", "nvidia_modeset", "nvidia_fs"):
        (host.root / "sys/module/nvidia/holders").mkdir(exist_ok=True)
        (host.root / "sys/module/nvidia/holders" / holder).symlink_to(f"../../{holder}")
    assert options(host, "reload").state == "ok"
    calls = host.calls()
    assert (calls[0], calls[-1]) == ("rmmod nvidia_fs", "modprobe nvidia_fs")


def test_a_module_of_others_that_holds_the_driver_is_named_before_anything_stops(host: Host) -> None:
    ready_to_reload(host)
    host.write("/run/systemd/system/.keep")
    host.tool("systemctl")
    host.load("nvidia_vgpu_vfio")
    (host.root / "sys/module/nvidia/holders").mkdir()
    (host.root / "sys/module/nvidia/holders/nvidia_vgpu_vfio").symlink_to("../../nvidia_vgpu_vfio")
    said = options(host, "reload")
    assert (said.code, said.data) == (1, {})
    assert "error: nvidia_vgpu_vfio holds the driver's modules and would stay: the driver stays as it is\n" in said.talk
    assert [call for call in host.calls() if "is-active" not in call] == []


def test_a_daemon_that_systemd_does_not_run_counts_as_a_user(host: Host) -> None:
    ready_to_reload(host)
    open_file(host, 70, "nvidia-persiste", "/dev/nvidia0")
    assert "in use by nvidia-persiste (70)" in options(host, "reload").talk


@pytest.mark.parametrize("busy", ["nvidia_uvm", "nvidia_modeset", "nvidia"])
def test_a_module_that_does_not_go_brings_the_others_back(host: Host, busy: str) -> None:
    ready_to_reload(host)
    before = host.loaded()
    host.write(f"/busy-{busy}")
    said = options(host, "reload")
    assert (said.code, said.data) == (1, {})
    assert "error: the driver could not be unloaded; its modules are loaded as before\n" in said.talk
    assert host.loaded() == before
    assert options(host, "check").state == "reboot"


def test_a_module_that_does_not_come_back_is_named_and_the_others_come(host: Host) -> None:
    ready_to_reload(host)
    host.write("/broken-nvidia_drm")
    said = options(host, "reload")
    assert (said.code, "what was taken away does not come back: nvidia_drm\n" in said.talk) == (1, True)
    assert host.loaded() == {"nvidia", "nvidia_uvm", "nvidia_modeset"}
    # Remembered as long as this boot lasts, and tried again by the next run.
    assert options(host, "check").data["found"].endswith("; nvidia_drm away since a reload that was cut off")
    assert options(host, "apply").code == 1
    (host.root / "broken-nvidia_drm").unlink()
    assert options(host, "apply").state == "ok"
    assert "nvidia_drm" in host.loaded()


def cut_off(host: Host, signum: int, at: str) -> tuple[int, bool]:
    """Reload the driver; when rmmod has taken the module `at` away, the reader of standard error goes and every process
    of the recipe's session gets a signal, and KILL half a second later, as when the controller is gone. Return the exit
    code, and whether the recipe had ended before the KILL."""
    host.tool("rmmod", f'rm -r "{host.root}/sys/module/$1"; [ "$1" != {at} ] || {{ : >"{host.root}/now"; sleep 60; }}')
    text = "\n".join((RECIPES / name).read_text(encoding="utf-8") for name in LIBRARIES)
    recipe = (RECIPES / "host" / "driver-options.sh").read_text(encoding="utf-8")
    env = {"PATH": f"{host.tools}:{REAL_TOOLS}", "HOME": "/root", "HOST_ROOT": str(host.root)}
    script = host.write("/script", f"set -- reload\n{text}\n{recipe}")
    process = subprocess.Popen(
        ["bash", str(script)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    wait_until(lambda: host.has("/now"), "the module is unloaded")
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    process.stderr.close()
    os.killpg(process.pid, signum)
    try:
        return process.wait(0.5), True
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait(), False


def test_whatever_ends_a_reload_the_driver_comes_back(host: Host) -> None:
    """With nobody listening any more, and with modules that take longer to load than the watcher waits."""
    ready_to_reload(host)
    services(host, "nvidia-persistenced", "nvidia-fabricmanager")
    before = host.loaded()
    host.write("/after-nvidia_modeset", "sleep 1.5\n")
    assert cut_off(host, signal.SIGTERM, "nvidia_modeset") == (-signal.SIGKILL, False)
    wait_until(lambda: host.loaded() == before, "all modules are loaded again")
    wait_until(lambda: host.has("/running/nvidia-fabricmanager"), "the services run again")
    assert host.has("/running/nvidia-persistenced")
    wait_until(lambda: not host.has("/var/lib/deepep-bootstrap/reload/driver"), "the record is gone")


def test_what_a_killed_reload_took_away_comes_with_the_next_run(host: Host) -> None:
    ready_to_reload(host)
    services(host, "nvidia-persistenced")
    before = host.loaded()
    assert cut_off(host, signal.SIGKILL, "nvidia_drm")[0] == -signal.SIGKILL
    assert host.loaded() == before - {"nvidia_uvm", "nvidia_drm"}
    host.module_tools()
    said = options(host, "check")
    assert (said.state, said.data["needs"]) == ("todo", "reboot"), "options that do not count yet still wait"
    away = "nvidia_drm nvidia_uvm nvidia-persistenced"
    assert said.data["found"].endswith(f"; {away} away since a reload that was cut off")
    host.calls()
    assert options(host, "apply").state == "reboot"
    assert (host.loaded(), host.has("/running/nvidia-persistenced")) == (before, True)
    assert "update-initramfs -u -k all" not in host.calls(), "what is written already is not written again"
    assert options(host, "check").state == "reboot"


def test_a_killed_reload_of_a_driver_that_went_away_needs_no_reboot(host: Host) -> None:
    ready_to_reload(host)
    before = host.loaded()
    cut_off(host, signal.SIGKILL, "nvidia")
    (host.root / PARAMS.lstrip("/")).unlink()
    assert host.loaded() == set()
    host.module_tools()
    said = options(host, "check")
    assert (said.state, "needs" in said.data, said.data["found"][:19]) == ("todo", False, "no driver is loaded")
    assert options(host, "apply").state == "ok"
    assert host.loaded() == before


def test_another_boot_forgets_what_a_reload_took_away(host: Host) -> None:
    ready_to_reload(host)
    cut_off(host, signal.SIGKILL, "nvidia_uvm")
    host.boot("second-boot")
    assert "away" not in options(host, "check").data["found"]


def test_reload_comes_after_apply(host: Host) -> None:
    with_driver(host)
    said = options(host, "reload")
    assert (said.code, "apply comes before reload" in said.talk) == (1, True)
    assert host.calls() == []


def test_a_plain_user_is_told_what_it_cannot_read() -> None:
    with tempfile.TemporaryDirectory() as folder:  # the folders of pytest are closed to others
        Path(folder).chmod(0o755)
        host = Host(Path(folder) / "root")
        host.write("/etc/modprobe.d/secret.conf", f"{KEYS}X=1\n", 0)
        if os.geteuid() == 0:
            host.inside = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        said = options(host, "check")
        assert (said.state, "secret.conf and there may be options in it" in said.data["note"]) == ("todo", True)


def test_an_unknown_argument_is_refused(host: Host) -> None:
    said = options(host, "destroy")
    assert (said.code, said.data, "unknown argument destroy" in said.talk) == (1, {}, True)
