"""The trust boundary: what each value that a host answers may be, for every recipe and every key.

A host is not believed: it may be broken, or taken over. What its tools say gets into records that decide
something only in the form that stands here: a name, a version, a path, a number in a range, one of a list.
A value of another form is a problem of that host, and nothing else of the same answer is taken either. Free
text (FREE) is for showing and comes as core.text.HostText, which cannot be a word of a command.

A form says what a value may be, not that it is true. What one host says decides nothing for another one:
that is held where decisions are made (plan.host_recipes.settle, prefix.offer, slurm.identity).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from deepep_bootstrap.core.records import Fields, RecordForm, ValueForm

GIB = "/usr/local/gib/scripts/set_nccl_env.sh"
"""Google's script of NCCL settings, where its images have it. Users' shells read it: no host says where it is."""

CANDIDATE = r"@[A-Za-z0-9][\w.+-]*:[\w.+-]+|[A-Za-z0-9][A-Za-z0-9.+_-]*(=[0-9][0-9A-Za-z.+:~-]*)?"
"""One word of `candidate`: a package with or without a version, or a module of dnf with its stream."""

STEP = r"[A-Za-z0-9._+@%=,:~-]"
"""One character of a folder's or file's name in a path: nothing that a shell would read."""


def one_of(*values: str) -> ValueForm:
    """Return the form of a value that is one of a list ("" among them where it may be missing)."""
    named = [value or "nothing" for value in values]
    return ValueForm(" or ".join(named), "|".join(map(re.escape, values)))


def number(low: int, high: int, also: str = "") -> ValueForm:
    """Return the form of a whole number in a range; `also` is a pattern of what may stand in its place."""
    pattern = rf"-?[0-9]{{1,15}}|{also}" if also else "-?[0-9]{1,15}"
    return ValueForm(f"a whole number from {low} to {high}", pattern, span=(low, high))


def words(wanted: str, pattern: str, longest: int = 256) -> ValueForm:
    """Return the form that a pattern says, and that does not begin like an option; `wanted` names it."""
    return ValueForm(wanted, rf"(?!-)(?:{pattern})", longest)


UNKNOWN = r"|\[[A-Za-z/ ]{1,40}\]"
"""What nvidia-smi says in place of a value that it has not, such as [N/A]."""

FREE = ValueForm("text", None)
LINE = ValueForm("one line without control characters", "[^\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]*", 16_384)
NAME = words("a name of letters, digits and ._+-", r"[A-Za-z0-9_][A-Za-z0-9._+-]*")
NAME_OR_NOT = words("a name of letters, digits and ._+-, or nothing", r"([A-Za-z0-9_][A-Za-z0-9._+-]*)?")
HOSTNAME = words("a host's name", r"([A-Za-z0-9][A-Za-z0-9._-]*)?")
ACCOUNT = words("an account's name", r"[A-Za-z0-9_][A-Za-z0-9._@$\\ +-]*")
ACCOUNT_OR_NOT = words("an account's name, or nothing", r"([A-Za-z0-9_][A-Za-z0-9._@$\\ +-]*)?")
VERSION = words("a version, or nothing", r"([0-9A-Za-z][0-9A-Za-z.+:~_-]*)?" + UNKNOWN)
PATH = words("an absolute path without spaces and quotes", rf"(/(?!\.\.?(/|$)){STEP}+)+/?|/", 4096)
PATH_OR_NOT = words(
    "an absolute path without spaces and quotes, or nothing", rf"((/(?!\.\.?(/|$)){STEP}+)+/?|/)?", 4096
)
DEVICE = words("a path below /sys/devices, or nothing", r"(/sys/)?([A-Za-z0-9][A-Za-z0-9:._/-]*)?", 1024)
PCI = words("a PCI address", r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]" + UNKNOWN)
INTERFACE = words("a network interface, or nothing", r"[A-Za-z0-9_.:-]{0,32}")
IP = words("an IP address", r"[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9_.-]{1,32})?")
CIDR = words("an IP address with its prefix length", r"[0-9A-Fa-f:.]{2,45}(/[0-9]{1,3})?")
BOOT = words("a boot id", r"[0-9A-Za-z-]{0,64}")
ID = words("the id of a prefix, or nothing", r"[0-9A-Za-z-]{0,64}")
FLAG = one_of("0", "1", "")
TRUE = one_of("1")
YES = one_of("yes")
YES_NO = one_of("yes", "no")
COUNT = number(0, 10**9, "")
COUNT_OR_NOT = number(0, 10**9, UNKNOWN)
BYTES = number(0, 10**15, "")
POSITION = number(-1, 10**6, UNKNOWN)
"""Indexes, NUMA nodes: -1 where there is none."""
DECIMAL = words("a number", r"([0-9]{1,9}(\.[0-9]{1,6})?)?")
LIMIT = words("unlimited or a whole number", r"unlimited|[0-9]{0,15}")
BASE64 = words("base 64", r"[A-Za-z0-9+/]*={0,2}", 2**26)
ENTRY = words("the name of a store entry", r"[0-9a-z]{32}-[A-Za-z0-9][A-Za-z0-9._+-]*")
FILE = words("a file's name", "[^/\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]+")
SHA256 = words("a SHA-256 in hexadecimal digits, or nothing", r"([0-9a-f]{64})?")
GENERATION = number(0, 10**9, "")
STATE = words("a state word", r"[a-z]{1,20}")
PRIORITIES = words("a digit 0 or 1 for each of eight priorities, or nothing", r"([01]{8})?")

FACTS_LINES: Mapping[str, Fields] = {
    "facts": (NAME,),
    "end": (TRUE,),
    "os_id": (words("the ID of os-release", "[a-z0-9._-]*"),),
    "os_version": (words("the VERSION_ID of os-release", "[A-Za-z0-9._-]*"),),
    "os_name": (FREE,),
    "kernel": (VERSION,),
    "machine": (NAME_OR_NOT,),
    "hostname": (HOSTNAME,),
    "boot_id": (BOOT,),
    "user": (ACCOUNT_OR_NOT,),
    "uid": (number(-1, 2**32, ""),),
    "cpus": (number(0, 10**6, ""),),
    "cpu_model": (FREE,),
    "glibc": (VERSION,),
    "memory_mib": (COUNT_OR_NOT,),
    "memory_free_mib": (COUNT_OR_NOT,),
    "scratch_free_mib": (COUNT_OR_NOT,),
    "gdrdrv": (FLAG,),
    "external_python": (LINE, VERSION, VERSION, VERSION, VERSION, VERSION, FLAG, FLAG, FREE),
    "modules": (one_of("none", "lmod", "environment-modules"), VERSION, PATH_OR_NOT, LINE),
    "slurm": (FLAG, VERSION, FLAG),
    "slurmd": (FLAG,),
    "kubelet": (FLAG,),
    "slurm_node": (
        NAME_OR_NOT,
        words("a node's state", r"[A-Za-z_*~#!%$@^+-]*"),
        words("a node's gres", r"[A-Za-z0-9_.:,()=*/-]*", 1024),
        words("names of partitions", r"[A-Za-z0-9_.,+-]*", 4096),
    ),
    "slurm_path": (PATH, PATH_OR_NOT),
    "default_route": (FLAG,),
    "nvidia_module": (LINE,),
    "kernel_headers": (FLAG,),
    "secure_boot": (number(0, 255, ""),),
    "reboot_required": (FLAG,),
    "uptime": (DECIMAL,),
    "memlock": (LIMIT,),
    "slurmd_memlock": (LIMIT,),
    "shm_mib": (COUNT_OR_NOT,),
    "verbs_asked": (FLAG,),
    "page_kib": (COUNT,),
    "imex_channels": (COUNT,),
    "gib": (one_of(GIB),),
    "gdrdrv_major": (number(0, 10**6, ""),),
    "gdrdrv_node": (words("a hexadecimal number", "[0-9a-fA-F]{0,8}"),),
    "ofed": (words("a version of OFED", "[A-Za-z0-9._:+~-]*"),),
    "slurm_reason": (LINE,),
    "prefix_path": (LINE,),
    "prefix_problem": (one_of("does not answer within 5 s"),),
    "prefix_exists": (FLAG,),
    "prefix_writable": (FLAG,),
    "prefix_fs": (words("a filesystem's type", "[A-Za-z0-9._/+-]*"), BYTES, LINE),
    "prefix_id": (ID,),
    "prefix_generation": (GENERATION,),
    "prefix_manifest": (BASE64,),
}
FACTS_ROWS: Mapping[str, Fields] = {
    "gpu": (
        POSITION,
        words("a GPU's name", r"[\x20-\x7e]{0,100}"),
        COUNT_OR_NOT,
        VERSION,
        VERSION,
        PCI,
        DEVICE,
        POSITION,
    ),
    "gpu_process": (PCI, words("a process id", f"[0-9]{{0,10}}{UNKNOWN}")),
    "gpu_problem": (FREE,),
    "nvidia_param": (LINE, LINE),
    "rdma": (NAME, NAME_OR_NOT, DEVICE, POSITION, VERSION),
    "rdma_virtual": (NAME,),
    "port": (NAME, COUNT, words("a port's state", "[A-Za-z_ -]*"), words("a link layer", "[A-Za-z]*"), DECIMAL),
    "gid": (
        NAME,
        COUNT,
        COUNT,
        words("a GID", "[0-9a-f:]{0,45}"),
        words("a kind of GID", "[A-Za-z0-9 /.]*"),
        INTERFACE,
    ),
    "tool": (NAME, VERSION),
    "unanswered": (NAME, COUNT),
    "toolkit": (PATH, VERSION, FLAG, FLAG, PATH_OR_NOT),
    "python": (words("a system's Python", r"/usr/bin/python3\.[0-9]{1,3}"), VERSION, FLAG),
    "hook": (one_of("sh", "csh"), LINE),
    "kernel_module": (NAME,),
    "managed": (one_of("driver", "gib"),),
    "header": (one_of("infiniband/mlx5dv.h", "infiniband/verbs.h"),),
    "slurm_job": (words("a job's number", "[0-9_]{1,20}"),),
    "slurm_limits": (
        one_of("PropagateResourceLimits", "PropagateResourceLimitsExcept"),
        words("names of limits", r"[A-Za-z_, ()]*"),
    ),
    "external_package": (one_of("setuptools", "numpy"), VERSION),
    "external_library": (one_of("nccl", "nvshmem"), NAME_OR_NOT, VERSION, PATH),
    "device": (one_of("gpu", "mellanox", "nvswitch"), PCI, words("an IOMMU domain", "[A-Za-z-]*")),
    "package": (NAME, VERSION),
    "library": (PATH, PATH_OR_NOT),
    "library_abi": (PATH, words("a number", "[0-9]{1,6}")),
    "library_owner": (PATH, NAME),
    "library_mlx5": (PATH, words("a symbol version of libmlx5", r"1\.[0-9]{1,4}")),
    "verbs_device": (NAME,),
    "flow_control": (NAME, PRIORITIES, PRIORITIES, PRIORITIES, FLAG),
    "resolved": (IP,),
    "address": (INTERFACE, CIDR),
    "route": (one_of("4", "6"), LINE),
    "local_address": (IP,),
    "kernel_address": (
        INTERFACE,
        words("32 hexadecimal digits", "[0-9a-fA-F]{32}"),
        words("2 of them", "[0-9a-fA-F]{2}"),
    ),
    "kernel_route": (
        INTERFACE,
        words("8 hexadecimal digits", "[0-9a-fA-F]{8}"),
        words("8 hexadecimal digits", "[0-9a-fA-F]{8}"),
        COUNT,
    ),
    "mtu": (INTERFACE, COUNT),
    "fabric_manager": (one_of("LoadState", "ActiveState"), words("systemd's word", "[a-z-]*")),
    "fabric_state": (LINE, LINE),
    "imex": (one_of("LoadState", "ActiveState"), words("systemd's word", "[a-z-]*")),
    "clique": (words("the UUID of an NVLink domain", rf"[0-9A-Fa-f-]{{0,64}}{UNKNOWN}|N/A"), COUNT_OR_NOT),
    "reached": (COUNT, COUNT, words("a way of nvidia-smi topo", "[A-Za-z0-9/]{1,10}")),
    "stamp": (NAME, BOOT),
    "prefix_entry": (FILE,),
    "prefix_unproved": (FILE,),
}
FACTS = RecordForm(FACTS_LINES, FACTS_ROWS, end="end")
"""recipes/facts.sh with its parts."""

CHECK = RecordForm(
    {
        "state": (one_of("ok", "todo", "reboot", "stuck", "blocked"),),
        "found": (FREE,),
        "wanted": (FREE,),
        "note": (FREE,),
        "needs": (one_of("reboot"),),
        "candidate": (words("packages, with their versions or without", rf"({CANDIDATE})?( ({CANDIDATE}))* ?", 4096),),
    }
)
"""recipes/host/*.sh: their checks, and what they say after they acted."""

USER_VIEW = RecordForm(
    {
        "user": (ACCOUNT,),
        "uid": (number(0, 2**32, ""),),
        "memlock": (LIMIT,),
        "ipc_lock": (FLAG,),
        "container": (NAME_OR_NOT,),
        "shm": (one_of("absent", "denied", "writable"),),
        "prefix": (one_of("absent", "denied", "readable"),),
        "module": (YES_NO,),
        "visible": (COUNT,),
        "login": (one_of("no end of a login shell after 20 s"),),
        "end": (TRUE,),
    },
    {
        "device": (PATH, FREE),
        "variable": (words("a variable's name", "[A-Za-z_][A-Za-z0-9_]*"), LINE),
        "library": (LINE,),
    },
    end="end",
)
"""recipes/doctor/user.sh."""

WRITTEN = RecordForm(
    {"hook": (LINE,), "heir": (PATH_OR_NOT,), "end": (TRUE,)},
    {
        "file": (words("a recipe", "[a-z-]+"), PATH, one_of("ours", "replaced", "changed")),
        "held": (words("a recipe", "[a-z-]+"), LINE),
    },
    end="end",
)
"""recipes/host/written.sh."""

MODULE = RecordForm(
    {
        "stale": (
            words("nothing or what `current` leads to", "[A-Za-z0-9._/-]*"),
            words("a generation", "generations/[0-9]+"),
        ),
        "module": (YES_NO,),
        "loaded": (words("a module of ours", r"(deepep/[A-Za-z0-9][A-Za-z0-9._+-]*)?"),),
        "said": (FREE,),
        "import": (YES_NO,),
        "error": (FREE,),
        "deep_ep": (LINE,),
        "torch": (VERSION,),
        "nvshmem": (LINE,),
        "nccl": (LINE,),
        "nccl_version": (VERSION,),
        "deepep_entry": (PATH,),
        "nvshmem_entry": (PATH,),
        "driver": (YES_NO,),
        "end": (TRUE,),
    },
    end="end",
)
"""recipes/verify/module.sh and probe.py."""

PROCESSES = RecordForm(
    {"sees": (one_of("all", "own"),), "squeue": (YES_NO,), "end": (TRUE,)},
    {"held": (words("an entry or a generation", r"[A-Za-z0-9._+/-]+"), COUNT, LINE, LINE)},
    end="end",
)
QUEUE = RecordForm({"end": (TRUE,)}, {"job": (words("a job's number", "[0-9_]{1,20}"), ACCOUNT)}, end="end")
"""recipes/prefix/held.sh: `processes`, `queue`."""

NOTHING = RecordForm({})
"""Recipes whose answer is their exit code, or bytes."""

CONTENTS = RecordForm(
    {"current": (GENERATION,), "end": (TRUE,)},
    {
        "generation": (GENERATION, BASE64, BASE64),
        "entry": (FILE, number(0, 10**15, ""), BASE64, SHA256),
        "metadata": (FILE, BASE64),
        "used": (FILE, FREE),
        "leftover": (FILE, number(0, 10**15, "")),
        "rolled_back": (GENERATION, GENERATION, words("a time in UTC", r"[0-9-]{10}T[0-9:]{8}Z"), FREE),
    },
    end="end",
)
"""recipes/prefix/generations.sh."""

PREFIX_STATE = RecordForm({"state": (STATE,), "id": (ID,)})
"""recipes/prefix/init.sh, probe.sh and proof.sh."""

SWITCHED = RecordForm({"state": (STATE,), "generation": (GENERATION,)}, {"waiting": (FREE,), "missing": (ENTRY,)})
"""recipes/prefix/offer.sh and rollback.sh."""

COLLECTED = RecordForm(
    {"state": (STATE,)},
    {
        "dropped": (GENERATION,),
        "removed": (FILE,),
        "kept": (FILE, FREE),
        "swept": (FILE,),
        "stuck": (LINE,),
        "waiting": (FREE,),
    },
)
"""recipes/prefix/gc.sh."""

COMPARED = RecordForm(
    {"end": (TRUE,)},
    {"entry": (FILE,), "state": (STATE,), "record": (SHA256,), "lost": (LINE,), "found": (LINE,)},
    end="end",
)
COMPARED_ENTRY = RecordForm({"state": (STATE,)}, {"record": (SHA256,), "lost": (LINE,), "found": (LINE,)})
"""recipes/prefix/rehash.sh: the whole answer, and the part of one entry."""
UNSAFE = RecordForm({"unsafe_count": (COUNT,), "end": (TRUE,)}, {"unsafe": (LINE, LINE, LINE)}, end="end")
"""recipes/prefix/unsafe.sh."""

LOGS = RecordForm({"logs": (PATH,)})
"""recipes/prefix/logs.sh."""

ROOM = RecordForm({"free": (BYTES,)}, {"present": (ENTRY,)})
ARRIVED = RecordForm(
    {"end": (TRUE,)}, {"phase": (STATE,), "imported": (ENTRY,), "present": (ENTRY,), "waiting": (FREE,)}, end="end"
)
"""recipes/prefix/import.sh: `look`, `receive`."""

PUBLISHED = RecordForm({"state": (STATE,)}, {"phase": (NAME,), "waiting": (FREE,)})
"""recipes/prefix/publish.sh."""

SESSION = RecordForm({"scratch": (PATH,), "jobid": (words("a job's number", "[0-9]{1,12}"),)}, {"waiting": (FREE,)})
"""recipes/prefix/session.sh."""

JOB = words("a job's number", "[0-9]{1,12}")
ORPHANS = RecordForm(
    {"host": (HOSTNAME,), "slurm": (one_of("silent"),), "end": (TRUE,)},
    {
        "job": (JOB, LINE, LINE, LINE),
        "unknown": (JOB, LINE, LINE, LINE),
        "scratch": (PATH, LINE),
        "owner": (FILE, LINE),
        "elsewhere": (FILE, LINE, LINE),
        "living": (JOB,),
        "ending": (JOB,),
    },
    end="end",
)
ORPHAN_JOBS = RecordForm({"end": (TRUE,)}, {"job": (JOB,)}, end="end")
ORPHANS_REMOVED = RecordForm({"end": (TRUE,)}, {"removed": (PATH,), "stuck": (PATH,)}, end="end")
"""recipes/prefix/orphans.sh: `look`, `jobs`, `remove`."""

SLURM_CLIENT = RecordForm({"path": (PATH,), "conf": (PATH_OR_NOT,), "works": (TRUE,)})
"""recipes/slurm/client.sh."""

DOCUMENTS = RecordForm(
    {"end": (TRUE,)}, {"document": (words("a document's name", "[a-z0-9][a-z0-9._-]*"), BASE64)}, end="end"
)
DOCUMENTS_KEPT = RecordForm({"state": (STATE,)}, {"waiting": (FREE,)})
"""recipes/prefix/tuning.sh: `look`, `keep`."""

SUBMITTED = RecordForm(
    {
        "place": (PATH,),
        "job": (words("a job's number", "[0-9]{1,12}"),),
        "refused": (FREE,),
        "late": (YES,),
        "hung": (YES,),
        "record": (LINE,),
    },
    {"said": (FILE, number(-(10**9), 10**12), COUNT, FREE)},
)
"""recipes/test/submit.sh."""
