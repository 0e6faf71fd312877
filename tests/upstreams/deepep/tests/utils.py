"""What the three tests share: options, the launch of one process per rank, random tokens, the reference, and timing."""

import argparse
import ctypes
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch
from deep_ep import Mailbox

MAX_TOKENS, MAX_HIDDEN = 64, 128
KEEP_GOING = 3.0  # seconds that the other ranks get to end by themselves when one has failed
SWITCHES = "/run/lab/fake"  # on a host of the embedded cluster, a file of a switch's name holds its value
INFINIBAND = "/sys/class/infiniband"
SENT = 1 << 28  # words of four bytes that a test moves over each NIC of the embedded cluster


def switch(name: str, default: str = "") -> str:
    """A fault that somebody asked for: by the environment, or by a file on the embedded cluster."""
    if name in os.environ:
        return os.environ[name]
    try:
        with open(f"{SWITCHES}/{name}") as file:
            return file.read().strip()
    except OSError:
        return default


def move_counters(place) -> None:
    """Let the NICs of a host of the embedded cluster count as if the test had used them all: each rank those that are its own."""
    if not os.path.isdir(SWITCHES) or place.nodes == 1 or not os.path.isdir(INFINIBAND):
        return
    for index, device in enumerate(sorted(os.listdir(INFINIBAND))):
        if index % place.local_ranks != place.local_rank or device == switch("STANDIN_FROZEN_NIC"):
            continue
        for name in ("port_xmit_data", "port_rcv_data"):
            with open(f"{INFINIBAND}/{device}/ports/1/counters/{name}", "r+") as file:
                count = int(file.read()) + SENT
                file.seek(0)
                file.write(f"{count}\n")


def options(title: str, **defaults: int) -> argparse.Namespace:
    """Upstream's options; those that mean nothing without a GPU are taken and ignored."""
    parser = argparse.ArgumentParser(description=f"{title} (CPU stand-in)")
    for name, value in defaults.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    for name in ("allow-mnnvl", "use-fabric", "disable-nvlink", "use-logfmt", "pressure-test", "shrink-test", "test-ll-compatibility"):
        parser.add_argument("--" + name, action="store_true")
    for name in ("do-pressure-test", "skip-perf-test"):
        parser.add_argument("--" + name, action="store_true")
    for name in ("pressure-test-mode", "num-gpu-timeout-secs", "num-cpu-timeout-secs"):
        parser.add_argument("--" + name, type=int, default=0)
    args = parser.parse_args()
    args.tokens, args.width = min(args.num_tokens, MAX_TOKENS), min(args.hidden, MAX_HIDDEN)
    print(
        f"[stand-in] CPU stand-in of DeepEP, {title}: no GPU is used, the figures below say nothing about one; "
        f"sizes are clamped (tokens {args.num_tokens} -> {args.tokens}, hidden {args.hidden} -> {args.width})",
        flush=True,
    )
    return args


@dataclass(frozen=True)
class Place:
    """Where a rank is: node and local index, from the launcher's environment."""

    node: int
    nodes: int
    local_rank: int
    local_ranks: int

    @property
    def rank(self) -> int:
        """The rank among all ranks of all nodes."""
        return self.node * self.local_ranks + self.local_rank

    @property
    def ranks(self) -> int:
        """How many ranks there are on all nodes together."""
        return self.nodes * self.local_ranks

    def say(self, text: str, end: str = "\n") -> None:
        """Print on the first rank of each node."""
        if self.local_rank == 0:
            print(text, end=end, flush=True)


def launch(args: argparse.Namespace, body) -> int:
    """Run `body(place, buffer, args)` in one process per local rank; return the exit code of the test on this node."""
    node, nodes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    ranks = nodes * args.num_processes
    if args.num_experts % ranks != 0:
        print(f"error: {args.num_experts} experts cannot be shared equally by {ranks} ranks", file=sys.stderr)
        return 1
    if switch("STANDIN_FAIL_NODE") == str(node):
        print(switch("STANDIN_FAIL_SAYS", f"error: node {node} fails because STANDIN_FAIL_NODE says so"), file=sys.stderr)
        return 1
    # A SIGTERM while ranks are being started waits until all are known: one that is being forked would not hear of it.
    early = []
    signal.signal(signal.SIGTERM, lambda number, _: early.append(number))
    # As upstream, through torch; forked, since a test of the tests should not wait for many fresh interpreters.
    start = torch.multiprocessing.start_processes
    context = start(_be_rank, (node, nodes, args, body), nprocs=args.num_processes, join=False, daemon=True, start_method="fork")
    first = node * args.num_processes
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        if early:
            sys.exit(143)
        return _wait_for({process.sentinel: (rank, process) for rank, process in enumerate(context.processes, first)})
    finally:
        for process in context.processes:
            process.kill()


