"""Does DeepEP work on this node? One dispatch and one combine among its GPUs, checked number by number, in a few
seconds.

    module load deepep
    python smoke.py

One process per GPU (8, 4 or 2 of them) imports deep_ep, makes a buffer (EPBuffer of V2.5 or ElasticBuffer of V2
where there is one, else Buffer of V1), sends small tokens to the ranks of their experts, lets these weigh them, and
adds up what comes back. All numbers are small whole ones, so that every result is exact and any difference is a fault.
No other node takes part, whatever WORLD_SIZE says: on several nodes each tests itself. The first run with V2 compiles
kernels and takes longer.

Exit code 0 after `[smoke] passed`, else 1.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

import launching

TOKENS = 32  # of each rank; every number below stays under 256, up to which BF16 holds all whole numbers
HIDDEN = 2048
EXPERTS = 256
CHOSEN = 4  # experts of a token
LARGEST_WEIGHT = 2
NVLINK_BYTES = 1 << 28  # V1 needs 20 SMs / 2 x 8 ranks x 256 tokens of a little more than 2 x HIDDEN bytes: 90 MB
SIZES = (8, 4, 2)  # ranks of one node that V1 has kernels for


@dataclass(frozen=True)
class Tokens:
    """One rank's input, as arrays: tokens (float32), their experts (int64), the experts' weights (float32)."""

    x: Any
    experts: Any
    weights: Any


def make_tokens(rank: int) -> Tokens:
    """Return the input of `rank`; every rank can make every other's. The first two numbers of a token say whose and
    which it is."""
    import numpy as np

    random = np.random.default_rng(rank)
    x = random.integers(-8, 9, size=(TOKENS, HIDDEN)).astype(np.float32)
    x[:, 0], x[:, 1] = rank, np.arange(TOKENS)
    experts = np.stack([random.permutation(EXPERTS)[:CHOSEN] for _ in range(TOKENS)]).astype(np.int64)
    weights = random.integers(1, LARGEST_WEIGHT + 1, size=experts.shape).astype(np.float32)
    return Tokens(x, experts, weights)


def expected(rank: int, ranks: int) -> dict[tuple[int, int], tuple[Any, float]]:
    """Return what must reach `rank`: by (rank, token) of the sender, the token and the sum of its weights for
    experts that live here."""
    wanted = {}
    for sender in range(ranks):
        tokens = make_tokens(sender)
        local = tokens.experts // (EXPERTS // ranks) == rank
        for token in range(TOKENS):
            if local[token].any():
                wanted[sender, token] = (tokens.x[token], float(tokens.weights[token][local[token]].sum()))
    return wanted


def check_received(x: Any, factors: Any, rank: int, ranks: int) -> str:
    """Return what is wrong with the tokens that came and their weights, "" if nothing is. They may come in any
    order."""
    wanted = expected(rank, ranks)
    if len(x) != len(wanted):
        return f"{len(x)} tokens came, {len(wanted)} were sent here"
    for row, factor in zip(x, factors, strict=True):
        name = f"token {row[1]:g} of rank {row[0]:g}"
        token, weight = wanted.pop((row[0], row[1]), (None, 0.0))
        if token is None:
            return f"{name} came and was not sent here"
        if (row != token).any():
            return f"{name} came with {int((row != token).sum())} wrong numbers"
        if factor != weight:
            return f"{name}: its weights for this rank add up to {factor:g}, not {weight:g}"
    return ""


def check_combined(x: Any, own: Tokens) -> str:
    """Return what is wrong with the tokens that came back, "" if nothing is: each was multiplied by the sum of all
    its weights."""
    wrong = (x != own.x * own.weights.sum(axis=1, keepdims=True)).any(axis=1).nonzero()[0]
    return f"{len(wrong)} of {len(x)} tokens came back wrong, the first is {wrong[0]}" if len(wrong) else ""


class Exchange:
    """A buffer of V1, V2 or V2.5, and its two operations on arrays; those of the last two are called alike."""

    def __init__(self, torch: Any, deep_ep: Any, group: Any) -> None:
        self.torch, self.deep_ep = torch, deep_ep
        self.kind = next(name for name in ("EPBuffer", "ElasticBuffer", "Buffer") if hasattr(deep_ep, name))
        self.elastic = self.kind != "Buffer"
        make = getattr(deep_ep, self.kind)
        if self.elastic:
            sizes = {"num_max_tokens_per_rank": TOKENS, "hidden": HIDDEN, "num_topk": CHOSEN}
            self.buffer = make(group, **sizes, explicitly_destroy=True)
        else:
            self.buffer = make(group, NVLINK_BYTES, explicitly_destroy=True)

    def to_device(self, array: Any, kind: Any) -> Any:
        """Return the array as a tensor on the GPU."""
        return self.torch.from_numpy(array).to(device="cuda", dtype=kind)

    def dispatch(self, own: Tokens) -> tuple[Any, Any, Any]:
        """Send our tokens; return those that came, the sum of the weights of each for experts of ours, and combine's
        handle."""
        import numpy as np

        x = self.to_device(own.x, self.torch.bfloat16)
        experts = self.to_device(own.experts, getattr(self.deep_ep, "topk_idx_t", self.torch.int64))
        weights = self.to_device(own.weights, self.torch.float32)
        if self.elastic:
            got, chosen, theirs, handle, _ = self.buffer.dispatch(x, experts, weights, num_experts=EXPERTS)
        else:
            names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank")
            layout = dict(zip(names, self.buffer.get_dispatch_layout(experts, EXPERTS)[:4], strict=True))
            got, chosen, theirs, _, handle, _ = self.buffer.dispatch(
                x, topk_idx=experts, topk_weights=weights, **layout
            )
        # Experts of other ranks are -1; what stands beside them as weight may be anything, no number included.
        factors = np.where(chosen.cpu().numpy() >= 0, theirs.cpu().numpy(), 0).sum(axis=1)
        return got.float().cpu().numpy(), factors, handle

    def combine(self, x: Any, handle: Any) -> Any:
        """Send the tokens back; return the sums for ours."""
        back = self.buffer.combine(self.to_device(x, self.torch.bfloat16), handle)[0]
        return back.float().cpu().numpy()


def be_rank(rank: int, ranks: int, port: int) -> None:
    """Do everything as one rank; exits with 1 after saying what is wrong."""
    import deep_ep
    import torch

    torch.cuda.set_device(rank)
    # Naming the device makes NCCL's communicator now: V2 takes it from the group, and early ones do not look whether it
    # is there.
    torch.distributed.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", world_size=ranks, rank=rank, device_id=torch.device("cuda", rank)
    )
    exchange = Exchange(torch, deep_ep, torch.distributed.group.WORLD)
    if rank == 0:
        version = f"deep_ep {getattr(deep_ep, '__version__', '')} of {deep_ep.__file__}, torch {torch.__version__}"
        launching.say("smoke", f"{version}: {exchange.kind} on {ranks} GPUs")
    own = make_tokens(rank)
    x, factors, handle = exchange.dispatch(own)
    judge(rank, "dispatch", check_received(x, factors, rank, ranks))
    back = exchange.combine(x * factors[:, None], handle)
    judge(rank, "combine", check_combined(back, own))
    torch.cuda.synchronize()
    exchange.buffer.destroy()
    torch.distributed.destroy_process_group()


def judge(rank: int, operation: str, wrong: str) -> None:
    """Say how an operation went: what is wrong by the rank that saw it, that nothing is by the first."""
    if wrong:
        launching.say("smoke", f"rank {rank}: {operation}: {wrong}", error=True)
        sys.exit(1)
    if rank == 0:
        launching.say("smoke", f"{operation}: right on rank 0")


def main(words: list[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="smoke.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--num-processes", type=int, metavar="N", help="GPUs to use: 2, 4 or 8 (default: as many of this node's)"
    )
    parser.add_argument(
        "--timeout", type=float, default=120, metavar="SECONDS", help="end it after so long (default: 120)"
    )
    chosen = parser.parse_args(words)
    start = time.monotonic()
    import torch

    gpus = chosen.num_processes or torch.cuda.device_count()
    ranks = next((size for size in SIZES if size <= gpus), 0)
    if not ranks:
        launching.say(
            "smoke",
            f"failed: {launching.count(gpus, 'GPU')} on {os.uname().nodename}, an exchange needs two",
            error=True,
        )
        return 1
    if not os.path.isdir("/sys/class/infiniband") or not os.listdir("/sys/class/infiniband"):
        os.environ.setdefault(
            "EP_DISABLE_GIN", "1"
        )  # V2 ends with an error where it finds no network card and was not told so
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    wrong = launching.wait_for(launching.start(be_rank, (ranks, port), ranks), chosen.timeout)
    launching.say(
        "smoke", f"failed: {wrong}" if wrong else f"passed in {time.monotonic() - start:.1f} s", error=bool(wrong)
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
