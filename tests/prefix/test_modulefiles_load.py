"""Modulefiles under real Lmod and real Environment Modules: what a load sets, and that an unload leaves nothing
behind."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepep_bootstrap.prefix import modulefiles, offer
from deepep_bootstrap.prefix.offer import SiteSettings, StackRecord
from tests.support import module_systems
from tests.support import modules as support
from tests.support.paths import TESTS

pytestmark = pytest.mark.usefixtures("programs")

SYSTEMS = ("lmod", "environment-modules")
# Environment Modules before 5.1 has no pushenv: the same files, told that there is none.
VARIANTS = (*SYSTEMS, "environment-modules without pushenv")
RECORDS = {"store": support.record, "external": support.external_record, "v2": support.v2_record}

ELEMENTS = st.sampled_from(
    [
        "",
        "",
        "/a",
        "/a",
        "/b",
        "/b/",
        "//c",
        "/d e",
        "/it's",
        '/"q"',
        "$x",
        "/ü",
        ".",
        "OURS",
        "OURS",
        "/usr/sbin",
        "/usr/sbin/",
    ]
)
# Environment Modules leaves a tilde unquoted in what the shell evaluates, so no modulefile can keep one to the letter
# there.
TEXT = st.text(
    st.characters(min_codepoint=32, max_codepoint=382, exclude_categories=("C",), exclude_characters="~"), max_size=12
)


class Generation:
    """A rendered generation in a folder, with the links a prefix has."""

    def __init__(self, prefix: Path, *records: StackRecord, pushenv: bool = True) -> None:
        templates = support.templates()
        if not pushenv:
            assert "info commands pushenv" in templates["templates/modulefile.tcl.j2"]
            templates["templates/modulefile.tcl.j2"] = templates["templates/modulefile.tcl.j2"].replace(
                "info commands pushenv", "info commands no-such-command"
            )
        offer = support.offer(str(prefix), *records)
        support.write(prefix / "generations" / "1", modulefiles.render_offer(offer, templates))
        (prefix / "current").symlink_to("generations/1")
        for name in ("modulefiles", "bin"):
            (prefix / name).symlink_to(f"current/{name}")
        self.prefix = prefix
        self.use = f"module use {prefix}/modulefiles\n"

    def run(self, variant: str, script: str, **more: object) -> module_systems.Session:
        folder = self.prefix / "session"
        folder.mkdir(exist_ok=True)
        for old in folder.glob("*.env"):
            old.unlink()
        # Where V2's module makes the folder of compiled kernels; /tmp is for the tests of that folder.
        more["env"] = {"DEEPEP_CACHE_BASE": str(folder), **more.get("env", {})}
        return module_systems.run(
            (self.use if variant else "") + script, folder, system=variant.partition(" ")[0], **more
        )


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=SYSTEMS)
def system(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def generation(tmp_path: Path) -> Generation:
    return Generation(tmp_path)


def named(record: StackRecord) -> set[str]:
    return {name for name, _ in modulefiles.variables(record)} | set(offer.LISTS)


def exports(values: dict[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())


@st.composite
def former(draw: st.DrawFn, record: StackRecord) -> dict[str, str]:
    """Values a user may have before: every variable the files name unset, empty or set, lists with repeats and empty
    elements."""
    ours = {lead.name: lead.entries for lead in modulefiles.lists(record)}
    values = {}
    for name in sorted(named(record)):
        if name in offer.LISTS:
            elements = draw(st.none() | st.lists(ELEMENTS, max_size=5))
            if elements is None and name != "PATH":
                continue
            mine = (ours[name] or ("/ours",))[0]
            text = ":".join(mine if element == "OURS" else element for element in elements or [])
            # The tools of the session itself have to stay on PATH, and the empty library is what a program survives.
            values[name] = f"{text}:/usr/bin:/bin" if name == "PATH" else text
        elif (value := draw(st.none() | st.just("") | TEXT)) is not None:
            values[name] = value
    return values


def differences(before: dict[str, str], after: dict[str, str]) -> dict[str, tuple[str | None, str | None]]:
    return {
        name: (before.get(name), after.get(name))
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name)
    }


BESIDE = {"torch's": support.v2_beside_torch, "ours": support.v2_own_nccl}
"""V2 beside an external Python, by whose NCCL it takes."""


@pytest.mark.parametrize("kind", [*RECORDS, "ours"])
@pytest.mark.parametrize("name", VARIANTS)
def test_unload_restores_everything(name: str, kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    prefix = tmp_path_factory.mktemp("prefix")
    record = {**RECORDS, **BESIDE}[kind](str(prefix))
    generation = Generation(prefix, record, pushenv=not name.endswith("without pushenv"))

    @settings(max_examples=9, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(former(record), st.booleans())
    def restores(values: dict[str, str], driver: bool) -> None:
        script = (
            exports(values)
            + "snapshot before\nmodule load deepep\nsnapshot loaded\nmodule unload deepep\nsnapshot after\n"
        )
        session = generation.run(name, script, driver=driver)
        states = session.environments
        assert states["loaded"].get("DEEPEP_STACK") == record.stack, session.err
        assert differences(states["before"], states["after"]) == {}
        for variable, value in modulefiles.variables(record):
            assert states["loaded"].get(variable) == (value or None)
        for lead in modulefiles.lists(record):
            if lead.entries and (driver or not lead.driver_only):
                first = states["loaded"][lead.name].split(":")[: len(lead.entries)]
                assert tuple(first) == lead.entries
            held = [item.rstrip("/") for item in states["before"].get(lead.name, "").split(":")]
            if lead.last and lead.last not in held:
                assert states["loaded"][lead.name].split(":")[-1] == lead.last

    restores()


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(value=TEXT.filter(lambda text: text and text.isascii()))
def test_values_arrive_to_the_letter(value: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    prefix = tmp_path_factory.mktemp("prefix")
    generation = Generation(prefix, support.record(str(prefix), environment={"NCCL_IB_TC": value}))
    for name in SYSTEMS:
        session = generation.run(name, "module load deepep\nsnapshot loaded\n")
        assert session.environments["loaded"].get("NCCL_IB_TC") == value, session.err
    session = generation.run("", f". {prefix}/current/env.sh\nsnapshot loaded\n")
    assert session.environments["loaded"].get("NCCL_IB_TC") == value, session.err


LIST = "LD_LIBRARY_PATH"


@pytest.mark.parametrize("before", [None, "", "/a:/a::/b"])
def test_entries_added_while_loaded_stay(variant: str, before: str | None, tmp_path: Path) -> None:
    generation = Generation(tmp_path, pushenv=not variant.endswith("without pushenv"))
    prior = {} if before is None else {LIST: before}
    change = f'export {LIST}="/front:/front:${LIST}:/back"'
    session = generation.run(
        variant, f"{exports(prior)}module load deepep\n{change}\nmodule unload deepep\nsnapshot after\n"
    )
    expected = f"/front:/front:{before}:/back" if before else "/front:/front:/back"
    assert session.environments["after"][LIST] == expected


@pytest.mark.parametrize("before", ["/usr/bin:/bin", "/usr/sbin:/usr/bin:/bin", "/usr/bin:/usr/sbin/:/bin"])
def test_system_tools_of_the_users_own_stay(variant: str, before: str, tmp_path: Path) -> None:
    # Without what this file had made of PATH, entries are taken out one by one: /usr/sbin only where it came with the
    # module.
    record = support.v2_record(str(tmp_path))
    generation = Generation(tmp_path, record, pushenv=not variant.endswith("without pushenv"))
    change = 'export PATH="${PATH%%:*}:/new:${PATH#*:}"'
    session = generation.run(
        variant, f"export PATH={before}\nmodule load deepep\n{change}\nmodule unload deepep\nsnapshot after\n"
    )
    found = [item.rstrip("/") for item in session.environments["after"]["PATH"].split(":")]
    assert found == ["/new", *(item.rstrip("/") for item in before.split(":"))]


def test_ours_removed_by_hand_meanwhile(variant: str, tmp_path: Path) -> None:
    generation = Generation(tmp_path, pushenv=not variant.endswith("without pushenv"))
    session = generation.run(
        variant, f"export {LIST}=/a\nmodule load deepep\nexport {LIST}=/other\nmodule unload deepep\nsnapshot after\n"
    )
    assert session.code == 0
    assert session.environments["after"][LIST] == "/other"


def test_default_is_the_offers(system: str, generation: Generation) -> None:
    session = generation.run(system, 'module load deepep || exit\necho "$LOADEDMODULES"\n')
    assert (session.code, session.out.strip()) == (0, "deepep/1.2.1-8a07e7e-v1")


def test_default_may_be_the_other(system: str, tmp_path: Path) -> None:
    prefix = str(tmp_path)
    generation = Generation(tmp_path, support.external_record(prefix), support.record(prefix))
    session = generation.run(system, 'module load deepep || exit\necho "$LOADEDMODULES"\n')
    assert (session.code, session.out.strip()) == (0, "deepep/1.2.1-8a07e7e-v1-cu13")


def test_each_system_lists_a_stack_once(system: str, generation: Generation) -> None:
    session = generation.run(system, "module -t avail deepep 2>&1\n")
    found = sorted(
        word
        for line in session.out.splitlines()
        for word in [line.split("(")[0].strip()]
        if word.startswith("deepep/1")
    )
    assert found == ["deepep/1.2.1-8a07e7e-v1", "deepep/1.2.1-8a07e7e-v1-cu13"]
    assert "lua" not in session.out.replace(str(generation.prefix), "")


def test_a_stacks_own_name_stays_when_versions_change(system: str, tmp_path: Path) -> None:
    records = [support.record(str(tmp_path)), support.external_record(str(tmp_path)), support.v2_record(str(tmp_path))]
    generation = Generation(tmp_path, *records)
    for record in records:
        session = generation.run(system, f'module load deepep/{record.stack} || exit\necho "$LOADEDMODULES"\n')
        assert (session.code, session.out.strip()) == (0, record.module), session.err
    session = generation.run(system, "module load deepep/v3 || exit 7\n")
    assert session.code == 7, "no such stack"
    # A script of a user names the stack; a new pin gives another modulefile under the same name.
    newer = support.external_record(str(tmp_path / "newer"), module="deepep/1.3.0-0123abc-v1-cu13")
    generation = Generation(tmp_path / "newer", support.record(str(tmp_path / "newer")), newer)
    session = generation.run(system, 'module load deepep/v1-cu13 || exit\necho "$LOADEDMODULES"\n')
    assert (session.code, session.out.strip()) == (0, "deepep/1.3.0-0123abc-v1-cu13"), session.err


HELP = TESTS / "golden" / "module-help.txt"


def test_what_module_help_says(system: str, tmp_path: Path) -> None:
    prefix = str(tmp_path)
    records = [
        support.record(prefix, site=SiteSettings(contact="https://help.example.org")),
        support.external_record(prefix),
        support.v2_record(prefix),
    ]
    generation = Generation(tmp_path, *records)
    said = generation.run(system, "".join(f"module help deepep/{each.stack} 2>&1\n" for each in records)).out
    framed = [line for line in said.splitlines() if line.strip() and not line.startswith("---")]
    found = "\n".join(line for line in framed if not line.startswith("Module Specific Help")) + "\n"
    assert found == HELP.read_text(encoding="utf-8"), said


def test_help_and_whatis(system: str, generation: Generation) -> None:
    session = generation.run(system, "module help deepep 2>&1\nmodule whatis deepep 2>&1\nmodule show deepep 2>&1\n")
    assert "expert-parallel" in session.out
    assert "NVSHMEM 3.4.5" in session.out
    assert "__DEEPEP" not in session.out


def test_loading_twice_changes_nothing(variant: str, tmp_path: Path) -> None:
    generation = Generation(tmp_path, pushenv=not variant.endswith("without pushenv"))
    loads = (
        "module load deepep\nsnapshot once\nmodule load deepep\nsnapshot twice\nmodule unload deepep\nsnapshot after\n"
    )
    session = generation.run(variant, f"export {LIST}=/a:/a: CUDA_HOME=\nsnapshot before\n{loads}")
    states = session.environments
    assert differences(states["once"], states["twice"]) == {}
    assert differences(states["before"], states["after"]) == {}


@pytest.mark.parametrize("driver", [False, True])
def test_stacks_exclude_each_other(variant: str, driver: bool, tmp_path: Path) -> None:
    generation = Generation(tmp_path, pushenv=not variant.endswith("without pushenv"))
    other = "deepep/1.2.1-8a07e7e-v1-cu13"
    # Lmod changes versions by itself, Environment Modules asks for `module switch`.
    change = (
        f"module load {other}"
        if variant == "lmod"
        else f"module load {other} && exit 7\nsnapshot refused\nmodule switch deepep {other}"
    )
    prior = exports({LIST: "/a:/a:", "CUDA_HOME": "", "NVSHMEM_IB_GID_INDEX": "9", "PYTHONPATH": ""})
    script = (
        f"{prior}snapshot before\nmodule load deepep\nsnapshot first\n{change}\nsnapshot second\nmodule unload "
        f"deepep\nsnapshot after\n"
    )
    session = generation.run(variant, script, driver=driver)
    states = session.environments
    assert session.code == 0, session.err
    assert states.get("refused", states["first"]) == states["first"]
    record = support.external_record(str(tmp_path))
    for name, value in modulefiles.variables(record):
        assert states["second"].get(name) == value
    assert states["second"]["PATH"] == f"{tmp_path}/bin:{states['before']['PATH']}"
    assert ("LD_PRELOAD" in states["second"]) == driver
    assert states["second"][LIST].startswith(f"{tmp_path}/store/{record.nvshmem}/lib:")
    assert states["second"][LIST].count("/store/") == 2
    assert differences(states["before"], states["after"]) == {}


class Machines(Generation):
    """A prefix with builds for x86_64 and for aarch64."""

    def __init__(self, prefix: Path, variant: str) -> None:
        super().__init__(
            prefix, *support.offers_of_machines(str(prefix)).stacks.values(), pushenv="without" not in variant
        )
        (prefix / "session").mkdir()

    def on(self, machine: str) -> str:
        return module_systems.on_machine(self.prefix / "session", machine)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_each_kind_of_machine_gets_its_own(variant: str, machine: str, tmp_path: Path) -> None:
    generation = Machines(tmp_path, variant)
    record = {"x86_64": support.v2_record, "aarch64": support.grace_record}[machine](str(tmp_path))
    script = generation.on(machine) + exports({LIST: "/a:/a:", "EP_NIC_NAME": ""})
    script += "snapshot before\nmodule load deepep\nsnapshot loaded\nmodule unload deepep\nsnapshot after\n"
    session = generation.run(variant, script, host="tray2")
    states = session.environments
    assert session.code == 0, session.err
    assert states["loaded"]["DEEPEP_PYTHON"] == f"{tmp_path}/store/{record.python}/bin/python"
    assert states["loaded"]["EP_NIC_NAME"] == ("mlx5_1" if machine == "aarch64" else "mlx5_0")
    others = {"x86_64": support.grace_record, "aarch64": support.v2_record}[machine](str(tmp_path))
    assert not [name for name, value in states["loaded"].items() if others.python in value or others.deepep in value]
    assert differences(states["before"], states["after"]) == {}
    shell = f"{generation.on(machine)}. {tmp_path}/current/env.sh\nsnapshot loaded\n"
    loaded = generation.run("", shell, host="tray2").environments["loaded"]
    assert loaded["DEEPEP_PYTHON"] == f"{tmp_path}/store/{record.python}/bin/python"


def test_an_unload_on_another_kind_of_machine_takes_out_what_the_load_put_in(variant: str, tmp_path: Path) -> None:
    # sbatch takes the environment of an x86_64 login host along to a Grace node.
    generation = Machines(tmp_path, variant)
    script = generation.on("x86_64") + exports({LIST: "/a"}) + "snapshot before\nmodule load deepep\n"
    script += f"{generation.on('aarch64')}module unload deepep\nsnapshot after\nmodule load deepep\nsnapshot there\n"
    states = generation.run(variant, script, host="tray1").environments
    left = {name for name in differences(states["before"], states["after"]) if name != "PATH"}
    assert left == set()
    assert "/store/" not in states["after"]["PATH"]
    assert states["there"]["DEEPEP_PYTHON"].split("/")[-3] == support.grace_record().python


@pytest.mark.parametrize(
    ("machine", "module", "said"),
    [
        ("riscv64", "deepep", "is built for x86_64 and aarch64, and this machine is riscv64: load it in a job there"),
        (
            "aarch64",
            "deepep/v1",
            "is built for x86_64, and this machine is aarch64: deepep/2.1.0-dd758ca-v2 is for aarch64",
        ),
    ],
)
def test_a_machine_without_a_build_is_told_and_gets_nothing(
    system: str, machine: str, module: str, said: str, tmp_path: Path
) -> None:
    generation = Machines(tmp_path, system)
    session = generation.run(system, f"{generation.on(machine)}module load {module}\nsnapshot after\n")
    assert said in " ".join((session.out + session.err).split()), session
    assert not {"DEEPEP_PREFIX", "NVSHMEM_DIR", "__DEEPEP_SET_MACHINE"} & set(session.environments["after"])
    env = "env.sh" if module == "deepep" else "env-v1.sh"
    session = generation.run("", f"{generation.on(machine)}. {tmp_path}/current/{env} || exit 9\n")
    assert (session.code, said in session.err) == (9, True), session


def test_v1_and_v2_side_by_side(variant: str, tmp_path: Path) -> None:
    v1, v2 = support.record(str(tmp_path)), support.v2_record(str(tmp_path))
    generation = Generation(tmp_path, v1, v2, pushenv=not variant.endswith("without pushenv"))
    switch = "module load {0}" if variant == "lmod" else "module load {0} && exit 7\nmodule switch deepep {0}"
    script = exports({"EP_JIT_CACHE_DIR": "/home/me/.deep_ep", "EP_SUPPRESS_NCCL_CHECK": "1", "EP_NIC_NAME": ""})
    script += "snapshot before\nmodule load deepep\nsnapshot v1\n"
    script += (
        f"{switch.format(v2.module)}\nsnapshot v2\n{switch.format(v1.module)}\nsnapshot again\nmodule unload "
        f"deepep\nsnapshot after\n"
    )
    session = generation.run(variant, script)
    states = session.environments
    assert session.code == 0, session.err
    for name, value in modulefiles.variables(v2):
        assert states["v2"].get(name) == (value or None)
    cache = Path(states["v2"]["EP_JIT_CACHE_DIR"])
    assert re.fullmatch(
        rf"deepep-{os.getuid()}\.\w{{10}}/jit-{v2.deepep[:12]}", str(cache.relative_to(tmp_path / "session"))
    )
    assert [path.stat().st_mode & 0o777 for path in (cache, cache.parent)] == [0o700, 0o700]
    assert states["v2"][LIST].split(":")[0] == f"{modulefiles.nccl_folder(v2)}/lib"
    assert states["v2"][LIST].count("/store/") == 2
    assert states["v1"]["EP_JIT_CACHE_DIR"] == states["again"]["EP_JIT_CACHE_DIR"] == "/home/me/.deep_ep"
    assert differences(states["v1"], states["again"]) == {}
    assert differences(states["before"], states["after"]) == {}


CACHES = dict(modulefiles.OTHER_CACHES)


@pytest.mark.parametrize("kind", ["store", "v2"])
def test_caches_of_others_leave_a_home_on_a_network_filesystem(variant: str, kind: str, tmp_path: Path) -> None:
    record = RECORDS[kind](str(tmp_path))
    generation = Generation(tmp_path, record, pushenv=not variant.endswith("without pushenv"))
    home = tmp_path / "home"
    home.mkdir()
    users = "".join(
        f"(export {name}=/mine; module load deepep; snapshot {name}; module unload deepep; snapshot {name}-after)\n"
        for name in CACHES
    )
    loads = "snapshot before\nmodule load deepep\nsnapshot loaded\nmodule unload deepep\nsnapshot after\n"
    here = "export TRITON_CACHE_DIR=\n" + module_systems.on_network_fs(tmp_path, str(home)) + loads
    states = generation.run(variant, here + users).environments
    ours = {"EP_JIT_CACHE_DIR"} if record.nccl else set()
    base = Path(states["loaded"]["DG_JIT_CACHE_DIR"]).parent
    assert re.fullmatch(rf"deepep-{os.getuid()}\.\w{{10}}/caches", str(base.relative_to(tmp_path / "session")))
    for name in CACHES.keys() - ours:
        assert states["loaded"][name] == f"{base}/{CACHES[name]}", name
        assert (states[name][name], states[f"{name}-after"][name]) == ("/mine", "/mine"), name
        moved = {other: states[name].get(other) for other in CACHES.keys() - ours - {name}}
        assert moved == {other: f"{base}/{CACHES[other]}" for other in moved}, name
    for name in ours:
        assert states["loaded"][name] == f"{base.parent}/{modulefiles.jit_cache(record)}"
    assert differences(states["before"], states["after"]) == {}


def test_caches_of_others_stay_in_a_home_on_the_node(variant: str, generation: Generation) -> None:
    states = generation.run(variant, "module load deepep\nsnapshot loaded\n").environments
    assert not CACHES.keys() & states["loaded"].keys()


@pytest.mark.parametrize("kind", ["store", "v2"])
def test_settings_alone_bring_no_deep_ep_and_no_library(variant: str, kind: str, tmp_path: Path) -> None:
    record = RECORDS[kind](str(tmp_path))
    generation = Generation(tmp_path, record, pushenv=not variant.endswith("without pushenv"))
    given = exports({LIST: "/a::/a:", "CUDA_HOME": "", "NCCL_IB_TC": "7", "EP_SUPPRESS_NCCL_CHECK": "1"})
    home = tmp_path / "home"
    home.mkdir()
    loads = "snapshot before\nmodule load deepep-env\nsnapshot loaded\nmodule unload deepep-env\nsnapshot after\n"
    session = generation.run(variant, module_systems.on_network_fs(tmp_path, str(home)) + given + loads)
    states = session.environments
    loaded = states["loaded"]
    wanted = {"DEEPEP_PREFIX": str(tmp_path), "CUDA_HOME": record.cuda_home, **record.environment}
    assert {name: loaded.get(name, "") for name in wanted} == wanted, session.err
    assert {name: loaded.get(name) for name in offer.LISTS} == {
        name: states["before"].get(name) for name in offer.LISTS
    }
    assert all(name in loaded for name in CACHES), "also V2's own: whose deep_ep it will be is not known"
    changed = differences(states["before"], loaded).keys() - wanted.keys() - CACHES.keys()
    assert all(name.startswith("__DEEPEP_") for name in changed), changed
    assert differences(states["before"], states["after"]) == {}


@pytest.mark.parametrize(("first", "second"), [("deepep", "deepep-env"), ("deepep-env", "deepep")])
def test_settings_and_the_full_module_exclude_each_other(variant: str, first: str, second: str, tmp_path: Path) -> None:
    generation = Generation(tmp_path, pushenv=not variant.endswith("without pushenv"))
    script = (
        f"export {LIST}=/a:/a: NVSHMEM_IB_GID_INDEX=9\nsnapshot before\nmodule load {first}\nsnapshot first\n"
        f"module load {second} && exit 7\nsnapshot refused\n"
        f"module switch {first} {second}\nsnapshot second\nmodule unload {second}\nsnapshot after\n"
    )
    session = generation.run(variant, script)
    states = session.environments
    assert (session.code, states["refused"]) == (0, states["first"]), session.err
    full = {"deepep": states["first"], "deepep-env": states["second"]} if first == "deepep" else {}
    full = full or {"deepep-env": states["first"], "deepep": states["second"]}
    assert ("DEEPEP_STACK" in full["deepep"], "DEEPEP_STACK" in full["deepep-env"]) == (True, False)
    assert full["deepep-env"]["NVSHMEM_IB_GID_INDEX"] == "3"
    assert full["deepep-env"][LIST] == "/a:/a:"
    assert differences(states["before"], states["after"]) == {}


def test_another_deep_ep_and_another_nccl_are_told_at_the_load(
    variant: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    record = support.v2_record(str(tmp_path))
    generation = Generation(tmp_path, record, pushenv=not variant.endswith("without pushenv"))
    site = tmp_path_factory.mktemp("venv") / "lib" / "python3.12" / "site-packages"
    (site / "deep_ep").mkdir(parents=True)
    (site / "nvidia" / "nccl" / "lib").mkdir(parents=True)
    (site / "nvidia" / "nccl" / "lib" / "libnccl.so.2").touch()
    quiet = generation.run(variant, "module load deepep\nsnapshot loaded\n")
    assert ("deep_ep in" in quiet.err, quiet.environments["loaded"]["DEEPEP_STACK"]) == (False, "v2"), quiet.err
    venv = f"export VIRTUAL_ENV={site.parents[2]} PATH={site.parents[2]}/bin:$PATH\n"
    told = generation.run(variant, f"{venv}module load deepep\nsnapshot loaded\nmodule unload deepep\n")
    lines = [line for line in told.err.splitlines() if line.startswith("deepep: ")]
    assert len(lines) == 2, told.err
    assert lines[0].startswith(f"deepep: a Python with the NCCL in {site} would load this module's too")
    assert lines[1].startswith(f"deepep: the deep_ep in {site} is hidden by the one of {record.module}")
    assert all(line.endswith("module load deepep-env/v2") for line in lines)
    assert told.environments["loaded"]["DEEPEP_STACK"] == "v2", "it is told, and loaded all the same"
    settings_only = generation.run(variant, f"{venv}module load deepep-env\n")
    assert "deep_ep in" not in settings_only.err, settings_only.err


def test_purge_restores_too(system: str, generation: Generation) -> None:
    session = generation.run(
        system, f"export {LIST}=/a:/a:\nsnapshot before\nmodule load deepep\nmodule purge\nsnapshot after\n"
    )
    assert differences(session.environments["before"], session.environments["after"]) == {}


def test_preload_leaves_with_the_driver(variant: str, tmp_path: Path) -> None:
    record = support.external_record(str(tmp_path))
    generation = Generation(tmp_path, record, pushenv=not variant.endswith("without pushenv"))
    # What a job inherits from a node with a driver has to go on a node without one as well.
    script = (
        "export LD_PRELOAD=/mine.so\nmodule load deepep\nsnapshot loaded\numount /proc/driver\nmodule unload "
        "deepep\nsnapshot after\n"
    )
    states = generation.run(variant, script, driver=True).environments
    assert states["loaded"]["LD_PRELOAD"] == f"{tmp_path}/store/{record.nvshmem}/lib/libnvshmem_host.so.3:/mine.so"
    assert states["after"]["LD_PRELOAD"] == "/mine.so"


def test_no_directory_of_a_system_library(generation: Generation) -> None:
    # libibverbs of a vendor directory and the system's providers do not fit: only directories of the store may come in
    # front.
    added: Iterator[str] = (
        item for record in RECORDS.values() for lead in modulefiles.lists(record("/p")) for item in lead.entries
    )
    assert all(
        lead.last in {"", "/usr/sbin"} for record in RECORDS.values() for lead in modulefiles.lists(record("/p"))
    )
    assert all(entry.startswith("/p/store/") or entry in {"/p/tuning/python", "/p/bin"} for entry in added)
