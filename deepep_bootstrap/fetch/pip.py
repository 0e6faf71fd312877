"""pip, for what it alone knows: the caller's own index, proxy, certificates and accounts."""

from __future__ import annotations

import ast
import base64
import importlib.util
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from deepep_bootstrap.core import process
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.fetch.locations import shown
from deepep_bootstrap.lock.model import OWN_INDEX, Wheel

END_SECONDS = 5.0
"""How long a program that was killed may take to be gone."""
# What stays of pip's configuration. Not among them: find-links and extra-index-url, which would answer for an index
# nobody named.
KEPT = (
    "index-url",
    "no-index",
    "cert",
    "client-cert",
    "trusted-host",
    "proxy",
    "timeout",
    "default-timeout",
    "retries",
    "keyring-provider",
)


class Programs:
    """Process groups of pip that run. Methods may be called from several threads."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._ending = False
        self._changed = threading.Condition()

    def add(self, group: int) -> None:
        """One has begun."""
        with self._changed:
            self._groups.add(group)
            if self._ending:
                process.end_group(group)

    def remove(self, group: int) -> None:
        """One has ended, and was waited for."""
        with self._changed:
            self._groups.discard(group)
            self._changed.notify_all()

    def end(self) -> None:
        """End all, and each that begins from now on; wait until they are gone."""
        with self._changed:
            self._ending = True
            for group in self._groups:
                process.end_group(group)
            self._changed.wait_for(lambda: not self._groups, END_SECONDS)


def download(wheel: Wheel, address: str, scratch: Path, running: Programs) -> Path:
    """Let pip fetch exactly this file into `scratch`: the hash leaves no choice, the tags make pip consider it on any
    machine. `address` is that of its index, "" for the caller's own; `running` knows pip's process group while there
    is one. Raises Trouble."""
    wanted = scratch / "wanted.txt"
    digest = base64.b64decode(wheel.hash.partition("-")[2]).hex()
    wanted.write_text(f"{wheel.name}=={wheel.version} --hash=sha256:{digest}\n", encoding="utf-8")
    words = [
        "download",
        "--quiet",
        "--no-deps",
        "--no-cache-dir",
        "--ignore-requires-python",
        "--only-binary=:all:",
        "--require-hashes",
    ]
    words += ["--requirement", str(wanted), "--dest", str(scratch)]
    words += _tag_words(wheel)
    if address.startswith("http://"):
        # pip ignores plain HTTP beyond this machine; here the hash decides, so that who answers does not matter.
        words += ["--trusted-host", urlsplit(address).netloc.rpartition("@")[2]]
    done = _run_pip(words, _environment(wheel, address), running)
    file = scratch / wheel.file
    if done.code != 0 or not file.is_file():
        errors = [line for line in done.tail.splitlines() if line.startswith("ERROR: ")] or done.tail.splitlines()
        found = (
            errors[-1].removeprefix("ERROR: ")
            if errors
            else ", ".join(sorted(path.name for path in scratch.glob("*.whl")))
        )
        raise Trouble(not_given(wheel, address, found))
    return file


def not_given(wheel: Wheel, address: str, found: str, wanted: str = "") -> Problem:
    """Return that the server of an index does not give a wheel, what it gives being `found`."""
    where = f"index {wheel.index}" + (f" ({shown(address)})" if address else "")
    what = f"does not give {wheel.file} with the locked hash"
    return Problem(where, what, found, wanted, f"--mirror index:{wheel.index}=DIRECTORY with this file in it")


def _tag_words(wheel: Wheel) -> Iterator[str]:
    """Yield what makes pip take a wheel of these tags: of several interpreters the newest."""
    newest = max(wheel.tags, key=lambda tag: (len(tag.interpreter), tag.interpreter, tag.abi))
    yield from ("--abi", newest.abi, "--implementation", newest.interpreter[:2])
    if len(newest.interpreter) > len("py3"):
        yield from ("--python-version", newest.interpreter[2:])
    for platform in sorted(wheel.platforms):
        yield from ("--platform", platform)


def _run_pip(words: Sequence[str], environment: Mapping[str, str], running: Programs) -> process.Completed:
    group: list[int] = []

    def started(pid: int) -> None:
        group.append(pid)
        running.add(pid)

    try:
        return process.run_program((*_pip(), *words), env=environment, on_start=started)
    finally:
        for pid in group:
            running.remove(pid)


def own_index(settings: Mapping[str, str]) -> str:
    """Return the address of the index that the caller's pip asks, with its `settings`, in pip's own words where they
    name none. Raises Trouble when pip is set to ask none."""
    if settings.get("no-index", "").lower() in {"1", "true", "yes", "on"}:
        raise Trouble(
            Problem(
                f"index {OWN_INDEX}",
                "pip is set up to ask no index",
                "no-index",
                try_=f"--mirror index:{OWN_INDEX}=URL",
            )
        )
    if address := settings.get("index-url"):
        return address
    help_text = " ".join(
        process.run_program((*_pip(), "download", "--help"), env={**os.environ, "COLUMNS": "500"}).out.split()
    )
    default = re.search(r"--index-url <url> [^(]*\(default (\S+)\)", help_text)
    if default:
        return default[1]
    raise Trouble(
        Problem(f"index {OWN_INDEX}", "pip does not say which index it asks", try_=f"--mirror index:{OWN_INDEX}=URL")
    )


def _pip() -> tuple[str, ...]:
    """Return the command of a pip: this interpreter's, else the one on PATH."""
    if importlib.util.find_spec("pip") is not None:
        return (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return (found, "--disable-pip-version-check", "--no-input")
    raise Trouble(
        Problem("pip", "is not installed here, and wheels are fetched with it", try_=f"{sys.executable} -m ensurepip")
    )


def _environment(wheel: Wheel, address: str) -> dict[str, str]:
    """Return the environment for a pip that asks one index only: the one at `address`, or for "pypi" the caller's own.

    Addresses may hold a password, so they go by environment and never by command line.
    """
    own = {key: value for key, value in os.environ.items() if not key.startswith("PIP_") or key == "PIP_CONFIG_FILE"}
    settings = own_settings()
    if address:
        settings = {key: value for key, value in settings.items() if key not in ("index-url", "no-index")} | {
            "index-url": address
        }
    elif wheel.index != OWN_INDEX:
        problem = Problem(
            f"index {wheel.index}", "nothing says where it is", try_=f"--mirror index:{wheel.index}=URL_OR_DIRECTORY"
        )
        raise Trouble(problem)
    own |= {f"PIP_{key.upper().replace('-', '_')}": value for key, value in settings.items()}
    return own | {"PIP_CONFIG_FILE": os.devnull, "LC_ALL": "C.UTF-8"}


def own_settings() -> Mapping[str, str]:
    """Return what pip's configuration files and environment say for downloads, the kept keys only, the strongest
    last."""
    listed = process.run_program((*_pip(), "config", "list"))
    settings: dict[str, str] = {}
    for origin in ("global", "download", ":env:"):
        for line in listed.out.splitlines():
            name, equals, value = line.partition("=")
            section, _, key = name.rpartition(".")
            if equals and section == origin and key in KEPT:
                settings[key] = str(ast.literal_eval(value))
    return settings
