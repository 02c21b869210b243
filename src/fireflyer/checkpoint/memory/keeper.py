"""Keeper: a node's process that holds replicas of saves in memory while the task lasts.

    python -P -m fireflyer.checkpoint.memory.keeper [LINGER_S SOCKET]

Descriptor 3 is a listening Unix socket in a private directory. Without arguments the keeper ends
with its parent, the task's supervisor. With arguments, it ends once no rank has been connected for
LINGER_S seconds. It then unlinks SOCKET under the lock that connecting ranks also hold, so no rank
connects to a keeper that is about to end.

The keeper is passive. Ranks connect to their own node's keeper by the Unix socket, and to other
nodes' keepers by TCP. A rank that connects by TCP must prove that it knows its job's key, which the
keeper got in a `Join`. Each connection has a thread, and `Keeper._lock` guards the state that the
threads share. This module does not import torch.
"""

import contextlib
import fcntl
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from fireflyer.checkpoint.memory import messages as wire
from fireflyer.checkpoint.memory.inventory import ReplicaTable, Stamp
from fireflyer.checkpoint.memory.memfd import Memory
from fireflyer.errors import (
    CheckpointError,
    DeadlineExceeded,
    FireflyerError,
    NoSpace,
    PeerLost,
    StorageError,
)
from fireflyer.program import allow_descriptors

HANDSHAKE_S = 10.0
UNPROVEN_CONNECTIONS = 64
"""Maximum number of TCP connections whose ranks have not yet proven a key."""
KEYS_KEPT = 8
"""Number of newest job attempts whose keys the keeper remembers. Ranks of older attempts can no
longer connect by TCP, and the keeper rejects saves of epochs below the fence."""


class _Replica(msgspec.Struct, frozen=True):
    memory: Memory
    size: int


class _PlaceReplicas:
    """State of one place (the name under which a job's attempts keep their saves): its replica
    table, and the memory of the replicas."""

    def __init__(self) -> None:
        self.table = ReplicaTable()
        self.stall_s = wire.STALL_S
        self.replicas: dict[tuple[Stamp, int], _Replica] = {}
        self.manifests: dict[Stamp, bytes] = {}
        self.parts: dict[Stamp, dict[int, bytes]] = {}

    def free(self, stamps: list[Stamp]) -> None:
        """Drops the saves' data; memory that a reader still uses is freed once the read has
        ended."""
        for stamp in stamps:
            self.manifests.pop(stamp, None)
            self.parts.pop(stamp, None)
        for key in [key for key in self.replicas if key[0] in stamps]:
            del self.replicas[key]


