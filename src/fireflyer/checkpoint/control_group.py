"""Agreement among the ranks of a job, over a group separate from the training's groups."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from fireflyer.errors import CheckpointError, CollectiveError
from fireflyer.hfreduce.topology import interface_address
from fireflyer.torch_internals.distributed import world

T = TypeVar("T")


def rank_and_world() -> tuple[int, int]:
    """Returns this process's rank and the number of ranks; (0, 1) without torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def members_lost() -> bool:
    """Returns True if the default group lost a rank, so that waiting for all ranks would hang."""
    errored = getattr(dist.group.WORLD, "errored", None) if dist.is_available() else None
    return errored is not None and errored() is not None


def interruptible(wait: Callable[[], T]) -> T:
    """Runs `wait` and returns its result; Ctrl-C ends the call at once.

    While torch waits, Python handles no signal before another rank answers or the timeout ends.
    Therefore another thread waits. After Ctrl-C that thread remains, but does not keep the process
    alive.
    """
    if threading.current_thread() is not threading.main_thread():
        return wait()  # signals reach the main thread alone
    answer: Future[T] = Future()

    def body() -> None:
        try:
            answer.set_result(wait())
        except BaseException as error:  # noqa: BLE001  # raised again in the caller
            answer.set_exception(error)

    threading.Thread(target=body, name="ckpt-agreement", daemon=True).start()
    return answer.result()


class ControlGroup:
    """Small all-gathers over gloo. Every call is collective; the first call makes the group.

    After a failed call the group is not used again, because the ranks no longer agree on their
    progress.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._world: object | None = None
        """Default group for whose members `_group` was made."""
        self._group: Any = None
        self._broken: str | None = None
        self._reformed = False
        """True if the default group was formed anew in place; its original store may be gone."""

    def forget(self) -> None:
        """Drops the group after a membership change; the next collective call makes a new group."""
        self._let_go()
        self._world = self._broken = None
        self._reformed = dist.is_available() and hasattr(dist.group.WORLD, "reform")

    def numbers(self, mine: Sequence[int]) -> list[list[int]]:
        """Returns every rank's 64-bit numbers, by rank; all ranks must pass equally many.

        Raises:
            CheckpointError: if a rank has ended, or does not make this call within the timeout.
        """
        world = rank_and_world()[1]
        if world == 1:
            return [list(mine)]
        rows = self._gather(torch.tensor(mine, dtype=torch.int64), world)
        return rows.tolist()

    def blobs(self, mine: bytes) -> list[bytes]:
        """Returns every rank's bytes, by rank. Raises like `numbers`."""
        world = rank_and_world()[1]
        if world == 1:
            return [mine]
        lengths = [row[0] for row in self.numbers([len(mine)])]
        padded = np.zeros(max(1, *lengths), np.uint8)
        padded[: len(mine)] = np.frombuffer(mine, np.uint8)
        rows = self._gather(torch.from_numpy(padded), world).numpy()
        return [rows[rank, :length].tobytes() for rank, length in enumerate(lengths)]

    def _gather(self, mine: torch.Tensor, world: int) -> torch.Tensor:
        """Gathers the ranks' tensors: returns [world, *mine.shape]."""
        rows = torch.empty((world, *mine.shape), dtype=mine.dtype)
        self._make_group()
        try:
            options = dist.distributed_c10d.AllgatherOptions()
            options.timeout = self._timeout
            group = self._group
            work = group.allgather([list(rows.unbind())], [mine], options)
            # The lambda refers to the group, so the waiting thread keeps the group after Ctrl-C.
            # Otherwise the group's destructor would wait in the main thread.
            interruptible(lambda: (work.wait(), group))
        except KeyboardInterrupt:
            self._broken = "the ranks cannot agree: an earlier call was interrupted"
            raise
        except RuntimeError as error:
            self._broken = (
                f"the ranks cannot agree: a rank has ended or does not take part: {error}"
            )
            self._let_go()
            raise CheckpointError(self._broken) from error
        return rows

    def _make_group(self) -> None:
        """Makes a group of the current ranks, unless there is one.

        Raises:
            CheckpointError: if a call over the current group has failed.
        """
        if self._world is not dist.group.WORLD:
            self._let_go()
            if self._reformed:
                self._group = _beside_reformed(min(self._timeout, _FORMING))
            else:
                self._group = self._beside_default()
            self._world, self._broken = dist.group.WORLD, None
        if self._broken is not None:
            raise CheckpointError(self._broken)

    def _beside_default(self) -> Any:
        try:
            return interruptible(
                partial(
                    dist.new_group,
                    backend="gloo",
                    timeout=self._timeout,
                    group_desc="fireflyer checkpoint",
                )
            )
        except RuntimeError as error:
            raise CheckpointError(
                f"the ranks cannot agree: some of the {rank_and_world()[1]} ranks did not make this "
                f"call within {self._timeout.total_seconds():g} s, or ended; call save, load and "
                f"should_save on all ranks: {error}"
            ) from error

    def _let_go(self) -> None:
        """Closes the connections, so that no other rank waits for a message of this rank."""
        group, self._group = self._group, None
        if group in world.pg_map:
            dist.destroy_process_group(group)


_ADDRESS_BYTES = 64
_FORMING = timedelta(seconds=15)
"""Timeout of forming the group. It may be short, because the members have just met in a collective.
It must be short, because only this timeout detects a member that dies during the formation."""


def _beside_reformed(timeout: timedelta) -> Any:
    """Returns a gloo group of the default group's members, through a store of their rank 0.

    The job's original store died with its rank 0, or is unknown here. Forming the group is
    collective over the default group.

    Raises:
        CheckpointError: if a member has ended, or rank 0 cannot open a store.
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
            raise CheckpointError(
                "rank 0 cannot open a port for agreement among the ranks"
            ) from failure
        if store is None:
            store = dist.TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
        return interruptible(partial(dist.ProcessGroupGloo, store, rank, world, timeout))
    except (RuntimeError, CollectiveError) as error:
        raise CheckpointError(
            f"the ranks cannot agree because a rank has ended: {error}"
        ) from error
