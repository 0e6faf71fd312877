"""One test without Slurm: the same file on each host over its own connection, one watched script a host."""

from __future__ import annotations

import functools
import queue
import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from deepep_bootstrap.core.errors import OK, TROUBLE, VERDICT, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.core.recipes import compose
from deepep_bootstrap.core.text import duration
from deepep_bootstrap.inventory import nics
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import LOG_LIMIT, BackgroundJob, Job, Transport
from deepep_bootstrap.remote.script import OnLine
from deepep_bootstrap.testing.slurm_run import ENDED, HUNG, LOST, LastOutput, TestRequest, TestRunResult

HERE = ("lib.sh", "prefix/lib/share.sh", "test/lib/place.sh", "test/here.sh")
FIRST_PORT, PORTS = 20000, 12768
"""As in the sbatch files: below 32768, where Linux starts to give out ports to outgoing connections."""


class _Node(Struct, frozen=True):
    """The end of one node: its exit code, None where somebody ended it, and the trouble of its connection."""

    code: int | None = None
    trouble: Trouble | None = None


def capability(hosts: Sequence[Host], facts: Mapping[str, Facts]) -> str:
    """Return the largest compute capability of the hosts' GPUs, by which all nodes of a test go; "" where none
    is known."""
    known = [
        gpu.capability for host in hosts for gpu in facts[host.name].gpus if re.fullmatch(r"\d+\.\d+", gpu.capability)
    ]
    return max(known, key=lambda each: tuple(map(int, each.split("."))), default="")


def meeting_address(hosts: Sequence[Host], facts: Mapping[str, Facts]) -> str:
    """Return where the nodes meet: the first host's address on the network that leads to the others, else the one it
    is reached at, else its name."""
    first = hosts[0].name
    machines = {host.name: facts[host.name].prepared for host in hosts}
    interface = nics.bootstrap_interfaces(machines).get(first, "")
    here = machines[first]
    on_it = [
        address.cidr.partition("/")[0]
        for address in here.addresses
        if address.interface == interface and ":" not in address.cidr
    ]
    return (on_it or [nics.address_of(here)])[0] or first


def run_over_ssh(
    transport: Transport,
    hosts: Sequence[Host],
    request: TestRequest,
    recipes: Mapping[str, str],
    *,
    address: str = "",
    on_line: OnLine | None = None,
) -> TestRunResult:
    """Run a test on `hosts`, which meet at `address`; the first one's index is 0. Its output goes to `on_line` as it
    comes.

    A node that fails ends the others, and so does the end of the time, or of this program: each script is watched.
    """
    runs = _NodeRuns(transport, hosts, request, on_line)
    began = time.monotonic()
    try:
        nodes, state = runs.work(compose(recipes, *HERE), address)
        last_output = runs.last_output() if state == HUNG else ()
    finally:
        runs.close()
    names = fold(host.name for host in hosts)
    ending, code = _result_of(hosts, nodes, (state, request.time_limit))
    where = f"{names}, without Slurm"
    detail = f"{where}: {ending}" if code else f"passed on {where}"
    log = f"{runs.place}/job.log" if runs.place else ""
    outcome = Outcome(
        f"{request.kind.name} test", names, "failed" if code else "done", detail, time.monotonic() - began, code, log
    )
    printed = "\n".join([*runs.lines, ""])
    return TestRunResult(outcome, state, hosts[0], runs.place, printed, last_output, where, ending)


def _result_of(hosts: Sequence[Host], nodes: Sequence[_Node], end: tuple[str, int]) -> tuple[str, int]:
    """Return what was seen of a run's end ("" where it passed), and its exit code."""
    state, limit = end
    troubles = [str(problem) for node in nodes if node.trouble for problem in node.trouble.problems]
    failed = [f"{host.name}: exit code {node.code}" for host, node in zip(hosts, nodes, strict=True) if node.code]
    if troubles:
        return "; ".join(troubles), TROUBLE
    if state == HUNG:
        return f"no end after {duration(limit)}", VERDICT
    if failed:
        return "; ".join(failed), VERDICT
    return "", OK


