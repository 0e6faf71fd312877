"""`invoke manifests`: a kustomize base and overlays for a kind of Kubernetes cluster, in a folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, Problem, Trouble
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import read_tree
from deepep_bootstrap.kubernetes import manifests as made
from deepep_bootstrap.kubernetes.manifests import Rendered
from deepep_bootstrap.kubernetes.settings import read_settings
from deepep_bootstrap.lock import model as locks

MARKER = ".deepep-manifests"
"""The file that says that a folder is ours to replace."""


def manifests(flags: Flags, *, for_: str = "", settings: str = "", out: str = "") -> int:
    """Write manifests for a kind of Kubernetes cluster into a folder: a kustomize base and overlays for networks,
    nodes and tests; nothing is applied.

    The settings of the network are those that a modulefile would have, each with its reason.

    Exit 1 where the settings have faults, or an image has no digest."""
    screen = Screen("manifests", as_json=flags.json)
    lacking = [
        Problem(flag, "is missing", wanted=wanted)
        for flag, value, wanted in (
            ("--for", for_, "gke-a4, gke-a3 or generic"),
            ("--settings", settings, "a file like hosts/gke-a4.toml"),
            ("--out", out, "the folder to write"),
        )
        if not value
    ]
    if lacking:
        raise Trouble(*lacking)
    asked = read_settings(settings, for_)
    lock = locks.read_lock_file(flags.lock or flags.root / "deepep.lock.toml")
    name = flags.stack or lock.default_stack
    if name not in lock.stacks:
        raise Trouble(Problem("--stack", "no such stack in the lock", name, " or ".join(lock.stacks)))
    recipes, texts = read_tree(flags.root / "recipes"), read_tree(flags.root / "env")
    folder = Path(os.path.expanduser(out)).absolute()
    check_folder(folder)
    rendered = made.render(made.Inputs(asked, lock, lock.stacks[name], recipes, texts))
    write(folder, rendered.files)
    show(screen, folder, rendered, for_, name)
    document = {"stack": name, "for": for_, "folder": str(folder), "files": list(rendered.files)}
    screen.document(OK, (), **document, image=asked.image, pool_command=rendered.pool, notes=list(rendered.notes))
    return OK


def check_folder(folder: Path) -> None:
    """Raise Trouble where a folder holds something that is not ours to replace."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise Trouble(Problem(str(folder), "is no folder", try_="another --out"))
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARKER).is_file():
        raise Trouble(
            Problem(str(folder), "holds something that manifests did not write", try_="a new folder as --out")
        )
    if not folder.parent.is_dir():
        raise Trouble(Problem(str(folder.parent), "this folder is not there", wanted="a place for --out"))


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files beside the folder and put them in its place when all are there."""
    try:
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            aside.chmod(0o755)
            (aside / "new").mkdir()
            for path, text in {**files, MARKER: ""}.items():
                (aside / "new" / path).parent.mkdir(parents=True, exist_ok=True)
                (aside / "new" / path).write_text(text, encoding="utf-8")
            if folder.is_dir():
                folder.rename(aside / "old")
            (aside / "new").rename(folder)
        finally:
            shutil.rmtree(aside)
    except OSError as error:
        raise Trouble(Problem(str(folder), f"cannot be written: {error.strerror or error}")) from None


def show(screen: Screen, folder: Path, rendered: Rendered, platform: str, stack: str) -> None:
    """Say what was written and what comes next."""
    screen.say(f"stack {stack} for {platform}: {len(rendered.files)} files in {folder}", style="bold")
    for note in rendered.notes:
        screen.paragraph(f"note: {note}")
    if rendered.pool:
        screen.say("the pool of nodes; nothing runs this for you:")
        screen.say(rendered.pool)
    overlays = sorted({path.split("/")[1] for path in rendered.files if path.startswith("overlays/")})
    commands = [f"kubectl apply -k {folder}/overlays/{name}" for name in ("cluster", "intranode") if name in overlays]
    screen.next_commands(commands)
