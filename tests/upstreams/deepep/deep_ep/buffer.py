"""The two operations of expert parallelism: tokens go to the ranks of their experts, results come back and are added.

Mailbox does it on numpy arrays; the tests use that. Buffer has the calls of the real one, on tensors of the stand-in torch or of the
real one: all that it asks of either is its store, to meet, and its numbers.
"""

import os
import socket
from dataclasses import dataclass

import deep_ep_cpp
import numpy as np
import torch


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


class Mailbox:
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


@dataclass(frozen=True)
class Config:
    """The settings of a call, which mean nothing here."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of a buffer for NVLink."""
        return self.num_sms // 2 * num_ranks * self.num_max_nvl_chunked_recv_tokens * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of a buffer for RDMA, none on one node."""
        return 0 if num_ranks <= 8 else self.num_sms * self.num_max_rdma_chunked_recv_tokens * hidden_bytes


class EventOverlap:
    """An event; every call has ended when it returns."""

    def current_stream_wait(self) -> None:
        """There is nothing to wait for."""


class Buffer:
    """DeepEP's Buffer for the ranks of one group, with its calls for high throughput; sizes and events mean nothing here."""

    num_sms = 20

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """What `get_dispatch_config` and `get_combine_config` say from then on."""
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The default settings of a dispatch."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The default settings of a combine."""
        return Config(Buffer.num_sms)

    def __init__(self, group, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False, **_) -> None:
        """Meet the others; STANDIN_TIMEOUT is how many seconds to wait for them."""
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        timeout = float(os.environ.get("STANDIN_TIMEOUT", "30"))
        self.mailbox = Mailbox(self.rank, self.group_size, *_meeting_point(self.rank), timeout)

    def destroy(self) -> None:
        """Part from the others."""
        self.mailbox.barrier()
        self.mailbox.close()

    def get_dispatch_layout(self, topk_idx, num_experts: int, **_) -> tuple:
        """Return (tokens per rank, None, tokens per expert, is_token_in_rank, None)."""
        chosen = _array(topk_idx)
        layout = self.mailbox.get_dispatch_layout(chosen, num_experts)
        per_expert = np.bincount(chosen.ravel(), minlength=num_experts)
        counts = [_tensor(each, torch.int32, topk_idx) for each in (layout.sum(axis=0), per_expert)]
        return counts[0], None, counts[1], _tensor(layout, torch.bool, topk_idx), None

    def dispatch(self, x, *, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert, **_) -> tuple:
        """Return (tokens, experts counted from this rank's first or -1, weights, tokens per expert here, handle, None)."""
        payload = (_array(x).view(np.uint32) >> 16).astype(np.uint16)
        if os.environ.get("STANDIN_CORRUPT") == str(self.rank):
            payload[0, 0] ^= 1
        experts = _array(topk_idx).astype(np.int32)
        received, handle = self.mailbox.dispatch(payload, experts, _array(topk_weights), _array(is_token_in_rank))
        here = num_tokens_per_expert.shape[0] // self.group_size
        ours = received.topk_idx // here == self.rank
        local = np.where(ours, received.topk_idx - self.rank * here, -1)
        counts = np.bincount(local[ours], minlength=here).tolist()
        got = _tensor((received.x.astype(np.uint32) << 16).view(np.float32), torch.bfloat16, x)
        weights = _tensor(np.where(ours, received.topk_weights, 0), torch.float32, x)
        return got, _tensor(local, torch.int64, x), weights, counts, handle, None

    def combine(self, x, handle: Handle, **_) -> tuple:
        """Return (the sum over ranks for each of our tokens, None, None)."""
        return _tensor(self.mailbox.combine(_array(x), handle), torch.bfloat16, x), None, None


def _meeting_point(rank: int) -> tuple:
    """Host and port at which the ranks meet: the first chooses a port, and says so in the store of the process group."""
    store = torch.distributed.distributed_c10d._get_default_store()
    name = socket.gethostname()
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            store.set("deep_ep/meeting", f"{name} {probe.getsockname()[1]}")
    host, port = store.get("deep_ep/meeting").decode().split()
    return "127.0.0.1" if host == name else host, int(port)


def _array(tensor) -> np.ndarray:
    """The numbers of a tensor; numpy has no BF16, so these come as 32-bit ones."""
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).cpu().numpy()


def _tensor(array: np.ndarray, dtype, like):
    """A tensor of these numbers where another one is."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device).to(dtype)
