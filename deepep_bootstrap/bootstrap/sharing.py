"""Which hosts a run can go on with where one or two have lost the prefix: a mount that hangs or is missing. Pure."""

from __future__ import annotations

from deepep_bootstrap.core.errors import Problem
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.survey import Survey


def with_prefix(survey: Survey) -> Survey:
    """Return the survey without hosts that do not see the prefix which most others see; they are problems from here on.

    The survey stays as it was where that is no matter of a few hosts: nobody has the prefix yet, half of them or more lack it, or two
    different ones are seen. What to say then is decided when the plan is made.
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
        Problem(f"{fold(group)} {survey.prefix}", "the prefix is not to be had", why, wanted, remedy) for why, group in lost.items()
    )
    return survey.without(names, *problems)


def _lack(facts: Facts, *, wanted: bool) -> str:
    """Return what keeps a host from the prefix, "" where nothing does, or where it need not exist yet."""
    return facts.prefix.problem or ("nothing" if wanted and not facts.prefix.id else "")
