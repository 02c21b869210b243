"""Calls between real sockets: answers, errors, pushes, deadlines, servers that die."""

import asyncio
import contextlib
import itertools
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.conftest import fork_child
from tests.rpc.conftest import KEY, SECRET
from tests.waiting import LIMIT_S

from fireflyer.errors import (
    Corrupted,
    DeadlineExceeded,
    FireflyerError,
    NotPrimary,
    PeerLost,
    ProtocolMismatch,
    Unavailable,
    WireError,
)
from fireflyer.rpc import client as client_module
from fireflyer.rpc.client import Client
from fireflyer.rpc.loop import LoopThread
from fireflyer.rpc.policy import Policy
from fireflyer.rpc.proof import Secret
from fireflyer.rpc.server import Call, Limits, Server

Serve = Callable[..., str]
Connect = Callable[..., Client]
ONCE = Policy(attempt_s=60)


class Pair(msgspec.Struct):
    left: int
    right: int


def plain(call: Call, body: Pair) -> int:
    return body.left + body.right


async def waiting(call: Call, body: float) -> str:
    await asyncio.sleep(body)
    return "waited"


def failing(call: Call, body: str) -> None:
    if body == "typed":
        raise Corrupted("chunk 7 fails its checksum")
    raise KeyError("the reason is for the server's log")


def blocking(call: Call, body: int) -> int:
    return threading.get_ident() + 0 * body


def make(limits: Limits | None = None, secret: Secret = SECRET) -> Server:
    server = Server(secret, 1, limits)
    server.on("add", Pair, plain)
    server.on("wait", float, waiting)
    server.on("fail", str, failing)
    server.on("thread", int, blocking, blocking=True)
    server.on("unsendable", type(None), lambda call, body: object())
    return server


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0", "unix"])
def test_an_answer(serve: Serve, connect: Connect, tmp_path: Path, address: str) -> None:
    if address == "[::1]:0" and not socket.has_ipv6:
        pytest.skip("no IPv6")
    at = serve(make(), f"unix:{tmp_path / 's'}" if address == "unix" else address)
    client = connect(at)
    assert client.call("add", Pair(2, 3), int) == 5
    assert client.call("wait", 0.0, str) == "waited"
    assert client.call("thread", 1, int) != threading.get_ident()


