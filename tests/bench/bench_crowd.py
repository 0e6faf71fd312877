"""Whole verbs on a thousand recorded hosts that nobody has to reach: CPU of deciding and telling, and lines told.

python tests/bench/bench_crowd.py [N] [VERB …]
"""

from __future__ import annotations

import contextlib
import cProfile
import io
import pstats
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from deepep_bootstrap.cli.app import collect_less_often
from deepep_bootstrap.cli.commands.doctor import doctor
from deepep_bootstrap.cli.commands.facts import facts
from deepep_bootstrap.cli.commands.plan import plan
from deepep_bootstrap.cli.commands.report import report
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.remote import fleet
from tests.support import crowd
from tests.support.paths import ROOT

VERBS = {"facts": facts, "plan": plan, "doctor": doctor, "report": lambda flags: report(flags, cluster=True)}


def main(count: int, names: list[str]) -> None:
    fleet.ConnectionPool = crowd.Crowd  # type: ignore[misc,assignment]
    collect_less_often()
    with tempfile.TemporaryDirectory() as folder:
        flags = Flags(root=ROOT, hosts=str(crowd.hosts_file(Path(folder), count)))
        for number in range(1, count + 1):
            crowd.facts_of(number)
        for name in names or VERBS:
            out, profile = io.StringIO(), cProfile.Profile()
            before = time.process_time()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                if "--profile" in sys.argv:
                    profile.runcall(VERBS[name], flags)
                else:
                    VERBS[name](flags)
            taken = time.process_time() - before
            lines = out.getvalue().splitlines()
            longest = max(map(len, lines), default=0)
            print(f"{name:8} {taken:6.2f} s of CPU, {len(lines):5} lines, the longest of {longest} characters")
            if "--show" in sys.argv:
                print(out.getvalue())
            if "--profile" in sys.argv:
                pstats.Stats(profile).sort_stats("cumulative").print_stats(35)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    main(int(words[0]) if words else crowd.COUNT, words[1:])
