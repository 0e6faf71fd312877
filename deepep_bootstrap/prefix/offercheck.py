"""What the files of an offer could not say safely, or must not say. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from deepep_bootstrap.core.errors import Problem
from deepep_bootstrap.prefix.offer import Offer, StackRecord

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
# DeepEP V2's own places.
OF_V2 = ("EP_NCCL_ROOT_DIR", "EP_NVSHMEM_ROOT_DIR", "EP_JIT_CACHE_DIR", "EP_JIT_NVCC_COMPILER")
# Changed by adding to them, never by setting them.
LISTS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD")

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH = re.compile(r"/[A-Za-z0-9._+@%=,/-]*")
_MODULE = re.compile(r"deepep/[A-Za-z0-9][A-Za-z0-9._+-]*")
_STACK = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_WORD = re.compile(r"[A-Za-z0-9_.,:;=+@%/()*&|!\[\]^~-]+")
_VERSION = re.compile(r"[A-Za-z0-9._+!-]*")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def check(offer: Offer) -> Iterator[Problem]:
    """Yield everything in an offer that its files could not say safely, or must not say."""
    if offer.default_stack not in offer.stacks:
        yield Problem("offer", "the default stack is not in it", offer.default_stack, "one of " + ", ".join(sorted(offer.stacks)))
    for stack, record in sorted(offer.stacks.items()):
        where = f"stack {stack}"
        if stack != record.stack:
            yield Problem(where, "the record is of another stack", record.stack, stack)
        yield from _check_names(where, record)
        for environment in (record.environment, *record.by_host.values(), *record.by_kind.values()):
            yield from _check_environment(f"profile {record.profile} of {where}", environment)
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
    if record.gib and not _PATH.fullmatch(record.gib):
        yield Problem(where, "the path of gIB's script cannot be written into files", repr(record.gib))
    yield from (Problem(where, "not the short name of a host", repr(name)) for name in record.by_host if not _HOST.fullmatch(name))
    if record.nccl and not record.python:
        yield Problem(where, "DeepEP V2 needs an environment of its own", record.external_python, "the store's Python")
    for version in (record.python_version, record.nccl, *record.archs):
        if not _VERSION.fullmatch(version):
            yield Problem(where, "not a version", repr(version))
    for name in (record.deepep, record.nvshmem, record.gdrcopy, record.python):
        if name and not _STACK.fullmatch(name):
            yield Problem(where, "not the name of a store entry", repr(name))


def _check_environment(where: str, environment: Mapping[str, str]) -> Iterator[Problem]:
    ours = ("CUDA_HOME", "NVSHMEM_DIR", "NVSHMEM_HOME", *OF_V2, *LISTS)
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
