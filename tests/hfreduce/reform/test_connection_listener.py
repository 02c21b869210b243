"""Who is admitted at a connection listener, who is not, and what stays when it closes."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.waiting import LIMIT_S
from torch.distributed import HashStore

from fireflyer import finalizer
from fireflyer.errors import DeadlineExceeded, PeerLost, ProtocolMismatch, RankFailed
from fireflyer.hfreduce.rendezvous import connection_listener, handshake
from fireflyer.hfreduce.rendezvous.connection_listener import (
    ConnectionListener,
    GroupEndpoint,
    discard,
    open_listener,
)
from fireflyer.hfreduce.rendezvous.establish import Connection, connect
from fireflyer.hfreduce.rendezvous.handshake import Hello, Purpose
from fireflyer.hfreduce.rendezvous.payload_links import Links
from fireflyer.hfreduce.topology import RankInfo

GROUP = b"sixteen bytes it"
KEY = b"right"


@pytest.fixture
def listener() -> Iterator[ConnectionListener]:
    listener = open_listener()
    yield listener
    listener.release()


def far(info: RankInfo) -> RankInfo:
    """The same process as seen from another host: reached by TCP."""
    return RankInfo("elsewhere", "elsewhere", info.unix, info.address, info.port)


def seen(listener: ConnectionListener, remote: bool) -> RankInfo:
    info = listener.info("127.0.0.1")
    return far(info) if remote else info


def soon() -> float:
    return time.monotonic() + 30


def taken(endpoint: GroupEndpoint) -> socket.socket:
    """The payload connection of rank 0."""
    rank, sock = endpoint.take(Purpose.DATA, [0], soon())
    assert rank == 0
    return sock


@pytest.fixture
def endpoints(listener: ConnectionListener) -> Iterator[tuple[GroupEndpoint, GroupEndpoint]]:
    """Rank 0's endpoint, which dials, and rank 1's, which is dialled; on one listener, so under two
    numbers."""
    caller = GroupEndpoint(listener, GROUP, 0, KEY)
    callee = listener.endpoint(GROUP, 1, KEY)
    yield caller, callee
    caller.close()
    callee.close()


@pytest.mark.parametrize("remote", [False, True])
def test_a_dial_needs_nobody_but_the_acceptor(
    listener: ConnectionListener, endpoints: tuple[GroupEndpoint, GroupEndpoint], remote: bool
) -> None:
    caller, callee = endpoints
    there = caller.dial(1, seen(listener, remote), Purpose.DATA, 10)
    here = taken(callee)
    assert there.family == (socket.AF_INET if remote else socket.AF_UNIX)
    there.sendall(b"payload")
    assert here.recv(100) == b"payload"
    discard(there)
    assert here.recv(1) == b""
    discard(here)


def test_purposes_are_kept_apart_and_a_handler_gets_what_came_before(
    listener: ConnectionListener, endpoints: tuple[GroupEndpoint, GroupEndpoint]
) -> None:
    caller, callee = endpoints
    info = seen(listener, True)
    sockets = [caller.dial(1, info, purpose, 10) for purpose in (Purpose.DATA, Purpose.POST)]
    got: list[int] = []

    def handler(rank: int, sock: socket.socket) -> None:
        got.append(rank)
        discard(sock)

    while callee.callers(Purpose.POST) != [0]:
        os.sched_yield()
    callee.serve(Purpose.POST, handler)
    assert got == [0]
    sockets.append(caller.dial(1, info, Purpose.POST, 10))
    assert sockets[2].recv(1) == b""
    assert got == [0, 0]
    for sock in (*sockets, taken(callee)):
        discard(sock)


def test_another_secret_is_noticed_on_both_sides(listener: ConnectionListener) -> None:
    callee = listener.endpoint(GROUP, 1, KEY)
    stranger = GroupEndpoint(listener, GROUP, 0, b"wrong")
    with pytest.raises(ProtocolMismatch, match="rank 1"):
        stranger.dial(1, seen(listener, True), Purpose.DATA, 10)
    with pytest.raises(ProtocolMismatch, match="rank 0"):
        callee.take(Purpose.DATA, [0], soon())
    callee.close()


def test_a_caller_with_a_false_proof_is_refused(
    listener: ConnectionListener, endpoints: tuple[GroupEndpoint, GroupEndpoint]
) -> None:
    info = seen(listener, True)
    hello = Hello.make(GROUP, Purpose.DATA, 0, 1)
    with socket.create_connection((info.address, info.port)) as sock:
        sock.sendall(hello.raw)
        answer = sock.recv(1 + handshake.NONCE_BYTES + handshake.PROOF_BYTES, socket.MSG_WAITALL)
        challenge, theirs = answer[1:33], answer[33:]
        assert handshake.proven(theirs, KEY, b"callee", hello, challenge)
        sock.sendall(theirs)  # its own proof, sent back
        assert sock.recv(1) == handshake.REFUSED
    with pytest.raises(ProtocolMismatch, match="did not prove"):
        endpoints[1].take(Purpose.DATA, [0], soon())


@pytest.mark.parametrize("remote", [False, True])
def test_a_call_for_a_closed_line_is_turned_away(
    listener: ConnectionListener, endpoints: tuple[GroupEndpoint, GroupEndpoint], remote: bool
) -> None:
    caller, callee = endpoints
    info = seen(listener, remote)
    other = listener.endpoint(GROUP, 2, KEY)
    other.close()
    with pytest.raises(PeerLost, match="not in this group"):
        caller.dial(2, info, Purpose.DATA, 10)
    callee.close()
    with pytest.raises(PeerLost, match="not in this group"):
        caller.dial(1, info, Purpose.DATA, 10)


@pytest.mark.parametrize("remote", [False, True])
def test_two_members_of_a_group_in_one_process_are_called_by_their_ranks(
    listener: ConnectionListener, endpoints: tuple[GroupEndpoint, GroupEndpoint], remote: bool
) -> None:
    caller, first = endpoints
    info = seen(listener, remote)
    with pytest.raises(ValueError, match="number and rank"):
        listener.endpoint(GROUP, 1, KEY)
    second = listener.endpoint(GROUP, 2, KEY)
    sockets = [caller.dial(rank, info, Purpose.DATA, 10) for rank in (2, 1)]
    sockets += [endpoint.take(Purpose.DATA, [0], soon())[1] for endpoint in (first, second)]
    sockets[0].sendall(b"2")
    assert sockets[3].recv(1) == b"2"
    for sock in sockets:
        discard(sock)


@pytest.mark.parametrize("remote", [False, True])
def test_a_call_before_the_line_is_there_waits_for_it(
    listener: ConnectionListener, remote: bool
) -> None:
    caller = GroupEndpoint(listener, GROUP, 0, KEY)
    info = seen(listener, remote)
    with pytest.raises(DeadlineExceeded, match="rank 1"):
        caller.dial(1, info, Purpose.DATA, 0.05)
    result: list[Any] = []
    dialler = threading.Thread(target=lambda: result.append(caller.dial(1, info, Purpose.DATA, 30)))
    dialler.start()
    while not any(c.hello is not None for c in listener._callers.values()):
        os.sched_yield()
    callee = listener.endpoint(GROUP, 1, KEY)
    dialler.join()
    for sock in (*result, taken(callee)):
        discard(sock)
    callee.close()


def test_strangers_delay_nobody(
    listener: ConnectionListener,
    endpoints: tuple[GroupEndpoint, GroupEndpoint],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_listener, "HANDSHAKE_S", 1000.0)  # none of them expires
    caller, callee = endpoints
    info = seen(listener, True)
    with contextlib.ExitStack() as stack:
        where = (info.address, info.port)
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n" * 8, b"ffr2", os.urandom(4000)):
            for _ in range(20):
                stranger = stack.enter_context(socket.create_connection(where))
                with contextlib.suppress(OSError):
                    stranger.sendall(noise)
        for _ in range(connection_listener.MOST_CALLERS + 20):  # more than may wait at a time
            stack.enter_context(socket.create_connection(where))
        there = caller.dial(1, info, Purpose.DATA, 60)
        for sock in (there, taken(callee)):
            discard(sock)
    assert len(listener._callers) <= connection_listener.MOST_CALLERS


def test_who_says_nothing_is_turned_away_in_time(
    listener: ConnectionListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_listener, "HANDSHAKE_S", 0.05)
    info = seen(listener, True)
    with socket.create_connection((info.address, info.port)) as stranger:
        stranger.settimeout(LIMIT_S)
        assert stranger.recv(1) == b""


def test_take_says_who_is_missing_and_asks_whether_to_go_on(
    listener: ConnectionListener, endpoints: tuple[GroupEndpoint, GroupEndpoint]
) -> None:
    caller, callee = endpoints
    there = caller.dial(1, seen(listener, False), Purpose.TEAM, 10)
    with pytest.raises(DeadlineExceeded, match=r"\[2, 3\]"):
        callee.take(Purpose.TEAM, {2, 3}, time.monotonic() + 0.01)
    rank, here = callee.take(Purpose.TEAM, {0, 2}, soon())
    assert rank == 0
    for sock in (here, there):
        discard(sock)

    def check() -> None:
        raise RankFailed("rank 3 died", 3)

    with pytest.raises(RankFailed):
        callee.take(Purpose.TEAM, [3], soon(), check)


def test_listeners_and_thread_go_with_the_last_user() -> None:
    def resources() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    open_listener().release()  # /dev/null of the fork guard stays open
    before = resources()
    listener = open_listener()
    assert open_listener() is listener
    info = listener.info("127.0.0.1")
    endpoint = listener.endpoint(GROUP, 1, KEY)
    caller = GroupEndpoint(listener, GROUP, 0, KEY)
    held = [caller.dial(1, c, Purpose.DATA, 10) for c in (info, far(info))]
    stranger = socket.create_connection((info.address, info.port))
    listener.release()
    assert threading.active_count() == before[1] + 1
    endpoint.close()
    for sock in held:
        assert sock.recv(1) == b"", "nobody took it"
        discard(sock)
    listener.release()
    with contextlib.suppress(ConnectionResetError):  # where it was still in the backlog
        assert stranger.recv(1) == b""
    stranger.close()
    assert resources() == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((info.address, info.port))


def test_a_group_may_be_dropped_by_a_thread_that_holds_the_board(
    listener: ConnectionListener,
) -> None:
    """Wherever the garbage collector finds it."""
    connection: Connection = connect(HashStore(), 0, 1, 10.0)
    endpoint = connection.slot.endpoint
    with listener._lock:
        del connection
    left = threading.Event()
    finalizer.later(left.set)
    assert left.wait(LIMIT_S)
    assert listener.find(endpoint.number, 0) is None


class _Hasty(ConnectionListener):
    """Its thread has ended, by a caller that woke it, before `release` goes on."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_closing" and value:
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect("\0" + self.unix)
                self._thread.join()


