"""Facts: the script on this machine and on constructed ones, under three shells; the parser on recorded answers."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.core.records import driver_value
from deepep_bootstrap.inventory import facts
from deepep_bootstrap.inventory.facts import Facts, TorchLibrary, parse_facts
from deepep_bootstrap.inventory.forms import FACTS
from tests.support import facts as facts_support
from tests.support.facts import CASES, SHELLS, Machine, read_tree_file, run_script

if TYPE_CHECKING:
    from tests.support.lab import LiveLab

pytest_plugins = ["tests.support.lab"]

RECORDED = sorted((CASES / "parse").glob("*.txt"))
TREES = sorted((CASES / "trees").glob("*.toml"))

# What a constructed machine cannot change: these belong to the machine that runs the test, and have tests of their own.
# So has `prepared`, in test_machine.py.
NOT_OF_THE_TREE = (
    "kernel",
    "machine",
    "hostname",
    "user",
    "uid",
    "cpus",
    "glibc",
    "scratch_free_mib",
    "tools",
    "prefix",
    "prepared",
)


def plain(value: Facts) -> dict[str, Any]:
    """Return facts as JSON has them."""
    return json.loads(json.dumps(msgspec.to_builtins(value, enc_hook=str)))  # type: ignore[no-any-return]


def ask(machine: Machine | None = None, prefix: str = "/nowhere/deepep", python: str = "", **env: str) -> Facts:
    """Return the facts of a constructed machine, or of this one, with dash."""
    return parse_facts(run_script("dash", prefix, python, env={**(machine.env if machine else {}), **env}), "test")


# --- the parser ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_answer(path: Path) -> None:
    # Older recordings say nothing of how far the host is prepared, of packages beside torch, nor of stacks that were
    # never seen to work.
    later = ("prepared", "external_packages", "external_libraries", "kubelet", "managed")
    silent = {key: plain(Facts())[key] for key in later}
    wanted = silent | json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    wanted["prefix"] = {"unproved": []} | wanted["prefix"]
    assert plain(parse_facts(path.read_text(encoding="utf-8"), path.stem)) == wanted


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_order_of_lines_means_nothing_between_kinds(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = sorted(text.splitlines(), key=lambda line: line.partition("=")[0])
    assert parse_facts("\n".join(lines), "h") == parse_facts(text, "h")


@given(
    st.text()
    | st.lists(
        st.sampled_from([*FACTS.single, *FACTS.many]).flatmap(lambda key: st.text().map(lambda v: f"{key}={v}"))
    ).map("\n".join)
)
def test_any_text_is_facts_or_trouble(text: str) -> None:
    with contextlib.suppress(Trouble):
        parse_facts(text, "h")


@given(data=st.data())
def test_a_damaged_answer_is_facts_or_trouble(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(RECORDED)).read_text(encoding="utf-8")
    at = data.draw(st.integers(0, len(text)))
    damaged = text[:at] + data.draw(st.text(max_size=20)) + text[data.draw(st.integers(at, len(text))) :]
    with contextlib.suppress(Trouble):
        parse_facts(damaged, "h")


@given(data=st.data())
def test_a_cut_answer_is_trouble(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(RECORDED)).read_text(encoding="utf-8")
    whole = len(text.rstrip("\n"))
    with pytest.raises(Trouble):
        parse_facts(text[: data.draw(st.integers(0, whole - 1))], "h")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("colour=red", "the line 'colour=red'"),
        ("no equals sign", "no equals sign"),
        ("cpus=many", "found 'many', wanted a whole number"),
        ("cpus=\u0664", "wanted a whole number"),
        ("uid=0\nuid=0", "a second line uid"),
        ("gpu=0\tH100", "2 fields"),
        ("port=mlx5_0\t1\tACTIVE\tInfiniBand\tfast", "found 'fast', wanted a number"),
        ("prefix_manifest=not base64!", "wanted base 64"),
        ("prefix_manifest=//79", "disagree"),
    ],
)
def test_what_the_script_does_not_print_is_trouble_naming_host_and_line(line: str, said: str) -> None:
    with pytest.raises(Trouble) as caught:
        parse_facts(f"facts=1\n{line}\nend=1\n", "b200-007")
    assert str(caught.value).startswith("b200-007: ")
    assert said in str(caught.value)


def test_every_odd_line_is_told_at_once() -> None:
    with pytest.raises(Trouble) as caught:
        parse_facts("facts=1\na=1\nb=2\nend=1\n", "h")
    assert len(caught.value.problems) == 2


def test_another_version_is_trouble() -> None:
    with pytest.raises(Trouble, match="version '2'"):
        parse_facts("facts=2\nend=1\n", "h")


@pytest.mark.parametrize(
    ("spelt", "value"),
    [
        ("1", "1"),
        ("0x1", "1"),
        ("1;", "1"),
        ("0X10", "16"),
        ('"PeerMappingOverride=0x1;"', "PeerMappingOverride=1"),
        ('"PeerMappingOverride=1; RMDebug=0x2"', "PeerMappingOverride=1;RMDebug=2"),
        ('""', ""),
        ("4294967295", "4294967295"),
        ("007", "007"),
        ("0x", "0x"),
    ],
)
def test_driver_parameters_have_one_spelling(spelt: str, value: str) -> None:
    assert driver_value(spelt) == value


def test_a_field_that_nvidia_smi_does_not_support_is_empty() -> None:
    (gpu,) = parse_facts("facts=1\ngpu=0\tGB200\t[N/A]\t[N/A]\t580\t0008:01:00.0\t\t-1\nend=1\n", "h").gpus
    assert (gpu.memory_mib, gpu.capability) == (0, "")


def test_half_a_hook_is_no_hook() -> None:
    both = "facts=1\nhook=sh\t/a/modulefiles\nhook=csh\t/a/modulefiles\nend=1\n"
    assert parse_facts(both, "h").modules.hook == "/a/modulefiles"
    assert parse_facts(both.replace("hook=csh\t/a", "hook=csh\t/b"), "h").modules.hook == ""


# --- the script on constructed machines ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("path", TREES, ids=lambda path: path.stem)
def test_constructed_machine(path: Path, shell: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine", read_tree_file(path.stem))
    seen = plain(parse_facts(run_script(shell, "/nowhere/deepep", env=machine.env), path.stem))
    got = {key: value for key, value in seen.items() if key not in NOT_OF_THE_TREE}
    assert got == json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("shell", SHELLS)
def test_this_machine(shell: str) -> None:
    seen = parse_facts(run_script(shell, "/nowhere/deepep"), "here")
    assert (seen.hostname, seen.kernel, seen.machine) == (platform.node(), platform.release(), platform.machine())
    assert (seen.uid, seen.cpus) == (os.getuid(), len(os.sched_getaffinity(0)))
    assert seen.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    assert 0 < seen.memory_free_mib <= seen.memory_mib
    assert (
        dict(seen.tools)["git"]
        in subprocess.run(["git", "--version"], capture_output=True, text=True, check=True).stdout
    )
    assert {python.path for python in seen.pythons} == {
        str(path) for path in Path("/usr/bin").glob("python3.*") if path.suffix[1:].isdigit()
    }
    assert not seen.prefix.exists


@pytest.mark.usefixtures("programs")
def test_the_script_runs_from_a_file_too(tmp_path: Path) -> None:
    script = tmp_path / "facts"
    script.write_text(facts.facts_script(facts_support.recipes()), encoding="utf-8")
    done = subprocess.run(
        ["bash", str(script), "/nowhere/deepep", ""],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert parse_facts(done.stdout, "here").hostname == platform.node()


@pytest.mark.usefixtures("programs")
def test_the_script_writes_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine", read_tree_file("roce-b200"))
    prefix = make_prefix(tmp_path / "prefix")

    def listing() -> list[tuple[str, int, int]]:
        return [(str(path), path.lstat().st_mtime_ns, path.lstat().st_ctime_ns) for path in sorted(tmp_path.rglob("*"))]

    before = listing()
    ask(machine, str(prefix), "/usr/bin/python3", TMPDIR=str(tmp_path))
    assert listing() == before


# --- the prefix ------------------------------------------------------------------------------------------------------------------------


def make_prefix(prefix: Path) -> Path:
    """Make a prefix with two entries, one half-built, a lock, and two generations of which the second is current."""
    for name in (
        "store/aaaa-nvshmem-3.4.5",
        "store/bbbb-gdrcopy-2.5.1",
        "store/.tmp-cccc-deepep-1.2.1-token",
        "generations/1",
        "generations/2",
    ):
        (prefix / name).mkdir(parents=True)
    (prefix / "store" / ".lock").write_text("held\n", encoding="utf-8")
    (prefix / "store" / "stray-file").write_text("", encoding="utf-8")
    (prefix / ".id").write_text("0123456789abcdef\n", encoding="utf-8")
    (prefix / "generations" / "2" / "manifest.json").write_text(
        '{"schema": 1,\n "by": "Zoë"}\n' + " " * 9000, encoding="utf-8"
    )
    (prefix / "current").symlink_to("generations/2")
    return prefix


@pytest.mark.usefixtures("programs")
def test_a_prefix(tmp_path: Path) -> None:
    seen = ask(prefix=str(make_prefix(tmp_path / "pre fix"))).prefix
    assert (seen.path, seen.exists, seen.writable, seen.id) == (f"{tmp_path}/pre fix", True, True, "0123456789abcdef")
    assert seen.entries == ("aaaa-nvshmem-3.4.5", "bbbb-gdrcopy-2.5.1")
    assert seen.generation == 2
    assert json.loads(seen.manifest)["by"] == "Zoë"
    room = os.statvfs(tmp_path)
    assert abs(seen.free_mib - room.f_bavail * room.f_frsize // 2**20) < 200
    assert (
        seen.fs
        == subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True)
        .stdout.strip()
        .split("/")[0]
        or seen.fs
    )


@pytest.mark.usefixtures("programs")
def test_a_prefix_that_is_not_there_shows_its_parents_room(tmp_path: Path) -> None:
    seen = ask(prefix=str(tmp_path / "a" / "b")).prefix
    assert (seen.exists, seen.writable, seen.generation, seen.entries, seen.manifest) == (False, True, 0, (), "")
    assert seen.free_mib > 0


@pytest.mark.usefixtures("programs")
def test_a_prefix_that_somebody_else_may_write() -> None:
    # Not below pytest's own folder: another pytest that starts closes that one to everybody else.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        prefix = make_prefix(Path(folder, "prefix"))
        prefix.chmod(0o755)
        seen = parse_facts(run_script("dash", str(prefix), user=65534), "here")
    assert (seen.uid, seen.prefix.exists, seen.prefix.writable, seen.prefix.id) == (
        65534,
        True,
        False,
        "0123456789abcdef",
    )


# The real `timeout` with a shorter limit, and tools that never answer.
HASTY = {
    "bin/timeout": """case $4 in
    stat | nvidia-smi | env | gcc | make | squeue) shift 3; exec /usr/bin/timeout -k 0.2 0.3 "$@" ;;
    sinfo) [ "$5" = --version ] || { shift 3; exec /usr/bin/timeout -k 0.2 0.3 "$@"; } ;;
