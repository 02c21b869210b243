"""PyTorch's view of record files: batches read in one call, and loaders that can continue an epoch.

`Dataset` answers a whole batch of indices at once (`__getitems__`), which every DataLoader of torch uses; as
it is, with `Samples`: one block of memory, which is also all that a worker process hands over. `DataLoader`
adds `set_step`, `state_dict` and batches made ahead by a thread, without touching torch's private parts: it
wraps the sampler of batches and the iterator.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Self, cast, overload

import torch
import torch.utils.data as td

from fireflyer.errors import ConfigError
from fireflyer.ffrecord.ahead import Ahead
from fireflyer.ffrecord.paths import PathName
from fireflyer.ffrecord.reader import FileReader, Sample
from fireflyer.ffrecord.whole import whole


class Samples(Sequence[Sample]):
    """The samples of a batch as uint8 arrays of any length: views on one block of memory.

    A worker process hands over two tensors, however many samples there are.

    Attributes:
        arena: uint8 tensor of all bytes, one sample after the other.
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

    def pin_memory(self) -> Self:
        """What torch's loaders call for `pin_memory=True`."""
        return type(self)(self.arena.pin_memory(), self.offsets)

    def __reduce__(self) -> tuple[type[Self], tuple[torch.Tensor, torch.Tensor]]:
        return type(self), (self.arena, self.offsets)

    def __repr__(self) -> str:
        return f"Samples({len(self)} samples, {self.arena.numel()} bytes)"


def collate(batch: Sequence[Any]) -> Any:
    """What `DataLoader` does by default: `Samples` stay, all else goes to torch's own `default_collate`."""
    return batch if isinstance(batch, Samples) else td.default_collate(cast(list[Any], batch))


class Dataset(td.Dataset[Any]):
    """The samples of record files. Override `process` to turn bytes into samples.

    Args:
        fnames: a file, a list of files, or a directory.
        check_data: compare the CRC32 of every sample that is read.

    Raises: what `FileReader` raises.
    """

    def __init__(self, fnames: PathName | Iterable[PathName], check_data: bool = True) -> None:
        self.reader = FileReader(fnames, check_data)

    def __len__(self) -> int:
        return self.reader.n

    def process(self, indices: Sequence[int], data: Samples) -> Sequence[Any]:
        """One sample for each of `data`, the uint8 arrays read at `indices`; as it is, the arrays."""
        return data

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        arena, offsets = self.reader.read_batch(indices)
        return self.process(indices, Samples(torch.from_numpy(arena), torch.from_numpy(offsets)))

    def __getitem__(self, index: int | Sequence[int]) -> Any:
        """One sample, or a list of samples for a list of indices.

        Raises:
            IndexError: an index is negative or not below the length.
        """
        if isinstance(index, list | tuple):
            return self.__getitems__(index)
        return self.__getitems__([cast(int, index)])[0]


class ConcatDataset(td.ConcatDataset[Any]):
    """Datasets one after the other; a batch reads each of them once, and an index may repeat.

    Datasets without `__getitems__` are read sample by sample.
    """

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        places: dict[int, list[int]] = {}  # dataset -> the places of the batch that it fills
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

    def __getitem__(self, index: int | Sequence[int]) -> Any:
        if isinstance(index, list | tuple):
            return self.__getitems__(index)
        return self.__getitems__([cast(int, index)])[0]

    def _dataset_of(self, index: int) -> int:
        return bisect_right(self.cumulative_sizes, index)


def _read(dataset: td.Dataset[Any], indices: list[int]) -> Sequence[Any]:
    many = getattr(dataset, "__getitems__", None)
    if many is not None:
        return cast(Sequence[Any], many(indices))
    return [dataset[index] for index in indices]


class _Batches(td.Sampler[list[int]]):
    """The batches of `batches` without the first `skip`, which nobody reads."""

    def __init__(self, batches: Iterable[list[int]]) -> None:
        self.batches = batches
        self.skip = 0

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self.batches), self.skip, None)

    def __len__(self) -> int:
        return len(cast(Sequence[Any], self.batches))


