"""The native arena as Python sees it: bytes, prefixes, changes, life times, forks, short memory."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fireflyer._native.checkpoint import Arena
from fireflyer.errors import Cancelled, NoSpace
from fireflyer.storage import DirectoryStorage

SIZES = (0, 1, 63, 64, 65, 4095, 4096, 4097, 1_000_003, 5 << 20, 17)


def make_pieces(sources: list[NDArray[np.uint8]]) -> NDArray[np.int64]:
    """The sources one after the other, each at a multiple of 64."""
    rows, offset = [], 0
    for source in sources:
        rows.append((source.ctypes.data, offset, source.nbytes))
        offset += -(-source.nbytes // 64) * 64
    return np.array(rows, dtype=np.int64)


def make_sources(seed: int) -> list[NDArray[np.uint8]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, size, dtype=np.uint8) for size in SIZES]


def staged(arena: Arena, pieces: NDArray[np.int64]) -> list[bytes]:
    memory = arena.memory(arena.capacity)
    return [bytes(memory[offset : offset + size]) for _, offset, size in pieces.tolist()]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("threads", [0, 1, 3])
def test_every_byte_is_staged_and_changes_are_told(threads: int, background: bool) -> None:
    arena = Arena()
    arena.reserve(8 << 20)
    sources = make_sources(1)
    pieces = make_pieces(sources)
    copy = arena.start(pieces, threads=threads, background=background)
    copy.wait(3 << 20)
    assert copy.staged >= 3 << 20
    copy.wait()
    assert copy.done
    assert copy.pieces_done == len(SIZES)
    assert copy.staged == pieces[-1, 1] + pieces[-1, 2]
    assert staged(arena, pieces) == [source.tobytes() for source in sources]
    with pytest.raises(ValueError, match="compare"):
        copy.changed()

    sources[4][-1] ^= 1
    sources[9][2_000_000] ^= 1
    copy = arena.start(pieces, threads=threads, background=background, compare=True)
    copy.wait(help=False)
    assert np.flatnonzero(copy.changed()).tolist() == [4, 9]
    assert staged(arena, pieces) == [source.tobytes() for source in sources]


def test_a_view_outlives_the_growth_of_its_arena() -> None:
    arena = Arena()
    assert arena.capacity == 0
    with pytest.raises(ValueError, match="reserve"):
        arena.memory(1)
    arena.reserve(1)
    view = arena.memory(5)
    view[:] = b"hello"
    first = arena.capacity
    arena.reserve(first)
    assert bytes(arena.memory(5)) == b"hello"
    arena.reserve(first + 1)
    assert arena.capacity > first
    assert bytes(arena.memory(5)) == bytes(5)
    assert bytes(view) == b"hello"
    with pytest.raises(ValueError, match="bytes"):
        arena.memory(arena.capacity + 1)
    del arena
    gc.collect()
    assert bytes(view) == b"hello"


def test_a_copy_outlives_its_arena() -> None:
    arena = Arena()
    arena.reserve(8 << 20)
    sources = make_sources(2)
    pieces = make_pieces(sources)
    view = arena.memory(8 << 20)
    copy = arena.start(pieces)
    del arena
    copy.wait()
    _, offset, size = pieces[9].tolist()
    assert bytes(view[offset : offset + size]) == sources[9].tobytes()


def test_pieces_must_fit() -> None:
    arena = Arena()
    arena.reserve(100)
    source = np.zeros(100, np.uint8)
    at = source.ctypes.data
    for rows in ([(at, -1, 1)], [(at, 0, -1)], [(at, arena.capacity, 1)], [(at, 9, 9), (at, 8, 1)]):
        with pytest.raises(ValueError, match="piece"):
            arena.start(np.array(rows, dtype=np.int64))
    copy = arena.start(np.zeros((0, 3), np.int64))
    copy.wait()
    assert copy.done
    assert copy.staged == 0


def test_short_memory_is_an_error_that_leaves_an_empty_arena() -> None:
    arena = Arena()
    arena.reserve(100)
    with pytest.raises(NoSpace, match="staging arena"):
        arena.reserve(1 << 50)
    assert arena.capacity == 0
    arena.reserve(100)
    assert arena.capacity > 0


def test_a_forked_child_neither_waits_for_its_parent_nor_writes_to_its_arena(
    forked: Callable[..., list[int]],
) -> None:
    arena = Arena()
    arena.reserve(8 << 20)
    sources = make_sources(3)
    pieces = make_pieces(sources)
    copy = arena.start(pieces, background=True)

    def child() -> None:
        with pytest.raises(Cancelled):
            copy.wait()
        assert arena.capacity == 0
        arena.reserve(8 << 20)
        other = make_sources(4)
        rows = make_pieces(other)
        arena.start(rows).wait()
        assert staged(arena, rows) == [source.tobytes() for source in other]

    assert forked(child) == [0]
    copy.wait()
    assert staged(arena, pieces) == [source.tobytes() for source in sources]


def test_what_is_staged_can_be_written_while_the_rest_is_copied(tmp_path: Path) -> None:
    arena = Arena()
    arena.reserve(8 << 20)
    sources = make_sources(5)
    pieces = make_pieces(sources)
    end = int(pieces[-1, 1] + pieces[-1, 2])
    memory = arena.memory(end)
    copy = arena.start(pieces, background=True)

    def chunks() -> Iterator[memoryview]:
        for start in range(0, end, 1 << 20):
            copy.wait(min(end, start + (1 << 20)), help=False)
            yield memory[start : start + (1 << 20)]

    storage = DirectoryStorage(tmp_path)
    storage.write("data", chunks())
    assert storage.read("data") == bytes(memory)
