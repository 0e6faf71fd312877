"""What users load: modulefiles, env.sh and sbatch files of a generation, rendered from the offer and the templates of env/. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jinja2

from deepep_bootstrap.errors import Problem, Trouble
from deepep_bootstrap.store import Offer, StackRecord, offer_digest, offer_document

PROGRAM = "deepep-bootstrap"
KINDS = ("internode", "intranode", "low-latency")
TIME_LIMIT = "00:30:00"
SUMMARY = "DeepEP: expert-parallel dispatch and combine for mixture-of-experts models"
PURPOSES = {
    "internode": "DeepEP's internode test over RDMA, two nodes by default.",
    "intranode": "DeepEP's intranode test over NVLink, on one node.",
    "low-latency": "DeepEP's low-latency test, one node by default (more: sbatch -N 2).",
}
SCRIPTS = {"internode": "test_internode.py", "intranode": "test_intranode.py", "low-latency": "test_low_latency.py"}

# DeepEP's Buffer sets these itself before NVSHMEM starts: exporting them would look like a setting and be none.
OVERWRITTEN = (
    "NVSHMEM_DISABLE_P2P",
    "NVSHMEM_IB_ENABLE_IBGDA",
    "NVSHMEM_IBGDA_NUM_RC_PER_PE",
    "NVSHMEM_MAX_TEAMS",
    "NVSHMEM_CUMEM_GRANULARITY",
    "NVSHMEM_DISABLE_MNNVL",
)
# Sites set these on purpose, often because their machines need them.
CALLERS_OWN = ("NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
# Changed by adding to them, never by setting them.
LISTS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD")

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH = re.compile(r"/[A-Za-z0-9._+@%=,/-]*")
_MODULE = re.compile(r"deepep/[A-Za-z0-9][A-Za-z0-9._+-]*")
_STACK = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_WORD = re.compile(r"[A-Za-z0-9_.,:;=+@%/()*&|!\[\]^~-]+")


@dataclass(frozen=True)
class File:
    """One file of a generation: its bytes, and whether it may be run."""

    content: bytes
    executable: bool = False


@dataclass(frozen=True)
class Lead:
    """Entries put in front of a path list; `driver_only`: on nodes with the NVIDIA driver alone."""

    name: str
    entries: tuple[str, ...]
    driver_only: bool = False


def render(offer: Offer, templates: Mapping[str, str]) -> dict[str, File]:
    """Return the files of a generation by their path inside it.

    `templates` are the texts of env/ by file name. Every value that could not be written safely into a modulefile, a shell
    script or an #SBATCH line is named in one Trouble; nothing is rendered then.
    """
    problems = tuple(check(offer))
    if problems:
        raise Trouble(*problems)
    environment = _environment(templates)
    files: dict[str, File] = {}
    for stack, record in sorted(offer.stacks.items()):
        files |= _render_stack(environment, record, folder=f"sbatch/{stack}")
    chosen = offer.stacks[offer.default_stack]
    files["env.sh"] = files[f"env-{chosen.stack}.sh"]
    for kind in KINDS:
        files[f"sbatch/{_file_name(kind)}"] = files[f"sbatch/{chosen.stack}/{_file_name(kind)}"]
    version = chosen.module.removeprefix("deepep/")
    note = _header("-- ")
    files["modulefiles/deepep/.modulerc.lua"] = File(f'{note}\nmodule_version("{chosen.module}", "default")\n'.encode())
    files["modulefiles/deepep/.version"] = File(f'#%Module1.0\n{_header("# ")}\nset ModulesVersion "{version}"\n'.encode())
    return files


def manifest(offer: Offer, *, generation: int, created: str, by: str, lock_digest: str, hosts: tuple[str, ...]) -> str:
    """Return the text of a generation's manifest.json; `created` is a UTC time in ISO 8601, `by` who or what made it."""
    document = {
        "schema": 1,
        "generation": generation,
        "created": created,
        "by": by,
        "lock_digest": lock_digest,
        "offer": offer_document(offer),
        "offer_digest": offer_digest(offer),
        "hosts": list(hosts),
    }
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


