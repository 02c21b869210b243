"""Accounting of every GPU-second of a replay. All amounts are integers, so the parts sum to
capacity x time exactly."""

from array import array

CAUSES = (
    "useful", "lost", "checkpoint", "restart", "suspend", "fragmentation", "idle", "faulty", "window",
)  # fmt: skip
"""Causes of GPU time. useful: work that was not lost; lost: work that a fault undid; checkpoint:
stalls of periodic saves; restart: GPUs held from the launch until work began; suspend: GPUs held
from the suspend request until they were free; fragmentation: idle GPUs, at most as many as waiting
tasks ask for; idle: all other idle GPUs; faulty: GPUs of nodes that are down; window: idle GPUs of
nodes in a maintenance window or a reservation."""


class Ledger:
    """GPU-milliseconds by cause, and the GPUs held, waited for and down over time.

    The number of held GPUs is always known. The cause of the time for which a GPU is held is known
    only when the attempt's phase ends. Therefore `split` is complete only while no GPU is held.
    """

    __slots__ = (
        "active", "active_ms", "capacity", "checkpoint", "closed", "closed_ms", "down", "down_ms",
        "fragmentation_ms",
        "held", "held_ms", "lost", "now", "queued", "restart", "series_down", "series_held",
        "series_queued", "series_time", "suspend", "useful",
    )  # fmt: skip

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """GPUs of all nodes."""
        self.now = 0
        self.held = self.queued = self.down = self.closed = 0
        """Numbers of GPUs: held by tasks, asked for by waiting tasks, on nodes that are down, and
        idle in a window."""
        self.active = 0
        """Number of tasks that have arrived and not ended."""
        self.held_ms = self.down_ms = self.closed_ms = self.fragmentation_ms = 0
        self.active_ms = 0
        """Integral of `active` over time. Its increase over an interval, divided by the interval's
        length, is the mean number of active tasks."""
        self.useful = self.lost = self.checkpoint = self.restart = self.suspend = 0
        self.series_time, self.series_held = array("q"), array("q")
        self.series_queued, self.series_down = array("q"), array("q")

    def advance(self, now: int) -> None:
        """Advances the time to `now`. The numbers of GPUs and tasks were constant since the
        previous call."""
        passed = now - self.now
        if not passed:
            return
        held, down, queued = self.held, self.down, self.queued
        self.series_time.append(self.now)
        self.series_held.append(held)
        self.series_queued.append(queued)
        self.series_down.append(down)
        self.held_ms += held * passed
        self.active_ms += self.active * passed
        if down:
            self.down_ms += down * passed
        if self.closed:
            self.closed_ms += self.closed * passed
        if queued:
            idle = self.capacity - down - self.closed - held
            self.fragmentation_ms += (idle if idle < queued else queued) * passed
        self.now = now

    def split(self) -> dict[str, int]:
        """Returns GPU-milliseconds by cause, in the order of CAUSES. Their sum is capacity x time
        while no GPU is held."""
        away = self.down_ms + self.closed_ms
        idle = self.capacity * self.now - self.held_ms - away - self.fragmentation_ms
        parts = (
            self.useful, self.lost, self.checkpoint, self.restart, self.suspend,
            self.fragmentation_ms, idle, self.down_ms, self.closed_ms,
        )  # fmt: skip
        return dict(zip(CAUSES, parts, strict=True))
