"""Running a test and bringing back what it left: where it runs, without Slurm on this machine, what a node counts,
what is cut off."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from deepep_bootstrap.core.errors import OK, TROUBLE, VERDICT, Trouble
from deepep_bootstrap.inventory.facts import Facts, Gpu, Prefix, Slurm
from deepep_bootstrap.inventory.hostsfile import Inventory, Settings
from deepep_bootstrap.inventory.survey import Survey, read_tree
from deepep_bootstrap.prefix import test_kinds
from deepep_bootstrap.prefix.generations import PrefixHandle
from deepep_bootstrap.prefix.test_kinds import KINDS
from deepep_bootstrap.remote.fleet import ConnectionPool
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Reply
from deepep_bootstrap.report import load
from deepep_bootstrap.testing import placement, run_folder, slurm_run, ssh_run
from deepep_bootstrap.testing.run_folder import Judgement, RunVerdict, parse_counters
from deepep_bootstrap.testing.slurm_run import LastOutput, TestRequest
from tests.support import modules as support

RECIPES = read_tree(support.REPOSITORY / "recipes")
NODE = support.REPOSITORY / "env" / "programs" / "node.sh"
RECORD = (
    "JobId=7 JobName=x UserId=root(0) GroupId=root(0) JobState={} Reason={} ExitCode={} NodeList=n[001-002] "
    "StdOut=/p/job.log"
)


def make_request(prefix: Path, kind: str = "intranode", *args: str, limit: int = 60) -> TestRequest:
    return TestRequest(KINDS[kind], support.record(str(prefix)), slurm_run.run_name(kind), 1, limit, args=args)


# Where it runs.


def survey(hosts: dict[str, Facts], roles: dict[str, str] | None = None, **settings: str) -> Survey:
    found = tuple(Host(name, role=(roles or {}).get(name, "gpu")) for name in hosts)
    return Survey(Inventory("hosts.txt", found, Settings(**settings)), "/p", hosts)


def node(name: str, state: str = "IDLE", **more: object) -> Facts:
    return Facts(slurm=Slurm(works=True, sbatch=True, node=name, state=state), prefix=Prefix(id="x"), **more)  # type: ignore[arg-type]


GPU = Gpu(0, "NVIDIA H100", 80000, "9.0", "580", "", "", 0, 0)
ALONE = Facts(gpus=(GPU,), prefix=Prefix(id="x"))
BUSY = Facts(gpus=(replace(GPU, processes=3),), prefix=Prefix(id="x"))
CLUSTER = {
    "n1": node("n1"),
    "n2": node("n2"),
    "n3": node("n3", "DOWN"),
    "login": replace(ALONE, gpus=(), slurm=Slurm(True, sbatch=True)),
}


def test_slurm_does_it_where_it_runs() -> None:
    there = survey(CLUSTER, {"login": "login"})
    placed = placement.find_placement(there, KINDS["internode"], 0)
    assert (placed.where, placed.count, placed.named) == ("login", 2, ())
    assert placement.find_placement(there, KINDS["internode"], 3).count == 3
    assert placement.find_placement(there, KINDS["intranode"], 0, limited=True).named == ("n1",)
    assert placement.find_placement(there, KINDS["pairs"], 0).count == 2, "all nodes that can run a job"
    with pytest.raises(Trouble, match="too few nodes"):
        placement.find_placement(there, KINDS["nccl"], 3, limited=True)
    ssh = placement.find_placement(there, KINDS["internode"], 0, via="ssh")
    assert (ssh.client, ssh.where) == (None, "n[1-2] (2)")
    assert ssh.notes == ("n3 is busy (down in Slurm) and is left alone",)


def test_nodes_in_the_reservation_that_jobs_name_are_nodes_to_test_on() -> None:
    nodes = {
        "n1": node("n1", "IDLE+RESERVED"),
        "n2": node("n2", "IDLE+MAINTENANCE+RESERVED"),
        "n3": node("n3", "IDLE+DRAIN+RESERVED"),
    }
    there = survey(nodes, sbatch_args=("--requeue", "--reservation=acceptance"))
    assert placement.find_placement(there, KINDS["internode"], 0, limited=True).named == ("n1", "n2")
    assert placement.find_placement(there, KINDS["internode"], 0, via="ssh").where == "n[1-2] (2)"
    with pytest.raises(Trouble, match="too few nodes"):
        placement.find_placement(survey(nodes), KINDS["internode"], 0, limited=True)


def test_without_slurm_on_free_hosts() -> None:
    there = survey({"a": ALONE, "b": BUSY, "c": ALONE})
    placed = placement.find_placement(there, KINDS["low-latency"], 2)
    assert ([host.name for host in placed.hosts], placed.client) == (["a", "c"], None)
    assert placed.notes == ("b is busy (3 GPU processes) and is left alone",)
    with pytest.raises(Trouble, match="--on-busy-host=use"):
        placement.find_placement(there, KINDS["internode"], 3)
    assert placement.find_placement(there, KINDS["internode"], 3, use_busy=True).count == 3
    with pytest.raises(Trouble, match="--via=ssh"):
        placement.find_placement(there, KINDS["internode"], 0, via="slurm")


@pytest.mark.parametrize(("kind", "nodes"), [("intranode", 2), ("smoke", 8), ("internode", 1), ("pairs", 1)])
def test_a_number_of_nodes_it_cannot_take(kind: str, nodes: int) -> None:
    with pytest.raises(Trouble, match=f"the {kind} test cannot run on that many nodes"):
        placement.find_placement(survey(CLUSTER), KINDS[kind], nodes)


@pytest.mark.parametrize(("via", "host"), [("nothing", "n1"), ("", "n9")])
def test_what_is_not_there(via: str, host: str) -> None:
    with pytest.raises(Trouble, match=r"--via|did not answer"):
        placement.find_placement(survey(CLUSTER, slurm_host=host), KINDS["internode"], 0, via=via)


def test_v1_has_no_ep() -> None:
    with pytest.raises(Trouble, match="DeepEP V1, which has no such test"):
        test_kinds.find_kind("ep", support.record())
    assert test_kinds.find_kind("ep", support.v2_record()).name == "ep"
    with pytest.raises(Trouble, match="no such test"):
        test_kinds.find_kind("eq", support.v2_record())


def test_v25_has_one_test_and_none_of_v1() -> None:
    record = support.v25_record()
    kinds = {kind.name: kind.run_for(record) for kind in test_kinds.KINDS.values()}
    upstream = {name: run.script for name, run in kinds.items() if run and not test_kinds.KINDS[name].ours}
    assert upstream == dict.fromkeys(("internode", "intranode", "pressure", "ep"), "ep/test_ep.py")
    assert {name for name, run in kinds.items() if run is None} == {"low-latency", "example-prefill", "example-decode"}
    with pytest.raises(Trouble, match=r"DeepEP V2\.5, which has no such test .*DeepEP V1 or V2"):
        test_kinds.find_kind("low-latency", record)


def test_one_without_an_end_is_stopped_before_its_job_is(tmp_path: Path) -> None:
    for limit, seconds in ((14400, 14280), (200, 100), (1, 1)):
        assert make_request(tmp_path, "pressure", limit=limit).env["DEEPEP_TEST_SECONDS"] == str(seconds)
    assert "DEEPEP_TEST_SECONDS" not in make_request(tmp_path).env


# Through Slurm.


@pytest.mark.parametrize(
    ("text", "state", "code", "detail"),
    [
        ("refused=sbatch: error: no", slurm_run.REFUSED, TROUBLE, "sbatch: error: no"),
        ("refused=no such file", slurm_run.REFUSED, TROUBLE, "sbatch: no such file"),
        (
            "job=7\nrecord=" + RECORD.format("FAILED", "NonZeroExitCode", "0:53"),
            slurm_run.UNWRITTEN,
            TROUBLE,
            "job 7 on n[001-002]: the node cannot write /p — wanted a folder that all nodes see",
        ),
        ("job=7\nrecord=", slurm_run.LOST, TROUBLE, "job 7: Slurm has lost sight of it"),
        (
            "job=7\nlate=yes\nrecord=" + RECORD.format("PENDING", "Resources", "0:0"),
            slurm_run.LATE,
            TROUBLE,
            "did not start in 10 min: Resources",
        ),
        (
            "job=7\nhung=yes\nrecord=" + RECORD.format("CANCELLED", "None", "0:15"),
            slurm_run.HUNG,
            VERDICT,
            "n[001-002]: no end after 1 min",
        ),
        (
            "job=7\nrecord=" + RECORD.format("TIMEOUT", "TimeLimit", "0:0"),
            slurm_run.HUNG,
            VERDICT,
            "no end after 1 min",
        ),
        (
            "job=7\nrecord=" + RECORD.format("FAILED", "NonZeroExitCode", "7:0"),
            slurm_run.ENDED,
            VERDICT,
            "job 7 on n[001-002]: exit code 7",
        ),
        (
            "job=7\nrecord=" + RECORD.format("OUT_OF_MEMORY", "OutOfMemory", "0:125"),
            slurm_run.ENDED,
            VERDICT,
            "OUT_OF_MEMORY, exit code",
        ),
        (
            "job=7\nrecord=" + RECORD.format("CANCELLED", "None", "0:15"),
            slurm_run.STOPPED,
            VERDICT,
            "the job was cancelled by somebody else",
        ),
        (
            "job=7\nrecord=" + RECORD.format("COMPLETED", "None", "0:0"),
            slurm_run.ENDED,
            OK,
            "job 7 on n[001-002] passed",
        ),
    ],
)
def test_how_a_job_ended(text: str, state: str, code: int, detail: str, tmp_path: Path) -> None:
    result = slurm_run.submitted(
        Reply("login", 0, f"place=/p\n{text}\n", "", 1.0), make_request(tmp_path), Host("login")
    )
    assert (result.state, result.outcome.code) == (state, code)
    assert detail in result.outcome.detail
    assert "sbatch: sbatch: " not in result.outcome.detail
    assert bool(result.outcome.log) == (state in {slurm_run.ENDED, slurm_run.HUNG, slurm_run.STOPPED})
    ran = {slurm_run.ENDED, slurm_run.HUNG, slurm_run.LOST, slurm_run.STOPPED}
    assert result.began == (state in ran)


def test_who_is_silent() -> None:
    logs = {"node-0-a.log": (2, 9, "[testing] x ..."), "node-1-b.log": (40, 2, "")}
    ranks = {
        "rank-0.log": (2, 9, "x"),
        "rank-1.log": (50, 0, ""),
        "rank-2.log": (40, 2, "begin"),
        "rank-3.log": (50, 0, ""),
    }
    said = [LastOutput(name, *values) for name, values in (logs | ranks).items()]
    assert slurm_run.silent(said, ("a", "b")) == (
        "node 1 (b) said nothing at all",
        "node 0 (a) said last, 2 s before: [testing] x ...",
        "rank 2 is 7 lines behind; it said last: begin",
    )


# Without Slurm.


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A prefix with a file for one test, which does what its arguments say."""
    file = tmp_path / "sbatch" / "v1" / "intranode-test.sbatch"
    file.parent.mkdir(parents=True)
    file.write_text(
        '#!/bin/bash\necho "arguments: $*, via $DEEPEP_VIA, on $DEEPEP_NODE"\necho complaint >&2\neval "$*"\n'
    )
    return tmp_path


