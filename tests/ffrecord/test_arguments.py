"""Arguments of the wrong kind or size: refused where they come in, by one line that names them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fireflyer.errors import ConfigError, NoSpace
from fireflyer.ffrecord import ChunkCache, FileReader, FileWriter, RemoteFiles
from fireflyer.ffrecord.torch import ConcatDataset, DataLoader, Dataset

Store = Callable[..., Path]


@pytest.fixture
def path(store: Store) -> Path:
    return store([bytes([number]) * number for number in range(12)])


CALLS: dict[str, Callable[[Path], Any]] = {
    "n": lambda path: FileWriter(path.with_name("b.ffr"), n=1.5),  # type: ignore[arg-type]
    "n, a bool": lambda path: FileWriter(path.with_name("b.ffr"), n=True),
    "threads": lambda path: FileReader(path, threads=1.5),  # type: ignore[arg-type]
    "strategy": lambda path: FileReader(path, strategy=3),  # type: ignore[arg-type]
    "an index": lambda path: FileReader(path).read_one(True),
    "indices, a bool": lambda path: FileReader(path).read([3, True]),
    "indices, a bool of numpy": lambda path: FileReader(path).read((3, np.True_)),  # type: ignore[arg-type]
    "indices, objects": lambda path: FileReader(path).read(np.array([1], object)),
    "indices, remote": lambda path: RemoteFiles(f"file://{path}").read([3, True]),
    "indices, torch": lambda path: Dataset(path)[[3, True]],
    "indices, concat": lambda path: ConcatDataset([Dataset(path)])[[3, True]],
    "step": lambda path: DataLoader(Dataset(path), 4).set_step(1.5),  # type: ignore[arg-type]
    "prefetch": lambda path: DataLoader(Dataset(path), prefetch=0.5),  # type: ignore[arg-type]
    "attempts": lambda path: RemoteFiles(f"file://{path}", attempts=2.5),  # type: ignore[arg-type]
    "limit_bytes": lambda path: ChunkCache(path.parent / "cache", 1e9),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", CALLS)
def test_a_wrong_kind_is_a_type_error_that_names_it(path: Path, what: str) -> None:
    with pytest.raises(TypeError, match=f"^{what.partition(',')[0]} must be") as caught:
        CALLS[what](path)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in path.parent.iterdir()] == ["a.ffr"]


@pytest.mark.parametrize("threads", [0, -1, 2**40])
def test_a_number_of_threads_that_cannot_be(path: Path, threads: int) -> None:
    with pytest.raises(ConfigError, match=f"invalid threads {threads}"):
        FileReader(path, threads=threads)


def test_more_samples_than_a_file_can_hold_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot hold {2**62}"):
        FileWriter(tmp_path / "a.ffr", n=2**62)
    assert list(tmp_path.iterdir()) == []


def test_integers_of_numpy_and_torch_are_whole_numbers(path: Path) -> None:
    reader = FileReader(path, threads=np.int64(2))  # type: ignore[arg-type]
    assert reader.read_one(np.uint8(3)).tolist() == [3, 3, 3]  # type: ignore[arg-type]
    assert reader.read([np.int32(1), 2])[0].tolist() == [1]  # type: ignore[list-item]
    loader = DataLoader(Dataset(path), 4)
    loader.set_step(torch.tensor(2))  # type: ignore[arg-type]
    assert loader.state_dict()["step"] == 2


@pytest.mark.parametrize("count", [1 << 20, (1 << 21) + 1])
@pytest.mark.parametrize("remote", [False, True])
def test_a_batch_larger_than_memory_names_its_bytes(store: Store, count: int, remote: bool) -> None:
    path = store([bytes(16 << 20)])
    reader = RemoteFiles(f"file://{path}") if remote else FileReader(path)
    with pytest.raises(NoSpace, match=r"a batch of \d{13,} bytes"):
        reader.read(np.zeros(count if not remote else 1 << 20, np.int8))
    assert reader.read_one(0).size == 16 << 20


OBJECTS: list[Any] = [
    np.array([object()]),
    np.zeros(2, [("a", "i4"), ("b", "O")]),
    memoryview(np.array([None])),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("data", OBJECTS, ids=["array", "structure", "view"])
def test_addresses_of_objects_are_not_stored(tmp_path: Path, data: Any) -> None:
    with FileWriter(tmp_path / "a.ffr") as writer, pytest.raises(TypeError, match="addresses"):
        writer.write_one(data)
    with FileWriter(tmp_path / "b.ffr", columns={"x": "bytes"}) as writer, pytest.raises(TypeError):
        writer.write_row({"x": data})
    named = np.zeros(1, [("O", "i4"), ("Other", "f8")])
    with FileWriter(tmp_path / "c.ffr") as writer:
        writer.write_one(named)
    assert FileReader(tmp_path / "c.ffr").read_one(0).tobytes() == named.tobytes()


@pytest.mark.parametrize(
    ("column", "value", "error"),
    [
        *(
            ("float32", 1e300, ValueError),
            ("float16", 1e9, ValueError),
            ("float16", 70_000, ValueError),
        ),
        *(("complex64", 1e300j, ValueError), (("float32", (2,)), [1.0, -1e39], ValueError)),
        *((("int8", (None, None)), [[1], [1, 2]], ValueError), ("str", "a\ud800", ValueError)),
        ("float32", torch.ones((), requires_grad=True), TypeError),
    ],
)
def test_a_value_that_no_column_can_hold_names_the_column(
    tmp_path: Path, column: Any, value: Any, error: type[Exception]
) -> None:
    with FileWriter(tmp_path / "a.ffr", columns={"here": column}) as writer:
        with pytest.raises(error, match=r"^column 'here'"):
            writer.write_row({"here": value})
        assert writer.count == 0, "the writer goes on"


def test_what_is_infinite_already_is_stored(tmp_path: Path) -> None:
    given = np.array([np.inf, -np.inf, np.nan, 1e-300, 3.4e38])
    with FileWriter(tmp_path / "a.ffr", columns={"x": ("float32", (5,))}) as writer:
        writer.write_row({"x": given})
    stored = FileReader(tmp_path / "a.ffr").rows([0])[0]["x"]
    np.testing.assert_array_equal(stored, given.astype(np.float32))
