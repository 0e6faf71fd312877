"""The compiler that comes along with DeepEP V2, out of NVIDIA's own wheels, and the host compiler out of Debian's own
packages, both as the shipped lock pins them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import uv

from deepep_bootstrap.bootstrap.build import BuildRequest
from deepep_bootstrap.core import filetree
from deepep_bootstrap.fetch.locations import Mirrors
from deepep_bootstrap.fetch.wheels import fetch_wheels
from deepep_bootstrap.inventory.facts import Python, Toolkit
from deepep_bootstrap.prefix.entries import EntryInputs, name_entries
from tests.support import standins
from tests.support.build import FAST, RECIPES, make_prefix
from tests.support.paths import ROOT
from tests.support.shipped import shipped_lock

KERNEL = ROOT / "tests/cases/recipes/jit-kernel.cu"
FLAGS = (  # those of DeepEP V2, csrc/jit/compiler.hpp
    "-std=c++20",
    "--diag-suppress=39,161,174,177,186,940,3012",
    "--ptxas-options=--register-usage-level=10",
    "--compiler-options=-fPIC,-O3,-fconcepts,-Wno-deprecated-declarations,-Wno-abi",
    "-O3",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
)


def unpack_toolkit(folder: Path) -> Path:
    """Build the entry in a prefix of its own and return its folder. The wheels are kept below .venv: they have 120 MB."""
    lock = shipped_lock()
    python = Python("/usr/bin/python3.11", "3.11.2")
    none = Toolkit("/nowhere", "", split_compile=False, stubs=False)
    asked = EntryInputs(lock, lock.stacks["v2"], RECIPES, ("9.0", "10.0"), standins.FACTS, none, python, "cp311-x86_64")
    entry = next(each for each in name_entries(asked) if each.kind == "toolkit")
    found = fetch_wheels(entry.wheels, Mirrors(), ROOT / ".venv/toolkit", lambda _: None)
    files = [*((f"wheels/{path.name}", path) for path in found.values()), ("bin/uv", Path(uv.find_uv_bin()))]

    def chunks() -> Iterator[bytes]:
        yield from filetree.tar_tree(tuple(files))

    prefix = make_prefix(folder)
    logs = prefix.parent / "logs"
    request = BuildRequest(str(prefix), (entry,), RECIPES, chunks, logs, heartbeat=float(FAST), jobs=2)
    outcomes = standins.run(request)
    assert {kind: outcome.state for kind, outcome in outcomes.items()} == {"toolkit": "done"}, outcomes
    return prefix / "store" / entry.name


def packages_from_apt(folder: Path) -> tuple[str, ...]:
    """Fetch the packages of the host compiler by this machine's apt, as far as its archive has these very versions, and
    return the mirrors that serve them; the others come from where the lock says."""
    (pin,) = shipped_lock().compilers.values()
    mirrors = []
    for package in pin.packages["x86_64"]:
        target = folder / package.file.partition("/")[2]
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            word = f"{package.name}={package.version}"
            subprocess.run(["apt-get", "-q", "download", word], cwd=folder, check=False, capture_output=True)
            for file in folder.glob(f"{package.name}_*.deb"):
                file.rename(target)
        if target.exists():
            mirrors.append(f"{pin.address(package).removesuffix(target.name)}={target.parent}/")
    return tuple(dict.fromkeys(mirrors))
