"""Files that users load: modulefiles, env.sh and sbatch files of a generation, rendered from the offer and
the templates of env/templates.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

import jinja2
from jinja2 import Environment, Template
from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory.network_env import HANDLER, MAP
from deepep_bootstrap.prefix import test_kinds
from deepep_bootstrap.prefix.offer import X86, Offer, StackRecord, check_offer, offer_digest, offer_document
from deepep_bootstrap.prefix.test_kinds import COPIED, END_MARGIN, KINDS, Kind, Pass

PROGRAM = "deepep-bootstrap"
SUMMARY = "DeepEP: expert-parallel dispatch and combine for mixture-of-experts models"

ENVIRONMENT_SUMMARY = "Network settings for a DeepEP that you bring: SGLang's own, a wheel, a container"

SYSTEM_TOOLS = "/usr/sbin"
"""Where distributions have ibstat, which DeepEP V2 runs; Debian and Ubuntu leave this folder out of the PATH of
ordinary users."""


OTHER_CACHES = {
    "DG_JIT_CACHE_DIR": "deep_gemm",  # DeepGEMM, csrc/jit/compiler.hpp: $HOME/.deep_gemm
    "TRITON_CACHE_DIR": "triton",  # Triton, triton/knobs.py: ~/.triton/cache
    "TVM_FFI_CACHE_DIR": "tvm-ffi",  # TVM-FFI, tvm_ffi/cpp/extension.py: ~/.cache/tvm-ffi
    "EP_JIT_CACHE_DIR": "deep_ep",  # a DeepEP V2 of the user's own: $HOME/.deep_ep, from 2.5 on $HOME/.dj
    "DJ_JIT_CACHE_DIR": "deep_jit",  # DeepJIT, cache/disk.hpp, which DG_ and EP_ fall back to: $HOME/.dj
}
"""Where programs beside ours keep what they compile: the variable and our name of the folder. Each default lies in
HOME, where many processes that write at once break on a network filesystem (DeepEP 683, DeepGEMM 301)."""


SHM_MIB = 1024
"""What the ranks of a node need in /dev/shm; plan.host_recipes asks for the same."""


class File(Struct, frozen=True):
    """One file of a generation: its bytes, and whether it may be run."""

    content: bytes
    executable: bool = False


class Lead(Struct, frozen=True):
    """Entries put in front of a path list; `driver_only`: on nodes with the NVIDIA driver alone. `last`: one that is
    put behind all others where the list does not have it yet."""

    name: str
    entries: tuple[str, ...]
    driver_only: bool = False
    last: str = ""


def render_offer(offer: Offer, templates: Mapping[str, str]) -> dict[str, File]:
    """Return the files of a generation by their path inside it.

    `templates` are the texts of env/ by path. Every value that could not be written safely into a modulefile, a
    shell script or an #SBATCH line is named in one Trouble; nothing is rendered then.
    """
    problems = tuple(check_offer(offer))
    if problems:
        raise Trouble(*problems)
    jinja, table = environment(templates), test_kinds.read_passes(templates)
    files: dict[str, File] = {}
    for key, record in sorted(offer.stacks.items()):
        files |= _render_tests(jinja, record, table, folder=f"sbatch/{key}")
        files[f"slurm/deepep-health-{key}.sh"] = _render_health(jinja, record)
        files |= _render_module(jinja, record, offer) | _render_module(jinja, record, offer, alone=True)
    chosen = offer.stacks[offer.default_stack]
    files["env.sh"] = files[f"env-{chosen.stack}.sh"]
    files["deepep-env.sh"] = files[f"deepep-env-{chosen.stack}.sh"]
    files["slurm/deepep-health.sh"] = files[f"slurm/deepep-health-{chosen.key}.sh"]
    files["bin/deepep-env-file"] = _render_environment_file(jinja, offer)
    for kind in kinds_of(chosen):
        files[f"sbatch/{_file_name(kind.name)}"] = files[f"sbatch/{chosen.key}/{_file_name(kind.name)}"]
    files |= {
        path: File(text.encode(), text.startswith("#!")) for path, text in templates.items() if path.startswith(COPIED)
    }
    return files | _names_of_modules(offer)


def _names_of_modules(offer: Offer) -> dict[str, File]:
    """Return the two files that give modules further names: the default, and each stack's own, which stays when
    versions change. Lmod reads the first, Environment Modules the second."""
    names = {"default": offer.stacks[offer.default_stack].module}
    for _, record in sorted(offer.stacks.items()):
        names.setdefault(record.stack, record.module)
    lua = [_header("-- "), *(f'module_version("{module}", "{name}")' for name, module in names.items())]
    tcl = ["#%Module1.0", _header("# "), *(f"module-version {module} {name}" for name, module in names.items())]
    settings = f"deepep-env/{offer.stacks[offer.default_stack].stack}"
    return {
        "modulefiles/deepep/.modulerc.lua": File("\n".join([*lua, ""]).encode()),
        "modulefiles/deepep/.modulerc": File("\n".join([*tcl, ""]).encode()),
        "modulefiles/deepep-env/.modulerc.lua": File(
            "\n".join([lua[0], f'module_version("{settings}", "default")', ""]).encode()
        ),
        "modulefiles/deepep-env/.modulerc": File(
            "\n".join([*tcl[:2], f"module-version {settings} default", ""]).encode()
        ),
    }


def manifest(
    offer: Offer,
    *,
    generation: int,
    created: str,
    by: str,
    lock_digest: str,
    hosts: tuple[str, ...],
    records: Mapping[str, str] | None = None,
) -> str:
    """Return the text of a generation's manifest.json; `created` is a UTC time in ISO 8601, `by` who or what made
    it, `records` the SHA-256 of the record of each entry's files."""
    document = {
        "schema": 1,
        "generation": generation,
        "created": created,
        "by": by,
        "lock_digest": lock_digest,
        "offer": offer_document(offer),
        "offer_digest": offer_digest(offer),
        "hosts": list(hosts),
        "records": dict(records or {}),
    }
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


