"""The chunk store through its bindings: what simulations of a target stand on."""

import random
import struct
from pathlib import Path

import pytest

from fireflyer import errors
from fireflyer._native import crc32c, crc32c_combine
from fireflyer._native.fs3 import store as native

WRITE, TRUNCATE, EXTEND, REMOVE, REPLACE = range(5)
OK, DIVERGED, CORRUPT, NO_SPACE, IO_ERROR, NOT_FOUND = (
    native.statuses().index(name)
    for name in ("ok", "diverged", "corrupt", "no_space", "io_error", "not_found")
)
EIO, ENOSPC = 1, 2


def open_store(disk: native.Disk) -> native.Store:
    return native.Store(disk, target=1, chain=2, log_bytes=4096, reserve_bytes=0)


def put(store: native.Store, version: int, data: bytes, offset: int = 0) -> None:
    assert store.apply(9, 7, 0, version - 1, version, 3, WRITE, offset, data=data) == OK
    assert store.sync() == [(9, OK, version, store.entry(7, 0)[8], store.entry(7, 0)[9])]


def test_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"6789", crc32c(b"12345")) == crc32c(b"123456789")
    assert crc32c_combine(crc32c(b"12345"), crc32c(b"6789"), 4) == crc32c(b"123456789")
    assert crc32c(memoryview(bytearray(100_000))) == crc32c(bytes(100_000))


def test_kinds_and_statuses() -> None:
    assert native.kinds() == ("write", "truncate", "extend", "remove", "replace")
    store = open_store(native.SimDisk(1))
    assert native.statuses()[store.apply(1, 7, 0, 0, 0, 0, WRITE, data=b"x")] == "invalid"
    assert native.statuses()[store.apply(1, 7, 0, 0, 1, 0, 99, data=b"x")] == "invalid"
    assert store.read(7, 0)[0] == NOT_FOUND


def test_a_version_is_pending_then_committed_and_survives() -> None:
    disk = native.SimDisk(1)
    store = open_store(disk)
    data = random.Random(1).randbytes(9000)
    crcs = struct.pack("<3I", crc32c(data[:4096]), crc32c(data[4096:8192]), crc32c(data[8192:]))
    assert store.apply(5, 7, 0, 0, 1, 3, WRITE, data=data, crcs=crcs, client=4, seq=2) == OK
    assert store.entry(7, 0) == (7, 0, 0, 0, 0, 0, 0, 0, 0, 0, False)
    assert store.sync() == [(5, OK, 1, 9000, crc32c(data))]
    assert store.entry(7, 0) == (7, 0, 0, 0, 0, 0, 1, 3, 9000, crc32c(data), False)
    assert store.read(7, 0)[0] == NOT_FOUND
    assert store.read(7, 0, 1, 5000, 10) == (OK, 1, 9000, 4096, data[4096:8192], crcs[4:8])
    assert store.apply(6, 7, 0, 0, 2, 3, WRITE, data=b"x") == DIVERGED
    assert store.commit(7, 0, 1) == OK
    assert store.commit(7, 0, 1) == DIVERGED
    store.raise_floor(11)
    store.keep_state(1, 2, 3, 4)
    assert store.sync() == []
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.floor()
    disk.power_cut(3)
    store = open_store(disk)
    assert store.read(7, 0) == (OK, 1, 9000, 0, data, crcs)
    assert store.page(None, 9) == [(7, 0, 1, 3, 9000, crc32c(data), 0, 0, 0, 0, False)]
    assert store.page((7, 0), 9) == []
    assert store.last(7) == store.last(7, 5, 2) == (0, 9000, 1)
    assert store.last(8) is None
    assert store.tags() == [(4, 0, 2, 7, 0, 1, 9000)]
    assert (store.floor(), store.state()) == (11, (1, 2, 3, 4))
    assert not store.damaged()


def test_snapshots_and_removal() -> None:
    store = open_store(native.SimDisk(1))
    for version in range(1, 40):
        assert (
            store.apply(1, 7, 0, version - 1, version, 0, EXTEND, length=version, committed=True)
            == OK
        )
        store.sync()
        if store.snapshot_due():
            assert store.snapshot() == OK
    assert store.statistics()["log_bytes"] < 8192
    assert store.statistics()["bytes"] == 39
    assert store.apply(1, 7, 0, native.ANY_BASE, 40, 0, REMOVE, committed=True) == OK
    store.sync()
    assert store.floor() == 40
    assert {
        k: v for k, v in store.statistics().items() if k in ("chunks", "extents", "bytes", "held")
    } == {
        "chunks": 0,
        "extents": 0,
        "bytes": 0,
        "held": 0,
    }


def test_failing_disk() -> None:
    disk = native.SimDisk(1)
    store = open_store(disk)
    put(store, 1, b"one")
    assert store.commit(7, 0, 1) == OK
    disk.fail(0, ENOSPC)
    assert store.apply(1, 7, 0, 1, 2, 0, WRITE, data=b"two") == NO_SPACE
    disk.fail(0, 0)
    assert store.apply(1, 7, 0, 1, 2, 0, WRITE, data=b"two") == OK
    disk.fail(0, EIO)
    assert [row[:2] for row in store.sync()] == [(1, IO_ERROR)]
    assert store.failed()
    disk.fail(0, 0)
    assert store.apply(1, 7, 0, 1, 2, 0, WRITE, data=b"two") == IO_ERROR
    assert store.read(7, 0)[4] == b"one"
    store.close()
    disk.fail(0, EIO)
    with pytest.raises(errors.StorageError):
        open_store(disk)
    disk.crash()
    store = open_store(disk)
    assert store.read(7, 0, 1)[4] == b"one"
    assert store.check(7, 0) in (OK, NOT_FOUND)  # the commit rode along with the sync that failed


def test_directory(tmp_path: Path) -> None:
    disk = native.DirectoryDisk(str(tmp_path / "target"))
    store = open_store(disk)
    put(store, 1, bytes(range(256)) * 64)
    assert store.commit(7, 0, 1) == OK
    store.sync()
    store.close()
    with pytest.raises(errors.StorageError, match="in use"):
        native.DirectoryDisk(str(tmp_path / "target"))
    with pytest.raises(ValueError, match="not target 2"):
        native.Store(disk, target=2, chain=2)
    (data,) = (tmp_path / "target").glob("data-*")
    with data.open("r+b") as file:
        file.seek(5000)
        file.write(b"?")
    store = open_store(disk)
    assert store.check(7, 0) == CORRUPT
    _, _, _, _, data_read, crcs = store.read(7, 0)
    good = [
        crc32c(data_read[at : at + 4096]) == struct.unpack_from("<I", crcs, at // 1024)[0]
        for at in range(0, len(data_read), 4096)
    ]
    assert good == [True, False, True, True]
