"""Recipes that install packages, with the real apt, dpkg, dnf and rpm, from repositories made and signed here, on a
root of their own."""

from __future__ import annotations

import http.server
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.repos import Package, Repository, Signer, make_apt_repository, make_dnf_repository, signer, spoil

pytestmark = pytest.mark.usefixtures("programs")

RECIPES = ROOT / "recipes"
LIBRARY = ("lib.sh", "host/lib/files.sh", "host/lib/packages.sh", "host/lib/repositories.sh", "host/lib/keys.sh")
NAMES = ("cuda-toolkit", "doca-ofed", "nvidia-driver", "python", "build-deps")
KERNEL = os.uname().release
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# A root over this machine's, in a mount namespace that lives as long as its first process: no package sources but those
# of the test, and a /sys of its own.
ROOT = r"""
set -eu
below=$1 shared=$2
mount -t tmpfs tmpfs "$below"
mkdir "$below/upper" "$below/work" "$below/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$below/upper,workdir=$below/work" "$below/root"
for folder in proc dev; do mount --rbind "/$folder" "$below/root/$folder"; done
mkdir -p "$below/root$shared"
mount --bind "$shared" "$below/root$shared"
cd "$below/root"
printf '#!/bin/sh\nexit 101\n' >usr/sbin/policy-rc.d
chmod 755 usr/sbin/policy-rc.d
rm -rf etc/apt/sources.list etc/apt/sources.list.d/* var/lib/apt/lists/* etc/yum.repos.d usr/local/cuda* var/lib/deepep-bootstrap
# After each package mandb would index all manuals of this machine, for seconds.
rm -f var/lib/man-db/auto-update
sed -i 's/^enabled.*/enabled=false/' etc/dnf/plugins/local.conf
echo ready
exec sleep 600
"""


