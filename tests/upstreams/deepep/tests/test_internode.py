"""Dispatch and combine among the ranks of several nodes (CPU stand-in)."""

import sys

from utils import Exchange, bench, launch, options, run_all_cases

PAYLOADS = [("BF16", "x"), ("BF16", "constant"), ("FP8", "x"), ("FP8", "constant")]
WIDTH = {"FP8": 1, "BF16": 2}


def volumes(exchange: Exchange, width: int) -> tuple:
    """Bytes to ranks of other nodes (upstream's RDMA share) and to all ranks (its NVLink share)."""
    place = exchange.place
    here = range(place.node * place.local_ranks, (place.node + 1) * place.local_ranks)
    away = [rank for rank in range(place.ranks) if rank not in here]
    return int(exchange.layout[:, away].sum()) * exchange.args.width * width, exchange.bytes_sent * width


def tune(exchange: Exchange, width: int, chunks: tuple, call) -> tuple:
    """Time `call(chunk)` for each (NVL chunk, RDMA chunk); return (microseconds, words) of the best."""
    away, everywhere = volumes(exchange, width)
    results = []
    for nvl, rdma in chunks:
        notify = bench(exchange.buffer.barrier, 1)[0]
        seconds = bench(lambda: call(rdma * 4096), 2)[0]  # noqa: B023
        rates = f"{away / seconds / 1e9:.2f} GB/s (RDMA), {everywhere / seconds / 1e9:.2f} GB/s (NVL)"
        results.append((seconds, nvl, rdma, notify * 1e6, seconds * 1e6, rates))
        exchange.place.say(f"[tuning] SMs 24, NVL chunk {nvl}, RDMA chunk {rdma}: {notify * 1e6:.0f} + {seconds * 1e6:.0f} us, {rates} ")
    exchange.place.say("")
    return min(results)


def main(place, buffer, args) -> None:
    assert place.nodes > 1, "test_internode needs at least two nodes: set WORLD_SIZE, RANK and MASTER_ADDR on each"
    exchange = Exchange(place, buffer, args)
    place.say("Testing with seed 0 ...")
    place.say(f"[config] num_tokens={args.num_tokens}, hidden={args.hidden}, num_topk_groups={min(place.nodes, 4)}, num_topk={args.num_topk}")
    place.say(f"[layout] Kernel performance: {exchange.layout_ms:.3f} ms\n")
    run_all_cases(exchange, PAYLOADS)
    best = {}
    chunks = ((4, 4), (4, 8), (8, 8), (8, 16))
    for kind in ("FP8", "BF16"):
        best[kind] = tune(exchange, WIDTH[kind], chunks, lambda size: exchange.send(exchange.own.x, kind, size))  # noqa: B023
    got, _, handle = exchange.send(exchange.own.x, "BF16")
    combine = tune(exchange, 4, ((1, 8), (2, 12), (4, 20)), lambda size: buffer.combine(got, handle, size))
    for kind, (_, nvl, rdma, notify, micro, rates) in best.items():
        place.say(f"[tuning] Best dispatch ({kind}): SMs 24, NVL chunk {nvl}, RDMA chunk {rdma}: {notify:.0f} + {micro:.0f} us, {rates}")
    _, nvl, rdma, notify, micro, rates = combine
    place.say(f"[tuning] Best combine: SMs 24, NVL chunk {nvl}, RDMA chunk {rdma}, {notify:.2f} + {micro:.2f} us, {rates}\n")


if __name__ == "__main__":
    defaults = {"num_processes": 8, "num_tokens": 4096, "hidden": 7168, "num_topk_groups": 0, "num_topk": 8, "num_experts": 256}
    sys.exit(launch(options("test_internode", **defaults), main))