class Keeper:
    """Owner of the replicas of each place, the jobs' keys and the TCP listeners. Thread-safe."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._places: dict[str, _PlaceReplicas] = {}
        self._keys: dict[bytes, tuple[bytes, str]] = {}
        self._ports: dict[str, int] = {}
        self._unproven = threading.BoundedSemaphore(UNPROVEN_CONNECTIONS)
        self._open = 0
        self._idle_since = time.monotonic()
        self._wake, self._notify = socket.socketpair()

    def run(self, linger_s: float | None, leave: Callable[[], bool]) -> None:
        """Serves until no connection has been open for `linger_s` seconds and `leave` then returns
        True. If `linger_s` is None, serves forever."""
        while True:
            with self._lock:
                idle_s = time.monotonic() - self._idle_since
                timeout = None if linger_s is None or self._open else max(0.0, linger_s - idle_s)
            ready, _, _ = select.select([self._listener, self._wake], [], [], timeout)
            if self._wake in ready:
                self._wake.recv(4096)
            if self._listener in ready:
                self._begin(self._listener.accept()[0], self._serve_local)
            elif not ready and leave():
                return

    # -- connections -------------------------------------------------------------------------------

    def _begin(self, sock: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        with self._lock:
            self._open += 1
        threading.Thread(target=self._guarded, args=(sock, serve), daemon=True).start()

    def _guarded(self, sock: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        try:
            with sock:
                serve(sock)
        except (OSError, FireflyerError, msgspec.MsgspecError) as error:
            print(f"keeper: dropped a connection: {error}", file=sys.stderr, flush=True)  # noqa: T201
        finally:
            with self._lock:
                self._open -= 1
                self._idle_since = time.monotonic()
            self._notify.send(b".")

    def _serve_local(self, sock: socket.socket) -> None:
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():
            return
        join = _next_request(sock, HANDSHAKE_S)
        if not isinstance(join, wire.Join):
            return
        wire.receive_body(sock)
        if join.version != wire.VERSION:
            wire.send(sock, wire.Refused("CheckpointError", f"this keeper speaks {wire.VERSION}"))
            return
        try:
            place, port = self._join(join)
        except (FireflyerError, OSError) as error:
            wire.send(sock, _refusal(error))
            return
        with self._lock:
            inventory = place.table.inventory()
        wire.send(sock, wire.Joined(port, inventory))
        self._serve(sock, place, passes_memory=True)

    def _join(self, join: wire.Join) -> tuple[_PlaceReplicas, int]:
        with self._lock:
            place = self._places.setdefault(join.place, _PlaceReplicas())
            place.table.raise_fence(join.epoch)
            available = _available_bytes() // join.share + place.table.used_bytes
            place.stall_s = join.stall_s
            place.table.limit_bytes = join.limit_bytes or available // 2
            name = wire.key_name(join.key)
            self._keys.pop(name, None)
            self._keys[name] = (join.key, join.place)
            for old in list(self._keys)[:-KEYS_KEPT]:
                del self._keys[old]
            if join.address not in self._ports:
                listener = socket.create_server((join.address, 0), backlog=256)
                self._ports[join.address] = listener.getsockname()[1]
                threading.Thread(target=self._listen, args=(listener,), daemon=True).start()
            return place, self._ports[join.address]

    def _listen(self, listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            if self._unproven.acquire(blocking=False):
                self._begin(sock, self._serve_remote)
            else:
                sock.close()  # limits the cost of a flood of unauthenticated connections

    def _serve_remote(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(HANDSHAKE_S)
            key = wire.admit(sock, self._key)
        finally:
            self._unproven.release()
        if key is None:
            return
        with self._lock:
            place = self._places[self._keys[wire.key_name(key)][1]]
        keep_alive(sock)
        self._serve(sock, place, passes_memory=False)

    def _key(self, name: bytes) -> bytes | None:
        with self._lock:
            return self._keys.get(name, (None, ""))[0]

    def _serve(self, sock: socket.socket, place: _PlaceReplicas, passes_memory: bool) -> None:
        """Answers requests until the rank disconnects."""
        while (request := _next_request(sock, place.stall_s)) is not None:
            try:
                self._answer(sock, place, request, passes_memory)
            except FireflyerError as error:
                if type(error).__name__ not in wire.ERRORS:
                    raise  # a wire error: this connection is over
                wire.send(sock, _refusal(error))

    # -- requests ----------------------------------------------------------------------------------

    def _answer(
        self, sock: socket.socket, place: _PlaceReplicas, request: wire.Request, passes_memory: bool
    ) -> None:
        body = wire.receive_body(sock)
        table = place.table
        match request:
            case wire.Put():
                self._put(sock, place, request, passes_memory)
            case wire.Find() | wire.Read():
                self._show(sock, place, request, passes_memory)
            case wire.Gather():
                parts = self._gather(place, request)
                wire.send(sock, wire.Done(len(parts)))
                for part in parts:
                    wire.send(sock, wire.Done(), part)
            case wire.Await():
                self._await(place, request)
                wire.send(sock, wire.Done())
            case wire.Look():
                with self._lock:
                    inventory = table.inventory()
                wire.send(sock, wire.Holds(inventory))
            case wire.FetchManifest():
                with self._lock:
                    manifest = place.manifests.get(request.stamp)
                if manifest is None:
                    raise StorageError(f"no manifest of step {request.stamp.step} is held here")
                wire.send(sock, wire.Done(), manifest)
            case wire.Join():
                raise CheckpointError("this connection has already joined")
            case _:
                with self._lock:
                    self._change(place, request, body)
                    self._changed.notify_all()
                wire.send(sock, wire.Done())

    def _change(
        self,
        place: _PlaceReplicas,
        request: wire.Place | wire.Commit | wire.Abort | wire.Settle | wire.Fence,
        body: bytes,
    ) -> None:
        """Applies a request that changes the replica table. REQUIRES: the lock is held."""
        table = place.table
        match request:
            case wire.Place(stamp, world, rank, error):
                table.place(stamp, world, rank, error)
                place.parts.setdefault(stamp, {})[rank] = body
            case wire.Commit(stamp, world):
                place.free(table.commit(stamp, world))
                if table.newest() == stamp:
                    place.manifests[stamp] = body
                    place.parts.pop(stamp, None)
            case wire.Settle(stamp, world):
                place.free(table.settle(stamp, world))
                if stamp is not None and table.newest() == stamp:
                    place.manifests[stamp] = body
            case wire.Abort(stamp):
                place.free(table.abort(stamp))
            case wire.Fence(epoch):
                table.raise_fence(epoch)

    def _put(
        self, sock: socket.socket, place: _PlaceReplicas, put: wire.Put, passes_memory: bool
    ) -> None:
        wire.check_blocks(put.blocks, put.size)
        table, key = place.table, (put.stamp, put.rank)
        with self._lock:
            place.free(table.reserve(*key, put.size))
            place.replicas.pop(key, None)
        try:
            wire.send(sock, wire.Done())
            memory = Memory.received(sock) if passes_memory else _receive_memory(sock, put.size)
            memory.require(put.size)
            wire.verify(memory.view(put.size), put.blocks, f"the replica of rank {put.rank}")
            with self._lock:
                table.hold(put.stamp, put.world, put.rank)
                place.replicas[key] = _Replica(memory, put.size)
        finally:
            with self._lock:
                table.release(*key)
        wire.send(sock, wire.Done())

    def _gather(self, place: _PlaceReplicas, gather: wire.Gather) -> list[bytes]:
        """Waits until the data of all ranks is in place; returns the ranks' manifest parts in rank
        order."""
        stamp = gather.stamp
        with self._changed:
            self._changed.wait_for(
                lambda: not place.table.missing(stamp, gather.world), gather.timeout_s
            )
            if missing := place.table.missing(stamp, gather.world):
                names = ", ".join(map(str, missing))
                raise DeadlineExceeded(
                    f"no replica from rank(s) {names} within {gather.timeout_s:.3g} s"
                )
            return [part for _, part in sorted(place.parts[stamp].items())]

    def _await(self, place: _PlaceReplicas, wait: wire.Await) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: place.table.decided(wait.stamp) is not None, wait.timeout_s
            )
            decided = place.table.decided(wait.stamp)
        if decided is None:
            raise DeadlineExceeded(f"rank 0 did not commit it within {wait.timeout_s:.3g} s")
        if not decided:
            raise CheckpointError("rank 0 gave up this save; see its error")

    def _show(
        self,
        sock: socket.socket,
        place: _PlaceReplicas,
        request: wire.Find | wire.Read,
        passes_memory: bool,
    ) -> None:
        with self._lock:
            replica = place.replicas.get((request.stamp, request.rank))
        if replica is None:
            raise StorageError(
                f"no replica of rank {request.rank} of step {request.stamp.step} is held here"
            )
        if isinstance(request, wire.Find):
            wire.send(sock, wire.Found(replica.size))
            if passes_memory:
                replica.memory.send(sock)
            return
        for offset, count in request.ranges:
            if not 0 <= offset <= offset + count <= replica.size:
                raise CheckpointError(
                    f"a replica of {replica.size} bytes has no {count} bytes at byte {offset}"
                )
        wire.send(sock, wire.Done())
        wire.send_ranges(sock, replica.memory.fd, request.ranges)


def _next_request(sock: socket.socket, stall_s: float) -> wire.Request | None:
    """Returns the next message's head; None if the stream ends before the message.

    A rank may be idle for hours between messages, but for at most `stall_s` within a message.
    """
    sock.settimeout(None)
    if not sock.recv(1, socket.MSG_PEEK):
        return None
    sock.settimeout(stall_s)
    return wire.request_decoder.decode(wire.receive_frame(sock))


def _receive_memory(sock: socket.socket, size: int) -> Memory:
    buffer = memoryview(bytearray(min(size, wire.CHUNK_BYTES)))

    def chunks() -> Iterator[memoryview]:
        left = size
        while left:
            piece = buffer[: min(left, len(buffer))]
            wire.receive_into(sock, piece)
            left -= len(piece)
            yield piece

    try:
        return Memory.filled(chunks())
    except NoSpace as error:
        # Ends the connection: the rest of the replica's bytes would be read as the next message.
        raise PeerLost(str(error)) from error


def _available_bytes() -> int:
    """Returns the number of bytes of memory available for new pages."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    raise CheckpointError("/proc/meminfo has no MemAvailable")


