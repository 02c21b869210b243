"""Client of the metadata service; request numbers make each request execute once."""

import errno
import operator
import os
import threading
from collections.abc import Sequence
from typing import SupportsIndex, TypeVar

import msgspec

from fireflyer.errors import DeadlineExceeded, FileError, FileTimeout, FireflyerError, NoSpace
from fireflyer.fs3.client.settings import Settings
from fireflyer.fs3.meta.messages import (
    Done,
    EndClient,
    KeepAlive,
    Open,
    Reading,
    Request,
    User,
    Writing,
)
from fireflyer.fs3.roles import NO_MANAGER, Role
from fireflyer.log import get_logger
from fireflyer.rpc.client import Client as Wire
from fireflyer.rpc.policy import Policy
from fireflyer.rpc.proof import Secret

T = TypeVar("T")
METHOD = "meta"
"""RPC method that takes a Request and returns its answer."""

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


INT64_MAX = (1 << 63) - 1


def raw_name(name: Path) -> bytes:
    """Returns the bytes of a name or path, which may be in any encoding.

    Raises:
        TypeError: `name` is no path.
        ValueError: the name contains a NUL, as in `os`.
    """
    raw = os.fsencode(name)
    if b"\0" in raw:
        raise ValueError(f"embedded null byte in the name {os.fsdecode(raw)!r}")
    return raw


def encoded(path: Path) -> bytes:
    """Encodes a path from the root for the metadata service.

    Raises:
        TypeError, ValueError: as `raw_name`.
        FileNotFoundError: the path is empty.
    """
    raw = raw_name(path)
    if not raw:
        raise FileError(errno.ENOENT)
    return raw if raw.startswith(b"/") else b"/" + raw


def integer(value: SupportsIndex, what: str) -> int:
    """Returns `value` as an integer that the metadata service and the chunks can hold.

    Raises:
        TypeError: `value` is no integer.
        OverflowError: its absolute value is above 2^63 - 1.
    """
    number = operator.index(value)
    if not -INT64_MAX <= number <= INT64_MAX:
        raise OverflowError(f"{what} {number} is beyond {INT64_MAX} in size")
    return number


def natural(value: SupportsIndex, what: str) -> int:
    """Returns `value` as an integer, as `integer` does; raises ValueError if it is negative."""
    number = integer(value, what)
    if number < 0:
        raise ValueError(f"{what} {number} is negative")
    return number


class Metadata:
    """Client of the metadata service that acts for the user of this process. Thread-safe."""

    def __init__(
        self, client: int, addresses: str | Sequence[str], secret: Secret, settings: Settings
    ) -> None:
        self.client = client
        policy = Policy(
            final=(NoSpace,),  # not retried: the caller decides, as for writes of chunks
            before_retry=settings.before_retry,
        )
        self._wire = Wire(
            addresses, secret, Role.CLIENT, policy=policy, unexpected_roles=NO_MANAGER
        )
        self._settings = settings
        self._user = User(os.getuid(), os.getgid(), tuple(os.getgroups()))
        self._umask = _umask()
        self._lock = threading.Lock()  # guards the attributes below
        self._last = 0
        self._under_way: set[int] = set()
        self._handle = 0

    def masked(self, mode: int) -> int:
        """Returns the permission bits that a new file or directory gets."""
        return integer(mode, "mode") & 0o7777 & ~self._umask

    def handle(self) -> int:
        """Returns a new handle for a file that is opened for writing."""
        with self._lock:
            self._handle += 1
            return self._handle

    def ask(self, call: Reading | Open, kind: type[T]) -> T:
        """Sends a call that changes nothing (`Open` only without a handle).

        Raises:
            FileError: an error that POSIX defines for the call.
            FileTimeout, WireError: no service answers.
            NoSpace: the store's disk is full.
            ValueError: this process is a forked child of the client's process.
        """
        request = Request(self._user, self.client, call)
        return self._call(request, kind)

    def act(self, call: Writing, kind: type[T], user: User | None = None) -> T:
        """Sends a call that the service executes once, despite retries. Raises the errors of `ask`.

        Args:
            user: user on whose behalf the call is made; default: the user of this process.
        """
        self._wire.check_process()
        with self._lock:
            self._last += 1
            number = self._last
            self._under_way.add(number)
            acknowledged = min(self._under_way) - 1
        try:
            request = Request(user or self._user, self.client, call, number, acknowledged)
            again = msgspec.structs.replace(request, again=True)
            return self._call(request, kind, again)
        finally:
            with self._lock:
                self._under_way.remove(number)

    def _call(self, request: Request, kind: type[T], again: Request | None = None) -> T:
        limit_s = self._settings.deadline_s
        try:
            return self._wire.call(METHOD, request, kind, again=again, deadline_s=limit_s)
        except DeadlineExceeded as error:
            raise FileTimeout(str(error)) from error

    def close(self) -> None:
        """Ends this client's session, if there is one.

        A forked child closes only its copy of the connection, because the session is the parent's.
        """
        if self._wire.here:
            self._end_session()
        self._wire.close()

    def _end_session(self) -> None:
        with self._lock:
            changed = self._last > 0
        try:
            if changed:
                request = Request(self._user, self.client, EndClient())
                self._wire.call(METHOD, request, Done, deadline_s=self._settings.attempt_s)
        except FireflyerError as error:  # without heartbeats the session expires
            get_logger("fs3").debug("could not end the client's session: %s", error)


class SessionKeepAlive:
    """Heartbeat thread that keeps a client's sessions alive while files are open for writing.

    The thread starts with the first file. It ends after an interval without an open file. It does
    not end at the last close, because a program may open and close thousands of files a second.
    """

    def __init__(self, metadata: Metadata, every_s: float) -> None:
        self._metadata, self._every_s = metadata, every_s
        self._stop = threading.Event()
        self._lock = threading.Lock()  # guards the attributes below
        self._open: dict[int, int] = {}  # inodes by handle
        self._beating = False

    def opened(self, handle: int, inode: int) -> None:
        with self._lock:
            self._open[handle] = inode
            start, self._beating = not self._beating, True
        if start:
            threading.Thread(target=self._beat, name="fs3-alive", daemon=True).start()

    def handle_of(self, inode: int) -> int:
        """Returns a handle with which the inode is open for writing; 0 if there is none."""
        with self._lock:
            return next((handle for handle, its in self._open.items() if its == inode), 0)

    def closed(self, handle: int) -> None:
        with self._lock:
            del self._open[handle]

    def close(self) -> None:
        """Ends the thread, if it runs; the sessions of files that are still open expire."""
        self._stop.set()

    def _beat(self) -> None:
        while not self._stop.wait(self._every_s):
            with self._lock:
                if not self._open:
                    self._beating = False
                    return
            try:
                self._metadata.act(KeepAlive(), Done)
            except FireflyerError as error:
                get_logger("fs3").warning("a heartbeat to the metadata service failed: %s", error)


def _umask() -> int:
    """Returns this process's umask without changing it."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022
