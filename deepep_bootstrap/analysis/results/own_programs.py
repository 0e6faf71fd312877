"""Figures and verdicts of our own programs (env/programs: nccl, pairs, smoke), from their lines.

Only the first node's program prints figures; the others say that they failed, and of nccl that they
passed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median

from deepep_bootstrap.analysis.results.model import Operation, Spread, Tested

NUMBER = r"(\d{1,12}(?:\.\d{1,6})?)"
SAID = re.compile(r"\[(nccl|pairs|smoke)\] (.*)")
JOB = re.compile(
    r"deepep: (?:(nccl|pairs|smoke) test of (\S+): \S+(.*)|(nccl|pairs|smoke)\.py ended with exit code (\d{1,6}))"
)
SETUP = {
    "nccl": re.compile(
        r"(?P<num_nodes>\d{1,4}) nodes? x (?P<num_processes>\d{1,4}) ranks?, (?P<library>NCCL \S+|gloo), torch "
        r"(?P<torch>\S+)"
    ),
    "pairs": re.compile(
        r"(?P<num_nodes>\d{1,4}) nodes x (?P<num_processes>\d{1,4}) GPUs?, \d{1,4} rounds?, "
        r"(?P<message_bytes>\d{1,12}) bytes a message"
    ),
    "smoke": re.compile(
        r"deep_ep (?P<deep_ep>\S*) of .*, torch (?P<torch>\S+): (?P<buffer>\w+) on (?P<num_processes>\d{1,4}) GPUs"
    ),
}
PASSED = {
    "nccl": re.compile(r"passed"),
    "pairs": re.compile(r"passed: \d{1,9} pairs? in (?:1 round|\d{1,9} rounds)"),
    "smoke": re.compile(r"passed in \d{1,9}\.\d s"),
}
COLLECTIVE = re.compile(
    rf"(?:best )?(all_reduce|all_to_all) (\d{{1,15}}) bytes: {NUMBER} GB/s \(algorithm\), {NUMBER} GB/s \(bus\), "
    rf"{NUMBER} us"
)
PAIR = re.compile(rf"round \d{{1,4}}: (\S+ \S+) (?:{NUMBER} GB/s(?: \(by GPU: ([\d., none]*)\))?|no answer)")
MEDIAN = re.compile(rf"median {NUMBER} GB/s a GPU; a link is slow below {NUMBER} GB/s")
RIGHT = re.compile(r"(dispatch|combine): right on rank 0")
WRONG = re.compile(r"rank \d{1,6}: (?:(all_reduce|all_to_all) (\d{1,15}) bytes|(dispatch|combine)): .+")
FAULT = re.compile(r"(?:failed|slow|no answer|absent): .+|round \d{1,4}: \S+ \S+: .+")

ERRORS_MAX = 20
"""Errors that are kept of one test, as of upstream's."""


@dataclass
class _Run:
    """What one log says of one run of a program."""

    kind: str
    log: str
    line: int
    module: str = ""
    config: dict[str, int | float | str] = field(default_factory=dict)
    rates: dict[tuple[str, int], float] = field(default_factory=dict)
    pairs: dict[str, float | None] = field(default_factory=dict)
    gpus: list[float] = field(default_factory=list)
    median: float | None = None
    right: set[str] = field(default_factory=set)
    wrong: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    headers: int = 0
    codes: list[int] = field(default_factory=list)
    is_set_up: bool = False
    passed: bool = False
    failed: bool = False

    @property
    def content(self) -> int:
        """Return how much it says: the log that says most is the first node's."""
        return self.is_set_up + len(self.rates) + len(self.pairs) + len(self.right)

    def take(self, text: str) -> None:
        """Collect what a line of the program says."""
        if found := SETUP[self.kind].fullmatch(text):
            self.is_set_up = True
            self.config |= {
                name: int(value) if value.isdecimal() else value for name, value in found.groupdict().items()
            }
        elif found := COLLECTIVE.fullmatch(text):
            self.rates[found[1], int(found[2])] = float(found[4])
            self.right.add(f"{found[1]} {found[2]}")
        elif found := PAIR.fullmatch(text):
            self._take_pair(found[1], found[2], found[3])
        elif found := MEDIAN.fullmatch(text):
            self.median = float(found[1])
        elif found := RIGHT.fullmatch(text):
            self.right.add(found[1])
        elif PASSED[self.kind].fullmatch(text):
            self.passed = True
        else:
            self._take_fault(text)

    def _take_pair(self, names: str, together: str | None, by_gpu: str | None) -> None:
        """Collect the rate of a pair, and of each GPU: they are printed one by one only where they differ much."""
        self.pairs[names] = None if together is None else float(together)
        gpus = self.config.get("num_processes")
        if by_gpu is not None:
            self.gpus += map(float, re.findall(NUMBER, by_gpu))
        elif together is not None and isinstance(gpus, int) and gpus:
            self.gpus.append(float(together) / gpus)

    def _take_fault(self, text: str) -> None:
        found = WRONG.fullmatch(text)
        if found:
            self.wrong.add(found[3] or f"{found[1]} {found[2]}")
        self.failed = self.failed or text == "failed" or text.startswith("failed: ")
        if found or FAULT.fullmatch(text):
            self.errors.append(text)

    def operations(self) -> dict[str, Operation]:
        """Return the fastest size of each collective operation, or the rates of all pairs."""
        found = {}
        for name in dict.fromkeys(operation for operation, _ in self.rates):
            rate, size = max((rate, size) for (operation, size), rate in self.rates.items() if operation == name)
            found[name] = Operation(bus_gbs=Spread(rate, rate, rate), bytes=size)
        if self.gpus:
            message = self.config.get("message_bytes")
            middle = median(self.gpus) if self.median is None else self.median
            spread = Spread(min(*self.gpus, middle), middle, max(*self.gpus, middle))
            found["pair"] = Operation(gpu_gbs=spread, bytes=message if isinstance(message, int) else None)
        return found


