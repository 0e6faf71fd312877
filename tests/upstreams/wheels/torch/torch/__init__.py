"""PyTorch, CPU stand-in: a version, processes, and the NVSHMEM library that the real one brings along."""

import ctypes
import pathlib

from . import cuda, multiprocessing, version

__version__ = version.__version__
__all__ = ["compiled_with_cxx11_abi", "cuda", "multiprocessing", "version"]


def compiled_with_cxx11_abi() -> bool:
    """As every wheel since torch 2.7."""
    return True


def _load_nvshmem() -> None:
    """Load the library by its path, as the real torch does: whoever wants another one must replace the file or come first."""
    path = pathlib.Path(__file__).resolve().parent.parent / "nvidia/nvshmem/lib/libnvshmem_host.so.3"
    if path.parent.is_dir():
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


_load_nvshmem()
