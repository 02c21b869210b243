"""Supervisors on other machines, reached over TCP."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

from fireflyer.errors import ProtocolMismatch, WireError
from fireflyer.hai.engines.link import Link
from fireflyer.hai.engines.messages import Record
from fireflyer.hai.engines.parts import ROLE, Announcement
from fireflyer.rpc.address import tune
from fireflyer.rpc.handshake import Handshake
from fireflyer.rpc.proof import Secret

HANDSHAKE_S = 5.0
RETRY_S = 0.5
"""Between two tries to reach a node that does not answer."""


async def reach(where: Announcement, secret: str) -> socket.socket:
    """A connection to a supervisor, both sides having proved the task's secret.

    Raises:
        ConnectionRefusedError: nobody listens there.
        ProtocolMismatch: it is somebody else.
        OSError, TimeoutError: it cannot be known.
    """
    loop = asyncio.get_running_loop()
    handshake = Handshake("client", Secret(secret.encode()), ROLE)
    async with asyncio.timeout(HANDSHAKE_S):
        found = await loop.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        stream = socket.socket(family, kind, protocol)
        try:
            stream.setblocking(False)
            tune(stream)
            await loop.sock_connect(stream, address)
            await loop.sock_sendall(stream, handshake.opening)
            while not handshake.done:
                data = await loop.sock_recv(stream, 4096)
                if not data:
                    raise ConnectionResetError(f"{where.host} hung up during the handshake")
                await loop.sock_sendall(stream, handshake.feed(data))
        except BaseException:
            stream.close()
            raise
    return stream


class RemoteLink(Link):
    """A link over TCP. It is tried again until the node says that nobody listens, or `give_up`."""

    def __init__(
        self,
        stream: socket.socket,
        directory: Path,
        node: str,
        where: Announcement,
        secret: str,
        on_record: Callable[[str, Record], None],
        on_gone: Callable[[], None],
    ) -> None:
        self.where = where
        self._secret = secret
        self._hopeless = asyncio.Event()
        super().__init__(stream, directory, node, on_record, on_gone)

    def give_up(self) -> None:
        """Whoever watches the node says that nothing is left of it: the link ends as one refused does."""
        self._hopeless.set()
        if self._writer is not None:
            self._writer.transport.abort()

    async def _again(self) -> socket.socket | None:
        while not self._hopeless.is_set():
            try:
                return await reach(self.where, self._secret)
            except (ConnectionRefusedError, ProtocolMismatch):
                return None  # a stranger's port now
            except (OSError, WireError):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self._hopeless.wait()
        return None
