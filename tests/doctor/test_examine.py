"""The doctor: exactly these findings for each recorded or constructed cluster, what it prints, and what a job's user
really finds."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from deepep_bootstrap.bootstrap.reboot import drained
from deepep_bootstrap.cli import examination
from deepep_bootstrap.cli.commands import doctor as verb
from deepep_bootstrap.cli.verbs import as_flag, declared
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.doctor import examine, gpu, user_view
from deepep_bootstrap.doctor.consistency import PROPERTIES
from deepep_bootstrap.doctor.findings import SEVERITIES, Finding, HostView, memlock_severity
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.machine import Stamp
from deepep_bootstrap.inventory.survey import Survey
from deepep_bootstrap.plan.host_recipes import TITLES, Check
from deepep_bootstrap.prefix.offer import Offer, StackRecord, command_for, offer_document
from deepep_bootstrap.remote import channel
from deepep_bootstrap.remote.jobs import Reply
from tests.support.doctor import BOOT, CASES, RECORD, WELL, changed, cluster, examined, findings, read, told
from tests.support.paths import ROOT
from tests.support.plan import PREFIX, request

FILES = {path.stem: path for path in sorted(CASES.glob("*.toml"))}
SCRIPT = "".join((ROOT / "recipes" / name).read_text(encoding="utf-8") for name in ("lib.sh", "doctor/user.sh"))
NOBODY = 65534
DEVICES = ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "infiniband/uverbs0", "infiniband/rdma_cm")
SLURM_FAULTS = examined(read(FILES["slurm-faults"]))
SLURM_EXPECTED = {tuple(each) for each in read(FILES["slurm-faults"])["expect"]}


@pytest.mark.parametrize("name", FILES)
def test_exactly_these_findings(name: str) -> None:
    data = read(FILES[name])
    assert [told(finding) for finding in findings(data)] == data["expect"], data["says"]


def test_every_check_has_a_case_in_which_it_finds_something() -> None:
    found = {check for path in FILES.values() for _, check, _, _ in read(path)["expect"]}
    known = {row.check for row in examine.ROWS} | {each.check for each in PROPERTIES} | {"prefix-shared", "slurm"}
    assert known - found == set()
    assert found - known == {"limits"}, "a host recipe that several checks stand for has a finding of its own name"


def test_every_finding_says_why_in_a_sentence_and_what_to_do() -> None:
    for path in FILES.values():
        for finding in findings(read(path)):
            assert finding.why.endswith("."), finding
            assert finding.found, finding
            assert finding.wanted, finding
            assert finding.fix or finding.check in {
                *("rdma", "link-layers", "nic-count", "differing-nic-map", "differing-toolkits")
            }, finding


NVLSM = gpu.NVLSM.format
START, DRAIN = (
    "systemctl enable --now nvidia-fabricmanager",
    "systemctl enable nvidia-fabricmanager, a drain and a reboot",
)


@pytest.mark.parametrize(
    ("switches", "state", "manager", "fix"),
    [
        (4, "In Progress", "failed", "systemctl restart nvidia-fabricmanager  # it must be 580.95.05 like the driver"),
        (4, "In Progress", "absent", f"installing nvidia-fabricmanager 580.95.05, then {START}"),
        (4, "Completed/Success, In Progress", "absent", f"installing nvidia-fabricmanager 580.95.05, then {DRAIN}"),
        (4, "Completed/Success, In Progress", "failed", f"{DRAIN}  # it must be 580.95.05 like the driver"),
        (0, "In Progress", "absent", NVLSM(branch="580", start=START)),
        (0, "Completed/Success, In Progress", "failed", NVLSM(branch="580", start=DRAIN)),
        (0, "In Progress", "active", "journalctl -u nvidia-fabricmanager; nvidia-smi -q"),
    ],
)
def test_what_is_advised_for_a_fabric_disturbs_nobody_and_names_what_the_machine_takes(
    switches: int, state: str, manager: str, fix: str
) -> None:
    said = {"nvswitches": switches, "fabric_state": state, "fabric_manager": manager, "nvidia_version": "580.95.05"}
    change = {"hosts": ["n001"], "facts": {f"prepared.{name}": value for name, value in said.items()}}
    case = {"hosts": {"n001": "h200"}, "profile": "single-node", "change": [change]}
    assert [found.fix for found in findings(case) if found.check == "nvlink-fabric"] == [fix]


def test_findings_are_ordered_by_severity_then_by_hosts() -> None:
    for path in FILES.values():
        data = read(path)
        places = {name: number for number, name in enumerate(data["hosts"])}
        keys = [(SEVERITIES.index(each.severity), [places[name] for name in each.hosts]) for each in findings(data)]
        assert keys == sorted(keys), path


@settings(deadline=None)
@given(st.permutations(range(len(SLURM_FAULTS[2]))))
def test_the_order_of_hosts_changes_no_finding(order: list[int]) -> None:
    wanted, case, seen, checks = SLURM_FAULTS
    findings = examine.examine(wanted, case, [seen[place] for place in order], checks)
    assert {tuple(told(finding)) for finding in findings} == SLURM_EXPECTED


def test_all_host_recipes_are_known() -> None:
    assert set(examine.TO_DO) == set(TITLES)
    assert {row.recipe for row in examine.ROWS if row.recipe} == set(TITLES)


@pytest.mark.parametrize(
    ("severities", "strict", "code"),
    [
        ([], True, 0),
        (["note"], True, 0),
        (["warning"], False, 0),
        (["warning"], True, 4),
        (["note", "blocking"], False, 4),
    ],
)
def test_exit_code(severities: list[str], strict: bool, code: int) -> None:
    found = [Finding("x", severity, ("n1",), "a", "b", "c", "d") for severity in severities]
    assert examine.exit_code(found, strict=strict) == code


def test_an_unknown_profile_is_said_and_not_hidden() -> None:
    facts, _, _ = cluster(read(FILES["well-ethernet"]))
    with pytest.raises(Trouble, match="there is no such profile"):
        examine.case_of(request("defaults prefix=/p profile=nonsense\nn001\nn002\n"), facts, "invoke bootstrap")


# What a user finds, by the real script.


def look(root: Path, *, user: int = 0, home: Path | None = None, **env: str) -> user_view.UserView:
    """Return what the script finds below `root`, run as root or as another user."""
    command = ["/usr/bin/bash"]
    if user:
        command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command]
    clean = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(home or root),
        "HOST_ROOT": str(root),
        "PREFIX": str(root / "prefix"),
        **env,
    }
    done = subprocess.run(command, input=SCRIPT, env=clean, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done
    return user_view.parse_user_view(Reply("n001", done.returncode, done.stdout, done.stderr, 0.0))


@pytest.fixture
def machine() -> Iterator[Path]:
    """A tree with devices (plain files here), shared memory and a prefix, all of them open to everybody. pytest's
    own folders are not."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        for device in DEVICES:
            file = root / "dev" / device
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            file.chmod(0o666)
        for folder in ("dev/shm", "prefix"):
            (root / folder).mkdir()
            (root / folder).chmod(0o1777)
        yield root


