"""The assessment of a run from its files: tests in its logs, verdicts on figures and traffic, causes of a
failure; and the verdict on the run with its reason in one sentence, the same in `test`, `status` and `report`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.analysis import compare, reference_file, traffic
from deepep_bootstrap.analysis.diagnosis import rules
from deepep_bootstrap.analysis.diagnosis.engine import SURE, Diagnosis, diagnose
from deepep_bootstrap.analysis.diagnosis.log import Evidence
from deepep_bootstrap.analysis.failure import failure_line, told_better
from deepep_bootstrap.analysis.results import wording
from deepep_bootstrap.analysis.results.model import ABOVE, BELOW, ERROR, FIGURE, KINDS, NIC, NONE, OK, Tested, Verdict
from deepep_bootstrap.analysis.results.read import read_logs
from deepep_bootstrap.analysis.results.scanner import is_launchers
from deepep_bootstrap.analysis.traffic import NicTraffic
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.text import three_digits
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.prefix.test_kinds import KINDS as ALL_KINDS
from deepep_bootstrap.testing.run_folder import Judgement, RunVerdict, TestRun

CAUSES = "causes.toml"
"""A site's own rules of `diagnose`, in PREFIX."""

MOST_WORDS = 4
"""Findings of a program of ours that an outcome repeats; its log has all."""


YOUR_ARGS = "(your --args)"
"""Stands behind the line of a failure where argparse refused words that somebody gave the test."""


class AssessmentRules(Struct, frozen=True):
    """What runs are judged by: references with hints and error counters, and the rules of `diagnose`."""

    references: reference_file.ReferenceSet
    causes: rules.CauseSet


class Assessment(Struct, frozen=True):
    """What was found in a run: tests, verdicts, what each NIC carried, causes of a failure, whether the run itself
    failed, what our own programs (nccl, pairs, smoke) say is wrong, and the line that says why it failed."""

    tests: tuple[Tested, ...]
    verdicts: tuple[Verdict, ...]
    traffic: tuple[NicTraffic, ...]
    diagnosis: Diagnosis
    failed: bool
    own_words: tuple[str, ...] = ()
    failure: Evidence | None = None

    @property
    def refused_args(self) -> bool:
        """Whether the test refused words that somebody gave it: neither a node nor the machine has a part in that."""
        return self.failure is not None and self.failure.text.endswith(YOUR_ARGS)


def read_rules(texts: Mapping[str, str], site: Mapping[str, str], where: str) -> AssessmentRules:
    """Return the rules in the files of env/ (`texts` by relative path), with a site's own (`site`, texts by name; it
    need not have any) found at `where`. Trouble for one that cannot be read."""
    causes = rules.shipped_causes(texts)
    if site.get(CAUSES):
        causes = rules.join(causes, rules.load_causes(site[CAUSES], f"{where}/{CAUSES}", causes))
    own = site.get(reference_file.FILE, "")
    return AssessmentRules(reference_file.read_references(texts, own, f"{where}/{reference_file.FILE}"), causes)


def assess(run: TestRun, facts: Mapping[str, Facts], judged_by: AssessmentRules) -> Assessment:
    """Return what a run says. `facts` are those of its nodes by name, as far as they are known.

    A test without an end of its own that was stopped as planned has ended. Of a kind that always prints results, a run
    without any has failed, whatever its exit code says. What the NICs of a failed run did not carry is no verdict on
    them.
    """
    known = {name: facts[name] for name in run.nodes if name in facts}
    tests = tuple(_settled(run, compare.configured(tested, run.args)) for tested in read_logs(run.logs))
    hosts = tuple(known.values())
    nodes = len(run.nodes) or 1
    gpu, fabric = compare.gpu_of(hosts), compare.fabric_of(hosts, nodes)
    limits = compare.limits_of(hosts, judged_by.references)
    figures = compare.judge(tests, gpu=gpu, fabric=fabric, nodes=nodes, references=judged_by.references, limits=limits)
    expected = compare.gpu_nics(known) or None
    counted = traffic.judge_traffic(run, expected_nics=expected, references=judged_by.references)
    failed = bool(run.code != 0 or not all(tested.ok for tested in tests) or (run.kind in KINDS and not tests))
    if failed:
        counted = tuple(verdict for verdict in counted if verdict.kind == ERROR)
    carried = traffic.nic_traffic(run, expected)
    if not failed:
        return Assessment(tests, (*figures, *counted), carried, Diagnosis((), ()), failed, own_words(run))
    logs = failure_logs(run)
    line = _refused_words(failure_line(logs), run.args)
    tests = tuple(tested if tested.ok else replace(tested, errors=told_better(tested.errors, line)) for tested in tests)
    diagnosis = diagnose(logs, judged_by.causes)
    return Assessment(tests, (*figures, *counted), carried, diagnosis, failed, own_words(run), line)


def _refused_words(line: Evidence | None, args: Sequence[str]) -> Evidence | None:
    """Return a failure's line; where argparse refused words that somebody gave the test, it says whose they are."""
    if line is None or ": error: " not in line.text or not any(word in line.text for word in args if word):
        return line
    return replace(line, text=f"{line.text} {YOUR_ARGS}")


def own_words(run: TestRun) -> tuple[str, ...]:
    """Return what a program of ours says is wrong, each once: its lines are `[kind] slow: pair b200-003 b200-007:
    …`."""
    wrong = re.compile(rf"\[{re.escape(run.kind)}\] ((?:slow|no answer|absent|failed|wrong|fault): .*)")
    found = (
        match[1].strip()
        for text in failure_logs(run).values()
        for line in text.splitlines()
        if (match := wrong.match(line))
    )
    return tuple(dict.fromkeys(found))[:MOST_WORDS]


