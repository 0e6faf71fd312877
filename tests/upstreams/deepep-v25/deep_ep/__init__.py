"""DeepEP V2.5, CPU stand-in."""

import os
from pathlib import Path

import torch  # noqa: F401 - before the extension, as upstream does
import deep_ep._C as _C

from .buffers.ep import EPBuffer
from .envs import persistent_envs

__version__ = "2.5.0"
__all__ = ["EPBuffer"]

for _name, _value in persistent_envs.items():
    os.environ.setdefault(_name, _value)


def _prepare_kernels() -> None:
    """Do what upstream does at import: look at the NCCL of the process, find the headers, make the first folder of the cache's list."""
    if _C.nccl_version() != _C.NCCL_VERSION:
        raise RuntimeError(f"NCCL {_C.nccl_version()} is loaded, but deep_ep was built with {_C.NCCL_VERSION}")
    root = Path(os.environ["EP_NCCL_ROOT_DIR"])
    for header in (Path(__file__).parent / "include/deep_ep/ep.cuh", root / "include/nccl.h"):
        if not header.is_file():
            raise RuntimeError(f"no {header} to compile kernels with")
    cache = Path(
        (os.environ.get("EP_JIT_CACHE_DIR") or os.environ.get("DJ_JIT_CACHE_DIR") or f"{Path.home()}/.dj").split(":")[0]
    )
    cache.mkdir(parents=True, exist_ok=True)


_prepare_kernels()
