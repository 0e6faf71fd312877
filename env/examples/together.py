"""What the examples share: one process for each GPU, numbers to send, and one verdict that all processes come to
together.

DeepEP's convention for several nodes: start the program once on each, with WORLD_SIZE (the number of nodes), RANK (this
node's index), MASTER_ADDR and MASTER_PORT. Without them it runs on this node alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

Errors = dict[str, float]

if not hasattr(torch, "autograd"):
    program = os.path.basename(sys.argv[0])
    raise SystemExit(
        f"{program}: error: the examples need PyTorch itself and GPUs: torch {torch.__version__} stands in for it"
    )


def arguments(purpose: str, tokens: int) -> argparse.ArgumentParser:
    """Return the arguments that all examples take; `tokens` is how many each GPU has by default."""
    parser = argparse.ArgumentParser(description=purpose.splitlines()[0])
    parser.add_argument(
        "--num-processes", type=int, default=torch.cuda.device_count(), help="GPUs of this node (default: all)"
    )
    parser.add_argument("--tokens", type=int, default=tokens, help="tokens on each GPU (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=7168, help="numbers in a token (default: %(default)s)")
    parser.add_argument("--topk", type=int, default=8, help="experts that each token visits (default: %(default)s)")
    parser.add_argument(
        "--experts",
        type=int,
        default=256,
        help="experts in all, rounded down to a multiple of the ranks (default: %(default)s)",
    )
    return parser


def launch(
    program: Callable[[argparse.Namespace, dist.ProcessGroup], Errors], args: argparse.Namespace, allowed: float
) -> None:
    """Run `program` in one process for each GPU. It returns relative errors by name; exit code 1 where one of any
    rank is too large."""
    if args.num_processes * int(os.getenv("WORLD_SIZE", "1")) < 2:
        raise SystemExit("at least two GPUs are needed: experts on one GPU need no DeepEP")
    torch.multiprocessing.spawn(_run_rank, args=(program, args, allowed), nprocs=args.num_processes)


def _run_rank(local_rank: int, program: Callable[..., Errors], args: argparse.Namespace, allowed: float) -> None:
    torch.cuda.set_device(local_rank)
    nodes, node = int(os.getenv("WORLD_SIZE", "1")), int(os.getenv("RANK", "0"))
    address = f"tcp://{os.getenv('MASTER_ADDR', '127.0.0.1')}:{os.getenv('MASTER_PORT', '8361')}"
    rank, ranks = node * args.num_processes + local_rank, nodes * args.num_processes
    dist.init_process_group(
        "nccl", init_method=address, rank=rank, world_size=ranks, device_id=torch.device("cuda", local_rank)
    )
    torch.manual_seed(rank)
    args.experts -= args.experts % ranks
    say(
        f"{ranks} ranks on {nodes} node(s): {args.tokens} tokens of {args.hidden} numbers on each, {args.topk} of "
        f"{args.experts} experts"
    )
    errors = program(args, dist.group.WORLD)
    passed = _agree(errors, allowed)
    dist.barrier()
    dist.destroy_process_group()
    if not passed:
        raise SystemExit(1)


def _agree(errors: Errors, allowed: float) -> bool:
    """Return whether no rank's error is too large, the same on all ranks, so that none waits for one that gave up."""
    worst = torch.tensor(list(errors.values()), device="cuda")
    dist.all_reduce(worst.nan_to_num_(nan=torch.inf), op=dist.ReduceOp.MAX)
    passed = bool((worst < allowed).all())
    said = ", ".join(f"{name} {error:.2%}" for name, error in zip(errors, worst.tolist(), strict=True))
    say(f"largest relative error of any rank against plain PyTorch: {said} (allowed {allowed:.0%})")
    say("passed" if passed else "failed")
    return passed


def say(text: str) -> None:
    """Print one line, once."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def draw_tokens(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, the experts that each is to visit, and the weights of their answers. A real layer asks its gate
    network."""
    x = torch.randn(args.tokens, args.hidden, device="cuda", dtype=torch.bfloat16)
    weights, experts = torch.rand(args.tokens, args.experts, device="cuda").softmax(dim=-1).topk(args.topk)
    return x, experts, weights / weights.sum(dim=-1, keepdim=True)


def draw_experts(args: argparse.Namespace, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's experts, and for the comparison those of all ranks. An expert here is a vector that a token
    is multiplied by: the examples are about the way to the experts. A real one is a network, and its weights never
    leave their GPU."""
    mine = torch.randn(args.experts // group.size(), args.hidden, device="cuda")
    everyone = torch.empty(args.experts, args.hidden, device="cuda")
    dist.all_gather_into_tensor(everyone, mine, group=group)
    return mine, everyone


def ask_experts(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of the answers of each token's chosen experts; -1 chooses none."""
    shares = torch.zeros(x.size(0), experts.size(0), device=x.device)
    shares = shares.scatter_add(1, chosen.long().clamp(min=0), weights.float().masked_fill(chosen < 0, 0))
    return (x.float() * (shares @ experts)).to(x.dtype)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return how far `found` is from `wanted`, as a part of the length of `wanted`."""
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()
