"""Reports of the recorded runs in tests/cases/runs, as they are or changed, alone or after earlier runs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

from deepep_bootstrap.inventory.survey import read_tree
from deepep_bootstrap.report import html, load
from deepep_bootstrap.report.model import Past, Report
from deepep_bootstrap.testing import run_folder
from tests.support.paths import ROOT

RUNS = ROOT / "tests" / "cases" / "report" / "runs"
TEXTS = read_tree(ROOT / "env")
NOW = 1795400000.0


def files_of(name: str) -> dict[str, str]:
    return run_folder.of_folder(RUNS / name)


def report_of(
    name: str, *, edit: Callable[[dict[str, str]], None] | None = None, past: tuple[Past, ...] = ()
) -> Report:
    """Return the report of a recorded run, its files changed by `edit` first."""
    if edit is None and not past:
        return _plain(name)
    files = files_of(name)
    if edit:
        edit(files)
    return load.made(run_folder.of_files(name, files), TEXTS, {}, past=past)


@cache
def _plain(name: str) -> Report:
    return load.made(run_folder.of_files(name, files_of(name)), TEXTS, {})


def page_of(report: Report) -> str:
    return html.render_html(report, NOW)


def make_history(folder: Path, name: str, factors: tuple[float, ...]) -> Path:
    """Write earlier runs of a recorded one, each with its GB/s times a factor, and the run itself; return its
    folder."""
    for number, factor in enumerate(factors):
        target = folder / f"{name}-{number}"
        shutil.copytree(RUNS / name, target)
        for log in target.glob("*.log"):
            text = log.read_text()
            log.write_text(
                re.sub(r"([\d.]+)( GB/s)", lambda match, by=factor: f"{float(match[1]) * by:.2f}{match[2]}", text)
            )
        env = target / "run.env"
        started = 1794000000 + number * 86400
        env.write_text(re.sub(r"started=\d+", f"started={started}", env.read_text()))
    shutil.copytree(RUNS / name, folder / name)
    return folder / name
