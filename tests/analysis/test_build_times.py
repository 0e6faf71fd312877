"""Times of compile units: what ninja and nvcc noted, as a real ninja 1.11 and nvcc 13.0 do, and damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepep_bootstrap.analysis.build_times import parse_build_times
from deepep_bootstrap.core.toml import load_toml
from tests.support.paths import TESTS

CASES = TESTS / "cases/analysis/build_times"
WANTED = load_toml((CASES / "wanted.toml").read_text(encoding="utf-8"), "wanted.toml")


def test_every_log_has_its_wanted_units() -> None:
    assert {path.stem for path in CASES.glob("*.log")} == set(WANTED)


@pytest.mark.parametrize("case", sorted(path.stem for path in CASES.glob("*.log")))
def test_units_of_a_log(case: str) -> None:
    with Path(CASES, f"{case}.log").open(encoding="utf-8") as log:
        found = parse_build_times(log)
    assert [unit.text for unit in found.units] == WANTED[case]["units"]
    assert (-1 if found.seconds is None else found.seconds) == WANTED[case]["seconds"]
