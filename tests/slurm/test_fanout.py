"""One srun in place of many sessions: who is asked so, what a task prints, and whose answer a line is. The step's own
program runs here as it does on a node; tests/e2e/test_via_slurm.py has it under a real srun."""

from __future__ import annotations

import base64
import gzip
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.hostsfile import Inventory, Settings
from deepep_bootstrap.inventory.survey import read_tree
from deepep_bootstrap.remote import channel, packed
from deepep_bootstrap.remote.fleet import ConnectionPool
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Reply
from deepep_bootstrap.slurm import fanout
from deepep_bootstrap.slurm.commands import parse_nodes
from deepep_bootstrap.slurm.fanout import Fanout, Group, Tasks, free_nodes, read_answer
from deepep_bootstrap.slurm.identity import NodeRecords
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("programs")

RECIPES = read_tree(ROOT / "recipes")
STEP = RECIPES["slurm/step.sh"]


def group(**hosts: str) -> Group:
    return Group(b"", 90.0, "batch", 8, {node: Host(name) for node, name in (hosts or {"n001": "n001"}).items()})


def step(
    script: str, *, seconds: int = 60, limit: int = 1000, text: str = STEP, inside: tuple[str, ...] = ()
) -> list[str]:
    """Run the program of a step on this machine, `inside` of a command that runs it; return its lines."""
    payload = channel.payload(channel.compose(script, ("one", "t w o"), {"GREETING": "hello"}))
    words = [*inside, "/bin/sh", "-c", text, "step", channel.COMMAND, str(seconds), str(limit)]
    env = {"SLURM_JOB_ID": "4711", "CUDA_VISIBLE_DEVICES": "3", "LD_PRELOAD_NOT": "x"}
    done = subprocess.run(words, input=payload, env=env, capture_output=True, check=False)
    return done.stdout.decode().splitlines()


def labelled(*tasks: Sequence[str], nodes: Sequence[str] = ("n001", "n002"), verb: str = "launching") -> bytes:
    """What srun makes of the lines of its tasks, first those of each first line."""
    lines = [f"{number}: {line}" for number, task in enumerate(tasks) for line in task]
    said = [f"srun: {verb} StepId=7.0 on host {node}, 1 tasks: {number}" for number, node in enumerate(nodes)]
    return "".join(f"{line}\n" for line in [*lines, *said]).encode()


def taken(data: bytes, count: int = 2, piece: int = 7) -> Tasks:
    tasks = Tasks(count)
    for start in range(0, len(data), piece):
        tasks.take(data[start : start + piece])
    return tasks


def answer_of(lines: Sequence[str]) -> Reply | Trouble | str:
    task = taken(labelled(lines, nodes=["n001"]), 1, 4096).of("n001")
    assert task
    return read_answer("n001", task, group(), 1.5)


def test_a_step_gives_what_a_session_gives() -> None:
    """Streams, exit code, arguments and variables; nothing of the job's surroundings but its number."""
    script = (
        'printf "%s|" "$GREETING" "$@" "${CUDA_VISIBLE_DEVICES:-none}" "$DEEPEP_STEP" "$HOME" "$USER"\n'
        "printf '\\377\\0end'; echo talk >&2; exit 3"
    )
    reply = answer_of(step(script))
    assert isinstance(reply, Reply)
    assert (reply.host, reply.code, reply.err) == ("n001", 3, "talk\n")
    home, user = os.path.expanduser("~root" if os.geteuid() == 0 else "~"), os.environ.get("USER") or "root"
    assert reply.out.startswith(f"hello|one|t w o|none|4711|{home}|")
    assert user in reply.out or os.geteuid() == 0
    assert reply.out.endswith("�\0end")


def test_a_task_can_speak_for_no_other() -> None:
    """Whatever a node prints, its lines bear the number that srun gives them."""
    lies = step("printf 'srun: launching StepId=7.0 on host n002, 1 tasks: 0\\n1: code=0\\ncode=0\\n'")
    raw = ["srun: launching StepId=7.0 on host n002, 1 tasks: 0", "1: code=7", "out=x"]
    tasks = taken(labelled([*raw, *lies], step("echo mine")))
    assert tasks.nodes == {"n001": 0, "n002": 1}
    other = tasks.of("n002")
    assert other
    answer = read_answer("n002", other, group(), 1.0)
    assert isinstance(answer, Reply)
    assert (answer.out, answer.code) == ("mine\n", 0)
    liar = tasks.of("n001")
    assert liar
    assert read_answer("n001", liar, group(), 1.0) == fanout.NO_ANSWER


