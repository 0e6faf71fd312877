"""The words of the command line: the verbs in their groups, the flags of each, what every flag means, examples.

A verb's own flags are the parameters of its function in cli/commands, read from the file without importing it, and
nothing heavy is imported here: completion reads this at every press of a key, help and the manual page are made of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from msgspec import Struct

COMMANDS = Path(__file__).resolve().parent / "commands"

HELP = {
    "hosts": "a hosts file (hosts/b200.txt) or a node set (b200-[001-016]); default: DEEPEP_HOSTS, then deepep.toml",
    "limit": "only these hosts of it, as a node set",
    "lock": "the lock file (default: DEEPEP_LOCK, deepep.toml, ./deepep.lock.toml, then the one that comes along)",
    "stack": "which stack of the lock (default: its default_stack)",
    "verify.stack": "which stack (default: each that is offered)",
    "doctor.stack": "which stack (default: each that is offered)",
    "test.stack": "which stack (default: what `module load deepep` gives; on Kubernetes the lock's default)",
    "test.lock": "on Kubernetes: the lock file whose stack the image has (default: as for plan)",
    "remove.stack": "this stack only (default: the whole offer)",
    "lock.stack": "this stack only (default: all)",
    "wheel.stack": "which stack (default: what `module load deepep` gives)",
    "mirror.stack": "for these stacks, joined by commas (default: all)",
    "prefix": "the shared directory everything is installed under (default: the hosts file's)",
    "mirror": "PREFIX=REPLACEMENT, index:NAME=DIR_OR_URL, or the DIR_OR_URL of what invoke mirror wrote; may be "
    "given more than once",
    "directory": "the directory of the mirror",
    "target": "wheels for these targets only, joined by commas: cp312-x86_64,cp311-x86_64 (default: all of the lock)",
    "prune": "remove what the mirror holds beside what is wanted now",
    "python": "path of an existing interpreter with torch on the hosts, instead of the locked wheels",
    "nccl": "`own`: with --python and DeepEP V2, the lock's NCCL in place of the one that its torch brings",
    "dry_run": "say what would be done and change nothing",
    "yes": "do not ask before something is changed; needed where nobody can be asked: without a terminal, with --json",
    "json": "one JSON document on stdout and nothing else",
    "check": "change nothing; the exit code tells",
    "plan.check": "exit 2 when there is something to do",
    "lock.check": "fetch every source anew and compare it; exit 1 when a pin is not as locked",
    "mirror.check": "hash every file again; exit 4 when one is not as the index says, or a pin of the lock is missing",
    "update": "the pin to renew: a source, python (the wheels of all stacks, or of --stack), or all",
    "download": "check wheels by fetching each (gigabytes) instead of asking its index for hash and size",
    "ref": "what the renewed pin follows: a branch, a tag, refs/pull/N/head or a commit",
    "version": "the project's own version of the renewed pin (default: read from its tag, else kept)",
    "accept_new_host_keys": "trust hosts seen for the first time: print their key's fingerprint and record it",
    "sudo_password_prompt": "ask once for the password of sudo",
    "on_busy_host": "`leave` (default) or `use` a host whose GPUs are in use",
    "forks": "how many hosts to talk to at the same time (default 64)",
    "archs": "compute capabilities to build for besides those of the GPUs that are seen: 9.0,10.0 "
    "(a machine for images, a build farm: these alone)",
    "skip": "parts to leave out: host recipes such as limits,driver-options; build-deps: packages that a build needs; "
    "module-hook; smoke: the test at the end; all: every one of these",
    "take_over": "let `module load deepep` lead to this prefix where it leads to another one (asked on a terminal)",
    "ignore_unreachable": "remove also while hosts are unseen whose processes may use it",
    "reboot": "hosts that need one: never, ask (default; never without a terminal), rolling, rolling:K or all",
    "nodes.reboot": "nodes that wait for one: never (default), or rolling, one at a time",
    "as_": "look as this user of the hosts (default: the connection's own)",
    "strict": "exit 4 also when there are warnings",
    "reboot_window": "start reboots only in these hours, local time: 22:00-06:00",
    "reservation": "the Slurm reservation whose nodes may be rebooted",
    "drain_timeout": "how long to wait until a drained node is idle: 90s, 30m, 4h (default)",
    "boot_timeout": "how long a host may take to come back (default 30m)",
    "reload_driver": "load the driver anew instead of a reboot, where no process uses the GPUs",
    "to": "the generation to make current (default: the newest before the current one)",
    "keep": "how many of the newest generations stay (default 5); the current one always does",
    "old": "a generation's number, or a lock file",
    "new": "another generation's number, or another lock file",
    "verbose": "say everything: each fact that differs (diff), also the notes that were shown before (plan, bootstrap)",
    "store": "compare every file of the store with what was published, and nothing else",
    "out": "the file to write: an archive, whose signature gets the same name and .sig (export); the plan (plan)",
    "manifests.out": "the folder to write; one that manifests wrote before is replaced",
    "image.out": "the new folder to write: an image layout, or with --containerfile what a build of your own needs",
    "base": "what the image is built on: NAME of the lock's [image.base.NAME], or an image layout: FOLDER[@sha256:…]",
    "without": "python: for a base that has torch already, of the very version of the stack",
    "containerfile": "write a Containerfile and the layers as tar files, in place of an image",
    "push": "put the image into a registry under this name, through skopeo",
    "for_": "the kind of cluster: gke-a4 (B200), gke-a3 (A3 Ultra, H200) or generic",
    "settings": "what only the cluster's owner knows, a file like hosts/gke-a4.toml",
    "plan": "the file of `plan --out=FILE`: do exactly that, or say what has changed since",
    "output": "the folder to write the wheel to (default: the current one)",
    "generation": "the generation's number (default: the current one)",
    "sign": "sign with this SSH key: the file of a private key, or of a public one that ssh-agent knows",
    "file": "an archive that `invoke export` wrote",
    "allowed_signers": "whose signature counts: a file in the format ALLOWED SIGNERS of ssh-keygen's manual",
    "insecure_unsigned": "import an archive without looking for a signature",
    "run": "a run of `invoke test`: its folder on this machine, or with --hosts its name (default: the newest)",
    "html": "write the report as one HTML file, to this new file",
    "cluster": "the whole cluster in place of a run: hosts, findings, stacks, generations, last runs",
    "build": "the builds of a bootstrap of this machine (RUN: the folder of its logs) in place of a run of a test",
    "junit": "write the run as JUnit XML, to this new file",
    "list": "which runs there are, newest first: of --hosts or --prefix, or of a folder of this machine",
    "force": "let --html and --junit replace a file that is there",
    "bundle": "write one archive for a bug report, to this file (default: deepep-report-TIME.tar.gz here)",
    "scrub_hosts": "put host-1, host-2 … for the names of hosts and [address] for IP addresses",
    "kind": "internode (default), intranode, low-latency, pressure, ep (DeepEP V2), nccl, pairs, smoke, "
    "example-prefill or example-decode",
    "via": "how the hosts are asked: ssh, slurm (one srun over the free nodes, SSH for the others), or auto (default): "
    "slurm above --ssh-limit",
    **dict.fromkeys(
        ("doctor.via", "facts.via"),
        "how the hosts are asked: ssh, slurm (one srun over the free nodes), auto (default: slurm above --ssh-limit); "
        "or kubernetes: the GPU nodes of a cluster, by its API alone",
    ),
    "debug_pods": "with --via=kubernetes: look at the nodes from inside too, by a privileged pod on each of them, of "
    "this image (by its digest, with chroot in it); deleted afterwards",
    **dict.fromkeys(("doctor.namespace", "facts.namespace"), "the namespace for debug pods (default: the context's)"),
    "tree": "gateways with ClusterShell, between this machine and all other hosts: what only looks goes through them",
    "ssh_limit": "with --via=auto, more hosts than this are asked through Slurm (default 512)",
    "test.via": "slurm (default where it runs), ssh: without Slurm, over the connections to the hosts, or kubernetes",
    "context": "the context of the kubeconfig (default: its current one)",
    "plan.context": "the cluster of Kubernetes whose nodes the hosts are, by its context: they are drained before a "
    "reboot (default: the hosts file's; without any such hosts are not rebooted)",
    "bootstrap.context": "the cluster of Kubernetes whose nodes the hosts are, by its context: they are drained before "
    "a reboot (default: the hosts file's; without any such hosts are not rebooted)",
    "status.context": "the cluster of Kubernetes whose nodes are told that we left cordoned "
    "(default: the hosts file's, else none)",
    "kubeconfig": "the file of kubectl's configuration (default: KUBECONFIG, then ~/.kube/config)",
    "namespace": "the namespace for the test's objects (default: that of the settings)",
    "nodes": "how many nodes take part (default: the kind's own number; pairs: all)",
    "time_limit": "how long the test may run: 90s, 30m, 4h (default: the kind's own, from 10m for smoke to 4h for "
    "pressure)",
    "save_as_reference": "keep the figures as this site's references, for later runs to be compared with",
    "args": "arguments for upstream's test, e.g. --args='--num-tokens 2048'",
    "start_timeout": "seconds to wait for the nodes (default 600; on Kubernetes start_minutes of the settings)",
    "logs": "logs, folders of logs (*.log, *.out), globs, or --logs=- for standard input",
    "log": "one more of them; may be given more than once",
    "causes": "a file of causes of your own, in the form of env/rules/causes/*.toml",
    "action": "up, down or status",
    "shell": "bash, zsh or fish",
    "layer": "the lab's module system: lmod (default) or environment-modules",
    "dir": "the lab's folder (default: /run/deepep-lab for root)",
    "light": "so many GPU hosts without Slurm, n001 and on, in place of the lab's three hosts",
}
"""One help text a flag: a flag means the same in every verb. Some verbs say more, under `verb.flag`."""

OPTIONAL, ITERABLE = frozenset(("bundle",)), frozenset(("mirror", "log"))
FURTHER = {"logs": "log"}
"""First arguments that may come again and again, and the flag that does the same. Invoke knows no such arguments."""

SWITCHES = frozenset(("dry_run", "yes", "json", "accept_new_host_keys", "sudo_password_prompt"))
"""The common flags that take no value."""

DEFAULTS = {"on_busy_host": "leave", "forks": "64", "via": "auto", "ssh_limit": "512"}
"""The values of common flags that are not given, as words; of all others none. `Flags.of` says what is wrong with a
number, where Invoke would end in a traceback."""

CONNECTION = ("accept_new_host_keys", "sudo_password_prompt", "forks")
WAYS = ("via", "ssh_limit", "tree")
HOSTS = ("hosts", "limit", "prefix")
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "What": (
        *(
            "stack",
            "lock",
            "python",
            "nccl",
            "kind",
            "run",
            "to",
            "keep",
            "old",
            "new",
            "generation",
            "file",
            "store",
            "skip",
        ),
        *("update", "ref", "version", "archs", "plan", "cluster", "list", "target", "logs", "log", "causes", "args"),
        *("nodes", "action", "shell", "as_", "for_", "settings", "base", "without"),
    ),
    "Where": (
        *(*HOSTS, "mirror", "directory", "out", "output", "html", "junit", "bundle", "dir", "via", "push"),
        *("context", "kubeconfig", "namespace"),
    ),
    "How": (),
    "Connection": (*CONNECTION, "ssh_limit", "tree"),
}
"""The sections of a verb's help and the flags of each; those that are named nowhere say how something is done."""


