"""Client of a file system, and the function `connect`, which makes one."""

import contextlib
import errno
import io
import os
import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, overload

from fireflyer._native.fs3.client import Engine
from fireflyer.errors import FileError, FireflyerError
from fireflyer.fs3.client.cluster import Cluster
from fireflyer.fs3.client.data import Buffer, Data, memory_of
from fireflyer.fs3.client.directory_storage import Fs3Storage
from fireflyer.fs3.client.file import File, read_files
from fireflyer.fs3.client.metadata import Metadata, Path, SessionKeepAlive, encoded
from fireflyer.fs3.client.modes import BinaryMode, TextMode, as_text, parse
from fireflyer.fs3.client.names import Names
from fireflyer.fs3.client.settings import Settings, find_secret
from fireflyer.fs3.meta.inode import DIRECTORY, ROOT, Inode
from fireflyer.fs3.meta.messages import Close, Create, Open
from fireflyer.rpc.proof import Secret

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TIMEOUT_S = 5.0
"""Default timeout of `connect`."""


class Parts(NamedTuple):
    """Internal parts of a client, which a mount uses."""

    data: Data
    metadata: Metadata
    keep_alive: SessionKeepAlive
    engine: Engine


class Client(Names):
    """Client of a file system. Thread-safe; a context manager. A forked child must connect again."""

    def __init__(
        self,
        managers: str | Sequence[str],
        metadata: str | Sequence[str],
        secret: Secret,
        settings: Settings,
        timeout: float = TIMEOUT_S,
    ) -> None:
        """See `connect`."""
        self.settings = settings
        number = secrets.randbits(62) + 1
        self._cluster = Cluster(number, managers, secret, settings, timeout)
        self._data = Data(self._cluster, settings)
        super().__init__(Metadata(number, metadata, secret, settings))
        self._keep_alive = SessionKeepAlive(self._metadata, settings.alive_s)

    @property
    def parts(self) -> Parts:
        return Parts(self._data, self._metadata, self._keep_alive, self._cluster.engine)

    @overload
    def open(self, path: Path, mode: BinaryMode = "rb", *, permissions: int = 0o666) -> File: ...

    @overload
    def open(
        self,
        path: Path,
        mode: TextMode,
        *,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        permissions: int = 0o666,
    ) -> io.TextIOWrapper: ...

    @overload
    def open(
        self,
        path: Path,
        mode: str,
        *,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        permissions: int = 0o666,
    ) -> File | io.TextIOWrapper: ...

    def open(
        self,
        path: Path,
        mode: str = "rb",
        *,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        permissions: int = 0o666,
    ) -> File | io.TextIOWrapper:
        """Opens a file like Python's `open`; a binary file is unbuffered.

        Args:
            mode: "r", "w", "a" or "x", with "+" for both reading and writing, and "b" for bytes.
            encoding: encoding of a text file; None: UTF-8.
            errors: error handler of the encoding, as for `open`.
            newline: newline mode of a text file, as for `open`.
            permissions: permissions of a new file, before the umask.

        Raises:
            ValueError: invalid mode, or a text option in binary mode.
            LookupError: unknown encoding.
            FileError: the errors of `os.open`.
        """
        plain, text = parse(mode)
        if not text and (encoding, errors, newline) != (None, None, None):
            raise ValueError("encoding, errors and newline require text mode; omit 'b'")
        file = self._open(path, plain, permissions)
        return as_text(file, mode, encoding, errors, newline) if text else file

    def _open(self, path: Path, plain: str, permissions: int) -> File:
        kind, both = plain[0], "+" in plain
        name, readable = os.fsdecode(path), kind == "r" or both
        handle = 0 if plain == "r" else self._metadata.handle()
        fresh = kind != "r"
        try:
            inode = (
                self._create(path, permissions, handle)
                if fresh
                else self._find(path, readable, handle)
            )
            if inode.kind == DIRECTORY:
                raise FileError(errno.EISDIR, name)
        except FileExistsError:
            if kind == "x":
                raise
            fresh = False
            inode = self._find(path, readable, handle, permissions)
        try:
            file = File(
                *(self._data, self._metadata, self._keep_alive, inode, name),
                readable=readable,
                handle=handle,
                append=kind == "a",
            )
        except FireflyerError:
            if handle:
                self._metadata.act(Close(inode.number, handle), Inode)
            raise
        if kind == "w" and not fresh:
            with contextlib.ExitStack() as failed:
                failed.callback(file.close)
                file.truncate(0)
                failed.pop_all()
        if kind == "a":
            file.seek(0, os.SEEK_END)
        return file

    def open_inode(self, number: int, name: str) -> File:
        """Opens a file by its inode for reading; `name` is for errors.

        Raises:
            FileError: the errors of `os.open`.
        """
        inode = self._metadata.ask(Open(number), Inode)
        if inode.kind == DIRECTORY:
            raise FileError(errno.EISDIR, name)
        parts = (self._data, self._metadata, self._keep_alive, inode, name)
        return File(*parts, readable=True, handle=0)

    def _create(
        self, path: Path, permissions: int, handle: int, *, exclusive: bool = True
    ) -> Inode:
        mode = self._metadata.masked(permissions)
        return self._metadata.act(Create(ROOT, encoded(path), mode, exclusive, handle), Inode)

    def _find(
        self, path: Path, readable: bool, handle: int, permissions: int | None = None
    ) -> Inode:
        """Opens an existing file; with `permissions`, creates a missing target of a symlink."""
        call = Open(ROOT, encoded(path), readable, handle)
        if not handle:
            return self._metadata.ask(call, Inode)
        try:
            return self._metadata.act(call, Inode)
        except FileNotFoundError:
            if permissions is None:
                raise
            return self._create(path, permissions, handle, exclusive=False)

    # Bytes

    def read_many(
        self,
        requests: Sequence[tuple[File, int, Buffer]],
        *,
        deadline_s: float | None = None,
    ) -> list[int]:
        """Reads from files into memory, in one batch.

        Args:
            requests: (file open for reading, offset, contiguous writable memory: a bytearray, a
                numpy array, a torch tensor on the CPU, ...).

        Returns:
            Number of bytes read for each request. It is less than the size of the request's memory
            only if the file ends there.

        Raises:
            Corrupted, DeadlineExceeded, StorageError: the read failed.
            FileError: ESTALE: a file was removed. After any error, the contents of all memory
                are undefined.
        """
        places: dict[File, int] = {}
        rows = [(places.setdefault(file, len(places)), offset, to) for file, offset, to in requests]
        _check_files(places)
        return read_files(self._data, list(places), rows, _names(places), deadline_s)

    def write_many(
        self,
        requests: Sequence[tuple[File, int, Buffer]],
        *,
        deadline_s: float | None = None,
    ) -> int:
        """Writes memory to files in one durable batch. Ranges must not overlap.

        Args:
            requests: (file open for writing, offset, contiguous memory).

        Returns:
            Bytes written.

        Raises:
            NoSpace, DeadlineExceeded, StorageError: any part of the batch may have been written.
        """
        places: dict[File, int] = {}
        rows: list[tuple[int, int, Buffer]] = []
        ends: dict[File, int] = {}
        for file, offset, data in requests:
            _check_files((file,))
            memory = memory_of(data)
            size = memoryview(memory).nbytes
            file.check_end(offset, size)
            ends[file] = max(offset + size if size else 0, ends.get(file, 0))
            rows.append((places.setdefault(file, len(places)), offset, memory))
        maps = [file.target(0, ends[file]) for file in places]
        count = self._data.write(maps, rows, _names(places), deadline_s)
        for file, end in ends.items():
            if end:
                file.wrote(end)
        return count

    def read_rows(self, files: Sequence[File], rows: "NDArray[np.int64]") -> None:
        """Reads from files to addresses in memory.

        Args:
            files: files that are open for reading.
            rows: int64[n, 4], C order: index of the file, offset, bytes, address. The memory must
                stay valid until the call returns. Bytes beyond the end of a file are read as zeros.

        Raises:
            FireflyerError: the errors of `read_many`.
        """
        maps = [file.source().map for file in files]
        holes = self._data.read_rows(maps, rows, _names(files))
        for file in files:
            file.check_holes(holes)

    def read_summed(
        self, files: Sequence[File], rows: "NDArray[np.int64]", starts: Sequence[int]
    ) -> list[int]:
        """Reads like `read_rows`; returns the CRC32C of each row. `starts` has the initial CRC32C
        of each row.

        A row's CRC32C is combined from the CRC32Cs that the read verifies, so no byte is
        checksummed twice.
        """
        maps = [file.source().map for file in files]
        holes, sums = self._data.read_summed(maps, rows, starts, _names(files))
        for file in files:
            file.check_holes(holes)
        return sums

    def truncate(self, path: Path, length: int) -> None:
        """Truncates a file to `length`, or extends it with zeros."""
        with self.open(path, "rb+") as file:
            file.truncate(length)

    def storage(self, path: Path = "/") -> Fs3Storage:
        """Returns a `fireflyer.storage.Storage` over a directory; creates a missing directory."""
        return Fs3Storage(self, os.fsdecode(encoded(path)))

    def statistics(self) -> dict[str, int]:
        """Returns counters of the engine: bytes, frames, mismatches, connections."""
        return self._cluster.engine.statistics()

    def damaged_nodes(self) -> list[str]:
        """Returns the names of nodes that sent damaged bytes, which other nodes replaced."""
        return self._cluster.damaged_nodes()

    def close(self) -> None:
        """Closes the client.

        A file that is still open for writing keeps the last reported length.
        """
        self._keep_alive.close()
        self._metadata.close()
        self._cluster.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def connect(
    address: str | Sequence[str],
    *,
    metadata: str | Sequence[str] | None = None,
    secret_file: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
    timeout: float = TIMEOUT_S,
) -> Client:
    """Connects to a file system.

    Args:
        address: host:port of each manager.
        metadata: host:port of each metadata service; default: the managers' addresses.
        secret_file: file with the cluster's secret (mode 0600). Default: the file that
            FIREFLYER_FS_SECRET_FILE names, or the value of FIREFLYER_FS_SECRET.
        timeout: seconds to wait for a manager; the settings have the deadline of later calls.

    Raises:
        ConfigError: an address or the secret cannot be used.
        ProtocolMismatch: the manager has another secret or version.
        DeadlineExceeded: no manager answered before the timeout; the message has the addresses.
    """
    secret = find_secret(secret_file)
    return Client(address, metadata or address, secret, settings or Settings(), timeout)


def _check_files(files: Iterable[File]) -> None:
    for file in files:
        if not isinstance(file, File):
            raise TypeError(f"an open file of fs3 is required, not {type(file).__name__!r}")


def _names(files: Sequence[File] | dict[File, int]) -> str:
    first = next(iter(files), None)
    if first is None:
        return "nothing"
    return first.name if len(files) == 1 else f"{first.name} and {len(files) - 1} more"
