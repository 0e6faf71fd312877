"""What is shipped, and the lock of the stand-ins, read once: some thousand tests begin with it."""

from __future__ import annotations

import functools

from deepep_bootstrap.inventory.survey import read_tree
from deepep_bootstrap.lock.model import Lock, read_lock_file
from tests.support.paths import ROOT


@functools.cache
def shipped_lock() -> Lock:
    """Return the lock that is shipped."""
    return read_lock_file(ROOT / "deepep.lock.toml")


@functools.cache
def demo_lock() -> Lock:
    """Return the lock of the stand-ins."""
    return read_lock_file(ROOT / "tests" / "upstreams" / "demo.lock.toml")


@functools.cache
def _tree(name: str) -> dict[str, str]:
    return read_tree(ROOT / name)


def shipped_recipes() -> dict[str, str]:
    """Return the texts of recipes/ by path."""
    return dict(_tree("recipes"))


def shipped_env() -> dict[str, str]:
    """Return the texts of env/ by path."""
    return dict(_tree("env"))
