"""A run of a test as JUnit XML, for what collects the results of a site's checks: one suite, a case for the run itself,
for every test in its logs, every figure, and every NIC or GPU with a verdict.

The form is that which Jenkins, GitLab and pytest agree on (testsuites, testsuite, testcase, failure, error, skipped).
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator

from msgspec import Struct

from deepep_bootstrap.analysis.results import wording
from deepep_bootstrap.analysis.results.model import BELOW, NONE, Verdict
from deepep_bootstrap.core.text import moment
from deepep_bootstrap.report.model import Report, clean
from deepep_bootstrap.testing.run_folder import RunVerdict

FAILURE, ERROR, SKIPPED = "failure", "error", "skipped"

RESULTS = {RunVerdict.BELOW: FAILURE, RunVerdict.FAILED: FAILURE, RunVerdict.STOPPED: ERROR, RunVerdict.OPEN: ERROR}


class Case(Struct, frozen=True):
    """One case: of which group and its name there, one of FAILURE, ERROR and SKIPPED ("" where it passed), and why."""

    group: str
    name: str
    result: str = ""
    why: str = ""


def render_junit(report: Report) -> str:
    """Return the XML text of one run."""
    run = report.run
    kind = run.kind or "test"
    cases = list(_cases(report))
    count = {result: str(sum(case.result == result for case in cases)) for result in (FAILURE, ERROR, SKIPPED)}
    numbers = {"tests": str(len(cases)), "failures": count[FAILURE], "errors": count[ERROR]}
    seconds = f"{report.seconds or 0:g}"
    top = ET.Element("testsuites", {"name": "deepep-bootstrap", **numbers, "time": seconds})
    stack = run.values.get("stack", "")
    more = {"skipped": count[SKIPPED], "time": seconds, "hostname": clean(report.nodes)}
    if report.started is not None:
        more["timestamp"] = f"{moment(report.started):%Y-%m-%dT%H:%M:%S}"
    suite = ET.SubElement(top, "testsuite", {"name": clean(f"{kind} {stack}".strip()), **numbers, **more})
    properties = ET.SubElement(suite, "properties")
    named = {"run": run.name, "verdict": report.verdict.value, **{row.label: row.value for row in report.about}}
    for name, value in named.items():
        ET.SubElement(properties, "property", {"name": clean(name), "value": clean(value)})
    for number, case in enumerate(cases):
        _add_case(suite, case, clean(kind), "0" if number else seconds)
    if report.program_output:
        ET.SubElement(suite, "system-out").text = "\n".join(map(clean, report.program_output))
    ET.indent(top)
    return ET.tostring(top, encoding="unicode", xml_declaration=True) + "\n"


def _add_case(suite: ET.Element, case: Case, kind: str, seconds: str) -> None:
    attributes = {"classname": f"deepep.{kind}.{case.group}", "name": clean(case.name), "time": seconds}
    element = ET.SubElement(suite, "testcase", attributes)
    if case.result:
        about = {"message": clean(case.why), **({} if case.result == SKIPPED else {"type": case.group})}
        ET.SubElement(element, case.result, about)


def _cases(report: Report) -> Iterator[Case]:
    """Yield the run, its tests, its figures, and what else there is a verdict on."""
    yield Case("run", report.run.name, RESULTS.get(report.verdict, ""), report.why)
    for tested in report.tests:
        faults = wording.faults(tested)
        yield Case("tests", f"{tested.title} ({tested.log})", FAILURE if faults else "", "; ".join(faults))
    for verdict in report.verdicts:
        yield _case_of(verdict)


def _case_of(verdict: Verdict) -> Case:
    name = " ".join(filter(None, (verdict.test, verdict.host, verdict.title or verdict.subject)))
    result = {BELOW: FAILURE, NONE: SKIPPED}.get(verdict.state, "")
    return Case({"figure": "figures", "nic": "nics", "error": "links"}[verdict.kind], name, result, verdict.text)
