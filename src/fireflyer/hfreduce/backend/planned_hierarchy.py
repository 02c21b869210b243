"""Allreduce along a tree of groups that the caller plans: for example NVLink pairs, then hosts.

    pairs = PlannedHierarchy([[0, 1], [2, 3]])  # reduces inside the pairs first (paper section IV)
    pairs.allreduce(gradients)

A tree whose branches have the same shape at every level is reduced in slices. For [[0, 1], [2, 3]]:

    reduce_scatter in {0, 1} and {2, 3}     ranks 0 and 2 get the first half of their pair's sum
    allreduce      in {0, 2} and {1, 3}     of the halves
    all_gather     in {0, 1} and {2, 3}

Any other tree is reduced to the first rank of each branch, level by level. The top group sums, and
broadcasts return the result.
"""

import collections
import concurrent.futures
import contextlib
import datetime
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from fireflyer.errors import CollectiveError, DeadlineExceeded, RankFailed
from fireflyer.hfreduce.backend.process_group import ProcessGroupHFReduce
from fireflyer.hfreduce.backend.tensors import address_of
from fireflyer.hfreduce.backend.work import Promise
from fireflyer.hfreduce.backend.zero_copy import empty
from fireflyer.torch_internals.distributed import AllgatherOptions, group_store

Tree = Any  # a rank, or a list of trees; Any, because the type is recursive


@dataclass(frozen=True)
class TreePlan:
    """Groups of ranks that reduce together. Pure: every rank computes the same plan.

    Attributes:
        even: True to reduce in slices; False to reduce to leaders and broadcast back.
        levels: the groups of each level, from the leaves to the root, without groups of one rank.
            In an even plan, a rank is in one group of every level. In an uneven plan, the first
            rank of a group is its leader. Only leaders of a group are in groups of later levels,
            and the last level is one group.
    """

    even: bool
    levels: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    def of(cls, tree: Tree, world: int) -> "TreePlan":
        """Makes the plan of a tree.

        Raises:
            ValueError: the tree is not nested lists that contain each of `world` ranks once.
        """
        ranks = _leaves(tree)
        _check(ranks, world)
        arities = _arities(tree)
        levels = _leader_levels(tree) if arities is None else _slice_levels(ranks, arities)
        return cls(arities is not None, tuple(level for level in levels if level))


def _leaves(tree: Tree) -> list[int]:
    if isinstance(tree, int) and not isinstance(tree, bool):
        return [tree]
    if not isinstance(tree, list | tuple):
        raise ValueError(f"invalid levels: {tree!r}: expected a rank or a list")
    if not tree:
        raise ValueError("invalid levels: a group is empty")
    return [rank for branch in tree for rank in _leaves(branch)]


def _check(ranks: list[int], world: int) -> None:
    if strange := sorted({rank for rank in ranks if not 0 <= rank < world}):
        raise ValueError(
            f"invalid levels: rank {strange[0]} does not exist in a group of {world} ranks"
        )
    if double := sorted((collections.Counter(ranks) - collections.Counter(range(world))).keys()):
        raise ValueError(f"invalid levels: rank {double[0]} occurs more than once")
    if missing := sorted(set(range(world)) - set(ranks)):
        raise ValueError(f"invalid levels: missing ranks: {', '.join(map(str, missing))}")


def _arities(tree: Tree) -> tuple[int, ...] | None:
    """Returns the number of branches per level, root first; None if it varies within a level."""
    if isinstance(tree, int):
        return ()
    below = {_arities(branch) for branch in tree}
    only = below.pop()
    return None if below or only is None else (len(tree), *only)


