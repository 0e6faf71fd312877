"""A GPU node that was taken over answers what its attacker wants: nothing of it runs on another node or on this machine.

One cluster for all cases; n001 is the hostile host, and the first of the run. Each case puts one tool or file of n001 in
the attacker's place and takes it away again.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.e2e import LOCK, PREFIX, Engine
from tests.support.repos import Package, make_apt_repository

if TYPE_CHECKING:
    from tests.support.lab import LiveLab

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = pytest.mark.e2e

OTHERS = ("n002", "login1")
"""Hosts that nobody has taken over."""
MARK = "PWNED-by-n001"
"""A file of this name, in /var or /tmp of whatever machine, says that something of the attacker ran there."""
DRIVER = "nvidia-open-580"
VERSION = "580.95.05-1"

ROW = """nvidia-driver = ["{driver}"]

[system.{name}.repository.driver]
url = "{made.url}"
suite = "./"
key_url = "{made.key_url}"
key_fingerprint = "{made.fingerprint}"
purposes = ["nvidia-driver"]
"""

APT_CACHE = f"""#!/bin/bash
[[ "$1" == policy ]] || exec "$0.real" "$@"
cat <<'ANSWER'
{DRIVER}:
  Installed: (none)
  Candidate: {VERSION} -oDPkg::Pre-Invoke::=id>/var/{MARK};uname${{IFS}}-n>>/var/{MARK}
