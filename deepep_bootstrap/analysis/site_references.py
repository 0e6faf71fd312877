"""A site's own references: made of measured figures, and kept in a TOML document like references.toml."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tomlkit
from msgspec import Struct
from msgspec.structs import replace
from tomlkit.items import AoT, Table

from deepep_bootstrap.analysis import compare
from deepep_bootstrap.analysis.compare import Limits, figures_of, is_part, nodes_of, settings_of
from deepep_bootstrap.analysis.reference_file import (
    CONFIG,
    FABRIC,
    FILE,
    GPU,
    Reference,
    ReferenceSet,
    gpu_type,
    load_references,
)
from deepep_bootstrap.analysis.results.model import LAYOUT, Tested
from deepep_bootstrap.inventory.facts import Facts

PATH = FILE
"""Where a site keeps its own, relative to PREFIX."""

TOLERANCE = 0.1
"""How much slower or faster than the first run of a site later ones may be. Runs of one machine with three builds of
NVSHMEM lay within 2 % of each other (8 x H200, 2026-11-20); the rest is for other nodes and busy networks."""

HEAD = """# References of this cluster, written by `invoke test --save-as-reference`. They win over those of
# env/rules/references.toml, whose head explains the keys. Edit tolerances as you like; a later save replaces
# the figures it measured again.
"""

Key = tuple[str, str, int, str, str, tuple[tuple[str, tuple[int, ...]], ...]]


class Saved(Struct, frozen=True):
    """A site's document after a run, how many figures of the run are in it, and why there are none ("" otherwise)."""

    text: str
    count: int
    why_not: str = ""


def saved(
    existing: str,
    tests: Sequence[Tested],
    hosts: Sequence[Facts],
    *,
    run: str,
    date: str,
    nodes: int,
    references: ReferenceSet,
    where: str = PATH,
) -> Saved:
    """Return the document of a site (`existing`, at `where`) with the figures of a run on `hosts`; see `recorded`
    and `site_text`."""
    gpu, fabric, limits = compare.gpu_of(hosts), compare.fabric_of(hosts, nodes), compare.limits_of(hosts, references)
    made = recorded(tests, run, date, gpu=gpu, fabric=fabric, nodes=nodes, references=references, limits=limits)
    why_not = "the test printed no figures"
    if not GPU.fits(gpu_type(gpu) or gpu):
        why_not = f"references are by type of GPU, and this one's is not known: {gpu or 'none, or several types'}"
    elif not FABRIC.fits(fabric):
        why_not = "references are by network, and none was found between these nodes"
    return Saved(site_text(existing, made, where), len(made), "" if made else why_not)


def recorded(
    tests: Sequence[Tested],
    run: str,
    date: str,
    *,
    gpu: str,
    fabric: str,
    nodes: int,
    references: ReferenceSet,
    limits: Limits | None = None,
) -> tuple[Reference, ...]:
    """Return references out of the figures of those tests that are ok, of several passes the first, for the name of
    the run and its day (2026-11-20). The others are those of compare.judge: tests judged by them later have the
    same settings. None for a GPU or a fabric without a name that `reference_file` reads: one such line would make the
    whole file unreadable."""
    if not GPU.fits(gpu_type(gpu) or gpu):
        return ()
    found: dict[tuple[Key, str], Reference] = {}
    for tested in tests:
        used = nodes_of(tested, nodes)
        link = "nvlink" if used == 1 else fabric
        if not tested.ok or tested.is_later_pass or not FABRIC.fits(link):
            continue
        settings = settings_of(tested, nodes, references, limits or Limits())
        bare = Reference(
            gpu=gpu_type(gpu) or gpu,
            fabric=link,
            nodes=used,
            test=tested.test,
            generation=tested.generation,
            figure="",
            value=0.0,
            lower=TOLERANCE,
            upper=TOLERANCE,
            source=f"this site, {date}, run {run}",
            config={name: (int(settings[name]),) for name in CONFIG if settings.get(name, -1) >= 0},
            site=True,
        )
        for one in _with_figures(bare, tested):
            found[_key(one), one.figure] = one
    return tuple(found.values())


def _with_figures(bare: Reference, tested: Tested) -> Iterator[Reference]:
    """Yield a reference for each figure of a test, all else as in `bare`; but for the layout kernel's, whose time is
    short and printed in whole microseconds, and for the halves of low latency's: runs differ there by more than a
    site's tolerance."""
    for figure, value in figures_of(tested).items():
        if value > 0 and not figure.startswith(f"operations.{LAYOUT}.") and not is_part(figure):
            yield replace(bare, figure=figure, value=value)


def site_text(existing: str, references: Sequence[Reference], where: str = PATH) -> str:
    """Return the document of a site with `references` in it: figures that it has for the same GPU, fabric, nodes,
    test and settings are replaced, all else stays, comments too. `existing` is "" before the first; Trouble that
    names `where` if it cannot be read."""
    load_references(existing, where, site=True)
    document = tomlkit.parse(existing or HEAD)
    groups: dict[Key, list[Reference]] = {}
    for one in references:
        groups.setdefault(_key(one), []).append(one)
    kept = tomlkit.aot()
    for table in document.get("reference", []):
        if left := _without(table, groups):
            kept.append(left)
    for group in groups.values():
        kept.append(_table(group))
    if len(kept):
        _put(document, kept)
    return tomlkit.dumps(document)


def _put(document: tomlkit.TOMLDocument, kept: AoT) -> None:
    if "reference" in document:
        document["reference"] = kept
    else:
        document.append("reference", kept)


def _key(one: Reference) -> Key:
    return one.gpu, one.fabric, one.nodes, one.test, one.generation, tuple(sorted(one.config.items()))


def _without(table: Table, groups: Mapping[Key, Iterable[Reference]]) -> Table | None:
    """Return a table of the document without the figures that are new; None where none is left. A table for several
    GPUs or fabrics, or for a fault, was written by a person and stays; what comes later in a file stands over it."""
    plain: dict[str, Any] = table.unwrap()
    gpu, fabric = plain["gpu"], plain["fabric"]
    if isinstance(gpu, list) or isinstance(fabric, list) or "fault" in plain:
        return table
    config = {
        name: tuple(value) if isinstance(value, list) else (value,) for name, value in plain.get("config", {}).items()
    }
    key = gpu, fabric, plain["nodes"], plain["test"], plain["generation"], tuple(sorted(config.items()))
    for one in groups.get(key, ()):
        table["figures"].pop(one.figure, None)
    return table if table["figures"] else None


def _table(group: Sequence[Reference]) -> Table:
    first = group[0]
    table = tomlkit.table()
    for name in ("gpu", "fabric", "nodes", "test", "generation", "lower", "upper", "source"):
        table.add(name, getattr(first, name))
    config = tomlkit.inline_table()
    config.update({name: values[0] if len(values) == 1 else list(values) for name, values in first.config.items()})
    table.add("config", config)
    figures = tomlkit.table()
    for one in group:
        figures.add(one.figure, one.value)
    table.add("figures", figures)
    return table