@pytest.mark.usefixtures("programs")
def test_everything_is_open(machine: Path) -> None:
    view = look(machine)
    assert (view.uid, view.container, view.shm, view.prefix, view.login) == (
        os.geteuid(),
        "",
        "writable",
        "readable",
        "",
    )
    assert view.memlock == "unlimited" or view.memlock.isdigit()
    assert view.devices == tuple(sorted((f"/dev/{name}", "") for name in DEVICES))


@pytest.mark.usefixtures("programs")
def test_the_limits_of_a_job_of_our_own_are_not_the_users(machine: Path) -> None:
    assert look(machine, DEEPEP_STEP="17").memlock == ""


@pytest.mark.usefixtures("programs")
def test_what_a_plain_user_may_not_open_is_named_with_the_reason(machine: Path) -> None:
    (machine / "dev" / "shm").chmod(0o555)
    for name in ("dev/nvidia1", "dev/infiniband", "prefix"):
        (machine / name).chmod(0)
    view = look(machine, user=NOBODY if os.geteuid() == 0 else 0)
    for name in ("dev/infiniband", "prefix"):
        (machine / name).chmod(0o700)
    assert (view.uid, view.ipc_lock) == (NOBODY if os.geteuid() == 0 else os.geteuid(), False)
    assert dict(view.devices)["/dev/nvidia1"] == "Permission denied"
    assert dict(view.devices)["/dev/nvidia0"] == ""
    assert not any("infiniband" in path for path, _ in view.devices)
    assert (view.shm, view.prefix) == ("denied", "denied")