def read_own_programs(logs: Mapping[str, str]) -> tuple[Tested, ...]:
    """Return the runs of our programs that the logs of one run's folder (or one log) tell of; texts by name."""
    told = [runs for name, text in logs.items() if (runs := list(_runs(name, text)))]
    found = []
    for kind in SETUP:
        same = [[run for run in runs if run.kind == kind] for runs in told]
        for sides in zip_longest(*same):
            known = [side for side in sides if side is not None]
            if any(side.content or side.headers or side.failed for side in known):
                found.append(_tested(known))
    return tuple(found)


def _runs(name: str, text: str) -> Iterator[_Run]:
    """Yield what one log says of each run, in its order."""
    now: dict[str, _Run] = {}
    if not any(f"[{kind}] " in text or f"deepep: {kind} test of" in text for kind in SETUP):
        return
    for number, line in enumerate(text.split("\n"), 1):
        job = JOB.search(line) if "deepep: " in line else None
        said = SAID.search(line) if "] " in line else None
        if not (job or said):
            continue
        kind = said[1] if said else job[1] or job[4] if job else ""
        run = now.get(kind)
        words = said[2].strip() if said else ""
        if run is None or _begins(run, words, is_header=bool(job and job[1])):
            if run is not None:
                yield run
            run = now[kind] = _Run(kind, name, number)
        if said:
            run.take(words)
        elif job and job[1]:
            run.headers, run.module = run.headers + 1, job[2]
            if "gloo" in job[3]:
                run.config["library"] = "gloo"
        elif job:
            run.codes.append(int(job[5]))
    yield from now.values()


def _begins(run: _Run, words: str, *, is_header: bool) -> bool:
    """Return whether a line belongs to the next run of its kind."""
    if is_header:
        return bool(run.content) and len(run.codes) >= run.headers
    return run.is_set_up and SETUP[run.kind].fullmatch(words) is not None


def _tested(sides: Iterable[_Run]) -> Tested:
    """Return one run as all its logs tell it: figures by the log that says most, faults by all."""
    known = list(sides)
    main = max(known, key=lambda side: (side.content, side.passed))
    failed = any(side.failed or any(side.codes) for side in known)
    ended = (main.passed or failed) and all(len(side.codes) >= side.headers for side in known)
    config = {key: value for side in known for key, value in side.config.items()}
    wrong = {name for side in known for name in side.wrong} | {
        pair for pair, rate in main.pairs.items() if rate is None
    }
    right = (main.right | main.pairs.keys()) - wrong
    errors = [error for side in known for error in side.errors] or [
        f"{main.kind}.py ended with exit code {code}" for side in known for code in side.codes if code
    ]
    module = next((side.module for side in known if side.module), "")
    return Tested(
        test=main.kind,
        generation="v2" if re.search(r"(?:^|/)deepep/2\.", module) or config.get("buffer") == "ElasticBuffer" else "v1",
        ok=ended and not failed and not wrong,
        ended=ended,
        passed=len(right),
        failed=len(wrong),
        config=config,
        operations=main.operations(),
        errors=tuple(dict.fromkeys(errors))[:ERRORS_MAX],
        log=main.log,
        line=main.line,
    )
