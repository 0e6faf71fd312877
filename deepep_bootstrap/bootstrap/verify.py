"""Proof on the hosts that `module load deepep` gives a user what the stack promises."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.core.errors import TROUBLE, VERDICT, Problem, Trouble
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.core.recipes import compose
from deepep_bootstrap.core.records import read_records
from deepep_bootstrap.core.text import HostText
from deepep_bootstrap.inventory.forms import MODULE
from deepep_bootstrap.inventory.survey import Survey
from deepep_bootstrap.prefix.modulefiles import nvshmem_folder
from deepep_bootstrap.prefix.offer import X86, StackRecord, machine_of
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Reply, Transport

Keep = Callable[[str, str], object]
"""Takes a host's name and what it said; gives the place of the log, "" where none is kept."""

LOOK_LIMIT = 600.0
"""Seconds for loading the module and importing torch; the first import over a cold network filesystem takes minutes."""


class Load(Struct, frozen=True):
    """How a user loads the module: by which name ("" for its full one), and whether without our hook, by `module
    use` first."""

    name: str = ""
    without_hook: bool = False


class LoadVerdict(Struct, frozen=True):
    """What a user gets on one host. `loaded` is the module's full name ("" without one), `printed` what the module
    system printed; `imported` is None where nothing was imported, `error` why it failed; `deep_ep` and `nvshmem` are
    the files really used, with links followed, `deepep_entry` and `nvshmem_entry` the store entries in the same
    form (of torch's own NVSHMEM its folder), `nccl` and `nccl_version` the NCCL that DeepEP V2 calls ("" for V1).
    `stale` is what `current` leads to as this host sees it and where it should, () where that is the same."""

    module_system: bool
    loaded: str
    printed: HostText
    imported: bool | None
    error: HostText
    deep_ep: str
    torch: str
    nvshmem: str
    deepep_entry: str
    nvshmem_entry: str
    driver: bool
    nccl: str = ""
    nccl_version: str = ""
    stale: tuple[str, ...] = ()


def load_job(
    record: StackRecord, recipes: Mapping[str, str], *, load: Load = Load(), imports: bool = True, generation: int = 0
) -> Job:
    """Return the job that looks at one host; its output is for `parse`. `load` is how the module is loaded,
    `imports` whether DeepEP is imported too, `generation` the one to wait for (0: none)."""
    env = {
        "LOAD": load.name or record.module,
        "USE": f"{record.prefix}/modulefiles" if load.without_hook else "",
        "ENV_FILE": f"{record.prefix}/current/env-{record.stack}.sh",
        "DEEPEP": f"{record.prefix}/store/{record.deepep}",
        "NVSHMEM": nvshmem_folder(record),
        "PYTHON": record.external_python,
        "IMPORT": "yes" if imports else "no",
        "GENERATION": str(generation),
        "PROBE": recipes["verify/probe.py"],
    }
    script = compose(recipes, "lib.sh", "verify/module.sh")
    return Job(script, env=env, watched=True, timeout=LOOK_LIMIT, anywhere=True)


def parse_verdict(reply: Reply) -> LoadVerdict:
    """Return what a host answered; Trouble when the script itself failed or its answer cannot be read."""
    if reply.code:
        raise Trouble(Problem(reply.host, "looking at the module failed", reply.said[-400:]))
    records = read_records(reply.out, MODULE, reply.host, "verify/module.sh")
    return LoadVerdict(
        module_system=records.text("module") == "yes",
        loaded=records.text("loaded"),
        printed=records.shown("said"),
        imported={"yes": True, "no": False}.get(records.text("import")),
        error=records.shown("error"),
        deep_ep=records.text("deep_ep"),
        torch=records.text("torch"),
        nvshmem=records.text("nvshmem"),
        deepep_entry=records.text("deepep_entry"),
        nvshmem_entry=records.text("nvshmem_entry"),
        driver=records.text("driver") == "yes",
        nccl=records.text("nccl"),
        nccl_version=records.text("nccl_version"),
        stale=next(iter(records.rows("stale")), ()),
    )


def problems(host: str, verdict: LoadVerdict, record: StackRecord) -> tuple[Problem, ...]:
    """Return everything in a verdict that is not as the stack wants it."""
    return (
        *_stale_prefix(host, verdict),
        *_wrong_module(host, verdict, record),
        *_failed_import(host, verdict, record),
        *_foreign_libraries(host, verdict, record),
    )


def _stale_prefix(host: str, verdict: LoadVerdict) -> Iterator[Problem]:
    if verdict.stale:
        seen, wanted = verdict.stale
        remedy = "invoke verify in a minute; if it stays so, the mount options of the prefix there"
        yield Problem(host, "this host still sees another generation of the prefix", seen, wanted, remedy)


