"""PyTorch interface of record files: batched reads, and loaders that resume inside an epoch.

`Dataset` serves a whole batch of indices in one call (`__getitems__`), which every DataLoader of
torch uses. If a subclass does not override `process`, a batch is `Samples`: one block of memory,
which is also all that a worker process transfers. `DataLoader` adds `set_step`, `state_dict` and a
prefetch thread. It wraps the batch sampler and the iterator, and uses no private part of torch.
`Subset`, `ConcatDataset` and `ReaderRegistry` are the other names that programs written for
High-Flyer's ffrecord import.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Self, cast, overload

import numpy as np
import torch
import torch.utils.data as td

from fireflyer.errors import ConfigError
from fireflyer.ffrecord.integers import checked_integer
from fireflyer.ffrecord.paths import PathName
from fireflyer.ffrecord.prefetch import Prefetcher
from fireflyer.ffrecord.reader import FileReader, Indices, Sample
from fireflyer.ffrecord.remote import Reader, RemoteFiles, open_records


class Samples(Sequence[Sample]):
    """Samples of a batch as uint8 arrays of any length: views on one block of memory.

    A worker process transfers two tensors, regardless of the number of samples.

    Attributes:
        arena: uint8 tensor of all bytes, one sample after another.
        offsets: int64 tensor of k + 1 values: sample j is `arena[offsets[j]:offsets[j + 1]]`.
    """

    def __init__(self, arena: torch.Tensor, offsets: torch.Tensor) -> None:
        self.arena = arena
        self.offsets = offsets
        self._bytes = arena.numpy()
        self._ends: list[int] = offsets.tolist()

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, place: int) -> Sample: ...

    @overload
    def __getitem__(self, place: slice) -> list[Sample]: ...

    def __getitem__(self, place: int | slice) -> Sample | list[Sample]:
        if isinstance(place, slice):
            return [self[j] for j in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(f"sample {place} of a batch of {len(self)}")
        place %= len(self)
        return self._bytes[self._ends[place] : self._ends[place + 1]]

    def __iter__(self) -> Iterator[Sample]:
        start = 0
        for end in self._ends[1:]:
            yield self._bytes[start:end]
            start = end

    def __eq__(self, other: object) -> bool:
        """Compares all bytes with those of other `Samples`, or of a list or tuple of arrays."""
        if isinstance(other, Samples):
            return self.offsets.equal(other.offsets) and self.arena.equal(other.arena)
        if isinstance(other, list | tuple):
            return len(self) == len(other) and all(map(np.array_equal, self, other))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # the bytes may change

    def pin_memory(self) -> Self:
        """Pins the memory; torch's loaders call this for `pin_memory=True`."""
        return type(self)(self.arena.pin_memory(), self.offsets)

    def __reduce__(self) -> tuple[type[Self], tuple[torch.Tensor, torch.Tensor]]:
        return type(self), (self.arena, self.offsets)

    def __repr__(self) -> str:
        return f"Samples({len(self)} samples, {self.arena.numel()} bytes)"


def collate(batch: Sequence[Any]) -> Any:
    """Collates a batch: keeps `Samples`, and calls torch's `default_collate` for anything else."""
    return batch if isinstance(batch, Samples) else td.default_collate(cast(list[Any], batch))


class ReaderRegistry:
    """Base class of objects that have readers of record files as attributes."""

    def ffreaders(self) -> list[Reader]:
        """Returns the readers among the attributes and among registries in the attributes."""
        found: list[Reader] = []
        for value in vars(self).values():
            if isinstance(value, FileReader | RemoteFiles):
                found.append(value)
            elif isinstance(value, ReaderRegistry):
                found += value.ffreaders()
        return found


class _Batched(ReaderRegistry, td.Dataset[Any]):
    """Base class of datasets that serve a batch of indices in one call, `_batch`."""

    def _batch(self, indices: Indices) -> Sequence[Any]:
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Returns one sample for each of `indices`; torch's DataLoader calls this."""
        return self[indices if isinstance(indices, list) else list(indices)]

    def __getitem__(self, index: int | Indices) -> Any:
        """Returns one sample, or a list of samples for a list, tuple or array of indices.

        Raises:
            IndexError: an index is negative or not below the length.
        """
        if isinstance(index, list | tuple | np.ndarray):
            return self._batch(index)
        return self._batch([cast(int, index)])[0]

    def __add__(self, other: td.Dataset[Any]) -> "ConcatDataset":
        return ConcatDataset([self, other])


