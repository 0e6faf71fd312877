"""The stand-in sources as the build wants them: repositories, wheels, a fake CUDA toolkit, and requests made of them.

    python tests/support/standins.py FOLDER PREFIX

builds everything into PREFIX with what is prepared in FOLDER, as one process that a test can kill.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import uv

from deepep_bootstrap.bootstrap import build
from deepep_bootstrap.bootstrap.build import BuildRequest, Event
from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.fetch import wheels
from deepep_bootstrap.fetch.locations import Level, Mirrors
from deepep_bootstrap.fetch.sources import fetch_source
from deepep_bootstrap.inventory.facts import Facts, Python, Toolkit
from deepep_bootstrap.lock import model
from deepep_bootstrap.prefix import entries
from deepep_bootstrap.prefix.entries import name_entries
from deepep_bootstrap.remote.fleet import ConnectionPool
from tests.support.build import HERE, RECIPES, UNHURRIED
from tests.support.shipped import demo_lock

STANDIN = "https://example.invalid/standin/"
FACTS = Facts(os_id="debian", os_version="12", machine="x86_64", tools=(("gcc", "12.2.0"), ("g++", "12.2.0")))


@dataclass(frozen=True)
class Prepared:
    """What was fetched once: the lock, the wheel target, and the files to send by their names in the stream."""

    folder: Path
    lock: model.Lock
    target: str
    files: tuple[tuple[str, Path], ...]

    def toolkit(self, version: str = "12.9.86") -> Toolkit:
        """Return a fake CUDA toolkit of this release, one per release and folder."""
        target = self.folder / f"cuda-{version}"
        if not target.exists():
            subprocess.run([ROOT / "tests/fakes/cuda/install", target, version], check=True)
        return Toolkit(str(target), version, split_compile=True, stubs=True)

    def wanted(self, toolkit: Toolkit, external: str = "") -> entries.EntryInputs:
        """Return what makes the demo's entries; `external` is an interpreter with torch in it."""
        number = self.target.split("-")[0].removeprefix("cp3")
        python = Python(external or f"/usr/bin/python3.{number}", f"3.{number}.0", torch="2.10.0" if external else "")
        stack = self.lock.stacks[self.lock.default_stack]
        return entries.EntryInputs(
            self.lock, stack, RECIPES, ("9.0", "10.0"), FACTS, toolkit, python, "" if external else self.target
        )

    def request(self, prefix: Path, wanted: entries.EntryInputs, **changes: object) -> BuildRequest:
        """Return a request for all entries that are wanted."""
        given = {
            "wheels": wanted.stack.wheels[self.target] if wanted.target else (),
            "heartbeat": float(UNHURRIED),
            "jobs": 2,
            **changes,
        }
        entries = name_entries(wanted)
        return BuildRequest(str(prefix), entries, RECIPES, self.chunks, prefix.parent / "logs", **given)  # type: ignore[arg-type]

    def chunks(self) -> Iterator[bytes]:
        """Yield the tar stream of sources, wheels and uv."""
        yield from filetree.tar_tree(self.files)


def newest_target(found: model.Stack) -> str:
    """Return the newest wheel target that this machine has a Python with headers for."""
    numbers = sorted(
        (int(target.split("-")[0].removeprefix("cp3")) for target in found.wheels if target.endswith("x86_64")),
        reverse=True,
    )
    number = next(number for number in numbers if Path(f"/usr/include/python3.{number}/Python.h").exists())
    return f"cp3{number}-x86_64"


def prepare(folder: Path) -> Prepared:
    """Make repositories and wheels in `folder` and fetch what the demo's lock names through the engine's own connections."""
    found = demo_lock()
    stack = found.stacks[found.default_stack]
    target = newest_target(stack)
    if not (folder / "upstreams").exists():
        subprocess.run(
            [sys.executable, ROOT / "tests/upstreams/make.py", folder / "upstreams"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    mirrors = Mirrors(
        (Level({STANDIN: f"{folder}/upstreams/git/standin/"}, {"standin": f"{folder}/upstreams/wheels"}),)
    )
    sources = {
        name: fetch_source(found.sources[name], mirrors, folder / "cache")
        for name in (stack.gdrcopy, stack.nvshmem, stack.deepep)
    }
    packages = wheels.fetch_wheels(stack.wheels[target], mirrors, folder / "cache", lambda _: None)
    files = [(f"src/{name}", path) for name, path in sources.items()] + [
        (f"wheels/{path.name}", path) for path in packages.values()
    ]
    return Prepared(folder, found, target, (*files, ("bin/uv", Path(uv.find_uv_bin()))))


def run(request: BuildRequest, on_event: Callable[[Event], None] = lambda _: None) -> dict[str, Outcome]:
    """Build and return the outcomes by kind of entry."""
    transport = ConnectionPool([HERE])
    try:
        outcomes = build.build_all(transport, HERE, request, on_event)
    finally:
        transport.close()
    kinds = {entry.name: entry.kind for entry in request.entries}
    return {kinds[outcome.step]: outcome for outcome in outcomes}


def main(folder: Path, prefix: Path) -> int:
    """Build everything and print what happens, one event a line."""
    prepared = prepare(folder)
    request = prepared.request(prefix, prepared.wanted(prepared.toolkit()))

    def say(event: Event) -> None:
        # In one piece: entries are built at the same time, and `print` writes each word and the end of the line by itself.
        sys.stdout.write(f"{event.entry} {event.state} {event.line}\n")
        sys.stdout.flush()

    outcomes = run(request, say)
    return 0 if all(outcome.state in {"done", "unchanged"} for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
