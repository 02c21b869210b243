"""A rank's connections to keepers, and how it starts the one of its node outside the platform."""

import contextlib
import fcntl
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from fireflyer.checkpoint import tierwire as wire
from fireflyer.checkpoint.keeper import keep_alive, lock_path
from fireflyer.checkpoint.memfd import Memory
from fireflyer.checkpoint.tiers import Inventory, Stamp
from fireflyer.errors import (
    ConfigError,
    DeadlineExceeded,
    PeerLost,
    ProtocolMismatch,
    StorageError,
)

CONNECT_S = 10.0

R = TypeVar("R", wire.Joined, wire.Done, wire.Found, wire.Holds)


class KeeperLink:
    """One connection to one keeper, about one place. For one thread at a time: who shares it takes `busy`.

    Every method raises what the keeper refuses with (CheckpointError, NoSpace, Corrupted, StorageError,
    DeadlineExceeded); PeerLost if the keeper is gone; ProtocolMismatch if it speaks otherwise. After
    the last two, and after a DeadlineExceeded of the connection, the link is closed.
    """

    def __init__(self, sock: socket.socket, who: str, passes_memory: bool) -> None:
        self._sock = sock
        weakref.finalize(self, sock.close)  # also where it is lost in a cycle
        self._who = who
        self._passes_memory = passes_memory
        self.busy = threading.Lock()

    @classmethod
    def local(cls, sock: socket.socket, join: wire.Join) -> tuple["KeeperLink", int, Inventory]:
        """Joins over a connected Unix socket; also the port of the keeper and what it holds."""
        sock.settimeout(wire.STALL_S)
        link = cls(sock, "this node's keeper", passes_memory=True)
        try:
            joined = link._ask(join, wire.Joined)
        except BaseException:
            link.close()
            raise
        return link, joined.port, joined.inventory

    @classmethod
    def remote(cls, address: str, port: int, key: bytes) -> "KeeperLink":
        """Connects to another node's keeper and proves the job's key."""
        who = f"the keeper at {address}:{port}"
        try:
            sock = socket.create_connection((address, port), CONNECT_S)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{who} did not answer within {CONNECT_S:g} s") from error
        except OSError as error:
            raise PeerLost(f"{who} cannot be reached: {error.strerror}") from error
        link = cls(sock, who, passes_memory=False)
        with link._wire():
            keep_alive(sock)
            wire.prove(sock, key, who)
            sock.settimeout(wire.STALL_S)
        return link

    @property
    def closed(self) -> bool:
        return self._sock.fileno() < 0

    def close(self) -> None:
        self._sock.close()

    def put(
        self,
        stamp: Stamp,
        world: int,
        rank: int,
        memory: Memory,
        blocks: Sequence[wire.Block],
    ) -> None:
        """Returns when the keeper holds the rank's data and has checked it."""
        size = os.fstat(memory.fd).st_size
        self._ask(wire.Put(stamp, world, rank, size, tuple(blocks)), wire.Done)
        with self._wire():
            if self._passes_memory:
                memory.send(self._sock)
            else:
                wire.send_ranges(self._sock, memory.fd, [(0, size)])
            self._reply(wire.Done)

    def tell(
        self,
        message: wire.Place | wire.Commit | wire.Abort | wire.Settle | wire.Fence,
        body: bytes = b"",
    ) -> None:
        """Returns when the keeper has taken it in."""
        self._ask(message, wire.Done, body)

    def gather(self, stamp: Stamp, world: int, timeout_s: float) -> list[bytes]:
        """The ranks' parts, once all have placed their data; at rank 0's keeper."""
        self._sock.settimeout(timeout_s + wire.STALL_S)
        count = self._ask(wire.Gather(stamp, world, timeout_s), wire.Done).parts
        self._sock.settimeout(wire.STALL_S)
        with self._wire():
            return [self._reply(wire.Done)[1] for _ in range(count)]

    def await_commit(self, stamp: Stamp, timeout_s: float) -> None:
        """Returns when the save is committed; at the rank's own keeper, which holds its data."""
        self._sock.settimeout(timeout_s + wire.STALL_S)
        self._ask(wire.Await(stamp, timeout_s), wire.Done)
        self._sock.settimeout(wire.STALL_S)

    def look(self) -> Inventory:
        return self._ask(wire.Look(), wire.Holds).inventory

    def manifest(self, stamp: Stamp) -> bytes:
        with self._wire():
            wire.send(self._sock, wire.FetchManifest(stamp))
            return self._reply(wire.Done)[1]

    def find(self, stamp: Stamp, rank: int) -> tuple[int, Memory | None]:
        """Bytes of a replica; its memory too if this is the node's own keeper."""
        size = self._ask(wire.Find(stamp, rank), wire.Found).size
        if not self._passes_memory:
            return size, None
        with self._wire():
            return size, Memory.received(self._sock)

    def read(self, stamp: Stamp, rank: int, wanted: Sequence[tuple[int, memoryview]]) -> None:
        """Fills buffers from a replica, each from its first byte on; unchecked."""
        ranges = tuple((offset, len(buffer)) for offset, buffer in wanted)
        self._ask(wire.Read(stamp, rank, ranges), wire.Done)
        with self._wire():
            for _, buffer in wanted:
                wire.receive_into(self._sock, buffer)

    def _ask(self, message: wire.Request, kind: type[R], body: bytes = b"") -> R:
        with self._wire():
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

    @contextlib.contextmanager
    def _wire(self) -> Iterator[None]:
        """Closes the connection when it breaks."""
        try:
            yield
        except (PeerLost, ProtocolMismatch):
            self.close()
            raise
        except TimeoutError as error:
            self.close()
            raise DeadlineExceeded(f"{self._who} did not answer in time") from error
        except OSError as error:
            self.close()
            raise PeerLost(f"{self._who} is gone: {error.strerror or error}") from error
        except msgspec.MsgspecError as error:
            self.close()
            raise ProtocolMismatch(f"{self._who} sent what is no message: {error}") from error


