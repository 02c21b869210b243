"""One rank's data file: which pieces it gets, their places, and their bytes as the copy brings them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fireflyer._native import crc32
from fireflyer.checkpoint.boxes import Box
from fireflyer.checkpoint.manifest import CRC_BYTES
from fireflyer.checkpoint.staging import ALIGNMENT, Staged, Table
from fireflyer.checkpoint.tree import Piece

_CHUNK_BYTES = 4 << 20
_PAGE_BYTES = 4096
"""Chunks end at multiples of it in the arena, so that where places are the same in the file the storage can
write from there."""

SERIES_SAVES = 16
"""Of so many incremental saves one writes everything: no byte on storage is needed for longer."""

_OLDER_PER_KEPT, _OLDER_PER_ALL = 4, 2
"""Older files may be so many times as large as the pieces in them that are still named, and as all pieces."""


class Written(NamedTuple):
    """Where the pieces of a table are, by section."""

    pieces: list[Piece]
    files: dict[str, int]
    """Bytes of each file that they name."""
    table: Table
    filling: int
    """Of the arena; see Stager."""
    since_whole: int = 0
    """Saves since the last that wrote everything; that one has 0."""


class Image:
    """A data file that is written while the copy runs.

    With what the last save wrote, it holds only the sections that have changed since; which these are
    is known only when the whole copy is over. It holds all of them once in SERIES_SAVES saves, and when too
    little of the older files would still be named.
    """

    def __init__(self, table: Table, staged: Staged, file: str, before: Written | None) -> None:
        self.file = file
        self._table = table
        self._staged = staged
        self._before = before if before is not None and _may_extend(before, staged) else None
        self._places: dict[int, int] = {}
        """In the file, by section."""
        self._crcs: dict[int, tuple[int, ...]] = {}
        self._spans = self._find_spans()
        self.size = self._place()
        """Bytes of the file; 0: there is none."""

    def _find_spans(self) -> list[range]:
        """The sections to write, those that follow one another together."""
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
        """The file's bytes in order, each as soon as it is in the arena; finds the checksums on the way."""
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
        """What is where, once all chunks have been taken.

        Args:
            boxes: of the sections, in their whole tensors.
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
    """Whether only what has changed needs to be written. Waits for the copy."""
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
