"""The two operations of expert parallelism on numpy arrays: tokens go to the ranks of their experts, results come back and are added."""

from dataclasses import dataclass

import deep_ep_cpp
import numpy as np


@dataclass(frozen=True)
class Handle:
    """What combine needs from dispatch: which of our tokens went to each rank, and how many came from each."""

    sent_rows: list
    received: list
    tokens: int


@dataclass(frozen=True)
class Received:
    """Tokens that came, ordered by the rank they came from, with their experts (int32) and weights (float32)."""

    x: np.ndarray
    topk_idx: np.ndarray
    topk_weights: np.ndarray


class Buffer:
    """One rank of a group of `ranks` that meet at `host`:`port`; expert e lives on rank e // (num_experts / ranks)."""

    def __init__(self, rank: int, ranks: int, host: str, port: int, timeout: float = 30.0) -> None:
        """Connect; raises RuntimeError naming the ranks that did not come within `timeout` seconds."""
        deep_ep_cpp.init(rank, ranks, host, port, int(timeout * 1000))
        self.rank, self.ranks = deep_ep_cpp.my_pe(), deep_ep_cpp.n_pes()

    def barrier(self) -> None:
        """Wait for all ranks."""
        deep_ep_cpp.barrier()

    def close(self) -> None:
        """End all connections."""
        deep_ep_cpp.finalize()

    def get_dispatch_layout(self, topk_idx: np.ndarray, num_experts: int) -> np.ndarray:
        """Return is_token_in_rank, bool of shape (tokens, ranks)."""
        owner = topk_idx // (num_experts // self.ranks)
        return (owner[:, :, None] == np.arange(self.ranks)).any(axis=1)

    def dispatch(self, x: np.ndarray, topk_idx: np.ndarray, topk_weights: np.ndarray, layout: np.ndarray, chunk: int = 0) -> tuple:
        """Send every token once to each rank of `layout`; return (Received, Handle). `chunk` limits the bytes of one write."""
        rows = [np.flatnonzero(layout[:, rank]) for rank in range(self.ranks)]
        messages = [x[r].tobytes() + topk_idx[r].tobytes() + topk_weights[r].tobytes() for r in rows]
        parts = [self._unpack(message, x, topk_idx, topk_weights) for message in deep_ep_cpp.alltoallv(messages, chunk)]
        received = Received(*(np.concatenate([part[field] for part in parts]) for field in range(3)))
        return received, Handle(rows, [len(part[0]) for part in parts], len(x))

    def combine(self, y: np.ndarray, handle: Handle, chunk: int = 0) -> np.ndarray:
        """Send every row of `y` (float32, in the order of Received) back and return the sum over ranks for each of our tokens."""
        ends = np.cumsum(handle.received)[:-1]
        messages = [part.tobytes() for part in np.split(y, ends)]
        out = np.zeros((handle.tokens, y.shape[1]), dtype=y.dtype)
        for rows, message in zip(handle.sent_rows, deep_ep_cpp.alltoallv(messages, chunk)):
            out[rows] += np.frombuffer(message, dtype=y.dtype).reshape(len(rows), -1)
        return out

    @staticmethod
    def _unpack(message: bytes, *like: np.ndarray) -> list:
        sizes = [array.dtype.itemsize * array.shape[1] for array in like]
        count, start, parts = len(message) // sum(sizes), 0, []
        for array, size in zip(like, sizes):
            end = start + count * size
            parts.append(np.frombuffer(message[start:end], dtype=array.dtype).reshape(count, array.shape[1]))
            start = end
        return parts
