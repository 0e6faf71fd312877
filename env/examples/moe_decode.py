"""Decoding steps of mixture-of-experts layers whose experts are spread over all GPUs, with DeepEP's low-latency
kernels.

    python moe_decode.py [--tokens 128] [--hidden 7168] [--topk 8] [--experts 256] [--layers 3]

What it shows: with return_recv_hook=True a dispatch or combine only sends, and ends at once. The messages travel
without any SM, so that the GPU is free for other work, until hook() takes them in. For that other work the batch is cut
in two: while one half travels, the other computes. The tokens travel as FP8. The result is compared with the same
layers in plain PyTorch. Start it on several nodes as together.py says.

Limits: no more than 511 tokens of a rank travel at once with NVSHMEM_QP_DEPTH=1024, its default, since a queue pair
holds two requests for each token and two more. On GPUs of compute capability 10.0 and above a build without the fence
of DeepEP's pull request 642 gives back wrong rows from 256 tokens on: stay below that unless `invoke verify` names no
module of yours. These kernels fit into a CUDA graph, those of moe_prefill.py do not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deep_ep import Buffer, topk_idx_t
from together import Errors, arguments, ask_experts, draw_experts, draw_tokens, launch, relative_error, say

ALLOWED = 0.05
"""FP8 (E4M3) keeps 4 bits, so that a number loses up to 6 % and tokens about 2.5 % on their way; half of the result
never travels."""

BLOCK = 128
"""How many numbers of a token share a scale in FP8."""


@dataclass
class Half:
    """One half of the batch: its tokens, the experts that each visits and the weights of their answers."""

    x: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Layer:
    """What all calls share. `most` is how many tokens a rank may send at once, the same on all ranks."""

    buffer: Buffer
    most: int
    experts: int
    mine: torch.Tensor


def attend(x: torch.Tensor) -> torch.Tensor:
    """Stand for attention and normalization, which need no other GPU."""
    return (x.float() * x.float().square().mean(dim=-1, keepdim=True).rsqrt()).to(x.dtype)


def send_tokens(layer: Layer, half: Half) -> tuple[tuple[torch.Tensor, torch.Tensor], Any, Callable[[], None]]:
    """Send tokens to their experts. What came (numbers in FP8 and scales) may be read after the hook was called."""
    came, _counts, handle, _event, hook = layer.buffer.low_latency_dispatch(
        half.x, half.chosen, layer.most, layer.experts, use_fp8=True, return_recv_hook=True
    )
    return came, handle, hook


def send_answers(
    layer: Layer, half: Half, answers: torch.Tensor, handle: Any
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Send answers back. This combine, unlike that of the high-throughput kernels, also multiplies them by their
    weights."""
    combined, _event, hook = layer.buffer.low_latency_combine(
        answers, half.chosen, half.weights, handle, return_recv_hook=True
    )
    return combined, hook


def run_experts(layer: Layer, came: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the answers of this rank's experts. Each has a block of rows, [expert, row, number], of which the first
    ones are tokens and the rest is left over: how many came is known on the GPU alone, so that no CPU waits and the
    step fits into a CUDA graph."""
    numbers, scales = came
    x = numbers.float().unflatten(-1, (-1, BLOCK)) * scales.unsqueeze(-1)
    return (x.flatten(-2) * layer.mine.unsqueeze(1)).to(torch.bfloat16)


def run_layer(layer: Layer, one: Half, two: Half) -> None:
    """Run a layer on both halves, where `one` has been through attention already, and send it through the next layer's
    attention.

    There are only two sets of buffers, so one message is on its way at a time, and a hook is called before the next one
    is sent.
    """
    came, handle_one, hook = send_tokens(layer, one)
    two.x = attend(two.x)  # while the tokens of `one` travel
    hook()
    came_two, handle_two, hook = send_tokens(layer, two)
    answers = run_experts(layer, came)  # while the tokens of `two` travel
    hook()
    combined, hook = send_answers(layer, one, answers, handle_one)
    answers = run_experts(layer, came_two)  # while the answers for `one` travel
    hook()
    one.x = one.x + combined
    combined, hook = send_answers(layer, two, answers, handle_two)
    one.x = attend(one.x)  # while the answers for `two` travel
    hook()
    two.x = two.x + combined


def make_layer(args: argparse.Namespace, group: dist.ProcessGroup, mine: torch.Tensor, most: int) -> Layer:
    """Return a layer with its buffer: one queue pair for each of a rank's experts, as these kernels ask."""
    size = Buffer.get_low_latency_rdma_size_hint(most, args.hidden, group.size(), args.experts)
    say(f"buffer of each GPU: {size >> 20} MiB for at most {most} tokens at once")
    buffer = Buffer(group, 0, size, low_latency_mode=True, num_qps_per_rank=len(mine), explicitly_destroy=True)
    return Layer(buffer, most, args.experts, mine)


def decode(args: argparse.Namespace, group: dist.ProcessGroup) -> Errors:
    """Run all layers both ways and return the relative error of this rank."""
    x, chosen, weights = draw_tokens(args)
    mine, everyone = draw_experts(args, group)
    most = (args.tokens + 1) // 2
    layer = make_layer(args, group, mine, most)

    parts = zip(x.split(most), chosen.to(topk_idx_t).split(most), weights.split(most), strict=True)
    one, two = (Half(*(part.contiguous() for part in each)) for each in parts)
    one.x = attend(one.x)
    for _ in range(args.layers):
        run_layer(layer, one, two)
    found = torch.cat([one.x, attend(two.x)])

    for _ in range(args.layers):
        x = attend(x)
        x = x + ask_experts(x, chosen, weights, everyone)
    layer.buffer.destroy()
    return {f"tokens after {args.layers} layers": relative_error(found, attend(x))}


if __name__ == "__main__":
    parser = arguments(__doc__, tokens=128)
    parser.add_argument(
        "--layers", type=int, default=3, help="layers that the tokens go through (default: %(default)s)"
    )
    launch(decode, parser.parse_args(), ALLOWED)