@pytest.mark.usefixtures("programs")
def test_nothing_is_written(machine: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in machine.rglob("*")}
    look(machine)
    assert {path: path.stat().st_mtime_ns for path in machine.rglob("*")} == before


@pytest.mark.usefixtures("programs")
def test_an_empty_machine_in_a_container(tmp_path: Path) -> None:
    (tmp_path / ".dockerenv").touch()
    view = look(tmp_path)
    assert (view.container, view.devices, view.shm, view.prefix) == ("docker", (), "absent", "absent")


@pytest.mark.usefixtures("programs")
def test_a_prefix_whose_offer_cannot_be_read_is_denied(machine: Path) -> None:
    (machine / "prefix" / "current").mkdir()
    assert look(machine).prefix == "denied"
    (machine / "prefix" / "current" / "manifest.json").touch()
    assert look(machine).prefix == "readable"


PROFILE = """echo 'a greeting of the site' ; echo 'user=mallory'
module() { if [ "$1" = -t ]; then echo "/apps:" >&2; echo "deepep/1.2.1-8a07e7e-v1" >&2; echo "other/1" >&2; fi; }
export NVSHMEM_IB_GID_INDEX=3 LD_PRELOAD= SECRET_TOKEN=hidden TORCH_NCCL_USE_COMM_NONBLOCKING=0
export NVSHMEM_ODD='two
lines'
export LD_LIBRARY_PATH=$HOME/vendor:/nowhere:
"""


@pytest.mark.usefixtures("programs")
def test_what_a_login_shell_brings(machine: Path) -> None:
    home = machine / "home"
    (home / "vendor").mkdir(parents=True)
    (home / "vendor" / "libibverbs.so.1").touch()
    (home / ".bash_profile").write_text(PROFILE)
    view = look(machine, home=home)
    assert (view.module, view.visible) == ("yes", 1)
    assert view.user != "mallory"
    assert dict(view.variables) == {
        "LD_LIBRARY_PATH": f"{home}/vendor:/nowhere:",
        "NVSHMEM_IB_GID_INDEX": "3",
        "NVSHMEM_ODD": "two lines",
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
    }
    assert view.libraries == (f"{home}/vendor/libibverbs.so.1",)


@pytest.mark.usefixtures("programs")
def test_a_login_shell_that_ends_early_is_no_answer_and_no_failure(machine: Path) -> None:
    (machine / ".bash_profile").write_text("exit 3\n")
    assert look(machine).module == ""


@pytest.mark.parametrize(
    "text", ["", "user=a\n", "user=a\nuser=b\nend=1\n", "end=1\nnonsense\n", "uid=x\nend=1\n", "device=/dev/x\nend=1\n"]
)
def test_an_answer_of_another_kind_is_trouble_that_names_the_host(text: str) -> None:
    with pytest.raises(Trouble, match="n007"):
        user_view.parse_user_view(Reply("n007", 0, text, "", 0.0))


def test_a_script_that_failed_is_trouble_with_its_last_words() -> None:
    with pytest.raises(Trouble, match=r"n007.*no space left"):
        user_view.parse_user_view(Reply("n007", 1, "", "no space left\n", 0.0))


@pytest.mark.parametrize(("limit", "severity"), [("64", "blocking"), ("1048575", "blocking"), ("1048576", "warning")])
def test_how_bad_a_limit_is(limit: str, severity: str) -> None:
    assert memlock_severity(limit) == severity


# The program as a person runs it, on this machine.


