"""What goes into a generation to say where it comes from: the bill of materials, written from what the store says of
itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.lock import model
from deepep_bootstrap.lock.model import Lock
from deepep_bootstrap.prefix import history
from deepep_bootstrap.prefix.contents import Holdings
from deepep_bootstrap.prefix.generations import Content, PrefixHandle
from deepep_bootstrap.prefix.offer import Offer
from deepep_bootstrap.remote.jobs import Transport

BILL = "sbom.cdx.json"
"""The name that readers of CycloneDX know such files by."""


def look(transport: Transport, place: PrefixHandle, offer: Offer, own: Lock | None = None) -> Holdings:
    """Return what the prefix holds, for the manifest and the bill of an offer about to be published. `own` is the lock
    of this run: stacks that were bootstrapped before have theirs in the generations, which are read where the offer
    has any."""
    return history.read_contents(transport, place, locks=own is None or len(offer.stacks) > 1, metadata=True)


def bills(
    holdings: Holdings, offer: Offer, own: Lock | None = None, records: Mapping[str, str] | None = None
) -> tuple[Content, ...]:
    """Return the bill of materials of an offer about to be published.

    `own` is the lock of this run, `records` are the sums of its entries' records by name.
    """
    # The CycloneDX library is needed here alone, and every verb would wait for it.
    from deepep_bootstrap.prefix.bill import sbom

    locks = [*locks_of(holdings), *([own] if own else [])]
    return (Content(BILL, sbom.make_bill(offer, holdings, sbom.Pins.of(locks), records)),)


def locks_of(holdings: Holdings) -> Iterator[Lock]:
    """Yield the locks of all generations, the oldest first; one that another version of this program wrote is
    left out."""
    for generation in holdings.generations:
        try:
            yield model.parse_lock(generation.lock, f"generations/{generation.number}/deepep.lock.toml")
        except Trouble:
            continue
