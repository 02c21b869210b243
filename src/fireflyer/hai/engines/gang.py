"""From what the nodes' supervisors record to what the platform is told of a gang. No I/O, no clock.

A node's part is `open` from its launch until its PartEnded record or its loss; the gang has ended when the
launch is over and no part is open. The first failure or loss asks for an abort of all open parts.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from fireflyer.hai.engines import EngineEvent, Gang, GangEnded
from fireflyer.hai.engines.messages import Frozen, PartEnded, Record

Outcome = Literal["finished", "failed", "stopped", "suspended", "lost"]


class Now(msgspec.Struct, frozen=True):
    monotonic_ns: int
    wall: float


def decide(answers: Iterable[Frozen]) -> int:
    """The call number from which `suspend_requested()` is true on all ranks: the one in force on
    some node, else the first that no rank was answered."""
    answers = list(answers)
    in_force = {answer.decision for answer in answers} - {0}
    if in_force:
        (number,) = in_force
        return number
    return 1 + max(answer.highest for answer in answers)


class GangState:
    """Feed it records, losses and the end of the launch; `take` what follows."""

    def __init__(self, gang: Gang) -> None:
        self.gang = gang
        self.open: set[str] = set()
        self.parts: dict[str, PartEnded] = {}
        self.aborting = False
        """An open part is to be aborted; so is one that opens later."""
        self.ended: GangEnded | None = None
        self._sealed = False
        self._withdrawn: tuple[Outcome, str] | None = None
        self._refused = ""
        self._lost: dict[str, str] = {}
        self._last: Now | None = None
        self._seq: dict[str, int] = {}
        self._events: list[EngineEvent] = []

    def opened(self, node: str) -> None:
        """The node has been asked to start its part."""
        if node not in self.parts and node not in self._lost:
            self.open.add(node)

    def refuse(self, reason: str) -> None:
        """The rest of the gang cannot be started."""
        self._refused = reason
        self.aborting = True

    def withdraw(self, outcome: Outcome, reason: str) -> None:
        """REQUIRES: no part was opened, nor will be. So it ends, once it is sealed."""
        self._withdrawn = (outcome, reason)

    def sealed(self, now: Now) -> None:
        """No further part will be opened."""
        self._sealed = True
        if not self.open:
            self._end(self._last or now)

    def record(self, record: Record, node: str) -> None:
        """A record of the node's journal; one that was seen before has no effect."""
        if record.seq <= self._seq.get(node, 0) or self.ended is not None:
            return
        self._seq[node] = record.seq
        event = record.event
        if not isinstance(event, PartEnded):
            self._events.append(event)
            return
        self.parts[node] = event
        self.open.discard(node)
        if event.failed_ns:
            self.aborting = True
        self._end(Now(event.monotonic_ns, event.wall))

    def lost(self, node: str, why: str, now: Now) -> None:
        """The node's supervisor is gone and nothing of the part is left, and no record says how it ended."""
        if node in self.parts or node in self._lost:
            return
        self._lost[node] = why
        self.open.discard(node)
        self.aborting = True
        self._end(now)

    def take(self) -> list[EngineEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _end(self, now: Now) -> None:
        if self._last is None or now.monotonic_ns > self._last.monotonic_ns:
            self._last = now
        if not self._sealed or self.open or self.ended is not None:
            return
        outcome, reason = self._outcome()
        self.ended = GangEnded(
            task=self.gang.task,
            attempt=self.gang.attempt,
            outcome=outcome,
            reason=reason,
            monotonic_ns=self._last.monotonic_ns,
            wall=self._last.wall,
        )
        self._events.append(self.ended)

    def _outcome(self) -> tuple[Outcome, str]:
        if self._withdrawn is not None:
            return self._withdrawn
        parts = list(self.parts.values())
        failures = sorted((p for p in parts if p.failed_ns), key=lambda p: p.failed_ns)
        reason = failures[0].reason if failures else "; ".join(p.reason for p in parts if p.reason)
        if self._lost:
            return "lost", "; ".join(self._lost.values())
        causes = {part.cause for part in parts}
        if "stopped" in causes:
            return "stopped", reason
        if "suspended" in causes or any(part.told for part in parts):
            return "suspended", reason
        if causes == {"finished"} and len(parts) == len(self.gang.nodes):
            return "finished", "every rank returned 0"
        return "failed", self._refused or reason or "replaced by a newer attempt"
