"""Journal of validations: one JSON line for each entry, in `validator.jsonl` of the home.

Only the leading server writes it. An entry is on disk when `add` returns. Readers skip a line that
a crash cut short, and the next entry begins on a new line.

The journal keeps the newest KEPT entries of each node. It is compacted when its size has doubled
since the last compaction: one summary, which contains the resulting state, replaces a node's older
entries. Compaction therefore changes no node's state. The new file replaces the old file by a
rename, so a crash leaves one of the two.
"""

import os
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fireflyer.hai.model.validations import Entry
from fireflyer.hai.validation.policy import NodeState, Summary, fold
from fireflyer.log import get_logger

NAME = "validator.jsonl"

KEPT = 120
"""Maximum entries of a node after a compaction; enough for the starts and ends of a year of weekly
validations."""

LEAST_BYTES = 8 << 20
"""Size below which the journal is not compacted."""

_log = get_logger("hai")


class Journal:
    """The journal of one home."""

    def __init__(self, home: Path) -> None:
        self._path = home / NAME
        self._most_bytes = LEAST_BYTES

    def read(self) -> Iterator[Entry | Summary]:
        """Yields all entries, oldest first; a node's summary comes before its entries."""
        for _, entry in self._lines():
            yield entry

    def of(self, node: str, most: int) -> list[Entry]:
        """Returns the newest entries of one node, oldest first, at most `most`."""
        # The encoding of a text is deterministic, so only lines with these bytes can name the node.
        named, found = msgspec.json.encode(node), deque[Entry](maxlen=most)
        for _, entry in self._lines(named):
            if entry.node == node and not isinstance(entry, Summary):
                found.append(entry)
        return list(found)

    def add(self, entry: Entry) -> None:
        """Appends an entry.

        Raises:
            OSError: the entry cannot be written.
        """
        new = not self._path.exists()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        file = os.open(self._path, flags, 0o600)
        try:
            # A newline first ends a line that a crash cut short.
            _write(file, (b"" if new else b"\n") + msgspec.json.encode(entry))
            os.fsync(file)
            size = os.fstat(file).st_size
        finally:
            os.close(file)
        if size > self._most_bytes:
            self._compact(size)

    def _compact(self, size: int) -> None:
        """Compacts the journal. After a failure, `add` retries once the file has doubled."""
        try:
            size = self._compacted()
        except OSError as error:
            _log.warning("the journal %s cannot be compacted: %s", self._path, error)
        self._most_bytes = max(LEAST_BYTES, 2 * size)

    def _compacted(self) -> int:
        """Replaces the file by a file with at most KEPT entries per node; returns the new size in
        bytes."""
        surplus = Counter(entry.node for _, entry in self._lines())
        surplus.subtract(dict.fromkeys(surplus, KEPT))
        states: dict[str, NodeState] = {}
        part = self._path.with_name(f"{NAME}.part")
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            left = +surplus
            for _, entry in self._lines():
                if left[entry.node] > 0:
                    left[entry.node] -= 1
                    fold(states, entry)
            for node, state in states.items():
                _write(file, msgspec.json.encode(Summary(node=node, state=state)) + b"\n")
            left = +surplus
            for line, entry in self._lines():
                if left[entry.node] > 0:
                    left[entry.node] -= 1
                else:
                    _write(file, line + b"\n")
            os.fsync(file)
            size = os.fstat(file).st_size
            part.replace(self._path)
        finally:
            os.close(file)
            part.unlink(missing_ok=True)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return size

    def _lines(self, named: bytes = b"") -> Iterator[tuple[bytes, Entry | Summary]]:
        """Yields each line that contains `named`, with its entry; skips torn lines."""
        try:
            with self._path.open("rb") as file:
                for line in file:
                    if named in line and (entry := _decoded(line)) is not None:
                        yield line.rstrip(b"\n"), entry
        except FileNotFoundError:
            return


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _decoded(line: bytes) -> Entry | Summary | None:
    """Returns the entry of a line; None: a crash cut the line short."""
    try:
        found: Entry | Summary = msgspec.json.decode(line, type=Entry | Summary)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found
