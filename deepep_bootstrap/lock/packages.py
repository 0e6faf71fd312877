"""Packages and package repositories of each distribution, for the host recipes: the lock's `[system.<id>]`
tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from deepep_bootstrap.core.toml import Table, ValueForm

PURPOSES = (
    "build-deps",
    "cuda-toolkit-12",
    "cuda-toolkit-13",
    "cuda-toolkit-13-2",
    "doca-ofed",
    "nvidia-driver",
    "fabric-manager",
    "python",
    "rdma-userspace",
    "kernel-headers",
)
TOOLKIT = "cuda-toolkit"
"""The purpose of a CUDA toolkit is this and its major, `cuda-toolkit-13`; a newer one of that major for stacks that
need it has the minor, too."""

_TOOLKIT = re.compile(r"cuda-toolkit-(\d+)-(\d+)\b")

NEED_HEADERS = ("doca-ofed", "nvidia-driver")
"""Purposes whose kernel modules are compiled on the host, for which the headers of its kernel come along."""

KERNEL = "{kernel}"
"""Stands for the running kernel (`uname -r`) in a package name."""

MACHINE = "{machine}"
"""Stands in a repository's addresses for what it calls the kind of machine (NVIDIA: `x86_64`, and `sbsa` for aarch64).
"""
MACHINES = ("x86_64", "aarch64")

ABSENT = "-"
"""Stands for an empty field in a line of REPOSITORIES; no field can be this itself."""

HIGHEST_PRIORITY = 1000
"""From 1001 on apt also downgrades packages (apt_preferences(5))."""

MANAGER = ValueForm(r"apt|dnf", '"apt" or "dnf"')
PACKAGE = ValueForm(
    r"@[A-Za-z0-9][A-Za-z0-9._:/-]*|[A-Za-z0-9]([A-Za-z0-9.+_:~-]|\{kernel\})*(=[0-9A-Za-z*][0-9A-Za-z.+_:~*-]*)?",
    "a package name, or NAME=VERSION",
)
GLOB = ValueForm(r"[A-Za-z0-9*][A-Za-z0-9.+_*-]*", "a package name, in which * stands for anything")
URL = ValueForm(r"(https?|file)://\S+", "an address such as https://host/path")
SUITE = ValueForm(r"[A-Za-z0-9./][A-Za-z0-9._/+-]*", "a suite, or ./ for a flat repository")
COMPONENT = ValueForm(r"[A-Za-z0-9][A-Za-z0-9._/+-]*", "a component")
FINGERPRINT = ValueForm(
    r"[0-9A-F]{40}", "the full fingerprint of the primary key: 40 hexadecimal digits in capitals, without spaces"
)
PURPOSE = ValueForm("|".join(PURPOSES), " or ".join(PURPOSES))
FOLDER = ValueForm(r"[A-Za-z0-9][A-Za-z0-9._-]*", "a folder's name such as sbsa")
BY_HAND = ValueForm(r"[^\x00-\x1f\x7f]+", "one line of text")


class Repository(Struct, frozen=True):
    """A package repository that is added for the purposes in `purposes`, and the one key that may sign it.

    `suite` and `components` belong to apt; a suite that ends in "/" is a flat repository, which has no components.
    `priority` is apt's Pin-Priority for everything in it (0: apt's own, 500); 100 keeps it from replacing what the
    distribution has. `machines` says what `{machine}` in its addresses is for each kind of machine that it is for; one
    without them is for all. `key_fingerprint` is "" where nobody has noted one: then no host gets it from here.
    """

    name: str
    url: str
    key_url: str
    key_fingerprint: str
    purposes: tuple[str, ...]
    suite: str = ""
    components: tuple[str, ...] = ()
    priority: int = 0
    machines: Mapping[str, str] = field(default_factory=dict)

    @property
    def by_hand(self) -> str:
        """What an administrator does where nobody has noted the fingerprint of its key."""
        place = f"the repository {self.url} with its signing key {self.key_url}"
        return f"{place} (or note that key's fingerprint in the lock, once: `invoke lock` says how)"


class System(Struct, frozen=True):
    """Distribution packages by purpose for the host recipes of one `[system.<id>]`, e.g. {"build-deps": ("gcc", …)}.

    `hold` names (globs) what is kept from changing once a driver was installed. `by_hand` says, by purpose, what an
    administrator has to set up before the packages can be had, where the lock has no repository for them.
    """

    id: str
    manager: str
    packages: Mapping[str, tuple[str, ...]]
    hold: tuple[str, ...] = ()
    repositories: tuple[Repository, ...] = ()
    by_hand: Mapping[str, str] | None = None

    def on(self, machine: str) -> System:
        """Return the row as it is for one kind of machine: its repositories alone, with its name in their addresses."""
        mine = tuple(
            replace(
                entry,
                url=entry.url.replace(MACHINE, entry.machines.get(machine, "")),
                key_url=entry.key_url.replace(MACHINE, entry.machines.get(machine, "")),
                machines={},
            )
            for entry in self.repositories
            if not entry.machines or machine in entry.machines
        )
        return replace(self, repositories=mine)


def read_system(name: str, table: Table) -> System:
    """Return the table `[system.<name>]`; what is wrong with it is noted in the table's problems."""
    manager = table.text("manager", MANAGER)
    packages = _read_packages(table, manager)
    hold = table.words("hold", GLOB)
    repositories = tuple(_repository(inner, label, manager) for label, inner in table.named("repository"))
    by_hand = _read_by_hand(table.inner("by-hand"), repositories)
    table.close()
    return System(name, manager, packages, hold, repositories, by_hand or None)


