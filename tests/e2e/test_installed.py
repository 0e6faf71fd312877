"""The installed program: a wheel in an environment of its own bootstraps the embedded cluster, from a directory and an
account that know nothing of the source tree."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deepep_bootstrap.cli.verbs import VERBS
from deepep_bootstrap.lab import first_steps
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from tests.support.lab import LiveLab

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]

NOBODYS = 47110
"""The number of an account that owns nothing else on this machine."""

PYTHON = "/usr/bin/python3"
"""The distribution's own: the one that runs the tests may lie in a home that only its owner may enter."""

NETWORK = re.compile(r"(?i)_proxy$|^SSL_CERT_|^UV_(?!TOOL|CACHE)|_INDEX_URL$")
"""Variables that say how this machine reaches package indexes."""

COVERED = 'mount -t tmpfs none "$1" && shift && exec setpriv --reuid={0} --regid={0} --clear-groups "$@"'


@dataclass(frozen=True)
class Account:
    """An account that cannot read the source tree, with what it needs to reach the lab in its home."""

    home: Path

    def run(self, command: str, *, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command line in the account's home; the source tree is not there for it."""
        env = {
            "HOME": str(self.home),
            "USER": "visitor",
            "PATH": f"{self.home}/bin:{self.home}/.local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            **{name: value for name, value in os.environ.items() if NETWORK.search(name)},
        }
        done = subprocess.run(
            [*("unshare", "--mount", "sh", "-c", COVERED.format(NOBODYS), "sh", ROOT), "bash", "-euc", command],
            cwd=self.home,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def wheel(programs: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as anybody builds it, by way of a source archive."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture
def account(fresh_lab: LiveLab, wheel: Path) -> Iterator[Account]:
    """The account with the wheel, uv, and the lab's file to source."""
    first_steps.write_try_file(fresh_lab.lab)
    # Not below pytest's folder, which each run of pytest closes to other accounts again.
    home = Path(tempfile.mkdtemp(prefix="deepep-installed-"))
    for name in ("keys", "standin"):
        shutil.copytree(fresh_lab.dir / name, home / "lab" / name)
    for name in ("try.sh", "ssh_config", "known_hosts", "hosts.txt", "demo.lock.toml"):
        text = (fresh_lab.dir / name).read_text()
        (home / "lab" / name).write_text(text.replace(str(fresh_lab.dir), str(home / "lab")))
    (home / "bin").mkdir()
    for name in ("uv", "uvx"):
        shutil.copy(Path(sys.executable).with_name(name), home / "bin")
    shutil.copy(wheel, home)
    subprocess.run(["chown", "-R", f"{NOBODYS}:{NOBODYS}", home], check=True)
    yield Account(home)
    shutil.rmtree(home)


def test_a_wheel_bootstraps_from_nowhere(account: Account, fresh_lab: LiveLab, wheel: Path) -> None:
    account.run(f"! test -e {ROOT}/tasks.py && ! test -r {fresh_lab.dir}/keys/id")
    account.run(f"uv tool install --quiet --python {PYTHON} {wheel.name}")
    (tool,) = (account.home / ".local" / "share" / "uv" / "tools").glob("deepep-bootstrap")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    # It knows itself: version, help, completion, manual page; and that the lab is not in it.
    said = account.run("deepep-bootstrap --version")
    assert re.fullmatch(rf"deepep-bootstrap [0-9.]+ \({commit}\), lock v1 [0-9a-f]{{7}}, .*\n", said.stdout)
    assert said.stderr.startswith(f"lock: {tool}/lib/")
    assert "(packaged; no --lock, " in said.stderr
    assert account.run(f"uvx --python {PYTHON} --from ./{wheel.name} deepep-bootstrap --version").stdout == said.stdout
    listed = account.run("deepep-bootstrap").stdout
    assert [name for name in VERBS if f"\n  {name} " not in listed] == []
    page = Path(re.findall(r"^More: (.*)", account.run("deepep-bootstrap plan --help").stdout, re.MULTILINE)[0])
    assert page.is_file()
    assert page.is_relative_to(tool)
    completed = account.run(
        "source <(deepep-bootstrap completion bash); COMP_LINE='deepep-bootstrap rollb'; COMP_POINT=${#COMP_LINE}; "
        '_deepep_bootstrap; echo "${COMPREPLY[@]}"'
    )
    assert completed.stdout == "rollback\n"
    manual = account.run(f"MANPATH={tool}/share/man man -P cat deepep-bootstrap").stdout
    assert "DEEPEP_HOSTS" in manual
    assert "deepep-bootstrap rollback 3" in manual
    refused = account.run("deepep-bootstrap lab up", code=1).stderr
    assert refused.startswith("lab: the embedded cluster comes with the source tree — found an installed program")
    assert "is not rewritten" in account.run("deepep-bootstrap lock --update=nvshmem", code=1).stderr
    # The lab's file says where hosts, lock and mirrors are.
    before = account.run(". lab/try.sh; deepep-bootstrap status").stdout
    assert "nothing is offered yet: `deepep-bootstrap bootstrap` builds" in before, "commands are those of this program"
    done = account.run(". lab/try.sh; deepep-bootstrap bootstrap --yes")
    lab = f"{account.home}/lab"
    assert f"hosts: {lab}/hosts.txt (DEEPEP_HOSTS)\nlock: {lab}/demo.lock.toml (DEEPEP_LOCK)\n" in done.stderr
    assert not re.search(r"\binvoke (plan|test|status|bootstrap|verify)\b", done.stdout)
    loaded = fresh_lab.ssh(
        "login1",
        'bash -lc "module load deepep && echo $LOADEDMODULES" 2>&1; bash -lc "module load deepep; which python"',
    )
    assert "/shared/deepep/store/" in loaded.stdout, loaded.stdout + loaded.stderr
    status = account.run(". lab/try.sh; deepep-bootstrap status --json")
    assert status.stderr == ""
    assert json.loads(status.stdout)["manifest"]["generation"] == 1
    again = account.run(". lab/try.sh; deepep-bootstrap bootstrap --yes")
    assert "Nothing to do" in again.stdout
    # What was seen of the prefix is completed, though nothing of it is on this machine.
    account.run(". lab/try.sh; deepep-bootstrap generations")
    assert account.run(". lab/try.sh; deepep-bootstrap --complete rollback ''").stdout == "1\t\n"
