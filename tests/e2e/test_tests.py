"""`invoke test` on the embedded cluster: what it runs, what it brings back, what it says of NICs, ranks, nodes and
hours that are wrong."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from deepep_bootstrap.core.errors import OK, TROUBLE, VERDICT
from deepep_bootstrap.testing import run_folder
from tests.support.e2e import Engine, interrupt, wait_until
from tests.support.paths import ROOT

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]

SMALL = "--args=--num-processes 2 --num-experts 8"
NODES = ("n001", "n002")
NO_KERNEL = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
BAD_MEMORY = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


@pytest.fixture(scope="module")
def ready(lab, standin_sources: Path) -> Engine:  # type: ignore[no-untyped-def]
    """One cluster for all tests here: they change what its fakes say, and put it back."""
    lab.reset()
    engine = Engine(lab, standin_sources, smoke=True)
    lab.fake("n002", "capability", "10.0")  # a build for two sorts of GPUs; the tests say which sort the nodes have
    ended = engine.run("bootstrap")
    lab.fake("n002", "capability", None)
    assert ended.code == OK, ended.text
    assert "done smoke test on login1" in ended.out
    return engine


@contextmanager
def capability(engine: Engine, value: str, *hosts: str) -> Iterator[None]:
    """Let the GPUs of nodes be of another compute capability."""
    for host in hosts:
        engine.lab.fake(host, "capability", value)
    try:
        yield
    finally:
        for host in hosts:
            engine.lab.fake(host, "capability", None)


@contextmanager
def fault(engine: Engine, **switches: str) -> Iterator[None]:
    """Turn switches of the stand-in's tests on, on both nodes."""
    for name, value in switches.items():
        for host in NODES:
            engine.lab.fake(host, f"STANDIN_{name}", value)
    try:
        yield
    finally:
        for name in switches:
            for host in NODES:
                engine.lab.fake(host, f"STANDIN_{name}", None)


def outcome(document: dict[str, Any]) -> tuple[str, int, str]:
    found = document["outcome"]
    return found["state"], found["code"], found["detail"]


