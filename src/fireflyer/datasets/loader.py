"""Batches of a dataset per rank, in an order independent of ranks, workers and restarts.

`Plan` determines the samples of each rank and batch, without I/O. `DistributedLoader` prefetches
these samples in threads and counts the consumed batches.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np

from fireflyer.datasets.dataset import Dataset, Paths, Reader, fingerprint
from fireflyer.datasets.order import DEFAULT_BLOCK, ORDER_VERSION, Order, Positions
from fireflyer.errors import ConfigError
from fireflyer.ffrecord import ChunkCache, open_records
from fireflyer.ffrecord.integers import checked_integer

Process = Callable[[Positions, Any], Any]
"""Function (indices of this rank's samples, the samples) -> batch."""

_WORD = 1 << 64
_DRAWN = 4096
"""Number of samples of a rank whose order is computed in one step."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Batches of an epoch from `start` on. With B = `batch`, batch k consists of the positions
    [start + kB, start + (k+1)B)."""

    order: Order
    start: int
    batch: int
    last: Literal["keep", "drop", "pad"]

    def __len__(self) -> int:
        rest = self.order.n - self.start
        return rest // self.batch if self.last == "drop" else -(-rest // self.batch)

    def end(self, k: int) -> int:
        """Returns how many samples of the epoch all ranks together have consumed after k batches,
        at most `n`."""
        return self.order.n if k >= len(self) else self.start + k * self.batch

    def share(self, k: int, rank: int, world: int) -> Positions:
        """Returns the samples of batch k for `rank`: a contiguous part of the global batch."""
        return self.order.at(self._positions(k, rank, world))

    def shares(self, first: int, rank: int, world: int) -> Iterator[Positions]:
        """Yields `share` of all batches from `first` on; groups small batches for speed."""
        group = max(1, _DRAWN * world // self.batch)
        for start in range(first, len(self), group):
            numbers = range(start, min(start + group, len(self)))
            parts = [self._positions(k, rank, world) for k in numbers]
            ends = np.cumsum([len(part) for part in parts])
            yield from np.split(self.order.at(np.concatenate(parts)), ends[:-1])

    def _positions(self, k: int, rank: int, world: int) -> Positions:
        first = self.start + k * self.batch
        length = self.batch
        if self.last == "keep":
            length = min(length, self.order.n - first)
        low, high = first + length * rank // world, first + length * (rank + 1) // world
        positions = np.arange(low, high, dtype=np.int64)
        # Positions beyond the end wrap around; only "pad" reaches them.
        return positions % max(self.order.n, 1)


class DistributedLoader:
    """Loader of this rank's batches: iterating yields the rest of the epoch, then enters the next
    epoch.

    Use it from one thread; its own threads live as long as an iteration. It can be pickled, and used
    after a fork or a spawn. As a map-style dataset (`len(loader)`, `loader[k]`) it serves worker
    processes; see docs/guide/datasets.md.

    Args:
        dataset: a dataset of a catalog; or paths or URLs (fs3:///a.ffr) of record files; or a
            reader (`n` and `read`, which several threads call concurrently).
        rank, world: this rank and the number of ranks.
        seed: seed of the order, in [0, 2^64).
        batch_size: samples of a batch of all ranks together, at least `world`.
        shuffle: True, False, or "block", which permutes runs of consecutive samples (for cold
            disks).
        block: number of samples in such a run; default 256.
        last: treatment of a short last batch: "keep" divides it, "drop" omits it, "pad" fills it
            from the beginning of the epoch's order.
        epoch: the first epoch.
        prefetch: batches to read ahead; 0 reads on demand.
        threads: number of batches to read in parallel.
        process: function that makes a batch from (indices, samples), in the reading threads.
            Default: the batch is the list of samples, which are uint8 arrays, or rows if the files
            have columns.
        cache: chunk cache for remote data.

    Raises:
        ConfigError: arguments that do not fit together.
        TypeError: an argument that must be an integer is not.
        StorageError, Corrupted: the data cannot be opened.
    """

    def __init__(
        self,
        dataset: Dataset | Paths | Reader,
        rank: int,
        world: int,
        *,
        seed: int,
        batch_size: int,
        shuffle: bool | Literal["block"] = True,
        block: int | None = None,
        last: Literal["keep", "drop", "pad"] = "keep",
        epoch: int = 0,
        prefetch: int = 2,
        threads: int = 1,
        process: Process | None = None,
        cache: ChunkCache | None = None,
    ) -> None:
        rank, world = checked_integer("rank", rank), checked_integer("world", world)
        batch_size = checked_integer("batch_size", batch_size)
        prefetch, threads = (
            checked_integer("prefetch", prefetch),
            checked_integer("threads", threads),
        )
        _check(rank, world, batch_size, prefetch, threads)
        if not (isinstance(shuffle, bool) or shuffle == "block") or last not in (
            "keep",
            "drop",
            "pad",
        ):
            raise ConfigError(
                f"invalid shuffle {shuffle!r} or last {last!r}: expected shuffle True, False or 'block', "
                "and last 'keep', 'drop' or 'pad'"
            )
        block = None if block is None else checked_integer("block", block)
        if block is not None and (shuffle != "block" or not 0 < block < _WORD // 4):
            raise ConfigError(f"block={block} needs shuffle='block', and at least one sample")
        if isinstance(dataset, Dataset):
            self._reader: Any = dataset.open(cache)
            self.dataset_id = dataset.id
        else:
            own = hasattr(dataset, "read") and hasattr(dataset, "n")
            self._reader = dataset if own else open_records(dataset, cache=cache)  # type: ignore[arg-type]
            self.dataset_id = fingerprint(self._reader)
        self.rank, self.world = rank, world
        self.seed = _in_word("seed", seed)
        self.epoch = _in_word("epoch", epoch)
        self.shuffle = shuffle
        self.block = (block or DEFAULT_BLOCK) if shuffle == "block" else None
        self.batch_size, self.last = batch_size, last
        self._prefetch, self._threads, self._process = prefetch, threads, process
        self._plan: Plan
        self._iteration = 0  # number of the newest iteration, the only one that continues
        self._enter(0)

    @property
    def n(self) -> int:
        """Number of samples of the whole dataset."""
        return int(self._reader.n)

    @property
    def samples(self) -> int:
        """Number of samples of this epoch that all ranks together have consumed."""
        return self._plan.end(self._done) if self._done else self._plan.start

    def __len__(self) -> int:
        """Returns the number of batches from the position where the epoch was entered to the
        epoch's end."""
        return len(self._plan)

    def __getitem__(self, k: int) -> Any:
        """Returns batch k of this epoch, counted from the position where the epoch was entered.

        The call consumes nothing.

        Raises:
            IndexError: the batch does not exist.
            TypeError: `k` is not an integer.
            StorageError, Corrupted: the batch cannot be read.
        """
        k = checked_integer("a batch", k)
        if not 0 <= k < len(self._plan):
            raise IndexError(f"batch {k} is outside [0, {len(self._plan)})")
        return self._make(self._plan.share(k, self.rank, self.world))

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches from the current position to the end, then enters the next epoch.

        A batch counts as consumed when it is yielded. A batch that cannot be read raises the read
        error and does not count. An iteration ends, as at the end of an epoch, when a newer iteration
        starts (`iter(loader)`) or when `set_epoch` is called. After `redivide` or
        `load_state_dict`, a running iteration continues with the new batches.
        """
        self._iteration += 1
        return self._run(self._iteration)

    def _run(self, iteration: int) -> Iterator[Any]:
        while self._iteration == iteration:
            plan = self._plan
            with contextlib.closing(self._batches(plan, self._done)) as batches:
                for batch in batches:
                    self._done += 1
                    yield batch
                    if self._plan is not plan or self._iteration != iteration:
                        break  # this plan no longer determines the next batch
                else:
                    self.set_epoch(self.epoch + 1)

    def advance(self, batches: int = 1) -> None:
        """Counts the next `batches` batches as consumed, because `loader[k]` has returned them.

        After the last batch the loader enters the next epoch immediately.

        Raises:
            ValueError: the epoch has fewer batches left.
            TypeError: `batches` is not an integer.
        """
        batches = checked_integer("batches", batches)
        if not 0 <= batches <= len(self._plan) - self._done:
            raise ValueError(
                f"cannot advance by {batches} batches: {len(self._plan) - self._done} are left"
            )
        self._done += batches
        if self._done == len(self._plan):
            self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Enters an epoch at its beginning."""
        self.epoch = _in_word("epoch", epoch)
        self._iteration += 1
        self._enter(0)

    def redivide(self, rank: int, world: int) -> None:
        """Makes this loader rank `rank` of `world` from the next batch on, even in an iteration.

        Prefetched batches of the old rank are dropped. All ranks must call this after the same
        batch.

        Raises:
            ConfigError: the rank does not exist, or a batch has fewer samples than there are ranks.
            TypeError: an argument is not an integer.
        """
        rank, world = checked_integer("rank", rank), checked_integer("world", world)
        _check(rank, world, self.batch_size, self._prefetch, self._threads)
        self.rank, self.world = rank, world
        self._plan = replace(self._plan)  # a new object, which running iterations notice

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of all ranks as plain values, equal on every rank."""
        return {
            "epoch": self.epoch,
            "samples": self.samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "block": self.block,
            "order": ORDER_VERSION,
            "dataset": self.dataset_id,
            "n": self.n,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moves the loader and a running iteration to the position and seed of `state`.

        World and batch size may differ.

        Raises:
            ConfigError: the state belongs to other data or another kind of shuffle or order, or is
                not a loader state.
        """
        mine = self.state_dict()
        if not isinstance(state, dict) or set(state) != set(mine):
            raise ConfigError(f"invalid state of a DistributedLoader: {state!r:.200}")
        for key in ("dataset", "n", "order", "shuffle", "block"):
            if type(state[key]) is not type(mine[key]) or state[key] != mine[key]:
                raise ConfigError(
                    f"the saved loader has {key} {state[key]!r}, this one {mine[key]!r}: "
                    "make it over the same data with the same shuffle"
                )
        samples = state["samples"]
        if type(samples) is not int or not 0 <= samples <= self.n:
            raise ConfigError(f"invalid state: its sample {samples!r} is outside [0, {self.n}]")
        seed, epoch = _in_word("seed", state["seed"]), _in_word("epoch", state["epoch"])
        self.seed, self.epoch = seed, epoch
        self._enter(samples)

    def _enter(self, start: int) -> None:
        order = Order(self.n, self.seed, self.epoch, bool(self.shuffle), self.block)
        self._plan = Plan(order, start, self.batch_size, self.last)
        self._done = 0  # consumed batches of the plan

    def _make(self, indices: Positions) -> Any:
        reader = self._reader
        samples = reader.rows(indices) if getattr(reader, "columns", None) else reader.read(indices)
        return samples if self._process is None else self._process(indices, samples)

    def _batches(self, plan: Plan, first: int) -> Generator[Any, None, None]:
        """Yields batches from `first` on, with at most `prefetch` batches ready or in progress."""
        shares = plan.shares(first, self.rank, self.world)
        if self._prefetch == 0:
            yield from map(self._make, shares)
            return
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="datasets-loader")
        ahead: deque[Future[Any]] = deque()
        try:
            for indices in islice(shares, self._prefetch):
                ahead.append(pool.submit(self._make, indices))
            while ahead:
                batch = ahead.popleft().result()
                for indices in islice(shares, 1):
                    ahead.append(pool.submit(self._make, indices))
                yield batch
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _check(rank: int, world: int, batch_size: int, prefetch: int, threads: int) -> None:
    if not 0 <= rank < world:
        raise ConfigError(f"invalid rank {rank} in a world of {world}")
    if batch_size < world:
        raise ConfigError(
            f"invalid batch_size {batch_size}: expected at least {world}, a sample for each rank"
        )
    if prefetch < 0 or threads < 1:
        raise ConfigError(
            f"invalid prefetch {prefetch} or threads {threads}: expected at least 0 and at least 1"
        )


def _in_word(what: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < _WORD:
        raise ConfigError(f"invalid {what} {value!r}: expected a whole number in [0, 2^64)")
    return value