ANSWER
"""

SCONTROL = """#!/bin/bash
[[ "$1 $2" != "show aliases" ]] || { echo n002; exit 0; }
exec "$0.real" "$@"
"""

SED = """#!/bin/bash
[[ "$*" != *slurmd_memlock* ]] || echo gib=/home/mallory/gib/scripts/set_nccl_env.sh
exec "$0.real" "$@"
"""


@pytest.fixture(scope="module")
def engine(
    lab: LiveLab, standin_sources: Path, built_entries: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """A cluster whose nodes have no driver yet, and a lock that names its package without a version, as the real one
    does."""
    lab.reset()
    for host in ("n001", "n002"):
        lab.fake(host, "no_driver", "1")
    lab.reboot("n001", "n002")
    folder = tmp_path_factory.mktemp("hostile")
    engine = Engine(lab, standin_sources, folder / "demo.lock.toml", built_entries)
    made = make_apt_repository(lab.shared / "apt", [Package(DRIVER, VERSION)], seen_as="/shared/apt")
    release = platform.freedesktop_os_release()
    names = {f"{release['ID']}-{release['VERSION_ID'].replace('.', '_')}", f"{release['ID']}-{release['VERSION_ID']}"}
    text = LOCK.read_text()
    name = next(name for name in re.findall(r"^\[system\.([\w-]+)\]$", text, re.MULTILINE) if name in names)
    before, after = text.split(f'[system.{name}]\nmanager = "apt"\n')
    line, rest = after.split("\n", 1)
    row = ROW.format(driver=DRIVER, name=name, made=made)
    engine.lock.write_text(f'{before}[system.{name}]\nmanager = "apt"\n{line}\n{row}\n{rest}')
    engine.use_built()
    yield engine
    lab.on_login("scontrol update nodename=n[001-002] state=resume || true")  # refused for nodes that are in use
    for host in ("n001", "n002"):
        lab.fake(host, "no_driver", None)


@contextmanager
def replaced(lab: LiveLab, tool: str, text: str) -> Iterator[None]:
    """Put `text` in the place of a tool of n001, which is beside it as TOOL.real."""
    lab.nsenter("n001", f"mv {tool} {tool}.real")
    lab.nsenter("n001", f"cat >{tool} <<'END_OF_TOOL'\n{text}END_OF_TOOL\nchmod 755 {tool}")
    try:
        yield
    finally:
        lab.nsenter("n001", f"mv {tool}.real {tool}")


@contextmanager
def manifest_of_n001(lab: LiveLab, **changes: Any) -> Iterator[None]:
    """Let n001 see another manifest than the others: that of the stack v1 with `changes`."""
    real = next((lab.shared / "deepep" / "generations").glob("*/manifest.json"))
    manifest = json.loads(real.read_text())
    manifest["offer"]["stacks"]["v1"] |= changes
    inside = f"{PREFIX}/generations/{real.parent.name}/manifest.json"
    lab.nsenter("n001", f"cat >/root/evil.json <<'END_OF_FILE'\n{json.dumps(manifest)}\nEND_OF_FILE")
    assert lab.nsenter("n001", f"mount --bind /root/evil.json {inside}").returncode == 0
    try:
        yield
    finally:
        lab.nsenter("n001", f"umount {inside}")


def assert_untouched(lab: LiveLab) -> None:
    """Nothing of the attacker ran on the other hosts or here."""
    for host in OTHERS:
        found = lab.nsenter(host, f"ls -l /var/{MARK} /tmp/{MARK} 2>/dev/null; true").stdout
        assert found == "", f"{host}: {found}"
    assert not Path("/var", MARK).exists()
    assert not Path("/tmp", MARK).exists()


def test_words_behind_a_candidate_reach_no_other_host(engine: Engine) -> None:
    lab, boot = engine.lab, engine.lab.boot_id("n001")
    with replaced(lab, "/usr/bin/apt-cache", APT_CACHE):
        planned = engine.run("plan")
        ended = engine.run("bootstrap", "--reboot=all", "--boot-timeout=60s", "--yes")
    assert_untouched(lab)
    refusal = r"n001: .*candidate.* found .*Pre-Invoke.* wanted packages"
    assert re.search(refusal, planned.text), planned.text
    assert re.search(refusal, ended.text), ended.text
    assert ended.code == 1
    assert lab.boot_id("n001") == boot
    # The other node got the driver all the same.
    assert VERSION in lab.nsenter("n002", f"dpkg-query -W {DRIVER}").stdout, ended.text
    assert lab.nsenter("n001", f"dpkg-query -W {DRIVER}").returncode != 0


@pytest.fixture(scope="module")
def ready(engine: Engine) -> Engine:
    """The cluster with driver and offer, made after n001 was mended."""
    ended = engine.run("bootstrap", "--reboot=rolling", "--yes")
    assert ended.code == 0, ended.text
    return engine


def test_a_manifest_that_one_host_alone_sees_decides_nothing(ready: Engine) -> None:
    lab = ready.lab
    program = "/var/tmp/evil-python"
    lab.nsenter("n002", f"printf '#!/bin/sh\\n(id; uname -n) >/tmp/{MARK}\\n' >{program}; chmod 755 {program}")
    with manifest_of_n001(lab, external_python=program, python=""):
        ended = ready.run("verify")
    assert_untouched(lab)
    assert ended.code == 1, ended.text
    assert re.search(r"manifest.*differ", ended.text), ended.text
    assert "n001" in ended.err
    assert re.search(r"login1,n002|n002,login1", ended.err), ended.text

    # A prefix of an ordinary user, with a script of that user below it.
    home = lab.shared / "home-mallory"
    (home / "sbatch" / "v1").mkdir(parents=True)
    script = home / "sbatch" / "v1" / "smoke-test.sbatch"
    script.write_text(f"#!/bin/bash\n(id; uname -n) >/tmp/{MARK}\n")
    script.chmod(0o755)
    try:
        with manifest_of_n001(lab, prefix="/shared/home-mallory"):
            ended = ready.run("test", "--kind=smoke")
    finally:
        shutil.rmtree(home)
    assert_untouched(lab)
    assert ended.code == 1, ended.text
    assert re.search(r"manifest.*differ", ended.text), ended.text
    # Where all see the same again, all is well.
    assert ready.run("verify").code == 0


def test_a_host_that_names_the_node_of_another_is_refused(ready: Engine) -> None:
    lab = ready.lab
    lab.bare("n001")
    boots = {host: lab.boot_id(host) for host in ("n001", "n002")}
    with replaced(lab, "/usr/bin/scontrol", SCONTROL):
        ended = ready.run("bootstrap", "--limit=n001", "--reboot=rolling", "--yes", "--boot-timeout=30s")
        both = ready.run("bootstrap", "--limit=n001,n002", "--reboot=rolling", "--yes", "--boot-timeout=30s")
    assert {host: lab.boot_id(host) for host in boots} == boots
    assert lab.reason("n002") == ""
    assert lab.node("n002").state.startswith("IDLE")
    for run in (ended, both):
        assert run.code == 1, run.text
        assert re.search(r"n001: .*n002", run.text), run.text
        assert "another host" in run.text, run.text


def test_a_line_that_no_value_may_have_is_told_and_its_host_left_out(ready: Engine) -> None:
    with replaced(ready.lab, "/usr/bin/sed", SED):
        ended = ready.run("plan")
    assert ended.code == 1, ended.text
    assert re.search(
        r"n001: .*gib.* found .*/home/mallory/gib.* wanted /usr/local/gib/scripts/set_nccl_env.sh", ended.text
    ), ended.text