def _wrong_module(host: str, verdict: LoadVerdict, record: StackRecord) -> Iterator[Problem]:
    """Yield what is wrong with what was loaded: by the module system, or from env.sh where there is none."""
    if not verdict.module_system:
        if verdict.printed:
            yield Problem(host, "env.sh cannot be read", str(verdict.printed), "silence")
    elif verdict.loaded != record.module:
        missing = verdict.loaded or str(verdict.printed) or "no module"
        remedy = "invoke bootstrap, then a new login shell"
        yield Problem(host, "module load gives another module", missing, record.module, remedy)


def _failed_import(host: str, verdict: LoadVerdict, record: StackRecord) -> Iterator[Problem]:
    if verdict.imported is False:
        what = "import deep_ep fails"
        if record.external_python and record.nvshmem and not verdict.driver:
            what += "; this host has no NVIDIA driver, so our NVSHMEM is not preloaded into the external Python"
        yield Problem(host, what, str(verdict.error), "no error")


def _foreign_libraries(host: str, verdict: LoadVerdict, record: StackRecord) -> Iterator[Problem]:
    """Yield the libraries of another place or version that an import which succeeded would use. Where the module is one
    of another prefix, all of them are that one's, and only the prefix is told."""
    if not verdict.imported:
        return
    own, other = (path.partition("/store/")[0] for path in (verdict.deepep_entry, verdict.deep_ep))
    if "/store/" in verdict.deep_ep and own != other:
        remedy = "invoke status, which says where MODULEPATH leads; invoke bootstrap makes it lead to this prefix"
        yield Problem(host, "the module of another prefix is loaded", other, own, remedy)
        return
    places = [("deep_ep comes from another place", verdict.deep_ep, verdict.deepep_entry)]
    if not record.is_v25:
        places.append(("DeepEP would call another NVSHMEM", verdict.nvshmem, verdict.nvshmem_entry))
    for what, file, entry in places:
        if not file.startswith(f"{entry}/"):
            yield Problem(host, what, file or "no such symbol", f"{entry}/…")
    if record.nccl and verdict.nccl_version != record.nccl:
        seen = f"{verdict.nccl_version or 'none'} {verdict.nccl}".rstrip()
        yield Problem(host, "DeepEP would call another NCCL", seen, f"{record.nccl}, with which it was built")


def of_machine(survey: Survey, record: StackRecord) -> list[Host]:
    """Return the hosts that answered on which a record's build runs; on others the module says that it does not."""
    wanted = record.machine or X86
    return [host for host in survey.reached if machine_of(survey.facts[host.name]) == wanted]


def verify_all(
    transport: Transport,
    hosts: Sequence[Host],
    record: StackRecord,
    recipes: Mapping[str, str],
    *,
    load: Load = Load(),
    generation: int = 0,
    keep: Keep = lambda *_: "",
    without_gpu: Collection[str] = (),
    on_end: Callable[[str], None] | None = None,
) -> tuple[Outcome, ...]:
    """Look at all hosts at once, login hosts and those `without_gpu` without the import, as soon as they see
    `generation` as the current one (0: at once); return one outcome per host in their order. `keep` gets what a host
    said that is not as it should be, and returns where that can be read; `on_end` hears of each host that has ended."""

    def job(host: Host) -> Job:
        imports = host.role == "gpu" and host.name not in without_gpu
        return load_job(record, recipes, load=load, imports=imports, generation=generation)

    replies = transport.run_all(hosts, job, on_end=on_end)
    outcomes = []
    for host in hosts:
        reply = replies[host.name]
        outcome = _judge(host.name, reply, record)
        if outcome.state == "failed" and isinstance(reply, Reply):
            outcome = replace(outcome, log=str(keep(host.name, reply.out + reply.err)))
        outcomes.append(outcome)
    return tuple(outcomes)


def _judge(host: str, reply: Reply | Trouble, record: StackRecord) -> Outcome:
    try:
        if isinstance(reply, Trouble):
            raise reply
        verdict = parse_verdict(reply)
    except Trouble as trouble:
        return Outcome("verify", host, "failed", _line(trouble.problems), code=TROUBLE)
    wrong = problems(host, verdict, record)
    if wrong:
        return Outcome("verify", host, "failed", _line(wrong), reply.seconds, VERDICT)
    return Outcome("verify", host, "done", _praise(verdict, record), reply.seconds)


def _praise(verdict: LoadVerdict, record: StackRecord) -> str:
    loaded = f"module {verdict.loaded}" if verdict.module_system else f"no module system, env-{record.stack}.sh"
    if verdict.imported is None:
        return loaded
    nccl = f", NCCL {verdict.nccl_version}" if verdict.nccl_version else ""
    nvshmem = "" if record.is_v25 else f", NVSHMEM {verdict.nvshmem.removeprefix(record.prefix + '/')}"
    return f"{loaded}, deep_ep imported with torch {verdict.torch or '(none)'}{nccl}{nvshmem}"


def _line(wrong: Sequence[Problem]) -> str:
    """Return problems of one host as one line without the host, which stands beside it."""
    return "; ".join(str(problem).removeprefix(f"{problem.where}: ") for problem in wrong)