def lists(record: StackRecord) -> tuple[Lead, ...]:
    """Return what a stack puts in front of each path list, in the order of LISTS; a list it leaves alone has no entries.

    An environment of ours comes first on PATH and holds our NVSHMEM in place of torch's. Somebody else's stays as it is: DeepEP
    joins by PYTHONPATH, and our NVSHMEM by LD_PRELOAD, since torch would bring its own otherwise.
    """
    nvshmem = f"{entry(record, record.nvshmem)}/lib"
    libraries = (nvshmem, f"{entry(record, record.gdrcopy)}/lib") if record.gdrcopy else (nvshmem,)
    return (
        Lead("PATH", (f"{entry(record, record.python)}/bin",) if record.python else ()),
        Lead("PYTHONPATH", (f"{entry(record, record.deepep)}/lib/python",)),
        Lead("LD_LIBRARY_PATH", libraries),
        Lead("LD_PRELOAD", () if record.python else (f"{nvshmem}/libnvshmem_host.so.3",), driver_only=not record.python),
    )


def variables(record: StackRecord) -> tuple[tuple[str, str], ...]:
    """Return the variables a stack sets, in order; an empty value says that the variable is unset while the module is loaded."""
    nvshmem = entry(record, record.nvshmem)
    ours = {
        "DEEPEP_PREFIX": record.prefix,
        "DEEPEP_STACK": record.stack,
        "DEEPEP_TESTS": f"{entry(record, record.deepep)}/tests",
        "NVSHMEM_DIR": nvshmem,
        "NVSHMEM_HOME": nvshmem,
    }
    toolkit = {"CUDA_HOME": record.cuda_home} if record.cuda_home else {}
    return (*ours.items(), *toolkit.items(), *record.environment.items())


def entry(record: StackRecord, name: str) -> str:
    """Return the absolute path of a store entry."""
    return f"{record.prefix}/store/{name}"


def interpreter(record: StackRecord) -> str:
    """Return the Python a stack runs with: the store's, or the external one."""
    return f"{entry(record, record.python)}/bin/python" if record.python else record.external_python


def check(offer: Offer) -> Iterator[Problem]:
    """Yield everything in an offer that its files could not say safely, or must not say."""
    if offer.default_stack not in offer.stacks:
        yield Problem("offer", "the default stack is not in it", offer.default_stack, "one of " + ", ".join(sorted(offer.stacks)))
    for stack, record in sorted(offer.stacks.items()):
        where = f"stack {stack}"
        if stack != record.stack:
            yield Problem(where, "the record is of another stack", record.stack, stack)
        yield from _check_names(where, record)
        yield from _check_environment(f"profile {record.profile} of {where}", record.environment)
        yield from _check_site(where, record)


def _check_names(where: str, record: StackRecord) -> Iterator[Problem]:
    if not _STACK.fullmatch(record.stack):
        yield Problem(where, "a stack's name is used in file names", repr(record.stack), "letters, digits and ._+-")
    if not _MODULE.fullmatch(record.module):
        yield Problem(where, "not a module name", repr(record.module), "deepep/ and letters, digits and ._+-")
    paths = {"prefix": record.prefix, "python": record.external_python, "CUDA_HOME": record.cuda_home}
    for what, path in paths.items():
        if not _PATH.fullmatch(path) and (path or what == "prefix" or (what == "python" and not record.python)):
            wanted = "an absolute path without spaces, colons and quotes"
            yield Problem(where, f"the path of {what} cannot be written into path lists", repr(path), wanted)
    for name in (record.deepep, record.nvshmem, record.gdrcopy, record.python):
        if name and not _STACK.fullmatch(name):
            yield Problem(where, "not the name of a store entry", repr(name))


def _check_environment(where: str, environment: Mapping[str, str]) -> Iterator[Problem]:
    ours = ("CUDA_HOME", "NVSHMEM_DIR", "NVSHMEM_HOME", *LISTS)
    for name, value in environment.items():
        if not _VARIABLE.fullmatch(name):
            yield Problem(where, "not a variable name", repr(name))
        elif name in OVERWRITTEN:
            yield Problem(where, f"{name} has no effect: DeepEP sets it itself", value, "no such line")
        elif name in CALLERS_OWN:
            yield Problem(where, f"{name} is the caller's own", value, "no such line")
        elif name in ours or name.startswith(("DEEPEP_PREFIX", "DEEPEP_STACK", "DEEPEP_TESTS", "__DEEPEP_")):
            yield Problem(where, f"{name} is set by the module itself", value, "no such line")
        elif name == "NVSHMEM_REMOTE_TRANSPORT" and value == "ibgda":
            yield Problem(where, "NVSHMEM knows no remote transport of that name and would load none", value, "no such line")
        if not (value.isascii() and value.isprintable()) or "~" in value:
            # Environment Modules leaves a tilde to the shell, and reads files in the encoding of the moment.
            yield Problem(where, f"the value of {name} would not arrive to the letter", repr(value), "printable ASCII without ~")


