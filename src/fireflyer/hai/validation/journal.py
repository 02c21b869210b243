"""Journal of validations: one JSON line for each entry, in `validator.jsonl` of the home.

Only the leading server writes it. An entry is on disk when `add` returns. A line that a crash cut
short is skipped and ended by the next entry.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fireflyer.hai.validation.policy import Entry

NAME = "validator.jsonl"


class Journal:
    """The journal of one home."""

    def __init__(self, home: Path) -> None:
        self._path = home / NAME

    def read(self) -> Iterator[Entry]:
        """Yields all entries, oldest first."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        for line in data.split(b"\n"):
            try:
                yield msgspec.json.decode(line, type=Entry)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue

    def add(self, entry: Entry) -> None:
        """Appends an entry.

        Raises:
            OSError: it cannot be written.
        """
        new = not self._path.exists()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        file = os.open(self._path, flags, 0o600)
        try:
            # A newline first ends a line that a crash cut short.
            data = (b"" if new else b"\n") + msgspec.json.encode(entry)
            while data:
                data = data[os.write(file, data) :]
            os.fsync(file)
        finally:
            os.close(file)
