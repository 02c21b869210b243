"""How a task's work gets on: periodic saves, what a save keeps, what a fault undoes. Pure arithmetic in
milliseconds."""

import msgspec


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What interrupting and saving cost.

    The defaults are ours, measured with 4 GiB of state a node on a disk (docs/checkpoint-bench.md,
    docs/hai.md): a save stalls for 0.2 s; it is durable after 1.4 s, and with the request on its way and
    the ranks' exit the nodes are free after 2 s; loading takes 1.6 s, and a fresh process 3.3 s to its
    first step. A save each 5 minutes is the paper's (arXiv 2408.14158, VII-A).
    """

    checkpoint_every_ms: int = 300_000
    checkpoint_ms: int = 200
    """By which each periodic save stalls the work."""
    suspend_ms: int = 2_000
    """From the request until the nodes are free. Nothing is lost: the last save is of the last step."""
    restart_ms: int = 5_000
    """From each launch, the first too, until work gets on."""

    def __post_init__(self) -> None:
        if (
            self.checkpoint_every_ms < 1
            or min(self.checkpoint_ms, self.suspend_ms, self.restart_ms) < 0
        ):
            raise ValueError("costs are not negative, and saves are apart")

    def time_for(self, work: int) -> int:
        """How long an attempt takes to do this much work, with its saves; none is made at the very end."""
        return work + (work - 1) // self.checkpoint_every_ms * self.checkpoint_ms

    def done_after(self, elapsed: int) -> tuple[int, int]:
        """Work done by an attempt after so long, and how much of it a save has kept."""
        saves, rest = divmod(elapsed, self.checkpoint_every_ms + self.checkpoint_ms)
        kept = saves * self.checkpoint_every_ms
        return kept + min(rest, self.checkpoint_every_ms), kept
