"""Tests read from all their logs together: figures, missing ranks, passed cases, and a verdict on their end.

Upstream's tests print no last line of their own, so each kind has its own sign of the end. A log that was cut
anywhere must not look whole; where a job of ours ran the test, its exit code has to be there too.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.analysis.results import collectors, own_programs
from deepep_bootstrap.analysis.results.collectors import (
    LOW,
    LogSection,
    NodeOutput,
    PassRun,
    join_runs,
    judge,
    sections,
)
from deepep_bootstrap.analysis.results.model import (
    LAYOUT,
    LOW_LATENCY_PARTS,
    OPERATIONS,
    Best,
    LowLatency,
    Operation,
    Pass,
    Tested,
)
from deepep_bootstrap.analysis.results.scanner import tokens

RUN_LOG = re.compile(r"(?:(?P<job>job)|node-(?P<node>\d{1,4})-.*|rank-(?P<rank>\d{1,4}))\.log")
"""Files of a run's folder (see testing.run_folder)."""

SIDES = ("log", "node", "job", "rank")
"""Where a section can come from: a log of its own, or one side of a run's folder; in the order in which they count for
where a test begins."""

OPERATION = re.compile(r"(?:(?:expanded|cached|reduced)_)?(?:dispatch|combine)(?=_su_gbs$)")
OF_V25 = re.compile(r"(?:^|/)deepep/2\.(?:[5-9]|\d\d)|(?:^|[ /])ep/test_ep\.py")
"""A module or a script of DeepEP V2.5."""

ERRORS_MAX = 20
"""Errors that are kept of one test: when one rank fails, hundreds have one."""

LOCAL_RANKS = 8
"""Ranks of a node where nobody says it: upstream's default for `--num-processes`."""

NUM_PROCESSES = re.compile(r"--num-processes[= ]'?(\d{1,4})\b")

WORLD_MAX = 4096
"""More ranks are no world but a misread number; DeepEP's own limits are far below."""

LAST_CASE = re.compile(
    r"(?:do_handle_copy=0, )?expert_alignment=1, use_fp8_dispatch=0, num_bias=2, with_previous_event=1, "
    r"async_with_compute_stream=1, allocate_on_comm_stream=1"
)
"""The last of all combinations that V2's test goes through."""

LOW_WORDS = {"both": "dispatch + combine bandwidth", "each": "bandwidth of each alone", "halves": "send/recv times"}


class Source(Struct, frozen=True):
    """A section with its origin: one of SIDES, and the number of its node or rank."""

    side: str
    number: int
    section: LogSection


class _Log(Struct, frozen=True):
    """One log: its origin, as of a `Source`, and its sections."""

    side: str
    number: int
    sections: Sequence[LogSection]


def read_logs(logs: Mapping[str, str]) -> tuple[Tested, ...]:
    """Return the tests in logs, in the order of the logs, those of our own programs last; nothing for a log without
    any.

    `logs` are texts by name. Names that a run's folder has (`job.log`, `node-0-HOST.log`, `rank-3.log`) are sides of
    one test where their folder is the same; so are logs whose ranks complete each other.
    """
    bundles: list[list[Source]] = []
    of_programs: list[Tested] = []
    for names in _folders(logs):
        bundles += _aligned([_read_log(name, logs[name]) for name in names])
        of_programs += own_programs.read_own_programs({name: logs[name] for name in names})
    tests = [_tested(bundle) for bundle in _completed(bundles) if any(map(_is_test, bundle))]
    return (*tests, *of_programs)


def _folders(names: Iterable[str]) -> list[list[str]]:
    """Return the logs of each run's folder together, any other log alone."""
    folders: dict[str, list[str]] = {}
    for name in names:
        is_of_run = RUN_LOG.fullmatch(posixpath.basename(name)) is not None
        folders.setdefault(f"{posixpath.dirname(name)}/" if is_of_run else name, []).append(name)
    return list(folders.values())


def _read_log(name: str, text: str) -> _Log:
    found = RUN_LOG.fullmatch(posixpath.basename(name))
    side = (found.lastgroup or "log") if found else "log"
    number = int(found[side]) if found and side != "job" else 0
    return _Log(side, number, sections(name, tokens(text)))


