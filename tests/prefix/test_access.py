"""The way to a prefix through one host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.prefix.access import HERE, _unreachable
from deepep_bootstrap.remote.fleet import ConnectionPool, Options
from deepep_bootstrap.remote.host import Host

pytestmark = pytest.mark.usefixtures("programs")


def test_who_watches_hears_of_the_host_that_is_tried() -> None:
    heard: list[object] = []

    @contextmanager
    def watch(hosts: Sequence[str]) -> Iterator[Callable[[str], None]]:
        heard.append(tuple(hosts))
        yield heard.append

    fleet = ConnectionPool((), Options(ssh_config="", watch=watch))
    assert _unreachable(fleet, HERE) is None
    gone = Host("no-such-host.invalid")
    assert isinstance(_unreachable(fleet, gone), Trouble)
    assert heard == [(HERE.name,), HERE.name, (gone.name,), gone.name]
    fleet.close()