def test_errors_come_as_what_they_are(
    serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(serve(make()))
    with pytest.raises(Corrupted, match="chunk 7"):
        client.call("fail", "typed")
    with pytest.raises(WireError, match=r"failed in fail: KeyError$") as fault:
        client.call("fail", "untyped")
    assert "reason" not in str(fault.value)
    assert "the reason" in caplog.text
    with pytest.raises(WireError, match="cannot be encoded"):
        client.call("unsendable")
    with pytest.raises(ProtocolMismatch, match="no method 'nothing'"):
        client.call("nothing")
    with pytest.raises(ProtocolMismatch, match="invalid body"):
        client.call("add", "not a pair", int)
    with pytest.raises(ProtocolMismatch, match="invalid body"):
        client.call("add", Pair(2, 3), str)
    assert client.call("add", Pair(2, 3), int) == 5


def test_many_threads_share_one_connection(serve: Serve, connect: Connect) -> None:
    server = make()
    client = connect(serve(server))
    sums: dict[int, list[int]] = {}

    def work(number: int) -> None:
        sums[number] = [client.call("add", Pair(number, turn), int) for turn in range(200)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {number: list(range(number, number + 200)) for number in range(8)}
    assert len(server.connections) == 1


@pytest.mark.parametrize("order", [*itertools.permutations("abc")])
def test_a_caller_reads_for_the_others_and_another_reads_on(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch, order: tuple[str, ...]
) -> None:
    monkeypatch.setattr("fireflyer.rpc.client.IDLE_S", 3600.0)  # its own thread does not help
    server, gates = make(), {name: threading.Event() for name in "abc"}
    arrived = threading.Semaphore(0)

    def held(call: Call, body: str) -> str:
        arrived.release()
        assert gates[body].wait(LIMIT_S)
        return body

    server.on("held", str, held, blocking=True)
    client = connect(serve(server))
    answers: queue.Queue[str] = queue.Queue()
    assert client.call("add", Pair(2, 3), int) == 5
    for name in "abc":  # `a` reads: it comes first
        threading.Thread(target=lambda n=name: answers.put(client.call("held", n, str))).start()
        assert arrived.acquire(timeout=LIMIT_S)
    for name in order:
        gates[name].set()
        assert answers.get(timeout=LIMIT_S) == name
    assert client.call("add", Pair(2, 3), int) == 5


def test_an_idle_client_notices_that_its_server_left(
    serve: Serve, connect: Connect, loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fireflyer.rpc.client.IDLE_S", 0.01)
    server = make()
    client = connect(at := serve(server))
    assert client.call("add", Pair(2, 3), int) == 5
    (reader,) = [thread for thread in threading.enumerate() if thread.name == f"rpc {at}"]
    loop.run(server.close())
    reader.join(LIMIT_S)
    assert not reader.is_alive()


def test_an_interrupted_call_leaves_a_client_that_works(serve: Serve, connect: Connect) -> None:
    server = make()
    client = connect(serve(server))
    assert client.call("add", Pair(2, 3), int) == 5
    server.on("interrupt", str, lambda call, body: os.kill(os.getpid(), signal.SIGINT))
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            client.call("interrupt", "", str)
        assert client.call("add", Pair(2, 3), int) == 5


def test_a_quick_call_overtakes_a_slow_one(serve: Serve, connect: Connect) -> None:
    server, release = make(), threading.Event()
    server.on("held", type(None), lambda call, body: release.wait(LIMIT_S), blocking=True)
    client = connect(serve(server))
    held = threading.Thread(target=client.call, args=("held", None, bool))
    held.start()
    assert client.call("add", Pair(1, 1), int) == 2
    assert held.is_alive()
    release.set()
    held.join()


def test_more_requests_than_a_connection_may_have_under_way(serve: Serve, connect: Connect) -> None:
    client = connect(serve(make(Limits(requests=4))))
    answers: queue.Queue[str] = queue.Queue()
    threads = [
        threading.Thread(target=lambda: answers.put(client.call("wait", 0.001, str)))
        for _ in range(100)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers.get_nowait() for _ in threads] == ["waited"] * 100


def test_a_deadline_passes_on_both_sides(serve: Serve, connect: Connect) -> None:
    server, ended = make(), threading.Event()

    async def endless(call: Call, body: None) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    server.on("endless", type(None), endless)
    client = connect(serve(server), policy=ONCE)
    with pytest.raises(DeadlineExceeded, match=r"^endless: "):
        client.call("endless", deadline_s=0.05)
    assert ended.wait(LIMIT_S)
    assert client.call("add", Pair(2, 3), int) == 5


def test_pushes_reach_who_listens(serve: Serve, connect: Connect, loop: LoopThread) -> None:
    server, got, all_came = make(), list[int](), threading.Event()

    def take(body: msgspec.Raw) -> None:
        got.append(msgspec.msgpack.decode(body))
        if len(got) == 100:
            all_came.set()

    client = connect(serve(server), pushes={"news": take})
    other = connect(serve(make()))
    for each in (client, other):
        each.call("add", Pair(1, 1), int)
    for number in range(100):
        loop.call_soon(server.push, "news", number)
        loop.call_soon(server.push, "nobody listens to this", number)
    assert all_came.wait(LIMIT_S)
    assert got == list(range(100))
    assert client.call("add", Pair(1, 1), int) == 2


def test_a_client_that_does_not_read_is_let_go(
    serve: Serve, connect: Connect, loop: LoopThread
) -> None:
    server = make(Limits(unsent_bytes=1 << 20))
    closed, slow = threading.Event(), threading.Event()
    server.on_close = lambda connection: closed.set()

    def take_slowly(body: msgspec.Raw) -> None:
        slow.wait(LIMIT_S)

    client = connect(serve(server), pushes={"news": take_slowly})
    client.call("add", Pair(1, 1), int)

    async def flood() -> None:
        while not closed.is_set():
            server.push("news", bytes(1 << 20))
            await asyncio.sleep(0)

    loop.run(flood())
    slow.set()


def die_mid_request(call: Call, body: None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def serve_in_child(ready: int, address: str) -> None:
    """A server in a process of its own, which says its port and runs until it is killed."""

    async def main() -> None:
        server = make()
        server.on("die", type(None), die_mid_request)
        at = await server.listen(address)
        os.write(ready, str(at).encode())
        await asyncio.Event().wait()

    asyncio.run(main())


@contextlib.contextmanager
def child_server(address: str = "127.0.0.1:0") -> Any:
    read, write = os.pipe()
    pid = fork_child(lambda: serve_in_child(write, address))
    os.close(write)
    try:
        yield os.read(read, 100).decode(), pid
    finally:
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_server_that_dies_mid_request() -> None:
    once = Policy(final=(PeerLost,))
    with child_server() as (address, pid), Client(address, SECRET, 4, policy=once) as client:
        assert client.call("add", Pair(2, 3), int) == 5
        with pytest.raises(PeerLost):
            client.call("die")
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its port is closed
        with pytest.raises(PeerLost, match="no connection"):
            client.call("add", Pair(2, 3), int)


def test_a_call_outlives_a_restart_of_its_server(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 's'}"
    with Client(address, SECRET, 4) as client:
        with child_server(address):
            assert client.call("add", Pair(2, 3), int) == 5
        os.unlink(tmp_path / "s")
        result = list[int]()
        caller = threading.Thread(target=lambda: result.append(client.call("add", Pair(2, 3), int)))
        caller.start()
        with child_server(address):
            caller.join()
        assert result == [5]


def test_what_is_sent_again_says_so(serve: Serve, connect: Connect) -> None:
    came: list[str] = []
    server = make()

    def take(call: Call, body: str) -> str:
        came.append(body)
        if len(came) < 3:
            raise Unavailable("not yet")
        return body

    server.on("take", str, take)
    client = connect(serve(server))
    assert client.call("take", "first", str, again="again") == "again"
    assert came == ["first", "again", "again"]
    came.clear()
    assert client.call("take", "first", str) == "first"
    assert came == ["first", "first", "first"]


def test_a_frozen_server_is_left_for_another(serve: Serve) -> None:
    with child_server() as (frozen, pid):
        other = serve(make())
        policy = Policy(attempt_s=0.2)
        with Client([frozen, other], SECRET, 4, policy=policy) as client:
            assert client.call("add", Pair(2, 3), int) == 5
            os.kill(pid, signal.SIGSTOP)
            assert client.call("add", Pair(4, 3), int) == 7
            os.kill(pid, signal.SIGCONT)


def test_who_is_not_primary_names_the_one_that_is(serve: Serve, connect: Connect) -> None:
    primary = make()
    primary.on("who", type(None), lambda call, body: "primary")
    where = serve(primary)

    def refuse(call: Call, body: None) -> None:
        raise NotPrimary("ask the other", where)

    backup = make()
    backup.on("who", type(None), refuse)
    assert connect(serve(backup)).call("who", None, str) == "primary"


def test_a_closed_client(serve: Serve, connect: Connect) -> None:
    client = connect(serve(make()))
    client.close()
    client.close()
    with pytest.raises(PeerLost, match="closed"):
        client.call("add", Pair(1, 1), int, deadline_s=1e9)


class Held:
    """A client, one of whose calls waits in another thread for an answer that never comes."""

    def __init__(self, serve: Serve, connect: Connect) -> None:
        server, begun = make(), threading.Event()

        async def held(call: Call, body: None) -> None:
            begun.set()
            await asyncio.Event().wait()

        server.on("held", type(None), held)
        self.client = connect(serve(server))
        self.client.call("add", Pair(1, 1), int)  # the connection's thread has handed over
        self.errors = list[FireflyerError]()
        self.thread = threading.Thread(target=self._call)
        self.thread.start()
        assert begun.wait(LIMIT_S)

    def _call(self) -> None:
        try:
            self.client.call("held")
        except FireflyerError as error:
            self.errors.append(error)


def test_closing_ends_the_calls_under_way(serve: Serve, connect: Connect) -> None:
    held = Held(serve, connect)
    held.client.close()
    held.thread.join()
    assert type(held.errors[0]) is PeerLost
    assert "closed" in str(held.errors[0])


def test_a_reader_of_a_closed_connection_does_not_wait_for_the_closing_thread(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(serve, connect)
    passed_on = client_module._call_all

    def late(calls: Any) -> None:
        if threading.current_thread() is not held.thread:
            held.thread.join(LIMIT_S)
        passed_on(calls)

    monkeypatch.setattr(client_module, "_call_all", late)
    held.client.close()
    assert [type(error) for error in held.errors] == [PeerLost]


def test_the_secret_is_in_no_error(serve: Serve, connect: Connect) -> None:
    server = make()
    address = serve(server)
    for secret, said in (
        (Secret(b"another-secret-of-the-tests"), "another secret"),
        (Secret(), "no secret was given here"),
    ):
        with pytest.raises(ProtocolMismatch, match=said) as raised:
            connect(address, secret).call("add", Pair(1, 1), int)
        assert KEY.decode() not in repr(raised.value) + repr(vars(server)) + str(raised.value)


def test_what_comes_while_a_handler_works_is_its_next_group(serve: Serve, connect: Connect) -> None:
    groups: list[list[int]] = []
    go = threading.Semaphore(0)

    def double(bodies: Sequence[int]) -> list[int | Corrupted]:
        groups.append([*bodies])
        if bodies[0] == 0:
            assert go.acquire(timeout=LIMIT_S)
        if len(bodies) > 1 and 7 in bodies:
            raise KeyError("one of them breaks the handler")
        if bodies == [7]:
            raise KeyError("this one")
        return [Corrupted("no threes") if body == 3 else 2 * body for body in bodies]

    server = Server(SECRET, 1, Limits(lane_threads=1))
    server.on_many("double", int, double, lambda body: body < 100)
    client = connect(serve(server), policy=ONCE)
    said: dict[int, object] = {}

    def ask(number: int) -> None:
        try:
            said[number] = client.call("double", number, int)
        except FireflyerError as error:
            said[number] = type(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in (0, *range(1, 9))]
    threads[0].start()
    while not groups:
        assert client.call("double", 100, int) == 200  # another lane does not wait
    for thread in threads[1:]:
        thread.start()
    (connection,) = server.connections
    while len(connection._running) < len(threads):
        assert client.call("double", 100, int) == 200
    go.release()
    for thread in threads:
        thread.join()
    assert said == {n: 2 * n for n in (0, 1, 2, 4, 5, 6, 8)} | {3: Corrupted, 7: WireError}
    mine = [sorted(group) for group in groups if group != [100]]
    assert mine == [[0], [1, 2, 3, 4, 5, 6, 7, 8], *([n] for n in mine_order(groups))]


def mine_order(groups: list[list[int]]) -> list[int]:
    """The order in which a group came, whose bodies were then handled alone."""
    return next(group for group in groups if len(group) == 8)


def test_who_leaves_a_group_gets_nothing_and_others_their_answers(
    serve: Serve, connect: Connect
) -> None:
    entered, go = threading.Event(), threading.Event()

    def wait(bodies: Sequence[int]) -> Sequence[int]:
        entered.set()
        assert go.wait(LIMIT_S)
        return bodies

    server = Server(SECRET, 1)
    server.on_many("wait", int, wait, lambda body: 0)
    address = serve(server)
    gone, stays = connect(address, policy=ONCE), connect(address, policy=ONCE)
    with pytest.raises(DeadlineExceeded):
        gone.call("wait", 1, int, deadline_s=0.05)
    assert entered.wait(LIMIT_S)
    gone.close()
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(stays.call("wait", 2, int)))
    thread.start()
    go.set()
    thread.join()
    assert answers == [2]
