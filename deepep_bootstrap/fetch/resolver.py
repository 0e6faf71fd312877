"""Wheels of a stack resolved anew by uv for each of its targets, as they then stand in the lock.

uv gets nothing from this machine but the network: no settings, no environment, no index beside those the
lock names.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from msgspec import Struct
from msgspec.structs import replace
from packaging.utils import parse_wheel_filename

from deepep_bootstrap.core import filetree, process
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.toml import load_toml
from deepep_bootstrap.fetch.index import PackageIndex, find_index, size_of
from deepep_bootstrap.fetch.locations import Mirrors, shown
from deepep_bootstrap.fetch.pip import own_settings
from deepep_bootstrap.fetch.uv import find_uv
from deepep_bootstrap.lock.model import Lock, Stack, Wheel, installs_on

GLIBC = "2_28"
"""The oldest glibc that wheels may ask for, of Rocky Linux 8: torch's own wheels ask for the same."""
AT_ONCE = 8
# How pip's settings and the environment reach uv. Everything else of the environment is left out.
SETTINGS = {
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "trusted-host": "UV_INSECURE_HOST",
}
KEPT = (
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)
MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_")
CUDA_WHEEL = re.compile(r"nvidia-.+-cu\d+|nvidia-cuda-runtime|cuda-toolkit")


class WheelClosure(Struct, frozen=True):
    """The wheels of a stack for one target, as the lock has them and as they would be now; `notes` says what one
    should know of it."""

    stack: str
    target: str
    before: tuple[Wheel, ...]
    after: tuple[Wheel, ...]
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.stack} {self.target}"

    @property
    def changes(self) -> dict[str, tuple[Wheel | None, Wheel | None]]:
        """What differs, by distribution: the wheel before and after, None where there is none."""
        old, new = ({wheel.name: wheel for wheel in wheels} for wheels in (self.before, self.after))
        return {name: (old.get(name), new.get(name)) for name in sorted({*old, *new}) if old.get(name) != new.get(name)}


class Tools(Struct, frozen=True):
    """What resolving takes: uv, where indexes are, the settings of the caller's pip, and an empty folder."""

    uv: Path
    mirrors: Mirrors
    settings: Mapping[str, str]
    scratch: Path


@contextmanager
def tools(lock: Lock, mirrors: Mirrors, say: Callable[[str], None]) -> Iterator[Tools]:
    """Provide the locked uv (else this machine's own) and a folder for the time of an update."""
    uv = find_uv(platform.machine(), lock, mirrors, say)
    if uv.remark:
        say(f"note: {uv.remark}")
    with tempfile.TemporaryDirectory(prefix="deepep-bootstrap-") as scratch:
        yield Tools(uv.path, mirrors, own_settings(), Path(scratch))


def renew(lock: Lock, stack: Stack, tools: Tools) -> list[WheelClosure]:
    """Return what the wheels of `stack` become for each target that it names. Raises Trouble with every target that
    has no answer."""
    where = f"{lock.path}: stack.{stack.name}"
    indexes = {
        name: find_index(name, tools.mirrors, tools.settings)
        for name in (stack.asked.index, *stack.asked.indexes.values())
    }
    known = {wheel.hash: wheel for each in lock.stacks.values() for wheels in each.wheels.values() for wheel in wheels}
    folder = tools.scratch / stack.name
    _write_project(stack, indexes, folder)
    found: list[WheelClosure] = []
    problems: list[Problem] = []
    for target in stack.asked.targets:
        try:
            packages = _resolve(stack, target, tools, folder)
            wheels = _with_sizes([_chosen(stack, package, target) for package in packages], indexes, known)
            after = tuple(sorted(wheels, key=lambda wheel: wheel.name))
            problems += _without_cuda(after, target, where)
            notes = (*_replaced(stack, target, after, tools), *_clashes(lock, stack, after))
            found.append(WheelClosure(stack.name, target, stack.wheels.get(target, ()), after, notes))
        except Trouble as trouble:
            problems += [
                replace(problem, where=f"{where}, {target}: {problem.where}".removesuffix(": "))
                for problem in trouble.problems
            ]
    if problems:
        raise Trouble(*problems)
    return found


