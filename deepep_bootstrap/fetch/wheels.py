"""Wheel files by exact name and hash: from a directory, else through pip with the caller's own index, proxy
and certificates.
"""

from __future__ import annotations

import ast
import base64
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from packaging.utils import canonicalize_name

from deepep_bootstrap.core import filetree, process
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.fetch.locations import Mirrors, is_address, remedy, shown
from deepep_bootstrap.lock.model import OWN_INDEX, Wheel

AT_ONCE = 4
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


def fetch_wheel(wheel: Wheel, mirrors: Mirrors, cache: Path, *, running: set[int] | None = None) -> Path:
    """Return the file of `wheel` in the cache, under its own name, with the locked hash; fetch it where it is not
    there.

    Raises Trouble when its index cannot give it or gives another content; nothing is kept then. Runs beside others
    safely. `running` holds the number of pip's process group while there is one.
    """
    target = cached_file(wheel, cache)
    folder = target.parent
    try:
        if target.is_file() and filetree.hash_file(target) == wheel.hash:
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder) as scratch:
            file = _get(wheel, mirrors, Path(scratch), set() if running is None else running)
            found = filetree.hash_file(file)
            if found != wheel.hash:
                raise Trouble(Problem(f"wheel {wheel.file}", "this file is not the locked one", found, wheel.hash))
            os.replace(file, target)
    except OSError as error:
        raise Trouble(
            Problem(
                str(error.filename or folder), f"the cache cannot be used: {error.strerror}", try_="XDG_CACHE_HOME=DIR"
            )
        ) from None
    return target


def is_cached(wheel: Wheel, cache: Path) -> bool:
    """Return whether the cache has a file for `wheel`; its hash is compared when it is used."""
    return cached_file(wheel, cache).is_file()


def cached_file(wheel: Wheel, cache: Path) -> Path:
    """Return where the cache keeps the file of `wheel` when it has it."""
    return cache / "files" / base64.b64decode(wheel.hash.partition("-")[2]).hex()[:32] / wheel.file


def fetch_wheels(
    wheels: Sequence[Wheel], mirrors: Mirrors, cache: Path, on_line: Callable[[str], None]
) -> dict[str, Path]:
    """Fetch several wheels side by side; return their files by distribution name, in the order given.

    `on_line` gets one line for each wheel that is there, from any thread. Raises Trouble with every wheel that failed.
    """

    running: set[int] = set()

    def one(wheel: Wheel) -> Path:
        file = fetch_wheel(wheel, mirrors, cache, running=running)
        on_line(f"{wheel.file} ({file.stat().st_size / 1e6:.1f} MB)")
        return file

    # All that a directory lacks is reported; an index that fails once is not asked again for each of the others.
    network = any(not place or is_address(place) for place in (mirrors.index(wheel.index) for wheel in wheels))
    with _pool(running) as pool:
        futures = {wheel.name: pool.submit(one, wheel) for wheel in wheels}
        done, waiting = wait(futures.values(), return_when=FIRST_EXCEPTION if network else ALL_COMPLETED)
        if any(future.exception() for future in done):
            for future in waiting:
                future.cancel()
    _raise_errors([future for future in futures.values() if not future.cancelled()])
    return {name: future.result() for name, future in futures.items()}


@contextmanager
def _pool(running: set[int]) -> Iterator[ThreadPoolExecutor]:
    """Give a small pool; when its body is interrupted, what has not begun is dropped and what runs is ended: pip has
    a process group of its own, which ^C on the terminal does not reach."""
    pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="wheel")
    try:
        yield pool
        pool.shutdown(wait=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for pid in tuple(running):
            process.end_group(pid)


def _raise_errors(futures: Sequence[Future[Path]]) -> None:
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, Trouble):
            raise error
    if problems := [problem for error in errors if isinstance(error, Trouble) for problem in error.problems]:
        raise Trouble(*problems)


def _get(wheel: Wheel, mirrors: Mirrors, scratch: Path, running: set[int]) -> Path:
    place = mirrors.index(wheel.index)
    if place and not is_address(place):
        return _copy(wheel, Path(place), scratch)
    return _download(wheel, place, scratch, running)


def _copy(wheel: Wheel, place: Path, scratch: Path) -> Path:
    """Copy the wheel out of a directory. One of another size is not even read."""
    candidate = find_file(wheel, place)
    if wheel.size and (size := candidate.stat().st_size) != wheel.size:
        what = f"{candidate} is not the locked file"
        raise Trouble(Problem(f"wheel {wheel.file}", what, f"{size} bytes", f"{wheel.size} bytes"))
    return shutil.copyfile(candidate, scratch / wheel.file)


def find_file(wheel: Wheel, place: Path) -> Path:
    """Return the file called like the wheel in a directory, flat or with a folder per distribution. Raises Trouble
    when it has none."""
    for folder in dict.fromkeys((place, place / wheel.name, place / canonicalize_name(wheel.name))):
        if (candidate := folder / wheel.file).is_file():
            return candidate
    raise Trouble(
        Problem(
            f"index {wheel.index} ({place})",
            "does not have a wheel of the lock",
            wanted=wheel.file,
            try_=remedy(str(place), ""),
        )
    )


def _download(wheel: Wheel, address: str, scratch: Path, running: set[int]) -> Path:
    """Let pip fetch exactly this file: the hash leaves no choice, the tags make pip consider it on any machine."""
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
        where = f"index {wheel.index}" + (f" ({shown(address)})" if address else "")
        remedy = f"--mirror index:{wheel.index}=DIRECTORY with this file in it"
        raise Trouble(Problem(where, f"does not give {wheel.file} with the locked hash", found=found, try_=remedy))
    return file


def _tag_words(wheel: Wheel) -> Iterator[str]:
    """Yield what makes pip take a wheel of these tags: of several interpreters the newest."""
    newest = max(wheel.tags, key=lambda tag: (len(tag.interpreter), tag.interpreter, tag.abi))
    yield from ("--abi", newest.abi, "--implementation", newest.interpreter[:2])
    if len(newest.interpreter) > len("py3"):
        yield from ("--python-version", newest.interpreter[2:])
    for platform in sorted(wheel.platforms):
        yield from ("--platform", platform)


def _run_pip(words: Sequence[str], environment: Mapping[str, str], running: set[int]) -> process.Completed:
    group: list[int] = []

    def started(pid: int) -> None:
        group.append(pid)
        running.add(pid)

    try:
        return process.run_program((*_pip(), *words), env=environment, on_start=started)
    finally:
        running.difference_update(group)


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
