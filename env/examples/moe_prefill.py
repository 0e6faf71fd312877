"""One training step of a mixture-of-experts layer whose experts are spread over all GPUs, with DeepEP's high-throughput
kernels.

    python moe_prefill.py [--tokens 4096] [--hidden 7168] [--topk 8] [--experts 256]

What it shows: dispatch sends every token to the GPUs of its experts, combine adds up what they answer. The gradient of
a dispatch is a combine, and the gradient of a combine is a dispatch along the routes that are known already (the
handle). Both run on a stream of their own while other work goes on. Output and gradients are compared with the same
layer in plain PyTorch. Prefill, which is inference without a backward pass, uses the first half of it. Start it on
several nodes as together.py says. No CUDA graph goes around this dispatch, since the CPU waits for the GPU to say how
many tokens come; along a known handle, as in backward, it does not.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deep_ep import Buffer, Config, EventOverlap, topk_idx_t
from together import Errors, arguments, ask_experts, draw_experts, draw_tokens, launch, relative_error, say

ALLOWED = 0.01
"""BF16 keeps 8 bits, so a rounding costs about 0.2 %. One wrong expert for one token in a hundred costs more than
this."""


class Layer(NamedTuple):
    """What all calls of a layer share."""

    buffer: Buffer
    experts: int
    dispatch: Config
    combine: Config


class Dispatch(torch.autograd.Function):
    """Send tokens to the GPUs of their experts. The results may be read once the event, the last of them, has come."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, layer: Layer
    ) -> tuple[Any, ...]:
        """Return tokens that came, their experts by local number (-1: another GPU's), weights, the handle, the
        event."""
        # On the communication stream each call waits for the event it is given: first for the tokens to be there, then
        # for the layout.
        aside = {"async_finish": True, "allocate_on_comm_stream": True}
        to_rank, to_node, to_expert, is_in_rank, counted = layer.buffer.get_dispatch_layout(
            chosen, layer.experts, previous_event=layer.buffer.capture(), **aside
        )
        came, came_for, came_weights, _, handle, arrival = layer.buffer.dispatch(
            x,
            topk_idx=chosen,
            topk_weights=weights,
            num_tokens_per_rank=to_rank,
            num_tokens_per_rdma_rank=to_node,
            num_tokens_per_expert=to_expert,
            is_token_in_rank=is_in_rank,
            config=layer.dispatch,
            previous_event=counted,
            **aside,
        )
        ctx.layer, ctx.handle = layer, handle
        ctx.mark_non_differentiable(came_for)
        return came, came_for, came_weights, handle, arrival

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor, _1: None, grad_weights: torch.Tensor, _2: None, _3: None
    ) -> tuple[Any, ...]:
        """Add up the gradients of a token's copies, and of its weights, where the token came from."""
        x, weights, done = ctx.layer.buffer.combine(
            grad.contiguous(),
            ctx.handle,
            topk_weights=grad_weights.contiguous(),
            config=ctx.layer.combine,
            async_finish=True,
        )
        done.current_stream_wait()
        return x, None, weights, None


