"""Two prefixes on one set of hosts live and die in any order, and neither loses its users by what is done to the other."""

from __future__ import annotations

import random

import pytest

from tests.e2e.test_consent import HOSTS, loads, other, skipping
from tests.support.e2e import Engine

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]

STEPS = 7
ACTIONS = ("bootstrap", "beside", "take over", "remove")


class Cluster:
    """Two prefixes of one lab, and what is known of them: which of them are offered, and which one the hook names."""

    def __init__(self, engine: Engine) -> None:
        engine.use_built()
        self.prefixes = {"first": engine, "second": other(engine)}
        self.offered: set[str] = set()

    def hook(self) -> str:
        """Return the name of the prefix that `module load deepep` gives on all hosts, "" for none."""
        found = {loads(self.prefixes["first"], host) for host in HOSTS}
        assert len(found) == 1, f"hosts differ: {found}"
        place = found.pop()
        return next((name for name, engine in self.prefixes.items() if engine.prefix == place), "")

    def act(self, action: str, name: str, hook: str) -> None:
        """Do something to one prefix; `hook` is the prefix that users got before."""
        engine = self.prefixes[name]
        if action == "remove":
            assert engine.run("remove", "--yes").code == (0 if name in self.offered else 1)
            self.offered.discard(name)
            return
        flags = {"bootstrap": [], "beside": ["--skip=smoke,module-hook"], "take over": ["--take-over"]}[action]
        ended = (skipping(engine) if action == "beside" else engine).run("bootstrap", *flags)
        refused = action == "bootstrap" and hook not in {"", name}
        assert ended.code == (1 if refused else 0), ended.text
        if not refused:
            self.offered.add(name)

    def check(self, action: str, name: str, before: str) -> str:
        """Check that nobody lost what they had; return the prefix that users get now."""
        now = self.hook()
        taken = action == "take over" or (action == "bootstrap" and before in {"", name})
        meant = name if taken else before
        if action == "remove" and before == name:
            assert now != name
        else:
            assert now == meant
        for each in self.offered:
            assert loads(self.prefixes[each], "n002", self.prefixes[each].prefix) == self.prefixes[each].prefix
        return now


@pytest.mark.parametrize("seed", [1, 2])
def test_in_any_order(engine: Engine, seed: int) -> None:
    chance = random.Random(seed)
    cluster = Cluster(engine)
    hook = ""
    for _ in range(STEPS):
        action, name = chance.choice(ACTIONS), chance.choice(sorted(cluster.prefixes))
        if action == "remove" and name not in cluster.offered:
            action = "take over"
        cluster.act(action, name, hook)
        hook = cluster.check(action, name, hook)
    for name in sorted(cluster.offered):
        cluster.act("remove", name, hook)
        hook = cluster.check("remove", name, hook)
    disk = engine.lab.disk("n001")
    assert hook == ""
    assert not (disk / "etc/profile.d/zz-deepep.sh").exists()
    assert not (disk / "etc/security/limits.d/deepep.conf").exists()
