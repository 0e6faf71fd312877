"""`plan --out` and `bootstrap --plan` on the embedded cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.e2e import Ended, Engine
from tests.support.paths import ROOT

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = pytest.mark.e2e


def test_a_plan_in_a_file_is_done_as_it_was_read_or_not_at_all(engine: Engine, tmp_path: Path) -> None:
    engine.use_built()
    path = tmp_path / "plan.json"
    assert engine.run("plan", f"--out={path}", "--skip=smoke").code == 0

    def carry_out(*more: str) -> Ended:
        argv = [sys.executable, "-m", "invoke", "bootstrap", f"--plan={path}", "--yes", *more]
        done = subprocess.run(
            argv,
            cwd=ROOT,
            env=engine.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    other = carry_out("--prefix=/shared/other")
    assert (other.code, other.out) == (1, ""), other.text
    assert "--prefix: is another than the plan was made with" in other.err
    first = carry_out()
    assert first.code == 0, first.text
    assert "Plan: 1 new generation" in first.out
    again = carry_out()
    assert (again.code, again.out) == (1, ""), again.text
    assert "publish modules: in the plan, and not needed any more" in again.err
    assert [path.name for path in (engine.on_disk / "generations").iterdir()] == ["1"], "nothing was done"