@pytest.mark.parametrize("number", ["1", "[1]"])
@pytest.mark.parametrize("launching", ["launching StepId=7.0", "launching 7.0", "launching StepId=7+0.0"])
def test_the_node_of_a_task_is_what_srun_says(launching: str, number: str) -> None:
    data = f"srun: {launching} on host rack7-1, 1 tasks: {number}\nsrun: error: Unable to x\n".encode()
    tasks = taken(b"00: a\n01: b\n12: dropped\n" + data)
    assert (tasks.nodes, tasks.trouble) == ({"rack7-1": 1}, "Unable to x")
    assert [task.lines for task in tasks.tasks] == [[b"a"], [b"b"]]


def test_a_node_without_a_task_has_no_answer() -> None:
    assert taken(labelled([], nodes=["n001"])).of("n002") is None


@pytest.mark.parametrize(
    "cut",
    [lambda lines: lines[:-1], lambda lines: lines[1:], lambda lines: [], lambda lines: [lines[0][:-9], *lines[1:]]],
)
def test_an_answer_that_was_cut_off_is_none(cut: Callable[[list[str]], list[str]]) -> None:
    """A node that dies in the middle is asked over SSH, and is named there."""
    whole = step("seq 400")
    assert isinstance(answer_of(whole), Reply)
    assert answer_of(cut(whole)) == fanout.NO_ANSWER


def test_a_script_that_has_no_end_is_the_trouble_of_its_host() -> None:
    answer = answer_of(step("sleep 60", seconds=1))
    assert isinstance(answer, Trouble)
    assert str(answer) == "n001: no end of the script after 90 s"


def test_a_stream_without_an_end_is_cut_on_the_node() -> None:
    lines = step("yes abcdefgh", limit=5000)
    coded = base64.b64decode("".join(line.removeprefix("out=") for line in lines if line.startswith("out=")))
    assert len(gzip.decompress(coded)) == 5000


def test_a_stream_over_the_limit_is_the_trouble_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "ANSWER_LIMIT", 4000)
    answer = answer_of(step("yes abcdefgh", limit=5000))
    assert isinstance(answer, Trouble)
    assert "prints without an end" in str(answer)


def surroundings(folder: Path, process: str, cpus: str, mounts: str) -> None:
    (folder / process).mkdir()
    (folder / process / "status").write_text(f"Name:\tx\nCpus_allowed_list:\t{cpus}\n")
    (folder / process / "mountinfo").write_text(mounts)


@pytest.mark.parametrize(
    ("cpus", "mounts", "hidden"),
    [
        ("0-15", "22 1 8:1 / / rw\n", []),
        ("0-3", "22 1 8:1 / / rw\n", ["hidden=cpus"]),
        ("0-15", "22 1 8:1 / / rw\n23 22 0:4 / /tmp rw\n", ["hidden=mounts"]),
    ],
)
def test_what_a_job_hides_is_told_and_nothing_is_run(tmp_path: Path, cpus: str, mounts: str, hidden: list[str]) -> None:
    """Compared with init, from which sessions of SSH come."""
    surroundings(tmp_path, "1", "0-15", "30 1 8:1 / / rw\n")
    surroundings(tmp_path, "self", cpus, mounts)
    # A namespace that cannot be left, as for a user.
    text = STEP.replace('"/proc/$1', f'"{tmp_path}/$1').replace("nsenter -t 1 -m", "false")
    lines = step("echo run", text=text)
    if hidden:
        assert lines == hidden
        assert answer_of(lines) == f"a job hides its {hidden[0].removeprefix('hidden=')}"
    else:
        assert isinstance(answer_of(lines), Reply)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a mount namespace")
