"""Small dispatches and combines, timed on every rank (CPU stand-in)."""

import sys

from utils import Exchange, bench, launch, options, slowed


def main(place, buffer, args) -> None:
    exchange = Exchange(place, buffer, args)
    place.say(f"Allocating buffer size: {args.num_experts * args.tokens * args.width * 2 / 1e6} MB ...")
    for with_topk in (True, False):
        exchange.run_case("BF16", "x", with_topk=with_topk)
    got, _, handle = exchange.send(exchange.own.x, "BF16")
    out_bytes, back_bytes = exchange.bytes_sent * 2, exchange.bytes_sent * 4

    def both() -> None:
        exchange.send(exchange.own.x, "BF16")
        buffer.combine(got, handle)

    average, shortest, longest = slowed(place, bench(both, 10))
    rate = (out_bytes + back_bytes) / average / 1e9
    times = f"avg_t={average * 1e6:.2f} us, min_t={shortest * 1e6:.2f} us, max_t={longest * 1e6:.2f} us"
    print(f"[rank {place.rank}] Dispatch + combine bandwidth: {rate:.2f} GB/s, {times}\n", end="", flush=True)
    buffer.barrier()
    send = slowed(place, bench(lambda: exchange.send(exchange.own.x, "BF16"), 5))[0]
    back = slowed(place, bench(lambda: buffer.combine(got, handle), 5))[0]
    words = f"Dispatch bandwidth: {out_bytes / send / 1e9:.2f} GB/s, avg_t={send * 1e6:.2f} us"
    words += f" | Combine bandwidth: {back_bytes / back / 1e9:.2f} GB/s, avg_t={back * 1e6:.2f} us"
    print(f"[rank {place.rank}] {words}\n", end="", flush=True)
    buffer.barrier()
    # Sending and receiving happen in one call here; what is left of it beyond a barrier is called receiving.
    wait = bench(buffer.barrier, 5)[0]
    parts = [f"{max(total - wait, 0) * 1e6:.2f} + {min(wait, total) * 1e6:.2f} us" for total in (send, back)]
    print(f"[rank {place.rank}] Dispatch send/recv time: {parts[0]} | Combine send/recv time: {parts[1]}\n", end="", flush=True)


if __name__ == "__main__":
    sys.exit(launch(options("test_low_latency", num_processes=8, num_tokens=128, hidden=7168, num_topk=8, num_experts=288), main))
