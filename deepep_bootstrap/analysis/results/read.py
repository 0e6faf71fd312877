"""Tests read from all their logs together: figures, missing ranks, passed cases, and a verdict on their end.

Upstream's tests print no last word, so each kind has its own sign of the end. A log that was cut anywhere
must not look whole; where a job of ours ran the test, its exit code has to be there too.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from deepep_bootstrap.analysis.results import collectors, own_programs
from deepep_bootstrap.analysis.results.collectors import LOW, LogSection, NodeOutput, judge, parts
from deepep_bootstrap.analysis.results.model import OPERATIONS, Best, LowLatency, Operation, Pass, Tested
from deepep_bootstrap.analysis.results.passes import PassRun, join_runs
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
    part: LogSection


def read_logs(logs: Mapping[str, str]) -> tuple[Tested, ...]:
    """Return the tests that logs tell of, in the order of the logs, those of our own programs last; nothing for a log
    without any.

    `logs` are texts by name. Names that a run's folder has (`job.log`, `node-0-HOST.log`, `rank-3.log`) are sides of
    one test where their folder is the same; so are logs whose ranks complete each other.
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
        tested
        for members in folders.values()
        for tested in own_programs.read_own_programs({name: logs[name] for _, _, name in members})
    ]
    return (
        *(_tested(bundle) for bundle in _completed(bundles) if any(_is_test(source.part) for source in bundle)),
        *ours,
    )


def _aligned(members: Sequence[tuple[str, int, list[LogSection]]], nodes: int) -> Iterator[list[Source]]:
    """Yield the first tests of all sides, the second ones, and so on."""
    bundle: list[Source] = []
    for index in range(max((len(own) for _, _, own in members), default=0)):
        bundle = [Source(side, number, own[index]) for side, number, own in members if index < len(own)]
        bundle += _without_pass(bundle, members, index)
        jobs = [source.part for source in bundle if source.side == "job"]
        if not jobs and any(side == "job" for side, _, _ in members):
            # The job's own log is there and does not even have its first line.
            jobs = [LogSection("job.log", 1)]
            bundle.append(Source("job", 0, jobs[0]))
        for part in jobs:
            part.headers = max(part.headers, 0 if part.goes_on else 1)
        for source in bundle:
            source.part.nodes = max(source.part.nodes, nodes)
        yield bundle
    yield from _unbegun(bundle)


def _without_pass(
    bundle: Sequence[Source], members: Sequence[tuple[str, int, list[LogSection]]], index: int
) -> list[Source]:
    """Return an empty part for every log, but for those of ranks, that says nothing of the pass that others tell of:
    it was cut off."""
    turn = next((source.part.turn for source in bundle if source.part.turn), None)
    if turn is None:
        return []
    cut = [(side, number) for side, number, own in members if side != "rank" and len(own) <= index]
    return [
        Source(*each, LogSection(bundle[0].part.log, 1, "low-latency", turn=PassRun(turn.number, turn.of)))
        for each in cut
    ]


def _unbegun(bundle: Sequence[Source]) -> Iterator[list[Source]]:
    """Yield the pass that should have followed the last one of the logs, and did not begin: nothing where that one
    failed."""
    turn = join_runs(source.part.turn for source in bundle)
    if (
        turn is None
        or turn.is_last
        or any((*turn.ended.values(), *(code for source in bundle for code in source.part.codes)))
    ):
        return
    part = LogSection(bundle[0].part.log, bundle[0].part.line, "low-latency", turn=PassRun(turn.number + 1, turn.of))
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
    passes = [
        turn and turn.number for turn in (join_runs(source.part.turn for source in bundle) for bundle in (one, other))
    ]
    return _kind(one) == _kind(other) and passes[0] == passes[1]


def _is_test(part: LogSection) -> bool:
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


def _pass(turn: PassRun | None) -> Pass | None:
    return None if turn is None else Pass(turn.number, turn.tokens, turn.runs, turn.passed, turn.passed * turn.calls)


def _generation(told: Completion) -> str:
    """Return v2 where the test is V2's, or its module or path is: V2 keeps V1's tests as its legacy ones."""
    legacy = any("/legacy/" in part.script or re.search(r"(?:^|/)deepep/2\.", part.module) for part in told.parts)
    return "v2" if told.kind == "ep" or legacy else "v1"


