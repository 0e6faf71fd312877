"""Import DeepEP and tell which files are really used: data lines on descriptor 3, in one write at the end.

dlsym on the extension's own handle follows the order in which its symbols are bound; dladdr names the file that defines the result.
"""

import ctypes
import importlib
import os
import sys

NVSHMEM = ("nvshmem_malloc", "nvshmem_my_pe", "nvshmem_align")
NCCL = ("ncclGetVersion",)
DATA = 3


class Info(ctypes.Structure):
    """What dladdr fills in (Dl_info of dlfcn.h)."""

    _fields_ = (("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("address", ctypes.c_void_p))


def defining_file(extension: str, symbols: tuple[str, ...]) -> str:
    """Return the file that defines the symbols which the extension calls; "" when it calls none of them."""
    handle = ctypes.CDLL(extension)
    for name in symbols:
        if hasattr(handle, name):
            info = Info()
            address = ctypes.cast(getattr(handle, name), ctypes.c_void_p)
            if ctypes.CDLL(None).dladdr(address, ctypes.byref(info)):
                return os.path.realpath(os.fsdecode(info.file))
    return ""


def nccl_version(extension: str) -> str:
    """Return the version of the NCCL that the extension calls; "" when it calls none."""
    if not defining_file(extension, NCCL):
        return ""
    number = ctypes.c_int()
    ctypes.CDLL(extension).ncclGetVersion(ctypes.byref(number))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def look() -> dict[str, str]:
    """Return the answer; an import that fails is one. The extension of V1 stands beside the package, that of V2 in it."""
    try:
        import deep_ep

        try:
            extension = importlib.import_module("deep_ep._C")
        except ModuleNotFoundError:
            extension = importlib.import_module("deep_ep_cpp")
    except (ImportError, OSError, RuntimeError, AttributeError, NameError, SyntaxError, TypeError, ValueError) as error:
        return {"import": "no", "error": f"{type(error).__name__}: {error}"}
    return {
        "import": "yes",
        "deep_ep": os.path.realpath(deep_ep.__file__),
        "torch": str(getattr(sys.modules.get("torch"), "__version__", "")),
        "nvshmem": defining_file(extension.__file__, NVSHMEM),
        "nccl": defining_file(extension.__file__, NCCL),
        "nccl_version": nccl_version(extension.__file__),
    }


# One write: libraries print on standard output too, and a crash must leave no half answer.
answer = "".join(f"{key}={' '.join(value.split())[:400]}\n" for key, value in look().items())
os.write(DATA, answer.encode("utf-8", "replace"))