def lists(record: StackRecord) -> tuple[Lead, ...]:
    """Return what a stack puts in front of each path list, in the order of LISTS; a list it leaves alone has no
    entries.

    The prefix's own commands (deepep-venv) are on PATH. An environment of ours comes before them and holds our NVSHMEM
    in place of torch's. Somebody else's stays as it is: DeepEP joins by PYTHONPATH, and a library of ours by
    LD_PRELOAD, since torch would bring its own otherwise: V1's NVSHMEM, and V2's NCCL where it was asked for. V2
    without that works with what torch brings, and nothing is preloaded. NCCL opens gIB's plugin by name.
    """
    nvshmem = f"{nvshmem_folder(record)}/lib"
    gdrcopy = (f"{entry(record, record.gdrcopy)}/lib",) if record.gdrcopy else ()
    # A site's own NCCL on this list, gIB's too, would win over the one that V2 was built with.
    nccl = (f"{nccl_folder(record)}/lib",) if record.nccl else ()
    # V2.5 has no use for NVSHMEM, and torch opens its own by path.
    ours = () if record.is_v25 else (nvshmem,)
    libraries = (*nccl, *ours, *gdrcopy, *filter(None, (gib_libraries(record),)))
    return (
        Lead(
            "PATH",
            (*((f"{entry(record, record.python)}/bin",) if record.python else ()), f"{record.prefix}/bin"),
            last=SYSTEM_TOOLS if record.nccl else "",
        ),
        Lead("PYTHONPATH", (f"{entry(record, record.deepep)}/lib/python", tuned_folder(record))),
        Lead("LD_LIBRARY_PATH", libraries),
        Lead("LD_PRELOAD", preloaded(record), driver_only=bool(preloaded(record))),
    )


def preloaded(record: StackRecord) -> tuple[str, ...]:
    """Return the libraries that are to be in a process before torch opens its own ones."""
    if record.own_nccl:
        return (f"{nccl_folder(record)}/lib/libnccl.so.2",)
    if record.python or record.nccl:
        return ()
    return (f"{nvshmem_folder(record)}/lib/libnvshmem_host.so.3",)


