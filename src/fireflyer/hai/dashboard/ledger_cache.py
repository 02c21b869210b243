"""The goodput ledger of the last days, kept current: each event is read once, regardless of the
number of pages.

The first query reads the history of LONGEST_S, in pieces between which the loop serves other
requests; later queries read new events. A thread computes the sums from values that no other code
changes. Sums are valid for FRESH_S.
"""

import asyncio
import time
from collections.abc import Mapping

import msgspec

from fireflyer.hai.database.history_queries import HistoryQueries
from fireflyer.hai.ledger import Account, Accounting, Reader, Segment, Shape, accounting, total
from fireflyer.hai.model import PINNED

LONGEST_S = 7 * 86_400.0

PIECE = 500
"""Number of events read at once."""

FRESH_S = 10.0

WAIT_S = 3.0
"""Maximum seconds that a page waits for the history."""


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Ledger for the pages."""

    accounting: Accounting
    users: dict[str, Account]
    """Account of each user's tasks; the largest first."""
    made: float
    """Wall clock at which the sums were computed."""


class LedgerCache:
    """Ledger of one server. Used on its loop only.

    Args:
        browsing: queries of the server's database.
    """

    def __init__(self, browsing: HistoryQueries) -> None:
        self._browsing = browsing
        self._readers: dict[str, Reader] = {}
        self._shapes: dict[str, Shape] = {}
        self._users: dict[str, str] = {}
        self._seq = -1
        """Seq of the last event that was read; -1: no event."""
        self._reading: asyncio.Task[None] | None = None
        self._summing = asyncio.Lock()
        self._made: dict[float, Ledger] = {}
        """Ledgers by length of the window."""

    async def ledger(self, window_s: float, gpus: Mapping[str, int]) -> Ledger | None:
        """Returns the ledger of all tasks over the last `window_s`, at most LONGEST_S; None while
        the history is being read."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        done, _ = await asyncio.wait({self._reading}, timeout=WAIT_S)
        if not done:
            return None
        self._reading.result()
        async with self._summing:
            known = self._made.get(window_s)
            now = time.time()
            if known is None or not 0 <= now - known.made < FRESH_S:
                self._forget(now - LONGEST_S)
                found = {task: reader.until(now) for task, reader in self._readers.items()}
                values = (list(self._shapes.values()), found, dict(self._users), dict(gpus))
                known = await asyncio.to_thread(_sum, *values, now, now - window_s)
                self._made[window_s] = known
        return known

    async def _read(self) -> None:
        if self._seq < 0:
            begin = time.time() - LONGEST_S
            first = self._browsing.first_since(begin)
            for number in self._browsing.live(begin):
                self._read_earlier(number, first - 1)
                await asyncio.sleep(0)
            self._seq = first - 1
        while True:
            events, last = self._browsing.history(self._seq, PIECE)
            for event in events:
                reader = self._readers.get(event.task)
                if reader is None:
                    known = event.kind == "submitted"
                    reader = Reader() if known else self._earlier(event.task, self._seq)
                    self._readers[event.task] = reader
                reader.read(event)
            self._learn({event.task for event in events} - self._shapes.keys())
            if last == self._seq:
                return
            self._seq = last
            await asyncio.sleep(0)

    def _read_earlier(self, number: int, until: int) -> None:
        """Reads the events up to `until` of a task that is not over and is older than the
        window."""
        self._readers[f"t{number}"] = self._earlier(f"t{number}", until)
        self._learn({f"t{number}"})

    def _earlier(self, task: str, until: int) -> Reader:
        reader = Reader()
        after = 0
        while found := self._browsing.of_task(task, after=after, until=until, limit=PIECE):
            for event in found:
                reader.read(event)
            after = found[-1].seq
        return reader

    def _learn(self, tasks: set[str]) -> None:
        for task, line in self._browsing.some(sorted(tasks)).items() if tasks else ():
            self._shapes[task] = Shape(
                task=task, nodes=line.brief.nodes, ranks_per_node=line.brief.ranks_per_node,
                gpus=line.brief.gpus, validation=PINNED in line.brief.labels,
            )  # fmt: skip
            self._users[task] = line.user

    def _forget(self, wall: float) -> None:
        """Drops tasks that were over before this moment."""
        for task, reader in list(self._readers.items()):
            if reader.over and (not reader.segments or reader.segments[-1].end < wall * 1e6):
                del self._readers[task], self._shapes[task], self._users[task]


def _sum(
    shapes: list[Shape], found: dict[str, list[Segment]], users: dict[str, str],
    gpus: dict[str, int], now: float, since: float,
) -> Ledger:  # fmt: skip
    made = accounting(shapes, found, gpus=gpus, until=now, since=since)
    mine: dict[str, list[Account]] = {}
    for task, one in made.tasks.items():
        mine.setdefault(users[task], []).append(one)
    sums = {user: total(accounts) for user, accounts in mine.items()}
    ordered = dict(sorted(sums.items(), key=lambda item: (-item[1].whole, item[0])))
    return Ledger(accounting=made, users=ordered, made=now)
