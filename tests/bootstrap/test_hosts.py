"""Host recipes on hosts: one that hangs ends with its limit, and keeps nobody else's result back."""

from __future__ import annotations

import pytest

from deepep_bootstrap.bootstrap import hosts
from deepep_bootstrap.plan import host_recipes
from deepep_bootstrap.plan.steps import Reason, Step
from deepep_bootstrap.remote.fleet import ConnectionPool
from deepep_bootstrap.remote.host import Host

HANGS = 'if [[ "$HANG" == yes ]]; then echo "unpacking doca-all" >&2; sleep 60; fi\necho state=ok\n'


@pytest.mark.usefixtures("programs")
def test_a_recipe_that_hangs_is_a_failed_outcome_with_the_last_that_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Host("here", connection="local")
    recipes = {**dict.fromkeys(host_recipes.LIBRARIES, ""), "host/limits.sh": HANGS}
    transport = ConnectionPool([here])
    outcomes = []
    for hang, limit in (("yes", 0.5), ("no", hosts.LIMIT)):
        monkeypatch.setattr(hosts, "LIMIT", limit)
        step = Step("host", "limits", "memory limits", ("here",), Reason("", ""), {"HANG": hang})
        outcomes += [
            outcome
            for outcome, _ in hosts.apply_step(transport, [here], step, recipes, on_line=lambda host, line: None)
        ]
    transport.close()
    assert [(outcome.state, outcome.code, outcome.detail) for outcome in outcomes] == [
        ("failed", 1, "no end of the script after 0.5 s — found unpacking doca-all"),
        ("done", 0, ""),
    ]


def test_what_installs_gigabytes_or_compiles_has_the_longer_limit() -> None:
    assert set(host_recipes.TITLES) >= hosts.SLOW
    assert [hosts.limit(name) for name in ("doca-ofed", "limits", "build-deps")] == [
        hosts.SLOW_LIMIT,
        hosts.LIMIT,
        hosts.LIMIT,
    ]
