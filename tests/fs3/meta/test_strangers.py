"""What no client of ours sends: wrong types, impossible numbers, damaged frames: typed errors, service up."""

import copy
import socket
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests import draws

from fireflyer.errors import FileError, FireflyerError, ProtocolMismatch, Stale
from fireflyer.fs3.client.metadata import METHOD
from fireflyer.fs3.kv import MemoryEngine
from fireflyer.fs3.meta import Inode, Layout, MetaService, Request, User
from fireflyer.fs3.meta import messages as m
from fireflyer.fs3.meta.service import is_reading
from fireflyer.fs3.roles import Role
from fireflyer.rpc.client import Client
from fireflyer.rpc.frames import frame
from fireflyer.rpc.handshake import Handshake
from fireflyer.rpc.loop import LoopThread
from fireflyer.rpc.messages import framed
from fireflyer.rpc.proof import Secret
from fireflyer.rpc.server import Server

SECRET = Secret(b"the secret of this service")
ROOT = User(0, 0)
CALLS: list[Any] = [
    *(m.Stat(1, b"d/f"), m.StatMany([(1, b"d"), (1, b"d/f")]), m.ReadDirectory(1, b"d", b"", 10)),
    *(m.ReadLink(1, b"s"), m.Names(2), m.GetXattr(1, b"d/f", b"user.a"), m.ListXattrs(1, b"d/f")),
    *(m.Statfs(), m.Create(1, b"n", 0o644, False, 3), m.CreateMany(1, [b"x", b"y"])),
    *(m.Open(1, b"d/f", True, 4), m.Close(3, 4, 10, 0), m.ReportLength(3, 4, 10, 0)),
    *(m.ExtendStripe(3, 4, 2), m.Append(3, 4), m.Truncate(1, b"d/f", 5), m.MakeDirectory(1, b"e")),
    *(m.RemoveDirectory(1, b"e"), m.Unlink(1, b"x"), m.Rename(1, b"y", 1, b"z", 0)),
    *(m.Link(1, b"d/f", 1, b"l"), m.Symlink(1, b"t", b"d"), m.MakeNode(1, b"p", 4)),
    *(m.ChangeMode(1, b"d/f", 0o600), m.ChangeOwner(1, b"d/f", 1, 1)),
    m.SetAttributes(3, m.Changes(1, 1, 0o600, 5, 6), 4, 10, 0, False),
    *(m.SetTimes(1, b"d", 5, 6), m.RemoveXattr(1, b"d", b"user.a")),
    *(m.SetXattr(1, b"d/f", b"user.a", b"v"), m.SetLayout(1, b"d", Layout(1, 1, 4096, 4, 9))),
    *(m.KeepAlive(), m.EndClient(), m.Expire(10**15), m.Settle(3, 7, 10, 0, 10**15)),
    *(m.Collect(0, 10), m.Collected([10**6])),
]
ODD: list[Any] = [
    *(None, True, 1.5, "text", b"", b"\0", b"..", b"/", b"a" * 300, b"a/" * 3000, b"\xff\xfe"),
    *(0, -1, -2, -3, 1, 2, 3, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63)),
    *([], {}, [[]], [1, [2]], {"a": 1}, [b"x"] * 3, ["Stat", 1], msgspec.msgpack.Ext(5, b"e")),
]


@pytest.fixture
def address() -> Iterator[str]:
    service = MetaService(MemoryEngine())
    for call in (
        *(m.MakeDirectory(1, b"d"), m.Create(1, b"d/f"), m.Symlink(1, b"s", b"d/f")),
        m.SetXattr(1, b"d/f", b"user.a", b"v"),
    ):
        service.execute(Request(ROOT, 1, call))
    with LoopThread("meta") as loop:
        server = Server(SECRET, Role.MANAGER)
        server.on_many(METHOD, Request, service.answer_many, is_reading)
        yield str(loop.run(server.listen("127.0.0.1:0")))
        loop.run(server.close())


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, SECRET, Role.CLIENT) as client:
        yield client


def places(tree: Any) -> Iterator[tuple[list[Any], int]]:
    """Every (list, index) in nested lists."""
    for at, item in enumerate(tree):
        yield tree, at
        if isinstance(item, list):
            yield from places(item)


def test_every_call_is_among_those_that_are_damaged() -> None:
    assert {type(call) for call in CALLS} == {*typing.get_args(m.Reading | m.Writing)}


def test_wrong_and_impossible_values_get_typed_errors(client: Client) -> None:
    rng = draws.drawn("values")
    refused = done = 0
    for turn in range(draws.cases(12_000)):
        request = Request(ROOT, rng.randrange(3), rng.choice(CALLS), rng.randrange(2) and turn + 1)
        tree = msgspec.msgpack.decode(msgspec.msgpack.encode(request))
        for _ in range(rng.choice((1, 1, 2))):
            where, at = rng.choice([*places(tree)])
            if rng.random() < 0.1:
                del where[at]
            elif rng.random() < 0.1:
                where.insert(at, copy.deepcopy(rng.choice(ODD)))
            else:
                where[at] = copy.deepcopy(rng.choice(ODD))
        try:
            client.call(METHOD, tree, msgspec.Raw)
            done += 1
        except (FileError, ProtocolMismatch, Stale):
            refused += 1
        except FireflyerError as error:
            pytest.fail(f"{tree} was answered with {error!r}")
    assert min(refused, done) > draws.cases(300)
    listing = client.call(METHOD, Request(ROOT, 1, m.ReadDirectory(1, plus=True)), m.Listing)
    assert len(listing.inodes) == len(listing.entries)


def proved(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    line = socket.create_connection((host, int(port)), 60)
    handshake = Handshake("client", SECRET, Role.CLIENT)
    line.sendall(handshake.opening)
    while not handshake.done:
        line.sendall(handshake.feed(line.recv(1 << 16)))
    return line


def test_damaged_frames_are_answered_or_end_their_connection_alone(
    address: str, client: Client
) -> None:
    rng = draws.drawn("frames")
    for turn in range(draws.cases(300)):
        whole = bytearray(framed((1, METHOD, 1000, Request(ROOT, 1, rng.choice(CALLS)))))
        for _ in range(rng.randrange(1, 8)):
            whole[rng.randrange(4, len(whole))] = rng.randrange(256)
        if turn % 10 == 0:
            whole = bytearray(frame(rng.randbytes(rng.randrange(200))))
        with proved(address) as line:
            line.sendall(whole)
            line.shutdown(socket.SHUT_WR)
            while line.recv(1 << 16):
                pass
    assert client.call(METHOD, Request(ROOT, 1, m.Stat(1)), Inode).number == 1