def _be_rank(local_rank: int, node: int, nodes: int, args: argparse.Namespace, body) -> None:
    code = 1
    try:
        code = _run_rank(Place(node, nodes, local_rank, args.num_processes), args, body)
    except Exception:
        traceback.print_exc()
    sys.exit(code)


def _run_rank(place: Place, args: argparse.Namespace, body) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives its launcher
    code = 0
    try:
        late, _, seconds = switch("STANDIN_DELAY").partition(":")
        if late == str(place.rank):
            time.sleep(float(seconds))
        host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "8361"))
        buffer = Mailbox(place.rank, place.ranks, host, port, float(switch("STANDIN_TIMEOUT", "30")))
        if switch("STANDIN_HANG") == str(place.rank):
            signal.pause()
        body(place, buffer, args)
        if args.pressure_test or args.do_pressure_test:
            press(place, buffer, args)
        buffer.barrier()
        move_counters(place)
        buffer.close()
    except (AssertionError, RuntimeError) as error:
        kind = "AssertionError: " if isinstance(error, AssertionError) else ""
        print(f"\n[rank {place.rank}] FAILED (CPU stand-in): {kind}{error}", file=sys.stderr, flush=True)
        code = 1
    return code


def press(place, buffer, args) -> None:
    """Like upstream's: without an end."""
    seed = 0
    while True:
        place.say(f"Testing with seed {seed} ...")
        exchange = Exchange(place, buffer, args)
        exchange.run_case("BF16", "x", with_topk=True)
        move_counters(place)
        seed += 1


def _wait_for(running: dict) -> int:
    """Wait for the ranks, `running` by their sentinels; once one has failed, no longer than KEEP_GOING for the others."""
    failed, give_up = [], float("inf")
    while running and time.monotonic() < give_up:
        for sentinel in multiprocessing.connection.wait(list(running), 0.02 if failed else None):
            rank, process = running.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                failed.append(rank)
                give_up = min(give_up, time.monotonic() + KEEP_GOING)
    if failed:
        left = f", still running and ended: {sorted(rank for rank, _ in running.values())}" if running else ""
        print(f"error: ranks {sorted(failed)} failed{left}", file=sys.stderr)
    return 1 if failed else 0


@dataclass(frozen=True)
class Tokens:
    """One rank's random input. Small whole numbers: every sum of the test is exact in every number format it uses."""

    x: np.ndarray
    constant: np.ndarray
    topk_idx: np.ndarray
    topk_weights: np.ndarray


def make_tokens(rank: int, args: argparse.Namespace) -> Tokens:
    """The input of `rank`; every rank can make every other rank's, which is what the reference stands on."""
    random = np.random.default_rng([0, rank])
    idx = np.stack([random.permutation(args.num_experts)[: args.num_topk] for _ in range(args.tokens)]).astype(np.int32)
    weights = random.integers(1, 4, size=idx.shape).astype(np.float32)
    x = random.integers(-8, 9, size=(args.tokens, args.width)).astype(np.float32)
    return Tokens(x, np.full_like(x, rank % 100 + 1), idx, weights)


def encode(x: np.ndarray, kind: str) -> np.ndarray:
    """Two bytes a value for BF16 (its real bits), one for FP8 (whole numbers as int8)."""
    return (x.view(np.uint32) >> 16).astype(np.uint16) if kind == "BF16" else x.astype(np.int8)


