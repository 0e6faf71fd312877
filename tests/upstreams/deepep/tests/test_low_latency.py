"""Small dispatches and combines, compared and timed on every rank (CPU stand-in)."""

import itertools
import os
import sys

import numpy as np
from utils import Exchange, bench, launch, options, slowed, switch

CASES = tuple(itertools.product(("x", "constant"), (False, True), ("BF16", "FP8"), (False, True)))
"""Values, hook, number format, zero copy: each a combine whose result is compared."""

FAULTY_TOKENS, FAULTY_CALLS = 200, 66
"""STANDIN_WRONG_ROW=SEED: with so many tokens or more, one combine call of so many hands back one row that is another token's. The seed
says which call and which row."""

RUN = "DEEPEP_TEST_RUN"
"""Which start of this test it is; calls are counted over all of them."""


class Fault:
    """The wrong rows of one rank."""

    def __init__(self, place, args) -> None:
        seed = switch("STANDIN_WRONG_ROW")
        self.on = bool(seed) and args.num_tokens >= FAULTY_TOKENS
        self.random = np.random.default_rng([int(seed or 0), place.rank])
        self.wrong = int(self.random.integers(FAULTY_CALLS))
        self.call = int(os.environ.get(RUN, "0")) * len(CASES)

    def spoil(self, out: np.ndarray) -> np.ndarray:
        """Return what a combine call hands back."""
        call, self.call = self.call, self.call + 1
        if self.on and call % FAULTY_CALLS == self.wrong:
            row = int(self.random.integers(len(out)))
            others = np.flatnonzero((out != out[row]).any(axis=1))
            out[row] = out[others[int(self.random.integers(len(others)))]]
        return out


def difference(got: np.ndarray, wanted: np.ndarray) -> float:
    """0 for equal arrays, 1 for those that have nothing in common, as upstream's tests measure it."""
    x, y = got.astype(np.float64) + 1, wanted.astype(np.float64) + 1
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def check_all_cases(exchange: Exchange, fault: Fault) -> None:
    """Compare what comes back in every case; raises AssertionError with upstream's words."""
    for (which, _, kind), cases in itertools.groupby(CASES, key=lambda case: case[:3]):
        got, received, handle = exchange.send(getattr(exchange.own, which), kind)
        exchange.check_received(got, received, which)
        wanted = getattr(exchange.own, which) * exchange.factors[True]
        for *_, zero_copy in cases:
            out = fault.spoil(exchange.buffer.combine(exchange.answer(got, received, with_topk=True), handle))
            diff, is_fp8 = difference(out, wanted), kind == "FP8"
            if diff >= (9e-4 if is_fp8 else 1e-5):
                raise AssertionError(f"Error: diff={diff}, dispatch_use_fp8={is_fp8}, zero_copy={zero_copy}")


def main(place, buffer, args) -> None:
    exchange = Exchange(place, buffer, args)
    place.say(f"Allocating buffer size: {args.num_experts * args.tokens * args.width * 2 / 1e6} MB ...")
    check_all_cases(exchange, Fault(place, args))
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
