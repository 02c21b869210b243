"""Files of terabytes with few bytes, and large ones without holes: all costs what they hold.

Nothing here looks at a clock: questions, removals and pieces are counted.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.fs3.client.conftest import CHUNK, SECRET, Cluster

from fireflyer._native.fs3 import Kind
from fireflyer._native.fs3.client import Batch
from fireflyer.fs3 import cleanup, survey
from fireflyer.fs3.cleanup import Cleanup
from fireflyer.fs3.client import Client, File, data, transfer
from fireflyer.fs3.meta.inode import Inode
from fireflyer.rpc.proof import Secret

TERA = 1 << 40
PLACES = {5: b"a", 3 * TERA + 7: b"bc", 8 * TERA - 1: b"d"}
CHAINS = 3


class Counts:
    """Of what goes to the chains."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.questions = self.removed = self.cut = self.read = 0
        self.after_removal: Callable[[], object] = lambda: None
        ask, chunks, read = data.Data._query, Batch.of_chunks, File.pread_into

        def asking(its: data.Data, files: Any, asks: Any, what: str) -> Any:
            self.questions += len(asks)
            return ask(its, files, asks, what)

        class Counted(Batch):
            @staticmethod
            def of_chunks(file: Any, kind: Kind, indexes: Sequence[int], length: int = 0) -> Batch:
                self.removed += len(indexes) if kind == Kind.remove else 0
                self.cut += len(indexes) if kind == Kind.truncate else 0
                return chunks(file, kind, indexes, length)

        write = data.Data._write

        def writing(its: data.Data, *arguments: Any) -> None:
            before = self.removed
            write(its, *arguments)
            if before:
                self.after_removal()

        def reading(its: File, buffer: Any, offset: int) -> int:
            self.read += 1
            return read(its, buffer, offset)

        patch.setattr(data.Data, "_query", asking)
        patch.setattr(data.Data, "_write", writing)
        patch.setattr(data, "Batch", Counted)
        patch.setattr(File, "pread_into", reading)


