"""Kinds of tests: the program each one runs, its nodes, and its time limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.toml import SOME, Table, ValueForm, load_toml
from deepep_bootstrap.prefix.offer import StackRecord

SHORT_V2 = ("--test-first-only",)
"""What V2's own test gets where the user gives no arguments: in full it runs every combination of its modes, for
longer than a job that proves an installation should take."""

PATIENCE_V2 = ("--num-gpu-timeout-secs", "300", "--num-cpu-timeout-secs", "300")
"""How long V2's waits may take in the test of all its modes: its default of 100 s ends a run in which one node still
compiles its kernels (each mode has its own) while the others wait for it."""

LOW_LATENCY_MINUTES = 45
"""Of the low-latency kind: a run of upstream's test takes about half a minute, most of it its start; on Blackwell it
has nine on the eight GPUs of a node (env/rules/passes.toml), and 59 on one GPU alone."""

COPIED = ("programs/", "examples/", "bin/")
"""Folders of env/ that go into a generation as they are: our own programs, and examples for users."""

END_MARGIN = 120
"""Seconds that a test without an end of its own is stopped before its time limit: its ranks have to end, counters to
be read."""


class Run(Struct, frozen=True):
    """What a kind runs for one generation of DeepEP: the script (below the stack's tests/, or a program of ours),
    words that always stand in front of the user's, words that stand for them where there are none, and the kind
    whose variables it gets."""

    script: str
    always: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()
    variables: str = ""


class Kind(Struct, frozen=True):
    """A kind of test, with what it runs for V1, V2 and V2.5 (None: it has no such test). `nodes` is how many it takes
    by default, `fewest` and `most` how many it can (0: any number), `minutes` its time limit. `ours`: a program of ours
    instead of upstream's. `endless`: it runs until it is stopped, and passes if nothing failed."""

    name: str
    purpose: str
    v1: Run | None
    v2: Run | None
    nodes: int = 1
    fewest: int = 1
    most: int = 0
    minutes: int = 30
    ours: bool = False
    endless: bool = False
    v25: Run | None = None

    def run_for(self, record: StackRecord) -> Run | None:
        """Return what it runs for a stack, None where that stack has no such test."""
        if record.is_v25:
            return self.v25
        return self.v2 if record.nccl else self.v1

    def check_nodes(self, count: int) -> None:
        """Raise Trouble where this test cannot run on `count` nodes."""
        if count < self.fewest or (self.most and count > self.most):
            wanted = f"{self.fewest}" if self.most == self.fewest else f"{self.fewest} or more"
            raise Trouble(Problem("--nodes", f"the {self.name} test cannot run on that many nodes", str(count), wanted))


def _ours(name: str, **more: object) -> Kind:
    program = Run(f"{name}.py", variables="intranode" if more.get("most") == 1 else "")
    return Kind(name, v1=program, v2=program, v25=program, ours=True, **more)  # type: ignore[arg-type]


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "internode",
            "DeepEP's internode test over RDMA, two nodes by default.",
            Run("test_internode.py"),
            Run("elastic/test_ep.py", instead=SHORT_V2),
            nodes=2,
            fewest=2,
            v25=Run("ep/test_ep.py", instead=SHORT_V2),
        ),
        Kind(
            "intranode",
            "DeepEP's intranode test over NVLink, on one node.",
            Run("test_intranode.py"),
            Run("elastic/test_ep.py", instead=SHORT_V2),
            most=1,
            v25=Run("ep/test_ep.py", instead=SHORT_V2),
        ),
        Kind(
            "low-latency",
            "DeepEP's low-latency test, one node by default (more: sbatch -N 2).",
            Run("test_low_latency.py"),
            Run("legacy/test_low_latency.py"),
            minutes=LOW_LATENCY_MINUTES,
        ),
        Kind(
            "pressure",
            "DeepEP's pressure test: random inputs, each sent many times and compared, until the time is over.",
            Run("test_low_latency.py", always=("--pressure-test",), variables="low-latency"),
            Run("elastic/test_ep.py", always=("--do-pressure-test", "--skip-perf-test", *PATIENCE_V2)),
            minutes=240,
            endless=True,
            v25=Run("ep/test_ep.py", always=("--do-pressure-test", "--skip-perf-test", *PATIENCE_V2)),
        ),
        Kind(
            "ep",
            "DeepEP V2's own test in all its modes, two nodes by default.",
            None,
            Run("elastic/test_ep.py", always=PATIENCE_V2),
            nodes=2,
            minutes=180,
            v25=Run("ep/test_ep.py", always=PATIENCE_V2),
        ),
        _ours(
            "nccl",
            purpose="All-reduce and all-to-all through torch over the same network cards, two nodes by default.",
            nodes=2,
        ),
        _ours(
            "pairs",
            purpose="Every pair of nodes for a moment, to find the one bad link; two nodes by default.",
            nodes=2,
            fewest=2,
        ),
        Kind(
            "example-prefill",
            "Example: a training step of a mixture of experts, compared with plain PyTorch; one node by default.",
            Run("../examples/moe_prefill.py", variables="internode"),
            Run("../examples/elastic_prefill.py", variables="internode"),
            minutes=10,
            ours=True,
        ),
        Kind(
            "example-decode",
            "Example: decoding steps of a mixture of experts, compared with plain PyTorch; one node by default.",
            Run("../examples/moe_decode.py", variables="low-latency"),
            Run("../examples/elastic_decode.py", variables="internode"),
            minutes=10,
            ours=True,
        ),
        _ours("smoke", purpose="One import, one dispatch and one combine on one node, in seconds.", most=1, minutes=10),
    )
}
"""All kinds by name, in the order in which they are listed."""


