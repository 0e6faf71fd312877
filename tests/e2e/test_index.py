"""Wheels come from whichever machine reaches the index: a real index on the lab's bridge that answers some machines
only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.e2e import Engine
from tests.support.index import serve

pytest_plugins = ["tests.support.lab", "tests.support.e2e", "tests.support.index"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]


def bootstrap(engine: Engine, url: str) -> tuple[int, str]:
    ended = engine.run("bootstrap", f"--mirror=index:pypi={url}", f"--mirror=index:standin={url}")
    return ended.code, ended.text


@pytest.mark.parametrize("who", ["the build host", "the control machine", "nobody"])
def test_the_machine_that_reaches_the_index_gets_the_wheels(
    engine: Engine, wheel_folder: Path, tmp_path: Path, who: str
) -> None:
    engine.env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    engine.wheels_from_folder = False
    control = f"{engine.lab.lab.subnet}.1"
    welcome = {"the build host": {engine.lab.hosts["n001"]}, "the control machine": {control}, "nobody": set()}[who]
    if welcome:
        engine.use_built(without="python")
    with serve(wheel_folder, control, welcome) as url:
        code, text = bootstrap(engine, url)
    if who == "nobody":
        assert code == 1
        assert "n001: does not reach the index either" in text
        assert [name for name in engine.store() if not name.startswith(".")] == []
        return
    assert code == 0, text
    assert ("the build host gets the wheels itself" in text) == (who == "the build host")
    cached = {path.name.split("-")[0] for path in (tmp_path / "cache").rglob("*.whl")}
    assert ("numpy" in cached) == (who == "the control machine")