def _aligned(logs: Sequence[_Log]) -> Iterator[list[Source]]:
    """Yield the first tests of all logs of a run, the second ones, and so on."""
    nodes = max((log.number + 1 for log in logs if log.side == "node"), default=0)
    bundle: list[Source] = []
    for index in range(max((len(log.sections) for log in logs), default=0)):
        bundle = [Source(log.side, log.number, log.sections[index]) for log in logs if index < len(log.sections)]
        bundle += _without_pass(bundle, logs, index)
        bundle += _empty_job(bundle, logs)
        for source in bundle:
            section = source.section
            section.nodes = max(section.nodes, nodes)
            if source.side == "job" and not section.goes_on:
                section.headers = max(section.headers, 1)
        yield bundle
    yield from _unbegun(bundle)


def _empty_job(bundle: Sequence[Source], logs: Sequence[_Log]) -> list[Source]:
    """Return an empty section for a job whose own log is there and does not even have its first line."""
    if any(source.side == "job" for source in bundle) or not any(log.side == "job" for log in logs):
        return []
    return [Source("job", 0, LogSection("job.log", 1))]


def _without_pass(bundle: Sequence[Source], logs: Sequence[_Log], index: int) -> list[Source]:
    """Return an empty section for every log, but for those of ranks, that says nothing of the pass that others have:
    it was cut off."""
    pass_run = next((source.section.pass_run for source in bundle if source.section.pass_run), None)
    if pass_run is None:
        return []
    return [
        Source(log.side, log.number, _empty_pass(bundle[0].section.log, 1, pass_run, pass_run.number))
        for log in logs
        if log.side != "rank" and len(log.sections) <= index
    ]


def _unbegun(bundle: Sequence[Source]) -> Iterator[list[Source]]:
    """Yield the pass that should have followed the last one of the logs, and did not begin: nothing where that one
    failed."""
    pass_run = join_runs(source.section.pass_run for source in bundle)
    if pass_run is None or pass_run.is_last:
        return
    if any(pass_run.ended.values()) or any(code for source in bundle for code in source.section.codes):
        return
    first = bundle[0]
    section = _empty_pass(first.section.log, first.section.line, pass_run, pass_run.number + 1)
    yield [Source(first.side, first.number, section)]


def _empty_pass(log: str, line: int, pass_run: PassRun, number: int) -> LogSection:
    return LogSection(log, line, "low-latency", pass_run=PassRun(number, pass_run.of))


def _completed(bundles: Iterable[Sequence[Source]]) -> list[Sequence[Source]]:
    """Return tests with those that lack rank 0 added to the test that has it: logs of several nodes under any names."""
    tests = dict(enumerate(bundles))
    for index, bundle in list(tests.items()):
        ranks = _ranks(bundle)
        if not ranks or 0 in ranks:
            continue
        target = next((place for place, other in tests.items() if _completes(bundle, other)), None)
        if target is not None:
            test = tests[target]
            tests[target] = [*test, *(replace(source, side="node", number=len(test)) for source in bundle)]
            del tests[index]
    return list(tests.values())


def _completes(bundle: Sequence[Source], other: Sequence[Source]) -> bool:
    """Return whether a bundle without rank 0 has ranks that a test with rank 0 lacks, and both can be one test."""
    others = _ranks(other)
    if 0 not in others or others & _ranks(bundle):
        return False
    return _kind(other) == _kind(bundle) and _pass_number(other) == _pass_number(bundle)


def _ranks(bundle: Iterable[Source]) -> set[int]:
    return {rank for source in bundle for rank in source.section.figures}


def _pass_number(bundle: Iterable[Source]) -> int | None:
    pass_run = join_runs(source.section.pass_run for source in bundle)
    return None if pass_run is None else pass_run.number


def _is_test(source: Source) -> bool:
    return source.section.kind not in {"", "other"}


def _kind(bundle: Iterable[Source]) -> str:
    """Return the kind of a test: what the job said it was, else what its lines look like."""
    tests = sorted(filter(_is_test, bundle), key=lambda source: not source.section.header)
    return tests[0].section.kind if tests else ""


