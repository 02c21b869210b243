"""Asyncio interface: the calls of `Client`, each in a thread, so that the event loop never blocks."""

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from fireflyer.fs3.client.connection import TIMEOUT_S, Client
from fireflyer.fs3.client.connection import connect as connect_now
from fireflyer.fs3.client.data import Buffer
from fireflyer.fs3.client.file import File
from fireflyer.fs3.client.metadata import Path
from fireflyer.fs3.client.modes import BinaryMode, parse
from fireflyer.fs3.client.settings import Settings

P = ParamSpec("P")
T = TypeVar("T")


class AsyncFile:
    """Open file; an asynchronous context manager."""

    def __init__(self, file: File) -> None:
        self.file = file

    async def pread(self, size: int, offset: int) -> bytes:
        return await asyncio.to_thread(self.file.pread, size, offset)

    async def pread_into(self, buffer: Buffer, offset: int) -> int:
        return await asyncio.to_thread(self.file.pread_into, buffer, offset)

    async def pwrite(self, data: Buffer, offset: int) -> int:
        return await asyncio.to_thread(self.file.pwrite, data, offset)

    async def read(self, size: int = -1) -> bytes:
        return await asyncio.to_thread(self.file.read, size) or b""

    async def write(self, data: Buffer) -> int:
        return await asyncio.to_thread(self.file.write, data)

    async def truncate(self, size: int) -> int:
        return await asyncio.to_thread(self.file.truncate, size)

    async def fsync(self) -> None:
        await asyncio.to_thread(self.file.fsync)

    async def close(self) -> None:
        await asyncio.to_thread(self.file.close)

    async def __aenter__(self) -> "AsyncFile":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class AsyncClient:
    """Client of a file system; an asynchronous context manager. `client` is the synchronous client.

    If a task is cancelled, the call that it made still completes in its thread.
    """

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls any method of `client`: `await fs.call(fs.client.stat, "/a")`."""
        return await asyncio.to_thread(method, *args, **kwargs)

    async def open(
        self, path: Path, mode: BinaryMode = "rb", *, permissions: int = 0o666
    ) -> AsyncFile:
        """Opens a file in bytes.

        Raises:
            ValueError: the mode is for text.
        """
        if parse(mode)[1]:
            raise ValueError(f"invalid mode {mode!r}: asyncio files are binary; add 'b'")

        def opened() -> File:
            return self.client.open(path, mode, permissions=permissions)

        return AsyncFile(await asyncio.to_thread(opened))

    async def read_many(
        self, requests: Sequence[tuple[AsyncFile, int, Buffer]], *, deadline_s: float | None = None
    ) -> list[int]:
        rows = [(each.file, offset, buffer) for each, offset, buffer in requests]
        return await self.call(self.client.read_many, rows, deadline_s=deadline_s)

    async def write_many(
        self, requests: Sequence[tuple[AsyncFile, int, Buffer]], *, deadline_s: float | None = None
    ) -> int:
        rows = [(each.file, offset, buffer) for each, offset, buffer in requests]
        return await self.call(self.client.write_many, rows, deadline_s=deadline_s)

    async def close(self) -> None:
        await self.call(self.client.close)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


async def connect(
    address: str | Sequence[str],
    *,
    metadata: str | Sequence[str] | None = None,
    secret_file: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
    timeout: float = TIMEOUT_S,
) -> AsyncClient:
    """See `fireflyer.fs3.client.connect`."""
    client = await asyncio.to_thread(
        connect_now, address,
        metadata=metadata, secret_file=secret_file, settings=settings, timeout=timeout,
    )  # fmt: skip
    return AsyncClient(client)