def _write_project(stack: Stack, indexes: Mapping[str, PackageIndex], folder: Path) -> None:
    """Write what uv reads: the requirements with the index of each, and a configuration that stands in place of all
    others."""
    folder.mkdir()
    tables = "".join(
        _index_table(index, folder, is_default=name == stack.asked.index) for name, index in indexes.items()
    )
    sources = "".join(
        f"{json.dumps(name)} = {{ index = {json.dumps(index)} }}\n" for name, index in stack.asked.indexes.items()
    )
    wanted = f"dependencies = {json.dumps(list(stack.asked.python))}"
    head = (
        f'[project]\nname = "deepep-bootstrap-closure"\nversion = "0"\nrequires-python = '
        f'">=3.10"\n{wanted}\n\n[tool.uv.sources]\n'
    )
    (folder / "pyproject.toml").write_text(
        f"{head}{sources}\n{tables.replace('[[index]]', '[[tool.uv.index]]')}", encoding="utf-8"
    )
    (folder / "uv.toml").write_text(tables, encoding="utf-8")
    (folder / "overrides.txt").write_text("".join(f"{each}\n" for each in stack.asked.overrides), encoding="utf-8")


def _index_table(index: PackageIndex, folder: Path, *, is_default: bool) -> str:
    """Return an index for uv. A directory becomes one flat folder of links: uv knows no folders by distribution
    without pages."""
    place, form = index.place, ""
    if index.folder:
        flat = folder / f"index-{index.name}"
        flat.mkdir()
        for file in sorted([*index.folder.glob("*.whl"), *index.folder.glob("*/*.whl")]):
            if not (flat / file.name).exists():
                (flat / file.name).symlink_to(file.absolute())
        place, form = str(flat), 'format = "flat"\n'
    which = "default" if is_default else "explicit"
    return f"[[index]]\nname = {json.dumps(index.name)}\nurl = {json.dumps(place)}\n{form}{which} = true\n\n"


def _resolve(
    stack: Stack, target: str, tools: Tools, folder: Path, *, overrides: bool = True
) -> list[Mapping[str, Any]]:
    """Let uv resolve what is asked for, for one target; return its packages. Raises Trouble with uv's own reason."""
    interpreter, machine = target.split("-", 1)
    out = folder / f"pylock.{interpreter}.toml"
    words: list[str | Path] = [
        tools.uv,
        "pip",
        "compile",
        "--quiet",
        "--no-progress",
        "--no-header",
        "--python",
        sys.executable,
    ]
    words += ["--config-file", folder / "uv.toml", "--python-version", f"3.{interpreter[3:]}"]
    words += ["--python-platform", f"{machine}-manylinux_{GLIBC}", "--only-binary", ":all:", "--format", "pylock.toml"]
    words += ["--overrides", folder / "overrides.txt"] if overrides and stack.asked.overrides else []
    out.unlink(missing_ok=True)
    done = process.run_program(
        (*words, "--output-file", out, folder / "pyproject.toml"), env=_environment(tools), cwd=folder
    )
    if done.code != 0:
        reason = " ".join(
            re.sub(r"[a-z+]+://\S+", lambda match: shown(match[0]), done.tail).replace(str(tools.scratch), "").split()
        )
        raise Trouble(
            Problem(
                "", "uv finds no set of wheels", reason, try_="other requirements, overrides or indexes of this stack"
            )
        )
    packages = load_toml(out.read_text(encoding="utf-8"), "pylock.toml").get("packages", [])
    return packages if isinstance(packages, list) else []


def _environment(tools: Tools) -> dict[str, str]:
    """Return the whole environment of uv: an empty home, and how this machine reaches the network."""
    own = {key: os.environ[key] for key in KEPT if key in os.environ}
    own |= {SETTINGS[key]: value for key, value in tools.settings.items() if key in SETTINGS and value}
    home = tools.scratch / "home"
    home.mkdir(exist_ok=True)
    if (netrc := Path(os.environ.get("NETRC") or Path.home() / ".netrc")).is_file():
        own["NETRC"] = str(netrc)
    folders = {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home),
        "XDG_CONFIG_DIRS": str(home),
        "UV_CACHE_DIR": str(tools.scratch / "cache"),
    }
    return {**own, **folders, "PATH": os.defpath, "LC_ALL": "C.UTF-8", "UV_PYTHON_DOWNLOADS": "never"}


