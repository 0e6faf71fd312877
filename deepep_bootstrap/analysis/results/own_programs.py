"""Figures and verdicts of our own programs (env/programs: nccl, pairs, smoke), from their lines.

Only the first node's program prints figures; the others say that they failed, and of nccl that they
passed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from statistics import median

from msgspec import Struct, field

from deepep_bootstrap.analysis.results.model import Operation, Spread, Tested

NUMBER = r"(\d{1,12}(?:\.\d{1,6})?)"
PROGRAM = r"nccl|pairs|smoke"
OUTPUT = re.compile(rf"\[(?P<kind>{PROGRAM})\] (?P<text>.*)")
BEGIN = rf"(?P<begun>{PROGRAM}) test of (?P<module>\S+): \S+(?P<args>.*)"
END = rf"(?P<ended>{PROGRAM})\.py ended with exit code (?P<code>\d{{1,6}})"
JOB = re.compile(f"deepep: (?:{BEGIN}|{END})")
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
PAIR = re.compile(
    rf"round \d{{1,4}}(?:, GPU (\+\d{{1,3}}))?: (\S+ \S+) (?:{NUMBER} GB/s(?: \(by GPU: ([\d., none]*)\))?|no answer)"
)
MEDIAN = re.compile(rf"median {NUMBER} GB/s a GPU; a link is slow below {NUMBER} GB/s")
RIGHT = re.compile(r"(dispatch|combine): right on rank 0")
WRONG = re.compile(r"rank \d{1,6}: (?:(all_reduce|all_to_all) (\d{1,15}) bytes|(dispatch|combine)): .+")
FAULT = re.compile(r"(?:failed|slow|no answer|absent): .+|round \d{1,4}(?:, GPU \+\d{1,3})?: \S+ \S+: .+")

ERRORS_MAX = 20
"""Errors that are kept of one test, as of upstream's."""


class _Line(Struct, frozen=True):
    """One line about a program: `text` is what the program printed; a header of its job has the `module` and the
    words for the program (`args`), and the last line of its job has the exit `code`."""

    kind: str
    text: str | None = None
    is_header: bool = False
    module: str = ""
    args: str = ""
    code: int | None = None


def _generation(module: str, buffer: str) -> str:
    """Return the generation of DeepEP by the name of its module or of the buffer that the smoke test used."""
    if re.search(r"(?:^|/)deepep/2\.(?:[5-9]|\d\d)", module) or buffer == "EPBuffer":
        return "v2.5"
    return "v2" if re.search(r"(?:^|/)deepep/2\.", module) or buffer == "ElasticBuffer" else "v1"


def _line(line: str) -> _Line | None:
    """Return what a line of a log says about a program of ours, None for other lines."""
    job = JOB.search(line) if "deepep: " in line else None
    output = OUTPUT.search(line) if "] " in line else None
    is_header = job is not None and job["begun"] is not None
    if output:
        return _Line(output["kind"], text=output["text"].strip(), is_header=is_header)
    if job is None:
        return None
    if is_header:
        return _Line(job["begun"], is_header=True, module=job["module"], args=job["args"])
    return _Line(job["ended"], code=int(job["code"]))


class _Run(Struct):
    """One run of a program as one log has it."""

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

    def begins_anew(self, line: _Line) -> bool:
        """Return whether a line belongs to the next run of the program."""
        if line.is_header:
            return bool(self.content) and len(self.codes) >= self.headers
        return self.is_set_up and SETUP[self.kind].fullmatch(line.text or "") is not None

    def take(self, line: _Line) -> None:
        """Collect what a line says."""
        if line.text is not None:
            self._take_output(line.text)
        elif line.is_header:
            self.headers, self.module = self.headers + 1, line.module
            if "gloo" in line.args:
                self.config["library"] = "gloo"
        elif line.code is not None:
            self.codes.append(line.code)

    def _take_output(self, text: str) -> None:
        if found := SETUP[self.kind].fullmatch(text):
            self.is_set_up = True
            self.config |= {
                name: int(value) if value.isdecimal() else value for name, value in found.groupdict().items()
            }
        elif found := COLLECTIVE.fullmatch(text):
            self.rates[found[1], int(found[2])] = float(found[4])
            self.right.add(f"{found[1]} {found[2]}")
        elif found := PAIR.fullmatch(text):
            self._take_pair(f"{found[2]} {found[1] or ''}".rstrip(), found[3], found[4])
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
    """Return the runs of our programs in the logs of one run's folder (or in one log); texts by name."""
    by_log = [list(_runs(name, text)) for name, text in logs.items()]
    bundles = [bundle for kind in SETUP for bundle in _bundles(by_log, kind)]
    return tuple(_tested(bundle) for bundle in bundles if any(map(_has_begun, bundle)))


def _bundles(by_log: Iterable[Iterable[_Run]], kind: str) -> Iterator[list[_Run]]:
    """Yield the first run of a program in every log, the second one, and so on."""
    of_kind = [[run for run in runs if run.kind == kind] for runs in by_log]
    for bundle in zip_longest(*of_kind):
        yield [run for run in bundle if run is not None]


def _has_begun(run: _Run) -> bool:
    return bool(run.content or run.headers or run.failed)


def _runs(name: str, text: str) -> Iterator[_Run]:
    """Yield each run in one log, in the log's order."""
    if not any(f"[{kind}] " in text or f"deepep: {kind} test of" in text for kind in SETUP):
        return
    open_runs: dict[str, _Run] = {}
    for number, content in enumerate(text.split("\n"), 1):
        line = _line(content)
        if line is None:
            continue
        run = open_runs.get(line.kind)
        if run is not None and run.begins_anew(line):
            yield run
            run = None
        if run is None:
            run = open_runs[line.kind] = _Run(line.kind, name, number)
        run.take(line)
    yield from open_runs.values()


def _tested(runs: Sequence[_Run]) -> Tested:
    """Return one run from all its logs: figures of the log that says most, faults of all."""
    main = max(runs, key=lambda run: (run.content, run.passed))
    failed = any(run.failed or any(run.codes) for run in runs)
    ended = (main.passed or failed) and all(len(run.codes) >= run.headers for run in runs)
    config = {key: value for run in runs for key, value in run.config.items()}
    wrong = {name for run in runs for name in run.wrong} | {pair for pair, rate in main.pairs.items() if rate is None}
    right = (main.right | main.pairs.keys()) - wrong
    errors = [error for run in runs for error in run.errors] or [
        f"{main.kind}.py ended with exit code {code}" for run in runs for code in run.codes if code
    ]
    module = next((run.module for run in runs if run.module), "")
    return Tested(
        test=main.kind,
        generation=_generation(module, str(config.get("buffer"))),
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