def _settled(run: TestRun, tested: Tested) -> Tested:
    """Return a test as its run ended: one that was stopped as planned is not cut off."""
    kind = ALL_KINDS.get(run.kind)
    if kind is None or not kind.endless or run.code != 0 or tested.failed:
        return tested
    return replace(tested, ok=True, ended=True)


def failure_logs(run: TestRun) -> dict[str, str]:
    """Return the logs that show a failure: what each node printed, then what only the job's log has. Lines of the
    job's log that a node's log has too are left empty, so that nothing is shown twice and every line keeps its
    number."""
    nodes = {name: text for name, text in run.logs.items() if name.startswith("node-")}
    known = {line for text in nodes.values() for line in text.splitlines()}
    others = {name: text for name, text in run.logs.items() if not name.startswith(("node-", "rank-"))}
    return {
        **nodes,
        **{
            name: "\n".join("" if line in known else line for line in text.split("\n")) for name, text in others.items()
        },
    }


def by_node(facts: Mapping[str, Facts], nodes: Sequence[str]) -> dict[str, Facts]:
    """Return the facts of a run's nodes by the name that Slurm has for each, which need not be that of the hosts
    file."""
    names = {seen.slurm.node or name: seen for name, seen in facts.items()}
    found = {name: names.get(name) or facts.get(name) for name in nodes}
    return {name: seen for name, seen in found.items() if seen is not None}


SLOW_NAMED = 3
"""Slow ranks that the reason names; the report has all."""


def judge_run(run: TestRun, found: Assessment) -> Judgement:
    """Return the verdict on a run by its files; one that nobody saw end has none, whatever its logs have so far."""
    if run.code is None:
        return Judgement(RunVerdict.OPEN, "it is still running, or whoever followed it was stopped")
    if found.failed:
        return Judgement(RunVerdict.FAILED, failure(run, found))
    if any(verdict.state == BELOW for verdict in found.verdicts):
        return Judgement(RunVerdict.BELOW, fault(found))
    return Judgement(RunVerdict.PASSED, praise(found))


def failure(run: TestRun, found: Assessment) -> str:
    """Return why a run failed: wrong results before all, then its first cause if that is sure, then what a program of
    ours or a test says, else the line that says most, and what a launcher says of exit codes only where there is
    nothing else."""
    reasons = list(filter(None, map(wording.wrong, found.tests)))
    if found.refused_args and found.failure:
        reasons.append(found.failure.text)
    if found.diagnosis.findings and found.diagnosis.findings[0].confidence >= SURE:
        reasons.append(found.diagnosis.findings[0].title)
    reasons += found.own_words
    if found.failure:
        reasons.append(found.failure.text)
    first = found.diagnosis.first
    if first and not is_launchers((shown := first.evidence).text):
        reasons.append(f"{shown.log}, line {shown.line}: {shown.text}")
    if run.code:
        reasons.append(f"exit code {run.code}")
    reasons += [fault for tested in found.tests for fault in wording.faults(tested)]
    reasons.append("its output says nothing of a test")
    return next((reason for reason in reasons if not is_launchers(reason)), reasons[0])


def fault(found: Assessment) -> str:
    """Return the first thing that is below what it should be: NICs and errors before figures, which suffer from
    them."""
    low = sorted(
        (verdict for verdict in found.verdicts if verdict.state == BELOW), key=lambda verdict: verdict.kind == FIGURE
    )
    first = low[0]
    text = f"{first.host}: {first.text}" if first.host else first.text
    if first.kind == FIGURE and first.percent is not None:
        text = f"{first.title}: {three_digits(first.value or 0.0)} {first.unit}, {first.beside}"
    return f"{text}; {len(low) - 1} more" if len(low) > 1 else text


def praise(found: Assessment) -> str:
    """Return what is good about a run that passed, and which of its ranks are slow."""
    parts = list(counted(found))
    compared = [verdict for verdict in found.verdicts if verdict.kind == FIGURE and verdict.wanted is not None]
    if compared:
        above = sum(verdict.state == ABOVE for verdict in compared)
        parts.append(f"{len(compared)} figures at their reference" + (f", {above} of them above" if above else ""))
    parts += carried(found)
    if any(verdict.kind == ERROR for verdict in found.verdicts):
        parts.append("with new errors of links that are no fault by themselves")
    ranks = (rank for tested in found.tests for rank in tested.ranks)
    slow = [f"rank {rank.rank} is slow" for rank in ranks if rank.state == "slow"]
    return "; ".join([*parts, *slow[:SLOW_NAMED]]) or "exit code 0"


def counted(found: Assessment) -> Iterator[str]:
    """Yield how many cases passed, and what later passes compared."""
    if passed := sum(tested.passed for tested in found.tests):
        yield f"{passed} case{'s' * (passed != 1)} passed"
    for tested in found.tests:
        if tested.test_pass and tested.is_later_pass:
            yield f"checked {wording.checked(tested.test_pass)}"


def carried(found: Assessment) -> Iterator[str]:
    """Yield what is known of the NICs of a run that passed: praise only where all were measured and are well."""
    nics = [verdict for verdict in found.verdicts if verdict.kind == NIC]
    if nics and all(verdict.state == OK for verdict in nics):
        yield "every NIC carried its share"
    unmeasured = [verdict for verdict in nics if verdict.state == NONE]
    if bare := {verdict.host for verdict in unmeasured if verdict.subject == "nics"}:
        yield f"no RDMA NIC on {fold(bare)}: what nodes sent each other went over sockets"
    if unknown := {verdict.host for verdict in unmeasured if verdict.subject != "nics"}:
        yield f"what NICs carried was not measured on {fold(unknown)}"
