"""Logs of upstream's tests in, figures and a verdict out. Pure.

A log is read into parts (one test as one log tells it); the logs of one run's folder tell the same test from several sides: what the job
printed, each node, each rank. A side that has less than another one adds nothing; nothing is counted twice.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from deepep_bootstrap.analysis.results import own_programs, ranks
from deepep_bootstrap.analysis.results.collectors import Part, parts
from deepep_bootstrap.analysis.results.completeness import Story, story
from deepep_bootstrap.analysis.results.model import Best, LowLatency, Operation, Pass, Tested
from deepep_bootstrap.analysis.results.passes import Turn, together
from deepep_bootstrap.analysis.results.ranks import judge
from deepep_bootstrap.analysis.results.scanner import tokens

RUN_LOG = re.compile(r"(?:(?P<job>job)|node-(?P<node>\d{1,4})-.*|rank-(?P<rank>\d{1,4}))\.log")
"""Files of a run's folder (see testruns)."""

SIDES = ("log", "node", "job", "rank")
"""Whose word on where a test begins counts first."""

OPERATION = re.compile(r"(?:(?:expanded|cached|reduced)_)?(?:dispatch|combine)(?=_su_gbs$)")
ERRORS_MAX = 20
"""Errors that are kept of one test: when one rank fails, hundreds tell of it."""


@dataclass(frozen=True)
class Source:
    """Where a part comes from: a log of its own, or one side of a run's folder with the number of its node or rank."""

    side: str
    number: int
    part: Part


def read_logs(logs: Mapping[str, str]) -> tuple[Tested, ...]:
    """Return the tests that logs tell of, in the order of the logs, those of our own programs last; nothing for a log without any.

    `logs` are texts by name. Names that a run's folder has (`job.log`, `node-0-HOST.log`, `rank-3.log`) are sides of one test where
    their folder is the same; so are logs whose ranks complete each other.
    """
    folders: dict[str, list[tuple[str, int, str]]] = {}
    for name in logs:
        found = RUN_LOG.fullmatch(posixpath.basename(name))
        side = (found.lastgroup or "log") if found else "log"
        number = int(found[side]) if found and side != "job" else 0
        folders.setdefault(f"{posixpath.dirname(name)}/" if found else name, []).append((side, number, name))
    bundles: list[list[Source]] = []
    for members in folders.values():
        nodes = max((number + 1 for side, number, _ in members if side == "node"), default=0)
        bundles += _aligned([(side, number, parts(name, tokens(logs[name]))) for side, number, name in members], nodes)
    ours = [
        tested for members in folders.values() for tested in own_programs.read_own_programs({name: logs[name] for _, _, name in members})
    ]
    return (*(_tested(bundle) for bundle in _completed(bundles) if any(_is_test(source.part) for source in bundle)), *ours)


def _aligned(members: Sequence[tuple[str, int, list[Part]]], nodes: int) -> Iterator[list[Source]]:
    """Yield the first tests of all sides, the second ones, and so on."""
    bundle: list[Source] = []
    for index in range(max((len(own) for _, _, own in members), default=0)):
        bundle = [Source(side, number, own[index]) for side, number, own in members if index < len(own)]
        bundle += _without_pass(bundle, members, index)
        jobs = [source.part for source in bundle if source.side == "job"]
        if not jobs and any(side == "job" for side, _, _ in members):
            # The job's own log is there and does not even have its first line.
            jobs = [Part("job.log", 1)]
            bundle.append(Source("job", 0, jobs[0]))
        for part in jobs:
            part.headers = max(part.headers, 0 if part.goes_on else 1)
        for source in bundle:
            source.part.nodes = max(source.part.nodes, nodes)
        yield bundle
    yield from _unbegun(bundle)


def _without_pass(bundle: Sequence[Source], members: Sequence[tuple[str, int, list[Part]]], index: int) -> list[Source]:
    """Return an empty part for every log, but for those of ranks, that says nothing of the pass that others tell of: it was cut off."""
    turn = next((source.part.turn for source in bundle if source.part.turn), None)
    if turn is None:
        return []
    cut = [(side, number) for side, number, own in members if side != "rank" and len(own) <= index]
    return [Source(*each, Part(bundle[0].part.log, 1, "low-latency", turn=Turn(turn.number, turn.of))) for each in cut]


def _unbegun(bundle: Sequence[Source]) -> Iterator[list[Source]]:
    """Yield the pass that should have followed the last one of the logs, and did not begin: nothing where that one failed."""
    turn = together(source.part.turn for source in bundle)
    if turn is None or turn.is_last or any((*turn.ended.values(), *(code for source in bundle for code in source.part.codes))):
        return
    part = Part(bundle[0].part.log, bundle[0].part.line, "low-latency", turn=Turn(turn.number + 1, turn.of))
    yield [Source(bundle[0].side, bundle[0].number, part)]


def _completed(bundles: list[list[Source]]) -> list[list[Source]]:
    """Return tests with those that lack rank 0 added to the test that has it: logs of several nodes under any names."""
    left = list(bundles)
    for bundle in bundles:
        ranks = {rank for source in bundle for rank in source.part.figures}
        if not ranks or 0 in ranks:
            continue
        for other in left:
            theirs = {rank for source in other for rank in source.part.figures}
            if other is not bundle and 0 in theirs and not theirs & ranks and _same(other, bundle):
                other += [replace(source, side="node", number=len(other)) for source in bundle]
                left = [each for each in left if each is not bundle]
                break
    return left


