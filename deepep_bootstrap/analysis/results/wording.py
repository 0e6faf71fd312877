"""Results of tests as lines for people, and the reasons why a test is not ok."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from deepep_bootstrap.analysis.results.collectors import numbers
from deepep_bootstrap.analysis.results.model import LAYOUT, OURS, Best, Operation, Pass, Rank, Spread, Tested
from deepep_bootstrap.analysis.results.scanner import is_launchers
from deepep_bootstrap.core.errors import Problem
from deepep_bootstrap.core.text import three_digits

WIDTH = 20
"""Columns of the words in front."""

NAMED_MAX = 6
"""Ranks whose reason is shown one by one; the document has all."""


ERRORS_TOLD = 3
"""Errors that are shown beside the verdict; the document has more."""

COMPARISON = re.compile(r"AssertionError: Error: diff=")
"""What upstream's low-latency test says where what came back is not what it should be."""


def lines(tested: Tested, kind: str = "") -> Iterator[str]:
    """Yield the lines that sum up one test: verdict, settings, best figures, low latency, slow and missing ranks.
    `kind` is what was asked for where that has another name than the program: a pressure test is one of low latency."""
    verdict = "passed" if tested.ok else "FAILED"
    cases = (
        f"{tested.passed} case{'s' * (tested.passed != 1)} passed"
        + (f", {tested.failed} failed" if tested.failed else "")
        if tested.passed or tested.failed
        else ""
    )
    where = f"{tested.log}:{tested.line}"
    other = f"{tested.test}, " if kind not in {"", tested.test} else ""
    of = "" if tested.test in OURS else f" ({other}DeepEP {tested.generation.upper()})"
    at = f", {tested.test_pass.tokens} tokens" if tested.test_pass else ""
    yield f"{kind or tested.test} test{of}{at}: {verdict}{cases and f', {cases}'}  [{where}]"
    for fault in faults(tested):
        yield _row("", f"- {fault}")
    if tested.config:
        yield _row(
            "settings",
            ", ".join(
                f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in tested.config.items()
            ),
        )
    if tested.test_pass:
        yield _row("checked", checked(tested.test_pass))
    for name, best in tested.best.items():
        yield _row(name, best_line(best))
    for name, operation in tested.operations.items():
        yield _row(name, layout_line(operation, tested) if name == LAYOUT else operation_line(operation))
    yield from _low_latency(tested)
    yield from _ranks(tested.ranks)


def faults(tested: Tested) -> tuple[str, ...]:
    """Return why a test is not ok, one sentence each; nothing for one that is."""
    if tested.ok:
        return ()
    found = [*filter(None, (wrong(tested),)), *([] if tested.ended else ["the log stops early"])]
    if tested.failed:
        found.append("a case failed" if tested.failed == 1 else f"{tested.failed} cases failed")
    missing = [rank.rank for rank in tested.ranks if rank.state == "missing"]
    if missing:
        found.append(f"figures are missing of rank{'s' if len(missing) > 1 else ''} {numbers(missing)}")
    if tested.ended and not tested.passed and tested.test not in {"low-latency", "ep", *OURS}:
        found.append("no case is in the log")
    # What Slurm says of it follows from what the test says.
    errors = [error for error in tested.errors if not is_launchers(error)] or tested.errors
    return (*found, *(f"error: {error}" for error in errors[:ERRORS_TOLD]))


def wrong(tested: Tested) -> str:
    """Return that a test computed wrong numbers, and where, in one sentence; "" where its own comparison did not say
    so."""
    mismatch = next((error for error in tested.errors if COMPARISON.search(error)), "")
    if not mismatch:
        return ""
    test_pass = tested.test_pass
    where = (
        f" at {test_pass.tokens} tokens a rank, in run {test_pass.passed_runs + 1} of {test_pass.runs}"
        if test_pass
        else ""
    )
    return (
        f"wrong results{where}: the test ran, and its own comparison of the tokens that came back failed ({mismatch})"
    )


def checked(test_pass: Pass) -> str:
    """Return how many combine calls of a pass were compared."""
    runs = f"{test_pass.runs} run{'s' * (test_pass.runs != 1)}"
    return f"{test_pass.checked_calls} combine calls at {test_pass.tokens} tokens, in {test_pass.passed_runs} of {runs}"