def _refusal(error: Exception) -> wire.Refused:
    kind = type(error).__name__
    return wire.Refused(kind if kind in wire.ERRORS else "StorageError", str(error))


def keep_alive(sock: socket.socket) -> None:
    """Sets TCP keepalive, so that the loss of a node is detected within two minutes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _leave(listener: socket.socket, path: str) -> bool:
    """Ends the process; returns False instead if a rank waits to be accepted.

    Ranks connect under the same lock. The process removes the socket's name before it ends, so no
    rank connects to the ended keeper.
    """
    with open(lock_path(path), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if select.select([listener], [], [], 0)[0]:
            return False
        remove_names(path)
        os._exit(0)  # the listening socket closes while the lock is still held


def lock_path(path: str) -> str:
    """Returns the path of the lock file that all keepers' sockets in one directory share."""
    return os.path.join(os.path.dirname(path), "lock")


def log_path(path: str) -> str:
    """Returns the path of the log of a socket's keeper."""
    return f"{path.removesuffix('.sock')}.log"


def remove_names(path: str) -> None:
    """Removes an ended keeper's socket name, and its log if the log is empty.

    REQUIRES: the lock is held.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with contextlib.suppress(FileNotFoundError):
        if not os.path.getsize(log_path(path)):
            os.unlink(log_path(path))


def main(arguments: list[str]) -> None:
    """Serves on descriptor 3."""
    os.closerange(4, 2**31 - 1)  # descriptors inherited from the starting process
    allow_descriptors()
    os.set_inheritable(3, False)
    listener = socket.socket(fileno=3)
    if arguments:
        path = arguments[1]
        Keeper(listener).run(float(arguments[0]), lambda: _leave(listener, path))
    else:
        Keeper(listener).run(None, lambda: False)


if __name__ == "__main__":
    main(sys.argv[1:])