@dataclass(frozen=True)
class Machine:
    """A root to install into; `shared` is a folder of the test that is there too."""

    pid: int
    root: str
    shared: Path

    def sh(
        self, script: str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run bash text as root of this machine."""
        inside = [
            "nsenter",
            "-m",
            "-t",
            str(self.pid),
            "chroot",
            self.root,
            "/usr/bin/env",
            "-i",
            "HOME=/root",
            f"PATH={PATH}",
        ]
        given = [f"{name}={value}" for name, value in (env or {}).items()]
        command = [*inside, *given, "bash", "-uc", script, "bash", *arguments]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)

    def out(self, script: str) -> str:
        """Return what bash text prints; it must end well."""
        done = self.sh(f"set -e; {script}")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def recipe(self, name: str, verb: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a recipe."""
        return self.sh('bash "$1" "$2"', str(self.shared / name), verb, env=env)

    def says(self, name: str, verb: str, env: Mapping[str, str]) -> dict[str, str]:
        """Return the data lines of a recipe, which must end well."""
        done = self.recipe(name, verb, env)
        assert done.returncode == 0, done.stderr
        return dict(line.split("=", 1) for line in done.stdout.splitlines())

    def refuses(self, name: str, env: Mapping[str, str]) -> str:
        """Apply a recipe that must end with one error line; return all it said."""
        done = self.recipe(name, "apply", env)
        assert (done.returncode, done.stdout) == (1, ""), done.stdout + done.stderr
        return done.stderr

    @property
    def written(self) -> str:
        """What belongs to this program in the root, with times."""
        return self.out(
            "find /etc /var/lib/deepep-bootstrap -name '*deepep*' -printf '%p %T@ %i\\n' 2>/dev/null | sort"
        )


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    if os.geteuid() != 0:
        pytest.skip("needs root for a root of its own (make test uses sudo)")
    below = tmp_path / "below"
    below.mkdir()
    # apt reads packages as a user of its own, who may not pass through pytest's folders.
    shared = Path(tempfile.mkdtemp(prefix="shared"))
    shared.chmod(0o755)
    for name in NAMES:
        parts = [(RECIPES / part).read_text(encoding="utf-8") for part in (*LIBRARY, f"host/{name}.sh")]
        (shared / name).write_text("\n".join(parts), encoding="utf-8")
    command = ["unshare", "-m", "bash", "-c", ROOT, "bash", str(below), str(shared)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "ready\n"
        yield Machine(holder.pid, f"{below}/root", shared)
        holder.kill()
    shutil.rmtree(shared)


@pytest.fixture(scope="module")
def key() -> Iterator[Signer]:
    with signer() as made:
        yield made


def nvcc(version: str) -> str:
    return f"#!/bin/sh\necho 'Cuda compilation tools, release {version[:4]}, V{version}'\n"


def toolkit(version: str) -> Package:
    """A toolkit as NVIDIA packages it: its installation moves /usr/local/cuda."""
    minor = version[:4]
    link = f"update-alternatives --install /usr/local/cuda cuda /usr/local/cuda-{minor} {minor.replace('.', '')}"
    return Package(
        f"cuda-toolkit-{minor.replace('.', '-')}",
        f"{version}-1",
        {f"/usr/local/cuda-{minor}/bin/nvcc": nvcc(version)},
        link,
    )


def apt(repository: Repository, packages: str, **more: str) -> dict[str, str]:
    return {"MANAGER": "apt", "PACKAGES": packages, "REPOSITORIES": repository.line("cuda"), "CUDA_MAJOR": "12", **more}


@pytest.fixture
def cuda(machine: Machine, key: Signer) -> dict[str, str]:
    """The inputs of cuda-toolkit, with a repository that holds two versions of it."""
    repository = make_apt_repository(
        machine.shared / "cuda", [toolkit("12.9.1"), toolkit("12.9.2"), toolkit("13.0.2")], key
    )
    return apt(repository, "cuda-toolkit-12-9=12.9.1-1")


# --- apt -------------------------------------------------------------------------------------------------------------------------------


def test_apt_installs_the_pinned_version_once_and_files_go_again(machine: Machine, cuda: dict[str, str]) -> None:
    cuda["REPOSITORIES"] = cuda["REPOSITORIES"].removesuffix("0") + "100"
    assert machine.says("cuda-toolkit", "check", cuda) == {
        "state": "todo",
        "found": "no toolkit",
        "wanted": "CUDA 12 with nvcc",
    }
    assert machine.written == ""
    after = machine.says("cuda-toolkit", "apply", cuda)
    assert after == {"state": "ok", "found": "12.9.1 in /usr/local/cuda-12.9", "wanted": "CUDA 12 with nvcc"}
    assert (
        machine.out("dpkg-query -W -f '${Version}' cuda-toolkit-12-9; readlink -f /usr/local/cuda")
        == "12.9.1-1/usr/local/cuda-12.9\n"
    )
    source = machine.out("cat /etc/apt/sources.list.d/deepep-cuda.sources")
    assert "\nTypes: deb\n" in source
    assert source.endswith("Suites: ./\nSigned-By: /etc/apt/keyrings/deepep-cuda.gpg\n")
    assert "Pin: release o=Test,l=Test\nPin-Priority: 100\n" in machine.out(
        "cat /etc/apt/preferences.d/deepep-cuda; apt-get -qq check"
    )
    state = "stat -c %y /var/log/dpkg.log /var/lib/apt/lists"
    before = (machine.written, machine.out(state))
    assert machine.says("cuda-toolkit", "apply", cuda) == after
    assert (machine.written, machine.out(state)) == before
    assert machine.says("cuda-toolkit", "remove", cuda)["state"] == "ok"
    assert machine.out("find /etc -name '*deepep*'; ls -d /usr/local/cuda-12.9") == "/usr/local/cuda-12.9\n"


def test_the_toolkit_that_people_use_stays_the_default(machine: Machine, cuda: dict[str, str]) -> None:
    machine.out("mkdir -p /usr/local/cuda-11.8/bin; ln -s cuda-11.8 /usr/local/cuda")
    (machine.shared / "nvcc").write_text(nvcc("11.8.89"), encoding="utf-8")
    machine.out(f"install -m 755 {machine.shared}/nvcc /usr/local/cuda-11.8/bin/nvcc")
    assert machine.says("cuda-toolkit", "check", cuda)["found"] == "11.8.89"
    after = machine.says("cuda-toolkit", "apply", cuda)
    assert (after["state"], after["found"]) == ("ok", "12.9.1 in /usr/local/cuda-12.9")
    assert (
        machine.says("cuda-toolkit", "check", {**cuda, "CUDA_FLOOR": "12.9"})["wanted"]
        == "CUDA 12 with nvcc, 12.9 or newer"
    )
    newer = machine.says("cuda-toolkit", "check", {**cuda, "CUDA_FLOOR": "12.10"})
    assert (newer["state"], newer["found"]) == ("todo", "11.8.89 12.9.1")
    assert after["note"] == "/usr/local/cuda stays CUDA 11.8.89; only our builds use CUDA 12"
    assert machine.out("readlink -f /usr/local/cuda") == "/usr/local/cuda-11.8\n"
    # And where the packages themselves look after the link.
    machine.out("rm /usr/local/cuda; apt-get -qq install cuda-toolkit-13-0 >&2; readlink -f /usr/local/cuda >&2")
    machine.out("apt-get -qq -y remove cuda-toolkit-12-9 >&2")
    assert machine.says("cuda-toolkit", "apply", cuda)["note"].startswith("/usr/local/cuda stays CUDA 13.0.2")
    assert machine.out("readlink -f /usr/local/cuda") == "/usr/local/cuda-13.0\n"


def test_a_key_with_another_fingerprint_is_not_trusted(machine: Machine, cuda: dict[str, str], key: Signer) -> None:
    wanted = "0123456789ABCDEF0123456789ABCDEF01234567"
    cuda["REPOSITORIES"] = cuda["REPOSITORIES"].replace(key.fingerprint, wanted)
    said = machine.refuses("cuda-toolkit", cuda)
    assert f"key.asc: not the key in the lock — found {key.fingerprint}, wanted {wanted}. Nothing was written\n" in said
    assert machine.written == ""
    assert machine.says("cuda-toolkit", "check", cuda)["state"] == "todo"


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>\n", None])
def test_a_key_file_without_a_key_is_not_trusted(machine: Machine, cuda: dict[str, str], content: bytes | None) -> None:
    file = machine.shared / "cuda/key.asc"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    said = machine.refuses("cuda-toolkit", cuda)
    assert ("found no key, wanted" if content is not None else "key.asc cannot be fetched") in said
    assert machine.written == ""


def test_of_several_keys_only_the_locked_one_is_trusted(machine: Machine, cuda: dict[str, str], key: Signer) -> None:
    with signer("Somebody else") as other:
        file = machine.shared / "cuda/key.asc"
        file.write_bytes(other.public() + file.read_bytes())
        assert machine.says("cuda-toolkit", "apply", cuda)["state"] == "ok"
        keyring = machine.out("gpg --show-keys --with-colons /etc/apt/keyrings/deepep-cuda.gpg 2>/dev/null")
        assert [line.split(":")[9] for line in keyring.splitlines() if line.startswith("fpr:")] == [key.fingerprint]
        # What the other key signs is not accepted.
        make_apt_repository(machine.shared / "cuda", [toolkit("12.9.1")], other)
        assert "NO_PUBKEY" in machine.sh("apt-get update 2>&1").stdout


def test_a_tampered_package_is_not_installed(machine: Machine, cuda: dict[str, str]) -> None:
    spoil(machine.shared / "cuda/cuda-toolkit-12-9_12.9.1-1_all.deb")
    said = machine.refuses("cuda-toolkit", cuda)
    assert "Hash Sum mismatch" in said
    assert (
        f"error: apt could not install the packages from file://{machine.shared}/cuda (what it said is above). "
        "Please install by hand: "
        "cuda-toolkit-12-9=12.9.1-1\n" in said
    )
    assert machine.says("cuda-toolkit", "check", cuda)["state"] == "todo"


def test_a_version_that_the_repository_has_not_is_told(machine: Machine, cuda: dict[str, str]) -> None:
    said = machine.refuses("cuda-toolkit", {**cuda, "PACKAGES": "cuda-toolkit-12-9=12.9.7-1"})
    assert "Version '12.9.7-1' for 'cuda-toolkit-12-9' was not found" in said
    assert "Please install by hand: cuda-toolkit-12-9=12.9.7-1" in said


def test_a_repository_that_does_not_answer_is_taken_away_again(machine: Machine, cuda: dict[str, str]) -> None:
    (machine.shared / "cuda/InRelease").unlink()
    said = machine.refuses("cuda-toolkit", cuda)
    assert "the package lists of file:///" in said
    assert machine.out("find /etc -name '*deepep*'") == ""


HOLD = (
    "import fcntl, sys, time; file = open('/var/lib/dpkg/lock-frontend', 'w'); fcntl.lockf(file, fcntl.LOCK_EX); "
    "open('/held', 'w'); time.sleep(float(sys.argv[1]))"
)


def test_a_repository_that_the_site_has_already_is_not_written_beside_it(
    machine: Machine, cuda: dict[str, str], key: Signer
) -> None:
    """As NVIDIA's cuda-keyring package leaves it: with two keyrings for one repository apt reads no source at all
    any more."""
    url = cuda["REPOSITORIES"].split()[1]
    (machine.shared / "site.gpg").write_bytes(key.gpg("--export", key.fingerprint))
    machine.out(f"install -m 644 {machine.shared}/site.gpg /usr/share/keyrings/")
    line = f"deb [signed-by=/usr/share/keyrings/site.gpg] {url}/ ./"
    machine.out(f"echo '{line}' >/etc/apt/sources.list.d/site.list; apt-get -qq update")
    done = machine.recipe("cuda-toolkit", "apply", cuda)
    assert (done.returncode, "state=ok" in done.stdout) == (0, True), done.stderr
    assert f"{url} is a repository of this host already" in done.stderr
    assert machine.out("apt-get -qq check; find /etc -name '*deepep*'") == ""


def test_an_installation_that_was_cut_off_is_finished_first(machine: Machine, key: Signer) -> None:
    """^C and a lost network end what runs on a host, and dpkg in the middle of its work."""
    slow = Package(
        "slow-tool",
        "1.0",
        {"/opt/slow-tool": "x"},
        postinst="test -e /again || { touch /again; kill -9 $PPID; sleep 1; }",
    )
    repository = make_apt_repository(machine.shared / "cuda", [slow, toolkit("12.9.1")], key)
    env = apt(repository, "cuda-toolkit-12-9=12.9.1-1")
    assert "could not install" in machine.refuses("cuda-toolkit", {**env, "PACKAGES": "slow-tool"})
    assert "dpkg was interrupted" in machine.sh("apt-get -y install cuda-toolkit-12-9").stderr
    done = machine.recipe("cuda-toolkit", "apply", env)
    assert (done.returncode, "state=ok" in done.stdout) == (0, True), done.stderr
    assert "an earlier installation was cut off" in done.stderr


def test_a_busy_package_database_is_waited_for_with_a_limit(machine: Machine, cuda: dict[str, str]) -> None:
    machine.out(
        f"python3 -c {shlex.quote(HOLD)} 600 >/dev/null 2>&1 & echo $! >/holder; while [ ! -e /held ]; do sleep "
        f"0.05; done"
    )
    said = machine.refuses("cuda-toolkit", {**cuda, "PACKAGE_LOCK_WAIT": "1"})
    assert "error: the package database is still held by another program after 1 s: " in said
    machine.out("kill $(cat /holder)")  # still there: it was not waited for
    assert machine.says("cuda-toolkit", "apply", cuda)["state"] == "ok"


def test_nothing_is_removed_and_nothing_downgraded(machine: Machine, key: Signer) -> None:
    rival = Package("site-tool", "1.0", {"/opt/site-tool": "x"})
    package = Package(
        "cuda-toolkit-12-9", "12.9.1-1", {"/usr/local/cuda-12.9/bin/nvcc": nvcc("12.9.1")}, conflicts="site-tool"
    )
    repository = make_apt_repository(machine.shared / "cuda", [rival, package], key)
    env = apt(repository, "site-tool")
    assert "installed, but there is no nvcc of CUDA 12" in machine.refuses("cuda-toolkit", env)
    said = machine.refuses("cuda-toolkit", apt(repository, "cuda-toolkit-12-9=12.9.1-1"))
    assert "Packages need to be removed but remove is disabled" in said
    assert machine.out("cat /opt/site-tool") == "x"


# --- what needs a reboot ---------------------------------------------------------------------------------------------------------------

SYS = """
rm -rf /sys/bus /sys/class/infiniband
add() { mkdir -p "/sys/bus/pci/devices/$1"; echo "$2" >"/sys/bus/pci/devices/$1/vendor"; echo "$3" >"/sys/bus/pci/devices/$1/class"; }
rdma() { mkdir -p "/sys/class/infiniband/$1/device"; echo 0x15b3 >"/sys/class/infiniband/$1/device/vendor"; }
"""


def ofed(machine: Machine, key: Signer, **more: str) -> dict[str, str]:
    packages = [
        Package("doca-ofed", "3.2.1-044000", {"/opt/doca": "x"}, depends="mlnx-tools"),
        Package("mlnx-tools", "25.10", {"/opt/mlnx": "x"}),
        Package("doca-ofed", "3.3.0-1", {"/opt/doca": "y"}),
        Package(f"linux-headers-{KERNEL}", "1", {f"/lib/modules/{KERNEL}/build/Makefile": "x"}),
    ]
    repository = make_apt_repository(machine.shared / "doca", packages, key)
    lines = {
        "REPOSITORIES": repository.line("doca"),
        "PACKAGES": "doca-ofed=3.2.1*",
        "HEADERS": f"linux-headers-{KERNEL}",
    }
    return {"MANAGER": "apt", "HOLD": "doca-* mlnx-* linux-headers-*", **lines, **more}


def test_ofed_is_installed_held_and_waits_for_a_reboot(machine: Machine, key: Signer) -> None:
    env = ofed(machine, key)
    wanted = "RDMA devices of DOCA-OFED (mlx5_…)"
    assert machine.says("doca-ofed", "check", env) == {
        "state": "ok",
        "found": "no Mellanox network device",
        "wanted": wanted,
    }
    machine.out(
        f"{SYS} add 0000:0c:00.0 0x15b3 0x020000; add 0000:0d:00.0 0x15b3 0x020700; add 0000:0e:00.0 0x15b3 0x058000"
    )
    before = machine.says("doca-ofed", "check", env)
    found = "no RDMA device on 2 Mellanox network functions"
    assert before == {"state": "todo", "found": found, "wanted": wanted, "needs": "reboot"}
    machine.out(f"{SYS} add 0000:0c:00.0 0x15b3 0x020000; rdma rocep12s0; rdma mlx5_1")
    after = machine.says("doca-ofed", "apply", env)
    assert after == {"state": "reboot", "found": "mlx5_1 rocep12s0", "wanted": wanted}
    assert machine.out("dpkg-query -W -f '${Version}' doca-ofed") == "3.2.1-044000"
    held = ["doca-ofed", f"linux-headers-{KERNEL}", "mlnx-tools"]
    assert machine.out("apt-mark showhold").split() == held
    once = machine.written
    assert machine.says("doca-ofed", "apply", env) == after
    assert machine.written == once
    machine.out("echo another-boot >/var/lib/deepep-bootstrap/changed/doca-ofed")
    stuck = machine.says("doca-ofed", "apply", env)
    assert (stuck["state"], stuck["note"]) == ("stuck", "dkms status and dmesg say more")
    machine.out(f"{SYS} add 0000:0c:00.0 0x15b3 0x020000; rdma mlx5_0; rdma mlx5_1; apt-mark hold bash >&2")
    assert machine.says("doca-ofed", "check", env) == {"state": "ok", "found": "mlx5_0 mlx5_1", "wanted": wanted}
    assert machine.says("doca-ofed", "remove", env)["state"] == "ok"
    assert machine.out("apt-mark showhold; find /etc -name '*deepep*'") == "bash\n"


def test_what_was_held_is_held_again_when_a_newer_lock_fails(machine: Machine, key: Signer) -> None:
    env = ofed(machine, key)
    machine.out(f"{SYS} add 0000:0c:00.0 0x15b3 0x020000")
    machine.says("doca-ofed", "apply", env)
    assert "was not found" in machine.refuses("doca-ofed", {**env, "PACKAGES": "doca-ofed=3.9*"})
    assert "doca-ofed" in machine.out("apt-mark showhold").split()
    assert machine.says("doca-ofed", "apply", {**env, "PACKAGES": "doca-ofed=3.3*"})["state"] == "reboot"
    assert machine.out("dpkg-query -W -f '${db:Status-Want} ${Version}' doca-ofed") == "hold 3.3.0-1"


def test_a_repository_to_be_set_up_by_hand(machine: Machine, key: Signer) -> None:
    env = ofed(machine, key, REPOSITORIES="", BY_HAND="the repository of DOCA")
    machine.out(f"{SYS} add 0000:0c:00.0 0x15b3 0x020000")
    check = machine.says("doca-ofed", "check", env)
    assert check["state"] == "blocked"
    assert (
        check["note"]
        == "set up by hand the repository of DOCA, then `apt-get update`; the next run installs doca-ofed=3.2.1*"
    )
    assert f"error: {check['note']}\n" in machine.refuses("doca-ofed", env)
    machine.out(
        f"echo 'deb [trusted=yes] file://{machine.shared}/doca ./' >/etc/apt/sources.list.d/site.list; apt-get -qq "
        f"update"
    )
    assert machine.says("doca-ofed", "check", env)["state"] == "todo"
    assert machine.says("doca-ofed", "apply", env)["state"] == "reboot"


def test_the_driver_is_installed_where_none_is(machine: Machine, key: Signer) -> None:
    packages = [
        Package("nvidia-open-580", "580.95.05-1", {"/opt/driver": "x"}),
        Package("nvidia-settings", "1", {"/opt/settings": "x"}),
    ]
    packages.append(Package(f"linux-headers-{KERNEL}", "1"))
    repository = make_apt_repository(machine.shared / "driver", packages, key)
    env = {
        "MANAGER": "apt",
        "PACKAGES": "nvidia-open-580",
        "HOLD": "nvidia-open-*",
        "REPOSITORIES": repository.line("driver"),
    }
    machine.out(
        f"{SYS} add 0000:0a:00.0 0x10de 0x030200; add 0000:0b:00.0 0x10de 0x030200; add 0000:0f:00.0 0x10de 0x068000"
    )
    check = machine.says("nvidia-driver", "check", env)
    assert (check["state"], check["needs"], check["found"]) == ("todo", "reboot", "no driver loaded for 2 GPUs")
    assert check["note"] == "the fabric manager of the NVSwitches follows after the reboot"
    assert (
        check["candidate"].strip() == "nvidia-open-580"
    )  # the lists of a repository that is not added yet are not there
    machine.out(
        f"echo 'deb [trusted=yes] file://{machine.shared}/driver ./' >/etc/apt/sources.list.d/site.list; apt-get -qq "
        f"update"
    )
    assert machine.says("nvidia-driver", "check", env)["candidate"].strip() == "nvidia-open-580=580.95.05-1"
    machine.out("rm /etc/apt/sources.list.d/site.list")
    env["PACKAGES"] = "nvidia-open-580=580.95.05-*"
    assert machine.says("nvidia-driver", "apply", env)["state"] == "reboot"
    assert machine.out("apt-mark showhold") == "nvidia-open-580\n"
    assert machine.says("nvidia-driver", "apply", env)["state"] == "reboot"
    # A kernel later, without headers for it: they are added, and the driver stays as it is.
    machine.out("mkdir -p /usr/src/nvidia-580.95.05; touch /usr/src/nvidia-580.95.05/dkms.conf")
    env |= {"HEADERS": f"linux-headers-{KERNEL}", "PACKAGES": "nvidia-open-580=580.99-*"}
    assert machine.says("nvidia-driver", "check", env)["state"] == "todo"
    assert machine.says("nvidia-driver", "apply", env)["state"] == "reboot"
    installed = machine.out(
        f"dpkg-query -W -f '${{Version}} ' linux-headers-{KERNEL} nvidia-open-580; ls /var/lib/deepep-bootstrap/begun"
    )
    assert installed.split() == ["1", "580.95.05-1"]


# --- what is seen, in a tree -----------------------------------------------------------------------------------------------------------


def check_tree(tmp_path: Path, name: str, files: Mapping[str, str | bytes], **env: str) -> dict[str, str]:
    """Return what a recipe's check says of a machine that has these files."""
    root = tmp_path / "root"
    for path, content in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())
    root.mkdir(exist_ok=True)
    parts = [(RECIPES / part).read_text(encoding="utf-8") for part in (*LIBRARY, f"host/{name}.sh")]
    given = {"PATH": PATH, "HOST_ROOT": str(root), **env}
    done = subprocess.run(
        ["bash", "-s", "check"], input="\n".join(parts), env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) == sorted(files), (
        "a check wrote something"
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def function(address: str, vendor: str, kind: str) -> dict[str, str | bytes]:
    folder = f"sys/bus/pci/devices/0000:{address}.0"
    return {f"{folder}/vendor": f"{vendor}\n", f"{folder}/class": f"{kind}\n"}


NIC = function("0c:00", "0x15b3", "0x020000")
GPU = function("0a:00", "0x10de", "0x030200")
MISSING = {"MANAGER": "apt", "PACKAGES": "no-such-package"}


def test_secure_boot_and_missing_headers_are_told_before_ofed_is_installed(tmp_path: Path) -> None:
    secure: dict[str, str | bytes] = {"sys/firmware/efi/efivars/SecureBoot-8be4df61": bytes([6, 0, 0, 0, 1])}
    said = check_tree(tmp_path, "doca-ofed", {**NIC, **secure}, **MISSING)
    assert (said["state"], said["needs"]) == ("todo", "reboot")
    assert said["note"] == (
        f"kernel {KERNEL} has no headers here, so its modules cannot be compiled; "
        "Secure Boot refuses modules compiled here unless their key is enrolled (mokutil --import)"
    )
    headers: dict[str, str | bytes] = {f"lib/modules/{KERNEL}/build/Makefile": ""}
    insecure: dict[str, str | bytes] = {"sys/firmware/efi/efivars/SecureBoot-8be4df61": bytes([6, 0, 0, 0, 0])}
    assert "note" not in check_tree(tmp_path, "doca-ofed", {**NIC, **insecure, **headers}, **MISSING)


LOADED = "NVRM version: NVIDIA UNIX {}x86_64 Kernel Module  {}  Release Build\nGCC version: 13\n"
NO_MODULE = (
    f"a driver is installed (/{{}}) but has no module for kernel {KERNEL}: install that kernel's headers, then `dkms "
    f"autoinstall`; "
    "or a package of that driver with modules for this kernel"
)


@pytest.mark.parametrize(
    ("files", "state", "found", "note"),
    [
        ({}, "ok", "no NVIDIA GPU", None),
        (
            {
                **GPU,
                "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  "
                "Release Build\n",
            },
            "ok",
            "open 580.95.05",
            None,
        ),
        (
            {
                **GPU,
                "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sun Mar 30\n",
            },
            "ok",
            "proprietary 570.133.20",
            "the proprietary driver is left alone; with it, RDMA to GPU memory needs nvidia_peermem",
        ),
        (
            {**GPU, f"lib/modules/{KERNEL}/updates/dkms/nvidia.ko.zst": ""},
            "blocked",
            "no driver loaded for 1 GPUs",
            (
                f"/lib/modules/{KERNEL}/updates/dkms/nvidia.ko.zst is there but not loaded: modprobe nvidia, or dmesg, "
                f"says why"
            ),
        ),
        (GPU, "todo", "no driver loaded for 1 GPUs", None),
        # Drivers of the site whose modules were made for another kernel: as packages, by dkms, by a .run file.
        *(
            ({**GPU, place: ""}, "blocked", "no driver loaded for 1 GPUs", NO_MODULE.format(place))
            for place in (
                "lib/modules/5.14.0-1.el9.x86_64/extra/nvidia.ko.xz",
                "lib/modules/5.4.0-1/kernel/drivers/video/nvidia.ko",
                "var/lib/dkms/nvidia/570.133.20/source",
                "usr/src/nvidia-open-575.57.08/dkms.conf",
            )
        ),
        (
            {
                **GPU,
                "var/lib/dkms/nvidia-fs/2.25.7/source": "",
                "usr/src/nvidia-peermem-1.3/dkms.conf": "",
                "usr/src/nvidia-1/.keep": "",
                "lib/modules/5.4.0-1/kernel/drivers/video/fbdev/nvidia/nvidiafb.ko": "",
            },
            "todo",
            "no driver loaded for 1 GPUs",
            None,
        ),
        (function("0a:00", "0x10de", "0x030000"), "todo", "no driver loaded for 1 GPUs", None),
        (function("0a:00", "0x10de", "0x040300"), "ok", "no NVIDIA GPU", None),
        (function("0a:00", "0x1a03", "0x030000"), "ok", "no NVIDIA GPU", None),
    ],
)
def test_which_driver_is_there(
    tmp_path: Path, files: dict[str, str | bytes], state: str, found: str, note: str | None
) -> None:
    said = check_tree(tmp_path, "nvidia-driver", files, **MISSING)
    assert (said["state"], said["found"], said.get("note")) == (state, found, note)


def test_of_the_locks_own_driver_only_the_headers_of_a_new_kernel_are_installed(tmp_path: Path) -> None:
    """Its module for the kernel before is there; dkms could not make the new one. Whatever the version, the packages
    stay."""
    files: dict[str, str | bytes] = {
        **GPU,
        "lib/modules/5.4.0-1/updates/dkms/nvidia.ko": "",
        "usr/src/nvidia-580.95.05/dkms.conf": "",
    }
    env = {"MANAGER": "apt", "PACKAGES": "bash=580.1-*", "HEADERS": "no-such-headers"}
    said = check_tree(tmp_path, "nvidia-driver", files, **env)
    assert (said["state"], said["needs"]) == ("todo", "reboot")
    assert (
        said["note"]
        == f"the driver is installed but has no module for kernel {KERNEL}: this installs the headers that are missing"
    )


def test_an_installation_of_the_driver_that_was_cut_off_is_gone_on_with(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        **GPU,
        "usr/src/nvidia-580.95.05/dkms.conf": "",
        "proc/sys/kernel/random/boot_id": "one\n",
        "var/lib/deepep-bootstrap/begun/nvidia-driver": "one\n",
    }
    assert check_tree(tmp_path, "nvidia-driver", files, **MISSING)["state"] == "todo"
    files["var/lib/deepep-bootstrap/begun/nvidia-driver"] = (
        "an earlier one, and what is there now may be another driver\n"
    )
    assert check_tree(tmp_path, "nvidia-driver", files, **MISSING)["state"] == "blocked"


def test_gpus_of_virtual_machines_are_left_alone(tmp_path: Path) -> None:
    driver = tmp_path / "root/sys/bus/pci/devices/0000:0a:00.0/driver"
    driver.parent.mkdir(parents=True)
    driver.symlink_to("../../../drivers/vfio-pci")
    assert check_tree(tmp_path, "nvidia-driver", GPU, **MISSING)["found"] == "no NVIDIA GPU"


@pytest.mark.parametrize(
    ("name", "files", "env", "note"),
    [
        (
            "cuda-toolkit",
            {},
            {"CUDA_MAJOR": "12"},
            "install the CUDA toolkit 12 (nvcc in /usr/local/cuda-12.x) by hand",
        ),
        ("doca-ofed", NIC, {}, f"install DOCA-OFED 3 and the headers of kernel {KERNEL} by hand"),
        ("nvidia-driver", GPU, {}, "install NVIDIA's driver with open kernel modules by hand"),
        ("python", {}, {"PYTHON_WANTED": "3.12"}, "install /usr/bin/python3.12 by hand"),
    ],
)
def test_a_distribution_without_a_row(
    tmp_path: Path, name: str, files: dict[str, str | bytes], env: dict[str, str], note: str
) -> None:
    said = check_tree(tmp_path, name, files, **env)
    assert said["state"] == "blocked"
    assert said["note"] == f"the lock has no packages for this distribution: {note}"


def test_python(tmp_path: Path, machine: Machine, key: Signer) -> None:
    assert check_tree(tmp_path, "python", {})["found"] == "no other Python is needed"
    env = {"MANAGER": "apt", "PACKAGES": "python3.12=3.12* python3.12-dev", "PYTHON_WANTED": "3.12"}
    assert check_tree(tmp_path, "python", {}, **env)["state"] == "todo"
    said = check_tree(tmp_path, "python", {}, **{**env, "PYTHON_WANTED": "3.10"})
    assert (said["state"], said["found"]) == ("blocked", "no python3.10")
    assert said["note"].startswith(
        "the lock has no python3.10 for this distribution: install it as /usr/bin/python3.10 by hand"
    )
    packages = [
        Package("python3.12", "3.12.3-1", {"/usr/bin/python3.12": "#!/bin/sh\n"}),
        Package("python3.12-dev", "3.12.3-1"),
    ]
    env["REPOSITORIES"] = make_apt_repository(machine.shared / "pythons", packages, key).line("python")
    assert machine.says("python", "apply", env)["found"] == "/usr/bin/python3.12"


def test_somebody_who_is_not_root_is_told_so(machine: Machine, cuda: dict[str, str]) -> None:
    plain = 'setpriv --reuid=65534 --regid=65534 --clear-groups bash "$1" "$2"'
    check = machine.sh(plain, str(machine.shared / "cuda-toolkit"), "check", env=cuda)
    assert (check.returncode, check.stdout.splitlines()[1:]) == (0, ["state=todo", "found=no toolkit"])
    done = machine.sh(plain, str(machine.shared / "cuda-toolkit"), "apply", env=cuda)
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: repositories can only be added by root\n" in done.stderr
    done = machine.sh(plain, str(machine.shared / "cuda-toolkit"), "apply", env={**cuda, "REPOSITORIES": ""})
    assert (
        "error: packages can only be installed by root. As root, install by hand: cuda-toolkit-12-9=12.9.1-1\n"
        in done.stderr
    )


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Say nothing."""


@pytest.mark.parametrize("program", ["curl", "wget", "apt-helper"])
def test_keys_are_fetched_with_what_is_there(tmp_path: Path, program: str) -> None:
    (tmp_path / "key").write_text("the key\n", encoding="utf-8")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ({program} - {"apt-helper"}) | {"bash", "cat"}:
        (tools / name).symlink_to(f"/usr/bin/{name}")
    parts = [(RECIPES / part).read_text(encoding="utf-8") for part in LIBRARY]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        for page, code in (("key", 0), ("nothing", 1)):
            call = f"fetch_file http://127.0.0.1:{server.server_port}/{page} {tmp_path}/got-{page} || exit 1"
            command = ["/usr/bin/bash", "-c", "\n".join([*parts, call])]
            done = subprocess.run(command, env={"PATH": str(tools)}, capture_output=True, text=True, check=False)
            assert done.returncode == code, done
        server.shutdown()
        thread.join()
    assert (tmp_path / "got-key").read_text(encoding="utf-8") == "the key\n"


# --- dnf -------------------------------------------------------------------------------------------------------------------------------


def dnf_ofed(machine: Machine, key: Signer, **more: str) -> dict[str, str]:
    packages = [
        Package("doca-ofed", "3.2.1-044000", {"/opt/doca": "x"}, depends="mlnx-tools"),
        Package("mlnx-tools", "25.10-1", {"/opt/mlnx": "x"}),
        Package("doca-ofed", "3.3.0-1", {"/opt/doca": "y"}),
    ]
    repository = make_dnf_repository(machine.shared / "doca", packages, key)
    lines = {"REPOSITORIES": repository.line("doca", suite="-"), "PACKAGES": "doca-ofed=3.2.1*"}
    return {"MANAGER": "dnf", "HOLD": "doca-* mlnx-*", **lines, **more}


def test_dnf_installs_the_pinned_version_once_and_locks_it(machine: Machine, key: Signer) -> None:
    env = dnf_ofed(machine, key)
    machine.out(f"{SYS} add 0000:0c:00.0 0x15b3 0x020000")
    assert machine.says("doca-ofed", "check", env)["state"] == "todo"
    after = machine.says("doca-ofed", "apply", env)
    assert after["state"] == "reboot"
    assert machine.out("rpm -q doca-ofed mlnx-tools") == "doca-ofed-3.2.1-044000.noarch\nmlnx-tools-25.10-1.noarch\n"
    assert "gpgcheck=1\ngpgkey=file:///etc/pki/rpm-gpg/RPM-GPG-KEY-deepep-doca\n" in machine.out(
        "cat /etc/yum.repos.d/deepep-doca.repo"
    )
    locked = machine.out("grep -v '^#' /etc/dnf/plugins/versionlock.list")
    assert "doca-ofed-0:3.2.1-044000.*" in locked
    machine.out("dnf -y -q upgrade >&2")
    assert machine.out("rpm -q doca-ofed") == "doca-ofed-3.2.1-044000.noarch\n"
    before = (machine.written, machine.out("stat -c %y /etc/dnf/plugins/versionlock.list"))
    assert machine.says("doca-ofed", "apply", env) == after
    assert (machine.written, machine.out("stat -c %y /etc/dnf/plugins/versionlock.list")) == before
    assert machine.says("doca-ofed", "apply", {**env, "PACKAGES": "doca-ofed=3.3.0*"})["state"] == "reboot"
    assert machine.out("rpm -q doca-ofed") == "doca-ofed-3.3.0-1.noarch\n"
    assert machine.says("doca-ofed", "remove", env)["state"] == "ok"
    assert "doca-ofed" not in machine.out("cat /etc/dnf/plugins/versionlock.list; find /etc -name '*deepep*'")


def test_dnf_lists_that_cannot_be_read_are_not_taken_for_a_repository_that_is_missing(
    machine: Machine, key: Signer
) -> None:
    """A list that was never fetched, or cleaned away, or of a repository with repo_gpgcheck, which a plain user
    cannot check."""
    env = dnf_ofed(machine, key, REPOSITORIES="", BY_HAND="the repository of DOCA")
    make_dnf_repository(machine.shared / "other", [Package("other", "1-1", {"/opt/other": "x"})], key)
    machine.out(f"{SYS} add 0000:0c:00.0 0x15b3 0x020000; mkdir -p /etc/yum.repos.d")
    machine.out(
        "sed -i 's/^skip_if_unavailable=.*/skip_if_unavailable=False/' /etc/dnf/dnf.conf"
    )  # as RHEL and Rocky have it

    def site(name: str) -> str:
        text = f"[{name}]\nname={name}\nbaseurl=file://{machine.shared}/{name}\ngpgcheck=0\n"
        return f"printf %s {shlex.quote(text)} >/etc/yum.repos.d/{name}.repo"

    machine.out(f"{site('other')}; dnf -q makecache")
    check = machine.says("doca-ofed", "check", env)
    note = "set up by hand the repository of DOCA, then `dnf makecache`; the next run installs doca-ofed=3.2.1*"
    assert (check["state"], check.get("note")) == ("blocked", note)
    machine.out("dnf -q clean all")
    assert machine.says("doca-ofed", "check", env)["state"] == "todo"
    assert "install by hand: doca-ofed=3.2.1* (from the repository of DOCA)\n" in machine.refuses("doca-ofed", env)
    machine.out(site("doca"))
    plain = 'setpriv --reuid=65534 --regid=65534 --clear-groups bash "$1" check'
    for user in ('bash "$1" check', plain):
        assert "state=todo\n" in machine.sh(user, str(machine.shared / "doca-ofed"), env=env).stdout
    assert machine.says("doca-ofed", "apply", env)["state"] == "reboot"


def test_dnf_refuses_wrong_keys_and_tampered_packages(machine: Machine, key: Signer) -> None:
    env = dnf_ofed(machine, key)
    machine.out(f"{SYS} add 0000:0c:00.0 0x15b3 0x020000")
    wanted = "0123456789ABCDEF0123456789ABCDEF01234567"
    said = machine.refuses("doca-ofed", {**env, "REPOSITORIES": env["REPOSITORIES"].replace(key.fingerprint, wanted)})
    assert f"not the key in the lock — found {key.fingerprint}, wanted {wanted}. Nothing was written\n" in said
    assert machine.out("find /etc -name '*deepep*'") == ""
    assert "Please install by hand: doca-ofed=9.9" in machine.refuses("doca-ofed", {**env, "PACKAGES": "doca-ofed=9.9"})
    with signer("Somebody else") as other:
        make_dnf_repository(machine.shared / "doca", [Package("doca-ofed", "3.2.1-044000", {"/opt/doca": "x"})], other)
        assert "dnf could not install the packages" in machine.refuses("doca-ofed", env)
    env = dnf_ofed(machine, key)
    spoil(machine.shared / "doca/doca-ofed-3.2.1-044000.rpm")
    assert "dnf could not install the packages" in machine.refuses("doca-ofed", env)
    assert machine.sh("rpm -q doca-ofed").returncode == 1
    dnf_ofed(machine, key)
    assert machine.says("doca-ofed", "apply", env)["state"] == "reboot"


def test_a_busy_dnf_is_waited_for_with_a_limit(machine: Machine, key: Signer) -> None:
    env = dnf_ofed(machine, key)
    machine.out(f"{SYS} add 0000:0c:00.0 0x15b3 0x020000")
    hold = (
        "import dnf.lock, time; lock = dnf.lock.build_rpmdb_lock('/var/lib/dnf', True); lock.__enter__(); "
        "open('/held', 'w'); time.sleep(600)"
    )
    machine.out(
        f"python3 -c {shlex.quote(hold)} >/holder.log 2>&1 & echo $! >/holder; while [ ! -e /held ]; do sleep 0.05; "
        f"done"
    )
    said = machine.refuses("doca-ofed", {**env, "PACKAGE_LOCK_WAIT": "1"})
    machine.out("kill $(cat /holder)")
    assert said.splitlines()[-1].startswith("error: the package database is still held by another program after 1 s: ")