def _tested(bundle: Sequence[Source]) -> Tested:
    output = _TestOutput.of(bundle)
    end = completion(output)
    errors = tuple(dict.fromkeys(text for section in output.sections for text, _ in section.errors))
    figures = _own_figures(output)
    ranks = judge(figures, end.lacking)
    is_whole = end.ended and not end.failed and not any(rank.state == "missing" for rank in ranks)
    has_cases = bool(end.passed) or output.kind in {"low-latency", "ep"}
    first = min(bundle, key=lambda source: (not source.section.content, SIDES.index(source.side), source.number))
    return Tested(
        test=output.kind,
        generation=_generation(output),
        ok=is_whole and has_cases and (output.exit_code == 0 or not errors),
        ended=end.ended,
        passed=end.passed,
        failed=end.failed,
        config=_config(output),
        best=_best(output),
        low_latency=_low_latency(figures) if output.kind != "ep" else None,
        operations=_operations(figures) if output.kind == "ep" else _layout(output),
        ranks=ranks,
        sweep=tuple(output.main.sweep.points()) if output.main else (),
        errors=errors[:ERRORS_MAX],
        log=first.section.log,
        line=first.section.line,
        test_pass=_pass(output.pass_run),
    )


def _pass(run: PassRun | None) -> Pass | None:
    return None if run is None else Pass(run.number, run.tokens, run.runs, run.passed, run.passed * run.calls)


def _generation(output: _TestOutput) -> str:
    """Return v2 where the test is V2's, or its module or path is: V2 keeps V1's tests as its legacy ones. V2.5 prints
    what V2 does, so that only a job's own first line tells it."""
    if any(OF_V25.search(f"{section.module} {section.script}") for section in output.sections):
        return "v2.5"
    legacy = any(
        "/legacy/" in section.script or re.search(r"(?:^|/)deepep/2\.", section.module) for section in output.sections
    )
    return "v2" if output.kind == "ep" or legacy else "v1"


def _config(output: _TestOutput) -> dict[str, int | float | str]:
    found: dict[str, int | float | str] = {}
    for section in output.sections:
        found = {**section.config, **found}
    if output.kind == "ep" and output.size.world:
        found["num_ranks"] = output.size.world
    return found


def _best(output: _TestOutput) -> dict[str, Best]:
    """Return the best setting of each operation as the first node found it, which is the one that upstream itself
    goes on with."""
    if output.main is None or output.kind not in {"intranode", "internode"}:
        return {}
    return {name: found[0] for name, found in output.main.best.items()}


def _own_figures(output: _TestOutput) -> dict[int, dict[str, float]]:
    """Return each rank's figures, the middle one of those it printed again and again; of V2 those of cases with the
    same kind of data as the first one (FP8 unless it was told otherwise), since others are no measure of the same
    thing."""
    if output.kind not in {"ep", "low-latency"} and len(output.by_node) > 1:
        return {node * output.size.local: _best_figures(own) for node, own in output.by_node.items()}
    alike = _alike(output.main)
    return {
        rank: {name: _middle(values, alike) for name, values in own.items()} for rank, own in output.figures.items()
    }


def _best_figures(output: NodeOutput) -> dict[str, float]:
    """Return the figures of a node's best settings."""
    figures: dict[str, float | None] = {}
    for name, found in output.best.items():
        best = found[0]
        figures |= {f"{name}_nvl_gbs": best.nvl_gbs, f"{name}_rdma_gbs": best.rdma_gbs, f"{name}_us": best.us}
    return {name: value for name, value in figures.items() if value is not None}


def _alike(output: NodeOutput | None) -> tuple[bool, ...]:
    """Return for each of V2's cases whether it sends the same kind of data as the first."""
    if output is None:
        return ()
    kinds = [re.findall(r"use_fp8_dispatch=(\d)", case) for case in output.ep_cases[:: output.copies]]
    return tuple(kind == kinds[0] for kind in kinds)


def _middle(values: Sequence[float], alike: Sequence[bool]) -> float:
    same = [value for value, is_alike in zip(values, alike, strict=False) if is_alike]
    return collectors.middle(same or values)


def _low_latency(figures: Mapping[int, Mapping[str, float]]) -> LowLatency | None:
    spread, middle = collectors.spread, collectors.median_of
    if not any("dispatch_combine_gbs" in own or "dispatch_gbs" in own for own in figures.values()):
        return None
    return LowLatency(
        dispatch_combine_gbs=spread(figures, "dispatch_combine_gbs"),
        dispatch_us=middle(figures, "dispatch_us"),
        combine_us=middle(figures, "combine_us"),
        dispatch_gbs=spread(figures, "dispatch_gbs"),
        combine_gbs=spread(figures, "combine_gbs"),
        **{name: middle(figures, name) for name in LOW_LATENCY_PARTS},
    )


