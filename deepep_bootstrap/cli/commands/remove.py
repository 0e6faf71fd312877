"""`invoke remove`: the offer taken back and the files of host recipes undone; packages and the store stay.

Hook, limits and driver options are the host's, which may serve several prefixes. So a host whose hook leads to another
prefix keeps all of them; one whose hook led to another prefix before, which still offers modules, gives the hook back
to it and keeps the rest.
"""

from __future__ import annotations

import getpass
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from deepep_bootstrap.bootstrap.hosts import SLOW_LIMIT
from deepep_bootstrap.bootstrap.planning import RunLogs, read_lock
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, TROUBLE, Problem, Trouble, worst
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.outcome import Outcome, outcome_json
from deepep_bootstrap.core.recipes import compose, last_lines
from deepep_bootstrap.core.records import Records, read_records
from deepep_bootstrap.inventory import forms
from deepep_bootstrap.inventory.flags import Flags, consent
from deepep_bootstrap.inventory.survey import Survey, fold_problems, gather, open_connections, read_inventory, read_tree
from deepep_bootstrap.lock.model import Lock
from deepep_bootstrap.plan import decisions, host_recipes
from deepep_bootstrap.plan.decisions import check_shared
from deepep_bootstrap.plan.host_recipes import BLOCKED, LIBRARIES
from deepep_bootstrap.plan.host_recipes import OK as UNDONE
from deepep_bootstrap.prefix import generations, modulefiles
from deepep_bootstrap.prefix.access import candidates
from deepep_bootstrap.prefix.bill import provenance
from deepep_bootstrap.prefix.generations import Content, PrefixHandle
from deepep_bootstrap.prefix.offer import Offer, check_manifests, named_entries, read_offer
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Reply

if TYPE_CHECKING:
    from deepep_bootstrap.remote.fleet import ConnectionPool

HOOK = "module-hook"
CHANGED = "somebody changed it since; by hand, if it is to go"
TRIES = 3
"""How often the smaller offer is composed again because another run published one meanwhile."""


class Written(Struct, frozen=True):
    """What a host recipe left on a host: a file, `ours` unless somebody changed it since, `replaced` where another one
    stood there before, which is kept; or packages that it holds at their versions, with "" as the path. `left` says why
    it stays ("" where it goes), `heir` to which prefix the hook goes back."""

    recipe: str
    path: str
    ours: bool
    held: str = ""
    replaced: bool = False
    left: str = ""
    heir: str = ""


class Removal(Struct, frozen=True):
    """What is to be taken away: `kept` is what stays of the offer, `files` what recipes wrote, by host, some of which
    may be left."""

    offer: Offer
    kept: Offer
    files: Mapping[str, tuple[Written, ...]]

    @property
    def changes_offer(self) -> bool:
        """Whether anything leaves the offer."""
        return self.offer != self.kept

    @property
    def changes(self) -> bool:
        """Whether there is anything to do."""
        return self.changes_offer or bool(self.undone)

    @property
    def undone(self) -> dict[str, tuple[Written, ...]]:
        """What goes of the files, by host."""
        found = {host: tuple(each for each in files if not each.left) for host, files in self.files.items()}
        return {host: files for host, files in found.items() if files}

    @property
    def stacks(self) -> list[str]:
        """The stacks that leave the offer."""
        return [name for name in self.offer.stacks if name not in self.kept.stacks]


def remove(flags: Flags) -> int:
    """Take the offer (or one --stack of it) away again, and from the hosts what was written there; packages and the
    store stay.

    With --limit only what host recipes wrote is undone, on those hosts: the offer is everybody's."""
    screen = Screen("remove", as_json=flags.json)
    if flags.limit and flags.stack:
        raise Trouble(Problem("--stack", "the offer is the same for all hosts", "--limit beside it", "one of the two"))
    lock, _ = read_lock(replace(flags, stack=""))
    inventory, prefix = read_inventory(flags)
    recipes = read_tree(flags.root / "recipes")
    outcomes: list[Outcome] = []
    with open_connections(flags, inventory) as transport:
        survey = gather(flags, transport, inventory, prefix)
        removal, unheard = plan_removal(flags, transport, survey, lock, recipes)
        survey = survey.without((), *fold_problems(unheard, inventory))
        tell_plan(screen, survey, removal)
        doing = removal.changes and not flags.dry_run
        refusal = consent(flags, "remove", "Take all this away?") if doing else None
        if doing and not refusal:
            if removal.changes_offer:
                outcomes += try_withdraw(flags, transport, survey, removal.kept)
            outcomes += undo(transport, survey, removal.undone, lock=lock, recipes=recipes)
            screen.say()
            screen.outcomes(outcomes)
    problems = (*survey.problems, *([refusal] if refusal else []))
    for problem in problems:
        screen.problem(problem)
    code = worst([OK, *(outcome.code for outcome in outcomes), *(TROUBLE for _ in problems)])
    screen.document(
        code,
        problems,
        prefix=prefix,
        stacks=removal.stacks,
        files={host: [to_builtins(each) for each in found] for host, found in removal.files.items()},
        outcomes=[outcome_json(each) for each in outcomes],
    )
    return code


