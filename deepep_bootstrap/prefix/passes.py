"""How often a test runs, and with how many tokens: env/passes.toml. Values, pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.toml import SOME, Form, Table
from deepep_bootstrap.core.toml import load as load_toml
from deepep_bootstrap.prefix.test_kinds import KINDS

FILE = "passes.toml"
KIND = Form("|".join(KINDS), " or ".join(KINDS))
CAPABILITY = Form(r"[0-9]{1,2}\.[0-9]", 'a compute capability such as "10.0"')


@dataclass(frozen=True)
class Pass:
    """One pass of a kind: its tokens, combine calls that one run compares on each rank, how many of those it must have over all ranks
    (0: one run), and the compute capability from which on GPUs have it ("" for all)."""

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


def read(texts: Mapping[str, str]) -> tuple[Pass, ...]:
    """Return the passes in the files of env/ (`texts` by relative path); Trouble where they cannot be read."""
    if FILE not in texts:
        raise Trouble(Problem(f"env/{FILE}", "this file is missing", try_="a fresh checkout"))
    return load(texts[FILE], f"env/{FILE}")


def load(text: str, where: str) -> tuple[Pass, ...]:
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
    """Return a compute capability that stands for all GPUs a stack was built for, where each of them has the same passes; else "": the
    GPUs of a test have to be asked."""
    known = sorted(archs, key=_number)
    same = all(len({each.is_for(arch) for arch in known}) == 1 for each in passes)
    return known[-1] if known and same else ""


def _number(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major or 0), int(minor or 0)