esac
exec /usr/bin/timeout "$@"
"""
}
"""Limits of a third of a second for the programs that hang in these tests, so that nobody waits for them."""


@pytest.mark.usefixtures("programs")
def test_a_prefix_whose_server_is_gone_costs_its_limit_only(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"programs": {**HASTY, "bin/stat": "exec sleep 60\n"}})
    seen = ask(machine, "/shared/deepep").prefix
    assert (seen.problem, seen.exists) == ("does not answer within 5 s", False)


@pytest.mark.usefixtures("programs")
def test_a_driver_and_a_controller_that_never_answer_are_told_and_cost_their_limit_only(tmp_path: Path) -> None:
    programs = {
        "bin/nvidia-smi": "exec sleep 60\n",
        "bin/sinfo": "case $1 in --version) echo slurm 23.02.7 ;; *) exec sleep 60 ;; esac\n",
    }
    seen = ask(Machine(tmp_path, {"programs": {**HASTY, **programs}}))
    assert str(seen.gpu_problem).startswith("nvidia-smi ends with code 124")
    assert (seen.slurm.works, seen.slurm.version) == (False, "23.02.7")


@pytest.mark.usefixtures("programs")
def test_what_never_answers_is_not_taken_for_absent(tmp_path: Path) -> None:
    hang = "exec sleep 60\n"
    slurm = {
        "bin/sinfo": "echo slurm 23.02.7\n",
        "bin/scontrol": "case $2 in node) echo NodeName=n1 State=IDLE Gres=gpu:8 Partitions=b ;; esac\n",
    }
    programs = {"bin/bash": hang, "bin/gcc": hang, "bin/make": hang, "bin/squeue": hang, **slurm}
    with pytest.raises(Trouble) as caught:
        ask(Machine(tmp_path, {"programs": {**HASTY, **programs}}))
    told = [(problem.where, problem.what, problem.try_) for problem in caught.value.problems]
    assert sorted(told) == [
        (
            "test",
            f"{name} is there, but did not answer in {seconds} s",
            f"{command} there, or --limit without this host",
        )
        for name, seconds, command in (
            ("gcc", 15, "gcc --version"),
            ("login-shell", 30, "bash -l"),
            ("make", 15, "make --version"),
            ("squeue", 18, "squeue"),
        )
    ]


@pytest.mark.usefixtures("programs")
def test_what_answers_the_second_time_is_known(tmp_path: Path) -> None:
    late = f"[ -e {tmp_path}/asked ] || {{ : >{tmp_path}/asked; exec sleep 60; }}; echo gcc 13.3.0\n"
    seen = ask(Machine(tmp_path / "machine", {"programs": {**HASTY, "bin/gcc": late}}))
    assert dict(seen.tools)["gcc"] == "13.3.0"


# --- Slurm where sshd's PATH lacks its clients ------------------------------------------------------------------------------------------

STATUS = "Name:\tslurmd\nUid:\t0\t0\t0\t0\nNSpid:\t4242\n"
SLURMD = {"proc/4242/comm": "slurmd\n", "proc/4242/status": STATUS}
SINFO = 'case $1 in --version) echo slurm 24.05.3 ;; *) echo "${SLURM_CONF:-gpu}" ;; esac\n'


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("by", "folder"), [("exe", "opt/slurm/bin"), ("exe", "opt/slurm/sbin"), ("cmdline", "opt/slurm/bin")]
)
def test_slurms_clients_are_found_beside_the_slurmd_that_runs(by: str, folder: str, tmp_path: Path) -> None:
    data: dict[str, Any] = {"files": dict(SLURMD), "programs": {f"{folder}/sinfo": SINFO}}
    if by == "exe":
        data["links"] = {"proc/4242/exe": "/opt/slurm/sbin/slurmd"}
    else:  # a plain user may not read the link of root's process
        data["files"]["proc/4242/cmdline"] = "/opt/slurm/sbin/slurmd\0-D\0-s\0"
    seen = ask(Machine(tmp_path, data)).slurm
    assert (seen.slurmd, seen.works, seen.version, seen.path, seen.conf) == (True, True, "24.05.3", f"/{folder}", "")


@pytest.mark.usefixtures("programs")
def test_the_limit_of_slurmd_itself_is_told_and_not_that_of_a_fork_of_it(tmp_path: Path) -> None:
    stat = "{} (slurmd) S 1 " + "0 " * 17 + "{} 0 0\n"
    files = {
        "proc/17/comm": "slurmd\n",
        "proc/17/status": STATUS.replace("4242", "17"),
        "proc/17/stat": stat.format(17, 900),
        "proc/17/limits": "Max locked memory         65536                65536                bytes     \n",
        "proc/4242/stat": stat.format(4242, 88),
        "proc/4242/limits": "Max locked memory         unlimited            unlimited            bytes     \n",
    }
    machine = Machine(tmp_path, {"files": {**SLURMD, **files}})
    assert ask(machine, HOME=str(tmp_path)).prepared.slurmd_memlock == "unlimited"


@pytest.mark.usefixtures("programs")
def test_slurms_clients_are_found_where_a_login_shell_finds_them(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"files": SLURMD, "programs": {"home/tools/sinfo": SINFO}})
    machine.write(
        "home/.bash_profile", f"PATH=$PATH:{tmp_path}/home/tools\nexport SLURM_CONF=/shared/slurm.conf\necho hello\n"
    )
    seen = ask(machine, HOME=str(tmp_path / "home")).slurm
    assert (seen.slurmd, seen.works, seen.version, seen.path, seen.conf) == (
        True,
        True,
        "24.05.3",
        "/home/tools",
        "/shared/slurm.conf",
    )


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("status", "slurmd"),
    [
        (STATUS, True),
        (STATUS.replace("NSpid:\t4242\n", ""), True),  # kernels before 4.1
        (STATUS.replace("4242\n", "4242\t17\n"), False),  # in a container
        (STATUS.replace("Uid:\t0", "Uid:\t7100"), False),  # somebody's own try
    ],
)
def test_whose_slurmd_it_is(status: str, slurmd: bool, tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"files": {**SLURMD, "proc/4242/status": status}})
    seen = ask(machine, HOME=str(tmp_path)).slurm
    assert (seen.slurmd, seen.works, seen.version, seen.path) == (slurmd, False, "", "")


@pytest.mark.usefixtures("programs")
def test_what_gke_manages_is_found_in_its_own_places(tmp_path: Path) -> None:
    smi = (
        'case $LD_LIBRARY_PATH in */home/kubernetes/bin/nvidia/lib64) ;; *) exit 4 ;; esac; echo "no devices"; exit 6\n'
    )
    programs = {"home/kubernetes/bin/nvidia/bin/nvidia-smi": smi}
    files = {"home/kubernetes/bin/gib/scripts/set_nccl_env.sh": "export NCCL_NET=gIB\n"}
    seen = ask(Machine(tmp_path, {"files": files, "programs": programs}), PATH="/usr/bin:/bin")
    assert (seen.managed, "code 6" in str(seen.gpu_problem), seen.prepared.gib) == (("driver", "gib"), True, "")


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("name", "status", "there"),
    [
        ("kubelet", STATUS, True),
        ("k3s-agent", STATUS, True),
        ("kubelet", STATUS.replace("4242\n", "4242\t17\n"), False),  # of a cluster in containers
        ("kubectl", STATUS, False),
    ],
)
def test_a_host_that_runs_a_kubelet_is_a_node_of_kubernetes(
    name: str, status: str, there: bool, tmp_path: Path
) -> None:
    machine = Machine(tmp_path, {"files": {"proc/4242/comm": f"{name}\n", "proc/4242/status": status}})
    assert ask(machine, HOME=str(tmp_path)).kubelet == there


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("step", "state", "told", "jobs"),
    [
        ("", "MIXED+CLOUD", "MIXED+CLOUD", ("17",)),
        ("17", "MIXED+CLOUD", "IDLE+CLOUD", ()),
        ("17", "ALLOCATED", "IDLE", ()),
        ("17", "IDLE+DRAIN", "IDLE+DRAIN", ()),
        ("18", "ALLOCATED", "IDLE", ("17",)),
    ],
)
def test_a_job_of_our_own_leaves_no_trace_in_the_facts_that_it_asks_for(
    step: str, state: str, told: str, jobs: tuple[str, ...], tmp_path: Path
) -> None:
    """A node was free when it was asked so; the limits are the job's."""
    record = f"NodeName=n1 State={state} Gres=gpu:8 Partitions=b Reason=ALLOCATED MIXED"
    programs = {
        "bin/sinfo": SINFO,
        "bin/scontrol": f"case $2 in node) echo '{record}' ;; esac\n",
        "bin/squeue": "echo 17\n",
    }
    seen = ask(Machine(tmp_path, {"programs": programs}), DEEPEP_STEP=step)
    assert (seen.slurm.state, seen.slurm.jobs) == (told, jobs)
    assert bool(seen.prepared.memlock) is not bool(step)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("limits", "brings"),
    [
        (("ALL", "(null)"), True),
        (("NONE", "(null)"), False),
        (("STACK,CORE", "(null)"), False),
        (("STACK,MEMLOCK", "(null)"), True),
        (("(null)", "MEMLOCK"), False),
        (("ALL", "RLIMIT_MEMLOCK, AS"), False),
        (("ALL", "STACK"), True),
    ],
)
def test_whether_a_job_has_the_memlock_of_the_shell_that_submitted_it(
    limits: tuple[str, str], brings: bool, tmp_path: Path
) -> None:
    config = f"echo 'PropagateResourceLimits = {limits[0]}'; echo 'PropagateResourceLimitsExcept = {limits[1]}'"
    scontrol = f"case $2 in config) echo 'PropagatePrioProcess = 0'; {config} ;; esac\n"
    assert (
        ask(Machine(tmp_path, {"programs": {"bin/sinfo": SINFO, "bin/scontrol": scontrol}})).slurm.brings_memlock
        == brings
    )