def states(document: dict[str, Any], kind: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for verdict in document["verdicts"]:
        if verdict["kind"] == kind:
            found.setdefault(verdict["state"], []).append(f"{verdict['host']} {verdict['text']}".strip())
    return found


def test_between_nodes(ready: Engine) -> None:
    document = ready.json("test", "--kind=internode", SMALL, "--save-as-reference")
    assert outcome(document)[:2] == ("passed", OK), document["outcome"]
    (tested,) = document["tests"]
    assert (tested["test"], tested["ok"], tested["cases"]) == ("internode", True, {"passed": 32, "failed": 0})
    assert set(tested["best"]) == {"dispatch_fp8", "dispatch_bf16", "combine"}
    assert [len(found) for found in states(document, "nic").values()] == [2]
    assert document["nodes"] == {"passing": [*NODES], "failing": []}
    assert submitted(ready, document, "--nodes=2 --nodelist", "passing_nodes.txt") == "n[001-002]"
    assert "n001 all 8 NICs carried traffic" in states(document, "nic")["ok"][0]
    # What it kept: its folder, its settings for later programs, its figures for later runs.
    folder = ready.lab.shared / Path(document["run"]["folder"]).relative_to("/shared")
    run = run_folder.of_files(folder.name, run_folder.of_folder(folder))
    assert (run.kind, run.nodes, run.code, run.values["via"]) == ("internode", NODES, 0, "slurm")
    assert sorted(run.logs) == [
        "job.log",
        "node-0-n001.log",
        "node-1-n002.log",
        *(f"rank-{rank}.log" for rank in range(4)),
    ]
    assert all(before and after and len(after.nics) == 8 for before, after in run.counters.values())
    assert set(json.loads(run.facts)["hosts"]) == set(NODES)
    loaded = ready.lab.ssh("n001", "bash -lc 'module load deepep && python -c \"import deepep_tuned\"'")
    assert loaded.returncode == 0, loaded.stderr
    assert document["kept"]["references"] == 9
    assert 'test = "internode"' in (ready.on_disk / "references.toml").read_text()


def test_on_one_node_below_its_reference(ready: Engine) -> None:
    own = ready.on_disk / "references.toml"
    own.write_text(
        '[[reference]]\ngpu = "H100"\nfabric = "nvlink"\nnodes = 1\ntest = "intranode"\ngeneration = "v1"\nlower = '
        "0.1\nupper = 0.1\n"
        'source = "a dream"\nfigures = { "best.combine.nvl_gbs" = 400.0 }\n'
    )
    ended = ready.run("test", "--kind=intranode", SMALL, "--save-as-reference")
    kept = own.read_text()
    own.unlink()
    assert ended.code == VERDICT, ended.text
    assert "24 cases passed" in ended.out
    assert "below  intranode combine, NVLink" in ended.out
    assert "% of 400 GB/s, allowed from 360 (a dream)" in ended.out
    assert "6 figures are now references of this site" in ended.out
    assert kept.count("this site, ") == 1, "what the hardware gives is what later runs are compared with"
    run = ended.out.rsplit("invoke report ", 1)[1].split()[0]
    # One word everywhere, also after this run's figures became the references: today's would say "passed".
    said = next(line for line in ended.out.splitlines() if "intranode test" in line and line.startswith("below"))
    assert said.split("  ")[0] == "below reference"
    (kept,) = [each for each in ready.json("status")["tests"] if each["run"] == run]
    told = ready.json("report", run)
    assert (kept["verdict"], kept["why"]) == (told["verdict"], told["why"]) == ("below reference", kept["why"])
    assert kept["why"] in said
    assert any(remark.startswith("judged below reference when it ran; today: ") for remark in told["remarks"])
    folder = ready.on_disk / "logs" / "tests" / run
    assert json.loads((folder / "verdict.json").read_text())["verdict"] == "below reference"


def test_a_slow_rank_is_named(ready: Engine) -> None:
    with fault(ready, SLOW="3:20"):
        document = ready.json("test", "--kind=low-latency", "--nodes=2", SMALL)
    assert outcome(document)[:2] == ("passed", OK), document["outcome"]
    assert "rank 3 is slow" in outcome(document)[2]
    (tested,) = document["tests"]
    assert [rank["rank"] for rank in tested["ranks"] if rank["state"] == "slow"] == [3]
    assert len(tested["ranks"]) == 4


def test_a_nic_that_carries_nothing_and_no_slurm(ready: Engine, tmp_path: Path) -> None:
    with fault(ready, FROZEN_NIC="mlx5_5"):
        document = ready.json("test", "--kind=internode", "--via=ssh", SMALL)
    assert (document["exit"], outcome(document)[0]) == (VERDICT, "below reference")
    below = states(document, "nic").get("below", [])
    assert [text.split(" sent")[0] for text in below] == ["n001 mlx5_5/1", "n002 mlx5_5/1"], (
        document["outcome"],
        document["results"],
    )
    assert "n001: mlx5_5/1 sent nothing of the test" in outcome(document)[2]
    assert document["tests"][0]["ok"], "the test itself passed"
    assert document["run"]["values"]["via"] == "ssh"
    assert [nic["share_sent"] for nic in document["traffic"] if nic["device"] == "mlx5_5/1"] == [0.0, 0.0]
    told = ready.json("report", document["run"]["name"], f"--html={tmp_path}/report.html")
    assert (told["verdict"], told["why"]) == (document["verdict"], document["why"])
    assert document["why"].startswith("n001: mlx5_5/1 sent nothing of the test")
    assert (told["verdicts"], told["results"]["tests"]) == (document["verdicts"], document["tests"])
    assert told["run"]["folder"].startswith(document["run"]["folder"])
    assert "mlx5_5/1 sent nothing of the test" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("via", "said", "cause", "failing"),
    [("slurm", BAD_MEMORY, "gpu-hardware-fault", ["n002"]), ("ssh", NO_KERNEL, "arch-mismatch-build", [])],
)
def test_a_failing_node_is_named_and_its_log_explained(
    via: str, said: str, cause: str, failing: list[str], ready: Engine
) -> None:
    with fault(ready, FAIL_NODE="1", FAIL_SAYS=said):
        document = ready.json("test", "--kind=internode", f"--via={via}", SMALL)
    assert (document["exit"], outcome(document)[:2]) == (VERDICT, ("failed", VERDICT))
    assert document["findings"][0]["cause"] == cause
    evidence = document["findings"][0]["evidence"][0]
    shown = evidence.get("file", "node-1-n002.log")  # it stands there where lines of several logs are shown
    assert (shown, evidence["line"], evidence["text"]) == ("node-1-n002.log", 2, said)
    assert document["kept"] == {"tuned": [], "references": 0}
    assert document["nodes"] == {"passing": [], "failing": failing}
    if failing:
        assert submitted(ready, document, "--exclude", "failing_nodes.txt") == "n001"


