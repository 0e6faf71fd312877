"""Reference figures, hints, GPU types and error counters, as references.toml and a site's own file have
them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from deepep_bootstrap.analysis.results.model import KINDS, LOW_LATENCY_PARTS, OPERATIONS, OURS
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.toml import NAME, SOME, Table, ValueForm, load_toml

FILE = "references.toml"
"""A site's own references, in PREFIX."""

SHIPPED = f"rules/{FILE}"
"""Below env/."""

FABRICS = ("nvlink", "roce", "gib", "infiniband")
UNITS: Mapping[str, tuple[str, bool]] = {"gbs": ("GB/s", True), "us": ("us", False)}
"""What the end of a figure's name says: its unit, and whether larger is better."""

CONFIG = ("num_tokens", "hidden", "num_topk", "num_topk_groups", "num_experts", "num_processes", "num_sms")
"""Settings of a test that its figures depend on, by the names of upstream's arguments; `num_processes` are the ranks
of one node."""

TOKENS, PROCESSES = "num_tokens", "num_processes"
ALIKE = 0.01
"""Numbers of tokens that differ by less than this fraction are the same: V2's test gives each rank one token less
than the one before."""

PARTS = (
    *(
        "nvl_gbs",
        "rdma_gbs",
        "us",
        "dispatch_combine_gbs",
        "dispatch_us",
        "combine_us",
        "dispatch_gbs",
        "combine_gbs",
        "so_gbs",
    ),
    *("su_gbs", "bus_gbs", "gpu_gbs"),
    *LOW_LATENCY_PARTS,
)
"""Last parts of figures: what hints are about."""

_BEST = rf"best\.({'|'.join(OPERATIONS)})\.(nvl_gbs|rdma_gbs|us)"
_LOW_LATENCY = (
    r"low_latency\.(dispatch_combine_gbs|dispatch_us|combine_us|dispatch_gbs|combine_gbs"
    rf"|{'|'.join(LOW_LATENCY_PARTS)})"
)
_OPERATION = r"operations\.[a-z][a-z0-9_]*\.(so_gbs|su_gbs|us|bus_gbs|gpu_gbs)"
FIGURE = ValueForm(
    f"{_BEST}|{_LOW_LATENCY}|{_OPERATION}",
    "a figure of `invoke results`, such as best.combine.nvl_gbs, ending in _gbs or us",
)
PART = ValueForm("|".join(PARTS), " or ".join(PARTS))
GPU = ValueForm(
    r"[A-Z]+[0-9]+[A-Z]*( [A-Za-z]+)?|sm_[0-9]+", "a GPU type such as H200, or an architecture such as sm_90"
)
FABRIC = ValueForm("|".join(FABRICS), " or ".join(FABRICS))
TEST = ValueForm("|".join((*KINDS, *OURS)), " or ".join((*KINDS, *OURS)))
GENERATION = ValueForm(r"v1|v2|v2\.5", "v1, v2 or v2.5")
ARCH = ValueForm(r"[0-9]+\.[0-9]", 'a compute capability such as "9.0"')
COUNTER = ValueForm(r"[A-Za-z0-9_]+", "the name of a counter, such as link_downed")
SENTENCE = ValueForm(
    r"(percent|limit|value|nodes|nics) (>=|<=|>|<) [0-9]+(\.[0-9]+)?|(fabric|test|unit|reference) is \S+",
    "THING OPERATOR VALUE, such as `percent <= 15`",
)


class Reference(Struct, frozen=True):
    """What one figure should be. `figure` is its path in the document of `invoke results`; performance may be less
    by the fraction `lower` and more by `upper`. It holds for every setting in `config` (names of CONFIG, each with
    the values it holds for). `fault`: the figure of a setup with something wrong, in words; it says what a figure
    like it means, and is no aim. `site`: this cluster's own."""

    gpu: str
    fabric: str
    nodes: int
    test: str
    generation: str
    figure: str
    value: float
    lower: float
    upper: float
    source: str
    config: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    fault: str = ""
    site: bool = False

    @property
    def unit(self) -> str:
        """Return the unit, "GB/s" or "us"."""
        return unit_of(self.figure)[0]

    @property
    def larger(self) -> bool:
        """Return whether larger is better."""
        return unit_of(self.figure)[1]

    @property
    def low(self) -> float:
        """Return the smallest value that is as expected."""
        return self.value * (1 - self.lower) if self.larger else self.value / (1 + self.upper)

    @property
    def high(self) -> float:
        """Return the largest value that is as expected."""
        return self.value * (1 + self.upper) if self.larger else self.value / (1 - self.lower)

    def percent(self, value: float) -> float:
        """Return the performance of `value` in percent of this reference: half the GB/s is 50, and so is twice the
        time."""
        return 100 * (value / self.value if self.larger else self.value / value)


