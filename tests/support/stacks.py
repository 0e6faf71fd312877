"""The stand-in stacks v1-wheel, v2, v2-vllm and v2.5: libraries that were built here, packed as wheels like the real ones, and a lock
that pins them.

Compilers differ, so the hashes of these wheels are of today and stand in no file of the repository.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

import tomlkit
import uv

from deepep_bootstrap.lock import model
from tests.upstreams import make

INDEX = "built"
NCCL = "2.30.4"
TORCH_OF_VLLM, NCCL_OF_VLLM = "2.14.0", "2.30.7"
NCCL_OF_V25 = "2.32.3"
NCCL_SOURCE = """
int ncclGetVersion(int *version) { *version = NUMBER; return 0; }
"""
NVSHMEM = "3.4.5"
STAMP = b"\0NVSHMEM_IBGDA_SUPPORT=ON NVSHMEM_MPI_SUPPORT=OFF\0"
"""What the real library says of its build; at the end of a shared library it changes nothing."""


@dataclass(frozen=True)
class Stacks:
    """A lock with the stacks, and the folder that serves its index."""

    lock: Path
    wheels: Path


def make_stacks(nvshmem: Path, folder: Path) -> Stacks:
    """Pack the NVSHMEM installed in `nvshmem` and an NCCL made here into wheels below `folder`, and write a lock
    that pins them."""
    wheels = folder / "built"
    wheels.mkdir(parents=True)
    files = nvshmem_files(nvshmem)
    pins = {major: pack(wheels, f"nvidia-nvshmem-cu{major}", NVSHMEM, files) for major in ("12", "13")}
    nccl = pack(wheels, "nvidia-nccl-cu13", NCCL, nccl_files(folder / "nccl", NCCL))
    document = tomlkit.parse(make.LOCK.read_text(encoding="utf-8")).unwrap()
    first, second = document["stack"]["v1"], document["stack"]["v1-cu13"]
    document["stack"]["v1-wheel"] = {
        **{key: first[key] for key in ("deepep", "gdrcopy", "cuda")},
        "nvshmem_wheel": "nvidia-nvshmem-cu12",
        "wheels": {target: exchange(closure, pins["12"]) for target, closure in first["wheels"].items()},
    }
    document["stack"]["v2"] = {
        "deepep": "deepep-v2",
        "nvshmem_wheel": "nvidia-nvshmem-cu13",
        "nccl_wheel": "nvidia-nccl-cu13",
        "cuda": "13",
        "wheels": {target: exchange(closure, pins["13"], nccl) for target, closure in second["wheels"].items()},
    }
    torch = torch_wheel(folder, wheels)
    nccl = pack(wheels, "nvidia-nccl-cu13", NCCL_OF_VLLM, nccl_files(folder / "nccl-of-vllm", NCCL_OF_VLLM))
    document["stack"]["v2-vllm"] = {
        **document["stack"]["v2"],
        "wheels": {target: exchange(closure, torch, pins["13"], nccl) for target, closure in second["wheels"].items()},
    }
    newer = pack(wheels, "nvidia-nccl-cu13", NCCL_OF_V25, nccl_files(folder / "nccl-of-v25", NCCL_OF_V25))
    document["stack"]["v2.5"] = {
        **document["stack"]["v2"],
        "deepep": "deepep-v25",
        "needs": {"gcc": "13", "nvcc": "13.1"},
        "wheels": {target: exchange(closure, pins["13"], newer) for target, closure in second["wheels"].items()},
    }
    path = folder / "stacks.lock.toml"
    path.write_text(tomlkit.dumps(document), encoding="utf-8")
    model.read_lock_file(path)
    return Stacks(path, wheels)


def torch_wheel(folder: Path, wheels: Path) -> dict[str, object]:
    """Put the stand-in of vLLM's torch among the wheels and return its line of the lock."""
    made = make.make_wheel(make.torch_of(TORCH_OF_VLLM, "13.0"), folder)
    file = Path(shutil.move(made, wheels))
    return pin("torch", TORCH_OF_VLLM, file)