# -- the keeper of this node ---------------------------------------------------------------------------


def connect_local(place: str, node: str, linger_s: float) -> socket.socket:
    """A connection to this node's keeper: the task's (FIREFLYER_KEEPER), else one of its own for
    the place and node, started if there is none.

    Raises:
        PeerLost: if it cannot be reached.
        ConfigError: if another user could reach its directory.
    """
    try:
        if path := os.environ.get("FIREFLYER_KEEPER"):
            return _connect(path)
        name = hashlib.sha256(f"{place}\0{node}".encode()).hexdigest()[:32]
        path = str(_private_directory() / f"{name}.sock")
        with open(lock_path(path), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                return _connect(path)
            except (FileNotFoundError, ConnectionRefusedError):
                _start(path, linger_s)
                return _connect(path)
    except (OSError, subprocess.SubprocessError) as error:
        raise PeerLost(f"this node's keeper cannot be reached: {error}") from error


@contextlib.contextmanager
def _address(path: str) -> Iterator[str]:
    """A short name of a socket: an address holds 108 bytes, a path may be longer."""
    descriptor = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{os.path.basename(path)}"
    finally:
        os.close(descriptor)


def _connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        with _address(path) as address:
            sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _private_directory() -> Path:
    """Under XDG_RUNTIME_DIR, or in the directory for temporary files; only for this user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    name = "fireflyer" if runtime else f"fireflyer-{os.getuid()}"
    directory = Path(runtime or tempfile.gettempdir(), name)
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o77 or not os.path.isdir(directory):
        raise ConfigError(f"{directory} must be a directory of this user alone (mode 0700)")
    return directory


def _start(path: str, linger_s: float) -> None:
    """Starts a keeper that is nobody's child. REQUIRES: the lock is held."""
    with socket.socket(socket.AF_UNIX) as listener, open(f"{path[:-5]}.log", "ab") as log:
        with _address(path) as address:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address)
            listener.bind(address)
        listener.listen(256)
        os.chmod(log.fileno(), 0o600)
        command = [sys.executable, "-P", "-m", "fireflyer.checkpoint.keeper", str(linger_s), path]
        # A shell that starts it and ends: so the keeper has no parent that would have to reap it.
        subprocess.run(
            ["/bin/sh", "-c", 'exec 3<&0; "$@" </dev/null &', "sh", *command],
            stdin=listener.fileno(),
            stdout=log,
            stderr=log,
            start_new_session=True,
            check=True,
        )
