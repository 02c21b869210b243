"""Agreement between the ranks of a job over a group of their own, never the training's."""

from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from fireflyer.errors import CheckpointError


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class Control:
    """Small all-gathers over gloo. Every call is collective; the first one makes the group.

    A group over which a call has failed is not used again: the ranks no longer agree on where they are.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._world: object | None = None
        """The default group that `_group` was made beside."""
        self._group: dist.ProcessGroup | None = None
        self._broken: str | None = None

    def numbers(self, mine: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers (of 64 bits, equally many), by rank.

        Raises:
            CheckpointError: if a rank has ended, or does not call this within the timeout.
        """
        world = rank_and_world()[1]
        if world == 1:
            return [list(mine)]
        rows = self._gather(torch.tensor(mine, dtype=torch.int64), world)
        return rows.tolist()

    def blobs(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, by rank. Raises as `numbers`."""
        world = rank_and_world()[1]
        if world == 1:
            return [mine]
        lengths = [row[0] for row in self.numbers([len(mine)])]
        padded = np.zeros(max(1, *lengths), np.uint8)
        padded[: len(mine)] = np.frombuffer(mine, np.uint8)
        rows = self._gather(torch.from_numpy(padded), world).numpy()
        return [rows[rank, :length].tobytes() for rank, length in enumerate(lengths)]

    def _gather(self, mine: torch.Tensor, world: int) -> torch.Tensor:
        """[world, *mine.shape]."""
        group = self._own_group()
        rows = torch.empty((world, *mine.shape), dtype=mine.dtype)
        try:
            dist.all_gather(list(rows.unbind()), mine, group=group)
        except RuntimeError as error:
            self._broken = f"the ranks cannot agree: one has ended or does not take part: {error}"
            raise CheckpointError(self._broken) from error
        return rows

    def _own_group(self) -> dist.ProcessGroup:
        if self._group is None or self._world is not dist.group.WORLD:
            self._group = dist.new_group(
                backend="gloo", timeout=self._timeout, group_desc="fireflyer checkpoint"
            )
            self._world, self._broken = dist.group.WORLD, None
        if self._broken is not None:
            raise CheckpointError(self._broken)
        return self._group
