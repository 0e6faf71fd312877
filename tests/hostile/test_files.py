"""A hostile user of the hosts: folders and files made beforehand, or changed, where others look for their own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepep_bootstrap.prefix import modulefiles
from tests.support import module_systems
from tests.support import modules as support

pytest_plugins = ["tests.support.lab"]
pytestmark = pytest.mark.usefixtures("namespaces")

SYSTEMS = ("lmod", "environment-modules", "")
MALLORY = "nobody"
"""Who attacks; the user of the module is root, the worst case."""


class Machine:
    """A prefix with DeepEP V2, outside /tmp, and sessions in which /tmp, /var/tmp and /dev/shm are new and empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.chmod(0o755)
        self.record = support.v2_record(str(path))
        files = modulefiles.render_offer(support.offer(str(path), self.record), support.templates())
        support.write(path / "generations/1", files)
        (path / "current").symlink_to("generations/1")
        (path / "modulefiles").symlink_to("current/modulefiles")
        (path / "session").mkdir()

    def load(self, system: str, before: str = "", after: str = "") -> module_systems.Session:
        """Load the module, or read env.sh, after `before`; the environment is saved as `loaded`."""
        script = "for folder in /tmp /var/tmp /dev/shm; do mount -t tmpfs -o mode=1777 tmpfs $folder; done\n"
        script += f"{before}\n"
        use = f"module use {self.path}/modulefiles; module load deepep" if system else f". {self.path}/current/env.sh"
        script += f"{use} || echo refused\nsnapshot loaded\n{after}\n"
        return module_systems.run(script, self.path / "session", system=system)


@pytest.fixture
def machine(programs: None) -> Iterator[Machine]:
    path = Path(tempfile.mkdtemp(prefix="deepep-hostile-", dir="/run"))
    yield Machine(path)
    shutil.rmtree(path)


PLANTED = f"""
as() {{ runuser -u {MALLORY} -- "$@"; }}
digest=$1
as mkdir -m 777 /tmp/deepep-jit-0-$digest /tmp/deepep-0.0000000000 /tmp/deepep-0.AAAAAAAAAA
as mkdir -m 700 /tmp/deepep-0.BBBBBBBBBB
as mkdir -p /tmp/deepep-0.CCCCCCCCCC/jit-$digest /tmp/mine/jit-$digest
as touch /tmp/mine/jit-$digest/planted.so /tmp/deepep-jit-0-$digest/planted.so /tmp/deepep-0.DDDDDDDDDD
as ln -s /tmp/mine /tmp/deepep-0.EEEEEEEEEE
as ln -s /root /tmp/deepep-0.FFFFFFFFFF
mkdir -m 755 /tmp/deepep-0.GGGGGGGGGG   # root's own, but open to others
"""
WITNESS = """
echo "owner $(stat -c '%u %a %F' -- "$EP_JIT_CACHE_DIR")"
echo "above $(stat -c '%u %a %F' -- "${EP_JIT_CACHE_DIR%/*}")"
echo "holds $(ls -A -- "$EP_JIT_CACHE_DIR")."
"""


@pytest.mark.parametrize("system", SYSTEMS)
def test_compiled_kernels_go_to_no_folder_that_somebody_else_made(machine: Machine, system: str) -> None:
    digest = machine.record.deepep[:12]
    planted = PLANTED.replace("$1", digest)
    again = machine.load(system, planted, WITNESS + "first=$EP_JIT_CACHE_DIR\n" + reload(machine, system))
    found = again.environments["loaded"]["EP_JIT_CACHE_DIR"]
    assert again.out.splitlines()[:3] == ["owner 0 700 directory", "above 0 700 directory", "holds ."], again.err
    assert found.startswith("/tmp/deepep-0.")
    assert found.rpartition("/")[2] == f"jit-{digest}"
    assert again.out.splitlines()[3:] == ["the same folder"], "jobs of one user share it"


def reload(machine: Machine, system: str) -> str:
    """Return what loads once more and says whether the same folder comes out."""
    more = "module purge; module load deepep" if system else f". {machine.path}/current/env.sh"
    return f'{more}; [ "$EP_JIT_CACHE_DIR" = "$first" ] && echo "the same folder"'


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(
    "before",
    [
        pytest.param("chmod 777 /tmp", id="others may rename what is there"),
        pytest.param(f"chown {MALLORY} /tmp", id="it belongs to somebody else"),
        pytest.param("mount -o remount,ro /tmp", id="read-only"),
    ],
)
def test_a_place_that_is_not_safe_is_passed_over(machine: Machine, system: str, before: str) -> None:
    loaded = machine.load(system, before, WITNESS)
    assert loaded.environments["loaded"]["EP_JIT_CACHE_DIR"].startswith("/var/tmp/deepep-0."), loaded.err
    assert loaded.out.splitlines()[0] == "owner 0 700 directory"


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_network_filesystem_is_passed_over(machine: Machine, system: str) -> None:
    # No network filesystem can be had here: stat says of /tmp what it says of NFS.
    fake = f"""
mkdir {machine.path}/bin
cat >{machine.path}/bin/stat <<'END'
#!/bin/sh
case "$*" in *"/tmp/"*) case "$*" in *"/var/"*) ;; *) echo 6969; exit ;; esac ;; esac
exec /usr/bin/stat "$@"
END
chmod 755 {machine.path}/bin/stat
export PATH={machine.path}/bin:$PATH
"""
    loaded = machine.load(system, fake)
    assert loaded.environments["loaded"]["EP_JIT_CACHE_DIR"].startswith("/var/tmp/deepep-0."), loaded.err


@pytest.mark.parametrize("system", SYSTEMS)
def test_without_any_place_the_module_is_not_loaded(machine: Machine, system: str) -> None:
    loaded = machine.load(system, "chmod 777 /tmp /var/tmp /dev/shm")
    assert "refused" in loaded.out
    assert f"no folder on {os.uname().nodename} for what DeepEP compiles" in loaded.err
    assert "EP_JIT_CACHE_DIR" not in loaded.environments["loaded"]
    if system:
        assert "DEEPEP_STACK" not in loaded.environments["loaded"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_site_names_another_place(machine: Machine, system: str) -> None:
    place = "mkdir -m 700 /dev/shm/fast; export DEEPEP_CACHE_BASE=/dev/shm/fast"
    loaded = machine.load(system, place)
    assert loaded.environments["loaded"]["EP_JIT_CACHE_DIR"].startswith("/dev/shm/fast/deepep-0."), loaded.err
    place = "mkdir -m 777 /dev/shm/fast; export DEEPEP_CACHE_BASE=/dev/shm/fast"
    loaded = machine.load(system, place)
    assert loaded.environments["loaded"]["EP_JIT_CACHE_DIR"].startswith("/tmp/deepep-0."), loaded.err
    assert "nothing can be kept in DEEPEP_CACHE_BASE=/dev/shm/fast" in loaded.err