def _same(one: Sequence[Source], other: Sequence[Source]) -> bool:
    """Return whether two bundles can be one test, and one pass of it."""
    passes = [turn and turn.number for turn in (together(source.part.turn for source in bundle) for bundle in (one, other))]
    return _kind(one) == _kind(other) and passes[0] == passes[1]


def _is_test(part: Part) -> bool:
    return part.kind not in {"", "other"}


def _kind(bundle: Sequence[Source]) -> str:
    """Return the kind of a test: what the job said it was, else what its lines look like."""
    said = [source.part.kind for source in bundle if source.part.header] + [source.part.kind for source in bundle]
    return next((kind for kind in said if kind not in {"", "other"}), "")


def _tested(bundle: Sequence[Source]) -> Tested:
    told = story(_kind(bundle), [(source.side, source.number, source.part) for source in bundle])
    errors = tuple(dict.fromkeys(text for source in bundle for text, _ in source.part.errors))
    figures = _own_figures(told)
    ranks = judge(figures, told.lacking)
    told_first = min(bundle, key=lambda source: (not source.part.content, SIDES.index(source.side), source.number)).part
    cases = bool(told.passed) or told.kind in {"low-latency", "ep"}
    missing = any(rank.state == "missing" for rank in ranks)
    return Tested(
        test=told.kind,
        generation=_generation(told),
        ok=told.ended and cases and not told.failed and not missing and (told.code == 0 or not errors),
        ended=told.ended,
        passed=told.passed,
        failed=told.failed,
        config=_config(told),
        best=_best(told),
        low_latency=_low_latency(figures) if told.kind != "ep" else None,
        operations=_operations(figures) if told.kind == "ep" else {},
        ranks=ranks,
        sweep=tuple(told.main.sweep.points()) if told.main else (),
        errors=errors[:ERRORS_MAX],
        log=told_first.log,
        line=told_first.line,
        turn=_pass(told.turn),
    )


def _pass(turn: Turn | None) -> Pass | None:
    return None if turn is None else Pass(turn.number, turn.tokens, turn.runs, turn.passed, turn.passed * turn.calls)


def _generation(told: Story) -> str:
    """Return v2 where the test is V2's, or its module or path is: V2 keeps V1's tests as its legacy ones."""
    legacy = any("/legacy/" in part.script or re.search(r"(?:^|/)deepep/2\.", part.module) for part in told.parts)
    return "v2" if told.kind == "ep" or legacy else "v1"


def _config(told: Story) -> dict[str, int | float | str]:
    found: dict[str, int | float | str] = {}
    for part in told.parts:
        found = {**part.config, **found}
    if told.kind == "ep" and told.world:
        found["num_ranks"] = told.world
    return found


def _best(told: Story) -> dict[str, Best]:
    """Return the best setting of each operation as the first node found it, which is the one that upstream itself goes on with."""
    if told.main is None or told.kind not in {"intranode", "internode"}:
        return {}
    return {name: found[0] for name, found in told.main.best.items()}


def _own_figures(told: Story) -> dict[int, dict[str, float]]:
    """Return each rank's figures, the middle one of those it printed again and again; of V2 those of cases with the same kind of
    data as the first one (FP8 unless it was told otherwise), since others are no measure of the same thing."""
    if told.kind not in {"ep", "low-latency"} and len(told.first_ranks) > 1:
        return {
            rank: {
                f"{name}_{unit}": value
                for name, found in voice.best.items()
                for unit, value in (("nvl_gbs", found[0].nvl_gbs), ("rdma_gbs", found[0].rdma_gbs), ("us", found[0].us))
                if value is not None
            }
            for rank, voice in told.first_ranks.items()
        }
    return {rank: {name: _middle(values, told) for name, values in own.items()} for rank, own in told.figures.items()}


def _middle(values: Sequence[float], told: Story) -> float:
    alike = [value for value, same in zip(values, told.alike, strict=False) if same] if told.alike else list(values)
    return ranks.middle(alike or values)


def _low_latency(figures: Mapping[int, Mapping[str, float]]) -> LowLatency | None:
    spread, middle = ranks.spread, ranks.median_of
    if not any("dispatch_combine_gbs" in own or "dispatch_gbs" in own for own in figures.values()):
        return None
    return LowLatency(
        dispatch_combine_gbs=spread(figures, "dispatch_combine_gbs"),
        dispatch_us=middle(figures, "dispatch_us"),
        combine_us=middle(figures, "combine_us"),
        dispatch_gbs=spread(figures, "dispatch_gbs"),
        combine_gbs=spread(figures, "combine_gbs"),
    )


def _operations(figures: Mapping[int, Mapping[str, float]]) -> dict[str, Operation]:
    """Return V2's operations in the order in which the first rank tried them; `bytes` are the first rank's."""
    names = dict.fromkeys(found[0] for own in figures.values() for name in own if (found := OPERATION.match(name)))
    first = figures[min(figures)] if figures else {}
    return {
        name: Operation(
            so_gbs=ranks.spread(figures, f"{name}_so_gbs"),
            su_gbs=ranks.spread(figures, f"{name}_su_gbs"),
            us=ranks.spread(figures, f"{name}_us"),
            bytes=int(first[f"{name}_bytes"]) if f"{name}_bytes" in first else None,
        )
        for name in names
    }