def plan_removal(
    flags: Flags, transport: ConnectionPool, survey: Survey, lock: Lock, recipes: Mapping[str, str]
) -> tuple[Removal, tuple[Problem, ...]]:
    """Return what is to be taken away, and what is wrong with hosts that cannot say what was written there."""
    offer = offered(survey, None if flags.limit else seat(survey))
    kept = offer if flags.limit else without(offer, flags.stack, lock.default_stack)
    if offer != kept:
        check_shared(survey.prefix, survey.facts)
        check_manifests(survey.prefix, survey.facts, seat(survey).name)
    if flags.stack and kept.stacks:
        return Removal(offer, kept, {}), ()
    files, unheard = written(transport, survey, recipes)
    return Removal(offer, kept, files), unheard


def seat(survey: Survey) -> Host:
    """Return the host through which the offer is read and changed, the one that other verbs on the prefix take.
    Trouble where the hosts file names one that did not answer."""
    for host in candidates(survey.inventory):
        if host.name in survey.facts:
            return host
    settings = survey.inventory.settings
    key = "prefix_host" if settings.prefix_host else "build_host"
    answered = ",".join(survey.facts)
    remedy = f"--limit={answered}: takes back what was written there, and leaves the offer"
    where, name = f"{survey.inventory.path}: {key}", getattr(settings, key)
    raise Trouble(Problem(where, "this host did not answer", name, try_=remedy), *survey.problems)


def offered(survey: Survey, host: Host | None) -> Offer:
    """Return what the prefix offers now as `host` sees it, as any host where it is None; an offer without stacks
    where there is nothing."""
    for name in [host.name] if host else survey.facts:
        if (offer := read_offer(survey.facts[name].prefix.manifest)) is not None:
            return offer
    return Offer("", {}, "")


def without(offer: Offer, stack: str, default: str) -> Offer:
    """Return the offer without one stack, or without any; Trouble for a stack that is not in it."""
    if stack and stack not in offer.stacks:
        raise Trouble(
            Problem(
                "--stack", "this stack is not offered", found=stack, wanted=" or ".join(offer.stacks) or "nothing is"
            )
        )
    left = {name: record for name, record in offer.stacks.items() if stack and name != stack}
    first = default if default in left else next(iter(left), "")
    return Offer(first, left, offer.templates) if offer.stacks else offer


def written(
    transport: ConnectionPool, survey: Survey, recipes: Mapping[str, str]
) -> tuple[dict[str, tuple[Written, ...]], tuple[Problem, ...]]:
    """Return what host recipes wrote on each host, as far as there is anything, and what is wrong with hosts that
    cannot say."""
    folder = f"{survey.prefix}/modulefiles"
    job = Job(compose(recipes, *LIBRARIES, "host/written.sh"), env={"MODULEFILES": folder})
    found: dict[str, tuple[Written, ...]] = {}
    problems: list[Problem] = []
    for name, reply in transport.run_all(survey.reached, lambda host: job).items():
        try:
            records = read_written(reply)
        except Trouble as trouble:
            problems.extend(trouble.problems)
            continue
        files = files_in(records)
        if survey.facts[name].modules.hook and not any(each.recipe == HOOK for each in files):
            # Written before files were put on record.
            files += (
                Written(HOOK, "/etc/profile.d/zz-deepep.sh", True),
                Written(HOOK, "/etc/profile.d/zz-deepep.csh", True),
            )
        if files:
            found[name] = shared(files, folder, records.text("hook"), records.text("heir"))
    return found, tuple(problems)