def run_here(prefix: Path, *args: str, limit: int = 60) -> tuple[slurm_run.TestRunResult, list[str]]:
    host, lines = Host("here", connection="local"), list[str]()
    fleet = ConnectionPool((host,))
    try:
        return ssh_run.run_over_ssh(
            fleet, (host,), make_request(prefix, "intranode", *args, limit=limit), RECIPES, on_line=lines.append
        ), lines
    finally:
        fleet.close()


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("code", [0, 5])
def test_on_one_host(code: int, prefix: Path) -> None:
    result, lines = run_here(prefix, f"exit {code}")
    assert [line for line in lines if line] == [f"arguments: exit {code}, via ssh, on here", "complaint"]
    assert (result.state, result.outcome.state, result.outcome.code) == (
        slurm_run.ENDED,
        "failed" if code else "done",
        VERDICT if code else OK,
    )
    assert Path(result.place).parent == prefix / "logs" / "tests"
    assert result.log.splitlines()[:2] == lines[:2]


@pytest.mark.usefixtures("programs")
def test_one_that_hangs_is_ended_with_what_it_started(prefix: Path) -> None:
    result, _ = run_here(prefix, f"sleep 987 & echo $! >{prefix}/child; wait", limit=1)
    assert (result.state, result.outcome.code) == (slurm_run.HUNG, VERDICT)
    assert "no end after 1 s" in result.outcome.detail
    # Whoever follows it says more; where nobody is left to do so, its folder says that it was stopped.
    kept = run_folder.parse_judgement((Path(result.place) / run_folder.VERDICT).read_text())
    assert kept == Judgement(RunVerdict.STOPPED, "whoever followed it was stopped")
    assert [(one.log, one.last) for one in result.last_output] == [("node-0-here.log", "complaint")]
    assert not is_running((prefix / "child").read_text().strip())