# --- the external Python ---------------------------------------------------------------------------------------------------------------

TORCH = (
    '__version__ = "2.11.0+cu130"\ndebug = False\ncuda: str = "13.0"\ngit_version = "70d99e998b4955e0"\nhip = None\n'
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real virtual environment, without pip; tests put the files of a torch into it."""
    folder = tmp_path_factory.mktemp("external") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder


def put_torch(environment: Path, files: dict[str, str | bytes]) -> None:
    """Make `files` the only content of the environment's torch."""
    (site,) = environment.glob("lib/python3.*/site-packages")
    subprocess.run(["rm", "-rf", str(site / "torch")], check=True)
    for name, content in files.items():
        file = site / "torch" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())


IMPORTED = 'raise SystemExit("torch was imported")\n'
CONFIG = "share/cmake/Torch/TorchConfig.cmake"


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("files", "abi", "problem"),
    [
        ({CONFIG: 'set(TORCH_CXX_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=0")\n', "lib/libc10.so": b"__cxx11"}, "0", ""),
        ({CONFIG: "# says nothing\n", "lib/libc10.so": b"\x7fELF_ZNSt7__cxx1112basic_string"}, "1", ""),
        ({CONFIG: "# says nothing\n", "lib/libc10.so": b"\x7fELF_ZNSs"}, "0", ""),
        ({}, "", "its torch is not complete: "),
    ],
)
def test_torch_is_read_without_importing_it(
    environment: Path, files: dict[str, str | bytes], abi: str, problem: str
) -> None:
    put_torch(environment, {"__init__.py": IMPORTED, "version.py": TORCH, **files})
    python = ask(python=str(environment / "bin" / "python")).external_python
    assert python is not None
    assert (python.torch, python.torch_git, python.torch_cuda, python.torch_abi) == (
        "2.11.0+cu130",
        "70d99e998b4955e0",
        "13.0",
        abi,
    )
    assert (python.version, python.soabi) == (
        platform.python_version(),
        __import__("sysconfig").get_config_var("SOABI"),
    )
    assert str(python.problem).startswith(problem)
    assert bool(python.problem) == bool(problem)