def variables(record: StackRecord) -> tuple[tuple[str, str], ...]:
    """Return the variables a stack sets, in order; an empty value says that the variable is unset while the module
    is loaded."""
    nvshmem = nvshmem_folder(record)
    ours = {
        "DEEPEP_PREFIX": record.prefix,
        "DEEPEP_STACK": record.stack,
        "DEEPEP_TESTS": f"{entry(record, record.deepep)}/tests",
        "DEEPEP_PYTHON": interpreter(record),
        **({} if record.is_v25 else {"NVSHMEM_DIR": nvshmem, "NVSHMEM_HOME": nvshmem}),
    }
    cuda_home = cuda_folder(record)
    toolkit = {"CUDA_HOME": cuda_home} if cuda_home else {}
    second = {"EP_NCCL_ROOT_DIR": nccl_folder(record)} if record.nccl else {}
    if second and not record.is_v25:
        second["EP_NVSHMEM_ROOT_DIR"] = nvshmem
    compiler = {"EP_JIT_NVCC_COMPILER": f"{cuda_home}/bin/nvcc"} if record.nccl and cuda_home else {}
    return (*ours.items(), *toolkit.items(), *second.items(), *compiler.items(), *record.environment.items())


def cuda_folder(record: StackRecord) -> str:
    """Return where the toolkit is that programs of a stack find: the hosts', else the one that came along, which makes
    kernels and nothing else; "" for none."""
    return record.cuda_home or (entry(record, record.toolkit) if record.toolkit else "")


def nccl_folder(record: StackRecord) -> str:
    """Return where the NCCL of DeepEP V2 is (include, lib): in an entry of its own, beside the torch of an external
    Python, or in the stack's own Python environment."""
    if record.own_nccl or record.torch_nccl:
        return entry(record, record.own_nccl) if record.own_nccl else record.torch_nccl
    minor = ".".join(record.python_version.split(".")[:2])
    return f"{entry(record, record.python)}/lib/python{minor}/site-packages/nvidia/nccl"


def nvshmem_folder(record: StackRecord) -> str:
    """Return where NVSHMEM is (include, lib): in its entry, or beside the torch of an external Python."""
    return entry(record, record.nvshmem) if record.nvshmem else record.torch_nvshmem


def nvshmem_version(record: StackRecord) -> str:
    """Return the version of NVSHMEM."""
    return _version_of(record.nvshmem) or record.nvshmem_version


def jit_cache(record: StackRecord) -> str:
    """Return the name of the folder where DeepEP V2 keeps compiled kernels, below the user's own folder of each node;
    "" for V1. It is never shared by two builds, since V2's own key leaves out what its headers say.

    env/templates/cache.sh.j2 finds or makes the user's folder, for modulefiles, env.sh and sbatch files alike: other
    programs' caches get a name beside this one.
    """
    return f"jit-{record.deepep[:12]}" if record.nccl else ""


def caches(*, with_v2: bool) -> tuple[str, ...]:
    """Return the caches of other programs as words for `_deepep_caches`: NAME=FOLDER. A DeepEP V2 of the module's has
    its own (`jit_cache`)."""
    return tuple(f"{k}={v}" for k, v in OTHER_CACHES.items() if not (with_v2 and k == "EP_JIT_CACHE_DIR"))


def host_groups(record: StackRecord) -> tuple[tuple[tuple[str, ...], tuple[tuple[str, str], ...]], ...]:
    """Return the hosts (short names) that share values, with every variable that differs between hosts; "" where a
    host has none."""
    names = host_variables(record)
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for host, values in sorted(record.by_host.items()):
        groups.setdefault(tuple((name, values.get(name, "")) for name in names), []).append(host)
    return tuple((tuple(hosts), values) for values, hosts in groups.items())


def host_variables(record: StackRecord) -> tuple[str, ...]:
    """Return the names of the variables that differ between hosts, in order."""
    return tuple(dict.fromkeys(name for values in record.by_host.values() for name in values))


def by_variable(record: StackRecord) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """Return the variables that differ between hosts, each with the hosts (short names) that have a value, and the
    value."""
    hosts = sorted(record.by_host.items())
    return tuple(
        (name, tuple((host, values[name]) for host, values in hosts if name in values))
        for name in host_variables(record)
    )


def gib_libraries(record: StackRecord) -> str:
    """Return the directory of gIB's NCCL plugin, which lies beside its scripts; "" without gIB."""
    return str(PurePosixPath(record.gib).parent.parent / "lib64") if record.gib else ""


