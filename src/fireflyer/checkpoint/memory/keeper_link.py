"""Connections of a rank to keepers.

A rank starts its node's keeper if the platform has not started one.
"""

import contextlib
import fcntl
import hashlib
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from fireflyer.checkpoint.memory import messages as wire
from fireflyer.checkpoint.memory.inventory import Inventory, Stamp
from fireflyer.checkpoint.memory.keeper import keep_alive, lock_path, log_path, remove_names
from fireflyer.checkpoint.memory.keeper_probe import KeeperProbe
from fireflyer.checkpoint.memory.memfd import Memory
from fireflyer.errors import (
    ConfigError,
    DeadlineExceeded,
    PeerLost,
    ProtocolMismatch,
    StorageError,
)
from fireflyer.hfreduce.rendezvous.handshake import Hello, Purpose
from fireflyer.rpc.frames import frame

CONNECT_S = 10.0

R = TypeVar("R", wire.Joined, wire.Done, wire.Found, wire.Holds)


class KeeperLink:
    """Connection to one keeper for the saves of one place. Threads that share a link hold its
    lock `busy` during each call.

    Every method raises the errors that the keeper reports (CheckpointError, NoSpace, Corrupted,
    StorageError, DeadlineExceeded). A method raises PeerLost if the keeper is gone, and
    ProtocolMismatch if the keeper's protocol differs. These two errors close the link. The link
    also closes if the keeper does not answer in time; the method then raises DeadlineExceeded.
    """

    def __init__(
        self, sock: socket.socket, who: str, passes_memory: bool, stall_s: float = wire.STALL_S
    ) -> None:
        """`stall_s`: maximum time, in seconds, that the keeper may block its caller."""
        self._sock = sock
        self._stall_s = stall_s
        self.end = math.inf
        """Caller's deadline, by time.monotonic."""
        self.unresponsive = False
        """True if the link was closed because the keeper did not answer."""
        weakref.finalize(self, sock.close)  # closes the socket in a reference cycle, too
        self._who = who
        self._passes_memory = passes_memory
        self.busy = threading.Lock()

    @classmethod
    def local(
        cls, sock: socket.socket, join: wire.Join, wait_s: float | None = None
    ) -> tuple["KeeperLink", int, Inventory]:
        """Joins over a connected Unix socket; returns link, keeper's port and inventory.

        Args:
            wait_s: timeout of the answer in seconds; None: `join.stall_s`.
        """
        link = cls(sock, "this node's keeper", passes_memory=True, stall_s=join.stall_s)
        try:
            joined = link._ask(join, wire.Joined, wait_s=wait_s)
        except BaseException:
            link.close()
            raise
        return link, joined.port, joined.inventory

    @classmethod
    def remote(
        cls,
        address: str,
        port: int,
        key: bytes,
        *,
        stall_s: float = wire.STALL_S,
        end: float = math.inf,
    ) -> "KeeperLink":
        """Connects to another node's keeper and proves the job's key, before `end`."""
        who = f"the keeper at {address}:{port}"
        within_s = min(CONNECT_S, stall_s, end - time.monotonic())
        if within_s <= 0:
            raise DeadlineExceeded(f"no time is left for {who}")
        try:
            sock = socket.create_connection((address, port), within_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{who} did not answer within {within_s:.3g} s") from error
        except OSError as error:
            raise PeerLost(f"{who} cannot be reached: {error.strerror}") from error
        link = cls(sock, who, passes_memory=False, stall_s=stall_s)
        link.end = end
        with link._wire(CONNECT_S):
            keep_alive(sock)
            wire.prove(sock, key, who)
        return link

    @property
    def closed(self) -> bool:
        return self._sock.fileno() < 0

    def close(self) -> None:
        self._sock.close()

    def interrupt(self) -> None:
        """Ends the current wait and all later waits with PeerLost. Called from another thread."""
        with contextlib.suppress(OSError):  # already closed, here or by the keeper
            self._sock.shutdown(socket.SHUT_RDWR)

    def put(
        self,
        stamp: Stamp,
        world: int,
        rank: int,
        memory: Memory,
        blocks: Sequence[wire.Block],
    ) -> None:
        """Sends the rank's data; returns once the keeper holds and has verified the data."""
        size = os.fstat(memory.fd).st_size
        self._ask(wire.Put(stamp, world, rank, size, tuple(blocks)), wire.Done)
        with self._wire():
            if self._passes_memory:
                memory.send(self._sock)
            else:
                for start in range(0, size, wire.CHUNK_BYTES):
                    self._arm(self._stall_s)
                    count = min(wire.CHUNK_BYTES, size - start)
                    wire.send_ranges(self._sock, memory.fd, [(start, count)])
            self._arm(self._stall_s)
            self._reply(wire.Done)

    def tell(
        self,
        message: wire.Place | wire.Commit | wire.Abort | wire.Settle | wire.Fence,
        body: bytes = b"",
    ) -> None:
        """Sends a message; returns once the keeper has processed it."""
        self._ask(message, wire.Done, body)

    def gather(self, stamp: Stamp, world: int, timeout_s: float) -> list[bytes]:
        """Waits at rank 0's keeper until all ranks have placed their data; returns their manifest
        parts."""
        gather = wire.Gather(stamp, world, timeout_s)
        count = self._ask(gather, wire.Done, wait_s=timeout_s + self._stall_s).parts
        with self._wire():
            return [self._reply(wire.Done)[1] for _ in range(count)]

    def await_commit(self, stamp: Stamp, timeout_s: float) -> None:
        """Waits until rank 0 has committed the save at this keeper.

        REQUIRES: this is the keeper of the rank's own node.
        """
        self._ask(wire.Await(stamp, timeout_s), wire.Done, wait_s=timeout_s + self._stall_s)

    def look(self) -> Inventory:
        return self._ask(wire.Look(), wire.Holds).inventory

    def manifest(self, stamp: Stamp) -> bytes:
        with self._wire():
            wire.send(self._sock, wire.FetchManifest(stamp))
            return self._reply(wire.Done)[1]

    def find(self, stamp: Stamp, rank: int) -> tuple[int, Memory | None]:
        """Returns the size of a replica in bytes, and its memory. The memory is None if the keeper
        runs on another node."""
        size = self._ask(wire.Find(stamp, rank), wire.Found).size
        if not self._passes_memory:
            return size, None
        with self._wire():
            return size, Memory.received(self._sock)

    def read(self, stamp: Stamp, rank: int, wanted: Sequence[tuple[int, memoryview]]) -> None:
        """Fills each buffer from a replica, starting at the given offset; does not verify the
        data."""
        ranges = tuple((offset, len(buffer)) for offset, buffer in wanted)
        self._ask(wire.Read(stamp, rank, ranges), wire.Done)
        with self._wire():
            for _, buffer in wanted:
                wire.receive_into(self._sock, buffer)

    def _ask(
        self,
        message: wire.Request,
        kind: type[R],
        body: bytes = b"",
        wait_s: float | None = None,
    ) -> R:
        if self.end <= time.monotonic():
            raise DeadlineExceeded(f"no time is left for {self._who}")
        with self._wire(wait_s):
            wire.send(self._sock, message, body)
            return self._reply(kind)[0]

    def _reply(self, kind: type[R]) -> tuple[R, bytes]:
        reply = wire.reply_decoder.decode(wire.receive_frame(self._sock))
        body = wire.receive_body(self._sock)
        if isinstance(reply, wire.Refused):
            raise wire.ERRORS.get(reply.kind, StorageError)(reply.message)
        if not isinstance(reply, kind):
            raise ProtocolMismatch(f"{self._who} answered with {type(reply).__name__}")
        return reply, body

    def _arm(self, wait_s: float) -> None:
        """Sets the timeout of each later wait.

        Raises:
            TimeoutError: if the caller's deadline has passed.
        """
        left_s = min(wait_s, self.end - time.monotonic())
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)

    @contextlib.contextmanager
    def _wire(self, wait_s: float | None = None) -> Iterator[None]:
        """Closes the connection if it breaks or blocks the caller for longer than `wait_s` seconds
        (None: `stall_s`)."""
        try:
            self._arm(self._stall_s if wait_s is None else wait_s)
            yield
        except (PeerLost, ProtocolMismatch):
            self.close()
            raise
        except TimeoutError as error:
            self.unresponsive = True
            self.close()
            raise DeadlineExceeded(f"{self._who} did not answer in time") from error
        except StorageError:
            # An error that the keeper reported: the connection still works. NoSpace is an OSError,
            # too, so this clause must come before the next.
            raise
        except OSError as error:
            self.close()
            raise PeerLost(f"{self._who} is gone: {error.strerror or error}") from error
        except msgspec.MsgspecError as error:
            self.close()
            raise ProtocolMismatch(f"{self._who} sent an invalid message: {error}") from error


