"""torch.distributed.checkpoint over our format, and its own directories read and written."""

import os
import pickle
import struct
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.checkpoint.conftest import SOAK
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardOn

from fireflyer.checkpoint import CheckpointManager
from fireflyer.checkpoint.directory.catalog import Catalog
from fireflyer.checkpoint.directory.snapshot import Snapshot
from fireflyer.checkpoint.formats import dcp_directory
from fireflyer.checkpoint.formats.dcp import Reader, Writer
from fireflyer.checkpoint.formats.dcp_directory import DcpDirectory
from fireflyer.checkpoint.formats.interchange import open_foreign
from fireflyer.checkpoint.save.stream_writer import save_contents
from fireflyer.checkpoint.state.contents import InMemory
from fireflyer.errors import CheckpointError, ConfigError, Corrupted, StorageError
from fireflyer.storage import open_storage

Differences = Callable[[Any, Any], list[str]]
Job = Callable[[int, Callable[[int], None]], None]

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def whole_state() -> dict[str, Any]:
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    names = ["float64", "bfloat16", "float8_e4m3fn", "bool", "uint16", "complex64"]
    return {
        "model": {name: values.to(getattr(torch, name)) for name in names}
        | {
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0, 4),
            "turned": torch.arange(12.0).reshape(3, 4).t(),
            "conjugated": torch.tensor([1 + 2j]).conj(),
        },
        "layers": [torch.ones(3), {"bias": torch.zeros(2), "name": "x"}],
        "plain": {"list": [1, [2.5, None]], "text": "ü", "bytes": b"\0", "nan": float("nan")},
        "pair": (torch.full((2,), 3.0), "within"),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "step": 2**70,
    }


def blank(item: Any) -> Any:
    """The state with nothing in it, as dcp.load wants it."""
    if isinstance(item, torch.Tensor):
        return torch.zeros_like(item)
    if isinstance(item, dict):
        return {key: blank(child) for key, child in item.items()}
    if isinstance(item, list) and any(isinstance(one, torch.Tensor) for one in item):
        return [blank(child) for child in item]
    return None


def test_saved_and_loaded(tmp_path: Path, differences: Differences) -> None:
    state = whole_state()
    dcp.save(state, storage_writer=Writer(tmp_path / "c"))
    loaded = blank(state)
    dcp.load(loaded, storage_reader=Reader(tmp_path / "c"))
    assert differences(state, loaded) == []
    assert differences(state, CheckpointManager(tmp_path / "c").load()) == []


def test_a_manager_s_checkpoint_is_loaded(tmp_path: Path, differences: Differences) -> None:
    state = whole_state()
    CheckpointManager(tmp_path / "c").save(5, state).wait()
    loaded = blank(state)
    dcp.load(loaded, storage_reader=Reader(tmp_path / "c"))
    assert differences(state, loaded) == []


def test_autograd_sees_that_a_tensor_was_loaded(tmp_path: Path) -> None:
    CheckpointManager(tmp_path / "c").save(5, {"w": torch.ones(2)}).wait()
    weight, factor = torch.zeros(2), torch.ones(2, requires_grad=True)
    product = (weight * factor).sum()
    dcp.load({"w": weight}, storage_reader=Reader(tmp_path / "c"))
    assert weight.tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_steps(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "c", step=7)
    for value, name in ((1, None), (2, None), (3, "step-500"), (4, "runs/20")):
        state = {"v": torch.tensor(value)}
        dcp.save(state, storage_writer=writer, checkpoint_id=name)
    assert CheckpointManager(tmp_path / "c").steps() == [7, 8, 20, 500]
    for value, reader, name in ((4, Reader(tmp_path / "c"), None), (2, Reader(tmp_path / "c", 8), None),
                                (3, Reader(tmp_path / "c"), "500")):  # fmt: skip
        state = {"v": torch.tensor(0)}
        dcp.load(state, storage_reader=reader, checkpoint_id=name)
        assert state["v"] == value