def submitted(engine: Engine, document: dict[str, Any], option: str, file: str) -> str:
    """The nodes of a job that a real sbatch placed by one of the files in a run's folder."""
    sbatch = f"sbatch --parsable --wait --output=/dev/null {option}={document['run']['folder']}/{file} --wrap=true"
    done = engine.lab.ssh("login1", f"job=$({sbatch}) && scontrol -o show job $job | grep -o ' NodeList=[^ ]*'")
    return done.stdout.strip().removeprefix("NodeList=") or done.stderr


def test_one_that_hangs_ends_at_its_time_limit(ready: Engine) -> None:
    with fault(ready, HANG="2", TIMEOUT="300"):
        document = ready.json("test", "--kind=internode", "--time-limit=20s", SMALL)
    assert (document["exit"], outcome(document)[:2]) == (VERDICT, ("failed", VERDICT))
    assert "no end after 20 s" in outcome(document)[2]
    said = {line.split()[1]: line for line in document["silent"]}
    assert "n002" in said["1"]
    assert "rank 2 is" in " ".join(document["silent"])
    assert not ready.lab.ssh("login1", "squeue -h").stdout.strip()


def test_one_that_never_starts(ready: Engine) -> None:
    blocking = ready.lab.ssh(
        "login1", "sbatch --parsable --nodes=2 --exclusive --output=/dev/null --wrap='sleep 60'"
    ).stdout.strip()
    try:
        document = ready.json("test", "--kind=intranode", "--start-timeout=1")
    finally:
        ready.lab.ssh("login1", f"scancel {blocking}; while squeue -h | grep -q .; do sleep 0.1; done")
    assert (document["exit"], outcome(document)[:2]) == (TROUBLE, ("failed", TROUBLE))
    assert "did not start in 1 s: " in outcome(document)[2]
    assert "Resources" in outcome(document)[2] or "Priority" in outcome(document)[2]
    assert document["run"]["folder"] == ""


def test_one_that_somebody_cancels_is_stopped(ready: Engine) -> None:
    """Not failed: nobody knows how it would have ended."""
    cancel = "until squeue -h -t R -o %i | grep -q .; do sleep 0.2; done; sleep 1; scancel $(squeue -h -o %i)"
    with fault(ready, HANG="2", TIMEOUT="300"), ThreadPoolExecutor(1) as pool:
        ending = pool.submit(ready.lab.ssh, "login1", cancel)
        document = ready.json("test", "--kind=internode", "--time-limit=300s", SMALL)
        assert ending.result().returncode == 0
    assert (document["exit"], document["verdict"]) == (VERDICT, "stopped"), document["outcome"]
    assert "the job was cancelled by somebody else" in outcome(document)[2]
    assert ready.json("status")["tests"][0]["verdict"] == "stopped"
    assert ready.json("report", document["run"]["name"])["verdict"] == "stopped"