def find_kind(name: str, record: StackRecord) -> Kind:
    """Return the kind called `name`; Trouble where there is none, or where the stack has no such test."""
    known_kind(name)
    kind = KINDS[name]
    if kind.run_for(record) is None:
        fitting = ", ".join(other.name for other in KINDS.values() if other.run_for(record))
        generation, other_generation = ("V2.5", "V1 or V2") if record.is_v25 else ("V1", "V2")
        what = f"stack {record.stack} is DeepEP {generation}, which has no such test"
        remedy = f"--stack with a stack of DeepEP {other_generation}"
        raise Trouble(Problem("--kind", what, found=name, wanted=fitting, try_=remedy))
    return kind


def known_kind(name: str) -> None:
    """Raise Trouble where no stack has a test of that name."""
    if name not in KINDS:
        raise Trouble(Problem("--kind", "no such test", found=name, wanted=", ".join(KINDS)))


FILE = "rules/passes.toml"
"""Below env/."""

KIND = ValueForm("|".join(KINDS), " or ".join(KINDS))
CAPABILITY = ValueForm(r"[0-9]{1,2}\.[0-9]", 'a compute capability such as "10.0"')


class Pass(Struct, frozen=True):
    """One pass of a kind: its tokens, combine calls that one run compares on each rank, how many of those it must
    have over all ranks (0: one run), and the compute capability from which on GPUs have it ("" for all)."""

    kind: str
    tokens: int
    calls: int
    checked: int = 0
    capability: str = ""
    why: str = ""

    @property
    def option(self) -> str:
        """Return the pass as programs/passes.py reads it."""
        return f"--pass={self.tokens}:{self.calls}:{self.checked}:{self.capability or '0'}"

    def is_for(self, capability: str) -> bool:
        """Return whether GPUs of a compute capability have it."""
        return not self.capability or _number(capability) >= _number(self.capability)


def read_passes(texts: Mapping[str, str]) -> tuple[Pass, ...]:
    """Return the passes in the files of env/ (`texts` by relative path); Trouble where they cannot be read."""
    if FILE not in texts:
        raise Trouble(Problem(f"env/{FILE}", "this file is missing", try_="a fresh checkout"))
    return load_passes(texts[FILE], f"env/{FILE}")


def load_passes(text: str, where: str) -> tuple[Pass, ...]:
    """Return the passes in a TOML text, in its order; Trouble with every fault, each naming `where` and the key."""
    problems: list[Problem] = []
    top = Table(load_toml(text, where), where, problems)
    found: list[Pass] = []
    for table in top.tables("pass"):
        one = _pass(table)
        if one.capability and all(other.kind != one.kind for other in found):
            table.complain("capability", "the first pass of a kind is for all GPUs", one.capability)
        found.append(one)
        table.close()
    top.close()
    if problems:
        raise Trouble(*problems)
    return tuple(found)


def _pass(table: Table) -> Pass:
    return Pass(
        kind=table.text("kind", KIND),
        tokens=table.number("tokens", 1),
        calls=table.number("calls", 1),
        checked=table.number("checked", 1) if "checked" in table.data else 0,
        capability=table.text("capability", CAPABILITY) if "capability" in table.data else "",
        why=table.text("why", SOME),
    )


def common_capability(passes: Iterable[Pass], archs: Iterable[str]) -> str:
    """Return a compute capability that stands for all GPUs a stack was built for, where each of them has the same
    passes; else "": the GPUs of a test have to be asked."""
    known = sorted(archs, key=_number)
    same = all(len({each.is_for(arch) for arch in known}) == 1 for each in passes)
    return known[-1] if known and same else ""


def _number(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major or 0), int(minor or 0)
