"""DeepEP's calls as far as the examples use them, in plain torch.distributed: slow, right, and strict about what the
real one forgives.

Test equipment. Results of an asynchronous call are NaN until its event was waited for, by a stream or by a call that
was given the event, those of a low-latency call until its hook was called. A second low-latency call before that is
refused, and so is a combine with another number of SMs than its dispatch. Rows of ElasticBuffer come in no order, and
what DeepEP leaves undefined is NaN. There is no second stream: it does not matter here how fast a result comes, only
who reads it too early.
"""

# ruff: noqa: PT018
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

topk_idx_t = torch.int64
FP8_MAX = 448.0


@dataclass(frozen=True)
class Config:
    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.num_sms // 2 * num_ranks * self.num_max_nvl_chunked_recv_tokens * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0 if num_ranks <= 8 else self.num_sms * self.num_max_rdma_chunked_recv_tokens * hidden_bytes


class EventOverlap:
    """An event, and what is to be done where it is waited for: its call's results are handed out."""

    def __init__(self, deliver: Callable[[], None] | None = None) -> None:
        self.event = self
        self.deliver = deliver

    def current_stream_wait(self) -> None:
        assert self.deliver is not None, "the call was not asynchronous: there is nothing to wait for"
        self.deliver()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait()


@dataclass(frozen=True)
class _Routes:
    """Which of this rank's tokens went where: their indices by destination, how many to and from each rank."""

    tokens: int
    index: torch.Tensor
    sent: list[int]
    came: list[int]