# -- the keeper of this node ---------------------------------------------------------------------------


def connect_local(place: str, node: str, linger_s: float) -> socket.socket:
    """Connects to this node's keeper.

    If FIREFLYER_KEEPER is set, its value is the socket path of the task's keeper, and the call
    connects to that keeper.
    Otherwise each place has one keeper per node, which the call starts if it does not run.

    Raises:
        PeerLost: if the keeper cannot be reached.
        ConfigError: if another user could access the socket's directory.
    """
    try:
        path, is_given = _local_path(place, node)
        if is_given:
            return _connect(path)
        with open(lock_path(path), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                return _connect(path)
            except (FileNotFoundError, ConnectionRefusedError):
                _start(path, linger_s)
                return _connect(path)
    except (OSError, subprocess.SubprocessError) as error:
        raise PeerLost(f"this node's keeper cannot be reached: {error}") from error


def _local_path(place: str, node: str) -> tuple[str, bool]:
    """Returns the socket path of this node's keeper, and True if it is the task's keeper."""
    if path := os.environ.get("FIREFLYER_KEEPER"):
        return path, True
    name = hashlib.sha256(f"{place}\0{node}".encode()).hexdigest()[:32]
    return str(_private_directory() / f"{name}.sock"), False


def local_probe(place: str, node: str) -> KeeperProbe:
    """Returns a probe of this node's keeper. The keeper answers the probe by closing the
    connection, because the probe's first message is not a `Join`."""

    def connect(sock: socket.socket) -> None:
        with _address(_local_path(place, node)[0]) as address:
            sock.connect(address)

    question = frame(msgspec.msgpack.encode(wire.Look())) + frame(b"")
    return KeeperProbe(connect, socket.AF_UNIX, question)


def remote_probe(address: str, port: int, key: bytes) -> KeeperProbe:
    """Returns a probe of another node's keeper. The keeper answers at once, whether or not it knows
    the key."""
    hello = Hello.make(wire.key_name(key), Purpose.DATA, -1, -1)
    return KeeperProbe(lambda sock: sock.connect((address, port)), socket.AF_INET, hello.raw)


@contextlib.contextmanager
def _address(path: str) -> Iterator[str]:
    """Yields a short name of a socket: an address has space for 108 bytes, a path may be longer."""
    descriptor = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{os.path.basename(path)}"
    finally:
        os.close(descriptor)


def _connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(CONNECT_S)  # a stuck keeper with a full backlog then causes an error, no hang
    try:
        with _address(path) as address:
            sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _private_directory() -> Path:
    """Returns this user's private directory of sockets.

    The directory lies in XDG_RUNTIME_DIR, or in the directory for temporary files.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    name = "fireflyer" if runtime else f"fireflyer-{os.getuid()}"
    directory = Path(runtime or tempfile.gettempdir(), name)
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o77 or not os.path.isdir(directory):
        raise ConfigError(f"{directory} must be a directory of this user alone (mode 0700)")
    return directory


def _remove_dead(directory: Path) -> None:
    """Removes the socket names of killed keepers. REQUIRES: the lock is held."""
    for path in directory.glob("*.sock"):
        with socket.socket(socket.AF_UNIX) as sock, _address(str(path)) as address:
            sock.setblocking(False)
            try:
                sock.connect(address)
            except ConnectionRefusedError:
                remove_names(str(path))
            except OSError:
                pass  # a full backlog: the keeper is alive


def _start(path: str, linger_s: float) -> None:
    """Starts a keeper detached from this process. REQUIRES: the lock is held."""
    _remove_dead(Path(path).parent)
    with socket.socket(socket.AF_UNIX) as listener, open(log_path(path), "ab") as log:
        with _address(path) as address:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address)
            listener.bind(address)
        listener.listen(256)
        os.chmod(log.fileno(), 0o600)
        command = [
            sys.executable,
            "-P",
            "-m",
            "fireflyer.checkpoint.memory.keeper",
            str(linger_s),
            path,
        ]
        # The shell starts the keeper and ends, so this process never has to reap the keeper.
        subprocess.run(
            ["/bin/sh", "-c", 'exec 3<&0; "$@" </dev/null &', "sh", *command],
            stdin=listener.fileno(),
            stdout=log,
            stderr=log,
            start_new_session=True,
            check=True,
        )
