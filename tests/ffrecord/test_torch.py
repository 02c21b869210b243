"""Datasets and loaders: batches in one read, repeats kept, epochs that go on where they stopped."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as td

from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord.reader import FileReader
from fireflyer.ffrecord.torch import ConcatDataset, DataLoader, Dataset, Samples

N = 23
Store = Callable[..., Path]


class Numbers(Dataset):
    """Each sample is an int64 and comes as a tensor; remembers the batches that were asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: list[list[int]] = []

    def process(self, indices: Sequence[int], data: Samples) -> list[torch.Tensor]:
        self.asked.append(list(indices))
        return [torch.from_numpy(d.view(np.int64)) for d in data]


class OneByOne(td.Dataset[torch.Tensor]):
    """A map-style dataset of torch without batches."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([1000 + index])


def number(i: int) -> bytes:
    return i.to_bytes(8, "little")


@pytest.fixture
def numbers(store: Store) -> Numbers:
    return Numbers(store([number(i) for i in range(N)]))


def values(batches: Any) -> list[list[int]]:
    return [batch.flatten().tolist() for batch in batches]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_dataset_reads_a_batch_in_one_call(numbers: Numbers) -> None:
    batches = values(td.DataLoader(numbers, batch_size=10))
    assert batches == [list(range(10)), list(range(10, 20)), [20, 21, 22]]
    assert numbers.asked == batches


def test_items_are_samples_and_lists_are_batches(numbers: Numbers) -> None:
    assert numbers[3].tolist() == [3]
    assert values(numbers[[4, 4, 2]]) == [[4], [4], [2]]
    assert values(iter(numbers)) == [[i] for i in range(N)]
    for bad in (-1, N):
        with pytest.raises(IndexError):
            numbers[bad]


def test_without_process_samples_are_their_bytes(store: Store) -> None:
    plain = Dataset(store([b"ab", b"c"]))
    assert [s.tobytes() for s in plain[[1, 0]]] == [b"c", b"ab"]
    assert len(plain) == 2


def test_a_batch_is_one_block_of_memory(store: Store) -> None:
    content = [b"abc", b"", b"de", b"f" * 1000]
    batch = Dataset(store(content))[[3, 1, 0, 0]]
    assert isinstance(batch, Samples)
    expected = [content[i] for i in (3, 1, 0, 0)]
    assert [s.tobytes() for s in batch] == expected
    assert [batch[j].tobytes() for j in range(4)] == expected
    assert batch[-1].tobytes() == b"abc"
    assert [s.tobytes() for s in batch[1:3]] == expected[1:3]
    assert batch.arena.numel() == 1006
    assert batch.offsets.tolist() == [0, 1000, 1000, 1003, 1006]
    with pytest.raises(IndexError):
        batch[4]
    assert "4 samples, 1006 bytes" in repr(batch)


@pytest.mark.sample(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_samples_of_any_length_cross_as_one_block(store: Store, workers: int, method: str) -> None:
    content = [bytes([i]) * (i * 37 % 101) for i in range(40)]
    context = method if workers else None
    loader = DataLoader(
        Dataset(store(content)), 16, num_workers=workers, multiprocessing_context=context
    )
    batches = list(loader)
    assert all(isinstance(batch, Samples) for batch in batches)
    assert [s.tobytes() for batch in batches for s in batch] == content
    assert all(batch.arena.is_shared() == bool(workers) for batch in batches)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_made_ahead_are_the_same_and_not_counted_before_they_are_given(
    numbers: Numbers, prefetch: int
) -> None:
    loader = DataLoader(numbers, 4, shuffle=True, generator=seeded(5), prefetch=prefetch)
    plain = values(td.DataLoader(numbers, 4, shuffle=True, generator=seeded(5)))
    batches = iter(loader)
    assert values([next(batches), next(batches)]) == plain[:2]
    assert loader.state_dict()["step"] == 2
    assert values(batches) == plain[2:]


def test_a_negative_prefetch_is_refused(numbers: Numbers) -> None:
    with pytest.raises(ConfigError, match="prefetch"):
        DataLoader(numbers, prefetch=-1)


def test_a_damaged_sample_reaches_the_training_loop_as_such(store: Store) -> None:
    path = store([number(i) for i in range(N)])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(Corrupted, match=f"sample {N - 1} "):
        list(td.DataLoader(Numbers(path), batch_size=8))


def test_a_dataset_pickles(numbers: Numbers) -> None:
    assert values(pickle.loads(pickle.dumps(numbers))[[5, 6]]) == [[5], [6]]


def test_concat_keeps_order_and_repeats_and_reads_each_dataset_once(store: Store) -> None:
    first = Numbers(store([number(i) for i in range(4)], "a.ffr"))
    second = Numbers(store([number(i) for i in range(100, 106)], "b.ffr"))
    both = ConcatDataset([first, OneByOne(), second])
    indices = [9, 0, 3, 9, 4, 0, 14, 8, 4]
    expected = [100, 0, 3, 100, 1000, 0, 105, 1004, 1000]
    assert values(both[indices]) == [[v] for v in expected]
    assert values(td.DataLoader(both, batch_sampler=[indices])) == [expected]
    assert first.asked == [[0, 3, 0]] * 2
    assert second.asked == [[0, 0, 5]] * 2
    assert [both[i].item() for i in range(len(both))] == [
        *range(4),
        *range(1000, 1005),
        *range(100, 106),
    ]
    for bad in (-1, 15):
        with pytest.raises(IndexError, match="outside"):
            both[bad]


def test_subsets_of_torch_keep_batches(numbers: Numbers) -> None:
    subset = td.Subset(numbers, [5, 1, 9])
    assert values(td.DataLoader(subset, batch_size=3)) == [[5, 1, 9]]
    assert numbers.asked == [[5, 1, 9]]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_order_is_that_of_torchs_loader(numbers: Numbers, shuffle: bool, workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": shuffle, "num_workers": workers}
    ours = DataLoader(numbers, generator=seeded(1), **options)
    torchs = td.DataLoader(numbers, generator=seeded(1), **options)
    assert len(ours) == len(torchs) == 6
    for _ in range(2):
        assert values(ours) == values(torchs)


def test_the_options_of_torchs_loader_reach_it(numbers: Numbers) -> None:
    loader = DataLoader(numbers, 4, drop_last=True, collate_fn=len, timeout=0)
    assert list(loader) == [4] * 5
    loader = DataLoader(numbers, 4, sampler=range(6, 0, -1))
    assert values(loader) == [[6, 5, 4, 3], [2, 1]]
    loader = DataLoader(numbers, batch_sampler=[[1, 1], [2]])
    assert values(loader) == [[1, 1], [2]]


@pytest.mark.sample(5)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("step", [0, 1, 5, 6])
def test_set_step_leaves_out_batches_of_one_epoch(
    numbers: Numbers, shuffle: bool, workers: int, step: int
) -> None:
    def loader() -> DataLoader:
        return DataLoader(numbers, 4, shuffle, num_workers=workers, generator=seeded(7))

    whole = loader()
    epochs = [values(whole), values(whole)]
    skipping = loader()
    numbers.asked.clear()
    skipping.set_step(step)
    assert [values(skipping), values(skipping)] == [epochs[0][step:], epochs[1]]
    if workers == 0:
        assert numbers.asked == epochs[0][step:] + epochs[1]


def test_set_step_refuses_what_no_epoch_has(numbers: Numbers) -> None:
    loader = DataLoader(numbers, 4)
    for bad in (-1, 7):
        with pytest.raises(ValueError, match=r"outside \[0, 6\]"):
            loader.set_step(bad)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loaded_state_gives_the_rest_of_the_run(
    numbers: Numbers, tmp_path: Path, shuffle: bool, workers: int
) -> None:
    """Saved before, between and after all batches of two epochs, and loaded into a fresh loader."""

    def loader(seed: int) -> DataLoader:
        return DataLoader(numbers, 4, shuffle, num_workers=workers, generator=seeded(seed))

    def run(loader: DataLoader) -> Iterator[tuple[dict[str, Any], list[int]]]:
        for _ in range(2):
            for batch in loader:
                yield loader.state_dict(), batch.flatten().tolist()

    original = loader(3)
    states = [original.state_dict()]
    batches = []
    for state, batch in run(original):
        states.append(state)
        batches.append(batch)
    assert len(batches) == 12
    for done in range(0, 13, 5 if workers else 1):
        torch.save(states[done], tmp_path / "state.pt")
        resumed = loader(99)
        resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
        assert resumed.state_dict()["step"] == states[done]["step"]
        epochs = 2 if done <= 6 else 1
        rest = [batch for _ in range(epochs) for batch in values(resumed)]
        if done == 0 or done % 6:
            assert rest == batches[done:]
        else:  # saved behind the last batch of an epoch: what is left of that epoch is nothing
            assert rest == batches[done : done + 6]


def test_a_loader_that_shuffles_without_generator_can_be_resumed(numbers: Numbers) -> None:
    torch.manual_seed(5)
    loader = DataLoader(numbers, 4, shuffle=True)
    iterator = iter(loader)
    head = values([next(iterator), next(iterator)])
    state = loader.state_dict()
    resumed = DataLoader(numbers, 4, shuffle=True)
    resumed.load_state_dict(state)
    rest = values(iterator)
    assert values(resumed) == rest
    assert sorted(chain(*head, *rest)) == list(range(N))
    assert values(resumed) == values(loader)
    torch.manual_seed(5)
    assert values(DataLoader(numbers, 4, shuffle=True)) == head + rest


def test_an_abandoned_epoch_does_not_disturb_the_next(numbers: Numbers) -> None:
    loader = DataLoader(numbers, 4)
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    next(second)
    list(first)
    assert loader.state_dict()["step"] == 2
    list(second)
    assert loader.state_dict()["step"] == 0


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_state_saved_behind_set_step_goes_on_as_the_loader_does(
    numbers: Numbers, shuffle: bool
) -> None:
    loader = DataLoader(numbers, 4, shuffle, generator=seeded(7))
    next(iter(loader))
    loader.set_step(4)
    state = loader.state_dict()
    assert state["step"] == 4
    resumed = DataLoader(numbers, 4, shuffle, generator=seeded(8))
    resumed.load_state_dict(state)
    rest = values(loader)
    assert (len(rest), values(resumed)) == (2, rest)


@pytest.mark.parametrize(
    "change",
    [
        *({}, None, {"step": -1}, {"step": 7}, {"step": 1.0}, {"step": True}, {"more": 1}),
        *({"generator": torch.zeros(5056, dtype=torch.uint8)}, {"generator": b"x"}),
    ],
)
def test_a_refused_state_changes_nothing(numbers: Numbers, change: dict[str, Any] | None) -> None:
    loader = DataLoader(numbers, 4, shuffle=True, generator=seeded(7))
    running = iter(loader)
    first = next(running)
    before = loader.state_dict()
    other = DataLoader(numbers, 4, shuffle=True, generator=seeded(8)).state_dict()
    assert loader._generator is not None
    now = loader._generator.get_state()
    with pytest.raises(ConfigError):
        loader.load_state_dict({**other, **change} if change else change)  # type: ignore[arg-type]
    assert loader._generator.get_state().equal(now)
    after = loader.state_dict()
    assert after.pop("generator").equal(before.pop("generator"))
    assert after == before
    assert sorted(chain(*values([first, *running]))) == list(range(N))


def test_a_state_of_another_loader_is_refused(numbers: Numbers, store: Store) -> None:
    state = DataLoader(numbers, 4).state_dict()
    other = Numbers(store([number(i) for i in range(N + 1)], "other.ffr"))
    with pytest.raises(ConfigError, match="23 samples, this one has 24"):
        DataLoader(other, 4).load_state_dict(state)
    with pytest.raises(ConfigError, match="6 batches, this one has 8"):
        DataLoader(numbers, 3).load_state_dict(state)
    with pytest.raises(ConfigError, match="has a generator"):
        DataLoader(numbers, 4, shuffle=True).load_state_dict(state)


def test_arguments_that_cannot_work_are_refused(numbers: Numbers) -> None:
    with pytest.raises(ConfigError, match="map-style"):
        DataLoader(numbers, batch_size=None)
    with pytest.raises(ConfigError, match="map-style"):
        DataLoader(td.ChainDataset([]))
    with pytest.raises(ConfigError, match="exclude each other"):
        DataLoader(numbers, shuffle=True, sampler=range(3))
    with pytest.raises(ConfigError, match="pass it alone"):
        DataLoader(numbers, 4, batch_sampler=[[1]])


def test_one_reader_serves_the_parent_and_its_workers(numbers: Numbers) -> None:
    assert isinstance(numbers.reader, FileReader)
    assert values(numbers[[1, 2, 3, 4]]) == [[1], [2], [3], [4]]
    loader = DataLoader(numbers, 4, num_workers=2, persistent_workers=True)
    for _ in range(2):
        assert list(chain(*values(loader))) == list(range(N))
    assert values(numbers[[22]]) == [[22]]
