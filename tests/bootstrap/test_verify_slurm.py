"""The batch files and `testing.submit` under the lab's real Slurm: two nodes, exit codes, waiting, refusal,
interrupt."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from deepep_bootstrap.core.errors import OK, TROUBLE, VERDICT
from deepep_bootstrap.inventory.survey import read_tree
from deepep_bootstrap.prefix import gc, modulefiles
from deepep_bootstrap.prefix.generations import PrefixHandle
from deepep_bootstrap.prefix.offer import SiteSettings, StackRecord
from deepep_bootstrap.prefix.test_kinds import KINDS
from deepep_bootstrap.remote.fleet import ConnectionPool, Options
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.testing import slurm_run
from tests.support import modules as support

if TYPE_CHECKING:
    from tests.support.lab import LiveLab

pytest_plugins = ["tests.support.lab"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]

PREFIX = "/shared/verify-slurm"
RECIPES = read_tree(support.REPOSITORY / "recipes")
# What upstream's tests do at the start: meet at MASTER_ADDR:MASTER_PORT, WORLD_SIZE nodes with RANK each; then what the
# arguments say.
SCRIPT = """\
import argparse, json, os, socket, sys, time
import utils
parser = argparse.ArgumentParser()
parser.add_argument("--fail-on", type=int, default=-1)
parser.add_argument("--sleep", type=float, default=0)
parser.add_argument("--words", nargs="*")
parser.add_argument("--num-tokens", type=int)
args = parser.parse_args()
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
names = [socket.gethostname()]
if rank == 0:
    server = socket.create_server(("", address[1]))
    for _ in range(size - 1):
        peer, _ = server.accept()
        names.append(peer.makefile().readline().strip())
else:
    for _ in range(200):
        try:
            peer = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.1)
    peer.sendall((names[0] + "\\n").encode())
met = {"nodes": sorted(names), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "")}
met.update({"words": args.words, "stack": os.environ.get("DEEPEP_STACK")})
if rank == 0:
    print("MET " + json.dumps(met), flush=True)
if args.sleep and rank != args.fail_on:
    time.sleep(args.sleep)
    print("slept to the end", flush=True)
