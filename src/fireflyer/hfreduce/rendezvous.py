"""How the ranks of a group find each other: who shares a host, which sockets join them.

Every rank publishes a card in a store and reads everybody's. Ranks of one host are joined by Unix sockets
(every pair), over which segments are passed; hosts are joined by one TCP ring a lane. Sockets are opened
and authenticated here and then belong to the native engine.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from typing import Protocol

import msgspec

from fireflyer._native import hfreduce as native
from fireflyer.errors import CollectiveError, DeadlineExceeded, ProtocolMismatch
from fireflyer.log import get_logger

_NONCE_BYTES = 32
_MAC_BYTES = 32
_HELLO = struct.Struct(f"<4sI{_NONCE_BYTES}s")
_MAGIC = b"ffr1"


class Store(Protocol):
    """What the rendezvous needs of a store; `torch.distributed` stores have it. `get` blocks."""

    def set(self, key: str, value: str) -> object: ...

    def get(self, key: str) -> bytes: ...


class Card(msgspec.Struct, frozen=True):
    """What a rank tells the others about itself."""

    machine: str
    """Boot id: equal for all processes that share cores."""
    host: str
    """Equal for ranks that may share memory: boot id, network namespace and FIREFLYER_NODE."""
    unix: str
    """Name of its abstract Unix socket, without the leading zero byte."""
    address: str
    port: int


@dataclass(frozen=True)
class Topology:
    """Who is where, computed alike by every rank from all cards.

    Attributes:
        hosts: the ranks of each host, both in order of rank.
        lanes: rings between the hosts: the size of the smallest host; 0 with one host.
    """

    hosts: tuple[tuple[int, ...], ...]
    lanes: int

    @classmethod
    def of(cls, cards: list[Card]) -> "Topology":
        by_host: dict[str, list[int]] = {}
        for rank, card in enumerate(cards):
            by_host.setdefault(card.host, []).append(rank)
        hosts = tuple(tuple(ranks) for ranks in by_host.values())
        return cls(hosts, min(map(len, hosts)) if len(hosts) > 1 else 0)

    def place(self, rank: int) -> tuple[int, int]:
        """Index of the rank's host, and its place among that host's ranks."""
        for index, ranks in enumerate(self.hosts):
            if rank in ranks:
                return index, ranks.index(rank)
        raise ValueError(f"rank {rank} is on no host")


def connect(
    store: Store, rank: int, world: int, timeout_s: float, master: str = "127.0.0.1"
) -> native.Group:
    """Joins `world` ranks into a native group. Collective.

    Args:
        store: shared by exactly these ranks, with no keys of an earlier group.
        timeout_s: for each operation of the group, and for this call.
        master: the address whose route tells which interface to listen on (MASTER_ADDR).

    Raises:
        CollectiveError: too many ranks on one host.
        DeadlineExceeded: a rank did not arrive in time.
        ProtocolMismatch: a peer failed to prove the secret.
        NoSpace: shared memory was refused.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        unix = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        name = f"fireflyer-{os.getpid()}-{secrets.token_hex(12)}"
        unix.bind("\0" + name)
        unix.listen(world)
        address = interface_address(master)
        tcp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        tcp.bind((address, 0))
        tcp.listen(16)
        boot = _boot_id()
        card = Card(boot, _host_key(boot), name, address, tcp.getsockname()[1])
        cards = _exchange(store, rank, world, card)
        topology = Topology.of(cards)
        index, me = topology.place(rank)
        team = topology.hosts[index]
        members = _join_host(unix, cards, team, me, deadline)
        control = _share_control([fd for _, fd, _ in members], me) if len(team) > 1 else -1
    here = sum(c.machine == card.machine for c in cards)
    return native.Group(
        rank=rank,
        world=world,
        timeout_s=timeout_s,
        spin=here <= len(os.sched_getaffinity(0)),
        control=control,
        members=members,
        me=me,
    )