class Hint(Struct, frozen=True):
    """What a figure below its reference usually means: for the figures whose last part is in `figures`, where all of
    `when` is true."""

    name: str
    figures: tuple[str, ...]
    when: tuple[str, ...]
    means: str


class Links(Struct, frozen=True):
    """NVLink of a GPU type: links of one GPU, GB/s of one link in one direction; 0 where it has none. `arch` is its
    capability."""

    arch: str
    links: int
    gbs: float
    source: str


class ErrorCounter(Struct, frozen=True):
    """What it means that an error counter grew during a test; `fails`: it does not on a healthy machine, or not by
    more than `per_tb` for 10^12 bytes that came in, as `source` says; a single one proves no rate. A `per_tb` of 0
    leaves none, not even one."""

    means: str
    fails: bool
    per_tb: float = 0.0
    source: str = ""

    def usual(self, received: int) -> float:
        """Return by how much it may grow on a healthy link that received so many bytes."""
        return max(1.0, self.per_tb * received / 1e12) if self.per_tb else 0.0


class ReferenceSet(Struct, frozen=True):
    """References, hints, GPU types, settings that a test has where its log says nothing, and error counters by name."""

    references: tuple[Reference, ...] = ()
    hints: tuple[Hint, ...] = ()
    gpus: Mapping[str, Links] = field(default_factory=dict)
    defaults: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    counters: Mapping[str, ErrorCounter] = field(default_factory=dict)


def unit_of(figure: str) -> tuple[str, bool]:
    """Return the unit of a figure and whether larger is better; ("", True) for a name that says no unit."""
    return UNITS.get(re.split(r"[._]", figure)[-1], ("", True))


def gpu_type(name: str) -> str:
    """Return the type in a product name: "H100" of "NVIDIA H100 80GB HBM3", "H100 NVL", "H100 PCIe" where links
    differ; "" of none."""
    found = re.search(r"\b(G?[ABH][0-9]{2,3})\b(?:.*\b(NVL|PCIe)\b)?", name)
    return " ".join(filter(None, found.groups())) if found else ""


def load_references(text: str, where: str, *, site: bool = False) -> ReferenceSet:
    """Return the references in a TOML text; Trouble with every fault, each naming `where` and the key. `site`: the
    file of a cluster."""
    problems: list[Problem] = []
    top = Table(load_toml(text, where), where, problems)
    defaults = {name: _settings(table) for name, table in top.named("defaults", TEST)}
    references = ReferenceSet(
        tuple(reference for table in top.tables("reference") for reference in _references(table, site)),
        tuple(_hint(table) for table in top.tables("hint")),
        {name: _links(table) for name, table in top.named("gpu", GPU)},
        {test: {key: values[0] for key, values in settings.items()} for test, settings in defaults.items()},
        {name: _counter(table) for name, table in top.named("counter", COUNTER)},
    )
    top.close()
    if problems:
        raise Trouble(*problems)
    return references


def read_references(texts: Mapping[str, str], site: str = "", where: str = FILE) -> ReferenceSet:
    """Return the references in the files of env/ (`texts` by relative path) with a site's own file, whose text is
    `site` ("": it has none) and whose place is `where`; Trouble with every fault of one of them."""
    if SHIPPED not in texts:
        raise Trouble(Problem(f"env/{SHIPPED}", "this file is missing", try_="a fresh checkout"))
    return joined(load_references(texts[SHIPPED], f"env/{SHIPPED}"), load_references(site, where, site=True))


def joined(shipped: ReferenceSet, *others: ReferenceSet) -> ReferenceSet:
    """Return one set: references and hints of `others` (a site's) before the shipped ones, tables of the same name
    replaced."""
    references = tuple(reference for each in (*others, shipped) for reference in each.references)
    hints = tuple(hint for each in (*others, shipped) for hint in each.hints)
    gpus, defaults, counters = dict(shipped.gpus), dict(shipped.defaults), dict(shipped.counters)
    for each in others:
        gpus.update(each.gpus)
        defaults.update(each.defaults)
        counters.update(each.counters)
    return ReferenceSet(references, hints, gpus, defaults, counters)


