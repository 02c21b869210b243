"""Programs that were written for the original run with our module under its name."""

import importlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as td

from fireflyer import ffrecord
from fireflyer.errors import ConfigError
from fireflyer.ffrecord import FileReader, pack_folder
from fireflyer.ffrecord.torch import ConcatDataset, DataLoader, Dataset, ReaderRegistry, Subset

Store = Callable[..., Path]
N = 23


def number(i: int) -> bytes:
    return i.to_bytes(8, "little")


@pytest.fixture
def path(store: Store) -> Path:
    return store([number(i) for i in range(N)])


class Squares(Dataset):
    """Answers lists of indices by `__getitem__`, and has neither reader nor `process`."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return N

    def __getitem__(self, indices: Any) -> list[torch.Tensor]:
        assert isinstance(indices, list)
        self.asked.append(indices)
        return [torch.tensor(index**2) for index in indices]


def values(batches: Any) -> list[list[int]]:
    return [batch.flatten().tolist() for batch in batches]


@pytest.fixture
def name_of_the_original(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    ffrecord.install_as_ffrecord()
    ffrecord.install_as_ffrecord()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "ffrecord"]:
        del sys.modules[name]


@pytest.mark.usefixtures("name_of_the_original")
def test_its_imports_give_our_modules_and_no_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.import_module("ffrecord")
    assert found is ffrecord
    assert importlib.import_module("ffrecord.torch").Dataset is Dataset
    assert ffrecord.__spec__ is not None
    assert ffrecord.__spec__.name == "fireflyer.ffrecord"
    names = ("FileReader", "FileWriter", "PackedFolder", "checkFsAlign", "pack_folder")
    assert all(hasattr(found, name) for name in (*names, "__version__"))
    importlib.import_module("ffrecord.utils").dump([b"ab"], tmp_path / "a.ffr", 1, True)
    assert capsys.readouterr().err == f"1/1 {tmp_path / 'a.ffr'}\n"
    assert found.FileReader(tmp_path / "a.ffr").read_one(0).tobytes() == b"ab"
    with pytest.raises(ModuleNotFoundError) as missing:
        importlib.import_module("ffrecord.nothing")
    assert missing.value.name == "ffrecord.nothing"


def test_a_package_that_is_imported_already_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ffrecord", pickle)
    with pytest.raises(ConfigError, match="already imported"):
        ffrecord.install_as_ffrecord()


def test_no_ordinary_file_system_says_that_it_aligns(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    assert ffrecord.checkFsAlign(file) is False
    os.close(file)


def test_the_root_of_a_packed_folder_is_listed_by_none(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_bytes(b"")
    pack_folder(tmp_path / "in", tmp_path / "in.ffr")
    assert ffrecord.PackedFolder(tmp_path / "in.ffr").list(None, True) == ["a"]


def test_a_dataset_may_answer_lists_itself() -> None:
    squares = Squares()
    assert values(td.DataLoader(squares, 10)) == [
        [i * i for i in range(start, min(start + 10, N))] for start in (0, 10, 20)
    ]
    assert squares.asked == [[*range(10)], [*range(10, 20)], [20, 21, 22]]
    assert values(ConcatDataset([squares, squares])[[1, N + 2]]) == [[1], [4]]


def test_a_subset_takes_lists_and_reads_them_at_once() -> None:
    squares = Squares()
    subset = Subset(squares, np.array([5, 1, 9]))  # type: ignore[arg-type]
    for indices in (np.array([2, 0]), [2, 0], (2, 0)):
        assert values(subset[indices]) == [[81], [25]]
    assert subset[1].item() == 1
    assert values(td.DataLoader(subset, 3)) == [[25, 1, 81]]
    assert squares.asked == [[9, 5]] * 3 + [[1], [5, 1, 9]]


def test_sums_of_datasets_take_lists(path: Path) -> None:
    one = Dataset(path)
    added = one + Subset(one, [3]) + one
    assert isinstance(added, ConcatDataset)
    assert len(added) == 2 * N + 1
    found = added[np.array([N, N + 1, 0])]
    assert [sample.tobytes() for sample in found] == [number(3), number(0), number(0)]


def test_samples_are_compared_by_their_bytes(store: Store) -> None:
    data = Dataset(store([b"ab", b"c", b"ab", b"abc"]))
    assert data[[0, 1]] == data[[2, 1]]
    assert data[[0, 1]] == list(data[[0, 1]]) == data[[0, 1]]
    for other in (data[[1, 0]], data[[0]], data[[3]], list(data[[1, 1]]), [b"ab", b"c"], "ab"):
        assert data[[0, 1]] != other


class Pair(ReaderRegistry):
    def __init__(self, path: Path) -> None:
        self.first, self.second, self.name = FileReader(path), FileReader(path), "pair"


def test_the_readers_of_a_dataset_are_found(path: Path) -> None:
    data = Dataset(path)
    assert data.fnames == [str(path)]
    data.more = Pair(path)  # type: ignore[attr-defined]
    readers = [data.reader, data.more.first, data.more.second]  # type: ignore[attr-defined]
    assert data.ffreaders() == readers
    assert Subset(data, [1]).ffreaders() == readers
    assert ConcatDataset([data, Squares(), td.TensorDataset(torch.zeros(2))]).ffreaders() == readers


@pytest.mark.parametrize("workers", [0, 2])
def test_the_length_of_a_loader_is_that_of_the_epoch_that_is_asked_for(
    path: Path, workers: int
) -> None:
    loader = DataLoader(Dataset(path), 4, num_workers=workers)
    assert (len(loader), loader.batch_size) == (6, 4)
    loader.set_step(2)
    assert len(loader) == 4
    epoch = iter(loader)
    assert [len(loader) for _ in epoch] == [4] * 4
    assert len(loader) == 6
    loader.set_step(6)
    assert len(loader) == 0
    loader.set_step(5)
    given_up: Iterator[Any] = iter(loader)
    next(given_up)
    del given_up
    assert len(loader) == 6


def test_a_loader_that_is_not_skippable_keeps_the_sampler_of_torch(path: Path) -> None:
    loader = DataLoader(Dataset(path), 4, skippable=False, collate_fn=list)
    assert type(loader.batch_sampler) is td.BatchSampler
    assert len(loader) == 6
    assert [s.tobytes() for s in chain(*loader)] == [number(i) for i in range(N)]
    for act in (lambda: loader.set_step(1), loader.state_dict, lambda: loader.load_state_dict({})):
        with pytest.raises(ConfigError, match="skippable=True"):
            act()
