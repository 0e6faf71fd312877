"""The watch over a step of a Slurm allocation, with a command of our own in srun's place."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deepep_bootstrap.core.recipes import compose
from tests.support.build import RECIPES

pytestmark = pytest.mark.usefixtures("programs")

PARTS = ("lib.sh", "prefix/lib/owner.sh", "prefix/step.sh")
BEGUN = 'read -ra stat </proc/$$/stat; echo "$$ ${stat[21]} $(readlink /proc/self/ns/pid)" >"$STEP.pid"'


def run_step(folder: Path, srun: str, **graces: int) -> subprocess.CompletedProcess[str]:
    """Run the watch over `srun`, a command line for bash, with other limits than the recipe's."""
    text = compose(RECIPES, *PARTS)
    for name, seconds in graces.items():
        before, name_, after = text.partition(f"\n{name}=")
        assert name_
        text = f"{before}\n{name}={seconds} #{after}"
    script = folder / "watch.sh"
    script.write_text(text, encoding="utf-8")
    env = {"PATH": "/usr/bin:/bin", "STEP": str(folder / "step"), "TOKEN": "token"}
    return subprocess.run(
        ["bash", script, "bash", "-c", srun],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("code", [0, 7])
def test_a_step_ends_as_its_command_does(tmp_path: Path, code: int) -> None:
    done = run_step(tmp_path, f"{BEGUN}; echo said; exit {code}")
    assert (done.returncode, done.stdout) == (code, "said\n")


def test_a_step_that_never_begins_is_given_up(tmp_path: Path) -> None:
    done = run_step(tmp_path, "exec sleep 600", START_GRACE=1)
    assert done.returncode == 1
    assert "Slurm lost this step: its process has not begun within 1 s (was its slurmstepd killed?)" in done.stderr


def test_a_step_whose_end_nobody_tells_is_given_up(tmp_path: Path) -> None:
    done = run_step(tmp_path, f"bash -c '{BEGUN}'; exec sleep 600", SRUN_GRACE=1)
    assert done.returncode == 1
    assert "its process has ended and srun was not told within 1 s" in done.stderr


def test_a_step_that_began_may_take_its_time(tmp_path: Path) -> None:
    done = run_step(tmp_path, f"{BEGUN}; sleep 6; echo end", START_GRACE=1)
    assert (done.returncode, done.stdout) == (0, "end\n")
