"""Run a test in its passes: with one number of tokens after the other, each as often as it takes to have enough calls
checked.

    python passes.py --logs DIR [--pass TOKENS:CALLS:CHECKED:CAPABILITY ...] -- SCRIPT ARGUMENTS...

Each run is `ranks.py --logs DIR -- SCRIPT ARGUMENTS --num-tokens TOKENS`. CALLS are the calls that one run checks on
each rank, CHECKED is how many the pass must have over all ranks and runs (0: one run), CAPABILITY the compute
capability from which on GPUs have the pass. DEEPEP_TEST_CAPABILITY says what the GPUs of this test have; without it
only passes for all GPUs run. All nodes must be told the same.

The first run that fails is the last one, and its exit code is that of all. Where ARGUMENTS say how many tokens, or ask
for a test that has no end or that breaks ranks, the script runs once, as asked. Lines of the form

    deepep: pass 2 of 2 on node 0: 256 tokens, run 1 of 8, 64 combine calls to check
    deepep: pass 2 of 2 on node 0: run 1 of 8 ended with exit code 0

stand around each run, also (the first of them) in the files of the ranks.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

HERE = os.path.dirname(os.path.realpath(__file__))
RANKS = 8  # of a node, as upstream's test has it where --num-processes does not say it
FIRST_PORT, LAST_PORT = 20000, 32767  # where files of tests let nodes meet
QUEUE, QUEUE_DEPTH = "NVSHMEM_QP_DEPTH", 1024  # NVSHMEM's own default
AS_ASKED = "the test runs once, as its arguments say"


@dataclass(frozen=True)
class Pass:
    """One pass: tokens, calls that a run checks on each rank, how many must be checked in all, and for which GPUs it
    is."""

    tokens: int
    calls: int
    checked: int
    capability: tuple[int, ...]

    def runs(self, ranks: int) -> int:
        """Return how many runs it takes on so many ranks."""
        return max(1, -(-self.checked // (self.calls * ranks)))


@dataclass(frozen=True)
class Run:
    """One run of one pass, each with its number and how many there are, and the calls that it checks over all ranks."""

    number: int
    passes: int
    tokens: int
    run: int
    runs: int
    calls: int

    def begin(self, node: int) -> str:
        """Return the line that stands before it."""
        where = f"deepep: pass {self.number} of {self.passes} on node {node}"
        return f"{where}: {self.tokens} tokens, run {self.run} of {self.runs}, {self.calls} combine calls to check"

    def end(self, node: int, code: int) -> str:
        """Return the line that stands behind it."""
        return (
            f"deepep: pass {self.number} of {self.passes} on node {node}: run {self.run} of {self.runs} ended "
            f"with exit code {code}"
        )


def capability(text: str) -> tuple[int, ...]:
    """Return a compute capability as numbers, nothing for a text that is none: "10.0" is above "9.0"."""
    parts = text.split(".")
    return tuple(map(int, parts)) if all(part.isascii() and part.isdigit() for part in parts) else ()


def parse_pass(text: str) -> Pass:
    """Return a pass, for argparse."""
    tokens, calls, checked, least = text.split(":")
    return Pass(int(tokens), int(calls), int(checked), capability(least))


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the command line's values: logs, passes, script, arguments."""
    parser = argparse.ArgumentParser(
        prog="passes.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--logs", required=True, metavar="DIR", help="as of ranks.py")
    parser.add_argument(
        "--pass", dest="passes", action="append", default=[], type=parse_pass, metavar="TOKENS:CALLS:CHECKED:CAPABILITY"
    )
    parser.add_argument("script", metavar="SCRIPT", help="the Python program to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="what it gets")
    return parser.parse_args(words)


def read_arguments(arguments: Sequence[str]) -> tuple[int, int, bool]:
    """Return what the arguments of the test say: tokens (0: nothing), ranks of a node, and whether it runs once, as
    asked."""
    parser = argparse.ArgumentParser(add_help=False)
    for name in ("--num-tokens", "--num-processes"):
        parser.add_argument(name, default="")
    for name in ("--pressure-test", "--shrink-test", "--help", "-h"):
        parser.add_argument(name, action="store_true")
    try:
        known, _ = parser.parse_known_args(arguments)
    except SystemExit:  # the test itself says what is wrong with them
        return 0, RANKS, True
    tokens = int(known.num_tokens) if known.num_tokens.isdecimal() else 0
    ranks = int(known.num_processes) if known.num_processes.isdecimal() else RANKS
    once = bool(known.num_tokens) or known.pressure_test or known.shrink_test or known.help or known.h
    return tokens, max(ranks, 1), once


def plan(passes: Sequence[Pass], ranks: int, gpus: tuple[int, ...]) -> Iterator[Run]:
    """Yield the runs that GPUs of a compute capability have, on so many ranks."""
    own = [one for one in passes if one.capability <= max(gpus, (0,))]
    for number, one in enumerate(own, 1):
        runs = one.runs(ranks)
        for run in range(1, runs + 1):
            yield Run(number, len(own), one.tokens, run, runs, one.calls * ranks)


def queue_depth(tokens: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that so many tokens need: two entries for each and two more, in a power of two, where
    NVSHMEM's default or what the user has is less."""
    needed = 2 * (tokens + 1)
    known = environment.get(QUEUE, "")
    if needed <= (int(known) if known.isdecimal() else QUEUE_DEPTH):
        return {}
    return {QUEUE: str(1 << (needed - 1).bit_length())}


def meeting_port(index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return where the ranks of run `index` (from 0) meet: elsewhere than those of the run before, whose port may
    not be free yet."""
    first = environment.get("MASTER_PORT", "")
    if index == 0 or not first.isdecimal():
        return {}
    if environment.get("WORLD_SIZE", "1") == "1":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return {"MASTER_PORT": str(probe.getsockname()[1])}
    port = int(first) + index
    inside = FIRST_PORT <= int(first) <= LAST_PORT
    return {"MASTER_PORT": str(port - (LAST_PORT - FIRST_PORT + 1) if inside and port > LAST_PORT else port)}


def start(command: Sequence[str], more: Mapping[str, str]) -> int:
    """Run a command with more variables; return its exit code as a shell has it. A signal that ends this process
    ends it too."""
    child: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def end(number: int, _: object) -> None:
        early.append(number)
        for each in child:
            each.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    child.append(subprocess.Popen(command, env={**os.environ, **more}))
    for signum in early:
        child[0].send_signal(signum)
    code = child[0].wait()
    if early:
        sys.exit(128 + early[0])
    return 128 - code if code < 0 else code


def main() -> None:
    """Run the command line."""
    chosen = parse(sys.argv[1:])
    node, nodes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    tokens, local_ranks, once = read_arguments(chosen.arguments)
    command = [
        sys.executable,
        os.path.join(HERE, "ranks.py"),
        "--logs",
        chosen.logs,
        "--",
        chosen.script,
        *chosen.arguments,
    ]
    gpus = capability(os.environ.get("DEEPEP_TEST_CAPABILITY", ""))
    runs = [] if once else list(plan(chosen.passes, nodes * local_ranks, gpus))
    if not runs:
        if once and node == 0:
            print(f"deepep: {AS_ASKED}", flush=True)
        sys.exit(start(command, queue_depth(tokens, os.environ)))
    for index, run in enumerate(runs):
        print(run.begin(node), flush=True)
        more = {**queue_depth(run.tokens, os.environ), **meeting_port(index, os.environ), "DEEPEP_TEST_RUN": str(index)}
        code = start([*command, "--num-tokens", str(run.tokens)], {**more, "DEEPEP_TEST_HEADING": run.begin(node)})
        print(run.end(node, code), flush=True)
        if code:
            sys.exit(code)


if __name__ == "__main__":
    main()