class _Epoch:
    """One pass over a loader: where it began and how far it came."""

    def __init__(self, step: int, generator: torch.Tensor | None) -> None:
        self.step = step  # batches that were left out or handed out
        self.generator = generator  # its state before the first batch was drawn
        self.finished = False

    def run(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.step += 1
            yield batch
        self.finished = True


class DataLoader(td.DataLoader[Any]):
    """torch's DataLoader that can start inside an epoch and save where it is.

    The order of samples is the one of torch's DataLoader with the same generator. With `shuffle` and no
    generator it makes one of its own from torch's default generator, so that the order can be saved.
    With a sampler of your own, restoring that sampler's order (seed, epoch) is yours to do.

    Takes the arguments of `torch.utils.data.DataLoader` for map-style datasets with automatic batching, and:

    Args:
        collate_fn: default `collate`.
        prefetch: batches that a thread of this process makes ahead; 0 makes them in the caller. With worker
            processes (`num_workers`) it is theirs to work ahead: see `prefetch_factor`.

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
        *,
        prefetch: int = 1,
        generator: torch.Generator | None = None,
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
            if sampler is None:
                sized = cast(Any, dataset)
                sampler = (
                    td.RandomSampler(sized, generator=generator)
                    if shuffle
                    else td.SequentialSampler(sized)
                )
            batch_sampler = td.BatchSampler(sampler, cast(int, batch_size), drop_last)
        elif batch_size != 1 or shuffle or sampler is not None or drop_last:
            raise ConfigError(
                "a batch_sampler excludes batch_size, shuffle, sampler and drop_last: pass it alone"
            )
        if whole("prefetch", prefetch) < 0:
            raise ConfigError(f"prefetch={prefetch}: a number of batches, or 0")
        self._prefetch = 0 if num_workers else prefetch
        self._batches = _Batches(batch_sampler)
        self._generator = generator
        self._skip = 0  # batches that the next epoch leaves out
        self._epoch: _Epoch | None = None  # the newest one
        super().__init__(
            dataset,
            batch_sampler=self._batches,
            num_workers=num_workers,
            collate_fn=collate if collate_fn is None else collate_fn,
            pin_memory=pin_memory,
            generator=generator,
            **options,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        start = None if self._generator is None else self._generator.get_state()
        self._epoch = _Epoch(self._skip, start)
        self._batches.skip, self._skip = self._skip, 0
        batches = super().__iter__()
        return self._epoch.run(Ahead(batches, self._prefetch) if self._prefetch else batches)

    def set_step(self, step: int) -> None:
        """The next epoch leaves out its first `step` batches, unread; later epochs are whole.

        An epoch under way is given up: `state_dict` tells of the next one.

        Raises:
            ValueError: `step` is negative or more than the batches of an epoch.
            TypeError: it is no whole number.
        """
        step = whole("step", step)
        if not 0 <= step <= len(self):
            raise ValueError(f"step {step} is outside [0, {len(self)}]")
        self._epoch = None
        self._skip = step

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: the batches handed out in this epoch, or left out of the next if `set_step`
        came later; and the generator at its start."""
        if self._epoch is not None and not self._epoch.finished:
            step, generator = self._epoch.step, self._epoch.generator
        else:
            step = self._skip
            generator = None if self._generator is None else self._generator.get_state()
        return {
            "step": step,
            "generator": generator,
            "samples": len(cast(Sequence[Any], self.dataset)),
            "batches": len(self),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next epoch continues behind the last batch that was handed out before `state_dict`.

        Raises:
            ConfigError: the state is of a loader with other data, another batch size or no generator, or is
                not one. This loader is then as it was.
        """
        mine = self.state_dict()
        if not isinstance(state, dict) or set(state) != set(mine):
            raise ConfigError(f"this is not the state of a DataLoader: {state!r:.200}")
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
        if type(step) is not int or not 0 <= step <= len(self):
            raise ConfigError(f"a state cannot stand at batch {step!r:.100} of {len(self)}")
        if self._generator is not None:
            try:
                self._generator.set_state(state["generator"])
            except (RuntimeError, TypeError) as error:
                raise ConfigError(f"the state of the generator is none: {error}") from error
        self.set_step(step)