def tuned_folder(record: StackRecord) -> str:
    """Return where `deepep_tuned` lies once a tuning run was kept. It costs an import nothing while it is not there."""
    return f"{record.prefix}/tuning/python"


def kinds_of(record: StackRecord) -> tuple[Kind, ...]:
    """Return the kinds of tests that a stack has."""
    return tuple(kind for kind in KINDS.values() if kind.run_for(record))


def entry(record: StackRecord, name: str) -> str:
    """Return the absolute path of a store entry."""
    return f"{record.prefix}/store/{name}"


def interpreter(record: StackRecord) -> str:
    """Return the Python a stack runs with: the store's, or the external one."""
    return f"{entry(record, record.python)}/bin/python" if record.python else record.external_python


def _file_name(kind: str) -> str:
    return f"{kind}-test.sbatch"


def _header(comment: str) -> str:
    return (
        f"{comment}Generated by {PROGRAM}; do not edit: change the lock, the hosts file or env/ and run bootstrap "
        f"again."
    )


def _render_module(jinja: Environment, record: StackRecord, offer: Offer, *, alone: bool = False) -> dict[str, File]:
    """Return the modulefiles and the env.sh of a module's name, which choose by `uname -m` among all records that have
    this name; where the whole offer is for x86_64, they do not ask. `alone`: those of `deepep-env`, a stack's settings
    for a DeepEP that the user brings; nothing that is built is in them, so their name has no version."""
    records = [one for _, one in sorted(offer.stacks.items())]
    if alone:
        records = [replace(one, module=f"deepep-env/{one.stack}") for one in records]
        record = replace(record, module=f"deepep-env/{record.stack}")
    named = [one for one in records if one.module == record.module]
    of_stack = [one for one in records if one.stack == record.stack]

    def fill(ending: str, settings: str, group: Sequence[StackRecord], *, script: bool = False) -> File:
        template = jinja.get_template(settings)
        values = _values_of_machines(template, group, records, script=script, alone=alone)
        return File(jinja.get_template(f"templates/{ending}").render(**values).encode())

    script = f"{'deepep-env' if alone else 'env'}-{record.stack}.sh"
    return {
        f"modulefiles/{record.module}.lua": fill("modulefile.lua.j2", "templates/settings.lua.j2", named),
        f"modulefiles/{record.module}": fill("modulefile.tcl.j2", "templates/settings.tcl.j2", named),
        script: fill("env.sh.j2", "templates/settings.sh.j2", of_stack, script=True),
    }


def _values_of_machines(
    settings: Template, group: Sequence[StackRecord], records: Sequence[StackRecord], *, script: bool, alone: bool
) -> dict[str, object]:
    """Return the values of a file for the records of `group`, one for each kind of machine: the first one's, and the
    `settings` of each as text. A `script` for the shell looks also at those lists that a record leaves alone."""

    def of_machine(one: StackRecord) -> dict[str, object]:
        if alone:
            return _values(one) | {"lists": ()} | _values_alone(one, script=script)
        return _values(one) | {"lists": tuple(item for item in lists(one) if item.entries or script)}

    bodies = [(machine_name(one), settings.render(**of_machine(one))) for one in group]
    dispatch = any(one.machine for one in records)
    shared = {
        **_no_machine(group, records),
        "help_text": help_text(group[0], [name for name, _ in bodies] if dispatch else ()),
        "gib": next((one.gib for one in group if one.gib), ""),
        "host_groups": tuple(each for one in group for each in host_groups(one)),
        "machines": bodies,
        "dispatch": dispatch,
    }
    return _values(group[0]) | shared | (_values_alone(group[0], script=script) if alone else {})


def _values_alone(record: StackRecord, *, script: bool) -> dict[str, object]:
    """Return what is another value where a stack's settings stand alone. A container may read the `script`, and has its
    toolkit elsewhere."""
    toolkit = {"CUDA_HOME": record.cuda_home} if record.cuda_home and not script else {}
    return {
        "alone": True,
        "name": "deepep-env",
        "version": record.stack,
        "summary": ENVIRONMENT_SUMMARY,
        "help_text": environment_help(record),
        "variables": (("DEEPEP_PREFIX", record.prefix), *record.environment.items(), *toolkit.items()),
        "cuda_folder": record.cuda_home if script else "",
        "jit_cache": "",
        "caches": caches(with_v2=False),
        "gib": "",
    }


