"""Screens of a run as golden files: what `invoke test` says at its end, and `invoke report` of the same run."""

from __future__ import annotations

import json
import os

import pytest

from deepep_bootstrap.analysis import assess
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.inventory.facts import Facts, Gpu, facts_json
from deepep_bootstrap.report import load, summary, terminal
from deepep_bootstrap.testing import run_folder
from tests.support.paths import ROOT
from tests.support.report import TEXTS, page_of

GOLDEN = ROOT / "tests" / "golden" / "report"
SITE = """\
[[reference]]
gpu = "H100"
fabric = "nvlink"
nodes = 1
test = "intranode"
generation = "v1"
lower = 0.1
upper = 0.1
source = "this site, run 1"
[reference.figures]
"best.dispatch_fp8.nvl_gbs" = 0.03
"best.dispatch_fp8.us" = 1636.52
"best.dispatch_bf16.nvl_gbs" = 0.0005
"best.dispatch_bf16.us" = 1636.52
"best.combine.nvl_gbs" = 0.0005
"best.combine.us" = 1500.0
"""
GPUS = tuple(Gpu(number, "NVIDIA H100 80GB HBM3", 81559, "9.0", "580", "", "", -1, 0) for number in range(2))
FACTS = json.dumps({"schema": 1, "hosts": facts_json({"n001": Facts(gpus=GPUS)})})


def point(chunk: int, rate: float, us: float) -> str:
    return f"[tuning] SMs 24, NVL chunk {chunk}: {rate} GB/s (NVL), {us} us\n"


def operation(name: str, rate: float, us: float) -> str:
    sweep = point(4, round(rate * 0.9, 6), round(us / 0.9, 2)) + point(8, rate, us)
    return f"{sweep}[tuning] Best {name}: SMs 24, NVL chunk 8{',' if 'disp' in name else ':'} {rate} GB/s (NVL), t: {us} us\n\n"


LOG = (
    "deepep: intranode test of deepep/1.2.1-v1: test_intranode.py\n"
    "[config] num_tokens=128, hidden=7168, num_topk=8\n[layout] Kernel performance: 0.110 ms\n\n"
    "[testing] Running with BF16, without top-k (async=False, previous=False) ... passed\n\n"
    f"{operation('dispatch (FP8)', 0.00118, 23745.39)}{operation('dispatch (BF16)', 0.00111, 1640.0)}"
    f"{operation('combine', 0.00122, 1000.0)}deepep: test_intranode.py ended with exit code 0\n"
)
COUNTERS = "time={}\n" + "".join(f"nic=mlx5_{number} 1 InfiniBand 400 5 5\n" for number in range(8))
FILES = {
    "run.env": "kind=intranode\nstack=v1\nmodule=deepep/1.2.1-v1\nnodes=n001\nstarted=1795313500\nended=1795313509\ncode=0\n",
    "node-0-n001.log": LOG,
    "facts.json": FACTS,
    "counters/n001.before": COUNTERS.format(1),
    "counters/n001.after": COUNTERS.format(2),
}


def same(name: str, text: str) -> None:
    """Compare a screen with its golden file; GOLDEN=write writes it."""
    path = GOLDEN / name
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_the_end_of_a_test_on_one_node() -> None:
    run = run_folder.of_files("r", FILES)
    facts = load.read_facts_json(run.facts, "facts.json")
    found = assess.assess(run, facts, assess.read_rules(TEXTS, {"references.toml": SITE}, "here"))
    same("test-one-node.txt", "".join(f"{text}\n" for text, _ in summary.lines(found)))


def test_the_report_of_a_test_on_one_node(capsys: pytest.CaptureFixture[str]) -> None:
    """No line a NIC, times as times, the range beside the figure, the default where it is best."""
    report = load.made(run_folder.of_files("r", FILES), TEXTS, {"references.toml": SITE})
    terminal.show_report(Screen("report"), report)
    text = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    same("report-one-node.txt", f"{text}\n")
    page = page_of(report)
    assert '<p class="hint">No NIC traffic, as expected on one node.</p>' in page
    assert "mlx5_0" not in page
    assert "14.5 × slower" in page
    assert "(allowed up to 1818)" in page
    assert page.count("faster than its reference") <= 1
