"""Guards for every test: no home directory of the developer, no mirrors from the environment, bounded waiting only by the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

REAL_HOME = Path.home()


@pytest.fixture(autouse=True, scope="session")
def private_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give the whole run a home of its own, so that no test reads or writes the developer's files."""
    home = tmp_path_factory.mktemp("home")
    patch = pytest.MonkeyPatch()
    # Downloads are verified by hash; sharing pip's own cache only saves the network.
    patch.setenv("PIP_CACHE_DIR", os.environ.get("PIP_CACHE_DIR") or str(REAL_HOME / ".cache" / "pip"))
    patch.setenv("HOME", str(home))
    for name in (
        "XDG_STATE_HOME",
        "XDG_CACHE_HOME",
        "XDG_CONFIG_HOME",
        "DEEPEP_MIRRORS",
        "DEEPEP_SSH_CONFIG",
        "SSH_AUTH_SOCK",
        "MODULEPATH",
    ):
        patch.delenv(name, raising=False)
    patch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    yield home
    patch.undo()