def _layout(output: _TestOutput) -> dict[str, Operation]:
    """Return how long the layout kernel of V1's tests took on the nodes that said it: it counts which token goes where,
    before anything is sent."""
    times = [time for section in output.sections for time in section.layouts]
    spread = collectors.spread({place: {"us": time} for place, time in enumerate(times)}, "us")
    return {LAYOUT: Operation(us=spread)} if spread else {}


def _operations(figures: Mapping[int, Mapping[str, float]]) -> dict[str, Operation]:
    """Return V2's operations in the order in which the first rank tried them; `bytes` are the first rank's."""
    names = dict.fromkeys(found[0] for own in figures.values() for name in own if (found := OPERATION.match(name)))
    first = figures[min(figures)] if figures else {}
    return {
        name: Operation(
            so_gbs=collectors.spread(figures, f"{name}_so_gbs"),
            su_gbs=collectors.spread(figures, f"{name}_su_gbs"),
            us=collectors.spread(figures, f"{name}_us"),
            bytes=int(first[f"{name}_bytes"]) if f"{name}_bytes" in first else None,
        )
        for name in names
    }


class _TestSize(Struct, frozen=True):
    """How large a test was: nodes and ranks as far as anything says (0: nothing does), ranks of a node, and which
    ranks print. `endless`: it has no end of its own; `exited_ok`: exit codes are there, and all are 0."""

    nodes: int
    local: int
    world: int
    printing: range
    endless: bool
    exited_ok: bool

    @classmethod
    def of(cls, kind: str, sections: Sequence[LogSection], figures: Iterable[int]) -> _TestSize:
        """Return the size of a test with the ranks of `figures`."""
        ranks = set(figures)
        nodes = 1 if kind == "intranode" else max(max(section.nodes, section.allocations) for section in sections)
        seen = max((rank for rank in ranks if rank < WORLD_MAX), default=-1) + 1
        stated = min(max(section.world for section in sections), WORLD_MAX)
        local = _local_ranks(sections, nodes, seen, stated)
        guessed = max(seen, nodes * local) if ranks else 0
        world = min(stated or guessed, WORLD_MAX)
        codes = [code for section in sections for code in section.codes]
        exited_ok = bool(codes) and not any(codes)
        only_first_ranks = exited_ok and bool(stated) and all(rank % local == 0 for rank in ranks)
        seeded = kind == "low-latency" and any(section.seeds for section in sections)
        endless = seeded or any(section.endless for section in sections)
        return cls(nodes, local, world, range(0, world, local if only_first_ranks else 1), endless, exited_ok)


