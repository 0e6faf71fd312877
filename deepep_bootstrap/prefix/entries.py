"""Store entries to be: digests and names from inputs. The file work is done by recipes on the prefix's host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.recipes import digest, text_digest
from deepep_bootstrap.inventory.facts import Facts, Python, Toolkit, TorchLibrary
from deepep_bootstrap.lock.model import Lock, Source, Stack, Wheel, deepep_release, is_v25

COMMON_RECIPES = (
    "lib.sh",
    "prefix/lib/owner.sh",
    "prefix/lib/lock.sh",
    "prefix/lib/share.sh",
    "prefix/lib/files.sh",
    "prefix/lib/manifest.sh",
    "build/common.sh",
    "prefix/publish.sh",
)
"""Texts in front of every entry's own recipe, in this order; together they are one script."""
OWN_RECIPES = {
    "gdrcopy": ("build/gdrcopy.sh",),
    "nvshmem": ("build/units.sh", "build/nvshmem.sh"),
    "nvshmem-wheel": ("build/wheel.sh", "build/nvshmem-wheel.sh"),
    "nccl-wheel": ("build/wheel.sh", "build/nccl-wheel.sh"),
    "toolkit": ("build/wheel.sh", "build/toolkit.sh"),
    "python": ("build/python.sh",),
    "deepep": ("build/deepep-checks.sh", "build/units.sh", "build/deepep-setup.sh", "build/deepep.sh"),
    "deepep-v2": (
        "build/deepep-checks.sh",
        "build/deepep-v2-checks.sh",
        "build/units.sh",
        "build/deepep-setup.sh",
        "build/deepep-v2.sh",
    ),
    "deepep-v25": (
        "build/deepep-checks.sh",
        "build/deepep-v2-checks.sh",
        "build/units.sh",
        "build/deepep-setup.sh",
        "build/deepep-v25.sh",
    ),
}
"""The texts of each recipe. Several recipes may make entries of one kind: NVSHMEM from its source or its wheel, DeepEP
V1, V2 or V2.5."""

V25 = "deepep-v25"
"""The recipe of DeepEP V2.5: nothing for a GPU is compiled, so that no architecture and no NVSHMEM is part of it."""

PLACES_OF_V2 = ("PYTHON_ENTRY", "NVSHMEM", "NCCL", "TORCH_NCCL", "TORCH_NVSHMEM")
"""What the recipe of DeepEP V2 gets, each empty where it is not used: entries, and folders beside an external torch."""
UNCOMPILED = ("python", "nvshmem-wheel", "nccl-wheel", "toolkit")
RELOCATOR = "build/relocate.py"


class Entry(Struct, frozen=True):
    """One store entry to be. `inputs` is everything its digest covers; `name` is `<hash32>-<kind>-<version>`.

    `needs` are the entry names that must be published before it is complete, `early` those of them beside which it may
    begin (its recipe waits for what it misses). `source` is the lock's name of its source tree ("" for none), `env`
    what its recipe gets besides places, `wheels` what it is installed from; `recipe` is one of OWN_RECIPES ("" for the
    one called like the kind).
    """

    kind: str
    version: str
    inputs: Mapping[str, object]
    needs: tuple[str, ...] = ()
    early: tuple[str, ...] = ()
    source: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    wheels: tuple[Wheel, ...] = ()
    recipe: str = ""

    @property
    def recipes(self) -> tuple[str, ...]:
        """Return the paths of the recipe texts that make its script, in order."""
        return recipe_names(self.recipe or self.kind)

    @property
    def name(self) -> str:
        """Return the directory name under PREFIX/store."""
        return f"{digest(self.inputs)}-{self.kind}-{self.version}"


class EntryInputs(Struct, frozen=True):
    """What decides the entries of one stack: the lock, the recipe texts by path, GPU architectures ("9.0"), and of
    the build host its facts, CUDA toolkit and Python. `target` names the wheel list (`cp312-x86_64`); "" means
    `python` is an external one, whose torch brings `libraries`; with `own_nccl` DeepEP V2 takes the lock's NCCL in
    place of that torch's."""

    lock: Lock
    stack: Stack
    recipes: Mapping[str, str]
    archs: tuple[str, ...]
    facts: Facts
    toolkit: Toolkit
    python: Python
    target: str
    libraries: tuple[TorchLibrary, ...] = ()
    own_nccl: bool = False

    @property
    def joins_torch(self) -> bool:
        """Whether DeepEP V2 is built against what the torch of an external Python brings."""
        return not self.target and deepep_recipe(self.lock.sources[self.stack.deepep]) == "deepep-v2"

    def library(self, kind: str) -> TorchLibrary:
        """Return the library "nccl" or "nvshmem" of the external Python's torch."""
        return next(each for each in self.libraries if each.kind == kind)