@pytest.mark.usefixtures("programs")
def test_what_torch_needs_beside_it_is_told_with_its_version(environment: Path) -> None:
    put_torch(environment, {"__init__.py": IMPORTED, "version.py": TORCH, CONFIG: "", "lib/libc10.so": b""})
    (site,) = environment.glob("lib/python3.*/site-packages")
    known = [path.name for path in site.glob("setuptools*")]
    for name, version in (("numpy", "2.4.6"), ("setuptools", "81.0.0")):
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    try:
        seen = ask(python=str(environment / "bin" / "python"))
    finally:
        subprocess.run(
            ["rm", "-r", *map(str, site.glob("numpy-*")), *map(str, site.glob("setuptools-81*"))], check=True
        )
    assert seen.external_packages == (("numpy", "2.4.6"), ("setuptools", "81.0.0")), known
    assert seen.external_python is not None
    assert seen.external_python.torch == "2.11.0+cu130"


def put_library(site: Path, kind: str, version: str, *, header: bool = True) -> Path:
    """Put what the wheel of NVIDIA's NCCL or NVSHMEM brings beside torch; return its folder."""
    name, file, text = {
        "nccl": ("libnccl.so.2", "nccl.h", "#define NCCL_{} {}\n"),
        "nvshmem": ("libnvshmem_host.so.3", "non_abi/nvshmem_version.h", "#define NVSHMEM_VENDOR_{}_VERSION {}\n"),
    }[kind]
    root = site / "nvidia" / kind
    (root / "lib").mkdir(parents=True)
    (root / "lib" / name).write_text("")
    if header:
        lines = [text.format(*pair) for pair in zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)]
        (root / "include" / file).parent.mkdir(parents=True)
        (root / "include" / file).write_text("".join(lines))
    folder = site / f"nvidia_{kind}_cu13-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia_{kind}_cu13\nVersion: {version}\n")
    return root


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("header", [True, False])
def test_the_libraries_of_torch_are_told_with_folder_and_version(environment: Path, header: bool) -> None:
    """Those beside torch, where its run path leads. One without headers is none: nothing can be built against it."""
    put_torch(environment, {"__init__.py": IMPORTED, "version.py": TORCH, CONFIG: "", "lib/libc10.so": b""})
    (site,) = environment.glob("lib/python3.*/site-packages")
    try:
        nccl = put_library(site, "nccl", "2.30.7", header=header)
        nvshmem = put_library(site, "nvshmem", "3.4.5")
        seen = ask(python=str(environment / "bin" / "python"))
    finally:
        subprocess.run(["rm", "-r", str(site / "nvidia"), *map(str, site.glob("nvidia_*.dist-info"))], check=True)
    wanted = [TorchLibrary("nccl", "nvidia-nccl-cu13", "2.30.7", str(nccl))] if header else []
    wanted.append(TorchLibrary("nvshmem", "nvidia-nvshmem-cu13", "3.4.5", str(nvshmem)))
    assert seen.external_libraries == tuple(wanted)
    assert seen.external_python is not None
    assert not seen.external_python.problem


