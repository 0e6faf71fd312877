"""The running of pairs.py: the first node's launcher directs the rounds, and one parent process per GPU runs the
process that exchanges.

All know each other through torch's TCPStore on the first node. A worker that does not get through its exchange in time
says so by a second connection and ends itself, whatever its GPU still waits for; its parent starts a fresh one for the
next round.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import launching
from pairs_judge import Pair, partner, rounds

AGAIN = 75  # exit code of a worker that wants a fresh one in its place (EX_TEMPFAIL)
SLACK = 20.0  # seconds beyond the limit of an exchange until what a worker says about it must have come
FOREVER = datetime.timedelta(days=1)  # the limits are ours
# of `--repeats` messages, after one that warms up; the median counts, since a block lasts milliseconds on a fast link
BLOCKS = 5
LARGEST_BYTE = 251
PR_SET_PDEATHSIG = 1
MAP = "DEEP_EP_DEVICE_TO_HCA_MAPPING"  # `gpu:nic:port` for every GPU; the module sets it


@dataclass(frozen=True)
class Meeting:
    """One round: which nodes meet, and how far the GPUs of each pair's second node are shifted against those of the
    first (0: equal ones meet)."""

    pairs: list[Pair]
    shift: int


@dataclass(frozen=True)
class Seen:
    """What came of all rounds: host names by node, GB/s by pair and GPU (None: no answer), nodes that did not come,
    what failed."""

    names: tuple[str, ...]
    rates: dict[Pair, tuple[float | None, ...]]
    absent: tuple[int, ...]
    faults: tuple[str, ...]


def shifts(place: launching.Place, chosen: argparse.Namespace) -> int:
    """Return how often a pair meets: once, or, where every GPU is to meet every other, as often as there are GPUs."""
    return place.local_ranks if chosen.cross_rail else 1


def meetings(place: launching.Place, chosen: argparse.Namespace) -> list[Meeting]:
    """Return all rounds: those of the nodes, each as often as GPUs shift."""
    return [Meeting(pairs, shift) for pairs in rounds(place.nodes) for shift in range(shifts(place, chosen))]


def serve(place: launching.Place, chosen: argparse.Namespace) -> Any:
    """Open the store that all meet at."""
    import torch

    timeout = datetime.timedelta(seconds=chosen.start_timeout)
    return torch.distributed.TCPStore(
        place.host, place.port, None, is_master=True, timeout=timeout, wait_for_workers=False
    )


def connect(place: launching.Place, chosen: argparse.Namespace) -> Any:
    """Return a connection of this process to the store."""
    import torch

    timeout = datetime.timedelta(seconds=chosen.start_timeout)
    store = torch.distributed.TCPStore(
        place.host, place.port, None, is_master=False, timeout=timeout, wait_for_workers=False
    )
    store.set_timeout(FOREVER)
    return store


def conduct(store: Any, place: launching.Place, chosen: argparse.Namespace) -> Seen:
    """Run all rounds as the first node's launcher, a line for every pair."""
    plan = meetings(place, chosen)
    many = launching.count(len(plan), "round")
    launching.say(
        "pairs",
        f"{place.nodes} nodes x {launching.count(place.local_ranks, 'GPU')}, {many}, {chosen.size} bytes a message",
    )
    absent: set[int] = set()
    names = [str(node) for node in range(place.nodes)]
    rates: dict[Pair, tuple[float | None, ...]] = {}
    faults: list[str] = []
    for number, meeting in enumerate(plan):
        absent |= missing(store, place, number, absent, chosen.start_timeout)
        names = unlike([host(store, node) for node in range(place.nodes)])
        store.set(f"go/{number}", json.dumps(sorted(absent)))
        present = [pair for pair in meeting.pairs if not absent & {*pair}]
        told = {done(number, place, node, gpu) for pair in present for node in pair for gpu in range(place.local_ranks)}
        wait(store, told, chosen.timeout + SLACK)
        for pair in present:
            found, said = result(store, place, number, pair, meeting.shift)
            rates[pair] = (*rates.get(pair, ()), *found)
            faults += said
            report(number, [names[node] for node in pair], found, said, meeting.shift)
        for pair in {*meeting.pairs} & rates.keys() - {*present}:
            rates[pair] = (*rates[pair], *(None for _ in range(place.local_ranks)))
    return Seen(tuple(names), rates, tuple(sorted(absent)), tuple(faults))


