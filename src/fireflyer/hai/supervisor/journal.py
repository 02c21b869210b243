"""Files of an attempt. A node's journal holds one JSON record a line, appended before it is
published."""

import contextlib
import os
from pathlib import Path

import msgspec

from fireflyer.errors import Corrupted
from fireflyer.hai.supervisor.messages import Record


def journal_path(directory: Path, node: str) -> Path:
    return directory / f"{node}.journal"


def members_path(directory: Path) -> Path:
    """Returns the path of the file in which members of an elastic attempt publish where newcomers
    connect. Until the file exists, the attempt is like any other."""
    return directory / "doors"


RESERVE_BYTES = 32 << 10
"""Bytes that a journal holds ahead, so that an attempt ends as it did though the disk is full."""


class Journal:
    """Appends records. Does not sync: a crash of the machine also ends the processes that lost
    records describe.

    Zeros follow the last line, in which the next lines are written; readers take them for a torn
    line. `close` gives them back."""

    def __init__(self, path: Path, *, again: bool = False) -> None:
        """Creates a journal, or with `again` continues one, without its torn last line.

        Raises:
            OSError: if the journal cannot be written.
        """
        flags = os.O_RDWR | os.O_CREAT
        self._fd = os.open(path, flags if again else flags | os.O_TRUNC, 0o600)
        self._end = 0
        if again:
            data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
            self._end = data.rfind(b"\n") + 1
            os.ftruncate(self._fd, self._end)
        self._held = self._end  # end of the zeros
        self._hold()

    def _hold(self) -> None:
        """Writes zeros ahead, unless enough are left or the disk is full."""
        if self._held - self._end < RESERVE_BYTES // 2:
            with contextlib.suppress(OSError):
                while self._held < self._end + RESERVE_BYTES:
                    more = bytes(self._end + RESERVE_BYTES - self._held)
                    self._held += os.pwrite(self._fd, more, self._held)

    def append(self, record: Record) -> None:
        """Writes the whole line.

        Raises:
            OSError: if the write fails (a full disk); the journal may then end in a torn line.
        """
        line = msgspec.json.encode(record) + b"\n"
        at, end = self._end, self._end + len(line)
        while at < end:
            at += os.pwrite(self._fd, line[at - end :], at)
        self._end, self._held = end, max(self._held, end)
        self._hold()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._end)
        os.close(self._fd)


def read_journal(path: Path) -> list[Record]:
    """Returns the records of a journal, without a torn last line; an empty list if there is no
    file.

    Raises:
        Corrupted: if a whole line is not a record.
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