@pytest.mark.usefixtures("programs")
def test_torch_without_cuda_and_no_torch_at_all(environment: Path) -> None:
    path = str(environment / "bin" / "python")
    put_torch(
        environment,
        {
            "__init__.py": IMPORTED,
            "version.py": '__version__ = "2.11.0"\ncuda = None\n',
            CONFIG: "",
            "lib/libc10.so": b"",
        },
    )
    seen = ask(python=path).external_python
    assert seen is not None
    assert seen.problem == "its torch is built without CUDA"
    put_torch(environment, {})
    seen = ask(python=path).external_python
    assert seen is not None
    assert seen.problem == "has no torch"


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/nowhere/bin/python", "is not there"),
        ("/etc/passwd", "is not a program"),
        ("/usr/bin", "is not a program"),
        ("/bin/true", "does not run as a Python interpreter"),
    ],
)
def test_what_is_no_python_is_told(path: str, problem: str) -> None:
    seen = ask(python=path).external_python
    assert seen is not None
    assert (seen.path, seen.problem, seen.torch) == (path, problem, "")


@pytest.mark.usefixtures("programs")
def test_no_python_asked_for_is_none() -> None:
    assert ask().external_python is None


# --- the sent script -------------------------------------------------------------------------------------------------------------------


def test_the_sent_script_holds_every_part_and_ends_with_the_call() -> None:
    recipes = facts_support.recipes()
    sent = facts.facts_script(recipes)
    assert sent.rstrip().endswith('main "$@"')
    assert all(text in sent for name, text in recipes.items() if name == facts.SCRIPT or name.startswith(facts.PARTS))
    assert "lib.sh" not in sent.partition("main()")[2]


