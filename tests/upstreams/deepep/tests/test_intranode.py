"""Dispatch and combine among the ranks of one node (CPU stand-in)."""

import sys

from utils import Exchange, bench, launch, options, run_all_cases

PAYLOADS = [("BF16", "x"), ("BF16", "constant"), ("FP8", "x")]
WIDTH = {"FP8": 1, "BF16": 2}


def tune(exchange: Exchange, chunks: tuple, volume: int, call) -> tuple:
    """Time `call(chunk)` for each chunk; return (GB/s, chunk, microseconds) of the best."""
    results = []
    for chunk in chunks:
        seconds = bench(lambda: call(int(chunk) * 4096 if chunk != "default" else 0))[0]  # noqa: B023
        results.append((volume / seconds / 1e9, chunk, seconds * 1e6))
        exchange.place.say(f"[tuning] SMs 24, NVL chunk {chunk}: {results[-1][0]:.2f} GB/s (NVL), {results[-1][2]:.2f} us")
    return max(results, key=lambda result: result[0])


def main(place, buffer, args) -> None:
    exchange = Exchange(place, buffer, args)
    place.say(f"[config] num_tokens={args.num_tokens}, hidden={args.hidden}, num_topk={args.num_topk}")
    place.say(f"[layout] Kernel performance: {exchange.layout_ms:.3f} ms\n")
    run_all_cases(exchange, PAYLOADS)
    for kind in ("FP8", "BF16"):
        volume = exchange.bytes_sent * WIDTH[kind]
        rate, chunk, micro = tune(exchange, ("4", "8", "16", "default"), volume, lambda size: exchange.send(exchange.own.x, kind, size))  # noqa: B023
        place.say(f"[tuning] Best dispatch ({kind}): SMs 24, NVL chunk {chunk}, {rate:.2f} GB/s (NVL), t: {micro:.2f} us\n")
    got, _, handle = exchange.send(exchange.own.x, "BF16")
    rate, chunk, micro = tune(exchange, ("1", "4", "8", "default"), exchange.bytes_sent * 4, lambda size: buffer.combine(got, handle, size))
    place.say(f"[tuning] Best combine: SMs 24, NVL chunk {chunk}: {rate:.2f} GB/s (NVL), t: {micro:.2f} us\n")


if __name__ == "__main__":
    sys.exit(launch(options("test_intranode", num_processes=8, num_tokens=4096, hidden=7168, num_topk=8, num_experts=256), main))