def machine_name(record: StackRecord) -> str:
    """Return what `uname -m` says where a record's build runs."""
    return record.machine or X86


def _no_machine(same: Sequence[StackRecord], records: Sequence[StackRecord]) -> dict[str, str]:
    """Return what a module says on a machine for which it has no build: the text before and behind its kind."""
    kinds = [machine_name(one) for one in same]
    others = [f"{one.module} is for {machine_name(one)}" for one in records if machine_name(one) not in kinds]
    hint = "; ".join(others) or f"load it in a job there; sbatch files are in {same[0].prefix}/sbatch"
    return {
        "no_machine": f"{same[0].module} is built for {' and '.join(kinds)}, and this machine is ",
        "instead_of_it": f": {hint}",
    }


def _render_tests(jinja: Environment, record: StackRecord, table: Sequence[Pass], *, folder: str) -> dict[str, File]:
    """Return the sbatch files of a record."""
    files = {}
    for kind in kinds_of(record):
        more = _test_values(kind, record) | _pass_values(kind, record, table)
        text = jinja.get_template("templates/test.sbatch.j2").render(
            **_values(record), lists=lists(record), directives=tuple(_directives(kind, record)), **more
        )
        files[f"{folder}/{_file_name(kind.name)}"] = File(text.encode(), executable=True)
    return files


def _render_health(jinja: Environment, record: StackRecord) -> File:
    """Return the script that says on a node whether it is fit for a stack: for Slurm's prolog."""
    ports = {
        hosts: _ports(dict(values).get(MAP, "") or record.environment.get(MAP, ""))
        for hosts, values in host_groups(record)
    }
    everywhere = _ports(record.environment.get(MAP, ""))
    nics = [(hosts, found) for hosts, found in ports.items() if found]
    values = _values(record) | {
        "nics": nics or ([(("*",), everywhere)] if everywhere else []),
        "networked": bool(nics or everywhere),
        "doorbell": not record.environment.get(HANDLER, "").startswith("cpu"),
        "machine": machine_name(record),
        "shm_mib": SHM_MIB,
    }
    return File(jinja.get_template("templates/health.sh.j2").render(**values).encode(), executable=True)


def _ports(mapped: str) -> tuple[str, ...]:
    """Return the NICs of a map from GPU to NIC, each once: NIC:PORT."""
    return tuple(dict.fromkeys(each.partition(":")[2] for each in mapped.split(",") if each))


def _render_environment_file(jinja: Environment, offer: Offer) -> File:
    """Return the program that prints a host's settings as KEY=VALUE, the default stack's first."""
    keys = sorted(offer.stacks, key=lambda key: (key != offer.default_stack, key))
    dispatch = any(record.machine for record in offer.stacks.values())
    stacks = [
        {
            "stack": record.stack,
            "machine": machine_name(record) if dispatch else "*",
            "settings": _set_values(record.environment.items()),
            "groups": [(hosts, _set_values(values)) for hosts, values in host_groups(record)],
        }
        for record in map(offer.stacks.__getitem__, keys)
    ]
    names = tuple(dict.fromkeys(offer.stacks[key].stack for key in keys))
    text = jinja.get_template("templates/env-file.sh.j2").render(header=_header, stacks=stacks, names=names)
    return File(text.encode(), executable=True)