def test_a_manifest_travels_as_it_is() -> None:
    text = base64.b64encode('{"a": "ü\n"}'.encode()).decode()
    assert parse_facts(f"facts=1\nprefix_manifest={text}\nend=1\n", "h").prefix.manifest == '{"a": "ü\n"}'


@pytest.mark.e2e
def test_a_lab_node_and_a_busy_one(lab: LiveLab) -> None:
    script = lab.shared / "facts"
    script.write_text(facts.facts_script(facts_support.recipes()), encoding="utf-8")
    done = lab.ssh(
        "login1",
        "ulimit -S -l 48; "
        "salloc -Q -w n002 --gres=gpu:8 sh -c 'echo $SLURM_JOB_ID; ssh -V 2>/dev/null; srun -Q --overlap sh "
        "/shared/facts /shared/deepep'",
    )
    job, _, answer = done.stdout.partition("\n")
    seen = parse_facts(answer, "n002")
    assert (seen.slurm.node, seen.slurm.jobs, seen.slurm.gres, seen.slurm.partitions) == (
        "n002",
        (job,),
        "gpu:8",
        ("batch",),
    )
    assert (len(seen.gpus), len(seen.rdma), seen.rdma[0].driver, seen.modules.kind) == (8, 8, "mlx5_core", "lmod")
    # The lab's slurm.conf leaves locked memory out of what a job inherits from the shell that asked for it.
    assert (seen.slurm.slurmd, seen.slurm.brings_memlock) == (True, False)
    assert (seen.prepared.memlock != "48", seen.prepared.slurmd_memlock) == (True, "unlimited")
    login = parse_facts(lab.ssh("login1", "sh /shared/facts /shared/deepep").stdout, "login1")
    assert (login.slurm.works, login.slurm.node, login.slurm.jobs, login.gpus) == (True, "", (), ())


