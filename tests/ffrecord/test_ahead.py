"""A thread that runs an iterator ahead: in order, bounded, gone with its consumer."""

import gc
import threading
from collections.abc import Iterator

import pytest
from tests.waiting import LIMIT_S

from fireflyer.ffrecord.prefetch import Prefetcher


class Source(Iterator[int]):
    """Counts; tells how far it was run, and raises `at` where it is told to."""

    def __init__(self, count: int, at: int = -1) -> None:
        self.made = 0
        self.changed = threading.Condition()
        self._count, self._at = count, at

    def __next__(self) -> int:
        if self.made == self._at:
            raise ValueError(f"no item {self._at}")
        if self.made == self._count:
            raise StopIteration
        with self.changed:
            self.made += 1
            self.changed.notify_all()
        return self.made - 1

    def wait_until(self, made: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.made >= made, timeout=LIMIT_S)


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "ffrecord-ahead"]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_items_come_in_order_and_no_more_than_depth_are_made_ahead(depth: int) -> None:
    source = Source(50)
    ahead = Prefetcher(source, depth)
    assert source.made == 0, "nothing is made before the first is asked for"
    for expected in range(50):
        assert next(ahead) == expected
        source.wait_until(min(50, expected + 1 + depth))
        assert source.made <= expected + 1 + depth
    with pytest.raises(StopIteration):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


def test_an_exception_comes_in_its_place() -> None:
    ahead = Prefetcher(Source(9, at=3), 2)
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="no item 3"):
        next(ahead)


def test_the_thread_ends_with_its_consumer() -> None:
    ahead = Prefetcher(Source(1_000), 2)
    assert next(ahead) == 0
    (thread,) = threads()
    del ahead
    gc.collect()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_what_is_closed_gives_nothing_more() -> None:
    ahead = Prefetcher(Source(10), 3)
    next(ahead)
    ahead.close()
    with pytest.raises(StopIteration):
        next(ahead)
