"""Agreement between the ranks of a job over a group of their own, never the training's."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fireflyer.errors import CheckpointError, CollectiveError
from fireflyer.hfreduce.topology import interface_address


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def members_lost() -> bool:
    """Whether the default group has lost a rank: what waits for all of them waits in vain."""
    errored = getattr(dist.group.WORLD, "errored", None) if dist.is_available() else None
    return errored is not None and errored() is not None


class Control:
    """Small all-gathers over gloo. Every call is collective; the first one makes the group.

    A group over which a call has failed is not used again: the ranks no longer agree on where they are.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._world: object | None = None
        """The default group that `_group` was made beside."""
        self._group: Any = None
        self._broken: str | None = None
        self._reformed = False
        """Whether the default group was formed anew in place since it was made: its store may be gone."""

    def forget(self) -> None:
        """The members of the default group have changed: the next call makes a group of those of now."""
        self._let_go()
        self._world = self._broken = None
        self._reformed = dist.is_available() and hasattr(dist.group.WORLD, "reform")

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
        rows = torch.empty((world, *mine.shape), dtype=mine.dtype)
        self._make_group()
        try:
            options = dist.distributed_c10d.AllgatherOptions()
            options.timeout = self._timeout
            self._group.allgather([list(rows.unbind())], [mine], options).wait()
        except RuntimeError as error:
            self._broken = f"the ranks cannot agree: one has ended or does not take part: {error}"
            self._let_go()
            raise CheckpointError(self._broken) from error
        return rows

    def _make_group(self) -> None:
        """A group of the ranks of now, unless there is one."""
        if self._world is not dist.group.WORLD:
            self._let_go()
            if self._reformed:
                self._group = _beside_reformed(min(self._timeout, _FORMING))
            else:
                self._group = dist.new_group(
                    backend="gloo", timeout=self._timeout, group_desc="fireflyer checkpoint"
                )
            self._world, self._broken = dist.group.WORLD, None
        if self._broken is not None:
            raise CheckpointError(self._broken)

    def _let_go(self) -> None:
        """Closes the connections, so that no other rank waits here for what never comes."""
        group, self._group = self._group, None
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


_ADDRESS_BYTES = 64
_FORMING = timedelta(seconds=15)
"""For members that have just met in a collective; one that dies then is noticed by nothing else."""


def _beside_reformed(timeout: timedelta) -> Any:
    """A gloo group of the default group's members, through a store of their rank 0: the one that the job
    began with died with its rank 0, or is unknown here. Collective over the default group, this once.

    Raises:
        CheckpointError: if a member has ended, or rank 0 can have no store.
    """
    rank, world = rank_and_world()
    row = np.zeros(_ADDRESS_BYTES, np.uint8)
    store, failure = None, None
    if rank == 0:
        try:
            host = interface_address(os.environ.get("MASTER_ADDR", "127.0.0.1"))
            store = dist.TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
            address = f"{host}:{store.port}".encode()
            row[: len(address)] = np.frombuffer(address, np.uint8)
        except (RuntimeError, CollectiveError) as error:
            failure = error
    try:
        dist.broadcast(torch.from_numpy(row), src=0)
        host, _, port = row.tobytes().rstrip(b"\0").decode().rpartition(":")
        if not port:
            raise CheckpointError("rank 0 can open no port for the ranks to agree by") from failure
        if store is None:
            store = dist.TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
        return dist.ProcessGroupGloo(store, rank, world, timeout)
    except (RuntimeError, CollectiveError) as error:
        raise CheckpointError(f"the ranks cannot agree: one has ended: {error}") from error