@pytest.mark.e2e
def test_a_drained_lab_node_says_why(lab: LiveLab) -> None:
    (lab.shared / "facts").write_text(facts.facts_script(facts_support.recipes()), encoding="utf-8")
    lab.ssh("login1", "scontrol update nodename=n002 state=drain reason='deepep-bootstrap: State=x two words'")
    try:
        seen = parse_facts(lab.ssh("n002", "sh /shared/facts /shared/deepep").stdout, "n002")
    finally:
        lab.ssh("login1", "scontrol update nodename=n002 state=resume")
    assert re.fullmatch(r"deepep-bootstrap: State=x two words \[root@[0-9T:-]+\]", seen.prepared.slurm_reason)
    assert "DRAIN" in seen.slurm.state


@pytest.mark.e2e
def test_environment_modules_in_a_login_shell(modules_lab: LiveLab) -> None:
    (modules_lab.shared / "facts").write_text(facts.facts_script(facts_support.recipes()), encoding="utf-8")
    seen = parse_facts(modules_lab.ssh("n001", "sh /shared/facts /shared/deepep").stdout, "n001").modules
    assert (seen.kind, seen.version.split(".")[0], seen.init) == (
        "environment-modules",
        "5",
        "/usr/share/modules/init/bash",
    )
    assert seen.paths


@pytest.mark.usefixtures("programs")
def test_tools_beside_the_python_asked_about_are_found(tmp_path: Path) -> None:
    """On a machine whose cmake and ninja came with a Python environment, they are there even when nobody activated
    it."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    ninja = python.with_name("ninja")
    ninja.write_text("#!/bin/sh\necho 1.99.9\n")
    ninja.chmod(0o755)
    plain_path = tmp_path / "bin"
    plain_path.mkdir()
    for name in (
        "sh",
        "timeout",
        "head",
        "tr",
        "sed",
        "grep",
        "awk",
        "cat",
        "uname",
        "id",
        "df",
        "tail",
        "readlink",
        "base64",
        "dirname",
        "nproc",
    ):
        (plain_path / name).symlink_to(shutil.which(name) or name)
    env = {"PATH": str(plain_path)}
    assert "ninja" not in dict(parse_facts(run_script("dash", "/nowhere", env=env), "h").tools)
    assert dict(parse_facts(run_script("dash", "/nowhere", str(python), env=env), "h").tools)["ninja"] == "1.99.9"