def _local_ranks(sections: Sequence[LogSection], nodes: int, seen: int, stated: int) -> int:
    """Return how many ranks a node has: by the words for the script, by the number of ranks that they themselves
    state, else by the ranks that were seen."""
    words = (NUM_PROCESSES.search(section.args) for section in sections)
    processes = next((int(found[1]) for found in words if found), 0)
    if processes:
        return processes
    if stated:
        return (stated // nodes if nodes else min(stated, LOCAL_RANKS)) or LOCAL_RANKS
    if not seen or any(section.header for section in sections):
        return LOCAL_RANKS
    return _usual(-(-seen // max(nodes, 1)))


def _usual(seen: int) -> int:
    """Return how many ranks a node (or hosts together) has of which so many were seen: 1, 2, 4, 8 or whole nodes of 8.

    The last rank may be the silent one; a test on another number of ranks needs our header to be believed whole."""
    return next((size for size in (1, 2, 4) if seen <= size), -(-seen // LOCAL_RANKS) * LOCAL_RANKS)


class _TestOutput(Struct, frozen=True):
    """All logs of one test together: the output of each node that can be told apart, the figures of each rank, and
    the pass that it is, of a test that has passes."""

    kind: str
    sources: Sequence[Source]
    by_node: Mapping[int, NodeOutput]
    figures: Mapping[int, Mapping[str, Sequence[float]]]
    size: _TestSize
    pass_run: PassRun | None

    @classmethod
    def of(cls, sources: Sequence[Source]) -> _TestOutput:
        """Return what the logs of one test hold together."""
        kind = _kind(sources)
        found = [source.section for source in sources]
        figures = _figures(found)
        pass_run = join_runs(section.pass_run for section in found)
        return cls(kind, sources, _by_node(sources), figures, _TestSize.of(kind, found, figures), pass_run)

    @property
    def sections(self) -> list[LogSection]:
        """Return the sections of all logs."""
        return [source.section for source in self.sources]

    @property
    def main(self) -> NodeOutput | None:
        """Return the output of the first node."""
        return self.by_node[min(self.by_node)] if self.by_node else None

    @property
    def exit_code(self) -> int | None:
        """Return the worst exit code, None where there is none."""
        codes = [code for section in self.sections for code in section.codes]
        codes += self.pass_run.ended.values() if self.pass_run else ()
        return max(codes, default=None)

    @property
    def ep_cases(self) -> int:
        """Return how many cases V2's test began."""
        return max((-(-len(output.ep_cases) // output.copies) for output in self.by_node.values()), default=0)


def _by_node(sources: Iterable[Source]) -> dict[int, NodeOutput]:
    """Return the output of each node: from the nodes' own logs, else told apart by labels, else from logs of ranks."""
    found: dict[str, dict[int, NodeOutput]] = {"node": {}, "log": {}, "rank": {}}
    for source in sources:
        has_number = source.side in {"node", "rank"}
        own = found["log" if source.side == "job" else source.side]
        for label, output in sorted(source.section.outputs.items(), reverse=True):
            if output.configs or output.busy:
                own.setdefault(source.number if has_number else int(label or 0), output)
    return found["node"] or found["log"] or found["rank"]


def _figures(sections: Iterable[LogSection]) -> dict[int, dict[str, list[float]]]:
    """Return the ranks' figures out of all logs; where several have them, the one that has most counts, since it is
    the same text."""
    found: dict[int, dict[str, list[float]]] = {}
    for section in sections:
        for rank, own in section.figures.items():
            known = found.setdefault(rank, {})
            for name, values in own.items():
                if len(values) > len(known.get(name, ())):
                    known[name] = values
    return found


class Completion(Struct, frozen=True):
    """How far a test came: whether it reached its end, the ranks that are not whole with the reason of each, and the
    numbers of its cases."""

    ended: bool
    lacking: Mapping[int, str]
    passed: int
    failed: int


def completion(output: _TestOutput) -> Completion:
    """Return how far a test came by all its logs."""
    lacking = _lacking_ranks(output) | _silent_nodes(output)
    ended = _has_ended(output, is_whole=not lacking and _is_whole(output) and _is_pass_whole(output))
    passed = [node.passed // node.copies for node in output.by_node.values()]
    opened = [-(-node.opened // node.copies) for node in output.by_node.values()]
    cases = output.ep_cases
    is_failing = _is_failing(output)
    passed_cases = cases if ended and not is_failing else max(cases - 1, 0)
    unpassed = max(opened, default=0) - min(passed, default=0)
    return Completion(
        ended=ended,
        lacking=lacking if ended else lacking | _with_errors(output, lacking),
        passed=max(passed, default=0) + passed_cases,
        failed=unpassed + min(cases, 1) if is_failing else 0,
    )


def _has_ended(output: _TestOutput, *, is_whole: bool) -> bool:
    """Return whether a test reached its end: an endless one by its exit code alone."""
    code = output.exit_code
    if code not in {None, 0} or any(len(section.codes) < section.headers for section in output.sections):
        return False
    return code == 0 if output.size.endless else is_whole


def _is_failing(output: _TestOutput) -> bool:
    """Return whether a test failed by its exit code, or without one by its errors."""
    code = output.exit_code
    return any(section.errors for section in output.sections) if code is None else code != 0


def _due(pass_run: PassRun | None) -> int:
    """Return how often each rank must have printed its figures: in every run, of a pass that failed in those that
    ended well."""
    if pass_run is None:
        return 0
    return pass_run.passed if any(pass_run.ended.values()) else pass_run.runs


def _is_pass_whole(output: _TestOutput) -> bool:
    """Return whether every log says that all runs of its pass ended well: a node's of its own, any other of all
    nodes. A rank's file says only that they began. A test without passes is whole."""
    if output.pass_run is None:
        return True
    sources = [source for source in output.sources if source.side != "rank"]
    return bool(sources) and all(_has_all_runs(source, output.size.nodes) for source in sources)


def _has_all_runs(source: Source, nodes: int) -> bool:
    pass_run = source.section.pass_run
    return pass_run is not None and pass_run.is_over(1 if source.side == "node" else nodes)


def _lacking_ranks(output: _TestOutput) -> dict[int, str]:
    """Return the ranks that have not printed all they should have, and why; none where no rank printed anything."""
    figures, size = output.figures, output.size
    if not figures:
        return {}
    if size.endless:
        return {rank: "printed no figures" for rank in size.printing if not figures.get(rank)}
    wanted = _wanted_times(output)
    cases = max(output.ep_cases, _due(output.pass_run))
    counts = _most_values(output, wanted, max(cases, 1))
    in_case = f" in case {counts[min(wanted)]}" if wanted and cases > 1 else ""
    found = {}
    for rank in size.printing:
        own = figures.get(rank, {})
        gaps = [words for name, words in wanted.items() if len(own.get(name, ())) < counts[name]]
        if gaps and own:
            found[rank] = f"printed no {', no '.join(gaps)}{in_case}"
        elif gaps:
            found[rank] = "printed no figures"
    return found


def _most_values(output: _TestOutput, names: Iterable[str], least: int) -> dict[str, int]:
    """Return how often the rank that printed each of these figures most did so, `least` where that is more."""
    return {name: max(least, *(len(own.get(name, ())) for own in output.figures.values())) for name in names}


def _wanted_times(output: _TestOutput) -> dict[str, str]:
    """Return the figures that each rank has to print, one of each line, and what people call them."""
    if output.kind != "ep":
        return {names[0]: LOW_WORDS[group] for group, names in LOW.items()}
    names = dict.fromkeys(name for own in output.figures.values() for name in own if name.endswith("_us"))
    return {
        name: name.removesuffix("_us").replace("_", " ")
        for name in names
        if not name.endswith(("_copy_us", "_reduce_us"))
    }


def _silent_nodes(output: _TestOutput) -> dict[int, str]:
    """Return the first ranks of nodes that should have printed what first ranks print, and did not, where nodes can
    be told apart."""
    by_node, size = output.by_node, output.size
    if output.kind not in {"intranode", "internode"} or not by_node:
        return {}
    if any(own.copies > 1 for own in by_node.values()):
        return {}
    silent = [node for node in range(min(size.nodes, WORLD_MAX)) if node not in by_node]
    return {node * size.local: f"its node ({node}) printed nothing" for node in silent}


def _is_whole(output: _TestOutput) -> bool:
    """Return whether everything is there that a test of this kind prints up to its end."""
    by_node = output.by_node
    if output.kind in {"intranode", "internode"}:
        nodes = sum(own.copies for own in by_node.values())
        return bool(by_node) and nodes >= output.size.nodes and all(map(_is_node_whole, by_node.values()))
    if output.kind == "low-latency":
        return bool(output.figures)
    if output.size.exited_ok:
        return bool(output.figures) or any(own.ep_cases for own in by_node.values())
    return _has_all_operations(output) and bool(by_node) and all(map(_has_last_case, by_node.values()))


def _is_node_whole(output: NodeOutput) -> bool:
    """Return whether a node printed all of a test of throughput: its configuration, every case's outcome, three best
    settings."""
    counts = [len(output.best.get(name, ())) for name in OPERATIONS]
    return bool(output.configs) and output.opened == output.passed and min(counts) >= output.copies


def _has_all_operations(output: _TestOutput) -> bool:
    """Return whether V2's test measured its last operation, and both or none of those with expanded data."""
    rates = {name for own in output.figures.values() for name in own if name.endswith("_su_gbs")}
    names = {name.removesuffix("_su_gbs") for name in rates}
    return "combine" in names and ("expanded_dispatch" in names) == ("reduced_combine" in names)


def _has_last_case(output: NodeOutput) -> bool:
    """Return whether a node printed the last case of V2's test, or the empty lines behind it."""
    if output.blanks >= 2 * output.copies:
        return True
    return bool(output.ep_cases) and LAST_CASE.fullmatch(output.ep_cases[-1]) is not None


def _with_errors(output: _TestOutput, lacking: Mapping[int, str]) -> dict[int, str]:
    """Return the ranks of a test without an end that have an error, each with its last one."""
    found = {}
    for rank, text in _rank_errors(output.sources):
        before = lacking.get(rank, "")
        found[rank] = f"{before}; {text}" if before else text
    return found


def _rank_errors(sources: Iterable[Source]) -> Iterator[tuple[int, str]]:
    """Yield the errors that belong to a rank: they name it, or stand in its file."""
    for source in sources:
        owner = source.number if source.side == "rank" else None
        for text, named in source.section.errors:
            rank = owner if named is None else named
            if rank is not None and rank < WORLD_MAX:
                yield rank, text