def _references(table: Table, site: bool) -> Iterator[Reference]:
    """Yield the references of one table: each of its figures, for each of its GPUs and fabrics."""
    gpus, fabrics = _one_or_more(table, "gpu", GPU), _one_or_more(table, "fabric", FABRIC)
    config = _settings(table.inner("config"))
    shared = Reference(
        gpu="",
        fabric="",
        nodes=table.number("nodes", 1),
        test=table.text("test", TEST),
        generation=table.text("generation", GENERATION),
        figure="",
        value=0.0,
        lower=_fraction(table, "lower", below=1.0),
        upper=_fraction(table, "upper", below=math.inf),
        source=table.text("source", SOME),
        config=config,
        fault=table.text("fault", SOME) if "fault" in table.data else "",
        site=site,
    )
    figures = _figures(table)
    table.close()
    for gpu in gpus:
        for fabric in fabrics:
            yield from (
                replace(shared, gpu=gpu, fabric=fabric, figure=figure, value=value) for figure, value in figures.items()
            )


def _figures(table: Table) -> dict[str, float]:
    inner = table.inner("figures")
    found = {}
    for name in inner.data:
        if not FIGURE.fits(name):
            inner.complain(name, "is no figure", wanted=FIGURE.words)
        value = _number(inner, name)
        if value is not None and not 0 < value < math.inf:
            inner.complain(name, "must be more than 0", value)
        found[name] = value or 0.0
    if not inner.data:
        table.complain("figures", "is missing or empty", wanted=FIGURE.words)
    return found


def _one_or_more(table: Table, key: str, form: ValueForm) -> tuple[str, ...]:
    """Return a text, or a list of texts, of `form`; there must be one."""
    if not isinstance(table.data.get(key), list):
        return (table.text(key, form),)
    found = table.words(key, form)
    if not found:
        table.complain(key, "is empty", wanted=form.words)
    return found


def _number(table: Table, key: str) -> float | None:
    """Return a number, whole or not; None where something else stands there, which is noted."""
    table.known.append(key)
    value = table.data.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    table.complain(key, "is of the wrong type" if key in table.data else "is missing", value, "a number")
    return None


def _fraction(table: Table, key: str, *, below: float) -> float:
    value = _number(table, key)
    if value is not None and not 0 <= value < below:
        table.complain(
            key,
            "is no fraction of the value",
            value,
            "a number from 0 on" + ("" if below == math.inf else " and below 1"),
        )
    return value or 0.0


def _settings(table: Table) -> dict[str, tuple[int, ...]]:
    """Return the settings in a table: each a whole number, or a list of them."""
    found = {}
    for name, value in table.data.items():
        values = value if isinstance(value, list) else [value]
        table.known.append(name)
        if name not in CONFIG:
            table.complain(name, "is no setting that figures depend on", wanted=", ".join(CONFIG))
        elif not values or not all(type(one) is int and one >= 0 for one in values):
            table.complain(name, "is of the wrong type", repr(value), "a whole number, or a list of them")
        else:
            found[name] = tuple(values)
    return found


def _hint(table: Table) -> Hint:
    hint = Hint(
        table.text("name", NAME), table.words("figures", PART), table.words("when", SENTENCE), table.text("means", SOME)
    )
    if not hint.figures:
        table.complain("figures", "is missing or empty", wanted=PART.words)
    table.close()
    return hint


def _links(table: Table) -> Links:
    links = Links(
        table.text("arch", ARCH),
        table.number("links", 0),
        _number(table, "link_gbs") or 0.0,
        table.text("source", SOME),
    )
    table.close()
    return links


def _counter(table: Table) -> ErrorCounter:
    rate = _number(table, "per_tb") or 0.0 if "per_tb" in table.data else 0.0
    if not 0 <= rate < math.inf:
        table.complain("per_tb", "is no number of errors", rate)
    source = table.text("source", SOME) if rate else ""
    counter = ErrorCounter(table.text("means", SOME), table.take("fails", bool, default=False), rate, source)
    table.close()
    return counter