def _check_site(where: str, record: StackRecord) -> Iterator[Problem]:
    site = record.site
    fields = {"partition": site.partition, "account": site.account, "qos": site.qos, "gres": site.gres}
    for name, value in (*fields.items(), *(("sbatch_args", word) for word in site.sbatch_args)):
        if value and not _WORD.fullmatch(value):
            yield Problem(where, f"{name} cannot stand in an #SBATCH line", repr(value), "one word without quotes")


def _file_name(kind: str) -> str:
    return f"{kind}-test.sbatch"


def _header(comment: str) -> str:
    return f"{comment}Generated by {PROGRAM}; do not edit: change the lock, the hosts file or env/ and run bootstrap again."


def _environment(templates: Mapping[str, str]) -> jinja2.Environment:
    environment = jinja2.Environment(  # noqa: S701 - no HTML here; every value goes through the filter of its language
        loader=jinja2.DictLoader(dict(templates)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{%#",  # bash writes ${#array[@]}
        comment_end_string="#%}",
    )
    environment.filters |= {"sh": shlex.quote, "lua": lua_string, "tcl": tcl_word}
    return environment


def lua_string(text: str) -> str:
    """Return `text` as a Lua string literal."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def tcl_word(text: str) -> str:
    """Return `text` as one Tcl word in which nothing is substituted."""
    escaped = re.sub(r'([\\"$\[\]{}])', r"\\\1", text).replace("\n", "\\n")
    return f'"{escaped}"'


def _render_stack(environment: jinja2.Environment, record: StackRecord, folder: str) -> dict[str, File]:
    values = _values(record)

    def fill(template: str, **more: object) -> bytes:
        return environment.get_template(template).render(**values, **more).encode()

    used = tuple(item for item in lists(record) if item.entries)
    files = {
        f"modulefiles/{record.module}.lua": File(fill("modulefile.lua.j2", lists=used)),
        f"modulefiles/{record.module}": File(fill("modulefile.tcl.j2", lists=used)),
        f"env-{record.stack}.sh": File(fill("env.sh.j2", lists=lists(record))),
    }
    for kind in KINDS:
        more = {"kind": kind, "purpose": PURPOSES[kind], "script_name": SCRIPTS[kind], "directives": tuple(_directives(kind, record))}
        files[f"{folder}/{_file_name(kind)}"] = File(fill("test.sbatch.j2", lists=lists(record), **more), executable=True)
    return files


def _values(record: StackRecord) -> dict[str, object]:
    version = record.module.removeprefix("deepep/")
    python = f"its own Python {record.python_version}" if record.python else f"{record.external_python} (Python {record.python_version})"
    help_text = (
        f"{SUMMARY}\n\n"
        f"DeepEP {version} for GPU architectures {', '.join(record.archs)}, with {record.nvshmem.partition('-')[2]}, in {python}.\n"
        f"Tests: sbatch {record.prefix}/sbatch/{record.stack}/{_file_name('internode')}\n"
    )
    return {
        "header": _header,
        "module": record.module,
        "modulefiles": f"{record.prefix}/modulefiles",
        "version": version,
        "summary": SUMMARY,
        "help_text": help_text,
        "prefix": record.prefix,
        "python": interpreter(record),
        "tests": f"{entry(record, record.deepep)}/tests",
        "nvshmem": record.nvshmem.partition("-")[2],
        "cuda_home": record.cuda_home or "none",
        "variables": variables(record),
    }


def _directives(kind: str, record: StackRecord) -> Iterator[str]:
    """Yield the #SBATCH lines; the site's own words come last, since the last of two equal options counts."""
    site = record.site
    yield f"--job-name=deepep-{kind}"
    yield f"--nodes={2 if kind == 'internode' else 1}"
    yield "--ntasks-per-node=1"
    # The test starts a process per GPU and measures bandwidth: it wants all CPUs and memory of the node, and no neighbour.
    yield "--exclusive"
    yield "--mem=0"
    yield f"--time={TIME_LIMIT}"
    yield "--output=%x-%j.out"
    for option in ("partition", "account", "qos", "gres"):
        if getattr(site, option):
            yield f"--{option}={getattr(site, option)}"
    if site.sbatch_args:
        yield " ".join(site.sbatch_args)
