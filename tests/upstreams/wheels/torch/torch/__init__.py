"""PyTorch, CPU stand-in: a version, processes, groups and their messages, a few tensors, and the NVSHMEM library that the real one brings along."""

import ctypes
import importlib
import pathlib

from . import cuda, distributed, multiprocessing, version

__version__ = version.__version__
__all__ = ["compiled_with_cxx11_abi", "cuda", "device", "distributed", "multiprocessing", "version"]

_TENSORS = (
    *("Tensor", "bfloat16", "bool", "float32", "float64", "int32", "int64", "uint8"),
    *("arange", "cat", "from_numpy", "full_like", "tensor", "zeros_like"),
)


def __getattr__(name: str):
    # numpy is imported by whoever needs tensors.
    if name in _TENSORS:
        return getattr(importlib.import_module("torch.tensors"), name)
    raise AttributeError(f"the CPU stand-in of torch has no {name}")


class device(str):
    """The name of a device; there is none but the CPU behind it."""

    def __new__(cls, kind: str, index: int = 0) -> "device":
        """Make the name."""
        made = super().__new__(cls, f"{kind}:{index}")
        made.type, made.index = kind, index
        return made


def compiled_with_cxx11_abi() -> bool:
    """As every wheel since torch 2.7."""
    return True


def _load_nvshmem() -> None:
    """Load the library by its path, as the real torch does: whoever wants another one must replace the file or come first."""
    path = pathlib.Path(__file__).resolve().parent.parent / "nvidia/nvshmem/lib/libnvshmem_host.so.3"
    if path.parent.is_dir():
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


_load_nvshmem()
