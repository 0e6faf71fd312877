"""Decoding steps of mixture-of-experts layers whose experts are spread over all GPUs, with the ElasticBuffer of DeepEP
V2.

    python elastic_decode.py [--tokens 128] [--hidden 7168] [--topk 8] [--experts 256] [--layers 3]

What it shows: the same overlap of two halves of a batch as moe_decode.py, which is for DeepEP V1. V2 has no kernels of
their own for decoding and no hooks: communication runs on a stream of its own, on few SMs, and an event says when it is
done. Tokens come in the layout of a grouped matrix product, one row for each expert that a token visits and one expert
after the other, and no CPU waits for their number. Start it on several nodes as together.py says.

Limits: a CUDA graph goes only around calls for which no CPU waits, as these with do_cpu_sync=False, and not around the
first of them, which compiles the kernels. A rank sends no more tokens at once than its ElasticBuffer was made for.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deep_ep import ElasticBuffer, EventOverlap, topk_idx_t
from together import Errors, arguments, ask_experts, draw_experts, draw_tokens, launch, relative_error, say

ALLOWED = 0.02
"""BF16 keeps 8 bits, so a rounding costs about 0.2 %, and there are some in each layer."""


@dataclass
class Half:
    """One half of the batch: its tokens, the experts that each visits and the weights of their answers."""

    x: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Came:
    """What a dispatch brings: a row for each visit, its weight, and the handle, which knows whose rows they are."""

    x: torch.Tensor
    weights: torch.Tensor
    handle: Any


@dataclass(frozen=True)
class Layer:
    """What all calls share."""

    buffer: ElasticBuffer
    experts: int
    mine: torch.Tensor


def attend(x: torch.Tensor) -> torch.Tensor:
    """Stand for attention and normalization, which need no other GPU."""
    return (x.float() * x.float().square().mean(dim=-1, keepdim=True).rsqrt()).to(x.dtype)


def send_tokens(layer: Layer, half: Half) -> tuple[Came, EventOverlap]:
    """Send tokens to their experts; `do_expand` asks for a row for each visit."""
    came, _, weights, handle, event = layer.buffer.dispatch(
        half.x,
        topk_idx=half.chosen,
        topk_weights=half.weights,
        num_experts=layer.experts,
        async_with_compute_stream=True,
        do_cpu_sync=False,
        do_expand=True,
    )
    return Came(came, weights, handle), event


def send_answers(layer: Layer, came: Came, answers: torch.Tensor) -> tuple[torch.Tensor, EventOverlap]:
    """Send answers back, where they are added up."""
    combined, _, event = layer.buffer.combine(answers, came.handle, async_with_compute_stream=True)
    return combined, event


def run_experts(layer: Layer, came: Came) -> torch.Tensor:
    """Return the answers of this rank's experts, multiplied by their weights. The rows of an expert end where the
    handle's sum of counts says. Behind the last expert's rows come some that are left over, since the CPU does not
    know how many are used."""
    ends = came.handle.psum_num_recv_tokens_per_expert
    rows = torch.arange(came.x.size(0), device=came.x.device, dtype=ends.dtype)
    expert = torch.searchsorted(ends, rows, right=True).clamp(max=len(layer.mine) - 1)
    return (came.x.float() * layer.mine[expert] * came.weights.unsqueeze(-1)).to(torch.bfloat16)


def run_layer(layer: Layer, one: Half, two: Half) -> None:
    """Run a layer on both halves, where `one` has been through attention already, and send it through the next
    layer's attention."""
    came, event = send_tokens(layer, one)
    with event:  # the block's work is done while the tokens of `one` travel; where it ends, this stream waits for them
        two.x = attend(two.x)
    came_two, event = send_tokens(layer, two)
    with event:
        answers = run_experts(layer, came)
    combined, event = send_answers(layer, came, answers)
    with event:
        answers = run_experts(layer, came_two)
    one.x = one.x + combined
    combined, event = send_answers(layer, came_two, answers)
    with event:
        one.x = attend(one.x)
    two.x = two.x + combined


def decode(args: argparse.Namespace, group: dist.ProcessGroup) -> Errors:
    """Run all layers both ways and return the relative error of this rank."""
    x, chosen, weights = draw_tokens(args)
    mine, everyone = draw_experts(args, group)
    most = (args.tokens + 1) // 2
    shape = {"num_max_tokens_per_rank": most, "hidden": args.hidden, "num_topk": args.topk}
    buffer = ElasticBuffer(group, **shape, explicitly_destroy=True)
    say(f"buffer of each GPU: {buffer.num_bytes >> 20} MiB for at most {most} tokens at once")
    layer = Layer(buffer, args.experts, mine)

    parts = zip(x.split(most), chosen.to(topk_idx_t).split(most), weights.split(most), strict=True)
    one, two = (Half(*(part.contiguous() for part in each)) for each in parts)
    one.x = attend(one.x)
    for _ in range(args.layers):
        run_layer(layer, one, two)
    found = torch.cat([one.x, attend(two.x)])

    for _ in range(args.layers):
        x = attend(x)
        x = x + ask_experts(x, chosen, weights, everyone)
    buffer.destroy()
    return {f"tokens after {args.layers} layers": relative_error(found, attend(x))}


if __name__ == "__main__":
    parser = arguments(__doc__, tokens=128)
    parser.add_argument(
        "--layers", type=int, default=3, help="layers that the tokens go through (default: %(default)s)"
    )
    launch(decode, parser.parse_args(), ALLOWED)