def read_written(reply: Reply | Trouble) -> Records:
    """Return what host/written.sh said; Trouble where the host cannot say."""
    if isinstance(reply, Trouble):
        raise reply
    if reply.code:
        raise Trouble(
            Problem(
                reply.host,
                "cannot say what was written there",
                found=last_lines(reply.err or f"exit code {reply.code}"),
            )
        )
    return read_records(reply.out, forms.WRITTEN, reply.host, "host/written.sh")


def files_in(records: Records) -> tuple[Written, ...]:
    """Return what host recipes wrote on a host."""
    files = (
        Written(recipe, path, state != "changed", replaced=state == "replaced")
        for recipe, path, state in records.rows("file")
    )
    return (*files, *(Written(recipe, "", True, packages) for recipe, packages in records.rows("held")))


def shared(files: tuple[Written, ...], folder: str, hook: str, heir: str) -> tuple[Written, ...]:
    """Return the files of a host with those left that other prefixes need: `folder` is our modulefiles directory,
    `hook` what the host's hook names ("" without one), `heir` what it goes back to ("" for nothing).

    While a hook is left, everything is that a prefix needs of a host."""
    other = "" if hook in ("", folder) else prefix_of(hook)
    changed = any(each.recipe == HOOK and not each.ours for each in files)
    if not other and not changed and not heir:
        return files
    if other:
        of_hook, of_others = f"of {other}, not of this prefix", f"needed by {other}"
    elif changed:
        of_hook, of_others = CHANGED, "there is a hook still"
    else:
        of_hook, of_others = "", f"needed by {prefix_of(heir)}"
    back = prefix_of(heir) if heir and not of_hook else ""
    return tuple(
        replace(each, left=of_hook, heir=back) if each.recipe == HOOK else replace(each, left=of_others)
        for each in files
    )


def prefix_of(folder: str) -> str:
    """Return the prefix of a modulefiles directory."""
    return folder.removesuffix("/modulefiles")


def tell_plan(screen: Screen, survey: Survey, removal: Removal) -> None:
    """Say what will be taken away and what stays."""
    offer = removal.offer
    for name in removal.stacks:
        screen.say(f"{survey.prefix}: remove module {offer.stacks[name].module}")
    groups: dict[Written, list[str]] = {}
    for host, found in removal.files.items():
        for each in found:
            groups.setdefault(each, []).append(host)
    for each, hosts in groups.items():
        screen.say(f"{fold(hosts)}: {undo_line(each)}")
    if not removal.changes:
        none = "no host that answered has" if survey.problems else "no host has"
        what = f"nothing is offered, and {none}" if not offer.stacks else "none of these hosts has"
        screen.say(f"Nothing to do: {what} anything of ours on record.")
    elif not removal.changes_offer and offer.stacks:
        screen.say("Packages stay, and so does the offer.", style="dim")
    else:
        screen.say(f"Packages stay, and {survey.prefix}/store: generations can be rolled back to.", style="dim")


def undo_line(each: Written) -> str:
    """Return what becomes of a thing that a recipe left on a host."""
    what = f"{each.path} ({each.recipe})" if each.path else f"{each.held} (held by {each.recipe})"
    if each.left:
        return f"leave {what}: {each.left}"
    if each.heir:
        return f"change {what}: back to {each.heir}, which had it before"
    if not each.path:
        return f"no longer hold {each.held} ({each.recipe})"
    if not each.ours:
        return f"leave {what}: {CHANGED}"
    return f"restore {what} as it was before" if each.replaced else f"delete {what}"


def try_withdraw(flags: Flags, transport: ConnectionPool, survey: Survey, kept: Offer) -> list[Outcome]:
    """As `withdraw`, with a failed outcome in place of Trouble: what stands on the hosts is taken back all the same."""
    try:
        return withdraw(flags, transport, survey, kept)
    except Trouble as trouble:
        return [Outcome("offer", seat(survey).name, "failed", str(trouble), code=trouble.code)]


