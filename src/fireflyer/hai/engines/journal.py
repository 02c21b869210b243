"""Files of an attempt. A node's journal holds one JSON record a line, appended before it is
published."""

import os
from pathlib import Path

import msgspec

from fireflyer.errors import Corrupted
from fireflyer.hai.engines.messages import Record


def journal_path(directory: Path, node: str) -> Path:
    return directory / f"{node}.journal"


def doors_path(directory: Path) -> Path:
    """Returns the path of the file in which members of an elastic attempt publish where newcomers
    connect. Until the file exists, the attempt is like any other."""
    return directory / "doors"


class Journal:
    """Appends records. Does not sync: a crash of the machine also ends the processes that lost
    records describe."""

    def __init__(self, path: Path, *, again: bool = False) -> None:
        """Creates a journal, or with `again` continues one, without its torn last line.

        Raises:
            OSError: if the journal cannot be written.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._fd = os.open(path, flags if again else flags | os.O_TRUNC, 0o600)
        if again:
            data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
            if not data.endswith(b"\n"):
                os.ftruncate(self._fd, data.rfind(b"\n") + 1)

    def append(self, record: Record) -> None:
        """Writes the whole line.

        Raises:
            OSError: if the write fails (a full disk); the journal may then end in a torn line.
        """
        line = msgspec.json.encode(record) + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]

    def close(self) -> None:
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
