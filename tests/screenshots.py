"""`make screenshots`: the pictures in docs/screens, taken of a real terminal on an embedded cluster of its own.

Usage: python tests/screenshots.py [FOLDER]   (docs/screens; needs root, tmux and a few minutes)
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.lab import LiveLab, open_lab
from tests.support.terminal_picture import Terminal, picture, shell_environment, steady

SIZES = ((80, 24), (160, 50))
LAB = Path("/run/deepep-screens")
NVCC = "/usr/local/cuda/bin/FAKE_NVCC_SLEEP"


class Camera:
    """Takes pictures of one terminal."""

    def __init__(self, folder: Path, terminal: Terminal) -> None:
        self.folder, self.terminal = folder, terminal

    def take(self, name: str, title: str) -> None:
        columns, rows = self.terminal.columns, self.terminal.rows
        path = self.folder / f"{name}-{columns}x{rows}.svg"
        path.write_text(picture(steady(self.terminal.drawn), columns, rows, title), encoding="utf-8")
        print(path)


@contextlib.contextmanager
def terminal_of(lab: LiveLab, columns: int, rows: int) -> Iterator[Terminal]:
    """Yield a terminal in which every verb finds the lab."""
    with tempfile.TemporaryDirectory() as folder:
        terminal = Terminal(Path(folder) / "tmux", columns, rows)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {f"XDG_{kind}_HOME": f"{lab.dir}/{kind.lower()}" for kind in ("STATE", "CACHE", "CONFIG")}
        terminal.open(ROOT, shell_environment({"PATH": path, **own}))
        try:
            terminal.type(f". {lab.dir}/try.sh")
            yield terminal
        finally:
            terminal.close()


def scenes(lab: LiveLab, camera: Camera) -> None:
    """Play a first day on a cluster: plan, bootstrap, ^C, the rest, a wave of reboots, a test."""
    terminal = camera.terminal
    # Notes are told once: the second plan is what a person looks at from then on.
    for _ in range(2):
        terminal.type("invoke plan")
        terminal.wait_for_prompt()
    camera.take("plan", "invoke plan")

    lab.nsenter("n001", f"echo 3 >{NVCC}")
    terminal.type("invoke bootstrap --yes")
    terminal.wait_while_running(r"\] n001 build nvshmem")
    camera.take("bootstrap", "invoke bootstrap while it builds")
    terminal.keys("C-c")
    terminal.wait_for_prompt()
    camera.take("interrupted", "invoke bootstrap after an interruption")

    lab.nsenter("n001", f"rm {NVCC}")
    terminal.type("invoke bootstrap --yes")
    terminal.wait_while_running(r"^Finished after")
    terminal.wait_for_prompt()

    lab.bare("n001", "n002")
    terminal.type("invoke bootstrap --yes --reboot=rolling")
    terminal.wait_while_running(r"\] n002 .*reboot")
    camera.take("wave", "invoke bootstrap --reboot=rolling, the second node of a wave")
    terminal.wait_for_prompt()

    terminal.type("invoke test --kind=internode")
    terminal.wait_for_prompt()
    camera.take("test", "invoke test --kind=internode")


def main(words: list[str]) -> None:
    """Take all pictures anew."""
    folder = Path(words[0]) if words else ROOT / "docs" / "screens"
    folder.mkdir(parents=True, exist_ok=True)
    from deepep_bootstrap.lab import first_steps

    for lab in open_lab(LAB):
        first_steps.write_try_file(lab.lab)
        for columns, rows in SIZES:
            lab.reset()
            with terminal_of(lab, columns, rows) as terminal:
                scenes(lab, Camera(folder, terminal))


if __name__ == "__main__":
    main(sys.argv[1:])
