"""Large files: written past the page cache, read with checksums; damage is told by its segment."""

import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fireflyer._native import crc32c
from fireflyer.errors import Corrupted, StorageError
from fireflyer.storage import DirectoryStorage, FsspecStorage, Storage, read_summed

MIB = 1 << 20
TILE = 1_000_003


@pytest.fixture(params=["disk", "no disk", "fsspec"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "disk":
        yield DirectoryStorage(tmp_path / "root")
    elif request.param == "fsspec":
        yield FsspecStorage(f"file://{tmp_path}/root")
    else:
        place = Path(f"/dev/shm/fireflyer-test-{os.getpid()}")
        yield DirectoryStorage(place)
        for file in place.iterdir():
            file.unlink()
        place.rmdir()


def random_bytes(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


class Plan:
    """Segments that cover one file, and their places."""

    def __init__(self, data: bytes, tile: int) -> None:
        starts = range(0, len(data), tile)
        self.target = np.zeros(len(data) + 1, np.uint8)[1:]  # aligned to nothing
        address = self.target.ctypes.data
        rows = [(0, at, min(tile, len(data) - at), address + at) for at in starts]
        self.segments: NDArray[np.int64] = np.array(rows, dtype=np.int64)
        sums = [zlib.crc32(data[at : at + tile]) for at in starts]
        self.crcs: NDArray[np.uint32] = np.array(sums, dtype=np.uint32)

    def read(self, storage: Storage, name: str) -> bytes:
        storage.read_checked([name], self.segments, self.crcs)
        return self.target.tobytes()


@pytest.mark.parametrize("tail", [0, 1, 4095, 4096, 4097, 8193])
def test_large_files_hold_what_was_written(storage: Storage, tail: int) -> None:
    data = random_bytes(5 * MIB + tail)
    storage.write("f", [data[: 2 * MIB], data[2 * MIB : 2 * MIB + 5], data[2 * MIB + 5 :]])
    assert storage.read("f") == data
    assert Plan(data, TILE).read(storage, "f") == data
    assert Plan(data, 4 * MIB).read(storage, "f") == data
    assert storage.list() == ["f"]


@pytest.mark.parametrize("size", [0, 1, 256 << 10, 3 * MIB + 17])
def test_ranges_are_read_with_their_sums(storage: Storage, size: int) -> None:
    data, memory = random_bytes(size + 8), np.zeros(2 * size + 2, np.uint8)
    storage.write("a", [data])
    storage.write("b", [data[::-1]])
    rows = [(0, 7, size, memory.ctypes.data), (1, 3, size, memory.ctypes.data + size)]
    wanted = [data[7 : 7 + size], data[::-1][3 : 3 + size]]
    sums = read_summed(storage, ["a", "b"], np.array(rows, np.int64), [0, 77])
    assert sums == [crc32c(wanted[0]), crc32c(wanted[1], 77)]
    assert memory[: 2 * size].tobytes() == b"".join(wanted)
    if size:
        late = np.array([(0, 9, size, memory.ctypes.data)], np.int64)
        with pytest.raises(Corrupted, match="inside a needed range"):
            read_summed(storage, ["a"], late, [0])
        with pytest.raises(StorageError):
            read_summed(storage, ["absent"], late, [0])


def test_cold_and_sparse_files_are_read(tmp_path: Path) -> None:
    storage = DirectoryStorage(tmp_path)
    data = random_bytes(3 * MIB + 5)
    offset = (1 << 32) - MIB - 3
    path = tmp_path / "f"
    with path.open("wb") as file:
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    plan = Plan(data, TILE)
    plan.segments[:, 1] += offset
    assert plan.read(storage, "f") == data


@pytest.mark.parametrize("place", [0, TILE - 1, TILE, 3 * MIB, 5 * MIB - 1])
def test_a_flipped_byte_is_told_by_its_segment(storage: Storage, place: int) -> None:
    data = bytearray(random_bytes(5 * MIB))
    plan = Plan(bytes(data), TILE)
    data[place] ^= 0x10
    storage.write("f", [bytes(data)])
    with pytest.raises(Corrupted, match="CRC32 of bytes") as caught:
        plan.read(storage, "f")
    assert caught.value.segment == place // TILE


@pytest.mark.parametrize("size", [0, 4096, 2 * TILE, 5 * MIB - 1])
def test_a_file_that_was_cut_is_told_by_its_segment(storage: Storage, size: int) -> None:
    data = random_bytes(5 * MIB)
    storage.write("f", [data[:size]])
    plan = Plan(data, TILE)
    with pytest.raises(Corrupted, match="ends at byte") as caught:
        plan.read(storage, "f")
    assert caught.value.segment is not None
    assert caught.value.segment >= size // TILE


def test_an_absent_file_is_told_by_its_segment(storage: Storage) -> None:
    plan = Plan(random_bytes(100), 10)
    with pytest.raises(StorageError) as caught:
        plan.read(storage, "absent")
    assert not isinstance(caught.value, Corrupted)
    assert caught.value.segment == 0


def test_a_failing_source_of_chunks_leaves_nothing(storage: Storage) -> None:
    storage.write("f", [b"old"])

    def chunks() -> Iterator[bytes]:
        yield random_bytes(3 * MIB)
        raise KeyError("no more")

    with pytest.raises(KeyError):
        storage.write("f", chunks())
    assert storage.read("f") == b"old"
    assert storage.list() == ["f"]


FILLING = """
import sys
from pathlib import Path
from fireflyer.errors import NoSpace
from fireflyer.storage import DirectoryStorage
storage = DirectoryStorage(Path(sys.argv[1]))
storage.write("f", [b"old"])
try:
    storage.write("f", (bytes(1 << 20) for _ in range(20)))
except NoSpace as error:
    assert "free some space" in str(error), error
    assert set(storage.list()) - {"lost+found"} == {"f"}, storage.list()
    assert storage.read("f") == b"old"
    print("refused")
"""


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_place_is_an_error_and_nothing_is_left(tmp_path: Path, kind: str) -> None:
    place, image = tmp_path / "small", tmp_path / "image"
    place.mkdir()
    if kind == "tmpfs":
        mount = f"mount -t tmpfs -o size=8m none {place}"
    else:
        with image.open("wb") as file:
            file.truncate(8 * MIB)
        mount = f"mkfs.ext4 -q -O ^has_journal {image} && mount -o loop {image} {place}"
    script = tmp_path / "fill.py"
    script.write_text(FILLING)
    inside = f"{mount} || exit 77; {sys.executable} {script} {place}; status=$?; umount {place}; exit $status"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", inside], capture_output=True, text=True, check=False
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no {kind} can be mounted here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused\n"