class VerbText(Struct, frozen=True):
    """A verb as the help shows it. `common` are the common flags that mean something to it, `natural` the flag whose
    value may stand alone (`test internode`), `meant` the flag that a word alone is most often meant for where it is
    not taken, `docs` where more is written."""

    name: str
    summary: str
    common: tuple[str, ...]
    examples: tuple[str, str]
    docs: str
    natural: str = ""
    meant: str = ""


ALL = (*HOSTS, "stack", "lock", "mirror", "python", "nccl", "on_busy_host", "json", *CONNECTION)
READING = (*HOSTS, "json", *CONNECTION)
CHANGING = (*READING, "dry_run", "yes")

GROUPS: Mapping[str, tuple[VerbText, ...]] = {
    "look": (
        VerbText(
            "plan",
            "what bootstrap would do, and why",
            (*ALL, *WAYS),
            ("plan hosts/b200.txt", "plan --hosts=hosts/b200.txt --stack=v1-cu13 --check"),
            "docs/machines.md",
            natural="hosts",
        ),
        VerbText(
            "doctor",
            "what is wrong with the hosts, why it matters, what to do",
            (*(name for name in ALL if name != "on_busy_host"), *WAYS),
            ("doctor hosts/b200.txt", "doctor --hosts=hosts/b200.txt --as=alice --strict"),
            "docs/machines.md",
            natural="hosts",
        ),
        VerbText(
            "facts",
            "what the hosts are, folded by value",
            (*READING, "python", *WAYS),
            ("facts hosts/b200.txt", "facts --hosts=b200-[001-016] --json"),
            "docs/json.md",
            natural="hosts",
        ),
        VerbText(
            "env",
            "the network settings and the NIC of each GPU that users get, and why",
            (*READING, "stack", "lock"),
            ("env hosts/b200.txt", "env --hosts=hosts/b200.txt --stack=v2 --json"),
            "docs/tuning.md",
            natural="hosts",
        ),
        VerbText(
            "status",
            "what is installed, what waits for a reboot, how the last tests ended",
            (*READING, "lock"),
            ("status hosts/b200.txt", "status --hosts=hosts/b200.txt --limit=b200-[001-004]"),
            "README.md",
            natural="hosts",
        ),
        VerbText(
            "generations",
            "what the prefix offered over time",
            READING,
            ("generations hosts/b200.txt", "generations --prefix=/shared/deepep"),
            "docs/decisions/016-generations.md",
            natural="hosts",
        ),
        VerbText(
            "diff",
            "the changes between two generations, or two locks",
            READING,
            ("diff 3 4 --hosts=hosts/b200.txt", "diff old.lock.toml deepep.lock.toml"),
            "docs/decisions/016-generations.md",
        ),
        VerbText(
            "version",
            "the version of this program, its commit, and the pins of the lock",
            ("lock", "json"),
            ("version", "version --lock=deepep.lock.toml --json"),
            "docs/install.md",
        ),
    ),
    "change": (
        VerbText(
            "bootstrap",
            "make the hosts ready, build once, offer as modules, prove it",
            (*ALL, "dry_run", "yes", *WAYS),
            ("bootstrap hosts/b200.txt", "bootstrap --hosts=hosts/b200.txt --yes --reboot=rolling:4"),
            "docs/machines.md",
            natural="hosts",
        ),
        VerbText(
            "rollback",
            "an earlier generation becomes the current one",
            CHANGING,
            ("rollback --hosts=hosts/b200.txt", "rollback 3 --hosts=hosts/b200.txt"),
            "docs/decisions/016-generations.md",
            natural="to",
        ),
        VerbText(
            "gc",
            "remove old generations, and store entries that nobody needs",
            CHANGING,
            ("gc --hosts=hosts/b200.txt", "gc --hosts=hosts/b200.txt --keep=2 --yes"),
            "docs/decisions/017-garbage-collection.md",
            meant="hosts",
        ),
        VerbText(
            "remove",
            "take the offer, or one stack of it, and the files on the hosts away",
            (*CHANGING, "stack", "lock"),
            ("remove --hosts=hosts/b200.txt --dry-run", "remove --hosts=hosts/b200.txt --stack=v1-cu13"),
            "docs/machines.md",
            meant="stack",
        ),
        VerbText(
            "nodes",
            "nodes of Kubernetes: how far they are prepared, and reboots one at a time",
            ("limit", "json", "dry_run", "yes"),
            ("nodes --context=b200", "nodes --context=b200 --reboot=rolling"),
            "docs/kubernetes.md",
            meant="limit",
        ),
    ),
    "prove": (
        VerbText(
            "verify",
            "load every module and import deep_ep on every host",
            (*READING, "stack", *WAYS),
            ("verify hosts/b200.txt", "verify --hosts=hosts/b200.txt --store"),
            "docs/tests.md",
            natural="hosts",
        ),
        VerbText(
            "test",
            "run a test and judge its figures",
            (*READING, "stack", "lock", "on_busy_host", "dry_run"),
            (
                "test internode --hosts=hosts/b200.txt",
                "test --via=kubernetes --for=gke-a4 --settings=mine.toml --context=b200",
            ),
            "docs/tests.md",
            natural="kind",
        ),
        VerbText(
            "report",
            "how one run of a test went, or a bundle for a bug report",
            (*ALL, "dry_run"),
            ("report --hosts=hosts/b200.txt --html=run.html", "report --hosts=hosts/b200.txt --bundle --scrub-hosts"),
            "docs/tests.md",
            natural="run",
        ),
        VerbText(
            "results",
            "figures and verdict out of logs of tests",
            (),
            ("results deepep-internode-4711.out", "results '*.out' --json"),
            "docs/tests.md",
        ),
        VerbText(
            "diagnose",
            "the cause in a failing log, why, and what mends it",
            (),
            ("diagnose slurm-4711.out", "diagnose --logs=- --causes=our-causes.toml"),
            "docs/tests.md",
        ),
    ),
    "supply": (
        VerbText(
            "lock",
            "what is pinned; --check and --update",
            ("lock", "stack", "mirror", "dry_run", "json"),
            ("lock --check", "lock --update=nvshmem --dry-run"),
            "docs/lock.md",
            meant="update",
        ),
        VerbText(
            "mirror",
            "everything that a bootstrap fetches, in one directory",
            ("lock", "stack", "mirror", "dry_run", "json"),
            ("mirror /srv/deepep-mirror", "mirror /srv/deepep-mirror --check"),
            "docs/lock.md",
        ),
        VerbText(
            "export",
            "the store entries of a generation as one archive",
            (*READING, "dry_run"),
            (
                "export deepep.tar --hosts=hosts/b200.txt --sign=id_ed25519",
                "export --out=deepep.tar --prefix=/shared/deepep",
            ),
            "docs/decisions/019-the-binary-cache.md",
            natural="out",
        ),
        VerbText(
            "import",
            "the store entries of an archive into another prefix",
            (*ALL, "dry_run"),
            (
                "import deepep.tar --hosts=hosts/b200.txt --allowed-signers=signers",
                "import deepep.tar --prefix=/shared/deepep --allowed-signers=signers --dry-run",
            ),
            "docs/decisions/019-the-binary-cache.md",
        ),
        VerbText(
            "wheel",
            "a stack of the prefix as one wheel for pip",
            (*READING, "stack"),
            ("wheel v1-cu13 --hosts=hosts/b200.txt", "wheel --stack=v1-cu13 --prefix=/shared/deepep --output=dist"),
            "docs/wheel.md",
            natural="stack",
        ),
        VerbText(
            "image",
            "a container image of the store entries of a stack",
            (*READING, "stack", "lock", "mirror"),
            (
                "image --prefix=/shared/deepep --out=image",
                "image --hosts=hosts/b200.txt --out=image --push=registry.example/team/deepep:v1",
            ),
            "docs/kubernetes.md",
            meant="out",
        ),
        VerbText(
            "manifests",
            "manifests for Kubernetes: nodes, networks and tests",
            ("stack", "lock", "json"),
            (
                "manifests --for=gke-a4 --settings=hosts/gke-a4.toml --out=manifests",
                "manifests --for=generic --settings=cluster.toml --out=manifests --json",
            ),
            "docs/kubernetes.md",
            meant="out",
        ),
        VerbText(
            "completion",
            "the script with which a shell completes verbs, flags and values",
            (),
            ("completion bash", "completion fish"),
            "docs/install.md",
        ),
        VerbText(
            "lab",
            "the embedded cluster of the source tree, for the demo and the tests",
            (),
            ("lab up", "lab up --light=64 --dir=/run/my-lab"),
            "CONTRIBUTING.md",
        ),
    ),
}
VERBS: Mapping[str, VerbText] = {verb.name: verb for verbs in GROUPS.values() for verb in verbs}