def _config(told: Completion) -> dict[str, int | float | str]:
    found: dict[str, int | float | str] = {}
    for part in told.parts:
        found = {**part.config, **found}
    if told.kind == "ep" and told.world:
        found["num_ranks"] = told.world
    return found


def _best(told: Completion) -> dict[str, Best]:
    """Return the best setting of each operation as the first node found it, which is the one that upstream itself
    goes on with."""
    if told.main is None or told.kind not in {"intranode", "internode"}:
        return {}
    return {name: found[0] for name, found in told.main.best.items()}


def _own_figures(told: Completion) -> dict[int, dict[str, float]]:
    """Return each rank's figures, the middle one of those it printed again and again; of V2 those of cases with the
    same kind of data as the first one (FP8 unless it was told otherwise), since others are no measure of the same
    thing."""
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


def _middle(values: Sequence[float], told: Completion) -> float:
    alike = [value for value, same in zip(values, told.alike, strict=False) if same] if told.alike else list(values)
    return collectors.middle(alike or values)


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
    )


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


Side = tuple[str, int, LogSection]
"""Where a part comes from (job, node, rank, or log: a file of its own), the number of that node or rank, and the
part."""

LOCAL_RANKS = 8
"""Ranks of a node where nobody says it: upstream's default for `--num-processes`."""

WORLD_MAX = 4096
"""More ranks are no world but a misread number; DeepEP's own limits are far below."""

LAST_CASE = re.compile(
    r"(?:do_handle_copy=0, )?expert_alignment=1, use_fp8_dispatch=0, num_bias=2, with_previous_event=1, "
    r"async_with_compute_stream=1, allocate_on_comm_stream=1"
)
"""The last of all combinations that V2's test goes through."""

LOW_WORDS = {"both": "dispatch + combine bandwidth", "each": "bandwidth of each alone", "halves": "send/recv times"}


@dataclass(frozen=True)
class Completion:
    """One test, all sides together. `code` is the worst exit code, None where nobody said one; `main` is what the
    first node printed, `first_ranks` what each node's first rank did where nodes can be told apart; `alike` says for
    each of V2's cases whether it sends the same kind of data as the first; `lacking` are ranks that are not whole,
    and why; `turn` is the pass that it is, of a test that has passes."""

    kind: str
    parts: tuple[LogSection, ...]
    code: int | None
    main: NodeOutput | None
    first_ranks: Mapping[int, NodeOutput]
    figures: Mapping[int, Mapping[str, Sequence[float]]]
    world: int
    alike: tuple[bool, ...]
    lacking: Mapping[int, str]
    passed: int
    failed: int
    ended: bool
    turn: PassRun | None = None


