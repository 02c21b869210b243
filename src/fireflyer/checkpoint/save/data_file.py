"""One rank's data file: its pieces and their places, written while the copy into the arena runs."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fireflyer._native import crc32
from fireflyer.checkpoint.directory.manifest import CRC_BYTES
from fireflyer.checkpoint.save.staging import ALIGNMENT, Staged, Table
from fireflyer.checkpoint.state.boxes import Box
from fireflyer.checkpoint.state.tree import Piece

_CHUNK_BYTES = 4 << 20
_PAGE_BYTES = 4096
"""Alignment of chunk ends in the arena. If file offsets have the same alignment, the storage can
write directly from the arena."""

SERIES_SAVES = 16
"""Number of saves in a series. The first save of a series writes everything; the other saves refer
to files of their series only."""

_OLDER_PER_KEPT, _OLDER_PER_ALL = 4, 2
"""Limits of the total size of the older files to which an incremental save refers. _OLDER_PER_KEPT
is the maximum ratio to the size of the pieces still used in these files. _OLDER_PER_ALL is the
maximum ratio to the size of all pieces."""


class Written(NamedTuple):
    """Places of the pieces of a table, by section."""

    pieces: list[Piece]
    files: dict[str, int]
    """Size in bytes of each file to which the pieces refer."""
    table: Table
    filling: int
    """Value of the arena's filling counter; see Stager."""
    since_whole: int = 0
    """Number of saves since the last save that wrote everything; 0 for that save itself."""


class Image:
    """Data file that is written while the copy into the arena runs.

    If `before` is the result of the last save, the file holds only the sections that have changed
    since. These sections are known only when the whole copy has ended. The file holds all sections
    once in SERIES_SAVES saves, and also when too little of the older files would still be used.
    """

    def __init__(self, table: Table, staged: Staged, file: str, before: Written | None) -> None:
        self.file = file
        self._table = table
        self._staged = staged
        self._before = before if before is not None and _may_extend(before, staged) else None
        self._places: dict[int, int] = {}
        """Byte offset in the file, by section."""
        self._crcs: dict[int, tuple[int, ...]] = {}
        self._spans = self._find_spans()
        self.size = self._place()
        """Size of the file in bytes; 0 if there is no file."""

    def _find_spans(self) -> list[range]:
        """Returns the sections to write; each range holds consecutive sections."""
        spans: list[range] = []
        for index in range(len(self._table.sections)):
            if self._before is not None and not self._staged.changed[index]:
                continue
            if spans and spans[-1].stop == index:
                spans[-1] = range(spans[-1].start, index + 1)
            else:
                spans.append(range(index, index + 1))
        return spans

    def _place(self) -> int:
        end = 0
        sections = self._table.sections
        for span in self._spans:
            shift = -(-end // ALIGNMENT) * ALIGNMENT - sections[span.start].offset
            for index in span:
                self._places[index] = sections[index].offset + shift
            end = sections[span[-1]].offset + sections[span[-1]].nbytes + shift
        return end

    def chunks(self) -> Iterator[memoryview | bytes]:
        """Yields the file's bytes in order once they are in the arena; computes checksums."""
        data, sections = self._staged.data, self._table.sections
        written = 0
        for span in self._spans:
            if written % ALIGNMENT:
                yield bytes(-written % ALIGNMENT)
            begin = end = sections[span.start].offset
            for index in span:
                section, crcs = sections[index], []
                for first in range(section.offset, section.offset + section.nbytes, CRC_BYTES):
                    end = min(first + CRC_BYTES, section.offset + section.nbytes)
                    self._staged.wait(end)
                    crcs.append(crc32(data[first:end]))
                    if end - begin >= _CHUNK_BYTES:
                        cut = end - end % _PAGE_BYTES
                        yield data[begin:cut]
                        begin = cut
                self._crcs[index] = tuple(crcs)
            if end > begin:
                yield data[begin:end]
            written = self._places[span[-1]] + sections[span[-1]].nbytes

    def written(self, boxes: Sequence[Box]) -> Written:
        """Returns the places of all pieces; call it after all chunks have been consumed.

        Args:
            boxes: boxes of the sections, in whole-tensor coordinates.
        """
        pieces = []
        files = {self.file: self.size}
        for index, (section, box) in enumerate(zip(self._table.sections, boxes, strict=True)):
            if index in self._places:
                piece = Piece(
                    offsets=box.offsets,
                    shape=box.shape,
                    file=self.file,
                    offset=self._places[index],
                    length=section.nbytes,
                    crc32=self._crcs.get(index, ()),
                )
            else:
                assert self._before is not None
                piece = self._before.pieces[index]
            pieces.append(piece)
        if self._before is not None:
            files |= self._before.files
        named = {piece.file: files[piece.file] for piece in pieces if piece.length}
        since_whole = 0 if self._before is None else self._before.since_whole + 1
        return Written(pieces, named, self._table, self._staged.filling, since_whole)


def _may_extend(before: Written, staged: Staged) -> bool:
    """Returns True if it is enough to write the changed sections. Waits for the copy."""
    staged.wait()
    if before.since_whole + 1 >= SERIES_SAVES:
        return False
    kept = [
        piece
        for piece, changed in zip(before.pieces, staged.changed, strict=True)
        if not changed and piece.length
    ]
    older = sum(before.files[file] for file in {piece.file for piece in kept})
    kept_bytes = sum(piece.length for piece in kept)
    all_bytes = sum(piece.length for piece in before.pieces)
    return older <= min(_OLDER_PER_KEPT * kept_bytes, _OLDER_PER_ALL * all_bytes)
