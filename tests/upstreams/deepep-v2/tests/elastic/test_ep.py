"""Dispatch and combine of V2 among all ranks (CPU stand-in)."""

import sys

from utils import Exchange, bench, launch, options

FIRST = "--test-first-only"
PAYLOADS = [("FP8", "x"), ("BF16", "x"), ("BF16", "constant")]
WIDTH = {"FP8": 1, "BF16": 2}


def main(place, buffer, args) -> None:
    exchange = Exchange(place, buffer, args)
    for kind, which in PAYLOADS[:1] if args.first else PAYLOADS:
        exchange.run_case(kind, which, with_topk=True)
        place.say(f"[testing] {kind} {which} ... passed")
    volume = exchange.bytes_sent * WIDTH["FP8"]
    seconds = bench(lambda: exchange.send(exchange.own.x, "FP8"))[0]
    rate = volume / seconds / 1e9
    words = f"{rate:.3f} GB/s (SO), {rate:.3f} GB/s (SU), {seconds * 1e6:.1f} us, {volume} bytes"
    place.say(f"EP: {place.rank}/{place.ranks} | dispatch: {words}")


if __name__ == "__main__":
    first = FIRST in sys.argv
    sys.argv = [word for word in sys.argv if word != FIRST]
    given = options("test_ep", num_processes=8, num_tokens=4096, hidden=7168, num_topk=6, num_experts=256)
    given.first = first
    sys.exit(launch(given, main))
