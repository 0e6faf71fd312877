"""What this build of deep_ep was made for, held against what is there when it is imported. The module comes first in
deep_ep/__init__.py of a wheel that deepep-bootstrap made; _built_for.json beside it says what is wanted.

A wheel cannot make pip keep torch, and an extension that meets another torch, CUDA, NVSHMEM or NCCL ends in undefined
symbols, a crash or a hang much later. So the import ends in one line that says what is wanted. Python 3.8 or newer,
standard library only.
"""

import ctypes
import json
import os
import sys
from typing import Any, NoReturn

HERE = os.path.dirname(os.path.abspath(__file__))


def refuse(built: "dict[str, Any]", found: str, remedy: str) -> NoReturn:
    """End the import with one line: what the build wants, what was found, what to do."""
    parts = ["torch " + built["torch"], "CUDA " + built["cuda"]]
    parts += [f"{each['name']} {each['version']}" for each in built["libraries"]]
    wanted = ", ".join(parts)
    raise ImportError(f"{built['build']} wants {wanted}; found {found}. Try: {remedy}") from None


def check_torch(built: "dict[str, Any]") -> None:
    """Import torch, whose libraries the extension is linked with, and compare its version and CUDA."""
    remedy = f"pip install torch=={built['torch']}, or a wheel of deep_ep that was made for this torch"
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        refuse(built, "no torch", remedy)
    cuda = torch.version.cuda
    version = str(torch.__version__)
    if version.split("+")[0] != built["torch"] or str(cuda).split(".")[0] != built["cuda"]:
        refuse(built, f"torch {version} {'for CUDA ' + cuda if cuda else 'without CUDA'}", remedy)


def installed_file(path: str) -> str:
    """Return where a file of another wheel is installed, "" for nowhere: beside this package as a rule, else in a
    folder that comes later, as below an environment with the packages of another."""
    for folder in [os.path.dirname(HERE), *sys.path]:
        file = os.path.join(folder, path)
        if os.path.isfile(file):
            return file
    return ""


def open_library(library: "dict[str, Any]") -> "ctypes.CDLL | None":
    """Return the library of this name that the process has, else the one of the installed wheel, else None. From then
    on it is the one that the extension gets."""
    try:
        return ctypes.CDLL(os.path.basename(library["file"]), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        pass
    file = installed_file(library["file"])
    try:
        return ctypes.CDLL(file) if file else None
    except OSError:
        return None


def version_of(name: str, library: ctypes.CDLL) -> str:
    """Return what NCCL or NVSHMEM says of its own version, as 2.30.7."""
    numbers = [ctypes.c_int() for _ in range(3)]
    try:
        if name == "NCCL":
            library.ncclGetVersion(ctypes.byref(numbers[0]))
            number = numbers[0].value
            return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        library.nvshmemx_vendor_get_version_info(*map(ctypes.byref, numbers))
    except AttributeError:
        return "of a version that it does not tell"
    return ".".join(str(number.value) for number in numbers)


def check_libraries(built: "dict[str, Any]") -> None:
    """Compare the version of each library that the process has, or would get, with that of the build."""
    for each in built["libraries"]:
        library = open_library(each)
        found = version_of(each["name"], library) if library else "none that can be loaded"
        if found != each["version"]:
            remedy = f"pip install {each['distribution']}=={each['version']}"
            remedy += ", and no other one on LD_LIBRARY_PATH or LD_PRELOAD"
            refuse(built, f"{each['name']} {found}", remedy)


def name_headers(built: "dict[str, Any]") -> None:
    """Tell DeepEP V2 where NCCL's headers are, with which it compiles kernels, unless somebody said it already."""
    for each in built["libraries"]:
        file = installed_file(each["file"])
        if each["name"] == "NCCL" and file:
            os.environ.setdefault("EP_NCCL_ROOT_DIR", os.path.dirname(os.path.dirname(file)))


def open_transports(built: "dict[str, Any]") -> None:
    """Open NVSHMEM's transports that came along. NVSHMEM asks for a transport by its bare name when it starts, and gets
    the one of that name that is there already."""
    for name in built["transports"]:
        try:
            ctypes.CDLL(os.path.join(os.path.dirname(HERE), "deep_ep.libs", name))
        except OSError:
            # No RDMA user space here, so NVSHMEM's own transport would not load either; NVLink works without.
            continue


with open(os.path.join(HERE, "_built_for.json"), encoding="utf-8") as _file:
    BUILT = json.load(_file)

check_torch(BUILT)
check_libraries(BUILT)
name_headers(BUILT)
open_transports(BUILT)