def _chosen(stack: Stack, package: Mapping[str, Any], target: str) -> tuple[Wheel, str]:
    """Return the best of the wheels that uv found for a package, and its address: of several builds the newest.
    Raises Trouble."""
    name, version = str(package.get("name", "")), str(package.get("version", ""))
    index = stack.asked.index_of(name)
    candidates = []
    for entry in package.get("wheels", ()):
        url = str(entry.get("url") or Path(str(entry.get("path", ""))).absolute().as_uri())
        digest = str(entry.get("hashes", {}).get("sha256", ""))
        hashed = filetree.sri(bytes.fromhex(digest)) if digest else ""
        wheel = Wheel(
            name, version, index, unquote(urlsplit(url).path.rpartition("/")[2]), hashed, int(entry.get("size", 0))
        )
        if installs_on(wheel, target):
            candidates.append((wheel, url))
    if not candidates:
        raise Trouble(Problem(f"index {index}", f"has no wheel of {name} {version} that installs on {target}"))
    best = max(candidates, key=lambda pair: _rank(pair[0]))
    if not best[0].hash:
        raise Trouble(
            Problem(
                f"index {index}",
                f"gives no sha256 for {best[0].file}",
                wanted="an index that names hashes in its pages",
            )
        )
    return best


def _rank(wheel: Wheel) -> tuple[bool, int, tuple[int, int], str]:
    """Return how good a wheel is among those of one version: one for this interpreter, the newest build, the newest
    glibc."""
    build = parse_wheel_filename(wheel.file)[2]
    matches = [MANYLINUX.match(platform) for platform in wheel.platforms]
    glibc = max(((int(match[1]), int(match[2])) for match in matches if match), default=(0, 0))
    native = all(tag.abi != "none" for tag in wheel.tags)
    return native, build[0] if build else -1, glibc, wheel.file


def _with_sizes(
    chosen: Sequence[tuple[Wheel, str]], indexes: Mapping[str, PackageIndex], known: Mapping[str, Wheel]
) -> list[Wheel]:
    """Return the wheels with their sizes: as the index or the lock says, else a server is asked for the head of the
    file."""

    def one(pair: tuple[Wheel, str]) -> Wheel:
        wheel, url = pair
        if url.startswith("file://"):
            file = Path(unquote(urlsplit(url).path))
            return replace(wheel, hash=filetree.hash_file(file), size=file.stat().st_size)
        if wheel.size:
            return wheel
        locked = known.get(wheel.hash)
        return replace(wheel, size=locked.size if locked and locked.size else size_of(indexes[wheel.index], url))

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="size") as pool:
        return list(pool.map(one, chosen))


def _without_cuda(wheels: Sequence[Wheel], target: str, where: str) -> list[Problem]:
    """Return why wheels cannot run DeepEP: torch is made without CUDA, as it is for aarch64 on some indexes."""
    torch = next((wheel for wheel in wheels if wheel.name == "torch"), None)
    if (
        torch is None
        or torch.version.partition("+")[2].startswith("cu")
        or any(CUDA_WHEEL.fullmatch(wheel.name) for wheel in wheels)
    ):
        return []
    machine = target.split("-", 1)[1]
    what = f"torch {torch.version} on index {torch.index} is made without CUDA for {machine}"
    remedy = f"taking {target} out of targets, or an index in indexes.torch that has CUDA wheels for {machine}"
    return [Problem(f"{where}, {target}", what, torch.file, "a torch that needs wheels of CUDA", remedy)]


def _replaced(stack: Stack, target: str, wheels: Sequence[Wheel], tools: Tools) -> Iterator[str]:
    """Yield what the overrides of a stack changed, by resolving once more without them."""
    if not stack.asked.overrides:
        return
    try:
        plain = _resolve(stack, target, tools, tools.scratch / stack.name, overrides=False)
    except Trouble:
        yield "cannot be resolved without its overrides"
        return
    before = {str(package.get("name")): str(package.get("version")) for package in plain}
    for wheel in wheels:
        if before.get(wheel.name, wheel.version) != wheel.version:
            yield f"{wheel.name} {wheel.version} by override, where the others want {before[wheel.name]}"


def _clashes(lock: Lock, stack: Stack, wheels: Sequence[Wheel]) -> Iterator[str]:
    """Yield where wheels bring another NVSHMEM than the one the stack builds; the stack's own stands in its place
    when installed."""
    own = lock.sources[stack.nvshmem].version if stack.nvshmem else ""
    for wheel in wheels:
        if own and re.fullmatch(r"nvidia-nvshmem-cu\d+", wheel.name) and wheel.version != own:
            yield (
                f"clash: {wheel.name} {wheel.version} comes with torch, the stack builds NVSHMEM {own}, which "
                f"takes its place"
            )
