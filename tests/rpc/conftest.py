"""A server on a loop of its own, and clients that are closed at the end."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fireflyer.rpc.client import Client
from fireflyer.rpc.loop import LoopThread
from fireflyer.rpc.proof import Secret
from fireflyer.rpc.server import Server

KEY = b"0123456789abcdef-a-secret-of-the-tests"
SECRET = Secret(KEY)


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    with LoopThread("test loop") as thread:
        yield thread


@pytest.fixture
def serve(loop: LoopThread) -> Iterator[Callable[..., str]]:
    """serve(server, address="127.0.0.1:0"): starts it and returns its address."""
    servers = []

    def start(server: Server, address: str = "127.0.0.1:0") -> str:
        servers.append(server)
        return str(loop.run(server.listen(address)))

    yield start
    for server in servers:
        loop.run(server.close())


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    """connect(address, secret=SECRET, **options): a client of role 4."""
    clients = []

    def make(address: Any, secret: Secret = SECRET, **options: Any) -> Client:
        clients.append(Client(address, secret, 4, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()
