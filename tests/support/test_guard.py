"""The guards of conftest.py hold."""

from __future__ import annotations

import os
from pathlib import Path

from tests.conftest import REAL_HOME


def test_home_is_not_the_developers(private_home: Path) -> None:
    assert Path.home() == private_home
    assert Path(os.path.expanduser("~/.ssh")) != REAL_HOME / ".ssh"
    assert not list(private_home.glob(".ssh/*"))