def interface_address(master: str) -> str:
    """The IPv4 address that peers reach this process at: of FIREFLYER_IFNAME, or of the route to `master`.

    Raises:
        CollectiveError: the interface is unknown or has no IPv4 address.
    """
    if name := os.environ.get("FIREFLYER_IFNAME"):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("16s24x", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe, 0x8915, request)  # SIOCGIFADDR
            except OSError as error:
                raise CollectiveError(
                    f"FIREFLYER_IFNAME={name}: no IPv4 address on that interface ({error.strerror})"
                ) from error
        return socket.inet_ntoa(answer[20:24])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))  # sends nothing; only asks for the route
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _host_key(boot: str) -> str:
    namespace = os.stat("/proc/self/ns/net").st_ino
    return f"{boot}/{namespace}/{os.environ.get('FIREFLYER_NODE', '')}"


def _exchange(store: Store, rank: int, world: int, card: Card) -> list[Card]:
    store.set(f"card/{rank}", msgspec.json.encode(card).decode())
    return [msgspec.json.decode(store.get(f"card/{r}"), type=Card) for r in range(world)]


def _remaining(deadline: float, what: str) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded(f"rendezvous: {what} did not happen in time")
    return left


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError("the other side closed the connection")
        data += more
    return data


def _join_host(
    listener: socket.socket, cards: list[Card], team: tuple[int, ...], me: int, deadline: float
) -> list[tuple[int, int, int]]:
    """(rank, socket, pidfd) of every member; the later rank of a pair connects. Only processes of this
    user are accepted."""
    joined: dict[int, tuple[int, int]] = {me: (-1, -1)}
    for place in range(me):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.connect("\0" + cards[team[place]].unix)
        peer.sendall(struct.pack("<I", me))
        joined[place] = _with_process(peer)
    while len(joined) < len(team):
        listener.settimeout(_remaining(deadline, "joining the ranks of this host"))
        try:
            peer, _ = listener.accept()
        except TimeoutError as error:
            missing = [team[p] for p in range(len(team)) if p not in joined]
            raise DeadlineExceeded(f"rendezvous: ranks {missing} did not connect") from error
        if _credentials(peer)[1] != os.getuid():
            peer.close()
            continue
        peer.settimeout(_remaining(deadline, "joining the ranks of this host"))
        (place,) = struct.unpack("<I", _receive(peer, 4))
        peer.setblocking(True)
        joined[place] = _with_process(peer)
    return [(rank, *joined[place]) for place, rank in enumerate(team)]


def _credentials(peer: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the other end of a Unix socket."""
    pid, uid, gid = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid


def _with_process(peer: socket.socket) -> tuple[int, int]:
    """The socket, and a pidfd of its process (-1 where that is in no namespace of ours)."""
    pid = _credentials(peer)[0]
    return peer.detach(), os.pidfd_open(pid) if pid > 0 else -1


def _share_control(sockets: list[int], me: int) -> int:
    """The control segment: made by the host's first rank and passed to the others."""
    if me == 0:
        control = native.create_segment("fireflyer-control", native.control_bytes(len(sockets)))
        for fd in sockets[1:]:
            with socket.socket(fileno=os.dup(fd)) as peer:
                socket.send_fds(peer, [b"c"], [control])
        return control
    with socket.socket(fileno=os.dup(sockets[0])) as first:
        data, fds, _, _ = socket.recv_fds(first, 1, 1)
    if not data or not fds:
        raise CollectiveError("rendezvous: the first rank of this host left before sharing memory")
    return fds[0]


def _ring_key(store: Store, rank: int, address: str) -> bytes:
    """The job's secret; without one, a random key through the store, which is only as safe as it."""
    if secret := os.environ.get("FIREFLYER_SECRET"):
        return secret.encode()
    if rank == 0:
        store.set("key", secrets.token_hex(32))
        if not address.startswith("127."):
            get_logger("hfreduce").warning(
                "no FIREFLYER_SECRET: connections beyond this machine are only as safe as the store"
            )
    return store.get("key")


def _proof(key: bytes, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, role + b"".join(parts), hashlib.sha256)


