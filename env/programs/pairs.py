"""Which link is bad? Every pair of nodes exchanges data for a moment, and the slow pair, node or GPU is named.

    WORLD_SIZE=4 RANK=0 MASTER_ADDR=node1 MASTER_PORT=8361 python pairs.py    on node1, RANK=1, 2, 3 on the others

Pairs meet in rounds, as teams of a tournament do: with N nodes there are N-1 rounds (N where N is odd and one node
rests), every node is in one pair of a round, and all pairs of a round exchange at the same time. So twice the nodes
take twice the time, not four times. In a pair, GPU i of one node sends to GPU i of the other and receives from it. The
lines say GB/s each way, of all GPUs together:

    [pairs] round 1: node1 node4 361.20 GB/s

With --cross-rail every GPU, and so its network card, meets every GPU of every other node: GPU i meets GPU i, then i+1
and so on, and there are as many times more rounds as GPUs. DeepEP's low-latency kernels send over all of these links; a
fabric that joins only network cards of equal number passes without it.

At the end comes what those below a fraction of the median have in common: a node all of whose pairs are slow, a GPU (or
its network card) that is slow towards every node, else the pair itself. A pair that does not answer in time is named,
its processes are ended, and the next round begins with fresh ones. Exit code 0 if all pairs are alike, else 1.
"""

from __future__ import annotations

import argparse
import sys

import launching
from pairs_judge import describe, judge
from pairs_run import conduct, keep, meetings, serve, shifts

SIZES = ("64M", "16M", "1M", "256K")


def main(words: list[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="pairs.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    launching.add_options(parser)
    parser.add_argument(
        "--size",
        type=launching.size,
        help=f"bytes of one message (default: {SIZES[0]}; less where GPUs do not hold so much)",
    )
    parser.add_argument(
        "--cross-rail", action="store_true", help="every GPU with every other, as low-latency kernels need it"
    )
    parser.add_argument(
        "--repeats", type=int, default=20, metavar="N", help="messages that are timed together (default: 20)"
    )
    parser.add_argument(
        "--fraction", type=float, default=0.8, help="of the median; below it a link is slow (default: 0.8)"
    )
    parser.add_argument(
        "--timeout", type=float, default=60, metavar="SECONDS", help="for the exchange of a pair (default: 60)"
    )
    parser.add_argument(
        "--start-timeout", type=float, default=300, metavar="SECONDS", help="for the nodes to come (default: 300)"
    )
    chosen = parser.parse_args(words)
    place = launching.place(chosen.num_processes)
    if place.nodes < 2:
        launching.say(
            "pairs",
            "failed: one node is no pair; set WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT on each",
            error=True,
        )
        return 1
    chosen.size = chosen.size or max(launching.fitting([launching.size(size) for size in SIZES]))
    store = serve(place, chosen) if place.node == 0 else None
    context = launching.start(keep, (place, chosen), place.local_ranks)
    if store is None:
        wrong = launching.wait_for(context)
        if wrong:
            launching.say("pairs", f"failed: {wrong}", error=True)
        return 1 if wrong else 0
    try:
        seen = conduct(store, place, chosen)
    finally:
        launching.stop(context)
    verdict = judge(seen.rates, place.nodes, chosen.fraction, shifts=shifts(place, chosen))
    for line in describe(verdict, seen.names, seen.absent):
        launching.say("pairs", line)
    good = not verdict.findings and not seen.absent and not seen.faults
    many = launching.count(len(meetings(place, chosen)), "round")
    passed = f"passed: {launching.count(len(seen.rates), 'pair')} in {many}"
    launching.say("pairs", passed if good else "failed", error=not good)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