def is_running(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.usefixtures("programs")
def test_a_host_that_goes_away(prefix: Path) -> None:
    host = Host("here", connection="local")
    fleet = ConnectionPool((host,))
    threading.Timer(1.0, fleet.close).start()
    result = ssh_run.run_over_ssh(fleet, (host,), make_request(prefix, "intranode", "sleep 300"), RECIPES)
    assert (result.state, result.outcome.code) == (slurm_run.LOST, TROUBLE)


# What comes back.


def collected(folder: Path, largest: int, total: int) -> run_folder.RunFiles:
    host = Host("here", connection="local")
    env = {"PLACE": str(folder), "LARGEST": str(largest), "TOTAL": str(total), "PATIENCE": "0"}
    script = "\n".join([*(RECIPES[name] for name in run_folder.COLLECT)])
    assert host.connection == "local"
    done = subprocess.run(["bash", "-c", script], env={**os.environ, **env}, capture_output=True, check=True)
    return run_folder.parse_collected(done.stdout, "here")


@pytest.mark.usefixtures("programs")
def test_a_run_comes_back_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "counters").mkdir()
    files = {
        "run.env": "code=0\n",
        "job.log": "x\n",
        "node-0-a.log": "é\0\n" * 3,
        "node-10-b.log": "",
        "counters/a.before": "time=1\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "core.1").write_text("none of ours")
    (tmp_path / "node-0-a b.log").write_text("nor this")
    host = Host("here", connection="local")
    fleet = ConnectionPool((host,))
    place = PrefixHandle(host, str(tmp_path), RECIPES)
    try:
        found = run_folder.collect(fleet, place, str(tmp_path))
        assert (dict(found.files), found.cut) == (files, {})
        run_folder.keep_files(fleet, place, str(tmp_path), lines=["time_limit=60"], files={"facts.json": b"{}"})
        run_folder.keep_judgement(fleet, place, str(tmp_path), Judgement(RunVerdict.BELOW, "slow, password=hunter22"))
        run_folder.write_site(fleet, place, "references.toml", "[x]\n")
        assert run_folder.read_site(fleet, place, "references.toml") == "[x]\n"
        assert run_folder.read_site(fleet, place, "causes.toml") == ""
        with pytest.raises(Trouble, match="cannot be read"):
            run_folder.collect(fleet, place, f"{tmp_path}/nowhere")
    finally:
        fleet.close()
    run = run_folder.of_files("r", run_folder.of_folder(tmp_path))
    assert (run.values, run.facts) == ({"code": "0", "time_limit": "60"}, "{}")
    assert run.kept == Judgement(RunVerdict.BELOW, "slow, password=[removed]")


@pytest.mark.usefixtures("programs")
def test_of_a_long_log_both_ends_come_back(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("begin" + "x" * 1000 + "end")
    (tmp_path / "node-0-a.log").write_text("y" * 30)
    found = collected(tmp_path, largest=20, total=30)
    assert found.files["job.log"] == "beginxxxxx\n[988 bytes left out here]\nxxxxxxxend"
    assert found.cut == {"job.log": 988, "node-0-a.log": 30}


@pytest.mark.parametrize("data", [b"", b"file a 3 3\nab", b"file a 3 3\nabc", b"file a 1 1\nxend", b"error: no\n"])
def test_what_is_cut_off_is_no_run(data: bytes) -> None:
    with pytest.raises(Trouble, match="cut off"):
        run_folder.parse_collected(data, "here")


# What `status` says of runs.


@pytest.mark.usefixtures("programs")
def test_the_last_run_of_each_kind_and_stack(tmp_path: Path) -> None:
    """The kept verdict counts, whatever the exit code; an older run, which has none, is told by its exit code. Smoke
    tests that came later do not push the others out."""
    below = '{"schema": 1, "verdict": "below reference", "why": "dispatch FP8: 0 of 0.03 GB/s"}'
    runs = (
        *(("internode", "v1", "code=0\n", ""), ("internode", "v1", "code=0\n", below)),
        *(("internode", "v2", "code=4\n", ""), ("pairs", "v1", "", ""), ("nccl", "v1", "code=0\n", "{")),
        *[("smoke", "v1", "code=0\n", '{"verdict": "passed", "why": "exit code 0"}')] * 7,
    )
    for number, (kind, stack, end, kept) in enumerate(runs):
        folder = tmp_path / "logs" / "tests" / f"202611{number + 10}T021140Z-{kind}"
        folder.mkdir(parents=True)
        (folder / "run.env").write_text(f"kind={kind}\nstack={stack}\nnodes=n001,n002\nstarted=1795313500\n{end}")
        if kept:
            (folder / "verdict.json").write_text(kept)
    host, fleet = Host("here", connection="local"), ConnectionPool(())
    facts = {"here": Facts(prefix=Prefix(path=str(tmp_path), exists=True))}
    found = load.newest(fleet, (host,), facts, recipes=RECIPES, user="")
    assert [(run.kind, run.stack, run.verdict, run.run[:8]) for run in found] == [
        ("smoke", "v1", "passed", "20261121"),
        ("nccl", "v1", "not judged", "20261114"),
        ("pairs", "v1", "not ended", "20261113"),
        ("internode", "v2", "failed", "20261112"),
        ("internode", "v1", "below reference", "20261111"),
    ]
    why = "dispatch FP8: 0 of 0.03 GB/s; 20261111T021140Z-internode"
    line = f"test internode of v1 on n[001-002] (2), 2026-11-22 02:11 UTC: below reference ({why})"
    assert found[-1].line == line
    assert load.newest(fleet, (host,), {"here": Facts()}, recipes=RECIPES, user="") == ()


# What a node counts.

SMI = """#!/bin/bash
if [[ $1 == nvlink ]]; then
    printf 'GPU 0: NVIDIA H200 (UUID: x)\\n\\t Link 0: Replay Errors: 2\\n\\t Link 0: CRC Errors: 1\\n\\t Link 1: FEC Errors - 0: 99\\n'
    printf 'GPU 1: NVIDIA H200 (UUID: y)\\n\\t Link 0: Replay Errors: 0\\n\\t Link 0: Effective BER: 15e-254\\n'
else
    printf '0, 3\\n1, [N/A]\\n'
fi
"""


def run_node(folder: Path, script: str, before: Sequence[str] = (), **env: str) -> tuple[int, str]:
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "nvidia-smi").write_text(SMI)
    (folder / "bin" / "nvidia-smi").chmod(0o755)
    known = {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "RANK": "3",
        "DEEPEP_NODE": "n7",
        "DEEPEP_RUN_DIR": str(folder / "run"),
    }
    with (folder / "out").open("w") as out:  # a pipe would be waited for, whoever has it
        done = subprocess.run(
            [*before, "bash", NODE, "bash", "-c", script], env={**known, **env}, stdout=out, check=False
        )
    return done.returncode, (folder / "out").read_text()


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("code", [0, 9])
def test_a_node_keeps_its_log_and_counters(code: int, tmp_path: Path) -> None:
    ended, out = run_node(tmp_path, f"echo one; echo two >&2; exit {code}")
    assert (ended, sorted(out.split())) == (code, ["one", "two"])
    assert (tmp_path / "run" / "node-3-n7.log").read_text() == out
    for when in ("before", "after"):
        counters = parse_counters((tmp_path / "run" / "counters" / f"n7.{when}").read_text(), when)
        assert {index: dict(gpu.errors) for index, gpu in counters.gpus.items()} == {
            0: {"ecc": 3, "nvlink": 3},
            1: {"nvlink": 0},
        }
        assert counters.time > 1.6e9


@pytest.mark.usefixtures("programs")
def test_a_node_gives_the_test_all_the_memlock_it_may(tmp_path: Path) -> None:
    # By default Slurm gives a job the soft limit of the shell that submitted it; the hard one stays slurmd's. Root may
    # pass over that, too.
    plain = ["setpriv", "--bounding-set=-sys_resource", "--inh-caps=-sys_resource"] if os.geteuid() == 0 else []
    ended, out = run_node(tmp_path, "ulimit -S -l; ulimit -H -l", ("prlimit", "--memlock=65536:4194304", *plain))
    assert (ended, out.split()) == (0, ["4096", "4096"])


@pytest.mark.usefixtures("programs")
def test_a_node_that_is_ended_still_counts(tmp_path: Path) -> None:
    ended, _ = run_node(tmp_path, "kill -TERM $PPID; sleep 60")
    assert ended == 1
    assert (tmp_path / "run" / "counters" / "n7.after").exists()


@pytest.mark.usefixtures("programs")
def test_a_node_does_not_wait_for_what_the_test_left_behind(tmp_path: Path) -> None:
    ended, _ = run_node(tmp_path, f"setsid sleep 60 >&1 & echo $! >{tmp_path}/child; exit 0")
    os.kill(int((tmp_path / "child").read_text()), 9)  # still there: the node has not waited for its end
    assert ended == 0


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("script", "code"), [("sleep 60", 0), ("exit 4", 4)])
def test_one_without_an_end(script: str, code: int, tmp_path: Path) -> None:
    ended, out = run_node(tmp_path, script, DEEPEP_TEST_SECONDS="1" if code == 0 else "50")
    assert ended == code
    assert ("stopped after 1 s, as planned" in out) == (code == 0)


@pytest.mark.usefixtures("programs")
def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    ended, out = run_node(tmp_path, "echo one", DEEPEP_RUN_DIR="/proc/nowhere")
    assert (ended, out.splitlines()[-1]) == (0, "one")


@pytest.mark.usefixtures("programs")
def test_who_may_not_write_in_the_prefix_keeps_the_run_at_home(tmp_path: Path) -> None:
    script = "\n".join([RECIPES["lib.sh"], RECIPES["prefix/lib/share.sh"], RECIPES["test/lib/place.sh"], "make_place"])
    for run, code in (("20260101T000000Z-pairs-abc", 0), ("../x", 1), (".x", 1)):
        env = {**os.environ, "PREFIX": "/proc/nowhere", "HOME": str(tmp_path), "RUN": run}
        done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        if code == 0:
            assert done.stdout == f"{tmp_path}/deepep-tests/{run}\n"
            assert (tmp_path / "deepep-tests" / run / "counters").is_dir()
