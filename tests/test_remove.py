"""remove: through which host the offer is read and changed, and what stays of it."""

from __future__ import annotations

import modules_support as support
import pytest
from build_support import ROOT
from store_support import Prefix

from deepep_bootstrap import facts, generations, hosts, modules
from deepep_bootstrap.errors import Trouble
from deepep_bootstrap.facts import Facts
from deepep_bootstrap.generations import Content
from deepep_bootstrap.holdings import entry_names
from deepep_bootstrap.store import offer_document
from deepep_bootstrap.survey import Flags, Survey
from deepep_bootstrap.verbs.remove import offered, seat, withdraw, without

pytest_plugins = ["store_support"]


@pytest.mark.parametrize(
    ("settings", "answered", "wanted"),
    [
        ("", "abc", "b"),  # GPU hosts before login hosts, as in other verbs
        ("", "ac", "c"),
        ("build_host=c", "abc", "c"),
        ("build_host=c prefix_host=a", "abc", "a"),
        ("build_host=c", "ab", "build_host: this host did not answer — found c"),
        ("build_host=c prefix_host=a", "bc", "prefix_host: this host did not answer — found a"),
    ],
)
def test_the_host_is_that_of_every_verb_on_the_prefix(settings: str, answered: str, wanted: str) -> None:
    inventory = hosts.parse(f"defaults prefix=/p {settings}\na role=login\nb\nc\n", "hosts.txt")
    survey = Survey(inventory, "/p", {name: Facts() for name in answered})
    if len(wanted) > 1:
        with pytest.raises(Trouble, match=wanted):
            seat(survey)
    else:
        assert seat(survey).name == wanted


def test_offer_and_number_are_those_that_one_host_sees(prefix: Prefix) -> None:
    offer = support.offer(str(prefix.path))
    for name in entry_names(offer_document(offer)):
        prefix.entry(name)
    text = modules.manifest(offer, generation=1, created="2026-01-01T00:00:00Z", by="admin", lock_digest="", hosts=("a", "b"))
    generations.publish_generation(prefix.door, prefix.place, [Content("manifest.json", text.encode())], 0)
    # Another host's view of a network filesystem may be a minute old, or of another directory.
    old = facts.Prefix(generation=7, manifest=text.replace("v1-cu13", "old"))
    inventory = hosts.parse("defaults build_host=b\na connection=local\nb connection=local\n", "hosts.txt")
    seen = {"a": Facts(prefix=old), "b": Facts(prefix=facts.Prefix(generation=1, manifest=text))}
    survey = Survey(inventory, str(prefix.path), seen)
    found = offered(survey, seat(survey))
    assert list(found.stacks) == ["v1", "v1-cu13"]
    (outcome,) = withdraw(Flags(root=ROOT, stack="v1-cu13"), prefix.door, survey, without(found, "v1-cu13", "v1"))
    assert (outcome.host, outcome.state) == ("b", "done")
    newest = prefix.look().generations[-1]
    assert (newest.number, list(newest.stacks)) == (2, ["v1"])