@pytest.mark.parametrize("via", ["slurm", "ssh"])
def test_one_whose_follower_is_interrupted_is_stopped(via: str, ready: Engine) -> None:
    """Nobody is left to judge it: the script on the host says so in the run's folder."""
    runs = ready.on_disk / "logs" / "tests"
    before = set(runs.iterdir())
    with fault(ready, HANG="2", TIMEOUT="300"):
        process = ready.start("test", "--kind=internode", f"--via={via}", "--time-limit=300s", SMALL)
        begun = "the test runs on both nodes"
        wait_until(lambda: any((new / "node-1-n002.log").exists() for new in set(runs.iterdir()) - before), begun)
        assert interrupt(process, signal.SIGINT)[0] == 130
        (run,) = set(runs.iterdir()) - before
        wait_until((run / "verdict.json").exists, "the verdict is kept")
        wait_until(lambda: not ready.lab.ssh("login1", "squeue -h").stdout.strip(), "no job is left")
    (last,) = [each for each in ready.json("status")["tests"] if each["run"] == run.name]
    assert (last["verdict"], last["why"]) == ("stopped", "whoever followed it was stopped")
    assert ready.json("report", run.name)["verdict"] == "stopped"


def test_a_test_without_an_end_passes_when_it_is_stopped(ready: Engine) -> None:
    document = ready.json("test", "--kind=pressure", "--time-limit=8s", SMALL)
    assert outcome(document)[:2] == ("passed", OK), document
    assert document["tests"][0]["ok"]


FOUR = "--args=--num-processes 4 --num-experts 8"


@pytest.mark.parametrize("via", ["slurm", "ssh"])
def test_a_wrong_row_on_blackwell_is_seen(via: str, ready: Engine, tmp_path: Path) -> None:
    """One row in one combine call of 66, from 200 tokens on: nothing but the test's own comparison tells."""
    with capability(ready, "10.0", *NODES), fault(ready, WRONG_ROW="700"):
        document = ready.json("test", "--kind=low-latency", f"--via={via}", FOUR)
    assert (document["exit"], outcome(document)[:2]) == (VERDICT, ("failed", VERDICT))
    assert "wrong results at 256 tokens a rank, in run " in outcome(document)[2]
    first, second = document["tests"]
    assert (first["ok"], first["pass"]["tokens"], second["ok"], second["pass"]["tokens"]) == (True, 128, False, 256)
    assert second["pass"]["passed_runs"] < second["pass"]["runs"] == 15
    assert [finding["cause"] for finding in document["findings"]] == ["ll-combine-row-corrupted"]
    assert "issues 700" in document["findings"][0]["source"]
    assert document["kept"] == {"tuned": [], "references": 0}
    told = ready.json("report", document["run"]["name"])
    assert (told["verdict"], told["results"]["tests"]) == ("failed", document["tests"])


def test_on_blackwell_so_many_calls_are_checked(ready: Engine, tmp_path: Path) -> None:
    with capability(ready, "10.0", "n002"):  # one node of two: all go by it
        document = ready.json("test", "--kind=low-latency", "--nodes=2", FOUR, "--save-as-reference")
    assert outcome(document)[:2] == ("passed", OK), document["outcome"]
    assert "checked 512 combine calls at 256 tokens, in 8 of 8 runs" in outcome(document)[2]
    assert [tested["pass"] for tested in document["tests"]] == [
        {"number": 1, "tokens": 128, "runs": 1, "passed_runs": 1, "checked_calls": 64},
        {"number": 2, "tokens": 256, "runs": 8, "passed_runs": 8, "checked_calls": 512},
    ]
    assert all(len(tested["ranks"]) == 8 and tested["low_latency"]["combine_us"] for tested in document["tests"])
    assert {each["test"] for each in document["verdicts"] if each["kind"] == "figure"} == {
        "low-latency",
        "low-latency, 256 tokens",
    }
    assert document["kept"]["references"] == 5, "those of 128 tokens"
    told = ready.json("report", document["run"]["name"], f"--html={tmp_path}/report.html")
    assert "checked 512 combine calls at 256 tokens" in told["why"]
    assert "512 combine calls at 256 tokens, in 8 of 8 runs" in (tmp_path / "report.html").read_text()


