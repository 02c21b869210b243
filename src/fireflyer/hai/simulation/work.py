"""Progress of a task's work: periodic saves, the work that they keep, and the work that a fault
undoes. Pure arithmetic in milliseconds."""

import msgspec


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of interruptions and saves.

    The defaults are our measurements with 4 GiB of state per node on a disk
    (docs/benchmarks/checkpoint-bench.md, docs/guide/hai.md). A save stalls for 0.2 s and is durable
    after 1.4 s. Including the transfer of the request and the exit of the ranks, the nodes are free
    after 2 s. Loading takes 1.6 s, and a new process needs 3.3 s until its first step. The interval
    of 5 minutes between saves is from the paper (arXiv 2408.14158, VII-A).
    """

    checkpoint_every_ms: int = 300_000
    checkpoint_ms: int = 200
    """Time for which each periodic save stalls the work."""
    suspend_ms: int = 2_000
    """Time from the suspend request until the nodes are free. No work is lost, because the ranks
    save their last step."""
    restart_ms: int = 5_000
    """Time from each launch, including the first, until the work begins or continues."""

    def __post_init__(self) -> None:
        if (
            self.checkpoint_every_ms < 1
            or min(self.checkpoint_ms, self.suspend_ms, self.restart_ms) < 0
        ):
            raise ValueError(
                "invalid costs: expected times of 0 or more, and a save interval above 0"
            )

    def time_for(self, work: int) -> int:
        """Returns the time that an attempt takes for `work`, including its periodic saves. The
        attempt does not save at its end."""
        return work + (work - 1) // self.checkpoint_every_ms * self.checkpoint_ms

    def done_after(self, elapsed: int) -> tuple[int, int]:
        """Returns the work that an attempt has done after `elapsed`, and the part of that work that
        is saved."""
        saves, rest = divmod(elapsed, self.checkpoint_every_ms + self.checkpoint_ms)
        kept = saves * self.checkpoint_every_ms
        return kept + min(rest, self.checkpoint_every_ms), kept
