"""Scrub of all replicas on request, and its result."""

import time
from collections.abc import Callable

import msgspec

from fireflyer.fs3.client.discovery import Place
from fireflyer.fs3.manager.core import TargetVitals
from fireflyer.fs3.manager.routing import SLOTS
from fireflyer.fs3.manager.service import Status
from fireflyer.fs3.survey import Watch

POLL_S = 0.5
REPAIR_S = 15.0
"""Seconds to wait for repairs after the last read; enough if an intact copy exists."""


class Scrubbed(msgspec.Struct):
    """Result of a scrub of all replicas."""

    targets: int
    """Number of targets whose chunks were all read."""
    chunks: int
    bytes: int
    damaged: int
    """Number of chunks whose bytes do not match their CRCs."""
    unrepaired: int
    """Number of chunks that remain damaged, because no reachable replica has them intact."""
    unread: list[str]
    """Targets that were not read: the node does not answer, or the target is not open."""

    @property
    def well(self) -> bool:
        """True if everything was read and nothing was damaged."""
        return not (self.damaged or self.unrepaired or self.unread)


def scrub(place: Place, advance: Callable[[int], None]) -> Scrubbed:
    """Makes every node read all its chunks and repair damaged ones; waits until that is done.

    Args:
        place: the file system.
        advance: callback that gets the number of bytes read, target by target.

    Raises:
        WireError: no manager answers.
    """
    with Watch(place) as watch:
        wanted = {target for chain in watch.chains.values() for target in chain.targets()}
        names = {node.id: node.name for node in watch.nodes.values()}
        before = _known(watch.link.status(), wanted)
        number, reported, deadline = watch.link.scrub(), set[int](), 0.0
        while True:
            status = watch.link.status()
            known = _known(status, wanted)
            done = {target for target, its in known.items() if its.scrub >= number}
            for target in done - reported:
                advance(known[target].bytes)
            reported |= done
            if not (_readable(status, wanted) - done):
                deadline = deadline or time.monotonic() + REPAIR_S
                if (
                    not any(its.unrepaired for its in known.values())
                    or time.monotonic() >= deadline
                ):
                    break
            watch.wait(lambda: False, POLL_S)
            watch.link.scrub(number)  # again: a new primary manager does not know the request
    return Scrubbed(
        targets=len(done),
        chunks=sum(known[target].chunks for target in done),
        bytes=sum(known[target].bytes for target in done),
        damaged=sum(max(0, known[t].damaged - _damaged(before, t)) for t in done),
        unrepaired=sum(its.unrepaired for its in known.values()),
        unread=[f"{names[t // SLOTS]}/{t % SLOTS}" for t in sorted(wanted - done)],
    )


def _known(status: Status, wanted: set[int]) -> dict[int, TargetVitals]:
    """Returns the vitals of open targets of nodes that answer."""
    return {
        target: its
        for node, heard in status.heard.items()
        if node in status.alive and heard.vitals is not None
        for target, its in heard.vitals.targets.items()
        if target in wanted
    }


def _readable(status: Status, wanted: set[int]) -> set[int]:
    """Returns the open targets of nodes that answer."""
    faulty = {
        target
        for heard in status.heard.values()
        if heard.vitals is not None
        for target in heard.vitals.faults
    }
    return {target for target in wanted - faulty if target // SLOTS in status.alive}


def _damaged(before: dict[int, TargetVitals], target: int) -> int:
    return before[target].damaged if target in before else 0