def _read_packages(table: Table, manager: str) -> dict[str, tuple[str, ...]]:
    """Return the packages of a system by purpose."""
    packages = {purpose: words for purpose in PURPOSES if (words := table.words(purpose, PACKAGE))}
    for purpose, words in packages.items():
        if manager == "apt" and any(word.startswith("@") for word in words):
            table.complain(purpose, "modules (@NAME:STREAM) exist in dnf only", " ".join(words))
    return packages


def _read_by_hand(table: Table, repositories: Sequence[Repository]) -> dict[str, str]:
    """Return what an administrator sets up, by purpose; a purpose that has a repository needs none of it."""
    texts = {purpose: table.text(purpose, BY_HAND) for purpose in PURPOSES if purpose in table.data}
    table.known.extend(PURPOSES)
    table.close()
    by_hand = {purpose: text for purpose, text in texts.items() if text}
    for purpose in by_hand:
        if any(purpose in repository.purposes for repository in repositories):
            table.complain(purpose, "there is a repository for this purpose already", wanted="one of the two")
    return by_hand


def _repository(table: Table, name: str, manager: str) -> Repository:
    apt = manager != "dnf"
    suite = table.text("suite", SUITE) if apt else ""
    components = table.words("components", COMPONENT) if apt else ()
    priority = table.take("priority", int, 0) if apt else 0
    if not 0 <= priority <= HIGHEST_PRIORITY:
        table.complain("priority", "is out of range", priority, f"1 to {HIGHEST_PRIORITY}")
    if suite and suite.endswith("/") == bool(components):
        flat = "none: the suite of a flat repository ends in /"
        table.complain(
            "components", "do not fit the suite", " ".join(components) or "none", flat if components else "at least one"
        )
    machines = table.inner("machines")
    repository = Repository(
        name=name,
        url=table.address("url", URL),
        key_url=table.address("key_url", URL),
        key_fingerprint=_fingerprint(table),
        purposes=table.words("purposes", PURPOSE),
        suite=suite,
        components=components,
        priority=priority,
        machines={each: machines.text(each, FOLDER) for each in MACHINES if each in machines.data},
    )
    machines.known[:] = MACHINES
    machines.close()
    if (MACHINE in repository.url or MACHINE in repository.key_url) != bool(repository.machines):
        what = f"do not fit the addresses, where {MACHINE} stands for it"
        table.complain("machines", what, repository.url, f"both or none of machines and {MACHINE}")
    if not repository.purposes:
        table.complain("purposes", "is empty", wanted="what this repository is for")
    table.close()
    return repository


def _fingerprint(table: Table) -> str:
    """Return the fingerprint of a key; "" where the lock says that nobody has noted it yet."""
    if table.data.get("key_fingerprint") == "":
        return table.take("key_fingerprint", str)
    return table.text("key_fingerprint", FINGERPRINT)


def toolkit_purpose(system: System | None, cuda: str, floor: str) -> str:
    """Return the purpose whose packages hold a CUDA toolkit of the major `cuda`: the plain one, or where the rules ask
    for at least `floor` ("13.1"; "" for any) and its packages are older by their names, the first that is not."""
    plain = f"{TOOLKIT}-{cuda}"
    if system is None or not floor:
        return plain
    for purpose, packages in system.packages.items():
        if purpose == plain or purpose.startswith(f"{plain}-"):
            versions = [tuple(map(int, found.groups())) for word in packages if (found := _TOOLKIT.match(word))]
            if not versions or max(versions) >= tuple(map(int, floor.split(".")[:2])):
                return purpose
    return plain


def recipe_env(system: System | None, purpose: str, kernel: str) -> dict[str, str]:
    """Return what recipes/host/lib/packages.sh takes from the environment for one purpose on a host with that running
    `kernel`.

    MANAGER, PACKAGES and HEADERS (packages, separated by spaces), HOLD (globs), REPOSITORIES (one a line, as `_line`
    writes it) and BY_HAND; "cuda-toolkit-N" adds CUDA_MAJOR, "python" PYTHON_WANTED. Without a row for the distribution
    nothing of it is known, and the recipe says what to install by hand. Without a known kernel, packages named after it
    are left out.
    """
    own = {"CUDA_MAJOR": purpose.split("-")[2]} if purpose.startswith(f"{TOOLKIT}-") else {}
    if system is None:
        return own
    meant = [entry for entry in system.repositories if purpose in entry.purposes]
    untrusted = [entry.by_hand for entry in meant if not entry.key_fingerprint]
    env = {
        "MANAGER": system.manager,
        "PACKAGES": _packages(system, purpose, kernel),
        "REPOSITORIES": "\n".join(_line(entry) for entry in meant if entry.key_fingerprint),
        "HOLD": " ".join(system.hold),
        "BY_HAND": ", ".join((*filter(None, ((system.by_hand or {}).get(purpose),)), *untrusted)),
        "HEADERS": _packages(system, "kernel-headers", kernel) if purpose in NEED_HEADERS else "",
    }
    if purpose == "python" and (match := re.search(r"\bpython(3\.\d+)(?=[=\s]|$)", env["PACKAGES"])):
        own["PYTHON_WANTED"] = match.group(1)
    return {**{name: value for name, value in env.items() if value}, **own}


def _packages(system: System, purpose: str, kernel: str) -> str:
    words = system.packages.get(purpose, ())
    return " ".join(word.replace(KERNEL, kernel) for word in words if kernel or KERNEL not in word)


def _line(entry: Repository) -> str:
    """Return name, address, suite, components (joined by commas), address and fingerprint of the key, and priority;
    "-" for none."""
    fields = (entry.name, entry.url, entry.suite, ",".join(entry.components), entry.key_url, entry.key_fingerprint)
    return " ".join([*(field or ABSENT for field in fields), str(entry.priority)])
