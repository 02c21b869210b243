"""Background cleanup: sessions of vanished clients, and chunks of files without names.

One thread in the metadata service's process does this. Each step is idempotent.
"""

import threading
import time
from collections.abc import Callable
from secrets import randbits

from fireflyer.errors import FireflyerError
from fireflyer.fs3.client.cluster import Cluster
from fireflyer.fs3.client.data import Data
from fireflyer.fs3.client.settings import Settings
from fireflyer.fs3.condition_log import ConditionLog
from fireflyer.fs3.meta.inode import FILE, Inode
from fireflyer.fs3.meta.messages import (
    Answer,
    Collect,
    Collected,
    Expire,
    Removal,
    Removals,
    Request,
    Settle,
    User,
)
from fireflyer.log import speaker
from fireflyer.rpc.proof import Secret

EVERY_S = 1.0
"""Seconds between two rounds."""
DEADLINE_S = 5.0
"""Timeout of one step in seconds; the next round retries a step that takes longer."""
CHUNKS_A_TURN = 64 << 10
"""Number of chunks of one file that a round removes before the round turns to the next file."""
TURN_S = 1.0
"""Maximum seconds that a round spends on one file before it turns to the next file."""
ROOT_USER = User(0, 0, ())
log = speaker("fs3", "meta")


class Cleanup:
    """Cleanup thread that runs from the constructor to `close`."""

    def __init__(
        self,
        execute: Callable[[Request], Answer],
        manager: str,
        secret: Secret,
        session_ns: int,
    ) -> None:
        """Connects to the cluster and starts the thread.

        Args:
            execute: executes a request in the metadata service.
            session_ns: time in ns after which a client without heartbeats loses its open files.

        Raises:
            WireError: the manager does not answer.
        """
        self._session_ns = session_ns
        # No heartbeat could arrive while the service was down. Therefore no session expires before
        # `session_ns` have passed since the start.
        self._settle_from = time.monotonic() + session_ns / 1e9
        settings = Settings(deadline_s=DEADLINE_S)
        self._execute = execute
        self._fault_log = ConditionLog(log, "space of removed files is freed again")
        self._cluster = Cluster(randbits(62) + 1, manager, secret, settings)
        self._data = Data(self._cluster, settings)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fs3-sweep", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread; waits until the current batch of chunks is removed."""
        self._stopping.set()
        self._thread.join()
        self._cluster.close()

    def _run(self) -> None:
        more = False
        while not self._stopping.wait(0 if more else EVERY_S):
            more = False
            try:
                more = self.round()
                self._fault_log.update("")
            except FireflyerError as error:
                self._fault_log.update(f"cannot free the space of removed files: {error}")

    def round(self) -> bool:
        """Stores the lengths of files of vanished clients; removes the chunks of files without
        names.

        A file whose chains do not answer waits for the next round.

        Any thread may call this. Raises StorageError if the metadata service fails.

        Returns:
            True if a file's turn ended before all its chunks were removed.
        """
        if time.monotonic() >= self._settle_from:
            self._settle()
        after, more = 0, False
        while not self._stopping.is_set():
            found = self._execute(Request(ROOT_USER, 0, Collect(after)))
            assert isinstance(found, Removals)
            if not found.items:
                break
            served = self._served(found.items)
            emptied = self._free_small(served)
            for item in served:
                if self._stopping.is_set():
                    break
                if item.inode in emptied:
                    continue
                try:
                    if self._data.cut(_inode(item), 0, f"inode {item.inode}", self._turn()):
                        emptied.add(item.inode)
                    else:
                        more = True
                except FireflyerError as error:
                    log.warning("could not free inode %d, will retry: %s", item.inode, error)
            self._execute(Request(ROOT_USER, 0, Collected(sorted(emptied))))
            after = found.items[-1].inode
        return more

    def _served(self, items: list[Removal]) -> list[Removal]:
        """Returns the files whose chains all have a serving target; the other files wait for
        another round."""
        served = []
        for item in items:
            try:
                if self._data.serves(_inode(item)):
                    served.append(item)
            except FireflyerError as error:
                log.warning("could not free inode %d, will retry: %s", item.inode, error)
        if len(served) < len(items):
            waiting = len(items) - len(served)
            log.debug("%d removed files wait for chains that serve no requests", waiting)
        return served

    def _free_small(self, items: list[Removal]) -> set[int]:
        """Empties the small files together; returns the inodes of files without chunks."""
        emptied: set[int] = set()
        for _ in range(2):  # the second pass checks that the first removed all
            left = [item for item in items if item.inode not in emptied]
            if not left or self._stopping.is_set():
                break
            try:
                inodes = [_inode(item) for item in left]
                empty = self._data.empty_small(inodes, f"{len(left)} removed files")
            except FireflyerError as error:
                log.warning("could not free %d files together: %s", len(left), error)
                break
            emptied.update(item.inode for item, its in zip(left, empty, strict=True) if its)
        return emptied

    def _turn(self) -> Callable[[int], bool]:
        """Returns the callback that counts removed chunks and decides whether to continue."""
        left, end = CHUNKS_A_TURN, time.monotonic() + TURN_S

        def go_on(removed: int) -> bool:
            nonlocal left
            left -= removed
            return left > 0 and time.monotonic() < end and not self._stopping.is_set()

        return go_on

    def _settle(self) -> None:
        """Settles files of vanished clients: stores the lengths that the chains report."""
        found = self._execute(Request(ROOT_USER, 0, Expire(self._session_ns)))
        assert isinstance(found, Removals)
        for item in found.items:
            if self._stopping.is_set():
                return
            try:
                length = self._data.length(_inode(item), f"inode {item.inode}")
                number, client, version = item.inode, item.client, item.length_version
                call = Settle(number, client, length, version, self._session_ns)
                self._execute(Request(ROOT_USER, 0, call))
            except FireflyerError as error:
                log.warning(
                    "could not store the length of inode %d, will retry: %s", item.inode, error
                )


def _inode(item: Removal) -> Inode:
    """Returns an inode with the fields that locate its chunks."""
    times = (0, 0, 0, 0)
    return Inode(
        *(1, item.inode, FILE, 0, 0, 0, 0, *times, 0, item.length_version),
        layout=item.layout, dyn_stripe=item.chains, parent=0, name=b"",
    )  # fmt: skip