def recipe_names(recipe: str) -> tuple[str, ...]:
    """Return the paths of the recipe texts that make the script of an entry, in order."""
    return (*COMMON_RECIPES, *OWN_RECIPES[recipe])


def name_entries(wanted: EntryInputs) -> tuple[Entry, ...]:
    """Return the store entries of the wanted stack, dependencies first: gdrcopy (where it is used), nvshmem, python
    (unless external), toolkit (where the stack brings one), deepep. DeepEP V2 beside an external Python takes NVSHMEM
    from there: then they are toolkit, deepep, and before it nccl where ours is wanted."""
    stack, sources = wanted.stack, wanted.lock.sources
    if wanted.joins_torch:
        return _beside_torch(wanted)
    made = [_built(wanted, "gdrcopy", sources[stack.gdrcopy], {})] if stack.gdrcopy else []
    if stack.nvshmem_wheel:
        made.append(_unpacked(wanted, "nvshmem", "nvshmem-wheel", stack.nvshmem_wheel))
    else:
        made.append(_built(wanted, "nvshmem", sources[stack.nvshmem], {"GDRCOPY": made[0].name}))
    names = {"NVSHMEM": made[-1].name}
    if wanted.target:
        made.append(_environment(wanted, names["NVSHMEM"]))
        names["PYTHON_ENTRY"] = made[-1].name
    recipe = deepep_recipe(sources[stack.deepep])
    if recipe == V25:
        del names["NVSHMEM"]  # torch alone uses it there
    own = tuple(_toolkit(wanted))
    deepep = _built(wanted, "deepep", sources[stack.deepep], names, early=tuple(names.values()), recipe=recipe)
    if recipe == V25:
        # What will compile its kernels on nodes, by which the recipe judges in place of the build host's own.
        deepep = replace(deepep, env={**deepep.env, "KERNEL_NVCC": own[0].version if own else ""})
    return (*made, *own, deepep)


def _beside_torch(wanted: EntryInputs) -> tuple[Entry, ...]:
    """Return the entries of DeepEP V2 for an external Python: it is built against the NVSHMEM of that Python's torch,
    and against its NCCL or the lock's."""
    own = [_unpacked(wanted, "nccl", "nccl-wheel", wanted.stack.nccl_wheel)] if wanted.own_nccl else []
    nvshmem = wanted.library("nvshmem")
    used = [nvshmem] if own else [wanted.library("nccl"), nvshmem]
    deepep = _built(
        wanted,
        "deepep",
        wanted.lock.sources[wanted.stack.deepep],
        {"NCCL": own[0].name} if own else {},
        recipe="deepep-v2",
    )
    inputs = {"libraries": [[each.kind, each.name, each.version, each.folder] for each in used]}
    env = {
        **{f"TORCH_{each.kind.upper()}": each.folder for each in used},
        "NCCL_VERSION": (own[0] if own else wanted.library("nccl")).version,
    }
    return (*own, *_toolkit(wanted), replace(deepep, inputs={**deepep.inputs, **inputs}, env={**deepep.env, **env}))


def _unpacked(wanted: EntryInputs, kind: str, recipe: str, name: str) -> Entry:
    """Return the entry made of the stack's wheel called `name`. The lock has seen to it that there is one for every
    target; such wheels serve any Python, so an external one gets that of the machine."""
    machine = f"-{wanted.facts.machine}"
    fitting = [
        target
        for target in sorted(wanted.stack.wheels)
        if target == wanted.target or (not wanted.target and target.endswith(machine))
    ]
    wheel = next((found for target in fitting if (found := wanted.stack.pinned(name, target))), None)
    if wheel is None:
        raise Trouble(
            Problem(
                f"stack {wanted.stack.name}",
                f"has no wheel {name} for {wanted.facts.machine}",
                wanted="another --stack",
            )
        )
    inputs = {**_surroundings(wanted, kind, recipe), "wheel": [wheel.name, wheel.version, wheel.hash]}
    env = {**_common_env(wanted), "VERSION": wheel.version, "WHEEL": wheel.requirement}
    return Entry(kind, wheel.version, inputs, env=env, wheels=(wheel,), recipe=recipe)


def _toolkit(wanted: EntryInputs) -> Iterator[Entry]:
    """Yield the entry of the compiler that comes along with the stack, if any. DeepEP is built without it and keeps its
    name whatever compiler that is."""
    pin = wanted.lock.toolkits.get(wanted.stack.toolkit)
    if pin is None:
        return
    wheels = pin.wheels.get(wanted.facts.machine, ())
    if not wheels:
        what = f"has no wheels for {wanted.facts.machine}"
        raise Trouble(Problem(f"toolkit {pin.name}", what, ", ".join(pin.wheels), "another --stack"))
    listed = sorted([wheel.name, wheel.version, wheel.hash] for wheel in wheels)
    inputs = {**_surroundings(wanted, "toolkit", "toolkit"), "wheels": listed}
    lines = "\n".join(wheel.requirement for wheel in wheels)
    env = {**_common_env(wanted), "VERSION": pin.version, "WHEEL": lines}
    yield Entry("toolkit", pin.version, inputs, env=env, wheels=wheels)


