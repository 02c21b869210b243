"""safetensors: whole round trips, agreement with the safetensors package, and headers that lie."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fireflyer.checkpoint import CheckpointManager
from fireflyer.checkpoint.directory.catalog import Catalog
from fireflyer.checkpoint.directory.snapshot import Snapshot
from fireflyer.checkpoint.formats import safetensors
from fireflyer.checkpoint.formats.interchange import Part
from fireflyer.checkpoint.formats.safetensors import SafetensorsFiles
from fireflyer.checkpoint.save.stream_writer import save_contents
from fireflyer.errors import CheckpointError, ConfigError, Corrupted, NoSpace, StorageError
from fireflyer.storage import DirectoryStorage, open_storage

Differences = Callable[[Any, Any], list[str]]

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
OTHERS = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "complex64",
]


def of_every_dtype() -> dict[str, torch.Tensor]:
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(3)) * 4
    return {name: values.to(getattr(torch, name)) for name in [*FLOATS, *OTHERS]}


def whole_state() -> dict[Any, Any]:
    """All that a state may hold, with what safetensors has no word for."""
    return {
        "model": of_every_dtype()
        | {
            "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
            "empty": torch.empty(0, 7),
            "turned": torch.arange(12.0).reshape(3, 4).t(),
            "strided": torch.arange(20)[::3],
            "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
            "double complex": torch.tensor([1 + 2j], dtype=torch.complex128),
            "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        },
        "arrays": [
            np.arange(5, dtype=">i4"),
            np.array(["a", "bcd"]),
            np.array(2.5),
            np.zeros((0, 2)),
        ],
        "both": (
            torch.ones(2),
            {"deep": [1, 2**70, -0.0, float("nan"), True, None, b"\0\xff", "ü"]},
        ),
        7: {"a.b": torch.zeros(1), -1: []},
        "nothing": {},
    }


def checkpoint(tmp_path: Path, state: Any) -> Snapshot:
    CheckpointManager(tmp_path / "saved").save(3, state).wait()
    return Snapshot.open(Catalog(open_storage(tmp_path / "saved")))


@pytest.mark.parametrize("out", ["one.safetensors", "folder"])
@pytest.mark.parametrize("shard_bytes", [10**9, 100])
def test_a_round_trip_is_whole(
    tmp_path: Path, differences: Differences, out: str, shard_bytes: int
) -> None:
    state = whole_state()
    safetensors.write(checkpoint(tmp_path, state), tmp_path / out, shard_bytes=shard_bytes)
    found = SafetensorsFiles(tmp_path / out)
    assert differences(state, found.state()) == []
    save_contents(open_storage(tmp_path / "again"), 9, found)
    manager = CheckpointManager(tmp_path / "again")
    assert manager.steps() == [9]
    assert differences(state, manager.load()) == []


def test_the_package_reads_what_is_written(tmp_path: Path, differences: Differences) -> None:
    state = of_every_dtype() | {"empty": torch.empty(2, 0), "scalar": torch.tensor(1.5)}
    snapshot = checkpoint(tmp_path, {"model": state, "step": 3})
    safetensors.write(Part(snapshot, "model"), tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert sorted(file.keys()) == sorted(state)
    found = load_file(tmp_path / "m.safetensors")
    assert differences(state, {name: found[name] for name in state}) == []


def test_what_the_package_writes_is_read(tmp_path: Path, differences: Differences) -> None:
    state = of_every_dtype() | {"empty": torch.empty(2, 0), "scalar": torch.tensor(1.5)}
    save_file(state, tmp_path / "m.safetensors", metadata={"format": "pt"})
    found = safetensors.load(tmp_path / "m.safetensors")
    assert differences(state, {name: found[name] for name in state}) == []
    assert len(found) == len(state)


def test_shards_are_laid_out_as_hugging_face_does(tmp_path: Path) -> None:
    state = {f"layer{i}": torch.full((100,), float(i)) for i in range(5)}
    names = [Path(name).name for name in safetensors.save(state, tmp_path / "m", shard_bytes=900)]
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert names == [*shards, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "m" / names[-1]).read_text())
    assert index["metadata"]["total_size"] == 2000
    assert list(index["weight_map"].values()) == [shards[i] for i in (0, 0, 1, 1, 2)]
    loaded: dict[str, torch.Tensor] = {}
    for shard in shards:
        loaded |= load_file(tmp_path / "m" / shard)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_data_begin_at_multiples_of_eight_and_of_their_element(tmp_path: Path) -> None:
    safetensors.save(of_every_dtype(), tmp_path / "m.safetensors")
    data = (tmp_path / "m.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    sizes = {
        "F64": 8,
        "I64": 8,
        "U64": 8,
        "C64": 8,
        "F32": 4,
        "I32": 4,
        "U32": 4,
        "F16": 2,
        "BF16": 2,
    }
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % sizes.get(entry["dtype"], 1) == 0


def test_the_name_that_the_format_keeps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the name __metadata__, which safetensors reserves"):
        safetensors.save({"__metadata__": torch.ones(2)}, tmp_path / "m")


def test_names_that_meet(tmp_path: Path) -> None:
    state = {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"two tensors of the state would have the name a\.b"):
        safetensors.save(state, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="__metadata__"):
        safetensors.save({"__metadata__": torch.ones(1)}, tmp_path / "m.safetensors")
    with pytest.raises(ConfigError, match="no dict or list 'model'"):
        Part(checkpoint(tmp_path, state), "model")
    assert not (tmp_path / "m.safetensors").exists()


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    snapshot = checkpoint(tmp_path, {"w": torch.ones(1000)})
    data = next((tmp_path / "saved").glob("step-*/data-*"))
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    with pytest.raises(Corrupted, match=r"CRC32.*tensor w"):
        safetensors.write(snapshot, tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


def written(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = (len(text) if length is None else length).to_bytes(8, "little")
    path.write_bytes(head + text + data)
    return path


def entry(start: int, stop: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


LIES: dict[str, tuple[Any, bytes, int | None, str]] = {
    "a header beyond the file": ({}, b"", 50, "a header of 50 bytes"),
    "a huge header": ({}, b"", 2**63, "a header of 9223372036854775808 bytes"),
    "no JSON": (b"{nothing", b"", None, "invalid header"),
    "JSON without end": (b"[" * 100_000, b"", None, "invalid header"),
    "no object": ([1], b"", None, "invalid header"),
    "not UTF-8": (b'{"\xff": 1}', b"", None, "invalid header"),
    "an overlap": (
        {"a": entry(0, 8, [2]), "b": entry(4, 12, [2])},
        bytes(12),
        None,
        "b of 8 bytes",
    ),
    "a hole": ({"a": entry(0, 8, [2]), "b": entry(12, 20, [2])}, bytes(20), None, "b of 8 bytes"),
    "a hole ahead": ({"a": entry(4, 8, [1])}, bytes(8), None, "a of 4 bytes"),
    "data left over": ({"a": entry(0, 8, [2])}, bytes(9), None, "end at byte 8 of 9"),
    "data missing": ({"a": entry(0, 8, [2])}, bytes(7), None, "end at byte 8 of 7"),
    "a wrong length": ({"a": entry(0, 12, [2])}, bytes(12), None, "a of 8 bytes has bytes 0 to 12"),
    "a shape below 0": ({"a": entry(0, 8, [-2])}, bytes(8), None, r"has the shape \[-2\]"),
    "a huge shape": ({"a": entry(0, 0, [0, 2**40, 2**40])}, b"", None, "has the shape"),
    "many dimensions": ({"a": entry(0, 4, [1] * 65)}, bytes(4), None, "has the shape"),
    "an unknown dtype": ({"a": entry(0, 8, [2], "X32")}, bytes(8), None, "unknown dtype 'X32'"),
    "backwards": ({"a": entry(8, 0, [2])}, bytes(8), None, "a of 8 bytes has bytes 8 to 0"),
    "text for a number": ({"a": entry(0, 8, ["2"])}, bytes(8), None, "invalid header"),  # type: ignore[list-item]
    "metadata not of text": ({"__metadata__": {"a": 1}}, b"", None, "invalid header"),
    "no file's length": (b"", b"", None, "invalid header"),
}


@pytest.mark.parametrize("lie", LIES)
def test_headers_that_lie(tmp_path: Path, lie: str) -> None:
    header, data, length, message = LIES[lie]
    path = written(tmp_path / "m.safetensors", header, data, length)
    with pytest.raises(Corrupted, match=message):
        safetensors.load(path)


def with_text(path: Path, text: str) -> Path:
    header = {"__metadata__": {"fireflyer": text}, "a": entry(0, 8, [2])}
    return written(path, header, bytes(8))


ROOT = {"node": "container", "path": [], "kind": "dict"}
A = {
    "node": "tensor",
    "path": ["a"],
    "kind": "torch",
    "dtype": "float32",
    "shape": [2],
    "pieces": [],
}


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([ROOT], "does not mention a"),
        ([ROOT, A | {"shape": [3]}], "lists the tensor a, which"),
        ([ROOT, A | {"dtype": "int32"}], "lists the tensor a, which"),
        ([ROOT, A, A | {"path": ["b"]}], "lists the tensor b, which"),
        ([A], "is misplaced"),
        (
            [ROOT, A, {"node": "value", "path": ["b", "c"], "kind": "int", "value": 1}],
            "is misplaced",
        ),
        (
            [ROOT, A, {"node": "value", "path": ["b"], "kind": "bytes", "value": "abc"}],
            "m.safetensors",
        ),
        (
            [ROOT, A, {"node": "value", "path": ["b"], "kind": "float", "value": "x"}],
            "m.safetensors",
        ),
        ([ROOT, A, {"node": "other", "path": ["b"]}], "its text"),
    ],
)
def test_texts_that_lie(tmp_path: Path, nodes: Any, message: str) -> None:
    path = with_text(tmp_path / "m.safetensors", json.dumps({"nodes": nodes, "version": 1}))
    with pytest.raises(Corrupted, match=message):
        safetensors.load(path)


def test_a_text_of_a_later_version(tmp_path: Path) -> None:
    path = with_text(tmp_path / "m.safetensors", json.dumps({"nodes": [ROOT, A], "version": 2}))
    with pytest.raises(CheckpointError, match="version 2"):
        safetensors.load(path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../outside.safetensors"}, "does not name a file in the same folder"),
        ({"a": ".."}, "does not name a file in the same folder"),
        ({"a": 3}, "does not name a file in the same folder"),
        ({"a": "absent.safetensors"}, "is missing"),
        ({"b": "m.safetensors"}, "has no tensor b"),
        ([1], "it is not an index"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, weight_map: Any, message: str) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "m.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(Corrupted, match=message):
        safetensors.load(folder)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no such file"):
        safetensors.load(tmp_path / "absent.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match=r"has no \.safetensors file"):
        safetensors.load(tmp_path / "empty")


@pytest.mark.full
def test_memory_is_bounded(tmp_path: Path, forked: Callable[..., list[int]]) -> None:
    """In a process of its own, whose peak is measured: 256 MiB go out and in again."""
    state = {"w": torch.arange(32 << 20, dtype=torch.int64).reshape(1 << 10, -1)}
    CheckpointManager(tmp_path / "saved").save(1, state).wait()
    del state

    def peak() -> int:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10

    def body() -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = peak()
        snapshot = Snapshot.open(Catalog(open_storage(tmp_path / "saved")))
        safetensors.write(snapshot, tmp_path / "m.safetensors")
        save_contents(
            open_storage(tmp_path / "again"), 1, SafetensorsFiles(tmp_path / "m.safetensors")
        )
        assert peak() - before <= 64 << 20, (before >> 20, peak() >> 20)

    assert forked(body) == [0]


def test_arrays_without_dimensions(tmp_path: Path, differences: Differences) -> None:
    state = {"a": np.array(3.5), "b": np.array(7, ">i2"), "t": torch.tensor(2.0)}
    safetensors.save(state, tmp_path / "x.safetensors")
    assert differences(safetensors.load(tmp_path / "x.safetensors"), state) == []


def _rewritten(path: Path, old: bytes, new: bytes) -> None:
    """The header with a text replaced, of the same length."""
    assert len(old) == len(new)
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


def test_keys_that_stand_twice_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, path)
    _rewritten(path, b'"b":', b'"a":')
    with pytest.raises(Corrupted, match="'a' twice"):
        safetensors.load(path)
    folder = tmp_path / "f"
    safetensors.save({"a": torch.ones(9), "b": torch.ones(9)}, folder, shard_bytes=36)
    index = folder / safetensors.INDEX
    whole = index.read_bytes()
    _rewritten(index, b'    "b":', b'    "a":')
    with pytest.raises(Corrupted, match="'a' twice"):
        safetensors.load(folder)
    document = json.loads(whole) | {"weight_map": []}
    index.write_text(json.dumps(document))
    with pytest.raises(Corrupted, match="weight_map"):
        safetensors.load(folder)


@pytest.mark.parametrize("text", [b"(,", b"f,", b"{}"])
def test_a_text_that_is_no_numpy_dtype(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.save({"n": np.ones(2, "f8"), "m": np.ones(2, "g")}, path)
    dtype = np.dtype("g").str.encode()
    _rewritten(path, b'\\"' + dtype + b'\\"', b'\\"' + text.ljust(len(dtype), b",") + b'\\"')
    with pytest.raises((CheckpointError, Corrupted)):
        safetensors.load(path)


def test_a_failed_export_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: DirectoryStorage, name: str, chunks: Any) -> None:
        if "00002" in name:
            raise NoSpace("the disk is full")
        write(self, name, chunks)

    write = DirectoryStorage.write
    monkeypatch.setattr(DirectoryStorage, "write", full)
    state = {"a": torch.ones(9), "b": torch.ones(9)}
    with pytest.raises(NoSpace):
        safetensors.save(state, tmp_path / "new" / "deep", shard_bytes=36)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "mine.safetensors").touch()
    with pytest.raises(NoSpace):
        safetensors.save(state, tmp_path / "old", shard_bytes=36)
    assert (tmp_path / "old" / "mine.safetensors").exists()