def decode(x: np.ndarray, kind: str) -> np.ndarray:
    """The reverse of encode, as float32."""
    return (x.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else x.astype(np.float32)


def expert_scale(experts: np.ndarray) -> np.ndarray:
    """What the experts of this test do to a token: multiply it by this."""
    return (experts % 5 + 1).astype(np.float32)


class Exchange:
    """Dispatch, experts, combine and their check for one rank."""

    def __init__(self, place: Place, buffer: Mailbox, args: argparse.Namespace) -> None:
        """Make everybody's tokens: ours to send, all to compare with."""
        self.place, self.buffer, self.args = place, buffer, args
        self.all = [make_tokens(rank, args) for rank in range(place.ranks)]
        self.own = self.all[place.rank]
        self.corrupt = switch("STANDIN_CORRUPT") == str(place.rank)
        self.per_rank = args.num_experts // place.ranks
        start = time.perf_counter()
        self.layout = buffer.get_dispatch_layout(self.own.topk_idx, args.num_experts)
        self.layout_ms = (time.perf_counter() - start) * 1e3
        # The reference, by another way than the library's: token by token, expert by expert.
        self.expected_rows = [
            [row for row, experts in enumerate(tokens.topk_idx.tolist()) if any(e // self.per_rank == place.rank for e in experts)] for tokens in self.all
        ]
        self.factors = {with_topk: np.array(self._expected_factors(with_topk), dtype=np.float32)[:, None] for with_topk in (False, True)}
        self.bytes_sent = int(self.layout.sum()) * args.width

    def _expected_factors(self, with_topk: bool) -> list:
        """What each of our tokens is multiplied by on its way, as one process alone computes it."""
        pairs = [list(zip(weights, experts)) for weights, experts in zip(self.own.topk_weights.tolist(), self.own.topk_idx.tolist())]
        if with_topk:
            return [sum(weight * (expert % 5 + 1) for weight, expert in pair) for pair in pairs]
        return [len({expert // self.per_rank for _, expert in pair}) for pair in pairs]

    def send(self, values: np.ndarray, kind: str, chunk: int = 0) -> tuple:
        """Dispatch our `values`; return (received values as float32, Received, Handle)."""
        payload = encode(values, kind)
        if self.corrupt:
            payload[int(np.flatnonzero(self.layout.any(axis=1))[0]), 0] ^= 1
        received, handle = self.buffer.dispatch(payload, self.own.topk_idx, self.own.topk_weights, self.layout, chunk)
        return decode(received.x, kind), received, handle

    def check_received(self, got: np.ndarray, received, which: str) -> None:
        """Every token that came is the one its sender has, and none is missing; raises AssertionError."""
        start = 0
        for rank, rows in enumerate(self.expected_rows):
            there, end = self.all[rank], start + len(rows)
            assert end <= len(got), f"{len(got)} tokens came, more were expected (rank {rank} sends {len(rows)})"
            wrong = np.flatnonzero((got[start:end] != getattr(there, which)[rows]).any(axis=1))
            assert wrong.size == 0, f"dispatch: token {rows[wrong[0]]} of rank {rank} arrived wrong"
            assert (received.topk_idx[start:end] == there.topk_idx[rows]).all(), f"dispatch: experts of rank {rank}'s tokens are wrong"
            start = end
        assert start == len(got), f"{len(got)} tokens came, {start} were expected"

    def answer(self, got: np.ndarray, received, *, with_topk: bool) -> np.ndarray:
        """What our experts make of the tokens that came."""
        if not with_topk:
            return got
        ours = received.topk_idx // self.per_rank == self.place.rank
        factor = (received.topk_weights * expert_scale(received.topk_idx) * ours).sum(axis=1)
        return got * factor[:, None].astype(np.float32)

    def check_combined(self, out: np.ndarray, which: str, *, with_topk: bool) -> None:
        """The sum that came back is what one process alone computes; raises AssertionError."""
        wanted = getattr(self.own, which) * self.factors[with_topk]
        wrong = np.flatnonzero((out != wanted).any(axis=1))
        assert wrong.size == 0, f"combine: token {wrong[0]} came back wrong"

    def run_case(self, kind: str, which: str, *, with_topk: bool) -> None:
        """One dispatch and one combine, both checked."""
        got, received, handle = self.send(getattr(self.own, which), kind)
        self.check_received(got, received, which)
        self.check_combined(self.buffer.combine(self.answer(got, received, with_topk=with_topk), handle), which, with_topk=with_topk)


def run_all_cases(exchange: Exchange, payloads: list) -> None:
    """Every payload with and without top-k, waiting at once or in a thread, with and without a barrier before."""
    say = exchange.place.say
    for previous in (False, True):
        for in_thread in (False, True):
            for kind, which in payloads:
                for with_topk in (False, True):
                    words = f"{kind}, {'with' if with_topk else 'without'} top-k (async={in_thread}, previous={previous})"
                    say(f"[testing] Running with {words} ... ", end="")
                    if previous:
                        exchange.buffer.barrier()
                    _call(lambda: exchange.run_case(kind, which, with_topk=with_topk), in_thread=in_thread)  # noqa: B023
                    say("passed")
    say("")


def _call(body, *, in_thread: bool) -> None:
    if not in_thread:
        body()
        return
    errors: list = []

    def guarded() -> None:
        try:
            body()
        except (AssertionError, RuntimeError) as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def bench(body, repeats: int = 3) -> tuple:
    """Seconds of one call: (average, shortest, longest)."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        body()
        times.append(time.perf_counter() - start)
    return sum(times) / repeats, min(times), max(times)


def slowed(place, times: tuple) -> tuple:
    """The times of a rank that somebody slowed down: what the others wait for it is not in them, which is what tells it apart."""
    rank, _, factor = switch("STANDIN_SLOW").partition(":")
    return tuple(value * float(factor) for value in times) if rank == str(place.rank) else times
