"""What the files of a soak must hold: every byte follows from (file, version, place), none is kept.

A record says what was acknowledged, and what was asked for without an answer: of that each chunk may be
old or new, for ever, since a late copy of the request could still be done. Such a file is only looked at.
"""

import msgspec
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
SHARED = "/shared"
SLOT = 5000
"""Bytes of a part of the shared file: neighbours in a block have other writers."""
ODD = np.uint64(0x9E3779B97F4A7C15)


def content(file: int, version: int, offset: int, size: int) -> Bytes:
    """The bytes that version `version` of a file has at `offset`: uint8[size]; no two versions agree."""
    first, last = offset // 8, (offset + size + 7) // 8
    words = np.arange(first, last, dtype=np.uint64) * ODD
    words ^= np.uint64((file << 24 | version) * 0xD1342543DE82EF95 % (1 << 64))
    return words.view(np.uint8)[offset - 8 * first :][:size]


class Written(msgspec.Struct, array_like=True):
    """A write of version `version`."""

    version: int
    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


class Record(msgspec.Struct):
    """A file.

    Attributes:
        number: what its contents are made of.
        names: one, or the old and the new one of a rename in doubt.
        writes: acknowledged, in order.
        pending: asked for and not answered, the last one.
        length: what others must see at least, said by the last `close` or `fsync` that returned.
        may_be_gone: its creation or removal was not answered.
        under: the other file whose rename, not answered, may have taken this one's name from it.
    """

    number: int
    names: list[str]
    writes: list[Written] = []
    pending: Written | None = None
    length: int = 0
    versions: int = 0
    may_be_gone: bool = False
    under: str = ""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def end(self) -> int:
        """Of what was acknowledged."""
        return max((one.end for one in self.writes), default=0)

    @property
    def doubtful(self) -> bool:
        return bool(self.pending or self.may_be_gone or self.under) or len(self.names) > 1

    def plan(self, offset: int, size: int) -> Bytes:
        """Makes a write pending and returns its bytes."""
        self.versions += 1
        self.pending = Written(self.versions, offset, size)
        return content(self.number, self.versions, offset, size)

    def acknowledged(self) -> None:
        """The pending write was answered."""
        assert self.pending
        self.writes.append(self.pending)
        self.pending = None

    def lengths(self) -> tuple[int, int]:
        """The smallest and the largest that may be seen."""
        return self.length, max(self.end, self.pending.end if self.pending else 0)

    def rendered(self, *, new: bool) -> Bytes:
        """Its bytes to the largest length; what was never written is zeros. `new`: with what is pending."""
        image = np.zeros(self.lengths()[1], np.uint8)
        for one in [*self.writes, *([self.pending] if new and self.pending else [])]:
            made = content(self.number, one.version, one.offset, one.size)
            image[one.offset : one.end] = made
        return image

    def wrong(self, seen: Bytes, chunk: int, offset: int = 0) -> str:
        """What is wrong with bytes that were read at `offset`, up to the end that was seen; "" if nothing."""
        low, high = self.lengths()
        if not offset + len(seen) <= high:
            return f"{offset + len(seen)} bytes long, not {low} to {high}"
        old = self.rendered(new=False)[offset:][: len(seen)]
        if np.array_equal(seen, old):
            return ""
        new = self.rendered(new=True)[offset:][: len(seen)]
        at = 0
        while at < len(seen):
            to = (offset + at) // chunk * chunk + chunk - offset
            part = seen[at:to]
            if not np.array_equal(part, old[at:to]) and not np.array_equal(part, new[at:to]):
                return self._told(seen, old, new, at, min(to, len(seen)), offset)
            at = to
        return ""

    def _told(self, seen: Bytes, old: Bytes, new: Bytes, at: int, to: int, offset: int) -> str:
        bad = np.flatnonzero((seen[at:to] != old[at:to]) & (seen[at:to] != new[at:to]))
        first = offset + at + int(bad[0]) if len(bad) else offset + at
        zeros = int(np.count_nonzero(seen[at:to][bad] == 0)) if len(bad) else 0
        versions = [w.version for w in self.writes if w.offset <= first < w.end]
        return (
            f"{len(bad)} wrong bytes in the chunk at {offset + at}, from {first} on, {zeros} of them "
            f"zeros; written by versions {versions}, pending {self.pending}"
        )


class Sample(msgspec.Struct, array_like=True):
    """One operation of a client: times of the monotonic clock; `error` is a class, or ""."""

    kind: str
    begun: float
    ended: float
    error: str


class Manifest(msgspec.Struct):
    """What one client did and knows.

    Attributes:
        folders: its directories.
        files: that are there, or may be.
        slots: parts of the file that all share, each with the writes of this client alone.
        lost: what it found to be wrong itself.
    """

    folders: list[str]
    files: list[Record]
    slots: list[Record]
    samples: list[Sample]
    lost: list[str]
    written: int
    read: int
