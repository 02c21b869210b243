"""Journal of validations: one JSON line for each entry, in `validator.jsonl` of the home.

Only the leading server writes it. An entry is on disk when `add` returns. A line that a crash cut
short is skipped and ended by the next entry.
"""

import os
from collections import deque
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
            if (entry := _decoded(line)) is not None:
                yield entry

    def of(self, node: str, most: int) -> list[Entry]:
        """Returns the newest entries of one node, oldest first, at most `most`."""
        # Encoding a text is deterministic, so only lines with these bytes can name the node.
        named, found = msgspec.json.encode(node), deque[Entry](maxlen=most)
        try:
            with self._path.open("rb") as file:
                for line in file:
                    if named in line and (entry := _decoded(line)) and entry.node == node:
                        found.append(entry)
        except FileNotFoundError:
            pass
        return list(found)

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


def _decoded(line: bytes) -> Entry | None:
    """Returns the entry of a line; None: a crash cut it short."""
    try:
        found: Entry = msgspec.json.decode(line, type=Entry)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found
