"""`invoke completion SHELL`: the script with which a shell completes the words of this program."""

from __future__ import annotations

import sys
from pathlib import Path

from deepep_bootstrap.core.errors import OK, Problem, Trouble

FOLDER = Path(__file__).resolve().parent.parent / "completions"
FILES = {"bash": "deepep-bootstrap.bash", "zsh": "_deepep-bootstrap", "fish": "deepep-bootstrap.fish"}


def completion(shell: str) -> int:
    """Print the script that completes verbs, flags, kinds of tests, hosts, generations and runs in a shell.

    bash: `source <(deepep-bootstrap completion bash)` in ~/.bashrc; zsh: the same in ~/.zshrc, behind compinit; fish:
    `deepep-bootstrap completion fish | source` in ~/.config/fish/config.fish."""
    if shell not in FILES:
        raise Trouble(Problem("completion", "no such shell", shell, "bash, zsh or fish"))
    sys.stdout.write((FOLDER / FILES[shell]).read_text(encoding="utf-8"))
    return OK