def missing(store: Any, place: launching.Place, number: int, absent: set[int], seconds: float) -> set[int]:
    """Wait for all who are not absent to be ready for a round; return the nodes of those who are not in time."""
    keys = {
        f"ready/{number}/{place.local_ranks * node + gpu}": node
        for node in range(place.nodes)
        for gpu in range(place.local_ranks)
    }
    keys = {key: node for key, node in keys.items() if node not in absent}
    return {keys[key] for key in wait(store, set(keys), seconds)}


def wait(store: Any, keys: set[str], seconds: float) -> set[str]:
    """Wait until all keys are there; return those that are not after so many seconds."""
    end = time.monotonic() + seconds
    while keys:
        keys = {key for key in keys if not store.check([key])}
        if not keys or time.monotonic() >= end:
            break
        time.sleep(0.02)
    return keys


def done(number: int, place: launching.Place, node: int, gpu: int) -> str:
    """Return the key under which a worker says what came of a round."""
    return f"done/{number}/{node * place.local_ranks + gpu}"


def host(store: Any, node: int) -> str:
    """Return a node's host name, its index while nobody has said it."""
    key = f"host/{node}"
    return store.get(key).decode() if store.check([key]) else f"node-{node}"


def unlike(names: list[str]) -> list[str]:
    """Return the names, with the index of the node where two are the same: launchers on one machine."""
    return [f"{name}#{index}" if names.count(name) > 1 else name for index, name in enumerate(names)]


def result(
    store: Any, place: launching.Place, number: int, pair: Pair, shift: int = 0
) -> tuple[tuple[float | None, ...], list[str]]:
    """Return the rate of each GPU of a pair's first node, the lower of what both ends saw, and what the ends say went
    wrong, once each."""
    rates: list[float | None] = []
    said: dict[str, None] = {}
    for gpu in range(place.local_ranks):
        ends: list[float | None] = []
        there = partner(gpu, shift, place.local_ranks)
        for key in (done(number, place, pair[0], gpu), done(number, place, pair[1], there)):
            answer: dict[str, Any] = (
                json.loads(store.get(key)) if store.check([key]) else {"error": "nothing was heard of it"}
            )
            if "error" in answer:
                said[f"GPU {f'{gpu}-{there}' if shift else gpu}: {answer['error']}"] = None
            ends.append(answer.get("rate"))
        answered = [end for end in ends if end is not None]
        rates.append(min(answered) if len(answered) == len(ends) else None)
    return tuple(rates), list(said)


def report(number: int, names: list[str], rates: tuple[float | None, ...], said: list[str], shift: int = 0) -> None:
    """Say what a pair's exchange came to; the rate of single GPUs only where they differ much."""
    known = [rate for rate in rates if rate is not None]
    pair = f"round {number + 1}{f', GPU +{shift}' if shift else ''}: {names[0]} {names[1]}"
    text = f"{pair} " + (f"{sum(known):.2f} GB/s" if known else "no answer")
    if known and (len(known) < len(rates) or min(known) < max(known) * 0.8):
        text += f" (by GPU: {', '.join('none' if rate is None else f'{rate:.2f}' for rate in rates)})"
    launching.say("pairs", text)
    for line in said:
        launching.say("pairs", f"{pair}: {line}", error=True)


def keep(local_rank: int, place: launching.Place, chosen: argparse.Namespace) -> None:
    """Run one GPU's worker through all rounds, a fresh one after each that ended early."""
    launching.end_by_signal()
    method = multiprocessing.get_context("spawn")
    number, last = method.Value("i", 0, lock=False), len(meetings(place, chosen))
    while number.value < last:
        worker = method.Process(target=work, args=(local_rank, place, chosen, number), daemon=True)
        worker.start()
        worker.join()
        code = worker.exitcode or 0
        if code == 0:
            return
        if code != AGAIN:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            text = json.dumps({"error": f"rank {place.rank(local_rank)} ended by {how}"})
            connect(place, chosen).set(done(number.value, place, place.node, local_rank), text)
        number.value += 1


