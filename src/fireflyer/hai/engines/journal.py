"""The files of an attempt. The journal of a node: one JSON record a line, appended before anyone is told."""

import os
from pathlib import Path

import msgspec

from fireflyer.errors import Corrupted
from fireflyer.hai.engines.messages import Record


def journal_path(directory: Path, node: str) -> Path:
    return directory / f"{node}.journal"


def doors_path(directory: Path) -> Path:
    """Where the members of an elastic attempt say at which doors newcomers may knock. Until it is there, the
    attempt is as any other."""
    return directory / "doors"


class Journal:
    """Appends records. Not synced: what a crash of the machine would lose ended with it."""

    def __init__(self, path: Path, *, again: bool = False) -> None:
        """A new one, or `again`: one that is continued, without its torn last line.

        Raises:
            OSError: if it cannot be written.
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
            OSError: if it could not (a full disk); the journal may then end in a torn line.
        """
        line = msgspec.json.encode(record) + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]

    def close(self) -> None:
        os.close(self._fd)


def read_journal(path: Path) -> list[Record]:
    """The records of a journal, without a torn last line; none where there is no file.

    Raises:
        Corrupted: if a whole line is no record.
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
        raise Corrupted(f"{path} holds a line that is no record: {error}") from error