def test_async_save(tmp_path: Path, differences: Differences) -> None:
    writer = Writer(tmp_path / "c")
    state = whole_state()
    del state["model"]["conjugated"]  # torch's own stager loses the conjugation
    kept = {name: tensor.clone() for name, tensor in state["model"].items()}
    future: Any = dcp.async_save(state, storage_writer=writer)
    assert isinstance(future.result(), Metadata)
    state["model"]["float64"].zero_()
    assert differences(CheckpointManager(tmp_path / "c").load()["model"], kept) == []


def test_the_dtype_of_the_target_counts(tmp_path: Path) -> None:
    dcp.save({"w": torch.tensor([1.5, 2.25])}, storage_writer=Writer(tmp_path / "c"))
    state = {"w": torch.zeros(2, dtype=torch.float64)}
    dcp.load(state, storage_reader=Reader(tmp_path / "c"))
    assert state["w"].tolist() == [1.5, 2.25]


def wholes() -> dict[str, torch.Tensor]:
    return {
        "uneven": torch.arange(35.0).reshape(7, 5),
        "one": torch.arange(4, dtype=torch.bfloat16).reshape(1, 4),
        "empty": torch.empty(0, 4),
    }


def placed(rank: int) -> dict[str, Any]:
    """Each tensor by rows, by columns and on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, Any] = {"step": 4, "rank's own": {f"on {rank}": rank}}
    for name, whole in wholes().items():
        for way, placement in (("rows", ShardOn(0)), ("columns", ShardOn(1)), ("all", Replicate())):
            found[f"{name} {way}"] = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
        found[f"{name} plain"] = whole.clone()
    return found


def check_whole(state: dict[str, Any]) -> None:
    for name, whole in wholes().items():
        for way in ("rows", "columns", "all", "plain"):
            found = state[f"{name} {way}"]
            full = found.full_tensor() if isinstance(found, DTensor) else found
            assert torch.equal(full, whole), (name, way)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_sharded_tensors_move_between_worlds(
    tmp_path: Path, job: Job, saved_by: int, loaded_by: int
) -> None:
    def save(rank: int) -> None:
        writer = Writer(tmp_path / "c")
        dcp.save(placed(rank), storage_writer=writer)
        future: Any = dcp.async_save(placed(rank), storage_writer=writer)
        future.result()

    def load(rank: int) -> None:
        state = placed(rank)
        del state["rank's own"]
        for leaf in state.values():
            if isinstance(leaf, torch.Tensor):
                (leaf.to_local() if isinstance(leaf, DTensor) else leaf).zero_()
        state["step"] = 0
        dcp.load(state, storage_reader=Reader(tmp_path / "c"))
        assert state["step"] == 4
        check_whole(state)

    job(saved_by, save)
    manager = CheckpointManager(tmp_path / "c")
    assert manager.steps() == [0, 1]
    state = manager.load()
    check_whole(state)
    assert state["rank's own"] == {f"on {rank}": rank for rank in range(saved_by)}
    job(loaded_by, load)


def test_a_rank_that_fails_fails_all(tmp_path: Path, job: Job) -> None:
    def save(rank: int) -> None:
        writer = Writer(tmp_path / "c")
        state = placed(rank)
        if rank == 1:
            state["rank's own"]["bad"] = 1 + 2j
        with pytest.raises(CheckpointException, match=r"rank's own\.bad"):
            dcp.save(state, storage_writer=writer)
        dist.barrier()
        assert CheckpointManager(tmp_path / "c").latest() is None
        dcp.save(placed(rank), storage_writer=writer)

    job(2, save)
    assert CheckpointManager(tmp_path / "c").steps() == [0]
    names = [name for _, _, files in os.walk(tmp_path / "c") for name in files]
    assert [name for name in names if "-000001-000001-" in name] == []


class Runs:
    """An object whose unpickling would run something."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["RUNS_AT"],)


