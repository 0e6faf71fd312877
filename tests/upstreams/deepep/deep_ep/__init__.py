"""DeepEP, CPU stand-in: dispatch and combine over TCP between processes."""

import torch  # before deep_ep_cpp, as upstream does: torch brings its own NVSHMEM, and ours must win all the same
import deep_ep_cpp  # noqa: F401

from .buffer import Buffer, Config, EventOverlap, Mailbox

__version__ = "1.2.1"
__all__ = ["Buffer", "Config", "EventOverlap", "Mailbox", "topk_idx_t"]

topk_idx_t = torch.int64