def work(local_rank: int, place: launching.Place, chosen: argparse.Namespace, number: Any) -> None:
    """Be the worker: take part in every round from `number` on."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a worker stuck in the driver listens to nothing else
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(AGAIN)  # it went before the kernel was told
    store = connect(place, chosen)
    store.set(f"host/{place.node}", os.uname().nodename.split(".")[0])
    if chosen.cross_rail:
        pin_nic(local_rank)
    plan = meetings(place, chosen)
    while number.value < len(plan):
        store.set(f"ready/{number.value}/{place.rank(local_rank)}", "")
        absent = set(json.loads(store.get(f"go/{number.value}")))
        if place.node in absent:
            return
        for pair in plan[number.value].pairs:
            if place.node in pair and not absent & {*pair}:
                end = pair.index(place.node)
                # Both ends call the exchange by the GPU of the first node.
                first = partner(local_rank, -end * plan[number.value].shift, place.local_ranks)
                meet(store, local_rank, place, chosen, (number.value, f"{pair[0]}/{first}", end))
        number.value += 1


def pin_nic(local_rank: int) -> None:
    """Let NCCL use the NIC that DeepEP uses for this GPU, where the module's map says one and the user says nothing: a
    GPU that goes by another one's NIC would not try the link that is asked about."""
    nics = {gpu: f"={nic}" for gpu, _, nic in (each.partition(":") for each in os.environ.get(MAP, "").split(","))}
    if str(local_rank) in nics:
        os.environ.setdefault("NCCL_IB_HCA", nics[str(local_rank)])


def meet(
    store: Any, local_rank: int, place: launching.Place, chosen: argparse.Namespace, meeting: tuple[int, str, int]
) -> None:
    """Exchange with a GPU of the other node, and say what came of it; ends the process where it went wrong. `meeting`
    is the round, the name that both ends have for the exchange, and which end this is, 0 or 1."""
    number, name, end = meeting
    key, other = done(number, place, place.node, local_rank), connect(place, chosen)

    def give_up() -> None:
        other.set(key, json.dumps({"error": f"no answer in {chosen.timeout:g} s"}))
        os._exit(AGAIN)

    timer = threading.Timer(chosen.timeout, give_up)
    timer.daemon = True
    timer.start()
    try:
        answer = exchange(store, f"pair/{number}/{name}", end, local_rank, chosen)
    except RuntimeError as error:
        answer = {"error": f"rank {place.rank(local_rank)}: {(str(error).strip().splitlines() or ['?'])[0]}"}
    timer.cancel()
    other.set(key, json.dumps(answer))
    if "error" in answer:
        os._exit(AGAIN)


def exchange(store: Any, name: str, end: int, local_rank: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """Send and receive at the same time as `end` 0 or 1 of a pair; return GB/s each way, or what was wrong with what
    came."""
    import torch
    import torch.distributed as dist

    cuda = chosen.backend == "nccl"
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        chosen.backend, store=dist.PrefixStore(name, store), rank=end, world_size=2, timeout=FOREVER
    )
    given = torch.arange(chosen.size, device=device, dtype=torch.int32).remainder_(LARGEST_BYTE - end).to(torch.uint8)
    wanted = (
        torch.arange(chosen.size, device=device, dtype=torch.int32).remainder_(LARGEST_BYTE - 1 + end).to(torch.uint8)
    )
    result = torch.zeros_like(given)

    def run(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            for each in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, given, 1 - end), dist.P2POp(dist.irecv, result, 1 - end)]
            ):
                each.wait()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    run(1)
    wrong = int((result != wanted).sum())
    run(chosen.repeats)
    seconds = median(run(chosen.repeats) for _ in range(BLOCKS))
    dist.destroy_process_group()
    if wrong:
        return {"error": f"{wrong} of {chosen.size} bytes came wrong"}
    return {"rate": chosen.size * chosen.repeats / seconds / 1e9}
