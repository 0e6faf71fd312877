"""The thinking of pairs.py: who meets whom in which round, and what slow links have in common. Needs neither torch
nor a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Pair = tuple[int, int]
Link = tuple[int, int, int, int]
"""Two nodes, the smaller index first, and the GPU that each of them used."""

TOGETHER = 2  # others that a node or a GPU must be slow towards before it, and not the link between two, is the cause


@dataclass(frozen=True)
class Finding:
    """What is bad: `kind` is all, node, rail, gpu, rails or pair; the nodes and GPUs it is about (no GPUs: all of
    them), or GPUs of the one node and the other (`rails`; none with that kind: all that differ); the median GB/s of its
    links, None where none of them answered; and how many links did not."""

    kind: str
    nodes: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    rate: float | None = None
    silent: int = 0
    rails: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The median of all links and the limit in GB/s (None where no link answered), and what is bad."""

    median: float | None
    limit: float | None
    findings: tuple[Finding, ...]


def rounds(nodes: int) -> list[list[Pair]]:
    """Return the pairs of each round: every pair of `nodes` once, no node twice in a round.

    The circle method: one node stays, the others move on by one place around a circle, and those opposite each other
    meet. With an odd number the one opposite the empty place rests.
    """
    circle = list(range(nodes + nodes % 2))
    found = []
    for _ in range(len(circle) - 1):
        opposite = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True)
        found.append(sorted((min(pair), max(pair)) for pair in opposite if max(pair) < nodes))
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found if nodes > 1 else []


def partner(gpu: int, shift: int, gpus: int) -> int:
    """Return the GPU of a pair's second node that one of the first node meets."""
    return (gpu + shift) % gpus


def judge(rates: Mapping[Pair, Sequence[float | None]], nodes: int, fraction: float, *, shifts: int = 1) -> Verdict:
    """Return what is bad among the pairs that met: `rates` are GB/s by GPU of the first node, for each shift (see
    `partner`) one after the other; None for a link that did not answer.

    A link is bad below `fraction` of the median. Where few nodes meet, one bad node can be in most of the links; so
    what counts is the higher of two medians: of all links, and of each node's best link.
    """
    links = {}
    for (one, two), each in rates.items():
        gpus = len(each) // shifts
        for place, rate in enumerate(each):
            shift, gpu = divmod(place, gpus)
            links[one, two, gpu, partner(gpu, shift, gpus)] = rate
    known = [rate for rate in links.values() if rate is not None]
    if not known:
        return Verdict(None, None, (Finding("all", silent=len(links)),) if links else ())
    tops = [
        max(mine)
        for node in range(nodes)
        if (mine := [rate for link, rate in links.items() if node in link[:2] and rate is not None])
    ]
    limit = fraction * max(median(known), median(tops))
    bad = {link: rate for link, rate in links.items() if rate is None or rate < limit}
    return Verdict(median(known), limit, tuple(_causes(links, bad, nodes)))


def _causes(links: Mapping[Link, float | None], bad: Mapping[Link, float | None], nodes: int) -> Iterator[Finding]:
    """Yield nodes, then GPUs, then rails that do not reach each other, then pairs: each explains its bad links, and
    what is explained is left out of what follows."""
    left = dict(bad)
    culprits = [node for node in range(nodes) if _all_bad([link for link in links if node in link[:2]], bad)]
    for node in culprits:
        yield _finding("node", (node,), (), [rate for link, rate in bad.items() if node in link[:2]])
    others = [link for link in links if not {*link[:2]} & {*culprits}]
    left = {link: rate for link, rate in left.items() if link in others}
    for gpu in sorted({gpu for link in left for gpu in link[2:]}):
        same = [link for link in others if gpu in link[2:]]
        mine = {node: [link for link in same if (node, gpu) in _ends(link)] for node in range(nodes)}
        slow = tuple(node for node in range(nodes) if _all_bad(mine[node], bad, (node, gpu)))
        if slow and set(same) <= left.keys():
            yield _finding("rail", (), (gpu,), [left.pop(link) for link in same])
            continue
        for node in slow:
            yield _finding("gpu", (node,), (gpu,), [bad[link] for link in mine[node]])
        ends = {(node, gpu) for node in slow}
        left = {link: rate for link, rate in left.items() if not ends & {*_ends(link)}}
    yield from _crossings(others, left)
    for pair in sorted({link[:2] for link in left}):
        those = [link for link in left if link[:2] == pair]
        everything = len(those) == sum(link[:2] == pair for link in links)
        gpus = () if everything or any(one != two for *_, one, two in links) else tuple(link[2] for link in those)
        rails = () if everything or gpus else tuple(sorted((link[2], link[3]) for link in those))
        yield _finding("pair", pair, gpus, [left[link] for link in those], rails)


