"""Simulation of the tiers: hit rates and switch times of a stream of requests, in virtual time.

The simulation runs the tiers of the store (`tiers.py`); it replaces only reads and copies by the
time that they take. A request begins when the generation of the previous request has ended. One
loader reads and copies to the hot tier, in parallel with the generation.
"""

import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from fireflyer.errors import ConfigError
from fireflyer.experts.events import (
    Action,
    Event,
    Evict,
    Evicted,
    Heat,
    Heated,
    Hinted,
    Known,
    Load,
    Loaded,
    Released,
    Serve,
    Wanted,
)
from fireflyer.experts.streams import STREAMS
from fireflyer.experts.tiers import Tiers

POLICIES = ("lru", "hints", "oracle")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters: a machine, its experts and its requests, in bytes, bytes/s and seconds."""

    experts: int = 150
    expert_bytes: int = 14 << 30
    hot_bytes: int = 64 << 30
    warm_bytes: int = 512 << 30
    cold_rate: float = 5e9
    """Rate of reads from the folder to warm memory."""
    warm_rate: float = 50e9
    """Rate of copies from warm memory to the hot tier; 0: the hot tier is mapped, without copies."""
    use_s: float = 0.5
    """Time of a generation."""
    requests: int = 5000
    lookahead: int = 8
    """Number of next requests that the router knows."""
    seed: int = 1

    @property
    def warm_switch_s(self) -> float:
        return self.expert_bytes / self.warm_rate if self.warm_rate else 0.0

    @property
    def cold_switch_s(self) -> float:
        return self.expert_bytes / self.cold_rate + self.warm_switch_s


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one stream with one policy. A hit is a request whose expert was in memory."""

    stream: str
    policy: str
    hot_hits: float
    """Share of requests whose expert was in the hot tier."""
    hits: float
    """Share of requests whose expert was in the hot tier or in warm memory."""
    late: float
    """Share of requests whose expert was being loaded."""
    switch_s: float
    """Mean time from a request to its expert."""
    switch_p99_s: float
    loads: int
    total_s: float


def check(setup: Setup) -> None:
    """Checks that an expert fits into each tier; raises ConfigError."""
    for tier in ("hot_bytes", "warm_bytes"):
        if setup.expert_bytes > getattr(setup, tier):
            raise ConfigError(
                f"an expert of {setup.expert_bytes} bytes is larger than {tier} "
                f"({getattr(setup, tier)})"
            )


def simulate(setup: Setup, stream: str, policy: str) -> Outcome:
    """Simulates a stream of requests.

    Args:
        stream: "zipf" or "bursty".
        policy: "lru"; "hints" (the next `lookahead` requests are known); "oracle" (all are known).

    Raises:
        ConfigError: an expert is larger than a tier.
    """
    check(setup)
    requests = STREAMS[stream](setup.experts, setup.requests, setup.seed)
    run = _Run(setup)
    hint = _hints(requests, policy, setup.lookahead)
    waits = []
    for number, wanted in enumerate(requests):
        waits.append(run.serve(str(wanted), tuple(map(str, hint(number + 1)))))
    counts = run.tiers.counts
    total = len(requests)
    return Outcome(
        stream=stream,
        policy=policy,
        hot_hits=counts.hot_hits / total,
        hits=(counts.hot_hits + counts.warm_hits) / total,
        late=counts.late / total,
        switch_s=statistics.fmean(waits),
        switch_p99_s=sorted(waits)[min(total - 1, total * 99 // 100)],
        loads=counts.loads,
        total_s=run.now,
    )


def _hints(requests: Sequence[int], policy: str, lookahead: int) -> Callable[[int], Sequence[int]]:
    """Returns a function that maps a request's number to the experts expected from then on."""
    if policy == "lru":
        return lambda _: ()
    if policy == "hints":
        return lambda number: requests[number : number + lookahead]
    uses: dict[int, list[int]] = {}
    for number, expert in enumerate(requests):
        uses.setdefault(expert, []).append(number)

    def by_next_use(number: int) -> list[int]:
        following = []
        for expert, numbers in uses.items():
            at = bisect_left(numbers, number)
            if at < len(numbers):
                following.append((numbers[at], expert))
        return [expert for _, expert in sorted(following)]

    return by_next_use


@dataclass
class _Job:
    event: Event
    ends: float


class _Run:
    """Execution of the tiers' actions in virtual time."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.now = setup, 0.0
        self.tiers = Tiers(setup.warm_bytes, setup.hot_bytes, setup.lookahead)
        self._jobs: list[_Job] = []
        self._served: set[str] = set()
        self._turn = 0
        for number in range(setup.experts):
            self.feed(Known(str(number), setup.expert_bytes))

    def serve(self, name: str, expected: tuple[str, ...]) -> float:
        """Serves one request; returns the time that it waited for its expert."""
        asked = self.now
        self._turn += 1
        self.feed(Wanted(name, self._turn))
        self.feed(Hinted(expected))
        while name not in self._served:
            self._advance(self._jobs[0].ends)
        self._served.discard(name)
        waited = self.now - asked
        self._advance(self.now + self.setup.use_s)
        self.feed(Released(name))
        return waited

    def _advance(self, until: float) -> None:
        """Advances the time, and completes the actions that end meanwhile."""
        while self._jobs and self._jobs[0].ends <= until:
            job = self._jobs.pop(0)
            self.now = max(self.now, job.ends)
            self.feed(job.event)
        self.now = max(self.now, until)

    def feed(self, event: Event) -> None:
        queue = [event]
        while queue:
            for action in self.tiers.step(queue.pop(0)):
                queue += self._act(action)

    def _act(self, action: Action) -> list[Event]:
        if isinstance(action, Evict):
            return [Evicted(action.name)]
        if isinstance(action, Serve):
            self._served.add(action.name)
        elif isinstance(action, Load):
            self._start(Loaded(action.name), action.bytes / self.setup.cold_rate)
        elif isinstance(action, Heat) and self.setup.warm_rate:
            self._start(Heated(action.name), self.setup.warm_switch_s)
        elif isinstance(action, Heat):
            return [Heated(action.name)]
        return []

    def _start(self, event: Event, seconds: float) -> None:
        begins = max(self.now, self._jobs[-1].ends if self._jobs else 0.0)
        self._jobs.append(_Job(event, begins + seconds))


PAPER = (
    ("experts", "150 of 7 billion parameters (Samba-CoE), one expert a prompt"),
    ("switches from DDR to HBM, compared with DGX A100 and H100", "15x to 31x faster"),
    ("requests, compared with a DGX H100; with a DGX A100", "3.7x; 6.6x faster"),
    ("machines for 150 experts", "up to 19x fewer"),
)
"""Figures of the SN40L paper (arXiv 2405.07518), measured by the paper's authors on their
hardware."""