def run(tmp_path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run `invoke doctor` on this machine with a prefix that is not there."""
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(f"defaults prefix={tmp_path}/prefix\nhere connection=local\n")
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    return subprocess.run(
        [sys.executable, "-m", "invoke", "doctor", f"--hosts={hosts}", *more],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.usefixtures("programs")
def test_on_this_machine_it_finds_and_writes_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "--json", "--python=/nowhere/python")
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["exit"] == done.returncode == 4, done
    assert document["errors"] == []
    found = {finding["check"]: finding for finding in document["findings"]}
    assert found["python"]["hosts"] == ["here"]
    assert found["python"]["found"].startswith("/nowhere/python: ")
    assert list(found["python"]) == ["check", "severity", "hosts", "found", "wanted", "why", "fix", "stacks"]
    assert [path.name for path in tmp_path.iterdir()] == ["hosts.txt"]


@pytest.mark.usefixtures("programs")
def test_people_read_the_worst_first(tmp_path: Path) -> None:
    done = run(tmp_path, "--python=/nowhere/python")
    lines = done.stdout.splitlines()
    assert lines[0] == "here: stack v1, profile single-node", done
    words = [line.split(":")[0] for line in lines if line.split(":")[0] in SEVERITIES]
    assert words == sorted(words, key=SEVERITIES.index)
    assert "blocking: python on here" in lines
    assert lines[-1].startswith(f"{words.count('blocking')} blocking, ")


@pytest.mark.usefixtures("programs")
def test_as_another_user(tmp_path: Path) -> None:
    # Only root becomes another user without being asked for a password.
    name = "nobody" if os.geteuid() == 0 else getpass.getuser()
    assert json.loads(run(tmp_path, "--json", f"--as={name}").stdout)["users"] == {"here": name}


def test_a_user_who_is_not_there() -> None:
    early = "deepep-bootstrap: no such user" if os.geteuid() == 0 else "sudo: unknown user no-such-user"
    what, found, wanted, try_ = channel.explain_no_start(1, early)
    said = early.removeprefix("deepep-bootstrap: ")
    assert (what, found, wanted, try_) == (
        "this user is not there",
        said,
        "an account of this name",
        "another user, or creating this one",
    )


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("name", ["a b", "$(id)", "--", "x;y"])
def test_what_is_no_user_name_is_refused(tmp_path: Path, name: str) -> None:
    done = run(tmp_path, f"--as={name}")
    assert done.returncode == 1
    assert done.stderr.startswith("--as: not the name of a user"), done


def test_the_advice_is_for_the_same_hosts() -> None:
    flags = Flags(ROOT, hosts="my hosts.txt", limit="n[001-002]", stack="v1-cu13", mirror=("/m", "index:x=/y"))
    command = command_for(flags)
    words = "'--hosts=my hosts.txt' '--limit=n[001-002]' --stack=v1-cu13 --mirror=/m --mirror=index:x=/y"
    assert command == f"invoke bootstrap {words}"
    facts, _, _ = cluster(read(FILES["well-ethernet"]))
    case = examine.case_of(request("defaults prefix=/p\nn001\nn002\n"), facts, command)
    assert case.command("doctor") == f"invoke doctor {words}"
    assert case.command("test") == "invoke test '--hosts=my hosts.txt' '--limit=n[001-002]' --stack=v1-cu13"
    assert case.with_stack("v1") == f"invoke bootstrap {words.replace('--stack=v1-cu13 ', '')} --stack=v1"


def test_a_verb_takes_every_flag_that_it_is_advised_with() -> None:
    flags = Flags(ROOT, "hosts", "n001", lock="l", stack="s", prefix="/p", python="/y", nccl="own", mirror=("/m",))
    facts, _, _ = cluster(read(FILES["well-ethernet"]))
    case = examine.case_of(request("defaults prefix=/p\nn001\nn002\n"), facts, command_for(flags))
    for name in ("bootstrap", "doctor", "plan", "test"):
        taken = {as_flag(parameter.name) for parameter in declared(name).parameters}
        advised = {word.partition("=")[0] for word in shlex.split(case.command(name))[2:]}
        assert advised
        assert advised <= taken, name


# Which stacks the hosts are judged by.


def offering(facts: dict[str, Facts], *records: StackRecord, default: str = "") -> Survey:
    """Return a survey of these hosts, whose prefix offers these stacks."""
    stacks = {record.stack: record for record in records}
    offer = Offer(default or records[0].stack, stacks, "t") if records else None
    manifest = json.dumps({"offer": offer_document(offer)}) if offer else ""
    seen = {name: changed(each, ["prefix", "manifest"], manifest) for name, each in facts.items()}
    return Survey(request(f"defaults prefix={PREFIX}\n" + "\n".join(facts)).inventory, PREFIX, seen)


def record(stack: str, python: str = "") -> StackRecord:
    return replace(RECORD, stack=stack, module=f"deepep/1.2.1-8a07e7e-{stack}", external_python=python)


def judged(survey: Survey, **given: Any) -> list[examination.Judged]:
    """Return what the doctor judges by, without asking the hosts again."""
    wanted = request(f"defaults prefix={PREFIX}\n" + "\n".join(survey.facts))
    found = []
    for flags in examination.stacks_to_judge(Flags(ROOT, hosts="h", **given), wanted.lock, survey):
        stack = wanted.lock.stacks[flags.stack or wanted.lock.default_stack]
        mine = replace(wanted, stack=stack, external_python=flags.python)
        found.append(
            examination.Judged(flags, survey, mine, examine.case_of(mine, survey.facts, command_for(flags)), {})
        )
    return found


def test_the_hosts_are_judged_by_what_is_offered_and_by_the_lock_only_where_nothing_is() -> None:
    facts, _, _ = cluster({"hosts": {"gpu1": "h200"}})
    (nothing,) = judged(offering(facts))
    assert (nothing.request.stack.name, nothing.flags.stack) == ("v1", "")
    found = examination.findings_of([nothing], {}, as_another=False)
    assert "cuda-toolkit" in [each.check for each in found if each.severity == "blocking"]
    (alone,) = judged(offering(facts, record("v1-cu13", "/opt/torch/bin/python3")))
    assert (alone.flags.stack, alone.flags.python) == ("v1-cu13", "/opt/torch/bin/python3")
    assert alone.case.bootstrap == "invoke bootstrap --hosts=h --stack=v1-cu13 --python=/opt/torch/bin/python3"
    assert "cuda-toolkit" not in [each.check for each in examination.findings_of([alone], {}, as_another=False)]
    (asked,) = judged(offering(facts, record("v1-cu13")), stack="v1")
    assert (asked.request.stack.name, asked.flags.stack) == ("v1", "v1")
    (default,) = judged(offering(facts, record("v1")))
    assert (default.request.stack.name, default.flags.stack) == ("v1", "")


def test_of_two_offered_stacks_the_blocked_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    facts, _, _ = cluster({"hosts": {"n001": "infiniband", "n002": "infiniband"}})
    facts = {name: changed(seen, ["gpus", "*", "driver"], "550.54.15") for name, seen in facts.items()}
    facts = {name: changed(seen, ["rdma"], ()) for name, seen in facts.items()}
    survey = offering(facts, record("v1"), record("v1-cu13"), default="v1-cu13")
    both = judged(survey)
    assert [one.flags.stack for one in both] == ["v1-cu13", "v1"]
    found = examination.findings_of(both, {}, as_another=False)
    (driver,) = [each for each in found if each.check == "driver-cuda"]
    assert (driver.severity, driver.hosts, driver.stacks) == ("blocking", ("n001", "n002"), ("v1-cu13",))
    assert driver.fix == "invoke bootstrap --hosts=h --stack=v1"
    assert {each.stacks for each in found if each.check != "driver-cuda"} == {("v1-cu13", "v1")}
    verb.show(Screen("doctor"), both, found)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "n[001-002] (2): stacks v1-cu13, v1 as offered, profile single-node"
    assert "blocking: driver-cuda on n[001-002] (2) (stack v1-cu13)" in lines


def test_findings_of_several_stacks_that_differ_in_more_than_the_fix_stay_apart() -> None:
    one = Finding("x", "blocking", ("n1",), "a", "b", "c", "fix of v1", ("v1",))
    other = replace(one, fix="fix of v2", stacks=("v2",))
    assert examine.join([[one], [other]], ["n1"]) == (replace(one, stacks=("v1", "v2")),)
    milder = replace(other, severity="note")
    assert examine.join([[milder], [one]], ["n1"]) == (one, milder)


def test_an_offered_stack_that_this_lock_does_not_have_is_a_note() -> None:
    facts, _, _ = cluster({"hosts": {"gpu1": "h200"}})
    survey = offering(facts, record("v9"), record("v1-cu13"))
    found = request().lock
    assert [one.flags.stack for one in judged(survey)] == ["v1-cu13"]
    (note,) = examination.not_in_lock(survey, found, Flags(ROOT, hosts="h"))
    assert (note.check, note.severity, note.stacks) == ("offered-stack", "note", ("v9",))
    assert note.found == "stack v9 is offered"
    assert examination.not_in_lock(survey, found, Flags(ROOT, hosts="h", stack="v1")) == ()
    (default,) = judged(offering(facts, record("v9")))
    assert default.request.stack.name == "v1", "where the lock has none of them, its default one"


def test_what_a_bootstrap_cannot_change_is_not_sent_to_it() -> None:
    """A slurmd that began before its limits were right: the recipe has nothing to do, and says so."""
    facts, views, _ = cluster(read(FILES["well-ethernet"]))
    name = next(iter(facts))
    limited = changed(facts[name], ["prepared", "slurmd_memlock"], "8192")
    case = examine.case_of(request("defaults prefix=/p\nn001\nn002\n"), facts, "invoke bootstrap")
    note = "slurmd gets its limit when it starts next"
    fixes = {}
    for state in ("ok", "todo"):
        checks = {"limits": Check("limits", state, "as wanted", "memlock unlimited for logins and slurmd", note)}
        found = examine.examine_host(
            HostView(name, "gpu", limited, changed(views[name], ["memlock"], "64"), case), checks
        )
        fixes[state] = {finding.fix for finding in found if "memlock" in finding.check or finding.check == "limits"}
    assert fixes["ok"] == {
        "restarting slurmd there, when its steps have ended",
        "a new log-in; ulimit -Hl there says what it gets",
    }
    assert all(fix.startswith("invoke bootstrap") for fix in fixes["todo"])
    limited, asked = changed(limited, ["prepared", "memlock"], "64"), replace(case, as_another=True)
    assert [each.check for each in examine.examine_host(HostView(name, "gpu", limited, None, asked), {})] == [
        "slurmd-memlock"
    ]


# `invoke status` names the hosts that are not finished.


def unfinished(**changes: Any) -> Survey:
    facts: Facts = WELL
    for path, new in changes.items():
        facts = changed(facts, path.split("__"), new)
    return Survey(request().inventory, "/p", {"n001": WELL, "n002": facts})


def test_status_names_what_waits_for_a_reboot() -> None:
    mine = unfinished(
        prepared__stamps=(Stamp("doca-ofed", BOOT), Stamp("limits", "another boot"), Stamp("driver-options", BOOT))
    )
    assert drained.waiting_for_reboot(mine) == {"n002": "doca-ofed, driver-options"}
    assert drained.waiting_for_reboot(unfinished(prepared__reboot_required=True)) == {
        "n002": "the distribution asks for it"
    }
    assert drained.waiting_for_reboot(unfinished(prepared__stamps=(Stamp("doca-ofed", "another boot"),))) == {}


def test_status_names_nodes_that_we_drained_and_no_others() -> None:
    ours = "deepep-bootstrap: driver options [root@2026-11-21T02:11:40]"
    assert drained.drained_by_us(unfinished(prepared__slurm_reason=ours)) == {"n002": ours}
    assert drained.drained_by_us(unfinished(prepared__slurm_reason="bad disk [root@2026-11-21T02:11:40]")) == {}
