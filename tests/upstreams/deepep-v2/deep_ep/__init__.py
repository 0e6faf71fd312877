"""DeepEP V2, CPU stand-in."""

import os
from pathlib import Path

import torch  # noqa: F401 - before the extension, as upstream does: torch opens what it brings, and ours must win all the same
import deep_ep._C as _C

from .buffers.elastic import ElasticBuffer
from .buffers.legacy import Buffer, Mailbox
from .envs import persistent_envs

__version__ = "2.1.0"
__all__ = ["Buffer", "ElasticBuffer", "Mailbox"]

for _name, _value in persistent_envs.items():
    os.environ.setdefault(_name, _value)


def _prepare_kernels() -> None:
    """Do what upstream does at import: look at the NCCL of the process, find the headers and the compiler, make the cache's folder."""
    if _C.nccl_version() != _C.NCCL_VERSION and os.environ.get("EP_SUPPRESS_NCCL_CHECK") != "1":
        raise RuntimeError(f"NCCL {_C.nccl_version()} is loaded, but deep_ep was built with {_C.NCCL_VERSION}")
    root = Path(os.environ["EP_NCCL_ROOT_DIR"])
    for header in (Path(__file__).parent / "include/deep_ep/elastic.cuh", root / "include/nccl.h"):
        if not header.is_file():
            raise RuntimeError(f"no {header} to compile kernels with")
    cache = Path(os.environ.get("EP_JIT_CACHE_DIR") or Path.home() / ".deep_ep")
    cache.mkdir(parents=True, exist_ok=True)


_prepare_kernels()