def _set_values(values: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return NAME=VALUE of the variables that have a value."""
    return tuple(f"{name}={value}" for name, value in values if value)


def _test_values(kind: Kind, record: StackRecord) -> dict[str, object]:
    run = kind.run_for(record)
    if run is None:
        raise ValueError(f"stack {record.stack} has no {kind.name} test")
    variables = record.by_kind.get(run.variables or kind.name, {})
    # What V2 needs on one node is another question than what it needs among nodes: the user decides about that with -N.
    alone = record.by_kind.get("intranode", {}) if record.nccl and not run.variables and kind.most != 1 else {}
    # Upstream's tests start eight processes by themselves, ours one for each GPU.
    processes = ("--num-processes", str(record.gpus)) if record.gpus and not kind.ours else ()
    return {
        "kind": kind,
        "script_name": run.script,
        "always": shlex.join((*processes, *run.always)),
        "instead": shlex.join(run.instead),
        "kind_variables": tuple(variables.items()),
        "alone_variables": tuple(alone.items()),
        "endless_seconds": kind.minutes * 60 - END_MARGIN,
    }


def _pass_values(kind: Kind, record: StackRecord, table: Sequence[Pass]) -> dict[str, object]:
    """Return the passes of a kind that a stack's GPUs can have, and the compute capability that decides about them
    where it is the same for all of these GPUs; else they are asked when the test runs."""
    own = tuple(one for one in table if one.kind == kind.name and any(map(one.is_for, record.archs)))
    capability = test_kinds.common_capability(own, record.archs) if own else ""
    options = " ".join(one.option for one in own)
    return {"passes": options, "shown_passes": own, "capability": capability, "asks_gpus": bool(own) and not capability}


def help_text(record: StackRecord, machines: Sequence[str] = ()) -> str:
    """Return what `module help` says: what is in the module, and what a user does with it. `machines` are the kinds
    that each have a build of their own, where that is to be said."""
    kinds = ", ".join(kind.name for kind in kinds_of(record))
    tuned = "none are needed: DeepEP V2 computes them" if record.nccl else "import deepep_tuned"
    parts = {
        SUMMARY: (", ".join(_contents(record)),),
        **({"Kinds of machine, each with a build of its own": (", ".join(machines),)} if machines else {}),
        "The name that stays when versions change": (f"deepep/{record.stack}, now {record.module}",),
        "Examples, with comments to be read": ("ls $DEEPEP_PREFIX/examples",),
        "Settings of DeepEP's kernels that were measured on this cluster": (tuned,),
        "Limits": _limits(record),
        "Packages of your own beside these": (
            "deepep-venv ~/my-env && . ~/my-env/bin/activate && pip install PACKAGE",
        ),
        "Tests, from a directory that the nodes share: output and logs are left there": (
            f"sbatch $DEEPEP_PREFIX/sbatch/{record.key}/{_file_name('internode')}",
            f"({kinds})",
        ),
        "Whom to ask": (record.site.contact or "those who look after this cluster",),
    }
    lines = [line for heading, texts in parts.items() for line in (f"{heading}:", *map(_wrapped, texts))]
    return "\n".join([*lines, ""])


def _limits(record: StackRecord) -> tuple[str, ...]:
    """Return what the kernels ask of a program. Whether a build has the fence its manifest says, not the record."""
    if record.nccl:
        return ("CUDA graphs: around a dispatch with do_cpu_sync=False or a known handle; for others the CPU waits",)
    fence = "; fewer than 256 where `invoke verify` names this module" if any_blackwell(record.archs) else ""
    return (
        f"low-latency mode: at most 511 tokens a rank (more: NVSHMEM_QP_DEPTH, 2 x tokens + 2){fence}",
        "CUDA graphs: around low-latency mode alone; for other dispatches the CPU waits",
    )


BLACKWELL = 10.0
"""The lowest compute capability on which low latency needs DeepEP's pull request 642."""


def any_blackwell(archs: Sequence[str]) -> bool:
    """Return whether some of the GPU architectures are Blackwell or newer."""
    return any(float(arch) >= BLACKWELL for arch in archs)


def environment_help(record: StackRecord) -> str:
    """Return what `module help deepep-env` says."""
    parts = {
        ENVIRONMENT_SUMMARY: (
            f"the settings of stack {record.stack}: map from GPU to NIC, network, CUDA_HOME, caches on the node",
            "no deep_ep, no libraries; module load deepep has these, and only one of the two is loaded",
        ),
        "For a container, on the host where it starts": (
            f"docker run --env-file <($DEEPEP_PREFIX/bin/deepep-env-file {record.stack}) IMAGE",
        ),
        "Whom to ask": (record.site.contact or "those who look after this cluster",),
    }
    if record.gib:
        script = f". {record.gib}, and its libraries"
        parts["NCCL through Google's gIB has its own"] = (script,)
    lines = [line for heading, texts in parts.items() for line in (f"{heading}:", *map(_wrapped, texts))]
    return "\n".join([*lines, ""])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 79, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def _contents(record: StackRecord) -> tuple[str, ...]:
    """Return the programs of a stack with their versions; what an older manifest does not know is left out."""
    source, _, revision = record.module.removeprefix("deepep/").removesuffix(f"-{record.stack}").rpartition("-")
    versions = {
        "DeepEP": f"{source} ({revision})",
        "NVSHMEM": "" if record.is_v25 else nvshmem_version(record),
        "GDRCopy": _version_of(record.gdrcopy),
        "NCCL": record.nccl,
        "torch": record.torch,
        "CUDA": record.cuda,
        "Python": record.python_version if record.python else f"{record.python_version} of {record.external_python}",
        "GPU architectures": " ".join(record.archs),
    }
    return tuple(f"{name} {version}" for name, version in versions.items() if version)


def _version_of(name: str) -> str:
    """Return the version in the name of a store entry."""
    return name.rpartition("-")[2]


def _values(record: StackRecord) -> dict[str, object]:
    version = record.module.removeprefix("deepep/")
    nvshmem = () if record.is_v25 else (f"nvshmem-{nvshmem_version(record)}",)
    libraries = " and ".join((*((f"NCCL {record.nccl}",) if record.nccl else ()), *nvshmem))
    return {
        "header": _header,
        "module": record.module,
        "stack": record.stack,
        "machine": record.machine,
        "modulefiles": f"{record.prefix}/modulefiles",
        "version": version,
        "summary": SUMMARY,
        "help_text": help_text(record),
        "prefix": record.prefix,
        "python": interpreter(record),
        "tests": f"{entry(record, record.deepep)}/tests",
        "deepep": record.deepep,
        "libraries": libraries,
        "cuda_home": cuda_folder(record) or "none",
        "variables": variables(record),
        "host_groups": host_groups(record),
        "host_variables": host_variables(record),
        "by_variable": by_variable(record),
        "jit_cache": jit_cache(record),
        "caches": caches(with_v2=bool(record.nccl)),
        "name": "deepep",
        "nccl": record.nccl,
        "external": str(PurePosixPath(record.external_python).parent.parent) if record.external_python else "",
        "cuda_folder": "",
        "alone": False,
        "own_names": (*dict(variables(record)), *host_variables(record)),
        "gib": record.gib,
        "gib_libraries": gib_libraries(record),
        "own_nccl": record.own_nccl,
        "outside": tuple(f"{folder}/lib" for folder in (record.torch_nccl, record.torch_nvshmem) if folder),
    }


def _directives(kind: Kind, record: StackRecord) -> Iterator[str]:
    """Yield the #SBATCH lines; the site's own words come last, since the last of two equal options counts."""
    site = record.site
    yield f"--job-name=deepep-{kind.name}"
    yield f"--nodes={kind.nodes}"
    yield "--ntasks-per-node=1"
    # The test starts a process per GPU and measures bandwidth: it wants all CPUs and memory of the node, and no
    # neighbour.
    yield "--exclusive"
    yield "--mem=0"
    yield f"--time={kind.minutes // 60:02}:{kind.minutes % 60:02}:00"
    yield "--output=%x-%j.out"
    for option in ("partition", "account", "qos", "gres"):
        if getattr(site, option):
            yield f"--{option}={getattr(site, option)}"
    if site.sbatch_args:
        yield " ".join(site.sbatch_args)


def environment(templates: Mapping[str, str]) -> jinja2.Environment:
    """Return what renders `templates` (texts by name), with a filter for the words of each language: sh, lua, tcl."""
    made = jinja2.Environment(  # noqa: S701 - no HTML here; every value goes through the filter of its language
        loader=jinja2.DictLoader(dict(templates)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{%#",  # bash writes ${#array[@]}
        comment_end_string="#%}",
    )
    made.filters |= {"sh": shell_word, "lua": lua_string, "tcl": tcl_word}
    return made


def shell_word(text: str) -> str:
    """Return `text` as one word of a POSIX shell; a leading `=` is quoted too, for those who read `NAME==value`."""
    quoted = shlex.quote(text)
    return f"'{text}'" if quoted.startswith("=") else quoted


def lua_string(text: str) -> str:
    """Return `text` as a Lua string literal."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def tcl_word(text: str) -> str:
    """Return `text` as one Tcl word in which nothing is substituted."""
    escaped = re.sub(r'([\\"$\[\]{}])', r"\\\1", text).replace("\n", "\\n")
    return f'"{escaped}"'
