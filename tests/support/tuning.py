"""What the tests of tuning share: a real sweep, sweeps of our own making, and documents of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from deepep_bootstrap.analysis.results import read
from deepep_bootstrap.analysis.results.model import OPERATIONS, Best, Point, Tested
from deepep_bootstrap.analysis.tuning import sweep
from deepep_bootstrap.analysis.tuning.document import Document, Key, PastSetting, TunedSetting
from deepep_bootstrap.analysis.tuning.sweep import Made
from tests.support.paths import ROOT

CASES = ROOT / "tests/cases/analysis/tuning"
MODULE = (ROOT / "env/tuned/deepep_tuned.py").read_text(encoding="utf-8")
MADE = Made("NVIDIA H200", 1, "v1", "8a07e7e", "intranode-1", 1_700_000_000)


def real_sweep() -> tuple[Tested, ...]:
    """Return the intranode test of eight H200, as measured."""
    return read.read_logs({"node-0-n1.log": (CASES / "intranode-h200.log").read_text()})


def point(operation: str, sms: int, nvl: int | None, us: float, rdma: int | None = None) -> Point:
    """Return a point whose GB/s follow from its time."""
    return Point(operation, sms, nvl, rdma, 100_000 / us, 25_000 / us if rdma else None, us, default=nvl is None)


def swept(
    points: Sequence[Point],
    *,
    test: str = "internode",
    ok: bool = True,
    config: Mapping[str, int | float | str] | None = None,
) -> Tested:
    """Return a test that swept these points, with upstream's choice of the best: the fastest of each operation."""
    best = {}
    for name in OPERATIONS:
        if mine := [each for each in points if each.operation == name and not each.default]:
            one = min(mine, key=lambda each: each.us)
            best[name] = Best(one.nvl_gbs, one.rdma_gbs, one.us, one.sms, one.nvl_chunk, one.rdma_chunk)
    return Tested(
        test,
        "v1",
        ok,
        True,
        24,
        0,
        config or {"num_tokens": 4096, "hidden": 7168, "num_topk": 8},
        best,
        sweep=tuple(points),
        log="l",
    )


def document(
    us: float = 500.0, run: str = "r1", measured: int = 1000, deepep: str = "8a07e7e", **key: object
) -> Document:
    """Return a document in which every operation takes `us`."""
    where = replace(Key("h200", 1, 8, 4096, 7168, 8, 256, "v1"), **key)  # type: ignore[arg-type]
    between = where.nodes > 1
    rdma = (16, 128) if between else (None, None)
    setting = TunedSetting(24, 8, 512 if between else 256, *rdma, 300.0, 50.0 if between else None, us)
    settings = dict.fromkeys(OPERATIONS, setting)
    past = PastSetting(run, measured, deepep, dict.fromkeys(OPERATIONS, us), True)
    sweep = (point("combine", 24, 8, us, rdma[0]),)
    return Document(where, "internode" if between else "intranode", deepep, run, measured, settings, sweep, (past,))


def real_document() -> Document:
    """Return the document of the real sweep."""
    (found,), reasons = sweep.documents(real_sweep(), MADE)
    assert not reasons
    return found
