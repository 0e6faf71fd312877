"""What a stack asks for its wheels, beside what they were locked to: requirements, targets, and the index of each. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from deepep_bootstrap.core.toml import NAME, Form, Table

PYTHON = "python"
"""The key of the requirements, and what `lock --update` takes for the wheels; so no source has this name."""
OWN_INDEX = "pypi"
TARGET = Form(r"cp3[0-9]+-(x86_64|aarch64)", "a target such as cp312-x86_64")
_BOUND = r"(?:[=!~<>]=|[<>]) ?[0-9][A-Za-z0-9.+!*]*"
REQUIREMENT = Form(
    rf"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?:\[[A-Za-z0-9,._-]+\])?(?: ?{_BOUND}(?:, ?{_BOUND})*)?",
    "a requirement such as torch==2.10.0 or setuptools<82",
)


@dataclass(frozen=True)
class Asked:
    """What the wheels of a stack are resolved from: requirements, and `overrides` of what distributions require of each other, for each of
    `targets`. `indexes` names the index of a requirement that does not come from `index`. Without requirements, nobody resolves."""

    python: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    index: str = OWN_INDEX
    indexes: Mapping[str, str] = field(default_factory=dict)

    def index_of(self, name: str) -> str:
        """Return the name of the index that answers for a distribution."""
        return self.indexes.get(plain_name(name), self.index)


def read_asked(table: Table) -> Asked:
    """Read what the table of a stack asks for; it may ask for nothing."""
    names = table.inner("indexes")
    asked = Asked(
        python=table.words(PYTHON, REQUIREMENT),
        overrides=table.words("overrides", REQUIREMENT),
        targets=table.words("targets", TARGET),
        index=table.text("index", NAME) if "index" in table.data else table.take("index", str, OWN_INDEX),
        indexes={plain_name(name): names.text(name, NAME) for name in names.data},
    )
    if asked.python and not asked.targets:
        table.complain("targets", "is missing or empty", wanted=TARGET.words)
    wanted = [requirement_name(each) for each in asked.python]
    for name in names.data:
        if plain_name(name) not in wanted:
            what = f"only what `{PYTHON}` names can have an index of its own"
            names.complain(name, what, wanted=" or ".join(wanted) or f"{PYTHON} = [...]")
    return asked


def requirement_name(requirement: str) -> str:
    """Return the plain name of the distribution that a requirement is about."""
    return plain_name(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0])


def plain_name(name: str) -> str:
    """Return the name of a distribution as indexes write it: small letters, one dash for any run of dots, dashes and underscores."""
    return re.sub(r"[-_.]+", "-", name).lower()
