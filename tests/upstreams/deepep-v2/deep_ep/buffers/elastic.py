"""V2's buffer: one call for what took V1 two."""

from .legacy import Buffer


class ElasticBuffer:
    """DeepEP's ElasticBuffer for the ranks of one group, with its calls for tokens; sizes and events mean nothing here."""

    def __init__(self, group, *, num_max_tokens_per_rank: int, hidden: int, num_topk: int, explicitly_destroy: bool = False) -> None:
        """Meet the others."""
        self.buffer = Buffer(group)

    def destroy(self) -> None:
        """Part from the others."""
        self.buffer.destroy()

    def dispatch(self, x, topk_idx, topk_weights, *, num_experts: int) -> tuple:
        """Return (tokens, experts counted from this rank's first or -1, weights, handle, None)."""
        _, _, per_expert, layout, _ = self.buffer.get_dispatch_layout(topk_idx, num_experts)
        given = {"topk_idx": topk_idx, "topk_weights": topk_weights}
        x, experts, weights, _, handle, _ = self.buffer.dispatch(x, **given, is_token_in_rank=layout, num_tokens_per_expert=per_expert)
        return x, experts, weights, handle, None

    def combine(self, x, handle) -> tuple:
        """Return (the sum over ranks for each of our tokens, None, None)."""
        return self.buffer.combine(x, handle)
