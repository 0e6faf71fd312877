"""What a login shell gets: the look at a host under real module systems with real shared libraries, and how it is
judged."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from deepep_bootstrap.analysis.diagnosis.outcomes import explained
from deepep_bootstrap.bootstrap import verify
from deepep_bootstrap.core.errors import OK, VERDICT, Trouble
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.inventory.survey import read_tree
from deepep_bootstrap.prefix import modulefiles
from deepep_bootstrap.prefix.offer import StackRecord
from deepep_bootstrap.remote.fleet import ConnectionPool
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Reply
from tests.support import module_systems
from tests.support import modules as support
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("programs")

RECIPES = read_tree(support.REPOSITORY / "recipes")
SYSTEMS = ("lmod", "environment-modules", "")
NCCL_CALLER = " int ncclGetVersion(int *); int ask(void) { int version; return ncclGetVersion(&version); }"
NOISE = "echo module=evil\necho loaded=deepep/evil\necho broken >&2\n"


def build_library(file: Path, source: str, *more: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o", file, *more]
    subprocess.run(command, input=source, text=True, check=True)


class Machine:
    """A prefix whose entries hold a DeepEP that can be imported: an extension linked to an NVSHMEM by its soname, as
    the real one."""

    def __init__(self, path: Path, record: StackRecord, *others: StackRecord) -> None:
        self.path = path
        self.record = record
        support.write(
            path / "generations" / "1",
            modulefiles.render_offer(support.offer(str(path), record, *others), support.templates()),
        )
        (path / "current").symlink_to("generations/1")
        (path / "modulefiles").symlink_to("current/modulefiles")
        library = Path(modulefiles.nvshmem_folder(record)) / "lib" / "libnvshmem_host.so.3"
        build_library(
            library, "void *nvshmem_malloc(unsigned long n) { return 0; }", "-Wl,-soname,libnvshmem_host.so.3"
        )
        self.torchs_own = path / "torchs_own" / "libnvshmem_host.so.3"
        build_library(
            self.torchs_own, "void *nvshmem_malloc(unsigned long n) { return 0; }", "-Wl,-soname,libnvshmem_host.so.3"
        )
        self.package = path / "store" / record.deepep / "lib" / "python"
        extension = self.package / "extension.so"
        caller = "void *nvshmem_malloc(unsigned long); void *use(void) { return nvshmem_malloc(1); }"
        (self.package / "deep_ep").mkdir(parents=True)
        if record.nccl:
            self.nccl = Path(modulefiles.nccl_folder(record)) / "lib" / "libnccl.so.2"
            self.build_nccl(record.nccl)
            callers = (NCCL_CALLER,) if record.is_v25 else (caller + NCCL_CALLER, str(library))
            build_library(extension, *callers, str(self.nccl))
            (self.package / "deep_ep" / "__init__.py").write_text("import torch\nimport deep_ep._C\n")
            (self.package / "deep_ep" / "_C.py").write_text(f"__file__ = {str(extension)!r}\n")
        else:
            build_library(extension, caller, str(library))
            (self.package / "deep_ep" / "__init__.py").write_text("import torch\nimport deep_ep_cpp\n")
            (self.package / "deep_ep_cpp.py").write_text(f"__file__ = {str(extension)!r}\n")
        (self.package / "torch.py").write_text("__version__ = '2.10.0+stand-in'\n")
        if record.python:
            python = path / "store" / record.python / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.symlink_to("/usr/bin/python3")

    def build_nccl(self, version: str) -> None:
        """Put an NCCL of this version where the stack's environment has its own."""
        major, minor, patch = version.split(".")
        number = int(major) * 10000 + int(minor) * 100 + int(patch)
        source = f"int ncclGetVersion(int *version) {{ *version = {number}; return 0; }}"
        build_library(self.nccl, source, "-Wl,-soname,libnccl.so.2")

    def torch_brings_its_own(self) -> None:
        """Let `import torch` open another copy first, as its wheel does."""
        line = f"import ctypes\nctypes.CDLL({str(self.torchs_own)!r}, ctypes.RTLD_GLOBAL)\n"
        (self.package / "torch.py").write_text(f"__version__ = '2.10.0'\n{line}")

    def look(
        self, system: str, *, load: str = "deepep", imports: bool = True, driver: bool = False, **more: str
    ) -> verify.LoadVerdict:
        """Look at this machine as verify does on a host, with start-up files that talk."""
        session_folder = self.path / "session"
        session_folder.mkdir(exist_ok=True)
        (session_folder / ".bash_profile").write_text(NOISE)
        job = verify.load_job(
            self.record, RECIPES, load=verify.Load(load, without_hook=more.get("MODULEPATH") == ""), imports=imports
        )
        env = {"MODULEPATH": f"{self.path}/modulefiles", **job.env, **more}
        session = module_systems.run(job.script, session_folder, system=system, login=False, driver=driver, env=env)
        return verify.parse_verdict(Reply("host", session.code, session.out, session.err, 0.5))

    def complaints(self, system: str, **how: object) -> list[str]:
        verdict = self.look(system, **how)
        return [problem.what for problem in verify.problems("host", verdict, self.record)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, support.record(str(tmp_path)))


