"""Files of an attempt. A node's journal has one JSON record per line; a record is appended before
it is published."""

import contextlib
import os
from pathlib import Path

import msgspec

from fireflyer.errors import Corrupted
from fireflyer.hai.supervisor.messages import Record


def journal_path(directory: Path, node: str) -> Path:
    return directory / f"{node}.journal"


def members_path(directory: Path) -> Path:
    """Returns the path of the file in which members of an elastic attempt publish the addresses for
    newcomers (ranks that join later). Until the file exists, the attempt accepts no newcomers."""
    return directory / "doors"


RESERVE_BYTES = 32 << 10
"""Bytes that a journal reserves, so that the end of an attempt can be recorded when the disk is
full."""


class Journal:
    """Appends records to a journal. Does not sync, because a crash of the machine also ends the
    processes that the lost records describe.

    Zeros after the last line reserve space, which later lines overwrite. Readers take the zeros for
    a torn line; `close` removes them.
    """

    def __init__(self, path: Path, *, again: bool = False) -> None:
        """Creates a journal. With `again`, continues an existing journal after removing a torn last
        line.

        Raises:
            OSError: the journal cannot be written.
        """
        flags = os.O_RDWR | os.O_CREAT
        self._fd = os.open(path, flags if again else flags | os.O_TRUNC, 0o600)
        self._end = 0
        if again:
            data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
            self._end = data.rfind(b"\n") + 1
            os.ftruncate(self._fd, self._end)
        self._reserved_to = self._end  # end of the zeros
        self._reserve()

    def _reserve(self) -> None:
        """Reserves space by writing zeros, unless enough zeros are left or the disk is full."""
        if self._reserved_to - self._end < RESERVE_BYTES // 2:
            with contextlib.suppress(OSError):
                while self._reserved_to < self._end + RESERVE_BYTES:
                    more = bytes(self._end + RESERVE_BYTES - self._reserved_to)
                    self._reserved_to += os.pwrite(self._fd, more, self._reserved_to)

    def append(self, record: Record) -> None:
        """Writes the record as one line.

        Raises:
            OSError: the write failed, for example on a full disk; the journal may then end in a
                torn line.
        """
        line = msgspec.json.encode(record) + b"\n"
        at, end = self._end, self._end + len(line)
        while at < end:
            at += os.pwrite(self._fd, line[at - end :], at)
        self._end, self._reserved_to = end, max(self._reserved_to, end)
        self._reserve()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._end)
        os.close(self._fd)


def read_journal(path: Path) -> list[Record]:
    """Returns the records of a journal, without a torn last line; an empty list if the file does
    not exist.

    Raises:
        Corrupted: a complete line is not a record.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    decoder = msgspec.json.Decoder(Record)
    whole = data[: data.rfind(b"\n") + 1]
    try:
        return [decoder.decode(line) for line in whole.splitlines()]
    except msgspec.MsgspecError as error:
        raise Corrupted(f"{path} has an invalid line: {error}") from error