def test_a_thread_that_ends_early_is_no_trouble_to_the_last_user() -> None:
    listener = _Hasty()
    listener.users += 1
    listener.release()
    assert listener._wake_sender.fileno() == -1


@pytest.mark.parametrize("remote", [False, True])
def test_a_forked_child_holds_no_connection_and_disturbs_none(
    listener: ConnectionListener, endpoints: tuple[GroupEndpoint, GroupEndpoint], remote: bool
) -> None:
    caller, callee = endpoints
    there = caller.dial(1, seen(listener, remote), Purpose.DATA, 10)
    here = taken(callee)
    report, reporter = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            callee.close()
            listener.release()
            discard(here)
            other = open_listener()  # the child may have groups of its own
            assert other is not listener
            other.release()
            os.write(reporter, b"well")
        signal.pause()
    assert os.read(report, 4) == b"well"
    there.sendall(b"still here")
    assert here.recv(100) == b"still here"
    again = caller.dial(1, seen(listener, remote), Purpose.DATA, 10)
    discard(here)
    assert there.recv(1) == b"", "the child holds a copy"
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    for sock in (there, again):
        discard(sock)
    os.close(report)
    os.close(reporter)


class Taken:
    """A target as the engine is one."""

    def __init__(self) -> None:
        self.outgoing: dict[int, int] = {}
        self.incoming: dict[int, int] = {}

    def add_outgoing(self, rank: int, fd: int) -> None:
        assert rank not in self.outgoing
        self.outgoing[rank] = fd

    def add_incoming(self, rank: int, fd: int) -> None:
        assert rank not in self.incoming
        self.incoming[rank] = fd

    def close(self) -> None:
        for fd in (*self.outgoing.values(), *self.incoming.values()):
            os.close(fd)