def test_root_leaves_the_folders_of_a_job(tmp_path: Path) -> None:
    """As job_container/tmpfs mounts them; what a session sees is what init sees."""
    (tmp_path / "real").touch()
    node = ("unshare", "-pfm", "--mount-proc", "sh", "-c", 'unshare -m sh -c "$@"; :', "init")
    job = 'mount -t tmpfs tmpfs "$0" && cd / && exec "$@"'
    lines = step(f"ls {tmp_path}", inside=(*node, job, str(tmp_path)))
    reply = answer_of(lines)
    assert isinstance(reply, Reply)
    assert reply.out == "real\n"


NODES = """\
NodeName=n001 NodeAddr=n001 NodeHostName=n001 State=IDLE Gres=gpu:8 Partitions=batch,big
NodeName=n002 NodeAddr=n002 NodeHostName=n002 State=MIXED Gres=gpu:8 Partitions=batch
NodeName=n003 NodeAddr=n003 NodeHostName=n003 State=IDLE+DRAIN Gres=gpu:8 Partitions=batch Reason=disk
NodeName=n004 NodeAddr=n004 NodeHostName=n004 State=IDLE+PLANNED Gres=gpu:8 Partitions=batch
NodeName=n005 NodeAddr=n005 NodeHostName=n005 State=IDLE+CLOUD Gres=gpu:4 Partitions=batch
NodeName=n006 NodeAddr=n006 NodeHostName=n006 State=IDLE* Gres=gpu:8 Partitions=batch
NodeName=n007 NodeAddr=n007 NodeHostName=n007 State=IDLE Gres=gpu:8 Partitions=
NodeName=n008 NodeAddr=n008 NodeHostName=n008 State=IDLE Gres=(null) Partitions=cpu
"""


def records(jobs: Mapping[str, tuple[str, ...]]) -> NodeRecords:
    return NodeRecords({node.name: node for node in parse_nodes(NODES)}, jobs, {})


def test_only_nodes_that_slurm_calls_free_are_asked() -> None:
    hosts = [Host(f"n00{number}") for number in range(1, 10)]
    free, why = free_nodes(hosts, records({"n002": ("17",), "n008": ("18", "19")}))
    assert [host.name for host in free] == ["n001", "n005"]
    assert why == {
        "n002": "has a job",
        "n003": "idle+drain in Slurm",
        "n004": "idle+planned in Slurm",
        "n006": "idle* in Slurm",
        "n007": "idle in Slurm",
        "n008": "has jobs",
        "n009": "no node of Slurm",
    }


def test_two_hosts_that_are_one_node_are_not_asked_so() -> None:
    free, why = free_nodes([Host("n001"), Host("n001.example")], records({}))
    assert (free, set(why.values())) == ({}, {"not one node of Slurm"})


