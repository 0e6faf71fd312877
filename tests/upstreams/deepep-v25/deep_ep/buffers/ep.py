"""V2.5's buffer: tokens go to the ranks of their experts through the store of the process group, and come back."""

import base64

import numpy as np
import torch


class EPBuffer:
    """DeepEP's EPBuffer for the ranks of one group, with its calls for tokens; sizes and events mean nothing here."""

    def __init__(
        self,
        group,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        explicitly_destroy: bool = False,
        **_,
    ) -> None:
        """Take part."""
        self.rank_idx, self.num_ranks, self.calls = group.rank(), group.size(), 0
        self.store = torch.distributed.distributed_c10d._get_default_store()

    def destroy(self) -> None:
        """Part from the others, when none asks the store any more: it ends with its rank."""
        torch.distributed.barrier()

    def _exchange(self, messages: list) -> list:
        """Give each rank its message and return those of all ranks for this one."""
        self.calls += 1
        for rank, message in enumerate(messages):
            self.store.set(f"ep/{self.calls}/{self.rank_idx}/{rank}", base64.b64encode(message).decode() or "=")
        found = [self.store.get(f"ep/{self.calls}/{rank}/{self.rank_idx}") for rank in range(self.num_ranks)]
        return [b"" if each == b"=" else base64.b64decode(each) for each in found]

    def dispatch(self, x, topk_idx=None, topk_weights=None, *, num_experts: int, **_) -> tuple:
        """Return (tokens, experts counted from this rank's first or -1, weights, handle, None)."""
        tokens, experts, weights = _array(x), _array(topk_idx).astype(np.int64), _array(topk_weights).astype(np.float32)
        here = num_experts // self.num_ranks
        rows = [np.flatnonzero((experts // here == rank).any(axis=1)) for rank in range(self.num_ranks)]
        came = self._exchange([tokens[r].tobytes() + experts[r].tobytes() + weights[r].tobytes() for r in rows])
        widths = [(tokens.dtype, tokens.shape[1]), (experts.dtype, experts.shape[1]), (weights.dtype, weights.shape[1])]
        parts = [_unpack(each, widths) for each in came]
        got, theirs, factors = (np.concatenate([part[field] for part in parts]) for field in range(3))
        ours = theirs // here == self.rank_idx
        local = np.where(ours, theirs - self.rank_idx * here, -1)
        handle = (rows, [len(part[0]) for part in parts], len(tokens))
        return (
            _tensor(got, torch.bfloat16, x),
            _tensor(local, torch.int64, x),
            _tensor(np.where(ours, factors, 0), torch.float32, x),
            handle,
            None,
        )

    def combine(self, x, handle, **_) -> tuple:
        """Return (the sum over ranks for each of our tokens, None, None)."""
        rows, received, tokens = handle
        array = _array(x)
        came = self._exchange([part.tobytes() for part in np.split(array, np.cumsum(received)[:-1])])
        out = np.zeros((tokens, array.shape[1]), dtype=array.dtype)
        for where, message in zip(rows, came):
            out[where] += np.frombuffer(message, dtype=array.dtype).reshape(len(where), -1)
        return _tensor(out, torch.bfloat16, x), None, None


def _unpack(message: bytes, widths: list) -> list:
    """The arrays of a message, each as (rows, width) of its type."""
    sizes = [np.dtype(kind).itemsize * width for kind, width in widths]
    count, start, parts = len(message) // sum(sizes), 0, []
    for (kind, width), size in zip(widths, sizes):
        parts.append(np.frombuffer(message[start : start + count * size], dtype=kind).reshape(count, width))
        start += count * size
    return parts


def _array(tensor) -> np.ndarray:
    """The numbers of a tensor; numpy has no BF16, so these come as 32-bit ones."""
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).cpu().numpy()


def _tensor(array: np.ndarray, dtype, like):
    """A tensor of these numbers where another one is."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device).to(dtype)