@pytest.fixture
def joined(tmp_path: Path) -> Machine:
    """A machine whose stack joins an external Python."""
    return Machine(tmp_path, support.external_record(str(tmp_path), external_python="/usr/bin/python3"))


@pytest.mark.parametrize("system", SYSTEMS)
def test_all_is_well(system: str, machine: Machine) -> None:
    verdict = machine.look(system)
    store = f"{os.path.realpath(machine.path)}/store"
    assert verify.problems("host", verdict, machine.record) == ()
    assert verdict == verify.LoadVerdict(
        module_system=bool(system),
        loaded=machine.record.module if system else "",
        printed="",
        imported=True,
        error="",
        deep_ep=f"{store}/{machine.record.deepep}/lib/python/deep_ep/__init__.py",
        torch="2.10.0+stand-in",
        nvshmem=f"{store}/{machine.record.nvshmem}/lib/libnvshmem_host.so.3",
        deepep_entry=f"{store}/{machine.record.deepep}",
        nvshmem_entry=f"{store}/{machine.record.nvshmem}",
        driver=False,
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_v2_is_asked_for_its_nccl_too(system: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, support.v2_record(str(tmp_path)))
    verdict = machine.look(system)
    assert verify.problems("host", verdict, machine.record) == ()
    assert (verdict.nccl, verdict.nccl_version) == (os.path.realpath(machine.nccl), "2.30.4")
    machine.build_nccl("2.28.9")
    (wrong,) = verify.problems("host", machine.look(system), machine.record)
    assert (wrong.what, wrong.wanted) == ("DeepEP would call another NCCL", "2.30.4, with which it was built")
    assert wrong.found == f"2.28.9 {os.path.realpath(machine.nccl)}"


@pytest.mark.parametrize("system", SYSTEMS)
def test_v2_beside_an_external_torch_uses_that_ones_libraries(system: str, tmp_path: Path) -> None:
    """Nothing is preloaded, on nodes with a driver neither; an NCCL that pip put in that one's place is named."""
    site = tmp_path / "vllm/site-packages/nvidia"
    record = support.v2_beside_torch(
        str(tmp_path),
        external_python="/usr/bin/python3",
        torch_nccl=str(site / "nccl"),
        torch_nvshmem=str(site / "nvshmem"),
    )
    machine = Machine(tmp_path, record)
    verdict = machine.look(system, driver=True)
    assert verify.problems("host", verdict, record) == ()
    assert verdict.nvshmem == os.path.realpath(site / "nvshmem/lib/libnvshmem_host.so.3")
    assert (verdict.nccl, verdict.nccl_version) == (os.path.realpath(machine.nccl), "2.30.7")
    machine.build_nccl("2.28.9")
    (wrong,) = verify.problems("host", machine.look(system), record)
    assert (wrong.what, wrong.wanted) == ("DeepEP would call another NCCL", "2.30.7, with which it was built")


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("driver", [True, False])
def test_an_nccl_of_ours_wins_over_the_one_that_an_external_torch_opens(
    system: str, driver: bool, tmp_path: Path
) -> None:
    """On a node with a driver it is preloaded; elsewhere it is the first that is found by name."""
    site = tmp_path / "vllm/site-packages/nvidia"
    record = support.v2_own_nccl(str(tmp_path), external_python="/usr/bin/python3", torch_nvshmem=str(site / "nvshmem"))
    machine = Machine(tmp_path, record)
    theirs = site / "nccl/lib/libnccl.so.2"
    build_library(theirs, "int ncclGetVersion(int *v) { *v = 22809; return 0; }", "-Wl,-soname,libnccl.so.2")
    loader = f"import ctypes\nctypes.CDLL({str(theirs)!r}, ctypes.RTLD_GLOBAL)\n" if driver else ""
    (machine.package / "torch.py").write_text(f"__version__ = '2.13.0'\n{loader}")
    verdict = machine.look(system, driver=driver)
    assert verify.problems("host", verdict, record) == ()
    assert (verdict.nccl, verdict.nccl_version) == (os.path.realpath(machine.nccl), "2.30.7")


@pytest.mark.parametrize("system", SYSTEMS)
def test_v25_is_asked_for_its_nccl_and_for_no_nvshmem(system: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, support.v25_record(str(tmp_path)))
    verdict = machine.look(system)
    assert verify.problems("host", verdict, machine.record) == ()
    assert (verdict.nvshmem, verdict.nccl_version) == ("", "2.32.3")


@pytest.mark.parametrize("system", SYSTEMS)
def test_login_hosts_load_only(system: str, machine: Machine) -> None:
    (machine.package / "torch.py").write_text("raise SystemExit('imported')\n")
    verdict = machine.look(system, imports=False)
    assert verdict.imported is None
    assert verify.problems("host", verdict, machine.record) == ()


@pytest.mark.parametrize("system", ["lmod", "environment-modules"])
def test_without_the_hook_the_modulefiles_are_named(system: str, machine: Machine) -> None:
    assert machine.look(system, imports=False, MODULEPATH="").loaded == machine.record.module


@pytest.mark.parametrize("system", SYSTEMS)
def test_torchs_copy_is_noticed_and_preloading_helps(system: str, joined: Machine) -> None:
    joined.torch_brings_its_own()
    assert joined.complaints(system) == ["DeepEP would call another NVSHMEM"]
    assert joined.complaints(system, driver=True) == []


@pytest.mark.parametrize("system", ["lmod", "environment-modules"])
def test_another_default(system: str, tmp_path: Path) -> None:
    path = str(tmp_path)
    machine = Machine(tmp_path, support.record(path), support.external_record(path))
    other = modulefiles.render_offer(
        support.offer(path, support.external_record(path), support.record(path)), support.templates()
    )
    support.write(tmp_path / "generations" / "1", other)
    assert machine.complaints(system, imports=False) == ["module load gives another module"]
    assert machine.complaints(system, imports=False, load=machine.record.module) == []


def test_a_host_that_sees_the_new_generation_late_is_waited_for(machine: Machine) -> None:
    """As a network filesystem shows it: for a while `current` leads to the generation before."""
    current = machine.path / "current"
    (machine.path / "generations/0").mkdir()

    def publish() -> None:
        (machine.path / "new").symlink_to("generations/1")
        (machine.path / "new").rename(current)

    current.unlink()
    current.symlink_to("generations/0")
    late = machine.look("", imports=False, GENERATION="1", SECONDS_TO_SEE="0")
    (problem,) = [each for each in verify.problems("host", late, machine.record) if "another generation" in each.what]
    assert (problem.found, problem.wanted) == ("generations/0", "generations/1")
    timer = threading.Timer(0.3, publish)
    timer.start()
    assert machine.look("", imports=False, GENERATION="1").stale == ()
    timer.join()
    assert verify.load_job(machine.record, RECIPES, generation=1).env["GENERATION"] == "1"


@pytest.mark.parametrize("system", ["lmod", "environment-modules"])
def test_no_such_module(system: str, machine: Machine) -> None:
    (machine.path / "modulefiles").unlink()
    verdict = machine.look(system, imports=False)
    (problem,) = verify.problems("host", verdict, machine.record)
    assert (problem.what, problem.wanted) == ("module load gives another module", machine.record.module)
    assert "deepep" in problem.found


def test_no_env_file(machine: Machine) -> None:
    (machine.path / "current").unlink()
    assert machine.complaints("", imports=False) == ["env.sh cannot be read"]


@pytest.mark.parametrize(
    "text", ["raise ImportError('no\\nluck')", "1 +", "import absent", "raise RuntimeError", "raise SystemExit(3)"]
)
def test_a_failing_import(text: str, machine: Machine) -> None:
    (machine.package / "torch.py").write_text(text)
    verdict = machine.look("lmod")
    (problem,) = verify.problems("host", verdict, machine.record)
    assert problem.what == "import deep_ep fails"
    assert problem.found


def test_a_crashing_import(machine: Machine) -> None:
    (machine.package / "torch.py").write_text("import os\nos.kill(os.getpid(), 11)\n")
    (problem,) = verify.problems("host", machine.look(""), machine.record)
    assert "code 139" in problem.found


def test_a_library_that_talks(machine: Machine) -> None:
    (machine.package / "torch.py").write_text("print('import=maybe')\n__version__ = '2'\n")
    assert machine.complaints("") == []


def test_a_host_without_a_driver_is_said(joined: Machine) -> None:
    (joined.package / "torch.py").write_text("raise ImportError('libcuda.so.1')\n")
    assert "no NVIDIA driver" in joined.complaints("lmod")[0]
    assert "no NVIDIA driver" not in joined.complaints("lmod", driver=True)[0]


def test_deep_ep_of_somebody_else(machine: Machine) -> None:
    elsewhere = machine.path / "elsewhere"
    (machine.package / "deep_ep").rename(elsewhere)
    (machine.package / "deep_ep").symlink_to(elsewhere)
    assert machine.complaints("") == ["deep_ep comes from another place"]


def test_the_module_of_another_prefix_is_named_and_nothing_that_follows_from_it(machine: Machine) -> None:
    """All libraries are the other prefix's then: that it is another NVSHMEM is no second fault, and no cause."""
    other = machine.path / "other" / "store" / "abc-deepep-1.2.1"
    other.mkdir(parents=True)
    (machine.package / "deep_ep").rename(other / "deep_ep")
    (machine.package / "deep_ep").symlink_to(other / "deep_ep")
    (problem,) = verify.problems("host", replace(machine.look(""), nvshmem="/elsewhere/nvshmem.so"), machine.record)
    assert problem.what == "the module of another prefix is loaded"
    assert (problem.found, problem.wanted) == (f"{machine.path}/other", str(machine.path))
    (told,) = explained([Outcome("verify", "host", "failed", problem.message, code=4)], ROOT)
    assert "cause:" not in told.detail


def test_the_store_stays_as_it_is(machine: Machine) -> None:
    machine.look("")
    assert not list((machine.path / "store").rglob("__pycache__"))


def local_host() -> Host:
    return Host("here", connection="local")


def test_outcomes_through_the_door(machine: Machine, tmp_path: Path) -> None:
    # No module system on this machine's own system or one of its own: both ways lead through the real recipes.
    host, login = local_host(), Host("login", connection="local", role="login")
    fleet = ConnectionPool((host, login))
    try:
        outcomes = verify.verify_all(fleet, (host, login), machine.record, RECIPES)
        assert [(outcome.host, outcome.state, outcome.code) for outcome in outcomes] == [
            ("here", "done", OK),
            ("login", "done", OK),
        ]
        assert "deep_ep imported with torch 2.10.0+stand-in" in outcomes[0].detail
        assert "imported" not in outcomes[1].detail
        (machine.package / "torch.py").write_text("import absent")
        (broken,) = verify.verify_all(fleet, (host,), machine.record, RECIPES)
    finally:
        fleet.close()
    assert (broken.state, broken.code) == ("failed", VERDICT)
    assert "absent" in broken.detail
    assert "\n" not in broken.detail


def test_a_script_that_fails_is_trouble() -> None:
    with pytest.raises(Trouble, match="no such"):
        verify.parse_verdict(Reply("host", 1, "", "error: no such thing", 0.1))