def test_a_plan_without_the_fence_is_refused_on_blackwell(ready: Engine, tmp_path: Path) -> None:
    """The lock without its substitution: fine where GPUs are older, refused with the upstream issue where they are not."""
    document = tomlkit.parse(ready.lock.read_text(encoding="utf-8"))
    deepep = document["source"]["deepep"]
    changes = deepep["substitute"]
    deepep["substitute"] = [change for change in changes if change["file"] != "csrc/kernels/internode_ll.cu"]
    assert len(deepep["substitute"]) == len(changes) - 1
    lock = tmp_path / "deepep.lock.toml"
    lock.write_text(tomlkit.dumps(document), encoding="utf-8")
    without = replace(ready, lock=lock)
    assert without.run("plan").code == OK
    with capability(ready, "10.0", *NODES):
        refused = without.run("plan")
        assert (refused.code, "issues 700 and 621" in refused.err) == (TROUBLE, True), refused.text
        assert ready.run("plan").code == OK


def test_on_hopper_it_runs_once(ready: Engine) -> None:
    with fault(ready, WRONG_ROW="700"):
        document = ready.json("test", "--kind=low-latency", FOUR)
    assert outcome(document)[:2] == ("passed", OK), document["outcome"]
    assert [tested["pass"]["tokens"] for tested in document["tests"]] == [128]


def test_a_user_on_blackwell_by_sbatch(ready: Engine) -> None:
    file = "/shared/deepep/sbatch/low-latency-test.sbatch --num-processes 4 --num-experts 8"
    with capability(ready, "10.0", *NODES):
        done = ready.lab.ssh(
            "login1", f"cd /shared && bash -lc 'STANDIN_WRONG_ROW=700 sbatch --parsable --wait --output=x.out {file}'"
        )
        asked = ready.lab.ssh(
            "login1", f"cd /shared && bash -lc 'sbatch --wait --output=y.out {file} --num-tokens 600'"
        )
    assert done.returncode == 1, "wrong results"
    assert (
        "deepep: pass 2 of 2 on node 0: 256 tokens, run 1 of 15, 32 combine calls to check"
        in (ready.lab.shared / "x.out").read_text()
    )
    said = (ready.lab.shared / "y.out").read_text()
    assert (asked.returncode, "tokens 600 -> 64" in said, "deepep: pass" in said) == (0, True, False), said


def test_submitted_by_hand(ready: Engine) -> None:
    sbatch = (
        "sbatch --parsable --wait --output=bad.out /shared/deepep/sbatch/low-latency-test.sbatch "
        "--num-processes 2 --num-experts 8"
    )
    done = ready.lab.ssh("login1", f"cd /shared && STANDIN_CORRUPT=1 bash -lc '{sbatch}'")
    assert done.returncode != 0, "a test that computes wrong fails"
    folder = ready.lab.shared / f"deepep-low-latency-{done.stdout.split()[0]}"
    files = run_folder.of_folder(folder)
    assert run_folder.of_files(folder.name, files).code == 1
    assert f"deepep: logs and counters: /shared/{folder.name}" in (ready.lab.shared / "bad.out").read_text()
    assert (folder / "job.log").readlink() == Path("/shared/bad.out")


@contextmanager
def slurm_with(ready: Engine, *settings: str) -> Iterator[Path]:
    """Slurm with further lines in its slurm.conf and the health script on its nodes; yields a file of the prefix that the
    script asks for."""
    config, mark = "/etc/slurm/slurm.conf", "# of a test"
    lines = "".join(f"{setting} {mark}\\n" for setting in settings)
    wanted = [setting.partition("=")[2] for setting in settings]
    manifest = ready.on_disk / "current" / "manifest.json"

    def everywhere(command: str) -> None:
        for host in (*NODES, "login1"):
            done = ready.lab.ssh(host, command)
            assert done.returncode == 0, done.stderr

    def known() -> bool:
        shown = ready.lab.ssh("login1", "scontrol reconfigure; scontrol show config").stdout
        return all(value in shown for value in wanted)

    everywhere(f"install -m 755 /shared/deepep/current/slurm/deepep-health.sh /etc/slurm/; printf '{lines}' >>{config}")
    try:
        wait_until(known, "Slurm knows the settings")
        yield manifest
    finally:
        if not manifest.exists():
            manifest.with_suffix(".away").rename(manifest)
        everywhere(f"sed -i '/{mark}/d' {config}; rm -f /etc/slurm/deepep-health.sh")
        ready.lab.ssh("login1", "scontrol reconfigure")
        for node in NODES:
            ready.lab.ssh("login1", f"scontrol update nodename={node} state=resume")
            wait_until(lambda node=node: state_of(ready, node) == "idle", f"{node} is back")


