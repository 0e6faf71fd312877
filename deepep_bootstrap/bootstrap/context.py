"""What the phases of one bootstrap share: the hosts as they were seen, the plan, the run's folder; and how it changes on the way."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from deepep_bootstrap.bootstrap.logs import Run
from deepep_bootstrap.bootstrap.planning import decide
from deepep_bootstrap.bootstrap.reboot.reboots import Reboots
from deepep_bootstrap.bootstrap.sharing import with_prefix
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.fetch.locations import Mirrors
from deepep_bootstrap.inventory.survey import Flags, Survey, gather
from deepep_bootstrap.plan.decisions import Request
from deepep_bootstrap.plan.steps import Plan
from deepep_bootstrap.prefix.generations import Place
from deepep_bootstrap.remote.fleet import Fleet
from deepep_bootstrap.remote.host import Host


@dataclass(frozen=True)
class Work:
    """What every phase of one bootstrap needs."""

    flags: Flags
    screen: Screen
    run: Run
    door: Fleet
    survey: Survey
    request: Request
    plan: Plan
    mirrors: Mirrors
    reboots: Reboots

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
    def place(self) -> Place:
        """The prefix as its host reaches it."""
        return Place(self.prefix_host, self.request.prefix, self.request.recipes, self.build_user)

    @property
    def offers_news(self) -> bool:
        """Whether something is built or offered."""
        return bool(self.plan.of_kind("build") or self.plan.of_kind("offer"))

    @property
    def is_unproved(self) -> bool:
        """Whether an earlier run offered this stack and did not see it work."""
        choice = self.plan.choice
        return choice.record.stack in self.survey.facts[choice.prefix_host].prefix.unproved


def look_again(work: Work) -> Work:
    """Return the work as it stands now that the hosts were changed: facts and plan anew."""
    survey = with_prefix(gather(work.flags, work.door, work.survey.inventory, work.request.prefix))
    return replace(work, survey=survey, plan=decide(work.door, survey, work.request, anyhow=True))


def leave_out(work: Work, gone: Collection[str]) -> Work:
    """Return the work without hosts that went away since they were looked at: the others are planned for anew. Trouble where there
    is no plan without them."""
    survey = work.survey.without(gone)
    return replace(work, survey=survey, plan=decide(work.door, survey, work.request))


def tell(work: Work, outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
    """Show outcomes and hand them on."""
    work.screen.ended(*outcomes)
    return outcomes