class Combine(torch.autograd.Function):
    """Bring the experts' answers back and add them up for each token."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, handle: tuple[Any, ...], layer: Layer) -> tuple[torch.Tensor, EventOverlap]:
        """Return the sums, which may be read once the event has come, and the event."""
        ctx.layer, ctx.handle = layer, handle
        combined, _, arrival = layer.buffer.combine(y, handle, config=layer.combine, async_finish=True)
        return combined, arrival

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: None) -> tuple[Any, ...]:
        """Send each token's gradient the way the token went. Nothing is counted anew, so the CPU need not wait for
        the GPU."""
        y, *_none, done = ctx.layer.buffer.dispatch(
            grad.contiguous(), handle=ctx.handle, config=ctx.layer.dispatch, async_finish=True
        )
        done.current_stream_wait()
        return y, None, None


def run_layer(
    layer: Layer,
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    shared: torch.Tensor,
) -> torch.Tensor:
    """Return the sum of the chosen experts, wherever they are, and of the one that every token visits."""
    came, came_for, came_weights, handle, arrival = Dispatch.apply(x, chosen, weights, layer)
    with arrival:  # tokens travel while the shared expert computes; this stream waits for them where the block ends
        at_home = (x.float() * shared).to(x.dtype)
    answers = ask_experts(came, came_for, came_weights, experts)
    combined, arrival = Combine.apply(answers, handle, layer)
    arrival.current_stream_wait()
    return combined + at_home


def choose_configs(ranks: int, hidden: int) -> tuple[Config, Config, int, str]:
    """Return the settings of dispatch and combine, the SMs that both use, and where they come from."""
    try:
        import deepep_tuned  # there once `invoke test` has measured this cluster
    except ImportError:
        found = None
    else:
        found = deepep_tuned.settings(ranks, hidden=hidden, dtype="bf16")
    if found is None:
        return Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks), Buffer.num_sms, "DeepEP's own"
    Buffer.set_num_sms(
        found["num_sms"]
    )  # for whoever asks for defaults later: the SMs of a dispatch and its combine must be the same
    return Config(**found["dispatch"]), Config(**found["combine"]), found["num_sms"], f"measured in {found['run']}"


def make_layer(args: argparse.Namespace, group: dist.ProcessGroup) -> Layer:
    """Return a layer with a buffer that is large enough for both settings. A program makes one buffer and keeps it."""
    dispatch, combine, sms, origin = choose_configs(group.size(), args.hidden)
    row = args.hidden * 2  # bytes of a token in BF16, also for those who dispatch FP8: what is combined is BF16
    nvlink = max(config.get_nvl_buffer_size_hint(row, group.size()) for config in (dispatch, combine))
    rdma = max(config.get_rdma_buffer_size_hint(row, group.size()) for config in (dispatch, combine))  # 0 on one node
    say(f"settings: {origin}, {sms} SMs; buffers of each GPU: {nvlink >> 20} MiB for NVLink, {rdma >> 20} MiB for RDMA")
    return Layer(
        Buffer(group, nvlink, rdma, num_qps_per_rank=max(sms, 24), explicitly_destroy=True),
        args.experts,
        dispatch,
        combine,
    )


def step(args: argparse.Namespace, group: dist.ProcessGroup) -> Errors:
    """Run the layer forward and backward, both ways, and return the relative errors of this rank."""
    layer = make_layer(args, group)
    x, chosen, weights = draw_tokens(args)
    experts, all_experts = draw_experts(args, group)
    shared, direction = torch.rand(args.hidden, device="cuda") + 0.5, torch.randn_like(x)

    mine = [tensor.clone().requires_grad_() for tensor in (x, weights, experts)]
    output = run_layer(layer, mine[0], chosen.to(topk_idx_t), mine[1], mine[2], shared)
    output.backward(direction)

    plain = [tensor.clone().requires_grad_() for tensor in (x, weights, all_experts)]
    wanted = ask_experts(plain[0], chosen, plain[1], plain[2]) + (plain[0].float() * shared).to(x.dtype)
    wanted.backward(direction)
    dist.all_reduce(plain[2].grad, group=group)  # tokens of every rank have visited every expert
    grads = plain[0].grad, plain[1].grad, plain[2].grad.view(group.size(), *experts.shape)[group.rank()]

    layer.buffer.destroy()
    names = ("gradient of tokens", "gradient of weights", "gradient of experts")
    errors = {name: relative_error(tensor.grad, grad) for name, tensor, grad in zip(names, mine, grads, strict=True)}
    return {"output": relative_error(output, wanted), **errors}


if __name__ == "__main__":
    launch(step, arguments(__doc__, tokens=2048).parse_args(), ALLOWED)