def _slice_levels(
    ranks: Sequence[int], arities: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yields the groups of each level: the ranks at the same position in neighbouring branches."""
    stride = 1
    for arity in reversed(arities):
        if arity > 1:
            yield tuple(
                tuple(ranks[begin + place + stride * branch] for branch in range(arity))
                for begin in range(0, len(ranks), stride * arity)
                for place in range(stride)
            )
        stride *= arity


def _leader_levels(tree: Tree) -> list[tuple[tuple[int, ...], ...]]:
    """Returns the groups of each height: for each tree node, the first ranks of its branches."""
    levels: list[list[tuple[int, ...]]] = []

    def climb(node: Tree) -> tuple[int, int]:
        """Returns (leader, height)."""
        if isinstance(node, int):
            return node, 0
        branches = [climb(branch) for branch in node]
        leaders = tuple(leader for leader, _ in branches)
        height = max(height for _, height in branches) + (len(leaders) > 1)
        if len(leaders) > 1:
            levels.extend([] for _ in range(height - len(levels)))
            levels[height - 1].append(leaders)
        return leaders[0], height

    climb(tree)
    return [tuple(level) for level in levels]


@dataclass(frozen=True)
class _TreePosition:
    """This rank's group of one level."""

    ranks: tuple[int, ...]  # numbers in the planned group
    group: ProcessGroupHFReduce
    root: bool  # True in the last level


class PlannedWork(dist.Work):
    """An allreduce along a tree, in flight."""

    def __init__(self, done: "concurrent.futures.Future[None]", tensor: torch.Tensor) -> None:
        super().__init__()
        self._done = done
        self._tensor = tensor
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def is_completed(self) -> bool:
        return self._done.done()

    def is_success(self) -> bool:
        return self._done.done() and self._done.exception() is None

    def exception(self) -> Any:
        """Returns the error of a work that is over, or None."""
        return self._done.exception() if self._done.done() else None

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Blocks until the result is in the tensor.

        Raises:
            DeadlineExceeded: `timeout` has passed (0: no limit beyond the hierarchy's own).
            RankFailed, CollectiveError: see `PlannedHierarchy.allreduce`.
        """
        seconds = timeout.total_seconds() if timeout else 0.0
        concurrent.futures.wait([self._done], seconds if seconds > 0 else None)
        if not self._done.done():
            raise DeadlineExceeded(f"the collective did not finish within {seconds:g} s")
        self._done.result()
        return True

    def result(self) -> list[torch.Tensor]:
        """Waits, then returns the tensor of the call in a list."""
        self.wait()
        return [self._tensor]

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future of the tensor, which the hierarchy's thread completes."""
        if self._future is None:
            promise = Promise()
            self._future = promise.future

            def settle(done: "concurrent.futures.Future[None]") -> None:
                if error := done.exception():
                    promise.fail(error)
                else:
                    promise.complete([self._tensor])

            self._done.add_done_callback(settle)
        return self._future


class PlannedHierarchy:
    """A tree over the ranks of a group, with an hfreduce process group for each group of the tree.

    The constructor and each call are collective over `group`, in the same order on all ranks. One
    thread of each rank makes the calls. Results are bit-identical on all ranks and from run to run.

    Error bound: let e be the unit roundoff of the tensor's dtype, and a the unit roundoff of the
    type in which sums are accumulated (float64 for float64, else float32). Let n be the number of
    ranks, and H_l the number of hosts in a group of level l. A sum deviates by at most (n a + sum
    over l of (H_l + 1) e) times the sum of the magnitudes. AVG over a tree with uneven branches
    divides the sum by n. The division rounds once more, and the result overflows if the sum does.

    Args:
        levels: nested lists of the ranks of `group`, each once, e.g. [[0, 1], [2, 3]]; any depth.
        group: group of any backend; None means the default group.
        timeout: limit for each step of a call; default that of `group`.

    Raises:
        ValueError: `levels` is not such a tree, or differs between ranks.
        DeadlineExceeded, ProtocolMismatch, NoSpace, CollectiveError: see `establish.connect`.
    """

    def __init__(
        self,
        levels: Tree,
        group: ProcessGroup | None = None,
        timeout: datetime.timedelta | None = None,
    ) -> None:
        group = group or dist.group.WORLD
        assert group is not None, "call init_process_group first"
        self._rank, self._size = group.rank(), group.size()
        timeout = timeout or _timeout_of(group)
        store = group_store(group)
        number = store.add(f"planned/{self._rank}", 1)
        store = dist.PrefixStore(f"planned/{number}", store)
        _compare(store, self._rank, self._size, levels)
        self.plan = TreePlan.of(levels, self._size)
        self._positions: list[_TreePosition] = []
        for level, groups in enumerate(self.plan.levels):
            for ranks in (ranks for ranks in groups if self._rank in ranks):
                place = ranks.index(self._rank)
                own = dist.PrefixStore(f"{level}/{ranks[0]}", store)
                member = ProcessGroupHFReduce(own, place, len(ranks), timeout)
                root = level == len(self.plan.levels) - 1
                self._positions.append(_TreePosition(ranks, member, root))
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._last: concurrent.futures.Future[None] | None = None

    @property
    def network_bytes_sent(self) -> int:
        """Number of bytes that this rank has sent to other hosts so far."""
        return sum(position.group.network_bytes_sent for position in self._positions)

    def allreduce(
        self, tensor: torch.Tensor, op: Any = ReduceOp.SUM, async_op: bool = False
    ) -> PlannedWork | None:
        """Reduces in place along the tree.

        Args:
            tensor: dense CPU tensor of any shape; zero-copy if `hfreduce.empty` allocated it.
            op: a `torch.distributed.ReduceOp`.
            async_op: return a Work at once; calls run in the order in which they are made.

        Raises:
            RankFailed: a rank of `group` died or did not join within the timeout. The hierarchy is
                broken.
            CollectiveError: another rank gave up (the error says why), the ranks make different
                calls, or the tensor has no strided memory of its own (sparse, meta, a DTensor).
            TypeError: AVG of integers.
        """
        address_of(tensor)
        if op == ReduceOp.AVG and not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(f"AVG is not defined for {tensor.dtype}")
        if not async_op and (self._last is None or self._last.done()):
            self._reduce(tensor, op)
            return None
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "hfreduce-planned")
        self._last = self._thread.submit(self._reduce, tensor, op)
        work = PlannedWork(self._last, tensor)
        if async_op:
            return work
        work.wait()
        return None

    def close(self) -> None:
        """Waits for calls in flight and leaves all groups. Garbage collection does so, too."""
        if self._thread is not None:
            self._thread.shutdown()
        for position in self._positions:
            position.group.shutdown()

    @torch.no_grad()
    def _reduce(self, tensor: torch.Tensor, op: Any) -> None:
        if not self.plan.levels or tensor.numel() == 0:
            return
        lower = [position for position in self._positions if not position.root]
        slices = math.prod(len(position.ranks) for position in lower) if self.plan.even else 1
        flat, copied = _flattened(tensor, slices)
        if self.plan.even:
            self._reduce_slices(lower, flat, op)
        else:
            self._reduce_to_leaders(lower, flat, op)
        if copied:
            tensor.copy_(flat[: tensor.numel()].view(tensor.shape))

    def _reduce_slices(self, lower: list[_TreePosition], flat: torch.Tensor, op: Any) -> None:
        slices = [flat]
        for position in lower:
            own = empty(slices[-1].numel() // len(position.ranks), dtype=flat.dtype)
            options = _options(dist.ReduceScatterOptions(), op)
            self._step(position, position.group.reduce_scatter_tensor, own, slices[-1], options)
            slices.append(own)
        top = self._positions[-1]
        self._step(top, top.group.allreduce, [slices[-1]], _options(dist.AllreduceOptions(), op))
        for position in reversed(lower):
            own = slices.pop()
            options = _options(AllgatherOptions())
            self._step(position, position.group.all_gather_into_tensor, slices[-1], own, options)

    def _reduce_to_leaders(self, lower: list[_TreePosition], flat: torch.Tensor, op: Any) -> None:
        each = ReduceOp.SUM if op == ReduceOp.AVG else op
        for position in lower:
            self._step(
                position, position.group.reduce, [flat], _options(dist.ReduceOptions(), each)
            )
        if self._positions[-1].root:
            top = self._positions[-1]
            self._step(top, top.group.allreduce, [flat], _options(dist.AllreduceOptions(), each))
            if op == ReduceOp.AVG:
                flat.div_(self._size)
        for position in reversed(lower):
            self._step(
                position, position.group.broadcast, [flat], _options(dist.BroadcastOptions())
            )

    def _step(
        self, position: _TreePosition, call: Callable[..., dist.Work], *arguments: object
    ) -> None:
        try:
            call(*arguments).wait()
        except CollectiveError as error:
            raise self._give_up(position, error) from error

    def _give_up(self, broken: _TreePosition, error: CollectiveError) -> CollectiveError:
        """Fails this rank's other groups, too, because their members may have no link to the failed
        rank."""
        if isinstance(error, RankFailed):
            rank = broken.ranks[error.rank]
            found: CollectiveError = RankFailed(f"rank {rank} of the tree: {error}", rank)
        else:
            found = CollectiveError(str(error))
        for position in self._positions:
            if position is not broken:
                with contextlib.suppress(CollectiveError):
                    position.group._connection.watch.announce(str(found))
        return found


def _timeout_of(group: ProcessGroup) -> datetime.timedelta:
    if isinstance(group, ProcessGroupHFReduce):
        return datetime.timedelta(seconds=group._timeout_s)
    return dist.distributed_c10d.default_pg_timeout


def _compare(store: dist.Store, rank: int, size: int, levels: Tree) -> None:
    def words(tree: Tree) -> str:
        if not isinstance(tree, list | tuple):
            return repr(tree)
        return f"[{', '.join(words(branch) for branch in tree)}]"

    mine = words(levels)
    store.set(f"tree/{rank}", mine)
    for other in range(size):
        if (theirs := store.get(f"tree/{other}").decode()) != mine:
            raise ValueError(
                f"levels must be equal on all ranks: rank {rank} has {mine}, rank {other} has {theirs}"
            )


def _flattened(tensor: torch.Tensor, slices: int) -> tuple[torch.Tensor, bool]:
    """Returns the elements as a row that divides into equal slices; True if the row is a copy."""
    missing = -tensor.numel() % slices
    if missing == 0:
        return tensor.contiguous().view(-1), not tensor.is_contiguous()
    flat = empty(tensor.numel() + missing, dtype=tensor.dtype)
    flat[: tensor.numel()].copy_(tensor.reshape(-1))
    flat[tensor.numel() :].zero_()
    return flat, True


def _options(options: Any, op: Any = None) -> Any:
    if op is not None:
        options.reduceOp = op
    options.asyncOp = False
    return options
