"""Dispatch and combine of V2.5 among all ranks (CPU stand-in)."""

import argparse
import os
import sys
import time

import numpy as np
import torch
from deep_ep import EPBuffer

TOKENS, HIDDEN = 16, 64
CASE = "expert_alignment=128, use_fp8_dispatch=1, num_bias=0, with_previous_event=0, async_with_compute_stream=1, allocate_on_comm_stream=0"
MARKS = {"dispatch": "*", "combine": "@"}


def be_rank(local_rank: int, args: argparse.Namespace) -> None:
    """Run the one case as a rank; an AssertionError where a number is wrong."""
    node, nodes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    rank, ranks = node * args.num_processes + local_rank, nodes * args.num_processes
    address = f"tcp://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '8361')}"
    torch.distributed.init_process_group("nccl", init_method=address, world_size=ranks, rank=rank)
    buffer = EPBuffer(
        torch.distributed.group.WORLD, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, explicitly_destroy=True
    )
    if local_rank == 0:
        print(f"Config:\n > Ranks: {nodes} x {args.num_processes}\n > Experts: {args.num_topk}/{args.num_experts}")
        print(
            f" > Tokens: {args.num_tokens} (max: {args.num_tokens}), hidden: {args.hidden}\n > #SM: 12, #QPs: 13/65\n"
        )
        print(f"Running all test cases:\n > Testing with {CASE} ...", flush=True)
    random = np.random.default_rng(rank)
    own = random.integers(-8, 9, size=(TOKENS, HIDDEN)).astype(np.float32)
    experts = np.stack([random.permutation(args.num_experts)[: args.num_topk] for _ in range(TOKENS)]).astype(np.int64)
    x = torch.from_numpy(own).to(torch.bfloat16)
    weights = torch.from_numpy(np.ones(experts.shape, dtype=np.float32))
    start = time.perf_counter()
    got, _, _, handle, _ = buffer.dispatch(x, torch.from_numpy(experts), weights, num_experts=args.num_experts)
    middle = time.perf_counter()
    back = buffer.combine(got, handle)[0]
    took = {"dispatch": middle - start, "combine": time.perf_counter() - middle}
    copies = np.array([len(set(row)) for row in (experts // (args.num_experts // ranks)).tolist()])
    assert (back.float().numpy() == own * copies[:, None]).all(), "combine: a token came back wrong"
    size = int(copies.sum()) * HIDDEN
    for name, seconds in took.items():
        rates = f"{size / seconds / 1e9:.0f} GB/s (SO), {size / seconds / 1e9:.0f} GB/s (SU), {seconds * 1e6:.3f} us, {size} bytes"
        print(f"   {MARKS[name]} EP: {rank:3}/{ranks} | {name}: {rates} | copy: 1 GB/s, 1.000 us\n", end="", flush=True)
    buffer.destroy()
    torch.distributed.destroy_process_group()


def main() -> int:
    """Run the command line; what means nothing without a GPU is taken and ignored."""
    parser = argparse.ArgumentParser(description="Test EP kernels (CPU stand-in)")
    defaults = {"num_processes": 8, "num_tokens": 4096, "hidden": 7168, "num_topk": 6, "num_experts": 256}
    for name, value in {**defaults, "num_gpu_timeout_secs": 100, "num_cpu_timeout_secs": 100}.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    for name in ("test-first-only", "do-pressure-test", "skip-perf-test"):
        parser.add_argument("--" + name, action="store_true")
    args = parser.parse_args()
    torch.multiprocessing.start_processes(be_rank, (args,), nprocs=args.num_processes, start_method="fork")
    return 0


if __name__ == "__main__":
    sys.exit(main())
