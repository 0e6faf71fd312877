"""Which nodes of a run are known to be well, and which to be at fault: two files for `sbatch --nodelist` and
`--exclude`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from msgspec import Struct

from deepep_bootstrap.analysis.assess import Assessment, failure_logs
from deepep_bootstrap.analysis.diagnosis.engine import SURE
from deepep_bootstrap.analysis.diagnosis.rules import CauseSet
from deepep_bootstrap.analysis.results.model import BELOW, ERROR, NIC
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.testing.run_folder import Judgement, RunVerdict, TestRun

PASSING, FAILING = "passing_nodes.txt", "failing_nodes.txt"

NODE_LOG = re.compile(r"node-\d+-(?P<node>.+)\.log")
PAIR = re.compile(r"\[pairs\] round \d+(?:, GPU \+\d+)?: (\S+) (\S+) (?:[\d.]+ GB/s|no answer)")
BAD_NODE = re.compile(
    r"\[pairs\] (?:absent: (\S+) did not start|(?:slow|no answer): (?:node (\S+): |GPU \S+ of (\S+), ))"
)
BAD_PAIR = re.compile(r"\[pairs\] (?:slow|no answer): pair (\S+) (\S+?)[,:]? ")
BAD_ALL = re.compile(r"\[pairs\] (?:slow|no answer): (?:every pair|GPU \S+ of every node|rails )")
"""Lines of env/programs/pairs_judge.py."""


class NodeLists(Struct, frozen=True):
    """Nodes of a run by the names that Slurm has for them. A node is `passing` where all that it had part in went well,
    `failing` where every result that it had part in blames it alone; others are in neither."""

    passing: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()

    def files(self) -> dict[str, bytes]:
        """Return the files by name, a node a line. One without a node is left out: sbatch refuses an empty list."""
        named = {PASSING: self.passing, FAILING: self.failing}
        return {name: "".join(f"{node}\n" for node in nodes).encode() for name, nodes in named.items() if nodes}


def list_nodes(
    run: TestRun, facts: Mapping[str, Facts], found: Assessment, judgement: Judgement, causes: CauseSet, lost: str = ""
) -> NodeLists:
    """Return which nodes are well and which are at fault. `facts` are those of the run's nodes by name; `causes` the
    rules by which the run was diagnosed; `lost` is the node that did not answer any more, for which the others failed.
    """
    if judgement.verdict is RunVerdict.PASSED:
        return NodeLists(passing=_named(run, facts, set(run.nodes)))
    if lost:
        return NodeLists(failing=_named(run, facts, {lost}))
    if judgement.verdict not in {RunVerdict.FAILED, RunVerdict.BELOW} or found.refused_args:
        return NodeLists()
    bad = {verdict.host for verdict in found.verdicts if verdict.state == BELOW and verdict.kind in {NIC, ERROR}}
    if len(run.nodes) == 1:
        bad |= {*run.nodes}
    well: set[str] = set()
    if run.kind == "pairs":
        met, blamed, doubtful = _pairs(run, facts)
        bad |= blamed
        well = met - doubtful if judgement.verdict is RunVerdict.FAILED else set()
    else:
        bad |= {*_diagnosed(found, causes)}
    return NodeLists(_named(run, facts, well - bad), _named(run, facts, bad))


def _named(run: TestRun, facts: Mapping[str, Facts], nodes: set[str]) -> tuple[str, ...]:
    """Return Slurm's names of those nodes, in the run's order; a host that is no node of Slurm has its own."""
    return tuple((name in facts and facts[name].slurm.node) or name for name in run.nodes if name in nodes)


def _diagnosed(found: Assessment, causes: CauseSet) -> Iterator[str]:
    """Yield the node at which a sure cause shows, where it shows at no other and the first error is that node's own:
    one that only waited for another node, or ended since another one did, is not to blame."""
    first = found.diagnosis.first
    if not first or not found.diagnosis.findings or found.diagnosis.findings[0].confidence < SURE:
        return
    innocent = (*causes.ending.waited, *causes.ending.followed)
    logs = {each.log for each in found.diagnosis.findings[0].evidence} | {first.evidence.log}
    match = NODE_LOG.fullmatch(first.evidence.log)
    if match and len(logs) == 1 and not any(pattern.regex.search(first.evidence.text) for pattern in innocent):
        yield match["node"]


def _pairs(run: TestRun, facts: Mapping[str, Facts]) -> tuple[set[str], set[str], set[str]]:
    """Return of a run of pairs.py the nodes that met another, those to which what is bad was traced, and those that
    have part in something that could not be traced to one node."""
    names = {seen.hostname.partition(".")[0]: node for node, seen in facts.items()}
    names |= {node.partition(".")[0]: node for node in run.nodes}
    met, blamed, doubtful = set[str](), set[str](), set[str]()
    for line in "\n".join(failure_logs(run).values()).splitlines():
        for pattern, group in ((PAIR, met), (BAD_NODE, blamed), (BAD_PAIR, doubtful)):
            if match := pattern.match(line):
                group |= {names[name] for name in match.groups() if name in names}
        if BAD_ALL.match(line):
            doubtful |= {*run.nodes}
    return met, blamed, doubtful
