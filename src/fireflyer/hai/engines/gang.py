"""Turns the records of the nodes' supervisors into the events of a gang. No I/O, no clock.

A part is the gang's ranks on one node. A part is `open` from its launch until its PartEnded record
or its loss. The gang has ended when the launch is over and no part is open. The first failure or
loss aborts all open parts.

An elastic gang whose ranks accept newcomers continues without the ranks that it loses. A newcomer
is a process that takes a lost rank's place. `membership` tracks members and newcomers. Lost parts,
and vacant parts (without a rank left), are opened again for newcomers.
"""

from collections.abc import Iterable

import msgspec

from fireflyer.hai.engines.membership import Membership, Outcome
from fireflyer.hai.model.engine import EngineEvent, Gang, GangEnded, NodeObserved
from fireflyer.hai.supervisor.messages import Frozen, Newcomer, PartEnded, Record


class Now(msgspec.Struct, frozen=True):
    monotonic_ns: int
    wall: float


def decide(answers: Iterable[Frozen]) -> int:
    """Returns the number of the first call of `suspend_requested()` that returns true on all ranks.
    If a node has applied such a number, returns that number; else the first call number that no
    rank has reached."""
    answers = list(answers)
    in_force = {answer.decision for answer in answers} - {0}
    if in_force:
        (number,) = in_force
        return number
    return 1 + max(answer.highest for answer in answers)


class GangState:
    """State of a gang. The inputs are records, losses and the end of the launch; `take` returns the
    events."""

    def __init__(self, gang: Gang) -> None:
        self.gang = gang
        self.open: set[str] = set()
        self.parts: dict[str, PartEnded] = {}
        self.aborting = False
        """True if all open parts must be aborted, also parts that open later."""
        self.leaving = False
        """True if a suspend or stop was requested, so that no more newcomers are started."""
        self.ended: GangEnded | None = None
        self._members = Membership(gang)
        self._sealed = False
        self._never_started: tuple[Outcome, str] | None = None
        self._refused = ""
        self._lost: dict[str, str] = {}
        self._blamed: list[str] = []
        self._last: Now | None = None
        self._seq: dict[str, int] = {}
        self._events: list[EngineEvent] = []

    def opened(self, node: str) -> None:
        """Records that the node has been asked to start its part."""
        if node not in self.parts and node not in self._lost:
            self.open.add(node)

    def not_opened(self, node: str) -> None:
        """Withdraws `opened`: the node will not be asked to start its part."""
        self.open.discard(node)

    def reopened(self, node: str) -> None:
        """Records that newcomers have been sent to the node."""
        self.parts.pop(node, None)
        self._lost.pop(node, None)
        self.open.add(node)

    def refuse(self, reason: str) -> None:
        """Records that the rest of the gang cannot be started, and aborts the gang."""
        self._refused = reason
        self.aborting = True

    def never_starts(self, outcome: Outcome, reason: str) -> None:
        """Sets the outcome of a gang without parts, which ends when `sealed` is called. REQUIRES:
        no part was or will be opened."""
        self._never_started = (outcome, reason)

    def sealed(self, now: Now) -> None:
        """Records that the launch is over, so that no further part opens."""
        self._sealed = True
        self._abort_if_deserted()
        if not self.open:
            self._end(self._last or now)

    def record(self, record: Record, node: str) -> None:
        """Applies a record of the node's journal; a repeated record has no effect."""
        if record.seq <= self._seq.get(node, 0) or self.ended is not None:
            return
        self._seq[node] = record.seq
        event = record.event
        if isinstance(event, PartEnded):
            self._part_ended(node, event)
            return
        if isinstance(event, NodeObserved):
            self._events.append(event)
            return
        if self._members.observe(event):
            self._events.append(event)
        if node in self.parts:  # newcomers opened the part again
            self.reopened(node)
        self._abort_if_deserted()

    def _part_ended(self, node: str, event: PartEnded) -> None:
        if event.cause != "vacant":
            self._members.withdraw(node)
        if event.cause in ("stopped", "suspended"):
            self.leaving = True
        self.parts[node] = event
        if not self._members.expected(node):
            self.open.discard(node)
        if event.failed_ns:
            self.aborting = True
        self._abort_if_deserted()
        self._end(Now(event.monotonic_ns, event.wall))

    def lost(
        self, node: str, why: str, now: Now, *, joinable: bool = False, innocent: bool = False
    ) -> None:
        """Records the loss of a node's part: its supervisor and ranks are gone, and no record tells
        how the part ended.

        Args:
            joinable: the ranks of an elastic gang accept newcomers.
            innocent: no fault of the node is known.
        """
        continues = joinable and self.gang.elastic and self._members.began(node)
        if (node in self.parts or node in self._lost) and not self._members.expected(node):
            return
        self._lost[node] = why
        if not innocent:
            self._blamed.append(node)
        self.open.discard(node)
        survives = continues and not (self.aborting or self.leaving)
        self._events += self._members.lost(node, now.monotonic_ns, now.wall, continues=survives)
        if not continues:
            self.aborting = True
        self._abort_if_deserted()
        self._end(now)

    def withdraw(self, node: str, now: Now) -> None:
        """Cancels the newcomers for a node without an open part."""
        self._members.withdraw(node)
        self._end(now)

    def newcomers(self) -> dict[str, tuple[Newcomer, ...]]:
        """Returns the newcomers to send now, by node; each is returned once."""
        if not self._sealed or self.aborting or self.leaving or self.ended is not None:
            return {}
        closed = {node for node, part in self.parts.items() if part.cause != "vacant"}
        return self._members.newcomers(closed)

    def _abort_if_deserted(self) -> None:
        """Aborts the gang if no member is left, because only a member admits the waiting
        newcomers."""
        if self._sealed and self.gang.elastic and self._members.deserted():
            self.aborting = True

    def take(self) -> list[EngineEvent]:
        """Returns the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _end(self, now: Now) -> None:
        if self._last is None or now.monotonic_ns > self._last.monotonic_ns:
            self._last = now
        if not self._sealed or self.open or self.ended is not None:
            return
        if any(map(self._members.expected, self.gang.nodes)):
            return
        outcome, reason = self._outcome()
        self.ended = GangEnded(
            task=self.gang.task,
            attempt=self.gang.attempt,
            outcome=outcome,
            reason=reason,
            monotonic_ns=self._last.monotonic_ns,
            wall=self._last.wall,
            lost=tuple(self._blamed) if outcome == "lost" else (),
        )
        self._events.append(self.ended)

    def _outcome(self) -> tuple[Outcome, str]:
        if self._never_started is not None:
            return self._never_started
        parts = list(self.parts.values())
        failures = sorted((p for p in parts if p.failed_ns), key=lambda p: p.failed_ns)
        reason = failures[0].reason if failures else "; ".join(p.reason for p in parts if p.reason)
        causes = {part.cause for part in parts}
        if self.gang.elastic and self._members.known() and not failures:
            return self._members.outcome(causes, suspend_told=any(part.told for part in parts))
        if self._lost and not (self.gang.elastic and failures):
            return "lost", "; ".join(self._lost.values())
        if "stopped" in causes:
            return "stopped", reason
        if "suspended" in causes or any(part.told for part in parts):
            return "suspended", reason
        if causes == {"finished"} and len(parts) == len(self.gang.nodes):
            return "finished", "every rank returned 0"
        return "failed", self._refused or reason or "replaced by a newer attempt"
