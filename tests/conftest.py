"""Guards for every test: a home of its own, no mirrors from the environment, signals as they were, no processes outside
`system` tests; failures told at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

if sys.version_info < (3, 11):
    pytest.exit(f"the tests need Python 3.11, as Debian 12 and Ubuntu 24.04 have; this is {sys.version.split()[0]}", 2)

REAL_HOME = Path.home()

# Before anything imports them: what they assert is then told with its values, as in tests.
pytest.register_assert_rewrite("tests.support")

from tests.support import classes, faults, order
from tests.support.examples import PATIENT, QUICK

# A busy machine is no failure.
hypothesis.settings.register_profile("patient", deadline=None, max_examples=PATIENT)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=QUICK)  # what `make quick` takes
hypothesis.settings.load_profile("patient")

GUARD = classes.Guard()


@pytest.fixture(scope="session")
def programs() -> None:
    """Ask for this to start processes or open sockets: it makes a test `system`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that ask for `programs` and those of tests/hostile, before -m chooses; files that take longest
    come first."""
    for item in items:
        if classes.is_system(item):
            item.add_marker("system")
        if item.nodeid.startswith(faults.FOLDER):
            item.add_marker("hostile")
    items[:] = order.longest_first(items, order.read_durations(), classes.is_system)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write tests/support/durations.toml anew")
    parser.addoption("--fault-table", metavar="FILE", help="write the table of faults of tests/hostile into this file")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if config.getoption("record_durations"):
        config.pluginmanager.register(order.Recorder())
    if table := config.getoption("fault_table"):
        config.pluginmanager.register(faults.FaultTable(Path(table)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Set a test up under the guard. Teardown is free: it also ends what earlier tests shared."""
    yield from _guarded(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run a test under the guard."""
    yield from _guarded(item)


def _guarded(item: pytest.Item) -> Iterator[None]:
    if classes.is_system(item):
        yield
        return
    GUARD.start()
    try:
        yield
    finally:
        GUARD.stop()
    GUARD.check()


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
        "DEEPEP_HOSTS",
        "DEEPEP_LOCK",
        "DEEPEP_MIRRORS",
        "DEEPEP_PREFIX",
        "DEEPEP_SSH_CONFIG",
        "SSH_AUTH_SOCK",
        "MODULEPATH",
    ):
        patch.delenv(name, raising=False)
    patch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    # A job in the background of a script starts with ^C ignored, and one of nohup without SIGHUP: both would be handed down
    # to every program under test, and a shell cannot take back what it started with.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield home
    patch.undo()


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Put signal handlers back after every test: the command line replaces that of ^C, and a later test presses ^C in
    the same process."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
    saved = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in saved.items():
        signal.signal(number, handler)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell a failure when it happens, where workers report to: a run that is cut off has said by then what failed."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(
            f"\n{report.nodeid} ({report.when}) failed after {report.duration:.0f} s:\n{report.longreprtext}",
            flush=True,
        )
