"""What nobody waits for: the ends of vanished clients, and the chunks of files without names.

One thread, beside the metadata service. Each step may be done twice.
"""

import threading
import time
from collections.abc import Callable
from secrets import randbits

from fireflyer.errors import FireflyerError
from fireflyer.fs3.client.cluster import Cluster
from fireflyer.fs3.client.data import Data
from fireflyer.fs3.client.settings import Settings
from fireflyer.fs3.lasting import Lasting
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
DEADLINE_S = 5.0
"""For one step; what takes longer is tried again in the next round."""
CHUNKS_A_TURN = 64 << 10
TURN_S = 1.0
"""What is removed of a file before the others have their turn: whichever of the two is over first."""
ROOT_USER = User(0, 0, ())
log = speaker("fs3", "meta")


class Sweep:
    """Runs from the constructor to `close`."""

    def __init__(
        self,
        execute: Callable[[Request], Answer],
        manager: str,
        secret: Secret,
        session_ns: int,
    ) -> None:
        """
        Args:
            execute: the metadata service's.
            session_ns: how long a client that is not heard of keeps its files open for writing.

        Raises:
            WireError: the manager does not answer.
        """
        self._session_ns = session_ns
        # Clients that could not be heard while the service was down get their time again.
        self._settle_from = time.monotonic() + session_ns / 1e9
        settings = Settings(deadline_s=DEADLINE_S)
        self._execute = execute
        self._ill = Lasting(log, "what was removed is freed again")
        self._cluster = Cluster(randbits(62) + 1, manager, secret, settings)
        self._data = Data(self._cluster, settings)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fs3-sweep", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for the chunks that are being removed, a batch at most."""
        self._stopping.set()
        self._thread.join()
        self._cluster.close()

    def _run(self) -> None:
        more = False
        while not self._stopping.wait(0 if more else EVERY_S):
            more = False
            try:
                more = self.round()
                self._ill.look("")
            except FireflyerError as error:
                self._ill.look(f"what was removed cannot be freed: {error}")

    def round(self) -> bool:
        """Settles and frees all that can be now; a file whose chains do not answer stays for the next round.

        Any thread. Raises StorageError if the metadata service fails.

        Returns:
            Whether the turn of a file was over before the file was.
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
                    log.warning("inode %d could not be freed; tried again: %s", item.inode, error)
            self._execute(Request(ROOT_USER, 0, Collected(sorted(emptied))))
            after = found.items[-1].inode
        return more

    def _served(self, items: list[Removal]) -> list[Removal]:
        """Those whose chains all have somebody to ask; the others wait for another round."""
        served = []
        for item in items:
            try:
                if self._data.serves(_inode(item)):
                    served.append(item)
            except FireflyerError as error:
                log.warning("inode %d could not be freed; tried again: %s", item.inode, error)
        if len(served) < len(items):
            waiting = len(items) - len(served)
            log.debug("%d removed files wait for chains that serve nobody", waiting)
        return served

    def _free_small(self, items: list[Removal]) -> set[int]:
        """Empties the small files together; the inodes of those that hold nothing any more."""
        emptied: set[int] = set()
        for _ in range(2):  # removes, then sees that they are gone
            left = [item for item in items if item.inode not in emptied]
            if not left or self._stopping.is_set():
                break
            try:
                inodes = [_inode(item) for item in left]
                empty = self._data.empty_small(inodes, f"{len(left)} removed files")
            except FireflyerError as error:
                log.warning("%d files could not be freed together: %s", len(left), error)
                break
            emptied.update(item.inode for item, its in zip(left, empty, strict=True) if its)
        return emptied

    def _turn(self) -> Callable[[int], bool]:
        """Is told of chunks as they are removed; whether the file goes on."""
        left, end = CHUNKS_A_TURN, time.monotonic() + TURN_S

        def go_on(removed: int) -> bool:
            nonlocal left
            left -= removed
            return left > 0 and time.monotonic() < end and not self._stopping.is_set()

        return go_on

    def _settle(self) -> None:
        """Files that vanished clients had open for writing get the length that their chains know."""
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
                log.warning("inode %d could not be settled; tried again: %s", item.inode, error)


def _inode(item: Removal) -> Inode:
    """As much of it as leads to its chunks."""
    times = (0, 0, 0, 0)
    return Inode(
        *(1, item.inode, FILE, 0, 0, 0, 0, *times, 0, item.length_version),
        layout=item.layout, dyn_stripe=item.chains, parent=0, name=b"",
    )  # fmt: skip
