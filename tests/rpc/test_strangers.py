"""Those who do not belong: garbage, silence, floods. The server stays up and serves who does."""

import asyncio
import contextlib
import logging
import os
import random
import resource
import socket
import threading
from collections.abc import Callable

import msgspec
import pytest
from tests import draws
from tests.conftest import fork_child
from tests.rpc.conftest import SECRET
from tests.waiting import LIMIT_S

from fireflyer.errors import ConfigError
from fireflyer.log import get_logger
from fireflyer.rpc.client import Client
from fireflyer.rpc.frames import frame
from fireflyer.rpc.handshake import REFUSAL, Handshake
from fireflyer.rpc.loop import LoopThread
from fireflyer.rpc.messages import Reply, framed, parse_reply
from fireflyer.rpc.proof import Secret
from fireflyer.rpc.server import Connection, Limits, Server

Serve = Callable[..., str]
Connect = Callable[..., Client]


def make(limits: Limits | None = None, secret: Secret = SECRET) -> Server:
    server = Server(secret, 1, limits)
    server.on("echo", object, lambda call, body: body)
    return server


def dial(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    line = socket.create_connection((host, int(port)), 60)
    line.settimeout(LIMIT_S)
    return line


def all_of(line: socket.socket) -> bytes:
    """What comes until the other side closes; a reset counts as that."""
    data = b""
    try:
        while more := line.recv(1 << 16):
            data += more
    except ConnectionResetError:
        pass
    return data


def proved(address: str) -> socket.socket:
    line = dial(address)
    handshake = Handshake("client", SECRET, 4)
    line.sendall(handshake.opening)
    while not handshake.done:
        line.sendall(handshake.feed(line.recv(1 << 16)))
    return line


def test_garbage_closes_its_own_connection_only(serve: Serve, connect: Connect) -> None:
    address, chance = serve(make()), random.Random(3)
    client = connect(address)
    assert client.call("echo", 1, int) == 1
    for _ in range(300):
        with dial(address) as line:
            line.sendall(b"\x00" + chance.randbytes(chance.randrange(200)))
            assert all_of(line) == b""
    assert client.call("echo", 2, int) == 2


def test_a_lack_of_descriptors_is_logged_once_and_passes() -> None:
    def child() -> None:
        lines: list[str] = []
        told = threading.Event()

        class Seen(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                lines.append(record.getMessage())
                told.set()

        get_logger("rpc").addHandler(Seen())
        most = max(map(int, os.listdir("/proc/self/fd"))) + 64  # the worker may have many open
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        with LoopThread("test") as loop:
            address = loop.run(make().listen("127.0.0.1:0"))
            caller = socket.socket()
            taken: list[int] = []
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            caller.connect((address.host, address.port))
            told.wait()
            for descriptor in taken:
                os.close(descriptor)
            handshake = Handshake("client", SECRET, 4)
            caller.sendall(handshake.opening)
            while not handshake.done:
                caller.sendall(handshake.feed(caller.recv(1 << 16)))
        assert lines == ["connections cannot be accepted: Too many open files"]

    assert os.waitstatus_to_exitcode(os.waitpid(fork_child(child), 0)[1]) == 0


def test_a_wrong_proof_is_answered_by_a_refusal_and_nothing_else(serve: Serve) -> None:
    hello = Handshake("client", SECRET, 4).opening
    with dial(serve(make())) as line:
        line.sendall(hello + b"x" * 32)
        answer = all_of(line)
    assert len(answer) == 72
    assert answer[40:] == REFUSAL


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xff\xff\xff",  # a frame of 4 GiB
        frame(b""),
        frame(b"\xc1"),
        frame(msgspec.msgpack.encode([0, "echo", 5, None])),
        frame(msgspec.msgpack.encode([1, "held", 5000, None])) * 2,  # one number twice
    ],
)
def test_what_is_no_request_closes_a_proved_connection(
    serve: Serve, connect: Connect, said: bytes
) -> None:
    server = make()

    async def held(call: object, body: object) -> None:
        await asyncio.Event().wait()

    server.on("held", object, held)
    address = serve(server)
    with proved(address) as line:
        line.sendall(said)
        assert all_of(line) == b""
    assert connect(address).call("echo", 2, int) == 2


def test_a_frame_cut_short_leaves_nothing_behind(serve: Serve, connect: Connect) -> None:
    address = serve(make())
    for cut in (1, 4, 9):
        with proved(address) as line:
            line.sendall(bytes(framed((1, "echo", 5000, "hello"))[:cut]))
    assert connect(address).call("echo", 2, int) == 2


def test_a_slow_handshake_is_cut_off(serve: Serve) -> None:
    address = serve(make(Limits(handshake_s=0.05)))
    with dial(address) as silent, dial(address) as dripping:
        dripping.sendall(b"FF")
        assert all_of(silent) == b""
        assert all_of(dripping) == b""


def test_a_flood_of_strangers_does_not_keep_members_out(serve: Serve, connect: Connect) -> None:
    address = serve(make(Limits(unauthenticated=8, handshake_s=60)))
    strangers = [dial(address) for _ in range(50)]
    assert connect(address).call("echo", 2, int) == 2
    assert all_of(strangers[0]) == b""  # the oldest went
    for stranger in strangers:
        stranger.close()


def test_without_a_secret_only_this_machine_is_served(serve: Serve, connect: Connect) -> None:
    for address in ("0.0.0.0:0", "[::]:0", "10.1.2.3:0", "some.host:0"):
        with pytest.raises(ConfigError, match="without a secret"):
            serve(make(secret=Secret()), address)
    address = serve(make(secret=Secret()))
    assert connect(address, Secret()).call("echo", 2, int) == 2


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:99999", "::1:80", "unix:"])
def test_what_is_no_address(serve: Serve, address: str) -> None:
    with pytest.raises(ConfigError):
        serve(make(), address)


class Wire(asyncio.Transport):
    """Keeps what is written; a connection's other end without sockets."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def test_frames_of_any_kind() -> None:
    """Each gets its answer, a typed error, or its connection closed; the server itself never fails."""
    chance, server, frames = draws.drawn("frames"), make(), draws.cases(100_000)
    good = bytes(framed((7, "echo", 5000, {"a": [1, "two", None]})))

    def member() -> tuple[Connection, Wire]:
        connection, wire = Connection(server), Wire()
        connection.connection_made(wire)
        handshake = Handshake("client", SECRET, 4)
        connection.data_received(handshake.opening)
        connection.data_received(handshake.feed(bytes(wire.written)))
        wire.written.clear()
        return connection, wire

    async def scenario() -> tuple[int, int, int]:
        answers, errors, closed = 0, 0, 0
        connection, wire = member()
        for _ in range(frames):
            data = bytearray(good)
            for _ in range(chance.randrange(3)):
                data[chance.randrange(4, len(data))] = chance.randrange(256)
            connection.data_received(bytes(data))
            if wire.closed:
                closed += 1
                connection.connection_lost(None)
                connection, wire = member()
                continue
            await asyncio.sleep(0)
            reply: Reply = parse_reply(bytes(wire.written[4:]))
            wire.written.clear()
            answers, errors = answers + (reply.what is True), errors + (reply.what is False)
        connection.abort()
        return answers, errors, closed

    answers, errors, closed = asyncio.run(scenario())
    assert answers + errors + closed == frames
    assert min(answers, errors, closed) > frames // 100