def _crossings(links: Sequence[Link], left: dict[Link, float | None]) -> Iterator[Finding]:
    """Yield rails (GPUs of one number and their network cards, over all nodes) none of whose links to certain others
    is good, and take these links out of `left`: switches that join equal rails alone."""
    between: dict[tuple[int, int], list[Link]] = {}
    for link in links:
        if link[2] != link[3]:
            between.setdefault((min(link[2:]), max(link[2:])), []).append(link)
    apart = {rails: each for rails, each in between.items() if len(each) >= TOGETHER and set(each) <= left.keys()}
    if apart:
        named = () if len(apart) == len(between) else tuple(sorted(apart))
        yield _finding("rails", (), (), [left.pop(link) for each in apart.values() for link in each], named)


def _ends(link: Link) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return node and GPU of both ends."""
    return (link[0], link[2]), (link[1], link[3])


def _all_bad(mine: list[Link], bad: Mapping[Link, float | None], end: tuple[int, int] | None = None) -> bool:
    """Return whether all these links are bad, and lead to so many others that these are not to blame: of a node
    other nodes, of a GPU (`end`) other GPUs."""
    reached = {other for link in mine for other in _ends(link) if other != end} if end else {link[:2] for link in mine}
    return len(reached) >= TOGETHER and all(link in bad for link in mine)


def _finding(
    kind: str,
    nodes: tuple[int, ...],
    gpus: tuple[int, ...],
    rates: list[float | None],
    rails: tuple[tuple[int, int], ...] = (),
) -> Finding:
    known = [rate for rate in rates if rate is not None]
    return Finding(kind, nodes, gpus, median(known) if known else None, len(rates) - len(known), rails)


def describe(verdict: Verdict, names: Sequence[str], absent: Sequence[int] = ()) -> Iterator[str]:
    """Yield the lines that tell a verdict; `names` are hosts by the index of their node, `absent` those that did not
    come."""
    if verdict.median is not None and verdict.limit is not None:
        yield f"median {verdict.median:.2f} GB/s a GPU; a link is slow below {verdict.limit:.2f} GB/s"
    for node in absent:
        yield f"absent: {names[node]} did not start, or ended"
    for finding in verdict.findings:
        rate = "" if finding.rate is None else f", {finding.rate:.2f} GB/s a GPU"
        silent = f", {finding.silent} of its links did not answer" if finding.silent else ""
        yield f"{'no answer' if finding.rate is None else 'slow'}: {_what(finding, names)}{rate}{silent}"


def _what(finding: Finding, names: Sequence[str]) -> str:
    hosts, gpus = [names[node] for node in finding.nodes], ", ".join(map(str, finding.gpus))
    rails = ", ".join(f"{one}-{two}" for one, two in finding.rails)
    if finding.kind == "all":
        return "every pair; look at the network's settings before the links"
    if finding.kind == "node":
        return f"node {hosts[0]}: all its pairs"
    if finding.kind == "rail":
        return f"GPU {gpus} of every node: their network cards, or the switch these share"
    if finding.kind == "gpu":
        return f"GPU {gpus} of {hosts[0]}, or its network card: towards every node"
    if finding.kind == "rails":
        which = f"rails {rails}" if rails else "rails of different numbers"
        return f"{which}, on all nodes: the fabric between them, which low-latency kernels need"
    alone = f", GPU {gpus or rails} alone" if gpus or rails else ""
    return f"pair {hosts[0]} {hosts[1]}{alone}: the link between them"
