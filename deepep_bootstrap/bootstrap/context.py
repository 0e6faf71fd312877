"""The values that the phases of one bootstrap share: the hosts as they were seen, the plan, the run and its
folder of logs; and how they change on the way.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deepep_bootstrap.bootstrap.planning import decide
from deepep_bootstrap.bootstrap.reboot.policy import Policy
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.guard import state_dir
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.survey import Flags, Survey, gather
from deepep_bootstrap.plan.decisions import PlanRequest
from deepep_bootstrap.plan.steps import Plan
from deepep_bootstrap.prefix.generations import PrefixHandle
from deepep_bootstrap.remote.fleet import ConnectionPool
from deepep_bootstrap.remote.host import Host


@dataclass(frozen=True)
class BootstrapContext:
    """What every phase of one bootstrap needs."""

    flags: Flags
    screen: Screen
    run: RunLogs
    transport: ConnectionPool
    survey: Survey
    request: PlanRequest
    plan: Plan
    policy: Policy

    def hosts(self, names: Sequence[str]) -> tuple[Host, ...]:
        """Return the hosts of these names."""
        return tuple(self.survey.host(name) for name in names)

    @property
    def prefix_host(self) -> Host:
        """The host through which the prefix is touched."""
        return self.survey.host(self.plan.choice.prefix_host)

    @property
    def build_user(self) -> str:
        """Who builds and writes the prefix; "" for the connection's own user."""
        return self.survey.inventory.settings.build_user

    @property
    def place(self) -> PrefixHandle:
        """The prefix as its host reaches it."""
        return PrefixHandle(self.prefix_host, self.request.prefix, self.request.recipes, self.build_user)

    @property
    def offers_news(self) -> bool:
        """Whether something is built or offered."""
        return bool(self.plan.of_kind("build") or self.plan.of_kind("offer"))

    @property
    def is_unproved(self) -> bool:
        """Whether an earlier run offered this stack and did not see it work."""
        choice = self.plan.choice
        return choice.record.stack in self.survey.facts[choice.prefix_host].prefix.unproved


def look_again(context: BootstrapContext) -> BootstrapContext:
    """Return the context as it stands now that the hosts were changed: facts and plan anew."""
    survey = with_prefix(gather(context.flags, context.transport, context.survey.inventory, context.request.prefix))
    return replace(context, survey=survey, plan=decide(context.transport, survey, context.request, anyhow=True))


def leave_out(context: BootstrapContext, gone: Collection[str]) -> BootstrapContext:
    """Return the context without hosts that went away since they were looked at: the others are planned for anew.
    Trouble where there is no plan without them."""
    survey = context.survey.without(gone)
    return replace(context, survey=survey, plan=decide(context.transport, survey, context.request))


def tell(context: BootstrapContext, outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
    """Show outcomes and hand them on."""
    context.screen.ended(*outcomes)
    return outcomes


def with_prefix(survey: Survey) -> Survey:
    """Return the survey without hosts that do not see the prefix which most others see; they are problems from here on.

    The survey stays as it was where that is no matter of a few hosts: nobody has the prefix yet, half of them or more
    lack it, or two different ones are seen. What to say then is decided when the plan is made.
    """
    marks = {facts.prefix.id for facts in survey.facts.values() if facts.prefix.id}
    lost: dict[str, list[str]] = {}
    for name, facts in survey.facts.items():
        if why := _lack(facts, wanted=len(marks) == 1):
            lost.setdefault(why, []).append(name)
    names = [name for group in lost.values() for name in group]
    if len(marks) > 1 or 2 * len(names) >= len(survey.facts):
        return survey
    wanted = f"what {len(survey.facts) - len(names)} other hosts see there"
    remedy = "mounting it there; the others go on without"
    problems = (
        Problem(f"{fold(group)} {survey.prefix}", "the prefix is not to be had", why, wanted, remedy)
        for why, group in lost.items()
    )
    return survey.without(names, *problems)


def _lack(facts: Facts, *, wanted: bool) -> str:
    """Return what keeps a host from the prefix, "" where nothing does, or where it need not exist yet."""
    return facts.prefix.problem or ("nothing" if wanted and not facts.prefix.id else "")


@dataclass(frozen=True)
class RunLogs:
    """One run that changes something: its name (time, verb, random part) and the folder its logs go to on the
    control machine."""

    name: str
    folder: Path

    @classmethod
    def start(cls, verb: str) -> RunLogs:
        """Return a new run with its folder; Trouble where that cannot be made, before anything is done that nobody
        could look up."""
        name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{verb}-{secrets.token_hex(3)}"
        folder = state_dir() / "logs" / name
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            remedy = "XDG_STATE_HOME=/a/directory/you/may/write"
            raise Trouble(
                Problem(str(folder.parent), "logs cannot be written there", error.strerror or str(error), try_=remedy)
            ) from None
        return cls(name, folder)

    @classmethod
    def none(cls) -> RunLogs:
        """Return what stands for a run where nothing is done and nothing logged."""
        return cls("", Path(os.devnull))

    def log(self, host: str, step: str, text: str) -> Path:
        """Append `text` to the log of one step on one host and return the file's path."""
        path = self.folder / host / f"{step}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
        return path
