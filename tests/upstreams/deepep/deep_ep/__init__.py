"""DeepEP, CPU stand-in: dispatch and combine over TCP between processes."""

import torch  # noqa: F401 - before deep_ep_cpp, as upstream does: torch brings its own NVSHMEM, and ours must win all the same
import deep_ep_cpp  # noqa: F401

from .buffer import Buffer, Mailbox

__version__ = "1.2.1"
__all__ = ["Buffer", "Mailbox"]