def make_environment(stacks: Stacks, folder: Path, python: str, *, nccl: str = NCCL_OF_VLLM) -> Path:
    """Make a Python environment as somebody has it who installed vLLM: its torch, with the NCCL and NVSHMEM that this
    one brings, numpy and setuptools. Return its interpreter. With another `nccl` the NCCL is of that version."""
    uv_program = uv.find_uv_bin()
    interpreter = folder / "bin" / "python"
    subprocess.run([uv_program, "venv", "-q", "--no-project", "--python", python, folder], check=True)
    files = [next(stacks.wheels.glob(f"{name}-*.whl")) for name in ("torch", "nvidia_nvshmem_cu13")]
    files.append(stacks.wheels / f"nvidia_nccl_cu13-{NCCL_OF_VLLM}-py3-none-any.whl")
    words = [uv_program, "pip", "install", "-q", "--python", interpreter]
    subprocess.run([*words, "--no-deps", "--no-index", *files], check=True)
    subprocess.run([*words, "--only-binary", ":all:", "numpy", "setuptools<82"], check=True)
    if nccl != NCCL_OF_VLLM:
        (site,) = folder.glob("lib/python3.*/site-packages")
        for name, content in nccl_files(folder / "other-nccl", nccl).items():
            (site / name).write_bytes(content)
    return interpreter


def exchange(closure: list[dict], *pins: dict) -> list[dict]:
    """Return a closure with `pins` in place of wheels of the same name."""
    names = {pin["name"] for pin in pins}
    return [*(wheel for wheel in closure if wheel["name"] not in names), *pins]


def nvshmem_files(nvshmem: Path) -> dict[str, bytes]:
    """Return what the real wheel carries of an installation: headers, and each library under the name that programs
    load."""
    files = {
        f"nvidia/nvshmem/{path.relative_to(nvshmem)}": path.read_bytes()
        for path in (nvshmem / "include").rglob("*")
        if path.is_file()
    }
    for name in ("libnvshmem_host.so.3", "nvshmem_transport_ibgda.so.3", "libnvshmem_device.a"):
        files[f"nvidia/nvshmem/lib/{name}"] = (nvshmem / "lib" / name).read_bytes()
    files["nvidia/nvshmem/lib/libnvshmem_host.so.3"] += STAMP
    return files


def nccl_files(scratch: Path, version: str) -> dict[str, bytes]:
    """Return a library that knows its version and nothing else, with its header."""
    major, minor, patch = map(int, version.split("."))
    scratch.mkdir(parents=True)
    source, library = scratch / "nccl.c", scratch / "libnccl.so.2"
    source.write_text(NCCL_SOURCE.replace("NUMBER", str(major * 10000 + minor * 100 + patch)))
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", source, "-o", library], check=True)
    numbers = "".join(
        f"#define NCCL_{name} {value}\n" for name, value in (("MAJOR", major), ("MINOR", minor), ("PATCH", patch))
    )
    header = f'{numbers}extern "C" int ncclGetVersion(int *version);\n'
    return {"nvidia/nccl/lib/libnccl.so.2": library.read_bytes(), "nvidia/nccl/include/nccl.h": header.encode()}


def pack(folder: Path, name: str, version: str, files: dict[str, bytes]) -> dict[str, object]:
    """Write a wheel and return its line of the lock."""
    plain = name.replace("-", "_")
    info = f"{plain}-{version}.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "".join(f"{path},,\n" for path in files),
    }
    target = folder / f"{plain}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, content in {**files, **{path: text.encode() for path, text in metadata.items()}}.items():
            archive.writestr(path, content)
    return pin(name, version, target)


def pin(name: str, version: str, file: Path) -> dict[str, object]:
    """Return the line of the lock for a wheel of this index."""
    digest = base64.b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()
    size = file.stat().st_size
    return {
        "name": name,
        "version": version,
        "index": INDEX,
        "file": file.name,
        "hash": f"sha256-{digest}",
        "size": size,
    }


def copy_of(stacks: Stacks, folder: Path) -> Stacks:
    """Return the same stacks with files of their own, for a test that changes them."""
    shutil.copytree(stacks.wheels, folder / "built")
    return Stacks(Path(shutil.copy(stacks.lock, folder)), folder / "built")


def pin_of(stacks: Stacks, name: str) -> str:
    """Return the hash that the lock has for a wheel of these stacks."""
    found = model.read_lock_file(stacks.lock)
    return next(
        wheel.hash
        for stack in found.stacks.values()
        for closure in stack.wheels.values()
        for wheel in closure
        if wheel.name == name and wheel.index == INDEX
    )


def put_pin(stacks: Stacks, pin: dict[str, object], before: str) -> None:
    """Let the lock pin another content of a wheel."""
    old = stacks.lock.read_text(encoding="utf-8")
    document = tomlkit.parse(old).unwrap()
    for stack in document["stack"].values():
        for closure in stack["wheels"].values():
            closure[:] = [pin if wheel["hash"] == before else wheel for wheel in closure]
    stacks.lock.write_text(tomlkit.dumps(document), encoding="utf-8")
