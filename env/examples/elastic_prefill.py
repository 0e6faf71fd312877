"""One training step of a mixture-of-experts layer whose experts are spread over all GPUs, with the ElasticBuffer of
DeepEP V2.

    python elastic_prefill.py [--tokens 4096] [--hidden 7168] [--topk 8] [--experts 256]

What it shows: the same as moe_prefill.py, which is for DeepEP V1. V2 computes layout, number of SMs and queue pairs
itself, so there is nothing to tune and one call less. Kernels are compiled when they are first used, so that the first
call takes its time. Start it on several nodes as together.py says.

Limit: no CUDA graph goes around a dispatch without a handle, for which the CPU waits (do_cpu_sync, the default). With
do_cpu_sync=False, as in elastic_decode.py, or along a known handle it waits for nothing.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from deep_ep import ElasticBuffer, topk_idx_t
from together import Errors, arguments, ask_experts, draw_experts, draw_tokens, launch, relative_error, say

ALLOWED = 0.01
"""BF16 keeps 8 bits, so a rounding costs about 0.2 %. One wrong expert for one token in a hundred costs more than
this."""


class Dispatch(torch.autograd.Function):
    """Send tokens to the GPUs of their experts. The results may be read once the event, the last of them, has come."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, layer: tuple[ElasticBuffer, int]
    ) -> tuple[Any, ...]:
        """Return tokens that came, their experts by local number (-1: another GPU's), weights, the handle, the
        event."""
        buffer, experts = layer
        came, came_for, came_weights, handle, arrival = buffer.dispatch(
            x,
            topk_idx=chosen,
            topk_weights=weights,
            num_experts=experts,
            previous_event=buffer.capture(),
            async_with_compute_stream=True,
            allocate_on_comm_stream=True,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(came_for)
        return came, came_for, came_weights, handle, arrival

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor, _1: None, grad_weights: torch.Tensor, _2: None, _3: None
    ) -> tuple[Any, ...]:
        """Add up the gradients of a token's copies, and of its weights, where the token came from."""
        x, weights, done = ctx.buffer.combine(
            grad.contiguous(), ctx.handle, topk_weights=grad_weights.contiguous(), async_with_compute_stream=True
        )
        done.current_stream_wait()
        return x, None, weights, None


class Combine(torch.autograd.Function):
    """Bring the experts' answers back and add them up for each token."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, handle: Any, buffer: ElasticBuffer) -> tuple[Any, ...]:
        """Return the sums, which may be read once the event has come, and the event."""
        ctx.buffer, ctx.handle = buffer, handle
        combined, _, arrival = buffer.combine(y, handle, async_with_compute_stream=True)
        return combined, arrival

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: None) -> tuple[Any, ...]:
        """Send each token's gradient the way the token went. Nothing is counted anew, so the CPU need not wait for
        the GPU."""
        y, *_none, done = ctx.buffer.dispatch(
            grad.contiguous(), handle=ctx.handle, num_sms=ctx.handle.num_sms, async_with_compute_stream=True
        )
        done.current_stream_wait()
        return y, None, None


def run_layer(
    layer: tuple[ElasticBuffer, int], tokens: tuple[torch.Tensor, ...], experts: torch.Tensor, shared: torch.Tensor
) -> torch.Tensor:
    """Return the sum of the chosen experts, wherever they are, and of the one that every token visits."""
    x, chosen, weights = tokens
    came, came_for, came_weights, handle, arrival = Dispatch.apply(x, chosen, weights, layer)
    with arrival:  # tokens travel while the shared expert computes; this stream waits for them where the block ends
        at_home = (x.float() * shared).to(x.dtype)
    answers = ask_experts(came, came_for, came_weights, experts)
    combined, arrival = Combine.apply(answers, handle, layer[0])
    arrival.current_stream_wait()
    return combined + at_home


def step(args: argparse.Namespace, group: dist.ProcessGroup) -> Errors:
    """Run the layer forward and backward, both ways, and return the relative errors of this rank."""
    # The buffer is as large as these numbers ask; a program makes one and keeps it.
    shape = {"num_max_tokens_per_rank": args.tokens, "hidden": args.hidden, "num_topk": args.topk}
    buffer = ElasticBuffer(group, **shape, explicitly_destroy=True)
    say(
        f"buffer of each GPU: {buffer.num_bytes >> 20} MiB; "
        f"{buffer.get_theoretical_num_sms(args.experts, args.topk)} SMs"
    )
    x, chosen, weights = draw_tokens(args)
    experts, all_experts = draw_experts(args, group)
    shared, direction = torch.rand(args.hidden, device="cuda") + 0.5, torch.randn_like(x)

    mine = [tensor.clone().requires_grad_() for tensor in (x, weights, experts)]
    output = run_layer((buffer, args.experts), (mine[0], chosen.to(topk_idx_t), mine[1]), mine[2], shared)
    output.backward(direction)

    plain = [tensor.clone().requires_grad_() for tensor in (x, weights, all_experts)]
    wanted = ask_experts(plain[0], chosen, plain[1], plain[2]) + (plain[0].float() * shared).to(x.dtype)
    wanted.backward(direction)
    dist.all_reduce(plain[2].grad, group=group)  # tokens of every rank have visited every expert
    grads = plain[0].grad, plain[1].grad, plain[2].grad.view(group.size(), *experts.shape)[group.rank()]

    buffer.destroy()
    names = ("gradient of tokens", "gradient of weights", "gradient of experts")
    errors = {name: relative_error(tensor.grad, grad) for name, tensor, grad in zip(names, mine, grads, strict=True)}
    return {"output": relative_error(output, wanted), **errors}


if __name__ == "__main__":
    launch(step, arguments(__doc__, tokens=2048).parse_args(), ALLOWED)
