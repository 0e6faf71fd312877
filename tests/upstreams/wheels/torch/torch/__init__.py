"""PyTorch, CPU stand-in: a version, processes, groups, a few tensors, and the NVSHMEM library that the real one brings along."""

import ctypes
import importlib
import pathlib

from . import cuda, distributed, multiprocessing, version

__version__ = version.__version__
__all__ = ["compiled_with_cxx11_abi", "cuda", "device", "distributed", "multiprocessing", "version"]

_TENSORS = ("Tensor", "bfloat16", "bool", "float32", "from_numpy", "int32", "int64")


def __getattr__(name: str):
    # numpy is imported by whoever needs tensors.
    if name in _TENSORS:
        return getattr(importlib.import_module("torch.tensors"), name)
    raise AttributeError(f"the CPU stand-in of torch has no {name}")


def device(kind: str, index: int = 0) -> str:
    """The name of a device; there is none but the CPU behind it."""
    return f"{kind}:{index}"


def compiled_with_cxx11_abi() -> bool:
    """As every wheel since torch 2.7."""
    return True


def _load_nvshmem() -> None:
    """Load the library by its path, as the real torch does: whoever wants another one must replace the file or come first."""
    path = pathlib.Path(__file__).resolve().parent.parent / "nvidia/nvshmem/lib/libnvshmem_host.so.3"
    if path.parent.is_dir():
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


_load_nvshmem()
