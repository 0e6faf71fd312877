"""Stacks whose libraries are compiled here, as store entries of a prefix and as the environment that a wheel of them
lands in."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from deepep_bootstrap.lock import model
from tests.support.build import run_bash
from tests.support.paths import ROOT
from tests.support.shipped import shipped_lock
from tests.support.store import RECORD, Prefix, entry_name

LOCK_TEXT = (ROOT / "deepep.lock.toml").read_text(encoding="utf-8")
PYTHON = f"cp3{sys.version_info.minor}"
SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))

NVSHMEM_SOURCE = """
void nvshmemx_vendor_get_version_info(int *a, int *b, int *c) { *a = %d; *b = %d; *c = %d; }
int nvshmem_my_pe(void) { return 0; }
"""
NCCL_SOURCE = "int ncclGetVersion(int *version) { *version = %d; return 0; }"
TRANSPORT_SOURCE = "int nvshmemt_init(void) { return 45; }"
EXTENSION_SOURCE = """
#include <Python.h>
#include <stdlib.h>
int nvshmem_my_pe(void);
#ifdef V2
int ncclGetVersion(int *);
#define NAME "_C"
#define INIT PyInit__C
#else
#define NAME "deep_ep_cpp"
#define INIT PyInit_deep_ep_cpp
#endif
static PyModuleDef module = {PyModuleDef_HEAD_INIT, NAME, 0, -1, 0};
PyMODINIT_FUNC INIT(void) {
    int number = nvshmem_my_pe();
#ifdef V2
    ncclGetVersion(&number);
#endif
    return secure_getenv("NEVER") || number < 0 ? 0 : PyModule_Create(&module);
}
"""
INIT = '''"""DeepEP."""
from __future__ import annotations

import torch
{}

__version__ = "{}"
'''
TORCH = """import ctypes, pathlib, types
__version__ = "{version}"
version = types.SimpleNamespace(cuda="{cuda}" or None)
for path in sorted(pathlib.Path(__file__).parent.parent.glob("nvidia/*/lib/lib*.so.*")):
    ctypes.CDLL(str(path))
"""


@cache
def lock() -> model.Lock:
    """The shipped lock."""
    return shipped_lock()


def shared(source: str, target: Path, *words: str) -> Path:
    """Compile C into a shared library; `words` are flags and libraries to link with."""
    target.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-o", str(target), "-x", "c", "-", "-x", "none", *words]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def nvshmem(folder: Path, version: str) -> Path:
    """Make libnvshmem_host.so.3 that says this version."""
    numbers = tuple(map(int, version.split(".")))
    return shared(NVSHMEM_SOURCE % numbers, folder / "libnvshmem_host.so.3", "-Wl,-soname,libnvshmem_host.so.3")


def nccl(folder: Path, version: str) -> Path:
    """Make libnccl.so.2 that says this version."""
    major, minor, patch = map(int, version.split("."))
    number = major * 10000 + minor * 100 + patch
    return shared(NCCL_SOURCE % number, folder / "libnccl.so.2", "-Wl,-soname,libnccl.so.2")


def add_entry(prefix: Prefix, name: str, needs: Sequence[str], inputs: Mapping[str, object]) -> Path:
    """Begin a store entry: its folder with the manifest. `seal` ends it."""
    folder = prefix.path / "store" / name
    folder.mkdir(parents=True)
    manifest = {"schema": 1, "name": name, "needs": list(needs), "inputs": dict(inputs)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def seal(prefix: Prefix, folder: Path) -> None:
    """Make the modes and the record of an entry, as publish.sh does."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o555 if ".so" in path.name else 0o444)
    done = run_bash(RECORD, {"PREFIX": str(prefix.path)}, str(folder))
    assert done.returncode == 0, done.stderr