@pytest.fixture
def counts(fs: Client, monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


def held(cluster: Cluster) -> int:
    """Chunks of all nodes; each is there twice."""
    return sum(node.statistics()["chunks"] for node in cluster.running.values()) // 2


@contextlib.contextmanager
def swept(cluster: Cluster, patch: pytest.MonkeyPatch) -> Iterator[Cleanup]:
    """A sweep that does nothing by itself, and has done all that there was to do."""
    patch.setattr(cleanup, "EVERY_S", 3600.0)
    made = Cleanup(cluster.service.execute, cluster.address, Secret(SECRET), 10**12)
    while made.round():
        pass
    yield made
    made.close()


def fill(fs: Client, path: str) -> None:
    with fs.open(path, "xb") as file:
        for place, some in PLACES.items():
            file.pwrite(some, place)


def is_filled(read: Callable[[int, int], bytes]) -> bool:
    around = all(
        read(len(some) + 2, at - 1) == b"\0" + some + b"\0" for at, some in [*PLACES.items()][:2]
    )
    return around and read(5, 8 * TERA - 2) == b"\0d"


def test_removal_costs_what_the_file_holds(
    fs: Client, calm: Cluster, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with swept(calm, monkeypatch) as sweeping:
        before, counts.removed, counts.questions = held(calm), 0, 0
        fill(fs, "/a")
        with fs.open("/b", "xb") as file:
            file.pwrite(b"x", (CHUNK << 32) - 1)  # the last byte that a file can have
        assert held(calm) == before + 4
        fs.unlink("/a")
        fs.unlink("/b")
        assert fs.statfs().unlinked == 2
        assert not sweeping.round()
        assert fs.statfs().unlinked == 0
    assert held(calm) == before
    assert counts.removed == 4
    assert counts.questions <= 2 * (4 + 2 * CHAINS)


def test_truncate_costs_what_it_cuts(fs: Client, counts: Counts) -> None:
    fill(fs, "/a")
    with fs.open("/a", "rb+") as file:
        file.truncate(8 * TERA - 1)
        assert (counts.removed, counts.cut) == (0, 1)
        file.truncate(3 * TERA + 8)
        assert (counts.removed, counts.cut) == (1, 2)
        file.truncate(2 * TERA + 1)  # in a hole
        assert (counts.removed, counts.cut) == (2, 2)
        file.truncate(4 * TERA)
        assert file.pread(3, 3 * TERA + 6) == bytes(3)
        assert file.pread(3, 4) == b"\0a\0"
    with fs.open("/a", "wb") as file:
        assert file.size == 0
    assert (counts.removed, counts.cut) == (3, 2)
    assert counts.questions <= 5 * (3 * CHAINS)


def test_a_dense_file_goes_by_few_questions(
    fs: Client, calm: Cluster, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fs.open("/a", "xb") as file:
        file.write(bytes(200 * CHUNK))
        monkeypatch.setattr(data, "REMOVED_AT_ONCE", 64)
        before = held(calm)
        file.truncate(0)
    assert held(calm) == before - 200
    assert counts.removed == 200
    assert counts.questions == 2 * CHAINS  # what stands, and whether anything does


def test_what_is_written_while_a_file_is_cut_goes_too(
    fs: Client, calm: Cluster, counts: Counts
) -> None:
    before = held(calm)
    with fs.open("/a", "xb") as file, fs.open("/a", "rb+") as other:
        file.write(bytes(3 * CHUNK))

        def late() -> None:
            counts.after_removal = lambda: None
            other.pwrite(b"late", 7 * TERA)

        counts.after_removal = late
        file.truncate(0)
        assert counts.removed == 4
    assert held(calm) == before


def test_check_reads_what_there_is(fs: Client, counts: Counts) -> None:
    fill(fs, "/a")
    with fs.open("/long", "xb") as file:
        file.truncate(5 * TERA)
    told: list[int] = []
    found = survey.check(fs, "/", told.append)
    assert (found.files, found.damages) == (2, [])
    assert (found.bytes, counts.read) == (3 * CHUNK, 3)
    assert sum(told) == 13 * TERA
    assert counts.questions <= 3 + 2 * CHAINS


def test_copies_keep_holes(fs: Client, calm: Cluster, counts: Counts, tmp_path: Path) -> None:
    local, remote = transfer.Local(), transfer.Remote(fs)
    before = held(calm)
    fill(fs, "/a")
    told: list[int] = []

    def copy(source: transfer.End, path: str, target: transfer.End, to: str) -> None:
        items = transfer.plan(source, path, target, to, recursive=False)
        told.clear()
        transfer.copy(source, target, items, told.append)
        assert sum(told) == 8 * TERA

    copy(remote, "/a", remote, "/b")
    assert (held(calm), counts.read) == (before + 6, 3)
    copy(remote, "/b", local, str(tmp_path / "c"))
    assert counts.read == 6
    status = (tmp_path / "c").stat()
    assert (status.st_size, status.st_blocks * 512 <= 16 * CHUNK) == (8 * TERA, True)
    with (tmp_path / "c").open("rb") as file:
        assert is_filled(lambda size, at: os.pread(file.fileno(), size, at))
    copy(local, str(tmp_path / "c"), remote, "/d")
    assert held(calm) == before + 9
    for path in ("/b", "/d"):
        with fs.open(path) as its:
            assert is_filled(its.pread)
    assert counts.questions <= 2 * (3 + CHAINS)


@pytest.mark.parametrize("size", [0, 1, 3 * CHUNK, 9 << 20, 5 * TERA])
def test_copies_of_holes_alone(fs: Client, calm: Cluster, tmp_path: Path, size: int) -> None:
    before = held(calm)
    with (tmp_path / "a").open("wb") as file:
        file.truncate(size)
    local, remote = transfer.Local(), transfer.Remote(fs)
    for source, path, target, to in (
        (local, str(tmp_path / "a"), remote, "/a"),
        (remote, "/a", remote, "/b"),
        (remote, "/b", local, str(tmp_path / "b")),
    ):
        items = transfer.plan(source, path, target, to, recursive=False)
        transfer.copy(source, target, items, lambda _: None)
    assert fs.stat("/a").st_size == fs.stat("/b").st_size == (tmp_path / "b").stat().st_size == size
    assert held(calm) <= before + (0 < size <= CHUNK)


def test_copies_of_data_between_holes(fs: Client, tmp_path: Path) -> None:
    """Stretches that begin and end anywhere, in a file of many pieces."""
    whole = bytearray(30 << 20)
    with (tmp_path / "a").open("wb") as file:
        for begin, size in ((3, 10), (5 << 20, 9 << 20), ((17 << 20) + 5000, 4 << 20)):
            some = os.urandom(size)
            os.pwrite(file.fileno(), some, begin)
            whole[begin : begin + size] = some
        file.truncate(30 << 20)
    local, remote = transfer.Local(), transfer.Remote(fs)
    for source, path, target, to in (
        (local, str(tmp_path / "a"), remote, "/a"),
        (remote, "/a", remote, "/b"),
        (remote, "/b", local, str(tmp_path / "b")),
    ):
        items = transfer.plan(source, path, target, to, recursive=False)
        transfer.copy(source, target, items, lambda _: None)
    assert (tmp_path / "b").read_bytes() == whole
    with fs.open("/b") as its:
        assert sum(size for _, size in its.stretches(1 << 20)) <= (13 << 20) + 6 * CHUNK


def test_a_large_file_leaves_others_their_turn(
    fs: Client, calm: Cluster, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with swept(calm, monkeypatch) as sweeping:
        before, counts.removed = held(calm), 0
        monkeypatch.setattr(data, "REMOVED_AT_ONCE", 8)
        monkeypatch.setattr(cleanup, "CHUNKS_A_TURN", 16)
        monkeypatch.setattr(cleanup, "TURN_S", 3600.0)
        for path, chunks in (("/large", 40), ("/small", 2)):
            with fs.open(path, "xb") as file:
                file.write(bytes(chunks * CHUNK))
        fs.unlink("/large")
        fs.unlink("/small")
        assert sweeping.round()
        assert (held(calm) - before, fs.statfs().unlinked) == (24, 1)
        assert sweeping.round()
        assert (held(calm) - before, fs.statfs().unlinked) == (8, 1)
        assert not sweeping.round()
        assert (held(calm) - before, fs.statfs().unlinked) == (0, 0)
    assert counts.removed == 42


def test_the_end_of_a_sweep_waits_for_one_batch(
    fs: Client, calm: Cluster, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with swept(calm, monkeypatch) as sweeping:
        counts.removed = 0
        monkeypatch.setattr(data, "REMOVED_AT_ONCE", 8)
        for path in ("/a", "/b"):
            with fs.open(path, "xb") as file:
                file.write(bytes(40 * CHUNK))
            fs.unlink(path)
        counts.after_removal = sweeping._stopping.set
        sweeping.round()
        assert counts.removed == 8
        assert fs.statfs().unlinked == 2
    counts.after_removal = lambda: None
    with swept(calm, monkeypatch):  # the next one goes on
        pass
    assert (counts.removed, fs.statfs().unlinked) == (80, 0)


def make_small(fs: Client, count: int) -> None:
    for n in range(count):
        with fs.open(f"/{n}", "xb") as file:
            file.write(bytes([n]) * 100)
        fs.unlink(f"/{n}")


def test_small_files_go_together(
    fs: Client, calm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    removals = 0
    write = data.Data._write

    def writing(its: data.Data, *arguments: Any) -> None:
        nonlocal removals
        removals += 1
        write(its, *arguments)

    with swept(calm, monkeypatch) as sweeping:
        make_small(fs, 40)
        before = held(calm)
        monkeypatch.setattr(data.Data, "_write", writing)
        assert not sweeping.round()
        assert removals == 1
        assert (held(calm), fs.statfs().unlinked) == (before - 40, 0)


def test_a_stopped_chain_stops_no_other(
    fs: Client, calm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with swept(calm, monkeypatch) as sweeping:
        make_small(fs, 40)
        before = held(calm)
        serving = sweeping._cluster.serving
        stopped = calm.table.chains[0]
        asked: list[int] = []
        emptying = sweeping._data.empty_small

        def told(chain: int) -> list[int]:
            return [] if chain == stopped else serving(chain)

        def counting(inodes: Sequence[Inode], what: str) -> list[bool]:
            asked.extend(chain for one in inodes for chain in chains_of(one))
            return emptying(inodes, what)

        def chains_of(inode: Inode) -> list[int]:
            return sweeping._data.map_of(inode).chains[: inode.chains]

        monkeypatch.setattr(sweeping._cluster, "serving", told)
        monkeypatch.setattr(sweeping._data, "empty_small", counting)
        assert not sweeping.round()
        left = fs.statfs().unlinked
        assert 0 < left < 40
        assert held(calm) == before - (40 - left)
        assert stopped not in asked
        monkeypatch.setattr(sweeping._cluster, "serving", serving)
        sweeping.round()
        assert fs.statfs().unlinked == 0
