"""A plan in a file: written by `plan --out`, and carried out by `bootstrap --plan` exactly as it stands there, or not
at all.

The file has the words that the plan was made with, digests of everything it was made of, and its steps. Nothing of it
is done as it is read: the plan is made anew, and the two are compared. So a file can say what is to be done, and never
how.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.filetree import whole_file
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.recipes import digest
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.plan.decisions import PlanRequest
from deepep_bootstrap.plan.steps import Plan, Step, plan_json, step_json
from deepep_bootstrap.prefix.offer import offer_digest

KIND = "deepep-bootstrap plan"
LARGEST = 16 * 1024**2
"""Bytes of a plan that is read; the steps of 1000 hosts have less than 1 MiB."""

WORDS = ("hosts", "limit", "lock", "stack", "prefix", "mirror", "python", "nccl", "on_busy_host")
"""Common flags that decide a plan; they come from the file."""

INPUTS = {
    "lock": "the lock",
    "recipes": "recipes/ of this program",
    "env": "env/ of this program",
    "hosts": "the hosts file",
    "mirrors": "the mirrors",
}
"""What a plan is made of besides what hosts answer."""


class SavedPlan(Struct, frozen=True):
    """The document. `flags` and `own` (those that not every verb has) are the words of the command line, with whole
    paths; `inputs` digests by the keys of INPUTS; `steps` those of the JSON document, with what their recipes are told;
    `offer` the digest of what is to be offered; `digest` that of all the rest."""

    kind: str
    schema: int
    made: str
    flags: Mapping[str, Any]
    own: Mapping[str, str]
    inputs: Mapping[str, str]
    steps: tuple[Mapping[str, Any], ...]
    chosen: Mapping[str, Any]
    estimate: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    offer: str = ""
    digest: str = ""


def save_plan(path: str, flags: Flags, own: Mapping[str, str], request: PlanRequest, plan: Plan) -> None:
    """Write a plan to a file, for the account alone. Trouble where the plan cannot be whole yet, and where the file
    cannot be written."""
    if plan.decided is None:
        raise Trouble(
            Problem(
                "--out",
                "hosts must be prepared before the rest can be planned",
                "; ".join(str(problem) for problem in plan.undecided),
                "a plan that is whole",
                "invoke bootstrap, then plan again",
            )
        )
    document = plan_json(plan)
    saved = SavedPlan(
        KIND,
        1,
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        whole_words(flags),
        own,
        input_digests(request),
        tuple(step_document(step) for step in plan.steps),
        plan.chosen(),
        document["estimate"],
        plan.notes,
        offer_digest(plan.decided.offer),
    )
    text = msgspec.json.format(msgspec.json.encode(replace(saved, digest=own_digest(saved))), indent=2) + b"\n"
    try:
        with whole_file(Path(path), mode=0o600) as file:
            file.write(text)
    except OSError as error:
        raise Trouble(Problem(f"--out={path}", "cannot be written", error.strerror or str(error))) from None


def whole_words(flags: Flags) -> dict[str, Any]:
    """Return the flags that decide a plan, with the whole paths of files."""

    def whole(word: str) -> str:
        return os.path.abspath(word) if word and os.path.exists(word) else word

    words: dict[str, Any] = {name: getattr(flags, name) for name in WORDS}
    paths = {name: whole(words[name]) for name in ("hosts", "lock")}
    return {**words, **paths, "mirror": [whole(word) for word in flags.mirror]}


def input_digests(request: PlanRequest) -> dict[str, str]:
    """Return the digests of what a plan is made of, by the keys of INPUTS."""
    inventory = request.inventory
    return {
        "lock": digest({"text": request.lock.text}),
        "recipes": digest(dict(request.recipes)),
        "env": digest(dict(request.templates)),
        "hosts": digest(msgspec.to_builtins((inventory.hosts, inventory.settings, inventory.left_out))),
        "mirrors": digest(msgspec.to_builtins(request.mirrors)),
    }


def step_document(step: Step) -> dict[str, Any]:
    """Return a step as the file has it."""
    return {**step_json(step), "env": dict(step.env)}


def own_digest(saved: SavedPlan) -> str:
    """Return the digest of a document without its own."""
    return digest(msgspec.to_builtins(replace(saved, digest="")))


def read_plan(path: str) -> SavedPlan:
    """Return the plan of a file; Trouble where it is none, or not as it was written."""
    where = f"--plan={path}"
    try:
        with open(path, "rb") as file:
            saved = msgspec.json.decode(file.read(LARGEST), type=SavedPlan)
    except OSError as error:
        raise Trouble(
            Problem(where, "cannot be read", error.strerror or str(error), try_=f"invoke plan --out={path}")
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Trouble(Problem(where, "is no plan", str(error)[:200], f"what invoke plan --out={path} writes")) from None
    if (saved.kind, saved.schema) != (KIND, 1):
        raise Trouble(Problem(where, "is no plan of this version", f"{saved.kind} {saved.schema}", f"{KIND} 1"))
    if saved.digest != own_digest(saved):
        what = "somebody changed it since it was written"
        raise Trouble(Problem(where, what, saved.digest[:12], own_digest(saved)[:12], f"invoke plan --out={path}"))
    return saved


def flags_of(saved: SavedPlan, flags: Flags, own: Mapping[str, str]) -> tuple[Flags, dict[str, str]]:
    """Return the flags that a plan was made with, for the rest those given, and its `own`; Trouble where one that was
    given says something else."""
    made_with = {**saved.flags, **saved.own}
    given = {**whole_words(flags), **own}
    plain = {**whole_words(Flags(flags.root)), **dict.fromkeys(own, "")}
    problems = [
        Problem(
            f"--{name.replace('_', '-')}",
            "is another than the plan was made with",
            _shown(value),
            _shown(made_with.get(name)),
        )
        for name, value in given.items()
        if value not in (plain[name], made_with.get(name))
    ]
    if problems:
        raise Trouble(*problems)
    try:
        known = msgspec.convert({name: saved.flags[name] for name in WORDS if name in saved.flags}, _Words)
    except msgspec.ValidationError as error:
        raise Trouble(Problem("--plan", "has words that no plan is made with", str(error))) from None
    words = {name: getattr(known, name) for name in WORDS}
    return replace(flags, **words), {name: saved.own.get(name, "") for name in own}


class _Words(Struct, frozen=True):
    """The flags of WORDS with their kinds."""

    hosts: str = ""
    limit: str = ""
    lock: str = ""
    stack: str = ""
    prefix: str = ""
    mirror: tuple[str, ...] = ()
    python: str = ""
    nccl: str = ""
    on_busy_host: str = "leave"


def check_same(saved: SavedPlan, path: str, request: PlanRequest, plan: Plan) -> None:
    """Raise Trouble with everything in which a plan made now differs from the one in the file."""
    if problems := tuple(changes_since(saved, path, request, plan)):
        again = f"invoke plan --out={path}, and read it again"
        last = replace(problems[-1], try_=again)
        raise Trouble(*problems[:-1], last)


REST = frozenset(("build", "offer"))
"""Kinds of steps that are left as they were when the hosts are prepared."""


def check_rest(saved: SavedPlan, path: str, plan: Plan) -> None:
    """Raise Trouble where what is left to do after the hosts were prepared is not what the file says of it."""
    left = [step_document(step) for step in plan.steps if step.kind in REST]
    if problems := tuple(changed_steps([step for step in saved.steps if step["kind"] in REST], left)):
        raise Trouble(*problems[:-1], replace(problems[-1], try_=f"invoke plan --out={path}, and read it again"))


def changes_since(saved: SavedPlan, path: str, request: PlanRequest, plan: Plan) -> Iterator[Problem]:
    """Yield what is not as it was when the plan was made: what it is made of, then steps, then choices."""
    now = input_digests(request)
    for name, what in INPUTS.items():
        if saved.inputs.get(name) != now[name]:
            yield Problem(
                f"--plan={path}", f"{what} changed since {saved.made}", now[name][:12], saved.inputs.get(name, "")[:12]
            )
    yield from changed_steps(saved.steps, [msgspec.to_builtins(step_document(step)) for step in plan.steps])
    chosen = plan.chosen()
    for name in {**saved.chosen, **chosen}:
        if saved.chosen.get(name) != chosen.get(name):
            found, wanted = (_shown(each.get(name)) for each in (chosen, saved.chosen))
            yield Problem(f"--plan={path}", f"{name.replace('_', ' ')} is another now", found, wanted)
    if plan.decided and saved.offer != offer_digest(plan.decided.offer):
        yield Problem(f"--plan={path}", "what would be offered is another now", try_="")


def changed_steps(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    """Yield the steps that came, went, or changed."""
    before, now = ({(step["kind"], step["name"], tuple(step["hosts"])): step for step in steps} for steps in (old, new))
    for key in {**before, **now}:
        was, is_ = before.get(key), now.get(key)
        if was == is_:
            continue
        step = is_ or was or {}
        where, title = fold(step["hosts"]), step["title"]
        if is_ is None:
            yield Problem(where, f"{title}: in the plan, and not needed any more")
        elif was is None:
            yield Problem(
                where, f"{title}: needed now, and not in the plan", is_["reason"]["found"], is_["reason"]["wanted"]
            )
        else:
            yield Problem(
                where, f"{title}: is for another reason now, or with other inputs", *(_why(each) for each in (is_, was))
            )


def _why(step: Mapping[str, Any]) -> str:
    return f"{step['reason']['found']} → {step['reason']['wanted']}"


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "nothing")
