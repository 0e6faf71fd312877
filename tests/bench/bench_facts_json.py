"""Facts of many hosts as the values of `invoke facts`'s JSON document, `dataclasses.asdict` against msgspec, in one
run. Read the ratio, not the milliseconds.

python tests/bench/bench_facts_json.py [HOSTS] [ROUNDS]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent)]

from deepep_bootstrap.inventory.facts import Facts, facts_json, parse_facts, read_facts_json

RECORDED = HERE.parent / "cases" / "inventory" / "facts" / "parse"


def recorded(count: int) -> dict[str, Facts]:
    """Return the facts of `count` hosts: the recorded answers of real and drawn machines, again and again."""
    answers = [path.read_text(encoding="utf-8") for path in sorted(RECORDED.glob("*.txt"))]
    return {f"gpu-{number:03}": parse_facts(answers[number % len(answers)], "host") for number in range(count)}


def by_asdict(facts: Mapping[str, Facts]) -> object:
    """Return what `invoke facts` printed before msgspec."""
    return {name: asdict(each) for name, each in facts.items()}


def median_ms(call: Callable[[], object], rounds: int) -> float:
    """Return the middle of the CPU times of `rounds` calls, in ms."""
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        call()
        times.append((time.process_time() - begin) * 1000)
    return statistics.median(times)


def main(count: int, rounds: int) -> None:
    """Compare both ways for `count` hosts; stop where their documents are not equal to the byte."""
    facts = recorded(count)
    text = json.dumps(by_asdict(facts), indent=2)
    if json.dumps(facts_json(facts), indent=2) != text:
        raise SystemExit("the two documents differ")
    document = f'{{"schema": 1, "hosts": {text}}}'
    if read_facts_json(document, "document") != facts:
        raise SystemExit("the document does not read back")
    before = median_ms(lambda: by_asdict(facts), rounds)
    after = median_ms(lambda: facts_json(facts), rounds)
    parsed = median_ms(lambda: json.loads(document), rounds)
    back = median_ms(lambda: read_facts_json(document, "document"), rounds)
    print(f"{count} hosts, {len(text) / 1e6:.1f} MB, median of {rounds}")
    print(f"to JSON values: asdict {before:.1f} ms, msgspec {after:.1f} ms: {before / after:.1f} times as fast")
    print(f"from text: json.loads alone {parsed:.1f} ms, read and checked by msgspec {back:.1f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 128, int(sys.argv[2]) if len(sys.argv) > 2 else 5)