def state_of(ready: Engine, node: str) -> str:
    """Return the state of a node in Slurm's words."""
    return ready.lab.ssh("login1", f"sinfo -h -n {node} -o %T").stdout.strip()


def test_the_health_script_is_taken_as_slurms_prolog(ready: Engine) -> None:
    """Under the real slurmd: a job runs where the node is fit; where it is not, the job does not and the node is drained."""
    job = "timeout 60 srun -N1 -w n001 hostname"
    with slurm_with(ready, "Prolog=/etc/slurm/deepep-health.sh") as manifest:
        assert ready.lab.ssh("login1", job).returncode == 0
        wait_until(lambda: state_of(ready, "n001") == "idle", "the job has ended")
        manifest.rename(manifest.with_suffix(".away"))
        assert ready.lab.ssh("login1", job).returncode != 0
        assert state_of(ready, "n001").startswith("drain")
        log = ready.lab.ssh("n001", "cat /var/log/slurm/slurmd.log").stdout
        assert "deepep: prefix-access: /shared/deepep does not answer" in log


def test_the_health_script_drains_idle_nodes_as_the_page_says(ready: Engine) -> None:
    """The program of docs/tests.md, word for word, under the real slurmd."""
    page = (ROOT / "docs" / "tests.md").read_text(encoding="utf-8")
    program = page[page.index("    #!/bin/sh\n") :].partition("\n\n")[0].replace("\n    ", "\n").strip()
    for node in NODES:
        write = f"cat >/etc/slurm/health-check <<'END'\n{program}\nEND\nchmod 755 /etc/slurm/health-check"
        assert ready.lab.ssh(node, write).returncode == 0
    settings = ("HealthCheckProgram=/etc/slurm/health-check", "HealthCheckInterval=1", "HealthCheckNodeState=IDLE")
    with slurm_with(ready, *settings) as manifest:
        assert state_of(ready, "n001") == "idle"
        manifest.rename(manifest.with_suffix(".away"))
        wait_until(lambda: state_of(ready, "n001").startswith("drain"), "the node is drained")
        reason = ready.lab.ssh("login1", "sinfo -h -n n001 -o %E").stdout
        assert reason.startswith("deepep: prefix-access: /shared/deepep does not answer")


@pytest.mark.parametrize("kind", ["nccl", "pairs"])
def test_our_own_kinds_pass_on_the_stand_ins(kind: str, ready: Engine) -> None:
    """Messages go over TCP, of a size that the stand-in's GPUs hold; the counters of the network cards grow."""
    more = ["--args=--cross-rail"] if kind == "pairs" else []
    document = ready.json("test", f"--kind={kind}", *more)
    assert (document["exit"], outcome(document)[0]) == (OK, "passed"), document["outcome"]
    assert {nic["host"] for nic in document["traffic"]} == {*NODES}


@pytest.mark.parametrize("kind", ["example-prefill", "example-decode"])
def test_an_example_says_in_one_line_that_it_cannot_run_on_the_stand_ins(kind: str, ready: Engine) -> None:
    ended = ready.run("test", f"--kind={kind}")
    assert ended.code == VERDICT
    assert "the examples need PyTorch itself and GPUs: torch 2.10.0+standin stands in for it" in ended.text


def test_what_cannot_be_asked(ready: Engine) -> None:
    refused = ready.run("test", "--kind=ep")
    assert (refused.code, "DeepEP V1, which has no such test" in refused.text) == (TROUBLE, True)
    dry = ready.run("test", "--kind=pairs", "--dry-run")
    assert (dry.code, "would run sbatch --nodes=2" in dry.out) == (OK, True)