class Dataset(_Batched):
    """Samples of record files. Override `process` to turn bytes into samples.

    As with High-Flyer's ffrecord, a subclass may override `__getitem__` instead, which gets a list
    of indices.

    Args:
        fnames: a file, a list of files, or a directory; or URLs of these.
        check_data: compare the CRC32 of every sample that is read.

    Raises the errors of `open_records`.
    """

    def __init__(self, fnames: PathName | Iterable[PathName], check_data: bool = True) -> None:
        self.reader: Reader = open_records(fnames, check_data)
        self.fnames = self.reader.fnames

    def __len__(self) -> int:
        return self.reader.n

    def process(self, indices: Sequence[int], data: Samples) -> Sequence[Any]:
        """Turns `data`, the bytes of the samples at `indices`, into samples; default: returns
        `data`."""
        return data

    def _batch(self, indices: Indices) -> Sequence[Any]:
        arena, offsets = self.reader.read_batch(indices)
        asked = cast(Sequence[int], indices)
        return self.process(asked, Samples(torch.from_numpy(arena), torch.from_numpy(offsets)))


class Subset(_Batched, td.Subset[Any]):
    """Samples of `dataset` at `indices`; reads a batch as one batch of `dataset`."""

    def _batch(self, indices: Indices) -> Sequence[Any]:
        return _read(self.dataset, [self.indices[index] for index in indices])


class ConcatDataset(_Batched, td.ConcatDataset[Any]):
    """Concatenated datasets; a batch reads each dataset once, and an index may repeat.

    Datasets without `__getitems__` are read sample by sample.
    """

    def _batch(self, indices: Indices) -> list[Any]:
        places: dict[int, list[int]] = {}  # dataset -> positions in the batch that it fills
        for place, index in enumerate(indices):
            if isinstance(index, bool):
                raise TypeError("indices must be integers, not bool")
            if not 0 <= index < len(self):
                raise IndexError(f"sample index {index} is outside [0, {len(self)})")
            places.setdefault(self._dataset_of(index), []).append(place)
        batch: list[Any] = [None] * len(indices)
        for number, filled in sorted(places.items()):
            start = self.cumulative_sizes[number - 1] if number else 0
            samples = _read(self.datasets[number], [indices[place] - start for place in filled])
            for place, sample in zip(filled, samples, strict=True):
                batch[place] = sample
        return batch

    def ffreaders(self) -> list[Reader]:
        """Returns the readers of all datasets."""
        registries = [each for each in self.datasets if isinstance(each, ReaderRegistry)]
        return [reader for each in registries for reader in each.ffreaders()]

    def _dataset_of(self, index: int) -> int:
        return bisect_right(self.cumulative_sizes, index)


def _read(dataset: td.Dataset[Any], indices: list[int]) -> Sequence[Any]:
    many = getattr(dataset, "__getitems__", None)
    if many is not None:
        return cast(Sequence[Any], many(indices))
    return [dataset[index] for index in indices]


class _Batches(td.Sampler[list[int]]):
    """Batches of `batches` without the first `skip`, which are not read."""

    def __init__(self, batches: Iterable[list[int]]) -> None:
        self.batches = batches
        self.skip = 0

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self.batches), self.skip, None)

    def __len__(self) -> int:
        return self.total - self.skip

    @property
    def total(self) -> int:
        """Number of batches of a whole epoch."""
        return len(cast(Sequence[Any], self.batches))