SHELLS = ("bash", "zsh", "fish")
KINDS = (
    *("internode", "intranode", "low-latency", "pressure", "ep", "nccl", "pairs"),
    *("example-prefill", "example-decode", "smoke"),
)
"""The kinds of tests, as prefix/test_kinds.py has them."""


class Parameter(Struct, frozen=True):
    """A parameter of a verb's function. It is an argument where it has no default; a default that is True or False
    makes it a flag without a value."""

    name: str
    default: str | bool | None = None
    is_argument: bool = False

    @property
    def flag(self) -> str:
        """`--dry-run` for dry_run, and `--as` for as_, which Python keeps for itself without the line."""
        return as_flag(self.name)

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return isinstance(self.default, bool)


class Declaration(Struct, frozen=True):
    """A verb as its function declares it: the first paragraph of its docstring, and its parameters, first its own,
    then the common ones. `takes_flags`: its first parameter are the common flags."""

    verb: VerbText
    doc: str
    own: tuple[Parameter, ...]
    takes_flags: bool

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All its flags and arguments."""
        return (*self.own, *(common_parameter(name) for name in self.verb.common if self.takes_flags))


def as_flag(parameter: str) -> str:
    """Return the flag of a parameter."""
    return f"--{parameter.strip('_').replace('_', '-')}"


def common_parameter(name: str) -> Parameter:
    """Return a flag that several verbs have."""
    return Parameter(name, False if name in SWITCHES else None if name in ITERABLE else DEFAULTS.get(name, ""))


def module_of(verb: str) -> str:
    """Return the name of a verb's module, and of its function: Python keeps `import` for itself."""
    return "import_" if verb == "import" else verb


@cache
def declared(name: str) -> Declaration:
    """Return a verb as the function in its file declares it; the file is read, not imported."""
    module = module_of(name)
    tree = ast.parse((COMMANDS / f"{module}.py").read_text(encoding="utf-8"))
    function = next(each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == module)
    doc = (ast.get_docstring(function) or "").partition("\n\n")[0]
    own = tuple(_parameters(function.args))
    takes_flags = bool(own) and own[0].name == "flags"
    return Declaration(VERBS[name], doc, own[1:] if takes_flags else own, takes_flags)


def _parameters(found: ast.arguments) -> Iterator[Parameter]:
    lacking = len(found.args) - len(found.defaults)
    defaults: Sequence[ast.expr | None] = [*[None] * lacking, *found.defaults, *found.kw_defaults]
    for each, default in zip((*found.args, *found.kwonlyargs), defaults, strict=True):
        value = ast.literal_eval(default) if default else None
        yield Parameter(each.arg, value, is_argument=default is None)


def help_text(verb: str, parameter: str) -> str:
    """Return what a flag means, to this verb where that is more."""
    return HELP.get(f"{verb}.{parameter}", HELP[parameter])