class _Messenger:
    """Exchanges of rows between ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def start(self, outputs: list[torch.Tensor], results: list[torch.Tensor], wait: bool) -> EventOverlap:
        """Fill `outputs` with NaN now, and their first rows with `results` when the event is waited for (`wait`: at
        once)."""
        for tensor in outputs:
            _poison(tensor)

        def deliver() -> None:
            for tensor, result in zip(outputs, results, strict=True):
                tensor.data[: len(result)] = result  # past autograd, which holds the output already

        if wait:
            deliver()
        return EventOverlap(None if wait else deliver)

    def routes(self, is_token_in_rank: torch.Tensor) -> _Routes:
        """Return the routes of a layout; the CPU waits for the counts, as it does in DeepEP."""
        sent = is_token_in_rank.sum(dim=0)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent, group=self.group)
        index = torch.cat([column.nonzero().flatten() for column in is_token_in_rank.T])
        return _Routes(len(is_token_in_rank), index, sent.tolist(), came.tolist())

    def there(self, rows: torch.Tensor, routes: _Routes) -> torch.Tensor:
        """Return the rows that come along the routes, in order of their rank, when every rank sends `rows` (one for
        each index)."""
        found = rows.new_empty(sum(routes.came), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), routes.came, routes.sent, group=self.group)
        return found

    def back(self, rows: torch.Tensor, routes: _Routes) -> torch.Tensor:
        """Return for each token the sum of the rows that come back along the routes."""
        found = rows.new_empty(len(routes.index), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), routes.sent, routes.came, group=self.group)
        sums = torch.zeros(routes.tokens, *rows.shape[1:], device=rows.device)
        return sums.index_add_(0, routes.index, found.float()).to(rows.dtype)

    def local(self, chosen: torch.Tensor, experts: int, routes: _Routes) -> torch.Tensor:
        """Return the chosen experts of the tokens as their destinations number them, -1 for experts elsewhere."""
        mine = experts // self.group.size()
        ranks = torch.repeat_interleave(
            torch.arange(self.group.size(), device="cuda"), torch.tensor(routes.sent, device="cuda")
        )
        local = chosen[routes.index] - ranks.unsqueeze(1) * mine
        return local.masked_fill((local < 0) | (local >= mine), -1)

    def layout(self, chosen: torch.Tensor, experts: int) -> torch.Tensor:
        """Return which tokens go to which rank."""
        ranks = torch.arange(self.group.size(), device="cuda")
        return (chosen.unsqueeze(-1) // (experts // self.group.size()) == ranks).any(dim=1)


def _poison(tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(0x7F)
    else:
        tensor.fill_(torch.nan if tensor.is_floating_point() else -(10**9))


class Buffer:
    num_sms: int = 20

    def __init__(
        self,
        group,
        num_nvl_bytes=0,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=24,
        explicitly_destroy=False,
    ):
        assert num_nvl_bytes > 0 or (low_latency_mode and num_rdma_bytes > 0)
        self.group, self.low_latency_mode, self.explicitly_destroy = group, low_latency_mode, explicitly_destroy
        self.messenger, self.pending, self.qps = _Messenger(group), False, num_qps_per_rank

    def destroy(self) -> None:
        assert self.explicitly_destroy
        assert not self.pending, "a hook was never called"

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(_nothing)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms, {2: 24, 4: 6, 8: 6}[num_ranks], 256, 6, 128)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms, {2: 10, 4: 9, 8: 4}[num_ranks], 256, 6, 128)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return num_max_dispatch_tokens_per_rank * hidden * num_experts * 4

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        _begin(previous_event, async_finish, allocate_on_comm_stream)
        shapes = ((self.group.size(),), (num_experts,), (len(topk_idx), self.group.size()))
        outputs = [torch.empty(shape, dtype=torch.int32, device="cuda") for shape in shapes]

        is_in = self.messenger.layout(topk_idx, num_experts)
        results = [is_in.sum(dim=0), torch.bincount(topk_idx.flatten(), minlength=num_experts), is_in]
        event = self.messenger.start(outputs, results, not async_finish)
        return outputs[0], None, outputs[1], outputs[2], event

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        _begin(previous_event, async_finish, allocate_on_comm_stream)
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            routes, sms = handle
            assert config.num_sms == sms, "a cached dispatch needs the SMs of the first"
            came = x.new_empty(sum(routes.came), x.size(1))
            event = self.messenger.start([came], [self.messenger.there(x[routes.index], routes)], not async_finish)
            return came, None, None, None, None, event
        assert num_tokens_per_rank is not None and num_tokens_per_expert is not None
        assert num_tokens_per_rank.min() >= 0, "the layout's event was not waited for"
        routes = self.messenger.routes(is_token_in_rank.bool())
        experts = len(num_tokens_per_expert)
        rows = sum(routes.came)
        outputs = [
            x.new_empty(rows, x.size(1)),
            topk_idx.new_empty(rows, topk_idx.size(1)),
            topk_weights.new_empty(rows, topk_idx.size(1)),
        ]

        local = self.messenger.local(topk_idx, experts, routes)
        weights = topk_weights[routes.index].masked_fill(local < 0, 0)
        results = [self.messenger.there(each, routes) for each in (x[routes.index], local, weights)]
        event = self.messenger.start(outputs, results, not async_finish)
        return *outputs, [], (routes, config.num_sms), event

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        _begin(previous_event, async_finish, allocate_on_comm_stream)
        routes, sms = handle
        assert config.num_sms == sms, "combine needs the SMs of its dispatch"
        assert x.is_contiguous() and x.dtype == torch.bfloat16
        given = [each for each in (x, topk_weights) if each is not None]
        outputs = [each.new_empty(routes.tokens, each.size(1)) for each in given]
        event = self.messenger.start(outputs, [self.messenger.back(each, routes) for each in given], not async_finish)
        return outputs[0], outputs[1] if topk_weights is not None else None, event

    def low_latency_dispatch(
        self,
        x,
        topk_idx,
        num_max_dispatch_tokens_per_rank,
        num_experts,
        use_fp8=True,
        async_finish=False,
        return_recv_hook=False,
    ):
        assert self.low_latency_mode and use_fp8 and return_recv_hook and not async_finish
        assert not self.pending, "one message at a time: the hook before was not called"
        assert len(x) <= num_max_dispatch_tokens_per_rank and self.qps == num_experts // self.group.size()
        ranks, most, mine = self.group.size(), num_max_dispatch_tokens_per_rank, num_experts // self.group.size()
        padded, chosen = x.new_zeros(most, x.size(1)), topk_idx.new_full((most, topk_idx.size(1)), -1)
        padded[: len(x)], chosen[: len(x)] = x, topk_idx
        blocks = padded.float().unflatten(-1, (-1, 128))
        scales = blocks.abs().amax(dim=-1) / FP8_MAX
        numbers = (blocks / scales.clamp(min=1e-20).unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn)
        gathered = [_gather(each, self.group) for each in (numbers.view(torch.uint8), scales, chosen)]
        came = torch.empty(mine, ranks * most, x.size(1), device="cuda", dtype=torch.float8_e4m3fn)
        came_scales, counts = (
            torch.empty(mine, ranks * most, x.size(1) // 128, device="cuda"),
            torch.empty(mine, dtype=torch.int32, device="cuda"),
        )
        for tensor in (came, came_scales, counts):
            _poison(tensor)
        visits = [(gathered[2] == self.group.rank() * mine + expert).nonzero() for expert in range(mine)]

        def hook() -> None:
            for expert, visit in enumerate(visits):
                rank, token, _ = visit.T
                came[expert].view(torch.uint8)[: len(visit)] = gathered[0][rank, token]
                came_scales[expert, : len(visit)] = gathered[1][rank, token]
                counts[expert] = len(visit)
            self.pending = False

        self.pending = True
        return (came, came_scales), counts, (visits, most), EventOverlap(), hook

    def low_latency_combine(self, x, topk_idx, topk_weights, handle, async_finish=False, return_recv_hook=False):
        assert return_recv_hook and not async_finish and x.dtype == torch.bfloat16
        assert not self.pending, "one message at a time: the hook before was not called"
        visits, most = handle
        answers = torch.zeros(self.group.size(), most, topk_idx.size(1), x.size(2), device="cuda", dtype=x.dtype)
        for expert, visit in enumerate(visits):
            answers[tuple(visit.T)] = x[expert, : len(visit)]
        found = torch.empty_like(answers)
        dist.all_to_all_single(found, answers, group=self.group)
        result = found.sum(dim=0).float()[: len(topk_idx)] * topk_weights.unsqueeze(-1)
        combined = torch.full_like(result[:, 0], torch.nan).to(x.dtype)

        def hook() -> None:
            combined.copy_(result.sum(dim=1))
            self.pending = False

        self.pending = True
        return combined, EventOverlap(), hook


def _nothing() -> None:
    """Deliver nothing: what is captured on a stream without a call is there already."""


def _begin(previous_event: Any, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    """Wait for the event before a call; refuse what DeepEP refuses."""
    assert not allocate_on_comm_stream or (previous_event is not None and async_finish), (
        "memory of the other stream needs an event before"
    )
    if previous_event is not None:
        previous_event.current_stream_wait()


def _gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    found = tensor.new_empty(group.size(), *tensor.shape)
    dist.all_gather_into_tensor(found, tensor, group=group)
    return found


@dataclass(frozen=True)
class EPHandle:
    num_sms: int
    do_expand: bool
    routes: _Routes
    order: torch.Tensor
    visits: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    topk_idx: torch.Tensor


class ElasticBuffer:
    def __init__(
        self, group, num_bytes=None, num_max_tokens_per_rank=0, hidden=0, num_topk=0, explicitly_destroy=False
    ):
        self.group, self.explicitly_destroy, self.most = group, explicitly_destroy, num_max_tokens_per_rank
        self.num_bytes = num_max_tokens_per_rank * hidden * group.size() * 2
        self.messenger = _Messenger(group)

    def destroy(self) -> None:
        assert self.explicitly_destroy

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(_nothing)

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
        assert num_experts % self.group.size() == 0 and num_topk > 0
        return 12

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        num_experts=None,
        num_sms=0,
        previous_event=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
        handle=None,
        do_cpu_sync=None,
        do_expand=False,
    ):
        _begin(previous_event, async_with_compute_stream, allocate_on_comm_stream)
        if handle is not None:
            assert topk_idx is None and num_sms == handle.num_sms and not handle.do_expand
            came = x.new_empty(sum(handle.routes.came), x.size(1))
            results = [self.messenger.there(x[handle.routes.index], handle.routes)[handle.order]]
            event = self.messenger.start([came], results, not async_with_compute_stream)
            return came, None, None, handle, event
        num_sms = num_sms or self.get_theoretical_num_sms(num_experts, topk_idx.size(1))
        assert len(x) <= self.most
        routes = self.messenger.routes(self.messenger.layout(topk_idx, num_experts))
        order = torch.randperm(sum(routes.came), device="cuda")
        local = self.messenger.there(self.messenger.local(topk_idx, num_experts, routes), routes)[order]
        mine = num_experts // self.group.size()
        counts = torch.bincount(local[local >= 0], minlength=mine)
        visits = torch.cat([(local == expert).nonzero() for expert in range(mine)])
        handle = EPHandle(num_sms, do_expand, routes, order, visits, counts.cumsum(0).int(), topk_idx.clone())
        rows = len(visits) if do_expand else len(order)
        if do_cpu_sync is False:
            rows = self.most * self.group.size() * (min(mine, topk_idx.size(1)) if do_expand else 1)
        shape = (rows,) if do_expand else (rows, topk_idx.size(1))
        outputs = [
            x.new_empty(rows, x.size(1)),
            topk_idx.new_empty(rows, topk_idx.size(1)),
            topk_weights.new_empty(shape),
        ]

        came, weights = (self.messenger.there(each[routes.index], routes)[order] for each in (x, topk_weights))
        if do_expand:
            results = [came[visits[:, 0]], local[visits[:, 0]], weights[tuple(visits.T)]]
        else:
            results = [came, local, weights.masked_fill(local < 0, torch.nan)]
        event = self.messenger.start(outputs, results, not async_with_compute_stream)
        return *outputs, handle, event

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        num_sms=0,
        previous_event=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
    ):
        _begin(previous_event, async_with_compute_stream, allocate_on_comm_stream)
        assert x.is_contiguous() and x.dtype == torch.bfloat16
        given = [each for each in (x, topk_weights) if each is not None]
        outputs = [each.new_empty(handle.routes.tokens, each.size(1)) for each in given]

        results = []
        for each in given:
            rows = torch.zeros(len(handle.order), each.size(1), device=each.device)
            if handle.do_expand:
                rows.index_add_(0, handle.visits[:, 0], each[: len(handle.visits)].float())
            else:
                rows.copy_(each)
            unsorted = torch.empty_like(rows, dtype=each.dtype)
            unsorted[handle.order] = rows.to(each.dtype)
            results.append(self.messenger.back(unsorted, handle.routes))
        event = self.messenger.start(outputs, results, not async_with_compute_stream)
        return outputs[0], outputs[1] if topk_weights is not None else None, event
