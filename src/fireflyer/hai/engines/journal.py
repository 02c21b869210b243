"""The journal of an attempt on a node: one JSON record a line, appended before anyone is told."""

import os
from pathlib import Path

import msgspec

from fireflyer.errors import Corrupted
from fireflyer.hai.engines.messages import Record


def journal_path(directory: Path, node: str) -> Path:
    return directory / f"{node}.journal"


class Journal:
    """Appends records. Not synced: what a crash of the machine would lose ended with it."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)

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
