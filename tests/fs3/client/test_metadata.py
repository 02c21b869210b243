"""Requests to the metadata service that are sent again, and their late copies."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from fireflyer.errors import FileError, Unavailable
from fireflyer.fs3.client.metadata import METHOD, Metadata
from fireflyer.fs3.client.settings import Settings
from fireflyer.fs3.kv import MemoryEngine
from fireflyer.fs3.meta import MetaService
from fireflyer.fs3.meta.inode import Inode
from fireflyer.fs3.meta.messages import Done, MakeDirectory, RemoveDirectory, Request
from fireflyer.fs3.meta.service import is_reading
from fireflyer.fs3.roles import Role
from fireflyer.rpc.loop import LoopThread
from fireflyer.rpc.proof import Secret
from fireflyer.rpc.server import Server

SECRET = Secret(b"the secret of this cluster")
ROOT = 1


class Delaying:
    """A metadata service before which the first copy of a request waits, as on a slow way."""

    def __init__(self) -> None:
        self.service = MetaService(MemoryEngine())
        self.delay = threading.Event()
        self.late: list[Request] = []

    def answer_many(self, requests: Sequence[Request]) -> list[Any]:
        if not self.delay.is_set():
            return list(self.service.answer_many(requests))
        self.delay.clear()
        self.late += requests
        return [Unavailable("nothing came in time") for _ in requests]


@pytest.fixture
def way() -> Iterator[tuple[Delaying, Metadata]]:
    delaying = Delaying()
    with LoopThread("test metadata") as loop:
        server = Server(SECRET, Role.MANAGER)
        server.on_many(METHOD, Request, delaying.answer_many, is_reading)
        address = str(loop.run(server.listen("127.0.0.1:0")))
        metadata = Metadata(5, address, SECRET, Settings())
        yield delaying, metadata
        metadata.close()
        loop.run(server.close())


def test_a_late_copy_of_what_was_refused_is_not_done(way: tuple[Delaying, Metadata]) -> None:
    delaying, metadata = way
    metadata.act(MakeDirectory(ROOT, b"/a"), Inode)
    delaying.delay.set()
    with pytest.raises(FileExistsError):
        metadata.act(MakeDirectory(ROOT, b"/a"), Inode)
    metadata.act(RemoveDirectory(ROOT, b"/a"), Done)
    (copy,) = delaying.late
    (answer,) = delaying.service.answer_many([copy])
    assert isinstance(answer, FileError)
    metadata.act(MakeDirectory(ROOT, b"/a"), Inode)  # which it did not make


def test_a_late_copy_of_what_was_done_is_not_done_twice(way: tuple[Delaying, Metadata]) -> None:
    delaying, metadata = way
    delaying.delay.set()
    metadata.act(MakeDirectory(ROOT, b"/a"), Inode)
    metadata.act(RemoveDirectory(ROOT, b"/a"), Done)
    delaying.service.answer_many(delaying.late)
    metadata.act(MakeDirectory(ROOT, b"/a"), Inode)