def problem(tested: Tested) -> Problem:
    """Return what is wrong with a test that is not ok as a problem."""
    wanted = "all cases passed, all ranks' figures, and the end of the test"
    return Problem(
        f"{tested.log}:{tested.line}",
        f"{tested.test} test not ok",
        "; ".join(faults(tested)),
        wanted,
        f"invoke diagnose {tested.log}",
    )


def best_line(best: Best) -> str:
    """Return one best setting: rates, time, and what was set."""
    rates = [
        f"{three_digits(value)} GB/s {unit}"
        for value, unit in ((best.rdma_gbs, "RDMA"), (best.nvl_gbs, "NVLink"))
        if value is not None
    ]
    chunks = [
        f"{unit} chunk {value}"
        for value, unit in ((best.nvl_chunk, "NVL"), (best.rdma_chunk, "RDMA"))
        if value is not None
    ]
    time = [] if best.us is None else [f"{three_digits(best.us)} us"]
    return f"{', '.join([*rates, *time])}  ({', '.join([f'{best.sms} SMs', *chunks])})"


def operation_line(operation: Operation) -> str:
    """Return one operation: rates out of and inside the node, and time, each as it spreads over the ranks; rates of
    our own programs."""
    parts = (
        *((operation.so_gbs, "GB/s out"), (operation.su_gbs, "GB/s up"), (operation.us, "us")),
        *((operation.bus_gbs, "GB/s (bus)"), (operation.gpu_gbs, "GB/s a GPU")),
    )
    return ", ".join(f"{spread_text(spread)} {unit}" for spread, unit in parts if spread is not None)


def layout_line(operation: Operation, tested: Tested) -> str:
    """Return the time of the layout kernel, and how many tokens of a rank that is a second."""
    tokens = tested.config.get("num_tokens")
    if operation.us is None or not isinstance(tokens, int) or not operation.us.median:
        return operation_line(operation)
    return f"{operation_line(operation)}, {tokens / operation.us.median:.1f} M tokens/s"


def spread_text(spread: Spread) -> str:
    """Return `median (min-max)`, or one number where all ranks agree."""
    if spread.min == spread.max:
        return three_digits(spread.median)
    return f"{three_digits(spread.median)} ({three_digits(spread.min)}-{three_digits(spread.max)})"


def _low_latency(tested: Tested) -> Iterator[str]:
    low = tested.low_latency
    if low is None:
        return
    if low.dispatch_combine_gbs is not None:
        us = low.dispatch_combine_us
        time = "" if us is None else f", {three_digits(us)} us"
        yield _row("dispatch + combine", f"{spread_text(low.dispatch_combine_gbs)} GB/s{time}")
    for name, spread, us, send, recv in (
        ("dispatch", low.dispatch_gbs, low.dispatch_us, low.dispatch_send_us, low.dispatch_recv_us),
        ("combine", low.combine_gbs, low.combine_us, low.combine_send_us, low.combine_recv_us),
    ):
        if spread is not None and us is not None:
            halves = (
                "" if send is None or recv is None else f" (send {three_digits(send)}, receive {three_digits(recv)})"
            )
            yield _row(name, f"{spread_text(spread)} GB/s, {three_digits(us)} us{halves}")


def _ranks(ranks: Sequence[Rank]) -> Iterator[str]:
    if not ranks:
        return
    states = {state: [rank for rank in ranks if rank.state == state] for state in ("ok", "slow", "missing")}
    counts = ", ".join(f"{len(found)} {state}" for state, found in states.items() if found)
    yield _row("ranks", counts)
    for state in ("slow", "missing"):
        by_reason: dict[str, list[int]] = {}
        for rank in states[state]:
            by_reason.setdefault(rank.why, []).append(rank.rank)
        for why, found in list(by_reason.items())[:NAMED_MAX]:
            yield _row("", f"{state} {numbers(found)}: {why}")


def _row(name: str, text: str) -> str:
    return f"    {name:<{WIDTH}}{text}" if name else f"    {text}"
