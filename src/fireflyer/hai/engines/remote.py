"""Links over TCP to supervisors on other machines."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

from fireflyer.errors import ProtocolMismatch, WireError
from fireflyer.hai.engines.link import Link
from fireflyer.hai.supervisor.messages import Record
from fireflyer.hai.supervisor.parts import ROLE, Announcement
from fireflyer.rpc.address import tune
from fireflyer.rpc.handshake import Handshake
from fireflyer.rpc.proof import Secret

HANDSHAKE_S = 5.0
RETRY_S = 0.5
"""Seconds between two attempts to reach a node that does not answer."""


async def reach(where: Announcement, secret: str) -> socket.socket:
    """Returns a connection to a supervisor, after both sides have proved the task's secret.

    Raises:
        ConnectionRefusedError: no process listens there.
        ProtocolMismatch: another service listens there.
        OSError, TimeoutError: the supervisor may be running or not.
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
                    raise ConnectionResetError(
                        f"{where.host} closed the connection during the handshake"
                    )
                await loop.sock_sendall(stream, handshake.feed(data))
        except BaseException:
            stream.close()
            raise
    return stream


class RemoteLink(Link):
    """Link over TCP. Reconnects until the node no longer has this supervisor, or until `give_up` is
    called."""

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
        self._given_up = asyncio.Event()
        super().__init__(stream, directory, node, on_record, on_gone)

    def give_up(self) -> None:
        """Ends the link like a refused connection, because no process of the task is left on the
        node."""
        self._given_up.set()
        if self._writer is not None:
            self._writer.transport.abort()

    async def _reconnect(self) -> socket.socket | None:
        while not self._given_up.is_set():
            try:
                return await reach(self.where, self._secret)
            except (ConnectionRefusedError, ProtocolMismatch):
                return None  # the port belongs to another service now
            except (OSError, WireError):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self._given_up.wait()
        return None
