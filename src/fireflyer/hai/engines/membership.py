"""Members of an elastic gang, newcomers, and the gang's outcome. No I/O, no clock.

Several processes may run as one rank, one after the other: the incarnations of the rank.

    expected ──RankStarted──> running (a newcomer: not a member) ──RankJoined──> running (a member)
        ^            └─────────────────── RankExited ───────────────────┘
        └── newcomer: a member runs, no rank returned 0, the place was retaken < `rejoins` times

Incarnation 0 is a member from its start; a later incarnation is a newcomer until it joins. In a
gang that is not elastic, this class only tells new events from repeated ones.
"""

from typing import Literal

import msgspec

from fireflyer.hai.model.engine import Gang, RankExited, RankJoined, RankStarted
from fireflyer.hai.processes import describe_exit
from fireflyer.hai.supervisor.messages import Cause, Newcomer

Outcome = Literal["finished", "failed", "stopped", "suspended", "lost"]


class _Place(msgspec.Struct):
    node: str
    incarnation: int = 0
    """Last incarnation that was requested or seen."""
    expected: bool = False
    """True if the incarnation was requested and no event of it has been seen."""
    running: bool = False
    member: bool = False
    exit: RankExited | None = None
    """Exit of the last incarnation that ended."""


class Membership:
    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        per_node = gang.ranks_per_node
        self._places = {
            index * per_node + local: _Place(node)
            for index, node in enumerate(gang.nodes)
            for local in range(per_node)
        }
        self._seen: set[tuple[str, int, int]] = set()
        self._losses: list[RankExited] = []
        """Exits of members with a status other than 0."""

    def observe(self, event: RankStarted | RankJoined | RankExited) -> bool:
        """Records an event. Returns whether the event is new, because two sources may report an
        event of a lost node."""
        key = (type(event).__name__, event.rank, event.incarnation)
        if key in self._seen:
            return False
        self._seen.add(key)
        if isinstance(event, RankExited) and event.joined and event.code != 0:
            self._losses.append(event)
        place = self._places[event.rank]
        if event.incarnation < place.incarnation:
            return True
        place.incarnation, place.expected = event.incarnation, False
        match event:
            case RankStarted():
                place.running, place.member = True, event.incarnation == 0
            case RankJoined():
                place.member = place.running
            case RankExited():
                place.running = place.member = False
                place.exit = event
        return True

    def lost(
        self, node: str, monotonic_ns: int, wall: float, *, continues: bool = False
    ) -> list[RankExited]:
        """Records that all running and expected ranks of the node are gone; elastic gangs only.
        Returns the events to report.

        Args:
            continues: the gang continues without these ranks.
        """
        exits: list[RankExited] = []
        for rank, place in self._places.items():
            if place.node == node and self._gang.elastic and (place.running or place.expected):
                event = RankExited(
                    task=self._gang.task,
                    attempt=self._gang.attempt,
                    rank=rank,
                    incarnation=place.incarnation,
                    joined=place.member,
                    lost=place.member and continues,
                    node=node,
                    code=None,
                    signal=None,
                    suspended=False,
                    monotonic_ns=monotonic_ns,
                    wall=wall,
                )
                self.observe(event)
                exits.append(event)
        return exits

    def expected(self, node: str) -> bool:
        """Returns whether a newcomer was requested on the node, or is about to be, and has not been
        reported yet."""
        return any(place.expected for place in self._places.values() if place.node == node)

    def withdraw(self, node: str) -> None:
        """Cancels the requested newcomers of a node that have not been reported yet."""
        for place in self._places.values():
            if place.node == node and place.expected:
                place.expected = False

    def began(self, node: str) -> bool:
        """Returns whether every rank of the node has started at least once, so that newcomers may
        take the places of its ranks."""
        places = (place for place in self._places.values() if place.node == node)
        return all(place.running or place.exit for place in places)

    def known(self) -> bool:
        """Returns whether every rank has started at least once."""
        return all(map(self.began, self._gang.nodes))

    def deserted(self) -> bool:
        """Returns whether only newcomers are left, so that no member can admit them."""
        places = self._places.values()
        left = any(place.running or place.expected for place in places)
        return left and self.known() and not any(place.member for place in places)

    def newcomers(self, closed: set[str]) -> dict[str, tuple[Newcomer, ...]]:
        """Returns newcomers for the places of lost ranks, by node, except on `closed` nodes. Marks
        the newcomers as expected."""
        places = self._places.values()
        if not (self._gang.elastic and any(place.member for place in places)) or self._ending():
            return {}
        asked: dict[str, tuple[Newcomer, ...]] = {}
        for rank, place in self._places.items():
            vacant = place.exit is not None and not place.running and not place.expected
            if vacant and place.node not in closed and place.incarnation < self._gang.rejoins:
                place.incarnation, place.expected = place.incarnation + 1, True
                newcomer = Newcomer(rank, place.incarnation)
                asked[place.node] = (*asked.get(place.node, ()), newcomer)
        return asked

    def _ending(self) -> bool:
        exits = [place.exit for place in self._places.values()]
        return any(event is not None and event.code == 0 for event in exits)

    def outcome(self, causes: set[Cause], *, suspend_told: bool) -> tuple[Outcome, str]:
        """Returns the outcome and the reason of a gang that has ended. REQUIRES: all its ranks have
        started."""
        if "stopped" in causes:
            return "stopped", ""
        if suspend_told:
            return "suspended", ""
        ends = [place.exit for place in self._places.values() if place.exit is not None]
        done = [event.monotonic_ns for event in ends if event.code == 0]
        losses = sorted(self._losses, key=lambda event: event.monotonic_ns)
        late = [event for event in losses if done and event.monotonic_ns > min(done)]
        if done and not late:
            if len(done) == len(ends):
                return "finished", "every rank returned 0"
            return "finished", f"all remaining ranks returned 0 ({len(done)} of {len(ends)})"
        if "suspended" in causes:
            return "suspended", ""
        if late:
            return "failed", f"{_describe(late[0])} after other ranks had returned 0"
        last = losses[-1]
        return "lost" if _with_its_node(
            last
        ) else "failed", f"all ranks have ended, the last one: {_describe(last)}"


def _with_its_node(event: RankExited) -> bool:
    return event.code is None and event.signal is None


def _describe(event: RankExited) -> str:
    if _with_its_node(event):
        return f"rank {event.rank} was lost with {event.node}"
    return f"rank {event.rank} on {event.node} {describe_exit(event.code, event.signal)}"