class _Epoch:
    """One pass over a loader: its start and its progress."""

    def __init__(self, step: int, generator: torch.Tensor | None) -> None:
        self.step = step  # batches that were skipped or yielded
        self.generator = generator  # state before the first batch was drawn
        self.finished = False  # all batches were yielded
        self.ended = False  # finished or abandoned: yields no more batches

    def run(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            for batch in batches:
                self.step += 1
                yield batch
            self.finished = True
        finally:
            self.ended = True


class DataLoader(td.DataLoader[Any]):
    """DataLoader of torch that can start inside an epoch and save its position.

    The order of samples is that of torch's DataLoader with the same generator. With `shuffle` and
    no generator, this class makes a generator, seeded from torch's default generator, so that it
    can save the order. If you pass your own sampler, you must restore its order (seed, epoch)
    yourself.

    Takes the arguments of `torch.utils.data.DataLoader` for map-style datasets with automatic
    batching, and:

    Args:
        collate_fn: default `collate`.
        prefetch: batches that a thread of this process makes ahead; 0: the caller's thread makes
            each batch. With worker processes (`num_workers`) the workers prefetch instead: see
            `prefetch_factor`.
        skippable: False: keep torch's own batch sampler, for frameworks that replace it. Then
            neither `set_step` nor a state is available.

    Raises:
        ConfigError: an iterable-style dataset, or no batches (`batch_size=None`).
    """

    def __init__(
        self,
        dataset: td.Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool = False,
        sampler: td.Sampler[int] | Iterable[int] | None = None,
        batch_sampler: td.Sampler[list[int]] | Iterable[list[int]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch: int = 1,
        skippable: bool = True,
        **options: Any,
    ) -> None:
        if isinstance(dataset, td.IterableDataset) or (
            batch_size is None and batch_sampler is None
        ):
            raise ConfigError(
                "this DataLoader needs a map-style dataset and batches: "
                "use torch.utils.data.DataLoader for iterable datasets or batch_size=None"
            )
        if batch_sampler is None:
            if shuffle and sampler is not None:
                raise ConfigError("shuffle=True and a sampler exclude each other: pass one of them")
            if shuffle and generator is None:
                seed = int(torch.empty((), dtype=torch.int64).random_().item())
                generator = torch.Generator().manual_seed(seed)
        elif batch_size != 1 or shuffle or sampler is not None or drop_last:
            raise ConfigError(
                "a batch_sampler excludes batch_size, shuffle, sampler and drop_last: pass it alone"
            )
        if checked_integer("prefetch", prefetch) < 0:
            raise ConfigError(f"invalid prefetch {prefetch}: expected a number of batches, or 0")
        self._prefetch = 0 if num_workers else prefetch
        self._generator = generator
        self._skip = 0  # batches that the next epoch skips
        self._epoch: _Epoch | None = None  # the latest epoch
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate if collate_fn is None else collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            generator=generator,
            **options,
        )
        self._batches: _Batches | None = None
        if skippable:
            self._batches = _Batches(cast(Iterable[list[int]], self.batch_sampler))
            # torch's own setter rejects a sampler after its __init__.
            object.__setattr__(self, "batch_sampler", self._batches)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        start = None if self._generator is None else self._generator.get_state()
        epoch = self._epoch = _Epoch(self._skip, start)
        if self._batches is not None:
            self._batches.skip, self._skip = self._skip, 0
        batches = super().__iter__()
        return epoch.run(Prefetcher(batches, self._prefetch) if self._prefetch else batches)

    def __len__(self) -> int:
        """Returns the number of batches of the epoch in progress, or of the next epoch if none is
        in progress, without skipped batches."""
        if self._batches is None:
            return super().__len__()
        under_way = self._epoch is not None and not self._epoch.ended
        return self._batches.total - (self._batches.skip if under_way else self._skip)

    def set_step(self, step: int) -> None:
        """Makes the next epoch skip its first `step` batches without reading them; later epochs are
        whole.

        An epoch in progress is abandoned: `state_dict` then describes the next epoch.

        Raises:
            ValueError: `step` is negative or more than the batches of an epoch.
            TypeError: `step` is not an integer.
            ConfigError: the loader was made with `skippable=False`.
        """
        step, total = checked_integer("step", step), self._skipping().total
        if not 0 <= step <= total:
            raise ValueError(f"step {step} is outside [0, {total}]")
        self._epoch = None
        self._skip = step

    def _skipping(self) -> _Batches:
        if self._batches is None:
            raise ConfigError(
                "this DataLoader was made with skippable=False, so it has neither set_step nor a state: "
                "make it with skippable=True"
            )
        return self._batches

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the loader, and the generator's state at the start of the epoch.

        The position is the number of batches that the latest epoch has skipped or yielded. After
        the end of an epoch or `set_step`, it is the number of batches that the next epoch skips.

        Raises:
            ConfigError: the loader was made with `skippable=False`.
        """
        total = self._skipping().total
        if self._epoch is not None and not self._epoch.finished:
            step, generator = self._epoch.step, self._epoch.generator
        else:
            step = self._skip
            generator = None if self._generator is None else self._generator.get_state()
        return {
            "step": step,
            "generator": generator,
            "samples": len(cast(Sequence[Any], self.dataset)),
            "batches": total,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next epoch continue after the last batch that was yielded before `state_dict`.

        Raises:
            ConfigError: the state belongs to a loader with other data or another batch size, only
                one of both loaders has a generator, or the state is not that of a loader. This
                loader is then unchanged.
        """
        mine = self.state_dict()
        if not isinstance(state, dict) or set(state) != set(mine):
            raise ConfigError(f"invalid state of a DataLoader: {state!r:.200}")
        for key in ("samples", "batches"):
            if state[key] != mine[key]:
                raise ConfigError(
                    f"the saved loader had {state[key]} {key}, this one has {mine[key]}: "
                    "make it over the same files with the same batch size"
                )
        if (state["generator"] is None) != (self._generator is None):
            raise ConfigError(
                "only one of the saved loader and this one has a generator: "
                "make it with the same shuffle and generator"
            )
        step = state["step"]
        total = mine["batches"]
        if type(step) is not int or not 0 <= step <= total:
            raise ConfigError(f"invalid state: its batch {step!r:.100} is outside [0, {total}]")
        if self._generator is not None:
            try:
                self._generator.set_state(state["generator"])
            except (RuntimeError, TypeError) as error:
                raise ConfigError(f"invalid generator state: {error}") from error
        self.set_step(step)
