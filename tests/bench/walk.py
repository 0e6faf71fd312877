"""How many modules of the engine a reader enters on three walks through a real run on the embedded cluster (root):

    python tests/bench/walk.py
    WALK_ROOT=/another/checkout python tests/bench/walk.py

    bootstrap  from `invoke bootstrap --hosts` until the first host recipe is handed to a host
    variable   from a line of the hosts file to a variable of the modulefile: reading it, deciding, rendering
    report     from the logs of a test to its HTML report

A module is entered when one of its functions is called while the walk lasts, in any thread; what runs while a module
is being imported does not count. Prints a line a walk: the number, then the names in the order of entry.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from invoke.main import program

ROOT = Path(os.environ.get("WALK_ROOT", Path(__file__).resolve().parent.parent.parent))
PACKAGE = f"{ROOT / 'deepep_bootstrap'}{os.sep}"
LOCK = ROOT / "tests/upstreams/demo.lock.toml"

RECIPE = b"export RECIPE=host/"
"""Before the script of a host recipe alone."""

APPLY = b"\nset -- apply\n"
"""Before one that is to change something; a look at the host has `check` there."""

VARIABLE = {
    ("inventory.hostsfile", "read_hosts"),
    ("plan.decisions", "make_decisions"),
    ("prefix.modulefiles", "render_offer"),
    # Their names before the packages, so that both layouts can be walked.
    ("hosts", "from_flag"),
    ("choose", "choose"),
    ("modules", "render"),
}
"""The functions that turn a line of the hosts file into a variable: module and name."""


class Recorder:
    """A profile function (`sys.setprofile`) that keeps the engine's modules in the order in which they are entered.

    With `below`, only while one of these functions (module, name) runs in the same thread; until `ends` says so of a
    call's frame.
    """

    def __init__(
        self, below: set[tuple[str, str]] | None = None, ends: Callable[[FrameType], bool] = lambda frame: False
    ) -> None:
        self.entered: dict[str, None] = {}
        self._below = below
        self._ends = ends
        self._over = False
        self._here = threading.local()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if self._over or event not in {"call", "return"} or not code.co_filename.startswith(PACKAGE):
            return
        step = 1 if event == "call" else -1
        module = code.co_filename[len(PACKAGE) : -3].replace(os.sep, ".")
        if code.co_name == "<module>":
            self._here.importing = getattr(self._here, "importing", 0) + step
        if (module, code.co_name) in (self._below or ()):
            self._here.below = getattr(self._here, "below", 0) + step
        is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)  # the body of a class is none
        if event == "return" or not is_function or getattr(self._here, "importing", 0):
            return
        if self._below is None or getattr(self._here, "below", 0):
            self.entered[module] = None
        self._over = self._ends(frame)


def hands_out_recipe(frame: FrameType) -> bool:
    """Return whether a call hands a host recipe that is to act to a host."""
    if frame.f_code.co_name != "payload":
        return False
    script = bytes(frame.f_locals["body"])
    return RECIPE in script and APPLY in script


def walk(recorders: list[Recorder], *words: str) -> None:
    """Run one verb in this process, as `invoke` would, with the recorders looking on."""

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        for recorder in recorders:
            recorder(frame, event, arg)

    sys.argv = ["invoke", *words]
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        program.run(sys.argv, exit=False)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def main() -> int:
    """Walk the three walks on a cluster of their own, and print what was entered."""
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    bootstrap, variable, report = Recorder(ends=hands_out_recipe), Recorder(below=VARIABLE), Recorder()
    with tempfile.TemporaryDirectory(prefix="walk-") as scratch:
        lab, sources = f"{scratch}/lab", f"{scratch}/standin"
        invoke = [sys.executable, "-m", "invoke"]
        subprocess.run(
            [sys.executable, "tests/upstreams/make.py", sources], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
        subprocess.run([*invoke, "lab", "up", f"--dir={lab}"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        try:
            os.environ.update(DEEPEP_SSH_CONFIG=f"{lab}/ssh_config", XDG_STATE_HOME=f"{scratch}/state")
            hosts = f"--hosts={lab}/hosts.txt"
            mirrors = [
                f"--mirror=https://example.invalid/standin/={sources}/git/standin/",
                f"--mirror=index:standin={sources}/wheels",
            ]
            walk([bootstrap, variable], "bootstrap", hosts, f"--lock={LOCK}", *mirrors, "--yes", "--skip=smoke")
            subprocess.run([*invoke, "test", hosts, "--kind=internode"], check=True, stdout=subprocess.DEVNULL)
            walk([report], "report", f"--html={scratch}/report.html", hosts)
        finally:
            subprocess.run([*invoke, "lab", "down", f"--dir={lab}"], cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
    for name, recorder in (("bootstrap", bootstrap), ("variable", variable), ("report", report)):
        print(f"{name}: {len(recorder.entered)} modules: {' '.join(recorder.entered)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