def withdraw(flags: Flags, transport: ConnectionPool, survey: Survey, kept: Offer) -> list[Outcome]:
    """Publish the smaller offer as the next generation; compose again when another run was quicker."""
    step, stack = "offer", flags.stack
    for _ in range(TRIES):
        host = seat(survey)
        if not offered(survey, host).stacks:
            return []
        place = PrefixHandle(
            host, survey.prefix, read_tree(flags.root / "recipes"), survey.inventory.settings.build_user
        )
        number = survey.facts[host.name].prefix.generation
        holdings = provenance.look(transport, place, kept)
        records = holdings.records(named_entries(kept))
        files = [
            *rendered(flags, kept),
            Content("manifest.json", manifest(kept, number + 1, host.name, survey, records).encode()),
            *provenance.bills(holdings, kept, records=records),
        ]
        published = generations.publish_generation(transport, place, files, number)
        if not published.stale:
            left = ", ".join(record.module for record in kept.stacks.values()) or "nothing"
            return [Outcome(step, host.name, "done", f"generation {published.generation} offers {left}")]
        survey = gather(flags, transport, survey.inventory, survey.prefix)
        kept = without(offered(survey, seat(survey)), stack, kept.default_stack)
    raise Trouble(
        Problem(
            survey.prefix, "other runs publish generations all the time", try_="invoke remove, when they have ended"
        )
    )


def rendered(flags: Flags, offer: Offer) -> list[Content]:
    """Return the files of an offer; none where it has no stacks."""
    files = modulefiles.render_offer(offer, read_tree(flags.root / "env")) if offer.stacks else {}
    return [Content(path, file.content, file.executable) for path, file in files.items()]


def manifest(offer: Offer, number: int, name: str, survey: Survey, records: Mapping[str, str]) -> str:
    """Return the text of the smaller generation's manifest. It is for the hosts of the one before: what is left was
    made for them, also for those that did not answer now."""
    by = f"{getpass.getuser()} as {survey.facts[name].user}@{name}, invoke remove"
    created = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    before = decisions.earlier(survey.inventory, survey.facts, survey.facts[name].prefix.manifest, "")
    others = [name for record in offer.stacks.values() for name in record.hosts]
    hosts = tuple(dict.fromkeys((*before.hosts, *others)))
    return modulefiles.manifest(
        offer, generation=number, created=created, by=by, lock_digest="", hosts=hosts, records=records
    )


def undo(
    transport: ConnectionPool,
    survey: Survey,
    files: Mapping[str, tuple[Written, ...]],
    *,
    lock: Lock,
    recipes: Mapping[str, str],
) -> list[Outcome]:
    """Let every recipe of `files` take back what it wrote on a host, the last one first; all hosts at the same
    time. None where there is nothing."""
    if not files:
        return []
    order = [*host_recipes.TITLES, HOOK]

    def recipes_of(host: Host) -> list[str]:
        return sorted({each.recipe for each in files[host.name] if each.recipe in order}, key=order.index, reverse=True)

    def job(host: Host) -> Job:
        system = lock.systems.get(host_recipes.system_id(survey.facts[host.name]))
        env = {"MODULEFILES": f"{survey.prefix}/modulefiles", **({"MANAGER": system.manager} if system else {})}
        text = host_recipes.check_script(recipes, dict.fromkeys(recipes_of(host), env), "remove")
        return Job(text, user="root", watched=True, timeout=SLOW_LIMIT)

    hosts = [host for host in survey.reached if host.name in files]
    replies = transport.run_all(hosts, job)
    run = RunLogs.start("remove")
    return [outcome for host in hosts for outcome in judge(host.name, replies[host.name], recipes_of(host), run)]


def judge(host: str, reply: Reply | Trouble, names: list[str], run: RunLogs) -> list[Outcome]:
    """Return one outcome for each recipe of a host."""
    if isinstance(reply, Trouble):
        return [Outcome("remove", host, "failed", str(reply), code=TROUBLE)]
    log = str(run.log(host, "remove", reply.out + reply.err))
    outcomes = []
    for name, check in host_recipes.parse_checks(reply.out, reply.err, names, host).items():
        state = "done" if check.state == UNDONE else "failed"
        detail = str(check.note or check.found) if check.state != BLOCKED else f"{check.found}: {check.note}"
        outcomes.append(Outcome(f"undo {name}", host, state, detail, code=OK if state == "done" else TROUBLE, log=log))
    return outcomes