def test_links_are_dialled_once_by_whoever_needs_them_first(listener: ConnectionListener) -> None:
    info = seen(listener, True)
    peers = [listener.endpoint(bytes([rank]) * 16, rank, KEY) for rank in range(1, 4)]
    mine = Links(GroupEndpoint(listener, GROUP, 0, KEY), [info] * 4, 10)
    targets = []
    for peer in peers:
        links, target = Links(peer, [info] * 4, 10), Taken()
        links.attach(Purpose.DATA, target)
        targets.append((peer, target))
    sender = Taken()
    mine.attach(Purpose.DATA, sender)

    class ByRank(GroupEndpoint):
        """Each peer has a endpoint of its own here, as its process would."""

        def dial(
            self, rank: int, info: RankInfo, purpose: Purpose, timeout_s: float
        ) -> socket.socket:
            endpoint = GroupEndpoint(listener, bytes([rank]) * 16, 0, KEY)
            return endpoint.dial(rank, info, purpose, timeout_s)

    mine._endpoint = ByRank(listener, GROUP, 0, KEY)
    threads = [
        threading.Thread(target=mine.ensure, args=([0, 1, 2, 3], Purpose.DATA)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sender.outgoing) == [1, 2, 3]
    for peer, target in targets:
        while not target.incoming:
            os.sched_yield()
        os.write(sender.outgoing[peer.rank], b"x")
        assert os.read(target.incoming[0], 1) == b"x"
        target.close()
        peer.close()
    sender.close()


def test_a_peer_that_cannot_be_reached_is_named(listener: ConnectionListener) -> None:
    with socket.socket() as vacant:
        vacant.bind(("127.0.0.1", 0))
        nobody = RankInfo("elsewhere", "elsewhere", "", "127.0.0.1", vacant.getsockname()[1])
        links = Links(GroupEndpoint(listener, GROUP, 0, KEY), [nobody, nobody], 10)
        links.attach(Purpose.DATA, Taken())
        with pytest.raises(RankFailed) as caught:
            links.ensure([1], Purpose.DATA)
        assert caught.value.rank == 1


@pytest.mark.parametrize(
    "raw",
    [b"", b"x" * handshake.HELLO_BYTES, Hello.make(GROUP, Purpose.DATA, 0, 1).raw[:-1]],
    ids=["nothing", "no hello", "short"],
)
def test_what_is_no_hello_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="hello"):
        Hello.parse(raw)