def test_what_cannot_be_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS_AT", str(tmp_path / "ran"))
    for value, message in ((Runs(), "a.b cannot be read as data alone"), ({1, 2}, "a.b: .*set")):
        with pytest.raises(CheckpointException, match=message):
            dcp.save({"a": {"b": value}}, storage_writer=Writer(tmp_path / "c"))
    assert not (tmp_path / "ran").exists()
    assert CheckpointManager(tmp_path / "c").latest() is None


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    state = {"w": torch.ones(1)}
    planner = DefaultSavePlanner(enable_plan_caching=True)
    writer = Writer(tmp_path / "c")
    dcp.save(state, storage_writer=writer, planner=planner)
    with pytest.raises(CheckpointException, match="without enable_plan_caching"):
        dcp.save(state, storage_writer=writer, planner=planner)
    with pytest.raises(CheckpointError, match="use_collectives=True"):
        dcp.save(state, storage_writer=writer, use_collectives=False)
    with pytest.raises(CheckpointException, match="there is no checkpoint in"):
        dcp.load(state, storage_reader=Reader(tmp_path / "empty"))
    CheckpointManager(tmp_path / "list").save(1, [torch.ones(1)]).wait()
    with pytest.raises(CheckpointException, match="DCP supports only dicts"):
        dcp.load(state, storage_reader=Reader(tmp_path / "list"))
    CheckpointManager(tmp_path / "same").save(1, {"a": {"b": 1}, "a.b": 2}).wait()
    with pytest.raises(CheckpointException, match="cannot derive DCP keys"):
        dcp.load(state, storage_reader=Reader(tmp_path / "same"))


def test_a_zombie_cannot_commit(tmp_path: Path) -> None:
    old, new = Writer(tmp_path / "c"), Writer(tmp_path / "c")
    dcp.save({"v": torch.tensor(1)}, storage_writer=old)
    dcp.save({"v": torch.tensor(2)}, storage_writer=new)
    with pytest.raises(CheckpointException, match=r"now belongs to"):
        dcp.save({"v": torch.tensor(3)}, storage_writer=old)
    state = CheckpointManager(tmp_path / "c").load()
    assert state["v"] == 2
    assert len(list((tmp_path / "c").glob("step-*"))) == 2


def test_damage_is_named(tmp_path: Path) -> None:
    state = {"w": torch.ones(1000)}
    dcp.save(state, storage_writer=Writer(tmp_path / "c"))
    data = next((tmp_path / "c").glob("step-*/data-*"))
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointException, match=r"CRC32.*tensor w"):
        dcp.load(state, storage_reader=Reader(tmp_path / "c"))


def test_a_foreign_directory_is_imported(
    tmp_path: Path, job: Job, differences: Differences
) -> None:
    job(2, lambda rank: dcp.save(placed(rank), checkpoint_id=tmp_path / "foreign"))
    found = open_foreign(tmp_path / "foreign")
    assert isinstance(found, DcpDirectory)
    check_whole(found.state())
    save_contents(open_storage(tmp_path / "c"), 3, found)
    catalog = Catalog(open_storage(tmp_path / "c"))
    check_whole(CheckpointManager(tmp_path / "c").load())
    nodes = {node.path[0]: node for node in Snapshot.open(catalog).tensors}
    assert [len(nodes[f"uneven {way}"].pieces) for way in ("rows", "columns", "all")] == [2, 2, 1]