def _built(
    wanted: EntryInputs,
    kind: str,
    source: Source,
    needs: Mapping[str, str],
    *,
    early: tuple[str, ...] = (),
    recipe: str = "",
) -> Entry:
    """Return the entry compiled from `source`; `needs` maps the recipe's variable to the entry it needs."""
    inputs: dict[str, object] = {
        **_surroundings(wanted, kind, recipe or kind),
        "source": source.hash,
        "version": source.version,
        "submodules": source.submodules,
        "substitutes": [substitute.effect for substitute in source.substitutes],
        "options": list(source.options),
        "checks": list(source.checks),
        "cuda": wanted.toolkit.version,
        "needs": sorted(needs.values()),
    }
    if kind != "gdrcopy" and recipe != V25:
        inputs["archs"] = list(wanted.archs)
    if kind == "deepep" and not wanted.target:
        inputs["python"] = _external(wanted.python)
    env = {
        **_common_env(wanted),
        **needs,
        "OPTIONS": "\n".join(source.options),
        "CHECKS": " ".join(source.checks),
        "VERSION": source.version,
        "SOURCE_DATE_EPOCH": str(source.last_modified),
    }
    if recipe == "deepep-v2":
        # All of them are said, so that nothing of the account's own environment is taken for one.
        env = dict.fromkeys(PLACES_OF_V2, "") | env
    if recipe in ("deepep-v2", V25) and wanted.target:
        env["NCCL_VERSION"] = wanted.stack.nccl_version(wanted.target)
    return Entry(kind, source.version, inputs, tuple(needs.values()), early, source.name, env, recipe=recipe)


def deepep_recipe(source: Source) -> str:
    """Return the recipe for a tree of DeepEP: V1 is built against NVSHMEM alone, V2 (2.x) against NCCL too, V2.5
    against NCCL alone."""
    release = deepep_release(source.version)
    if is_v25(release):
        return V25
    return "deepep-v2" if release >= (2,) else "deepep"


def _environment(wanted: EntryInputs, nvshmem: str) -> Entry:
    """Return the entry of the Python environment made of the locked wheels; its version is torch's, where torch is in
    it.

    A patch release of the distribution's Python keeps the ABI, so only major and minor count: a security update of the
    operating system does not rebuild the environment.
    """
    wheels = wanted.stack.wheels[wanted.target]
    version = next((wheel.version for wheel in wheels if wheel.name == "torch"), wanted.target)
    inputs: dict[str, object] = {
        **_surroundings(wanted, "python", "python"),
        "target": wanted.target,
        "interpreter": wanted.python.path,
        "python": ".".join(wanted.python.version.split(".")[:2]),
        "wheels": sorted([wheel.name, wheel.version, wheel.hash] for wheel in wheels),
        "needs": [nvshmem],
    }
    env = {**_common_env(wanted), "NVSHMEM": nvshmem, "VERSION": version, "CUDA_MAJOR": wanted.stack.cuda}
    return Entry("python", version, inputs, (nvshmem,), (nvshmem,), "", env, wheels)


def _surroundings(wanted: EntryInputs, kind: str, recipe: str) -> dict[str, object]:
    """Return what the digest of every entry covers: recipe texts, compiler where it is used, operating system."""
    paths = (*recipe_names(recipe), RELOCATOR)
    tools = dict(wanted.facts.tools)
    return {
        "kind": kind,
        "recipes": {_recorded_name(path): text_digest(wanted.recipes[path]) for path in paths},
        "compiler": {name: tools.get(name, "") for name in ("gcc", "g++")} if recipe not in UNCOMPILED else {},
        "os": [wanted.facts.os_id, wanted.facts.os_version, wanted.facts.machine],
    }


def _recorded_name(path: str) -> str:
    """Return the name by which digests and manifests know the recipe at `path`. Libraries had no folder of their own
    when the first entries were built, and a move of files must not make anybody build again."""
    return path.replace("/lib/", "/")


def _external(python: Python) -> dict[str, str]:
    keys = ("path", "version", "soabi", "torch", "torch_git", "torch_cuda", "torch_abi")
    return {key: getattr(python, key) for key in keys}


def _common_env(wanted: EntryInputs) -> dict[str, str]:
    return {
        "CUDA_HOME": wanted.toolkit.path,
        "CUDA_VERSION": wanted.toolkit.version,
        "SPLIT_COMPILE": "1" if wanted.toolkit.split_compile else "0",
        "ARCHS": " ".join(wanted.archs),
        "PYTHON": wanted.python.path,
    }