def build_stack(prefix: Prefix, case: Mapping[str, Any]) -> None:
    """Put the entries of a case of tests/cases/prefix/wheels.toml into the store and offer them as stack v1."""
    source = lock().sources[case["source"]]
    v2 = source.version.startswith("2.")
    nvshmem_name = entry_name("nvshmem", case["nvshmem_version"])
    deepep_name = entry_name("deepep", source.version)
    python_name = "" if case.get("external") else entry_name("python", case["torch"])
    base = _add_nvshmem(prefix, nvshmem_name, case)
    nccl_lib = nccl(prefix.path.parent / "nccl", case.get("nccl", "2.27.5")).parent
    if python_name:
        folder = add_entry(prefix, python_name, [nvshmem_name], {"kind": "python"})
        info = folder / f"lib/python3.{sys.version_info.minor}/site-packages/torch-{case['torch']}.dist-info"
        info.mkdir(parents=True)
        lines = [f"Requires-Dist: {each}" for each in ("numpy", *case.get("torch_requires", ()))]
        (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", "Name: torch", *lines, "", "torch"]))
        seal(prefix, folder)
    needs = [] if case.get("external") and v2 else [nvshmem_name, *([python_name] if python_name else [])]
    inputs: dict[str, object] = {
        "source": source.hash,
        "substitutes": [] if case.get("unfenced") else [each.effect for each in source.substitutes],
        "cuda": case["cuda"],
        "archs": case.get("archs", ["9.0"]),
        "os": ["debian", "12", "x86_64"],
    }
    if not python_name:
        inputs["python"] = {"path": "/opt/vllm/bin/python", "torch": case["torch"]}
    beside_torch = bool(case.get("external")) and v2
    folder = add_entry(prefix, deepep_name, needs, inputs)
    _add_package(folder / "lib/python", v2=v2, version=source.version, nvshmem=base, nccl_lib=nccl_lib)
    if target := case.get("link"):
        (folder / "lib/python/deep_ep/linked.py").symlink_to(target)
    seal(prefix, folder)
    names = [deepep_name, *([] if beside_torch else [nvshmem_name]), *([python_name] if python_name else [])]
    record = {
        "module": f"deepep/{source.version}-{source.rev[:7]}-v1",
        "torch": "" if case.get("external") else case["torch"],
        "nccl": case.get("nccl", ""),
        "own_nccl": prefix.entry(entry_name("nccl", case["nccl"])).name if case.get("own_nccl") else "",
        "nvshmem_version": case["nvshmem_version"] if beside_torch else "",
        "archs": case.get("archs", ["9.0"]),
    }
    prefix.offer(*names, stack="v1", lock=LOCK_TEXT, **record)


def _add_nvshmem(prefix: Prefix, name: str, case: Mapping[str, Any]) -> Path:
    """Add NVSHMEM's entry and return the folder of its libraries."""
    source = lock().sources["nvshmem"]
    inputs: dict[str, object] = {"wheel": [f"nvidia-nvshmem-cu{case['cuda'][:2]}", case["nvshmem_version"], "hash"]}
    if case["nvshmem"] == "source":
        changes = [{"file": file, "text": "a", "replacement": "b", "count": 1} for file in case.get("more_changes", ())]
        effects = [each.effect for each in source.substitutes]
        inputs = {"source": source.hash, "substitutes": [*effects, *changes]}
    folder = add_entry(prefix, name, [], inputs)
    nvshmem(folder / "lib", case["nvshmem_version"])
    flags = ("-Wl,-soname,nvshmem_transport_ibgda.so.3", "-Wl,-rpath,$ORIGIN:$ORIGIN/../../gdrcopy/lib")
    shared(TRANSPORT_SOURCE, folder / "lib/nvshmem_transport_ibgda.so.3.4.5", *flags)
    (folder / "lib/nvshmem_transport_ibgda.so.3").symlink_to("nvshmem_transport_ibgda.so.3.4.5")
    seal(prefix, folder)
    return folder / "lib"


def _add_package(target: Path, *, v2: bool, version: str, nvshmem: Path, nccl_lib: Path) -> None:
    """Add what setup.py leaves: the package and its extension, linked as the recipes do it."""
    store_path = f"$ORIGIN/{'../' * (4 if v2 else 3)}{nvshmem.parent.name}/lib"
    words = [f"-I{sysconfig.get_paths()['include']}", str(nvshmem / "libnvshmem_host.so.3")]
    if v2:
        words += ["-DV2", str(nccl_lib / "libnccl.so.2")]
        store_path = (
            f"$ORIGIN/../../../../{entry_name('python')}/lib/python3.11/site-packages/nvidia/nccl/lib:{store_path}"
        )
    name = f"deep_ep/_C{SUFFIX}" if v2 else f"deep_ep_cpp{SUFFIX}"
    shared(EXTENSION_SOURCE, target / name, *words, "-Wl,--enable-new-dtags", f"-Wl,-rpath,{store_path}")
    package = target / "deep_ep"
    (package / "__pycache__").mkdir(parents=True)
    (package / "__init__.py").write_text(INIT.format("import deep_ep._C" if v2 else "import deep_ep_cpp", version))
    (package / "__pycache__/__init__.cpython-311.pyc").write_bytes(b"not for a wheel")
    if v2:
        (package / "include").mkdir()
        (package / "include/elastic.cuh").write_text("// kernels\n")


def install(wheel: Path, site: Path) -> None:
    """Unpack a wheel, as an installer does with one that has no scripts."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


def add_torch(site: Path, version: str, cuda: str) -> None:
    """Put a torch there that says these versions and opens the libraries beside it, as the real one does."""
    (site / "torch").mkdir(parents=True)
    (site / "torch/__init__.py").write_text(TORCH.format(version=version, cuda=cuda))