class _NodeRuns:
    """The scripts of one run, one for each host: started, waited for, ended together."""

    def __init__(
        self, transport: Transport, hosts: Sequence[Host], request: TestRequest, on_line: OnLine | None
    ) -> None:
        self.lines: list[str] = []
        self._room = LOG_LIMIT
        self.place = ""
        self._transport, self._hosts, self._request, self._on_line = transport, hosts, request, on_line
        self._key = f"code-{secrets.token_hex(4)}"
        self._jobs: list[BackgroundJob] = []
        self._lock = threading.Lock()
        self._last: dict[int, tuple[float, int, str]] = {}
        self._ended: queue.Queue[tuple[int, _Node]] = queue.Queue()

    def work(self, script: str, address: str) -> tuple[list[_Node], str]:
        """Start all nodes and wait until the last one has ended, the first one failed, or the time is over."""
        end = time.monotonic() + self._request.time_limit
        port = str(FIRST_PORT + secrets.randbelow(PORTS))
        for index, host in enumerate(self._hosts):
            meeting = {
                "RANK": str(index),
                "WORLD_SIZE": str(len(self._hosts)),
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
            }
            names = {
                "DEEPEP_NODE": host.name,
                "DEEPEP_NODES": ",".join(each.name for each in self._hosts),
                "KEY": self._key,
            }
            env = {**self._request.env, **names, **(meeting if len(self._hosts) > 1 else {})}
            job = Job(script, self._request.args, env, self._request.user, timeout=None, merge=True, log=True)
            keys = (f"place-{self._key}", self._key)
            self._jobs.append(self._transport.hold(host, job, functools.partial(self._take_line, index), keys=keys))
        for index, running in enumerate(self._jobs):
            threading.Thread(
                target=self._wait, args=(index, running), name=f"test {self._hosts[index].name}", daemon=True
            ).start()
        return self._collect(end)

    def _collect(self, end: float) -> tuple[list[_Node], str]:
        nodes = [_Node() for _ in self._hosts]
        for _ in self._hosts:
            try:
                index, node = self._ended.get(timeout=max(end - time.monotonic(), 0.001))
            except queue.Empty:
                return nodes, HUNG
            nodes[index] = node
            if node.trouble or node.code:
                return nodes, LOST if node.trouble else ENDED
        return nodes, ENDED

    def _wait(self, index: int, running: BackgroundJob) -> None:
        try:
            place = running.wait_for(f"place-{self._key}")
            if index == 0:
                self.place = place
            code = running.wait_for(self._key)
            self._ended.put((index, _Node(int(code) if code.isdecimal() else TROUBLE)))
        except Trouble as trouble:
            self._ended.put((index, _Node(trouble=trouble)))

    def last_output(self) -> tuple[LastOutput, ...]:
        """Return the last line of each node."""
        now = time.monotonic()
        with self._lock:
            last = {index: self._last.get(index, (now, 0, "")) for index in range(len(self._hosts))}
        names = {index: f"node-{index}-{host.name}.log" for index, host in enumerate(self._hosts)}
        return tuple(
            LastOutput(names[index], int(now - when), count, line[:160]) for index, (when, count, line) in last.items()
        )

    def _take_line(self, index: int, line: str) -> None:
        with self._lock:
            if self._key in line:
                return
            self._room -= len(line) + 1
            if self._room >= 0:
                self.lines.append(line)
            if line.strip():
                self._last[index] = (time.monotonic(), self._last.get(index, (0.0, 0, ""))[1] + 1, line.strip())
            if self._on_line:
                self._on_line(line)

    def close(self) -> None:
        """End what still runs and wait for it: each node reads its counters once more before it goes."""
        jobs, self._jobs = self._jobs, []
        if not jobs:
            return
        with ThreadPoolExecutor(len(jobs)) as pool:
            for each in [pool.submit(_close, running) for running in jobs]:
                each.result()


def _close(running: BackgroundJob) -> None:
    try:
        running.close()
    except Trouble:
        return  # the thread that waits for this node reports its end