@pytest.mark.parametrize("form", ["by value", "by name"])
def test_a_foreign_state_is_whole(
    tmp_path: Path, differences: Differences, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Members of enums are pickled by value or by name, as the release of Python will have it."""

    def reduce(member: Enum, _protocol: int) -> tuple[Any, ...]:
        kind = type(member)
        return (kind, (member.value,)) if form == "by value" else (getattr, (kind, member.name))

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduce)
    state = whole_state()
    dcp.save(state, checkpoint_id=tmp_path / "foreign")
    found = DcpDirectory(tmp_path / "foreign")
    assert differences(state, found.state()) == []
    save_contents(open_storage(tmp_path / "c"), 0, found)
    assert differences(state, CheckpointManager(tmp_path / "c").load()) == []


def test_what_is_exported_dcp_loads(tmp_path: Path, differences: Differences) -> None:
    state = whole_state() | {"large": torch.arange(9 << 20).reshape(3, -1)}
    CheckpointManager(tmp_path / "c").save(5, state).wait()
    snapshot = Snapshot.open(Catalog(open_storage(tmp_path / "c")))
    dcp_directory.write(snapshot, tmp_path / "out")
    loaded = blank(state)
    dcp.load(loaded, checkpoint_id=tmp_path / "out")
    assert differences(state, loaded) == []
    assert differences(state, DcpDirectory(tmp_path / "out").state()) == []


def test_no_pickle_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS_AT", str(tmp_path / "ran"))
    dcp.save({"w": torch.ones(1), "o": Runs()}, checkpoint_id=tmp_path / "object")
    with pytest.raises(CheckpointError, match="o cannot be read as data alone"):
        DcpDirectory(tmp_path / "object")
    (tmp_path / "metadata").mkdir()
    metadata = Metadata({}, planner_data=Runs(), storage_data={})
    (tmp_path / "metadata" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(Corrupted, match=r"it names (posix|os)\.mkdir"):
        DcpDirectory(tmp_path / "metadata")
    for program in (
        b"cbuiltins\neval\n.",
        b"ctorch\nload\n.",
        b"ctorch.serialization\nload\n.",
        b"cbuiltins\ngetattr\n(ctorch\nSize\nVcount\ntR.",
    ):
        (tmp_path / "metadata" / ".metadata").write_bytes(program)
        with pytest.raises(Corrupted, match="it names"):
            DcpDirectory(tmp_path / "metadata")
    assert not (tmp_path / "ran").exists()


def test_damaged_metadata(ram: Path) -> None:
    """Bytes set to a few others: an error of ours, or what is read is as large as it says."""
    dcp.save({"w": torch.ones(3), "n": {"x": 1}}, checkpoint_id=ram / "d")
    path = ram / "d" / ".metadata"
    good = path.read_bytes()
    refused = 0
    for place in range(0, len(good), 1 if SOAK else 4):
        for value in (good[place] ^ 1, good[place] ^ 0x80, 0xFF):
            path.write_bytes(good[:place] + bytes([value]) + good[place + 1 :])
            try:
                DcpDirectory(ram / "d").state()
            except (Corrupted, CheckpointError, StorageError):
                refused += 1
    assert refused > len(good) // (1 if SOAK else 4)
    path.write_bytes(b"r\xff\xff\xff\xff.")  # a memo of 4 billion entries
    with pytest.raises(Corrupted):
        DcpDirectory(ram / "d")


@pytest.mark.parametrize("framed", [False, True])
def test_metadata_cannot_reserve_memory(tmp_path: Path, framed: bool) -> None:
    """A bytearray (opcode BYTEARRAY8) of 2**40 bytes in a file of a few bytes is refused."""
    program = pickle.BYTEARRAY8 + struct.pack("<Q", 1 << 40) + b"."
    if framed:
        program = pickle.FRAME + struct.pack("<Q", len(program)) + program
    (tmp_path / ".metadata").write_bytes(pickle.PROTO + b"\5" + program)
    with pytest.raises(Corrupted, match="it holds a bytearray"):
        DcpDirectory(tmp_path)


def test_paths_of_metadata_cannot_double_without_end(tmp_path: Path) -> None:
    """Each of 40 paths has the one before as both of its parts."""
    program = b"(" + b"cpathlib\nPosixPath\n(Vx\ntR"
    for number in range(40):
        name = str(number).encode()
        program += b"p" + name + b"\n0cpathlib\nPosixPath\n(g" + name + b"\ng" + name + b"\ntR"
    (tmp_path / ".metadata").write_bytes(program + b".")
    with pytest.raises(Corrupted, match="it holds a path of"):
        DcpDirectory(tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda m: _infos(m, relative_path="../d/__0_0.distcp"), Corrupted, "does not name a file"),
        (lambda m: _infos(m, relative_path="absent"), Corrupted, "has no bytes at"),
        (lambda m: _infos(m, length=1 << 50), Corrupted, "has no bytes at"),
        (lambda m: _infos(m, offset=-5), Corrupted, "has no bytes at"),
        (lambda m: _infos(m, transform_descriptors=["zip"]), CheckpointError, "is transformed by"),
        (lambda m: m.state_dict_metadata["w"].chunks.clear(), Corrupted, "are in no part"),
        (lambda m: m.state_dict_metadata["w"].chunks.append(m.state_dict_metadata["w"].chunks[0]),
         None, ""),
        (lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([4])), Corrupted, "in no part"),
        (lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", torch.int32), Corrupted,
         "do not hold the expected int32"),
        (lambda m: m.storage_data.clear(), Corrupted, ".metadata: "),
        (lambda m: m.planner_data.update(w=("n", "x", "y")), CheckpointError, "inside another item"),
        (lambda m: m.planner_data.update(w=("n", 10**9)), None, ""),
        (lambda m: m.planner_data.update(w=("l", 10**9)), CheckpointError, "positions up to"),
        (lambda m: m.planner_data.update(w=("n", "x")), CheckpointError, "same path as another item"),
        (lambda m: m.planner_data.update(w=()), CheckpointError, "invalid path"),
    ],
)  # fmt: skip
def test_metadata_that_lie(
    tmp_path: Path, change: Callable[[Any], Any], error: Any, message: str
) -> None:
    dcp.save({"n": {"x": 1}, "w": torch.ones(3)}, checkpoint_id=tmp_path / "d")
    path = tmp_path / "d" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    if error is None:
        DcpDirectory(tmp_path / "d").state()
        return
    with pytest.raises(error, match=message):
        DcpDirectory(tmp_path / "d").state()


def _infos(metadata: Any, **fields: Any) -> None:
    for info in metadata.storage_data.values():
        vars(info).update(fields)


def test_torch_files(tmp_path: Path, differences: Differences, monkeypatch: Any) -> None:
    state = {"w": torch.ones(3), "n": [1, {"x": None}], "a": np.arange(3), "t": torch.arange(4).t()}
    for name, zipped in (("new.pt", True), ("old.bin", False)):
        torch.save(state, tmp_path / name, _use_new_zipfile_serialization=zipped)
        assert differences(state, open_foreign(tmp_path / name).state()) == []
    monkeypatch.setenv("RUNS_AT", str(tmp_path / "ran"))
    torch.save({"w": Runs()}, tmp_path / "bad.pt")
    (tmp_path / "no.pt").write_bytes(struct.pack("<q", 7) * 5)
    for name in ("bad.pt", "no.pt"):
        with pytest.raises(CheckpointError, match=r"is not a torch\.save file of plain data"):
            open_foreign(tmp_path / name)
    assert not (tmp_path / "ran").exists()
    torch.save({"w": {1, 2}}, tmp_path / "set.pt")
    with pytest.raises(CheckpointError, match=r"cannot save w: a builtins\.set"):
        open_foreign(tmp_path / "set.pt")
    with pytest.raises(ConfigError, match="does not exist"):
        open_foreign(tmp_path / "absent")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="has neither"):
        open_foreign(tmp_path / "folder")


def test_a_failed_import_leaves_nothing(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path / "d")
    data = tmp_path / "d" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:500])
    with pytest.raises(Corrupted, match="has no bytes at"):
        save_contents(open_storage(tmp_path / "c"), 1, DcpDirectory(tmp_path / "d"))
    assert [name.name for name in (tmp_path / "c").iterdir()] == ["claims"]
    with pytest.raises(CheckpointError, match="invalid step -1"):
        save_contents(open_storage(tmp_path / "c"), -1, InMemory({}))