def story(kind: str, sides: Sequence[Side]) -> Completion:
    """Return what the sides of one test of a kind say together."""
    parts = tuple(part for _, _, part in sides)
    turn = join_runs(part.turn for part in parts)
    codes = [code for part in parts for code in part.codes] + list(turn.ended.values() if turn else ())
    code = max(codes, default=None)
    voices = _voices(sides)
    figures = _figures(parts)
    place = _LogPlace.of(kind, parts, figures)
    cases = max((-(-len(voice.ep_cases) // voice.copies) for voice in voices.values()), default=0)
    lacking = _lacking(kind, figures, place, max(cases, _due(turn))) | _silent_nodes(kind, voices, place)
    whole = (
        not lacking and _is_whole(kind, voices, figures, place) and (turn is None or _is_turn_whole(sides, place.nodes))
    )
    unsaid = any(len(part.codes) < part.headers for part in parts)
    ended = code in {None, 0} and not unsaid and (code == 0 if place.endless else whole)
    failing = code != 0 and (code is not None or any(part.errors for part in parts))
    opened = max((-(-voice.opened // voice.copies) for voice in voices.values()), default=0)
    passed = max((voice.passed // voice.copies for voice in voices.values()), default=0)
    least = min((voice.passed // voice.copies for voice in voices.values()), default=0)
    return Completion(
        kind=kind,
        parts=parts,
        code=code,
        main=voices[min(voices)] if voices else None,
        first_ranks={node * place.local: voice for node, voice in voices.items()},
        figures=figures,
        world=place.world,
        alike=_alike(voices),
        lacking=lacking if ended else lacking | _with_errors(sides, lacking),
        passed=passed + (cases if ended and not failing else max(cases - 1, 0)),
        failed=(opened - least) + (1 if cases else 0) if failing else 0,
        ended=ended,
        turn=turn,
    )


def _due(turn: PassRun | None) -> int:
    """Return how often each rank must have printed its figures: in every run, of a pass that failed in those that
    ended well."""
    return 0 if turn is None else turn.passed if any(turn.ended.values()) else turn.runs


def _is_turn_whole(sides: Sequence[Side], nodes: int) -> bool:
    """Return whether every log says that all runs of its pass ended well: a node's of its own, any other of all
    nodes. A rank's file says only that they began."""
    told = [(side, part.turn) for side, _, part in sides if side != "rank"]
    return bool(told) and all(turn is not None and turn.is_over(1 if side == "node" else nodes) for side, turn in told)


@dataclass(frozen=True)
class _LogPlace:
    """How large the test was: nodes and ranks as far as anything says (0: nothing does), ranks of a node, and which
    ranks print."""

    nodes: int
    local: int
    world: int
    printing: range
    endless: bool
    said_ok: bool

    @classmethod
    def of(cls, kind: str, parts: Sequence[LogSection], figures: Mapping[int, object]) -> _LogPlace:
        header = any(part.header for part in parts)
        processes = next(
            (int(found[1]) for part in parts if (found := re.search(r"--num-processes[= ]'?(\d{1,4})\b", part.args))), 0
        )
        nodes = 1 if kind == "intranode" else max(max(part.nodes, part.allocations) for part in parts)
        seen = max((rank for rank in figures if rank < WORLD_MAX), default=-1) + 1
        stated = min(max(part.world for part in parts), WORLD_MAX)
        guess = LOCAL_RANKS if header or not seen else _usual(-(-seen // max(nodes, 1)))
        local = (
            processes
            or (stated // nodes if stated and nodes else min(stated, LOCAL_RANKS) if stated else guess)
            or LOCAL_RANKS
        )
        world = min(stated or (max(seen, nodes * local) if figures else 0), WORLD_MAX)
        said_ok = any(part.codes for part in parts) and not any(code for part in parts for code in part.codes)
        firsts = said_ok and bool(stated) and all(rank % local == 0 for rank in figures)
        seeded = kind == "low-latency" and any(part.seeds for part in parts)
        endless = seeded or any(part.endless for part in parts)
        return cls(nodes, local, world, range(0, world, local if firsts else 1), endless, said_ok)


def _usual(seen: int) -> int:
    """Return how many ranks a node (or hosts together) has of which so many were seen: 1, 2, 4, 8 or whole nodes of 8.

    The last rank may be the silent one; a test on another number of ranks needs our header to be believed whole."""
    return next((size for size in (1, 2, 4) if seen <= size), -(-seen // LOCAL_RANKS) * LOCAL_RANKS)


def _voices(sides: Sequence[Side]) -> dict[int, NodeOutput]:
    """Return what each node printed: from the nodes' own logs, else told apart by labels, else from logs of ranks."""
    found: dict[str, dict[int, NodeOutput]] = {}
    for side, number, part in sides:
        for label, voice in sorted(part.voices.items(), reverse=True):
            if voice.configs or voice.busy:
                key = number if side in {"node", "rank"} else int(label or 0)
                found.setdefault("log" if side == "job" else side, {}).setdefault(key, voice)
    return found.get("node") or found.get("log") or found.get("rank") or {}


def _figures(parts: Iterable[LogSection]) -> dict[int, dict[str, list[float]]]:
    """Return the ranks' figures out of all logs; where several have them, the one that has most counts, since it is
    the same text."""
    found: dict[int, dict[str, list[float]]] = {}
    for part in parts:
        for rank, own in part.figures.items():
            known = found.setdefault(rank, {})
            for name, values in own.items():
                if len(values) > len(known.get(name, ())):
                    known[name] = values
    return found


def _lacking(
    kind: str, figures: Mapping[int, Mapping[str, Sequence[float]]], place: _LogPlace, cases: int
) -> dict[int, str]:
    """Return the ranks that have not printed all they should have, and why; none where no rank printed anything."""
    if not figures:
        return {}
    if place.endless:
        return {rank: "printed no figures" for rank in place.printing if not figures.get(rank)}
    if kind == "ep":
        wanted = {
            name: name.removesuffix("_us").replace("_", " ")
            for own in figures.values()
            for name in own
            if name.endswith("_us")
        }
        wanted = {name: words for name, words in wanted.items() if not name.endswith(("_copy_us", "_reduce_us"))}
    else:
        wanted = {names[0]: LOW_WORDS[group] for group, names in LOW.items()}
    most = {name: max(cases, 1, *(len(own.get(name, ())) for own in figures.values())) for name in wanted}
    found = {}
    for rank in place.printing:
        own = figures.get(rank, {})
        gaps = [words for name, words in wanted.items() if len(own.get(name, ())) < most[name]]
        if gaps:
            found[rank] = (
                f"printed no {', no '.join(gaps)}" + (f" in case {most[min(wanted)]}" if cases > 1 else "")
                if own
                else "printed no figures"
            )
    return found


def _silent_nodes(kind: str, voices: Mapping[int, NodeOutput], place: _LogPlace) -> dict[int, str]:
    """Return the first ranks of nodes that should have printed what first ranks print, and did not, where nodes can
    be told apart."""
    if kind not in {"intranode", "internode"} or len(voices) < 1 or any(voice.copies > 1 for voice in voices.values()):
        return {}
    return {
        node * place.local: f"its node ({node}) printed nothing"
        for node in range(min(place.nodes, WORLD_MAX))
        if node not in voices
    }


def _is_whole(
    kind: str, voices: Mapping[int, NodeOutput], figures: Mapping[int, Mapping[str, Sequence[float]]], place: _LogPlace
) -> bool:
    """Return whether everything is there that a test of this kind prints up to its end."""
    if kind in {"intranode", "internode"}:
        nodes = sum(voice.copies for voice in voices.values())
        return bool(voices) and nodes >= place.nodes and all(map(_is_voice_whole, voices.values()))
    if kind == "low-latency":
        return bool(figures)
    if place.said_ok:
        return bool(figures) or any(voice.ep_cases for voice in voices.values())
    operations = {name.removesuffix("_su_gbs") for own in figures.values() for name in own if name.endswith("_su_gbs")}
    ran = "combine" in operations and ("expanded_dispatch" in operations) == ("reduced_combine" in operations)
    return (
        ran and bool(voices) and all(voice.blanks >= 2 * voice.copies or _is_last(voice) for voice in voices.values())
    )


def _is_voice_whole(voice: NodeOutput) -> bool:
    """Return whether a test of throughput said all that it says: its configuration, every case's outcome, three best
    settings."""
    counts = [len(voice.best.get(name, ())) for name in OPERATIONS]
    return bool(voice.configs) and voice.opened == voice.passed and min(counts) >= voice.copies


def _is_last(voice: NodeOutput) -> bool:
    return bool(voice.ep_cases) and LAST_CASE.fullmatch(voice.ep_cases[-1]) is not None


def _alike(voices: Mapping[int, NodeOutput]) -> tuple[bool, ...]:
    if not voices:
        return ()
    main = voices[min(voices)]
    kinds = [re.findall(r"use_fp8_dispatch=(\d)", case) for case in main.ep_cases[:: main.copies]]
    return tuple(kind == kinds[0] for kind in kinds)


def _with_errors(sides: Iterable[Side], lacking: Mapping[int, str]) -> dict[int, str]:
    """Return the ranks of a test without an end that told of an error, with the last thing that each said."""
    found = {}
    for side, number, part in sides:
        for text, named in part.errors:
            rank = named if named is not None else number if side == "rank" else None
            if rank is not None and rank < WORLD_MAX:
                before = lacking.get(rank, "")
                found[rank] = f"{before}; {text}" if before else text
    return found
