"""Iterator that a thread runs ahead of its consumer."""

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class _Shared(Generic[T]):
    """State shared by the iterator and its thread.

    The thread holds no reference to the `Prefetcher`, so dropping the `Prefetcher` ends the thread.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.changed = threading.Condition()
        self.made: deque[T] = deque()
        self.error: BaseException | None = None  # StopIteration at the end
        self.closed = False

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.made.clear()
            self.changed.notify_all()

    def run(self, items: Iterator[T]) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closed or len(self.made) < self.depth)
                if self.closed:
                    return
            try:
                item = next(items)
            except BaseException as error:  # noqa: BLE001  # carried to the consumer
                with self.changed:
                    self.error = error
                    self.changed.notify_all()
                return
            with self.changed:
                if not self.closed:
                    self.made.append(item)
                self.changed.notify_all()


class Prefetcher(Iterator[T]):
    """Iterator over `items` in order; a thread makes up to `depth` items ahead of the consumer.

    The thread starts at the first `next`. It ends after the last item, at the first exception, at
    `close`, or when this iterator is dropped. An exception of `items` is raised by `next` in place
    of the item. `close` does not wait for an item in progress. Only the thread uses `items`.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items = items
        self._shared: _Shared[T] = _Shared(depth)
        self._thread: threading.Thread | None = None
        self.close = weakref.finalize(self, self._shared.close)

    def __next__(self) -> T:
        shared = self._shared
        if self._thread is None:
            self._thread = threading.Thread(
                target=shared.run, args=(self._items,), name="ffrecord-ahead", daemon=True
            )
            self._thread.start()
        with shared.changed:
            shared.changed.wait_for(lambda: shared.made or shared.error or shared.closed)
            if shared.made:
                item = shared.made.popleft()
                shared.changed.notify_all()
                return item
            if shared.error is None or isinstance(shared.error, StopIteration):
                raise StopIteration
            raise shared.error
