"""`invoke diagnose LOG`: the causes that logs show, the likeliest first, with the lines that show them; no
host and no network.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from deepep_bootstrap.analysis.diagnosis import rules
from deepep_bootstrap.analysis.diagnosis.engine import (
    SURE,
    Diagnosis,
    Finding,
    Note,
    advice,
    as_json,
    line_json,
    unknown,
    where_it_began,
)
from deepep_bootstrap.analysis.diagnosis.engine import diagnose as find_causes
from deepep_bootstrap.analysis.diagnosis.first_error import FirstError, changes, scrubbed
from deepep_bootstrap.analysis.diagnosis.log import Evidence
from deepep_bootstrap.analysis.diagnosis.rules import CauseSet
from deepep_bootstrap.analysis.failure import failure_line
from deepep_bootstrap.analysis.results import wording
from deepep_bootstrap.analysis.results.model import Tested
from deepep_bootstrap.analysis.results.read import read_logs
from deepep_bootstrap.cli.logs import STDIN, Sought, names, read_log
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, VERDICT
from deepep_bootstrap.core.program import data_root
from deepep_bootstrap.core.redact import scrub, secrets_of
from deepep_bootstrap.core.text import number
from deepep_bootstrap.report.load import LocalRuns, RunRecord
from deepep_bootstrap.testing import run_folder
from deepep_bootstrap.testing.run_folder import RunVerdict, parse_judgement

SOUGHT = Sought(
    patterns=("**/*.log", "**/*.out", "**/*.err", "**/*.txt"),
    called="*.log, *.out, *.err or *.txt",
    remedy="a log, a folder of logs, or a glob in quotation marks",
)


def diagnose(logs: str, log: Sequence[str] | None = None, *, causes: str = "", json: bool = False) -> int:
    """Say why something failed, out of its logs: causes with the lines that show them, why, and what mends it.

    `logs` and each of `log` is a file, a folder, a glob or `-`. Exit 0 where a cause is named or nothing failed, 4
    where something failed and no cause is known, though the first error may say what kind of failure it is. `causes`
    names a file of further rules; one with the slug of a known cause replaces that.
    """
    screen = Screen("diagnose", as_json=json)
    known = read_rules(data_root(), causes)
    texts = {name: read_log(name, SOUGHT.remedy) for name in files((logs, *(log or ())))}
    found = find_causes(texts, known)
    if found.first:
        found = replace(found, first=with_changes(found.first, texts))
    found = without_secrets(found)
    tests = read_logs(texts)
    if has_passed(texts, tests, found):
        found = Diagnosis((), (*found.notes, *map(as_note, found.findings)))
    faults = [f"{tested.title} test: {fault}" for tested in tests for fault in wording.faults(tested)]
    line = failure_line(texts) if found.first else None
    line = line and replace(line, text=scrub(line.text, secrets_of(os.environ)))
    several = len(texts) > 1
    show(screen, found, tests, faults, several=several)
    code = VERDICT if (found.first or faults) and not found.known else OK
    screen.document(code, (), **as_json(found), failure=line_json(line))
    return code


def has_passed(texts: Mapping[str, str], tests: Sequence[Tested], found: Diagnosis) -> bool:
    """Return whether the logs are of tests that passed: all of them say so, and no verdict that was kept beside them
    says something else."""
    if not tests or found.first or not all(tested.ok for tested in tests):
        return False
    folders = {os.path.dirname(os.path.abspath(name)) for name in texts if name != "-"}
    kept = [parse_judgement(_text(Path(folder, run_folder.VERDICT))) for folder in sorted(folders)]
    return all(judgement is None or judgement.verdict is RunVerdict.PASSED for judgement in kept)


def _text(path: Path) -> str:
    """Return the text of a file beside a log, "" for one that is not there or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def as_note(finding: Finding) -> Note:
    """Return what shows in a test that passed, as slow figures do, as a remark: it is no cause of a failure."""
    return Note(
        finding.cause, finding.evidence, f"the test passed; maybe {finding.title}: {finding.checks or finding.fix}"
    )


def read_rules(root: Path, more: str = "") -> CauseSet:
    """Return the rules of env/rules/causes, and those of a file of the user's own."""
    known = rules.read_shipped_causes(root)
    if not more:
        return known
    return rules.join(known, rules.load_causes(rules.text_of(Path(os.path.expanduser(more))), more, known))