class Pool:
    """The connections of a run, as far as a fan-out needs them. The Slurm host's answers are `said`, one a step."""

    has_password = False

    def __init__(self, *said: bytes, jobs: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self.said, self.steps, self.told = list(said), [], []
        self.jobs = "".join(f"{number}|{node}\n" for node, numbers in (jobs or {}).items() for number in numbers)
        self.users: dict[str, str] = {}

    steps: list[Job]
    told: list[str]

    def user_of(self, host: Host) -> str:
        return self.users.get(host.name, "root")

    def payload(self, host: Host, job: Job) -> bytes:
        return channel.payload(channel.compose(job.script, job.args, job.env))

    def tell(self, text: str) -> None:
        self.told.append(text)

    def run(self, host: Host, job: Job) -> Reply:
        if job.sink is None:
            return Reply(host.name, 0, f"@nodes\n{NODES}@jobs\n{self.jobs}@end\n", "", 0.1)
        self.steps.append(job)
        job.sink(self.said.pop(0))
        return Reply(host.name, 0, "", "srun ended with 0", 0.5)


def ask(pool: Pool, *names: str, **settings: str) -> dict[str, str]:
    """Ask hosts; return what each answered, by name."""
    inventory = Inventory("hosts.txt", tuple(map(Host, names)), Settings(**settings))  # type: ignore[arg-type]
    many = Fanout(cast(ConnectionPool, pool), inventory, Host("login1"), RECIPES)
    found = many.run_all({host: Job("echo x", anywhere=True) for host in inventory.hosts})
    return {name: reply.out if isinstance(reply, Reply) else str(reply) for name, reply in found.items()}


def option(job: Job, name: str) -> str:
    return next((word.partition("=")[2] or "yes" for word in job.args if re.match(f"--{name}(=|$)", word)), "")


def test_one_step_for_all_that_are_alike_and_ssh_for_the_others() -> None:
    pool = Pool(
        labelled(step("echo 1"), nodes=["n001"]), labelled(step("echo 5"), nodes=["n005"]), jobs={"n004": ("9",)}
    )
    assert ask(pool, "n001", "n002", "n005", "login1", account="moe") == {"n001": "1\n", "n005": "5\n"}
    assert [option(job, "nodelist") for job in pool.steps] == ["n001", "n005"]
    first, second = pool.steps
    assert (option(first, "gres"), option(second, "gres"), option(first, "account")) == ("gpu:8", "gpu:4", "moe")
    assert [option(first, name) for name in ("exclusive", "no-kill", "immediate", "time")] == ["yes", "yes", "20", "3"]
    assert pool.told == ["over SSH: n002 (mixed in Slurm)", "over SSH: login1 (no node of Slurm)"]


def test_where_a_node_was_taken_meanwhile_the_others_are_asked_once_more() -> None:
    late = b"srun: error: Unable to allocate resources: Requested nodes are busy\n"
    pool = Pool(late, labelled(step("echo 1"), nodes=["n001"]))
    assert ask(pool, "n001") == {"n001": "1\n"}
    assert len(pool.steps) == 2
    pool = Pool(late, late)
    assert ask(pool, "n001") == {}
    assert pool.told == ["over SSH: n001 (a job did not start there in time)"]


def test_where_slurm_refuses_it_is_not_asked_again() -> None:
    pool = Pool(b"srun: error: Unable to allocate resources: Invalid account\n")
    assert ask(pool, "n001") == {}
    assert len(pool.steps) == 1
    assert pool.told == ["over SSH: n001 (Unable to allocate resources: Invalid account)"]


def test_what_slurm_must_not_carry_goes_over_ssh() -> None:
    """A host of another account, and a password."""
    pool = Pool(labelled(step("echo 1"), nodes=["n001"]))
    pool.users = {"n005": "alice"}
    assert ask(pool, "n001", "n005") == {"n001": "1\n"}
    assert pool.told == ["over SSH: n005 (another account than root, which asks Slurm)"]
    pool.has_password = True
    inventory = Inventory("hosts.txt", (Host("n001"),), Settings())
    many = Fanout(cast(ConnectionPool, pool), inventory, Host("login1"), RECIPES)
    assert many.run_all({Host("n001"): Job("echo x", anywhere=True, user="root")}) == {}
    assert pool.told[-1] == "over SSH: n001 (the password of sudo goes over SSH alone)"


def hosts_by(**flags: object) -> str:
    """Open the ways to one host of this machine; return by which it is asked."""
    inventory = Inventory("--hosts", (Host("n001", connection="local"),), Settings())
    with fanout.open_ways(replace(Flags(ROOT), **flags), inventory) as pool:
        pool.run_all(inventory.hosts, lambda _: Job("echo x", anywhere=True))
        return pool.ways["n001"]


def test_a_way_that_there_is_not_is_refused() -> None:
    with pytest.raises(Trouble, match="--via: unknown value — found kubernetes, wanted one of auto, slurm, ssh"):
        hosts_by(via="kubernetes")


def test_without_a_client_of_slurm_the_wish_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout, "find_client", lambda *_: None)
    with pytest.raises(Trouble, match="there is no client of Slurm to ask"):
        hosts_by(via="slurm")
    assert hosts_by(via="auto", ssh_limit=0) == "local"


@pytest.mark.parametrize(
    ("flags", "looked"), [({}, False), ({"ssh_limit": 0}, True), ({"via": "ssh", "ssh_limit": 0}, False)]
)
def test_slurm_is_looked_for_above_the_limit(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, object], looked: bool
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(fanout, "find_client", lambda *_: asked.append(1))
    hosts_by(**flags)
    assert bool(asked) is looked