sys.exit(7 if rank == args.fail_on else 0)
"""


def make_prefix(lab: LiveLab, record: StackRecord) -> None:
    root = Path(str(lab.shared)) / PREFIX.removeprefix("/shared/")
    offer = support.offer(PREFIX, record)
    support.write(root / "generations" / "1", modulefiles.render_offer(offer, support.templates()))
    for name, target in {
        "current": "generations/1",
        "modulefiles": "current/modulefiles",
        "sbatch": "current/sbatch",
    }.items():
        (root / name).unlink(missing_ok=True)
        (root / name).symlink_to(target)
    tests = root / "store" / record.deepep / "tests"
    tests.mkdir(parents=True, exist_ok=True)
    (tests / "utils.py").write_text("")
    for run in filter(None, (kind.v1 for kind in KINDS.values() if not kind.ours)):
        (tests / run.script).write_text(SCRIPT)
    python = root / "store" / record.python / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.unlink(missing_ok=True)
    python.symlink_to("/usr/bin/python3")


class Cluster:
    """The lab with a stack on its shared prefix, and the transport to its login host."""

    def __init__(self, lab: LiveLab) -> None:
        self.lab = lab
        self.record = support.record(PREFIX, site=SiteSettings(gres="gpu:8"))
        make_prefix(lab, self.record)
        self.host = Host("login1", role="login")
        self.fleet = ConnectionPool((self.host,), Options(ssh_config=lab.env["DEEPEP_SSH_CONFIG"]))
        self.lines: list[str] = []

    def request(self, kind: str, *args: str, start_limit: int = 60, time_limit: int = 300) -> slurm_run.TestRequest:
        found = KINDS[kind]
        return slurm_run.TestRequest(
            found, self.record, slurm_run.run_name(kind), found.nodes, time_limit, args=args, start_limit=start_limit
        )

    def run(self, kind: str, *args: str, start_limit: int = 60, time_limit: int = 300) -> slurm_run.TestRunResult:
        self.lines.clear()
        request = self.request(kind, *args, start_limit=start_limit, time_limit=time_limit)
        return slurm_run.submit(self.fleet, self.host, request, RECIPES, on_line=self.lines.append)

    def met(self) -> dict:
        (line,) = [line for line in self.lines if line.startswith("MET ")]
        return json.loads(line.removeprefix("MET "))

    def queue(self) -> str:
        return self.lab.ssh("login1", "squeue -h -o '%j %T'").stdout

    def submit(self, words: str) -> str:
        done = self.lab.ssh("login1", words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def cluster(lab: LiveLab) -> Iterator[Cluster]:
    lab.reset()  # tests before may have changed its nodes
    made = Cluster(lab)
    yield made
    made.fleet.close()
    lab.ssh("login1", "scancel --user=root; while squeue -h | grep -q .; do sleep 0.2; done")


def test_two_nodes_meet(cluster: Cluster) -> None:
    result = cluster.run("internode", "--words", "a b", "c")
    outcome = result.outcome
    assert (outcome.state, outcome.code) == ("done", OK), cluster.lines
    assert cluster.met() == {"nodes": ["n001", "n002"], "gpus": "0,1,2,3,4,5,6,7", "words": ["a b", "c"], "stack": "v1"}
    assert f"deepep: environment: module {cluster.record.module}" in cluster.lines
    assert cluster.lines[-1] == "deepep: test_internode.py ended with exit code 0"
    assert "on n[001-002] passed" in outcome.detail
    assert outcome.log == f"{result.place}/job.log"
    assert result.place.startswith(f"{PREFIX}/logs/tests/2")


@pytest.mark.parametrize("kind", ["intranode", "low-latency"])
def test_one_node(kind: str, cluster: Cluster) -> None:
    assert cluster.run(kind).outcome.code == OK, cluster.lines
    assert len(cluster.met()["nodes"]) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_one_failing_node_ends_the_job_with_its_code(rank: int, cluster: Cluster) -> None:
    outcome = cluster.run("internode", "--fail-on", str(rank), "--sleep", "120").outcome
    assert (outcome.state, outcome.code) == ("failed", VERDICT)
    assert "exit code 7" in outcome.detail
    assert "slept to the end" not in "".join(cluster.lines), "the other node is not waited for"


def test_a_job_that_never_starts(cluster: Cluster) -> None:
    cluster.submit("sbatch --parsable --nodes=2 --exclusive --output=/dev/null --wrap='sleep 600'")
    outcome = cluster.run("internode", start_limit=2).outcome
    assert (outcome.state, outcome.code) == ("failed", TROUBLE)
    assert "did not start in 2 s" in outcome.detail
    assert "Resources" in outcome.detail or "Priority" in outcome.detail
    assert "deepep-internode" not in cluster.queue()


def test_what_slurm_would_refuse_is_known_without_a_job(cluster: Cluster) -> None:
    request = cluster.request("internode")
    assert slurm_run.never_runs(cluster.fleet, cluster.host, request) == ""
    assert "Node count" in slurm_run.never_runs(cluster.fleet, cluster.host, replace(request, nodes=5))
    cluster.lab.ssh("login1", "scontrol update nodename=n002 state=drain reason=test")
    assert slurm_run.never_runs(cluster.fleet, cluster.host, request) == "", "it would wait"
    assert cluster.queue() == ""


def test_a_job_slurm_refuses(cluster: Cluster) -> None:
    text = Path(str(cluster.lab.shared), PREFIX.removeprefix("/shared/"), "sbatch", "v1", "internode-test.sbatch")
    text.write_text(text.read_text().replace("gpu:8", "gpu:9"))
    result = cluster.run("internode")
    outcome = result.outcome
    assert (result.state, outcome.state, outcome.code) == (slurm_run.REFUSED, "failed", TROUBLE)
    assert outcome.detail.startswith("sbatch: ")
    assert "not available" in outcome.detail


def test_an_interrupt_takes_the_job_along(cluster: Cluster) -> None:
    started = threading.Event()
    ended: list[BaseException] = []

    def follow() -> None:
        try:
            request = cluster.request("internode", "--sleep", "300")
            slurm_run.submit(
                cluster.fleet,
                cluster.host,
                request,
                RECIPES,
                on_line=lambda line: started.set() if "MET" in line else None,
            )
        except BaseException as error:  # the transport is closed under it: what it raises is not the point here
            ended.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    assert started.wait(60)
    cluster.fleet.close()
    thread.join(30)
    assert not thread.is_alive()
    for _ in range(100):
        if not cluster.queue().strip():
            break
        time.sleep(0.2)
    assert cluster.queue().strip() == ""


@pytest.mark.parametrize(
    ("how", "words"),
    {
        "a login shell": "bash -lc 'cd /shared && sbatch --parsable FILE'",
        "a shell over SSH": "cd /shared && sbatch --parsable FILE",
        "nothing exported": "cd /shared && sbatch --parsable --export=NONE FILE",
        "another folder's copy": "cp FILE /shared/copy.sbatch && cd /shared && sbatch --parsable copy.sbatch",
    }.items(),
)
def test_submitted_by_hand(how: str, words: str, cluster: Cluster) -> None:
    job = cluster.submit(words.replace("FILE", f"{PREFIX}/sbatch/internode-test.sbatch"))
    output = Path(str(cluster.lab.shared), f"deepep-internode-{job}.out")
    for _ in range(300):
        if output.exists() and "ended with exit code" in output.read_text():
            break
        time.sleep(0.1)
    text = output.read_text()
    assert f"deepep: environment: module {cluster.record.module}\n" in text, how
    assert '"nodes": ["n001", "n002"]' in text, text
    assert "ended with exit code 0" in text


def test_what_jobs_use_is_seen_on_their_nodes_and_waiting_ones_are_named(cluster: Cluster) -> None:
    script = f"{PREFIX}/sbatch/internode-test.sbatch"
    running = cluster.submit(f"cd /shared && sbatch --parsable {script} --sleep 600")
    waiting = cluster.submit(f"cd /shared && sbatch --parsable --hold {script}")
    log = Path(str(cluster.lab.shared), f"deepep-internode-{running}.out")
    while not log.exists() or "MET " not in log.read_text():
        time.sleep(0.1)
    node = Host("n002")
    names = (cluster.record.deepep, cluster.record.gdrcopy, "generations/1", "generations/10")
    with closing(
        ConnectionPool((cluster.host, node), Options(ssh_config=cluster.lab.env["DEEPEP_SSH_CONFIG"]))
    ) as fleet:
        found = gc.find_holders(fleet, PrefixHandle(cluster.host, PREFIX, RECIPES), (cluster.host, node), names)
    assert {cluster.record.deepep, "generations/1"} <= found.by.keys()
    assert "generations/10" not in found.by
    assert "on n002" in found.by[cluster.record.deepep]
    assert (found.waiting, found.partly, found.unasked) == ((f"{waiting} of root",), (), ())