def without_secrets(found: Diagnosis) -> Diagnosis:
    """Return the same with nobody's passwords in the lines that are shown."""
    secrets = secrets_of(os.environ)

    def cleaned(evidence: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
        return tuple(replace(each, text=scrub(each.text, secrets)) for each in evidence)

    return Diagnosis(
        tuple(
            replace(finding, title=scrub(finding.title, secrets), evidence=cleaned(finding.evidence))
            for finding in found.findings
        ),
        tuple(replace(note, evidence=cleaned(note.evidence)) for note in found.notes),
        scrubbed(found.first, lambda text: scrub(text, secrets)) if found.first else None,
    )


def show(screen: Screen, found: Diagnosis, tests: Sequence[Tested], faults: Sequence[str], *, several: bool) -> None:
    """Print causes and remarks for a person; without a cause why the logs fail, or that they do not."""
    if not found.known:
        _tell_no_cause(screen, found, tests, faults)
    for place, finding in enumerate(found.findings, 1):
        _tell_cause(screen, place, finding, several=several)
    if found.known and found.findings[0].confidence < SURE:
        several_causes = len(found.known) > 1
        screen.say(f"Nothing decides {'between these' if several_causes else 'whether this is it'}; the checks would.")
    if found.first and (not found.findings or found.findings[0].confidence < SURE):
        _tell_first_error(screen, unknown(found.first)[1:])
    elif found.first and not _shows(found.findings[0], found.first.evidence):
        _tell_first_error(screen, where_it_began(found.first))
    for note in found.notes:
        screen.say(f"note: {_place(note.evidence[0], several=several)}")
        screen.say(f"      {note.why}")


def _tell_no_cause(screen: Screen, found: Diagnosis, tests: Sequence[Tested], faults: Sequence[str]) -> None:
    if not found.first and not faults:
        passed = ", ".join(f"{tested.title} test" for tested in tests)
        screen.say(f"nothing failed{': ' + passed + ' passed' if passed else ''}", style="bold")
        return
    screen.say("no known cause in it", style="bold")
    for fault in faults:
        screen.say(f"  {fault}")


def _tell_cause(screen: Screen, place: int, finding: Finding, *, several: bool) -> None:
    head = "the first error says by itself:" if finding.general else f"{place}."
    screen.say(
        f"{head} {finding.title} ({finding.cause}, {finding.confidence:.0%})", style="bold" if place == 1 else ""
    )
    for each in finding.evidence:
        screen.say(f"     {_place(each, several=several)}")
    for name, text in (("why", finding.why), ("fix", advice(finding)), ("source", finding.source)):
        screen.say(f"     {name}: {text}")


def _shows(finding: Finding, line: Evidence) -> bool:
    """Return whether a line is among those that show a cause."""
    return any((each.log, each.line) == (line.log, line.line) for each in finding.evidence)


def _tell_first_error(screen: Screen, lines: Sequence[str]) -> None:
    screen.say("The first error in time:", style="bold")
    for line in lines:
        screen.say(f"  {line}")


def with_changes(first: FirstError, names: Iterable[str]) -> FirstError:
    """Return the first error with what changed since the last good run of the same kind, where the logs are those of
    one run's folder beside others."""
    folders = {Path(name).resolve().parent for name in names if name != STDIN}
    here = next((folder for folder in sorted(folders) if (folder / run_folder.VALUES).is_file()), None)
    if here is None:
        return first
    runs = LocalRuns(here.parent).records()
    values = runs[str(here)].values if str(here) in runs else {}
    good = [name for name in like_kind(values, runs) if runs[name].values.get("code") == "0" and name != str(here)]
    return replace(first, changed=changes(values, runs[good[-1]].values, Path(good[-1]).name)) if good else first


def like_kind(values: Mapping[str, str], runs: Mapping[str, RunRecord]) -> list[str]:
    """Return the folders of runs of the same kind that began before a run, the oldest first."""
    start = number(values.get("started", ""))
    begun = {name: number(other.values.get("started", "")) for name, other in runs.items()}
    known = [
        (when, name)
        for name, when in begun.items()
        if when is not None and runs[name].values.get("kind") == values.get("kind") and (start is None or when < start)
    ]
    return [name for _, name in sorted(known)]


def _place(evidence: Evidence, *, several: bool) -> str:
    return f"{evidence.log + ', ' if several else ''}line {evidence.line}: {evidence.text}"


def files(words: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the logs that `words` mean, each file once, by its first name. Trouble for a word that
    means none."""
    found: dict[str, str] = {}
    for file, name in names(words, SOUGHT):
        found.setdefault(file, name)
    return tuple(found.values())
